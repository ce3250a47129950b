"""At construction, all ranks compare what they are about to run: a mismatch is an error here, not a hang later."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..comm import exchange_same
from ..config import PipelineConfig
from ..stages.messages import Flags, pack_flags, unpack_flags
from ..stages.state import BatchState, Failure, RankState

__all__ = ["agree", "exchange_failures", "share_dense"]

_WORDS = 64


def agree(rank: RankState, config: PipelineConfig) -> int:
    """Compare settings, tables and dense parameters over all ranks; the index of the next batch, alike on all.

    It is 0 for empty stores; rows that an earlier pipeline has used know that batch as theirs, and the count goes on.

    Raises:
        ValueError: some rank differs; says in what, with this rank's value.
    """
    tables = [
        (
            b.module_name,
            t.name,
            t.num_embeddings,
            b.store.dim,
            repr(b.store.optimizer),
            repr(t.init),
            t.seed,
            t.trainable,
            b.store.data_type.value,
            b.store.stochastic_rounding,
            repr(t.admission),
            repr(t.eviction),
            repr(t.default),
        )
        for b in rank.bindings
        for t in b.store.tables
    ]
    facts = {
        "schedule": config.schedule,
        "num_micro_batches": config.num_micro_batches,
        "device": rank.backend.kind,
        "row_transfer": config.row_transfer,
        "early_send": config.early_send,
        "owner_pooling": [b.pooled for b in rank.bindings] + [rank.owner_pooling_auto],
        "edge_share": float(config.edge_share),
        "row_wire": config.row_wire,
        "gradient_wire": config.gradient_wire,
        "nan_policy": config.nan_policy,
        "loss_weighting": config.loss_weighting,
        "sparse groups": rank.topology.settings,
        "embedding tables": tables,
        "dense parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in rank.dense_parameters],
    }
    newest = max((binding.store.last_batch for binding in rank.bindings), default=-1)
    mine = torch.tensor([_digest(repr(value)) for value in facts.values()] + [0] * (_WORDS - len(facts)))
    mine[-1] = newest
    everyone = exchange_same(rank.communicator.group("control"), mine, "agree").wait()
    for k, (name, value) in enumerate(facts.items()):
        others = [r for r in range(rank.communicator.size) if int(everyone[r, k]) != int(mine[k])]
        if others:
            raise ValueError(
                f"ranks disagree on {name}: rank {rank.communicator.rank} has {str(value)[:200]}, "
                f"rank {others[0]} has something else; construct the pipeline alike on all ranks"
            )
    return int(everyone[:, -1].max()) + 1


def share_dense(rank: RankState, model: torch.nn.Module) -> None:
    """Give rank 0's dense parameters and buffers to all ranks, so that they start alike. Collective."""
    world, group = rank.communicator.size, rank.communicator.group("dense")
    if world == 1:
        return
    tensors = {id(tensor): (name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    tensors.update((id(parameter), (name, parameter)) for name, parameter in rank.dense_parameters)
    for name, tensor in tensors.values():
        target = _distinct(tensor.detach())
        data = target.contiguous().view(-1)
        mine = [len(data)] * world if rank.communicator.rank == 0 else [0] * world
        theirs = [len(data)] + [0] * (world - 1)
        data = data.cpu()
        send = data.repeat(world) if rank.communicator.rank == 0 else data[:0]
        received = group.all_to_all(_bytes(send), _scaled(mine, data), _scaled(theirs, data), f"share/{name}").wait()
        if rank.communicator.rank:
            target.copy_(received.view(target.dtype).view(target.shape))


def _distinct(tensor: Tensor) -> Tensor:
    """A view without the repetitions of an expanded tensor, whose elements could not be written one by one."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _scaled(counts: list[int], like: Tensor) -> list[int]:
    return [n * like.element_size() for n in counts]


def exchange_failures(rank: RankState, batch: BatchState, own: Failure | None) -> Failure | None:
    """At the end of an epoch: the first failure of another rank, if any. Collective."""
    flags = Flags(batch.index, rank.num_micro_batches, batch.training, False, own)
    words = exchange_same(rank.communicator.group("control"), pack_flags(flags), f"{batch.tag}/end").wait()
    for peer in range(rank.communicator.size):
        found = unpack_flags(words[peer], peer, flags)
        if found.failed and peer != rank.communicator.rank:
            return found.as_failure(peer)
    return None


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
