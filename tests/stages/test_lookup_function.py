"""The autograd node of a lookup: outputs, the gradients it hands on, frozen tables, and what it must not keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe_kernels.stages.lookup_function import run_lookup
from nestpipe_kernels.types import LookupCall, PoolingType, StoreKeys, TableSpec

ROWS = torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7 + 1
SLOTS = torch.tensor([0, 1, 1, 3, 2, 0, 1, 2])
OFFSETS = torch.tensor([0, 3, 3, 5, 8])  # bags of segment 0: [0, 1, 1], []; of segment 1: [3, 2], [0, 1, 2]


def _call(mode: PoolingType = PoolingType.SUM, weights: Tensor | None = None) -> LookupCall:
    keys = StoreKeys(
        keys=SLOTS,
        tables=torch.tensor([0] * 3 + [1] * 5, dtype=torch.int32),
        bag_offsets=OFFSETS,
        segment_bags=(0, 2, 4),
        segment_modes=(mode.code, mode.code),
        weights=None if weights is None else weights.detach()[torch.arange(8) % weights.numel()],
    )
    return LookupCall(
        stores=[keys],
        output_shapes=[(2, 6), (2, 1)],
        views=[[(0, 3), (0, 0)]],
        finish=lambda outputs: outputs[0],
        weights=weights,
        weight_positions=[None if weights is None else torch.arange(8) % weights.numel()],
    )


def _expected(mode: str, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    first = F.embedding_bag(
        SLOTS[:3], rows, OFFSETS[:2], mode=mode, per_sample_weights=None if weights is None else weights[:3]
    )
    second = F.embedding_bag(
        SLOTS[3:], rows, OFFSETS[2:4] - 3, mode=mode, per_sample_weights=None if weights is None else weights[3:]
    )
    return torch.cat([second, first], dim=1)


def _specs(*trainable: bool) -> list[list[TableSpec]]:
    return [[TableSpec(f"t{i}", 10, None, 0, trainable=flag) for i, flag in enumerate(trainable)]]


class _Sink:
    def __init__(self) -> None:
        self.calls: list[tuple[LookupCall, list[list[Tensor | None]]]] = []

    def __call__(self, call: LookupCall, grads: list[list[Tensor | None]]) -> None:
        self.calls.append((call, grads))


@pytest.mark.parametrize("mode", [PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX])
def test_outputs_and_gradients_of_segments(mode: PoolingType) -> None:
    sink, call = _Sink(), _call(mode)
    output = run_lookup(call, [ROWS], [SLOTS], sink)
    torch.testing.assert_close(output, _expected(mode.value.lower(), ROWS), rtol=1e-6, atol=0)
    assert output.dtype is torch.float32
    scale = torch.arange(12, dtype=torch.float32).reshape(2, 6)
    (output * scale).sum().backward()
    [(received_call, [[first, second]])] = sink.calls
    assert received_call is call
    assert first is not None
    assert second is not None
    assert first.equal(scale[:, 3:])
    assert second.equal(scale[:, :3])


def test_int32_slots_and_padding() -> None:
    slots = SLOTS.to(torch.int32).clone()
    slots[1] = -1
    output = run_lookup(_call(PoolingType.MEAN), [ROWS], [slots], _Sink())
    assert output[0, 3:].equal((ROWS[0] + ROWS[1]) / 2)


def test_expanded_gradients_arrive_as_matrices() -> None:
    sink = _Sink()
    run_lookup(_call(), [ROWS], [SLOTS], sink).sum().backward()
    [(_, [[first, _]])] = sink.calls
    assert first is not None
    assert first.equal(torch.ones(2, 3))
    assert first.stride(1) == 1


def test_an_output_without_gradient_gives_none() -> None:
    sink = _Sink()
    call = replace(_call(), views=[[(0, 0), (1, 0)]], output_shapes=[(2, 3), (2, 3)], finish=tuple)
    used, _ = run_lookup(call, [ROWS], [SLOTS], sink)
    used.sum().backward()
    [(_, [[first, second]])] = sink.calls
    assert first is not None
    assert second is None


def test_without_gradients_there_is_no_graph() -> None:
    with torch.no_grad():
        assert not run_lookup(_call(), [ROWS], [SLOTS], _Sink()).requires_grad
    assert run_lookup(_call(), [ROWS], [SLOTS], _Sink()).requires_grad
    assert not run_lookup(_call(), [ROWS], [SLOTS], _Sink(), _specs(False, False)).requires_grad


def test_rows_may_change_after_forward() -> None:
    rows = ROWS.clone()
    output = run_lookup(_call(), [rows], [SLOTS], _Sink())
    rows.fill_(float("nan"))
    assert output.isfinite().all()


def test_gradient_of_weights() -> None:
    weights = torch.linspace(-1, 1, 8).requires_grad_()
    sink = _Sink()
    output = run_lookup(_call(weights=weights), [ROWS], [SLOTS], sink)
    torch.testing.assert_close(output, _expected("sum", ROWS, weights), rtol=1e-6, atol=1e-6)
    scale = torch.arange(12, dtype=torch.float32).reshape(2, 6)
    (output * scale).sum().backward()
    wanted = torch.linspace(-1, 1, 8).requires_grad_()
    (_expected("sum", ROWS, wanted) * scale).sum().backward()
    torch.testing.assert_close(weights.grad, wanted.grad, rtol=1e-6, atol=1e-6)
    assert len(sink.calls) == 1


def test_a_weight_that_two_occurrences_share_sums_its_gradients() -> None:
    weights = torch.tensor([0.5, 2.0, -1.0, 4.0]).requires_grad_()
    run_lookup(_call(weights=weights), [ROWS], [SLOTS], _Sink()).sum().backward()
    assert weights.grad is not None
    per_occurrence = ROWS[SLOTS].sum(1)
    torch.testing.assert_close(weights.grad, per_occurrence[:4] + per_occurrence[4:], rtol=1e-6, atol=0)


def test_fault_09_frozen_tables_with_trainable_weights() -> None:
    weights = torch.ones(8, requires_grad=True)
    sink = _Sink()
    run_lookup(_call(weights=weights), [ROWS], [SLOTS], sink, _specs(False, False)).sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, ROWS[SLOTS].sum(1), rtol=1e-6, atol=0)
    assert sink.calls == []


def test_a_frozen_table_beside_a_trainable_one_gets_no_gradient() -> None:
    sink = _Sink()
    run_lookup(_call(), [ROWS], [SLOTS], sink, _specs(True, False)).sum().backward()
    [(_, [[first, second]])] = sink.calls
    assert first is not None
    assert second is None


def test_second_derivatives_are_refused() -> None:
    output = run_lookup(_call(), [ROWS], [SLOTS], _Sink())
    scale = torch.ones(2, 6, requires_grad=True)
    weights = torch.ones(8, requires_grad=True)
    weighted: Any = run_lookup(_call(weights=weights), [ROWS], [SLOTS], _Sink())
    (grad,) = torch.autograd.grad((weighted * scale).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    assert output.requires_grad


def test_an_empty_batch() -> None:
    keys = StoreKeys(
        keys=torch.empty(0, dtype=torch.int64),
        tables=torch.empty(0, dtype=torch.int32),
        bag_offsets=torch.zeros(1, dtype=torch.int64),
        segment_bags=(0, 0),
        segment_modes=(0,),
    )
    call = LookupCall([keys], [(0, 3)], [[(0, 0)]], lambda outputs: outputs[0])
    sink = _Sink()
    output = run_lookup(call, [torch.empty(0, 3)], [torch.empty(0, dtype=torch.int64)], sink)
    assert output.shape == (0, 3)
    output.sum().backward()
    assert len(sink.calls) == 1
