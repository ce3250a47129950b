"""`--compare REV`: the same command in the package as it is now and as it was at a revision, in turn."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["build", "ratios", "run"]

ROUNDS = 3
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nestpipe_kernels.cli.main import main; "
    "sys.exit(main(sys.argv[2:]))"
)


def run(parsed: argparse.Namespace) -> int:
    """Build the revision as a wheel in a temporary folder, run both in turn, print what changed; remove everything.

    Raises:
        ValueError: this is no git checkout, there is no such revision, or it cannot be built or run.
    """
    arguments = _without(parsed.arguments, ("--compare", "--json", "--plot"))
    with tempfile.TemporaryDirectory(prefix="nestpipe-compare-") as folder:
        then = build(parsed.compare, Path(folder))
        found: dict[str, list[dict[str, Any]]] = {"then": [], "now": []}
        for turn in range(ROUNDS):
            for name, path in (("then", str(then)), ("now", "")):
                print(f"compare: round {turn + 1} of {ROUNDS}, {name}", file=sys.stderr)
                found[name] += _lines(name, path, arguments)
    made = ratios(found["then"], found["now"], parsed.compare)
    text = "\n".join(json.dumps(line) for line in made)
    print(text)
    if parsed.json is not None:
        with Path(parsed.json).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0


def build(revision: str, folder: Path) -> Path:
    """The folder, inside `folder`, that holds the package of the revision, as its wheel would install it."""
    source, wheels, installed = folder / "source", folder / "wheels", folder / "installed"
    archive = _checked(["git", "archive", revision], f"git has no revision {revision!r} here")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(source, filter="data")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(source)]
    _checked(pip, f"{revision} cannot be built")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(installed)
    return installed


def _lines(name: str, path: str, arguments: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", START, path, *arguments] if path else [
        sys.executable, "-m", "nestpipe_kernels", *arguments
    ]  # fmt: skip
    text = _checked(command, f"the command fails {name}").decode()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _checked(command: list[str], problem: str) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"bench: --compare: {problem}: {said[-1] if said else f'code {done.returncode}'}")
    return done.stdout


def _without(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    """The arguments without these options and their values."""
    kept, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif word.split("=")[0] not in options:
            kept.append(word)
    return kept


def ratios(then: list[dict[str, Any]], now: list[dict[str, Any]], revision: str) -> list[dict[str, Any]]:
    """One line for each implementation of either: medians over the rounds; `ratio` above 1 is faster now than then."""

    def by_key(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            key = json.dumps([line["case"], line["shape"], line["threads"], line["impl"]], sort_keys=True)
            found.setdefault(key, []).append(line)
        return found

    before, made = by_key(then), []
    for key, lines in by_key(now).items():
        now_ms = median(line["median_ms"] for line in lines)
        then_ms = median([line["median_ms"] for line in before[key]]) if key in before else None
        made.append(
            {
                **{name: lines[0][name] for name in ("case", "shape", "impl", "threads")},
                "revision": revision,
                "then_ms": then_ms and round(then_ms, 4),
                "now_ms": round(now_ms, 4),
                "ratio": then_ms and round(then_ms / now_ms, 3),
                "cpu": lines[0]["cpu"],
            }
        )
    return made
