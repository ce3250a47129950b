"""Checks of one rank's own arguments of an exchange, shared by all groups."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nestpipe_kernels.errors import CommunicationError

__all__ = [
    "KINDS",
    "PARTS",
    "PART_PURPOSES",
    "PURPOSES",
    "check_all_to_all",
    "check_purpose",
    "count_mismatch",
    "own_part",
]

PURPOSES = ("keys", "rows", "grads", "dense", "control", "early", "resend")
"""What groups are for; each has its own queue of collectives, so one never waits behind another."""

PARTS = ("group", "replica")
"""What a communicator can be split into: ranks that share a copy of the tables, and ranks that own the same shard."""

PART_PURPOSES = ("keys", "rows", "grads")
"""What groups of a part are for."""

KINDS = (*PURPOSES, *(f"{part}_{purpose}" for part in PARTS for purpose in PART_PURPOSES))
"""Every kind of exchange, as messages call it."""


def check_purpose(purpose: str) -> None:
    """Raises ValueError for a name that is not in PURPOSES."""
    if purpose not in PURPOSES:
        raise ValueError(f"comm: unknown purpose {purpose!r}; expected one of {', '.join(PURPOSES)}")


def own_part(parts: Sequence[Sequence[int]], rank: int, size: int) -> tuple[list[int], int]:
    """The part with `rank` in it, and its position there. Raises ValueError if parts do not hold each rank once."""
    if sorted(r for part in parts for r in part) != list(range(size)):
        raise ValueError(f"comm: split: parts must hold each of the {size} ranks once, got {[list(p) for p in parts]}")
    own = next(list(part) for part in parts if rank in part)
    return own, own.index(rank)


def check_all_to_all(
    where: str,
    rank: int,
    size: int,
    send: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    out: Tensor | None,
) -> None:
    """Check what a rank can know by itself.

    Raises:
        ValueError: counts, shapes, dtype or device do not fit together.
        CommunicationError: the rank's counts for itself differ.
    """
    for name, counts in (("send_counts", send_counts), ("receive_counts", receive_counts)):
        if len(counts) != size or min(counts) < 0:
            raise ValueError(f"{where}: {name} must be {size} numbers >= 0, one per rank, got {list(counts)}")
    if send.dim() < 1 or send.shape[0] != sum(send_counts):
        raise ValueError(
            f"{where}: send must have sum(send_counts) = {sum(send_counts)} rows, got shape {list(send.shape)}"
        )
    if not send.is_cpu:
        raise ValueError(f"{where}: send must be on the CPU, got {send.device}; other devices are not supported yet")
    if send_counts[rank] != receive_counts[rank]:
        raise CommunicationError(count_mismatch(where, rank, rank, receive_counts[rank], send_counts[rank]))
    if out is None:
        return
    wanted = [sum(receive_counts), *send.shape[1:]]
    if list(out.shape) != wanted or out.dtype != send.dtype or out.device != send.device or not out.is_contiguous():
        raise ValueError(
            f"{where}: out must be a contiguous {send.dtype} tensor of shape {wanted} on {send.device}, got "
            f"{out.dtype} {list(out.shape)} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
        )


def count_mismatch(where: str, source: int, rank: int, expected: int, got: int) -> str:
    """Message for a sender and a receiver that disagree about the rows between them."""
    return f"{where}: rank {rank} expected {expected} rows from rank {source}, but rank {source} sends {got}"
