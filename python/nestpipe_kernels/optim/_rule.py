"""What all update rules share: state follows from slots; checks of settings with messages that name rule and field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["MomentRule", "Rule", "check_at_least_zero", "check_moments"]


class Rule:
    """Base of the settings: a subclass gives `name`, `slots` and `hyper`."""

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """The state of a row in its order: (name, float32 numbers) of each part. Checkpoints use these names."""
        raise NotImplementedError

    def state_floats(self, dim: int) -> int:
        """float32 numbers of state beside an embedding of `dim`: the sum over slots."""
        return sum(width for _, width in self.slots(dim))

    def state_init(self) -> float:
        """What every state float of a new row is."""
        return 0.0


@dataclass(unsafe_hash=True)
class MomentRule(Rule):
    """Base of the rules with two moments: their settings, with Adam's defaults."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: str = "step"

    def __post_init__(self) -> None:
        check_moments(self)
        self.betas = (float(self.betas[0]), float(self.betas[1]))

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """First moments, then second moments; both per element."""
        return (("exp_avg", dim), ("exp_avg_sq", dim))

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name; `bias_correction_by_row` is 1.0 or 0.0."""
        return {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": float(self.eps),
            "weight_decay": float(self.weight_decay),
            "bias_correction_by_row": float(self.bias_correction == "row"),
        }


def check_at_least_zero(settings: Any, *fields: str) -> None:
    """Raises TypeError for a field that is no number, ValueError for one that is not finite and >= 0."""
    for field in fields:
        value = getattr(settings, field)
        _check_number(settings, field, value)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{_rule(settings)}: {field} must be finite and >= 0, got {value!r}")


def check_moments(settings: Any) -> None:
    """The fields of MomentRule. Raises TypeError or ValueError naming rule, field and value."""
    rule = _rule(settings)
    check_at_least_zero(settings, "lr", "eps", "weight_decay")
    if settings.eps == 0:
        raise ValueError(f"{rule}: eps must be > 0, got 0: a row whose gradients are all zero would become NaN")
    betas = settings.betas
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"{rule}: betas must be two numbers in [0, 1), got {type(betas).__name__}")
    for beta in betas:
        _check_number(settings, "betas", beta)
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{rule}: betas must be two numbers in [0, 1), got {betas!r}")
    if settings.bias_correction not in ("step", "row"):
        raise ValueError(f"{rule}: bias_correction must be 'step' or 'row', got {settings.bias_correction!r}")


def _check_number(settings: Any, field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{_rule(settings)}: {field} must be a number, got {type(value).__name__}")


def _rule(settings: Any) -> str:
    return type(settings).__name__
