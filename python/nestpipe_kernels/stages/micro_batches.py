"""How a batch is cut into micro-batches: in which order its samples go, and how many each part takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.bucketize import bucketize
from ..ops.cluster import cluster, partition_sizes
from ..ops.dedup import dedup
from ..types import LookupCall, StoreKeys
from .state import BatchState, Inputs, MicroBatch, RankState

__all__ = ["balanced_sizes", "even_sizes", "micro_batches"]


def micro_batches(rank: RankState, batch: BatchState) -> list[MicroBatch]:
    """The parts of a batch, with their lookups. Raises what a batch that cannot be split or planned raises."""
    from ..capture.split import split
    from ..capture.to_device import to_device

    order, parts = _order_and_sizes(rank, batch)
    indices = [part.contiguous() for part in torch.split(order, parts)]
    filled = [k for k, part in enumerate(parts) if part]
    pieces = split(batch.raw, [indices[k] for k in filled], rank.split_batch) if filled else []
    micros = [MicroBatch(None, index) for index in indices]
    for k, piece in zip(filled, pieces):
        micros[k].batch = piece
        try:
            micros[k].inputs, micros[k].calls = _plan_calls(rank, batch.inputs, piece)
            if rank.backend.has_streams:
                micros[k].batch = to_device(piece, rank.backend.device, micros[k].moved)
        except (IndexError, TypeError, ValueError):
            _plan_calls(rank, batch.inputs, batch.raw)  # says the same with positions in the whole batch
            raise
    return micros


def even_sizes(samples: int, number: int, edge_share: float) -> list[int]:
    """Samples of each micro-batch: even, or `edge_share` of that in the first and the last of three or more, at least
    one in each, and even between them."""
    even = partition_sizes(samples, number)
    if number < 3 or samples < number:
        return even
    edge = max(round(samples / number * edge_share), 1)
    return even if edge >= even[-1] else [edge, *partition_sizes(samples - 2 * edge, number - 2), edge]


def balanced_sizes(tokens: Tensor, number: int, edge_share: float) -> list[int]:
    """Samples of each micro-batch of consecutive samples with int64 [B] tokens: each cut is where the tokens before it
    come closest to their share, and every part has a sample while there are enough. Even where nobody has a token."""
    samples = len(tokens)
    before = torch.zeros(samples + 1, dtype=torch.int64)
    torch.cumsum(tokens, 0, out=before[1:])
    total = int(before[-1])
    if total == 0 or samples < number:
        return even_sizes(samples, number, edge_share)
    edge = edge_share if number >= 3 else 1.0
    inner = (number - 2 * edge) / max(number - 2, 1)
    shares = torch.tensor([edge] + [inner] * (number - 2) + [edge] if number > 1 else [1.0], dtype=torch.float64)
    wanted = (torch.cumsum(shares, 0) * (total / float(shares.sum())))[:-1].round().to(torch.int64)
    above = torch.searchsorted(before, wanted)  # before[above - 1] < wanted <= before[above]
    cuts = [at - (int(goal - before[at - 1]) < int(before[at] - goal)) for at, goal in zip(above.tolist(), wanted)]
    sizes, start = [], 0
    for k, cut in enumerate([*cuts, samples]):
        end = min(max(int(cut), start + 1), samples - (number - 1 - k))
        sizes.append(end - start)
        start = end
    return sizes


def _order_and_sizes(rank: RankState, batch: BatchState) -> tuple[Tensor, list[int]]:
    number = rank.num_micro_batches
    order = torch.arange(batch.size)
    occurrences = _Occurrences(rank, batch) if number > 1 and batch.size > 1 else None
    if occurrences is not None and rank.clustering:
        order = occurrences.clustered_order()
    if occurrences is None or rank.balance == "samples":
        return order, even_sizes(batch.size, number, rank.edge_share)
    tokens = occurrences.per_sample() if rank.balance == "keys" else _tokens(rank, batch)
    return order, balanced_sizes(tokens[order], number, rank.edge_share)


def _tokens(rank: RankState, batch: BatchState) -> Tensor:
    """What the user's function says."""
    assert callable(rank.balance)
    found = rank.balance(batch.raw)
    shape = (batch.size,)
    if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex() or found.shape != shape:
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"PipelineConfig.balance: expected the tokens of every sample, integers of shape [{batch.size}], got {got}"
        )
    found = found.to("cpu", torch.int64)
    if bool((found < 0).any()):
        at = int((found < 0).nonzero()[0])
        raise ValueError(f"PipelineConfig.balance: tokens must be >= 0, got {int(found[at])} for sample {at}")
    return found


def _plan_calls(
    rank: RankState, source: Inputs | None, piece: Any
) -> tuple[dict[str, list[Any]], dict[str, list[LookupCall]]]:
    """The inputs of every module for a batch or a part of it, and their lookups."""
    inputs: dict[str, list[Any]] = source.replay(piece) if source is not None else {}
    return inputs, {name: [rank.modules[name].plan_call(f) for f in calls] for name, calls in inputs.items()}


class _Occurrences:
    """Keys of a batch by store, with the samples that they belong to; lookups that do not map to samples are left
    out."""

    def __init__(self, rank: RankState, batch: BatchState) -> None:
        self._size, self._number = batch.size, rank.num_micro_batches
        self._objective = "resend" if rank.track_use else "send_once"
        self._by_store: list[Sequence[tuple[Tensor, StoreKeys]]] = []
        if not rank.clustering and rank.balance != "keys":
            return
        for name, calls in _plan_calls(rank, batch.inputs, batch.raw)[1].items():
            for store in range(len(rank.modules[name].row_stores())):
                mapped = [(s, c.stores[store]) for c in calls if (s := _samples_of(c, store, batch.size)) is not None]
                if mapped:
                    self._by_store.append(mapped)

    def per_sample(self) -> Tensor:
        """int64 [B]: the keys of each sample."""
        counts = torch.zeros(self._size, dtype=torch.int64)
        for mapped in self._by_store:
            for samples, _ in mapped:
                counts += torch.bincount(samples, minlength=self._size)
        return counts

    def clustered_order(self) -> Tensor:
        """int64 [B]: lets samples sharing keys meet."""
        if not self._by_store:
            return torch.arange(self._size)
        ids: list[Tensor] = []
        base = 0
        for mapped in self._by_store:
            distinct = dedup(torch.cat([keys.keys for _, keys in mapped]), torch.cat([k.tables for _, k in mapped]))
            ids.append(distinct.inverse.to(torch.int64) + base)
            base += len(distinct.unique_index)
        samples = torch.cat([samples for mapped in self._by_store for samples, _ in mapped])
        by_sample, counts = bucketize(samples.to(torch.int32), self._size)
        offsets = torch.zeros(self._size + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=offsets[1:])
        return cluster(offsets, torch.cat(ids)[by_sample], self._number, self._objective)


def _samples_of(call: LookupCall, store: int, size: int) -> Tensor | None:
    """The sample of each key, where the call tells; a dimension that is longer than the batch tells nothing."""
    samples = call.samples[store] if call.samples else None
    return None if samples is None or (len(samples) and int(samples.max()) >= size) else samples
