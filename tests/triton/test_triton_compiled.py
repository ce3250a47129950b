"""What must not be in a compiled Triton kernel is seen; `make triton` compiles all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

compile_kernels = pytest.importorskip("compile_kernels", reason="triton is not installed: no kernel is compiled")


@pytest.fixture(scope="module")
def forward():
    """The launch that pools a bag's rows, and its kernel."""
    found = compile_kernels.launches(every=False)
    return next((launch, kernel) for launch, kernel in found.items() if launch.kernel == "lookup_pool_fwd_kernel")


@pytest.mark.soak
def test_soak_triton_kernel_has_wide_loads_and_no_spills(forward):
    found, ptx = compile_kernels.compiled(*forward, 90)
    assert found.wide_loads >= 8 and found.wide_stores and found.registers <= 128
    assert compile_kernels.faults(forward[0], found, ptx) == []


def test_triton_kernel_that_spills_or_fuses_is_seen(forward):
    launch, kernel = forward
    constants = tuple((name, True if name == "WEIGHTED" else value) for name, value in launch.constants)
    options = (("num_warps", 1), ("enable_fp_fusion", True), ("maxnreg", 24))
    spoilt = replace(launch, constants=constants, options=options, aligned=())
    seen = " ".join(compile_kernels.faults(launch, *compile_kernels.compiled(spoilt, kernel, 90)))
    assert "spills registers" in seen and "fused multiply-adds" in seen and "16 bytes at a time" in seen
