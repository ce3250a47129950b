"""What must hold before rows may go into a table: settings that agree, keys and metadata that are possible."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..types import TableSpec
from .manifest_parts import OptimizerRecord, TableFile, TableRecord
from .settings import table_record

__all__ = ["TableTarget", "check_rows", "differences"]


@dataclass(frozen=True)
class TableTarget:
    """A table of the model and the table of the checkpoint that goes into it."""

    store: Any
    table: int
    """Index within the store."""
    source: str
    """Name within the checkpoint."""

    @property
    def spec(self) -> TableSpec:
        """Settings of the model's table."""
        found: TableSpec = self.store.tables[self.table]
        return found


def check_rows(path: Path, saved: TableRecord, file: TableFile, tensors: dict[str, Tensor], slices: Tensor) -> None:
    """Raises CheckpointError if keys are outside the table or the file's slices, or metadata is impossible."""
    keys = tensors["keys"]
    if keys.numel() == 0:
        return
    bad = (slices < file.first_slice) | (slices >= file.end_slice)
    expected = f"of slices {file.first_slice} to {file.end_slice}"
    if saved.num_embeddings >= 0 and not bool(bad.any()):
        bad = (keys < 0) | (keys >= saved.num_embeddings)
        expected = f"in [0, {saved.num_embeddings})"
    if bool(bad.any()):
        raise CheckpointError(
            f"checkpoint: {path}: tensor 'keys': keys of table {saved.name!r} must be {expected}, got "
            f"{int(keys[bad.nonzero()[0]])}"
        )
    for name, low in (("last_used", -1), ("frequency", 0), ("updates", 0)):
        if name in tensors and int(tensors[name].min()) < low:
            raise CheckpointError(
                f"checkpoint: {path}: tensor {name!r} must be at least {low}, got {int(tensors[name].min())}"
            )


def differences(saved: TableRecord, target: TableTarget, optimizer_state: bool, strict: bool) -> list[str]:
    """What keeps a saved table out of a table of the model, with both values."""
    own = table_record(target.store, target.table, target.source)
    fields = ["dim", "num_embeddings"]
    if strict:
        fields += ["seed", "init", "admission"]
    model_s = " (strict=False takes the model's)"
    advice = {
        "seed": model_s,
        "init": model_s,
        "admission": " (strict=False takes the model's, and counts of keys without a row start anew)",
    }
    found = [(name, getattr(saved, name), getattr(own, name), advice.get(name, "")) for name in fields]
    if optimizer_state:
        found += _optimizer_facts(saved.optimizer, own.optimizer, strict, model_s)
    return [
        f"table {saved.name!r}: {name} is {_shown(theirs)} in the checkpoint, {_shown(ours)} in the model{then}"
        for name, theirs, ours, then in found
        if theirs != ours
    ]


def _optimizer_facts(
    saved: OptimizerRecord, own: OptimizerRecord, strict: bool, model_s: str
) -> list[tuple[str, Any, Any, str]]:
    """(what, saved, own, advice) of two optimizers: their states must be alike; their numbers too, where `strict`."""
    if (saved.name, saved.slots) != (own.name, own.slots):
        return [("optimizer", saved, own, " (optimizer_state=False takes the embeddings alone)")]
    if not strict:
        return []
    names = sorted({*saved.hyper, *own.hyper})
    return [(f"{own.name}'s {name}", saved.hyper.get(name), own.hyper.get(name), model_s) for name in names]


def _shown(value: Any) -> str:
    """A setting in an error; rules and initial values as `Name(field=value)`."""
    if not isinstance(value, dict):
        return str(value)
    fields = ", ".join(f"{key}={_shown(one)}" for key, one in sorted(value.items()) if key != "name")
    return f"{value.get('name', '?')}({fields})"
