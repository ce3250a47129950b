"""lookup_pool in Triton, for rows of a CUDA device: bags on the host or there; the order of additions, and so the bits,
are the reference's. Nothing waits for the device, and no sum depends on what runs when (no atomics).

forward   A warp has one bag, or a few where rows are short, and reads 8 rows of each at a time. A bag of more than
          1,024 occurrences has a warp for every 32 columns, which asks for 32 rows before it adds them: additions of
          one column have to wait for each other, so a bag of 100,000 takes at least 100,000 of them (4 cycles each) and
          3,125 trips to memory. Floor: n * D * size + bags * D * 4 bytes, and 4 or 8 bytes of slot an occurrence.
backward  Occurrences are sorted by row (torch.sort, stable: the order of the rules). A warp sums a row; rows of more
          than 1,024 occurrences are first summed in their blocks of 1,024, all blocks in parallel, then their blocks.
          Floor: n * D * 4 bytes of gradients, where bags' gradients do not stay in the cache, and U * D * 8.
weights   8 occurrences a warp. Floor: n * D * (4 + size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _row_checks as checks
from .._triton import LAUNCH, on_device_of, power_of_two, row_places, vector_width
from ..on_device import place
from . import triton_kernels as kernels
from .arguments import OPERATION, check_contents
from .bags import Bags
from .reference import GRADIENT_BLOCK, MAX, MEAN

__all__ = ["pool_backward", "pool_forward", "pool_weight_grad"]

LONG_BAG = 1024
UNROLL, UNROLL_LONG = 8, 32
MOST_COLUMNS, COLUMNS_LONG = 256, 32
WARP = 32


def pool_forward(rows: Tensor, bags: Bags, outs: Sequence[Tensor]) -> None:
    """As the package's `pool_forward`; rows and outs on one device, rows float32, bfloat16 or float16."""
    _check_rows(rows, outs, "outs")
    check_contents(bags, rows.shape[0])
    sizes = [out.shape[0] for out in outs]
    if not rows.shape[1] or not sum(sizes):
        return
    contiguous = [checks.contiguous_rows(out) for out in outs]
    there = _Bags.of(bags, rows)
    places = row_places(contiguous, sizes, rows)
    for mode, first, last in bags.runs():
        _forward(rows, there, mode, (first, last), places)
    for out, written in zip(outs, contiguous):
        if out is not written:
            out.copy_(written)


def pool_backward(grads: Sequence[Tensor | None], rows: Tensor | None, bags: Bags, accumulator: Tensor) -> None:
    """As the package's `pool_backward`; grads, rows and accumulator on one device."""
    grads = [None if grad is None else checks.contiguous_rows(grad.detach()) for grad in grads]
    _check_rows(accumulator, grads, "grads")
    if rows is None and MAX in bags.segment_modes:
        raise ValueError(f"{OPERATION}: pooling max needs `rows` in backward, got none")
    check_contents(bags, accumulator.shape[0])
    num_rows, dim = accumulator.shape
    if not bags.slots.numel() or not num_rows or not dim:
        return
    there = _Bags.of(bags, accumulator)
    ordered, order = torch.sort(there.slots, stable=True)
    bag_of = there.bag_of()[order]
    base, places, width = row_places(grads, bags.sizes(), accumulator)
    sums = _Sums(base, places[bag_of], dim, width)
    if bags.weights is not None:
        assert there.weights is not None
        sums.factors, sums.weighted = there.weights[order], True
    elif MEAN in bags.segment_modes:
        sums.factors, sums.divided = _divisors(bags, there)[bag_of], True
    if MAX in bags.segment_modes:
        assert rows is not None
        sums.winners, sums.bags = _winners(rows, bags, there), bag_of
        sums.positions = _positions(bags, there, order, bag_of)
    starts = torch.searchsorted(ordered, torch.arange(num_rows + 1, device=ordered.device, dtype=ordered.dtype))
    sums.add(starts[:-1], starts[1:], accumulator, longest=GRADIENT_BLOCK)
    if bags.slots.numel() > GRADIENT_BLOCK:
        _add_hot_rows(sums, starts, accumulator)


def pool_weight_grad(grads: Sequence[Tensor | None], rows: Tensor, bags: Bags) -> Tensor:
    """As the package's `pool_weight_grad`; the result is on the device."""
    grads = [None if grad is None else checks.contiguous_rows(grad.detach()) for grad in grads]
    _check_rows(rows, grads, "grads")
    check_contents(bags, rows.shape[0])
    if MEAN in bags.segment_modes or MAX in bags.segment_modes:
        raise ValueError(f"{OPERATION}: gradients of weights need pooling sum or none")
    n, dim = bags.slots.numel(), rows.shape[1]
    found = torch.empty(n, dtype=torch.float32, device=rows.device)
    if n:
        there = _Bags.of(bags, rows)
        base, places, grad_width = row_places(grads, bags.sizes(), rows)
        width = vector_width([rows], dim)
        tile = 32 // rows.element_size()  # by 16 columns: 16 bytes of a row for each lane
        with on_device_of(rows):
            kernels.lookup_pool_weight_bwd_kernel[(-(-n // tile),)](
                rows, rows.stride(0) // width, there.slots, base, places[there.bag_of()], found, n,
                DIM=dim, ROW_WIDTH=width, GRAD_WIDTH=grad_width, OCCURRENCES=tile, **LAUNCH,
            )  # fmt: skip
    return found


@dataclass
class _Bags:
    """Bags as they lie on the device of the rows; `long` are the numbers of those that a warp alone would take long."""

    slots: Tensor
    offsets: Tensor
    weights: Tensor | None
    long: Tensor | None

    @staticmethod
    def of(bags: Bags, like: Tensor) -> _Bags:
        long = None
        if bags.bag_offsets.is_cpu and bags.slots.numel() > LONG_BAG:
            found = torch.nonzero(bags.bag_offsets.diff() > LONG_BAG).squeeze(1)
            long = found if len(found) else None
        weights = None if bags.weights is None else place(bags.weights, like)
        return _Bags(place(bags.slots, like), place(bags.bag_offsets, like), weights, long)

    def bag_of(self) -> Tensor:
        """int64 [n]: each occurrence's bag."""
        every = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return torch.repeat_interleave(every, self.offsets.diff(), output_size=len(self.slots))

    def counts(self) -> Tensor:
        """int64 [bags]: occurrences that are not padding."""
        before = torch.zeros(len(self.slots) + 1, dtype=torch.int64, device=self.slots.device)
        torch.cumsum(self.slots >= 0, 0, out=before[1:])
        return before[self.offsets].diff()


@dataclass
class _Sums:
    """Summands in the order of their sums; see the kernel for what each is."""

    base: Tensor
    places: Tensor
    dim: int
    width: int
    factors: Tensor | None = None
    weighted: bool = False
    divided: bool = False
    positions: Tensor | None = None
    bags: Tensor | None = None
    winners: Tensor | None = None

    def add(
        self, begins: Tensor, ends: Tensor, out: Tensor, targets: Tensor | None = None, *, longest: int = 0,
        added: bool = True,
    ) -> None:  # fmt: skip
        """out[i, or targets[i]] (+)= summands begins[i] .. ends[i], in order from +0.0; empty sums do nothing."""
        columns, tile = _tile(self.dim, self.width)
        nothing = self.places
        with on_device_of(out):
            kernels.lookup_pool_bwd_kernel[(-(-len(begins) // tile), -(-self.dim // columns))](
                self.base,
                self.places,
                nothing if self.factors is None else self.factors,
                nothing if self.positions is None else self.positions,
                nothing if self.bags is None else self.bags,
                nothing if self.winners is None else self.winners,
                begins, ends, nothing if targets is None else targets, out, len(begins), 0,
                WEIGHTED=self.weighted, DIVIDED=self.divided, WON=self.winners is not None, LISTED=targets is not None,
                ADDED=added, LONGEST=longest, DIM=self.dim, WIDTH=self.width, SUMS=tile, COLUMNS=columns, UNROLL=UNROLL,
                **LAUNCH,
            )  # fmt: skip


def _add_hot_rows(sums: _Sums, starts: Tensor, accumulator: Tensor) -> None:
    """Rows of more than 1,024 occurrences. How many there are, the host need not know: there is room for all that n
    occurrences can make."""
    n, device = len(sums.places), starts.device
    lengths = starts.diff()
    hot = lengths > GRADIENT_BLOCK
    blocks = torch.where(hot, (lengths + GRADIENT_BLOCK - 1) // GRADIENT_BLOCK, 0)
    block_ends, hot_before = blocks.cumsum(0), hot.cumsum(0)
    most_rows = n // (GRADIENT_BLOCK + 1)
    most_blocks = n // GRADIENT_BLOCK + most_rows
    block = torch.arange(most_blocks, device=device)
    row = torch.searchsorted(block_ends, block, right=True)
    real, row = row < len(lengths), row.clamp(max=len(lengths) - 1)
    begins = starts[row] + (block - (block_ends - blocks)[row]) * GRADIENT_BLOCK
    ends = torch.where(real, torch.minimum(begins + GRADIENT_BLOCK, starts[row + 1]), begins)
    of_blocks = torch.empty(most_blocks, sums.dim, dtype=torch.float32, device=device)
    sums.add(begins, ends, of_blocks, added=False)
    row = torch.searchsorted(hot_before, torch.arange(1, most_rows + 1, device=device))
    targets = torch.where(row < len(lengths), row, -1)
    row = row.clamp(max=len(lengths) - 1)
    base, places, width = row_places([of_blocks], [most_blocks], of_blocks)
    parts = _Sums(base, places, sums.dim, width)
    parts.add((block_ends - blocks)[row], block_ends[row], accumulator, targets)


def _forward(
    rows: Tensor, there: _Bags, mode: int, bags: tuple[int, int], places: tuple[Tensor, Tensor, int] | None,
    winners: Tensor | None = None,
) -> None:  # fmt: skip
    """Pool the bags first .. last into their places, or note which occurrences won."""
    base, place_of_bag, width = places or (rows, rows, 1)
    dim, row_width = rows.shape[1], vector_width([rows], rows.shape[1])
    first, last = bags
    long = None if there.long is None else there.long[(there.long >= first) & (there.long < last)]
    has_long = long is not None and len(long) > 0
    columns, tile = _tile(dim, row_width)
    launches: list[tuple[Tensor | None, int, int, int, int]] = [(None, last - first, tile, columns, UNROLL)]
    if has_long:
        assert long is not None
        launches.append((place(long, rows), len(long), 1, min(power_of_two(dim), COLUMNS_LONG), UNROLL_LONG))
    for listed, number, tile, columns, unroll in launches:
        with on_device_of(rows):
            kernels.lookup_pool_fwd_kernel[(-(-number // tile), -(-dim // columns))](
                rows, rows.stride(0) // row_width, there.slots, there.offsets,
                rows if there.weights is None else there.weights, base, place_of_bag,
                rows if winners is None else winners, rows if listed is None else listed, first, number, 0,
                MODE=mode, WEIGHTED=there.weights is not None, WINNERS=winners is not None, LISTED=listed is not None,
                LONGEST=LONG_BAG if has_long and listed is None else 0, DIM=dim, ROW_WIDTH=row_width, OUT_WIDTH=width,
                BAGS=tile, COLUMNS=columns, UNROLL=unroll, **LAUNCH,
            )  # fmt: skip


def _winners(rows: Tensor, bags: Bags, there: _Bags) -> Tensor:
    """int32 [bags, D]: which position of its bag supplied a maximum; written for bags of MAX alone."""
    found = torch.empty(bags.num_bags, rows.shape[1], dtype=torch.int32, device=rows.device)
    unweighted = replace(there, weights=None)
    for mode, first, last in bags.runs():
        if mode == MAX:
            _forward(rows, unweighted, mode, (first, last), None, found)
    return found


def _positions(bags: Bags, there: _Bags, order: Tensor, bag_of: Tensor) -> Tensor:
    """int32 [n]: the occurrence's position in its bag of MAX; -1 in bags of another mode."""
    inside = order - there.offsets[bag_of]
    if set(bags.segment_modes) == {MAX}:
        return inside.to(torch.int32)
    is_max = _per_bag([mode == MAX for mode in bags.segment_modes], bags, there)
    return torch.where(is_max[bag_of], inside, -1).to(torch.int32)


def _divisors(bags: Bags, there: _Bags) -> Tensor:
    """float32 [bags]: the count in bags of MEAN, else 1, by which division is exact."""
    counts = there.counts().to(torch.float32)
    if set(bags.segment_modes) == {MEAN}:
        return counts
    return torch.where(_per_bag([mode == MEAN for mode in bags.segment_modes], bags, there), counts, 1.0)


def _per_bag(values: list[bool], bags: Bags, there: _Bags) -> Tensor:
    """bool [bags] on the device from one value a segment."""
    spread = torch.repeat_interleave(torch.tensor(values), torch.tensor(bags.sizes()), output_size=bags.num_bags)
    return place(spread, there.slots)


def _tile(dim: int, width: int) -> tuple[int, int]:
    """Columns of a tile, and how many bags or rows: one access for each lane, or more where rows are long."""
    columns = min(power_of_two(dim), MOST_COLUMNS)
    return columns, max(1, WARP * width // columns)


def _check_rows(rows: Tensor, others: Sequence[Tensor | None], name: str) -> None:
    """TypeError or ValueError unless the kernels can read `rows` and the matrices beside it."""
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{OPERATION}: rows must be float32, bfloat16 or float16, got {checks.describe(rows)}")
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(
            f"{OPERATION}: rows must be contiguous along the last dimension, got strides {list(rows.stride())}; "
            "call .contiguous()"
        )
    for segment, other in enumerate(others):
        if other is not None and (other.dtype != torch.float32 or other.device != rows.device):
            raise TypeError(
                f"{OPERATION}: {name}[{segment}] must be float32 on {rows.device}, got {checks.describe(other)}"
            )
