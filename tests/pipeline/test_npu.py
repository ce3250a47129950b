"""E1 on a device with streams: pipelines on the stand-in for an NPU give the bits of `sequential` on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import npu_runs as cases
import pytest
from pairwise import pairwise_cover
from test_exactness import FACTORS, OPTIMIZERS, TABLES, make, name_of, stored
from test_processes import joined

from gloo_world import GlooWorld
from nestpipe_kernels import optim
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_scenario

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    """Two processes; either may also be used alone."""
    made = GlooWorld(2)
    yield made
    made.close()


def run(world: GlooWorld, function, *arguments, ranks=(0,)):
    """What a function gives in processes with the device; alone in the first, unless `ranks` says otherwise."""
    results = world.run(function, *arguments, ranks=ranks)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results[0] if len(ranks) == 1 else results


SHORT = {
    "sequential": Scenario(world_size=1, batches=2, seed=1),
    "dbp": Scenario(world_size=1, batches=3, optimizer=OPTIMIZERS["adam_row"], tables=TABLES["max"], seed=2),
    "fwp": Scenario(
        world_size=1,
        batches=3,
        row_transfer="per_micro_batch",
        tables=stored(TABLES["weighted"], "bf16_stochastic"),
        weighted=True,
        gradient_wire="int8",
        seed=3,
    ),
    "nested": Scenario(world_size=2, batches=3, weight_loss=True, bad_labels=0.1, nan_policy="skip_row", seed=4),
    "nested+early": Scenario(world_size=1, batches=4, optimizer=OPTIMIZERS["momentum"], num_keys=12, seed=5),
}


@pytest.mark.parametrize("schedule", SHORT)
def test_stand_in_for_an_npu_equals_sequential_on_the_cpu(world, schedule):
    assert run(world, cases.compare, SHORT[schedule], schedule) == ""


COVER = pairwise_cover({name: choices[:3] if name == "world_size" else choices for name, choices in FACTORS.items()})


@pytest.mark.soak
@pytest.mark.parametrize("case", COVER, ids=map(name_of, COVER))
def test_soak_stand_in_for_an_npu_equals_sequential_on_the_cpu(world, case):
    assert run(world, cases.compare, make(case, seed=COVER.index(case)), case["schedule"]) == ""


HCCL = {
    "nested": ("nested", Scenario(seed=3, batches=3, samples=6)),
    "early": ("nested+early", Scenario(seed=4, batches=4, num_keys=12, uneven=False)),
}
SOAK_HCCL = {
    "sequential-weighted-losses": ("sequential", Scenario(weight_loss=True, seed=7)),
    "fwp-adam-resend": ("fwp", Scenario(optimizer=optim.Adam(lr=0.1), row_transfer="per_micro_batch", seed=5)),
    "dbp-short-wires": ("dbp", Scenario(row_wire="int8", gradient_wire="fp16", seed=6)),
    "early-bad-labels": (
        "nested+early",
        Scenario(weight_loss=True, bad_labels=0.05, nan_policy="skip_row", micro_batches=3, samples=8, seed=17),
    ),
}


def assert_hccl_is_exact(world, schedule: str, scenario: Scenario) -> None:
    parts = run(world, cases.play, scenario, schedule, ranks=(0, 1))
    expected = run_scenario(scenario, "sequential")
    assert expected.difference(joined([outcome for outcome, _ in parts])) == ""
    assert [posted for _, posted in parts] == [{"nestpipe-exchange"}] * 2


@pytest.mark.parametrize("name", HCCL)
def test_stand_in_for_hccl_between_processes_equals_sequential_on_the_cpu(world, name):
    assert_hccl_is_exact(world, *HCCL[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK_HCCL)
def test_soak_stand_in_for_hccl_between_processes_equals_sequential_on_the_cpu(world, name):
    assert_hccl_is_exact(world, *SOAK_HCCL[name])


def test_groups_of_a_device_use_its_collectives_or_go_through_the_host(world):
    for rank, found in enumerate(run(world, cases.exchanges, ranks=(0, 1))):
        received = [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]][rank]
        assert found["rows", "npu"] == (received, 1, "npu:0")
        assert found["early", "npu"] == (received, 0, "npu:0")
        assert found["rows", "cpu"] == (received, 0, "cpu")
        assert found["same limit"] and found["kept for who waits"]
        assert found["elsewhere"] == (
            "rows exchange 'a': out must be on npu:0, the device of this group, got a tensor on cpu"
        )
        assert found["post"] == found["wait"] == "rows exchange 'b' over hccl: the link is down"
        assert found["make"] == f"comm: rank {rank} of 2 could not set up a group over hccl: the link is down"


@pytest.mark.parametrize(
    ("work", "schedule"),
    [(cases.evaluate_between_steps, "nested"), (cases.go_on_after_a_bad_batch, "nested+early")],
)
def test_retrieval_that_is_undone_and_repeated(world, work, schedule):
    expected = run(world, work, "cpu", schedule)
    assert run(world, work, "npu", schedule) == expected
    assert len(set(expected)) == len(expected) > 3


def test_checkpoints_go_from_device_to_device(world):
    expected = run(world, cases.saved_and_loaded, "npu", "cpu")
    assert run(world, cases.saved_and_loaded, "cpu", "npu") == expected


def test_bounded_tables_and_rows_in_a_file(world):
    assert run(world, cases.special_stores) == ["", ""]


def test_models_and_settings_that_do_not_fit_the_device_are_refused(world):
    found = run(world, cases.refusals)
    assert found["cpu"].startswith(
        "NestedPipeline: parameter 'linear.weight' is on cpu, but the pipeline works on npu:0; move the model there "
        "with model.to('npu:0')"
    )
    assert "'linear.weight' is on npu:0, but the pipeline works on cpu" in found["npu"]
    assert "'linear.bias' is on cpu, but the pipeline works on npu:0" in found["mixed"]
    assert found["pooled"] == "NestedPipeline: owner_pooling works on the CPU only so far, not on npu:0; leave it out"
    assert found["copies"].endswith(
        "has 2 sparse groups, which work on the CPU only so far, not on npu:0; use sparse_groups=1"
    )


def test_features_on_the_device_are_taken(world):
    assert run(world, cases.features_on_the_device) == [True, True, True]


def test_what_is_not_ordered_shows_on_the_stand_in(world):
    """Last, and in the process that has no other test but those of both: see `compare_damaged`."""
    found = {damage: run(world, cases.compare_damaged, cases.DAMAGED, damage, ranks=(1,)) for damage in cases.DAMAGES}
    assert found.pop("nothing") == ""
    assert all(found.values()), found
