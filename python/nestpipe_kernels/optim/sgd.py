"""Settings of stochastic gradient descent, with momentum where asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ._rule import Rule, check_at_least_zero

__all__ = ["SGD"]


@dataclass(unsafe_hash=True)
class SGD(Rule):
    """torch.optim.SGD for touched rows: `b = momentum * b + (1 - dampening) * g; p -= lr * b`.

    The first update of a row sets `b = g`, as torch's first step does. A row without a gradient keeps its buffer:
    momentum neither moves it nor fades. Without momentum a row has no state: `p -= lr * g`.

    Attributes:
        lr: learning rate, finite and >= 0. Defaults are all those of torch.optim.SGD.
        momentum: finite and >= 0; what is kept of the buffer at each update of the row.
        dampening: finite and >= 0; 1 - dampening of the gradient enters the buffer, from the second update on.
        weight_decay: finite and >= 0; `g += weight_decay * p` first (L2).
        nesterov: moves by `g + momentum * b` instead of `b`; needs momentum > 0 and no dampening.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_at_least_zero(self, "lr", "momentum", "dampening", "weight_decay")
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"SGD: nesterov must be True or False, got {self.nesterov!r}")
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise ValueError(
                "SGD: nesterov needs momentum > 0 and dampening 0, "
                f"got momentum {self.momentum!r} and dampening {self.dampening!r}"
            )

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "sgd"

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """The momentum buffer; nothing without momentum."""
        return (("momentum_buffer", dim),) if self.momentum else ()

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name; `nesterov` is 1.0 or 0.0."""
        return {
            "momentum": float(self.momentum),
            "dampening": float(self.dampening),
            "weight_decay": float(self.weight_decay),
            "nesterov": float(self.nesterov),
        }
