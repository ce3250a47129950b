"""Where the tables of a collection live (stores), and which features look up which table, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nestpipe_kernels.nn.configs import TableConfig, embedding_names
from nestpipe_kernels.store import DeviceTier, FileTier
from nestpipe_kernels.types import DataType, PoolingType, SparseOptimizer

__all__ = ["Layout", "Segment", "StoreGroup", "group_key", "make_layout"]


@dataclass(frozen=True)
class Segment:
    """One feature looking up one table: a run of bags in every call."""

    feature: str
    output_name: str
    config: TableConfig
    mode: PoolingType
    table_index: int
    """Index of the table within its store."""
    output: int
    """Which output matrix of the call the bags go to."""
    column: int
    """First column in that output."""


@dataclass
class StoreGroup:
    """Tables that share a store: same dim, storage type, rounding, tier, `trainable`, optimizer (but learning rates are
    per table)."""

    dim: int
    data_type: DataType
    stochastic_rounding: bool
    optimizer: SparseOptimizer | None
    """None where the user's optimizer trains the tables through autograd."""
    tier: FileTier | DeviceTier | None = None
    tables: list[TableConfig] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    """In the collection's (table, feature) order: the order of occurrences in the store's list."""


@dataclass
class Layout:
    """The collection's stores, and its outputs in the collection's (table, feature) order."""

    stores: list[StoreGroup]
    segments: list[Segment]
    output_names: list[str]
    output_dims: list[int]
    optimizers: list[tuple[TableConfig, SparseOptimizer | None]]
    """Per table, in the collection's order."""
    places: dict[str, tuple[int, int]]
    """Table name -> (store, index of the table within the store)."""

    @property
    def features(self) -> list[str]:
        """Every feature that is looked up, once each."""
        return list(dict.fromkeys(segment.feature for segment in self.segments))


def make_layout(tables: Sequence[TableConfig], optimizers: Sequence[SparseOptimizer | None], pooled: bool) -> Layout:
    """Group `tables` (checked) into stores and place every feature's output.

    Pooled outputs are columns of one matrix; unpooled ones are a matrix per feature.
    """
    pairs = list(zip(tables, optimizers, strict=True))
    layout = Layout(stores=[], segments=[], output_names=[], output_dims=[], optimizers=pairs, places={})
    groups: dict[tuple[object, ...], int] = {}
    column = 0
    for (config, optimizer), names in zip(pairs, embedding_names(tables), strict=True):
        group = groups.setdefault(group_key(config, optimizer), len(layout.stores))
        if group == len(layout.stores):
            layout.stores.append(
                StoreGroup(config.embedding_dim, config.data_type, config.stochastic_rounding, optimizer, config.tier)
            )
        store = layout.stores[group]
        layout.places[config.name] = (group, len(store.tables))
        store.tables.append(config)
        for feature, output_name in zip(config.feature_names, names, strict=True):
            segment = Segment(
                feature=feature,
                output_name=output_name,
                config=config,
                mode=getattr(config, "pooling", PoolingType.NONE),
                table_index=len(store.tables) - 1,
                output=0 if pooled else len(layout.output_names),
                column=column if pooled else 0,
            )
            store.segments.append(segment)
            layout.segments.append(segment)
            layout.output_names.append(output_name)
            layout.output_dims.append(config.embedding_dim)
            column += config.embedding_dim
    return layout


def group_key(config: TableConfig, optimizer: SparseOptimizer | None) -> tuple[object, ...]:
    """Equal for tables that can share a store."""
    if optimizer is None:
        return (config.embedding_dim,)
    settings = tuple(sorted(optimizer.hyper().items()))
    storage = (config.data_type, config.stochastic_rounding, config.tier)
    return (config.embedding_dim, storage, optimizer.name, settings, config.trainable)
