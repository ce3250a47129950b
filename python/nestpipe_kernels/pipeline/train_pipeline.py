"""NestedPipeline: wraps a model's training step; draws batches, runs the schedule's graph, returns outputs in the
caller's order."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from ..capture.capture import SparseInputs, capture_inputs, from_function
from ..capture.modules import embedding_modules, running_statistics, warn_batch_coupled, warn_pairs
from ..capture.to_device import to_device
from ..comm import Communicator, DeviceCommunicator, SparseGroups, Topology, exchange_same
from ..config import PipelineConfig, default_threads, launched_ranks
from ..device import CPU, LoweredThreads
from ..errors import CheckpointError, CommunicationError, NestPipeError, NonFiniteGradientError, RemoteRankError
from ..stages.eager import eager_context
from ..stages.owner_pool import select_features
from ..stages.pool import TensorPool
from ..stages.retrieval import undo_retrieval
from ..stages.state import BatchState, Failure, RankState, RowHook, bind_stores
from ..trace import Timeline
from ..types import EmbeddingModule
from .agree import agree, exchange_failures, share_dense
from .counters import StepCallback, StepReports
from .dense import check_optimizer, dense_parameters, exchanged_at_once
from .devices import check_device_settings, check_rows_places, pipeline_backend
from .drawn import DrawnBatches
from .evaluation import Evaluation
from .graph import Graph
from .loss_scale import loss_scale
from .micro_choice import PROBES, MicroBatchChoice
from .model_call import call_model, replicas_in
from .position import Position
from .scheduler import LaneScheduler
from .schedules import SCHEDULES, build_graph
from .step import Step, make_step
from .validate import validate

__all__ = ["NestedPipeline", "Step"]

_PATIENCE_S = 0.01
"""Longer than a step takes to end and the next to begin, where nothing comes between; not long where something does."""


class NestedPipeline:
    """Trains a model through the nested pipeline; the result equals `schedule="sequential"` bit for bit.

    Args:
        model: contains embedding modules of this package that were given an optimizer; its other parameters are dense.
        dense_optimizer: torch optimizer of the dense parameters, or None. What it holds beyond the model's parameters
            (a loss function's own, say) is averaged over ranks too; parameters it gets later are not, and are refused.
        loss_fn: `(model, batch) -> (loss, output)` or `(loss, output, weight)`; None: the model returns
            `(losses, output)`.
        config: see PipelineConfig.
        grad_scaler: a GradScaler of torch.amp, for float16: losses are multiplied by its scale in backward and all
            gradients divided by it, those of rows too. A batch with a gradient that is not finite on some rank changes
            nothing on any: its Step says so in `skipped`, the scale falls, and nothing is raised, whatever
            `nan_policy`. The pipeline calls its methods; do not call scale, step or update yourself.

    The thread that calls `progress()` is the compute lane: it draws batches, runs the model and the dense optimizer.
    Not thread-safe.

    At construction rank 0's dense parameters and buffers go to all ranks, as DistributedDataParallel's do.

    Raises:
        TypeError: `config`, `dense_optimizer` or `grad_scaler` is something else.
        ValueError: no embedding module with an optimizer, modules of different process groups or of another open
            pipeline, complex parameters, or ranks that disagree.
        TypeError: an optimizer that has no step(), or one that needs a closure.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dense_optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        config: PipelineConfig | None = None,
        grad_scaler: Any = None,
    ) -> None:
        self.config = config = PipelineConfig() if config is None else config
        if not isinstance(config, PipelineConfig):
            raise TypeError(f"NestedPipeline: config must be a PipelineConfig, got {type(config).__name__}")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"NestedPipeline: model must be a torch.nn.Module, got {type(model).__name__}")
        check_optimizer(dense_optimizer)
        self._loss_scale = loss_scale(grad_scaler)
        self._replicas = replicas_in(model)
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(
                f"NestedPipeline: loss_fn must be callable or None, got {type(loss_fn).__name__}; settings go by name: "
                "config=PipelineConfig(...)"
            )
        self.model = model
        found = cast("dict[str, EmbeddingModule]", embedding_modules(model))
        modules = {name: module for name, module in found.items() if module.row_stores()}
        if not modules:
            raise ValueError(
                "NestedPipeline: the model has no embedding module with an optimizer; call nk.convert(model, "
                "nk.optim.RowWiseAdagrad(lr=...)) first, or build EmbeddingBagCollection(tables, optimizer=...)"
            )
        for name, module in modules.items():
            if module.before_outside_access is not None:
                raise ValueError(
                    f"NestedPipeline: module {name!r} belongs to another open pipeline; close that one first"
                )
        dense = dense_parameters(model, dense_optimizer)
        backend = pipeline_backend(config.device, dense)
        check_rows_places(backend, modules)
        communicator = _shared_communicator(modules).with_timeout(config.timeout_s)
        _warn_if_alone(communicator)
        if backend.has_streams:
            check_device_settings(backend, modules, bool(config.owner_pooling))
            communicator = DeviceCommunicator(communicator, backend)
        device = backend.device if backend.has_streams else None
        bindings = bind_stores(modules, device)
        tiers = any(binding.store.tier is not None for binding in bindings)
        topology = Topology(communicator, _shared_groups(modules))
        graph = _valid_graph(
            config.schedule,
            config.row_transfer,
            config.fetch is not None,
            config.early_send,
            tiers,
            topology.mode,
            bool(config.owner_pooling),
            exchanged_at_once(dense, communicator.size),
        )
        if config.owner_pooling:
            select_features(bindings, config.owner_pooling)
        from ..ops.owners import default_slice_owner

        self.rank = RankState(
            communicator,
            modules,
            bindings,
            default_slice_owner(topology.num_shards),
            pool=TensorPool(device=device),
            backend=backend,
            num_micro_batches=PROBES[0] if config.num_micro_batches == "auto" else config.num_micro_batches,
            track_use=config.row_transfer == "per_micro_batch",
            owner_pooling_auto=config.owner_pooling == "auto",
            row_wire=config.row_wire,
            gradient_wire=config.gradient_wire,
            clustering=config.clustering == "key",
            edge_share=config.edge_share,
            balance=config.balance,
            patience_s=_PATIENCE_S,
            nan_policy=config.nan_policy,
            model=model,
            call_model=self._call_model,
            loss_weighting=config.loss_weighting,
            dense_optimizer=dense_optimizer,
            loss_scale=self._loss_scale,
            dense_parameters=dense,
            capture=self._capture,
            split_batch=config.split_batch,
            fetch=config.fetch,
            topology=topology,
        )
        clock = agree(self.rank, config)
        topology.connect()
        share_dense(self.rank, model)
        warn_batch_coupled(model, self.rank.num_micro_batches)
        from .._native import core

        core().set_num_threads(config.threads or default_threads())
        self.timeline = Timeline(config.timeline_steps, communicator.rank)
        self._scheduler = LaneScheduler(
            graph, self.rank, self.rank.num_micro_batches, self.timeline, config.timeout_s + 30.0
        )
        self._choice = self._new_choice()
        self._lowered = LoweredThreads()
        self._statistics = running_statistics(model)
        self._trained = clock
        """Batches that counted so far since the stores were made: what the next one's rows note as `last_used`."""
        self._position = Position(model)
        prefetch = SCHEDULES[config.schedule].prefetch
        self._drawn = DrawnBatches(self.rank, self._scheduler, self._position, prefetch, config.timeout_s)
        self._evaluation = Evaluation(self.rank, self._drawn, self._position, config.timeout_s)
        self._loss_fn = loss_fn
        self._inside = False
        self._closed = False
        self._hook_thread: int | None = None
        self._reports = StepReports(self.rank)
        self._broken: BaseException | None = None
        self._loads = 0
        """Checkpoints loaded so far."""
        contexts = [eager_context(module) for module in modules.values()]
        self.rank.step_count = max(context.step_count for context in contexts)
        for module in modules.values():
            module.output_device = backend.device
        for context, module in zip(contexts, modules.values()):
            context.step_count = 0  # this pipeline counts; it hands the count back when it closes
            module.before_outside_access = self._before_outside_access

    # ------------------------------------------------------------------------------------------ public

    def run(self, loader: Iterable[Any]) -> Iterator[Step]:
        """Every batch of `loader`, one Step each, until no rank has a batch.

        Left early (by break, or an error), the batches drawn ahead are dropped with the loader's iterator. Pass an
        iterator to keep them: a later `run` or `progress` with the same iterator goes on with them.
        """
        iterator, loads = self._position.open(loader, self.model.training), self._loads
        try:
            while True:
                if loads != self._loads:
                    raise CheckpointError(
                        "run: a checkpoint was loaded since this loop began, and its batches are those of before: "
                        "leave the loop and call run(loader) again"
                    )
                try:
                    step = self._step(iterator)
                except StopIteration:
                    return
                yield step
        finally:
            if iterator is not loader:  # nobody else has it
                self._drawn.abandon(iterator)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train (or, in eval mode, evaluate) the next batch and return the model's output.

        Batches already drawn belong to their iterator: with another iterator they wait for its return.

        Raises:
            StopIteration: no rank has a batch any more; everything in flight has been trained.
            NonFiniteGradientError: nan_policy="raise"; nothing changed on any rank, the batch counts as consumed.
            RemoteRankError: another rank failed in this batch; nothing changed, the batch counts as consumed.
            CommunicationError: an exchange failed; the pipeline cannot be used any more.
        """
        return self._step(dataloader_iter).output

    def add_write_back_hook(self, callback: Callable[[int, str, Tensor], None]) -> None:
        """Call `callback(step, table, keys)` when rows of a batch are in this rank's store.

        step: the update's number, from 1. keys: int64 [n], each key that the batch looked up and that has a row,
        once. It runs on the write-back lane's thread, so it must not read or write the rows; what it raises stops the
        pipeline.
        """
        self.rank.on_write_back.append(self._hook(callback))

    def add_eviction_hook(self, callback: Callable[[int, str, Tensor], None]) -> None:
        """Call `callback(step, table, keys)` for rows that went to make room, or expired, when a batch was retrieved.

        keys: int64 [n], on this rank. Called in batch order, once the batch counts (after its write-back hooks); a
        batch that is undone removes nothing. Otherwise as `add_write_back_hook`.
        """
        self.rank.on_eviction.append(self._hook(callback))

    def add_step_callback(self, callback: StepCallback) -> None:
        """Call `callback(counters)` after every training step that counts, with this rank's StepCounters.

        It runs on the thread that calls `progress()`, between steps, before `progress()` returns; what it raises comes
        out of there, and the pipeline can go on. Add it before training: batches that are under way are not reported.

        Raises:
            TypeError: `callback` cannot be called.
        """
        self._reports.add(callback)

    def _hook(self, callback: RowHook) -> RowHook:
        def call(step: int, table: str, keys: Tensor) -> None:
            self._hook_thread = threading.get_ident()
            try:
                callback(step, table, keys)
            finally:
                self._hook_thread = None

        return call

    @property
    def num_micro_batches(self) -> int:
        """Parts of a batch in the next step. With "auto" it changes while the first 16 steps are measured, and once
        after them; it then stays, also in runs that go on from a checkpoint saved since."""
        return self.rank.num_micro_batches

    @property
    def step_count(self) -> int:
        """Updates done so far, on all ranks alike; those before this pipeline was made count, too."""
        return self.rank.step_count

    def drain(self) -> None:
        """Wait until all updates of returned batches are in the stores."""
        self._check_usable()
        self._scheduler.drain()

    def close(self) -> None:
        """Wait for what is in flight, forget batches drawn but not trained, stop the threads. Idempotent.

        After an error it does not wait for other ranks: threads that still do end with the time-out. Either way the
        stores are left without the retrieval of batches that were not trained.
        """
        if self._closed:
            return
        try:
            if self._broken is None:
                self._pause()
                self._drawn.land()
        finally:
            self._closed = True
            if self._scheduler.close(wait_s=self.config.timeout_s if self._broken is None else 1.0):
                self._drawn.undo_retrieval()
            self._lowered.restore()
            for module in self.rank.modules.values():
                module.before_outside_access = None
                module.output_device = CPU.device
                context = eager_context(module)
                context.step_count = max(context.step_count, self.rank.step_count)

    def __enter__(self) -> NestedPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._broken is None and not isinstance(error, NestPipeError):
            self._broken = error  # a peer may not reach its next exchange: do not wait for it
            self.rank.report_failure("the training loop", self._trained, error)
        with suppress(Exception):  # what is under way tells the cause; that a peer has left since then does not
            self.close()

    # -------------------------------------------------------------------------------------------- steps

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this pipeline is closed; build a new NestedPipeline")
        if self._broken is not None:
            raise RuntimeError(
                f"this pipeline stopped after an error and cannot go on: {type(self._broken).__name__}: {self._broken}"
            ) from self._broken

    def _step(self, iterator: Iterator[Any]) -> Step:
        self._check_usable()
        if self._inside:
            raise RuntimeError("progress() was called from inside the model or loader of the same pipeline")
        self._inside = True
        try:
            if not self.model.training:
                return self._evaluate(iterator)
            if torch.is_inference_mode_enabled():
                raise _BatchFailed(
                    RuntimeError(
                        "a model in training mode cannot be trained under torch.inference_mode(); leave it, or call "
                        "model.eval() to evaluate"
                    )
                )
            if self.config.lower_caller_priority:
                self._lowered.lower_current()
            self._reports.begin(self._scheduler.spent_ns)
            step = self._train(iterator)
        except (StopIteration, NonFiniteGradientError, RemoteRankError, _BatchFailed) as error:
            if isinstance(error, _BatchFailed):
                raise error.error from None
            raise
        except BaseException as error:
            self._broken = error
            self.rank.report_failure("progress", self._trained, error)
            raise
        finally:
            self._inside = False
        self._reports.tell()
        return step

    def _new_choice(self) -> MicroBatchChoice | None:
        return MicroBatchChoice(self._share_times) if self.config.num_micro_batches == "auto" else None

    def _share_times(self, mine: Tensor) -> Tensor:
        self._pause()
        return exchange_same(self.rank.communicator.group("control"), mine, "micro_batches").wait(self.config.timeout_s)

    def _choose_micro_batches(self) -> None:
        if self._choice is not None:
            settled = self._choice.settled
            self._set_micro_batches(self._choice.next_step())
            if settled:
                self._choice = None

    def _set_micro_batches(self, number: int) -> None:
        """Split batches into another number of parts from now on; those drawn ahead are routed again. All ranks
        alike."""
        if number == self.rank.num_micro_batches:
            return
        self._pause()
        self._drawn.park()
        self.rank.num_micro_batches = number
        self._scheduler.set_micro_batches(number)
        self._evaluation.plan()

    def _train(self, iterator: Iterator[Any]) -> Step:
        scheduler, drawn = self._scheduler, self._drawn
        self._choose_micro_batches()
        if drawn.source is None or drawn.source.iterator is not iterator:
            self._pause()
            drawn.switch_to(iterator)
        batch = drawn.first(self._trained)
        scheduler.start_window(batch)
        scheduler.wait_for("route_keys", batch)
        if batch.ended:
            self._finish_epoch(batch)
            raise StopIteration
        scheduler.run_caller("begin", batch)
        drawn.take_first()
        batch.statistics = [buffer.clone() for buffer in self._statistics]
        for micro in range(self.rank.num_micro_batches):
            scheduler.run_caller("forward_backward", batch, micro)
        scheduler.run_caller("verdict", batch)
        scheduler.run_caller("dense_step", batch)
        if self._choice is not None:
            self._choice.record(scheduler.spent_ns, batch.size)
        batch.previous = None  # nothing reads it any more; kept, each batch would keep all before it
        scheduler.forget_before(batch.index - 2)
        step = self._result(batch)
        if batch.verdict is not None and batch.verdict.ok:
            self._reports.collect(batch, self._scheduler.spent_ns)
        return step

    def _evaluate(self, iterator: Iterator[Any]) -> Step:
        self._pause()
        batch = self._evaluation.run(iterator, self._trained)
        self.rank.backend.synchronize()  # lanes use the buffers again, and know nothing of this thread's stream
        failure = batch.failure or batch.remote
        if failure is not None:
            raise self._as_error(failure, batch)
        return make_step(batch)

    def _finish_epoch(self, batch: BatchState) -> None:
        """No rank has samples: run the remaining nodes (they do nothing), compare notes, and start over."""
        self._drawn.finish()
        self._scheduler.abandon(batch)
        own: Failure | None = None
        try:
            self._scheduler.drain()
        except Exception as error:
            own = Failure(self.rank.communicator.rank, "the last updates", f"{type(error).__name__}: {error}", error)
        others = exchange_failures(self.rank, batch, own)
        if own is not None and own.error is not None:
            raise own.error
        if others is not None:
            raise CommunicationError(
                f"rank {others.rank} failed in {others.stage} of the epoch: {others.message}; its last update is lost"
            )
        self._drawn.clear()
        self._position.finished()

    def _result(self, batch: BatchState) -> Step:
        failure = batch.failure or batch.remote
        if batch.skipped and failure is not None:
            raise self._as_error(failure, batch)
        verdict = batch.verdict
        assert verdict is not None
        if not verdict.ok:
            self._undo(batch)
            if verdict.failure is not None:
                raise self._as_error(verdict.failure, batch)
            if self._loss_scale is not None:
                self._loss_scale.report(finite=False)
                return make_step(batch)
            raise NonFiniteGradientError(
                f"batch {batch.clock}: {verdict.non_finite} are not finite; nothing was changed on any rank and the "
                "batch counts as consumed. Look for the source in the model, or use "
                "PipelineConfig(nan_policy='skip_row')"
            )
        self._trained = batch.clock + 1
        if self._loss_scale is not None:
            self._loss_scale.report(finite=True)
        return make_step(batch)

    def _as_error(self, failure: Failure, batch: BatchState) -> BaseException:
        if failure.error is not None:
            return _BatchFailed(failure.error)
        error = RemoteRankError(failure.rank, failure.stage, batch.clock, failure.message)
        if failure.consequence is not None:
            error.__context__ = failure.consequence.error
        return error

    # ------------------------------------------------------------------------------------ outside access

    def _undo(self, batch: BatchState) -> None:
        """A batch that does not count: stores as if it had never been retrieved; the next one is retrieved again.

        Running statistics of normalisation modules, which its forward has changed, are put back.
        """
        self._pause()
        undo_retrieval(self.rank, batch)
        for buffer, before in zip(self._statistics, batch.statistics):
            buffer.copy_(before)

    def _before_outside_access(self) -> None:
        if self._inside or threading.get_ident() == self._hook_thread:
            raise RuntimeError(
                "rows cannot be read or written while a step is running (from inside the model, the loss function, the "
                "loader or a write-back hook); do it between two steps"
            )
        self._pause()

    def _pause(self) -> None:
        """Make the stores show the state after the last returned batch: finish its write-back, undo retrieval of the
        next.

        Local to this rank: the next `progress()` retrieves again without any exchange.
        """
        if self._closed or self._broken is not None:
            return
        self._scheduler.drain()
        self._drawn.undo_retrieval()

    # ------------------------------------------------------------------------------------- checkpoints

    def add_generator(self, name: str, generator: torch.Generator) -> None:
        """Let checkpoints hold the state of a generator that is neither the model's nor the loader's attribute.

        Those of the process (torch, `random`, numpy, CUDA), torch.Generator attributes of the model's modules and those
        of the loader and its sampler are known without this. Call it before training.

        Raises:
            TypeError: not a torch.Generator. ValueError: the name is in use for another one.
        """
        self._position.add_generator(name, generator)

    def set_loader(self, loader: Any) -> None:
        """Say which loader the iterators given to `progress()` come from, before training or after a load.

        Checkpoints then hold that loader's state, where it has state_dict() and load_state_dict(), and know its
        generators. `run(loader)` needs no such word.
        """
        self._position.set_loader(loader)

    def settle(self) -> None:
        """Make the stores show the state after the last returned batch, without effects of batches drawn ahead.

        Local to this rank; training goes on unchanged.

        Raises:
            RuntimeError: the pipeline is closed, broken, or inside a step.
        """
        self._check_usable()
        self._before_outside_access()

    def export_position(self, loader: Any = None) -> dict[str, Any]:
        """For nk.checkpoint: {"step_count", "trained", "num_micro_batches", "loader", "generators"} of this rank, after
        `settle`. The number of micro-batches is None while "auto" has not chosen.

        Raises:
            CheckpointError: `loader` is not the one that the pipeline draws from.
        """
        return {
            "step_count": self.rank.step_count,
            "trained": self._trained,
            "num_micro_batches": self.rank.num_micro_batches if self._choice is None else None,
            **self._position.save(self._drawn.of_current(), loader),
        }

    def import_position(
        self,
        step_count: int,
        trained: int,
        record: dict[str, Any],
        generators: dict[str, Any] | None,
        loader: Any = None,
        num_micro_batches: int | None = None,
    ) -> None:
        """For nk.checkpoint: forget batches drawn so far and continue from a position that `export_position` gave.

        With num_micro_batches="auto", a number that was chosen is kept, and without one measuring begins anew.

        Raises:
            CheckpointError: the loader refuses its state.
        """
        self.settle()
        self._drawn.clear()
        self._drawn.parked.clear()
        self.rank.step_count, self._trained = step_count, trained
        self._choice = self._new_choice()
        if self._choice is not None and num_micro_batches is not None:
            self._choice = None
            self._set_micro_batches(num_micro_batches)
        self._loads += 1
        self._position.load(record, generators, loader)

    # ------------------------------------------------------------------------------------------ capture

    def _call_model(self, model: torch.nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        if self.rank.backend.has_streams:
            batch = to_device(batch, self.rank.backend.device)
        return call_model(model, self._loss_fn, batch, self._replicas)

    def _capture(self, batch: Any) -> SparseInputs:
        if self.config.sparse_inputs is not None:
            return from_function(self.config.sparse_inputs, cast("dict[str, torch.nn.Module]", self.rank.modules))
        found = capture_inputs(
            self.model,
            cast("dict[str, torch.nn.Module]", self.rank.modules),
            batch,
            self._call_model,
            self.config.split_batch,
        )
        warn_pairs(found.pairs, self.rank.num_micro_batches)
        return found


class _BatchFailed(Exception):
    """Carries this rank's own exception out of a step without marking the pipeline broken."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@functools.cache
def _valid_graph(
    schedule: str,
    row_transfer: str,
    fetch: bool,
    early_send: bool,
    tiers: bool,
    sparse_groups: str,
    pooling: bool,
    dense_at_once: bool,
) -> Graph:
    """The validated graph; once in a process, so that all pipelines share its plans."""
    graph = build_graph(
        schedule,
        row_transfer,
        fetch=fetch,
        sparse_groups=sparse_groups,
        early_send=early_send,
        tiers=tiers,
        owner_pooling=pooling,
        dense_at_once=dense_at_once,
    )
    validate(graph)
    return graph


def _warn_if_alone(communicator: Communicator) -> None:
    if launched_ranks() > 1 and communicator.size == 1 and not torch.distributed.is_initialized():
        warnings.warn(
            f"NestedPipeline: a launcher started {launched_ranks()} processes, but torch.distributed is not "
            "initialised, so each trains a model of its own; call nestpipe_kernels.launch.init_rank() before building "
            "the model",
            UserWarning,
            stacklevel=3,
        )


def _shared_communicator(modules: dict[str, Any]) -> Communicator:
    found = {id(m.communicator): (name, m.communicator) for name, m in modules.items()}
    if len(found) > 1:
        names = ", ".join(repr(name) for name, _ in found.values())
        raise ValueError(f"NestedPipeline: modules {names} use different process groups; give them the same one")
    communicator: Communicator = next(iter(found.values()))[1]
    return communicator


def _shared_groups(modules: dict[str, Any]) -> SparseGroups:
    found: dict[SparseGroups, str] = {}
    for name, module in modules.items():
        found.setdefault(module.sparse_groups, name)
    if len(found) > 1:
        named = "; ".join(f"{name!r}: {groups}" for groups, name in found.items())
        raise ValueError(
            f"NestedPipeline: modules have different sparse groups ({named}); give them the same sparse_groups"
        )
    return next(iter(found))
