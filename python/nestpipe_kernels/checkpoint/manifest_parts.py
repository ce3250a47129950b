"""The manifest's description of one table: what its rows mean, and which files hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .fields import Field
from .layout import DTYPES, FileRecord, TensorRecord
from .names import FILE_NAME

__all__ = ["STORAGE_TYPES", "OptimizerRecord", "TableFile", "TableRecord", "files_from_field", "files_to_json"]

STORAGE_TYPES = {"FP32": "F32", "FP16": "F16", "BF16": "BF16"}
"""types.DataType -> the data type of the tensor `embedding` in files."""
_MAX_ROWS = 1 << 40
_MAX_WIDTH = 1 << 30


@dataclass(frozen=True)
class OptimizerRecord:
    """The rule that updated a table's rows; the learning rate is not part of it."""

    name: str
    hyper: dict[str, float]
    slots: tuple[tuple[str, int], ...]
    """(name, floats per row) of the state, in row order."""

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in sorted(self.hyper.items()))
        return f"{self.name}({numbers}) with slots {', '.join(f'{n}[{w}]' for n, w in self.slots) or 'none'}"


@dataclass(frozen=True)
class TableFile:
    """One file with rows of a table."""

    name: str
    rank: int
    rows: int
    first_slice: int
    """The keys' virtual slices lie in first_slice .. end_slice - 1."""
    end_slice: int


@dataclass
class TableRecord:
    """One table."""

    name: str
    """Unique within the checkpoint."""
    hash_name: str
    """The name that hashes of its keys start from."""
    dim: int
    data_type: str
    """A name of STORAGE_TYPES."""
    num_embeddings: int
    """-1: any int64 is a key."""
    seed: int
    init: dict[str, Any]
    """Description of the initial values."""
    optimizer: OptimizerRecord
    rows: int
    admission: dict[str, Any] | None = None
    eviction: dict[str, Any] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    """Sums over ranks."""
    files: list[TableFile] = field(default_factory=list)
    """By rank, at least one for each."""
    admission_files: list[str] = field(default_factory=list)
    """Files with admission counts, by rank; may be none."""

    def tensors(self, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What a file of `rows` rows holds: name -> (data type, shape)."""
        return {
            "keys": ("I64", (rows,)),
            "embedding": (STORAGE_TYPES[self.data_type], (rows, self.dim)),
            **{f"state.{name}": ("F32", (rows, width)) for name, width in self.optimizer.slots},
            "updates": ("I32", (rows,)),
            "last_used": ("I64", (rows,)),
            "frequency": ("I64", (rows,)),
        }

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the manifest."""
        return {
            "name": self.name,
            "hash_name": self.hash_name,
            "dim": self.dim,
            "data_type": self.data_type,
            "num_embeddings": self.num_embeddings,
            "seed": self.seed,
            "init": self.init,
            "optimizer": {
                "name": self.optimizer.name,
                "hyper": self.optimizer.hyper,
                "slots": [list(slot) for slot in self.optimizer.slots],
            },
            "rows": self.rows,
            "admission": self.admission,
            "eviction": self.eviction,
            "counters": self.counters,
            "files": [_file_to_json(one) for one in self.files],
            "admission_files": self.admission_files,
        }

    @staticmethod
    def from_field(table: Field) -> TableRecord:
        """Read one entry of `tables`. Raises CheckpointError."""
        fields = table.members(*_TABLE_FIELDS)
        return TableRecord(
            name=fields["name"].text(),
            hash_name=fields["hash_name"].text(),
            dim=fields["dim"].integer(1, 1 << 28),
            data_type=fields["data_type"].one_of(STORAGE_TYPES),
            num_embeddings=fields["num_embeddings"].integer(-1, (1 << 63) - 1),
            seed=fields["seed"].integer(-(1 << 64), 1 << 64),
            init=fields["init"].json_object(),
            optimizer=_optimizer(fields["optimizer"]),
            rows=fields["rows"].integer(0, _MAX_ROWS),
            admission=fields["admission"].json_object_or_none(),
            eviction=fields["eviction"].json_object_or_none(),
            counters={name: one.integer(0, (1 << 63) - 1) for name, one in fields["counters"].entries().items()},
            files=[_table_file(one) for one in fields["files"].items()],
            admission_files=[_file_name(one) for one in fields["admission_files"].items()],
        )


TABLE_SETTINGS = (
    "name",
    "hash_name",
    "dim",
    "data_type",
    "num_embeddings",
    "seed",
    "init",
    "optimizer",
    "admission",
    "eviction",
)
"""Fields of a table in which all ranks agree; the others speak of its rows and files."""
_TABLE_FIELDS = (*TABLE_SETTINGS, "rows", "counters", "files", "admission_files")


def _optimizer(optimizer: Field) -> OptimizerRecord:
    fields = optimizer.members("name", "hyper", "slots")
    slots = []
    for slot in fields["slots"].items():
        name, width = slot.items(2)
        slots.append((name.text(256), width.integer(1, _MAX_WIDTH)))
    if len({name for name, _ in slots}) != len(slots):
        fields["slots"].refuse("a list of distinct slots")
    hyper = {name: one.number() for name, one in fields["hyper"].entries().items()}
    return OptimizerRecord(fields["name"].text(256), hyper, tuple(slots))


def _table_file(file: Field) -> TableFile:
    fields = file.members("name", "rank", "rows", "first_slice", "end_slice")
    return TableFile(
        name=_file_name(fields["name"]),
        rank=fields["rank"].integer(0, 65535),
        rows=fields["rows"].integer(0, _MAX_ROWS),
        first_slice=fields["first_slice"].integer(0, 65536),
        end_slice=fields["end_slice"].integer(0, 65536),
    )


def _file_name(name: Field) -> str:
    return name.matching(FILE_NAME, "the name of a checkpoint's file")


def _file_to_json(file: TableFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "rank": file.rank,
        "rows": file.rows,
        "first_slice": file.first_slice,
        "end_slice": file.end_slice,
    }


def files_to_json(files: dict[str, FileRecord]) -> dict[str, Any]:
    """The manifest's object `files`."""
    return {
        file: {
            "size": record.size,
            "header_sha256": record.header_sha256,
            "tensors": {
                name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": tensor.sha256}
                for name, tensor in record.tensors.items()
            },
        }
        for file, record in files.items()
    }


def files_from_field(files: Field) -> dict[str, FileRecord]:
    """Read the manifest's object `files`. Raises CheckpointError."""
    records = {}
    for name, entry in files.entries().items():
        Field(name, files.file, f"the name {entry.path}").matching(FILE_NAME, "the name of a checkpoint's file")
        fields = entry.members("size", "header_sha256", "tensors")
        tensors = {}
        for tensor, one in fields["tensors"].entries().items():
            parts = one.members("dtype", "shape", "sha256")
            tensors[tensor] = TensorRecord(
                parts["dtype"].one_of(DTYPES),
                tuple(extent.integer(0, 1 << 60) for extent in parts["shape"].items()),
                parts["sha256"].sha256(),
            )
        size = fields["size"].integer(0, 1 << 62)
        records[name] = FileRecord(size, fields["header_sha256"].sha256(), tensors)
    return records
