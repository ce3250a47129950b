"""Cases for the Triton operations under the interpreter; run as a program, which prints {case: what is wrong} as JSON.

The interpreter has to be chosen before triton is imported, so a process of its own runs them, all in one go.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from row_cases import MAX, MEAN, NONE, SUM, BagCase, bag_case, bits

from nestpipe_kernels import optim
from nestpipe_kernels.ops import lookup_pool
from nestpipe_kernels.ops.lookup_pool import operator, reference
from nestpipe_kernels.ops.lookup_pool import triton as pooling
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words, pack_embeddings
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.types import DataType

__all__ = ["CASES", "LONG_CASES"]


def pooled(case: BagCase, implementation: str, rows: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Outputs, gradients of rows and, where there are such, of weights."""
    rows = case.rows if rows is None else rows
    outs, total = case.outs(), torch.full(case.rows.shape, 0.5)
    lookup_pool.pool_forward(rows, *case.bags(), outs, case.weights, implementation=implementation)
    values = case.rows if rows.dtype != torch.float32 else rows
    lookup_pool.pool_backward(case.grads, values, *case.bags(), case.weights, total, implementation=implementation)
    found = [*outs, total]
    if not {MEAN, MAX} & set(case.segment_modes):
        found.append(lookup_pool.pool_weight_grad(case.grads, rows, *case.bags(), implementation=implementation))
    return found


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    """What has other bits."""
    assert len(found) == len(expected) > 1
    return [f"result {k}" for k, (a, b) in enumerate(zip(found, expected)) if not torch.equal(bits(a), bits(b))]


def pooling_case(*modes: int, **settings: object) -> Callable[[], list[str]]:
    """Triton beside the reference."""

    def run() -> list[str]:
        case = bag_case(sum(modes) + 1, list(modes), **settings)  # type: ignore[arg-type]
        return differences(pooled(case, "triton"), pooled(case, "reference"))

    return run


def short_rows(dtype: torch.dtype) -> list[str]:
    """Rows of two bytes are widened, then added up in float32."""
    case = bag_case(3, [SUM, MEAN, NONE], size=14, dim=8)
    rows = case.rows.to(dtype)
    found, outs = case.outs(), case.outs()
    lookup_pool.pool_forward(rows, *case.bags(), found, implementation="triton")
    lookup_pool.pool_forward(rows.float(), *case.bags(), outs, implementation="reference")
    case = bag_case(4, [SUM], size=14, dim=24, weighted=True)
    found += pooled(case, "triton", case.rows.to(dtype))
    case.rows = case.rows.to(dtype).float()
    return differences(found, outs + pooled(case, "reference"))


def edges_of_a_tile() -> list[str]:
    """Rows longer than a tile, and a gradient that is missing, strided or expanded."""
    case = bag_case(5, [SUM, SUM, SUM], size=3, dim=300)
    first, second = case.grads[0], case.grads[1]
    assert first is not None and second is not None
    case.grads = [first.t().contiguous().t(), torch.ones(1, 1).expand(second.shape), None]
    wrong = differences(pooled(case, "triton"), pooled(case, "reference"))
    case = bag_case(6, [MAX, SUM], size=10, dim=3)
    case.grads[0] = None
    wrong += differences(pooled(case, "triton"), pooled(case, "reference"))
    case = bag_case(7, [SUM, NONE], size=10, dim=3, weighted=True)
    assert case.weights is not None
    case.grads[1] = None
    case.weights[::3] = torch.inf
    return wrong + differences(pooled(case, "triton"), pooled(case, "reference"))


@contextmanager
def small_limits(long_bag: int = 16, block: int = 16) -> Iterator[None]:
    """What is long, or many, in hundreds of times fewer occurrences."""
    limits = {"LONG_BAG": long_bag, "GRADIENT_BLOCK": block, "UNROLL_LONG": 8, "UNROLL": 4}
    with mock.patch.multiple(pooling, **limits), mock.patch.object(reference, "GRADIENT_BLOCK", block):
        yield


def hot_rows() -> list[str]:
    """Rows of one block of occurrences, of a few more, of many blocks."""
    wrong = []
    for count in (16, 17, 33):
        case = hot_case(count)
        with small_limits():
            wrong += differences(pooled(case, "triton"), pooled(case, "reference"))
    with small_limits():
        case = bag_case(8, [SUM, MEAN, MAX], size=20, dim=3, num_rows=2)
        wrong += differences(pooled(case, "triton"), pooled(case, "reference"))
        case = bag_case(8, [SUM, NONE], size=30, dim=3, num_rows=2, weighted=True)
        wrong += differences(pooled(case, "triton"), pooled(case, "reference"))
    return wrong


def hot_case(count: int) -> BagCase:
    """Most occurrences are of row 0, one each of rows 1 and 3; row 2 has none."""
    slots = torch.zeros(count + 3, dtype=torch.int64)
    slots[[2, 5, 9]] = torch.tensor([1, -1, 3])
    n = len(slots)
    grads = torch.randn(n, 2, generator=torch.Generator().manual_seed(count))
    return BagCase(torch.ones(4, 2), slots, torch.arange(n + 1), [0, n], [NONE], None, [grads])


def full_blocks() -> list[str]:
    """Blocks of 1,024, as they are."""
    case = hot_case(1030)
    found, truth = torch.full((4, 2), 0.5), torch.full((4, 2), 0.5)
    for total, implementation in ((found, "triton"), (truth, "native")):
        lookup_pool.pool_backward(case.grads, None, *case.bags(), None, total, implementation=implementation)
    return differences([found, found], [truth, truth])


def long_bags() -> list[str]:
    """Bags that many warps share, beside short ones, of every mode, in several segments."""
    wrong = []
    for modes, weighted in (([SUM, NONE], True), ([MEAN, SUM], False), ([MAX, MEAN, MAX], False)):
        case = bag_case(sum(modes), modes, size=12, dim=3, weighted=weighted)
        with small_limits(long_bag=5):
            wrong += [f"{modes}: {text}" for text in differences(pooled(case, "triton"), pooled(case, "reference"))]
    lengths = torch.tensor([0, 3, 41, 0, 16])
    n = int(lengths.sum())
    slots = torch.randint(-1, 9, (n,), generator=torch.Generator().manual_seed(1))
    rows = torch.randn(9, 40, generator=torch.Generator().manual_seed(2))
    case = BagCase(rows, slots, lengths.cumsum(0), [0, 4], [SUM], None, [rows[:4]])
    with small_limits():
        return wrong + differences(pooled(case, "triton"), pooled(case, "reference"))


def ties_and_nans() -> list[str]:
    """The first of equal maxima wins, and the first NaN; padding never does."""
    rows = torch.tensor([[3.0, 0.0, -0.0, torch.nan, 1.0, -5.0], [3.0, -0.0, 0.0, torch.nan, 2.0, -7.0]])
    grad = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]) * torch.tensor([[1.0], [10.0], [100.0]])
    slots = torch.tensor([-1, 0, 1, 1, 0, 0, -1])
    case = BagCase(rows, slots, torch.tensor([0, 3, 6, 7]), [0, 3], [MAX], None, [grad])
    return differences(pooled(case, "triton"), pooled(case, "reference"))


def no_work() -> list[str]:
    """No ids, no bags, no rows, no columns."""
    nothing, start = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cases = [
        BagCase(torch.empty(0, 4), nothing, start, [0, 0], [SUM], None, [torch.empty(0, 4)]),
        BagCase(torch.empty(0, 4), nothing, torch.zeros(3, dtype=torch.int64), [0, 2], [SUM], None, [torch.ones(2, 4)]),
        BagCase(torch.empty(2, 4), torch.tensor([-1]), torch.tensor([0, 1]), [0, 1], [SUM], None, [torch.ones(1, 4)]),
        BagCase(torch.empty(2, 0), torch.tensor([1]), torch.tensor([0, 1]), [0, 1], [SUM], None, [torch.ones(1, 0)]),
        BagCase(torch.empty(0, 4), nothing, start, [0], [], None, []),
    ]
    return [w for case in cases for w in differences(pooled(case, "triton"), pooled(case, "reference"))]


def repeated() -> list[str]:
    """A result that depended on what runs when would differ between tiles of other sizes."""
    case = bag_case(9, [SUM, MEAN], size=10, dim=9)
    expected = pooled(case, "triton")
    kept = pooling.UNROLL, pooling.MOST_COLUMNS, pooling.WARP
    wrong = []
    try:
        for pooling.UNROLL, pooling.MOST_COLUMNS, pooling.WARP in ((2, 4, 64),):
            wrong += differences(pooled(case, "triton"), expected)
    finally:
        pooling.UNROLL, pooling.MOST_COLUMNS, pooling.WARP = kept
    return wrong


UPDATES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("RowWiseAdagrad", {}),
    ("RowWiseAdagrad", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"bias_correction": "row"}),
    ("AdamW", {}),
    ("RowWiseAdam", {"bias_correction": "row", "weight_decay": 0.7}),
    ("FTRL", {"l1": 0.1, "l2": 0.2}),
    ("LAMB", {"weight_decay": 0.1}),
    ("LAMB", {"bias_correction": "row"}),
]


def updates(dim: int, kinds: list[DataType], pad: int = 0, every: int = 1) -> list[str]:
    """Rules (or every so many of them): with and without a mask, rates of rows, counts at their limit, zeros."""
    wrong = []
    for number, (name, settings) in enumerate(UPDATES[::every]):
        for kind in kinds:
            optimizer = getattr(optim, name)(**settings)
            rows, grads, rates = update_case(dim, kind, optimizer, pad, number)
            mask = torch.arange(len(rows)) % 3 > 0
            found = []
            for implementation in ("triton", "reference"):
                after = rows.clone()
                for step, lr, chosen in ((3, rates, mask), (4, 0.1, None)):
                    row_update(
                        after, grads, optimizer, step, lr, chosen, RowStorage(kind), implementation=implementation
                    )
                found.append([after, after])
            wrong += [f"{name} {settings} {kind.name}: {text}" for text in differences(*found)]
    return wrong


def update_case(
    dim: int, kind: DataType, optimizer: Any, pad: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, gradients and learning rates; some words are those of a trained row, some at their limits."""
    chance = torch.Generator().manual_seed(seed)
    words = embedding_words(dim, kind)
    header = words + optimizer.state_floats(dim)
    rows = torch.rand(6, header + 1 + pad, generator=chance)
    pack_embeddings(torch.randn(6, dim, generator=chance), rows, kind)
    rows.view(torch.int32)[:, header] = torch.tensor([0, 1, 10, 2**31 - 2, 2**31 - 1, 0], dtype=torch.int32)
    rows[5, :header] = 0.0
    rows[4, words:header] = 0.0
    grads = torch.randn(6, dim, generator=chance)
    grads[4:6] = 0.0
    rates = torch.rand(6, generator=chance)
    rates[2:4] = torch.tensor([0.0, 1e-38])
    return rows, grads, rates


def rounding() -> list[str]:
    """What short embeddings become: ties, the largest numbers, subnormal ones, NaNs, infinities."""
    wrong = []
    odd = [
        0.0,
        -0.0,
        1.0,
        65504.0,
        65520.0,
        -65519.9,
        1e-8,
        6e-8,
        3e-5,
        torch.inf,
        -torch.inf,
        torch.nan,
        3.4e38,
        1e-40,
    ]
    chance = torch.Generator().manual_seed(4)
    values = torch.cat([torch.tensor(odd), torch.randn(50, generator=chance), torch.randint(0, 99, (2,)) / 256 + 1])
    values = torch.cat([values, (torch.arange(100) * 2**15 + 2**30).to(torch.int32).view(torch.float32)])
    for kind in (DataType.BF16, DataType.FP16):
        found = []
        for implementation in ("triton", "reference"):
            rows = torch.zeros(2, embedding_words(len(values), kind) + 1)
            # p - 1 * (0 - values): SGD puts the values there
            row_update(
                rows, -values.repeat(2, 1), optim.SGD(), 1, 1.0, None, RowStorage(kind), implementation=implementation
            )
            found.append([rows, rows])
        wrong += [f"{kind.name}: {text}" for text in differences(*found)]
    return wrong


def refused_updates() -> list[str]:
    """What Triton does not do is told."""
    one, tables = torch.tensor([5]), torch.zeros(1, dtype=torch.int32)
    storage = RowStorage(DataType.BF16, torch.tensor([7]), tables, one, one)
    try:
        row_update(torch.zeros(1, 4), torch.zeros(1, 4), optim.SGD(), 1, 0.1, None, storage, implementation="triton")
    except ValueError as error:
        return [str(error)]
    return ["no error"]


def operator_bags() -> list[str]:
    """What torch's operator does on a device: bags are there, and no host looks at them."""
    wrong = []
    for mode, weighted in ((SUM, True), (MAX, False)):
        case = bag_case(11, [mode], size=12, dim=4, weighted=weighted)
        bags = operator._bags(case.slots, case.bag_offsets, case.weights, mode, len(case.rows))
        found, total = case.outs(), torch.full(case.rows.shape, 0.5)
        pooling.pool_forward(case.rows, bags, found)
        pooling.pool_backward(case.grads, case.rows, bags, total)
        wrong += differences([*found, total], pooled(case, "reference")[:2])
    return wrong


def refused_operator() -> list[str]:
    """Ids that no row has, offsets that do not fit, weights that cannot be."""
    told = []
    for slots, offsets, mode in (([0, 9], [0, 2], SUM), ([0, 1], [0, 1], SUM), ([0, 1], [0, 2], MAX)):
        try:
            operator._bags(torch.tensor(slots), torch.tensor(offsets), torch.ones(2), mode, 9)
            told.append("no error")
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
    return told


def bad_input() -> list[str]:
    """The messages of wrong calls; nothing has been written then."""
    rows, offsets = torch.ones(3, 2), torch.tensor([0, 2])
    outs = [torch.full((1, 2), 7.0)]

    def forward(slots: list[int], rows: torch.Tensor = rows, mode: int = SUM, offsets: torch.Tensor = offsets) -> None:
        ids = torch.tensor(slots)
        lookup_pool.pool_forward(rows, ids, offsets, [0, 1], [mode], outs, implementation="triton")

    def weight_grad(mode: int) -> None:
        bags = torch.tensor([0, 1]), offsets, [0, 1], [mode]
        lookup_pool.pool_weight_grad([rows[:1]], rows, *bags, implementation="triton")

    calls: list[Callable[[], None]] = [
        lambda: forward([0, 3]),
        lambda: forward([-2, 0]),
        lambda: forward([0]),
        lambda: forward([0, 1], rows.double()),
        lambda: forward([0, 1], rows.t().contiguous().t()),
        lambda: forward([0, 1], mode=NONE),
        lambda: forward([0, 1], mode=4),
        lambda: weight_grad(MEAN),
    ]
    told = []
    for call in calls:
        try:
            call()
            told.append("no error")
        except (TypeError, ValueError, IndexError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told if bool((outs[0] == 7.0).all()) else ["something was written", *told]


CASES: dict[str, Callable[[], list[str]]] = {
    "all modes": pooling_case(SUM, MEAN, MAX, NONE, size=16, dim=7),
    "several segments of a mode": pooling_case(SUM, SUM, MEAN, SUM, size=8, dim=5),
    "weights": pooling_case(SUM, NONE, size=25, dim=4, weighted=True, slot_dtype=torch.int32),
    "one column": pooling_case(SUM, MAX, size=20, dim=1),
    "aligned rows": pooling_case(MEAN, size=20, dim=64, slot_dtype=torch.int32),
    "edges of a tile": edges_of_a_tile,
    "bfloat16": lambda: short_rows(torch.bfloat16),
    "float16": lambda: short_rows(torch.float16),
    "hot rows": hot_rows,
    "long bags": long_bags,
    "ties and NaNs": ties_and_nans,
    "no work": no_work,
    "other tiles": repeated,
    "bad input": bad_input,
    "operator": operator_bags,
    "refused operator": refused_operator,
    "updates": lambda: updates(20, [DataType.FP32], pad=1),
    "updates of aligned rows": lambda: updates(8, [DataType.FP32], pad=3, every=2),
    "updates of short rows": lambda: updates(3, [DataType.BF16, DataType.FP16], every=3),
    "rounding": rounding,
    "refused updates": refused_updates,
}


LONG_CASES: dict[str, Callable[[], list[str]]] = {
    "full blocks": full_blocks,
    "all modes, long": pooling_case(SUM, MEAN, MAX, NONE, size=300, dim=33),
    "weights, long": pooling_case(SUM, NONE, size=300, dim=33, weighted=True),
    "updates, long": lambda: updates(21, [DataType.FP32, DataType.BF16, DataType.FP16], pad=2),
}
"""Only when named."""


def main() -> None:
    """All cases, or those named."""
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[1:] or CASES:
        started = time.process_time()
        try:
            found[name] = (CASES | LONG_CASES)[name]()
        except Exception as error:  # one broken case is not to hide the others
            found[name] = [f"{type(error).__name__}: {error}"]
        print(f"{name}: {time.process_time() - started:.2f} s", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
