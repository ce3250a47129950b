"""Multi-layer perceptrons whose initial parameters follow from a seed, alike on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["seeded_mlp"]


def seeded_mlp(sizes: Sequence[int], generator: torch.Generator, *, last_activation: bool) -> nn.Sequential:
    """Linear layers sizes[0] -> sizes[1] -> ..., with ReLU between (and after the last with `last_activation`).

    Initial values as in the published DLRM code: weights normal with variance 2 / (inputs + outputs), biases normal
    with variance 1 / outputs, drawn from `generator` alone; the global generator is left as it is.

    Raises:
        ValueError: a size below 1.
    """
    if any(size < 1 for size in sizes):
        raise ValueError(f"seeded_mlp: layer sizes must be >= 1, got {list(sizes)}")
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")  # draws no random numbers
        with torch.no_grad():
            layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)), generator=generator)
            layer.bias.normal_(0.0, math.sqrt(1.0 / outputs), generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*(layers if last_activation else layers[:-1]))
