"""What rank processes of tests are forked with: torch, its compiler and the pipeline, which take seconds to import."""

import torch
import torch.distributed

import nestpipe_kernels.pipeline.train_pipeline
import nestpipe_kernels.testing.threads  # noqa: F401

torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # loads torch's compiler
