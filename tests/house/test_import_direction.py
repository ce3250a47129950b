"""Imports go one way, the extension and the environment have one door each, and stages know no schedule."""

from __future__ import annotations

import ast

import pytest
from source_tree import CSRC, PACKAGE, Import, folder_of, folder_order, imports, module_files, name_in_package, parse

# (file, folder it reaches upwards to): why it may. Only imports inside functions can stand here.
ALLOWED = {
    ("stages/routing.py", "capture"): "a batch is copied; capture.split is plain data work that needs no stage",
    ("stages/micro_batches.py", "capture"): "a batch is split; capture.split is plain data work that needs no stage",
}
# Top modules above all folders: they only hand over to one.
DOORS = {"__init__", "__main__"}


def _upward(path, order: list[str]) -> list[tuple[str, str, Import]]:
    own = folder_of(path)
    found = []
    for imported in imports(path):
        if imported.target[0] != "nestpipe_kernels" or len(imported.target) < 2:
            continue
        there = imported.target[1]
        if there not in order or there == own:
            continue
        if order.index(there) > order.index(own):
            found.append((name_in_package(path), there, imported))
    return found


def test_every_folder_has_its_place_in_the_architecture_page() -> None:
    folders = {folder_of(path) for path in module_files()} - DOORS
    assert folders == set(folder_order())


def test_imports_go_one_way() -> None:
    order = folder_order()
    wrong = []
    for path in module_files():
        if folder_of(path) in DOORS:
            continue
        for name, there, imported in _upward(path, order):
            if not (imported.lazy and (name, there) in ALLOWED):
                wrong.append(f"{name}:{imported.line} imports {'.'.join(imported.target)}, which stands above it")
    assert not wrong, "\n".join(wrong)


def test_listed_exceptions_are_needed() -> None:
    order = folder_order()
    used = {
        (name, there)
        for path in module_files()
        if folder_of(path) not in DOORS
        for name, there, _ in _upward(path, order)
    }
    assert set(ALLOWED) <= used, f"no longer needed: {sorted(set(ALLOWED) - used)}"


@pytest.mark.parametrize("planted", ["from ..pipeline import graph", "import nestpipe_kernels.cli.main"])
def test_an_upward_import_is_seen(tmp_path, monkeypatch, planted) -> None:
    import source_tree

    (tmp_path / "ops").mkdir()
    path = tmp_path / "ops" / "planted.py"
    path.write_text(f"def f():\n    {planted}\n")
    monkeypatch.setattr(source_tree, "PACKAGE", tmp_path)
    assert len(_upward(path, folder_order())) == 1


def _imports_extension(target: tuple[str, ...]) -> bool:
    return any(part in ("_core", "_cuda") for part in target)


def test_only_the_loader_imports_the_extension() -> None:
    wrong = [
        f"{name_in_package(path)}:{imported.line}"
        for path in module_files()
        for imported in imports(path)
        if _imports_extension(imported.target) and name_in_package(path) != "_native.py"
    ]
    wrong += [
        f"{name_in_package(path)}:{node.lineno}"
        for path in module_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant)
        and node.value == "nestpipe_kernels._core"
        and name_in_package(path) != "_native.py"
    ]
    assert not wrong


def test_only_config_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    wrong = []
    for path in module_files():
        if name_in_package(path) == "config.py":
            continue
        for node in ast.walk(parse(path)):
            if (isinstance(node, ast.Attribute) and node.attr in names) or (
                isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
            ):
                wrong.append(f"{name_in_package(path)}:{node.lineno}")
    assert not wrong


def test_no_stage_knows_a_schedule() -> None:
    """Schedules differ by their graphs alone: no stage compares a name or looks at the schedules."""
    from nestpipe_kernels.config import SCHEDULE_NAMES

    wrong = []
    for path in sorted((PACKAGE / "stages").glob("*.py")):
        docstrings = {id(doc) for doc in _docstrings(parse(path))}
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and node.value in SCHEDULE_NAMES and id(node) not in docstrings:
                wrong.append(f"{path.name}:{node.lineno} says {node.value!r}")
            if isinstance(node, ast.Attribute) and node.attr == "schedule":
                wrong.append(f"{path.name}:{node.lineno} reads .schedule")
        wrong += [f"{path.name}:{i.line} imports schedules" for i in imports(path) if "schedules" in i.target]
    assert not wrong


def _docstrings(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _includes(path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("include", 1)[1].strip().strip('<">') for line in lines if line.lstrip().startswith("#include")]


def test_native_code_includes_go_one_way() -> None:
    """Headers and kernels know neither Python nor torch nor the bindings; only the bindings know pybind11."""
    foreign = ("pybind11", "Python.h", "torch/", "ATen/", "c10/")
    wrong = []
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        folder = path.relative_to(CSRC).parts[0]
        for name in _includes(path):
            if any(word in name for word in ("torch/", "ATen/", "c10/")):
                wrong.append(f"{path.relative_to(CSRC)} includes {name}")
            if folder != "bindings" and (name.startswith(foreign) or "bindings" in name):
                wrong.append(f"{path.relative_to(CSRC)} includes {name}")
            own = name.startswith("nestpipe/") or (path.name, name) == ("platform.h", "cuda_runtime.h")
            if folder == "include" and not own and name.endswith(".h"):
                wrong.append(f"public header {path.relative_to(CSRC)} includes private {name}")
    assert not wrong, "\n".join(wrong)
