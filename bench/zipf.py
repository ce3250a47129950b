"""Keys that follow Zipf's law, as the cases draw them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe_kernels.data.synthetic import zipf_cdf

__all__ = ["draw_ranks", "draw_spread", "far_ids", "spread_places", "zipf_cdf"]

_Ids = npt.NDArray[np.int64]


def draw_ranks(cdf: npt.NDArray[np.float64], generator: np.random.Generator, shape: int | tuple[int, ...]) -> _Ids:
    """Popularity ranks, 0 the most popular; `cdf` as zipf_cdf gives it."""
    return np.asarray(np.searchsorted(cdf, generator.random(shape), side="right"))


def spread_places(generator: np.random.Generator, tables: int, rows: int) -> _Ids:
    """[tables, rows]: for each table the row that a rank stands for, so that hot rows do not lie side by side."""
    return np.stack([generator.permutation(rows) for _ in range(tables)])


def draw_spread(cdf: npt.NDArray[np.float64], places: _Ids, generator: np.random.Generator, count: int) -> _Ids:
    """[tables, count]: rows of each table, by spread_places."""
    return np.take_along_axis(places, draw_ranks(cdf, generator, (len(places), count)), axis=1)


def far_ids(ranks: npt.NDArray[Any]) -> _Ids:
    """An id in [0, 2^40) for each rank, another for each: an odd multiplier modulo 2^40."""
    return np.asarray((ranks * 0x9E3779B1) % (1 << 40))
