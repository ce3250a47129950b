"""Stores whose rows lie in a file: the same answers as in memory, the limit, growth, and what the system refuses."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stores import keys_of, table_zero, whole_rows

import nestpipe_kernels as nk
from nestpipe_kernels.store import EmbeddingStore, FileTier
from nestpipe_kernels.types import DataType, KeyStatus

SMALLEST = 1 << 16
DIM = 60  # with row-wise Adagrad 62 floats, so rows of 256 bytes: 16 to a page


def pair(directory, **settings):
    """The same store in memory, and in a file with room for 256 rows."""
    settings = {"name": "item", "dim": DIM, "optimizer": nk.optim.RowWiseAdagrad(0.1), **settings}
    return EmbeddingStore(**settings), EmbeddingStore(**settings, tier=FileTier(directory, SMALLEST))


def contents(store):
    keys, handles = store.export_table()
    rows = torch.empty(len(keys), store.row_floats)
    store.gather(handles, keys, table_zero(keys), rows, None)
    order = torch.argsort(keys)
    notes = store.read_metadata(handles)
    words = rows.view(torch.int32)[order, : store.embedding_words + store.state_floats + 1]
    return (
        keys[order].tolist(),
        words.numpy().tobytes(),
        notes.last_used[order].tolist(),
        notes.frequency[order].tolist(),
    )


def test_many_steps_beyond_the_limit_give_the_same_bits(tmp_path):
    plain, tiered = pair(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 31):
        keys = torch.randint(0, 5000, (700,), generator=generator)
        grads = torch.randn(700, DIM, generator=generator)
        ahead = torch.randint(0, 6000, (300,), generator=generator)
        tiered.warm(ahead, table_zero(ahead))
        for store in (plain, tiered):
            store.find_or_insert(keys, batch=step)
            store.apply_gradients(keys, grads, step=step)
    assert contents(plain) == contents(tiered)
    counters = tiered.tier_counters()
    assert counters["read"] > counters["limit"] and counters["written"] > counters["limit"]


@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
def test_embeddings_of_half_precision_are_the_same(tmp_path, data_type):
    plain, tiered = pair(tmp_path, data_type=data_type)
    keys = torch.arange(3000)
    for store in (plain, tiered):
        store.find_or_insert(keys)
        values = torch.linspace(-1, 1, 3000 * DIM).view(3000, DIM)
        store.write_embeddings(store.find_handles(keys, table_zero(keys)), values)
    assert torch.equal(plain.find(keys)[0], tiered.find(keys)[0])


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        pytest.param({"dim": 100, "optimizer": nk.optim.Adam(0.1)}, 2000, id="1,280 bytes"),
        pytest.param({"dim": 3000}, 50, id="longer than a page"),
    ],
)
def test_rows_that_reach_over_pages(tmp_path, settings, count):
    plain, tiered = pair(tmp_path, **settings)
    keys = torch.randperm(count)
    for store in (plain, tiered):
        store.find_or_insert(keys)
        store.apply_gradients(keys, torch.linspace(-1, 1, count * store.dim).view(count, store.dim), step=1)
    assert contents(plain) == contents(tiered)


def test_memory_is_kept_to_the_limit(tmp_path):
    _, tiered = pair(tmp_path)
    tiered.find_or_insert(torch.arange(20_000))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        keys = torch.randint(0, 20_000, (100,), generator=generator)
        tiered.warm(keys, table_zero(keys))
        tiered.find(keys)
        counters = tiered.tier_counters()
        assert counters["resident"] <= counters["limit"] + 200
    assert tiered.memory()["slabs"] == counters["resident"] * counters["page_bytes"]
    assert tiered.memory()["file"] >= 20_000 * 256


def in_memory(store, directory):
    """Pages of the mappings of a store's file, in `directory`, that the system holds for this process."""
    kilobytes = 0
    counting = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counting = str(directory) in line and "rw-s" in line
        elif counting and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024 // store.tier_counters()["page_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_system_holds_no_more_than_the_account_says(tmp_path):
    _, tiered = pair(tmp_path)
    keys = torch.arange(20_000)
    tiered.find_or_insert(keys)
    for _ in range(3):
        some = torch.randint(0, 20_000, (64,))
        tiered.find(some)
    assert 0 < in_memory(tiered, tmp_path) <= tiered.tier_counters()["resident"]


def test_rows_that_are_used_again_and_again_are_read_once(tmp_path):
    _, tiered = pair(tmp_path)
    tiered.find_or_insert(torch.arange(20_000))
    hot = torch.arange(0, 64)
    tiered.find(hot)
    before = tiered.tier_counters()["read"]
    for first in range(1000, 19_000, 100):
        tiered.find(torch.cat([hot, torch.arange(first, first + 100)]))
    # 16 rows to a page: 100 successive rows lie on 7 or 8.
    assert tiered.tier_counters()["read"] - before <= 180 * 8


def test_warm_brings_pages_before_they_are_asked_for(tmp_path):
    _, tiered = pair(tmp_path)
    tiered.find_or_insert(torch.arange(20_000))
    keys = torch.arange(9_000, 9_064)
    tiered.warm(torch.cat([keys, keys_of(-5, 2**62)]), table_zero(torch.zeros(66)))
    before = tiered.tier_counters()["read"]
    tiered.find(keys)
    assert tiered.tier_counters()["read"] == before
    assert tiered.size() == 20_000


def test_a_store_in_memory_has_nothing_to_warm(tmp_path):
    plain, _ = pair(tmp_path)
    plain.find_or_insert(torch.arange(10))
    plain.warm(torch.arange(10), table_zero(torch.arange(10)))
    assert set(plain.tier_counters().values()) == {0} and plain.memory()["file"] == 0


def test_eviction_limbo_and_undo(tmp_path):
    stores = pair(tmp_path, capacity=1000, eviction=nk.policy.LRU(0.1))
    seen = []
    for store in stores:
        generator = torch.Generator().manual_seed(2)
        for batch in range(24):
            keys = torch.randint(0, 4000, (300,), generator=generator).unique()
            taken = store.retrieve(keys, table_zero(keys), None, batch)
            rows = torch.full((len(keys), store.row_floats), float(batch))
            store.write_back(taken.handles, rows)
            other = torch.randint(0, 4000, (300,), generator=generator).unique()
            undone = store.retrieve(other, table_zero(other), None, batch + 1)
            store.undo(undone)
        seen.append((contents(store), store.counters()))
    assert seen[0] == seen[1] and seen[0][1]["evicted"] > 0


def test_columns_in_and_out(tmp_path):
    plain, tiered = pair(tmp_path)
    keys = torch.arange(4000)
    plain.find_or_insert(keys, batch=3)
    _, handles = plain.export_table()
    rows = whole_rows(plain, keys)
    tiered.load_columns(keys, None, [(0, rows)], plain.read_metadata(handles))
    assert contents(plain) == contents(tiered)
    back = torch.empty(4000, DIM)
    tiered.copy_columns(tiered.find_handles(keys, table_zero(keys)), [(0, back)])
    assert torch.equal(back, rows[:, :DIM])
    tiered.load_rows(keys, table_zero(keys), rows * 2, plain.read_metadata(handles))
    assert torch.equal(whole_rows(tiered, keys)[:, :DIM], rows[:, :DIM] * 2)


def test_clearing_and_filling_again(tmp_path):
    _, tiered = pair(tmp_path)
    tiered.find_or_insert(torch.arange(5000))
    size = tiered.memory()["file"]
    tiered.clear()
    tiered.find_or_insert(torch.arange(10_000, 15_000))
    assert tiered.memory()["file"] == size and len(tiered) == 5000


# ------------------------------------------------------------------------------------------------ files and errors


def test_no_name_is_left_and_the_directory_may_go(tmp_path):
    directory = tmp_path / "rows"
    directory.mkdir()
    plain, tiered = pair(directory)
    tiered.find_or_insert(torch.arange(2000))
    assert list(directory.iterdir()) == []
    shutil.rmtree(directory)
    tiered.find_or_insert(torch.arange(12_000))
    assert torch.equal(tiered.find(torch.arange(12_000))[0], plain.find(torch.arange(12_000))[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_are_closed_with_the_store(tmp_path):
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pair(tmp_path)[1].find_or_insert(torch.arange(1000))
    assert len(os.listdir("/proc/self/fd")) <= count


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"FileTier cannot make a file in directory '.*/gone': No such file"
    ) as e:
        pair(tmp_path / "gone")
    assert e.value.errno == errno.ENOENT and "give a directory that exists" in str(e.value)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="cannot make a file in directory"):
        pair(tmp_path / "file")


def in_child(work, *arguments):
    """Run `work(send, *arguments)` in a forked child; (the child, where its messages arrive)."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    child = fork.Process(target=work, args=(send.send, *arguments))
    child.start()
    send.close()
    return child, receive


def ended(child):
    child.join(60)
    return child.exitcode == 0


def _without_permission(send, directory):
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)
    try:
        pair(directory)
    except PermissionError as error:
        send(str(error))


def test_no_permission(tmp_path):
    pair(tmp_path)  # loads the extension as whoever may read it
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    child, receive = in_child(_without_permission, closed)
    told = receive.recv()
    assert "cannot make a file in directory" in told and "Permission denied" in told and ended(child)


FULL_DISK = """
import resource, sys, torch
import nestpipe_kernels as nk
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
settings = {"name": "item", "dim": 60, "optimizer": nk.optim.SGD(0.1)}
store, plain = nk.EmbeddingStore(**settings, tier=nk.FileTier(sys.argv[1], 1 << 16)), nk.EmbeddingStore(**settings)
store.find_or_insert(torch.arange(1000), batch=0)
def facts():
    return store.keys().tolist(), store.counters(), store.metadata(torch.arange(1000)).frequency.tolist()
before = facts()
for attempt in range(2):
    try:
        store.find_or_insert(torch.arange(900, 200_000), batch=1)
    except OSError as error:
        print(error)
assert before == facts()
assert torch.equal(store.find(torch.arange(2000))[0], plain.find(torch.arange(2000))[0])
store.find_or_insert(torch.arange(1000, 1100), batch=1)  # what fits goes on
assert len(store) == 1100
print("went on")
"""


def test_a_full_disk_changes_nothing(tmp_path):
    may_mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=3m none "$1"', "sh", str(tmp_path)]
    command, code = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(3 << 20)], errno.EFBIG  # as good, without
    if shutil.which("unshare") is not None and subprocess.run(may_mount, capture_output=True).returncode == 0:
        script = f'mount -t tmpfs -o size=3m none "$1" && exec "{sys.executable}" -W ignore -c "$2" "$1"'
        command, code = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), FULL_DISK], errno.ENOSPC
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    start = f"[Errno {code}] store: the file of rows in directory '{tmp_path}' cannot grow from "
    assert found.stdout.count(start) == 2 and f": {os.strerror(code)}; nothing has changed: free disk" in found.stdout
    assert "went on" in found.stdout


def test_a_directory_in_memory_is_warned_about():
    if not Path("/dev/shm").is_dir() or "tmpfs /dev/shm tmpfs" not in Path("/proc/mounts").read_text():
        pytest.skip("needs /dev/shm on tmpfs")
    with pytest.warns(UserWarning, match="'/dev/shm' is on tmpfs, which keeps its files in memory"):
        EmbeddingStore(name="item", dim=4, optimizer=nk.optim.SGD(0.1), tier=FileTier("/dev/shm", SMALLEST))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((3, SMALLEST), TypeError, "FileTier: directory must be a path, got 3"),
        (("x", 1.5), TypeError, "FileTier: memory_bytes must be an integer, got 1.5"),
        (("x", True), TypeError, "FileTier: memory_bytes must be an integer, got True"),
        (("x", SMALLEST - 1), ValueError, r"memory_bytes must be >= 65536 \(64 KiB\), got 65535"),
    ],
)
def test_settings_that_no_tier_can_have(arguments, error, message):
    with pytest.raises(error, match=message):
        FileTier(*arguments)


def test_another_kind_of_tier():
    with pytest.raises(TypeError, match="store: tier must be a FileTier or None, got '/data'"):
        EmbeddingStore(name="item", dim=4, optimizer=nk.optim.SGD(0.1), tier="/data")


def _use(send, store):
    keys = torch.arange(10)
    for call in (
        lambda: store.find(keys),
        lambda: store.find_or_insert(torch.arange(90_000, 90_010)),
        lambda: store.write_embeddings(torch.arange(10), torch.zeros(10, DIM)),
        lambda: store.load_columns(keys, None, [], nk.store.RowMetadata(keys.clone(), keys.clone())),
    ):
        try:
            call()
            send("no error")
        except RuntimeError as error:
            send(str(error))


def test_a_forked_child_is_refused_and_harms_nothing(tmp_path):
    plain, tiered = pair(tmp_path)
    for store in (plain, tiered):
        store.find_or_insert(torch.arange(3000))
    child, receive = in_child(_use, tiered)
    told = [receive.recv() for _ in range(4)]
    assert all("rows of a FileTier belong to the process that made the store" in text for text in told), told
    assert ended(child) and contents(plain) == contents(tiered)


def _fill_and_wait(send, directory):
    _, tiered = pair(directory)
    tiered.find_or_insert(torch.arange(30_000))
    send(len(tiered))
    signal.pause()


def test_a_killed_process_leaves_nothing_behind(tmp_path):
    child, receive = in_child(_fill_and_wait, tmp_path)
    assert receive.recv() == 30_000
    child.kill()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL and list(tmp_path.iterdir()) == []


def test_refused_keys_say_so_as_in_memory(tmp_path):
    _, tiered = pair(tmp_path, capacity=100)
    keys = torch.arange(200)
    status = tiered.retrieve(keys, table_zero(keys), None, 0).status
    assert int((status == KeyStatus.REFUSED.value).sum()) == 100
