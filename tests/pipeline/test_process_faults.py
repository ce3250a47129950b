"""Real processes of which one fails in a given stage: the others end in time and name it and its stage, nothing is left
behind, the last checkpoint loads."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_server import scenario_of
from fault_world import (
    GRACE_S,
    Case,
    Ended,
    Fault,
    FaultWorld,
    assert_nothing_left,
    await_hit,
    give_leave,
    hit_at,
    outcomes,
)
from nestpipe_kernels import checkpoint
from nestpipe_kernels.launch.network import Network
from nestpipe_kernels.pipeline.schedules import SCHEDULES, build_graph
from nestpipe_kernels.testing.explorer import read_store
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_scenario

pytestmark = pytest.mark.multiprocess

STAGES = [stage.name for stage in build_graph("nested").stages]
STOP_S = 4.0
"""The time-out where it has to pass."""


@pytest.fixture(scope="module")
def world() -> Iterator[FaultWorld]:
    made = FaultWorld()
    yield made
    made.close()


@pytest.fixture(scope="module")
def network(can_make_networks: None) -> Iterator[Network]:
    with Network(3) as made:
        yield made


def play(world: FaultWorld, case: Case) -> dict[int, Ended]:
    """Run a case; what holds for every fault: the others fail, in time, and nothing is left."""
    ended = world.play(case)
    assert case.fault is not None
    struck = hit_at(case, case.fault.rank)
    for rank, end in ended.items():
        if rank != case.fault.rank:
            assert end.status == 1, (rank, end.status, end.output[-2000:])
            assert end.at - struck < case.timeout_s + GRACE_S, (end.at - struck, end.said())
    assert_nothing_left(case, world)
    if case.save_after:
        assert_checkpoint_loads(case)
    return ended


@functools.cache
def rows_after(size: int, batches: int) -> dict[tuple[str, int], bytes]:
    """Every row, with its state, of a run that nothing happens to."""
    parts = run_scenario(scenario_of(Case("", size=size, batches=batches)), "sequential").stores
    return {key: row for part in parts for key, row in part.items()}


def assert_checkpoint_loads(case: Case) -> None:
    """What was saved before the fault, in one process."""
    model = scenario_of(case).model(None, None)
    optimizer = Scenario.dense_optimizer(model)
    checkpoint.load(Path(case.folder).parent / "saved", model=model, optimizer=optimizer, start_epoch=True)
    rows: dict[tuple[str, int], bytes] = {}
    read_store(model.lookup.row_stores()[0], rows, {})
    assert rows == rows_after(case.size, case.save_after)


def others(ended: dict[int, Ended], case: Case) -> list[str]:
    """The first words of every rank but the one that failed."""
    assert case.fault is not None
    return [end.errors[0] for rank, end in ended.items() if rank != case.fault.rank]


def assert_killed_rank_is_named(world: FaultWorld, case: Case) -> None:
    ended = play(world, case)
    assert case.fault is not None
    dead = case.fault.rank
    assert ended[dead].status == -signal.SIGKILL
    for words in others(ended, case):
        assert words.startswith("CommunicationError: ")
        named = words.partition(f"rank {dead} (process {world.pids[dead]}) has ended, in ")[2]
        assert f"{case.fault.stage} of batch {case.fault.batch}" in named, words
        stages = build_graph(case.schedule, early_send=case.early_send).stages
        lanes = [stage.lane for stage in stages if re.search(rf"\b{stage.name} of batch", named)]
        assert len(lanes) == len(set(lanes)), words  # what it was doing, not all that it has done


@pytest.mark.parametrize(("number", "stage"), list(enumerate(STAGES)), ids=STAGES)
def test_fault_38_a_rank_killed_in_a_stage(world, tmp_path, number, stage):
    size = 3 if number % 4 == 0 else 2
    case = Case(str(tmp_path / "run"), size=size, fault=Fault(number % 2, "kill", stage), save_after=2)
    case.whole_exit = number % 5 == 0
    assert_killed_rank_is_named(world, case)


EARLY = [stage.name for stage in build_graph("nested", early_send=True).stages if stage.name not in STAGES]


@pytest.mark.parametrize("number", range(len(EARLY)), ids=EARLY)
def test_fault_38_a_rank_killed_while_rows_are_sent_early(world, tmp_path, number):
    fault = Fault(number % 2, "kill", EARLY[number])
    assert_killed_rank_is_named(world, Case(str(tmp_path / "run"), fault=fault, save_after=2, early_send=True))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fault_38_a_rank_killed_in_any_stage_of_any_schedule(world, tmp_path, schedule, rank):
    for stage in build_graph(schedule).stages:
        for micro in range(2 if stage.micro else 1):
            case = Case(
                str(tmp_path / f"{stage.name}{micro}" / "run"), schedule, 3, save_after=2 * (schedule != "async")
            )
            case.fault = Fault(rank, "kill", stage.name, micro=micro)
            assert_killed_rank_is_named(world, case)


@pytest.mark.parametrize("schedule", ["sequential", "dbp", "fwp"])
def test_fault_38_a_rank_killed_under_other_schedules(world, tmp_path, schedule):
    for number, stage in enumerate(["retrieve", "send_rows", "update"]):
        case = Case(str(tmp_path / stage), schedule, fault=Fault(number % 2, "kill", stage, micro=stage == "send_rows"))
        assert_killed_rank_is_named(world, case)


@pytest.mark.parametrize("stage", ["retrieve", "forward_backward", "write_back"])
def test_a_rank_that_is_stopped_for_longer_than_the_time_out(world, tmp_path, stage):
    case = Case(str(tmp_path / "run"), size=3, timeout_s=STOP_S, fault=Fault(1, "stop", stage))
    ended = play(world, case)
    assert ended[1].status == -signal.SIGKILL  # by this test
    for words in others(ended, case):
        named = words.partition(f"; rank 1 (process {world.pids[1]}) is stopped, in ")[2]
        assert f"{stage} of batch 5" in named, words


def test_a_rank_that_is_late_for_longer_than_the_time_out(world, tmp_path):
    """It runs, waits for nobody, and finds the others gone when it comes."""
    case = Case(str(tmp_path / "run"), size=3, timeout_s=STOP_S, fault=Fault(1, "tell", "forward_backward"))
    world.start(case)
    await_hit(case, 1)
    ended = world.finish(case, leave_when_alone=True)
    assert_nothing_left(case, world)
    for rank in (0, 2):
        assert ended[rank].at - hit_at(case, 1) < case.timeout_s + GRACE_S
        assert ended[rank].errors[0].count("has not joined it") == 1
        late = ended[rank].errors[0].partition(f"; rank 1 (process {world.pids[1]}) has not joined it, in ")[2]
        told = re.search(
            r"; rank [02] had given up: rank 1 \(process \d+\) has not joined it, in (.*)", ended[rank].said()
        )
        assert "forward_backward of batch 5" in (late or (told[1] if told else "")), ended[rank].errors
    assert re.search("; rank [02] had given up: rank 1 .process [0-9]+. has not joined it", ended[1].errors[0])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_fault_38_a_killed_rank_with_data_loader_workers(world, tmp_path, method):
    """Forked workers hold their rank's sockets open, until they notice that it is gone."""
    case = Case(str(tmp_path / "run"), fault=Fault(1, "kill", "forward_backward"), workers=method)
    assert_killed_rank_is_named(world, case)
    assert len(set((tmp_path / "run" / "pids").read_text().split())) == 4


@pytest.mark.parametrize("stage", ["prefetch", "retrieve", "recv_grads", "write_back"])
def test_fault_38_an_error_that_no_stage_expects(world, tmp_path, stage):
    case = Case(str(tmp_path / "run"), size=3, fault=Fault(1, "raise", stage))
    ended = play(world, case)
    assert ended[1].status == 1
    assert ended[1].errors == ["OSError: this stage broke"]
    for words in others(ended, case):
        assert f"; rank 1 failed in {stage} of batch 5: OSError: this stage broke: " in words


@pytest.mark.parametrize(("kind", "status"), [("interrupt", -signal.SIGINT), ("exit", 3)])
def test_ctrl_c_or_exit_of_one_rank(world, tmp_path, kind, status):
    case = Case(str(tmp_path / "run"), size=3, fault=Fault(2, kind, "forward_backward"), whole_exit=True)
    ended = play(world, case)
    assert ended[2].status == status
    for words in others(ended, case):
        if kind == "exit":
            named = words.partition(f"; rank 2 (process {world.pids[2]}) has ended, in ")[2]
            assert "forward_backward of batch 5" in named, words
        else:
            assert "; rank 2 failed in forward_backward of batch 5: KeyboardInterrupt: " in words


# ------------------------------------------------------------------------------- failures that the exchanges tell of


def play_special(world: FaultWorld, case: Case) -> dict[int, Ended]:
    ended = world.play(case)
    assert_nothing_left(case, world)
    assert [end.status for end in ended.values()] == [1] * case.size, {r: e.output[-2000:] for r, e in ended.items()}
    return ended


SPECIAL = {
    "loader": ("prefetch", "OSError: the disk is gone"),
    "model": ("forward_backward", "ArithmeticError: the model broke"),
    "gather": ("gather", "MemoryError: no room to gather"),
    "memory": ("retrieve", "MemoryError: "),
    "full": ("retrieve", "StoreFullError: table 'item': "),
}


@pytest.mark.parametrize(("special", "early_send"), [*((name, False) for name in SPECIAL), ("gather", True)])
def test_fault_38_a_failure_of_one_rank_is_told_to_all(world, tmp_path, special, early_send):
    """Also where it makes other ranks fail: with rows that were never gathered, the model of the others breaks."""
    case = Case(str(tmp_path / "run"), size=3, special=special, early_send=early_send)
    ended = play_special(world, case)
    stage, message = SPECIAL[special]
    for rank, end in ended.items():
        if special == "full":  # no rank has room
            assert message in end.errors[0]
        elif rank == 1:
            assert end.errors[0].startswith(message)
        else:
            assert end.errors[0].startswith(f"RemoteRankError: rank 1 failed in {stage} of batch "), end.errors
            assert message in end.errors[0]
    if special == "gather":
        assert any("ZeroDivisionError: a row of zeros" in end.errors for end in ended.values())


WORDS = {"marker": (0, 7), "flag": (5, 1), "length": (8, 1 << 40), "size": (58, 10**15), "negative": (58, -3)}


@pytest.mark.parametrize("word", list(WORDS))
def test_fault_36_a_corrupt_size_message(world, tmp_path, word):
    place, value = WORDS[word]
    case = Case(str(tmp_path / "run"), size=3, special=f"sizes:{place}:{value}")
    ended = play_special(world, case)
    for rank in (0, 2):
        assert ended[rank].errors[0].startswith("CommunicationError: rank 1 sent a damaged message "), ended[
            rank
        ].errors
    assert "rank 1 sent a damaged message" in ended[1].errors[0]


@pytest.mark.parametrize("schedule", ["nested", "dbp"])
def test_training_goes_on_from_the_last_checkpoint(world, tmp_path, schedule):
    """Bit for bit as if no rank had died."""
    case = Case(str(tmp_path / "run"), schedule, 3, save_after=3, fault=Fault(0, "kill", "update", batch=6))
    assert_killed_rank_is_named(world, case)
    again = Case(str(tmp_path / "again"), schedule, 3, load=True, whole_exit=True)
    assert [end.status for end in world.play(again).values()] == [0, 0, 0]
    assert_nothing_left(again, world)
    expected = run_scenario(scenario_of(again), "sequential")
    for rank, outcome in enumerate(outcomes(again)):
        assert outcome.stores == [expected.stores[rank]]
        assert outcome.dense == [expected.dense[rank]]
        assert outcome.losses == [expected.losses[rank][3:]]


# --------------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(("stage", "micro"), [("send_rows", 1), ("route_keys", 0)])
def test_a_link_that_goes_down_in_the_middle_of_a_step(world, tmp_path, network, stage, micro):
    case = Case(str(tmp_path / "run"), size=3, timeout_s=STOP_S, fault=Fault(1, "tell", stage, micro=micro))
    case.network = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in network._namespaces]
    before = set(network.identities())
    world.start(case)
    await_hit(case, 1)
    network.cut(1)
    give_leave(case)
    cut_at = time.monotonic()
    ended = world.finish(case)
    network.mend(1)
    assert_nothing_left(case, world)
    for rank, end in ended.items():
        assert (end.status, end.at - cut_at < case.timeout_s + GRACE_S) == (1, True), end.output[-2000:]
        assert " exchange 't" in end.errors[0]
        named = "; this rank's network interface np is down: "
        if rank != 1:
            named = f"; rank 1 (process {world.pids[1]}): its network interface np is down: "
        assert named in end.errors[0], end.errors
    assert set(network.identities()) == before
