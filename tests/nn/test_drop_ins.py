"""nk.nn.Embedding and nk.nn.EmbeddingBag: torch's arguments, results, errors; what they refuse, they name."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import nestpipe_kernels as nk
from nestpipe_kernels import init, optim
from nestpipe_kernels.nn import Embedding, EmbeddingBag

SGD = optim.SGD(lr=0.1)
SIZE, DIM = 12, 3


def both(kind, *arguments, optimizer=SGD, **keywords):
    """torch's module and ours, from the same numbers."""
    made = []
    for cls in (getattr(nn, kind), partial(getattr(nk.nn, kind), optimizer=optimizer)):
        torch.manual_seed(3)
        made.append(cls(*arguments, **keywords))
    return made


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("method", ["__init__", "from_pretrained", "forward"])
def test_arguments_are_torchs(kind, method):
    theirs = inspect.signature(getattr(getattr(nn, kind), method)).parameters
    ours = inspect.signature(getattr(getattr(nk.nn, kind), method)).parameters
    assert [(n, p.default) for n, p in ours.items()][: len(theirs)] == [(n, p.default) for n, p in theirs.items()]


@pytest.mark.parametrize("padding_idx", [None, 4, -1])
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_the_start_is_torchs(kind, padding_idx):
    theirs, ours = both(kind, SIZE, DIM, padding_idx=padding_idx)
    assert torch.equal(ours.weight.detach().tensor(), theirs.weight.detach())
    assert list(ours.state_dict()) == ["weight"]
    assert ours.padding_idx == theirs.padding_idx
    assert not list(ours.parameters())


RULES = {
    "sgd": (optim.SGD(lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    "adagrad": (optim.Adagrad(lr=0.1), partial(torch.optim.Adagrad, lr=0.1)),
    "adam": (optim.Adam(lr=0.01), partial(torch.optim.SparseAdam, lr=0.01)),
}


def embedding_inputs(step, generator):
    shape = ((4, 3), (5,), (1,), (0,), (2, 1, 3))[step % 5]
    dtype = (torch.int64, torch.int32)[step % 2]
    return (torch.randint(0, SIZE, shape, generator=generator).to(dtype),)


def bag_inputs(step, generator, last=False, weights=False):
    n = 9
    if step % 3 == 2:
        ids, offsets = torch.randint(0, SIZE, (4, 3), generator=generator), None
    else:
        ids = torch.randint(0, SIZE, (n,), generator=generator)
        offsets = torch.tensor([0, 2, 2, 6] + ([n] if last else []))
    if not weights:
        return ids, offsets
    return ids, offsets, torch.rand(ids.shape, generator=generator).requires_grad_()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(
    ("kind", "inputs", "keywords"),
    [
        ("Embedding", embedding_inputs, {}),
        ("Embedding", embedding_inputs, {"padding_idx": 2}),
        ("EmbeddingBag", bag_inputs, {"mode": "sum"}),
        ("EmbeddingBag", bag_inputs, {"mode": "mean", "padding_idx": -3}),
        ("EmbeddingBag", partial(bag_inputs, last=True), {"mode": "max", "include_last_offset": True}),
        ("EmbeddingBag", partial(bag_inputs, weights=True), {"mode": "sum", "padding_idx": 1}),
    ],
)
def test_training_is_torchs(kind, inputs, keywords, rule):
    if rule == "adam" and keywords.get("mode") == "max":
        rule = "adagrad"  # torch has no sparse gradients for max
    theirs, ours = both(kind, SIZE, DIM, optimizer=RULES[rule][0], sparse=rule == "adam", **keywords)
    optimizer = RULES[rule][1](theirs.parameters())
    generator, other = (torch.Generator().manual_seed(7) for _ in range(2))
    for step in range(50):
        a, b = inputs(step, generator), inputs(step, other)
        expected, found = theirs(*a), ours(*b)
        assert found.shape == expected.shape
        assert_close(found, expected)
        for rows, given in ((expected, a), (found, b)):
            ((rows + 0.5) ** 2).sum().backward()
            if len(given) == 3:
                assert given[2].grad is not None
        if len(a) == 3:
            assert_close(b[2].grad, a[2].grad)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(ours.weight.detach().tensor(), theirs.weight.detach())


def test_a_single_id_gives_a_vector():
    theirs, ours = both("Embedding", SIZE, DIM, padding_idx=2)
    for number in (2, 5):
        assert torch.equal(ours(torch.tensor(number)), theirs(torch.tensor(number)))


def test_a_padding_row_with_values_is_read_and_not_trained():
    weight = torch.rand(SIZE, DIM)
    theirs = nn.Embedding(SIZE, DIM, padding_idx=2, _weight=weight.clone())
    ours = Embedding(SIZE, DIM, padding_idx=2, _weight=weight, optimizer=SGD)
    ids = torch.tensor([2, 3, 2])
    for module in (theirs, ours):
        assert torch.equal(module(ids)[0], weight[2])
        module(ids).sum().backward()
    assert torch.equal(ours.weight.detach()[2], weight[2])
    assert not torch.equal(ours.weight.detach()[3], weight[3])


def test_a_loss_over_weight_trains_all_rows():
    theirs, ours = both("Embedding", SIZE, DIM, padding_idx=0)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    ids, hidden = torch.tensor([1, 5, 5, 0]), torch.rand(4, DIM)
    for module in (theirs, ours):
        for _ in range(3):
            loss = (
                module(ids).sum() + 0.1 * module.weight.square().sum() + (hidden @ module.weight.t()).logsumexp(1).sum()
            )
            loss = (
                loss
                + nn.functional.linear(hidden, module.weight).abs().mean()
                + (2 * module.weight + module.weight).mean()
            )
            loss.backward()
            if module is theirs:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(ours.weight.detach().tensor(), theirs.weight.detach())


class TestWeight:
    def test_says_what_it_is_without_reading_rows(self, monkeypatch):
        weight = Embedding(SIZE, DIM, optimizer=SGD).weight
        monkeypatch.setattr(type(weight.module), "weight_tensor", None)
        assert (weight.shape, weight.size(0), weight.dim(), weight.ndim, len(weight)) == ((SIZE, DIM), SIZE, 2, 2, SIZE)
        assert (weight.dtype, weight.device.type, weight.numel(), weight.grad) == (
            torch.float32,
            "cpu",
            SIZE * DIM,
            None,
        )
        assert weight.requires_grad
        assert not weight.data.requires_grad
        assert "table 'weight'" in repr(weight)

    @pytest.mark.parametrize(
        "write",
        [
            lambda w: w.fill_(0),
            lambda w: w.data.copy_(torch.zeros(SIZE, DIM)),
            lambda w: nn.init.normal_(w),
            lambda w: w.__setitem__(0, 1.0),
            lambda w: torch.add(w, 1, out=w),
            lambda w: torch.relu_(w),
            lambda w: w.data[0].zero_(),
            lambda w: w.data[1:][0].add_(1),
            lambda w: nn.init.normal_(w[1:]),
            lambda w: [row.zero_() for row in w],
            lambda w: w.t().mul_(2),
            lambda w: w.detach().view(-1)[:2].__setitem__(0, 1.0),
            lambda w: operator.iadd(w.T, 1),
            lambda w: torch.narrow(w, 0, 1, 2).fill_(0),
            lambda w: torch._foreach_zero_(list(w.unbind())),
            lambda w: setattr(w, "data", torch.zeros(SIZE, DIM)),
            lambda w: nn.functional.embedding(torch.tensor([1]), w, max_norm=0.5),
        ],
    )
    def test_writing_is_refused(self, write):
        module = Embedding(SIZE, DIM, name="item", optimizer=SGD)
        with (
            torch.no_grad(),
            pytest.raises(TypeError, match=r"table 'item': .* would write to a copy .*load_state_dict"),
        ):
            write(module.weight)

    def test_reads_without_gradients_insert_and_train_nothing(self):
        module = Embedding(SIZE, DIM, init=init.Uniform(-1, 1), optimizer=SGD)
        with torch.no_grad():
            before = module.weight.clone()
        assert torch.equal(torch.as_tensor(module.weight.data.numpy()), before)
        assert len(module.store("weight")) == 0

    def test_what_is_computed_from_rows_is_an_ordinary_tensor(self):
        weight = Embedding(SIZE, DIM, optimizer=SGD).weight
        rows = weight.detach()[1:3]
        for made in (weight.clone(), rows.clone(), rows + 1, rows * rows, weight.data.sum(0), copy.deepcopy(rows)):
            assert type(made) is torch.Tensor
        rows.clone().zero_()
        assert torch.equal(torch.zeros(2, DIM).copy_(rows), rows)
        assert torch.equal(pickle.loads(pickle.dumps(rows)), rows)
        assert torch.is_tensor(weight == 0)
        assert bool((weight != 99).all())
        assert hash(weight) == hash(weight)
        weight[2].sum().backward()
        assert not torch.equal(weight.data[2], rows[1])

    @pytest.mark.parametrize("freeze", [True, False])
    def test_freezing_comes_too_late(self, freeze):
        module = Embedding(SIZE, DIM, name="item", _freeze=not freeze, optimizer=SGD)
        module.requires_grad_(freeze).weight.requires_grad_(freeze)
        message = rf"table 'item': requires_grad_.{not freeze}. came too late.*'item': .'trainable': {not freeze}"
        for call in (
            module.requires_grad_,
            module.weight.requires_grad_,
            partial(setattr, module.weight, "requires_grad"),
        ):
            with pytest.raises(TypeError, match=message):
                call(not freeze)

    def test_hooks_are_refused(self):
        weight = Embedding(SIZE, DIM, name="item", optimizer=SGD).weight
        for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            with pytest.raises(TypeError, match=r"table 'item': register_.*would not pass the hook"):
                register(print)

    def test_an_open_table_has_none(self):
        module = Embedding(nk.UNBOUNDED, DIM, optimizer=SGD)
        with pytest.raises(TypeError, match="open vocabulary"):
            module.weight.sum()
        assert module(torch.tensor([-5, 2**62])).shape == (2, DIM)


REFUSED = [
    ("Embedding", {"max_norm": 1.0}, "max_norm=1.0 is not supported"),
    ("EmbeddingBag", {"max_norm": 1.0}, "max_norm=1.0 is not supported"),
    ("Embedding", {"scale_grad_by_freq": True}, "scale_grad_by_freq is not supported"),
    ("EmbeddingBag", {"scale_grad_by_freq": True}, "scale_grad_by_freq is not supported"),
    ("Embedding", {"dtype": torch.bfloat16}, "dtype=torch.bfloat16 is not supported"),
    ("EmbeddingBag", {"dtype": torch.float64}, "dtype=torch.float64 is not supported"),
    ("EmbeddingBag", {"mode": "min"}, "mode must be 'sum', 'mean' or 'max', got 'min'"),
    ("Embedding", {"padding_idx": SIZE}, r"padding_idx must be in \[-12, 12\), got 12"),
    ("Embedding", {"num_embeddings": nk.UNBOUNDED, "padding_idx": 0}, "padding_idx needs a fixed num_embeddings"),
    ("Embedding", {"_weight": torch.zeros(2, 2)}, r"_weight must be float32 \[12, 3\], got torch.float32 \[2, 2\]"),
    ("Embedding", {"device": "meta"}, "device meta is not supported"),
    ("Embedding", {"optimizer": None}, r"nn.Embedding: pass optimizer=.*torch.nn.Embedding"),
    ("EmbeddingBag", {"optimizer": None}, r"nn.EmbeddingBag: pass optimizer=.*torch.nn.EmbeddingBag"),
]


@pytest.mark.parametrize(("kind", "keywords", "message"), REFUSED)
def test_arguments_that_cannot_keep_their_meaning_are_refused(kind, keywords, message):
    with pytest.raises(ValueError, match=message):
        getattr(nk.nn, kind)(**{"num_embeddings": SIZE, "embedding_dim": DIM, "optimizer": SGD, **keywords})


def test_unknown_settings_are_named():
    with pytest.raises(TypeError, match=r"unknown argument 'feature_names'.*capacity"):
        Embedding(SIZE, DIM, optimizer=SGD, feature_names=["a"])
    with pytest.raises(TypeError, match="padding_idx must be an integer"):
        Embedding(SIZE, DIM, padding_idx=True, optimizer=SGD)
    with pytest.raises(TypeError, match=r"optimizer must be an nk.optim object"):
        Embedding(SIZE, DIM, optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0))


IDS, STARTS = torch.arange(6), torch.tensor([0, 2])
CALLS = [
    (
        "Embedding",
        (torch.tensor([[0, 1], [12, 1]]),),
        IndexError,
        r"table 'weight': id 12 at position \[1, 0\] is outside \[0, 12\)",
    ),
    ("Embedding", (torch.tensor([-1]),), IndexError, "id -1 at position"),
    ("Embedding", (torch.rand(3),), TypeError, "must be int64"),
    ("Embedding", ([1, 2],), TypeError, "ids must be a tensor, got list"),
    ("EmbeddingBag", (torch.tensor([0, 1, 99]), STARTS), IndexError, r"id 99 at position 2 \(bag 1\)"),
    ("EmbeddingBag", (IDS,), ValueError, "a 1-D input needs 1-D integer offsets"),
    (
        "EmbeddingBag",
        (IDS, torch.tensor([1, 2])),
        ValueError,
        "bags have 5 ids together, but the input has 6; offsets must begin with 0",
    ),
    ("EmbeddingBag", (IDS, torch.tensor([0, 4, 2])), ValueError, "offsets must ascend"),
    ("EmbeddingBag", (IDS.view(2, 3), STARTS), ValueError, "offsets must be None"),
    ("EmbeddingBag", (IDS.view(1, 2, 3),), ValueError, "one or two dimensions"),
    ("EmbeddingBag", (IDS.float(), STARTS), TypeError, "int64 or int32 ids, got torch.float32"),
    ("EmbeddingBag", (IDS, STARTS, torch.rand(5)), ValueError, r"of the input's shape \[6\]"),
    ("EmbeddingBag", (IDS, STARTS, torch.rand(6).double()), ValueError, "per_sample_weights must be float32"),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), CALLS)
def test_bad_input_is_named(kind, arguments, error, message):
    module = getattr(nk.nn, kind)(SIZE, DIM, optimizer=SGD, **({"mode": "sum"} if kind == "EmbeddingBag" else {}))
    before = module.state_dict()["weight"]
    with pytest.raises(error, match=message):
        module(*arguments)
    assert torch.equal(module.state_dict()["weight"], before)


def test_weights_need_sum():
    module = EmbeddingBag(SIZE, DIM, mode="mean", optimizer=SGD)
    with pytest.raises(ValueError, match="per_sample_weights need mode 'sum', but it is 'mean'"):
        module(IDS, STARTS, torch.rand(6))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_from_pretrained_freezes(kind):
    weight = torch.rand(SIZE, DIM)
    frozen = getattr(nk.nn, kind).from_pretrained(weight)
    out = frozen(IDS.view(2, 3))
    assert not out.requires_grad
    assert torch.equal(out, getattr(nn, kind).from_pretrained(weight)(IDS.view(2, 3)))
    trained = getattr(nk.nn, kind).from_pretrained(weight, freeze=False, optimizer=SGD)
    trained(IDS.view(2, 3)).sum().backward()
    assert not torch.equal(trained.weight.detach()[0], weight[0])
    with pytest.raises(ValueError, match="embeddings must be a matrix"):
        getattr(nk.nn, kind).from_pretrained(torch.rand(3))


def test_state_dicts_go_both_ways():
    theirs, ours = both("Embedding", SIZE, DIM, padding_idx=1)
    other = Embedding(SIZE, DIM, padding_idx=1, optimizer=SGD)
    weight = torch.rand(SIZE, DIM)
    other.load_state_dict({"weight": weight})
    theirs.load_state_dict(other.state_dict())
    assert torch.equal(theirs.weight.detach(), weight)
    with pytest.raises(RuntimeError, match=r"expected a weight of shape \[12, 3\], got \[2, 3\]"):
        ours.load_state_dict({"weight": weight[:2]})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        ours.load_state_dict({})


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_what_to_do(copying):
    with pytest.raises(TypeError, match=r"table 'item' cannot be deep-copied or pickled.*nk.revert.*state_dict"):
        copying(nn.Sequential(Embedding(SIZE, DIM, name="item", optimizer=SGD)))


def test_moving_keeps_float32_on_the_cpu():
    module = nn.Sequential(Embedding(SIZE, DIM, name="item", optimizer=SGD))
    assert module.to("cpu").float() is module
    for move in (lambda: module.double(), lambda: module.to(torch.bfloat16), lambda: module.to("meta")):
        with pytest.raises(TypeError, match=r"table 'item' cannot be moved to .*autocast"):
            move()


def test_resetting_starts_anew():
    module = Embedding(SIZE, DIM, padding_idx=3, init=init.Constant(2.0), optimizer=SGD)
    module(IDS).sum().backward()
    module.reset_parameters()
    expected = torch.full((SIZE, DIM), 2.0)
    expected[3] = 0
    assert torch.equal(module.weight.detach().tensor(), expected)
