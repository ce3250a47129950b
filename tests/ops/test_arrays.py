"""Arrays of other libraries are taken where tensors are, by DLPack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe_kernels.ops._arrays import as_tensor
from nestpipe_kernels.ops.bucketize import bucketize
from nestpipe_kernels.ops.dedup import dedup
from nestpipe_kernels.ops.intersect import intersect


def test_an_array_and_its_tensor_share_memory() -> None:
    array = np.arange(5)
    tensor = as_tensor(array)
    tensor[0] = 7
    assert isinstance(tensor, torch.Tensor) and array[0] == 7
    assert as_tensor(tensor) is tensor and as_tensor("text") == "text" and as_tensor(None) is None


def test_operations_on_keys_take_arrays() -> None:
    keys = np.array([5, -1, 5, 2**62])
    assert dedup(keys, np.zeros(4, dtype=np.int32)).inverse.tolist() == [0, 1, 0, 2]  # type: ignore[arg-type]
    assert bucketize(np.array([1, 0], dtype=np.int32), 2)[0].tolist() == [1, 0]  # type: ignore[arg-type]
    assert intersect(keys[:2], None, torch.tensor([-1]), None)[0].tolist() == [1]  # type: ignore[arg-type]


def test_an_array_that_cannot_be_shared_is_named() -> None:
    keys = np.arange(3, dtype=np.longdouble)
    with pytest.raises(TypeError, match=r"a numpy array of float128 cannot be used as a tensor \(.*\); copy it"):
        dedup(keys)  # type: ignore[arg-type]
