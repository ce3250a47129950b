"""Compiles every launch that the Triton operations make, for sm_80, sm_90 and sm_100, on a machine without a GPU.

    python tests/triton/compile_kernels.py      registers, spills and 128-bit accesses; 1 where a kernel spills, where
                                                rows are not read 16 bytes at a time, or where arithmetic is not IEEE's

The operations run on CPU tensors, with a recorder in place of each kernel's launch. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from sass import Kernel, kernels_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nestpipe_kernels import optim
from nestpipe_kernels.ops.lookup_pool import triton as lookup_pool
from nestpipe_kernels.ops.lookup_pool import triton_kernels as pool_kernels
from nestpipe_kernels.ops.lookup_pool.bags import Bags
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words
from nestpipe_kernels.ops.row_update import triton as row_update
from nestpipe_kernels.ops.row_update import triton_kernels as update_kernels
from nestpipe_kernels.types import DataType, PoolingType

__all__ = ["Launch", "compiled", "faults", "launches", "main"]

ARCHS = {80: False, 90: True, 100: False}
"""For which processors, and whether in every form of each kernel."""
SUM, MEAN, MAX, NONE = (mode.code for mode in (PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX, PoolingType.NONE))
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Launch:
    """What decides how a kernel is compiled."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Arguments that are multiples of 16."""
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.constants if value not in (False, 0))
        return f"{self.kernel}({told})"


class _Recorder:
    """Stands for a kernel; notes launches instead of making them."""

    def __init__(self, kernel: Any, noted: dict[Launch, Any]) -> None:
        self.kernel, self.noted = kernel, noted

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._note

    def _note(self, *values: Any, **named: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, values)) | {key: value for key, value in named.items() if key in names}
        constexprs = {p.name for p in self.kernel.params if p.is_constexpr}
        signature = tuple((name, "constexpr" if name in constexprs else _type(given[name])) for name in names)
        aligned = [n for n, v in given.items() if isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0]
        launch = Launch(
            self.kernel.__name__,
            signature,
            tuple((name, given[name]) for name in names if name in constexprs),
            tuple(aligned),
            tuple((key, value) for key, value in named.items() if key not in names),
        )
        self.noted[launch] = self.kernel


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


@contextmanager
def _recording(*modules: Any) -> Iterator[dict[Launch, Any]]:
    noted: dict[Launch, Any] = {}
    kept = [(m, n, k) for m in modules for n, k in vars(m).items() if n.endswith("_kernel")]
    for module, name, kernel in kept:
        setattr(module, name, _Recorder(kernel, noted))
    try:
        yield noted
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def _bags(modes: list[int], weighted: bool, size: int) -> Bags:
    """Segments of `size` occurrences each, in one bag or, for NONE, in as many."""
    offsets = [0]
    bags = [0]
    for mode in modes:
        offsets += [offsets[-1] + k for k in ([size] if mode != NONE else range(1, size + 1))]
        bags.append(len(offsets) - 1)
    n = offsets[-1]
    weights = torch.ones(n) if weighted else None
    return Bags(torch.arange(n) % 7, torch.tensor(offsets), tuple(bags), tuple(modes), weights)


def _pool(
    modes: list[int], dim: int, dtype: torch.dtype = torch.float32, weighted: bool = False, size: int = 9
) -> None:
    """Forward and backward; bags of more than 1,024 occurrences have launches of their own."""
    bags = _bags(modes, weighted, size)
    rows, total = torch.zeros(7, dim, dtype=dtype), torch.zeros(7, dim)
    outs = [torch.zeros(size, dim) for size in bags.sizes()]
    lookup_pool.pool_forward(rows, bags, outs)
    lookup_pool.pool_backward(outs, rows, bags, total)
    if not {MEAN, MAX} & set(modes):
        lookup_pool.pool_weight_grad(outs, rows, bags)


def _update(name: str, kind: DataType = DataType.FP32, **settings: Any) -> None:
    optimizer = getattr(optim, name)(**settings)
    words = embedding_words(64, kind) + optimizer.state_floats(64)
    rows, mask = torch.zeros(5, words + 4 - words % 4), torch.ones(5, dtype=torch.uint8)
    row_update.row_update(rows, torch.zeros(5, 64), optimizer, 1, torch.ones(5), mask, RowStorage(kind))


def cases(every: bool) -> None:
    """Calls that launch every kernel, and, if `every`, each of its forms."""
    _pool([SUM], 64, size=1500)
    _update("Adam")
    _update("RowWiseAdagrad")
    if not every:
        return
    _pool([SUM, NONE], 128, torch.bfloat16, weighted=True)
    _pool([MEAN], 1280, torch.float16)
    _pool([MAX], 2048)
    _pool([MEAN, MAX], 64)
    _update("SGD", momentum=0.9, weight_decay=0.1)
    _update("Adagrad", DataType.FP16)
    _update("AdamW", DataType.BF16)
    _update("RowWiseAdam", bias_correction="row")
    _update("FTRL")
    _update("LAMB", weight_decay=0.1)


def launches(every: bool) -> dict[Launch, Any]:
    """Every different launch of the cases, with its kernel."""
    with _recording(pool_kernels, update_kernels) as noted:
        cases(every)
    return noted


def compiled(launch: Launch, kernel: Any, arch: int) -> tuple[Kernel, str]:
    """The kernel as compiled for a processor, and its PTX."""
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(kernel, dict(launch.signature), dict(launch.constants), attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        return kernels_of(path)[0], made.asm["ptx"]


def faults(launch: Launch, found: Kernel, ptx: str) -> list[str]:
    """What must not be."""
    bad = []
    constants = dict(launch.constants)
    if found.spills:
        bad.append("spills registers")
    # A rounded division or root is made of fused operations; nothing else may be, and nothing may be flushed to zero.
    if "fma." in ptx or (found.fused and "div.rn" not in ptx and "sqrt.rn" not in ptx):
        bad.append("has fused multiply-adds")
    if ".ftz" in ptx or "approx" in ptx or "div.full" in ptx:
        bad.append("computes with less than IEEE 754 demands")
    wide = constants.get("ROW_WIDTH", constants.get("WIDTH", 1)) >= 4 and constants.get("COLUMNS", 64) > 32
    if wide and not found.wide_loads:
        bad.append("does not read rows 16 bytes at a time")
    return [f"{launch}, {found.arch}: {what}" for what in bad]


def report(arch: int) -> list[str]:
    """Compiles the launches for one processor and prints a line for each; what is wrong with them."""
    bad = []
    for launch, kernel in launches(ARCHS[arch]).items():
        found, ptx = compiled(launch, kernel, arch)
        print(f"{str(found).rsplit('  ', 1)[0]}  {launch}", flush=True)
        bad += faults(launch, found, ptx)
    return bad


def main() -> int:
    """Prints the report, two processors at a time; 1 where something is wrong."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        bad = [text for texts in pool.map(report, sorted(ARCHS, key=lambda arch: not ARCHS[arch])) for text in texts]
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
