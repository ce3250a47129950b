"""The installed package: importing it does no work, its graph needs no torch, and the wheel holds what it should."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest


def _run(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["", ".pipeline.graph", ".pipeline.schedules", ".pipeline.validate", ".trace", ".cli.main"]
)
def test_these_modules_import_no_torch(module: str, tmp_path: Path) -> None:
    code = (
        f"import importlib, sys, threading; importlib.import_module('nestpipe_kernels{module}'); "
        "print('torch' in sys.modules, 'nestpipe_kernels._core' in sys.modules, threading.active_count())"
    )
    assert _run(code, tmp_path) == "False False 1"


def test_importing_the_names_starts_nothing(tmp_path: Path) -> None:
    """All public names loaded: no thread, no native library, no process group, no accelerator context."""
    code = (
        "import nestpipe_kernels as nk, sys, threading, torch\n"
        "[getattr(nk, name) for name in nk.__all__]\n"
        "print(threading.active_count(), 'nestpipe_kernels._core' in sys.modules, "
        "torch.distributed.is_initialized(), torch.cuda.is_initialized())"
    )
    assert _run(code, tmp_path) == "1 False False False"


def _installed_files() -> list[str]:
    try:
        distribution = importlib.metadata.distribution("nestpipe_kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nestpipe_kernels is not installed (it runs from its source folder)")
    return [str(path) for path in distribution.files or []]


def test_wheel_holds_what_it_should() -> None:
    files = _installed_files()
    for needed in ("py.typed", "bench/__init__.py", "bench/train_step.py", "trace/page.html", "cli/main.py"):
        assert f"nestpipe_kernels/{needed}" in files
    assert any(name.startswith("nestpipe_kernels/_core") and name.endswith((".so", ".pyd")) for name in files)
    tops = {name.split("/")[0] for name in files if not name.startswith("..")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nestpipe_kernels"}
    assert not [name for name in files if "test_" in Path(name).name or name.endswith((".cpp", ".h", ".a"))]


def test_console_script_is_declared() -> None:
    _installed_files()
    scripts = importlib.metadata.entry_points(group="console_scripts", name="nestpipe")
    assert [script.value for script in scripts] == ["nestpipe_kernels.cli.main:main"]


def test_installed_version_is_the_package_s() -> None:
    _installed_files()
    import nestpipe_kernels

    assert importlib.metadata.version("nestpipe_kernels") == nestpipe_kernels.__version__
