"""Rules that no edge of the graph stands for: each is taken away in turn, and the result must show it."""

import pytest
import torch
from small_model import Recommender, make_batch, make_pipeline, run_all, state_of

from nestpipe_kernels import optim
from nestpipe_kernels.comm import InMemoryWorld
from nestpipe_kernels.ops.intersect import intersect
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.ops.scatter_add_rows import scatter_add_rows
from nestpipe_kernels.ops.take_rows import take_rows
from nestpipe_kernels.pipeline import train_pipeline
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.stages import commit, lookup_function, retrieval, routing, window
from nestpipe_kernels.stages.registry import STAGE_FUNCTIONS
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.types import Retrieval


def scenario(**settings):
    """Three ranks, so that the order of a sum of three shows; every batch shares keys with its neighbours."""
    return Scenario(**{"world_size": 3, "micro_batches": 2, "batches": 4, "uneven": False, "num_keys": 5, **settings})


def run(case, schedule="nested", world=None, order=0):
    """One exploration; `order`: a seed, or a priority of nodes."""
    graph = build_graph(schedule, case.row_transfer)
    orders = Orders(graph, case.world_size, case.batches, case.micro_batches)
    steps = (
        orders.random(order) if isinstance(order, int) else orders._sort(*orders._adjacency(""), order(orders.steps))
    )
    return explore(graph, case.ranks(world), steps, case.batches)


def assert_seen(monkeypatch, case, mutate, schedule="nested", what="", **settings):
    """The run without the rule differs from the run with it, but does not break down."""
    expected = run(case, schedule, **settings)
    assert not expected.broken
    mutate(monkeypatch)
    difference = expected.difference(run(case, schedule, **settings))
    assert what in difference
    assert "differ" in difference


# ----------------------------------------------------------------------------------------------------- sum orders


def summed_otherwise(order, early_division=False):
    """reduce_grads with another order of sources, or with the division by W before the sum."""

    def reduce_grads(rank, batch, micro):
        world = rank.communicator.size
        for binding, owner in zip(rank.bindings, batch.owner):
            starts = [sum(owner.per_peer[:p]) for p in range(world)]
            total = torch.zeros(len(owner.keys), binding.store.dim)
            for peer in order(world):
                chosen = slice(starts[peer], starts[peer] + owner.per_peer[peer])
                part = owner.boxes[chosen]
                scatter_add_rows(total, owner.slot[chosen], part / world if early_division else part)
            owner.row_gradients = total if early_division else total / world
            owner.boxes, owner.countable = None, torch.ones(len(owner.keys), dtype=torch.bool)

    return lambda monkeypatch: monkeypatch.setitem(STAGE_FUNCTIONS, "reduce_grads", reduce_grads)


def test_the_written_sum_is_what_reduce_grads_does(monkeypatch):
    case = scenario()
    expected = run(case)
    summed_otherwise(range)(monkeypatch)
    assert expected.difference(run(case)) == ""


def test_sources_summed_in_descending_order(monkeypatch):
    assert_seen(monkeypatch, scenario(), summed_otherwise(lambda world: reversed(range(world))))


def test_sources_summed_as_they_arrive(monkeypatch):
    assert_seen(monkeypatch, scenario(), summed_otherwise(lambda world: [1, 2, 0]))


def test_division_by_the_number_of_ranks_before_the_sum(monkeypatch):
    assert_seen(monkeypatch, scenario(), summed_otherwise(range, early_division=True))


def test_micro_batches_summed_in_descending_order(monkeypatch):
    """Each micro-batch's gradient is kept apart and all are added at the end, last first."""
    kept = {}

    def accumulate(plan, keys, slots, grads):
        whole, plan.gradients = plan.gradients, torch.zeros_like(plan.gradients)
        original(plan, keys, slots, grads)
        part, plan.gradients = plan.gradients, whole
        parts = kept.setdefault(id(plan), (plan, []))[1]
        parts.insert(0, part)
        plan.gradients.zero_()
        for one in parts:
            plan.gradients += one

    original = window.accumulate_gradients
    case = scenario(world_size=1, micro_batches=3, samples=6)
    assert_seen(monkeypatch, case, lambda m: m.setattr(window, "accumulate_gradients", accumulate))


def test_dense_gradients_summed_in_descending_order(monkeypatch):
    def dense_sum(rank, batch, micro):
        world = rank.communicator.size
        slices = batch.handles["dense.slices", 0].wait().view(world, -1)
        slices.copy_(slices.flip(0))
        original(rank, batch, micro)

    original = commit.dense_sum
    assert_seen(monkeypatch, scenario(seed=1), lambda m: m.setitem(STAGE_FUNCTIONS, "dense_sum", dense_sum))


# ------------------------------------------------------------------------------------------- gradients and updates


def test_accumulators_that_are_not_zeroed_after_a_send(monkeypatch):
    case = scenario(row_transfer="per_micro_batch")
    assert_seen(monkeypatch, case, lambda m: m.setattr(window, "take_rows", lambda rows, i: take_rows(rows.clone(), i)))


def test_fault_27_an_update_in_every_micro_batch(monkeypatch):
    def recv_grads(rank, batch, micro):
        original(rank, batch, micro)
        for binding, owner in zip(rank.bindings, batch.owner):
            total = torch.zeros(len(owner.keys), binding.store.dim)
            total.index_add_(0, owner.slot, owner.boxes)
            total /= rank.communicator.size
            row_update(owner.buffer, total, binding.store.optimizer, rank.step_count + 1, binding.store.optimizer.lr)
            owner.boxes.zero_()

    original = window.recv_grads
    case = scenario(row_transfer="per_micro_batch", optimizer=optim.SGD(lr=0.2))
    assert_seen(monkeypatch, case, lambda m: m.setitem(STAGE_FUNCTIONS, "recv_grads", recv_grads), "fwp")


@pytest.mark.parametrize("lost", ["state", "updates"])
def test_a_write_back_of_less_than_the_row(monkeypatch, lost):
    def write_back(rank, batch, micro):
        for binding, owner in zip(rank.bindings, batch.owner):
            store = binding.store
            old = torch.empty_like(owner.buffer)
            store.gather(owner.retrieval.handles, owner.keys, owner.tables, old, None)
            updates = store.dim + store.optimizer.state_floats(store.dim)
            first, end = (store.dim, updates) if lost == "state" else (updates, updates + 1)
            owner.buffer[:, first:end] = old[:, first:end]
        original(rank, batch, micro)

    original = retrieval.write_back
    # Without shared buffers, what the store lost is what the next batch reads.
    case = scenario(optimizer=optim.Adagrad(lr=0.2))
    assert_seen(monkeypatch, case, lambda m: m.setitem(STAGE_FUNCTIONS, "write_back", write_back), "fwp")


def test_skipped_undo_after_a_bad_verdict(monkeypatch):
    def batches(rank):
        return [make_batch(0), make_batch(1, first_key=3, bad=1), make_batch(2)]

    ((before, after),) = run_all(1, "nested", batches, [1])[0].around_errors
    assert before == after
    monkeypatch.setattr(train_pipeline, "undo_retrieval", lambda rank, batch: None)
    ((before, after),) = run_all(1, "nested", batches, [1])[0].around_errors
    assert before.rows != after.rows
    assert before.metadata != after.metadata


# ------------------------------------------------------------------------------------------------------ aliasing


def prefetch_early(steps):
    """Every batch is drawn as early as the graph allows, and routed as late."""
    late = {"prefetch": 0, "route": 2}
    return [late.get(node.stage, 1) for _, node in steps]


class Refilling:
    """A loader that fills the same tensors anew for every batch."""

    def __init__(self, batches):
        self.batches = iter(batches)
        self.own = None

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.batches)
        if self.own is None:
            self.own = batch
        else:
            self.own.dense.copy_(batch.dense)
            self.own.label.copy_(batch.label)
        return self.own


def test_fault_39_a_prefetch_that_does_not_copy(monkeypatch):
    case = scenario(world_size=2)
    plain = Scenario.loader
    monkeypatch.setattr(Scenario, "loader", lambda self, r, g: Refilling(plain(self, r, g)))

    def prefetch(rank, batch, micro):
        original(rank, batch, micro)
        batch.raw = rank.source.iterator.own

    original = routing.prefetch
    assert_seen(
        monkeypatch,
        case,
        lambda m: m.setitem(STAGE_FUNCTIONS, "prefetch", prefetch),
        "sequential",
        order=prefetch_early,
    )


def test_fault_39_a_loader_that_refills_its_tensors_is_harmless():
    batches = [make_batch(t) for t in range(5)]
    for batch in batches:
        batch.sparse = batches[0].sparse
    expected = run_all(1, "nested", lambda r: batches)[0]

    def refilled():
        return Refilling([make_batch(t) for t in range(5)])

    with make_pipeline(Recommender()) as pipeline:
        losses = [float(step.loss) for step in pipeline.run(refilled())]
        assert (losses, state_of(pipeline)) == (expected.losses, expected.state)


def test_a_send_buffer_that_is_used_again_before_it_is_read(monkeypatch):
    case, scratch = scenario(), torch.empty(4096)

    def gather_rows(source, positions, dim, **storage):
        rows = scratch[: len(positions) * dim].view(len(positions), dim)
        rows.copy_(original(source, positions, dim, **storage))
        return rows

    def world():
        return InMemoryWorld(case.world_size, timeout_s=0, late_read=True)

    original = window.gather_rows
    expected = run(case)
    assert expected.difference(run(case, world=world())) == ""
    monkeypatch.setattr(window, "gather_rows", gather_rows)
    assert "differ" in expected.difference(run(case, world=world()))


class Keeping(Recommender):
    """Keeps the embeddings it was given, and what they were."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.ebc.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.kept.append((output.values().detach(), output.values().detach().clone()))


def test_outputs_that_alias_a_buffer(monkeypatch):
    def changed():
        model = Keeping()
        with make_pipeline(model) as pipeline:
            list(pipeline.run([make_batch(t) for t in range(3)]))
        return [not now.equal(then) for now, then in model.kept]

    assert not any(changed())
    scratch = torch.empty(4096)

    def forward(self):
        return tuple(scratch[: fresh.numel()].view_as(fresh).copy_(fresh) for fresh in original(self))

    original = lookup_function.PendingLookup.forward
    monkeypatch.setattr(lookup_function.PendingLookup, "forward", forward)
    assert any(changed())


# ---------------------------------------------------------------------------------------------------- dual buffers


def test_slots_mixed_up_in_sync(monkeypatch):
    def row_sync(source, target, source_index, target_index):
        original(source, target, source_index, target_index.roll(1))

    original = retrieval.row_sync
    assert_seen(monkeypatch, scenario(), lambda m: m.setattr(retrieval, "row_sync", row_sync))


def test_sync_of_a_key_that_has_no_row(monkeypatch):
    """Keys that were refused read the default row: a neighbour's buffer holds an updated copy, which must not count."""

    def refuse(rank, batch, micro):
        original_retrieve(rank, batch, micro)
        for owner in batch.owner:
            found = owner.retrieval
            handles = torch.where((owner.keys + batch.index) % 2 == 0, -1, found.handles)
            owner.retrieval = Retrieval(handles, found.status, found.journal)

    def gather_fresh(rank, batch, micro):
        before = batch.previous.owner if batch.previous is not None else []
        for k, (binding, owner) in enumerate(zip(rank.bindings, batch.owner)):
            owner.buffer = binding.buffer(batch.index % 2, len(owner.keys), rank.poison)
            binding.store.gather(owner.retrieval.handles, owner.keys, owner.tables, owner.buffer, None)
            if before:
                owner.shared_before, owner.shared_here = intersect(
                    before[k].keys, before[k].tables, owner.keys, owner.tables
                )

    original_retrieve = retrieval.retrieve
    monkeypatch.setitem(STAGE_FUNCTIONS, "retrieve", refuse)
    case = scenario()
    expected = run(case, "sequential")
    assert not expected.broken
    for order in range(3):
        assert expected.difference(run(case, "nested", order=order)) == ""
    monkeypatch.setitem(STAGE_FUNCTIONS, "gather_fresh", gather_fresh)
    assert "differ" in expected.difference(run(case, "nested"))
