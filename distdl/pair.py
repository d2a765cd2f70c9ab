"""A user's own pair of functions as a step of a map, beside the movements; and which steps may follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index as as_int
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from .engine import dispatch
from .errors import PartitionError, ShapeError
from .plan import Plan
from .world import World, world

if TYPE_CHECKING:
    from .linear_map import Space  # which stands above this file


@dataclass(frozen=True)
class Pair:
    """A step of a user's own functions, see ``linear_map``."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], torch.Tensor]
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    batched: bool
    domain: Space
    range: Space
    world_name: str = "default"

    plans: tuple[Plan, ...] = ()
    is_identity = False

    @classmethod
    def of(
        cls,
        forward: Callable[[torch.Tensor], torch.Tensor],
        adjoint: Callable[[torch.Tensor], torch.Tensor],
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        ranks: Iterable[int],
        batched: bool,
        space: Space,
    ) -> Pair:
        """The step of a user's functions, from and to ``space``.

        Raises:
            ShapeError: shapes or ranks that are no integers, or what cannot be called.
        """
        try:
            first, last, members = (tuple(map(as_int, numbers)) for numbers in (in_shape, out_shape, ranks))
        except TypeError:
            raise ShapeError(
                "shapes and ranks must be sequences of integers",
                op="linear_map",
                partitions=None,
                expected="integers",
                actual=(in_shape, out_shape, ranks),
                next_step="linear_map(f, fT, (3,), (2,), ranks=(0, 1))",
            ) from None
        if not callable(forward) or not callable(adjoint):
            raise ShapeError(
                "forward and adjoint must be functions",
                op="linear_map",
                partitions=None,
                expected="two functions of a tensor",
                actual=(forward, adjoint),
                next_step="linear_map(lambda x: 2 * x, lambda y: 2 * y, (3,), (3,))",
            )
        return cls(forward, adjoint, first, last, tuple(sorted(members)), batched, space, space)

    @property
    def world(self) -> World:
        """The world of :attr:`ranks`."""
        return world(self.world_name)

    @property
    def active(self) -> bool:
        """Whether this rank is one of them."""
        return not self.ranks or self.world.rank in self.ranks

    @property
    def partitions(self) -> str:
        """Its ranks, for messages."""
        return f"ranks {self.ranks}" if self.ranks else "each rank alone"

    @property
    def alone(self) -> tuple[Pair]:
        """This step as all the steps of one call."""
        return (self,)

    @property
    def T(self) -> Pair:
        """The adjoint."""
        return replace(
            self,
            forward=self.backward,
            backward=self.forward,
            in_shape=self.out_shape,
            out_shape=self.in_shape,
            domain=self.range,
            range=self.domain,
        )

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, checked."""
        if not isinstance(x, torch.Tensor) or x.shape != self.in_shape:
            raise ShapeError(
                "the local tensor has the wrong shape",
                op=str(self),
                expected=self.in_shape,
                actual=tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__,
                partitions=self.partitions,
                next_step="pass a tensor of the map's in_shape, batched by vmap only",
            )
        return x

    @staticmethod
    def together(steps: Sequence[Pair], xs: Sequence[torch.Tensor], recorded: bool) -> list[torch.Tensor]:
        """Each step on its tensor, of plain memory."""
        return [step.run(x) for step, x in zip(steps, dispatch.checked(steps, xs))]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The pair's forward on a tensor with any number of leading batch axes."""
        lead = x.shape[: x.dim() - len(self.in_shape)]
        if not lead or self.batched:
            y = self.forward(x)
        elif 0 in lead:
            y = x.new_empty((*lead, *self.out_shape))
        else:
            flat = x.reshape(-1, *self.in_shape)
            y = torch.stack([self.forward(one) for one in flat]).reshape(*lead, *self.out_shape)
        if not isinstance(y, torch.Tensor) or y.shape != (*lead, *self.out_shape):
            raise ShapeError(
                "the map returned another shape",
                op=str(self),
                expected=(*lead, *self.out_shape),
                actual=tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__,
                partitions=self.partitions,
                next_step="let the function return out_shape, after the batch axes that it was given",
            )
        return y.clone() if _torch.shares_memory(y, x) else y

    def __str__(self) -> str:
        return f"linear_map({getattr(self.forward, '__name__', 'forward')})"


def check_composition(a: Any, b: Any) -> None:
    """Step ``b`` takes what step ``a`` gives, on every rank that holds some of it: the answer is the same on all ranks,
    those outside too, whose placeholders are never compared. (A user's own functions know their shapes on this rank.)

    Raises:
        PartitionError: it does not; names a rank on which they differ, this one where it can.
    """
    rank, given, taken = b.world.rank, a.out_shape, b.in_shape
    if not isinstance(a, Pair) and not isinstance(b, Pair):
        gives, takes = a.plan.wanted, b.plan.held
        inside = () if gives == takes else {*gives.partition.ranks, *takes.partition.ranks}
        shapes = {r: (gives.local_shape(r), takes.local_shape(r)) for r in inside}
        wrong = [r for r, (one, other) in shapes.items() if one != other]
        given = taken = b.in_shape
        if wrong:
            rank = rank if rank in wrong else min(wrong)
            given, taken = shapes[rank]
    if given == taken and a.range.kind == b.domain.kind:
        return
    raise PartitionError(
        "these maps do not compose",
        op=f"{b} @ {a}",
        rank=rank,
        expected=f"{b.domain.kind} {taken}",
        actual=f"{a.range.kind} {given}",
        partitions=[a.partitions, b.partitions],
        next_step="put a map between them: repartition, or mark_varying for an invariant value",
    )
