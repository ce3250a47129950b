"""Case `intersect`: where the keys of a micro-batch lie in those of another, ours and by torch or numpy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.config import positive
from nestpipe_kernels.ops.intersect import intersect

__all__ = ["add_options", "setups"]

SIZES = (163_840, 1_000_000)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--keys", type=positive, nargs="+", default=list(SIZES), help="keys of either list")
    parser.add_argument("--common", type=float, default=0.2, help="part of the keys that both lists have")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Distinct int64 keys in no order, of which both lists have a part."""
    for size in parsed.keys:
        generator = np.random.default_rng(parsed.seed)
        common = int(size * parsed.common)
        keys = np.unique(generator.integers(-(1 << 62), 1 << 62, 2 * size + size // 8))
        generator.shuffle(keys)
        a = torch.from_numpy(generator.permutation(keys[:size]))
        b = torch.from_numpy(generator.permutation(keys[size - common : 2 * size - common]))
        ours = [Implementation("nestpipe", lambda k, a=a, b=b: intersect(a, None, b, None))]  # type: ignore[misc]
        peers = [
            Implementation("torch.sort + searchsorted", lambda k, a=a, b=b: _by_torch(a, b)),  # type: ignore[misc]
            Implementation("numpy.isin + argsort", lambda k, a=a, b=b: _by_numpy(a, b)),  # type: ignore[misc]
        ]
        # Either list is read; a 16-byte entry is written for each key of a and one looked up for each of b; pairs out.
        yield Setup(
            shape={"keys": size, "common": common},
            implementations=ours + (peers if parsed.peers else []),
            bytes_streamed=8 * 2 * size + 16 * common,
            random_lines=2 * size,
            dtype="int64",
            warmed=True,
        )


def _by_torch(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    ordered, places = torch.sort(a)
    at = torch.searchsorted(ordered, b).clamp_(max=len(a) - 1)
    index_b = (ordered[at] == b).nonzero().flatten()
    return places[at[index_b]], index_b


def _by_numpy(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    first, second = a.numpy(), b.numpy()
    index_b = np.flatnonzero(np.isin(second, first))
    index_a = np.flatnonzero(np.isin(first, second[index_b]))
    index_a = index_a[np.argsort(first[index_a])]
    found = index_a[np.searchsorted(first[index_a], second[index_b])]
    return torch.from_numpy(found), torch.from_numpy(index_b)
