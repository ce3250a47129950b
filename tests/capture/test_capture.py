"""Captured inputs, replayed for batches of other sizes, equal what the modules really receive."""

from __future__ import annotations

import dataclasses
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_fakes import FakeEmbedding
from torch import Tensor, nn

from nestpipe_kernels.capture import (
    CapturedInputs,
    batch_size_of,
    capture_inputs,
    embedding_modules,
    from_function,
    same_features,
    split,
)
from nestpipe_kernels.capture.probe import eager_only
from nestpipe_kernels.errors import CaptureError
from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor


class Model(nn.Module):
    """Two embedding modules, a dense part, and a forward that each test gives."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.emb = FakeEmbedding()
        self.second = FakeEmbedding()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.arange(3) * 100)
        self.plain = torch.tensor([7])
        self.loose = torch.ones(3, requires_grad=True)
        self.body = body

    def forward(self, batch: Any) -> Any:
        return self.body(self, batch)


def make_batch(size: int, seed: int = 0, cls: Any = KeyedJaggedTensor) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * size,), generator=g)
    values = torch.randint(0, 1000, (int(lengths.sum()),), generator=g)
    weights = torch.rand(int(lengths.sum()), generator=g)
    return {
        "kjt": cls(keys=["a", "b"], values=values, weights=weights, lengths=lengths),
        "matrix": torch.randint(0, 50, (size, 5), generator=g).float(),
        "ids": torch.randint(0, 50, (size, 3), generator=g),
        "label": torch.rand(size, generator=g),
    }


def call(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def capture(model: nn.Module, batch: Any, **more: Any) -> CapturedInputs:
    return capture_inputs(model, embedding_modules(model), batch, call, **more)


def check_replay(body: Callable[[Any, Any], Any], make: Callable[[int, int], Any] = make_batch, size: int = 8) -> Model:
    """Capture on one batch; on others, of many sizes, replay must equal what the model passes."""
    model = Model(body)
    captured = capture(model, make(size, 0))
    for seed, other in enumerate((size, 1, 2, 3, 13), start=1):
        batch = make(other, seed)
        planned = captured.replay(batch)
        assert set(planned) == {"emb", "second"}
        for module in (model.emb, model.second):
            module.received.clear()
        model.eval()(batch)
        model.train()
        for name, module in (("emb", model.emb), ("second", model.second)):
            assert len(planned[name]) == len(module.received) == captured.num_calls[name]
            for index, (plan, got) in enumerate(zip(planned[name], module.received)):
                assert same_features(plan, got)
                captured.check(name, index, plan, got)
    return model


@pytest.mark.parametrize("theirs", [False, True])
def test_keyed_jagged_of_the_batch_is_the_object_itself(theirs: bool) -> None:
    cls = pytest.importorskip("torchrec").KeyedJaggedTensor if theirs else KeyedJaggedTensor
    check_replay(lambda m, b: m.emb(b["kjt"]), lambda size, seed: make_batch(size, seed, cls))
    model = Model(lambda m, b: m.emb(b["kjt"]))
    batch = make_batch(6, 0, cls)
    captured = capture(model, batch)
    assert captured.replay(batch)["emb"][0] is batch["kjt"]
    assert captured.describe("emb", 0) == "batch['kjt']"


def test_replay_of_micro_batches() -> None:
    model = Model(lambda m, b: m.emb(b["matrix"][:, 1].long()))
    batch = make_batch(7)
    captured = capture(model, batch)
    for part in split(batch, [torch.tensor([6, 2]), torch.tensor([0]), torch.tensor([1, 3, 4, 5])]):
        assert torch.equal(captured.replay(part)["emb"][0], part["matrix"][:, 1].long())


def test_ids_sliced_and_cast_from_one_float_matrix() -> None:
    check_replay(lambda m, b: [m.emb(b["matrix"][:, i : i + 1].long()) for i in range(3)])


def test_two_features_concatenated_and_module_called_twice() -> None:
    def body(m: Any, b: Any) -> None:
        m.emb(torch.cat([b["ids"][:, 0], b["ids"][:, 1]]))
        m.second(torch.stack([b["ids"][:, 0], b["matrix"][:, 4].to(torch.int64)], dim=1))
        m.emb(b["ids"])

    check_replay(body)


def test_sizes_that_scale_with_the_batch() -> None:
    def body(m: Any, b: Any) -> None:
        n = b["ids"].size(0)
        flat = b["ids"].reshape(n * 3)
        offsets = torch.arange(0, n * 3, 3)
        m.emb((flat, offsets))
        m.second(flat.view(3, n).t() + torch.full((n, 1), 5) * n + torch.tensor(n))
        m.second(torch.nn.functional.pad(b["ids"], (0, 1), value=9).clamp(max=20))
        m.second(torch.where(b["ids"] > 10, b["ids"], torch.zeros_like(b["ids"]))[: n - 1 + 1])

    check_replay(body)


def test_buffers_and_constants() -> None:
    model = check_replay(lambda m, b: m.emb(b["ids"] + m.shift + m.plain + torch.tensor([1, 2, 3])))
    captured = capture(model, make_batch(5))
    batch = make_batch(4, 3)
    model.shift += 1
    assert torch.equal(captured.replay(batch)["emb"][0], batch["ids"] + model.shift + 7 + torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("row", [[3, 1, 4], [7]])
def test_rows_that_numpy_repeats_for_every_sample(row: list[int]) -> None:
    check_replay(lambda m, b: m.emb(torch.LongTensor(np.tile(np.array(row), [len(b["label"]), 1]))))


@pytest.mark.parametrize("theirs", [False, True])
def test_keyed_jagged_built_in_the_model(theirs: bool) -> None:
    cls = pytest.importorskip("torchrec").KeyedJaggedTensor if theirs else KeyedJaggedTensor

    def body(m: Any, b: Any) -> None:
        n = b["ids"].shape[0]
        m.emb(cls(keys=["x", "y", "z"], values=b["ids"].t().reshape(-1), lengths=torch.ones(3 * n, dtype=torch.int64)))
        k = b["kjt"]
        m.second(cls(keys=k.keys(), values=k.values() % 11, weights=k.weights() * 2, offsets=k.offsets()))

    check_replay(body, lambda size, seed: make_batch(size, seed, cls))


@pytest.mark.parametrize("theirs", [False, True])
def test_keys_taken_out_of_a_keyed_jagged(theirs: bool) -> None:
    cls = pytest.importorskip("torchrec").KeyedJaggedTensor if theirs else KeyedJaggedTensor

    def body(m: Any, b: Any) -> None:
        first, second = b["kjt"].split([1, 1])
        m.emb(first)
        m.second(second)
        m.second(b["kjt"]["a"])
        m.second(b["kjt"]["b"].values())
        m.emb(b["kjt"].permute([1, 0]))

    check_replay(body, lambda size, seed: make_batch(size, seed, cls))


def test_weights_that_are_learned_are_left_to_the_model() -> None:
    def body(m: Any, b: Any) -> None:
        k = b["kjt"]
        weights = k.weights() * m.linear.weight[0, 0]
        m.emb(KeyedJaggedTensor(["a", "b"], k.values(), weights=weights, lengths=k.lengths()))

    model = Model(body)
    captured = capture(model, make_batch(8))
    batch = make_batch(5, 1)
    planned = captured.replay(batch)["emb"][0]
    assert torch.equal(planned.weights(), torch.ones(planned.values().numel()))
    model(batch)
    captured.check("emb", 0, planned, model.emb.received[-1])
    changed = KeyedJaggedTensor(["a", "b"], planned.values() + 1, weights=planned.weights(), lengths=planned.lengths())
    with pytest.raises(CaptureError, match="received other ids"):
        captured.check("emb", 0, planned, changed)
    unweighted = KeyedJaggedTensor(["a", "b"], planned.values(), lengths=planned.lengths())
    with pytest.raises(CaptureError, match="received other ids"):
        captured.check("emb", 0, planned, unweighted)


def test_jagged_built_in_the_model() -> None:
    def body(m: Any, b: Any) -> None:
        keep = b["ids"] > 10
        m.emb(JaggedTensor(values=b["ids"][keep], lengths=keep.sum(1)))

    check_replay(body)


@dataclasses.dataclass
class Data:
    ids: Tensor
    extra: tuple[Tensor, dict[str, Tensor]]


class Custom:
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.batch_size = ids.shape[0]


def test_other_batch_shapes() -> None:
    def ids(size: int, seed: int) -> Tensor:
        return make_batch(size, seed)["ids"]

    check_replay(lambda m, b: m.emb(b), ids)
    check_replay(lambda m, b: (m.emb(b[0]), m.second(b[1][0][:, 1])), lambda n, s: (ids(n, s), [ids(n, s + 1)]))
    check_replay(
        lambda m, b: (m.emb(b.ids), m.emb(b.extra[1]["y"] + 1)),
        lambda n, s: Data(ids(n, s), (ids(n, s), {"y": ids(n, s)})),
    )
    check_replay(lambda m, b: m.emb(b.ids[: b.batch_size]), lambda n, s: Custom(ids(n, s)))


def test_features_in_containers() -> None:
    def body(m: Any, b: Any) -> None:
        m.emb({"a": b["ids"], "b": b["ids"] * 2})
        m.second((b["ids"].flatten(), torch.arange(b["ids"].shape[0]) * 3))

    check_replay(body)


def test_in_place_operations_are_replayed_in_order() -> None:
    def body(m: Any, b: Any) -> None:
        ids = b["ids"].clone()
        ids[:, 0] += 5
        m.emb(ids)
        view = ids[:, 1:]
        view.mul_(3)
        m.emb(ids)
        buffer = torch.empty_like(b["ids"])
        buffer.copy_(ids).add_(1)
        m.second(buffer)

    model = Model(body)
    captured = capture(model, make_batch(6))
    batch = make_batch(5, 1)
    first, second = captured.replay(batch)["emb"]
    start = batch["ids"] + torch.tensor([5, 0, 0])
    assert torch.equal(first, start)
    assert torch.equal(second, start * torch.tensor([1, 3, 3]))
    assert torch.equal(captured.replay(batch)["second"][0], second + 1)
    assert torch.equal(batch["ids"], make_batch(5, 1)["ids"])


def test_tensors_cached_by_the_first_forward() -> None:
    def body(m: Any, b: Any) -> None:
        if not hasattr(m, "cache"):
            m.cache = torch.arange(3) * 1000
        m.emb(b["ids"] + m.cache)

    check_replay(body)


def test_small_batches_can_be_captured() -> None:
    for size in (1, 2, 3):
        check_replay(lambda m, b: m.norm(m.linear(m.emb(b["ids"][:, 0] + b["ids"].size(0)))), size=2)
        model = Model(lambda m, b: m.emb(b["ids"][:, 0] + b["ids"].size(0)))
        assert capture(model, make_batch(size)).replay(make_batch(4, 1))["emb"][0].shape == (4,)


def test_custom_split_is_used() -> None:
    def halves(batch: Any, indices: list[Tensor]) -> list[Any]:
        return [{"ids": batch["ids"][i], "table": batch["table"]} for i in indices]

    batch = {"ids": torch.arange(6), "table": torch.arange(100, 110)}
    captured = capture(Model(lambda m, b: m.emb(b["table"][b["ids"]])), batch, split_batch=halves)
    assert captured.replay(batch)["emb"][0].tolist() == list(range(100, 106))


def test_program_survives_pickling() -> None:
    def body(m: Any, b: Any) -> None:
        m.emb(b["ids"][:, :2].t().reshape(-1) + b["ids"].size(0))
        m.second(KeyedJaggedTensor(["q"], b["ids"].flatten(), lengths=torch.full((b["ids"].size(0),), 3)))
        m.second(b["ids"] + m.shift)

    model = Model(body)
    captured = capture(model, make_batch(8))
    copied = pickle.loads(pickle.dumps(captured))
    copied.bind(model)
    batch = make_batch(5, 2)
    expected, got = captured.replay(batch), copied.replay(batch)
    assert all(same_features(a, b) for name in expected for a, b in zip(expected[name], got[name]))
    model.shift += 1000
    assert copied.replay(batch)["second"][1].min() >= 1000


# ------------------------------------------------------------------------------------------------------- restoring


def test_probe_leaves_no_trace() -> None:
    def body(m: Any, b: Any) -> Any:
        with torch.no_grad():
            m.linear.bias.add_(1)
        np.random.rand()
        random.random()
        out = m.drop(m.norm(m.linear(m.emb(b["ids"][:, 0])))) + torch.rand(4)
        m.shift = m.shift + 1
        m.eval()
        return out.sum()

    model = Model(body)
    model.linear.weight.grad = torch.ones(4, 4)
    model.emb.lookup_context = "mine"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shift, grad = model.shift, model.linear.weight.grad
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    capture(model, make_batch(8))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.norm.num_batches_tracked == 0
    assert model.shift is shift
    assert model.linear.weight.grad is grad
    assert model.linear.bias.grad is None
    assert model.training
    assert model.norm.training
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()
    assert model.emb.lookup_context == "mine"
    assert model.second.lookup_context is None


def test_state_is_restored_after_an_error_of_the_model() -> None:
    def body(m: Any, b: Any) -> Any:
        m.norm(m.emb(b["ids"][:, 0]))
        raise RuntimeError("of the model")

    model = Model(body)
    with pytest.raises(RuntimeError, match="of the model"):
        capture(model, make_batch(8))
    assert model.norm.num_batches_tracked == 0
    assert model.emb.lookup_context is None


def test_batch_is_not_changed_and_gradients_are_enabled() -> None:
    seen = []

    def body(m: Any, b: Any) -> None:
        seen.append((torch.is_grad_enabled(), m.emb(b["ids"]).requires_grad))
        b["label"].zero_()

    batch = make_batch(6)
    with torch.no_grad():
        capture(Model(body), batch)
    assert seen == [(True, True), (True, True)]
    assert batch["label"].sum() > 0


# ---------------------------------------------------------------------------------------------------------- errors

INPUT = r"capture: the input of module 'emb' \(call 0\) cannot be computed from the batch: "
REMEDY = r".*; pass PipelineConfig\(sparse_inputs=...\) \(a function"


def _numpy(m: Any, b: Any) -> None:
    m.emb(torch.from_numpy(b["ids"].numpy() + 1))


def _loop(m: Any, b: Any) -> None:
    m.emb(torch.stack([row + 1 for row in b["ids"]]))


def _item(m: Any, b: Any) -> None:
    m.emb(b["ids"] + int(b["kjt"].values()[0]))


def _mutated(m: Any, b: Any) -> None:
    b["ids"].clamp_(max=3)
    m.emb(b["ids"])


def _values(m: Any, b: Any) -> None:
    m.emb(JaggedTensor(values=m.linear.bias.long(), lengths=torch.ones(4, dtype=torch.int64)))


def _unregistered(m: Any, b: Any) -> None:
    m.emb((b["ids"] + m.loose).long())


def _written_buffer(m: Any, b: Any) -> None:
    m.shift.add_(1)
    m.emb(b["ids"] + m.shift)


def _kinds(m: Any, b: Any) -> None:
    m.emb(b["ids"] if b["ids"].shape[0] == 8 else (b["ids"], b["ids"]))


def _float(m: Any, b: Any) -> None:
    m.emb((b["ids"] * float(b["label"].sum())).long())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda m, b: m.emb(m.drop(b["ids"].float()).long()), r"it depends on random numbers \(aten.bernoulli_"),
        (lambda m, b: m.emb(torch.randint(0, 9, (b["ids"].size(0),))), r"it depends on random numbers \(aten.randint"),
        (lambda m, b: m.emb(torch.empty(3).uniform_().long()), r"it depends on random numbers \(aten.uniform_"),
        (lambda m, b: m.emb(m.linear.weight.argmax(1)), r"it depends on parameter 'linear.weight'"),
        (lambda m, b: m.emb(m.linear(b["ids"].float()[:, [0, 0, 0, 0]]).long()), r"it depends on parameter 'linear.*'"),
        (
            lambda m, b: m.emb(m.second(b["ids"]).argmax(1)),
            r"it depends on the output of embedding module 'second'",
        ),
        (lambda m, b: m.emb({"x": m.linear.bias.data.long()}), r"it depends on parameter 'linear.bias'"),
        (_values, r"its values depend on parameter 'linear.bias'"),
        (_unregistered, r"it depends on a trainable tensor that is not a parameter of the model"),
        (_numpy, r"the input uses a tensor that differs between two batch sizes and was not made by recorded"),
        (_loop, r"\d+ operations lead to it for a batch of 8 samples and \d+ \(or others\) for one of 3: control flow"),
        (_item, r"an integer in aten.add.* is \d+ for a batch of 8 samples and \d+ for 3, no multiple"),
        (_float, r"aten.mul.* has an argument that is [\d.]+ for one batch size and"),
        (_mutated, r"aten.clamp_ changes batch\['ids'\] in place before it is used \(clone it first\)"),
        (_written_buffer, r"aten.add_.* changes buffer 'shift' in place before it is used"),
        (_kinds, r"it is a Tensor for a batch of 8 samples and a tuple for one of 3"),
    ],
)
def test_inputs_that_cannot_be_captured(body: Callable[[Any, Any], Any], reason: str) -> None:
    with pytest.raises(CaptureError, match=INPUT + reason + REMEDY):
        capture(Model(body), make_batch(8, seed=4))


def test_call_count_that_depends_on_data() -> None:
    def body(m: Any, b: Any) -> None:
        m.emb(b["ids"])
        if b["ids"].shape[0] > 5:
            m.emb(b["ids"])

    message = r"capture: module 'emb' is called 2 times for a batch of 8 samples and 1 times for one of 3: control flow"
    with pytest.raises(CaptureError, match=message + REMEDY):
        capture(Model(body), make_batch(8))


def test_empty_batch() -> None:
    with pytest.raises(ValueError, match=r"capture_inputs: expected a batch with at least one sample, got none"):
        capture(Model(lambda m, b: m.emb(b)), torch.zeros(0, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("ids"), r"capture: batch\['ids'\] is missing; expected .*, got dict with \['kjt', 'matrix', "),
        (lambda b: b.update(ids=[b["ids"]]), r"capture: batch\['ids'\] must be a Tensor, .*, got list"),
        (lambda b: b.update(kjt=b["ids"]), r"capture: batch\['kjt'\] must be a KeyedJaggedTensor, .* got Tensor"),
        (
            lambda b: b.update(ids=b["ids"][:, :2]),
            r"capture: aten.select.*, on the way to an embedding input, failed for a batch of 4 samples \(.*Error",
        ),
        (
            lambda b: b.update(two=KeyedJaggedTensor(["a"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))),
            r"capture: batch\['two'\] has no key 'b', which the captured batch had; got keys \['a'\]",
        ),
        (
            lambda b: b.update(
                weighted=KeyedJaggedTensor(["a"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
            ),
            r"capture: batch\['weighted'\] must have weights, .*, got none",
        ),
    ],
)
def test_batches_of_another_structure(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    def make(size: int, seed: int) -> dict[str, Any]:
        batch = make_batch(size, seed)
        return {**batch, "two": make_batch(size, seed + 10)["kjt"], "weighted": make_batch(size, seed + 20)["kjt"]}

    def body(m: Any, b: Any) -> None:
        m.emb(b["kjt"])
        m.emb(b["ids"][:, 2] + 1)
        m.second(b["two"].split([1, 1])[1])
        m.second(b["weighted"].weights().round().long())

    captured = capture(Model(body), make(8, 0))
    batch = make(4, 1)
    captured.replay(batch)
    change(batch)
    batch["batch_size"] = 4
    with pytest.raises(CaptureError, match=message):
        captured.replay(batch)


def test_check_names_module_call_and_plan() -> None:
    captured = capture(Model(lambda m, b: m.emb(b["matrix"][:, 0].long())), make_batch(8))
    ids = torch.arange(3)
    captured.check("emb", 0, ids, ids.clone())
    message = (
        r"capture: module 'emb' call 0 received other ids than planned from the batch \(planned: batch\['matrix'\] -> "
        r"(slice -> )?select -> _to_copy\): its input depends on"
    )
    with pytest.raises(CaptureError, match=message + REMEDY):
        captured.check("emb", 0, ids, ids + 1)
    captured.check_calls("emb", 2, 2)
    with pytest.raises(
        CaptureError, match=r"module 'emb' was called 1 times in a forward, planned were 2: control flow"
    ):
        captured.check_calls("emb", 2, 1)


def test_ids_that_change_with_state_are_caught_by_check() -> None:
    model = Model(lambda m, b: m.emb(b["ids"] + m.step))
    model.step = 1
    captured = capture(model, make_batch(8))
    batch = make_batch(4, 1)
    planned = captured.replay(batch)["emb"][0]
    model.step = 2
    model(batch)
    with pytest.raises(CaptureError, match="received other ids than planned"):
        captured.check("emb", 0, planned, model.emb.received[-1])


# ------------------------------------------------------------------------------------------------- user functions


def test_from_function_by_name_and_by_module() -> None:
    model = Model(lambda m, b: m.emb(b["ids"]))
    modules = embedding_modules(model)
    inputs = from_function(lambda b: {model.emb: [b["ids"]], "second": []}, modules)
    batch = make_batch(4)
    planned = inputs.replay(batch)
    assert planned["emb"][0] is batch["ids"]
    assert planned["second"] == []
    with pytest.raises(CaptureError, match=r"received other ids than planned .* \(planned: sparse_inputs\)"):
        inputs.check("emb", 0, planned["emb"][0], batch["ids"] + 1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], r"sparse_inputs must return a dict \{module: \[input per call\]\}, got list"),
        ({"other": []}, r"sparse_inputs returned the key 'other', which is no embedding module .*\['emb', 'second'\]"),
        ({nn.Linear(1, 1): []}, r"sparse_inputs returned the key Linear, which is no embedding module"),
        ({"emb": torch.zeros(1)}, r"must return a list with one input per call for module 'emb', got Tensor"),
        ({"emb": []}, r"sparse_inputs returned nothing for module 'second'; return \[\]"),
    ],
)
def test_from_function_checks_the_shape(returned: Any, message: str) -> None:
    inputs = from_function(lambda b: returned, embedding_modules(Model(lambda m, b: None)))
    with pytest.raises(CaptureError, match=message):
        inputs.replay(make_batch(2))


# --------------------------------------------------------------------------------------------------- same_features


def test_same_features() -> None:
    a, b = make_batch(4)["kjt"], make_batch(4)["kjt"]
    assert same_features(a, b)
    assert not same_features(a, make_batch(4, 1)["kjt"])
    unweighted = KeyedJaggedTensor(a.keys(), a.values(), lengths=a.lengths())
    assert not same_features(a, unweighted)
    other = KeyedJaggedTensor(a.keys(), a.values(), weights=a.weights() + 1, lengths=a.lengths())
    assert not same_features(a, other)
    assert same_features({"k": a}, {"k": other}, weights=False)
    renamed = KeyedJaggedTensor(["a", "c"], a.values(), weights=a.weights(), lengths=a.lengths())
    assert not same_features(a, renamed)
    assert not same_features(a, a["a"])
    ids = torch.arange(3)
    assert same_features({"x": (ids, 1)}, {"x": (ids.clone(), 1)})
    assert not same_features({"x": (ids, 1)}, {"x": (ids.clone(), 2)})
    assert not same_features({"x": ids}, {"y": ids})
    assert not same_features(ids, ids.int())
    assert not same_features(ids, [0, 1, 2])
    assert batch_size_of({"k": a}) == 4


def test_lazy_modules_are_named() -> None:
    model = Model(lambda m, b: m.emb(b["ids"]))
    model.lazy = nn.LazyLinear(3)
    with pytest.raises(
        CaptureError, match=r"capture: 'lazy.weight' of the model is not initialized yet; run one forward"
    ):
        capture(model, make_batch(4))


def test_compiled_parts_are_seen() -> None:
    model = Model(lambda m, b: m.emb(m.compiled(b["ids"])))
    model.compiled = torch.compile(lambda ids: ids * 2 + 1, backend="eager")
    captured = capture(model, make_batch(8))
    batch = make_batch(5, 1)
    assert torch.equal(captured.replay(batch)["emb"][0], batch["ids"] * 2 + 1)


def test_captures_that_overlap_leave_the_compiler_as_it_was() -> None:
    """Ranks that are threads capture at once, and need not leave in the order in which they came."""
    calls = []
    compiled = torch.compile(lambda ids: ids + 1, backend=lambda graph, _: calls.append("compiled") or graph.forward)
    first, second = eager_only(), eager_only()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    compiled(torch.arange(3))
    assert not calls
    second.__exit__(None, None, None)
    compiled(torch.arange(3))
    assert calls == ["compiled"]


def test_the_compiler_is_not_imported() -> None:
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from capture_fakes import FakeEmbedding\n"
        "from nestpipe_kernels.capture import capture_inputs\n"
        "m = FakeEmbedding()\n"
        "capture_inputs(m, {'m': m}, torch.arange(8), lambda m, b: m(b))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], timeout=60, check=False)
    assert done.returncode == 0
