"""CUDA kernels, run by the emulator in random orders, give what the references give, bit for bit; and the emulator sees
bugs: each is planted into a copy of a CUDA source, which is then run as the others are."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import emulated_cuda as emulated
from emulated_cuda import CSRC, EmulatedCuda, planted, seeds_that_see
from nestpipe_kernels.ops.bucketize import reference as bucketize_reference
from nestpipe_kernels.ops.dedup import reference as dedup_reference
from nestpipe_kernels.ops.gather_rows import reference as gather_reference
from nestpipe_kernels.ops.row_storage import pack_embeddings
from nestpipe_kernels.ops.row_sync import reference as sync_reference
from nestpipe_kernels.ops.scatter_add_rows import reference as scatter_reference
from nestpipe_kernels.types import DataType

SIZES = [0, 1, 63, 2300]
EXTREMES = torch.tensor([0, -1, -2, 2**63 - 1, -(2**63), 2**32, -(2**32)])


def some_keys(size: int, distinct: int) -> Tensor:
    """Keys of the whole int64 range, some more frequent than others, equal ones far apart and side by side."""
    generator = torch.Generator().manual_seed(size * 31 + distinct)
    pool = torch.randint(-(2**63), 2**63 - 1, (distinct,), generator=generator)
    pool[: len(EXTREMES)] = EXTREMES[:distinct]
    skewed = torch.rand(size, generator=generator) ** 3 * distinct
    return pool[skewed.long()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("distinct", [1, 40, 5000])
@pytest.mark.parametrize("with_tables", [False, True])
def test_emulated_cuda_dedup(cuda: EmulatedCuda, size: int, distinct: int, with_tables: bool) -> None:
    keys = some_keys(size, distinct)
    generator = torch.Generator().manual_seed(size)
    tables = torch.randint(-2, 2, (size,), generator=generator).int() if with_tables else None
    unique_index, inverse, counts = cuda.dedup(keys, tables)
    expected = dedup_reference.dedup(keys, tables)
    assert torch.equal(unique_index, expected.unique_index)
    assert torch.equal(inverse, expected.inverse)
    assert torch.equal(counts, expected.counts)


def test_emulated_cuda_dedup_of_keys_that_share_slots(cuda: EmulatedCuda) -> None:
    """300 keys, each twice, 300 apart: 1,024 slots, so many chains have several entries pushed at the same time."""
    keys = torch.arange(300).repeat(2)
    unique_index, inverse, counts = cuda.dedup(keys, None)
    assert torch.equal(unique_index, torch.arange(300))
    assert torch.equal(inverse, keys.int())
    assert torch.equal(counts, torch.full((300,), 2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_buckets", [1, 7, 256, 257, 70_000])
def test_emulated_cuda_bucketize(cuda: EmulatedCuda, size: int, num_buckets: int) -> None:
    generator = torch.Generator().manual_seed(size + num_buckets)
    buckets = (torch.rand(size, generator=generator) ** 2 * num_buckets).int()
    order, counts, bad = cuda.bucketize(buckets, num_buckets)
    expected_order, expected_counts, _ = bucketize_reference.bucketize(buckets, num_buckets)
    assert bad == -1
    assert torch.equal(order, expected_order)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("value", [-1, 7, 2**31 - 1, -(2**31)])
def test_emulated_cuda_bucketize_names_the_first_bad_position(cuda: EmulatedCuda, value: int) -> None:
    buckets = torch.arange(900).int() % 7
    buckets[[411, 640, 899]] = value
    assert cuda.bucketize(buckets, 7)[2] == 411
    assert cuda.bucketize(buckets[:1], 0)[2] == 0


@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize(("dim", "stride"), [(1, 3), (7, 8), (8, 16), (64, 80), (200, 200), (2048, 2052)])
def test_emulated_cuda_gather_rows(cuda: EmulatedCuda, dim: int, stride: int, data_type: DataType) -> None:
    generator = torch.Generator().manual_seed(dim)
    rows = torch.full((50, stride), float("nan"))
    pack_embeddings(torch.randn(50, dim, generator=generator), rows, data_type)
    index = torch.randint(0, 50, (90,), generator=generator)
    out, expected = torch.full((90, stride), 7.0), torch.full((90, stride), 7.0)
    assert cuda.gather_rows(rows, index, out[:, :dim], data_type) == -1
    gather_reference.gather_rows(rows, index, dim, expected[:, :dim], data_type)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("row_floats", [1, 6, 64, 516])
@pytest.mark.parametrize("size", [0, 1, 63, 300])
def test_emulated_cuda_row_sync(cuda: EmulatedCuda, row_floats: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    bits = torch.randint(-(2**31), 2**31, (2, 310, row_floats), generator=generator).int()  # NaNs among them
    source, target = bits.view(torch.float32)
    expected = target.clone()
    source_index = torch.randint(0, 310, (size,), generator=generator)
    target_index = torch.randperm(310, generator=generator)[:size]
    assert cuda.row_sync(source, target, source_index, target_index) == -1
    sync_reference.row_sync(source, expected, source_index, target_index)
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", ["scatter_rows", "scatter_add_rows", "zero_rows"])
@pytest.mark.parametrize(("dim", "stride"), [(1, 1), (7, 9), (64, 64), (130, 132)])
def test_emulated_cuda_scatter_rows(cuda: EmulatedCuda, kind: str, dim: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    target = torch.randn(200, stride, generator=generator)
    expected = target.clone()
    index = torch.randperm(200, generator=generator)[:150]
    source = torch.randn(150, stride, generator=generator)[:, :dim] if kind != "zero_rows" else None
    assert cuda.scatter_rows(kind, target[:, :dim], index, source) == -1
    given = (expected[:, :dim], index) if source is None else (expected[:, :dim], index, source)
    getattr(scatter_reference, kind)(*given)
    assert torch.equal(target, expected)


def test_emulated_cuda_rows_out_of_range_are_left_out_and_the_first_is_named(cuda: EmulatedCuda) -> None:
    rows, index = torch.arange(40.0).view(10, 4), torch.tensor([3, 0, 10, 5, -1, 2**40])
    out = torch.full((6, 4), 7.0)
    assert cuda.gather_rows(rows, index, out) == 2
    assert torch.equal(out[[0, 1, 3]], rows[[3, 0, 5]])
    assert bool((out[[2, 4, 5]] == 7).all())
    target = torch.zeros(10, 4)
    assert cuda.scatter_rows("scatter_rows", target, index, out) == 2
    assert torch.equal(target[[3, 0, 5]], out[[0, 1, 3]])
    good = torch.arange(6)
    assert cuda.row_sync(rows, target, good, index) == 2
    assert cuda.row_sync(rows, target, index, good) == 2


# ----------------------------------------------------------------------------------------------------- planted bugs

SANITIZE = "-fsanitize=address"
GIB = 2**30


def dedup_is_right(cuda: EmulatedCuda) -> bool:
    """Few keys, each in several warps at the same time."""
    keys = torch.arange(600) % 150
    unique_index, inverse, counts = cuda.dedup(keys, None)
    return (
        unique_index.tolist() == list(range(150)) and torch.equal(inverse.long(), keys) and set(counts.tolist()) == {4}
    )


def bucketize_is_right(cuda: EmulatedCuda) -> bool:
    buckets = torch.arange(900).int() % 5
    order, counts, _ = cuda.bucketize(buckets, 5)
    return torch.equal(order, torch.sort(buckets, stable=True).indices) and counts.tolist() == [180] * 5


def far_rows() -> Tensor:
    """A matrix of 12 GiB of address space, hardly any of it touched: row 3 begins beyond 2^31 floats."""
    memory = mmap.mmap(-1, 12 * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    return torch.frombuffer(memory, dtype=torch.float32).view(4, -1)


def far_rows_are_right(cuda: EmulatedCuda) -> bool:
    rows = far_rows()
    rows[3, :4] = torch.arange(4.0)
    out = torch.zeros(1, 4)
    return cuda.gather_rows(rows, torch.tensor([3]), out) == -1 and out.tolist() == [[0.0, 1.0, 2.0, 3.0]]


BUGS = {
    "a lost compare-and-swap": (
        "keys/pair_chains.cuh",
        {
            "swap_if_equal_release(head_address, head, position)": "load_racing(head_address)",
            "if (found == head) return position;": "if (found == head) { store_racing(head_address, position); "
            "return position; }",
        },
        dedup_is_right,
    ),
    "a minimum that is only stored": (
        "keys/pair_chains.cuh",
        {"atomicMin(chains.first + entry, here)": "store_racing(chains.first + entry, here)"},
        dedup_is_right,
    ),
    "no barrier after counting": (
        "keys/bucketize.cu",
        {"shared.counts[warp], ranks);\n  __syncthreads();": "shared.counts[warp], ranks);"},
        bucketize_is_right,
    ),
    "no warp barrier between rounds": (
        "keys/bucketize.cu",
        {"      __syncwarp(active);\n": "", "    __syncwarp();\n": ""},
        bucketize_is_right,
    ),
    "an index of 32 bits": (
        "buffers/gather_rows.cu",
        {"reinterpret_cast<const uint4*>(a.rows + row * a.row_stride)": "reinterpret_cast<const uint4*>(a.rows + "
         "static_cast<int>(row * a.row_stride))"},
        far_rows_are_right,
    ),
}  # fmt: skip


def test_emulated_cuda_sees_nothing_where_nothing_is_planted(emulated_library: Path) -> None:
    for is_right in (dedup_is_right, bucketize_is_right, far_rows_are_right):
        assert seeds_that_see(emulated_library, is_right) == 0


LATER = {"a minimum that is only stored", "no warp barrier between rounds"}


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.soak] * (bug in LATER)) for bug in BUGS])
def test_emulated_cuda_sees(emulated_objects: list[Path], tmp_path: Path, bug: str) -> None:
    source, changes, is_right = BUGS[bug]
    user = "keys/dedup.cu" if source.endswith(".cuh") else ""
    assert seeds_that_see(planted(emulated_objects, source, changes, tmp_path, user), is_right) >= 2


def test_emulated_cuda_names_a_barrier_that_not_all_reach(emulated_objects: list[Path], tmp_path: Path) -> None:
    header, right = (CSRC / "cuda" / "scan.cuh").read_text(), "  int up_to_here = value;\n"
    assert header.count(right) == 1
    (tmp_path / "scan.cuh").write_text(header.replace(right, f"  if (lane == 0) __syncthreads();\n{right}"))
    cuda = EmulatedCuda(planted(emulated_objects, "cuda/scan.cu", {}, tmp_path))
    with pytest.raises(RuntimeError, match="no thread can go on: 8 wait at a barrier of their block and 248 for lanes"):
        cuda.bucketize(torch.zeros(1).int(), 1)


def assert_sanitizer_says(words: str, program: Path, *arguments: str) -> None:
    """Nothing where the words are empty."""
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=100)
    assert (done.returncode == 0) == (not words) and words in done.stderr, done.stderr


def test_emulated_cuda_under_address_sanitizer_sees_a_write_out_of_bounds(tmp_path: Path) -> None:
    sources = [Path(__file__).with_name(name) for name in ("emulator.cpp", "bounds_program.cpp")]
    objects = emulated.compile_all(sources, tmp_path, "-O0", SANITIZE)
    program = emulated.link(objects, tmp_path / "bounds", SANITIZE)
    for place in ([], ["shared memory"]):
        assert_sanitizer_says("", program, "64", *place)
        assert_sanitizer_says("heap-buffer-overflow", program, "65", *place)


@pytest.mark.soak
def test_emulated_cuda_dedup_under_address_sanitizer(tmp_path: Path) -> None:
    right, wrong = "if (i < size) counts[i] = 0;", "if (i <= size) counts[i] = 0;"
    text = (CSRC / "keys" / "dedup.cu").read_text().replace('#include "../cuda/', '#include "')
    assert text.count(right) == 1
    changed = tmp_path / "planted.cu"
    changed.write_text(text.replace(right, wrong))
    sources = [Path(__file__).with_name(name) for name in ("emulator.cpp", "dedup_program.cpp")]
    sources += [CSRC / "cuda" / "scan.cu", CSRC / "keys" / "dedup.cu", changed]
    *shared, good, bad = emulated.compile_all(sources, tmp_path, "-O0", SANITIZE)
    for made, words in ((good, ""), (bad, "heap-buffer-overflow")):
        assert_sanitizer_says(words, emulated.link([*shared, made], tmp_path / "dedup", SANITIZE))
