"""Who is blamed for a failed exchange: boards of three ranks in one process, without any exchange."""

from __future__ import annotations

import mmap
import os

import pytest

from nestpipe_kernels.comm.board import LINK, OWN, PAGE, SECONDARY, Board
from nestpipe_kernels.comm.checks import KINDS
from nestpipe_kernels.comm.peers import Identity, PeerProcesses, _process

KEYS, ROWS = KINDS.index("keys"), KINDS.index("rows")


class Ranks:
    """Boards over one memory; `ended` ranks have a process that does not run."""

    def __init__(self, size: int, ended: tuple[int, ...] = ()) -> None:
        memory = mmap.mmap(-1, size * PAGE)
        self.boards = [Board(memory, rank, size) for rank in range(size)]
        started = _process(os.getpid())[1]
        identities = [Identity("m", os.getpid(), "gone" if r in ended else started, -1) for r in range(size)]
        self.peers = [PeerProcesses(r, identities, self.boards[r], [True] * size) for r in range(size)]
        self.name = f"(process {os.getpid()})"

    def cause(self, rank: int, silent: tuple[int, ...] = ()) -> str:
        """What `rank` says of its rows exchange number 4."""
        return self.peers[rank].describe_cause(ROWS, 4, silent)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch):
    monkeypatch.setattr("nestpipe_kernels.comm.peers._GRACE_S", 0.0)


def test_the_rank_that_others_wait_for_through_a_third_one():
    ranks = Ranks(3)
    for board in ranks.boards[1:]:
        board.posted(KEYS, 7)
    ranks.boards[0].posted(ROWS, 5)
    ranks.boards[1].begin("retrieve", 4, 0)
    ranks.boards[1].begin_wait(KEYS, 7)  # has not posted rows 4 since it waits for keys 7
    ranks.boards[1].posted(KEYS, 8)
    ranks.boards[2].posted(ROWS, 5)  # has posted rows 4, but not keys 7
    ranks.boards[2].begin("forward_backward", 3, 1)
    assert ranks.cause(0) == f"; rank 2 {ranks.name} has not joined it, in forward_backward of batch 3, micro-batch 1"


def test_an_error_of_its_own_counts_before_an_end_without_a_word():
    ranks = Ranks(3, ended=(1, 2))
    ranks.boards[1].note(OWN, "update of batch 3: OSError: no disk")
    assert ranks.cause(0) == "; rank 1 failed in update of batch 3: OSError: no disk"


def test_the_first_of_two_errors_is_the_cause():
    ranks = Ranks(3)
    ranks.boards[2].note(OWN, "sync of batch 3: ValueError: first")
    ranks.boards[1].note(OWN, "update of batch 3: ValueError: second")
    assert ranks.cause(0) == "; rank 2 failed in sync of batch 3: ValueError: first"


def test_a_rank_that_ended_because_of_another_is_not_the_cause():
    ranks = Ranks(3, ended=(1, 2))
    ranks.boards[1].note(SECONDARY, "rank 2 ...")
    ranks.boards[2].begin("gather", 4, 0)
    assert ranks.cause(0) == f"; rank 2 {ranks.name} has ended, in gather of batch 4"


def test_what_another_rank_found_out_is_passed_on():
    ranks = Ranks(3)
    for board in ranks.boards:
        board.posted(ROWS, 5)
    ranks.boards[1].note(SECONDARY, "rank 2 is stopped")
    assert ranks.cause(0) == "; rank 1 had given up: rank 2 is stopped"
    view = ranks.boards[0].view(0)
    assert view.note is not None
    assert (view.note.kind, view.note.text) == (SECONDARY, "rank 1 had given up: rank 2 is stopped")


def test_a_link_that_is_down_and_data_that_does_not_come():
    ranks = Ranks(3)
    for board in ranks.boards:
        board.posted(ROWS, 5)
    assert ranks.cause(0, silent=(2,)) == (
        f"; nothing came from rank 2 {ranks.name}, joined though it is: look at the network between the ranks"
    )
    ranks.boards[2].note(LINK, "rank 2: its network interface np is down")
    assert ranks.cause(1, silent=(2,)) == "; rank 2: its network interface np is down"


def test_the_first_last_words_stay_and_long_ones_are_cut():
    board = Board(None, 0, 1)
    board.note(OWN, "x" * 5000)
    board.note(OWN, "later")
    note = board.view(0).note
    assert note is not None
    assert note.text == "x" * 1024


def test_a_board_tells_what_runs_and_what_waits():
    board = Board(None, 0, 1)
    board.begin("gather", 4, 0)
    assert board.view(0).doing() == ", in gather of batch 4"
    board.begin_wait(KEYS, 9)
    view = board.view(0)
    assert view.doing() == ", waiting in gather of batch 4"
    assert view.doing(ended=True) == ", while it was waiting in gather of batch 4"
    assert [(wait.purpose, wait.number) for wait in view.waits] == [(KEYS, 9)]
    board.end_wait()
    assert board.view(0).running == ["gather of batch 4"]
    board.end()
    assert board.view(0).doing() == ""
    board.begin_wait(KEYS, 10)  # outside of stages
    assert board.view(0).doing() == ", waiting in exchange"
    board.end_wait()
    assert board.view(0).doing() == ""


def test_more_stages_than_there_is_room_for():
    board = Board(None, 0, 1)
    for k in range(60):
        board.begin(f"stage{k}", k, 0)
        board.end()
    board.begin("stage3", 3, 0)
    assert board.view(0).running == ["stage3 of batch 3"]
