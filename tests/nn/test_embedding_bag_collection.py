"""EmbeddingBagCollection over stores: outputs and gradients against TorchRec, weights, learning rates, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lookups import StoreLookups
from torch import Tensor

from nestpipe_kernels import init, optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.types import UNBOUNDED, PoolingType


def _random_features(names: list[str], limits: list[int], batch: int, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(len(names) * 100 + batch)
    lengths = torch.randint(0, 4, (len(names), batch), generator=generator)
    values = [
        torch.randint(0, limit, (int(row.sum()),), generator=generator)
        for limit, row in zip(limits, lengths, strict=True)
    ]
    total = int(lengths.sum())
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(names, torch.cat(values), weights=weights, lengths=lengths.reshape(-1))


def _torchrec_twin(ebc: EmbeddingBagCollection, features: KeyedJaggedTensor) -> tuple[Any, Any]:
    modules = pytest.importorskip("torchrec.modules.embedding_modules", reason="torchrec is not installed")
    configs = pytest.importorskip("torchrec.modules.embedding_configs", reason="torchrec is not installed")
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")
    twin = modules.EmbeddingBagCollection(
        tables=[
            configs.EmbeddingBagConfig(
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                name=config.name,
                feature_names=list(config.feature_names),
                pooling=configs.PoolingType[config.pooling.name],
            )
            for config in ebc.embedding_bag_configs()
        ],
        is_weighted=ebc.is_weighted(),
    )
    twin.load_state_dict(ebc.state_dict())
    theirs = sparse.KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        weights=features.weights_or_none(),
    )
    return twin, theirs


def _tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(20, 3, "t", feature_names=["b", "a"]),
        EmbeddingBagConfig(30, 3, "u", feature_names=["a"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(40, 5, "v", feature_names=["c"], optimizer=optim.Adagrad(lr=0.1)),
    ]


@pytest.mark.parametrize("batch", [1, 7])
def test_outputs_and_gradients_equal_torchrecs(batch: int) -> None:
    ebc = EmbeddingBagCollection(_tables(), optimizer=optim.SGD(lr=0.1), seed=3)
    features = _random_features(["a", "extra", "b", "c"], [20, 9, 20, 40], batch)
    twin, theirs = _torchrec_twin(ebc, features)
    ebc.lookup_context = lookups = StoreLookups()
    ours, expected = ebc(features), twin(theirs)
    assert ours.keys() == expected.keys() == ["b", "a@t", "a@u", "c"]
    assert ours.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(ours.values(), expected.values(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ebc(theirs).values(), expected.values(), rtol=1e-6, atol=1e-7)
    scale = torch.rand(expected.values().shape, generator=torch.Generator().manual_seed(1))
    (ours.values() * scale).sum().backward()
    (expected.values() * scale).sum().backward()
    _assert_row_gradients(lookups, twin, {(0, 0): "t", (0, 1): "u", (1, 0): "v"})


def test_weighted_outputs_and_gradients_equal_torchrecs() -> None:
    tables = [
        EmbeddingBagConfig(20, 3, "t", feature_names=["a"]),
        EmbeddingBagConfig(20, 4, "u", feature_names=["a", "b"]),
    ]
    ebc = EmbeddingBagCollection(tables, is_weighted=True, optimizer=optim.SGD(lr=0.1))
    features = _random_features(["a", "b"], [20, 20], 6, weighted=True)
    twin, theirs = _torchrec_twin(ebc, features)
    ours_weights, their_weights = features.weights().requires_grad_(), theirs.weights().detach().requires_grad_()
    theirs._weights = their_weights
    ebc.lookup_context = lookups = StoreLookups()
    ours, expected = ebc(features), twin(theirs)
    torch.testing.assert_close(ours.values(), expected.values(), rtol=1e-6, atol=1e-6)
    ours.values().pow(2).sum().backward()
    expected.values().pow(2).sum().backward()
    torch.testing.assert_close(ours_weights.grad, their_weights.grad, rtol=1e-5, atol=1e-6)
    _assert_row_gradients(lookups, twin, {(0, 0): "t", (1, 0): "u"})


def _assert_row_gradients(lookups: StoreLookups, twin: Any, names: dict[tuple[int, int], str]) -> None:
    assert lookups.row_gradients
    seen: dict[str, Tensor] = {}
    for (store, table, key), grad in lookups.row_gradients.items():
        name = names[store, table]
        seen.setdefault(name, torch.zeros_like(twin.embedding_bags[name].weight))[key] = grad
    for name, grad in seen.items():
        torch.testing.assert_close(grad, twin.embedding_bags[name].weight.grad, rtol=1e-5, atol=1e-6)


def test_max_pooling_and_padding() -> None:
    tables = [
        EmbeddingBagConfig(10, 4, "m", feature_names=["a"], pooling=PoolingType.MAX),
        EmbeddingBagConfig(10, 4, "p", feature_names=["b"], pooling=PoolingType.MEAN, padding_idx=-1),
    ]
    ebc = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1))
    ebc.lookup_context = StoreLookups()
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 9, 5, 9]), lengths=torch.tensor([3, 0, 2, 1]))
    output = ebc(features)
    maximum, padded = ebc.embedding_bags["m"].weight, ebc.embedding_bags["p"].weight
    assert output["a"][0].equal(maximum[[1, 2, 3]].amax(0))
    assert output["a"][1].equal(torch.zeros(4))
    assert output["b"][0].equal(padded[5])
    assert output["b"][1].equal(torch.zeros(4))
    assert padded[9].equal(torch.zeros(4))


def test_fault_11_open_tables_take_any_key() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(UNBOUNDED, 4, "t")], optimizer=optim.SGD(lr=0.1))
    ebc.lookup_context = StoreLookups()
    keys = torch.tensor([0, -1, -2, -5, -(2**63), 2**63 - 1])
    output = ebc(KeyedJaggedTensor(["t"], keys, lengths=torch.ones(6, dtype=torch.int64)))["t"]
    assert output.unique(dim=0).shape == (6, 4)
    assert output.abs().max() <= 0.5
    assert output.equal(ebc.store("t").find(keys)[0])


def test_fault_15_eval_reads_initial_values_and_inserts_nothing() -> None:
    table = EmbeddingBagConfig(UNBOUNDED, 4, "t", init=init.Constant(0.25))
    ebc = EmbeddingBagCollection([table], optimizer=optim.SGD(lr=0.1)).eval()
    ebc.lookup_context = StoreLookups()
    keys = torch.tensor([5, 6])
    assert ebc(KeyedJaggedTensor(["t"], keys, lengths=torch.tensor([1, 1]))).values().equal(torch.full((2, 4), 0.25))
    store = ebc.row_stores()[0]
    assert store.find_handles(keys, torch.zeros(2, dtype=torch.int32)).tolist() == [-1, -1]


def test_fault_14_reaches_the_caller_of_forward() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t")], optimizer=optim.SGD(lr=0.1))
    ebc.lookup_context = StoreLookups()
    features = KeyedJaggedTensor(["t"], torch.tensor([3, 10]), lengths=torch.tensor([1, 1]))
    with pytest.raises(IndexError, match=r"EmbeddingBagCollection: table 't', feature 't': id 10 at position 1 "):
        ebc(features)


def test_zero_output_is_like_forwards() -> None:
    ebc = EmbeddingBagCollection(_tables(), optimizer=optim.SGD(lr=0.1))
    features = _random_features(["a", "b", "c"], [20, 20, 40], 4)
    zeros = ebc.zero_output(features)
    assert zeros.keys() == ["b", "a@t", "a@u", "c"]
    assert zeros.values().equal(torch.zeros(4, 14))
    assert zeros.values().requires_grad


def test_stores_hold_tables_of_like_settings() -> None:
    tables = [
        EmbeddingBagConfig(9, 2, "a", lr_scale=0.5),
        EmbeddingBagConfig(9, 2, "b", optimizer=optim.SGD(lr=3.0)),
        EmbeddingBagConfig(9, 2, "c", trainable=False),
        EmbeddingBagConfig(UNBOUNDED, 2, "d", optimizer=optim.Adam(lr=0.1), capacity=100),
    ]
    ebc = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=1.0), seed=7)
    stores = ebc.row_stores()
    assert [[spec.name for spec in store.tables] for store in stores] == [["a", "b"], ["c"], ["d"]]
    assert [store.tables[0].trainable for store in stores] == [True, False, True]
    assert (stores[2].tables[0].capacity, stores[2].tables[0].seed) == (100, 7)
    assert list(ebc.named_parameters()) == []


def test_tables_share_a_store_whose_optimizers_differ_in_lr_alone() -> None:
    rules = [
        optim.SGD(lr=0.1, momentum=0.9),
        optim.SGD(lr=0.2, momentum=0.9),
        optim.SGD(lr=0.1, momentum=0.8),
        optim.SGD(lr=0.1),
        optim.SGD(lr=0.1, weight_decay=0.5),
        optim.AdamW(),
        optim.AdamW(weight_decay=0.5),
    ]
    tables = [EmbeddingBagConfig(10, 4, f"t{i}", feature_names=[f"f{i}"], optimizer=r) for i, r in enumerate(rules)]
    ebc = EmbeddingBagCollection(tables)
    named = [[spec.name for spec in store.tables] for store in ebc.row_stores()]
    assert named == [["t0", "t1"], ["t2"], ["t3"], ["t4"], ["t5"], ["t6"]]
    assert ebc.learning_rates(0).tolist() == pytest.approx([0.1, 0.2])


def test_learning_rates_follow_the_sparse_optimizer() -> None:
    tables = [
        EmbeddingBagConfig(9, 2, "a", lr_scale=0.5),
        EmbeddingBagConfig(9, 2, "b", optimizer=optim.SGD(lr=3.0)),
        EmbeddingBagConfig(9, 2, "c", trainable=False),
    ]
    ebc = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=1.0))
    assert ebc.learning_rates(0).tolist() == [0.5, 3.0]
    assert ebc.learning_rates(1).tolist() == [0.0]
    assert ebc.learning_rates(0).dtype is torch.float32
    scheduler = torch.optim.lr_scheduler.StepLR(ebc.sparse_optimizer, step_size=1, gamma=0.5)
    scheduler.step()
    assert ebc.learning_rates(0).tolist() == [0.25, 1.5]


def test_init_fn_is_seeded_by_table_and_leaves_the_generator_alone() -> None:
    def fill(weight: Tensor) -> None:
        torch.nn.init.normal_(weight)

    tables = [EmbeddingBagConfig(50, 4, name, init_fn=fill) for name in ("a", "b")]
    before = torch.random.get_rng_state()
    first = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1), seed=1).state_dict()
    again = EmbeddingBagCollection(tables[::-1], optimizer=optim.SGD(lr=0.1), seed=1).state_dict()
    other = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1), seed=2).state_dict()
    assert torch.random.get_rng_state().equal(before)
    key = "embedding_bags.a.weight"
    assert first[key].equal(again[key])
    assert not first[key].equal(first["embedding_bags.b.weight"])
    assert not first[key].equal(other[key])
    wrong = EmbeddingBagConfig(5, 4, "w", init_fn=lambda weight: torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"table 'w': init_fn returned shape \[4, 5\], expected \[5, 4\]"):
        EmbeddingBagCollection([wrong], optimizer=optim.SGD(lr=0.1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(UNBOUNDED, 4, "t")]),
            ValueError,
            "EmbeddingBagCollection: table 't': an open vocabulary .* needs an optimizer; pass optimizer=",
        ),
        (
            lambda: EmbeddingBagCollection(
                [EmbeddingBagConfig(9, 4, "a", optimizer=optim.SGD(lr=0.1)), EmbeddingBagConfig(9, 4, "b")]
            ),
            ValueError,
            r"tables \['a'\] have an optimizer, but \['b'\] have none; give the collection an optimizer",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a")], optimizer=torch.optim.SGD),
            TypeError,
            "table 'a': optimizer must be an nk.optim object such as .* got type; .* leave optimizer out",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a", capacity=3)]),
            ValueError,
            "table 'a': capacity needs an optimizer",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a", lr_scale=2.0)]),
            ValueError,
            "table 'a': lr_scale needs an optimizer",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a.b")]),
            ValueError,
            "table 'a.b': a table without an optimizer is a module, whose name must not contain a dot",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a", pooling=PoolingType.MEAN)], is_weighted=True),
            ValueError,
            "is_weighted needs pooling SUM, but table 'a' has MEAN",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a")], device="meta"),
            ValueError,
            "device meta is not supported; use device='cpu'",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a")], seed="x"),  # type: ignore[arg-type]
            TypeError,
            "seed must be an integer, got 'x'",
        ),
    ],
)
def test_refusals(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
