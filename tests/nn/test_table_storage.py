"""Tables' storage types in the modules: how they are named, separate stores, float32 outside, weights rounded once."""

from __future__ import annotations

import enum

import pytest
import torch

from nestpipe_kernels import init, optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.types import DataType

HALVES = [DataType.FP16, DataType.BF16]


class TheirDataType(enum.Enum):
    """An enum as TorchRec has."""

    FP16 = "FP16"
    INT8 = "INT8"


def collection(*configs: EmbeddingBagConfig, optimizer=None) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(list(configs), optimizer=optim.SGD(lr=0.1) if optimizer is None else optimizer)


def batch(*features: str) -> KeyedJaggedTensor:
    count = len(features)
    return KeyedJaggedTensor(list(features), torch.tensor([1, 2, 3] * count), lengths=torch.tensor([1, 2] * count))


@pytest.mark.parametrize("given", [DataType.FP16, "FP16", TheirDataType.FP16])
def test_names_of_a_type(given):
    assert EmbeddingBagConfig(10, 4, "t", data_type=given).data_type is DataType.FP16


def test_bad_settings():
    with pytest.raises(ValueError, match=r"table 't': unknown data_type .*INT8.*: choose one of FP32, FP16, BF16"):
        EmbeddingBagConfig(10, 4, "t", data_type=TheirDataType.INT8)
    with pytest.raises(ValueError, match="table 't': stochastic_rounding needs data_type FP16 or BF16, got FP32"):
        EmbeddingBagConfig(10, 4, "t", stochastic_rounding=True)
    with pytest.raises(TypeError, match="table 't': stochastic_rounding must be True or False, got 'yes'"):
        EmbeddingBagConfig(10, 4, "t", data_type="BF16", stochastic_rounding="yes")
    with pytest.raises(ValueError, match="table 't': data_type BF16 needs an optimizer; pass optimizer="):
        EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", data_type="BF16")])


def test_types_and_roundings_live_in_stores_of_their_own():
    kinds = [("a", "FP32", False), ("b", "FP16", False), ("c", "BF16", False), ("d", "BF16", True), ("e", "BF16", True)]
    configs = [
        EmbeddingBagConfig(10, 4, name, data_type=data_type, stochastic_rounding=stochastic)
        for name, data_type, stochastic in kinds
    ]
    module = collection(*configs)
    found = [
        (tuple(t.name for t in store.tables), store.data_type.value, store.stochastic_rounding)
        for store in module.row_stores()
    ]
    assert found == [
        (("a",), "FP32", False),
        (("b",), "FP16", False),
        (("c",), "BF16", False),
        (("d", "e"), "BF16", True),
    ]
    output = module(batch("a", "b", "c", "d", "e")).values()
    assert output.dtype == torch.float32
    assert output.shape == (2, 20)


@pytest.mark.parametrize("data_type", HALVES)
def test_outputs_are_the_stored_values_and_training_rounds_once(data_type):
    module = collection(EmbeddingBagConfig(10, 3, "t", data_type=data_type, init=init.Normal(0.0, 1.0)))
    start = module.state_dict()["embedding_bags.t.weight"]
    assert start.dtype == torch.float32
    drawn = torch.from_numpy(init.Normal(0.0, 1.0).reference(0, "t", torch.arange(10).numpy(), 3))
    assert torch.equal(start, drawn.to(data_type.torch_dtype).float())
    output = module(batch("t")).values()
    assert torch.equal(output, torch.stack([start[1], start[2] + start[3]]))
    output.sum().backward()
    expected = start.clone()
    expected[1:4] = (start[1:4] - torch.tensor(0.1)).to(data_type.torch_dtype).float()
    assert torch.equal(module.state_dict()["embedding_bags.t.weight"], expected)


@pytest.mark.parametrize("data_type", HALVES)
def test_state_dict_round_trip_and_loading_rounds_once(data_type):
    module, other = (collection(EmbeddingBagConfig(10, 3, "t", data_type=data_type)) for _ in range(2))
    weight = torch.randn(10, 3)
    weight[4] = torch.tensor([0.0, -0.0, 1.0])
    module.load_state_dict({"embedding_bags.t.weight": weight})
    rounded = weight.to(data_type.torch_dtype).float()
    loaded = module.state_dict()
    assert torch.equal(loaded["embedding_bags.t.weight"].view(torch.int32), rounded.view(torch.int32))
    other.load_state_dict(loaded)
    assert torch.equal(other.state_dict()["embedding_bags.t.weight"], rounded)


def test_loading_initial_values_inserts_no_rows():
    module = collection(EmbeddingBagConfig(10, 3, "t", data_type="BF16"))
    module.load_state_dict(module.state_dict())
    assert len(module.store("t")) == 0


def test_init_fn_and_unpooled_tables():
    def fill(weight):
        weight.copy_(torch.arange(30).view(10, 3) / 7)

    table = EmbeddingConfig(10, 3, "t", data_type="FP16", init_fn=fill)
    module = EmbeddingCollection([table], optimizer=optim.SGD(lr=0.1))
    values = module(batch("t"))["t"].values()
    assert values.dtype == torch.float32
    assert torch.equal(values, (torch.arange(30).view(10, 3) / 7)[1:4].half().float())


def test_custom_initial_values_of_an_open_table():
    given = init.Custom(lambda keys, dim, seed: keys[:, None].float() + torch.arange(dim))
    module = collection(EmbeddingBagConfig(-1, 3, "t", init=given))
    assert module(batch("t")).values().tolist() == [[1.0, 2.0, 3.0], [5.0, 7.0, 9.0]]
    module.eval()
    assert module(batch("t")).values().tolist() == [[1.0, 2.0, 3.0], [5.0, 7.0, 9.0]]
    with_parameters = EmbeddingBagCollection([EmbeddingBagConfig(10, 3, "t", init=given)])
    assert with_parameters.state_dict()["embedding_bags.t.weight"][4].tolist() == [4.0, 5.0, 6.0]
