"""Counts of keys without a row: how cells of a filter rise, stop, merge and go; and what clearing forgets."""

from __future__ import annotations

import pytest
import torch
from stores import item_store, keys_of, table_zero

from nestpipe_kernels.policy import CountingFilter, MinFrequency
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import TableSpec

FILTER = MinFrequency(255, CountingFilter(4096))
RULES = [FILTER, MinFrequency(255)]


def count(store, key, occurrences):
    return store.retrieve(keys_of(key), table_zero(keys_of(key)), torch.tensor([occurrences]), -1)


def cells_of(store):
    """uint8 [8, 512], blocks that are all zero included."""
    state = store.admission_state()
    cells = torch.zeros(8, 512, dtype=torch.uint8)
    cells[state["blocks"]] = state["cells"]
    return cells


def test_counting_a_key_raises_only_its_lowest_cells_to_its_new_count():
    """Adding to all four cells would count others' occurrences as well: keys that share cells would come in early."""
    store = item_store(admission=FILTER)
    shared, before = 0, cells_of(store)
    for key in range(1500):
        count(store, key, 1 + key % 3)
        after = cells_of(store)
        changed = after != before
        assert 1 <= int(changed.sum()) <= 4
        (raised,) = set(after[changed].tolist())
        assert raised - (1 + key % 3) <= int(before[changed].min())
        shared += int(before[changed].max()) > 0
        before = after
    assert shared > 100


def test_a_cell_stops_at_255_and_does_not_start_again():
    store = item_store(capacity=0, admission=FILTER)
    for occurrences in (300, 1, 2**40):
        count(store, 7, occurrences)
        cells = cells_of(store)
        assert set(cells[cells > 0].tolist()) == {255}


def test_loading_keeps_the_larger_count_of_each_cell():
    few, many = item_store(admission=FILTER), item_store(admission=FILTER)
    for key in range(40):
        count(few, key, 1 + key % 5)
        count(many, key + 20, 3)
    expected = torch.maximum(cells_of(few), cells_of(many))
    assert not torch.equal(expected, cells_of(few))
    assert not torch.equal(expected, cells_of(many))
    few.load_admission_state(None, many.admission_state())
    assert torch.equal(cells_of(few), expected)


@pytest.mark.parametrize("rule", RULES)
def test_clearing_forgets_the_counts_of_the_table_alone(rule):
    specs = [TableSpec(name, -1, None, 0, admission=rule) for name in ("a", "b")]
    store = EmbeddingStore(specs, dim=1, optimizer=item_store().optimizer)

    def counted():
        return [sum(part.numel() for part in store.admission_state(name).values()) > 0 for name in ("a", "b")]

    def fill():
        for name in ("a", "b"):
            store.find_or_insert(keys_of(1, 2, 3), table=name)

    fill()
    assert counted() == [True, True]
    store.clear("a")
    assert counted() == [False, True]
    fill()
    store.clear()
    assert counted() == [False, False]
