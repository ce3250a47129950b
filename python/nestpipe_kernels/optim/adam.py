"""Settings of the rules with two moments: Adam, AdamW, Adam with one second moment per row, LAMB.

All are lazy: a row without a gradient in a batch keeps embedding and moments, and weight decay does not touch it. The
step count t of the bias correction is the training's (`bias_correction="step"`: it advances with every step, also
those without the row) or the row's own count of updates ("row"). By row, the first update of a row has the size of lr
whenever it comes. By step, a row's moments are nearer 0 than a late t assumes, the second more so than the first: its
first update is up to (1 - beta1) / sqrt(1 - beta2) times lr, 3.2 lr with the default betas, and later ones less and
less too large.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._rule import MomentRule

__all__ = ["LAMB", "Adam", "AdamW", "RowWiseAdam"]


@dataclass(unsafe_hash=True)
class Adam(MomentRule):
    """Lazy Adam, as torch.optim.SparseAdam: only rows with a gradient move, and only their moments decay.

    Attributes:
        lr: learning rate, finite and >= 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the uncorrected second moment, finite and > 0; 1e-8 as in torch.optim.SparseAdam.
        weight_decay: finite and >= 0; `g += weight_decay * p` first (L2) as torch.optim.Adam; SparseAdam has none.
        bias_correction: "step" counts every step of the training, also those without this row (SparseAdam's rule);
            "row" counts the row's own updates.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "adam"


@dataclass(unsafe_hash=True)
class AdamW(MomentRule):
    """torch.optim.AdamW for touched rows: `p -= lr * weight_decay * p` beside Adam's step (Loshchilov & Hutter, 2019).

    Only updates of the row decay it: a row that is not in the batch does not shrink, and its moments stand still.

    Attributes:
        lr: learning rate, finite and >= 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the corrected second moment, finite and > 0; 1e-8 as in torch.optim.AdamW.
        weight_decay: finite and >= 0, times lr; 0.01 as in torch.optim.AdamW.
        bias_correction: "step" counts every step of the training; "row" counts the row's own updates.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    weight_decay: float = 1e-2

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "adamw"


@dataclass(unsafe_hash=True)
class RowWiseAdam(MomentRule):
    """Adam with one second moment per row, of `mean(g * g)`: a row of `dim` needs dim + 1 numbers instead of 2 dim.

    `p -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)` with corrected moments m_hat and v_hat: what FBGEMM
    calls partial row-wise Adam (PARTIAL_ROWWISE_ADAM), its weight decay beside the step included.

    Attributes:
        lr: learning rate, finite and >= 0; 1e-3 as in torch.optim.Adam.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the corrected second moment, finite and > 0; 1e-8 as in torch.optim.Adam.
        weight_decay: finite and >= 0, times lr, beside the step as in AdamW; updates of the row alone decay it.
        bias_correction: "step" counts every step of the training; "row" counts the row's own updates.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "row_wise_adam"

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """First moments per element, then the row's second moment."""
        return (("exp_avg", dim), ("exp_avg_sq", 1))


@dataclass(unsafe_hash=True)
class LAMB(MomentRule):
    """LAMB (You et al., 2020) with every row as a layer: `u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p`,
    `p -= lr * |p| / |u| * u`.

    The ratio of norms is 1 where either norm is 0, so a row of zeros learns; it is not clipped. A row moves by lr
    times its own length at each update, whatever its gradient's size.

    Attributes:
        lr: learning rate, finite and >= 0; 1e-3.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the corrected second moment, finite and > 0; 1e-6 as in TensorFlow Addons.
        weight_decay: finite and >= 0, inside the direction; none by default (the paper trains BERT with 0.01).
        bias_correction: "step" counts every step of the training; "row" counts the row's own updates.

    Raises:
        TypeError, ValueError: a setting is none of these; the message names it.
    """

    eps: float = 1e-6

    @property
    def name(self) -> str:
        """The name that native code, checkpoints and messages use."""
        return "lamb"
