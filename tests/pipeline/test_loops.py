"""What training loops do beside the steps: each in every order of stages alike, to the bit, and as in plain PyTorch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch._dynamo.testing
from loop_cases import (
    ROWS_LR,
    SAMPLES,
    Recommender,
    alike,
    close,
    loss_of,
    make_batches,
    same,
    state_of,
    torch_loop,
    train,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import nestpipe_kernels as nk
from nestpipe_kernels.data import accumulate

OVERLAPPED = ("nested", "nested+early")


def test_the_plain_loop():
    assert close(alike(OVERLAPPED), torch_loop())


class Array:
    """What a pipeline sees of an array of CuPy: it speaks DLPack, and tells nothing else."""

    __slots__ = ("__dlpack__", "__dlpack_device__")

    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


def test_arrays_in_batches_are_tensors_to_the_model():
    batches = [{name: Array(tensor) for name, tensor in batch.items()} for batch in make_batches()]
    assert same(alike(OVERLAPPED, batches=batches), alike())


# ------------------------------------------------------------------------------------------- precision, compilation


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_dense_part(backend):
    def compiled(model):
        torch.compiler.reset()
        model.top = torch.compile(model.top, backend=backend)

    assert close(alike(prepare=compiled), torch_loop())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_model_with_its_lookups(backend):
    """The pipeline is given the compiled model, and answers the lookups inside of its one graph."""
    graphs = []

    def compiled(model):
        torch.compiler.reset()
        model.top[2] = torch.nn.Identity()  # torch traces a Dropout twice, to learn that its rate is a constant
        graphs.append(torch._dynamo.testing.CompileCounterWithBackend(backend))
        return torch.compile(model, backend=graphs[-1], fullgraph=True, dynamic=True)

    assert close(alike(OVERLAPPED, wrap=compiled), torch_loop())
    assert all(counter.frame_count == 1 for counter in graphs)


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch).float()
    return ((out - batch["label"]) ** 2).mean(), out


def test_autocast():
    alike(loss=autocast_loss)
    whole = alike(loss=autocast_loss, num_micro_batches=1)
    assert close(whole, torch_loop(loss=autocast_loss))
    assert not close(whole, torch_loop())


def test_autocast_around_the_loop_sees_every_update():
    """Autocast keeps 16-bit copies of parameters until it ends; a pipeline's steps are inside."""

    def loss(model, batch):
        out = model(batch).float()
        return ((out - batch["label"]) ** 2).mean(), out

    with torch.autocast("cpu", torch.bfloat16):
        around = alike(loss=loss)
    assert same(around, train("sequential", loss=autocast_loss))


# ------------------------------------------------------------------------------------------------ clipping, rates


def test_dense_clipping():
    norms = []

    def clip(optimizer, args=(), kwargs=None):
        norms.append(float(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3)))

    run = alike(before_step=clip)
    assert norms[:5] == norms[5:] and max(norms) > 0.3
    assert close(run, torch_loop(step=lambda model, rows, dense: clip(dense)))


def test_rows_are_clipped_one_by_one():
    limits = {"user": 0.02, "item": 0.05}
    clipped, left = [], []

    def clip(model, rows, dense):
        for name, limit in limits.items():
            weight = getattr(model, name).weight
            grad = weight.grad.coalesce()
            norms = grad.values().norm(dim=1, keepdim=True)
            clipped.append(int((norms > limit).sum()))
            left.append(len(norms) - clipped[-1])
            values = grad.values() * (limit / norms).clamp(max=1)
            weight.grad = torch.sparse_coo_tensor(grad.indices(), values, grad.shape, check_invariants=True)

    plain = torch_loop(step=clip)
    assert sum(clipped[::2]) and sum(clipped[1::2]) and sum(left[::2]) and sum(left[1::2])
    settings = {name: {"max_grad_norm": limit} for name, limit in limits.items()}
    expected = alike(OVERLAPPED, settings=settings)
    assert close(expected, plain)
    assert same(train("nested", settings=settings, num_micro_batches=2, row_transfer="per_micro_batch"), expected)


def test_rows_are_clipped_without_a_pipeline():
    def loop(settings):
        model = loop_model(settings)
        for batch in make_batches():
            loss_of(model, batch)[0].backward()
        return state_of(model)

    def loop_model(settings):
        model = Recommender()
        nk.convert(model, nk.optim.SGD(lr=ROWS_LR), settings=settings)
        return model

    free, limited = loop(None), loop({"item": {"max_grad_norm": 1e-3}})
    start = state_of(loop_model(None))["item.weight"]
    moved = (limited["item.weight"] - start).norm(dim=1)
    assert 0 < moved.max() <= 5 * ROWS_LR * 1e-3 * 1.0001 < (free["item.weight"] - start).norm(dim=1).max()


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, "1", True])
def test_what_max_grad_norm_may_be(norm):
    with pytest.raises(ValueError, match="table 'a': max_grad_norm must be finite and > 0, or None, got"):
        nk.EmbeddingBagConfig(10, 4, "a", max_grad_norm=norm)


def warm_up(step):
    return min(1.0, (step + 1) / 4)


def test_schedulers_and_warm_up_drive_rows_and_dense_parameters():
    def schedulers(model):
        rates = nk.sparse_optimizer(model)
        return [lr_scheduler.LambdaLR(rates, warm_up), rates]

    def both(pipe, step, prepared):
        prepared[0].step()
        if not hasattr(pipe, "warm_up"):
            pipe.warm_up = lr_scheduler.LambdaLR(pipe.rank.dense_optimizer, lambda n: warm_up(n + 1))
        else:
            pipe.warm_up.step()

    def torch_both(model, rows, dense):
        both_of = model.__dict__.setdefault("both", [])
        if not both_of:
            both_of.append(lr_scheduler.LambdaLR(dense, lambda n: warm_up(n + 1)))
        else:
            both_of[0].step()
        model.rows_warm_up.step()

    def sparse(model):
        rows = torch.optim.SGD([model.user.weight, model.item.weight], lr=ROWS_LR)
        model.rows_warm_up = lr_scheduler.LambdaLR(rows, warm_up)
        return rows

    run = alike(prepare=schedulers, each=both)
    assert close(run, torch_loop(sparse=sparse, after=torch_both))
    assert not close(run, torch_loop())


def test_one_scheduler_reaches_every_table():
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(5, 2), "b": torch.nn.Embedding(5, 2)})
    nk.convert(model, nk.optim.SGD(lr=0.5), settings={"b": {"optimizer": nk.optim.Adam(lr=0.1)}})
    rates = nk.sparse_optimizer(model)
    assert [group["lr"] for group in rates.param_groups] == [0.5, 0.1]
    scheduler = lr_scheduler.StepLR(rates, step_size=1, gamma=0.5)
    scheduler.step()
    assert [float(model[name].learning_rates(0)[0]) for name in "ab"] == pytest.approx([0.25, 0.05])
    state = copy.deepcopy(rates.state_dict())
    model["a"].sparse_optimizer.param_groups[0]["lr"] = 3.0
    assert rates.param_groups[0]["lr"] == 3.0
    rates.load_state_dict(state)
    assert model["a"].sparse_optimizer.param_groups[0]["lr"] == 0.25
    rates.step()
    rates.zero_grad()
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; keep its state_dict\(\)"):
        copy.deepcopy(rates)
    with pytest.raises(ValueError, match="none can be added"):
        rates.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"no embedding module with an optimizer; call nk.convert"):
        nk.sparse_optimizer(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        nk.sparse_optimizer(3)


def test_settings_of_each_table():
    settings = {"item": {"optimizer": nk.optim.Adam(lr=0.05)}, "user": {"lr_scale": 0.5}}

    class Both:
        def __init__(self, model):
            self.user = torch.optim.SGD([model.user.weight], lr=ROWS_LR / 2)
            self.item = torch.optim.SparseAdam([model.item.weight], lr=0.05)

        def zero_grad(self):
            self.user.zero_grad()
            self.item.zero_grad()

        def step(self):
            self.user.step()
            self.item.step()

    assert close(alike(settings=settings), torch_loop(sparse=Both), 2e-5)  # Adam divides by roots of small numbers


# -------------------------------------------------------------------------------------- averages, evaluation, losses


def test_moving_average_of_the_dense_part_and_evaluation_in_the_middle_of_an_epoch():
    """Evaluation, with the averaged layers in place of the trained ones, leaves training as it is."""
    held_out = make_batches(2, seed=9)
    seen = []

    def average(model):
        return AveragedModel(model.top, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def each(pipe, step, averaged):
        model = pipe.model
        averaged.update_parameters(model.top)
        if step.index % 2:
            trained, model.top = model.top, averaged.module
            model.eval()
            outputs = [other.output for other in pipe.run(held_out)]
            model.train()
            model.top = trained
            seen.append((torch.cat(outputs), [p.detach().clone() for p in averaged.module.parameters()]))

    run = alike(prepare=average, each=each)
    half = len(seen) // 2
    assert half == 2 and same(run, train("nested"))
    for (one, ours), (other, theirs) in zip(seen[:half], seen[half:]):
        assert torch.equal(one, other) and all(map(torch.equal, ours, theirs))
    plain = []

    def torch_each(model, rows, dense):
        average_of = model.__dict__.setdefault("average", [])
        if not average_of:
            average_of.append(average(model))
        average_of[0].update_parameters(model.top)
        plain.append([p.detach().clone() for p in average_of[0].module.parameters()])

    torch_loop(after=torch_each)
    for (_, ours), theirs in zip(seen[:half], plain[1::2]):
        assert all(torch.allclose(a, b, rtol=0, atol=2e-6) for a, b in zip(ours, theirs))


def test_an_average_of_the_tables_is_refused_by_name():
    model = torch.nn.ModuleDict({"item": torch.nn.Embedding(5, 2)})
    nk.convert(model, nk.optim.SGD(lr=0.1))
    with pytest.raises(TypeError, match=r"table 'item' cannot be deep-copied .*moving average.*dense modules"):
        AveragedModel(model)


def test_several_losses():
    def two(model, batch):
        out = model(batch)
        losses = torch.stack([((out - batch["label"]) ** 2).mean(), 0.1 * out.abs().mean()])
        return losses, out

    def added(model, batch):
        losses, out = two(model, batch)
        return losses.sum(), out

    assert close(alike(loss=two), torch_loop(loss=added))


def test_activation_checkpointing():
    def loss(model, batch):
        pooled = torch.cat([model.user(batch["user"]), model.item(batch["items"])], 1)
        out = checkpoint(model.top, pooled, use_reentrant=False).squeeze(1)
        return ((out - batch["label"]) ** 2).mean(), out

    assert same(alike(loss=loss, dropout=0.0), train("nested"))
    alike(loss=loss, dropout=0.5)  # the same units are dropped again


# ------------------------------------------------------------------------------------------------------------ data


def test_batches_of_a_window_are_accumulated():
    batches = make_batches(7)

    def windows():
        for start in range(0, 7, 3):
            part = batches[start : start + 3]
            yield {key: torch.cat([batch[key] for batch in part]) for key in part[0]}

    def accumulating(model, window):
        """What a loop does: a backward for each batch, the last one here."""
        parts = [
            {key: value[k : k + SAMPLES] for key, value in window.items()} for k in range(0, len(window["user"]), 8)
        ]
        for part in parts[:-1]:
            (loss_of(model, part)[0] / len(parts)).backward()
        last, out = loss_of(model, parts[-1])
        return last / len(parts), out

    run = alike(batches=accumulate(batches, 3), num_micro_batches=3)
    plain = torch_loop(loss=accumulating, batches=list(windows()))
    del run["losses"], plain["losses"]
    assert close(run, plain)


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, k):
        noise = torch.rand(())
        return {"user": torch.tensor(k % 15), "items": torch.tensor([k % 4, k % 5, k % 7]), "label": noise}


@pytest.mark.parametrize("workers", [0, 1])
def test_seeds_and_loader_workers(workers):
    """Dropout, shuffling and noise that workers draw: the same seed gives the same bits, in any schedule."""

    def run(schedule, seed):
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(
            Numbered(), batch_size=8, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )

        def batches():
            torch.manual_seed(seed)
            for _ in range(2):
                yield from loader

        return train(schedule, batches=batches(), dropout=0.5)

    expected = run("sequential", 1)
    assert same(run("nested", 1), expected)
    if not workers:
        assert not same(run("nested", 2), expected)
