"""The in-memory world: matching by tag, threads and one thread, errors, late reading, memory."""

from __future__ import annotations

import threading

import pytest
import torch

from nestpipe_kernels.comm import PURPOSES, Communicator, InMemoryWorld, exchange_same
from nestpipe_kernels.errors import CommunicationError

LIMIT_S = 20.0


def rows(rank: int, counts: list[int], dim: int = 2) -> torch.Tensor:
    """Rows that say who sent them (value // 100) and their position."""
    return (torch.arange(sum(counts) * dim).reshape(-1, dim) + 100 * rank).float()


def on_threads(world: InMemoryWorld, work) -> list:
    results: list = [None] * world.size

    def run(rank: int) -> None:
        try:
            results[rank] = work(world.communicator(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("late_read", [False, True])
def test_all_to_all_on_threads_matches_by_tag_in_any_order(size, late_read):
    world = InMemoryWorld(size, LIMIT_S, late_read=late_read)
    counts = [[(s + 2 * r) % 3 for r in range(size)] for s in range(size)]

    def work(communicator):
        rank = communicator.rank
        group = communicator.group("rows")
        tags = ["a", "b"] if rank % 2 == 0 else ["b", "a"]
        mine = {tag: rows(rank, counts[rank]) + (0 if tag == "a" else 1000) for tag in tags}
        receive = [counts[s][rank] for s in range(size)]
        handles = {tag: group.all_to_all(mine[tag], counts[rank], receive, tag) for tag in tags}
        return {tag: handle.wait() for tag, handle in handles.items()}

    results = on_threads(world, work)
    for rank, result in enumerate(results):
        parts = [rows(s, counts[s]).split(counts[s])[rank] for s in range(size)]
        assert torch.equal(result["a"], torch.cat(parts))
        assert torch.equal(result["b"], torch.cat(parts) + 1000)
    assert world.pending() == []


def test_one_thread_plays_all_ranks_and_out_is_filled_in_place():
    world = InMemoryWorld(2, timeout_s=0)
    groups = [world.communicator(rank).group("keys") for rank in range(2)]
    out = torch.zeros(3, 2, dtype=torch.int64)
    first = groups[0].all_to_all(torch.tensor([[1, 2], [3, 4]]), [1, 1], [1, 2], "t", out=out)
    assert not first.ready()
    with pytest.raises(CommunicationError, match=r"keys exchange 't': rank 0 waited 0 s for rank 1, nothing posted"):
        first.wait()
    second = groups[1].all_to_all(torch.tensor([[5, 6], [7, 8], [9, 10]]), [2, 1], [1, 1], "t")
    assert first.ready()
    assert first.wait() is out
    assert out.tolist() == [[1, 2], [5, 6], [7, 8]]
    assert first.wait() is out
    assert world.pending() == [("keys", "t")]
    assert second.wait().tolist() == [[3, 4], [9, 10]]
    assert world.pending() == []


def test_a_tag_can_be_used_again_before_all_peers_took_the_last_round():
    world = InMemoryWorld(2, timeout_s=0)
    a, b = (world.communicator(rank).group("dense") for rank in range(2))
    send = [torch.tensor([float(i)]) for i in range(4)]
    a1, b1 = a.all_to_all(send[0], [0, 1], [0, 1], "g"), b.all_to_all(send[1], [1, 0], [1, 0], "g")
    assert a1.wait().tolist() == [1.0]
    a2 = a.all_to_all(send[2], [0, 1], [0, 1], "g")
    b2 = b.all_to_all(send[3], [1, 0], [1, 0], "g")
    assert [b1.wait().item(), b2.wait().item(), a2.wait().item()] == [0.0, 2.0, 3.0]
    assert world.pending() == []


def test_fault_34_a_rank_with_nothing_takes_part_with_the_same_dtype():
    world = InMemoryWorld(2, LIMIT_S)

    def work(communicator):
        counts = [0, 0] if communicator.rank == 0 else [2, 1]
        send = torch.ones(sum(counts), 3) * communicator.rank
        receive = [0, 2] if communicator.rank == 0 else [0, 1]
        return communicator.group("rows").all_to_all(send, counts, receive, "t").wait()

    first, second = on_threads(world, work)
    assert first.shape == (2, 3)
    assert second.shape == (1, 3)
    assert first.dtype == second.dtype == torch.float32


def test_fault_36_counts_that_disagree_name_both_ranks():
    world = InMemoryWorld(2, timeout_s=0)
    a, b = (world.communicator(rank).group("rows") for rank in range(2))
    handle = a.all_to_all(torch.zeros(1, 2), [1, 0], [1, 4], "rows/b3/m0")
    b.all_to_all(torch.zeros(3, 2), [3, 0], [0, 0], "rows/b3/m0")
    with pytest.raises(
        CommunicationError,
        match=r"rows exchange 'rows/b3/m0': rank 0 expected 4 rows from rank 1, but rank 1 sends 3",
    ):
        handle.wait()


def test_row_shapes_and_dtypes_that_disagree_are_an_error():
    world = InMemoryWorld(2, timeout_s=0)
    a, b = (world.communicator(rank).group("rows") for rank in range(2))
    handle = a.all_to_all(torch.zeros(1, 2), [0, 1], [0, 1], "t")
    b.all_to_all(torch.zeros(1, 3, dtype=torch.int64), [1, 0], [1, 0], "t")
    with pytest.raises(
        CommunicationError, match=r"rows of shape \[2\] from rank 1, but rank 1 sends torch.int64 \[3\]"
    ):
        handle.wait()


def test_a_failed_or_closed_rank_is_named_and_what_it_posted_still_arrives():
    world = InMemoryWorld(3, LIMIT_S)
    early = [
        world.communicator(rank).group("rows").all_to_all(torch.full((3, 1), float(rank)), [1] * 3, [1] * 3, "early")
        for rank in range(3)
    ]

    def work(communicator):
        if communicator.rank == 2:
            world.fail(2, "ValueError: bad id")
            communicator.close()
            return None
        return communicator.group("rows").all_to_all(torch.zeros(0, 1), [0] * 3, [0] * 3, "late").wait()

    results = on_threads(world, work)
    for rank in (0, 1):
        assert isinstance(results[rank], CommunicationError)
        text = f"rows exchange 'late': rank {rank} waits for rank 2, which is gone: ValueError: bad id"
        assert str(results[rank]) == text
    assert early[0].wait().flatten().tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CommunicationError, match=r"this rank \(2\) is gone: ValueError: bad id"):
        world.communicator(2).group("rows").all_to_all(torch.zeros(0, 1), [0] * 3, [0] * 3, "more")


def test_a_late_rank_is_named_after_the_timeout():
    world = InMemoryWorld(3, timeout_s=0.05)
    handle = world.communicator(1).group("control").all_to_all(torch.zeros(3), [1] * 3, [1] * 3, "flags")
    with pytest.raises(CommunicationError, match=r"rank 1 waited 0.05 s for ranks 0, 2, nothing posted"):
        handle.wait()


def test_late_read_exposes_writes_before_the_wait_but_allows_them_after():
    world = InMemoryWorld(2, timeout_s=0, late_read=True)
    a, b = (world.communicator(rank).group("rows") for rank in range(2))
    send, out = torch.tensor([1.0]), torch.zeros(1)
    sender = a.all_to_all(send, [0, 1], [0, 0], "early")
    receiver = b.all_to_all(torch.zeros(0), [0, 0], [1, 0], "early", out=out)
    assert out.isnan().all()
    send.fill_(2.0)
    assert receiver.wait().item() == 2.0

    sender = a.all_to_all(send, [0, 1], [0, 0], "late")
    receiver = b.all_to_all(torch.zeros(0), [0, 0], [1, 0], "late")
    sender.wait()
    send.fill_(3.0)
    assert receiver.wait().item() == 2.0


def test_default_world_copies_at_the_post():
    world = InMemoryWorld(1, timeout_s=0)
    send = torch.tensor([1.0])
    handle = world.communicator(0).group("rows").all_to_all(send, [1], [1], "t")
    send.fill_(2.0)
    assert handle.wait().item() == 1.0


def test_exchange_same_gives_every_rank_everything():
    world = InMemoryWorld(3, LIMIT_S)
    results = on_threads(
        world,
        lambda c: exchange_same(c.group("control"), torch.tensor([c.rank, 7], dtype=torch.uint8), "flags").wait(),
    )
    for result in results:
        assert result.tolist() == [[0, 7], [1, 7], [2, 7]]


def test_communicator_protocol_and_misuse():
    world = InMemoryWorld(2, timeout_s=0)
    communicator = world.communicator(0)
    assert isinstance(communicator, Communicator)
    assert communicator.group("rows") is communicator.group("rows")
    assert {communicator.group(purpose).size for purpose in PURPOSES} == {2}
    with pytest.raises(ValueError, match="unknown purpose 'row'; expected one of keys, rows, grads, dense, control"):
        communicator.group("row")
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        InMemoryWorld(0)
    group = communicator.group("rows")
    with pytest.raises(ValueError, match=r"rows exchange 't': send_counts must be 2 numbers >= 0, .* got \[1\]"):
        group.all_to_all(torch.zeros(1), [1], [1, 0], "t")
    with pytest.raises(ValueError, match=r"receive_counts must be 2 numbers >= 0, one per rank, got \[1, -1\]"):
        group.all_to_all(torch.zeros(1), [1, 0], [1, -1], "t")
    with pytest.raises(ValueError, match=r"send must have sum\(send_counts\) = 2 rows, got shape \[1\]"):
        group.all_to_all(torch.zeros(1), [1, 1], [1, 1], "t")
    with pytest.raises(ValueError, match="send must be on the CPU, got meta"):
        group.all_to_all(torch.zeros(1, device="meta"), [1, 0], [1, 0], "t")
    with pytest.raises(ValueError, match=r"out must be a contiguous torch.float32 tensor of shape \[2, 3\]"):
        group.all_to_all(torch.zeros(1, 3), [1, 0], [1, 1], "t", out=torch.zeros(2, 2))
    with pytest.raises(CommunicationError, match="rank 0 expected 1 rows from rank 0, but rank 0 sends 2"):
        group.all_to_all(torch.zeros(2), [2, 0], [1, 0], "t")
    assert world.pending() == []
