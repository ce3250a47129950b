"""Reads a checkpoint with numpy alone, as docs/checkpoints.md describes it: python read_checkpoint.py DIR [TABLE]"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"BF16": "<u2", "BOOL": "?", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
DTYPES |= {"I16": "<i2", "I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1"}


def read_manifest(directory):
    text = (Path(directory) / "manifest.json").read_bytes()
    manifest = json.loads(text)
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    spelled = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert manifest["format"] == "nestpipe-checkpoint" and manifest["version"] == 1, "another format, or newer"
    assert hashlib.sha256(spelled).hexdigest() == manifest["sha256"], "manifest.json is damaged"
    return manifest


def read_tensors(path, record):
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert hashlib.sha256(data[:start]).hexdigest() == record["header_sha256"], f"{path}: header is damaged"
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        raw = data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        assert hashlib.sha256(raw).hexdigest() == record["tensors"][name]["sha256"], f"{path}: {name} is damaged"
        array = np.frombuffer(raw, DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (array.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else array
    return tensors


def read_table(directory, name):
    manifest = read_manifest(directory)
    table = next(table for table in manifest["tables"] if table["name"] == name)
    parts = [read_tensors(Path(directory) / f["name"], manifest["files"][f["name"]]) for f in table["files"]]
    return {tensor: np.concatenate([part[tensor] for part in parts]) for tensor in parts[0]}


if __name__ == "__main__":
    names = sys.argv[2:] or [table["name"] for table in read_manifest(sys.argv[1])["tables"]]
    for name in names:
        print(
            name, {tensor: (array.dtype.name, array.shape) for tensor, array in read_table(sys.argv[1], name).items()}
        )
