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
from nestpipe_kernels.nn.carry_over import carry, clash
from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.nn.convert_checks import (
    check_module,
    check_optimizer,
    check_shared,
    check_storages,
    check_ties,
    check_wrapped,
    refusal,
    unknown_lookup,
)
from nestpipe_kernels.nn.convert_settings import by_first_name, checked_settings, checked_skip, of_tied
from nestpipe_kernels.nn.drop_in import SharedAccess, TableModule
from nestpipe_kernels.nn.embedding import Embedding
from nestpipe_kernels.nn.embedding_bag import EmbeddingBag
from nestpipe_kernels.nn.freezing import unwatch, watch
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
    def weights(self) -> dict[str, Any]:
        """Its parameters, by the name that they have in the model."""
        if isinstance(self.module, (nn.Embedding, nn.EmbeddingBag)):
            return {f"{self.name}.weight": self.module.weight}
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
    ranks. Names, state_dict keys, hooks, training mode, attributes, buffers and submodules of the modules stay; modules
    that share a weight share a table. A weight that does not require a gradient becomes a frozen table. Where lists,
    dicts and objects among the attributes of the model's modules hold a module or its weight, they hold the new ones
    afterwards: a loss term over such a list goes on working. `model.parameters()` does not list the tables any
    more; whatever else still uses a replaced parameter (an optimizer, a closure) gets a RuntimeError that names it.

    Call it once the weights are as they shall be, before the pipeline, optimizers and DistributedDataParallel are made.

    Args:
        model: changed in place.
        optimizer: `nk.optim` object, the update rule of all tables that `settings` gives none.
        settings: name of a module -> keywords for its table: optimizer, data_type, capacity, admission, eviction,
            tier, lr_scale, trainable and others, see nk.nn.Embedding; of a TorchRec collection, of all its tables.
            Any of the module's names will do; those of one module count for all that share its weight.
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
    found, chosen = _find(model, checked_skip(skip), checked_settings(settings))
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for one in found:
        for name, parameter in one.weights.items():
            weights.setdefault(id(parameter), (name, parameter))
    check_shared(model, [one.module for one in found], weights)
    check_storages(model, weights)
    _check_dense_optimizer(dense_optimizer, weights)
    references = _references(model, found, weights, dense_optimizer)
    shared = {"seed": seed, "process_group": process_group, "sparse_groups": sparse_groups}
    made = _make(found, optimizer, chosen, shared)
    by_id: dict[int, Any] = {id(one.module): new for one, new in zip(found, made)}
    by_id |= {id(one.module.weight): new.weight for one, new in zip(found, made) if isinstance(new, TableModule)}
    names = {id(one.module): one.name for one in found}
    names |= {key: name.removesuffix(".weight") for key, (name, _) in weights.items()}

    def refused(value: Any, reason: str) -> ValueError:
        name = names[id(value)]
        return refusal(name, f"{reason}; keep it in a plain list, dict or tuple, or leave it out: skip=[{name!r}]")

    references.replace(lambda value: by_id.get(id(value), value), refused)
    # Nothing below can fail.
    for one, new in zip(found, made):
        _put(one, new)
    for one, new in zip(found, made):
        if isinstance(new, TableModule):
            carry(one.module, new)
            new.origin = (one.module,)
    for group in getattr(dense_optimizer, "param_groups", ()):
        group["params"] = [p for p in group["params"] if id(p) not in weights]
    for name, parameter in weights.values():
        take_away(parameter, name.removesuffix(".weight"))
    watch(model)
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
    states = [_rows(one.module) for one in found]
    plain = [_plain(one.module) for one in found]
    new_of = {id(one.module): new for one, new in zip(found, plain)}
    weights: dict[int, Any] = {}  # of modules that share a table the weight of one: of its owner, if it is here
    for one in sorted(found, key=lambda one: getattr(one.module, "table_module", None) is not one.module):
        if isinstance(one.module, TableModule):
            weights.setdefault(id(one.module.table_module), new_of[id(one.module)].weight)

    def replaced(value: Any) -> Any:
        if isinstance(value, TableWeight):
            return weights[id(value.module.table_module)]
        return new_of[id(value)]

    def refused(value: Any, reason: str) -> ValueError:
        name = next(one.name for one in found if one.module is _module_of(value))
        return ValueError(f"revert: {name!r} cannot be reverted: {reason}; take it out of there")

    References(model, lambda value: id(_module_of(value)) in new_of).replace(replaced, refused)
    # Nothing below can fail.
    for one, new in zip(found, plain):
        _put(one, new)
    for one, new, state in zip(found, plain, states):
        if isinstance(one.module, TableModule):
            new._parameters["weight"] = weights[id(one.module.table_module)]
            carry(one.module, new)
        for name, rows in state.items():
            give_back(new.get_parameter(name), rows)
        new.training = one.module.training
    unwatch(model)
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


def _find(
    model: nn.Module, skip: set[str], settings: dict[str, dict[str, Any]]
) -> tuple[list[_Found], dict[str, dict[str, Any]]]:
    """What is to be replaced, each module once, checked by itself; and the settings by these modules' names."""
    if isinstance(model, (nn.Embedding, nn.EmbeddingBag)) or convert_torchrec.is_collection(model):
        raise refusal("the model", "it is itself the module to replace, which has no parent; put it into a module")
    inside: set[int] = set()
    found: list[_Found] = []
    to_skip: dict[str, str] = {}  # every name of a module that could be converted, or is refused -> its first name
    for key, places in _places(model).items():
        name, parent, last = places[0]
        module = parent._modules[last]
        assert module is not None
        if key in inside:
            continue
        plain = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        wanted = plain or convert_torchrec.is_collection(module)
        if not plain and (wanted or isinstance(module, Collection)):
            inside |= {id(child) for child in module.modules()}
        if isinstance(module, Collection):
            continue
        if wanted or unknown_lookup(module):
            to_skip |= {place[0]: name for place in places}
        if skip & {place[0] for place in places}:
            continue
        check_module(name, module)
        if wanted:
            found.append(_Found(name, module, [place[1:] for place in places]))
    by_first_name("skip", skip, to_skip)
    kept = {one.name for one in found}
    first = by_first_name("settings", settings, {key: name for key, name in to_skip.items() if name in kept})
    if not found:
        raise ValueError(
            "convert: the model has no torch.nn.Embedding, torch.nn.EmbeddingBag or TorchRec collection to convert"
        )
    check_wrapped(model, {id(one.module): one.name for one in found})
    tied: dict[int, list[str]] = {}
    for one in found:
        if isinstance(one.module, (nn.Embedding, nn.EmbeddingBag)):
            tied.setdefault(id(one.module.weight), []).append(one.name)
    return found, of_tied(list(tied.values()), {first[name]: given for name, given in settings.items()})


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
    found: Sequence[_Found],
    optimizer: SparseOptimizer,
    settings: Mapping[str, Mapping[str, Any]],
    shared: dict[str, Any],
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
        made[id(one)] = new
    tables = ((one, made[id(one)]) for one in found)
    check_ties([(one.name, one.module, new.table_rule[1]) for one, new in tables if isinstance(new, TableModule)])
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
    if "padding_idx" in given:
        raise ValueError(
            f"convert: settings of {one.name!r} give 'padding_idx', which is taken from the module; change it there "
            "before nk.convert"
        )
    keywords: dict[str, Any] = {"padding_idx": old.padding_idx, "name": one.name, **given}
    trainable = keywords.pop("trainable", old.weight.requires_grad)
    if cls is EmbeddingBag:
        keywords |= {"mode": old.mode, "include_last_offset": old.include_last_offset, "trainable": trainable}
    else:
        keywords |= {"_freeze": not trainable}
    keywords["_fill"] = False
    try:
        new: TableModule = cls(old.num_embeddings, old.embedding_dim, **keywords)
    except (TypeError, ValueError) as error:
        raise type(error)(f"convert: {one.name!r} ({type(old).__name__}): {error}") from error
    taken = clash(old, new)
    if taken:
        raise refusal(
            one.name,
            f"its attribute {taken!r} has the name of one that nk.nn.{cls.__name__} has; rename it, or leave the "
            f"module out: skip=[{one.name!r}]",
        )
    return new


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


def _put(one: _Found, new: nn.Module) -> None:
    for parent, key in one.places:
        parent._modules[key] = new


# -------------------------------------------------------------------------------------------------------- reverting


def _origin(module: Collection) -> tuple[nn.Module, ...]:
    found: tuple[nn.Module, ...] = vars(module).get("origin", ())
    return found


def _module_of(value: Any) -> Any:
    return value.module if isinstance(value, TableWeight) else value


def _rows(module: Collection) -> dict[str, Any]:
    """All rows, by the name of the parameter that is to have them; of tied modules once."""
    if not isinstance(module, TableModule):
        return module.state_dict()
    return {"weight": module._sparse_tables("revert").read(module._configs[0].name)}


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
