"""Case `scheduler`: what a step costs by itself: a network of no time, a model of no work, tiny batches."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.lines import print_lines, spread, use_threads
from nestpipe_kernels.comm.communicator import Communicator, LocalCommunicator
from nestpipe_kernels.comm.memory import InMemoryWorld
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.stages.registry import STAGE_FUNCTIONS
from nestpipe_kernels.stages.state import BatchState, RankState, Verdict

__all__ = ["StageClock", "batches", "empty_stages", "run"]

StageFunction = Callable[[RankState, BatchState, int], None]
LEARNING_RATE = 0.05


class _Model(torch.nn.Module):
    """The least that trains: the pooled rows times one parameter, added up."""

    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.collection = collection
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        values: Tensor = self.collection(features).values()
        return (values * self.scale).sum(), values.detach()


@dataclass
class StageClock:
    """Time inside the stage functions, by name; spans of different threads may overlap."""

    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wrap(self, name: str, function: StageFunction) -> StageFunction:
        """`function`, timed."""

        def timed(rank: RankState, batch: BatchState, micro: int) -> None:
            start = time.perf_counter()
            function(rank, batch, micro)
            took = time.perf_counter() - start
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + took

        return timed


def _nothing(rank: RankState, batch: BatchState, micro: int) -> None:
    pass


def _good(rank: RankState, batch: BatchState, micro: int) -> None:
    batch.verdict = Verdict(True, 1)


@contextmanager
def _stage_functions(replaced: dict[str, StageFunction]) -> Iterator[None]:
    before = dict(STAGE_FUNCTIONS)
    STAGE_FUNCTIONS.update(replaced)
    try:
        yield
    finally:
        STAGE_FUNCTIONS.update(before)


def empty_stages() -> dict[str, StageFunction]:
    """Stage functions that do nothing: what is left of a step is lanes, events and the caller's loop."""
    return {name: _good if name == "verdict" else _nothing for name in STAGE_FUNCTIONS}


def batches(parsed: argparse.Namespace, rank: int) -> Iterator[Any]:
    """Endless KeyedJaggedTensors out of a few that were made before."""
    generator = torch.Generator().manual_seed(parsed.seed + rank)
    lookups = parsed.tables * parsed.batch * parsed.bag
    lengths = torch.full((parsed.tables * parsed.batch,), parsed.bag, dtype=torch.int64)
    keys = [f"f{t}" for t in range(parsed.tables)]
    made = [
        nk.KeyedJaggedTensor(keys, torch.randint(0, parsed.rows, (lookups,), generator=generator), lengths=lengths)
        for _ in range(8)
    ]
    while True:
        yield from made


def _pipeline(parsed: argparse.Namespace, communicator: Communicator, schedule: str) -> Any:
    tables = [
        nk.EmbeddingBagConfig(
            parsed.rows,
            parsed.dim * (t + 1) if parsed.separate_stores else parsed.dim,
            f"t{t}",
            feature_names=[f"f{t}"],
        )
        for t in range(parsed.tables)
    ]
    collection = nk.EmbeddingBagCollection(
        tables, optimizer=nk.optim.RowWiseAdagrad(LEARNING_RATE), process_group=communicator
    )
    model = _Model(collection)
    config = nk.PipelineConfig(
        schedule=schedule, num_micro_batches=parsed.micro_batches, clustering=parsed.clustering, threads=parsed.threads
    )
    return nk.NestedPipeline(model, torch.optim.SGD([model.scale], lr=LEARNING_RATE), config=config)


@dataclass
class _Result:
    times: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    error: BaseException | None = None


def _drive(
    parsed: argparse.Namespace, communicator: Communicator, schedule: str, barrier: threading.Barrier, result: _Result
) -> None:
    """One rank: steps that warm up, then timed ones; rank 0 takes the processors' time of all."""
    try:
        pipe = _pipeline(parsed, communicator, schedule)
        iterator = batches(parsed, communicator.rank)
        for _ in range(10):
            pipe.progress(iterator)
        barrier.wait(60)
        cpu_start = time.process_time()
        for _ in range(parsed.repeat):
            start = time.perf_counter()
            pipe.progress(iterator)
            result.times.append((time.perf_counter() - start) * 1e3)
        result.cpu_s = time.process_time() - cpu_start
        barrier.wait(60)
        pipe._broken = RuntimeError("measured")  # threads of both ranks end by themselves, not in step
        pipe.close()
    except BaseException as error:
        result.error = error
        barrier.abort()
        communicator.close()


def _measure(parsed: argparse.Namespace, ranks: int, schedule: str) -> _Result:
    """Steps of `ranks` ranks of this process; the result is rank 0's."""
    world = InMemoryWorld(ranks, timeout_s=60.0)
    communicators = [LocalCommunicator()] if ranks == 1 else [world.communicator(r) for r in range(ranks)]
    barrier = threading.Barrier(ranks)
    results = [_Result() for _ in range(ranks)]
    threads = [
        threading.Thread(target=_drive, args=(parsed, communicators[r], schedule, barrier, results[r]), daemon=True)
        for r in range(1, ranks)
    ]
    for thread in threads:
        thread.start()
    _drive(parsed, communicators[0], schedule, barrier, results[0])
    for thread in threads:
        thread.join(60)
    errors = [one.error for one in results if one.error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results[0]


def run(parsed: argparse.Namespace) -> int:
    """Measure empty and real stages, real ones once more with a clock on each; one JSON line for each."""
    parsed.threads = use_threads(parsed.threads)
    lines = []
    for ranks in parsed.ranks:
        for name in ("empty stages", *parsed.schedules):
            schedule = "nested" if name == "empty stages" else name
            clock = StageClock()
            if name == "empty stages":
                with _stage_functions(empty_stages()):
                    result = _measure(parsed, ranks, schedule)
            else:
                result = _measure(parsed, ranks, schedule)
                with _stage_functions({n: clock.wrap(n, f) for n, f in STAGE_FUNCTIONS.items()}):
                    _measure(parsed, ranks, schedule)
            lines.append(_line(parsed, ranks, name, result, clock))
            print(f"scheduler: {name} with {ranks} ranks: {lines[-1]['median_ms']} ms", file=sys.stderr)
    print_lines(parsed, lines)
    return 0


def _line(parsed: argparse.Namespace, ranks: int, name: str, result: _Result, clock: StageClock) -> dict[str, Any]:
    steps = (parsed.repeat + 10) * ranks
    shape = {k: getattr(parsed, k) for k in ("tables", "micro_batches", "batch", "bag", "dim", "rows", "clustering")}
    line = {
        "case": "scheduler",
        "shape": {**shape, "ranks": ranks, "stores": parsed.tables if parsed.separate_stores else 1},
        "impl": name,
        "dtype": "float32",
        "threads": parsed.threads,
        **spread(result.times),
        "cpu_ms": round(result.cpu_s * 1e3 / parsed.repeat / ranks, 4),
    }
    if clock.seconds:
        order = sorted(clock.seconds, key=lambda n: -clock.seconds[n])
        line["stage_ms"] = {n: round(clock.seconds[n] * 1e3 / steps, 4) for n in order}
    return {**line, **facts()}
