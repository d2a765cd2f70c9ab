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

import torch
import torch.nn.functional as tf

from .._types import Place
from ..errors import ShapeError
from ..movement.copies import invariant_sum
from ..partition import Layout, partition_of
from .autocast import autocast
from .enter import enter, outside
from .numeric import sum_and_count, summed, wide, wider

__all__ = [
    "dist_bce_loss",
    "dist_bce_with_logits_loss",
    "dist_huber_loss",
    "dist_kl_div",
    "dist_l1_loss",
    "dist_mse_loss",
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
    """Squared error (x - y)².

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_mse_loss(x, y, P)
        tensor(0.1562)
    """
    return _pointwise("dist_mse_loss", lambda x, y: (x - y).square(), x, y, P, reduction)


@_documented()
def dist_l1_loss(x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean") -> torch.Tensor:
    """Absolute error |x - y|.

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_l1_loss(x, y, P)
        tensor(0.3750)
    """
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
    """Huber's loss: d²/2 where d = |x - y| is at most ``delta``, else delta (d - delta / 2).

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_huber_loss(x, y, P)
        tensor(0.0781)
    """
    return _pointwise("dist_huber_loss", _huber(delta), x, y, P, reduction)


@_documented("beta: where the square ends; 0 makes it the absolute error.")
def dist_smooth_l1_loss(
    x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean", beta: float = 1.0
) -> torch.Tensor:
    """Huber's loss divided by ``beta``: d²/(2 beta) where d = |x - y| is at most beta, else d - beta / 2.

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_smooth_l1_loss(x, y, P)
        tensor(0.0781)
    """
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

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_bce_loss(x, y, P)
        tensor(0.4904)
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
    """Binary cross-entropy of ``sigmoid(x)``, without overflow: (1 - y) x - (1 + (pos_weight - 1) y) log sigmoid(x).

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_bce_with_logits_loss(x, y, P)
        tensor(0.6500)
    """

    def bce(x, y):
        positive = 1 if pos_weight is None else 1 + (pos_weight - 1) * y
        return (1 - y) * x - positive * tf.logsigmoid(x)

    return _pointwise("dist_bce_with_logits_loss", bce, x, y, P, reduction, weight)


@_documented("log_target: y holds logarithms too.", ' or ``"batchmean"`` (the sum by the size of dim 0)')
def dist_kl_div(
    x: torch.Tensor, y: torch.Tensor, P: Place, reduction: str = "mean", log_target: bool = False
) -> torch.Tensor:
    """Kullback-Leibler divergence, element by element: y (log y - x), with x a logarithm of probabilities; 0 where y =
    0.

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_kl_div(x.log(), y, P, reduction="sum")
        tensor(0.6931)
    """

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
    """Negative log likelihood of counts y under Poisson's law: exp(x) - y x, or x - y log(x + eps) of a rate x.

    Example:
        >>> P, x, y = dd.Partition((1,)), torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
        >>> F.dist_poisson_nll_loss(x, y, P)
        tensor(1.2164)
    """

    def nll(x, y):
        loss = x.exp() - y * x if log_input else x - y * (x + eps).log()
        if full:
            many = torch.where(y > 1, y, 1)
            loss = loss + torch.where(y > 1, many * many.log() - many + (2 * math.pi * many).log() / 2, 0)
        return loss

    return _pointwise("dist_poisson_nll_loss", nll, x, y, P, reduction)
