"""From the function names in the graph to the functions; the one place that says when a stage is skipped."""

from __future__ import annotations

import time
from collections.abc import Callable

from . import commit, early, replicas, retrieval, routing, window
from .counting import profiler_range
from .state import BatchState, RankState

__all__ = ["STAGE_FUNCTIONS", "run_stage"]

StageFunction = Callable[[RankState, BatchState, int], None]

STAGE_FUNCTIONS: dict[str, StageFunction] = {
    "begin": commit.begin,
    "prefetch": routing.prefetch,
    "fetch": routing.fetch,
    "copy": routing.copy,
    "route": routing.route,
    "route_keys": routing.exchange_keys,
    "replicate_keys": replicas.replicate_keys,
    "warm": retrieval.warm,
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
    "replicate_grads": replicas.replicate_grads,
    "recv_replica_grads": replicas.recv_replica_grads,
    "reduce_grads": commit.reduce_grads,
    "dense_scatter": commit.dense_scatter,
    "dense_sum": commit.dense_sum,
    "dense_send": commit.dense_send,
    "dense_mean": commit.dense_mean,
    "commit": commit.post_flags,
    "verdict": commit.verdict,
    "check_failures": commit.check_failures,
    "dense_step": commit.dense_step,
    "update": commit.update,
    "average_announce": replicas.average_announce,
    "average_send": replicas.average_send,
    "average_rows": replicas.average_rows,
    "write_back": retrieval.write_back,
    "early_begin": early.begin,
    "early_tell": early.tell_kinds,
    "early_fresh": early.send_fresh,
    "early_soon": early.send_soon,
    "early_urgent": early.send_urgent,
    "early_rows": early.send_rows,
    "early_grads": early.send_grads,
    "early_recv": early.recv_grads,
    "early_rest": early.send_remaining_grads,
    "early_update": early.update,
}


def run_stage(stage: str, function: str, rank: RankState, batch: BatchState, micro: int) -> None:
    """Run one node, of `stage` in its graph; nodes of a batch that all ranks agreed to skip do nothing.

    Peers can see which stage a rank is in, and what it failed with where that is not told by the exchanges.
    """
    if batch.skipped:
        return
    board = rank.board
    if board is not None:
        board.begin(stage, batch.index, micro)
    begin = time.perf_counter()
    try:
        with profiler_range(stage):
            if rank.backend.has_streams:
                rank.backend.uses(tuple(batch.device_tensors()))
            STAGE_FUNCTIONS[function](rank, batch, micro)
            if rank.hold is not None:
                rank.hold(function, batch, micro, begin)
    except BaseException as error:
        rank.report_failure(stage, batch.index, error)
        raise
    finally:
        if board is not None:
            board.end()
