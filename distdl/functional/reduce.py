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

from .. import maps
from ..agree import check_tensor, outside_shape, partition_of, resolve
from ..errors import PartitionError, ShapeError
from ..movement.call import move
from ..movement.copies import invariant_sum, mark_varying
from ..partition import Layout
from ..ties import nothing, tie
from .autocast import autocast

__all__ = [
    "dist_argmax", "dist_logsumexp", "dist_max", "dist_mean", "dist_min", "dist_norm", "dist_sum", "dist_var",
]  # fmt: skip


# ---------------------------------------------------------------- shared with norm.py and loss.py


def wider(dtype):
    """The dtype that sums are taken in: float32 for half precision and less, else ``dtype`` itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def wide(x):
    """``x`` in that dtype."""
    return x.to(wider(x.dtype))


def check_block(op, x, P, what="x") -> None:
    """Raise unless ``x`` can be this rank's block over ``P``."""
    where = partition_of(P)
    if not isinstance(x, torch.Tensor):
        raise ShapeError(
            f"{what} is not a tensor",
            op=op,
            partitions=P,
            expected="this rank's block",
            actual=type(x).__name__,
            next_step="pass this rank's block as a tensor",
        )
    if isinstance(P, Layout):
        if tuple(x.shape) != P.local_shape():
            raise ShapeError(
                f"{what} is not this rank's block",
                op=op,
                partitions=P,
                expected=P.local_shape(),
                actual=tuple(x.shape),
                next_step="pass layout.shard(x_global), or the layout that x has",
            )
    elif x.dim() != where.ndim:
        raise ShapeError(
            f"{what} has another number of dims than the partition",
            op=op,
            partitions=where,
            expected=f"{where.ndim} dims",
            actual=tuple(x.shape),
            next_step="give the partition one dim for each dim of the tensor (1: not split)",
        )


def check_kind(op, x, P, kinds) -> None:
    """Raise where ``op`` is not of tensors of x's dtype: on every rank, as those outside pass the dtype that the others
    have."""
    fits = {
        "any dtype": True,
        "a floating or complex dtype": x.is_floating_point() or x.is_complex(),
        "a floating dtype": x.is_floating_point(),
        "a real dtype": not x.is_complex(),
    }
    if not fits[kinds]:
        raise ShapeError(
            "not of such tensors",
            op=op,
            partitions=P,
            expected=kinds,
            actual=x.dtype,
            next_step="convert the tensor first",
        )


def one_each(x, P, dims):
    """All-gather of tensors that have size 1 along ``dims``: rank i's entry stands at place i, so no shape is asked
    for.

    ``x``: a tensor, or several of one shape; leading axes that ``P`` lacks stay as they are.
    """
    like = x if isinstance(x, torch.Tensor) else x[0]
    lead, shape = like.dim() - P.ndim, list(like.shape)
    for d in dims:
        shape[d + lead] = P.shape[d]
    A = maps.gathering(P, shape, {d + lead: d for d in dims})
    return A(x) if like is x else move(x, [A] * len(x))


def pivot(x, P, dims: tuple[int, ...]):
    """The largest x over ``dims`` and all ranks, as a constant: what exponentials are taken relative to.

    It has no derivative, as results do not depend on it. One all-gather of N elements; none backward.
    """
    x = x.detach()
    empty = 0 in (x.shape[d] for d in dims)
    highest = x.new_full(_kept(x, dims), -math.inf) if empty else x.amax(dims, keepdim=True)
    return one_each(highest, P, dims).amax(dims, keepdim=True)


def zero_loss(*tensors):
    """What a rank outside the partition has as its loss: a zero that depends on the tensors."""
    return nothing((0,), *tensors).sum()


def summed(total, counts, P, dims):
    """Sum ``total`` (a tensor) and ``counts`` (a scalar, or ``None``) over ``dims`` in one all-reduce; both
    invariant."""
    if counts is None:
        return invariant_sum(total, P, dims), None
    if isinstance(counts, torch.Tensor):
        counts = counts.to(total)
    else:  # filled there: a copy from the host would wait for the device
        counts = torch.full((), counts, dtype=total.dtype, device=total.device)
    both = invariant_sum(torch.cat([total.reshape(-1), counts.reshape(1)]), P, dims)
    return both[:-1].reshape(total.shape), both[-1]


# ---------------------------------------------------------------- the reductions


def _kept(x, dims):
    return [1 if d in dims else n for d, n in enumerate(x.shape)]


def _start(op, x, P, dim, kinds="any dtype"):
    """(x, partition, reduced dims). Every rank raises for a dtype of the wrong kind, also one whose block is empty."""
    where = partition_of(P)
    dims = where.dims(None if dim == () else dim, op)  # (): all, as in torch
    (x,) = autocast(op, where.ndim, x)
    (check_block if where.active else check_tensor)(op, x, P)
    check_kind(op, x, P, kinds)
    return x, where, dims


def _outside(x, P, dims, keepdim, dtype=None):
    """The result of a rank that takes no part, whatever it passed: of as many dims as its peers', and of their
    dtype."""
    shape, dtype = outside_shape(x, P)[: partition_of(P).ndim], x.dtype if dtype is None else dtype
    left = [1 if d in dims else n for d, n in enumerate(shape) if keepdim or d not in dims]
    return nothing((0, *left[1:]), x, dtype=dtype) if left else zero_loss(x).to(dtype)


def _squeeze(y, dims, keepdim):
    return y if keepdim else y.squeeze(dims)


def dist_sum(x, P, dim=None, keepdim=False):
    """The sum over ``dim``. Half precision is summed in float32, and integers as torch does.

    Messages: one all-reduce of N elements; none backward.
    """
    x, where, dims = _start("dist_sum", x, P, dim)
    if not where.active:
        return _outside(x, P, dims, keepdim, x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    local = wide(x).sum(dims, keepdim)
    return invariant_sum(local, where, dims).to(x.dtype if x.is_floating_point() else local.dtype)


def dist_mean(x, P, dim=None, keepdim=False):
    """The mean over ``dim``: sum by count, exact on uneven blocks. NaN where there is nothing to average.

    Messages: one all-reduce of N + 1 elements (the count goes along), N with a Layout; none backward.
    """
    x, where, dims = _start("dist_mean", x, P, dim, "a floating or complex dtype")
    if not where.active:
        return _outside(x, P, dims, keepdim)
    total, count = _sum_and_count(wide(x), P, dims, keepdim)
    return (total / count).to(x.dtype)


def _sum_and_count(x, P, dims, keepdim):
    """The sum over ``dims`` and how many elements it has; the count is asked for only where no Layout tells it."""
    known = isinstance(P, Layout)
    local = None if known else math.prod(x.shape[d] for d in dims)
    total, count = summed(x.sum(dims, keepdim), local, partition_of(P), dims)
    return total, math.prod(P.shape[d] for d in dims) if known else count


def dist_var(x, P, dim=None, keepdim=False, *, correction=1):
    """The variance over ``dim``, divided by n - ``correction``: from the global mean, without cancellation; of complex
    x the mean of |x - mean|², as in torch.

    Messages: two all-reduces, of N + 1 elements (N with a Layout) and of N; backward one of N, for the mean.
    """
    x, where, dims = _start("dist_var", x, P, dim, "a floating or complex dtype")
    if not where.active:
        return _outside(x.real, P, dims, keepdim)
    total, count = _sum_and_count(wide(x), P, dims, True)
    apart = wide(x) - mark_varying(total / count, where, dims)
    squares = apart.square() if not x.is_complex() else apart.real.square() + apart.imag.square()
    return (invariant_sum(squares.sum(dims, keepdim), where, dims) / (count.real - correction)).to(x.dtype.to_real())


def dist_logsumexp(x, P, dim, keepdim=False):
    """log Σ exp(x) over ``dim``, one or several, relative to the largest x of all ranks.

    Messages: one all-gather and one all-reduce, of N elements each; none backward.
    """
    x, where, dims = _start("dist_logsumexp", x, P, dim, "a floating dtype")
    if not where.active:
        return _outside(x, P, dims, keepdim)
    high = pivot(wide(x), where, dims)
    high = torch.where(high.isfinite(), high, 0)  # so that the sum of -inf alone is -inf, and with inf inf
    total = invariant_sum((wide(x) - high).exp().sum(dims, True), where, dims)
    return _squeeze(total.log() + high, dims, keepdim).to(x.dtype)


def dist_max(x, P, dim=None, keepdim=False):
    """The largest element over ``dim``, as ``x.amax(dim)``: the gradient is divided evenly among equal largest
    elements.

    Every rank learns the largest value and how often it occurs; the invariant sum then carries the derivative only. An
    empty
    tensor has no maximum: ShapeError with a Layout, NaN without.

    Messages: one all-gather of 2N elements and one all-reduce of N (integers: an all-gather of N); none backward.
    """
    return _extreme("dist_max", x, P, dim, keepdim, torch.amax)


def dist_min(x, P, dim=None, keepdim=False):
    """The smallest element over ``dim``; as :func:`dist_max`."""
    return _extreme("dist_min", x, P, dim, keepdim, torch.amin)


def _worst(dtype, pick):
    """What loses against everything."""
    if dtype.is_floating_point:
        return -math.inf if pick is torch.amax else math.inf
    if dtype == torch.bool:
        return pick is not torch.amax
    return torch.iinfo(dtype).min if pick is torch.amax else torch.iinfo(dtype).max


def _check_some(op, L, dims) -> None:
    if isinstance(L, Layout) and 0 in (L.shape[d] for d in dims):
        raise ShapeError(
            "there is no element to choose",
            op=op,
            partitions=L,
            actual=L.shape,
            expected="elements in the reduced dims",
            next_step="reduce over dims that have elements",
        )


def _extreme(op, x, P, dim, keepdim, pick):
    x, where, dims = _start(op, x, P, dim, "a real dtype")
    if not where.active:
        return _outside(x, P, dims, keepdim)
    _check_some(op, P, dims)
    some = all(x.shape[d] for d in dims)
    mine = (
        pick(x, dims, keepdim=True) if some else x.sum(dims, True).to(x.dtype) + x.new_full((), _worst(x.dtype, pick))
    )
    if not x.is_floating_point():
        return _squeeze(pick(one_each(mine, where, dims), dims, keepdim=True), dims, keepdim)
    held = mine.detach()
    ties = wide((x.detach() == held).to(x.dtype)).sum(dims, True)
    values, counts = one_each(torch.stack([held.to(ties.dtype), ties]), where, dims)
    best = pick(values, dims, keepdim=True)
    total = torch.where(values == best, counts, 0).sum(dims, True)
    share = ties / total
    # best + the sum of differences from it, all of them 0: the value is exact, and each tie has its share of the
    # derivative.
    base = torch.where(best.isinf(), 0, best)
    moved = torch.where((held == best) & (ties > 0), (mine.to(ties.dtype) - base) * share, 0)
    nowhere = torch.where(total == 0, math.nan, 0.0).to(base.dtype)  # no rank has an element
    result = base + nowhere + invariant_sum(moved, where, dims)
    return _squeeze(result, dims, keepdim).to(x.dtype)


def dist_norm(x, P, dim=None, keepdim=False, *, ord=2):
    """The vector norm (Σ |x|^ord)^(1/ord) over ``dim``, as ``torch.linalg.vector_norm``; its gradient at 0 is 0.

    Args:
        ord: any number; ``inf`` and ``-inf`` are the largest and the smallest |x|, and 0 counts what is not 0.

    Messages: one all-reduce of N elements (``inf``: as :func:`dist_max`); none backward.
    """
    x, where, dims = _start("dist_norm", x, P, dim, "a floating or complex dtype")
    if abs(ord) == math.inf:
        return (dist_max if ord > 0 else dist_min)(x.abs(), P, dim, keepdim)
    if not where.active:
        return _outside(x.abs(), P, dims, keepdim)
    x, dtype = wide(x), x.abs().dtype
    if ord == 0:
        nonzero = (x != 0).to(x.abs().dtype).sum(dims, keepdim)
        return invariant_sum(tie(nonzero, x), where, dims).to(dtype)  # its derivative is zero, and not absent
    terms = x.square() if ord == 2 and not x.is_complex() else power(x.abs(), ord)
    return power(invariant_sum(terms.sum(dims, keepdim), where, dims), 1 / ord).to(dtype)


def power(x, exponent):
    """x ** exponent, with derivative 0 where x = 0, as norms have it."""
    if exponent == 1 or exponent < 0:
        return x**exponent
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x) ** exponent)


def dist_argmax(x, P, dim=None, keepdim=False):
    """The global index (int64) of the first largest element over one ``dim``; ``None``: in the flattened global tensor.

    NaN counts as largest, as in torch. A bare partition is negotiated, as the global index needs every block's offset.

    Messages: one all-gather of N values and N indices, in one message to each peer.

    Raises:
        ShapeError: the reduced dims have no element.
    """
    x, where, dims = _start("dist_argmax", x, P, dim, "a real dtype")
    if not where.active:
        return _outside(x, P, dims, keepdim, torch.int64)
    if dim is not None and len(dims) != 1:
        raise PartitionError(
            "one dim at a time",
            op="dist_argmax",
            partitions=P,
            expected="an int or None",
            actual=dim,
            next_step="call it once for each dim, or with None for all of them",
        )
    (x,), (L,) = resolve("dist_argmax", (x.detach(),), P)
    _check_some("dist_argmax", L, dims)
    last = torch.iinfo(torch.int64).max
    if all(x.shape[d] for d in dims):
        # not argmax(None): under vmap torch's gives another shape
        place = x.flatten().argmax(0).reshape(_kept(x, dims)) if dim is None else x.argmax(dims[0], keepdim=True)
        value = x.amax(dims, keepdim=True)
        index, step = torch.zeros_like(place), 1
        for d in reversed(dims):  # local place -> coordinates -> global place
            index = index + (place % x.shape[d] + L.box()[d][0]) * step
            place, step = place // x.shape[d], step * L.shape[d]
    else:
        value = x.new_full(_kept(x, dims), _worst(x.dtype, torch.amax))
        index = torch.full_like(value, last, dtype=torch.int64)
    values, indices = one_each([value, index], where, dims)
    largest = (values == values.amax(dims, keepdim=True)) | (values != values)
    return _squeeze(torch.where(largest, indices, last).amin(dims, keepdim=True), dims, keepdim)
