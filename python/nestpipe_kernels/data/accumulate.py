"""Gradient accumulation: several batches of a loader form one window of the pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from nestpipe_kernels.capture.concat import concat

__all__ = ["Accumulated", "accumulate"]


def accumulate(loader: Iterable[Any], batches: int) -> Accumulated:
    """A loader whose batches are `batches` of `loader` joined: one update for all of their samples.

    In a pipeline the joined batch is split into micro-batches as any other, so `num_micro_batches=batches` needs the
    memory of one of the loader's batches at a time (on average), and the loss is the mean over all samples of the
    window: what a loop does that calls `(loss / batches).backward()` for batches of the same size and then steps once.
    At the end of an epoch the last window has what is left.

    Args:
        loader: anything that can be iterated; one with a state keeps it, and checkpoints stand between windows.
        batches: how many make up a window, at least 1.

    Raises:
        TypeError: `loader` cannot be iterated. ValueError: `batches` is less than 1.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"accumulate: loader must be iterable, got {type(loader).__name__}")
    if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
        raise ValueError(f"accumulate: batches must be an integer >= 1, got {batches!r}")
    return Accumulated(loader, batches)


class Accumulated:
    """What `accumulate` returns. Other attributes, a state among them, are the loader's own."""

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        """Windows of one pass over the loader.

        Raises:
            ValueError: batches of a window that cannot be joined; names the part of them.
        """
        source = iter(self._loader)
        while window := list(itertools.islice(source, self._batches)):
            yield concat(window)

    def __len__(self) -> int:
        return -(-len(self._loader) // self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
