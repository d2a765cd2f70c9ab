"""Windows of a layer (convolution, pooling, interpolation): which ones its output blocks read, and what a rank without
outputs does."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import _torch
from ..engine.program import channels_last
from ..errors import PartitionError, ShapeError
from ..movement.halo import HaloSpec
from ..movement.options import plain
from ..partition import Layout

__all__: list[str] = []

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# The windows of a layer's every call: worked out once.
window_spec = lru_cache(maxsize=1024)(HaloSpec.window)


def settled(*options) -> list:
    """Options in Python's own numbers and tuples, so that what follows from them can be looked up."""
    return [
        v if type(v) in _OWN or (type(v) is tuple and _INT.issuperset(map(type, v))) else plain(v, "an argument")
        for v in options
    ]


_OWN, _INT = (int, str, type(None)), {int}


# ---------------------------------------------------------------- where a convolution's windows lie


def with_sizes(L: Layout, channels, space) -> Layout:
    """L with other channel blocks and another spatial size."""
    out = L.with_shape((L.shape[0], L.shape[1], *space))
    splits = list(out.splits or (None,) * out.ndim)
    splits[1] = tuple(channels)
    return Layout(L.partition, (L.shape[0], sum(channels), *space), tuple(splits))


def channel_windows(L: Layout, mode, channels, space, in_range, need) -> HaloSpec:
    """Windows of x for output blocks of ``channels`` and ``space``: ``need`` in the spatial dims, ``in_range`` in the
    channel dim."""
    if min(space) < 0:
        raise PartitionError(
            "the output would have no size",
            expected=">= 0",
            actual=space,
            next_step="pad more, or use a smaller kernel or dilation",
        )

    def needs(d, o0, o1):
        return (o0, o1) if d == 0 else in_range(o0, o1) if d == 1 else need(d - 2, o0, o1)

    boundary = ("none", "none", *(mode,) * len(space))
    return HaloSpec.needs(L, None, with_sizes(L, channels, space), needs, boundary)


def sliding(stride, pads, dilation, kernel):
    """need(i, o0, o1) of a kernel that slides over spatial dim i."""

    def need(i, o0, o1):
        start = o0 * stride[i] - pads[i][0]
        return start, start + (o1 - 1 - o0) * stride[i] + dilation[i] * (kernel[i] - 1) + 1

    return need


def transposed_size(space, kernel, stride, padding, extra, dilation) -> tuple[int, ...]:
    """The spatial size of a transposed convolution's output."""
    return tuple(
        (m - 1) * s - 2 * p + d * (k - 1) + e + 1
        for m, k, s, p, e, d in zip(space, kernel, stride, padding, extra, dilation)
    )


def own_start(out: Layout, at, own: int) -> int:
    """Where the output channels start of the rank at coordinates ``at``, which passes ``own`` of them."""
    first, last = out.blocks(1)[at[1]]
    if last - first != own:
        raise ShapeError(
            "w has another number of output channels than this rank's block",
            expected=last - first,
            actual=own,
            next_step="pass the weights of this rank's output channels (out_channels: their number over all ranks)",
        )
    return first


# ---------------------------------------------------------------- ranks without outputs


@lru_cache(maxsize=1024)
def _empty_dims(spec: HaloSpec, at, first: int) -> list[int]:
    """The dims from ``first`` on in which the rank at these coordinates has no outputs."""
    blocks = [spec.out_layout.blocks(d)[c] for d, c in enumerate(at)]
    return [d for d, (start, stop) in enumerate(blocks) if d >= first and start == stop]


def filled(window, spec: HaloSpec, at, least):
    """This rank's window, and the dims in which it has no outputs: there the window is zeros of the size ``least``,
    which gives the smallest legal one of each trailing dim. So a rank without outputs works as its peers do, and stays
    in the graph as they do; :func:`cut` keeps nothing of its results."""
    first = window.dim() - len(least)
    empty = _empty_dims(spec, at, first)
    for d in empty:
        shape = list(window.shape)
        shape[d] = least[d - first]
        window = torch.cat([window.narrow(d, 0, 0), window.new_zeros(shape)], d)
    return window, empty


def cut(y, empty):
    """The outputs of this rank: none in the dims ``empty``."""
    for d in empty:
        y = y.narrow(d, 0, 0)
    return y


def kept(y, x):
    """``y`` in the memory format of x, as torch's own layers keep it. Movements and most operators have done so;
    indexing and concatenation have not."""
    if (
        x.is_contiguous()
        or x.dim() not in _FORMATS
        or y.dim() != x.dim()
        or _torch.transforms_active()
        or not channels_last(x.shape, x.stride())
    ):
        return y
    return y.contiguous(memory_format=_FORMATS[x.dim()])
