"""Losses over pairs of samples (in-batch negatives) are named when a batch is split, and keep their meaning if not."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from loop_cases import SAMPLES, alike, close, loss_of, make_batches, torch_loop, train

WARNING = r"every two samples of a batch.*micro-batches only samples of the same one meet.*num_micro_batches=1"


def in_batch(model, batch):
    """Every sample's items are the negatives of the others."""
    scores = model.user(batch["user"]) @ model.item(batch["items"]).t()
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    return loss, scores.diagonal() + model.top[3].bias * 0


def twice_in_batch(model, batch):
    """As contrastive losses do: both towers below one another."""
    towers = torch.cat([model.user(batch["user"]), model.item(batch["items"])])
    return torch.logsumexp(towers @ towers.t(), 1).mean(), None


def differences(model, batch):
    """A pairwise loss by broadcasting."""
    out = model(batch)
    return torch.nn.functional.softplus(out[:, None] - out[None, :]).mean(), out


def steps(loss, number, size=SAMPLES):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train("nested", loss=loss, num_micro_batches=number, batches=make_batches(1, size=size))
    return [str(one.message) for one in found if "samples of a batch" in str(one.message)]


@pytest.mark.parametrize(
    ("loss", "size", "place"),
    [
        (in_batch, 2, r"mm in in_batch, test_pairs_of_samples.py:\d+"),
        (in_batch, 9, "mm in in_batch"),
        (twice_in_batch, 9, "mm in twice_in_batch"),
        (differences, SAMPLES, "sub in differences"),
    ],
)
def test_they_are_named_with_the_remedy(loss, size, place):
    (said,) = steps(loss, 2, size)
    assert re.search(WARNING, said) and re.search(place, said), said


def test_other_losses_are_not():
    def masked(model, batch):
        loss, out = loss_of(model, batch)
        hidden = torch.cat([model.user(batch["user"]), model.item(batch["items"])], 1)
        scores = hidden[:, :, None] * hidden[:, None, :]  # [B, 8, 8], and B is 8
        return loss + scores.mean(), out

    assert steps(masked, 2) == steps(in_batch, 1) == []


def test_one_micro_batch_keeps_their_meaning():
    assert close(alike(loss=in_batch, num_micro_batches=1), torch_loop(loss=in_batch))
