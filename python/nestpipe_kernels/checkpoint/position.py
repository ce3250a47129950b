"""The position in the data of a checkpoint: what each rank saved, checked, and what a rank continues from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointError
from ..pipeline.position import NOTHING_UNDER_WAY, batches_in_flight, has_state, loader_record
from .generators import check_random

__all__ = ["UNKNOWN", "choose_record", "describe", "record_without_pipeline"]

UNKNOWN: dict[str, Any] = {"kind": "unknown"}
"""Saved without a pipeline and without a loader."""
_KINDS = ("none", "unknown", "state", "count", "exhausted")


def record_without_pipeline(loader: Any) -> dict[str, Any]:
    """The position of a loader that the caller draws from by itself.

    Raises:
        CheckpointError: it has no state_dict() and load_state_dict().
    """
    if loader is None:
        return dict(UNKNOWN)
    if not has_state(loader):
        raise CheckpointError(
            f"checkpoint: without a pipeline only a loader with state_dict() and load_state_dict() can be saved, got "
            f"{type(loader).__name__}; leave loader out, or train through a pipeline"
        )
    return {**loader_record(loader), "in_flight": []}


def choose_record(
    records: Sequence[Any], rank: int, world_size: int, loader: Any, has_pipeline: bool, start_epoch: bool
) -> dict[str, Any]:
    """What this rank continues from.

    Args:
        records: what each rank of the saved run noted, decoded.
        rank, world_size: of this run.
        loader: given to load(), or None.
        has_pipeline: whether a pipeline will count and drop batches.
        start_epoch: the caller wants the data from its beginning.

    Raises:
        CheckpointError: the position cannot be continued from; says why and what to do.
    """
    if start_epoch:
        return dict(NOTHING_UNDER_WAY)
    if len(records) == world_size:
        record = records[rank]
        _check(record, f"ranks[{rank}].loader")
    else:
        record = _for_any_world(records, world_size)
    if record["kind"] == "unknown" and (loader is not None or has_pipeline):
        raise CheckpointError(
            "checkpoint: it does not say where the data stood (it was saved without a loader, or resharded in the "
            "middle of an epoch); load with start_epoch=True, and the data starts from its beginning"
        )
    if record["kind"] == "state" and loader is not None and not has_state(loader):
        raise CheckpointError(
            f"checkpoint: it holds the state of a loader ({record['class']}), but the one given "
            f"({type(loader).__name__}) has no load_state_dict(); use a loader of that kind, or start_epoch=True"
        )
    if record["kind"] in ("count", "exhausted") and not has_pipeline and loader is not None:
        raise CheckpointError(
            f"checkpoint: the position of its loader ({record.get('class', 'exhausted')}) is a number of batches, "
            "which only a pipeline can drop; pass pipeline=, or start_epoch=True"
        )
    return dict(NOTHING_UNDER_WAY) if record["kind"] == "unknown" else record


def _for_any_world(records: Sequence[Any], world_size: int) -> dict[str, Any]:
    """A position for another number of ranks: rank 0's, if its loader's state serves any."""
    for number, record in enumerate(records):
        _check(record, f"ranks[{number}].loader")
    if all(record["kind"] in ("none", "unknown") for record in records):
        return dict(records[0])
    for record in records:
        if record["kind"] == "state" and record["any_world_size"]:
            return {**record, "in_flight": []}
    held = next((r["class"] for r in records if "class" in r), "a loader that had ended")
    ranks = f"{len(records)} rank{'s' * (len(records) > 1)}"
    raise CheckpointError(
        f"checkpoint: it was saved by {ranks} in the middle of an epoch and is loaded by {world_size}, "
        f"but the position of its loader ({held}) holds for {ranks} only; load with start_epoch=True "
        "(the data starts from its beginning), or train with a loader whose position serves any number of ranks: "
        "nestpipe_kernels.data's BatchLoader, or one of your own with state_for_any_world_size = True"
    )


def describe(record: dict[str, Any], followed: bool) -> str:
    """In words, for the report; `followed`: there is a pipeline or a loader to continue with."""
    kind = record["kind"]
    if kind == "none":
        return "starts an epoch"
    if not followed:
        return "position left out, as there is neither a pipeline nor a loader"
    if kind == "exhausted":
        return "has ended on this rank; the epoch goes on elsewhere"
    if kind == "count":
        return f"continues after {record['consumed']} batches of its epoch ({record['class']}, by drawing them again)"
    return f"continues from the state of its loader ({record['class']})"


def _check(record: Any, path: str) -> None:
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in _KINDS:
        raise CheckpointError(f"checkpoint: {path}.kind must be one of {', '.join(_KINDS)}, got {str(kind)[:50]!r}")
    if kind in ("none", "unknown"):
        return
    wrong = None
    if kind == "count" and not (_is_count(record.get("consumed")) and isinstance(record.get("class"), str)):
        wrong = "consumed (an integer >= 0) and class"
    if kind == "state" and not ("state" in record and isinstance(record.get("class"), str)):
        wrong = "state and class"
    if kind == "state" and not isinstance(record.get("any_world_size"), bool):
        wrong = "any_world_size"
    if not isinstance(record.get("in_flight", []), bool | list) or not all(map(_is_draw, batches_in_flight(record))):
        wrong = "in_flight (a list of before_draw and fingerprint)"
    if wrong is not None:
        raise CheckpointError(f"checkpoint: {path}: a position of kind {kind!r} must have {wrong}")
    if kind == "count":
        check_random(record.get("before"), f"{path}.before")
    for number, draw in enumerate(batches_in_flight(record)):
        check_random(draw.get("before_draw"), f"{path}.in_flight[{number}].before_draw")


def _is_draw(draw: Any) -> bool:
    return isinstance(draw, dict) and (draw.get("fingerprint") is None or isinstance(draw["fingerprint"], str))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
