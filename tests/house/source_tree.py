"""The source tree as the house's tests see it: files, parsed modules, the order of folders."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "nestpipe_kernels"
BENCH = ROOT / "bench"
CSRC = ROOT / "csrc"


class Import(NamedTuple):
    """One imported name: `nestpipe_kernels.ops.dedup.dedup` as ("nestpipe_kernels", "ops", "dedup", "dedup")."""

    target: tuple[str, ...]
    line: int
    lazy: bool
    """Inside a function."""


def module_files() -> list[Path]:
    """Every Python file that the wheel carries."""
    return sorted(p for folder in (PACKAGE, BENCH) for p in folder.rglob("*.py"))


def name_in_package(path: Path) -> str:
    """`stages/route.py`, `bench/train_step.py`: the path inside the installed package."""
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else f"bench/{path.relative_to(BENCH)}"


def folder_of(path: Path) -> str:
    """First folder inside the package; for a file at its top, the module's name."""
    return name_in_package(path).split("/")[0].removesuffix(".py")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[Import]:
    """All imports of a file, those for types and those inside functions included."""
    package = ("nestpipe_kernels", *name_in_package(path).split("/")[:-1])
    yield from _imports(parse(path), package, lazy=False)


def _imports(node: ast.AST, package: tuple[str, ...], lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(tuple(name.name.split(".")), child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else ()
            module = base + tuple((child.module or "").split(".")) if child.module else base
            for name in child.names:
                yield Import((*module, name.name), child.lineno, lazy)
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, package, inside)


def folder_order() -> list[str]:
    """Folders and top modules from docs/architecture.md, lowest first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## Folders, lowest first", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])]


def native_files() -> list[Path]:
    """C++ sources and headers, native tests included."""
    folders = (CSRC, ROOT / "tests" / "cpp", ROOT / "tests" / "cuda")
    return sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
