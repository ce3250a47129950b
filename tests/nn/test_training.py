"""Modules that train without a pipeline, against the same tables as parameters under torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from nestpipe_kernels import init, optim
from nestpipe_kernels.comm import Communicator
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.types import UNBOUNDED, PoolingType


def _tables(**settings: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(20, 3, "t", feature_names=["a", "b"], **settings),
        EmbeddingBagConfig(20, 3, "m", feature_names=["b"], pooling=PoolingType.MEAN),
    ]


def _features(step: int, batch: int = 6) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (2 * batch,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths)


def _train(module: torch.nn.Module, optimizer: Any, steps: int = 5) -> dict[str, Tensor]:
    for step in range(steps):
        output = module(_features(step)).values()
        (output * torch.linspace(-1, 1, output.size(1))).pow(2).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (optim.SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
        (optim.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05)),
        (optim.Adam(lr=0.05), lambda p: torch.optim.SparseAdam(list(p), lr=0.05)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_equals_torch_optim(rule: Any, make: Any) -> None:
    plain = EmbeddingBagCollection(_tables(), seed=1)
    ours = _train(EmbeddingBagCollection(_tables(), optimizer=rule, seed=1), None)
    expected = _train(plain, make(plain.parameters()))
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


def test_fault_17_two_calls_in_one_forward_are_one_update() -> None:
    def loss(module: torch.nn.Module) -> Tensor:
        return (module(_features(0)).values() * module(_features(1)).values()).sum()

    plain = EmbeddingBagCollection(_tables(), seed=1)
    ours = EmbeddingBagCollection(_tables(), optimizer=optim.Adagrad(lr=0.05), seed=1)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    for module in (plain, ours):
        loss(module).backward()
    optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_fault_08_padding_gets_no_gradient_however_often_it_occurs() -> None:
    table = EmbeddingBagConfig(20, 3, "t", pooling=PoolingType.MEAN, padding_idx=4)
    ebc = EmbeddingBagCollection([table], optimizer=optim.Adam(lr=0.1))
    ids = torch.tensor([7] + [4] * 800)
    before = ebc.embedding_bags["t"].weight
    for _ in range(3):
        output = ebc(KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([801]))).values()
        output.sum().backward()
    after = ebc.embedding_bags["t"].weight
    assert after[4].equal(torch.zeros(3))
    torch.testing.assert_close(after[7], before[7] - 0.3, rtol=1e-4, atol=1e-4)
    assert ebc.store("t").keys().tolist() == [7]


def test_fault_09_frozen_tables_do_not_move() -> None:
    tables = [EmbeddingBagConfig(20, 3, "t", feature_names=["a"], trainable=False)]
    ebc = EmbeddingBagCollection(tables, is_weighted=True, optimizer=optim.Adagrad(lr=0.1))
    before = ebc.embedding_bags["t"].weight
    weights = torch.ones(3, requires_grad=True)
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([3]), weights=weights)
    ebc(features).values().sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, before[[1, 2, 3]].sum(1), rtol=1e-6, atol=0)
    assert ebc.embedding_bags["t"].weight.equal(before)


def test_a_frozen_table_beside_trained_ones() -> None:
    tables = _tables(trainable=False)
    ebc = EmbeddingBagCollection(tables, optimizer=optim.Adagrad(lr=0.1))
    before = ebc.state_dict()
    after = _train(ebc, None)
    assert after["embedding_bags.t.weight"].equal(before["embedding_bags.t.weight"])
    assert not after["embedding_bags.m.weight"].equal(before["embedding_bags.m.weight"])


@pytest.mark.parametrize(("training", "gradients"), [(False, True), (True, False), (False, False)])
def test_fault_15_eval_inserts_nothing(training: bool, gradients: bool) -> None:
    ec = EmbeddingCollection([EmbeddingConfig(UNBOUNDED, 3, "t")], optimizer=optim.SGD(lr=0.1)).train(training)
    keys = KeyedJaggedTensor(["t"], torch.tensor([5, -6]), lengths=torch.tensor([2]))
    with torch.set_grad_enabled(gradients):
        rows = ec(keys)["t"].values()
    assert rows.equal(ec.store("t").find(keys.values())[0])
    assert len(ec.store("t")) == 0


def test_a_learning_rate_schedule_reaches_the_rows() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(20, 3, "a")], optimizer=optim.SGD(lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(ebc.sparse_optimizer, step_size=1, gamma=0.5)
    features = KeyedJaggedTensor(["a"], torch.tensor([3]), lengths=torch.tensor([1]))
    start = ebc.embedding_bags["a"].weight[3]
    ebc(features).values().sum().backward()
    scheduler.step()
    ebc(features).values().sum().backward()
    torch.testing.assert_close(ebc.embedding_bags["a"].weight[3], start - 1.5, rtol=1e-6, atol=1e-6)


def test_fault_28_ranks_average_their_gradients() -> None:
    def body(communicator: Communicator) -> Tensor:
        ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(20, 3, "a")], optimizer=optim.SGD(lr=1.0), process_group=communicator
        )
        features = KeyedJaggedTensor(["a"], torch.tensor([3]), lengths=torch.tensor([1]))
        before = ebc.embedding_bags["a"].weight
        (ebc(features).values() * (communicator.rank + 1)).sum().backward()
        return before[3] - ebc.embedding_bags["a"].weight[3]

    for moved in run_ranks(2, body):
        torch.testing.assert_close(moved, torch.full((3,), 1.5), rtol=1e-6, atol=1e-6)


class FailingBackward(torch.autograd.Function):
    """The identity, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OverflowError("no gradient")


@pytest.mark.parametrize("lookup_first", [True, False])
def test_a_backward_that_fails_changes_nothing_and_the_next_one_trains(lookup_first: bool) -> None:
    """Whether or not it had reached the lookup: neither a lost update nor the failed one's gradient later."""
    tables = [EmbeddingBagConfig(UNBOUNDED, 2, "t", init=init.Constant(0.0))]
    ebc = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=1.0))
    features = KeyedJaggedTensor(["t"], torch.tensor([3]), lengths=torch.tensor([1]))
    other = torch.ones(1, 2, requires_grad=True)

    def rows() -> list[list[float]]:
        values: list[list[float]] = ebc.store("t").find(torch.tensor([3]))[0].tolist()
        return values

    def fail() -> None:
        # Autograd goes first through what was made last.
        failing = FailingBackward.apply(other) if lookup_first else None
        pooled = 5 * ebc(features).values()
        if failing is None:
            failing = FailingBackward.apply(other)
        with pytest.raises(OverflowError, match="no gradient"):
            (pooled + failing).sum().backward()

    for expected in (0.0, -1.0):
        fail()
        assert rows() == [[expected, expected]]
        ebc(features).values().sum().backward()
        assert rows() == [[expected - 1, expected - 1]]


@pytest.mark.parametrize("others", [1, 2])
def test_a_backward_that_fails_takes_no_other_graph_its_update(others: int) -> None:
    """Graphs made before it are differentiated after it, with no lookup in between."""
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(UNBOUNDED, 2, "t", init=init.Constant(0.0))], optimizer=optim.SGD(lr=1.0)
    )
    outputs = [
        ebc(KeyedJaggedTensor(["t"], torch.tensor([key]), lengths=torch.tensor([1]))).values() for key in range(others)
    ]
    failing = FailingBackward.apply(torch.ones(1, 2, requires_grad=True))
    reached = ebc(KeyedJaggedTensor(["t"], torch.tensor([7]), lengths=torch.tensor([1]))).values()
    with pytest.raises(OverflowError, match="no gradient"):
        (reached + failing).sum().backward()
    for output in outputs:
        output.sum().backward()
    assert ebc.store("t").find(torch.arange(8))[0][:, 0].tolist() == [-1.0] * others + [0.0] * (8 - others)


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_fault_29_max_norm_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_norm'"):
        kind(20, 3, "t", max_norm=1.0)


def test_fault_29_forward_and_backward_alone_change_no_row() -> None:
    """Rows of any length stay as they are until the one update at the end of backward."""
    module = EmbeddingBagCollection(_tables(init=init.Uniform(-50, 50)), optimizer=optim.Adagrad(lr=0.5))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for step in range(3):
        output = module(_features(step)).values()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    module.eval()
    module(_features(3))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    output.sum().backward()
    assert not all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
