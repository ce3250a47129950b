"""save and load: a whole training, to a directory and back, on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..ops.owners import default_slice_owner
from ..pipeline.random_state import capture_random
from .dense import buffers_of, dense_state, extra_states_of
from .exchange import agree
from .generation import Generation, RankPart, save_generation
from .loading import Loading
from .names import dense_file, rank_file
from .participants import Participants, participants
from .position import record_without_pipeline
from .report import LoadReport
from .rows_save import save_tables
from .tree import Ordered, encode

__all__ = ["load", "save"]

_SAVING, _LOADING = "checkpoint.save", "checkpoint.load"


def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    pipeline: Any = None,
    optimizer: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save the training as it is after the last step that was returned. Collective: all ranks, between two steps.

    The checkpoint that was at `path` stays whole until the new one is; training goes on unchanged. A batch that the
    pipeline drew ahead counts as not consumed.

    Args:
        path: a directory on a file system that all ranks see; made if it is not there.
        model: rows of all its stores, dense parameters and persistent buffers are saved.
        pipeline: what trains it, if a pipeline does; it knows step count, position in the data and dense optimizer.
        optimizer: of the dense parameters; may be left out with a pipeline.
        loader: what training draws from; may be left out where `pipeline.run(loader)` was told. Without a pipeline it
            needs state_dict() and load_state_dict().
        extra: name -> object with state_dict() and load_state_dict() (schedulers, GradScaler), or a torch.Generator;
            of each rank.

    Raises:
        TypeError: arguments of another kind.
        CheckpointError: objects that do not belong together, state that cannot be saved without pickle, or a damaged
            checkpoint at `path`; names it. The old checkpoint is intact after any error.
        OSError: full disk, no permission: as the system says, with the path.
        RemoteRankError: another rank failed. RuntimeError: the pipeline is closed, broken or inside a step.
    """
    who = participants("save", model, pipeline, optimizer, extra)
    position: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        who.settle()
        _check_copies(who)
        position = _position(who, loader)
    except Exception as error:
        failure = error
    agree(who.communicator, failure, _SAVING)
    save_generation(path, who.communicator, lambda generation: _write(generation, who, position))


def load(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    pipeline: Any = None,
    optimizer: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
    tables: Sequence[str] | None = None,
    strict: bool = True,
    optimizer_state: bool = True,
    start_epoch: bool = False,
) -> LoadReport:
    """Load a checkpoint into a model, its optimizers, its pipeline and its loader. Collective; at any world size.

    At the saved world size training then goes on bit for bit as if it had not stopped. What does not fit is an error
    before anything has changed.

    Args:
        path: the directory.
        model, pipeline, optimizer, loader, extra: as for `save`. A pipeline forgets the batches that it has drawn.
            Without `loader` the position is kept for what the pipeline trains from next.
        tables: load the rows of these tables alone; None: of all. The dense part is loaded either way.
        strict: False: tables, parameters, buffers and extra objects that one side lacks are reported, no error;
            and of a table's seed, initial values, admission rule and optimizer's numbers (not its kind) the model's
            are taken where they differ.
        optimizer_state: False: leave out optimizer states and learning rates; rows start with fresh states.
        start_epoch: True: the data starts from its beginning; step counts and generators are restored all the same.

    Returns:
        What was loaded and what was not.

    Raises:
        TypeError: arguments of another kind.
        CheckpointError: damaged files, or a model, optimizer, loader or world size that does not fit; names both sides.
        OSError: files that cannot be read. RemoteRankError: another rank failed.
        RuntimeError: the pipeline is closed, broken or inside a step.
    """
    who = participants("load", model, pipeline, optimizer, extra)
    loading: Loading | None = None
    failure: Exception | None = None
    try:
        who.settle()
        loading = Loading(Path(path), who, loader, tables, strict, optimizer_state, start_epoch)
    except Exception as error:
        failure = error
    agree(who.communicator, failure, _LOADING)
    assert loading is not None
    loading.load_rows()
    failure = None
    try:
        loading.apply()
    except Exception as error:
        failure = CheckpointError(
            f"checkpoint: {path}: the rows were loaded, but then: {type(error).__name__}: {error}; load again, or "
            "build the model anew"
        )
        failure.__cause__ = error
    agree(who.communicator, failure, _LOADING)
    return loading.report


_COUNTS = ("step_count", "trained", "modules", "num_micro_batches")
"""What the manifest's `position` holds; what is None is left out."""


def _check_copies(who: Participants) -> None:
    """One copy of the tables is saved, so all must be alike."""
    groups = who.topology.settings
    if any(store.touched is not None for store in who.stores):
        raise CheckpointError(
            f"checkpoint.save: the {groups.count} copies of the tables differ, since they are averaged every "
            f"{groups.average_every} updates only, and a checkpoint holds one: save after an update whose number is a "
            f"multiple of {groups.average_every}, or call average_copies() of each embedding module on all ranks first"
        )


def _position(who: Participants, loader: Any) -> dict[str, Any]:
    """{"step_count", "trained", "modules", "num_micro_batches", "loader", "generators"} of this rank."""
    modules = who.step_counts()
    if who.pipeline is not None:
        return {**who.pipeline.export_position(loader), "modules": modules}
    count = max(modules.values(), default=0)
    return {
        "step_count": count,
        "trained": count,
        "modules": modules,
        "num_micro_batches": None,
        "loader": record_without_pipeline(loader),
        "generators": capture_random(who.generators).tree(),
    }


def _write(generation: Generation, who: Participants, position: dict[str, Any]) -> RankPart:
    """This rank's files and its part of the manifest."""
    tensors: dict[str, Tensor] = {}
    own = {
        "buffers": buffers_of(who.model),
        "extra_state": {path: Ordered(state) for path, state in extra_states_of(who.model).items()},
        "generators": position["generators"],
        "loader": {key: Ordered(value) if key == "state" else value for key, value in position["loader"].items()},
        "extra": {name: Ordered(_state_of(value)) for name, value in who.extra.items()},
    }
    tree = {key: encode(value, key, tensors) for key, value in own.items()}
    generation.write_tensors(rank_file(generation.number, generation.rank), tensors)
    dense = None
    if generation.rank == 0:
        tensors = {}
        dense = {key: encode(v, key, tensors) for key, v in dense_state(who.model, who.optimizer).items()}
        generation.write_tensors(dense_file(generation.number), tensors)
    return RankPart(
        tables=save_tables(generation, who.stores, who.table_names, default_slice_owner(who.topology.num_shards)),
        rank=tree,
        position={
            **{key: position[key] for key in _COUNTS if position[key] is not None},
            **({"sparse_groups": who.topology.num_groups} if who.topology.num_groups > 1 else {}),
        },
        dense=dense,
    )


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
