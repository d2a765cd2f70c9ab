"""Parameter averaging: ranks train alone, and take the mean of their parameters every few steps (local SGD,
arXiv:1805.09767)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import _torch
from .. import functional as F
from .._types import Dims, Place, Tree
from ..errors import DistdlError
from ..functional.numeric import wide, wider
from ..held import holders, whole
from ..partition import partition_of

__all__ = ["average_due", "average_parameters"]


def average_parameters(
    params: Tree, P: Place, dims: Dims = None, *, weight: float | torch.Tensor | None = None, of: Any = None
) -> Tree:
    """The mean of every rank's parameters along ``dims`` (None: all), on every rank.

    Args:
        params: a pytree of floating-point tensors, of equal shapes on all ranks.
        weight: this rank's weight, a number (its samples since the last mean, say); default: all alike.
        of: the module by whose names ``params`` is a dictionary, where the tensors are not its parameters themselves.

    Returns:
        The (weighted) mean: invariant along ``dims``. Messages: one all-reduce of the parameters, one element more with
        ``weight``; weighted halves go in float32.

    Raises:
        PartitionError: these ranks hold different blocks of a parameter.

    Example:
        >>> P, w = dd.Partition((1,)), {"w": torch.tensor([1.0, 2.0])}
        >>> dd.parallel.average_parameters(w, P)
        {'w': tensor([1., 2.])}
    """
    leaves, tree = _torch.flatten(params)
    where = partition_of(P)
    whole(holders(params, of), where.along(dims))
    if weight is None:
        copies = 1
        for d in where.dims(dims):
            copies *= where.shape[d]
        means = [s / copies for s in F.invariant_sum(leaves, where, dims)]
    else:
        dtype = wider(leaves[0].dtype)  # weights are counts, which halves do not hold
        if isinstance(weight, torch.Tensor):
            own = weight.to(dtype)
        else:
            own = torch.full((), weight, dtype=dtype, device=leaves[0].device)
        *sums, total = F.invariant_sum([*(wide(leaf) * own for leaf in leaves), own], where, dims)
        means = [(s / total).to(leaf.dtype) for s, leaf in zip(sums, leaves)]
    return _torch.unflatten(means, tree)


def average_due(params: Tree, step: int, P: Place, periods: Mapping[int, Dims]) -> Tree:
    """Hierarchical averaging: after step ``step`` (from 1 on), the mean along the dims whose period has come.

    Args:
        periods: {steps between two means: partition dims}, e.g. ``{4: 1, 16: None}`` on a (node, rank) grid: in the
            node every 4 steps, over all every 16. Of the periods that divide ``step`` the longest counts.

    Returns:
        The parameters as they are (no message) where no period divides ``step``. Every rank passes the same step.

    Raises:
        DistdlError: a period below 1. PartitionError: dims that P does not have.

    Example:
        >>> P, w = dd.Partition((1,)), {"w": torch.tensor([1.0, 2.0])}
        >>> dd.parallel.average_due(w, 4, P, {4: 0})  # along dim 0 at every fourth step
        {'w': tensor([1., 2.])}
    """
    if min(periods, default=0) < 1:
        raise DistdlError(
            "periods are numbers of steps",
            expected="{steps >= 1: dims}",
            actual=periods,
            next_step="give the dims to average over under each number of steps",
        )
    due = [period for period in periods if step % period == 0]
    return average_parameters(params, P, periods[max(due)]) if due else params
