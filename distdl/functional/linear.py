"""Linear layers: one function for DistDL's general, all-gather and reduce-scatter layers and Megatron's column and row
ones."""

from __future__ import annotations

from functools import lru_cache

import torch

from .._arguments import checked
from ..agree import check_tensor, partition_of
from ..errors import PartitionError, ShapeError
from ..movement.copies import all_sum_reduce, broadcast, invariant_sum, mark_varying, sum_reduce
from ..movement.gathers import all_gather, reduce_scatter
from ..partition import Layout
from ..ties import nothing, tie
from .autocast import autocast
from .params import check_bias, replicated

__all__ = ["dist_linear"]

LAYOUTS = ("root", "replicated", "invariant", "sharded")


def check_layouts(op, x_layout, y_layout):
    """Raise PartitionError unless both are known."""
    for name, value in (("x_layout", x_layout), ("y_layout", y_layout)):
        if value not in LAYOUTS:
            raise PartitionError(
                f"no such {name}", op=op, expected=LAYOUTS, actual=value, next_step="choose one of these"
            )


@lru_cache(maxsize=1024)
def _roots(P, dim):
    """The ranks at index 0 of partition dim ``dim``."""
    return P.take(dim, 0, keepdim=True)


def spread(x, P, dim, how, x_dim, local_shape=None):
    """Bring ``x``, which lies along partition dim ``dim`` as ``how`` says, to every rank of that dim.

    Args:
        P: a partition with one more dim than x, ``dim``.
        x_dim: the tensor dim that is split over ``dim`` when ``how`` is "sharded".
        local_shape: shape of the result on this rank, when it is known; else it is negotiated.
    """
    if how == "root":
        return broadcast(x, _roots(P, dim), P, shape=local_shape)
    if how == "invariant":
        return mark_varying(x, P, dim)
    if how == "sharded":
        return all_gather(x, P, {x_dim: dim}, shape=local_shape)
    return x


def collect(y, P, dim, how, y_dim):
    """Sum the ranks' parts of ``y`` along partition dim ``dim``, and leave the sum as ``how`` says."""
    if how == "root":
        return sum_reduce(y, P, _roots(P, dim), shape=tuple(y.shape))
    if how == "invariant":
        return invariant_sum(y, P, dim)
    if how == "sharded":
        return reduce_scatter(y, P, {y_dim: dim})
    return all_sum_reduce(y, P, dim)


def bias_once(bias, P, dim):
    """``bias`` on the ranks at index 0 of partition dim ``dim``, which add it; elsewhere a zero that depends on it, so
    that every rank's backward reaches it."""
    coords = P.index()
    if bias is None or coords is None or coords[dim] == 0:
        return bias
    return tie(torch.zeros_like(bias), bias)


@checked
def dist_linear(x, w, P, bias=None, *, x_layout="root", y_layout="root", x_dim=-2, y_dim=-2, params="varying"):
    """y = x Wᵀ + b with W split into blocks over two partition dims.

    Args:
        x: (*batch, in), this rank's block: batch dims over the leading dims of ``P``, features over its last dim.
        w: (out, in), this rank's block of W over the last two dims of ``P``. Every rank has one.
        P: (*batch dims of x, out, in); or a Layout of global shape (*batch, out features, in features), and then
            nothing is negotiated.
        bias: (out,), this rank's block over the *out* dim. It is added once, by the ranks at index 0 of *in*.
        x_layout: how x lies along the *out* dim: "root" (on index 0; broadcast), "replicated" (independent copies; no
            message), "invariant" (one value on all; ``mark_varying``), "sharded" (its dim ``x_dim`` split over it;
            all-gathered).
        y_layout: how y is left along the *in* dim: "root" (summed to index 0), "replicated" (all-sum-reduced),
            "invariant" (``invariant_sum``), "sharded" (reduce-scattered along its dim ``y_dim``, balanced).
        params: "varying": w and bias are each rank's own (or already marked). "invariant": equal on the ranks that hold
            the same block, that is over the batch dims of ``P``, for the bias over *in* too; the layer marks them.

    Returns:
        (*batch, out): this rank's block; where nothing is left ("root"), a connected tensor without elements.

    Messages, with |x| and |y| the local elements, p_out and p_in the sizes of the two dims: forward "root" 1 broadcast
    of |x| and
    1 reduction of |y|, "sharded" the same elements as all-gather and reduce-scatter, "invariant" and "replicated" 0 for
    x and 1
    all-reduce of |y|; backward the transposes ("invariant" y: none; "invariant" x: 1 all-reduce of |x|).

    After Hewett & Grady, arXiv:2006.03108, section 4; column and row parallel: Shoeybi et al., arXiv:1909.08053;
    sequence
    parallel: Korthikanti et al., arXiv:2205.05198.

    Raises:
        PartitionError, ShapeError: unknown layouts; P without one dim for each of x's and one more; w that does not fit
            x.
    """
    check_layouts("dist_linear", x_layout, y_layout)
    where = partition_of(P)
    (x,) = autocast("dist_linear", where.ndim, x)
    if not where.active:
        check_tensor("dist_linear", x, P)
    batch = where.ndim - 2
    if where.ndim < 3 or (
        where.active and x.dim() + 1 != where.ndim and (x_layout != "root" or where.index()[batch] == 0)
    ):
        raise PartitionError(
            "P needs one dim for each of x's and one more",
            op="dist_linear",
            partitions=where,
            expected="(*batch dims, out, in)",
            actual=f"x of {x.dim()} dims",
            next_step="add the partition's dims for w's rows (out) and columns (in) after the batch dims",
        )
    local = None
    if isinstance(P, Layout):
        sizes = P.local_shape()
        local = (*sizes[:-2], sizes[-1])
    (w,) = replicated(params, where, range(batch), w)
    (bias,) = replicated(params, where, (*range(batch), batch + 1), bias)
    if not where.active:
        shape = (
            P.local_shape()[1:-1] if local else (*x.shape[1:-1], w.shape[0]) if x.dim() == batch + 1 else (0,) * batch
        )
        return nothing((0, *shape), x, w, *(() if bias is None else (bias,)))
    x = spread(x, where, batch, x_layout, _along(x_dim, where.ndim - 1), local)
    if x.shape[-1] != w.shape[-1]:
        raise ShapeError(
            "w does not fit x",
            op="dist_linear",
            partitions=where,
            expected=f"w of shape (out, {x.shape[-1]})",
            actual=tuple(w.shape),
            next_step="split in-features of x and w alike",
        )
    check_bias("dist_linear", where, bias, w.shape[0])
    y = torch.nn.functional.linear(x, w, bias_once(bias, where, batch + 1))
    return collect(y, where, batch + 1, y_layout, _along(y_dim, where.ndim - 1))


def _along(dim, ndim):
    return dim % ndim if -ndim <= dim < ndim else dim
