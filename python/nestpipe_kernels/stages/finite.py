"""Which row gradients count: judged by the source that sent them, before they arrive, and by the owner by the same rule
when they have.

A source's gradient of a row is bad if it holds a NaN or a magnitude above the largest float32 / (2 W), divided by the
source's divisor first: so the sum of W good ones is finite. Both sides look at the same float32 values, so they agree
without a word; only the sources' counts travel, with the commit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.on_device import place
from ..ops.wire_rows import decode_rows, encode_rows
from .state import BatchState, RankState, StorePlan

__all__ = ["as_read", "bad_bounds", "judge_own", "largest", "largest_good", "note_gradients"]

_NAMED_KEYS = 4
_FLOAT_MAX = torch.finfo(torch.float32).max


def largest(rows: Tensor) -> Tensor:
    """float32 [n]: the largest magnitude in each row of float32 [n, dim]; NaN where a row holds one."""
    return torch.maximum(rows.amax(1), -rows.amin(1))


def largest_good(world_size: int) -> float:
    """The largest magnitude with which a source's gradient, divided by its divisor, counts."""
    return _FLOAT_MAX / (2 * world_size)


def as_read(parts: Tensor, peaks: Tensor, wire: str) -> tuple[Tensor, Tensor]:
    """(float32 [n, dim], float32 [n]): what the owner will read of gradients that travel as `wire`, and its largest
    magnitudes; `peaks` are those of `parts`."""
    if wire == "fp32":
        return parts, peaks
    read = decode_rows(encode_rows(parts, wire), parts.shape[1], wire)
    return read, largest(read)


def note_gradients(plan: StorePlan, positions: Tensor, peaks: Tensor) -> None:
    """Remember the largest magnitudes of gradients that are complete, as the owner will read them."""
    known = _peaks(plan)
    known[place(positions, known)] = peaks


def bad_bounds(bounds: Tensor, divisor: float, world_size: int) -> Tensor:
    """bool [n]: which rows of one source do not count, of gradients of which only bounds are known: those that owners
    pool."""
    return ~(bounds / abs(divisor) <= largest_good(world_size))


def _bound(plan: StorePlan) -> Tensor:
    """float64 [M]: bounds of all micro-batches added up, in the order in which the owner does."""
    total = torch.zeros(len(plan.source.lists.keys), dtype=torch.float64)
    for micro in range(len(plan.parts)):
        total += plan.bounds.get(micro, torch.full_like(total, float("nan")))
    return total


def _peaks(plan: StorePlan) -> Tensor:
    """What has not been looked at is bad."""
    if plan.peaks is None:
        plan.peaks = torch.full(
            (len(plan.source.lists.keys),), float("nan"), dtype=torch.float32, device=plan.gradients.device
        )
    return plan.peaks


def judge_own(rank: RankState, batch: BatchState) -> tuple[int, str]:
    """How many of this rank's row gradients are bad, and the first of them in words."""
    bad, names = 0, []
    if not batch.training or batch.failure is not None:
        return 0, ""
    divisor = torch.tensor(abs(batch.loss_divisor), dtype=torch.float32)  # as it travels
    for binding, plan in zip(rank.bindings, batch.plans):
        peaks = _peaks(plan).cpu() if not plan.parts else _bound(plan)
        rows = torch.nonzero(~(peaks / divisor.to(peaks.dtype) <= largest_good(rank.communicator.size))).squeeze(1)
        bad += len(rows)
        for row in rows[:_NAMED_KEYS].tolist():
            lists = plan.source.lists
            names.append(f"table {binding.store.tables[int(lists.tables[row])].name!r} key {int(lists.keys[row])}")
    return bad, ", ".join(names[:_NAMED_KEYS])
