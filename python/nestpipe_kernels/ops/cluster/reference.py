"""Costs of an order of samples, and the same clustering as native code with every change priced from scratch."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor

__all__ = ["cluster", "cluster_cost", "partition_sizes"]

WEIGHT, SHARED_WEIGHT = 8, 48
TRIES_PER_PART, MAX_TRIED_PARTS = 2, 64
SCALE = 8
SWEEPS, MORE_SWEEPS = 8, 2
FIRST_TEMPERATURE = SCALE << 15
EVEN_PROPOSALS_PER_SAMPLE = 4
MAX_EVEN_PARTS = 64
WORD = 2**64 - 1


def partition_sizes(batch_size: int, num_parts: int) -> list[int]:
    """Samples of each part: batch_size // num_parts, one more in the first batch_size % num_parts parts."""
    return [batch_size // num_parts + (part < batch_size % num_parts) for part in range(num_parts)]


def cluster_cost(order: Tensor, sample_offsets: Tensor, ids: Tensor, num_parts: int) -> dict[str, int | list[int]]:
    """What an order makes the parts transfer.

    Args:
        order: int64 [B], a permutation of the samples.
        sample_offsets: int64 [B + 1].
        ids: int64 or int32 [nnz].
        num_parts: number of parts N.

    Returns:
        rows: distinct ids per part, summed (what "resend" transfers); first_rows [N]: ids first used in each part;
        last_rows [N]: ids last used in each part. "send_once" minimises first_rows[0] + last_rows[-1].
    """
    samples = _samples(sample_offsets, ids)
    return _cost(_split(order.tolist(), num_parts), samples)


def cluster(sample_offsets: Tensor, ids: Tensor, num_ids: int, num_parts: int, objective: str, seed: int) -> Tensor:
    """As `nestpipe_kernels.ops.cluster.cluster`, for checked arguments."""
    samples = _samples(sample_offsets, ids)
    size = len(samples)
    identity = list(range(size))
    if size < 2 or num_parts < 2:
        return torch.tensor(identity, dtype=torch.int64)
    random = _Random(seed)
    sizes = partition_sizes(size, num_parts)
    if objective == "send_once" and num_parts > 2:
        order = _grow_ends(samples, sizes, random)
        _swap_samples(order, samples, [sizes[0], sum(sizes[1:-1]), sizes[-1]], [True, False, True], random)
    else:
        order = _grow_parts(samples, sizes, random)
        _swap_samples(order, samples, sizes, [True] * num_parts, random)
    if objective == "send_once":
        _sort_middle(order, samples, sizes)
        if 4 <= num_parts <= MAX_EVEN_PARTS:
            _even_out(order, samples, num_parts, random)
    order = [sample for part in _split(order, num_parts) for sample in sorted(part)]
    if _price(order, samples, num_parts, objective) >= _price(identity, samples, num_parts, objective):
        order = identity
    return torch.tensor(order, dtype=torch.int64)


def _samples(sample_offsets: Tensor, ids: Tensor) -> list[set[int]]:
    bounds, values = sample_offsets.tolist(), ids.tolist()
    return [set(values[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _split(order: list[int], num_parts: int) -> list[list[int]]:
    parts, begin = [], 0
    for size in partition_sizes(len(order), num_parts):
        parts.append(order[begin : begin + size])
        begin += size
    return parts


def _ids_of(members: list[int], samples: list[set[int]]) -> set[int]:
    return set().union(*(samples[sample] for sample in members))


def _cost(parts: list[list[int]], samples: list[set[int]]) -> dict[str, int | list[int]]:
    used = [_ids_of(part, samples) for part in parts]
    return {"rows": sum(map(len, used)), "first_rows": _new_rows(used), "last_rows": _new_rows(used[::-1])[::-1]}


def _new_rows(used: list[set[int]]) -> list[int]:
    seen: set[int] = set()
    rows = []
    for part in used:
        rows.append(len(part - seen))
        seen |= part
    return rows


def _unevenness(parts: list[list[int]], samples: list[set[int]]) -> int:
    used = [_ids_of(part, samples) for part in parts]
    return sum(rows * rows for rows in _new_rows(used) + _new_rows(used[::-1]))


def _price(order: list[int], samples: list[set[int]], num_parts: int, objective: str) -> tuple[int, int]:
    parts = _split(order, num_parts)
    used = [_ids_of(part, samples) for part in parts]
    if objective == "resend":
        return sum(map(len, used)), 0
    return len(used[0]) + len(used[-1]), _unevenness(parts, samples)


def _weights(samples: list[set[int]]) -> dict[int, int]:
    """What an id adds to the distance of a sample from a part that lacks it."""
    users = Counter(id_ for sample in samples for id_ in sample)
    return {id_: WEIGHT + SHARED_WEIGHT // count for id_, count in users.items()}


def _grow_parts(samples: list[set[int]], sizes: list[int], random: _Random) -> list[int]:
    """Each part grows from the sample farthest from the part before, always by the nearest."""
    weights = _weights(samples)
    users = Counter(id_ for sample in samples for id_ in sample)
    shared = [{id_ for id_ in sample if users[id_] > 1} for sample in samples]

    def distance(sample: int, part: set[int]) -> int:
        return sum(-weights[id_] if id_ in part else weights[id_] for id_ in shared[sample])

    order: list[int] = []
    free = list(range(len(samples)))
    part: set[int] = set()
    for size in sizes:
        for place in range(size):
            if not order:
                chosen = random.below(len(samples))
            elif place == 0:
                chosen = max(free, key=lambda sample: (distance(sample, part), -sample))
            else:
                chosen = min(free, key=lambda sample: (distance(sample, part), sample))
            part = part | shared[chosen] if place else shared[chosen]
            free.remove(chosen)
            order.append(chosen)
    return order


def _grow_ends(samples: list[set[int]], sizes: list[int], random: _Random) -> list[int]:
    """The cheapest of several first parts and, of what is left, of several last parts; the others between."""
    weights = _weights(samples)
    free = set(range(len(samples)))

    def grow(size: int) -> list[int]:
        chosen = random.below(len(samples))
        while chosen not in free:
            chosen = (chosen + 1) % len(samples)
        members = [chosen]
        while len(members) < size:
            part = _ids_of(members, samples)
            left = [sample for sample in sorted(free) if sample not in members]
            members.append(min(left, key=lambda sample: (sum(weights[id_] for id_ in samples[sample] - part), sample)))
        return members

    ends = []
    for size in (sizes[0], sizes[-1]):
        tries = TRIES_PER_PART * min(len(sizes), MAX_TRIED_PARTS) if size else 0
        grown = [grow(size) for _ in range(tries)]
        best = min(grown, key=lambda members: len(_ids_of(members, samples)), default=[])
        free -= set(best)
        ends.append(best)
    return ends[0] + sorted(free) + ends[1]


def _swap_samples(
    order: list[int], samples: list[set[int]], group_sizes: list[int], counted: list[bool], random: _Random
) -> None:
    """Sweeps that swap each sample of a counted group with its best partner, under noise that falls to nothing."""
    group_at = [group for group, size in enumerate(group_sizes) for _ in range(size)]

    def rows(group: int) -> int:
        members = [sample for at, sample in enumerate(order) if group_at[at] == group]
        return len(_ids_of(members, samples)) if counted[group] else 0

    def change(at: int, other: int) -> int:
        """Of cost, by a swap."""
        p, q = group_at[at], group_at[other]
        before = rows(p) + rows(q)
        order[at], order[other] = order[other], order[at]
        after = rows(p) + rows(q)
        order[at], order[other] = order[other], order[at]
        return after - before

    def estimate(at: int, other: int) -> int:
        """`change` as if the two samples had no id in common that one of the groups would lose."""
        p, q = group_at[at], group_at[other]
        return _added(order[at], q) + _added(order[other], p) - _needed(at) - _needed(other)

    def _added(sample: int, group: int) -> int:
        members = [member for at, member in enumerate(order) if group_at[at] == group]
        return len(samples[sample] - _ids_of(members, samples)) if counted[group] else 0

    def _needed(at: int) -> int:
        group = group_at[at]
        others = [member for place, member in enumerate(order) if group_at[place] == group and place != at]
        return len(samples[order[at]] - _ids_of(others, samples)) if counted[group] else 0

    size = len(order)
    sweep = 0
    is_better = True
    while sweep < SWEEPS or (is_better and sweep < SWEEPS + MORE_SWEEPS):
        temperature = FIRST_TEMPERATURE * max(SWEEPS - 1 - sweep, 0) // (SWEEPS - 1)
        noise = [random.exponential(temperature) for _ in range(2 * size)] if temperature else [0] * (2 * size)
        is_better = False
        for at in range(size):
            if not counted[group_at[at]]:
                continue
            offset = random.below(size)
            others = [other for other in range(size) if group_at[other] != group_at[at]]
            if not others:
                continue
            best = min(others, key=lambda other: (SCALE * estimate(at, other) - noise[offset + other], other))
            exact = SCALE * change(at, best)
            allowed = noise[offset + best]
            if exact < allowed or (exact == allowed and allowed > 0):
                order[at], order[best] = order[best], order[at]
                is_better = is_better or exact < 0
        sweep += 1


def _sort_middle(order: list[int], samples: list[set[int]], sizes: list[int]) -> None:
    """Samples between first and last part: those nearer to the first part first."""
    if len(sizes) < 3:
        return
    begin, end = sizes[0], len(order) - sizes[-1]
    first, last = _ids_of(order[:begin], samples), _ids_of(order[end:], samples)
    order[begin:end] = sorted(
        order[begin:end], key=lambda sample: (len(samples[sample] & last) - len(samples[sample] & first), sample)
    )


def _even_out(order: list[int], samples: list[set[int]], num_parts: int, random: _Random) -> None:
    """Swaps between middle parts that lower the sum of squares of first-use and last-use sets."""
    part_at = [part for part, size in enumerate(partition_sizes(len(order), num_parts)) for _ in range(size)]
    middle = [at for at, part in enumerate(part_at) if 0 < part < num_parts - 1]
    if not middle:
        return
    best = _unevenness(_split(order, num_parts), samples)
    for _ in range(EVEN_PROPOSALS_PER_SAMPLE * len(order)):
        first, second = middle[random.below(len(middle))], middle[random.below(len(middle))]
        if part_at[first] == part_at[second]:
            continue
        order[first], order[second] = order[second], order[first]
        now = _unevenness(_split(order, num_parts), samples)
        if now < best:
            best = now
        else:
            order[first], order[second] = order[second], order[first]


def _mix(x: int) -> int:
    """mix64 of csrc/include/nestpipe/hash.h."""
    x ^= x >> 32
    x = x * 0x9FB21C651E98DF25 & WORD
    x ^= x >> 29
    x = x * 0xD6E8FEB86659FD93 & WORD
    return x ^ (x >> 32)


class _Random:
    """The random numbers of native clustering: a counter, mixed."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def word(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & WORD
        return _mix(self.state)

    def below(self, bound: int) -> int:
        return ((self.word() >> 32) * bound) >> 32

    def exponential(self, temperature: int) -> int:
        """In 1 / SCALE ids, at `temperature` in 2^-16 of that: it times -log2 of a uniform number, piecewise linear."""
        word = self.word()
        zeros = 64 - (word | 1).bit_length()
        mantissa = ((word << zeros + 1) & WORD) >> 48
        return (temperature * (((zeros + 1) << 16) - mantissa)) >> 32
