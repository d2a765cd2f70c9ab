"""Multi-head attention as a module."""

from __future__ import annotations

from typing import Any

import torch

from .. import functional as F
from .._arguments import Checked
from .._types import Device, Place
from ..agree import block_sizes
from ..errors import PartitionError
from ..partition import Layout, Partition, partition_of
from .linear import Linear

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Checked, torch.nn.Module):
    """Self-attention over a sequence and heads that lie across ranks: three :func:`distdl.functional.dist_linear` that
    split heads, :func:`distdl.functional.dist_attention`, and one that sums over them.

    Args:
        P: a partition of (batch, seq, heads), or a Layout of (batch, seq, num_heads). Batch and seq may be uneven, and
            of a Layout heads too, of which each rank has whole ones.
        embed_dim, num_heads, bias: as torch.nn.MultiheadAttention's (``batch_first=True``).
        num_kv_heads: of keys and values, each of which serves as many of the queries' heads. Default: ``num_heads``.
        rotary_base: of :func:`distdl.functional.rotary_embedding` of queries and keys, by their places in the sequence
            (``positions``, where rows stand in another order); ``None``: not turned. A bare partition asks for the
            places, where seq is split.
        options: of dist_attention: ``causal``, ``window``, ``documents``, ``method``, ``kernel`` and so on.

    Raises:
        PartitionError: sizes that the number of heads, or (of a bare partition) of ranks along heads, does not divide;
            a Layout of another number of heads.

    Example:
        >>> layer = dd.nn.MultiheadAttention(dd.Partition((1, 1, 1)), 8, 2)
        >>> layer(torch.ones(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear

    def __init__(
        self,
        P: Place,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        rotary_base: float | None = None,
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
        by = 1 if isinstance(P, Layout) else h
        if min(num_heads, kv) < 1 or embed_dim % num_heads or num_heads % kv or num_heads % by or kv % by:
            raise PartitionError(
                "heads are not shared out evenly",
                partitions=P,
                expected=f"embed_dim a multiple of num_heads, that of num_kv_heads, and that of {by} ranks along heads",
                actual={"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": kv},
                next_step="choose other numbers, or split seq instead of heads; a Layout of (batch, seq, num_heads) "
                "may split them unevenly",
            )
        if isinstance(P, Layout) and P.shape[2] != num_heads:
            raise PartitionError(
                "the Layout is of another number of heads",
                partitions=P,
                expected=f"(batch, seq, {num_heads})",
                actual=P.shape,
                next_step="dd.Layout(P, (batch, seq, num_heads))",
            )
        self.features, self.heads, self.options = embed_dim // num_heads, (num_heads, kv), options
        self.rotary_base = rotary_base
        self.rows = Partition((b, s, h, 1), grid.ranks, grid.world)
        columns = Partition((b, s, 1, h), grid.ranks, grid.world)
        kind: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, "x_layout": "replicated"}
        for name, n in (("q_proj", num_heads), ("k_proj", kv), ("v_proj", kv)):
            place = _whole_heads(P, self.rows, (n * self.features, embed_dim), 2, n)
            setattr(self, name, Linear(place, embed_dim, n * self.features, y_layout="replicated", **kind))
        place = _whole_heads(P, columns, (embed_dim, embed_dim), 3, num_heads)
        self.out_proj = Linear(place, embed_dim, embed_dim, y_layout="invariant", **kind)
        self.place = _over_heads(P, self.features)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            layer.reset_parameters()

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention of x: (batch, seq, embed_dim), this rank's rows, one value on all ranks along heads; so is the
        result.

        Args:
            options: more of dist_attention, or others than the constructor was given: ``mask``, ``order``.
        """
        x = F.mark_varying(x, self.rows, 2)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.features)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        more = dict(self.options, **options)
        if self.rotary_base is not None:
            places = self._places(q, more.get("order")) if more.get("positions") is None else more["positions"]
            q, k = (F.rotary_embedding(t, places, base=self.rotary_base) for t in (q, k))
        if isinstance(self.place, Layout):
            more["kv_shape"] = self.place.with_shape((self.place.shape[0], self.heads[1], *self.place.shape[2:]))
        y = F.dist_attention(q, k, v, self.place, **more)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _places(self, q: torch.Tensor, order: Any) -> torch.Tensor:
        """The places in the sequence of this rank's rows of q: (batch, heads, seq, features)."""
        at, own = self.rows.index(), torch.arange(q.shape[2], device=q.device)
        if at is None:  # turned by anything: there is nothing
            return own
        L = self.place
        sizes = L.sizes(2) if isinstance(L, Layout) else block_sizes(q.shape[2], self.rows, 1, None)
        if order is not None:
            line = Layout(Partition((len(sizes),), world=self.rows.world), (sum(sizes),))
            return F.positions(line, 0, order, rank=line.partition.ranks[at[1]], device=q.device)
        return own + sum(sizes[: at[1]])


def _whole_heads(P: Place, over: Partition, weight: tuple[int, int], dim: int, heads: int) -> Place:
    """Where a weight of shape ``weight`` lies, whose grid dim ``dim`` is one of heads: whole ones on each rank, as many
    as it has of ``P``."""
    if not isinstance(P, Layout):
        return over
    cut = P.with_shape((*P.shape[:2], heads)).sizes(2)
    splits: list[tuple[int, ...] | None] = [P.sizes(0), P.sizes(1), None, None]
    splits[dim] = tuple(weight[dim - 2] // heads * n for n in cut)
    return Layout(over, (*P.shape[:2], *weight), tuple(splits))


def _over_heads(P: Place, features: int) -> Place:
    """(batch, heads, seq, features) where ``P`` is (batch, seq, heads)."""
    grid = partition_of(P)
    over = Partition((*grid.shape, 1), grid.ranks, grid.world)
    if not isinstance(P, Layout):
        return over.permute((0, 2, 1, 3))
    return Layout(over, (*P.shape, features), (P.sizes(0), P.sizes(1), P.sizes(2), None)).permute((0, 2, 1, 3))
