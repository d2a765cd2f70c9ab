"""Data movements as functions: this rank's tensor in, this rank's result out.

Wherever a partition stands, a Layout is accepted too; then (or with ``shape``) no rank asks another, and the caller
promises equal shape, dtype, device and requires_grad. ``x`` may be a tensor or a pytree of tensors, which go as one set
of messages. What a rank outside the source partition passes is ignored; outside the destination it gets a connected
tensor without elements. Every function raises ShapeError or PartitionError on bad local input and, where it negotiates,
AgreementError on every rank.
"""

from __future__ import annotations

from operator import index as as_int

import torch

from .. import _torch, maps
from ..agree import negotiate, outside, partition_of, resolve_tree
from ..autograd import apply
from ..calls import has_tree
from ..engine import dispatch
from ..engine import transport as traffic
from ..errors import PartitionError, ShapeError
from ..halo import HaloSpec
from ..linear_map import LinearMap, Move
from ..partition import Layout, Partition
from ..ties import nothing, tie
from ..world import world
from .held import name_when_checking, tag

__all__ = [
    "all_gather", "all_sum_reduce", "broadcast", "gather", "halo_exchange", "invariant_sum", "mark_varying", "nothing",
    "permute", "reduce_scatter", "repartition", "scatter", "shift", "start", "sum_reduce", "tie", "wait",
]  # fmt: skip


def move(xs, maps_of_leaves):
    """Apply movements of one kind to the leaves, as one set of messages."""
    if len(xs) == 1:
        return [maps_of_leaves[0](xs[0])]
    steps = [m.steps[0] for m in maps_of_leaves]
    results = [step.operand(x) for step, x in zip(steps, xs)]
    moving = [i for i, step in enumerate(steps) if not step.is_identity]
    if moving:
        for i, y in zip(moving, apply([steps[i] for i in moving], [results[i] for i in moving])):
            results[i] = y
    return results


@has_tree
def moved(xs, maps_of_leaves, tree):
    """:func:`move` for the leaves of a pytree of structure ``tree``; checking reads that here."""
    return _torch.unflatten(move(xs, maps_of_leaves), tree)


def _sizes(op, shape, P):
    try:
        return tuple(as_int(n) for n in shape)
    except TypeError:
        raise PartitionError(
            "not a shape",
            op=op,
            expected="a sequence of integers",
            actual=shape,
            partitions=P,
            next_step="pass the tensor's shape, for example x.shape",
        ) from None


def _by_layout(op, x, P, shape, others, factory, out):
    """Resolve the layout of ``x`` over ``P``, then apply ``factory(layout)``."""
    if type(P) is Layout and isinstance(x, torch.Tensor) and shape is None:
        return factory(P)(x)
    xs, tree = _torch.flatten(x)
    xs, tree, layouts = resolve_tree(op, xs, tree, P, shape, others)
    if layouts is None:
        return _torch.unflatten(outside(xs, out), tree)
    return moved(xs, [factory(L) for L in layouts], tree)


def _by_shape(op, x, P, factory):
    """Apply ``factory(local shape)`` leaf by leaf: nothing is negotiated."""
    if isinstance(x, torch.Tensor):
        return factory(x.shape)(x)
    xs, tree = _torch.flatten(x)
    for leaf in xs:
        if not isinstance(leaf, torch.Tensor):
            raise ShapeError(
                "not a tensor",
                op=op,
                expected="tensors, or a pytree of them",
                actual=type(leaf).__name__,
                next_step="put numbers into tensors first: torch.tensor(value)",
                partitions=P,
            )
    return moved(xs, [factory(leaf.shape) for leaf in xs], tree)


def repartition(x, P_in, P_out, *, shape=None):
    """Move a tensor from one partition to another of as many dims: an all-to-all, in general.

    Args:
        x: this rank's block over ``P_in``, any dtype.
        P_in, P_out: partitions or layouts; sets of ranks and splits may differ in any way.
        shape: the global shape; left out, block sizes are negotiated.

    Returns:
        This rank's block over ``P_out``. Adjoint: the repartition back.
    """
    return _by_layout("repartition", x, P_in, shape, (P_out,), lambda L: maps.repartition(L, P_out), P_out)


def scatter(x, P, *, root=0, shape=None):
    """Split the tensor that rank ``root`` holds over ``P``. Adjoint: gather.

    Args:
        x: the global tensor on ``root``, ignored elsewhere.
        shape: its shape; left out (and without a Layout), it is negotiated.
    """
    where = partition_of(P, "scatter")
    if isinstance(P, Layout) or shape is not None:
        L = maps.layout_over(P, P.shape if shape is None else shape, "scatter")
        xs, tree = _torch.flatten(x)
        return moved(xs, [maps.scatter(L, root)] * len(xs), tree)
    one = maps.on_one_rank(root, where.ndim, where.world)
    return _by_layout("scatter", x, one, None, (where,), lambda L: maps.scatter(Layout(where, L.shape), root), where)


def gather(x, P, *, root=0, shape=None):
    """Collect the blocks of ``x`` over ``P`` as one tensor on rank ``root``. Adjoint: scatter."""
    where = partition_of(P, "gather")
    one = maps.on_one_rank(root, where.ndim, where.world)
    return _by_layout("gather", x, P, shape, (one,), lambda L: maps.gather(L, root), one)


def _dst_layout(op, small: Partition, big: Layout) -> Layout:
    """The layout over ``small`` whose copies (or summands) are the blocks of ``big``: equal ones where dims are
    copied."""
    small = maps.left_padded(small, big.partition, op)
    shape, splits = [], []
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
                op=op,
                partitions=big,
                actual=sizes,
                expected="equal blocks",
                next_step="repartition that dim to equal blocks first, or leave it whole",
            )
    return Layout(small, tuple(shape), tuple(splits))


def _copying(op, x, held, small, big, shape, build):
    """broadcast and sum_reduce: one copies from ``small`` to ``big``, the other sums back. ``held`` is the side of
    ``x``."""
    where = partition_of(small, op), partition_of(big, op)
    if isinstance(big, Layout):
        small, big = _dst_layout(op, where[0], big), where[1]
    xs, tree = _torch.flatten(x)
    if isinstance(small, Layout):
        return moved(xs, [build(small, big, None)] * len(xs), tree)
    maps.left_padded(small, big, op)
    if shape is not None:
        return moved(xs, [build(small, big, _sizes(op, shape, held))] * len(xs), tree)
    xs, tree, reports = negotiate(op, xs, partition_of(held), (small, big), tree=tree)
    if reports is None:
        return _torch.unflatten(outside(xs), tree)
    movements = []
    for i in range(len(xs)):
        source = maps.broadcast_source(small, big, op)
        if held is small:
            shapes = tuple(reports[r].leaves[i][0] for r in small.ranks)
        else:
            found: dict[int, tuple] = {}
            for r, s in zip(big.ranks, source):
                mine = reports[r].leaves[i][0]
                if found.setdefault(s, mine) != mine:
                    raise PartitionError(
                        "tensors of different shapes cannot be summed",
                        op=op,
                        partitions=(big, small),
                        expected=found[s],
                        actual=f"{mine} on rank {r}",
                        next_step="pass tensors of one shape on the ranks that are summed",
                    )
            shapes = tuple(found[s] for s in range(small.size))
        if len(set(shapes)) == 1:
            movements.append(build(small, big, shapes[0]))
        else:
            copying = maps.keyed("broadcast", small, big, source, shapes, tuple(shapes[s] for s in source))
            movements.append(copying if held is small else maps.transposed(op, copying))
    return moved(xs, movements, tree)


def broadcast(x, P_src, P_dst, *, shape=None):
    """Copy the tensor of each rank of ``P_src`` along the dims in which ``P_dst`` is larger. Adjoint: sum_reduce.

    Args:
        x: any shape; it may differ between the ranks of ``P_src``.
        P_src, P_dst: like numpy shapes: ``P_src`` is padded with 1s on the left, and each dim is equal or 1.
        shape: the copied tensor's own shape, when it is the same on all ranks; left out, shapes are negotiated.
    """
    return _copying("broadcast", x, P_src, P_src, P_dst, shape, maps.broadcast)


def sum_reduce(x, P_src, P_dst, *, shape=None):
    """Sum the tensors of ``P_src`` along the dims in which ``P_dst`` is 1. Adjoint: broadcast."""
    return _copying("sum_reduce", x, P_src, P_dst, P_src, shape, lambda small, big, s: maps.sum_reduce(big, small, s))


def _summing(factory, x, P, dims):
    op = factory.__name__
    if isinstance(dims, dict):
        raise PartitionError(
            "these are dims of the partition",
            op=op,
            partitions=P,
            expected="an int, or several",
            actual=dims,
            next_step="name the partition dims to sum over; tensor dims stay as they are",
        )
    if isinstance(dims, (list, set)):
        dims = tuple(dims)
    if partition_of(P, op) is P:
        return _by_shape(op, x, P, lambda shape: factory(P, shape, dims))
    xs, tree = _torch.flatten(x)
    return moved(xs, [factory(P, None, dims)] * len(xs), tree)


def all_sum_reduce(x, P, dims=None):
    """The sum over partition dims ``dims`` (None: all), on every rank: k varying copies. Its own adjoint. No
    negotiation."""
    return _summing(maps.all_sum_reduce, x, P, dims)


def mark_varying(x, P, dims=None):
    """Invariant -> varying along partition dims ``dims``: the identity, whose adjoint is the all-reduce.

    Data parallelism is ``w = F.mark_varying(w, P)``: every rank uses its copy, and the gradient is their sum. A layer
    with ``params="invariant"`` that gets the result itself does not sum over these ranks again. It changes no shape: a
    rank outside ``P`` gets back what it passed.
    """
    where = partition_of(P, "mark_varying")
    if not where.active:
        world(where.world).check("mark_varying", where)
        return x
    name_when_checking(x)
    y = _summing(maps.mark_varying, x, P, dims)
    tag(y, x, P, dims)
    return y


def invariant_sum(x, P, dims=None):
    """Varying -> invariant: the all-reduce along ``dims``, whose adjoint is the identity. What losses should end
    with."""
    return _summing(maps.invariant_sum, x, P, dims)


def all_gather(x, P, dims=None, *, shape=None):
    """Every rank gets the whole of ``x`` along ``dims``; blocks may be uneven or empty. Adjoint: reduce_scatter.

    Args:
        dims: tensor dims that are also partition dims, or {tensor dim: partition dim}; ``None``: all.
        shape: shape of the gathered tensor on this rank; left out, block sizes are negotiated.
    """
    if isinstance(P, Layout):
        dims = _layout_dims(P, dims, "all_gather")
        return _by_layout("all_gather", x, P, shape, (), lambda L: maps.all_gather(L, dims), P)
    partition_of(P, "all_gather")
    xs, tree = _torch.flatten(x)
    if shape is not None:
        shape = _sizes("all_gather", shape, P)
        pairs = maps.gathered_dims(P, len(shape), dims, "all_gather")
        movements = [maps.gathering(P, shape, pairs)] * len(xs)
    else:
        xs, tree, reports = negotiate("all_gather", xs, P, tree=tree, arguments=f"dims={dims}")
        if reports is None:
            return _torch.unflatten(outside(xs, None if isinstance(dims, dict) else P), tree)
        movements = [
            _negotiated_gathering(P, dims, {r: reports[r].leaves[i][0] for r in P.ranks}) for i in range(len(xs))
        ]
    return moved(xs, movements, tree)


def _layout_dims(L: Layout, dims, op):
    """With a Layout, tensor dims are partition dims, also where they are spelt as a dict."""
    if not isinstance(dims, dict):
        return dims
    if any(t != d for t, d in maps.gathered_dims(L.partition, L.ndim, dims, op).items()):
        raise PartitionError(
            "a Layout splits tensor dim d along partition dim d",
            op=op,
            partitions=L,
            actual=dims,
            expected="equal dims",
            next_step="pass the Partition instead of the Layout",
        )
    return tuple(dims)


def _negotiated_gathering(P, dims, shapes):
    """The all_gather of blocks of these shapes (by rank), for this rank's fibre; every rank checks every fibre."""
    ndim = len(shapes[P.ranks[0]])
    pairs = maps.gathered_dims(P, ndim, dims, "all_gather")
    sizes_of_fibre: dict = {}
    for r in P.ranks:
        coords = P.index(r)
        fibre = tuple(c for d, c in enumerate(coords) if d not in pairs.values())
        sizes = sizes_of_fibre.setdefault(fibre, {})
        for t in range(ndim):
            place = (t, coords[pairs[t]] if t in pairs else None)
            if sizes.setdefault(place, shapes[r][t]) != shapes[r][t]:
                raise PartitionError(
                    f"the blocks do not fit together in dim {t}",
                    op="all_gather",
                    partitions=P,
                    expected=f"size {sizes[place]}",
                    actual=f"{shapes[r][t]} on rank {r}",
                    next_step="blocks of one gathered tensor need equal sizes in every other dim",
                )
    mine = P.index()
    sizes = sizes_of_fibre[tuple(c for d, c in enumerate(mine) if d not in pairs.values())]
    blocks = {t: tuple(sizes[t, c] for c in range(P.shape[d])) for t, d in pairs.items()}
    shape = tuple(sum(blocks[t]) if t in blocks else sizes[t, None] for t in range(ndim))
    return maps.gathering(P, shape, pairs, blocks)


def reduce_scatter(x, P, dims=None):
    """Sum ``x`` over the ranks along ``dims``, and keep this rank's block of the sum. Adjoint: all_gather. No
    negotiation.

    Args:
        x: whole along ``dims`` on every rank; a Layout's splits, else balanced blocks, say who keeps what.
        dims: as for :func:`all_gather`.
    """
    if isinstance(P, Layout):
        xs, tree = _torch.flatten(x)
        movement = maps.reduce_scatter(P, _layout_dims(P, dims, "reduce_scatter"))
        return moved(xs, [movement] * len(xs), tree)
    if not partition_of(P, "reduce_scatter").active:  # what such a rank passes need not have as many dims
        world(P.world).check("reduce_scatter", P)
        xs, tree = _torch.flatten(x)
        return _torch.unflatten(outside(xs, P), tree)

    def factory(shape):
        pairs = maps.gathered_dims(P, len(shape), dims, "reduce_scatter")
        return maps.transposed("reduce_scatter", maps.gathering(P, shape, pairs))

    return _by_shape("reduce_scatter", x, P, factory)


def shift(x, P, dim, offset=1, *, periodic=True):
    """Pass every rank's tensor to the rank ``offset`` further along partition dim ``dim``. Adjoint: the shift back.

    Where nothing arrives (``periodic=False``) the result is zero, in the shape of this rank's own tensor. Shapes are
    equal along ``dim``, unless a Layout says how they differ. No negotiation.
    """
    if isinstance(P, Layout):
        xs, tree = _torch.flatten(x)
        return moved(xs, [maps.shift(P, dim, offset, periodic)] * len(xs), tree)
    partition_of(P, "shift")
    return _by_shape("shift", x, P, lambda shape: maps.shift(P, dim, offset, periodic, shape))


def permute(x, P, pairs):
    """Send tensors between ranks: ``pairs`` of (source, destination) ranks of ``P``. Adjoint: the reversed pairs.

    A source may have several destinations (the adjoint then sums), a destination one source. Shapes may differ by rank,
    and are negotiated (not with a Layout). Where nothing arrives the result is zero, in this rank's own shape.
    """
    where = partition_of(P, "permute")
    try:
        pairs = tuple((as_int(a), as_int(b)) for a, b in pairs)
    except (TypeError, ValueError):
        raise PartitionError(
            "not pairs of ranks",
            op="permute",
            partitions=P,
            expected="[(source, destination), ...]",
            actual=pairs,
            next_step="for example [(0, 1), (1, 0)]",
        ) from None
    xs, tree = _torch.flatten(x)
    if isinstance(P, Layout):
        shapes = [P.local_shape(r) for r in where.ranks]
        return moved(xs, [maps.permute(where, pairs, shapes)] * len(xs), tree)
    xs, tree, reports = negotiate("permute", xs, where, tree=tree, arguments=f"pairs={pairs}")
    if reports is None:
        return _torch.unflatten(outside(xs), tree)
    movements = [maps.permute(where, pairs, [reports[r].leaves[i][0] for r in where.ranks]) for i in range(len(xs))]
    return moved(xs, movements, tree)


def halo_exchange(x, spec: HaloSpec):
    """This rank's window of ``x``: its block, grown by what neighbours hold and by the boundary's ghosts.

    Args:
        x: this rank's block over ``spec.in_layout``.
        spec: a :class:`distdl.HaloSpec`.

    Returns:
        The window ``spec.out_box``. Adjoint: ghosts' cotangents are added to their owners.
    """
    if isinstance(x, torch.Tensor):
        return maps.halo_exchange(spec)(x)
    xs, tree = _torch.flatten(x)
    return moved(xs, [maps.halo_exchange(spec)] * len(xs), tree)


class _Pending:
    """What :func:`start` returns: a movement under way."""

    def __init__(self, A, xs, moving):
        self.map, self.xs, self.moving = A, xs, moving


def start(A, x) -> _Pending:
    """Begin ``y = A(x)``; messages travel until :func:`wait`.

    Args:
        A: a map; or a tuple of maps of one kind over the same ranks, which go as one set of messages.
        x: this rank's tensor; or as many. Do not change them in between.

    Under torch.func, and for maps that are not a single plan, the whole movement happens in ``wait``. Every rank must
    start and wait in the same order. On CUDA the adjoint overlaps too: in ``.backward()`` it runs beside what stands
    between the two calls.
    """
    maps, given = (A, tuple(x)) if isinstance(A, tuple) else ((A,), (x,))
    if not maps or len(given) != len(maps) or not all(isinstance(m, LinearMap) for m in maps):
        raise PartitionError(
            "not a linear map, or not one tensor for each",
            op="start",
            partitions=None,
            expected="one of dd.maps and a tensor, or a tuple of them and as many tensors",
            actual=(A, f"{len(given)} x"),
            next_step="F.start(dd.maps.repartition(L, M), x)",
        )
    moving, xs, steps = None, [m.operand(one) for m, one in zip(maps, given)], [step for m in maps for step in m.steps]
    if len(steps) == len(maps) and all(isinstance(step, Move) and not step.is_identity for step in steps):
        moving, xs = dispatch.begin(steps, xs)
    return _Pending(A, xs, moving)


def wait(pending: _Pending):
    """Finish what :func:`start` began, and return y; of a tuple of maps a list. Once only."""
    if not isinstance(pending, _Pending):
        raise ShapeError(
            "not a movement under way",
            op="wait",
            expected="what F.start returned",
            actual=type(pending).__name__,
            next_step="y = F.wait(F.start(A, x))",
            partitions=None,
        )
    if pending.map is None:
        raise ShapeError(
            "this movement was already waited for",
            op="wait",
            next_step="keep the result of the first wait",
            expected="a movement under way",
            actual="one that is finished",
            partitions=None,
        )
    A, pending.map = pending.map, None
    several, moving = isinstance(A, tuple), pending.moving
    maps = A if several else (A,)
    if moving is not None:
        traffic.begun += 1
        with moving.joining():
            ys = apply([m.steps[0] for m in maps], pending.xs, pending=moving)[: len(maps)]
    elif all(len(m.steps) == 1 and isinstance(m.steps[0], Move) for m in maps):
        ys = move(pending.xs, maps)
    else:
        ys = [m(x) for m, x in zip(maps, pending.xs)]
    return ys if several else ys[0]


for _name in __all__:
    _torch.opaque(globals()[_name])
