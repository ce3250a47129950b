"""Row stores: the native table of embedding rows that one process owns."""

from __future__ import annotations

from .embedding_store import EmbeddingStore, RowMetadata
from .file_tier import FileTier

__all__ = ["EmbeddingStore", "FileTier", "RowMetadata"]
