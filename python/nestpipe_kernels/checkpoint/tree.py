"""Nested state as JSON and tensors: dicts, lists, numbers, strings and bytes in the manifest, tensors in a file.

Tags stand for what JSON has no word for: {"$tensor": name}, {"$array": name} (a numpy array), {"$tuple": [...]},
{"$dict": [[key, value], ...]} for keys that are no strings, {"$counter": [[key, count], ...]}, {"$float": "nan" |
"inf" | "-inf"}, {"$bytes": base64}. Nothing else can be saved or is accepted, so that loading runs no code.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

__all__ = ["Ordered", "decode", "encode"]

_MAX_DEPTH = 64
_MAX_BITS = 8192
"""Of an integer: Python parses no decimal numbers of more than 4,300 digits."""
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SAVED_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


@dataclass(frozen=True)
class Ordered:
    """State of somebody else, in which the order of keys may matter.

    A manifest sorts keys; in here dicts whose keys are not sorted are encoded as lists of pairs.
    """

    value: Any


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors are copied to the CPU and added to `tensors` under names that tell where they were.

    Args:
        value: dicts, lists, tuples, None, bool, int, float, str, bytes, numpy scalars, tensors, numpy arrays, nested.
        path: what `value` is, for names and messages.
        tensors: name -> tensor, added to.

    Raises:
        CheckpointError: something else, a tensor that files do not hold, or more than 64 levels; names its path.
    """
    return _encode(value, path, _Target(tensors), 0)


def decode(tree: Any, path: str, fetch: Callable[[str], Tensor]) -> Any:
    """The value that `encode` was given. `fetch` gives a tensor by its name.

    Raises:
        CheckpointError: no tree that `encode` could have made; names the path.
    """
    return _decode(tree, path, fetch, 0)


@dataclass(frozen=True)
class _Target:
    tensors: dict[str, Tensor]
    ordered: bool = False


def _encode(value: Any, path: str, into: _Target, depth: int) -> Any:
    if isinstance(value, Ordered):
        return _encode(value.value, path, _Target(into.tensors, ordered=True), depth)
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"checkpoint: {path[:200]} lies more than {_MAX_DEPTH} levels deep; save flatter state")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int | np.integer) and not isinstance(value, np.timedelta64):
        return _integer(int(value), path)
    if isinstance(value, float | np.floating):
        return _float(float(value))
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Tensor):
        return {"$tensor": _add(value, path, into.tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _add(_from_array(value, path), path, into.tensors)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, into, depth)
    if isinstance(value, tuple) and (not hasattr(value, "_fields")):
        return {"$tuple": [_encode(item, f"{path}[{k}]", into, depth + 1) for k, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, f"{path}[{k}]", into, depth + 1) for k, item in enumerate(value)]
    raise CheckpointError(
        f"checkpoint: {path} is {_article(type(value).__name__)}, which cannot be saved without pickle; state must be "
        "made of tensors, numpy arrays, numbers, strings, bytes, None, lists, tuples and dicts"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, into: _Target, depth: int) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and into.ordered:
        plain = list(value) == sorted(value)
    if plain and not isinstance(value, Counter):
        return {_text(key, path): _encode(item, f"{path}.{key}", into, depth + 1) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        where = f"{path}[{key!r}]"
        if isinstance(key, Tensor | np.ndarray):
            raise CheckpointError(f"checkpoint: {path} has a tensor as a key of a dict, which cannot be saved")
        pairs.append([_encode(key, where, into, depth + 1), _encode(item, where, into, depth + 1)])
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _add(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    if tensor.is_meta:
        raise CheckpointError(f"checkpoint: {path} is a tensor on the meta device, which has no data to save")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _SAVED_DTYPES:
        raise CheckpointError(
            f"checkpoint: {path} is a tensor of {tensor.dtype} and {tensor.layout}, which files do not hold; save it "
            "as a dense tensor of integers, bool, or floats of 16, 32 or 64 bits"
        )
    name = base = re.sub(r"[^A-Za-z0-9_.\-]+", "_", path)[:200].strip("_") or "tensor"
    number = 1
    while name in tensors:
        number += 1
        name = f"{base}~{number}"
    tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return name


def _from_array(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    except (TypeError, ValueError):  # ValueError: another byte order
        raise CheckpointError(
            f"checkpoint: {path} is a numpy array of {array.dtype}, which files do not hold; convert it"
        ) from None


def _integer(value: int, path: str) -> int:
    if value.bit_length() > _MAX_BITS:
        raise CheckpointError(
            f"checkpoint: {path} is a number of {value.bit_length()} bits, {_MAX_BITS} are the limit: save it as bytes"
        )
    return value


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"checkpoint: {path} holds a string that is no valid text: {value[:50]!r}") from None
    return str(value)


def _decode(tree: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"checkpoint: {path[:200]} lies more than {_MAX_DEPTH} levels deep")
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, list):
        return [_decode(item, f"{path}[{k}]", fetch, depth + 1) for k, item in enumerate(tree)]
    if not isinstance(tree, dict):
        raise CheckpointError(f"checkpoint: {path} is {_article(type(tree).__name__)}, which no manifest holds")
    tag = next((key for key in tree if isinstance(key, str) and key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, f"{path}.{key}", fetch, depth + 1) for key, item in tree.items()}
    if len(tree) != 1 or tag not in _DECODERS:
        raise CheckpointError(f"checkpoint: {path} has the unknown tag {tag!r} or other keys beside it")
    return _DECODERS[tag](tree[tag], path, fetch, depth + 1)


def _decode_tensor(name: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> Tensor:
    if not isinstance(name, str):
        raise CheckpointError(
            f"checkpoint: {path}: a tensor's name must be a string, got {_article(type(name).__name__)}"
        )
    return fetch(name)


def _decode_array(name: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> np.ndarray[Any, Any]:
    tensor = _decode_tensor(name, path, fetch, depth)
    if tensor.dtype == torch.bfloat16:
        raise CheckpointError(f"checkpoint: {path}: numpy has no bfloat16")
    return tensor.numpy()


def _decode_tuple(items: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> tuple[Any, ...]:
    if not isinstance(items, list):
        raise CheckpointError(f"checkpoint: {path}: $tuple must hold a list, got {_article(type(items).__name__)}")
    return tuple(_decode(item, f"{path}[{k}]", fetch, depth) for k, item in enumerate(items))


def _decode_dict(pairs: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> dict[Any, Any]:
    result = {}
    if not isinstance(pairs, list):
        raise CheckpointError(f"checkpoint: {path}: $dict must hold a list, got {_article(type(pairs).__name__)}")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CheckpointError(f"checkpoint: {path}: $dict must hold pairs, got {str(pair)[:100]}")
        key = _decode(pair[0], f"{path} (key)", fetch, depth)
        try:
            hash(key)
        except TypeError:
            raise CheckpointError(f"checkpoint: {path}: {_article(type(key).__name__)} cannot be a key") from None
        result[key] = _decode(pair[1], f"{path}[{key!r}]"[:500], fetch, depth)
    return result


def _decode_counter(pairs: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> Counter[Any]:
    return Counter(_decode_dict(pairs, path, fetch, depth))


def _decode_float(word: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> float:
    if not isinstance(word, str) or word not in _FLOATS:
        raise CheckpointError(f"checkpoint: {path}: $float must be one of {', '.join(_FLOATS)}, got {str(word)[:50]!r}")
    return _FLOATS[word]


def _decode_bytes(text: Any, path: str, fetch: Callable[[str], Tensor], depth: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise CheckpointError(f"checkpoint: {path}: $bytes holds no base64") from None


_DECODERS: dict[str, Callable[[Any, str, Callable[[str], Tensor], int], Any]] = {
    "$tensor": _decode_tensor,
    "$array": _decode_array,
    "$tuple": _decode_tuple,
    "$dict": _decode_dict,
    "$counter": _decode_counter,
    "$float": _decode_float,
    "$bytes": _decode_bytes,
}


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
