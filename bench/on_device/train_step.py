"""Case `train_step`: bags looked up and summed, back from a gradient, Adagrad; by key, beside peers by row number."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nestpipe_kernels as nk
from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.ops.dedup import dedup
from nestpipe_kernels.ops.lookup_pool.operator import lookup_pool
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.store import DeviceStore
from nestpipe_kernels.types import UNBOUNDED, TableSpec

__all__ = ["works"]

DIM, BAG, SKEW, RATE = 64, 20, 1.05, 0.05
BATCHES = 4
TOLERANCE = 1e-4


class _Ours:
    """A store on the device: rows of the distinct keys in a buffer, pooled, updated, and written back."""

    name = "nestpipe"

    def __init__(self, rows: int, seed: int, backend: DeviceBackend) -> None:
        self._optimizer = nk.optim.Adagrad(RATE)
        table = TableSpec("t", UNBOUNDED, nk.init.Uniform(-0.1, 0.1), seed)
        self.store = DeviceStore([table], dim=DIM, optimizer=self._optimizer, device=backend.device)
        self.store.reserve(rows)
        self._steps = 0

    def step(self, ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        self._steps += 1
        found = dedup(ids)
        keys = ids.index_select(0, found.unique_index)
        tables = torch.zeros(len(keys), dtype=torch.int32, device=ids.device)
        handles = self.store.retrieve(keys, tables, found.counts, self._steps).handles
        buffer = torch.empty(len(keys), self.store.row_floats, dtype=torch.float32, device=ids.device)
        self.store.gather(handles, keys, tables, buffer, None)
        rows = buffer[:, :DIM].detach().requires_grad_()
        out = lookup_pool(rows, found.inverse, offsets)
        (gradient,) = torch.autograd.grad(out, rows, grad)
        row_update(buffer, gradient, self._optimizer, self._steps, RATE)
        self.store.write_back(handles, buffer)
        return out.detach()


class _Torch:
    """nn.EmbeddingBag with sparse gradients, where the device has such, and torch's Adagrad."""

    def __init__(self, rows: Tensor) -> None:
        sparse = rows.is_cuda
        self.name = f"torch.nn.EmbeddingBag{' sparse' if sparse else ''} + Adagrad"
        self._bag = nn.EmbeddingBag(rows.shape[0], rows.shape[1], mode="sum", sparse=sparse, _weight=rows)
        self._optimizer = torch.optim.Adagrad(self._bag.parameters(), lr=RATE)

    def step(self, ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        out: Tensor = self._bag(ids, offsets[:-1])
        out.backward(grad)  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return out.detach()


class _Fbgemm:
    """FBGEMM's table-batched embeddings with Adagrad fused into backward."""

    name = "fbgemm TBE"

    def __init__(self, rows: Tensor, backend: DeviceBackend) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        if backend.kind != "cuda":
            raise NotImplementedError(f"no tables on {backend.kind}")
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(*rows.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=RATE,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
            device=backend.device,
        )
        self._bags.split_embedding_weights()[0].copy_(rows)

    def step(self, ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        out: Tensor = self._bags(ids, offsets)
        out.backward(grad)  # type: ignore[no-untyped-call]
        return out.detach()


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """65,536 bags of 20 keys by Zipf's law out of 10 M rows of 64 floats."""
    rows, bags = scaled(parsed, 10_000_000, 64), scaled(parsed, 65_536, 8)
    generator = np.random.default_rng(parsed.seed)
    cdf, places = zipf_cdf(rows, SKEW), spread_places(generator, 1, rows)
    drawn = [draw_spread(cdf, places, generator, bags * BAG)[0] for _ in range(BATCHES)]
    batches = [torch.from_numpy(ids).to(backend.device) for ids in drawn]
    offsets = torch.arange(0, bags * BAG + 1, BAG).to(backend.device)
    grad = torch.from_numpy(generator.standard_normal((bags, DIM), dtype=np.float32)).to(backend.device)
    ours = _Ours(rows, parsed.seed, backend)
    every = torch.arange(rows).to(backend.device)
    start = ours.store.find_or_insert(every)[0]
    implementations: list[Any] = [ours, _Torch(start.clone())]
    missing = []
    try:
        implementations.append(_Fbgemm(start, backend))
    except Exception as error:
        missing.append(f"fbgemm TBE: {type(error).__name__}: {error}")

    def check() -> None:
        for ids in batches[:2]:
            results = [one.step(ids, offsets, grad) for one in implementations]
            for one, result in zip(implementations[1:], results[1:]):
                worst = float((result - results[0]).abs().max())
                if not worst <= TOLERANCE * max(1.0, float(results[0].abs().max())):
                    raise ValueError(f"bench train_step: {one.name} differs by {worst:.3g}; nothing was timed")

    distinct = len(np.unique(drawn[0]))
    measured = implementations if parsed.peers else implementations[:1]
    yield Work(
        {"rows": rows, "dim": DIM, "bags": bags, "bag": BAG, "distinct": distinct, "optimizer": "adagrad"},
        [
            Candidate(one.name, lambda k, one=one: one.step(batches[k % BATCHES], offsets, grad))  # type: ignore[misc]
            for one in measured
        ],
        # Keys; each distinct row read, its embedding and its sums read and written; bags out, their gradients in.
        bytes_moved=8.0 * bags * BAG + distinct * DIM * 4 * 5 + 2.0 * bags * DIM * 4,
        keys=bags * BAG,
        check=check,
        missing=missing if parsed.peers else [],
    )
