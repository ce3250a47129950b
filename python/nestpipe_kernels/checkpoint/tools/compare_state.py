"""Everything of two checkpoints that is not rows: trees in the manifest, and the tensors that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nestpipe_kernels.checkpoint.files import TensorRecord, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest

__all__ = ["compare_trees", "leaves"]

_AT_ONCE = 1 << 20
"""Numbers of a tensor that are compared at once."""


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in a tree of the manifest that is no object or list; tags stay whole."""
    if isinstance(tree, Mapping) and tree and not any(str(key).startswith("$") for key in tree):
        for key, value in sorted(tree.items()):
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, Mapping) and set(tree) == {"$tuple"}:
        yield from leaves(tree["$tuple"], path)
    elif isinstance(tree, Mapping) and len(tree) == 1 and set(tree) <= {"$dict", "$counter"}:
        for key, value in next(iter(tree.values())):
            yield from leaves(value, f"{path}[{_plain(key)}]")
    elif isinstance(tree, list) and tree:
        for position, value in enumerate(tree):
            yield from leaves(value, f"{path}[{position}]")
    else:
        yield path, tree


def compare_trees(
    what: str,
    first: tuple[Path, Manifest, Any, str],
    second: tuple[Path, Manifest, Any, str],
) -> list[str]:
    """One line for each difference.

    Args:
        what: the lines start with it.
        first, second: directory, manifest, the tree (or None), and the name of the file that holds its tensors.

    Raises:
        CheckpointError: a file is damaged. OSError: it could not be read.
    """
    ours, theirs = dict(leaves(first[2] or {})), dict(leaves(second[2] or {}))
    out = []
    for path in sorted(set(ours) | set(theirs)):
        if path not in theirs:
            out.append(f"{what} {path}: only in A ({_plain(ours[path])})")
        elif path not in ours:
            out.append(f"{what} {path}: only in B ({_plain(theirs[path])})")
        else:
            text = _compare_leaf(ours[path], theirs[path], first, second)
            if text:
                out.append(f"{what} {path}: {text}")
    return out


def _compare_leaf(
    a: Any, b: Any, first: tuple[Path, Manifest, Any, str], second: tuple[Path, Manifest, Any, str]
) -> str | None:
    names = _tensor_name(a), _tensor_name(b)
    if names[0] is None or names[1] is None:
        return None if a == b and type(a) is type(b) else f"{_plain(a)} / {_plain(b)}"
    records = _record(first, names[0]), _record(second, names[1])
    if records[0] is None or records[1] is None:
        return None if a == b else f"{_plain(a)} / {_plain(b)}"
    if (records[0].dtype, records[0].shape) != (records[1].dtype, records[1].shape):
        return " / ".join(f"{r.dtype} {list(r.shape)}" for r in records if r is not None)
    if records[0].sha256 == records[1].sha256:
        return None
    return _compare_tensors(first, names[0], second, names[1])


def _tensor_name(leaf: Any) -> str | None:
    if isinstance(leaf, Mapping) and len(leaf) == 1:
        tag, name = next(iter(leaf.items()))
        if tag in ("$tensor", "$array") and isinstance(name, str):
            return name
    return None


def _record(side: tuple[Path, Manifest, Any, str], name: str) -> TensorRecord | None:
    record = side[1].files.get(side[3])
    return None if record is None else record.tensors.get(name)


def _compare_tensors(
    first: tuple[Path, Manifest, Any, str], name_first: str, second: tuple[Path, Manifest, Any, str], name_second: str
) -> str:
    """How many elements differ, the first of them, and the largest difference."""
    differ, at, examples, largest, size, element = 0, 0, "", 0.0, 0, 1
    with (
        open_tensor_file(first[0] / first[3], first[1].files[first[3]]) as a,
        open_tensor_file(second[0] / second[3], second[1].files[second[3]]) as b,
    ):
        dtype = a.regions[name_first].dtype
        element, size = dtype.itemsize, a.regions[name_first].size
        for piece_a, piece_b in zip(a.pieces(name_first), b.pieces(name_second), strict=True):
            raw_a, raw_b = (torch.frombuffer(p, dtype=torch.uint8).reshape(-1, element) for p in (piece_a, piece_b))
            unequal = (raw_a != raw_b).any(1)
            if bool(unequal.any()):
                x, y = (torch.frombuffer(p, dtype=dtype) for p in (piece_a, piece_b))
                if not differ:
                    k = int(unequal.to(torch.uint8).argmax())
                    examples = f"element {at + k}: {_number(x[k].item())} / {_number(y[k].item())}"
                differ += int(unequal.sum())
                for start in range(0, len(x), _AT_ONCE):
                    distance = (x[start : start + _AT_ONCE].double() - y[start : start + _AT_ONCE].double()).abs()
                    finite = distance[distance.isfinite()]
                    largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
            at += len(raw_a)
    return f"{differ:,} of {size // element:,} elements differ, by {largest:.3g} at most; {examples}"


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> str:
    name = _tensor_name(value)
    if name is not None:
        return "a tensor"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."
