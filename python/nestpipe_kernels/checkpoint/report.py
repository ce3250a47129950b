"""LoadReport: what was loaded, in fields and in words."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LoadReport"]


@dataclass
class LoadReport:
    """What `load` put where.

    Attributes:
        tables: rows loaded on this rank, by table.
        missing_tables: of the model, without rows in the checkpoint: as they were.
        unexpected_tables: of the checkpoint, without a table in the model: not read.
        parameters: dense parameters and buffers that were loaded, by name.
        missing_parameters: of the model, not in the checkpoint: as they were.
        unexpected_parameters: of the checkpoint, not in the model.
        optimizer_state: whether optimizer states (of rows and of the dense optimizer) and learning rates were loaded.
        dense_optimizer: whether a dense optimizer's state was loaded.
        extra: names of the extra objects that were loaded.
        missing_extra, unexpected_extra: given but not saved; saved but not given.
        generators: whether random generators were restored: at the saved world size only.
        data: where the data goes on, in words.
        step_count: updates done when the checkpoint was made.
        saved_world_size: ranks that made it.
    """

    tables: dict[str, int] = field(default_factory=dict)
    missing_tables: list[str] = field(default_factory=list)
    unexpected_tables: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    missing_parameters: list[str] = field(default_factory=list)
    unexpected_parameters: list[str] = field(default_factory=list)
    optimizer_state: bool = True
    dense_optimizer: bool = False
    extra: list[str] = field(default_factory=list)
    missing_extra: list[str] = field(default_factory=list)
    unexpected_extra: list[str] = field(default_factory=list)
    generators: bool = False
    data: str = ""
    step_count: int = 0
    saved_world_size: int = 1

    def __str__(self) -> str:
        rows = ", ".join(f"{name} ({count} rows)" for name, count in self.tables.items()) or "none"
        lines = [
            f"step {self.step_count}, saved by {self.saved_world_size} rank{'s' * (self.saved_world_size > 1)}",
            f"tables: {rows}",
            f"dense parameters and buffers: {len(self.parameters)}",
            f"optimizer states: {'loaded' if self.optimizer_state else 'left out'}"
            f"{'' if self.dense_optimizer else ' (no dense optimizer)'}",
            f"random generators: {'restored' if self.generators else 'as they were'}",
            f"data: {self.data}",
        ]
        for what in ("missing_tables", "unexpected_tables", "missing_parameters", "unexpected_parameters",
                     "extra", "missing_extra", "unexpected_extra"):  # fmt: skip
            names = getattr(self, what)
            if names:
                lines.append(f"{what.replace('_', ' ')}: {', '.join(names)}")
        return "\n".join(lines)
