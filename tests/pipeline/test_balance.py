"""Micro-batches of as many tokens: where a batch is cut, and that every schedule computes the same with it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_model import EXACT, Recommender, make_batch, make_pipeline, run_all, run_rank

from nestpipe_kernels.data.sequences import Interactions, SequenceDataset
from nestpipe_kernels.stages.micro_batches import balanced_sizes, even_sizes

BATCHES = [make_batch(t, size=13) for t in range(4)]


def lengths_of(batch):
    """Keys of each sample."""
    return batch.sparse.lengths().view(-1, batch.sparse.stride()).sum(0)


@pytest.mark.parametrize(
    "tokens, number, share, sizes",
    [
        ([1] * 64, 8, 1.0, [8] * 8),
        ([7, 1, 1, 1, 1, 1, 1, 1], 2, 1.0, [1, 7]),
        ([1, 1, 1, 1, 1, 1, 1, 7], 2, 1.0, [7, 1]),
        ([100, 1, 1, 1], 4, 1.0, [1, 1, 1, 1]),
        ([1, 1, 1, 100], 4, 1.0, [1, 1, 1, 1]),
        ([4, 4, 4, 4], 1, 1.0, [4]),
        ([0, 0, 0, 0, 0], 2, 1.0, [3, 2]),
        ([0, 0, 9, 0, 0, 9], 2, 1.0, [3, 3]),
        ([5, 1], 3, 1.0, [1, 1, 0]),
        ([], 3, 1.0, [0, 0, 0]),
        ([2] * 32, 4, 0.5, [4, 12, 12, 4]),
        ([3, 3, 1, 1, 1, 1, 1, 1], 2, 1.0, [2, 6]),
    ],
)
def test_parts_of_as_many_tokens(tokens, number, share, sizes):
    assert balanced_sizes(torch.tensor(tokens, dtype=torch.int64), number, share) == sizes


@given(
    st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9), st.sampled_from((1.0, 0.5, 0.1))
)  # fmt: skip
def test_every_sample_is_in_one_part_and_no_part_is_off_by_more_than_two_halves_of_a_sample(tokens, number, share):
    sizes = balanced_sizes(torch.tensor(tokens, dtype=torch.int64), number, share)
    assert (len(sizes), sum(sizes)) == (number, len(tokens))
    if len(tokens) < number or not sum(tokens):
        assert sizes == even_sizes(len(tokens), number, share)
        return
    assert min(sizes) >= 1
    if share == 1.0 and max(tokens) * number * 2 <= sum(tokens):  # nobody had to give a sample away
        sums = [int(part.sum()) for part in torch.split(torch.tensor(tokens), sizes)]
        assert all(abs(got - sum(tokens) / number) <= max(tokens) + 1 for got in sums)


@pytest.mark.parametrize("balance", ["keys", lengths_of], ids=["keys", "function"])
def test_balanced_micro_batches_are_the_same_in_every_schedule_and_near_even_ones(balance):
    def losses(schedule, **settings):
        runs = run_all(2, schedule, lambda r: BATCHES, num_micro_batches=3, **settings)
        assert not any(run.errors for run in runs)
        return [(run.losses, run.state.rows, run.state.dense) for run in runs]

    expected = losses("sequential", balance=balance)
    for schedule in EXACT:
        assert losses(schedule, balance=balance) == expected
    for one, other in zip(losses("sequential"), expected):
        assert torch.allclose(torch.tensor(one[0]), torch.tensor(other[0]), rtol=1e-4)


@pytest.mark.parametrize("clustering", ["key", "none"])
def test_keys_counts_those_of_all_lookups(monkeypatch, clustering):
    from nestpipe_kernels.stages import routing

    seen = []
    original = routing.micro_batches

    def note(rank, batch):
        made = original(rank, batch)
        seen.append((batch.raw, [m.indices for m in made]))
        return made

    monkeypatch.setattr(routing, "micro_batches", note)
    for balance in ("samples", "keys", lengths_of):
        run_rank(make_pipeline(Recommender(), num_micro_batches=3, balance=balance, clustering=clustering), BATCHES)
    samples, keys, function = (seen[k : k + len(BATCHES)] for k in range(0, len(seen), len(BATCHES)))
    assert [[len(part) for part in parts] for _, parts in samples] == [[5, 4, 4]] * len(BATCHES)
    for (batch, parts), (_, told), (_, even) in zip(keys, function, samples):
        assert [part.tolist() for part in parts] == [part.tolist() for part in told]
        assert torch.cat(parts).sort().values.tolist() == list(range(13))
        lengths = lengths_of(batch)
        spread = [max(s) - min(s) for s in ([int(lengths[p].sum()) for p in ps] for ps in (parts, even))]
        assert spread[0] <= max(spread[1], int(lengths.max()))


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        (lambda batch: [1] * 13, "expected the tokens of every sample, integers of shape [13], got list"),
        (lambda batch: torch.ones(13), "integers of shape [13], got torch.float32 [13]"),
        (lambda batch: torch.ones(12, dtype=torch.int64), "integers of shape [13], got torch.int64 [12]"),
        (lambda batch: torch.arange(13) - 1, "tokens must be >= 0, got -1 for sample 0"),
    ],
)
def test_tokens_that_are_none_are_one_error_before_anything_changed(balance, message):
    model = Recommender()
    with make_pipeline(model, num_micro_batches=3, balance=balance) as pipeline:
        with pytest.raises(ValueError, match="balance") as error:
            pipeline.progress(iter(BATCHES))
        assert message in str(error.value)
        assert sum(len(store) for store in model.ebc.row_stores()) == 0


def test_items_of_sequences():
    interactions = Interactions(
        torch.tensor([0] * 9 + [1] * 4), torch.arange(13) % 5, torch.arange(13, dtype=torch.float64)
    )
    data = SequenceDataset("some", interactions, max_length=4, num_candidates=2)
    batch = data.batch(torch.arange(len(data)))
    assert batch.tokens().tolist() == batch.times.lengths().tolist() == [4, 3, 2]
