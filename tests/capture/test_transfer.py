"""Batches of any class are moved and pinned part by part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nestpipe_kernels.capture import move_batch, pin_batch
from nestpipe_kernels.jagged import KeyedJaggedTensor


@dataclasses.dataclass(frozen=True)
class Inner:
    ids: torch.Tensor
    name: str


class Custom:
    """Has no method `to` and no method `pin_memory`."""

    def __init__(self) -> None:
        self.kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
        self.inner = [Inner(torch.arange(2), "x")]


def test_fault_46_custom_batch_class_is_moved() -> None:
    batch = Custom()
    moved = move_batch(batch, "meta")
    assert isinstance(moved, Custom)
    assert moved.inner[0].ids.device.type == "meta"
    assert moved.inner[0].name == "x"
    assert moved.kjt.values().device.type == "meta"
    assert batch.inner[0].ids.device.type == "cpu"


def test_fault_46_custom_batch_class_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.numel())
        return tensor.clone()

    batch = Custom()
    assert pin_batch(batch) is batch or torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    result = pin_batch(batch)
    assert isinstance(result, Custom)
    assert result.inner[0].ids is not batch.inner[0].ids
    assert sorted(pinned) == [2, 2, 3]


def test_cycles_are_named() -> None:
    batch: dict[str, Any] = {}
    batch["me"] = batch
    with pytest.raises(ValueError, match=r"batch: batch\['me'\] contains itself"):
        move_batch(batch, "cpu")
