"""Joining the outputs of micro-batches into the output of the batch, in the caller's sample order: split's inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.capture.bags import join_bags, num_bags, select_samples
from nestpipe_kernels.capture.tree import (
    Path,
    children,
    format_path,
    is_jagged,
    is_keyed_jagged,
    is_keyed_tensor,
    rebuild,
)

__all__ = ["merge_outputs"]


def merge_outputs(outputs: Sequence[Any], indices: Sequence[Tensor], weights: Sequence[float]) -> Any:
    """The batch's output from the micro-batches' outputs.

    Per position in the (nested) output: tensors with dim 0 = n_i, keyed and jagged tensors are joined and put back in
    the caller's sample order; 0-dim tensors and floats (losses, means) become their weighted sum, added by micro-batch
    ascending; None, strings and numbers that are alike in all micro-batches stay. If only one micro-batch has samples,
    what is not per sample is passed on as it is. Outputs are detached.

    Args:
        outputs: one per micro-batch; the entry of an empty micro-batch is ignored.
        indices: int64 [n_i], the samples of each micro-batch, together every sample once.
        weights: the share of each micro-batch in means.

    Raises:
        ValueError: the numbers of arguments differ, or a part of the outputs cannot be merged (names its path).
    """
    if not len(outputs) == len(indices) == len(weights):
        raise ValueError(
            f"merge_outputs: expected one output, index tensor and weight per micro-batch, got {len(outputs)} outputs, "
            f"{len(indices)} index tensors and {len(weights)} weights"
        )
    kept = [i for i, index in enumerate(indices) if index.numel() > 0]
    if not kept:
        return None
    order = torch.argsort(torch.cat([indices[i].cpu() for i in kept]))
    sizes = [indices[i].numel() for i in kept]
    return _Merger(order, sizes, [float(weights[i]) for i in kept]).merge([outputs[i] for i in kept], ())


class _Merger:
    def __init__(self, order: Tensor, sizes: list[int], weights: list[float]) -> None:
        self.order, self.sizes, self.weights = order, sizes, weights

    def merge(self, parts: list[Any], path: Path) -> Any:
        first = parts[0]
        if any(type(part) is not type(first) for part in parts):
            got = ", ".join(type(part).__name__ for part in parts)
            raise _error(path, "the same type from every micro-batch", got)
        if isinstance(first, Tensor):
            return self._tensors([part.detach() for part in parts], path)
        if is_keyed_jagged(first) or is_jagged(first):
            return self._bags(parts, path)
        if is_keyed_tensor(first):
            if any(list(part.keys()) != list(first.keys()) for part in parts):
                raise _error(path, "the same keys from every micro-batch", [list(part.keys()) for part in parts])
            values = self._tensors([part.values().detach() for part in parts], path)
            return type(first)(keys=list(first.keys()), length_per_key=list(first.length_per_key()), values=values)
        if children(first) is not None:
            return self._containers(parts, path)
        return self._scalars(parts, path)

    def _tensors(self, parts: list[Tensor], path: Path) -> Tensor:
        if all(part.dim() > 0 and part.shape[0] == size for part, size in zip(parts, self.sizes)):
            if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
                raise _error(path, "tensors that differ in dim 0 only", [list(part.shape) for part in parts])
            return torch.cat(parts).index_select(0, self.order.to(parts[0].device))
        if len(parts) == 1:
            return parts[0].clone()
        if any(part.dim() > 0 for part in parts):
            raise _error(
                path,
                f"tensors with dim 0 = the micro-batch's samples {self.sizes}, or 0-dim tensors",
                f"shapes {[list(part.shape) for part in parts]}",
            )
        dtype = parts[0].dtype if parts[0].is_floating_point() else torch.get_default_dtype()
        total = parts[0].to(dtype) * self.weights[0]
        for part, weight in zip(parts[1:], self.weights[1:]):
            total = total + part.to(dtype) * weight
        return total

    def _bags(self, parts: list[Any], path: Path) -> Any:
        if [num_bags(part) for part in parts] != self.sizes:
            raise _error(path, f"as many bags as samples, {self.sizes}", [num_bags(part) for part in parts])
        if is_keyed_jagged(parts[0]) and any(list(part.keys()) != list(parts[0].keys()) for part in parts):
            raise _error(path, "the same keys from every micro-batch", [list(part.keys()) for part in parts])
        with torch.no_grad():
            return select_samples(join_bags(parts), self.order)

    def _containers(self, parts: list[Any], path: Path) -> Any:
        opened = [children(part) or [] for part in parts]
        steps = [[step for step, _ in part] for part in opened]
        if any(set(names) != set(steps[0]) or len(names) != len(steps[0]) for names in steps):
            got = [[step.name for step in names] for names in steps]
            raise _error(path, "the same structure from every micro-batch", got)
        tables = [dict(part) for part in opened]
        return rebuild(parts[0], [self.merge([t[step] for t in tables], (*path, step)) for step in steps[0]])

    def _scalars(self, parts: list[Any], path: Path) -> Any:
        first = parts[0]
        if isinstance(first, float) and len(parts) > 1:
            return float(sum(weight * part for weight, part in zip(self.weights, parts)))
        if len(parts) == 1 or all(part is first or bool(part == first) for part in parts):
            return first
        if type(first) is int:
            return float(sum(weight * part for weight, part in zip(self.weights, parts)))
        raise _error(path, f"the same {type(first).__name__} from every micro-batch", parts)


def _error(path: Path, expected: str, got: Any) -> ValueError:
    return ValueError(
        f"merge_outputs: {format_path(path, 'output')}: expected {expected}, got {got}; return one row per sample, or "
        f"0-dim tensors for means"
    )
