"""What the stages of one rank work on: RankState for the whole run, BatchState for one batch, and how a failure
travels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..comm import Communicator, Topology
from ..comm.board import Board
from ..comm.router import SourceKeys, Transfer
from ..device import CPU, DeviceBackend
from ..errors import CommunicationError, RemoteRankError
from ..types import EmbeddingModule, Handle, LookupCall, Retrieval, RowStore
from .clip import limits_of
from .counting import BatchCounts
from .pool import TensorPool

__all__ = [
    "AveragedRows",
    "BatchState",
    "Failure",
    "MicroBatch",
    "OwnerKeys",
    "Parts",
    "RankState",
    "RowHook",
    "StageHold",
    "StoreBinding",
    "UnionKeys",
    "Verdict",
    "bind_stores",
    "describe_error",
    "upstream",
]


_T = TypeVar("_T")

RowHook = Callable[[int, str, Tensor], None]
"""(step, table, keys int64 [n]): told what happened to rows."""


StageHold = Callable[[str, "BatchState", int, float], None]
"""(stage function's name, batch, micro-batch, time.perf_counter() at which the function began): called on the stage's
lane when the function has returned."""


@dataclass
class StoreBinding:
    """One store of one module, or of several that share it, with its two row buffers."""

    store: RowStore
    module_name: str
    module: EmbeddingModule
    """The first, if several share the store."""
    index: int
    """Which of the module's stores this is."""
    sharers: list[str] = field(default_factory=list)
    """Names of other modules, whose only store this is."""
    pooled: tuple[bool, ...] = ()
    """Per segment of a call: owners pool its bags; empty where they pool none."""
    buffers: list[Tensor] = field(default_factory=lambda: [torch.empty(0, 0, dtype=torch.float32) for _ in range(2)])
    device: torch.device | None = None
    """Where the buffers are; None: on the CPU."""

    def lookups(self, calls: Mapping[str, Sequence[_T]]) -> list[tuple[str, int, _T]]:
        """(module, call, what there is for it) of all modules that have the store, in the order of its lists."""
        names = [self.module_name, *self.sharers]
        return [(name, k, one) for name in names for k, one in enumerate(calls.get(name, ()))]

    @cached_property
    def trainable(self) -> Tensor:
        """bool [tables]: which tables of the store are trained."""
        return torch.tensor([table.trainable for table in self.store.tables])

    @cached_property
    def clip_limits(self) -> Tensor | None:
        """float64 [tables]: the longest row gradient of each table; None where no table has a limit."""
        return limits_of(list(self.store.tables))

    def buffer(self, parity: int, rows: int, poison: bool) -> Tensor:
        """float32 [rows, row_floats] of buffer `parity`, grown when needed; contents are undefined (NaN if
        poisoned)."""
        have = self.buffers[parity]
        if have.shape[0] < rows or have.shape[1] != self.store.row_floats:
            have = self.buffers[parity] = torch.empty(
                rows + rows // 4 + 16, self.store.row_floats, dtype=torch.float32, device=self.device
            )
        view = have[:rows]
        if poison:
            view.fill_(float("nan"))
        return view


def bind_stores(modules: dict[str, EmbeddingModule], device: torch.device | None = None) -> list[StoreBinding]:
    """Every store, once, in module order; row buffers on `device`."""
    bound: dict[int, StoreBinding] = {}
    for name, module in modules.items():
        stores = module.row_stores()
        for k, store in enumerate(stores):
            known = bound.setdefault(id(store), StoreBinding(store, name, module, k, device=device))
            if known.module is not module:
                if len(stores) > 1 or known.index:
                    raise ValueError(f"modules {known.module_name!r} and {name!r} share a store, but have others, too")
                known.sharers.append(name)
    return list(bound.values())


class LossScaling(Protocol):
    """What multiplies losses before backward, for small floating-point types."""

    def current(self) -> float: ...
    def scaled(self, loss: Tensor) -> Tensor: ...


class Inputs(Protocol):
    """What tells the embedding inputs of a batch ahead of the model (capture)."""

    def replay(self, batch: Any) -> dict[str, list[Any]]: ...
    def check(self, name: str, call_index: int, planned: Any, actual: Any) -> None: ...


@dataclass
class Source:
    """An iterator that batches come from, with what was drawn from it and not trained."""

    iterator: Iterator[Any]
    exhausted: bool = False
    drawn: list[BatchState] = field(default_factory=list)
    """Parked while batches of another iterator run."""
    abandoned: bool = False
    """Nobody else has the iterator any more: what was drawn is dropped instead of parked."""
    position: Any = None
    """What the pipeline notes about how far the iterator is."""


@dataclass
class RankState:
    """One rank's part of the run. Fields below `step_count` are set by whoever drives the stages."""

    communicator: Communicator
    modules: dict[str, EmbeddingModule]
    bindings: list[StoreBinding]
    slice_owner: Tensor
    pool: TensorPool = field(default_factory=TensorPool)
    """Memory of receive buffers, accumulators, sums and messages."""
    backend: DeviceBackend = CPU
    """Where rows are while they are trained, and the dense model."""
    num_micro_batches: int = 1
    track_use: bool = False
    """Rows are sent for every micro-batch, so key lists carry who uses them."""
    row_wire: str = "fp32"
    gradient_wire: str = "fp32"
    owner_pooling_auto: bool = False
    """Owners pool only features of which that is fewer bytes, batch by batch."""
    clustering: bool = False
    edge_share: float = 1.0
    balance: str | Callable[[Any], Tensor] = "samples"
    nan_policy: str = "raise"
    poison: bool = False
    """Fill buffers with NaN before use: a read of something not written shows."""
    step_count: int = 0
    """Committed steps so far; the next update is step_count + 1."""
    model: Any = None
    call_model: Callable[[Any, Any], tuple[Tensor, Any, Any]] | None = None
    """(model, batch) -> (loss, output, weight or None)."""
    loss_weighting: str = "mean"
    dense_optimizer: Any = None
    loss_scale: LossScaling | None = None
    """Multiplies losses (a GradScaler); a batch with a gradient that is not finite then changes nothing."""
    dense_parameters: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)
    inputs: Inputs | None = None
    capture: Callable[[Any], Inputs] | None = None
    split_batch: Callable[[Any, list[Any]], list[Any]] | None = None
    fetch: Callable[[Any], Any] | None = None
    """What the source gives -> a batch; None: it gives batches."""
    source: Source | None = None
    """Where `prefetch` draws from."""
    weighted: bool | None = None
    """Whether the model returned weights when it was last trained; None before."""
    on_write_back: list[RowHook] = field(default_factory=list)
    on_eviction: list[RowHook] = field(default_factory=list)
    counting: bool = False
    """Somebody wants counters of every batch."""
    topology: Topology = field(default=None)  # type: ignore[assignment]
    """Which ranks share a copy of the tables; None: all of them share one."""
    warned: set[str] = field(default_factory=set)
    """Modules that a warning has been given for (stages/unused)."""
    step_begun: threading.Event = field(default_factory=threading.Event)
    """Early send: set when the next step has begun, cleared with a batch's last gradients."""
    patience_s: float = 0.0
    """For how long, at most, the last gradients that nobody waits for wait for that."""
    hold: StageHold | None = None
    """Emulates a device: may keep the stage's lane after its work, until the device would have ended it. Only
    benchmarks set it."""

    def __post_init__(self) -> None:
        if self.topology is None:
            self.topology = Topology(self.communicator)

    @property
    def board(self) -> Board | None:
        """Where peers of this machine see what this rank is doing, if the communicator has such a place."""
        return getattr(self.communicator, "board", None)

    def report_failure(self, stage: str, batch: int, error: BaseException) -> None:
        """Tell peers, who may wait for this rank, what stops it: an error of its own, or what it found out about
        another rank."""
        report = getattr(self.communicator, "report_failure", None)
        if report is None or isinstance(error, (RemoteRankError, StopIteration)):
            return
        if isinstance(error, CommunicationError):
            report(str(error), own=False)
        else:
            of_batch = f" of batch {batch}" if batch >= 0 else ""
            report(f"{stage}{of_batch}: {describe_error(error)}", own=True)


@dataclass
class Failure:
    """What went wrong in a batch, here or on another rank."""

    rank: int
    stage: str
    message: str
    error: BaseException | None = None
    micro: int = 0
    """The micro-batch, where the stage has one."""
    consequence: Failure | None = None
    """This rank's own failure that this one may have caused."""

    @property
    def of_retrieval(self) -> bool:
        """Whether it happened to a retrieval, which may be undone and done again."""
        return self.stage in _RETRIEVED

    @property
    def order(self) -> int:
        """Where the stage stands in a batch: only a failure of a lower number can be the cause of this one. A rank that
        has failed sends zeros, which may well break what another rank does with them."""
        if self.stage in _BEFORE_WINDOW:
            return _BEFORE_WINDOW.index(self.stage)
        if self.stage in _IN_WINDOW:
            return len(_BEFORE_WINDOW) + len(_IN_WINDOW) * self.micro + _IN_WINDOW.index(self.stage)
        return _AFTER_WINDOW


_RETRIEVED = ("retrieve", "gather", "tell_kinds", "early_sync", "sync")
_BEFORE_WINDOW = ("fetch", "prefetch", "copy", "route", "warm", "find", *_RETRIEVED)
_IN_WINDOW = ("send_rows", "forward", "forward_backward")
_AFTER_WINDOW = 1 << 30


def upstream(own: Failure | None, remote: Sequence[Failure]) -> Failure | None:
    """The failure that can have caused the others; this rank's own where several can."""
    known = [*([] if own is None else [own]), *remote]
    first = min(known, key=lambda failure: failure.order, default=None)
    if first is not None and own is not None and first is not own:
        first.consequence = own
    return first


@dataclass
class MicroBatch:
    """Some samples of a batch and the lookups that the model will ask for with them."""

    batch: Any
    indices: Tensor
    """int64 [n]: which samples of the batch."""
    moved: list[Tensor] = field(default_factory=list)
    """Tensors of the batch that were brought to the device."""
    calls: dict[str, list[LookupCall]] = field(default_factory=dict)
    inputs: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class Parts:
    """What is pooled at owners in one micro-batch and store, part after part: by owner at the source, by source at the
    owner."""

    entries: Tensor
    """int64 [n]: position of every occurrence in the key lists."""
    offsets: Tensor
    """int64 [parts + 1], from 0 to n."""
    move: Transfer
    """How many parts for each peer; positions are those of their rows at the source."""
    lengths: list[int]
    """[W] occurrences for each peer."""


@dataclass
class StorePlan:
    """Source side of one store in one batch."""

    source: SourceKeys
    rows: list[Transfer]
    grads: list[Transfer]
    received: Tensor
    """float32 [M, dim]: embeddings of the distinct keys, filled by forward_backward as they land."""
    gradients: Tensor
    """float32 [M, dim]: their gradients, summed over the micro-batches so far."""
    occurrences: list[Any]
    """StoreKeys of each micro-batch (all calls of the module, concatenated), None for an empty one."""
    parts: list[Parts] = field(default_factory=list)
    """Of each micro-batch; empty where owners pool nothing. Their rows follow those of the M keys in `received` and
    `gradients`."""
    bounds: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> float64 [M], what its gradients add to the bound of each key's gradient, where owners pool."""
    peaks: Tensor | None = None
    """float32 [M]: largest magnitude of each gradient that has been sent."""
    last_grads: tuple[Transfer, Transfer] | None = None
    """Early send: gradients of the last micro-batch, the urgent ones and the others."""
    summed: Tensor | None = None
    """float32 [M, dim]: gradients sent so far, where they are sent for every micro-batch."""


@dataclass
class OwnerKeys:
    """Owner side of one store in one batch: the sources' lists merged."""

    keys: Tensor
    """int64 [U] distinct."""
    tables: Tensor
    """int32 [U]"""
    counts: Tensor
    """int64 [U] occurrences in the global batch."""
    slot: Tensor
    """int64 [M]: row (0 .. U-1) of each received list entry."""
    per_peer: list[int]
    rows: list[Transfer]
    grads: list[Transfer]
    retrieval: Retrieval | None = None
    buffer: Tensor | None = None
    """float32 [U, row_floats], a view of buffer parity."""
    shared_before: Tensor | None = None
    """int64 [m]: rows of the previous batch ..."""
    shared_here: Tensor | None = None
    """... and rows of this one that hold the same keys."""
    replica_grads: list[list[Transfer]] = field(default_factory=list)
    """[groups][N]: gradients of each sparse group's sources, where all copies of the tables see all gradients."""
    union: UnionKeys | None = None
    """What the other groups look up too, where copies of the tables train apart; all else here is the own group's."""
    boxes: Tensor | None = None
    """float32 [M, dim]: gradients as received, per source."""
    by_row: tuple[Tensor, Tensor] | None = None
    """`entries_by_row` of `slot`, in training."""
    row_gradients: Tensor | None = None
    """float32 [U, dim], averaged over ranks."""
    parts: list[Parts] = field(default_factory=list)
    """Of each micro-batch, what this rank pools; empty where it pools nothing."""
    bounds: Tensor | None = None
    """float64 [M]: bound of the largest magnitude of each source's gradient, where this rank pools."""
    urgent: Tensor | None = None
    """bool [U]: early send: rows that the next batch's first micro-batch waits for."""
    last_grads: tuple[Transfer, Transfer] | None = None
    """Early send: gradients of the last micro-batch, the urgent ones and the others."""
    pending: Tensor | None = None
    """bool [U]: early send: rows that have not been updated yet."""
    last_micro: Tensor | None = None
    countable: Tensor | None = None
    """bool [U]: no source's gradient is bad (stages/finite)."""
    movable: Tensor | None = None
    """bool [U]: rows that are there, of tables that are trained."""

    def last_use(self) -> Tensor:
        """int64 [U]: the last micro-batch in which any source uses each row. Two lanes may ask for it at once."""
        known = self.last_micro
        if known is None:
            known = torch.zeros(len(self.keys), dtype=torch.int64)
            for micro, move in enumerate(self.grads):
                known[self.slot[move.positions]] = micro
            self.last_micro = known  # only when it is whole
        return known


@dataclass
class EarlyRows:
    """Early send: which rows of a batch's first micro-batch leave when; lists by kind (stages/early) and store."""

    before: BatchState | None
    """The batch before, until its last rows have been copied from its buffer."""
    copies: list[list[tuple[Tensor, Tensor] | None]] = field(default_factory=lambda: [[], [], []])
    """[kind][store]: rows of the batch before and of this one that hold the same keys."""
    outgoing: list[list[Transfer]] = field(default_factory=list)
    """[store][kind], as an owner."""
    incoming: list[list[Transfer]] = field(default_factory=list)
    """[store][kind], as a source."""


@dataclass
class UnionKeys:
    """The distinct keys of all groups' lists for one store: which rows there are is decided on them."""

    keys: Tensor
    """int64 [V]"""
    tables: Tensor
    """int32 [V]"""
    counts: Tensor
    """int64 [V] occurrences in the global batch."""
    own: Tensor
    """int64 [U]: which of them the own group looks up, in the order of OwnerKeys.keys."""
    retrieval: Retrieval | None = None


@dataclass
class AveragedRows:
    """Rows of one store that were averaged over the copies of the tables."""

    keys: Tensor
    """int64 [n]"""
    tables: Tensor
    """int32 [n]"""
    handles: Tensor
    """int64 [n]"""
    rows: Tensor
    """float32 [n, row_floats]"""


@dataclass
class Verdict:
    """What all ranks decided about a batch."""

    ok: bool
    step: int = 0
    dense_ok: bool = True
    skipped_rows: int = 0
    non_finite: str = ""
    """What is not finite, in words, if anything."""
    failure: Failure | None = None


@dataclass
class BatchState:
    """One batch on its way through the stages."""

    index: int
    """Numbers the batches that are under way; its parity chooses the row buffer."""
    tag: str
    """Prefix of its collectives' names, the same on all ranks."""
    clock: int = 0
    """Batches that counted before this one: what `last_used` of its rows becomes."""
    item: tuple[Any] | None = None
    """What was drawn, where it is no batch yet."""
    raw: Any = None
    size: int = 0
    has_batch: bool = False
    skipped: bool = False
    """No rank has samples, or some rank failed before keys were exchanged: later nodes do nothing, alike on all
    ranks."""
    ended: bool = False
    """No rank has a batch: the iterators are exhausted."""
    failure: Failure | None = None
    """The first thing that failed on this rank; it still joins every exchange."""
    remote: Failure | None = None
    training: bool = True
    inputs: Inputs | None = None
    """What tells this batch's embedding inputs."""
    micro: list[MicroBatch] = field(default_factory=list)
    plans: list[StorePlan] = field(default_factory=list)
    owner: list[OwnerKeys] = field(default_factory=list)
    previous: BatchState | None = None
    position: dict[str, Any] | None = None
    """What the pipeline noted before it was drawn."""
    key_sizes: list[list[int]] = field(default_factory=list)
    """[W][num_stores] lengths of the lists that each source announced for this rank's shard."""
    part_sizes: list[list[int]] = field(default_factory=list)
    """[W][stores that are pooled at owners] occurrences that each source announced for this rank to pool."""
    weighted_sources: bool = True
    """Whether some rank's model may return weights for this batch, as far as the announcements say."""
    promised_plain: bool = False
    """This rank has announced that its model returns none."""
    early: EarlyRows | None = None
    resend: bool = False
    """Early send: rows may have changed since they were sent, on this rank."""
    remaining: list[Tensor] = field(default_factory=list)
    """Early send: of every store, gradients of the last micro-batch that are not urgent, until they are sent."""
    arrivals: dict[int, list[tuple[tuple[str, int], list[Transfer]]]] = field(default_factory=dict)
    """For each micro-batch: exchanges that bring its rows, in the order in which they land, and what is in them."""
    losses: list[tuple[float, Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    weighted: bool | None = None
    """Whether the model returns weights; all micro-batches of a batch alike."""
    timeout_s: float | None = None
    divisor: float = 1.0
    """Sum of the weights that the model returned; divides this rank's gradients. 1 where weights are known before."""
    divisors: list[float] = field(default_factory=list)
    """Every source's divisor, as it came with the last gradients; sources as in `OwnerKeys.per_peer`."""
    group_keys: Tensor | None = None
    """The key lists of the own sparse group, kept for when those of the others are there."""
    group_grads: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> gradients of the own sparse group as they came, until they have gone to the other groups."""
    averaging: list[AveragedRows] = field(default_factory=list)
    """Per store: what is averaged over the copies of the tables after this batch's update."""
    statistics: list[Tensor] = field(default_factory=list)
    """Running statistics of the model before this batch's forward; put back if the batch does not count."""
    dense_slice: Tensor | None = None
    """This rank's part of the mean of dense gradients ..."""
    dense_whole: Tensor | None = None
    """... or all of it, where they are exchanged at once."""
    dense_finite: bool | Tensor = True
    scale: float = 1.0
    """What this rank's losses are multiplied by in backward, and gradients divided by as they leave it."""
    step: int = 0
    """Number of the update, if the batch counts."""
    learning_rates: list[Tensor] = field(default_factory=list)
    """float32 [tables] of every store, as they are when the batch's window begins."""
    verdict: Verdict | None = None
    counts: BatchCounts = field(default_factory=BatchCounts)
    handles: dict[tuple[str, int], Handle] = field(default_factory=dict)

    @property
    def loss_divisor(self) -> float:
        """What divides this rank's loss and gradients: `divisor`, or 1 where all weights are 0 (they add nothing)."""
        return self.divisor or 1.0

    @property
    def unscale(self) -> float:
        """What scaled gradients are multiplied by, rounded to float32 as a GradScaler does."""
        return float(torch.tensor(1.0 / self.scale, dtype=torch.float32))

    def device_tensors(self) -> Iterator[Tensor | None]:
        """What stages on several lanes use of this batch, and of the one before, where rows are on an accelerator."""
        for plan in self.plans:
            yield from (plan.received, plan.gradients, plan.peaks, plan.summed)
        for owner in self.owner:
            yield from (owner.buffer, owner.boxes, owner.row_gradients, owner.countable)
        for before in (self.previous, self.early.before if self.early is not None else None):
            if before is not None:
                yield from (owner.buffer for owner in before.owner)
        for micro in self.micro:
            yield from micro.moved
        yield from (self.dense_slice, self.dense_whole)
        yield from self.remaining

    def post(self, purpose: str, micro: int, handle: Handle) -> None:
        """Remember an exchange under way."""
        self.handles[purpose, micro] = handle

    def land(self, purpose: str, micro: int = 0) -> Tensor:
        """Wait for an exchange of this batch; its tensors are released here."""
        return self.handles.pop((purpose, micro)).wait(self.timeout_s)

    @contextmanager
    def guard(self, rank: int, stage: str, micro: int = 0) -> Iterator[None]:
        """Turn an exception of this rank's own work into this batch's failure; later work of the batch is skipped, its
        exchanges are not.

        Errors of the exchange itself are not caught: then nothing can be joined any more.
        """
        try:
            yield
        except (CommunicationError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if self.failure is None:
                self.failure = Failure(rank, stage, describe_error(error), error, micro)


def describe_error(error: BaseException) -> str:
    """`ValueError: bad id`, or the kind alone where the error says nothing."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
