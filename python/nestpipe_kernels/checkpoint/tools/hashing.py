"""The shared hash of csrc/include/nestpipe/hash.h in numpy, so that the tools need neither torch nor the extension."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["hash_keys", "hash_name", "shards_of", "slices_of"]

_WORD = (1 << 64) - 1
_FIRST, _SECOND = 0x9FB21C651E98DF25, 0xD6E8FEB86659FD93
_PIECE = 32768
"""Keys hashed at a time: all passes of the hash over a piece stay in the cache."""


def hash_name(name: str) -> int:
    """The 64-bit word that hashing of a table's keys starts from: FNV-1a over the name's UTF-8 bytes, then mixed."""
    word = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        word = ((word ^ byte) * 0x100000001B3) & _WORD
    word ^= word >> 32
    word = (word * _FIRST) & _WORD
    word ^= word >> 29
    word = (word * _SECOND) & _WORD
    return word ^ (word >> 32)


def hash_keys(table_hash: int, keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64 [n]: hashes of keys int64 [n] of the table whose `hash_name` is `table_hash`."""
    hashes = np.empty(len(keys), np.uint64)
    for first in range(0, len(keys), _PIECE):
        words = hashes[first : first + _PIECE]
        np.bitwise_xor(keys[first : first + _PIECE].view(np.uint64), np.uint64(table_hash), out=words)
        words ^= words >> np.uint64(32)
        words *= np.uint64(_FIRST)
        words ^= words >> np.uint64(29)
        words *= np.uint64(_SECOND)
        words ^= words >> np.uint64(32)
    return hashes


def slices_of(hashes: NDArray[np.uint64]) -> NDArray[np.uint16]:
    """uint16 [n]: virtual slices, bits 48-63."""
    return _word16(hashes, 3)


def shards_of(hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """uint8 [n]: index shards, bits 40-47."""
    found: NDArray[Any] = np.right_shift(hashes, np.uint64(40)).astype(np.uint8)
    return found


def _word16(hashes: NDArray[np.uint64], place: int) -> NDArray[np.uint16]:
    found: NDArray[Any] = np.right_shift(hashes, np.uint64(16 * place)).astype(np.uint16)
    return found
