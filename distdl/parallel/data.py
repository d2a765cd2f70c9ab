"""Data parallelism: every rank has all parameters, and its share of the batch.

Two forms of one thing, the adjoint of ``F.mark_varying``. *Functional*: ``w = replicate(w, P)`` inside the loss, with
every transform. *Plain autograd*: :class:`~distdl.parallel.GradientSync` hangs on the leaves of any
``torch.nn.Module``, and reduces each bucket as soon as its last gradient is there. Gradients are **sums over ranks**:
divide losses by the global count (:func:`global_mean`), which is exact for uneven and empty shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.func import grad_and_value

from .. import _torch
from .. import functional as F
from .._types import Dims, Place, Tree
from ..functional.numeric import summed, wide
from ..held import Held, complete, held, holders, name_when_checking, whole
from ..movement.call import on_one_rank
from ..partition import Partition, partition_of
from ..ties import is_smooth
from .hooks import Bucket, Hook, all_reduce

__all__ = ["LIMITS", "accumulate", "bucketed", "global_mean", "reduce_gradients", "replicas", "replicate"]

# Bytes of the first bucket, which backward fills first, and of the others: DistributedDataParallel's.
LIMITS = (2**20, 25 * 2**20)


def bucketed(leaves: Sequence[torch.Tensor], limits: Sequence[int] = LIMITS) -> list[list[int]]:
    """Numbers of the tensors in each bucket: last tensors first, as backward finds them.

    A bucket is closed once it has as many bytes as its limit; ``limits[0]`` is that of the first bucket, the last one
    that of all others. Tensors of one dtype and device share buckets (Li et al., arXiv:2006.15704, section 4.2).

    Example:
        >>> dd.parallel.bucketed([torch.ones(4), torch.ones(4), torch.ones(4)], (32, 32))
        [[2, 1], [0]]
    """
    opened: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    counts: dict[tuple[torch.dtype, torch.device], int] = {}
    nbytes: dict[tuple[torch.dtype, torch.device], int] = {}
    done = []
    for i in reversed(range(len(leaves))):
        kind = leaves[i].dtype, leaves[i].device
        opened.setdefault(kind, []).append(i)
        nbytes[kind] = nbytes.get(kind, 0) + leaves[i].numel() * leaves[i].dtype.itemsize
        if nbytes[kind] >= limits[min(counts.get(kind, 0), len(limits) - 1)]:
            done.append(opened.pop(kind))
            counts[kind], nbytes[kind] = counts.get(kind, 0) + 1, 0
    return sorted([*done, *opened.values()], key=lambda bucket: -bucket[0])


def _unsummed(tree: Any, of: Any, P: Place, dims: Dims, known: Sequence[Held | None] | None = None) -> list[int]:
    """Numbers of the differentiable leaves whose gradients are still to be summed along partition dims ``dims`` of
    ``P``."""
    fibre = partition_of(P).along(dims)
    how = known or holders(tree, of)
    R = fibre and Partition((fibre.size,), fibre.ranks, fibre.world)
    leaves, _ = _torch.flatten(tree)
    return [i for i, leaf in enumerate(leaves) if is_smooth(leaf) and not (R and complete(how[i], R))]


def _by_bucket(
    leaves: Sequence[torch.Tensor],
    smooth: Sequence[int],
    limits: Sequence[int],
    each: Callable[[int, Bucket], Iterable[torch.Tensor]],
) -> list[torch.Tensor]:
    """``leaves``, those of numbers ``smooth`` replaced by ``each(number of the bucket, tensors)``."""
    changed = list(leaves)
    for number, bucket in enumerate(bucketed([leaves[i] for i in smooth], limits)):
        places = [smooth[i] for i in bucket]
        for i, y in zip(places, each(number, [leaves[i] for i in places])):
            changed[i] = y
    return changed


def replicas(tree: Tree, P: Place, *, root: int = 0, of: Any = None) -> Tree:
    """Rank ``root``'s tensors, on every rank of ``P``: how parameters and buffers begin equal. Other ranks pass any
    such tree.

    Args:
        of: see :func:`replicate`.

    Raises:
        PartitionError: parameters of which these ranks hold different blocks.

    Example:
        >>> P, w = dd.Partition((1,)), {"w": torch.tensor([1.0, 2.0])}
        >>> dd.parallel.replicas(w, P)
        {'w': tensor([1., 2.])}
    """
    where = partition_of(P)
    whole(holders(tree, of), where)
    return F.broadcast(tree, on_one_rank(root, where.ndim, where.world), where)


def replicate(params: Tree, P: Place, dims: Dims = None, *, of: Any = None, limits: Sequence[int] = LIMITS) -> Tree:
    """The parameters, for use on this rank's share of the batch: ``F.mark_varying``, bucket by bucket.

    Parameters of ``dd.nn`` whose layer sums over these ranks itself stay as they are. Tensors that stand for them
    (detached ones, torch.func's) do not know that: they are marked, and the layer that gets them does not sum again.

    Args:
        params: a pytree of tensors, equal on the ranks along ``dims``. Regularise them before, not after.
        P, dims: the batch's partition, and its dims that split the batch (None: all).
        of: whose parameters they are, where a layer does not get the tensors as they are (behind a parametrization):
            the module, by whose names ``params`` is a dictionary, or a pytree of its parameters.
        limits: bytes of a bucket, see :func:`bucketed`.

    Returns:
        The same values. Backward sums each bucket over the ranks in one all-reduce of its bytes, once all of its
        gradients are there. Autograd runs later calls first: mark a layer's parameters right before the layer, and the
        reduction follows the layer's own backward; mark all of them first, and all reductions come last.

    Raises:
        PartitionError: a layer sums over some of these ranks, and not over others.

    Example:
        >>> P, w = dd.Partition((1,)), {"w": torch.tensor([1.0, 2.0])}
        >>> torch.func.grad(lambda w: dd.parallel.replicate(w, P)["w"].sum())(w)
        {'w': tensor([1., 1.])}
    """
    leaves, tree = _torch.flatten(params)
    name_when_checking(params)
    ours = _unsummed(params, of, P, dims)
    return _torch.unflatten(_by_bucket(leaves, ours, limits, lambda _, bucket: F.mark_varying(bucket, P, dims)), tree)


def global_mean(total: torch.Tensor, count: float | torch.Tensor, P: Place, dims: Dims = None) -> torch.Tensor:
    """Σ total / Σ count over the ranks: an invariant mean that weighs every sample alike, however they are shared out.

    Args:
        total: this rank's sum of losses (zero where it has no sample), any shape.
        count: how many there were.

    Returns:
        The mean, in ``total``'s dtype; of halves the sum and the count are taken in float32, since float16 ends at
        65504.

    Messages: one all-reduce of one element more than ``total`` has. None backward.

    Example:
        >>> dd.parallel.global_mean(torch.tensor(6.0), 3, dd.Partition((1,)))
        tensor(2.)
    """
    value, n = summed(wide(total), count, partition_of(P), dims)
    return (value / n).to(total.dtype)


def reduce_gradients(
    grads: Tree,
    P: Place,
    dims: Dims = None,
    *,
    of: Any = None,
    hook: Hook | None = None,
    states: list[Any] | None = None,
    limits: Sequence[int] = LIMITS,
) -> tuple[Tree, list[Any]]:
    """The sum of every rank's gradients: the adjoint of :func:`replicate`, for gradients that were worked out without
    it.

    Args:
        grads: a pytree of this rank's gradients.
        of: what they are gradients of: the parameters, in a pytree like that of ``grads``; or the module, by whose
            names ``grads`` is a dictionary. Gradients that a layer of ``dd.nn`` has summed over these ranks stay as
            they are. ``p.grad`` knows it without; what ``torch.func.grad`` returns does not, and is summed.
        hook: see :mod:`distdl.parallel.hooks`; default: the exact sum.
        states: what the last call returned: the hook's state for each bucket.

    Returns:
        (the sums, states). One all-reduce for each bucket, with the default hook.

    Raises:
        PartitionError: a layer sums over some of these ranks, and not over others.

    Example:
        >>> P, w = dd.Partition((1,)), {"w": torch.tensor([1.0, 2.0])}
        >>> dd.parallel.reduce_gradients(w, P)[0]
        {'w': tensor([1., 2.])}
    """
    ours = _unsummed(grads, of, P, dims)
    return _reduced(grads, ours, hook or all_reduce(P, dims), states, limits)


def _reduced(
    grads: Tree, ours: Sequence[int], hook: Hook, states: list[Any] | None, limits: Sequence[int]
) -> tuple[Tree, list[Any]]:
    leaves, tree = _torch.flatten(grads)
    after: list[Any] = []

    def each(number: int, bucket: Bucket) -> Bucket:
        reduced, state = hook(bucket, states[number] if states else None)
        after.append(state)
        return reduced

    return _torch.unflatten(_by_bucket(leaves, ours, limits, each), tree), after


def accumulate(
    loss: Callable[[Tree, Any], tuple[torch.Tensor, Any]],
    params: Tree,
    batches: Iterable[Any],
    P: Place,
    dims: Dims = None,
    *,
    of: Any = None,
    hook: Hook | None = None,
    states: list[Any] | None = None,
    limits: Sequence[int] = LIMITS,
) -> tuple[torch.Tensor, Tree, list[Any]]:
    """Loss and gradients of the mean over all micro-batches of all ranks, with **one** reduction.

    Args:
        loss: ``loss(params, batch) -> (sum of the samples' losses, their number)``. Where it sends nothing itself,
            ranks may have different numbers of micro-batches, of any sizes, none included.
        params: a pytree of tensors, equal on all ranks. What a layer of ``dd.nn`` gets, and sums itself, is not summed
            again.
        batches: this rank's micro-batches.
        of: see :func:`reduce_gradients`.

    Returns:
        (mean loss, gradients, states), equal on all ranks. Messages: one all-reduce of two elements, and the gradients
        once.

    Example:
        >>> def loss(w, batch):
        ...     return (w * batch).sum(), len(batch)
        ...
        >>> value, grads, _ = dd.parallel.accumulate(
        ...     loss, torch.tensor(2.0), [torch.ones(2), torch.ones(4)], dd.Partition((1,)))
        >>> value, grads
        (tensor(2.), tensor(1.))
    """
    leaves, tree = _torch.flatten(params)
    like = next(leaf for leaf in leaves if is_smooth(leaf))
    total, count = wide(like.new_zeros(())), 0
    grads = [torch.zeros_like(leaf) for leaf in leaves]
    known = holders(params, of)

    def counted(leaves: list[torch.Tensor], batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        value, n = loss(_torch.unflatten(leaves, tree), batch)
        known[:] = [how or held(leaf) for how, leaf in zip(known, leaves)]  # layers have marked what they were given
        if not isinstance(n, torch.Tensor):
            n = torch.full((), n, device=value.device)  # no copy from the host
        return value, n

    step = grad_and_value(counted, has_aux=True)
    for batch in batches:
        new, (value, n) = step(leaves, batch)
        total, count = total + value, count + n
        grads = [a + b for a, b in zip(grads, new)]
    mean = summed(total, count, partition_of(P), dims)
    ours = _unsummed(leaves, None, P, dims, known)
    reduced, states = _reduced(grads, ours, hook or all_reduce(P, dims), states, limits)
    return mean[0] / mean[1], _torch.unflatten([(g / mean[1]).to(g.dtype) for g in reduced], tree), states
