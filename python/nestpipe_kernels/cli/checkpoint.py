"""`nestpipe checkpoint inspect|verify|reshard|diff`: looks at saved checkpoints and deals them out anew. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestpipe_kernels.config import positive

__all__ = ["add_checkpoint"]


def add_checkpoint(commands: Any) -> None:
    """Add the subcommand `checkpoint` with one subcommand for each tool."""
    parser = commands.add_parser(
        "checkpoint",
        help="look at, verify, compare or reshard a saved checkpoint",
        description="Tools for checkpoint directories (docs/checkpoints.md). None of them loads a model.",
    )
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    _add_inspect(tools)
    _add_verify(tools)
    _add_reshard(tools)
    _add_diff(tools)
    parser.set_defaults(run=_run)


def _add_tool(tools: Any, name: str, text: str, more: str = ".") -> argparse.ArgumentParser:
    """A tool; `more` goes on after `text` in its own help."""
    tool: argparse.ArgumentParser = tools.add_parser(name, help=text, description=text[0].upper() + text[1:] + more)
    return tool


def _add_inspect(tools: Any) -> None:
    text = "show what a checkpoint holds; reads the manifest alone"
    tool = _add_tool(tools, "inspect", text)
    tool.add_argument("path", metavar="PATH", help="directory of the checkpoint")
    tool.add_argument("--json", action="store_true", help="the same as JSON")


def _add_verify(tools: Any) -> None:
    text = "read every byte and compare it with the manifest's digests"
    tool = _add_tool(
        tools,
        "verify",
        text,
        "; also that rows are in order, distinct, and in the file of the rank that owns them. Names every problem; "
        "exit code 1 if there is one.",
    )
    tool.add_argument("path", metavar="PATH", help="directory of the checkpoint")


def _add_reshard(tools: Any) -> None:
    text = "deal the rows out to another number of ranks"
    tool = _add_tool(
        tools,
        "reshard",
        text,
        ". Loading does that by itself; from a resharded checkpoint each rank reads its own files alone. Extra memory "
        "stays below 64 MiB whatever the size.",
    )
    tool.add_argument("path", metavar="PATH", help="directory of the checkpoint")
    tool.add_argument("--ranks", type=positive, required=True, metavar="N", help="number of ranks")
    where = tool.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", metavar="DIR", help="new directory for the result")
    where.add_argument(
        "--in-place", action="store_true", help="into PATH, whose old files go when the new ones are complete"
    )


def _add_diff(tools: Any) -> None:
    text = "compare two checkpoints, row by row, at whatever numbers of ranks"
    tool = _add_tool(tools, "diff", text, ". Exit code 0 if they are equal, 1 if they differ.")
    tool.add_argument("first", metavar="A", help="directory of a checkpoint")
    tool.add_argument("second", metavar="B", help="directory of another")
    what = tool.add_mutually_exclusive_group()
    what.add_argument(
        "--metadata", action="store_true", help="also last_used and frequency of rows and admission counts"
    )
    what.add_argument(
        "--embeddings-only", action="store_true", help="embeddings alone: neither optimizer state nor positions"
    )
    tool.add_argument("--show", type=positive, default=3, metavar="N", help="keys shown of each difference (default 3)")


def _run(parsed: argparse.Namespace, _arguments: Sequence[str]) -> int:
    tools = {"inspect": _inspect, "verify": _verify, "reshard": _reshard, "diff": _diff}
    return tools[parsed.tool](parsed)


def _inspect(parsed: argparse.Namespace) -> int:
    from nestpipe_kernels.checkpoint.tools import inspect

    found = inspect.describe(Path(parsed.path))
    print(json.dumps(found, indent=1) if parsed.json else "\n".join(inspect.lines(found)))
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    from nestpipe_kernels.checkpoint.tools.text import count, size
    from nestpipe_kernels.checkpoint.tools.verify import verify

    report = verify(Path(parsed.path))
    for problem in report.problems:
        print(problem)
    if report.leftovers:
        print(f"beside it: {report.leftovers}; they do no harm, the next save removes them")
    files = count(report.num_files, "file")
    if report.problems:
        found = f"{count(len(report.problems), 'problem')} in {len(report.bad_files)} of {files}"
        print(f"{parsed.path}: {found}, {size(report.num_bytes)} read {report.rate}")
        return 1
    print(f"{parsed.path}: {files} as written, {size(report.num_bytes)} read {report.rate}")
    return 0


def _reshard(parsed: argparse.Namespace) -> int:
    from nestpipe_kernels.checkpoint.tools.reshard import reshard

    out = None if parsed.in_place else Path(parsed.out)
    for line in reshard(Path(parsed.path), parsed.ranks, out):
        print(line)
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    from nestpipe_kernels.checkpoint.tools.diff import diff

    scope = "embeddings" if parsed.embeddings_only else "metadata" if parsed.metadata else "state"
    differences, notes = diff(Path(parsed.first), Path(parsed.second), scope, parsed.show)
    print("\n".join([*notes, *differences, "DIFFERENT" if differences else "equal"]))
    return 1 if differences else 0
