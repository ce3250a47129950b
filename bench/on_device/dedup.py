"""Case `dedup`: the distinct keys of a list and its inverse, ours, by torch.unique and by cupy.unique."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.ops.dedup import dedup

__all__ = ["works"]

ZIPF_SKEW, ZIPF_ROWS = 1.05, 10_000_000


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """10 M keys: uniform over all of int64, by Zipf's law, all equal."""
    size = scaled(parsed, 10_000_000, 64)
    for kind in ("uniform", "zipf", "equal"):
        keys = _keys(kind, size, scaled(parsed, ZIPF_ROWS, 64), np.random.default_rng(parsed.seed)).to(backend.device)
        distinct = len(torch.unique(keys.cpu()))
        peers, missing = _peers(keys) if parsed.peers else ([], [])
        yield Work(
            {"kind": kind, "keys": size, "distinct": distinct},
            [Candidate("nestpipe", lambda k, keys=keys: dedup(keys)), *peers],  # type: ignore[misc]
            # Keys in; inverse, positions and counts out; the table of heads (4 bytes a slot) cleared, and a line of 32
            # bytes of it read for every key that is new.
            bytes_moved=(8 + 4 + 4) * size + (16 + 32) * distinct,
            dtype="int64",
            keys=size,
            check=lambda keys=keys, distinct=distinct: _check(keys, distinct),  # type: ignore[misc]
            missing=missing,
        )


def _keys(kind: str, size: int, rows: int, generator: np.random.Generator) -> Tensor:
    if kind == "zipf":
        places = spread_places(generator, 1, rows)
        return torch.from_numpy(draw_spread(zipf_cdf(rows, ZIPF_SKEW), places, generator, size)[0])
    if kind == "uniform":
        return torch.from_numpy(generator.integers(-(1 << 63), (1 << 63) - 1, size, endpoint=True))
    return torch.full((size,), 42)


def _peers(keys: Tensor) -> tuple[list[Candidate], list[str]]:
    peers = [Candidate("torch.unique", lambda k: torch.unique(keys, return_inverse=True))]
    try:
        import cupy
    except ImportError as error:
        return peers, [f"cupy.unique: {error}"]
    array: Any = cupy.from_dlpack(keys)
    return [*peers, Candidate("cupy.unique", lambda k: cupy.unique(array, return_inverse=True))], []


def _check(keys: Tensor, distinct: int) -> None:
    """Numbers in order of first appearance, by which the list can be rebuilt."""
    found = dedup(keys)
    values = keys[found.unique_index]
    ascending = bool((found.unique_index.diff() > 0).all()) if distinct > 1 else True
    if len(values) != distinct or not ascending or not torch.equal(values[found.inverse.long()], keys):
        raise ValueError("bench dedup: nestpipe does not rebuild the list of keys; nothing was timed")
