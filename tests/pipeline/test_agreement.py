"""What ranks must have in common, and what they say to each other when they do not; nothing is dropped in silence."""

import copy
import gc
import pickle
import threading

import pytest
import torch

import nestpipe_kernels as nk
from nestpipe_kernels.errors import CommunicationError, RemoteRankError, StoreFullError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import read_store
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config

SCHEDULES = ["sequential", "dbp", "fwp", "nested"]


def rows_of(pipeline):
    rows, notes = {}, {}
    for binding in pipeline.rank.bindings:
        read_store(binding.store, rows, notes)
    return rows, notes


def pipeline_of(scenario, schedule="nested", communicator=None, rank=0, timeout_s=20.0):
    generator = scenario.generator(rank)
    model = scenario.model(communicator, generator)
    config = scenario_config(scenario, schedule, timeout_s)
    return NestedPipeline(model, scenario.dense_optimizer(model), config=config), model, generator


def test_dense_parameters_start_as_rank_0_has_them():
    scenario = Scenario(world_size=3, batches=3, uneven=False)

    def body(rank, communicator):
        model = scenario.model(communicator, scenario.generator(rank))
        model.linear.weight.data += rank
        model.register_buffer("seen", torch.tensor([rank, 7]))
        before = model.linear.weight.data.clone() - rank
        with NestedPipeline(model, scenario.dense_optimizer(model), config=scenario_config(scenario, "nested")):
            return torch.equal(model.linear.weight.data, before) or rank, model.seen.tolist(), model.linear.weight.data

    results = run_ranks_as_threads(3, body)
    assert all(torch.equal(weight, results[0][2]) for _, _, weight in results)
    assert [seen for _, seen, _ in results] == [[0, 7]] * 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fault_31_a_full_table_is_an_error_that_changes_nothing(schedule):
    table = nk.EmbeddingBagConfig(nk.UNBOUNDED, 4, "item", feature_names=["item"], capacity=300)
    collection = nk.EmbeddingBagCollection([table], optimizer=nk.optim.SGD(lr=0.1))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = collection

        def forward(self, batch):
            pooled = self.embed(batch).values()
            return pooled.square().mean(), pooled

    def batch(first, count):
        return nk.KeyedJaggedTensor(["item"], torch.arange(first, first + count), lengths=torch.ones(count).long())

    model = Model()
    config = nk.PipelineConfig(schedule=schedule, num_micro_batches=2)
    with NestedPipeline(model, config=config) as pipeline:
        iterator = iter([batch(0, 200), batch(200, 200), batch(0, 50)])
        pipeline.progress(iterator)
        pipeline.drain()
        with pytest.raises(StoreFullError, match=r"table 'item': \d+ new keys of this batch have no room"):
            pipeline.progress(iterator)
        assert len(collection.store("item")) == 200
        pipeline.progress(iterator)
        assert pipeline.step_count == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_that_fails_does_not_advance_the_count(schedule):
    scenario = Scenario(world_size=1, micro_batches=2, batches=4, uneven=False)
    pipeline, model, generator = pipeline_of(scenario, schedule)
    calls, head = [], model.head

    def failing(pooled, batch):
        calls.append(len(batch.label))
        if len(calls) == 4:  # second micro-batch of the second batch
            raise RuntimeError("planted")
        return head(pooled, batch)

    indices = []
    with pipeline:
        iterator = scenario.loader(0, generator)
        pipeline._step(iterator)
        model.head = failing
        calls.extend([0, 0])
        with pytest.raises(RuntimeError, match="planted"):
            pipeline.progress(iterator)
        model.head = head
        indices = [pipeline._step(iterator).index for _ in range(2)]
        pipeline.drain()
        _, notes = rows_of(pipeline)
    assert indices == [1, 2]
    assert max(last_used for last_used, _ in notes.values()) == 2


def test_weights_with_some_micro_batches_only():
    scenario = Scenario(world_size=1, micro_batches=2, batches=2, uneven=False, weight_loss=True)
    pipeline, model, generator = pipeline_of(scenario)
    head, calls = model.head, []

    def sometimes(pooled, batch):
        calls.append(1)
        return head(pooled, batch)[: 2 + len(calls) % 2]

    with pipeline:
        iterator = scenario.loader(0, generator)
        pipeline.progress(iterator)
        model.head = sometimes
        with pytest.raises(TypeError, match="returned a weight with some micro-batches"):
            pipeline.progress(iterator)


def test_two_pipelines_on_one_module():
    scenario = Scenario(world_size=1)
    pipeline, model, _ = pipeline_of(scenario)
    with pytest.raises(ValueError, match="module 'lookup' belongs to another open pipeline; close that one first"):
        NestedPipeline(model)
    pipeline.close()
    NestedPipeline(model).close()


def test_one_rank_trains_and_one_evaluates():
    scenario = Scenario(world_size=2, batches=3, uneven=False)

    def body(rank, communicator):
        pipeline, model, generator = pipeline_of(scenario, "sequential", communicator, rank, timeout_s=3.0)
        model.train(rank == 0)
        with pytest.raises(CommunicationError), pipeline:
            pipeline.progress(scenario.loader(rank, generator))

    run_ranks_as_threads(2, body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_of_the_callers_leaves_no_untrained_rows(schedule):
    scenario = Scenario(world_size=1, micro_batches=2, batches=5, uneven=False)
    kept = []
    for finish in (False, True):
        pipeline, _, generator = pipeline_of(scenario, schedule)
        iterator = scenario.loader(0, generator)
        try:
            with pipeline:
                pipeline.progress(iterator)
                pipeline.progress(iterator)
                pipeline.drain()
                if not finish:
                    raise KeyError("the caller's own")
        except KeyError:
            pass
        kept.append(rows_of(pipeline))
    assert kept[0] == kept[1]


def test_the_last_update_of_another_rank_failing_is_heard():
    scenario = Scenario(world_size=2, batches=2, uneven=False)

    def body(rank, communicator):
        pipeline, _, generator = pipeline_of(scenario, "nested", communicator, rank)
        if rank == 1:

            def hook(step, table, keys):
                if step == 2:
                    raise OSError("disk of the hook is full")

            pipeline.add_write_back_hook(hook)
        with pytest.raises((CommunicationError, OSError)) as caught, pipeline:
            list(pipeline.run(scenario.loader(rank, generator)))
        return str(caught.value)

    messages = run_ranks_as_threads(2, body)
    assert messages[1] == "disk of the hook is full"
    assert "rank 1 failed in the last updates of the epoch: OSError: disk of the hook is full" in messages[0]


def test_skip_row_says_what_it_left_out():
    scenario = Scenario(world_size=1, micro_batches=1, batches=2, uneven=False, nan_policy="skip_row")
    pipeline, model, generator = pipeline_of(scenario)
    head = model.head
    with pipeline:
        iterator = scenario.loader(0, generator)
        model.head = lambda pooled, batch: (head(pooled.detach(), batch)[0] * float("nan"), None)
        before = model.linear.weight.data.clone()
        step = pipeline._step(iterator)
        assert step.dense_skipped
        assert step.skipped == "dense gradients"
        assert torch.equal(model.linear.weight.data, before)


def test_remote_failures_name_the_batch_as_the_caller_counts():
    scenario = Scenario(world_size=2, batches=3, uneven=False)

    def body(rank, communicator):
        pipeline, model, generator = pipeline_of(scenario, "nested", communicator, rank)
        with pipeline:
            iterator = scenario.loader(rank, generator)
            pipeline.progress(iterator)
            if rank == 1:
                model.head = None
            with pytest.raises((RemoteRankError, TypeError)) as caught:
                pipeline.progress(iterator)
            return str(caught.value)

    assert "rank 1 failed in forward_backward of batch 1: TypeError" in run_ranks_as_threads(2, body)[0]


def test_processes_that_do_not_know_each_other_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"started 2 processes, but torch.distributed is not initialised"):
        pipeline_of(Scenario(world_size=1))[0].close()


def test_a_loss_that_is_not_reduced_over_samples():
    scenario = Scenario(world_size=1, micro_batches=1, batches=2, uneven=False, samples=4)
    pipeline, model, generator = pipeline_of(scenario)
    model.head = lambda pooled, batch: (pooled.sum(1), None)
    message = r"the model returned one loss for each of the 4 samples \(shape \[4\]\); return their mean"
    with pipeline, pytest.raises(TypeError, match=message):
        pipeline.progress(scenario.loader(0, generator))


def test_several_losses_are_added():
    scenario = Scenario(world_size=1, micro_batches=1, batches=2, uneven=False, samples=4, noise=False)
    pipeline, model, generator = pipeline_of(scenario)
    head = model.head
    model.head = lambda pooled, batch: (head(pooled, batch)[0].expand(2), None)
    plain, _, _ = pipeline_of(scenario)
    with pipeline, plain:
        double = pipeline._step(scenario.loader(0, generator)).loss
        single = plain._step(scenario.loader(0, None)).loss
    assert float(double) == 2 * float(single)


def test_a_pipeline_that_is_dropped_leaves_no_threads():
    def lanes():
        return {t for t in threading.enumerate() if t.name.startswith("nestpipe-")}

    before = lanes()

    def use_and_drop():
        scenario = Scenario(world_size=1, batches=5, uneven=False)
        pipeline, _, generator = pipeline_of(scenario)
        iterator = scenario.loader(0, generator)
        for _ in range(3):
            pipeline.progress(iterator)
        pipeline.drain()
        assert lanes() > before

    use_and_drop()
    gc.collect()
    for thread in lanes() - before:
        thread.join(timeout=10)
    assert lanes() == before


def test_training_in_inference_mode():
    scenario = Scenario(world_size=1, batches=3, uneven=False)
    pipeline, _, generator = pipeline_of(scenario)
    with pipeline:
        iterator = scenario.loader(0, generator)
        with torch.inference_mode(), pytest.raises(RuntimeError, match="cannot be trained under"):
            pipeline.progress(iterator)
        pipeline.progress(iterator)
        assert pipeline.step_count == 1


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps], ids=["copy", "pickle"])
def test_collections_with_stores_are_not_copied(take):
    model = Scenario(world_size=1).model(None, None)
    with pytest.raises(TypeError, match="rows in native stores cannot be deep-copied or pickled"):
        take(model)
