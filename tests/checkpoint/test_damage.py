"""Every flipped bit in any file of a checkpoint is detected, and the file and tensor are named."""

from __future__ import annotations

import random

import pytest
import torch
from store_cases import contents, fill, load_stores, make_store, save_stores

from nestpipe_kernels.checkpoint.files import open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.errors import CheckpointError


def _verify(directory) -> None:
    manifest = Manifest.load(directory)
    for name, record in manifest.files.items():
        with open_tensor_file(directory / name, record) as file:
            file.verify()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    stores = [make_store(), make_store()]
    for rank, store in enumerate(stores):
        fill(store, rank, 2)
    save_stores(directory, stores)
    return directory


def _flip(path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_fault_42_every_sampled_bit_of_every_file_is_detected_and_named(saved) -> None:
    generator = random.Random(1)
    manifest = Manifest.load(saved)
    flips: list[tuple[str, str, int]] = [
        ("manifest.json", "", bit) for bit in generator.sample(range((saved / "manifest.json").stat().st_size * 8), 60)
    ]
    for name, record in manifest.files.items():
        with open_tensor_file(saved / name, record) as file:
            regions = file.regions
        first = min(region.offset for region in regions.values())
        flips += [(name, "its header", bit) for bit in generator.sample(range(first * 8), 12)]
        for tensor, region in regions.items():
            bits = range(region.offset * 8, (region.offset + region.size) * 8)
            flips += [(name, f"tensor '{tensor}'", bit) for bit in generator.sample(bits, min(len(bits), 10))]
    assert len(flips) > 400
    for name, part, bit in flips:
        _flip(saved / name, bit)
        with pytest.raises(CheckpointError) as caught:
            _verify(saved)
        assert name in str(caught.value) and part in str(caught.value)
        _flip(saved / name, bit)
    _verify(saved)


def test_swapped_files_are_named(saved) -> None:
    names = sorted(Manifest.load(saved).files)
    texts = {name: (saved / name).read_bytes() for name in names}
    pairs = [(a, b) for a in names for b in names if a < b and texts[a] != texts[b]]
    pairs.sort(key=lambda pair: abs(len(texts[pair[0]]) - len(texts[pair[1]])))
    for a, b in pairs[:6]:  # those of equal size first
        (saved / a).write_bytes(texts[b])
        (saved / b).write_bytes(texts[a])
        with pytest.raises(CheckpointError, match=f"{a}|{b}"):
            _verify(saved)
        for name in (a, b):
            (saved / name).write_bytes(texts[name])
    _verify(saved)


def test_a_file_of_another_save_is_named(tmp_path) -> None:
    """The same sizes and header, other rows: only digests tell."""
    texts = []
    for salt in (1, 2):
        store = make_store()
        fill(store, 0, 1, salt)
        save_stores(tmp_path / str(salt), [store], 0)
        (name,) = [file.name for file in Manifest.load(tmp_path / str(salt)).table("user").files]
        texts.append(tmp_path / str(salt) / name)
    assert texts[0].stat().st_size == texts[1].stat().st_size
    texts[0].write_bytes(texts[1].read_bytes())
    store = make_store()
    with pytest.raises(CheckpointError, match=f"{name}: tensor '[a-z_.]+' is damaged: its SHA-256 must be"):
        load_stores(tmp_path / "1", [store])
    assert contents([store]) == {} and torch.equal(store.keys("user"), torch.empty(0, dtype=torch.int64))
