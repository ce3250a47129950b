"""Embedding modules: collections of pooled and unpooled tables whose rows live in sharded stores."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configs import EmbeddingBagConfig, EmbeddingConfig
    from .embedding_bag_collection import EmbeddingBagCollection
    from .embedding_collection import EmbeddingCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig"]

_HOMES = {
    "EmbeddingBagCollection": "embedding_bag_collection",
    "EmbeddingBagConfig": "configs",
    "EmbeddingCollection": "embedding_collection",
    "EmbeddingConfig": "configs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
