"""What networks need between layers: flatten and unflatten, pad and unpad, concatenate and stack, across a partition.

Results lie in documented layouts, and each ``*_layout`` function gives the one that does not follow at a glance. No
rank ever holds more than its blocks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, product

import torch

from .. import maps
from .._arguments import checked
from ..agree import outside, partition_of, resolve
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..movement.halo import HaloSpec, halo_exchange, sizes_of
from ..partition import Layout, Partition, layout_of
from ..plan import Axis, Side
from ..ties import nothing
from .reduce import check_block
from .window import with_layout

__all__ = [
    "cat_layout",
    "dist_cat",
    "dist_flatten",
    "dist_pad",
    "dist_stack",
    "dist_unflatten",
    "dist_unpad",
    "pad_layout",
    "stack_layout",
]


def _joined(runs):
    """Runs (start, stop, at) with those that follow each other, here and there, made one; empty ones left out."""
    found: list = []
    for start, stop, at in runs:
        if start < stop and found and found[-1][1] == start and found[-1][2] + start - found[-1][0] == at:
            found[-1] = (found[-1][0], stop, found[-1][2])
        elif start < stop:
            found.append((start, stop, at))
    return tuple(found)


# ---------------------------------------------------------------- flatten


def _flat_runs(box, shape):
    """A block of a tensor as runs of the flattened tensor, each with its place in the flattened block."""
    sizes = [stop - start for start, stop in box]
    if 0 in sizes:
        return ()
    cut = max((d for d, (n, m) in enumerate(zip(sizes, shape)) if n < m), default=0)  # all dims after it are whole
    length = math.prod(sizes[cut:])
    strides = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
    first = sum(start * stride for (start, _), stride in zip(box, strides))
    rows = product(*[range(0, n * stride, stride) for n, stride in zip(sizes[:cut], strides)])
    starts = [first + sum(row) for row in rows]
    return _joined((start, start + length, i * length) for i, start in enumerate(starts))


def _as_box(blocks, dims):
    """Blocks of a flattened dim as blocks of one of ``dims``, all others whole: (which, blocks), or ``None``."""
    first = next((d for d, n in enumerate(dims) if n > 1), 0)
    inner = math.prod(dims[first + 1 :])
    if 0 in dims or any(edge % inner for block in blocks for edge in block):
        return None
    return first, tuple((stop - start) // inner for start, stop in blocks)


@lru_cache(maxsize=256)
def _flattening(L: Layout, flat: Layout) -> LinearMap:
    """Blocks of L, each flattened from dim ``start`` on -> blocks of ``flat``, the layout of the flattened tensor."""
    P, start = L.partition, flat.ndim - 1
    merged = Partition((*P.shape[:start], math.prod(P.shape[start:])), P.ranks, P.world)  # the same ranks, row-major
    boxes = list(product(*[L.blocks(d) for d in range(start, L.ndim)]))
    sizes = tuple(math.prod(b - a for a, b in box) for box in boxes)
    axis = Axis(start, tuple(_flat_runs(box, L.shape[start:]) for box in boxes), sizes)
    held = Side(merged, (*Side.of(L).axes[:start], axis))
    return movement("flatten", held, Side.of(flat))


def _flat_shape(op, L, start_dim):
    start = start_dim + L.ndim if start_dim < 0 else start_dim
    if not 0 <= start < L.ndim:
        raise PartitionError(
            "no such dim to flatten from",
            op=op,
            partitions=L,
            expected=f"a dim of {L.ndim}",
            actual=start_dim,
            next_step="count dims from 0, or from the end with negative numbers",
        )
    return (*L.shape[:start], math.prod(L.shape[start:]))


def _flat_layout(op, P, shape) -> Layout:
    if partition_of(P).ndim != len(shape):
        raise PartitionError(
            "the flattened tensor has another number of dims than its partition",
            op=op,
            partitions=P,
            expected=len(shape),
            actual=partition_of(P).ndim,
            next_step="give the result a partition with one dim for each of its own",
        )
    return layout_of(P, shape, op)


def _in_between(L, flat):
    """The layout of L's shape over the ranks of ``flat`` whose flattened blocks are those of ``flat``; ``None``: none
    is."""
    start = flat.ndim - 1
    found = _as_box(flat.blocks(start), L.shape[start:])
    if found is None:
        return None
    which, sizes = found
    grid, splits = [1] * L.ndim, [None] * L.ndim
    for d in range(start):
        grid[d], splits[d] = flat.partition.shape[d], flat.sizes(d)
    grid[start + which], splits[start + which] = flat.partition.shape[start], sizes
    return Layout(Partition(tuple(grid), flat.partition.ranks, flat.partition.world), L.shape, tuple(splits))


def dist_flatten(x, P_in, P_out, start_dim=1, *, shape=None):
    """Flatten the dims from ``start_dim`` on, in their usual order, and lay the result over ``P_out``.

    Args:
        x: this rank's block over ``P_in``, any dtype, split in any dims.
        P_in: partition or Layout of x.
        P_out: partition or Layout of the result: the dims before ``start_dim``, and one for the features. Any ranks.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block over ``P_out`` (balanced, unless that is a Layout). Adjoint: :func:`dist_unflatten`.

    Messages: one from each rank that holds some of a rank's features, of just these. Where feature blocks are whole
    channels (more exactly: whole slices of the first flattened dim that is not 1) it is a repartition with one box per
    message; otherwise one box for each contiguous run that the two blocks share.

    y[n, (c·H + h)·W + w] = x[n, c, h, w].

    Raises:
        PartitionError: partitions that do not fit the shapes.
    """
    op, out = "dist_flatten", partition_of(P_out)
    xs, layouts = resolve(op, [x], P_in, shape, (out,))
    if layouts is None:
        return outside(xs, out)[0]
    (x,), (L,) = xs, layouts
    flat = _flat_layout(op, P_out, _flat_shape(op, L, start_dim))
    between = _in_between(L, flat)
    if between is None:
        A = _flattening(L, flat)
        if L.active:
            check_block(op, x, L)
            x = x.reshape(A.in_shape)
        return A(x)
    y = maps.repartition(L, between)(x)
    return y.reshape(flat.local_shape()) if out.active else nothing(flat.local_shape(), y)


def dist_unflatten(x, P_in, P_out, shape, start_dim=1):
    """The last dim of x as the dims ``shape[start_dim:]``, laid over ``P_out``: the inverse, and the adjoint, of
    :func:`dist_flatten`.

    Args:
        x: this rank's block over ``P_in``, of as many dims as ``start_dim`` says and one more.
        P_in: partition or Layout of x; a partition means balanced blocks.
        P_out: partition or Layout of the result.
        shape: the *global* shape of the result, so nothing is negotiated.

    Messages: those of the flattening's adjoint.
    """
    op = "dist_unflatten"
    L = layout_of(P_out, tuple(shape), op)
    flat = _flat_layout(op, P_in, _flat_shape(op, L, start_dim))
    if flat.active:
        check_block(op, x, flat)
    between = _in_between(L, flat)
    if between is None:
        A = _flattening(L, flat).T
        y = A(x)
        return y.reshape(L.local_shape()) if L.active else nothing(L.local_shape(), y)
    x = x.reshape(between.local_shape()) if flat.active else x
    return maps.repartition(between, L)(x)


# ---------------------------------------------------------------- pad

_BOUNDARY = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _pads(op, L, pad):
    """``pad``, in torch's order (the last dim first), as (before, after) of each dim."""
    pad = sizes_of(pad, "pad", op)
    if len(pad) % 2 or len(pad) > 2 * L.ndim:
        raise PartitionError(
            "pad needs two numbers for each padded dim",
            op=op,
            partitions=L,
            actual=pad,
            expected=f"an even number, at most {2 * L.ndim}",
            next_step="give (before, after) for the last dim, then the one before it, as torch does",
        )
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)][::-1]
    pairs = [(0, 0)] * (L.ndim - len(pairs)) + pairs
    if min([n + a + b for n, (a, b) in zip(L.shape, pairs)], default=0) < 0:
        raise PartitionError(
            "more is cut off than there is",
            op=op,
            partitions=L,
            expected="sizes >= 0",
            actual=pad,
            next_step="cut off less",
        )
    return pairs


@checked
def pad_layout(L, pad) -> Layout:
    """The layout of :func:`dist_pad`'s result for an x of layout ``L``: splits stay where sizes do, else balanced."""
    return L.with_shape([n + a + b for n, (a, b) in zip(L.shape, _pads("pad_layout", L, pad))])


def dist_pad(x, P, pad, mode="constant", value=0, *, shape=None):
    """Pad, or cut where ``pad`` is negative, as torch.nn.functional.pad.

    Args:
        x: this rank's block, any dtype and number of dims.
        P: partition or Layout of x.
        pad: (before, after) of the last dim, then of the one before, and so on.
        mode: "constant", "reflect", "replicate" or "circular" (here on any dims; torch knows the last ones only).
        value: what "constant" fills with.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block, of layout :func:`pad_layout`.

    Messages: one halo exchange: from each rank that holds some of the result's block, just that part; backward its
    transpose.

    Raises:
        PartitionError: an unknown mode, an odd number of pads, a reflection beyond the tensor, or more cut than there
            is.
    """
    op = "dist_pad"
    if mode not in _BOUNDARY:
        raise PartitionError(
            "no such mode", op=op, expected=sorted(_BOUNDARY), actual=mode, partitions=P, next_step="use one of them"
        )
    if mode != "constant" and value:
        raise PartitionError(
            f"mode '{mode}' takes no value",
            op=op,
            expected=0,
            actual=value,
            partitions=P,
            next_step="leave value out, or use mode 'constant'",
        )

    def body(x, L):
        pairs = _pads(op, L, pad)
        spec = HaloSpec.needs(
            L, None, pad_layout(L, pad), lambda d, o0, o1: (o0 - pairs[d][0], o1 - pairs[d][0]), _BOUNDARY[mode]
        )
        y = halo_exchange(x, spec)
        if not value or not L.active:
            return y
        beyond = torch.zeros((), dtype=torch.bool, device=y.device)
        for d, ((lo, hi), n) in enumerate(zip(spec.out_box, L.shape)):
            place = torch.arange(lo, hi, device=y.device).reshape(-1, *(1,) * (L.ndim - d - 1))
            beyond = beyond | (place < 0) | (place >= n)
        return torch.where(beyond, value, y).to(y.dtype)

    return with_layout(op, x, P, shape, body)


def dist_unpad(x, P, pad, *, shape=None):
    """Cut ``pad`` elements off, given as for :func:`dist_pad`, whose inverse this is; same layout rule and messages."""
    return dist_pad(x, P, [-n for n in pad], shape=shape)


# ---------------------------------------------------------------- concatenate and stack


def _same(op, layouts, dim) -> None:
    """All layouts agree in the partition and in every dim but ``dim``."""
    first = layouts[0]
    for L in layouts[1:]:
        fits = L.partition == first.partition and all(
            L.shape[d] == first.shape[d] and L.blocks(d) == first.blocks(d) for d in range(first.ndim) if d != dim
        )
        if not fits:
            raise PartitionError(
                "the tensors do not fit together",
                op=op,
                partitions=first,
                actual=L,
                expected=f"the same partition and blocks, but for dim {dim}",
                next_step="repartition one of them first",
            )


def cat_layout(layouts, dim=0) -> Layout:
    """The layout of :func:`dist_cat`'s result: balanced blocks along ``dim``, the others as they are."""
    first, (dim,) = layouts[0], layouts[0].partition.dims(dim, "dist_cat")
    _same("dist_cat", layouts, dim)
    splits = list(first.splits or (None,) * first.ndim)
    splits[dim] = None
    shape = list(first.shape)
    shape[dim] = sum(L.shape[dim] for L in layouts)
    return Layout(first.partition, tuple(shape), tuple(splits))


@lru_cache(maxsize=256)
def _concatenation(layouts, dim: int) -> LinearMap:
    """Each rank's blocks, put together along ``dim`` -> its block of the whole: held as one run for each tensor."""
    P, out = layouts[0].partition, cat_layout(layouts, dim)
    firsts = list(accumulate((L.shape[dim] for L in layouts), initial=0))
    runs, sizes = [], []
    for c in range(P.shape[dim]):
        blocks = [L.blocks(dim)[c] for L in layouts]
        at = list(accumulate((b - a for a, b in blocks), initial=0))
        runs.append(_joined((f + a, f + b, place) for f, (a, b), place in zip(firsts, blocks, at)))
        sizes.append(at[-1])
    axes = list(Side.of(layouts[0]).axes)
    axes[dim] = Axis(dim, tuple(runs), tuple(sizes))
    return movement("cat", Side(P, tuple(axes)), Side.of(out))


def _several(op, xs, P, shapes):
    """Layouts of several tensors: ``P`` a partition (with ``shapes``, or negotiated all at once) or one Layout for
    each."""
    xs = list(xs)
    layouts = list(P) if isinstance(P, (tuple, list)) else [P] * len(xs)
    if not xs or len(layouts) != len(xs) or (shapes is not None and len(shapes) != len(xs)):
        raise PartitionError(
            "one layout or shape for each tensor",
            op=op,
            expected=f"{max(len(xs), 1)}",
            actual=(len(xs), len(layouts)),
            partitions=P,
            next_step="give as many layouts (or shapes) as tensors, and at least one tensor",
        )
    if shapes is not None:
        layouts = [layout_of(Q, tuple(shape), op) for Q, shape in zip(layouts, shapes)]
    if not all(isinstance(Q, Layout) for Q in layouts):
        if any(layouts[0] != Q for Q in layouts):
            raise PartitionError(
                "tensors lie over one partition",
                op=op,
                expected=layouts[0],
                actual=layouts,
                partitions=P,
                next_step="repartition them to one partition first",
            )
        xs, layouts = resolve(op, xs, layouts[0])
    return xs, layouts


def dist_cat(xs, P, dim=0, *, shapes=None):
    """Concatenate tensors over one partition along ``dim``, as torch.cat.

    Args:
        xs: this rank's blocks, of one dtype; equal blocks in every dim but ``dim``.
        P: their partition, or a list with the Layout of each.
        shapes: their global shapes; left out with a bare partition, they are negotiated, all at once.

    Returns:
        This rank's block, of layout :func:`cat_layout`: balanced along ``dim``.

    Messages: none where ``dim`` is not split. Else one from each rank that holds some of the result's block, of just
    that part, for all tensors together; backward its transpose.

    Raises:
        PartitionError: tensors whose other dims lie differently.
    """
    op = "dist_cat"
    xs, layouts = _several(op, xs, P, shapes)
    if layouts is None:
        return nothing(outside(xs, P)[0].shape, *xs)
    (dim,) = layouts[0].partition.dims(dim, op)
    _same(op, layouts, dim)
    A = _concatenation(tuple(layouts), dim)
    if not A.active:
        return A(nothing(A.in_shape, *xs))
    for x, L in zip(xs, layouts):
        check_block(op, x, L)
    return A(torch.cat(xs, dim))


@checked
def stack_layout(L, dim=0, n=1) -> Layout:
    """The layout of :func:`dist_stack`'s result: L with a new dim of size ``n``, not split."""
    P, at = L.partition, dim + L.ndim + 1 if dim < 0 else dim
    if not 0 <= at <= L.ndim:
        raise PartitionError(
            "no such dim",
            op="dist_stack",
            partitions=L,
            expected=f"a dim of {L.ndim + 1}",
            actual=dim,
            next_step="count dims from 0, or from the end with negative numbers",
        )

    def put(values, new):
        return (*values[:at], new, *values[at:])

    grid = Partition(put(P.shape, 1), P.ranks, P.world)
    return Layout(grid, put(L.shape, n), put(L.splits or (None,) * L.ndim, None))


def dist_stack(xs, P, dim=0, *, shapes=None):
    """Stack tensors of one layout along a new dim ``dim``, as torch.stack. Arguments as for :func:`dist_cat`.

    Returns:
        This rank's block, of layout :func:`stack_layout`: over the same ranks, with a dim of size 1 more. No messages.
    """
    op = "dist_stack"
    xs, layouts = _several(op, xs, P, shapes)
    if layouts is None:
        return nothing((0,) * (partition_of(P).ndim + 1), *xs)
    _same(op, layouts, None)
    out = stack_layout(layouts[0], dim, len(xs))
    if not out.active:
        return nothing(out.local_shape(), *xs)
    for x, L in zip(xs, layouts):
        check_block(op, x, L)
    return torch.stack(xs, dim)
