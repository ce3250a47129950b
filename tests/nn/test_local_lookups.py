"""Modules of one process: rows pooled and updated where they lie give what exchanging copies gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe_kernels import UNBOUNDED, init, optim, policy
from nestpipe_kernels.errors import NonFiniteGradientError
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.stages import local
from nestpipe_kernels.testing.explorer import read_policies, read_store
from nestpipe_kernels.types import DataType, PoolingType

FEATURES = ["a", "b", "c"]


def _table(name: str, dim: int, pooling: str = "SUM", **settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        UNBOUNDED, dim, f"t{name}", feature_names=[name], pooling=PoolingType[pooling], **settings
    )


def _bags(optimizer: Any = None, weighted: bool = False, **settings: Any) -> Callable[[], Any]:
    """Three tables in two stores, pooled by sum and mean (weighted: by sum)."""
    tables = [_table("a", 5), _table("b", 5, "SUM" if weighted else "MEAN"), _table("c", 20, **settings)]
    return lambda: EmbeddingBagCollection(tables, weighted, optimizer=optimizer or optim.RowWiseAdagrad(0.1), seed=3)


def _given(keys: Tensor, dim: int, seed: int) -> Tensor:
    return keys.to(torch.float32)[:, None].expand(-1, dim) * 0.01


MODELS: dict[str, Callable[[], Any]] = {
    "bags": _bags(),
    "adam": _bags(optim.Adam(0.1)),
    "lamb": _bags(optim.LAMB(0.1)),
    "weighted": _bags(weighted=True),
    "max": _bags(pooling="MAX"),
    "padded": lambda: EmbeddingBagCollection([_table("a", 4, padding_idx=4)], optimizer=optim.Adagrad(0.1)),
    "rates": lambda: EmbeddingBagCollection(
        [_table("a", 4), _table("b", 4, trainable=False), _table("c", 4, lr_scale=0.5)], optimizer=optim.Adam(0.1)
    ),
    "evicting": lambda: EmbeddingBagCollection(
        [_table("a", 4, capacity=30, eviction=policy.LRU()), _table("b", 4, admission=policy.MinFrequency(3))],
        optimizer=optim.SGD(0.1),
    ),
    "given": lambda: EmbeddingBagCollection(
        [_table("a", 4, admission=policy.MinFrequency(3), default_row=init.Custom(_given))],
        optimizer=optim.SGD(0.1),
    ),
    "halves": _bags(data_type=DataType.BF16),
    "rows": lambda: EmbeddingCollection(
        [EmbeddingConfig(UNBOUNDED, 6, f"t{name}", feature_names=[name]) for name in FEATURES],
        optimizer=optim.FTRL(0.1),
    ),
}  # fmt: skip


def _features(step: int, weights: bool, trained: bool, samples: int = 13) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (len(FEATURES) * samples,), generator=generator)
    values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator) ** 2
    drawn = torch.rand(len(values), generator=generator, requires_grad=trained) if weights else None
    return KeyedJaggedTensor(FEATURES, values, drawn, lengths=lengths)


def _flat(output: Any) -> Tensor:
    if isinstance(output, dict):
        return torch.cat([part.values().flatten() for part in output.values()])
    return output.values().flatten()


def _train(model: Any, name: str, calls: int) -> list[Any]:
    """Everything a caller can see of some steps and evaluations."""
    seen: list[Any] = []
    for step in range(6):
        inputs = [_features(7 * step + k, name == "weighted", step % 2 == 1) for k in range(calls)]
        outputs = [_flat(model(one)) for one in inputs]
        sum((out * torch.linspace(-1, 1, len(out)).exp()).sum() for out in outputs).backward()
        seen += [out.detach().clone() for out in outputs]
        seen += [one.weights().grad for one in inputs if name == "weighted" and step % 2 == 1]
        with torch.no_grad():
            seen.append(_flat(model(_features(1000 + step, name == "weighted", False))))
    for store in model.row_stores():
        rows: dict[Any, bytes] = {}
        notes: dict[Any, Any] = {}
        read_store(store, rows, notes)
        seen.append((rows, notes, read_policies(store), store.last_batch))
    return seen


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_by_exchanges(monkeypatch, name: str, calls: int) -> None:
    here = _train(MODELS[name](), name, calls)
    monkeypatch.setattr(local, "is_local", lambda rank: False)
    exchanged = _train(MODELS[name](), name, calls)
    assert len(here) == len(exchanged)
    for ours, truth in zip(here, exchanged):
        if isinstance(ours, Tensor):
            assert torch.equal(ours.view(torch.int32), truth.view(torch.int32))
        else:
            assert ours == truth


def test_which_models_are_local() -> None:
    def alone(name: str) -> bool:
        model = MODELS[name]()
        return local.is_local(model._own_context()._rank)

    assert alone("bags") and alone("rows") and not alone("halves")


@pytest.mark.parametrize("between", ["lookup", "erase", "clear"])
def test_rows_that_went_between_lookup_and_backward_are_left_alone(monkeypatch, between: str) -> None:
    def run() -> dict[Any, bytes]:
        model = MODELS["evicting"]()
        output = _flat(model(_features(0, False, False)))
        if between == "lookup":
            with torch.enable_grad():
                model(_features(1, False, False))
        elif between == "erase":
            model.store("ta").erase(torch.arange(0, 20) ** 2)
        else:
            model.reset_parameters()
            model(_features(2, False, False))
        output.sum().backward()
        rows: dict[Any, bytes] = {}
        read_store(model.row_stores()[0], rows, {})
        return rows

    here = run()
    monkeypatch.setattr(local, "is_local", lambda rank: False)
    assert here == run()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_gradients_that_do_not_count_change_nothing(bad: float) -> None:
    model = MODELS["bags"]()
    _flat(model(_features(0, False, False))).sum().backward()
    before = _train_state(model)
    output = _flat(model(_features(0, False, False)))
    with pytest.raises(NonFiniteGradientError, match="no row was changed"):
        (output * bad).sum().backward()
    assert _train_state(model) == before


def test_large_gradients_that_are_finite_count(monkeypatch) -> None:
    def run() -> list[Any]:
        model = EmbeddingBagCollection([_table("a", 4)], optimizer=optim.SGD(0.1))
        (_flat(model(_features(0, False, False))) * 1e35).sum().backward()
        return _train_state(model)

    here = run()
    monkeypatch.setattr(local, "is_local", lambda rank: False)
    assert here == run()


def _train_state(model: Any) -> list[Any]:
    found = []
    for store in model.row_stores():
        rows: dict[Any, bytes] = {}
        read_store(store, rows, {})
        found.append(rows)
    return found
