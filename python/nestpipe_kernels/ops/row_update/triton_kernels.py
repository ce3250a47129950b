"""row_update's Triton kernel: the lines of ops/row_update/reference.py, one warp for a few whole rows.

A row is [embedding][optimizer state][updates]; a warp goes through its rows' columns. Rules that need a sum over the
row go through them once more before, 16 columns at a time: an element's accumulator is its column modulo 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..lookup_pool.triton_kernels import lane_total

__all__ = ["row_update_kernel"]

SGD = tl.constexpr(0)
ADAGRAD = tl.constexpr(1)
ROW_WISE_ADAGRAD = tl.constexpr(2)
ADAM = tl.constexpr(3)
ADAMW = tl.constexpr(4)
ROW_WISE_ADAM = tl.constexpr(5)
FTRL = tl.constexpr(6)
LAMB = tl.constexpr(7)
FP32 = tl.constexpr(0)
FP16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
MAX_UPDATES = tl.constexpr(2**31 - 1)
SMALLEST_FTRL_RATE = tl.constexpr(2.0**-100)


@triton.jit
def widened(elements, KIND: tl.constexpr):
    """float32 of stored embeddings (int16 where they are short), exactly; a NaN keeps its bits."""
    if KIND == FP32:
        wide = elements
    elif KIND == BF16:
        wide = (elements.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        bits = elements.to(tl.int32) & 0xFFFF
        special = ((bits & 0x8000) << 16) | 0x7F800000 | ((bits & 0x3FF) << 13)
        plain = elements.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        wide = tl.where((bits & 0x7C00) == 0x7C00, special, plain).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def rounded(values, KIND: tl.constexpr):
    """What is stored of float32 values: to nearest, ties to even; a NaN keeps sign and leading bits, and is quiet."""
    if KIND == FP32:
        stored = values
    else:
        bits = values.to(tl.int32, bitcast=True)
        high = (bits >> 16) & 0xFFFF
        if KIND == BF16:
            nan = high | 0x40
            near = (high & 0x8000) | (((bits & 0x7FFFFFFF) + 0x7FFF + (high & 1)) >> 16)
        else:
            nan = (high & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
            near = values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        stored = tl.where(values != values, nan, near).to(tl.int16)
    return stored


@triton.jit
def clamped(x, limit):
    """The nearest number to x in [-limit, limit]."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def quotient(a, b):
    """a / b, correctly rounded."""
    a, b = tl.broadcast(a, b)
    return tl.div_rn(a, b)


@triton.jit
def updated(
    p, g, x, y, lr, count, total, ratio, c1, c2, c, decay, s1, s2, s3,
    RULE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """New embedding and states of a tile; `total` is the sum over the row, or its new state, and `ratio` LAMB's."""
    if DECAYED and RULE != ADAMW and RULE != ROW_WISE_ADAM and RULE != LAMB:
        g = g + decay * p
    if RULE == SGD:
        if MOMENTUM:
            first = count == 1
            x = tl.where(first, 0.0, s1) * x + tl.where(first, 1.0, s2) * g
            p = p - lr * (g + s1 * x if NESTEROV else x)
        else:
            p = p - lr * g
    elif RULE == ADAGRAD:
        x = x + g * g
        p = p - lr * quotient(g, tl.sqrt_rn(x) + s1)
    elif RULE == ROW_WISE_ADAGRAD:
        p = p - quotient(lr, tl.sqrt_rn(total) + s1) * g
    elif RULE == FTRL:
        squares = y + g * g
        q = quotient(s1 + tl.sqrt_rn(squares), lr) + s3
        offset = tl.where(p > 0, s2, tl.where(p < 0, -s2, -clamped(x, s2)))
        t = p + quotient(offset - g, q)
        moves = (lr >= SMALLEST_FTRL_RATE) & (lr == lr)
        p = tl.where(moves, t - clamped(t, quotient(s2 + tl.zeros_like(q), q)), p)
        x = tl.where(moves, -(t * q), x)
        y = tl.where(moves, squares, y)
    else:
        x = x + (g - x) * s1
        if RULE == ROW_WISE_ADAM:
            shrunk = p - (lr * decay) * p
            p = shrunk - quotient(lr * c1, tl.sqrt_rn(total) * c2 + s3) * x
        else:
            y = y + (g * g - y) * s2
            if RULE == ADAM:
                p = p - (lr * c) * quotient(x, tl.sqrt_rn(y) + s3)
            elif RULE == ADAMW:
                shrunk = p - (lr * decay) * p
                p = shrunk - (lr * c1) * quotient(x, tl.sqrt_rn(y) * c2 + s3)
            else:
                p = p - (lr * ratio) * lamb_direction(p, x, y, c1, c2, decay, s3, DECAYED)
    return p, x, y


@triton.jit
def lamb_direction(p, m, v, c1, c2, decay, eps, DECAYED: tl.constexpr):
    """u of LAMB, from the new moments."""
    u = quotient(m * c1, tl.sqrt_rn(v) * c2 + eps)
    if DECAYED:
        u = u + decay * p
    return u


@triton.jit(do_not_specialize=["row_units", "grad_units", "num_rows"])
def row_update_kernel(
    elements,  # the rows [U, .] as stored embeddings: float32, or int16
    words,  # the same as float32
    counts,  # the same as int32
    row_units,  # their stride in units of ROW_WIDTH words
    grads,  # float32 [U, DIM]
    grad_units,  # their stride in units of GRAD_WIDTH elements
    rates,  # float32 [U]: learning rates, if RATES
    mask,  # uint8 [U], if MASKED
    biases,  # float32 [3, U]: c1, c2, c, if BIASES
    num_rows,
    rate,
    c1,
    c2,
    c,
    decay,
    s1,
    s2,
    s3,
    RULE: tl.constexpr,
    KIND: tl.constexpr,
    STATES: tl.constexpr,  # optimizer states per element
    WORDS: tl.constexpr,  # words of a row's embedding
    HEADER: tl.constexpr,  # where its count is
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAYED: tl.constexpr,
    RATES: tl.constexpr,
    MASKED: tl.constexpr,
    BIASES: tl.constexpr,
    SUMMED: tl.constexpr,  # whether the rule has a sum over the row
    DIM: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    GRAD_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Updates a few rows: embedding, state and count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    if MASKED:
        is_row = is_row & (tl.load(mask + row, mask=is_row, other=0) != 0)
    start = row * row_units.to(tl.int64)
    grad_start = row * grad_units.to(tl.int64)
    per_word: tl.constexpr = 1 if KIND == FP32 else 2
    count = tl.load(counts + start * ROW_WIDTH + HEADER, mask=is_row, other=0)
    count = tl.where(count < MAX_UPDATES, count + 1, count)
    lr = tl.zeros([ROWS], tl.float32) + rate
    if RATES:
        lr = tl.load(rates + row, mask=is_row, other=1.0)
    if BIASES:
        c1 = tl.load(biases + row, mask=is_row, other=1.0)[:, None]
        c2 = tl.load(biases + num_rows + row, mask=is_row, other=1.0)[:, None]
        c = tl.load(biases + 2 * num_rows.to(tl.int64) + row, mask=is_row, other=1.0)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    ratio = tl.full([ROWS], 1.0, tl.float32)

    if SUMMED:
        lanes = tl.zeros([ROWS, 16], tl.float32)
        weight_lanes = tl.zeros([ROWS, 16], tl.float32)
        for begin in range(0, DIM, 16):
            columns = begin + tl.arange(0, 16)
            there = is_row[:, None] & (columns < DIM)[None, :]
            g = tl.load((grads + grad_start * GRAD_WIDTH)[:, None] + columns[None, :], mask=there, other=0.0)
            if RULE == LAMB or (DECAYED and RULE == ROW_WISE_ADAGRAD):
                stored = (elements + start * (ROW_WIDTH * per_word))[:, None] + columns[None, :]
                p = widened(tl.load(stored, mask=there, other=0), KIND)
            if RULE == LAMB:
                state = (words + start * ROW_WIDTH)[:, None] + (WORDS + columns)[None, :]
                m = tl.load(state, mask=there, other=0.0)
                v = tl.load(state + DIM, mask=there, other=0.0)
                m = m + (g - m) * s1
                v = v + (g * g - v) * s2
                u = tl.where(there, lamb_direction(p, m, v, c1, c2, decay, s3, DECAYED), 0.0)
                lanes += u * u
                weight_lanes += p * p
            elif DECAYED and RULE == ROW_WISE_ADAGRAD:
                g = g + decay * p
                lanes += g * g
            else:
                lanes += g * g
        total = lane_total(lanes, ROWS)
        if RULE == LAMB:
            length = tl.sqrt_rn(total)
            weight = tl.sqrt_rn(lane_total(weight_lanes, ROWS))
            ratio = tl.where((weight > 0) & (length > 0), tl.div_rn(weight, length), 1.0)
        else:
            place = words + start * ROW_WIDTH + (WORDS + STATES * DIM)
            old = tl.load(place, mask=is_row, other=0.0)
            mean = tl.div_rn(total, tl.full([ROWS], DIM, tl.float32))
            total = old + mean if RULE == ROW_WISE_ADAGRAD else old + (mean - old) * s2
            tl.store(place, total, mask=is_row)

    for begin in range(0, DIM, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        there = is_row[:, None] & (columns < DIM)[None, :]
        g = tl.load((grads + grad_start * GRAD_WIDTH)[:, None] + columns[None, :], mask=there, other=0.0)
        stored = (elements + start * (ROW_WIDTH * per_word))[:, None] + columns[None, :]
        p = widened(tl.load(stored, mask=there, other=0), KIND)
        x = tl.zeros_like(g)
        y = tl.zeros_like(g)
        state = (words + start * ROW_WIDTH)[:, None] + (WORDS + columns)[None, :]
        if STATES > 0:
            x = tl.load(state, mask=there, other=0.0)
        if STATES > 1:
            y = tl.load(state + DIM, mask=there, other=0.0)
        p, x, y = updated(
            p, g, x, y, lr[:, None], count[:, None], total[:, None], ratio[:, None], c1, c2, c, decay, s1, s2, s3,
            RULE, MOMENTUM, NESTEROV, DECAYED,
        )  # fmt: skip
        # The last word of an odd number of short elements has a zero in its other half.
        packed = tl.where(there, rounded(p, KIND), 0) if KIND != FP32 else p
        tl.store(stored, packed, mask=is_row[:, None] & (columns < WORDS * per_word)[None, :])
        if STATES > 0:
            tl.store(state, x, mask=there)
        if STATES > 1:
            tl.store(state + DIM, y, mask=there)
    tl.store(counts + start * ROW_WIDTH + HEADER, count, mask=is_row)
