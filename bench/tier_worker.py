"""What case `tier` measures, in a process of its own: a model with tables in memory or in a file, trained when told."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.lines import use_threads
from nestpipe_kernels.bench.pipeline_runs import Emulation
from nestpipe_kernels.bench.pipeline_shapes import StageTimes
from nestpipe_kernels.bench.zipf import draw_ranks, far_ids, zipf_cdf
from nestpipe_kernels.store import RowMetadata

__all__ = ["Settings", "serve"]

FILL = 100_000
"""Rows of a call that fills a table."""
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Settings:
    """Shape of the run; the same keys whatever the rows lie in."""

    tables: int
    rows: int
    """Of each table."""
    dim: int
    batch: int
    bag: int
    zipf: float
    hidden: int
    compute_ms: float
    """Of an emulated accelerator; 0: the dense part's own time on the processor."""
    micro_batches: int
    seed: int
    threads: int
    steps: int
    tier: nk.FileTier | None


class _Model(torch.nn.Module):
    """Pooled rows of all tables through an MLP, squared error of one number."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        tables = [
            nk.EmbeddingBagConfig(nk.UNBOUNDED, settings.dim, f"t{t}", feature_names=[f"f{t}"], tier=settings.tier)
            for t in range(settings.tables)
        ]
        self.collection = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.RowWiseAdagrad(LEARNING_RATE))
        width, hidden = settings.tables * settings.dim, settings.hidden
        torch.manual_seed(settings.seed)
        self.top = torch.nn.Sequential(
            torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(),
            torch.nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, batch: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
        features, labels = batch
        output = self.top(self.collection(features).values()).squeeze(1)
        return ((output - labels) ** 2).mean(), output.detach()


class _Trainer:
    def __init__(self, settings: Settings) -> None:
        use_threads(settings.threads)
        self.settings = settings
        self.model = _Model(settings)
        self.store: Any = self.model.collection.row_stores()[0]
        self._generator = np.random.default_rng(settings.seed)
        self._cdf = zipf_cdf(settings.rows, settings.zipf)
        self._batches = [self._batch() for _ in range(settings.steps + 4)]
        self._stream: Iterator[Any] = iter(self._batches)

    def _batch(self) -> tuple[Any, Tensor]:
        s = self.settings
        keys = torch.from_numpy(far_ids(draw_ranks(self._cdf, self._generator, s.tables * s.batch * s.bag)))
        names = [f"f{t}" for t in range(s.tables)]
        lengths = torch.full((s.tables * s.batch,), s.bag, dtype=torch.int64)
        labels = torch.from_numpy(self._generator.standard_normal(s.batch).astype(np.float32))
        return nk.KeyedJaggedTensor(names, keys, lengths=lengths), labels

    def fill(self) -> None:
        """Rows for all keys, in the order in which a stream of such keys would meet them first."""
        s = self.settings
        chances = np.diff(self._cdf, prepend=0.0, append=1.0)
        arrival = self._generator.exponential(size=s.rows) / chances
        order = torch.from_numpy(far_ids(np.argsort(arrival)))
        for begin in range(0, s.rows, FILL):
            keys = order[begin : begin + FILL]
            notes = RowMetadata(torch.full_like(keys, -1), torch.zeros_like(keys))
            rows = torch.empty(len(keys), self.store.row_floats)
            for t in range(s.tables):
                tables = torch.full((len(keys),), t, dtype=torch.int32)
                absent = torch.full_like(keys, -1)
                self.store.gather(absent, keys, tables, rows, None)
                self.store.load_rows(keys, tables, rows, notes)
        self._warm_hot_rows(order)
        dense = torch.optim.SGD(self.model.top.parameters(), lr=0.01)
        config = nk.PipelineConfig(num_micro_batches=s.micro_batches, threads=s.threads, timeline_steps=2)
        self.pipeline = nk.NestedPipeline(self.model, dense, config=config)
        if s.compute_ms:
            self.pipeline.rank.hold = Emulation(StageTimes(compute=s.compute_ms)).hold

    def _warm_hot_rows(self, order: Tensor) -> None:
        """The hottest rows that fit, the very hottest last: what a long run would have in memory."""
        if self.settings.tier is None:
            return
        fit = self.settings.tier.memory_bytes // (4 * self.store.row_floats) // self.settings.tables
        for begin in range(fit // FILL * FILL, -1, -FILL):
            keys = order[begin : min(fit, begin + FILL)].contiguous()
            for t in range(self.settings.tables):
                self.store.warm(keys, torch.full((len(keys),), t, dtype=torch.int32))

    def steps(self, count: int) -> list[float]:
        """Milliseconds of each step."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.pipeline.progress(self._stream)
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def anonymous_bytes(self) -> int:
        """Memory of this process that no file backs."""
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def counters(self) -> dict[str, int]:
        """Of the store's tier; nothing is disturbed."""
        return dict(self.store.tier_counters())

    def distinct(self) -> int:
        """Rows that a batch touches."""
        return sum(len(k.unique()) for k in self._batches[0][0].values().view(self.settings.tables, -1))

    def digest(self) -> str:
        """Of the rows of many keys, and of the dense parameters."""
        self.pipeline.settle()
        digest = hashlib.sha256()
        for features, _ in self._batches[-8:]:
            for t, keys in enumerate(features.values().view(self.settings.tables, -1)):
                digest.update(self.store.find(keys, table=t)[0].numpy().tobytes())
        for parameter in self.model.top.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Stop the pipeline's threads."""
        self.pipeline.close()


def serve(connection: Connection, settings: Settings) -> None:
    """Answer ("method", arguments...) until the connection closes: ("ok", result), or ("failed", message)."""
    trainer: _Trainer | None = None
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if name == "make":
                trainer = _Trainer(settings)
                connection.send(("ok", None))
            else:
                connection.send(("ok", getattr(trainer, name)(*arguments)))
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))
