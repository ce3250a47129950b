"""Outputs of micro-batches come back in the caller's order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe_kernels.capture import merge_outputs, split
from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

PARTS = [torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([2, 1, 3])]
SHARES = [0.4, 0.0, 0.6]


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: Any


def test_samples_return_to_their_places() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    outputs = [{"y": x[i] * 2, "z": (x[i][:, 0],), "none": None, "name": "a", "n": 3} for i in PARTS]
    merged = merge_outputs(outputs, PARTS, SHARES)
    assert torch.equal(merged["y"], x.detach() * 2)
    assert torch.equal(merged["z"][0], x.detach()[:, 0])
    assert not merged["y"].requires_grad
    assert (merged["none"], merged["name"], merged["n"]) == (None, "a", 3)


def test_empty_micro_batches_are_ignored() -> None:
    merged = merge_outputs([torch.tensor([4, 0]), None, torch.tensor([2, 1, 3])], PARTS, SHARES)
    assert merged.tolist() == [0, 1, 2, 3, 4]
    assert merge_outputs([None], [PARTS[1]], [0.0]) is None


def test_means_are_weighted() -> None:
    outputs = [Output(torch.zeros(2), torch.tensor(1.0)), None, Output(torch.zeros(3), torch.tensor(2.0))]
    merged = merge_outputs(outputs, PARTS, SHARES)
    assert isinstance(merged, Output)
    assert merged.loss.item() == pytest.approx(1.6)
    assert merge_outputs([1.0, None, 2.0], PARTS, SHARES) == pytest.approx(1.6)
    assert merge_outputs([1, None, 2], PARTS, SHARES) == pytest.approx(1.6)
    assert merge_outputs([torch.tensor(1), None, torch.tensor(2)], PARTS, SHARES).item() == pytest.approx(1.6)


def test_one_micro_batch_passes_everything_on() -> None:
    index = torch.tensor([1, 0])
    out = {"y": torch.tensor([1.0, 0.0]), "curve": torch.arange(7), "flag": True, "loss": 0.5}
    merged = merge_outputs([out], [index], [1.0])
    assert merged["y"].tolist() == [0.0, 1.0]
    assert merged["curve"].tolist() == list(range(7))
    assert (merged["flag"], merged["loss"]) == (True, 0.5)


@pytest.mark.parametrize("theirs", [False, True])
def test_jagged_and_keyed_outputs(theirs: bool) -> None:
    classes: Any = (KeyedJaggedTensor, JaggedTensor, KeyedTensor)
    if theirs:
        torchrec = pytest.importorskip("torchrec")
        classes = (torchrec.KeyedJaggedTensor, torchrec.JaggedTensor, torchrec.KeyedTensor)
    lengths = torch.tensor([1, 0, 2, 3, 1, 2, 1, 0, 0, 4])
    whole = {
        "kjt": classes[0](keys=["a", "b"], values=torch.arange(14), lengths=lengths, weights=torch.arange(14) / 2),
        "jt": classes[1](values=torch.randn(7, 4), lengths=lengths[:5]),
    }
    outputs = [
        {**part, "kt": classes[2](keys=["p", "q"], length_per_key=[1, 2], values=torch.ones(len(index), 3))}
        for part, index in zip(split(whole, PARTS), PARTS)
    ]
    merged = merge_outputs(outputs, PARTS, SHARES)
    for name in ("kjt", "jt"):
        assert type(merged[name]) is type(whole[name])
        assert torch.equal(merged[name].values(), whole[name].values())
        assert torch.equal(merged[name].lengths(), whole[name].lengths())
    assert torch.equal(merged["kjt"].weights(), whole["kjt"].weights())
    assert merged["kt"].values().shape == (5, 3)
    assert list(merged["kt"].keys()) == ["p", "q"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"a": [torch.zeros(7)]},
            {"a": [torch.zeros(7)]},
            r"output\['a'\]\[0\]: expected tensors with dim 0 .*\[2, 3\]",
        ),
        ((torch.zeros(2, 1),), (torch.zeros(3, 2),), r"output\[0\]: expected tensors that differ in dim 0 only"),
        ({"a": 1.0}, {"b": 1.0}, r"output: expected the same structure .*\['a'\], \['b'\]"),
        ({"a": 1.0}, {"a": None}, r"output\['a'\]: expected the same type from every micro-batch, got float, NoneType"),
        ("x", "y", r"output: expected the same str from every micro-batch"),
        (
            JaggedTensor(values=torch.zeros(1), lengths=torch.tensor([1])),
            JaggedTensor(values=torch.zeros(1), lengths=torch.tensor([1])),
            r"output: expected as many bags as samples, \[2, 3\], got \[1, 1\]",
        ),
        (
            KeyedTensor(keys=["a"], length_per_key=[1], values=torch.zeros(2, 1)),
            KeyedTensor(keys=["b"], length_per_key=[1], values=torch.zeros(3, 1)),
            r"output: expected the same keys from every micro-batch",
        ),
    ],
)
def test_what_cannot_be_merged_is_named(first: Any, second: Any, message: str) -> None:
    with pytest.raises(ValueError, match="merge_outputs: " + message):
        merge_outputs([first, None, second], PARTS, SHARES)


def test_argument_counts() -> None:
    with pytest.raises(ValueError, match=r"got 1 outputs, 3 index tensors and 3 weights"):
        merge_outputs([None], PARTS, SHARES)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_merge_is_the_inverse_of_split(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    indices = [order[a:b] for a, b in zip([0, *cuts], [*cuts, size])]
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=2 * size, max_size=2 * size)))
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(int(lengths.sum())), lengths=lengths)
    parts = split({"x": torch.arange(size * 2).view(size, 2), "k": kjt}, indices)
    merged = merge_outputs(parts, indices, [index.numel() / size for index in indices])
    assert torch.equal(merged["x"], torch.arange(size * 2).view(size, 2))
    assert torch.equal(merged["k"].values(), kjt.values())
    assert torch.equal(merged["k"].lengths(), lengths)
