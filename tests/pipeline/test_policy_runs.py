"""Pipelines over tables with admission and eviction: what is undone, what goes on, and who hears of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_with_another
from policy_cases import half_life
from small_model import EXACT, Batch, Recommender, make_batch, make_pipeline, make_tables, run_all, run_rank, state_of
from torch import Tensor

from nestpipe_kernels import checkpoint, init, policy
from nestpipe_kernels.errors import RemoteRankError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import KeyStatus

RULES: dict[str, dict[str, Any]] = {
    "lru": {"capacity": 7, "eviction": policy.LRU(slack=0.0)},
    "lfu-admission": {"capacity": 7, "eviction": policy.LFU(), "admission": policy.MinFrequency(2)},
    "ttl": {"eviction": policy.TTL(1)},
    "score-default": {"capacity": 7, "eviction": policy.Score(half_life), "default_row": init.Zeros()},
    "refuse-filter": {"capacity": 7, "admission": policy.MinFrequency(2, policy.CountingFilter(4096))},
}
TRAIN = [make_batch(t, 3, keys=9, first_key=3 * t % 11) for t in range(10)]
OTHER = [make_batch(50 + t, 3, keys=9, first_key=40 + 2 * t) for t in range(3)]


def model_of(rule: str, process_group: Any = None) -> Recommender:
    return Recommender(process_group, make_tables(**RULES[rule]))


def final_state(rule: str, batches: Sequence[Batch], schedule: str = "sequential") -> Any:
    return run_rank(make_pipeline(model_of(rule), schedule), batches).state


def counters_of(state: Any) -> dict[str, int]:
    names = ("inserted", "evicted", "expired", "refused", "not_admitted")
    return {name: sum(table["counters"][name] for table in state.policies.values()) for name in names}


@pytest.mark.parametrize("rule", RULES)
def test_the_runs_below_use_their_rules(rule: str) -> None:
    seen = counters_of(final_state(rule, TRAIN))
    assert seen["inserted"] >= 14
    gone = seen["evicted"] + seen["expired"]
    assert (gone > 5) == ("eviction" in RULES[rule])
    assert (seen["not_admitted"] > 5) == ("admission" in RULES[rule])


# ------------------------------------------------------------------------------------------------ what is undone


@pytest.mark.parametrize(("schedule", "rule"), each_with_another(EXACT, RULES))
@pytest.mark.parametrize("bad", [1, 2], ids=["row-gradient", "dense-gradient"])
def test_a_bad_batch_leaves_no_trace_of_its_evictions(schedule: str, rule: str, bad: int) -> None:
    """Batch 4 has a NaN on one of two ranks: both keep rows, metadata, counts and counters of before, bit by bit."""

    runs = run_all(
        2, schedule, lambda rank: _batches(rank, bad), watch=[4], model_of=lambda group: model_of(rule, group)
    )
    for rank, run in enumerate(runs):
        ((before, after),) = run.around_errors
        assert before == after
        assert run.state == _without_the_bad_one(rule)[rank]


def _batches(rank: int, bad: int) -> list[Batch]:
    own = [make_batch(100 * rank + t, 4, keys=16, first_key=5 * t % 23) for t in range(8)]
    own[4] = make_batch(100 * rank + 4, 4, keys=16, first_key=20, bad=bad if rank else 0)
    return own


@functools.cache
def _without_the_bad_one(rule: str) -> list[Any]:
    def kept(rank: int) -> list[Batch]:
        return [batch for t, batch in enumerate(_batches(rank, 0)) if t != 4]

    return [run.state for run in run_all(2, "sequential", kept, model_of=lambda group: model_of(rule, group))]


@pytest.mark.parametrize(("schedule", "rule"), each_with_another(EXACT, RULES))
def test_looking_from_outside_after_every_step_changes_nothing(schedule: str, rule: str) -> None:
    with make_pipeline(model_of(rule), schedule) as pipeline:
        iterator = iter(TRAIN)
        for count in range(1, len(TRAIN) + 1):
            pipeline.progress(iterator)
            if count in (2, 5, 6):
                assert state_of(pipeline) == final_state(rule, TRAIN[:count])
            else:
                pipeline.model.ebc.store("user").counters()
        assert state_of(pipeline) == final_state(rule, TRAIN)


@pytest.mark.parametrize(("schedule", "rule"), each_with_another(EXACT, RULES))
def test_fault_15_evaluation_reads_default_rows_and_changes_nothing(schedule: str, rule: str) -> None:
    with make_pipeline(model_of(rule), schedule) as pipeline:
        iterator = iter(TRAIN)
        for _ in range(4):
            pipeline.progress(iterator)
        before = state_of(pipeline)
        pipeline.model.eval()
        output = pipeline.progress(iter(OTHER))
        with torch.no_grad():
            plain = pipeline.model(OTHER[0])[1]
        pipeline.model.train()
        assert torch.allclose(output, plain, rtol=0, atol=1e-6)
        assert state_of(pipeline) == before
        if "default_row" in RULES[rule]:
            rows = set(before.rows)
            assert not rows & {("user", int(key)) for key in OTHER[0].sparse["user"].values()}
            dense_only = pipeline.model.linear(torch.cat([torch.zeros(3, 8), OTHER[0].dense], 1)).squeeze(1)
            torch.testing.assert_close(output, dense_only.detach())
        list(pipeline.run(iterator))
        assert state_of(pipeline) == final_state(rule, TRAIN)


@pytest.mark.parametrize(("schedule", "rule"), each_with_another(EXACT, RULES))
def test_iterators_in_turns_and_a_loop_left_by_break(schedule: str, rule: str) -> None:
    order = [*TRAIN[:3], OTHER[0], *TRAIN[3:5], *OTHER[1:], *TRAIN[5:7], *TRAIN[:2]]
    with make_pipeline(model_of(rule), schedule) as pipeline:
        train, other = iter(TRAIN[:7]), iter(OTHER)
        for which in (train, train, train, other, train, train, other, other):
            pipeline.progress(which)
        for step in pipeline.run(train):
            if step.index == 9:
                break
        for step in pipeline.run(TRAIN):  # its third batch has been retrieved when the loop ends
            if step.index == 11:
                break
        assert state_of(pipeline) == final_state(rule, order)


@pytest.mark.parametrize("schedule", EXACT)
def test_keys_erased_and_inserted_between_steps_make_and_take_room_alike(schedule: str) -> None:
    def play(schedule: str) -> Any:
        with make_pipeline(model_of("lru"), schedule) as pipeline:
            iterator = iter(TRAIN)
            for number in range(len(TRAIN)):
                pipeline.progress(iterator)
                if number in (3, 6):
                    table = pipeline.model.ebc.store("user")
                    table.erase(table.keys().sort().values[:3])
                if number in (4, 6):
                    _, status = table.find_or_insert(torch.tensor([500 + number, 600 + number, 700]))
                    assert KeyStatus.INSERTED in status.tolist()
            return state_of(pipeline)

    assert play(schedule) == play("sequential")


@pytest.mark.parametrize(("schedule", "rule"), each_with_another(EXACT, RULES))
def test_another_pipeline_over_the_same_stores_goes_on_counting_batches(schedule: str, rule: str) -> None:
    """Pins and ages are by batch index: a new pipeline that began at 0 would evict other rows."""
    model = model_of(rule)
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.05, momentum=0.9)
    expected = final_state(rule, TRAIN)
    for part, first in ((TRAIN[:4], 0), (TRAIN[4:], 4)):
        with make_pipeline(model, schedule) as pipeline:
            pipeline.rank.dense_optimizer = optimizer
            steps = list(pipeline.run(part))
            assert [step.index for step in steps] == list(range(first, first + len(part)))
            state = state_of(pipeline)
    assert (state.metadata, state.policies) == (expected.metadata, expected.policies)
    assert (state.rows, state.dense) == (expected.rows, expected.dense)


# ---------------------------------------------------------------------------------------------------------- hooks


class Watcher:
    """Hears of rows that came or stayed and of rows that went."""

    def __init__(self, pipeline: NestedPipeline) -> None:
        self.there: list[tuple[int, str, list[int]]] = []
        self.gone: list[tuple[int, str, list[int]]] = []
        pipeline.add_write_back_hook(lambda step, table, keys: self.there.append((step, table, keys.tolist())))
        pipeline.add_eviction_hook(lambda step, table, keys: self.gone.append((step, table, keys.tolist())))


@pytest.mark.parametrize(("schedule", "rule"), each_with_another(EXACT, RULES))
def test_hooks_hear_of_every_row_that_comes_and_goes(schedule: str, rule: str) -> None:
    with make_pipeline(model_of(rule), schedule) as pipeline:
        watcher = Watcher(pipeline)
        list(pipeline.run(TRAIN))
        state = state_of(pipeline)
    rows: set[tuple[str, int]] = set()
    for step in range(1, len(TRAIN) + 1):
        for number, table, keys in watcher.gone:
            if number == step:
                gone = {(table, key) for key in keys}
                assert len(gone) == len(keys)
                assert gone <= rows
                rows -= gone
        rows |= {(table, key) for number, table, keys in watcher.there for key in keys if number == step}
    assert rows == set(state.rows)
    counters = counters_of(state)
    assert sum(len(keys) for _, _, keys in watcher.gone) == counters["evicted"] + counters["expired"]
    assert [step for step, _, _ in watcher.gone] == sorted(step for step, _, _ in watcher.gone)


def test_the_eviction_hook_hears_nothing_of_batches_that_do_not_count() -> None:
    batches = [*TRAIN[:4], make_batch(99, 3, keys=9, first_key=30, bad=1), *TRAIN[4:]]
    heard = {}
    for name, given in (("bad", batches), ("without", TRAIN)):
        pipeline = make_pipeline(model_of("lru"), "nested")
        watcher = Watcher(pipeline)
        run_rank(pipeline, given, watch=[4] if name == "bad" else [])
        heard[name] = watcher.gone
    assert heard["bad"] == heard["without"]
    assert len(heard["bad"]) > 5


def test_an_eviction_hook_must_not_touch_rows() -> None:
    pipeline = make_pipeline(model_of("lru"), "nested")
    pipeline.add_eviction_hook(lambda step, table, keys: pipeline.model.ebc.store(table).find(keys))
    with pytest.raises(RuntimeError, match="rows cannot be read or written while a step is running"):
        list(pipeline.run(TRAIN))
    pipeline.close()


# ------------------------------------------------------------------------------------------- errors, long runs, resume


def unsure(keys: Tensor, last_used: Tensor, frequency: Tensor, batch: int) -> Tensor:
    """A score that fails at batch 5."""
    return torch.full((len(keys),), float("nan")) if batch == 5 else last_used.to(torch.float64)


@pytest.mark.parametrize("schedule", EXACT)
def test_a_score_that_fails_fails_its_batch_on_all_ranks_and_changes_nothing(schedule: str) -> None:
    """In `nested` it is called while batch 4 trains, which ends well; the next batch takes the failed one's index."""

    def body(rank: int, communicator: Any) -> tuple[list[str], Any, Any]:
        tables = make_tables(capacity=10, eviction=policy.Score(unsure if rank else half_life))
        with make_pipeline(Recommender(communicator, tables), schedule) as pipeline:
            iterator = iter([make_batch(10 * rank + t, 3, keys=24) for t in range(8)])
            for _ in range(5):
                pipeline.progress(iterator)
            before, messages = state_of(pipeline), []
            for _ in range(2):
                with pytest.raises((ValueError, RemoteRankError)) as caught:
                    pipeline.progress(iterator)
                messages.append(str(caught.value))
            return messages, before, state_of(pipeline)

    # Both ranks must have the same rule, or the pipeline is refused: the failing one is told apart by its rank alone.
    unsure.__qualname__ = half_life.__qualname__
    unsure.__module__ = half_life.__module__
    (messages_0, *states_0), (messages_1, *states_1) = run_ranks_as_threads(2, body, timeout_s=20.0)
    assert all("NaN" in message for message in messages_0 + messages_1)
    assert all(message.startswith("rank 1 failed in retrieve") for message in messages_0)
    assert states_0[0] == states_0[1]
    assert states_1[0] == states_1[1]


@pytest.mark.parametrize("rule", ["lru", "lfu-admission", "ttl"])
def test_size_and_memory_are_flat_at_capacity(rule: str) -> None:
    batches = [make_batch(t, 4, keys=40, first_key=3 * t) for t in range(300)]
    with make_pipeline(model_of(rule), "nested") as pipeline:
        iterator, seen = iter(batches), []
        for number in range(1, len(batches) + 1):
            pipeline.progress(iterator)
            if number % 100 == 0:
                table = pipeline.model.ebc.store("user")
                seen.append((len(table) <= 40, table.store.memory()["slabs"], table.store.memory()["metadata"]))
        counters, index = table.counters(), table.store.memory()["index"]
    assert seen == [seen[0]] * 3
    assert index < 256 * 256  # each of its 256 parts is as large as its few keys ever were
    assert seen[0][0]
    assert counters["evicted"] + counters["expired"] > 30


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_a_run_that_continues_from_a_checkpoint_evicts_the_same_rows(tmp_path: Path, schedule: str, rule: str) -> None:
    with make_pipeline(model_of(rule), schedule) as pipeline:
        iterator = iter(TRAIN)
        for _ in range(5):
            pipeline.progress(iterator)
        checkpoint.save(tmp_path / "saved", model=pipeline.model, pipeline=pipeline)
        list(pipeline.run(iterator))
        assert state_of(pipeline) == final_state(rule, TRAIN)
    with make_pipeline(model_of(rule), schedule) as pipeline:
        checkpoint.load(tmp_path / "saved", model=pipeline.model, pipeline=pipeline, start_epoch=True)
        list(pipeline.run(TRAIN[5:]))
        assert state_of(pipeline) == final_state(rule, TRAIN)
