"""The same calls on TorchRec's objects and on ours give the same results. Skips without TorchRec."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

theirs = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")

IDS = torch.tensor([5, -1, 2**62, 3, 4, 5, 6, 7])
WEIGHTS = torch.arange(8) / 8
LENGTHS = torch.tensor([2, 0, 1, 1, 1, 3], dtype=torch.int32)


def same(ours: Any, other: Any) -> None:
    """Equal values, dtypes and structure, for tensors, jagged tensors and containers of them."""
    if isinstance(other, torch.Tensor):
        assert ours.dtype == other.dtype
        assert torch.equal(ours, other)
    elif isinstance(other, dict):
        assert list(ours) == list(other)
        for key in other:
            same(ours[key], other[key])
    elif isinstance(other, list) and other and not isinstance(other[0], int | str):
        assert len(ours) == len(other)
        for a, b in zip(ours, other):
            same(a, b)
    elif isinstance(other, theirs.JaggedTensor | theirs.KeyedJaggedTensor):
        names = ["values", "lengths", "offsets", "weights_or_none"]
        if isinstance(other, theirs.KeyedJaggedTensor):
            names += ["keys", "stride", "length_per_key", "offset_per_key"]
        for name in names:
            same(getattr(ours, name)(), getattr(other, name)())
    else:
        assert ours == other


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keyed_jagged_tensor(weighted: bool, dtype: torch.dtype) -> None:
    weights = WEIGHTS if weighted else None
    lengths = LENGTHS.to(dtype)
    offsets = torch.tensor([0, 2, 2, 3, 4, 5, 8], dtype=dtype)
    pairs = [
        (
            cls.from_lengths_sync(["a", "b"], IDS, lengths, weights),
            cls.from_offsets_sync(["a", "b"], IDS, offsets, weights),
        )
        for cls in (KeyedJaggedTensor, theirs.KeyedJaggedTensor)
    ]
    for ours, other in zip(*pairs):
        same(ours, other)
        same(ours.to_dict(), other.to_dict())
        same(ours["b"], other["b"])
        same(ours.split([1, 1]), other.split([1, 1]))
        same(ours.split([0, 2])[1], other.split([0, 2])[1])
        same(ours.permute([1, 0, 0]), other.permute([1, 0, 0]))
        same(ours.to("cpu"), other.to("cpu"))
        same(KeyedJaggedTensor.from_jt_dict(ours.to_dict()), theirs.KeyedJaggedTensor.from_jt_dict(other.to_dict()))
        same(KeyedJaggedTensor.concat(ours.split([1, 1])), theirs.KeyedJaggedTensor.concat(other.split([1, 1])))
        same(KeyedJaggedTensor.empty_like(ours), theirs.KeyedJaggedTensor.empty_like(other))
    same(KeyedJaggedTensor.empty(weighted), theirs.KeyedJaggedTensor.empty(weighted))


def test_jagged_tensor() -> None:
    dense = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    ours, other = JaggedTensor.from_dense(dense, dense), theirs.JaggedTensor.from_dense(dense, dense)
    for call in ("to_dense", "to_dense_weights", "to_padded_dense", "to_padded_dense_weights"):
        same(getattr(ours, call)(), getattr(other, call)())
    same(ours.to_padded_dense(1, 3.0), other.to_padded_dense(1, 3.0))
    same(ours.to_padded_dense(4), other.to_padded_dense(4))
    rows = torch.arange(6.0).view(3, 2)
    same(
        JaggedTensor(rows, lengths=torch.tensor([1, 2])).to_padded_dense(),
        theirs.JaggedTensor(rows, lengths=torch.tensor([1, 2])).to_padded_dense(),
    )


def test_keyed_tensor() -> None:
    tensors = [torch.arange(4.0).view(2, 2), torch.arange(6.0).view(2, 3)]
    ours, other = (cls.from_tensor_list(["a", "b"], tensors) for cls in (KeyedTensor, theirs.KeyedTensor))
    same(ours.to_dict(), other.to_dict())
    same(ours["b"], other["b"])
    same(ours.offset_per_key(), other.offset_per_key())
    groups = [["b"], ["a", "b"]]
    same(KeyedTensor.regroup([ours], groups), theirs.KeyedTensor.regroup([other], groups))
