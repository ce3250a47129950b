"""Settings of FTRL-Proximal."""

from __future__ import annotations

from dataclasses import dataclass

from ._rule import Rule, check_at_least_zero

__all__ = ["FTRL"]


@dataclass(unsafe_hash=True)
class FTRL(Rule):
    """FTRL-Proximal (McMahan et al., "Ad Click Prediction", 2013) per coordinate, for touched rows.

    With n the sum of squared gradients, their own included, and q = (beta + sqrt(n)) / lr, the paper's update

        z += g - (q_new - q_old) * p
        p  = 0 where |z| <= l1, else -(z - sign(z) * l1) / (q_new + l2)

    is computed from p instead of z (the same numbers but for rounding: where p is not 0, z follows from p):

        t = p + (sign(p) * l1 - g) / (q + l2)      (at p = 0, -z stands for sign(p) * l1)
        p = t moved by l1 / (q + l2) towards 0, and 0 where that would pass 0

    - So an initial embedding counts like a learnt value, and so does one that is written from outside. (TensorFlow
      starts z at 0, whatever the embedding: its first updates forget the initial values.)
    - The learning rate may change: q is that of the moment. Without l1 and l2 an update is
      `p -= lr / (beta + sqrt(n)) * g`. A rate below 2^-100 leaves the row as it is.
    - An untouched row keeps z, n and p: nothing shrinks while a row rests.

    Attributes:
        lr: alpha of the paper, finite and >= 0; 1e-3 as in TensorFlow.
        beta: finite and >= 0; 1 as the paper advises (TensorFlow: 0).
        l1: finite and >= 0; 0 as in TensorFlow.
        l2: finite and >= 0; the paper's lambda_2: TensorFlow's l2_regularization_strength is half of it. 0.
        weight_decay: finite and >= 0; `g += weight_decay * p` first. Unlike l2 it enters n.

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
        """z and n of each element; z counts only where the embedding is 0."""
        return (("z", dim), ("n", dim))

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name."""
        return {
            "beta": float(self.beta),
            "l1": float(self.l1),
            "l2": float(self.l2),
            "weight_decay": float(self.weight_decay),
        }
