"""TorchRec's unsharded collections as ours, which return TorchRec's own classes. Never imports TorchRec."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.nn.configs import EmbeddingBagConfig, EmbeddingConfig
from nestpipe_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from nestpipe_kernels.nn.embedding_collection import EmbeddingCollection

__all__ = ["is_collection", "make"]

_HOME = "torchrec.modules.embedding_modules"


def is_collection(module: Any) -> bool:
    """An EmbeddingBagCollection or EmbeddingCollection of TorchRec itself, no subclass."""
    known = ("EmbeddingBagCollection", "EmbeddingCollection")
    return type(module).__module__ == _HOME and type(module).__name__ in known


def make(name: str, module: Any, given: Mapping[str, Any], shared: Mapping[str, Any]) -> Collection:
    """Our collection with the same tables, features and weights.

    Raises:
        TypeError, ValueError: a table that ours cannot hold; names module and table.
    """
    pooled = type(module).__name__ == "EmbeddingBagCollection"
    table_settings = {key: value for key, value in given.items() if key != "optimizer"}
    tables: Any = module.embedding_bags if pooled else module.embeddings
    try:
        configs: list[Any] = []
        for old in module.embedding_bag_configs() if pooled else module.embedding_configs():
            settings = {
                "data_type": old.data_type,
                "feature_names": list(old.feature_names),
                "trainable": tables[old.name].weight.requires_grad,
                **({"pooling": old.pooling} if pooled else {}),
                **table_settings,
            }
            cls: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
            configs.append(cls(old.num_embeddings, old.embedding_dim, old.name, **settings))
        more = {"optimizer": given["optimizer"], **shared}
        new: Collection
        if pooled:
            new = EmbeddingBagCollection(configs, module.is_weighted(), **more)
        else:
            new = EmbeddingCollection(configs, need_indices=module.need_indices(), **more)
        new.load_state_dict({key: value.detach().cpu() for key, value in module.state_dict().items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"convert: {name!r} (TorchRec's {type(module).__name__}): {error}") from error
    classes = sys.modules["torchrec.sparse.jagged_tensor"]
    new.output_class = classes.KeyedTensor if pooled else classes.JaggedTensor
    new.training = module.training
    vars(new)["origin"] = (module,)
    for key in vars(nn.Module()):
        if "hook" in key:
            vars(new)[key] = vars(module)[key]
    return new
