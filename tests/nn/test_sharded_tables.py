"""Whole tables over several ranks: every rank keeps its part and reads all of it."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from nestpipe_kernels import optim
from nestpipe_kernels.comm import Communicator
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig


def _collection(communicator: Communicator | None, **settings: object) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(300, 3, "t", **settings), EmbeddingBagConfig(5, 2, "u")]  # type: ignore[arg-type]
    return EmbeddingBagCollection(tables, optimizer=optim.Adagrad(lr=0.1), process_group=communicator)


@pytest.mark.parametrize("size", [2, 3])
def test_a_state_dict_is_the_same_on_any_number_of_ranks(size: int) -> None:
    single = _collection(None)
    state = {key: torch.rand_like(value) for key, value in single.state_dict().items()}
    fresh = single.state_dict()

    def body(communicator: Communicator) -> tuple[bool, bool, torch.Tensor]:
        ebc = _collection(communicator)
        before = ebc.state_dict()
        ebc.load_state_dict(state)
        after = ebc.state_dict()
        return (
            all(before[key].equal(fresh[key]) for key in fresh),
            all(after[key].equal(state[key]) for key in state),
            ebc.store("t").keys(),
        )

    results = run_ranks(size, body)
    assert all(before and after for before, after, _ in results)
    assert torch.cat([keys for _, _, keys in results]).sort().values.equal(torch.arange(300))
    assert min(keys.numel() for _, _, keys in results) > 300 / size / 2


def test_init_fn_fills_only_the_rows_of_its_rank() -> None:
    def fill(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight)

    whole = _collection(None, init_fn=fill).embedding_bags["t"].weight
    results = run_ranks(2, lambda communicator: _filled(_collection(communicator, init_fn=fill)))
    assert all(weight.equal(whole) for weight, _ in results)
    assert sum(count for _, count in results) == 300
    assert all(count < 300 for _, count in results)


def _filled(ebc: EmbeddingBagCollection) -> tuple[torch.Tensor, int]:
    return ebc.embedding_bags["t"].weight, len(ebc.store("t"))


def test_capacity_counts_rows_over_all_ranks() -> None:
    quotas = run_ranks(
        3, lambda communicator: _collection(communicator, capacity=11).row_stores()[0].tables[0].capacity
    )
    assert quotas == [4, 4, 3]
