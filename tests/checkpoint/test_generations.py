"""Saves by several ranks: all or nothing, one at a time, and no garbage left."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest
import torch
from store_cases import contents, fill, load_stores, make_store, save_one, save_stores

from nestpipe_kernels.checkpoint import generation as generations
from nestpipe_kernels.checkpoint.exchange import agree, gather_json
from nestpipe_kernels.checkpoint.generation import RankPart, save_generation
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import dense_file, rank_file
from nestpipe_kernels.checkpoint.rows import save_tables
from nestpipe_kernels.comm import LocalCommunicator
from nestpipe_kernels.errors import CheckpointError, RemoteRankError
from nestpipe_kernels.testing.threads import run_ranks_as_threads


def _filled(world: int, salt: int = 0):
    stores = [make_store() for _ in range(world)]
    for rank, store in enumerate(stores):
        fill(store, rank, world, salt)
    return stores


def _names(directory):
    return sorted(os.listdir(directory))


def _contents(directory):
    """Of all files but the lock, which notes every attempt."""
    return {name: (directory / name).read_bytes() for name in _names(directory) if name != ".lock"}


def test_each_save_replaces_the_one_before(tmp_path) -> None:
    directory = tmp_path / "new" / "place"
    for salt, world in enumerate((2, 3, 1), start=1):
        save_stores(directory, _filled(world, salt), salt)
        manifest = Manifest.load(directory)
        assert (manifest.generation, manifest.world_size) == (salt, world)
        assert manifest.position == {"step_count": salt} and manifest.ranks == [{"salt": salt}] * world
        assert _names(directory) == sorted([".lock", "manifest.json", *manifest.files])


def test_what_killed_saves_left_is_removed_and_strangers_are_not(tmp_path) -> None:
    save_stores(tmp_path, _filled(1), 1)
    garbage = [dense_file(9), rank_file(9, 0) + ".tmp", rank_file(3, 70)]
    strangers = ["notes.txt", "model.safetensors", "g00000009-mine.safetensors"]
    for name in (*garbage, *strangers, "manifest.json.tmp"):
        (tmp_path / name).write_text("x")
    save_stores(tmp_path, _filled(1), 2)
    manifest = Manifest.load(tmp_path)
    assert manifest.generation == 10  # above every number that a process might still be writing under
    assert _names(tmp_path) == sorted([".lock", "manifest.json", *manifest.files, *strangers])


def test_one_entry_that_cannot_be_removed_does_not_keep_the_others(tmp_path) -> None:
    stuck = [dense_file(number) for number in (20, 30, 40)]  # wherever the system lists them
    for name in stuck:
        (tmp_path / name).mkdir()
    for salt in (1, 2):
        save_stores(tmp_path, _filled(1, salt), salt)
    assert _names(tmp_path) == sorted([".lock", "manifest.json", *Manifest.load(tmp_path).files, *stuck])


def test_numbers_of_failed_saves_are_not_used_again(tmp_path) -> None:
    """A rank that hung in a save which the others gave up may go on writing while, or after, the next one saves."""
    save_stores(tmp_path, _filled(1), 1)
    late = []

    def give_up(generation):
        late.append(generation)
        raise OSError(errno.EIO, "given up")

    for expected in (2, 3):
        with pytest.raises(OSError, match="given up"):
            save_generation(tmp_path, LocalCommunicator(), give_up)
        assert late[-1].number == expected
    save_stores(tmp_path, _filled(1), 4)
    for generation in late:
        generation.write_tensors(rank_file(generation.number, 0), {"late": torch.zeros(3)})
    assert Manifest.load(tmp_path).generation == 4
    load_stores(tmp_path, [make_store()])
    (tmp_path / ".lock").write_text("what else\n")
    save_stores(tmp_path, _filled(1), 5)
    assert Manifest.load(tmp_path).generation == 5


def _failing_save(directory, world: int, failing: int, failure: Exception):
    """One rank fails after it has written; what every rank raised."""
    stores = _filled(world, 5)
    raised: list[BaseException | None] = [None] * world

    def body(rank, communicator):
        def write(generation):
            part = RankPart(save_tables(generation, [stores[rank]]))
            if rank == failing:
                raise failure
            return part

        try:
            save_generation(directory, communicator, write)
        except Exception as error:
            raised[rank] = error

    run_ranks_as_threads(world, body)
    return raised


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_of_one_rank_reaches_all_and_the_old_checkpoint_stands(tmp_path, failing) -> None:
    stores = _filled(2, 1)
    save_stores(tmp_path, stores, 1)
    before = _contents(tmp_path)
    raised = _failing_save(tmp_path, 3, failing, OSError(errno.ENOSPC, "No space left on device", "x"))
    for rank, error in enumerate(raised):
        assert isinstance(error, OSError if rank == failing else RemoteRankError)
        if rank != failing:
            assert str(error) == (
                f"rank {failing} failed in saving a checkpoint: OSError: [Errno 28] No space left on device: 'x'"
            )
    assert _contents(tmp_path) == before
    other = [make_store()]
    load_stores(tmp_path, other)
    assert contents(other) == contents(stores)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "write"])
def test_a_full_disk_at_any_call_leaves_the_old_checkpoint(tmp_path, monkeypatch, world, call) -> None:
    save_stores(tmp_path, _filled(world, 1), 1)
    before = _contents(tmp_path)
    stores, real, lock = _filled(world, 2), getattr(os, call), threading.Lock()
    after, calls = 0, 0

    def limited(*args):
        nonlocal calls
        with lock:
            calls += 1
            if calls > after:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    for after in (0, 1, 5, 14):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, call, limited)
            problem = _problem_of_saving(tmp_path, stores)
        if not problem:
            assert 0 < calls <= after
            return
        assert "No space left on device" in problem
        assert _contents(tmp_path) == before


def _problem_of_saving(directory, stores) -> str:
    try:
        save_stores(directory, stores, 2)
    except (OSError, RemoteRankError) as error:
        return str(error)
    return ""


def test_a_failure_after_the_manifest_stands_keeps_its_files(tmp_path, monkeypatch) -> None:
    save_stores(tmp_path, _filled(1, 1), 1)
    real, calls = generations.Manifest.save, []

    def save_and_fail(self, directory):
        real(self, directory)
        calls.append(1)
        raise OSError(errno.EIO, "Input/output error", os.fspath(directory))

    monkeypatch.setattr(Manifest, "save", save_and_fail)
    with pytest.raises(OSError, match="Input/output error"):
        save_stores(tmp_path, _filled(1, 2), 2)
    assert calls and Manifest.load(tmp_path).generation == 2
    load_stores(tmp_path, [make_store()])


def test_ranks_must_save_the_same_tables(tmp_path) -> None:
    def body(rank, communicator):
        def write(generation):
            return RankPart(save_tables(generation, [make_store(dim=4 + rank)]))

        save_generation(tmp_path, communicator, write)

    with pytest.raises(
        (CheckpointError, RemoteRankError), match="ranks disagree on dim of table 'user': rank 0 has 4, "
    ):
        run_ranks_as_threads(2, body)
    assert _names(tmp_path) == [".lock"]


def test_ranks_must_see_the_same_directory(tmp_path) -> None:
    def body(rank, communicator):
        def write(generation):
            part = RankPart(save_tables(generation, [make_store()]))
            if rank == 1:
                for name in generation.files:
                    (tmp_path / name).unlink()
            return part

        save_generation(tmp_path, communicator, write)

    message = "r00001-p000.safetensors is not there as rank 0 sees it: all ranks must save to the same file system"
    with pytest.raises((CheckpointError, RemoteRankError), match=message):
        run_ranks_as_threads(2, body)


def test_two_saves_at_the_same_time_are_refused(tmp_path) -> None:
    def write(generation):
        with pytest.raises(CheckpointError, match=f"another process or thread is saving to {tmp_path} right now"):
            save_one(tmp_path, make_store())
        return RankPart(save_tables(generation, [make_store()]))

    save_generation(tmp_path, LocalCommunicator(), write)
    save_one(tmp_path, make_store())
    assert Manifest.load(tmp_path).generation == 2


def test_file_systems_without_locks_can_be_saved_to(tmp_path, monkeypatch) -> None:
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    save_one(tmp_path, make_store())
    assert Manifest.load(tmp_path).generation == 1


def test_a_damaged_or_newer_checkpoint_is_not_replaced(tmp_path) -> None:
    save_one(tmp_path, make_store())
    data = (tmp_path / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").write_bytes(data.replace(b"1", b"2", 1))
    before = _names(tmp_path)
    with pytest.raises(
        CheckpointError, match="cannot be read, and saving would replace it: save elsewhere, or remove it"
    ):
        save_one(tmp_path, make_store())
    assert _names(tmp_path) == before


def test_places_that_are_no_directory(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is no directory: choose another path"):
        save_one(tmp_path / "file", make_store())
    with pytest.raises(NotADirectoryError, match="cannot make the directory"):
        save_one(tmp_path / "file" / "below", make_store())


def test_a_read_only_place_is_explained(tmp_path, monkeypatch) -> None:
    real = os.open

    def read_only(path, flags, *rest):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="the file system is read-only: choose another directory"):
        save_one(tmp_path, make_store())


def test_values_and_failures_travel_between_ranks() -> None:
    def body(rank, communicator):
        everyone = gather_json(communicator, {"r": "ä" * rank}, None, "testing", to=None)
        first = gather_json(communicator, [rank] * rank, None, "testing", to=1)
        agree(communicator, None, "testing")
        try:
            agree(communicator, ValueError(f"of {rank}") if rank else None, "testing")
        except (RemoteRankError, ValueError) as error:
            return everyone, first, str(error)
        raise AssertionError

    found = run_ranks_as_threads(3, body)
    assert [one[0] for one in found] == [[{"r": ""}, {"r": "ä"}, {"r": "ää"}]] * 3
    assert [one[1] for one in found] == [[], [[], [1], [2, 2]], []]
    assert [one[2] for one in found] == ["rank 1 failed in testing: ValueError: of 1", "of 1", "of 2"]


def test_a_file_does_not_depend_on_the_order_in_which_keys_came(tmp_path) -> None:
    texts = []
    for order in (1, -1):
        store, directory = make_store(), tmp_path / str(order)
        keys = torch.arange(3000) * 7
        values = [keys if order == 1 else keys.flip(0), torch.arange(100), torch.empty(0, dtype=torch.int64)]
        store.retrieve(torch.arange(50), torch.zeros(50, dtype=torch.int32), None, 3)
        store.erase(torch.arange(50), "user")
        fill(store, 0, 1, keys=values)
        save_one(directory, store)
        texts.append({name: (directory / name).read_bytes() for name in Manifest.load(directory).files})
    assert texts[0] == texts[1]
