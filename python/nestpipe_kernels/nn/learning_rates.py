"""The learning rates of all tables of a model in one optimizer of torch's form."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.optim import SparseOptimizerGroup

__all__ = ["sparse_optimizer"]


def sparse_optimizer(model: nn.Module) -> SparseOptimizerGroup:
    """One torch-like optimizer with a group for every table of the model, to drive with one scheduler.

    Its `param_groups` are those of the modules' own `sparse_optimizer`, so a rate that is set in either counts. `step`
    and `zero_grad` do nothing: the pipeline updates rows, or the end of backward does.

    Args:
        model: contains embedding modules with an optimizer (nk.convert makes them), none more after this call.

    Raises:
        TypeError: no torch.nn.Module. ValueError: no embedding module with an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sparse_optimizer: model must be a torch.nn.Module, got {type(model).__name__}")
    groups: dict[int, SparseOptimizerGroup] = {}
    for module in model.modules():
        if isinstance(module, Collection) and module.row_stores():
            groups.setdefault(id(module.sparse_optimizer), module.sparse_optimizer)
    if not groups:
        raise ValueError(
            "sparse_optimizer: the model has no embedding module with an optimizer; call nk.convert(model, "
            "optimizer=...) first"
        )
    return _OfModel(list(groups.values()))


class _OfModel(SparseOptimizerGroup):
    """The groups of several optimizers, as they are whenever somebody asks."""

    def __init__(self, parts: list[SparseOptimizerGroup]) -> None:
        self._parts = parts
        torch.optim.Optimizer.__init__(self, self.param_groups, {})
        self._index = {group["table"]: i for i, group in enumerate(self.param_groups)}
        self._opt_called = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all parts."""
        return [group for part in self._parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """What torch does when it makes the optimizer, and when it loads a state: values go to the parts' groups."""
        for mine, given in zip(self.param_groups, groups):
            mine.update({key: value for key, value in given.items() if key != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError for a group that is no table's."""
        if not any(param_group is group for group in self.param_groups):
            raise ValueError("sparse_optimizer: groups are those of the model's tables; none can be added")

    def __reduce__(self) -> Any:
        """Raises TypeError: the groups are those of the model's tables, which a copy would lose."""
        raise TypeError(
            "sparse_optimizer: cannot be copied or pickled; keep its state_dict(), and call nk.sparse_optimizer(model) "
            "for another model"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.param_groups = state.pop("param_groups", [])
        super().__setstate__(state)
