"""Whole tensors from rank to rank: along a dim of the grid, or by pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index as as_int
from typing import Any

from .. import _torch
from .._types import Place, Tree
from ..agree import negotiate, outside
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..partition import Layout, Partition, partition_of
from ..plan import Side, key
from .call import by_map, by_shape, moved, own, rule, sized, tensor_axes


@rule
def shift_map(
    where: Place, dim: int, offset: int = 1, periodic: bool = True, shape: Sequence[int] | None = None
) -> LinearMap:
    """Every rank's tensor -> the rank ``offset`` further along ``dim``; where nothing arrives, zeros of the own shape.

    With a Layout, blocks may differ in size. Adjoint: the shift by ``-offset``.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> dd.maps.shift(dd.Partition((1,)), 0, shape=(2,))(torch.ones(2))
        tensor([1., 1.])
    """
    P, held = tensor_axes(where, shape)
    (dim,) = P.dims(dim)
    try:
        offset = as_int(offset)
    except TypeError:
        raise PartitionError(
            "the offset must be an integer",
            expected="a number of ranks",
            actual=offset,
            next_step="give a whole number, negative for the other way",
        ) from None
    n, wanted = P.shape[dim], list(held)
    source = [(i - offset) % n if periodic else i - offset for i in range(n)]
    source = [s if 0 <= s < n else None for s in source]
    if isinstance(where, Layout):
        wanted[dim] = sized(dim, [where.sizes(dim)[i if s is None else s] for i, s in enumerate(source)])
    keys = own(P)
    sent = [key(dim, source) if a.dim == dim else a for a in keys]
    return movement("shift", Side(P, (*keys, *held)), Side(P, (*sent, *wanted)))


@_torch.opaque
def shift(x: Tree, P: Place, dim: int, offset: int = 1, *, periodic: bool = True) -> Tree:
    """Pass every rank's tensor to the rank ``offset`` further along partition dim ``dim``. Adjoint: the shift back.

    Where nothing arrives (``periodic=False``) the result is zero, in the shape of this rank's own tensor. Shapes are
    equal along ``dim``, unless a Layout says how they differ. No negotiation.

    Raises:
        PartitionError: no such dim, or pairs of ranks that are not P's or stand twice.
        ShapeError: x is no tensor.

    Example:
        >>> F.shift(torch.tensor([1.0]), dd.Partition((1,)), 0)  # from the rank before; of one rank, its own
        tensor([1.])
    """
    return moved(*by_shape(x, P, lambda shape: shift_map(P, dim, offset, periodic, shape)))


@rule
def keyed(
    name: str,
    held_P: Partition,
    wanted_P: Partition,
    source: tuple[int | None, ...],
    held_shapes: tuple[tuple[int, ...], ...],
    wanted_shapes: tuple[tuple[int, ...], ...],
) -> LinearMap:
    """Whole tensors from rank to rank: place j of ``wanted_P`` gets the tensor of place ``source[j]`` of ``held_P``.

    Shapes are given for every place; ``source[j]`` may be ``None``: zeros.

    No messages until it is applied: then one for each pair of ranks that share a key.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> P = dd.Partition((2,))
        >>> A = dd.maps.keyed("swap", P, P, (1, 0), ((1,), (2,)), ((2,), (1,)))
        >>> A.simulate([torch.tensor([1]), torch.tensor([2, 3])])
        [tensor([2, 3]), tensor([1])]
    """

    def side(P: Partition, keys: Iterable[int | None], shapes: tuple[tuple[int, ...], ...]) -> Side:
        line = Partition((P.size,), P.ranks, P.world)
        return Side(line, (key(0, keys), *(sized(0, sizes) for sizes in zip(*shapes))))

    return movement(name, side(held_P, range(held_P.size), held_shapes), side(wanted_P, source, wanted_shapes))


def permute_map(
    P: Partition, pairs: Iterable[tuple[int, int]], shape: Sequence[int] | Sequence[Sequence[int]]
) -> LinearMap:
    """Tensors from source to destination ranks, ``pairs`` of (source, destination); zeros where nothing arrives.

    ``shape`` is the local shape, or a list with one for each rank of ``P``. Adjoint: the reversed pairs.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> dd.maps.permute(dd.Partition((1,)), ((0, 0),), (2,))(torch.ones(2))
        tensor([1., 1.])
    """
    P = partition_of(P)
    places = {r: i for i, r in enumerate(P.ranks)}
    source: list[int | None] = [None] * P.size
    for a, b in pairs:
        if a not in places or b not in places or source[places[b]] is not None:
            raise PartitionError(
                "not a permutation of the partition's ranks",
                partitions=P,
                expected="ranks of P, each at most once as a destination",
                actual=tuple(pairs),
                next_step="list each destination once, a source as often as you like; for sums take F.sum_reduce",
            )
        source[places[b]] = places[a]
    shapes: list[Any] = list(shape) if shape and isinstance(shape[0], (tuple, list)) else [tuple(shape)] * P.size
    wanted = tuple(shapes[j if s is None else s] for j, s in enumerate(source))
    return keyed("permute", P, P, tuple(source), tuple(shapes), wanted)


@_torch.opaque
def permute(x: Tree, P: Place, pairs: Iterable[tuple[int, int]]) -> Tree:
    """Send tensors between ranks: ``pairs`` of (source, destination) ranks of ``P``. Adjoint: the reversed pairs.

    A source may have several destinations (the adjoint then sums), a destination one source. Shapes may differ by rank,
    and are negotiated (not with a Layout). Where nothing arrives the result is zero, in this rank's own shape.

    Raises:
        PartitionError: no such dim, or pairs of ranks that are not P's or stand twice.
        ShapeError: x is no tensor.

    Example:
        >>> F.permute(torch.tensor([1.0]), dd.Partition((1,)), [(0, 0)])
        tensor([1.])
    """
    where = partition_of(P)
    try:
        pairs = tuple((as_int(a), as_int(b)) for a, b in pairs)
    except (TypeError, ValueError):
        raise PartitionError(
            "not pairs of ranks",
            expected="[(source, destination), ...]",
            actual=pairs,
            next_step="for example [(0, 1), (1, 0)]",
        ) from None
    if isinstance(P, Layout):
        return moved(*by_map(x, permute_map(where, pairs, [P.local_shape(r) for r in where.ranks])))
    xs, tree = _torch.flatten(x)
    xs, tree, reports = negotiate(xs, where, tree=tree, arguments=f"pairs={pairs}")
    if reports is None:
        return moved(outside(xs), None, tree)
    shapes = ([reports[r].leaves[i][0] for r in where.ranks] for i in range(len(xs)))
    return moved(xs, [permute_map(where, pairs, leaf) for leaf in shapes], tree)
