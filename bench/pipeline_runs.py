"""One implementation's training in the case `pipeline`: blocks of steps, what they took, what they left behind."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.link_meter import LinkMeter, LinkSampler
from nestpipe_kernels.bench.pipeline_shapes import PipelineShape, StageTimes
from nestpipe_kernels.capture.modules import embedding_modules
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.data import Batch
from nestpipe_kernels.models import DLRM
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.trace import COMPUTE_LANE, Span
from nestpipe_kernels.trace.summary import step_table

__all__ = ["FILL_STEPS", "IMPLEMENTATIONS", "Emulation", "Measured", "Ours", "build_model", "digests_of"]

FILL_STEPS = 3
"""Steps at the begin of a block that are not counted: the pipeline is filled again."""
DRAWN_AHEAD = 4
"""Batches, at most, of which lanes may record spans before the caller is there."""
LEARNING_RATE = 0.01

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "sequential": {"schedule": "sequential"},
    "dbp": {"schedule": "dbp"},
    "fwp": {"schedule": "fwp"},
    "nested": {"schedule": "nested"},
    "nested+early": {"schedule": "nested", "early_send": True},
    "nested+pooled": {"schedule": "nested", "owner_pooling": "auto"},
    "async": {"schedule": "async"},
}
"""Settings of PipelineConfig by the name that stands in the lines."""
NOT_EXACT = ("async", "nested+pooled")


@dataclass
class Measured:
    """What the counted steps took on this rank."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """STEP_COLUMNS of each, and "lookup_ms": work of kind lookup on all lanes."""
    lanes: dict[str, list[float]] = field(default_factory=dict)
    """Milliseconds of work of each lane in each step; waits for the link are none."""
    all_steps: int = 0
    """Those of the filling, too; the next two are of all of them."""
    sent_bytes: int = 0
    cpu_s: float = 0.0

    def medians(self) -> dict[str, Any]:
        """Of the columns and lanes, and means of bytes and processor time."""
        columns = {name: median(step[name] for step in self.steps) for name in self.steps[0] if name != "batch"}
        times = sorted(step["step_ms"] for step in self.steps)
        return {
            **columns,
            "p20_ms": times[len(times) // 5],
            "p80_ms": times[-1 - len(times) // 5],
            "steps": len(times),
            "lanes": {name: median(values) for name, values in self.lanes.items()},
            "bytes_sent": self.sent_bytes / max(self.all_steps, 1),
            "cpu_ms": self.cpu_s * 1e3 / max(self.all_steps, 1),
        }


class Emulation:
    """Holds lanes as a device would: each stage ends no earlier than its time after its begin. No core is used."""

    def __init__(self, times: StageTimes) -> None:
        self._storage_s = times.storage / 1e3
        self._retrieval_s = times.retrieval / 1e3
        self._seconds = {
            "copy": times.copy / 1e3,
            "route": times.routing / 1e3,
        }
        self._compute_s = times.compute / 1e3
        self._retrieved: dict[int, float] = {}

    def fetch(self, item: Any) -> Any:
        """The item itself, when the storage would have given it."""
        time.sleep(self._storage_s)
        return item

    def hold(self, stage: str, batch: Any, micro: int, begin: float) -> None:
        """RankState.hold."""
        if stage == "retrieve":
            self._retrieved[batch.index] = time.perf_counter() - begin
        if stage in ("gather_all", "gather_fresh") and batch.index in self._retrieved:
            # The copy of rows to the device ends the retrieval.
            wait_until(begin + self._retrieval_s - self._retrieved.pop(batch.index))
        elif stage == "forward_backward" and batch.size:
            wait_until(begin + self._compute_s * len(batch.micro[micro].indices) / batch.size)
        elif stage in self._seconds:
            wait_until(begin + self._seconds[stage])


def wait_until(moment: float) -> None:
    """Sleep until time.perf_counter() is there."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class _Counts:
    """Rows that a step's exchanges carry, from the plans of its batch."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.batches: dict[int, dict[str, int]] = {}

    def note(self, batch: Any) -> None:
        """To be called after `route`."""
        sent = sum(sum(transfer.per_peer) for plan in batch.plans for transfer in plan.rows)
        first = [plan.rows[0].per_peer for plan in batch.plans]
        last = [plan.grads[-1].per_peer for plan in batch.plans]
        uses = 0
        for plan in batch.plans:
            uses += sum(len(slots[slots >= 0].unique()) for slots in plan.source.slots)
        self.batches[batch.index] = {
            "rows_sent": sent,
            "distinct_rows": sum(len(plan.source.lists.keys) for plan in batch.plans),
            "first_rows": sum(map(sum, first)),
            "last_rows": sum(map(sum, last)),
            "edge_rows": sum(sum(per_peer) - per_peer[self._rank] for per_peer in first + last),
            "resent_rows": uses,
        }

    def means(self) -> dict[str, float]:
        """Per step."""
        rows = list(self.batches.values())
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}


def build_model(shape: PipelineShape, seed: int) -> DLRM:
    """The DLRM of a shape over our tables; the same initial values whenever it is built."""
    tables = [
        nk.EmbeddingBagConfig(
            shape.rows or nk.UNBOUNDED, shape.dim, f"t{t}", feature_names=names, init=nk.init.Uniform(-0.5, 0.5)
        )
        for t, names in enumerate(_features_of_tables(shape))
    ]
    collection = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.RowWiseAdagrad(LEARNING_RATE), seed=seed)
    return DLRM(collection, shape.dense, shape.bottom, shape.top, seed)


def _features_of_tables(shape: PipelineShape) -> list[list[str]]:
    return [["user"], ["item", "history"]] if shape.kind == "movielens" else [[name] for name in shape.features]


class Ours:
    """One schedule over its own model and stores."""

    def __init__(
        self,
        name: str,
        micro_batches: int,
        shape: PipelineShape,
        batches: Sequence[Batch],
        *,
        seed: int,
        emulated: bool,
        block: int,
        timeout_s: float,
        meter: LinkMeter | None,
    ) -> None:
        self.name = name
        self.micro_batches = micro_batches
        self.exact = name not in NOT_EXACT
        self.measured = Measured()
        self.losses: list[Tensor] = []
        self._meter = meter
        self._model = build_model(shape, seed)
        self._dense = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._counts = _Counts(dist.get_rank())
        settings = dict(IMPLEMENTATIONS[name])
        emulation = Emulation(shape.times) if emulated else None
        if emulation is not None and shape.times.storage:
            settings["fetch"] = emulation.fetch
        config = PipelineConfig(
            num_micro_batches=micro_batches,
            edge_share=shape.edge_share,
            timeout_s=timeout_s,
            timeline_steps=block + FILL_STEPS + DRAWN_AHEAD,
            **settings,
        )
        self._pipeline = NestedPipeline(self._model, self._dense, config=config)
        self._pipeline.rank.hold = self._hold(emulation)
        self._steps = self._pipeline.run(itertools.cycle(batches))
        self._counting = True

    def _hold(self, emulation: Emulation | None) -> Callable[[str, Any, int, float], None]:
        def hold(stage: str, batch: Any, micro: int, begin: float) -> None:
            if stage == "route" and self._counting:
                self._counts.note(batch)
            if emulation is not None:
                emulation.hold(stage, batch, micro, begin)

        return hold

    def run_block(self, steps: int, measure: bool) -> None:
        """Train; with `measure` all but FILL_STEPS count. Ends with nothing in flight on this rank."""
        timeline = self._pipeline.timeline
        timeline.clear()
        self._counting = not measure
        sent, cpu_s = self._sent_bytes(), time.process_time()
        self._advance(steps)
        cpu_s = time.process_time() - cpu_s
        self._pipeline.drain()
        if measure:
            self.measured.all_steps += steps
            self.measured.sent_bytes += self._sent_bytes() - sent
            self.measured.cpu_s += cpu_s
            self._note(timeline.to_events())

    def picture(self, steps: int, bits_per_second: float | None) -> list[Span]:
        """Spans of further steps after the filling, the link's among them; not measured."""
        self._pipeline.timeline.clear()
        self._counting = False
        link: list[Span] = []
        if self._meter is not None and bits_per_second is not None:
            with LinkSampler(self._meter, bits_per_second) as sampler:
                self._advance(steps)
                self._pipeline.drain()
            link = sampler.spans()
        else:
            self._advance(steps)
            self._pipeline.drain()
        return self._pipeline.timeline.to_events() + link

    def _advance(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(next(self._steps).loss)

    def _sent_bytes(self) -> int:
        return 0 if self._meter is None else self._meter.sent_bytes()

    def _note(self, spans: Sequence[Span]) -> None:
        rows = {int(row["batch"]): row for row in step_table(spans)}
        counted = sorted(rows)[FILL_STEPS:]
        lookup = dict.fromkeys(counted, 0.0)
        lanes: dict[str, dict[int, float]] = {}
        for span in spans:
            if span.exposed or span.batch not in lookup:
                continue
            ms = (span.end_ns - span.start_ns) / 1e6
            if span.kind == "lookup" and span.lane != COMPUTE_LANE:
                lookup[span.batch] += ms
            if span.kind == "communication" and span.lane != "exchange":
                continue  # recv_grads and the dense exchange wait for the link
            lane = lanes.setdefault(span.lane, dict.fromkeys(counted, 0.0))
            lane[span.batch] += ms
        self.measured.steps += [{**rows[batch], "lookup_ms": lookup[batch]} for batch in counted]
        for name, per_batch in lanes.items():
            self.measured.lanes.setdefault(name, []).extend(per_batch.values())

    def counts(self) -> dict[str, float]:
        """Rows per step of this rank, its own included: sent, distinct, of the first and last micro-batch."""
        return self._counts.means()

    def digests(self) -> dict[str, str]:
        """Of every step's loss, and of rows and dense parameters after the last step; the pipeline is closed."""
        self._pipeline.close()
        losses = {f"loss of step {k}": float(loss).hex() for k, loss in enumerate(self.losses)}
        return {**losses, **digests_of(self._model, self._dense)}

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """float32 [n, dim]: embeddings of ids; of those that this rank does not own, the initial values."""
        collection: Any = self._model.embedding_bag_collection
        found, _ = collection.store(table).find(ids)
        return torch.as_tensor(found)

    def owned_rows(self, table: str, ids: Tensor) -> Tensor:
        """float32 [n, dim]: embeddings of the ids that this rank has rows of, zeros for others."""
        collection: Any = self._model.embedding_bag_collection
        own = torch.isin(ids, collection.store(table).keys())
        return self.rows(table, ids) * own.unsqueeze(1)


def digests_of(model: torch.nn.Module, dense: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of every bit that training changes on this rank, by what it is of: keys and rows of a table, dense
    parameters, their optimizer's state."""
    found = {}
    for module in embedding_modules(model).values():
        stores: Any = module.row_stores()  # type: ignore[operator]
        for store in stores:
            for table, spec in enumerate(store.tables):
                keys, handles = store.export_table(table)
                order = torch.argsort(keys)
                keys, handles = keys[order].contiguous(), handles[order].contiguous()
                rows = torch.empty(len(keys), store.row_floats)
                store.gather(handles, keys, torch.full((len(keys),), table, dtype=torch.int32), rows, None)
                used = store.embedding_words + store.optimizer.state_floats(store.dim) + 1
                digest = hashlib.sha256(keys.numpy().tobytes())
                digest.update(rows[:, :used].contiguous().numpy().tobytes())
                found[f"rows of table {spec.name}"] = digest.hexdigest()
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(parameter.detach().contiguous().numpy().tobytes())
        for value in dense.state.get(parameter, {}).values():
            digest.update(torch.as_tensor(value).numpy().tobytes())
        found[f"parameter {name}"] = digest.hexdigest()
    return found
