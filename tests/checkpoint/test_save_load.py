"""save and load of whole trainings: all parts come back, what does not fit is an error before anything has changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from noisy_training import Noisy, Run, data_loader, seed_all, start, tables
from torch import nn

import nestpipe_kernels as nk
from nestpipe_kernels import checkpoint, optim
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.errors import CheckpointError, RemoteRankError
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import UNBOUNDED


def trained(steps: int = 3, **settings: Any) -> Run:
    seed_all(5)
    run = start(**settings)
    for number, _ in enumerate(run.pipeline.run(data_loader()), 1):
        if number == steps:
            break
    return run


def save(path: Path, run: Run, **settings: Any) -> None:
    checkpoint.save(path, model=run.model, pipeline=run.pipeline, **settings)


def load(path: Path, run: Run, **settings: Any) -> checkpoint.LoadReport:
    return checkpoint.load(path, model=run.model, pipeline=run.pipeline, **settings)


def refused(path: Path, run: Run, message: str, **settings: Any) -> None:
    """Loading fails with this message and changes nothing."""
    before = run.state()
    with pytest.raises(CheckpointError, match=message):
        load(path, run, **settings)
    assert run.state() == before
    run.pipeline.close()


def test_fault_43_rows_states_and_dense_come_back_and_the_report_says_so(tmp_path):
    run = trained()
    save(tmp_path, run)
    state = run.state()
    run.pipeline.close()
    seed_all(9)
    other = start()
    report = load(tmp_path, other)
    assert other.state() == state
    rows = {name: len(run.model.ebc.store(name)) for name in ("user", "item")}
    assert report.tables == rows and all(rows.values())
    names = [name for name, _ in run.model.named_parameters()] + [name for name, _ in run.model.named_buffers()]
    assert report.parameters == names
    assert (report.dense_optimizer, report.optimizer_state, report.generators) == (True, True, True)
    assert (report.step_count, report.saved_world_size) == (3, 1)
    assert report.data == "continues after 3 batches of its epoch (DataLoader, by drawing them again)"
    text = str(report)
    assert f"tables: user ({rows['user']} rows), item" in text and "dense parameters and buffers: 10" in text
    other.pipeline.close()


def test_fault_43_a_checkpoint_without_its_dense_part_is_an_error(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    manifest = Manifest.load(tmp_path)
    dataclasses.replace(manifest, dense=None).save(tmp_path)
    refused(tmp_path, start(), "holds no dense part")
    whole = {**manifest.dense, "parameters": {}} if manifest.dense else {}
    dataclasses.replace(manifest, dense=whole).save(tmp_path)
    refused(tmp_path, start(), r"parameters 'hidden.weight', 'hidden.bias', .* are not in the checkpoint")


def test_fault_43_empty_tables_and_features_never_used(tmp_path):
    run = start(configs=[*tables(), nk.EmbeddingBagConfig(UNBOUNDED, 4, "never", feature_names=["user"])])
    save(tmp_path / "empty", run)
    other = start(configs=[*tables(), nk.EmbeddingBagConfig(UNBOUNDED, 4, "never", feature_names=["user"])])
    assert load(tmp_path / "empty", other).tables == {"user": 0, "item": 0, "never": 0}
    assert other.state() == run.state()
    run.pipeline.close()
    other.pipeline.close()


def test_modules_without_a_pipeline_count_on(tmp_path):
    """Adam's bias correction depends on the step count that the module keeps."""

    def train(model: Noisy, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            torch.manual_seed(number)
            optimizer.zero_grad()
            model((torch.randint(0, 9, (4, 2)), torch.rand(4)))[0].backward()
            optimizer.step()

    def make() -> tuple[Noisy, torch.optim.Optimizer]:
        model = Noisy()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = make()
    train(model, optimizer, 0, 3)
    checkpoint.save(tmp_path, model=model, optimizer=optimizer)
    train(model, optimizer, 3, 6)
    again, fresh = make()
    report = checkpoint.load(tmp_path, model=again, optimizer=fresh)
    assert report.step_count == 3
    train(again, fresh, 3, 6)
    for mine, theirs in zip(model.parameters(), again.parameters()):
        assert torch.equal(mine, theirs)
    keys = torch.arange(9)
    assert torch.equal(model.ebc.store("user").find(keys)[0], again.ebc.store("user").find(keys)[0])


def test_learning_rates_schedulers_and_other_objects(tmp_path):
    def make() -> tuple[Run, dict[str, Any]]:
        run = start()
        steps = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
        rows = torch.optim.lr_scheduler.MultiStepLR(run.model.ebc.sparse_optimizer, [1, 1, 3], 0.1)
        return run, {"dense": steps, "rows": rows, "own": torch.Generator().manual_seed(1)}

    run, extra = make()
    seed_all(5)
    for number, _ in enumerate(run.pipeline.run(data_loader()), 1):
        extra["dense"].step()
        extra["rows"].step()
        torch.rand(1, generator=extra["own"])
        if number == 2:
            break
    run.model.ebc.sparse_optimizer.param_groups[1]["lr_scale"] = 2.0
    save(tmp_path, run, extra=extra)
    other, others = make()
    report = load(tmp_path, other, extra=others)
    assert report.extra == ["dense", "rows", "own"]
    groups = [
        [{k: v for k, v in group.items() if k != "params"} for group in one.model.ebc.sparse_optimizer.param_groups]
        for one in (run, other)
    ]
    assert groups[0] == groups[1] and groups[0][1]["lr_scale"] == 2.0 and groups[0][0]["lr"] < 0.05
    assert extra["dense"].state_dict() == others["dense"].state_dict()
    assert torch.equal(torch.rand(2, generator=extra["own"]), torch.rand(2, generator=others["own"]))
    for one, objects in ((run, extra), (other, others)):
        objects["rows"].step()
        assert one.model.ebc.sparse_optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)
        one.pipeline.close()


def test_state_of_modules_and_buffers(tmp_path):
    class Extra(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value
            self.register_buffer("kept", torch.full((2,), float(value)))
            self.register_buffer("scratch", torch.full((2,), float(value)), persistent=False)

        def get_extra_state(self) -> Any:
            return {"value": self.value}

        def set_extra_state(self, state: Any) -> None:
            self.value = state["value"]

    checkpoint.save(tmp_path, model=nn.Sequential(Extra(3)))
    model = nn.Sequential(Extra(4))
    report = checkpoint.load(tmp_path, model=model)
    assert (model[0].value, model[0].kept.tolist(), model[0].scratch.tolist()) == (3, [3, 3], [4, 4])
    assert report.parameters == ["0.kept"] and report.tables == {}


def test_optimizer_state_keeps_its_data_type(tmp_path):
    def make() -> tuple[nn.Module, Any]:
        model = nn.Linear(3, 1, bias=False).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 3), 1.0 + 2**-20)
        return model, optimizer

    model, optimizer = make()
    checkpoint.save(tmp_path, model=model, optimizer=optimizer)
    other, fresh = make()
    fresh.state.clear()
    checkpoint.load(tmp_path, model=other, optimizer=fresh)
    loaded = fresh.state[other.weight]["momentum_buffer"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, optimizer.state[model.weight]["momentum_buffer"])


def test_without_optimizer_states(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    other = start()
    report = load(tmp_path, other, optimizer_state=False)
    assert (report.optimizer_state, report.dense_optimizer) == (False, False)
    assert not other.optimizer.state
    assert "optimizer states: left out (no dense optimizer)" in str(report)
    keys = run.model.ebc.store("user").keys()
    assert torch.equal(run.model.ebc.store("user").find(keys)[0], other.model.ebc.store("user").find(keys)[0])
    other.pipeline.close()


def test_a_subset_of_tables(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    other = start()
    assert set(load(tmp_path, other, tables=["item"]).tables) == {"item"}
    assert len(other.model.ebc.store("user")) == 0 and len(other.model.ebc.store("item")) > 0
    with pytest.raises(TypeError, match="tables must be a list of names, got the string 'item'"):
        load(tmp_path, other, tables="item")
    refused(tmp_path, other, "tables names 'nope', but the model has the tables 'user', 'item'", tables=["nope"])


def test_the_step_count_goes_on_without_the_pipeline_that_counted(tmp_path):
    """Adam's bias correction depends on it: saved after close(), and loaded before there is a pipeline."""
    run = trained()
    run.pipeline.close()
    checkpoint.save(tmp_path, model=run.model, optimizer=run.optimizer)
    assert Manifest.load(tmp_path).position["step_count"] == 3
    other = start()
    other.pipeline.close()
    report = checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    assert report.step_count == 3
    with nk.NestedPipeline(other.model, other.optimizer) as pipeline:
        assert pipeline.step_count == 3


def test_a_position_that_nothing_continues_from_is_reported(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    report = checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
    assert report.data == "position left out, as there is neither a pipeline nor a loader"


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_a_loop_that_began_before_the_load_does_not_go_on(tmp_path, schedule):
    """Its iterator stands somewhere else. Without a batch drawn ahead nothing else would tell."""
    run = start(schedule=schedule)
    loop = run.pipeline.run(data_loader())
    for _ in range(3):
        next(loop)
    save(tmp_path, run)
    load(tmp_path, run)
    state = run.state()
    with pytest.raises(CheckpointError, match=r"loaded since this loop began.*call run\(loader\) again"):
        next(loop)
    assert run.state() == state
    run.pipeline.close()


def test_a_tree_names_every_tensor_once(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    manifest = Manifest.load(tmp_path)
    manifest.ranks[0]["extra"] = {"many": [{"$tensor": "generators.torch"}] * 1000}
    manifest.save(tmp_path)
    refused(tmp_path, start(), r"ranks\[0\] names the tensor 'generators.torch' twice")


def test_a_counted_position_needs_its_generators(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    manifest = Manifest.load(tmp_path)
    del manifest.ranks[0]["loader"]["before"]
    manifest.save(tmp_path)
    refused(tmp_path, start(), r"ranks\[0\].loader.before is no state of random generators")


def test_added_and_removed_tables(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    more = nk.EmbeddingBagConfig(UNBOUNDED, 4, "third", feature_names=["user"])
    refused(
        tmp_path,
        start(configs=[tables()[0], more]),
        "tables 'third' are not in the checkpoint .*; the checkpoint's tables 'item' are not here",
    )
    other = start(configs=[tables()[0], more])
    report = load(tmp_path, other, strict=False)
    assert (report.missing_tables, report.unexpected_tables) == (["third"], ["item"])
    assert set(report.tables) == {"user"}
    assert "missing tables: third" in str(report) and "unexpected tables: item" in str(report)
    other.pipeline.close()


def test_dense_parts_that_do_not_fit_are_all_named(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    message = (
        r"parameter 'hidden.weight' has shape \[5, 8\] in the model, \[3, 8\] in the checkpoint; parameter "
        r"'hidden.bias' has shape \[5\] .* buffer 'norm.running_mean' has shape \[5\].*nothing was changed"
    )
    refused(tmp_path, start(width=5), message)
    wide = Noisy()
    wide.hidden.to(torch.float64)
    with pytest.raises(CheckpointError, match=r"'hidden.weight' is torch.float64 in the model, torch.float32 in the"):
        checkpoint.load(tmp_path, model=wide, optimizer=torch.optim.AdamW(wide.parameters()))


def test_missing_and_unexpected_parameters(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    model = Noisy()
    del model.out
    model.register_parameter("new", nn.Parameter(torch.ones(1)))
    with pytest.raises(
        CheckpointError, match=r"parameters 'new' are not in .* parameters 'out.bias', 'out.weight' are"
    ):
        checkpoint.load(tmp_path, model=model, optimizer_state=False)
    report = checkpoint.load(tmp_path, model=model, optimizer_state=False, strict=False)
    assert (report.missing_parameters, report.unexpected_parameters) == (["new"], ["out.bias", "out.weight"])


def test_other_optimizers(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    model = Noisy()

    def attempt(optimizer: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path, model=model, optimizer=optimizer)

    parameters = list(model.parameters())
    attempt(
        torch.optim.SGD(parameters), "the dense optimizer is a SGD, the checkpoint has the state of a AdamW; use that"
    )
    attempt(None, r"holds the state of a dense optimizer \(AdamW\), but there is none to load it into")
    attempt(torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}]), "has 2 parameter groups, .* 1")
    attempt(torch.optim.AdamW(parameters[:2]), r"param_groups\[0\] of the dense optimizer has 2 parameters, 6 in")
    attempt(
        torch.optim.AdamW(parameters[::-1]), r"\['params'\]\[0\] of the dense optimizer is 'out.bias', 'hidden.weight'"
    )
    checkpoint.save(tmp_path, model=model)
    attempt(torch.optim.AdamW(parameters), "holds no state of a dense optimizer for this AdamW")
    assert not checkpoint.load(
        tmp_path, model=model, optimizer=torch.optim.AdamW(parameters), strict=False
    ).dense_optimizer


def test_row_optimizers_and_dims_that_do_not_fit(tmp_path):
    run = trained()
    save(tmp_path, run)
    run.pipeline.close()
    configs = tables()
    configs[0].optimizer = optim.SGD(lr=0.1)
    refused(tmp_path, start(configs=configs), r"(?s)user.*adam.*sgd|user.*sgd.*adam")


def test_extra_objects_must_agree(tmp_path):
    run = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    save(tmp_path, run, extra={"a": scheduler})
    run.pipeline.close()
    refused(tmp_path, start(), "the checkpoint's extra objects 'a' are not here")
    refused(tmp_path, start(), "extra objects 'b' are not in the checkpoint", extra={"a": scheduler, "b": scheduler})
    other = start()
    report = load(tmp_path, other, strict=False)
    assert (report.extra, report.unexpected_extra) == ([], ["a"])
    other.pipeline.close()


def test_arguments_of_another_kind(tmp_path):
    run = trained()
    with pytest.raises(TypeError, match=r"checkpoint.save: model must be a torch.nn.Module, got str"):
        checkpoint.save(tmp_path, model="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"checkpoint.load: pipeline must be a NestedPipeline or None, got int"):
        checkpoint.load(tmp_path, model=run.model, pipeline=3)
    with pytest.raises(TypeError, match=r"extra\['a'\] must have state_dict\(\) and load_state_dict\(\), got list"):
        save(tmp_path, run, extra={"a": []})
    with pytest.raises(CheckpointError, match="module 'ebc' belongs to an open pipeline, whose position would be lost"):
        checkpoint.save(tmp_path, model=run.model)
    with pytest.raises(CheckpointError, match="the pipeline trains another model than the one given"):
        checkpoint.save(tmp_path, model=Noisy(), pipeline=run.pipeline)
    with pytest.raises(CheckpointError, match=r"the pipeline's dense optimizer is not the one given \(SGD\)"):
        save(tmp_path, run, optimizer=torch.optim.SGD(run.model.parameters()))
    with pytest.raises(CheckpointError, match="only a loader with state_dict"):
        checkpoint.save(tmp_path, model=nn.Linear(1, 1), loader=[1])
    run.pipeline.close()
    with pytest.raises(RuntimeError, match="this pipeline is closed"):
        save(tmp_path, run)
    assert not (tmp_path / "manifest.json").exists()


def test_state_that_needs_pickle_is_named_and_the_old_checkpoint_stays(tmp_path):
    class Odd:
        def state_dict(self) -> Any:
            return {"x": [{1, 2}]}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    run = trained()
    save(tmp_path, run)
    before = (tmp_path / "manifest.json").read_bytes()
    state = run.state()
    with pytest.raises(CheckpointError, match=r"extra.odd.x\[0\] is a set, which cannot be saved without pickle"):
        save(tmp_path, run, extra={"odd": Odd()})
    assert (tmp_path / "manifest.json").read_bytes() == before and run.state() == state
    assert json.loads(before)["position"]["step_count"] == 3
    run.pipeline.close()


def test_loading_drops_what_was_drawn_before(tmp_path):
    """A pipeline in the middle of another epoch, with a batch in flight, goes back to the checkpoint."""
    seed_all(5)
    run = start()
    losses = []
    for number, step in enumerate(run.pipeline.run(data_loader()), 1):
        losses.append(float(step.loss))
        if number == 2:
            save(tmp_path, run)
    run.pipeline.close()
    other = start()
    for number, _ in enumerate(other.pipeline.run(data_loader()), 1):
        if number == 4:
            break
    load(tmp_path, other)
    assert [float(step.loss) for step in other.pipeline.run(data_loader())] == losses[2:]
    other.pipeline.close()


def test_saving_again_before_the_first_step_after_a_load(tmp_path):
    run = trained()
    save(tmp_path / "a", run)
    run.pipeline.close()
    seed_all(70)
    second = start()
    load(tmp_path / "a", second)
    save(tmp_path / "b", second)
    second.pipeline.close()
    results = []
    for name in ("a", "b"):
        seed_all(71)
        third = start()
        load(tmp_path / name, third)
        results.append(([float(step.loss) for step in third.pipeline.run(data_loader())], third.state()))
        third.pipeline.close()
    assert results[0] == results[1] and len(results[0][0]) == 3


def test_two_modules_with_tables_of_one_name(tmp_path):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nk.EmbeddingBagCollection(tables(), optimizer=optim.SGD(lr=0.1))
            self.b = nk.EmbeddingBagCollection(tables()[:1], optimizer=optim.SGD(lr=0.1))

    model = Two()
    model.a.store("user").find_or_insert(torch.tensor([1, 2]))
    model.b.store("user").find_or_insert(torch.tensor([3]))
    checkpoint.save(tmp_path, model=model)
    other = Two()
    assert checkpoint.load(tmp_path, model=other).tables == {"a.user": 2, "item": 0, "b.user": 1}
    assert sorted(other.a.store("user").keys().tolist()) == [1, 2] and other.b.store("user").keys().tolist() == [3]


def test_one_rank_that_differs_stops_all(tmp_path):
    """Rank 1's model does not fit: both say so and neither has changed."""
    run_ranks_as_threads(2, lambda rank, comm: checkpoint.save(tmp_path, model=Noisy(comm)))

    def body(rank: int, communicator: Any) -> str:
        model = Noisy(communicator, width=3 + rank)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises((CheckpointError, RemoteRankError)) as caught:
            checkpoint.load(tmp_path, model=model)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = run_ranks_as_threads(2, body)
    assert (
        first.startswith("RemoteRankError: rank 1 failed in checkpoint.load")
        and "'hidden.weight' has shape [4, 8]" in first
    )
    assert second.startswith("CheckpointError")


def test_buffers_belong_to_ranks(tmp_path):
    def make(rank: int, communicator: Any, value: float) -> Noisy:
        model = Noisy(communicator)
        model.scale.fill_(value)
        return model

    run_ranks_as_threads(2, lambda rank, comm: checkpoint.save(tmp_path, model=make(rank, comm, 10.0 + rank)))

    def body(rank: int, communicator: Any) -> list[float]:
        model = make(rank, communicator, 0.0)
        checkpoint.load(tmp_path, model=model)
        return model.scale.tolist()

    assert run_ranks_as_threads(2, body) == [[10, 10], [11, 11]]
    assert run_ranks_as_threads(3, body) == [[10, 10]] * 3
