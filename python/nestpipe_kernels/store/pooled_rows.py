"""Rows pooled and updated where they lie: what a process that owns all rows does without copying any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._native import core
from ..ops._row_checks import pointer
from ..ops.lookup_pool import pool_forward
from ..ops.lookup_pool.arguments import check_matrices, checked_bags, checked_grads
from ..ops.lookup_pool.native import bag_arguments, matrix_arguments
from ..ops.row_update.arguments import check_rule, check_step, checked_lr, checked_mask
from ..ops.row_update.native import per_row_arguments, settings_arguments
from ..types import KeyStatus, OccurrenceRows, Retrieval, SparseOptimizer, StoreKeys
from .checks import check_batch, check_keys, check_tensor
from .journal import Journal

if TYPE_CHECKING:
    from .given_values import GivenValues

__all__ = ["PooledRows"]


class PooledRows:
    """Part of EmbeddingStore: pooling and row updates by handle; results as those of ops.lookup_pool and
    ops.row_update on copies, bit for bit."""

    dim: int
    optimizer: SparseOptimizer
    _given: GivenValues
    _native: Any
    _removals: int

    @property
    def pools_in_place(self) -> bool:
        """Whether `update_pooled` works here: rows are float32 and lie in memory."""
        found: bool = self._native.pools_in_place
        return found

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever keys may have got or lost rows: handles of keys are as they were while it stays."""
        return self._removals, self._native.sequence()

    def retrieve_occurrences(
        self, keys: Tensor, tables: Tensor, valid: Tensor | None, batch: int
    ) -> OccurrenceRows | None:
        """As `retrieve` of the distinct ones of keys int64 [n] (tables int32 [n]) and their numbers of occurrences,
        where all of them have rows and no table of the store evicts; else None, and nothing has changed.

        Args:
            valid: bool [n], False for padding, which is not looked at; None: none is.
            batch: as in `retrieve`.

        Raises:
            ValueError, TypeError: as `retrieve`.
        """
        check_keys("retrieve_occurrences", keys, tables)
        check_batch(batch)
        size = keys.numel()
        if valid is not None:
            check_tensor("retrieve_occurrences", "valid", valid, torch.bool, (size,))
        slots = torch.empty(size, dtype=torch.int32)
        handles, found = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
        of_tables = torch.empty(size, dtype=torch.int32)
        journal = Journal(core().RetrievalJournal(), self._removals)
        out = slots.data_ptr(), handles.data_ptr(), found.data_ptr(), of_tables.data_ptr()
        count = self._native.retrieve_occurrences(
            keys.data_ptr(), tables.data_ptr(), size, pointer(valid), batch, out, journal.native
        )
        if count < 0:
            return None
        status = torch.from_numpy(np.full(count, KeyStatus.FOUND.value, dtype=np.uint8))
        retrieval = Retrieval(handles[:count], status, journal)
        return OccurrenceRows(retrieval, slots, found[:count], of_tables[:count])

    def read_embeddings(self, handles: Tensor, keys: Tensor, tables: Tensor) -> Tensor:
        """See EmbeddingStore."""
        raise NotImplementedError

    def pool(
        self,
        handles: Tensor,
        keys: Tensor,
        tables: Tensor,
        slots: Tensor,
        bags: StoreKeys,
        outs: Sequence[Tensor],
    ) -> None:
        """`pool_forward` of the rows of handles int64 [U]; a handle of -1 reads the default row of its key.

        Args:
            handles, keys, tables: int64, int64, int32 [U].
            slots: int32 or int64 [n], which of them each occurrence is; -1 is padding.
            bags: the occurrences' bags, segments and weights. outs: a matrix per segment.

        Raises:
            IndexError: a handle that was never given out, or a slot outside [-1, U).
            TypeError, ValueError: as `ops.lookup_pool.pool_forward`. Nothing has been written then.
        """
        check_keys("pool", keys, tables)
        check_tensor("pool", "handles", handles, torch.int64, (keys.numel(),))
        listed = slots, bags.bag_offsets, bags.segment_bags, bags.segment_modes
        if not self.pools_in_place or self._given.absent(keys, tables, handles) is not None:
            pool_forward(self.read_embeddings(handles, keys, tables), *listed, outs, bags.weights)
            return
        checked = checked_bags(*listed, bags.weights)
        check_matrices("outs", outs, checked, self.dim)
        self._native.pool(
            handles.data_ptr(),
            keys.data_ptr(),
            tables.data_ptr(),
            keys.numel(),
            *bag_arguments(checked),
            matrix_arguments(outs),
        )

    def pool_keys(self, bags: StoreKeys, outs: Sequence[Tensor]) -> bool:
        """`pool` of the rows of the keys of `bags`, found as they are needed; of those that are `valid` all must have
        a row.

        Returns:
            False where one has none, or not `pools_in_place`: `outs` may be written in part then.

        Raises:
            TypeError, ValueError: as `ops.lookup_pool.pool_forward`. Nothing has been written then.
        """
        if not self.pools_in_place:
            return False
        keys, valid = bags.keys, bags.valid
        check_keys("pool_keys", keys, bags.tables)
        if valid is not None:
            check_tensor("pool_keys", "valid", valid, torch.bool, (keys.numel(),))
        checked = checked_bags(keys, bags.bag_offsets, bags.segment_bags, bags.segment_modes, bags.weights)
        check_matrices("outs", outs, checked, self.dim)
        (_, _, *listed), *segments = bag_arguments(checked)
        done: bool = self._native.pool_keys(
            keys.data_ptr(),
            bags.tables.data_ptr(),
            keys.numel(),
            pointer(valid),
            (0, False, *listed),
            *segments,
            matrix_arguments(outs),
        )
        return done

    def update_pooled(
        self,
        handles: Tensor,
        slots: Tensor,
        bags: StoreKeys,
        grads: Sequence[Tensor | None],
        step: int,
        lr: float | Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """`pool_backward` from zero and `row_update` of the rows of distinct handles int64 [U]; -1 is skipped.

        Args:
            slots, bags, grads: as in `pool` and `ops.lookup_pool.pool_backward`; no segment with MAX.
            step, lr, mask: as in `ops.row_update.row_update`.

        Raises:
            ValueError: not `pools_in_place`, a segment with MAX, or as the two operations. TypeError, IndexError: as
                they do. Nothing has changed then.
        """
        check_tensor("update_pooled", "handles", handles, torch.int64, (None,))
        checked = checked_bags(slots, bags.bag_offsets, bags.segment_bags, bags.segment_modes, bags.weights)
        matrices = checked_grads(grads, checked, self.dim)
        check_rule(self.optimizer)
        check_step(step)
        lr, mask = checked_lr(lr, handles.numel()), checked_mask(mask, handles.numel())
        self._native.update_pooled(
            handles.data_ptr(),
            handles.numel(),
            *bag_arguments(checked),
            matrix_arguments(matrices),
            per_row_arguments(lr, mask),
            settings_arguments(self.optimizer, step),
        )
