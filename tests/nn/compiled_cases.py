"""A model whose lookups a compiler must leave alone, its batches, and runs of it: eager, compiled, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.testing
from torch import Tensor, nn

import nestpipe_kernels as nk

SIZE, DIM = 50, 4
Batch = tuple[Tensor, Tensor, nk.KeyedJaggedTensor]


class Lookups(nn.Module):
    """Every kind of lookup that has a static number of outputs: equal ones, one whose rows are not used, all rows."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        rule, where = nk.optim.Adagrad(lr=0.1), {"process_group": process_group}
        self.rows = nk.nn.Embedding(SIZE, DIM, padding_idx=3, optimizer=rule, name="rows", **where)
        self.weighted = nk.nn.EmbeddingBag(SIZE, DIM, mode="sum", optimizer=rule, name="weighted", **where)
        self.mean = nk.nn.EmbeddingBag(SIZE, DIM, mode="mean", optimizer=rule, name="mean", **where)
        tables = [
            nk.EmbeddingBagConfig(num_embeddings=SIZE, embedding_dim=8, name="t0", feature_names=["f0", "f1"]),
            nk.EmbeddingBagConfig(num_embeddings=SIZE, embedding_dim=DIM, name="t1", feature_names=["f2"]),
        ]
        self.bags = nk.EmbeddingBagCollection(tables, optimizer=rule, **where)
        self.top = nn.Linear(3 * DIM + 20, 1)
        self.factor = nn.Parameter(torch.ones(SIZE))

    def forward(self, ids: Tensor, pairs: Tensor, features: nk.KeyedJaggedTensor) -> Tensor:
        rows = self.rows(ids) + self.rows(ids) * 2
        self.rows(ids + 1)
        flat = pairs.view(-1)
        weighted = self.weighted(flat, torch.arange(0, flat.shape[0], 2), torch.sigmoid(self.factor[flat]))
        again = nk.KeyedJaggedTensor(features.keys(), features.values(), offsets=features.offsets())
        bags, others = self.bags(features), self.bags(again)
        parts = [rows, weighted, self.mean(pairs), bags["f0"], others.values()[:, 8:]]
        nearest = (rows @ self.rows.weight.T).logsumexp(1)
        return self.top(torch.cat(parts, 1).relu()).sum() + nearest.sum()

    def dense(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.top.parameters(), self.factor], 0.1)


def make_batch(samples: int, seed: int) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * samples,), generator=chance)
    values = torch.randint(0, SIZE, (int(lengths.sum()),), generator=chance)
    ids = torch.randint(0, SIZE - 1, (samples,), generator=chance)
    pairs = torch.randint(0, SIZE, (samples, 2), generator=chance)
    return ids, pairs, nk.KeyedJaggedTensor(["f0", "f1", "f2"], values, lengths=lengths)


def train(backend: str | None, process_group: Any = None, rank: int = 0) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Losses, rows and parameters after steps with batches of several sizes; graphs that were compiled for them."""
    torch._dynamo.reset()
    model = Lookups(process_group)
    dense, run, counter = model.dense(), model, None
    if backend is not None:
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        run = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    losses = []
    for step, samples in enumerate((6, 9, 7, 6)):
        loss = run(*make_batch(samples + rank, 10 * rank + step))
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.detach())
    return losses, model.state_dict(), 0 if counter is None else counter.frame_count


def train_as_rank(backend: str | None) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """`train` on a rank of the default process group."""
    return train(backend, torch.distributed.group.WORLD, torch.distributed.get_rank())
