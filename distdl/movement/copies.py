"""Copies and sums: each is the other's transpose, and *varying* or *invariant* says which of the two a derivative is.

Definitions after Hewett & Grady, arXiv:2006.03108, and, for the invariant pair, Megatron-LM's f and g (Shoeybi et al.,
arXiv:1909.08053).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import _torch
from .._types import Dims, Place, Tree
from ..agree import negotiate, outside
from ..boxes import is_int
from ..errors import PartitionError
from ..held import name_when_checking, tag
from ..linear_map import LinearMap, Move, Space, movement
from ..partition import Layout, Partition, partition_of
from ..plan import Axis, Plan, Side, key
from ..world import world
from .call import Movement, by_map, by_shape, local_shape, moved, own, rule, tensor_axes, transposed
from .peers import keyed

# ---------------------------------------------------------------- from a smaller grid to a larger one, and back


@rule
def broadcast_map(P_src: Place, P_dst: Partition, shape: Sequence[int] | None = None) -> LinearMap:
    """The tensor of each rank of ``P_src`` -> its copies on ``P_dst``, numpy-like. Adjoint: sum_reduce.

    ``P_src`` may be a Layout (then blocks may differ in size); otherwise ``shape`` is the copied tensor's own shape.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> P, shape = dd.Partition((1,)), (2,)
        >>> dd.maps.broadcast(P, P, shape)(torch.ones(2))
        tensor([1., 1.])
    """
    where, tensor = tensor_axes(P_src, shape)
    src = left_padded(where, P_dst)
    wanted_keys = [key(d, range(n) if src.shape[d] == n else (0,) * n) for d, n in enumerate(P_dst.shape)]
    pad = src.ndim - where.ndim
    held = [a if a.dim is None else Axis(a.dim + pad, a.runs, a.extents) for a in tensor]
    wanted = []
    for a in held:
        if a.dim is None or src.shape[a.dim] == P_dst.shape[a.dim]:
            wanted.append(a)
        else:
            copies = P_dst.shape[a.dim]
            wanted.append(Axis(a.dim, a.runs * copies, a.extents * copies))
    return movement("broadcast", Side(src, (*own(src), *held)), Side(P_dst, (*wanted_keys, *wanted)))


@_torch.opaque
def broadcast(x: Tree, P_src: Place, P_dst: Place, *, shape: Sequence[int] | None = None) -> Tree:
    """Copy the tensor of each rank of ``P_src`` along the dims in which ``P_dst`` is larger. Adjoint: sum_reduce.

    Args:
        x: any shape; it may differ between the ranks of ``P_src``.
        P_src, P_dst: like numpy shapes: ``P_src`` is padded with 1s on the left, and each dim is equal or 1.
        shape: the copied tensor's own shape, when it is the same on all ranks; left out, shapes are negotiated.

    Raises:
        PartitionError: partitions whose dims are neither equal nor 1 where they should be.
        AgreementError: on every rank, where shapes, dtypes or calls disagree.

    Example:
        >>> P = dd.Partition((1,))
        >>> F.broadcast(torch.tensor([1.0, 2.0]), P, P)  # of P_src = Partition((1,)) to any P_dst
        tensor([1., 2.])
    """
    return moved(*_copying(x, P_src, P_dst, shape))


@rule
def sum_reduce_map(P_src: Partition, P_dst: Place, shape: Sequence[int] | None = None) -> LinearMap:
    """Tensors of ``P_src`` -> their sums on the smaller ``P_dst``: broadcast's transpose, with its arguments
    swapped.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> P, shape = dd.Partition((1,)), (2,)
        >>> dd.maps.sum_reduce(P, P, shape)(torch.ones(2))
        tensor([1., 1.])
    """
    return transposed("sum_reduce", broadcast_map(P_dst, P_src, shape))


@_torch.opaque
def sum_reduce(x: Tree, P_src: Place, P_dst: Place, *, shape: Sequence[int] | None = None) -> Tree:
    """Sum the tensors of ``P_src`` along the dims in which ``P_dst`` is 1. Adjoint: broadcast.

    Raises:
        PartitionError: partitions whose dims are neither equal nor 1 where they should be.
        AgreementError: on every rank, where shapes, dtypes or calls disagree.

    Messages: one from each rank to that which has its sum; or the engine's own reduction.

    Example:
        >>> P = dd.Partition((1,))
        >>> F.sum_reduce(torch.tensor([1.0, 2.0]), P, P)
        tensor([1., 2.])
    """
    return moved(*_copying(x, P_dst, P_src, shape, summed=True))


def _copying(x: Any, small: Place, big: Place, shape: Sequence[int] | None, summed: bool = False) -> Movement:
    """broadcast and sum_reduce: one copies ``x`` from ``small`` to ``big``, the other (``summed``) sums it back."""

    def map_of(small: Place, big: Partition, shape: Sequence[int] | None = None) -> LinearMap:
        return sum_reduce_map(big, small, shape) if summed else broadcast_map(small, big, shape)

    few, many = partition_of(small), partition_of(big)
    if isinstance(big, Layout):
        small = _source_layout(few, big)
    if isinstance(small, Layout):
        return by_map(x, map_of(small, many))
    source = broadcast_source(few, many)
    if shape is not None:
        return by_map(x, map_of(few, many, local_shape(shape)))
    xs, tree = _torch.flatten(x)
    holders = many if summed else few
    xs, tree, reports = negotiate(xs, holders, (few, many), tree=tree)
    if reports is None:
        return outside(xs), None, tree
    maps = []
    for i in range(len(xs)):
        shapes = tuple(reports[r].leaves[i][0] for r in holders.ranks)
        if summed:
            shapes = _summed_shapes(shapes, source, many)
        if len(set(shapes)) == 1:
            maps.append(map_of(few, many, shapes[0]))
        else:
            copying = keyed("broadcast", few, many, source, shapes, tuple(shapes[s] for s in source))
            maps.append(transposed("sum_reduce", copying) if summed else copying)
    return xs, maps, tree


@rule
def left_padded(P_src: Partition, P_dst: Partition) -> Partition:
    """``P_src`` with 1s put before its dims until it has as many as ``P_dst``; each dim must then be equal or 1."""
    shape = (1,) * (P_dst.ndim - P_src.ndim) + P_src.shape
    if len(shape) != P_dst.ndim or any(a not in (1, b) for a, b in zip(shape, P_dst.shape)):
        raise PartitionError(
            "the partitions do not broadcast",
            partitions=(P_src, P_dst),
            expected=f"each dim of {shape} to be 1 or that of {P_dst.shape}",
            actual=P_src.shape,
            next_step="compare from the last dim, as numpy does: only dims of size 1, or left out, are repeated",
        )
    return Partition(shape, P_src.ranks, P_src.world)


@rule
def broadcast_source(P_src: Partition, P_dst: Partition) -> tuple[int, ...]:
    """For each place of ``P_dst`` the place of ``P_src`` that it copies."""
    src = left_padded(P_src, P_dst)
    places = {r: i for i, r in enumerate(src.ranks)}
    coords = [[c if n > 1 else 0 for c, n in zip(P_dst.index(r), src.shape)] for r in P_dst.ranks]
    return tuple(places[src.rank_at(c)] for c in coords)


def _source_layout(small: Partition, big: Layout) -> Layout:
    """The layout over ``small`` whose copies (or summands) are the blocks of ``big``: equal ones where dims are
    copied."""
    small = left_padded(small, big.partition)
    shape: list[int] = []
    splits: list[tuple[int, ...] | None] = []
    for d, n in enumerate(small.shape):
        sizes = big.sizes(d)
        if n == len(sizes):
            shape.append(big.shape[d])
            splits.append(sizes)
        elif len(set(sizes)) == 1:
            shape.append(sizes[0])
            splits.append(None)
        else:
            raise PartitionError(
                f"blocks of different sizes in the copied dim {d}",
                partitions=big,
                actual=sizes,
                expected="equal blocks",
                next_step="repartition that dim to equal blocks first, or leave it whole",
            )
    return Layout(small, tuple(shape), tuple(splits))


def _summed_shapes(
    shapes: tuple[tuple[int, ...], ...], source: tuple[int, ...], many: Partition
) -> tuple[tuple[int, ...], ...]:
    """The shapes of the sums of tensors of ``shapes``, of which the one at place j goes to place ``source[j]``."""
    found: dict[int, tuple[int, ...]] = {}
    for r, place, shape in zip(many.ranks, source, shapes):
        if found.setdefault(place, shape) != shape:
            raise PartitionError(
                "tensors of different shapes cannot be summed",
                expected=found[place],
                actual=f"{shape} on rank {r}",
                next_step="pass tensors of one shape on the ranks that are summed",
            )
    return tuple(found[place] for place in range(len(found)))


# ---------------------------------------------------------------- over the ranks of a fibre


def _all_sum(where: Place, shape: Sequence[int] | None, dims: Dims) -> tuple[Plan, Plan, int]:
    """(identity, all-sum over ``dims``, number of copies)."""
    P, axes = tensor_axes(where, shape)
    dims = P.dims(dims)
    if isinstance(where, Layout):
        for d in dims:
            if len(set(where.sizes(d))) > 1:
                raise PartitionError(
                    f"blocks of different sizes cannot be summed over dim {d}",
                    expected="equal blocks",
                    actual=where.sizes(d),
                    next_step="repartition to equal blocks first, or sum over another dim",
                )
    rest = [d for d in range(P.ndim) if d not in dims]
    alone, summed = Side(P, (*own(P), *axes)), Side(P, (*own(P, rest), *axes))
    return Plan(alone, alone), Plan(summed, summed), math.prod(P.shape[d] for d in dims)


def _grid_dims(dims: Any) -> Any:
    """``dims`` of a partition, as a rule takes them."""
    if isinstance(dims, dict):
        raise PartitionError(
            "these are dims of the partition",
            expected="an int, or several",
            actual=dims,
            next_step="name the partition dims to sum over; tensor dims stay as they are",
        )
    if type(dims) is tuple or not hasattr(dims, "__iter__") or is_int(dims):
        return dims
    return tuple(dims)  # hashable, as lists and arrays are not


@rule
def all_sum_reduce_map(where: Place, shape: Sequence[int] | None = None, dims: Dims = None) -> LinearMap:
    """Every rank gets the sum over its fibre along ``dims``: sum_reduce, then broadcast. Its own adjoint.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> A = dd.maps.all_sum_reduce(dd.Partition((1,)), (2,))
        >>> A(torch.ones(2)), A.T(torch.ones(2))
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    _, summed, _ = _all_sum(where, shape, dims)
    return movement("all_sum_reduce", summed.held, summed.wanted)


@_torch.opaque
def all_sum_reduce(x: Tree, P: Place, dims: Dims = None) -> Tree:
    """The sum over partition dims ``dims`` (None: all), on every rank: k varying copies. Its own adjoint. No
    negotiation.

    Raises:
        PartitionError: no such dims of P, or ranks beyond the world.
        ShapeError: x is no tensor, and no pytree of tensors.

    Example:
        >>> F.all_sum_reduce(torch.tensor([1.0, 2.0]), dd.Partition((1,)))  # on k ranks: k times that
        tensor([1., 2.])
    """
    along = _grid_dims(dims)
    return moved(*by_shape(x, P, lambda shape: all_sum_reduce_map(P, shape, along)))


@rule
def mark_varying_map(where: Place, shape: Sequence[int] | None = None, dims: Dims = None) -> LinearMap:
    """Invariant -> varying along ``dims``: the identity, whose adjoint is the all-reduce. Megatron's f, JAX's pvary.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> A = dd.maps.mark_varying(dd.Partition((1,)), (2,))
        >>> A(torch.ones(2)), A.T(torch.ones(2))
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    same, summed, copies = _all_sum(where, shape, dims)
    return LinearMap((Move("mark_varying", same, summed, domain=Space(copies)),))


@_torch.opaque
def mark_varying(x: Tree, P: Place, dims: Dims = None) -> Tree:
    """Invariant -> varying along partition dims ``dims``: the identity, whose adjoint is the all-reduce.

    Data parallelism is ``w = F.mark_varying(w, P)``: every rank uses its copy, and the gradient is their sum. A layer
    with ``params="invariant"`` that gets the result itself does not sum over these ranks again. It changes no shape: a
    rank outside ``P`` gets back what it passed.

    Raises:
        PartitionError: no such dims of P, or ranks beyond the world.
        ShapeError: x is no tensor, and no pytree of tensors.

    Example:
        >>> w = F.mark_varying(torch.tensor(2.0, requires_grad=True), dd.Partition((1,)))
        >>> (3 * w).item()  # and the gradient is summed over the ranks
        6.0
    """
    where = partition_of(P)
    if not where.active:
        world(where.world).check(where)
        return x
    name_when_checking(x)
    along = _grid_dims(dims)
    y = moved(*by_shape(x, P, lambda shape: mark_varying_map(P, shape, along)))
    tag(y, x, P, along)
    return y


@rule
def invariant_sum_map(where: Place, shape: Sequence[int] | None = None, dims: Dims = None) -> LinearMap:
    """Varying -> invariant: the all-reduce along ``dims``, whose adjoint is the identity. Megatron's g, JAX's psum.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> A = dd.maps.invariant_sum(dd.Partition((1,)), (2,))
        >>> A(torch.ones(2)), A.T(torch.ones(2))
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    same, summed, copies = _all_sum(where, shape, dims)
    return LinearMap((Move("invariant_sum", summed, same, range=Space(copies)),))


@_torch.opaque
def invariant_sum(x: Tree, P: Place, dims: Dims = None) -> Tree:
    """Varying -> invariant: the all-reduce along ``dims``, whose adjoint is the identity. What losses should end
    with.

    Raises:
        PartitionError: no such dims of P, or ranks beyond the world.
        ShapeError: x is no tensor, and no pytree of tensors.

    Example:
        >>> F.invariant_sum(torch.tensor(2.0), dd.Partition((1,)))  # one value, known to all ranks
        tensor(2.)
    """
    along = _grid_dims(dims)
    return moved(*by_shape(x, P, lambda shape: invariant_sum_map(P, shape, along)))
