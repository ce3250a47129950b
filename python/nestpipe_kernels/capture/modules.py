"""Which modules of a model look rows up, and which depend on how a batch is split."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

__all__ = [
    "batch_coupled_modules",
    "embedding_modules",
    "model_generators",
    "plain_name",
    "running_statistics",
    "uncompiled",
    "warn_batch_coupled",
    "warn_pairs",
]


_COMPILED = "_orig_mod"


def embedding_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Embedding modules (`types.EmbeddingModule`) by qualified name; an object is listed once, under its first name."""
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if uncompiled(module) is module
        and callable(getattr(module, "row_stores", None))
        and callable(getattr(module, "plan_call", None))
    }


def plain_name(name: str) -> str:
    """A qualified name without the parts that torch.compile adds to it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile has wrapped; else the module itself."""
    return module._modules.get(_COMPILED) or module


def batch_coupled_modules(model: nn.Module) -> list[str]:
    """Qualified names of modules whose training result depends on how a batch is split into micro-batches.

    Batch normalisation (any dimension, synchronised or lazy) and instance normalisation with running statistics. In a
    model in training mode, those that were put in eval mode (frozen) are left out.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if (isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats))
        and (module.training or not model.training)
    ]


def model_generators(model: nn.Module) -> dict[str, torch.Generator]:
    """The torch.Generator objects that modules of a model hold as attributes, by `model.PATH.ATTRIBUTE`."""
    return {
        ".".join(part for part in ("model", plain_name(path), attribute) if part): value
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that a forward of normalisation modules changes in place: means, variances, counts of batches."""
    return [buffer for module in model.modules() if isinstance(module, _NormBase) for buffer in module.buffers(False)]


def warn_batch_coupled(model: nn.Module, num_micro_batches: int) -> None:
    """One UserWarning that names the batch-coupled modules, if a batch is split into more than one micro-batch."""
    names = batch_coupled_modules(model) if num_micro_batches > 1 else []
    if names:
        warnings.warn(
            f"batch statistics of {', '.join(repr(name) for name in names)} will be taken over each of the "
            f"{num_micro_batches} micro-batches, not over the whole batch, so the result differs from unsplit "
            f"training; use num_micro_batches=1, freeze them (.eval()), or use a normalisation per sample (LayerNorm)",
            UserWarning,
            stacklevel=2,
        )


def warn_pairs(pairs: Sequence[str], num_micro_batches: int) -> None:
    """One UserWarning that names where samples of a batch meet, if a batch is split into more than one micro-batch."""
    if pairs and num_micro_batches > 1:
        more = f" (and {len(pairs) - 2} more)" if len(pairs) > 2 else ""
        warnings.warn(
            f"the model computes something of every two samples of a batch, as in-batch negatives do: "
            f"{'; '.join(pairs[:2])}{more}. In {num_micro_batches} micro-batches only samples of the same one meet, so "
            "the result differs from unsplit training; use num_micro_batches=1, which still works on the next batch "
            "meanwhile, or ignore this if nothing that is trained comes of it",
            UserWarning,
            stacklevel=2,
        )
