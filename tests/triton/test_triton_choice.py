"""Which implementation an operation takes: what was asked for, the best of a device, or an error that says why."""

from __future__ import annotations

import pytest
import torch

from nestpipe_kernels import _native, config
from nestpipe_kernels.ops import _registry as registry
from nestpipe_kernels.ops import _triton, lookup_pool, row_update

CPU, CUDA, XPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    """No word from the environment; triton as if it could be imported, and native kernels for no device but the CPU."""
    monkeypatch.delenv("NESTPIPE_KERNELS", raising=False)
    registry._forced.cache_clear()
    monkeypatch.setattr(_triton, "_import_problem", lambda: None)
    monkeypatch.setattr(_triton, "interpreted", lambda: False)
    monkeypatch.setattr(_native, "kernels", lambda device_type: None)
    yield
    registry._forced.cache_clear()


def chosen(device, asked=None, order=("triton", "native"), but=""):
    return registry.chosen("op", device, asked, order, but=but)


def test_triton_comes_first_where_it_stands_first(monkeypatch):
    assert chosen(CUDA) == "triton"
    monkeypatch.setattr(_native, "kernels", lambda device_type: object() if device_type == "cuda" else None)
    assert chosen(CUDA) == "triton"
    assert chosen(CUDA, order=("native", "triton")) == "native"
    assert chosen(CUDA, order=("triton",), but="no such rounding") == "reference"
    assert chosen(CUDA, but="no such rounding") == "native"


def test_the_order_of_the_operations():
    assert lookup_pool.ON_ACCELERATORS == ("triton", "native")
    assert row_update.ON_ACCELERATORS == ("native", "triton")


def test_places_of_several_matrices_go_over_without_waiting(monkeypatch):
    """Memory of the host that is not pinned makes it wait for all that the stream has been given."""
    put, matrices = [], [torch.zeros(2, 4), None, torch.zeros(3, 4)]
    monkeypatch.setattr(_triton, "place", lambda tensor, like: put.append(like) or tensor)
    _, places, _ = _triton.row_places(matrices, [2, 1, 3], matrices[0])
    assert len(put) == 1 and len(places) == 6


def test_other_devices_and_the_cpu():
    assert chosen(CPU) == "native"
    assert chosen(XPU) == "reference"
    assert chosen(XPU, "reference") == chosen(CPU, "reference") == "reference"


def test_without_triton_native_kernels_serve(monkeypatch):
    monkeypatch.setattr(_triton, "_import_problem", lambda: "triton cannot be imported (No module named 'triton')")
    assert chosen(CUDA) == "reference"
    monkeypatch.setattr(_native, "kernels", lambda device_type: object())
    assert chosen(CUDA) == "native"
    with pytest.raises(ValueError, match="op: implementation 'triton' cannot be used here: triton cannot be imported"):
        chosen(CUDA, "triton")


@pytest.mark.parametrize(
    ("device", "asked", "order", "message"),
    [
        (CPU, "triton", ("triton",), "Triton kernels need tensors of a CUDA device, got cpu"),
        (XPU, "triton", ("triton",), "Triton kernels need tensors of a CUDA device, got xpu"),
        (CUDA, "triton", ("native",), "it has none for tensors of cuda devices"),
        (CUDA, "native", ("native",), "this installation has no kernels for cuda"),
    ],
)
def test_what_was_asked_for_works_or_is_an_error(device, asked, order, message):
    with pytest.raises(ValueError, match=f"op: implementation {asked!r} cannot be used here: {message}"):
        chosen(device, asked, order)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="op: unknown implementation 'fast': choose native, triton or reference"):
        chosen(CUDA, "fast")


def test_the_environment_decides_for_accelerators(monkeypatch):
    monkeypatch.setenv("NESTPIPE_KERNELS", "reference")
    assert chosen(CUDA) == "reference" and chosen(CPU) == "native" and chosen(CUDA, "triton") == "triton"


def test_a_wrong_word_in_the_environment(monkeypatch):
    monkeypatch.setenv("NESTPIPE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="NESTPIPE_KERNELS must be one of native, triton, reference, or empty, got 'c"):
        config.default_kernels()
