"""Case `dedup`: the distinct keys of a list and its inverse, ours and by torch or pandas."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.config import positive
from nestpipe_kernels.ops.dedup import dedup

__all__ = ["add_options", "setups"]

KINDS = ("zipf", "uniform", "equal")
ZIPF_SKEW, ZIPF_ROWS = 1.05, 1_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="how keys are drawn")
    parser.add_argument("--zipf-keys", type=positive, default=163_840, help=f"keys of Zipf {ZIPF_SKEW} over a million")
    parser.add_argument("--keys", type=positive, default=1_000_000, help="keys of the other lists")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Keys by Zipf's law, uniform over all of int64, and all equal."""
    for kind in parsed.kinds:
        size = parsed.zipf_keys if kind == "zipf" else parsed.keys
        keys = _keys(kind, size, np.random.default_rng(parsed.seed))
        distinct = len(np.unique(keys.numpy()))
        peers, missing = _peers(keys) if parsed.peers else ([], [])
        implementations = [Implementation("nestpipe", lambda k, keys=keys: dedup(keys)), *peers]  # type: ignore[misc]
        # Keys in; inverse, positions and counts out. The table's entry of a distinct key is found by chance at first,
        # and in a cache later.
        yield Setup(
            shape={"kind": kind, "keys": size, "distinct": distinct},
            implementations=implementations,
            bytes_streamed=(8 + 4) * size + 16 * distinct,
            random_lines=distinct,
            dtype="int64",
            missing=missing,
            check=_check(keys, distinct, implementations),
            warmed=True,
        )


def _keys(kind: str, size: int, generator: np.random.Generator) -> Tensor:
    if kind == "zipf":
        places = spread_places(generator, 1, ZIPF_ROWS)
        return torch.from_numpy(draw_spread(zipf_cdf(ZIPF_ROWS, ZIPF_SKEW), places, generator, size)[0])
    if kind == "uniform":
        return torch.from_numpy(generator.integers(-(1 << 63), (1 << 63) - 1, size, endpoint=True))
    return torch.full((size,), 42)


def _peers(keys: Tensor) -> tuple[list[Implementation], list[str]]:
    peers = [
        Implementation("torch.unique", lambda k: torch.unique(keys, return_inverse=True)),
        Implementation("torch.unique sorted=False", lambda k: torch.unique(keys, sorted=False, return_inverse=True)),
    ]
    try:
        import pandas
    except ImportError as error:
        return peers, [f"pandas.factorize: {error}"]
    array = keys.numpy()
    return [*peers, Implementation("pandas.factorize", lambda k: pandas.factorize(array))], []


def _check(keys: Tensor, distinct: int, implementations: list[Implementation]) -> Callable[[], None]:
    """As many numbers as there are distinct keys, by which the list can be rebuilt: the order of numbers is free."""

    def check() -> None:
        for one in implementations:
            result: Any = one.step(0)
            if one.name == "nestpipe":
                values, inverse = keys[result.unique_index], result.inverse
            elif one.name == "pandas.factorize":
                inverse, values = torch.as_tensor(result[0]), torch.as_tensor(result[1])
            else:
                values, inverse = result
            if len(values) != distinct or not torch.equal(values[inverse.long()], keys):
                raise ValueError(f"bench dedup: {one.name} does not rebuild the list of keys; nothing was timed")

    return check
