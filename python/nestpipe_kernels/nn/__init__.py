"""Embedding modules: collections of tables whose rows live in sharded stores, and drop-ins for torch.nn's."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configs import EmbeddingBagConfig, EmbeddingConfig
    from .embedding import Embedding
    from .embedding_bag import EmbeddingBag
    from .embedding_bag_collection import EmbeddingBagCollection
    from .embedding_collection import EmbeddingCollection

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
]

_HOMES = {
    "Embedding": "embedding",
    "EmbeddingBag": "embedding_bag",
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
