"""Settings of admission and eviction rules: bad ones are refused with the value."""

from __future__ import annotations

import pytest

from nestpipe_kernels import policy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policy.MinFrequency(0), "count must be an integer in"),
        (lambda: policy.MinFrequency(300, policy.CountingFilter(4096)), "got count 300; use exact counts"),
        (lambda: policy.CountingFilter(10), "cells must be an integer in .*got 10"),
        (lambda: policy.Probability(1.5), r"probability must be in \[0, 1\], got 1.5"),
        (lambda: policy.Probability(float("nan")), "got nan"),
        (lambda: policy.TTL(0), "steps must be an integer >= 1, got 0"),
        (lambda: policy.LRU(slack=0.9), r"LRU: slack must be a number in \[0, 0.5\], got 0.9"),
    ],
)
def test_bad_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="filter must be a CountingFilter or None, got 3"):
        policy.MinFrequency(2, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function must be callable, got int"):
        policy.Score(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed must be an integer"):
        policy.Probability(0.5, seed="a")  # type: ignore[arg-type]


def test_ttl_looks_for_expired_rows_sixteen_times_in_a_lifetime() -> None:
    assert policy.TTL(160).interval == 10
    assert policy.TTL(3).interval == 1
