"""Losses over partitioned tensors: *invariant* values, of which ``.backward()`` and ``torch.func.grad`` are right as
they stand.

``P`` (a Partition or a Layout) partitions the prediction, and the target with it. ``reduction`` is torch's: ``"mean"``
divides by exact global counts, never averaging averages; ``"none"`` returns this rank's block of the losses. On a rank
outside ``P`` a loss is a connected zero. Half precision is computed in float32; the result has the dtype to which torch
promotes prediction and target. Predictions are floating (of the absolute error complex too), and what torch refuses is
a ShapeError.

As the adjoint of ``invariant_sum`` is the identity, **no loss sends anything in backward**.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as tf

from .. import _torch
from .._types import Place
from ..agree import resolve
from ..errors import PartitionError, ShapeError
from ..movement.copies import invariant_sum
from ..partition import Layout, partition_of
from .autocast import autocast
from .enter import FLOATING, enter, outside
from .numeric import pivot, sum_and_count, summed, wide, wider

__all__ = [
    "dist_bce_loss",
    "dist_bce_with_logits_loss",
    "dist_cross_entropy",
    "dist_huber_loss",
    "dist_kl_div",
    "dist_l1_loss",
    "dist_mse_loss",
    "dist_nll_loss",
    "dist_poisson_nll_loss",
    "dist_smooth_l1_loss",
]


def _reduced(losses, count, reduction, P, dims, dtype):
    """Losses to the result; ``count`` is this rank's part of what the mean divides by."""
    if reduction == "none":
        return losses.to(dtype)
    total, n = summed(losses.sum(), count if reduction == "mean" else None, P, dims)
    return (total / n if reduction == "mean" else total).to(dtype)


def _check_reduction(reduction, *more) -> None:
    if reduction not in ("none", "mean", "sum", *more):
        raise ShapeError(
            "unknown reduction",
            expected=" or ".join(("none", "mean", "sum", *more)),
            actual=reduction,
            next_step="choose one of these",
        )


def _outside(x, *others, L, reduction, dtype, dims):
    """What a rank outside gets: nothing of the losses in dims ``dims``, and a zero for what is one value."""
    sizes = x.shape if L is None else L.local_shape()
    return outside(x, *others, like=[sizes[d] for d in dims] if reduction == "none" else (), dtype=dtype)


# ---------------------------------------------------------------- classes


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


# ---------------------------------------------------------------- element by element


def _pointwise(layer, losses, x, y, P, reduction, weight=None):
    """Any loss that is a function ``losses(x, y)`` of single elements."""
    _check_reduction(reduction, *(("batchmean",) if layer == "dist_kl_div" else ()))
    x, L, at = enter(x, P, layer=layer, agreed=False)
    if not isinstance(y, torch.Tensor):
        raise ShapeError(
            "the target is not a tensor",
            expected="this rank's block",
            actual=type(y).__name__,
            next_step="pass the target's block as a tensor",
        )
    grid = partition_of(P)
    y, weight = autocast(layer, grid.ndim, y, weight)
    dtype = _dtype(layer, x, y)
    if at is None:
        x, y = (t.abs() if t.is_complex() else t for t in (x, y))
        return _outside(x, y, L=L, reduction=reduction, dtype=dtype, dims=range(max(grid.ndim, 1)))
    if x.shape != y.shape:
        raise ShapeError(
            "prediction and target have different shapes",
            expected=tuple(x.shape),
            actual=tuple(y.shape),
            next_step="pass blocks of one layout; nothing is broadcast",
        )
    # Numbers of no dtype that losses have are converted; real and complex ones meet as they are.
    values = losses(wide(x), wide(y) if y.is_floating_point() or y.is_complex() else y.to(wider(dtype)))
    if weight is not None:
        values = values * weight
    if reduction == "none":
        return values.to(dtype)
    dims = tuple(range(grid.ndim))
    if reduction == "mean":
        total, n = sum_and_count(values, L, dims, False)
    elif reduction == "sum":
        total, n = invariant_sum(values.sum(), grid, dims), 1
    elif isinstance(L, Layout):
        total, n = invariant_sum(values.sum(), grid, dims), L.shape[0]
    else:  # every batch element once
        total, n = summed(values.sum(), 0 if any(at[1:]) else x.shape[0], grid, dims)
    return (total if reduction == "sum" else total / n).to(dtype)


_FLOATING_TARGETS = ("dist_bce_loss", "dist_bce_with_logits_loss", "dist_kl_div")


def _dtype(layer, x, y):
    """The dtype of a loss of x and y; what torch refuses is refused."""
    smooth = [t.is_floating_point() or (t.is_complex() and layer == "dist_l1_loss") for t in (x, y)]
    whole = not y.is_floating_point() and not y.is_complex() and layer not in _FLOATING_TARGETS
    if not smooth[0] or not (smooth[1] or (whole and (y.dtype != torch.bool or layer != "dist_l1_loss"))):
        raise ShapeError(
            "this loss is not of such tensors",
            actual=(x.dtype, y.dtype),
            expected="a floating "
            f"prediction{' (or a complex one)' * (layer == 'dist_l1_loss')}, and a target that torch takes with it",
            next_step="convert them first: x.float(), y.float()",
        )
    found = torch.promote_types(x.dtype, y.dtype)
    return found.to_real() if found.is_complex else found


_POINTWISE = """

    Args:
        x, y: prediction and target, this rank's blocks over ``P``, of one shape; both are differentiable.{args}

    Returns:
        A scalar, invariant over ``P``; for ``"none"`` this rank's block of the losses, varying.

    Messages: one all-reduce of 2 elements for ``"mean"``{more} (1 with a Layout), of 1 for ``"sum"``; none for
    ``"none"``, and none backward.
    """


def _documented(args="", more=""):
    """Append what all pointwise losses share to a docstring."""

    def add(function):
        function.__doc__ = function.__doc__.rstrip() + _POINTWISE.format(args=args and "\n        " + args, more=more)
        return function

    return add


@_documented()
def dist_mse_loss(x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean") -> torch.Tensor:
    """Squared error (x - y)²."""
    return _pointwise("dist_mse_loss", lambda x, y: (x - y).square(), x, y, P, reduction)


@_documented()
def dist_l1_loss(x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean") -> torch.Tensor:
    """Absolute error |x - y|."""
    return _pointwise("dist_l1_loss", lambda x, y: (x - y).abs(), x, y, P, reduction)


def _huber(delta):
    def losses(x, y):
        d = x - y
        near = d.abs() <= delta
        # The square is given 0 where it is not taken, so that it cannot overflow into the derivative.
        return torch.where(near, torch.where(near, d, 0).square() / 2, delta * (d.abs() - delta / 2))

    return losses


@_documented("delta: where the square ends.")
def dist_huber_loss(
    x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean", delta: float = 1.0
) -> torch.Tensor:
    """Huber's loss: d²/2 where d = |x - y| is at most ``delta``, else delta (d - delta / 2)."""
    return _pointwise("dist_huber_loss", _huber(delta), x, y, P, reduction)


@_documented("beta: where the square ends; 0 makes it the absolute error.")
def dist_smooth_l1_loss(
    x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean", beta: float = 1.0
) -> torch.Tensor:
    """Huber's loss divided by ``beta``: d²/(2 beta) where d = |x - y| is at most beta, else d - beta / 2."""
    if beta == 0:
        return dist_l1_loss(x, y, P, reduction)
    huber = _huber(beta)
    return _pointwise("dist_smooth_l1_loss", lambda x, y: huber(x, y) / beta, x, y, P, reduction)


@_documented("weight: a factor for each element, broadcast against this rank's block.")
def dist_bce_loss(
    x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean", weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Binary cross-entropy -(y log x + (1 - y) log(1 - x)) of probabilities x, with logarithms of at least -100.

    Inside (0, 1) all derivatives equal torch's. At x = 0 and x = 1 they are those of the clamped logarithm, where
    torch's rule is (x - y) / 1e-12.
    """

    def log(function, p, zero):
        return torch.where(zero, -100.0, function(torch.where(zero, 0.5, p)).clamp(min=-100))

    def bce(x, y):
        return -(y * log(torch.log, x, x == 0) + (1 - y) * log(torch.log1p, -x, x == 1))

    return _pointwise("dist_bce_loss", bce, x, y, P, reduction, weight)


@_documented(
    "weight, pos_weight: factors for each element, and for the positive part, broadcast against this rank's block."
)
def dist_bce_with_logits_loss(
    x: torch.Tensor,
    y: torch.Tensor,
    P: Place,
    reduction: str = "mean",
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy of ``sigmoid(x)``, without overflow: (1 - y) x - (1 + (pos_weight - 1) y) log sigmoid(x)."""

    def bce(x, y):
        positive = 1 if pos_weight is None else 1 + (pos_weight - 1) * y
        return (1 - y) * x - positive * tf.logsigmoid(x)

    return _pointwise("dist_bce_with_logits_loss", bce, x, y, P, reduction, weight)


@_documented("log_target: y holds logarithms too.", ' or ``"batchmean"`` (the sum by the size of dim 0)')
def dist_kl_div(
    x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean", log_target: bool = False
) -> torch.Tensor:
    """Kullback-Leibler divergence, element by element: y (log y - x), with x a logarithm of probabilities; 0 where y =
    0."""

    def divergence(x, y):
        return y.exp() * (y - x) if log_target else torch.xlogy(y, y) - y * x

    return _pointwise("dist_kl_div", divergence, x, y, P, reduction)


@_documented(
    "log_input: x is the logarithm of the rate. full: add Stirling's approximation of log y!. eps: added to a rate x."
)
def dist_poisson_nll_loss(
    x: torch.Tensor,
    y: torch.Tensor,
    P: Place,
    reduction: str = "mean",
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-08,
) -> torch.Tensor:
    """Negative log likelihood of counts y under Poisson's law: exp(x) - y x, or x - y log(x + eps) of a rate x."""

    def nll(x, y):
        loss = x.exp() - y * x if log_input else x - y * (x + eps).log()
        if full:
            many = torch.where(y > 1, y, 1)
            loss = loss + torch.where(y > 1, many * many.log() - many + (2 * math.pi * many).log() / 2, 0)
        return loss

    return _pointwise("dist_poisson_nll_loss", nll, x, y, P, reduction)
