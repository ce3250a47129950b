"""Case `cluster`: the rows that micro-batches of ordered samples send, ours beside partitions by Mt-KaHyPar."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nestpipe_kernels.bench.lines import print_lines, spread, use_threads
from nestpipe_kernels.bench.zipf import draw_ranks, zipf_cdf
from nestpipe_kernels.data.movielens import read_ratings
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.ops.cluster import OBJECTIVES, cluster, partition_sizes

__all__ = ["SETS", "batch_of", "run"]

_Ids = npt.NDArray[np.int64]
IMBALANCE, PEER_THREADS = 0.03, 2


def _topics(seed: int, samples: int, bag: int, topics: int, own: float, items: int, popular: int) -> _Ids:
    """Bags of which a part `own` comes from one of `topics` lists, the rest from a list that all share; both skewed."""
    generator = np.random.default_rng(seed)
    topic = generator.integers(0, topics, (samples, 1))
    place = (generator.random((samples, bag)) ** 2 * items).astype(np.int64)
    common = (generator.random((samples, bag)) ** 3 * popular).astype(np.int64) + topics * items
    return np.where(generator.random((samples, bag)) < own, topic * items + place, common)


def _zipf(seed: int, samples: int, bag: int, rows: int, exponent: float) -> _Ids:
    return draw_ranks(zipf_cdf(rows, exponent), np.random.default_rng(seed), (samples, bag))


def _ml100k(seed: int, data: str, choose: str) -> _Ids:
    """[512, 50]: 50 ratings of each of 512 users: any (`choose` "any"), or the first or last by time."""
    table = read_ratings(data)
    users, items, times = table.users.numpy(), table.items.numpy(), table.timestamps.numpy()
    generator = np.random.default_rng(seed)
    found, counts = np.unique(users, return_counts=True)
    chosen = generator.permutation(found[counts >= 50])[:512]
    by_time = np.lexsort((times, users))
    bags = []
    for user in chosen:
        own = by_time[np.searchsorted(users[by_time], user) : np.searchsorted(users[by_time], user, side="right")]
        own = generator.permutation(own) if choose == "any" else own
        bags.append(items[own[:50] if choose != "last" else own[-50:]])
    return np.asarray(np.stack(bags), dtype=np.int64)


def _fields(seed: int, samples: int, fields: int) -> _Ids:
    """A click log's rows: one id of each field, Zipf; sizes of fields from 3 to 300,000. Fields go in groups of three:
    the second and third id of a group follow, half of the time, from the first."""
    generator = np.random.default_rng(seed)
    columns: list[_Ids] = []
    for field, rows in enumerate(np.geomspace(3, 300_000, fields).astype(np.int64)):
        own = draw_ranks(zipf_cdf(int(rows), 1.1), generator, (samples,))
        if field % 3:
            own = np.where(generator.random(samples) < 0.5, columns[field - field % 3] * 7 % rows, own)
        columns.append(own)
    return np.stack(columns, 1) + np.arange(fields) * 1_000_000


def _walks(seed: int, samples: int, steps: int, items: int) -> _Ids:
    """Random walks over items with five fixed successors each, begun anew at times, at items by Zipf."""
    follows = np.random.default_rng(7).integers(0, items, (items, 5))
    generator = np.random.default_rng(seed)
    starts = draw_ranks(zipf_cdf(items, 0.9), generator, (samples, steps))
    places = [starts[:, 0]]
    for step in range(1, steps):
        moved = follows[places[-1], generator.integers(0, 5, samples)]
        places.append(np.where(generator.random(samples) < 0.15, starts[:, step], moved))
    return np.stack(places, 1)


SETS: dict[str, Callable[[int, str | None], _Ids]] = {
    "ml100k": lambda seed, data: _ml100k(seed, str(data), "any"),
    "ml100k-first": lambda seed, data: _ml100k(seed, str(data), "first"),
    "topics": lambda seed, data: _topics(seed, 512, 50, 32, 0.7, 200, 2000),
    "topics-100": lambda seed, data: _topics(seed, 512, 50, 100, 0.9, 60, 500),
    "topics-12": lambda seed, data: _topics(seed, 1024, 20, 12, 0.6, 60, 300),
    "zipf": lambda seed, data: _zipf(seed, 512, 50, 1_000_000, 1.05),
    "zipf-1.2": lambda seed, data: _zipf(seed, 1024, 20, 100_000, 1.2),
    "ml100k-last": lambda seed, data: _ml100k(seed, str(data), "last"),
    "fields": lambda seed, data: _fields(seed, 512, 26),
    "walks": lambda seed, data: _walks(seed, 512, 40, 3_000),
}
"""Batches of ids [samples, bag] by seed and path of MovieLens-100K (for the sets that need it)."""


def batch_of(name: str, seed: int, data: str | None) -> _Ids:
    """The ids of a batch, renumbered 0, 1, ... ; int64 [samples, bag]."""
    keys = SETS[name](seed, data)
    return np.asarray(np.unique(keys, return_inverse=True)[1]).reshape(keys.shape)


def run(parsed: argparse.Namespace) -> int:
    """Measure and print a line for each set, number of parts, implementation and objective."""
    use_threads(parsed.threads or 1)
    peer = _Peer.make() if parsed.peers else None
    for name in parsed.sets:
        if name.startswith("ml100k") and parsed.data is None:
            print(f"left out: {name} needs --data PATH of MovieLens-100K", file=sys.stderr)
            continue
        batches = [batch_of(name, parsed.seed + k, parsed.data) for k in range(parsed.seeds)]
        for num_parts in parsed.parts:
            print_lines(parsed, list(_lines(parsed, name, batches, num_parts, peer)))
    return 0


def _lines(
    parsed: argparse.Namespace, name: str, batches: list[_Ids], num_parts: int, peer: _Peer | None
) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for k, ids in enumerate(batches):
        random = _part_of(torch.from_numpy(np.random.default_rng([k, 1]).permutation(len(ids))), num_parts)
        base = {f"random_{key}": rows for key, rows in _cost(ids, random, num_parts).items()}
        runs: list[tuple[str, str, Callable[[], _Ids]]] = [
            ("nestpipe", objective, _ours(ids, num_parts, objective)) for objective in OBJECTIVES
        ]
        if peer is not None:
            runs.append(("mtkahypar", "km1", peer.prepare(ids, num_parts, k)))
        for impl, objective, step in runs:
            times = []
            for _ in range(parsed.repeat if impl == "nestpipe" else 1):
                begin = time.perf_counter()
                part_of = step()
                times.append((time.perf_counter() - begin) * 1e3)
            cost = {**base, **_cost(ids, part_of, num_parts), "ms": median(times)}
            found.setdefault((impl, objective), []).append(cost)
    peers = found.get(("mtkahypar", "km1"))
    for (impl, objective), costs in found.items():
        line: dict[str, Any] = {
            "case": "cluster",
            "shape": _shape(name, batches, num_parts),
            "impl": impl,
            "objective": objective,
        }
        line |= {"dtype": "int64", "threads": 1 if impl == "nestpipe" else PEER_THREADS}
        line |= spread([cost["ms"] for cost in costs])
        line |= {key: median(cost[key] for cost in costs) for key in costs[0] if key not in ("ms", "random_ends")}
        if peers is not None and impl == "nestpipe":
            line |= _against(objective, costs, peers)
        yield {**line, **facts()}


def _against(objective: str, ours: list[dict[str, float]], peers: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the seeds of ratios to the peer."""
    pairs = list(zip(ours, peers))
    ratios = {"times_faster": median(peer["ms"] / our["ms"] for our, peer in pairs)}
    if objective == "resend":
        saved = [(o["random_rows"] - o["rows"]) / (p["random_rows"] - p["rows"]) for o, p in pairs]
        ratios |= {"saved_over_peer": median(saved), "least_saved_over_peer": min(saved)}
    else:
        ends = [o["ends"] / p["ends"] for o, p in pairs]
        ratios |= {"ends_over_peer": median(ends), "most_ends_over_peer": max(ends)}
    return {key: round(value, 3) for key, value in ratios.items()}


def _shape(name: str, batches: list[_Ids], num_parts: int) -> dict[str, Any]:
    distinct = int(median(int(ids.max()) + 1 for ids in batches))
    samples, bag = batches[0].shape
    return {
        "set": name,
        "samples": samples,
        "bag": bag,
        "distinct": distinct,
        "parts": num_parts,
        "seeds": len(batches),
    }


def _ours(ids: _Ids, num_parts: int, objective: str) -> Callable[[], _Ids]:
    flat = torch.from_numpy(ids.reshape(-1)).to(torch.int32)
    offsets = torch.arange(len(ids) + 1) * ids.shape[1]
    return lambda: _part_of(cluster(offsets, flat, num_parts, objective), num_parts)


def _part_of(order: torch.Tensor, num_parts: int) -> _Ids:
    """[samples]: the part of each sample."""
    part_of = np.empty(len(order), np.int64)
    part_of[order.numpy()] = np.repeat(np.arange(num_parts), partition_sizes(len(order), num_parts))
    return part_of


def _cost(ids: _Ids, part_of: _Ids, num_parts: int) -> dict[str, float]:
    """Distinct ids of the parts together, and of the first and the last; in the best order of parts for `ends`."""
    used = [len(np.unique(ids[part_of == part])) for part in range(num_parts)]
    return {"rows": sum(used), "first_rows": used[0], "last_rows": used[-1], "ends": used[0] + used[-1]}


class _Peer:
    """Partitions by Mt-KaHyPar: connectivity (KM1), its default preset; samples are nodes, ids are hyperedges."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._machine = module.initialize(PEER_THREADS, False)

    @classmethod
    def make(cls) -> _Peer | None:
        """The peer, or None, with a word to standard error, where it is not installed."""
        try:
            module = importlib.import_module("mtkahypar")
        except (ImportError, OSError) as error:
            print(f"left out: mtkahypar: {error}", file=sys.stderr)
            return None
        return cls(module)

    def prepare(self, ids: _Ids, num_parts: int, seed: int) -> Callable[[], _Ids]:
        """Build the hypergraph (not timed; ids of one sample left out) and return what partitions it.

        Its parts are ordered so that the two smallest, by distinct ids, are the first and the last.
        """
        module = self._module
        pairs = np.unique(np.stack([ids.reshape(-1), np.repeat(np.arange(len(ids)), ids.shape[1])], 1), axis=0)
        edges = np.split(pairs[:, 1], np.cumsum(np.bincount(pairs[:, 0]))[:-1])
        context = self._machine.context_from_preset(module.PresetType.DEFAULT)
        context.set_partitioning_parameters(num_parts, IMBALANCE, module.Objective.KM1)
        context.logging = False
        module.set_seed(seed)
        shared = [edge.tolist() for edge in edges if len(edge) > 1]
        graph = self._machine.create_hypergraph(context, len(ids), len(shared), shared)

        def step() -> _Ids:
            part_of = np.asarray(graph.partition(context).get_partition(), dtype=np.int64)
            used = [len(np.unique(ids[part_of == part])) for part in range(num_parts)]
            by_size = np.argsort(used, kind="stable")
            place = np.empty(num_parts, np.int64)
            place[np.concatenate([by_size[:1], by_size[2:], by_size[1:2]])] = np.arange(num_parts)
            return np.asarray(place[part_of])

        return step
