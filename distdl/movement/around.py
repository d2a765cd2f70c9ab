"""Movements with local work around them: take a tensor apart, move the parts, put them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .. import _torch
from ..engine import dispatch
from ..engine import transport as traffic
from ..engine.operators import traced
from ..linear_map import Move
from ..plan import Plan


@dataclass(frozen=True)
class Around(Move):
    """A step whose plans move what :meth:`before` makes of the input, and whose output :meth:`after` makes of what
    arrives; both are linear and local. Its own ``plan`` says where inputs and outputs lie.

    A kind of step gives :attr:`moves`, :meth:`before`, :meth:`after`, :meth:`on`, and its transpose ``T``.
    """

    @property
    def moves(self) -> tuple[Move, ...]:
        """What moves the parts."""
        raise NotImplementedError

    def before(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts of ``x``, one for each of the moves; with any batch axes in front."""
        raise NotImplementedError

    def after(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """The output, in memory of its own, of the input and of what arrived."""
        raise NotImplementedError

    def on(self, rank: int) -> Around:
        """The step as ``rank`` has it, to simulate."""
        raise NotImplementedError

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the input of ``rank``, to simulate."""
        return self.plan.held.local_shape(rank)

    @property
    def is_identity(self) -> bool:
        """Never: there is work to do, also where nothing moves."""
        return False

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of what moves."""
        return tuple(plan for move in self.moves for plan in move.plans)

    def simulate(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All ranks in this process: blocks in the order of the held partition to blocks in the order of the wanted."""
        steps = [self.on(r) for r in self.plan.held.partition.ranks]
        sent = [step.before(x) for step, x in zip(steps, shards)]
        arrived = [move.plan.simulate([parts[i] for parts in sent]) for i, move in enumerate(self.moves)]
        return [step.after(x, [ys[k] for ys in arrived]) for k, (step, x) in enumerate(zip(steps, shards))]

    @staticmethod
    def together(steps: Sequence[Around], xs: Sequence[torch.Tensor], recorded: bool) -> list[torch.Tensor]:
        """Each step on its tensor, of plain memory; all parts of all of them as one set of messages."""
        xs = dispatch.checked(steps, xs)
        if dispatch.dispatch_modes() and traffic.tracer is None:  # dd.trace lists what travels inside
            return traced(steps, xs)
        xs = [_torch.plain(x) for x in xs]
        parts = [part for step, x in zip(steps, xs) for part in step.before(x)]
        moves = [move for step in steps for move in step.moves]
        if not all(move.is_identity for move in moves):
            parts = dispatch.together(moves, parts, recorded)
        left = iter(parts)
        return [step.after(x, [next(left) for _ in step.moves]) for step, x in zip(steps, xs)]


@dataclass(frozen=True)
class Whole(Around):
    """A movement of one plan, to go with others that have work around theirs: there is none."""

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The movement itself."""
        return (Move(self.name, self.plan, self.adjoint, self.domain, self.range, self.transposed),)

    @cached_property
    def T(self) -> Whole:
        """The adjoint."""
        other = Whole(self.name, self.adjoint, self.plan, self.range, self.domain, not self.transposed)
        other.__dict__["T"] = self
        return other

    def on(self, rank: int) -> Whole:
        """Itself: a plan has every rank's part."""
        return self

    def before(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensor as it is."""
        return [x]

    def after(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """What arrived."""
        return parts[0]
