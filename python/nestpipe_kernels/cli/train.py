"""`nestpipe train`: checks what was asked, starts ranks or is one, compares and reports."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe_kernels import optim
from nestpipe_kernels.cli.checkpointing import Checkpoints, check_directory, remove_empty, saved_steps
from nestpipe_kernels.cli.options import TrainOptions
from nestpipe_kernels.cli.report import explain, table
from nestpipe_kernels.cli.snapshot import first_difference
from nestpipe_kernels.cli.training import TrainingRun, train_once
from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.config import launched_ranks, process_environment
from nestpipe_kernels.data import Batch, Dataset, SyntheticConfig, TableSchema, batches, open_data
from nestpipe_kernels.device import backend_for
from nestpipe_kernels.errors import NestPipeError
from nestpipe_kernels.launch import init_rank, run_ranks
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.models import SEQUENCE_MODELS, build
from nestpipe_kernels.trace import save_merged
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["ResultsDifferError", "make_optimizer", "train"]

LEAST_STEPS = 20
DRAWN_AHEAD = 512
"""Most steps whose batches are kept in memory for a comparison."""


class ResultsDifferError(NestPipeError, RuntimeError):
    """Two schedules that must agree do not; names the first difference."""


def train(options: TrainOptions, arguments: Sequence[str]) -> int:
    """Start `options.nproc` ranks of this command with `arguments`, or, as a rank or a single process, train.

    Returns:
        The exit code.

    Raises:
        ValueError, OSError: options, data or files that cannot be used; nothing was started.
        NestPipeError: training failed, or ResultsDifferError.
    """
    launched = bool(process_environment().get("RANK"))
    SparseGroups(options.sparse_groups).check_world(launched_ranks() if launched else options.nproc)
    made: list[Path] = []
    if not launched:
        _check_outputs(options)
        if options.checkpoint is not None:
            made = check_directory(options)
    try:
        return _start(options, arguments, launched)
    finally:
        remove_empty(made)


def _checked_device(name: str) -> torch.device:
    """Raises ValueError for one that cannot be used."""
    try:
        return backend_for(name).device
    except RuntimeError as error:
        raise ValueError(f"--device: {error}") from error


def _this_device(options: TrainOptions) -> torch.device:
    """The device that this rank trains on, made the current one. Raises ValueError."""
    name, number = options.device, process_environment().get("LOCAL_RANK", "")
    device = _checked_device(f"{name}:{number}" if number and name in ("cuda", "npu") else name)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def _start(options: TrainOptions, arguments: Sequence[str], launched: bool) -> int:
    if options.nproc > 1 and not launched:
        _checked_device(options.device)
        dataset = _open(options)  # bad data is one error here, not one of each rank
        _check_size(dataset, options.nproc)
        _check_features(options, dataset)
        command = [sys.executable, "-m", "nestpipe_kernels", *arguments, "--nproc", "1"]
        return run_ranks(command, options.nproc, timeout_s=options.timeout)
    rank, world_size = init_rank(options.timeout)
    _train_as(rank, world_size, options)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def make_optimizer(options: TrainOptions) -> SparseOptimizer:
    """The tables' optimizer that was asked for, with its own defaults for what was left out."""
    classes: dict[str, Any] = {
        "sgd": optim.SGD,
        "adagrad": optim.Adagrad,
        "row_wise_adagrad": optim.RowWiseAdagrad,
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "row_wise_adam": optim.RowWiseAdam,
        "ftrl": optim.FTRL,
        "lamb": optim.LAMB,
    }
    given: dict[str, float] = {}
    if options.lr is not None:
        given["lr"] = options.lr
    if options.weight_decay is not None:
        given["weight_decay"] = options.weight_decay
    if options.momentum:
        given["momentum"] = options.momentum
    made: SparseOptimizer = classes[options.optimizer](**given)
    return made


def _check_outputs(options: TrainOptions) -> None:
    for flag, path in (("--timeline", options.timeline), ("--json", options.json)):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {Path(path).resolve().parent}; make it first")
    as_png = options.timeline is not None and options.timeline.lower().endswith(".png")
    if as_png and importlib.util.find_spec("matplotlib") is None:  # an error now, not after training
        raise ValueError(
            "--timeline: .png needs matplotlib; install it (pip install 'nestpipe_kernels[plot]') or save as .html"
        )
    build(options.model, _NoData(options.model in SEQUENCE_MODELS), make_optimizer(options), embedding_dim=options.dim)


class _NoData:
    """Lets `build` check the model's name and sizes before any data is read."""

    name = "none"
    num_dense = 0
    default_batch_size = 1
    feature_names = ("a", "b")

    def __init__(self, sequences: bool) -> None:
        self.tables = (TableSchema("a", ("a",)), *(() if sequences else (TableSchema("b", ("b",)),)))

    def __len__(self) -> int:
        return 0

    def batch(self, indices: Tensor) -> Batch:
        raise NotImplementedError


def _open(options: TrainOptions) -> Dataset:
    sequences = options.model in SEQUENCE_MODELS
    return open_data(options.data, synthetic=SyntheticConfig(seed=options.seed), sequences=sequences)


def _check_size(dataset: Dataset, world_size: int) -> None:
    if len(dataset) < world_size:
        raise ValueError(f"--data: {dataset.name} has {len(dataset)} samples, too few for {world_size} ranks")


def _check_features(options: TrainOptions, dataset: Dataset) -> None:
    if isinstance(options.owner_pooling, tuple):
        there = [feature for table in dataset.tables for feature in table.feature_names]
        unknown = [name for name in options.owner_pooling if name not in there]
        if unknown:
            raise ValueError(
                f"--owner-pooling: no feature {unknown[0]!r} in {dataset.name}; there are {', '.join(there)}"
            )


def _num_steps(options: TrainOptions, dataset: Dataset, world_size: int) -> int:
    if options.steps is not None:
        return options.steps
    return max(batches(dataset, options.batch_size, 0, world_size).batches_per_epoch, LEAST_STEPS)


def _train_as(rank: int, world_size: int, options: TrainOptions) -> None:
    device = _this_device(options)
    dataset = _open(options)
    _check_size(dataset, world_size)
    _check_features(options, dataset)
    steps = _num_steps(options, dataset, world_size)
    stream = batches(dataset, options.batch_size, rank, world_size, epochs=None)
    if rank == 0:
        print(
            f"{options.model} on {dataset.name}: {len(dataset)} samples, {world_size} x {stream.batch_size} a step, "
            f"{options.micro_batches} micro-batches, {steps} steps, {options.optimizer}, D {options.dim}",
            flush=True,
        )
    checkpoints: Checkpoints | None = None
    if options.checkpoint is not None:
        done = saved_steps(options)
        if done is not None and done >= steps:
            if rank == 0:
                print(f"{options.checkpoint} is at step {done} already: nothing to do (--steps counts all steps)")
            return
        checkpoints = Checkpoints(options, rank)
    drawn: list[Batch] | None = None
    if options.compare and steps <= DRAWN_AHEAD:
        drawn = list(itertools.islice(stream, steps))  # time that the loader takes is in neither schedule's steps
    runs = []
    for schedule in options.schedules:
        model = build(
            options.model,
            dataset,
            make_optimizer(options),
            seed=options.seed,
            embedding_dim=options.dim,
            sparse_groups=options.sparse_groups,
        ).to(device)
        source: Iterable[Batch] = itertools.islice(stream, steps) if drawn is None else drawn
        if checkpoints is not None:
            source = stream
        runs.append(
            train_once(options, schedule, model, source, steps, rank, snapshot=options.compare, checkpoints=checkpoints)
        )
        del model
    difference = ""
    if options.compare:
        difference = first_difference(runs[0], runs[1])
    everyone = _gather({"difference": difference, "runs": [run.without_snapshot() for run in runs]}, rank, world_size)
    if rank == 0:
        _report(options, everyone)


def _gather(mine: Any, rank: int, world_size: int) -> list[Any]:
    """Every rank's object on rank 0, in rank order; elsewhere an empty list."""
    if world_size == 1:
        return [mine]
    found: list[Any] = [None] * world_size
    dist.gather_object(mine, found if rank == 0 else None)
    return found if rank == 0 else []


def _report(options: TrainOptions, everyone: list[dict[str, Any]]) -> None:
    runs: list[list[TrainingRun]] = [list(per_rank) for per_rank in zip(*(one["runs"] for one in everyone))]
    differing = [(rank, one["difference"]) for rank, one in enumerate(everyone) if one["difference"]]
    print()
    for line in table(options, runs):
        print(line)
    files = _save_timelines(options, runs)
    if options.json is not None:
        _write_json(options, runs, differing, files)
    for line in explain(options, runs):
        print(line)
    for schedule, path in files.items():
        print(f"timeline of {schedule}: {path}")
    if not options.compare:
        return
    names = f"{options.schedule} against sequential"
    if not differing:
        count = runs[0][0].steps
        print(
            f"result: identical ({names}: losses of {count} steps, rows, optimizer states, dense parameters, "
            f"bit for bit on {len(everyone)} rank{'s' * (len(everyone) > 1)})"
        )
        return
    rank, difference = differing[0]
    if options.schedule == "async":
        print(f"result: differs, as stale rows do ({names}: rank {rank}: {difference})")
        return
    print(f"result: DIFFERENT ({names})", flush=True)
    raise ResultsDifferError(f"{names}: rank {rank}: {difference}")


def _save_timelines(options: TrainOptions, runs: list[list[TrainingRun]]) -> dict[str, str]:
    """The chosen schedule's file as asked for; `sequential`'s beside it."""
    files: dict[str, str] = {}
    if options.timeline is None:
        return files
    asked = Path(options.timeline)
    for per_rank in runs:
        schedule = per_rank[0].schedule
        path = asked if schedule == options.schedule else asked.with_name(f"{asked.stem}.{schedule}{asked.suffix}")
        save_merged(path, [(rank, run.spans) for rank, run in enumerate(per_rank)])
        files[schedule] = str(path)
    return files


def _write_json(
    options: TrainOptions,
    runs: list[list[TrainingRun]],
    differing: list[tuple[int, str]],
    files: dict[str, str],
) -> None:
    assert options.json is not None
    content = {
        **facts(),
        "torch_threads": torch.get_num_threads(),
        "options": vars(options),
        "schedules": {per_rank[0].schedule: [run.as_json() for run in per_rank] for per_rank in runs},
        "identical": not differing if options.compare else None,
        "first_difference": f"rank {differing[0][0]}: {differing[0][1]}" if differing else None,
        "timelines": files,
    }
    Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
