"""At construction, all ranks compare what they are about to run: a mismatch is an error here, not a hang later."""

from __future__ import annotations

import hashlib

import torch

from ..comm import exchange_same
from ..config import PipelineConfig
from ..stages.state import RankState

__all__ = ["agree"]

_WORDS = 64


def agree(rank: RankState, config: PipelineConfig) -> None:
    """Compare settings, tables and dense parameters over all ranks.

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
        )
        for b in rank.bindings
        for t in b.store.tables
    ]
    facts = {
        "schedule": config.schedule,
        "num_micro_batches": config.num_micro_batches,
        "row_transfer": config.row_transfer,
        "nan_policy": config.nan_policy,
        "embedding tables": tables,
        "dense parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in rank.dense_parameters],
    }
    mine = torch.tensor([_digest(repr(value)) for value in facts.values()] + [0] * (_WORDS - len(facts)))
    everyone = exchange_same(rank.communicator.group("control"), mine, "agree").wait()
    for k, (name, value) in enumerate(facts.items()):
        others = [r for r in range(rank.communicator.size) if int(everyone[r, k]) != int(mine[k])]
        if others:
            raise ValueError(
                f"ranks disagree on {name}: rank {rank.communicator.rank} has {str(value)[:200]}, "
                f"rank {others[0]} has something else; construct the pipeline alike on all ranks"
            )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
