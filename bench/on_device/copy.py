"""Case `copy`: a large copy on the device, and between host and device: what the floors of the others stand on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend

__all__ = ["works"]


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """1 GiB on the device, to it and from it, the host's side in pinned memory."""
    size = scaled(parsed, 1 << 30, 1 << 10)
    here, there = torch.ones((2, size), dtype=torch.uint8, device=backend.device)
    host = backend.pinned((size,), torch.uint8)
    host.fill_(1)
    copies = {
        "on the device": (lambda k: here.copy_(there), 2 * size),
        "to the device": (lambda k: here.copy_(host, non_blocking=True), size),
        "to the host": (lambda k: host.copy_(here, non_blocking=True), size),
    }
    for name, (step, moved) in copies.items():
        yield Work({"bytes": size, "way": name}, [Candidate("torch copy_", step)], moved, dtype="uint8")
