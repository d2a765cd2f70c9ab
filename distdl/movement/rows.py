"""Rows by their numbers: gathered from the ranks that have them, and, the transpose, added where they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .. import _torch
from .._types import Tree
from .._value import placed
from ..errors import PartitionError, ShapeError
from ..index import Index
from ..linear_map import LinearMap, Move
from ..plan import Plan
from .around import Around
from .call import Movement, by_shape, local_shape, moved


@dataclass(frozen=True)
class Rows(Around):
    """U A S of :mod:`distdl.index`: select rows, move them, select again; or its transpose, which adds.

    Attributes:
        plan: A, which moves each row once.
        index: which rows.
        adds: whether this is the transpose, whatever its name.
    """

    index: Index | None = None
    adds: bool = False

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """A, or its transpose."""
        return (Move(self.name, self.plan, self.adjoint, transposed=self.transposed),)

    @placed
    def in_shape(self) -> tuple[int, ...]:
        """Shape of this rank's input: the rows of its block, or those that it wanted."""
        return self._shape(self.adds, self.plan.view(self.world.rank).in_shape)

    @placed
    def out_shape(self) -> tuple[int, ...]:
        """Shape of this rank's output."""
        return self._shape(not self.adds, self.plan.view(self.world.rank).out_shape)

    def _shape(self, wanted: bool, moved: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.index.repeats) if wanted else self.index.serves.n, *moved[1:])

    @cached_property
    def T(self) -> Rows:
        """The adjoint."""
        other = Rows(
            self.name, self.adjoint, self.plan, transposed=not self.transposed, index=self.index, adds=not self.adds
        )
        other.__dict__["T"] = self
        return other

    def on(self, rank: int) -> Rows:
        """The step with the rows of another rank."""
        return replace(self, index=self.index.of(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the input of ``rank``: as many rows as it has, or wants."""
        return self.on(rank)._shape(self.adds, self.plan.held.local_shape(rank))

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, checked; it must be where the row numbers are."""
        x = super().operand(x)
        if self.active and x.device != self.index.device:
            raise ShapeError(
                "the rows and their numbers lie on different devices",
                expected=self.index.device,
                actual=x.device,
                next_step="make the Index of numbers on x's device: dd.Index(L, wanted.to(x.device))",
            )
        return x

    def before(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows to serve; of a transpose, one row for all its repetitions."""
        dim = x.dim() - len(self.plan.held.axes)
        return [self.index.repeats.add(x, dim) if self.adds else self.index.serves.take(x, dim)]

    def after(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """The rows as they were wanted; of a transpose, added where they came from."""
        (y,) = parts
        dim = y.dim() - len(self.plan.held.axes)
        return self.index.serves.add(y, dim) if self.adds else self.index.repeats.take(y, dim)


def _rows(name: str, index: Index, tail_shape: Sequence[int], adds: bool) -> LinearMap:
    if not isinstance(index, Index):
        raise PartitionError(
            "not an Index",
            expected="dd.Index(L, wanted)",
            actual=index,
            next_step="make the Index once, on all ranks of the layout, of the rows that this rank wants",
        )
    key = name, local_shape(tail_shape)
    found = index.maps.get(key)
    if found is None:
        plan = Plan(*index.sides(key[1]))
        plan, back = (plan.T, plan) if adds else (plan, plan.T)
        found = index.maps[key] = LinearMap((Rows(name, plan, back, index=index, adds=adds),))
    return found


def gather_rows_map(index: Index, tail_shape: Sequence[int] = ()) -> LinearMap:
    """This rank's rows -> the rows that it wanted, each of local shape ``tail_shape``. Adjoint: scatter_add_rows.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> index = dd.Index(dd.Layout(dd.Partition((1,)), (3,)), torch.tensor([2, 0]))
        >>> dd.maps.gather_rows(index)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([3., 1.])
    """
    return _rows("gather_rows", index, tail_shape, adds=False)


def scatter_add_rows_map(index: Index, tail_shape: Sequence[int] = ()) -> LinearMap:
    """Rows as they were wanted -> added where they came from. Adjoint: gather_rows.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> index = dd.Index(dd.Layout(dd.Partition((1,)), (3,)), torch.tensor([2, 0]))
        >>> dd.maps.scatter_add_rows(index)(torch.tensor([1.0, 2.0]))
        tensor([2., 0., 1.])
    """
    return _rows("scatter_add_rows", index, tail_shape, adds=True)


@_torch.opaque
def gather_rows(x: Tree, index: Index) -> Tree:
    """The rows of ``x`` that this rank wants, from whichever ranks have them: y[k] = x[wanted[k]].

    Args:
        x: this rank's block over ``index.layout``, any dtype, on the device of the row numbers; where the layout has
            one dim, with any dims behind it, the same ones on all ranks.
        index: a :class:`distdl.Index`.

    Returns:
        (wanted rows, *sizes of a row). Adjoint: :func:`scatter_add_rows`. Messages: each row once to each rank that
        wants it, however often it does; one message for each pair of ranks that share any. No negotiation.

    Example:
        >>> index = dd.Index(dd.Layout(dd.Partition((1,)), (3,)), torch.tensor([2, 0, 2]))
        >>> F.gather_rows(torch.tensor([[1], [2], [3]]), index)
        tensor([[3],
                [1],
                [3]])
    """
    return moved(*_by_index(x, index, gather_rows_map))


@_torch.opaque
def scatter_add_rows(y: Tree, index: Index) -> Tree:
    """Add rows where they came from: x[i] = Σ y[k] over all ranks and all k with wanted[k] = i.

    Args:
        y: (wanted rows, *sizes of a row), any dtype.
        index: a :class:`distdl.Index`.

    Returns:
        This rank's block over ``index.layout``; rows that nobody wants are zero. Adjoint: :func:`gather_rows`. A rank
        adds up its own repetitions before it sends, one row for each; sums are taken in the order of ranks and rows, so
        that they are reproducible. Those of float16 and bfloat16 are taken in float32 at either end, and rounded to
        travel.

    Example:
        >>> index = dd.Index(dd.Layout(dd.Partition((1,)), (3,)), torch.tensor([2, 0, 2]))
        >>> F.scatter_add_rows(torch.tensor([[1], [2], [3]]), index)
        tensor([[2],
                [0],
                [4]])
    """
    return moved(*_by_index(y, index, scatter_add_rows_map))


def _by_index(x: Any, index: Index, map_of: Callable[[Index, tuple[int, ...]], LinearMap]) -> Movement:
    if not isinstance(index, Index):
        map_of(index, ())  # has the error
    return by_shape(x, index.layout.partition, lambda shape: map_of(index, shape[1:]))
