"""The frame of the kernel cases: a case says what to run and what it must move; the rest is here.

A case is a module with `add_options(parser)` and `setups(parsed)`, and one line in the command's table of cases.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nestpipe_kernels.bench.lines import print_lines, spread, use_threads
from nestpipe_kernels.bench.machine_floor import LINE_BYTES, floor_ms, machine_floor
from nestpipe_kernels.config import default_threads
from nestpipe_kernels.launch.machine import facts

__all__ = ["Implementation", "Setup", "check_equal", "lines", "measure", "run"]

WARM_UP_ROUNDS = 2
BUDGET_S = 10.0
REST_S = 0.02
"""Before every step: threads of the implementation before (OpenMP's) wait for work busily for a while."""


@dataclass
class Implementation:
    """One way to compute the case's result; `prepare(k)`, where given, goes before `step(k)` and is not timed."""

    name: str
    step: Callable[[int], Any]
    prepare: Callable[[int], None] | None = None


@dataclass
class Setup:
    """One shape of a case, ready to run: implementations (ours first), and what the work has to move at least."""

    shape: dict[str, Any]
    implementations: list[Implementation]
    bytes_streamed: float
    random_lines: float = 0.0
    adjacent_lines: int = 1
    """How many of them lie side by side at each place."""
    dtype: str = "float32"
    missing: list[str] = field(default_factory=list)
    """Peers that cannot run here, each with its reason."""
    rounds: int | None = None
    """Timed steps, if they are not as many as are asked for: steps that go on from each other, of which all count."""
    further: Mapping[str, Callable[[Sequence[float]], dict[str, Any]]] = field(default_factory=dict)
    """By implementation: further fields of its line, from the times of its steps."""
    check: Callable[[], None] | None = None
    """Raises ValueError where results differ; None: `check_equal` of what step(0) returns."""
    warmed: bool = False
    """An untimed step goes before each that is timed: for short steps, which may be repeated."""


def run(parsed: argparse.Namespace) -> int:
    """Measure the cases of the command one after the other, each line as soon as it is known.

    Raises:
        ValueError: a peer computes something else; its shape was not timed.
    """
    names = [parsed.case, *parsed.more]
    found = []
    for name in names:
        case = importlib.import_module(f"nestpipe_kernels.bench.{name}")
        options = parsed if len(names) == 1 else _defaults(parsed, name, case)
        for threads in parsed.threads or [default_threads()]:
            use_threads(threads)
            for setup in case.setups(options):
                found += _run_setup(options, name, threads, setup)
    if parsed.plot is not None:
        from nestpipe_kernels.bench.plots import draw

        for path in draw(Path(parsed.plot), found):
            print(f"bench: wrote {path}", file=sys.stderr)
    return 0


def _defaults(parsed: argparse.Namespace, name: str, case: Any) -> argparse.Namespace:
    """The options all cases share as given, the case's own as they are by themselves."""
    parser = argparse.ArgumentParser()
    case.add_options(parser)
    own = vars(parser.parse_args([]))
    if name == parsed.case:
        for option, value in own.items():
            if getattr(parsed, option) != value:
                raise ValueError(f"bench {name}: --{option.replace('_', '-')} goes with one case alone")
    return argparse.Namespace(**{**vars(parsed), **own, "case": name})


def _run_setup(parsed: argparse.Namespace, name: str, threads: int, setup: Setup) -> list[dict[str, Any]]:
    for text in setup.missing:
        print(f"left out: {text}", file=sys.stderr)
    if len(setup.implementations) > 1:
        if setup.check is not None:
            setup.check()
        else:
            check_equal(name, setup.implementations)
        print(f"{name}: results of {', '.join(i.name for i in setup.implementations)} agree", file=sys.stderr)
    if setup.rounds is None:
        times = measure(setup.implementations, parsed.repeat, warmed=setup.warmed)
    else:
        times = measure(setup.implementations, setup.rounds, budget_s=math.inf)
    made = lines(name, threads, setup, times)
    print_lines(parsed, made)
    return made


def check_equal(case: str, implementations: Sequence[Implementation]) -> None:
    """Compare what step(0) returns (tensors, or tuples of them) bit by bit. Raises ValueError."""
    expected: Any = None
    for one in implementations:
        if one.prepare is not None:
            one.prepare(0)
        result = one.step(0)
        result = result if isinstance(result, (tuple, list)) else (result,)
        result = [torch.as_tensor(part).clone() for part in result]
        expected = expected or result
        if len(result) != len(expected) or not all(torch.equal(a, b) for a, b in zip(result, expected)):
            raise ValueError(
                f"bench {case}: {one.name} computes something else than {implementations[0].name}; nothing was timed"
            )


def measure(
    implementations: Sequence[Implementation], repeat: int, budget_s: float = BUDGET_S, warmed: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of every step. Implementations take turns, so that a machine that drifts treats all alike.

    The first rounds warm up. After `budget_s` seconds no further round begins (one round is always timed).

    `warmed`: the one before leaves its own data in the caches and threads asleep, so a step that is not timed goes
    first.
    """
    times: dict[str, list[float]] = {one.name: [] for one in implementations}
    begin = time.perf_counter()
    for k in range(-WARM_UP_ROUNDS, repeat):
        if k > 0 and time.perf_counter() - begin > budget_s:
            print(f"bench: {k} of {repeat} rounds in {budget_s:.0f} s", file=sys.stderr)
            break
        for one in implementations:
            if one.prepare is not None:
                one.prepare(k)
            _rest()
            if warmed:
                one.step(k)
                if one.prepare is not None:
                    one.prepare(k)
            start = time.perf_counter()
            one.step(k)
            if k >= 0:
                times[one.name].append((time.perf_counter() - start) * 1e3)
    return times


def _rest() -> None:
    """Busily, so that this thread's core neither sleeps nor gets another thread."""
    end = time.perf_counter() + REST_S
    while time.perf_counter() < end:
        pass


def lines(case: str, threads: int, setup: Setup, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The JSON lines of a setup; fraction_of_floor is the floor's time over the median: 1 is the best there is."""
    floor = floor_ms(setup.bytes_streamed, setup.random_lines, machine_floor(threads, setup.adjacent_lines))
    moved = setup.bytes_streamed + setup.random_lines * LINE_BYTES
    made = []
    for name, milliseconds in times.items():
        found = spread(milliseconds)
        made.append(
            {
                "case": case, "shape": setup.shape, "impl": name, "dtype": setup.dtype, "threads": threads, **found,
                "gb_per_s": _digits(moved / found["median_ms"] / 1e6),
                "fraction_of_floor": _digits(floor / found["median_ms"]),
                **(setup.further[name](milliseconds) if name in setup.further else {}),
                **facts(),
            }
        )  # fmt: skip
    return made


def _digits(value: float) -> float:
    """Four that say something."""
    return float(f"{value:.4g}")
