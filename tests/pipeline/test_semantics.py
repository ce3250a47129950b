"""What a step means: order of outputs, weights of losses, averages over ranks, hooks, learning rates, frozen tables."""

import json

import pytest
import torch
import torch.distributed as dist
from small_model import (
    EXACT,
    Recommender,
    dense_optimizer,
    make_batch,
    make_pipeline,
    make_tables,
    run_all,
    run_rank,
    state_of,
)
from torch import nn

from nestpipe_kernels import optim
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.stages.micro_batches import even_sizes
from nestpipe_kernels.testing.threads import run_ranks_as_threads

BATCHES = [make_batch(t, size=7) for t in range(5)]


def embeddings(pipeline, table, keys):
    return pipeline.model.ebc.store(table).find(torch.tensor(keys))[0]


# ------------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("schedule", EXACT)
def test_outputs_come_in_the_callers_order_although_samples_are_clustered(schedule):
    model = Recommender()
    with make_pipeline(model, schedule, num_micro_batches=3) as pipeline:
        for batch in BATCHES:
            with torch.no_grad():
                expected = model.eval()(batch)[1]
            model.train()
            output = pipeline.progress(iter([batch]))
            assert torch.allclose(output, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, expected.sort().values), "the order of the outputs must matter"


@pytest.mark.parametrize(
    "samples, number, share, sizes",
    [
        (64, 8, 0.5, [4, 10, 10, 9, 9, 9, 9, 4]),
        (64, 8, 1.0, [8] * 8),
        (64, 2, 0.5, [32, 32]),
        (9, 3, 0.1, [1, 7, 1]),
        (3, 3, 0.1, [1, 1, 1]),
        (2, 3, 0.5, [1, 1, 0]),
        (0, 3, 0.5, [0, 0, 0]),
        (7, 3, 0.99, [3, 2, 2]),
    ],
)
def test_the_first_and_the_last_micro_batch_may_be_smaller(samples, number, share, sizes):
    assert even_sizes(samples, number, share) == sizes


def test_smaller_edges_are_the_same_in_every_schedule_and_near_even_ones():
    batches = [make_batch(t, size=13) for t in range(5)]

    def losses(schedule, **settings):
        runs = run_all(2, schedule, lambda r: batches, num_micro_batches=4, **settings)
        assert not any(run.errors for run in runs)
        return [(run.losses, run.state.rows, run.state.dense) for run in runs]

    expected = losses("sequential", edge_share=0.4)
    for schedule in EXACT:
        assert losses(schedule, edge_share=0.4) == expected
    even = losses("sequential")
    assert even != expected
    for one, other in zip(even, expected):
        assert torch.allclose(torch.tensor(one[0]), torch.tensor(other[0]), rtol=1e-4)


def test_clustering_does_reorder_samples():
    from nestpipe_kernels.stages import routing

    seen = []
    original = routing.micro_batches

    def note(rank, batch):
        made = original(rank, batch)
        seen.append(torch.cat([m.indices for m in made]).tolist())
        return made

    routing.micro_batches = note
    try:
        run_rank(make_pipeline(Recommender(), num_micro_batches=3), BATCHES)
    finally:
        routing.micro_batches = original
    assert any(order != list(range(7)) for order in seen)
    assert all(sorted(order) == list(range(7)) for order in seen)


class Structured(Recommender):
    """Outputs of several kinds."""

    def forward(self, batch):
        loss, logits = super().forward(batch)
        return loss, {"logits": logits, "by name": (batch.label, 3), "mean": logits.mean(), "keys": batch.sparse}


def test_outputs_of_many_kinds_are_joined():
    with make_pipeline(Structured(), num_micro_batches=3) as pipeline:
        output = pipeline.progress(iter(BATCHES[:1]))
    assert output["logits"].shape == (7,)
    assert not output["logits"].requires_grad
    assert output["by name"][0].equal(BATCHES[0].label)
    assert output["by name"][1] == 3
    assert torch.allclose(output["mean"], output["logits"].mean())
    assert output["keys"].values().equal(BATCHES[0].sparse.values())
    assert output["keys"].lengths().equal(BATCHES[0].sparse.lengths())


def test_fault_34_a_rank_without_samples_has_no_output_and_the_others_train():
    runs = run_all(2, "nested", lambda r: [make_batch(t, size=0 if r else 6) for t in range(3)])
    assert runs[1].outputs == [None] * 3
    assert runs[1].losses == [0.0] * 3
    assert all(len(o) == 6 for o in runs[0].outputs)
    assert runs[0].state.dense == runs[1].state.dense
    assert runs[0].state.step_count == 3


# ------------------------------------------------------------------------------------------------- loss weighting


def gradient_of_step(**settings):
    """The dense gradient of one step, as the dense optimizer saw it, and the step."""
    model = Recommender()
    with make_pipeline(model, clustering="none", **settings) as pipeline:
        step = next(pipeline.run(BATCHES[:1]))
        return model.linear.weight.grad.clone(), step


def whole_batch_gradient(reduce):
    model = Recommender()
    logits = model(BATCHES[0])[1]
    loss = reduce((logits - BATCHES[0].label) ** 2)
    return torch.autograd.grad(loss, model.linear.weight)[0], loss.item()


def squares(model, batch):
    logits = model(batch)[1]
    return (logits - batch.label) ** 2, logits


def test_a_mean_loss_over_micro_batches_of_4_and_3_is_the_mean_over_the_batch():
    gradient, step = gradient_of_step(num_micro_batches=2)
    expected, loss = whole_batch_gradient(torch.mean)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert float(step.loss) == pytest.approx(loss, rel=1e-5)


def test_a_summed_loss_is_the_sum_over_the_batch():
    def summed(model, batch):
        loss, logits = squares(model, batch)
        return loss.sum(), logits

    gradient, step = gradient_of_step(num_micro_batches=3, loss_weighting="sum", loss_fn=summed)
    expected, loss = whole_batch_gradient(torch.sum)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert float(step.loss) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_returned_weights_average_over_what_they_count(as_tensor):
    """A loss per token: samples weigh by their items, which micro-batches hold differently many of."""
    counts = BATCHES[0].sparse.lengths()[7:].to(torch.float32)

    def per_token(model, batch):
        tokens = batch.sparse.lengths()[len(batch.label) :].to(torch.float32)
        loss, logits = squares(model, batch)
        weight = tokens.sum()
        return (loss * tokens).sum() / weight, logits, weight if as_tensor else float(weight)

    gradient, step = gradient_of_step(num_micro_batches=2, loss_fn=per_token)
    expected, loss = whole_batch_gradient(lambda each: (each * counts).sum() / counts.sum())
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert float(step.loss) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("schedule", EXACT)
def test_a_rank_whose_weights_are_all_0_contributes_nothing(schedule):
    def only_marked(model, batch):
        loss, logits = model(batch)
        return loss, logits, float(batch.bad.sum())

    def batches(rank):
        made = [make_batch(10 * rank + t) for t in range(3)]
        for batch in made:
            batch.bad += 8 if rank == 0 else 0
        return made

    def train(name, batches_of=batches):
        return run_all(2, name, batches_of, loss_fn=only_marked)

    first, second = runs = train(schedule)
    assert runs == train("sequential")
    assert second.losses == [0.0] * 3
    alone = train("sequential", lambda rank: batches(rank) if rank == 0 else [])[0]
    assert first.losses == alone.losses
    assert first.state.dense == alone.state.dense


# --------------------------------------------------------------------------------------------------------- ranks


class WithExtras(Recommender):
    """One parameter that only rank 0 uses, and one that nobody does."""

    def __init__(self, communicator):
        super().__init__(communicator)
        self.rank = communicator.rank
        self.sometimes = nn.Parameter(torch.ones(2))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, batch):
        loss, logits = super().forward(batch)
        return (loss + (self.sometimes * 3).sum() if self.rank == 0 else loss), logits


def test_fault_28_dense_gradients_are_the_mean_over_all_ranks():
    def body(rank, communicator):
        model = WithExtras(communicator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batches = [make_batch(rank, size=5 - rank)] if rank < 2 else []
        with NestedPipeline(model, optimizer, config=PipelineConfig(num_micro_batches=1, timeout_s=20)) as pipeline:
            list(pipeline.run(batches))
            return model.linear.weight.grad, model.sometimes.grad, model.never.grad

    found = run_ranks_as_threads(3, body, timeout_s=20)
    own = []
    for rank in range(2):
        model = Recommender()
        own.append(torch.autograd.grad(model(make_batch(rank, size=5 - rank))[0], model.linear.weight)[0])
    for weight, sometimes, never in found:
        assert weight.equal((own[0] + own[1]) / 3), "a rank without samples counts in W"
        assert sometimes.equal(torch.full((2,), 3.0) / 3)
        assert never is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fault_28_row_gradients_are_the_mean_over_all_ranks(world_size):
    def ones(model, batch):
        pooled = model.ebc(batch.sparse).values()
        return pooled.sum(), pooled

    def body(rank, communicator):
        model = Recommender(communicator, optimizer=optim.SGD(lr=1.0))
        with make_pipeline(model, loss_fn=ones, loss_weighting="sum") as pipeline:
            list(pipeline.run([make_batch(0, size=4, keys=1)]))
            held = len(model.ebc.store("user"))
            return embeddings(pipeline, "user", [0]) if held else None

    start = Recommender().ebc.store("user").find(torch.tensor([0]))[0]
    found = [rows for rows in run_ranks_as_threads(world_size, body, timeout_s=20) if rows is not None]
    assert len(found) == 1
    assert torch.allclose(found[0], start - 4.0, atol=1e-6)


def test_a_ddp_module_is_not_reduced_twice(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        calls = []
        model = nn.parallel.DistributedDataParallel(Recommender())

        def note(state, bucket):
            calls.append(bucket)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, note)
        pipeline = NestedPipeline(model, dense_optimizer(model), config=PipelineConfig(num_micro_batches=2))
        wrapped = run_rank_of(pipeline)
        plain = run_rank_of(make_pipeline(Recommender()))
    finally:
        dist.destroy_process_group()
    assert calls == [], "the pipeline averages, DDP must not"
    assert wrapped == plain


def run_rank_of(pipeline):
    """Losses and state of a run; the state is read before the process group is gone."""
    losses = [float(step.loss) for step in pipeline.run(BATCHES)]
    pipeline.drain()
    module = next(iter(pipeline.rank.modules.values()))
    rows = {name: module.store(name).find(torch.arange(7))[0].tolist() for name in ("user", "item")}
    dense = [p.tolist() for _, p in pipeline.rank.dense_parameters]
    pipeline.close()
    return losses, rows, dense


# --------------------------------------------------------------------------------------------------- sparse side


@pytest.mark.parametrize("schedule", EXACT)
def test_the_write_back_hook_hears_every_key_once_per_step(schedule):
    heard = []
    with make_pipeline(Recommender(), schedule) as pipeline:
        pipeline.add_write_back_hook(lambda step, table, keys: heard.append((step, table, sorted(keys.tolist()))))
        list(pipeline.run(BATCHES))
        pipeline.drain()
    expected = [
        (t + 1, table, sorted(set(batch.sparse[table].values().tolist())))
        for t, batch in enumerate(BATCHES)
        for table in ("user", "item")
    ]
    assert sorted(heard) == sorted(expected)
    assert [step for step, _, _ in heard] == sorted(step for step, _, _ in heard)


@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
def test_fault_27_micro_batches_make_one_update(transfer):
    updates = {}
    run = run_all(1, "nested", lambda r: BATCHES, num_micro_batches=5, row_transfer=transfer)[0]
    for batch in BATCHES:
        for table in ("user", "item"):
            for key in set(batch.sparse[table].values().tolist()):
                updates[table, key] = updates.get((table, key), 0) + 1
    assert {row: int.from_bytes(value[-4:], "little") for row, value in run.state.rows.items()} == updates
    assert run.state.step_count == len(BATCHES)


@pytest.mark.parametrize("schedule", EXACT)
def test_a_learning_rate_scheduler_reaches_the_next_update_alike_in_every_schedule(schedule):
    def train(name):
        model = Recommender(optimizer=optim.SGD(lr=1.0))
        scheduler = torch.optim.lr_scheduler.StepLR(model.ebc.sparse_optimizer, step_size=1, gamma=0.1)
        with make_pipeline(model, name) as pipeline:
            iterator, moved = iter([BATCHES[0]] * 4), []
            for _ in range(4):
                before = embeddings(pipeline, "user", range(7))
                pipeline.progress(iterator)
                moved.append(float((embeddings(pipeline, "user", range(7)) - before).abs().max()))
                scheduler.step()
            return moved, state_of(pipeline)

    moved, state = train(schedule)
    assert all(later < 0.35 * earlier for earlier, later in zip(moved, moved[1:]))
    assert (moved, state) == train("sequential")


def test_a_learning_rate_scheduler_without_reading_between_steps():
    def train(name):
        model = Recommender(optimizer=optim.Adam(lr=0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(model.ebc.sparse_optimizer, gamma=0.5)
        with make_pipeline(model, name) as pipeline:
            for _ in pipeline.run(BATCHES):
                scheduler.step()
            return state_of(pipeline)

    expected = train("sequential")
    for name in EXACT[1:]:
        assert train(name) == expected


@pytest.mark.parametrize("schedule", EXACT)
def test_frozen_tables_do_not_move(schedule):
    tables = [make_tables()[0], make_tables(trainable=False)[1]]
    model = Recommender(tables=tables)
    with make_pipeline(model, schedule) as pipeline:
        before = embeddings(pipeline, "item", range(7))
        user = embeddings(pipeline, "user", range(7))
        list(pipeline.run(BATCHES))
        assert embeddings(pipeline, "item", range(7)).equal(before)
        assert not embeddings(pipeline, "user", range(7)).equal(user)


# ------------------------------------------------------------------------------------------------ pipeline object


def test_with_block_closes_and_stops_the_threads():
    with make_pipeline(Recommender()) as pipeline:
        pipeline.progress(iter(BATCHES))
        mine = [lane._thread for lane in pipeline._scheduler.lanes.values()]
        assert all(thread.is_alive() for thread in mine)
    assert not any(thread.is_alive() for thread in mine)
    # The batch drawn ahead left no trace in the stores.
    assert pipeline.model.ebc.store("user").keys().sort().values.tolist() == sorted(
        set(BATCHES[0].sparse["user"].values().tolist())
    )


def test_a_new_pipeline_goes_on_with_the_same_model():
    model = Recommender(optimizer=optim.SGD(lr=0.2))
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.05)
    for part in (BATCHES[:2], BATCHES[2:]):
        with NestedPipeline(model, optimizer, config=PipelineConfig(num_micro_batches=2)) as pipeline:
            list(pipeline.run(part))
    whole = Recommender(optimizer=optim.SGD(lr=0.2))
    plain = torch.optim.SGD(whole.linear.parameters(), lr=0.05)
    with NestedPipeline(whole, plain, config=PipelineConfig(num_micro_batches=2)) as other:
        list(other.run(BATCHES))
    for table in ("user", "item"):
        assert embeddings(pipeline, table, range(7)).equal(embeddings(other, table, range(7)))
    assert model.linear.weight.equal(whole.linear.weight)


@pytest.mark.parametrize("suffix", ["html", "json", "png"])
def test_the_timeline_of_a_run_can_be_saved(tmp_path, suffix):
    if suffix == "png":
        pytest.importorskip("matplotlib")
    with make_pipeline(Recommender(), timeline_steps=3) as pipeline:
        list(pipeline.run(BATCHES))
        pipeline.drain()
        path = tmp_path / f"step.{suffix}"
        pipeline.timeline.save(path)
        spans = pipeline.timeline.to_events()
    assert path.stat().st_size > 1000
    stages = {span.stage for span in spans if not span.exposed}
    assert {"prefetch", "route", "retrieve", "gather", "send_rows", "forward_backward", "update"} <= stages
    assert len({span.batch for span in spans}) <= 3
    if suffix == "json":
        assert json.loads(path.read_text())


class Weights(Recommender):
    """Weighs its micro-batches from the fourth batch on; before, with `first` each: a half is as good as no weights."""

    def __init__(self, communicator, first):
        super().__init__(communicator)
        self.first = first

    def forward(self, batch):
        loss, logits = super().forward(batch)
        weight = 3.0 if float(batch.dense[0, 0]) > 50 else self.first
        return (loss, logits) if weight is None else (loss, logits, weight)


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_weights_that_begin_to_come_count_from_then_on(schedule):
    """Sums of rows that were complete before the weights were known are made again."""
    batches = [make_batch(t, size=8) for t in range(7)]
    for batch in batches[3:]:
        batch.dense = batch.dense + 100
    late, always = (
        run_all(2, schedule, lambda r: batches, [], lambda c, first=first: Weights(c, first)) for first in (None, 0.5)
    )
    for one, other in zip(late, always):
        assert not one.errors
        assert (one.losses, one.state.rows) == (other.losses, other.state.rows)
