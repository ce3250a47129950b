"""Two batches are in flight when a checkpoint is made: both count as not consumed, and both come again as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from noisy_training import BATCH, SAMPLES, Noisy, NoisySamples, by_run, data_loader, seed_all, start
from torch.utils.data import DataLoader

from nestpipe_kernels import checkpoint
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline

STEPS = SAMPLES // BATCH


def train(path, run, loader, *, save_after=None, load=False, between=None):
    """An epoch, or the rest of one; losses and the state."""
    if load:
        checkpoint.load(path, model=run.model, pipeline=run.pipeline)
    losses: list[float] = []
    with run.pipeline:
        for loss in by_run(run, loader):
            losses.append(loss)
            if between is not None:
                between(run, len(losses))
            if len(losses) == save_after:
                checkpoint.save(path, model=run.model, pipeline=run.pipeline)
        return losses, run.state()


@pytest.mark.parametrize("save_after", [1, STEPS - 2, STEPS - 1, STEPS])
def test_saved_with_two_one_and_no_batch_in_flight(tmp_path, save_after):
    seed_all(5)
    losses, state = train(tmp_path, start(), data_loader(), save_after=save_after)
    seed_all(1000)
    rest, got = train(tmp_path, start(), data_loader(), load=True)
    assert rest == losses[save_after:]
    assert {name for name in state if state[name] != got[name]} == set()


def test_what_was_loaded_can_be_saved_before_any_step(tmp_path):
    seed_all(5)
    losses, state = train(tmp_path / "first", start(), data_loader(), save_after=2)
    seed_all(1000)
    run = start()
    checkpoint.load(tmp_path / "first", model=run.model, pipeline=run.pipeline)
    checkpoint.save(tmp_path / "second", model=run.model, pipeline=run.pipeline)
    run.pipeline.close()
    seed_all(2000)
    rest, got = train(tmp_path / "second", start(), data_loader(), load=True)
    assert (rest, got) == (losses[2:], state)


def with_fetch(schedule: str) -> Any:
    """A run whose loader gives numbers of samples, and whose fetch reads them (noise of each number's own)."""
    samples = NoisySamples()

    def fetch(numbers):
        noise = [torch.rand((), generator=torch.Generator().manual_seed(n)) for n in numbers.tolist()]
        return samples.keys[numbers], samples.labels[numbers] + torch.stack(noise)

    run = start()
    run.pipeline.close()
    model = Noisy()
    run.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.model = model
    config = PipelineConfig(schedule=schedule, num_micro_batches=1, timeout_s=30.0, fetch=fetch)
    run.pipeline = NestedPipeline(model, run.optimizer, config=config)
    return run


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
@pytest.mark.parametrize("save_after", [1, STEPS - 1])
def test_items_in_flight_are_drawn_and_fetched_again(tmp_path, schedule, save_after):
    numbers = lambda: DataLoader(torch.arange(SAMPLES), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]  # noqa: E731
    seed_all(5)
    losses, state = train(tmp_path, with_fetch(schedule), numbers(), save_after=save_after)
    seed_all(1000)
    rest, got = train(tmp_path, with_fetch(schedule), numbers(), load=True)
    assert (rest, got) == (losses[save_after:], state)


def fixed_data() -> list[Any]:
    chance = torch.Generator().manual_seed(1)
    return [(torch.randint(9, (BATCH, 2), generator=chance), torch.rand(BATCH, generator=chance)) for _ in range(STEPS)]


@pytest.mark.parametrize("wrong", [2, 3])
def test_fault_44_each_batch_in_flight_is_compared(tmp_path, wrong):
    """The first, or the second of the two is not what it was; what comes after is nobody's business."""
    seed_all(5)
    train(tmp_path, start(), fixed_data(), save_after=2)
    other = fixed_data()
    other[wrong][1][0] += 1
    run = start()
    trained: list[float] = []
    checkpoint.load(tmp_path, model=run.model, pipeline=run.pipeline)
    with run.pipeline, pytest.raises(CheckpointError, match="does not give the batch that was to come next"):
        trained.extend(by_run(run, other))
    assert len(trained) == wrong - 2
    later = fixed_data()
    later[4][1][0] += 1
    rest, _ = train(tmp_path, start(), later, load=True)
    assert len(rest) == STEPS - 2


def test_evaluation_takes_the_first_of_two_and_the_other_waits(tmp_path):
    data = fixed_data()

    def run_with(load: bool) -> tuple[list[float], Any]:
        seed_all(1000 if load else 5)
        run, losses = start(), []
        with run.pipeline:
            if load:
                checkpoint.load(tmp_path, model=run.model, pipeline=run.pipeline)
            iterator = iter(data)
            while True:
                try:
                    losses.append(float(run.pipeline._step(iterator).loss))
                except StopIteration:
                    return losses, run.state()
                if len(losses) == 2 and not load:
                    run.model.eval()
                    run.pipeline.progress(iterator)
                    run.model.train()
                    checkpoint.save(tmp_path, model=run.model, pipeline=run.pipeline)

    losses, state = run_with(load=False)
    assert len(losses) == STEPS - 1
    rest, got = run_with(load=True)
    assert rest == losses[2:]
    assert got["rows"] == state["rows"] and got["tensors"] == state["tensors"]


def test_a_position_with_one_batch_in_flight_in_its_older_form_is_read(tmp_path):
    data = fixed_data()
    seed_all(5)
    run = start()
    with run.pipeline:
        iterator = iter(data)
        for _ in range(2):
            run.pipeline.progress(iterator)
        run.pipeline.settle()
        position = run.pipeline.export_position()
        first = position["loader"].pop("in_flight")[0]
        older = {**position["loader"], **first, "in_flight": True}
        run.pipeline.progress(iterator)
        assert len(run.pipeline._drawn.batches) == 2
        run.pipeline.import_position(2, 2, _with_states(older), position["generators"])
        seen = []
        run.pipeline.rank.call_model = _noting(seen, run.pipeline.rank.call_model)
        again = iter(data)
        for _ in range(STEPS - 2):
            run.pipeline.progress(again)
    assert [labels.tolist() for labels in seen] == [labels.tolist() for _, labels in data[2:]]


def _with_states(record):
    from nestpipe_kernels.checkpoint.position import choose_record

    return choose_record([record], 0, 1, None, True, False)


def _noting(seen, call):
    def noted(model, batch):
        seen.append(batch[1])
        return call(model, batch)

    return noted
