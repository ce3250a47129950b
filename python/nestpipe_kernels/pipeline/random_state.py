"""The states of every random number generator that a loader or a model may draw from, taken and put back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RandomState", "capture_random", "loader_generators", "restore_random"]


@dataclass
class RandomState:
    """States of the process's generators and of named ones, as their libraries give them: cheap to take."""

    torch: Tensor
    python: Any
    numpy: Any
    own: dict[str, Tensor]
    cuda: list[Tensor] | None = None

    def tree(self) -> dict[str, Any]:
        """For checkpoints: plain values and tensors, uint8 [bytes] for torch, int64 [n] for the others."""
        version, words, gauss = self.python
        found: dict[str, Any] = {
            "torch": self.torch,
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": _without_arrays(self.numpy),
            "own": self.own,
        }
        return found if self.cuda is None else {**found, "cuda": self.cuda}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> RandomState:
        """What `tree` gave; raises whatever a tree of another form leads to."""
        python = tree["python"]
        state = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        return RandomState(tree["torch"], state, _with_arrays(tree["numpy"]), dict(tree["own"]), tree.get("cuda"))


def capture_random(own: Mapping[str, torch.Generator]) -> RandomState:
    """States of torch's default generator, `random`, numpy's global one, CUDA's if in use, and those of `own`."""
    state = RandomState(
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False),
        {key: generator.get_state() for key, generator in own.items()},
    )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.cuda = list(torch.cuda.get_rng_state_all())
    return state


def restore_random(state: RandomState, own: Mapping[str, torch.Generator], *, defaults: bool = True) -> None:
    """Put states back: the process's generators (unless `defaults` is False) and those of `own` that `state` knows."""
    if defaults:
        torch.set_rng_state(state.torch)
        random.setstate(state.python)
        np.random.set_state(state.numpy)
        if state.cuda is not None and torch.cuda.is_available() and len(state.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state.cuda)
    for name, generator in own.items():
        if name in state.own:
            generator.set_state(state.own[name])


def _without_arrays(value: Any) -> Any:
    """numpy's state with arrays of unsigned integers as int64 tensors, which checkpoints can hold."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        words = value.view(np.int64) if value.dtype.itemsize == 8 else value.astype(np.int64)
        return {"dtype": str(value.dtype), "words": torch.from_numpy(words.copy())}
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"dtype", "words"}:
        words = value["words"].numpy()
        return words.view(value["dtype"]) if np.dtype(value["dtype"]).itemsize == 8 else words.astype(value["dtype"])
    return {key: _with_arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def loader_generators(loader: Any) -> dict[str, torch.Generator]:
    """The torch.Generator objects of a loader: its own, its sampler's and batch sampler's, and its data set's."""
    found: dict[str, torch.Generator] = {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = {
        "loader": loader,
        "loader.sampler": getattr(loader, "sampler", None),
        "loader.batch_sampler": batch_sampler,
        "loader.batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
        "loader.dataset": getattr(loader, "dataset", None),
    }
    for place, holder in places.items():
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found.values()):
            found[f"{place}.generator"] = generator
    return found
