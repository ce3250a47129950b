"""Settings that bound a table: refusals, quotas per rank, and what fixed vocabularies read without a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from nestpipe_kernels import init, optim, policy
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.store import EmbeddingStore


def _config(**settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**{"num_embeddings": 10, "embedding_dim": 4, "name": "t", **settings})


def _capacity(config: EmbeddingBagConfig, process_group: Any = None, rule: Any = None) -> int | None:
    ebc = EmbeddingBagCollection([config], optimizer=rule or optim.Adagrad(), process_group=process_group)
    return ebc.row_stores()[0].tables[0].capacity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 2.5}, "table 't': capacity must be an integer >= 1 or None, got 2.5"),
        ({"capacity": True}, "table 't': capacity must be an integer >= 1 or None, got True"),
        ({"capacity_bytes": 0}, "table 't': capacity_bytes must be an integer >= 1 or None, got 0"),
        (
            {"capacity": 5, "capacity_bytes": 640},
            "table 't': capacity 5 and capacity_bytes 640 contradict each other: give one of them",
        ),
        (
            {"eviction": policy.LRU()},
            r"table 't': eviction LRU\(slack=0.0625\) needs a capacity, or it would never evict; give capacity=",
        ),
        (
            {"init_fn": lambda w: w, "eviction": policy.LRU(), "capacity": 5},
            "table 't': init_fn fills every row at construction, which contradicts eviction; give init= instead",
        ),
        (
            {"init_fn": lambda w: w, "admission": policy.Probability(0.5)},
            "table 't': init_fn fills every row at construction, which contradicts admission",
        ),
    ],
)
def test_values_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"admission": 3}, r"table 't': admission must be a MinFrequency or Probability of .* or None, got 3"),
        ({"admission": policy.LRU()}, r"admission must be a MinFrequency or Probability .* got LRU\(slack=0.0625\)"),
        ({"eviction": "lru", "capacity": 9}, "table 't': eviction must be an LRU, LFU, TTL or Score .* got 'lru'"),
        ({"default_row": 0.0}, r"default_row must be an nk.init object such as nk.init.Zeros\(\) or None, got 0.0"),
    ],
)
def test_rules_of_another_kind(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _config(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 5),
        ("capacity_bytes", 640),
        ("admission", policy.MinFrequency(2)),
        ("eviction", policy.TTL(5)),
        ("default_row", init.Zeros()),
    ],
)
def test_parameter_tables_have_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"table 't': {name} needs an optimizer; pass optimizer=, or leave {name} out"):
        EmbeddingBagCollection([_config(**{name: value})])


def test_an_eviction_by_age_alone_needs_no_capacity() -> None:
    assert _capacity(_config(eviction=policy.TTL(5))) is None
    assert _capacity(_config(eviction=policy.TTL(5), trainable=False)) is None


def _bytes_per_row(rule: object) -> int:
    """A row of its store, with metadata and index."""
    row_floats = EmbeddingBagCollection([_config()], optimizer=rule).row_stores()[0].row_floats
    return row_floats * 4 + 40 + 24


def test_capacity_in_bytes_counts_whole_rows() -> None:
    each = _bytes_per_row(optim.Adam())
    assert each >= 4 * (4 + 8 + 1) + 64
    for given, rows in ((each, 1), (3 * each - 1, 2), (3 * each, 3)):
        assert _capacity(_config(capacity_bytes=given), rule=optim.Adam()) == rows
    with pytest.raises(ValueError, match=f"table 't': capacity_bytes {each - 1} holds no row: one takes {each} bytes"):
        _capacity(_config(capacity_bytes=each - 1), rule=optim.Adam())


def test_capacity_in_bytes_counts_what_eviction_holds_back_as_a_single_table_does() -> None:
    given = 1000 * _bytes_per_row(optim.Adam())
    config = _config(capacity_bytes=given, eviction=policy.LRU(0.25))
    store = EmbeddingStore(name="t", dim=4, optimizer=optim.Adam(), capacity_bytes=given, eviction=policy.LRU(0.25))
    assert _capacity(config, rule=optim.Adam()) == store.tables[0].capacity == 800


@pytest.mark.parametrize("unit", [1, None])
def test_quotas_of_the_ranks_sum_to_the_capacity(unit: int | None) -> None:
    config = _config(capacity=8) if unit else _config(capacity_bytes=8 * _bytes_per_row(optim.Adagrad()) + 1)
    assert run_ranks(3, lambda communicator: _capacity(config, communicator)) == [3, 3, 2]


def test_the_store_gets_the_rules() -> None:
    rules = {"admission": policy.MinFrequency(2), "eviction": policy.LFU(), "capacity": 9}
    ebc = EmbeddingBagCollection([_config(default_row=init.Zeros(), **rules)], optimizer=optim.Adagrad())
    spec = ebc.row_stores()[0].tables[0]
    assert (spec.admission, spec.eviction, spec.default) == (rules["admission"], rules["eviction"], init.Zeros())


def _keep(keys: torch.Tensor, last_used: torch.Tensor, frequency: torch.Tensor, batch: int) -> torch.Tensor:
    return frequency.to(torch.float64)


def test_a_score_is_described_by_its_functions_name() -> None:
    assert repr(policy.Score(_keep)) == f"Score(function={__name__}._keep, slack=0.0625)"
