"""FuXi-alpha (Ye et al., 2025, arXiv:2502.03036): attention by meaning, time and position in channels of their own,
then a feed-forward network in two stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe_kernels.models.sequence_model import RelativeBias, SequenceModel, Sequences, seeded_linear

__all__ = ["FuXi", "FuXiLayer"]


class FuXiLayer(nn.Module):
    """One layer: adaptive multi-channel self-attention, then the multi-stage feed-forward network of the paper.

    With x = RMSNorm(X): Q, K, V = SiLU(linear(x)); three mixes of V, by SiLU(Q K') / max_length, by the learned weights
    of time differences and by those of distances, each masked to what a place sees; H = RMSNorm(their concatenation) *
    SiLU(linear(x)). First stage O = linear(H) + X, second stage Y = linear(SiLU(linear(o)) * linear(o)) + O with
    o = RMSNorm(O).

    Args:
        dim: D.
        heads: H; divides D.
        max_length: what scores are divided by, and the largest distance with a weight of its own.
        generator: where initial values come from.
    """

    def __init__(self, dim: int, heads: int, max_length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads, self.max_length = heads, max_length
        self.channels = RelativeBias(heads, max_length)
        self.before, self.mixed, self.between = nn.RMSNorm(dim), nn.RMSNorm(3 * dim), nn.RMSNorm(dim)
        self.into = seeded_linear(dim, 3 * dim, generator, bias=False)
        self.gate = seeded_linear(dim, 3 * dim, generator, bias=False)
        self.out = seeded_linear(3 * dim, dim, generator, bias=False)
        self.widen = seeded_linear(dim, 4 * dim, generator, bias=False)
        self.narrow = seeded_linear(2 * dim, dim, generator, bias=False)

    def forward(self, items: Tensor, sequences: Sequences) -> Tensor:
        """float32 [T, D] to float32 [T, D]."""
        x = self.before(items)
        q, k, v = functional.silu(self.into(x)).chunk(3, dim=-1)
        q, k, v = (sequences.pad_heads(y, self.heads) for y in (q, k, v))
        hidden = ~sequences.sees[:, None]
        by_meaning = functional.silu(q @ k.transpose(-1, -2)) / self.max_length
        by_time, by_position = self.channels.by_time(sequences), self.channels.by_position(sequences)
        mixes = [weights.masked_fill(hidden, 0.0) @ v for weights in (by_meaning, by_time, by_position)]
        joined = torch.cat([sequences.unpad_heads(mix) for mix in mixes], -1)
        first = self.out(self.mixed(joined) * functional.silu(self.gate(x))) + items
        gated, plain = self.widen(self.between(first)).chunk(2, dim=-1)
        result: Tensor = self.narrow(functional.silu(gated) * plain) + first
        return result


class FuXi(SequenceModel):
    """Layers of FuXi-alpha over the items of one table; `SequenceModel` says what goes in and out."""

    layer_class = FuXiLayer
