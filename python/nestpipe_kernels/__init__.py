"""Nested-pipeline training of recommenders with huge embedding tables; names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import errors as errors
    from . import init as init
    from . import jagged as jagged
    from . import nn as nn
    from . import optim as optim
    from . import policy as policy
    from .comm import SparseGroups
    from .config import PipelineConfig
    from .jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from .nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from .nn.convert import convert, revert
    from .nn.learning_rates import sparse_optimizer
    from .pipeline.counters import StepCounters
    from .pipeline.train_pipeline import NestedPipeline
    from .store import DeviceTier, EmbeddingStore, FileTier
    from .types import UNBOUNDED, DataType, KeyStatus, PoolingType

__all__ = [
    "UNBOUNDED",
    "DataType",
    "DeviceTier",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EmbeddingStore",
    "FileTier",
    "JaggedTensor",
    "KeyStatus",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "NestedPipeline",
    "PipelineConfig",
    "PoolingType",
    "SparseGroups",
    "StepCounters",
    "__version__",
    "checkpoint",
    "convert",
    "errors",
    "init",
    "jagged",
    "nn",
    "optim",
    "policy",
    "revert",
    "sparse_optimizer",
]

__version__ = "0.1.0"

_HOMES = {
    "UNBOUNDED": "types",
    "DataType": "types",
    "DeviceTier": "store",
    "EmbeddingBagCollection": "nn",
    "EmbeddingBagConfig": "nn",
    "EmbeddingCollection": "nn",
    "EmbeddingConfig": "nn",
    "EmbeddingStore": "store",
    "FileTier": "store",
    "JaggedTensor": "jagged",
    "KeyStatus": "types",
    "KeyedJaggedTensor": "jagged",
    "KeyedTensor": "jagged",
    "NestedPipeline": "pipeline.train_pipeline",
    "PipelineConfig": "config",
    "PoolingType": "types",
    "SparseGroups": "comm",
    "StepCounters": "pipeline.counters",
    "convert": "nn.convert",
    "revert": "nn.convert",
    "sparse_optimizer": "nn.learning_rates",
}
_SUBMODULES = ("checkpoint", "errors", "init", "jagged", "nn", "optim", "policy")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
