"""lookup_pool for rows on an accelerator, bags on the host: by the kernels of `_cuda`, or in plain PyTorch, in steps
by position in the bag.

The order of additions, and so the bits, are the reference's. What depends on keys alone (which occurrence comes when)
is worked out on the host; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _row_checks as checks
from ..on_device import place
from . import cuda
from .arguments import OPERATION, check_contents
from .bags import Bags
from .reference import GRADIENT_BLOCK, MAX, MEAN, NONE, lane_sum, segment_of

__all__ = ["pool_backward", "pool_forward", "pool_weight_grad"]


@torch.no_grad()
def pool_forward(rows: Tensor, bags: Bags, outs: Sequence[Tensor], *, native: bool = False) -> None:
    """As the package's `pool_forward`; rows and outs on one device, the rest on the host."""
    check_contents(bags, rows.shape[0])
    if native:
        _check_places(rows, "outs", outs)
        cuda.pool_forward(rows, bags, outs)
        return
    for segment, out in enumerate(outs):
        out.copy_(_pool(rows, bags, segment)[0])


def _check_places(like: Tensor, name: str, matrices: Sequence[Tensor | None]) -> None:
    """What kernels could not tell: float32, all on one device."""
    checks.check_matrix(OPERATION, "rows", like, device=like.device)
    for segment, matrix in enumerate(matrices):
        if matrix is not None and (matrix.dtype != torch.float32 or matrix.device != like.device):
            wanted = f"{name}[{segment}] must be a float32 tensor on {like.device}"
            raise TypeError(f"{OPERATION}: {wanted}, got {checks.describe(matrix)}")


def _pool(rows: Tensor, bags: Bags, segment: int) -> tuple[Tensor, Tensor | None]:
    """Pooled rows [bags, D] of a segment, and for MAX which valid occurrence of its bag won, int64 [bags, D]."""
    begin, end, offsets = segment_of(bags, segment)
    slots, mode = bags.slots[begin:end].long(), bags.segment_modes[segment]
    valid = slots >= 0
    before = torch.zeros(len(slots) + 1, dtype=torch.int64)
    torch.cumsum(valid, 0, out=before[1:])
    kept, bounds = slots[valid], before[offsets]
    weights = None if bags.weights is None else bags.weights[begin:end][valid]
    starts, lengths = bounds[:-1], bounds.diff()
    pooled = torch.zeros(len(lengths), rows.shape[1], dtype=rows.dtype, device=rows.device)
    winners = torch.zeros(pooled.shape, dtype=torch.int64, device=rows.device) if mode == MAX else None
    for position in range(int(lengths.max()) if len(lengths) else 0):
        active = torch.nonzero(lengths > position).squeeze(1)
        at = starts[active] + position
        row, where = rows.index_select(0, place(kept[at], rows)), place(active, rows)
        if weights is not None:
            row = place(weights[at], rows)[:, None] * row
        if mode == NONE or (mode == MAX and position == 0):
            pooled.index_copy_(0, where, row)
        elif mode == MAX:
            assert winners is not None
            old = pooled.index_select(0, where)
            larger = (row > old) | (row.isnan() & ~old.isnan())
            pooled.index_copy_(0, where, torch.where(larger, row, old))
            was = winners.index_select(0, where)
            winners.index_copy_(0, where, torch.where(larger, torch.full_like(was, position), was))
        else:
            pooled.index_copy_(0, where, pooled.index_select(0, where) + row)
    if mode == MEAN:
        pooled = pooled / place(lengths.clamp(min=1).to(torch.float32), rows)[:, None]
    return pooled, winners


@torch.no_grad()
def pool_backward(
    grads: Sequence[Tensor | None], rows: Tensor | None, bags: Bags, accumulator: Tensor, *, native: bool = False
) -> None:
    """As the package's `pool_backward`; grads, rows and accumulator on one device, the rest on the host."""
    check_contents(bags, accumulator.shape[0])
    if native:
        if rows is None and any(mode == MAX and grad is not None for mode, grad in zip(bags.segment_modes, grads)):
            raise ValueError("lookup_pool: pooling max needs `rows` in backward, got none")
        _check_places(accumulator, "grads", grads)
        if rows is not None:
            checks.check_matrix(OPERATION, "rows", rows, device=accumulator.device)
        cuda.pool_backward(grads, rows, bags, accumulator)
        return
    contributions = _contributions(grads, rows, bags, accumulator)
    slots = bags.slots.long()
    occurrences = torch.nonzero(slots >= 0).squeeze(1)
    if not len(occurrences):
        return
    ordered, order = torch.sort(slots[occurrences], stable=True)
    occurrences = occurrences[order]
    distinct, row_of, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    rank = torch.arange(len(ordered)) - (counts.cumsum(0) - counts)[row_of]
    block, within = rank // GRADIENT_BLOCK, rank % GRADIENT_BLOCK
    block_id = torch.cumsum(within == 0, 0) - 1
    sums = accumulator.new_zeros(int(block_id[-1]) + 1, accumulator.shape[1])
    for position in range(int(within.max()) + 1):
        chosen = torch.nonzero(within == position).squeeze(1)
        added = contributions.index_select(0, place(occurrences[chosen], accumulator))
        _add(sums, block_id[chosen], added)
    heads = torch.nonzero(within == 0).squeeze(1)
    totals = accumulator.new_zeros(len(distinct), accumulator.shape[1])
    for number in range(int(block.max()) + 1):
        chosen = heads[block[heads] == number]
        _add(totals, row_of[chosen], sums.index_select(0, place(block_id[chosen], accumulator)))
    _add(accumulator, distinct, totals)


def _add(target: Tensor, index: Tensor, source: Tensor) -> None:
    """target[index] += source for distinct rows."""
    there = place(index, target)
    target.index_copy_(0, there, target.index_select(0, there) + source)


@torch.no_grad()
def pool_weight_grad(grads: Sequence[Tensor | None], rows: Tensor, bags: Bags, *, native: bool = False) -> Tensor:
    """As the package's `pool_weight_grad`; the result is on the device."""
    check_contents(bags, rows.shape[0])
    if MEAN in bags.segment_modes or MAX in bags.segment_modes:
        raise ValueError("lookup_pool: gradients of weights need pooling sum or none")
    if native:
        _check_places(rows, "grads", grads)
        return cuda.pool_weight_grad(grads, rows, bags)
    slots = bags.slots.long()
    bag_grads = _contributions(grads, None, bags, rows)
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    found = padded.index_select(0, place(torch.where(slots < 0, rows.shape[0], slots), rows))
    dots = lane_sum(bag_grads * found)
    return torch.where(place(slots >= 0, rows), dots, torch.zeros_like(dots))


def _contributions(grads: Sequence[Tensor | None], rows: Tensor | None, bags: Bags, like: Tensor) -> Tensor:
    """[n, D]: what each occurrence adds to its row's gradient; 0 where grads is None."""
    parts = [like.new_zeros(0, like.shape[1])]
    for segment, grad in enumerate(grads):
        begin, end, offsets = segment_of(bags, segment)
        if grad is None:
            parts.append(like.new_zeros(end - begin, like.shape[1]))
            continue
        slots, mode = bags.slots[begin:end].long(), bags.segment_modes[segment]
        bag_of = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())
        contribution = grad.index_select(0, place(bag_of, grad))
        if mode == MEAN:
            counts = torch.zeros(offsets.numel() - 1, dtype=torch.float32).index_add(0, bag_of, (slots >= 0).float())
            contribution = contribution / place(counts[bag_of], grad)[:, None]
        elif mode == MAX:
            if rows is None:
                raise ValueError("lookup_pool: pooling max needs `rows` in backward, got none")
            winners = _pool(rows, bags, segment)[1]
            assert winners is not None
            number = torch.cumsum(slots >= 0, 0) - 1
            firsts = torch.cat([torch.zeros(1, dtype=torch.int64), number + 1])[offsets[:-1]]
            own = torch.where(slots >= 0, number - firsts[bag_of], -1)
            wins = winners.index_select(0, place(bag_of, grad)) == place(own, grad)[:, None]
            contribution = torch.where(wins, contribution, torch.zeros_like(contribution))
        elif bags.weights is not None:
            contribution = place(bags.weights[begin:end, None], grad) * contribution
        parts.append(contribution)
    return torch.cat(parts)
