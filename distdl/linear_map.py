"""Linear maps between distributed tensors.

A :class:`LinearMap` runs *steps*, one after the other. A step is a :class:`Move`: a plan, and the plan of its adjoint;
or a :class:`Pair` of a user's own functions (pair.py). Transposing a map transposes its steps and their order, and that
is all there is to derivatives: :mod:`autograd` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from . import _faults
from ._value import placed
from .autograd import apply
from .compiled import Held, map_call
from .engine import dispatch
from .pair import Pair, check_composition
from .plan import Plan, Side
from .ties import nothing
from .world import World, world


@dataclass(frozen=True)
class Space:
    """One side of a map. *Varying*: copies are distinct components. *Invariant*: one value stored ``copies`` times,
    whose inner product counts it once, so that each copy weighs 1/copies."""

    copies: int = 1

    @property
    def kind(self) -> str:
        """``"varying"`` or ``"invariant"``."""
        return "varying" if self.copies == 1 else "invariant"

    @property
    def weight(self) -> float:
        """Weight of one copy in the inner product."""
        return 1 / self.copies


VARYING = Space()


@dataclass(frozen=True)
class Move:
    """A step that moves boxes.

    Attributes:
        name: the movement's name; shown in errors and by ``count_messages``.
        plan, adjoint: what the step and its adjoint do.
        domain, range: whether inputs and outputs are varying or invariant.
        transposed: whether this is the adjoint of the movement that ``name`` says.
    """

    name: str
    plan: Plan
    adjoint: Plan
    domain: Space = VARYING
    range: Space = VARYING
    transposed: bool = False

    together = staticmethod(dispatch.together)

    def __post_init__(self) -> None:
        for plan, transposed in ((self.plan, self.transposed), (self.adjoint, not self.transposed)):
            plan.__dict__.setdefault("name", self.name + (".T" if transposed else ""))

    @placed
    def world(self) -> World:
        """The world of the step's ranks."""
        return world(self.plan.held.partition.world)

    @placed
    def in_shape(self) -> tuple[int, ...]:
        """Shape of this rank's input."""
        return self.plan.view(self.world.rank).in_shape

    @placed
    def out_shape(self) -> tuple[int, ...]:
        """Shape of this rank's output."""
        return self.plan.view(self.world.rank).out_shape

    @placed
    def active(self) -> bool:
        """Whether this rank holds some of the input."""
        return self.plan.held.partition.index(self.world.rank) is not None

    @cached_property
    def is_identity(self) -> bool:
        """Whether the step and its adjoint leave every rank's tensor as it is."""
        return self.plan.is_identity() and self.adjoint.is_identity()

    @placed
    def _fits(self) -> bool:
        held, wanted = self.plan.held.partition, self.plan.wanted.partition
        return held.world == wanted.world and max(self.plan.ranks) < self.world.size

    @cached_property
    def alone(self) -> tuple[Move]:
        """This step as all the steps of one call."""
        return (self,)

    @cached_property
    def T(self) -> Move:
        """The adjoint."""
        other = Move(self.name, self.adjoint, self.plan, self.range, self.domain, not self.transposed)
        other.__dict__["T"] = self
        return other

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan, where it moves anything."""
        return () if self.plan.is_identity() else (self.plan,)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, sorted."""
        return self.plan.ranks

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as what this rank puts in: checked, or a placeholder where it holds nothing."""
        if not self._fits:
            self.world.check(self.plan.held.partition, self.plan.wanted.partition, op=str(self))
        if not isinstance(x, torch.Tensor):
            raise _faults.not_a_tensor(self, x)
        if self.active:
            if x.shape != self.in_shape:
                raise _faults.not_the_block(self, x)
        elif x.shape != self.in_shape:
            x = nothing(self.in_shape, x)
        return x

    def simulate(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All ranks in this process: blocks in the order of the held partition to blocks in the order of the wanted."""
        return self.plan.simulate(shards)

    @property
    def partitions(self) -> str:
        """Source and destination, for messages."""
        return self.plan.named[1]

    def __str__(self) -> str:
        return self.name + (".T" if self.transposed else "")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class LinearMap:
    """A linear map and its adjoint, between the products of the ranks' local tensors (arXiv:2006.03108, section 2).

    Call it with this rank's tensor (shape :attr:`in_shape`; ignored where the rank holds nothing) to get this rank's
    result (shape :attr:`out_shape`). ``A.T`` is the adjoint, ``A.T.T == A``, and ``B @ A`` the composition.

    Attributes:
        steps: what runs, in order; a movement of :mod:`distdl.maps` is one :class:`Move`.

    Example:
        >>> A: dd.LinearMap = dd.maps.roll(dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> A(torch.tensor([1, 2, 3])), A.T(torch.tensor([1, 2, 3]))
        (tensor([3, 1, 2]), tensor([2, 3, 1]))
    """

    steps: tuple[Any, ...]  # Move or Pair

    def __post_init__(self) -> None:
        for a, b in zip(self.steps, self.steps[1:]):
            check_composition(a, b)
        self.__dict__.update(_held=Held(self), T=self.T)  # compiled code finds both made

    @map_call
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the map to this rank's tensor. Returns fresh memory, unless the map is the identity on every rank.

        Raises:
            ShapeError: ``x`` is not a tensor of shape :attr:`in_shape` (where this rank holds something).
        """
        for step in self.steps:
            x = step.operand(x)
            if not step.is_identity:
                x = apply(step.alone, (x,))[0]
        return x

    @cached_property
    def T(self) -> LinearMap:
        """The adjoint: the adjoints of the steps in reverse order."""
        other = object.__new__(LinearMap)
        other.__dict__.update(steps=tuple(step.T for step in reversed(self.steps)), T=self, _held=Held(other))
        return other

    def __matmul__(self, other: LinearMap) -> LinearMap:
        if not isinstance(other, LinearMap):
            raise _faults.not_a_map(other)
        return LinearMap(other.steps + self.steps)

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of this rank's input."""
        return self.steps[0].in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of this rank's output."""
        return self.steps[-1].out_shape

    @property
    def domain(self) -> Space:
        """Whether inputs are varying or invariant."""
        return self.steps[0].domain

    @property
    def range(self) -> Space:
        """Whether outputs are varying or invariant."""
        return self.steps[-1].range

    @property
    def is_identity(self) -> bool:
        """Whether no rank's tensor changes."""
        return all(step.is_identity for step in self.steps)

    @property
    def active(self) -> bool:
        """Whether this rank holds some of the input."""
        return self.steps[0].active

    @property
    def world(self) -> World:
        """The world of the map's ranks."""
        return self.steps[0].world

    @property
    def plan(self) -> Plan:
        """The plan of a single movement."""
        return self.steps[0].plan

    @property
    def adjoint(self) -> Plan:
        """The plan of a single movement's adjoint."""
        return self.steps[0].adjoint

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that a call runs, in order; steps that move nothing have none."""
        return tuple(plan for step in self.steps for plan in step.plans)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, sorted."""
        return tuple(sorted({rank for step in self.steps for rank in step.ranks}))

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as what this rank puts in: checked, or a placeholder where it holds nothing."""
        return self.steps[0].operand(x)

    def simulate(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All ranks in this process, step after step: blocks in the order of the first one's held partition."""
        blocks = list(shards)
        for step in self.steps:
            blocks = step.simulate(blocks)
        return blocks

    def __str__(self) -> str:
        return " @ ".join(map(str, reversed(self.steps)))

    def __repr__(self) -> str:
        return f"LinearMap({self}: {self.in_shape} -> {self.out_shape}, {self.domain.kind} -> {self.range.kind})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LinearMap, (self.steps,)


def movement(name: str, held: Side, wanted: Side) -> LinearMap:
    """The map that moves what is held to where it is wanted; its adjoint swaps the two."""
    plan = Plan(held, wanted)
    return LinearMap((Move(name, plan, plan.T),))


def linear_map(
    forward: Callable[[torch.Tensor], torch.Tensor],
    adjoint: Callable[[torch.Tensor], torch.Tensor],
    in_shape: Sequence[int],
    out_shape: Sequence[int],
    *,
    ranks: Iterable[int] = (),
    batched: bool = False,
) -> LinearMap:
    """A user's own linear map and its adjoint, with every transform.

    Args:
        forward: this rank's part of y = A x, from a tensor of ``in_shape`` to one of ``out_shape``. Must be linear, and
            run the same movements on every rank.
        adjoint: x = Aᴴ y (for real entries Aᵀ); check the pair with ``dd.testing.dot_test``.
        in_shape, out_shape: this rank's local shapes.
        ranks: the ranks that exchange messages inside, if any; they then agree on batches under vmap.
        batched: both functions take any number of leading batch axes. Otherwise a batch runs one by one.

    Raises:
        ShapeError: shapes or ranks that are no integers, or what cannot be called.

    Example:
        >>> A = dd.linear_map(lambda x: x.cumsum(0), lambda y: y.flip(0).cumsum(0).flip(0), (3,), (3,))
        >>> A.T(torch.tensor([1.0, 2.0, 3.0]))
        tensor([6., 5., 3.])
    """
    return LinearMap((Pair.of(forward, adjoint, in_shape, out_shape, ranks, batched, VARYING),))
