"""Interpolation (upsampling) of partitioned tensors, equal to torch.nn.functional.interpolate.

Every mode is separable: output o of a dim is Σ_j weight_j[o] · x[index_j[o]], with one tap (nearest), two (linear) or
four (bicubic). Each rank fetches the inputs that its outputs read, and applies the taps dim by dim; indices are clamped
at the edge, so no window has ghosts. The tables below are torch's, rounding included, as one element further is another
picture.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from .. import _torch
from .._arguments import checked
from .._types import Place, Size
from ..errors import PartitionError
from ..movement.blocks import repartition
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.options import per_dim
from ..partition import Layout
from .enter import FLOATING, at_least, enter, outside, spatial
from .numeric import wide
from .pool import dist_adaptive_avg_pool
from .window import kept

__all__ = ["dist_interpolate", "interpolate_layout"]

# mode -> (number of spatial dims, or None: 1 to 3; taps)
_MODES = {
    "nearest": (None, 1),
    "nearest-exact": (None, 1),
    "linear": (1, 2),
    "bilinear": (2, 2),
    "trilinear": (3, 2),
    "bicubic": (2, 4),
    "area": (None, 0),
}
_CUBIC = -0.75  # torch's constant A


def _sizes(L, size, scale_factor, recompute):
    """(sizes of the output, scale factor or ``None`` for each spatial dim)."""
    n = spatial(L)
    if (size is None) == (scale_factor is None):
        raise PartitionError(
            "give either size or scale_factor",
            expected="one of them",
            actual=(size, scale_factor),
            next_step="leave one of the two out",
        )
    if size is not None:
        if recompute:
            raise PartitionError(
                "recompute_scale_factor goes with scale_factor",
                actual=size,
                expected="no size",
                next_step="leave it out, or give scale_factor",
            )
        sizes, scales = per_dim(size, n, "size"), (None,) * n
    else:
        scales = _scales(n, scale_factor)
        sizes = tuple(math.floor(float(m) * s) for m, s in zip(L.shape[2:], scales))
        scales = (None,) * n if recompute else scales
    if min((*sizes, *L.shape[2:])) < 1:
        raise PartitionError(
            "sizes are at least 1",
            expected=">= 1",
            actual=(L.shape[2:], sizes),
            next_step="give a larger size or scale_factor",
        )
    return sizes, scales


def _scales(n, scale_factor) -> tuple:
    scales = tuple(float(s) for s in per_dim(scale_factor, n, "scale_factor"))
    if min(scales) <= 0 or not all(map(math.isfinite, scales)):
        raise PartitionError(
            "scale factors are positive",
            expected="> 0",
            actual=scale_factor,
            next_step="give numbers above 0",
        )
    return scales


@checked
def interpolate_layout(
    L: Layout, size: Size | Layout | None = None, scale_factor: float | Sequence[float] | None = None
) -> Layout:
    """The layout of :func:`dist_interpolate`'s result for an x of layout ``L``.

    Example:
        >>> F.interpolate_layout(dd.Layout(dd.Partition((1, 1, 2)), (8, 3, 32)), scale_factor=2).shape
        (8, 3, 64)
    """
    sizes, like = _laid(L, size)
    return _result(L, _sizes(L, sizes, scale_factor, None)[0], like)


def _laid(L, size):
    """(a size, the Layout that says it, or ``None``)."""
    if not isinstance(size, Layout):
        return size, None
    if size.partition != L.partition:
        raise PartitionError(
            "the Layout given as size is over another partition than x",
            partitions=(L, size),
            expected=L.partition,
            actual=size.partition,
            next_step="interpolate over x's partition, and repartition the result",
        )
    return size.shape[2:], size


def _result(L, sizes, like) -> Layout:
    shape = (*L.shape[:2], *sizes)
    if like is None:
        return L.with_shape(shape)
    blocks = [M.splits or (None,) * M.ndim for M in (L, like)]
    return Layout(L.partition, shape, (*blocks[0][:2], *blocks[1][2:]))


@lru_cache(maxsize=256)
def _taps(mode, n, m, scale, align, kernel):
    """Tables of one dim, n inputs to m outputs: (index, weight), of shape (taps, m); float64 weights, or ``None``.

    ``kernel`` says how torch rounds: (dtype of the scale, whether it multiplies and adds in one rounding, whether
    doubling is exact whatever the scale).
    """
    dtype, fused, doubles = kernel
    constant = partial(torch.tensor, dtype=dtype, device="cpu")  # whatever torch's default device is
    exact, place = mode == "nearest-exact", torch.arange(m, device="cpu")
    if align:
        ratio = constant(float(n - 1)) / (m - 1) if m > 1 else constant(0.0)
    else:
        ratio = constant(float(n)) / m if scale is None else constant(1.0 / scale)

    def centred():
        # (o + 1/2) ratio - 1/2; in float64 the product of two float32 is exact, so this is the fused form of float32
        wider = torch.float64 if fused else dtype
        return ((place.to(dtype) + 0.5).to(wider) * ratio.to(wider) - 0.5).to(dtype)

    if _MODES[mode][1] == 1:
        if doubles and not exact and m == 2 * n:
            return (place // 2)[None], None
        at = (place.to(dtype) + (0.5 if exact else 0.0)) * ratio
        if exact and fused:
            at = centred() + 0.5
        return at.float().floor().long().clamp(max=n - 1)[None], None
    at = place.to(dtype) * ratio if align else centred()
    if _MODES[mode][1] == 2:
        at = at.clamp(min=0)
    first = at.float().floor().long().clamp(max=n - 1)  # torch rounds down in float32, also for float64
    t = (at - first.to(dtype)).clamp(0, 1).double()
    if _MODES[mode][1] == 2:
        return torch.stack([first, (first + 1).clamp(max=n - 1)]), torch.stack([1 - t, t])

    def near(s):  # |s| <= 1
        return ((_CUBIC + 2) * s - (_CUBIC + 3)) * s * s + 1

    def far(s):  # 1 <= |s| <= 2
        return ((_CUBIC * s - 5 * _CUBIC) * s + 8 * _CUBIC) * s - 4 * _CUBIC

    index = torch.stack([first + j for j in (-1, 0, 1, 2)]).clamp(0, n - 1)
    return index, torch.stack([far(t + 1), near(t), near(1 - t), far(2 - t)])


def _small(sizes):
    """Whether torch takes its vectorised CPU kernel."""
    return len(sizes) == 2 and sum(sizes) <= 128


def _copied(x, mode, space, sizes):
    """Which dims torch copies, whatever the scale factor: some of those whose size stays."""
    same, taps = tuple(map(operator.eq, space, sizes)), _MODES[mode][1]
    if x.is_cuda and taps > 1:
        return (all(same),) * len(same)
    if (x.is_cuda and len(same) == 2) or (not x.is_cuda and (taps == 2 or (mode == "nearest" and _small(sizes)))):
        return same
    return (False,) * len(same)


def _kernel(x, sizes, nearest):
    """How torch would round for the whole tensor, contiguous: its kernels differ in the last bit of an index."""
    if nearest and x.is_cuda:
        return torch.float32, False, False
    if nearest and _small(sizes):
        return torch.float32, False, True
    return torch.float64 if x.dtype == torch.float64 else torch.float32, True, False


@_torch.real
def _counts_up(index):
    return torch.equal(index[0], torch.arange(index.shape[1], device="cpu"))


def _apply_taps(x, d, index, weight):
    """One dim: Σ_j weight_j · x[index_j]."""
    if weight is None:
        same = index.shape[1] == x.shape[d] and _counts_up(index)
        return x if same else x.index_select(d, _torch.literal(index)[0].to(x.device))
    index, weight = _torch.literal(index), _torch.literal(weight)
    weight = weight.to(x.device, x.dtype).reshape(len(weight), -1, *(1,) * (x.dim() - d - 1))
    parts = [w * x.index_select(d, i) for i, w in zip(index.to(x.device), weight)]
    return sum(parts[1:], parts[0])


def dist_interpolate(
    x: torch.Tensor,
    P: Place,
    size: Size | Layout | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    *,
    recompute_scale_factor: bool | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Resample the spatial dims of x, as torch.nn.functional.interpolate (without ``antialias``).

    Args:
        x: (batch, channels, *space), this rank's block, floating, 1 to 3 spatial dims.
        P: partition or Layout of x.
        size: global size of the output, an int or one per spatial dim; or a Layout over the same partition, whose
            spatial sizes and blocks the output gets (``F.layout_of(skip, P)``: it then fits a U-Net's skip). Or
        scale_factor: a number, or one per spatial dim: the size becomes ⌊n · scale_factor⌋, and the factor itself says
            where outputs lie, as by default in torch; with ``recompute_scale_factor=True`` the ratio of the sizes does.
        mode: "nearest", "nearest-exact", "linear" (1 spatial dim), "bilinear" and "bicubic" (2), "trilinear" (3), or
            "area" (an adaptive average).
        align_corners: for the linear and cubic modes: the first and last elements keep their values.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block, of layout :func:`interpolate_layout`: where ``size`` is no Layout, splits stay in dims whose
        size does, and are balanced elsewhere. Half precision is interpolated in float32, as in torch. The nearest modes
        choose the elements that torch chooses for a contiguous tensor of the global shape (CPU and CUDA differ for some
        sizes); the gradient is the exact adjoint of that choice (torch's own is not, for some float64 sizes).

    Messages: one halo exchange; its transpose in backward. "area": see :func:`dist_adaptive_avg_pool`, and where a
    Layout says other blocks, one repartition.

    Raises:
        PartitionError: arguments that torch would refuse; a ``size`` over another partition than x.

    Example:
        >>> F.dist_interpolate(torch.tensor([[[0.0, 4.0]]]), dd.Partition((1, 1, 1)), 4, mode="linear")
        tensor([[[0., 1., 3., 4.]]])
    """
    if mode not in _MODES:
        raise PartitionError(
            "no such mode",
            expected=sorted(_MODES),
            actual=mode,
            next_step="use one of them",
        )
    dims, taps = _MODES[mode]
    if align_corners is not None and taps < 2:
        raise PartitionError(
            f"align_corners does not go with mode '{mode}'",
            expected=None,
            actual=align_corners,
            next_step="leave align_corners out",
        )
    n = spatial(P)
    if dims not in (None, n):
        raise PartitionError(
            f"mode '{mode}' has another number of spatial dims",
            expected=dims,
            actual=n,
            next_step="use the mode for this number of dims",
        )
    layer = "dist_adaptive_avg_pool" if mode == "area" else "dist_interpolate"  # as torch.autocast sees it
    x, L, at = enter(x, P, layer=layer, shape=shape, kinds=FLOATING)
    if at is None:
        if size is None and scale_factor is None and not isinstance(P, Layout):
            return outside(x, like=L)  # layout_of() says None outside of a partition
        least = (1,) * n if scale_factor is None else [math.ceil(1 / s) for s in _scales(n, scale_factor)]
        return outside(x, like=L and interpolate_layout(at_least(L, least), size, scale_factor))
    size, like = _laid(L, size)
    sizes, scales = _sizes(L, size, scale_factor, recompute_scale_factor)
    M = _result(L, sizes, like)
    if mode == "area":
        y = dist_adaptive_avg_pool(x, L, sizes)
        return y if like is None else repartition(y, _result(L, sizes, None), M)
    copied = _copied(x, mode, L.shape[2:], sizes)
    spec, tables = _resampling(L, M, at, sizes, scales, mode, bool(align_corners), _kernel(x, sizes, taps == 1), copied)
    y = wide(halo_exchange(x, spec))
    for d in reversed(range(2, L.ndim)):
        y = _apply_taps(y, d, *tables[d - 2])
    return kept(y.to(x.dtype), x)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # the tables are kept,
@_torch.real  # and other calls need their numbers
def _resampling(L, M, at, sizes, scales, mode, align, kernel, copied):
    """Windows of x, and for each spatial dim (index in the window, weight) of the outputs at coordinates ``at``."""
    tables = [
        (torch.arange(n, device="cpu")[None], None) if same else _taps(mode, n, m, s, align, kernel)
        for n, m, s, same in zip(L.shape[2:], sizes, scales, copied)
    ]

    def need(d, o0, o1):  # indices rise with o
        if d < 2:
            return o0, o1
        index = tables[d - 2][0]
        return int(index[:, o0].min()), int(index[:, o1 - 1].max()) + 1

    spec = HaloSpec.needs(L, None, M, need, "none")
    own = []
    for d, (index, weight) in enumerate(tables, 2):
        lo, (o0, o1) = spec.windows[d][at[d]][0], spec.out_layout.blocks(d)[at[d]]
        own.append((index[:, o0:o1] - lo, None if weight is None else weight[:, o0:o1]))
    return spec, own
