"""The data goes on where it stood, for every kind of loader; what cannot go on is an error, never another order."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from noisy_training import (
    BATCH,
    SAMPLES,
    NoisySamples,
    StatefulLoader,
    by_progress,
    by_run,
    data_loader,
    seed_all,
    start,
)
from torch.utils.data import DataLoader

from nestpipe_kernels import checkpoint
from nestpipe_kernels.data import SyntheticConfig, SyntheticDataset, batches
from nestpipe_kernels.errors import CheckpointError, NonFiniteGradientError


def losses_and_state(path, make_loader, through, schedule, epochs=2, save_at=None, load=False, **settings):
    """Train `epochs` epochs (fewer after a load: the rest of them); save at (epoch, step)."""
    seed_all(1000 if load else 5)
    run = start(schedule)
    loader = make_loader()
    first = 0
    if load:
        settings = {"loader": loader, **settings} if settings.pop("give_loader", False) else settings
        checkpoint.load(path, model=run.model, pipeline=run.pipeline, **settings)
        first = save_at[0]
    losses: list[list[float]] = []
    with run.pipeline:
        for epoch in range(first, epochs):
            losses.append([])
            for loss in through(run, loader):
                losses[-1].append(loss)
                torch.rand(2)  # user code between steps draws, too
                if not load and save_at == (epoch, len(losses[-1])):
                    checkpoint.save(path, model=run.model, pipeline=run.pipeline)
        return losses, run.state()


def check(path, make_loader, through, schedule="nested", save_at=(0, 3), **settings: Any) -> None:
    plain_losses, plain = losses_and_state(path, make_loader, through, schedule)
    _, saving = losses_and_state(path, make_loader, through, schedule, save_at=save_at)
    assert plain == saving, "saving changed the training"
    losses, got = losses_and_state(path, make_loader, through, schedule, save_at=save_at, load=True, **settings)
    assert losses == [plain_losses[save_at[0]][save_at[1] :], *plain_losses[save_at[0] + 1 :]]
    assert {name for name in plain if plain[name] != got[name]} == set()


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
@pytest.mark.parametrize("own_generator", [False, True], ids=["default", "own"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("save_at", [(0, 2), (1, 6)], ids=["middle", "end"])
def test_fault_44_a_shuffling_data_loader_goes_on(tmp_path, schedule, own_generator, workers, save_at):
    check(tmp_path, lambda: data_loader(workers, own_generator), by_run, schedule, save_at)


@functools.cache
def _fixed_samples() -> list[Any]:
    seed_all(3)
    return [NoisySamples()[number] for number in range(SAMPLES)]


def _loader_that_keeps_workers() -> DataLoader[Any]:
    context = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork", "timeout": 30}
    return DataLoader(_fixed_samples(), batch_size=BATCH, shuffle=True, **context)  # type: ignore[arg-type]


@pytest.mark.parametrize("save_at", [(0, 2), (1, 2)], ids=["first", "second"])
def test_fault_44_a_data_loader_that_keeps_its_workers_goes_on(tmp_path, save_at):
    """From its second epoch on, iter() draws fewer random numbers."""
    _fixed_samples()
    check(tmp_path, _loader_that_keeps_workers, by_run, "nested", save_at)


def test_fault_44_back_to_a_checkpoint_with_the_same_loader(tmp_path):
    """Its workers are there by then, as they were not when the epoch began."""
    _fixed_samples()
    seed_all(5)
    run, loader = start("nested"), _loader_that_keeps_workers()
    losses = []
    for loss in by_run(run, loader):
        losses.append(loss)
        if len(losses) == 2:
            checkpoint.save(tmp_path, model=run.model, pipeline=run.pipeline)
    checkpoint.load(tmp_path, model=run.model, pipeline=run.pipeline)
    assert list(by_run(run, loader)) == losses[2:]
    run.pipeline.close()


@pytest.mark.parametrize("schedule", ["dbp", "fwp"])
def test_fault_44_one_iterator_through_progress(tmp_path, schedule):
    check(tmp_path, data_loader, by_progress, schedule)


def test_an_iterator_given_to_run(tmp_path):
    """It is drawn from as it is, and fast-forwarded after a load."""
    check(tmp_path, data_loader, lambda run, loader: by_run(run, iter(loader)))


@pytest.mark.parametrize("give_loader", [False, True])
@pytest.mark.parametrize("through", [by_run, by_progress])
def test_a_loader_with_a_state(tmp_path, through, give_loader):
    check(tmp_path, StatefulLoader, through, save_at=(1, 3), give_loader=give_loader)


class Tuples:
    """A BatchLoader's batches as the model wants them; passes the state on."""

    def __init__(self) -> None:
        data = SyntheticDataset(SyntheticConfig(num_samples=SAMPLES, seed=2))
        self.inner = batches(data, BATCH, shuffle_seed=9)
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict

    def __iter__(self) -> Any:
        for batch in self.inner:
            keys = batch.sparse.values()[: len(batch.labels)] % 40
            yield torch.stack([keys, keys.flip(0)], 1), batch.labels + torch.rand(())


@pytest.mark.parametrize("save_at", [(0, 1), (1, 5)])
def test_batch_loader(tmp_path, save_at):
    check(tmp_path, Tuples, by_run, save_at=save_at)


def test_a_list_and_a_generator_function(tmp_path):
    made = [(torch.tensor([[k, k]] * BATCH), torch.rand(BATCH)) for k in range(6)]
    check(tmp_path, lambda: made, by_run)


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_after_a_batch_that_was_refused(tmp_path, schedule):
    """It counts as consumed and changed nothing; a checkpoint made then goes on behind it."""
    chance = torch.Generator().manual_seed(1)
    data = [(torch.randint(9, (BATCH, 2), generator=chance), torch.rand(BATCH, generator=chance)) for _ in range(6)]
    data[2][1][1] = float("nan")

    def train(load: bool) -> tuple[list[Any], Any]:
        seed_all(1000 if load else 5)
        run = start(schedule)
        if load:
            checkpoint.load(tmp_path, model=run.model, pipeline=run.pipeline)
        found: list[Any] = []
        iterator = iter(data)
        with run.pipeline:
            while True:
                try:
                    found.append(float(run.pipeline._step(iterator).loss))
                except NonFiniteGradientError:
                    found.append("refused")
                    checkpoint.save(tmp_path, model=run.model, pipeline=run.pipeline)
                except StopIteration:
                    return found, run.state()

    whole, state = train(load=False)
    assert whole[2] == "refused" and len(whole) == 6
    rest, after = train(load=True)
    assert rest == whole[3:]
    assert {name for name in state if state[name] != after[name]} == set()


def test_between_epochs_a_new_epoch_starts(tmp_path):
    """Saved when the epoch had ended: nothing is under way, the next one is shuffled as it would have been."""

    def train(load: bool, own: bool, folder) -> list[float]:
        seed_all(1000 if load else 5)
        run, loader = start(), data_loader(own_generator=own)
        with run.pipeline:
            if not load:
                list(by_run(run, loader))
                checkpoint.save(folder, model=run.model, pipeline=run.pipeline)
            else:
                report = checkpoint.load(folder, model=run.model, pipeline=run.pipeline)
                assert report.data == "starts an epoch"
            return list(by_run(run, loader))

    for own in (False, True):
        assert train(False, own, tmp_path / str(own)) == train(True, own, tmp_path / str(own))


def saved(path, data=None, steps=3, **settings: Any) -> None:
    """A checkpoint in the middle of an epoch."""
    seed_all(5)
    run = start()
    with run.pipeline:
        for number, _ in enumerate(by_run(run, data if data is not None else data_loader()), 1):
            if number == steps:
                checkpoint.save(path, model=run.model, pipeline=run.pipeline, **settings)
                return


def resumed(path, data, through=by_run, count=2, **settings: Any) -> list[float]:
    run = start()
    with run.pipeline:
        checkpoint.load(path, model=run.model, pipeline=run.pipeline, **settings)
        return list(itertools.islice(through(run, data), count))


def test_fault_44_another_order_is_an_error(tmp_path):
    saved(tmp_path)
    other = torch.utils.data.DataLoader(NoisySamples(), batch_size=BATCH, shuffle=False)
    with pytest.raises(
        CheckpointError, match="does not give the batch that was to come next: its data, order, batch size or random"
    ):
        resumed(tmp_path, other)
    with pytest.raises(
        CheckpointError, match=r"3 batches of the epoch had been consumed, but the loader ended after 1"
    ):
        resumed(tmp_path, [(torch.zeros(BATCH, 2, dtype=torch.int64), torch.zeros(BATCH))])
    assert len(resumed(tmp_path, other, start_epoch=True, count=99)) == SAMPLES // BATCH


def test_the_error_comes_again_until_training_gets_the_right_data(tmp_path):
    saved(tmp_path)
    run = start()
    with run.pipeline:
        checkpoint.load(tmp_path, model=run.model, pipeline=run.pipeline)
        wrong = iter(torch.utils.data.DataLoader(NoisySamples(), batch_size=BATCH))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="was to come next"):
                run.pipeline.progress(wrong)
        assert run.pipeline.step_count == 3


def test_loaders_of_another_kind(tmp_path):
    saved(tmp_path, StatefulLoader())
    with pytest.raises(CheckpointError, match=r"state of a loader \(StatefulLoader\), but the one given \(list\)"):
        resumed(tmp_path, [], loader=[])
    with pytest.raises(CheckpointError, match=r"state of a loader \(StatefulLoader\), but this one \(list\) has no"):
        resumed(tmp_path, [])
    with pytest.raises(CheckpointError, match=r"which an iterator \(generator\) cannot take; give load"):
        resumed(tmp_path, iter(StatefulLoader()))
    with pytest.raises(CheckpointError, match="training goes on with another one"):
        resumed(tmp_path, StatefulLoader(), loader=StatefulLoader())


def test_save_is_told_another_loader(tmp_path):
    run = start()
    with run.pipeline:
        next(iter(by_run(run, data_loader())))
        with pytest.raises(CheckpointError, match=r"given a loader \(list\), but the pipeline draws from another one"):
            checkpoint.save(tmp_path, model=run.model, pipeline=run.pipeline, loader=[])


def test_a_refused_state_is_explained(tmp_path):
    data = SyntheticDataset(SyntheticConfig(num_samples=SAMPLES))
    loader = batches(data, BATCH, shuffle_seed=1)
    run = start()
    run.pipeline.close()
    checkpoint.save(tmp_path, model=run.model, optimizer=run.optimizer, loader=loader)
    with pytest.raises(
        CheckpointError, match=r"refuses the saved state: ValueError: BatchLoader: the state is of data with"
    ):
        resumed(tmp_path, [], loader=batches(data, BATCH, shuffle_seed=2))


def test_generators_that_nobody_knows_can_be_added(tmp_path):
    """A generator that only a closure holds: named, it is restored; unnamed, the batch drawn again gives it away."""

    class Hidden:
        def __init__(self) -> None:
            self.hidden = torch.Generator().manual_seed(3)

        def __iter__(self) -> Any:
            draw = functools.partial(torch.randint, 9, (BATCH, 2), generator=self.hidden)
            return ((draw(), torch.zeros(BATCH)) for _ in range(6))

    def train(named: bool, load: bool) -> list[float]:
        seed_all(5)
        run, loader = start(), Hidden()
        with run.pipeline:
            if named:
                run.pipeline.add_generator("data", loader.hidden)
            if load:
                checkpoint.load(tmp_path / str(named), model=run.model, pipeline=run.pipeline)
            found = []
            for number, loss in enumerate(by_run(run, loader), 1):
                found.append(loss)
                if number == 3 and not load:
                    checkpoint.save(tmp_path / str(named), model=run.model, pipeline=run.pipeline)
            return found

    assert train(True, False)[3:] == train(True, True)
    whole = train(False, False)
    loader_again = train(False, True)  # its generator starts from its seed, and so does the replay: the same batches
    assert whole[3:] == loader_again
    with start().pipeline as pipeline:
        pipeline.add_generator("a", torch.Generator())
        with pytest.raises(ValueError, match="another generator named 'a'"):
            pipeline.add_generator("a", torch.Generator())
        with pytest.raises(TypeError, match=r"expected a torch.Generator, got int"):
            pipeline.add_generator("a", 3)  # type: ignore[arg-type]
