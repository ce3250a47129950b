"""Any sequence of calls on a store gives what a dictionary gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stores import EXTREMES, StateOf

from nestpipe_kernels._native import core
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import KeyStatus, TableSpec

DIM = 3
CAPACITY = 40
SPECS = (TableSpec("a", -1, Uniform(-1.0, 1.0), 5), TableSpec("b", -1, Uniform(0.0, 2.0), 6, capacity=CAPACITY))

some_key = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 60), st.integers(-(2**63), 2**63 - 1))
some_pairs = st.lists(st.tuples(some_key, st.integers(0, 1)), max_size=40)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        core().set_num_threads(2)
        self.store = EmbeddingStore(SPECS, dim=DIM, optimizer=StateOf())
        # (key, table) -> [handle, row, last_used, frequency]
        self.rows: dict[tuple[int, int], list] = {}
        self.undoable = None
        self.batch = 0

    @staticmethod
    def tensors(pairs):
        keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64)
        return keys, torch.tensor([table for _, table in pairs], dtype=torch.int32)

    def initial_row(self, key: int, table: int) -> list[float]:
        spec = SPECS[table]
        keys = torch.tensor([key]).numpy()
        values = spec.init.reference(spec.seed, spec.name, keys, DIM)[0].tolist()
        return values + [0.5] * DIM + [0.0] * (self.store.row_floats - 2 * DIM)

    @rule(pairs=some_pairs, weigh=st.booleans())
    def retrieve(self, pairs, weigh):
        keys, tables = self.tensors(pairs)
        counts = torch.arange(2, 2 + len(pairs)) if weigh else None
        before = {pair: list(entry) for pair, entry in self.rows.items()}
        retrieval = self.store.retrieve(keys, tables, counts, self.batch)
        for j, pair in enumerate(pairs):
            status, handle = retrieval.status[j].item(), retrieval.handles[j].item()
            if pair in self.rows:
                assert status == KeyStatus.FOUND
                assert handle == self.rows[pair][0]
            elif pair[1] == 1 and sum(table == 1 for _, table in self.rows) >= CAPACITY:
                assert (status, handle) == (KeyStatus.REFUSED, -1)
                continue
            else:
                assert status == KeyStatus.INSERTED
                assert handle not in [entry[0] for entry in self.rows.values()]
                self.rows[pair] = [handle, self.initial_row(*pair), -1, 0]
            self.rows[pair][2] = self.batch
            self.rows[pair][3] += 2 + j if weigh else 1
        self.batch += 1
        self.undoable = (before, retrieval)

    @precondition(lambda self: self.undoable is not None)
    @rule()
    def undo(self):
        self.rows, retrieval = self.undoable
        self.store.undo(retrieval)
        self.undoable = None

    @rule(pairs=some_pairs)
    def erase(self, pairs):
        status = self.store.erase_keys(*self.tensors(pairs)).tolist()
        for pair, code in zip(pairs, status):
            assert code == (KeyStatus.ABSENT if self.rows.pop(pair, None) is None else KeyStatus.FOUND)
        self.undoable = None

    @rule(pairs=some_pairs, base=st.integers(0, 1000))
    def write_back(self, pairs, base):
        pairs = list(dict.fromkeys(pairs))
        handles = self.store.find_handles(*self.tensors(pairs))
        width = self.store.row_floats
        rows = base + torch.arange(len(pairs) * width, dtype=torch.float32).reshape(len(pairs), width)
        self.store.write_back(handles, rows)
        for pair, row in zip(pairs, rows.tolist()):
            if pair in self.rows:
                # Padding stays as it was.
                self.rows[pair][1] = row[: 2 * DIM + 1] + [0.0] * (width - 2 * DIM - 1)
        self.undoable = None

    @rule(start=st.integers(-(2**40), 2**40), count=st.integers(100, 3000))
    def grow(self, start, count):
        self.retrieve([(start + 7 * i, 0) for i in range(count)], False)

    @rule()
    def clear(self):
        self.store.clear()
        self.rows, self.undoable = {}, None

    @invariant()
    def agrees_with_the_dictionary(self):
        probe = [(key, table) for key in EXTREMES for table in (0, 1)] + list(self.rows)
        keys, tables = self.tensors(probe)
        handles = self.store.find_handles(keys, tables)
        assert handles.tolist() == [self.rows[pair][0] if pair in self.rows else -1 for pair in probe]
        out = torch.full((len(probe), self.store.row_floats), float("nan"))
        self.store.gather(handles, keys, tables, out, None)
        stored = [self.rows[pair][1] if pair in self.rows else self.initial_row(*pair) for pair in probe[:60]]
        assert out[:60].tolist() == stored
        metadata = self.store.read_metadata(handles)
        assert metadata.last_used.tolist() == [self.rows[pair][2] if pair in self.rows else -1 for pair in probe]
        assert metadata.frequency.tolist() == [self.rows[pair][3] if pair in self.rows else 0 for pair in probe]
        assert len(self.store) == len(self.rows)
        for table in (0, 1):
            there = {pair[0] for pair in self.rows if pair[1] == table}
            assert self.store.size(table) == len(there)
            assert set(self.store.keys(table).tolist()) == there


class LongStoreMachine(StoreMachine):
    """The same with more sequences, for the soak."""


TestStore = StoreMachine.TestCase
TestLongStore = pytest.mark.soak(LongStoreMachine.TestCase)
TestLongStore.settings = settings(
    max_examples=200, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStore.settings = settings(
    max_examples=7, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
