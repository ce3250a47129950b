"""Loads the native extensions `_core` and `_cuda` at first use; the only module that imports them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

from .config import default_threads

__all__ = ["ABI_VERSION", "core", "cuda", "import_extension", "kernels", "use_kernels"]

ABI_VERSION = 15
"""What `_core.abi_version` must be: csrc/include/nestpipe/abi.h."""


@functools.cache
def core() -> Any:
    """The extension module, loaded and checked once, with its thread count set from the configuration.

    Raises:
        ImportError: the extension is missing, was built for another Python or machine, or belongs to another version
            of this package; the message says what to install.
    """
    module = import_extension("nestpipe_kernels._core")
    module.set_num_threads(default_threads())
    return module


@functools.cache
def cuda() -> Any:
    """The extension of CUDA kernels, or None where this installation has none: CPU wheels do not.

    Loading needs neither a GPU nor a driver. Raises ImportError as `core` for one that does not fit.
    """
    if importlib.util.find_spec("nestpipe_kernels._cuda") is None:
        return None
    return import_extension("nestpipe_kernels._cuda")


_KERNELS: dict[str, Any] = {}
"""What `use_kernels` has set."""


def kernels(device_type: str) -> Any:
    """The module of native kernels for tensors of a device type ("cuda"), or None: there are none."""
    if device_type in _KERNELS:
        return _KERNELS[device_type]
    return cuda() if device_type == "cuda" else None


def use_kernels(device_type: str, module: Any) -> None:
    """Let tensors of a device type use another module of kernels: for tests, which run CUDA's on the CPU.

    None: as if nothing had been set.
    """
    if module is None:
        _KERNELS.pop(device_type, None)
    else:
        _KERNELS[device_type] = module


def import_extension(name: str) -> Any:
    """Import the extension module `name` and compare its version with this package's. Same errors as `core`."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(_advice(name, str(error)), name=name) from error
    found = getattr(module, "abi_version", None)
    if found != ABI_VERSION:
        where = getattr(module, "__file__", "?")
        raise ImportError(
            _advice(name, f"expected version {ABI_VERSION} of the extension, got {found} from {where}"), name=name
        )
    return module


def _advice(name: str, problem: str) -> str:
    """What went wrong, for which Python and machine, and what to do about it."""
    short = name.rpartition(".")[2]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    system = f"{platform.system()} {platform.machine()}"
    built = sorted(path.name for path in Path(__file__).parent.glob(f"{short}*") if path.suffix in (".so", ".pyd"))
    present = f"found only {', '.join(built)}" if built else f"no {short} file is installed"
    return (
        f"nestpipe_kernels: cannot load its native extension {short}: {problem}. "
        f"Running {python} on {system} ({sys.executable}); beside the package, {present}. "
        "Install a wheel for this Python and platform (pip install --force-reinstall nestpipe_kernels), "
        "or rebuild from a source checkout (pip install --no-build-isolation --force-reinstall .)."
    )
