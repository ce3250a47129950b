"""Costs of an order of samples, and the same clustering as native code with every change priced from scratch."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor

__all__ = ["cluster", "cluster_cost", "partition_sizes"]

PROPOSALS_PER_SAMPLE = 200
MAX_PROPOSALS = 2**20
PROPOSALS_PER_TEMPERATURE = 256
FIRST_TEMPERATURE = 3 << 14
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
    order = _by_min_hash(samples, seed)
    sizes = partition_sizes(size, num_parts)
    group_sizes, counted = sizes, [True] * num_parts
    if objective == "send_once" and num_parts > 2:
        group_sizes, counted = [sizes[0], sum(sizes[1:-1]), sizes[-1]], [True, False, True]
    _anneal(order, samples, group_sizes, counted, random)
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


def _by_min_hash(samples: list[set[int]], seed: int) -> list[int]:
    """Samples by the smallest hash of the ids that they share with others."""
    users = Counter(id_ for sample in samples for id_ in sample)
    least = [min((_mix(id_ ^ seed) for id_ in sample if users[id_] > 1), default=WORD) for sample in samples]
    return sorted(range(len(samples)), key=lambda sample: (least[sample], sample))


def _anneal(
    order: list[int], samples: list[set[int]], group_sizes: list[int], counted: list[bool], random: _Random
) -> None:
    """Swaps between groups; a worsening passes with a probability that falls with the temperature."""
    group_at = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    candidates = [at for at, group in enumerate(group_at) if counted[group]]

    def rows(group: int) -> int:
        members = [sample for at, sample in enumerate(order) if group_at[at] == group]
        return len(_ids_of(members, samples)) if counted[group] else 0

    num_proposals = min(PROPOSALS_PER_SAMPLE * len(order), MAX_PROPOSALS)
    temperature = 0
    for proposal in range(-(-num_proposals // PROPOSALS_PER_TEMPERATURE) * PROPOSALS_PER_TEMPERATURE):
        if proposal % PROPOSALS_PER_TEMPERATURE == 0:
            temperature = FIRST_TEMPERATURE * (num_proposals - proposal) // num_proposals
        drawn, other = random.pair(len(candidates), len(order))
        at = candidates[drawn]
        p, q = group_at[at], group_at[other]
        if p == q:
            continue
        allowed = random.allowed_worsening(temperature)
        before = rows(p) + rows(q)
        order[at], order[other] = order[other], order[at]
        if rows(p) + rows(q) - before > allowed:
            order[at], order[other] = order[other], order[at]


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
        first, second = (middle[drawn] for drawn in random.pair(len(middle), len(middle)))
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

    def pair(self, first_bound: int, second_bound: int) -> tuple[int, int]:
        word = self.word()
        return ((word >> 32) * first_bound) >> 32, ((word & 0xFFFFFFFF) * second_bound) >> 32

    def allowed_worsening(self, temperature: int) -> int:
        """Rows, at `temperature` in 2^-16 rows: temperature times -log2 of a uniform number, piecewise linear."""
        word = self.word()
        zeros = 64 - (word | 1).bit_length()
        mantissa = ((word << zeros + 1) & WORD) >> 48
        return (temperature * (((zeros + 1) << 16) - mantissa)) >> 32
