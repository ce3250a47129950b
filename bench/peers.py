"""What the suite compares with: nn.EmbeddingBag with sparse gradients, and FBGEMM's table-batched embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FbgemmPeer", "Peer", "Shape", "TorchPeer", "available_peers"]


@dataclass(frozen=True)
class Shape:
    """`tables` tables of `rows` x `dim`; a step has `batch` samples with one bag of `bag` keys for each table.

    A part `hot` of the bags begins with key 0.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    bag: int
    zipf: float
    hot: float = 0.0


class Peer(ABC):
    """One implementation of a training step of the tables."""

    name: str

    @abstractmethod
    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids int64 [tables, batch * bag] and pool by sum: float32 [batch, tables * dim]."""

    @abstractmethod
    def step(self, ids: Tensor, grad: Tensor) -> Tensor:
        """Look up ids int64 [tables, batch * bag], pool by sum, go back from `grad`, update.

        Returns:
            float32 [batch, tables * dim], as `grad`.
        """

    @abstractmethod
    def rows(self, table: int, ids: Tensor) -> Tensor:
        """float32 [n, dim]: embeddings of ids int64 [n]."""


class _TorchRowWiseAdagrad:
    """Row-wise Adagrad over sparse gradients in torch operations; torch.optim has none."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self._sums = [(p, torch.zeros(p.shape[0])) for p in parameters]
        self._lr = lr

    @torch.no_grad()
    def step(self) -> None:
        for parameter, sums in self._sums:
            assert parameter.grad is not None
            grad = parameter.grad.coalesce()
            index, values = grad.indices()[0], grad.values()
            total = sums[index] + (values * values).mean(1)
            sums[index] = total
            parameter.index_add_(0, index, values * (self._lr / (total.sqrt() + 1e-10)).unsqueeze(1), alpha=-1)

    def zero_grad(self) -> None:
        for parameter, _ in self._sums:
            parameter.grad = None


class TorchPeer(Peer):
    """nn.EmbeddingBag(sparse=True) for each table and an optimizer over sparse gradients."""

    def __init__(self, shape: Shape, optimizer: str, lr: float, ids: list[Tensor], values: list[Tensor]) -> None:
        self._bags = nn.ModuleList(
            nn.EmbeddingBag(shape.rows, shape.dim, mode="sum", sparse=True, _weight=_filled(shape, ids[t], values[t]))
            for t in range(shape.tables)
        )
        parameters = list(self._bags.parameters())
        made: Any = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.SparseAdam,
            "row_wise_adagrad": _TorchRowWiseAdagrad,
        }[optimizer]
        self._optimizer = made(parameters, lr=lr)
        self._offsets = torch.arange(0, shape.batch * shape.bag, shape.bag)
        self.name = f"torch.nn.EmbeddingBag sparse + {optimizer}"

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([bag(row, self._offsets) for bag, row in zip(self._bags, ids)], 1)

    def step(self, ids: Tensor, grad: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        output = self.forward(ids)
        output.backward(grad)  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return output.detach()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        weight: Any = self._bags[table].weight
        return torch.as_tensor(weight).detach()[ids]


class FbgemmPeer(Peer):
    """SplitTableBatchedEmbeddingBagsCodegen with the update fused into backward, on CPU."""

    name = "fbgemm TBE"

    def __init__(self, shape: Shape, optimizer: str, lr: float, ids: list[Tensor], values: list[Tensor]) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        if optimizer not in kinds:
            raise NotImplementedError(f"no {optimizer} on CPU")
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * shape.tables,
            optimizer=kinds[optimizer],
            learning_rate=lr,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
        )
        self._weights = self._tables.split_embedding_weights()
        for t in range(shape.tables):
            self._weights[t].zero_()[ids[t]] = values[t]
        self._offsets = torch.arange(0, shape.tables * shape.batch * shape.bag + 1, shape.bag)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self._tables(ids.reshape(-1), self._offsets)
        return output

    def step(self, ids: Tensor, grad: Tensor) -> Tensor:
        output = self.forward(ids)
        output.backward(grad)  # type: ignore[no-untyped-call]
        return output.detach()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return torch.as_tensor(self._weights[table]).detach()[ids]


def _filled(shape: Shape, ids: Tensor, values: Tensor) -> Tensor:
    """[rows, dim]: `values` at `ids`, elsewhere zeros (never looked up)."""
    weight = torch.zeros(shape.rows, shape.dim)
    weight[ids] = values
    return weight


def available_peers(
    shape: Shape, optimizer: str, lr: float, ids: list[Tensor], values: list[Tensor]
) -> tuple[list[Peer], list[str]]:
    """The peers that can run this here, starting from `values` at `ids` of each table; and why others cannot."""
    peers: list[Peer] = []
    missing = []
    for kind in (TorchPeer, FbgemmPeer):
        try:
            peers.append(kind(shape, optimizer, lr, ids, values))
        except (ImportError, OSError, NotImplementedError) as error:
            missing.append(f"{kind.__name__}: {' '.join(str(error).split())[:200]}")
    return peers, missing
