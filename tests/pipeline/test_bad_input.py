"""What a converted model cannot use: one message that says where it is and what to do; nothing changes."""

from __future__ import annotations

import pytest
import torch
from loop_cases import SIZE, Recommender, dense_of, loss_of, make_batches, same, state_of
from small_model import make_config

import nestpipe_kernels as nk
from nestpipe_kernels.errors import CaptureError


def outside(batch):
    batch["items"][5, 1] = SIZE
    return batch


def drawn(model, batch):
    noise = torch.randint(SIZE, batch["user"].shape)
    return loss_of(model, {**batch, "user": noise})


def learned(model, batch):
    best = model.top[0].weight.abs().sum(1).argmax().expand(len(batch["user"])) % SIZE
    return loss_of(model, {**batch, "user": best})


CASES = {
    "an id outside a fixed vocabulary": (
        loss_of,
        outside,
        IndexError,
        r"nn.EmbeddingBag: table 'item': id 15 at position .* outside \[0, 15\); raise num_embeddings",
    ),
    "a part that cannot be split": (
        loss_of,
        lambda batch: {**batch, "negatives": torch.zeros(3)},
        ValueError,
        r"batch\['negatives'\] is a tensor \[3\].* must be the batch size, 8; pass split_batch=",
    ),
    "ids that are random numbers": (drawn, dict, CaptureError, r"module 'user' .*random numbers .*sparse_inputs="),
    "ids that depend on parameters": (
        learned,
        dict,
        CaptureError,
        r"module 'user' .*parameter 'top.0.weight'.*sparse_inputs=",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_with_the_remedy_and_nothing_changes(name):
    loss, spoil, error, message = CASES[name]
    model = Recommender()
    nk.convert(model, nk.optim.SGD(lr=0.1))
    before = state_of(model)
    good = make_batches(2)
    with nk.NestedPipeline(model, dense_of(model), loss, make_config("nested")) as pipe:
        with pytest.raises(error, match=message):
            pipe.progress(iter([spoil(make_batches(1, seed=4)[0])]))
        assert same(state_of(model), before) and pipe.step_count == 0
        if loss is loss_of:
            assert [step.index for step in pipe.run(good)] == [0, 1]
