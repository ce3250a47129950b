"""A rank that fails while it evaluates: no rank may go on with rows that never came."""

from __future__ import annotations

from typing import Any

import pytest

from nestpipe_kernels.errors import RemoteRankError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config


@pytest.mark.parametrize("call, stage", [("find_handles", "find"), ("gather", "gather")])
def test_a_failure_in_evaluation_reaches_every_rank(call: str, stage: str) -> None:
    scenario = Scenario(world_size=3, uneven=False, noise=False)

    def body(rank: int, communicator: Any) -> list[Any]:
        model = scenario.model(communicator, None)
        store: Any = model.lookup.row_stores()[0]
        real, broken = getattr(store, call), rank == 1

        def fails_once(*args: Any) -> Any:
            nonlocal broken
            if broken:
                broken = False
                raise ArithmeticError("no rows today")
            return real(*args)

        setattr(store, call, fails_once)
        model.eval()
        found: list[Any] = []
        with NestedPipeline(model, config=scenario_config(scenario, "nested", 5.0)) as pipeline:
            loader = scenario.loader(rank, None)
            with pytest.raises(ArithmeticError if rank == 1 else RemoteRankError) as raised:
                pipeline.progress(loader)
            found.append(getattr(raised.value, "rank", None))
            found.append(getattr(raised.value, "stage", None))
            found.append(pipeline.progress(loader) is not None)
        return found

    others = [1, stage, True]
    assert run_ranks_as_threads(3, body, timeout_s=5.0) == [others, [None, None, True], others]
