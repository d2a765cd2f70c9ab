"""Convolutions over partitioned tensors: split batch, space and channels, equal to torch's serial ones."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as tf

from .._arguments import checked
from ..agree import block_sizes, check_tensor, partition_of
from ..errors import PartitionError, ShapeError
from ..movement.halo import HaloSpec, per_dim, plain
from ..partition import Layout, balanced
from ..ties import nothing
from .autocast import autocast
from .linear import bias_once, check_layouts, collect, spread
from .overlap import overlap_of, overlapped
from .params import check_bias, replicated
from .window import MODES, on_window, window_spec, windowed, with_layout

__all__ = ["conv_layout", "conv_transpose_layout", "dist_conv", "dist_conv_transpose"]

_CONV = {1: tf.conv1d, 2: tf.conv2d, 3: tf.conv3d}
_CONV_TRANSPOSE = {1: tf.conv_transpose1d, 2: tf.conv_transpose2d, 3: tf.conv_transpose3d}


def _paddings(padding, kernel, stride, dilation, op):
    """``padding`` as pairs (before, after)."""
    n, padding = len(kernel), plain(padding, "padding", op)
    if padding == "valid":
        return ((0, 0),) * n
    if padding == "same":
        if any(s != 1 for s in stride):
            raise PartitionError(
                "padding 'same' needs stride 1",
                op=op,
                expected=1,
                actual=stride,
                next_step="use stride 1, or give the padding in numbers",
            )
        total = [d * (k - 1) for k, d in zip(kernel, dilation)]
        return tuple((t // 2, t - t // 2) for t in total)  # an odd total pads the extra element after, as torch does
    if isinstance(padding, str):
        raise PartitionError(
            "no such padding",
            op=op,
            expected="an int, a tuple, 'same' or 'valid'",
            actual=padding,
            next_step="give the number of zeros on each side, or one of the two words",
        )
    return tuple(p if isinstance(p, tuple) else (p, p) for p in per_dim(padding, n, "padding", op))


def check_grid(op, P, n: int) -> None:
    """Raise unless ``P`` has the dims of an x with ``n`` spatial ones."""
    if P.ndim != n + 2:
        raise PartitionError(
            "x needs batch, channel and the kernel's dims",
            op=op,
            partitions=P,
            expected=n + 2,
            actual=P.ndim,
            next_step="give P one dim for the batch, one for the channels and one for each dim of the kernel",
        )


def _with_sizes(L: Layout, channels, space) -> Layout:
    """L with other channel blocks and another spatial size."""
    out = L.with_shape((L.shape[0], L.shape[1], *space))
    splits = list(out.splits or (None,) * out.ndim)
    splits[1] = tuple(channels)
    return Layout(L.partition, (L.shape[0], sum(channels), *space), tuple(splits))


def _spec(L: Layout, n: int, mode, channels, space, in_range, need, op) -> HaloSpec:
    """Windows of x for blocks of the output: ``need`` in the spatial dims, ``in_range`` in the channel dim."""
    if min(space) < 0:
        raise PartitionError(
            "the output would have no size",
            op=op,
            partitions=L,
            expected=">= 0",
            actual=space,
            next_step="pad more, or use a smaller kernel or dilation",
        )

    def needs(d, o0, o1):
        return (o0, o1) if d == 0 else in_range(o0, o1) if d == 1 else need(d - 2, o0, o1)

    return HaloSpec.needs(L, None, _with_sizes(L, channels, space), needs, ("none", "none", *(mode,) * n))


def _conv_need(stride, pads, dilation, kernel):
    def need(i, o0, o1):
        start = o0 * stride[i] - pads[i][0]
        return start, start + (o1 - 1 - o0) * stride[i] + dilation[i] * (kernel[i] - 1) + 1

    return need


@lru_cache(maxsize=1024)
def _conv_arguments(kernel, stride, padding, dilation, padding_mode):
    """(stride, dilation, padding before and after, smallest window), one for each spatial dim."""
    op, n = "dist_conv", len(kernel)
    stride, dilation = (per_dim(v, n, "stride or dilation", op) for v in (stride, dilation))
    if padding_mode not in MODES:
        raise PartitionError(
            "no such padding_mode",
            op=op,
            expected=sorted(MODES),
            actual=padding_mode,
            next_step="use one of them, as torch.nn.functional.pad names them",
        )
    least = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation))
    return stride, dilation, _paddings(padding, kernel, stride, dilation, op), least


@lru_cache(maxsize=1024)
def _conv_windows(L, channels, kernel, stride, pads, dilation, groups, in_per_group, padding_mode):
    """(windows of x, padding that is left to the local convolution, output channels per group)."""
    op, n = "dist_conv", len(kernel)
    out_per_group = _check_groups(op, L, sum(channels), groups, in_per_group * groups)
    space = window_spec(L, None, kernel, stride, pads, dilation).out_layout.shape[2:]
    # Zeros around a dim that is not split need no memory: the local convolution adds them.
    inside = [
        padding_mode == "zeros" and L.partition.shape[2 + i : 3 + i] == (1,) and a == b for i, (a, b) in enumerate(pads)
    ]
    window_of = _conv_need(stride, pads, dilation, kernel)
    spec = _spec(
        L,
        n,
        MODES[padding_mode],
        channels,
        space,
        lambda o0, o1: (o0 // out_per_group * in_per_group, -(-o1 // out_per_group) * in_per_group),
        lambda i, o0, o1: (0, L.shape[2 + i]) if inside[i] else window_of(i, o0, o1),
        op,
    )
    return spec, tuple(a if whole else 0 for (a, _), whole in zip(pads, inside)), out_per_group


@checked
def conv_layout(L: Layout, out_channels, kernel_size, stride=1, padding=0, dilation=1) -> Layout:
    """The layout of :func:`dist_conv`'s result for an x of layout ``L``; ``out_channels`` a number, or one for each
    block."""
    n, op = L.ndim - 2, "conv_layout"
    kernel, stride, dilation = (per_dim(v, n, "an argument", op) for v in (kernel_size, stride, dilation))
    pads = _paddings(padding, kernel, stride, dilation, op)
    blocks = out_channels if isinstance(out_channels, tuple) else balanced(out_channels, L.partition.shape[1])
    return _with_sizes(L, blocks, window_spec(L, None, kernel, stride, pads, dilation).out_layout.shape[2:])


@checked
def conv_transpose_layout(
    L: Layout, out_channels, kernel_size, stride=1, padding=0, output_padding=0, dilation=1
) -> Layout:
    """The layout of :func:`dist_conv_transpose`'s result for an x of layout ``L``."""
    n, op = L.ndim - 2, "conv_transpose_layout"
    k, s, p, extra, d = (
        per_dim(v, n, "an argument", op) for v in (kernel_size, stride, padding, output_padding, dilation)
    )
    blocks = out_channels if isinstance(out_channels, tuple) else balanced(out_channels, L.partition.shape[1])
    return _with_sizes(L, blocks, _transposed_size(L.shape[2:], k, s, p, extra, d))


def _transposed_size(space, kernel, stride, padding, extra, dilation):
    return tuple(
        (m - 1) * s - 2 * p + d * (k - 1) + e + 1
        for m, k, s, p, e, d in zip(space, kernel, stride, padding, extra, dilation)
    )


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


@checked
def dist_conv(
    x,
    w,
    P,
    bias=None,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    padding_mode="zeros",
    shape=None,
    out_channels=None,
    x_layout="root",
    y_layout="root",
    params="varying",
    overlap=False,
):
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
    those of
    :func:`dist_linear`. Overlap sends the same ghosts. On a device they travel on a stream of their own, forward and
    backward; on CPUs MPI moves large messages inside of its calls only, and overlap saves the window's copy. Nothing
    overlaps under torch.func, where channels are fetched, or on a rank whose every output reads a halo.

    y[b,o,p] = bias[o] + Σ_{c,k} w[o,c,k] x[b, c, stride·p - padding + dilation·k]; Hewett & Grady, arXiv:2006.03108,
    section 4.

    Raises:
        PartitionError, ShapeError: arguments that the serial layer would refuse, or blocks that do not fit.
    """
    op, n, where = "dist_conv", w.dim() - 2, partition_of(P)
    if n not in _CONV:
        raise ShapeError(
            "w needs 3 to 5 dims",
            op=op,
            expected="(out, in, *kernel)",
            actual=tuple(w.shape),
            partitions=P,
            next_step="pass this rank's block of the weights, for 1 to 3 spatial dims",
        )
    stride, padding, dilation, groups = (plain(v, "an argument", op) for v in (stride, padding, dilation, groups))
    options = dict(stride=stride, padding=padding, dilation=dilation, padding_mode=padding_mode, overlap=overlap)
    if where.ndim == n + 3:
        return _general(
            dist_conv, x, w, where, bias, x_layout, y_layout, params, groups, shape, w.shape[1], w.shape[0], options
        )
    check_grid(op, P, n)
    w, bias = replicated(params, where, [d for d in range(where.ndim) if d != 1], w, bias)
    kernel, in_per_group = w.shape[2:], w.shape[1]
    stride, dilation, pads, least = _conv_arguments(kernel, stride, padding, dilation, padding_mode)

    def body(x, L):
        channels = block_sizes(w.shape[0], where, 1, out_channels)
        if not L.active:
            return nothing(
                conv_layout(L, channels, kernel, stride, padding, dilation).local_shape(), x, *present(w, bias)
            )
        spec, own, out_per_group = _conv_windows(
            L, channels, kernel, stride, pads, dilation, groups, in_per_group, padding_mode
        )
        first = _own_start(op, spec.out_layout, w.shape[0])
        check_bias(op, L, bias, w.shape[0])

        def conv(data, w, bias, padding):
            return _grouped(
                _CONV[n],
                data,
                w,
                bias,
                first,
                out_per_group,
                in_per_group,
                stride=stride,
                padding=padding,
                dilation=dilation,
            )

        def local(window):
            if not w.shape[0]:
                sizes = [(m + 2 * p - f) // s + 1 for m, p, f, s in zip(window.shape[2:], own, least, stride)]
                return _no_channels(window, sizes, w, bias)
            window, weight = _some_input(window, w, 1)
            return conv(window, weight, bias, own)

        coords = where.index()
        if coords is not None and overlap:
            here = overlap_of(spec, coords, kernel, stride, pads, dilation)
            if here is not None:
                return overlapped(x, here, conv, w, bias, lambda window: on_window(window, spec, least, local))
        return windowed(x, spec, least, local)

    return with_layout(op, x, P, shape, body)


def _no_channels(window, sizes, w, bias):
    """The result of a rank that has no output channel, connected to all that its peers' results depend on."""
    return nothing((window.shape[0], 0, *sizes), window, *present(w, bias))


def present(*tensors):
    """Those that are not ``None``."""
    return [t for t in tensors if t is not None]


def _some_input(window, w, dim):
    """(window, w), with one input channel of zeros where there is none (torch has no sum over nothing); ``dim``: w's of
    them."""
    if w.shape[dim]:
        return window, w
    return tf.pad(window, (0, 0) * (window.dim() - 2) + (0, 1)), tf.pad(w, (0, 0) * (w.dim() - 1 - dim) + (0, 1))


def _check_groups(op, L, out_channels, groups, in_channels) -> int:
    """Output channels per group."""
    if L.shape[1] != in_channels:
        raise ShapeError(
            "w does not fit x",
            op=op,
            partitions=L,
            expected=f"{L.shape[1]} input channels over {groups} groups",
            actual=in_channels,
            next_step="w needs all the input channels of its groups",
        )
    if groups < 1 or out_channels % groups:
        raise ShapeError(
            "groups do not divide the output channels",
            op=op,
            expected=f"a divisor of {out_channels}",
            actual=groups,
            partitions=L,
            next_step="choose groups that divide both numbers of channels",
        )
    return max(out_channels // groups, 1)


def _own_start(op, out: Layout, own: int) -> int:
    """Where this rank's output channels start."""
    coords = out.partition.index()
    first, last = out.blocks(1)[coords[1]] if coords else (0, own)
    if last - first != own:
        raise ShapeError(
            "w has another number of output channels than this rank's block",
            op=op,
            partitions=out,
            expected=last - first,
            actual=own,
            next_step="pass the weights of this rank's output channels (out_channels: their number over all ranks)",
        )
    return first


def _general(inner, x, w, P, bias, x_layout, y_layout, params, groups, shape, w_in, w_out, options):
    """P = (batch, out, in, *space): spread x along *out*, convolve with this rank's (out, in) block, sum along *in*."""
    op = inner.__name__
    check_layouts(op, x_layout, y_layout)
    (x,) = autocast(op, P.ndim - 1, x)
    if groups != 1:
        raise PartitionError(
            "the general form has no groups",
            op=op,
            partitions=P,
            expected=1,
            actual=groups,
            next_step="split channels with a (batch, channel, *space) partition instead",
        )
    beside = [d for d in range(P.ndim) if d not in (1, 2)]
    (w,) = replicated(params, P, beside, w)
    (bias,) = replicated(params, P, (2, *beside), bias)
    coords = P.index()
    if coords is None:
        check_tensor(op, x, P)
        if shape is None:
            return nothing(
                (0, w_out, *x.shape[2:]) if x.dim() == P.ndim - 1 else (0,) * (P.ndim - 1), x, *present(w, bias)
            )
        at_root = P.take(2, 0).take(1, 0, keepdim=True)
        return inner(x, w, Layout(at_root, (shape[0], w_in, *shape[2:])), bias, **options)
    here = P.take(2, coords[2]).take(
        1, coords[1], keepdim=True
    )  # the ranks of this (out, in) block: (batch, 1, *space)
    L = None if shape is None else Layout(here, (shape[0], w_in, *shape[2:]))
    x = spread(x, P, 1, x_layout, 1, None if L is None else L.local_shape())
    y = inner(x, w, here if L is None else L, bias_once(bias, P, 2), **options)
    return collect(y, P, 2, y_layout, 1)


@checked
def dist_conv_transpose(
    x,
    w,
    P,
    bias=None,
    *,
    stride=1,
    padding=0,
    output_padding=0,
    dilation=1,
    groups=1,
    shape=None,
    out_channels=None,
    x_layout="root",
    y_layout="root",
    params="varying",
):
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
    op, n, where = "dist_conv_transpose", w.dim() - 2, partition_of(P)
    if n not in _CONV:
        raise ShapeError(
            "w needs 3 to 5 dims",
            op=op,
            expected="(in, out, *kernel)",
            actual=tuple(w.shape),
            partitions=P,
            next_step="pass this rank's block of the weights, for 1 to 3 spatial dims",
        )
    groups = plain(groups, "groups", op)
    options = dict(stride=stride, padding=padding, output_padding=output_padding, dilation=dilation)
    if where.ndim == n + 3:
        return _general(
            dist_conv_transpose,
            x,
            w,
            where,
            bias,
            x_layout,
            y_layout,
            params,
            groups,
            shape,
            w.shape[0],
            w.shape[1],
            options,
        )
    check_grid(op, P, n)
    w, bias = replicated(params, where, [d for d in range(where.ndim) if d != 1], w, bias)
    s, p, extra, d = (per_dim(v, n, "an argument", op) for v in (stride, padding, output_padding, dilation))
    k = tuple(w.shape[2:])
    if any(e >= max(a, b) for e, a, b in zip(extra, s, d)) or min((*s, *d)) < 1 or min((*p, *extra)) < 0:
        raise PartitionError(
            "not a legal transposed convolution",
            op=op,
            actual=options,
            expected="output_padding < max(stride, dilation), stride and dilation >= 1, padding >= 0",
            partitions=P,
            next_step="choose values as torch.nn.functional.conv_transpose2d takes them",
        )

    def need(i, o0, o1):
        lo = -((d[i] * (k[i] - 1) - o0 - p[i]) // s[i])  # ceil((o0 + p - d (k - 1)) / s)
        return lo, max((o1 - 1 + p[i]) // s[i] + 1, lo + 1)

    def body(x, L):
        if not L.active:
            channels = block_sizes(w.shape[1] * groups, where, 1, out_channels)
            return nothing(conv_transpose_layout(L, channels, k, s, p, extra, d).local_shape(), x, *present(w, bias))
        # A block of output channels is w's second dim, or with groups (whole ones here) the groups of w's first.
        split = where.shape[1] > 1 and groups > 1
        in_per_group = L.shape[1] // groups
        own = w.shape[1] * (w.shape[0] // max(in_per_group, 1) if split else groups)
        channels = block_sizes(own, where, 1, out_channels)
        out_per_group = _check_groups(op, L, sum(channels), groups, L.shape[1] if split else w.shape[0])
        first = _own_start(op, _with_sizes(L, channels, L.shape[2:]), own)
        check_bias(op, L, bias, own)
        if split and (first % out_per_group or w.shape[0] % in_per_group or w.shape[1] != out_per_group):
            raise PartitionError(
                "blocks of output channels cut groups",
                op=op,
                partitions=L,
                actual=channels,
                expected=f"multiples of {out_per_group}",
                next_step="split whole groups",
            )
        space = _transposed_size(L.shape[2:], k, s, p, extra, d)
        spec = _spec(
            L,
            n,
            "zeros",
            channels,
            space,
            lambda o0, o1: (o0 // out_per_group * in_per_group, -(-o1 // out_per_group) * in_per_group),
            need,
            op,
        )
        coords = where.index()
        blocks = [spec.out_layout.blocks(i + 2)[coords[i + 2] if coords else 0] for i in range(n)]

        def local(window):
            if not own:
                return _no_channels(window, [max(b - a, 1) for a, b in blocks], w, bias)
            here = max(own // out_per_group, 1)
            window, weight = _some_input(window, w, 0)
            y = _CONV_TRANSPOSE[n](window, weight, None, s, 0, 0, here, d)
            fills = []  # torch's pad takes the last dim first
            for i in reversed(range(n)):
                o0, o1 = blocks[i] if blocks[i][0] < blocks[i][1] else (0, 1)
                start = o0 + p[i] - need(i, o0, o1)[0] * s[i]  # where output o0 lies in y
                a, b = max(start, 0), min(start + o1 - o0, y.shape[i + 2])
                if a >= b:  # between strides: nothing reaches these outputs
                    a = b = start = 0
                y = y.narrow(i + 2, a, b - a)
                fills += [a - start, start + o1 - o0 - b]
            y = tf.pad(y, fills)
            return y if bias is None else y + autocast(op, n + 2, bias)[0].reshape(-1, *(1,) * n)

        return windowed(x, spec, [1] * n, local)

    return with_layout(op, x, P, shape, body)
