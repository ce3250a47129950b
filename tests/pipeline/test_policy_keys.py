"""What becomes of keys without a row in a pipeline, and which rows may go: small cases that one can follow by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_model import EXACT, make_config, state_of

from nestpipe_kernels import init, optim, policy
from nestpipe_kernels.errors import NonFiniteGradientError, StoreFullError
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import UNBOUNDED


class Linear(torch.nn.Module):
    """A loss that is linear in the embeddings, so that a key's gradient depends on that key alone."""

    def __init__(self, process_group: Any = None, **settings: Any) -> None:
        super().__init__()
        table = EmbeddingBagConfig(UNBOUNDED, 3, "t", feature_names=["f"], init=init.Uniform(-0.5, 0.5), **settings)
        self.ebc = EmbeddingBagCollection([table], optimizer=optim.Adagrad(lr=0.1), process_group=process_group)

    def forward(self, batch: dict[str, Any]) -> Any:
        pooled = self.ebc(batch["sparse"]).values()
        return (pooled.sum(1) * batch["weight"]).mean(), pooled.detach()


def linear_batch(keys: Sequence[int], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """One key in each sample."""
    sparse = KeyedJaggedTensor(["f"], torch.tensor(keys), lengths=torch.ones(len(keys), dtype=torch.int64))
    return {"sparse": sparse, "weight": torch.tensor(weights or [1.0 + k for k in range(len(keys))])}


def play_linear(batches: Sequence[Any], schedule: str = "nested", **settings: Any) -> tuple[list[Any], Any]:
    """Outputs of every step, and the state at the end."""
    with NestedPipeline(Linear(**settings), config=make_config(schedule)) as pipeline:
        outputs = [step.output for step in pipeline.run(batches)]
        return outputs, state_of(pipeline)


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_18_a_key_without_a_row_is_skipped_and_no_other_keys_gradient_moves(schedule: str) -> None:
    chance = random.Random(0)
    keys = [chance.randrange(-50, 50) for _ in range(40)]
    _, all_rows = play_linear([linear_batch(keys)] * 3, schedule)
    outputs, some = play_linear([linear_batch(keys)] * 3, schedule, admission=policy.Probability(0.5))
    assert 5 < len(some.rows) < len(all_rows.rows) - 5
    assert some.rows == {key: all_rows.rows[key] for key in some.rows}
    assert some.policies["t"]["counters"]["not_admitted"] == 3 * (len(all_rows.rows) - len(some.rows))
    without = [k for k, key in enumerate(keys) if ("t", key) not in some.rows]
    for output in outputs:
        assert torch.equal(output[without], outputs[0][without])


@pytest.mark.parametrize("schedule", EXACT)
def test_a_key_without_a_row_reads_the_default_row_until_it_has_one(schedule: str) -> None:
    batches = [linear_batch([7, 8]), linear_batch([7, 9]), linear_batch([7, 7])]
    outputs, state = play_linear(batches, schedule, admission=policy.MinFrequency(2), default_row=init.Constant(0.5))
    initial = Linear().ebc.store("t").find(torch.tensor([7]))[0]
    half = torch.full((1, 3), 0.5)
    assert torch.equal(outputs[0], torch.cat([half, half]))
    assert torch.equal(outputs[1], torch.cat([initial, half]))
    assert not torch.equal(outputs[2][:1], initial)
    assert set(state.rows) == {("t", 7)}
    assert state.policies["t"]["counts"] == {8: 1, 9: 1}


def test_a_nan_in_the_gradient_of_a_key_without_a_row_counts_like_any_other() -> None:
    """The source judges, and does not know which keys have rows."""
    bad = linear_batch([1, 2, 3], [1.0, float("nan"), 1.0])
    rule = policy.Probability(0.0)
    with pytest.raises(NonFiniteGradientError, match=r"1 row gradients .table 't' key 2. are not finite"):
        play_linear([bad, linear_batch([4])], admission=rule)


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_31_a_full_table_raises_unless_a_rule_says_what_happens(schedule: str) -> None:
    batches = [linear_batch([1, 2]), linear_batch([2, 3])]
    with NestedPipeline(Linear(capacity=2), config=make_config(schedule)) as pipeline:
        iterator = iter(batches)
        pipeline.progress(iterator)
        before = state_of(pipeline)
        with pytest.raises(
            StoreFullError,
            match=r"^table 't': 1 new keys of this batch have no room \(the first: 3; this rank's quota is 2 rows\); "
            r"raise the table's capacity, or give it an eviction rule, for example nk.policy.LRU\(\)$",
        ):
            pipeline.progress(iterator)
        assert state_of(pipeline) == before
    for rule in ({"admission": policy.Probability(1.0)}, {"eviction": policy.LRU()}):
        outputs, state = play_linear(batches, schedule, capacity=2, default_row=init.Constant(0.5), **rule)
        assert set(state.rows) == {("t", 1), ("t", 2)}  # batch 0's rows are pinned in batch 1
        assert state.policies["t"]["counters"]["refused"] == 1
        assert torch.equal(outputs[1][1], torch.full((3,), 0.5))


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_32_rows_of_batches_in_flight_are_never_the_victims(schedule: str) -> None:
    batches = [linear_batch(keys) for keys in ([0, 1, 2, 3], [2, 3, 4, 5], [6, 7], [0, 6], [8, 9, 0, 6])]
    _, state = play_linear(batches, schedule, capacity=4, eviction=policy.LRU(slack=0.0))
    _, free = play_linear(batches, schedule)
    # 4 and 5 found only pinned rows; 6 and 7 took the places of 0 and 1, 0 that of 2 or 3.
    assert state.policies["t"]["counters"]["refused"] == 2
    assert {key for _, key in state.rows} == {0, 6, 8, 9}
    assert state.rows["t", 6] == free.rows["t", 6]
    with NestedPipeline(Linear(capacity=4, eviction=policy.LRU(slack=0.0)), config=make_config(schedule)) as pipeline:
        gone: list[tuple[int, list[int]]] = []
        pipeline.add_eviction_hook(lambda step, table, keys: gone.append((step, sorted(keys.tolist()))))
        list(pipeline.run(batches))
    assert gone[0] == (3, [0, 1])
    assert [step for step, _ in gone] == [3, 4, 5]


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_33_an_evicted_key_returns_without_its_former_state(schedule: str) -> None:
    batches = [linear_batch([5, 1]), *(linear_batch([5]) for _ in range(4))]
    flood = [linear_batch([10 * k, 10 * k + 1, 10 * k + 2]) for k in range(1, 5)]
    rule = {"capacity": 3, "eviction": policy.LRU(slack=0.0)}
    outputs, state = play_linear([*batches, *flood, linear_batch([]), linear_batch([5])], schedule, **rule)
    fresh_outputs, fresh = play_linear([linear_batch([5])], schedule)
    assert torch.equal(outputs[-1], fresh_outputs[0])
    assert state.rows["t", 5] == fresh.rows["t", 5]
    assert state.metadata["t", 5] == (len(batches) + len(flood) + 1, 1)


def test_fault_30_quotas_of_no_row_and_of_one_end_in_refusals_not_in_waiting() -> None:
    """capacity 1 over two ranks: one of them may have no row at all."""

    def body(rank: int, communicator: Any) -> Any:
        model = Linear(communicator, capacity=1, eviction=policy.LRU())
        with NestedPipeline(model, config=make_config("nested")) as pipeline:
            outputs = [step.output for step in pipeline.run([linear_batch(list(range(8)))] * 3)]
            return outputs, state_of(pipeline)

    results = run_ranks_as_threads(2, body, timeout_s=20.0)
    sizes = [state.policies["t"]["size"] for _, state in results]
    assert sizes == [1, 0]
    assert results[1][1].policies["t"]["counters"]["refused"] > 0
    for outputs, _ in results:
        assert all(torch.isfinite(output).all() for output in outputs)


def test_ranks_that_disagree_on_a_rule_are_told() -> None:
    rules = [policy.LRU(), policy.LRU(slack=0.5)]

    def body(rank: int, communicator: Any) -> str:
        try:
            NestedPipeline(Linear(communicator, capacity=8, eviction=rules[rank]), config=make_config("nested"))
        except ValueError as error:
            return str(error)
        return ""

    for message in run_ranks_as_threads(2, body, timeout_s=20.0):
        assert message.startswith("ranks disagree on eviction of table 't' of ")
