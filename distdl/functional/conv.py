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
from ..errors import PartitionError
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.options import per_dim
from ..partition import Layout, partition_of
from ..ties import nothing
from .channels import (
    BESIDE_CHANNELS,
    channel_blocks,
    general,
    grouped,
    in_groups,
    kernel_dims,
    out_per_group_of,
    some_input,
)
from .enter import at_least, check_bias, enter, outside, present, replicated, spatial
from .overlap import overlap_of, overlapped
from .window import channel_windows, cut, filled, kept, own_start, settled, sliding, window_spec, with_sizes

__all__ = ["conv_layout", "dist_conv"]

_CONV = {1: tf.conv1d, 2: tf.conv2d, 3: tf.conv3d}
_MODES = ("circular", "reflect", "replicate", "zeros")


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
    block.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1, 2)), (8, 3, 32))
        >>> F.conv_layout(L, 6, 5).shape
        (8, 6, 28)
    """
    kernel, stride, dilation = (per_dim(v, L.ndim - 2, "an argument") for v in (kernel_size, stride, dilation))
    space = window_spec(L, None, kernel, stride, _paddings(padding, kernel, stride, dilation), dilation).out_layout
    return with_sizes(L, channel_blocks(out_channels, L), space.shape[2:])


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
        return grouped(conv, data, w, bias, first, outs, ins, stride=stride, padding=padding, dilation=dilation)

    def outputs(self, window, w, bias):
        """This rank's outputs."""
        if not w.shape[0]:  # a rank without output channels, connected to all that its peers' results depend on
            return nothing(self.spec.out_layout.local_shape(), window, w, *present(bias))
        window, empty = filled(window, self.spec, self.at, self.least)
        window, w = some_input(window, w, 1)
        return cut(self.conv(window, w, bias, self.padding), empty)


@lru_cache(maxsize=1024)
def _convolution(L, at, own, channels, kernel, stride, pads, dilation, least, groups, in_per_group, padding_mode):
    """The :class:`_Convolution` of the rank at ``at``, which has ``own`` of the output channels."""
    out_per_group = out_per_group_of(L, sum(channels), groups, in_per_group * groups)
    space = window_spec(L, None, kernel, stride, pads, dilation).out_layout.shape[2:]
    # Zeros around a dim that is not split need no memory: the local convolution adds them.
    inside = [padding_mode == "zeros" and p == 1 and a == b for p, (a, b) in zip(L.partition.shape[2:], pads)]
    window_of = sliding(stride, pads, dilation, kernel)
    spec = channel_windows(
        L,
        padding_mode,
        channels,
        space,
        in_groups(out_per_group, in_per_group),
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

    Example:
        >>> x, w = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 1, 3)
        >>> F.dist_conv(x, w, dd.Partition((1, 1, 1)), padding=1)
        tensor([[[3., 6., 5.]]])
    """
    n, grid = kernel_dims(w, "(out, in, *kernel)"), partition_of(P)
    stride, padding, dilation, groups = settled(stride, padding, dilation, groups)
    if grid.ndim == n + 3:
        options = dict(stride=stride, padding=padding, dilation=dilation, padding_mode=padding_mode, overlap=overlap)
        return general(dist_conv, x, w, grid, bias, x_layout, y_layout, params, groups, shape, w.shape[1], options)
    spatial(P, n)
    w, bias = replicated(params, grid, BESIDE_CHANNELS[n], w, bias)
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
