"""Halos without corners: a cross is no product of ranges, so each dim has a plan of its own, and all go as one set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .._value import placed
from ..boxes import is_bool
from ..engine.program import wider
from ..errors import PartitionError
from ..linear_map import Move
from ..partition import Layout
from .around import Around

if TYPE_CHECKING:
    from .halo import HaloSpec  # which stands above this file

Cut = tuple[Any, ...]  # an index of a tensor: ..., for any batch axes, and a slice of each dim


def has_corners(given: Any, layout: Layout) -> bool:
    """``corners`` of a halo, which must be a truth value."""
    if not is_bool(given):
        raise PartitionError(
            "corners is no truth value",
            partitions=layout,
            expected="True or False",
            actual=given,
            next_step="corners=False for a star: what stencils of one dim at a time read",
        )
    return bool(given)


@dataclass(frozen=True)
class Star(Around):
    """Blocks -> windows whose corners are zero; or the transpose, to which corners say nothing.

    Attributes:
        plan: where blocks and whole windows lie; nothing moves by it.
        spec: the halo.
        rank: whose windows; ``None``: this process's.
    """

    spec: HaloSpec | None = None
    rank: int | None = None

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """For each dim what moves the strips beside the blocks, or its transpose."""
        steps = [Move(self.name, plan, plan.T) for plan in self.spec.strips().values()]
        return tuple(step.T if self.transposed else step for step in steps)

    @cached_property
    def T(self) -> Star:
        """The adjoint."""
        other = replace(self, plan=self.adjoint, adjoint=self.plan, transposed=not self.transposed)
        other.__dict__["T"] = self
        return other

    def on(self, rank: int) -> Star:
        """The step as ``rank`` has it."""
        return replace(self, rank=rank)

    @placed
    def _places(self) -> tuple[Cut, Cut, dict[int, list[Cut]]] | None:
        """Where the block's part lies in the block and in the window; for each dim where its two strips do, there."""
        spec: Any = self.spec
        coords = spec.in_layout.partition.index(self.rank)
        if coords is None:
            return None
        sides = [spec.sides(d, c) for d, c in enumerate(coords)]
        firsts = [(spec.in_layout.blocks(d)[c][0], spec.windows[d][c][0]) for d, c in enumerate(coords)]
        block, window = (
            (..., *(slice(a - first, b - first) for (_, a, b, _), first in zip(sides, some))) for some in zip(*firsts)
        )
        strips = {}
        for i in spec.strips():
            (lo, a, b, hi), (_, first) = sides[i], firsts[i]
            ends = (slice(lo - first, a - first), slice(b - first, hi - first))
            strips[i] = [(*window[: i + 1], end, *window[i + 2 :]) for end in ends]
        return block, window, strips

    def _lead(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(x.shape[: x.dim() - len(self.plan.held.axes)])

    def before(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The block, for each dim; of a transpose each dim's two strips of the window, side by side."""
        if self._places is None:
            return [x.new_empty((*self._lead(x), *move.plan.held.local_shape(-1))) for move in self.moves]
        if not self.transposed:
            return [x] * len(self.moves)
        return [torch.cat([x[end] for end in ends], len(self._lead(x)) + d) for d, ends in self._places[2].items()]

    def after(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """The window, of the block and the strips; of a transpose the block, to which owners' ghosts are added."""
        lead, rank = self._lead(x), -1 if self._places is None else self._rank
        shape = (*lead, *self.plan.wanted.local_shape(rank))
        if self._places is None:
            return x.new_zeros(shape)
        block, window, strips = self._places
        if self.transposed:
            y = x.new_zeros(shape, dtype=wider(x.dtype))
            y[block] = x[window].to(y.dtype)
            for part in parts:
                y += part.to(y.dtype)
            return y.to(x.dtype)
        y = x.new_zeros(shape)
        y[window] = x[block]
        for part, (d, ends) in zip(parts, strips.items()):
            cut = ends[0][d + 1].stop - ends[0][d + 1].start
            both = part.tensor_split([cut], len(lead) + d)
            for end, piece in zip(ends, both):
                y[end] = piece
        return y

    @property
    def _rank(self) -> int:
        return self.world.rank if self.rank is None else self.rank
