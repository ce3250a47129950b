"""Real processes for tests of the gloo communicator: each rank runs the functions that the test names."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

LIMIT_S = 60.0


def _serve(rank: int, size: int, init_file: str, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(init_file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    connection.send("up")
    while (request := connection.recv()) is not None:
        function, arguments = request
        try:
            connection.send(function(*arguments))
        except Exception as error:
            connection.send(error)
    dist.destroy_process_group()


def _context() -> ForkServerContext:
    """Ranks are forked from one server per test process, which has no threads and everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loaded_before_fork"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server of older Pythons has no other way to know
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


class GlooWorld:
    """`size` ranks of their own; `run` calls a module-level function on all of them and returns their results.

    Ranks that are to have processes of their own must not be daemons.
    """

    def __init__(self, size: int, daemon: bool = True) -> None:
        context = _context()
        self._folder = tempfile.TemporaryDirectory()
        init_file = os.path.join(self._folder.name, "rendezvous")
        self.processes = []
        self._connections = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, init_file, there), daemon=daemon)
            process.start()
            there.close()
            self.processes.append(process)
            self._connections.append(here)
        for rank in range(size):
            assert self.receive(rank) == "up"

    def send(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        self._connections[rank].send((function, arguments))

    def receive(self, rank: int) -> Any:
        if not self._connections[rank].poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} did not answer within {LIMIT_S} s")
        return self._connections[rank].recv()

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        chosen = range(len(self.processes)) if ranks is None else ranks
        for rank in chosen:
            self.send(rank, function, *arguments)
        return [self.receive(rank) for rank in chosen]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the only rank of a world of one returns; raises what it raised."""
        (result,) = self.run(function, *arguments)
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a rank that died, or is just dying, has closed its end
                connection.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
