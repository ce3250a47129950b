"""Bad input, bad settings and bad models: one clear error before anything changed; the texts are tested here."""

import re
import warnings

import pytest
import torch
from small_model import (
    EXACT,
    Batch,
    Recommender,
    make_batch,
    make_pipeline,
    make_tables,
    run_all,
    run_rank,
    state_of,
)
from torch import nn

from nestpipe_kernels import optim
from nestpipe_kernels.comm import InMemoryWorld
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.errors import CaptureError, RemoteRankError
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"schedule": "fast"}, "unknown schedule 'fast': choose one of sequential, dbp, fwp, nested, async"),
        ({"row_transfer": "twice"}, "unknown row_transfer 'twice': choose one of once, per_micro_batch"),
        ({"clustering": "best"}, "unknown clustering 'best': choose one of key, none"),
        ({"loss_weighting": "max"}, "unknown loss_weighting 'max': choose one of mean, sum"),
        ({"nan_policy": "ignore"}, "unknown nan_policy 'ignore': choose one of raise, skip_row"),
        ({"num_micro_batches": 0}, "num_micro_batches must be an integer >= 1 or 'auto', got 0"),
        ({"num_micro_batches": True}, "num_micro_batches must be an integer >= 1 or 'auto', got True"),
        ({"num_micro_batches": 2.0}, "num_micro_batches must be an integer >= 1 or 'auto', got 2.0"),
        ({"num_micro_batches": "many"}, "num_micro_batches must be an integer >= 1 or 'auto', got 'many'"),
        ({"edge_share": 0}, "edge_share must be a number > 0 and <= 1, got 0"),
        ({"balance": "tokens"}, "balance must be 'samples', 'keys' or a function of a batch, got 'tokens'"),
        ({"edge_share": True}, "edge_share must be a number > 0 and <= 1, got True"),
        ({"early_send": "no"}, "early_send must be True or False, got 'no'"),
        ({"lower_caller_priority": 1}, "lower_caller_priority must be True or False, got 1"),
        ({"num_micro_batches": 4096}, "num_micro_batches must be <= 4095, got 4096"),
        (
            {"num_micro_batches": 64, "row_transfer": "per_micro_batch"},
            "num_micro_batches must be <= 63 with row_transfer='per_micro_batch', got 64",
        ),
        ({"timeline_steps": 0}, "timeline_steps must be an integer >= 1, got 0"),
        ({"timeout_s": 0.0}, "timeout_s must be > 0 seconds, got 0.0"),
        ({"timeout_s": float("nan")}, "timeout_s must be > 0 seconds, got nan"),
        ({"timeout_s": "5"}, "timeout_s must be > 0 seconds, got '5'"),
        ({"threads": 0}, "threads must be an integer >= 1 or None, got 0"),
        ({"threads": 1.5}, "threads must be an integer >= 1 or None, got 1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings(settings, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PipelineConfig(**settings)


@pytest.mark.parametrize("name", ["sparse_inputs", "split_batch"])
def test_functions_are_functions(name):
    with pytest.raises(TypeError, match=f"{name} must be callable or None, got dict"):
        PipelineConfig(**{name: {}})


def test_a_device_is_named():
    with pytest.raises(TypeError, match=r"device must be a string \('cpu', 'cuda', 'npu', 'cuda:1'\) or None, got 1"):
        PipelineConfig(device=1)


# ------------------------------------------------------------------------------------------------------- batches


def fixed_tables():
    return [
        EmbeddingBagConfig(7, 4, "user", feature_names=["user"]),
        EmbeddingBagConfig(7, 4, "item", feature_names=["item"]),
    ]


def with_values(batch, change):
    values = batch.sparse.values().clone()
    sparse = KeyedJaggedTensor(
        ["user", "item"], change(values), lengths=batch.sparse.lengths(), stride=len(batch.label)
    )
    return Batch(sparse, batch.dense, batch.label, batch.bad)


def outside(values):
    values[4] = 7
    return values


def shorter_label(batch):
    return Batch(batch.sparse, batch.dense, batch.label[:-1], batch.bad)


def other_features(batch):
    sparse = KeyedJaggedTensor(["user", "thing"], batch.sparse.values(), lengths=batch.sparse.lengths())
    return Batch(sparse, batch.dense, batch.label, batch.bad)


def with_weights(batch):
    values, lengths = batch.sparse.values(), batch.sparse.lengths()
    sparse = KeyedJaggedTensor(["user", "item"], values, torch.ones(len(values)), lengths=lengths)
    return Batch(sparse, batch.dense, batch.label, batch.bad)


BAD_BATCHES = {
    "id outside": (
        lambda b: with_values(b, outside),
        IndexError,
        "EmbeddingBagCollection: table 'user', feature 'user': id 7 at position 4 (sample 4) is outside [0, 7); raise "
        "num_embeddings, or use UNBOUNDED for any id",
    ),
    "negative id": (
        lambda b: with_values(b, lambda v: v - 10),
        IndexError,
        "feature 'user': id -8 at position 0 (sample 0) is outside [0, 7)",
    ),
    "float keys": (
        lambda b: with_values(b, lambda v: v.to(torch.float32)),
        TypeError,
        "EmbeddingBagCollection: feature values must be int64 (or int32) [n], got float32 (shape [",
    ),
    "a tensor too short": (
        shorter_label,
        ValueError,
        "split: batch.label is a tensor [5], but dim 0 of every tensor in a batch must be the batch size, 6; pass "
        "split_batch= (a function `(batch, indices) -> list of micro-batches`)",
    ),
    "another feature": (
        other_features,
        ValueError,
        "EmbeddingBagCollection: features ['item'] are missing from the input, which has ['user', 'thing']",
    ),
    "unexpected weights": (
        with_weights,
        ValueError,
        "EmbeddingBagCollection: the input has per-sample weights, but is_weighted is False; construct the collection "
        "with is_weighted=True, or leave the weights out",
    ),
}


def plain_batches(rank, count=4):
    return [make_batch(100 * rank + t) for t in range(count)]


def fixed_model(communicator=None):
    return Recommender(communicator, fixed_tables())


@pytest.fixture(scope="module")
def reference():
    return run_all(2, "sequential", lambda r: [b for t, b in enumerate(plain_batches(r)) if t != 2], (), fixed_model)


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
@pytest.mark.parametrize("kind", BAD_BATCHES)
def test_fault_14_a_bad_batch_is_raised_by_its_own_step_and_changes_nothing(reference, kind, schedule):
    spoil, error_type, text = BAD_BATCHES[kind]

    def batches(rank):
        made = plain_batches(rank)
        made[2] = spoil(made[2]) if rank == 0 else made[2]
        return made

    runs = run_all(2, schedule, batches, [2], fixed_model)
    ((number, here),) = runs[0].errors
    assert number == 2
    assert isinstance(here, error_type)
    assert text in str(here)
    there = runs[1].errors[0][1]
    assert isinstance(there, RemoteRankError)
    assert (there.rank, there.batch) == (0, 2)
    assert str(there).startswith(f"rank 0 failed in {there.stage} of batch 2: {error_type.__name__}: ")
    assert there.message[:100] in f"{error_type.__name__}: {here}"
    for run, expected in zip(runs, reference):
        assert run.around_errors[0][0] == run.around_errors[0][1]
        assert run.losses == expected.losses
        assert run.state.rows == expected.state.rows
        assert run.state.dense == expected.state.dense


@pytest.mark.parametrize("settings", [{"clustering": "none"}, {"num_micro_batches": 1}, {}])
def test_positions_in_errors_are_those_of_the_whole_batch(settings):
    batches = iter([make_batch(1), with_values(make_batch(0), outside)])  # the first one's inputs are captured
    with make_pipeline(fixed_model(), **settings) as pipeline:
        pipeline.progress(batches)
        with pytest.raises(IndexError) as caught:
            pipeline.progress(batches)
    assert "id 7 at position 4 (sample 4) is outside" in str(caught.value)


def test_a_bad_first_batch_is_named_and_the_next_ones_train():
    pipeline = make_pipeline(fixed_model())
    batches = [with_values(make_batch(0), outside), make_batch(1)]
    run = run_rank(pipeline, batches, [0])
    assert "id 7 at position 4 (sample 4) is outside [0, 7)" in str(run.errors[0][1])
    assert len(run.losses) == 1


def test_a_batch_without_a_size_is_named():
    with make_pipeline(Recommender()) as pipeline, pytest.raises(ValueError) as caught:
        pipeline.progress(iter([{"text": "nothing"}]))
    assert str(caught.value).startswith(
        "batch_size_of: expected a batch with a tensor of at least one dimension or a KeyedJaggedTensor, got dict"
    )


@pytest.mark.parametrize("schedule", EXACT)
def test_a_loader_that_raises_is_heard_after_the_batch_before(schedule):
    def loader():
        yield make_batch(0)
        yield make_batch(1)
        raise OSError("disk gone")

    expected = run_rank(make_pipeline(Recommender()), [make_batch(0), make_batch(1)])
    pipeline, iterator = make_pipeline(Recommender(), schedule), loader()
    pipeline.progress(iterator)
    pipeline.progress(iterator)
    with pytest.raises(OSError, match=r"^disk gone$"):
        pipeline.progress(iterator)
    assert state_of(pipeline) == expected.state
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    pipeline.progress(iter([make_batch(2)]))
    pipeline.close()


# -------------------------------------------------------------------------------------------------------- models


def step_once(model, batch=None, **settings):
    with make_pipeline(model, **settings) as pipeline:
        pipeline.progress(iter([batch or make_batch(0), make_batch(1)]))


class Learned(Recommender):
    """Its keys depend on a parameter."""

    def forward(self, batch):
        shift = (self.linear.bias.detach() + 1).to(torch.int64)
        keys = KeyedJaggedTensor(["user", "item"], batch.sparse.values() + shift, lengths=batch.sparse.lengths())
        return super().forward(Batch(keys, batch.dense, batch.label, batch.bad))


class Sampling(Recommender):
    """Its keys depend on random numbers."""

    def forward(self, batch):
        noise = torch.randint(0, 2, batch.sparse.values().shape)
        keys = KeyedJaggedTensor(["user", "item"], batch.sparse.values() + noise, lengths=batch.sparse.lengths())
        return super().forward(Batch(keys, batch.dense, batch.label, batch.bad))


class Branching(Recommender):
    """The number of lookups depends on the data."""

    def forward(self, batch):
        if float(batch.dense[0, 0]) > 5:
            self.ebc(batch.sparse)
        return super().forward(batch)


class Skipping(Recommender):
    """One of its lookups is left out when the data say so."""

    def forward(self, batch):
        if float(batch.dense[0, 0]) <= 5:
            self.ebc(batch.sparse)
        return super().forward(batch)


class Switching(Recommender):
    """Which ids are looked up depends on the data."""

    def forward(self, batch):
        if float(batch.dense[0, 0]) > 5:
            keys = KeyedJaggedTensor(["user", "item"], batch.sparse.values() * 2, lengths=batch.sparse.lengths())
            batch = Batch(keys, batch.dense, batch.label, batch.bad)
        return super().forward(batch)


def test_keys_that_depend_on_a_parameter():
    with pytest.raises(CaptureError) as caught:
        step_once(Learned())
    assert str(caught.value) == (
        "capture: the input of module 'ebc' (call 0) cannot be computed from the batch: its values depend on parameter "
        "'linear.bias'; pass PipelineConfig(sparse_inputs=...) (a function `batch -> {module: [input per call]}`)"
    )


def test_keys_that_depend_on_random_numbers():
    with pytest.raises(CaptureError) as caught:
        step_once(Sampling())
    assert re.fullmatch(
        r"capture: the input of module 'ebc' \(call 0\) cannot be computed from the batch: its values depend on random "
        r"numbers \(aten\.randint.*\); pass PipelineConfig\(sparse_inputs=...\) .*",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Branching, "module 'ebc' is called 2 times in this batch, but 1 calls were planned from it"),
        (Skipping, "module 'ebc' was called 1 times in this batch, but 2 calls were planned from it"),
        (Switching, "capture: module 'ebc' call 0 received other ids than planned from the batch"),
    ],
)
def test_lookups_that_branch_on_data_are_caught_when_they_do(model, text):
    special = make_batch(1)
    special.dense[:, 0] = 6
    run = run_rank(make_pipeline(model()), [make_batch(0), special, make_batch(2)], [1])
    ((number, error),) = run.errors
    assert number == 1
    assert isinstance(error, CaptureError)
    assert text in str(error)
    assert "PipelineConfig(sparse_inputs=...)" in str(error)
    assert run.around_errors[0][0] == run.around_errors[0][1]
    assert len(run.losses) == 2


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda loss: loss, "a torch.float32 tensor of shape []"),
        (lambda loss: (loss,), "a tuple of 1 values"),
        (lambda loss: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("who", ["the model", "loss_fn"])
def test_a_model_that_returns_something_else(returned, text, who):
    class Wrong(Recommender):
        def forward(self, batch):
            return returned(super().forward(batch)[0])

    model, loss_fn = Wrong(), None
    if who == "loss_fn":
        model, loss_fn = Recommender(), lambda model, batch: returned(model(batch)[0])
    expected = f"{who} must return (loss, output) or (loss, output, weight), got {text}"
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}"):
        step_once(model, loss_fn=loss_fn)


def test_a_loss_that_is_no_tensor():
    class Wrong(Recommender):
        def forward(self, batch):
            return 0.5, super().forward(batch)[1]

    with pytest.raises(TypeError, match=r"^the model must return a floating-point loss tensor first, got float"):
        step_once(Wrong())


def test_a_loss_that_does_not_depend_on_anything_trainable():
    class Detached(Recommender):
        def forward(self, batch):
            loss, output = super().forward(batch)
            return loss.detach(), output

    with pytest.raises(RuntimeError, match="does not require grad"):
        step_once(Detached())


def test_a_parameter_with_a_sparse_gradient_is_named():
    class WithPlainTable(Recommender):
        def __init__(self):
            super().__init__()
            self.plain = nn.Embedding(3, 1, sparse=True)

        def forward(self, batch):
            loss, output = super().forward(batch)
            return loss + self.plain(torch.tensor([1])).sum(), output

    model = WithPlainTable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = NestedPipeline(model, optimizer, config=PipelineConfig(num_micro_batches=1))
    with pipeline, pytest.raises(ValueError) as caught:
        pipeline.progress(iter([make_batch(0)]))
    assert str(caught.value) == (
        "parameter 'plain.weight' has a sparse gradient; a pipeline averages dense gradients only: convert its module "
        "with nestpipe_kernels.EmbeddingBagCollection(optimizer=...) or set sparse=False"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"config": {"schedule": "nested"}}, "config must be a PipelineConfig, got dict"),
        ({"config": {}}, "config must be a PipelineConfig, got dict"),
        (
            {"loss_fn": PipelineConfig()},
            "loss_fn must be callable or None, got PipelineConfig; settings go by name: config=PipelineConfig(...)",
        ),
        (
            {"dense_optimizer": optim.SGD(lr=0.1)},
            "dense_optimizer must have a step() method, got SGD; row optimizers belong to the embedding modules; for "
            "several dense ones pass an object whose step() calls theirs",
        ),
    ],
)
def test_arguments_of_another_kind(arguments, text):
    with pytest.raises(TypeError) as caught:
        NestedPipeline(Recommender(), **arguments)
    assert str(caught.value) == f"NestedPipeline: {text}"


def test_a_model_that_is_none():
    with pytest.raises(TypeError, match=r"NestedPipeline: model must be a torch\.nn\.Module, got NoneType"):
        NestedPipeline(None)


@pytest.mark.parametrize("model", [nn.Linear(2, 1), EmbeddingBagCollection(fixed_tables())], ids=["none", "parameters"])
def test_a_model_without_tables_in_stores(model):
    with pytest.raises(ValueError) as caught:
        NestedPipeline(model)
    assert str(caught.value) == (
        "NestedPipeline: the model has no embedding module with an optimizer; call nk.convert(model, "
        "nk.optim.RowWiseAdagrad(lr=...)) first, or build EmbeddingBagCollection(tables, optimizer=...)"
    )


def test_modules_of_different_process_groups():
    worlds = InMemoryWorld(1), InMemoryWorld(1)
    model = nn.ModuleDict(
        {
            name: EmbeddingBagCollection(make_tables(), optimizer=optim.SGD(lr=1.0), process_group=w.communicator(0))
            for name, w in zip("ab", worlds)
        }
    )
    with pytest.raises(ValueError) as caught:
        NestedPipeline(model)
    assert str(caught.value) == (
        "NestedPipeline: modules 'a', 'b' use different process groups; give them the same one"
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"schedule": "dbp"}, "ranks disagree on schedule: rank 1 has dbp, rank 0 has nested; "),
        ({"num_micro_batches": 3}, "ranks disagree on num_micro_batches: rank 1 has 3, rank 0 has 2; "),
        (
            {"row_transfer": "per_micro_batch"},
            "ranks disagree on row_transfer: rank 1 has per_micro_batch, rank 0 has once; ",
        ),
        ({"nan_policy": "skip_row"}, "ranks disagree on nan_policy: rank 1 has skip_row, rank 0 has raise; "),
    ],
)
def test_ranks_that_disagree_are_told_before_anything_is_exchanged(settings, text):
    from nestpipe_kernels.testing.threads import run_ranks_as_threads

    def body(rank, communicator):
        try:
            make_pipeline(Recommender(communicator), **(settings if rank else {})).close()
        except ValueError as error:
            return str(error)
        return ""

    texts = run_ranks_as_threads(2, body, timeout_s=10)
    assert text in texts[1]
    assert "construct the pipeline alike on all ranks" in texts[0]


def test_batch_norm_is_named_when_batches_are_split():
    class Normed(Recommender):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    with pytest.warns(UserWarning, match="batch statistics") as caught:
        make_pipeline(Normed(), num_micro_batches=4).close()
    assert str(caught[0].message).startswith(
        "batch statistics of 'norm' will be taken over each of the 4 micro-batches, not over the whole batch, so the "
        "result differs from unsplit training; use num_micro_batches=1, freeze them (.eval()), or use a normalisation"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_pipeline(Normed(), num_micro_batches=1).close()


# ------------------------------------------------------------------------------------------------- wrong order


class Reentrant(Recommender):
    """Calls progress from inside a forward."""

    pipeline = None

    def forward(self, batch):
        if self.pipeline is not None:
            self.pipeline.progress(iter([]))
        return super().forward(batch)


def test_progress_from_inside_the_model():
    model = Reentrant()
    with make_pipeline(model) as pipeline:
        model.pipeline = pipeline
        with pytest.raises(RuntimeError, match=r"^progress\(\) was called from inside the model or loader of the same"):
            pipeline.progress(iter([make_batch(0)]))
        model.pipeline = None
        pipeline.progress(iter([make_batch(1)]))


def test_progress_from_inside_the_loader():
    def loader():
        pipeline.progress(iter([]))
        yield make_batch(0)

    with make_pipeline(Recommender()) as pipeline:
        with pytest.raises(RuntimeError, match=r"^progress\(\) was called from inside the model or loader"):
            pipeline.progress(loader())
        pipeline.progress(iter([make_batch(1)]))


def test_rows_cannot_be_read_while_a_step_runs():
    class Peeking(Recommender):
        def forward(self, batch):
            self.ebc.store("user").find(torch.tensor([1]))
            return super().forward(batch)

    with pytest.raises(
        RuntimeError, match=r"^rows cannot be read or written while a step is running \(from inside the"
    ):
        step_once(Peeking())


def test_a_hook_that_reads_rows_or_raises_stops_the_pipeline():
    model = Recommender()
    pipeline, batches = make_pipeline(model), [make_batch(t) for t in range(9)]
    pipeline.add_write_back_hook(lambda step, table, keys: model.ebc.store("user").find(keys))
    with pytest.raises(RuntimeError, match="rows cannot be read or written while a step is running"):
        list(pipeline.run(batches))
    with pytest.raises(RuntimeError) as caught:
        pipeline.progress(iter(batches))
    assert str(caught.value).startswith(
        "this pipeline stopped after an error and cannot go on: RuntimeError: rows cannot"
    )
    pipeline.close()


def test_a_closed_pipeline_says_so_and_close_is_idempotent():
    pipeline = make_pipeline(Recommender())
    pipeline.progress(iter([make_batch(0)]))
    pipeline.close()
    pipeline.close()
    for use in (lambda: pipeline.progress(iter([])), lambda: next(pipeline.run([make_batch(0)])), pipeline.drain):
        with pytest.raises(RuntimeError, match=r"^this pipeline is closed; build a new NestedPipeline$"):
            use()


@pytest.mark.parametrize(
    ("weight", "error_type", "text"),
    [
        (-1.0, ValueError, "loss_fn must return a weight that is finite and >= 0, got -1.0"),
        (float("nan"), ValueError, "loss_fn must return a weight that is finite and >= 0, got nan"),
        (torch.tensor(float("inf")), ValueError, "loss_fn must return a weight that is finite and >= 0, got inf"),
        ("2", TypeError, "loss_fn must return a number as the weight of its loss, got str"),
        (
            torch.ones(2),
            TypeError,
            "loss_fn must return a number as the weight of its loss, got a torch.float32 tensor",
        ),
    ],
)
def test_weights_that_cannot_be_weights(weight, error_type, text):
    with pytest.raises(error_type, match=f"^{re.escape(text)}"):
        step_once(Recommender(), loss_fn=lambda model, batch: (*model(batch), weight))


def test_progress_with_something_that_is_no_iterator():
    with make_pipeline(Recommender()) as pipeline:
        with pytest.raises(TypeError) as caught:
            pipeline.progress([make_batch(0)])
        assert str(caught.value) == (
            "progress() draws from an iterator, got list; pass iter(loader), made once for the epoch, "
            "or use run(loader)"
        )
        pipeline.progress(iter([make_batch(0)]))


@pytest.mark.parametrize("schedule", EXACT)
def test_a_full_table_fails_its_batch_and_changes_nothing(schedule):
    def tables():
        made = make_tables()
        made[0].capacity = 8
        return made

    def train(name):
        batches = [make_batch(0, keys=3), make_batch(1, size=30, keys=100, first_key=50), make_batch(2, keys=3)]
        return run_all(2, name, lambda r: batches, [1], lambda c: Recommender(c, tables()))

    runs = train(schedule)
    for run, expected in zip(runs, train("sequential")):
        ((number, error),) = run.errors
        assert number == 1
        assert re.match(r"table 'user': \d+ new keys of this batch have no room \(the first: \d+; this", str(error))
        assert run.around_errors[0][0] == run.around_errors[0][1]
        assert (run.losses, run.state) == (expected.losses, expected.state)
