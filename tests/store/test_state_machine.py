"""Insert, find, update, erase, evict, undo, grow, clear, save and load in any sequence: a store is a dictionary."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stores import EXTREMES

from nestpipe_kernels import optim
from nestpipe_kernels._native import core
from nestpipe_kernels.checkpoint.generation import RankPart, save_generation
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.rows import all_targets, load_tables, save_tables
from nestpipe_kernels.comm import LocalCommunicator
from nestpipe_kernels.init import Constant, Uniform
from nestpipe_kernels.ops.row_storage import RowStorage
from nestpipe_kernels.ops.row_update import reference as updating
from nestpipe_kernels.policy import LFU, LRU, TTL, CountingFilter, MinFrequency
from nestpipe_kernels.store import EmbeddingStore, RowMetadata
from nestpipe_kernels.testing.policy_model import TableModel
from nestpipe_kernels.types import UNBOUNDED, DataType, KeyStatus, TableSpec

DIM = 3
START = Uniform(-1.0, 1.0)
RULE = optim.Adagrad(lr=0.5, initial_accumulator_value=0.25)
SPECS = (
    TableSpec("open", UNBOUNDED, START, 5),
    TableSpec("recent", UNBOUNDED, START, 6, 12, eviction=LRU(0.25), default=Constant(0.5)),
    TableSpec("frequent", UNBOUNDED, START, 7, 10, admission=MinFrequency(2), eviction=LFU(0.0)),
    TableSpec("filtered", UNBOUNDED, START, 8, admission=MinFrequency(3, CountingFilter(4096)), eviction=TTL(2)),
)
NUMBERS = range(len(SPECS))
USED = DIM + RULE.state_floats(DIM) + 1

some_key = st.one_of(st.integers(0, 20), st.integers(0, 60), st.sampled_from(EXTREMES))
some_keys = st.lists(some_key, max_size=16)
some_pairs = st.lists(st.tuples(some_key, st.sampled_from(NUMBERS)), max_size=30)


class Machine(RuleBasedStateMachine):
    """A store beside TableModels (keys, metadata, counts) and a dictionary of row values."""

    def __init__(self) -> None:
        super().__init__()
        self.store = EmbeddingStore(SPECS, dim=DIM, optimizer=RULE)
        self.models = [TableModel(s.name, s.capacity, s.admission, s.eviction) for s in SPECS]
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        """(table, key) -> float32 [USED]: embedding, state, `updates`."""
        self.undoable: list = []
        """(retrieval, batch before, inserted, values of rows that went), newest last."""
        self.batch = 0
        self.step = 0

    @initialize(threads=st.sampled_from([1, 2, 4]))
    def use(self, threads: int) -> None:
        core().set_num_threads(threads)

    # ------------------------------------------------------------------------------------------------- the dictionary

    def embedding(self, values, table: int, key: int) -> torch.Tensor:
        spec = SPECS[table]
        return torch.as_tensor(values.reference(spec.seed, spec.name, [key], DIM)).view(-1)

    def fresh(self, table: int, key: int) -> torch.Tensor:
        state = torch.full((RULE.state_floats(DIM),), RULE.state_init())
        return torch.cat([self.embedding(START, table, key), state, torch.zeros(1)])

    def read(self, table: int, key: int) -> list[float]:
        """What a lookup gives: the row's embedding, or the table's default."""
        if (table, key) in self.values:
            return self.values[table, key][:DIM].tolist()
        return self.embedding(SPECS[table].default or START, table, key).tolist()

    # -------------------------------------------------------------------------------------------------------- calls

    @rule(pairs=some_pairs, ahead=st.sampled_from([0, 1, 1, 1, 1, 2, 4]))
    def retrieve(self, pairs, ahead) -> None:
        """Insertions, refusals, evictions and expiries, as the rules say."""
        before, self.batch = self.batch, self.batch + ahead
        keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64)
        tables = torch.tensor([table for _, table in pairs], dtype=torch.int32)
        retrieval = self.store.retrieve(keys, tables, None, self.batch)
        went, inserted = {}, []
        for table, model in enumerate(self.models):
            mine = [key for key, number in pairs if number == table]
            status, gone = model.retrieve(mine, None, self.batch)
            assert retrieval.status[tables == table].tolist() == status
            for key in gone:
                went[table, key] = self.values.pop((table, key))
            for key in dict.fromkeys(mine):
                if key in model.rows and (table, key) not in self.values:
                    self.values[table, key] = self.fresh(table, key)
                    inserted.append((table, key))
        assert sorted(zip(*(c.tolist() for c in reversed(self.store.evicted(retrieval))))) == sorted(went)
        self.undoable = [*self.undoable[-1:], (retrieval, before, inserted, went)][-1 if ahead > 1 else -2 :]

    @precondition(lambda self: self.undoable)
    @rule()
    def undo(self) -> None:
        retrieval, self.batch, inserted, went = self.undoable.pop()
        self.store.undo(retrieval)
        for model in self.models:
            model.undo()
        for pair in inserted:
            del self.values[pair]
        self.values |= went

    @rule(keys=some_keys, table=st.sampled_from(NUMBERS))
    def find(self, keys, table) -> None:
        rows, status = self.store.find(torch.tensor(keys, dtype=torch.int64), table)
        assert rows.tolist() == [self.read(table, key) for key in keys]
        there = [KeyStatus.FOUND if (table, key) in self.values else KeyStatus.ABSENT for key in keys]
        assert status.tolist() == there

    @rule(keys=some_keys, table=st.sampled_from(NUMBERS), unit=st.sampled_from([-0.5, 0.25, 1.0]))
    def update(self, keys, table, unit) -> None:
        """Gradients of repeated keys are summed; keys without a row are skipped, nobody else."""
        self.step += 1
        grads = unit * torch.arange(1.0, 1 + len(keys) * DIM).view(len(keys), DIM)
        self.store.apply_gradients(torch.tensor(keys, dtype=torch.int64), grads, step=self.step, table=table)
        for key in dict.fromkeys(keys):
            if (table, key) in self.values:
                total = grads[[k for k, other in enumerate(keys) if other == key]].sum(0, keepdim=True)
                row = self.values[table, key].clone().view(1, -1)
                updating.row_update(row, total, RULE, self.step, RULE.lr, None, RowStorage(DataType.FP32))
                self.values[table, key] = row[0]

    @rule(keys=some_keys, table=st.sampled_from(NUMBERS))
    def erase(self, keys, table) -> None:
        status = self.store.erase(torch.tensor(keys, dtype=torch.int64), table).tolist()
        for key, code in zip(keys, status):
            assert code == (KeyStatus.ABSENT if self.values.pop((table, key), None) is None else KeyStatus.FOUND)
            self.models[table].rows.pop(key, None)
        self.undoable = []

    @rule(start=st.integers(-(2**40), 2**40), count=st.integers(100, 1500))
    def grow(self, start, count) -> None:
        self.retrieve([(start + 7 * i, 0) for i in range(count)], 1)

    @rule(table=st.sampled_from([None, *NUMBERS]))
    def clear(self, table) -> None:
        self.store.clear(table)
        for number in NUMBERS if table is None else [table]:
            spec = SPECS[number]
            self.models[number] = TableModel(spec.name, spec.capacity, spec.admission, spec.eviction)
        self.values = {(t, key): row for (t, key), row in self.values.items() if table is not None and t != table}
        self.undoable = []

    # ------------------------------------------------------------------------------------------------ save and load

    @rule()
    def save_and_load_by_hand(self) -> None:
        """Rows, metadata, counts and counters through the store's own calls, into another store."""
        other = EmbeddingStore(SPECS, dim=DIM, optimizer=RULE)
        for table in NUMBERS:
            keys, handles = self.store.export_table(table)
            numbers = torch.full((len(keys),), table, dtype=torch.int32)
            rows = torch.empty(len(keys), self.store.row_floats)
            self.store.gather(handles, keys, numbers, rows, None)
            metadata = self.store.read_metadata(handles)
            order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(len(keys)))
            shuffled = RowMetadata(metadata.last_used[order], metadata.frequency[order])
            other.load_rows(keys[order], numbers, rows[order], shuffled)
            other.load_admission_state(table, self.store.admission_state(table))
            other.load_counters(table, self.store.counters(table))
        self.store, self.undoable = other, []

    @rule(anew=st.booleans())
    def save_and_load_a_checkpoint(self, anew) -> None:
        """Through files, into another store, or over what is there."""
        with tempfile.TemporaryDirectory() as name:
            directory, alone = Path(name), LocalCommunicator()
            save_generation(
                directory, alone, lambda generation: RankPart(save_tables(generation, [self.store]), {}, {})
            )
            other = EmbeddingStore(SPECS, dim=DIM, optimizer=RULE) if anew else self.store
            load_tables(directory, Manifest.load(directory), alone, all_targets([other]))
        self.store, self.undoable = other, []

    # ------------------------------------------------------------------------------------------------------ compare

    @invariant()
    def agrees_with_the_dictionary(self) -> None:
        for table, model in enumerate(self.models):
            keys, handles = self.store.export_table(table)
            numbers = torch.full((len(keys),), table, dtype=torch.int32)
            metadata = self.store.read_metadata(handles)
            facts = zip(keys.tolist(), metadata.last_used.tolist(), metadata.frequency.tolist())
            assert {key: (used, frequency) for key, used, frequency in facts} == model.rows
            assert self.store.size(table) == len(model.rows)
            assert torch.equal(self.store.find_handles(keys, numbers), handles)
            rows = torch.empty(len(keys), self.store.row_floats)
            self.store.gather(handles, keys, numbers, rows, None)
            if len(keys):
                want = torch.stack([self.values[table, key] for key in keys.tolist()])
                assert torch.equal(rows[:, :USED].view(torch.int32), want.view(torch.int32))
            assert self.store.counters(table) == model.counters
            state = self.store.admission_state(table)
            if model.filter is None:
                assert dict(zip(state["keys"].tolist(), state["counts"].tolist())) == model.ghosts
            else:
                blocks = {block: cells for block, cells in model.filter.blocks.items() if any(cells)}
                assert dict(zip(state["blocks"].tolist(), state["cells"].tolist())) == blocks
        assert len(self.store) == len(self.values)


class LongMachine(Machine):
    """The same with more sequences, for the soak."""


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLongMachine = pytest.mark.soak(LongMachine.TestCase)
TestLongMachine.settings = settings(
    max_examples=200, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
