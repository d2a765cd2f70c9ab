"""Mixed precision: which dtype parameters, sums and outputs have, and a loss scale that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _torch
from .. import functional as F
from .._types import Dims, Place, Tree
from ..errors import DistdlError
from ..held import keep
from .data import replicate
from .shard import Sharding
from .topology import along

__all__ = ["LossScale", "Precision", "select", "spread_overflow"]


_LARGEST = torch.finfo(torch.float32).max


def _cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """Floating-point leaves in ``dtype`` (None: as they are)."""
    leaves, structure = _torch.flatten(tree)
    cast = [
        keep(t.to(dtype), t) if dtype and isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in leaves
    ]
    return _torch.unflatten(cast, structure)


@dataclass(frozen=True)
class Precision:
    """Dtypes of a computation whose parameters are kept in another one (Micikevicius et al., arXiv:1710.03740).

    The adjoint of a cast casts back: master parameters in float32 get gradients in float32. ``None``: as it comes.

    Attributes:
        param: of parameters and inputs inside the function.
        reduce: in which gradients are summed over the ranks; not narrower than ``param`` (for that, see
            ``hooks.cast``).
        output: of the function's results.

    No messages of its own.

    Raises:
        DistdlError: a ``reduce`` that cannot hold every value of ``param``.

    Example:
        >>> policy = dd.parallel.Precision(param=torch.bfloat16)
        >>> policy.replicate([torch.ones(2)], dd.Partition((1,)))
        [tensor([1., 1.], dtype=torch.bfloat16)]
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.param and self.reduce and torch.promote_types(self.param, self.reduce) != self.reduce:
            raise DistdlError(
                "parameters would be rounded to the sum's dtype",
                actual=(self.param, self.reduce),
                expected="reduce to hold every value of param",
                next_step="sum in fewer bits by hooks.cast",
            )

    def replicate(self, params: Tree, P: Place, dims: Dims = None, *, of: Any = None) -> Tree:
        """:func:`distdl.parallel.replicate`: gradients come in ``param``, are summed in ``reduce``, and end in the
        master's."""
        return _cast(replicate(_cast(params, self.reduce), P, dims, of=of), self.param)

    def gather(self, sharding: Sharding, block: torch.Tensor) -> Any:
        """:meth:`distdl.parallel.Sharding.gather`, likewise: gathered and reduce-scattered in ``reduce``."""
        return _cast(sharding.gather(_cast(block, self.reduce)), self.param)

    def wrap(self, f: Callable[..., Tree]) -> Callable[..., Tree]:
        """``f(*args)`` with floating-point arguments cast to ``param`` and results to ``output``."""
        return lambda *args: _cast(f(*_cast(args, self.param)), self.output)


def _overflow(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """0 where every gradient of this rank is finite, 1 where not (a float32 scalar)."""
    grads = [g.detach() for g in leaves if g.numel()]
    if not grads:  # a pipeline's stage without parameters has no tensor at all
        return torch.zeros((), device=leaves[0].device if leaves else None)
    return 1 - torch.isfinite(torch.nn.utils.get_total_norm(grads, torch.inf)).float()  # one kernel for many gradients


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale, as :class:`torch.amp.GradScaler` keeps it, as a value: each step returns a new one.

        grads = grad(lambda p: scale.scaled(loss(p)))(params)
        grads, finite = scale.unscaled(grads, P)
        params = select(finite, stepped(params, grads), params)
        scale = scale.updated(finite)

    Attributes:
        scale: what losses are multiplied by: a number, or a float32 tensor of no dim on the gradients' device. Then the
            next scale is worked out there, and no step waits for the device.
        good: finite steps since it last changed; beside a tensor ``scale`` an integer tensor after the first step.
        growth, backoff, interval: times ``growth`` after ``interval`` finite steps in a row, as long as float32 holds
            it, times ``backoff`` after any other.

    Messages: of ``unscaled`` one all-reduce of one number. No errors: an overflow is a value.

    Example:
        >>> dd.parallel.LossScale(scale=8.0).scale
        8.0
    """

    scale: float | torch.Tensor = 2.0**16
    good: int | torch.Tensor = 0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self.scale

    def unscaled(self, grads: Tree, P: Place, dims: Dims = None) -> tuple[Tree, torch.Tensor]:
        """(gradients over the scale, whether all of them are finite on **all** ranks of ``P`` along ``dims``).

        The flag is an equal bool tensor on every rank: an inf on one makes all skip. Messages: one all-reduce of 4
        bytes.
        """
        leaves, tree = _torch.flatten(grads)
        finite = F.invariant_sum(_overflow(leaves), along(P, dims)) == 0
        return _torch.unflatten([g / self.scale for g in leaves], tree), finite

    def updated(self, finite: torch.Tensor) -> LossScale:
        """The scale for the next step."""
        if isinstance(self.scale, torch.Tensor):
            good = torch.ones_like(finite, dtype=torch.int64) + self.good
            grown = finite & (good >= self.interval)
            larger = self.scale * self.growth
            scale = torch.where(grown & larger.isfinite(), larger, self.scale)
            scale = torch.where(finite, scale, self.scale * self.backoff)
            return replace(self, scale=scale, good=good.masked_fill(~finite | grown, 0))
        if not bool(finite):
            return replace(self, scale=self.scale * self.backoff, good=0)
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        grows = self.scale * self.growth <= _LARGEST
        return replace(self, scale=self.scale * self.growth if grows else self.scale, good=0)


def select(condition: torch.Tensor, yes: Tree, no: Tree) -> Tree:
    """``yes`` where ``condition`` (a bool tensor) holds, else ``no``: pytrees of one structure.

    No messages; tensors of any shapes, the same in both.

    Raises:
        ShapeError: trees that differ, or a condition of more than one value.

    Example:
        >>> dd.parallel.select(torch.tensor(False), [torch.ones(2)], [torch.zeros(2)])
        [tensor([0., 0.])]
    """
    ours, tree = _torch.flatten(yes)
    theirs, _ = _torch.flatten(no)

    def chosen(a: Any, b: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return torch.where(condition, a, b)
        return a if bool(condition) else b

    return _torch.unflatten([chosen(a, b) for a, b in zip(ours, theirs)], tree)


def spread_overflow(grads: Tree, P: Place, dims: Dims = None) -> Tree:
    """Gradients as they are; infinite on **every** rank where they are not finite on any.

    Then :class:`torch.amp.GradScaler` itself, one on each rank, skips everywhere: its own flag is local. (Gradients
    that were summed over the ranks have spread their infinities already; blocks of sharded ones have not.)

    Messages: one all-reduce of 4 bytes.

    Raises:
        PartitionError, ShapeError: ranks or dims that are not there, or leaves that are no tensors.

    Example:
        >>> dd.parallel.spread_overflow([torch.tensor([1.0])], dd.Partition((1,)))
        [tensor([1.])]
    """
    leaves, tree = _torch.flatten(grads)
    finite = F.invariant_sum(_overflow(leaves), along(P, dims)) == 0
    return _torch.unflatten([g.masked_fill(~finite, torch.inf) for g in leaves], tree)
