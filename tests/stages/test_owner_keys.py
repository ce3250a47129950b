"""The owner's side of a batch: what two lanes may ask for at once is never seen half done."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nestpipe_kernels.comm.router import Transfer
from nestpipe_kernels.stages.state import OwnerKeys


class Interrupted(list):
    """Transfers between which another lane asks for the same."""

    owner: OwnerKeys
    asked = False
    seen: list[list[int]]

    def __iter__(self) -> Iterator[Transfer]:
        for k, move in enumerate(super().__iter__()):
            if k and not self.asked:
                self.asked = True
                self.seen.append(self.owner.last_use().tolist())
            yield move


def test_the_last_use_of_rows_is_known_whole_or_not_at_all() -> None:
    moves = Interrupted(Transfer(torch.tensor(positions), [len(positions)]) for positions in ([0, 1], [2], [3]))
    owner = OwnerKeys(
        keys=torch.tensor([7, 8, 9]),
        tables=torch.zeros(3, dtype=torch.int32),
        counts=torch.ones(3, dtype=torch.int64),
        slot=torch.tensor([0, 1, 2, 0]),
        per_peer=[4],
        rows=[],
        grads=moves,
    )
    moves.owner, moves.seen = owner, []
    assert owner.last_use().tolist() == [2, 0, 1]
    assert moves.seen == [[2, 0, 1]]
