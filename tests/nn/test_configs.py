"""Table configs: TorchRec's field order, defaults, and the message of every refusal."""

from __future__ import annotations

import math

import pytest

from nestpipe_kernels.nn.configs import EmbeddingBagConfig, EmbeddingConfig, check_tables, embedding_names
from nestpipe_kernels.types import UNBOUNDED, DataType, PoolingType


def test_fields_stand_in_torchrecs_order() -> None:
    config = EmbeddingBagConfig(10, 4, "t", DataType.FP32, ["f"], 0.5, -0.5, None, PoolingType.MEAN)
    assert (config.num_embeddings, config.embedding_dim, config.name, config.feature_names) == (10, 4, "t", ["f"])
    assert (config.weight_init_max, config.weight_init_min, config.pooling) == (0.5, -0.5, PoolingType.MEAN)
    with pytest.raises(TypeError):
        EmbeddingBagConfig(10, 4, "t", DataType.FP32, ["f"], 0.5, -0.5, None, PoolingType.MEAN, None)


def test_defaults() -> None:
    fixed = EmbeddingBagConfig(16, 4, "t")
    assert fixed.feature_names == ["t"]
    assert fixed.pooling is PoolingType.SUM
    assert (fixed.get_weight_init_min(), fixed.get_weight_init_max()) == (-0.25, 0.25)
    opened = EmbeddingConfig(UNBOUNDED, 64, "o")
    assert opened.is_open
    assert opened.get_weight_init_max() == pytest.approx(1 / math.sqrt(64))
    assert EmbeddingConfig(10, 4, "t", padding_idx=-1).padding_key == 9
    assert EmbeddingConfig(UNBOUNDED, 4, "t", padding_idx=-1).padding_key == -1


def test_other_spellings_of_enums() -> None:
    config = EmbeddingBagConfig(4, 2, "t", data_type="FP32", pooling="MAX")
    assert (config.data_type, config.pooling) == (DataType.FP32, PoolingType.MAX)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 0}, "table 't': num_embeddings must be an integer >= 1 or UNBOUNDED, got 0"),
        ({"num_embeddings": -2}, "num_embeddings must be an integer >= 1 or UNBOUNDED, got -2"),
        ({"embedding_dim": 0}, "table 't': embedding_dim must be an integer >= 1, got 0"),
        ({"pooling": "AVG"}, "table 't': unknown pooling 'AVG': choose one of SUM, MEAN, MAX, NONE"),
        ({"pooling": PoolingType.NONE}, "pooling must be SUM, MEAN or MAX, got NONE: use an EmbeddingCollection"),
        ({"data_type": "FP8"}, "unknown data_type 'FP8': choose one of FP32"),
        ({"weight_init_min": 0.5, "weight_init_max": 0.1}, "weight_init_min 0.5 is above weight_init_max 0.1"),
        ({"num_embeddings": UNBOUNDED, "init_fn": lambda w: w}, "init_fn needs a fixed num_embeddings; .* takes init="),
        ({"init": object(), "weight_init_max": 1.0}, "weight_init_min/max and init contradict each other"),
        ({"init": object(), "init_fn": lambda w: w}, "init_fn and init contradict each other"),
        ({"capacity": 0}, "capacity must be an integer >= 1 or None, got 0"),
        ({"lr_scale": -1.0}, "lr_scale must be finite and >= 0, got -1.0"),
        ({"padding_idx": 10}, r"padding_idx must be in \[-10, 10\), got 10"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBagConfig(**{"num_embeddings": 10, "embedding_dim": 4, "name": "t", **arguments})


def test_padding_must_be_an_integer() -> None:
    with pytest.raises(TypeError, match=r"padding_idx must be an integer or None, got 1\.5"):
        EmbeddingConfig(10, 4, "t", padding_idx=1.5)


def test_checks_across_tables() -> None:
    table = EmbeddingBagConfig(10, 4, "t")
    with pytest.raises(ValueError, match=r"^EBC: tables is empty; give at least one EmbeddingBagConfig$"):
        check_tables([], EmbeddingBagConfig, "EBC")
    with pytest.raises(ValueError, match=r"^Duplicate table name t$"):
        check_tables([table, EmbeddingBagConfig(5, 4, "t")], EmbeddingBagConfig, "EBC")
    with pytest.raises(ValueError, match=r"EBC: every table needs a name; one with features \['f'\] has none"):
        check_tables([EmbeddingBagConfig(5, 4, feature_names=["f"])], EmbeddingBagConfig, "EBC")
    with pytest.raises(TypeError, match="EBC: tables must be EmbeddingBagConfig objects, got EmbeddingConfig"):
        check_tables([EmbeddingConfig(5, 4, "e")], EmbeddingBagConfig, "EBC")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="table 'r': feature_names holds f more than once"):
        check_tables([EmbeddingBagConfig(5, 4, "r", feature_names=["f", "f"])], EmbeddingBagConfig, "EBC")


def test_a_feature_of_two_tables_is_named_after_both() -> None:
    tables = [
        EmbeddingBagConfig(5, 4, "a", feature_names=["f", "g"]),
        EmbeddingBagConfig(5, 4, "b", feature_names=["f"]),
    ]
    assert embedding_names(tables) == [["f@a", "g"], ["f@b"]]


def test_torchrecs_enums_are_understood() -> None:
    modules = pytest.importorskip("torchrec.modules.embedding_configs", reason="torchrec is not installed")
    config = EmbeddingBagConfig(4, 2, "t", data_type=modules.DataType.FP32, pooling=modules.PoolingType.MEAN)
    assert (config.data_type, config.pooling) == (DataType.FP32, PoolingType.MEAN)
