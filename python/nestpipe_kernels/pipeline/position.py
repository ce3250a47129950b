"""Where training stands in its data: what a checkpoint needs so that the next batch is the one that would have come.

Before each `next()` the loader's position and the states of all random generators are noted. Batches drawn ahead count
as not consumed: a checkpoint holds the position from before the first of them was drawn, and the generators' states
from before each. After a load every one is drawn again from its states, then the generators go back to where they were
when the checkpoint was made, since the model has drawn from them in between. A digest of each batch tells whether it is
the same.

A loader's position is its `state_dict()` where it has that and `load_state_dict()`; else the number of batches it gave,
and the generators from before `iter()`: loading restores them, calls `iter()` and drops that many batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.modules import model_generators
from ..errors import CheckpointError
from ..stages.state import BatchState, Failure, Source
from .fingerprint import fingerprint
from .random_state import RandomState, capture_random, loader_generators, restore_random

__all__ = ["NOTHING_UNDER_WAY", "Origin", "Position", "batches_in_flight", "has_state"]

NOTHING_UNDER_WAY: dict[str, Any] = {"kind": "none"}


def has_state(loader: Any) -> bool:
    """Whether a loader (or iterator) has both `state_dict` and `load_state_dict`."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


@dataclass
class InFlight:
    """A batch that had been drawn ahead."""

    before_draw: RandomState
    """States from before it was drawn."""
    digest: str | None
    """Its fingerprint."""


@dataclass
class Redo:
    """What comes before and after the first `next()`s on a loader after a checkpoint was loaded."""

    skip: int
    """Batches to draw and drop first, ..."""
    skip_from: RandomState | None
    """... with the generators in these states."""
    draws: list[InFlight]
    """Batches to draw again, in this order."""
    after: RandomState
    """States when the checkpoint was made."""
    all_after: bool
    """Go back to `after`, not to the states of this moment: the caller has called iter() since the load."""
    begun: bool = False


@dataclass
class Origin:
    """What is noted about one iterator."""

    loader: Any = None
    before: RandomState | None = None
    """Generator states from before iter(loader), or from before the first next() where that is not known."""
    calls: int = 0
    """Batches handed out (or errors raised) so far."""
    reused: bool = False
    """iter() found a torch DataLoader's workers of the epoch before, and so drew fewer random numbers."""
    exhausted: bool = False
    redo: Redo | None = None
    failure: CheckpointError | None = None
    """Why the position of a loaded checkpoint cannot be reached; every draw says so."""


@dataclass
class _Plan:
    """A position that was loaded and waits for the loader."""

    record: dict[str, Any]
    after: RandomState
    positioned: Any = None
    """The loader that has been given its state already."""


class Position:
    """Notes of one pipeline; see the file's head."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own = model_generators(model)
        self._loader: Any = None
        self._declared: Any = None
        self._opened: tuple[Any, Origin] | None = None
        self._plan: _Plan | None = None
        self.current: Source | None = None
        """The source that training drew from last, None after its end."""

    def add_generator(self, name: str, generator: torch.Generator) -> None:
        """Note this generator's states, too."""
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"add_generator: expected a torch.Generator, got {type(generator).__name__}")
        if self._own.get(name, generator) is not generator:
            raise ValueError(f"add_generator: there is another generator named {name!r}; choose another name")
        self._own[name] = generator

    def generators(self, loader: Any = None) -> dict[str, torch.Generator]:
        """All that are noted, by name; those of a loader that the model has too, under the model's name alone."""
        known = {id(generator) for generator in self._own.values()}
        theirs = loader_generators(loader if loader is not None else self._loader)
        return {**self._own, **{name: g for name, g in theirs.items() if id(g) not in known}}

    # --------------------------------------------------------------------------------------------- iterators

    def set_loader(self, loader: Any) -> None:
        """Iterators that training gets from now on come from this loader."""
        self._loader = self._declared = loader
        plan = self._plan
        if plan is not None and plan.record["kind"] == "state" and plan.positioned is None:
            load_loader_state(loader, plan.record)
            plan.positioned = loader

    def open(self, loader: Any, training: bool) -> Iterator[Any]:
        """iter(loader), continued where a loaded checkpoint says."""
        if hasattr(loader, "__next__"):  # an iterator, which iter() does not start
            return iter(loader)
        origin = Origin(loader)
        if training:
            self._loader = loader
        self._own = {**model_generators(self._model), **self._own}
        own = self.generators(loader)
        if not training or self._plan is None:
            origin.before = capture_random(own)
            origin.reused = _keeps_workers(loader)
            iterator: Iterator[Any] = iter(loader)
        else:
            plan, self._plan = self._plan, None
            iterator = self._reopen(loader, origin, plan, own)
        self._opened = (iterator, origin)
        return iterator

    def _reopen(self, loader: Any, origin: Origin, plan: _Plan, own: Mapping[str, torch.Generator]) -> Iterator[Any]:
        record, kind = plan.record, plan.record["kind"]
        now = capture_random(own)
        try:
            if kind == "state":
                self._give_state(loader, plan)
            elif kind == "count":
                origin.reused = record.get("reused") is True
                _prepare_workers(loader, origin.reused)
                restore_random(record["before"], own)
            else:
                restore_random(plan.after, _loaders_only(own), defaults=False)
                now = origin.before = capture_random(own)
            if kind == "exhausted":
                origin.exhausted = True
                return iter(())
            iterator: Iterator[Any] = iter(loader)
            if kind == "none":
                return iterator
            origin.redo = _redo(record, plan.after, capture_random(own), all_after=False)
        except CheckpointError as error:
            origin.failure = error
            iterator = iter(loader)
        origin.before = record.get("before")
        restore_random(now, own)
        return iterator

    @staticmethod
    def _give_state(loader: Any, plan: _Plan) -> None:
        if plan.positioned is loader:
            return
        if plan.positioned is not None:
            raise CheckpointError(
                f"checkpoint: load() was given a loader ({_name(plan.positioned)}), but training goes on with another "
                f"one ({_name(loader)}); give load() the loader that run() gets"
            )
        load_loader_state(loader, plan.record)

    def adopt(self, iterator: Iterator[Any], training: bool) -> Origin:
        """The notes of an iterator that is drawn from for the first time."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] is iterator:
            return opened[1]
        origin = Origin(self._declared if training else None)
        if training and self._plan is not None:
            plan, self._plan = self._plan, None
            record, kind = plan.record, plan.record["kind"]
            origin.before = record.get("before")
            origin.exhausted = kind == "exhausted"
            if kind == "state":
                origin.loader = plan.positioned if plan.positioned is not None else origin.loader
                self._position_iterator(iterator, origin, plan)
            if kind in ("state", "count"):
                origin.redo = _redo(record, plan.after, record.get("before"), all_after=True)
        if has_state(iterator):
            origin.loader = iterator
        return origin

    @staticmethod
    def _position_iterator(iterator: Iterator[Any], origin: Origin, plan: _Plan) -> None:
        try:
            if has_state(iterator):
                load_loader_state(iterator, plan.record)
            elif plan.positioned is None:
                raise CheckpointError(
                    f"checkpoint: it holds the state of a loader ({plan.record['class']}), which an iterator "
                    f"({_name(iterator)}) cannot take; give load() the loader before iter(), or use run(loader)"
                )
        except CheckpointError as error:
            origin.failure = error

    def select(self, source: Source) -> None:
        """Training draws from this source from now on."""
        self.current = source
        if self._plan is not None:  # a source that evaluation, or training before the load, has drawn from
            self._plan = None
            source.position.failure = CheckpointError(
                "checkpoint: the first iterator after load() was drawn from before; give training a fresh one"
            )

    def finished(self) -> None:
        """The epoch has ended on all ranks."""
        self.current = None

    # ------------------------------------------------------------------------------------------------ drawing

    @contextmanager
    def drawing(self, source: Source, batch: BatchState, rank: int) -> Iterator[None]:
        """Around the `next()` of a batch: notes the position before it; after a load, sees to it that it is the right
        one."""
        origin: Origin = source.position
        source.exhausted = source.exhausted or origin.exhausted
        own = self.generators(origin.loader) if origin.loader is not None else self._own
        again: InFlight | None = None
        if origin.redo is not None and origin.failure is None:
            redo = origin.redo
            now = self._begin(redo, source, own) if not redo.begun else capture_random(own)
            again = redo.draws.pop(0) if redo.draws and origin.failure is None else None
            restore_random(again.before_draw if again is not None else now, own)
            if not redo.draws:
                origin.redo = None
        if origin.failure is not None:
            batch.failure = Failure(rank, "prefetch", f"CheckpointError: {origin.failure}", origin.failure)
            ended, source.exhausted = source.exhausted, True  # nothing is drawn
            yield
            source.exhausted = ended
            return
        batch.position = self._note(source, own)
        yield
        origin.calls += 1
        if again is not None:
            restore_random(now, own)
            self._compare(again.digest, origin, batch, rank)

    def _begin(self, redo: Redo, source: Source, own: Mapping[str, torch.Generator]) -> RandomState:
        """Draw and drop what was consumed.

        Returns:
            The states to go on with after a batch that is drawn again.
        """
        origin: Origin = source.position
        redo.begun = True
        now = replace(redo.after) if redo.all_after else capture_random(own)
        now.own = {**now.own, **{n: s for n, s in redo.after.own.items() if n.startswith("loader")}}
        if redo.skip_from is not None:
            restore_random(redo.skip_from, own)
        for done in range(redo.skip):
            try:
                next(source.iterator)
            except StopIteration:
                origin.failure = CheckpointError(
                    f"checkpoint: {redo.skip} batches of the epoch had been consumed, but the loader ended after "
                    f"{done}: it is another one or has other data; load(..., start_epoch=True) starts it from the "
                    "beginning"
                )
                break
            except Exception:  # it raised then, too, and the batch counted as consumed
                pass
            origin.calls += 1
        return now

    def _note(self, source: Source, own: Mapping[str, torch.Generator]) -> dict[str, Any]:
        origin: Origin = source.position
        states = capture_random(own)
        if origin.before is None:
            origin.before = states
        return {**self._where(source), "before_draw": states}

    @staticmethod
    def _where(source: Source) -> dict[str, Any]:
        origin: Origin = source.position
        if source.exhausted:
            return {"kind": "exhausted"}
        if has_state(origin.loader):
            return loader_record(origin.loader)
        return {
            "kind": "count",
            "class": _name(origin.loader),
            "consumed": origin.calls,
            "before": origin.before,
            "reused": origin.reused,
        }

    @staticmethod
    def _compare(digest: str | None, origin: Origin, batch: BatchState, rank: int) -> None:
        if batch.failure is None and _digest(batch) != digest:
            origin.failure = CheckpointError(
                f"checkpoint: the loader ({_name(origin.loader)}) does not give the batch that was to come next: its "
                "data, order, batch size or random numbers are not those of the saved run. Use the same loader with "
                "run(loader), one with state_dict() and load_state_dict(), or pipeline.add_generator() for a generator "
                "of its own; load(..., start_epoch=True) starts the data from the beginning"
            )
            batch.failure = Failure(rank, "prefetch", f"CheckpointError: {origin.failure}", origin.failure)

    # ----------------------------------------------------------------------------------------- saving, loading

    def save(self, pending: Sequence[BatchState], loader: Any) -> dict[str, Any]:
        """{"loader": position, "generators": states now} of this rank; changes nothing.

        Args:
            pending: the batches drawn ahead from `current`.
            loader: what the caller says it trains from, or None.

        Raises:
            CheckpointError: training draws from another loader.
        """
        plan = self._plan
        if plan is not None:
            now = capture_random(self.generators(plan.positioned))
            now.own = {**plan.after.own, **now.own}
            return {"loader": _without_states(plan.record), "generators": now.tree()}
        if self.current is None:
            known = loader if loader is not None else self._loader
            return {"loader": dict(NOTHING_UNDER_WAY), "generators": capture_random(self.generators(known)).tree()}
        origin: Origin = self.current.position
        if loader is not None:
            if origin.loader is None:
                origin.loader = self._loader = self._declared = loader
            elif origin.loader is not loader and origin.loader is not self.current.iterator:
                raise CheckpointError(
                    f"checkpoint: save() was given a loader ({_name(loader)}), but the pipeline draws from another one "
                    f"({_name(origin.loader)}); leave loader out or give the one that run() got"
                )
        if origin.failure is not None:
            raise origin.failure
        record = (pending[0].position if pending else None) or self._where(self.current)
        in_flight = []
        for batch in pending:
            if batch.position is None or batch.position["kind"] == "exhausted":
                break  # nothing was drawn
            in_flight.append({"before_draw": batch.position["before_draw"], "fingerprint": _digest(batch)})
        record = {**record, "in_flight": in_flight}
        record.pop("before_draw", None)
        return {
            "loader": _without_states(record),
            "generators": capture_random(self.generators(origin.loader)).tree(),
        }

    def load(self, record: dict[str, Any], generators: dict[str, Any] | None, loader: Any) -> None:
        """Continue from a saved position with the first training iterator from now on.

        Args:
            record: as saved; NOTHING_UNDER_WAY for the start of an epoch.
            generators: the states when it was saved; None leaves them as they are.
            loader: gets its state now, if it is known.
        """
        self.current = self._opened = self._plan = None
        positioned = None
        if record["kind"] == "state" and loader is not None:
            load_loader_state(loader, record)
            positioned = loader
        if loader is not None:
            self._loader = self._declared = loader
        own = self.generators(loader)
        states = None if generators is None else RandomState.from_tree(generators)
        if states is not None:
            restore_random(states, own)
        if record["kind"] != "none" or states is not None:
            after = states if states is not None else capture_random(own)
            self._plan = _Plan(_with_states(record), after, positioned)


def _keeps_workers(loader: Any) -> bool:
    """Whether iter() of a torch DataLoader will go on with workers that it has (persistent_workers=True)."""
    return isinstance(loader, torch.utils.data.DataLoader) and loader._iterator is not None


def _prepare_workers(loader: Any, reused: bool) -> None:
    """Let the next iter() find workers, or none, as that of the saved run did: its random numbers depend on it."""
    if not isinstance(loader, torch.utils.data.DataLoader) or not loader.persistent_workers:
        return
    if not reused:
        loader._iterator = None
    elif loader._iterator is None:
        iter(loader)


def loader_record(loader: Any) -> dict[str, Any]:
    """The position of a loader that has a state."""
    return {
        "kind": "state",
        "class": _name(loader),
        "any_world_size": bool(getattr(loader, "state_for_any_world_size", False)),
        "state": copy.deepcopy(loader.state_dict()),
    }


def load_loader_state(loader: Any, record: Mapping[str, Any]) -> None:
    """Give a loader its state.

    Raises:
        CheckpointError: it has no load_state_dict, or refuses the state.
    """
    if not has_state(loader):
        raise CheckpointError(
            f"checkpoint: it holds the state of a loader ({record['class']}), but this one ({_name(loader)}) has no "
            "load_state_dict(); use a loader of that kind, or load(..., start_epoch=True)"
        )
    try:
        loader.load_state_dict(copy.deepcopy(record["state"]))
    except Exception as error:
        raise CheckpointError(
            f"checkpoint: the loader ({_name(loader)}) refuses the saved state: {type(error).__name__}: {error}"
        ) from error


def _redo(record: Mapping[str, Any], after: RandomState, opened: RandomState | None, *, all_after: bool) -> Redo:
    counted = record["kind"] == "count"
    draws = [InFlight(each["before_draw"], each["fingerprint"]) for each in record.get("in_flight", [])]
    return Redo(record["consumed"] if counted else 0, opened if counted else None, draws, after, all_after)


def _digest(batch: BatchState) -> str | None:
    """Of what the loader gave, where that was a batch with samples or an item to be fetched."""
    drawn = batch.raw if batch.item is None else batch.item
    return fingerprint(drawn) if batch.has_batch and drawn is not None else None


def _without_states(record: Mapping[str, Any]) -> dict[str, Any]:
    """For checkpoints: states of generators as trees."""
    found: dict[str, Any] = {k: v.tree() if isinstance(v, RandomState) else v for k, v in record.items()}
    if "in_flight" in found:
        found["in_flight"] = [_without_states(each) for each in found["in_flight"]]
    return found


def _with_states(record: Mapping[str, Any]) -> dict[str, Any]:
    """What `_without_states` made, or an earlier version, which knew one batch in flight."""
    found = {key: value for key, value in record.items() if key not in ("before_draw", "fingerprint")}
    if found.get("before") is not None:
        found["before"] = RandomState.from_tree(found["before"])
    if "in_flight" in found:
        found["in_flight"] = [
            {"before_draw": RandomState.from_tree(each["before_draw"]), "fingerprint": each.get("fingerprint")}
            for each in batches_in_flight(record)
        ]
    return found


def batches_in_flight(record: Mapping[str, Any]) -> list[Any]:
    """The notes of a saved position about batches that had been drawn ahead; of one batch in an older form, too."""
    in_flight = record.get("in_flight", [])
    if isinstance(in_flight, bool):
        return [record] if in_flight and record.get("kind") != "exhausted" else []
    return list(in_flight)


def _loaders_only(own: Mapping[str, torch.Generator]) -> dict[str, torch.Generator]:
    return {name: generator for name, generator in own.items() if name.startswith("loader")}


def _name(loader: Any) -> str:
    return "an iterator" if loader is None else type(loader).__qualname__
