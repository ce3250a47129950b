"""What the tests of cases on an accelerator run in a process of its own, on the stand-in with CUDA's kernels."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import emulated_cuda
import fake_npu
from nestpipe_kernels.bench.on_device import dedup
from nestpipe_kernels.bench.on_device import small_calls as small_calls_module
from nestpipe_kernels.cli.main import main
from nestpipe_kernels.ops import _triton


def use_cuda_kernels(library: str) -> None:
    """Let the stand-in of this process use CUDA's kernels."""
    fake_npu.install()
    fake_npu.use_kernels(emulated_cuda.load(Path(library)))


def _told(call: Callable[[], int]) -> tuple[int, str, str]:
    """What a call returns, prints and says."""
    out, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(messages):
        code = call()
    return code, out.getvalue(), messages.getvalue()


def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines and messages of `nestpipe bench` with these arguments."""
    code, text, messages = _told(lambda: main(["bench", *arguments]))
    return code, [json.loads(line) for line in text.splitlines()], messages


def small_calls(*arguments: str) -> tuple[int, str, str]:
    """Exit code, text and messages of the calls for compute-sanitizer, where Triton could serve the device, too."""
    with mock.patch.object(_triton, "why_not", return_value=None):
        return _told(lambda: small_calls_module.main(list(arguments)))


def run_with_a_broken_case(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """As `run`, where the case `dedup` raises ValueError("broken")."""
    with mock.patch.object(dedup, "works", side_effect=ValueError("broken")):
        return run(*arguments)
