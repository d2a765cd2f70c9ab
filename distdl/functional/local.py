"""Untied filters and local contrast normalisation, as in Nervana neon's distributed layers, over partitioned
tensors."""

from __future__ import annotations

import math

import torch

from .. import maps
from .._arguments import checked
from ..agree import block_sizes, partition_of
from ..errors import PartitionError, ShapeError
from ..movement.copies import all_sum_reduce
from ..movement.halo import HaloSpec, halo_exchange, per_dim
from ..partition import Layout, balanced
from ..ties import nothing
from .autocast import autocast, without_autocast
from .conv import _CONV, _conv_need, _own_start, _spec, _transposed_size, _with_sizes, check_grid
from .params import replicated
from .reduce import power, wide
from .window import windowed, with_layout

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


def _arguments(op, w, stride):
    """Number of spatial dims, kernel and stride."""
    n = (w.dim() - 2) // 2
    if n not in _CONV or w.dim() % 2:
        raise ShapeError(
            "w needs 4, 6 or 8 dims",
            op=op,
            expected="(filters, *output block, channels, *kernel)",
            actual=tuple(w.shape),
            next_step="pass this rank's block of the weights, for 1 to 3 spatial dims",
        )
    stride = per_dim(stride, n, "stride", op)
    if min(stride) < 1 or min(w.shape[-n:]) < 1:
        raise PartitionError(
            "not a legal window",
            op=op,
            expected="kernel and stride >= 1",
            actual=(tuple(w.shape), stride),
            next_step="give sizes and strides of at least 1",
        )
    return n, tuple(w.shape[-n:]), stride


def _local_spec(op, L: Layout, out: Layout | None, filters, kernel, stride) -> HaloSpec:
    """Windows of x of layout ``L`` for blocks of the output: all channels, and stride·p ... stride·p + kernel - 1."""
    need, n, channels = _conv_need(stride, ((0, 0),) * len(kernel), (1,) * len(kernel), kernel), len(kernel), L.shape[1]
    if out is not None:
        return HaloSpec.needs(
            L,
            None,
            out,
            lambda d, o0, o1: (o0, o1) if d == 0 else (0, channels) if d == 1 else need(d - 2, o0, o1),
            "none",
        )
    space = HaloSpec.window(L, None, kernel, stride).out_layout.shape[2:]
    return _spec(L, n, "none", filters, space, lambda o0, o1: (0, channels), need, op)


def _check_w(op, w, out: Layout, channels: int, n: int) -> None:
    """w is this rank's block: its filters and pixels are those of ``out``."""
    _own_start(op, out, w.shape[0])
    expected = (*out.local_shape()[2:], channels)
    if out.active and tuple(w.shape[1 : n + 2]) != expected:
        raise ShapeError(
            "w does not fit this rank's output block",
            op=op,
            partitions=out,
            actual=tuple(w.shape),
            expected=("filters", *expected, "*kernel"),
            next_step="shard w over the filters and the space of conv_layout(x's layout, filters, kernel, stride)",
        )


@checked
def dist_local_conv(x, w, P, *, stride=1, shape=None, out_channels=None, params="varying"):
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
    """
    op, where = "dist_local_conv", partition_of(P)
    n, kernel, stride = _arguments(op, w, stride)
    check_grid(op, P, n)
    (w,) = replicated(params, where, (0,), w)

    def body(x, L):
        (own,) = autocast(op, L.ndim, w)
        spec = _local_spec(op, L, None, block_sizes(w.shape[0], where, 1, out_channels), kernel, stride)
        _check_w(op, w, spec.out_layout, L.shape[1], n)
        window = halo_exchange(x, spec)
        out = (window.shape[0], w.shape[0], *spec.out_layout.local_shape()[2:])
        if 0 in out:
            return nothing(out, window, w)
        z = _windows(window, kernel, stride)
        pixels, offsets = "hij"[:n], "klm"[:n]
        return torch.einsum(f"bc{pixels}{offsets},f{pixels}c{offsets}->bf{pixels}", z, own)

    return with_layout(op, x, P, shape, body)


def _output_layout(op, L: Layout, channels: int, kernel, stride, output_size) -> Layout:
    """The layout of the transpose's result."""
    n = len(kernel)
    least = _transposed_size(L.shape[2:], kernel, stride, (0,) * n, (0,) * n, (1,) * n)
    out = output_size
    if not isinstance(out, Layout):
        sizes = least if out is None else per_dim(out, n, "output_size", op)
        out = _with_sizes(L, balanced(channels, L.partition.shape[1]), sizes)
    fits = out.ndim == n + 2 and all(0 <= m - low < s for m, low, s in zip(out.shape[2:], least, stride))
    if not fits or out.partition != L.partition or out.shape[:2] != (L.shape[0], channels):
        raise PartitionError(
            "not a legal output_size",
            op=op,
            partitions=L,
            actual=output_size,
            expected=f"{(L.shape[0], channels, *least)}, at most {tuple(s - 1 for s in stride)} larger in space",
            next_step="pass the layout that the convolution's x had",
        )
    return out


@checked
def dist_local_conv_transpose(y, w, P, *, stride=1, output_size=None, shape=None, params="varying"):
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
    """
    op, where = "dist_local_conv_transpose", partition_of(P)
    n, kernel, stride = _arguments(op, w, stride)
    check_grid(op, P, n)
    (w,) = replicated(params, where, (0,), w)
    channels = w.shape[n + 1]

    def body(y, L):
        (own,) = autocast(op, L.ndim, w)
        out = _output_layout(op, L, channels, kernel, stride, output_size)
        _check_w(op, w, L, channels, n)
        back = maps.halo_exchange(_local_spec(op, out, L, None, kernel, stride)).T
        if 0 in back.in_shape:
            return back(nothing(back.in_shape, y, w))
        pixels, offsets = "hij"[:n], "klm"[:n]
        z = torch.einsum(f"bf{pixels},f{pixels}c{offsets}->bc{pixels}{offsets}", y, own)
        return back(_fold(wide(z), stride, back.in_shape[2:]).to(z.dtype))

    return with_layout(op, y, P, shape, body)


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


def dist_lcn(x, P, kernel_size, *, shape=None):
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
    """
    op, where = "dist_lcn", partition_of(P)

    def body(x, L):
        n = L.ndim - 2
        if n not in _CONV:
            raise PartitionError(
                "x needs batch, channel and 1 to 3 dims",
                op=op,
                partitions=L,
                expected="3 to 5",
                actual=L.ndim,
                next_step="give P one dim for the batch, one for the channels and one for each spatial dim",
            )
        kernel = per_dim(kernel_size, n, "kernel_size", op)
        if any(k < 1 or k % 2 == 0 for k in kernel):
            raise PartitionError(
                "the window needs a centre",
                op=op,
                expected="odd sizes",
                actual=kernel,
                partitions=L,
                next_step="use an odd kernel_size",
            )
        if not L.active:
            return nothing(L.local_shape(), x)
        ranks = where.shape[1]  # along the channel dim: each has one channel, the sum
        splits = None if L.splits is None else (L.splits[0], None, *L.splits[2:])
        spec = HaloSpec.window(
            Layout(where, (L.shape[0], ranks, *L.shape[2:]), splits), None, kernel, 1, tuple(k // 2 for k in kernel)
        )
        w = _gaussian(kernel, wide(x)) / max(L.shape[1], 1)

        def blurred(z):
            z = all_sum_reduce(z.sum(1, keepdim=True), where, 1)
            with without_autocast(z):
                return windowed(z, spec, kernel, lambda window: _CONV[n](window, w))

        v = wide(x)
        v = v - blurred(v)
        square = blurred(v.square())
        return (v / torch.where(square > 0, power(square, 0.5), 1)).to(x.dtype)

    return with_layout(op, x, P, shape, body, kinds="a floating dtype")
