"""Arguments of `nestpipe train`, checked and as one object. Imports no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nestpipe_kernels.config import SCHEDULE_NAMES, WIRE_FORMATS, non_negative, positive, process_environment, share

__all__ = ["OPTIMIZERS", "TrainOptions", "add_train"]

OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam", "adamw", "row_wise_adam", "ftrl", "lamb")
TIMELINE_SUFFIXES = (".html", ".json", ".png")

_EPILOG = """examples:
  nestpipe train --nproc 2 --compare --timeline step.html
  nestpipe train --data movielens:ml-100k.inter --nproc 2 --compare
  nestpipe train --steps 5000 --checkpoint run1 --checkpoint-every 500   (again after an interruption: goes on)
  nestpipe train --data criteo:train.txt --schedule nested --micro-batches 8 --steps 500
Under torchrun leave --nproc out: every process is then one rank."""


@dataclass(frozen=True)
class TrainOptions:
    """What `nestpipe train` was asked to do; see its --help."""

    data: str
    model: str
    nproc: int
    schedule: str
    micro_batches: int | Literal["auto"]
    row_transfer: str
    clustering: str
    steps: int | None
    batch_size: int | None
    dim: int
    optimizer: str
    lr: float | None
    momentum: float
    weight_decay: float | None
    dense_lr: float
    seed: int
    timeout: float
    timeline: str | None
    compare: bool
    emulate_accelerator: float | None
    json: str | None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    row_wire: str = "fp32"
    gradient_wire: str = "fp32"
    early_send: bool = False
    edge_share: float = 1.0
    balance: str = "samples"
    owner_pooling: bool | Literal["auto"] | tuple[str, ...] = False
    sparse_groups: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.compare and self.checkpoint is not None:
            raise ValueError("--compare trains twice from the start and saves nothing; leave --checkpoint out")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ValueError("--checkpoint-every needs --checkpoint DIR")
        if self.compare and self.schedule == "sequential":
            raise ValueError("--compare runs `sequential` beside --schedule; choose dbp, fwp, nested or async")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"--momentum goes with --optimizer sgd, got {self.optimizer}")
        if self.nproc > 1 and process_environment().get("RANK"):
            raise ValueError("--nproc starts ranks itself; leave it out where torchrun has started them")
        if self.timeline is not None and not self.timeline.lower().endswith(TIMELINE_SUFFIXES):
            raise ValueError(f"--timeline must end in {', '.join(TIMELINE_SUFFIXES)}, got {self.timeline!r}")
        if self.early_send and (self.schedule, self.row_transfer) != ("nested", "once"):
            raise ValueError("--early-send needs --schedule nested and --row-transfer once")
        if self.owner_pooling and (self.early_send or self.row_transfer != "once" or self.sparse_groups > 1):
            raise ValueError(
                "--owner-pooling needs --row-transfer once, and goes with neither --early-send nor --sparse-groups"
            )
        if self.early_send and self.sparse_groups > 1:
            raise ValueError("--early-send does not go with --sparse-groups")
        if self.compare and self.micro_batches == "auto":
            raise ValueError("--compare needs one number of micro-batches for both schedules, not auto")
        if self.row_transfer == "per_micro_batch" and self.micro_batches != "auto" and self.micro_batches > 63:
            raise ValueError(f"--micro-batches must be <= 63 with per_micro_batch, got {self.micro_batches}")

    @property
    def schedules(self) -> tuple[str, ...]:
        """What to run, in order."""
        return ("sequential", self.schedule) if self.compare else (self.schedule,)


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, got {text!r}")
    return value


def _micro_batches(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or auto") from None


def _pooling(text: str) -> bool | Literal["auto"] | tuple[str, ...]:
    """As PipelineConfig takes it."""
    if text == "auto":
        return "auto"
    if text == "all":
        return True
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be auto, all, or names of features with commas, got {text!r}")
    return names


def add_train(commands: Any) -> None:
    """Add the subcommand `train`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a model, alone or beside the sequential schedule",
        description="Train a recommender through the pipeline on one or several processes of this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--data", default="synthetic", help="synthetic (default), criteo:PATH, movielens:PATH or kuairand:PATH"
    )
    what.add_argument("--model", default="dlrm", help="dlrm (default); hstu or fuxi, of sequences")
    what.add_argument("--dim", type=positive, default=64, metavar="D", help="size of an embedding (64)")
    what.add_argument("--optimizer", choices=OPTIMIZERS, default="row_wise_adagrad", help="of the tables")
    what.add_argument("--lr", type=non_negative, help="learning rate of the tables (that of the optimizer in torch)")
    what.add_argument("--momentum", type=non_negative, default=0.0, metavar="M", help="of sgd (0)")
    what.add_argument("--weight-decay", type=non_negative, metavar="D", help="of the tables (0; adamw 0.01)")
    what.add_argument(
        "--dense-lr", type=non_negative, default=1e-3, help="learning rate of the dense part, Adam (0.001)"
    )
    what.add_argument("--batch-size", type=positive, metavar="B", help="samples of a rank in a step (512)")
    what.add_argument("--steps", type=positive, metavar="N", help="steps in all (one pass over the data, at least 20)")
    what.add_argument("--seed", type=int, default=0, help="seed of data, tables and dense part (0)")
    what.add_argument("--checkpoint", metavar="DIR", help="continue from DIR if a checkpoint is there; save there")
    what.add_argument(
        "--checkpoint-every", type=positive, metavar="N", help="save after every N steps, too (at the end alone)"
    )
    how = parser.add_argument_group("how to train")
    how.add_argument("--nproc", type=positive, default=1, metavar="N", help="ranks to start on this machine (1)")
    how.add_argument(
        "--device", metavar="DEVICE", default="cpu",
        help="of the dense model and the rows of a batch: cpu (default), cuda, cuda:1, npu; several ranks take one "
        "each",
    )  # fmt: skip
    how.add_argument("--schedule", choices=SCHEDULE_NAMES, default="nested", help="nested (default) and others")
    how.add_argument(
        "--micro-batches", type=_micro_batches, default=4, metavar="N", help="parts of a batch, or auto (4)"
    )
    how.add_argument("--row-transfer", choices=("once", "per_micro_batch"), default="once", help="once (default)")
    how.add_argument("--early-send", action="store_true", help="rows leave before their batch's turn (nested)")
    how.add_argument(
        "--edge-share", type=share, default=1.0, metavar="PART", help="of the first and last micro-batch: size (1)"
    )
    how.add_argument(
        "--balance", choices=("samples", "keys"), default="samples",
        help="what parts have about as many of: samples (default), or keys (of sequence models: items)",
    )  # fmt: skip
    how.add_argument(
        "--owner-pooling", type=_pooling, default=False, metavar="WHICH",
        help="owners add the rows of a bag up: for all features, where it is fewer bytes (auto), or those named (a,b)",
    )  # fmt: skip
    how.add_argument(
        "--sparse-groups", type=positive, default=1, metavar="N", help="copies of the tables among the ranks (1)"
    )
    how.add_argument("--row-wire", choices=WIRE_FORMATS, default="fp32", help="rows travel as: fp32 (default)")
    how.add_argument("--gradient-wire", choices=WIRE_FORMATS, default="fp32", help="their gradients: fp32 (default)")
    how.add_argument("--clustering", choices=("key", "none"), default="key", help="key (default)")
    how.add_argument("--timeout", type=_duration, default=300.0, metavar="S", help="limit of every wait, seconds (300)")
    how.add_argument(
        "--emulate-accelerator",
        type=_duration,
        metavar="MS",
        help="hold every step for MS more milliseconds without using a core, as an accelerator's dense part would",
    )
    result = parser.add_argument_group("what to report")
    result.add_argument("--compare", action="store_true", help="run `sequential` first and compare every bit")
    result.add_argument("--timeline", metavar="FILE", help="write the last steps as .html, .json (Chrome) or .png")
    result.add_argument("--json", metavar="FILE", help="write results as JSON")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    values = {name: getattr(parsed, name) for name in TrainOptions.__dataclass_fields__}
    options = TrainOptions(**values)
    from nestpipe_kernels.cli.train import train

    return train(options, arguments)
