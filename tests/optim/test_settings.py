"""Settings of row updates: defaults, state, names, messages; the group that schedulers drive."""

from __future__ import annotations

import inspect
import math
import re
import warnings

import pytest
import torch

from nestpipe_kernels import optim
from nestpipe_kernels.types import SparseOptimizer

ALL = [
    optim.SGD,
    optim.Adagrad,
    optim.RowWiseAdagrad,
    optim.Adam,
    optim.AdamW,
    optim.RowWiseAdam,
    optim.FTRL,
    optim.LAMB,
]


@pytest.mark.parametrize("kind", ALL)
def test_settings_satisfy_the_protocol(kind: type) -> None:
    settings = kind()
    assert isinstance(settings, SparseOptimizer)
    assert settings == kind()
    assert hash(settings) == hash(kind())
    assert settings != kind(lr=0.5)
    assert "lr" not in settings.hyper()
    assert all(isinstance(value, float) for value in settings.hyper().values())


def test_names_and_state() -> None:
    names = ["sgd", "adagrad", "row_wise_adagrad", "adam", "adamw", "row_wise_adam", "ftrl", "lamb"]
    assert [kind().name for kind in ALL] == names
    assert [kind().state_floats(7) for kind in ALL] == [0, 7, 1, 14, 14, 8, 14, 14]
    assert optim.SGD(momentum=0.5).state_floats(7) == 7
    assert [kind().state_init() for kind in ALL] == [0.0] * len(ALL)
    assert optim.Adagrad(initial_accumulator_value=0.5).state_init() == 0.5


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.SGD, torch.optim.SGD),
        (optim.Adagrad, torch.optim.Adagrad),
        (optim.RowWiseAdagrad, torch.optim.Adagrad),
        (optim.Adam, torch.optim.Adam),
        (optim.AdamW, torch.optim.AdamW),
        (optim.RowWiseAdam, torch.optim.Adam),
    ],
)
def test_fault_22_defaults_are_those_of_torch(ours: type, theirs: type) -> None:
    expected = inspect.signature(theirs).parameters
    for name, parameter in inspect.signature(ours).parameters.items():
        if name != "bias_correction":
            assert parameter.default == expected[name].default, name


def test_fault_22_eps_is_documented() -> None:
    assert optim.Adam().eps == inspect.signature(torch.optim.SparseAdam).parameters["eps"].default
    expected = {
        optim.Adagrad: "1e-10",
        optim.RowWiseAdagrad: "1e-10",
        optim.Adam: "1e-8",
        optim.AdamW: "1e-8",
        optim.RowWiseAdam: "1e-8",
        optim.LAMB: "1e-6",
    }
    for kind, eps in expected.items():
        assert float(eps) == kind().eps
        assert re.search(rf"eps: .*{eps}", kind.__doc__ or ""), kind


def test_defaults_of_rules_that_torch_lacks() -> None:
    """FTRL: the paper's beta, the rest TensorFlow's; LAMB: TensorFlow Addons'."""
    assert optim.FTRL() == optim.FTRL(lr=1e-3, beta=1.0, l1=0.0, l2=0.0, weight_decay=0.0)
    lamb = optim.LAMB(lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, bias_correction="step")
    assert optim.LAMB() == lamb


def test_slots_name_the_state_in_its_order() -> None:
    assert optim.SGD().slots(3) == ()
    assert optim.SGD(momentum=0.9).slots(3) == (("momentum_buffer", 3),)
    assert optim.Adagrad().slots(3) == (("sum", 3),)
    assert optim.RowWiseAdagrad().slots(3) == (("sum", 1),)
    for kind in (optim.Adam, optim.AdamW, optim.LAMB):
        assert kind().slots(3) == (("exp_avg", 3), ("exp_avg_sq", 3))
    assert optim.RowWiseAdam().slots(3) == (("exp_avg", 3), ("exp_avg_sq", 1))
    assert optim.FTRL().slots(3) == (("z", 3), ("n", 3))


@pytest.mark.parametrize("kind", ALL)
def test_bad_learning_rate(kind: type) -> None:
    for lr in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{kind.__name__}: lr must be finite and >= 0, got {lr}"):
            kind(lr=lr)
    with pytest.raises(TypeError, match=f"{kind.__name__}: lr must be a number, got str"):
        kind(lr="0.1")


def test_bad_settings() -> None:
    for kind in (optim.Adagrad, optim.RowWiseAdagrad):
        with pytest.raises(ValueError, match=f"{kind.__name__}: eps must be finite and >= 0, got -1"):
            kind(eps=-1.0)
        with pytest.raises(ValueError, match="initial_accumulator_value must be finite and >= 0, got -0"):
            kind(initial_accumulator_value=-0.5)
        with pytest.raises(ValueError, match="eps or initial_accumulator_value must be > 0, got 0 for both"):
            kind(eps=0.0)


@pytest.mark.parametrize("kind", ALL)
def test_bad_weight_decay(kind: type) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}: weight_decay must be finite and >= 0, got -0\.1"):
        kind(weight_decay=-0.1)
    with pytest.raises(TypeError, match=f"{kind.__name__}: weight_decay must be a number, got NoneType"):
        kind(weight_decay=None)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RowWiseAdam, optim.LAMB])
def test_bad_moments(kind: type) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: eps must be > 0, got 0"):
        kind(eps=0.0)
    for betas in ((1.0, 0.9), (0.9, -0.1), (0.9,)):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: betas must be two numbers in \[0, 1\), got"):
            kind(betas=betas)
    with pytest.raises(TypeError, match=rf"{kind.__name__}: betas must be two numbers in \[0, 1\), got float"):
        kind(betas=0.9)
    with pytest.raises(TypeError, match=f"{kind.__name__}: betas must be a number, got str"):
        kind(betas=("0.9", 0.999))
    with pytest.raises(ValueError, match=f"{kind.__name__}: bias_correction must be 'step' or 'row', got 'none'"):
        kind(bias_correction="none")


def test_bad_momentum() -> None:
    for field in ("momentum", "dampening"):
        with pytest.raises(ValueError, match=f"SGD: {field} must be finite and >= 0, got -1"):
            optim.SGD(**{field: -1})
        with pytest.raises(TypeError, match=f"SGD: {field} must be a number, got str"):
            optim.SGD(**{field: "0.9"})
    with pytest.raises(TypeError, match="SGD: nesterov must be True or False, got 1"):
        optim.SGD(momentum=0.9, nesterov=1)  # type: ignore[arg-type]
    message = r"SGD: nesterov needs momentum > 0 and dampening 0, got momentum 0\.0 and dampening 0\.0"
    with pytest.raises(ValueError, match=message):
        optim.SGD(nesterov=True)
    message = r"SGD: nesterov needs momentum > 0 and dampening 0, got momentum 0\.9 and dampening 0\.5"
    with pytest.raises(ValueError, match=message):
        optim.SGD(momentum=0.9, dampening=0.5, nesterov=True)


def test_bad_ftrl_settings() -> None:
    for field in ("beta", "l1", "l2"):
        with pytest.raises(ValueError, match=f"FTRL: {field} must be finite and >= 0, got nan"):
            optim.FTRL(**{field: math.nan})
    with pytest.raises(ValueError, match="FTRL: beta or l2 must be > 0, got 0 for both"):
        optim.FTRL(beta=0.0)
    optim.FTRL(beta=0.0, l2=0.1)


# -------------------------------------------------------------------------------------------------------- group


def group() -> optim.SparseOptimizerGroup:
    return optim.SparseOptimizerGroup([("user", optim.Adam(lr=0.5), 1.0), ("item", optim.SGD(lr=0.25), 0.1)])


def test_group_looks_like_a_torch_optimizer() -> None:
    sparse = group()
    assert isinstance(sparse, torch.optim.Optimizer)
    assert [(g["table"], g["lr"], g["lr_scale"]) for g in sparse.param_groups] == [
        ("user", 0.5, 1.0),
        ("item", 0.25, 0.1),
    ]
    assert sparse.current_lr("user") == 0.5
    assert sparse.current_lr("item") == 0.25 * 0.1
    sparse.param_groups[1]["lr"] = 1.0
    assert sparse.current_lr("item") == 0.1
    sparse.zero_grad()
    assert sparse.step() is None
    assert sparse.step(lambda: 3.0) == 3.0


def test_schedulers_drive_the_group_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halved = group()
        schedule = torch.optim.lr_scheduler.LambdaLR(halved, lambda epoch: 0.5**epoch)
        schedule.step()
        schedule.step()
        assert halved.current_lr("user") == 0.125
        assert halved.current_lr("item") == pytest.approx(0.25 * 0.25 * 0.1)
        stepped = group()
        schedule_by_step = torch.optim.lr_scheduler.StepLR(stepped, step_size=2, gamma=0.1)
        for expected in (0.5, 0.05, 0.05):
            schedule_by_step.step()
            assert stepped.current_lr("user") == pytest.approx(expected)
        warm = group()
        torch.optim.lr_scheduler.LinearLR(warm, start_factor=0.1, total_iters=4)
        assert warm.current_lr("user") == pytest.approx(0.05)


def test_rates_that_no_update_can_use_are_refused() -> None:
    of = group()
    for value, error, message in (
        (float("nan"), ValueError, r"got nan \* "),
        (float("inf"), ValueError, r"got inf \* "),
        (1e39, ValueError, r"got 1e\+39 \* "),
        ("fast", TypeError, r"must be a number, got 'fast'"),
        (None, TypeError, r"must be a number, got None"),
    ):
        of.param_groups[0]["lr"] = value
        with pytest.raises(error, match=rf"lr of table 'user' \(param_groups\[0\]\) .*{message}"):
            of.current_lr("user")
    of.param_groups[0]["lr"] = torch.tensor(0.25)
    assert of.current_lr("user") == 0.25


def test_state_dict_carries_the_learning_rates() -> None:
    saved = group()
    saved.param_groups[0]["lr"] = 0.125
    loaded = group()
    loaded.load_state_dict(saved.state_dict())
    assert loaded.current_lr("user") == 0.125
    assert loaded.current_lr("item") == 0.25 * 0.1


def test_group_errors() -> None:
    with pytest.raises(ValueError, match="sparse optimizer: needs at least one table, got none"):
        optim.SparseOptimizerGroup([])
    with pytest.raises(ValueError, match="table 'a' is given twice; names must be distinct"):
        optim.SparseOptimizerGroup([("a", optim.SGD(), 1.0), ("a", optim.SGD(), 1.0)])
    with pytest.raises(ValueError, match=r"lr_scale of table 'a' must be >= 0, got -1\.0"):
        optim.SparseOptimizerGroup([("a", optim.SGD(), -1.0)])
    with pytest.raises(KeyError, match="no table 'shop'; there are item, user"):
        group().current_lr("shop")
