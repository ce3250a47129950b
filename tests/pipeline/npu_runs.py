"""What the tests of pipelines on the stand-in for an NPU run in processes of their own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from policy_cases import bounded
from torch import nn

import emulated_cuda
import fake_hccl
import fake_npu
import nestpipe_kernels as nk
from nestpipe_kernels import checkpoint
from nestpipe_kernels._native import use_kernels
from nestpipe_kernels.comm import DeviceCommunicator, InMemoryWorld, SparseGroups, communicator_for
from nestpipe_kernels.device import StreamLane, backend_for
from nestpipe_kernels.device.backend import DeviceEvent
from nestpipe_kernels.errors import CommunicationError, NonFiniteGradientError, StoreFullError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.stages import host_rows
from nestpipe_kernels.store import DeviceTierStore, RowMetadata
from nestpipe_kernels.store.device_memory import DeviceMemory
from nestpipe_kernels.testing.explorer import Outcome, read_store
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import (
    read_pipeline,
    run_ranks_as_threads,
    run_scenario,
    scenario_config,
)
from nestpipe_kernels.types import TableSpec

LIMIT_S = 60.0
ALONE = Scenario(world_size=1, batches=8, uneven=False, noise=False)
DAMAGED = Scenario(world_size=1, batches=4, uneven=False, samples=6, num_keys=20, seed=2)
"""What `compare_damaged` is tried on."""


def compare(scenario: Scenario, schedule: str) -> str:
    """How a run on the device, ranks as threads, differs from `sequential` on the CPU."""
    fake_npu.install()
    return run_scenario(scenario, "sequential").difference(run_scenario(scenario, schedule, "npu"))


def rows_there(scenario: Scenario, limit: int | None = None) -> Scenario:
    """The scenario with rows in the device's memory."""
    tier = nk.DeviceTier("npu", rows_per_slab=32, memory_bytes=limit)
    return replace(scenario, tables=tuple(replace(table, tier=tier) for table in scenario.tables))


def compare_rows_there(scenario: Scenario, schedule: str) -> str:
    """As `compare`, with rows in the device's memory; rules that tables cannot have there become others."""
    fake_npu.install()
    constant = nk.init.Constant(0.25)
    scenario = replace(
        scenario,
        tables=tuple(
            replace(
                table,
                admission=None,
                eviction=nk.policy.LRU() if isinstance(table.eviction, nk.policy.Score) else table.eviction,
                init=constant if isinstance(table.init, nk.init.Custom) else table.init,
                default_row=constant if isinstance(table.default_row, nk.init.Custom) else table.default_row,
            )
            for table in scenario.tables
        ),
    )
    return run_scenario(scenario, "sequential").difference(run_scenario(rows_there(scenario), schedule, "npu"))


def compare_on(device: str, scenario: Scenario, schedule: str) -> str:
    """How a run on a device, ranks as threads, differs from `sequential` there: its dense model has bits of its own."""
    return run_scenario(scenario, "sequential", device).difference(run_scenario(scenario, schedule, device))


def use_cuda_kernels(library: str) -> None:
    """Let the device of this process use CUDA's kernels, and rows cross in many small chunks."""
    fake_npu.install()
    fake_npu.use_kernels(emulated_cuda.load(Path(library)))
    host_rows.CHUNK_BYTES = 256


def kernels_used() -> set[str]:
    """Names of all that have run so far."""
    return set(fake_npu.USED)


def _one_lane_unordered(lane: Any, item: Any) -> Any:
    return _ORDERED(lane, item) if lane.name != "device" else super(StreamLane, lane)._wait_for_events(item)


_ORDERED = StreamLane._wait_for_events
DAMAGES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "one lane": lambda: mock.patch.object(StreamLane, "_wait_for_events", _one_lane_unordered),
    "all events": lambda: mock.patch.object(DeviceEvent, "order", return_value=None),
}
"""What is left out of the rules of a device: the wait of one lane, that of all streams."""


def compare_damaged(scenario: Scenario, damage: str) -> str:
    """As `compare` of `nested`, with one of DAMAGES; what differs, or is raised, since rubbish may also be noticed.

    Streams of this process may be full of work that cannot run afterwards.
    """
    fake_npu.install()
    expected = run_scenario(scenario, "sequential")
    with DAMAGES[damage]():
        try:
            return expected.difference(run_scenario(scenario, "nested", "npu"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def play(scenario: Scenario, schedule: str) -> tuple[Outcome, set[str]]:
    """This rank's part of a scenario over hccl, and the threads that have posted there."""
    fake_hccl.install()
    fake_hccl.POSTED.clear()
    rank = dist.get_rank()
    generator = scenario.generator(rank)
    model = scenario.model(communicator_for(None, LIMIT_S), generator).to("npu")
    config = scenario_config(scenario, schedule, LIMIT_S)
    with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
        losses = [float(step.loss) for step in pipeline.run(scenario.loader(rank, generator))]
        return read_pipeline(pipeline, losses), set(fake_hccl.POSTED)


def exchanges() -> dict[str, Any]:
    """What groups of a device give, over hccl and through the host, and say of what does not fit; on two ranks."""
    fake_hccl.install()
    fake_hccl.POSTED.clear()
    host = communicator_for(None, LIMIT_S)
    both = DeviceCommunicator(host, backend_for("npu"))
    rank, found = both.rank, {}
    counts = [1, 2] if rank == 0 else [2, 1]
    send = torch.arange(3.0).view(3, 1) + 10 * rank
    for purpose, place in (("rows", "npu"), ("early", "npu"), ("rows", "cpu")):
        before = len(fake_hccl.POSTED)
        handle = both.group(purpose).all_to_all(send.to(place), counts, counts, f"try/{purpose}/{place}")
        received = handle.wait()
        found[purpose, place] = received.cpu().flatten().tolist(), len(fake_hccl.POSTED) - before, str(received.device)
    found["same limit"] = both.with_timeout(LIMIT_S) is both
    rows, there = both.group("rows"), send.to("npu")
    handle, stream = rows.all_to_all(there, counts, counts, "try/streams"), both.backend.new_stream()
    with both.backend.using(stream):
        found["kept for who waits"] = stream in handle.wait().block.users and stream in there.block.users
    found["elsewhere"] = _said(lambda: rows.all_to_all(there, counts, counts, "a", torch.empty(3, 1)), TypeError)
    for owner, name, says in (
        (fake_hccl.Hccl, "alltoall_base", "post"),
        (fake_hccl._Work, "wait", "wait"),
        (dist, "new_group", "make"),
    ):
        with mock.patch.object(owner, name, _broken):
            if says == "make":
                host._carriers.clear()  # type: ignore[attr-defined]
                found[says] = _said(lambda: host.make_group("hccl"), CommunicationError)  # type: ignore[attr-defined]
            else:
                found[says] = _said(lambda: rows.all_to_all(there, counts, counts, "b").wait(), CommunicationError)
    return found


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the link is down")


def _said(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def _refusal(model: Any, config: Any) -> str:
    return _said(lambda: NestedPipeline(model, None, config=config).close(), ValueError)


def refusals() -> dict[str, str]:
    """What a pipeline says of models, and of settings, that do not fit the device."""
    fake_npu.install()
    one, found = InMemoryWorld(1).communicator(0), {}
    for name, device, place in (("cpu", "npu", "cpu"), ("npu", "cpu", "npu"), ("mixed", None, "npu")):
        model = ALONE.model(one, None).to(place)
        if name == "mixed":
            model.linear.bias = nn.Parameter(torch.zeros(1))
        config = scenario_config(ALONE, "nested")
        config.device = device
        found[name] = _refusal(model, config)
    pooled = replace(ALONE, owner_pooling="auto")
    found["pooled"] = _refusal(pooled.model(one, None).to("npu"), scenario_config(pooled, "nested"))

    def body(rank: int, communicator: Any) -> str:
        copies = Scenario(world_size=2, sparse_groups=SparseGroups(2))
        return _refusal(copies.model(communicator, None).to("npu"), scenario_config(copies, "nested"))

    found["copies"] = run_ranks_as_threads(2, body)[0]
    return found


ROWS_THERE = "npu, rows there"
"""As a device: the tables' rows lie in its memory, too."""


def _steps(device: str, schedule: str, work: Callable[[Any, Any, Any], list[float]]) -> list[Any]:
    """What `work(pipeline, model, loader)` gives, on one rank, and then all rows, their metadata and counters."""
    fake_npu.install()
    scenario = rows_there(ALONE) if device == ROWS_THERE else ALONE
    model = scenario.model(InMemoryWorld(1).communicator(0), None).to(device.partition(",")[0])
    config = scenario_config(ALONE, schedule, LIMIT_S)
    with NestedPipeline(model, ALONE.dense_optimizer(model), config=config) as pipeline:
        found = work(pipeline, model, lambda: iter(ALONE.loader(0, None)))
        pipeline.settle()
        return [*found, *(repr(_contents(binding.store)) for binding in pipeline.rank.bindings)]


def _sums(pipeline: Any, iterator: Any, count: int) -> list[float]:
    return [float(pipeline.progress(iterator)[0].sum()) for _ in range(count)]


def evaluate_between_steps(device: str, schedule: str) -> list[float]:
    """Outputs of two steps, of two evaluated batches, and of three more steps."""

    def work(pipeline: Any, model: Any, loader: Any) -> list[float]:
        training = loader()
        found = _sums(pipeline, training, 2)
        model.eval()
        found += _sums(pipeline, loader(), 2)
        model.train()
        return found + _sums(pipeline, training, 3)

    return _steps(device, schedule, work)


def go_on_after_a_bad_batch(device: str, schedule: str) -> list[float]:
    """Outputs of steps around one that does not count, with the stores settled between two others."""

    def work(pipeline: Any, model: Any, loader: Any) -> list[float]:
        training = loader()
        found = _sums(pipeline, training, 1)
        with mock.patch.object(model.linear, "forward", lambda x: x.sum(1, keepdim=True) * float("inf")):
            said = _said(lambda: pipeline.progress(training), NonFiniteGradientError)
        assert "not finite" in said
        found += _sums(pipeline, training, 1)
        pipeline.settle()
        return found + _sums(pipeline, training, 2)

    return _steps(device, schedule, work)


def bounded_there() -> str:
    """As `compare_rows_there`, of bounded tables, with evictions."""
    scenario = bounded("all", "lru_slack", 9, world_size=1, batches=5, weight_loss=True, seed=1)
    return compare_rows_there(replace(scenario, bad_labels=0.1, nan_policy="skip_row"), "nested+early")


def go_on_after_full_stores(device: str) -> list[float]:
    """Outputs of steps around one whose new keys find no memory; then other rows are erased."""

    def work(pipeline: Any, model: Any, loader: Any) -> list[float]:
        training = loader()
        found = _sums(pipeline, training, 1)
        store = model.lookup.store("user")
        before = _contents(store.store)
        patches = {
            "cpu": mock.patch.object(nk.EmbeddingStore, "_retrieve", _raises(StoreFullError("full"))),
            ROWS_THERE: mock.patch.object(DeviceMemory, "room", _raises(torch.OutOfMemoryError("none left"))),
        }
        with patches[device]:
            said = _said(lambda: pipeline.progress(training), StoreFullError)
        assert device == "cpu" or "no memory on npu:0 for" in said, said
        assert _contents(store.store) == before
        gone = store.keys().sort().values[::2]
        assert not store.erase(gone).any()
        return found + _sums(pipeline, training, 3)

    return _steps(device, "sequential", work)


def _raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _contents(store: Any) -> tuple[Any, ...]:
    rows: dict[tuple[str, int], bytes] = {}
    notes: dict[tuple[str, int], tuple[int, int]] = {}
    read_store(store, rows, notes)
    return (
        sorted(rows.items()),
        sorted(notes.items()),
        [store.counters(t) for t in range(len(store.tables))],
        store.last_batch,
    )


def calls_on_streams_of_their_own() -> bool:
    """Whether calls that change keys or read rows are done when they return, whatever the stream of the next one; and
    rows may be written beside a call that makes the list of slabs longer."""
    fake_npu.install()
    optimizer, specs = nk.optim.Adagrad(lr=0.1), [TableSpec("t", nk.UNBOUNDED, nk.init.Uniform(-1, 1), 3)]
    host = nk.EmbeddingStore(specs, dim=4, optimizer=optimizer)
    there = DeviceTierStore(specs, dim=4, optimizer=optimizer, device="npu", rows_per_slab=32)
    keys, tables = torch.arange(40), torch.zeros(40, dtype=torch.int32)
    many, of_many, rows = torch.arange(90), torch.zeros(90, dtype=torch.int32), torch.rand(40, host.row_floats)
    used = RowMetadata(torch.arange(40) + 2, torch.arange(40))
    calls: list[Callable[[Any], Any]] = [
        lambda store: store.retrieve(keys, tables, None, 0).handles.tolist(),
        lambda store: store.write_back(keys, rows),
        lambda store: store.undo(store.retrieve(many, of_many, None, 1)),
        lambda store: store.write_embeddings(keys[:9], rows[:9, :4].contiguous()),
        lambda store: store.write_metadata(keys, used),
        lambda store: store.erase(keys[5:9]).tolist(),
        lambda store: store.load_rows(keys, tables, rows, used),
        lambda store: store.load_counters("t", {**store.counters("t"), "refused": 5}),
        lambda store: store.clear("t"),
        lambda store: store.find_or_insert(keys)[0].tolist(),
    ]
    for call in calls:
        said = []
        for store in (there, host):
            with fake_npu.stream(fake_npu.new_stream()):
                said.append(call(store))
            with fake_npu.stream(fake_npu.new_stream()):
                said.append(_contents(store))
        if said[:2] != said[2:]:
            return False
    other, grows = fake_npu.new_stream(), fake_npu.new_stream()
    moved = rows.to("npu")
    fake_npu.synchronize()
    with fake_npu.stream(other):
        there.rows.write_back(keys.to("npu"), moved)  # late: it reads the list of slabs as it was
    with fake_npu.stream(grows), there._changes():
        there.rows.retrieve((many + 100).to("npu"), of_many.to("npu"), None, 3)
    with fake_npu.stream(fake_npu.new_stream()):
        there.rows.write_back(keys.to("npu"), moved)  # before what retrieves has run
        fake_npu.current_stream().synchronize()
    grows.synchronize()
    fake_npu.synchronize()  # older streams first: memory that was given up is rubbish before `other` runs
    host.retrieve(many + 100, of_many, None, 3)
    host.write_back(keys, rows)
    return _contents(there) == _contents(host)


def without_a_pipeline(device: str) -> list[float]:
    """What a collection alone gives: lookups, two updates, a weight that is written and read, rows of a few keys."""
    fake_npu.install()
    tier = nk.DeviceTier("npu", rows_per_slab=32) if device == ROWS_THERE else None
    tables = [
        nk.EmbeddingBagConfig(20, 4, "t", feature_names=["f"], tier=tier, init_fn=lambda weight: weight.fill_(0.5)),
        nk.EmbeddingBagConfig(nk.UNBOUNDED, 4, "u", feature_names=["g"], tier=tier, pooling=nk.PoolingType.MAX),
    ]
    one = InMemoryWorld(1).communicator(0)
    module = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.Adagrad(lr=0.1), process_group=one)
    assert module.row_stores()[0].device.type == device.partition(",")[0]
    features = nk.KeyedJaggedTensor(["f", "g"], torch.tensor([3, 1, 3, 7, 9, 7]), lengths=torch.tensor([2, 1, 2, 1]))
    found = []
    for step in range(3):
        out = module(features).values()
        (out.square().sum() * (1 + step)).backward()
        found += out.flatten().tolist()
    module.eval()
    with torch.no_grad():
        found += module(features).values().flatten().tolist()
    weight = module.embedding_bags["t"].weight
    found += weight.flatten().tolist() + module.store("u").find(torch.tensor([7, 8]))[0].flatten().tolist()
    other = nk.EmbeddingBagCollection([tables[0]], optimizer=nk.optim.SGD(lr=0.1), process_group=one)
    other.load_state_dict({"embedding_bags.t.weight": weight * 2})
    found += other.embedding_bags["t"].weight.flatten().tolist()
    module.reset_parameters()
    assert len(module.store("u")) == 0
    return found + module.embedding_bags["t"].weight.flatten().tolist()


def converted(device: str) -> list[float]:
    """Weights of a table of torch's own, converted and reverted."""
    fake_npu.install()
    torch.manual_seed(3)
    model = nn.ModuleDict({"table": nn.Embedding(9, 4, sparse=False)})
    settings = {"table": {"tier": nk.DeviceTier("npu", rows_per_slab=32)}} if device == ROWS_THERE else None
    nk.convert(model, nk.optim.SGD(lr=0.1), settings=settings, process_group=InMemoryWorld(1).communicator(0))
    ids = torch.tensor([[1, 2], [8, 1]])
    model["table"](ids).sum().backward()
    found = model["table"](ids).flatten().tolist()
    nk.revert(model)
    return found + model["table"].weight.flatten().tolist()


def resharded(saver: str, loader: str) -> list[bytes]:
    """Rows and metadata of a run of two ranks, saved by them and loaded by one, by table and key."""
    fake_npu.install()
    with tempfile.TemporaryDirectory() as path:

        def places(device: str, world_size: int) -> Scenario:
            scenario = Scenario(world_size=world_size, batches=2, seed=8)
            return rows_there(scenario) if device == ROWS_THERE else scenario

        def save(rank: int, communicator: Any) -> None:
            scenario = places(saver, 2)
            generator = scenario.generator(rank)
            model = scenario.model(communicator, generator).to(saver.partition(",")[0])
            config = scenario_config(scenario, "nested", LIMIT_S)
            with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
                for _ in pipeline.run(scenario.source(rank, generator)):
                    pass
                checkpoint.save(path, model=model, pipeline=pipeline)

        run_ranks_as_threads(2, save)
        scenario = places(loader, 1)
        model = scenario.model(InMemoryWorld(1).communicator(0), None)
        checkpoint.load(path, model=model, optimizer=scenario.dense_optimizer(model))
        return [repr(part).encode() for part in _contents(model.lookup.row_stores()[0])]


def rows_that_are_refused() -> dict[str, str]:
    """What is said of rows on a device where they cannot be."""
    fake_npu.install()
    there, found = rows_there(ALONE), {}
    one = InMemoryWorld(1).communicator(0)
    found["cpu"] = _refusal(there.model(one, None), scenario_config(there, "nested"))

    def body(rank: int, communicator: Any) -> str:
        copies = rows_there(Scenario(world_size=2, sparse_groups=SparseGroups(2)))
        return _said(lambda: copies.model(communicator, None), ValueError)

    found["copies"] = run_ranks_as_threads(2, body)[0]
    native = fake_npu.KERNELS[:]
    use_kernels("npu", None)
    try:
        found["kernels"] = _said(lambda: there.model(one, None), RuntimeError)
    finally:
        fake_npu.use_kernels(native[0])
    return found


def saved_and_loaded(first: str, second: str) -> list[float]:
    """Outputs of two steps on one device, and of two more after a checkpoint has been loaded on another."""
    with tempfile.TemporaryDirectory() as path:

        def save(pipeline: Any, model: Any, loader: Any) -> list[float]:
            found = _sums(pipeline, loader(), 2)
            checkpoint.save(path, model=model, pipeline=pipeline)
            return found

        def load(pipeline: Any, model: Any, loader: Any) -> list[float]:
            with torch.no_grad():
                model.linear.weight.add_(7.0)  # nothing may be right by accident
            checkpoint.load(path, model=model, pipeline=pipeline)
            return _sums(pipeline, loader(), 2)

        return _steps(first, "nested", save) + _steps(second, "nested", load)


def special_stores() -> list[str]:
    """As `compare`: bounded tables with evictions and keys without a row, and rows in a file."""
    with tempfile.TemporaryDirectory() as folder:
        tier = nk.FileTier(folder, 1 << 16)
        filed = tuple(replace(table, tier=tier) for table in Scenario().tables)
        return [
            compare(bounded("exact_2", "lru", 8, world_size=1, batches=5, seed=1), "nested+early"),
            compare(Scenario(world_size=1, batches=3, tables=filed), "nested"),
        ]


def features_on_the_device() -> list[bool]:
    """Whether lookups of features that lie there give what those on the host give; without a pipeline."""
    fake_npu.install()
    tables = [nk.EmbeddingBagConfig(20, 4, "t", feature_names=["f"])]
    alone = InMemoryWorld(1).communicator(0)
    plain = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.SGD(0.1), process_group=alone)
    weighted = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.SGD(0.1), process_group=alone, is_weighted=True)
    features = nk.KeyedJaggedTensor(["f"], torch.tensor([3, 1, 3]), torch.rand(3), lengths=torch.tensor([2, 1]))
    found = [torch.equal(weighted(features).values(), weighted(features.to("npu")).values())]
    bare = nk.KeyedJaggedTensor(["f"], features.values(), lengths=features.lengths())
    found.append(torch.equal(plain(bare).values(), plain(bare.to("npu")).values()))
    weights = torch.rand(3).to("npu").requires_grad_()
    moved = nk.KeyedJaggedTensor(["f"], bare.values().to("npu"), weights, lengths=bare.lengths().to("npu"))
    return [*found, "weights that require a gradient must be on the CPU" in _said(lambda: weighted(moved), TypeError)]
