"""Which dense parameters a pipeline averages: frozen ones, those beside the model, odd kinds; and odd optimizers."""

import pytest
import torch
from small_model import Recommender, make_batch
from torch import nn

from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.threads import run_ranks_as_threads

CONFIG = PipelineConfig(num_micro_batches=2, timeout_s=20.0)


def batches(rank):
    return [make_batch(10 * t + rank) for t in range(4)]


def plain_losses(model, parameters, loss_of, between=lambda index: None):
    """One process without pipeline, whole batches, SGD 0.1; rows by the module's own updates."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for index, batch in enumerate(batches(0)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        between(index)
    return losses


def test_a_parameter_unfrozen_later_trains_as_in_plain_pytorch():
    def freeze(model):
        model.linear.weight.requires_grad_(False)
        return model

    model, plain = freeze(Recommender()), freeze(Recommender())
    losses = []
    with NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG) as pipeline:
        for step in pipeline.run(batches(0)):
            losses.append(float(step.loss))
            model.linear.weight.requires_grad_(True)
    expected = plain_losses(
        plain, plain.parameters(), lambda m, b: m(b)[0], lambda _: plain.linear.weight.requires_grad_(True)
    )
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_a_parameter_unfrozen_later_stays_alike_on_all_ranks():
    def body(rank, communicator):
        model = Recommender(communicator)
        model.linear.weight.requires_grad_(False)
        start = model.linear.weight.clone()
        with NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG) as pipeline:
            for _ in pipeline.run(batches(rank)):
                model.linear.weight.requires_grad_(True)
        return start, model.linear.weight.detach()

    (start, first), (_, second) = run_ranks_as_threads(2, body)
    assert torch.equal(first, second)
    assert not torch.equal(first, start)


def head_loss(head):
    return lambda model, batch: (((head(model(batch)[1][:, None]).squeeze(1) - batch.label) ** 2).mean(), None)


def make_head(weight):
    head = nn.Linear(1, 1, bias=False)
    head.weight.data.fill_(weight)
    return head


def test_parameters_of_the_loss_function_train_as_in_plain_pytorch():
    model, plain, head, other = Recommender(), Recommender(), make_head(0.5), make_head(0.5)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with NestedPipeline(model, optimizer, head_loss(head), CONFIG) as pipeline:
        losses = [float(step.loss) for step in pipeline.run(batches(0))]
    expected = plain_losses(plain, [*plain.parameters(), *other.parameters()], lambda m, b: head_loss(other)(m, b)[0])
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight, other.weight, rtol=1e-4, atol=1e-5)


def test_parameters_of_the_loss_function_stay_alike_on_all_ranks():
    def body(rank, communicator):
        model, head = Recommender(communicator), make_head(0.5 + rank)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        with NestedPipeline(model, optimizer, head_loss(head), CONFIG) as pipeline:
            for _ in pipeline.run(batches(rank)):
                pass
        return head.weight.item()

    first, second = run_ranks_as_threads(2, body)
    assert first == second != 0.5


def test_a_parameter_that_the_optimizer_gets_later_is_refused():
    model, head = Recommender(), make_head(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NestedPipeline(model, optimizer, head_loss(head), CONFIG) as pipeline:
        optimizer.add_param_group({"params": head.parameters()})
        expected = (
            r"dense_optimizer.param_groups\[1\]\['params'\]\[0\] \(shape \[1, 1\]\) came into the optimizer after"
        )
        with pytest.raises(ValueError, match=expected):
            pipeline.progress(iter(batches(0)))


def test_complex_parameters_are_refused():
    model = Recommender()
    model.filter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="parameter 'filter' is complex64; dense gradients travel as real numbers"):
        NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG)


def test_optimizers_that_cannot_step_alone_are_refused():
    model = Recommender()
    with pytest.raises(TypeError, match=r"LBFGS.step\(\) needs closure; a pipeline computes every batch once"):
        NestedPipeline(model, torch.optim.LBFGS(model.parameters()), config=CONFIG)
    with pytest.raises(TypeError, match=r"dense_optimizer must have a step\(\) method, got list"):
        NestedPipeline(model, [torch.optim.SGD(model.parameters(), lr=0.1)], config=CONFIG)


def test_an_optimizer_with_a_scheduler_is_taken():
    """Schedulers replace its step() by a function that claims to need self."""
    model = Recommender()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with NestedPipeline(model, optimizer, config=CONFIG) as pipeline:
        assert pipeline.rank.dense_optimizer is optimizer
    lbfgs = torch.optim.LBFGS(model.parameters())
    torch.optim.lr_scheduler.StepLR(lbfgs, 1)
    with pytest.raises(TypeError, match=r"LBFGS.step\(\) needs closure;"):
        NestedPipeline(model, lbfgs, config=CONFIG)


def test_buffers_of_any_kind_are_shared():
    def body(rank, communicator):
        model = Recommender(communicator)
        model.register_buffer("expanded", torch.full((1, 3), float(rank)).expand(4, 3))
        model.register_buffer("empty", torch.zeros(0))
        model.register_buffer("flag", torch.tensor(rank == 0))
        model.register_buffer("half_size", torch.full((2,), float(rank), dtype=torch.bfloat16))
        with NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG):
            return [buffer.tolist() for buffer in model.buffers()]

    for found in run_ranks_as_threads(2, body):
        assert found == [[[0.0] * 3] * 4, [], True, [0.0, 0.0]]
