"""CUDA as a device: which ones are refused, with which words; nothing here needs one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nestpipe_kernels import _native
from nestpipe_kernels.device import backend_for


def some_cuda(
    monkeypatch: pytest.MonkeyPatch,
    devices: int = 1,
    capability: tuple[int, int] = (9, 0),
    driver: Any = (1, 13000, 13000, ""),
) -> None:
    """Let torch say that it has CUDA, and the extension what the driver is; None: there is no extension."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    module = None if driver is None else SimpleNamespace(driver=lambda: driver, architectures="80-real 90-real 100a")
    monkeypatch.setattr(_native, "cuda", lambda: module)


def refusal(device: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        backend_for(device)
    return str(caught.value)


def test_cuda_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    some_cuda(monkeypatch, devices=2)
    backend = backend_for("cuda:1")
    assert (backend.device, backend.collectives, backend.has_streams) == (torch.device("cuda", 1), "nccl", True)
    assert backend_for("cuda").device == torch.device("cuda", 0)


def test_cuda_device_needs_a_torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal("cuda") == (
        f"device 'cuda' needs a torch that was built with CUDA, this is torch {torch.__version__}; install one that "
        "is, or use device 'cpu'"
    )


def test_cuda_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    some_cuda(monkeypatch, devices=0, driver=(0, 0, 13000, "no CUDA-capable device is detected"))
    assert refusal("cuda") == (
        "device 'cuda' is not here: torch sees no CUDA device (no CUDA-capable device is detected; torch "
        f"{torch.__version__} is built for CUDA 13.0); use device 'cpu'"
    )
    some_cuda(monkeypatch)
    assert refusal("cuda:1") == "device 'cuda:1' is not here: torch sees 1 CUDA devices; use one of them, or 'cpu'"


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_cuda_device_that_the_kernels_are_not_for(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    some_cuda(monkeypatch, capability=capability)
    assert refusal("cuda") == (
        f"device 'cuda:0' (Some GPU) has compute capability {capability[0]}.{capability[1]}, and the CUDA kernels of "
        "this installation are for 8.0, 9.0, 10.0 and later minor versions; build from source with "
        "CMAKE_CUDA_ARCHITECTURES for it, or use another device"
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3)])
def test_cuda_device_that_the_kernels_are_for(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    some_cuda(monkeypatch, capability=capability)
    assert backend_for("cuda").kind == "cuda"


def test_cuda_device_with_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    some_cuda(monkeypatch, driver=(0, 12040, 13000, "CUDA driver version is insufficient for CUDA runtime version"))
    assert refusal("cuda") == (
        "device 'cuda': the CUDA kernels of nestpipe_kernels cannot run here: CUDA driver version is insufficient for "
        "CUDA runtime version (they are built with CUDA 13.0, the driver supports up to 12.4); update the driver, "
        "install a wheel for an older CUDA, or use device 'cpu'"
    )


def test_cuda_device_without_kernels_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    some_cuda(monkeypatch, driver=None)
    with pytest.warns(UserWarning, match="this installation of nestpipe_kernels has no CUDA kernels"):
        assert backend_for("cuda").device == torch.device("cuda", 0)
