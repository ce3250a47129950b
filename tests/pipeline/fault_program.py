"""A rank of a run that goes wrong: `fault_program.py CASE FOLDER TIMEOUT_S`, started by launch.run_ranks."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BAD_BATCH = 3


def main() -> None:
    case, folder, timeout_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    try:
        train(case, folder, timeout_s)
    except BaseException as error:
        # What a rank says when it ends by itself; one that has to be killed leaves nothing.
        seen, causes = error, []
        while seen is not None:
            causes.append(f"{type(seen).__name__}: {seen}")
            seen = seen.__cause__ or seen.__context__
        (folder / f"end{rank}").write_text("\n".join([str(time.time()), *causes]))
        raise


def train(case: str, folder: Path, timeout_s: float) -> None:
    import torch

    from nestpipe_kernels.comm import communicator_for
    from nestpipe_kernels.launch import init_rank
    from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
    from nestpipe_kernels.testing.scenario import Scenario
    from nestpipe_kernels.testing.threads import scenario_config

    torch.set_num_threads(1)
    rank, size = init_rank(timeout_s=60.0)
    schedule = "sequential" if case.endswith("sequential") else "nested"
    scenario = Scenario(world_size=size, batches=6, micro_batches=2, uneven=False, samples=6)
    model = scenario.model(communicator_for(None, timeout_s), None)

    def loader() -> Iterator[Any]:
        for index in itertools.count():
            if case.startswith("loader") and rank == 1 and index == BAD_BATCH:
                raise OSError("the disk is gone")
            batch = next(scenario.loader(rank, None))
            batch.label.fill_(index)
            yield batch

    calls = itertools.count()

    def loss(model: Any, batch: Any) -> Any:
        if rank == 1 and bool((batch.label == BAD_BATCH).all()):
            micro = next(calls)
            if case.startswith("model"):
                raise ArithmeticError("the model broke")
            if case.startswith("micro") and micro == 1:
                raise ArithmeticError("the last micro-batch broke")
        return model(batch)

    config = scenario_config(scenario, schedule, timeout_s)
    with NestedPipeline(model, scenario.dense_optimizer(model), loss, config) as pipeline:
        for step in pipeline.run(loader()):
            misfortune(case, rank, step.index, folder)


def misfortune(case: str, rank: int, index: int, folder: Path) -> None:
    """Between two steps, with work in flight on the lanes."""
    if index != BAD_BATCH:
        return
    (folder / f"ready{rank}").write_text(str(time.time()))
    if case == f"kill{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


main()
