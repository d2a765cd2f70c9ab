"""One factory for each data movement: layouts in, :class:`LinearMap` out. Cached: equal arguments give the same map.

Each line is the movement's mathematics: what is held, and what is wanted. ``where`` is a Layout, or a Partition
together with the local tensor's ``shape``. Names as in MPI; definitions after Hewett & Grady, arXiv:2006.03108, and,
for the invariant pair, Megatron-LM's f and g (Shoeybi et al., arXiv:1909.08053).
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import index as as_int

from .errors import PartitionError
from .halo import HaloSpec
from .linear_map import LinearMap, Move, Space, movement
from .partition import Layout, Partition, partition_of
from .plan import Axis, Plan, Side, key, split, whole

_cached = lru_cache(maxsize=1024, typed=True)  # dim 1.0 is an error, also after dim 1


def layout_over(P, shape, op: str) -> Layout:
    """``P`` as the layout of a tensor of global shape ``shape``: a Layout stays as it is, and must fit."""
    if partition_of(P, op).ndim != len(shape):
        raise PartitionError(
            "the partition has another number of dims than the tensor",
            op=op,
            partitions=P,
            expected=f"{len(shape)} dims",
            actual=P.ndim,
            next_step="give the partition one dim for each dim of the tensor (1: not split)",
        )
    if not isinstance(P, Layout):
        return Layout(P, shape)
    if P.shape != tuple(shape):
        raise PartitionError(
            "the layouts have different global shapes",
            op=op,
            partitions=P,
            expected=tuple(shape),
            actual=P.shape,
            next_step="use layouts of one global shape",
        )
    return P


def on_one_rank(root: int, ndim: int, world: str) -> Partition:
    """The partition that holds a whole tensor on ``root``."""
    return Partition((1,) * ndim, (root,), world)


def _laid_out(where, op: str) -> Layout:
    if not isinstance(where, Layout):
        raise PartitionError(
            "a map needs the global shape",
            op=op,
            expected="a Layout",
            actual=repr(where),
            partitions=None,
            next_step="dd.Layout(P, shape)",
        )
    return where


@_cached
def repartition(where: Layout, P_out: Partition | Layout) -> LinearMap:
    """Blocks of one layout -> blocks of another, of the same global shape (an all-to-all in general)."""
    where = _laid_out(where, "repartition")
    return movement("repartition", Side.of(where), Side.of(layout_over(P_out, where.shape, "repartition")))


@_cached
def scatter(where: Layout, root: int = 0) -> LinearMap:
    """The whole tensor on rank ``root`` -> the blocks of ``where``. Adjoint: gather."""
    where = _laid_out(where, "scatter")
    one = Layout(on_one_rank(root, where.ndim, where.partition.world), where.shape)
    return movement("scatter", Side.of(one), Side.of(where))


@_cached
def gather(where: Layout, root: int = 0) -> LinearMap:
    """Blocks -> the whole tensor on rank ``root``. Adjoint: scatter."""
    where = _laid_out(where, "gather")
    one = Layout(on_one_rank(root, where.ndim, where.partition.world), where.shape)
    return movement("gather", Side.of(where), Side.of(one))


def _local(where, shape):
    """(partition, tensor axes): from a Layout blocks, tied to its grid dims; from a partition the local shape as it
    is."""
    if isinstance(where, Layout):
        return where.partition, [_sized(d, where.sizes(d)) for d in range(where.ndim)]
    if shape is None:
        _laid_out(where, "a map")
    return partition_of(where), [whole(n) for n in shape]


def _sized(dim: int, sizes) -> Axis:
    """A dim of which the rank at coordinate i has its own ``sizes[i]`` elements, counted from 0 (under a key)."""
    return Axis(dim, tuple(((0, n, 0),) for n in sizes), tuple(sizes))


def _own(P: Partition, dims=None) -> list[Axis]:
    """Key axes that tell ranks apart along ``dims`` (default: all)."""
    return [key(d, range(P.shape[d])) for d in P.dims(dims)]


def _all_sum(where, shape, dims, op) -> tuple[Plan, Plan, int]:
    """(identity, all-sum over ``dims``, number of copies)."""
    P, axes = _local(where, shape)
    dims = P.dims(dims, op)
    if isinstance(where, Layout):
        for d in dims:
            if len(set(where.sizes(d))) > 1:
                raise PartitionError(
                    f"blocks of different sizes cannot be summed over dim {d}",
                    op=op,
                    partitions=where,
                    expected="equal blocks",
                    actual=where.sizes(d),
                    next_step="repartition to equal blocks first, or sum over another dim",
                )
    rest = [d for d in range(P.ndim) if d not in dims]
    alone, summed = Side(P, (*_own(P), *axes)), Side(P, (*_own(P, rest), *axes))
    return Plan(alone, alone), Plan(summed, summed), math.prod(P.shape[d] for d in dims)


@_cached
def all_sum_reduce(where, shape=None, dims=None) -> LinearMap:
    """Every rank gets the sum over its fibre along ``dims``: sum_reduce, then broadcast. Its own adjoint."""
    _, summed, _ = _all_sum(where, shape, dims, "all_sum_reduce")
    return movement("all_sum_reduce", summed.held, summed.wanted)


@_cached
def mark_varying(where, shape=None, dims=None) -> LinearMap:
    """Invariant -> varying along ``dims``: the identity, whose adjoint is the all-reduce. Megatron's f, JAX's pvary."""
    same, summed, copies = _all_sum(where, shape, dims, "mark_varying")
    return LinearMap((Move("mark_varying", same, summed, domain=Space(copies)),))


@_cached
def invariant_sum(where, shape=None, dims=None) -> LinearMap:
    """Varying -> invariant: the all-reduce along ``dims``, whose adjoint is the identity. Megatron's g, JAX's psum."""
    same, summed, copies = _all_sum(where, shape, dims, "invariant_sum")
    return LinearMap((Move("invariant_sum", summed, same, range=Space(copies)),))


def gathered_dims(P: Partition, ndim: int, dims, op: str) -> dict[int, int]:
    """``dims`` of all_gather and reduce_scatter as {tensor dim: partition dim}."""
    if isinstance(dims, dict):
        named = [(t % ndim if isinstance(t, int) and -ndim <= t < ndim else -1, P.dim(d, op)) for t, d in dims.items()]
    else:
        if P.ndim != ndim:
            raise PartitionError(
                "the tensor has another number of dims than the partition",
                op=op,
                partitions=P,
                expected=P.ndim,
                actual=ndim,
                next_step="give dims as {tensor dim: partition dim}",
            )
        named = [(d, d) for d in P.dims(dims, op)]
    pairs = dict(named)
    if -1 in pairs or not len(named) == len(pairs) == len(set(pairs.values())):
        raise PartitionError(
            "dims do not fit",
            op=op,
            partitions=P,
            actual=dims,
            expected=f"distinct partition dims for tensor dims below {ndim}",
            next_step="name each partition dim once, at the tensor dim that lies along it",
        )
    return pairs


@_cached
def _gather_along(P: Partition, shape, blocks) -> LinearMap:
    """``blocks``: ((tensor dim, partition dim, ((start, stop), ...)), ...)."""
    cut = {t: split(table, d) for t, d, table in blocks}
    keys = _own(P, [d for d in range(P.ndim) if d not in [axis.dim for axis in cut.values()]])
    wanted = [whole(n) for n in shape]
    held = [cut.get(t, axis) for t, axis in enumerate(wanted)]
    return movement("all_gather", Side(P, (*keys, *held)), Side(P, (*keys, *wanted)))


def gathering(P: Partition, shape, pairs: dict[int, int], sizes=None) -> LinearMap:
    """all_gather in full generality.

    Args:
        shape: the gathered tensor's shape on this rank.
        pairs: {tensor dim: partition dim} that it is gathered along.
        sizes: {tensor dim: block sizes}; default balanced.
    """
    return _gathering(P, tuple(shape), tuple(pairs.items()), tuple(sizes.items()) if sizes else None)


@_cached
def _gathering(P: Partition, shape, pairs, sizes) -> LinearMap:
    blocks = []
    for t, d in pairs:
        line = Partition((P.shape[d],), world=P.world)
        blocks.append((t, d, Layout(line, (shape[t],), sizes and (dict(sizes)[t],)).blocks(0)))
    return _gather_along(P, shape, tuple(blocks))


@_cached
def _gather_layout(where: Layout, dims: tuple[int, ...]) -> LinearMap:
    held = Side.of(where)
    wanted = tuple(whole(n) if d in dims else held.axes[d] for d, n in enumerate(where.shape))
    return movement("all_gather", held, Side(where.partition, wanted))


def all_gather(where: Layout, dims=None) -> LinearMap:
    """Blocks -> the whole along ``dims``, on every rank of the fibre. Adjoint: reduce_scatter."""
    return _gather_layout(where, _laid_out(where, "all_gather").partition.dims(dims, "all_gather"))


def reduce_scatter(where: Layout, dims=None) -> LinearMap:
    """Every rank's whole (along ``dims``) -> the sum's blocks of ``where``. Adjoint: all_gather."""
    return transposed("reduce_scatter", all_gather(where, dims))


@_cached
def transposed(name: str, A: LinearMap) -> LinearMap:
    """The transpose of a movement as a movement of its own name."""
    return movement(name, A.plan.wanted, A.plan.held)


@_cached
def shift(where, dim: int, offset: int = 1, periodic: bool = True, shape=None) -> LinearMap:
    """Every rank's tensor -> the rank ``offset`` further along ``dim``; where nothing arrives, zeros of the own shape.

    With a Layout, blocks may differ in size. Adjoint: the shift by ``-offset``.
    """
    P, held = _local(where, shape)
    (dim,) = P.dims(dim, "shift")
    try:
        offset = as_int(offset)
    except TypeError:
        raise PartitionError(
            "the offset must be an integer",
            op="shift",
            partitions=P,
            expected="a number of ranks",
            actual=offset,
            next_step="give a whole number, negative for the other way",
        ) from None
    n, wanted = P.shape[dim], list(held)
    source = [(i - offset) % n if periodic else i - offset for i in range(n)]
    source = [s if 0 <= s < n else None for s in source]
    if isinstance(where, Layout):
        sizes = [where.sizes(dim)[i if s is None else s] for i, s in enumerate(source)]
        wanted[dim] = _sized(dim, sizes)
    keys = _own(P)
    moved = [key(dim, source) if a.dim == dim else a for a in keys]
    return movement("shift", Side(P, (*keys, *held)), Side(P, (*moved, *wanted)))


@_cached
def keyed(name: str, held_P: Partition, wanted_P: Partition, source: tuple, held_shapes, wanted_shapes) -> LinearMap:
    """Whole tensors from rank to rank: place j of ``wanted_P`` gets the tensor of place ``source[j]`` of ``held_P``.

    Shapes are given for every place; ``source[j]`` may be ``None``: zeros.
    """

    def side(P, keys, shapes):
        line = Partition((P.size,), P.ranks, P.world)
        return Side(line, (key(0, keys), *(_sized(0, sizes) for sizes in zip(*shapes))))

    return movement(name, side(held_P, range(held_P.size), held_shapes), side(wanted_P, source, wanted_shapes))


def permute(P: Partition, pairs, shape) -> LinearMap:
    """Tensors from source to destination ranks, ``pairs`` of (source, destination); zeros where nothing arrives.

    ``shape`` is the local shape, or a list with one for each rank of ``P``. Adjoint: the reversed pairs.
    """
    P = partition_of(P, "permute")
    places = {r: i for i, r in enumerate(P.ranks)}
    source: list[int | None] = [None] * P.size
    for a, b in pairs:
        if a not in places or b not in places or source[places[b]] is not None:
            raise PartitionError(
                "not a permutation of the partition's ranks",
                op="permute",
                partitions=P,
                expected="ranks of P, each at most once as a destination",
                actual=tuple(pairs),
                next_step="list each destination once, a source as often as you like; for sums take F.sum_reduce",
            )
        source[places[b]] = places[a]
    shapes = list(shape) if shape and isinstance(shape[0], (tuple, list)) else [tuple(shape)] * P.size
    wanted = tuple(shapes[j if s is None else s] for j, s in enumerate(source))
    return keyed("permute", P, P, tuple(source), tuple(shapes), wanted)


@_cached
def left_padded(P_src: Partition, P_dst: Partition, op: str) -> Partition:
    """``P_src`` with 1s put before its dims until it has as many as ``P_dst``; each dim must then be equal or 1."""
    shape = (1,) * (P_dst.ndim - P_src.ndim) + P_src.shape
    if len(shape) != P_dst.ndim or any(a not in (1, b) for a, b in zip(shape, P_dst.shape)):
        raise PartitionError(
            "the partitions do not broadcast",
            op=op,
            partitions=(P_src, P_dst),
            expected=f"each dim of {shape} to be 1 or that of {P_dst.shape}",
            actual=P_src.shape,
            next_step="compare from the last dim, as numpy does: only dims of size 1, or left out, are repeated",
        )
    return Partition(shape, P_src.ranks, P_src.world)


def broadcast_source(P_src: Partition, P_dst: Partition, op: str) -> tuple[int, ...]:
    """For each place of ``P_dst`` the place of ``P_src`` that it copies."""
    src = left_padded(P_src, P_dst, op)
    places = {r: i for i, r in enumerate(src.ranks)}
    coords = [[c if n > 1 else 0 for c, n in zip(P_dst.index(r), src.shape)] for r in P_dst.ranks]
    return tuple(places[src.rank_at(c)] for c in coords)


@_cached
def broadcast(P_src, P_dst: Partition, shape=None) -> LinearMap:
    """The tensor of each rank of ``P_src`` -> its copies on ``P_dst``, numpy-like. Adjoint: sum_reduce.

    ``P_src`` may be a Layout (then blocks may differ in size); otherwise ``shape`` is the copied tensor's own shape.
    """
    where = P_src.partition if isinstance(P_src, Layout) else P_src
    src = left_padded(where, P_dst, "broadcast")
    pad = src.ndim - where.ndim
    wanted_keys = [key(d, range(n) if src.shape[d] == n else (0,) * n) for d, n in enumerate(P_dst.shape)]
    _, tensor = _local(P_src, shape)
    held = [a if a.dim is None else Axis(a.dim + pad, a.runs, a.extents) for a in tensor]
    wanted = []
    for a in held:
        if a.dim is None or src.shape[a.dim] == P_dst.shape[a.dim]:
            wanted.append(a)
        else:
            copies = P_dst.shape[a.dim]
            wanted.append(Axis(a.dim, a.runs * copies, a.extents * copies))
    return movement("broadcast", Side(src, (*_own(src), *held)), Side(P_dst, (*wanted_keys, *wanted)))


@_cached
def sum_reduce(P_src: Partition, P_dst, shape=None) -> LinearMap:
    """Tensors of ``P_src`` -> their sums on the smaller ``P_dst``: broadcast's transpose, with its arguments
    swapped."""
    return transposed("sum_reduce", broadcast(P_dst, P_src, shape))


@_cached
def halo_exchange(spec: HaloSpec) -> LinearMap:
    """Blocks -> windows. Adjoint: ghosts' cotangents are added to their owners."""
    if not isinstance(spec, HaloSpec):
        raise PartitionError(
            "not a HaloSpec",
            op="halo_exchange",
            expected="dd.HaloSpec(P, shape, left, right)",
            actual=spec,
            next_step="dd.HaloSpec(P, shape, widths), or dd.HaloSpec.window(P, shape, kernel)",
            partitions=None,
        )
    plan = spec.plan()
    return movement("halo_exchange", plan.held, plan.wanted)


@_cached
def halo_strips(spec: HaloSpec) -> dict[int, LinearMap]:
    """{dim: blocks -> what of the windows lies beside them in that dim}, see :meth:`HaloSpec.strips`."""
    return {d: movement("halo_strips", plan.held, plan.wanted) for d, plan in spec.strips().items()}
