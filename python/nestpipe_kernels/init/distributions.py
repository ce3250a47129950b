"""The distributions that rows may start from: settings, their numbers for native code, and their reference values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from .reference import constant_values, normal_values, uniform_values

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "Zeros"]

FLOAT32_MAX = 3.4028234663852886e38


class Initializer(Protocol):
    """What a store needs of initial values."""

    kind: ClassVar[int]
    """The number native code knows the distribution by: csrc/include/nestpipe/init.h."""

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers of the distribution, for native code."""
        ...

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        """float32 [n, dim]: the embeddings that keys int64 [n] start with, bit for bit as native code computes them."""
        ...


@dataclass(frozen=True)
class Constant:
    """Every element is `value`."""

    value: float
    kind: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _finite("Constant", value=self.value)

    @property
    def parameters(self) -> tuple[float, float]:
        return (float(self.value), 0.0)

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return constant_values(keys, dim, float(self.value))


@dataclass(frozen=True)
class Zeros:
    """Every element is +0."""

    kind: ClassVar[int] = 0

    @property
    def parameters(self) -> tuple[float, float]:
        return (0.0, 0.0)

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return constant_values(keys, dim, 0.0)


@dataclass(frozen=True)
class Uniform:
    """Elements are uniform in [low, high]; computed in double, rounded once to float32."""

    low: float
    high: float
    kind: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _finite("Uniform", low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(f"Uniform: low must be <= high, got low={self.low!r}, high={self.high!r}")

    @property
    def parameters(self) -> tuple[float, float]:
        return (float(self.low), float(self.high))

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return uniform_values(seed, table_name, keys, dim, float(self.low), float(self.high))


@dataclass(frozen=True)
class Normal:
    """Elements are normal with this mean and standard deviation; computed in double, rounded once to float32.

    The largest distance from the mean is 6.8 standard deviations.
    """

    mean: float
    std: float
    kind: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _finite("Normal", mean=self.mean, std=self.std)
        if self.std < 0:
            raise ValueError(f"Normal: std must be >= 0, got {self.std!r}")
        _finite("Normal", largest_value=abs(self.mean) + 7.0 * self.std)

    @property
    def parameters(self) -> tuple[float, float]:
        return (float(self.mean), float(self.std))

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return normal_values(seed, table_name, keys, dim, float(self.mean), float(self.std))


def _finite(owner: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{owner}: {name} must be a number, got {type(value).__name__} ({value!r})")
        if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
            raise ValueError(f"{owner}: {name} must be finite in float32, got {value!r}")
