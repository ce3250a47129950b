"""A digest of a batch's contents, to see whether a loader gives the same batch again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture.tree import Path, format_path, is_jagged, is_keyed_jagged, is_keyed_tensor, walk

__all__ = ["fingerprint"]


def fingerprint(batch: Any) -> str:
    """SHA-256 over all tensors, arrays, numbers and strings of a batch with their paths; other leaves do not count."""
    digest = hashlib.sha256()
    for path, value in walk(batch, _cycle):
        for part in _parts(value):
            digest.update(f"{format_path(path)} {part[0]}\n".encode(errors="replace"))
            digest.update(part[1])
    return digest.hexdigest()


def _parts(value: Any) -> list[tuple[str, Any]]:
    """(what it is, its bytes) of a leaf."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        data = dense.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
        return [(f"{value.dtype} {list(value.shape)}", data.data)]
    if is_keyed_jagged(value) or is_jagged(value):
        held = [value.values(), value.lengths(), value.weights_or_none()]
        names = [(str(list(value.keys())), b"")] if is_keyed_jagged(value) else []
        return names + [part for tensor in held if tensor is not None for part in _parts(tensor)]
    if is_keyed_tensor(value):
        return [(str(list(value.keys())), b""), *_parts(value.values())]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [(f"{value.dtype} {list(value.shape)}", np.ascontiguousarray(value).tobytes())]
    if isinstance(value, str | bytes | bool | int | float | complex | np.generic):
        return [(type(value).__name__, repr(value).encode(errors="replace"))]
    return []


def _cycle(path: Path) -> Exception:
    return ValueError(f"{format_path(path)} contains itself")
