"""TensorPool: memory is used again only when nobody can see it any more; it does not grow."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from nestpipe_kernels.stages import pool as pool_module
from nestpipe_kernels.stages.pool import SMALL_BYTES, SPARE, TensorPool

ROWS = SMALL_BYTES // 16  # of 8 floats: twice the smallest size that is pooled


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_comes_back_when_the_last_view_goes():
    pool = TensorPool()
    first = pool.empty((ROWS, 8))
    assert (first.shape, first.dtype, first.is_contiguous()) == ((ROWS, 8), torch.float32, True)
    where, view = address(first), first[3:5]
    del first
    assert address(pool.empty((ROWS, 8))) != where  # the view still sees it
    del view
    again = pool.zeros((ROWS - 5, 8))
    assert address(again) == where
    assert not again.any()
    assert address(pool.empty((ROWS, 8))) != where


@pytest.mark.parametrize("holder", ["view", "numpy", "graph", "storage", "thread"])
def test_whoever_can_see_a_tensor_keeps_it(holder):
    pool = TensorPool()
    tensor = pool.zeros((ROWS, 8)).fill_(7)
    where = address(tensor)
    if holder == "view":
        held = tensor.view(torch.int32)[::2]
    elif holder == "numpy":
        held = tensor.numpy()[5:]
    elif holder == "graph":
        held = (torch.ones(ROWS, 8, requires_grad=True) * tensor).sum()
    elif holder == "storage":
        held = tensor.untyped_storage()
    else:
        held = threading.Thread(target=lambda kept: None, args=(tensor,))
    del tensor
    assert address(pool.empty((ROWS, 8))) != where
    del held
    gc.collect()
    assert where in [address(t) for t in [pool.empty((ROWS, 8)) for _ in range(3)]]


def test_other_types_and_small_tensors():
    pool = TensorPool()
    small = pool.zeros((3,), torch.int64)
    assert small.tolist() == [0, 0, 0]
    assert pool.held_bytes() == 0
    wide = pool.empty((SMALL_BYTES,), torch.bfloat16)
    assert (wide.dtype, wide.shape) == (torch.bfloat16, (SMALL_BYTES,))
    assert pool.empty((0, 4)).shape == (0, 4)


def test_it_holds_what_was_in_use_at_once_and_some():
    pool = TensorPool()
    for step in range(300):
        tensors = [pool.empty((ROWS + (step * 7919 + k * 104729) % (4 * ROWS), 8)) for k in range(6)]
        del tensors
    most = 6 * 5 * ROWS * 32 * 5 // 4  # six of the largest at once
    assert 0 < pool.held_bytes() <= most + SPARE * 5 * ROWS * 32 * 5 // 4


def test_a_small_tensor_does_not_take_a_large_block():
    pool = TensorPool()
    where = address(pool.empty((8 * ROWS, 8)))
    assert address(pool.empty((ROWS, 8))) != where
    assert address(pool.empty((7 * ROWS, 8))) == where


def test_a_pool_that_keeps_nothing():
    pool = TensorPool(keep=False)
    assert pool.zeros((ROWS, 8)).sum() == 0
    assert pool.held_bytes() == 0


def test_nobody_chooses_while_another_one_does(monkeypatch):
    pool, taken, start = TensorPool(), [], threading.Barrier(2, timeout=60)
    address(pool.empty((ROWS, 8)))  # one idle block
    count = pool_module._references

    def slowly(blocks):
        counts = count(blocks)
        time.sleep(0.1)
        return counts

    def take() -> None:
        start.wait()
        taken.append(pool.empty((ROWS, 8)))

    monkeypatch.setattr(pool_module, "_references", slowly)
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({address(tensor) for tensor in taken}) == 2


def test_threads_never_get_the_same_memory():
    pool, clashes = TensorPool(), []

    def body(mark: int) -> None:
        for _ in range(200):
            mine = pool.empty((ROWS, 8)).fill_(mark)
            if not bool((mine == mark).all()):
                clashes.append(mark)

    threads = [threading.Thread(target=body, args=(mark,)) for mark in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert clashes == []
