"""Reductions of a partitioned tensor. Results are *invariant*: one value, stored on every rank that was reduced over.

Every function takes this rank's block ``x`` over ``P`` (a Partition or a Layout, one dim for each of x; nothing is
negotiated but where said), ``dim`` (an int, a tuple, or ``None``: all dims) and ``keepdim``, as torch does. The result
is invariant along the partition dims ``dim``, and keeps this rank's block, varying, in the others. With no dim left it
is a scalar that may be used as
a loss: ``.backward()`` and ``torch.func.grad`` are right as they stand. Empty blocks contribute nothing. A rank outside
``P`` gets a connected zero loss (no dim left), or a connected tensor without elements, of as many dims as elsewhere.
A dtype that a reduction is not for (means of integers, maxima of complex numbers) is a ShapeError, as a repeated dim is
a PartitionError.

Below, N is the number of elements of the result on this rank, and k the number of ranks reduced over. As the adjoint of
``invariant_sum`` is the identity, **no reduction sends anything in backward**; its jvp sends what the sum sends.
"""

from __future__ import annotations

import math

import torch

from .._types import Dims, Place
from ..agree import resolve
from ..errors import PartitionError, ShapeError
from ..movement.copies import invariant_sum, mark_varying
from ..partition import Layout, partition_of
from ..ties import tie
from .enter import ANY, FLOATING, REAL, SMOOTH, enter, outside
from .numeric import one_each, pivot, power, reduced_shape, sum_and_count, wide

__all__ = [
    "dist_argmax", "dist_logsumexp", "dist_max", "dist_mean", "dist_min", "dist_norm", "dist_sum", "dist_var",
]  # fmt: skip


def _enter(layer, x, P, dim, kinds=ANY):
    """(x, its layout or partition, the partition and the reduced dims, this rank's coordinates)."""
    grid = partition_of(P)
    dims = grid.dims(None if type(dim) is tuple and not dim else dim)  # (): all, as in torch
    x, L, at = enter(x, P, layer=layer, kinds=kinds, agreed=False)
    return x, L, grid, dims, at


def _outside(x, L, P, dims, keepdim, dtype=None):
    """The result of a rank that takes no part: the first block's sizes in the dims that are left."""
    sizes = (x.shape if L is None else L.local_shape())[: P.ndim]
    left = tuple(1 if d in dims else n for d, n in enumerate(sizes) if keepdim or d not in dims)
    return outside(x, like=left, dtype=dtype)


def _squeeze(y, dims, keepdim):
    return y if keepdim else y.squeeze(dims)


def dist_sum(x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False) -> torch.Tensor:
    """The sum over ``dim``. Half precision is summed in float32, and integers as torch does.

    Messages: one all-reduce of N elements; none backward.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_sum(x, P, 0)
        tensor([4., 8.])
    """
    x, L, grid, dims, at = _enter("dist_sum", x, P, dim)
    if at is None:
        return _outside(x, L, grid, dims, keepdim, x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    local = wide(x).sum(dims, keepdim)
    return invariant_sum(local, grid, dims).to(x.dtype if x.is_floating_point() else local.dtype)


def dist_mean(x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False) -> torch.Tensor:
    """The mean over ``dim``: sum by count, exact on uneven blocks. NaN where there is nothing to average.

    Messages: one all-reduce of N + 1 elements (the count goes along), N with a Layout; none backward.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_mean(x, P, 0)
        tensor([2., 4.])
    """
    x, L, grid, dims, at = _enter("dist_mean", x, P, dim, SMOOTH)
    if at is None:
        return _outside(x, L, grid, dims, keepdim)
    total, count = sum_and_count(wide(x), L, dims, keepdim)
    return (total / count).to(x.dtype)


def dist_var(
    x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False, *, correction: float = 1
) -> torch.Tensor:
    """The variance over ``dim``, divided by n - ``correction``: from the global mean, without cancellation; of complex
    x the mean of |x - mean|², as in torch.

    Messages: two all-reduces, of N + 1 elements (N with a Layout) and of N; backward one of N, for the mean.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_var(x, P, 0)
        tensor([2., 2.])
    """
    x, L, grid, dims, at = _enter("dist_var", x, P, dim, SMOOTH)
    if at is None:
        return _outside(x.real, L, grid, dims, keepdim)
    total, count = sum_and_count(wide(x), L, dims, True)
    apart = wide(x) - mark_varying(total / count, grid, dims)
    squares = apart.square() if not x.is_complex() else apart.real.square() + apart.imag.square()
    return (invariant_sum(squares.sum(dims, keepdim), grid, dims) / (count.real - correction)).to(x.dtype.to_real())


def dist_logsumexp(x: torch.Tensor, P: Place, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """log Σ exp(x) over ``dim``, one or several, relative to the largest x of all ranks.

    Messages: one all-gather and one all-reduce, of N elements each; none backward.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_logsumexp(x, P, 1)
        tensor([5.0181, 3.6931])
    """
    x, L, grid, dims, at = _enter("dist_logsumexp", x, P, dim, FLOATING)
    if at is None:
        return _outside(x, L, grid, dims, keepdim)
    high = pivot(wide(x), grid, dims)
    high = torch.where(high.isfinite(), high, 0)  # so that the sum of -inf alone is -inf, and with inf inf
    total = invariant_sum((wide(x) - high).exp().sum(dims, True), grid, dims)
    return _squeeze(total.log() + high, dims, keepdim).to(x.dtype)


def dist_max(x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False) -> torch.Tensor:
    """The largest element over ``dim``, as ``x.amax(dim)``: the gradient is divided evenly among equal largest
    elements.

    Every rank learns the largest value and how often it occurs; the invariant sum then carries the derivative only. An
    empty
    tensor has no maximum: ShapeError with a Layout, NaN without.

    Messages: one all-gather of 2N elements and one all-reduce of N (integers: an all-gather of N); none backward.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_max(x, P, 1)
        tensor([5., 3.])
    """
    return _extreme("dist_max", x, P, dim, keepdim, torch.amax)


def dist_min(x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False) -> torch.Tensor:
    """The smallest element over ``dim``; as :func:`dist_max`.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_min(x, P, 1)
        tensor([1., 3.])
    """
    return _extreme("dist_min", x, P, dim, keepdim, torch.amin)


def _worst(dtype, pick):
    """What loses against everything."""
    if dtype.is_floating_point:
        return -math.inf if pick is torch.amax else math.inf
    if dtype == torch.bool:
        return pick is not torch.amax
    return torch.iinfo(dtype).min if pick is torch.amax else torch.iinfo(dtype).max


def _check_some(L, dims) -> None:
    if isinstance(L, Layout) and 0 in (L.shape[d] for d in dims):
        raise ShapeError(
            "there is no element to choose",
            actual=L.shape,
            expected="elements in the reduced dims",
            next_step="reduce over dims that have elements",
        )


def _extreme(layer, x, P, dim, keepdim, pick):
    x, L, grid, dims, at = _enter(layer, x, P, dim, REAL)
    if at is None:
        return _outside(x, L, grid, dims, keepdim)
    _check_some(L, dims)
    some = all(x.shape[d] for d in dims)
    mine = (
        pick(x, dims, keepdim=True) if some else x.sum(dims, True).to(x.dtype) + x.new_full((), _worst(x.dtype, pick))
    )
    if not x.is_floating_point():
        return _squeeze(pick(one_each(mine, grid, dims), dims, keepdim=True), dims, keepdim)
    held = mine.detach()
    ties = wide((x.detach() == held).to(x.dtype)).sum(dims, True)
    values, counts = one_each(torch.stack([held.to(ties.dtype), ties]), grid, dims)
    best = pick(values, dims, keepdim=True)
    total = torch.where(values == best, counts, 0).sum(dims, True)
    share = ties / total
    # best + the sum of differences from it, all of them 0: the value is exact, and each tie has its share of the
    # derivative.
    base = torch.where(best.isinf(), 0, best)
    moved = torch.where((held == best) & (ties > 0), (mine.to(ties.dtype) - base) * share, 0)
    nowhere = torch.where(total == 0, math.nan, 0.0).to(base.dtype)  # no rank has an element
    result = base + nowhere + invariant_sum(moved, grid, dims)
    return _squeeze(result, dims, keepdim).to(x.dtype)


def dist_norm(
    x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False, *, ord: float = 2
) -> torch.Tensor:
    """The vector norm (Σ |x|^ord)^(1/ord) over ``dim``, as ``torch.linalg.vector_norm``; its gradient at 0 is 0.

    Args:
        ord: any number; ``inf`` and ``-inf`` are the largest and the smallest |x|, and 0 counts what is not 0.

    Messages: one all-reduce of N elements (``inf``: as :func:`dist_max`); none backward.

    Raises:
        ShapeError, PartitionError: an x that is not this rank's block or of such a dtype, or dims that P does not have.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_norm(x, P, 0)
        tensor([3.1623, 5.8310])
    """
    x, L, grid, dims, at = _enter("dist_norm", x, P, dim, SMOOTH)
    if abs(ord) == math.inf:
        return (dist_max if ord > 0 else dist_min)(x.abs(), P, dim, keepdim)
    if at is None:
        return _outside(x.abs(), L, grid, dims, keepdim)
    x, dtype = wide(x), x.abs().dtype
    if ord == 0:
        nonzero = (x != 0).to(x.abs().dtype).sum(dims, keepdim)
        return invariant_sum(tie(nonzero, x), grid, dims).to(dtype)  # its derivative is zero, and not absent
    terms = x.square() if ord == 2 and not x.is_complex() else power(x.abs(), ord)
    return power(invariant_sum(terms.sum(dims, keepdim), grid, dims), 1 / ord).to(dtype)


def dist_argmax(x: torch.Tensor, P: Place, dim: Dims | None = None, keepdim: bool = False) -> torch.Tensor:
    """The global index (int64) of the first largest element over one ``dim``; ``None``: in the flattened global tensor.

    NaN counts as largest, as in torch. A bare partition is negotiated, as the global index needs every block's offset.

    Messages: one all-gather of N values and N indices, in one message to each peer.

    Raises:
        ShapeError: the reduced dims have no element.

    Example:
        >>> P, x = dd.Partition((1, 1)), torch.tensor([[1.0, 5.0], [3.0, 3.0]])
        >>> F.dist_argmax(x, P, 1)
        tensor([1, 0])
    """
    x, L, grid, dims, at = _enter("dist_argmax", x, P, dim, REAL)
    if at is None:
        return _outside(x, L, grid, dims, keepdim, torch.int64)
    if dim is not None and len(dims) != 1:
        raise PartitionError(
            "one dim at a time",
            expected="an int or None",
            actual=dim,
            next_step="call it once for each dim, or with None for all of them",
        )
    (x,), (L,) = resolve((x.detach(),), P)
    _check_some(L, dims)
    last = torch.iinfo(torch.int64).max
    if all(x.shape[d] for d in dims):
        # not argmax(None): under vmap torch's gives another shape
        place = (
            x.flatten().argmax(0).reshape(reduced_shape(x, dims)) if dim is None else x.argmax(dims[0], keepdim=True)
        )
        value = x.amax(dims, keepdim=True)
        index, step = torch.zeros_like(place), 1
        for d in reversed(dims):  # local place -> coordinates -> global place
            index = index + (place % x.shape[d] + L.box()[d][0]) * step
            place, step = place // x.shape[d], step * L.shape[d]
    else:
        value = x.new_full(reduced_shape(x, dims), _worst(x.dtype, torch.amax))
        index = torch.full_like(value, last, dtype=torch.int64)
    values, indices = one_each([value, index], grid, dims)
    largest = (values == values.amax(dims, keepdim=True)) | (values != values)
    return _squeeze(torch.where(largest, indices, last).amin(dims, keepdim=True), dims, keepdim)
