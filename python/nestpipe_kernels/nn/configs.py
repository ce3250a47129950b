"""Settings of one embedding table: TorchRec's fields in TorchRec's order, then ours as keywords."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor

from nestpipe_kernels.nn.policies import check_policies
from nestpipe_kernels.policy import LFU, LRU, TTL, MinFrequency, Probability, Score
from nestpipe_kernels.store import DeviceTier, FileTier
from nestpipe_kernels.store.device_tier import check_device_rules
from nestpipe_kernels.types import UNBOUNDED, DataType, PoolingType, SparseOptimizer

__all__ = ["EmbeddingBagConfig", "EmbeddingConfig", "TableConfig", "check_tables", "embedding_names"]

_E = TypeVar("_E", bound=Enum)


@dataclass
class TableConfig:
    """What pooled and unpooled tables have in common.

    Attributes:
        num_embeddings: size of the vocabulary, ids 0 .. num_embeddings - 1; or UNBOUNDED: any int64 is a key.
        embedding_dim: floats per embedding, >= 1.
        name: the table's name; unique in a collection. Initial values depend on it.
        data_type: storage type of the embeddings: FP32, FP16 or BF16 (also by name, or TorchRec's). Outputs, gradients
            and optimizer state are float32 whatever it is. Tables of different types live in different stores.
        feature_names: features that look up this table; default [name].
        weight_init_max, weight_init_min: bounds of uniform initial values; default +-sqrt(1 / num_embeddings), for
            an open vocabulary +-1 / sqrt(embedding_dim).
        init_fn: fills a float32 [num_embeddings, embedding_dim] tensor in place; fixed vocabularies only. It runs under
            a generator seeded from (seed, table name), so that all ranks agree.
        optimizer: update rule of the rows; default the collection's.
        init: an `nk.init` object, in place of the weight_init bounds and init_fn.
        capacity: most rows the table may have over all ranks; default no limit. Each rank has a fixed share of it.
        capacity_bytes: the same in bytes over all ranks: rows with optimizer state, metadata (40 bytes), index (24
            bytes) and what eviction's `slack` holds back. Not together with `capacity`.
        admission: an `nk.policy` rule: which new keys get a row. Default: all.
        eviction: an `nk.policy` rule: which rows go to make room. Needs a capacity (TTL does not). Default: none go,
            and a batch with more new keys than there is room for is an error; with an admission or eviction rule
            such a key is refused alone.
        default_row: an `nk.init` object: what a key without a row reads (not admitted, refused, or seen in evaluation
            only). Default: what its row would start from.
        stochastic_rounding: updates round to `data_type` up or down by chance, in proportion, so that small updates are
            not lost; the chance is a function of (seed, table, key, step, element). Not with FP32.
        tier: where rows lie. A `FileTier`: in a file, with only those used last in memory, for tables larger than
            memory. A `DeviceTier`: in an accelerator's memory. Default: all in host memory. Tables with different tiers
            live in different stores.
        lr_scale: multiplies the optimizer's learning rate for this table.
        max_grad_norm: clips the gradient of each row, summed over the batch and averaged over the ranks, to this
            Euclidean length before the update. Default: none.
        trainable: False freezes the table: no gradients, no updates. Admission and eviction go on: a row that was
            loaded and evicted comes back with initial values, so leave eviction out where loaded values must stay.
        padding_idx: a key that is never looked up: it reads zeros, is not counted in a mean and gets no gradient. For
            a fixed vocabulary a negative index counts from the end, as in torch.nn.Embedding.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], Tensor | None] | None = None
    optimizer: SparseOptimizer | None = field(default=None, kw_only=True)
    init: Any = field(default=None, kw_only=True)
    capacity: int | None = field(default=None, kw_only=True)
    capacity_bytes: int | None = field(default=None, kw_only=True)
    admission: MinFrequency | Probability | None = field(default=None, kw_only=True)
    eviction: LRU | LFU | TTL | Score | None = field(default=None, kw_only=True)
    default_row: Any = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)
    tier: FileTier | DeviceTier | None = field(default=None, kw_only=True)
    lr_scale: float = field(default=1.0, kw_only=True)
    max_grad_norm: float | None = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)
    padding_idx: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.validate()

    @property
    def is_open(self) -> bool:
        """Whether any int64 is a key (`num_embeddings` is UNBOUNDED)."""
        return self.num_embeddings == UNBOUNDED

    @property
    def padding_key(self) -> int | None:
        """`padding_idx` as the key it stands for."""
        if self.padding_idx is None or self.is_open or self.padding_idx >= 0:
            return self.padding_idx
        return self.num_embeddings + self.padding_idx

    def get_weight_init_min(self) -> float:
        """Lower bound of uniform initial values."""
        return -self._default_bound() if self.weight_init_min is None else float(self.weight_init_min)

    def get_weight_init_max(self) -> float:
        """Upper bound of uniform initial values."""
        return self._default_bound() if self.weight_init_max is None else float(self.weight_init_max)

    def validate(self) -> None:
        """Check every field and put defaults in place.

        Raises:
            TypeError: a field of the wrong type.
            ValueError: a value out of range, or fields that contradict each other.
        """
        where = f"table {self.name!r}"
        self.data_type = _member(DataType, self.data_type, where, "data_type")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(f"{where}: stochastic_rounding must be True or False, got {self.stochastic_rounding!r}")
        if self.stochastic_rounding and self.data_type is DataType.FP32:
            raise ValueError(
                f"{where}: stochastic_rounding needs data_type FP16 or BF16, got FP32, which the arithmetic is done in"
            )
        if not isinstance(self.tier, FileTier | DeviceTier | None):
            raise TypeError(f"{where}: tier must be a FileTier, a DeviceTier or None, got {self.tier!r}")
        if not _is_integer(self.num_embeddings) or (self.num_embeddings < 1 and not self.is_open):
            raise ValueError(
                f"{where}: num_embeddings must be an integer >= 1 or UNBOUNDED, got {self.num_embeddings!r}"
            )
        if not _is_integer(self.embedding_dim) or self.embedding_dim < 1:
            raise ValueError(f"{where}: embedding_dim must be an integer >= 1, got {self.embedding_dim!r}")
        if not self.feature_names and self.name:
            self.feature_names = [self.name]
        self._validate_initial_values(where)
        check_policies(self, where)
        if isinstance(self.tier, DeviceTier):
            check_device_rules(where, self.embedding_dim, self.admission, self.eviction, self.init, self.default_row)
        if not (math.isfinite(self.lr_scale) and self.lr_scale >= 0):
            raise ValueError(f"{where}: lr_scale must be finite and >= 0, got {self.lr_scale!r}")
        self._validate_clipping(where)
        self._validate_padding(where)

    def _default_bound(self) -> float:
        return math.sqrt(1.0 / (self.embedding_dim if self.is_open else self.num_embeddings))

    def _validate_initial_values(self, where: str) -> None:
        bounds = self.weight_init_min is not None or self.weight_init_max is not None
        given = [
            name for name, on in (("weight_init_min/max", bounds), ("init_fn", self.init_fn), ("init", self.init)) if on
        ]
        if len(given) > 1:
            raise ValueError(f"{where}: {' and '.join(given)} contradict each other: give one of them")
        if self.init_fn is not None and self.is_open:
            raise ValueError(
                f"{where}: init_fn needs a fixed num_embeddings; a table with an open vocabulary takes init=, "
                "for example init=nk.init.Uniform(-0.01, 0.01)"
            )
        if self.get_weight_init_min() > self.get_weight_init_max():
            raise ValueError(
                f"{where}: weight_init_min {self.get_weight_init_min()} is above "
                f"weight_init_max {self.get_weight_init_max()}"
            )

    def _validate_clipping(self, where: str) -> None:
        norm = self.max_grad_norm
        number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if norm is not None and not (number and math.isfinite(norm) and norm > 0):
            raise ValueError(f"{where}: max_grad_norm must be finite and > 0, or None, got {norm!r}")

    def _validate_padding(self, where: str) -> None:
        if self.padding_idx is None:
            return
        if not _is_integer(self.padding_idx):
            raise TypeError(f"{where}: padding_idx must be an integer or None, got {self.padding_idx!r}")
        low, high = (-(2**63), 2**63) if self.is_open else (-self.num_embeddings, self.num_embeddings)
        if not low <= self.padding_idx < high:
            raise ValueError(f"{where}: padding_idx must be in [{low}, {high}), got {self.padding_idx}")


@dataclass
class EmbeddingBagConfig(TableConfig):
    """A table whose rows are pooled per bag.

    Attributes:
        pooling: SUM, MEAN or MAX of a bag's rows; an empty bag gives zeros.
    """

    pooling: PoolingType = PoolingType.SUM

    def validate(self) -> None:
        """See TableConfig.validate; also checks `pooling`."""
        super().validate()
        where = f"table {self.name!r}"
        self.pooling = _member(PoolingType, self.pooling, where, "pooling")
        if self.pooling is PoolingType.NONE:
            raise ValueError(f"{where}: pooling must be SUM, MEAN or MAX, got NONE: use an EmbeddingCollection instead")


@dataclass
class EmbeddingConfig(TableConfig):
    """A table that gives one embedding per key, without pooling."""


def check_tables(tables: Sequence[TableConfig], kind: type[TableConfig], owner: str) -> None:
    """Check the tables of one collection (`owner`) against each other.

    Raises:
        TypeError: an entry is no `kind`.
        ValueError: no tables, an unnamed one, two of the same name, or a feature twice in one table.
    """
    if not tables:
        raise ValueError(f"{owner}: tables is empty; give at least one {kind.__name__}")
    names: set[str] = set()
    for config in tables:
        if not isinstance(config, kind):
            raise TypeError(f"{owner}: tables must be {kind.__name__} objects, got {type(config).__name__}")
        config.validate()
        if not config.name:
            raise ValueError(f"{owner}: every table needs a name; one with features {config.feature_names} has none")
        if config.name in names:
            raise ValueError(f"Duplicate table name {config.name}")
        names.add(config.name)
        repeated = sorted({name for name in config.feature_names if config.feature_names.count(name) > 1})
        if repeated:
            raise ValueError(f"table {config.name!r}: feature_names holds {', '.join(repeated)} more than once")


def embedding_names(tables: Sequence[TableConfig]) -> list[list[str]]:
    """Names of the outputs per table: the feature, or feature@table where several tables serve the feature."""
    uses: dict[str, int] = {}
    for config in tables:
        for name in config.feature_names:
            uses[name] = uses.get(name, 0) + 1
    return [[f"{name}@{config.name}" if uses[name] > 1 else name for name in config.feature_names] for config in tables]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _member(kind: type[_E], value: Any, where: str, what: str) -> _E:
    """`value` as a member of `kind`; strings and other libraries' enums of the same values are understood."""
    if isinstance(value, kind):
        return value
    try:
        return kind(getattr(value, "value", value))
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{where}: unknown {what} {value!r}: choose one of {known}") from None
