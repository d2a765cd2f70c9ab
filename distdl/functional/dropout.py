"""Dropout whose mask is a property of the global tensor: the same on any number of ranks, and on one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._arguments import checked
from .._types import Place
from ..agree import alike
from ..errors import PartitionError
from ..partition import partition_of
from . import random
from .enter import enter, outside
from .window import kept

__all__ = ["dist_dropout", "dist_feature_dropout"]


def _dropout(x, P, p, seed, shape, training, dims):
    """Drop along the first ``dims`` dims of x (``None``: all), whole slices of the others."""
    if not 0 <= p <= 1:
        raise PartitionError(
            "p is a probability",
            expected="0 <= p <= 1",
            actual=p,
            next_step="give the share of entries that becomes zero",
        )
    alike(P)
    draws = training and p > 0
    if draws and dims is not None and partition_of(P).ndim < dims:
        raise PartitionError(
            "x needs batch and channel",
            expected=f"{dims} dims or more",
            actual=partition_of(P).ndim,
            next_step="use dist_dropout, or lay x out over (batch, channel, *space)",
        )
    x, L, at = enter(x, P, shape=shape, agreed=draws)
    if at is None:
        return outside(x, like=L)
    if not draws:
        return x
    n = L.ndim if dims is None else dims
    least, scale = round(p * 2**62), 0.0 if p == 1 else 1 / (1 - p)
    keep = random.bits(L.box()[:n], L.shape[:n], seed, x.device, lambda h: random.shift_right(h, 1) >= least)
    return kept(x * keep.reshape((*keep.shape, *(1,) * (L.ndim - n))) * scale, x)


@checked
def dist_dropout(
    x: torch.Tensor,
    P: Place,
    p: float,
    seed: int | torch.Tensor,
    *,
    shape: Sequence[int] | None = None,
    training: bool = True,
) -> torch.Tensor:
    """Set elements to zero with probability ``p`` and multiply the others by 1 / (1 - p), as
    torch.nn.functional.dropout.

    Whether an element is kept depends on ``seed`` and its place in the global tensor only: not on the partition, the
    dtype, or the device. Equal calls give equal masks, so give every layer and step its own seed (``F.fold_in(seed,
    layer, step)``). It is a
    pure function, that draws nothing: under vmap all examples share the mask, whatever ``randomness`` says, unless the
    seed is a batch too.

    Args:
        x: this rank's block, any shape, floating or complex.
        P: partition or Layout of x.
        p: the probability; 0 and ``training=False`` return x as it is.
        seed: an int, or an integer tensor of shape ().
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block, in x's layout.

    Messages: none.

    Raises:
        PartitionError: ``p`` outside [0, 1].
        ShapeError: a seed that is no integer.

    Example:
        >>> F.dist_dropout(torch.ones(4), dd.Layout(dd.Partition((1,)), (4,)), 0.5, seed=2)
        tensor([0., 2., 2., 0.])
    """
    return _dropout(x, P, p, seed, shape, training, None)


@checked
def dist_feature_dropout(
    x: torch.Tensor,
    P: Place,
    p: float,
    seed: int | torch.Tensor,
    *,
    shape: Sequence[int] | None = None,
    training: bool = True,
) -> torch.Tensor:
    """Dropout of whole channels of each example, as torch's Dropout1d, 2d and 3d: x is (batch, channels, *any).

    All ranks of a spatial partition drop the same channels. Otherwise as :func:`dist_dropout`; no messages.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1, 1)), (1, 3, 2))
        >>> F.dist_feature_dropout(torch.ones(1, 3, 2), L, 0.5, seed=2)[0, :, 0]
        tensor([0., 2., 2.])
    """
    return _dropout(x, P, p, seed, shape, training, 2)
