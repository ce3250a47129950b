"""What tests of operations on rows on an accelerator run in a process of its own, on the stand-in for an NPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from row_cases import MAX, MEAN, NONE, SUM, BagCase, bag_case, bits
from torch import Tensor

import emulated_cuda
import fake_npu
from nestpipe_kernels import optim
from nestpipe_kernels.ops.bucketize import bucketize
from nestpipe_kernels.ops.dedup import dedup
from nestpipe_kernels.ops.gather_rows import gather_rows
from nestpipe_kernels.ops.intersect import intersect
from nestpipe_kernels.ops.lookup_pool import pool_backward, pool_forward, pool_weight_grad
from nestpipe_kernels.ops.mean_sources import entries_by_row, mean_sources
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words
from nestpipe_kernels.ops.row_sync import row_sync
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.ops.scatter_add_rows import scatter_add_rows, scatter_rows, zero_rows
from nestpipe_kernels.ops.take_rows import take_rows
from nestpipe_kernels.ops.wire_rows import decode_rows, encode_rows
from nestpipe_kernels.types import DataType

POOLINGS = [
    bag_case(0, [SUM, MEAN, MAX, NONE], size=60, dim=7),
    bag_case(1, [SUM, NONE], size=60, dim=1, weighted=True),
]
HOT = [bag_case(2, [SUM, MEAN], size=1300, dim=3, num_rows=2)]
"""Rows of several blocks of occurrences."""


def _pooling(device: str, cases: list[BagCase] = POOLINGS) -> list[Tensor]:
    """Pooled rows, gradients of rows and of weights."""
    found = []
    for case in cases:
        rows = case.rows.to(device)
        grads = [None if grad is None else grad.to(device) for grad in case.grads]
        outs = [out.contiguous().to(device) for out in case.outs()]
        pool_forward(rows, *case.bags(), outs, case.weights)
        total = torch.full(rows.shape, 0.5, device=device)
        pool_backward(grads, rows, *case.bags(), case.weights, total)
        found += [*outs, total]
        if not {MEAN, MAX} & set(case.segment_modes):
            found.append(pool_weight_grad(grads, rows, *case.bags()))
    return found


def _movement(device: str) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    rows = torch.randn(20, 6, generator=chance)
    rows[3, 5] = math.nan
    index, distinct = torch.tensor([4, 0, 4, 19]), torch.tensor([7, 3, 0, 19])
    source = torch.randn(4, 6, generator=chance).to(device)
    found = [gather_rows(rows.to(device), index, 4), gather_rows(rows.to(device), index, 7, data_type=DataType.BF16)]
    for change in (scatter_rows, scatter_add_rows):
        found.append(rows.clone().to(device))
        change(found[-1], distinct, source)
    found.append(rows.clone().to(device))
    zero_rows(found[-1], distinct)
    taken = rows.nan_to_num().to(device)
    found += [*take_rows(taken, distinct), taken]
    target = torch.zeros(5, 6, device=device)
    row_sync(rows.to(device), target, torch.tensor([3, 1]), torch.tensor([0, 4]))
    found.append(target)
    return found + [decode_rows(encode_rows(source, wire), 6, wire) for wire in ("fp32", "bf16", "fp16", "int8")]


def _sums(device: str) -> list[Tensor]:
    slot, per_source = torch.tensor([0, 1, 2, 3, 0, 1, 2, 4]), [4, 4]
    boxes = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))
    boxes[1, 4], boxes[2, 3], boxes[7, 0] = math.nan, 1e30, -0.0
    found = []
    for divisors, rows, limit in (((), None, math.inf), ((1.0, 3.0), torch.tensor([5, 0, 2]), 1e20)):
        total, good = torch.full((6, 5), 7.0, device=device), torch.ones(6, dtype=torch.bool, device=device)
        mean_sources(total, good, boxes.to(device), entries_by_row(slot, 6), per_source, divisors, rows, limit)
        found += [total, good.float()]
    return found


def _updates(device: str) -> list[Tensor]:
    found = []
    for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "RowWiseAdam", "FTRL", "LAMB"):
        for kind, stochastic in ((DataType.FP32, False), (DataType.BF16, False), (DataType.FP16, True)):
            adam = name in ("Adam", "AdamW")
            optimizer = getattr(optim, name)(**({"bias_correction": "row"} if adam else {"weight_decay": 0.1}))
            chance = torch.Generator().manual_seed(len(found))
            words = embedding_words(6, kind)
            rows = torch.rand(9, words + optimizer.state_floats(6) + 4, generator=chance)
            rows[:, words + optimizer.state_floats(6)] = torch.arange(9, dtype=torch.int32).view(torch.float32)
            storage = RowStorage(kind)
            if stochastic:
                tables, one = torch.zeros(9, dtype=torch.int32), torch.tensor([12345])
                storage = RowStorage(kind, torch.arange(9), tables, one, one)
            mask, rates = torch.arange(9) % 3 > 0, torch.rand(9, generator=chance)
            grads = torch.randn(9, 6, generator=chance).to(device)
            there = rows.to(device)
            row_update(there, grads, optimizer, 3, rates, mask, storage)
            row_update(there, grads, optimizer, 4, 0.1, None, storage)
            found.append(there)
    return found


GROUPS: dict[str, Callable[[str], list[Tensor]]] = {
    "pooling": _pooling,
    "movement": _movement,
    "sums": _sums,
    "updates": _updates,
    "soak: hot rows": lambda device: _pooling(device, HOT),
}


KERNELS = {"gather_rows", "scatter_rows", "scatter_add_rows", "zero_rows", "row_sync", "take_rows", "mean_sources"}
KERNELS |= {"row_update", "lookup_pool_forward", "lookup_pool_backward", "lookup_pool_weight_grad"}
"""Those of CUDA that the groups use."""


def differences(group: str, device: str = "npu") -> list[int]:
    """Numbers of the results of a group that have other bits on the device than on the CPU; they are all there. A GPU's
    arithmetic makes a NaN of its own of any other, so there they are all alike."""
    if device == "npu":
        fake_npu.install()
    run = GROUPS[group]
    expected, found = run("cpu"), run(device)
    assert len(expected) == len(found) > 2 and all(not result.is_cpu for result in found)
    exact = device == "npu" or group == "updates"  # of halves, two of which may look like a NaN
    compared = bits if exact else _settled_bits
    return [k for k, (a, b) in enumerate(zip(expected, found)) if not torch.equal(compared(a), compared(b.cpu()))]


def _settled_bits(tensor: Tensor) -> Tensor:
    return bits(tensor.nan_to_num(nan=7.0, posinf=math.inf, neginf=-math.inf) if tensor.is_floating_point() else tensor)


def use_kernels(library: str) -> None:
    """Let the device of this process use CUDA's kernels from now on."""
    fake_npu.install()
    fake_npu.use_kernels(emulated_cuda.load(Path(library)))


def kernels_used() -> set[str]:
    """Names of all that have run so far."""
    return set(fake_npu.USED)


def key_differences() -> int:
    """How many results of operations on keys are other ones on the device than on the CPU."""
    chance = torch.Generator().manual_seed(1)
    keys, tables = torch.randint(0, 90, (200,), generator=chance), torch.randint(0, 3, (200,), generator=chance).int()
    found = []
    for device in ("cpu", "npu"):
        there, of = keys.to(device), tables.to(device)
        unique = dedup(there, of)
        both = intersect(there[:90], of[:90], there[90:], of[90:])
        found.append([unique.unique_index, unique.inverse, unique.counts, *bucketize(of, 3), *both])
    assert not any(result.is_cpu for result in found[1])
    return sum(not torch.equal(a, b.cpu()) for a, b in zip(*found))


def kernel_errors() -> list[str]:
    """What calls are answered with that kernels could not tell from right ones."""
    rows, double, bags = torch.zeros(4, 8, device="npu"), torch.zeros(4, 8).double().to("npu"), BAGS
    host, mean, maximum = torch.zeros(1, 8), (*bags, [0, 1], [MEAN]), (*bags, [0, 1], [MAX])
    return told(
        [
            lambda: pool_forward(rows, *mean, [host]),
            lambda: pool_forward(double, *mean, [host.to("npu")]),
            lambda: pool_backward([host.double().to("npu")], None, *mean, None, rows),
            lambda: pool_backward([host.to("npu")], None, *maximum, None, rows),
            lambda: pool_backward([host.to("npu")], torch.zeros(4, 8), *maximum, None, rows),
            lambda: row_update(double, rows, optim.SGD(), 1, 0.1),
            lambda: intersect(torch.zeros(2).long(), None, torch.zeros(2).long().to("npu"), None),
            lambda: row_update(rows, rows[:, :4], optim.SGD(), 1, 0.1, torch.ones(4, device="npu")),
        ]
    )


BAGS = (torch.tensor([0, 3]), torch.tensor([0, 2]))
"""One bag of two."""


def errors() -> list[str]:
    """What calls with something in another place, or out of range, are answered with."""
    fake_npu.install()
    rows, index = torch.zeros(4, 8, device="npu"), torch.tensor([1, 3])
    return told(
        [
            lambda: gather_rows(rows, index.to("npu"), 8),
            lambda: gather_rows(rows, torch.tensor([0, 4]), 8),
            lambda: scatter_rows(rows, index, torch.zeros(2, 8)),
            lambda: row_update(rows, torch.zeros(4, 2), optim.SGD(), 1, 0.1),
        ]
    )


def told(calls: list[Callable[[], Any]]) -> list[str]:
    """The error of each call, or nothing."""
    found = []
    for call in calls:
        try:
            call()
            found.append("")
        except (TypeError, IndexError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
