"""Entry point of `nestpipe`: parses, dispatches, and turns expected errors into one line. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nestpipe_kernels import __version__
from nestpipe_kernels.cli.bench import add_bench
from nestpipe_kernels.cli.checkpoint import add_checkpoint
from nestpipe_kernels.cli.doctor import add_doctor
from nestpipe_kernels.cli.options import add_train
from nestpipe_kernels.cli.parser import OneLineParser
from nestpipe_kernels.config import environment
from nestpipe_kernels.errors import NestPipeError

__all__ = ["main"]

FAILED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `nestpipe` with `argv` (None: the process's arguments).

    Returns:
        0, 1 after an error (one line on stderr, with NESTPIPE_DEBUG=1 a traceback), 130 after Ctrl-C; `nestpipe train
        --nproc` returns the launcher's code.

    Raises:
        SystemExit: --help, --version, or arguments that cannot be parsed (code 2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed, arguments)
        return code
    except KeyboardInterrupt:
        print(f"nestpipe {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (NestPipeError, ValueError, IndexError, OSError, ImportError, MemoryError) as error:
        if environment("DEBUG", ""):
            raise
        print(f"nestpipe {parsed.command}: {_one_line(error)}", file=sys.stderr)
        return FAILED


def _one_line(error: BaseException) -> str:
    """The message; the type in front where it says more than the message (and the launcher looks for it)."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    plain = type(error) in (ValueError, IndexError, OSError, FileNotFoundError, IsADirectoryError) and text
    return text if plain else f"{type(error).__name__}: {text}"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="nestpipe",
        description="Nested-pipeline training of recommenders with huge embedding tables: the same result, with "
        "lookups and exchanges hidden behind the dense computation.",
    )
    parser.add_argument("--version", action="version", version=f"nestpipe_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_train(commands)
    add_bench(commands)
    add_checkpoint(commands)
    add_doctor(commands)
    return parser
