"""How a tensor lies along one partition dim that it is not split over: on its first ranks, as copies, as one value, or
split in a dim of its own."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..boxes import balanced
from ..errors import PartitionError
from ..movement.copies import all_sum_reduce, broadcast, invariant_sum, mark_varying, sum_reduce
from ..movement.gathers import all_gather, reduce_scatter
from ..ties import tie

__all__: list[str] = []

LAYOUTS = ("root", "replicated", "invariant", "sharded")


def check_layouts(x_layout, y_layout) -> None:
    """Raise PartitionError unless both are known."""
    for name, value in (("x_layout", x_layout), ("y_layout", y_layout)):
        if value not in LAYOUTS:
            raise PartitionError(f"no such {name}", expected=LAYOUTS, actual=value, next_step="choose one of these")


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
        return sum_reduce(y, P, _roots(P, dim), shape=y.shape)
    if how == "invariant":
        return invariant_sum(y, P, dim)
    if how == "sharded":
        return reduce_scatter(y, P, {y_dim: dim})
    return all_sum_reduce(y, P, dim)


def collected(sizes, P, dim, how, y_dim) -> tuple[int, ...]:
    """The sizes of the first block that :func:`collect` leaves of blocks of ``sizes``."""
    if how != "sharded" or not -len(sizes) <= y_dim < len(sizes):
        return tuple(sizes)
    y_dim %= len(sizes)
    return (*sizes[:y_dim], balanced(sizes[y_dim], P.shape[dim])[0], *sizes[y_dim + 1 :])


def bias_once(bias, at, dim):
    """``bias`` on the ranks whose coordinates ``at`` have index 0 of partition dim ``dim``, which add it; elsewhere a
    zero that depends on it, so that every rank's backward reaches it."""
    return bias if bias is None or at[dim] == 0 else tie(torch.zeros_like(bias), bias)
