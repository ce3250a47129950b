"""Whose batch comes next: evaluation, several iterators, left loops, outside access; nothing mixed, lost or early."""

import pytest
import torch
from small_model import EXACT, Recommender, make_batch, make_pipeline, run_rank, state_of

from nestpipe_kernels.nn import EmbeddingBagConfig
from nestpipe_kernels.testing.threads import run_ranks_as_threads

TRAIN = [make_batch(t) for t in range(6)]
OTHER = [make_batch(50 + t) for t in range(3)]
UNSEEN = [make_batch(80 + t, first_key=100) for t in range(3)]


def final_state(batches, schedule="sequential"):
    return run_rank(make_pipeline(Recommender(), schedule), batches).state


def evaluate(pipeline, iterator, count=1):
    pipeline.model.eval()
    outputs = [pipeline.progress(iterator) for _ in range(count)]
    pipeline.model.train()
    return outputs


def plain_outputs(pipeline, batch):
    """What the model gives for a batch with the rows and parameters as they are now, without the pipeline."""
    with torch.no_grad():
        pipeline.model.eval()
        output = pipeline.model(batch)[1]
        pipeline.model.train()
    return output


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_40_evaluation_in_the_middle_of_an_epoch_sees_the_batch_before(schedule):
    expected = final_state(TRAIN)
    with make_pipeline(Recommender(), schedule) as pipeline:
        iterator, held_out = iter(TRAIN), iter(OTHER)
        for number in range(len(TRAIN)):
            pipeline.progress(iterator)
            if number in (1, 3):
                batch = OTHER[0 if number == 1 else 1]
                (output,) = evaluate(pipeline, held_out)
                assert torch.allclose(output, plain_outputs(pipeline, batch), rtol=0, atol=1e-6)
        assert state_of(pipeline) == expected


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_15_evaluation_inserts_nothing(schedule):
    with make_pipeline(Recommender(), schedule) as pipeline:
        iterator = iter(TRAIN)
        pipeline.progress(iterator)
        before = state_of(pipeline)
        (output,) = evaluate(pipeline, iter(UNSEEN))
        assert state_of(pipeline) == before
        assert torch.allclose(output, plain_outputs(pipeline, UNSEEN[0]), rtol=0, atol=1e-6)
        pipeline.progress(iterator)
        assert state_of(pipeline) == final_state(TRAIN[:2])


@pytest.mark.parametrize("schedule", EXACT)
def test_evaluation_with_the_same_iterator_takes_the_next_batch(schedule):
    with make_pipeline(Recommender(), schedule) as pipeline:
        iterator = iter(TRAIN)
        pipeline.progress(iterator)
        outputs = evaluate(pipeline, iterator, 2)
        for output, batch in zip(outputs, TRAIN[1:3]):
            assert torch.allclose(output, plain_outputs(pipeline, batch), rtol=0, atol=1e-6)
        while True:
            try:
                pipeline.progress(iterator)
            except StopIteration:
                break
        state, expected = state_of(pipeline), final_state([TRAIN[0], *TRAIN[3:]])
        assert (state.rows, state.dense, state.step_count) == (expected.rows, expected.dense, 4)


@pytest.mark.parametrize("schedule", EXACT)
def test_a_whole_evaluation_ends_with_stop_iteration_and_training_goes_on(schedule):
    with make_pipeline(Recommender(), schedule) as pipeline:
        iterator = iter(TRAIN)
        pipeline.progress(iterator)
        pipeline.model.eval()
        assert [step.output.shape for step in pipeline.run(OTHER)] == [(6,)] * 3
        pipeline.model.train()
        steps = list(pipeline.run(iterator))
        assert [step.index for step in steps] == [1, 2, 3, 4, 5]
        assert state_of(pipeline) == final_state(TRAIN)


@pytest.mark.parametrize("schedule", EXACT)
def test_a_second_iterator_in_the_middle_finds_its_own_batches(schedule):
    order = [(0, TRAIN[0]), (0, TRAIN[1]), (1, OTHER[0]), (0, TRAIN[2]), (1, OTHER[1]), (1, OTHER[2]), (0, TRAIN[3])]
    expected = final_state([batch for _, batch in order])
    with make_pipeline(Recommender(), schedule) as pipeline:
        iterators = iter(TRAIN), iter(OTHER)
        for which, _ in order:
            pipeline.progress(iterators[which])
        assert state_of(pipeline) == expected
        with pytest.raises(StopIteration):
            pipeline.progress(iterators[1])
        assert len(list(pipeline.run(iterators[0]))) == 2
        assert state_of(pipeline).step_count == 9


@pytest.mark.parametrize("schedule", EXACT)
def test_a_loop_left_by_break_starts_afresh_with_the_next_loader(schedule):
    expected = final_state([*TRAIN[:2], *OTHER])
    with make_pipeline(Recommender(), schedule) as pipeline:
        for step in pipeline.run(TRAIN):
            if step.index == 1:
                break
        list(pipeline.run(OTHER))
        assert state_of(pipeline) == expected
        assert not pipeline._drawn.parked, "batches drawn for the left loop are kept for nobody"


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_40_the_same_loader_trains_in_every_epoch(schedule):
    with make_pipeline(Recommender(), schedule) as pipeline:
        counts = [len(list(pipeline.run(TRAIN))) for _ in range(3)]
        assert counts == [6, 6, 6]
        assert state_of(pipeline) == final_state(TRAIN * 3)


class Restarting:
    """An iterator that begins again after its end, as some loaders do."""

    def __init__(self, batches):
        self.batches, self.place = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        if self.place > len(self.batches):
            self.place = 0
            raise StopIteration
        return self.batches[self.place - 1]


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_40_the_same_iterator_object_trains_again(schedule):
    with make_pipeline(Recommender(), schedule) as pipeline:
        iterator = Restarting(TRAIN)
        assert [len(list(pipeline.run(iterator))) for _ in range(2)] == [6, 6]
        assert state_of(pipeline) == final_state(TRAIN * 2)


@pytest.mark.parametrize("schedule", EXACT)
def test_reading_rows_between_steps_shows_the_returned_batch_and_changes_nothing(schedule):
    everything = torch.arange(8)
    expected = final_state(TRAIN)

    def look(name):
        seen = []
        with make_pipeline(Recommender(), name) as pipeline:
            iterator = iter(TRAIN)
            for number in range(len(TRAIN)):
                pipeline.progress(iterator)
                if number % 2:
                    rows, status = pipeline.model.ebc.store("item").find(everything)
                    seen.append((rows.tolist(), status.tolist(), len(pipeline.model.ebc.store("user"))))
            return seen, state_of(pipeline)

    seen, state = look(schedule)
    assert seen == look("sequential")[0]
    assert state == expected


@pytest.mark.parametrize("schedule", EXACT)
def test_writing_rows_between_steps_reaches_the_next_batch(schedule):
    def write(name):
        with make_pipeline(Recommender(), name) as pipeline:
            iterator = iter(TRAIN)
            for number in range(len(TRAIN)):
                pipeline.progress(iterator)
                if number == 1:
                    pipeline.model.ebc.store("item").erase(torch.tensor([0, 1, 2, 3]))
                if number == 3:
                    pipeline.model.ebc.store("user").find_or_insert(torch.tensor([1000, 1001, 4]))
            return state_of(pipeline)

    assert write(schedule) == write("sequential") != final_state(TRAIN)


@pytest.mark.parametrize("schedule", EXACT)
def test_loading_weights_between_steps_reaches_the_next_batch(schedule):
    def fixed():
        return Recommender(tables=[EmbeddingBagConfig(7, 4, name) for name in ("user", "item")])

    def load(name):
        with make_pipeline(fixed(), name) as pipeline:
            iterator = iter(TRAIN)
            for number in range(len(TRAIN)):
                pipeline.progress(iterator)
                if number == 2:
                    pipeline.model.load_state_dict(fixed().state_dict())
            return state_of(pipeline)

    assert load(schedule) == load("sequential")


def train_and_evaluate(schedule, rank, communicator):
    """Two batches, an evaluation, the rest; ranks have 4 and 3 batches, 2 and 3 held-out ones."""
    train = [make_batch(10 * rank + t, size=(6, 3)[rank]) for t in range(4 - rank)]
    held_out = [make_batch(30 + 10 * rank + t) for t in range(2 + rank)]
    with make_pipeline(Recommender(communicator), schedule) as pipeline:
        outputs, iterator = [], iter(train)
        for _ in range(2):
            pipeline.progress(iterator)
        pipeline.model.eval()
        outputs += [step.output for step in pipeline.run(held_out)]
        pipeline.model.train()
        outputs += [step.output for step in pipeline.run(iterator)]
        return [None if o is None else o.tolist() for o in outputs], state_of(pipeline)


@pytest.mark.parametrize("schedule", EXACT[1:])
def test_fault_35_ranks_evaluate_and_train_together_with_uneven_batches(schedule):
    def ranks(name):
        return run_ranks_as_threads(2, lambda r, c: train_and_evaluate(name, r, c), timeout_s=20)

    (first, one), (second, two) = runs = ranks(schedule)
    assert [o is None for o in first] == [False, False, True, False, False]
    assert [o is None for o in second] == [False, False, False, False, True]
    assert one.dense == two.dense
    assert (one.step_count, two.step_count) == (4, 4)
    assert runs == ranks("sequential")
