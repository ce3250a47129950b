"""Owners pool bags: the same bits in every schedule, those without it on one rank, close to them on several; less is
sent, and what it does not go with is said."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_model import EXACT, make_batch, make_pipeline
from small_model import Recommender as SmallModel

import nestpipe_kernels as nk
from nestpipe_kernels import optim
from nestpipe_kernels.comm.router import Transfer, route_keys
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.errors import CommunicationError, NonFiniteGradientError
from nestpipe_kernels.ops.owners import default_slice_owner
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.stages.owner_pool import _owner_parts, note_bounds, select_features
from nestpipe_kernels.stages.state import Parts, bind_stores
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_ranks_as_threads, run_scenario
from nestpipe_kernels.types import DataType, PoolingType

SCHEDULES = [name for name in EXACT if name not in ("sequential", "nested+early")]
HALF = tuple(replace(table, data_type=DataType.FP16) for table in Scenario().tables)
DIMS = (TableChoice("user", 5, ("user",)), TableChoice("item", 2, ("item", "history"), PoolingType.MEAN))
FROZEN = (TableChoice("user", 4, ("user",)), TableChoice("item", 4, ("item",), trainable=False))

CASES = [
    Scenario(world_size=2, micro_batches=3, owner_pooling=True),
    Scenario(world_size=3, micro_batches=2, owner_pooling=["history"], optimizer=optim.Adam(lr=0.1), seed=1),
    Scenario(world_size=2, micro_batches=5, owner_pooling="auto", clustering="key", samples=8, num_keys=40, seed=2),
    Scenario(world_size=4, micro_batches=2, owner_pooling=True, weight_loss=True, tables=DIMS, seed=3),
    Scenario(world_size=2, micro_batches=2, owner_pooling=True, tables=HALF, row_wire="bf16", gradient_wire="int8"),
    Scenario(world_size=3, micro_batches=1, owner_pooling=True, tables=FROZEN, optimizer=optim.SGD(lr=0.2), seed=4),
    Scenario(world_size=2, micro_batches=2, owner_pooling=True, nan_policy="skip_row", bad_labels=0.2, seed=5),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_schedule_gives_the_same_bits(case):
    want = run_scenario(case, "sequential")
    for schedule in SCHEDULES if case in CASES[:2] else ["nested"]:
        assert want.difference(run_scenario(case, schedule)) == ""


@pytest.mark.parametrize(
    ("pooled", "tables"),
    [(True, Scenario().tables), (["user"], Scenario().tables), (True, HALF), (["item", "history"], DIMS)],
    ids=["all", "user", "fp16", "dims"],
)
def test_a_rank_alone_gets_the_bits_without_it(pooled, tables):
    # All features of a table alike: else its rows get their gradients in two sums.
    case = Scenario(world_size=1, micro_batches=3, samples=8, num_keys=9, tables=tables, uneven=False)
    assert run_scenario(case, "nested").difference(run_scenario(replace(case, owner_pooling=pooled), "nested")) == ""


def test_gradients_that_are_not_finite_skip_the_rows_that_they_skip_without_it():
    case = Scenario(world_size=1, micro_batches=2, nan_policy="skip_row", bad_labels=0.2, seed=5)
    assert run_scenario(case, "nested").difference(run_scenario(replace(case, owner_pooling=True), "nested")) == ""


def test_several_ranks_come_close_to_rows():
    case = Scenario(world_size=3, micro_batches=2, samples=12, num_keys=30, uneven=False, optimizer=optim.SGD(lr=0.1))
    plain, pooled = run_scenario(case, "nested"), run_scenario(replace(case, owner_pooling=True), "nested")
    assert plain.difference(pooled) != ""  # sums are made in another order
    assert np.allclose(plain.losses, pooled.losses, rtol=1e-5)
    rows = [{key: row for store in one.stores for key, row in store.items()} for one in (plain, pooled)]
    assert rows[0].keys() == rows[1].keys()
    for key, row in rows[0].items():
        number = len(row) // 4
        got, want = (np.array(struct.unpack(f"{number}f", r)) for r in (rows[1][key], row))
        assert np.allclose(got[:4], want[:4], rtol=1e-4, atol=1e-6), key


# -------------------------------------------------------------------------------------------------- what is sent


class Bags(torch.nn.Module):
    """Two features, one of long bags and one of single keys."""

    def __init__(self, communicator):
        super().__init__()
        tables = [
            nk.EmbeddingBagConfig(nk.UNBOUNDED, 8, name, feature_names=[name], pooling=PoolingType.MEAN)
            for name in ("long", "one")
        ]
        self.ebc = nk.EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1), process_group=communicator)

    def forward(self, batch):
        values = self.ebc(batch).values()
        return (values**2).mean(), values


def bags(seed):
    chance = torch.Generator().manual_seed(seed)
    keys = torch.cat([torch.randint(0, 10_000, (4 * 20,), generator=chance), torch.arange(4) % 2])
    return nk.KeyedJaggedTensor(["long", "one"], keys, lengths=torch.tensor([20] * 4 + [1] * 4))


def sent_rows(setting):
    """Of each rank: rows and bytes sent in the first of two steps, outputs of both, and of an evaluation."""

    def body(rank, communicator):
        with NestedPipeline(
            Bags(communicator), None, config=PipelineConfig(num_micro_batches=2, owner_pooling=setting)
        ) as pipeline:
            counters = []
            pipeline.add_step_callback(counters.append)
            outputs = [step.output for step in pipeline.run([bags(rank), bags(rank + 2)])]
            pipeline.model.eval()
            evaluated = next(iter(pipeline.run([bags(rank)]))).output
            return counters[0].rows_sent, counters[0].row_bytes, outputs, evaluated

    return run_ranks_as_threads(2, body)


def test_auto_pools_what_is_less():
    found = {str(setting): sent_rows(setting) for setting in (False, True, ["long"], "auto")}
    for rank in range(2):
        by_rank = {name: ranks[rank] for name, ranks in found.items()}
        assert by_rank["auto"][:2] == by_rank["['long']"][:2]
        assert by_rank["auto"][0] < by_rank["False"][0] / 5
        assert by_rank["auto"][0] <= by_rank["True"][0]
        for name, (_, _, outputs, evaluated) in by_rank.items():
            for got, want in zip([*outputs, evaluated], [*by_rank["False"][2], by_rank["False"][3]]):
                assert torch.allclose(got, want, rtol=1e-5, atol=1e-7), name
    # every bag of 20 keys has parts at both owners, every bag of one key at one
    assert sum(rows for rows, *_ in found["True"]) == 2 * 4 * (2 + 1)


# ------------------------------------------------------------------------------------------------ what is refused


def test_settings_that_it_does_not_go_with():
    message = r"owner_pooling needs row_transfer='once' and early_send=False, got '{}' and {}"
    with pytest.raises(ValueError, match=message.format("per_micro_batch", False)):
        PipelineConfig(owner_pooling=True, row_transfer="per_micro_batch")
    with pytest.raises(ValueError, match=message.format("once", True)):
        PipelineConfig(owner_pooling="auto", early_send=True)
    for wrong in ("all", 3, [1]):
        with pytest.raises(ValueError, match="owner_pooling must be True, False, 'auto' or a list of features"):
            PipelineConfig(owner_pooling=wrong)
    for settings in ({"early_send": True}, {"row_transfer": "per_micro_batch"}, {"sparse_groups": "exact"}):
        with pytest.raises(ValueError, match="owner_pooling needs row_transfer 'once', no early_send and tables"):
            build_graph("nested", owner_pooling=True, **settings)


@pytest.mark.parametrize(
    ("table", "weighted", "reason"),
    [
        ({"pooling": PoolingType.MAX}, False, "is pooled by max, whose gradient needs the rows"),
        ({}, True, "has per-sample weights, whose gradients need the rows"),
    ],
)
def test_features_that_cannot_be_pooled_are_named(table, weighted, reason):
    config = nk.EmbeddingBagConfig(nk.UNBOUNDED, 4, "t", feature_names=["f"], **table)
    module = nk.EmbeddingBagCollection([config], is_weighted=weighted, optimizer=optim.SGD(lr=0.1))
    bindings = bind_stores({"e": module})
    for setting in (True, ["f"]):
        with pytest.raises(ValueError, match=f"owner_pooling: feature 'f' of 'e' {reason}.*or use 'auto'"):
            select_features(bindings, setting)
    select_features(bindings, "auto")
    assert bindings[0].pooled == ()
    with pytest.raises(ValueError, match=r"no embedding module has features \['g'\]; there are \['f'\]"):
        select_features(bindings, ["g"])


def test_rows_of_single_keys_cannot_be_pooled():
    config = nk.EmbeddingConfig(nk.UNBOUNDED, 4, "t", feature_names=["f"])
    module = nk.EmbeddingCollection([config], optimizer=optim.SGD(lr=0.1))
    with pytest.raises(ValueError, match="feature 'f' of 'e' is not pooled: its rows are what the model wants"):
        select_features(bind_stores({"e": module}), True)


def test_ranks_must_agree():
    def body(rank, communicator):
        with pytest.raises(ValueError) as caught:
            make_pipeline(SmallModel(communicator), owner_pooling=(True, ["user"])[rank])
        return str(caught.value)

    for text in run_ranks_as_threads(2, body):
        assert "ranks disagree on owner_pooling: rank " in text
        assert " has 'user', 'item'" in text and " has 'user'" in text


def test_a_gradient_that_is_not_finite_raises_and_names_the_keys():
    def body(rank, communicator):
        raised = pytest.raises(NonFiniteGradientError, match=r"row gradients \(table 'user' key")
        with make_pipeline(SmallModel(communicator), owner_pooling=True) as pipeline, raised:
            list(pipeline.run([make_batch(rank, bad=1)]))

    run_ranks_as_threads(2, body)


# ------------------------------------------------------------------------------------------------------- pieces


def test_parts_that_a_source_told_are_checked():
    told = [np.array([-1, 1, -2], dtype=np.int32), np.array([-1], dtype=np.int32)]
    parts = _owner_parts([2, 3], told)
    assert parts.entries.tolist() == [0, 1, 1, 2]
    assert parts.offsets.tolist() == [0, 2, 3, 4]
    assert parts.move.per_peer == [2, 1]
    with pytest.raises(CommunicationError, match="entries that its key list does not have"):
        _owner_parts([1, 3], told)


def test_bounds_add_every_occurrence_up():
    bounds = torch.zeros(3, dtype=torch.float64)
    parts = Parts(torch.tensor([0, 2, 0]), torch.tensor([0, 2, 3]), Transfer(torch.arange(2), [2]), [3])
    note_bounds(bounds, parts, torch.tensor([4.0, 2.0]))
    assert bounds.tolist() == [6.0, 0.0, 4.0]
    note_bounds(bounds, parts, torch.tensor([float("nan"), 1.0]))
    assert bounds.isnan().tolist() == [True, False, True]


def test_keys_whose_rows_do_not_travel_are_in_no_transfer():
    from nestpipe_kernels.comm.router import NEVER, transfers

    source = route_keys(
        torch.arange(6), torch.zeros(6, dtype=torch.int32), None, [3, 3], torch.zeros(1, dtype=torch.int64),
        default_slice_owner(2), 2, False,
    )  # fmt: skip
    lists = source.lists
    lists.first[::2] = lists.last[::2] = NEVER
    rows, grads = transfers(lists, 2)
    moved = torch.cat([move.positions for move in rows])
    assert sorted(moved.tolist()) == [1, 3, 5]
    assert sum(sum(move.per_peer) for move in grads) == 3
