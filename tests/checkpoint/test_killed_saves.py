"""Processes that are killed while they save: the last complete checkpoint loads, and is exactly one that was saved."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from store_cases import contents, fill, load_stores, make_store, save_one

from nestpipe_kernels.checkpoint.files import open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest

CALLS = ("open", "pwrite", "write", "fsync", "replace", "unlink", "listdir", "mkdir")


def _state(salt: int):
    """A store whose rows all depend on `salt`, with more keys for larger ones."""
    store = make_store()
    fill(
        store,
        0,
        1,
        salt,
        [torch.arange(60 + 5 * (salt % 40)) * 3, torch.arange(100), torch.empty(0, dtype=torch.int64)],
    )
    return store


def _check(directory, announced: set[int]) -> int:
    """The number of the state that the directory holds: whole, verified, and one of those announced."""
    manifest = Manifest.load(directory)
    for name, record in manifest.files.items():
        with open_tensor_file(directory / name, record) as file:
            file.verify()
    salt = manifest.position["step_count"]
    assert salt in announced and manifest.ranks == [{"salt": salt}]
    store = make_store()
    load_stores(directory, [store])
    assert contents([store]) == contents([_state(salt)])
    return salt


def _fork(child) -> int:
    """Run `child` in a forked process, which never returns here."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)  # torch's threads are not in the child: an operation that waits for them never ends
        child()
    finally:
        os._exit(1)


def _save_and_announce(directory, first: int, pipe: int) -> None:
    """Save one state after another, saying each number before its save."""
    for salt in range(first, first + 1000):
        store = _state(salt)
        os.write(pipe, salt.to_bytes(8, "little"))
        save_one(directory, store, salt=salt)


@pytest.mark.parametrize("moments", [30, pytest.param(100, marks=pytest.mark.soak)])
def test_fault_42_killed_at_random_moments(tmp_path, moments) -> None:
    generator = random.Random(42)
    save_one(tmp_path, _state(0), salt=0)
    announced, last = {0}, 0
    for _ in range(moments):
        reading, writing = os.pipe()
        pid = _fork(lambda w=writing, first=last + 1: _save_and_announce(tmp_path, first, w))
        os.close(writing)
        os.read(reading, 8)  # the first save begins
        announced.add(last + 1)
        time.sleep(generator.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        rest = os.read(reading, 1 << 16)
        announced.update(int.from_bytes(rest[i : i + 8], "little") for i in range(0, len(rest), 8))
        os.close(reading)
        now = _check(tmp_path, announced)
        assert now >= last
        last = now
    save_one(tmp_path, _state(last), salt=last)
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", "manifest.json", *Manifest.load(tmp_path).files])


def _save_and_die(directory, salt: int, at_call: int) -> None:
    """Save, but be killed instead of the n-th system call that changes the directory, if there are as many."""
    store, count = _state(salt), 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > at_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    save_one(directory, store, salt=salt)
    os._exit(0)


def test_killed_before_every_single_call(tmp_path) -> None:
    save_one(tmp_path, _state(0), salt=0)
    last, calls = 0, 0
    for calls in range(500):
        pid = _fork(lambda salt=last + 1, calls=calls: _save_and_die(tmp_path, salt, calls))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        last = _check(tmp_path, {last, last + 1})
        if code == 0:
            break
    assert code == 0 and calls > 20
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", "manifest.json", *Manifest.load(tmp_path).files])
