"""Sparse groups: how the ranks of a world share copies of the tables (2D sparse parallelism).

The W ranks form `count` groups of M = W / count consecutive ranks. Every group holds all tables, sharded over its M
ranks; rank r is shard r % M of group r // M. Rows and their gradients travel inside a group; ranks of the same shard
(one in each group, the *replicas*) exchange what keeps their copies alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nestpipe_kernels.comm.communicator import Communicator

__all__ = ["SparseGroups", "Topology", "checked_groups"]

_SYNCS = ("exact", "average")


@dataclass(frozen=True)
class SparseGroups:
    """How many copies of the tables there are, and how they stay alike.

    Attributes:
        count: groups that hold one copy each, >= 1; it divides the number of ranks, and consecutive ranks form a group
            (ranks of one machine, as launchers number them).
        sync: "exact": every copy sees the keys and gradients of all ranks; the result has the bits of one group.
            "average": keys are exchanged, gradients are not; each copy trains on the mean over its own group, and the
            copies are averaged now and then. Cheaper, another result.
        average_every: with "average": updates between two averagings, >= 1.
    """

    count: int = 1
    sync: str = "exact"
    average_every: int = 1

    def __post_init__(self) -> None:
        for name in ("count", "average_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"SparseGroups: {name} must be an integer >= 1, got {value!r}")
        if self.sync not in _SYNCS:
            raise ValueError(f"SparseGroups: unknown sync {self.sync!r}: choose one of {', '.join(_SYNCS)}")
        if self.average_every != 1 and self.sync != "average":
            raise ValueError(
                f"SparseGroups: average_every={self.average_every} needs sync='average'; with sync={self.sync!r} the "
                "copies never differ"
            )

    @property
    def mode(self) -> str:
        """ "one" copy, "exact" or "average"."""
        return "one" if self.count == 1 else self.sync

    def check_world(self, size: int) -> None:
        """Raises ValueError: `count` does not divide a number of ranks; names those that do."""
        if size % self.count:
            fitting = [str(n) for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"sparse_groups: {self.count} groups do not divide the {size} rank{'s' * (size > 1)} "
                f"of the process group; choose {'one of ' * (size > 1)}{', '.join(fitting)}"
            )


def checked_groups(value: object, who: str) -> SparseGroups:
    """The settings that an argument `sparse_groups` stands for: a number is that of groups that sync exactly.

    Raises:
        TypeError: neither SparseGroups nor an integer. ValueError: an integer < 1.
    """
    if isinstance(value, SparseGroups):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{who}: sparse_groups must be an integer or SparseGroups, got {value!r}")
    return SparseGroups(value)


class Topology:
    """One rank's place among the sparse groups of its world.

    Attributes:
        world: all ranks.
        settings: how many groups there are and how they sync.
        num_shards: M, ranks in a group. shard: which part of the tables this rank owns.
        num_groups: copies of the tables. group_number: whose copy this rank's part belongs to.
    """

    def __init__(self, world: Communicator, settings: SparseGroups | None = None) -> None:
        """Raises ValueError: `settings.count` does not divide the number of ranks."""
        self.world = world
        self.settings = settings = settings or SparseGroups()
        settings.check_world(world.size)
        self.num_groups = settings.count
        self.num_shards = world.size // settings.count
        self.group_number, self.shard = divmod(world.rank, self.num_shards)

    @property
    def mode(self) -> str:
        """ "one" copy, "exact" or "average"."""
        return self.settings.mode

    @cached_property
    def group(self) -> Communicator:
        """The ranks that share this rank's copy of the tables: rank = shard. Collective over the world at first."""
        if self.num_groups == 1:
            return self.world
        shards = range(self.num_shards)
        return self.world.split("group", [[g * self.num_shards + s for s in shards] for g in range(self.num_groups)])

    @cached_property
    def replicas(self) -> Communicator:
        """The ranks that own the same shard: rank = group number. Collective over the world at first."""
        groups = range(self.num_groups)
        return self.world.split("replica", [[g * self.num_shards + s for g in groups] for s in range(self.num_shards)])

    def connect(self) -> None:
        """Make both kinds of parts, at a point that all ranks reach. Collective at first."""
        if self.num_groups > 1:
            _ = self.group, self.replicas  # made when first asked for

    def sources(self, group_number: int | None = None) -> slice:
        """World ranks of a group (this rank's own by default), as a slice of lists by rank."""
        number = self.group_number if group_number is None else group_number
        return slice(number * self.num_shards, (number + 1) * self.num_shards)
