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
    scenario = Scenario(world_size=size, batches=6, micro_batches=2, uneven=False, samples=6)
    model = scenario.model(communicator_for(None, 60.0), None)  # ranks may start seconds apart

    def loader() -> Iterator[Any]:
        for index in itertools.count():
            if case == "loader" and rank == 1 and index == BAD_BATCH:
                raise OSError("the disk is gone")
            batch = next(scenario.loader(rank, None))
            batch.label.fill_(index)
            yield batch

    def loss(model: Any, batch: Any) -> Any:
        if case == "model" and rank == 1 and bool((batch.label == BAD_BATCH).all()):
            raise ArithmeticError("the model broke")
        return model(batch)

    config = scenario_config(scenario, "nested", timeout_s)
    # Making a torch optimizer loads torch's compiler: seconds in which nothing is tested.
    with NestedPipeline(model, None, loss, config) as pipeline:
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
