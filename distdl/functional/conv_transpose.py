"""Transposed convolutions over partitioned tensors, equal to torch's serial ones."""

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
from .autocast import autocast
from .channels import BESIDE_CHANNELS, channel_blocks, general, in_groups, kernel_dims, out_per_group_of, some_input
from .enter import at_least, check_bias, enter, outside, present, replicated, spatial
from .window import channel_windows, cut, filled, kept, own_start, settled, transposed_size, with_sizes

__all__ = ["conv_transpose_layout", "dist_conv_transpose"]

_CONV_TRANSPOSE = {1: tf.conv_transpose1d, 2: tf.conv_transpose2d, 3: tf.conv_transpose3d}


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
    """The layout of :func:`dist_conv_transpose`'s result for an x of layout ``L``.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1, 2)), (8, 3, 32))
        >>> F.conv_transpose_layout(L, 6, 2, stride=2).shape
        (8, 6, 64)
    """
    options = (kernel_size, stride, padding, output_padding, dilation)
    space = transposed_size(L.shape[2:], *(per_dim(v, L.ndim - 2, "an argument") for v in options))
    return with_sizes(L, channel_blocks(out_channels, L), space)


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
    out_per_group = out_per_group_of(L, sum(channels), groups, L.shape[1] if split else w_channels[0])
    first = own_start(with_sizes(L, channels, L.shape[2:]), at, own)
    if split and (first % out_per_group or w_channels[0] % in_per_group or w_channels[1] != out_per_group):
        raise PartitionError(
            "blocks of output channels cut groups",
            actual=channels,
            expected=f"multiples of {out_per_group}",
            next_step="split whole groups",
        )
    space, in_range = transposed_size(L.shape[2:], *kernel), in_groups(out_per_group, L.shape[1] // groups)
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
            the (in, out) block.

    Returns:
        This rank's block of the result, of layout :func:`conv_transpose_layout`.

    Messages: as :func:`dist_conv`.

    y[b,o,p] = bias[o] + Σ_{c,i,k: stride·i - padding + dilation·k = p} w[c,o,k] x[b,c,i]: each rank fetches the inputs
    that its outputs read, so the sum over overlaps is local.

    Example:
        >>> x, w = torch.tensor([[[1.0, 2.0]]]), torch.ones(1, 1, 2)
        >>> F.dist_conv_transpose(x, w, dd.Partition((1, 1, 1)), stride=2)
        tensor([[[1., 1., 2., 2.]]])
    """
    n, grid = kernel_dims(w, "(in, out, *kernel)"), partition_of(P)
    stride, padding, output_padding, dilation, groups = settled(stride, padding, output_padding, dilation, groups)
    if grid.ndim == n + 3:
        options = dict(stride=stride, padding=padding, output_padding=output_padding, dilation=dilation)
        return general(
            dist_conv_transpose, x, w, grid, bias, x_layout, y_layout, params, groups, shape, w.shape[0], options
        )
    spatial(P, n)
    w, bias = replicated(params, grid, BESIDE_CHANNELS[n], w, bias)
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
    window, weight = some_input(window, w, 0)
    y = _CONV_TRANSPOSE[n](window, weight, None, kernel.stride, 0, 0, here.groups, kernel.dilation)
    y = _cut_out(y, here.outputs)
    if bias is not None:
        y = y + autocast("dist_conv_transpose", n + 2, bias)[0].reshape(-1, *(1,) * n)
    return kept(cut(y, empty), x)
