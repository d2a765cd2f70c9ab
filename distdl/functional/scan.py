"""Scans along a dim that ranks split: linear recurrences, cumulative sums and products, and any associative operator.

A scan y_t = x_1 ⊕ ... ⊕ x_t is a scan of each rank's own block, and what the ranks before have in all (Blelloch,
*Prefix sums and their applications*, 1990):

    s = scan of the block;   totals = all-gather of the last of s;   y = (totals of the ranks before, combined) ⊕ s

**Messages**: that one all-gather, of one element of the scan (N numbers: those of a block with size 1 along ``dim``) of
each rank to each of the p-1 others along ``dim``, however long the dim is. Backward one reduce-scatter, its transpose;
the derivatives are torch's, of a local scan of ⌈log₂ n⌉ levels (torch.cumsum and torch.cumprod where these do it).

With ``reverse`` the scan runs from the end of the dim, and ranks after take the place of ranks before. An empty block
is skipped. A rank outside of P gets a tensor without elements, see enter.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _torch, maps
from .._types import Place
from ..agree import block_sizes, check_tensor
from ..errors import ShapeError
from ..movement.call import move
from ..partition import Layout, Partition, partition_of
from ..ties import tie
from .enter import check_block, enter, outside, replicated
from .numeric import one_each, wide

__all__ = ["associative_scan", "dist_cumprod", "dist_cumsum", "dist_scan"]

Leaves = list[torch.Tensor]

# ---------------------------------------------------------------- on one rank


def _places(x, dim, *cut):
    return x[(slice(None),) * dim + (slice(*cut),)]


def _local(combine: Callable[[Leaves, Leaves], Leaves], xs: Leaves, dim: int) -> Leaves:
    """The scan of these leaves along ``dim``: pairs of neighbours are combined, scanned, and filled in, so that there
    are about 2n applications in 2 log₂ n steps (as jax.lax.associative_scan)."""
    n = xs[0].shape[dim]
    if n < 2:
        return xs
    odd = _local(
        combine, combine([_places(x, dim, 0, n - 1, 2) for x in xs], [_places(x, dim, 1, n, 2) for x in xs]), dim
    )
    first = [_places(x, dim, 0, 1) for x in xs]
    if n > 2:  # places 2, 4, ...: what is before them, and they
        m = (n - 1) // 2
        rest = combine([_places(y, dim, 0, m) for y in odd], [_places(x, dim, 2, n, 2) for x in xs])
        first = [torch.cat(pair, dim) for pair in zip(first, rest)]
    return [_interleaved(a, b, dim) for a, b in zip(first, odd)]


def _interleaved(a, b, dim):
    """a_0, b_0, a_1, b_1, ..., of which a may have one more."""
    m = b.shape[dim]
    both = torch.stack([_places(a, dim, 0, m), b], dim + 1).flatten(dim, dim + 1)
    return both if a.shape[dim] == m else torch.cat([both, _places(a, dim, m, None)], dim)


def _affine(first, then):
    """(a, b) stands for h -> a h + b: the second of two such functions after the first."""
    (a, b), (c, d) = first, then
    return [c * a, c * b + d]


# ---------------------------------------------------------------- across ranks


def _before(gathered: Leaves, dim: int, at: int, reverse: bool) -> Leaves:
    """Of one entry for each rank those of the ranks before this one, in the scan's order."""
    if reverse:
        return [_places(x, dim, at + 1, None).flip(dim) for x in gathered]
    return [_places(x, dim, 0, at) for x in gathered]


def _last(xs: Leaves, dim: int) -> Leaves:
    return [_places(x, dim, x.shape[dim] - 1, None) for x in xs]


def _check_like(what, x, b) -> None:
    """Raise unless x has b's shape."""
    if not isinstance(x, torch.Tensor) or x.shape != b.shape:
        raise ShapeError(
            f"{what} is not laid out as b",
            expected=tuple(b.shape),
            actual=tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__,
            next_step=f"pass this rank's block of {what}, of b's shape (expand it where it is constant)",
        )


def dist_scan(
    a: torch.Tensor,
    b: torch.Tensor,
    P: Place,
    dim: int,
    *,
    reverse: bool = False,
    initial: torch.Tensor | None = None,
    params: str = "varying",
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The linear recurrence h_t = a_t h_{t-1} + b_t along ``dim``, with h_0 = ``initial``, elementwise.

    The state space models of Gu & Dao (Mamba, arXiv:2312.00752, algorithm 2), linear attention, filters with feedback.
    A pair (a, b) stands for the function h -> a h + b, and these compose: (c, d) after (a, b) is (c a, c b + d).

    Args:
        a, b: this rank's blocks over ``P``, of one shape; any dtype. Nothing is divided, so that a may be 0, and
            products that underflow are 0.
        dim: the dim that the recurrence runs along.
        reverse: h_t = a_t h_{t+1} + b_t instead, from the end.
        initial: the state before the first step (``reverse``: after the last), of b's shape without ``dim``, on every
            rank along ``dim``. ``None``: zero.
        params: ``"varying"``: copies of ``initial`` are each rank's own, and its gradient that of this rank's use.
            ``"invariant"``: it is one value, marked here; see :func:`distdl.functional.replicated`.
        shape: the global shape, where ``P`` is a partition. Nothing is negotiated either way.

    Returns:
        This rank's block of h, in the dtype of a and b together. Half precision has its states in float32.

    Messages: one all-gather of 2N numbers (p-1 messages of one pair of states) in one set, see above; backward one
    reduce-scatter of as many. ``params="invariant"``: and backward one all-reduce of N.

    Raises:
        ShapeError: a has not b's shape, ``initial`` not b's without ``dim``, or blocks that are not P's.
        PartitionError: no such dim.

    Example:
        >>> a, b = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0])
        >>> F.dist_scan(a, b, dd.Partition((1,)), 0)  # h = a h + b
        tensor([1.0000, 1.5000])
    """
    grid = partition_of(P)
    dim = grid.dim(dim)
    check_tensor(a, P)
    b, L, at = enter(b, P, layer="dist_scan", shape=shape, agreed=False)
    dtype = torch.promote_types(a.dtype, b.dtype)
    if at is None:
        return outside(b, *([a] if initial is None else [a, initial]), like=L, dtype=dtype)
    _check_like("a", a, b)
    size = (*b.shape[:dim], *b.shape[dim + 1 :])
    start = b.new_zeros(size) if initial is None else initial
    if not isinstance(start, torch.Tensor) or start.shape != size:
        raise ShapeError(
            "initial is not one state",
            expected=size,
            actual=tuple(start.shape) if isinstance(start, torch.Tensor) else type(start).__name__,
            next_step="pass a tensor of b's local shape without dim",
        )
    if initial is not None:
        (start,) = replicated(params, P, (dim,), start)
    a, b, start = (wide(t.to(dtype)) for t in (a, b, start.unsqueeze(dim)))
    local = _local(_affine, [a.flip(dim), b.flip(dim)] if reverse else [a, b], dim)
    if b.shape[dim]:
        total = _last(local, dim)
    else:  # h -> h
        total = [tie(a.new_ones(start.shape), a), tie(b.new_zeros(start.shape), a, b)]
    earlier = _before(list(one_each(torch.stack(total), grid, (dim,))), dim, at[dim], reverse)
    if earlier[0].shape[dim]:
        c, d = _last(_local(_affine, earlier, dim), dim)
        state = d if initial is None else c * start + d
    else:  # of the first rank; what it does not use stays connected
        state = tie(start, *earlier)
    first = initial is None and not earlier[0].shape[dim]
    h = tie(local[1], local[0], state) if first else local[0] * state + local[1]
    return (h.flip(dim) if reverse else h).to(dtype)


def _cumulative(layer, x, P, dim, reverse, shape, along, whole):
    grid = partition_of(P)
    dim = grid.dim(dim)
    x, L, at = enter(x, P, layer=layer, shape=shape, agreed=False)
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64  # as torch has it
    if at is None:
        return outside(x, like=L, dtype=dtype)
    local = along(wide(x).flip(dim) if reverse else wide(x), dim)
    total = _last([local], dim)[0] if local.shape[dim] else whole(local, dim)
    (earlier,) = _before([one_each(total, grid, (dim,))], dim, at[dim], reverse)
    y = torch.add(local, whole(earlier, dim)) if along is torch.cumsum else local * whole(earlier, dim)
    return (y.flip(dim) if reverse else y).to(dtype)


def dist_cumsum(
    x: torch.Tensor, P: Place, dim: int, *, reverse: bool = False, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """The cumulative sum along ``dim``, as torch.cumsum of the global tensor.

    Args:
        x: this rank's block over ``P``; integers are summed in int64 as torch does, half precision in float32.
        dim: the dim.
        reverse: y_t is the sum from t to the end.
        shape: the global shape, where ``P`` is a partition. Nothing is negotiated either way.

    Returns:
        This rank's block of the sums.

    Messages: one all-gather of N numbers; backward one reduce-scatter of as many.

    Raises:
        ShapeError: x is not this rank's block. PartitionError: no such dim.

    Example:
        >>> F.dist_cumsum(torch.tensor([1, 2, 3]), dd.Partition((1,)), 0)
        tensor([1, 3, 6])
    """
    return _cumulative("dist_cumsum", x, P, dim, reverse, shape, torch.cumsum, lambda x, d: x.sum(d, True))


def dist_cumprod(
    x: torch.Tensor, P: Place, dim: int, *, reverse: bool = False, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """The cumulative product along ``dim``, as torch.cumprod of the global tensor; its gradient is right where x is 0.

    Args:
        x, dim, reverse, shape: as for :func:`dist_cumsum`.

    Messages: one all-gather of N numbers; backward one reduce-scatter of as many.

    Raises:
        ShapeError: x is not this rank's block. PartitionError: no such dim.

    Example:
        >>> F.dist_cumprod(torch.tensor([1, 2, 3]), dd.Partition((1,)), 0)
        tensor([1, 2, 6])
    """
    return _cumulative("dist_cumprod", x, P, dim, reverse, shape, torch.cumprod, lambda x, d: x.prod(d, True))


# ---------------------------------------------------------------- any operator


def _entries(xs: Leaves, grid: Partition, dim: int) -> Leaves:
    """All-gather along ``dim`` of leaves that have size 1 there, and may have more dims than the partition."""
    shapes = [(*x.shape[:dim], grid.shape[dim], *x.shape[dim + 1 :]) for x in xs]
    return move(xs, [maps.gathering(grid, shape, {dim: dim}) for shape in shapes])


def _check_leaves(leaves: Sequence[Any], P: Place, dim: int, active: bool) -> None:
    grid = partition_of(P)
    for x in leaves:
        check_tensor(x, P)
        if active and x.dim() < grid.ndim:
            raise ShapeError(
                "a tensor has fewer dims than the partition",
                partitions=P,
                expected=f"at least {grid.ndim} dims",
                actual=tuple(x.shape),
                next_step="lay every tensor out over P; dims that follow P's are whole on each rank",
            )
        if active and isinstance(P, Layout):
            check_block(x.new_empty(()).expand(x.shape[: grid.ndim]), P)
        if active and x.shape[dim] != leaves[0].shape[dim]:
            raise ShapeError(
                "tensors of different lengths along dim",
                partitions=P,
                expected=leaves[0].shape[dim],
                actual=x.shape[dim],
                next_step="give all tensors of xs the same size along dim",
            )


def associative_scan(fn: Callable[[Any, Any], Any], xs: Any, P: Place, dim: int, *, reverse: bool = False) -> Any:
    """The scan y_t = x_1 ⊕ ... ⊕ x_t along ``dim`` by any associative operator, as jax.lax.associative_scan.

    Args:
        fn: ``fn(a, b)`` is a ⊕ b, a before b in the scan's order, of two pytrees as ``xs`` with any (equal) size along
            ``dim``, place by place; it need not commute, and has no identity. Pure torch, and differentiable if
            derivatives are wanted. It returns the same structure, shapes and dtypes.
        xs: a tensor or a pytree of tensors, this rank's blocks over ``P``. Dims that follow P's are whole on every
            rank: matrices of size (2, 2) over a line of ranks are a block (n, 2, 2).
        P: partition or Layout of xs' first dims.
        dim: a dim of ``P``.
        reverse: from the end: y_t = x_n ⊕ ... ⊕ x_t.

    Returns:
        The pytree of this rank's blocks of y.

    Messages: one all-gather of one place of xs, all leaves in one set; backward one reduce-scatter. With a bare
    partition one small all-gather along ``dim`` before, which tells whose blocks are empty: those are skipped.

    Raises:
        ShapeError: xs are not tensors of one size along ``dim`` over ``P``, or ``fn`` returns another structure, other
            shapes or dtypes.
        PartitionError: no such dim.

    Example:
        >>> F.associative_scan(torch.maximum, torch.tensor([1, 3, 2]), dd.Partition((1,)), 0)
        tensor([1, 3, 3])
    """
    grid = partition_of(P)
    dim, at = grid.dim(dim), grid.index()
    leaves, tree = _torch.flatten(xs)
    _check_leaves(leaves, P, dim, at is not None)
    if at is None:
        return _torch.unflatten([_outside(x, P) for x in leaves], tree)

    def combine(a: Leaves, b: Leaves) -> Leaves:
        found, structure = _torch.flatten(fn(_torch.unflatten(a, tree), _torch.unflatten(b, tree)))
        wished, given = (_words(x, of) for x, of in ((a, tree), (found, structure)))
        if given != wished:
            raise ShapeError(
                "fn gave something else than it was given",
                partitions=P,
                expected=wished,
                actual=given,
                next_step="return the structure of fn's arguments, with their shapes and dtypes",
            )
        return found

    n = leaves[0].shape[dim]
    sizes = P.sizes(dim) if isinstance(P, Layout) else block_sizes(n, grid, dim, None)
    local = _local(combine, [x.flip(dim) for x in leaves] if reverse else leaves, dim)
    last = _last(local, dim) if n else [_blank(x, dim) for x in local]
    gathered = _before(_entries(last, grid, dim), dim, at[dim], reverse)
    filled = sizes[at[dim] + 1 :][::-1] if reverse else sizes[: at[dim]]
    some = [i for i, size in enumerate(filled) if size]
    if n and some:
        if len(some) < len(filled):
            gathered = [torch.cat([_places(x, dim, i, i + 1) for i in some], dim) for x in gathered]
        before = [x.expand(y.shape) for x, y in zip(_last(_local(combine, gathered, dim), dim), local)]
        local = combine(before, local)
    else:
        local = [tie(y, x) for y, x in zip(local, gathered)]
    return _torch.unflatten([y.flip(dim) for y in local] if reverse else local, tree)


def _words(leaves, structure):
    """Structure, shapes and dtypes of a pytree; keys of dictionaries may stand in any order."""
    each = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]
    return "a tensor" if structure is None else structure.text, each


def _blank(x, dim):
    """What a rank without a place of its own puts in: nobody reads it."""
    return tie(x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)]), x)


def _outside(x, P):
    n = partition_of(P).ndim
    if isinstance(P, Layout):
        return outside(x, like=(*P.local_shape(), *x.shape[n:]))
    return outside(x, like=None if x.dim() >= n else (0,) * max(n, 1))
