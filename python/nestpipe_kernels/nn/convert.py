"""nk.convert and nk.revert: embedding modules of an existing model replaced in place, and back.

Everything is checked and every new module is made before the model is touched: an error leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.comm.topology import checked_groups
from nestpipe_kernels.nn import convert_torchrec
from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.nn.convert_checks import check_module, check_optimizer, check_shared, refusal
from nestpipe_kernels.nn.drop_in import SharedAccess, TableModule
from nestpipe_kernels.nn.embedding import Embedding
from nestpipe_kernels.nn.embedding_bag import EmbeddingBag
from nestpipe_kernels.nn.layout import group_key, make_layout
from nestpipe_kernels.nn.references import References
from nestpipe_kernels.nn.replaced_weight import give_back, take_away
from nestpipe_kernels.nn.sparse_tables import SparseTables
from nestpipe_kernels.nn.table_weight import TableWeight
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["convert", "revert"]


@dataclass
class _Found:
    """A module to replace."""

    name: str
    module: Any
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(parent, name in the parent), all of them."""

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Its parameters, by the name that they have in the model."""
        return {f"{self.name}.{key}": value for key, value in self.module.named_parameters()}


def convert(
    model: nn.Module,
    optimizer: SparseOptimizer,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    skip: Iterable[str] = (),
    dense_optimizer: Any = None,
    seed: int = 0,
    process_group: Any = None,
    sparse_groups: SparseGroups | int = 1,
) -> list[str]:
    """Replace every torch.nn.Embedding, torch.nn.EmbeddingBag and collection of TorchRec in `model` by its counterpart.

    Weights are copied, padding rows included; each rank keeps the rows that it owns, so weights must be alike on all
    ranks. Names, state_dict keys, hooks, training mode and attributes of the modules stay; modules that share a weight
    share a table. A weight that does not require a gradient becomes a frozen table. Where lists, dicts and objects
    among the attributes of the model's modules hold a module or its weight, they hold the new ones afterwards: a loss
    term over such a list goes on working. `model.parameters()` does not list the tables any more; whatever else still
    uses a replaced parameter (an optimizer, a closure) gets a RuntimeError that names it.

    Call it once the weights are as they shall be, before the pipeline, optimizers and DistributedDataParallel are made.

    Args:
        model: changed in place.
        optimizer: `nk.optim` object, the update rule of all tables that `settings` gives none.
        settings: name of a module -> keywords for its table: optimizer, data_type, capacity, admission, eviction,
            tier, lr_scale and others, see nk.nn.Embedding; of a TorchRec collection, of all its tables.
        skip: names of modules to leave as they are.
        dense_optimizer: optimizer of torch that was made from the model's parameters: converted ones are taken out.
        seed: for rows that come back after eviction, with the table's name.
        process_group, sparse_groups: as for EmbeddingBagCollection.

    Returns:
        The names of the modules that were replaced.

    Raises:
        TypeError, ValueError: nothing to convert, a module or a use of its weight that cannot be converted, or wrong
            arguments; names the module, what is in the way and what to do. Nothing has changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    check_optimizer(optimizer, "convert")
    found = _find(model, set(skip), dict(settings or {}))
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for one in found:
        for name, parameter in one.weights.items():
            weights.setdefault(id(parameter), (name, parameter))
    check_shared(model, [one.module for one in found], weights)
    _check_dense_optimizer(dense_optimizer, weights)
    references = _references(model, found, weights, dense_optimizer)
    shared = {"seed": seed, "process_group": process_group, "sparse_groups": sparse_groups}
    made = _make(found, optimizer, dict(settings or {}), shared)
    # Nothing below can fail.
    by_id: dict[int, Any] = {id(one.module): new for one, new in zip(found, made)}
    by_id |= {id(one.module.weight): new.weight for one, new in zip(found, made) if isinstance(new, TableModule)}
    references.replace(lambda value: by_id.get(id(value), value))
    for one, new in zip(found, made):
        _put(one, new)
    for group in getattr(dense_optimizer, "param_groups", ()):
        group["params"] = [p for p in group["params"] if id(p) not in weights]
    for name, parameter in weights.values():
        take_away(parameter, name.removesuffix(".weight"))
    return [one.name for one in found]


def revert(model: nn.Module) -> list[str]:
    """Put plain modules with the trained weights in place of what `convert` made, and of nk.nn.Embedding(Bag).

    Parameters are the ones that the model had before `convert`, so whoever still holds them has them again; optimizers
    from which `convert` took them need add_param_group. Collective if there are several ranks; every rank gets whole
    tables. Collections that convert did not make stay.

    Returns:
        The names of the modules that were replaced.

    Raises:
        TypeError: a table with an open vocabulary, which no plain module can hold.
        ValueError: nothing to revert, or a pipeline on the model is open. Nothing has changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert: model must be a torch.nn.Module, got {type(model).__name__}")
    places = _places(model)
    found = [
        _Found(places[key][0][0], module, [place[1:] for place in places[key]])
        for key, module in {id(m): m for m in model.modules()}.items()
        if isinstance(module, Collection) and (isinstance(module, TableModule) or _origin(module)) and key in places
    ]
    if not found:
        raise ValueError("revert: the model has no module that nk.convert made, and no nk.nn.Embedding or EmbeddingBag")
    for one in found:
        if one.module.before_outside_access is not None:
            raise ValueError(f"revert: {one.name!r} belongs to an open pipeline; close it first (pipeline.close())")
    states = [one.module.state_dict() for one in found]
    plain = [_plain(one.module) for one in found]
    new_of = {id(one.module): new for one, new in zip(found, plain)}
    held = References(model, lambda value: id(_module_of(value)) in new_of)
    for one, new, state in zip(found, plain, states):
        for name, parameter in new.named_parameters():
            give_back(parameter, state[name])
        new.train(one.module.training)
        _put(one, new)
    held.replace(lambda value: _weight_or_module(value, new_of[id(_module_of(value))]))
    return [one.name for one in found]


# --------------------------------------------------------------------------------------------------------- finding


def _places(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Of each module by id: (its name, parent, name in the parent), for all parents."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, parent in model.named_modules():
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((f"{path}.{key}" if path else key, parent, key))
    return places


def _find(model: nn.Module, skip: set[str], settings: dict[str, Any]) -> list[_Found]:
    """What is to be replaced, each module once, checked by itself."""
    if isinstance(model, (nn.Embedding, nn.EmbeddingBag)) or convert_torchrec.is_collection(model):
        raise refusal("the model", "it is itself the module to replace, which has no parent; put it into a module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise refusal("the model", "it is wrapped in DistributedDataParallel; convert the model inside, then wrap it")
    inside: set[int] = set()
    found, known = [], set()
    for key, places in _places(model).items():
        name, parent, last = places[0]
        module = parent._modules[last]
        assert module is not None
        if key in inside:
            continue
        wanted = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or convert_torchrec.is_collection(module)
        if not wanted and not isinstance(module, Collection):
            check_module(name, module, skip)
            continue
        inside |= {id(child) for child in module.modules()}
        if not wanted:
            continue
        known |= {place[0] for place in places}
        if skip & {place[0] for place in places}:
            continue
        check_module(name, module, skip)
        found.append(_Found(name, module, [place[1:] for place in places]))
    for what, names in (("skip", skip), ("settings", set(settings) - {one.name for one in found})):
        unknown = sorted(names - known) if what == "skip" else sorted(names)
        if unknown:
            raise ValueError(
                f"convert: {what} names {unknown[0]!r}, which is not converted; modules to convert are "
                f"{[one.name for one in found]}"
            )
    if not found:
        raise ValueError(
            "convert: the model has no torch.nn.Embedding, torch.nn.EmbeddingBag or TorchRec collection to convert"
        )
    return found


def _check_dense_optimizer(optimizer: Any, weights: Mapping[int, tuple[str, Any]]) -> None:
    if optimizer is None:
        return
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            f"convert: dense_optimizer must be an optimizer of torch, got {type(optimizer).__name__}; make it after "
            "nk.convert, from model.parameters()"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in weights and optimizer.state.get(parameter):
                name = weights[id(parameter)][0]
                state = ", ".join(map(str, optimizer.state[parameter]))
                raise refusal(
                    name.removesuffix(".weight"),
                    f"dense_optimizer has trained {name!r} and holds its state ({state}), which the rows would lose; "
                    "convert before training, or drop the state yourself (optimizer.state.pop(parameter))",
                )


def _references(
    model: nn.Module, found: Sequence[_Found], weights: Mapping[int, tuple[str, Any]], dense_optimizer: Any
) -> References:
    """Where the model holds what is to be replaced. Raises ValueError where it cannot be replaced."""
    wanted = {id(one.module): one.module for one in found} | {key: p for key, (_, p) in weights.items()}
    names = {id(one.module): one.name for one in found} | {key: name for key, (name, _) in weights.items()}
    replaceable = {id(one.module.weight) for one in found if isinstance(one.module, (nn.Embedding, nn.EmbeddingBag))}
    replaceable |= {id(one.module) for one in found}
    references = References(model, lambda value: id(value) in wanted)
    own = {id(p) for group in getattr(dense_optimizer, "param_groups", ()) for p in group["params"]}
    for place, value in references.fixed:
        if id(value) not in own:
            raise refusal(
                names[id(value)],
                f"{place} holds it, where it cannot be replaced; make an optimizer after nk.convert (or pass it as "
                "dense_optimizer), keep weights for loss terms in a list or dict",
            )
    for place, value in references.found:
        if id(value) not in replaceable:
            raise refusal(
                names[id(value)],
                f"{place} holds this weight of a TorchRec collection, which cannot be read outside of lookups; take it "
                "out of there, or use a torch.nn.EmbeddingBag",
            )
    return references


# ---------------------------------------------------------------------------------------------------------- making


def _make(
    found: Sequence[_Found], optimizer: SparseOptimizer, settings: dict[str, Mapping[str, Any]], shared: dict[str, Any]
) -> list[Collection]:
    """The new modules, filled; of modules that share a weight one has the table."""
    owners: dict[int, tuple[str, TableModule]] = {}
    to_fill: list[tuple[Any, TableModule]] = []
    made: dict[int, Collection] = {}
    for one in sorted(found, key=lambda one: not isinstance(one.module, nn.EmbeddingBag)):  # bags can lend to any
        given = {"optimizer": optimizer, **settings.get(one.name, {})}
        check_optimizer(given["optimizer"], f"convert: settings of {one.name!r}")
        if convert_torchrec.is_collection(one.module):
            made[id(one)] = convert_torchrec.make(one.name, one.module, given, shared)
            continue
        key = id(one.module.weight)
        owner = owners.get(key)
        new = _make_table(one, {**shared, **given})
        if owner is None:
            owners[key] = one.name, new
            to_fill.append((one.module, new))
        else:
            _check_tie(one, *owner)
        made[id(one)] = new
    _share_stores([new for _, new in to_fill], shared)
    for old, new in to_fill:
        new.fill(old.weight.detach())
    for one in found:
        new_one = made[id(one)]
        if isinstance(new_one, TableModule) and owners[id(one.module.weight)][1] is not new_one:
            new_one.tie(owners[id(one.module.weight)][1])
    return [made[id(one)] for one in found]


def _make_table(one: _Found, given: dict[str, Any]) -> TableModule:
    """The new module without rows."""
    old = one.module
    cls: Any = EmbeddingBag if isinstance(old, nn.EmbeddingBag) else Embedding
    frozen = not old.weight.requires_grad
    keywords: dict[str, Any] = {"padding_idx": old.padding_idx, "name": one.name, **given}
    if cls is EmbeddingBag:
        keywords |= {"mode": old.mode, "include_last_offset": old.include_last_offset, "trainable": not frozen}
    else:
        keywords |= {"_freeze": frozen}
    keywords["_fill"] = False
    try:
        new: TableModule = cls(old.num_embeddings, old.embedding_dim, **keywords)
    except (TypeError, ValueError) as error:
        raise type(error)(f"convert: {one.name!r} ({type(old).__name__}): {error}") from error
    _take_over(old, new)
    return new


def _check_tie(one: _Found, name: str, lender: Any) -> None:
    old = one.module
    if isinstance(old, nn.EmbeddingBag) and (lender.mode, lender.padding_idx) != (old.mode, _padding(old)):
        raise refusal(
            one.name,
            f"it shares its weight with {name!r}, but they differ in mode or padding_idx; give them the same, or "
            "leave both out (skip=)",
        )


def _padding(old: Any) -> int | None:
    return None if old.padding_idx is None else old.padding_idx % old.num_embeddings


def _share_stores(modules: Sequence[TableModule], shared: dict[str, Any]) -> None:
    """Put tables that are alike into one store each, as a collection does: less to do in a step."""
    groups: dict[Any, list[TableModule]] = {}
    for module in modules:
        groups.setdefault(group_key(*module.table_rule), []).append(module)
    for members in groups.values():
        access = SharedAccess()
        configs, rules = zip(*(module.table_rule for module in members))
        sparse_groups = checked_groups(shared["sparse_groups"], "convert")
        layout = make_layout(configs, rules, False)
        tables = SparseTables(layout, shared["seed"], shared["process_group"], sparse_groups, access)
        for module in members:
            module.use_tables(tables, access)


def _take_over(old: nn.Module, new: Collection) -> None:
    """Mode, hooks and the user's own attributes; hooks stay removable by their handles, as they share their dicts."""
    usual = {*vars(type(old)(1, 1, device="meta")), "origin"}  # on meta nothing is drawn
    for name, value in vars(old).items():
        if "hooks" in name or name not in usual:
            vars(new)[name] = value
    new.training = old.training
    new.origin = (old,)  # type: ignore[assignment]


def _put(one: _Found, new: nn.Module) -> None:
    for parent, key in one.places:
        parent._modules[key] = new


# -------------------------------------------------------------------------------------------------------- reverting


def _origin(module: Collection) -> tuple[nn.Module, ...]:
    found: tuple[nn.Module, ...] = vars(module).get("origin", ())
    return found


def _module_of(value: Any) -> Any:
    return value.module if isinstance(value, TableWeight) else value


def _weight_or_module(value: Any, plain: Any) -> Any:
    return plain.weight if isinstance(value, TableWeight) else plain


def _plain(module: Collection) -> nn.Module:
    """The module that this one stands for, or one like it, whose weights are still to be filled."""
    if _origin(module):
        return _origin(module)[0]
    assert isinstance(module, TableModule)
    arguments: dict[str, Any] = {"padding_idx": module.padding_idx, "device": "cpu", "dtype": torch.float32}
    if isinstance(module, EmbeddingBag):
        arguments |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
    cls: Any = nn.EmbeddingBag if isinstance(module, EmbeddingBag) else nn.Embedding
    plain: nn.Module = cls(module.num_embeddings, module.embedding_dim, **arguments)
    plain.weight.requires_grad_(module.trainable)
    return plain
