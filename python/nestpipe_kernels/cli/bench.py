"""`nestpipe bench`: chooses a case of the suite in nestpipe_kernels.bench and hands over to it. Imports no torch."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from nestpipe_kernels.cli.parser import LazyParser
from nestpipe_kernels.config import non_negative, positive, share

__all__ = ["add_bench"]

KERNEL_CASES = {
    "capacity": "a very large table beside a small one: the time of each key, and memory",
    "convert": "a step of converted embedding modules, without a pipeline, beside torch's with sparse gradients",
    "dedup": "the distinct keys of a list, and its inverse",
    "exchange": "rows exchanged between two processes on loopback",
    "find_or_insert": "rows of keys out of a large table, made where there are none",
    "growth": "a table that grows from nothing: the time of every call, and what its index takes",
    "intersect": "the rows that two lists of keys have in common",
    "lookup_pool": "rows of bags of keys looked up and summed",
    "row_sync": "rows copied from one buffer to places of another",
    "row_update": "an update rule applied to the rows of a buffer",
    "train_step": "lookup and pooling, backward, and row update of one step on one process, without a dense part",
}
"""Modules of nestpipe_kernels.bench on the frame of its module `case`, and what each measures."""

MEASURED_RULES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
"""Update rules that a peer has, too."""

DEVICE_CASES = (
    "copy", "dedup", "row_sync", "row_update", "row_gradients", "lookup_pool", "device_store", "train_step",
    "host_rows", "nested",
)  # fmt: skip
"""Modules of nestpipe_kernels.bench.on_device."""

DEVICE_OPTIONS = ("only", "scale", "peers", "repeat", "seed", "json")

CLUSTER_SETS = (
    "ml100k", "ml100k-first", "topics", "topics-100", "topics-12", "zipf", "zipf-1.2", "ml100k-last", "fields", "walks",
)  # fmt: skip

PIPELINE_SHAPES = ("paper-npu", "ml100k", "criteo", "dlrm", "small")


def add_bench(commands: Any) -> None:
    """Add the subcommand `bench` with one subcommand for each case."""
    parser = commands.add_parser(
        "bench",
        help="measure a case of the suite, alone or beside its peers",
        description="Measures a case and prints one JSON line for each implementation. Without a CASE, --device names "
        f"an accelerator, and cases are measured on it: {', '.join(DEVICE_CASES)}.",
    )
    _add_device_options(parser)
    cases = parser.add_subparsers(dest="case", metavar="CASE", required=False, parser_class=LazyParser)
    for name in KERNEL_CASES:
        _add_kernel_case(cases, name)
    _add_evict(cases)
    _add_checkpoint(cases)
    _add_scheduler(cases)
    _add_pipeline(cases)
    _add_tier(cases)
    _add_cluster(cases)
    _add_consistency(cases)


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    """What `nestpipe bench --device` takes, without a case."""
    # Names of their own: a case's options would take the place of these, given or not.
    device = parser.add_argument_group("on an accelerator")
    device.add_argument("--device", metavar="DEVICE", default=None, help="as in cuda or cuda:1")
    device.add_argument(
        "--only",
        dest="device_only",
        nargs="+",
        choices=DEVICE_CASES,
        default=list(DEVICE_CASES),
        help="some of the cases",
    )
    device.add_argument(
        "--scale",
        dest="device_scale",
        type=share,
        default=1.0,
        help="part of each case's size; 1 is what figures are of",
    )
    device.add_argument(
        "--peers", dest="device_peers", action="store_true", help="also what others have for it, where installed"
    )
    device.add_argument("--repeat", dest="device_repeat", type=positive, default=20, help="timed rounds")
    device.add_argument("--seed", dest="device_seed", type=int, default=0, help="seed of keys and values")
    device.add_argument(
        "--json", dest="device_json", metavar="FILE", default=None, help="append the lines to a file, too"
    )
    parser.set_defaults(run=_run)


def _add_case(cases: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A case with the options that all have."""
    case: argparse.ArgumentParser = cases.add_parser(
        name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    case.add_argument("--threads", type=positive, default=None, help="threads of all (NESTPIPE_THREADS or cores)")
    case.add_argument("--seed", type=int, default=0, help="seed of keys and gradients")
    case.add_argument("--json", metavar="FILE", default=None, help="append the lines to a file, too")
    case.set_defaults(run=_run)
    return case


def _add_kernel_case(cases: Any, name: str) -> None:
    """A case on bench/case.py: several in one command, or one alone with the options its module gives."""
    text = KERNEL_CASES[name]
    case = cases.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Several of {', '.join(KERNEL_CASES)} may stand in one command; each "
        "then has its default shapes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        module=f"nestpipe_kernels.bench.{name}",
    )
    case.add_argument("more", metavar="CASE", nargs="*", default=[], help="further kernel cases")
    case.add_argument("--threads", type=positive, nargs="+", default=None, help="thread counts, one after the other")
    case.add_argument("--seed", type=int, default=0, help="seed of keys and values")
    case.add_argument("--repeat", type=positive, default=20, help="timed steps of each, at most")
    case.add_argument("--peers", action="store_true", help="also what others have for it, where installed")
    case.add_argument("--json", metavar="FILE", default=None, help="append the lines to a file, too")
    case.add_argument("--plot", metavar="DIR", default=None, help="draw a picture of each case into this folder")
    case.add_argument("--compare", metavar="REV", default=None, help="beside the package as of a git revision")
    case.set_defaults(run=_run)


def _add_evict(cases: Any) -> None:
    text = "find_or_insert into a full table that evicts, beside one with room for everything"
    case = _add_case(cases, "evict", text)
    case.add_argument("--rows", type=positive, default=1_000_000, help="capacity of the table that evicts")
    case.add_argument("--keys", type=positive, default=20_000_000, help="ids of the Zipf stream")
    case.add_argument("--zipf", type=non_negative, default=1.05, help="skew of the Zipf stream")
    case.add_argument("--batch", type=positive, default=65_536, help="keys of a call")
    case.add_argument("--dim", type=positive, default=64, help="size of an embedding")
    case.add_argument("--slack", type=float, default=0.0625, help="part of the capacity that is freed at once")
    case.add_argument("--repeat", type=positive, default=60, help="timed calls")


def _add_checkpoint(cases: Any) -> None:
    text = "saving, loading and resharding a table on one process, against the disk's own rates in the same run"
    case = _add_case(cases, "checkpoint", text)
    case.add_argument("--rows", type=positive, default=2_000_000, help="rows of the table")
    case.add_argument("--dim", type=positive, default=16, help="size of an embedding")
    case.add_argument("--optimizer", choices=MEASURED_RULES, default="row_wise_adagrad", help="row update")
    case.add_argument("--ranks", type=positive, default=4, help="number of ranks to reshard to")
    case.add_argument("--only", nargs="+", choices=("save", "load", "reshard"), default=None, help="parts of it")
    case.add_argument("--directory", metavar="DIR", default=None, help="where files go (the system's temporary folder)")
    case.add_argument("--repeat", type=positive, default=3, help="rounds")


def _add_scheduler(cases: Any) -> None:
    text = "a step's own time: no network, a model of no work, tiny batches; with and without the stages' work"
    case = _add_case(cases, "scheduler", text)
    case.add_argument("--tables", type=positive, default=4, help="number of tables")
    case.add_argument("--separate-stores", action="store_true", help="tables of different sizes: a store for each")
    case.add_argument("--micro-batches", type=positive, default=8, metavar="N", help="micro-batches of a step")
    case.add_argument("--batch", type=positive, default=32, help="samples of a step")
    case.add_argument("--bag", type=positive, default=2, help="keys of a bag")
    case.add_argument("--dim", type=positive, default=4, help="size of the smallest embedding")
    case.add_argument("--rows", type=positive, default=1000, help="rows of a table")
    case.add_argument("--ranks", type=positive, nargs="+", default=[1, 2], help="ranks (threads of one process)")
    case.add_argument("--schedules", nargs="+", default=["nested"], metavar="NAME", help="schedules to run")
    case.add_argument("--clustering", choices=("key", "none"), default="none", help="as in PipelineConfig")
    case.add_argument("--repeat", type=positive, default=200, help="timed steps of each")


def _add_pipeline(cases: Any) -> None:
    text = "every schedule (and TorchRec) on one model and data between processes joined by a slow link"
    case = _add_case(cases, "pipeline", text)
    case.add_argument(
        "--net", metavar="RATE", default="500mbit", help="of every link (needs root), or loopback: no limit"
    )
    case.add_argument("--ranks", type=positive, default=2, help="processes, each in a network namespace of its own")
    case.add_argument(
        "--dense", choices=("cpu", "emulated"), default="emulated",
        help="the dense part: computed here, or an accelerator emulated by timed waits that use no core",
    )  # fmt: skip
    case.add_argument("--shape", choices=PIPELINE_SHAPES, default="paper-npu", help="tables, batches, stage times")
    case.add_argument("--data", metavar="PATH", default=None, help="MovieLens-100K, for --shape ml100k")
    case.add_argument(
        "--micro-batches", type=positive, metavar="N", default=None, help="parts of a batch (the shape's)"
    )
    case.add_argument(
        "--edge-share", type=share, metavar="PART", default=None, help="as in PipelineConfig (the shape's)"
    )
    only = "beside sequential: dbp, fwp, nested, nested+early, nested+pooled, async (all)"
    case.add_argument("--only", nargs="+", metavar="IMPL", default=None, help=only)
    case.add_argument("--peers", action="store_true", help="also TorchRec, if installed")
    case.add_argument("--block", type=positive, default=9, help="counted steps of an implementation in a round")
    case.add_argument("--repeat", type=positive, default=4, help="rounds that count")
    case.add_argument("--timeout", type=positive, default=120, metavar="S", help="limit of every wait, seconds")
    case.add_argument("--output", metavar="DIR", default=None, help="folder for timelines and the picture")


def _add_tier(cases: Any) -> None:
    text = "training with rows in a file of which a part fits into memory, beside the same with all in memory"
    case = _add_case(cases, "tier", text)
    case.add_argument("--memory", type=positive, default=256, help="MiB of rows that stay in memory")
    case.add_argument("--times", type=float, default=4.0, help="size of the store, in units of --memory")
    case.add_argument("--tables", type=positive, default=4, help="number of tables")
    case.add_argument("--dim", type=positive, default=64, help="size of an embedding")
    case.add_argument("--batch", type=positive, default=1024, help="samples of a step")
    case.add_argument("--bag", type=positive, default=5, help="keys of a bag")
    case.add_argument("--zipf", type=non_negative, default=1.05, help="skew of the keys; 0 is uniform")
    case.add_argument("--dense", choices=("cpu", "emulated"), default="cpu", help="a real dense part, or a timed wait")
    case.add_argument("--hidden", type=positive, default=1024, help="width of the real dense part's two hidden layers")
    case.add_argument("--compute-ms", type=float, default=150.0, help="time of the emulated dense part")
    case.add_argument("--micro-batches", type=positive, default=4, help="micro-batches of a step")
    case.add_argument("--directory", metavar="DIR", default=None, help="where files go (the system's temporary folder)")
    case.add_argument("--warm-up", type=positive, default=50, help="steps before those that are timed")
    case.add_argument("--repeat", type=positive, default=30, help="timed steps")


def _add_cluster(cases: Any) -> None:
    text = "rows that micro-batches of clustered samples send, and the time to cluster them"
    case = _add_case(cases, "cluster", text)
    case.add_argument("--sets", nargs="+", choices=CLUSTER_SETS, default=list(CLUSTER_SETS), help="batches")
    case.add_argument("--parts", type=positive, nargs="+", default=[4, 8, 16], metavar="N", help="micro-batches")
    case.add_argument("--seeds", type=positive, default=5, help="batches of each set")
    case.add_argument("--data", metavar="PATH", default=None, help="MovieLens-100K, for the sets ml100k")
    case.add_argument("--repeat", type=positive, default=5, help="timed calls for each batch")
    case.add_argument("--peers", action="store_true", help="also Mt-KaHyPar, if installed")


def _add_consistency(cases: Any) -> None:
    text = "ranking quality and losses of sequence models under every schedule, beside one plain process"
    case = _add_case(cases, "consistency", text)
    case.add_argument("--data", metavar="KIND:PATH", required=True, help="movielens:PATH or kuairand:PATH")
    case.add_argument("--models", nargs="+", choices=("hstu", "fuxi"), default=["hstu", "fuxi"], help="models")
    case.add_argument("--seeds", type=positive, default=5, help="seeds of each, from --seed on")
    case.add_argument("--ranks", type=positive, default=2, help="processes")
    case.add_argument(
        "--micro-batches", type=positive, nargs="+", default=[2, 4, 8, 16], metavar="N", help="as it says"
    )
    case.add_argument("--epochs", type=positive, default=10, help="passes over the data")
    case.add_argument("--steps", type=positive, default=None, help="steps at most (all of the epochs)")
    case.add_argument("--batch", type=positive, default=64, help="samples of a rank in a step")
    case.add_argument("--dim", type=positive, default=64, help="size of an embedding")
    case.add_argument("--lr", type=float, default=1e-3, help="learning rate of tables and dense part (Adam)")
    case.add_argument("--timeout", type=positive, default=300, metavar="S", help="limit of every wait, seconds")
    case.add_argument("--output", metavar="DIR", default=None, help="folder for the picture")


def _run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    # By name: the suite's folder lies outside the package's source folder and joins it in the wheel.
    module = parsed.case
    if parsed.case is None:
        if parsed.device is None:
            raise ValueError("name a CASE, or an accelerator with --device; nestpipe bench --help lists both")
        module = "on_device.frame"
        for name in DEVICE_OPTIONS:
            setattr(parsed, name, getattr(parsed, f"device_{name}"))
    elif arguments[1:2] != [parsed.case]:
        raise ValueError(
            f"options go after the case, as in: nestpipe bench {parsed.case} --peers; on an accelerator cases are "
            "named by --only, as in: nestpipe bench --device cuda --only dedup"
        )
    if parsed.case in KERNEL_CASES:
        unknown = [name for name in parsed.more if name not in KERNEL_CASES]
        if unknown:
            raise ValueError(f"{unknown[0]} is not a kernel case; they are {', '.join(KERNEL_CASES)}")
        module = "case" if parsed.compare is None else "compare"
    parsed.arguments = list(arguments)  # for cases that start this command again, as ranks
    code: int = _module(module).run(parsed)
    return code


def _module(module: str) -> Any:
    """A module of the suite."""
    name = f"nestpipe_kernels.bench.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, "nestpipe_kernels.bench"):
            raise
        raise ImportError(f"{name} is not installed; install the wheel (make build, or pip install .)") from error
