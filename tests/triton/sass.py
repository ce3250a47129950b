"""Registers, spills and wide accesses of compiled CUDA kernels, read by the tools that triton's wheel carries.

python tests/triton/sass.py FILE...      of extensions, objects and cubins: a line for each kernel and processor;
                                         1 where one spills, or a kernel for aligned rows has no 128-bit accesses
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Kernel", "kernels_of", "main"]

ALIGNED = r"Li4E|(uint|float)4E|[vV]ectors"
"""In names of kernels for aligned rows: a width of 4, or a type of 16 bytes. Those for others read words."""


@dataclass
class Kernel:
    """One kernel for one processor."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spills: int
    """Instructions that read or write local memory."""
    wide_loads: int
    """LDG of 128 bits."""
    wide_stores: int
    fused: int
    """FFMA: division and roots are made of them, the rules of exactness have none."""

    def __str__(self) -> str:
        return (
            f"{self.arch:7} {self.registers:4} registers {self.stack_bytes:4} B stack {self.spills:3} spills "
            f"{self.wide_loads:3} LDG.128 {self.wide_stores:3} STG.128  {self.name}"
        )


def kernels_of(path: Path) -> list[Kernel]:
    """Every kernel in a cubin, an object file or an extension."""
    with tempfile.TemporaryDirectory() as folder:
        cubins = [path]
        if path.suffix != ".cubin":
            _run("cuobjdump", "-xelf", "all", str(path.resolve()), cwd=folder)
            cubins = sorted(Path(folder).glob("*.cubin"))
        return [kernel for cubin in cubins for kernel in _kernels_of_cubin(cubin)]


def _kernels_of_cubin(cubin: Path) -> Iterator[Kernel]:
    usage = _run("cuobjdump", "-res-usage", str(cubin))
    resources = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    }
    text = _run("cuobjdump", "-sass", str(cubin))
    arch = re.search(r"(?:arch = |target )(sm_\d+)|EF_CUDA_SM(\d+)", text)
    found = "?" if arch is None else arch.group(1) or f"sm_{arch.group(2)}"
    for part in re.split(r"\n\s*Function : ", text)[1:]:
        name = part.split("\n", 1)[0].strip()
        operations = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.a-z]*)", part, re.MULTILINE)
        registers, stack = resources[name]
        yield Kernel(
            _readable(name),
            found,
            registers,
            stack,
            sum(op.startswith(("LDL", "STL")) for op in operations),
            sum(op.startswith("LDG") and ".128" in op for op in operations),
            sum(op.startswith("STG") and ".128" in op for op in operations),
            sum(op.startswith("FFMA") for op in operations),
        )


def _readable(name: str) -> str:
    """The kernel's own name and its template's arguments, from the name of a function in a namespace without one."""
    found = re.search(r"_GLOBAL__N__[0-9a-f]+_\d+_\w+?_cu_[0-9a-f]{8}(?:_\d+)?(\d+)(\D\w*)", name)
    if found is None:
        return name
    length, rest = found.groups()
    return f"{rest[: int(length)]}{rest[int(length) :].split('Ev')[0]}"


def _run(tool: str, *arguments: str, cwd: str | None = None) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([path, *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def main(paths: list[str]) -> int:
    """Prints the report; see above."""
    bad = []
    for path in paths:
        kernels = kernels_of(Path(path))
        for kernel in kernels:
            print(kernel)
        bad += [f"{kernel.name} ({kernel.arch}) spills" for kernel in kernels if kernel.spills]
        bad += [
            f"{kernel.name} ({kernel.arch}) has no accesses of 128 bits"
            for kernel in kernels
            if re.search(ALIGNED, kernel.name) and not kernel.wide_loads + kernel.wide_stores
        ]
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
