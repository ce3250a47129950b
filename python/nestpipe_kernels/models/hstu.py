"""HSTU (Zhai et al., 2024, arXiv:2402.17152): pointwise attention without softmax, gated by the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe_kernels.models.sequence_model import RelativeBias, SequenceModel, Sequences, seeded_linear

__all__ = ["HSTU", "HSTULayer"]


class HSTULayer(nn.Module):
    """One layer, equations 1 to 3 of the paper: U, V, Q, K = SiLU(linear(norm(X))); A = SiLU(Q K' + bias) / max_length,
    masked to what a place sees; Y = linear(norm(A V) * U) + X. The bias is that of positions plus that of times.

    Args:
        dim: D.
        heads: H; divides D.
        max_length: what scores are divided by, and the largest distance with a bias of its own.
        generator: where initial values come from.
    """

    def __init__(self, dim: int, heads: int, max_length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads, self.max_length = heads, max_length
        self.bias = RelativeBias(heads, max_length)
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.into = seeded_linear(dim, 4 * dim, generator)
        self.out = seeded_linear(dim, dim, generator)

    def forward(self, items: Tensor, sequences: Sequences) -> Tensor:
        """float32 [T, D] to float32 [T, D]."""
        u, v, q, k = functional.silu(self.into(self.before(items))).chunk(4, dim=-1)
        q, k, v = (sequences.pad_heads(x, self.heads) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) + self.bias.by_position(sequences) + self.bias.by_time(sequences)
        weights = (functional.silu(scores) / self.max_length).masked_fill(~sequences.sees[:, None], 0.0)
        mixed = sequences.unpad_heads(weights @ v)
        result: Tensor = self.out(self.after(mixed) * u) + items
        return result


class HSTU(SequenceModel):
    """Layers of HSTU over the items of one table; `SequenceModel` says what goes in and out."""

    layer_class = HSTULayer
