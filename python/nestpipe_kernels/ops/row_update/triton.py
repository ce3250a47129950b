"""row_update in Triton, for rows of a CUDA device: every rule, embeddings in any storage type, rounded to nearest.

A warp updates a few rows in one pass over their words; sums over a row take a second one, whose words are in the cache.
Floor: 8 bytes for each word of embedding, state and count, and 4 for each element of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import DataType, SparseOptimizer
from .._triton import LAUNCH, on_device_of, power_of_two, vector_width
from ..on_device import place
from ..row_storage import RowStorage, embedding_words
from . import triton_kernels as kernels
from .native import RULE_CODES
from .reference import MAX_UPDATES, bias_factors

__all__ = ["row_update"]

WARP, SUM_LANES, MOST_COLUMNS = 32, 16, 256
ROW_WISE = ("row_wise_adagrad", "row_wise_adam", "lamb")
"""Rules with a sum over the row."""
ELEMENT_STATES = {"adagrad": 1, "adam": 2, "adamw": 2, "row_wise_adam": 1, "ftrl": 2, "lamb": 2}


def row_update(
    rows: Tensor,
    grads: Tensor,
    optimizer: SparseOptimizer,
    step: int,
    lr: float | Tensor,
    mask: Tensor | None,
    storage: RowStorage,
) -> None:
    """As the package's `row_update`, arguments as checked there; rows and grads on one device."""
    num_rows, dim = grads.shape
    if not num_rows:
        return
    hyper, kind = optimizer.hyper(), storage.data_type
    words = embedding_words(dim, kind)
    header = words + optimizer.state_floats(dim)
    grads = grads if dim == 1 or grads.stride(1) == 1 else grads.contiguous()
    width, grad_width = vector_width([rows], rows.shape[1]), vector_width([grads], dim)
    columns = power_of_two(words * (4 // kind.itemsize))
    columns = SUM_LANES if optimizer.name in ROW_WISE else min(columns, MOST_COLUMNS)
    tile = max(1, WARP * min(width, grad_width) // columns)
    by_row = bool(hyper.get("bias_correction_by_row"))
    biases = _biases(rows[:, header], hyper) if by_row else rows
    factors = (1.0, 1.0, 1.0) if by_row or "beta1" not in hyper else bias_factors(hyper["beta1"], hyper["beta2"], step)
    momentum = optimizer.name == "sgd" and bool(hyper["momentum"])
    with on_device_of(rows):
        kernels.row_update_kernel[(-(-num_rows // tile),)](
            rows if kind is DataType.FP32 else rows.view(torch.int16), rows, rows.view(torch.int32),
            rows.stride(0) // width, grads, grads.stride(0) // grad_width,
            place(lr, rows) if isinstance(lr, Tensor) else rows,
            rows if mask is None else place(mask, rows).view(torch.uint8),
            biases, num_rows, 0.0 if isinstance(lr, Tensor) else lr, *factors, *_settings(optimizer.name, hyper),
            RULE=RULE_CODES[optimizer.name], KIND=kind.code, STATES=ELEMENT_STATES.get(optimizer.name, int(momentum)),
            WORDS=words, HEADER=header, MOMENTUM=momentum, NESTEROV=bool(hyper.get("nesterov")),
            DECAYED=bool(hyper.get("weight_decay")), RATES=isinstance(lr, Tensor), MASKED=mask is not None,
            BIASES=by_row, SUMMED=optimizer.name in ROW_WISE, DIM=dim, ROW_WIDTH=width, GRAD_WIDTH=grad_width,
            ROWS=tile, COLUMNS=columns, **LAUNCH,
        )  # fmt: skip


def _settings(name: str, hyper: dict[str, float]) -> tuple[float, float, float, float]:
    """Weight decay and the three numbers of a rule, as the kernel names them."""
    if name == "sgd":
        three = hyper["momentum"], 1.0 - hyper["dampening"], 0.0
    elif name == "ftrl":
        three = hyper["beta"], hyper["l1"], hyper["l2"]
    elif "beta1" in hyper:
        three = 1.0 - hyper["beta1"], 1.0 - hyper["beta2"], hyper["eps"]
    else:
        three = hyper["eps"], 0.0, 0.0
    return hyper["weight_decay"], *three


def _biases(header: Tensor, hyper: dict[str, float]) -> Tensor:
    """float32 [3, U]: c1, c2, c of each row's count, this update included. In double, by squaring, where rows are."""
    counts = header.contiguous().view(torch.int32)
    counts = torch.where(counts < MAX_UPDATES, counts + 1, counts)
    powers = []
    for name in ("beta1", "beta2"):
        base, power = hyper[name], torch.ones(len(counts), dtype=torch.float64, device=counts.device)
        for bit in range(31):
            power = torch.where((counts >> bit) & 1 == 1, power * base, power)
            base *= base
        powers.append(power)
    one, root = 1.0 - powers[0], (1.0 - powers[1]).sqrt()
    return torch.stack([1.0 / one, 1.0 / root, root / one]).to(torch.float32)
