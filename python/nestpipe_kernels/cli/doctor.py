"""`nestpipe doctor`: versions, devices, the extension, which implementation each operation uses, transports."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nestpipe_kernels import __version__
from nestpipe_kernels.config import default_threads
from nestpipe_kernels.launch.machine import cpu_name, version_of

__all__ = ["add_doctor", "examine"]

OPTIONAL = (
    "triton",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "matplotlib",
    "pandas",
)


def add_doctor(commands: Any) -> None:
    """Add the subcommand `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="say what this installation has and whether it works",
        description="Versions, cores and devices, the native extension, the implementation that each operation uses, "
        "and transports. Exit code 0 if training can work here, else 1.",
    )
    parser.set_defaults(run=_run)


def _run(_parsed: argparse.Namespace, _arguments: Sequence[str]) -> int:
    healthy = True
    for works, topic, text in examine():
        print(f"{'ok  ' if works else 'FAIL'}  {topic:<12} {text}")
        healthy = healthy and works
    print(
        "everything that training needs is here" if healthy else "training cannot work here: see the lines marked FAIL"
    )
    return 0 if healthy else 1


def examine() -> list[tuple[bool, str, str]]:
    """(works, topic, text) of everything looked at; nothing raises."""
    checks: list[tuple[str, Callable[[], list[str]]]] = [
        ("package", lambda: [f"nestpipe_kernels {__version__}, Python {platform.python_version()}"]),
        ("torch", _torch),
        ("cores", lambda: [f"{cpu_name()}, {os.cpu_count()} cores, {default_threads()} threads for native calls"]),
        ("devices", _devices),
        ("extension", _extension),
        ("operations", _operations),
        ("transport", _transport),
        ("optional", lambda: [", ".join(f"{name} {version_of(name) or '-'}" for name in OPTIONAL)]),
    ]
    found = []
    for topic, check in checks:
        try:
            found += [(True, topic, line) for line in check()]
        except Exception as error:
            found.append((False, topic, " ".join(f"{type(error).__name__}: {error}".split())))
    return found


def _torch() -> list[str]:
    import numpy as np
    import torch

    return [f"torch {torch.__version__}, numpy {np.__version__}"]


def _devices() -> list[str]:
    lines = ["cpu", *_cuda_devices()]
    npu = _npus()
    if npu:
        lines.append(npu)
    return ["; ".join(lines)]


def _cuda_devices() -> list[str]:
    """CUDA devices, or why one that torch was built for cannot be used."""
    import torch

    from nestpipe_kernels.device import backend_for

    if torch.version.cuda is None:
        return ["no CUDA: this torch was built without it"]
    try:
        backend_for("cuda")
    except RuntimeError as error:
        return [f"no CUDA: {error}"]
    names = [f"cuda:{k} ({torch.cuda.get_device_name(k)})" for k in range(torch.cuda.device_count())]
    nccl = "nccl" if torch.distributed.is_nccl_available() else "no nccl: rows go through the host"
    return [f"{', '.join(names)}, CUDA {torch.version.cuda}, {nccl}"]


def _npus() -> str:
    """What torch_npu, if it is installed, finds."""
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        return ""
    from nestpipe_kernels.device import backend_for

    try:
        backend_for("npu")
    except RuntimeError as error:
        return f"no NPU: {error}"
    import torch

    module = vars(torch)["npu"]
    names = ", ".join(f"npu:{k} ({module.get_device_name(k)})" for k in range(module.device_count()))
    carried = "hccl" in torch.distributed.Backend.backend_list
    version = getattr(sys.modules["torch_npu"], "__version__", "of unknown version")
    return f"{names}, torch_npu {version}, {'hccl' if carried else 'no hccl: rows go through the host'}"


def _extension() -> list[str]:
    from nestpipe_kernels._native import ABI_VERSION, core, cuda

    module = core()
    built = getattr(module, "compiler", "unknown compiler")
    kernels = cuda()
    lines = [f"_core interface {ABI_VERSION}, {built}, {module.num_threads()} threads, {module.__file__}"]
    if kernels is None:
        return [*lines, "no CUDA kernels in this installation"]
    _, supported, version, problem = kernels.driver()
    state = problem or f"the driver supports up to {supported // 1000}.{supported % 1000 // 10}"
    return [*lines, f"_cuda built with CUDA {version // 1000}.{version % 1000 // 10}; {state}"]


def _operations() -> list[str]:
    """For each operation: the implementation that automatic choice takes, and the others."""
    import torch

    from nestpipe_kernels import ops
    from nestpipe_kernels.ops import _registry as registry

    on_cuda = []
    lines: dict[str, list[str]] = {}
    for info in pkgutil.iter_modules(ops.__path__):
        if not info.ispkg:
            continue
        package = importlib.import_module(f"{ops.__name__}.{info.name}")
        parts = sorted({m.name for m in pkgutil.iter_modules(package.__path__)} & {"native", "reference", "triton"})
        functions = [getattr(package, name) for name in package.__all__]
        chosen = sorted(
            {
                str(inspect.signature(f).parameters["implementation"].default or "native")
                for f in functions
                if inspect.isfunction(f) and "implementation" in inspect.signature(f).parameters
            }
        )
        if hasattr(package, "ON_ACCELERATORS") and torch.cuda.is_available():
            name = registry.chosen(info.name, torch.device("cuda"), None, package.ON_ACCELERATORS)
            on_cuda.append(f"{info.name} {name}")
        others = [part for part in parts if part not in chosen]
        lines.setdefault(f"{'/'.join(chosen)} (also {', '.join(others)})", []).append(info.name)
    found = [f"{how}: {', '.join(names)}" for how, names in lines.items()]
    return [*found, f"on CUDA devices: {', '.join(on_cuda)}"] if on_cuda else found


def _transport() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("torch was built without gloo, so only one process can train; install a torch that has it")
    return ["gloo (between processes), none (one process)"]
