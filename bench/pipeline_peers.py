"""TorchRec on the case `pipeline`: its sharded EmbeddingBagCollection under its two training pipelines, on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from nestpipe_kernels.bench.link_meter import LinkMeter
from nestpipe_kernels.bench.pipeline_runs import FILL_STEPS, LEARNING_RATE, Measured, Ours
from nestpipe_kernels.bench.pipeline_shapes import PipelineShape
from nestpipe_kernels.data import Batch
from nestpipe_kernels.models import DLRM

__all__ = ["TorchRecPeer", "make_peers"]

COMPARED_ROWS = 2000
"""Rows of each table that are compared after the last step."""


@dataclasses.dataclass
class _PeerBatch:
    """A batch with TorchRec's KeyedJaggedTensor, as its pipelines want it."""

    dense: Tensor
    sparse: Any
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> _PeerBatch:
        return _PeerBatch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> _PeerBatch:
        return self

    def record_stream(self, stream: Any) -> None:
        return None


class TorchRecPeer:
    """One of TorchRec's pipelines over its own tables, row-wise or table-wise sharded; starts from our rows."""

    micro_batches = 1

    def __init__(
        self,
        pipeline: str,
        sharding: str,
        shape: PipelineShape,
        batches: Sequence[Batch],
        initial: dict[str, tuple[Tensor, Tensor]],
        ours: Ours,
        seed: int,
        meter: LinkMeter | None,
    ) -> None:
        self.name = f"torchrec {pipeline}, {sharding}-wise"
        self.measured = Measured()
        self._ours = ours
        self._meter = meter
        self._initial = initial
        self.difference = float("inf")
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._new_batches = len(batches)
        self._model = _sharded_model(shape, sharding, seed)
        self._fill(initial)
        dense = [p for name, p in self._model.named_parameters() if "embedding_bag_collection" not in name]
        optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)
        self._batches: Iterator[Any] = itertools.cycle([_converted(batch) for batch in batches])
        self._pipeline = _make_pipeline(pipeline, self._model, optimizer)

    def run_block(self, steps: int, measure: bool) -> None:
        """As Ours.run_block; batches that the peer has drawn ahead stay in flight, as it has no word for draining."""
        sent, cpu_s = self._sent_bytes(), time.process_time()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            output = self._pipeline.progress(self._batches)
            times.append((time.perf_counter() - start) * 1e3)
            if not measure:
                self._outputs.append(output)
        if measure:
            self.measured.steps += [{"step_ms": ms} for ms in times[FILL_STEPS:]]
            self.measured.all_steps += steps
            self.measured.sent_bytes += self._sent_bytes() - sent
            self.measured.cpu_s += time.process_time() - cpu_s

    def compare(self) -> None:
        """Note how far this is from ours after the warm-up: the largest difference of this rank's losses while batches
        are new, and the mean difference of COMPARED_ROWS rows of each table. Later small differences grow: row-wise
        Adagrad gives gradients near 0 the same length as others. Collective."""
        worst = 0.0
        for k in range(min(len(self._outputs), self._new_batches)):
            logits, labels = self._outputs[k]
            mine = functional.binary_cross_entropy_with_logits(logits.detach(), labels)
            worst = max(worst, float((mine - self._ours.losses[k]).abs()))
        for table, (ids, _) in self._initial.items():
            chosen = ids[:: max(1, len(ids) // COMPARED_ROWS)]
            ours, theirs = self._ours.owned_rows(table, chosen), self._owned_rows(table, chosen)
            dist.all_reduce(ours)
            dist.all_reduce(theirs)
            worst = max(worst, float((ours - theirs).abs().mean()))
        self.difference = worst
        self._outputs.clear()

    def _sent_bytes(self) -> int:
        return 0 if self._meter is None else self._meter.sent_bytes()

    def _shards(self, table: str) -> list[tuple[int, Tensor]]:
        """(first row, rows) of what this rank holds of a table."""
        weight = self._model.state_dict()[f"embedding_bag_collection.embedding_bags.{table}.weight"]
        return [(shard.metadata.shard_offsets[0], shard.tensor) for shard in weight.local_shards()]

    def _fill(self, initial: dict[str, tuple[Tensor, Tensor]]) -> None:
        for table, (ids, values) in initial.items():
            for first, rows in self._shards(table):
                here = (ids >= first) & (ids < first + len(rows))
                rows[ids[here] - first] = values[here]

    def _owned_rows(self, table: str, ids: Tensor) -> Tensor:
        """float32 [n, dim]: rows of this rank's shards, zeros for others."""
        found = torch.zeros(len(ids), self._initial[table][1].shape[1])
        for first, rows in self._shards(table):
            here = (ids >= first) & (ids < first + len(rows))
            found[here] = rows[ids[here] - first]
        return found


def make_peers(
    shape: PipelineShape, batches: Sequence[Batch], ours: Ours, *, seed: int, meter: LinkMeter | None
) -> list[TorchRecPeer]:
    """TorchRec's pipelines with row-wise and table-wise tables; none, and a line on stderr, where it is not installed.

    The shape's tables must be of fixed size, as TorchRec's are.
    """
    try:
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        if dist.get_rank() == 0:
            print(f"left out: torchrec: {' '.join(str(error).split())[:200]} (make peers installs it)", file=sys.stderr)
        return []
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's words to TorchRec, for every step
    initial = _initial_rows(shape, batches, ours)
    return [
        TorchRecPeer(pipeline, sharding, shape, batches, initial, ours, seed, meter)
        for sharding in ("row", "table")
        for pipeline in ("base", "SparseDist")
    ]


def _initial_rows(shape: PipelineShape, batches: Sequence[Batch], ours: Ours) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each table the ids that any rank's batches hold, ascending, and the rows that ours start from."""
    result = {}
    for t, feature in enumerate(shape.features):
        own = torch.cat([batch.sparse[feature].values() for batch in batches]).unique()  # type: ignore[no-untyped-call]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        ids = torch.cat(every).unique()  # type: ignore[no-untyped-call]
        result[f"t{t}"] = ids, ours.rows(f"t{t}", ids)
    return result


def _converted(batch: Batch) -> _PeerBatch:
    from torchrec import KeyedJaggedTensor

    sparse = KeyedJaggedTensor(
        keys=list(batch.sparse.keys()), values=batch.sparse.values(), lengths=batch.sparse.lengths().to(torch.int32)
    )
    return _PeerBatch(batch.dense, sparse, batch.labels)


def _sharded_model(shape: PipelineShape, sharding: str, seed: int) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan

    ranks = dist.get_world_size()
    tables = [
        EmbeddingBagConfig(num_embeddings=shape.rows, embedding_dim=shape.dim, name=f"t{t}", feature_names=[feature])
        for t, feature in enumerate(shape.features)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    fused: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": LEARNING_RATE,
        "eps": 1e-10,
    }
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    kernel = "fused"  # the update fused into backward, as users of it train
    each = {
        f"t{t}": row_wise(compute_kernel=kernel)
        if sharding == "row"
        else table_wise(rank=t * ranks // shape.tables, compute_kernel=kernel)
        for t in range(shape.tables)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = construct_module_sharding_plan(
            collection, per_param_sharding=each, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
        )
        model = DLRM(collection, shape.dense, shape.bottom, shape.top, seed)
        return DistributedModelParallel(
            module=model,
            device=torch.device("cpu"),
            plan=ShardingPlan(plan={"embedding_bag_collection": plan}),
            sharders=[sharder],
        )


def _make_pipeline(kind: str, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_PeerBatch)
    made = TrainPipelineBase if kind == "base" else TrainPipelineSparseDist
    return made(model, optimizer, torch.device("cpu"))
