"""Small fixed messages: the announcement before keys, the flags of the commit; and rows of several stores in one
exchange."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CommunicationError
from ..ops.wire_rows import decode_rows, encode_rows, wire_dtype, wire_width
from .state import Failure

__all__ = ["FIXED_WORDS", "Flags", "join_rows", "message_counts", "pack_flags", "split_rows", "unpack_flags"]

_MAGIC = 0x4E50_0001
_TEXT_WORDS = 48
_HEAD_WORDS = 11
_SUM_AT = 9
FIXED_WORDS = _HEAD_WORDS + _TEXT_WORDS


class Flags:
    """One rank's word about a batch: does it have samples, did it fail, is something not finite."""

    def __init__(
        self,
        batch: int,
        micro_batches: int,
        training: bool = True,
        has_batch: bool = True,
        failure: Failure | None = None,
        sparse_bad: int = 0,
        dense_bad: bool = False,
        text: str = "",
        plain: bool = False,
    ) -> None:
        self.batch = batch
        self.micro_batches = micro_batches
        self.training = training
        self.has_batch = has_batch
        self.failed = failure is not None
        self.micro = failure.micro if failure is not None else 0
        self.sparse_bad = sparse_bad
        self.dense_bad = dense_bad
        self.plain = plain
        """Its model is known to return no weights."""
        self.text = f"{failure.stage}\n{failure.message}" if failure is not None else text

    def as_failure(self, rank: int) -> Failure:
        """The failure that a peer reported."""
        stage, _, message = self.text.partition("\n")
        return Failure(rank, stage, message, micro=self.micro)


def pack_flags(flags: Flags, extra: Sequence[int] = ()) -> Tensor:
    """int64 [FIXED_WORDS + len(extra)]; the text is cut to what fits."""
    text = flags.text.encode()[: _TEXT_WORDS * 8]
    padded = text + b"\0" * (_TEXT_WORDS * 8 - len(text))
    head = [_MAGIC, flags.batch, flags.micro_batches, int(flags.training), int(flags.has_batch)]
    failed = 1 + flags.micro if flags.failed else 0
    words = [*head, failed, flags.sparse_bad, int(flags.dense_bad), len(text), 0, int(flags.plain)]
    body = torch.frombuffer(bytearray(padded), dtype=torch.int64)
    message = torch.cat([torch.tensor(words, dtype=torch.int64), body, torch.tensor(list(extra), dtype=torch.int64)])
    message[_SUM_AT] = _checksum(message)
    return message


def _checksum(message: Tensor) -> int:
    """CRC-32 of all words but the one that holds it."""
    data = message.contiguous().numpy().tobytes()
    return zlib.crc32(data[8 * _SUM_AT + 8 :], zlib.crc32(data[: 8 * _SUM_AT]))


def unpack_flags(words: Tensor, rank: int, expect: Flags) -> Flags:
    """Flags of a peer.

    Raises:
        CommunicationError: the message is damaged, or the peer is at another batch or splits batches otherwise.
    """
    head = words[:_HEAD_WORDS].tolist()
    if head[_SUM_AT] != _checksum(words):
        raise CommunicationError(
            f"rank {rank} sent a damaged message (checksum {_checksum(words)}, expected {head[_SUM_AT]}) of batch "
            f"{expect.batch}: it begins with {head}"
        )
    for what, got, want in (
        ("message marker", head[0], _MAGIC),
        ("mode (1: training, 0: evaluation)", head[3], int(expect.training)),
        ("batch index", head[1], expect.batch),
        ("num_micro_batches", head[2], expect.micro_batches),
    ):
        if got != want:
            raise CommunicationError(
                f"rank {rank} sent another {what}: expected {want}, got {got}; all ranks must run the same steps with "
                "the same settings"
            )
    text = words[_HEAD_WORDS:FIXED_WORDS].numpy().tobytes()[: head[8]].decode(errors="replace")
    flags = Flags(head[1], head[2], bool(head[3]), bool(head[4]), None, head[6], bool(head[7]), text, bool(head[10]))
    flags.failed, flags.micro = bool(head[5]), max(head[5] - 1, 0)
    return flags


def message_counts(
    per_peer: Sequence[Sequence[int]], dims: Sequence[int], world_size: int, wire: str, lead: bool = False
) -> list[int]:
    """Elements (of `wire_dtype(wire)`) for each peer when rows of several stores share a message."""
    widths = [wire_width(dim, wire) for dim in dims]
    extra = _lead_width(wire) if lead else 0
    return [extra + sum(n[p] * width for n, width in zip(per_peer, widths)) for p in range(world_size)]


def _leads(pieces: Sequence[Tensor]) -> list[float]:
    if pieces[0].is_cpu:
        return [float(piece.clone().view(torch.float32)) for piece in pieces]
    numbers: list[float] = torch.cat(list(pieces)).cpu().view(torch.float32).tolist()
    return numbers


def _lead_width(wire: str) -> int:
    """A leading number travels as float32, whatever the rows do."""
    return 4 // wire_dtype(wire).itemsize


def join_rows(
    parts: Sequence[Tensor],
    per_peer: Sequence[Sequence[int]],
    wire: str,
    lead: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One flat message out of rows [n, dim] of several stores: `wire_dtype(wire)` [sum], by peer, then store; `lead`
    float32 [W] comes first for each peer. Values are rounded here, those for the own rank, too.
    `out`: memory for a message that has to be put together."""
    coded = [encode_rows(part, wire) for part in parts]
    if len(coded) == 1 and lead is None:
        return coded[0].reshape(-1)
    split = [torch.split(part, list(counts)) for part, counts in zip(coded, per_peer)]
    leads = None if lead is None else lead.view(wire_dtype(wire)).view(len(lead), -1)
    pieces: list[Tensor] = []
    for peer in range(len(per_peer[0]) if per_peer else 0 if lead is None else len(lead)):
        if leads is not None:
            pieces.append(leads[peer])
        pieces += [rows[peer].reshape(-1) for rows in split]
    if not pieces:
        return torch.empty(0, dtype=wire_dtype(wire), device=None if out is None else out.device)
    return torch.cat(pieces, out=out)


def split_rows(
    message: Tensor, per_peer: Sequence[Sequence[int]], dims: Sequence[int], wire: str, lead: bool, world_size: int
) -> tuple[list[list[Tensor]], list[float]]:
    """The inverse of join_rows: float32 rows of each store, in one or several pieces in the order of peers, and the
    leading numbers."""
    widths = [wire_width(dim, wire) for dim in dims]
    if len(dims) == 1 and not lead:
        return [[decode_rows(message.view(-1, widths[0]), dims[0], wire)]], []
    sizes = []
    for peer in range(world_size):
        sizes += [_lead_width(wire)] * lead + [counts[peer] * width for counts, width in zip(per_peer, widths)]
    pieces = torch.split(message, sizes)
    step = len(dims) + lead
    leads = _leads([pieces[peer * step] for peer in range(world_size)]) if lead else []
    rows = []
    for s, (dim, width) in enumerate(zip(dims, widths)):
        parts = [pieces[peer * step + lead + s].view(-1, width) for peer in range(world_size)]
        rows.append([decode_rows(part, dim, wire) for part in parts])
    return rows, leads
