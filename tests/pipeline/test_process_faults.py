"""Real processes of which one fails in a given stage: the others end in time and name it and its stage, nothing is left
behind, the last checkpoint loads."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fault_world import GRACE_S, Case, Ended, Fault, FaultWorld, assert_nothing_left, hit_at
from nestpipe_kernels.pipeline.schedules import SCHEDULES, build_graph

pytestmark = pytest.mark.multiprocess

STAGES = [stage.name for stage in build_graph("nested").stages]
STOP_S = 4.0
"""The time-out where it has to pass."""


@pytest.fixture(scope="module")
def world() -> Iterator[FaultWorld]:
    made = FaultWorld()
    yield made
    made.close()


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
    return ended


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


@pytest.mark.parametrize(("number", "stage"), list(enumerate(STAGES)), ids=STAGES)
def test_fault_38_a_rank_killed_in_a_stage(world, tmp_path, number, stage):
    size = 3 if number % 4 == 0 else 2
    case = Case(str(tmp_path / "run"), size=size, fault=Fault(number % 2, "kill", stage), whole_exit=number % 5 == 0)
    assert_killed_rank_is_named(world, case)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fault_38_a_rank_killed_in_any_stage_of_any_schedule(world, tmp_path, schedule, rank):
    for stage in build_graph(schedule).stages:
        for micro in range(2 if stage.micro else 1):
            case = Case(str(tmp_path / f"{stage.name}{micro}"), schedule, 3)
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
        assert f"{stage} of batch 3" in named, words


@pytest.mark.parametrize("stage", ["prefetch", "retrieve", "recv_grads", "write_back"])
def test_fault_38_an_error_that_no_stage_expects(world, tmp_path, stage):
    case = Case(str(tmp_path / "run"), size=3, fault=Fault(1, "raise", stage))
    ended = play(world, case)
    assert ended[1].status == 1
    assert ended[1].errors == ["OSError: this stage broke"]
    for words in others(ended, case):
        assert f"; rank 1 failed in {stage} of batch 3: OSError: this stage broke: " in words


@pytest.mark.parametrize(("kind", "status"), [("interrupt", -signal.SIGINT), ("exit", 3)])
def test_ctrl_c_or_exit_of_one_rank(world, tmp_path, kind, status):
    case = Case(str(tmp_path / "run"), size=3, fault=Fault(2, kind, "forward_backward"), whole_exit=True)
    ended = play(world, case)
    assert ended[2].status == status
    for words in others(ended, case):
        if kind == "exit":
            named = words.partition(f"; rank 2 (process {world.pids[2]}) has ended, in ")[2]
            assert "forward_backward of batch 3" in named, words
        else:
            assert "; rank 2 failed in forward_backward of batch 3: KeyboardInterrupt: " in words


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


@pytest.mark.parametrize("special", list(SPECIAL))
def test_fault_38_a_failure_of_one_rank_is_told_to_all(world, tmp_path, special):
    """Also where it makes other ranks fail: with rows that were never gathered, the model of the others breaks."""
    case = Case(str(tmp_path / "run"), size=3, special=special)
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
