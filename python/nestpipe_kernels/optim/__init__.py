"""Settings of the row updates, one dataclass per rule, and the torch-like group that learning-rate schedulers drive.

The arithmetic is in ops/row_update. All rules are lazy: a row without a gradient in a batch keeps its embedding and its
state, whatever the rule; weight decay too acts only when a row is updated. Defaults are those of torch.optim where
torch has the rule. State of a row is kept whole or starts anew (every float `state_init()`, `updates` 0).
"""

from __future__ import annotations

from .adagrad import Adagrad, RowWiseAdagrad
from .adam import LAMB, Adam, AdamW, RowWiseAdam
from .ftrl import FTRL
from .group import SparseOptimizerGroup
from .sgd import SGD

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizerGroup",
]
