"""Data parallelism: every rank has all parameters, and its share of the batch.

Two forms of one thing, the adjoint of ``F.mark_varying``. *Functional*: ``w = replicate(w, P)`` inside the loss, with every
transform. *Plain autograd*: :class:`~distdl.parallel.GradientSync` hangs on the leaves of any ``torch.nn.Module``, and reduces each
bucket as soon as its last gradient is there. Gradients are **sums over ranks**: divide losses by the global count
(:func:`global_mean`), which is exact for uneven and empty shares.
"""

from __future__ import annotations

import torch
from torch.func import grad_and_value

from .. import _torch, maps
from .. import functional as F
from ..agree import partition_of
from ..functional.reduce import summed, wide
from ..ties import is_smooth
from .hooks import all_reduce

__all__ = ["LIMITS", "accumulate", "bucketed", "global_mean", "reduce_gradients", "replicas", "replicate"]

LIMITS = (2**20, 25 * 2**20)  # bytes of the first bucket, which backward fills first, and of the others: DistributedDataParallel's


def bucketed(leaves, limits=LIMITS) -> list[list[int]]:
    """Numbers of the tensors in each bucket: last tensors first, as backward finds them.

    A bucket is closed once it has as many bytes as its limit; ``limits[0]`` is that of the first bucket, the last one that of all
    others. Tensors of one dtype and device share buckets (Li et al., arXiv:2006.15704, section 4.2).
    """
    opened: dict = {}
    done, counts, nbytes = [], {}, {}
    for i in reversed(range(len(leaves))):
        kind = leaves[i].dtype, leaves[i].device
        opened.setdefault(kind, []).append(i)
        nbytes[kind] = nbytes.get(kind, 0) + leaves[i].numel() * leaves[i].dtype.itemsize
        if nbytes[kind] >= limits[min(counts.get(kind, 0), len(limits) - 1)]:
            done.append(opened.pop(kind))
            counts[kind], nbytes[kind] = counts.get(kind, 0) + 1, 0
    return sorted([*done, *opened.values()], key=lambda bucket: -bucket[0])


def _by_bucket(leaves, limits, each):
    """``leaves``, the differentiable ones replaced by ``each(number of the bucket, tensors)``."""
    smooth = [i for i, leaf in enumerate(leaves) if is_smooth(leaf)]
    changed = list(leaves)
    for number, bucket in enumerate(bucketed([leaves[i] for i in smooth], limits)):
        places = [smooth[i] for i in bucket]
        for i, y in zip(places, each(number, [leaves[i] for i in places])):
            changed[i] = y
    return changed


def replicas(tree, P, *, root: int = 0):
    """Rank ``root``'s tensors, on every rank of ``P``: how parameters and buffers begin equal. Other ranks pass any such tree."""
    where = partition_of(P)
    return F.broadcast(tree, maps.on_one_rank(root, where.ndim, where.world), where)


def replicate(params, P, dims=None, *, limits=LIMITS):
    """The parameters, for use on this rank's share of the batch: ``F.mark_varying``, bucket by bucket.

    Args:
        params: a pytree of tensors, equal on the ranks along ``dims``. Regularise them before, not after.
        P, dims: the batch's partition, and its dims that split the batch (None: all).
        limits: bytes of a bucket, see :func:`bucketed`.

    Returns:
        The same values. Backward sums each bucket over the ranks in one all-reduce of its bytes, once all of its gradients are
        there. Autograd runs later calls first: mark a layer's parameters right before the layer, and the reduction follows the
        layer's own backward; mark all of them first, and all reductions come last.
    """
    leaves, tree = _torch.flatten(params)
    return _torch.unflatten(_by_bucket(leaves, limits, lambda _, bucket: F.mark_varying(bucket, P, dims)), tree)


def global_mean(total, count, P, dims=None):
    """Σ total / Σ count over the ranks: an invariant mean that weighs every sample alike, however they are shared out.

    Args:
        total: this rank's sum of losses (zero where it has no sample), any shape.
        count: how many there were.

    Returns:
        The mean, in ``total``'s dtype; of halves the sum and the count are taken in float32, since float16 ends at 65504.

    Messages: one all-reduce of one element more than ``total`` has. None backward.
    """
    value, n = summed(wide(total), count, partition_of(P), dims)
    return (value / n).to(total.dtype)


def reduce_gradients(grads, P, dims=None, *, hook=None, states=None, limits=LIMITS):
    """The sum of every rank's gradients: the adjoint of :func:`replicate`, for gradients that were worked out without it.

    Args:
        grads: a pytree of this rank's gradients.
        hook: see :mod:`distdl.parallel.hooks`; default: the exact sum.
        states: what the last call returned: the hook's state for each bucket.

    Returns:
        (the sums, states). One all-reduce for each bucket, with the default hook.
    """
    hook = hook or all_reduce(P, dims)
    leaves, tree = _torch.flatten(grads)
    found: list = []

    def each(number, bucket):
        reduced, state = hook(bucket, states[number] if states else None)
        found.append(state)
        return reduced

    return _torch.unflatten(_by_bucket(leaves, limits, each), tree), found


def accumulate(loss, params, batches, P, dims=None, *, hook=None, states=None, limits=LIMITS):
    """Loss and gradients of the mean over all micro-batches of all ranks, with **one** reduction.

    Args:
        loss: ``loss(params, batch) -> (sum of the samples' losses, their number)``. Where it sends nothing itself, ranks may have
            different numbers of micro-batches, of any sizes, none included.
        params: a pytree of tensors, equal on all ranks.
        batches: this rank's micro-batches.

    Returns:
        (mean loss, gradients, states), equal on all ranks. Messages: one all-reduce of two elements, and the gradients once.
    """
    leaves, tree = _torch.flatten(params)
    like = next(leaf for leaf in leaves if is_smooth(leaf))
    total, count, grads = wide(like.new_zeros(())), 0, [torch.zeros_like(leaf) for leaf in leaves]

    def counted(leaves, batch):
        value, n = loss(_torch.unflatten(leaves, tree), batch)
        return value, n if isinstance(n, torch.Tensor) else torch.full((), n, device=value.device)  # no copy from the host

    step = grad_and_value(counted, has_aux=True)
    for batch in batches:
        found, (value, n) = step(leaves, batch)
        total, count, grads = total + value, count + n, [a + b for a, b in zip(grads, found)]
    mean = summed(total, count, partition_of(P), dims)
    reduced, states = reduce_gradients(grads, P, dims, hook=hook, states=states, limits=limits)
    return mean[0] / mean[1], _torch.unflatten([(g / mean[1]).to(g.dtype) for g in reduced], tree), states
