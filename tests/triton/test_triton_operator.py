"""torch.ops.nestpipe.lookup_pool: torch's checks of an operator, one graph, the bits of the operations behind it."""

from __future__ import annotations

import pytest
import torch
from row_cases import MAX, MEAN, NONE, SUM, bag_case, bits

from nestpipe_kernels.ops.lookup_pool import operator, pool_backward, pool_forward, pool_weight_grad
from nestpipe_kernels.ops.lookup_pool.operator import lookup_pool
from nestpipe_kernels.types import PoolingType

MODES = {mode.code: mode for mode in PoolingType}


def arguments(mode: int, weighted: bool) -> tuple[torch.Tensor, ...]:
    """Rows, slots, offsets and weights; what can be trained requires a gradient."""
    case = bag_case(mode, [mode], size=20, dim=5, weighted=weighted)
    weights = None if case.weights is None else case.weights.requires_grad_()
    return case.rows.contiguous().requires_grad_(), case.slots, case.bag_offsets, weights


@pytest.mark.parametrize(("mode", "weighted"), [(SUM, True), (MAX, False)])
def test_torch_accepts_the_operator(mode, weighted):
    """Schema, fake tensors, autograd, and what AOTAutograd makes of it with symbolic shapes."""
    torch.library.opcheck(torch.ops.nestpipe.lookup_pool.default, (*arguments(mode, weighted), mode))


@pytest.mark.parametrize(("mode", "weighted"), [(SUM, False), (SUM, True), (MEAN, False), (MAX, False), (NONE, True)])
def test_the_operator_has_the_bits_of_the_operations(mode, weighted):
    rows, slots, offsets, weights = arguments(mode, weighted)
    pooled = lookup_pool(rows, slots, offsets, weights, MODES[mode])
    grad = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1))
    pooled.backward(grad)
    bags = slots, offsets, [0, len(pooled)], [mode]
    out, total = torch.empty_like(pooled), torch.zeros_like(rows)
    pool_forward(rows.detach(), *bags, [out], weights)
    pool_backward([grad], rows.detach(), *bags, weights, total)
    assert torch.equal(bits(pooled), bits(out)) and torch.equal(bits(rows.grad), bits(total))
    if weights is not None:
        assert torch.equal(bits(weights.grad), bits(pool_weight_grad([grad], rows.detach(), *bags)))


class Bags(torch.nn.Module):
    """A table of parameters whose rows are pooled, and something dense behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(40, 5, generator=torch.Generator().manual_seed(3)))
        self.top = torch.nn.Linear(5, 2)

    def forward(self, slots: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        return self.top(lookup_pool(self.table, slots, offsets, weights).relu())


def test_a_compiled_module_is_one_graph_with_the_same_bits():
    """Over batches of other sizes, without compiling for each."""
    model = Bags()
    counter = torch._dynamo.testing.CompileCounter()
    for backend in ("aot_eager", counter):
        torch._dynamo.reset()  # what another backend has compiled of this code may be taken otherwise
        compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
        for size in (20, 33, 50):
            case = bag_case(size, [SUM], size=size, dim=5, weighted=True)
            found = []
            for run in (model, compiled):
                model.zero_grad()
                run(case.slots, case.bag_offsets, case.weights).sum().backward()
                found.append(bits(model.table.grad))
            assert torch.equal(*found)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slots": torch.tensor([0, 99])}, IndexError, r"slots must lie in \[-1, 40\)"),
        ({"offsets": torch.tensor([0, 1])}, ValueError, r"bag_offsets must end at the number of slots \(2\), got 1"),
        ({"slots": torch.zeros(2)}, TypeError, "slots must be an int32 or int64 CPU tensor, got float32"),
        ({"mode": PoolingType.MAX}, ValueError, "per-sample weights need pooling sum or none, got max"),
    ],
)
def test_what_the_operator_refuses(change, error, message):
    call = {"slots": torch.tensor([0, 1]), "offsets": torch.tensor([0, 2]), "weights": torch.ones(2)} | change
    with pytest.raises(error, match=message):
        lookup_pool(torch.zeros(40, 5), **call)


def test_what_is_elsewhere_than_the_rows_is_refused():
    elsewhere = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(TypeError, match=r"lookup_pool: slots must be on cpu, as rows are, got int64 on meta \(shape"):
        operator._check_places(torch.zeros(4, 2), elsewhere, elsewhere, None)
