"""Initial values that a function of the user's gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Custom"]


@dataclass(frozen=True)
class Custom:
    """Rows start from `function(keys, dim, seed)`.

    Attributes:
        function: (keys int64 [n], dim, the table's seed) -> float32 [n, dim], finite. A pure function of each key: it
            is called again for the same key whenever the key is read without a row or gets one, in batches of any size
            and order, on any rank and thread, and must give the same values. It must not change `keys`.
    """

    function: Callable[[Tensor, int, int], Tensor]
    kind: ClassVar[int] = 0
    """Native code fills in zeros; the store replaces them."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom: function must be callable, got {type(self.function).__name__}")

    @property
    def parameters(self) -> tuple[float, float, float, float]:
        """For native code: zeros."""
        return (0.0, 0.0, 0.0, 0.0)

    def describe(self) -> dict[str, Any]:
        """The function's qualified name alone: what it computes is not saved."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        module = getattr(self.function, "__module__", None) or type(self.function).__module__
        return {"name": "custom", "function": f"{module}.{name}"}

    def values(self, seed: int, table_name: str, keys: Tensor, dim: int) -> Tensor:
        """float32 [n, dim]: what the function gives for keys int64 [n].

        Raises:
            TypeError: it returned something else than a float32 tensor. ValueError: another shape, or values that are
                not finite. The message names the table.
        """
        if not keys.numel():
            return torch.empty(0, dim, dtype=torch.float32)
        with torch.no_grad():
            given = self.function(keys, dim, seed)
        where = f"init of table {table_name!r}"
        if not isinstance(given, Tensor) or given.dtype != torch.float32:
            kind = str(given.dtype).removeprefix("torch.") if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"{where}: the function of init.Custom must return a float32 tensor, got {kind}")
        if tuple(given.shape) != (keys.numel(), dim) or given.device.type != "cpu":
            raise ValueError(
                f"{where}: the function of init.Custom must return [{keys.numel()}, {dim}] on the CPU, one row "
                f"for each key, got {list(given.shape)} on {given.device}"
            )
        finite = torch.isfinite(given).all(1)
        if not bool(finite.all()):
            key = int(keys[~finite][0])
            raise ValueError(f"{where}: the function of init.Custom gave values that are not finite for key {key}")
        return given.detach().contiguous()

    def reference(self, seed: int, table_name: str, keys: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
        """float32 [n, dim]: the embeddings that keys int64 [n] start with."""
        tensor = torch.from_numpy(np.array(keys, dtype=np.int64))
        return np.asarray(self.values(seed, table_name, tensor, dim).numpy())
