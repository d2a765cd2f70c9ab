"""Numbers of several ranks: sums that are taken wide, the largest of all, and one entry of each rank."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from .. import _torch, maps
from ..movement.call import move
from ..movement.copies import invariant_sum
from ..partition import Layout

__all__: list[str] = []


def wider(dtype):
    """The dtype that sums are taken in: float32 for half precision and less, else ``dtype`` itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def wide(x):
    """``x`` in that dtype."""
    return x.to(wider(x.dtype))


def beyond(idx, n: int) -> int | None:
    """An index that is not one of 0 .. n - 1, where the values can be looked at without waiting for a device. Elsewhere
    (a batch under vmap, CUDA, compiled code) the local operation itself fails, as torch's does."""
    if idx.is_cuda or _torch.levels_of(idx) or not idx.numel() or _torch.is_fake(idx):
        return None
    with _torch.no_modes():
        low, high = (int(v) for v in torch.aminmax(idx))
    return low if low < 0 else high if high >= n else None


def power(x, exponent):
    """x ** exponent, with derivative 0 where x = 0, as norms have it."""
    if exponent == 1 or exponent < 0:
        return x**exponent
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x) ** exponent)


def reduced_shape(x, dims) -> list[int]:
    """The shape that is left of x with size 1 in ``dims``."""
    return [1 if d in dims else n for d, n in enumerate(x.shape)]


def one_each(x, P, dims):
    """All-gather of tensors that have size 1 along ``dims``: rank i's entry stands at place i, so no shape is asked
    for.

    ``x``: a tensor, or several of one shape; leading axes that ``P`` lacks stay as they are.
    """
    like = x if isinstance(x, torch.Tensor) else x[0]
    lead, shape = like.dim() - len(P.shape), list(like.shape)
    for d in dims:
        shape[d + lead] = P.shape[d]
    A = maps.gathering(P, shape, {d + lead: d for d in dims})
    return A(x) if like is x else move(x, [A] * len(x))


def pivot(x, P, dims: tuple[int, ...]):
    """The largest x over ``dims`` and all ranks, as a constant: what exponentials are taken relative to.

    It has no derivative, as results do not depend on it. One all-gather of N elements; none backward.
    """
    x = x.detach()
    empty = x.numel() == 0 and 0 in [x.shape[d] for d in dims]
    highest = x.new_full(reduced_shape(x, dims), -math.inf) if empty else x.amax(dims, keepdim=True)
    return one_each(highest, P, dims).amax(dims, keepdim=True)


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


@lru_cache(maxsize=4096)
def count(L: Layout, dims: tuple[int, ...]) -> int:
    """How many elements a tensor of layout ``L`` has over ``dims``."""
    return math.prod(L.shape[d] for d in dims)


def sum_and_count(x, L, dims, keepdim):
    """The sum over ``dims``, invariant, and how many elements it has: asked for, in the same all-reduce, only where no
    Layout tells it."""
    if isinstance(L, Layout):
        return invariant_sum(x.sum(dims, keepdim), L.partition, dims), count(L, dims)
    return summed(x.sum(dims, keepdim), math.prod([x.shape[d] for d in dims]), L, dims)
