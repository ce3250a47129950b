"""The manifest: one spelling, one digest, and every field has its type, range and path in messages."""

from __future__ import annotations

import copy
import json
import os
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import fill, make_store, save_stores

from nestpipe_kernels.checkpoint.fields import canonical_bytes, digest_of
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import FILE_NAME, generation_of
from nestpipe_kernels.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks: (directory, JSON of its manifest)."""
    directory = tmp_path_factory.mktemp("saved")
    stores = [make_store(), make_store()]
    for rank, store in enumerate(stores):
        fill(store, rank, 2)
    save_stores(directory, stores)
    return directory, json.loads((directory / "manifest.json").read_text())


def _signed(value) -> bytes:
    """The bytes of a manifest whose author knows how to make a digest."""
    value["sha256"] = digest_of(value)
    return canonical_bytes(value)


def _parse(data: bytes) -> Manifest:
    return Manifest.from_bytes(data, "manifest.json")


def test_it_reads_back_as_it_was_written(saved) -> None:
    directory, value = saved
    data = (directory / "manifest.json").read_bytes()
    manifest = Manifest.load(directory)
    assert manifest.to_bytes() == data == canonical_bytes(value)
    assert manifest.world_size == 2 and manifest.generation == 1 and manifest.ranks == [{"salt": 0}] * 2
    assert [table.name for table in manifest.tables] == ["user", "item", "never used"]
    assert [slot for slot, _ in manifest.table("user").optimizer.slots] == ["exp_avg", "exp_avg_sq"]
    assert set(os.listdir(directory)) - {"manifest.json", ".lock"} == set(manifest.files)
    with pytest.raises(CheckpointError, match="there is no table 'else'; it holds user, item, never used"):
        manifest.table("else")


def test_every_flipped_bit_is_detected(saved) -> None:
    data = (saved[0] / "manifest.json").read_bytes()
    generator = random.Random(7)
    for _ in range(400):
        flipped = bytearray(data)
        bit = generator.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            _parse(bytes(flipped))


def test_truncation_extension_and_other_spellings_are_detected(saved) -> None:
    value = saved[1]
    data = canonical_bytes(value)
    for bad in (
        b"",
        data[:-1],
        data[: len(data) // 2],
        data + b"\n",
        data + data,
        json.dumps(value, indent=1).encode(),
        b"\xef\xbb\xbf" + data,
        data.replace(b'"world_size":2', b'"world_size":2,"world_size":2'),
        data.replace(b'"world_size":2', b'"world_size":2.0'),
        data.replace(b'"world_size":2', b'"world_size":02'),
        data.replace(b'"world_size":2', b'"world_size":NaN'),
    ):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            _parse(bad)


def test_a_newer_version_is_refused_with_both_versions(saved) -> None:
    value = copy.deepcopy(saved[1])
    value["version"] = 2
    value["something new"] = 1
    with pytest.raises(CheckpointError, match="format version 2, this package reads versions up to 1: upgrade"):
        _parse(_signed(value))


def test_a_missing_manifest_says_so(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint; check the path"):
        Manifest.load(tmp_path)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        Manifest.load(tmp_path / "nowhere")
    (tmp_path / "other").write_text("{}")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="must be a regular file, got a link"):
        Manifest.load(tmp_path)


FIRST = "g00000001-t000-r00000-p000.safetensors"
DAMAGES = [
    (lambda v: v.update(format="other"), "'format' must be 'nestpipe-checkpoint'"),
    (lambda v: v.update(version="1"), r"version must be an integer"),
    (lambda v: v.update(version=True), r"version must be an integer"),
    (lambda v: v.pop("tables"), "an object with a field 'tables'"),
    (lambda v: v.update(more=1), "an object without the field 'more'"),
    (lambda v: v.update(world_size=0), r"world_size must be an integer in \[1, 65536\], got 0"),
    (lambda v: v.update(world_size=10**30), r"world_size must be an integer in \[1, 65536\]"),
    (lambda v: v.update(world_size=3), r"ranks must be a list of 3, got a list of 2 entries"),
    (lambda v: v.update(generation=-1), "generation must be an integer"),
    (lambda v: v.update(generation=2), "must belong to generation 2"),
    (lambda v: v["hash"].update(name="other"), "hash.name must be one of mix64, got 'other'"),
    (lambda v: v["hash"].update(slices=1), r"hash.slices must be an integer in \[65536, 65536\]"),
    (lambda v: v["tables"][0].update(dim=0), r"tables\[0\].dim must be an integer in \[1, 268435456\], got 0"),
    (lambda v: v["tables"][0].update(dim=10**4000), r"tables\[0\].dim must be .*, got an integer of 13288 bits"),
    (lambda v: v["tables"][0].update(dim=5), r"must describe 'embedding' of table 'user' as F32 \[\d+, 5\], got F32 "),
    (lambda v: v["tables"][0].update(data_type="FP16"), "must describe 'embedding' of table 'user' as F16"),
    (lambda v: v["tables"][0].update(data_type=[]), "data_type must be one of FP32, FP16, BF16, got a list"),
    (lambda v: v["tables"][0].update(name=""), r"tables\[0\].name must be a string of 1 to 4096 characters"),
    (lambda v: v["tables"][0].update(name="item"), "tables must have distinct names, got 'item' twice"),
    (lambda v: v["tables"][0].update(rows=1), r"tables\[0\].rows must be \d+, the sum of its files' rows, got 1"),
    (lambda v: v["tables"][0].update(rows=1e3), r"tables\[0\].rows must be an integer"),
    (lambda v: v["tables"][1].update(seed="4"), r"tables\[1\].seed must be an integer"),
    (lambda v: v["tables"][1].update(init=None), r"tables\[1\].init must be an object, got None"),
    (lambda v: v["tables"][0]["optimizer"].update(name=7), r"optimizer.name must be a string"),
    (
        lambda v: v["tables"][0]["optimizer"]["hyper"].update(eps="x"),
        r"hyper\['eps'\] must be a finite number, got 'x'",
    ),
    (
        lambda v: v["tables"][0]["optimizer"]["slots"].pop(),
        "must describe 'state.exp_avg_sq' of table 'user' as absent",
    ),
    (
        lambda v: v["tables"][0]["optimizer"]["slots"].append(["more", 4]),
        "must describe 'state.more' of table 'user' as",
    ),
    (lambda v: v["tables"][0]["optimizer"]["slots"].append(["exp_avg", 4]), "a list of distinct slots"),
    (lambda v: v["tables"][0]["optimizer"]["slots"].append(["a"]), r"slots\[2\] must be a list of 2"),
    (lambda v: v["tables"][0]["files"].pop(), r"that of rank 1 \(g00000001-t000-r00001-p000.safetensors\) is missing"),
    (lambda v: v["tables"][0]["files"].reverse(), "must be ordered by rank"),
    (lambda v: v["tables"][0]["files"][0].update(rank=7), "names rank 7 of a world of 2"),
    (lambda v: v["tables"][0]["files"][0].update(rows=-1), r"files\[0\].rows must be an integer"),
    (lambda v: v["tables"][0]["files"][0].update(rows=1), r"must describe 'keys' of table 'user' as I64 \[1\]"),
    (lambda v: v["tables"][0]["files"][0].update(first_slice=65536), "have slices 65536 to"),
    (lambda v: v["tables"][0]["files"][0].update(first_slice=0, end_slice=0), rf"{FIRST} has \d+ rows, but no slices"),
    (
        lambda v: v["tables"][0]["files"][0].update(name="/etc/passwd"),
        "the name of a checkpoint's file, got '/etc/passwd'",
    ),
    (lambda v: v["tables"][0]["files"][0].update(name="../" + FIRST), "the name of a checkpoint's file, got '../g"),
    (lambda v: v["tables"][0]["files"][0].update(name=FIRST + "\n"), "the name of a checkpoint's file"),
    (lambda v: v["tables"][0]["files"][0].update(name=FIRST.replace("t000", "t001")), f"must name {FIRST} for rank 0"),
    (lambda v: v["tables"][0].update(admission_files=[FIRST]), "must name one file of every rank"),
    (lambda v: v["files"].pop(FIRST), f"name {FIRST}, which is not among files"),
    (lambda v: v["files"].pop("g00000001-r00001.safetensors"), r"g00000001-r00001.safetensors \(rank 1\) is missing"),
    (
        lambda v: v["files"].update({"../x": v["files"][FIRST]}),
        r"files\['../x'\] must be the name of a checkpoint's file",
    ),
    (lambda v: v["files"][FIRST].update(size=3), r"\.size must be \d+ as its tensors add up, got 3"),
    (lambda v: v["files"][FIRST].update(header_sha256="0" * 64), r"\.header_sha256 must be [0-9a-f]{64}, got 0000"),
    (
        lambda v: v["files"][FIRST]["tensors"]["keys"].update(sha256="0" * 63),
        "must be 64 lower-case hexadecimal digits",
    ),
    (
        lambda v: v["files"][FIRST]["tensors"]["keys"].update(sha256="０" * 64),
        "must be 64 lower-case hexadecimal digits",
    ),
    (lambda v: v["files"][FIRST]["tensors"]["keys"].update(dtype="I32"), "cannot form|must be"),
    (lambda v: v["files"][FIRST]["tensors"]["keys"].update(dtype="C64"), "dtype must be one of"),
    (
        lambda v: v["files"][FIRST]["tensors"]["keys"].update(shape=[1 << 59, 1 << 59]),
        "cannot form a file: .*larger than",
    ),
    (lambda v: v["files"][FIRST]["tensors"]["keys"].update(shape=[-1]), r"shape\[0\] must be an integer"),
    (lambda v: v["files"][FIRST]["tensors"]["keys"].update(shape=[1] * 70), "70 dimensions"),
    (
        lambda v: v["files"].update({FIRST.replace("t000", "t009"): v["files"][FIRST]}),
        "belongs to no table and no rank",
    ),
    (lambda v: v.update(position=[]), "position must be an object, got a list"),
    (lambda v: v["ranks"].__setitem__(1, 5), r"ranks\[1\] must be an object, got 5"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_every_field_is_checked_and_named(saved, damage, message) -> None:
    value = copy.deepcopy(saved[1])
    damage(value)
    with pytest.raises(CheckpointError, match=message) as caught:
        _parse(_signed(value))
    assert "manifest.json" in str(caught.value)


def test_an_edited_manifest_without_a_new_digest_is_refused(saved) -> None:
    value = copy.deepcopy(saved[1])
    value["position"]["step_count"] = 10_000
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is"):
        _parse(canonical_bytes(value))


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_deep_nesting_is_one_error(saved, depth) -> None:
    nested = b'"position":{"a":' + b"[" * depth + b"]" * depth + b","
    data = canonical_bytes(saved[1]).replace(b'"position":{', nested)
    with pytest.raises(CheckpointError, match=r"nested deeper than 64 levels|RecursionError"):
        _parse(data)


def test_an_absurdly_large_manifest_is_not_read(tmp_path) -> None:
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)  # a hole: takes no room
    with pytest.raises(CheckpointError, match=f"has {1 << 40} bytes; {256 << 20} are the limit"):
        Manifest.load(tmp_path)


WORDS = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        3,
        1 << 40,
        1 << 64,
        10**300,
        0.5,
        1e308,
        "",
        "x",
        "../..",
        "F32",
        "0" * 64,
        [],
        {},
        [[]],
        FIRST,
    ]
)


def _places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def _set(value, path, word):
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = word


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_fields_end_in_one_error_or_a_valid_manifest(saved, data) -> None:
    """The attacker makes correct digests; allocations stay in proportion to the file."""
    value = copy.deepcopy(saved[1])
    for _ in range(data.draw(st.integers(1, 3))):
        places = [place for place in _places(value) if place]
        _set(value, data.draw(st.sampled_from(places)), copy.deepcopy(data.draw(WORDS)))
    text = _signed(value)
    tracemalloc.start()
    try:
        problem = _problem_of(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not problem or ("manifest.json" in problem and len(problem) < 3000)
    assert peak < 16 * len(text) + (1 << 20)


def _problem_of(data: bytes) -> str:
    """What is wrong with a manifest; empty if it is valid, and then it is written the same way again."""
    try:
        manifest = _parse(data)
    except CheckpointError as error:
        return str(error)
    assert manifest.to_bytes() == data
    return ""


def test_mutated_bytes_end_in_one_error(saved) -> None:
    good = canonical_bytes(saved[1])
    generator = random.Random(3)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 5)):
            at = generator.randrange(len(data))
            length = generator.randrange(1, 40)
            choice = generator.randrange(3)
            if choice == 0:
                data[at : at + length] = generator.randbytes(length)
            elif choice == 1:
                del data[at : at + length]
            else:
                other = generator.randrange(len(data))
                data[at:at] = data[other : other + length]
        if bytes(data) != good:
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                _parse(bytes(data))


NO_NAMES = ["", ".", "..", "/", "manifest.json", "g1-dense.safetensors", f"a/{FIRST}", f"{FIRST}/", f"{FIRST}\0"]
NO_NAMES += [FIRST.upper(), f"{FIRST}.tmp", FIRST.replace("0", "\u0661")]


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_could_lead_elsewhere_are_no_names(name) -> None:
    assert FILE_NAME.fullmatch(name) is None


def test_only_a_checkpoints_own_files_have_a_generation() -> None:
    assert generation_of(FIRST) == generation_of(FIRST + ".tmp") == 1
    assert generation_of("g00000012-dense.safetensors") == 12
    for name in ("manifest.json", "manifest.json.tmp", "notes.txt", "g00000012-x.safetensors", FIRST + ".bak"):
        assert generation_of(name) is None
