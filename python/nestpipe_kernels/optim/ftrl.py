"""Settings of FTRL-Proximal."""

from __future__ import annotations

from dataclasses import dataclass

from ._rule import Rule, check_at_least_zero

__all__ = ["FTRL"]


@dataclass(unsafe_hash=True)
class FTRL(Rule):
    """FTRL-Proximal (McMahan et al., "Ad Click Prediction", 2013) per coordinate, for touched rows.

    With n the sum of squared gradients and q = (beta + sqrt(n)) / lr, an update does

        z += g - (q_new - q_old) * p
        p  = 0 where |z| <= l1, else -(z - sign(z) * l1) / (q_new + l2)

    - A new row's z is chosen so that the second line gives its initial embedding, which therefore counts like any
      learnt value. (With z = 0, as in TensorFlow, the first updates would forget it.)
    - The learning rate may change: each q is that of its own time, for which the row remembers the rate of its last
      update; without l1 and l2 an update is `p -= lr / (beta + sqrt(n)) * g` with the rate of the moment. A rate
      below 2^-100 leaves the row as it is.
    - An untouched row keeps z, n and p: nothing shrinks while a row rests.
    - z, not p, is what an update continues from. Writing embeddings of rows that have been trained is undone by their
      next update unless their state starts anew.

    Attributes:
        lr: alpha of the paper, finite and >= 0; 1e-3 as in TensorFlow.
        beta: finite and >= 0; 1 as the paper advises (TensorFlow: 0).
        l1: finite and >= 0; 0 as in TensorFlow.
        l2: finite and >= 0; the paper's lambda_2: TensorFlow's l2_regularization_strength is half of it. 0.
        weight_decay: finite and >= 0; `g += weight_decay * p` first. Unlike l2 it enters n and the history in z.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    lr: float = 1e-3
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_at_least_zero(self, "lr", "beta", "l1", "l2", "weight_decay")
        if self.beta == 0 and self.l2 == 0:
            raise ValueError(
                "FTRL: beta or l2 must be > 0, got 0 for both: a row whose gradients are all zero would become NaN"
            )

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "ftrl"

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """z and n of each element, and the learning rate of the row's last update (0: not updated yet)."""
        return (("z", dim), ("n", dim), ("last_lr", 1))

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name."""
        return {
            "beta": float(self.beta),
            "l1": float(self.l1),
            "l2": float(self.l2),
            "weight_decay": float(self.weight_decay),
        }
