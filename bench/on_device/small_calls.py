"""Every native kernel once, or a few times, on small inputs with edges: what compute-sanitizer is to watch.

python -m nestpipe_kernels.bench.on_device.small_calls --device cuda
"""

from __future__ import annotations

import argparse

import torch

from nestpipe_kernels import optim, policy
from nestpipe_kernels.device import backend_for
from nestpipe_kernels.ops._kernels import kernels_of
from nestpipe_kernels.ops.bucketize import bucketize
from nestpipe_kernels.ops.dedup import dedup
from nestpipe_kernels.ops.finite_rows import all_finite, finite_rows
from nestpipe_kernels.ops.gather_rows import gather_rows
from nestpipe_kernels.ops.intersect import intersect
from nestpipe_kernels.ops.lookup_pool import pool_backward, pool_forward, pool_weight_grad
from nestpipe_kernels.ops.mean_sources import entries_by_row, mean_sources
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words
from nestpipe_kernels.ops.row_sync import row_sync
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.ops.scatter_add_rows import scatter_add_rows, scatter_rows, zero_rows
from nestpipe_kernels.ops.take_rows import take_rows
from nestpipe_kernels.store import DeviceStore
from nestpipe_kernels.types import UNBOUNDED, DataType, TableSpec

__all__ = ["main"]

SIZES = (1, 63, 3000)
DIMS = (1, 7, 64)


def main(arguments: list[str] | None = None) -> int:
    """Call them; what a call gives is the tests' matter."""
    parser = argparse.ArgumentParser(description="Call every kernel on small inputs.")
    parser.add_argument("--device", default="cuda", help="as in cuda or cuda:1")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="keys, or rows")
    parsed = parser.parse_args(arguments)
    backend = backend_for(parsed.device)
    for size in parsed.sizes:
        _keys(backend.device, size)
        _store(backend.device, size)
        for dim in DIMS:
            _rows(backend.device, size, dim)
    backend.synchronize()
    print(f"small_calls: {len(parsed.sizes)} sizes and {len(DIMS)} dims on {backend.device}")
    return 0


def _keys(device: torch.device, size: int) -> None:
    chance = torch.Generator().manual_seed(size)
    for distinct in (1, 40, 1 << 62):
        keys = torch.randint(distinct, (size,), generator=chance).to(device)
        dedup(keys)
        dedup(keys, torch.randint(3, (size,), generator=chance).to(torch.int32).to(device))
        intersect(keys[: size // 2], None, keys[size // 3 :], None)
    for buckets in (1, 300):
        bucketize(torch.randint(buckets, (size,), generator=chance).to(torch.int32).to(device), buckets)


def _store(device: torch.device, size: int) -> None:
    """Keys that come twice, that leave by a rule, that are erased, exported and loaded again."""
    rules = ((64, DataType.FP32, policy.LRU()), (7, DataType.FP16, policy.LFU()), (8, DataType.BF16, policy.TTL(1)))
    for dim, kind, rule in rules:
        table = TableSpec("t", UNBOUNDED, None, 0, max(size // 2, 1), eviction=rule)
        store, other = (
            DeviceStore([table], dim=dim, optimizer=optim.SGD(), device=device, data_type=kind) for _ in range(2)
        )
        keys = (torch.arange(size) * 7 % max(size // 3, 1)).to(device)
        for batch in range(3):
            store.find_or_insert(keys + batch * size // 4, batch=batch)
        store.erase(keys[: size // 2])
        store.find(keys)
        found, rows, metadata = store.export_rows()
        tables = torch.zeros_like(found, dtype=torch.int32)
        other.load_rows(found, tables, rows, metadata)
        other.write_embeddings(other.find_handles(found, tables), torch.zeros(len(found), dim, device=device))
        store.clear("t")


def _rows(device: torch.device, size: int, dim: int) -> None:
    chance = torch.Generator().manual_seed(size * dim)
    rows = torch.randn(size, dim, generator=chance).to(device)
    other = torch.zeros_like(rows)
    index = torch.randperm(size, generator=chance)
    for move in (scatter_rows, scatter_add_rows):
        move(other, index, rows)
    zero_rows(other, index[: size // 2])
    row_sync(rows, other, index, index)
    gather_rows(rows, index, dim)
    take_rows(rows.clone(), index)
    total, countable = torch.zeros_like(rows), torch.ones(size, dtype=torch.bool, device=device)
    mean_sources(total, countable, rows, entries_by_row(index, size), [size - size // 2, size // 2])
    finite_rows(rows)
    all_finite(rows)
    _update(device, size, dim, chance)
    _pool(rows, index, chance)


def _update(device: torch.device, size: int, dim: int, chance: torch.Generator) -> None:
    for optimizer in (optim.SGD(momentum=0.9), optim.RowWiseAdagrad(), optim.Adam(), optim.LAMB(), optim.FTRL()):
        for kind in DataType:
            length = embedding_words(dim, kind) + optimizer.state_floats(dim) + 1
            rows = torch.zeros(size, (length + 15) // 16 * 16, device=device)
            grads = torch.randn(size, dim, generator=chance).to(device)
            row_update(rows, grads, optimizer, 1, 0.1, None, RowStorage(kind), implementation=_native(rows))
            if kind is not DataType.FP32:
                one = torch.ones(1, dtype=torch.int64)
                at_random = RowStorage(kind, torch.arange(size), torch.zeros(size, dtype=torch.int32), one, one)
                row_update(rows, grads, optimizer, 2, torch.rand(size), torch.arange(size) % 3 > 0, at_random)


def _pool(rows: torch.Tensor, slots: torch.Tensor, chance: torch.Generator) -> None:
    size = len(slots)
    ends = torch.randint(size + 1, (5,), generator=chance).sort().values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends, torch.tensor([size])])
    bags = len(offsets) - 1
    ones, chosen = torch.ones(bags, rows.shape[1], device=rows.device), _native(rows)
    pool_weight_grad([ones], rows, slots, offsets, (0, bags), (0,), implementation=chosen)
    for mode in range(3):
        out, sums = torch.zeros_like(ones), torch.zeros_like(rows)
        pool_forward(rows, slots, offsets, (0, bags), (mode,), [out], implementation=chosen)
        pool_backward([out], rows, slots, offsets, (0, bags), (mode,), None, sums, implementation=chosen)


def _native(rows: torch.Tensor) -> str | None:
    """Native kernels where there are some; else Triton's come first, and compile for longer than all calls take."""
    return None if kernels_of(rows) is None else "native"


if __name__ == "__main__":
    raise SystemExit(main())
