"""nk.convert and nk.revert: what is replaced, what stays, and that an error leaves the model as it was."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import nestpipe_kernels as nk
from nestpipe_kernels import optim
from nestpipe_kernels.checkpoint.participants import participants
from nestpipe_kernels.nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection

SGD = optim.SGD(lr=0.01)
IDS = torch.tensor([[1, 2, 0], [3, 3, 4]])


class Holder:
    """A plain object that keeps a module, as feature descriptions do."""

    def __init__(self, module):
        self.embed = module


class Model(nn.Module):
    """Modules of both kinds, twice in the tree, tied, frozen; its weights are held in several places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.user = nn.Embedding(9, 3, padding_idx=0)
        self.bag = nn.EmbeddingBag(6, 3, mode="sum", padding_idx=-1, include_last_offset=True)
        self.tied = nn.Embedding(6, 3)
        self.tied.weight = self.bag.weight
        self.parts = nn.ModuleDict({"same": self.user, "frozen": nn.Embedding.from_pretrained(torch.rand(5, 3))})
        self.head = nn.Linear(3, 1)
        self.terms = [("user", self.user.weight), [self.tied.weight]]
        self.holder = Holder(self.user)
        self.by_name = {"bag": self.bag}

    def forward(self, ids):
        rows = self.user(ids) + self.tied(ids) + self.parts["same"](ids) + self.parts["frozen"](ids)
        bags = self.bag(ids.reshape(-1), torch.tensor([0, 3, 6]))
        return self.head(rows.sum(1) + bags)

    def penalty(self):
        return self.terms[0][1].square().sum() + self.terms[1][0].abs().sum()


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def step(model, optimizer):
    optimizer.zero_grad()
    (model(IDS).square().mean() + 0.1 * model.penalty()).backward()
    optimizer.step()


def test_replaces_in_place_and_keeps_names_and_values():
    model = Model()
    before, shared = weights_of(model), model.bag.weight
    hooked = model.user.register_forward_hook(lambda module, args, out: out * 2)
    model.user.note = "mine"
    model.parts["frozen"].eval()
    outputs = Model()(IDS), None
    expected = model(IDS)
    assert nk.convert(model, SGD) == ["user", "bag", "tied", "parts.frozen"]
    assert [type(m) for m in (model.user, model.bag, model.tied)] == [Embedding, EmbeddingBag, Embedding]
    assert model.parts["same"] is model.user is model.holder.embed
    assert model.by_name["bag"] is model.bag
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    torch.testing.assert_close(model(IDS), expected)
    hooked.remove()
    torch.testing.assert_close(model(IDS), outputs[0])
    assert model.user.note == "mine"
    assert model.user.training
    assert not model.parts["frozen"].training
    assert shared.table_name == "bag"
    assert "tied to 'bag'" in repr(model.tied)


@pytest.mark.parametrize("held", [False, True])
def test_trains_as_before_and_reverts_to_plain_modules(held):
    plain, model = Model(), Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    if held:
        dense = torch.optim.SGD([{"params": [model.user.weight]}, {"params": model.head.parameters()}], lr=0.01)
        nk.convert(model, SGD, dense_optimizer=dense)
        assert [len(group["params"]) for group in dense.param_groups] == [0, 2]
    else:
        nk.convert(model, SGD)
        dense = torch.optim.SGD(model.parameters(), lr=0.01)
    old = model.user.origin[0].weight
    for _ in range(50):
        step(plain, optimizer)
        step(model, dense)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    trained = weights_of(model)
    assert nk.revert(model) == ["user", "bag", "tied", "parts.frozen"]
    assert type(model.user) is nn.Embedding
    assert model.user.weight is old is model.terms[0][1]
    assert type(old) is nn.Parameter
    assert model.tied.weight is model.bag.weight is model.terms[1][0]
    assert model.holder.embed is model.parts["same"] is model.user
    assert model.by_name["bag"] is model.bag
    assert not model.parts["frozen"].weight.requires_grad
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    step(copy.deepcopy(model), optimizer)
    pickle.dumps(model)
    model.zero_grad()
    assert nk.convert(model, SGD)


def test_each_table_has_its_own_settings():
    model = Model()
    settings = {"user": {"optimizer": optim.Adam(lr=0.5), "lr_scale": 0.1}, "bag": {"data_type": nk.DataType.BF16}}
    nk.convert(model, SGD, settings=settings, skip=["parts.frozen"])
    assert model.user.sparse_optimizer.current_lr("user") == pytest.approx(0.05)
    assert model.bag.row_stores()[0].data_type is nk.DataType.BF16
    assert type(model.parts["frozen"]) is nn.Embedding


def test_modules_of_our_own_stay():
    model = nn.ModuleDict({"ours": Embedding(4, 2, optimizer=SGD), "theirs": nn.Embedding(4, 2)})
    ours = model["ours"]
    assert nk.convert(model, SGD) == ["theirs"]
    assert model["ours"] is ours
    assert nk.revert(model) == ["ours", "theirs"]
    assert type(model["ours"]) is nn.Embedding


class Two(nn.Module):
    """Two alike tables, one of another dim."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = nn.Embedding(8, 3), nn.EmbeddingBag(8, 3, mode="sum"), nn.Embedding(8, 2)

    def forward(self, ids):
        out = self.a(ids).sum((1, 2)) + self.b(ids).sum(1) + self.c(ids).sum((1, 2))
        return out.square().mean(), out


class Many(nn.Module):
    """Four alike tables, looked up in another order than they stand, each with another number of ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.tables = nn.ModuleList([nn.Embedding(9, 3) for _ in range(4)])

    def forward(self, ids):
        out = sum((k + 1) * self.tables[k](ids[:, : k + 1]).sum((1, 2)) for k in (2, 0, 3, 1))
        return out.square().mean(), out


class TestSharedStores:
    """Tables that are alike are in one store, and nobody notices."""

    def model(self, rule=SGD):
        model = Two()
        nk.convert(model, rule)
        return model

    def test_alike_tables_share_one(self):
        model = self.model()
        stores = [module.row_stores()[0] for module in (model.a, model.b, model.c)]
        assert stores[0] is stores[1] is not stores[2]
        with nk.NestedPipeline(model, None) as pipeline:
            assert len(pipeline.rank.bindings) == 2
            counters = []
            pipeline.add_step_callback(counters.append)
            list(pipeline.run([IDS]))
            assert set(counters[0].table_rows) == {"a", "b", "c.c"}

    def test_each_has_its_own_learning_rate(self):
        model = self.model(optim.SGD(lr=1.0))
        before = weights_of(model)
        for module in (model.a, model.b):
            assert [group["table"] for group in module.sparse_optimizer.param_groups] == [module._configs[0].name]
        model.a.sparse_optimizer.param_groups[0]["lr"] = 0.0
        model(IDS)[0].backward()
        assert torch.equal(model.a.weight.detach().tensor(), before["a.weight"])
        assert not torch.equal(model.b.weight.detach().tensor(), before["b.weight"])

    def test_resetting_one_leaves_the_other(self):
        model = self.model()
        before = weights_of(model)
        model.a.reset_parameters()
        assert not torch.equal(model.a.weight.detach().tensor(), before["a.weight"])
        assert torch.equal(model.b.weight.detach().tensor(), before["b.weight"])

    def test_many_in_one_store_train_as_plain_pytorch(self):
        plain, model = Many(), Many()
        nk.convert(model, SGD)
        assert len({id(module.row_stores()[0]) for module in model.tables}) == 1
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        batches = [torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(k)) for k in range(5)]
        with nk.NestedPipeline(model, None, config=nk.PipelineConfig(num_micro_batches=2)) as pipeline:
            for batch, _ in zip(batches, pipeline.run(batches), strict=True):
                optimizer.zero_grad()
                plain(batch)[0].backward()
                optimizer.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)

    def test_one_pipeline_at_a_time(self):
        model = self.model()
        parts = [nn.ModuleDict({"part": part}) for part in (model.a, model.b, model.c)]
        with nk.NestedPipeline(parts[0], None):
            with pytest.raises(ValueError, match="'part' belongs to another open pipeline"):
                nk.NestedPipeline(parts[1], None)
            nk.NestedPipeline(parts[2], None).close()
        nk.NestedPipeline(parts[1], None).close()

    def test_checkpoints_hold_each_table_once(self, tmp_path):
        model, other = self.model(optim.Adam(lr=0.1)), self.model(optim.Adam(lr=0.1))
        model.a.sparse_optimizer.param_groups[0]["lr"] = 0.5
        model(IDS)[0].backward()
        assert participants("save", model, None, None, None).table_names == [["b", "a"], ["c"]]
        nk.checkpoint.save(tmp_path / "saved", model=model)
        nk.checkpoint.load(tmp_path / "saved", model=other)
        assert other.a.sparse_optimizer.current_lr("a") == 0.5
        for _ in range(2):
            assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
            model(IDS)[0].backward()
            other(IDS)[0].backward()


def small(**modules):
    """A module with an embedding "e" and others."""
    model = nn.Module()
    model.e = nn.Embedding(4, 2)
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def tied(kind=nn.Embedding, **keywords):
    model = small(b=kind(4, 2, **keywords))
    model.b.weight = model.e.weight
    return model


class TestAdditions:
    """What users put on an embedding module goes with it, both ways."""

    @pytest.mark.filterwarnings("ignore:Full backward hook")
    def test_buffers_parameters_and_submodules_stay(self):
        model = small()
        model.e.register_buffer("weight_scale", torch.full((2,), 3.0))
        model.e.register_buffer("passing", torch.ones(2), persistent=False)
        model.e.gain = nn.Parameter(torch.ones(2))
        model.e.inner = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2))
        model.e.register_forward_hook(lambda module, args, out: module.inner[0](out * module.weight_scale))
        old, before, expected = model.e, weights_of(model), model.e(IDS % 4)
        model.e.register_full_backward_hook(lambda module, given, out: seen.append(module))
        seen = []
        assert nk.convert(model, SGD) == ["e", "e.inner.1"]
        assert set(model.state_dict()) == set(before)
        assert {name for name, _ in model.named_parameters()} == {"e.gain", "e.inner.0.weight", "e.inner.0.bias"}
        assert torch.equal(model.e(IDS % 4), expected)
        model.load_state_dict(before)
        model.e(IDS % 4).sum().backward()
        assert seen == [model.e]
        assert model.e._is_full_backward_hook
        assert nk.revert(model) == ["e", "e.inner.1"]
        assert model.e is old
        assert set(model.state_dict()) == set(before)

    def test_what_comes_later_stays_when_reverting(self):
        model = small(ours=Embedding(4, 2, optimizer=SGD))
        nk.convert(model, SGD)
        for module in (model.e, model.ours):
            module.note = [5]
            module.register_buffer("scale", torch.ones(2))
            module.register_forward_hook(lambda module, args, out: out + 100)
        nk.revert(model)
        for module in (model.e, model.ours):
            assert type(module) is nn.Embedding
            assert module.note == [5]
            assert module(torch.tensor([0])).mean().item() > 50
        assert list(model.state_dict()) == ["e.weight", "e.scale", "ours.weight", "ours.scale"]

    def test_ties_made_by_hand_stay_when_reverting(self):
        model = small(a=Embedding(4, 2, optimizer=SGD), b=Embedding(4, 2, optimizer=SGD))
        nk.convert(model, SGD)
        model.a.tie(model.b)
        rows = model.b.weight.detach().tensor()
        nk.revert(model)
        assert model.a.weight is model.b.weight
        assert torch.equal(model.a.weight, rows)


def test_freezing_the_whole_model_is_told_how():
    model = nn.ModuleDict({"part": small(), "head": nn.Linear(2, 1)})
    nk.convert(model, SGD)
    for module in (model, model["part"]):
        with pytest.raises(
            TypeError, match=r"table 'part.e': requires_grad_\(False\) came too late.*'trainable': False"
        ):
            module.requires_grad_(False)
    assert model["head"].requires_grad_(False).weight.requires_grad is False
    assert model.requires_grad_(True)["head"].weight.requires_grad
    nk.revert(model)
    assert not any(p.requires_grad for p in model.requires_grad_(False).parameters())
    pickle.dumps(model)


# ------------------------------------------------------------------------------------------------------- refusals


class Pair(tuple):
    """Takes two arguments, unlike a tuple."""

    def __new__(cls, one, two):
        return super().__new__(cls, (one, two))


class FixedList(list):
    def __setitem__(self, index, value):
        raise RuntimeError("fixed")


class FixedDict(dict):
    def __setitem__(self, key, value):
        raise RuntimeError("fixed")


HELD = {
    "pair": lambda value: Pair(value, 1),
    "list": lambda value: FixedList([1, value]),
    "dict": lambda value: FixedDict(value=value),
}


@pytest.mark.parametrize("kind", list(HELD))
def test_a_container_that_cannot_change_undoes_all(kind):
    model = small(second=nn.Embedding(4, 2))
    old = model.e
    model.first, model.held, model.other = [old.weight], HELD[kind](old.weight), FixedList([(1,), 2])
    with pytest.raises(ValueError, match=r"convert: 'e' .* model.held\S* holds it .*Error: .*skip=\['e'\]"):
        nk.convert(model, SGD)
    assert model.first[0] is old.weight is model.e.weight
    assert type(old.weight) is nn.Parameter
    del model.held
    nk.convert(model, SGD)
    new, model.held = model.e, HELD[kind](model.e.weight)
    with pytest.raises(ValueError, match=r"revert: 'e' cannot be reverted: model.held\S* holds it"):
        nk.revert(model)
    assert model.e is new is model.first[0].module
    assert type(model.second) is Embedding


def shared_memory(change):
    def make():
        model = small(out=nn.Linear(2, 4, bias=False))
        change(model)
        return model

    return make


def wrapped():
    inner = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(inner)
    inner.module = small()
    return nn.ModuleDict({"net": inner})


def clashing():
    model = small()
    model.e.tables = nn.Linear(2, 2)
    return model


MOMENTUM = optim.SGD(lr=0.1, momentum=0.9)
MODELS = [
    (
        shared_memory(lambda m: setattr(m.out.weight, "data", m.e.weight.data)),
        SGD,
        "'e' .* 'out.weight' .* same memory",
    ),
    (shared_memory(lambda m: m.register_buffer("same", m.e.weight.data[1:])), SGD, "'e' .* 'same' .* same memory"),
    (
        shared_memory(lambda m: setattr(m, "fixed", nn.Embedding.from_pretrained(m.e.weight.data))),
        SGD,
        "'fixed' .* 'e.weight' .* same memory.*skip=",
    ),
    (wrapped, SGD, "'net.module.e' .* 'net' is wrapped in DistributedDataParallel"),
    (lambda: wrapped()["net"], SGD, "'module.e' .* the model is wrapped in DistributedDataParallel"),
    (clashing, SGD, "'e' .* attribute 'tables' has the name .*rename"),
    (partial(tied, padding_idx=1), MOMENTUM, "'b' .* shares its weight with 'e', which trains row 1"),
    (partial(tied, nn.EmbeddingBag), SGD, None),
    (partial(tied, padding_idx=1), SGD, None),
    (partial(tied, nn.EmbeddingBag, padding_idx=1), MOMENTUM, None),
]


@pytest.mark.parametrize(("make", "rule", "message"), MODELS)
def test_models_that_would_not_mean_the_same_are_refused(make, rule, message):
    model = make()
    if message is None:
        assert nk.convert(model, rule) == ["e", "b"]
        return
    with pytest.raises(ValueError, match=message):
        nk.convert(model, rule)
    assert not any(isinstance(module, Embedding) for module in model.modules())


@pytest.mark.filterwarnings("ignore")
def test_settings_and_skip_take_any_name():
    model = tied()
    model.alias = model.b
    nk.convert(model, SGD, settings={"alias": {"optimizer": optim.SGD(lr=9.0), "trainable": False}})
    assert model.e.sparse_optimizer.param_groups[0]["lr"] == 9.0
    assert not model.b.trainable
    model = small(script=torch.jit.script(nn.Embedding(2, 2)))
    model.alias = model.e
    model.more = nn.Embedding(3, 2)
    assert nk.convert(model, SGD, skip=["alias", "script"]) == ["more"]


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


def with_user(module):
    model = Model()
    model.user = module
    return model


def tie_output(model):
    model.out = nn.Linear(3, 9, bias=False)
    model.out.weight = model.user.weight


def attribute(name, make):
    def change(model):
        setattr(model, name, make(model))

    return change


def patch_forward(model):
    model.user.forward = lambda ids: ids


def give_gradient(model):
    model(IDS).sum().backward()


def two_modes(model):
    model.mean = nn.EmbeddingBag(6, 3, mode="mean")
    model.mean.weight = model.bag.weight


REFUSED = [
    (
        lambda m: setattr(m, "user", nn.Embedding(9, 3, max_norm=1.0)),
        "'user' cannot be converted: max_norm=1.0 .*skip=",
    ),
    (lambda m: setattr(m, "user", nn.Embedding(9, 3, scale_grad_by_freq=True)), "'user' .* scale_grad_by_freq"),
    (lambda m: setattr(m, "user", Scaled(9, 3)), "'user' cannot be converted: it is a Scaled, a variant of .*skip="),
    (lambda m: setattr(m, "user", nn.Embedding(9, 3).double()), r"'user' .* float64.*\.float\(\)"),
    (lambda m: setattr(m, "user", nn.Embedding(9, 3, device="meta")), "'user' .* no values yet"),
    (lambda m: setattr(m.user, "weight", nn.Parameter(torch.zeros(12, 3))), r"is \[12, 3\], but its .* say \[9, 3\]"),
    (lambda m: nn.utils.parametrizations.weight_norm(m.user), "'user' cannot be converted: it is a Parametrized"),
    (lambda m: m.user.weight.register_hook(lambda g: g), "'user' .* hooks on its gradient"),
    (patch_forward, "'user' cannot be converted: .* forward may do something else"),
    (give_gradient, r"'user' .* has a gradient .*zero_grad\(\)"),
    (tie_output, r"'user' .* is also out.weight of a Linear; .*functional.linear.*skip=\['user'\]"),
    (two_modes, "'mean' .* shares its weight with 'bag', but they differ in mode"),
    (attribute("chosen", lambda m: {m.user.weight}), "'user.weight' .* model.chosen holds it"),
    (attribute("names", lambda m: {m.user.weight: 1}), "'user.weight' .* model.names holds it"),
    (attribute("optim", lambda m: torch.optim.SGD(m.parameters(), lr=1.0)), "'user.weight' .* model.optim holds it"),
    (attribute("script", lambda m: torch.jit.script(nn.Embedding(2, 2))), "'script' .* compiled Embedding"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_changes(change, message):
    model = Model()
    change(model)
    modules, parameters = list(model.modules()), list(model.parameters())
    terms = list(model.terms)
    with pytest.raises(ValueError, match=message):
        nk.convert(model, SGD)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.terms, terms, strict=True))
    assert type(model.bag) is nn.EmbeddingBag


ARGUMENTS = [
    (partial(nk.convert, nn.Linear(2, 2), SGD), ValueError, "no torch.nn.Embedding"),
    (partial(nk.convert, nn.Embedding(2, 2), SGD), ValueError, "is itself the module to replace"),
    (partial(nk.convert, "model", SGD), TypeError, "model must be a torch.nn.Module, got str"),
    (
        lambda: nk.convert(Model(), torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        TypeError,
        "give that one as dense_optimizer",
    ),
    (lambda: nk.convert(Model(), None), TypeError, "optimizer must be an nk.optim object .* got NoneType"),
    (lambda: nk.convert(Model(), SGD, skip=["usr"]), ValueError, "skip names 'usr', which is not converted"),
    (lambda: nk.convert(Model(), SGD, settings={"usr": {}}), ValueError, "settings names 'usr', .*'user', 'bag'"),
    (lambda: nk.convert(Model(), SGD, settings={"user": {"size": 1}}), TypeError, "'user' .*unknown argument 'size'"),
    (lambda: nk.convert(Model(), SGD, settings={"bag": {"capacity": 0}}), ValueError, "convert: 'bag' .*capacity"),
    (lambda: nk.convert(Model(), optim.SGD), TypeError, r"got the class SGD; call it: SGD\(lr"),
    (lambda: nk.convert(small(), SGD, skip="e"), TypeError, r"got the string 'e'; write skip=\['e'\]"),
    (lambda: nk.convert(small(), SGD, skip=[1]), TypeError, "skip must be a list of names, got one of type int"),
    (lambda: nk.convert(small(), SGD, skip=1), TypeError, "skip must be a list of names, got int"),
    (lambda: nk.convert(small(), SGD, settings=["e"]), TypeError, "settings must be a dict .*got list"),
    (lambda: nk.convert(small(), SGD, settings={"e": 1}), TypeError, "settings of 'e' must be a dict of keywords"),
    (lambda: nk.convert(small(), SGD, settings={"e": {"_weight": 1}}), ValueError, "'_weight', which is taken from"),
    (lambda: nk.convert(small(), SGD, settings={"e": {"padding_idx": 1}}), ValueError, "'padding_idx', which is taken"),
    (lambda: nk.convert(small(), SGD, settings={"e": {"seed": 1}}), ValueError, "'seed', .*pass it to nk.convert"),
    (lambda: nk.convert(small(), SGD, settings={"e": {"trainable": 1}}), TypeError, "trainable must be a bool"),
    (lambda: nk.convert(tied(), SGD, skip=["b"]), ValueError, r"'e' .* with 'b', .*skip=\['b', 'e'\]"),
    (lambda: nk.convert(Model(), SGD, skip=["parts"]), ValueError, r"skip names 'parts', .*\['parts.frozen'\]"),
    (
        lambda: nk.convert(Model(), SGD, settings={"user": {}, "parts.same": {}}),
        ValueError,
        "settings name 'parts.same' and 'user', which are one module",
    ),
    (
        lambda: nk.convert(tied(), SGD, settings={"e": {"lr_scale": 0.1}, "b": {"lr_scale": 0.2}}),
        ValueError,
        "settings of 'e' and 'b' differ, but they share a weight",
    ),
    (lambda: nk.convert(Model(), SGD, dense_optimizer=SGD), TypeError, "dense_optimizer must be an optimizer of torch"),
    (partial(nk.revert, nn.Linear(2, 2)), ValueError, "no module that nk.convert made"),
    (partial(nk.revert, 3), TypeError, "model must be a torch.nn.Module, got int"),
]


@pytest.mark.parametrize(("call", "error", "message"), ARGUMENTS)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_optimizer_that_has_trained_a_weight_is_refused():
    model = Model()
    dense = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, dense)
    dense.zero_grad()
    with pytest.raises(
        ValueError, match=r"'user' .* has trained 'user.weight' and holds its state \(momentum_buffer\)"
    ):
        nk.convert(model, SGD, dense_optimizer=dense)
    assert type(model.user) is nn.Embedding


def test_who_still_uses_a_replaced_parameter_is_told():
    model = Model()
    old = model.user.weight
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    nk.convert(model, SGD)
    message = "the parameter of 'user' has been replaced.*dense_optimizer.*model.user.weight"
    for use in (dense.zero_grad, dense.step, lambda: old.square(), lambda: torch.optim.SGD([old], lr=1.0)):
        with pytest.raises(RuntimeError, match=message):
            use()
    with pytest.raises(RuntimeError, match=message):
        nk.NestedPipeline(model, dense)
    assert "ReplacedWeight('user')" in repr(old)


def test_an_open_pipeline_is_closed_before_reverting():
    model = nn.ModuleDict({"one": nn.Embedding(4, 2)})
    nk.convert(model, SGD)
    pipeline = nk.NestedPipeline(model, None)
    with pytest.raises(ValueError, match=r"'one' belongs to an open pipeline; close it first"):
        nk.revert(model)
    pipeline.close()
    assert nk.revert(model) == ["one"]


def test_an_open_table_cannot_be_reverted():
    model = nn.ModuleDict({"one": Embedding(nk.UNBOUNDED, 2, optimizer=SGD)})
    with pytest.raises(TypeError, match="open vocabulary"):
        nk.revert(model)
    assert type(model["one"]) is Embedding


def test_the_pages_example_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    torch.manual_seed(0)
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {"__name__": "page"})
    assert len(capsys.readouterr().out.splitlines()) == 5


class TestTorchRec:
    @pytest.fixture
    def torchrec(self):
        return pytest.importorskip("torchrec", reason="torchrec is not installed")

    def model(self, torchrec, pooling="SUM", **settings):
        pooled = [
            torchrec.EmbeddingBagConfig(
                name=f"t{k}", num_embeddings=8, embedding_dim=3, feature_names=[f"f{k}", "g"],
                pooling=torchrec.PoolingType[pooling], **settings,
            )
            for k in range(2)
        ]  # fmt: skip
        plain = [torchrec.EmbeddingConfig(name="s", num_embeddings=8, embedding_dim=2, feature_names=["f0"])]
        return nn.ModuleDict(
            {
                "bags": torchrec.EmbeddingBagCollection(tables=pooled),
                "rows": torchrec.EmbeddingCollection(tables=plain, need_indices=True),
            }
        )

    def features(self, torchrec):
        return torchrec.KeyedJaggedTensor(
            ["f0", "f1", "g"], torch.tensor([1, 2, 3, 4, 5, 6, 7]), lengths=torch.tensor([2, 0, 1, 1, 2, 1])
        )

    @pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
    def test_collections_become_ours_and_back(self, torchrec, pooling):
        model, features = self.model(torchrec, pooling), self.features(torchrec)
        before, expected = weights_of(model), (model["bags"](features), model["rows"](features))
        old = model["bags"]
        assert nk.convert(model, SGD) == ["bags", "rows"]
        assert [type(m) for m in model.values()] == [EmbeddingBagCollection, EmbeddingCollection]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert list(model.state_dict()) == list(before)
        bags, rows = model["bags"](features), model["rows"](features)
        assert type(bags) is torchrec.KeyedTensor
        assert bags.keys() == expected[0].keys()
        torch.testing.assert_close(bags.values(), expected[0].values())
        assert type(rows["f0"]) is torchrec.JaggedTensor
        torch.testing.assert_close(rows["f0"].values(), expected[1]["f0"].values())
        assert torch.equal(rows["f0"].weights(), expected[1]["f0"].weights())
        bags.values().sum().backward()
        trained = weights_of(model)
        assert nk.revert(model) == ["bags", "rows"]
        assert model["bags"] is old
        assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
        model["bags"](features).values().sum().backward()

    def test_what_ours_cannot_hold_is_named(self, torchrec):
        model = self.model(torchrec)
        model["bags"].terms = [model["bags"].embedding_bags["t0"].weight]
        with pytest.raises(ValueError, match=r"'bags.embedding_bags.t0.weight' .* model.bags.terms\[0\] holds this"):
            nk.convert(model, SGD)
        model = self.model(torchrec)
        with pytest.raises(ValueError, match=r"convert: 'bags' .TorchRec's EmbeddingBagCollection.: .*capacity"):
            nk.convert(model, SGD, settings={"bags": {"capacity": 0}})
        assert type(model["rows"]).__module__.startswith("torchrec")
