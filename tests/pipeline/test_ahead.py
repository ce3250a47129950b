"""Two batches are drawn beyond the one that is trained, at the same points in every schedule; keys travel then."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from small_model import EXACT, Recommender, make_batch, make_pipeline, run_all, state_of

from nestpipe_kernels.errors import RemoteRankError
from nestpipe_kernels.pipeline.scheduler import LaneScheduler
from nestpipe_kernels.pipeline.schedules import AHEAD
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config

LIMIT_S = 30.0


def noting(batches, said):
    """An iterator that notes what it gives, and that it ended."""
    for number, batch in enumerate(batches):
        said.append(f"draw {number}")
        yield batch
    said.append("end")


def test_the_callers_order_is_the_same_in_every_schedule():
    def order(schedule):
        said: list[str] = []
        batches = [make_batch(t) for t in range(5)]

        def loss_fn(model, batch):
            said.append("model")
            return model(batch)

        with make_pipeline(Recommender(), schedule, loss_fn, num_micro_batches=2) as pipeline:
            list(pipeline.run(noting(batches, said)))
        return said

    draws = [f"draw {t}" for t in range(5)]
    step = ["model", "model"]
    plain = order("sequential")
    captured = plain[1 : plain.index(draws[1])]
    assert set(captured) <= {"model"}
    expected = [draws[0], *captured, *draws[1:3], *step, draws[3], *step, draws[4], *step, "end", *step, *step]
    for schedule in EXACT:
        assert order(schedule) == expected


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_keys_of_both_batches_are_exchanged_before_their_turn(schedule):
    """The second batch ahead can have its keys while a batch computes, and gets no rows yet."""
    seen: list[list[tuple[bool, bool]]] = []
    with make_pipeline(Recommender(), schedule) as pipeline:

        def look(model, batch):
            drawn = list(pipeline._drawn.batches)
            for ahead in drawn:
                pipeline._scheduler.wait_for("route_keys", ahead)
            seen.append([(bool(b.key_sizes), any(o.retrieval is not None for o in b.owner)) for b in drawn[1:]])
            return (*model(batch), None)

        pipeline.rank.call_model = look
        iterator = iter([make_batch(t) for t in range(6)])
        for _ in range(3):
            pipeline.progress(iterator)
    assert seen and all(each == [(True, False)] for each in seen), seen


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_loader_that_raises_does_so_in_the_step_of_its_batch(schedule, at):
    class Loader:
        def __init__(self):
            self.number = -1

        def __iter__(self):
            return self

        def __next__(self):
            self.number += 1
            if self.number == at:
                raise OSError("no such file")
            if self.number == 6:
                raise StopIteration
            return make_batch(self.number)

    with make_pipeline(Recommender(), schedule) as pipeline:
        iterator, got = Loader(), []
        while True:
            try:
                pipeline.progress(iterator)
                got.append("batch")
            except OSError:
                got.append("error")
            except StopIteration:
                break
        state = state_of(pipeline)
    assert got == ["error" if t == at else "batch" for t in range(6)]
    (expected,) = run_all(1, "sequential", lambda rank: [make_batch(t) for t in range(6) if t != at])
    assert (state, state.step_count) == (expected.state, 5)


def test_ranks_that_end_at_different_batches_leave_no_exchange_behind():
    """0, 1, 2 and 5 batches: what was drawn beyond the end is empty on all ranks."""

    done = threading.Barrier(4, timeout=LIMIT_S)

    def body(rank: int, communicator: Any) -> tuple[int, list[Any]]:
        batches = [make_batch(10 * rank + t) for t in range((0, 1, 2, 5)[rank])]
        with make_pipeline(Recommender(communicator), "nested") as pipeline:
            for _ in range(2):
                list(pipeline.run(batches))
            pipeline.drain()
            done.wait()
            return pipeline.step_count, communicator._world.pending()

    assert run_ranks_as_threads(4, body, timeout_s=LIMIT_S) == [(10, [])] * 4


@pytest.mark.parametrize("schedule", ["nested", "async"])
def test_the_end_waits_for_what_batches_beyond_it_announce(monkeypatch, schedule):
    """Their other nodes, which the end lets go, must find that there is nothing to do."""
    never, seen = threading.Event(), []
    original = LaneScheduler.abandon

    def abandon(self, batch):
        seen.extend(self._event("route_keys", b.index).is_set() for b in pipeline._drawn.batches)
        original(self, batch)

    monkeypatch.setattr(LaneScheduler, "abandon", abandon)
    with make_pipeline(Recommender(), schedule) as pipeline:
        pipeline.rank.hold = lambda function, batch, micro, begin: (
            never.wait(0.3) if function == "route" and batch.index == 3 else None
        )
        list(pipeline.run([make_batch(t) for t in range(2)]))
    assert seen == [True, True]


@pytest.mark.parametrize("world_size", [1, 2])
def test_leaving_and_parking_complete_the_exchanges_of_batches_ahead(world_size):
    scenario = Scenario(world_size=world_size, uneven=False, noise=False)
    done = threading.Barrier(world_size, timeout=LIMIT_S)

    def body(rank: int, communicator: Any) -> list[tuple[str, str]]:
        from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline

        model = scenario.model(communicator, None)
        with NestedPipeline(model, config=scenario_config(scenario, "nested", LIMIT_S)) as pipeline:
            first, second = scenario.loader(rank, None), scenario.loader(rank, None)
            for iterator in (first, second, first):
                pipeline.progress(iterator)
        done.wait()
        return communicator._world.pending()

    assert run_ranks_as_threads(world_size, body, timeout_s=LIMIT_S) == [[]] * world_size


# ------------------------------------------------------------------------------------------------------------- fetch


def fetching(schedule, calls, batches, **settings):
    """A pipeline whose items are numbers of batches; notes the thread of every fetch."""

    def fetch(number):
        calls.append((number, threading.current_thread().name))
        return batches[number]

    return make_pipeline(Recommender(settings.pop("communicator", None)), schedule, fetch=fetch, **settings)


@pytest.mark.parametrize("schedule", EXACT)
def test_fetched_batches_train_alike_and_away_from_the_caller(schedule):
    batches, calls = [make_batch(t) for t in range(6)], []
    (expected,) = run_all(1, "sequential", lambda rank: batches)
    with fetching(schedule, calls, batches) as pipeline:
        losses = [float(step.loss) for step in pipeline.run(range(6))]
        assert state_of(pipeline) == expected.state
    assert losses == expected.losses
    assert [number for number, _ in calls] == list(range(6)), "each once, in order"
    here = threading.current_thread().name
    assert calls[0][1] == here, "the first batch is captured, which runs the model"
    assert len({name for _, name in calls[1:]}) == 1 and calls[1][1] != here


def test_fetch_runs_while_the_batch_two_before_computes():
    """Item 2 comes only when the model computes batch 0: on the caller's thread, or one batch ahead, nobody ends."""
    computing = [threading.Event() for _ in range(6)]
    batches = [make_batch(t) for t in range(6)]
    steps = [0]

    def fetch(number):
        if number >= AHEAD:
            assert computing[number - AHEAD].wait(LIMIT_S), "the model waits for this fetch"
        return batches[number]

    def loss_fn(model, batch):
        computing[steps[0]].set()
        return model(batch)

    with make_pipeline(
        Recommender(), "nested", loss_fn, num_micro_batches=1, fetch=fetch, timeout_s=LIMIT_S
    ) as pipeline:
        for _ in pipeline.run(range(6)):
            steps[0] += 1
    assert steps == [6]


def test_sequential_fetches_a_batch_after_the_one_before_is_written_back():
    said: list[str] = []
    batches = [make_batch(t) for t in range(4)]

    def fetch(number):
        said.append(f"fetch {number}")
        return batches[number]

    with make_pipeline(Recommender(), "sequential", fetch=fetch) as pipeline:
        pipeline.add_write_back_hook(lambda step, table, keys: said.append(f"written {step}"))
        list(pipeline.run(range(4)))
    assert [word for k, word in enumerate(said) if k == 0 or said[k - 1] != word] == [
        word for t in range(4) for word in (f"fetch {t}", f"written {t + 1}")
    ]


@pytest.mark.parametrize("schedule", EXACT)
def test_a_fetched_batch_that_waits_for_its_iterator_is_not_fetched_again(schedule):
    batches, calls = [make_batch(t) for t in range(9)], []
    order = (0, 0, 1, 0, 1, 1, 0)
    sources = [0, 1, 2, 3, 4], [5, 6, 7, 8]
    trained = [list(source) for source in sources]
    expected = [trained[which].pop(0) for which in order]
    (plain,) = run_all(1, "sequential", lambda rank: [batches[number] for number in expected])
    with fetching(schedule, calls, batches) as pipeline:
        iterators = [iter(source) for source in sources]
        for which in order:
            pipeline.progress(iterators[which])
        model = pipeline.model.eval()
        pipeline.progress(iterators[0])  # takes what was drawn
        model.train()
        assert state_of(pipeline) == plain.state
    numbers = [number for number, _ in calls]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("wrong", ["raises", "gives no batch"])
def test_a_fetch_that_fails_on_one_rank_is_an_error_of_its_batch_everywhere(schedule, at, wrong):
    def body(rank: int, communicator: Any) -> list[Any]:
        def fetch(number):
            if rank == 1 and number == at:
                if wrong == "raises":
                    raise OSError("cannot be read")
                return "no batch"
            return make_batch(10 * rank + number)

        got: list[Any] = []
        with make_pipeline(Recommender(communicator), schedule, fetch=fetch, timeout_s=LIMIT_S) as pipeline:
            iterator = iter(range(5))
            while True:
                try:
                    pipeline.progress(iterator)
                    got.append("batch")
                except StopIteration:
                    return [*got, pipeline.step_count]
                except RemoteRankError as error:
                    got.append((error.rank, error.stage))
                except (OSError, TypeError, ValueError):
                    got.append("mine")

    first, second = run_ranks_as_threads(2, body, timeout_s=LIMIT_S)
    stage = "fetch" if wrong == "raises" else "copy"
    assert first == [(1, stage) if t == at else "batch" for t in range(5)] + [4]
    assert second == ["mine" if t == at else "batch" for t in range(5)] + [4]


def test_a_failed_fetch_is_not_tried_again_after_another_iterator():
    calls = []

    def fetch(number):
        calls.append(number)
        if number == 2 and calls.count(2) == 1:
            raise OSError("for now")
        return make_batch(number)

    with make_pipeline(Recommender(), fetch=fetch) as pipeline:
        first, second = iter(range(4)), iter(range(10, 14))
        for iterator in (first, second, first):
            pipeline.progress(iterator)
        with pytest.raises(OSError, match="for now"):
            pipeline.progress(first)
        pipeline.progress(first)
    assert calls.count(2) == 1


def test_fetch_must_be_callable():
    with pytest.raises(TypeError, match=r"fetch must be callable \(item -> batch\) or None, got str"):
        make_pipeline(Recommender(), fetch="path")
