"""One load on one rank: everything is read and compared first; rows next; the rest when they are in everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..capture.modules import plain_name
from ..config import MOST_MICRO_BATCHES
from ..errors import CheckpointError
from ..ops.owners import default_slice_owner
from ..pipeline.random_state import RandomState, restore_random
from .dense import (
    DenseChange,
    buffers_of,
    extra_states_of,
    load_learning_rates,
    load_optimizer,
    parameters_of,
    plan_optimizer,
    plan_tensors,
)
from .files import open_tensor_file
from .generators import check_random
from .manifest import Manifest
from .names import dense_file, rank_file
from .participants import Participants
from .position import choose_record, describe
from .report import LoadReport
from .rows import TableTarget, all_targets, load_tables
from .tree import decode

__all__ = ["Loading"]

_NAMED_PROBLEMS = 10


class Loading:
    """Reads and checks all but the rows at construction; `load_rows`, then `apply`, change things.

    Raises:
        CheckpointError: damaged, or it does not fit; nothing has changed.
    """

    def __init__(
        self,
        path: Path,
        who: Participants,
        loader: Any,
        tables: Sequence[str] | None,
        strict: bool,
        optimizer_state: bool,
        start_epoch: bool,
    ) -> None:
        if isinstance(tables, str):
            raise TypeError(f"checkpoint.load: tables must be a list of names, got the string {tables!r}")
        self._path, self._who, self._loader = path, who, loader
        self._tables, self._strict, self._with_state = tables, strict, optimizer_state
        self._manifest = manifest = Manifest.load(path)
        world, rank = who.communicator.size, who.communicator.rank
        self._same_world = manifest.world_size == world
        self._problems: list[str] = []
        self._dense = self._read_dense()
        trees = [self._read_rank(r) for r in ([rank] if self._same_world else range(manifest.world_size))]
        self._own = trees[0]
        records = [tree["loader"] for tree in trees]
        if self._same_world:
            records = [records[0] if r == rank else None for r in range(world)]
        self._record = choose_record(records, rank, world, loader, who.pipeline is not None, start_epoch)
        self._step_count, self._trained, self._modules = self._counts()
        self._micro_batches = self._micro_batches_saved()
        self.report = LoadReport(
            optimizer_state=optimizer_state,
            data=describe(self._record, followed=who.pipeline is not None or loader is not None),
            step_count=self._step_count,
            saved_world_size=manifest.world_size,
        )
        self._generators = self._own["generators"] if self._same_world and self._own["generators"] else None
        self.report.generators = self._generators is not None
        if self._generators is not None:
            check_random(self._own["generators"], f"ranks[{rank}].generators")
        self._targets = self._plan_tables()
        self._changes = self._plan_dense()
        self._plan_extra()
        if self._problems:
            shown = "; ".join(self._problems[:_NAMED_PROBLEMS])
            more = len(self._problems) - _NAMED_PROBLEMS
            raise CheckpointError(
                f"checkpoint: {path} does not fit: {shown}{f'; and {more} more' if more > 0 else ''}; nothing was "
                "changed"
            )

    # -------------------------------------------------------------------------------------------------- reading

    def _read_dense(self) -> dict[str, Any]:
        tree, name = self._manifest.dense, dense_file(self._manifest.generation)
        if tree is None:
            raise CheckpointError(f"checkpoint: {self._path} holds no dense part; it was not made by checkpoint.save")
        dense: dict[str, Any] = self._read_tree(tree, name, "dense")
        self._demand(dense, "dense", {"parameters": dict, "learning_rates": dict})
        if dense.get("optimizer") is not None:
            self._demand(dense["optimizer"], "dense.optimizer", {"class": str, "state": dict})
        return dense

    def _read_rank(self, rank: int) -> dict[str, Any]:
        name = rank_file(self._manifest.generation, rank)
        tree: dict[str, Any] = self._read_tree(self._manifest.ranks[rank], name, f"ranks[{rank}]")
        wanted = {"buffers": dict, "extra_state": dict, "generators": dict, "loader": dict, "extra": dict}
        self._demand(tree, f"ranks[{rank}]", wanted)
        return tree

    def _read_tree(self, tree: Any, name: str, path: str) -> Any:
        record = self._manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"checkpoint: {self._path}: the manifest lists no file {name}")
        with open_tensor_file(self._path / name, record) as file:
            seen: set[str] = set()

            def read(tensor: str) -> torch.Tensor:
                if tensor in seen:  # or a small file could fill the memory
                    raise CheckpointError(f"checkpoint: {self._path}: {path} names the tensor {tensor!r} twice")
                seen.add(tensor)
                return file.read(tensor)

            return decode(tree, path, read)

    def _demand(self, value: Any, path: str, fields: Mapping[str, type]) -> None:
        for name, kind in fields.items():
            if not isinstance(value, dict) or not isinstance(value.get(name), kind):
                raise CheckpointError(f"checkpoint: {self._path}: {path}.{name} must be of type {kind.__name__}")

    def _counts(self) -> tuple[int, int, dict[str, int]]:
        position = self._manifest.position
        modules = position.get("modules")
        numbers = [position.get("step_count"), position.get("trained")]
        if isinstance(modules, dict):
            numbers += modules.values()
        if not isinstance(modules, dict) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise CheckpointError(
                f"checkpoint: {self._path}: position must hold step_count, trained and modules, counts >= 0"
            )
        return position["step_count"], position["trained"], modules

    def _micro_batches_saved(self) -> int | None:
        number = self._manifest.position.get("num_micro_batches")
        if number is not None and (type(number) is not int or not 1 <= number <= MOST_MICRO_BATCHES):
            raise CheckpointError(
                f"checkpoint: {self._path}: position.num_micro_batches must lie in 1 .. {MOST_MICRO_BATCHES}, got "
                f"{number!r}"
            )
        return number

    # ------------------------------------------------------------------------------------------------- comparing

    def _plan_tables(self) -> list[TableTarget]:
        saved = [table.name for table in self._manifest.tables]
        targets = all_targets(self._who.stores, self._who.table_names)
        here = [target.source for target in targets]
        if self._tables is None:
            missing = [name for name in here if name not in saved]
            unexpected = [name for name in saved if name not in here]
            self._one_sided("tables", missing, unexpected)
            self.report.missing_tables, self.report.unexpected_tables = missing, unexpected
            return [target for target in targets if target.source in saved]
        for name in self._tables:
            if name not in here:
                self._problems.append(f"tables names {name!r}, but the model has the tables {_listed(here)}")
            elif name not in saved:
                self._problems.append(f"tables names {name!r}, but the checkpoint has the tables {_listed(saved)}")
        return [target for target in targets if target.source in self._tables and target.source in saved]

    def _plan_dense(self) -> list[DenseChange]:
        who = self._who
        parameters = parameters_of(who.model, who.optimizer)
        changes = [
            plan_tensors("parameter", parameters, self._dense["parameters"]),
            plan_tensors("buffer", buffers_of(who.model), self._own["buffers"]),
        ]
        for kind, change in zip(("parameter", "buffer"), changes):
            self._problems += change.problems
            self._one_sided(f"{kind}s", change.missing, change.unexpected)
            self.report.parameters += [name for name, _, _ in change.copies]
            self.report.missing_parameters += change.missing
            self.report.unexpected_parameters += change.unexpected
        saved = self._dense.get("optimizer")
        if self._with_state and (saved is not None or who.optimizer is not None):
            problems = plan_optimizer(who.optimizer, saved, parameters)
            one_sided = saved is None or who.optimizer is None
            if self._strict or not one_sided:
                self._problems += problems
            self.report.dense_optimizer = not problems
        states = extra_states_of(who.model)
        self._one_sided("extra states of modules", *_sides(states, self._own["extra_state"]))
        return changes

    def _plan_extra(self) -> None:
        missing, unexpected = _sides(self._who.extra, self._own["extra"])
        self.report.missing_extra, self.report.unexpected_extra = missing, unexpected
        self.report.extra = [name for name in self._who.extra if name in self._own["extra"]]
        self._one_sided("extra objects", missing, unexpected)

    def _one_sided(self, what: str, missing: list[str], unexpected: list[str]) -> None:
        if not self._strict:
            return
        if missing:
            self._problems.append(f"{what} {_listed(missing)} are not in the checkpoint (strict=False leaves them)")
        if unexpected:
            self._problems.append(
                f"the checkpoint's {what} {_listed(unexpected)} are not here (strict=False skips them)"
            )

    # -------------------------------------------------------------------------------------------------- changing

    def load_rows(self) -> None:
        """Rows of the chosen tables. Collective; raises on all ranks."""
        topology = self._who.topology
        self.report.tables = load_tables(
            self._path,
            self._manifest,
            self._who.communicator,
            self._targets,
            optimizer_state=self._with_state,
            strict=self._strict,
            slice_owner=default_slice_owner(topology.num_shards),
            shard=topology.shard,
        )

    def apply(self) -> None:
        """Dense part, learning rates, counts, extra objects; generators and the data's position last."""
        who = self._who
        for change in self._changes:
            change.apply()
        if self.report.dense_optimizer:
            load_optimizer(who.optimizer, self._dense["optimizer"])
        if self._with_state:
            load_learning_rates(who.model, self._dense["learning_rates"], self._tables)
        modules = {plain_name(path): module for path, module in who.model.named_modules()}
        for path, state in self._own["extra_state"].items():
            if path in modules:
                modules[path].set_extra_state(state)
        for name in self.report.extra:
            _load_state(name, who.extra[name], self._own["extra"][name])
        self._continue()

    def _continue(self) -> None:
        who, generators = self._who, self._generators
        if who.pipeline is not None:
            who.pipeline.import_position(
                self._step_count, self._trained, self._record, generators, self._loader, self._micro_batches
            )
            who.set_step_counts(self._modules, 0)
            return
        who.set_step_counts(self._modules, self._step_count)
        if self._loader is not None and self._record["kind"] == "state":
            self._loader.load_state_dict(copy.deepcopy(self._record["state"]))
        if generators is not None:
            restore_random(RandomState.from_tree(generators), who.generators)


def _load_state(name: str, target: Any, state: Any) -> None:
    load: Callable[[Any], Any] = target.set_state if isinstance(target, torch.Generator) else target.load_state_dict
    try:
        load(state)
    except Exception as error:
        raise CheckpointError(
            f"extra[{name!r}] ({type(target).__name__}) refuses the saved state: {type(error).__name__}: {error}"
        ) from error


def _sides(here: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    return [name for name in here if name not in saved], [name for name in saved if name not in here]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
