"""Multi-head attention as a module."""

from __future__ import annotations

from typing import Any

import torch

from .. import functional as F
from .._arguments import Checked
from .._types import Device, Place
from ..errors import PartitionError
from ..partition import Layout, Partition, partition_of
from .linear import Linear

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Checked, torch.nn.Module):
    """Self-attention over a sequence and heads that lie across ranks: three :func:`distdl.functional.dist_linear` that
    split heads, :func:`distdl.functional.dist_attention`, and one that sums over them.

    Args:
        P: a partition of (batch, seq, heads), or a Layout of (batch, seq, num_heads). Batch and seq may be uneven.
        embed_dim, num_heads, bias: as torch.nn.MultiheadAttention's (``batch_first=True``).
        num_kv_heads: of keys and values, each of which serves as many of the queries' heads. Default: ``num_heads``.
        options: of dist_attention: ``causal``, ``window``, ``documents``, ``method``, ``kernel`` and so on.

    Raises:
        PartitionError: sizes that the number of heads, or of ranks along heads, does not divide.
    """

    def __init__(
        self,
        P: Place,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        grid = partition_of(P)
        if grid.ndim != 3:
            raise PartitionError(
                "attention is of (batch, seq, heads)",
                partitions=P,
                expected="3 dims",
                actual=grid.ndim,
                next_step="give the partition one dim for each; 1: not split",
            )
        kv = num_heads if num_kv_heads is None else num_kv_heads
        b, s, h = grid.shape
        if min(num_heads, kv) < 1 or embed_dim % num_heads or num_heads % kv or num_heads % h or kv % h:
            raise PartitionError(
                "heads are not shared out evenly",
                partitions=P,
                expected=f"embed_dim a multiple of num_heads, that of num_kv_heads, and that of {h} ranks along heads",
                actual={"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": kv},
                next_step="choose other numbers, or split seq instead of heads",
            )
        self.features, self.heads, self.options = embed_dim // num_heads, (num_heads, kv), options
        self.rows = Partition((b, s, h, 1), grid.ranks, grid.world)
        kind: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        split = {"x_layout": "replicated", "y_layout": "replicated", **kind}
        self.q_proj = Linear(self.rows, embed_dim, embed_dim, **split)
        self.k_proj = Linear(self.rows, embed_dim, kv * self.features, **split)
        self.v_proj = Linear(self.rows, embed_dim, kv * self.features, **split)
        columns = Partition((b, s, 1, h), grid.ranks, grid.world)
        self.out_proj = Linear(columns, embed_dim, embed_dim, x_layout="replicated", y_layout="invariant", **kind)
        self.place = _over_heads(P, self.features)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            layer.reset_parameters()

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention of x: (batch, seq, embed_dim), this rank's rows, one value on all ranks along heads; so is the
        result.

        Args:
            options: more of dist_attention, or others than the constructor was given: ``mask``, ``positions``.
        """
        x = F.mark_varying(x, self.rows, 2)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.features)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        more = dict(self.options, **options)
        if isinstance(self.place, Layout):
            more["kv_shape"] = self.place.with_shape((self.place.shape[0], self.heads[1], *self.place.shape[2:]))
        y = F.dist_attention(q, k, v, self.place, **more)
        return self.out_proj(y.transpose(1, 2).flatten(2))


def _over_heads(P: Place, features: int) -> Place:
    """(batch, heads, seq, features) where ``P`` is (batch, seq, heads)."""
    grid = partition_of(P)
    b, s, h = grid.shape
    ranks = tuple(grid.rank_at((i, j, k)) for i in range(b) for k in range(h) for j in range(s))
    over = Partition((b, h, s, 1), ranks, grid.world)
    if not isinstance(P, Layout):
        return over
    B, S, H = P.shape
    return Layout(over, (B, H, S, features), (P.sizes(0), P.sizes(2), P.sizes(1), None))
