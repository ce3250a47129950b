"""Lookups inside of torch.compile: one graph, the rows and losses of the same model run eagerly."""

from __future__ import annotations

import gc

import pytest
import torch
import torch._dynamo.testing
from compiled_cases import SIZE, Lookups, make_batch, train, train_as_rank
from lookups import StoreLookups
from torch import nn

import nestpipe_kernels as nk
from gloo_world import GlooWorld
from nestpipe_kernels.nn import compiled
from nestpipe_kernels.stages.lookup_function import run_lookup


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What other tests have compiled of the same code may be taken otherwise."""
    torch._dynamo.reset()


def rule():
    return nk.optim.Adagrad(lr=0.1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_model_is_one_graph_with_the_same_results(backend):
    losses, state, _ = train(None)
    found, compiled_state, graphs = train(backend)
    assert graphs == 1
    for got, wanted in zip([*found, *compiled_state.values()], [*losses, *state.values()], strict=True):
        tolerance = 2e-6 * float(wanted.abs().max()) if backend == "inductor" else 0.0  # it rounds sums otherwise
        assert torch.allclose(got, wanted, rtol=0, atol=tolerance)
    gc.collect()
    assert not compiled._pending


@pytest.mark.multiprocess
def test_ranks_exchange_for_compiled_lookups():
    world = GlooWorld(2)
    try:
        eager, found = world.run(train_as_rank, None), world.run(train_as_rank, "aot_eager")
    finally:
        world.close()
    for (losses, state, _), (compiled_losses, compiled_state, graphs) in zip(eager, found, strict=True):
        assert graphs == 1 and all(map(torch.equal, losses, compiled_losses))
        assert all(torch.equal(state[name], compiled_state[name]) for name in state)


class Recorded(StoreLookups):
    """Answers from the stores of one module, and remembers what was asked of all."""

    def __init__(self, asked):
        super().__init__()
        self.asked = asked

    def lookup(self, module, features):
        self.asked.append((module, features.tolist()))
        return super().lookup(module, features)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_lookup_is_left_out_or_moved(backend):
    """Equal ones and those whose rows nobody uses are collective, too; ranks must make them in one order."""
    first, second = (nk.nn.Embedding(SIZE, 4, optimizer=rule()) for _ in range(2))

    def model(ids):
        out = first(ids) + first(ids)
        second(ids), first(ids + 1)
        return (out * second(ids * 2)).sum()

    orders = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        asked = []
        for module in (first, second):
            module.lookup_context = Recorded(asked)
        run(torch.tensor([1, 2, 3])).backward()
        orders.append(asked)
    assert orders[0] == orders[1] and len(orders[0]) == 5


class Sequences(nn.Module):
    def __init__(self, need_indices):
        super().__init__()
        torch.manual_seed(0)
        tables = [
            nk.EmbeddingConfig(num_embeddings=SIZE, embedding_dim=4, name="t0", feature_names=["f0", "f1"]),
            nk.EmbeddingConfig(num_embeddings=SIZE, embedding_dim=4, name="t1", feature_names=["f2"]),
        ]
        self.sequences = nk.EmbeddingCollection(tables, need_indices=need_indices, optimizer=rule())
        self.top = nn.Linear(4, 1)

    def forward(self, features):
        found = self.sequences(features)
        out = self.top(found["f0"].values().tanh()).sum() + self.top(found["f2"].values().relu()).sum()
        for name in found if self.sequences.need_indices() else ():
            out = out + found[name].weights().sum()
        return out + found["f1"].lengths().sum()


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
def test_sequences_are_in_the_graph_if_their_sizes_may_be(need_indices, whole):
    """How many rows a feature has is known at run time alone, which torch.compile takes on request."""
    finals = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=whole):
        for compile_it in (False, True):
            model = Sequences(need_indices)
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
            run = torch.compile(model, fullgraph=whole, backend=counter, dynamic=True) if compile_it else model
            losses = []
            for seed, samples in enumerate((5, 8, 6)):
                losses.append(run(make_batch(samples, seed)[2]))
                losses[-1].backward()
            finals.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *finals))
    assert (counter.frame_count == 1) == whole


def test_evaluation_changes_no_table():
    model = Lookups()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = model.state_dict()
    with torch.no_grad():
        assert torch.equal(run(*make_batch(5, 0)), model(*make_batch(5, 0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_torchrecs_inputs():
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed")

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            config = torchrec.EmbeddingBagConfig(
                name="t", num_embeddings=SIZE, embedding_dim=4, feature_names=["f0", "f1"]
            )
            self.bags = torchrec.EmbeddingBagCollection(tables=[config])
            self.top = nn.Linear(8, 1)

        def forward(self, features):
            return self.top(self.bags(features).values()).sum()

    finals = []
    for compile_it in (False, True):
        model = Pooled()
        nk.convert(model, rule())
        run = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True) if compile_it else model
        for seed, samples in enumerate((5, 8)):
            made = make_batch(samples, seed)[2]
            features = torchrec.KeyedJaggedTensor(made.keys(), made.values(), lengths=made.lengths())
            run(features).backward()
        finals.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *finals))


@pytest.fixture
def score():
    """A compiled lookup and what is behind it."""
    table, top = nk.nn.Embedding(SIZE, 4, optimizer=rule(), name="table"), nn.Linear(4, 1)
    return torch.compile(lambda ids: top(table(ids)).sum(), backend="aot_eager")


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([1, SIZE]), IndexError, rf"table 'table': id {SIZE} at position \[1\] is outside"),
        (torch.tensor([1.5]), TypeError, r"table 'table': feature values must be int64 \(or int32\)"),
    ],
)
def test_bad_ids_are_named_as_without_a_compiler(score, ids, error, message):
    with pytest.raises(error, match=message):
        score(ids)
    score(torch.tensor([1])).backward()


def test_scaled_losses_are_refused(score):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # in use from now on
    with pytest.raises(RuntimeError, match="has been multiplied by a GradScaler"):
        scaler.scale(score(torch.tensor([1, 2]))).backward()


def test_what_backward_needs_goes_with_the_graph(score):
    loss = score(torch.tensor([1, 2]))
    assert len(compiled._pending) == 1
    del loss
    gc.collect()
    assert not compiled._pending


def test_copies_of_saved_tensors_are_refused(score):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = score(torch.tensor([1, 2]))
    gc.collect()
    with pytest.raises(RuntimeError, match="its forward is gone, because saved tensors were copied"):
        loss.backward()


class Kept:
    """Keeps what a lookup and its backward were given, as a pipeline does until the step's end."""

    def lookup(self, module, features):
        self.call = module.plan_call(features)
        rows, slots = torch.ones(1, 4), torch.zeros(len(self.call.stores[0].keys), dtype=torch.int64)
        return run_lookup(self.call, [rows], [slots], self.keep)

    def keep(self, call, grads):
        self.grads = grads

    def numbers(self):
        tensors = [*self.call.signature, self.call.weights, self.call.stores[0].weights, self.grads[0][0]]
        return [tensor.tolist() for tensor in tensors]


def test_memory_of_compiled_code_is_copied():
    """It is written anew as soon as its last use in the graph is over."""
    bags = nk.nn.EmbeddingBag(SIZE, 4, mode="sum", optimizer=rule())
    bags.lookup_context = kept = Kept()
    given = [torch.tensor([1, 2, 3]), torch.tensor([2, 1]), torch.tensor([0.5, 1.0, 2.0])]
    turn = torch.zeros(1, dtype=torch.int64)
    rest = (bags.lookup_anchor, turn, bags.lookup_number, None, [4], True, False, True, False, torch.device("cpu"))
    ticket, _, out = torch.ops.nestpipe.look_up(*given, *rest)
    grad = torch.arange(8.0).view(2, 4)
    torch.ops.nestpipe.look_up_backward([grad], ticket, None)
    before = kept.numbers()
    for tensor in (*given, out.detach(), grad):
        tensor.fill_(7)
    assert kept.numbers() == before


def test_the_operators_keep_torchs_rules():
    """Schemas and shapes; gradients are compared above, since the tables are no arguments."""
    model = Lookups()
    turn = torch.zeros(1, dtype=torch.int64)
    found = (torch.tensor([1, 2]), None, None, model.rows.lookup_anchor, turn, model.rows.lookup_number)
    arguments = (*found, None, [4], True, False, True, False, torch.device("cpu"))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.nestpipe.look_up.default, arguments, test_utils=tests)
