"""The distributions that rows may start from: settings, their numbers for native code, and their reference values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from .reference import constant_values, normal_values, truncated_normal_values, uniform_values

__all__ = ["Constant", "Initializer", "Normal", "TruncatedNormal", "Uniform", "Zeros"]

FLOAT32_MAX = 3.4028234663852886e38
SMALLEST_SHARE = 0.01
"""Of a normal distribution that a TruncatedNormal must leave: csrc/include/nestpipe/initial_value.h counts on it."""

Parameters = tuple[float, float, float, float]


class Initializer(Protocol):
    """What a store needs of initial values."""

    kind: ClassVar[int]
    """The number native code knows the distribution by: csrc/include/nestpipe/init.h."""

    @property
    def parameters(self) -> Parameters:
        """The numbers of the distribution, for native code; zeros where it has fewer."""
        ...

    def describe(self) -> dict[str, Any]:
        """The distribution as JSON values: "name", and its settings by their names."""
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
    def parameters(self) -> Parameters:
        return (float(self.value), 0.0, 0.0, 0.0)

    def describe(self) -> dict[str, Any]:
        """The distribution as JSON values."""
        return {"name": "constant", "value": float(self.value)}

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return constant_values(keys, dim, float(self.value))


@dataclass(frozen=True)
class Zeros:
    """Every element is +0."""

    kind: ClassVar[int] = 0

    @property
    def parameters(self) -> Parameters:
        return (0.0, 0.0, 0.0, 0.0)

    def describe(self) -> dict[str, Any]:
        """The distribution as JSON values."""
        return {"name": "zeros"}

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
    def parameters(self) -> Parameters:
        return (float(self.low), float(self.high), 0.0, 0.0)

    def describe(self) -> dict[str, Any]:
        """The distribution as JSON values."""
        return {"name": "uniform", "low": float(self.low), "high": float(self.high)}

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
        _mean_and_std("Normal", self.mean, self.std, 7.0)

    @property
    def parameters(self) -> Parameters:
        return (float(self.mean), float(self.std), 0.0, 0.0)

    def describe(self) -> dict[str, Any]:
        """The distribution as JSON values."""
        return {"name": "normal", "mean": float(self.mean), "std": float(self.std)}

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return normal_values(seed, table_name, keys, dim, float(self.mean), float(self.std))


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal elements between mean + low * std and mean + high * std: of each element's values the first inside.

    As `torch.nn.init.trunc_normal_`, but `low` and `high` are in standard deviations from the mean. `std` is that of
    the distribution before it is cut. Computed in double, rounded once to float32.

    Attributes:
        mean, std: of the whole normal distribution.
        low, high: bounds in standard deviations, low < high; at least 1 % of the distribution must lie between them.
    """

    mean: float
    std: float
    low: float = -2.0
    high: float = 2.0
    kind: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _finite("TruncatedNormal", low=self.low, high=self.high)
        _mean_and_std("TruncatedNormal", self.mean, self.std, 7.0)
        if not self.low < self.high:
            raise ValueError(f"TruncatedNormal: low must be < high, got low={self.low!r}, high={self.high!r}")
        share = (math.erf(self.high / math.sqrt(2)) - math.erf(self.low / math.sqrt(2))) / 2
        if share < SMALLEST_SHARE:
            raise ValueError(
                f"TruncatedNormal: at least {SMALLEST_SHARE:.0%} of the distribution must lie between low and high, "
                f"got {share:.3%} between {self.low!r} and {self.high!r}: use Uniform for a narrow interval"
            )

    @property
    def parameters(self) -> Parameters:
        return (float(self.mean), float(self.std), float(self.low), float(self.high))

    def describe(self) -> dict[str, Any]:
        """The distribution as JSON values."""
        return {"name": "truncated_normal", **dict(zip(("mean", "std", "low", "high"), self.parameters))}

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        return truncated_normal_values(seed, table_name, keys, dim, self.parameters)


def _mean_and_std(owner: str, mean: float, std: float, reach: float) -> None:
    _finite(owner, mean=mean, std=std)
    if std < 0:
        raise ValueError(f"{owner}: std must be >= 0, got {std!r}")
    _finite(owner, largest_value=abs(mean) + reach * std)


def _finite(owner: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{owner}: {name} must be a number, got {type(value).__name__} ({value!r})")
        if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
            raise ValueError(f"{owner}: {name} must be finite in float32, got {value!r}")
