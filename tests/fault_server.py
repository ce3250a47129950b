"""Forks the ranks of the cases that it reads from stdin, one JSON line each; tells on stdout how each process ended."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from fault_world import Case, Fault
from nestpipe_kernels import checkpoint, optim
from nestpipe_kernels.comm import communicator_for
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.stages import registry
from nestpipe_kernels.stages.window import MicroContext
from nestpipe_kernels.store import embedding_store
from nestpipe_kernels.testing.scenario import Scenario, ScenarioBatch, TableChoice
from nestpipe_kernels.testing.threads import read_pipeline, scenario_config

CLONE_NEWNET = 0x40000000
SAMPLES, MICRO_BATCHES = 6, 2


def scenario_of(case: Case) -> Scenario:
    """The run of a case; tests make the same one to know what must come out."""
    scenario = Scenario(
        world_size=case.size, batches=case.batches, micro_batches=MICRO_BATCHES, uneven=False, samples=SAMPLES, seed=2,
        noise=False,  # so that a shorter run draws the same numbers
        optimizer=optim.Adagrad(lr=0.2, initial_accumulator_value=0.1),
    )  # fmt: skip
    if case.special == "memory":
        scenario.num_keys = 4000
    if case.special == "full":
        scenario.tables = (TableChoice("item", 4, ("item", "history"), capacity=8),)
        scenario.num_keys = 40
    return scenario


class Batches:
    """A rank's batches, numbered in their labels' place in `at`."""

    def __init__(self, case: Case, scenario: Scenario, rank: int, generator: torch.Generator | None) -> None:
        self._made = (case, scenario, rank, generator)

    def __iter__(self) -> Iterator[Any]:
        case, scenario, rank, generator = self._made
        for index, batch in enumerate(scenario.loader(rank, generator)):
            if case.special == "loader" and rank == case.special_rank and index == 3:
                raise OSError("the disk is gone")
            if case.special == "model" and rank == case.special_rank and index == 3:
                batch.dense.fill_(float("inf"))
            yield batch


class Listed(Dataset[Any]):
    """A rank's batches by index; each worker says who it is."""

    def __init__(self, case: Case, batches: Batches) -> None:
        self._folder = case.folder
        self._parts = [(b.sparse, b.dense, b.label) for b in batches]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> ScenarioBatch:
        with open(Path(self._folder) / "pids", "a") as file:
            file.write(f"{os.getpid()} ")
        return ScenarioBatch(*self._parts[index])


def worker_loader(case: Case, batches: Batches) -> DataLoader[Any]:
    return DataLoader(
        Listed(case, batches), batch_size=None, num_workers=2, multiprocessing_context=case.workers, prefetch_factor=1
    )


def loss(model: Any, batch: Any) -> Any:
    """The scenario's, with a model that breaks where the loader says so, and on rows that were never sent."""
    if bool(torch.isinf(batch.dense).any()):
        raise ArithmeticError("the model broke")
    pooled = model.lookup(batch.sparse).values()
    in_training = isinstance(model.lookup.lookup_context, MicroContext)  # a probe's rows are zeros
    zero = (pooled.detach()[:, :4] == 0).all(1) & (batch.sparse[batch.sparse.keys()[0]].lengths() > 0)
    if in_training and bool(zero.any()):
        raise ZeroDivisionError("a row of zeros")
    return model.head(pooled, batch)


# ---------------------------------------------------------------------------------------------------- what goes wrong


def strike(fault: Fault, folder: Path) -> None:
    """The fault itself, on whatever thread runs the stage."""
    (folder / f"hit{fault.rank}").write_text(str(time.monotonic()))
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        await_leave(folder)  # the signal may reach another thread a moment later
    elif fault.kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 5
        while time.monotonic() < end:  # the signal may reach another thread, and this one a moment later
            time.sleep(0.01)
    elif fault.kind == "exit":
        os._exit(3)
    elif fault.kind == "raise":
        raise OSError("this stage broke")
    elif fault.kind == "tell":
        await_leave(folder)


def await_leave(folder: Path) -> None:
    with open(folder / "leave") as leave:
        leave.read()


def install(fault: Fault, case: Case) -> None:
    """Put the fault in front of a stage's function."""
    graph = build_graph(case.schedule, early_send=case.early_send, dense_at_once=True)  # its dense part is small
    stage = graph.by_name[fault.stage]
    function = registry.STAGE_FUNCTIONS[stage.function]
    struck: list[bool] = []

    def wrapped(rank: Any, batch: Any, micro: int) -> None:
        if (batch.training, batch.index, micro) == (True, fault.batch, fault.micro) and not struck:
            struck.append(True)
            strike(fault, Path(case.folder))
        function(rank, batch, micro)

    registry.STAGE_FUNCTIONS[stage.function] = wrapped


def break_store(case: Case) -> None:
    """A store that cannot grow, or cannot be read."""
    store = embedding_store.EmbeddingStore
    if case.special == "memory":
        made = store.__init__

        def limited(self: Any, *args: Any, **settings: Any) -> None:
            made(self, *args, **{**settings, "memory_limit": 18_500})

        store.__init__ = limited  # type: ignore[method-assign]
    if case.special == "gather":
        gather, calls = store.gather, []

        def failing(self: Any, *args: Any, **settings: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise MemoryError("no room to gather")
            return gather(self, *args, **settings)

        store.gather = failing  # type: ignore[method-assign]


def break_sizes(case: Case, pipeline: NestedPipeline) -> None:
    """Damage this rank's announcement of batch 3 on its way: word `special`'s number becomes its value."""
    _, word, value = case.special.split(":")
    group = pipeline.rank.communicator.group("keys")
    send = group.all_to_all

    def damaged(message: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if args[2] == "t3/sizes":
            message = message.clone()
            message[:, int(word)] = int(value)
        return send(message, *args, **settings)

    group.all_to_all = damaged  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------------------------------- a rank


def enter(namespace: str) -> None:
    """Join a network namespace, before any thread is there."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = "np"


def train(case: Case, rank: int) -> None:
    """A rank's whole run; leaves its outcome in the case's folder."""
    folder = Path(case.folder)
    if case.network:
        enter(case.network[rank])
    store = dist.FileStore(str(folder / "rendezvous"), case.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.size, timeout=timedelta(seconds=60))
    here = case.special_rank == rank
    if here:
        break_store(case)
    scenario = scenario_of(case)
    generator = scenario.generator(rank)
    model = scenario.model(communicator_for(None, 60.0), generator)
    config = scenario_config(scenario, case.schedule, case.timeout_s)
    config.early_send = case.early_send
    if case.fault is not None and case.fault.rank == rank:
        install(case.fault, case)
    with NestedPipeline(model, scenario.dense_optimizer(model), loss, config) as pipeline:
        if here and case.special.startswith("sizes:"):
            break_sizes(case, pipeline)
        batches = Batches(case, scenario, rank, generator)
        if case.load:
            checkpoint.load(folder.parent / "saved", model=model, pipeline=pipeline, loader=batches)
        losses = []
        data = batches if not case.workers else worker_loader(case, batches)
        for step in pipeline.run(data):
            losses.append(float(step.loss))
            if len(losses) == case.save_after:
                checkpoint.save(folder.parent / "saved", model=model, pipeline=pipeline)
        (folder / f"outcome{rank}").write_bytes(pickle.dumps(read_pipeline(pipeline, losses)))


def run_rank(case: Case, rank: int) -> None:
    folder = Path(case.folder)
    try:
        train(case, rank)
    except BaseException as error:
        seen: BaseException | None = error
        causes = []
        while seen is not None:
            causes.append(f"{type(seen).__name__}: {seen}")
            seen = seen.__cause__ or seen.__context__
        (folder / f"end{rank}").write_text(json.dumps(causes))
        raise


# ---------------------------------------------------------------------------------------------------------- the server


def tell(**words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def fork_rank(case: Case, rank: int) -> int:
    """The pid; 0 in the rank, whose output goes to a file."""
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(Path(case.folder) / f"out{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for descriptor, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(descriptor, target)
    return pid


@functools.cache
def prepare(schedule: str, early_send: bool) -> None:
    """Have the schedule's graph validated and planned before the fork."""
    scenario = scenario_of(Case(""))
    model = scenario.model(None, None)
    config = scenario_config(scenario, schedule)
    config.early_send = early_send
    NestedPipeline(model, scenario.dense_optimizer(model), config=config).close()
    assert_one_thread()


def assert_one_thread() -> None:
    """Threads do not survive a fork; one that was joined is still on its way out for a moment."""
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


def serve() -> tuple[Case, int] | None:
    """Fork and reap until stdin closes: None; in a rank its case and number."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[int, int] = {}
    pending = b""
    tell(ready=True)
    while True:
        readable, _, _ = select.select([0, awake], [], [])
        if awake in readable:
            os.read(awake, 4096)
            for pid in list(ranks):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    tell(rank=ranks.pop(pid), status=os.waitstatus_to_exitcode(status), at=time.monotonic())
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
                return None
            pending += data
            while b"\n" in pending:
                line, _, pending = pending.partition(b"\n")
                request = json.loads(line)
                case = Case(**request)
                case.fault = Fault(**request["fault"]) if request["fault"] else None
                prepare(case.schedule, case.early_send)
                for rank in range(case.size):
                    pid = fork_rank(case, rank)
                    if pid == 0:
                        return case, rank
                    ranks[pid] = rank
                tell(pids={rank: pid for pid, rank in ranks.items()})


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born to ignore it
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # loads torch's compiler, once
    assert_one_thread()
    prepare("nested", False)
    gc.collect()
    gc.freeze()  # ranks share these pages as long as nobody touches them
    work = serve()
    if work is None:
        return
    case, code = work[0], 0
    try:
        run_rank(*work)
    except BaseException:
        if case.whole_exit:
            raise
        traceback.print_exc()
        code = 1
    if not case.whole_exit:  # an interpreter takes most of a second to take itself apart
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    main()
