"""`nestpipe checkpoint inspect`: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestpipe_kernels.checkpoint.manifest import VERSION, Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.checkpoint.names import MANIFEST_NAME, dense_file, rank_file
from nestpipe_kernels.checkpoint.tools.directory import describe_leftovers, leftovers, read_manifest
from nestpipe_kernels.checkpoint.tools.text import align, count, size

__all__ = ["describe", "lines"]

STORAGE_NAMES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
MAX_VALUES = 8
"""Numbers of a position that are shown; `--json` has them all."""


def describe(directory: Path) -> dict[str, Any]:
    """Everything that `inspect` shows, as JSON values.

    Raises:
        CheckpointError: no checkpoint, or a manifest that is damaged or newer.
        OSError: the system could not read it.
    """
    manifest = read_manifest(directory)
    left = leftovers(directory, manifest.files)
    files = {MANIFEST_NAME: (directory / MANIFEST_NAME).stat().st_size}
    files |= {name: record.size for name, record in sorted(manifest.files.items())}
    return {
        "path": str(directory),
        "format_version": VERSION,
        "generation": manifest.generation,
        "writer": manifest.writer,
        "world_size": manifest.world_size,
        "position": manifest.position,
        "tables": [_table(manifest, table) for table in manifest.tables],
        "dense": _dense(manifest),
        "ranks": [
            {"file": rank_file(manifest.generation, rank), "state": state} for rank, state in enumerate(manifest.ranks)
        ],
        "files": files,
        "bytes": sum(files.values()),
        "leftovers": left,
        "leftovers_text": describe_leftovers(directory, left) if left else None,
    }


def _table(manifest: Manifest, table: TableRecord) -> dict[str, Any]:
    names = [file.name for file in table.files] + table.admission_files
    return {
        "name": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "storage": STORAGE_NAMES[table.data_type],
        "num_embeddings": table.num_embeddings,
        "seed": table.seed,
        "init": table.init,
        "optimizer": {"name": table.optimizer.name, **table.optimizer.hyper},
        "slots": dict(table.optimizer.slots),
        "admission": table.admission,
        "eviction": table.eviction,
        "counters": table.counters,
        "rows_of_rank": _rows_of_ranks(manifest, table),
        "bytes": sum(manifest.files[name].size for name in names),
    }


def _rows_of_ranks(manifest: Manifest, table: TableRecord) -> list[int]:
    rows = [0] * manifest.world_size
    for file in table.files:
        rows[file.rank] += file.rows
    return rows


def _dense(manifest: Manifest) -> dict[str, Any]:
    record = manifest.files.get(dense_file(manifest.generation))
    tensors = {} if record is None else record.tensors
    return {
        "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in sorted(tensors.items())},
        "numbers": sum(_product(t.shape) for t in tensors.values()),
        "bytes": 0 if record is None else record.size,
        "state": manifest.dense,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The readable form of what `describe` found."""
    out = [
        f"{found['path']}: generation {found['generation']}, format version {found['format_version']}, "
        f"{count(found['world_size'], 'rank')}, {count(len(found['files']), 'file')}, {size(found['bytes'])}",
        f"written by {_writer(found['writer'])}",
    ]
    out.append(f"position: {', '.join(_shortened(list(_flat(found['position'])))) or 'none'}")
    out += ["", *_table_lines(found["tables"])]
    dense = found["dense"]
    if dense["tensors"]:
        out.append(
            f"dense: {count(len(dense['tensors']), 'tensor')}, {count(dense['numbers'], 'number')}, "
            f"{size(dense['bytes'])} ({', '.join(sorted(dense['state'] or {})) or 'no state'})"
        )
    else:
        out.append("dense: nothing")
    out += ["", *_rank_lines(found), "", *_file_lines(found["files"])]
    if found["leftovers_text"]:
        out += ["", f"beside it: {found['leftovers_text']}; the next save removes them"]
    return out


def _table_lines(tables: list[dict[str, Any]]) -> list[str]:
    if not tables:
        return ["tables: none"]
    rows = [["table", "rows", "dim", "storage", "bytes", "optimizer", "admission", "eviction"]]
    for table in tables:
        numbers = ", ".join(f"{k}={v:g}" for k, v in sorted(table["optimizer"].items()) if k != "name")
        rows.append(
            [
                table["name"],
                f"{table['rows']:,}",
                str(table["dim"]),
                table["storage"],
                size(table["bytes"]),
                f"{table['optimizer']['name']}({numbers})",
                _rule(table["admission"]),
                _rule(table["eviction"]),
            ]
        )
    return align(rows, right=(1, 2, 4), indent="")


def _rank_lines(found: dict[str, Any]) -> list[str]:
    rows = [["rank", "rows", "position of its loader", "also"]]
    for rank, entry in enumerate(found["ranks"]):
        own = sum(table["rows_of_rank"][rank] for table in found["tables"])
        also = sorted(name for name, value in entry["state"].items() if value and name != "loader")
        rows.append([str(rank), f"{own:,}", _loader(entry["state"].get("loader")), ", ".join(also) or "-"])
    return align(rows, right=(0, 1), indent="")


def _loader(record: Any) -> str:
    """Where a rank's loader stood, in words."""
    if not isinstance(record, dict):
        return "-"
    kind = record.get("kind")
    if kind == "none":
        return "an epoch starts"
    if kind == "unknown":
        return "not saved"
    numbers = _shortened([text for text in _flat(record.get("state", {})) if "(" not in text])
    if "consumed" in record:
        numbers = [f"{record['consumed']} batches of its epoch", *numbers]
    return f"{record.get('class', kind)}: {', '.join(numbers)}" if numbers else str(record.get("class", kind))


def _file_lines(files: dict[str, int]) -> list[str]:
    return align([["file", "size"], *([name, size(n)] for name, n in files.items())], (1,), "")


def _writer(writer: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in _pairs(writer)) or "an unknown program"


def _pairs(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, one in sorted(value.items()):
        yield name, one if isinstance(one, (str, int, float)) else json.dumps(one, sort_keys=True)


def _rule(rule: dict[str, Any] | None) -> str:
    """An admission or eviction rule's description on one line."""
    if rule is None:
        return "-"
    settings = ", ".join(f"{k}={_plain(v)}" for k, v in sorted(rule.items()) if k != "name" and v is not None)
    return f"{rule.get('name', '?')}({settings})"


def _plain(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return _rule(value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _flat(tree: Any, path: str = "") -> Iterator[str]:
    """`path value` of a tree's numbers and texts; tensors by name."""
    if isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)).startswith("$"):
        tag, value = next(iter(tree.items()))
        if tag == "$tensor":
            yield f"{path} (tensor)"
        elif tag == "$bytes":
            yield f"{path} ({len(str(value)) * 3 // 4} bytes)"
        else:
            yield from _flat(value, path)
    elif isinstance(tree, dict):
        for key, value in sorted(tree.items()):
            yield from _flat(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        if all(isinstance(one, (int, float, str)) for one in tree):
            yield f"{path} {_plain(tree) if len(tree) <= 8 else f'({len(tree)} values)'}"
        else:
            for position, value in enumerate(tree):
                yield from _flat(value, f"{path}[{position}]")
    elif tree is not None:
        yield f"{path} {_plain(tree)}" if path else _plain(tree)


def _shortened(values: list[str]) -> list[str]:
    if len(values) <= MAX_VALUES:
        return values
    return [*values[:MAX_VALUES], f"and {len(values) - MAX_VALUES} more (--json)"]


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result
