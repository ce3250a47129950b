"""Rows of tables: saving those that a rank owns, loading them on any number of ranks."""

from __future__ import annotations

from .rows_load import TableTarget, all_targets, load_tables
from .rows_save import CHUNK_BYTES, save_tables

__all__ = ["CHUNK_BYTES", "TableTarget", "all_targets", "load_tables", "save_tables"]
