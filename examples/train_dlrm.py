"""Trains a DLRM through the nested pipeline, alone or under torchrun (one process per rank):

python examples/train_dlrm.py --data movielens:ml-100k.inter
torchrun --nproc-per-node 2 examples/train_dlrm.py --steps 50
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist

import nestpipe_kernels as nk
from nestpipe_kernels.data import batches, open_data
from nestpipe_kernels.launch import init_rank
from nestpipe_kernels.models import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="synthetic, criteo:PATH or movielens:PATH")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a rank in a step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--timeline", help="where to write the last steps: .html, .json or .png")
    options = parser.parse_args()

    rank, world_size = init_rank()
    data = open_data(options.data)
    loader = batches(data, options.batch_size, rank, world_size, epochs=None, shuffle_seed=0)
    model = build("dlrm", data, nk.optim.RowWiseAdagrad(lr=0.05), seed=0)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    config = nk.PipelineConfig(num_micro_batches=options.micro_batches)

    with nk.NestedPipeline(model, dense, config=config) as pipeline:
        pipeline.add_write_back_hook(lambda step, table, keys: None)  # a delta stream would take the keys from here
        for step in pipeline.run(itertools.islice(loader, options.steps)):
            if rank == 0 and step.index % 10 == 0:
                logits, labels = step.output
                right = ((logits > 0) == (labels > 0.5)).float().mean()
                print(f"step {step.index:>4}   loss {float(step.loss):.4f}   accuracy {float(right):.3f}")
        if rank == 0 and options.timeline:
            pipeline.timeline.save(options.timeline)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
