"""Reduced precision between ranks: bytes that are sent, what is rounded, what is not finite, and who must agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from groups_cases import grouped, one_copy
from small_model import Recommender, make_batch, make_pipeline, run_all

import nestpipe_kernels as nk
from nestpipe_kernels.errors import NonFiniteGradientError
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_ranks_as_threads, run_scenario, scenario_config

BYTES = {"fp32": lambda dim: 4 * dim, "bf16": lambda dim: 2 * dim, "fp16": lambda dim: 2 * dim, "int8": lambda d: 4 + d}
TABLES = (TableChoice("user", 3, ("user",)), TableChoice("item", 8, ("item", "history")))
SCENARIO = Scenario(tables=TABLES, batches=3, uneven=False, samples=6)


class CountingGroup:
    """Hands on to a group; notes the bytes of every exchange, and how many rows of each store are in it."""

    def __init__(self, group: Any, sent: dict[str, list[int]], name: str) -> None:
        self.group, self.sent, self.name = group, sent, name
        self.rank, self.size = group.rank, group.size

    def all_to_all(self, send: torch.Tensor, send_counts: Any, receive_counts: Any, tag: str, out: Any = None) -> Any:
        self.sent.setdefault(self.name, []).append(send.numel() * send.element_size())
        return self.group.all_to_all(send, send_counts, receive_counts, tag, out)


def count_groups(communicator: Any) -> dict[str, list[int]]:
    """Bytes of every exchange by purpose, from now on."""
    sent: dict[str, list[int]] = {}
    inner = communicator.group
    communicator.group = lambda purpose: CountingGroup(inner(purpose), sent, purpose)
    return sent


def bytes_sent(scenario: Scenario, schedule: str) -> tuple[int, int, list[int]]:
    """Bytes of rows and of gradients over all ranks, and the distinct keys of each dim that the sources had."""

    def body(rank: int, communicator: Any) -> tuple[dict[str, list[int]], list[int]]:
        sent = count_groups(communicator)
        generator = scenario.generator(rank)
        model = scenario.model(communicator, generator)
        with nk.NestedPipeline(
            model, scenario.dense_optimizer(model), config=scenario_config(scenario, schedule)
        ) as pipeline:
            for _ in pipeline.run(scenario.loader(rank, generator)):
                pass
        distinct = [0, 0]
        for batch in scenario.loader(rank, scenario.generator(rank)):
            distinct[0] += len(set(batch.sparse["user"].values().tolist()))
            distinct[1] += len(set(batch.sparse["item"].values().tolist() + batch.sparse["history"].values().tolist()))
        return sent, distinct

    parts = run_ranks_as_threads(scenario.world_size, body)
    total = [sum(sum(sent[name]) for sent, _ in parts) for name in ("rows", "grads")]
    return total[0], total[1], [sum(d[k] for _, d in parts) for k in range(2)]


@pytest.mark.parametrize("schedule, wire", [("sequential", "int8"), *(("nested", wire) for wire in BYTES)])
def test_every_row_and_every_gradient_takes_the_bytes_of_its_format(schedule: str, wire: str) -> None:
    rows, grads, distinct = bytes_sent(replace(SCENARIO, row_wire=wire, gradient_wire=wire), schedule)
    expected = sum(n * BYTES[wire](table.dim) for n, table in zip(distinct, TABLES))
    assert rows == expected
    # Each message of gradients brings one float32 for every peer: 3 batches x 2 micro-batches x 2 ranks x 2 peers.
    assert grads == expected + 4 * 3 * 2 * 2 * 2


def test_formats_of_rows_and_gradients_are_independent() -> None:
    rows, grads, _ = bytes_sent(replace(SCENARIO, gradient_wire="bf16"), "nested")
    both = bytes_sent(SCENARIO, "nested")[:2]
    assert rows == both[0] and grads < 0.6 * both[1]
    rows, grads, _ = bytes_sent(replace(SCENARIO, row_wire="bf16"), "nested")
    assert rows == both[0] / 2 and grads == both[1]


@pytest.mark.parametrize("setting", ["row_wire", "gradient_wire"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_ranks_own_rows_are_rounded_too(world_size: int, setting: str) -> None:
    scenario = replace(SCENARIO, world_size=world_size)
    plain = run_scenario(scenario, "nested")
    for wire in ("bf16", "fp16", "int8"):
        assert "differ" in plain.difference(run_scenario(replace(scenario, **{setting: wire}), "nested"))


@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
@pytest.mark.parametrize("schedule", ["nested"])
def test_three_ranks(schedule: str, transfer: str) -> None:
    scenario = Scenario(
        world_size=3, micro_batches=3, row_wire="int8", gradient_wire="bf16", row_transfer=transfer, weight_loss=True
    )
    graph = build_graph(schedule, transfer)
    orders = Orders(graph, 3, scenario.batches, 3)
    run = explore(graph, scenario.ranks(), orders.random(1), scenario.batches)
    oracle = scenario.oracle(run.partition)
    assert run.broken == ""
    assert run.losses == oracle.losses
    assert {k: v for store in run.stores for k, v in store.items()} == oracle.stores[0]
    assert run_scenario(scenario, "sequential").difference(run_scenario(scenario, schedule)) == ""


@pytest.mark.parametrize("schedule", ["sequential", "nested", "nested+early"])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_fault_26_a_bad_gradient_is_still_seen(schedule: str, wire: str) -> None:
    settings: dict[str, Any] = {"gradient_wire": wire, "clustering": "none"}
    ((_, error),) = run_all(1, schedule, lambda r: [make_batch(1, bad=1)], [0], **settings)[0].errors
    assert isinstance(error, NonFiniteGradientError)
    assert "row gradients (table '" in str(error)
    skipped = [
        run_all(1, schedule, lambda r: [make_batch(1, bad=1)], nan_policy="skip_row", **{**settings, **more})[0]
        for more in ({}, {"gradient_wire": "fp32"})
    ]
    assert skipped[0].skipped_rows == skipped[1].skipped_rows != [0]


def test_rows_that_leave_early_and_gradients_in_two_messages_are_rounded_alike() -> None:
    scenario = Scenario(world_size=3, micro_batches=3, row_wire="int8", gradient_wire="fp16", num_keys=12)
    assert run_scenario(scenario, "sequential").difference(run_scenario(scenario, "nested+early")) == ""


@pytest.mark.parametrize("schedule", ["sequential", "nested", "nested+early"])
def test_a_gradient_beyond_float16_is_an_error_not_an_infinite_row(schedule: str) -> None:
    table = nk.EmbeddingBagConfig(nk.UNBOUNDED, 2, "t", feature_names=["f"])
    keys = nk.KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.ones(4).long())

    def train(wire: str, policy: str) -> Any:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"e": nk.EmbeddingBagCollection([table], optimizer=nk.optim.SGD(lr=1e-6))})
        scale = torch.tensor([[1.0], [65519.0], [65521.0], [1e6]])

        def loss(m: Any, batch: Any) -> Any:
            output = m["e"](batch[0]).values()
            return (output * batch[1]).sum(), output

        config = nk.PipelineConfig(
            schedule=schedule.removesuffix("+early"),
            early_send=schedule.endswith("+early"),
            num_micro_batches=2,
            gradient_wire=wire,
            nan_policy=policy,
            loss_weighting="sum",
        )
        with nk.NestedPipeline(model, None, loss, config) as pipeline:
            step = next(iter(pipeline.run([(keys, scale)])))
            return step.skipped_rows, model["e"].store("t").find(torch.arange(4))[0]

    with pytest.raises(NonFiniteGradientError, match=r"2 row gradients \(table 't' key 2, table 't' key 3\)"):
        train("fp16", "raise")
    for wire in ("fp32", "bf16", "int8"):
        assert train(wire, "raise")[0] == 0
    number, rows = train("fp16", "skip_row")
    assert number == 2
    assert rows.isfinite().all()


@pytest.mark.parametrize("setting", ["row_wire", "gradient_wire"])
def test_ranks_must_agree_on_formats(setting: str) -> None:
    def body(rank: int, communicator: Any) -> str:
        with pytest.raises(ValueError) as caught:
            make_pipeline(Recommender(communicator), **{setting: ("fp32", "int8")[rank]})
        return str(caught.value)

    for text in run_ranks_as_threads(2, body):
        assert f"ranks disagree on {setting}" in text


@pytest.mark.parametrize("setting", ["row_wire", "gradient_wire"])
def test_unknown_formats(setting: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {setting} 'fp8': choose one of fp32, bf16, fp16, int8"):
        nk.PipelineConfig(**{setting: "fp8"})


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_evaluation_reads_rows_as_training_does(wire: str) -> None:
    model = Recommender()
    with make_pipeline(model, row_wire=wire, clustering="none", num_micro_batches=1) as pipeline:
        next(iter(pipeline.run([make_batch(1)])))
        model.eval()
        seen = next(iter(pipeline.run([make_batch(1)]))).output
    direct = model(make_batch(1))[1]  # without a pipeline rows travel whole
    assert torch.equal(seen, direct) == (wire == "fp32")
    torch.testing.assert_close(seen, direct, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
def test_copies_of_the_tables_round_alike(transfer: str) -> None:
    scenario = Scenario(world_size=4, row_wire="bf16", gradient_wire="int8", row_transfer=transfer, seed=2)
    plain = one_copy(run_scenario(scenario, "sequential"))
    assert plain.difference(one_copy(run_scenario(grouped(scenario), "nested"), 2)) == ""
