"""Case `pipeline`: every schedule (and TorchRec) on the same model, data and slow link between real processes."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nestpipe_kernels.bench.lines import print_lines
from nestpipe_kernels.bench.link_meter import LinkMeter
from nestpipe_kernels.bench.pipeline_lines import BASELINE, make_lines, table
from nestpipe_kernels.bench.pipeline_runs import FILL_STEPS, IMPLEMENTATIONS, Ours
from nestpipe_kernels.bench.pipeline_shapes import SHAPES, PipelineShape, make_batches, sized
from nestpipe_kernels.config import default_threads, process_environment
from nestpipe_kernels.launch import Network, init_rank, run_ranks
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.launch.network import bits_per_second
from nestpipe_kernels.trace import Span, save_merged
from nestpipe_kernels.trace.side_by_side import save_side_by_side

__all__ = ["LOOPBACK", "run"]

LOOPBACK = "loopback"
"""In place of a rate: no namespaces, no limit, no root needed."""
PICTURE_STEPS = 8
REPORT_S = 5.0


def run(parsed: argparse.Namespace) -> int:
    """Start the ranks, each in a namespace of its own; or, as one of them, train, measure, check and report.

    Returns:
        The exit code.

    Raises:
        ValueError: settings that cannot be used, results that differ.
        OSError: namespaces cannot be made here; says what is missing.
    """
    if process_environment().get("RANK"):
        _run_rank(parsed)
        return 0
    rate = None if parsed.net == LOOPBACK else parsed.net
    shape = _shape(parsed, rate)
    if shape.kind == "movielens" and parsed.data is None:
        raise ValueError(f"--shape {shape.name} needs --data with the path of MovieLens-100K")
    if shape.kind != "movielens" and parsed.data is not None:
        raise ValueError(f"--data goes with --shape ml100k, got it with {shape.name}")
    if parsed.peers and not shape.rows:
        raise ValueError(
            f"--peers needs tables of fixed size, those of --shape {shape.name} are open: use --shape dlrm"
        )
    unknown = sorted(set(parsed.only or ()) - set(IMPLEMENTATIONS))
    if unknown:
        raise ValueError(f"--only: unknown {', '.join(unknown)}; choose from {', '.join(IMPLEMENTATIONS)}")
    _check_output(parsed)
    command = [sys.executable, "-m", "nestpipe_kernels", *parsed.arguments]
    with Network(parsed.ranks, rate) if rate is not None else nullcontext() as network:
        return run_ranks(command, parsed.ranks, timeout_s=parsed.timeout, network=network)


def _shape(parsed: argparse.Namespace, rate: str | None) -> PipelineShape:
    shape = SHAPES[parsed.shape]
    if parsed.edge_share is not None:
        shape = replace(shape, edge_share=parsed.edge_share)
    return sized(shape, _rate_of(rate), parsed.ranks)


def _check_output(parsed: argparse.Namespace) -> None:
    """What would fail after minutes of measuring fails now."""
    if parsed.output is not None:
        import matplotlib  # noqa: F401

        Path(parsed.output).mkdir(parents=True, exist_ok=True)
    if parsed.json is not None and not Path(parsed.json).resolve().parent.is_dir():
        raise ValueError(
            f"--json {parsed.json}: there is no folder {Path(parsed.json).resolve().parent}; make it first"
        )


def _run_rank(parsed: argparse.Namespace) -> None:
    rank, ranks = init_rank(parsed.timeout)
    rate = None if parsed.net == LOOPBACK else parsed.net
    shape = _shape(parsed, rate)
    torch.set_num_threads(parsed.threads or default_threads())
    batches = make_batches(shape, rank, ranks, parsed.seed, parsed.data)
    micro_batches = parsed.micro_batches or shape.micro_batches
    meter = None if rate is None else LinkMeter(Network.interface)
    wanted = [BASELINE, *((name, micro_batches) for name in (BASELINE[0], *(parsed.only or IMPLEMENTATIONS)))]
    runs = [
        Ours(
            name, parts, shape, batches,
            seed=parsed.seed, emulated=parsed.dense == "emulated", block=parsed.block, timeout_s=parsed.timeout,
            meter=meter,
        )
        for name, parts in dict.fromkeys(wanted)
    ]  # fmt: skip
    peers: list[Any] = []
    if parsed.peers:
        from nestpipe_kernels.bench.pipeline_peers import make_peers

        peers = make_peers(shape, batches, runs[0], seed=parsed.seed, meter=meter)
    _measure(runs, peers, parsed.block, parsed.repeat, rank)
    spans = {_key(one): one.picture(PICTURE_STEPS, _rate_of(rate)) for one in runs} if parsed.output else {}
    found = _gather(_own_report(runs, peers), rank, ranks)
    all_spans = _gather(spans, rank, ranks)
    if rank == 0:
        lines = make_lines(_facts(parsed, shape, rate, micro_batches), found)
        _write(parsed, lines, all_spans)
    dist.barrier()
    dist.destroy_process_group()


def _key(one: Any) -> str:
    return f"{one.name}, N {one.micro_batches}"


def _rate_of(rate: str | None) -> float | None:
    return None if rate is None else bits_per_second(rate)


def _measure(ours: Sequence[Any], peers: Sequence[Any], block: int, repeat: int, rank: int) -> None:
    """Blocks of all implementations in turn, the order turned round each time; the first round warms up, and peers are
    compared after it.

    Between blocks nothing is in flight, so an implementation meets nothing of the one before.
    """
    reported, runs = time.perf_counter(), [*ours, *peers]
    for number in range(repeat + 1):
        for one in runs if number % 2 == 0 else reversed(runs):
            dist.barrier()
            one.run_block(block + FILL_STEPS, measure=number > 0)
            if rank == 0 and time.perf_counter() - reported > REPORT_S:
                reported = time.perf_counter()
                print(f"pipeline: round {number} of {repeat}, {_key(one)}", file=sys.stderr, flush=True)
        if number == 0:
            for peer in peers:
                peer.compare()
    dist.barrier()


def _own_report(runs: Sequence[Ours], peers: Sequence[Any]) -> dict[str, Any]:
    """What rank 0 needs of this rank."""
    return {
        "ours": [
            {
                "impl": one.name,
                "micro_batches": one.micro_batches,
                "exact": one.exact,
                **one.measured.medians(),
                **one.counts(),
                "digests": one.digests(),
            }
            for one in runs
        ],
        "peers": [{"impl": one.name, **one.measured.medians(), "difference": one.difference} for one in peers],
    }


def _facts(parsed: argparse.Namespace, shape: PipelineShape, rate: str | None, micro_batches: int) -> dict[str, Any]:
    times = vars(shape.times)
    return {
        "shape": {key: value for key, value in vars(shape).items() if key != "times"},
        "emulated_ms": times if parsed.dense == "emulated" else None,
        "dense": parsed.dense,
        "net": parsed.net,
        "bits_per_second": _rate_of(rate),
        "ranks": parsed.ranks,
        "micro_batches": micro_batches,
        "threads": parsed.threads or default_threads(),
        **facts(),
    }


def _gather(mine: Any, rank: int, ranks: int) -> list[Any]:
    found: list[Any] = [None] * ranks
    dist.gather_object(mine, found if rank == 0 else None)
    return found


def _write(parsed: argparse.Namespace, lines: list[dict[str, Any]], all_spans: list[dict[str, list[Span]]]) -> None:
    text = print_lines(parsed, lines)
    for line in table(lines):
        print(line, file=sys.stderr)
    if parsed.output is None:
        return
    folder = Path(parsed.output)
    (folder / "lines.jsonl").write_text(text + "\n", encoding="utf-8")
    for key in all_spans[0]:
        path = folder / f"{key.replace(', N ', '_N').replace('+', '_')}.html"
        save_merged(path, [(rank, spans[key]) for rank, spans in enumerate(all_spans)])
    shown = [key for key in all_spans[0] if not key.startswith(f"{BASELINE[0]}, N ") or key.endswith(f" {BASELINE[1]}")]
    rows = [(key, all_spans[0][key]) for key in shown]
    save_side_by_side(folder / "side_by_side.png", _title(parsed, lines), rows)
    print(f"timelines and side_by_side.png: {folder}", file=sys.stderr)


def _title(parsed: argparse.Namespace, lines: list[dict[str, Any]]) -> str:
    what = "emulated accelerator: timed waits that use no core" if parsed.dense == "emulated" else "dense part on CPU"
    steps = ", ".join(
        f"{line['impl']} (N {line['micro_batches']}) {line['step_ms']:.0f} ms"
        for line in itertools.islice(lines, 8)
        if line["step_ms"] is not None
    )
    return f"{parsed.shape}, {parsed.ranks} ranks, {parsed.net}, {what}; rank 0\n{steps}"
