"""Tensor files: the official library opens them, and nothing wrong in them goes unnoticed."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe_kernels.checkpoint import file_writer
from nestpipe_kernels.checkpoint.files import TensorFileWriter, open_tensor_file
from nestpipe_kernels.checkpoint.layout import DTYPES, file_layout
from nestpipe_kernels.checkpoint.workers import OrderedWorkers
from nestpipe_kernels.errors import CheckpointError

NAME = "g00000001-dense.safetensors"


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(-100, 100, (7, 3), generator=generator)
    found = {f"of {name}": words.to(dtype) for name, dtype in DTYPES.items()}
    found["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    found["no rows"] = torch.empty((0, 4), dtype=torch.bfloat16)
    found["no columns"] = torch.empty((3, 0))
    found['Ünicode/"name"'] = torch.arange(5)
    return found


def _write(path, tensors):
    with TensorFileWriter(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        return writer.close()


def test_the_official_library_reads_what_we_write(tmp_path) -> None:
    tensors = _tensors()
    record = _write(tmp_path / NAME, tensors)
    assert os.path.getsize(tmp_path / NAME) == record.size
    found = safetensors.torch.load_file(tmp_path / NAME)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with open_tensor_file(tmp_path / NAME, record) as file:
        file.verify()
        for name, tensor in tensors.items():
            assert torch.equal(file.read(name), tensor)
    assert os.listdir(tmp_path) == [NAME]


def test_a_large_file_is_written_in_turns_by_threads(tmp_path) -> None:
    size = 40_000
    tensors = {"a": torch.randn(size, 40), "b": torch.arange(size), "c": torch.randn(size, 33).to(torch.float16)}
    with TensorFileWriter(tmp_path / NAME, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}) as writer:
        for first in range(0, size, 999):
            for name, tensor in tensors.items():
                writer.write(name, tensor[first : first + 999])
        record = writer.close()
    assert record.size > file_writer._THREADS_FROM
    found = safetensors.torch.load_file(tmp_path / NAME)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with open_tensor_file(tmp_path / NAME, record) as file:
        parts = [{n: part.clone() for n, part in chunk.items()} for chunk in file.chunks(["a", "b", "c"], 1234)]
    assert {name: sum(part[name].shape[0] for part in parts) for name in tensors} == dict.fromkeys(tensors, size)
    assert all(torch.equal(torch.cat([part[name] for part in parts]), tensor) for name, tensor in tensors.items())


def test_reading_ahead_stops_when_nobody_wants_more(tmp_path) -> None:
    record = _write(tmp_path / NAME, {"a": torch.randn(5000, 4)})
    with open_tensor_file(tmp_path / NAME, record) as file:
        chunks = file.chunks(["a"], 10)
        assert torch.equal(next(chunks)["a"], file.read("a", 0, 10))
        chunks.close()


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda w: w.write("other", torch.zeros(1)), "no tensor 'other' was announced"),
        (
            lambda w: w.write("a", torch.zeros(2, 3, dtype=torch.float64)),
            r"takes torch.float32 rows of \[3\], got torch.flo",
        ),
        (lambda w: w.write("a", torch.zeros(2, 4)), r"takes torch.float32 rows of \[3\], got torch.float32 \[2, 4\]"),
        (lambda w: w.write("a", torch.zeros(6, 3)), "tensor 'a' has 60 bytes, got 72"),
        (lambda w: w.close(), "tensor 'a' has 60 bytes, only 0 were given"),
    ],
)
def test_a_wrong_or_missing_chunk_is_refused_and_leaves_nothing(tmp_path, give, message) -> None:
    with (
        pytest.raises(CheckpointError, match=message),
        TensorFileWriter(tmp_path / NAME, {"a": (torch.float32, (5, 3))}) as writer,
    ):
        give(writer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2])
def test_types_that_files_do_not_hold_are_named(tmp_path, dtype) -> None:
    with pytest.raises(CheckpointError, match=f"tensors of {dtype} cannot be saved; convert them to one of"):
        TensorFileWriter(tmp_path / NAME, {"a": (dtype, (1,))})
    assert os.listdir(tmp_path) == []


def test_names_that_files_do_not_hold_are_refused(tmp_path) -> None:
    for name in ("", "__metadata__", "x" * 5000, "\ud800"):
        with pytest.raises(CheckpointError, match="name"):
            TensorFileWriter(tmp_path / NAME, {name: (torch.float32, (1,))})


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (errno.ENOSPC, OSError, "free some room"),
        (errno.EDQUOT, OSError, "quota"),
        (errno.EIO, OSError, "check the disk"),
        (errno.EFBIG, OSError, "no file of this size"),
    ],
)
@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_failing_disk_is_explained_and_the_temporary_file_goes(
    tmp_path, monkeypatch, code, kind, advice, size
) -> None:
    (tmp_path / NAME).write_bytes(b"what was there")
    real = os.pwrite

    def failing(descriptor, data, offset):
        if offset > 60:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(kind, match=advice) as caught:
        _write(tmp_path / NAME, {"a": torch.zeros(size)})
    assert caught.value.errno == code and NAME in str(caught.value)
    assert os.listdir(tmp_path) == [NAME]
    assert (tmp_path / NAME).read_bytes() == b"what was there"


def test_a_limit_of_file_sizes_is_explained(tmp_path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="ulimit -f"):
            _write(tmp_path / NAME, {"a": torch.zeros(1 << 19)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_a_sync_that_fails_is_an_error(tmp_path, monkeypatch) -> None:
    def failing(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="cannot sync: Input/output error"):
        _write(tmp_path / NAME, {"a": torch.zeros(3)})
    assert os.listdir(tmp_path) == []


def test_a_missing_directory_keeps_its_kind_of_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="check the path"):
        _write(tmp_path / "none" / NAME, {"a": torch.zeros(3)})
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="no directory"):
        _write(tmp_path / "file" / NAME, {"a": torch.zeros(3)})


def test_no_permission_keeps_its_kind_of_error(tmp_path, monkeypatch) -> None:
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError, match="change the permissions"):
        _write(tmp_path / NAME, {"a": torch.zeros(3)})


# ------------------------------------------------------------------------------------------------------------ reading


def test_only_regular_files_are_opened(tmp_path) -> None:
    record = _write(tmp_path / NAME, {"a": torch.zeros(3)})
    (tmp_path / "link").symlink_to(tmp_path / NAME)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name, message in [
        ("link", "must be a regular file, got a link"),
        ("pipe", "must be a regular file, got a pipe"),
        ("directory", "must be a regular file, got a directory"),
        ("nothing", "is missing: the checkpoint is incomplete"),
    ]:
        with pytest.raises(CheckpointError, match=f"{name} {message}"):
            open_tensor_file(tmp_path / name, record)


def test_fault_42_a_truncated_or_longer_file_is_named(tmp_path) -> None:
    path = tmp_path / NAME
    record = _write(path, {"a": torch.randn(100), "b": torch.randn(7)})
    data = path.read_bytes()
    for size, word in [(0, "truncated"), (7, "truncated"), (len(data) - 1, "truncated"), (len(data) + 1, "longer")]:
        path.write_bytes((data + b"\0")[:size])
        with pytest.raises(
            CheckpointError, match=f"{NAME} must have {len(data)} bytes, got {size}: the file is {word}"
        ):
            open_tensor_file(path, record)


def test_every_flipped_bit_is_noticed_where_it_is(tmp_path) -> None:
    path = tmp_path / NAME
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4), "c": torch.tensor([True, False])}
    record = _write(path, tensors)
    data = path.read_bytes()
    with open_tensor_file(path, record) as file:
        regions = file.regions
    for bit in range(0, len(data) * 8, 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        name = next((n for n, r in regions.items() if r.offset <= bit // 8 < r.offset + r.size), "its header")
        with pytest.raises(CheckpointError, match=f"{NAME}.*{name}"), open_tensor_file(path, record) as file:
            file.verify()
        with pytest.raises(CheckpointError, match=NAME):
            _read_in_turns(path, record, tensors)  # reading all of a tensor checks it, too


def _read_in_turns(path, record, names) -> None:
    with open_tensor_file(path, record) as file:
        for name in names:
            file.read(name, 0, 1)
            file.read(name, 1)


def test_reads_outside_a_tensor_are_refused(tmp_path) -> None:
    record = _write(tmp_path / NAME, {"a": torch.randn(3, 2), "b": torch.zeros(4)})
    with open_tensor_file(tmp_path / NAME, record) as file:
        for first, rows in [(-1, 1), (0, 4), (4, 0), (2, -1)]:
            with pytest.raises(CheckpointError, match="tensor 'a' has 3 rows, asked for rows"):
                file.read("a", first, rows)
        with pytest.raises(CheckpointError, match="no tensor 'c'; it has a, b"):
            file.read("c")
        with pytest.raises(CheckpointError, match="differ in their number of rows"):
            file.chunks(["a", "b"], 2)


def _file(path, header: bytes, data: bytes = b"", length: int | None = None):
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def _entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}}",
        b"nothing",
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[2]}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        json.dumps(_entry(dtype="F31")).encode(),
        json.dumps(_entry(dtype=["F32"])).encode(),
        json.dumps(_entry(shape=[-2])).encode(),
        json.dumps(_entry(shape=[2.0])).encode(),
        json.dumps(_entry(shape=[True, 2])).encode(),
        json.dumps(_entry(shape=[1 << 62])).encode(),
        json.dumps(_entry(shape=[1 << 40, 1 << 40])).encode(),
        json.dumps(_entry(shape=[1] * 1000)).encode(),
        json.dumps(_entry(shape="22")).encode(),
        json.dumps(_entry(data_offsets=[1, 9])).encode(),
        json.dumps(_entry(data_offsets=[0, 1 << 70])).encode(),
        json.dumps({**_entry(), "b": _entry()["a"]}).encode(),  # overlap
        json.dumps({"__metadata__": {"x": "y"}, **_entry()}).encode(),
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
        b"\xff\xfe{}",
    ],
)
def test_a_hostile_header_is_one_error_without_allocation(tmp_path, header) -> None:
    path = _file(tmp_path / NAME, header, b"\0" * 8)
    record = _write(tmp_path / "good", {"a": torch.zeros(2)})
    tracemalloc.start()
    try:
        for known in (None, record):
            with pytest.raises(CheckpointError, match=NAME):
                open_tensor_file(path, known)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * path.stat().st_size + (1 << 20)


@pytest.mark.parametrize("length", [9, 1 << 20, (1 << 64) - 1, 100_000_001])
def test_an_absurd_header_length_is_refused(tmp_path, length) -> None:
    path = _file(tmp_path / NAME, b"{}", length=length)
    with pytest.raises(CheckpointError, match=f"no header of {length} bytes fits into a file of 10 bytes"):
        open_tensor_file(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6), cut=st.integers(0, 60)
)
def test_fuzzed_files_end_in_one_error_or_open(tmp_path, edits, cut) -> None:
    path = tmp_path / NAME
    record = _write(path, {"a": torch.zeros(3, 2), "b": torch.arange(4)})
    good = path.read_bytes()
    data = bytearray(good[: len(good) - cut])
    for at, value in edits:
        if at < len(data):
            data[at] = value
    path.write_bytes(data)
    for known in (None, record):
        problem = _problem_of(path, known, len(data))
        assert NAME in problem if problem else known is None or bytes(data) == good


def _problem_of(path, record, size: int) -> str:
    """What is wrong with a file; empty if it can be read."""
    try:
        with open_tensor_file(path, record) as file:
            file.verify()
            for name, region in file.regions.items():
                assert file.read(name).nbytes == region.size <= size
    except CheckpointError as error:
        return str(error)
    return ""


def test_layouts_are_aligned_and_need_no_order() -> None:
    tensors = {"z": (torch.uint8, (3,)), "a": (torch.float64, (2,)), "m": (torch.float16, (5,))}
    layout = file_layout(tensors)
    assert list(layout.regions) == ["a", "m", "z"]
    assert all(region.offset % region.dtype.itemsize == 0 for region in layout.regions.values())
    assert len(layout.prefix) % 64 == 0
    assert file_layout(dict(reversed(tensors.items()))) == layout


# ------------------------------------------------------------------------------------------------------------ workers


def test_tasks_of_a_lane_keep_their_order_and_held_bytes_their_limit() -> None:
    workers = OrderedWorkers(100, "test")
    done: dict[int, list[int]] = {lane: [] for lane in range(5)}
    for i in range(200):
        workers.put(i % 5, lambda i=i: done[i % 5].append(i), 30)
        assert workers._held <= 100
    workers.put(0, lambda: None, 10_000)  # larger than the limit: waits until it is alone
    workers.finish()
    assert done == {lane: list(range(lane, 200, 5)) for lane in range(5)}


def test_a_failed_task_reaches_the_caller_and_later_ones_do_not_run() -> None:
    workers = OrderedWorkers(100, "test")
    ran = []

    def fail():
        raise OSError(errno.EIO, "first")

    workers.put("a", fail, 1)
    with pytest.raises(OSError, match="first"):
        _put_many(workers, lambda: ran.append(1))
    with pytest.raises(OSError, match="first"):
        workers.finish()
    assert ran == []


def _put_many(workers: OrderedWorkers, task) -> None:
    for _ in range(100_000):
        workers.put("a", task, 60)
