"""Rows of a global tensor in another order than by rank: zigzag, stripes, block-cyclic, or any runs.

Where rows differ in the work that they make (causal attention, triangular factors), contiguous blocks give it to the
last ranks. An **order** says which ranges of a dim the rank at each coordinate has, one after the other:

    "zigzag"      of 2p balanced chunks the rank at coordinate i has chunks i and 2p-1-i
    3             block-cyclic: blocks of 3 go round the ranks (ScaLAPACK); 1: stripes
    (((0, 2), (5, 6)), ((2, 5),))     the ranges of each coordinate; each index of the dim stands in one of them

A reordered tensor is an ordinary one of layout :func:`reorder_layout`, of which :func:`positions` says what was where.
As every index is held once and wanted once, the map is a permutation, and its adjoint its inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from .._torch import opaque
from .._types import Place, Tree
from ..boxes import balanced, is_int, joined
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..partition import Layout, partition_of
from ..plan import Axis, Side
from .call import by_layout, laid_out, moved, rule, transposed
from .options import plain

Order = str | int | Sequence[Sequence[tuple[int, int]]]
Ranges = tuple[tuple[int, int], ...]


def _zigzag(n: int, p: int) -> tuple[Ranges, ...]:
    stops = list(accumulate(balanced(n, 2 * p), initial=0))
    return tuple(tuple((stops[c], stops[c + 1]) for c in (i, 2 * p - 1 - i)) for i in range(p))


def _cyclic(n: int, p: int, block: int) -> tuple[Ranges, ...]:
    return tuple(tuple((a, min(a + block, n)) for a in range(i * block, n, p * block)) for i in range(p))


def _are_ranges(order: Any, n: int, p: int) -> bool:
    """Whether ``order`` has p entries of pairs of integers that hold each of 0 .. n-1 once."""
    if not isinstance(order, tuple) or len(order) != p or not all(isinstance(some, tuple) for some in order):
        return False
    pairs = [pair for some in order for pair in some]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and all(map(is_int, pair)) for pair in pairs):
        return False
    end = 0
    for start, stop in sorted(pair for pair in pairs if pair[0] != pair[1]):
        if start != end or stop < start:
            return False
        end = stop
    return end == n


@rule
def _ranges(where: Layout, dim: int, order: Any) -> tuple[Ranges, ...]:
    """The ranges of ``dim`` that each coordinate has."""
    n, p = where.shape[dim], where.partition.shape[dim]
    if order == "zigzag":
        return _zigzag(n, p)
    if is_int(order) and order >= 1:
        return _cyclic(n, p, order)
    if not _are_ranges(order, n, p):
        raise PartitionError(
            "not an order of the rows",
            partitions=where,
            expected=f'"zigzag", a block size >= 1, or for each of {p} coordinates ranges (start, stop) that together '
            f"hold each of 0 .. {n - 1} once",
            actual=order,
            next_step='F.reorder(x, P, dim, "zigzag"), or ranges as ((0, 2), (5, 6)) for each coordinate',
        )
    return tuple(tuple((start, stop) for start, stop in some if start < stop) for some in order)


def _asked(where: Any, dim: int, order: Any) -> tuple[Layout, int, tuple[Ranges, ...]]:
    where = laid_out(where)
    dim = where.partition.dim(dim)
    return where, dim, _ranges(where, dim, order if isinstance(order, str) else plain(order, "order"))


def _ordered(where: Layout, dim: int, ranges: tuple[Ranges, ...]) -> Layout:
    splits: list[Any] = list(where.splits or (None,) * where.ndim)
    splits[dim] = tuple(sum(stop - start for start, stop in some) for some in ranges)
    return Layout(where.partition, where.shape, tuple(splits))


def runs_of(where: Layout, dim: int, order: Order) -> tuple[Ranges, ...]:
    """The ranges of ``dim`` that the rank at each coordinate has, in their order."""
    return _asked(where, dim, order)[2]


@opaque
def reorder_layout(L: Layout, dim: int, order: Order) -> Layout:
    """The layout of a tensor of layout ``L`` after :func:`reorder`: other block sizes along ``dim``. Pure.

    Args:
        L: the layout of the tensor in its own order.
        dim, order: as for :func:`reorder`.

    Raises:
        PartitionError: no such dim, or no such order.

    Example:
        >>> F.reorder_layout(dd.Layout(dd.Partition((2,)), (10,)), 0, "zigzag").sizes(0)
        (5, 5)
    """
    return _ordered(*_asked(L, dim, order))


@opaque
def positions(
    L: Layout,
    dim: int,
    order: Order | None = None,
    *,
    rank: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The global indices along ``dim`` of the rows that a rank has after :func:`reorder`. Pure, and no message.

    What masks, position embeddings and rotations of a reordered sequence are made of.

    Args:
        L: the layout of the tensor in its own order.
        dim, order: as for :func:`reorder`; ``None``: the order is not changed.
        rank: whose rows; default: this process's.
        device: of the result.

    Returns:
        int64, of as many elements as the rank has rows; none for a rank outside.

    Raises:
        PartitionError: no such dim, or no such order.

    Example:
        >>> F.positions(dd.Layout(dd.Partition((2,)), (8,)), 0, "zigzag", rank=0)
        tensor([0, 1, 6, 7])
    """
    if order is None:
        dim = laid_out(L).partition.dim(dim)
        ranges: tuple[Ranges, ...] = tuple((block,) for block in L.blocks(dim))
    else:
        L, dim, ranges = _asked(L, dim, order)
    coords = L.partition.index(rank)
    runs = () if coords is None else ranges[coords[dim]]
    every = [torch.arange(start, stop, dtype=torch.int64, device=device) for start, stop in runs]
    return torch.cat(every) if every else torch.empty(0, dtype=torch.int64, device=device)


@opaque
def zigzag_positions(
    L: Layout, dim: int, *, rank: int | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """:func:`positions` after :func:`zigzag`: the global indices of the rows that a rank then has.

    Args:
        L, dim, rank, device: as for :func:`positions`.

    Example:
        >>> F.zigzag_positions(dd.Layout(dd.Partition((2,)), (8,)), 0, rank=1)
        tensor([2, 3, 4, 5])
    """
    return positions(L, dim, "zigzag", rank=rank, device=device)


@rule
def reorder_map(where: Layout, dim: int, order: Order) -> LinearMap:
    """Blocks -> the rows of ``dim`` that ``order`` gives each rank. Adjoint: its inverse, back to blocks.

    Args:
        where: the layout of the tensor in its own order, with any block sizes.
        dim, order: as for :func:`distdl.functional.reorder`; ranges in tuples.

    Example:
        >>> A = dd.maps.reorder(dd.Layout(dd.Partition((1,)), (3,)), 0, (((1, 3), (0, 1)),))
        >>> A(torch.arange(3)), A.T(A(torch.arange(3)))
        (tensor([1, 2, 0]), tensor([0, 1, 2]))
    """
    where, dim, ranges = _asked(where, dim, order)
    held, runs = Side.of(where), []
    for some, size in zip(ranges, _ordered(where, dim, ranges).sizes(dim)):
        at, found = 0, []
        for start, stop in some:
            found.append((start, stop, at))
            at += stop - start
        n = where.shape[dim]
        runs.append(joined(found) if size else ((n, n, 0),))
    axes = list(held.axes)
    axes[dim] = Axis(dim, tuple(runs), _ordered(where, dim, ranges).sizes(dim))
    return movement("reorder", held, Side(where.partition, tuple(axes)))


@rule
def _inverse(where: Layout, dim: int, order: Order) -> LinearMap:
    return transposed("reorder", reorder_map(where, dim, order))


@rule
def _inverse_of_blocks(ordered: Layout, dim: int, order: Order) -> LinearMap:
    """The same, where the layout that ranks have agreed on is that of the reordered tensor."""
    dim = laid_out(ordered).partition.dim(dim)
    splits: list[Any] = list(ordered.splits or (None,) * ordered.ndim)
    splits[dim] = None
    where = Layout(ordered.partition, ordered.shape, tuple(splits))
    wished = reorder_layout(where, dim, order)
    if wished.sizes(dim) != ordered.sizes(dim):
        raise PartitionError(
            "the blocks are not those of this order",
            partitions=ordered.partition,
            expected=wished.sizes(dim),
            actual=ordered.sizes(dim),
            next_step="pass what F.reorder gave with the same dim and order",
        )
    return _inverse(where, dim, order)


@opaque
def reorder(
    x: Tree, P: Place, dim: int, order: Order, *, inverse: bool = False, shape: Sequence[int] | None = None
) -> Tree:
    """Give each rank other rows of dim ``dim``: zigzag, stripes, block-cyclic, or any runs. Adjoint: the inverse.

    Args:
        x: this rank's block over ``P``, any dtype; with ``inverse`` its block of the reordered tensor.
        P: partition or Layout of the tensor in its own order; blocks may be uneven or empty.
        dim: the dim whose rows are dealt out.
        order: ``"zigzag"``: of 2p balanced chunks (p ranks along ``dim``) the rank at coordinate i has chunks i and
            2p-1-i, so that every rank has as much of a triangle (Zhu, ring-flash-attention, 2024). An int b:
            block-cyclic, blocks of b go round the ranks (ScaLAPACK); 1: stripes (Brandon et al., arXiv:2311.09431).
            Or for each coordinate its ranges (start, stop), in which each index stands once.
        inverse: from that order back to blocks; of a bare partition to balanced ones.
        shape: the global shape; left out (and without a Layout), block sizes are negotiated.

    Returns:
        This rank's block of ``x.index_select(dim, order)`` of the global tensor, laid out by :func:`reorder_layout`.

    Messages: one to each rank that wants some of this one's rows; zigzag of equal blocks: at most 2.

    Raises:
        PartitionError: no such dim, no such order, or (``inverse``) blocks of another order.

    Example:
        >>> F.reorder(torch.arange(6), dd.Partition((1,)), 0, (((4, 6), (0, 4)),))
        tensor([4, 5, 0, 1, 2, 3])
    """
    order = order if isinstance(order, str) else plain(order, "order")
    if not inverse:
        return moved(*by_layout(x, P, shape, reorder_map, dim, order))
    bare = shape is None and partition_of(P) is P
    return moved(*by_layout(x, P, shape, _inverse_of_blocks if bare else _inverse, dim, order))


@opaque
def zigzag(x: Tree, P: Place, dim: int, *, inverse: bool = False, shape: Sequence[int] | None = None) -> Tree:
    """:func:`reorder` by ``"zigzag"``: rank i of p gets chunks i and 2p-1-i of 2p, as causal attention is balanced.

    Args:
        x, P, dim, inverse, shape: as for :func:`reorder`.

    Example:
        >>> F.zigzag(torch.arange(4), dd.Partition((1,)), 0)  # of p ranks the first gets chunks 0 and 2p-1
        tensor([0, 1, 2, 3])
    """
    return reorder(x, P, dim, "zigzag", inverse=inverse, shape=shape)


@opaque
def block_cyclic(
    x: Tree, P: Place, dim: int, block: int = 1, *, inverse: bool = False, shape: Sequence[int] | None = None
) -> Tree:
    """:func:`reorder` by blocks of ``block`` rows that go round the ranks; 1: stripes.

    Args:
        x, P, dim, inverse, shape: as for :func:`reorder`.
        block: rows of one block, at least 1.

    Example:
        >>> F.block_cyclic(torch.arange(4), dd.Partition((1,)), 0, 2)
        tensor([0, 1, 2, 3])
    """
    if not is_int(block) or block < 1:
        raise PartitionError(
            "not a block size",
            partitions=P,
            expected="an integer, at least 1",
            actual=block,
            next_step="1 gives stripes",
        )
    return reorder(x, P, dim, block, inverse=inverse, shape=shape)
