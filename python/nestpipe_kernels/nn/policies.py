"""Checks of what bounds a table: capacity, admission, eviction, and what a key without a row reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nestpipe_kernels.policy import LFU, LRU, TTL, MinFrequency, Probability, Score
from nestpipe_kernels.store.policies import rows_in_bytes

if TYPE_CHECKING:
    from nestpipe_kernels.nn.configs import TableConfig

__all__ = ["check_policies", "first_policy", "rows_within"]


def check_policies(config: TableConfig, where: str) -> None:
    """Check `capacity`, `capacity_bytes`, `admission`, `eviction` and `default_row` of one table.

    Raises:
        TypeError: a rule or default of another kind.
        ValueError: a value out of range, or settings that contradict each other.
    """
    for name in ("capacity", "capacity_bytes"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{where}: {name} must be an integer >= 1 or None, got {value!r}")
    if config.capacity is not None and config.capacity_bytes is not None:
        raise ValueError(
            f"{where}: capacity {config.capacity} and capacity_bytes {config.capacity_bytes} contradict each other: "
            "give one of them"
        )
    if config.admission is not None and not isinstance(config.admission, (MinFrequency, Probability)):
        raise TypeError(
            f"{where}: admission must be a MinFrequency or Probability of nestpipe_kernels.policy or None, "
            f"got {config.admission!r}"
        )
    if config.eviction is not None and not isinstance(config.eviction, (LRU, LFU, TTL, Score)):
        raise TypeError(
            f"{where}: eviction must be an LRU, LFU, TTL or Score of nestpipe_kernels.policy or None, "
            f"got {config.eviction!r}"
        )
    bounded = config.capacity is not None or config.capacity_bytes is not None
    if config.eviction is not None and not bounded and not isinstance(config.eviction, TTL):
        raise ValueError(
            f"{where}: eviction {config.eviction!r} needs a capacity, or it would never evict; give capacity= (rows) "
            "or capacity_bytes="
        )
    default = config.default_row
    if default is not None and not (hasattr(default, "kind") and hasattr(default, "parameters")):
        raise TypeError(
            f"{where}: default_row must be an nk.init object such as nk.init.Zeros() or None, got {default!r}"
        )
    rule = "admission" if config.admission is not None else "eviction" if config.eviction is not None else None
    if config.init_fn is not None and rule is not None:
        raise ValueError(
            f"{where}: init_fn fills every row at construction, which contradicts {rule}; give init= instead"
        )


def first_policy(config: TableConfig) -> str | None:
    """Name of a setting that only rows in stores can have; None if there is none."""
    names = ("capacity", "capacity_bytes", "admission", "eviction", "default_row", "tier")
    return next((name for name in names if getattr(config, name) is not None), None)


def rows_within(config: TableConfig, row_bytes: int) -> int | None:
    """Rows that the table may have over all ranks, each of `row_bytes`; None: no limit.

    Raises:
        ValueError: capacity_bytes holds no row at all.
    """
    if config.capacity_bytes is None:
        return config.capacity
    slack = getattr(config.eviction, "slack", 0.0)
    return rows_in_bytes(config.capacity_bytes, row_bytes, slack, f"table {config.name!r}")
