"""The dense part of a checkpoint: parameters, buffers, the dense optimizer's state, learning rates of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..capture.modules import embedding_modules, plain_name
from ..errors import CheckpointError
from .tree import Ordered

__all__ = [
    "DenseChange",
    "buffers_of",
    "dense_state",
    "extra_states_of",
    "learning_rates_of",
    "load_learning_rates",
    "load_optimizer",
    "parameters_of",
    "plan_optimizer",
    "plan_tensors",
]


@dataclass
class DenseChange:
    """What loading will do to dense tensors, and what does not fit."""

    copies: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """(name, the model's tensor, the saved one)."""
    missing: list[str] = field(default_factory=list)
    """In the model, not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, not in the model."""
    problems: list[str] = field(default_factory=list)

    def apply(self) -> None:
        """Copy the saved tensors."""
        with torch.no_grad():
            for _, target, saved in self.copies:
                target.copy_(saved)


def parameters_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Every parameter of the model, frozen ones included, and those that only the optimizer holds, by name.

    Raises:
        CheckpointError: a parameter is not initialized yet (lazy modules).
    """
    found: dict[str, Tensor] = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    known = {id(parameter) for parameter in model.parameters()}
    for g, group in enumerate(getattr(optimizer, "param_groups", ())):
        for k, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                known.add(id(parameter))
                found[f"dense_optimizer.param_groups[{g}][{k}]"] = parameter
    for name, parameter in found.items():
        if is_lazy(parameter):
            raise CheckpointError(
                f"checkpoint: parameter {name!r} is not initialized yet; run one forward of the model first"
            )
    return found


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of the model, by name: those that its state_dict would hold."""
    return {
        plain_name(f"{path}.{name}" if path else name): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def extra_states_of(model: nn.Module) -> dict[str, Any]:
    """What modules give as `get_extra_state()`, by module."""
    return {
        plain_name(path): module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def dense_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """{"parameters", "optimizer", "learning_rates"}, to be encoded.

    Raises:
        CheckpointError: the optimizer has no state_dict.
    """
    parameters = parameters_of(model, optimizer)
    state: dict[str, Any] = {
        "parameters": parameters,
        "optimizer": None,
        "learning_rates": learning_rates_of(model),
    }
    if optimizer is not None:
        if not callable(getattr(optimizer, "state_dict", None)):
            raise CheckpointError(
                f"checkpoint: the dense optimizer ({type(optimizer).__name__}) has no state_dict(); give it "
                "state_dict() and load_state_dict() that cover the optimizers it holds"
            )
        state["optimizer"] = {
            "class": _class_name(optimizer),
            "groups": _group_names(optimizer, parameters),
            "state": Ordered(optimizer.state_dict()),
        }
    return state


def learning_rates_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Per embedding module and table: its group's lr, lr_scale and what schedulers note there."""
    found = {}
    for path, module in embedding_modules(model).items():
        if module.row_stores():  # type: ignore[operator]
            groups: Any = module.sparse_optimizer.param_groups  # type: ignore[union-attr]
            found[path] = {
                group["table"]: {key: value for key, value in group.items() if key not in ("params", "table")}
                for group in groups
            }
    return found


def load_learning_rates(model: nn.Module, saved: Mapping[str, Any], tables: Sequence[str] | None) -> None:
    """Give every table its saved group, found by module and table, else by the table's name alone."""
    by_table: dict[str, list[Any]] = {}
    for per_module in saved.values():
        for table, group in per_module.items():
            by_table.setdefault(table, []).append(group)
    for path, module in embedding_modules(model).items():
        if not module.row_stores():  # type: ignore[operator]
            continue
        groups: Any = module.sparse_optimizer.param_groups  # type: ignore[union-attr]
        for group in groups:
            table = group["table"]
            candidates = by_table.get(table, [])
            chosen = saved.get(path, {}).get(table, candidates[0] if len(candidates) == 1 else None)
            if chosen is not None and (tables is None or table in tables):
                group.update(chosen)


def plan_tensors(kind: str, targets: Mapping[str, Tensor], saved: Mapping[str, Any]) -> DenseChange:
    """Compare tensors of the model with saved ones of the same names. `kind`: "parameter" or "buffer"."""
    change = DenseChange(
        missing=[name for name in targets if name not in saved],
        unexpected=[name for name in saved if name not in targets],
    )
    for name, target in targets.items():
        tensor = saved.get(name)
        if name not in saved:
            continue
        if not isinstance(tensor, Tensor):
            change.problems.append(f"{kind} {name!r} of the checkpoint is no tensor")
        elif tensor.shape != target.shape:
            change.problems.append(
                f"{kind} {name!r} has shape {list(target.shape)} in the model, {list(tensor.shape)} in the checkpoint"
            )
        elif tensor.dtype != target.dtype:
            change.problems.append(f"{kind} {name!r} is {target.dtype} in the model, {tensor.dtype} in the checkpoint")
        else:
            change.copies.append((name, target, tensor))
    return change


def plan_optimizer(optimizer: Any, saved: Any, parameters: Mapping[str, Tensor]) -> list[str]:
    """What keeps a saved optimizer state from being loaded; empty if nothing does."""
    if saved is None:
        return [
            f"the checkpoint holds no state of a dense optimizer for this {_class_name(optimizer)}; load without its "
            "state (optimizer_state=False, or strict=False), or save with optimizer="
        ]
    if optimizer is None:
        return [
            f"the checkpoint holds the state of a dense optimizer ({saved['class']}), but there is none to load it "
            "into; pass optimizer=, or load without optimizer states (optimizer_state=False)"
        ]
    if not callable(getattr(optimizer, "load_state_dict", None)):
        return [f"the dense optimizer ({_class_name(optimizer)}) has no load_state_dict()"]
    if saved["class"] != _class_name(optimizer):
        return [
            f"the dense optimizer is a {_class_name(optimizer)}, the checkpoint has the state of a {saved['class']}; "
            "use that, or load without optimizer states (optimizer_state=False)"
        ]
    groups = _group_names(optimizer, parameters)
    if groups != saved["groups"]:
        return [_different_groups(groups, saved["groups"])]
    return []


def _different_groups(mine: list[list[str]] | None, theirs: Any) -> str:
    if mine is None or not isinstance(theirs, list) or len(mine) != len(theirs):
        count = len(theirs) if isinstance(theirs, list) else "no"
        return f"the dense optimizer has {len(mine or ())} parameter groups, the checkpoint {count}"
    for g, (a, b) in enumerate(zip(mine, theirs)):
        if a != b:
            if len(a) != len(b):
                return f"param_groups[{g}] of the dense optimizer has {len(a)} parameters, {len(b)} in the checkpoint"
            k = next(k for k in range(len(a)) if a[k] != b[k])
            return f"param_groups[{g}]['params'][{k}] of the dense optimizer is {a[k]!r}, {b[k]!r} in the checkpoint"
    raise AssertionError("the groups are alike")


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """load_state_dict, with state tensors in the data types that they were saved in."""
    state = saved["state"]
    optimizer.load_state_dict(state)
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(state.get("state"), dict):
        return
    # torch casts state to the parameter's data type, which would round float32 state of a half-precision parameter.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters):
        for key, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.clone().to(loaded.device)


def _class_name(thing: Any) -> str:
    kind = type(thing)
    return kind.__qualname__ if kind.__module__.startswith("torch.optim") else f"{kind.__module__}.{kind.__qualname__}"


def _group_names(optimizer: Any, parameters: Mapping[str, Tensor]) -> list[list[str]] | None:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return None
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
