"""Row stores: the tables of embedding rows that one process owns, in host memory and on an accelerator."""

from __future__ import annotations

from .device_store import DeviceStore
from .device_tier import DeviceTier
from .device_tier_store import DeviceTierStore
from .embedding_store import EmbeddingStore, RowMetadata
from .file_tier import FileTier

__all__ = ["DeviceStore", "DeviceTier", "DeviceTierStore", "EmbeddingStore", "FileTier", "RowMetadata"]
