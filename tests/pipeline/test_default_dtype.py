"""Rows are float32 whatever torch's default dtype is; the same bits come out."""

import pytest
import torch
from small_model import Recommender, make_batch, make_pipeline, make_tables, state_of

from nestpipe_kernels import optim
from nestpipe_kernels.types import PoolingType

BATCHES = [make_batch(t) for t in range(3)]


def train(model, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with make_pipeline(model) as pipeline:
            losses = [step.loss.item() for step in pipeline.run(BATCHES)]
            return losses, state_of(pipeline)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX])
def test_the_default_dtype_changes_nothing(dtype, pooling):
    assert train(Recommender(tables=make_tables(pooling=pooling)), dtype) == train(
        Recommender(tables=make_tables(pooling=pooling)), torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing_without_a_pipeline(dtype):
    def rows(default):
        model = Recommender(optimizer=optim.Adagrad(lr=0.2))
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            for batch in BATCHES:
                model(batch)[0].backward()
            return model.ebc.store("item").find(torch.arange(7))[0]
        finally:
            torch.set_default_dtype(before)

    found = rows(dtype)
    assert found.dtype == torch.float32
    assert torch.equal(found, rows(torch.float32))
