"""What the drop-ins for torch.nn.Embedding and torch.nn.EmbeddingBag share: one table in a store, `weight`, padding.

A lookup gets a tensor of ids, which asks for their rows as they are, or a JaggedTensor, which asks for pooled bags. A
module that shares another one's table (`tied_to`) passes its lookups on to that one, which alone is an embedding module
to a pipeline. Reading `weight` in a step is a lookup of all ids, so its gradients count like any others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.nn.compiled import traced_lookup
from nestpipe_kernels.nn.configs import EmbeddingConfig, TableConfig
from nestpipe_kernels.nn.plan import Samples, checked_values
from nestpipe_kernels.nn.sharding import owned_keys
from nestpipe_kernels.nn.sparse_tables import SparseTables
from nestpipe_kernels.nn.table_weight import TableWeight
from nestpipe_kernels.nn.weights import write_embeddings
from nestpipe_kernels.optim import SGD, SparseOptimizerGroup
from nestpipe_kernels.types import UNBOUNDED, LookupCall, PoolingType, RowStore, SparseOptimizer, StoreKeys

__all__ = ["SharedAccess", "TableModule", "check_arguments", "matrix_shape", "table_config"]

_SETTINGS: tuple[str, ...] = (
    *("data_type", "init", "capacity", "capacity_bytes", "admission", "eviction", "default_row"),
    *("stochastic_rounding", "tier", "lr_scale", "max_grad_norm", "weight_init_min", "weight_init_max"),
)
_LATER_NAMES = ("own_names", "mode", "include_last_offset", "_rates", "_shared_access", "_eager_context")
_STARTS = ("init", "weight_init_min", "weight_init_max")


def table_config(
    owner: str, num_embeddings: int, embedding_dim: int, name: str, trainable: bool, settings: dict[str, Any]
) -> EmbeddingConfig:
    """The settings of a drop-in's table.

    Raises:
        TypeError: a setting that there is not.
        ValueError: settings that are wrong or contradict each other.
    """
    unknown = [key for key in settings if key not in _SETTINGS]
    if unknown:
        raise TypeError(f"{owner}: unknown argument {unknown[0]!r}; settings of the table are {', '.join(_SETTINGS)}")
    return EmbeddingConfig(num_embeddings, embedding_dim, name, trainable=trainable, **settings)


def check_arguments(owner: str, max_norm: Any, scale_grad_by_freq: Any, dtype: Any) -> None:
    """Refuse what would not mean what it means in torch.

    Raises:
        ValueError: names the argument and what to do instead.
    """
    if max_norm is not None:
        raise ValueError(
            f"{owner}: max_norm={max_norm} is not supported: it changes rows during forward, but they must not change "
            "before the update; leave it out and normalise what the module returns (torch.renorm)"
        )
    if scale_grad_by_freq:
        raise ValueError(
            f"{owner}: scale_grad_by_freq is not supported: a key's frequency would be counted in a micro-batch; leave "
            "it out"
        )
    if dtype not in (None, torch.float32):
        raise ValueError(
            f"{owner}: dtype={dtype} is not supported: rows are computed and returned in float32; leave it out and "
            "cast what the module returns (data_type=nk.DataType.BF16 stores rows in two bytes per element)"
        )


def matrix_shape(owner: str, embeddings: Any) -> tuple[int, int]:
    """Rows and columns of what `from_pretrained` is given. Raises ValueError if it is no matrix."""
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        got = f"{list(embeddings.shape)}" if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise ValueError(f"{owner}.from_pretrained: embeddings must be a matrix [num_embeddings, dim], got {got}")
    return embeddings.shape[0], embeddings.shape[1]


class SharedAccess:
    """What is called before the rows of a store are read or written from outside, for all modules that have it."""

    hook: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.hook is not None:
            self.hook()


class TableModule(Collection):
    """Base of Embedding and EmbeddingBag; see there."""

    _kind = EmbeddingConfig
    _pooled = False
    _tables_attribute = "tables"

    padding_idx: int | None

    def __init__(
        self,
        config: EmbeddingConfig,
        padding_idx: int | None,
        weight: Tensor | None,
        optimizer: SparseOptimizer | None,
        fill: bool,
        **where: Any,
    ) -> None:
        """`where`: device, seed, process_group and sparse_groups, as for Collection. Not `fill`: see `use_tables`."""
        owner = f"nn.{type(self).__name__}"
        if optimizer is None and config.trainable:
            raise ValueError(
                f"{owner}: pass optimizer=, for example nk.optim.Adam(lr=1e-3); to train the table by autograd and "
                f"torch.optim, take torch.{owner}"
            )
        padding = _padding_key(owner, padding_idx, config)
        if weight is not None:
            _check_weight(owner, weight, config)
        super().__init__([config], optimizer=SGD(lr=0.0) if optimizer is None else optimizer, **where)
        self.num_embeddings, self.embedding_dim = config.num_embeddings, config.embedding_dim
        self.padding_idx = padding
        self.origin: tuple[nn.Module, ...] = ()
        """The module that this one stands for, where nk.convert made it."""
        self.start_digest: str | None = None  # CRC-32 of the rows given at the start: ranks must have the same
        self._lender: tuple[TableModule, ...] = ()  # in a tuple, so that it is no submodule
        self._table = 0
        """Index of the table in its store."""
        self.own_names = frozenset({*vars(self), *self._modules, *_LATER_NAMES})
        """Attributes that are not the user's."""
        if fill:
            self.fill(weight)

    def fill(self, weight: Tensor | None) -> None:
        """Initial rows: as given, else as torch draws them, else by the table's own rule."""
        config = self._configs[0]
        assert self._sparse is not None
        if weight is None and not config.is_open and all(getattr(config, name) is None for name in _STARTS):
            weight = torch.empty(config.num_embeddings, config.embedding_dim, dtype=torch.float32).normal_()
            if self.padding_idx is not None:
                weight[self.padding_idx] = 0
        if weight is not None:
            rows = weight.detach().cpu().contiguous()
            self.start_digest = f"{zlib.crc32(rows.view(torch.uint8).numpy().data):08x}"
            self._sparse.write(config.name, rows)
        elif self.padding_idx is not None and not config.is_open:
            self._write_padding(config, self._sparse)

    def _write_padding(self, config: TableConfig, sparse: SparseTables) -> None:
        store, table = sparse.place(config.name)
        rows = sparse.stores[store]
        keys = owned_keys(rows, table, config.num_embeddings, self.process_group, self._sparse_groups)
        keys = keys[keys == self.padding_idx]
        write_embeddings(rows, table, keys, torch.zeros(len(keys), config.embedding_dim, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """The table takes initial values again, with fresh optimizer states; drawn anew if they are drawn."""
        self.store(self._configs[0].name).clear()
        self.fill(None)

    @property
    def trainable(self) -> bool:
        """Whether rows are updated."""
        return self._configs[0].trainable

    def check_trainable(self, requires_grad: bool) -> None:
        """Raises TypeError where the table would have to be frozen, or thawed, after it was made: says how instead."""
        if bool(requires_grad) is self.trainable:
            return
        raise TypeError(
            f"{self.described}: requires_grad_({requires_grad}) came too late, the table has been made "
            f"{'trainable' if self.trainable else 'frozen'}; set it before nk.convert, or there by "
            f"settings={{{self._configs[0].name!r}: {{'trainable': {bool(requires_grad)}}}}} (nk.revert(model) first); "
            "for a while, a learning rate of 0 in sparse_optimizer.param_groups stops updates without decay"
        )

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As torch's for what users have added. Raises TypeError where the table is not so already."""
        self.check_trainable(requires_grad)
        return super().requires_grad_(requires_grad)

    @property
    def weight(self) -> TableWeight:
        """All rows, [num_embeddings, embedding_dim], as something that tensor operations take for a tensor.

        With gradients enabled it is part of the graph: what is computed from it trains the rows, all of them in every
        such step. Rows cannot be written through it.
        """
        return TableWeight(self)

    def weight_tensor(self, detached: bool) -> Tensor:
        """float32 [num_embeddings, embedding_dim], what `weight` is when an operation uses it: a copy.

        In a step, in compiled code, or with gradients enabled and no pipeline open, it is a lookup of all ids; else
        rows are read as by state_dict(). Collective if there are several ranks.

        Raises:
            TypeError: the vocabulary is open.
        """
        owner = self.table_module
        name = owner._configs[0].name
        tables = owner._sparse_tables("weight")
        if owner._configs[0].is_open:
            return tables.read(name)  # says what to do instead
        if not torch.compiler.is_dynamo_compiling():
            tracked = torch.is_grad_enabled() and not detached and owner.before_outside_access is None
            if owner.lookup_context is None and not tracked:
                return tables.read(name)
        rows: Tensor = owner.look_up(torch.arange(self.num_embeddings))
        return rows.detach() if detached else rows

    # ----------------------------------------------------------------------------------------------- shared tables

    @property
    def before_outside_access(self) -> Callable[[], None] | None:
        """As the protocol's; one for all modules that share a store."""
        return self._access().hook

    @before_outside_access.setter
    def before_outside_access(self, hook: Callable[[], None] | None) -> None:
        self._access().hook = hook

    def _access(self) -> SharedAccess:
        found: SharedAccess = vars(self).setdefault("_shared_access", SharedAccess())
        return found

    def use_tables(self, tables: SparseTables, access: SharedAccess) -> None:
        """Have the table in a store that other modules' tables are in, too, instead of one of its own, still empty.

        Args:
            tables: of one store, with this module's table among them; made with `access`.
        """
        name = self._configs[0].name
        assert self._sparse is not None
        tables.rates[name] = self._sparse.optimizer_group
        self._rates = self._sparse.optimizer_group
        self._sparse, self._table = tables, tables.place(name)[1]
        vars(self)["_shared_access"] = access

    @property
    def table_rule(self) -> tuple[TableConfig, SparseOptimizer]:
        """The table's settings and its update rule."""
        config, rule = self._layout.optimizers[0]
        assert rule is not None
        return config, rule

    @property
    def sparse_optimizer(self) -> SparseOptimizerGroup:
        """The learning rate of this table as torch-like `param_groups`, for schedulers."""
        return vars(self).get("_rates") or self._sparse_tables("sparse_optimizer").optimizer_group

    @property
    def table_module(self) -> TableModule:
        """The module that has the table: this one, or the one that it is tied to."""
        return self._lender[0] if self._lender else self

    def tie(self, owner: TableModule) -> None:
        """Give up the own table and use that of `owner`, of the same shape, for good."""
        own = vars(self)
        shared = ("_configs", "_layout", "_features", "_sparse", "_table", "_rates", "_shared_access")
        for name in (*shared, "seed", "process_group", "_sparse_groups"):
            if name in vars(owner):
                own[name] = vars(owner)[name]
        self._lender = (owner.table_module,)

    def row_stores(self) -> Sequence[RowStore]:
        """This rank's store; none where the table is another module's."""
        return [] if self._lender else super().row_stores()

    # ------------------------------------------------------------------------------------------------------ lookups

    def look_up(self, features: Any) -> Any:
        """Ids (any shape): their rows [..., dim] as they are. A JaggedTensor: its bags, pooled [bags, dim]."""
        return Collection.forward(self.table_module, features)

    def _traced(self, features: Any) -> Tensor:
        dims = [self.embedding_dim]
        if isinstance(features, Tensor):
            rows = traced_lookup(self, dims, features)[0]
            return rows.view(*features.shape, self.embedding_dim)
        return traced_lookup(self, dims, features.values(), features.lengths(), features.weights_or_none())[0]

    def plan_call(self, features: Any) -> LookupCall:
        """Check an input and describe its lookup; changes nothing. Raises IndexError, TypeError or ValueError."""
        if isinstance(features, Tensor):
            return self._plan_rows(features)
        raise TypeError(
            f"{self.described}: ids must be a tensor, got {type(features).__name__}; for per-sample bags use "
            "nn.EmbeddingBag"
        )

    def store_segments(self, store_index: int) -> list[tuple[str, PoolingType, bool]]:
        """One, named as the table; owners pool nothing of it, as a call may ask for rows."""
        return [(self._configs[0].name, PoolingType.NONE, False)]

    @property
    def described(self) -> str:
        """The module's class and table, for messages."""
        return f"nn.{type(self).__name__}: table {self._configs[0].name!r}"

    def _plan_rows(self, ids: Tensor) -> LookupCall:
        shape, dim = tuple(ids.shape), self.embedding_dim
        keys = self._checked_ids(ids.reshape(-1), lambda place: str(_unravel(place, shape)))
        number = len(keys)
        store = StoreKeys(
            keys=keys,
            tables=torch.full((number,), self._table, dtype=torch.int32),
            bag_offsets=torch.arange(number + 1),
            segment_bags=(0, number),
            segment_modes=(PoolingType.NONE.code,),
        )
        per_sample = number // shape[0] if shape and shape[0] else 0
        return LookupCall(
            stores=[store],
            output_shapes=[(number, dim)],
            views=[[(0, 0)]],
            finish=lambda outputs: outputs[0].view(*shape, dim),
            weight_positions=[None],
            signature=[keys],
            samples=Samples([lambda: torch.arange(shape[0]).repeat_interleave(per_sample)]) if per_sample else (),
        )

    def _checked_ids(self, ids: Tensor, place_of: Callable[[int], str]) -> Tensor:
        """int64 [n], a copy. Raises TypeError, and IndexError for an id outside a fixed vocabulary."""
        keys = checked_values(ids, self.described)
        size = self.num_embeddings
        if size == UNBOUNDED or not len(keys):
            return keys
        found = keys.numpy()
        if int(found.min()) < 0 or int(found.max()) >= size:
            place = int(((keys < 0) | (keys >= size)).nonzero()[0])
            raise IndexError(
                f"{self.described}: id {int(keys[place])} at position {place_of(place)} is outside [0, {size}); raise "
                "num_embeddings, or use UNBOUNDED for any id"
            )
        return keys

    def _weight_key(self, table: str) -> str:
        return "weight"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise TypeError(
                f"{self.described}: weight cannot be set, its rows are in a store; load_state_dict() writes them, and "
                "modules that share a weight must do so before nk.convert"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What .to(), .half() and others call: a change of type is refused, as rows are float32 for the model."""
        became = fn(torch.empty(0, dtype=torch.float32))
        if became.dtype is not torch.float32 or became.device.type == "meta":
            what = "device 'meta'" if became.device.type == "meta" else str(became.dtype)
            raise TypeError(
                f"{self.described} cannot be moved to {what}: its rows are float32 values in a store; use autocast, or "
                "move the dense modules alone (data_type=nk.DataType.BF16 stores rows in two bytes per element)"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Raises TypeError: rows in a native store cannot be deep-copied or pickled; says what to do instead."""
        raise TypeError(
            f"{self.described} cannot be deep-copied or pickled: its rows are in a native store; use nk.revert(model) "
            "first, or keep state_dict() or a checkpoint (nk.checkpoint.save) and fill another model from it; a moving "
            "average (AveragedModel) goes over the dense modules alone"
        )

    def extra_repr(self) -> str:
        """As torch's, with the table's name."""
        size = "UNBOUNDED" if self.num_embeddings == UNBOUNDED else self.num_embeddings
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        tied = f", tied to {self._configs[0].name!r}" if self._lender else f", name={self._configs[0].name!r}"
        return f"{size}, {self.embedding_dim}{padding}{tied}"


def _unravel(place: int, shape: tuple[int, ...]) -> list[int]:
    found = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        found.append(rest)
    return found[::-1]


def _padding_key(owner: str, padding_idx: int | None, config: EmbeddingConfig) -> int | None:
    """`padding_idx` as the id it stands for. Raises TypeError, ValueError."""
    if padding_idx is None:
        return None
    if not isinstance(padding_idx, int) or isinstance(padding_idx, bool):
        raise TypeError(f"{owner}: padding_idx must be an integer or None, got {padding_idx!r}")
    size = config.num_embeddings
    if config.is_open:
        raise ValueError(
            f"{owner}: padding_idx needs a fixed num_embeddings; for an open vocabulary give it to the table of an "
            "EmbeddingCollection or EmbeddingBagCollection"
        )
    if not -size <= padding_idx < size:
        raise ValueError(f"{owner}: padding_idx must be in [{-size}, {size}), got {padding_idx}")
    return padding_idx % size


def _check_weight(owner: str, weight: Any, config: EmbeddingConfig) -> None:
    if config.is_open:
        raise ValueError(f"{owner}: _weight needs a fixed num_embeddings; fill an open table with store(NAME)")
    shape = [config.num_embeddings, config.embedding_dim]
    if not isinstance(weight, Tensor) or weight.dtype is not torch.float32 or list(weight.shape) != shape:
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"{owner}: _weight must be float32 {shape}, got {got}")
