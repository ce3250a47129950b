"""Which gradients count: the source's judgement and the owner's are the same."""

import torch

from nestpipe_kernels.ops.mean_sources import entries_by_row, mean_sources
from nestpipe_kernels.stages.finite import largest, largest_good

MAX = torch.finfo(torch.float32).max


def test_largest_magnitude_of_each_row():
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, -3.0], [-0.0, 0.0], [nan, inf], [5.0, nan], [-inf, 1.0]])
    assert largest(rows)[:2].tolist() == [3.0, 0.0]
    assert largest(rows)[2:4].isnan().all()
    assert largest(rows)[4] == inf
    assert largest(torch.empty(0, 3)).shape == (0,)


def test_a_gradient_counts_up_to_its_share_of_float32():
    for world in (1, 2, 3, 64):
        share = torch.tensor(MAX / (2 * world))
        rows = torch.stack([share, -share, share * 1.001, torch.tensor(float("nan")), -torch.tensor(MAX) * 2])
        assert (largest(rows[:, None]) <= largest_good(world)).tolist() == [True, True, False, False, False]
        countable, entries = torch.ones(5, dtype=torch.bool), entries_by_row(torch.arange(5), 5)
        of_sources = [5] + [0] * (world - 1)
        mean_sources(torch.empty(5, 1), countable, rows[:, None], entries, of_sources, limit=largest_good(world))
        assert countable.tolist() == [True, True, False, False, False]
        assert torch.isfinite(share.repeat(world).sum() * 1.9)


def test_division_by_the_divisor_may_come_before_or_after_the_largest():
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 8, generator=chance) * 10 ** (torch.rand(2000, 1, generator=chance) * 76 - 38)
    for divisor in (3.0, -0.7, 1e-20, 1e30, float("inf"), float("nan")):
        own = torch.tensor(abs(divisor), dtype=torch.float32)
        before, after = largest(rows / float(torch.tensor(divisor))), largest(rows) / own
        assert before.equal(after) or (before.isnan() & after.isnan() | (before == after)).all()
