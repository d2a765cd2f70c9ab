"""Dropout whose mask is a property of the global tensor: the same on any number of ranks, and on one."""

from __future__ import annotations

from .._arguments import checked
from ..agree import alike, check_tensor, outside, partition_of
from ..errors import PartitionError
from ..partition import Layout
from . import random
from .window import with_layout

__all__ = ["dist_dropout", "dist_feature_dropout"]


def _dropout(op, x, P, p, seed, shape, training, dims):
    """Drop along the first ``dims`` dims of x (``None``: all), whole slices of the others."""
    if not 0 <= p <= 1:
        raise PartitionError(
            "p is a probability",
            op=op,
            expected="0 <= p <= 1",
            actual=p,
            partitions=P,
            next_step="give the share of entries that becomes zero",
        )
    alike(op, P)
    if not training or p == 0:
        if partition_of(P, op).active:
            return x
        check_tensor(op, x, P)
        return outside([x], P if shape is None else Layout(partition_of(P), shape))[0]
    least, scale = round(p * 2**62), 0.0 if p == 1 else 1 / (1 - p)

    def body(x, L):
        n = L.ndim if dims is None else dims
        if L.ndim < n:
            raise PartitionError(
                "x needs batch and channel",
                op=op,
                partitions=L,
                expected=f"{n} dims or more",
                actual=L.ndim,
                next_step="use dist_dropout, or lay x out over (batch, channel, *space)",
            )
        box = L.box() or [(0, size) for size in x.shape]
        keep = random.bits(box[:n], L.shape[:n], seed, x.device, lambda h: random._shift(h, 1) >= least)
        return x * keep.reshape((*keep.shape, *(1,) * (L.ndim - n))) * scale

    return with_layout(op, x, P, shape, body)


@checked
def dist_dropout(x, P, p, seed, *, shape=None, training=True):
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
    """
    return _dropout("dist_dropout", x, P, p, seed, shape, training, None)


@checked
def dist_feature_dropout(x, P, p, seed, *, shape=None, training=True):
    """Dropout of whole channels of each example, as torch's Dropout1d, 2d and 3d: x is (batch, channels, *any).

    All ranks of a spatial partition drop the same channels. Otherwise as :func:`dist_dropout`; no messages.
    """
    return _dropout("dist_feature_dropout", x, P, p, seed, shape, training, 2)
