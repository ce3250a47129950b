"""One schedule's training on one rank, with progress lines, and what it left behind."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.cli.checkpointing import Checkpoints
from nestpipe_kernels.cli.options import TrainOptions
from nestpipe_kernels.cli.snapshot import Snapshot, take_snapshot
from nestpipe_kernels.config import PipelineConfig, default_threads, process_environment
from nestpipe_kernels.data.sequences import SequenceBatch
from nestpipe_kernels.models import SEQUENCE_MODELS
from nestpipe_kernels.pipeline.micro_choice import TRIAL_STEPS
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.trace import Span
from nestpipe_kernels.trace.summary import summarize

__all__ = ["TrainingRun", "torch_threads", "train_once"]

PROGRESS_S = 5.0
TIMELINE_STEPS = 50


@dataclass
class TrainingRun:
    """What one rank saw of one schedule.

    Attributes:
        losses: float [steps], this rank's.
        summary: medians over the last steps, milliseconds (trace.summary).
        spans: the last steps' timeline.
        seconds: wall clock of all steps.
        samples: this rank's samples.
        snapshot: parameters after the last step, if asked for.
    """

    schedule: str
    losses: Tensor
    summary: dict[str, Any]
    spans: list[Span]
    seconds: float
    samples: int
    snapshot: Snapshot | None

    @property
    def steps(self) -> int:
        """Steps trained."""
        return self.losses.numel()

    def without_snapshot(self) -> TrainingRun:
        """The part that is sent to rank 0."""
        return dataclasses.replace(self, snapshot=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        losses = self.losses.tolist()
        return {**self.summary, "seconds": self.seconds, "samples": self.samples, "losses": losses}


class _Progress:
    """A plain line of rank 0 every few seconds, and for the last step."""

    def __init__(self, schedule: str, done: int, steps: int, speaks: bool) -> None:
        self._schedule = schedule
        self._total = steps
        self._speaks = speaks
        self._last_time = time.perf_counter()
        self._last_step = done

    def after(self, step: int, loss: Tensor) -> None:
        now = time.perf_counter()
        if not self._speaks or (now - self._last_time < PROGRESS_S and step < self._total):
            return
        milliseconds = (now - self._last_time) * 1e3 / max(step - self._last_step, 1)
        print(
            f"{self._schedule:<11} step {step:>5}/{self._total}   loss {float(loss):.4f}   {milliseconds:8.1f} ms/step "
            "since the last line",
            flush=True,
        )
        self._last_time, self._last_step = now, step


def torch_threads() -> int:
    """Threads of torch's operations: OMP_NUM_THREADS, else one core fewer than there are: the lanes need one."""
    given = process_environment().get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, default_threads() - 1)


def _with_wait(seconds: Callable[[], float]) -> Callable[[Any, Any], Any]:
    """The model's own losses, after a wait that uses no core."""

    def loss_fn(model: Any, batch: Any) -> Any:
        result = model(batch)
        time.sleep(seconds())
        return result

    return loss_fn


def _settled(spans: list[Span]) -> list[Span]:
    """Without the steps that tried numbers of micro-batches; all of them where there are no others."""
    return [span for span in spans if span.batch >= TRIAL_STEPS] or spans


def train_once(
    options: TrainOptions,
    schedule: str,
    model: torch.nn.Module,
    loader: Iterable[Any],
    steps: int,
    rank: int,
    *,
    snapshot: bool,
    checkpoints: Checkpoints | None = None,
) -> TrainingRun:
    """Train on the `steps` batches of `loader`; `snapshot` keeps all parameters. Raises as NestedPipeline does.

    With `checkpoints` `steps` counts those of earlier runs, and `loader` may have more batches.
    """
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    np.random.seed(options.seed % 2**32)
    torch.set_num_threads(torch_threads())
    dense = torch.optim.Adam(model.parameters(), lr=options.dense_lr)
    by_tokens = SequenceBatch.tokens if options.model in SEQUENCE_MODELS else "keys"
    config = PipelineConfig(
        schedule=schedule,
        num_micro_batches=options.micro_batches,
        row_transfer=options.row_transfer,
        early_send=options.early_send and schedule == "nested",
        edge_share=options.edge_share,
        balance=by_tokens if options.balance == "keys" else "samples",
        owner_pooling=options.owner_pooling,
        row_wire=options.row_wire,
        gradient_wire=options.gradient_wire,
        clustering=options.clustering,
        timeout_s=options.timeout,
        timeline_steps=TIMELINE_STEPS,
    )
    losses: list[Tensor] = []
    samples = 0
    loss_fn = None
    if options.emulate_accelerator is not None:
        whole_s = options.emulate_accelerator / 1e3
        loss_fn = _with_wait(lambda: whole_s / pipeline.num_micro_batches)
    with NestedPipeline(model, dense, loss_fn, config) as pipeline:
        done = 0 if checkpoints is None else checkpoints.resume(model, pipeline, loader)
        progress = _Progress(schedule, done, steps, speaks=rank == 0)
        started = time.perf_counter()
        for step in pipeline.run(loader):
            done += 1
            losses.append(step.loss)
            samples += 0 if step.output is None else len(step.output[1])
            progress.after(done, step.loss)
            if checkpoints is not None:
                checkpoints.after(done, steps, model, pipeline, loader)
                if done == steps:
                    break
        pipeline.drain()
        seconds = time.perf_counter() - started
        if options.micro_batches == "auto" and rank == 0:
            print(f"{schedule}: {pipeline.num_micro_batches} micro-batches chosen by measurement", flush=True)
        spans = pipeline.timeline.to_events()
        return TrainingRun(
            schedule,
            torch.stack(losses).cpu() if losses else torch.zeros(0),
            summarize(_settled(spans) if options.micro_batches == "auto" else spans),
            spans,
            seconds,
            samples,
            take_snapshot(model, dense) if snapshot else None,
        )
