"""Early send: what leaves early is right or goes again, rows are updated once all their gradients are in, and each rule
that keeps it so is missed when it is taken away.

That it equals `sequential` wherever the others do: "nested+early" in the other files.
"""

import gc

import pytest
import torch
from small_model import Recommender, make_batch, make_pipeline, run_all, state_of

from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.errors import RemoteRankError
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.stages import commit, early, window
from nestpipe_kernels.stages.registry import STAGE_FUNCTIONS
from nestpipe_kernels.stages.state import BatchState, OwnerKeys
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_ranks_as_threads, run_scenario

EARLY = "nested+early"


def test_settings_that_it_does_not_go_with():
    message = r"early_send needs schedule='nested' and row_transfer='once', got '{}' and '{}'"
    with pytest.raises(ValueError, match=message.format("fwp", "once")):
        PipelineConfig(schedule="fwp", early_send=True)
    with pytest.raises(ValueError, match=message.format("nested", "per_micro_batch")):
        PipelineConfig(row_transfer="per_micro_batch", early_send=True)
    with pytest.raises(ValueError, match="early_send needs schedule 'nested', row_transfer 'once' and tables"):
        build_graph("dbp", early_send=True)


def scenario(**settings):
    """Three ranks, three micro-batches, and keys of which some are in all and some in few."""
    chosen = {"world_size": 3, "micro_batches": 3, "batches": 4, "uneven": False, "num_keys": 12, "samples": 6}
    return Scenario(**{**chosen, **settings})


def explored(case, order=0):
    graph = build_graph("nested", early_send=True)
    steps = Orders(graph, case.world_size, case.batches, case.micro_batches).random(order)
    return explore(graph, case.ranks(), steps, case.batches)


# ----------------------------------------------------------------------------------------------- what goes when


@pytest.fixture
def sent(monkeypatch):
    """(batch, name of the exchange) -> rows of all stores that this rank sends and gets, summed over ranks."""
    found = {}

    def post_rows(rank, batch, purpose, name, micro, outgoing, incoming):
        known = found.setdefault((batch.index, *name), [0, 0])
        known[0] += sum(len(move.positions) for move in outgoing)
        known[1] += sum(len(move.positions) for move in incoming)
        original(rank, batch, purpose, name, micro, outgoing, incoming)

    original = window.post_rows
    monkeypatch.setattr(window, "post_rows", post_rows)
    return found


def test_every_row_is_sent_once_and_in_the_window_before_if_it_can_be(sent):
    case = scenario()
    assert not explored(case).broken
    early_sent, whole = dict(sent), {}
    assert all(out == into for out, into in sent.values())
    sent.clear()
    graph = build_graph("nested")
    order = Orders(graph, case.world_size, case.batches, case.micro_batches).random(0)
    explore(graph, case.ranks(), order, case.batches)
    for (batch, _, micro), (rows, _) in sent.items():
        whole[batch, micro] = rows
    for batch in range(case.batches):
        kinds = [early_sent[batch, f"early.{kind}", 0][0] for kind in ("fresh", "soon", "urgent")]
        assert sum(kinds) == whole[batch, 0]
        assert (batch, "rows", 0) not in early_sent, "nothing goes again"
        for micro in (1, 2):
            assert early_sent[batch, "rows", micro][0] == whole[batch, micro]
        assert (batch == 0) == (kinds[1:] == [0, 0])
    for kind in ("fresh", "soon", "urgent"):
        assert sum(early_sent[batch, f"early.{kind}", 0][0] for batch in range(case.batches)) > 5


def test_rows_of_models_that_return_weights_are_updated_when_the_sum_is_known(sent):
    assert not explored(scenario(weight_loss=True)).broken
    for batch in range(1, 4):
        assert sent[batch, "early.soon", 0][0] == 0
        assert sent[batch, "early.urgent", 0][0] > 0


# ------------------------------------------------------------------------------------------------- outside access


def with_access(schedule, world_size=2, steps=6, weight=False):
    """Ranks read, erase and insert rows between steps, each at its own times; one rank reads twice in a row."""

    def body(rank, communicator):
        model, seen = Recommender(communicator), []
        with make_pipeline(model, schedule, num_micro_batches=3) as pipeline:
            iterator = iter([make_batch(10 * rank + t, 7, keys=12) for t in range(steps)])
            for step in range(steps):
                pipeline.progress(iterator)
                if step in (0, 3) and rank == 0:
                    rows, status = model.ebc.store("item").find(torch.arange(12))
                    seen.append((rows.tolist(), status.tolist()))
                if step in (1, 3) and rank == world_size - 1:
                    model.ebc.store("item").erase(torch.tensor([0, 1, 2, 3, 4]))
                if step == 2 and rank == 0:
                    model.ebc.store("user").erase(torch.tensor([0, 1, 2, 3, 4, 5]))
                    model.ebc.store("user").find_or_insert(torch.tensor([7, 1000]))
            return seen, state_of(pipeline)

    return run_ranks_as_threads(world_size, body, timeout_s=20.0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_outside_access_on_one_rank_alone(world_size):
    assert with_access(EARLY, world_size) == with_access("sequential", world_size)


def test_ordering_finding_5_rows_sent_early_go_again_after_outside_writes(monkeypatch):
    expected = with_access("sequential")

    def begin(rank, batch, micro):
        batch.resend = False
        original(rank, batch, micro)

    original = early.begin
    monkeypatch.setitem(STAGE_FUNCTIONS, "early_begin", begin)
    assert with_access(EARLY) != expected


def batches_of(rank, bad):
    return [make_batch(10 * rank + t, 7, keys=12, bad=bad if (t, rank) == (2, 1) else 0) for t in range(5)]


@pytest.mark.parametrize("bad", [1, 2])
def test_ordering_finding_1_rows_updated_before_a_bad_verdict_go_again(monkeypatch, bad):
    def train(schedule):
        return run_all(2, schedule, lambda r: batches_of(r, bad), [2], num_micro_batches=3, clustering="none")

    def begin(rank, batch, micro):
        batch.resend = False
        original(rank, batch, micro)

    def same(runs, others):
        return all(a.losses == b.losses and a.state == b.state for a, b in zip(runs, others))

    expected = train("sequential")
    assert [len(run.errors) for run in expected] == [1, 1]
    assert same(train(EARLY), expected)
    original = early.begin
    monkeypatch.setitem(STAGE_FUNCTIONS, "early_begin", begin)
    assert not same(train(EARLY), expected)


def test_batches_are_forgotten_when_their_rows_have_been_copied():
    with make_pipeline(Recommender(), EARLY) as pipeline:
        iterator = iter([make_batch(t) for t in range(20)])

        def states_after(steps):
            for _ in range(steps):
                pipeline.progress(iterator)
            pipeline.drain()
            gc.collect()
            return sum(type(found) is BatchState for found in gc.get_objects())

        few = states_after(5)
        assert states_after(10) <= few + 1


class Loader:
    """Batches with keys of the batches around them, and an error instead of the third on the last rank."""

    def __init__(self, rank, world_size):
        self.number, self.rank, self.fails = -1, rank, rank == world_size - 1

    def __next__(self):
        self.number += 1
        if self.number == 2 and self.fails:
            raise OSError("no disk")
        if self.number == 6:
            raise StopIteration
        return make_batch(10 * self.rank + self.number, 7, keys=9)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_that_all_ranks_skip_is_not_the_one_before(world_size):
    def train(schedule):
        def body(rank, communicator):
            seen, loader = [], Loader(rank, world_size)
            with make_pipeline(Recommender(communicator), schedule, num_micro_batches=3) as pipeline:
                for _ in range(6):
                    try:
                        seen.append(pipeline.progress(loader).tolist())
                    except (OSError, RemoteRankError) as error:
                        seen.append(str(error))
                return seen, state_of(pipeline)

        return run_ranks_as_threads(world_size, body, timeout_s=20.0)

    expected = train("sequential")
    assert [[step for step in range(6) if isinstance(seen[step], str)] for seen, _ in expected] == [[2]] * world_size
    assert train(EARLY) == expected


# -------------------------------------------------------------------------------------------- returned weights


class LateWeights(Recommender):
    """Returns a weight from its fourth batch on."""

    def forward(self, batch):
        loss, logits = super().forward(batch)
        return (loss, logits, 2.0) if float(batch.dense[0, 0]) > 50 else (loss, logits)


def test_weights_that_come_late_fail_the_batches_that_are_on_their_way():
    batches = [make_batch(t) for t in range(8)]
    for batch in batches[3:]:
        batch.dense = batch.dense + 100
    (run,) = run_all(1, EARLY, lambda r: batches, [3, 4, 5], LateWeights)
    assert len(run.errors) == 3
    for (_, error), (before, after) in zip(run.errors, run.around_errors):
        assert isinstance(error, TypeError)
        assert str(error) == (
            "the model returned a weight, after batches without one: with early_send it must return one always or "
            "never, since rows are updated before the sum of weights is known. This batch, and those drawn ahead, are "
            "not trained"
        )
        assert before == after
    plain = run_all(1, "nested", lambda r: batches[:3] + batches[6:], [], LateWeights)[0]
    assert (run.losses, run.state.rows) == (plain.losses, plain.state.rows)


class WeightsInTraining(Recommender):
    """Returns a weight, but not when it is evaluated."""

    def forward(self, batch):
        loss, logits = super().forward(batch)
        return (loss, logits, 2.0) if self.training else (loss, logits)


def test_evaluation_does_not_tell_whether_training_returns_weights():
    def train(schedule):
        with make_pipeline(model := WeightsInTraining(), schedule) as pipeline:
            iterator, seen = iter([make_batch(t) for t in range(6)]), []
            for step in range(6):
                seen.append(pipeline.progress(iterator).tolist())
                if step == 2:
                    model.eval()
                    pipeline.progress(iter([make_batch(50)]))
                    model.train()
            return seen, state_of(pipeline)

    assert train(EARLY) == train("sequential")


# ------------------------------------------------------------------------------- rules, each taken away in turn


def mutate_last_use(monkeypatch):
    """The last use of a row by the first source that has it, instead of by any."""

    def last_use(self):
        if self.last_micro is None:
            self.last_micro = torch.full((len(self.keys),), -1, dtype=torch.int64)
            last = torch.zeros(len(self.slot), dtype=torch.int64)
            for micro, move in enumerate(self.grads):
                last[move.positions] = micro
            for slot, micro in zip(self.slot.tolist(), last.tolist()):
                if self.last_micro[slot] < 0:
                    self.last_micro[slot] = micro
        return self.last_micro

    monkeypatch.setattr(OwnerKeys, "last_use", last_use)


def mutate_soon(monkeypatch):
    """Every shared row counts as done with before the last micro-batch."""

    def sort_rows(known, owner, before, store, last):
        return original(known, owner, before, store, last + 1)

    original = early._sort_rows
    monkeypatch.setattr(early, "_sort_rows", sort_rows)


def mutate_first(monkeypatch):
    """Only rows that the first source needs in its first micro-batch are sent early, whatever the others need."""

    def chosen(move, mask):
        mask = mask.clone()
        mask[move.per_peer[0] :] = False
        return original(move, mask)

    original = early._chosen
    monkeypatch.setattr(early, "_chosen", chosen)


def mutate_pending(monkeypatch):
    """Rows that were updated early are updated again with the rest."""

    def update(rank, batch, micro):
        for owner in batch.owner:
            owner.pending = None
        original(rank, batch, micro)

    original = early.update
    monkeypatch.setitem(STAGE_FUNCTIONS, "early_update", update)


def mutate_copy(monkeypatch):
    """Urgent rows are sent as they were gathered."""
    monkeypatch.setattr(early, "_copy_kind", lambda rank, batch, kind: None)


def mutate_order(monkeypatch):
    """Sources are summed in descending order."""

    def sum_sources(rank, batch, owner, chosen=None):
        original(rank, batch, owner, chosen)
        rows = torch.ones(len(owner.keys), dtype=torch.bool) if chosen is None else chosen
        starts = [sum(owner.per_peer[:p]) for p in range(len(owner.per_peer))]
        total = torch.zeros_like(owner.row_gradients)
        for start, length in reversed(list(zip(starts, owner.per_peer))):
            total.index_add_(0, owner.slot[start : start + length], owner.boxes[start : start + length])
        owner.row_gradients[rows] = total[rows] / len(starts)

    original = commit.sum_sources
    monkeypatch.setattr(commit, "sum_sources", sum_sources)


def mutate_division(monkeypatch):
    """Rows updated early are not divided by the number of ranks."""

    def sum_sources(rank, batch, owner, chosen=None):
        before = None if owner.row_gradients is None else owner.row_gradients.clone()
        original(rank, batch, owner, chosen)
        if before is not None:
            owner.row_gradients[chosen] *= 3

    original = commit.sum_sources
    monkeypatch.setattr(commit, "sum_sources", sum_sources)


RULES = [mutate_last_use, mutate_soon, mutate_first, mutate_pending, mutate_copy, mutate_order, mutate_division]


@pytest.mark.parametrize("mutate", RULES)
def test_a_broken_rule_is_seen(monkeypatch, mutate):
    case = scenario()
    expected = explored(case)
    assert not expected.broken
    mutate(monkeypatch)
    assert expected.difference(explored(case))


def test_bits_do_not_depend_on_when_rows_are_updated():
    """Few and many micro-batches, with the weights of models that return some, and gradients that do not count."""
    for settings in ({"weight_loss": True}, {"bad_labels": 0.1, "nan_policy": "skip_row"}, {"micro_batches": 8}):
        case = scenario(world_size=2, uneven=True, seed=4, **settings)
        assert run_scenario(case, "sequential").difference(run_scenario(case, EARLY)) == ""
