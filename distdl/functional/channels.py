"""The channels of convolutions: blocks and groups of them, and the general form, which splits them in and out."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as tf

from ..boxes import balanced
from ..errors import PartitionError, ShapeError
from ..partition import Layout
from .along import bias_once, check_layouts, collect, collected, spread
from .autocast import autocast
from .enter import outside, replicated

__all__: list[str] = []

BESIDE_CHANNELS = {n: (0, *range(2, n + 2)) for n in (1, 2, 3)}  # the dims of x but its channels, of n spatial dims


def kernel_dims(w, what: str) -> int:
    """The number of spatial dims of weights ``w``."""
    if w.dim() - 2 not in BESIDE_CHANNELS:
        raise ShapeError(
            "w needs 3 to 5 dims",
            expected=what,
            actual=tuple(w.shape),
            next_step="pass this rank's block of the weights, for 1 to 3 spatial dims",
        )
    return w.dim() - 2


def channel_blocks(out_channels, L: Layout) -> tuple[int, ...]:
    """The number of output channels of each block along x's channel dim: as they are told, or balanced."""
    return out_channels if isinstance(out_channels, tuple) else balanced(out_channels, L.partition.shape[1])


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


def grouped(conv, window, w, bias, first, out_per_group, in_per_group, **kwargs):
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


def some_input(window, w, dim):
    """(window, w), with one input channel of zeros where there is none (torch has no sum over nothing); ``dim``: w's of
    them."""
    if w.shape[dim]:
        return window, w
    return tf.pad(window, (0, 0) * (window.dim() - 2) + (0, 1)), tf.pad(w, (0, 0) * (w.dim() - 1 - dim) + (0, 1))


def out_per_group_of(L, out_channels, groups, in_channels) -> int:
    """Output channels per group."""
    if L.shape[1] != in_channels:
        raise ShapeError(
            "w does not fit x",
            expected=f"{L.shape[1]} input channels over {groups} groups",
            actual=in_channels,
            next_step="w needs all the input channels of its groups, and x is this rank's block, not the whole",
        )
    if groups < 1 or out_channels % groups:
        raise ShapeError(
            "groups do not divide the output channels",
            expected=f"a divisor of {out_channels}",
            actual=groups,
            next_step="choose groups that divide both numbers of channels",
        )
    return max(out_channels // groups, 1)


def in_groups(out_per_group, in_per_group):
    """The input channels that output channels o0 .. o1 - 1 read: those of their groups."""
    return lambda o0, o1: (o0 // out_per_group * in_per_group, -(-o1 // out_per_group) * in_per_group)


# ---------------------------------------------------------------- the general form


def general(inner, x, w, P, bias, x_layout, y_layout, params, groups, shape, ins, options):
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
