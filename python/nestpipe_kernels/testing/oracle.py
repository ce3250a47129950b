"""The oracle: plays the micro-batches of all ranks in one process, rows in a dict, sums in the written order.

It shares nothing with stages, router, stores, buffers or lanes; of the project it uses the references of pooling, row
gradient, row update and initial values alone. Which keys have rows: oracle_rows, by the plain rules of policy_model.
Its answer is what every schedule must give, bit for bit; gradients that do not count leave their row, or the dense
step, out (nan_policy="skip_row").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.lookup_pool import reference as pooling
from ..ops.row_update import reference as updating
from ..types import PoolingType
from .oracle_rows import OracleRows, OracleTable, RankPart, Wires, storage_of_key

__all__ = ["Oracle", "OracleLookup"]


@dataclass
class _Bag:
    """One bag as the model saw it: rows' keys, weights, output (a leaf with a gradient after backward)."""

    table: OracleTable
    keys: list[int]
    weights: Tensor | None
    rows: Tensor
    output: Tensor


class OracleLookup(nn.Module):
    """Stands where the model has its embedding module; returns {feature: float32 [samples, dim]}."""

    def __init__(self, tables: Sequence[OracleTable]) -> None:
        super().__init__()
        self.tables = tables
        self.rows: OracleRows | None = None
        self.calls: list[list[_Bag]] = []

    def forward(self, bags: dict[str, list[tuple[list[int], list[float] | None]]]) -> dict[str, Tensor]:
        """Feature -> pooled [B, dim] of its bags, each (keys, weights or None)."""
        assert self.rows is not None
        call: list[_Bag] = []
        outputs: dict[str, list[Tensor]] = {}
        for table in self.tables:
            for feature in table.features:
                for keys, weights in bags[feature]:
                    found = [self.rows.read(table.name, k) for k in keys]
                    rows = torch.stack(found) if found else torch.empty(0, table.dim)
                    w = None if weights is None else torch.tensor(weights, dtype=torch.float32)
                    pooled = pooling.pool(rows, torch.tensor([0, len(keys)]), table.mode, w)
                    call.append(_Bag(table, keys, w, rows, pooled[0].detach().requires_grad_()))
                    outputs.setdefault(feature, []).append(call[-1].output)
        self.calls.append(call)
        return {f: torch.stack(v) if v else torch.empty(0, 0) for f, v in outputs.items()}


@dataclass
class Oracle:
    """All ranks of a run.

    Attributes:
        tables: every table.
        models: one per rank, alike; each holds one OracleLookup, everything else is dense.
        optimizers: torch optimizers of the dense parameters, one per rank.
        run_model: (model, micro-batch) -> (loss, weight or None); the model hands bags of keys to its OracleLookup.
        keys_of: micro-batch -> {table: its keys}.
        wires: what values are rounded to on their way.
        shards: ranks that a copy of the rows is spread over.
        copies: the rows, one entry for each copy that may differ from others.
    """

    tables: Sequence[OracleTable]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    run_model: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    keys_of: Callable[[Any], dict[str, list[int]]]
    average: bool = True
    step: int = 0
    wires: Wires = field(default_factory=Wires)
    shards: int = 1
    copies: list[OracleRows] = field(default_factory=list)

    def play(
        self, draw: Callable[[int], Any], parts: Callable[[int, int, Any], list[tuple[int, Any]]], batches: int
    ) -> None:
        """Train. `draw(rank)`: the next batch or None; `parts(t, rank, batch)`: its N (size, micro-batch)."""
        drawn: list[list[Any]] = []
        for t in range(batches):
            while len(drawn) < t + 3:  # two batches are drawn beyond the one that is trained
                drawn.append([draw(r) for r in range(len(self.models))])
            micros = [parts(t, r, b) if b is not None else [] for r, b in enumerate(drawn[t])]
            for rows in self.copies:
                rows.retrieve(self._uses([m for rank in micros for m in rank]), t)
            self._train(micros)

    def _uses(self, micros: Sequence[tuple[int, Any]]) -> list[tuple[str, int]]:
        found = [self.keys_of(micro) for size, micro in micros if size]
        return [(table.name, key) for keys in found for table in self.tables for key in keys.get(table.name, [])]

    def _train(self, micros: Sequence[Sequence[tuple[int, Any]]]) -> None:
        per_rank = [self._rank(r, micros[r]) for r in range(len(self.models))]
        self.losses.append([loss for _, loss, _ in per_rank])
        for model in self.models:
            for name, parameter in model.named_parameters():
                parameter.grad = self._dense(name, [d for _, _, d in per_rank])
        self.step += 1
        for model, optimizer in zip(self.models, self.optimizers):
            if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
        self.update_rows(per_rank, self.copies[0])

    def update_rows(self, per_rank: list[RankPart], rows: OracleRows) -> None:
        """The mean of some ranks' gradients into rows."""
        total: dict[tuple[str, int], Tensor] = {}
        bad: set[tuple[str, int]] = set()
        for gradients, _, divisor in per_rank:
            for row, gradient in gradients.items():
                part = gradient / divisor if divisor != 1.0 else gradient
                if not float(part.abs().max()) <= torch.finfo(torch.float32).max / (2 * len(self.models)):
                    bad.add(row)
                total[row] = total.get(row, torch.zeros_like(gradient)) + part
        for (name, key), gradient in total.items():
            table = next(t for t in self.tables if t.name == name)
            if table.trainable and (name, key) in rows.values and (name, key) not in bad:
                mean = gradient / len(per_rank) if len(per_rank) > 1 else gradient
                values = rows.values[name, key].clone().view(1, -1)
                lr, storage = table.optimizer.lr, storage_of_key(table, key)
                updating.row_update(values, mean.view(1, -1), table.optimizer, self.step, lr, None, storage)
                rows.values[name, key] = values[0]

    def _dense(self, name: str, divisors: Sequence[float]) -> Tensor | None:
        grads = [self._dense_grads[r].get(name) for r in range(len(self.models))]
        if all(g is None for g in grads):
            return None
        like = next(g for g in grads if g is not None)
        total = torch.zeros_like(like)
        for gradient, divisor in zip(grads, divisors):
            if gradient is not None:
                total = total + (gradient / divisor if divisor != 1.0 else gradient)
        return total / len(self.models)

    def _rank(self, rank: int, micros: Sequence[tuple[int, Any]]) -> RankPart:
        """One rank's row gradients, loss and divisor; its dense gradients are kept for the average."""
        model, n = self.models[rank], sum(size for size, _ in micros)
        for parameter in model.parameters():
            parameter.grad = None
        total: dict[tuple[str, int], Tensor] = {}
        weights: list[float] = []
        loss_sum = torch.zeros(())
        for size, micro in micros:
            if not size:
                continue
            lookup = next(m for m in model.modules() if isinstance(m, OracleLookup))
            lookup.calls.clear()
            lookup.rows = self.copies[rank // self.shards % len(self.copies)]
            loss, weight = self.run_model(model, micro)
            coefficient = float(weight) if weight is not None else (size / n if self.average else 1.0)
            weights += [coefficient] if weight is not None else []
            (loss * coefficient).backward()  # type: ignore[no-untyped-call]
            loss_sum = loss_sum + loss.detach() * coefficient
            for row, gradient in _row_gradients(lookup.calls).items():
                part = gradient if self.wires.once else self.wires.sent(gradient)
                total[row] = total.get(row, torch.zeros_like(gradient)) + part
        self._dense_grads[rank] = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        divisor = (sum(weights) or 1.0) if weights else 1.0
        if self.wires.once:
            total = {row: self.wires.sent(gradient) for row, gradient in total.items()}
        return total, float(loss_sum / divisor), divisor

    def __post_init__(self) -> None:
        self.copies = self.copies or [OracleRows(self.tables, self.shards, self.wires)]
        self.losses: list[list[float]] = []
        self._dense_grads: dict[int, dict[str, Tensor]] = {}


def _row_gradients(calls: Sequence[Sequence[_Bag]]) -> dict[tuple[str, int], Tensor]:
    """Per row: its occurrences by (call, feature, sample, position), summed as the written rule says."""
    found: dict[tuple[str, int], list[Tensor]] = {}
    for bag in (bag for call in calls for bag in call):
        grad = bag.output.grad if bag.output.grad is not None else torch.zeros_like(bag.output)
        for position, part in enumerate(_occurrence_gradients(bag, grad)):
            found.setdefault((bag.table.name, bag.keys[position]), []).append(part)
    return {row: pooling.row_gradient(torch.stack(parts)) for row, parts in found.items()}


def _occurrence_gradients(bag: _Bag, grad: Tensor) -> list[Tensor]:
    if bag.weights is not None:
        return [w * grad for w in bag.weights]
    if bag.table.mode == PoolingType.MEAN.code:
        return [grad / len(bag.keys)] * len(bag.keys)
    if bag.table.mode == PoolingType.MAX.code and bag.keys:
        winners = [int((bag.rows[:, d] == bag.rows[:, d].max()).nonzero()[0]) for d in range(bag.table.dim)]
        first = torch.tensor(winners)
        return [torch.where(first == position, grad, torch.zeros(())) for position in range(len(bag.keys))]
    return [grad] * len(bag.keys)
