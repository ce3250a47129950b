"""lookup_pool's Triton kernels. They know no segments: a bag, or an occurrence, has the place of a row to use.

Each kernel works on a tile of several bags (rows, occurrences) by some columns, shaped so that a lane's part of a row
is one access of 16 bytes where rows are aligned. UNROLL rows of each bag are asked for together.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["lane_total", "lookup_pool_bwd_kernel", "lookup_pool_fwd_kernel", "lookup_pool_weight_bwd_kernel"]

SUM = tl.constexpr(0)
MEAN = tl.constexpr(1)
MAX = tl.constexpr(2)
NONE = tl.constexpr(3)


NOWHERE = tl.constexpr(-(1 << 62))
"""The place of a row that is not there."""


@triton.jit
def row_pointers(base, places, columns, WIDTH: tl.constexpr):
    """Pointers [rows, columns] to the rows that lie `places` (int64 [rows]) times WIDTH elements behind `base`."""
    return (base + places * WIDTH)[:, None] + columns[None, :]


@triton.jit(do_not_specialize=["row_units", "first_bag", "num_bags", "zero"])
def lookup_pool_fwd_kernel(
    rows,  # float32, bfloat16 or float16 [U, DIM]
    row_units,  # stride of rows in units of ROW_WIDTH elements
    slots,  # int32 or int64 [n]
    offsets,  # int64 [bags + 1]
    weights,  # float32 [n]
    outs,  # float32: where the first output begins
    places,  # int64 [bags]: where the output float32 [DIM] of each bag is, in units of OUT_WIDTH elements behind it
    winners,  # int32 [bags, DIM]: position in its bag of what won
    bags,  # int64 [num_bags]: which bags, if LISTED
    first_bag,
    num_bags,
    zero,  # 0, which the compiler must not know
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WINNERS: tl.constexpr,
    LISTED: tl.constexpr,
    LONGEST: tl.constexpr,  # longer bags are left out; 0: none is
    DIM: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Pools bags of one mode, in bag order, or notes which occurrence supplied each maximum."""
    number = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = number < num_bags
    bag = tl.load(bags + number, mask=is_bag, other=0) if LISTED else first_bag + number
    begin = tl.load(offsets + bag, mask=is_bag, other=0)
    length = tl.load(offsets + bag + 1, mask=is_bag, other=0) - begin
    if LONGEST:
        is_bag = is_bag & (length <= LONGEST)
        length = tl.where(is_bag, length, 0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < DIM
    pooled = tl.zeros([BAGS, COLUMNS], tl.float32)
    winner = tl.full([BAGS, COLUMNS], -1, tl.int32)
    count = tl.zeros([BAGS], tl.int32)
    for start in range(0, tl.max(length, axis=0), UNROLL):
        found = ()
        for step in tl.static_range(UNROLL):
            inside = start + step < length
            found += (tl.load(slots + begin + start + step, mask=inside, other=-1).to(tl.int64),)
        read = ()
        for step in tl.static_range(UNROLL):
            pointers = row_pointers(rows, found[step] * row_units.to(tl.int64), columns, ROW_WIDTH)
            read += (tl.load(pointers, mask=(found[step] >= 0)[:, None] & is_column[None, :], other=0.0),)
        if LISTED:
            # Left alone, ptxas adds the first rows before it asks for the last. So the first row depends on all.
            tie = read[0].to(tl.float32).to(tl.int32, bitcast=True)
            for step in tl.static_range(1, UNROLL):
                tie |= read[step].to(tl.float32).to(tl.int32, bitcast=True)
            tie &= zero
        for step in tl.static_range(UNROLL):
            valid = found[step] >= 0
            taken = valid[:, None]
            row = read[step].to(tl.float32)
            if LISTED and step == 0:
                row = (row.to(tl.int32, bitcast=True) ^ tie).to(tl.float32, bitcast=True)
            if WEIGHTED:
                row = tl.load(weights + begin + start + step, mask=valid, other=0.0)[:, None] * row
            if MODE == MAX:
                larger = (count == 0)[:, None] | (row > pooled) | ((row != row) & (pooled == pooled))
                taken = taken & larger
                if WINNERS:
                    winner = tl.where(taken, start + step, winner).to(tl.int32)
            if (MODE == MAX) | (MODE == NONE):
                pooled = tl.where(taken, row, pooled)
            else:
                pooled = tl.where(taken, pooled + row, pooled)
            count += valid.to(tl.int32)
    if MODE == MEAN:
        pooled = tl.div_rn(pooled, tl.maximum(count, 1).to(tl.float32)[:, None] + tl.zeros_like(pooled))
    written = is_bag[:, None] & is_column[None, :]
    if WINNERS:
        tl.store(winners + bag[:, None] * DIM + columns[None, :], winner, mask=written)
    else:
        place = tl.load(places + bag, mask=is_bag, other=0)
        tl.store(row_pointers(outs, place, columns, OUT_WIDTH), pooled, mask=written)


@triton.jit(do_not_specialize=["num_sums", "zero"])
def lookup_pool_bwd_kernel(
    grads,  # float32: where the first summand's matrix begins
    places,  # int64 [n]: where the float32 [DIM] that a summand is, or comes from, lies behind it; NOWHERE: it is zero
    factors,  # float32 [n]: weights (WEIGHTED) or divisors (DIVIDED)
    positions,  # int32 [n]: of the occurrence in its bag; -1 where nothing has to win
    bags,  # int64 [n]: the occurrence's bag
    winners,  # int32 [bags, DIM]
    begins,  # int64 [num_sums]: first summand of each sum
    ends,  # int64 [num_sums]
    targets,  # int64 [num_sums]: row of `out`, if LISTED; -1: none
    out,  # float32 [., DIM] contiguous
    num_sums,
    zero,  # as above
    WEIGHTED: tl.constexpr,
    DIVIDED: tl.constexpr,
    WON: tl.constexpr,
    LISTED: tl.constexpr,
    ADDED: tl.constexpr,  # to what stands in `out`
    LONGEST: tl.constexpr,  # longer sums are left out; 0: none is
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of gradients, each one summand after another from +0.0."""
    number = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    is_sum = number < num_sums
    begin = tl.load(begins + number, mask=is_sum, other=0)
    length = tl.load(ends + number, mask=is_sum, other=0) - begin
    target = number
    if LISTED:
        target = tl.load(targets + number, mask=is_sum, other=-1)
    is_sum = is_sum & (length > 0) & (target >= 0)
    if LONGEST:
        is_sum = is_sum & (length <= LONGEST)
    length = tl.where(is_sum, length, 0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < DIM
    total = tl.zeros([SUMS, COLUMNS], tl.float32)
    for start in range(0, tl.max(length, axis=0), UNROLL):
        found = ()
        for step in tl.static_range(UNROLL):
            there = start + step < length
            found += (tl.load(places + begin + start + step, mask=there, other=NOWHERE),)
        read = ()
        for step in tl.static_range(UNROLL):
            mask = (found[step] != NOWHERE)[:, None] & is_column[None, :]
            read += (tl.load(row_pointers(grads, found[step], columns, WIDTH), mask=mask, other=0.0),)
        if LONGEST == 0:
            tie = read[0].to(tl.int32, bitcast=True)
            for step in tl.static_range(1, UNROLL):
                tie |= read[step].to(tl.int32, bitcast=True)
            tie &= zero
        for step in tl.static_range(UNROLL):
            at = begin + start + step
            there = start + step < length
            summand = read[step]
            if LONGEST == 0 and step == 0:
                summand = (summand.to(tl.int32, bitcast=True) ^ tie).to(tl.float32, bitcast=True)
            if WEIGHTED:
                scaled = tl.load(factors + at, mask=there, other=0.0)[:, None] * summand
                summand = tl.where((found[step] != NOWHERE)[:, None], scaled, 0.0)
            if DIVIDED:
                divisor = tl.load(factors + at, mask=there, other=1.0)
                summand = tl.div_rn(summand, divisor[:, None] + tl.zeros_like(summand))
            if WON:
                position = tl.load(positions + at, mask=there, other=-1)
                bag = tl.load(bags + at, mask=there, other=0)
                asked = (position >= 0)[:, None] & is_column[None, :]
                won_by = tl.load(winners + bag[:, None] * DIM + columns[None, :], mask=asked, other=-1)
                summand = tl.where(won_by == position[:, None], summand, 0.0)
            total = tl.where(there[:, None], total + summand, total)
    written = is_sum[:, None] & is_column[None, :]
    pointers = out + target[:, None] * DIM + columns[None, :]
    if ADDED:
        total = tl.load(pointers, mask=written, other=0.0) + total
    tl.store(pointers, total, mask=written)


@triton.jit
def lane_total(lanes, ROWS: tl.constexpr):
    """[ROWS, 16] -> [ROWS]: 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 8]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 4]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 2]), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit(do_not_specialize=["row_units", "num_occurrences"])
def lookup_pool_weight_bwd_kernel(
    rows,  # float32, bfloat16 or float16 [U, DIM]
    row_units,  # stride of rows in units of ROW_WIDTH elements
    slots,  # int32 or int64 [n]
    grads,  # float32: where the first gradient begins
    places,  # int64 [n]: where the bag's gradient float32 [DIM] lies behind it, in units of GRAD_WIDTH; or NOWHERE
    out,  # float32 [n]
    num_occurrences,
    DIM: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    GRAD_WIDTH: tl.constexpr,
    OCCURRENCES: tl.constexpr,
):
    """Gradients of weights: the dot product of each occurrence's row and its bag's gradient, in 16 lanes."""
    at = tl.program_id(0).to(tl.int64) * OCCURRENCES + tl.arange(0, OCCURRENCES)
    there = at < num_occurrences
    slot = tl.load(slots + at, mask=there, other=-1).to(tl.int64)
    valid = slot >= 0
    place = tl.load(places + at, mask=valid, other=NOWHERE)
    lanes = tl.zeros([OCCURRENCES, 16], tl.float32)
    for begin in range(0, DIM, 16):
        columns = begin + tl.arange(0, 16)
        is_column = (columns < DIM)[None, :]
        pointers = row_pointers(rows, slot * row_units.to(tl.int64), columns, ROW_WIDTH)
        row = tl.load(pointers, mask=valid[:, None] & is_column, other=0.0).to(tl.float32)
        grad_pointers = row_pointers(grads, place, columns, GRAD_WIDTH)
        lanes += tl.load(grad_pointers, mask=(place != NOWHERE)[:, None] & is_column, other=0.0) * row
    tl.store(out + at, tl.where(valid, lane_total(lanes, OCCURRENCES), 0.0), mask=there)
