"""What all ranks must have in common when a pipeline is made: facts, each of named entries in the words of errors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..config import PipelineConfig
from ..stages.state import RankState, StoreBinding
from ..types import UNBOUNDED, TableSpec

__all__ = ["Facts", "common_facts", "first_difference"]

Facts = dict[str, dict[str, str]]
"""fact -> entry -> value. Entries have an order, which ranks must have in common, too."""

_NOT_COMPARED = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of an optimizer's groups that are no settings, or say how steps are computed and not which."""
_MOST_SHOWN = 120


def common_facts(rank: RankState, config: PipelineConfig) -> Facts:
    """This rank's facts, the cheapest to understand first."""
    settings: dict[str, object] = {
        "schedule": config.schedule,
        "num_micro_batches": config.num_micro_batches,
        "device": rank.backend.kind,
        "row_transfer": config.row_transfer,
        "early_send": config.early_send,
        "owner_pooling": _pooling(rank),
        "edge_share": float(config.edge_share),
        "row_wire": config.row_wire,
        "gradient_wire": config.gradient_wire,
        "nan_policy": config.nan_policy,
        "loss_weighting": config.loss_weighting,
        "grad_scaler": "given" if rank.loss_scale is not None else "none",
        "sparse groups": rank.topology.settings,
    }
    tables: dict[str, str] = {}
    for binding in rank.bindings:
        for table, rate in zip(binding.store.tables, _rates(binding)):
            tables |= _table("" if binding.sharers else binding.module_name, binding.store, table, rate)
    dense = {
        f"dense parameter {name!r}": f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}"
        for name, p in rank.dense_parameters
    }
    return {
        **{name: {name: str(value)} for name, value in settings.items()},
        "embedding tables": tables,
        "initial rows": _initial_rows(rank),
        "dense parameters": dense,
        "the dense optimizer": _optimizer(rank.dense_optimizer),
    }


def _pooling(rank: RankState) -> str:
    features = [
        feature
        for binding in rank.bindings
        for (feature, *_), pooled in zip(binding.module.store_segments(binding.index), binding.pooled)
        if pooled
    ]
    return ("auto: " if rank.owner_pooling_auto else "") + (", ".join(map(repr, features)) or "none")


def _initial_rows(rank: RankState) -> dict[str, str]:
    """Of modules that were given whole tables, of which each rank keeps its rows: what it was given."""
    digests = {name: getattr(module, "start_digest", None) for name, module in rank.modules.items()}
    return {f"digest of the initial weight of {name!r}": str(digest) for name, digest in digests.items() if digest}


def _rates(binding: StoreBinding) -> list[str]:
    """The tables' learning rates now; what is wrong with one the first step says, with the batch."""
    try:
        return [str(rate) for rate in binding.module.learning_rates(binding.index).numpy()]
    except (TypeError, ValueError):
        return ["unknown"] * len(binding.store.tables)


def _table(module: str, store: Any, table: TableSpec, rate: str) -> dict[str, str]:
    name = f"table {table.name!r}" + (f" of {module!r}" if module else "")
    values: dict[str, object] = {
        "dim": store.dim,
        "num_embeddings": "UNBOUNDED" if table.num_embeddings == UNBOUNDED else table.num_embeddings,
        "optimizer": repr(store.optimizer),
        "init": repr(table.init),
        "seed": table.seed,
        "max_grad_norm": table.max_grad_norm,
        "trainable": table.trainable,
        "learning rate": rate,
        "data_type": store.data_type.value,
        "stochastic_rounding": store.stochastic_rounding,
        "admission": repr(table.admission),
        "eviction": repr(table.eviction),
        "default row": repr(table.default),
    }
    return {name: "it", **{f"{field} of {name}": str(value) for field, value in values.items()}}


def _optimizer(optimizer: Any) -> dict[str, str]:
    """Its class, and the plain numbers of its groups; what an object without groups is set to, nobody can tell."""
    name = "the dense optimizer"
    entries = {name: "none" if optimizer is None else type(optimizer).__name__}
    groups = getattr(optimizer, "param_groups", ())
    for number, group in enumerate(groups):
        where = name if len(groups) == 1 else f"parameter group {number} of {name}"
        for setting in sorted(key for key in group if key not in _NOT_COMPARED):
            value = _plain(group[setting])
            if value is not None:
                entries[f"{setting} of {where}"] = value
    return entries


def _plain(value: object) -> str | None:
    """A number or several as text; None for anything else. A number that is a tensor counts as the number."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, tuple | list) and value:
        parts = [_plain(one) for one in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return None


def first_difference(fact: str, mine: dict[str, str], theirs: dict[str, str]) -> tuple[str, str, str]:
    """Where two ranks' entries of a fact first differ: (entry, my value, their value), values cut to a readable
    length."""
    for entry in [*mine, *(e for e in theirs if e not in mine)]:
        if mine.get(entry) != theirs.get(entry):
            return entry, *_readable(mine.get(entry, "none"), theirs.get(entry, "none"))
    here, there = next((a, b) for a, b in zip(mine, theirs) if a != b)
    return f"the order of {fact}", f"{here} first", f"{there} first"


def _readable(mine: str, theirs: str) -> tuple[str, str]:
    """Two values from a little before they differ, if they are long."""
    if max(len(mine), len(theirs)) <= _MOST_SHOWN:
        return mine, theirs
    same = next((k for k, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
    start = max(same - 20, 0)

    def cut(text: str) -> str:
        end = "..." if len(text) > start + _MOST_SHOWN else ""
        return f"{'...' if start else ''}{text[start : start + _MOST_SHOWN]}{end}"

    return cut(mine), cut(theirs)
