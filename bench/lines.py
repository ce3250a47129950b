"""What all cases share: threads, the median of times with its spread, and where JSON lines go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from nestpipe_kernels._native import core
from nestpipe_kernels.config import default_threads

__all__ = ["print_lines", "spread", "use_threads"]


def use_threads(given: int | None) -> int:
    """Set the threads of native code and of torch in this process (None: the default), and say how many."""
    threads = given or default_threads()
    core().set_num_threads(threads)
    torch.set_num_threads(threads)
    return threads


def spread(times: Sequence[float], scale: float = 1.0, digits: int = 4) -> dict[str, float]:
    """The fields median_ms, p20_ms and p80_ms of times, which are milliseconds once multiplied by `scale`."""
    cuts = quantiles(times, n=5, method="inclusive") if len(times) > 1 else list(times) * 4
    found = {"median_ms": median(times), "p20_ms": cuts[0], "p80_ms": cuts[3]}
    return {name: round(value * scale, digits) for name, value in found.items()}


def print_lines(parsed: argparse.Namespace, lines: Sequence[dict[str, Any]]) -> str:
    """Print the lines as JSON, append them to the file of `--json`, too, if there is one, and return the text."""
    text = "\n".join(json.dumps(line) for line in lines)
    print(text, flush=True)
    if parsed.json is not None:
        with Path(parsed.json).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return text
