"""Losses of classes: cross-entropy and negative log likelihood, with classes, batch and space split in any way. What
:mod:`distdl.functional.loss` says of losses holds for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import _torch
from .._types import Place
from ..agree import resolve
from ..errors import PartitionError, ShapeError
from ..movement.copies import invariant_sum
from ..partition import Layout, partition_of
from .autocast import autocast
from .enter import FLOATING, enter
from .loss import _check_reduction, _outside, _reduced
from .numeric import pivot, wider

__all__ = ["dist_cross_entropy", "dist_nll_loss"]


def dist_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    P: Place,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of ``softmax(logits)``, with classes, batch and space split in any way.

    Per element, with weights w, smoothing ε, C classes and the target distribution t (one-hot for class indices)::

        loss = Σ_c q_c (log Σ_j exp(x_j) − x_c),    q_c = w_c ((1 − ε) t_c + ε / C)

    Only Σ exp and Σ q x pass between the ranks of the class dim (Megatron-LM's form, arXiv:1909.08053, section 3).

    Args:
        logits: this rank's (batch, class, *space) block over ``P``; with a one-dim partition (class,).
        target: int64 class indices, this rank's (batch, *space) block, equal on all ranks along the class dim (counted
            globally); or class probabilities, this rank's block, shaped as logits.
        weight: (this rank's classes,) of weights, or ``None``. No gradient is summed over its copies.
        ignore_index: targets of this index contribute nothing, also to the mean's count. Class indices only.
        reduction: ``"mean"`` divides by the sum of the targets' weights (class indices) or the number of targets
            (probabilities).

    Returns:
        A scalar, invariant over all of ``P``; for ``"none"`` the (batch, *space) block: invariant along the class dim,
        varying along the others. A target that is no class is a ShapeError (on the CPU, outside transforms), else its
        loss is NaN.

    Messages, for n targets on this rank. Class dim split: one all-gather of n elements, and one all-reduce of 2n (3n
    with weights, 4n with weights and smoothing, 3n with probabilities). Other dims split: one all-reduce of 2 elements
    (1 for ``"sum"``, 0 for ``"none"``). None backward. A bare partition is negotiated if the class dim is split.

    Example:
        >>> F.dist_cross_entropy(torch.tensor([[2.0, 2.0]]), torch.tensor([1]), dd.Partition((1, 1)))
        tensor(0.6931)
    """
    return _class_loss("dist_cross_entropy", logits, target, P, weight, ignore_index, reduction, label_smoothing)


def dist_nll_loss(
    log_probs: torch.Tensor,
    target: torch.Tensor,
    P: Place,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Negative log likelihood: ``-weight[target] * log_probs[target]``; as :func:`dist_cross_entropy` for class
    indices.

    Messages, for n targets on this rank. Class dim split: one all-reduce of n elements (2n with weights). Other dims
    split: one all-reduce of 2 elements (1 for ``"sum"``, 0 for ``"none"``). None backward.

    Example:
        >>> F.dist_nll_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]), dd.Partition((1, 1)))
        tensor(2.)
    """
    return _class_loss("dist_nll_loss", log_probs, target, P, weight, ignore_index, reduction, None)


def _class_loss(layer, x, target, P, weight, ignore_index, reduction, smoothing):
    """Both class losses. ``smoothing=None``: x are log-probabilities, and nothing is normalised."""
    grid, softmax, eps = partition_of(P), smoothing is not None, smoothing or 0.0
    _check_reduction(reduction)
    if not 0 <= eps <= 1:
        raise ShapeError(
            "smoothing is a probability",
            expected="0 <= label_smoothing <= 1",
            actual=eps,
            next_step="give the share of the target that is spread over all classes",
        )
    if grid.ndim == 0:
        raise PartitionError(
            "there is no class dim",
            expected="(batch, class, *space) or (class,)",
            actual="no dims",
            next_step="give P a dim for the classes",
        )
    x, L, at = enter(x, P, layer=layer, kinds=FLOATING, agreed=False)
    target, weight = autocast(layer, grid.ndim, target, weight)
    c = min(1, grid.ndim - 1)
    rest = (0, *range(2, grid.ndim)) if c else ()
    likely = softmax and isinstance(target, torch.Tensor) and target.is_floating_point()
    dtype = torch.promote_types(x.dtype, target.dtype) if likely else x.dtype
    if at is None:
        return _outside(x, L=L, reduction=reduction, dtype=dtype, dims=rest)
    x, first, classes = _classes(x, L, at, c)
    _check_target(x, target, weight, c, likely)

    x = x.to(wider(dtype))
    if softmax:
        x = x - pivot(x, grid, (c,))  # of an infinite or NaN one all is NaN, as in torch
    weight = None if weight is None else weight.to(x.dtype)
    by_class = 1 if weight is None else weight.reshape(-1, *[1] * (grid.ndim - c - 1))
    if likely:
        q = by_class * ((1 - eps) * target.to(x.dtype) + eps / classes)
        valid = known = None
        rows = [(q * x).sum(c, True), q.sum(c, True)]
    else:
        target = target.unsqueeze(c)
        valid, known = target != ignore_index, (target >= 0) & (target < classes)
        here = valid & (target >= first) & (target < first + x.shape[c])
        place = torch.where(here, target - first, 0)
        dot = torch.where(here, x.gather(c, place), 0) if x.shape[c] else x.sum(c, True)
        rows = [dot]
        if weight is not None:
            chosen = torch.where(here, weight[place] if x.shape[c] else 0, 0).to(x.dtype)
            rows = [dot * chosen, chosen]
        if eps:
            rows[0] = (1 - eps) * rows[0] + eps / classes * (by_class * x).sum(c, True)
            if weight is not None:
                rows.append(weight.sum().expand(dot.shape))
    if softmax:
        rows.append(x.exp().sum(c, True))

    dot, *mass = invariant_sum(torch.stack(rows), grid, (c,))
    log_sum = mass.pop().log() if softmax else 0
    if likely:
        losses, count = mass[0] * log_sum - dot, math.prod(dot.shape)
    else:
        share: Any = mass[0] if weight is not None else 1
        scale = share if len(mass) < 2 else (1 - eps) * share + eps / classes * mass[1]
        seen = not _torch.transforms_active() and target.device.type == "cpu" and not _torch.is_fake(target)
        if seen and bool((valid & ~known).any()):
            raise ShapeError(
                "a target is no class",
                actual=target[valid & ~known][0].item(),
                expected=f"0 <= target < {classes}, or ignore_index = {ignore_index}",
                next_step="class indices are global; give what shall not count the ignore_index",
            )
        spoil = torch.where(known | ~valid, 1.0, math.nan)  # a factor, so that derivatives are NaN too
        losses = torch.where(valid, (scale * log_sum - dot) * spoil.to(dot.dtype), 0)
        count = torch.where(valid, share, 0).sum()
    return _reduced(losses.squeeze(c), count, reduction, grid, rest, dtype)


def _classes(x, L, at, c):
    """(x, first class of this rank, number of classes)."""
    if not isinstance(L, Layout):
        if L.shape[c] == 1:
            return x, 0, x.shape[c]
        (x,), (L,) = resolve((x,), L)
    return x, L.blocks(c)[at[c]][0], L.shape[c]


def _check_target(x, target, weight, c, likely) -> None:
    expected = list(x.shape)
    if not likely:
        expected.pop(c)
    if not isinstance(target, torch.Tensor):
        raise ShapeError(
            "the target is not a tensor",
            expected="this rank's block",
            actual=type(target).__name__,
            next_step="pass the target's block as a tensor",
        )
    if list(target.shape) != expected or not (likely or target.dtype == torch.int64):
        raise ShapeError(
            "target does not fit",
            actual=(tuple(target.shape), target.dtype),
            expected=f"int64 classes of shape {tuple(x.shape[:c] + x.shape[c + 1 :])}, or probabilities like x",
            next_step="pass this rank's block of the targets; class indices are global",
        )
    if weight is not None and tuple(weight.shape) != (x.shape[c],):
        raise ShapeError(
            "weight does not fit",
            expected=(x.shape[c],),
            actual=tuple(weight.shape),
            next_step="pass the weights of this rank's classes",
        )
