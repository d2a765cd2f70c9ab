"""Padding across a partition, and its inverse: halos whose ghosts lie beyond the edge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from .._arguments import checked
from .._types import Place
from ..errors import PartitionError
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.options import sizes_of
from ..partition import Layout, partition_of
from .enter import at_least, enter, outside
from .window import kept

__all__ = ["dist_pad", "dist_unpad", "pad_layout"]


_BOUNDARY = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _pads(ndim, pad):
    """``pad``, in torch's order (the last dim first), as (before, after) of each dim."""
    pad = sizes_of(pad, "pad")
    if len(pad) % 2 or len(pad) > 2 * ndim:
        raise PartitionError(
            "pad needs two numbers for each padded dim",
            actual=pad,
            expected=f"an even number, at most {2 * ndim}",
            next_step="give (before, after) for the last dim, then the one before it, as torch does",
        )
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)][::-1]
    return (*((0, 0),) * (ndim - len(pairs)), *pairs)


@checked
def pad_layout(L: Layout, pad: Sequence[int]) -> Layout:
    """The layout of :func:`dist_pad`'s result for an x of layout ``L``: splits stay where sizes do, else balanced.

    Example:
        >>> F.pad_layout(dd.Layout(dd.Partition((2,)), (3,)), (1, 2)).shape
        (6,)
    """
    shape = [n + a + b for n, (a, b) in zip(L.shape, _pads(L.ndim, pad))]
    if min(shape, default=0) < 0:
        raise PartitionError(
            "more is cut off than there is",
            expected="sizes >= 0",
            actual=pad,
            next_step="cut off less",
        )
    return L.with_shape(shape)


@lru_cache(maxsize=1024)
def _padding(L: Layout, out: Layout, pairs, boundary) -> HaloSpec:
    return HaloSpec.needs(L, None, out, lambda d, o0, o1: (o0 - pairs[d][0], o1 - pairs[d][0]), boundary)


def dist_pad(
    x: torch.Tensor,
    P: Place,
    pad: Sequence[int],
    mode: str = "constant",
    value: float = 0,
    *,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Pad, or cut where ``pad`` is negative, as torch.nn.functional.pad.

    Args:
        x: this rank's block, any dtype and number of dims.
        P: partition or Layout of x.
        pad: (before, after) of the last dim, then of the one before, and so on.
        mode: "constant", "reflect", "replicate" or "circular" (here on any dims; torch knows the last ones only).
        value: what "constant" fills with.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block, of layout :func:`pad_layout`.

    Messages: one halo exchange: from each rank that holds some of the result's block, just that part; backward its
    transpose.

    Raises:
        PartitionError: an unknown mode, an odd number of pads, a reflection beyond the tensor, or more cut than there
            is.

    Example:
        >>> F.dist_pad(torch.tensor([1, 2, 3]), dd.Partition((1,)), (1, 2))
        tensor([0, 1, 2, 3, 0, 0])
    """
    if mode not in _BOUNDARY:
        raise PartitionError(
            "no such mode",
            expected=sorted(_BOUNDARY),
            actual=mode,
            next_step="use one of them",
        )
    if mode != "constant" and value:
        raise PartitionError(
            f"mode '{mode}' takes no value",
            expected=0,
            actual=value,
            next_step="leave value out, or use mode 'constant'",
        )
    x, L, at = enter(x, P, shape=shape)
    pairs = _pads(partition_of(P).ndim, pad)
    if at is None:
        return outside(x, like=L and pad_layout(at_least(L, [-a - b for a, b in pairs]), pad))
    spec = _padding(L, pad_layout(L, pad), pairs, _BOUNDARY[mode])
    y = halo_exchange(x, spec)
    if not value:
        return kept(y, x)
    beyond = torch.zeros((), dtype=torch.bool, device=y.device)
    for d, ((lo, hi), n) in enumerate(zip(spec.out_box, L.shape)):
        place = torch.arange(lo, hi, device=y.device).reshape(-1, *(1,) * (L.ndim - d - 1))
        beyond = beyond | (place < 0) | (place >= n)
    return kept(torch.where(beyond, value, y).to(y.dtype), x)


def dist_unpad(x: torch.Tensor, P: Place, pad: Sequence[int], *, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Cut ``pad`` elements off, given as for :func:`dist_pad`, whose inverse this is; same layout rule and messages.

    Example:
        >>> F.dist_unpad(torch.tensor([0, 1, 2, 0]), dd.Partition((1,)), (1, 1))
        tensor([1, 2])
    """
    return dist_pad(x, P, [-n for n in sizes_of(pad, "pad")], shape=shape)
