"""Checks of saved generator states, before any generator is touched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..pipeline.random_state import RandomState

__all__ = ["check_random"]


def check_random(state: Any, path: str) -> None:
    """Try a saved state on generators of no use to anybody.

    Raises:
        CheckpointError: `state` is none that `capture_random` gives; names its path.
    """
    try:
        found = RandomState.from_tree(state)
        torch.Generator().set_state(found.torch)
        random.Random().setstate(found.python)
        if found.numpy["bit_generator"] == "MT19937":
            np.random.RandomState().set_state(found.numpy)
        for own in found.own.values():
            if not isinstance(own, torch.Tensor):
                raise TypeError(f"expected a tensor, got {type(own).__name__}")
    except Exception as error:
        raise CheckpointError(
            f"checkpoint: {path} is no state of random generators of this version of torch, Python and numpy "
            f"({type(error).__name__}: {str(error)[:200]}); load without the data's position: start_epoch=True"
        ) from None
