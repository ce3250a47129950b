"""Initial values: native code against the reference bit for bit, their statistics, their settings."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from nestpipe_kernels._native import core
from nestpipe_kernels.init import Constant, Custom, Normal, TruncatedNormal, Uniform, Zeros
from nestpipe_kernels.init.reference import cosine, hash_keys, hash_name, natural_log

INITIALIZERS = [
    Zeros(),
    Constant(0.1),
    Uniform(-0.3, 0.7),
    Uniform(2.0, 2.0),
    Normal(0.5, 2.0),
    Normal(-1e-30, 1e-38),
    TruncatedNormal(0.5, 2.0),
    TruncatedNormal(0.0, 1.0, -0.02, 0.02),
    TruncatedNormal(1.0, 0.1, 1.5, 30.0),
]


def some_keys(count: int) -> np.ndarray:
    extremes = [0, -1, -2, -5, -(2**63), 2**63 - 1, 6221888200042590280, 6221888200042590281]
    random = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, count, endpoint=True)
    return np.concatenate([np.array(extremes, dtype=np.int64), random])


def native_values(init, seed: int, name: str, keys: np.ndarray, dim: int) -> np.ndarray:
    out = np.full((len(keys), dim), np.nan, dtype=np.float32)
    table_hash = core().hash_name(name)
    core().initial_values(
        (init.kind, init.parameters), seed % 2**64, table_hash, keys.ctypes.data, len(keys), dim, out.ctypes.data
    )
    return out


@pytest.mark.parametrize("init", INITIALIZERS, ids=repr)
@pytest.mark.parametrize(("seed", "name", "dim"), [(0, "item", 1), (-7, "a table, älter", 13), (2**64 + 5, "x", 65)])
def test_native_equals_reference_bitwise(init, seed, name, dim):
    keys = some_keys(500)
    expected = init.reference(seed, name, keys, dim)
    np.testing.assert_array_equal(native_values(init, seed, name, keys, dim).view(np.int32), expected.view(np.int32))


def test_names_hash_alike():
    for name in ("", "item", "ключ"):
        assert core().hash_name(name) == hash_name(name)


def test_values_depend_on_seed_table_key_and_element():
    init = Uniform(-1.0, 1.0)
    values = [
        init.reference(seed, name, np.array([1, 2], dtype=np.int64), 8).ravel()
        for seed, name in [(0, "a"), (1, "a"), (0, "b")]
    ]
    assert len(np.unique(np.concatenate(values))) == 48


def test_an_element_does_not_depend_on_dim():
    keys = some_keys(20)
    init = Normal(0.0, 1.0)
    np.testing.assert_array_equal(init.reference(3, "t", keys, 64)[:, :7], init.reference(3, "t", keys, 7))


def test_uniform_statistics():
    # 200,000 values: the standard errors are about 0.0006 (mean) and 0.0003 (std) of the width.
    values = Uniform(-2.0, 4.0).reference(1, "t", np.arange(20_000, dtype=np.int64), 10).astype(np.float64)
    assert values.min() >= -2.0
    assert values.max() <= 4.0
    assert abs(values.mean() - 1.0) < 0.02
    assert abs(values.std() - 6.0 / math.sqrt(12)) < 0.02
    histogram, _ = np.histogram(values, bins=20, range=(-2.0, 4.0))
    assert abs(histogram / 10_000 - 1.0).max() < 0.05


def test_normal_statistics():
    values = Normal(1.0, 3.0).reference(1, "t", np.arange(20_000, dtype=np.int64), 10).astype(np.float64)
    z = (values - 1.0) / 3.0
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1.0) < 0.01
    assert abs((z**4).mean() - 3.0) < 0.1
    # Shares inside one and two standard deviations.
    assert abs((abs(z) < 1).mean() - 0.6827) < 0.005
    assert abs((abs(z) < 2).mean() - 0.9545) < 0.003
    neighbours = np.corrcoef(z[:, :-1].ravel(), z[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (0.5, 3.0), (-0.1, 0.4), (-6.0, 6.0)])
def test_truncated_normal_statistics(low, high):
    init = TruncatedNormal(1.0, 3.0, low, high)
    values = init.reference(1, "t", np.arange(20_000, dtype=np.int64), 10).astype(np.float64)
    z = np.sort((values - 1.0).ravel() / 3.0)
    assert z[0] >= low - 1e-6
    assert z[-1] <= high + 1e-6
    below = np.array([math.erf(x / math.sqrt(2)) / 2 for x in z[::100]])
    edges = [math.erf(x / math.sqrt(2)) / 2 for x in (low, high)]
    expected = (below - edges[0]) / (edges[1] - edges[0])
    # Kolmogorov's distance: 200,000 values leave it below 0.0044 with probability 0.999.
    assert abs(expected - np.arange(0, len(z), 100) / len(z)).max() < 0.005
    if low == -high:
        assert abs(z.mean()) < 0.01
    if (low, high) == (-2.0, 2.0):
        assert abs(z.var() - 0.7737) < 0.005


def test_truncated_normal_of_a_wide_interval_is_the_normal():
    keys = some_keys(50)
    wide, whole = TruncatedNormal(0.5, 2.0, -7.0, 7.0), Normal(0.5, 2.0)
    np.testing.assert_array_equal(wide.reference(3, "t", keys, 7), whole.reference(3, "t", keys, 7))


def test_descriptions_are_json():
    every = [*INITIALIZERS, Custom(some_values)]
    described = [init.describe() for init in every]
    assert json.loads(json.dumps(described)) == described
    assert described[0] == {"name": "zeros"}
    assert described[2] == {"name": "uniform", "low": -0.3, "high": 0.7}
    assert described[6] == {"name": "truncated_normal", "mean": 0.5, "std": 2.0, "low": -2.0, "high": 2.0}
    assert described[-1] == {"name": "custom", "function": f"{__name__}.some_values"}
    assert described[1] != Constant(0.2).describe()


def some_values(keys, dim, seed):
    return (keys[:, None] * torch.arange(1, dim + 1) + seed).float()


def test_custom_values_are_those_of_the_function():
    values = Custom(some_values).reference(7, "t", np.array([2, 3], dtype=np.int64), 3)
    assert values.tolist() == [[9.0, 11.0, 13.0], [10.0, 13.0, 16.0]]
    assert Custom(some_values).reference(7, "t", np.array([], dtype=np.int64), 3).shape == (0, 3)


def test_own_elementary_functions_agree_with_libm():
    x = np.concatenate([np.linspace(1e-12, 1.0, 5001), [2.0**-33, 0.5, math.sqrt(0.5)]])
    # Doubles near 1e-16 relative: the float32 results need 6e-8.
    np.testing.assert_allclose(natural_log(x), np.log(x), rtol=1e-13, atol=1e-15)
    angle = np.linspace(0.0, math.pi / 2, 5001)
    np.testing.assert_allclose(cosine(angle), np.cos(angle), rtol=0, atol=1e-15)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("multiple_of", [1, 2, 8, 1024, 2**32])
def test_fault_13_multiples_are_balanced_over_owners(world_size, multiple_of):
    # 40,000 keys: the standard error of a share is at most 1.4 %.
    keys = np.arange(-20_000, 20_000, dtype=np.int64) * multiple_of
    slices = (hash_keys("item", keys) >> np.uint64(48)).astype(np.int64)
    shares = np.bincount(slices * world_size // 65536, minlength=world_size)
    assert len(shares) == world_size
    assert abs(shares * world_size / len(keys) - 1.0).max() < 0.05


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Uniform(1.0, 0.0), ValueError, "Uniform: low must be <= high, got low=1.0, high=0.0"),
        (lambda: Uniform(float("nan"), 0.0), ValueError, "Uniform: low must be finite in float32, got nan"),
        (lambda: Constant(1e39), ValueError, r"Constant: value must be finite in float32, got 1e\+39"),
        (lambda: Constant("1"), TypeError, r"Constant: value must be a number, got str \('1'\)"),
        (lambda: Normal(0.0, -1.0), ValueError, r"Normal: std must be >= 0, got -1.0"),
        (lambda: TruncatedNormal(0.0, 1.0, 2.0, 2.0), ValueError, "TruncatedNormal: low must be < high, got low=2.0"),
        (lambda: TruncatedNormal(0.0, -1.0), ValueError, "TruncatedNormal: std must be >= 0, got -1.0"),
        (lambda: TruncatedNormal(0.0, 1.0, 4.0, 9.0), ValueError, "at least 1% of the distribution must lie between"),
        (lambda: TruncatedNormal(0.0, 1.0, high=math.inf), ValueError, "high must be finite in float32, got inf"),
        (lambda: Custom(3), TypeError, "Custom: function must be callable, got int"),
        (lambda: Normal(0.0, 1e38), ValueError, "Normal: largest_value must be finite in float32"),
    ],
)
def test_bad_settings_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
