"""One dataclass per update rule: its numbers, how much state a row needs, and where the state starts.

The arithmetic is in ops/row_update. All rules are lazy: a row without a gradient in a batch keeps its embedding and its
state, whatever the rule; there is no weight decay. Defaults are those of torch.optim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad"]


@dataclass(unsafe_hash=True)
class SGD:
    """`p -= lr * g`, as torch.optim.SGD without momentum.

    Attributes:
        lr: learning rate, finite and >= 0. 1e-3 as in torch.optim.SGD.
    """

    lr: float = 1e-3

    def __post_init__(self) -> None:
        _at_least_zero("SGD", "lr", self.lr)

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "sgd"

    def state_floats(self, dim: int) -> int:
        """float32 numbers of state beside an embedding of `dim`."""
        return 0

    def state_init(self) -> float:
        """What every state float of a new row is."""
        return 0.0

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name."""
        return {}


@dataclass(unsafe_hash=True)
class Adagrad:
    """`s += g * g; p -= lr * g / (sqrt(s) + eps)`, as torch.optim.Adagrad without decays.

    Attributes:
        lr: learning rate, finite and >= 0.
        eps: added to the root, finite and >= 0; 1e-10 as in torch.optim.Adagrad.
        initial_accumulator_value: what `s` of a new row is, finite and >= 0.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        for field in ("lr", "eps", "initial_accumulator_value"):
            _at_least_zero(type(self).__name__, field, getattr(self, field))
        if self.eps == 0 and self.initial_accumulator_value == 0:
            raise ValueError(
                f"{type(self).__name__}: eps or initial_accumulator_value must be > 0, got 0 for both: "
                "a row whose gradients are all zero would become NaN"
            )

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "adagrad"

    def state_floats(self, dim: int) -> int:
        """float32 numbers of state beside an embedding of `dim`."""
        return dim

    def state_init(self) -> float:
        """What every state float of a new row is."""
        return float(self.initial_accumulator_value)

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name."""
        return {"eps": float(self.eps), "initial_accumulator_value": float(self.initial_accumulator_value)}


@dataclass(unsafe_hash=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row: `s += mean(g * g); p -= lr / (sqrt(s) + eps) * g`.

    Attributes:
        lr: learning rate, finite and >= 0.
        eps: added to the root, finite and >= 0; 1e-10, the default of torch.optim.Adagrad (FBGEMM's is 1e-8).
        initial_accumulator_value: what `s` of a new row is, finite and >= 0.
    """

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "row_wise_adagrad"

    def state_floats(self, dim: int) -> int:
        """float32 numbers of state beside an embedding of `dim`."""
        return 1


@dataclass(unsafe_hash=True)
class Adam:
    """Lazy Adam, as torch.optim.SparseAdam: only rows with a gradient move, and only their moments decay.

    Attributes:
        lr: learning rate, finite and >= 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the uncorrected second moment, finite and > 0; 1e-8 as in torch.optim.SparseAdam.
        bias_correction: "step" counts every step of the training, also those without this row (SparseAdam's rule);
            "row" counts the row's own updates.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: str = "step"

    def __post_init__(self) -> None:
        _at_least_zero("Adam", "lr", self.lr)
        _at_least_zero("Adam", "eps", self.eps)
        if self.eps == 0:
            raise ValueError("Adam: eps must be > 0, got 0: a row whose gradients are all zero would become NaN")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"Adam: betas must be two numbers in [0, 1), got {self.betas!r}")
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        if self.bias_correction not in ("step", "row"):
            raise ValueError(f"Adam: bias_correction must be 'step' or 'row', got {self.bias_correction!r}")

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "adam"

    def state_floats(self, dim: int) -> int:
        """float32 numbers of state beside an embedding of `dim`: first moments, then second moments."""
        return 2 * dim

    def state_init(self) -> float:
        """What every state float of a new row is."""
        return 0.0

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name; `bias_correction_by_row` is 1.0 or 0.0."""
        return {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": float(self.eps),
            "bias_correction_by_row": float(self.bias_correction == "row"),
        }


def _at_least_zero(rule: str, field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{rule}: {field} must be a number, got {type(value).__name__}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{rule}: {field} must be finite and >= 0, got {value!r}")
