"""Partitions and layouts: who holds which block of a global tensor.

A :class:`Partition` is a Cartesian grid of ranks. A :class:`Layout` lays one global shape over it. Both are plain
values: frozen, hashable, picklable, and free of MPI. *Read this file first, then plan.py, then linear_map.py.*
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import index as as_int
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import PartitionError, ShapeError, rank_of

if TYPE_CHECKING:
    import torch


class Value:
    """Hash once: partitions and layouts are dictionary keys on every call, and may hold thousands of ranks."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, *(getattr(self, name) for name in self.__dataclass_fields__)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, repr=False)
class Partition(Value):
    """A Cartesian grid of ranks.

    Args:
        shape: size of each grid dim, all at least 1. ``()`` is a grid of one rank.
        ranks: the world ranks in row-major order of the grid, in any order, without repetition. Default ``0 ..
            size-1``.
        world: name of the :class:`distdl.World` that the ranks belong to.

    Raises:
        PartitionError: sizes below 1, repeated or negative ranks, or another number of ranks than the grid has.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None = None
    world: str = "default"

    def __post_init__(self) -> None:
        try:
            shape = tuple(as_int(n) for n in self.shape)
            ranks = None if self.ranks is None else tuple(as_int(r) for r in self.ranks)
        except TypeError as error:
            raise PartitionError(
                f"shape and ranks must be sequences of integers ({error})",
                op="Partition",
                expected="integers",
                actual=(self.shape, self.ranks),
                next_step="for example Partition((2, 2), ranks=(0, 1, 2, 3))",
            ) from None
        if any(n < 1 for n in shape):
            raise PartitionError(
                "every dim needs at least one rank",
                op="Partition",
                expected="sizes >= 1",
                actual=shape,
                next_step="leave out dims without ranks, or give them 1",
            )
        size = math.prod(shape)
        if ranks is None:
            ranks = tuple(range(size))
        if len(ranks) != size:
            raise PartitionError(
                "the number of ranks does not fill the grid",
                op="Partition",
                expected=f"{size} ranks for {shape}",
                actual=f"{len(ranks)}: {ranks}",
                next_step="list one rank for each place of the grid, or leave ranks out",
            )
        if len(set(ranks)) != size or min(ranks) < 0:
            raise PartitionError(
                "ranks must be distinct and not negative",
                op="Partition",
                actual=ranks,
                expected="each rank once",
                next_step="list every rank once",
            )
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
        raise PartitionError(
            "not a rank",
            op="Partition.index",
            partitions=self,
            expected="a rank (int)",
            actual=repr(rank),
            next_step="leave it out for this process's own; P.rank_at(coords) is the rank at grid coordinates",
        )

    @cached_property
    def _coords(self) -> dict[int, tuple[int, ...] | None]:
        return {}  # of the ranks that were asked for: mostly this process's alone

    def _coords_of(self, rank: int) -> tuple[int, ...] | None:
        place = self._places.get(rank)
        if place is None:
            return None
        coords = []
        for n in reversed(self.shape):
            place, c = divmod(place, n)
            coords.append(c)
        return tuple(reversed(coords))

    def rank_at(self, coords: Sequence[int]) -> int:
        """The rank at grid coordinates ``coords``; negative ones count from the end.

        Raises:
            PartitionError: not one coordinate for each dim, or one that the grid does not have.
        """
        found = tuple(coords) if isinstance(coords, Iterable) else None
        if (
            found is None
            or len(found) != self.ndim
            or any(not is_int(c) or not -n <= c < n for c, n in zip(found, self.shape))
        ):
            raise PartitionError(
                "not a place of the grid",
                op="Partition.rank_at",
                partitions=self,
                actual=repr(coords),
                expected=f"{self.ndim} coordinates (ints) below {self.shape}",
                next_step="P.index(rank) gives a rank's coordinates",
            )
        place = 0
        for c, n in zip(found, self.shape):
            place = place * n + c % n
        return self.ranks[place]

    def dim(self, dim: int, op: str | None = None) -> int:
        """``dim`` as a non-negative grid dim."""
        if not is_int(dim) or not -self.ndim <= dim < self.ndim:
            raise PartitionError(
                f"no dim {dim}",
                op=op,
                partitions=self,
                expected=f"a dim of {self.ndim}",
                actual=dim,
                next_step="count dims from 0, or from the end with negative numbers",
            )
        return as_int(dim) % self.ndim

    def dims(self, dims: int | Iterable[int] | None, op: str | None = None) -> tuple[int, ...]:
        """``dims`` (``None``: all, an int, or a sequence of distinct ones) as sorted, non-negative grid dims."""
        if dims is None:
            return tuple(range(self.ndim))
        several: Any = dims if isinstance(dims, Iterable) and not is_int(dims) else (dims,)
        found = sorted(self.dim(d, op) for d in several)
        if len(set(found)) < len(found):
            raise PartitionError(
                "a dim is named twice",
                op=op,
                partitions=self,
                expected="distinct dims",
                actual=tuple(several),
                next_step="name each dim once",
            )
        return tuple(found)

    def take(self, dim: int, index: int, keepdim: bool = False) -> Partition:
        """The sub-partition at ``index`` of ``dim``; the dim is dropped, or kept with size 1."""
        dim = self.dim(dim, "Partition.take")
        n = self.shape[dim]
        if not is_int(index) or not -n <= index < n:
            raise PartitionError(
                f"no index {index} in dim {dim}",
                op="Partition.take",
                partitions=self,
                expected=f"an index of {n}",
                actual=index,
                next_step="count from 0, or from the end with negative numbers",
            )
        inner = math.prod(self.shape[dim + 1 :])
        start, step = (index % n) * inner, n * inner
        ranks = tuple(r for s in range(start, self.size, step) for r in self.ranks[s : s + inner])
        kept = (1,) if keepdim else ()
        return Partition(self.shape[:dim] + kept + self.shape[dim + 1 :], ranks, self.world)

    def along(self, dims: int | Iterable[int] | None = None, rank: int | None = None) -> Partition | None:
        """The fibre through ``rank``: fixed in every dim but ``dims`` (``None``: all), which keep their size.

        The fixed dims stay, with size 1. ``None`` when the rank is not part of the grid.
        """
        coords = self.index(rank)
        if coords is None:
            return None
        dims = self.dims(dims, "Partition.along")
        fibre = self
        for d in range(self.ndim):
            if d not in dims:
                fibre = fibre.take(d, coords[d], keepdim=True)
        return fibre

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


def is_int(value: Any) -> bool:
    """Whether ``value`` stands for one integer, Python's, NumPy's or torch's; a truth value does not."""
    try:
        as_int(value)
    except TypeError:
        return False
    return not is_bool(value)


def is_bool(value: Any) -> bool:
    """Whether ``value`` is a truth value, of which Python would make 0 or 1."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def partition_of(P: Partition | Layout, op: str | None = None) -> Partition:
    """The partition of a Partition or a Layout."""
    if not isinstance(P, (Partition, Layout)):
        raise PartitionError(
            "not a partition",
            op=op,
            expected="a Partition or a Layout",
            actual=repr(P),
            next_step="dd.Partition(shape), or dd.Layout(P, shape)",
            partitions=None,
        )
    return P.partition if isinstance(P, Layout) else P


def balanced(n: int, p: int) -> tuple[int, ...]:
    """Block sizes of ``n`` over ``p``: ⌊n/p⌋ + [i < n mod p], so the last blocks are empty where n < p."""
    q, r = divmod(n, p)
    return (q + 1,) * r + (q,) * (p - r)


def joined(runs: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Runs (start, stop, at) of indices that lie at ``at``, those that follow one another on both sides made one; empty
    ones left out."""
    found: list[tuple[int, int, int]] = []
    for start, stop, at in runs:
        if start == stop:
            continue
        if found and found[-1][1] == start and found[-1][2] + start - found[-1][0] == at:
            found[-1] = (found[-1][0], stop, found[-1][2])
        else:
            found.append((start, stop, at))
    return tuple(found)


def row_major(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """The block ((start, stop), ...) of a tensor as contiguous runs of the whole, in row-major order: (elements of a
    run, an iterator over their offsets), in the block's own order. Of a block without elements the runs are empty."""
    d = len(shape)
    while d and box[d - 1] == (0, shape[d - 1]):
        d -= 1
    if not d:
        return math.prod(shape), iter((0,))
    strides = [math.prod(shape[i + 1 :]) for i in range(d)]
    start, stop = box[d - 1]
    outer = product(*(range(a * s, b * s, s) for (a, b), s in zip(box[: d - 1], strides)))
    return (stop - start) * strides[d - 1], (sum(at) + start * strides[d - 1] for at in outer)


@dataclass(frozen=True, repr=False)
class Layout(Value):
    """One global shape laid over a partition of the same number of dims.

    Args:
        partition: the grid of ranks.
        shape: the global shape.
        splits: per dim ``None`` (balanced blocks) or the block sizes, one for each coordinate of that dim.

    Raises:
        PartitionError: another number of dims than the partition's, negative sizes, or splits that do not sum to the
            size.
    """

    partition: Partition
    shape: tuple[int, ...]
    splits: tuple[tuple[int, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        P = self.partition
        if not isinstance(P, Partition):
            raise PartitionError(
                "not a partition",
                op="Layout",
                expected="a Partition",
                actual=repr(P),
                partitions=None,
                next_step="dd.Partition(shape); layout.with_shape(shape) lays out another shape",
            )
        try:
            shape = tuple(as_int(n) for n in self.shape)
        except TypeError:
            raise PartitionError(
                "not a global shape",
                op="Layout",
                partitions=P,
                expected="a sequence of integers",
                actual=self.shape,
                next_step="pass the tensor's global shape, for example x.shape",
            ) from None
        if len(shape) != P.ndim or any(n < 0 for n in shape):
            raise PartitionError(
                "the shape does not fit the partition",
                op="Layout",
                partitions=P,
                expected=f"{P.ndim} sizes >= 0",
                actual=shape,
                next_step="give the partition one dim for each dim of the tensor (1: not split)",
            )
        splits = (None,) * P.ndim if self.splits is None else self.splits
        if not isinstance(splits, Iterable) or len(splits := tuple(splits)) != P.ndim:
            raise PartitionError(
                "splits needs one entry for each dim",
                op="Layout",
                expected=P.ndim,
                actual=splits,
                partitions=P,
                next_step="use None for a dim of balanced blocks",
            )
        splits = tuple(self._check_split(d, s, shape[d]) for d, s in enumerate(splits))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "splits", splits if any(splits) else None)

    __hash__ = Value.__hash__

    def _check_split(self, dim: int, split: Any, n: int) -> tuple[int, ...]:
        if split is None:
            return None
        p = self.partition.shape[dim]
        fits = isinstance(split, Iterable) and all(map(is_int, split := tuple(split)))
        split = tuple(as_int(s) for s in split) if fits else split
        if not fits or len(split) != p or sum(split) != n or min(split) < 0:
            raise PartitionError(
                f"splits of dim {dim} do not fit",
                op="Layout",
                partitions=self.partition,
                actual=split,
                expected=f"{p} sizes >= 0 that sum to {n}",
                next_step="list one size for each coordinate of that dim, or None for balanced blocks",
            )
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
        box = self.box(rank)
        if box is None:
            box = tuple((0, n) for n in self.local_shape(rank)[: self.ndim])
        return tuple(slice(start, stop) for start, stop in box)

    def shard(self, x_global: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """This rank's block of a tensor that it holds whole: a view, and no message.

        Raises:
            ShapeError: ``x_global`` has another shape than the layout.
        """
        shape = tuple(getattr(x_global, "shape", ()))
        if shape != self.shape or not hasattr(x_global, "shape"):
            raise ShapeError(
                "not the layout's global shape",
                op="Layout.shard",
                partitions=self,
                expected=self.shape,
                actual=shape if hasattr(x_global, "shape") else type(x_global).__name__,
                next_step="pass the whole tensor, or lay out its shape: layout.with_shape(x.shape)",
            )
        if not self.ndim and self.box(rank) is None:
            return x_global.reshape(1)[:0]
        return x_global[self.slices(rank)]

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """The layout of another global shape on the same partition: splits stay where the size does, else balanced."""
        splits = self.splits or (None,) * self.ndim
        kept = tuple(s if n == m else None for s, n, m in zip(splits, self.shape, shape))
        return Layout(self.partition, tuple(shape), kept)

    def __repr__(self) -> str:
        splits = f", splits={self.splits}" if self.splits else ""
        return f"Layout({str(self.partition).splitlines()[0]}, {self.shape}{splits})"


def layout_of(P: Partition | Layout, shape: Any = None, op: str | None = None) -> Layout:
    """A Layout as it is, or the one of a partition and a global shape.

    Raises:
        ShapeError: a Layout, and another shape than its own. (PartitionError: see :class:`Layout`.)
    """
    if not isinstance(P, Layout):
        return Layout(partition_of(P, op or "Layout"), shape)
    if shape is not None and tuple(shape) != P.shape:
        raise ShapeError(
            "shape differs from the layout's",
            op=op,
            partitions=P,
            expected=P.shape,
            actual=tuple(shape),
            next_step="leave shape out, or pass the partition and the shape",
        )
    return P
