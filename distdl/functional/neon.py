"""Untied filters and local contrast normalisation, as in Nervana neon's distributed layers, over partitioned
tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as tf

from .. import maps
from .._arguments import checked
from .._types import Place, Size
from ..agree import block_sizes
from ..boxes import balanced
from ..errors import PartitionError, ShapeError
from ..movement.copies import all_sum_reduce
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.options import per_dim
from ..partition import Layout, partition_of
from ..ties import nothing
from .autocast import autocast, without_autocast
from .enter import FLOATING, at_least, enter, outside, replicated, spatial
from .numeric import power, wide
from .window import (
    cut,
    filled,
    kept,
    own_start,
    sliding,
    transposed_size,
    window_spec,
    with_sizes,
)

__all__ = ["dist_lcn", "dist_local_conv", "dist_local_conv_transpose"]


# ---------------------------------------------------------------- windows of a tensor, and their adjoint


def _windows(x, kernel, stride):
    """(b, c, *space) -> (b, c, *out, *kernel): at out p and offset Δ stands x at stride·p + Δ."""
    for i, (k, s) in enumerate(zip(kernel, stride)):
        d = i + 2
        x = torch.stack([x[(slice(None),) * d + (slice(a, x.shape[d] - k + 1 + a, s),)] for a in range(k)], -1)
    return x


def _fold(z, stride, space):
    """The adjoint of :func:`_windows`: (b, c, *out, *kernel) -> (b, c, *space), summing where windows overlap."""
    for i, (n, s) in reversed(list(enumerate(zip(space, stride)))):
        d, k = i + 2, z.shape[-1]
        shape = list(z.shape[:-1])
        shape[d] = n
        zeros = z.new_zeros(shape)
        z = sum(torch.slice_scatter(zeros, z.select(-1, a), d, a, n - k + 1 + a, s) for a in range(k))
    return z


# ---------------------------------------------------------------- untied filters


def _arguments(w, P, stride):
    """Number of spatial dims, kernel and stride."""
    n = (w.dim() - 2) // 2
    if not 1 <= n <= 3 or w.dim() % 2:
        raise ShapeError(
            "w needs 4, 6 or 8 dims",
            expected="(filters, *output block, channels, *kernel)",
            actual=tuple(w.shape),
            next_step="pass this rank's block of the weights, for 1 to 3 spatial dims",
        )
    stride, kernel = per_dim(stride, n, "stride"), tuple(w.shape[-n:])
    if min(stride) < 1 or min(kernel) < 1:
        raise PartitionError(
            "not a legal window",
            expected="kernel and stride >= 1",
            actual=(tuple(w.shape), stride),
            next_step="give sizes and strides of at least 1",
        )
    return spatial(P, n), kernel, stride


@lru_cache(maxsize=1024)
def _windows_for(L: Layout, out: Layout, kernel, stride) -> HaloSpec:
    """Windows of x of layout ``L`` for blocks of ``out``: all channels, and stride·p ... stride·p + kernel - 1."""
    n, channels = len(kernel), L.shape[1]
    need = sliding(stride, ((0, 0),) * n, (1,) * n, kernel)
    ranges = lambda d, o0, o1: (o0, o1) if d == 0 else (0, channels) if d == 1 else need(d - 2, o0, o1)  # noqa: E731
    return HaloSpec.needs(L, None, out, ranges, "none")


def _layout(L: Layout, filters, kernel, stride) -> Layout:
    """Where the result of the layer lies."""
    return with_sizes(L, filters, window_spec(L, None, kernel, stride).out_layout.shape[2:])


def _check_w(w, out: Layout, at, channels: int) -> None:
    """w is the block of the rank at ``at``: its filters and pixels are those of ``out``."""
    own_start(out, at, w.shape[0])
    expected = (*out.local_shape()[2:], channels)
    if tuple(w.shape[1 : out.ndim]) != expected:
        raise ShapeError(
            "w does not fit this rank's output block",
            actual=tuple(w.shape),
            expected=("filters", *expected, "*kernel"),
            next_step="shard w over the filters and the space of conv_layout(x's layout, filters, kernel, stride)",
        )


@checked
def dist_local_conv(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    *,
    stride: Size = 1,
    shape: Sequence[int] | None = None,
    out_channels: int | None = None,
    params: str = "varying",
) -> torch.Tensor:
    """Locally connected layer of 1 to 3 spatial dims: a convolution whose every output pixel has filters of its own.

    Args:
        x: (batch, channels, *space), this rank's block.
        w: (filters, *this rank's output block, channels, *kernel): w is partitioned as the output is, with all
            channels. Where P's channel dim is split, this rank's block of the filters.
        P: partition or Layout of x, (batch, channel, *space).
        stride: an int, or one per spatial dim. There is no padding: see :func:`dist_pad`.
        shape: the global shape of x; left out with a bare partition, it is negotiated.
        out_channels: number of filters in all, over balanced blocks, where P's channel dim is split; left out, one
            small all-gather asks for every rank's block.
        params: "invariant": w is equal on all ranks along the batch dim of ``P``, and the layer marks it. "varying":
            each rank's own.

    Returns:
        This rank's block of the result, of layout ``conv_layout(L, filters, kernel, stride)``.

    Messages: one halo exchange forward, its transpose backward. As w lies like the output, its gradient sends nothing;
    with ``params="invariant"`` and a split batch one all-reduce of |w|.

    y[b,f,p] = Σ_{c,Δ} w[f,p,c,Δ] x[b, c, stride·p + Δ]. The "local filtering" layer of Le et al., arXiv:1112.6209,
    section 3.

    Raises:
        PartitionError, ShapeError: a kernel larger than x; w that does not fit x or this rank's output block.

    Example:
        >>> x = torch.tensor([[[[1.0, 2.0]]]])
        >>> w = torch.tensor([10.0, 1.0]).reshape(1, 1, 2, 1, 1, 1)  # a filter for each pixel
        >>> F.dist_local_conv(x, w, dd.Partition((1, 1, 1, 1)))
        tensor([[[[10.,  2.]]]])
    """
    n, kernel, stride = _arguments(w, P, stride)
    (w,) = replicated(params, P, (0,), w)
    x, L, at = enter(x, P, layer="dist_local_conv", shape=shape)
    filters = block_sizes(w.shape[0], partition_of(P), 1, out_channels)
    if at is None:
        return outside(x, w, like=L and _layout(at_least(L, kernel), filters, kernel, stride))
    (w,) = autocast("dist_local_conv", L.ndim, w)
    out = _layout(L, filters, kernel, stride)
    _check_w(w, out, at, L.shape[1])
    window = halo_exchange(x, _windows_for(L, out, kernel, stride))
    if 0 in out.local_shape():
        return nothing(out.local_shape(), window, w)
    pixels, offsets = "hij"[:n], "klm"[:n]
    z = _windows(window, kernel, stride)
    return kept(torch.einsum(f"bc{pixels}{offsets},f{pixels}c{offsets}->bf{pixels}", z, w), x)


def _transposed_layout(L: Layout, channels: int, kernel, stride, output_size) -> Layout:
    """Where the result of the transpose lies."""
    if isinstance(output_size, Layout):
        return output_size
    n = len(kernel)
    least = transposed_size(L.shape[2:], kernel, stride, (0,) * n, (0,) * n, (1,) * n)
    sizes = least if output_size is None else per_dim(output_size, n, "output_size")
    return with_sizes(L, balanced(channels, L.partition.shape[1]), sizes)


def _check_output(out: Layout, L: Layout, channels: int, kernel, stride) -> None:
    n = len(kernel)
    least = transposed_size(L.shape[2:], kernel, stride, (0,) * n, (0,) * n, (1,) * n)
    fits = out.ndim == n + 2 and all(0 <= m - low < s for m, low, s in zip(out.shape[2:], least, stride))
    if not fits or out.partition != L.partition or out.shape[:2] != (L.shape[0], channels):
        raise PartitionError(
            "not a legal output_size",
            actual=out,
            expected=f"{(L.shape[0], channels, *least)}, at most {tuple(s - 1 for s in stride)} larger in space",
            next_step="pass the layout that the convolution's x had",
        )


@checked
def dist_local_conv_transpose(
    y: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    *,
    stride: Size = 1,
    output_size: Size | Layout | None = None,
    shape: Sequence[int] | None = None,
    params: str = "varying",
) -> torch.Tensor:
    """The transpose of :func:`dist_local_conv` in x, for the same w: fold, then the halo exchange's adjoint.

    Args:
        y: (batch, filters, *out), this rank's block.
        w: (filters, *y's block, channels, *kernel), as for :func:`dist_local_conv`; whole filters' blocks where y's are
            split.
        P: partition or Layout of y.
        output_size: spatial size of the result, from stride·(out - 1) + kernel (the default) to that + stride - 1; or
            the whole Layout of the result, over P's ranks. With tied weights that is the layout that x had.
        shape: the global shape of y; left out with a bare partition, it is negotiated.
        params: as for :func:`dist_local_conv`.

    Returns:
        This rank's block of the result. Default layout: y's splits where a size is unchanged, balanced elsewhere;
        channels balanced.

    Messages: one halo adjoint forward (overlaps are added by their owner), the halo exchange backward; nothing for w's
    gradient, but for the all-reduce that ``params="invariant"`` needs where the batch is split.

    x[b,c,q] = Σ_{f,p,Δ: stride·p + Δ = q} w[f,p,c,Δ] y[b,f,p].

    Example:
        >>> y = torch.tensor([[[[10.0, 2.0]]]])
        >>> w = torch.tensor([10.0, 1.0]).reshape(1, 1, 2, 1, 1, 1)
        >>> F.dist_local_conv_transpose(y, w, dd.Layout(dd.Partition((1, 1, 1, 1)), y.shape), output_size=(1, 2))
        tensor([[[[100.,   2.]]]])
    """
    n, kernel, stride = _arguments(w, P, stride)
    (w,) = replicated(params, P, (0,), w)
    channels = w.shape[n + 1]
    y, L, at = enter(y, P, layer="dist_local_conv_transpose", shape=shape)
    if at is None:
        like = L and _transposed_layout(at_least(L, (1,) * n), channels, kernel, stride, output_size)
        return outside(y, w, like=like)
    (w,) = autocast("dist_local_conv_transpose", L.ndim, w)
    out = _transposed_layout(L, channels, kernel, stride, output_size)
    _check_output(out, L, channels, kernel, stride)
    _check_w(w, L, at, channels)
    back = maps.halo_exchange(_windows_for(out, L, kernel, stride)).T
    if 0 in back.in_shape:
        return kept(back(nothing(back.in_shape, y, w)), y)
    pixels, offsets = "hij"[:n], "klm"[:n]
    z = torch.einsum(f"bf{pixels},f{pixels}c{offsets}->bc{pixels}{offsets}", y, w)
    return kept(back(_fold(wide(z), stride, back.in_shape[2:]).to(z.dtype)), y)


# ---------------------------------------------------------------- local contrast normalisation


def _gaussian(kernel, like):
    """A Gaussian window that sums to 1; its deviation is a third of the way from the centre to a corner."""
    offsets = torch.cartesian_prod(*(torch.arange(k, device=like.device) - k // 2 for k in kernel)).reshape(
        -1, len(kernel)
    )
    square = (offsets**2).sum(1).to(like.dtype)
    deviation = math.hypot(*(k // 2 for k in kernel)) / 3
    w = torch.exp(-square / (2 * deviation**2)) if deviation else torch.ones_like(square)
    return (w / w.sum()).reshape(1, 1, *kernel)


def dist_lcn(x: torch.Tensor, P: Place, kernel_size: Size, *, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Local contrast normalisation over 1 to 3 spatial dims and all channels: subtractive, then divisive.

    Args:
        x: (batch, channels, *space), this rank's block; split in any dims.
        P: partition or Layout of x.
        kernel_size: odd; an int or one per spatial dim.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block of y, laid as x is. Where x is constant over a window, y is 0 up to rounding *divided by
        rounding*, as in the serial equations.

    With w a Gaussian window (deviation: a third of the distance from its centre to a corner) that sums to 1 over all
    channels and offsets, and zeros beyond the edge of x and of v::

        m_p = Σ_{c,Δ} w_Δ x_{c,p+Δ},    v = x − m,    s_p = √(Σ_{c,Δ} w_Δ v²_{c,p+Δ})  (1 where that is 0),    y = v / s

    All derivatives where s is replaced are those of y = v. Jarrett et al., "What is the best multi-stage architecture
    for object recognition?", ICCV 2009, section 2; neon divides by the same s for all channels, and so do we.

    Messages: two halo exchanges forward, of one channel each: Σ_c x and Σ_c v²; their transposes backward. Where the
    channel dim is split, two all-reduces of one channel, and as many backward.

    Raises:
        PartitionError: an even kernel.

    Example:
        >>> F.dist_lcn(torch.ones(1, 1, 5, 5), dd.Partition((1, 1, 1, 1)), 3).shape
        torch.Size([1, 1, 5, 5])
    """
    n = spatial(P)
    kernel = per_dim(kernel_size, n, "kernel_size")
    if any(k < 1 or k % 2 == 0 for k in kernel):
        raise PartitionError(
            "the window needs a centre",
            expected="odd sizes",
            actual=kernel,
            next_step="use an odd kernel_size",
        )
    x, L, at = enter(x, P, shape=shape, kinds=FLOATING)
    if at is None:
        return outside(x, like=L)
    spec, conv = _one_channel(L, kernel), (tf.conv1d, tf.conv2d, tf.conv3d)[n - 1]
    v = wide(x)
    w = _gaussian(kernel, v) / max(L.shape[1], 1)

    def blurred(z):
        window = halo_exchange(all_sum_reduce(z.sum(1, keepdim=True), L.partition, 1), spec)
        with without_autocast(window):
            window, empty = filled(window, spec, at, kernel)
            return cut(conv(window, w), empty)

    v = v - blurred(v)
    square = blurred(v.square())
    return kept((v / torch.where(square > 0, power(square, 0.5), 1)).to(x.dtype), x)


@lru_cache(maxsize=1024)
def _one_channel(L: Layout, kernel) -> HaloSpec:
    """Windows of the sum over the channels, which every rank along the channel dim has as its one."""
    ranks = L.partition.shape[1]
    splits = None if L.splits is None else (L.splits[0], None, *L.splits[2:])
    one = Layout(L.partition, (L.shape[0], ranks, *L.shape[2:]), splits)
    return HaloSpec.window(one, None, kernel, 1, tuple(k // 2 for k in kernel))
