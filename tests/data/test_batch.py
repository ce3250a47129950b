"""Batch: its parts move, select and check together."""

from __future__ import annotations

import pickle

import pytest
import torch

from nestpipe_kernels.data import Batch
from nestpipe_kernels.jagged import KeyedJaggedTensor


def example() -> Batch:
    sparse = KeyedJaggedTensor(["a"], torch.tensor([5, 6, 7]), lengths=torch.tensor([2, 0, 1]))
    return Batch(torch.arange(6.0).view(3, 2), sparse, torch.tensor([0.0, 1.0, 1.0]))


def test_select() -> None:
    part = example().select(torch.tensor([2, 0]))
    assert len(part) == 2
    assert part.dense.tolist() == [[4, 5], [0, 1]]
    assert part.sparse.values().tolist() == [7, 5, 6]
    assert part.labels.tolist() == [1, 0]


@pytest.mark.parametrize("how", ["to", "pin_memory", "pickle"])
def test_fault_46_every_part_moves(how: str) -> None:
    batch = example()
    if how == "pickle":
        moved = pickle.loads(pickle.dumps(batch))
    else:
        moved = batch.to("cpu", non_blocking=True) if how == "to" else batch.pin_memory()
    assert torch.equal(moved.dense, batch.dense)
    assert torch.equal(moved.sparse.values(), batch.sparse.values())
    assert moved.sparse.keys() == ["a"]
    assert torch.equal(moved.labels, batch.labels)


def test_fault_46_to_another_device_moves_every_tensor() -> None:
    moved = example().to("meta")
    tensors = [moved.dense, moved.labels, moved.sparse.values(), moved.sparse.lengths()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_fault_46_every_tensor_is_pinned_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = example()
    batch.sparse._weights = torch.ones(3)
    moved = batch.pin_memory()
    parts = [moved.dense, moved.labels, moved.sparse.values(), moved.sparse.lengths(), moved.sparse.weights()]
    assert all(any(part is tensor for tensor in pinned) for part in parts)
    assert torch.equal(moved.dense, batch.dense)


def test_errors() -> None:
    good = example()
    with pytest.raises(ValueError, match=r"samples differ: \{'dense': 3, 'sparse': 3, 'labels': 2\}"):
        Batch(good.dense, good.sparse, good.labels[:2])
    with pytest.raises(ValueError, match=r"expected dense \[B, n\] and labels \[B\], got \[3\] and \[3\]"):
        Batch(good.labels, good.sparse, good.labels)
    with pytest.raises(IndexError, match=r"index 3 is outside 0 \.\. 2"):
        good.select(torch.tensor([3]))
