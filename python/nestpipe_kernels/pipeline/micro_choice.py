"""`num_micro_batches="auto"`: the first steps run with two numbers of micro-batches, then all ranks take the same one.

Model. Compute of a step grows with the number N of micro-batches by a fixed cost for each (calls of the model, nodes of
the graph); what keeps the compute lane waiting falls with 1 / N where exchanges overlap compute, since the first
micro-batch's rows and the last one's gradients are the exposed ones. So a step takes

    T(N) = constant + cost * N + exposed / N,

and both numbers follow from medians at two values of N. Ranks put the slowest rank's medians in, which they exchange
once, so that all find the same. A wait that does not fall with N (another rank's lookups, a link too slow to hide)
belongs to the constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

__all__ = ["TRIAL_STEPS", "MicroBatchChoice", "best_micro_batches"]

PROBES = (2, 8)
"""Numbers of micro-batches that are tried, in this order."""
WARM_STEPS, MEASURED_STEPS = 3, 5
"""Steps with each: first ones that are not looked at (rows are new, caches cold), then ones that are."""
TRIAL_STEPS = len(PROBES) * (WARM_STEPS + MEASURED_STEPS)
"""Steps until a number is chosen."""
CANDIDATES = (1, 2, 4, 8, 16, 32)
LEAST_COST_US = 100
"""A micro-batch costs at least this, whatever noise says."""


def best_micro_batches(compute_us: tuple[int, int], exposed_us: tuple[int, int], largest_batch: int) -> int:
    """The candidate with the smallest T(N); the smaller one of equals.

    Args:
        compute_us, exposed_us: microseconds of a step at each of PROBES: inside the model; waiting.
        largest_batch: samples of the largest batch of any rank; micro-batches of no samples gain nothing.
    """
    few, many = PROBES
    cost = max((compute_us[1] - compute_us[0]) / (many - few), LEAST_COST_US)
    exposed = max((exposed_us[0] - exposed_us[1]) / (1 / few - 1 / many), 0.0)
    allowed = [n for n in CANDIDATES if n <= max(largest_batch, 1)]
    return min(allowed, key=lambda n: (cost * n + exposed / n, n))


class MicroBatchChoice:
    """Counts training steps, which all ranks begin alike, and says how many micro-batches the next one has.

    Args:
        share: gives every rank's int64 vector to all: [k] -> [W, k]; called once, at the same step everywhere.
    """

    def __init__(self, share: Callable[[Tensor], Tensor]) -> None:
        self._share = share
        self._step = 0
        self._compute_us: list[list[int]] = [[], []]
        self._exposed_us: list[list[int]] = [[], []]
        self._largest_batch = 0

    def record(self, spent_ns: Mapping[tuple[str, bool], int], batch_size: int) -> None:
        """What a training step took on this rank, by (kind of stage, waited for it). To be called for every step in
        which some rank had a batch, whatever became of it: all ranks count the same."""
        compute_us = spent_ns.get(("compute", False), 0) // 1000
        exposed_us = sum(spent for (_, exposed), spent in spent_ns.items() if exposed) // 1000
        probe, place = divmod(self._step, WARM_STEPS + MEASURED_STEPS)
        self._step += 1
        if place >= WARM_STEPS:
            self._compute_us[probe].append(compute_us)
            self._exposed_us[probe].append(exposed_us)
        self._largest_batch = max(self._largest_batch, batch_size)

    @property
    def settled(self) -> bool:
        """Whether all probes are through, so that what `next_step` says stays."""
        return self._step >= TRIAL_STEPS

    def next_step(self) -> int:
        """Micro-batches of the step that begins; collective once the probes are through."""
        if not self.settled:
            return PROBES[self._step // (WARM_STEPS + MEASURED_STEPS)]
        mine = [int(median(values)) for values in (*self._compute_us, *self._exposed_us)] + [self._largest_batch]
        slowest = self._share(torch.tensor(mine, dtype=torch.int64)).max(0).values.tolist()
        return best_micro_batches((slowest[0], slowest[1]), (slowest[2], slowest[3]), slowest[4])
