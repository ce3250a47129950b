"""What pooled and unpooled collections share: tables in stores or as parameters, inputs, weights, state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nestpipe_kernels.comm import Communicator, SparseGroups, Topology, communicator_for
from nestpipe_kernels.comm.topology import checked_groups
from nestpipe_kernels.nn.compiled import enroll, is_exporting, new_anchor
from nestpipe_kernels.nn.configs import TableConfig, check_tables
from nestpipe_kernels.nn.layout import Layout, make_layout
from nestpipe_kernels.nn.optimizers import resolve_optimizers
from nestpipe_kernels.nn.parameter_tables import make_parameter_table
from nestpipe_kernels.nn.plan import CallInput, check_ids, plan_lookup, read_features
from nestpipe_kernels.nn.sparse_tables import SparseTables, TableStore, initial_weight
from nestpipe_kernels.optim import SparseOptimizerGroup
from nestpipe_kernels.types import LookupCall, LookupContext, PoolingType, RowStore, SparseOptimizer

__all__ = ["Collection", "TableView"]


class TableView:
    """One table of a collection whose rows live in a store; `weight` copies it out."""

    def __init__(self, tables: SparseTables, name: str) -> None:
        self._tables = tables
        self._name = name

    @property
    def weight(self) -> Tensor:
        """float32 [num_embeddings, dim], a copy: what lookups read, default rows where ids have no row. Collective.

        Raises:
            TypeError: the vocabulary is open; names the store call to use.
        """
        return self._tables.read(self._name)


class _TableViews(Mapping[str, TableView]):
    def __init__(self, tables: SparseTables) -> None:
        self._tables = tables

    def __getitem__(self, name: str) -> TableView:
        self._tables.place(name)
        return TableView(self._tables, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables.layout.places)

    def __len__(self) -> int:
        return len(self._tables.layout.places)


class Collection(nn.Module):
    """Base of EmbeddingBagCollection and EmbeddingCollection; see there.

    Rows that live in stores are no parameters: `named_parameters()` does not list them, and a dense optimizer or DDP
    does not see them. `state_dict()` holds the full matrix of every table with a fixed vocabulary (collective if there
    are several ranks) and raises for an open one.
    """

    lookup_context: LookupContext | None
    before_outside_access: Callable[[], None] | None

    _kind: ClassVar[type[TableConfig]] = TableConfig
    _pooled: ClassVar[bool] = True
    _tables_attribute: ClassVar[str] = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device | str | None,
        optimizer: SparseOptimizer | None,
        seed: int,
        process_group: Any,
        sparse_groups: SparseGroups | int = 1,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_tables(tables, self._kind, owner)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"{owner}: seed must be an integer, got {seed!r}")
        self._device = torch.device("cpu" if device is None else device)
        self.output_device = self._device
        """Where outputs are: a pipeline on an accelerator sets it while it is open."""
        if self._device.type != "cpu":
            raise ValueError(f"{owner}: device {self._device} is not supported; use device='cpu' or leave it out")
        self._configs = list(tables)
        self.seed = seed
        self.process_group = process_group
        self._sparse_groups = checked_groups(sparse_groups, owner)
        self.lookup_context = None
        self.before_outside_access = None
        optimizers = resolve_optimizers(self._configs, optimizer, owner)
        self._layout: Layout = make_layout(self._configs, optimizers or [None] * len(self._configs), self._pooled)
        self._features = self._layout.features
        self._sparse: SparseTables | None = None
        views: Any
        if optimizers is None and self._sparse_groups.count > 1:
            raise ValueError(
                f"{owner}: sparse_groups={self._sparse_groups.count} needs an optimizer; without one the tables are "
                "parameters, whole on every rank"
            )
        if self._sparse_groups.count > 1:
            Topology(self.communicator, self._sparse_groups)  # raises if the ranks do not form such groups
        if optimizers is None:
            views = nn.ModuleDict(
                {c.name: make_parameter_table(initial_weight(c, seed), c.trainable) for c in self._configs}
            )
        else:
            self._sparse = SparseTables(self._layout, seed, process_group, self._sparse_groups, self._outside_access)
            views = _TableViews(self._sparse)
            self.lookup_anchor, self.lookup_leaf = new_anchor(any(c.trainable for c in tables))
            self.lookup_number = enroll(self)
        setattr(self, self._tables_attribute, views)

    # ------------------------------------------------------------------------------------------------ accessors

    @property
    def device(self) -> torch.device:
        """Where outputs are."""
        return self._device

    @property
    def communicator(self) -> Communicator:
        """This rank's exchanges with the ranks that share the tables. Collective on first use of a process group."""
        return communicator_for(self.process_group)

    @property
    def sparse_groups(self) -> SparseGroups:
        """How many copies of the tables there are among the ranks, and how they stay alike."""
        return self._sparse_groups

    @property
    def sparse_optimizer(self) -> SparseOptimizerGroup:
        """Learning rates of the tables as torch-like `param_groups`, for schedulers.

        Raises:
            ValueError: the collection has no optimizer; its tables are parameters.
        """
        return self._sparse_tables("sparse_optimizer").optimizer_group

    def store(self, table: str) -> TableStore:
        """The rows of `table` that this rank owns, by key. Raises KeyError for an unknown table."""
        return self._sparse_tables("store()").view(table)

    def row_stores(self) -> Sequence[RowStore]:
        """This rank's stores, one per group of like tables; none where the tables are parameters."""
        return [] if self._sparse is None else self._sparse.stores

    def learning_rates(self, store_index: int) -> Tensor:
        """float32 [T]: the current learning rate of each table of a store, times its lr_scale; 0 where frozen."""
        return self._sparse_tables("learning_rates()").learning_rates(store_index)

    def reset_parameters(self) -> None:
        """Every table takes its initial values again.

        In stores: all rows are forgotten, with their optimizer states; then init_fn, where given, fills the table anew.
        """
        if self._sparse is not None:
            self._sparse.reset()
            return
        with torch.no_grad():
            for config in self._configs:
                table = getattr(self, self._tables_attribute)[config.name]
                table.weight.copy_(initial_weight(config, self.seed))

    def average_copies(self) -> None:
        """Average the copies of the tables now, where sparse groups do so every few updates: before a checkpoint, say.

        Collective over all ranks, between two steps. Without such groups it does nothing.
        """
        if self._sparse is None or self._sparse_groups.mode != "average":
            return
        from nestpipe_kernels.stages.eager import eager_context

        self._outside_access()
        eager_context(self).average_copies()

    # -------------------------------------------------------------------------------------------------- lookups

    def forward(self, features: Any) -> Any:
        """Look up a KeyedJaggedTensor, ours or TorchRec's.

        Raises:
            IndexError: an id outside a fixed vocabulary.
            TypeError: not a KeyedJaggedTensor, or a wrong dtype.
            ValueError: missing features, lengths that do not fit, weights missing or unexpected.
        """
        if self._sparse is None:
            return self._forward_parameters(features)
        if is_exporting():
            raise TypeError(
                f"{type(self).__name__}: torch.export cannot take along rows in stores; nk.revert(model) makes tables "
                "that nk.convert replaced parameters again"
            )
        if torch.compiler.is_dynamo_compiling() and not isinstance(features, (list, tuple, dict)):  # which raise
            return self._traced(features)
        return self.answer(features)

    def answer(self, features: Any) -> Any:
        """Look up rows of stores: through the pipeline that is open, or without one. Raises as forward does."""
        context = self.lookup_context
        if context is None:
            self._outside_access()
            context = self._own_context()
        return context.lookup(self, features)

    def plan_call(self, features: Any) -> LookupCall:
        """Check an input and describe its lookup; changes nothing. Raises as forward does."""
        batch = self._read(features)
        return plan_lookup(
            self._layout, batch, self._pooled, type(self).__name__, lambda outputs: self._finish(batch, outputs)
        )

    def store_segments(self, store_index: int) -> list[tuple[str, PoolingType, bool]]:
        """Of every segment of a call in a store: feature, pooling, and whether its bags have per-sample weights."""
        weighted = bool(self._weighted())
        return [(s.feature, s.mode, weighted) for s in self._layout.stores[store_index].segments]

    def zero_output(self, features: Any) -> Any:
        """What forward returns, all zeros that require a gradient."""
        call = self.plan_call(features)
        # Clones, because a model may change its lookups in place, which autograd refuses for leaves.
        return call.finish(
            [
                torch.zeros(shape, dtype=torch.float32, device=self.output_device, requires_grad=True).clone()
                for shape in call.output_shapes
            ]
        )

    def _read(self, features: Any) -> CallInput:
        return read_features(features, self._features, type(self).__name__, self._weighted())

    def _weighted(self) -> bool | None:
        raise NotImplementedError

    def _finish(self, batch: CallInput, outputs: Sequence[Tensor]) -> Any:
        raise NotImplementedError

    def _traced(self, features: Any) -> Any:
        """`answer` as torch.compile traces it: tensor operations and one operator, which calls `answer`."""
        raise NotImplementedError

    def output_keys(self, features: Any) -> list[Tensor]:
        """int64 [rows] of every output: what a traced lookup returns beside them; none by default."""
        return []

    def _parameter_outputs(self, batch: CallInput, weights: Mapping[str, Tensor]) -> Sequence[Tensor]:
        raise NotImplementedError

    def _forward_parameters(self, features: Any) -> Any:
        batch = self._read(features)
        check_ids(self._layout, batch, type(self).__name__)
        tables = getattr(self, self._tables_attribute)
        weights = {config.name: tables[config.name].weight for config in self._configs}
        return self._finish(batch, self._parameter_outputs(batch, weights))

    def _own_context(self) -> LookupContext:
        # stages serve modules without a pipeline, too; loaded when first needed, since most modules run under one.
        from nestpipe_kernels.stages.eager import eager_context

        return eager_context(self)

    def _outside_access(self) -> None:
        if self.before_outside_access is not None:
            self.before_outside_access()

    def _sparse_tables(self, what: str) -> SparseTables:
        if self._sparse is None:
            raise ValueError(
                f"{type(self).__name__}: {what} needs an optimizer; this collection was made without one, "
                "so its tables are ordinary parameters"
            )
        return self._sparse

    def __getstate__(self) -> dict[str, Any]:
        """For copying and pickling, which rows in native stores do not support.

        Raises:
            TypeError: some table has an optimizer; says what to do instead.
        """
        if self._sparse is not None:
            raise TypeError(
                f"{type(self).__name__}: rows in native stores cannot be deep-copied or pickled; build another one "
                "from the same tables and fill it with checkpoint.save and checkpoint.load, or load_state_dict() if "
                "no table is open; store(NAME) gives rows"
            )
        return self.__dict__.copy()

    # ----------------------------------------------------------------------------------------------- state dict

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._sparse is None:
            return
        for config in self._configs:
            destination[prefix + self._weight_key(config.name)] = self._sparse.read(config.name)

    def _weight_key(self, table: str) -> str:
        """The table's key in a state dict, after the module's prefix."""
        return f"{self._tables_attribute}.{table}.weight"

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        ours: dict[str, Any] = {}
        if self._sparse is not None:
            start = prefix + self._weight_key("").removesuffix(".weight")
            whole = not start.endswith(".")  # a single key
            ours = {k: v for k, v in state_dict.items() if (k == start if whole else k.startswith(start))}
            state_dict = {key: value for key, value in state_dict.items() if key not in ours}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self._sparse is None:
            return
        found: dict[str, Tensor] = {}
        for config in self._configs:
            key = prefix + self._weight_key(config.name)
            if key in ours:
                found[config.name] = ours.pop(key)
            elif strict:
                missing_keys.append(key)
        if strict:
            unexpected_keys.extend(ours)
        problems = [problem for name, weight in found.items() for problem in self._sparse.problems(name, weight)]
        error_msgs.extend(problems)
        if not problems:
            for name, weight in found.items():
                self._sparse.write(name, weight)
