"""README and docs: what they tell a reader to run exists and runs; links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from source_tree import ROOT

from nestpipe_kernels.cli.main import main

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "bench" / "README.md",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_has_its_examples() -> None:
    assert len(_examples()) == 2
    assert len(_examples()[0].strip().splitlines()) <= 12


@pytest.mark.parametrize("number", [0, 1])
def test_readme_examples_run(tmp_path: Path, monkeypatch, capsys, number: int) -> None:
    """As scripts of their own, but in this process: importing torch and its compiler anew takes longer than both."""
    (tmp_path / "example.py").write_text(_examples()[number])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 10


def _commands() -> list[list[str]]:
    """Arguments of every `nestpipe ...` that a document shows in code."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        spans = re.findall(r"`nestpipe ([a-z][^`]*)`", text) + re.findall(r"^(?:    )?nestpipe ([a-z].*)$", text, re.M)
        found += [span.split("#")[0].split() for span in spans]
    return found


def test_commands_in_documents_parse(monkeypatch) -> None:
    from nestpipe_kernels.cli import bench, checkpoint, doctor, options

    ran = []
    for module in (bench, checkpoint, doctor, options):
        monkeypatch.setattr(module, "_run", lambda parsed, arguments: ran.append(arguments) or 0)
    commands = [c for c in _commands() if not any(w.isupper() or "[" in w for w in c)]
    assert len(commands) >= 6
    for command in commands:
        if command == ["bench"]:
            continue
        assert main(command) == 0, command
    assert len(ran) >= 6


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"venv", "build", "train", "test", "lint", "soak", "sanitize", "clean"} <= targets
    for document in DOCUMENTS:
        for target in re.findall(r"`make ([a-z0-9]+)[^`]*`", document.read_text(encoding="utf-8")):
            assert target in targets, f"{document.name}: make {target}"


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def _anchors(document: Path) -> set[str]:
    """Of its headings, as they are made on the web: lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_into_documents_lead_to_a_heading() -> None:
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^):]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
            target = document.parent / link if link else document
            assert anchor in _anchors(target), f"{document.name}: {link}#{anchor}"
