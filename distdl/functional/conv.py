"""Convolutions over partitioned tensors: split batch, space and channels, equal to torch's serial ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as tf

from .._arguments import checked
from .._types import Place, Size
from ..agree import block_sizes
from ..errors import PartitionError, ShapeError
from ..movement.halo import HaloSpec, halo_exchange, per_dim
from ..partition import Layout, balanced, partition_of
from ..ties import nothing
from .along import bias_once, check_layouts, collect, collected, spread
from .autocast import autocast
from .enter import at_least, check_bias, enter, outside, present, replicated, spatial
from .overlap import overlap_of, overlapped
from .window import (
    channel_windows,
    cut,
    filled,
    kept,
    own_start,
    settled,
    sliding,
    transposed_size,
    window_spec,
    with_sizes,
)

__all__ = ["conv_layout", "conv_transpose_layout", "dist_conv", "dist_conv_transpose"]

_CONV = {1: tf.conv1d, 2: tf.conv2d, 3: tf.conv3d}
_CONV_TRANSPOSE = {1: tf.conv_transpose1d, 2: tf.conv_transpose2d, 3: tf.conv_transpose3d}
_BESIDE_CHANNELS = {n: (0, *range(2, n + 2)) for n in _CONV}
_MODES = ("circular", "reflect", "replicate", "zeros")


def _kernel_dims(w, what: str) -> int:
    """The number of spatial dims of weights ``w``."""
    if w.dim() - 2 not in _CONV:
        raise ShapeError(
            "w needs 3 to 5 dims",
            expected=what,
            actual=tuple(w.shape),
            next_step="pass this rank's block of the weights, for 1 to 3 spatial dims",
        )
    return w.dim() - 2


# ---------------------------------------------------------------- where the result lies


def _paddings(padding, kernel, stride, dilation):
    """``padding`` as pairs (before, after)."""
    (padding,) = settled(padding)
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        if any(s != 1 for s in stride):
            raise PartitionError(
                "padding 'same' needs stride 1",
                expected=1,
                actual=stride,
                next_step="use stride 1, or give the padding in numbers",
            )
        total = [d * (k - 1) for k, d in zip(kernel, dilation)]
        return tuple((t // 2, t - t // 2) for t in total)  # an odd total pads the extra element after, as torch does
    if isinstance(padding, str):
        raise PartitionError(
            "no such padding",
            expected="an int, a tuple, 'same' or 'valid'",
            actual=padding,
            next_step="give the number of zeros on each side, or one of the two words",
        )
    return tuple(p if isinstance(p, tuple) else (p, p) for p in per_dim(padding, len(kernel), "padding"))


def _channel_blocks(out_channels, L: Layout):
    return out_channels if isinstance(out_channels, tuple) else balanced(out_channels, L.partition.shape[1])


@checked
def conv_layout(
    L: Layout,
    out_channels: int | tuple[int, ...],
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str | Sequence[tuple[int, int]] = 0,
    dilation: Size = 1,
) -> Layout:
    """The layout of :func:`dist_conv`'s result for an x of layout ``L``; ``out_channels`` a number, or one for each
    block."""
    kernel, stride, dilation = (per_dim(v, L.ndim - 2, "an argument") for v in (kernel_size, stride, dilation))
    space = window_spec(L, None, kernel, stride, _paddings(padding, kernel, stride, dilation), dilation).out_layout
    return with_sizes(L, _channel_blocks(out_channels, L), space.shape[2:])


@checked
def conv_transpose_layout(
    L: Layout,
    out_channels: int | tuple[int, ...],
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    dilation: Size = 1,
) -> Layout:
    """The layout of :func:`dist_conv_transpose`'s result for an x of layout ``L``."""
    options = (kernel_size, stride, padding, output_padding, dilation)
    space = transposed_size(L.shape[2:], *(per_dim(v, L.ndim - 2, "an argument") for v in options))
    return with_sizes(L, _channel_blocks(out_channels, L), space)


# ---------------------------------------------------------------- groups


@lru_cache(maxsize=1024)
def _pieces(first: int, count: int, size: int):
    """Channels ``first .. first + count - 1`` in groups of ``size``: (start, stop, groups), cut groups on their own."""
    found, at, last = [], first, first + count
    while at < last:
        whole = (last - at) // size if at % size == 0 else 0
        stop = at + whole * size if whole else min((at // size + 1) * size, last)
        found.append((at, stop, max(whole, 1)))
        at = stop
    return found


def _grouped(conv, window, w, bias, first, out_per_group, in_per_group, **kwargs):
    """The convolution of this rank's output channels, which may cut groups; the window holds what their groups read."""
    pieces = _pieces(first, w.shape[0], out_per_group)
    if len(pieces) == 1:
        return conv(window, w, bias, groups=pieces[0][2], **kwargs)
    base = first // out_per_group
    parts = []
    for a, b, groups in pieces:
        start = (a // out_per_group - base) * in_per_group
        part, b_part = (
            window.narrow(1, start, groups * in_per_group),
            None if bias is None else bias[a - first : b - first],
        )
        parts.append(conv(part, w[a - first : b - first], b_part, groups=groups, **kwargs))
    return torch.cat(parts, 1)


def _some_input(window, w, dim):
    """(window, w), with one input channel of zeros where there is none (torch has no sum over nothing); ``dim``: w's of
    them."""
    if w.shape[dim]:
        return window, w
    return tf.pad(window, (0, 0) * (window.dim() - 2) + (0, 1)), tf.pad(w, (0, 0) * (w.dim() - 1 - dim) + (0, 1))


def _out_per_group(L, out_channels, groups, in_channels) -> int:
    """Output channels per group."""
    if L.shape[1] != in_channels:
        raise ShapeError(
            "w does not fit x",
            expected=f"{L.shape[1]} input channels over {groups} groups",
            actual=in_channels,
            next_step="w needs all the input channels of its groups",
        )
    if groups < 1 or out_channels % groups:
        raise ShapeError(
            "groups do not divide the output channels",
            expected=f"a divisor of {out_channels}",
            actual=groups,
            next_step="choose groups that divide both numbers of channels",
        )
    return max(out_channels // groups, 1)


def _in_groups(out_per_group, in_per_group):
    """The input channels that output channels o0 .. o1 - 1 read: those of their groups."""
    return lambda o0, o1: (o0 // out_per_group * in_per_group, -(-o1 // out_per_group) * in_per_group)


# ---------------------------------------------------------------- convolution


@lru_cache(maxsize=1024)
def _conv_arguments(kernel, stride, padding, dilation, padding_mode):
    """(stride, dilation, padding before and after, smallest window), one for each spatial dim."""
    stride, dilation = (per_dim(v, len(kernel), "stride or dilation") for v in (stride, dilation))
    if padding_mode not in _MODES:
        raise PartitionError(
            "no such padding_mode",
            expected=list(_MODES),
            actual=padding_mode,
            next_step="use one of them, as torch.nn.functional.pad names them",
        )
    least = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation))
    return stride, dilation, _paddings(padding, kernel, stride, dilation), least


class _Convolution(NamedTuple):
    """What one rank does: the windows of x, the first of its output channels, and the local convolution."""

    spec: HaloSpec
    at: tuple[int, ...]
    first: int
    out_per_group: int
    in_per_group: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # what is left to the local one
    dilation: tuple[int, ...]
    least: tuple[int, ...]  # smallest window

    def conv(self, data, w, bias, padding):
        """The convolution of any part of the window."""
        _, _, first, outs, ins, stride, _, dilation, least = self
        conv = _CONV[len(least)]
        return _grouped(conv, data, w, bias, first, outs, ins, stride=stride, padding=padding, dilation=dilation)

    def outputs(self, window, w, bias):
        """This rank's outputs."""
        if not w.shape[0]:  # a rank without output channels, connected to all that its peers' results depend on
            return nothing(self.spec.out_layout.local_shape(), window, w, *present(bias))
        window, empty = filled(window, self.spec, self.at, self.least)
        window, w = _some_input(window, w, 1)
        return cut(self.conv(window, w, bias, self.padding), empty)


@lru_cache(maxsize=1024)
def _convolution(L, at, own, channels, kernel, stride, pads, dilation, least, groups, in_per_group, padding_mode):
    """The :class:`_Convolution` of the rank at ``at``, which has ``own`` of the output channels."""
    out_per_group = _out_per_group(L, sum(channels), groups, in_per_group * groups)
    space = window_spec(L, None, kernel, stride, pads, dilation).out_layout.shape[2:]
    # Zeros around a dim that is not split need no memory: the local convolution adds them.
    inside = [padding_mode == "zeros" and p == 1 and a == b for p, (a, b) in zip(L.partition.shape[2:], pads)]
    window_of = sliding(stride, pads, dilation, kernel)
    spec = channel_windows(
        L,
        padding_mode,
        channels,
        space,
        _in_groups(out_per_group, in_per_group),
        lambda i, o0, o1: (0, L.shape[2 + i]) if inside[i] else window_of(i, o0, o1),
    )
    first = own_start(spec.out_layout, at, own)
    padding = tuple(a if whole else 0 for (a, _), whole in zip(pads, inside))
    return _Convolution(spec, at, first, out_per_group, in_per_group, stride, padding, dilation, least)


@checked
def dist_conv(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    bias: torch.Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | str | Sequence[tuple[int, int]] = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    shape: Sequence[int] | None = None,
    out_channels: int | None = None,
    x_layout: str = "root",
    y_layout: str = "root",
    params: str = "varying",
    overlap: bool = False,
) -> torch.Tensor:
    """Convolution of 1 to 3 spatial dims, as torch.nn.Conv1d/2d/3d, over a partitioned x.

    Args:
        x: (batch, channels, *space), this rank's block.
        w: (out channels, in channels / groups, *kernel). Whole where channels are not split.
        P: partition or Layout of x: (batch, channel, *space). Where its channel dim is split (DistDL's all-gather
            form), w and bias are this rank's block of the *output* channels, and each rank fetches just the input
            channels that these read. Or a partition with one more dim, (batch, out, in, *space), the general form: w is
            the (out, in) block, x lies along *out* as ``x_layout`` says, and y is left along *in* as ``y_layout`` says
            (see :func:`dist_linear`; "sharded" splits the channel dim). The general form needs ``groups=1``.
        bias: (out channels,), split as w's first dim; added once.
        padding: int, tuple, pairs (before, after), "same" or "valid".
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        shape: the global shape of x; left out with a bare partition, it is negotiated.
        out_channels: their number in all, over balanced blocks, where P's channel dim is split; left out, one small
            all-gather asks for every rank's block.
        params: "invariant": w and bias are equal on all ranks that use the same block, that is over the batch and
            spatial dims of ``P`` (in the general form the bias also over *in*), and the layer marks them. "varying":
            each rank's own.
        overlap: convolve this rank's block of x while the halos travel; outputs near its sides then get what they read
            of the halos added (as sums of two rounded parts, in half precision). Worth it for inference on large
            blocks; slower in training, where each strip has its own gradients of the weights. The same on all ranks.

    Returns:
        This rank's block of the result, of layout :func:`conv_layout`: splits stay in dims whose size does, and are
        balanced elsewhere; output channels as w's blocks are.

    Messages: one halo exchange (from each rank that holds some of the window, 1 message of just that part), and its
    transpose in backward; with ``params="invariant"`` one all-reduce of |w| + |bias| in backward. The general form adds
    those of :func:`dist_linear`. Overlap sends the same ghosts. On a device they travel on a stream of their own,
    forward and backward; on CPUs MPI moves large messages inside of its calls only, and overlap saves the window's
    copy. Nothing overlaps under torch.func, where channels are fetched, or on a rank whose every output reads a halo.

    y[b,o,p] = bias[o] + Σ_{c,k} w[o,c,k] x[b, c, stride·p - padding + dilation·k]; Hewett & Grady, arXiv:2006.03108,
    section 4.

    Raises:
        PartitionError, ShapeError: arguments that the serial layer would refuse, or blocks that do not fit.
    """
    n, grid = _kernel_dims(w, "(out, in, *kernel)"), partition_of(P)
    stride, padding, dilation, groups = settled(stride, padding, dilation, groups)
    if grid.ndim == n + 3:
        options = dict(stride=stride, padding=padding, dilation=dilation, padding_mode=padding_mode, overlap=overlap)
        return _general(dist_conv, x, w, grid, bias, x_layout, y_layout, params, groups, shape, w.shape[1], options)
    spatial(P, n)
    w, bias = replicated(params, grid, _BESIDE_CHANNELS[n], w, bias)
    kernel = w.shape[2:]
    stride, dilation, pads, least = _conv_arguments(kernel, stride, padding, dilation, padding_mode)
    x, L, at = enter(x, P, layer="dist_conv", shape=shape)
    channels = block_sizes(w.shape[0], grid, 1, out_channels)
    if at is None:
        reads = [m - a - b for m, (a, b) in zip(least, pads)]
        return outside(x, w, bias, like=L and conv_layout(at_least(L, reads), channels, kernel, stride, pads, dilation))
    here = _convolution(
        L, at, w.shape[0], channels, kernel, stride, pads, dilation, least, groups, w.shape[1], padding_mode
    )
    check_bias("dist_conv", L, bias, w.shape[0])
    strips = overlap_of(here.spec, at, kernel, stride, pads, dilation) if overlap else None
    if strips is not None:
        y = overlapped(x, strips, here.conv, w, bias, lambda window: here.outputs(window, w, bias))
    else:
        y = here.outputs(halo_exchange(x, here.spec), w, bias)
    return kept(y, x)


# ---------------------------------------------------------------- the general form


def _general(inner, x, w, P, bias, x_layout, y_layout, params, groups, shape, ins, options):
    """P = (batch, out, in, *space): spread x along *out*, convolve with this rank's (out, in) block, of ``ins`` input
    channels, sum along *in*."""
    check_layouts(x_layout, y_layout)
    (x,) = autocast(inner.__name__, P.ndim - 1, x)
    if groups != 1:
        raise PartitionError(
            "the general form has no groups",
            expected=1,
            actual=groups,
            next_step="split channels with a (batch, channel, *space) partition instead",
        )
    beside = [d for d in range(P.ndim) if d not in (1, 2)]
    (w,) = replicated(params, P, beside, w)
    (bias,) = replicated(params, P, (2, *beside), bias)
    at = P.index()
    # The ranks of this (out, in) block, or, on a rank outside, of the first one: (batch, 1, *space)
    out_at, in_at = (0, 0) if at is None else at[1:3]
    block = P.take(2, in_at).take(1, out_at, keepdim=True)
    L = block if shape is None else Layout(block, (shape[0], ins, *shape[2:]))
    if at is None:
        y = inner(x, w, L, bias, **options)
        return outside(y, like=collected(y.shape, P, 2, y_layout, 1))
    x = spread(x, P, 1, x_layout, 1, None if shape is None else L.local_shape())
    y = inner(x, w, L, bias_once(bias, at, 2), **options)
    return collect(y, P, 2, y_layout, 1)


# ---------------------------------------------------------------- transposed convolution


class _TransposedKernel(NamedTuple):
    """The arguments of a transposed convolution, one for each spatial dim."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def least(self) -> list[int]:
        """The smallest x of which there is an output, in each spatial dim."""
        return [max(1 - (d * (k - 1) + e + 1 - 2 * p) // s, 0) for k, s, p, e, d in zip(*self)]

    def need(self, i, o0, o1):
        """The range of spatial dim i of x that outputs o0 .. o1 - 1 read."""
        s, p = self.stride[i], self.padding[i]
        lo = -((self.dilation[i] * (self.size[i] - 1) - o0 - p) // s)  # ceil((o0 + p - d (k - 1)) / s)
        return lo, max((o1 - 1 + p) // s + 1, lo + 1)


@lru_cache(maxsize=1024)
def _transposed_kernel(size, stride, padding, extra, dilation) -> _TransposedKernel:
    s, p, e, d = (per_dim(v, len(size), "an argument") for v in (stride, padding, extra, dilation))
    if any(n >= max(a, b) for n, a, b in zip(e, s, d)) or min((*s, *d)) < 1 or min((*p, *e)) < 0:
        raise PartitionError(
            "not a legal transposed convolution",
            actual=dict(stride=s, padding=p, output_padding=e, dilation=d),
            expected="output_padding < max(stride, dilation), stride and dilation >= 1, padding >= 0",
            next_step="choose values as torch.nn.functional.conv_transpose2d takes them",
        )
    return _TransposedKernel(tuple(size), s, p, e, d)


class _Transposed(NamedTuple):
    """What one rank does: the windows of x, the groups of the local convolution, and (start, size) of this rank's
    outputs in its result, for each spatial dim."""

    spec: HaloSpec
    groups: int
    outputs: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def _transposed(L, at, own, channels, kernel: _TransposedKernel, groups, w_channels, split) -> _Transposed:
    in_per_group = max(L.shape[1] // max(groups, 1), 1)
    out_per_group = _out_per_group(L, sum(channels), groups, L.shape[1] if split else w_channels[0])
    first = own_start(with_sizes(L, channels, L.shape[2:]), at, own)
    if split and (first % out_per_group or w_channels[0] % in_per_group or w_channels[1] != out_per_group):
        raise PartitionError(
            "blocks of output channels cut groups",
            actual=channels,
            expected=f"multiples of {out_per_group}",
            next_step="split whole groups",
        )
    space, in_range = transposed_size(L.shape[2:], *kernel), _in_groups(out_per_group, L.shape[1] // groups)
    spec, outputs = channel_windows(L, "zeros", channels, space, in_range, kernel.need), []
    for i, (s, p) in enumerate(zip(kernel.stride, kernel.padding)):
        o0, o1 = spec.out_layout.blocks(i + 2)[at[i + 2]]
        o0, o1 = (o0, o1) if o0 < o1 else (0, 1)
        outputs.append((o0 + p - kernel.need(i, o0, o1)[0] * s, o1 - o0))
    return _Transposed(spec, max(own // out_per_group, 1), tuple(outputs))


def _cut_out(y, outputs):
    """These (start, size) of the spatial dims of y; zeros where y ends."""
    fills = []  # torch's pad takes the last dim first
    for d, (start, size) in reversed(list(enumerate(outputs, 2))):
        a, b = max(start, 0), min(start + size, y.shape[d])
        if a >= b:  # between strides: nothing reaches these outputs
            a = b = start = 0
        y = y.narrow(d, a, b - a)
        fills += [a - start, start + size - b]
    return tf.pad(y, fills) if any(fills) else y


@checked
def dist_conv_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    bias: torch.Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    shape: Sequence[int] | None = None,
    out_channels: int | None = None,
    x_layout: str = "root",
    y_layout: str = "root",
    params: str = "varying",
) -> torch.Tensor:
    """Transposed convolution of 1 to 3 spatial dims, as torch.nn.ConvTranspose1d/2d/3d, with true overlap-add.

    Args:
        w: (in channels, out channels / groups, *kernel). Where P's channel dim is split, this rank's block of output
            channels: (in, out block, *kernel), and with groups whole ones: (in channels of these groups, out / groups,
                *kernel).
        output_padding: extra size at the end, below stride or dilation.
        x, P, bias, shape, out_channels, x_layout, y_layout, params: as for :func:`dist_conv`; in the general form w is
        the
            (in, out) block.

    Returns:
        This rank's block of the result, of layout :func:`conv_transpose_layout`.

    Messages: as :func:`dist_conv`.

    y[b,o,p] = bias[o] + Σ_{c,i,k: stride·i - padding + dilation·k = p} w[c,o,k] x[b,c,i]: each rank fetches the inputs
    that its outputs read, so the sum over overlaps is local.
    """
    n, grid = _kernel_dims(w, "(in, out, *kernel)"), partition_of(P)
    stride, padding, output_padding, dilation, groups = settled(stride, padding, output_padding, dilation, groups)
    if grid.ndim == n + 3:
        options = dict(stride=stride, padding=padding, output_padding=output_padding, dilation=dilation)
        return _general(
            dist_conv_transpose, x, w, grid, bias, x_layout, y_layout, params, groups, shape, w.shape[0], options
        )
    spatial(P, n)
    w, bias = replicated(params, grid, _BESIDE_CHANNELS[n], w, bias)
    kernel = _transposed_kernel(w.shape[2:], stride, padding, output_padding, dilation)
    x, L, at = enter(x, P, layer="dist_conv_transpose", shape=shape)
    if at is None:
        channels = block_sizes(w.shape[1] * groups, grid, 1, out_channels)
        return outside(x, w, bias, like=L and conv_transpose_layout(at_least(L, kernel.least), channels, *kernel))
    # A block of output channels is w's second dim, or with groups (whole ones here) the groups of w's first.
    split = grid.shape[1] > 1 and groups > 1
    in_per_group = L.shape[1] // max(groups, 1)
    own = w.shape[1] * (w.shape[0] // max(in_per_group, 1) if split else groups)
    channels = block_sizes(own, grid, 1, out_channels)
    here = _transposed(L, at, own, channels, kernel, groups, w.shape[:2], split)
    check_bias("dist_conv_transpose", L, bias, own)
    window = halo_exchange(x, here.spec)
    if not own:
        return nothing(here.spec.out_layout.local_shape(), window, w, *present(bias))
    window, empty = filled(window, here.spec, at, (1,) * n)
    window, weight = _some_input(window, w, 0)
    y = _CONV_TRANSPOSE[n](window, weight, None, kernel.stride, 0, 0, here.groups, kernel.dilation)
    y = _cut_out(y, here.outputs)
    if bias is not None:
        y = y + autocast("dist_conv_transpose", n + 2, bias)[0].reshape(-1, *(1,) * n)
    return kept(cut(y, empty), x)
