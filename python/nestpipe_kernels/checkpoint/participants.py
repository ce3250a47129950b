"""Who takes part in saving or loading: the model's stores, its pipeline, its ranks; checked once, with clear errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.modules import embedding_modules, model_generators, uncompiled
from ..comm import Communicator, SparseGroups, Topology, communicator_for
from ..errors import CheckpointError
from ..pipeline.train_pipeline import NestedPipeline
from ..stages.eager import eager_context

__all__ = ["Participants", "participants"]


@dataclass
class Participants:
    """The objects that a checkpoint is made of or loaded into."""

    model: nn.Module
    pipeline: NestedPipeline | None
    optimizer: Any
    extra: dict[str, Any]
    communicator: Communicator
    modules: dict[str, Any]
    """Embedding modules with stores, by name."""

    @property
    def topology(self) -> Topology:
        """Which ranks share a copy of the tables.

        Raises:
            CheckpointError: modules differ in it.
        """
        found = {module.sparse_groups for module in self.modules.values()} or {SparseGroups()}
        if len(found) > 1:
            raise CheckpointError(f"checkpoint: modules have different sparse groups: {sorted(map(str, found))}")
        return Topology(self.communicator, next(iter(found)))

    @property
    def stores(self) -> list[Any]:
        """All row stores, in module order."""
        return [store for _, store in self._places()]

    @property
    def table_names(self) -> list[list[str]]:
        """Per store and table, its name in the checkpoint: the table's own, with the module's where two are alike."""
        pairs = [[(path, spec.name) for spec in store.tables] for path, store in self._places()]
        own = [name for store in pairs for _, name in store]
        return [[name if own.count(name) == 1 else f"{path}.{name}" for path, name in store] for store in pairs]

    def _places(self) -> list[tuple[str, Any]]:
        """(first module, store) of every store, once."""
        pairs = [(path, store) for path, module in self.modules.items() for store in module.row_stores()]
        return list({id(store): (path, store) for path, store in reversed(pairs)}.values())[::-1]

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Generators of the model; a pipeline knows of more."""
        return model_generators(self.model)

    def settle(self) -> None:
        """Stores and generators as after the last returned step."""
        if self.pipeline is not None:
            self.pipeline.settle()

    def step_counts(self) -> dict[str, int]:
        """Updates that each module did without a pipeline."""
        return {path: eager_context(module).step_count for path, module in self.modules.items()}

    def set_step_counts(self, saved: Mapping[str, int], otherwise: int) -> None:
        """Let modules that run without a pipeline count on; `otherwise` where none was saved."""
        for path, module in self.modules.items():
            eager_context(module).step_count = saved.get(path, 0) or otherwise


def participants(
    doing: str, model: Any, pipeline: Any, optimizer: Any, extra: Mapping[str, Any] | None
) -> Participants:
    """Check who is there.

    Raises:
        TypeError: arguments of another kind.
        CheckpointError: objects that do not belong together; says which and what to do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"checkpoint.{doing}: model must be a torch.nn.Module, got {type(model).__name__}")
    if pipeline is not None and not isinstance(pipeline, NestedPipeline):
        raise TypeError(f"checkpoint.{doing}: pipeline must be a NestedPipeline or None, got {type(pipeline).__name__}")
    found: dict[str, Any] = {path: m for path, m in embedding_modules(model).items() if m.row_stores()}  # type: ignore[operator]
    if pipeline is not None:
        _check_pipeline(doing, model, pipeline, optimizer)
        optimizer = pipeline.rank.dense_optimizer
        communicator: Communicator = pipeline.rank.communicator
    else:
        for path, module in found.items():
            if module.before_outside_access is not None:
                raise CheckpointError(
                    f"checkpoint.{doing}: module {path!r} belongs to an open pipeline, whose position would be lost; "
                    "pass pipeline=, or close it first"
                )
        communicators = {id(module.communicator): module.communicator for module in found.values()}
        if len(communicators) > 1:
            raise CheckpointError(
                f"checkpoint.{doing}: modules {', '.join(map(repr, found))} use different process groups; save them "
                "apart"
            )
        communicator = next(iter(communicators.values())) if communicators else communicator_for(None)
    return Participants(model, pipeline, optimizer, _check_extra(doing, extra), communicator, found)


def _check_pipeline(doing: str, model: nn.Module, pipeline: NestedPipeline, optimizer: Any) -> None:
    if uncompiled(pipeline.model) is not uncompiled(model):
        raise CheckpointError(
            f"checkpoint.{doing}: the pipeline trains another model than the one given; pass its model"
        )
    if optimizer is not None and optimizer is not pipeline.rank.dense_optimizer:
        raise CheckpointError(
            f"checkpoint.{doing}: the pipeline's dense optimizer is not the one given ({type(optimizer).__name__}); "
            "pass that one, or leave optimizer out"
        )


def _check_extra(doing: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    checked = {} if extra is None else dict(extra)
    for name, value in checked.items():
        if not isinstance(name, str):
            raise TypeError(f"checkpoint.{doing}: names in extra must be strings, got {name!r}")
        if isinstance(value, torch.Generator):
            continue
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            raise TypeError(
                f"checkpoint.{doing}: extra[{name!r}] must have state_dict() and load_state_dict(), got "
                f"{type(value).__name__}"
            )
    return checked
