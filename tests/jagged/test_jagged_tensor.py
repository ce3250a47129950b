"""JaggedTensor and KeyedTensor: values by hand and every error."""

from __future__ import annotations

import pytest
import torch

from nestpipe_kernels.jagged import JaggedTensor, KeyedTensor


def test_dense_forms() -> None:
    jt = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 6.0, 7.0]), lengths=torch.tensor([2, 0, 1]))
    assert [row.tolist() for row in jt.to_dense()] == [[1, 2], [], [3]]
    assert jt.to_padded_dense().tolist() == [[1, 2], [0, 0], [3, 0]]
    assert jt.to_padded_dense(1, -1.0).tolist() == [[1], [-1], [3]]
    assert jt.to_padded_dense(3).tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    weights = jt.to_padded_dense_weights()
    assert weights is not None
    assert weights.tolist() == [[5, 6], [0, 0], [7, 0]]
    dense_weights = jt.to_dense_weights()
    assert dense_weights is not None
    assert [row.tolist() for row in dense_weights] == [[5, 6], [], [7]]
    assert jt.offsets().tolist() == [0, 2, 2, 3]


def test_padded_rows_of_vectors_pass_gradients() -> None:
    values = torch.arange(6.0).view(3, 2).requires_grad_()
    padded = JaggedTensor(values, offsets=torch.tensor([0, 1, 3])).to_padded_dense(1)
    assert padded.tolist() == [[[0, 1]], [[2, 3]]]
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_from_dense() -> None:
    jt = JaggedTensor.from_dense([torch.tensor([1]), torch.tensor([], dtype=torch.int64), torch.tensor([7, 8])])
    assert jt.values().tolist() == [1, 7, 8]
    assert jt.lengths().tolist() == [1, 0, 2]
    assert JaggedTensor.from_dense_lengths(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 2])).values().tolist() == [
        1,
        3,
        4,
    ]


def test_empty() -> None:
    assert JaggedTensor.empty(values_dtype=torch.int64).to_dense() == []
    assert JaggedTensor.empty().to_padded_dense().shape == (0, 0)
    like = JaggedTensor.empty_like(JaggedTensor(torch.arange(2), torch.ones(2), lengths=torch.tensor([2])))
    assert like.values().dtype == torch.int64
    assert like.weights().numel() == 0


def test_moves() -> None:
    jt = JaggedTensor(torch.arange(3), torch.ones(3), lengths=torch.tensor([1, 2]))
    for moved in (jt.to("cpu"), jt.pin_memory()):
        assert [row.tolist() for row in moved.to_dense()] == [[0], [1, 2]]
        assert moved.weights().tolist() == [1, 1, 1]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"JaggedTensor: lengths sum to 4 but there are 3 values"):
        JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"JaggedTensor: offsets must have 2 \+ 1 entries, got 2"):
        JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1]), offsets=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"this JaggedTensor has no weights"):
        JaggedTensor(torch.arange(3), lengths=torch.tensor([3])).weights()
    with pytest.raises(ValueError, match=r"from_dense: give at least one row"):
        JaggedTensor.from_dense([])
    with pytest.raises(ValueError, match=r"expected values \[B, L, ...\] and lengths \[B\], got \[2\] and \[1\]"):
        JaggedTensor.from_dense_lengths(torch.arange(2), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"lengths sum to 3 but there are 2 values"):
        JaggedTensor.from_dense_lengths(torch.zeros(1, 2), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"desired_length must be >= 0, got -1"):
        JaggedTensor(torch.arange(3), lengths=torch.tensor([3])).to_padded_dense(-1)


def test_keyed_tensor() -> None:
    kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert kt["b"].tolist() == [[2, 3], [5, 6]]
    assert {key: value.tolist() for key, value in kt.to_dict().items()} == {
        "a": [[1], [4]],
        "b": [[2, 3], [5, 6]],
    }
    assert kt.offset_per_key() == [0, 1, 3]
    other = KeyedTensor.from_tensor_list(["c"], [torch.tensor([[7], [8]])])
    first, second = KeyedTensor.regroup([kt, other], [["b", "c"], ["a"]])
    assert first.tolist() == [[2, 3, 7], [5, 6, 8]]
    assert second.tolist() == [[1], [4]]
    named = KeyedTensor.regroup_as_dict([kt], [["a"]], ["x"])
    assert named["x"].tolist() == [[1], [4]]
    assert kt.to("cpu")["a"].tolist() == [[1], [4]]


def test_keyed_tensor_errors() -> None:
    values = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"KeyedTensor: 1 keys but 2 lengths"):
        KeyedTensor(["a"], [1, 2], values)
    with pytest.raises(ValueError, match=r"length_per_key sums to 4 but dimension 1 of values has 3"):
        KeyedTensor(["a", "b"], [2, 2], values)
    with pytest.raises(ValueError, match=r"key_dim 2 does not exist in values of shape \[2, 3\]"):
        KeyedTensor(["a"], [3], values, key_dim=2)
    kt = KeyedTensor(["a"], [3], values)
    with pytest.raises(KeyError, match=r"no key 'b'; it has \['a'\]"):
        kt["b"]
    with pytest.raises(KeyError, match=r"no KeyedTensor has \['z'\]; there are \['a'\]"):
        KeyedTensor.regroup([kt], [["a", "z"]])
    with pytest.raises(ValueError, match=r"give at least one KeyedTensor"):
        KeyedTensor.regroup([], [["a"]])
    with pytest.raises(ValueError, match=r"1 groups but 2 names"):
        KeyedTensor.regroup_as_dict([kt], [["a"]], ["x", "y"])
