"""Pooling over partitioned tensors, equal to torch's serial pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as tf

from .._arguments import checked
from .._types import Place, Size
from ..errors import PartitionError
from ..movement.copies import sum_reduce
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.options import per_dim
from ..partition import Layout
from ..ties import nothing
from .enter import REAL, at_least, enter, outside, spatial
from .numeric import power, wide
from .window import cut, filled, kept, settled, window_spec

__all__ = [
    "dist_adaptive_avg_pool",
    "dist_adaptive_max_pool",
    "dist_avg_pool",
    "dist_l2_pool",
    "dist_max_pool",
    "pool_layout",
]

_MAX = {1: tf.max_pool1d, 2: tf.max_pool2d, 3: tf.max_pool3d}
_AVG = {2: tf.avg_pool2d, 3: tf.avg_pool3d}


# ---------------------------------------------------------------- windows


class _Kernel(NamedTuple):
    """The arguments of a pooling, one for each spatial dim."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def extent(self) -> list[int]:
        """The sizes of a window."""
        return [d * (k - 1) + 1 for k, d in zip(self.size, self.dilation)]

    @property
    def least(self) -> list[int]:
        """The smallest x that has one."""
        return [m - 2 * p for m, p in zip(self.extent, self.padding)]

    def windows(self, L: Layout) -> HaloSpec:
        """Those of x of layout ``L``."""
        size, stride, padding, dilation, ceil_mode = self
        return window_spec(L, None, size, stride, padding, dilation, "zeros", ceil_mode=ceil_mode)


def _kernel(P, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False) -> _Kernel:
    return _kernel_of(spatial(P), *settled(kernel_size, stride, padding, dilation), bool(ceil_mode))


@lru_cache(maxsize=1024)
def _kernel_of(n, kernel_size, stride, padding, dilation, ceil_mode) -> _Kernel:
    size, padding, dilation = (per_dim(v, n, "an argument") for v in (kernel_size, padding, dilation))
    stride = size if stride in (None, ()) else per_dim(stride, n, "stride")
    if any(2 * p > (k - 1) * d + 1 for p, k, d in zip(padding, size, dilation)):
        raise PartitionError(
            "padding is more than half of the kernel",
            actual=padding,
            expected=f"half of {size}",
            next_step="pad less, or with F.dist_pad first",
        )
    return _Kernel(size, stride, padding, dilation, ceil_mode)


@checked
def pool_layout(
    L: Layout,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
) -> Layout:
    """The layout of a pooling's result for an x of layout ``L``.

    Pure: no messages.

    Raises:
        PartitionError: a window that is larger than the padded input, or sizes that torch would refuse.

    Example:
        >>> F.pool_layout(dd.Layout(dd.Partition((1, 1, 2)), (8, 3, 32)), 2).shape
        (8, 3, 16)
    """
    return _kernel(L, kernel_size, stride, padding, dilation, ceil_mode).windows(L).out_layout


def _outside(x, L, kernel):
    return outside(x, like=L and kernel.windows(at_least(L, kernel.least)).out_layout)


def _with_indices(y):
    """What a rank outside gets where there are indices too."""
    return y, y.detach().to(torch.int64)


# ---------------------------------------------------------------- poolings


def dist_max_pool(
    x: torch.Tensor,
    P: Place,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    *,
    return_indices: bool = False,
    shape: Sequence[int] | None = None,
) -> Any:
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

    Example:
        >>> F.dist_max_pool(torch.tensor([[[1.0, 5.0, 2.0, 3.0]]]), dd.Partition((1, 1, 1)), 2)
        tensor([[[5., 3.]]])
    """
    kernel = _kernel(P, kernel_size, stride, padding, dilation, ceil_mode)
    x, L, at = enter(x, P, layer="dist_max_pool", shape=shape, kinds=REAL)
    if at is None:
        y = _outside(x, L, kernel)
        return _with_indices(y) if return_indices else y
    spec, pool = kernel.windows(L), _MAX[L.ndim - 2]
    window, empty = filled(halo_exchange(x, spec), spec, at, (1, *kernel.extent))
    # -inf beyond the edge, as torch pads; the least value where the dtype has no infinity
    low = -torch.inf if window.is_floating_point() else torch.iinfo(window.dtype).min
    box = _box(spec, at)
    window = _refill(window, box, L.shape[2:], low)
    if not return_indices:
        return kept(cut(pool(window, kernel.size, kernel.stride, 0, kernel.dilation), empty), x)
    y, index = pool(window, kernel.size, kernel.stride, 0, kernel.dilation, return_indices=True)
    index = _global_places(index, window.shape[2:], box, L.shape[2:], kernel.dilation)
    return kept(cut(y, empty), x), kept(cut(index, empty), x)


@lru_cache(maxsize=1024)
def _box(spec, at):
    """((lo, hi), ...) of the window at these coordinates in the spatial dims; a rank without outputs has one that needs
    no filling."""
    box = [w[c] for w, c in zip(spec.windows, at)]
    return [(lo, hi) if lo < hi else (0, 0) for lo, hi in box[2:]]


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
    x: torch.Tensor,
    P: Place,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *,
    divisor_override: int | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Average pooling of 1 to 3 spatial dims, as torch.nn.functional.avg_pool1d/2d/3d.

    Args:
        count_include_pad: count padding (but not what ``ceil_mode`` adds beyond it) in the mean.
        divisor_override: divide by this instead.
        others: as for :func:`dist_max_pool`.

    Returns:
        This rank's block, of layout :func:`pool_layout`.

    Messages: one halo exchange; its transpose in backward.

    Example:
        >>> F.dist_avg_pool(torch.tensor([[[1.0, 5.0, 2.0, 3.0]]]), dd.Partition((1, 1, 1)), 2)
        tensor([[[3.0000, 2.5000]]])
    """
    if divisor_override == 0:
        raise PartitionError(
            "divisor_override cannot be zero",
            expected="a number",
            actual=0,
            next_step="leave it out, or give another divisor",
        )
    kernel = _kernel(P, kernel_size, stride, padding, 1, ceil_mode)
    x, L, at = enter(x, P, layer="dist_avg_pool", shape=shape, kinds=REAL)
    if at is None:
        return _outside(x, L, kernel)
    spec = kernel.windows(L)
    window, empty = filled(halo_exchange(x, spec), spec, at, (1, *kernel.size))
    sums = _sums(wide(window), kernel.size, kernel.stride)
    divisor = divisor_override
    if divisor is None:
        divisor = _counts(spec, at, kernel, count_include_pad, sums)
    return kept(cut((sums / divisor).to(x.dtype), empty), x)


def _counts(spec, at, kernel, count_include_pad, like):
    """How many elements each of this rank's outputs averages."""
    counts = like.new_ones(())
    for d, (k, s, p) in enumerate(zip(kernel.size, kernel.stride, kernel.padding), 2):
        size, (o0, o1) = spec.in_layout.shape[d], spec.out_layout.blocks(d)[at[d]]
        start = torch.arange(o0, max(o1, o0 + 1)) * s - p
        stop = (start + k).clamp(max=size + p)
        if not count_include_pad:
            start, stop = start.clamp(min=0), stop.clamp(max=size)
        counts = counts.unsqueeze(-1) * (stop - start).clamp(min=1).to(like)
    return counts


def _sums(window, kernel, step):
    """Sums over sliding windows, without padding."""
    if len(kernel) == 1:
        return tf.avg_pool2d(window.unsqueeze(2), (1, *kernel), (1, *step), divisor_override=1).squeeze(2)
    return _AVG[len(kernel)](window, kernel, step, divisor_override=1)


def dist_l2_pool(
    x: torch.Tensor, P: Place, kernel_size: Size, stride: Size | None = None, *, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """L2 pooling of 1 to 3 spatial dims: y = √Σ x² over each window, channel by channel.

    Where a whole window is zero y is not differentiable, and all derivatives are taken to be zero (not NaN), in every
    mode.

    Args:
        x: (batch, channels, *space), this rank's block.
        P, kernel_size, stride, shape: as for :func:`dist_max_pool`; no padding.

    Returns:
        This rank's block, of layout :func:`pool_layout`.

    Messages: one halo exchange; its transpose in backward.

    Example:
        >>> F.dist_l2_pool(torch.tensor([[[3.0, 4.0]]]), dd.Partition((1, 1, 1)), 2)
        tensor([[[5.]]])
    """
    kernel = _kernel(P, kernel_size, stride)
    x, L, at = enter(x, P, layer="dist_l2_pool", shape=shape, kinds=REAL)
    if at is None:
        return _outside(x, L, kernel)
    spec = kernel.windows(L)
    window, empty = filled(halo_exchange(x, spec), spec, at, (1, *kernel.size))
    y = power(_sums(wide(window).square(), kernel.size, kernel.stride), 0.5).to(x.dtype)
    return kept(cut(y, empty), x)


# ---------------------------------------------------------------- adaptive poolings


def _adaptive(L: Layout, output_size) -> HaloSpec:
    """Windows of adaptive pooling: output o of dim d reads [floor(o n / m), ceil((o + 1) n / m))."""
    return _adaptive_windows(L, per_dim(output_size, spatial(L), "output_size"))


@lru_cache(maxsize=1024)
def _adaptive_windows(L, output_size) -> HaloSpec:
    sizes = tuple(n if m is None else m for m, n in zip(output_size, L.shape[2:]))
    if min(sizes) < 0:
        raise PartitionError(
            "not a legal output_size",
            expected="sizes >= 0",
            actual=output_size,
            next_step="give sizes of at least 0, or None for the input's",
        )

    def need(d, o0, o1):
        return (o0, o1) if d < 2 else (o0 * L.shape[d] // sizes[d - 2], -(-o1 * L.shape[d] // sizes[d - 2]))

    return HaloSpec.needs(L, None, (*L.shape[:2], *sizes), need, "none")


@lru_cache(maxsize=1024)
def _adaptive_cuts(spec, at, d):
    """(start, length) inside this rank's window of each of its outputs along dim d; one, if it has none."""
    n, m, lo = spec.in_layout.shape[d], spec.out_layout.shape[d], spec.windows[d][at[d]][0]
    o0, o1 = spec.out_layout.blocks(d)[at[d]]
    return [(o * n // m - lo, -(-(o + 1) * n // m) - o * n // m) for o in range(o0, o1)] or [(0, 1)]


def dist_adaptive_max_pool(
    x: torch.Tensor,
    P: Place,
    output_size: int | Sequence[int | None] | None,
    *,
    return_indices: bool = False,
    shape: Sequence[int] | None = None,
) -> Any:
    """Adaptive max pooling of 1 to 3 spatial dims, as torch.nn.functional.adaptive_max_pool1d/2d/3d.

    Args:
        output_size: global size of the output, an int or one per spatial dim; ``None`` keeps a dim's size.
        others: as for :func:`dist_max_pool`.

    Messages: one halo exchange; its transpose in backward.

    Example:
        >>> F.dist_adaptive_max_pool(torch.tensor([[[1.0, 5.0, 2.0]]]), dd.Partition((1, 1, 1)), 2)
        tensor([[[5., 5.]]])
    """
    x, L, at = enter(x, P, layer="dist_adaptive_max_pool", shape=shape, kinds=REAL)
    spec = L and _adaptive(L, output_size)
    if at is None:
        y = outside(x, like=spec and spec.out_layout)
        return _with_indices(y) if return_indices else y
    y, empty = filled(halo_exchange(x, spec), spec, at, (1,) * (L.ndim - 1))
    # One dim at a time, the last first: among equals the first in row-major order wins, as in torch.
    indices: list = []
    for d in reversed(range(2, L.ndim)):
        cuts, lo = _adaptive_cuts(spec, at, d), _box(spec, at)[d - 2][0]
        largest = [y.narrow(d, a, m).max(d, keepdim=True) for a, m in cuts]
        indices = [
            torch.cat([i.narrow(d, a, m).gather(d, one.indices) for one, (a, m) in zip(largest, cuts)], d)
            for i in indices
        ]
        indices.append(torch.cat([one.indices + (a + lo) for one, (a, _) in zip(largest, cuts)], d))
        y = torch.cat([one.values for one in largest], d)
    y = kept(cut(y, empty), x)
    if not return_indices:
        return y
    place, scale = torch.zeros((), dtype=torch.int64, device=y.device), 1
    for index, n in zip(indices, reversed(L.shape[2:])):
        place, scale = place + index * scale, scale * n
    return y, kept(cut(place, empty), x)


def dist_adaptive_avg_pool(
    x: torch.Tensor, P: Place, output_size: int | Sequence[int | None] | None, *, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Adaptive average pooling of 1 to 3 spatial dims, as torch.nn.functional.adaptive_avg_pool1d/2d/3d.

    ``output_size=1`` is global average pooling: local sums, then one sum_reduce of |y| to the ranks that hold the
    output (a mean of means would be wrong on uneven blocks). Otherwise one halo exchange; arguments as for
    :func:`dist_adaptive_max_pool`.

    Example:
        >>> F.dist_adaptive_avg_pool(torch.tensor([[[1.0, 5.0, 2.0]]]), dd.Partition((1, 1, 1)), 1)
        tensor([[[2.6667]]])
    """
    x, L, at = enter(x, P, layer="dist_adaptive_avg_pool", shape=shape, kinds=REAL)
    spec = L and _adaptive(L, output_size)
    if at is None:
        return outside(x, like=spec and spec.out_layout)
    if all(m == 1 for m in spec.out_layout.shape[2:]):
        return kept(_global_avg_pool(x, L, at, spec.out_layout), x)
    window, empty = filled(halo_exchange(x, spec), spec, at, (1,) * (L.ndim - 1))
    y = wide(window)
    for d in range(2, L.ndim):
        y = torch.cat([y.narrow(d, a, m).mean(d, keepdim=True) for a, m in _adaptive_cuts(spec, at, d)], d)
    return kept(cut(y.to(x.dtype), empty), x)


def _global_avg_pool(x, L, at, out: Layout):
    P = L.partition
    root = P
    for d in range(2, P.ndim):
        root = root.take(d, 0, keepdim=True)
    y = wide(x).sum(tuple(range(2, x.dim())), keepdim=True) / math.prod(L.shape[2:])
    y = sum_reduce(y, P, root, shape=(*x.shape[:2], *(1,) * (x.dim() - 2))).to(x.dtype)
    return nothing(out.local_shape(), y) if any(at[2:]) else y
