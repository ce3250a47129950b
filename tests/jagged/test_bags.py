"""Offsets, selection of bags in any order, and the errors of both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe_kernels.jagged import bag_positions, lengths_to_offsets, select_bags


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_offsets_of_lengths(dtype: torch.dtype) -> None:
    offsets = lengths_to_offsets(torch.tensor([2, 0, 3], dtype=dtype))
    assert offsets.tolist() == [0, 2, 2, 5]
    assert offsets.dtype == (torch.int32 if dtype == torch.int32 else torch.int64)


def test_offsets_do_not_overflow_a_narrow_dtype() -> None:
    assert lengths_to_offsets(torch.full((4,), 200, dtype=torch.uint8)).tolist() == [0, 200, 400, 600, 800]
    assert lengths_to_offsets(torch.full((2,), 2**31 - 1, dtype=torch.int32)).tolist()[-1] == 2**32 - 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_select_equals_a_loop_over_bags(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=15))
    values = torch.arange(sum(sizes)) * 7 + 3
    bags = torch.split(values, sizes)
    picked, lengths = select_bags(values, torch.tensor(sizes), torch.tensor(order, dtype=torch.int64))
    assert picked.tolist() == [v for i in order for v in bags[i].tolist()]
    assert lengths.tolist() == [sizes[i] for i in order]


def test_select_passes_gradients_to_rows() -> None:
    values = torch.ones(4, 2, requires_grad=True)
    picked, _ = select_bags(values, torch.tensor([1, 3]), torch.tensor([1, 1]))
    picked.sum().backward()
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == [0, 2, 2, 2]


def test_positions() -> None:
    positions, lengths = bag_positions(torch.tensor([2, 0, 3]), torch.tensor([2, 1, 0]))
    assert positions.tolist() == [2, 3, 4, 0, 1]
    assert lengths.tolist() == [3, 0, 2]


def test_errors() -> None:
    lengths = torch.tensor([2, 1])
    with pytest.raises(IndexError, match=r"bag_positions: index 2 is outside 0 \.\. 1 \(2 to choose from\)"):
        bag_positions(lengths, torch.tensor([0, 2]))
    with pytest.raises(IndexError, match=r"index -1 is outside 0 \.\. 1"):
        bag_positions(lengths, torch.tensor([-1]))
    with pytest.raises(TypeError, match=r"indices must be integers, got torch.float32 \(shape \[1\]\)"):
        bag_positions(lengths, torch.tensor([0.0]))
    with pytest.raises(TypeError, match=r"indices must be a tensor of shape \[k\], got list"):
        bag_positions(lengths, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"select_bags: lengths sum to 3 but there are 4 values"):
        select_bags(torch.arange(4), lengths, torch.tensor([0]))
