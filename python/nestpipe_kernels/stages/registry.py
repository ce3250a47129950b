"""From the function names in the graph to the functions; the one place that says when a stage is skipped."""

from __future__ import annotations

import time
from collections.abc import Callable

from . import commit, retrieval, routing, window
from .state import BatchState, RankState

__all__ = ["STAGE_FUNCTIONS", "run_stage"]

StageFunction = Callable[[RankState, BatchState, int], None]

STAGE_FUNCTIONS: dict[str, StageFunction] = {
    "begin": commit.begin,
    "prefetch": routing.prefetch,
    "route": routing.route,
    "route_keys": routing.exchange_keys,
    "retrieve": retrieval.retrieve,
    "find": retrieval.find,
    "gather_all": retrieval.gather_all,
    "gather_fresh": retrieval.gather_fresh,
    "sync": retrieval.sync,
    "send_rows": window.send_rows,
    "forward_backward": window.forward_backward,
    "forward": window.forward,
    "send_grads": window.send_grads,
    "recv_grads": window.recv_grads,
    "reduce_grads": commit.reduce_grads,
    "dense_scatter": commit.dense_scatter,
    "dense_sum": commit.dense_sum,
    "commit": commit.post_flags,
    "verdict": commit.verdict,
    "check_failures": commit.check_failures,
    "dense_step": commit.dense_step,
    "update": commit.update,
    "write_back": retrieval.write_back,
}


def run_stage(function: str, rank: RankState, batch: BatchState, micro: int) -> None:
    """Run one node; nodes of a batch that all ranks agreed to skip do nothing."""
    if batch.skipped:
        return
    if rank.hold is None:
        STAGE_FUNCTIONS[function](rank, batch, micro)
        return
    begin = time.perf_counter()
    STAGE_FUNCTIONS[function](rank, batch, micro)
    rank.hold(function, batch, micro, begin)
