"""lookup_pool in plain PyTorch: the truth that native code must equal bit for bit.

`pool` and `row_gradient` are the two rules of summation, small and self-contained. `pool` is differentiable and takes
float64, so autograd of it is the truth for gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...types import PoolingType
from .bags import Bags

__all__ = [
    "GRADIENT_BLOCK",
    "check_bags",
    "lane_sum",
    "occurrence_gradients",
    "pool",
    "pool_backward",
    "pool_forward",
    "pool_gradient_bound",
    "pool_weight_grad",
    "row_gradient",
    "segment_of",
]

GRADIENT_BLOCK = 1024
"""Occurrences of a row whose gradients are summed on their own before block sums are added."""

SUM_LANES = 16

SUM, MEAN, MAX, NONE = (mode.code for mode in (PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX, PoolingType.NONE))


def pool(
    rows: Tensor, bag_offsets: Tensor, mode: int, weights: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """Pool consecutive rows into bags, in bag order, starting sums at +0.0.

    Args:
        rows: float [n, D], the row of each occurrence.
        bag_offsets: int64 [num_bags + 1], from 0 to n.
        mode: `PoolingType.code`.
        weights: float [n] or None; sum adds `weight * row`, none gives it.
        valid: bool [n] or None; False is padding: skipped, not counted.

    Returns:
        [num_bags, D]; 0 for bags without valid rows. Max keeps the first of equal values, and the first NaN.
    """
    num_bags = bag_offsets.numel() - 1
    if valid is not None:
        before = torch.cat([valid.new_zeros(1, dtype=torch.int64), valid.to(torch.int64).cumsum(0)])
        rows, bag_offsets = rows[valid], before[bag_offsets]
        weights = None if weights is None else weights[valid]
    if weights is not None:
        rows = weights[:, None] * rows
    starts, lengths = bag_offsets[:-1], bag_offsets.diff()
    pooled = rows.new_zeros(num_bags, rows.shape[1])
    for position in range(int(lengths.max()) if num_bags else 0):
        active = (lengths > position)[:, None]
        row = rows[(starts + position).clamp(max=rows.shape[0] - 1)]
        if mode == NONE:
            added = row
        elif mode == MAX:
            is_larger = (row > pooled) | (row.isnan() & ~pooled.isnan())
            added = torch.where(is_larger, row, pooled) if position else row
        else:
            added = pooled + row
        pooled = torch.where(active, added, pooled)
    if mode == MEAN:
        pooled = torch.where((lengths > 0)[:, None], pooled / lengths.clamp(min=1)[:, None].to(rows.dtype), pooled)
    return pooled


def row_gradient(occurrence_grads: Tensor) -> Tensor:
    """[k, D] gradients of one row's occurrences, in order -> [D]: blocks of 1,024 from +0.0, block sums ascending."""
    total = occurrence_grads.new_zeros(occurrence_grads.shape[1])
    for begin in range(0, occurrence_grads.shape[0], GRADIENT_BLOCK):
        block = occurrence_grads.new_zeros(occurrence_grads.shape[1])
        for grad in occurrence_grads[begin : begin + GRADIENT_BLOCK]:
            block = block + grad
        total = total + block
    return total


def lane_sum(values: Tensor) -> Tensor:
    """[m, D] -> [m]: element d goes to lane d % 16 in ascending d; lanes are added 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    num_rows, dim = values.shape
    lanes = values.new_zeros(num_rows, SUM_LANES)
    for begin in range(0, dim, SUM_LANES):
        part = values[:, begin : begin + SUM_LANES]
        lanes[:, : part.shape[1]] = lanes[:, : part.shape[1]] + part
    half = SUM_LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def pool_forward(rows: Tensor, bags: Bags, outs: Sequence[Tensor]) -> None:
    """As the package's `pool_forward`, arguments as checked there."""
    check_bags(bags, rows.shape[0])
    for segment, out in enumerate(outs):
        begin, end, offsets = segment_of(bags, segment)
        slots = bags.slots[begin:end].long()
        weights = None if bags.weights is None else bags.weights[begin:end]
        occurrence_rows = _rows_of(rows, slots)
        with torch.no_grad():
            out.copy_(pool(occurrence_rows, offsets, bags.segment_modes[segment], weights, slots >= 0))


def pool_backward(grads: Sequence[Tensor | None], rows: Tensor | None, bags: Bags, accumulator: Tensor) -> None:
    """As the package's `pool_backward`, arguments as checked there."""
    check_bags(bags, accumulator.shape[0])
    contributions = occurrence_gradients(grads, rows, bags, accumulator.shape[1])
    slots = bags.slots.long()
    for slot in sorted(set(slots[slots >= 0].tolist())):
        accumulator[slot] = accumulator[slot] + row_gradient(contributions[slots == slot])


def pool_gradient_bound(grads: Sequence[Tensor | None], bags: Bags) -> float:
    """As the package's `pool_gradient_bound`, arguments as checked there."""
    values = [grad.abs().amax() for grad in grads if grad is not None and grad.numel()]
    bound = max((float(value) if value.isfinite() else float("inf") for value in values), default=0.0)
    if bags.weights is not None and bags.weights.numel():
        weight = bags.weights.abs().amax()
        if not weight.isfinite():
            return float("inf")
        bound *= max(float(weight), 1.0)
    return bound * 4.0 * max(1, bags.slots.numel())


def pool_weight_grad(grads: Sequence[Tensor | None], rows: Tensor, bags: Bags) -> Tensor:
    """As the package's `pool_weight_grad`, arguments as checked there."""
    check_bags(bags, rows.shape[0])
    if MEAN in bags.segment_modes or MAX in bags.segment_modes:
        raise ValueError("lookup_pool: gradients of weights need pooling sum or none")
    slots = bags.slots.long()
    unweighted = Bags(bags.slots, bags.bag_offsets, bags.segment_bags, bags.segment_modes, None)
    bag_grads = occurrence_gradients(grads, None, unweighted, rows.shape[1])
    dots = lane_sum(bag_grads * _rows_of(rows, slots))
    return torch.where(slots >= 0, dots, torch.zeros_like(dots))


def occurrence_gradients(grads: Sequence[Tensor | None], rows: Tensor | None, bags: Bags, dim: int) -> Tensor:
    """[n, D]: what each occurrence adds to its row's gradient (exactness rule 3); 0 where grads is None."""
    parts = [torch.empty(0, dim, dtype=torch.float32)]
    for segment, grad in enumerate(grads):
        begin, end, offsets = segment_of(bags, segment)
        if grad is None:
            parts.append(torch.zeros(end - begin, dim, dtype=torch.float32))
            continue
        slots = bags.slots[begin:end].long()
        bag_of = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())
        contribution = grad[bag_of]
        mode = bags.segment_modes[segment]
        if mode == MEAN:
            counts = torch.zeros(offsets.numel() - 1, dtype=torch.float32).index_add(0, bag_of, (slots >= 0).float())
            contribution = contribution / counts[bag_of][:, None]
        elif mode == MAX:
            if rows is None:
                raise ValueError("lookup_pool: pooling max needs `rows` in backward, got none")
            contribution = torch.where(_wins(rows, slots, offsets), contribution, torch.zeros((), dtype=torch.float32))
        elif bags.weights is not None:
            contribution = bags.weights[begin:end, None] * contribution
        parts.append(contribution)
    return torch.cat(parts)


def _wins(rows: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """bool [n, D]: which occurrence supplied its bag's maximum."""
    wins = torch.zeros(slots.numel(), rows.shape[1], dtype=torch.bool)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        winner = None
        for position in range(begin, end):
            if slots[position] < 0:
                continue
            row = rows[slots[position]]
            if winner is None:
                winner, maximum = torch.full((rows.shape[1],), position), row
                continue
            is_larger = (row > maximum) | (row.isnan() & ~maximum.isnan())
            winner = torch.where(is_larger, position, winner)
            maximum = torch.where(is_larger, row, maximum)
        if winner is not None:
            wins[winner, torch.arange(rows.shape[1])] = True
    return wins


def _rows_of(rows: Tensor, slots: Tensor) -> Tensor:
    """The row of each slot; zeros for padding."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return padded[torch.where(slots < 0, rows.shape[0], slots)]


def segment_of(bags: Bags, segment: int) -> tuple[int, int, Tensor]:
    """First and last occurrence of a segment, and its bags' offsets from the first."""
    first, last = bags.segment_bags[segment], bags.segment_bags[segment + 1]
    offsets = bags.bag_offsets[first : last + 1]
    return int(offsets[0]), int(offsets[-1]), offsets - offsets[0]


def check_bags(bags: Bags, num_rows: int) -> None:
    """What the extension checks in `check_bags`, with the same messages."""
    _check_ascending("segment_bags", list(bags.segment_bags), bags.num_bags, "bags")
    _check_ascending("bag_offsets", bags.bag_offsets.tolist(), bags.slots.numel(), "slots")
    for segment, mode in enumerate(bags.segment_modes):
        if mode not in (SUM, MEAN, MAX, NONE):
            raise ValueError(
                "lookup_pool: segment_modes must be 0 (sum), 1 (mean), 2 (max) or 3 (none), "
                f"got {mode} for segment {segment}"
            )
        if bags.weights is not None and mode in (MEAN, MAX):
            name = "mean" if mode == MEAN else "max"
            raise ValueError(
                f"lookup_pool: per-sample weights need pooling sum or none, got {name} for segment {segment}"
            )
        if mode != NONE:
            continue
        for bag in range(bags.segment_bags[segment], bags.segment_bags[segment + 1]):
            length = int(bags.bag_offsets[bag + 1] - bags.bag_offsets[bag])
            if length != 1:
                raise ValueError(
                    f"lookup_pool: pooling none needs exactly one occurrence per bag, got {length} in bag {bag}"
                )
    bad = ((bags.slots < -1) | (bags.slots >= num_rows)).nonzero()
    if bad.numel():
        position = int(bad[0])
        raise IndexError(
            f"lookup_pool: slots must lie in [-1, {num_rows}) where -1 is padding, "
            f"got {int(bags.slots[position])} at position {position}"
        )


def _check_ascending(name: str, values: list[int], last: int, last_name: str) -> None:
    if values[0] != 0:
        raise ValueError(f"lookup_pool: {name} must start at 0, got {values[0]}")
    for position, (low, high) in enumerate(itertools.pairwise(values), start=1):
        if high < low:
            raise ValueError(f"lookup_pool: {name} must not decrease, got {low} then {high} at position {position}")
    if values[-1] != last:
        raise ValueError(f"lookup_pool: {name} must end at the number of {last_name} ({last}), got {values[-1]}")
