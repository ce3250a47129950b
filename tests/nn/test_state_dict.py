"""State dicts and whole-table access of collections over stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestpipe_kernels import init, optim
from nestpipe_kernels.errors import StoreFullError
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.types import UNBOUNDED


def _collection(seed: int = 0, **settings: Any) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(12, 3, "t", **settings), EmbeddingBagConfig(7, 4, "u")]
    return EmbeddingBagCollection(tables, optimizer=optim.Adagrad(lr=0.1), seed=seed)


def _handles(ebc: EmbeddingBagCollection, store: int, count: int) -> list[int]:
    found = ebc.row_stores()[store].find_handles(torch.arange(count), torch.zeros(count, dtype=torch.int32))
    return found.tolist()


def test_keys_and_shapes_are_torchrecs() -> None:
    state = _collection().state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "embedding_bags.t.weight": (12, 3),
        "embedding_bags.u.weight": (7, 4),
    }
    ec = EmbeddingCollection([EmbeddingConfig(5, 2, "e")], optimizer=optim.SGD(lr=0.1))
    assert list(torch.nn.ModuleDict({"m": ec}).state_dict()) == ["m.embeddings.e.weight"]


def test_absent_rows_read_their_initial_values() -> None:
    ebc = _collection(init=init.Constant(2.0))
    assert ebc.embedding_bags["t"].weight.equal(torch.full((12, 3), 2.0))
    assert _handles(ebc, 0, 12) == [-1] * 12


def test_round_trip_inserts_only_rows_that_differ() -> None:
    source, target = _collection(), _collection()
    weight = source.embedding_bags["t"].weight
    weight[5] = 9.0
    state = {**source.state_dict(), "embedding_bags.t.weight": weight}
    target.load_state_dict(state)
    assert target.embedding_bags["t"].weight.equal(weight)
    assert [handle >= 0 for handle in _handles(target, 0, 12)] == [key == 5 for key in range(12)]
    assert _handles(target, 1, 7) == [-1] * 7
    target.load_state_dict(source.state_dict())
    assert target.embedding_bags["t"].weight.equal(source.embedding_bags["t"].weight)


def test_loading_keeps_optimizer_states() -> None:
    ebc = _collection()
    weight = torch.rand(12, 3)
    ebc.load_state_dict({**ebc.state_dict(), "embedding_bags.t.weight": weight})
    store = ebc.row_stores()[0]
    keys, tables = torch.arange(12), torch.zeros(12, dtype=torch.int32)
    handles = store.find_handles(keys, tables)
    rows = torch.empty(12, store.row_floats)
    store.gather(handles, keys, tables, rows, None)
    rows[:, 3:6] = 0.5
    store.write_back(handles, rows)
    ebc.load_state_dict({**ebc.state_dict(), "embedding_bags.t.weight": weight + 1})
    store.gather(handles, keys, tables, rows, None)
    assert rows[:, :3].equal(weight + 1)
    assert rows[:, 3:6].equal(torch.full((12, 3), 0.5))


def test_nothing_changes_when_one_table_does_not_fit() -> None:
    ebc = _collection()
    before = ebc.state_dict()
    state = {"embedding_bags.t.weight": torch.rand(12, 3), "embedding_bags.u.weight": torch.rand(7, 5)}
    with pytest.raises(RuntimeError, match=r"table 'u': expected a weight of shape \[7, 4\], got \[7, 5\]"):
        ebc.load_state_dict(state)
    assert all(value.equal(before[key]) for key, value in ebc.state_dict().items())
    with pytest.raises(RuntimeError, match=r"table 'u': expected a floating-point weight \[7, 4\], got torch.int64"):
        ebc.load_state_dict({**state, "embedding_bags.u.weight": torch.ones(7, 4, dtype=torch.int64)})


def test_missing_and_unexpected_keys() -> None:
    ebc = _collection()
    state = {"embedding_bags.t.weight": torch.rand(12, 3), "embedding_bags.x.weight": torch.rand(1, 1)}
    with pytest.raises(
        RuntimeError, match=r"Missing key.*embedding_bags\.u\.weight(.|\n)*Unexpected.*embedding_bags\.x"
    ):
        ebc.load_state_dict(state)
    result = ebc.load_state_dict({"embedding_bags.t.weight": torch.ones(12, 3)}, strict=False)
    assert result.missing_keys == ["embedding_bags.u.weight"]
    assert ebc.embedding_bags["t"].weight.equal(torch.ones(12, 3))


def test_padding_rows_stay_zero() -> None:
    ebc = _collection(padding_idx=2)
    state = ebc.state_dict()
    assert state["embedding_bags.t.weight"][2].tolist() == [0.0, 0.0, 0.0]
    ebc.load_state_dict(state)
    state["embedding_bags.t.weight"][2, 1] = 1.0
    with pytest.raises(RuntimeError, match="table 't': row 2 is the padding row, which always reads zeros"):
        ebc.load_state_dict(state)


def test_open_tables_name_the_store_call() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(UNBOUNDED, 3, "o")], optimizer=optim.SGD(lr=0.1))
    message = r"table 'o' has an open vocabulary, for which .* do not exist; read rows with .store\('o'\).find\(keys\)"
    with pytest.raises(TypeError, match=message):
        _ = ebc.embedding_bags["o"].weight
    with pytest.raises(TypeError, match=message):
        ebc.state_dict()
    with pytest.raises(RuntimeError, match="table 'o' has an open vocabulary and takes no weight matrix"):
        ebc.load_state_dict({"embedding_bags.o.weight": torch.ones(3, 3)})
    with pytest.raises(KeyError, match=r"no table 'x'; there are \['o'\]"):
        ebc.store("x")
    assert list(ebc.embedding_bags) == ["o"]


def test_a_table_that_has_no_room_says_so() -> None:
    ebc = _collection(capacity=4)
    state = {**ebc.state_dict(), "embedding_bags.t.weight": torch.rand(12, 3)}
    with pytest.raises(StoreFullError, match=r"table .t. has \d+ rows and room for 4: key .* raise its capacity"):
        ebc.load_state_dict(state)


def test_reset_parameters_forgets_rows() -> None:
    ebc = _collection()
    before = ebc.state_dict()
    ebc.load_state_dict({key: torch.rand_like(value) for key, value in before.items()})
    ebc.reset_parameters()
    assert all(value.equal(before[key]) for key, value in ebc.state_dict().items())
    assert _handles(ebc, 0, 12) == [-1] * 12


def test_reset_parameters_runs_init_fn_again() -> None:
    ebc = _collection(init_fn=lambda weight: weight.fill_(3.0))
    ebc.load_state_dict({**ebc.state_dict(), "embedding_bags.t.weight": torch.rand(12, 3)})
    ebc.reset_parameters()
    assert ebc.embedding_bags["t"].weight.equal(torch.full((12, 3), 3.0))
