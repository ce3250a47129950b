"""Without a pipeline, the updates at the end of a backward: collective, so alike on all ranks."""

from __future__ import annotations

import pytest
import torch

import nestpipe_kernels as nk
from nestpipe_kernels.stages.eager import EagerContext
from nestpipe_kernels.stages.lookup_function import bare_answers

IDS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_modules_are_updated_in_the_order_of_their_first_calls(order, monkeypatch):
    """Compiled code runs backward as it likes, by the sizes on each rank, and every update is collective."""
    modules = [nk.nn.Embedding(20, 4, optimizer=nk.optim.SGD(lr=0.1)) for _ in range(2)]
    updated = []
    monkeypatch.setattr(EagerContext, "_finish", lambda context, reached: updated.append(context._module))
    with bare_answers() as lookups:
        for module in modules:
            module.answer(IDS)

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            for k in order:
                lookups[k].backward([torch.ones(3, 4)], True, False)
            return grad

    Compiled.apply(torch.ones(1, requires_grad=True)).backward()
    assert updated == modules
