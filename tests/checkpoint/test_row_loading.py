"""What does not fit is named with both values, and nothing changes."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
import torch
from store_cases import contents, fill, load_stores, make_store, save_one, save_stores, specs

from nestpipe_kernels.checkpoint.generation import Generation
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import table_file
from nestpipe_kernels.checkpoint.rows import TableTarget, all_targets, load_tables, save_tables
from nestpipe_kernels.checkpoint.settings import described
from nestpipe_kernels.comm import LocalCommunicator
from nestpipe_kernels.errors import CheckpointError, RemoteRankError, StoreFullError
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.optim import Adagrad, Adam
from nestpipe_kernels.policy import TTL, Score
from nestpipe_kernels.types import UNBOUNDED, TableSpec


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks; not to be changed."""
    directory = tmp_path_factory.mktemp("saved")
    stores = [make_store(), make_store()]
    for rank, store in enumerate(stores):
        fill(store, rank, 2)
    save_stores(directory, stores)
    return directory


def _with(table: int, **changes):
    tables = specs()
    tables[table] = dataclasses.replace(tables[table], **changes)
    return tables


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 8}, "table 'user': dim is 4 in the checkpoint, 8 in the model"),
        (
            {"tables": _with(1, num_embeddings=501)},
            "table 'item': num_embeddings is 500 in the checkpoint, 501 in the mod",
        ),
        ({"tables": _with(0, seed=7)}, "table 'user': seed is 3 in the checkpoint, 7 in the model"),
        ({"tables": _with(2, init=Uniform(-1, 1))}, "table 'never used': init is .*-0.5.* in the checkpoint, .*-1"),
        (
            {"optimizer": Adagrad()},
            r"optimizer is adam\(.*\) with slots exp_avg\[4\], exp_avg_sq\[4\] in the checkpoint, adagr",
        ),
        (
            {"optimizer": Adam(eps=1e-3)},
            r"table 'user': adam's eps is 1e-08 in the checkpoint, 0.001 in the model \(strict=False takes",
        ),
    ],
)
def test_fault_41_settings_that_differ_are_named_with_both_values(saved, settings, message) -> None:
    stores = [make_store(**settings), make_store(**settings)]
    for rank, store in enumerate(stores):
        fill(store, rank, 2, salt=4)
    before = contents(stores)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_stores(saved, stores)
    assert "does not fit the model; nothing was loaded" in str(caught.value)
    assert contents(stores) == before


def test_fault_33_a_missing_slot_is_named_and_never_left_unset(saved) -> None:
    """The checkpoint of another rule has other slots; a rule with one more than there is finds an error."""

    class MoreThanAdam(Adam):
        def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
            return (*super().slots(dim), ("max_exp_avg_sq", dim))

    with pytest.raises(CheckpointError, match=r"exp_avg_sq\[4\] in the checkpoint, .*max_exp_avg_sq\[4\] in the model"):
        load_stores(saved, [make_store(optimizer=MoreThanAdam())])


def test_other_seeds_and_initial_values_are_possible_on_request(saved) -> None:
    store = make_store(tables=[dataclasses.replace(spec, seed=99, init=Uniform(-1, 1)) for spec in specs()])
    load_stores(saved, [store], strict=False)
    assert len(store) > 900


def test_other_numbers_of_the_same_optimizer_are_possible_on_request(saved) -> None:
    """Weight decay may change in the middle of a training; states stay."""
    same, other = make_store(), make_store(optimizer=Adam(eps=1e-3, weight_decay=0.1))
    load_stores(saved, [same])
    load_stores(saved, [other], strict=False)
    assert contents([other]) == contents([same])
    with pytest.raises(CheckpointError, match=r"optimizer is adam\(.*\) with slots .* in the checkpoint, adagrad"):
        load_stores(saved, [make_store(optimizer=Adagrad())], strict=False)


def test_a_table_that_is_not_there_is_named(saved) -> None:
    store = make_store(tables=[TableSpec("other", UNBOUNDED, Uniform(-0.5, 0.5), 3)])
    with pytest.raises(CheckpointError, match="there is no table 'other'; it holds user, item, never used"):
        load_stores(saved, [store])


def test_fault_41_a_capacity_that_is_too_small_is_named_with_both_numbers(saved) -> None:
    total = Manifest.load(saved).table("user").rows
    fits = make_store(tables=specs(capacity=total))
    load_stores(saved, [fits])
    assert fits.size("user") == total
    small = make_store(tables=specs(capacity=total - 1))
    message = (
        f"table 'user': rank 0 would take {total} of its {total} rows, but its share of the capacity is {total - 1}"
    )
    with pytest.raises(CheckpointError, match=message):
        load_stores(saved, [small])
    assert len(small) == 0


def test_capacity_is_counted_from_the_keys_that_a_rank_really_takes(saved) -> None:
    """Three ranks read files of two: what files hold together is more than what a rank takes."""
    stores = [make_store() for _ in range(3)]
    load_stores(saved, stores)
    sizes = [store.size("user") for store in stores]
    exact = [make_store(tables=specs(capacity=size)) for size in sizes]
    load_stores(saved, exact)
    assert [store.size("user") for store in exact] == sizes
    exact = [make_store(tables=specs(capacity=size - (rank == 1))) for rank, size in enumerate(sizes)]
    with pytest.raises((CheckpointError, RemoteRankError), match=f"rank 1 would take {sizes[1]} of its"):
        load_stores(saved, exact)
    assert not any(len(store) for store in exact)


def _damaged_copy(saved, tmp_path, name: str, offset: int = -1):
    for one in saved.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    data = bytearray((tmp_path / name).read_bytes())
    data[offset] ^= 1
    (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("held", [False, True])
def test_damage_found_while_loading_changes_nothing(saved, tmp_path, held) -> None:
    """The last file is damaged: empty tables are empty again; tables with rows keep them."""
    name = table_file(1, 1, 1)
    directory = _damaged_copy(saved, tmp_path, name)
    stores = [make_store(), make_store(), make_store()]
    for rank, store in enumerate(stores):
        if held and rank == 0:  # one rank is enough to make all verify first
            fill(store, rank, 3, salt=4)
    before = contents(stores)
    with pytest.raises((CheckpointError, RemoteRankError), match=f"{name}: tensor 'updates' is damaged"):
        load_stores(directory, stores)
    assert contents(stores) == before
    load_stores(saved, stores)
    assert len(contents(stores)) > 900


@pytest.mark.parametrize("name", [table_file(1, 0, 0), table_file(1, 1, 1)])
def test_fault_42_files_that_are_missing_cut_or_swapped_are_named(saved, tmp_path, name) -> None:
    directory = _damaged_copy(saved, tmp_path, name)
    good = (saved / name).read_bytes()
    other = (saved / table_file(1, 2, 0)).read_bytes()
    for data in (good[:-1], good + b"\0", b"", other, good[: len(good) // 2]):
        (directory / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=name):
            load_stores(directory, [make_store()])
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_stores(directory, [make_store()])
    (directory / name).symlink_to(saved / name)
    with pytest.raises(CheckpointError, match=f"{name} must be a regular file"):
        load_stores(directory, [make_store()])


class _Hostile:
    """A store that exports what a real one never would."""

    def __init__(self, store, keys, last_used=None) -> None:
        self._store, self._keys, self._last_used = store, keys, last_used

    def __getattr__(self, name):
        return getattr(self._store, name)

    def shard_sizes(self, table):
        sizes = torch.zeros(256, dtype=torch.int64)
        sizes[0] = self._keys.numel()
        return sizes

    def export_shards(self, table, first, end, size):
        keys = self._keys if first == 0 else self._keys[:0]
        return keys, torch.full((keys.numel(),), -1)

    def copy_columns(self, handles, columns):
        for _, column in columns:
            column.zero_()

    def read_metadata(self, handles):
        found = self._store.read_metadata(handles)
        if self._last_used is not None:
            found.last_used[:] = self._last_used
        return found


def _save_hostile(directory, keys, spec, last_used=None) -> None:
    store = make_store(tables=[spec])
    save_one(directory, _Hostile(store, keys, last_used))


@pytest.mark.parametrize(
    ("keys", "spec", "last_used", "message"),
    [
        ([1, 2, 1], TableSpec("t", UNBOUNDED, None, 0), None, "hold 3 rows of rank 0, but only 2 distinct keys"),
        (
            [1, 500],
            TableSpec("t", 500, None, 0),
            None,
            r"tensor 'keys': keys of table 't' must be in \[0, 500\), got 500",
        ),
        ([1, -1], TableSpec("t", 500, None, 0), None, r"must be in \[0, 500\), got -1"),
        ([1, 2], TableSpec("t", UNBOUNDED, None, 0), -2, "tensor 'last_used' must be at least -1, got -2"),
    ],
)
def test_rows_that_no_store_would_save_are_refused(tmp_path, keys, spec, last_used, message) -> None:
    _save_hostile(tmp_path, torch.tensor(keys), spec, last_used)
    store = make_store(tables=[spec])
    with pytest.raises(CheckpointError, match=message):
        load_stores(tmp_path, [store])
    assert len(store) == 0


def test_rows_outside_their_files_slices_are_refused(saved, tmp_path) -> None:
    """They would be skipped by ranks that do not open the file."""
    manifest = Manifest.load(saved)
    table = manifest.tables[0]
    table.files[0] = dataclasses.replace(table.files[0], end_slice=10)
    with pytest.raises(CheckpointError, match=f"{table.files[0].name}.*must be of slices 0 to 10, got"):
        load_tables(saved, manifest, LocalCommunicator(), all_targets([make_store()]))


def test_memory_that_gives_out_is_explained_and_empties_the_tables(saved) -> None:
    def gives_out(*_):
        raise MemoryError

    store = make_store()
    store.load_columns = gives_out
    with pytest.raises(StoreFullError, match="no memory for the rows of table 'user'; load with more ranks"):
        load_stores(saved, [store])
    assert len(store) == 0


def test_a_disk_that_fails_is_explained(saved, monkeypatch) -> None:
    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    store = make_store()
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match=r"cannot read tensor '\w+' of: Input/output error: .*check the disk"):
        load_stores(saved, [store])
    assert len(store) == 0


def test_tables_of_one_name_cannot_be_saved_together(tmp_path) -> None:
    generation = Generation(tmp_path, 1, 0, 1)
    with pytest.raises(
        CheckpointError, match="two tables are named 'user'; names within a checkpoint must be distinct"
    ):
        save_tables(generation, [make_store(), make_store()])
    records = save_tables(generation, [make_store(), make_store()], [["a", "b", "c"], ["d", "e", "f"]])
    assert [(one.name, one.hash_name) for one in records][::3] == [("a", "user"), ("d", "user")]


def test_a_store_that_changes_while_it_is_saved_is_noticed(tmp_path) -> None:
    store = make_store()
    fill(store, 0, 1)
    sizes = store.shard_sizes("user")
    store.shard_sizes = lambda table: sizes
    store.erase(store.keys("user")[:1], "user")
    with pytest.raises(CheckpointError, match="table 'user' changed while it was saved: 706 keys became 705"):
        save_tables(Generation(tmp_path, 1, 0, 1), [store])
    assert os.listdir(tmp_path) == []


def test_settings_become_plain_words() -> None:
    assert described(None) is None
    assert described(TTL(7, slack=0.25)) == {"name": "TTL", "steps": 7, "slack": 0.25}
    found = described(Score(contents))
    assert found == {"name": "Score", "function": "store_cases.contents", "slack": 0.0625}


def test_one_target_alone_leaves_the_others(saved) -> None:
    store = make_store()
    fill(store, 0, 1, salt=3)
    before = {place: row for place, row in contents([store]).items() if place[0] != "item"}
    load_tables(saved, Manifest.load(saved), LocalCommunicator(), [TableTarget(store, 1, "item")])
    after = contents([store])
    assert {place: row for place, row in after.items() if place[0] != "item"} == before
    assert sum(table == "item" for table, _ in after) == 250


def test_columns_of_rows_are_checked() -> None:
    store = make_store()
    fill(store, 0, 1)
    keys, handles = store.export_table("item")
    words, two = torch.empty(keys.numel(), 4), torch.empty(keys.numel(), dtype=torch.int64)
    store.copy_columns(handles, [(0, words), (8, two)])
    assert torch.equal(words, store.find(keys, "item")[0])
    assert torch.equal(two, words.view(torch.int64)[:, 1])
    with pytest.raises(IndexError, match=f"bytes {store.row_floats * 4 - 4} to {store.row_floats * 4 + 4} of a row of"):
        store.copy_columns(handles, [(store.row_floats * 4 - 4, two)])
    handles[3] = -1
    with pytest.raises(IndexError, match="no row to copy from for handle -1"):
        store.copy_columns(handles, [(0, words)])
    with pytest.raises(ValueError, match="out"):
        store.copy_columns(handles, [(0, words[:-1])])
