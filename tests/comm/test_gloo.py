"""The gloo communicator with real processes: data, dtypes, late and dead peers, sharing, sub-groups."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nestpipe_kernels.comm import (
    DeviceCommunicator,
    GlooCommunicator,
    LocalCommunicator,
    communicator_for,
    exchange_same,
)
from nestpipe_kernels.comm.checks import KINDS
from nestpipe_kernels.comm.gloo import GlooGroup
from nestpipe_kernels.errors import CommunicationError

sys.path.insert(0, str(Path(__file__).parent))

from gloo_world import LIMIT_S, GlooWorld

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world():
    made = GlooWorld(2)
    yield made
    made.close()


def raises(call) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "no CommunicationError"


def exchange_dtypes() -> list[list]:
    communicator = communicator_for(None, LIMIT_S)
    rank = communicator.rank
    group = communicator.group("rows")
    send_counts, receive_counts = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
    results = []
    for dtype in (torch.float32, torch.int64, torch.uint8):
        send = (torch.arange(6).reshape(3, 2) + 10 * rank).to(dtype)
        out = torch.zeros(sum(receive_counts), 2, dtype=dtype)
        handle = group.all_to_all(send, send_counts, receive_counts, f"rows/{dtype}", out=out)
        assert handle.wait() is out
        assert handle.wait() is out
        assert handle.ready()
        results.append(out.tolist())
    return results


def test_rows_of_all_dtypes(world):
    first, second = world.run(exchange_dtypes)
    assert first == [[[0, 1]]] * 3
    assert second == [[[2, 3], [4, 5], [10, 11], [12, 13], [14, 15]]] * 3


def exchange_nothing() -> tuple:
    communicator = communicator_for(None, LIMIT_S)
    counts = [0, 0] if communicator.rank == 0 else [2, 0]
    receive = [0, 2] if communicator.rank == 0 else [0, 0]
    send = torch.full((sum(counts), 3), 5.0)
    received = communicator.group("grads").all_to_all(send, counts, receive, "grads").wait()
    empty = communicator.group("rows").all_to_all(torch.empty(0, 4), [0, 0], [0, 0], "none").wait()
    return received.tolist(), received.dtype, tuple(empty.shape)


def test_fault_34_a_rank_with_nothing_to_send(world):
    first, second = world.run(exchange_nothing)
    assert first == ([[5.0] * 3, [5.0] * 3], torch.float32, (0, 4))
    assert second == ([], torch.float32, (0, 4))


def exchange_purposes_in_opposite_order() -> list:
    communicator = communicator_for(None, LIMIT_S)
    purposes = ["keys", "dense"] if communicator.rank == 0 else ["dense", "keys"]
    value = torch.tensor([communicator.rank, 7])
    handles = {p: exchange_same(communicator.group(p), value + (100 if p == "dense" else 0), p) for p in purposes}
    return [handles[p].wait().tolist() for p in ("keys", "dense")]


def test_purposes_do_not_wait_for_each_other(world):
    expected = [[[0, 7], [1, 7]], [[100, 107], [101, 107]]]
    assert world.run(exchange_purposes_in_opposite_order) == [expected, expected]


def share_and_close() -> list:
    first = communicator_for(None, LIMIT_S)
    same = communicator_for(dist.group.WORLD, LIMIT_S)
    other = communicator_for(None, LIMIT_S + 1)
    facts = [first is same, other is not first, isinstance(other, GlooCommunicator)]
    other.close()
    other.close()
    message = raises(lambda: exchange_same(other.group("rows"), torch.zeros(1), "late"))
    replacement = communicator_for(None, LIMIT_S + 1)
    facts.append(replacement is not other)
    facts.append(exchange_same(replacement.group("rows"), torch.ones(1), "again").wait().tolist() == [[1.0], [1.0]])
    return [*facts, message]


def test_communicators_are_shared_and_replaced_when_closed(world):
    for rank, (*facts, message) in enumerate(world.run(share_and_close)):
        assert facts == [True] * 5
        assert message == f"rows exchange 'late': this communicator (rank {rank} of 2) is closed"


def use_subgroup() -> str:
    alone = dist.new_group([0])
    if dist.get_rank() == 1:
        try:
            communicator_for(alone, LIMIT_S)
        except TypeError as error:
            return str(error)
    return type(communicator_for(alone, LIMIT_S)).__name__


def test_a_group_of_one_rank_and_a_rank_outside(world):
    first, second = world.run(use_subgroup)
    assert first == LocalCommunicator.__name__
    assert "a torch.distributed process group that this rank belongs to" in second


def count_of_peer() -> int:
    """How many more exchanges the other rank says it has posted, after one more."""
    communicator = communicator_for(None, LIMIT_S)
    board, peer, kind = communicator.board, 1 - communicator.rank, KINDS.index("dense")
    dist.barrier()  # nobody posts before both have looked
    before = board.view(peer).posted[kind]
    dist.barrier()
    exchange_same(communicator.group("dense"), torch.zeros(1), "count").wait()
    dist.barrier()
    return board.view(peer).posted[kind] - before


def test_ranks_of_a_machine_see_what_others_have_posted(world):
    assert world.run(count_of_peer) == [1, 1]


def wait_for_late_peer(limit_s: float) -> tuple[str, str]:
    communicator = GlooCommunicator(None, limit_s)
    group = communicator.group("keys")
    if communicator.rank == 1:
        message = ""
    else:
        handle = group.all_to_all(torch.zeros(2), [1, 1], [1, 1], "keys/b7")
        message = raises(handle.wait)
        assert raises(handle.wait) == message
    dist.barrier()  # rank 1 is late until rank 0 has given up
    communicator.close()
    return message, ""


def test_a_late_peer_is_an_error_within_the_timeout(world):
    (message, _), _ = world.run(wait_for_late_peer, 4.0)  # also the limit for making the groups
    assert message.startswith("keys exchange 'keys/b7': rank 0 of 2 got no answer after ")
    assert "no answer after 4.0 s" in message
    assert "has ended" not in message


def post_and_wait() -> tuple[str, float]:
    communicator = communicator_for(None, LIMIT_S)
    start = time.monotonic()
    group = communicator.group("rows")
    message = raises(lambda: group.all_to_all(torch.zeros(2), [1, 1], [1, 1], "rows/b2/m1").wait())
    return message, time.monotonic() - start


def make_communicator() -> int:
    return communicator_for(None, LIMIT_S).size


def test_a_dead_peer_is_named():
    world = GlooWorld(2)
    try:
        assert world.run(make_communicator) == [2, 2]
        world.send(0, post_and_wait)
        os.kill(world.processes[1].pid, signal.SIGKILL)
        message, waited_s = world.receive(0)
    finally:
        world.close()
    assert message.startswith("rows exchange 'rows/b2/m1': rank 0 of 2 got no answer after ")
    assert f"rank 1 (process {world.processes[1].pid}) has ended" in message
    assert waited_s < LIMIT_S


def test_without_torch_distributed():
    communicator = communicator_for(None, 5.0)
    assert isinstance(communicator, LocalCommunicator)
    assert communicator_for(communicator) is communicator
    send = torch.tensor([[1.0, 2.0]])
    handle = communicator.group("rows").all_to_all(send, [1], [1], "t")
    send.zero_()
    assert handle.wait().tolist() == [[1.0, 2.0]]
    out = torch.zeros(1, 2)
    assert communicator.group("rows").all_to_all(torch.ones(1, 2), [1], [1], "t", out=out).wait() is out
    assert out.tolist() == [[1.0, 1.0]]
    communicator.close()
    with pytest.raises(CommunicationError, match="rows exchange 'u': this communicator is closed"):
        communicator.group("rows").all_to_all(send, [1], [1], "u")
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        GlooCommunicator()
    with pytest.raises(TypeError, match=r"process_group must be None, .* got int"):
        communicator_for(3)
    with pytest.raises(ValueError, match="timeout_s must be a finite number of seconds > 0, got 0"):
        communicator_for(None, 0)


class RecordedGroup:
    """A process group that notes what is posted and never answers."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, int, int, list]] = []

    def recv(self, tensors, peer: int, tag: int) -> None:
        self.posted.append(("recv", peer, tag, tensors[0].tolist()))

    def send(self, tensors, peer: int, tag: int) -> None:
        self.posted.append(("send", peer, tag, tensors[0].tolist()))


class ThreeRanks:
    """What a group asks of its communicator."""

    rank, size, timeout_s, name, board = 1, 3, LIMIT_S, "rank 1 of 3", None

    def label(self, purpose: str) -> str:
        return purpose


def test_an_exchange_announces_what_it_receives_before_it_sends() -> None:
    """Behind its own data a rank's announcement would wait, and with it the other direction of the link."""
    communicator, recorded = ThreeRanks(), RecordedGroup()
    group = GlooGroup(communicator, "rows", recorded)
    out = torch.full((4,), -1)
    for _ in range(2):
        group.all_to_all(torch.tensor([10, 20, 21, 30]), [1, 2, 1], [1, 2, 1], "t", out=out)
    assert [(kind, peer, tag) for kind, peer, tag, _ in recorded.posted] == [
        ("recv", 0, 0), ("recv", 2, 0), ("send", 2, 0), ("send", 0, 0),
        ("recv", 0, 1), ("recv", 2, 1), ("send", 2, 1), ("send", 0, 1),
    ]  # fmt: skip
    assert [values for kind, _, tag, values in recorded.posted if kind == "send" and tag == 0] == [[30], [10]]
    assert out.tolist() == [-1, 20, 21, -1]


@pytest.mark.parametrize("available", [False, True])
def test_device_goes_through_the_host_where_torch_has_no_nccl(monkeypatch, available):
    """torch lists nccl among its backends whether it has it or not."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    host: Any = SimpleNamespace(size=2, rank=0, timeout_s=1.0, make_group=lambda backend: backend)
    backend: Any = SimpleNamespace(collectives="nccl")
    assert DeviceCommunicator(host, backend).carrier == ("nccl" if available else None)
