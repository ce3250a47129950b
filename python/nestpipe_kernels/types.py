"""The words shared by all layers: codes, lookup calls, and the protocols that keep layers apart.

Nothing here does work. `pipeline` and `stages` know stores, modules and groups only through the protocols below.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "UNBOUNDED",
    "DataType",
    "EmbeddingModule",
    "Group",
    "Handle",
    "InPlaceStore",
    "JaggedLike",
    "KeyStatus",
    "KeyedJaggedLike",
    "LookupCall",
    "LookupContext",
    "OccurrenceRows",
    "PoolingType",
    "Retrieval",
    "RowStore",
    "SparseOptimizer",
    "StoreKeys",
    "TableSpec",
    "TouchedRows",
]

UNBOUNDED = -1
"""`num_embeddings` of a table with an open vocabulary: any int64 is a key."""


class PoolingType(enum.Enum):
    """How the rows of a bag become one vector; NONE keeps one vector per key."""

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    NONE = "NONE"

    @property
    def code(self) -> int:
        """The number native code knows this mode by."""
        return {"SUM": 0, "MEAN": 1, "MAX": 2, "NONE": 3}[self.value]


class DataType(enum.Enum):
    """Storage type of a table's embeddings; arithmetic, optimizer state, messages and outputs are float32.

    Values are rounded to the storage type once, in the update (ties to even, or stochastically), and initial and loaded
    values once as they enter. FP16 ends at 65504: larger results (from 65520 on) become infinite, as IEEE 754 says, and
    the next gradient through such a row is caught as not finite by the pipeline's `nan_policy`. BF16 has the range of
    float32.
    """

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"

    @property
    def code(self) -> int:
        """The number native code knows this type by."""
        return {"FP32": 0, "FP16": 1, "BF16": 2}[self.value]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self is DataType.FP32 else 2

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's dtype of the elements."""
        return {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[self.value]


class KeyStatus(enum.IntEnum):
    """What happened to one key in a bulk call of a store."""

    FOUND = 0
    INSERTED = 1
    ABSENT = 2
    REFUSED = 3
    """No room: the table is at its capacity and nothing may be evicted."""
    NOT_ADMITTED = 4
    """The table's admission rule does not give the key a row (yet)."""


# --------------------------------------------------------------------------------------------- keys of a call


@dataclass
class StoreKeys:
    """The occurrences of one lookup call (or of several, concatenated) in one store.

    Order of occurrences: (call, feature, sample, position). A segment is one feature of one call: a run of bags that
    share table and pooling mode. Pooling NONE makes every occurrence a bag of its own.
    """

    keys: Tensor
    """int64 [n], any value."""
    tables: Tensor
    """int32 [n], index of the table within the store."""
    bag_offsets: Tensor
    """int64 [num_bags + 1], ascending, from 0 to n."""
    segment_bags: tuple[int, ...]
    """[S + 1] segment s owns bags segment_bags[s] .. segment_bags[s + 1]."""
    segment_modes: tuple[int, ...]
    """[S] PoolingType.code."""
    weights: Tensor | None = None
    """float32 [n] per-sample weights, detached; None where no segment is weighted."""
    valid: Tensor | None = None
    """bool [n], False where the occurrence is padding: no row, not counted, no gradient. None: all valid."""
    divisors: Tensor | None = None
    """float32 [num_bags]: what divides each bag's sum, where owners have pooled it in part; `keys` are slots then."""


@dataclass
class LookupCall:
    """One call of an embedding module, described before it happens (by capture) or as it happens.

    `outputs` are float32 matrices that the lookup fills; `views[store][segment]` says where a segment's bags go:
    (output index, first column). A segment writes rows 0 .. its number of bags of that output.
    """

    stores: list[StoreKeys]
    """One entry per store of the module, in `module.row_stores()` order; a store the call does not use has n = 0."""
    output_shapes: list[tuple[int, int]]
    views: list[list[tuple[int, int]]]
    finish: Callable[[Sequence[Tensor]], Any]
    """Outputs -> what the module returns (KeyedTensor, dict of JaggedTensor, Tensor)."""
    weights: Tensor | None = None
    """The caller's float per-sample weights of the whole call, if any; gets a gradient when it requires one."""
    weight_positions: list[Tensor | None] = field(default_factory=list)
    """Per store: int64 [n], where each occurrence's weight stands in `weights`; None without weights."""
    signature: list[Tensor] = field(default_factory=list)
    """The tensors that determine the keys (values, lengths, weights): compared with what the model really passes."""
    samples: Sequence[Tensor | None] = field(default_factory=list)
    """Per store: int64 [n], the sample that each occurrence belongs to, or None if bags do not map to samples."""


# ------------------------------------------------------------------------------------------------- protocols


@runtime_checkable
class JaggedLike(Protocol):
    """What we use of a JaggedTensor, ours or TorchRec's."""

    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


@runtime_checkable
class KeyedJaggedLike(Protocol):
    """What we use of a KeyedJaggedTensor, ours or TorchRec's: key-major lengths, F * stride entries."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride(self) -> int: ...


@runtime_checkable
class SparseOptimizer(Protocol):
    """Settings of a row update; the arithmetic is in ops/row_update, its truth in ops/row_update/reference.py."""

    lr: float

    @property
    def name(self) -> str: ...
    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """A row's state in its order: (name, float32 numbers) of each part."""
        ...

    def state_floats(self, dim: int) -> int:
        """float32 numbers of state beside an embedding of `dim`: the sum over slots."""
        ...

    def hyper(self) -> dict[str, float]:
        """Everything but lr, by name, for native code and references."""
        ...


@dataclass(frozen=True)
class TableSpec:
    """One table of a store."""

    name: str
    num_embeddings: int
    init: Any
    """An nk.init object: Zeros, Constant, Uniform, Normal, TruncatedNormal, Custom."""
    seed: int
    capacity: int | None = None
    """Rows of the table in this store at most."""
    lr_scale: float = 1.0
    max_grad_norm: float | None = None
    """Gradients of rows that are longer are shortened to this length; None: none are."""
    trainable: bool = True
    admission: Any = None
    """An admission rule of nk.policy: which new keys get a row; None: all."""
    eviction: Any = None
    """An eviction rule of nk.policy: which rows go when the table is full; None: none, new keys are refused."""
    default: Any = None
    """An nk.init object: what a key without a row reads; None: what its row would start from."""


@dataclass
class Retrieval:
    """Result of find-or-insert for distinct keys, with what undoes it."""

    handles: Tensor
    """int64 [U], row handle; -1 where the key has no row."""
    status: Tensor
    """uint8 [U], KeyStatus."""
    journal: Any
    """Opaque; `store.undo(retrieval)` restores metadata and removes inserted keys (newest retrieval first)."""


@dataclass
class OccurrenceRows:
    """The rows of a list of occurrences, each once, in an order that means nothing."""

    retrieval: Retrieval
    slots: Tensor
    """int32 [n], which of the rows each occurrence has; -1 for padding."""
    keys: Tensor
    """int64 [U]"""
    tables: Tensor
    """int32 [U]"""


@dataclass
class TouchedRows:
    """Rows whose copies in the sparse groups may differ: looked up since copies were last averaged."""

    keys: Tensor
    """int64 [n]"""
    tables: Tensor
    """int32 [n]"""
    handles: Tensor
    """int64 [n]"""
    removals: int
    """`RowStore.removals` when the handles were noted."""


class RowStore(Protocol):
    """The rows that one rank owns of a group of tables with the same dim, dtype and optimizer.

    A buffer row is float32 [row_floats]: embedding [embedding_words], optimizer state [state_floats], header (int32
    `updates` bit-cast), padding up to the stride. The embedding is `dim` elements of `data_type`, packed (a last half
    word that is over is zero): read and write it with ops.row_storage. All index tensors are distinct keys unless said
    otherwise.
    """

    dim: int
    data_type: DataType
    embedding_words: int
    """float32 words of a row that hold the embedding: `dim` for FP32, else half of it, rounded up."""
    stochastic_rounding: bool
    """Whether updates round to `data_type` stochastically."""
    row_floats: int
    optimizer: SparseOptimizer
    tables: Sequence[TableSpec]
    table_hashes: Tensor
    """int64 [T], the name's hash that (table, key) hashing starts from."""
    table_seeds: Tensor
    """int64 [T], the tables' seeds, modulo 2^64."""
    device: torch.device
    """Where rows lie: the CPU, or an accelerator, whose tensors `gather` and `write_back` take, too. Keys, handles and
    all else are on the CPU."""
    tier: Any
    """A FileTier if rows lie in a file: then it pays to `warm` them; else None."""
    touched: TouchedRows | None
    """Noted by who averages copies of the tables (stages/replicas); None: all copies are alike."""

    @property
    def removals(self) -> int:
        """How often keys were removed from outside (erased, cleared), since handles may mean other rows then."""
        ...

    @property
    def last_batch(self) -> int:
        """The largest batch index of retrievals (but undone ones) and of loaded metadata; -1: none."""
        ...

    def retrieve(self, keys: Tensor, tables: Tensor, counts: Tensor, batch: int) -> Retrieval:
        """Find or insert distinct (key, table) pairs; metadata: last_used = batch, frequency += counts int64 [U]."""
        ...

    def undo(self, retrieval: Retrieval) -> None: ...

    def evicted(self, retrieval: Retrieval) -> tuple[Tensor, Tensor]:
        """Keys int64 [m] and tables int32 [m] whose rows the retrieval removed, in a fixed order."""
        ...

    def warm(self, keys: Tensor, tables: Tensor) -> None:
        """Ask for rows of keys that are not in memory, without waiting. Changes nothing; may run beside any call."""
        ...

    def size(self, table: str | int | None = None) -> int:
        """Rows of a table (name, or index in `tables`)."""
        ...

    def load_rows(self, keys: Tensor, tables: Tensor, rows: Tensor, metadata: Any) -> None:
        """Insert distinct keys with rows float32 [n, row_floats] and metadata (`last_used`, `frequency`: int64 [n]).

        No rule is asked and nothing is evicted. Raises StoreFullError, with nothing changed, if a quota is exceeded.
        """
        ...

    def find_handles(self, keys: Tensor, tables: Tensor) -> Tensor:
        """int64 [n] handles, -1 where absent. Changes nothing. Duplicates are fine."""
        ...

    def gather(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor, index: Tensor | None) -> None:
        """Whole rows: out[index[j]] (or out[j]) = row of handles[j]; a handle of -1 gives the key's initial row."""
        ...

    def write_back(self, handles: Tensor, rows: Tensor) -> None:
        """Embedding, state and `updates` of rows [U, row_floats] into the store; handles of -1 are skipped."""
        ...


class InPlaceStore(RowStore, Protocol):
    """A store whose rows can be pooled and updated where they lie; results as those on copies, bit for bit."""

    @property
    def pools_in_place(self) -> bool:
        """Whether `update_pooled` works; `pool` always does."""
        ...

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever keys may have got or lost rows."""
        ...

    def retrieve_occurrences(
        self, keys: Tensor, tables: Tensor, valid: Tensor | None, batch: int
    ) -> OccurrenceRows | None:
        """`retrieve` of keys with repetitions, each occurrence counted; None, with nothing changed, where a key has no
        row or rows may leave."""
        ...

    def read_embeddings(self, handles: Tensor, keys: Tensor, tables: Tensor) -> Tensor:
        """float32 [U, dim], a copy."""
        ...

    def pool(
        self, handles: Tensor, keys: Tensor, tables: Tensor, slots: Tensor, bags: StoreKeys, outs: Sequence[Tensor]
    ) -> None:
        """Bags of rows, by their slots in `handles`, into a matrix for each segment."""
        ...

    def pool_keys(self, bags: StoreKeys, outs: Sequence[Tensor]) -> bool:
        """`pool` of keys, one for each occurrence; False where one has no row: `outs` may be written in part then."""
        ...

    def update_pooled(
        self,
        handles: Tensor,
        slots: Tensor,
        bags: StoreKeys,
        grads: Sequence[Tensor | None],
        step: int,
        lr: float | Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """Update rows by what the gradients of their bags give them; handles of -1 are skipped. No MAX."""
        ...


class Handle(Protocol):
    """An exchange under way; owns its tensors until waited for."""

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Block until the data is here; idempotent. Returns the received tensor.

        Raises:
            CommunicationError: not here after `timeout_s` seconds (None: the communicator's limit), or a peer is gone.
        """
        ...


class Group(Protocol):
    """Ranks that exchange tensors for one purpose. Every rank issues the same collectives in the same order."""

    rank: int
    size: int

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        tag: str,
        out: Tensor | None = None,
    ) -> Handle:
        """Exchange rows (dim 0) of `send` [sum(send_counts), ...]; counts are rows per rank. Never blocks.

        `send` must stay unchanged until waited for; it may be reused afterwards. `out` receives in place:
        [sum(receive_counts), ...], contiguous. `tag` names the collective (stage, batch, part) in errors and, in
        memory, matches it.
        """
        ...


class LookupContext(Protocol):
    """Who answers a module's lookups: the pipeline during a step, else the module's own exchange."""

    def lookup(self, module: EmbeddingModule, features: Any) -> Any: ...


class EmbeddingModule(Protocol):
    """An nn.Module whose rows live in stores."""

    lookup_context: LookupContext | None
    """Set by a pipeline (or a probe) while it runs the model; forward asks it first."""
    output_device: torch.device
    """Where the module's outputs are. Set by a pipeline on an accelerator."""
    before_outside_access: Callable[[], None] | None
    """Set by a pipeline: called before anything outside of it reads or writes the module's rows."""

    @property
    def communicator(self) -> Any:
        """The comm.Communicator that the module's rows are sharded over."""
        ...

    @property
    def sparse_groups(self) -> Any:
        """The comm.SparseGroups that say how many copies of the rows there are."""
        ...

    def row_stores(self) -> Sequence[RowStore]:
        """Its stores. Modules may share one, with a table each, if it is the only one that they have."""
        ...

    def plan_call(self, features: Any) -> LookupCall:
        """Validate an input and describe the lookup. Pure; raises IndexError/TypeError/ValueError for bad input."""
        ...

    def store_segments(self, store_index: int) -> Sequence[tuple[str, PoolingType, bool]]:
        """Of every segment of a call in a store: feature, pooling, and whether its bags have per-sample weights."""
        ...

    def learning_rates(self, store_index: int) -> Tensor:
        """float32 [T]: current learning rate of each table of a store, its lr_scale included."""
        ...

    def zero_output(self, features: Any) -> Any:
        """What forward returns, filled with zeros that require grad: for capture's probe. Pure."""
        ...


def empty_store_keys() -> StoreKeys:
    """A call that looks up nothing in a store."""
    return StoreKeys(
        keys=torch.empty(0, dtype=torch.int64),
        tables=torch.empty(0, dtype=torch.int32),
        bag_offsets=torch.zeros(1, dtype=torch.int64),
        segment_bags=(0,),
        segment_modes=(),
    )
