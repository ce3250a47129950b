"""What users put on an embedding module (hooks, attributes, buffers, submodules) goes to its counterpart."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["carry", "clash"]

_TREES = ("_parameters", "_buffers", "_modules")
_PLAIN_SETTINGS = ("padding_idx", "mode", "include_last_offset")


def carry(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the mode, hooks and additions of `old`; hooks stay removable by their handles, as dicts are shared.

    One of them is a module of torch, the other one of ours that has the rows.
    """
    usual = _usual(old) | _usual(new)
    for name, value in vars(old).items():
        if name not in _TREES and ("hook" in name or name == "_non_persistent_buffers_set" or name not in usual):
            vars(new)[name] = value
    for tree in _TREES:
        mine, theirs = vars(new)[tree], vars(old)[tree]
        for name in [name for name in mine if name not in usual]:
            del mine[name]
        mine.update({name: value for name, value in theirs.items() if name not in usual})
    for name in _PLAIN_SETTINGS:
        if name in vars(new):
            vars(new)[name] = vars(old)[name]
    new.training = old.training


def clash(old: nn.Module, new: nn.Module) -> str:
    """The name of an addition to `old` that `new` has for something else; "" if there is none."""
    added = {name for tree in _TREES for name in vars(old)[tree]} | set(vars(old))
    theirs = {*vars(new), *vars(new)["_modules"], *dir(type(new))} - set(dir(type(old)))
    return next(iter(sorted((added - _usual(old)) & theirs)), "")


def _usual(module: Any) -> set[str]:
    """Names of what a module of this class has of itself."""
    own = getattr(module, "own_names", None)
    if own is not None:
        return {*own, "weight"}
    return {*vars(type(module)(1, 1, device="meta")), "weight", "origin"}  # on meta nothing is drawn
