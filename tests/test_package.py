"""The top-level package: light to import, and every public name resolves."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nestpipe_kernels


def test_importing_loads_no_torch() -> None:
    code = "import nestpipe_kernels, sys; assert 'torch' not in sys.modules; print(nestpipe_kernels.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == nestpipe_kernels.__version__


@pytest.mark.parametrize("name", nestpipe_kernels.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(nestpipe_kernels, name) is getattr(nestpipe_kernels, name)
    assert name in dir(nestpipe_kernels)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'nestpipe_kernels' has no attribute 'nothing'"):
        _ = nestpipe_kernels.nothing
