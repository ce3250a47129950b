"""A pipeline is paused before its rows are read or written from outside, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lookups import StoreLookups

from nestpipe_kernels import optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig

FEATURES = KeyedJaggedTensor(["t"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


@pytest.mark.parametrize(
    "access",
    [
        lambda ebc: ebc.embedding_bags["t"].weight,
        lambda ebc: ebc.state_dict(),
        lambda ebc: ebc.load_state_dict({"embedding_bags.t.weight": torch.zeros(9, 2)}),
        lambda ebc: ebc.reset_parameters(),
        lambda ebc: ebc.store("t").find(torch.tensor([1])),
        lambda ebc: ebc.store("t").find_or_insert(torch.tensor([1])),
        lambda ebc: ebc.store("t").erase(torch.tensor([1])),
        lambda ebc: ebc.store("t").keys(),
        lambda ebc: len(ebc.store("t")),
        lambda ebc: ebc(FEATURES),
    ],
)
def test_pauses_first(access: Callable[[Any], Any]) -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "t")], optimizer=optim.SGD(lr=0.1))
    paused: list[bool] = []
    ebc.before_outside_access = lambda: paused.append(True)
    access(ebc)
    assert paused


def test_lookups_of_the_pipeline_do_not_pause_it() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "t")], optimizer=optim.SGD(lr=0.1))
    reader = StoreLookups()
    ebc.lookup_context = reader
    paused: list[bool] = []
    ebc.before_outside_access = lambda: paused.append(True)
    ebc(FEATURES)
    ebc.plan_call(FEATURES)
    ebc.zero_output(FEATURES)
    ebc.learning_rates(0)
    assert paused == []
