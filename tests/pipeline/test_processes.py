"""Pipelines and modules over gloo between real processes: the bits of one process, however uneven the ranks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import process_cases as cases
import pytest
import torch
from policy_cases import bounded
from process_cases import ShapedScenario, keys_of_one_owner

from gloo_world import GlooWorld
from nestpipe_kernels import optim
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_scenario

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world_of() -> Iterator[Callable[[int], GlooWorld]]:
    """Worlds of rank processes, started when first asked for."""
    worlds: dict[int, GlooWorld] = {}

    def get(size: int) -> GlooWorld:
        if size not in worlds:
            worlds[size] = GlooWorld(size)
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()


def joined(parts: list[Outcome]) -> Outcome:
    """The outcomes of all ranks as one; a rank's exception is raised."""
    for part in parts:
        if isinstance(part, BaseException):
            raise part
    names = ("stores", "metadata", "dense", "losses", "policies")
    columns = {name: [getattr(p, name)[0] for p in parts] for name in names}
    return Outcome(**columns, partition=[])


CASES = {
    "nested-sgd": ("nested", Scenario(optimizer=optim.SGD(lr=0.2), batches=6)),
    "dbp-adagrad": ("dbp", Scenario(optimizer=optim.Adagrad(lr=0.2, initial_accumulator_value=0.1), seed=1)),
    "fwp-adam": ("fwp", Scenario(optimizer=optim.Adam(lr=0.1), seed=2)),
    "nested-adam-by-row-3-ranks": (
        "nested",
        Scenario(world_size=3, optimizer=optim.Adam(lr=0.1, bias_correction="row"), seed=3),
    ),
    "nested-row-wise-adagrad-3-ranks": ("nested", Scenario(world_size=3, micro_batches=3, seed=4)),
    "nested-rows-per-micro-batch": (
        "nested",
        Scenario(micro_batches=3, row_transfer="per_micro_batch", samples=6, seed=5),
    ),
    "nested-clustered-3-ranks": ("nested", Scenario(world_size=3, clustering="key", samples=8, seed=6)),
    "nested-weighted-losses": ("nested", Scenario(weight_loss=True, seed=7)),
    "early-3-ranks": ("nested+early", Scenario(world_size=3, micro_batches=3, samples=8, num_keys=12, seed=16)),
    "early-weighted-and-bad": (
        "nested+early",
        Scenario(weight_loss=True, bad_labels=0.05, nan_policy="skip_row", seed=17),
    ),
    "early-evictions-short-rows": (
        "nested+early",
        bounded("filter_3", "score", 8, row_wire="int8", gradient_wire="fp16", seed=22),
    ),
    "early-a-rank-that-never-has-a-batch": (
        "nested+early",
        ShapedScenario(world_size=3, shapes=((4,) * 4, (), (4,) * 3), seed=11),
    ),
    "nested-short-rows-and-gradients": ("nested", Scenario(row_wire="int8", gradient_wire="fp16", seed=15)),
    "fault-35-ranks-with-5-and-4-batches": (
        "nested",
        ShapedScenario(shapes=((5, 5, 5, 5, 5), (5, 5, 5, 5)), seed=8),
    ),
    "fault-35-last-batches-of-3-and-1-samples": ("nested", ShapedScenario(shapes=((6, 6, 3), (6, 6, 1)), seed=9)),
    "fault-34-a-rank-whose-bags-are-all-empty": (
        "nested",
        ShapedScenario(shapes=((4,) * 4, (4,) * 4), empty_rank=1, seed=10),
    ),
    "a-rank-that-never-has-a-batch": ("nested", ShapedScenario(world_size=3, shapes=((4,) * 4, (), (4,) * 4), seed=11)),
    "evictions-and-refusals-3-ranks": ("nested", bounded("all", "lru", 9, world_size=3, uneven=False, seed=21)),
    "late-admission-and-scores": ("nested", bounded("filter_3", "score", 8, seed=22)),
    "all-keys-on-one-owner": (
        "nested",
        ShapedScenario(
            world_size=3, shapes=((5,) * 4,) * 3, pool=keys_of_one_owner(Scenario(), 3, owner=1, count=7), seed=12
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_processes_give_the_bits_of_a_sequential_run_in_one_process(world_of, name):
    schedule, scenario = CASES[name]
    expected = run_scenario(scenario, "sequential")
    run = joined(world_of(scenario.world_size).run(cases.play, scenario, schedule))
    assert expected.difference(run) == ""
    assert max(map(len, run.losses)) >= 3


UNEVEN = [
    "fault-35-ranks-with-5-and-4-batches",
    "fault-35-last-batches-of-3-and-1-samples",
    "fault-34-a-rank-whose-bags-are-all-empty",
    "a-rank-that-never-has-a-batch",
    "all-keys-on-one-owner",
]


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_work_under_the_other_schedules(world_of, name):
    scenario = CASES[name][1]
    expected = run_scenario(scenario, "sequential")
    for schedule in ("sequential", "dbp", "fwp"):
        run = joined(world_of(scenario.world_size).run(cases.play, scenario, schedule))
        assert expected.difference(run) == "", schedule


def test_layers_wrapped_in_ddp(world_of):
    """The pipeline averages alone: nothing of DDP's waits for a rank that has no samples."""
    world = world_of(2)
    plain, wrapped, ended = world.run(cases.wrapped_layers)[0]
    assert plain == wrapped and ended == (True, True)


def test_sequential_over_processes_too(world_of):
    scenario = Scenario(seed=13)
    run = joined(world_of(2).run(cases.play, scenario, "sequential"))
    assert run_scenario(scenario, "sequential").difference(run) == ""


def test_the_named_cases_are_what_they_say():
    store_sizes = [len(store) for store in run_scenario(CASES["all-keys-on-one-owner"][1], "nested").stores]
    assert store_sizes[1] > 0
    assert store_sizes == [0, store_sizes[1], 0]
    for case in ("evictions-and-refusals-3-ranks", "late-admission-and-scores"):
        counters = [t["counters"] for rank in run_scenario(CASES[case][1], "nested").policies for t in rank.values()]
        assert sum(c["evicted"] for c in counters) > 3
        assert sum(c["refused"] + c["not_admitted"] for c in counters) > 3
    losses = run_scenario(CASES["a-rank-that-never-has-a-batch"][1], "nested").losses
    assert losses[1] == [0.0] * 4
    assert len(run_scenario(CASES["fault-35-ranks-with-5-and-4-batches"][1], "nested").losses[1]) == 5


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_fault_39_tensors_that_the_loader_and_the_caller_overwrite(world_of, schedule):
    scenario = ShapedScenario(shapes=((6,) * 6, (4, 6, 6, 3, 3)), noise=False, seed=14)
    expected = run_scenario(scenario, "sequential")
    run = joined(world_of(2).run(cases.play_refilled, scenario, schedule))
    assert expected.difference(run) == ""


# ------------------------------------------------------------------------------------------- without a pipeline


def test_fault_17_28_two_ranks_same_key_gradient_1_is_averaged_over_ranks(world_of):
    moved = {}
    for rows in world_of(2).run(cases.eager_gradient_one, [[[0, 0, 2], [1]], [[0]]]):
        moved.update({key: torch.tensor(b) - torch.tensor(a) for key, (b, a) in rows.items()})
    # Key 0: 2 occurrences on one rank and 1 on the other, halved; keys 1 and 2: once on one of two ranks.
    expected = {0: 1.5, 1: 0.5, 2: 0.5}
    assert set(moved) == set(expected)
    for key, distance in expected.items():
        torch.testing.assert_close(moved[key], torch.full((3,), distance), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bags", [[[], [], []], []], ids=["bags-without-keys", "no-bags"])
def test_fault_34_a_rank_without_keys_takes_part(world_of, bags):
    (shape_0, dtype_0, zero_0, moved_0), (shape_1, dtype_1, zero_1, moved_1) = world_of(2).run(cases.eager_empty, bags)
    assert (shape_0, shape_1) == ([2, 3], [len(bags), 3])
    assert dtype_0 == dtype_1 == "torch.float32"
    assert (zero_0, zero_1) == (False, True)
    assert set(moved_0) | set(moved_1) == {1, 2}


def test_fault_38_an_exception_on_one_rank_ends_the_call_on_all(world_of):
    (got_0, shape_0), (got_1, shape_1) = world_of(2).run(cases.eager_failing_rank)
    assert got_0.startswith("RemoteRankError: rank 1 failed in forward of batch 1: IndexError: ")
    assert got_1.startswith("IndexError: ")
    for part in ("'t'", "'f'", "10"):
        assert part in got_1
    assert shape_0 == shape_1 == [2, 3]


@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "MAX"])
@pytest.mark.parametrize("rule", list(cases.EAGER_RULES))
def test_two_ranks_without_a_pipeline_train_like_one_process(world_of, rule, pooling):
    expected = cases.eager_train(rule, pooling, 2, alone=True)
    for weight in world_of(2).run(cases.eager_train, rule, pooling, 2, False):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- errors that leave the world usable


@pytest.mark.parametrize("change", ["num_micro_batches", "tables", "dense parameters", "schedule"])
def test_ranks_that_disagree_are_told_at_construction(world_of, change):
    what, odd, usual = {
        "num_micro_batches": ("num_micro_batches", "3", "2"),
        "tables": ("seed of table 'user' of 'lookup'", "1", "0"),
        "dense parameters": ("dense parameter 'extra.weight'", "float32 [1, 1]", "none"),
        "schedule": ("schedule", "dbp", "nested"),
    }[change]
    for rank, message in enumerate(world_of(3).run(cases.construct, change)):
        mine, theirs = (odd, usual) if rank == 1 else (usual, odd)
        assert message == (
            f"ranks disagree on {what}: rank {rank} has {mine}, rank {0 if rank == 1 else 1} has {theirs}; construct "
            "the pipeline alike on all ranks"
        )


FAULTS = {
    "id": ("", "IndexError", ("'t'", "'f'", "10")),
    "first": ("forward_backward", "ArithmeticError", ("the first micro-batch broke",)),
    "last": ("forward_backward", "ArithmeticError", ("the last micro-batch broke",)),
    "loader": ("prefetch", "OSError", ("the disk is gone",)),
}


@pytest.mark.parametrize("schedule", ["sequential", "dbp", "fwp", "nested"])
@pytest.mark.parametrize("bad_batch", [0, 2, 4])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault_14_38_what_fails_on_one_rank_fails_its_own_batch_only(world_of, schedule, bad_batch, fault):
    stage, kind, parts = FAULTS[fault]
    if stage == "forward_backward" and bad_batch == 0:
        stage = "prefetch"  # the first batch is also the one whose model call is captured
    for rank, got in enumerate(world_of(2).run(cases.one_bad_batch, schedule, bad_batch, fault)):
        if isinstance(got, BaseException):
            raise got
        assert got[-1] == "end after 4 steps", got
        good = got[:bad_batch] + got[bad_batch + 1 : 5]
        assert good == [f"batch {t}" for t in range(5) if t != bad_batch]
        failed = got[bad_batch]
        start = f"{kind}: " if rank == 1 else f"RemoteRankError: rank 1 failed in {stage}"
        assert failed.startswith(start), failed
        if rank == 0:
            assert f"of batch {bad_batch}: {kind}: " in failed
        assert all(part in failed for part in parts), failed
