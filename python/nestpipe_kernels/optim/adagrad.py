"""Settings of Adagrad, with an accumulator per element or per row."""

from __future__ import annotations

from dataclasses import dataclass

from ._rule import Rule, check_at_least_zero

__all__ = ["Adagrad", "RowWiseAdagrad"]


@dataclass(unsafe_hash=True)
class Adagrad(Rule):
    """`s += g * g; p -= lr * g / (sqrt(s) + eps)`, as torch.optim.Adagrad without learning-rate decay.

    Attributes:
        lr: learning rate, finite and >= 0.
        eps: added to the root, finite and >= 0; 1e-10 as in torch.optim.Adagrad.
        initial_accumulator_value: what `s` of a new row is, finite and >= 0.
        weight_decay: finite and >= 0; `g += weight_decay * p` first (L2), as torch.optim.Adagrad.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_at_least_zero(self, "lr", "eps", "initial_accumulator_value", "weight_decay")
        if self.eps == 0 and self.initial_accumulator_value == 0:
            raise ValueError(
                f"{type(self).__name__}: eps or initial_accumulator_value must be > 0, got 0 for both: "
                "a row whose gradients are all zero would become NaN"
            )

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "adagrad"

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """The sum of squares of each element."""
        return (("sum", dim),)

    def state_init(self) -> float:
        """What every state float of a new row is."""
        return float(self.initial_accumulator_value)

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name."""
        return {
            "eps": float(self.eps),
            "initial_accumulator_value": float(self.initial_accumulator_value),
            "weight_decay": float(self.weight_decay),
        }


@dataclass(unsafe_hash=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row: `s += mean(g * g); p -= lr / (sqrt(s) + eps) * g`.

    Attributes:
        lr: learning rate, finite and >= 0.
        eps: added to the root, finite and >= 0; 1e-10, the default of torch.optim.Adagrad (FBGEMM's is 1e-8).
        initial_accumulator_value: what `s` of a new row is, finite and >= 0.
        weight_decay: finite and >= 0; `g += weight_decay * p` first (L2), before the mean of squares.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "row_wise_adagrad"

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """The sum of the row's mean squares."""
        return (("sum", 1),)
