"""State as JSON and tensors: everything comes back as it was; what cannot is named; damaged trees are refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe_kernels.checkpoint.tree import Ordered, decode, encode
from nestpipe_kernels.errors import CheckpointError


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(Ordered(value), "state", tensors)
    text = json.dumps(tree, allow_nan=False, sort_keys=True)
    return decode(json.loads(text), "state", tensors.__getitem__)


_TEXT = st.text(st.characters(codec="utf-8"))
_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary(), _TEXT)
_KEYS = st.one_of(_TEXT, st.integers(), st.tuples(st.integers(), st.booleans()))


@given(
    st.recursive(
        _LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(_KEYS, inner, max_size=3),
        ),
        max_leaves=12,
    )
)
def test_plain_values_come_back(value):
    got = round_trip(value)
    assert got == value
    assert repr(got) == repr(value)  # types and -0.0, too


def test_special_numbers_and_containers():
    got = round_trip({"nan": math.nan, "inf": math.inf, "low": -math.inf, "zero": -0.0, "big": 1 << 80})
    assert math.isnan(got["nan"]) and got["inf"] == math.inf and got["low"] == -math.inf
    assert math.copysign(1, got["zero"]) == -1 and got["big"] == 1 << 80
    counter = round_trip(Counter({3: 2, 5: 1}))
    assert counter == Counter({3: 2, 5: 1}) and isinstance(counter, Counter)
    assert round_trip(OrderedDict(a=1, b=2)) == {"a": 1, "b": 2}
    assert round_trip([np.int64(3), np.float32(0.5), np.bool_(True)]) == [3, 0.5, True]
    assert round_trip({"$tensor": "x"}) == {"$tensor": "x"}  # a key that looks like a tag


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64],
)  # fmt: skip
def test_tensors_of_every_kind(dtype):
    plain = torch.arange(12).reshape(3, 4).to(dtype)
    for tensor in (plain, plain.t(), plain[:, 1:2], plain[0, 0], plain[:0], plain[:1, 3].reshape(1)):
        got = round_trip({"x": [tensor]})["x"][0]
        assert got.dtype == dtype and got.shape == tensor.shape and torch.equal(got, tensor)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not round_trip(parameter).requires_grad
    array = np.arange(6, dtype=np.float64).reshape(2, 3).T
    got = round_trip(array)
    assert isinstance(got, np.ndarray) and got.dtype == array.dtype and (got == array).all()


def test_tensors_are_copies_with_names_of_their_own():
    tensors: dict[str, torch.Tensor] = {}
    value = torch.zeros(2)
    encode({"a b": value, "a_b": value + 1, "a": {"b": value}}, "state", tensors)
    value.add_(5)
    assert set(tensors) == {"state.a_b", "state.a_b~2", "state.a.b"}
    assert tensors["state.a_b"].tolist() == [0, 0]


class Pair(NamedTuple):
    a: int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": [object()]}, r"state\.x\[0\] is an object, which cannot be saved without pickle"),
        ({"x": {1, 2}}, r"state\.x is a set"),
        ({"x": lambda: 0}, r"state\.x is a function"),
        ({"x": Pair(1)}, r"state\.x is a Pair"),
        (torch.zeros(2, dtype=torch.complex64), r"state is a tensor of torch.complex64"),
        (torch.zeros(2).to_sparse(), r"state is a tensor of torch.float32 and torch.sparse_coo"),
        (np.array(["a"]), r"state is a numpy array of <U1"),
        ({torch.zeros(1): 1}, r"state has a tensor as a key"),
        ([1 << 20_000], r"state\[0\] is a number of 20001 bits, 8192 are the limit: save it as bytes"),
        (np.arange(3, dtype=np.dtype("i4").newbyteorder()), r"state is a numpy array of [<>]i4, which files do not"),
        (torch.zeros(2, device="meta"), r"state is a tensor on the meta device, which has no data"),
        ("\ud800", r"state holds a string that is no valid text"),
    ],
)
def test_what_cannot_be_saved_is_named(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode(value, "state", {})


def test_endless_and_deep_state_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="more than 64 levels deep"):
        encode(endless, "state", {})
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CheckpointError, match="more than 64 levels deep"):
        decode(deep, "state", {}.__getitem__)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": 3}, {"$tensor": "x", "more": 1}, {"$what": 1}, {"$tuple": 3}, {"$dict": 3}, {"$dict": [[1]]},
        {"$dict": [[[], 1]]}, {"$counter": [3]}, {"$float": "1.0"}, {"$float": []}, {"$bytes": "*"}, {"$bytes": 3},
        {"$array": []},
    ],
)  # fmt: skip
def test_damaged_trees_are_refused(tree):
    with pytest.raises(CheckpointError, match="state"):
        decode({"x": tree}, "state", lambda name: torch.zeros(1))
