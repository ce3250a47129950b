"""Recipes: how to make the features of one call from a batch. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestpipe_kernels.capture.tree import Path

__all__ = ["Affine", "AffineTensor", "BatchItem", "Built", "Container", "Features", "FromBags", "RepeatedTensor"]
__all__ += ["Scalar", "Traced"]


class Affine(NamedTuple):
    """scale * B + offset."""

    scale: int
    offset: int

    def at(self, size: int) -> int:
        return self.scale * size + self.offset


@dataclass(frozen=True)
class AffineTensor:
    """An integer tensor that is made from the batch size: scale * B + offset."""

    scale: Tensor
    offset: Tensor
    dtype: torch.dtype

    def at(self, size: int) -> Tensor:
        return (self.scale * size + self.offset).to(self.dtype)


@dataclass(frozen=True)
class RepeatedTensor:
    """A tensor that has the same row for every sample, however it was made."""

    row: Tensor

    def at(self, size: int) -> Tensor:
        return self.row.expand(size, *self.row.shape).clone()


# ------------------------------------------------------------------------------------------- recipes of features


@dataclass(frozen=True)
class BatchItem:
    """An object of the batch itself."""

    path: Path
    kind: str


@dataclass(frozen=True)
class FromBags:
    """Some keys of a KeyedJaggedTensor of the batch: as one of the same class, or a component of one key's bags."""

    path: Path
    keys: tuple[str, ...]
    component: str
    """"keyed", "jagged", "values", "lengths" or "weights"."""
    cls: type | None = None
    """The class of a jagged result."""


@dataclass(frozen=True)
class Traced:
    """A tensor by value number. `copied`: the model writes to its memory after the call."""

    number: int
    copied: bool = False


@dataclass(frozen=True)
class Scalar:
    """A Python value; Affine where it scales with the batch."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A container with its children's recipes. `template`: the container with None for children."""

    template: Any
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Built:
    """A jagged (keys None) or keyed jagged object that the model builds.

    Per-sample weights that cannot be made from a batch (they are learned, say) are ones in the plan: only keys and bags
    decide what is routed, and the forward takes the weights that the model passes.
    """

    cls: type
    keys: tuple[str, ...] | None
    values: Traced
    weights: Traced | None
    lengths: Traced
    weighted: bool


Features = BatchItem | FromBags | Traced | Scalar | Container | Built
