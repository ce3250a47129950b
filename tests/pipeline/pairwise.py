"""Pairwise covers: few cases in which every pair of choices of any two factors meets at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def pairwise_cover(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: each case takes, factor by factor, the choice that covers most pairs not covered yet."""
    names = list(factors)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    cases = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        chosen = {a: i, b: j}
        for k, name in enumerate(names):
            if k not in chosen:
                gains = []
                for choice in range(len(factors[name])):
                    pairs = [(min(k, o), max(k, o)) for o in chosen]
                    found = sum(
                        (x, choice if x == k else chosen[x], y, choice if y == k else chosen[y]) in open_pairs
                        for x, y in pairs
                    )
                    gains.append((found, -((choice + len(cases)) % len(factors[name])), choice))
                chosen[k] = max(gains)[2]
        open_pairs -= {(x, chosen[x], y, chosen[y]) for x, y in itertools.combinations(sorted(chosen), 2)}
        cases.append({name: factors[name][chosen[k]] for k, name in enumerate(names)})
    return cases


def test_every_pair_is_covered():
    factors = {"a": [1, 2, 3], "b": "xy", "c": [True, False], "d": range(5)}
    cases = pairwise_cover(factors)
    for a, b in itertools.combinations(factors, 2):
        assert {(c[a], c[b]) for c in cases} == set(itertools.product(factors[a], factors[b]))
    assert len(cases) <= 20


def each_with_another(some: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Parameters (one, other): everyone with two of the others (if there are as many), all other pairs in the soak."""
    others = list(others)
    return [
        (one, other) if (j - i) % len(others) in (0, 2) else pytest.param(one, other, marks=pytest.mark.soak)
        for i, one in enumerate(some)
        for j, other in enumerate(others)
    ]
