"""Mean and variance across ranks, for :mod:`norm`: exact on uneven and empty blocks, and stable.

Mean and variance come from one all-gather of each rank's own, merged in rank order after Chan, Golub and LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances" (1979); rank r has the share w_r = n_r / n
of the elements::

    mean = Σ w_r mean_r        var = Σ w_r (var_r + (mean_r - mean)²)

so that nothing cancels (Σx² - (Σx)²/n loses everything in float32 at mean 3000). The shares come from the layout. Every
rank uses its own copy of the statistics (varying); the adjoint, a reduce-scatter, sums their cotangents.

A rank's own variance is the mean of (x - mean_r)², in two passes, as torch's one pass takes several times as long on a
CPU; and x - mean is then x - mean_r, which is there already, and a shift of as few numbers as there are means.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .. import _torch, maps
from .numeric import one_each


class Moments(NamedTuple):
    """Statistics of x over some dims, of size 1 there."""

    mean: torch.Tensor
    var: torch.Tensor  # biased
    centred: torch.Tensor  # x less this rank's own mean
    shift: torch.Tensor | None = None  # x - mean = centred + shift; ``None``: 0

    def among(self, mean, var) -> Moments:
        """The same elements with the statistics of more."""
        return Moments(mean, var, self.centred, self.mean - mean)


def statistics(x, dims) -> Moments:
    """This rank's own, over ``dims``; zeros where it has no element."""
    if not dims or not x.numel():  # torch takes () for all dims
        mean = x.sum(dims, keepdim=True) if dims else x
        return Moments(mean, torch.zeros_like(mean), x - mean)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    return Moments(mean, centred.square().mean(dims, keepdim=True), centred)


def merge(mean, var, shares, dims):
    """Chan's formula over ``dims``. ``shares`` broadcast against mean and var; ``None``: all have the same."""
    total = mean.mean(dims, keepdim=True) if shares is None else (mean * shares).sum(dims, keepdim=True)
    apart = mean - total
    parts = torch.addcmul(var, apart, apart)
    return total, parts.mean(dims, keepdim=True) if shares is None else (parts * shares).sum(dims, keepdim=True)


@lru_cache(maxsize=1024)
def _shares(L, dims):
    """Each rank's share of the elements over ``dims``, laid out as :func:`one_each` lays out the ranks: (numbers,
    shape)."""
    sizes = [L.sizes(d) if d in dims else (1,) for d in range(L.ndim)]
    n = max(math.prod(L.shape[d] for d in dims), 1)
    return [math.prod(block) / n for block in itertools.product(*sizes)], tuple(map(len, sizes))


def shares_like(x, L, dims):
    """The same as a tensor; ``None`` where all are equal."""
    shares, shape = _shares(L, dims)
    if shares[0] and min(shares) == max(shares):
        return None
    return _torch.constant(shares, x.dtype, x.device).reshape(shape)


def within(L, dims) -> bool:
    """Whether a rank has all elements that statistics over ``dims`` are taken of."""
    return all(L.partition.shape[d] == 1 for d in dims)


def merged(own: Moments, L, dims, shape=None) -> Moments:
    """Those of the global x over ``dims``, from this rank's own; ``shape``: theirs in the layout's dims, where x has
    more."""
    if within(L, dims):
        return own
    pair = torch.stack((own.mean, own.var))
    means, variances = one_each(pair if shape is None else pair.reshape(2, *shape), L.partition, dims)
    pair = merge(means, variances, shares_like(means, L, dims), tuple(d - L.ndim for d in dims))
    return own.among(*(t.reshape(own.mean.shape) for t in pair))


def moments(x, L, dims) -> Moments:
    """Those of the global x over ``dims``."""
    return merged(statistics(x, dims), L, dims)


# ---------------------------------------------------------------- groups that several ranks may share


class _Parts(NamedTuple):
    """Where a rank's channels lie in groups that several ranks may share. A *part* is what one rank has of one
    group."""

    parts: int  # on this rank
    around: tuple[int, int]  # channels of other ranks in this rank's first and last group
    own: list  # (part, channel) share of each channel in its part, 0 for those of other ranks
    sizes: tuple[int, ...]  # parts on every rank along the channel dim
    places: list[
        int
    ]  # the parts of each of this rank's groups, among all; filled up to one width with the first of them,
    shares: list  # (group, place) and their shares in the group, 0 for what fills up
    group_of: list[int]  # each channel's group, from this rank's first


@lru_cache(maxsize=1024)
def _parts(L, size, at) -> _Parts:
    """For the rank at coordinate ``at`` of the channel dim, and groups of ``size`` channels."""
    touched = [range(start // size, -(-stop // size)) if start < stop else range(0) for start, stop in L.blocks(1)]
    mine, (start, stop) = touched[at], L.blocks(1)[at]
    around = (start - mine.start * size, mine.stop * size - stop) if mine else (0, 0)

    def held(g, a, b):  # channels of group g among a ... b - 1
        return min((g + 1) * size, b) - max(g * size, a)

    own = [(start <= c < stop) / held(g, start, stop) for g in mine for c in range(g * size, (g + 1) * size)]
    known = [(g, held(g, a, b)) for groups, (a, b) in zip(touched, L.blocks(1)) for g in groups]
    places = [[i for i, (g, _) in enumerate(known) if g == mine_g] for mine_g in mine]
    width = max(map(len, places), default=1)
    shares = [w for p in places for w in (*(known[i][1] / size for i in p), *[0.0] * (width - len(p)))]
    places = [p + p[:1] * (width - len(p)) for p in places]
    return _Parts(
        len(mine),
        around,
        own,
        tuple(map(len, touched)),
        [i for p in places for i in p],
        shares,
        [c // size - mine.start for c in range(start, stop)],
    )


def cut_group_moments(x, L, size) -> Moments:
    """Those of each channel's group, of shape (batch, channel, *1), for groups of ``size`` channels.

    Three merges: of a group's channels on this rank (a *part*), then of its parts on all ranks, where space is merged
    too.
    """
    space, ones, batch = tuple(range(2, L.ndim)), (1,) * (L.ndim - 2), x.shape[0]
    known = _parts(L, size, L.partition.index()[1])

    def constant(values, *shape, dtype=x.dtype):
        return _torch.constant(values, dtype, x.device).reshape(shape)

    # channels -> parts: channels that other ranks hold are put in with share 0
    own = statistics(x, space)
    channels = torch.stack((own.mean, own.var)).reshape(2, batch, x.shape[1])
    mean, var = pad(channels, known.around).reshape(2, batch, known.parts, size)
    parts = torch.stack(merge(mean, var, constant(known.own, known.parts, size), (-1,))).reshape(
        2, batch, known.parts, *ones
    )

    # every rank's parts, in the order of ranks
    pairs = {t + 1: t for t in range(1, L.ndim)}
    sizes = {2: known.sizes} | {t + 1: (1,) * L.partition.shape[t] for t in space}
    shape = (2, batch, *(sum(s) for s in sizes.values()))
    parts = maps.gathering(L.partition, shape, pairs, sizes)(parts)

    # parts -> groups
    width = len(known.places) // max(known.parts, 1)
    mean, var = parts.index_select(2, constant(known.places, -1, dtype=torch.int64)).unflatten(2, (known.parts, width))
    shares, shape = _shares(L, space)
    shares = constant(known.shares, known.parts, width, *ones) * constant(shares, *shape)
    group_of = constant(known.group_of, -1, dtype=torch.int64)
    return own.among(
        *(t.squeeze(2).index_select(1, group_of) for t in merge(mean, var, shares, tuple(range(1 - L.ndim, 0))))
    )
