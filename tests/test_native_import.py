"""Loading of the extension: lazy, and errors that say what to do."""

from __future__ import annotations

import importlib.machinery
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe_kernels import _native


def test_core_answers_with_the_expected_version():
    assert _native.core().abi_version == _native.ABI_VERSION
    assert _native.core() is _native.core()


def test_importing_the_package_does_not_load_the_extension():
    script = "import sys, nestpipe_kernels, nestpipe_kernels._native; print('nestpipe_kernels._core' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False"


def test_threads_follow_the_environment():
    script = "from nestpipe_kernels._native import core; print(core().num_threads())"
    environment = {"NESTPIPE_THREADS": "3", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert found.stdout.strip() == "3"


def test_fault_45_a_missing_extension_says_what_to_install():
    with pytest.raises(ImportError) as caught:
        _native.import_extension("nestpipe_kernels._absent")
    message = str(caught.value)
    assert "cannot load its native extension _absent" in message
    assert platform.python_version() in message
    assert platform.machine() in message
    assert "no _absent file is installed" in message
    assert "pip install" in message


def test_fault_45_an_extension_of_another_python_is_named(tmp_path, monkeypatch):
    (tmp_path / "_other.cpython-27-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    with pytest.raises(ImportError, match=r"found only _other\.cpython-27-x86_64-linux-gnu\.so"):
        _native.import_extension("nestpipe_kernels._other")


def test_fault_45_a_broken_extension_file_is_reported(tmp_path, monkeypatch):
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    Path(tmp_path, f"broken_extension{suffix}").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"cannot load its native extension broken_extension: .*broken_extension"):
        _native.import_extension("broken_extension")


def test_fault_45_another_version_is_refused(tmp_path, monkeypatch):
    Path(tmp_path, "older_extension.py").write_text("abi_version = 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=rf"expected version {_native.ABI_VERSION} of .*, got 0 from .*older_ext"):
        _native.import_extension("older_extension")


@pytest.mark.parametrize("threads", [0, -3])
def test_fewer_than_one_thread_is_an_error(threads):
    with pytest.raises(ValueError, match=f"threads must be >= 1, got {threads}"):
        _native.core().set_num_threads(threads)
