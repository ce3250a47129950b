"""Row stores: the tables of embedding rows that one process owns, in host memory and on an accelerator."""

from __future__ import annotations

from .device_store import DeviceStore
from .embedding_store import EmbeddingStore, RowMetadata
from .file_tier import FileTier

__all__ = ["DeviceStore", "EmbeddingStore", "FileTier", "RowMetadata"]
