"""What sequence models share: items in, layers over the jagged sequences, the next item told from candidates.

All layers work on the items of a batch laid end to end ([T, D]); only attention sees them padded, [B, L, ...], where L
is the longest sequence of the (micro-)batch. No result depends on L, or on the other samples, beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["RelativeBias", "SequenceModel", "Sequences", "ranks_of", "seeded_linear"]

_TEMPERATURE = 0.05
"""Of the softmax over cosines, as in the published HSTU code."""
_BUCKET = 0.301
"""Width of a bucket of log(seconds), as in the published HSTU code: 0.301 is log10(2)."""
_TIME_BUCKETS = 64


def seeded_linear(inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = True) -> nn.Linear:
    """A linear layer whose values follow from `generator` alone: weights normal with variance 2 / (inputs + outputs),
    biases 0; the global generator is left as it is."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)), generator=generator)
        if bias:
            layer.bias.zero_()
    return layer


@dataclass
class Padding:
    """Where the values of B sequences, laid end to end, lie when they are padded.

    Attributes:
        sample: int64 [T], of each value.
        place: int64 [T], in its sequence.
        size: B.
        length: L, of the longest sequence.
    """

    sample: Tensor
    place: Tensor
    size: int
    length: int

    @staticmethod
    def of(lengths: Tensor) -> Padding:
        """From the sequences' lengths (int [B])."""
        lengths = lengths.to(torch.int64)
        size, length = len(lengths), int(lengths.max()) if len(lengths) else 0
        sample = torch.repeat_interleave(torch.arange(size, device=lengths.device), lengths)
        starts = torch.cumsum(lengths, 0) - lengths
        place = torch.arange(len(sample), device=lengths.device) - starts[sample]
        return Padding(sample, place, size, length)

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """[T, ...] to [B, L, ...], `fill` behind the ends."""
        padded = values.new_full((self.size, self.length, *values.shape[1:]), fill)
        return padded.index_put((self.sample, self.place), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, L, ...] to [T, ...]."""
        return padded[self.sample, self.place]


@dataclass
class Sequences(Padding):
    """B sequences of items, and what attention needs for every pair of places.

    Attributes:
        times: int64 [B, L], seconds; 0 behind the end.
        sees: bool [B, L, L]: a place sees itself and what is before it.
    """

    times: Tensor
    sees: Tensor

    @staticmethod
    def timed(lengths: Tensor, times: Tensor) -> Sequences:
        """From the sequences' lengths (int [B]) and the times of their items (int64 [T])."""
        found = Padding.of(lengths)
        here = torch.arange(found.length, device=lengths.device)
        valid = here < lengths[:, None]
        sees = (here[:, None] >= here) & valid[:, None, :] & valid[:, :, None]
        return Sequences(found.sample, found.place, found.size, found.length, found.pad(times), sees)

    def pad_heads(self, values: Tensor, heads: int) -> Tensor:
        """[T, D] to [B, H, L, D / H]."""
        return self.pad(values.view(len(values), heads, -1)).transpose(1, 2)

    def unpad_heads(self, padded: Tensor) -> Tensor:
        """[B, H, L, D / H] to [T, D]."""
        return self.unpad(padded.transpose(1, 2)).flatten(-2)


class RelativeBias(nn.Module):
    """A learned number for every distance of places, and one for every bucket of log(seconds between them), by head.

    Args:
        heads: H.
        max_length: distances from there on share a number.
    """

    def __init__(self, heads: int, max_length: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(max_length, heads, dtype=torch.float32))
        self.periods = nn.Parameter(torch.zeros(_TIME_BUCKETS, heads, dtype=torch.float32))

    def by_position(self, sequences: Sequences) -> Tensor:
        """float32 [H, L, L]."""
        here = torch.arange(sequences.length, device=self.positions.device)
        distance = (here[:, None] - here).clamp(0, len(self.positions) - 1)
        return self.positions[distance].permute(2, 0, 1)

    def by_time(self, sequences: Sequences) -> Tensor:
        """float32 [B, H, L, L]."""
        seconds = (sequences.times[:, :, None] - sequences.times[:, None, :]).clamp(min=1)
        bucket = (torch.log(seconds.to(torch.float32)) / _BUCKET).to(torch.int64).clamp(max=_TIME_BUCKETS - 1)
        return self.periods[bucket].permute(0, 3, 1, 2)


class SequenceModel(nn.Module):
    """Items of one table, layers, and a softmax over the target and the sample's candidates at every place.

    Args:
        embedding_collection: ours or TorchRec's, of one table with features `sequence`, `target` and `candidates`
            (data.SequenceBatch).
        num_layers, heads: sizes; the table's embedding_dim must be a multiple of `heads`.
        max_length: of the sequences.
        seed: determines the initial dense parameters, alike on every rank.

    Raises:
        ValueError: a size that makes no sense, or several tables.

    `forward` returns (loss, output, weight). In training the loss is the mean over the places that have a target, the
    weight is their number, and the output is (each sample's mean loss float32 [B], its number of targets int64 [B]).
    After `eval()` the output is the rank of each sample's only target among its candidates, int64 [B], 0 the best;
    candidates that score the same count half before it, rounded up.
    """

    layer_class: Callable[[int, int, int, torch.Generator], nn.Module]
    """(D, heads, max_length, generator) -> a layer that maps (float32 [T, D], Sequences) to float32 [T, D]."""

    def __init__(
        self, embedding_collection: nn.Module, num_layers: int = 2, heads: int = 2, max_length: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        dim = self._item_dim(embedding_collection, num_layers, heads, max_length)
        generator = torch.Generator().manual_seed(seed)
        self.embedding_collection = embedding_collection
        self.layers = nn.ModuleList(self.layer_class(dim, heads, max_length, generator) for _ in range(num_layers))

    @classmethod
    def _item_dim(cls, embedding_collection: Any, num_layers: int, heads: int, max_length: int) -> int:
        name = cls.__name__
        sizes = {"num_layers": num_layers, "heads": heads, "max_length": max_length}
        if wrong := [f"{size} {value}" for size, value in sizes.items() if value < 1]:
            raise ValueError(f"{name}: sizes must be >= 1, got {', '.join(wrong)}")
        configs = embedding_collection.embedding_configs()
        if len(configs) != 1:
            raise ValueError(f"{name}: expected one table of items, got {[config.name for config in configs]}")
        dim = int(configs[0].embedding_dim)
        if dim % heads:
            raise ValueError(f"{name}: embedding_dim must be a multiple of heads {heads}, got {dim}")
        return dim

    def forward(self, batch: Any) -> tuple[Tensor, Any, float]:
        """See the class."""
        rows = self.embedding_collection(batch.sparse)
        sequence, target, candidates = (rows[name] for name in ("sequence", "target", "candidates"))
        hidden = sequence.values()
        device = hidden.device  # integers of a batch stay on the host
        keys = {name: batch.sparse[name].values().to(device) for name in ("target", "candidates")}
        ahead, offered = target.lengths().to(device), candidates.lengths().to(device)
        sequences = Sequences.timed(sequence.lengths().to(device), batch.times.values().to(device))
        for layer in self.layers:
            hidden = layer(hidden, sequences)
        hidden, sample = _last_places(hidden, sequences, sequence.lengths().to(device), ahead)
        with torch.autocast(device.type, enabled=False):  # target and candidates are scored alike
            hidden = functional.normalize(hidden.float(), dim=-1, eps=1e-6)
            wanted = functional.normalize(target.values().float(), dim=-1, eps=1e-6)
            others = functional.normalize(candidates.values().float(), dim=-1, eps=1e-6)
            right = (hidden * wanted).sum(-1) / _TEMPERATURE
            choices = Padding.of(offered)
            scores = _scores(hidden, sample, others, choices) / _TEMPERATURE
            behind_end = torch.arange(choices.length, device=device) >= offered[:, None]
            told = choices.pad(keys["candidates"])[sample] == keys["target"][:, None]
            scores = scores.masked_fill(told | behind_end[sample], -torch.inf)
            first = torch.zeros(len(right), dtype=torch.int64, device=device)
            losses = functional.cross_entropy(torch.cat([right[:, None], scores], 1), first, reduction="none")
        size, count = sequences.size, ahead.to(torch.int64)
        if not self.training:
            return losses.mean(), ranks_of(right, scores), float(len(losses))
        sums = torch.zeros(size, dtype=losses.dtype, device=device).index_add(0, sample, losses.detach())
        return losses.mean(), (sums / count.clamp(min=1), count), float(len(losses))


def ranks_of(right: Tensor, scores: Tensor) -> Tensor:
    """int64 [P]: the rank of float [P] among float [P, K], 0 the best; a tie counts half, rounded up."""
    better, equal = (scores > right[:, None]).sum(1), (scores == right[:, None]).sum(1)
    return better + (equal + 1) // 2


def _last_places(hidden: Tensor, sequences: Sequences, lengths: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor]:
    """The last `ahead` places of each sequence, and the samples that they belong to."""
    chosen = sequences.place >= (lengths - ahead).to(torch.int64)[sequences.sample]
    return hidden[chosen], sequences.sample[chosen]


def _scores(hidden: Tensor, sample: Tensor, candidates: Tensor, choices: Padding) -> Tensor:
    """float32 [P, K]: of each place with the candidates of its sample."""
    queries = Padding.of(torch.bincount(sample, minlength=choices.size))
    return queries.unpad(torch.bmm(queries.pad(hidden), choices.pad(candidates).transpose(1, 2)))
