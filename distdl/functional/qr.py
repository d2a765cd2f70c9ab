"""QR of a tall matrix whose rows are split: one exchange, of a small matrix of each rank.

A rank's rows are A_i = Q_i R_i; with the R_i of all ranks put below each other, and their QR, A has one (TSQR: Demmel,
Grigori, Hoemmen and Langou, *Communication-optimal parallel and sequential QR and LU factorizations*, 2012)::

    A = diag(Q_1 ... Q_p) (R_1; ...; R_p),      (R_1; ...; R_p) = (U_1; ...; U_p) R,      Q = (Q_1 U_1; ...; Q_p U_p)

A block with no more rows than columns goes as it is, with Q_i = 1: that is no more than its R_i, and a QR of it would
have no derivative. All ranks work out the same R, without another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import maps
from .._types import Place
from ..errors import PartitionError, ShapeError
from ..linear_map import linear_map
from ..partition import Layout, Partition, partition_of
from .enter import SMOOTH, enter, outside
from .numeric import wide

__all__ = ["dist_tsqr"]


def dist_tsqr(a: torch.Tensor, P: Place, *, shape: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A = Q R of a matrix with at least as many rows as columns, split by rows; the diagonal of R is not negative.

    Args:
        a: (m, n), this rank's block over ``P``; half precision is worked out in float32.
        P: (p, 1) ranks, or (p,): the partition or a Layout of the rows. Blocks may be empty, or of any sizes.
        shape: the global shape, where ``P`` is a partition; then nothing is negotiated.

    Returns:
        q: (m, n), this rank's rows of Q, as a's. r: (n, n), upper triangular, one value on every rank (invariant).

    Messages: one all-gather of an (n, n) matrix of each rank (its block, where that has fewer rows); backward one
    reduce-scatter, its transpose.

    As torch.linalg.qr it has derivatives where the columns of A are independent, here those of each block that has more
    rows than columns, too.

    Raises:
        ShapeError: a is not this rank's block, of real or complex numbers; or it has fewer rows than columns in all.
        PartitionError: P splits columns.

    Example:
        >>> q, r = F.dist_tsqr(torch.tensor([[3.0], [4.0]]), dd.Partition((1, 1)))
        >>> r.abs()
        tensor([[5.]])
    """
    grid = partition_of(P)
    if grid.ndim not in (1, 2) or grid.shape[1:] not in ((), (1,)):
        raise PartitionError(
            "rows are split, and nothing else",
            expected="a partition (p, 1), or (p,)",
            actual=grid.shape,
            next_step="repartition a to rows first",
        )
    a, L, at = enter(a, _rows(a, P), layer="dist_tsqr", shape=shape, kinds=SMOOTH)
    if at is None:
        return outside(a, like=L), outside(a, like=(0, 0 if L is None else L.shape[1]))
    if L.shape[0] < L.shape[1]:
        raise ShapeError(
            "fewer rows than columns",
            expected="m >= n of an (m, n) matrix",
            actual=L.shape,
            next_step="take the QR of the transpose, or gather the matrix",
        )
    dtype, p, n = a.dtype, grid.size, L.shape[1]
    a = wide(a)
    own = p > 1 and a.shape[0] > n
    local = torch.linalg.qr(a) if own else None
    sizes = tuple(min(m, n) if p > 1 else m for m in L.sizes(0))
    stacked = Layout(L.partition, (sum(sizes), n), (sizes, None))
    u, r = torch.linalg.qr(maps.all_gather(stacked, 0)(a if local is None else local[1]))
    sign = torch.where(r.detach().diagonal().real < 0, -1, 1).to(r.dtype)
    u = stacked.shard(u * sign)
    if local is None:
        q = u
    else:
        with torch.autocast(a.device.type, enabled=False):
            q = local[0] @ u
    return q.to(dtype), _one_value(r * sign[:, None], p).to(dtype)


def _rows(a: Any, P: Place) -> Place:
    """``P`` over rows and columns."""
    grid = partition_of(P)
    if grid.ndim == 2:
        return P
    both = Partition((grid.size, 1), grid.ranks, grid.world)
    if isinstance(P, Layout):
        return Layout(
            both, (P.shape[0], a.shape[-1] if isinstance(a, torch.Tensor) and a.dim() else 0), (P.sizes(0), None)
        )
    return both


def _one_value(r: torch.Tensor, copies: int) -> torch.Tensor:
    """What every rank has worked out by itself, from here on one value: each copy has its share of the cotangent."""
    if copies == 1:
        return r
    return linear_map(lambda r: r, lambda g: g / copies, r.shape, r.shape, batched=True)(r)
