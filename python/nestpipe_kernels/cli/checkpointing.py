"""`nestpipe train --checkpoint DIR`: continues from DIR if a checkpoint is there; saves there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nestpipe_kernels import checkpoint
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import MANIFEST_NAME
from nestpipe_kernels.checkpoint.tree import decode
from nestpipe_kernels.cli.options import TrainOptions
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline

__all__ = ["Checkpoints", "check_directory", "remove_empty", "saved_steps"]

_NAME = "nestpipe_train"
_FLAGS = ("data", "model", "dim", "optimizer", "lr", "dense_lr", "seed")
"""Options that must be those of the saved run; the others may change."""


class _Notes:
    """What the command adds to a checkpoint: its options, and the steps done."""

    def __init__(self, options: TrainOptions) -> None:
        self.steps = 0
        self._options = _wanted(options)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "options": self._options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Checkpoints:
    """The checkpoint directory of one run, on one rank. Collective where it saves or loads.

    Args:
        options: with `checkpoint` and `checkpoint_every`.
        rank: 0 reports.
    """

    def __init__(self, options: TrainOptions, rank: int) -> None:
        assert options.checkpoint is not None
        self._path = Path(options.checkpoint)
        self._every = options.checkpoint_every
        self._rank = rank
        self._notes = _Notes(options)
        self._there = saved_steps(options) is not None

    def resume(self, model: torch.nn.Module, pipeline: NestedPipeline, loader: Any) -> int:
        """Load what is there; the steps that were done."""
        if self._there:
            report = checkpoint.load(self._path, model=model, pipeline=pipeline, loader=loader, extra=self._extra)
            ranks = f"{report.saved_world_size} rank{'s' * (report.saved_world_size > 1)}"
            self._say(f"continues from step {self._notes.steps} ({self._path}, saved by {ranks})")
        return self._notes.steps

    def after(self, step: int, total: int, model: torch.nn.Module, pipeline: NestedPipeline, loader: Any) -> None:
        """Save if `step` (from 1) is due or the last."""
        if step != total and (self._every is None or step % self._every):
            return
        started = time.perf_counter()
        self._notes.steps = step
        checkpoint.save(self._path, model=model, pipeline=pipeline, loader=loader, extra=self._extra)
        self._say(f"saved step {step} to {self._path} in {time.perf_counter() - started:.2f} s")

    @property
    def _extra(self) -> dict[str, Any]:
        return {_NAME: self._notes}

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)


def check_directory(options: TrainOptions) -> list[Path]:
    """Make the directory, and see whether what is in it can be continued; before anything long begins.

    Returns:
        The directories that were made, the innermost first; see `remove_empty`.

    Raises:
        CheckpointError: another run's checkpoint, or a damaged one. OSError: a directory that cannot be used.
    """
    assert options.checkpoint is not None
    path = Path(options.checkpoint)
    made = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(one for one in (path, *path.parents) if one.exists())
        raise CheckpointError(f"--checkpoint {path}: {file} is a file; give the path of a directory") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "this user may not write to --checkpoint; choose another directory", str(path))
    saved_steps(options)
    return made


def remove_empty(directories: list[Path]) -> None:
    """Remove directories that `check_directory` made and nothing was saved in."""
    for directory in directories:
        try:
            directory.rmdir()
        except OSError:
            return


def saved_steps(options: TrainOptions) -> int | None:
    """Steps of the checkpoint in the directory, None if there is none.

    Raises:
        CheckpointError: it is damaged, of another command, or of other options; names both values.
    """
    assert options.checkpoint is not None
    path = Path(options.checkpoint)
    if not os.path.lexists(path / MANIFEST_NAME):
        return None
    extra = Manifest.load(path).ranks[0].get("extra")
    notes = decode(extra.get(_NAME), "extra", _no_tensor) if isinstance(extra, dict) else None
    if not isinstance(notes, dict) or not isinstance(notes.get("options"), dict) or type(notes.get("steps")) is not int:
        raise CheckpointError(
            f"--checkpoint {path} holds a checkpoint that `nestpipe train` did not make; choose another directory"
        )
    for name, value in _wanted(options).items():
        saved = notes["options"].get(name)
        if saved != value:
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(
                f"--checkpoint {path} was made with {flag} {_shown(saved)}, this run has {flag} {_shown(value)}; give "
                "the same, or another directory"
            )
    steps: int = notes["steps"]
    return steps


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"--checkpoint: {name} is a tensor among the command's notes; choose another directory")


def _wanted(options: TrainOptions) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in _FLAGS}
    kind, separator, path = options.data.partition(":")
    values["data"] = f"{kind}{separator}{os.path.basename(path)}"  # files may move; that they are others shows later
    return values


def _shown(value: Any) -> str:
    return "(default)" if value is None else str(value)
