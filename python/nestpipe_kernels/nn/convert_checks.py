"""What nk.convert refuses: modules and uses of their weights that would not mean the same afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe_kernels.nn import convert_torchrec

__all__ = [
    *("check_module", "check_optimizer", "check_shared", "check_storages", "check_ties", "check_wrapped"),
    *("refusal", "unknown_lookup"),
]


def refusal(name: str, reason: str) -> ValueError:
    """The error that says why a module cannot be converted, and what to do."""
    return ValueError(f"convert: {name!r} cannot be converted: {reason}")


def check_optimizer(optimizer: Any, where: str) -> None:
    """Raises TypeError for what is no `nk.optim` object."""
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{where}: optimizer must be an nk.optim object such as nk.optim.Adam(lr=1e-3), which updates the tables, "
            f"got torch's {type(optimizer).__name__}; give that one as dense_optimizer"
        )
    if isinstance(optimizer, type):
        raise TypeError(
            f"{where}: optimizer must be an nk.optim object such as nk.optim.Adam(lr=1e-3), got the class "
            f"{optimizer.__name__}; call it: {optimizer.__name__}(lr=...)"
        )
    if not (hasattr(optimizer, "state_floats") and hasattr(optimizer, "hyper")):
        raise TypeError(
            f"{where}: optimizer must be an nk.optim object such as nk.optim.Adam(lr=1e-3), got "
            f"{type(optimizer).__name__}"
        )


def check_module(name: str, module: nn.Module) -> None:
    """Refuse a module that looks rows up and has no counterpart, or one with settings that have none.

    Raises:
        ValueError: names the module, what is in the way, and what to do.
    """
    leave = f"leave it out: skip=[{name!r}]"
    if convert_torchrec.is_collection(module):
        for key, weight in module.named_parameters():
            _check_weight(f"{name}.{key}", weight, (torch.float32, torch.float16), leave)
        return
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        reason = unknown_lookup(module)
        if reason:
            raise refusal(name, f"{reason}; convert before that is done, or {leave}")
        return
    kind = "EmbeddingBag" if isinstance(module, nn.EmbeddingBag) else "Embedding"
    if type(module) not in (nn.Embedding, nn.EmbeddingBag) or "forward" in vars(module):
        raise refusal(
            name,
            f"it is a {type(module).__name__}, a variant of torch.nn.{kind} whose forward may do something else; use "
            f"torch.nn.{kind} itself, or {leave}",
        )
    if module._parameters.get("weight") is None:
        raise refusal(
            name, f"its weight is computed (by a parametrization, say) and no parameter; undo that, or {leave}"
        )
    if module.max_norm is not None:
        raise refusal(
            name,
            f"max_norm={module.max_norm} changes rows during forward, but they must not change before the update; set "
            f"it to None and normalise what the module returns, or {leave}",
        )
    if module.scale_grad_by_freq:
        raise refusal(name, f"scale_grad_by_freq counts ids in a batch, which is split; set it to False, or {leave}")
    _check_weight(name, module.weight, (torch.float32,), leave)
    declared = [module.num_embeddings, module.embedding_dim]
    if list(module.weight.shape) != declared:
        raise refusal(
            name,
            f"its weight is {list(module.weight.shape)}, but its num_embeddings and embedding_dim say {declared}: the "
            f"weight has been replaced; set both to the weight's, or {leave}",
        )


def _check_weight(name: str, weight: Tensor, dtypes: Sequence[torch.dtype], leave: str) -> None:
    if weight.device.type == "meta" or nn.parameter.is_lazy(weight):
        raise refusal(name, f"its weight has no values yet (device meta); materialise it first, or {leave}")
    if weight.dtype not in dtypes:
        kind = str(weight.dtype).removeprefix("torch.")
        raise refusal(
            name,
            f"its weight is {kind}, but rows are computed and returned in float32; call .float() on the module "
            f"(settings data_type=nk.DataType.BF16 stores two bytes per element), or {leave}",
        )
    if weight.grad is not None:
        raise refusal(name, "its weight has a gradient that no optimizer would see; call model.zero_grad() first")
    hooks = getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None)
    if hooks:
        raise refusal(
            name, f"its weight has hooks on its gradient, which rows in a store do not run; remove them, or {leave}"
        )


def unknown_lookup(module: nn.Module) -> str:
    """Why a module that is no embedding module by type is one all the same; "" if it is none."""
    if isinstance(module, torch.jit.ScriptModule):
        kind = getattr(module, "original_name", "")
        return f"it is a compiled {kind} (torch.jit)" if kind in ("Embedding", "EmbeddingBag") else ""
    home = type(module).__module__
    foreign = home.startswith(("torchrec.", "fbgemm_gpu.", "torch.ao.", "torch.nn.quantized"))
    if foreign and "Embedding" in type(module).__name__ and any(True for _ in module.parameters(recurse=False)):
        return f"it is a {home}.{type(module).__name__}, which holds rows in a form of its own"
    if foreign and type(module).__name__.startswith("Sharded"):
        return f"it is a {home}.{type(module).__name__}, which has been sharded"
    return ""


def check_shared(model: nn.Module, modules: Sequence[nn.Module], weights: Mapping[int, tuple[str, Any]]) -> None:
    """Refuse weights that modules which stay hold as their own parameter, as an output layer tied to a table does.

    Raises:
        ValueError: names both.
    """
    tables = (nn.Embedding, nn.EmbeddingBag)
    own = {id(module) for module in modules if isinstance(module, tables)}
    whole = {id(part) for module in modules if not isinstance(module, tables) for part in module.modules()}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if id(module) in whole or (id(module) in own and key == "weight"):
                continue
            if parameter is not None and id(parameter) in weights:
                name = weights[id(parameter)][0].removesuffix(".weight")
                if isinstance(module, tables) and key == "weight":
                    raise refusal(
                        name,
                        f"it shares its weight with {path!r}, which is not converted; convert both, or leave both out: "
                        f"skip={sorted([name, path])}",
                    )
                raise refusal(
                    name,
                    f"its weight is also {path + '.' if path else ''}{key} of a {type(module).__name__}; compute that "
                    f"from model.{name}.weight in forward (torch.nn.functional.linear(x, model.{name}.weight)), or "
                    f"leave the module out: skip=[{name!r}]",
                )


def check_storages(model: nn.Module, weights: Mapping[int, tuple[str, Any]]) -> None:
    """Refuse weights whose memory another parameter or a buffer of the model uses, too: a tie that would be cut.

    Raises:
        ValueError: names both.
    """
    others = (*model.named_parameters(), *model.named_buffers())
    known = [(_extent(value), name, id(value)) for name, value in others]
    places = sorted(place for place in known if place[0])
    reach: Any = None
    for place in places:
        where, name, key = place
        if reach is not None and where[0] < reach[0][1]:
            pair = [(name, key), (reach[1], reach[2])]
            if pair[0][1] not in weights:
                pair.reverse()
            if pair[0][1] in weights:
                table = weights[pair[0][1]][0].removesuffix(".weight")
                raise refusal(
                    table,
                    f"its weight and {pair[1][0]!r} are different tensors in the same memory, so that they change "
                    f"together now and would not afterwards; share the parameter itself between embedding modules, "
                    f"clone() one of the two, or leave the module out: skip=[{table!r}]",
                )
        if reach is None or where[1] > reach[0][1]:
            reach = place


def _extent(value: Tensor) -> Any:
    """First byte of a tensor's elements and the one after the last; None if it has no memory of its own."""
    try:
        start = value.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not start or not value.numel() or value.layout is not torch.strided:
        return None
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return start, start + (last + 1) * value.element_size()


def check_wrapped(model: nn.Module, names: Mapping[int, str]) -> None:
    """Refuse modules inside of a DistributedDataParallel, which has taken their parameters. Raises ValueError."""
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            found = next((names[id(part)] for part in module.modules() if id(part) in names), None)
            if found is not None:
                what = f"{path!r}" if path else "the model"
                raise refusal(
                    found, f"{what} is wrapped in DistributedDataParallel; convert the model inside, then wrap it"
                )


def check_ties(tables: Sequence[tuple[str, Any, Any]]) -> None:
    """Refuse modules that share a weight and treat it differently.

    Args:
        tables: name, torch's module and update rule of each.

    Raises:
        ValueError: names both.
    """
    for name, module, rule in tables:
        for other_name, other, _ in tables:
            if other is module or other.weight is not module.weight:
                continue
            bags = isinstance(module, nn.EmbeddingBag) and isinstance(other, nn.EmbeddingBag)
            if bags and (other.mode, _padding(other)) != (module.mode, _padding(module)):
                raise refusal(
                    other_name,
                    f"it shares its weight with {name!r}, but they differ in mode or padding_idx; give them the same, "
                    f"or leave both out (skip={[name, other_name]})",
                )
            padding = _padding(module)
            if not bags and padding not in (None, _padding(other)) and not _rests(rule):
                if isinstance(module, nn.EmbeddingBag):
                    continue  # leaves the row out, so nothing moves it
                raise refusal(
                    name,
                    f"it shares its weight with {other_name!r}, which trains row {padding}, while its own padding_idx "
                    f"is {padding}: a lookup of it here would move it by momentum or decay; give both the same "
                    f"padding_idx, use a rule without them (nk.optim.SGD(lr), Adagrad), or leave both out "
                    f"(skip={[name, other_name]})",
                )


def _padding(module: Any) -> int | None:
    return None if module.padding_idx is None else module.padding_idx % module.num_embeddings


def _rests(rule: Any) -> bool:
    """Whether a row stays as it is when its gradient is zero, whatever came before."""
    hyper = rule.hyper()
    return rule.name in ("sgd", "adagrad", "row_wise_adagrad") and not (hyper.get("momentum") or hyper["weight_decay"])
