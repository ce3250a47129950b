"""A part of the ranks of a GlooCommunicator, with process groups of its own, so that no part waits for another."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nestpipe_kernels.comm.board import Board
from nestpipe_kernels.comm.checks import PART_PURPOSES, own_part
from nestpipe_kernels.comm.communicator import Communicator, LocalCommunicator
from nestpipe_kernels.comm.gloo import GlooCommunicator, GlooGroup, first_line
from nestpipe_kernels.errors import CommunicationError

__all__ = ["GlooPart", "make_part"]


class GlooPart:
    """One rank's groups over the ranks of its part. Has groups for some purposes only, and lives as long as the whole.

    In messages ranks keep the numbers that they have in the whole.
    """

    def __init__(self, whole: GlooCommunicator, part: str, ranks: Sequence[int], rank: int) -> None:
        self._whole = weakref.proxy(whole)
        self._part = part
        self._ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.name = whole.name
        self.timeout_s = whole.timeout_s
        self._groups: dict[str, GlooGroup] = {}

    def add(self, purpose: str, process_group: Any) -> None:
        """Use a process group over the part's ranks for a purpose."""
        self._groups[purpose] = GlooGroup(self, purpose, process_group)

    def group(self, purpose: str) -> GlooGroup:
        """The group for one of the purposes that the part was made for; ValueError for another."""
        if purpose not in self._groups:
            raise ValueError(f"comm: this part of a world has no {purpose!r} group; it has {', '.join(self._groups)}")
        return self._groups[purpose]

    def with_timeout(self, timeout_s: float) -> Communicator:
        """Not for parts: split the communicator that has the wanted time-out."""
        if timeout_s != self.timeout_s:
            raise ValueError(f"comm: a part keeps the time-out of its whole, {self.timeout_s:g} s, got {timeout_s:g}")
        return self

    def label(self, purpose: str) -> str:
        """What messages call a purpose."""
        return f"{self._part}_{purpose}"

    def split(self, name: str, parts: Sequence[Sequence[int]]) -> Communicator:
        """Not for parts: split the whole."""
        raise ValueError("comm: a part of a world cannot be split again")

    def close(self) -> None:
        """Destroy the part's groups. Idempotent."""
        for group in self._groups.values():
            group.destroy()

    @property
    def board(self) -> Board | None:
        """The whole's."""
        board: Board | None = self._whole.board
        return board

    def describe_cause(self, purpose: int, number: int, silent: Sequence[int]) -> str:
        """As the whole's; `silent` are ranks of the part."""
        return str(self._whole.describe_cause(purpose, number, [self._ranks[rank] for rank in silent]))


def make_part(whole: GlooCommunicator, parent: Any, name: str, parts: Sequence[Sequence[int]]) -> Communicator:
    """Make the groups of all parts and return this rank's. Collective over the whole.

    Raises:
        ValueError: `parts` do not hold each rank once.
        CommunicationError: a peer did not join in time.
    """
    own, index = own_part(parts, whole.rank, whole.size)
    if all(len(part) == 1 for part in parts):
        return LocalCommunicator(whole.timeout_s)
    part = GlooPart(whole, name, own, index)
    ranks = dist.get_process_group_ranks(parent)
    limit = timedelta(seconds=whole.timeout_s)
    # As in the whole: in the default group all ranks make every group, elsewhere only the members do.
    local = parent is not dist.group.WORLD
    try:
        for purpose in PART_PURPOSES:
            for members in parts:
                mine = whole.rank in members
                if mine or not local:
                    made = dist.new_group(
                        [ranks[m] for m in members], timeout=limit, backend="gloo", use_local_synchronization=local
                    )
                    if mine:
                        part.add(purpose, made)
    except RuntimeError as error:
        raise CommunicationError(
            f"comm: {whole.name} could not set up groups of {len(own)} ranks within {whole.timeout_s:g} s: "
            f"{first_line(error)}"
        ) from error
    return part
