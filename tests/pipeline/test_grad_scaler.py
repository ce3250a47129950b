"""GradScaler: rows and dense parameters see its scale alike; a batch with a gradient that overflows changes nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from loop_cases import Recommender, close, loss_of, make_batches, same, state_of, train
from small_model import BadGradient

import nestpipe_kernels as nk
from nestpipe_kernels.testing.threads import run_ranks_as_threads

SCHEDULES = ("sequential", "nested", "nested+early")


def make_scaler(scale=2.0**10, **settings):
    return torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 2, **settings})


class Overflowing:
    """The usual loss; from batches whose labels are all 2 a gradient that is not finite: of rows, or of dense ones."""

    def __init__(self, what):
        self.what = what

    def __call__(self, model, batch):
        bad = bool((batch["label"] == 2).all())
        pooled = torch.cat([model.user(batch["user"]), model.item(batch["items"])], 1)
        pooled = BadGradient.apply(pooled, bad and self.what == "rows")
        bias = BadGradient.apply(model.top[0].bias, bad and self.what == "dense")
        out = model.top[3](torch.relu(pooled @ model.top[0].weight.t() + bias)).squeeze(1)
        return ((out - batch["label"]) ** 2).mean(), out


def with_bad(*places, seed=0, count=5):
    batches = make_batches(count, seed)
    for place in places:
        batches[place]["label"] = torch.full_like(batches[place]["label"], 2.0)
    return batches


def test_a_scale_that_is_a_power_of_two_changes_no_bit():
    plain = train("sequential")
    for schedule in SCHEDULES:
        scaler = make_scaler()
        assert same(train(schedule, scaler=scaler), plain)
        assert scaler.get_scale() == 2.0**12  # 5 batches, growing after every 2nd
    assert same(train("nested", scaler=make_scaler(enabled=False)), plain)
    assert close(train("nested", scaler=make_scaler(1000.0)), plain)


def note(said, scaler, pipe, step, prepared):
    said.append((step.index, step.skipped, scaler.get_scale()))


@pytest.mark.parametrize("what, policy", [("rows", "skip_row"), ("dense", "raise")])
def test_a_batch_that_overflows_changes_nothing(what, policy):
    batches = with_bad(1, 4)
    good = [batches[k] for k in (0, 2, 3)]
    expected = train("sequential", batches=good, loss=Overflowing(what))
    for schedule in SCHEDULES:
        scaler, said = make_scaler(), []
        run = train(
            schedule,
            batches=batches,
            loss=Overflowing(what),
            scaler=scaler,
            nan_policy=policy,
            each=functools.partial(note, said, scaler),
        )
        losses = run.pop("losses")
        assert torch.equal(losses[[0, 2, 3]], expected["losses"])
        assert same({**run, "losses": expected["losses"]}, expected), schedule
        assert [index for index, _, _ in said] == [0, 1, 1, 2, 3]
        assert [bool(text) for _, text, _ in said] == [False, True, False, False, True]
        assert ("row gradients" if what == "rows" else "dense gradients") in said[1][1]
        assert [scale for _, _, scale in said] == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**9]


def test_as_in_plain_pytorch_where_everything_overflows():
    """A float16 model whose scale is too large at first: the same batches are left out, the scale ends the same."""

    def half(model, batch):
        with torch.autocast("cpu", torch.float16):
            out = model(batch).float()
        return ((out - batch["label"]) ** 2).mean(), out

    def loop():
        model, scaler = Recommender(), make_scaler(2.0**20)
        dense = {"params": list(model.top.parameters()), "lr": 0.1, "momentum": 0.9}
        optimizer = torch.optim.SGD([dense, {"params": [model.user.weight, model.item.weight], "lr": 0.2}])
        for batch in make_batches(8):
            optimizer.zero_grad()
            scaler.scale(half(model, batch)[0]).backward()
            scaler.step(optimizer)
            scaler.update()
        return state_of(model), scaler.get_scale()

    expected, scale = loop()
    scaler = make_scaler(2.0**20)
    run = train("nested", batches=make_batches(8), loss=half, scaler=scaler, num_micro_batches=1)
    del run["losses"], expected["losses"]
    assert scaler.get_scale() == scale < 2.0**20
    assert close(run, expected, 1e-5)  # the same float16 steps; sums of rows in another order


@pytest.mark.parametrize("schedule", ["sequential", "nested", "nested+early"])
def test_all_ranks_leave_out_what_overflows_on_one(schedule):
    def run(bad):
        scalers = {}

        def on_rank(rank, communicator):
            scalers[rank] = make_scaler()
            batches = with_bad(*((2,) if bad and rank == 1 else ()), seed=rank)
            if not bad:
                del batches[2]
            state = train(
                schedule, batches=batches, loss=Overflowing("rows"), scaler=scalers[rank], communicator=communicator
            )
            del state["losses"]
            return {**state, "losses": torch.zeros(0)}

        return run_ranks_as_threads(2, on_rank), [scalers[rank].get_scale() for rank in range(2)]

    (ours, scales), (expected, _) = run(True), run(False)
    assert same(ours[0], ours[1]) and same(ours[0], expected[0])
    assert scales == [2.0**11, 2.0**11]  # 2 good batches, the bad one, 2 good ones


def test_the_hooks_of_the_dense_optimizer_see_gradients_without_the_scale():
    norms = []

    def clip(optimizer, args, kwargs):
        norms.append(float(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3)))

    assert same(train("nested", scaler=make_scaler(), before_step=clip), train("nested", before_step=clip))
    assert norms[:5] == norms[5:]


# -------------------------------------------------------------------------------------------------------- refused


def converted():
    model = Recommender()
    nk.convert(model, nk.optim.SGD(lr=0.2))
    return model


def test_a_scaler_without_a_pipeline_is_refused():
    model, scaler = converted(), make_scaler()
    before = state_of(model)
    batch = make_batches(1)[0]
    message = r"multiplied by a GradScaler.*nothing was updated.*NestedPipeline\(.*grad_scaler=scaler\)"
    for scaled in (
        lambda loss: scaler.scale(loss),
        lambda loss: scaler.scale(loss) / 2,
        lambda loss: scaler.scale([loss, loss * 2])[0],
    ):
        with pytest.raises(RuntimeError, match=message):
            scaled(loss_of(model, batch)[0]).backward()
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.backward([scaler.scale(loss_of(model, batch)[0])])
    assert same(state_of(model), before)
    make_scaler(enabled=False).scale(loss_of(model, batch)[0]).backward()
    assert not same(state_of(model), before)


def test_products_that_are_no_scalers_pass():
    model, scaler = converted(), make_scaler()
    scaler.scale(torch.zeros(()))  # another model's
    for batch in make_batches(3):
        loss = loss_of(model, batch)[0]
        (0.5 * loss).backward()
        loss = loss_of(model, batch)[0]
        (loss * torch.tensor(2.0) / 3).backward()
        (loss_of(model, batch)[0] + 0.1 * loss_of(model, batch)[0]).backward()


def test_a_loss_that_is_scaled_already_is_refused():
    scaler = make_scaler()

    def scaled(model, batch):
        loss, out = loss_of(model, batch)
        return scaler.scale(loss), out

    with pytest.raises(ValueError, match=r"the loss has been multiplied by a GradScaler.*grad_scaler=scaler"):
        train("nested", loss=scaled)


def test_a_backward_inside_the_model_is_refused():
    def own(model, batch):
        loss, out = loss_of(model, batch)
        if torch.is_grad_enabled() and model.user.lookup_context is not None and not own.probing:
            loss.backward(retain_graph=True)
        own.probing = max(0, own.probing - 1)
        return loss, out

    own.probing = 2
    with pytest.raises(ValueError, match=r"ran a backward of its own.*grad_scaler"):
        train("nested", loss=own, scaler=make_scaler())


def test_what_a_scaler_must_be():
    with pytest.raises(TypeError, match=r"grad_scaler must be a GradScaler.*got float without scale\(\)"):
        train("nested", scaler=2.0)
    with pytest.raises(TypeError, match=r"grad_scaler must be a GradScaler, got the class GradScaler; make one"):
        train("nested", scaler=torch.amp.GradScaler)
    with pytest.raises(ValueError, match=r"the scale of grad_scaler is 0.0: too many batches"):
        train("nested", scaler=make_scaler(0.0))


SETTINGS = {
    "rows for every micro-batch": {"row_transfer": "per_micro_batch"},
    "clustered, three parts": {"clustering": "key", "num_micro_batches": 3},
    "smaller edges": {"edge_share": 0.5, "num_micro_batches": 3},
    "sums": {"loss_weighting": "sum"},
}


def weighted(model, batch):
    """A mean over another number than that of samples."""
    loss, out = loss_of(model, batch)
    return loss, out, float((batch["user"] + 1).sum())


@pytest.mark.parametrize("what", [*(pytest.param(name, marks=pytest.mark.soak) for name in SETTINGS), "weights"])
def test_with_every_setting_a_power_of_two_changes_no_bit_and_an_overflow_nothing(what):
    settings = {"settings": {"item": {"max_grad_norm": 0.05}}, **SETTINGS.get(what, {})}
    if what == "weights":
        settings["loss"] = weighted

    def on_rank(scaled, rank, communicator):
        batches = make_batches(4, rank)
        if scaled and rank:
            batches[1]["label"] = torch.full_like(batches[1]["label"], float("inf"))
        if not scaled:
            del batches[1]
        scaler = make_scaler() if scaled else None
        run = train("nested", batches=batches, scaler=scaler, communicator=communicator, **settings)
        return {**run, "losses": run["losses"][torch.isfinite(run["losses"])][:1]}

    ours, expected = (run_ranks_as_threads(2, functools.partial(on_rank, scaled)) for scaled in (True, False))
    assert same(ours[0], expected[0]) and same(ours[1], expected[1])


def test_a_rank_without_samples_keeps_the_scale_of_the_others():
    def on_rank(rank, communicator):
        scaler = make_scaler()
        batches = make_batches(4 - 3 * rank, rank)
        train("nested", batches=batches, scaler=scaler, communicator=communicator)
        return scaler.get_scale()

    assert run_ranks_as_threads(2, on_rank) == [2.0**12, 2.0**12]
