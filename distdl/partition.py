"""Partitions and layouts: who holds which block of a global tensor.

A :class:`Partition` is a Cartesian grid of ranks. A :class:`Layout` lays one global shape over it. Both are plain
values: frozen, hashable, picklable, and free of MPI. *Read this file first, then plan.py, then linear_map.py.*
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import index as as_int
from typing import TYPE_CHECKING, Any

from . import _faults
from ._value import Value
from .boxes import balanced, cut_evenly, is_int
from .errors import rank_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class Partition(Value):
    """A Cartesian grid of ranks.

    Args:
        shape: size of each grid dim, all at least 1. ``()`` is a grid of one rank.
        ranks: the world ranks in row-major order of the grid, each at most once. Default: ``0 .. size-1``.
        world: name of the :class:`distdl.World` that the ranks belong to.

    Raises:
        PartitionError: sizes below 1, repeated or negative ranks, or another number of ranks than the grid has.

    Example:
        >>> P = dd.Partition((2, 2), ranks=(4, 5, 6, 7))
        >>> P.index(6), P.take(0, 1).ranks
        ((1, 0), (6, 7))
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None = None
    world: str = "default"

    def __post_init__(self) -> None:
        try:
            shape = tuple(as_int(n) for n in self.shape)
            ranks = None if self.ranks is None else tuple(as_int(r) for r in self.ranks)
        except TypeError as error:
            raise _faults.not_integers(self.shape, self.ranks, error) from None
        if any(n < 1 for n in shape):
            raise _faults.dim_without_ranks(shape)
        size = math.prod(shape)
        if ranks is None:
            ranks = tuple(range(size))
        if len(ranks) != size:
            raise _faults.not_filled(shape, size, ranks)
        if len(set(ranks)) != size or min(ranks) < 0:
            raise _faults.not_distinct(ranks)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "ranks", ranks)

    __hash__ = Value.__hash__

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def ndim(self) -> int:
        """Number of grid dims."""
        return len(self.shape)

    @property
    def active(self) -> bool:
        """Whether this process is one of the ranks."""
        return self.index() is not None

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def index(self, rank: int | None = None) -> tuple[int, ...] | None:
        """Grid coordinates of ``rank`` (default: this process), or ``None`` when it is not part of the grid.

        Raises:
            PartitionError: ``rank`` is no integer; so do all methods that take a rank.
        """
        if rank is None:
            rank = rank_of["source"](self.world)
        elif type(rank) is not int:
            rank = self._as_rank(rank)
        if rank not in self._coords:
            self._coords[rank] = self._coords_of(rank)
        return self._coords[rank]

    def _as_rank(self, rank: Any) -> int:
        if is_int(rank) and not isinstance(rank, bool):
            return as_int(rank)
        raise _faults.not_a_rank(self, rank)

    @cached_property
    def _coords(self) -> dict[int, tuple[int, ...] | None]:
        return {}  # of the ranks that were asked for: mostly this process's alone

    def _coords_of(self, rank: int) -> tuple[int, ...] | None:
        place = self._places.get(rank)
        if place is None:
            return None
        return tuple(place // math.prod(self.shape[d + 1 :]) % n for d, n in enumerate(self.shape))

    def rank_at(self, coords: Sequence[int]) -> int:
        """The rank at grid coordinates ``coords``; negative ones count from the end.

        Raises:
            PartitionError: not one coordinate for each dim, or one that the grid does not have.
        """
        at = tuple(coords) if isinstance(coords, Iterable) else None
        if at is None or len(at) != self.ndim or any(not is_int(c) or not -n <= c < n for c, n in zip(at, self.shape)):
            raise _faults.not_a_place(self, coords)
        place = 0
        for c, n in zip(at, self.shape):
            place = place * n + c % n
        return self.ranks[place]

    def dim(self, dim: int) -> int:
        """``dim`` as a non-negative grid dim.

        Raises:
            PartitionError: the grid has no such dim; so do all methods that take dims.
        """
        if not is_int(dim) or not -self.ndim <= dim < self.ndim:
            raise _faults.no_dim(self, dim)
        return as_int(dim) % self.ndim

    def dims(self, dims: int | Iterable[int] | None) -> tuple[int, ...]:
        """``dims`` (``None``: all, an int, or a sequence of distinct ones) as sorted, non-negative grid dims.

        Raises:
            PartitionError: a dim that the grid does not have, or the same one twice.
        """
        if dims is None:
            return tuple(range(self.ndim))
        several: Any = dims if isinstance(dims, Iterable) and not is_int(dims) else (dims,)
        found = sorted(self.dim(d) for d in several)
        if len(set(found)) < len(found):
            raise _faults.dim_twice(self, several)
        return tuple(found)

    def take(self, dim: int, index: int, keepdim: bool = False) -> Partition:
        """The sub-partition at ``index`` of ``dim``; the dim is dropped, or kept with size 1.

        Raises:
            PartitionError: the dim has no such index.
        """
        dim = self.dim(dim)
        n = self.shape[dim]
        if not is_int(index) or not -n <= index < n:
            raise _faults.no_index(self, dim, index)
        inner = math.prod(self.shape[dim + 1 :])
        start, step = (index % n) * inner, n * inner
        ranks = tuple(r for s in range(start, self.size, step) for r in self.ranks[s : s + inner])
        return Partition(self.shape[:dim] + (1,) * bool(keepdim) + self.shape[dim + 1 :], ranks, self.world)

    def along(self, dims: int | Iterable[int] | None = None, rank: int | None = None) -> Partition | None:
        """The fibre through ``rank``: fixed in every dim but ``dims`` (``None``: all), which keep their size.

        The fixed dims stay, with size 1. ``None`` when the rank is not part of the grid.
        """
        fibre, coords = self, self.index(rank)
        if coords is None:
            return None
        for d in set(range(self.ndim)).difference(self.dims(dims)):
            fibre = fibre.take(d, coords[d], keepdim=True)
        return fibre

    def permute(self, dims: Sequence[int]) -> Partition:
        """The same ranks with the grid's dims in the order ``dims``, as torch.permute.

        Raises:
            PartitionError: not each dim once.
        """
        if not isinstance(dims, Iterable) or self.dims(dims := tuple(dims)) != tuple(range(self.ndim)):
            raise _faults.not_an_order(self, dims)
        order = [self.dim(d) for d in dims]
        places = product(*(range(self.shape[d]) for d in order))
        ranks = tuple(self.rank_at([c for _, c in sorted(zip(order, place))]) for place in places)
        return Partition(tuple(self.shape[d] for d in order), ranks, self.world)

    def box(self, shape: tuple[int, ...], rank: int | None = None) -> tuple[tuple[int, int], ...] | None:
        """:meth:`Layout.box` of ``Layout(self, shape)``."""
        return Layout(self, shape).box(rank)

    def local_shape(self, shape: tuple[int, ...], rank: int | None = None) -> tuple[int, ...]:
        """:meth:`Layout.local_shape` of ``Layout(self, shape)``."""
        return Layout(self, shape).local_shape(rank)

    def shard(self, x_global: torch.Tensor) -> torch.Tensor:
        """:meth:`Layout.shard` of ``Layout(self, x_global.shape)``."""
        return Layout(self, getattr(x_global, "shape", (0,) * self.ndim)).shard(x_global)

    def __repr__(self) -> str:
        text = f"Partition({self.shape}"
        if self.ranks != tuple(range(self.size)):
            code = zlib.crc32(array("q", self.ranks))  # long lists are cut short, but still told apart
            text += f", ranks={self.ranks if self.size <= 16 else f'<{self.size} ranks, {code:08x}>'}"
        text += ")" if self.world == "default" else f", world={self.world!r})"
        if self.ndim not in (1, 2) or self.size > 64 or self.size == 1:
            return text
        width, columns = len(str(max(self.ranks))), self.shape[-1]
        rows = [self.ranks[i : i + columns] for i in range(0, self.size, columns)]
        return "\n".join([text, *("  [" + " ".join(f"{r:>{width}}" for r in row) + "]" for row in rows)])


def partition_of(P: Partition | Layout) -> Partition:
    """The partition of a Partition or a Layout."""
    P = P.partition if isinstance(P, Layout) else P
    if not isinstance(P, Partition):  # of a tuple of classes torch 2.11's compiler says no
        raise _faults.not_a_partition(P)
    return P


@dataclass(frozen=True, repr=False)
class Layout(Value):
    """One global shape laid over a partition of the same number of dims.

    Args:
        partition: the grid of ranks.
        shape: the global shape.
        splits: per dim ``None`` (balanced blocks) or the block sizes, one for each coordinate of that dim.

    Raises:
        PartitionError: not one size for each grid dim, negative sizes, or splits that do not sum to the size.

    Example:
        >>> L = dd.Layout(dd.Partition((3,)), (10,))
        >>> L.sizes(0), L.shard(torch.arange(10), rank=1)
        ((4, 3, 3), tensor([4, 5, 6]))
    """

    partition: Partition
    shape: tuple[int, ...]
    splits: tuple[tuple[int, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        P = self.partition
        if not isinstance(P, Partition):
            raise _faults.layout_of_no_partition(P)
        try:
            shape = tuple(as_int(n) for n in self.shape)
        except TypeError:
            raise _faults.not_a_shape(P, self.shape) from None
        if len(shape) != P.ndim or any(n < 0 for n in shape):
            raise _faults.shape_does_not_fit(P, shape)
        splits = (None,) * P.ndim if self.splits is None else self.splits
        if not isinstance(splits, Iterable) or len(splits := tuple(splits)) != P.ndim:
            raise _faults.not_one_split_per_dim(P, splits)
        splits = tuple(self._check_split(d, s, shape[d]) for d, s in enumerate(splits))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "splits", splits if any(splits) else None)

    __hash__ = Value.__hash__

    @classmethod
    def weighted(cls, partition: Partition, shape: Sequence[int], weights: Mapping[int, Any]) -> Layout:
        """The layout whose blocks have about equal weight in each dim: for each of ``weights``, {dim: the weight of
        every index of it}, prefix sums are cut at k/p of the whole. Other dims are balanced. Every rank gives the same.

        Raises:
            PartitionError: other than one finite weight, at least 0, for each index.
        """
        plain = cls(partition, shape)  # type: ignore[arg-type]
        splits: list[tuple[int, ...] | None] = [None] * plain.ndim
        for dim, given in _faults.weights_of(plain, weights).items():
            splits[dim] = cut_evenly(given, plain.partition.shape[dim])
        return cls(partition, plain.shape, tuple(splits))

    def _check_split(self, dim: int, split: Any, n: int) -> tuple[int, ...]:
        if split is None:
            return None
        p = self.partition.shape[dim]
        fits = isinstance(split, Iterable) and all(map(is_int, split := tuple(split)))
        split = tuple(as_int(s) for s in split) if fits else split
        if not fits or len(split) != p or sum(split) != n or min(split) < 0:
            raise _faults.split_does_not_fit(self.partition, dim, split, n)
        return None if split == balanced(n, p) else split  # one spelling for one layout

    @cached_property
    def _blocks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dim, per coordinate: (start, stop). An empty block lies at the end, so that blocks never overlap."""
        table = []
        for d, n in enumerate(self.shape):
            sizes = (self.splits and self.splits[d]) or balanced(n, self.partition.shape[d])
            stops = list(accumulate(sizes))
            table.append(tuple((stop - size, stop) if size else (n, n) for size, stop in zip(sizes, stops)))
        return tuple(table)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def active(self) -> bool:
        """Whether this process holds a block (perhaps an empty one)."""
        return self.partition.active

    def blocks(self, dim: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every block of ``dim``."""
        return self._blocks[dim]

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Size of every block of ``dim``."""
        return tuple(stop - start for start, stop in self._blocks[dim])

    def box(self, rank: int | None = None) -> tuple[tuple[int, int], ...] | None:
        """((start, stop), ...) of the block of ``rank`` (default: this process); ``None`` when inactive."""
        coords = self.partition.index(rank)
        return None if coords is None else tuple(blocks[c] for blocks, c in zip(self._blocks, coords))

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """The block's shape; when inactive ``(0, *the first block's other sizes)``."""
        coords = self.partition.index(rank)
        if coords not in self._local_shapes:
            box = self.box(rank)
            self._local_shapes[coords] = tuple(stop - start for start, stop in box) if box is not None else (
                0, *(blocks[0][1] - blocks[0][0] for blocks in self._blocks[1:]))  # fmt: skip
        return self._local_shapes[coords]

    @cached_property
    def _local_shapes(self) -> dict[tuple[int, ...] | None, tuple[int, ...]]:
        return {}

    def slices(self, rank: int | None = None) -> tuple[slice, ...]:
        """Slices that cut the block of ``rank`` out of the global tensor; an empty cut when inactive."""
        box = self.box(rank) or [(0, n) for n in self.local_shape(rank)[: self.ndim]]
        return tuple(slice(start, stop) for start, stop in box)

    def shard(self, x_global: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """This rank's block of a tensor that it holds whole: a view, and no message.

        Raises:
            ShapeError: ``x_global`` has another shape than the layout.
        """
        shape = tuple(getattr(x_global, "shape", ()))
        if shape != self.shape or not hasattr(x_global, "shape"):
            raise _faults.not_the_layouts_shape(self, x_global)
        if not self.ndim and self.box(rank) is None:
            return x_global.reshape(1)[:0]
        return x_global[self.slices(rank)]

    def permute(self, dims: Sequence[int]) -> Layout:
        """Of ``x.permute(dims)``, where this is x's: :meth:`Partition.permute`, with sizes and splits."""
        P, splits = self.partition.permute(dims), self.splits or (None,) * self.ndim
        return Layout(P, tuple(self.shape[d] for d in dims), tuple(splits[d] for d in dims))

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """The layout of another global shape on the same partition: splits stay where the size does, else balanced."""
        splits = self.splits or (None,) * self.ndim
        kept = tuple(s if n == m else None for s, n, m in zip(splits, self.shape, shape))
        return Layout(self.partition, tuple(shape), kept)

    def __repr__(self) -> str:
        splits = f", splits={self.splits}" if self.splits else ""
        return f"Layout({str(self.partition).splitlines()[0]}, {self.shape}{splits})"


def as_layout(P: Partition | Layout, shape: Any = None) -> Layout:
    """A Layout as it is, or the one of a partition and a global shape.

    Raises:
        ShapeError: a Layout, and another shape than its own. (PartitionError: see :class:`Layout`.)
    """
    if not isinstance(P, Layout):
        return Layout(partition_of(P), shape)
    if shape is not None and tuple(shape) != P.shape:
        raise _faults.another_shape(P, tuple(shape))
    return P
