"""Settings and short arrays on their way between a store and native code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..init import Initializer, Uniform
from ..types import UNBOUNDED, TableSpec
from .checks import check_spec
from .policies import SEED_MASK, check_policies, native_admission, native_eviction

__all__ = ["SEED_MASK", "int32_tensor", "int64_tensor", "native_table", "with_default_init", "words"]

INT64 = torch.int64
INT32 = torch.int32


def with_default_init(spec: TableSpec, dim: int) -> TableSpec:
    """The table, checked, with the initial values that it has by default."""
    check_spec(spec)
    check_policies(spec)
    if spec.init is not None:
        if not hasattr(spec.init, "kind") or not hasattr(spec.init, "parameters"):
            raise TypeError(
                f"store: init of table {spec.name!r} must be a Zeros, Constant, Uniform, Normal, "
                f"TruncatedNormal or Custom of nestpipe_kernels.init, got {spec.init!r}"
            )
        return spec
    bound = 1.0 / math.sqrt(dim) if spec.num_embeddings == UNBOUNDED else math.sqrt(1.0 / spec.num_embeddings)
    return replace(spec, init=Uniform(-bound, bound))


def native_table(spec: TableSpec) -> tuple[Any, ...]:
    """A table as native code takes it."""
    quota = -1 if spec.capacity is None else spec.capacity
    default = None if spec.default is None else _native_init(spec.default)
    rules = native_admission(spec), native_eviction(spec)
    return (spec.name, spec.seed & SEED_MASK, _native_init(spec.init), quota, default, *rules)


def _native_init(init: Initializer) -> tuple[int, tuple[float, ...]]:
    return init.kind, init.parameters


def int32_tensor(data: bytearray) -> Tensor:
    """int32 [n] of bytes from native code."""
    return torch.frombuffer(data, dtype=INT32) if data else torch.empty(0, dtype=INT32)


def words(values: list[int]) -> Tensor:
    """int64 [n] with the bits of numbers in [0, 2^64)."""
    return torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=INT64)


def int64_tensor(data: bytearray) -> Tensor:
    """int64 [n] of bytes from native code."""
    return torch.frombuffer(data, dtype=INT64) if data else torch.empty(0, dtype=INT64)
