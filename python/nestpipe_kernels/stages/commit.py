"""The end of a batch: gradients summed over ranks, the verdict that all ranks share, and the updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import exchange_same
from ..ops.mean_sources import entries_by_row, mean_sources
from ..ops.on_device import place
from ..ops.row_storage import storage_of
from ..ops.row_update import row_update
from .clip import clip_rows
from .finite import bad_bounds, judge_own, largest_good
from .messages import Flags, pack_flags, unpack_flags
from .state import BatchState, Failure, OwnerKeys, RankState, Verdict, upstream

__all__ = [
    "begin",
    "check_failures",
    "dense_mean",
    "dense_scatter",
    "dense_send",
    "dense_step",
    "dense_sum",
    "post_flags",
    "reduce_grads",
    "sum_sources",
    "update",
    "update_rows",
    "verdict",
]


def begin(rank: RankState, batch: BatchState, micro: int) -> None:
    """The window begins: settings of the update are read, dense gradients are cleared. A learning rate that cannot be
    used is a failure of the batch; nobody sets one before the batch has ended."""
    batch.step = rank.step_count + 1
    with batch.guard(rank.communicator.rank, "learning_rates"):
        batch.learning_rates = [b.module.learning_rates(b.index) for b in rank.bindings]
    if rank.loss_scale is not None:
        with batch.guard(rank.communicator.rank, "loss_scale"):
            batch.scale = rank.loss_scale.current()
    for _, parameter in rank.dense_parameters:
        parameter.grad = None


def reduce_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Mean over sources of all row gradients that `recv_grads` has not summed, or has summed before a model that never
    returned weights did so."""
    divided = any(divisor != 1.0 for divisor in batch.divisors)
    for owner in batch.owner:
        if owner.row_gradients is None or divided:
            owner.row_gradients = None
            sum_sources(rank, batch, owner)
        owner.boxes = None


def sum_sources(rank: RankState, batch: BatchState, owner: OwnerKeys, chosen: Tensor | None = None) -> None:
    """Mean over sources of row gradients: ascending, each divided by its own divisor, divided by their number last;
    then clipped, where a table has a limit.

    `chosen`: bool [U], rows whose gradients are all in their boxes, or None for all rows.
    """
    assert owner.boxes is not None
    if owner.row_gradients is None:
        owner.row_gradients = rank.pool.empty((len(owner.keys), owner.boxes.shape[1]))
        owner.countable = torch.ones(len(owner.keys), dtype=torch.bool, device=owner.boxes.device)
    assert owner.countable is not None
    if owner.by_row is None:
        owner.by_row = entries_by_row(owner.slot, len(owner.keys))
    limit = largest_good(rank.communicator.size)
    if owner.bounds is not None:
        _judge_bounds(rank, batch, owner, owner.countable)
        limit = math.inf
    rows = None if chosen is None else torch.nonzero(chosen).squeeze(1)
    mean_sources(
        owner.row_gradients, owner.countable, owner.boxes, owner.by_row, owner.per_peer, batch.divisors, rows, limit
    )
    limits = next(b.clip_limits for b, one in zip(rank.bindings, batch.owner) if one is owner)
    if limits is not None:
        of_rows = limits[owner.tables.to(torch.int64)]
        clip_rows(owner.row_gradients, rows, place(of_rows, owner.row_gradients))


def _judge_bounds(rank: RankState, batch: BatchState, owner: OwnerKeys, countable: Tensor) -> None:
    """Where owners pool, only bounds of the sources' gradients are known on both sides."""
    assert owner.bounds is not None
    start = 0
    for peer, length in enumerate(owner.per_peer):
        bad = bad_bounds(owner.bounds[start : start + length], batch.divisors[peer], rank.communicator.size)
        countable[owner.slot[start : start + length][bad]] = False
        start += length


def _flat_layout(rank: RankState) -> tuple[int, int, torch.dtype]:
    """Elements of the dense message (gradients, then one presence mark each), its slice length, its dtype."""
    count = sum(p.numel() for _, p in rank.dense_parameters) + len(rank.dense_parameters)
    wide = any(p.dtype == torch.float64 for _, p in rank.dense_parameters)
    return count, -(-count // rank.communicator.size), torch.float64 if wide else torch.float32


def dense_scatter(rank: RankState, batch: BatchState, micro: int) -> None:
    """This rank's dense gradients in slices, slice r to rank r."""
    _, length, dtype = _flat_layout(rank)
    world = rank.communicator.size
    flat = torch.zeros(length * world, dtype=dtype, device=rank.backend.device)
    _take_dense(rank, batch, flat)
    handle = rank.communicator.group("dense").all_to_all(
        flat, [length] * world, [length] * world, f"{batch.tag}/dense_slices"
    )
    batch.post("dense.slices", 0, handle)


def dense_send(rank: RankState, batch: BatchState, micro: int) -> None:
    """This rank's dense gradients to every rank."""
    count, _, dtype = _flat_layout(rank)
    flat = torch.zeros(count, dtype=dtype, device=rank.backend.device)
    _take_dense(rank, batch, flat)
    handle = exchange_same(rank.communicator.group("dense"), flat, f"{batch.tag}/dense_whole")
    batch.post("dense.whole", 0, handle)


def _take_dense(rank: RankState, batch: BatchState, flat: Tensor) -> None:
    """Dense gradients and marks into the message; it stays zero if the batch has failed."""
    count = _flat_layout(rank)[0]
    if batch.failure is None:
        with batch.guard(rank.communicator.rank, "dense_scatter"):
            _check_known(rank)
            _fill_dense(rank, flat)
            if batch.scale != 1.0:
                flat[: count - len(rank.dense_parameters)] *= batch.unscale
            if batch.loss_divisor != 1.0:
                flat[: count - len(rank.dense_parameters)] /= batch.loss_divisor


def _check_known(rank: RankState) -> None:
    """The optimizer must not move what is not averaged: ranks would drift apart without a word."""
    known = {id(parameter) for _, parameter in rank.dense_parameters}
    for g, group in enumerate(getattr(rank.dense_optimizer, "param_groups", ())):
        for k, parameter in enumerate(group["params"]):
            if id(parameter) not in known and parameter.grad is not None:
                raise ValueError(
                    f"dense_optimizer.param_groups[{g}]['params'][{k}] (shape {list(parameter.shape)}) came into the "
                    "optimizer after the pipeline was made, which would not average its gradient over ranks: close "
                    "this pipeline and make a new one (rows stay in their stores)"
                )


def _fill_dense(rank: RankState, flat: Tensor) -> None:
    at, mark = 0, sum(p.numel() for _, p in rank.dense_parameters)
    for k, (name, parameter) in enumerate(rank.dense_parameters):
        grad = parameter.grad
        if grad is not None:
            if grad.is_sparse:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient; a pipeline averages dense gradients only: convert its "
                    "module with nestpipe_kernels.EmbeddingBagCollection(optimizer=...) or set sparse=False"
                )
            flat[at : at + parameter.numel()] = grad.reshape(-1)
            flat[mark + k] = 1
        at += parameter.numel()


def dense_sum(rank: RankState, batch: BatchState, micro: int) -> None:
    """This rank's slice summed over ranks ascending and divided by W, then to everybody."""
    batch.dense_slice = total = _mean(batch, batch.land("dense.slices").view(rank.communicator.size, -1))
    batch.post("dense.gather", 0, exchange_same(rank.communicator.group("dense"), total, f"{batch.tag}/dense_gather"))


def dense_mean(rank: RankState, batch: BatchState, micro: int) -> None:
    """All ranks' dense gradients summed over ranks ascending and divided by W."""
    batch.dense_whole = _mean(batch, batch.land("dense.whole"))


def _mean(batch: BatchState, parts: Tensor) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    total /= len(parts)
    finite = torch.isfinite(total).all()
    batch.dense_finite = bool(finite) if total.is_cpu else finite
    return total


def post_flags(rank: RankState, batch: BatchState, micro: int) -> None:
    """This rank's word to everybody: failed or not, and what is not finite."""
    bad, names = judge_own(rank, batch)
    flags = Flags(
        batch.index,
        rank.num_micro_batches,
        batch.training,
        batch.has_batch,
        batch.failure,
        bad,
        not bool(batch.dense_finite),
        names,
    )
    group = rank.communicator.group("control")
    batch.post("control", 0, exchange_same(group, pack_flags(flags), f"{batch.tag}/commit"))


def _land_flags(rank: RankState, batch: BatchState) -> list[Flags]:
    words = batch.land("control")
    expect = Flags(batch.index, rank.num_micro_batches, batch.training)
    return [unpack_flags(words[p], p, expect) for p in range(rank.communicator.size)]


def check_failures(rank: RankState, batch: BatchState, micro: int) -> None:
    """The end of an evaluated batch: a rank that failed anywhere may have sent zeros instead of rows."""
    first = _first_failure(rank, batch, _land_flags(rank, batch))
    if first is not None and first is not batch.failure:
        batch.failure, batch.remote = None, first


def _first_failure(rank: RankState, batch: BatchState, peers: list[Flags]) -> Failure | None:
    own = rank.communicator.rank
    return upstream(batch.failure, [f.as_failure(p) for p, f in enumerate(peers) if f.failed and p != own])


def verdict(rank: RankState, batch: BatchState, micro: int) -> None:
    """Decide alike on all ranks whether the batch counts."""
    peers = _land_flags(rank, batch)
    failure = _first_failure(rank, batch, peers)
    if failure is not None:
        if failure is not batch.failure:
            batch.failure, batch.remote = None, failure
        batch.verdict = Verdict(False, failure=failure)
        return
    bad_rows = sum(flags.sparse_bad for flags in peers)
    dense_bad = not bool(batch.dense_finite) or any(flags.dense_bad for flags in peers)
    names = "; ".join(flags.text for flags in peers if flags.text)
    what = [f"{bad_rows} row gradients ({names})"] * bool(bad_rows) + ["dense gradients"] * dense_bad
    skipped = " and ".join(what)
    if skipped and (rank.nan_policy == "raise" or rank.loss_scale is not None):
        batch.verdict = Verdict(False, non_finite=skipped)
        return
    rank.step_count = batch.step
    batch.verdict = Verdict(True, batch.step, not dense_bad, bad_rows, skipped)


def dense_step(rank: RankState, batch: BatchState, micro: int) -> None:
    """Averaged gradients into `.grad`, then the user's optimizer."""
    message = batch.land("dense.gather").flatten() if batch.dense_whole is None else batch.dense_whole
    assert batch.verdict is not None
    if not batch.verdict.ok:
        return
    at, mark = 0, sum(p.numel() for _, p in rank.dense_parameters)
    present = message[mark : mark + len(rank.dense_parameters)].cpu() != 0
    for k, (_, parameter) in enumerate(rank.dense_parameters):
        part = message[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
        parameter.grad = part.to(parameter.dtype, copy=True) if bool(present[k]) else None
    if batch.verdict.dense_ok and rank.dense_optimizer is not None:
        rank.dense_optimizer.step()


def update(rank: RankState, batch: BatchState, micro: int) -> None:
    """Row updates in the buffer; nothing where the verdict is bad."""
    assert batch.verdict is not None
    if batch.verdict.ok:
        update_rows(rank, batch)
    for owner in batch.owner:
        owner.row_gradients = None


def update_rows(rank: RankState, batch: BatchState, chosen: Sequence[Tensor] | None = None) -> None:
    """Update rows in the buffer, of every store all or those of a mask bool [U]; but not those of frozen tables, those
    with gradients that do not count, and keys without a row."""
    for k, (binding, owner, rates) in enumerate(zip(rank.bindings, batch.owner, batch.learning_rates)):
        assert owner.buffer is not None and owner.row_gradients is not None and owner.countable is not None
        assert owner.retrieval is not None
        if owner.movable is None:
            owner.movable = binding.trainable[owner.tables.to(torch.int64)] & (owner.retrieval.handles >= 0)
        mask = owner.countable & place(owner.movable, owner.countable)
        if chosen is not None:
            mask &= place(chosen[k], mask)
            if mask.is_cpu and not bool(mask.any()):
                continue
        rate: float | Tensor = float(rates[0]) if len(rates) == 1 else rates[owner.tables.to(torch.int64)]
        row_update(
            owner.buffer, owner.row_gradients, binding.store.optimizer, batch.step, rate,
            None if mask.is_cpu and bool(mask.all()) else mask, storage_of(binding.store, owner.keys, owner.tables),
        )  # fmt: skip
