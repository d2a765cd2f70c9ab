"""Windowed operations (convolution, pooling): halo exchange, then the local operation on windows that need no
padding."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import _torch
from ..agree import check_tensor, outside, partition_of, resolve
from ..engine.program import channels_last
from ..movement.halo import HaloSpec, halo_exchange
from ..ties import nothing
from .autocast import autocast
from .reduce import check_block, check_kind

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
MODES = {"zeros": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


# The windows of a layer's every call: worked out once.
window_spec = lru_cache(maxsize=1024)(HaloSpec.window)


@lru_cache(maxsize=1024)
def _empty_dims(spec: HaloSpec, coords, first: int):
    """The dims from ``first`` on in which the rank at these coordinates has no outputs."""
    blocks = [spec.out_layout.blocks(d)[c] for d, c in enumerate(coords)]
    return [d for d, (start, stop) in enumerate(blocks) if d >= first and start == stop]


def windowed(x, spec: HaloSpec, least, local):
    """``local`` on this rank's window of x: of one halo exchange."""
    return on_window(halo_exchange(x, spec), spec, least, local)


def on_window(window, spec: HaloSpec, least, local):
    """``local`` on this rank's window.

    Args:
        spec: windows of the blocks of x; its ``out_layout`` says what each rank gets.
        least: smallest legal window of each trailing dim (of the channels too, where ``local`` needs some). A rank
            without outputs runs ``local`` on zeros of that size and keeps nothing of it, so that it stays in the graph
            as its peers do.
        local: (window) -> (batch, channels, *outputs).
    """
    first = window.dim() - len(least)
    coords = spec.in_layout.partition.index()
    if coords is None:
        return nothing(spec.out_layout.local_shape(), window)
    empty = _empty_dims(spec, coords, first)
    for d in empty:
        shape = list(window.shape)
        shape[d] = least[d - first]
        window = torch.cat([window.narrow(d, 0, 0), window.new_zeros(shape)], d)
    y = local(window)
    for d in empty:
        y = y.narrow(d, 0, 0)
    return y


def with_layout(op, x, P, shape, body, indices=False, kinds="any dtype"):
    """Resolve the layout of x and call ``body(x, layout)``; on a rank that takes no part, a placeholder.

    ``indices``: there are two results, the second one integers; outside, ``body`` returns the first one. ``kinds``:
    what dtypes x may have, see :func:`check_kind`.
    """

    def outside_result(y):
        return (y, y.detach().to(torch.int64)) if indices else y

    (x,) = autocast(op, partition_of(P, op).ndim, x)
    if isinstance(x, torch.Tensor):
        check_kind(op, x, P, kinds)
    xs, layouts = resolve(op, [x], P, shape)
    if layouts is None:
        return outside_result(outside(xs, P)[0])
    layout = layouts[0]
    x = xs[0]
    if not layout.active:
        check_tensor(op, x, layout)
        return outside_result(body(x if x.shape == layout.local_shape() else nothing(layout.local_shape(), x), layout))
    check_block(op, x, layout)
    y = body(x, layout)
    if (
        x.dim() not in _FORMATS
        or x.is_contiguous()
        or _torch.transforms_active()
        or not channels_last(x.shape, x.stride())
    ):
        return y
    # As torch's own layers keep it. Movements and most operators have done so; indexing and concatenation have not.
    ys = [
        t.contiguous(memory_format=_FORMATS[x.dim()]) if t.dim() == x.dim() else t
        for t in (y if type(y) is tuple else (y,))
    ]
    return tuple(ys) if type(y) is tuple else ys[0]
