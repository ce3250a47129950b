"""Gradients that are not finite, batches that fail: nothing changes on any rank, later results are as without them."""

import pytest
import torch
from small_model import EXACT, Batch, Recommender, make_batch, make_pipeline, make_tables, run_all, state_of

import nestpipe_kernels as nk
from nestpipe_kernels.errors import NonFiniteGradientError, RemoteRankError
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.testing.threads import run_ranks_as_threads

WORLD = 2
BAD_STEP = 2
KINDS = {"sparse": 1, "dense": 2}


def batches_of(rank, bad=0, without=False):
    """Five batches; the one at BAD_STEP brings new keys and, on rank 1, the bad gradient."""
    made = [make_batch(10 * rank + t) for t in range(5)]
    made[BAD_STEP] = make_batch(10 * rank + BAD_STEP, keys=9, first_key=3 if rank else 0, bad=bad if rank == 1 else 0)
    return [b for t, b in enumerate(made) if not (without and t == BAD_STEP)]


@pytest.fixture(scope="module")
def reference():
    return run_all(WORLD, "sequential", lambda r: batches_of(r, without=True), clustering="none")


@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", EXACT)
def test_fault_26_raise_changes_nothing_on_any_rank(reference, schedule, kind, transfer):
    runs = run_all(
        WORLD, schedule, lambda r: batches_of(r, KINDS[kind]), [BAD_STEP], row_transfer=transfer, clustering="none"
    )
    for run, expected in zip(runs, reference):
        ((number, error),) = run.errors
        assert number == BAD_STEP
        assert isinstance(error, NonFiniteGradientError)
        text = str(error)
        assert text.startswith(f"batch {BAD_STEP}: ")
        assert text.endswith(
            "are not finite; nothing was changed on any rank and the batch counts as consumed. "
            "Look for the source in the model, or use PipelineConfig(nan_policy='skip_row')"
        )
        assert ("row gradients (table '" in text) == (kind == "sparse")
        assert ("dense gradients" in text) == (kind == "dense")
        before, after = run.around_errors[0]
        assert before == after
        assert run.losses == expected.losses
        assert run.outputs == expected.outputs
        assert run.state == expected.state


@pytest.mark.parametrize("schedule", EXACT[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_skip_row_is_alike_in_every_schedule(schedule, kind):
    def once(name):
        return run_all(WORLD, name, lambda r: batches_of(r, KINDS[kind]), nan_policy="skip_row")

    expected, runs = once("sequential"), once(schedule)
    assert runs == expected


def test_fault_26_skip_row_leaves_out_only_the_bad_rows():
    bad = run_all(1, "nested", lambda r: [make_batch(1, bad=1)], nan_policy="skip_row", clustering="none")[0]
    good = run_all(1, "nested", lambda r: [make_batch(1)], clustering="none")[0]
    batch = make_batch(1)
    # Two micro-batches of three samples: the bad sample (3) spoils the second.
    touched = {(f, k) for f in ("user", "item") for s in (3, 4, 5) for k in bag(batch, f, s)}
    assert bad.skipped_rows == [len(touched)]
    fresh = run_all(1, "nested", lambda r: [make_batch(1, bad=1)], [0])[0].state.rows
    assert fresh == {}
    for row, value in bad.state.rows.items():
        assert (value == good.state.rows[row]) == (row not in touched), row
    assert bad.state.dense == good.state.dense
    assert {k for k, v in bad.state.rows.items() if v.endswith(b"\0\0\0\0")} == touched, "updates must stay 0"


def bag(batch, feature, sample):
    return (
        batch.sparse[feature]
        .values()[batch.sparse[feature].offsets()[sample] : batch.sparse[feature].offsets()[sample + 1]]
        .tolist()
    )


def test_skip_row_with_a_bad_dense_gradient_leaves_the_dense_step_out():
    bad = run_all(1, "nested", lambda r: [make_batch(1, bad=2)], nan_policy="skip_row")[0]
    good = run_all(1, "nested", lambda r: [make_batch(1)])[0]
    start = run_all(1, "nested", lambda r: [])[0]
    assert bad.skipped_rows == [0]
    assert bad.state.rows == good.state.rows
    assert bad.state.dense == start.state.dense


class Stumbling(Recommender):
    """Raises on one rank, in the forward of batches with a mark."""

    def forward(self, batch):
        result = super().forward(batch)
        if bool((batch.bad == 3).any()):
            raise OverflowError("too much")
        return result


@pytest.mark.parametrize("schedule", EXACT)
def test_a_forward_that_raises_changes_nothing_on_any_rank(reference, schedule):
    runs = run_all(WORLD, schedule, lambda r: batches_of(r, 3), [BAD_STEP], Stumbling, clustering="none")
    here, there = runs[1].errors[0][1], runs[0].errors[0][1]
    assert isinstance(here, OverflowError)
    assert isinstance(there, RemoteRankError)
    assert str(there) == f"rank 1 failed in forward_backward of batch {BAD_STEP}: OverflowError: too much"
    for run, expected in zip(runs, reference):
        assert run.around_errors[0][0] == run.around_errors[0][1]
        assert run.losses == expected.losses
        assert run.state == expected.state


class Normed(Recommender):
    """With running statistics, which every forward changes."""

    def __init__(self, communicator=None):
        super().__init__(communicator)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, batch):
        return super().forward(Batch(batch.sparse, self.norm(batch.dense), batch.label, batch.bad))


@pytest.mark.filterwarnings("ignore:batch statistics")
def test_a_bad_batch_leaves_no_trace_in_running_statistics():
    def buffers_after(batches):
        model = Normed()
        with make_pipeline(model) as pipeline:
            iterator = iter(batches)
            for batch in batches:
                if bool(batch.bad.any()):
                    with pytest.raises(NonFiniteGradientError):
                        pipeline.progress(iterator)
                else:
                    pipeline.progress(iterator)
        return [buffer.tolist() for buffer in model.norm.buffers()], model.linear.weight.tolist()

    expected = buffers_after([make_batch(0), make_batch(2)])
    assert buffers_after([make_batch(0), make_batch(1, bad=2), make_batch(2)]) == expected
    assert expected[0][2] == 4, "two batches of two micro-batches"


class BadElement(torch.autograd.Function):
    """The identity, with a gradient that is NaN in the row or element of a mark."""

    @staticmethod
    def forward(ctx, x, marks):
        ctx.marks = marks
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(ctx.marks, torch.nan, gradient), None


class OneBadGradient(Recommender):
    """Mark 4 of a sample spoils its keys' gradients alone, mark 5 of sample i the gradient of the i-th dense weight."""

    def forward(self, batch):
        pooled = BadElement.apply(self.ebc(batch.sparse).values(), (batch.bad == 4)[:, None])
        marks = torch.zeros_like(self.linear.weight, dtype=torch.bool)
        marks[0, : len(batch.bad)] = batch.bad == 5
        weight = BadElement.apply(self.linear.weight, marks)
        logits = (torch.cat([pooled, batch.dense], 1) @ weight.t()).squeeze(1) + self.linear.bias
        return ((logits - batch.label) ** 2).mean(), logits


@pytest.mark.parametrize("policy", ["raise", "skip_row"])
@pytest.mark.parametrize("mark", [4, 5])
def test_fault_26_what_one_owner_alone_sees_all_ranks_hear(mark, policy):
    """A bad row, or slice of the dense gradients, is on one rank; whichever it is, all decide alike."""
    size = 8
    lengths = torch.tensor([1] * size + [0] * size)

    def batch_with(bad, rank):
        marks = torch.zeros(size)
        if bad is not None and rank == 0:
            marks[bad] = mark
        sparse = KeyedJaggedTensor(["user", "item"], torch.arange(size), lengths=lengths)
        return Batch(sparse, torch.ones(size, 2), torch.ones(size), marks)

    plain = run_all(WORLD, "nested", lambda r: [batch_with(None, r)] * 2, model_of=OneBadGradient)
    owned = [{key for _, key in run.state.rows} for run in plain]
    assert all(owned), "each rank owns a key"
    for bad in range(size):
        runs = run_all(
            WORLD,
            "nested",
            lambda r, bad=bad: [batch_with(None, r), batch_with(bad, r)],
            [1] if policy == "raise" else [],
            OneBadGradient,
            nan_policy=policy,
        )
        if policy == "raise":
            texts = {str(error) for run in runs for _, error in run.errors}
            assert len(texts) == 1
            assert [len(run.errors) for run in runs] == [1, 1]
            assert all(before == after for run in runs for before, after in run.around_errors)
            assert (f"1 row gradients (table 'user' key {bad})" in texts.pop()) == (mark == 4)
        elif mark == 4:
            assert [run.skipped_rows for run in runs] == [[0, 1], [0, 1]]
            assert [run.state.dense for run in runs] == [run.state.dense for run in plain]
        else:
            assert [run.state.rows for run in runs] == [run.state.rows for run in plain]
            assert runs[0].state.dense == runs[1].state.dense
            assert runs[0].state.dense != plain[0].state.dense
            assert all(b"\xc0\x7f" not in part for part in runs[0].state.dense)


class Scaled(torch.autograd.Function):
    """The identity, with a gradient of a value that a mark asks for."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, ctx.value) if ctx.value else gradient, None


class ManyGradients(Recommender):
    """Gradients of all pooled rows are the greatest mark, if there is one."""

    def forward(self, batch):
        pooled = Scaled.apply(self.ebc(batch.sparse).values(), float(batch.bad.max()) if len(batch.bad) else 0.0)
        logits = self.linear(torch.cat([pooled, batch.dense], 1)).squeeze(1)
        return ((logits - batch.label) ** 2).mean(), logits


def one_key(mark, key=3):
    sparse = KeyedJaggedTensor(["user", "item"], torch.tensor([key]), lengths=torch.tensor([1, 0]))
    return Batch(sparse, torch.ones(1, 2), torch.ones(1), torch.full((1,), mark))


@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
def test_a_gradient_whose_sum_could_overflow_does_not_count(transfer):
    """float32 ends at 3.4e38: of two ranks, each may have a quarter of it."""
    for value, errors in ((8.4e37, 0), (8.6e37, 1)):
        runs = run_all(
            WORLD, "nested", lambda r, value=value: [one_key(value)], [0], ManyGradients, row_transfer=transfer
        )
        assert [len(run.errors) for run in runs] == [errors] * 2
        if errors:
            text = str(runs[0].errors[0][1])
            assert "2 row gradients (table 'user' key 3; table 'user' key 3) are not finite" in text


def test_sources_count_their_own_bad_gradients_and_rows_are_left_out_once():
    """Rank 0's is bad, rank 1's is not: the row is left out; both bad: two gradients, still one row."""
    for marks, count in (((float("inf"), 0.0), 1), ((float("inf"), float("nan")), 2), ((0.0, 0.0), 0)):
        runs = run_all(
            WORLD, "nested", lambda r, m=marks: [one_key(m[r])], model_of=ManyGradients, nan_policy="skip_row"
        )
        assert [run.skipped_rows for run in runs] == [[count]] * 2
        ((updates),) = [value[-4:] for run in runs for value in run.state.rows.values()]
        assert (updates == b"\0\0\0\0") == (count > 0)


def test_the_gradient_of_a_key_without_a_row_counts_like_any_other():
    def model(communicator):
        return ManyGradients(communicator, make_tables(admission=nk.policy.MinFrequency(5)))

    ((_, error),) = run_all(1, "nested", lambda r: [one_key(float("inf"))], [0], model)[0].errors
    assert "1 row gradients (table 'user' key 3) are not finite" in str(error)


@pytest.mark.parametrize("rate", [float("nan"), 1e39, "fast"])
@pytest.mark.parametrize("schedule", EXACT)
def test_a_rate_that_no_update_can_use_fails_its_batch_on_all_ranks(schedule, rate):
    """Rank 1's scheduler went wrong; the rows would be NaN on the rank, and the other one would wait for it."""

    def body(rank, communicator):
        with make_pipeline(Recommender(communicator), schedule) as pipeline:
            iterator = iter([make_batch(10 * rank + t, 3) for t in range(4)])
            group = pipeline.model.ebc.sparse_optimizer.param_groups[0]
            pipeline.progress(iterator)
            before, good = state_of(pipeline), group["lr"]
            group["lr"] = rate if rank == 1 else good
            with pytest.raises((ValueError, TypeError, RemoteRankError)) as caught:
                pipeline.progress(iterator)
            after, group["lr"] = state_of(pipeline), good
            pipeline.progress(iterator)
            return str(caught.value), before == after, pipeline.step_count

    (message_0, *rest_0), (message_1, *rest_1) = run_ranks_as_threads(2, body, timeout_s=20.0)
    assert message_0.startswith("rank 1 failed in learning_rates")
    assert "sparse optimizer: lr of table 'user' (param_groups[0])" in message_0
    assert f"got {rate!r}" in message_1
    assert rest_0 == rest_1 == [True, 2]
