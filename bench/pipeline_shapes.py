"""Shapes of the case `pipeline`: tables, batches and, where a device is emulated, what its stages take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.data import Batch, MovieLensDataset, batches
from nestpipe_kernels.jagged import KeyedJaggedTensor

__all__ = ["SHAPES", "PipelineShape", "StageTimes", "make_batches", "sized"]


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of a step's stages on an emulated device, and of its exchanges on the link."""

    storage: float = 0.0
    copy: float = 0.0
    routing: float = 0.0
    retrieval: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    """What rows and gradients are to take on the link at its rate; 0 where the shape has a size of its own."""


@dataclass(frozen=True)
class PipelineShape:
    """A model's tables, its dense part, and a stream of batches.

    Attributes:
        kind: "overlap" (distinct keys with a given overlap of micro-batches and batches), "zipf" or "movielens".
        tables, rows, dim: tables of `rows` ids (0: an open vocabulary).
        batch, bag: samples of a rank in a step; keys of a bag (0: follows from the link's rate).
        dense, bottom, top: numbers of a sample and hidden sizes of the DLRM.
        times: what an emulated device takes.
        distinct_batches: how many there are; they come in turn.
        twice: part of the distinct keys that occur twice in a batch. carried: part that the batch before has, too.
        common: part that all ranks have.
        edge_share: as in PipelineConfig, of every implementation with several micro-batches.
    """

    name: str
    kind: str
    tables: int
    rows: int
    dim: int
    batch: int
    bag: int
    micro_batches: int
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    times: StageTimes
    distinct_batches: int = 6
    zipf: float = 1.05
    twice: float = 0.0
    carried: float = 0.0
    common: float = 0.0
    edge_share: float = 1.0

    @property
    def features(self) -> list[str]:
        """Names of the features, in the order of the tables that they look up."""
        if self.kind == "movielens":
            return ["user", "item", "history"]
        return [f"f{t}" for t in range(self.tables)]


_PAPER = StageTimes(storage=120, copy=80, routing=50, retrieval=250, compute=296, communication=208)
SHAPES = {
    shape.name: shape
    for shape in (
        PipelineShape(
            "paper-npu", "overlap", 4, 0, 128, 512, 0, 8, 13, (64, 128), (64,), _PAPER,
            twice=0.32, carried=0.2, common=0.1,
        ),
        PipelineShape(
            "ml100k", "movielens", 2, 0, 128, 512, 50, 8, 0, (), (64,), StageTimes(compute=100), distinct_batches=16
        ),
        PipelineShape(
            "criteo", "zipf", 26, 100_000, 64, 1024, 1, 4, 13, (512, 256, 64), (512, 512, 256), StageTimes()
        ),
        PipelineShape("dlrm", "zipf", 4, 1_000_000, 64, 1024, 20, 4, 13, (512, 256, 64), (512, 256), StageTimes()),
        PipelineShape(
            "small", "overlap", 2, 0, 8, 32, 6, 4, 3, (8,), (8,),
            StageTimes(storage=1, copy=1, routing=1, retrieval=2, compute=8), twice=0.3, carried=0.2, common=0.1,
        ),
    )
}  # fmt: skip
"""`twice` of paper-npu is such that 8 micro-batches of clustered samples have 1.25 times the batch's distinct keys."""

_LINK_SHARE = 0.97
"""Part of a link's rate that is left for rows and gradients: headers of packets, keys."""


def sized(shape: PipelineShape, bits_per_second: float | None, ranks: int) -> PipelineShape:
    """The shape with a bag size for which rows and gradients take `times.communication` on a link of this rate.

    Raises:
        ValueError: the shape needs a rate, or the rate is too low for one key a bag.
    """
    if shape.bag:
        return shape
    if bits_per_second is None or ranks < 2:
        raise ValueError(f"--shape {shape.name} gets its size from the link's rate: give --net RATE and --ranks >= 2")
    sent_bytes = shape.times.communication / 1e3 * bits_per_second / 8 * _LINK_SHARE
    distinct = sent_bytes / (2 * shape.dim * 4 * (ranks - 1) / ranks)
    bag = round(distinct * (1 + shape.twice) / (shape.batch * shape.tables))
    if bag < 1:
        raise ValueError(
            f"--net: too slow for --shape {shape.name}, which needs a key in every bag; give a higher rate"
        )
    return replace(shape, bag=bag)


def make_batches(shape: PipelineShape, rank: int, ranks: int, seed: int, data: str | None) -> list[Batch]:
    """This rank's `distinct_batches` batches; `data` is the path of a MovieLens file, for that kind alone.

    Raises:
        OSError: it cannot be read.
    """
    if data is not None:
        loader = batches(MovieLensDataset(data, shape.bag), shape.batch, rank, ranks, drop_last=True, shuffle_seed=seed)
        return [batch for batch, _ in zip(loader, range(shape.distinct_batches))]
    made = _overlapping(shape, rank, seed) if shape.kind == "overlap" else _zipf(shape, rank, seed)
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    result = []
    for keys in made:
        lengths = torch.full((shape.tables * shape.batch,), shape.bag, dtype=torch.int64)
        sparse = KeyedJaggedTensor(shape.features, torch.from_numpy(keys.reshape(-1)), lengths=lengths)
        dense = torch.randn(shape.batch, shape.dense, generator=generator)
        labels = torch.randint(0, 2, (shape.batch,), generator=generator).float()
        result.append(Batch(dense, sparse, labels))
    return result


def _overlapping(shape: PipelineShape, rank: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """[tables, batch * bag] of each batch: parts of the distinct keys are carried over, common, or there twice."""
    generator = np.random.default_rng([seed, rank])
    places = shape.batch * shape.bag
    distinct = round(places / (1 + shape.twice))
    carried, common = round(shape.carried * distinct), round(shape.common * distinct)
    fresh = distinct - carried

    def new_keys(number: int) -> npt.NDArray[np.int64]:
        """The keys that come with a batch: first those that all ranks share."""
        owner = np.where(np.arange(fresh) < common, 0, rank + 1)
        words = (
            (owner.astype(np.uint64) << np.uint64(40)) + np.uint64(number * fresh) + np.arange(fresh, dtype=np.uint64)
        )
        return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)  # any int64 may be a key

    for number in range(shape.distinct_batches):
        before = new_keys((number - 1) % shape.distinct_batches)
        keys = np.concatenate([new_keys(number), before[fresh - carried :]])
        tables = []
        for _ in range(shape.tables):
            again = generator.choice(keys, places - distinct, replace=False)
            tables.append(generator.permutation(np.concatenate([keys, again])))
        yield np.stack(tables)


def _zipf(shape: PipelineShape, rank: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """[tables, batch * bag] of each batch: Zipf ids, hot ones spread over the table alike on all ranks."""
    places = spread_places(np.random.default_rng(seed), shape.tables, shape.rows)
    cdf, generator = zipf_cdf(shape.rows, shape.zipf), np.random.default_rng([seed, rank])
    for _ in range(shape.distinct_batches):
        yield draw_spread(cdf, places, generator, shape.batch * shape.bag)
