"""Lets torch's learning-rate schedulers drive the row updates: one param_group per table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..types import SparseOptimizer

__all__ = ["SparseOptimizerGroup"]

LARGEST_RATE = torch.finfo(torch.float32).max


class SparseOptimizerGroup(torch.optim.Optimizer):
    """A torch optimizer in form: `param_groups[i]` holds "lr", "lr_scale" and "table" of one table.

    Rows are updated by the pipeline (or at the end of backward), with the learning rate that `current_lr` reads then;
    so `step` and `zero_grad` do nothing, and calling them beside the dense optimizer's is harmless. Give the group to a
    scheduler of torch.optim.lr_scheduler, or set `group["lr"]`, as with any optimizer. `state_dict` carries the
    learning rates; the rows' optimizer state lives in the row stores.

    Args:
        tables: (table name, optimizer settings, learning-rate scale) of each table; names distinct.

    Raises:
        ValueError: no tables, a name used twice, or a scale that is negative.
    """

    def __init__(self, tables: Iterable[tuple[str, SparseOptimizer, float]]) -> None:
        groups: list[dict[str, Any]] = []
        for table, optimizer, lr_scale in tables:
            if any(group["table"] == table for group in groups):
                raise ValueError(f"sparse optimizer: table {table!r} is given twice; names must be distinct")
            if not lr_scale >= 0:
                raise ValueError(f"sparse optimizer: lr_scale of table {table!r} must be >= 0, got {lr_scale!r}")
            # torch wants a parameter in each group, and the table's rows are none: an empty one stands in.
            stand_in = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            groups.append(
                {"params": [stand_in], "lr": float(optimizer.lr), "lr_scale": float(lr_scale), "table": table}
            )
        if not groups:
            raise ValueError("sparse optimizer: needs at least one table, got none")
        super().__init__(groups, {})
        self._index = {group["table"]: i for i, group in enumerate(groups)}
        # Schedulers warn when they are stepped before optimizer.step; here nobody has to call step.
        self._opt_called = True

    def current_lr(self, table: str) -> float:
        """The table's learning rate now, its scale included.

        Raises:
            KeyError: no such table; lists the tables there are.
            TypeError, ValueError: the rate is no number, or not finite in float32; names the table.
        """
        index = self._index.get(table)
        if index is None:
            raise KeyError(f"sparse optimizer: no table {table!r}; there are {', '.join(sorted(self._index))}")
        group = self.param_groups[index]
        where = f"sparse optimizer: lr of table {table!r} (param_groups[{index}])"
        try:
            rate = float(group["lr"]) * float(group["lr_scale"])
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where} must be a number, got {group['lr']!r}") from error
        if not abs(rate) <= LARGEST_RATE:
            raise ValueError(
                f"{where} times lr_scale must be finite in float32, got {group['lr']} * {group['lr_scale']}"
            )
        return rate

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Does nothing but evaluate `closure`: rows are updated once per batch, by whoever has all their gradients."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients of rows never outlive the batch they belong to."""
