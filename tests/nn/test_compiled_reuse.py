"""Compiled lookups that serve other modules and processes, gradients that are not asked for, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import nestpipe_kernels as nk
from nestpipe_kernels.nn import compiled

IDS = torch.tensor([1, 2, 3])


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def table(dim=4):
    return nk.nn.Embedding(20, dim, optimizer=nk.optim.SGD(lr=0.1))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.top = table(), nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(self.rows(ids)).sum()


def test_modules_that_are_alike_share_a_graph():
    """As those of torch do; a graph each would soon be more than the compiler's recompile_limit."""
    towers, counter = [Tower() for _ in range(10)], torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    expected = [tower(IDS) for tower in towers]
    for tower in towers:
        tower.compile(backend=counter)
    assert all(map(torch.equal, [tower(IDS) for tower in towers], expected))
    assert counter.frame_count == 1


def test_cached_code_of_another_process_is_for_tables_of_the_same_width(monkeypatch):
    """Inductor's cache on disk knows a graph by its operators and their arguments."""
    with torch._inductor.utils.fresh_inductor_cache():
        for dim in (4, 8):
            monkeypatch.setattr(compiled, "_numbers", itertools.count(10**6))  # as another process counts
            rows = table(dim)
            torch._dynamo.reset()
            total = torch.compile(lambda ids, rows=rows: rows(ids).sum())(IDS)
            torch.testing.assert_close(total, rows(IDS).sum())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_of_other_things_update_no_rows(backend):
    """As they leave .grad of parameters alone."""
    model = nn.Module()
    model.bag, model.factor = nk.nn.EmbeddingBag(20, 4, mode="sum", optimizer=nk.optim.SGD(lr=0.1)), nn.Linear(1, 3)

    def loss():
        return model.bag(IDS, torch.tensor([0]), model.factor(torch.ones(1))).tanh().sum()

    before, wanted = model.state_dict()["bag.weight"], list(model.factor.parameters())
    run = loss if backend is None else torch.compile(loss, backend=backend)
    found = torch.autograd.grad(run(), wanted)
    run().backward(inputs=wanted)
    assert torch.equal(model.state_dict()["bag.weight"], before)
    assert all(torch.equal(grad, parameter.grad) and grad.any() for grad, parameter in zip(found, wanted))
    run().backward()
    assert not torch.equal(model.state_dict()["bag.weight"], before)


@pytest.mark.parametrize(
    "use",
    [
        lambda rows, weight: nn.functional.linear(rows, weight),
        lambda rows, weight: torch.cat([rows, weight]).tanh(),
        lambda rows, weight: nn.functional.embedding(IDS, weight) * rows,
    ],
    ids=["linear", "cat", "embedding"],
)
def test_weight_as_an_argument_is_in_the_graph(use):
    def loss(module):
        return use(module(IDS), module.weight).square().sum()

    finals = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        module = table()
        run(module).backward()
        finals.append(module.state_dict()["weight"])
    assert torch.equal(*finals)


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(strict):
    with pytest.raises((TypeError, torch._dynamo.exc.Unsupported), match=r"torch\.export cannot take along rows"):
        torch.export.export(Tower(), (IDS,), strict=strict)


def test_what_is_no_input_is_named_as_without_a_compiler():
    module = table()
    with pytest.raises(TypeError, match="ids must be a tensor, got dict"):
        torch.compile(lambda ids: module(ids), backend="aot_eager")({"ids": IDS})


def test_weights_after_a_cut_are_compiled_once():
    """Each use of `weight` is another object, which compiled code must not look for again."""
    items = nk.nn.Embedding(9, 4, optimizer=nk.optim.SGD(lr=0.1))
    bias = torch.zeros(9)

    def scores(rows):
        for _ in range(1):  # a cut in a loop: this is not compiled, but what it calls
            torch._dynamo.graph_break()
        return torch.nn.functional.linear(rows, items.weight, bias)

    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(scores, backend=counter, dynamic=True)
    counts = []
    for samples in (3, 5, 4, 6, 7):
        run(torch.ones(samples, 4)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1]
