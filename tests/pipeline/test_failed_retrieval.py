"""A retrieval that fails ahead of its batch's turn fails the batch only if it would have failed at its turn, too."""

import pytest
import torch
from small_model import Recommender, make_batch, make_pipeline, make_tables, state_of

from nestpipe_kernels.errors import NonFiniteGradientError, RemoteRankError, StoreFullError
from nestpipe_kernels.testing.threads import run_ranks_as_threads

WORLD_SIZE = 2


def run(schedule, change):
    """What each step gives, and the end. Batch 2 needs rows of its own, for which there is room only where batch 1 does
    not count, or a rank erases rows after it."""

    def body(rank, communicator):
        model, seen = Recommender(communicator, make_tables(capacity=24)), []
        batches = [make_batch(t, 24, first_key=8 * t, keys=8, bad=int(change == "bad" and t == 1)) for t in range(3)]
        with make_pipeline(model, schedule) as pipeline:
            iterator = iter([*batches, make_batch(9, 24, keys=4)])
            for step in range(4):
                try:
                    seen.append(pipeline.progress(iterator).tolist())
                except (NonFiniteGradientError, RemoteRankError, StoreFullError) as error:
                    seen.append(type(error).__name__)
                if step == 1 and change == "erase":
                    for table in ("user", "item"):
                        model.ebc.store(table).erase(torch.arange(8))
                if step == 1 and change == "look":
                    model.ebc.store("user").find(torch.arange(8))
            return seen, state_of(pipeline)

    return run_ranks_as_threads(WORLD_SIZE, body, timeout_s=20.0)


@pytest.mark.parametrize("change", ["bad", "erase", "look"])
def test_room_that_is_made_between_the_steps_is_used(change):
    expected = run("sequential", change)
    for seen, _ in expected:
        errors = [seen[t] for t in (1, 2) if isinstance(seen[t], str)]
        if change == "look":  # there is indeed no room
            assert errors in (["StoreFullError"], ["RemoteRankError"])
        else:
            assert errors == ["NonFiniteGradientError"] * (change == "bad")
    for schedule in ("nested", "nested+early"):
        assert run(schedule, change) == expected, schedule
