"""The public face of admission and eviction: find_or_insert, default rows, gradients, counts, loading, and errors."""

from __future__ import annotations

import pytest
import torch
from stores import StateOf, item_store, keys_of, table_zero, whole_rows

from nestpipe_kernels import init, optim
from nestpipe_kernels.errors import StoreFullError
from nestpipe_kernels.policy import LFU, LRU, TTL, CountingFilter, MinFrequency, Probability, Score
from nestpipe_kernels.store import EmbeddingStore, RowMetadata
from nestpipe_kernels.types import KeyStatus, TableSpec

FOUND, INSERTED, ABSENT, REFUSED, NOT_ADMITTED = (int(status) for status in KeyStatus)


def test_find_or_insert_counts_batches_by_itself():
    store = item_store(capacity=3, eviction=LRU(0.0))
    assert store.find_or_insert(keys_of(1, 2, 3))[1].tolist() == [INSERTED] * 3
    # The call before may still be in flight; then nothing has room.
    assert store.find_or_insert(keys_of(4))[1].tolist() == [REFUSED]
    assert store.find_or_insert(keys_of(4))[1].tolist() == [INSERTED]
    assert store.last_batch == 2
    assert store.metadata(keys_of(4)).last_used.tolist() == [2]
    plain = item_store()
    plain.find_or_insert(keys_of(1))
    assert plain.last_batch == -1


def test_fault_31_refused_keys_are_reported_one_by_one_and_raise_where_no_rule_says_so():
    store = item_store(capacity=2, eviction=LRU(0.0), default=init.Constant(9.0))
    rows, status = store.find_or_insert(keys_of(1, 2, 3))
    assert status.tolist() == [INSERTED, INSERTED, REFUSED]
    assert rows[2].tolist() == [9.0] * 4
    plain = item_store(capacity=2)
    with pytest.raises(StoreFullError, match="find_or_insert: table 'item' is full: 1 of 3 keys found no room"):
        plain.find_or_insert(keys_of(1, 2, 3))
    assert len(plain) == 0


def test_fault_30_a_capacity_of_zero_refuses_every_key():
    store = item_store(capacity=0, eviction=LRU())
    for _ in range(3):
        assert store.find_or_insert(keys_of(1, 2))[1].tolist() == [REFUSED, REFUSED]
    assert store.find(keys_of(1))[1].tolist() == [ABSENT]


def test_fault_18_a_key_without_a_row_leaves_the_gradients_of_others_in_place():
    store = EmbeddingStore(
        name="item", dim=2, optimizer=optim.SGD(1.0), capacity=3, eviction=LRU(0.0), admission=MinFrequency(2),
        init=init.Zeros(),
    )  # fmt: skip
    keys = keys_of(1, 1, 7, 2, 2, 8, 3, 3)
    assert store.find_or_insert(keys)[1].tolist() == [
        INSERTED, FOUND, NOT_ADMITTED, INSERTED, FOUND, NOT_ADMITTED, INSERTED, FOUND
    ]  # fmt: skip
    grads = torch.arange(1.0, 9.0).unsqueeze(1).repeat(1, 2)
    status = store.apply_gradients(keys, grads, step=1)
    assert status.tolist() == [FOUND, FOUND, ABSENT, FOUND, FOUND, ABSENT, FOUND, FOUND]
    assert store.find(keys_of(1, 2, 3, 7, 8))[0][:, 0].tolist() == [-3.0, -9.0, -15.0, 0.0, 0.0]


def test_default_rows():
    for default, expected in ((init.Constant(2.0), [2.0] * 4), (None, None)):
        store = item_store(default=default, admission=MinFrequency(2))
        row = whole_rows(store, keys_of(5))[0]
        start = init.Uniform(-0.5, 0.5).reference(0, "item", keys_of(5).numpy(), 4)[0].tolist()
        assert row[:4].tolist() == (expected or start)
        assert row[4:8].tolist() == [0.5] * 4
        assert row[8].item() == 0.0
        assert store.find(keys_of(5))[0][0].tolist() == (expected or start)
        assert store.find_or_insert(keys_of(5))[0][0].tolist() == (expected or start)
        # With a row of its own it starts from its initial values.
        assert store.find_or_insert(keys_of(5))[0][0].tolist() == start
    per_key = item_store(default=init.Normal(0.0, 1.0))
    rows = per_key.find(keys_of(1, 2))[0]
    assert rows.tolist() == init.Normal(0.0, 1.0).reference(0, "item", keys_of(1, 2).numpy(), 4).tolist()


def test_capacity_in_bytes():
    store = item_store(capacity_bytes=100_000, eviction=LRU(0.0))
    each = 4 * store.row_floats + 64
    assert store.tables[0].capacity == 100_000 // each
    assert item_store(capacity_bytes=100_000, eviction=LRU(0.25)).tables[0].capacity == 80_000 // each
    with pytest.raises(ValueError, match="capacity 5 and capacity_bytes 7 of table 'item' contradict each other"):
        item_store(capacity=5, capacity_bytes=7)
    with pytest.raises(ValueError, match=f"capacity_bytes 7 holds no row: one takes {each} bytes with its index"):
        item_store(capacity_bytes=7)
    with pytest.raises(TypeError, match=r"capacity_bytes must be an integer, got 7\.5"):
        item_store(capacity_bytes=7.5)


def test_settings_that_no_table_can_have():
    with pytest.raises(ValueError, match=r"table 'item' has eviction LRU\(slack=0.0625\) but no capacity"):
        item_store(eviction=LRU())
    item_store(eviction=TTL(3))
    with pytest.raises(TypeError, match=r"eviction of table 'item' must be an LRU, LFU, TTL or Score .* got 'lru'"):
        item_store(capacity=3, eviction="lru")
    with pytest.raises(TypeError, match=r"admission of table 'item' must be a MinFrequency or Probability .* got 3"):
        item_store(admission=3)
    with pytest.raises(TypeError, match=r"default of table 'item' must be an nk.init object .* got 0.0"):
        item_store(default=0.0)


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        (
            lambda n: torch.full((n,), float("nan")),
            ValueError,
            r"float64 \[2\] without NaN, got 2 NaN; nothing",
        ),
        (lambda n: torch.zeros(n + 1), ValueError, r"float64 \[2\], got float32 \[3\] on cpu; nothing was changed"),
        (lambda n: torch.zeros(n, dtype=torch.int64), TypeError, r"float64 \[2\], got int64 \[2\] on cpu"),
        (
            lambda n: [0.0] * n,
            TypeError,
            r"score function of table 'item' must return .* got list; nothing",
        ),
        (lambda n: torch.zeros(n).to_sparse(), TypeError, r"float64 \[2\], got sparse_coo; nothing was changed"),
        (lambda n: 1 // 0, ZeroDivisionError, "by zero"),
    ],
)
def test_a_bad_score_changes_nothing(scores, error, message):
    store = item_store(
        capacity=3, admission=MinFrequency(2), eviction=Score(lambda keys, *_: scores(keys.numel()), 0.0)
    )
    store.find_or_insert(keys_of(1, 1, 2, 2, 3, 3, 9))

    def state():
        counts = {name: tensor.tolist() for name, tensor in store.admission_state().items()}
        metadata = store.metadata(torch.arange(10))
        return store.keys().tolist(), counts, store.counters(), metadata.last_used.tolist(), metadata.frequency.tolist()

    before = state()
    with pytest.raises(error, match=message):
        store.find_or_insert(keys_of(1, 9, 4, 5, 5), batch=5)
    assert state() == before


def test_score_functions_see_the_rows_that_may_go():
    calls = []

    def score(keys, last_used, frequency, batch):
        calls.append((keys.tolist(), last_used.tolist(), frequency.tolist(), batch))
        return keys.to(torch.bfloat16)

    store = item_store(capacity=4, eviction=Score(score, 0.0))
    store.find_or_insert(keys_of(1, 2, 2, 3, 4), batch=0)
    store.find_or_insert(keys_of(4), batch=1)
    assert store.find_or_insert(keys_of(3, 10), batch=2)[1].tolist() == [FOUND, INSERTED]
    ((keys, last_used, frequency, batch),) = calls
    assert sorted(zip(keys, last_used, frequency)) == [(1, 0, 1), (2, 0, 2)]
    assert batch == 2
    assert sorted(store.keys().tolist()) == [2, 3, 4, 10]


def test_score_functions_see_keys_in_an_order_of_their_own():
    """Not that of insertion: a score that depends on positions would evict other rows after a resume."""
    seen = []

    def score(keys, last_used, frequency, batch):
        seen.append(keys.tolist())
        return torch.arange(len(keys), dtype=torch.float64)

    gone = []
    for order in (torch.arange(50), torch.arange(50).flip(0)):
        store = item_store(capacity=50, eviction=Score(score, 0.0))
        store.find_or_insert(order, batch=0)
        store.find_or_insert(keys_of(100), batch=5)
        gone.append(set(range(50)) - set(store.keys().tolist()))
    assert seen[0] == seen[1]
    assert gone[0] == gone[1] == {seen[0][0]}


def test_scores_count_to_the_last_bit_of_float64():
    store = item_store(capacity=40, eviction=Score(lambda keys, *_: 1.0 + keys.double() * 2.0**-50, 0.0))
    store.find_or_insert(torch.arange(40), batch=0)
    store.find_or_insert(torch.arange(100, 105), batch=5)
    assert set(store.keys().tolist()) == set(range(5, 40)) | set(range(100, 105))


def test_a_score_function_must_not_use_its_store():
    def score(keys, last_used, frequency, batch):
        return store.metadata(keys).frequency.double()

    store = item_store(capacity=1, eviction=Score(score, 0.0))
    store.find_or_insert(keys_of(1))
    with pytest.raises(RuntimeError, match="a score function must not use the store whose rows it scores"):
        store.find_or_insert(keys_of(2), batch=5)
    assert store.keys().tolist() == [1]


@pytest.mark.parametrize("rule", [MinFrequency(4), MinFrequency(4, CountingFilter(1 << 20))])
def test_counts_move_between_stores(rule):
    store = item_store(admission=rule)
    keys = torch.arange(1000)
    for _ in range(2):
        store.find_or_insert(keys)
    store.find_or_insert(keys[:10])
    state = store.admission_state()
    other = item_store(admission=rule)
    other.load_admission_state(None, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in other.admission_state().items())
    assert other.find_or_insert(keys[:20])[1].tolist() == [INSERTED] * 10 + [NOT_ADMITTED] * 10
    # Dealt out over two owners by virtual slice, and put together again.
    owned = torch.arange(65536) % 64 < 32
    halves = [item_store(admission=rule), item_store(admission=rule)]
    for half, part in zip(halves, (owned, ~owned)):
        half.load_admission_state("item", state, part)
        size = next(iter(half.admission_state().values())).numel()
        assert 0 < size < next(iter(state.values())).numel()
        rows = half.find_or_insert(keys[:10])[1]
        assert 0 < int((rows == INSERTED).sum()) < 10
    whole = item_store(admission=rule)
    for part in (owned, ~owned):
        half = item_store(admission=rule)
        half.load_admission_state(0, state, part)
        whole.load_admission_state(0, half.admission_state())
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.admission_state().items())


def test_counts_that_do_not_fit_are_refused():
    exact, filtered = item_store(admission=MinFrequency(3)), item_store(admission=MinFrequency(3, CountingFilter(4096)))
    state = {"keys": keys_of(1), "counts": keys_of(2)}
    with pytest.raises(ValueError, match=r"'item' with admission MinFrequency.* needs \['blocks', 'cells'\], got"):
        filtered.load_admission_state(None, state)
    with pytest.raises(ValueError, match="table 'item': counts must be >= 1, got 0"):
        exact.load_admission_state(None, {"keys": keys_of(1), "counts": keys_of(0)})
    with pytest.raises(TypeError, match="counts must be a contiguous CPU tensor of int64"):
        exact.load_admission_state(None, {"keys": keys_of(1), "counts": torch.ones(1)})
    cells = torch.ones(1, 512, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"blocks must be in \[0, 8\), got 8 to 8"):
        filtered.load_admission_state(None, {"blocks": keys_of(8), "cells": cells})
    with pytest.raises(ValueError, match=r"cells must be .* of uint8 \[1, 512\], got uint8 \[1, 511\]"):
        filtered.load_admission_state(None, {"blocks": keys_of(7), "cells": cells[:, 1:].contiguous()})
    assert filtered.admission_state()["blocks"].numel() == 0


def test_filters_count_at_least_what_happened_and_rarely_more():
    store = item_store(admission=MinFrequency(3, CountingFilter(80_000)))
    keys = torch.arange(10_000)
    assert (store.find_or_insert(keys)[1] == NOT_ADMITTED).all()
    early = int((store.find_or_insert(keys)[1] == INSERTED).sum())
    assert early < 0.03 * 10_000
    assert (store.find_or_insert(keys)[1] != NOT_ADMITTED).all()


def test_a_row_starts_with_the_occurrences_counted_before_it():
    store = item_store(admission=MinFrequency(5), capacity=2, eviction=LFU(0.0))
    store.find_or_insert(keys_of(1, 1, 2), batch=0)
    store.find_or_insert(keys_of(1, 1, 1, 2), batch=1)
    assert store.metadata(keys_of(1)).frequency.tolist() == [5]
    # An evicted key starts anew.
    store.find_or_insert(torch.tensor([3, 4]).repeat(6), batch=5)
    assert store.find(keys_of(1))[1].tolist() == [ABSENT]
    assert store.find_or_insert(keys_of(1), batch=6)[1].tolist() == [NOT_ADMITTED]
    assert store.admission_state()["keys"].tolist() == [1, 2]
    assert store.admission_state()["counts"].tolist() == [1, 2]


def test_probability_is_decided_once_by_key_and_seed():
    keys = torch.arange(2000)
    chosen = item_store(admission=Probability(0.3)).find_or_insert(keys)[1] == INSERTED
    assert 500 < int(chosen.sum()) < 700
    store = item_store(admission=Probability(0.3))
    for _ in range(3):
        store.find_or_insert(keys)
    assert sorted(store.keys().tolist()) == keys[chosen].tolist()
    other = item_store(admission=Probability(0.3, seed=1)).find_or_insert(keys)[1] == INSERTED
    assert not torch.equal(chosen, other)


def test_loaded_rows_ask_no_rule():
    store = item_store(admission=Probability(0.0), capacity=3, eviction=LRU(0.0))
    keys = keys_of(4, 5, 6)
    rows = torch.arange(3.0).unsqueeze(1).repeat(1, store.row_floats)
    metadata = RowMetadata(keys_of(7, 8, 3), keys_of(1, 2, 3))
    store.load_rows(keys, table_zero(keys), rows, metadata)
    assert torch.equal(whole_rows(store, keys)[:, :9], rows[:, :9])
    assert store.metadata(keys).last_used.tolist() == [7, 8, 3]
    assert store.metadata(keys).frequency.tolist() == [1, 2, 3]
    assert store.counters()["inserted"] == 0
    # The batch after the newest one loaded.
    assert store.last_batch == 8
    # A key that is there is replaced.
    store.load_rows(keys[:1], table_zero(keys[:1]), rows[2:], RowMetadata(keys_of(1), keys_of(1)))
    assert whole_rows(store, keys)[0, 0] == 2.0
    message = "load_rows: table 'item' has 3 rows and room for 3: key 9 at position 1 does not fit; nothing was"
    with pytest.raises(StoreFullError, match=message):
        store.load_rows(keys_of(4, 9), table_zero(keys_of(4, 9)), rows[:2], RowMetadata(keys_of(0, 0), keys_of(0, 0)))
    assert (len(store), whole_rows(store, keys)[0, 0].item()) == (3, 2.0)


def test_a_retrieval_before_a_loading_cannot_be_undone():
    store = item_store()
    keys = keys_of(1)
    retrieval = store.retrieve(keys, table_zero(keys), None, 0)
    row = torch.zeros(1, store.row_floats)
    store.load_rows(keys, table_zero(keys), row, RowMetadata(keys_of(0), keys_of(1)))
    with pytest.raises(ValueError, match="undo: this is not the newest retrieval"):
        store.undo(retrieval)


def test_counters_are_loaded_by_name():
    store = item_store()
    store.find_or_insert(keys_of(1, 2))
    counters = store.counters()
    counters["evicted"] = 5
    store.load_counters(None, counters)
    assert store.counters() == counters
    with pytest.raises(ValueError, match=r"load_counters: need \['inserted', .*\], got \['x'\]"):
        store.load_counters(None, {"x": 1})


def test_memory_that_gives_out_leaves_counts_as_they_were():
    store = EmbeddingStore(
        [TableSpec("item", -1, None, 0, admission=MinFrequency(1 << 20))],
        dim=4,
        optimizer=StateOf(),
        memory_limit=300_000,
    )
    failures = 0
    for start in range(0, 20_000, 500):
        before = store.admission_state()
        keys = torch.arange(start, start + 1000)
        try:
            store.find_or_insert(keys)
        except StoreFullError:
            failures += 1
            after = store.admission_state()
            assert torch.equal(after["keys"], before["keys"])
            assert torch.equal(after["counts"], before["counts"])
            assert len(store) == 0
    assert 0 < failures < 40
