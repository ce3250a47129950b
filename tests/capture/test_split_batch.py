"""Splitting batches of every supported shape; what cannot be split is named."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe_kernels.capture import batch_size_of, split
from nestpipe_kernels.capture.split import check_size
from nestpipe_kernels.capture.tree import walk
from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

B = 5
PARTS = [torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([2, 1, 3])]


def make_kjt(cls: type = KeyedJaggedTensor, weighted: bool = True) -> Any:
    lengths = torch.tensor([1, 0, 2, 3, 1, 2, 1, 0, 0, 4])
    values = torch.arange(14) * 10
    weights = torch.arange(14).float() / 4 if weighted else None
    return cls(keys=["a", "b"], values=values, weights=weights, lengths=lengths)


def bags(kjt: Any) -> dict[str, list[list[int]]]:
    stride, result, start = kjt.stride(), {}, 0
    lengths = kjt.lengths().tolist()
    for f, key in enumerate(kjt.keys()):
        result[key] = []
        for n in lengths[f * stride : (f + 1) * stride]:
            result[key].append(kjt.values()[start : start + n].tolist())
            start += n
    return result


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor
    name: str
    nested: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    ids: torch.Tensor


class Slots:
    __slots__ = ("ids", "unset")

    def __init__(self) -> None:
        self.ids = torch.arange(B)


class Custom:
    """As a user's collate function makes it: no base class, a constructor of its own."""

    def __init__(self, seed: int) -> None:
        self.ids = torch.arange(B) + seed
        self.kjt = make_kjt()
        self.batch_size = B
        self.tag = "train"
        self.callback = len


Named = collections.namedtuple("Named", ["ids", "labels"])


def test_tensors_and_arrays_are_selected_in_the_given_order() -> None:
    batch = {"x": torch.arange(B * 3).view(B, 3), "y": np.arange(B) * 2.0, "none": None, "lr": 0.1, "name": "n"}
    parts = split(batch, PARTS)
    for part, index in zip(parts, PARTS):
        assert torch.equal(part["x"], batch["x"][index])
        assert np.array_equal(part["y"], batch["y"][index.numpy()])
        assert (part["none"], part["lr"], part["name"]) == (None, 0.1, "n")
    assert parts[1]["x"].shape == (0, 3)


@pytest.mark.parametrize("weighted", [True, False])
def test_keyed_jagged(weighted: bool) -> None:
    kjt = make_kjt(weighted=weighted)
    whole = bags(kjt)
    for part, index in zip(split(kjt, PARTS), PARTS):
        assert type(part) is KeyedJaggedTensor
        assert part.stride() == index.numel()
        assert bags(part) == {key: [whole[key][i] for i in index] for key in ("a", "b")}
        if weighted:
            assert torch.equal(part.weights() * 40, part.values().float())
        else:
            assert part.weights_or_none() is None


def test_torchrec_keyed_jagged_keeps_its_class() -> None:
    torchrec = pytest.importorskip("torchrec")
    kjt = make_kjt(torchrec.KeyedJaggedTensor)
    whole = bags(kjt)
    for part, index in zip(split({"k": kjt}, PARTS), PARTS):
        assert type(part["k"]) is torchrec.KeyedJaggedTensor
        assert bags(part["k"]) == {key: [whole[key][i] for i in index] for key in ("a", "b")}


@pytest.mark.parametrize("theirs", [False, True])
def test_jagged(theirs: bool) -> None:
    cls: Any = pytest.importorskip("torchrec").JaggedTensor if theirs else JaggedTensor
    lengths, values = torch.tensor([1, 0, 2, 3, 1]), torch.arange(7)
    part = split([cls(values=values, lengths=lengths)], [torch.tensor([3, 1, 0])])[0][0]
    assert type(part) is cls
    assert part.lengths().tolist() == [3, 0, 1]
    assert part.values().tolist() == [3, 4, 5, 0]


def test_keyed_tensor_is_selected_by_rows() -> None:
    keyed = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.arange(B * 3).float().view(B, 3))
    part = split({"y": torch.zeros(B), "k": keyed}, [torch.tensor([2])])[0]["k"]
    assert part.keys() == ["a", "b"]
    assert part.values().tolist() == [[6.0, 7.0, 8.0]]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs_split_as_bags(closed: bool, kind: type) -> None:
    values, offsets = torch.arange(7), torch.tensor([0, 1, 1, 3, 6] + ([7] if closed else []), dtype=torch.int32)
    part = split({"y": torch.zeros(B), "bag": kind([values, offsets])}, [torch.tensor([3, 1, 0])])[0]["bag"]
    assert type(part) is kind
    assert part[0].tolist() == [3, 4, 5, 0]
    assert part[1].tolist() == [0, 3, 3] + ([4] if closed else [])
    assert part[1].dtype == torch.int32


def test_pair_with_as_many_values_as_samples() -> None:
    pair = (torch.arange(B), torch.tensor([0, 2, 2, 3, 4, 5]))
    part = split([torch.zeros(B), pair], [torch.tensor([0, 4])])[0][1]
    assert part[0].tolist() == [0, 1, 4]
    assert part[1].tolist() == [0, 2, 3]


def test_two_id_columns_are_no_pair() -> None:
    part = split((torch.arange(B), torch.arange(B)), [torch.tensor([3, 1])])[0]
    assert [column.tolist() for column in part] == [[3, 1], [3, 1]]


def test_dataclasses_named_tuples_and_slots() -> None:
    index = torch.tensor([1, 3])
    frozen = split(Frozen(torch.arange(B), "f", {"y": torch.arange(B) * 2}), [index])[0]
    assert isinstance(frozen, Frozen)
    assert (frozen.ids.tolist(), frozen.name, frozen.nested["y"].tolist()) == ([1, 3], "f", [2, 6])
    assert split(FrozenSlots(torch.arange(B)), [index])[0].ids.tolist() == [1, 3]
    named = split(Named(torch.arange(B), torch.zeros(B, 2)), [index])[0]
    assert isinstance(named, Named)
    assert named.labels.shape == (2, 2)
    slots = split(Slots(), [index])[0]
    assert slots.ids.tolist() == [1, 3]
    assert not hasattr(slots, "unset")


def test_dict_kinds_keep_their_type() -> None:
    ordered = collections.OrderedDict(b=torch.arange(B), a=torch.arange(B))
    part = split(ordered, [torch.tensor([0])])[0]
    assert type(part) is collections.OrderedDict
    assert list(part) == ["b", "a"]
    user = collections.UserDict(x=torch.arange(B))
    part = split(user, [torch.tensor([2])])[0]
    assert type(part) is collections.UserDict
    assert part["x"].tolist() == [2]
    assert user["x"].tolist() == [0, 1, 2, 3, 4]


def test_fault_46_custom_batch_class() -> None:
    batch = Custom(seed=7)
    part = split(batch, [torch.tensor([4, 2])])[0]
    assert isinstance(part, Custom)
    assert part.ids.tolist() == [11, 9]
    assert part.kjt.stride() == 2
    assert part.batch_size == 2
    assert (part.tag, part.callback) == ("train", len)
    assert (batch.batch_size, batch.kjt.stride(), batch.ids.numel()) == (B, B, B)


def _storages(value: Any) -> set[int]:
    found = set()
    for _, leaf in walk(value, lambda path: AssertionError(path)):
        tensors = [leaf] if isinstance(leaf, torch.Tensor) else []
        if isinstance(leaf, np.ndarray):
            tensors = [torch.from_numpy(leaf)]
        if hasattr(leaf, "lengths"):
            tensors = [leaf.values(), leaf.lengths(), leaf.offsets(), leaf.weights_or_none()]
        found |= {t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()}
    return found


def test_fault_39_micro_batches_own_their_tensors() -> None:
    batch = {
        "kjt": make_kjt(),
        "x": torch.arange(B),
        "arr": np.arange(B),
        "zero": torch.tensor(3),
        "pair": (torch.arange(7), torch.tensor([0, 1, 1, 3, 6])),
        "obj": Custom(1),
    }
    for indices in ([torch.arange(B)], [torch.arange(0, 2), torch.arange(2, B)]):
        parts = split(batch, indices)
        before = copy.deepcopy([bags(part["kjt"]) for part in parts])
        assert not _storages(batch) & set().union(*(_storages(part) for part in parts))
        batch["x"].add_(100)
        batch["arr"] += 100
        batch["zero"].fill_(9)
        batch["kjt"].values().zero_()
        assert torch.cat([part["x"] for part in parts]).max() < 100 + B
        assert [int(part["zero"]) for part in parts] == [3] * len(parts)
        assert [bags(part["kjt"]) for part in parts] == before
        batch.update(kjt=make_kjt(), x=torch.arange(B), zero=torch.tensor(3))


def test_lists_of_plain_values_per_sample() -> None:
    batch = {"x": torch.arange(B), "names": ["a", "b", "c", "d", "e"], "dims": [64, 32]}
    part = split(batch, [torch.tensor([4, 0])])[0]
    assert part["names"] == ["e", "a"]
    assert part["dims"] == [64, 32]


def test_batch_size_rules() -> None:
    kjt = make_kjt()
    assert batch_size_of({"n": torch.zeros(9), "k": kjt}) == B
    assert batch_size_of({"a": torch.tensor(1.0), "x": torch.zeros(7, 2)}) == 7
    assert batch_size_of({"bag": (torch.arange(7), torch.tensor([0, 3])), "y": torch.zeros(2)}) == 2
    assert batch_size_of([(torch.arange(7), torch.tensor([0, 3, 7]))]) == 2
    assert batch_size_of([(torch.arange(7), torch.tensor([0, 3, 4]))]) == 3
    assert batch_size_of({"batch_size": 4, "x": torch.zeros(9)}) == 4
    assert batch_size_of(Custom(0)) == B


def test_batch_without_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch_size_of: expected a batch with a tensor .* got dict without any"):
        batch_size_of({"lr": 0.1, "z": torch.tensor(1)})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.zeros(B), "mask": [None, torch.zeros(3, 2)]},
            r"split: batch\['mask'\]\[1\] is a tensor \[3, 2\], but dim 0 .* batch size, 5; pass split_batch=",
        ),
        ({"x": torch.zeros(B), "a": np.zeros(4)}, r"split: batch\['a'\] is a numpy array \[4\]"),
        (
            Named(make_kjt(), JaggedTensor(values=torch.arange(2), lengths=torch.tensor([1, 1]))),
            r"split: batch\.labels \(JaggedTensor\) must have number of bags 5, the batch size, got 2; pass",
        ),
        (
            {"k": make_kjt(), "l": KeyedJaggedTensor(["z"], torch.arange(2), lengths=torch.tensor([1, 1]))},
            r"split: batch\['l'\] \(KeyedJaggedTensor\) must have stride 5, the batch size, got 2",
        ),
    ],
)
def test_what_cannot_be_split_is_named(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(batch, [torch.tensor([0])])


def test_data_frames_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    batch = {"x": torch.zeros(2), "f": pandas.DataFrame({"a": [1, 2]})}
    with pytest.raises(ValueError, match=r"split: batch\['f'\] is a DataFrame, which cannot be split"):
        split(batch, [torch.tensor([0])])


def test_torchrec_variable_stride_is_named() -> None:
    torchrec = pytest.importorskip("torchrec")
    kjt = torchrec.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match=r"split: batch\['k'\] .* cannot be split: its keys have different strides"):
        split({"batch_size": 2, "k": kjt}, [torch.tensor([0])])


def test_cycles_are_named() -> None:
    batch: dict[str, Any] = {"x": torch.zeros(B)}
    batch["self"] = [batch]
    with pytest.raises(ValueError, match=r"split: batch\['self'\]\[0\] contains itself"):
        split(batch, [torch.tensor([0])])


def test_bad_indices() -> None:
    batch = torch.zeros(B)
    with pytest.raises(TypeError, match=r"split: indices\[0\] must be an int64 tensor of shape \[n\], got torch.int32"):
        split(batch, [torch.tensor([0], dtype=torch.int32)])
    with pytest.raises(IndexError, match=r"split: indices\[1\] has sample 5, but the batch has samples 0 .. 4"):
        split(batch, [torch.tensor([0]), torch.tensor([5])])
    with pytest.raises(IndexError, match=r"has sample -1"):
        split(batch, [torch.tensor([-1])])


def test_split_batch_is_used_and_counted() -> None:
    batch = {"x": torch.zeros(B), "odd": torch.zeros(3)}
    parts = split(batch, PARTS, split_batch=lambda b, indices: [{"x": b["x"][i]} for i in indices])
    assert [part["x"].numel() for part in parts] == [2, 0, 3]
    with pytest.raises(ValueError, match=r"split: split_batch must return a list of 3 micro-batches, got 1 micro"):
        split(batch, PARTS, split_batch=lambda b, indices: [b])
    with pytest.raises(ValueError, match=r"split_batch must return a list of 3 micro-batches, got NoneType"):
        split(batch, PARTS, split_batch=lambda b, indices: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("values", [3, 4, 5, 6])
def test_a_pair_may_come_first_whatever_its_number_of_values(values: int) -> None:
    """As many values as offsets look like two columns of one more sample than the label has."""
    offsets = torch.tensor([0, 1, 1, 2, values])
    batch = {"bag": (torch.arange(values), offsets), "label": torch.arange(4)}
    assert batch_size_of(batch) == 4
    first, second = split(batch, [torch.tensor([0, 3]), torch.tensor([1, 2])])
    assert first["bag"][1].tolist() == [0, 1, values - 1] and first["label"].tolist() == [0, 3]
    assert second["bag"][1].tolist() == [0, 0, 1]


def test_two_columns_stay_two_columns() -> None:
    batch = {"ids": (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 1, 2, 5])), "label": torch.arange(5)}
    assert batch_size_of(batch) == 5
    assert batch_size_of((torch.tensor([0, 1]), torch.tensor([0, 2]))) == 2


def test_with_a_function_that_splits_the_size_must_be_certain() -> None:
    batch = {"weights": torch.ones(3), "ids": torch.arange(32), "label": torch.zeros(32)}
    with pytest.raises(ValueError, match="batch_size") as error:
        check_size(batch, batch_size_of(batch))
    assert "batch['weights'] has 3, batch['ids'] has 32, batch['label'] has 32" in str(error.value)
    check_size({**batch, "batch_size": 32}, 32)
    check_size({"ids": torch.arange(32), "label": torch.zeros(32), "scale": torch.tensor(1.0)}, 32)
