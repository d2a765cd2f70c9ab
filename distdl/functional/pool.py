"""Pooling over partitioned tensors, equal to torch's serial pooling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as tf

from .._arguments import checked
from ..errors import PartitionError
from ..movement.copies import sum_reduce
from ..movement.halo import HaloSpec, per_dim, plain
from ..partition import Layout
from ..ties import nothing
from .reduce import power, wide
from .window import window_spec, windowed, with_layout

__all__ = [
    "dist_adaptive_avg_pool",
    "dist_adaptive_max_pool",
    "dist_avg_pool",
    "dist_l2_pool",
    "dist_max_pool",
    "pool_layout",
]

_MAX = {1: tf.max_pool1d, 2: tf.max_pool2d, 3: tf.max_pool3d}
_REAL = "a real dtype"
_AVG = {2: tf.avg_pool2d, 3: tf.avg_pool3d}


def _arguments(op, L, kernel_size, stride, padding, dilation, ceil_mode):
    """The arguments as tuples, and the windows of an unbounded input."""
    n = L.ndim - 2
    if n not in _MAX:
        raise PartitionError(
            "x needs batch, channel and 1 to 3 dims",
            op=op,
            partitions=L,
            expected="3 to 5",
            actual=L.ndim,
            next_step="give P one dim for the batch, one for the channels and one for each spatial dim",
        )
    kernel, padding, dilation = (per_dim(v, n, "an argument", op) for v in (kernel_size, padding, dilation))
    stride = plain(stride, "stride", op)
    stride = kernel if stride in (None, ()) else per_dim(stride, n, "stride", op)
    if any(2 * p > (k - 1) * d + 1 for p, k, d in zip(padding, kernel, dilation)):
        raise PartitionError(
            "padding is more than half of the kernel",
            op=op,
            actual=padding,
            expected=f"half of {kernel}",
            partitions=L,
            next_step="pad less, or with F.dist_pad first",
        )
    spec = window_spec(L, None, kernel, stride, padding, dilation, "zeros", ceil_mode=bool(ceil_mode))
    return kernel, stride, padding, dilation, spec


@checked
def pool_layout(L: Layout, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False) -> Layout:
    """The layout of a pooling's result for an x of layout ``L``."""
    return _arguments("pool_layout", L, kernel_size, stride, padding, dilation, ceil_mode)[-1].out_layout


def dist_max_pool(
    x, P, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, *, return_indices=False, shape=None
):
    """Max pooling of 1 to 3 spatial dims, as torch.nn.functional.max_pool1d/2d/3d; padding counts as -inf.

    Args:
        x: (batch, channels, *space), this rank's block.
        P: partition or Layout of x.
        kernel_size, stride, padding, dilation: an int or one per spatial dim; stride defaults to the kernel.
        ceil_mode: a last, partial window counts.
        return_indices: also return, for each output, the place of its maximum in the flattened *global* space, int64.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block, of layout :func:`pool_layout`; with ``return_indices`` (block, indices).

    Messages: one halo exchange; its transpose in backward.

    Raises:
        PartitionError: arguments that torch would refuse.
    """
    op = "dist_max_pool"

    def body(x, L):
        kernel, step, _, holes, spec = _arguments(op, L, kernel_size, stride, padding, dilation, ceil_mode)
        box, sizes = _box(spec), L.shape[2:]

        def local(window):
            # -inf beyond the edge, as torch pads; the least value where the dtype has no infinity
            low = -torch.inf if window.is_floating_point() else torch.iinfo(window.dtype).min
            return _MAX[len(kernel)](
                _refill(window, box, sizes, low), kernel, step, 0, holes, return_indices=return_indices
            )

        least = [1, *(d * (k - 1) + 1 for k, d in zip(kernel, holes))]
        if not return_indices or not L.active:
            return windowed(x, spec, least, local)
        places = []

        def with_places(window):
            y, index = local(window)
            places.append(_global_places(index, window.shape[2:], box, sizes, holes))
            return y

        y = windowed(x, spec, least, with_places)
        return y, places[0][tuple(slice(0, n) for n in y.shape)]

    return with_layout(op, x, P, shape, body, return_indices, _REAL)


def _box(spec):
    """((lo, hi), ...) of this rank's window in the spatial dims; a rank without outputs has one that needs no
    filling."""
    coords = spec.in_layout.partition.index()
    box = [w[coords[d] if coords else 0] for d, w in enumerate(spec.windows)]
    return [(lo, hi) if coords and lo < hi else (0, 0) for lo, hi in box[2:]]


def _refill(window, box, sizes, value):
    """The window with ``value`` instead of zero beyond the edge."""
    fills = []
    for i, ((lo, hi), n) in enumerate(zip(box, sizes)):
        before, after = max(-lo, 0), max(hi - n, 0)
        fills = [before, after, *fills]
        window = window.narrow(i + 2, before, window.shape[i + 2] - before - after) if before or after else window
    return tf.pad(window, fills, value=value) if any(fills) else window


def _global_places(index, window_shape, box, sizes, holes):
    """Places in the flattened window as places in the flattened global space."""
    place, scale = torch.zeros_like(index), 1
    for m, (lo, _), n, hole in reversed(list(zip(window_shape, box, sizes, holes))):
        at = index % m + lo
        index = index // m
        at = torch.where(
            at < 0, at + -(at // hole) * hole, at
        )  # an all -inf window: its first element inside, as torch
        place, scale = place + at.clamp(0, max(n - 1, 0)) * scale, scale * n
    return place


def dist_avg_pool(
    x,
    P,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    *,
    divisor_override=None,
    shape=None,
):
    """Average pooling of 1 to 3 spatial dims, as torch.nn.functional.avg_pool1d/2d/3d.

    Args:
        count_include_pad: count padding (but not what ``ceil_mode`` adds beyond it) in the mean.
        divisor_override: divide by this instead.
        others: as for :func:`dist_max_pool`.

    Returns:
        This rank's block, of layout :func:`pool_layout`.

    Messages: one halo exchange; its transpose in backward.
    """
    op = "dist_avg_pool"
    if divisor_override == 0:
        raise PartitionError(
            "divisor_override cannot be zero",
            op=op,
            expected="a number",
            actual=0,
            partitions=P,
            next_step="leave it out, or give another divisor",
        )

    def body(x, L):
        kernel, step, pads, _, spec = _arguments(op, L, kernel_size, stride, padding, 1, ceil_mode)
        coords = L.partition.index()

        def divisor(like):
            counts = like.new_ones(())
            for i, (k, s, p, size) in enumerate(zip(kernel, step, pads, L.shape[2:])):
                o0, o1 = spec.out_layout.blocks(i + 2)[coords[i + 2] if coords else 0]
                start = torch.arange(o0, max(o1, o0 + 1)) * s - p
                stop = (start + k).clamp(max=size + p)
                if not count_include_pad:
                    start, stop = start.clamp(min=0), stop.clamp(max=size)
                counts = counts.unsqueeze(-1) * (stop - start).clamp(min=1).to(like)
            return counts

        def local(window):
            sums = _sums(wide(window), kernel, step)
            return (sums / (divisor(sums) if divisor_override is None else divisor_override)).to(window.dtype)

        return windowed(x, spec, [1, *kernel], local)

    return with_layout(op, x, P, shape, body, kinds=_REAL)


def _sums(window, kernel, step):
    """Sums over sliding windows, without padding."""
    if len(kernel) == 1:
        return tf.avg_pool2d(window.unsqueeze(2), (1, *kernel), (1, *step), divisor_override=1).squeeze(2)
    return _AVG[len(kernel)](window, kernel, step, divisor_override=1)


def dist_l2_pool(x, P, kernel_size, stride=None, *, shape=None):
    """L2 pooling of 1 to 3 spatial dims: y = √Σ x² over each window, channel by channel.

    Where a whole window is zero y is not differentiable, and all derivatives are taken to be zero (not NaN), in every
    mode.

    Args:
        x: (batch, channels, *space), this rank's block.
        P, kernel_size, stride, shape: as for :func:`dist_max_pool`; no padding.

    Returns:
        This rank's block, of layout :func:`pool_layout`.

    Messages: one halo exchange; its transpose in backward.
    """
    op = "dist_l2_pool"

    def body(x, L):
        kernel, step, _, _, spec = _arguments(op, L, kernel_size, stride, 0, 1, False)

        def local(window):
            return power(_sums(wide(window).square(), kernel, step), 0.5).to(window.dtype)

        return windowed(x, spec, [1, *kernel], local)

    return with_layout(op, x, P, shape, body, kinds=_REAL)


def _adaptive_spec(op, L, output_size):
    """Windows of adaptive pooling: output o of dim d reads [floor(o n / m), ceil((o + 1) n / m))."""
    n = L.ndim - 2
    sizes = per_dim(output_size, n, "output_size", op)
    sizes = tuple(have if want is None else want for want, have in zip(sizes, L.shape[2:]))
    if n not in _MAX or min(sizes) < 0:
        raise PartitionError(
            "not a legal output_size",
            op=op,
            partitions=L,
            expected="sizes >= 0",
            actual=output_size,
            next_step="give sizes of at least 0, or None for the input's",
        )

    def need(d, o0, o1):
        return (o0, o1) if d < 2 else (_start(o0, L.shape[d], sizes[d - 2]), -(-o1 * L.shape[d] // sizes[d - 2]))

    return HaloSpec.needs(L, None, (*L.shape[:2], *sizes), need, "none"), sizes


def _start(o, n, m):
    return o * n // m


def _adaptive_cuts(spec, sizes, d):
    """(start, length) inside this rank's window of each of its outputs along dim d; one, if it has none."""
    coords = spec.in_layout.partition.index()
    c, n, m = coords[d] if coords else 0, spec.in_layout.shape[d], sizes[d - 2]
    o0, o1 = spec.out_layout.blocks(d)[c]
    if not coords or o0 == o1:
        return [(0, 1)]
    lo = spec.windows[d][c][0]
    return [(_start(o, n, m) - lo, -(-(o + 1) * n // m) - _start(o, n, m)) for o in range(o0, o1)]


def dist_adaptive_max_pool(x, P, output_size, *, return_indices=False, shape=None):
    """Adaptive max pooling of 1 to 3 spatial dims, as torch.nn.functional.adaptive_max_pool1d/2d/3d.

    Args:
        output_size: global size of the output, an int or one per spatial dim; ``None`` keeps a dim's size.
        others: as for :func:`dist_max_pool`.

    Messages: one halo exchange; its transpose in backward.
    """
    op = "dist_adaptive_max_pool"

    def body(x, L):
        spec, sizes = _adaptive_spec(op, L, output_size)
        box, places = _box(spec), []

        def local(window):
            # One dim at a time, the last first: among equals the first in row-major order wins, as in torch.
            indices: list = []
            for d in reversed(range(2, window.dim())):
                lo = box[d - 2][0]
                found = [window.narrow(d, a, m).max(d, keepdim=True) for a, m in _adaptive_cuts(spec, sizes, d)]
                cuts = _adaptive_cuts(spec, sizes, d)
                indices = [
                    torch.cat([i.narrow(d, a, m).gather(d, f.indices) for f, (a, m) in zip(found, cuts)], d)
                    for i in indices
                ]
                indices.append(torch.cat([f.indices + (a + lo) for f, (a, _) in zip(found, cuts)], d))
                window = torch.cat([f.values for f in found], d)
            place, scale = torch.zeros((), dtype=torch.int64, device=window.device), 1
            for index, n in zip(indices, reversed(L.shape[2:])):
                place, scale = place + index * scale, scale * n
            places.append(place)
            return window

        y = windowed(x, spec, [1] * (1 + len(sizes)), local)
        return (y, places[0][tuple(slice(0, n) for n in y.shape)]) if return_indices and L.active else y

    return with_layout(op, x, P, shape, body, return_indices, _REAL)


def dist_adaptive_avg_pool(x, P, output_size, *, shape=None):
    """Adaptive average pooling of 1 to 3 spatial dims, as torch.nn.functional.adaptive_avg_pool1d/2d/3d.

    ``output_size=1`` is global average pooling: local sums, then one sum_reduce of |y| to the ranks that hold the
    output (a
    mean of means would be wrong on uneven blocks). Otherwise one halo exchange; arguments as for
    :func:`dist_adaptive_max_pool`.
    """
    op = "dist_adaptive_avg_pool"

    def body(x, L):
        spec, sizes = _adaptive_spec(op, L, output_size)
        if all(m == 1 for m in sizes):
            return _global_avg_pool(x, L, spec.out_layout)

        def local(window):
            dtype, window = window.dtype, wide(window)
            for d in range(2, window.dim()):
                means = [window.narrow(d, a, m).mean(d, keepdim=True) for a, m in _adaptive_cuts(spec, sizes, d)]
                window = torch.cat(means, d)
            return window.to(dtype)

        return windowed(x, spec, [1] * (1 + len(sizes)), local)

    return with_layout(op, x, P, shape, body, kinds=_REAL)


def _global_avg_pool(x, L, out: Layout):
    P = L.partition
    root = P
    for d in range(2, P.ndim):
        root = root.take(d, 0, keepdim=True)
    y = wide(x).sum(tuple(range(2, x.dim())), keepdim=True) / math.prod(L.shape[2:])
    y = sum_reduce(y, P, root, shape=(*x.shape[:2], *(1,) * (x.dim() - 2))).to(x.dtype)
    return y if root.active else nothing(out.local_shape(), y)
