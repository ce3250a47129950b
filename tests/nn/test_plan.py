"""Planning a call: which keys, bags and segments reach which store, and the refusal of bad inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn.configs import EmbeddingBagConfig, EmbeddingConfig, TableConfig
from nestpipe_kernels.nn.layout import make_layout
from nestpipe_kernels.nn.plan import plan_lookup, read_features
from nestpipe_kernels.types import UNBOUNDED, LookupCall, PoolingType, SparseOptimizer


class _Rule:
    def __init__(self, name: str = "sgd", lr: float = 0.1) -> None:
        self.name = name
        self.lr = lr

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        return ()

    def state_floats(self, dim: int) -> int:
        return 0

    def hyper(self) -> dict[str, float]:
        return {}


def _plan(
    tables: Sequence[TableConfig],
    features: Any,
    *,
    weighted: bool | None = False,
    rules: Sequence[SparseOptimizer] | None = None,
) -> LookupCall:
    pooled = isinstance(tables[0], EmbeddingBagConfig)
    layout = make_layout(tables, rules or [_Rule() for _ in tables], pooled)
    batch = read_features(features, layout.features, "EBC", weighted)
    return plan_lookup(layout, batch, pooled, "EBC", list)


def _features(weights: Tensor | None = None) -> KeyedJaggedTensor:
    # samples:  a: [10, 11], [], [12]    b: [20], [21], [22, 23]
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([10, 11, 12, 20, 21, 22, 23]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 2]),
        weights=weights,
    )


def test_order_is_table_then_feature_then_sample() -> None:
    tables = [
        EmbeddingBagConfig(100, 2, "t", feature_names=["b", "a"]),
        EmbeddingBagConfig(UNBOUNDED, 2, "u", feature_names=["a"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(100, 3, "v", feature_names=["b"], pooling=PoolingType.MAX),
    ]
    call = _plan(tables, _features())
    first, second = call.stores
    assert first.keys.tolist() == [20, 21, 22, 23, 10, 11, 12, 10, 11, 12]
    assert first.tables.tolist() == [0] * 7 + [1] * 3
    assert first.tables.dtype is torch.int32
    assert first.bag_offsets.tolist() == [0, 1, 2, 4, 6, 6, 7, 9, 9, 10]
    assert first.segment_bags == (0, 3, 6, 9)
    assert first.segment_modes == (0, 0, 1)
    assert second.keys.tolist() == [20, 21, 22, 23]
    assert second.segment_modes == (2,)
    assert call.output_shapes == [(3, 2 + 2 + 2 + 3)]
    assert call.views == [[(0, 0), (0, 2), (0, 4)], [(0, 6)]]
    samples = call.samples[0]
    assert samples is not None
    assert samples.tolist() == [0, 1, 2, 2, 0, 0, 2, 0, 0, 2]


def test_without_pooling_every_key_is_a_bag() -> None:
    tables = [EmbeddingConfig(100, 2, "t", feature_names=["a", "b"]), EmbeddingConfig(100, 3, "u", feature_names=["a"])]
    call = _plan(tables, _features(), weighted=None)
    assert call.stores[0].bag_offsets.tolist() == list(range(8))
    assert call.stores[0].segment_bags == (0, 3, 7)
    assert call.stores[0].segment_modes == (3, 3)
    assert call.output_shapes == [(3, 2), (4, 2), (3, 3)]
    assert call.views == [[(0, 0), (1, 0)], [(2, 0)]]


def test_fault_06_lengths_of_very_different_features_stay_apart() -> None:
    features = KeyedJaggedTensor(
        keys=["long", "short"],
        values=torch.cat([torch.arange(500), torch.tensor([900])]),
        lengths=torch.tensor([499, 1, 0, 1]),
    )
    call = _plan([EmbeddingBagConfig(1000, 2, "t", feature_names=["short", "long"])], features)
    assert call.stores[0].bag_offsets.tolist() == [0, 0, 1, 500, 501]
    assert call.stores[0].keys.tolist() == [900, *range(500)]


def test_stores_group_by_dim_and_rule_but_not_learning_rate() -> None:
    tables = [EmbeddingBagConfig(9, dim, name) for name, dim in (("a", 2), ("b", 2), ("c", 2), ("d", 4))]
    layout = make_layout(tables, [_Rule(), _Rule(lr=5.0), _Rule("adagrad"), _Rule()], pooled=True)
    assert [[config.name for config in group.tables] for group in layout.stores] == [["a", "b"], ["c"], ["d"]]
    assert layout.places == {"a": (0, 0), "b": (0, 1), "c": (1, 0), "d": (2, 0)}


def test_weights_follow_their_keys() -> None:
    weights = torch.arange(7, dtype=torch.float32).requires_grad_()
    tables = [
        EmbeddingBagConfig(100, 2, "t", feature_names=["b"]),
        EmbeddingBagConfig(100, 3, "u", feature_names=["a"]),
    ]
    call = _plan(tables, _features(weights), weighted=True)
    assert call.weights is not None
    assert call.weights.requires_grad
    assert [keys.weights.tolist() for keys in call.stores if keys.weights is not None] == [[3, 4, 5, 6], [0, 1, 2]]
    assert [where.tolist() for where in call.weight_positions if where is not None] == [[3, 4, 5, 6], [0, 1, 2]]
    assert not any(keys.weights.requires_grad for keys in call.stores if keys.weights is not None)


def test_padding_keys_are_not_valid() -> None:
    tables = [
        EmbeddingBagConfig(100, 2, "t", feature_names=["a"], padding_idx=11),
        EmbeddingBagConfig(100, 2, "u", feature_names=["b"]),
    ]
    valid = _plan(tables, _features()).stores[0].valid
    assert valid is not None
    assert valid.tolist() == [True, False, True, True, True, True, True]
    assert _plan(tables[1:], _features()).stores[0].valid is None


def test_fault_39_the_plan_owns_its_keys() -> None:
    features = _features()
    call = _plan([EmbeddingBagConfig(100, 2, "t", feature_names=["a", "b"])], features)
    features.values().fill_(0)
    features.lengths().fill_(0)
    assert call.stores[0].keys.tolist() == [10, 11, 12, 20, 21, 22, 23]
    assert call.signature[1].tolist() == [[2, 0, 1], [1, 1, 2]]


def test_fault_05_int32_inputs_are_widened() -> None:
    features = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2, 3], dtype=torch.int32), lengths=torch.tensor([1, 2], dtype=torch.int32)
    )
    keys = _plan([EmbeddingBagConfig(100, 2, "t", feature_names=["a"])], features).stores[0]
    assert (keys.keys.dtype, keys.bag_offsets.dtype) == (torch.int64, torch.int64)
    big = KeyedJaggedTensor(["a"], torch.tensor([2**40 + 1, -(2**63)]), lengths=torch.tensor([1, 1], dtype=torch.int32))
    keys = _plan([EmbeddingBagConfig(UNBOUNDED, 2, "t", feature_names=["a"])], big).stores[0]
    assert keys.keys.tolist() == [2**40 + 1, -(2**63)]


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_fault_14_ids_outside_a_fixed_vocabulary(bad: int) -> None:
    tables = [EmbeddingBagConfig(10, 2, "t", feature_names=["a", "b"])]
    message = rf"EBC: table 't', feature 'b': id {bad} at position 1 \(sample 1\) is outside \[0, 10\); raise"
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, bad, 9]), lengths=torch.tensor([1, 1, 1, 2]))
    with pytest.raises(IndexError, match=message):
        _plan(tables, features)


def test_empty_batch_and_empty_features() -> None:
    tables = [EmbeddingBagConfig(10, 2, "t", feature_names=["a"]), EmbeddingBagConfig(10, 3, "u", feature_names=["b"])]
    none = KeyedJaggedTensor(["a", "b"], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
    call = _plan(tables, none)
    assert call.output_shapes == [(0, 5)]
    assert [keys.bag_offsets.tolist() for keys in call.stores] == [[0], [0]]
    blank = KeyedJaggedTensor(["a", "b"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0, 0]))
    call = _plan(tables, blank)
    assert [keys.bag_offsets.tolist() for keys in call.stores] == [[0, 1, 1], [0, 0, 0]]


class _Fake:
    """What a KeyedJaggedTensor shows us, without its own checks."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None, stride: int = 2) -> None:
        self._parts = (values, lengths, weights, stride)

    def keys(self) -> list[str]:
        return ["a"]

    def values(self) -> Tensor:
        return self._parts[0]

    def lengths(self) -> Tensor:
        return self._parts[1]

    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self._parts[1].cumsum(0)])

    def weights_or_none(self) -> Tensor | None:
        return self._parts[2]

    def stride(self) -> int:
        return self._parts[3]


_IDS = torch.tensor([1, 2, 3])
_LENGTHS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("features", "weighted", "error", "message"),
    [
        (_IDS, False, TypeError, "EBC: features must be a KeyedJaggedTensor, got Tensor; build one with nk.Keyed"),
        (
            _Fake(_IDS.float(), _LENGTHS),
            False,
            TypeError,
            r"feature values must be int64 \(or int32\) \[n\], got float32 \(shape \[3\]\); other types lose digits",
        ),
        (_Fake(_IDS, _LENGTHS, stride=3), False, ValueError, "1 keys with 3 samples need 3 lengths, got 2"),
        (_Fake(_IDS, torch.tensor([4, -1])), False, ValueError, "lengths must be >= 0, got -1"),
        (_Fake(_IDS, torch.tensor([1, 1])), False, ValueError, "lengths sum to 2, but there are 3 values"),
        (_Fake(_IDS, _LENGTHS), True, ValueError, "is_weighted is True, but the input has no per-sample weights"),
        (_Fake(_IDS, _LENGTHS, torch.ones(3)), False, ValueError, "has per-sample weights, but is_weighted is False"),
        (_Fake(_IDS, _LENGTHS, torch.ones(2)), True, ValueError, "3 values need as many weights, got float32"),
        (_Fake(_IDS, _LENGTHS, torch.ones(3).double()), True, TypeError, "weights must be float32, got float64"),
    ],
)
def test_bad_inputs(features: object, weighted: bool, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _plan([EmbeddingBagConfig(100, 2, "t", feature_names=["a"])], features, weighted=weighted)


def test_missing_features_are_named() -> None:
    tables = [EmbeddingBagConfig(100, 2, "t", feature_names=["a", "x", "y"])]
    with pytest.raises(
        ValueError, match=r"EBC: features \['x', 'y'\] are missing from the input, which has \['a', 'b'\]"
    ):
        _plan(tables, _features())


def test_torchrecs_jagged_tensors_are_understood() -> None:
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")
    ours = _features()
    theirs = sparse.KeyedJaggedTensor(keys=ours.keys(), values=ours.values(), lengths=ours.lengths())
    tables = [EmbeddingBagConfig(100, 2, "t", feature_names=["b", "a"])]
    assert _plan(tables, theirs).stores[0].keys.equal(_plan(tables, ours).stores[0].keys)
    uneven = sparse.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])),
    )
    with pytest.raises(ValueError, match="a batch size per key is not supported"):
        _plan(tables, uneven)
