"""Ranks that build their pipelines differently: the message names the first thing that differs, and both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe_kernels import UNBOUNDED, EmbeddingBagCollection, EmbeddingBagConfig, init, optim
from nestpipe_kernels.nn.convert import convert
from nestpipe_kernels.pipeline.facts import first_difference
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config

TABLES = tuple(TableChoice(f"table{k}", 4, (f"feature{k}",)) for k in range(6))
USUAL = Scenario(world_size=2, tables=TABLES)


def messages(scenarios: list[Scenario], optimizers: list[Any] | None = None) -> list[str]:
    """What each rank is told when it makes its pipeline as its scenario, and its optimizer, say; "" if nothing."""

    def body(rank: int, communicator: Any) -> str:
        model = scenarios[rank].model(communicator, None)
        dense = optimizers[rank](list(model.linear.parameters())) if optimizers else None
        try:
            NestedPipeline(model, dense, config=scenario_config(scenarios[rank], "nested")).close()
        except ValueError as error:
            return str(error)
        return ""

    return run_ranks_as_threads(len(scenarios), body, timeout_s=20.0)


def told(rank: int, what: str, mine: str, theirs: str) -> str:
    return (
        f"ranks disagree on {what}: rank {rank} has {mine}, rank {1 - rank} has {theirs}; construct the pipeline alike "
        "on all ranks"
    )


def with_table(number: int, **change: Any) -> Scenario:
    tables = list(TABLES)
    tables[number] = replace(tables[number], **change)
    return replace(USUAL, tables=tuple(tables))


@pytest.mark.parametrize(
    ("odd", "what", "theirs", "mine"),
    [
        # a table of another dim lies in another store, and so elsewhere in the order of all tables
        (with_table(1, dim=8), "dim of table 'table1' of 'lookup'", "4", "8"),
        (with_table(5, num_embeddings=9), "num_embeddings of table 'table5' of 'lookup'", "UNBOUNDED", "9"),
        (
            with_table(3, init=init.Constant(0.25)),
            "init of table 'table3' of 'lookup'",
            repr(TABLES[3].init),
            repr(init.Constant(0.25)),
        ),
        (with_table(2, trainable=False), "trainable of table 'table2' of 'lookup'", "True", "False"),
        (replace(USUAL, tables=TABLES[:-1]), "table 'table5' of 'lookup'", "it", "none"),
        (replace(USUAL, tables=(TABLES[1], TABLES[0], *TABLES[2:])), "the order of embedding tables", "", ""),
        (replace(USUAL, seed=7), "seed of table 'table0' of 'lookup'", "0", "7"),
        (
            replace(USUAL, optimizer=optim.SGD(lr=0.1)),
            "optimizer of table 'table0' of 'lookup'",
            repr(USUAL.optimizer),
            repr(optim.SGD(lr=0.1)),
        ),
    ],
)
def test_the_table_and_its_setting_are_named(odd: Scenario, what: str, theirs: str, mine: str) -> None:
    found = messages([USUAL, odd])
    if what.startswith("the order"):
        theirs, mine = ("table 'table0' of 'lookup' first", "table 'table1' of 'lookup' first")
    assert found == [told(0, what, theirs, mine), told(1, what, mine, theirs)]


def test_the_learning_rate_of_one_table() -> None:
    def body(rank: int, communicator: Any) -> str:
        tables = [
            EmbeddingBagConfig(UNBOUNDED, 4, name, feature_names=[name], optimizer=optim.SGD(lr=rate))
            for name, rate in (("a", 0.1), ("b", 0.2 if rank else 0.1))
        ]
        with pytest.raises(ValueError) as caught:
            NestedPipeline(nn.ModuleDict({"e": EmbeddingBagCollection(tables, process_group=communicator)}))
        return str(caught.value)

    rates = "0.1", "0.2"
    for rank, text in enumerate(run_ranks_as_threads(2, body, timeout_s=20.0)):
        assert text == told(rank, "learning rate of table 'b' of 'e'", rates[rank], rates[1 - rank])


SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("usual", "odd", "what", "theirs", "mine"),
    [
        (lambda p: SGD(p, lr=0.1), lambda p: SGD(p, lr=0.2), "lr of the dense optimizer", "0.1", "0.2"),
        (
            lambda p: SGD(p, lr=0.1, momentum=0.9),
            lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            "nesterov of the dense optimizer",
            "False",
            "True",
        ),
        (
            lambda p: ADAM(p, lr=0.1),
            lambda p: ADAM(p, lr=torch.tensor(0.1, dtype=torch.float64), betas=(0.9, 0.99)),
            "betas of the dense optimizer",
            "(0.9, 0.999)",
            "(0.9, 0.99)",
        ),
        (
            lambda p: SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}], lr=0.1),
            lambda p: SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.1}], lr=0.1),
            "lr of parameter group 1 of the dense optimizer",
            "0.5",
            "0.1",
        ),
        (lambda p: SGD(p, lr=0.1), lambda p: ADAM(p, lr=0.1), "the dense optimizer", "SGD", "Adam"),
        (lambda p: SGD(p, lr=0.1), lambda p: None, "the dense optimizer", "SGD", "none"),
    ],
)
def test_the_dense_optimizers_setting_is_named(usual: Any, odd: Any, what: str, theirs: str, mine: str) -> None:
    assert messages([USUAL, USUAL], [usual, odd]) == [told(0, what, theirs, mine), told(1, what, mine, theirs)]


def test_how_a_dense_optimizer_computes_is_its_own_business() -> None:
    made = [
        lambda p: SGD(p, lr=0.1, foreach=True),
        lambda p: SGD(p, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False),
    ]
    assert messages([USUAL, USUAL], made) == ["", ""]


def test_every_rank_is_told_of_a_rank_that_differs() -> None:
    odd = replace(USUAL, nan_policy="skip_row")
    found = messages([USUAL, USUAL, odd])
    values = ["raise", "raise", "skip_row"]
    for rank, text in enumerate(found):
        other = 0 if rank == 2 else 2
        assert f"on nan_policy: rank {rank} has {values[rank]}, rank {other} has {values[other]};" in text


def test_long_values_are_shown_where_they_differ() -> None:
    long = "x" * 500
    what, mine, theirs = first_difference("tables", {"a": f"{long}1{long}"}, {"a": f"{long}2"})
    assert what == "a"
    assert mine.startswith("..." + "x" * 20 + "1x") and mine.endswith("...") and len(mine) < 150
    assert theirs == "..." + "x" * 20 + "2"
    assert first_difference("tables", {"a": long}, {}) == ("a", long[:120] + "...", "none")
    assert first_difference("tables", {}, {"b": "1"}) == ("b", "none", "1")


def test_weights_that_differ_between_ranks_are_told_and_not_mixed() -> None:
    class Plain(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.user = nn.Embedding(10, 4)
            self.user.weight.data.fill_(value)

    def body(rank: int, communicator: Any, value: float) -> str:
        model = Plain(value)
        convert(model, optim.SGD(lr=0.1), process_group=communicator)
        try:
            NestedPipeline(model, loss_fn=lambda m, b: (m.user(b).sum(), None)).close()
        except ValueError as error:
            return str(error)
        return ""

    found = run_ranks_as_threads(2, lambda rank, c: body(rank, c, float(rank)), timeout_s=20.0)
    assert all("ranks disagree on digest of the initial weight of 'user': rank" in one for one in found), found
    assert run_ranks_as_threads(2, lambda rank, c: body(rank, c, 1.0), timeout_s=20.0) == ["", ""]
