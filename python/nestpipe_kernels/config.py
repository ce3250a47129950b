"""Settings of a pipeline, numbers of a command line, and the only place that reads the environment."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "KERNELS",
    "PipelineConfig",
    "default_kernels",
    "default_threads",
    "environment",
    "launched_ranks",
    "non_negative",
    "positive",
    "process_environment",
    "share",
]

SCHEDULE_NAMES = ("sequential", "dbp", "fwp", "nested", "async")
WIRE_FORMATS = ("fp32", "bf16", "fp16", "int8")
MOST_MICRO_BATCHES = 4095
KERNELS = ("native", "triton", "reference")
"""Implementations of operations on rows."""


def environment(name: str, default: str) -> str:
    """The value of NESTPIPE_<name>, or `default`."""
    return os.environ.get(f"NESTPIPE_{name}", default)


def process_environment() -> dict[str, str]:
    """A copy of all variables, for child processes and for what launchers set (RANK, MASTER_ADDR, ...)."""
    return dict(os.environ)


def launched_ranks() -> int:
    """How many processes a launcher such as torchrun says it started (WORLD_SIZE); 1 without one."""
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def default_threads() -> int:
    """Threads of native bulk calls: NESTPIPE_THREADS, else the cores this process may use."""
    value = environment("THREADS", "")
    if value:
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"NESTPIPE_THREADS must be a positive integer, got {value!r}")
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_kernels() -> str | None:
    """Which of `KERNELS` operations on an accelerator have to use: NESTPIPE_KERNELS; None: the best there is."""
    value = environment("KERNELS", "")
    if value and value not in KERNELS:
        raise ValueError(f"NESTPIPE_KERNELS must be one of {', '.join(KERNELS)}, or empty, got {value!r}")
    return value or None


@dataclass
class PipelineConfig:
    """How a NestedPipeline runs; every schedule gives the same result at the same `num_micro_batches`.

    Attributes:
        schedule: "sequential", "dbp", "fwp", "nested", or "async" (rows one step stale: a baseline only).
        num_micro_batches: parts of a batch that form the frozen window, >= 1, the same on all ranks. "auto": the first
            16 steps run with 2 and then 8 parts, and what they took decides for all ranks, between 1 and 32; the
            pipeline's `num_micro_batches` tells it, and checkpoints hold it.
        row_transfer: "once" sends a row before its first micro-batch and its gradient after its last;
            "per_micro_batch" sends both for every micro-batch that uses the row (the paper's way). Same result.
        early_send: rows that are final leave before their batch's window, and rows are updated as soon as their last
            gradient is here, those that the next batch waits for first. Same result; needs "nested" and "once", and a
            model that returns weights always or never.
        owner_pooling: the owner of rows adds those of a bag up and sends one sum, and gets one gradient back: for the
            features named, for all (True), or ("auto") for those of which that is fewer bytes in a batch. Another
            order of additions in forward than without, the same result in every schedule. Features must be pooled by
            sum or mean and have no per-sample weights; needs row_transfer="once" and no early_send.
        row_wire, gradient_wire: as what rows and their gradients travel between ranks: "fp32", or rounded once by the
            sender to "bf16", "fp16" or "int8" (a step per row). Fewer bytes, another result, the same in every
            schedule; a rank's own rows are rounded too.
        clustering: "key" reorders samples so that those sharing keys meet; "none" keeps the order.
        edge_share: the first and the last micro-batch of three or more get this share of the samples of an even one,
            > 0 and <= 1, and the others as many more. Before the first and after the last, compute waits for the
            network: smaller ones shorten that. Another rounding than even ones, the same in every schedule.
        balance: what micro-batches have about as many of: "samples", "keys" (of a sample in all lookups), or a function
            `batch -> integers [B]`, the tokens of each sample (the length of its sequence, say). Samples keep their
            order, parts are cut elsewhere. Another rounding, the same in every schedule.
        loss_weighting: a micro-batch's loss weighs n_i / n ("mean": losses averaged over samples) or 1 ("sum"); a
            weight that the model returns replaces it.
        nan_policy: "raise" (nothing changes on any rank) or "skip_row" (only that row is left out, and reported).
        timeout_s: limit of every wait for another rank, seconds.
        sparse_inputs: `batch -> {module: [input per call]}`, for inputs that capture cannot follow.
        split_batch: `(batch, list of int64 index tensors) -> list of batches`, for batches that are not made of
            tensors of dim 0 = batch size, KeyedJaggedTensors and containers of them.
        fetch: `item -> batch`: turns what the loader gives (file names, sample numbers, compressed bytes) into a
            batch, on a thread of its own, up to two batches before its turn. Called in the order of the items, one at
            a time; not again for a batch that waited while another iterator ran. It must not draw random numbers from
            generators that the model or the loader draws from, and gives tensors that nobody else writes; items must
            not change once they are given. None: the loader gives batches, and the thread that calls `progress()`
            waits for them.
        timeline_steps: how many of the last steps the timeline keeps.
        threads: threads of native calls, None for NESTPIPE_THREADS or the number of cores.
        lower_caller_priority: on Linux, the thread that calls `progress()` gets a lower priority (niceness + 5) than
            the lanes and the network's threads, so that a model which keeps all cores busy does not keep exchanges
            waiting. It stays so until `close()`, and after it where the system does not permit a thread to go back.
        device: where the dense model and the rows of a batch are: "cpu", "cuda", "npu", or one of several as in
            "cuda:1" (docs/accelerators.md). None: where the dense parameters are.
    """

    schedule: str = "nested"
    num_micro_batches: int | Literal["auto"] = 4
    row_transfer: str = "once"
    early_send: bool = False
    owner_pooling: bool | Literal["auto"] | Sequence[str] = False
    row_wire: str = "fp32"
    gradient_wire: str = "fp32"
    clustering: str = "key"
    edge_share: float = 1.0
    balance: str | Callable[[Any], Any] = "samples"
    loss_weighting: str = "mean"
    nan_policy: str = "raise"
    timeout_s: float = 300.0
    sparse_inputs: Callable[[Any], dict[Any, list[Any]]] | None = None
    split_batch: Callable[[Any, list[Any]], list[Any]] | None = None
    fetch: Callable[[Any], Any] | None = None
    timeline_steps: int = 50
    threads: int | None = None
    lower_caller_priority: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        _one_of("schedule", self.schedule, SCHEDULE_NAMES)
        _one_of("row_transfer", self.row_transfer, ("once", "per_micro_batch"))
        if type(self.early_send) is not bool:
            raise ValueError(f"early_send must be True or False, got {self.early_send!r}")
        if self.early_send and (self.schedule, self.row_transfer) != ("nested", "once"):
            raise ValueError(
                f"early_send needs schedule='nested' and row_transfer='once', got {self.schedule!r} and "
                f"{self.row_transfer!r}"
            )
        self._check_owner_pooling()
        _one_of("row_wire", self.row_wire, WIRE_FORMATS)
        _one_of("gradient_wire", self.gradient_wire, WIRE_FORMATS)
        _one_of("clustering", self.clustering, ("key", "none"))
        if (
            isinstance(self.edge_share, bool)
            or not isinstance(self.edge_share, int | float)
            or not 0 < self.edge_share <= 1
        ):
            raise ValueError(f"edge_share must be a number > 0 and <= 1, got {self.edge_share!r}")
        if not callable(self.balance) and self.balance not in ("samples", "keys"):
            raise ValueError(f"balance must be 'samples', 'keys' or a function of a batch, got {self.balance!r}")
        _one_of("loss_weighting", self.loss_weighting, ("mean", "sum"))
        _one_of("nan_policy", self.nan_policy, ("raise", "skip_row"))
        self._check_micro_batches()
        if type(self.timeline_steps) is not int or self.timeline_steps < 1:
            raise ValueError(f"timeline_steps must be an integer >= 1, got {self.timeline_steps!r}")
        if type(self.lower_caller_priority) is not bool:
            raise ValueError(f"lower_caller_priority must be True or False, got {self.lower_caller_priority!r}")
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0 seconds, got {self.timeout_s!r}")
        if self.fetch is not None and not callable(self.fetch):
            raise TypeError(f"fetch must be callable (item -> batch) or None, got {type(self.fetch).__name__}")
        if self.device is not None and not isinstance(self.device, str):
            raise TypeError(f"device must be a string ('cpu', 'cuda', 'npu', 'cuda:1') or None, got {self.device!r}")
        if self.device is not None and not re.fullmatch(r"cpu|(cuda|npu)(:\d+)?", self.device):
            raise ValueError(
                f"unknown device {self.device!r}; expected 'cpu', 'cuda', 'npu', or one of several as in 'cuda:1'"
            )
        for name in ("sparse_inputs", "split_batch"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be callable or None, got {type(value).__name__}")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ValueError(f"threads must be an integer >= 1 or None, got {self.threads!r}")

    def _check_owner_pooling(self) -> None:
        wanted = self.owner_pooling
        if isinstance(wanted, str) and wanted != "auto":
            raise ValueError(f"owner_pooling must be True, False, 'auto' or a list of features, got {wanted!r}")
        if not isinstance(wanted, bool | str) and not (
            isinstance(wanted, Sequence) and all(isinstance(name, str) for name in wanted)
        ):
            raise ValueError(f"owner_pooling must be True, False, 'auto' or a list of features, got {wanted!r}")
        if wanted and (self.early_send or self.row_transfer != "once"):
            raise ValueError(
                "owner_pooling needs row_transfer='once' and early_send=False, got "
                f"{self.row_transfer!r} and {self.early_send}"
            )

    def _check_micro_batches(self) -> None:
        number = self.num_micro_batches
        if number == "auto":
            return
        if type(number) is not int or number < 1:
            raise ValueError(f"num_micro_batches must be an integer >= 1 or 'auto', got {number!r}")
        if self.row_transfer == "per_micro_batch" and number > 63:
            raise ValueError(f"num_micro_batches must be <= 63 with row_transfer='per_micro_batch', got {number}")
        if number > MOST_MICRO_BATCHES:
            raise ValueError(f"num_micro_batches must be <= {MOST_MICRO_BATCHES}, got {number}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")


def positive(text: str) -> int:
    """argparse type: an integer >= 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def non_negative(text: str) -> float:
    """argparse type: a finite number >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be a finite number >= 0, got {text!r}")
    return value


def share(text: str) -> float:
    """argparse type: a number > 0 and <= 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number > 0 and <= 1, got {text!r}")
    return value
