"""KeyedJaggedTensor: construction, access, rearranging, selection of samples, and its errors."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor
from nestpipe_kernels.types import JaggedLike, KeyedJaggedLike


def example(weighted: bool = True) -> KeyedJaggedTensor:
    """a: [0, 1], [], [2]; b: [3], [4], [5, 6, 7]"""
    weights = torch.arange(8) / 10 if weighted else None
    return KeyedJaggedTensor(["a", "b"], torch.arange(8), weights, lengths=torch.tensor([2, 0, 1, 1, 1, 3]))


def rows(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [row.tolist() for row in jt.to_dense()] for key, jt in kjt.to_dict().items()}


def test_access() -> None:
    kjt = example()
    assert isinstance(kjt, KeyedJaggedLike)
    assert isinstance(kjt["a"], JaggedLike)
    assert kjt.keys() == ["a", "b"]
    assert kjt.stride() == 3
    assert kjt.stride_per_key() == [3, 3]
    assert kjt.length_per_key() == [3, 5]
    assert kjt.offset_per_key() == [0, 3, 8]
    assert kjt.offsets().tolist() == [0, 2, 2, 3, 4, 5, 8]
    assert kjt["b"].values().tolist() == [3, 4, 5, 6, 7]
    assert kjt["b"].offsets().tolist() == [0, 1, 2, 5]
    assert torch.equal(kjt["b"].weights(), torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7]))
    assert repr(kjt) == "KeyedJaggedTensor({'a': [[0, 1], [], [2]], 'b': [[3], [4], [5, 6, 7]]})"


def test_offsets_and_lengths_give_the_same() -> None:
    one = KeyedJaggedTensor.from_offsets_sync(["a", "b"], torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8]))
    two = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(8), torch.tensor([2, 0, 1, 1, 1, 3]))
    assert rows(one) == rows(two) == rows(example())
    assert one.lengths().tolist() == two.lengths().tolist()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["lengths", "offsets"])
def test_fault_05_keys_are_never_narrowed(ids: torch.dtype, sizes: torch.dtype, form: str) -> None:
    top = torch.iinfo(ids).max
    values = torch.tensor([top, -top - 1, top - 1], dtype=ids)
    given_sizes = torch.tensor([2, 0, 0, 1] if form == "lengths" else [0, 2, 2, 2, 3], dtype=sizes)
    kjt = KeyedJaggedTensor(["a", "b"], values, **{form: given_sizes})
    for made in (kjt, kjt.split([1, 1])[0], kjt.permute([0, 1]), kjt.select(torch.tensor([0, 1])), kjt.to("cpu")):
        assert made.values().dtype == ids
        assert made["a"].values().tolist() == [top, -top - 1]
    assert kjt.select(torch.tensor([1]))["b"].values().tolist() == [top - 1]


def test_fault_06_features_of_very_different_length_keep_their_ids() -> None:
    history = torch.arange(1000, 1500)
    kjt = KeyedJaggedTensor(
        ["item", "history", "last"],
        torch.cat([torch.tensor([1, 2]), history, torch.tensor([3])]),
        lengths=torch.tensor([1, 1, 0, 500, 1, 0]),
    )
    assert rows(kjt) == {"item": [[1], [2]], "history": [[], history.tolist()], "last": [[3], []]}
    first, rest = kjt.split([1, 2])
    assert rows(first) == {"item": [[1], [2]]}
    assert rows(rest) == {"history": [[], history.tolist()], "last": [[3], []]}
    assert rest.offset_per_key() == [0, 500, 501]
    assert rows(kjt.permute([2, 0])) == {"last": [[3], []], "item": [[1], [2]]}
    assert rows(kjt.select(torch.tensor([1, 0])))["history"] == [history.tolist(), []]


def test_fault_07_lengths_that_do_not_fit() -> None:
    ids = torch.arange(8)
    with pytest.raises(ValueError, match=r"lengths sum to 7 but there are 8 values"):
        KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 2]))
    with pytest.raises(ValueError, match=r"number of lengths must be a multiple of the 2 keys .* got 5"):
        KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([2, 0, 1, 1, 4]))
    with pytest.raises(ValueError, match=r"\(2 keys x 4 samples\): lengths must have 8 entries, got 6"):
        KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 3]), stride=4)
    with pytest.raises(ValueError, match=r"there are no keys but 2 lengths"):
        KeyedJaggedTensor([], ids, lengths=torch.tensor([4, 4]))
    with pytest.raises(ValueError, match=r"lengths must not be negative, got -1 at position 1"):
        KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([9, -1]))


def test_fault_02_the_last_offset_is_the_number_of_ids() -> None:
    with pytest.raises(ValueError, match=r"the last offset must be the number of values \(7\), got 3"):
        KeyedJaggedTensor(["a"], torch.tensor([0, 1, 0, 2, 3, 4, 6]), offsets=torch.tensor([0, 2, 3]))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 2], r"offsets must not decrease, got 3 then 2 at position 1"),
        ([0, 3, 2, 5], r"offsets must not decrease, got 3 then 2 at position 1"),
        ([1, 3], r"offsets must start at 0, got 1"),
    ],
)
def test_fault_03_bad_offsets(offsets: list[int], message: str) -> None:
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=message):
            KeyedJaggedTensor(["a"], torch.arange(5), offsets=torch.tensor(offsets, dtype=dtype))


def test_fault_04_empty_offsets() -> None:
    with pytest.raises(ValueError, match=r"offsets are empty but there are 5 values"):
        KeyedJaggedTensor(["a"], torch.arange(5), offsets=torch.tensor([], dtype=torch.int64))
    nothing = torch.tensor([], dtype=torch.int64)
    kjt = KeyedJaggedTensor(["a"], nothing, offsets=torch.tensor([]))
    assert kjt.stride() == 0
    assert kjt.offsets().tolist() == [0]
    assert rows(kjt) == {"a": []}
    assert rows(KeyedJaggedTensor(["a"], nothing, lengths=torch.tensor([]))) == {"a": []}


def test_other_construction_errors() -> None:
    ids, lengths = torch.arange(2), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"give lengths or offsets, got neither"):
        KeyedJaggedTensor(["a"], ids)
    with pytest.raises(ValueError, match=r"lengths and offsets disagree"):
        KeyedJaggedTensor(["a"], ids, lengths=lengths, offsets=torch.tensor([0, 0, 2]))
    with pytest.raises(TypeError, match=r"lengths must be integers, got torch.float32 \(shape \[2\]\)"):
        KeyedJaggedTensor(["a"], ids, lengths=lengths.float())
    with pytest.raises(TypeError, match=r"offsets must be integers, got torch.bool"):
        KeyedJaggedTensor(["a"], ids, offsets=torch.tensor([False, True]))
    with pytest.raises(TypeError, match=r"values must be a tensor, got list"):
        KeyedJaggedTensor(["a"], [0, 1], lengths=lengths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights must have one entry per value \(2\), got shape \[3\]"):
        KeyedJaggedTensor(["a"], ids, torch.ones(3), lengths=lengths)
    with pytest.raises(ValueError, match=r"keys must be distinct, got \['a'\] more than once"):
        KeyedJaggedTensor(["a", "b", "a"], ids, lengths=torch.tensor([1, 1, 0]))
    with pytest.raises(TypeError, match=r"keys must be a list of names, got the string 'ab'"):
        KeyedJaggedTensor("ab", ids, lengths=lengths)
    with pytest.raises(ValueError, match=r"stride must be >= 0, got -1"):
        KeyedJaggedTensor(["a"], ids, lengths=lengths, stride=-1)
    with pytest.raises(ValueError, match=r"lengths must have one dimension, got shape \[1, 2\]"):
        KeyedJaggedTensor(["a"], ids, lengths=lengths.view(1, 2))
    with pytest.raises(ValueError, match=r"values must have shape \[n, ...\], got a scalar"):
        KeyedJaggedTensor(["a"], torch.tensor(1), lengths=torch.tensor([1]))


def test_errors_of_methods() -> None:
    kjt = example(weighted=False)
    with pytest.raises(KeyError, match=r"no key 'c'; it has \['a', 'b'\]"):
        kjt["c"]
    with pytest.raises(ValueError, match=r"has no weights"):
        kjt.weights()
    with pytest.raises(ValueError, match=r"segments must be >= 0 and sum to the 2 keys, got \[1, 2\] \(sum 3\)"):
        kjt.split([1, 2])
    with pytest.raises(IndexError, match=r"KeyedJaggedTensor.permute: index 2 is outside 0 \.\. 1"):
        kjt.permute([2])
    with pytest.raises(IndexError, match=r"KeyedJaggedTensor.select: index 3 is outside 0 \.\. 2 \(3 to choose from\)"):
        kjt.select(torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"select: indices must be integers, got torch.bool"):
        kjt.select(torch.tensor([True]))
    with pytest.raises(ValueError, match=r"concat: numbers of samples differ: \[3, 2\]"):
        KeyedJaggedTensor.concat([kjt, kjt.select(torch.tensor([0, 1]))])
    with pytest.raises(ValueError, match=r"concat: got an empty list"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(ValueError, match=r"concat: 1 of 2 parts have weights; all or none must"):
        KeyedJaggedTensor.concat([kjt, example()])
    with pytest.raises(ValueError, match=r"from_jt_dict: got an empty dict"):
        KeyedJaggedTensor.from_jt_dict({})
    one, two = (JaggedTensor(torch.arange(n), lengths=torch.ones(n, dtype=torch.int64)) for n in (1, 2))
    with pytest.raises(ValueError, match=r"samples differ between features: \{'a': 1, 'b': 2\}"):
        KeyedJaggedTensor.from_jt_dict({"a": one, "b": two})


def test_split_permute_concat_and_dict_are_inverse() -> None:
    kjt = example()
    assert rows(KeyedJaggedTensor.concat(kjt.split([1, 1]))) == rows(kjt)
    assert rows(KeyedJaggedTensor.from_jt_dict(kjt.to_dict())) == rows(kjt)
    swapped = kjt.permute([1, 0, 0])
    assert swapped.keys() == ["b", "a", "a"]
    assert swapped.values().tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 0, 1, 2]
    assert rows(kjt.split([0, 2])[1]) == rows(kjt)
    assert kjt.split([0, 2])[0].stride() == 3
    assert kjt.permute([]).values().numel() == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.booleans(), st.data())
def test_select_equals_a_loop_over_samples(features: int, samples: int, weighted: bool, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=features * samples, max_size=features * samples))
    order = data.draw(st.lists(st.integers(0, samples - 1), max_size=8))
    values = torch.arange(sum(sizes)) - 2**62
    keys = [f"f{i}" for i in range(features)]
    kjt = KeyedJaggedTensor(
        keys, values, values.double() if weighted else None, lengths=torch.tensor(sizes, dtype=torch.int32)
    )
    picked = kjt.select(torch.tensor(order, dtype=torch.int64))
    whole = rows(kjt)
    assert rows(picked) == {key: [whole[key][i] for i in order] for key in keys}
    assert picked.stride() == len(order)
    assert picked.lengths().dtype == torch.int32
    if weighted:
        assert torch.equal(picked.weights(), picked.values().double())


def test_select_of_all_samples_in_parts_covers_the_batch() -> None:
    kjt = example()
    parts = [kjt.select(part) for part in torch.tensor([2, 0, 1]).split(1)]
    assert [rows(part)["b"] for part in parts] == [[[5, 6, 7]], [[3]], [[4]]]
    assert [part.weights().numel() for part in parts] == [4, 3, 1]


def test_select_passes_gradients_to_weights() -> None:
    weights = torch.ones(3, requires_grad=True)
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), weights, lengths=torch.tensor([1, 2]))
    kjt.select(torch.tensor([1, 1])).weights().sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 2, 2]


def test_empty() -> None:
    empty = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert (empty.keys(), empty.stride(), empty.values().dtype) == ([], 0, torch.int64)
    assert empty.weights().numel() == 0
    like = KeyedJaggedTensor.empty_like(example())
    assert (like.keys(), like.stride(), like.values().dtype) == ([], 3, torch.int64)
    assert like.offset_per_key() == [0]


def test_moves_and_pickle() -> None:
    kjt = example()
    assert rows(kjt.to("cpu")) == rows(kjt)
    moved = kjt.to("cpu", dtype=torch.float64)
    assert (moved.weights().dtype, moved.values().dtype) == (torch.float64, torch.int64)
    assert rows(kjt.pin_memory()) == rows(kjt)
    assert rows(pickle.loads(pickle.dumps(kjt))) == rows(kjt)
    assert kjt.sync().unsync().sync().length_per_key() == [3, 5]
