"""Copies of everything that training changes, and the first difference between two of them in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nestpipe_kernels.capture.modules import embedding_modules

if TYPE_CHECKING:
    from nestpipe_kernels.cli.training import TrainingRun

__all__ = ["Snapshot", "TableRows", "first_difference", "take_snapshot"]


@dataclass
class TableRows:
    """The rows that one rank owns of a table, by ascending key.

    Attributes:
        keys: int64 [n].
        bits: int32 [n, used], the bits of embedding (as stored), optimizer state and `updates`.
        dim: leading columns that are the embedding: one for each element, or for two of a 2-byte storage type.
        last_used, frequency: int64 [n].
    """

    keys: Tensor
    bits: Tensor
    dim: int
    last_used: Tensor
    frequency: Tensor


@dataclass
class Snapshot:
    """Tables by name, dense tensors (parameters and the dense optimizer's state) by name."""

    tables: dict[str, TableRows]
    dense: dict[str, Tensor]


def take_snapshot(model: torch.nn.Module, dense_optimizer: torch.optim.Optimizer) -> Snapshot:
    """Copy what this rank holds; nothing may be in flight (`pipeline.drain()`)."""
    tables: dict[str, TableRows] = {}
    for module_name, module in embedding_modules(model).items():
        stores: Any = module.row_stores()  # type: ignore[operator]
        for store in stores:
            for number, spec in enumerate(store.tables):
                tables[f"{module_name}.{spec.name}"] = _table_rows(store, number)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dense = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    for parameter, state in dense_optimizer.state.items():
        for key, value in state.items():
            dense[f"{names[id(parameter)]}, optimizer state {key}"] = torch.as_tensor(value).detach().cpu().clone()
    return Snapshot(tables, dense)


def _table_rows(store: Any, number: int) -> TableRows:
    keys, handles = store.export_table(number)
    order = torch.argsort(keys)
    keys, handles = keys[order].contiguous(), handles[order].contiguous()
    rows = torch.empty(keys.numel(), store.row_floats)
    store.gather(handles, keys, torch.full((keys.numel(),), number, dtype=torch.int32), rows, None)
    used = store.embedding_words + store.optimizer.state_floats(store.dim) + 1
    metadata = store.read_metadata(handles)
    bits = rows[:, :used].contiguous().view(torch.int32)
    return TableRows(keys, bits, store.embedding_words, metadata.last_used, metadata.frequency)


def first_difference(left: TrainingRun, right: TrainingRun) -> str:
    """The first difference between two runs in words, bit for bit; an empty string if there is none."""
    if left.steps != right.steps:
        return f"{left.steps} steps and {right.steps} steps"
    position = _first_unequal(left.losses, right.losses)
    if position is not None:
        return f"loss of step {position[0]}: {left.losses[position[0]]:.9g} and {right.losses[position[0]]:.9g}"
    a, b = left.snapshot, right.snapshot
    if a is None or b is None:
        raise ValueError("first_difference: both runs need a snapshot; train_once(..., snapshot=True)")
    for name, table in a.tables.items():
        words = _table_difference(table, b.tables[name])
        if words:
            return f"table {name}: {words}"
    for name, tensor in a.dense.items():
        other = b.dense.get(name)
        if other is None:
            return f"dense {name}: only one of the two has it"
        position = _first_unequal(tensor, other)
        if position is not None:
            return f"dense {name}{position}: {tensor[tuple(position)]:.9g} and {other[tuple(position)]:.9g}"
    return ""


def _table_difference(a: TableRows, b: TableRows) -> str:
    if a.keys.shape != b.keys.shape or not torch.equal(a.keys, b.keys):
        mine, theirs = set(a.keys.tolist()), set(b.keys.tolist())
        odd = min(mine ^ theirs)
        return f"{len(mine)} and {len(theirs)} rows; only one of the two has key {odd}"
    position = _first_unequal(a.bits, b.bits)
    if position is not None:
        row, column = position
        values = (a.bits[row, column].view(torch.float32), b.bits[row, column].view(torch.float32))
        used = a.bits.shape[1]
        part = "embedding" if column < a.dim else "updates" if column == used - 1 else "optimizer state"
        at = column if column < a.dim else column - a.dim
        if part == "updates":
            return f"key {int(a.keys[row])}: updates {int(a.bits[row, column])} and {int(b.bits[row, column])}"
        return f"key {int(a.keys[row])}: {part}[{at}] {values[0]:.9g} and {values[1]:.9g}"
    for what in ("last_used", "frequency"):
        left, right = getattr(a, what), getattr(b, what)
        position = _first_unequal(left, right)
        if position is not None:
            row = position[0]
            return f"key {int(a.keys[row])}: {what} {int(left[row])} and {int(right[row])}"
    return ""


def _first_unequal(a: Tensor, b: Tensor) -> list[int] | None:
    """Index of the first element whose bits differ, None if there is none. Shapes and dtypes must agree."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"snapshots of different models: {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}")
    integer = {4: torch.int32, 8: torch.int64, 2: torch.int16, 1: torch.int8}[a.element_size()]
    unequal = (a.contiguous().view(integer) != b.contiguous().view(integer)).nonzero()
    return unequal[0].tolist() if unequal.numel() or (a.dim() == 0 and len(unequal)) else None
