"""Neighbourhood attention: each query of a grid attends to a window of keys around it, of the same size for all.

Each rank fetches the keys that its queries see, and gathers each query's own from them, dim by dim. At a border the
window is moved inside (it keeps its size); with a dilation d a dim is d interleaved ones, each with borders of its own:
the rule of NATTEN (Hassani et al., arXiv:2204.07143, arXiv:2209.15001).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import _torch
from .._arguments import checked
from .._types import Place, Size
from ..agree import resolve
from ..errors import PartitionError, ShapeError
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.options import per_dim
from ..partition import Layout, partition_of
from .attention_arguments import enter_three
from .enter import check_block, outside
from .numeric import wide

__all__ = ["dist_neighborhood_attention"]


@lru_cache(maxsize=256)
def _table(n: int, k: int, d: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of n queries of a dim its k keys, and whether it sees them; both (n, k)."""
    with torch.inference_mode(False), _torch.no_modes():  # they are kept
        i = torch.arange(n, device="cpu")[:, None]
        place, residue = i // d, i % d
        size = (n - residue + d - 1) // d  # of the dim that has this residue
        first = place - k + 1 if causal else torch.minimum((place - k // 2).clamp(min=0), size - k)
        key = first + torch.arange(k, device="cpu")
        return (key.clamp(min=0) * d + residue), key >= 0


@lru_cache(maxsize=256)
def _windows(L: Layout, k: tuple[int, ...], d: tuple[int, ...], causal: tuple[bool, ...]) -> HaloSpec:
    tables = [_table(*options)[0] for options in zip(L.shape[2:-1], k, d, causal)]

    def need(dim: int, a: int, b: int) -> tuple[int, int]:
        if not 2 <= dim < L.ndim - 1:
            return a, b
        keys = tables[dim - 2][a:b]
        return int(keys.min()), int(keys.max()) + 1

    return HaloSpec.needs(L, None, L, need, "none")


def _options(P: Place, n: int, kernel_size: Size, dilation: Size, causal: object):
    k, d = per_dim(kernel_size, n, "kernel_size"), per_dim(dilation, n, "dilation")
    flags = tuple(causal) if isinstance(causal, (tuple, list)) else (causal,) * n
    if min((*k, *d)) < 1 or len(flags) != n or not all(isinstance(f, bool) for f in flags):
        raise PartitionError(
            "not a neighbourhood",
            partitions=P,
            expected="kernel_size and dilation >= 1, and True or False for causal, one or one for each dim",
            actual={"kernel_size": kernel_size, "dilation": dilation, "causal": causal},
            next_step="give one value for all dims, or one for each",
        )
    return k, d, flags


@checked
def dist_neighborhood_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    P: Place,
    kernel_size: Size,
    dilation: Size = 1,
    causal: bool | tuple[bool, ...] = False,
    *,
    scale: float | None = None,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Attention of each query of a grid to ``kernel_size`` keys of each dim around it.

    Args:
        q, k, v: (batch, heads, *space, features), this rank's blocks of one shape, floating, any number of spatial
            dims.
        P: partition or Layout of all three. All dims but the features may be split.
        kernel_size: an int, or one for each spatial dim. Of an even one, one key more lies before the query.
        dilation: the distance of neighbouring keys, likewise.
        causal: in these dims a query sees the keys up to itself: at the border fewer, not others.
        scale: default 1/√features.
        shape: the global shape; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block, in q's layout. Derivatives of every order and mode. Memory: each query's own keys and values.

    Messages: one halo exchange of k and v together; its transpose in backward. Windows wider than a neighbour's block
    reach further.

    After Hassani et al., arXiv:2204.07143, and Hassani & Shi, arXiv:2209.15001.

    Raises:
        PartitionError: sizes below 1, a window larger than a dim, or features that are split.
        ShapeError: tensors that are not alike.

    Example:
        >>> q = torch.ones(1, 1, 4, 2)
        >>> F.dist_neighborhood_attention(q, q, q, dd.Partition((1, 1, 1, 1)), 3).shape
        torch.Size([1, 1, 4, 2])
    """
    ndim = partition_of(P).ndim
    n = ndim - 3
    if n < 1:
        raise PartitionError(
            "neighbourhoods are of (batch, heads, *space, features)",
            partitions=P,
            expected="4 dims or more",
            actual=ndim,
            next_step="give the partition one dim for each; 1: not split",
        )
    size, holes, flags = _options(P, n, kernel_size, dilation, causal)
    q, k, v = enter_three(q, k, v, P)
    (q, k, v), layouts = resolve([q, k, v], P, shape)
    if layouts is None:
        return outside(q, k, v, like=q.shape if q.dim() == ndim else (0,) * ndim)
    L = layouts[0]
    _check(L, layouts, size, holes)
    if L.partition.index() is None:
        return outside(q, k, v, like=L)
    for what, x in (("q", q), ("k", k), ("v", v)):
        check_block(x, L, what)
    spec = _windows(L, size, holes, flags)
    k, v = halo_exchange((k, v), spec)
    seen = None
    box, window = L.box(), spec.out_box
    assert box is not None and window is not None  # a rank outside has gone
    for i in range(n):
        (a, b), d = box[i + 2], 2 + 2 * i
        table, sees = _table(L.shape[i + 2], size[i], holes[i], flags[i])
        index = (table[a:b] - window[i + 2][0]).flatten().to(q.device)
        k, v = (t.index_select(d, index).unflatten(d, (b - a, size[i])) for t in (k, v))
        if flags[i]:
            part = sees[a:b].to(q.device)
            part = part.reshape(
                *(b - a if j == i else 1 for j in range(n)), *(size[i] if j == i else 1 for j in range(n))
            )
            seen = part if seen is None else seen & part
    order = (0, 1, *range(2, 2 + 2 * n, 2), *range(3, 3 + 2 * n, 2), 2 + 2 * n)
    k, v = (wide(t).permute(order).flatten(2 + n, 1 + 2 * n) for t in (k, v))
    scores = (k @ wide(q).unsqueeze(-1)).squeeze(-1) * (L.shape[-1] ** -0.5 if scale is None else float(scale))
    if seen is not None:
        every = torch.broadcast_to(seen, (*seen.shape[:n], *size)).flatten(n)
        scores = scores.masked_fill(~every, float("-inf"))
    return (scores.softmax(-1).unsqueeze(-2) @ v).squeeze(-2).to(q.dtype)


def _check(L: Layout, layouts: list[Layout], k: tuple[int, ...], d: tuple[int, ...]) -> None:
    if any(M != L for M in layouts):
        shapes = [M.shape for M in layouts]
        alike = len(set(shapes)) == 1
        raise ShapeError(
            "q, k and v are not alike" if not alike else "q, k and v lie in different blocks",
            partitions=L,
            expected=L if alike else L.shape,
            actual=layouts if alike else shapes,
            next_step="repartition them first" if alike else "pass tensors of one shape",
        )
    if L.partition.shape[-1] != 1 or any(a * b > n for a, b, n in zip(k, d, L.shape[2:-1])):
        raise PartitionError(
            "the neighbourhood does not fit",
            partitions=L,
            expected=f"kernel_size x dilation <= {L.shape[2:-1]}, and features that are not split",
            actual=(k, d),
            next_step="use a smaller window, and a partition whose last size is 1",
        )
