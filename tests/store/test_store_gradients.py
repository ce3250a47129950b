"""Updates of a table by itself: against the references, repeated and absent keys, bad gradients."""

from __future__ import annotations

import pytest
import torch
from stores import keys_of, whole_rows

from nestpipe_kernels import optim
from nestpipe_kernels._native import core
from nestpipe_kernels.errors import NonFiniteGradientError
from nestpipe_kernels.ops.lookup_pool.reference import GRADIENT_BLOCK
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import KeyStatus, TableSpec

FOUND, ABSENT = int(KeyStatus.FOUND), int(KeyStatus.ABSENT)
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.Adagrad(lr=0.1, initial_accumulator_value=0.25),
    optim.RowWiseAdagrad(),
    optim.Adam(),
    optim.SGD(lr=0.1, momentum=0.9),
    optim.AdamW(),
    optim.RowWiseAdam(),
    optim.FTRL(lr=0.1, l1=0.1),
    optim.LAMB(),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_updates_follow_the_references(optimizer):
    store = EmbeddingStore(name="t", dim=5, optimizer=optimizer)
    distinct = torch.arange(30) * 1000 - 7
    store.find_or_insert(distinct)
    generator = torch.Generator().manual_seed(0)
    expected = whole_rows(store, distinct)
    for step in (1, 2, 3):
        positions = torch.randint(0, 20, (200,), generator=generator)
        grads = torch.randn(200, 5, generator=generator)
        status = store.apply_gradients(distinct[positions], grads, step=step)
        assert status.tolist() == [FOUND] * 200
        sums = torch.zeros(30, 5)
        for position, grad in zip(positions.tolist(), grads):
            sums[position] += grad
        touched = torch.bincount(positions, minlength=30) > 0
        row_update(expected, sums, optimizer, step, optimizer.lr, touched, implementation="reference")
        assert torch.equal(whole_rows(store, distinct), expected)
    assert store.metadata(distinct).frequency.tolist() == [1] * 30


def test_state_starts_at_the_optimizers_value():
    store = EmbeddingStore(name="t", dim=2, optimizer=optim.Adagrad(initial_accumulator_value=0.25))
    store.find_or_insert(keys_of(1))
    assert whole_rows(store, keys_of(1))[0, 2:4].tolist() == [0.25, 0.25]


def test_fault_25_a_hot_key_is_summed_in_blocks_alike_on_any_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(5000, 3, generator=generator)
    total = torch.zeros(3)
    for start in range(0, 5000, GRADIENT_BLOCK):
        block = torch.zeros(3)
        for grad in grads[start : start + GRADIENT_BLOCK]:
            block = block + grad
        total = total + block
    for threads in (1, 2, 4):
        core().set_num_threads(threads)
        store = EmbeddingStore(name="t", dim=3, optimizer=optim.SGD(lr=1.0))
        before, _ = store.find_or_insert(keys_of(9))
        store.apply_gradients(torch.full((5000,), 9), grads, step=1)
        assert torch.equal(store.find(keys_of(9))[0], before - total)


def test_fault_17_and_18_repeated_keys_sum_and_absent_ones_skip_only_themselves():
    store = EmbeddingStore(name="t", dim=1, optimizer=optim.SGD(lr=1.0))
    before, _ = store.find_or_insert(keys_of(0, 2))
    grads = torch.tensor([[1.0], [100.0], [2.0], [4.0]])
    assert store.apply_gradients(keys_of(0, 1, 0, 2), grads, step=1).tolist() == [FOUND, ABSENT, FOUND, FOUND]
    assert torch.equal(store.find(keys_of(0, 2))[0], before - torch.tensor([[3.0], [4.0]]))
    assert store.keys().tolist() == [0, 2]


def test_fault_20_no_keys_is_no_update():
    store = EmbeddingStore(name="t", dim=1, optimizer=optim.Adam())
    assert store.apply_gradients(keys_of(), torch.empty(0, 1), step=1).tolist() == []


def test_fault_26_one_bad_gradient_changes_nothing():
    store = EmbeddingStore(name="t", dim=2, optimizer=optim.SGD(lr=1.0))
    before, _ = store.find_or_insert(keys_of(1, 2))
    grads = torch.tensor([[1.0, 1.0], [1.0, float("nan")]])
    with pytest.raises(NonFiniteGradientError, match=r"gradient of 1 keys of table 't' is NaN or infinite \(keys 2\)"):
        store.apply_gradients(keys_of(1, 2), grads, step=1)
    assert torch.equal(store.find(keys_of(1, 2))[0], before)


def test_the_learning_rates_scale_is_used_and_a_frozen_table_refuses():
    specs = [TableSpec("slow", -1, None, 0, lr_scale=0.5), TableSpec("frozen", -1, None, 0, trainable=False)]
    store = EmbeddingStore(specs, dim=1, optimizer=optim.SGD(lr=1.0))
    before, _ = store.find_or_insert(keys_of(1), table="slow")
    store.apply_gradients(keys_of(1), torch.ones(1, 1), step=1, table="slow")
    assert torch.equal(store.find(keys_of(1), table="slow")[0], before - 0.5)
    with pytest.raises(ValueError, match=r"apply_gradients: table 'frozen' is frozen \(trainable=False\)"):
        store.apply_gradients(keys_of(1), torch.ones(1, 1), step=1, table="frozen")


def test_a_call_may_have_its_own_learning_rate():
    specs = [TableSpec("slow", -1, None, 0, lr_scale=0.5)]
    store = EmbeddingStore(specs, dim=1, optimizer=optim.SGD(lr=1.0))
    before, _ = store.find_or_insert(keys_of(1))
    store.apply_gradients(keys_of(1), torch.ones(1, 1), step=1, lr=0.25)
    assert torch.equal(store.find(keys_of(1))[0], before - 0.125)
    store.apply_gradients(keys_of(1), torch.ones(1, 1), step=2, lr=0)
    assert torch.equal(store.find(keys_of(1))[0], before - 0.125)
    store.apply_gradients(keys_of(1), torch.ones(1, 1), step=3)
    assert torch.equal(store.find(keys_of(1))[0], before - 0.125 - 0.5)
    for lr in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"apply_gradients: lr must be finite and >= 0, got {lr}"):
            store.apply_gradients(keys_of(1), torch.ones(1, 1), step=4, lr=lr)
    with pytest.raises(
        ValueError, match=r"lr times lr_scale must be finite in float32, got 1e\+39 \* 0.5 for table 'slow'"
    ):
        store.apply_gradients(keys_of(1), torch.ones(1, 1), step=4, lr=1e39)
    with pytest.raises(TypeError, match="apply_gradients: lr must be a number or None, got str"):
        store.apply_gradients(keys_of(1), torch.ones(1, 1), step=4, lr="0.1")


def test_bad_gradients_are_refused():
    store = EmbeddingStore(name="t", dim=2, optimizer=optim.SGD())
    with pytest.raises(ValueError, match=r"apply_gradients: grads must be .* float32 \[1, 2\], got float32 \[2, 2\]"):
        store.apply_gradients(keys_of(1), torch.zeros(2, 2), step=1)
    with pytest.raises(TypeError, match=r"apply_gradients: grads must be .* got float64"):
        store.apply_gradients(keys_of(1), torch.zeros(1, 2, dtype=torch.float64), step=1)
    with pytest.raises(ValueError, match="step must be an integer >= 1"):
        store.apply_gradients(keys_of(1), torch.zeros(1, 2), step=0)
