"""Runs a module as `python -m` does, with the stand-in device and CUDA's kernels in place: for scripts that want a GPU.

python tests/stand_in_python.py -m MODULE ARGUMENT...; STAND_IN_LIBRARY names the extension of kernels for the CPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import emulated_cuda
import fake_npu


def main() -> None:
    if sys.argv[1] == "-c":
        exec(sys.argv[2])
        return
    fake_npu.install()
    fake_npu.use_kernels(emulated_cuda.load(Path(os.environ["STAND_IN_LIBRARY"])))
    assert sys.argv[1] == "-m"
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


main()
