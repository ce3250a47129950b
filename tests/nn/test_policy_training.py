"""Modules that train without a pipeline over tables with admission and eviction, and whole tables that lack rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from nestpipe_kernels import init, optim, policy
from nestpipe_kernels.comm import Communicator
from nestpipe_kernels.errors import StoreFullError
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.testing.explorer import read_policies, read_store
from nestpipe_kernels.testing.policy_model import TableModel
from nestpipe_kernels.types import UNBOUNDED, PoolingType


def _module(process_group: Any = None, num_embeddings: int = UNBOUNDED, **settings: Any) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(num_embeddings, 3, "t", init=init.Uniform(-0.5, 0.5), **settings)
    return EmbeddingBagCollection([table], optimizer=optim.Adagrad(lr=0.1), process_group=process_group)


def _features(*keys: int) -> KeyedJaggedTensor:
    """One key in each bag."""
    return KeyedJaggedTensor(["t"], torch.tensor(keys, dtype=torch.int64), lengths=torch.ones(len(keys), dtype=int))


def _train(ebc: EmbeddingBagCollection, *keys: int) -> Tensor:
    """One step; the embeddings that it read. A key's gradient is its own, whatever else is looked up."""
    output = ebc(_features(*keys)).values()
    (output * torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    return output.detach()


def _keys(ebc: EmbeddingBagCollection) -> set[int]:
    return set(ebc.store("t").keys().tolist())


def _rows(ebc: EmbeddingBagCollection) -> dict[tuple[str, int], bytes]:
    rows: dict[tuple[str, int], bytes] = {}
    read_store(ebc.row_stores()[0], rows, {})
    return rows


RULES: dict[str, dict[str, Any]] = {
    "lru": {"capacity": 12, "eviction": policy.LRU(slack=0.0)},
    "lfu-admission": {"capacity": 12, "eviction": policy.LFU(), "admission": policy.MinFrequency(2)},
    "ttl": {"eviction": policy.TTL(2)},
    "refuse": {"capacity": 12, "admission": policy.Probability(0.7)},
}


@pytest.mark.parametrize("rule", RULES)
def test_steps_without_a_pipeline_follow_the_written_rules(rule: str) -> None:
    chance = random.Random(1)
    ebc, model = _module(**RULES[rule]), TableModel("t", **{"capacity": None, **RULES[rule]})
    for step in range(25):
        keys = [chance.randrange(40) for _ in range(8)]
        _train(ebc, *keys)
        distinct = list(dict.fromkeys(keys))
        model.retrieve(distinct, [keys.count(key) for key in distinct], step)
        assert read_policies(ebc.row_stores()[0])["t"]["counters"] == model.counters
        assert _keys(ebc) == set(model.rows)
    metadata = ebc.store("t").store.metadata(torch.tensor(sorted(model.rows)))
    assert list(zip(metadata.last_used.tolist(), metadata.frequency.tolist())) == [
        v for _, v in sorted(model.rows.items())
    ]
    assert sum(model.counters.values()) - model.counters["inserted"] > 10


def test_a_row_stays_until_the_update_of_every_forward_that_looked_it_up() -> None:
    """Three forwards make one step: the third finds only rows that the first two need, and gets none of them."""
    ebc = _module(capacity=4, eviction=policy.LRU(slack=0.0))
    free = _module()
    for module in (ebc, free):
        outputs = [module(_features(*keys)).values() for keys in ((1, 2), (3, 4), (5, 1))]
        sum((k + 1.0) * output.sum() for k, output in enumerate(outputs)).backward()
    assert _keys(ebc) == {1, 2, 3, 4}
    assert _rows(ebc) == {key: row for key, row in _rows(free).items() if key[1] != 5}
    assert ebc.store("t").counters() == {"inserted": 4, "evicted": 0, "expired": 0, "refused": 1, "not_admitted": 0}
    _train(ebc, 1)
    _train(ebc, 6)
    assert _keys(ebc) & {1, 6} == {1, 6}


def test_fault_18_the_gradient_of_a_refused_key_is_skipped_alone() -> None:
    keys = list(range(-20, 20))
    some, every = _module(admission=policy.Probability(0.5)), _module()
    for _ in range(3):
        _train(some, *keys)
        _train(every, *keys)
    assert 5 < len(_keys(some)) < 35
    assert _rows(some) == {key: row for key, row in _rows(every).items() if key[1] in _keys(some)}


def test_a_key_that_is_admitted_between_two_forwards_takes_part_in_the_update() -> None:
    ebc = _module(admission=policy.MinFrequency(2), default_row=init.Constant(0.25))
    first, second = ebc(_features(7)).values(), ebc(_features(7)).values()
    assert torch.equal(first, torch.full((1, 3), 0.25))
    assert torch.equal(second, _module().store("t").find(torch.tensor([7]))[0])
    before = second.detach().clone()
    (first + second).sum().backward()
    assert not torch.equal(ebc.store("t").find(torch.tensor([7]))[0], before)


def test_fault_33_a_key_that_returns_starts_afresh() -> None:
    ebc = _module(capacity=2, eviction=policy.LRU(slack=0.0))
    first = _train(ebc, 1)
    for _ in range(3):
        _train(ebc, 1)
    _train(ebc, 2)
    _train(ebc, 3)
    _train(ebc, 4)
    assert 1 not in _keys(ebc)
    _train(ebc, 5)
    assert torch.equal(_train(ebc, 1), first)
    fresh = _module()
    _train(fresh, 1)
    assert _rows(ebc)["t", 1] == _rows(fresh)["t", 1]


def test_fault_31_without_a_rule_a_full_table_raises() -> None:
    ebc = _module(capacity=2)
    _train(ebc, 1, 2)
    with pytest.raises(StoreFullError, match=r"table 't': 1 new keys of this batch have no room \(the first: 3; this"):
        ebc(_features(2, 3))
    assert _keys(ebc) == {1, 2}


def _no_sixes(keys: Tensor, dim: int, seed: int) -> Tensor:
    if bool((keys == 6).any()):
        raise RuntimeError("no values for 6")
    return keys[:, None].to(torch.float32).expand(-1, dim)


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"capacity": 3}, StoreFullError),
        ({"capacity": 3, "eviction": policy.LRU(), "default_row": init.Custom(_no_sixes)}, RuntimeError),
        ({"capacity": 4, "eviction": policy.LRU(), "init": init.Custom(_no_sixes)}, RuntimeError),
        ({"capacity": 4, "eviction": policy.Score(lambda *_: torch.ones(9))}, ValueError),
    ],
)
def test_a_forward_that_fails_leaves_the_stores_as_they_were(settings: dict[str, Any], error: type[Exception]) -> None:
    """Also the stores whose part of it was done: `first` has another dim, so another store."""
    first = EmbeddingBagConfig(UNBOUNDED, 2, "first", feature_names=["f"], capacity=4, eviction=policy.LRU())
    table = EmbeddingBagConfig(UNBOUNDED, 3, "t", **settings)
    ebc = EmbeddingBagCollection([first, table], optimizer=optim.Adagrad(lr=0.1))

    def forward(*keys: int) -> Tensor:
        lengths = torch.ones(2 * len(keys), dtype=torch.int64)
        features = KeyedJaggedTensor(["f", "t"], torch.tensor(keys + keys), lengths=lengths)
        return ebc(features).values()

    def state() -> list[Any]:
        rows: dict[tuple[str, int], bytes] = {}
        for store in ebc.row_stores():
            read_store(store, rows, {})
        return [rows, [(read_policies(store), store.last_batch) for store in ebc.row_stores()]]

    forward(1, 2).sum().backward()
    forward(3).sum().backward()
    before = state()
    with pytest.raises(error):
        forward(3, 4, 5, 6)
    assert state() == before
    forward(3).sum().backward()
    assert set(ebc.store("first").keys().tolist()) == {1, 2, 3}


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_changes_nothing_and_reads_default_rows(training: bool) -> None:
    ebc = _module(capacity=3, eviction=policy.LRU(), default_row=init.Constant(-1.0))
    _train(ebc, 1, 2, 3)
    before, policies = _rows(ebc), read_policies(ebc.row_stores()[0])
    ebc.train(training)
    with torch.no_grad():
        output = ebc(_features(9, 1, 8)).values()
    assert output[[0, 2]].eq(-1.0).all()
    assert torch.equal(output[1], ebc.store("t").find(torch.tensor([1]))[0][0])
    assert (_rows(ebc), read_policies(ebc.row_stores()[0])) == (before, policies)


def test_max_pooling_over_a_key_without_a_row() -> None:
    """Its default value takes part in the maximum; where it wins, nobody gets the gradient."""
    table = EmbeddingBagConfig(
        UNBOUNDED, 2, "t", init=init.Zeros(), pooling=PoolingType.MAX, capacity=1, eviction=policy.LRU(),
        default_row=init.Constant(1.0),
    )  # fmt: skip
    ebc = EmbeddingBagCollection([table], optimizer=optim.SGD(lr=0.5))
    features = KeyedJaggedTensor(["t"], torch.tensor([4, 5, 4]), lengths=torch.tensor([2, 1]))
    output = ebc(features).values()
    assert output.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    output.sum().backward()
    assert ebc.store("t").find(torch.tensor([4, 5]))[0].tolist() == [[-0.5, -0.5], [1.0, 1.0]]


def test_unpooled_lookups_of_keys_without_a_row() -> None:
    table = EmbeddingConfig(UNBOUNDED, 2, "t", admission=policy.Probability(0.0), default_row=init.Constant(0.5))
    ec = EmbeddingCollection([table], optimizer=optim.Adam(lr=0.1))
    output = ec(KeyedJaggedTensor(["t"], torch.tensor([4, 5]), lengths=torch.tensor([2])))["t"].values()
    assert output.eq(0.5).all()
    output.sum().backward()
    assert len(ec.store("t")) == 0


def test_two_ranks_share_the_capacity() -> None:
    def body(communicator: Communicator) -> tuple[set[int], dict[str, int]]:
        ebc = _module(communicator, capacity=5, eviction=policy.LRU(slack=0.0))
        for step in range(8):
            _train(ebc, *(10 * step + 2 * k + communicator.rank for k in range(4)))
        return _keys(ebc), ebc.store("t").counters()

    (keys_0, counters_0), (keys_1, counters_1) = run_ranks(2, body)
    assert (len(keys_0), len(keys_1)) == (3, 2)
    assert not keys_0 & keys_1
    assert counters_0["evicted"] > 5
    assert counters_1["refused"] > 0


# ------------------------------------------------------------------------------------------- fixed vocabularies


def _values(ebc: EmbeddingBagCollection, keys: Sequence[int]) -> Tensor:
    return ebc.store("t").find(torch.tensor(keys))[0]


@pytest.mark.parametrize("default", [None, init.Constant(0.5)])
def test_weight_shows_what_lookups_read(default: Any) -> None:
    ebc = _module(num_embeddings=6, capacity=3, eviction=policy.LRU(slack=0.0), default_row=default, padding_idx=5)
    for keys in ((0, 1), (2,), (3,), (4,)):
        _train(ebc, *keys)
    weight, there = ebc.embedding_bags["t"].weight, _keys(ebc)
    assert len(there) == 3
    initial = _module(num_embeddings=6).embedding_bags["t"].weight
    for key in range(5):
        if key not in there:
            assert torch.equal(weight[key], initial[key] if default is None else torch.full((3,), 0.5))
    assert torch.equal(weight[:5], _values(ebc, range(5)))
    assert weight[5].eq(0.0).all()
    again = _module(num_embeddings=6, capacity=3, eviction=policy.LRU(), default_row=default, padding_idx=5)
    again.load_state_dict(ebc.state_dict())
    assert torch.equal(again.embedding_bags["t"].weight, weight)
    assert _keys(again) == there


def test_loaded_weights_need_no_admission_and_must_fit() -> None:
    ebc = _module(num_embeddings=6, capacity=4, eviction=policy.LRU(), admission=policy.MinFrequency(5))
    weight = ebc.embedding_bags["t"].weight
    weight[:4] += 1.0
    ebc.load_state_dict({"embedding_bags.t.weight": weight})
    assert torch.equal(ebc.embedding_bags["t"].weight, weight)
    with pytest.raises(StoreFullError, match=r"table .t. has 4 rows and room for 4: key .* raise its capacity"):
        ebc.load_state_dict({"embedding_bags.t.weight": weight + 1.0})


def test_a_frozen_table_follows_its_rules_and_keeps_its_values() -> None:
    ebc = _module(num_embeddings=8, capacity=3, eviction=policy.LRU(slack=0.0), trainable=False)
    initial = ebc.embedding_bags["t"].weight
    for keys in ((0, 1), (2, 3), (4, 5), (6,)):
        _train_frozen(ebc, *keys)
    assert len(_keys(ebc)) <= 3
    assert torch.equal(ebc.embedding_bags["t"].weight, initial)


def _train_frozen(ebc: EmbeddingBagCollection, *keys: int) -> None:
    (ebc(_features(*keys)).values() * torch.ones(3, requires_grad=True)).sum().backward()


def test_batches_count_on_from_those_that_the_store_has_seen() -> None:
    """A pipeline may have trained the module before: rows it used must not look as if they were used later."""
    ebc = _module(capacity=4, eviction=policy.LRU(slack=0.0))
    store, keys = ebc.row_stores()[0], torch.tensor([1, 2, 3])
    store.retrieve(keys, torch.zeros(3, dtype=torch.int32), None, 50)
    ages = []
    for key in (9, 10, 11):
        _train(ebc, key)
        handle = store.find_handles(torch.tensor([key]), torch.zeros(1, dtype=torch.int32))
        ages += store.read_metadata(handle).last_used.tolist()  # type: ignore[attr-defined]
    assert ages == [50, -1, 52]  # at 51 the four rows are pinned
