"""What ranks tell each other while saving and loading: JSON values, and failures, which reach every rank."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..comm import Communicator, exchange_same
from ..errors import RemoteRankError

__all__ = ["agree", "gather_json"]

_MESSAGE_BYTES = 4000


def agree(communicator: Communicator, failure: BaseException | None, doing: str) -> None:
    """Collective: returns on all ranks, or raises on all.

    Args:
        communicator: of the ranks.
        failure: this rank's, or None.
        doing: what is being done, for messages; the same on all ranks.

    Raises:
        `failure` itself on the ranks that have one; RemoteRankError with the lowest failed rank's message on others.
        CommunicationError: a rank is gone or late.
    """
    gather_json(communicator, None, failure, doing, to=None)


def gather_json(
    communicator: Communicator, value: Any, failure: BaseException | None, doing: str, to: int | None = 0
) -> list[Any]:
    """Collective: every rank's JSON value on rank `to` (None: on all), in rank order; an empty list elsewhere.

    Args: as `agree`; `value` is ignored where there is a failure.

    Raises: as `agree`.
    """
    world, rank = communicator.size, communicator.rank
    if failure is None:
        payload = json.dumps(value, separators=(",", ":")).encode()
    else:
        payload = f"{type(failure).__name__}: {failure}".encode(errors="replace")[:_MESSAGE_BYTES]
    group = communicator.group("control")
    mine = torch.tensor([int(failure is not None), len(payload)], dtype=torch.int64)
    everyone = exchange_same(group, mine, f"checkpoint/{doing}/sizes").wait().tolist()
    failed = [source for source in range(world) if everyone[source][0]]
    send = [_bytes_to(r, rank, everyone, failed, to) for r in range(world)]
    receive = [_bytes_to(rank, r, everyone, failed, to) for r in range(world)]
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    sent = data.repeat(sum(1 for n in send if n)) if any(send) else data[:0]
    received: Tensor = group.all_to_all(sent, send, receive, f"checkpoint/{doing}/values").wait()
    texts = [bytes(part.numpy()) for part in torch.split(received, receive)]
    if failure is not None:
        raise failure
    if failed:
        raise RemoteRankError(failed[0], doing, -1, texts[failed[0]].decode(errors="replace"))
    return [json.loads(text) for text in texts] if to in (None, rank) else []


def _bytes_to(receiver: int, sender: int, everyone: list[list[int]], failed: list[int], to: int | None) -> int:
    """Bytes that `sender` has for `receiver`: messages of failures for all, values only if nobody failed."""
    wanted = sender in failed if failed else to in (None, receiver)
    return everyone[sender][1] if wanted else 0
