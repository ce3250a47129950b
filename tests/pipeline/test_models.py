"""Models of many shapes in the pipeline: each trains as with plain autograd, and alike in every schedule."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from small_model import EXACT, make_batch, make_pipeline, state_of
from torch import nn

from nestpipe_kernels import init, optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.types import PoolingType

SIZE = 7
START = init.Uniform(-0.5, 0.5)
BATCHES = [make_batch(t, size=6) for t in range(4)]


def table(name, dim=3, features=(), **settings):
    return EmbeddingBagConfig(SIZE, dim, name, feature_names=list(features or [name]), init=START, **settings)


class Model(nn.Module):
    """Base: embeds a batch into a vector per sample, sums it with learned weights, squared error."""

    width = 6

    def __init__(self):
        super().__init__()
        fixed = torch.Generator().manual_seed(1)
        self.head = nn.Parameter(torch.rand(self.width, generator=fixed) - 0.5)

    def forward(self, batch):
        logits = self.embed(batch) @ self.head
        return ((logits - batch.label) ** 2).mean(), logits


class Twice(Model):
    """One module called twice in a forward, with different inputs."""

    width = 12

    def __init__(self, optimizer):
        super().__init__()
        self.ebc = EmbeddingBagCollection([table("user"), table("item")], optimizer=optimizer)

    def embed(self, batch):
        swapped = KeyedJaggedTensor(
            ["user", "item"],
            (batch.sparse.values() + 2) % SIZE,
            lengths=batch.sparse.lengths(),
            stride=len(batch.label),
        )
        return torch.cat([self.ebc(batch.sparse).values(), self.ebc(swapped).values()], 1)


class Sequence(Model):
    """An EmbeddingCollection whose vectors the model pools itself."""

    width = 4

    def __init__(self, optimizer):
        super().__init__()
        self.ec = EmbeddingCollection(
            [EmbeddingConfig(SIZE, 4, "t", feature_names=["user", "item"], init=START)], optimizer=optimizer
        )

    def embed(self, batch):
        rows = self.ec(batch.sparse)
        item = rows["item"]
        samples = torch.repeat_interleave(torch.arange(len(batch.label)), item.lengths())
        pooled = torch.zeros(len(batch.label), 4).index_add(0, samples, item.values() ** 2)
        return rows["user"].values() * (1 + pooled)


class TwoModules(Model):
    """Two modules, one pooled and one not."""

    width = 7

    def __init__(self, optimizer):
        super().__init__()
        self.ebc = EmbeddingBagCollection([table("item")], optimizer=optimizer)
        self.ec = EmbeddingCollection(
            [EmbeddingConfig(SIZE, 4, "u", feature_names=["user"], init=START)], optimizer=optimizer
        )

    def embed(self, batch):
        return torch.cat([self.ebc(batch.sparse).values(), self.ec(batch.sparse)["user"].values()], 1)


class ManyStores(Model):
    """Different dims and pooling, so several stores."""

    width = 10

    def __init__(self, optimizer):
        super().__init__()
        tables = [
            table("a", 2, ["user"]),
            table("b", 3, ["item"], pooling=PoolingType.MEAN),
            table("c", 5, ["item"], pooling=PoolingType.MAX),
        ]
        self.ebc = EmbeddingBagCollection(tables, optimizer=optimizer)

    def embed(self, batch):
        return self.ebc(batch.sparse).values()


class Shared(Model):
    """A table that two features read, and a feature that two tables serve."""

    width = 9

    def __init__(self, optimizer):
        super().__init__()
        tables = [table("both", 3, ["user", "item"]), table("again", 3, ["item"])]
        self.ebc = EmbeddingBagCollection(tables, optimizer=optimizer)

    def embed(self, batch):
        output = self.ebc(batch.sparse)
        return torch.cat([output["user"], output["item@both"], output["item@again"]], 1)


class Padded(Model):
    """Key 0 is padding: reads zeros, is not counted, never moves."""

    def __init__(self, optimizer):
        super().__init__()
        tables = [table("user", padding_idx=0), table("item", padding_idx=0, pooling=PoolingType.MEAN)]
        self.ebc = EmbeddingBagCollection(tables, optimizer=optimizer)

    def embed(self, batch):
        return self.ebc(batch.sparse).values()


class Weighted(Model):
    """Per-sample weights that the model learns: one for each key."""

    def __init__(self, optimizer):
        super().__init__()
        self.importance = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))
        self.ebc = EmbeddingBagCollection([table("user"), table("item")], is_weighted=True, optimizer=optimizer)

    def embed(self, batch):
        keys = batch.sparse.values()
        weighted = KeyedJaggedTensor(
            ["user", "item"], keys, self.importance[keys], lengths=batch.sparse.lengths(), stride=len(batch.label)
        )
        return self.ebc(weighted).values()


MODELS = [Twice, Sequence, TwoModules, ManyStores, Shared, Padded, Weighted]


def train(model, schedule, **settings):
    """State after the batches, and every table's weights."""
    with make_pipeline(model, schedule, **settings) as pipeline:
        list(pipeline.run(BATCHES))
        return state_of(pipeline), model.state_dict()


def train_plainly(cls):
    """The same model with its tables as parameters, whole batches, torch.optim."""
    model = cls(None)
    tables = [p for n, p in model.named_parameters() if n.endswith(".weight")]
    rows = torch.optim.Adagrad(tables, lr=0.2)
    dense = torch.optim.SGD(
        [p for n, p in model.named_parameters() if not n.endswith(".weight")], lr=0.05, momentum=0.9
    )
    for batch in BATCHES:
        rows.zero_grad()
        dense.zero_grad()
        model(batch)[0].backward()
        rows.step()
        dense.step()
    return model.state_dict()


@pytest.mark.parametrize("cls", MODELS)
def test_fault_17_a_model_trains_as_with_plain_autograd(cls):
    expected = train_plainly(cls)
    start = cls(None).state_dict()
    assert any(not start[name].equal(value) for name, value in expected.items())
    state, weights = train(cls(optim.Adagrad(lr=0.2)), "nested", num_micro_batches=2)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert not weights[name].equal(start[name])
    assert state.step_count == len(BATCHES)


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_a_model_trains_alike_in_every_schedule(cls, schedule):
    expected, _ = train(cls(optim.Adagrad(lr=0.2)), "sequential", num_micro_batches=3)
    assert train(cls(optim.Adagrad(lr=0.2)), schedule, num_micro_batches=3)[0] == expected


def test_fault_08_padding_never_moves():
    model = Padded(optim.Adam(lr=0.1))
    train(model, "nested")
    for name in ("user", "item"):
        assert model.state_dict()[f"ebc.embedding_bags.{name}.weight"][0].equal(torch.zeros(3))
        assert 0 not in model.ebc.store(name).keys().tolist()


def test_fault_23_half_precision_gradients_are_summed_in_float32():
    """5,001 ones: in float16 the sum would stop at 2,048, in bfloat16 at 256."""
    many = 5001
    for dtype in (torch.float16, torch.bfloat16):
        ebc = EmbeddingBagCollection([table("user")], optimizer=optim.SGD(lr=1.0))
        model = nn.ModuleDict({"ebc": ebc})
        start = ebc.state_dict()["embedding_bags.user.weight"]
        sparse = KeyedJaggedTensor(["user"], torch.full((many,), 3), lengths=torch.ones(many, dtype=torch.int64))

        def in_half(m, batch, dtype=dtype):
            output = m["ebc"](batch["sparse"]).values().to(dtype)
            return output.sum(dtype=torch.float32), output

        with make_pipeline(model, loss_fn=in_half, loss_weighting="sum") as pipeline:
            list(pipeline.run([{"sparse": sparse}]))
        moved = start - ebc.state_dict()["embedding_bags.user.weight"]
        torch.testing.assert_close(moved[3], torch.full((3,), float(many)), rtol=1e-6, atol=0)


def test_the_gradient_reaches_learned_per_sample_weights():
    model = Weighted(optim.SGD(lr=0.1))
    with make_pipeline(model, num_micro_batches=1) as pipeline:
        pipeline.progress(iter(BATCHES[:1]))
    plain = Weighted(None)
    plain(BATCHES[0])[0].backward()
    assert model.importance.grad.count_nonzero() > 2
    torch.testing.assert_close(model.importance.grad, plain.importance.grad, rtol=1e-5, atol=1e-6)


def test_every_table_has_its_own_optimizer():
    rules = {"user": optim.SGD(lr=0.5), "item": optim.Adam(lr=0.1)}

    class Mixed(Model):
        def __init__(self):
            super().__init__()
            self.ebc = EmbeddingBagCollection([table(n, optimizer=rule) for n, rule in rules.items()])

        def embed(self, batch):
            return self.ebc(batch.sparse).values()

    mixed = Mixed()
    state, weights = train(mixed, "nested")
    assert len(mixed.ebc.row_stores()) == 2
    assert state == train(Mixed(), "sequential")[0]
    plain = Mixed.__new__(Mixed)
    Model.__init__(plain)
    plain.ebc = EmbeddingBagCollection([table("user"), table("item")])
    weight = {n: plain.ebc.embedding_bags[n].weight for n in rules}
    optimizers = [
        torch.optim.SGD([weight["user"]], lr=0.5),
        torch.optim.SparseAdam([weight["item"]], lr=0.1),
        torch.optim.SGD([plain.head], lr=0.05, momentum=0.9),
    ]
    for batch in BATCHES:
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(batch)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
    for name in rules:
        got = weights[f"ebc.embedding_bags.{name}.weight"]
        torch.testing.assert_close(got, weight[name].detach(), rtol=2e-4, atol=2e-5)


# -------------------------------------------------------------------------------------------------- kinds of batch

Tupled = namedtuple("Tupled", "sparse label")


@dataclass
class Nested:
    inner: dict
    label: torch.Tensor


class Custom:
    """A class of the user's own, without any method."""

    def __init__(self, sparse, label):
        self.sparse = sparse
        self.label = label
        self.source = "somewhere"


class Slotted:
    __slots__ = ("label", "sparse")

    def __init__(self, sparse, label):
        self.sparse, self.label = sparse, label


KINDS = {
    "dict": (lambda b: {"x": b.sparse, "y": b.label}, lambda b: (b["x"], b["y"])),
    "tuple": (lambda b: (b.sparse, b.label), lambda b: b),
    "list": (lambda b: [b.sparse, b.label], lambda b: b),
    "namedtuple": (lambda b: Tupled(b.sparse, b.label), lambda b: (b.sparse, b.label)),
    "dataclass": (lambda b: Nested({"deep": [b.sparse]}, b.label), lambda b: (b.inner["deep"][0], b.label)),
    "custom": (lambda b: Custom(b.sparse, b.label), lambda b: (b.sparse, b.label)),
    "slots": (lambda b: Slotted(b.sparse, b.label), lambda b: (b.sparse, b.label)),
}


class Opening(Model):
    """Takes its batch apart with a given function."""

    def __init__(self, unpack):
        super().__init__()
        self.unpack = unpack
        self.ebc = EmbeddingBagCollection([table("user"), table("item")], optimizer=optim.Adagrad(lr=0.2))

    def forward(self, batch):
        sparse, label = self.unpack(batch)
        logits = self.ebc(sparse).values() @ self.head
        return ((logits - label) ** 2).mean(), logits


@pytest.fixture(scope="module")
def opened():
    model = Opening(lambda b: (b.sparse, b.label))
    with make_pipeline(model) as pipeline:
        return [step.output.tolist() for step in pipeline.run(BATCHES)], state_of(pipeline)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_46_batches_of_any_kind(opened, kind):
    pack, unpack = KINDS[kind]
    with make_pipeline(Opening(unpack)) as pipeline:
        outputs = [step.output.tolist() for step in pipeline.run([pack(b) for b in BATCHES])]
        assert (outputs, state_of(pipeline)) == opened


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("by_name", [False, True])
def test_sparse_inputs_of_the_user(opened, schedule, by_name):
    """A model whose input capture cannot follow: it goes through numpy."""
    asked = []

    def unpack(batch):
        values = torch.from_numpy(batch.sparse.values().numpy().copy())
        sparse = KeyedJaggedTensor(["user", "item"], values, lengths=batch.sparse.lengths(), stride=len(batch.label))
        return sparse, batch.label

    model = Opening(unpack)

    def inputs(batch):
        asked.append(len(batch.label))
        return {"ebc" if by_name else model.ebc: [unpack(batch)[0]]}

    with make_pipeline(model, schedule, sparse_inputs=inputs) as pipeline:
        outputs = [step.output.tolist() for step in pipeline.run(BATCHES)]
        assert (outputs, state_of(pipeline)) == opened
    assert asked


class Packed:
    """A batch that only its owner can split: keys as text."""

    def __init__(self, lines, label):
        self.lines, self.label = lines, label
        self.batch_size = len(lines)

    def parse(self):
        user = [int(line.split(":")[0]) for line in self.lines]
        item = [[int(k) for k in line.split(":")[1].split()] for line in self.lines]
        lengths = [1] * len(user) + [len(bag) for bag in item]
        values = torch.tensor([*user, *(k for bag in item for k in bag)], dtype=torch.int64)
        return KeyedJaggedTensor(["user", "item"], values, lengths=torch.tensor(lengths), stride=len(user))


@pytest.mark.parametrize("schedule", EXACT)
def test_split_batch_of_the_user(opened, schedule):
    def pack(batch):
        item, user = batch.sparse["item"], batch.sparse["user"].values().tolist()
        bounds = item.offsets().tolist()
        bags = [item.values()[a:b].tolist() for a, b in zip(bounds, bounds[1:])]
        return Packed([f"{u}:{' '.join(map(str, bag))}" for u, bag in zip(user, bags)], batch.label)

    def split_batch(batch, indices):
        return [Packed([batch.lines[i] for i in index.tolist()], batch.label[index]) for index in indices]

    model = Opening(lambda b: (b.parse(), b.label))
    settings = {"split_batch": split_batch, "sparse_inputs": lambda b: {"ebc": [b.parse()]}}
    with make_pipeline(model, schedule, **settings) as pipeline:
        outputs = [step.output.tolist() for step in pipeline.run([pack(b) for b in BATCHES])]
        assert (outputs, state_of(pipeline)) == opened


def test_a_split_batch_that_returns_too_few_parts():
    model = Opening(lambda b: (b.sparse, b.label))
    expected = r"^split: split_batch must return a list of 1 micro-batches, got 0"
    pipeline = make_pipeline(model, split_batch=lambda batch, indices: [])
    with pipeline, pytest.raises(ValueError, match=expected):
        pipeline.progress(iter(BATCHES))


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda b: [b.sparse], "sparse_inputs must return a dict {module: [input per call]}, got list"),
        (lambda b: {"other": [b.sparse]}, "sparse_inputs returned the key 'other', which is no embedding module"),
        (lambda b: {"ebc": b.sparse}, "sparse_inputs must return a list with one input per call for module 'ebc'"),
        (lambda b: {}, "sparse_inputs returned nothing for module 'ebc'; return [] if it is not called"),
        (lambda b: {"ebc": []}, "module 'ebc' is called 1 times in this batch, but 0 calls were planned from it"),
        (lambda b: {"ebc": [b.sparse] * 2}, "module 'ebc' was called 1 times in this batch, but 2 calls were planned"),
    ],
)
def test_sparse_inputs_that_are_wrong(returned, text):
    model = Opening(lambda b: (b.sparse, b.label))
    with make_pipeline(model, sparse_inputs=returned) as pipeline, pytest.raises(ValueError) as caught:
        pipeline.progress(iter(BATCHES))
    assert text in str(caught.value)
