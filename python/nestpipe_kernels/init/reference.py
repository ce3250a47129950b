"""Reference of the initial values in numpy: the same integers and doubles, in the same order, as native code."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "constant_values",
    "hash_keys",
    "hash_name",
    "normal_values",
    "truncated_normal_values",
    "uniform_values",
    "words",
]

Words = NDArray[np.uint64]
Doubles = NDArray[np.float64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_ATTEMPTS = 4096
_MULTIPLIERS = (0x9FB21C651E98DF25, 0xD6E8FEB86659FD93)


def mix64(x: Words) -> Words:
    """The bijection of 64-bit words that hashing and the generator share."""
    first, second = (np.uint64(m) for m in _MULTIPLIERS)
    x = (x ^ (x >> np.uint64(32))) * first
    x = (x ^ (x >> np.uint64(29))) * second
    return x ^ (x >> np.uint64(32))


def _mix_int(x: int) -> int:
    return int(mix64(np.array([x & _MASK], dtype=np.uint64))[0])


def hash_name(name: str) -> int:
    """A table's hash, in [0, 2^64): FNV-1a over the UTF-8 name, mixed."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & _MASK
    return _mix_int(h)


def hash_keys(table_name: str, keys: NDArray[np.int64]) -> Words:
    """uint64 [n]: hash of (table, key) that owners, slices and shards are taken from."""
    return mix64(np.ascontiguousarray(keys, dtype=np.int64).view(np.uint64) ^ np.uint64(hash_name(table_name)))


def words(seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> Words:
    """uint64 [n, dim]: the generator's word for each key and element."""
    stream = mix64(np.uint64(_mix_int(seed + _STEP)) + hash_keys(table_name, keys))
    counters = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_STEP)
    return mix64(stream[:, None] + counters[None, :])


def constant_values(keys: NDArray[np.int64], dim: int, value: float) -> NDArray[np.float32]:
    """float32 [n, dim], all equal."""
    return np.full((len(keys), dim), value, dtype=np.float32)


def uniform_values(
    seed: int, table_name: str, keys: NDArray[np.int64], dim: int, low: float, high: float
) -> NDArray[np.float32]:
    """float32 [n, dim]: low + (high - low) * u with u of 53 bits."""
    u = (words(seed, table_name, keys, dim) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (low + (high - low) * u).astype(np.float32)


def normal_values(
    seed: int, table_name: str, keys: NDArray[np.int64], dim: int, mean: float, std: float
) -> NDArray[np.float32]:
    """float32 [n, dim]: mean + std * z with z from one word by Box and Muller's transform."""
    z = _standard_normal(words(seed, table_name, keys, dim))
    return (mean + std * z).astype(np.float32)


def truncated_normal_values(
    seed: int, table_name: str, keys: NDArray[np.int64], dim: int, parameters: tuple[float, float, float, float]
) -> NDArray[np.float32]:
    """float32 [n, dim]: mean + std * z, z the first inside [low, high] of the normal values of the words
    w, mix64(w + step), mix64(w + 2 step), ... where w is the element's own word; the nearest bound after 4,096."""
    mean, std, low, high = parameters
    word = words(seed, table_name, keys, dim).ravel()
    z = _standard_normal(word)
    for k in range(1, _ATTEMPTS):
        outside = np.flatnonzero(~((z >= low) & (z <= high)))
        if not len(outside):
            break
        z[outside] = _standard_normal(mix64(word[outside] + np.uint64((k * _STEP) & _MASK)))
    z = np.where(z < low, low, np.where(z > high, high, z))
    return (mean + std * z).astype(np.float32).reshape(len(keys), dim)


def _standard_normal(word: Words) -> Doubles:
    u = ((word >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    v = (word & np.uint64(0x7FFFFFFF)).astype(np.float64) * 2.0**-31
    z = np.sqrt(-2.0 * natural_log(u)) * cosine(v * (math.pi / 2))
    return np.where(word & np.uint64(0x80000000), -z, z)


def natural_log(x: Doubles) -> Doubles:
    """log of normal positive doubles, by the series of 2 atanh((m - 1) / (m + 1)) with x = m * 2^e."""
    bits = np.ascontiguousarray(x).view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.float64) - 1023.0
    mantissa = ((bits & np.uint64(0x000FFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000)).view(np.float64)
    large = mantissa >= 1.4142135623730951
    mantissa = np.where(large, mantissa * 0.5, mantissa)
    exponent = np.where(large, exponent + 1.0, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.zeros_like(s)
    for k in range(9, -1, -1):
        series = series * square + 1.0 / (2.0 * k + 1.0)
    return np.asarray(2.0 * (s * series) + exponent * 0.6931471805599453)


def cosine(x: Doubles) -> Doubles:
    """cos on [0, pi/2], by its Taylor series, nested."""
    square = x * x
    series = np.ones_like(x)
    for k in range(11, 0, -1):
        series = 1.0 - square * (1.0 / ((2.0 * k - 1.0) * (2.0 * k))) * series
    return series
