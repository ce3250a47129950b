"""Cases on an accelerator, `nestpipe bench --device`, on the stand-in with CUDA's kernels, at a tiny scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import on_device_runs as cases
import pytest

from gloo_world import GlooWorld
from nestpipe_kernels.cli.bench import DEVICE_CASES
from nestpipe_kernels.cli.main import main

pytestmark = pytest.mark.multiprocess
TINY = ("--device", "npu", "--scale", "1e-5", "--repeat", "1")
LINES = {
    "copy": {"torch copy_"},
    "dedup": {"nestpipe", "torch.unique"},
    "row_sync": {"nestpipe", "nestpipe, indices on the host", "torch.index_select + index_copy_"},
    "row_update": {"nestpipe", "plain PyTorch"},
    "row_gradients": {"nestpipe", "torch.index_select + index_add_"},
    "device_store": {"nestpipe", "torch.index_select of known rows"},
    "host_rows": {"nestpipe", "torch copy_ of rows in order"},
    "lookup_pool": {"nestpipe", "torch.nn.functional.embedding_bag"},
    "train_step": {"nestpipe", "torch.nn.EmbeddingBag + Adagrad"},
    "nested": {"sequential", "dbp", "nested", "nested, lookups alike"},
}
"""Case -> what is measured in each of its shapes."""


@pytest.fixture(scope="module")
def world(emulated_library: Path) -> Iterator[GlooWorld]:
    made = GlooWorld(1)
    made.call(cases.use_cuda_kernels, str(emulated_library))
    yield made
    made.close()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] * (case == "nested")) for case in DEVICE_CASES]
)
def test_emulated_cuda_bench_case(world: GlooWorld, case: str) -> None:
    code, lines, messages = world.call(cases.run, *TINY, "--peers", "--only", case)
    assert code == 0, messages
    assert {line["impl"] for line in lines} - {"cupy.unique"} == LINES[case]
    for line in lines:
        assert line["case"] == case and line["median_ms"] > 0 and line["fraction_of_floor"] > 0
        assert line["device"] == "stand-in (npu:0)"


def test_emulated_cuda_bench_goes_on_after_a_case_that_fails(world: GlooWorld) -> None:
    code, lines, messages = world.call(cases.run_with_a_broken_case, *TINY, "--only", "dedup", "copy")
    assert code == 1 and {line["case"] for line in lines} == {"copy"}
    assert "case dedup failed: ValueError: broken" in messages and "1 of 2 cases failed: dedup" in messages


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nestpipe bench: name a CASE, or an accelerator with --device"),
        (["--device", "cpu"], "nestpipe bench: on cpu a case is named, as in: nestpipe bench dedup"),
        (["--device", "cuda"], "nestpipe bench: device 'cuda' needs a torch that was built with CUDA"),
        (["--peers", "dedup"], "nestpipe bench: options go after the case, as in: nestpipe bench dedup --peers"),
        (["--device", "cuda", "dedup"], "nestpipe bench: options go after the case"),
        (["--device", "tpu"], "nestpipe bench: unknown device 'tpu'"),
    ],
)
def test_bench_without_a_case_or_a_device(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments == ["--device", "cuda"] and _has_cuda():
        pytest.skip("there is a CUDA device")
    assert main(["bench", *arguments]) == 1
    assert says in capsys.readouterr().err


def _has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None
