"""An ordinary training loop over nn.EmbeddingBag, and the same loop through the nested pipeline.

python examples/plain_loop.py --plain      the loop as it was
python examples/plain_loop.py              with the lines marked "changed"

Of the loop two lines change; what the pipeline calls itself (backward, the optimizer) goes. Losses agree to rounding:
Adam moves rows as torch.optim.SparseAdam does.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import nestpipe_kernels as nk


class Recommender(nn.Module):
    """A user's and a film's embedding, and a bag of films seen before, into one logit."""

    def __init__(self, users: int, films: int, dim: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.film = nn.Embedding(films, dim, sparse=True)
        self.seen = nn.EmbeddingBag(films, dim, mode="mean", sparse=True)
        self.top = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, films: Tensor, seen: Tensor) -> Tensor:
        pooled = torch.cat([self.user(users), self.film(films), self.seen(seen)], 1)
        return self.top(pooled).squeeze(1)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    users, films, seen, label = batch
    logits = model(users, films, seen)
    return binary_cross_entropy_with_logits(logits, label), logits


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    users, films = (torch.randint(1000, (4096,), generator=generator) for _ in range(2))
    seen = torch.randint(1000, (4096, 10), generator=generator)
    label = ((users + films) % 3 == 0).float()
    return DataLoader(TensorDataset(users, films, seen, label), batch_size, shuffle=True, generator=generator)


def plain(model: Recommender, loader: DataLoader[tuple[Tensor, ...]]) -> list[float]:
    """The loop before."""
    tables = [model.user.weight, model.film.weight, model.seen.weight]
    sparse = torch.optim.SparseAdam(tables, lr=1e-3)
    dense = torch.optim.Adam(model.top.parameters(), lr=1e-3)
    losses = []
    for batch in loader:
        loss, _ = loss_fn(model, batch)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(float(loss.detach()))
    return losses


def nested(model: Recommender, loader: DataLoader[tuple[Tensor, ...]]) -> list[float]:
    """The loop through the pipeline."""
    nk.convert(model, nk.optim.Adam(lr=1e-3))  # changed: was SparseAdam over the tables
    dense = torch.optim.Adam(model.top.parameters(), lr=1e-3)
    losses = []
    for step in nk.NestedPipeline(model, dense, loss_fn).run(loader):  # changed: was `for batch in loader`
        losses.append(float(step.loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the loop before, in torch alone")
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Recommender(users=1000, films=1000, dim=16)
    losses = (plain if options.plain else nested)(model, make_loader(options.batch_size))
    for number, loss in enumerate(losses):
        print(f"step {number:>3}   loss {loss:.5f}")


if __name__ == "__main__":
    main()
