"""Wholes along some dims, on every rank: gathered, and, the transpose, summed and cut into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _torch
from .._types import Dims, Place, Tree
from ..agree import negotiate, outside
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..partition import Layout, Partition, partition_of
from ..plan import Side, split, whole
from ..world import world
from .call import by_layout, by_map, by_shape, laid_out, local_shape, moved, own, rule, transposed


@rule
def _gather_layout(where: Layout, dims: tuple[int, ...]) -> LinearMap:
    held = Side.of(where)
    wanted = tuple(whole(n) if d in dims else held.axes[d] for d, n in enumerate(where.shape))
    return movement("all_gather", held, Side(where.partition, wanted))


def all_gather_map(where: Layout, dims: Dims = None) -> LinearMap:
    """Blocks -> the whole along ``dims``, on every rank of the fibre. Adjoint: reduce_scatter.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> A = dd.maps.all_gather(L)
        >>> A.T(A(torch.arange(3)))
        tensor([0, 1, 2])
    """
    return _gather_layout(where, laid_out(where).partition.dims(dims))


@rule
def _gathering(P: Partition, shape: tuple[int, ...], pairs: Any, sizes: Any) -> LinearMap:
    wanted = [whole(n) for n in shape]
    held = list(wanted)
    for t, d in pairs:
        line = Partition((P.shape[d],), world=P.world)
        held[t] = split(Layout(line, (shape[t],), sizes and (dict(sizes)[t],)).blocks(0), d)
    keys = own(P, set(range(P.ndim)).difference(d for _, d in pairs))
    return movement("all_gather", Side(P, (*keys, *held)), Side(P, (*keys, *wanted)))


def gathering(
    P: Partition, shape: Sequence[int], pairs: Mapping[int, int], sizes: Mapping[int, Sequence[int]] | None = None
) -> LinearMap:
    """all_gather in full generality.

    Args:
        shape: the gathered tensor's shape on this rank.
        pairs: {tensor dim: partition dim} that it is gathered along.
        sizes: {tensor dim: block sizes}; default balanced.

    No messages until it is applied: then one to each rank along the dims.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> A = dd.maps.gathering(dd.Partition((2,)), (3,), {0: 0})
        >>> A.simulate([torch.tensor([1, 2]), torch.tensor([3])])
        [tensor([1, 2, 3]), tensor([1, 2, 3])]
    """
    return _gathering(P, tuple(shape), tuple(pairs.items()), tuple(sizes.items()) if sizes else None)


@_torch.opaque
def all_gather(x: Tree, P: Place, dims: Dims | dict[int, int] = None, *, shape: Sequence[int] | None = None) -> Tree:
    """Every rank gets the whole of ``x`` along ``dims``; blocks may be uneven or empty. Adjoint: reduce_scatter.

    Args:
        dims: tensor dims that are also partition dims, or {tensor dim: partition dim}; ``None``: all.
        shape: shape of the gathered tensor on this rank; left out, block sizes are negotiated.

    Raises:
        PartitionError, ShapeError: partitions that do not fit x, or an x that is not this rank's block.
        AgreementError: on every rank of a bare partition, where blocks or calls disagree.

    Example:
        >>> F.all_gather(torch.arange(3), dd.Layout(dd.Partition((1,)), (3,)))
        tensor([0, 1, 2])
    """
    if isinstance(P, Layout):
        return moved(*by_layout(x, P, shape, all_gather_map, _layout_dims(P, dims)))
    partition_of(P)
    if shape is not None:
        shape = local_shape(shape)
        return moved(*by_map(x, gathering(P, shape, gathered_dims(P, len(shape), dims))))
    xs, tree = _torch.flatten(x)
    xs, tree, reports = negotiate(xs, P, tree=tree, arguments=f"dims={dims}")
    if reports is None:
        return moved(_outside(xs, P, dims), None, tree)
    shapes = ({r: reports[r].leaves[i][0] for r in P.ranks} for i in range(len(xs)))
    return moved(xs, [_negotiated(P, dims, leaf) for leaf in shapes], tree)


def reduce_scatter_map(where: Layout, dims: Dims = None) -> LinearMap:
    """Every rank's whole (along ``dims``) -> the sum's blocks of ``where``. Adjoint: all_gather.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> A = dd.maps.reduce_scatter(L)
        >>> A.T(A(torch.arange(3)))
        tensor([0, 1, 2])
    """
    return transposed("reduce_scatter", all_gather_map(where, dims))


@_torch.opaque
def reduce_scatter(x: Tree, P: Place, dims: Dims | dict[int, int] = None) -> Tree:
    """Sum ``x`` over the ranks along ``dims``, and keep this rank's block of the sum. Adjoint: all_gather. No
    negotiation.

    Args:
        x: whole along ``dims`` on every rank; a Layout's splits, else balanced blocks, say who keeps what.
        dims: as for :func:`all_gather`.

    Raises:
        PartitionError: no such dims of P, or ranks beyond the world.
        ShapeError: x is no tensor, and no pytree of tensors.

    Example:
        >>> F.reduce_scatter(torch.arange(3), dd.Layout(dd.Partition((1,)), (3,)))
        tensor([0, 1, 2])
    """
    if isinstance(P, Layout):
        return moved(*by_map(x, reduce_scatter_map(P, _layout_dims(P, dims))))
    if not partition_of(P).active:  # what such a rank passes need not have as many dims
        world(P.world).check(P)
        xs, tree = _torch.flatten(x)
        return moved(_outside(xs, P, dims), None, tree)

    def summing(shape: tuple[int, ...]) -> LinearMap:
        return transposed("reduce_scatter", gathering(P, shape, gathered_dims(P, len(shape), dims)))

    return moved(*by_shape(x, P, summing))


def _outside(xs: Sequence[Any], P: Partition, dims: Any) -> list[torch.Tensor]:
    """What a rank outside of P gets; with a dictionary of dims a tensor may have other dims than P."""
    return outside(xs, None if isinstance(dims, dict) else P)


def gathered_dims(P: Partition, ndim: int, dims: Any) -> dict[int, int]:
    """``dims`` of all_gather and reduce_scatter as {tensor dim: partition dim}."""
    if isinstance(dims, dict):
        named = [(t % ndim if isinstance(t, int) and -ndim <= t < ndim else -1, P.dim(d)) for t, d in dims.items()]
    else:
        if P.ndim != ndim:
            raise PartitionError(
                "the tensor has another number of dims than the partition",
                partitions=P,
                expected=P.ndim,
                actual=ndim,
                next_step="give dims as {tensor dim: partition dim}",
            )
        named = [(d, d) for d in P.dims(dims)]
    pairs = dict(named)
    if -1 in pairs or not len(named) == len(pairs) == len(set(pairs.values())):
        raise PartitionError(
            "dims do not fit",
            partitions=P,
            actual=dims,
            expected=f"distinct partition dims for tensor dims below {ndim}",
            next_step="name each partition dim once, at the tensor dim that lies along it",
        )
    return pairs


def _layout_dims(L: Layout, dims: Any) -> Any:
    """With a Layout, tensor dims are partition dims, also where they are spelt as a dict."""
    if not isinstance(dims, dict):
        return dims
    if any(t != d for t, d in gathered_dims(L.partition, L.ndim, dims).items()):
        raise PartitionError(
            "a Layout splits tensor dim d along partition dim d",
            partitions=L,
            actual=dims,
            expected="equal dims",
            next_step="pass the Partition instead of the Layout",
        )
    return tuple(dims)


def _negotiated(P: Partition, dims: Any, shapes: dict[int, tuple[int, ...]]) -> LinearMap:
    """The all_gather of blocks of these shapes (by rank), for this rank's fibre; every rank checks every fibre."""
    ndim = len(shapes[P.ranks[0]])
    pairs = gathered_dims(P, ndim, dims)
    sizes_of_fibre: dict[tuple[int, ...], dict[Any, int]] = {}
    for r in P.ranks:
        coords = P.index(r)
        fibre = tuple(c for d, c in enumerate(coords) if d not in pairs.values())
        sizes = sizes_of_fibre.setdefault(fibre, {})
        for t in range(ndim):
            place = (t, coords[pairs[t]] if t in pairs else None)
            if sizes.setdefault(place, shapes[r][t]) != shapes[r][t]:
                raise PartitionError(
                    f"the blocks do not fit together in dim {t}",
                    partitions=P,
                    expected=f"size {sizes[place]}",
                    actual=f"{shapes[r][t]} on rank {r}",
                    next_step="blocks of one gathered tensor need equal sizes in every other dim",
                )
    mine = P.index()
    sizes = sizes_of_fibre[tuple(c for d, c in enumerate(mine) if d not in pairs.values())]
    blocks = {t: tuple(sizes[t, c] for c in range(P.shape[d])) for t, d in pairs.items()}
    shape = tuple(sum(blocks[t]) if t in blocks else sizes[t, None] for t in range(ndim))
    return gathering(P, shape, pairs, blocks)
