"""Case `lookup_pool`: rows of bags of uniform keys out of a 20 GB table, summed; ours, torch's, FBGEMM's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.ops.lookup_pool.operator import lookup_pool

__all__ = ["works"]

DIM, BAG = 128, 20
TOLERANCE = 2e-2
"""Of sums of 20 numbers of size 1 that a peer rounds to bfloat16."""


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """1 M bags of 20 keys; rows of 128 bfloat16; forward alone."""
    dtype = torch.bfloat16 if backend.kind == "cuda" else torch.float32  # other devices have no kernels for short rows
    rows = scaled(parsed, 20_000_000_000 // (dtype.itemsize * DIM), 64)
    bags = scaled(parsed, 1_000_000, 8)
    generator = torch.Generator(device="cpu").manual_seed(parsed.seed)
    table = _filled(rows, dtype, generator, backend.device)
    slots = torch.randint(rows, (bags * BAG,), generator=generator).to(backend.device)
    offsets = torch.arange(0, bags * BAG + 1, BAG).to(backend.device)

    def ours(k: int) -> Tensor:
        return lookup_pool(table, slots, offsets)

    def torch_bag(k: int) -> Tensor:
        return functional.embedding_bag(slots, table, offsets[:-1], mode="sum")

    candidates, missing = [Candidate("nestpipe", ours)], []
    if parsed.peers:
        candidates.append(Candidate("torch.nn.functional.embedding_bag", torch_bag))
        try:
            candidates.append(Candidate("fbgemm TBE, float16", _fbgemm(rows, slots, offsets, backend)))
        except Exception as error:
            missing.append(f"fbgemm TBE: {type(error).__name__}: {error}")

    def check() -> None:
        worst = float((ours(0) - torch_bag(0).to(torch.float32)).abs().max())
        if not worst <= TOLERANCE * BAG:
            raise ValueError(f"bench lookup_pool: nestpipe differs from torch by {worst:.3g}; nothing was timed")

    yield Work(
        {"rows": rows, "dim": DIM, "bags": bags, "bag": BAG},
        candidates,
        # Keys and offsets in, a row for each key, sums out.
        bytes_moved=8.0 * bags * (BAG + 1) + dtype.itemsize * DIM * bags * BAG + 4.0 * DIM * bags,
        dtype=str(dtype).removeprefix("torch."),
        keys=bags * BAG,
        check=check,
        missing=missing,
    )


def _filled(rows: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> Tensor:
    """Rows of a small random matrix again and again: a table this large is not drawn number by number."""
    table = torch.empty(rows, DIM, dtype=dtype, device=device)
    some = torch.randn(min(rows, 1 << 16), DIM, generator=generator).to(dtype).to(device)
    for begin in range(0, rows, len(some)):
        part = table[begin : begin + len(some)]
        part.copy_(some[: len(part)])
    return table


def _fbgemm(rows: int, slots: Tensor, offsets: Tensor, backend: DeviceBackend) -> Any:
    """FBGEMM's forward on a table of float16, which has no bfloat16 rows for training; its values are random."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    if backend.kind != "cuda":
        raise NotImplementedError(f"no tables on {backend.kind}")
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_SGD,
        weights_precision=SparseType.FP16,
        pooling_mode=PoolingMode.SUM,
        device=backend.device,
    )
    return lambda k: bags(slots, offsets)
