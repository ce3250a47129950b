"""Storage types in plain PyTorch and numpy: the same bits as native code.

To nearest is torch's own conversion; a NaN keeps its sign and leading bits and becomes quiet, where torch's differ by
instruction set. Stochastic rounding of an element x with its random 64-bit word r: of the bits of |x| beyond the last
kept place, d in number, the sum with the d high bits of r is cut off. Where rounding to nearest gives an infinity or a
NaN, that is the result; otherwise the result is at most the largest finite number. float16 below 2^-14 has its last
place at 2^-24, so d grows from 13; below 2^-64 the result is zero.

The words: element e of row (table, key) at a step takes word e of the stream `mix64(s + step)`, where s is the stream
of initial values for the seed `table_seed ^ 0xD1B54A32D192ED03` (csrc/include/nestpipe/init.h).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...types import DataType
from ..owners.reference import mix64
from .layout import RowStorage, put_elements

__all__ = ["pack_embeddings", "random_words", "round_stochastically", "round_to_nearest", "widen"]

Words = NDArray[np.uint64]

ROUNDING = 0xD1B54A32D192ED03 - (1 << 64)
WORD_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
INFINITY = {DataType.FP16: 0x7C00, DataType.BF16: 0x7F80}


def widen(elements: Tensor) -> Tensor:
    """float32 of the same shape, exactly; a NaN keeps its bits."""
    if elements.dtype == torch.float32:
        return elements.clone()
    bits = elements.view(torch.int16).to(torch.int32) & 0xFFFF
    if elements.dtype == torch.bfloat16:
        return (bits << 16).view(torch.float32)
    special = ((bits & 0x8000) << 16) | 0x7F800000 | ((bits & 0x3FF) << 13)
    wide = elements.to(torch.float32).view(torch.int32)
    return torch.where((bits & 0x7C00) == 0x7C00, special, wide).view(torch.float32)


def round_to_nearest(values: Tensor, data_type: DataType) -> Tensor:
    """Elements of the storage type, of the same shape as values float32."""
    if data_type is DataType.FP32:
        return values.clone()
    bits = values.contiguous().view(torch.int32)
    if data_type is DataType.BF16:
        nan = (bits >> 16) | 0x40
    else:
        nan = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
    rounded = values.contiguous().to(data_type.torch_dtype).view(torch.int16)
    return torch.where(values.isnan(), nan.to(torch.int16), rounded).view(data_type.torch_dtype)


def random_words(storage: RowStorage, step: int, dim: int) -> Words:
    """uint64 [U, dim]: the words of the rows' elements at a step."""
    assert storage.keys is not None and storage.tables is not None
    assert storage.table_hashes is not None and storage.table_seeds is not None
    tables = storage.tables.to(torch.int64)
    seeds = mix64((storage.table_seeds[tables] ^ ROUNDING) + WORD_STEP)
    streams = mix64(mix64(seeds + mix64(storage.keys ^ storage.table_hashes[tables])) + step)
    words = mix64(streams[:, None] + torch.arange(1, dim + 1)[None, :] * WORD_STEP)
    return np.asarray(words.numpy()).view(np.uint64)


def round_stochastically(values: Tensor, data_type: DataType, words: Words) -> Tensor:
    """Elements of the storage type [U, dim] of values float32 [U, dim] with random words uint64 [U, dim]."""
    every = values.contiguous().numpy().view(np.uint32).astype(np.uint64)
    sign, bits = (every >> np.uint64(16)) & np.uint64(0x8000), every & np.uint64(0x7FFFFFFF)
    if data_type is DataType.BF16:
        kept = _round_up_at_random(bits, np.full_like(bits, 16), words)
    else:
        exponent = np.maximum(bits >> np.uint64(23), np.uint64(1))
        normal = bits >> np.uint64(23) != 0
        mantissa = (bits & np.uint64(0x7FFFFF)) | np.where(normal, np.uint64(1 << 23), np.uint64(0))
        large = bits >= np.uint64(113 << 23)
        dropped = np.where(large, np.uint64(13), np.uint64(126) - np.minimum(exponent, np.uint64(112)))
        start = np.where(large, bits - np.uint64(112 << 23), mantissa)
        gone = dropped > np.uint64(63)
        kept = _round_up_at_random(start, np.where(gone, np.uint64(63), dropped), words)
        kept = np.where(gone, np.uint64(0), kept)
    infinity = INFINITY[data_type]
    kept = np.minimum(kept, np.uint64(infinity - 1)) | sign
    stochastic = torch.from_numpy(kept.astype(np.uint16).view(np.int16))
    nearest = round_to_nearest(values, data_type).view(torch.int16)
    settled = (nearest & 0x7FFF) >= infinity
    return torch.where(settled, nearest, stochastic).view(data_type.torch_dtype)


def pack_embeddings(values: Tensor, rows: Tensor, data_type: DataType, rounding: RowStorage | None, step: int) -> None:
    """Arguments as checked by the package."""
    if rounding is None or rounding.keys is None:
        put_elements(rows, round_to_nearest(values, data_type))
    else:
        words = random_words(rounding, step, values.shape[1])
        put_elements(rows, round_stochastically(values.cpu(), data_type, words).to(values.device))


def _round_up_at_random(bits: Words, dropped: Words, words: Words) -> Words:
    return np.asarray((bits + (words >> (np.uint64(64) - dropped))) >> dropped)
