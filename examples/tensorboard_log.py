"""Trains a DLRM and writes the loss and the counters of every step for TensorBoard, one run per rank:

python examples/tensorboard_log.py --log-dir runs
torchrun --nproc-per-node 2 examples/tensorboard_log.py --log-dir runs
tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nestpipe_kernels as nk
from nestpipe_kernels.data import batches, open_data
from nestpipe_kernels.launch import init_rank
from nestpipe_kernels.models import build


class CounterLog:
    """A step callback that hands every counter to a SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def __call__(self, counters: nk.StepCounters) -> None:
        for name, value in counters.scalars().items():
            self.writer.add_scalar(f"nestpipe/{name}", value, counters.step)


def open_writer(directory: Path) -> Any:
    """A SummaryWriter; ends the program with what to install if there is none."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        sys.exit(f"this example writes TensorBoard logs, which needs a package: pip install tensorboard ({error})")
    return SummaryWriter(str(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="synthetic, criteo:PATH or movielens:PATH")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a rank in a step")
    parser.add_argument("--log-dir", type=Path, default=Path("runs"))
    options = parser.parse_args()

    rank, world_size = init_rank()
    writer = open_writer(options.log_dir / f"rank{rank}")
    data = open_data(options.data)
    loader = batches(data, options.batch_size, rank, world_size, epochs=None, shuffle_seed=0)
    model = build("dlrm", data, nk.optim.RowWiseAdagrad(lr=0.05), seed=0)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    with nk.NestedPipeline(model, dense) as pipeline:
        pipeline.add_step_callback(CounterLog(writer))
        for step in pipeline.run(itertools.islice(loader, options.steps)):
            writer.add_scalar("loss", float(step.loss), step.index)
    writer.close()
    print(f"rank {rank}: {options.steps} steps; look at them with tensorboard --logdir {options.log_dir}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
