"""The rules against torch.optim and the papers' formulas: in float64 the same, in float32 as exact as torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import lazy_optimizers as lazy
from lazy_optimizers import MaskedDense
from nestpipe_kernels import optim
from nestpipe_kernels.ops.lookup_pool import pool_backward, pool_forward
from nestpipe_kernels.ops.row_update import reference, row_update
from nestpipe_kernels.types import PoolingType, SparseOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

NUM_ROWS, DIM, STEPS = 12, 6, 100
Make = Callable[..., torch.optim.Optimizer]


def masked(kind: Callable[..., torch.optim.Optimizer], **settings: float) -> Make:
    return lambda params: MaskedDense(params, partial(kind, **settings))


# ours, theirs. eps of Adam differs in its place (torch.optim.Adam adds it to the corrected root): so small that it
# does not matter where decay needs torch.optim.Adam; SparseAdam has the same place.
RULES: dict[str, tuple[SparseOptimizer, Make]] = {
    "sgd": (optim.SGD(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "sgd-decay": (optim.SGD(0.05, weight_decay=0.1), masked(torch.optim.SGD, lr=0.05, weight_decay=0.1)),
    "momentum": (optim.SGD(0.02, momentum=0.9), masked(torch.optim.SGD, lr=0.02, momentum=0.9)),
    "nesterov-decay": (
        optim.SGD(0.02, momentum=0.8, nesterov=True, weight_decay=0.1),
        masked(torch.optim.SGD, lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adagrad": (optim.Adagrad(0.05), lambda p: torch.optim.Adagrad(p, 0.05)),
    "adagrad-initial": (
        optim.Adagrad(0.05, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.5),
    ),
    "adagrad-decay": (optim.Adagrad(0.05, weight_decay=0.1), masked(torch.optim.Adagrad, lr=0.05, weight_decay=0.1)),
    "row_wise_adagrad": (optim.RowWiseAdagrad(0.05), partial(lazy.row_wise_adagrad, lr=0.05)),
    "row_wise_adagrad-decay": (
        optim.RowWiseAdagrad(0.05, weight_decay=0.1),
        partial(lazy.row_wise_adagrad, lr=0.05, weight_decay=0.1),
    ),
    "adam": (optim.Adam(0.01), lambda p: torch.optim.SparseAdam(list(p), 0.01)),
    "adam-decay": (
        optim.Adam(0.01, eps=1e-30, weight_decay=0.1),
        masked(torch.optim.Adam, lr=0.01, eps=1e-30, weight_decay=0.1),
    ),
    "adamw": (optim.AdamW(0.01), masked(torch.optim.AdamW, lr=0.01)),
    "adamw-decay": (optim.AdamW(0.01, weight_decay=0.5), masked(torch.optim.AdamW, lr=0.01, weight_decay=0.5)),
    "row_wise_adam": (optim.RowWiseAdam(0.01), partial(lazy.row_wise_adam, lr=0.01)),
    "row_wise_adam-decay": (
        optim.RowWiseAdam(0.01, weight_decay=0.5),
        partial(lazy.row_wise_adam, lr=0.01, weight_decay=0.5),
    ),
    "ftrl": (optim.FTRL(0.1), partial(lazy.ftrl, lr=0.1)),
    "ftrl-l1-l2": (optim.FTRL(0.1, l1=3.0, l2=0.5), partial(lazy.ftrl, lr=0.1, l1=3.0, l2=0.5)),
    "ftrl-decay": (
        optim.FTRL(0.1, beta=0.5, l1=1.0, weight_decay=0.1),
        partial(lazy.ftrl, lr=0.1, beta=0.5, l1=1.0, weight_decay=0.1),
    ),
    "lamb": (optim.LAMB(0.01), partial(lazy.lamb, lr=0.01)),
    "lamb-decay": (optim.LAMB(0.01, weight_decay=0.1), partial(lazy.lamb, lr=0.01, weight_decay=0.1)),
}


def _batches(seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(NUM_ROWS, DIM, generator=generator)
    ids = [torch.randint(0, NUM_ROWS, (8,), generator=generator) for _ in range(STEPS)]
    return start, ids, torch.randn(STEPS, 8, DIM, generator=generator)


def _train_theirs(start: Tensor, ids: list[Tensor], goals: Tensor, make: Make) -> Tensor:
    table = torch.nn.Embedding(NUM_ROWS, DIM, sparse=True, dtype=start.dtype)
    table.weight.data.copy_(start)
    optimizer = make(table.parameters())
    for batch, goal in zip(ids, goals):
        optimizer.zero_grad()
        ((table(batch) - goal.to(start.dtype)) ** 2).sum().backward()
        optimizer.step()
    return table.weight.detach()


def _train_ours(start: Tensor, ids: list[Tensor], goals: Tensor, optimizer: SparseOptimizer) -> Tensor:
    rows = torch.full((NUM_ROWS, DIM + optimizer.state_floats(DIM) + 1), optimizer.state_init())  # type: ignore[attr-defined]
    rows[:, :DIM], rows[:, -1] = start, 0.0
    none = PoolingType.NONE.code
    for step, (batch, goal) in enumerate(zip(ids, goals), start=1):
        out, bags = torch.empty(8, DIM), (batch, torch.arange(9), [0, 8], [none])
        pool_forward(rows[:, :DIM], *bags, [out])
        grads = torch.zeros(NUM_ROWS, DIM)
        pool_backward([2 * (out - goal)], None, *bags, None, grads)
        row_update(rows, grads, optimizer, step, optimizer.lr, torch.isin(torch.arange(NUM_ROWS), batch))
    return rows[:, :DIM].clone()


def _train_in_float64(
    start: Tensor, ids: list[Tensor], goals: Tensor, optimizer: SparseOptimizer
) -> tuple[Tensor, Tensor, Tensor]:
    """apply_rule itself, in double: embeddings, state and counts at the end."""
    table = start.double()
    state = torch.full((NUM_ROWS, optimizer.state_floats(DIM)), optimizer.state_init(), dtype=torch.float64)  # type: ignore[attr-defined]
    updates = torch.zeros(NUM_ROWS, dtype=torch.int32)
    lr = torch.full((NUM_ROWS,), optimizer.lr, dtype=torch.float64)
    for step, (batch, goal) in enumerate(zip(ids, goals), start=1):
        grads = torch.zeros_like(table).index_add_(0, batch, 2 * (table[batch] - goal.double()))
        new, new_state = reference.apply_rule(table, state, grads, optimizer, step, lr, updates + 1)
        touched = torch.isin(torch.arange(NUM_ROWS), batch)
        table = torch.where(touched[:, None], new, table)
        state = torch.where(touched[:, None], new_state, state)
        updates += touched.int()
    return table, state, updates


def _rms(error: Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("name", RULES)
def test_formula_in_float64(name: str) -> None:
    ours, theirs = RULES[name]
    start, ids, goals = _batches(7)
    expected = _train_theirs(start.double(), ids, goals, theirs)
    found, _, _ = _train_in_float64(start, ids, goals, ours)
    assert _rms(expected - start) > 0.05
    # 100 steps in double, of values of size 1
    assert float((found - expected).abs().max()) < 1e-12
    # and every row has rested at times
    assert all(batch.unique().numel() < NUM_ROWS for batch in ids)


@pytest.mark.parametrize(
    ("ours", "kind", "settings"),
    [
        (optim.SGD(0.02, momentum=0.9, dampening=0.3), torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
        (
            optim.SGD(0.02, momentum=0.9, dampening=0.3, weight_decay=0.1),
            torch.optim.SGD,
            {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        ),
        (
            optim.Adam(0.02, eps=1e-30, weight_decay=0.1, bias_correction="row"),
            torch.optim.Adam,
            {"eps": 1e-30, "weight_decay": 0.1},
        ),
        (optim.AdamW(0.02, betas=(0.8, 0.9), bias_correction="row"), torch.optim.AdamW, {"betas": (0.8, 0.9)}),
    ],
    ids=["dampening", "dampening-decay", "adam-row", "adamw-row"],
)
def test_a_row_is_like_a_parameter_of_its_own(ours: SparseOptimizer, kind: type, settings: dict[str, object]) -> None:
    """torch skips parameters without a gradient: with one per row it counts steps, and starts buffers, by row."""
    start, ids, goals = _batches(8)
    rows = [torch.nn.Parameter(row.clone()) for row in start.double()]
    optimizer = kind(rows, lr=ours.lr, **settings)
    for batch, goal in zip(ids, goals):
        optimizer.zero_grad()
        ((torch.stack([rows[key] for key in batch.tolist()]) - goal.double()) ** 2).sum().backward()
        optimizer.step()
    found, _, _ = _train_in_float64(start, ids, goals, ours)
    assert float((found - torch.stack(list(rows)).detach()).abs().max()) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_error_at_most_twice_that_of_torch_float32(name: str) -> None:
    ours, theirs = RULES[name]
    errors, limits = [], []
    for seed in range(5):
        start, ids, goals = _batches(seed)
        truth = _train_theirs(start.double(), ids, goals, theirs)
        own = _rms(_train_theirs(start, ids, goals, theirs) - truth)
        ulp = float(torch.finfo(torch.float32).eps) * _rms(truth)
        errors.append(_rms(_train_ours(start, ids, goals, ours) - truth))
        limits.append(2 * own + ulp)
    assert statistics.median(errors) <= statistics.median(limits)


# --------------------------------------------------------------------------------------------------------- FTRL


def test_ftrl_zeroes_what_l1_outweighs_and_remembers_it() -> None:
    """Small gradients add up in z while the embedding is 0, and leave it when their sum passes l1."""
    optimizer = optim.FTRL(lr=0.5, beta=1.0, l1=1.0)
    rows = torch.zeros(1, 4)
    gradients = [0.4, 0.4, 0.4]
    n = 0.0
    for step, g in enumerate(gradients, start=1):
        row_update(rows, torch.tensor([[g]]), optimizer, step, 0.5)
        n += g * g
        z = sum(gradients[:step])
        expected = 0.0 if z <= 1.0 else -(z - 1.0) / ((1.0 + np.sqrt(n)) / 0.5)
        assert rows[0, :3].tolist() == pytest.approx([expected, z, n], rel=1e-5)
    assert rows[0, 0] < 0


@pytest.mark.parametrize("name", ["ftrl", "ftrl-l1-l2"])
def test_ftrl_keeps_the_papers_z_in_its_slot(name: str) -> None:
    """After any update the slots give the embedding by the paper's closed form."""
    optimizer = RULES[name][0]
    table, state, updates = _train_in_float64(*_batches(3), optimizer)
    assert (updates > 0).all()
    z, n = state[:, :DIM], state[:, DIM:]
    hyper = optimizer.hyper()
    q = (hyper["beta"] + n.sqrt()) / optimizer.lr + hyper["l2"]
    closed = torch.where(z.abs() <= hyper["l1"], 0.0, -(z - z.sign() * hyper["l1"]) / q)
    assert float((table - closed).abs().max()) < 1e-12
    assert (hyper["l1"] > 0) == bool((table == 0).any())


def test_ftrl_with_a_changing_learning_rate_steps_by_the_rate_of_the_moment() -> None:
    optimizer = optim.FTRL(beta=1.0)
    rows = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    p, n = 2.0, 0.0
    for step, (lr, g) in enumerate([(0.1, 1.0), (0.01, -2.0), (0.0, 5.0), (1e-35, 5.0), (0.3, 0.5)], start=1):
        row_update(rows, torch.tensor([[g]]), optimizer, step, lr)
        if lr > 1e-30:
            n += g * g
            p -= lr / (1 + np.sqrt(n)) * g
        assert rows[0, 0].item() == pytest.approx(p, rel=1e-6)
        assert rows[0, 2].item() == pytest.approx(n, rel=1e-6)


def test_ftrl_goes_on_from_a_written_embedding() -> None:
    optimizer = optim.FTRL(lr=0.1)
    rows = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    row_update(rows, torch.tensor([[3.0]]), optimizer, 1, 0.1)
    rows[0, 0] = -5.0
    row_update(rows, torch.tensor([[0.0]]), optimizer, 2, 0.1)
    assert rows[0, 0].item() == pytest.approx(-5.0, rel=1e-6)


# --------------------------------------------------------------------------------------------------------- LAMB


def test_lamb_moves_a_row_by_its_own_length() -> None:
    optimizer = optim.LAMB()
    rows = torch.zeros(3, 2 + 4 + 1)
    rows[:, :2] = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    before = rows[:, :2].clone()
    row_update(rows, torch.tensor([[100.0, 0.0], [0.01, 0.0], [1.0, 0.0]]), optimizer, 1, 0.1)
    moved = (before - rows[:, :2]).norm(dim=1)
    # |p| lr; a row of zeros has ratio 1 and a direction of length 1. eps is 1e-4 of the second gradient.
    assert moved.tolist() == pytest.approx([0.5, 0.05, 0.1], rel=2e-4)


def test_lamb_with_a_zero_direction_stays() -> None:
    rows = torch.zeros(1, 2 + 4 + 1)
    rows[0, :2] = 1.0
    row_update(rows, torch.zeros(1, 2), optim.LAMB(), 1, 0.1)
    assert rows[0, :2].tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", RULES)
def test_fault_21_rows_without_gradient_stand_still(name: str) -> None:
    """Momentum, moments, decay and thresholds of a resting row: nothing moves, however many steps pass."""
    optimizer, _ = RULES[name]
    rows = torch.full((2, 4 + optimizer.state_floats(4) + 1), optimizer.state_init())  # type: ignore[attr-defined]
    rows[:, :4], rows[:, -1] = torch.randn(2, 4), 0.0
    for step in (1, 2):
        row_update(rows, torch.randn(2, 4), optimizer, step, optimizer.lr)
    before = rows.clone()
    for step in range(3, 8):
        row_update(rows, torch.randn(2, 4), optimizer, step, optimizer.lr, torch.tensor([True, False]))
    assert torch.equal(rows[1].view(torch.int32), before[1].view(torch.int32))
    assert (rows[0, :4] != before[0, :4]).any()


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RowWiseAdam, optim.LAMB])
def test_fault_21_step_or_rows_own_count_decides_bias_correction(kind: type) -> None:
    """By row, a row's first update moves it by lr whenever it comes; by step, more where it comes late."""

    def first_move(optimizer: SparseOptimizer, step: int) -> float:
        rows = torch.zeros(1, 1 + optimizer.state_floats(1) + 1)
        row_update(rows, torch.ones(1, 1), optimizer, step, 0.1)
        return -rows[0, 0].item()

    by_step, by_row = kind(), kind(bias_correction="row")
    assert first_move(by_step, 1) == pytest.approx(0.1, rel=1e-5)
    assert first_move(by_step, 1) == first_move(by_row, 1) == first_move(by_row, 1000)
    late = (1 - 0.9) / (1 - 0.9**1000) / np.sqrt((1 - 0.999) / (1 - 0.999**1000))
    assert first_move(by_step, 1000) == pytest.approx(0.1 * late, rel=1e-3)


def test_fault_21_first_update_of_a_row_starts_its_buffer_whenever_it_comes() -> None:
    """Dampening does not apply to the first update, as in torch, also of a row that comes at step 50."""
    rows = torch.zeros(1, 3)
    row_update(rows, torch.ones(1, 1), optim.SGD(momentum=0.9, dampening=0.5), 50, 1.0)
    assert rows[0, :2].tolist() == [-1.0, 1.0]
    row_update(rows, torch.ones(1, 1), optim.SGD(momentum=0.9, dampening=0.5), 51, 1.0)
    assert rows[0, 1].item() == pytest.approx(1.4)
