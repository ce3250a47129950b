"""A lookup context for tests: reads rows straight from this process's stores and keeps the gradients it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.nn.weights import read_embeddings
from nestpipe_kernels.ops.lookup_pool import pool_backward
from nestpipe_kernels.stages.lookup_function import run_lookup
from nestpipe_kernels.types import LookupCall


class StoreLookups:
    """Answers lookups of one process; `row_gradients` sums what backward delivers, by (store, table, key)."""

    def __init__(self) -> None:
        self.row_gradients: dict[tuple[int, int, int], Tensor] = {}
        self.calls = 0

    def lookup(self, module: Any, features: Any) -> Any:
        call = module.plan_call(features)
        stores = module.row_stores()
        pairs_of, rows_of, slots_of = [], [], []
        for store, keys in zip(stores, call.stores, strict=True):
            valid = [True] * keys.keys.numel() if keys.valid is None else keys.valid.tolist()
            index: dict[tuple[int, int], int] = {}
            slots = [
                index.setdefault(pair, len(index)) if ok else -1
                for pair, ok in zip(zip(keys.tables.tolist(), keys.keys.tolist(), strict=True), valid, strict=True)
            ]
            rows = torch.empty(len(index), store.dim)
            for (table, key), row in index.items():
                rows[row] = read_embeddings(store, table, torch.tensor([key]))[0]
            pairs_of.append(list(index))
            rows_of.append(rows)
            slots_of.append(torch.tensor(slots, dtype=torch.int64))

        def on_gradient(call: LookupCall, grads: list[list[Tensor | None]]) -> None:
            self.calls += 1
            for s, keys in enumerate(call.stores):
                total = torch.zeros_like(rows_of[s])
                pool_backward(
                    grads[s], rows_of[s], slots_of[s], keys.bag_offsets, keys.segment_bags, keys.segment_modes,
                    keys.weights, total,
                )  # fmt: skip
                for (table, key), grad in zip(pairs_of[s], total, strict=True):
                    place = (s, table, key)
                    self.row_gradients[place] = self.row_gradients.get(place, torch.zeros(())) + grad

        return run_lookup(call, rows_of, slots_of, on_gradient, [store.tables for store in stores])
