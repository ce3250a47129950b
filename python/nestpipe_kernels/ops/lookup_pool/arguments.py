"""Checks of what the pooling operations take; messages name what, expected and got."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _row_checks as checks
from .bags import Bags
from .reference import MAX, MEAN, NONE, check_bags

__all__ = ["OPERATION", "check_contents", "check_matrices", "checked_bags", "checked_grads"]

OPERATION = "lookup_pool"


def checked_bags(
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    weights: Tensor | None,
) -> Bags:
    """Types and shapes; what stands in the tensors is checked by the implementation, in one pass."""
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64) or not slots.is_cpu:
        raise TypeError(f"{OPERATION}: slots must be an int32 or int64 CPU tensor, got {checks.describe(slots)}")
    if slots.dim() != 1:
        raise ValueError(f"{OPERATION}: slots must be a vector, got {checks.describe(slots)}")
    checks.check_index(OPERATION, "bag_offsets", bag_offsets)
    if bag_offsets.numel() == 0:
        raise ValueError(f"{OPERATION}: bag_offsets must have at least the entry 0, got none")
    if weights is not None:
        if weights.dtype != torch.float32 or weights.device.type != "cpu":
            raise TypeError(f"{OPERATION}: weights must be a float32 CPU tensor, got {checks.describe(weights)}")
        if weights.shape != slots.shape:
            raise ValueError(
                f"{OPERATION}: weights must have the shape of slots {list(slots.shape)}, got {list(weights.shape)}"
            )
        weights = weights.detach().contiguous()
    if len(segment_bags) != len(segment_modes) + 1:
        raise ValueError(
            f"{OPERATION}: segment_bags must have one entry more than segment_modes ({len(segment_modes)}), "
            f"got {len(segment_bags)}"
        )
    return Bags(slots.contiguous(), bag_offsets, tuple(segment_bags), tuple(segment_modes), weights)


def check_matrices(name: str, matrices: Sequence[Tensor | None], bags: Bags, dim: int) -> None:
    """One matrix [bags of the segment, dim] per segment, or None."""
    if len(matrices) != bags.num_segments:
        raise ValueError(
            f"{OPERATION}: {name} must have one matrix per segment ({bags.num_segments}), got {len(matrices)}"
        )
    for segment, matrix in enumerate(matrices):
        if matrix is None:
            continue
        expected = [bags.segment_bags[segment + 1] - bags.segment_bags[segment], dim]
        if list(matrix.shape) != expected:
            raise ValueError(f"{OPERATION}: {name}[{segment}] must have shape {expected}, got {list(matrix.shape)}")


def checked_grads(grads: Sequence[Tensor | None], bags: Bags, dim: int) -> list[Tensor | None]:
    """Gradients of the segments, float32 with contiguous rows."""
    check_matrices("grads", grads, bags, dim)
    checked: list[Tensor | None] = []
    for segment, grad in enumerate(grads):
        if grad is not None and (grad.dtype != torch.float32 or not grad.is_cpu):
            raise TypeError(f"{OPERATION}: grads[{segment}] must be a float32 CPU tensor, got {checks.describe(grad)}")
        checked.append(None if grad is None else checks.contiguous_rows(grad.detach()))
    return checked


def check_contents(bags: Bags, num_rows: int) -> None:
    """As `check_bags`, in a few passes of plain PyTorch; whatever is wrong is told by that one."""
    offsets, slots = bags.bag_offsets, bags.slots
    if not offsets.is_cpu:
        return
    ends = list(bags.segment_bags)
    good = ends[0] == 0 and ends[-1] == bags.num_bags and ends == sorted(ends)
    good = good and int(offsets[0]) == 0 and int(offsets[-1]) == len(slots) and not bool((offsets.diff() < 0).any())
    good = good and all(0 <= mode <= NONE for mode in bags.segment_modes)
    good = good and not (bags.weights is not None and {MEAN, MAX} & set(bags.segment_modes))
    for mode, first, last in bags.runs() if good else ():
        good = good and (mode != NONE or bool((offsets[first : last + 1].diff() == 1).all()))
    if good and len(slots):
        low, high = torch.aminmax(slots)
        good = int(low) >= -1 and int(high) < num_rows
    if not good:
        check_bags(bags, num_rows)
