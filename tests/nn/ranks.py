"""Runs a function as every rank of an in-memory world, in threads, and returns the results by rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nestpipe_kernels.comm import Communicator, InMemoryWorld

R = TypeVar("R")


def run_ranks(size: int, body: Callable[[Communicator], R]) -> list[R]:
    """`body(communicator)` of each rank; the first exception is raised."""
    world = InMemoryWorld(size, timeout_s=30.0)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, world.communicator(rank)) for rank in range(size)]
        return [future.result(timeout=60) for future in futures]
