"""Normalisation over partitioned tensors: exact on uneven and empty blocks, and stable.

Mean and variance come from one all-gather of each rank's own, see :mod:`moments`; where a rank has all that they are
taken over, torch's kernel does layer, group and instance norms. Half precision is normalised in float32, and the result
has the dtype of x.

Throughout: x is this rank's block over ``P`` (a Partition, then shapes are agreed on, or a Layout, then nothing is),
the result this rank's block in the same layout; a rank outside ``P`` gets a connected tensor without elements.
``weight`` and ``bias`` may be ``None``. ``params="invariant"``: they are one value on all ranks that hold them, marked
here (then one more all-reduce backward, of all their elements); ``"varying"``: the caller has marked or broadcast them.
k is the number of ranks that statistics are taken over; an "all-gather of N" sends N elements to k - 1 ranks, and its
reduce-scatter as many back.
"""

from __future__ import annotations

import torch

from .. import _torch
from .._types import Place, Size
from ..agree import alike
from ..errors import ShapeError
from ..movement.copies import all_sum_reduce
from ..movement.options import sizes_of
from .enter import FLOATING, enter, outside, replicated
from .moments import cut_group_moments, merged, moments, statistics, within
from .numeric import count, wide

__all__ = ["dist_batch_norm", "dist_group_norm", "dist_instance_norm", "dist_layer_norm", "dist_rms_norm"]


# ---------------------------------------------------------------- arguments


def _parameters(params, L, dims, shape, *tensors):
    """This rank's parameters of ``shape``, marked along ``dims`` and as large as x in dims."""
    for t in tensors:
        if t is not None and getattr(t, "shape", ()) != shape:
            raise ShapeError(
                "a parameter is not this rank's block",
                expected=tuple(shape),
                actual=tuple(getattr(t, "shape", ())) or type(t).__name__,
                next_step="pass this rank's block of the weight and the bias (or the statistics)",
            )
    return tensors if params == "varying" else replicated(params, L, dims, *tensors)


def _beside_channels(L) -> tuple[int, ...]:
    return (0, *range(2, len(L.shape)))


def _of_channels(L, t):
    """A tensor over the channels, ready to broadcast against x."""
    return None if t is None else t.reshape(-1, *[1] * (L.ndim - 2))


def _trailing(L, normalized_shape):
    """The dims of ``normalized_shape``, the global shape of the trailing dims."""
    shape = sizes_of(normalized_shape, "normalized_shape")
    if not shape or L.shape[L.ndim - len(shape) :] != shape or len(shape) > L.ndim:
        raise ShapeError(
            "normalized_shape is not the global shape of the trailing dims",
            actual=shape,
            expected=f"the end of {L.shape}",
            next_step="pass the global sizes, not this rank's",
        )
    return tuple(range(L.ndim - len(shape), L.ndim))


# ---------------------------------------------------------------- layers


def _times_plus(x, scale, offset):
    """x * scale + offset, in one pass where torch can."""
    if offset is None:
        return x * scale
    same = x.dtype == scale.dtype == offset.dtype
    return torch.addcmul(offset, x, scale) if same else x * scale + offset


def _normalised(x, shift, var, eps, weight, bias, dtype):
    """(x + shift) / sqrt(var + eps), scaled and shifted; the parameters broadcast against x. ``None``: 0, or no
    scale."""
    scale = (var + eps).rsqrt()
    few = weight is None or 2 * torch.broadcast_shapes(scale.shape, weight.shape).numel() < x.numel()
    if weight is not None and few:
        scale, weight = scale * weight, None
    offset = None if shift is None else shift * scale
    if weight is None:
        return _times_plus(x, scale, bias if offset is None else offset if bias is None else offset + bias).to(dtype)
    return _times_plus(_times_plus(x, scale, offset), weight, bias).to(dtype)


def _by_kernel(x, L, dims) -> bool:
    """Whether torch's kernel will do: statistics over ``dims`` are this rank's own, of some elements. (Inside a vmap
    over nothing it gives another shape.)"""
    return within(L, dims) and x.numel() > 0 and all(size for _, size in _torch.vmap_levels())


def _group_norm(x, groups, weight, bias, eps, dtype):
    """torch's, in x's dtype."""
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # torch's backward fails without
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    if _torch.transforms_active() or _torch.forward_mode_active():
        x = x.contiguous()  # torch's rules for batches and tangents fail for channels_last
    return torch.group_norm(x, groups, weight, bias, eps).to(dtype)


def dist_batch_norm(
    x: torch.Tensor,
    P: Place,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-05,
    *,
    num_batches_tracked: int | torch.Tensor | None = None,
    params: str = "varying",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Batch normalisation of (batch, channel, *space), over the batch and space of all ranks. Pure: nothing is updated
    in place.

    Args:
        running_mean, running_var, weight, bias: (this rank's channels,), replicated over every partition dim but 1; the
            running ones may both be ``None``, which means batch statistics.
        training: use the batch's statistics, and return new running ones.
        momentum: share of the new batch in the running statistics; ``None``: their cumulative average, with share
            1 / ``num_batches_tracked``, which counts this batch too (as torch's module counts it).

    Returns:
        (y, new running mean, new running var): the latter as given when they were not used; no gradient passes
        through them, the variance is unbiased (n / (n - 1)), and they are equal on all ranks that hold the same
        channels.

    Raises:
        ShapeError: training with one value for a channel, or none, in the whole batch.

    Messages, with C channels on this rank: training, one all-gather of 2C; backward one reduce-scatter. Evaluation:
    none.

    Example:
        >>> P, x, running = dd.Partition((1, 1)), torch.tensor([[1.0], [3.0]]), torch.ones(1)
        >>> y, mean, var = F.dist_batch_norm(x, P, running, running, training=True, momentum=1.0)
        >>> mean, var
        (tensor([2.]), tensor([2.]))
    """
    x, L, at = enter(x, P, layer="dist_batch_norm", kinds=FLOATING, least=2)
    if at is None:
        return outside(x, weight, bias, like=L), running_mean, running_var
    dims = _beside_channels(L)
    weight, bias = _parameters(params, L, dims, (x.shape[1],), weight, bias)
    _parameters("varying", L, dims, (x.shape[1],), running_mean, running_var)
    if (running_mean is None) != (running_var is None):
        raise ShapeError(
            "running_mean and running_var belong together",
            expected="both, or None for both",
            actual=f"{'running_var' if running_mean is None else 'running_mean'} alone",
            next_step="pass both running statistics",
        )
    dtype, x = x.dtype, wide(x)
    if not training and running_mean is not None:
        alike(L)
        shift, var = -_of_channels(L, wide(running_mean)), _of_channels(L, wide(running_var))
    else:
        (mean, var, x, shift), n = moments(x, L, dims), count(L, dims)
        if training and n < 2:
            raise ShapeError(
                "one value for a channel has no variance",
                actual=L.shape,
                expected="more than 1 value per channel when training",
                next_step="use a larger batch, or training=False",
            )
        if training and running_mean is not None:
            if momentum is None and num_batches_tracked is None:
                raise ShapeError(
                    "a cumulative average needs a count",
                    expected="num_batches_tracked with momentum=None",
                    actual=num_batches_tracked,
                    next_step="pass the number of batches seen so far, or a momentum",
                )
            share = 1 / num_batches_tracked if momentum is None else momentum
            new = mean.detach().reshape(-1), var.detach().reshape(-1) * (n / (n - 1))
            running_mean, running_var = (
                (wide(old) * (1 - share) + fresh * share).to(old.dtype)
                for old, fresh in zip((running_mean, running_var), new)
            )
    return (
        _normalised(x, shift, var, eps, _of_channels(L, weight), _of_channels(L, bias), dtype),
        running_mean,
        running_var,
    )


def dist_instance_norm(
    x: torch.Tensor,
    P: Place,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-05,
    *,
    params: str = "varying",
) -> torch.Tensor:
    """Normalisation of every (batch, channel) of (batch, channel, *space) over its space, by its own statistics.

    Args:
        weight, bias: (this rank's channels,), replicated over every partition dim but 1.

    Raises:
        ShapeError: one value, or none, in a whole channel.

    Messages, with b examples and C channels on this rank, and space split: one all-gather of 2bC; backward one
    reduce-scatter.

    Example:
        >>> F.dist_instance_norm(torch.tensor([[[1.0, 3.0]]]), dd.Partition((1, 1, 1)), eps=0.0)
        tensor([[[-1.,  1.]]])
    """
    x, L, at = enter(x, P, layer="dist_instance_norm", kinds=FLOATING, least=3)
    if at is None:
        return outside(x, weight, bias, like=L)
    weight, bias = _parameters(params, L, _beside_channels(L), (x.shape[1],), weight, bias)
    dtype, x = x.dtype, wide(x)
    dims = tuple(range(2, L.ndim))
    if count(L, dims) < 2:
        raise ShapeError(
            "one value for a channel has no variance",
            actual=L.shape,
            expected="more than 1 value per channel",
            next_step="normalise over more elements, or use dist_layer_norm",
        )
    if _by_kernel(x, L, dims):
        return _group_norm(x, x.shape[1], weight, bias, eps, dtype)
    _, var, x, shift = moments(x, L, dims)
    return _normalised(x, shift, var, eps, _of_channels(L, weight), _of_channels(L, bias), dtype)


def dist_layer_norm(
    x: torch.Tensor,
    P: Place,
    normalized_shape: Size,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-05,
    *,
    params: str = "varying",
) -> torch.Tensor:
    """Layer normalisation over the trailing dims, any of which may be split.

    Args:
        normalized_shape: the *global* sizes of these dims.
        weight, bias: this rank's block of that shape, replicated over the leading partition dims.

    Messages, with N sets of statistics on this rank (its leading sizes), where trailing dims are split: one all-gather
    of 2N; backward one reduce-scatter.

    Raises:
        ShapeError, PartitionError: sizes that are not x's, weights that are not this rank's, or no floating x.

    Example:
        >>> F.dist_layer_norm(torch.tensor([[1.0, 3.0]]), dd.Partition((1, 1)), (2,), eps=0.0)
        tensor([[-1.,  1.]])
    """
    x, L, at = enter(x, P, layer="dist_layer_norm", kinds=FLOATING, least=1)
    if at is None:
        return outside(x, weight, bias, like=L)
    dims = _trailing(L, normalized_shape)
    weight, bias = _parameters(params, L, range(dims[0]), x.shape[dims[0] :], weight, bias)
    dtype, x = x.dtype, wide(x)
    if _by_kernel(
        x, L, dims
    ):  # as one group: torch's layer_norm has wrong derivatives of higher order, its group_norm right ones
        x = torch.group_norm(x.reshape(-1, 1, count(L, dims)), 1, None, None, eps).reshape(x.shape)
        x = _times_plus(x, weight, bias) if weight is not None else x if bias is None else x + bias
        return x.to(dtype)
    _, var, x, shift = moments(x, L, dims)
    return _normalised(x, shift, var, eps, weight, bias, dtype)


def dist_rms_norm(
    x: torch.Tensor,
    P: Place,
    normalized_shape: Size,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    params: str = "varying",
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) over the trailing dims (Zhang and Sennrich, arXiv:1910.07467), any of which may be
    split.

    Args:
        normalized_shape: the *global* sizes of these dims.
        weight: this rank's block of that shape, replicated over the leading partition dims.
        eps: ``None``: the machine epsilon of x's dtype, as in torch.

    Messages, with N sets on this rank (its leading sizes), where trailing dims are split: one all-reduce of N; backward
    another.

    Raises:
        ShapeError, PartitionError: sizes that are not x's, weights that are not this rank's, or no floating x.

    Example:
        >>> F.dist_rms_norm(torch.tensor([[3.0, 3.0]]), dd.Partition((1, 1)), (2,), eps=0.0)
        tensor([[1., 1.]])
    """
    x, L, at = enter(x, P, layer="dist_rms_norm", kinds=FLOATING, least=1)
    if at is None:
        return outside(x, weight, like=L)
    dims = _trailing(L, normalized_shape)
    (weight,) = _parameters(params, L, range(dims[0]), x.shape[dims[0] :], weight)
    eps, dtype, x = torch.finfo(x.dtype).eps if eps is None else eps, x.dtype, wide(x)
    total = all_sum_reduce(x.square().sum(dims, keepdim=True), L.partition, dims)
    return _normalised(x, None, total / max(count(L, dims), 1), eps, weight, None, dtype)


def dist_group_norm(
    x: torch.Tensor,
    P: Place,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-05,
    *,
    params: str = "varying",
) -> torch.Tensor:
    """Normalisation of (batch, channel, *space) over ``num_groups`` groups of adjacent channels and all of space.

    Channels may be split anywhere: a group that lies on several ranks is merged from the parts of all of them.

    Args:
        num_groups: number of groups of the *global* channels, which it divides.
        weight, bias: (this rank's channels,), replicated over every partition dim but 1.

    Messages, with b examples on this rank, whose channels touch G groups, where space is split, or channels amid a
    group: one all-gather of 2bG; backward one reduce-scatter.

    Raises:
        ShapeError, PartitionError: sizes that are not x's, weights that are not this rank's, or no floating x.

    Example:
        >>> F.dist_group_norm(torch.tensor([[1.0, 3.0]]), dd.Partition((1, 1)), 1, eps=0.0)
        tensor([[-1.,  1.]])
    """
    x, L, at = enter(x, P, layer="dist_group_norm", kinds=FLOATING, least=2)
    if at is None:
        return outside(x, weight, bias, like=L)
    if num_groups < 1 or L.shape[1] % num_groups:
        raise ShapeError(
            "the groups do not divide the channels",
            actual=num_groups,
            expected=f"a divisor of {L.shape[1]}",
            next_step="choose num_groups that divides the channels",
        )
    weight, bias = _parameters(params, L, _beside_channels(L), (x.shape[1],), weight, bias)
    dtype, x = x.dtype, wide(x)
    size, shape = max(L.shape[1] // num_groups, 1), x.shape
    cut = any(stop % size for _, stop in L.blocks(1))
    if not cut and _by_kernel(x, L, range(2, L.ndim)):
        return _group_norm(x, shape[1] // size, weight, bias, eps, dtype)
    weight, bias = _of_channels(L, weight), _of_channels(L, bias)
    if cut:
        _, var, x, shift = cut_group_moments(x, L, size)
        return _normalised(x, shift, var, eps, weight, bias, dtype)
    # Every rank has whole groups: (batch, group, channel of it, *space), and only space is merged.
    x = x.reshape(shape[0], shape[1] // size, size, *shape[2:])
    space = tuple(range(2, L.ndim))
    groups = (*x.shape[:2], *[1] * len(space))
    _, var, x, shift = merged(statistics(x, tuple(range(2, x.dim()))), L, space, groups)
    weight, bias = (None if t is None else t.reshape(-1, size, *[1] * len(space)) for t in (weight, bias))
    return _normalised(x, shift, var, eps, weight, bias, dtype).reshape(shape)
