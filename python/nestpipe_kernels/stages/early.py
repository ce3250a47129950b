"""Early send and early update: rows that are final leave before the window of their batch, and rows are updated as soon
as their last gradient is here.

While batch t is in its window, an owner sorts the rows that the first micro-batch of batch t + 1 needs into three
kinds, and tells the sources: FRESH, not in batch t; SOON, in batch t but not in its last micro-batch, anywhere; URGENT,
the rest. Each kind is sent as soon as its rows are final. Gradients of the last micro-batch go in two messages, those
of urgent rows first. Nothing of this waits for the verdict: a row that changed in a buffer has not changed in the
store, and when a batch does not count, or rows are read or written between two steps, the pipeline gathers batch t + 1
from the store and says so ("resend"): then the rows of the first micro-batch go once more, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import exchange_same
from ..comm.router import Transfer
from ..errors import CommunicationError
from ..ops.row_sync import row_sync
from ..ops.take_rows import take_rows
from . import commit, window
from .finite import as_read, note_gradients
from .state import BatchState, EarlyRows, OwnerKeys, RankState, StorePlan

__all__ = [
    "FRESH",
    "SOON",
    "URGENT",
    "begin",
    "recv_grads",
    "send_fresh",
    "send_grads",
    "send_remaining_grads",
    "send_rows",
    "send_soon",
    "send_urgent",
    "tell_kinds",
    "update",
]

FRESH, SOON, URGENT = range(3)
_PURPOSES = ("early.fresh", "early.soon", "early.urgent")


def begin(rank: RankState, batch: BatchState, micro: int) -> None:
    """The window begins; tell everybody whether the rows that this rank has sent early are still right."""
    commit.begin(rank, batch, micro)
    word = torch.tensor([int(batch.resend)])
    batch.post("resend", 0, exchange_same(rank.communicator.group("resend"), word, f"{batch.tag}/resend"))
    rank.step_begun.set()


# ------------------------------------------------------------------------------------------- which rows are when


def tell_kinds(rank: RankState, batch: BatchState, micro: int) -> None:
    """Sort the rows that the first micro-batch needs, and tell every source about those that it gets; and which of its
    last gradients of the batch before are urgent."""
    before = batch.previous if batch.previous is not None and not batch.previous.skipped else None
    batch.early = early = EarlyRows(before)
    last = rank.num_micro_batches - 1
    rows, grads = [], []
    if batch.failure is None:
        with batch.guard(rank.communicator.rank, "tell_kinds"):
            for k, owner in enumerate(batch.owner):
                rows.append(_sort_rows(early, owner, before, k, last))
    if batch.failure is not None:  # nothing of this batch will count; the messages' sizes are the same
        rows = [torch.zeros(len(owner.keys), dtype=torch.uint8) for owner in batch.owner]
        early.copies = [[None] * len(batch.owner) for _ in _PURPOSES]
        if before is not None:
            for owner in before.owner:
                owner.urgent = torch.zeros(len(owner.keys), dtype=torch.bool)
    for owner, kinds in zip(batch.owner, rows):
        move = owner.rows[0]
        entries = kinds[owner.slot[move.positions]]
        early.outgoing.append([_chosen(move, entries == kind) for kind in range(len(_PURPOSES))])
        grads.append((entries, move.per_peer))
    for owner in before.owner if before is not None else []:
        move = owner.grads[last]
        assert owner.urgent is not None
        urgent = owner.urgent[owner.slot[move.positions]]
        owner.last_grads = _chosen(move, urgent), _chosen(move, ~urgent)
        grads.append((urgent.to(torch.uint8), move.per_peer))
    split = [torch.split(entries, per_peer) for entries, per_peer in grads]
    message = torch.cat([parts[peer] for peer in range(rank.communicator.size) for parts in split])
    handle = rank.communicator.group("early").all_to_all(
        message,
        [sum(per_peer[p] for _, per_peer in grads) for p in range(rank.communicator.size)],
        [sum(sizes) for sizes in _told_sizes(rank, batch, before)],
        f"{batch.tag}/kinds",
    )
    batch.post("early.kinds", 0, handle)


def _told_sizes(rank: RankState, batch: BatchState, before: BatchState | None) -> list[list[int]]:
    """Of each owner: bytes about the rows of every store, then about the gradients of every store."""
    moves = [plan.rows[0] for plan in batch.plans]
    if before is not None:
        moves += [plan.grads[-1] for plan in before.plans]
    return [[move.per_peer[peer] for move in moves] for peer in range(rank.communicator.size)]


def _sort_rows(early: EarlyRows, owner: OwnerKeys, before: BatchState | None, store: int, last: int) -> Tensor:
    """uint8 [U]: the kind of each row; leaves the pairs of rows to copy with `early` and, for sync, with the owner."""
    kinds = torch.full((len(owner.keys),), FRESH, dtype=torch.uint8)
    copies: list[tuple[Tensor, Tensor] | None] = [None, None, None]
    there, here = owner.shared_before, owner.shared_here
    if before is not None:
        before.owner[store].urgent = torch.zeros(len(before.owner[store].keys), dtype=torch.bool)
    if before is not None and there is not None and here is not None:
        theirs = before.owner[store]
        first = torch.zeros(len(owner.keys), dtype=torch.bool)
        first[owner.slot[owner.rows[0].positions]] = True
        needed = first[here]
        soon = torch.zeros_like(needed) if before.weighted_sources else theirs.last_use()[there] < last
        for kind, chosen in ((SOON, needed & soon), (URGENT, needed & ~soon)):
            copies[kind] = there[chosen], here[chosen]
            kinds[here[chosen]] = kind
        assert theirs.urgent is not None
        theirs.urgent[there[needed & ~soon]] = True
        owner.shared_before, owner.shared_here = there[~needed], here[~needed]
    for kind, pair in enumerate(copies):
        early.copies[kind].append(pair)
    return kinds


def _chosen(move: Transfer, mask: Tensor) -> Transfer:
    """The entries of a transfer that a mask picks."""
    return Transfer(move.positions[mask], [int(part.sum()) for part in torch.split(mask, move.per_peer)])


def _land_kinds(rank: RankState, batch: BatchState) -> None:
    """What the owners told: which rows come when, and which gradients go first."""
    early = batch.early
    assert early is not None
    before = early.before
    sizes = _told_sizes(rank, batch, before)
    message = batch.land("early.kinds")
    if len(message) and int(message.max()) > URGENT:
        raise CommunicationError(f"a rank sent an unknown kind of row: {int(message.max())}")
    parts = torch.split(message, [n for of_peer in sizes for n in of_peer])
    columns = len(sizes[0])
    told = [torch.cat([parts[p * columns + k] for p in range(rank.communicator.size)]) for k in range(columns)]
    for plan, entries in zip(batch.plans, told):
        early.incoming.append([_chosen(plan.rows[0], entries == kind) for kind in range(len(_PURPOSES))])
    if before is not None:
        for plan, entries in zip(before.plans, told[len(batch.plans) :]):
            plan.last_grads = _chosen(plan.grads[-1], entries != 0), _chosen(plan.grads[-1], entries == 0)


# ------------------------------------------------------------------------------------------------------- rows


def send_fresh(rank: RankState, batch: BatchState, micro: int) -> None:
    """Rows that the batch before does not have."""
    _land_kinds(rank, batch)
    _send_kind(rank, batch, FRESH)


def send_soon(rank: RankState, batch: BatchState, micro: int) -> None:
    """Rows that the batch before has done with, from its buffer."""
    _copy_kind(rank, batch, SOON)
    _send_kind(rank, batch, SOON)


def send_urgent(rank: RankState, batch: BatchState, micro: int) -> None:
    """Rows whose last gradients have just come."""
    _copy_kind(rank, batch, URGENT)
    _send_kind(rank, batch, URGENT)


def _copy_kind(rank: RankState, batch: BatchState, kind: int) -> None:
    early = batch.early
    assert early is not None
    if batch.failure is not None or early.before is None:
        return
    with batch.guard(rank.communicator.rank, "early_sync"):
        for owner, last, pair in zip(batch.owner, early.before.owner, early.copies[kind]):
            if pair is not None:
                assert owner.buffer is not None and last.buffer is not None
                row_sync(last.buffer, owner.buffer, *pair)


def _send_kind(rank: RankState, batch: BatchState, kind: int) -> None:
    early = batch.early
    assert early is not None
    outgoing = [kinds[kind] for kinds in early.outgoing]
    incoming = [kinds[kind] for kinds in early.incoming]
    window.post_rows(rank, batch, "early", (_PURPOSES[kind], 0), 0, outgoing, incoming)


def send_rows(rank: RankState, batch: BatchState, micro: int) -> None:
    """Rows of later micro-batches; those of the first only where an owner has said that they go once more."""
    if micro:
        window.send_rows(rank, batch, micro)
        return
    assert batch.early is not None
    batch.early.before = None  # all is copied; kept, each batch would keep all before it
    again = [bool(word) for word in batch.land("resend").flatten()]
    if not any(again):
        return
    own = again[rank.communicator.rank]
    outgoing = [owner.rows[0] if own else _chosen(owner.rows[0], _none(owner.rows[0])) for owner in batch.owner]
    window.post_rows(rank, batch, "rows", ("rows", 0), 0, outgoing, [_of(plan.rows[0], again) for plan in batch.plans])


def _none(move: Transfer) -> Tensor:
    return torch.zeros(len(move.positions), dtype=torch.bool)


def _of(move: Transfer, peers: Sequence[bool]) -> Transfer:
    """The entries of some peers."""
    return _chosen(move, torch.repeat_interleave(torch.tensor(peers), torch.tensor(move.per_peer)))


# ---------------------------------------------------------------------------------------- gradients and updates


def _last_grads(side: StorePlan | OwnerKeys) -> tuple[Transfer, Transfer]:
    """(urgent, remaining) gradients of the last micro-batch; none is urgent if no batch follows."""
    if side.last_grads is not None:
        return side.last_grads
    return _chosen(side.grads[-1], _none(side.grads[-1])), side.grads[-1]


def send_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Gradients that are complete with this micro-batch; of the last one those of urgent rows alone."""
    if micro < rank.num_micro_batches - 1:
        window.send_grads(rank, batch, micro)
        return
    rank.step_begun.clear()
    moves = [_last_grads(plan)[0] for plan in batch.plans]
    urgent = [_take(rank, plan, move) for plan, move in zip(batch.plans, moves)]
    window.post_grads(rank, batch, ("grads", micro), urgent, moves, [_last_grads(o)[0] for o in batch.owner], True)
    # The others leave later, but the commit, which comes before, judges them.
    batch.remaining = [_take(rank, plan, _last_grads(plan)[1]) for plan in batch.plans]


def _take(rank: RankState, plan: StorePlan, move: Transfer) -> Tensor:
    """Gradients out of their accumulators, with a note of their magnitudes for the commit."""
    part, peaks = take_rows(plan.gradients, move.positions)
    note_gradients(plan, move.positions, as_read(part, peaks, rank.gradient_wire)[1])
    return part


def send_remaining_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """The other gradients of the last micro-batch; for a moment they let the word go first that opens the next step, as
    the model waits for it and would wait for all of them on the same link."""
    rank.step_begun.wait(rank.patience_s)
    parts, batch.remaining = batch.remaining, []
    moves = [_last_grads(plan)[1] for plan in batch.plans]
    window.post_grads(rank, batch, ("grads.rest", 0), parts, moves, [_last_grads(o)[1] for o in batch.owner], True)


def recv_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Gradients into their boxes; then the update of rows that no later gradient will touch, of the last micro-batch
    those that are urgent."""
    last = micro == rank.num_micro_batches - 1
    moves = [_last_grads(owner)[0] if last else owner.grads[micro] for owner in batch.owner]
    window.put_gradients(rank, batch, micro, batch.land("grads", micro), moves, slice(0, len(batch.divisors)))
    if not last and batch.weighted_sources:  # what divides them is not known before the last micro-batch
        return
    chosen = []
    for owner in batch.owner:
        if not last:
            chosen.append(owner.last_use() == micro)
        else:
            chosen.append(owner.urgent if owner.urgent is not None else torch.zeros(len(owner.keys), dtype=torch.bool))
    _update_rows(rank, batch, chosen)


def update(rank: RankState, batch: BatchState, micro: int) -> None:
    """The last gradients, and the update of all rows that are left."""
    moves, every = [_last_grads(owner)[1] for owner in batch.owner], slice(0, len(batch.divisors))
    window.put_gradients(rank, batch, rank.num_micro_batches - 1, batch.land("grads.rest"), moves, every)
    chosen = [
        owner.pending if owner.pending is not None else torch.ones(len(owner.keys), dtype=torch.bool)
        for owner in batch.owner
    ]
    _update_rows(rank, batch, chosen)
    for owner in batch.owner:
        owner.boxes = owner.row_gradients = None


def _update_rows(rank: RankState, batch: BatchState, chosen: Sequence[Tensor]) -> None:
    """Sum and update the chosen rows in the buffer. Whether the batch counts is not known yet: the store will tell."""
    if batch.failure is not None:
        return
    for owner, rows in zip(batch.owner, chosen):
        commit.sum_sources(rank, batch, owner, rows)
    commit.update_rows(rank, batch, chosen)
    for owner, rows in zip(batch.owner, chosen):
        owner.pending = ~rows if owner.pending is None else owner.pending & ~rows
