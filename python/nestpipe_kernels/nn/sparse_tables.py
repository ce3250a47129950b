"""The tables of a collection whose rows live in stores: construction, whole-table reads and writes, learning rates."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.device import backend_for
from nestpipe_kernels.nn.configs import TableConfig
from nestpipe_kernels.nn.layout import Layout, StoreGroup
from nestpipe_kernels.nn.optimizers import initial_values
from nestpipe_kernels.nn.policies import rows_within
from nestpipe_kernels.nn.sharding import all_rows, owned_keys, rank_quota
from nestpipe_kernels.nn.weights import read_embeddings, write_embeddings
from nestpipe_kernels.optim import SGD, SparseOptimizerGroup
from nestpipe_kernels.store import DeviceTier, DeviceTierStore, EmbeddingStore, FileTier
from nestpipe_kernels.types import UNBOUNDED, TableSpec

__all__ = ["SparseTables", "TableStore", "initial_weight"]


_generator_lock = threading.Lock()  # the default generator is the process's: ranks that are threads take turns


def initial_weight(config: TableConfig, seed: int) -> Tensor:
    """float32 [num_embeddings, dim]: what a table with a fixed vocabulary starts from, alike on all ranks.

    Raises:
        ValueError: init_fn returned a tensor of another shape.
    """
    shape = (config.num_embeddings, config.embedding_dim)
    if config.init_fn is None:
        # A store without rows reads initial values.
        spec = TableSpec(config.name, config.num_embeddings, initial_values(config), seed)
        store = EmbeddingStore(tables=[spec], dim=config.embedding_dim, optimizer=SGD())
        weight = read_embeddings(store, 0, torch.arange(config.num_embeddings))
    else:
        digest = hashlib.blake2b(f"{seed}:{config.name}".encode(), digest_size=8).digest()
        with _generator_lock, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            weight = torch.empty(shape, dtype=torch.float32)
            returned = config.init_fn(weight)
        if returned is not None and returned is not weight:
            if tuple(returned.shape) != shape:
                raise ValueError(
                    f"table {config.name!r}: init_fn returned shape {list(returned.shape)}, expected {list(shape)}"
                )
            weight = returned.detach().to(torch.float32)
    if config.padding_key is not None:
        weight[config.padding_key] = 0.0
    return weight


class TableStore:
    """One table's rows on this rank, by key; `store` itself holds the tables of a group."""

    def __init__(self, store: EmbeddingStore | DeviceTierStore, name: str, before_access: Callable[[], None]) -> None:
        self._store = store
        self._before_access = before_access
        self.name = name

    @property
    def store(self) -> EmbeddingStore | DeviceTierStore:
        """The store with all its tables; a pipeline that works on it has nothing in flight."""
        self._before_access()
        return self._store

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """As EmbeddingStore.find: embeddings float32 [n, dim] and status uint8 [n]; inserts nothing."""
        return self.store.find(keys, table=self.name)

    def find_or_insert(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """As EmbeddingStore.find_or_insert."""
        return self.store.find_or_insert(keys, table=self.name)

    def erase(self, keys: Tensor) -> Tensor:
        """As EmbeddingStore.erase."""
        return self.store.erase(keys, table=self.name)

    def clear(self) -> None:
        """Remove the rows of the table, with their optimizer states; other tables of the store stay."""
        self.store.clear(self.name)

    def keys(self) -> Tensor:
        """int64 [size]: the keys that have rows on this rank."""
        return self.store.keys(self.name)

    def counters(self) -> dict[str, int]:
        """Keys of this rank so far: "inserted", "evicted", "expired", "refused", "not_admitted".

        As of the last returned batch; batches that were undone do not count.
        """
        return self.store.counters(self.name)

    def __len__(self) -> int:
        return self.store.size(self.name)


class SparseTables:
    """Stores, learning rates and whole-table access of one collection."""

    def __init__(
        self,
        layout: Layout,
        seed: int,
        process_group: Any,
        sparse_groups: SparseGroups,
        before_access: Callable[[], None],
    ) -> None:
        self.layout = layout
        self._sparse_groups = sparse_groups
        self._before_access = before_access
        self._seed = seed
        self._process_group = process_group
        self._configs = {config.name: config for group in layout.stores for config in group.tables}
        self.stores: list[EmbeddingStore | DeviceTierStore] = []
        for group in layout.stores:
            _check_copies(group, sparse_groups)
            specs = [
                TableSpec(
                    name=config.name,
                    num_embeddings=config.num_embeddings,
                    init=initial_values(config),
                    seed=seed,
                    lr_scale=config.lr_scale,
                    max_grad_norm=None if config.max_grad_norm is None else float(config.max_grad_norm),
                    trainable=config.trainable,
                    admission=config.admission,
                    eviction=config.eviction,
                    default=config.default_row,
                )
                for config in group.tables
            ]
            self.stores.append(_make_store(self._with_quotas(specs, group), group, group.tier))
        self.rates: dict[str, SparseOptimizerGroup] = {}
        """Of tables whose learning rate another group than `optimizer_group` has: that of their own module."""
        self.optimizer_group = SparseOptimizerGroup(
            (config.name, rule, config.lr_scale) for config, rule in layout.optimizers if rule is not None
        )
        self._fill()

    def _with_quotas(self, specs: list[TableSpec], group: StoreGroup) -> list[TableSpec]:
        """The tables with their quotas on this rank."""
        row_bytes = 0
        if any(config.capacity_bytes is not None for config in group.tables):
            row_bytes = _make_store([TableSpec("row", UNBOUNDED, None, 0)], group, None).row_floats * 4
        capacities = [rows_within(config, row_bytes) for config in group.tables]
        return [
            replace(spec, capacity=rank_quota(capacity, self._process_group, self._sparse_groups))
            for spec, capacity in zip(specs, capacities, strict=True)
        ]

    def place(self, name: str) -> tuple[int, int]:
        """(store, index within the store) of a table. Raises KeyError naming the tables there are."""
        if name not in self.layout.places:
            raise KeyError(f"no table {name!r}; there are {sorted(self.layout.places)}")
        return self.layout.places[name]

    def view(self, name: str) -> TableStore:
        """The table's rows by key."""
        store, _ = self.place(name)
        return TableStore(self.stores[store], name, self._before_access)

    def learning_rates(self, store_index: int) -> Tensor:
        """float32 [T]: current rate times lr_scale; 0 for a frozen table."""
        return torch.tensor(
            [
                self.rates.get(spec.name, self.optimizer_group).current_lr(spec.name) if spec.trainable else 0.0
                for spec in self.stores[store_index].tables
            ],
            dtype=torch.float32,
        )

    def read(self, name: str) -> Tensor:
        """float32 [num_embeddings, dim], from all ranks (collective). Raises TypeError for an open vocabulary."""
        config = self._fixed(name, "weight and state_dict do")
        store, table = self.place(name)
        self._before_access()
        weight = all_rows(self.stores[store], table, config.num_embeddings, self._process_group, self._sparse_groups)
        if config.padding_key is not None:
            weight[config.padding_key] = 0.0
        return weight

    def problems(self, name: str, weight: object) -> list[str]:
        """Why `weight` cannot be loaded into the table; empty if it can."""
        config = self._configs[name]
        if config.is_open:
            return [f"table {name!r} has an open vocabulary and takes no weight matrix; {_remedy(name)}"]
        shape = [config.num_embeddings, config.embedding_dim]
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            return [f"table {name!r}: expected a floating-point weight {shape}, got {_kind_of(weight)}"]
        if list(weight.shape) != shape:
            return [f"table {name!r}: expected a weight of shape {shape}, got {list(weight.shape)}"]
        if config.padding_key is not None and bool(weight[config.padding_key].count_nonzero()):
            return [
                f"table {name!r}: row {config.padding_key} is the padding row, which always reads zeros, but the "
                "loaded weight has other values there; zero them, or leave padding_idx out"
            ]
        return []

    def write(self, name: str, weight: Tensor) -> None:
        """Make the rows that this rank owns those of `weight`; optimizer states stay. Changes nothing elsewhere."""
        config = self._configs[name]
        store, table = self.place(name)
        self._before_access()
        keys = owned_keys(self.stores[store], table, config.num_embeddings, self._process_group, self._sparse_groups)
        if config.padding_key is not None:
            keys = keys[keys != config.padding_key]
        write_embeddings(self.stores[store], table, keys, weight.detach()[keys].to(torch.float32))

    def reset(self) -> None:
        """Forget every row; fill tables that have an init_fn anew."""
        self._before_access()
        for store in self.stores:
            store.clear()
            store.touched = None
        self._fill()

    def _fill(self) -> None:
        for name, config in self._configs.items():
            if config.init_fn is not None:
                self.write(name, initial_weight(config, self._seed))

    def _fixed(self, name: str, what: str) -> TableConfig:
        config = self._configs[name]
        if config.is_open:
            raise TypeError(f"table {name!r} has an open vocabulary, for which {what} not exist; {_remedy(name)}")
        return config


def _check_copies(group: StoreGroup, sparse_groups: SparseGroups) -> None:
    if isinstance(group.tier, DeviceTier) and sparse_groups.count > 1:
        raise ValueError(
            f"table {group.tables[0].name!r}: rows on a device (DeviceTier) do not work with sparse_groups="
            f"{sparse_groups.count}; use sparse_groups=1, or leave the tier out"
        )


def _make_store(
    specs: list[TableSpec], group: StoreGroup, tier: FileTier | DeviceTier | None
) -> EmbeddingStore | DeviceTierStore:
    assert group.optimizer is not None
    if isinstance(tier, DeviceTier):
        return DeviceTierStore(
            specs,
            dim=group.dim,
            optimizer=group.optimizer,
            device=backend_for(tier.device).device,
            data_type=group.data_type,
            stochastic_rounding=group.stochastic_rounding,
            load=tier.load,
            rows_per_slab=tier.rows_per_slab,
            memory_limit=tier.memory_bytes,
        )
    return EmbeddingStore(
        tables=specs,
        dim=group.dim,
        optimizer=group.optimizer,
        data_type=group.data_type,
        stochastic_rounding=group.stochastic_rounding,
        tier=tier,
    )


def _remedy(name: str) -> str:
    return f"read rows with .store({name!r}).find(keys), save the model with nestpipe_kernels.checkpoint.save"


def _kind_of(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
