"""Where tests find real data, and one torch thread per test process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

torch.set_num_threads(1)

LONG = (
    "test_policies",
    "test_exactness",
    "test_process_faults",
    "test_edges",
    "test_policy_runs",
    "test_plain_pytorch",
    "test_killed_saves",
    "test_long_run",
)
"""Files whose tests take longest together, the longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-seed", type=int, help="of tests that otherwise take theirs from the clock")


@pytest.fixture
def random_seed(request: pytest.FixtureRequest) -> int | None:
    """What --random-seed says: the one case to run; None: cases from the clock on."""
    given: int | None = request.config.getoption("--random-seed")
    return given


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then those that start processes, which takes long on a machine that has other work,
    so that no worker is left alone with one at the end."""
    for item in items:
        if item.get_closest_marker("multiprocess") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
    first = {item.path for item in items if item.get_closest_marker("multiprocess")}
    longest = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: (longest.get(item.path.stem, len(LONG)), item.path not in first))


def _from_environment(variable: str, *parts: str) -> Path:
    """The file that an environment variable leads to; without it the test is skipped, or fails where CI=true."""
    root = os.environ.get(variable)
    if root and (path := Path(root, *parts)).is_file():
        return path
    reason = f"{variable} is not set" if not root else f"{variable} leads to no file {Path(root, *parts)}"
    return _missing(f"real data is required in CI: {reason}", reason)


def _missing(in_ci: str, reason: str) -> NoReturn:
    """Skip with a reason; where CI=true, fail: there everything must be at hand."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(in_ci, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def emulated_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Object files of the extension of CUDA kernels for the CPU, the emulator included: once for all test processes."""
    import emulated_cuda

    own = tmp_path_factory.getbasetemp()
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    return emulated_cuda.build((own if alone else own.parent) / "emulated_cuda")


@pytest.fixture(scope="session")
def emulated_library(emulated_objects: list[Path]) -> Path:
    """They linked, as a Python extension."""
    return emulated_objects[0].with_name("_cuda.so")


@pytest.fixture(scope="session")
def criteo_sample() -> Path:
    """200 rows of Criteo, CSV with a header (NESTPIPE_TEST_DATA/criteo_sample.txt)."""
    return _from_environment("NESTPIPE_TEST_DATA", "criteo_sample.txt")


@pytest.fixture(scope="session")
def movielens_sample() -> Path:
    """200 rows of MovieLens-1M, CSV with a header (NESTPIPE_TEST_DATA/movielens_sample.txt)."""
    return _from_environment("NESTPIPE_TEST_DATA", "movielens_sample.txt")


@pytest.fixture(scope="session")
def ml100k() -> Path:
    """The whole of MovieLens-100K in RecBole's format (NESTPIPE_TEST_ML100K names the .inter file)."""
    return _from_environment("NESTPIPE_TEST_ML100K")


@pytest.fixture(scope="session")
def can_make_networks() -> None:
    """For tests that make network namespaces (root, iproute2)."""
    from nestpipe_kernels.launch.network import why_no_network

    reason = why_no_network()
    if reason:
        _missing(f"network namespaces are required in CI: {reason}", reason)
