"""At construction, all ranks compare what they are about to run: a mismatch is an error here, not a hang later."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from ..comm import exchange_same
from ..config import PipelineConfig
from ..stages.messages import Flags, pack_flags, unpack_flags
from ..stages.state import BatchState, Failure, RankState
from .facts import common_facts, first_difference

__all__ = ["agree", "exchange_failures", "share_dense"]


def agree(rank: RankState, config: PipelineConfig) -> int:
    """Compare settings, tables, dense parameters and their optimizer over all ranks; the index of the next batch, alike
    on all.

    It is 0 for empty stores; rows that an earlier pipeline has used know that batch as theirs, and the count goes on.
    Values travel only where digests differ. Collective.

    Raises:
        ValueError: some rank differs; names the first setting in which, and the values of this rank and that one.
    """
    facts = common_facts(rank, config)
    newest = max((binding.store.last_batch for binding in rank.bindings), default=-1)
    texts = [json.dumps(list(entries.items())) for entries in facts.values()]
    mine = torch.tensor([*map(_digest, texts), newest])
    group = rank.communicator.group("control")
    everyone = exchange_same(group, mine, "agree").wait()
    for k, name in enumerate(facts):
        others = [r for r in range(rank.communicator.size) if int(everyone[r, k]) != int(mine[k])]
        if others:  # on every rank alike, so all of them come here with the same k
            theirs = dict(json.loads(_exchange_texts(rank, texts[k])[others[0]]))
            what, here, there = first_difference(name, facts[name], theirs)
            raise ValueError(
                f"ranks disagree on {what}: rank {rank.communicator.rank} has {here}, rank {others[0]} has {there}; "
                "construct the pipeline alike on all ranks"
            )
    return int(everyone[:, -1].max()) + 1


def _exchange_texts(rank: RankState, mine: str) -> list[str]:
    """Every rank's text. Collective."""
    group = rank.communicator.group("control")
    data = mine.encode()
    sizes = exchange_same(group, torch.tensor([len(data)]), "agree/sizes").wait().flatten().tolist()
    words = torch.zeros(-(-max(sizes) // 8), dtype=torch.int64)
    words.view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = exchange_same(group, words, "agree/texts").wait()
    return [bytes(row.contiguous().view(torch.uint8)[:size].tolist()).decode() for row, size in zip(everyone, sizes)]


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
