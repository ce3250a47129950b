"""Several ranks: uneven ends, modules in another order, gradients to their rows, initial values at any world size."""

import random

import pytest
import torch
from small_model import EXACT, Batch, Recommender, make_batch, make_pipeline, run_all, state_of
from torch import nn

from nestpipe_kernels import init, optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import UNBOUNDED

EXTREMES = [0, -1, -2, -5, -(2**63), 2**63 - 1, 2**52, 6221888200042590280, 6221888200042590281]
assert (len(EXTREMES) + 40) % 7 == 0


@pytest.mark.parametrize("schedule", EXACT)
def test_fault_35_ranks_with_5_and_4_batches_and_last_ones_of_3_and_1_samples(schedule):
    def batches(rank):
        full = [make_batch(20 * rank + t) for t in range(4 - rank)]
        return [*full, make_batch(20 * rank + 9, size=1 if rank else 3)]

    def train(name):
        return run_all(2, name, batches, num_micro_batches=3)

    first, second = runs = train(schedule)
    assert (len(first.losses), len(second.losses)) == (5, 5), "both go on until the last rank has ended"
    assert [o if o is None else len(o) for o in first.outputs] == [6, 6, 6, 6, 3]
    assert [o if o is None else len(o) for o in second.outputs] == [6, 6, 6, 1, None]
    assert first.state.dense == second.state.dense
    assert runs == train("sequential")


class TwoTables(nn.Module):
    """Two modules; a rank may define them, or call them, in another order than its peers."""

    def __init__(self, communicator, names="ab", calls="ab"):
        super().__init__()
        self.calls = calls
        start = init.Uniform(-0.5, 0.5)
        self.tables = nn.ModuleDict(
            {
                name: EmbeddingBagCollection(
                    [
                        EmbeddingBagConfig(
                            UNBOUNDED, 3, name, feature_names=["user" if name == "a" else "item"], init=start
                        )
                    ],
                    optimizer=optim.Adagrad(lr=0.2),
                    process_group=communicator,
                )
                for name in names
            }
        )
        self.head = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, batch):
        pooled = {name: self.tables[name](batch.sparse).values() for name in self.calls}
        logits = torch.cat([pooled["a"], pooled["b"]], 1) @ self.head
        return ((logits - batch.label) ** 2).mean(), logits


def test_fault_37_modules_defined_in_another_order_are_an_error_not_a_hang():
    def body(rank, communicator):
        with pytest.raises(
            ValueError, match=f"^ranks disagree on the order of embedding tables: rank {rank} has table "
        ):
            make_pipeline(TwoTables(communicator, "ba" if rank else "ab"))

    run_ranks_as_threads(2, body, timeout_s=10)


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_fault_37_modules_called_in_another_order_train_alike(schedule):
    def train(calls_of):
        def body(rank, communicator):
            with make_pipeline(TwoTables(communicator, calls=calls_of(rank)), schedule) as pipeline:
                losses = [float(s.loss) for s in pipeline.run([make_batch(10 * rank + t) for t in range(3)])]
                return losses, state_of(pipeline)

        return run_ranks_as_threads(2, body, timeout_s=20)

    assert train(lambda rank: "ba" if rank else "ab") == train(lambda rank: "ab")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fault_19_every_gradient_reaches_its_own_row(world_size):
    """Keys come neither sorted nor in slot order; each bag asks for another step of its rows."""
    bags = [[90, 5], [7], [5, 90, 90], [], [-3, 7], [41]]
    steps = torch.arange(1.0, 7.0)
    values = torch.tensor([key for bag in bags for key in bag])
    sparse = KeyedJaggedTensor(["t"], values, lengths=torch.tensor([len(bag) for bag in bags]))
    batch = Batch(sparse, torch.zeros(6, 2), steps, torch.zeros(6))

    def weighted(model, batch):
        pooled = model(batch.sparse).values()
        return (pooled * batch.label[:, None]).sum(), pooled.sum(1)

    def body(rank, communicator):
        table = EmbeddingBagConfig(UNBOUNDED, 2, "t", init=init.Constant(0.0))
        ebc = EmbeddingBagCollection([table], optimizer=optim.SGD(lr=1.0), process_group=communicator)
        model = nn.ModuleDict({"ebc": ebc, "unused": nn.Linear(1, 1)})
        loss_fn = lambda m, b: weighted(m["ebc"], b)  # noqa: E731
        with make_pipeline(model, loss_fn=loss_fn, loss_weighting="sum", num_micro_batches=3) as pipeline:
            list(pipeline.run([batch]))
            keys = ebc.store("t").keys()
            return dict(zip(keys.tolist(), ebc.store("t").find(keys)[0].tolist()))

    moved = {}
    for part in run_ranks_as_threads(world_size, body, timeout_s=20):
        assert not moved.keys() & part.keys(), "every key has one owner"
        moved |= part
    expected = {}
    for bag, step in zip(bags, steps.tolist()):
        for key in bag:
            expected[key] = expected.get(key, 0.0) - step
    assert moved == {key: [value, value] for key, value in expected.items()}


@pytest.mark.parametrize("start", [init.Uniform(-0.5, 0.5), init.Normal(0.0, 0.1)], ids=["uniform", "normal"])
def test_initial_values_are_alike_at_any_world_size_and_in_any_order(start):
    """E3: a function of (seed, table name, key, element) alone."""
    keys = [*EXTREMES, *range(100, 140)]

    def rows(world_size, schedule, order_seed):
        def body(rank, communicator):
            mine = list(keys)
            random.Random(order_seed + rank).shuffle(mine)
            tables = [EmbeddingBagConfig(UNBOUNDED, 5, n, feature_names=[n], init=start) for n in ("user", "item")]
            model = Recommender(communicator, tables, optimizer=optim.SGD(lr=0.0), seed=3)
            batches = []
            for at in range(0, len(mine), 7):
                values = torch.tensor(mine[at : at + 7] * 2)
                sparse = KeyedJaggedTensor(["user", "item"], values, lengths=torch.ones(14, dtype=torch.int64))
                batches.append(Batch(sparse, torch.zeros(7, 2), torch.zeros(7), torch.zeros(7)))
            with make_pipeline(model, schedule) as pipeline:
                list(pipeline.run(batches))
                return {k: v[: 4 * 5] for k, v in state_of(pipeline).rows.items()}

        merged = {}
        for part in run_ranks_as_threads(world_size, body, timeout_s=20):
            merged |= part
        return merged

    expected = {
        (name, key): torch.as_tensor(start.reference(3, name, [key], 5)).view(-1).numpy().tobytes()
        for name in ("user", "item")
        for key in keys
    }
    for world_size in (1, 2, 3, 4):
        assert rows(world_size, EXACT[world_size - 1], world_size) == expected


def test_initial_values_come_back_after_a_key_was_erased():
    model = Recommender()
    with make_pipeline(model) as pipeline:
        list(pipeline.run([make_batch(t) for t in range(3)]))
        store = model.ebc.store("user")
        start = Recommender().ebc.store("user").find(torch.arange(7))[0]
        assert not store.find(torch.arange(7))[0].equal(start)
        store.erase(torch.arange(7))
        assert store.find_or_insert(torch.arange(7))[0].equal(start)
