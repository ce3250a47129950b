"""Case `row_sync`: rows that go from chosen places of a buffer to chosen places of another, ours and by torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.config import positive
from nestpipe_kernels.ops.row_sync import row_sync

__all__ = ["add_options", "setups"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--rows", type=positive, default=200_000, help="rows of either buffer")
    parser.add_argument("--dim", type=positive, nargs="+", default=[8, 64, 128], help="floats of a row")
    parser.add_argument("--common", type=float, default=0.5, help="part of the rows that is copied")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Random distinct rows on either side."""
    for dim in parsed.dim:
        generator = torch.Generator().manual_seed(parsed.seed)
        count = max(1, int(parsed.rows * parsed.common))
        source = torch.randn(parsed.rows, dim, generator=generator)
        target, other = torch.zeros(parsed.rows, dim), torch.zeros(parsed.rows, dim)
        index = torch.randperm(parsed.rows, generator=generator)[:count]
        place = torch.randperm(parsed.rows, generator=generator)[:count]

        def ours(k: int, s=source, t=target, i=index, p=place) -> torch.Tensor:  # type: ignore[no-untyped-def]
            row_sync(s, t, i, p)
            return t  # type: ignore[no-any-return]

        def by_torch(k: int, s=source, t=other, i=index, p=place) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return t.index_copy_(0, p, s.index_select(0, i))  # type: ignore[no-any-return]

        peers = [Implementation("torch.index_select + index_copy_", by_torch)]
        # Both indices are read; every row is read at one random place and written at another.
        yield Setup(
            shape={"rows": parsed.rows, "dim": dim, "copied": count},
            implementations=[Implementation("nestpipe", ours), *(peers if parsed.peers else [])],
            bytes_streamed=2 * 8 * count,
            random_lines=2 * count * lines_of(4 * dim),
            adjacent_lines=lines_of(4 * dim),
        )
