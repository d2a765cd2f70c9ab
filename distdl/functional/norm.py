"""Normalisation over partitioned tensors: exact on uneven and empty blocks, and stable.

Mean and variance come from one all-gather of each rank's (mean, M2), M2 = Σ (x - mean)², merged in rank order after Chan, Golub and
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979)::

    n = Σ n_r      mean = Σ n_r mean_r / n      M2 = Σ M2_r + Σ n_r (mean_r - mean)²

so that nothing cancels (Σx² - (Σx)²/n loses everything in float32 at mean 3000). The counts n_r come from the layout. Every rank
uses its own copy of the statistics (varying); the adjoint, a reduce-scatter, sums their cotangents. Half precision is normalised in
float32, and the result has the dtype of x.

Throughout: x is this rank's block over ``P`` (a Partition, then shapes are agreed on, or a Layout, then nothing is), the
result this rank's block in the same layout; a rank outside ``P`` gets a connected tensor without elements. ``weight`` and
``bias`` may be ``None``. ``params="invariant"``: they are one value on all ranks that hold them, marked here (then one more
all-reduce backward, of all their elements); ``"varying"``: the caller has marked or broadcast them. k is the number of ranks that
statistics are taken over; an "all-gather of N" sends N elements to k - 1 ranks, and its reduce-scatter as many back.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from .. import maps
from ..agree import partition_of, resolve
from ..errors import PartitionError, ShapeError
from ..ties import nothing
from .movement import all_sum_reduce
from .params import replicated
from .reduce import check_block, one_each, wide

__all__ = ["dist_batch_norm", "dist_group_norm", "dist_instance_norm", "dist_layer_norm", "dist_rms_norm"]


# ---------------------------------------------------------------- statistics


def _statistics(x, dims):
    """This rank's (mean, M2) over ``dims``, of size 1 there; (0, 0) where it has no element."""
    if not dims:
        return torch.stack([x, torch.zeros_like(x)])  # torch takes () for all dims
    mean = x.sum(dims, keepdim=True) / max(math.prod(x.shape[d] for d in dims), 1)
    return torch.stack([mean, (x - mean).square().sum(dims, keepdim=True)])


def _merge(statistics, counts, dims):
    """Chan's formula over ``dims`` of (mean, M2), which are counted from the end; ``counts`` broadcasts against each.

    What has count 0 counts nothing, whatever it holds.
    """
    mean, m2 = torch.where(counts > 0, statistics, 0)
    share = counts / counts.sum(dims, keepdim=True).clamp(min=1)
    total = (mean * share).sum(dims, keepdim=True)
    return torch.stack([total, (m2 + counts * (mean - total).square()).sum(dims, keepdim=True)])


def _counts(L, dims, like):
    """How many elements each rank reduces over ``dims``, laid out as :func:`one_each` lays out the ranks."""
    counts = torch.ones((), dtype=like.dtype)
    for d in range(L.ndim):
        sizes = L.sizes(d) if d in dims else (1,)
        counts = counts.unsqueeze(-1) * torch.tensor(sizes, dtype=like.dtype)
    return counts.to(like.device)


def _moments(x, L, dims):
    """Mean and biased variance of the global x over ``dims`` (of size 1 there), and the number of elements."""
    n = math.prod(L.shape[d] for d in dims)
    from_end = tuple(d - L.ndim for d in dims)
    mean, m2 = _merge(one_each(_statistics(x, dims), L.partition, dims), _counts(L, dims, x), from_end)
    return mean, m2 / max(n, 1), n


def _normalised(x, mean, var, eps, weight, bias, dtype):
    """(x - mean) / sqrt(var + eps), scaled and shifted; the parameters broadcast against x."""
    y = (x - mean) * (var + eps).rsqrt()
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(dtype)


# ---------------------------------------------------------------- arguments


def _enter(op, x, P, least, *parameters):
    """(x, its layout), or (a placeholder that depends on x and the parameters, ``None``) on a rank that takes no part."""
    where = partition_of(P)
    if where.ndim < least:
        raise PartitionError("too few dims", op=op, partitions=P, expected=f"at least {least}", actual=where.ndim)
    if not where.active:
        shape = (0, *x.shape[1:]) if x.dim() == where.ndim else (0,) * where.ndim
        return nothing(shape, x, *(t for t in parameters if t is not None)), None
    check_block(op, x, P)
    (x,), (L,) = resolve(op, (x,), P)
    if not x.is_floating_point():
        raise ShapeError("only floating tensors can be normalised", op=op, expected="a floating dtype", actual=x.dtype)
    return x, L


def _parameters(op, params, L, dims, shape, *tensors):
    """This rank's parameters of ``shape``, marked along ``dims`` and as large as x in dims."""
    for t in tensors:
        if t is not None and tuple(t.shape) != shape:
            raise ShapeError("a parameter is not this rank's block", op=op, partitions=L, expected=shape, actual=tuple(t.shape))
    return replicated(params, L, dims, *tensors)


def _of_channels(L, t):
    """A tensor over the channels, ready to broadcast against x."""
    return None if t is None else t.reshape(-1, *[1] * (L.ndim - 2))


def _trailing(op, L, normalized_shape):
    """The dims of ``normalized_shape``, the global shape of the trailing dims."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or L.shape[L.ndim - len(shape) :] != shape or len(shape) > L.ndim:
        raise ShapeError("normalized_shape is not the global shape of the trailing dims", op=op, partitions=L, actual=shape,
                         expected=f"the end of {L.shape}", next_step="pass the global sizes, not this rank's")
    return tuple(range(L.ndim - len(shape), L.ndim))


# ---------------------------------------------------------------- layers


def dist_batch_norm(x, P, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, *,
                    num_batches_tracked=None, params="varying"):
    """Batch normalisation of (batch, channel, *space), over the batch and space of all ranks. Pure: nothing is updated in place.

    Args:
        running_mean, running_var, weight, bias: (this rank's channels,), replicated over every partition dim but 1; the running
            ones may both be ``None``, which means batch statistics.
        training: use the batch's statistics, and return new running ones.
        momentum: share of the new batch in the running statistics; ``None``: their cumulative average, with share
            1 / ``num_batches_tracked``, which counts this batch too (as torch's module counts it).

    Returns:
        (y, new running mean, new running var): the latter as given when they were not used; no gradient passes
        through them, the variance is unbiased (n / (n - 1)), and they are equal on all ranks that hold the same channels.

    Raises:
        ShapeError: training with one value for a channel, or none, in the whole batch.

    Messages, with C channels on this rank: training, one all-gather of 2C; backward one reduce-scatter. Evaluation: none.
    """
    op = "dist_batch_norm"
    x, L = _enter(op, x, P, 2, weight, bias)
    if L is None:
        return x, running_mean, running_var
    dims = tuple(d for d in range(L.ndim) if d != 1)
    weight, bias = _parameters(op, params, L, dims, (x.shape[1],), weight, bias)
    _parameters(op, "varying", L, dims, (x.shape[1],), running_mean, running_var)
    dtype, x = x.dtype, wide(x)
    if not training and running_mean is not None:
        mean, var = _of_channels(L, running_mean), _of_channels(L, running_var)
    else:
        mean, var, n = _moments(x, L, dims)
        if training and n < 2:
            raise ShapeError("one value for a channel has no variance", op=op, partitions=L, actual=L.shape,
                             expected="more than 1 value per channel when training")
        if training and running_mean is not None:
            if momentum is None and num_batches_tracked is None:
                raise ShapeError("a cumulative average needs a count", op=op, expected="num_batches_tracked with momentum=None",
                                 actual=num_batches_tracked)
            momentum = 1 / num_batches_tracked if momentum is None else momentum
            new = mean.detach().reshape(-1), var.detach().reshape(-1) * (n / (n - 1))
            running_mean, running_var = (
                (old * (1 - momentum) + fresh.to(old.dtype) * momentum) for old, fresh in zip((running_mean, running_var), new)
            )
    return _normalised(x, mean, var, eps, _of_channels(L, weight), _of_channels(L, bias), dtype), running_mean, running_var


def dist_instance_norm(x, P, weight=None, bias=None, eps=1e-5, *, params="varying"):
    """Normalisation of every (batch, channel) of (batch, channel, *space) over its space, by its own statistics.

    Args:
        weight, bias: (this rank's channels,), replicated over every partition dim but 1.

    Raises:
        ShapeError: one value, or none, in a whole channel.

    Messages, with b examples and C channels on this rank, and space split: one all-gather of 2bC; backward one reduce-scatter.
    """
    x, L = _enter("dist_instance_norm", x, P, 3, weight, bias)
    if L is None:
        return x
    weight, bias = _parameters("dist_instance_norm", params, L, [d for d in range(L.ndim) if d != 1], (x.shape[1],), weight, bias)
    dtype, x = x.dtype, wide(x)
    mean, var, n = _moments(x, L, tuple(range(2, L.ndim)))
    if n < 2:
        raise ShapeError("one value for a channel has no variance", op="dist_instance_norm", partitions=L, actual=L.shape,
                         expected="more than 1 value per channel")
    return _normalised(x, mean, var, eps, _of_channels(L, weight), _of_channels(L, bias), dtype)


def dist_layer_norm(x, P, normalized_shape, weight=None, bias=None, eps=1e-5, *, params="varying"):
    """Layer normalisation over the trailing dims, any of which may be split.

    Args:
        normalized_shape: the *global* sizes of these dims.
        weight, bias: this rank's block of that shape, replicated over the leading partition dims.

    Messages, with N sets of statistics on this rank (its leading sizes), where trailing dims are split: one all-gather of 2N;
    backward one reduce-scatter.
    """
    x, L = _enter("dist_layer_norm", x, P, 1, weight, bias)
    if L is None:
        return x
    dims = _trailing("dist_layer_norm", L, normalized_shape)
    weight, bias = _parameters("dist_layer_norm", params, L, range(dims[0]), tuple(x.shape[dims[0] :]), weight, bias)
    dtype, x = x.dtype, wide(x)
    mean, var, _ = _moments(x, L, dims)
    return _normalised(x, mean, var, eps, weight, bias, dtype)


def dist_rms_norm(x, P, normalized_shape, weight=None, eps=None, *, params="varying"):
    """x / sqrt(mean(x²) + eps) over the trailing dims (Zhang and Sennrich, arXiv:1910.07467), any of which may be split.

    Args:
        normalized_shape: the *global* sizes of these dims.
        weight: this rank's block of that shape, replicated over the leading partition dims.
        eps: ``None``: the machine epsilon of x's dtype, as in torch.

    Messages, with N sets on this rank (its leading sizes), where trailing dims are split: one all-reduce of N; backward another.
    """
    x, L = _enter("dist_rms_norm", x, P, 1, weight)
    if L is None:
        return x
    dims = _trailing("dist_rms_norm", L, normalized_shape)
    (weight,) = _parameters("dist_rms_norm", params, L, range(dims[0]), tuple(x.shape[dims[0] :]), weight)
    eps, dtype, x = torch.finfo(x.dtype).eps if eps is None else eps, x.dtype, wide(x)
    total = all_sum_reduce(x.square().sum(dims, keepdim=True), L.partition, dims)
    return _normalised(x, 0, total / max(math.prod(L.shape[d] for d in dims), 1), eps, weight, None, dtype)


def dist_group_norm(x, P, num_groups, weight=None, bias=None, eps=1e-5, *, params="varying"):
    """Normalisation of (batch, channel, *space) over ``num_groups`` groups of adjacent channels and all of space.

    Channels may be split anywhere: a group that lies on several ranks is merged from the parts of all of them.

    Args:
        num_groups: number of groups of the *global* channels, which it divides.
        weight, bias: (this rank's channels,), replicated over every partition dim but 1.

    Messages, with b examples on this rank, whose channels touch G groups, where channels or space are split: one all-gather of
    2bG; backward one reduce-scatter.
    """
    op = "dist_group_norm"
    x, L = _enter(op, x, P, 2, weight, bias)
    if L is None:
        return x
    if num_groups < 1 or L.shape[1] % num_groups:
        raise ShapeError("the groups do not divide the channels", op=op, partitions=L, actual=num_groups,
                         expected=f"a divisor of {L.shape[1]}")
    weight, bias = _parameters(op, params, L, [d for d in range(L.ndim) if d != 1], (x.shape[1],), weight, bias)
    dtype, x = x.dtype, wide(x)
    mean, var = _group_moments(x, L, max(L.shape[1] // num_groups, 1))
    return _normalised(x, mean, var, eps, _of_channels(L, weight), _of_channels(L, bias), dtype)


def _group_moments(x, L, size):
    """Mean and biased variance of each channel's group, of shape (batch, channel, *1), for groups of ``size`` channels.

    Three merges: of a group's channels on this rank (a *part*), then of its parts on all ranks, where space is merged too.
    """
    space, ones = tuple(range(2, L.ndim)), (1,) * (L.ndim - 2)
    touched = [range(start // size, -(-stop // size)) if start < stop else range(0) for start, stop in L.blocks(1)]
    at = L.partition.index()[1]
    mine, (start, stop) = touched[at], L.blocks(1)[at]

    # channels -> parts: channels that other ranks hold are put in with count 0
    batch, held = x.shape[0], torch.full((stop - start,), math.prod(x.shape[2:]), dtype=x.dtype, device=x.device)
    around = (start - mine.start * size, mine.stop * size - stop) if mine else (0, 0)
    channels = pad(_statistics(x, space).reshape(2, batch, stop - start), around).reshape(2, batch, len(mine), size)
    parts = _merge(channels, pad(held, around).reshape(len(mine), size), (-1,)).reshape(2, batch, len(mine), *ones)

    # every rank's parts, in the order of ranks
    pairs = {t + 1: t for t in range(1, L.ndim)}
    sizes = {2: tuple(map(len, touched))} | {t + 1: (1,) * L.partition.shape[t] for t in space}
    shape = (2, batch, *(sum(s) for s in sizes.values()))
    parts = maps.gathering(L.partition, shape, pairs, sizes)(parts)

    # parts -> groups: the places of each group's parts, filled up with its first place and count 0
    known = [(g, min((g + 1) * size, b) - max(g * size, a)) for groups, (a, b) in zip(touched, L.blocks(1)) for g in groups]
    places = [[i for i, (g, _) in enumerate(known) if g == mine_g] for mine_g in mine]
    width = max(map(len, places), default=1)
    counts = [[known[i][1] for i in p] + [0] * (width - len(p)) for p in places]
    places = [p + p[:1] * (width - len(p)) for p in places]
    index = torch.tensor(places, device=x.device, dtype=torch.int64).reshape(-1)
    parts = parts.index_select(2, index).unflatten(2, (len(mine), width))
    shares = torch.tensor(counts, device=x.device, dtype=x.dtype).reshape(len(mine), width, *ones) * _counts(L, space, x)
    mean, m2 = _merge(parts, shares, tuple(range(1 - L.ndim, 0))).squeeze(3)

    group_of = torch.arange(start, stop, device=x.device) // size - mine.start
    n = size * math.prod(L.shape[d] for d in space)
    return mean.index_select(1, group_of), m2.index_select(1, group_of) / max(n, 1)
