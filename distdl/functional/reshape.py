"""What networks need between layers: flatten and unflatten, concatenate and stack, across a partition.

Results lie in documented layouts, and each ``*_layout`` function gives the one that does not follow at a glance. No
rank ever holds more than its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product

import torch

from .. import maps
from .._arguments import checked
from .._types import Place
from ..agree import resolve
from ..boxes import joined, row_major
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..partition import Layout, Partition, as_layout, partition_of
from ..plan import Axis, Side
from ..ties import nothing
from .enter import check_block, outside, supposed

__all__ = [
    "cat_layout",
    "dist_cat",
    "dist_flatten",
    "dist_stack",
    "dist_unflatten",
    "stack_layout",
]


# ---------------------------------------------------------------- flatten


def _flat_runs(box, shape):
    """A block of a tensor as runs of the flattened tensor, each with its place in the flattened block."""
    if any(start == stop for start, stop in box):
        return ()
    length, starts = row_major(box, shape)
    return joined((start, start + length, i * length) for i, start in enumerate(starts))


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


def _flat_shape(L, start_dim):
    start = start_dim + L.ndim if start_dim < 0 else start_dim
    if not 0 <= start < L.ndim:
        raise PartitionError(
            "no such dim to flatten from",
            expected=f"a dim of {L.ndim}",
            actual=start_dim,
            next_step="count dims from 0, or from the end with negative numbers",
        )
    return (*L.shape[:start], math.prod(L.shape[start:]))


def _flat_layout(P, shape) -> Layout:
    if partition_of(P).ndim != len(shape):
        raise PartitionError(
            "the flattened tensor has another number of dims than its partition",
            expected=len(shape),
            actual=partition_of(P).ndim,
            next_step="give the result a partition with one dim for each of its own",
        )
    return as_layout(P, shape)


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


def dist_flatten(
    x: torch.Tensor, P_in: Place, P_out: Place, start_dim: int = 1, *, shape: Sequence[int] | None = None
) -> torch.Tensor:
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

    Example:
        >>> F.dist_flatten(torch.ones(2, 3, 4), dd.Partition((1, 1, 1)), dd.Partition((1, 1))).shape
        torch.Size([2, 12])
    """
    grid = partition_of(P_out)
    (x,), layouts = resolve([x], P_in, shape, (grid,))
    if layouts is None:
        x, L = supposed(x, partition_of(P_in))
        return outside(x, like=(0,) * grid.ndim if L is None else _flat_layout(P_out, _flat_shape(L, start_dim)))
    (L,) = layouts
    flat = _flat_layout(P_out, _flat_shape(L, start_dim))
    between = _in_between(L, flat)
    if between is None:
        A = _flattening(L, flat)
        if A.active:
            check_block(x, L)
            x = x.reshape(A.in_shape)
        return A(x)
    y = maps.repartition(L, between)(x)
    return y.reshape(flat.local_shape()) if y.numel() else nothing(flat.local_shape(), y)


def dist_unflatten(
    x: torch.Tensor, P_in: Place, P_out: Place, shape: Sequence[int], start_dim: int = 1
) -> torch.Tensor:
    """The last dim of x as the dims ``shape[start_dim:]``, laid over ``P_out``: the inverse, and the adjoint, of
    :func:`dist_flatten`.

    Args:
        x: this rank's block over ``P_in``, of as many dims as ``start_dim`` says and one more.
        P_in: partition or Layout of x; a partition means balanced blocks.
        P_out: partition or Layout of the result.
        shape: the *global* shape of the result, so nothing is negotiated.

    Messages: those of the flattening's adjoint.

    Example:
        >>> F.dist_unflatten(torch.ones(2, 12), dd.Partition((1, 1)), dd.Partition((1, 1, 1)), (2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """
    L = as_layout(P_out, tuple(shape))
    flat = _flat_layout(P_in, _flat_shape(L, start_dim))
    between = _in_between(L, flat)
    A = _flattening(L, flat).T if between is None else maps.repartition(between, L)
    if A.active:
        check_block(x, flat)
        x = x.reshape(A.in_shape)
    y = A(x)
    return y.reshape(L.local_shape()) if y.numel() else nothing(L.local_shape(), y)


# ---------------------------------------------------------------- concatenate and stack


def _check_same(layouts, dim) -> None:
    """All layouts agree in the partition and in every dim but ``dim``."""
    first = layouts[0]
    if dim is not None:
        (dim,) = first.partition.dims(dim)
    for L in layouts[1:]:
        fits = L.partition == first.partition and all(
            L.shape[d] == first.shape[d] and L.blocks(d) == first.blocks(d) for d in range(first.ndim) if d != dim
        )
        if not fits:
            raise PartitionError(
                "the tensors do not fit together",
                actual=L,
                expected=f"the same partition and blocks, but for dim {dim}",
                next_step="repartition one of them first",
            )


def _as_the_first(layouts, dim):
    """The layouts with the sizes of the first, but for ``dim``."""
    shapes = [list(layouts[0].shape) for _ in layouts]
    for shape, L in zip(shapes, layouts):
        if dim is not None:
            shape[dim] = L.shape[dim]
    return [layouts[0].with_shape(shape) for shape in shapes]


def cat_layout(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    """The layout of :func:`dist_cat`'s result: balanced blocks along ``dim``, the others as they are.

    Example:
        >>> P = dd.Partition((2,))
        >>> F.cat_layout([dd.Layout(P, (3,)), dd.Layout(P, (4,))], 0).shape
        (7,)
    """
    first, (dim,) = layouts[0], layouts[0].partition.dims(dim)
    _check_same(layouts, dim)
    splits = list(first.splits or (None,) * first.ndim)
    splits[dim] = None
    shape = list(first.shape)
    shape[dim] = sum(L.shape[dim] for L in layouts)
    return Layout(first.partition, tuple(shape), tuple(splits))


@lru_cache(maxsize=256)
def _concatenation(layouts, dim: int) -> LinearMap:
    """Each rank's blocks, put together along ``dim`` -> its block of the whole: held as one run for each tensor."""
    P, out = layouts[0].partition, cat_layout(layouts, dim)
    (dim,) = P.dims(dim)
    firsts = list(accumulate((L.shape[dim] for L in layouts), initial=0))
    runs, sizes = [], []
    for c in range(P.shape[dim]):
        blocks = [L.blocks(dim)[c] for L in layouts]
        at = list(accumulate((b - a for a, b in blocks), initial=0))
        runs.append(joined((f + a, f + b, place) for f, (a, b), place in zip(firsts, blocks, at)))
        sizes.append(at[-1])
    axes = list(Side.of(layouts[0]).axes)
    axes[dim] = Axis(dim, tuple(runs), tuple(sizes))
    return movement("cat", Side(P, tuple(axes)), Side.of(out))


def _enter(xs, P, dim, shapes):
    """Several tensors, which may differ in ``dim``: ``(xs, their layouts, this rank's coordinates)``, see
    :func:`enter`. ``P``: a partition (with ``shapes``, or negotiated all at once), or one Layout for each."""
    xs = list(xs)
    layouts = list(P) if isinstance(P, (tuple, list)) else [P] * len(xs)
    if not xs or len(layouts) != len(xs) or (shapes is not None and len(shapes) != len(xs)):
        raise PartitionError(
            "one layout or shape for each tensor",
            expected=f"{max(len(xs), 1)}",
            actual=(len(xs), len(layouts)),
            next_step="give as many layouts (or shapes) as tensors, and at least one tensor",
        )
    if shapes is not None:
        layouts = [as_layout(Q, tuple(shape)) for Q, shape in zip(layouts, shapes)]
    if not all(isinstance(Q, Layout) for Q in layouts):
        if any(layouts[0] != Q for Q in layouts):
            raise PartitionError(
                "tensors lie over one partition",
                expected=layouts[0],
                actual=layouts,
                next_step="repartition them to one partition first",
            )
        bare = layouts[0]
        xs, layouts = resolve(xs, bare)
        if layouts is None:
            dim = dim if dim is None else bare.dim(dim)
            xs, own = zip(*(supposed(x, bare) for x in xs))
            return xs, None if None in own else _as_the_first(own, dim), None
    _check_same(layouts, dim)
    at = layouts[0].partition.index()
    if at is not None:
        for x, L in zip(xs, layouts, strict=True):
            check_block(x, L)
    return xs, layouts, at


def dist_cat(
    xs: Sequence[torch.Tensor],
    P: Place | Sequence[Layout],
    dim: int = 0,
    *,
    shapes: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
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

    Example:
        >>> P = dd.Partition((1,))
        >>> F.dist_cat([torch.tensor([1]), torch.tensor([2, 3])], P, 0)
        tensor([1, 2, 3])
    """
    xs, layouts, at = _enter(xs, P, dim, shapes)
    if at is None:
        return outside(*xs, like=layouts and cat_layout(layouts, dim))
    return _concatenation(tuple(layouts), dim)(torch.cat(list(xs), dim))


@checked
def stack_layout(L: Layout, dim: int = 0, n: int = 1) -> Layout:
    """The layout of :func:`dist_stack`'s result: L with a new dim of size ``n``, not split.

    Example:
        >>> F.stack_layout(dd.Layout(dd.Partition((2,)), (3,)), 0, 5).shape
        (5, 3)
    """
    P, at = L.partition, dim + L.ndim + 1 if dim < 0 else dim
    if not 0 <= at <= L.ndim:
        raise PartitionError(
            "no such dim",
            expected=f"a dim of {L.ndim + 1}",
            actual=dim,
            next_step="count dims from 0, or from the end with negative numbers",
        )

    def put(values, new):
        return (*values[:at], new, *values[at:])

    grid = Partition(put(P.shape, 1), P.ranks, P.world)
    return Layout(grid, put(L.shape, n), put(L.splits or (None,) * L.ndim, None))


def dist_stack(
    xs: Sequence[torch.Tensor],
    P: Place | Sequence[Layout],
    dim: int = 0,
    *,
    shapes: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Stack tensors of one layout along a new dim ``dim``, as torch.stack. Arguments as for :func:`dist_cat`.

    Returns:
        This rank's block, of layout :func:`stack_layout`: over the same ranks, with a dim of size 1 more. No messages.

    Example:
        >>> P = dd.Partition((1,))
        >>> F.dist_stack([torch.tensor([1, 2]), torch.tensor([3, 4])], P, 0)
        tensor([[1, 2],
                [3, 4]])
    """
    xs, layouts, at = _enter(xs, P, None, shapes)
    if at is None:
        ndim = xs[0].dim() + 1
        return outside(*xs, like=stack_layout(layouts[0], dim, len(xs)) if layouts else (0,) * ndim)
    stack_layout(layouts[0], dim)  # raises for a dim that there is not
    return torch.stack(list(xs), dim)
