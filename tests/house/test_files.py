"""Sizes, docstrings and names: what keeps the tree readable."""

from __future__ import annotations

import ast

from source_tree import CSRC, PACKAGE, ROOT, module_files, name_in_package, native_files, parse

AIM, LIMIT = 300, 800


def _lines(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_too_long(record_property) -> None:
    files = [*module_files(), *native_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    sizes = {str(path.relative_to(ROOT)): _lines(path) for path in files}
    long = {name: size for name, size in sorted(sizes.items()) if size > AIM}
    record_property("files over the aim of 300 lines", long)
    print(f"files over {AIM} lines: {long}")
    assert not {name: size for name, size in long.items() if size > LIMIT}


def test_every_file_says_its_job() -> None:
    silent = [name_in_package(p) for p in module_files() if not ast.get_docstring(parse(p))]
    silent += [
        str(p.relative_to(ROOT)) for p in native_files() if not p.read_text(encoding="utf-8").startswith(("//", "/*"))
    ]
    silent += [
        str(p.relative_to(ROOT))
        for folder in ("tests", "examples")
        for p in (ROOT / folder).rglob("*.py")
        if not ast.get_docstring(parse(p))
    ]
    assert not silent


def test_everything_exported_has_a_docstring() -> None:
    """Functions and classes named in a module's `__all__`, and public methods that no documented base describes."""
    classes = {n.name: n for path in module_files() for n in parse(path).body if isinstance(n, ast.ClassDef)}
    missing = []
    for path in module_files():
        tree = parse(path)
        exported = _exported(tree)
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name not in exported:
                continue
            if not ast.get_docstring(node):
                missing.append(f"{name_in_package(path)}:{node.lineno} {node.name}")
            if isinstance(node, ast.ClassDef) and not _is_protocol(node):
                inherited = _described_by_bases(node, classes)
                missing += [
                    f"{name_in_package(path)}:{m.lineno} {node.name}.{m.name}"
                    for m in node.body
                    if isinstance(m, ast.FunctionDef)
                    and not m.name.startswith("_")
                    and m.name not in inherited
                    and _needs_docstring(m)
                ]
    assert not missing, "\n".join(missing)


def _described_by_bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    found: set[str] = set()
    for base in node.bases:
        above = classes.get(ast.unparse(base).rpartition(".")[2])
        if above is not None and above is not node:
            found |= {m.name for m in above.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
            found |= _described_by_bases(above, classes)
    return found


def _exported(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return {e.value for e in ast.walk(node.value) if isinstance(e, ast.Constant)}
    return set()


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def _needs_docstring(method: ast.FunctionDef) -> bool:
    """A body of one line says itself; setters and overloads are described elsewhere."""
    decorators = [ast.unparse(d) for d in method.decorator_list]
    if any(d.endswith(".setter") or d in ("overload", "typing.overload") for d in decorators):
        return False
    return not ast.get_docstring(method) and len(method.body) > 1


def test_every_module_names_its_exports() -> None:
    empty_or_private = {"__main__.py"}
    missing = []
    for path in module_files():
        defines = any(
            isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_") for n in parse(path).body
        )
        if defines and not _exported(parse(path)) and name_in_package(path) not in empty_or_private:
            missing.append(name_in_package(path))
    assert not missing


def test_one_operation_keeps_one_name() -> None:
    """ops/<op>, csrc/*/<op>*.cpp, csrc/include/nestpipe/<op>.h and tests/ops carry the same word."""
    operations = sorted(p.name for p in (PACKAGE / "ops").iterdir() if (p / "__init__.py").is_file())
    assert operations
    sources = [p.stem for p in CSRC.rglob("*.cpp") if p.parent.name != "bindings"]
    headers = {p.stem for p in (CSRC / "include" / "nestpipe").glob("*.h")}
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests" / "ops").glob("test_*.py"))
    wrong = []
    for op in operations:
        if op not in headers:
            wrong.append(f"{op}: no csrc/include/nestpipe/{op}.h")
        if not any(stem == op or stem.startswith(f"{op}_") for stem in sources):
            wrong.append(f"{op}: no csrc/*/{op}*.cpp")
        if f"ops.{op}" not in tests and f"import {op}" not in tests:
            wrong.append(f"{op}: tests/ops does not use it")
        for part in ("reference.py", "native.py"):
            if not (PACKAGE / "ops" / op / part).is_file():
                wrong.append(f"{op}: no ops/{op}/{part}")
    assert not wrong, "\n".join(wrong)


def test_test_files_have_distinct_names() -> None:
    """pytest imports test files by their bare names."""
    names = [p.name for p in (ROOT / "tests").rglob("*.py") if p.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))
