"""Plans: every data movement as two lists of placed boxes.

    y[wanted] = sum of x[held]    over every pair of pieces whose boxes meet

A *piece* says "rank r has (or wants) this box of a global index space at this place of its local tensor". Overlap among
wanted pieces is copying, overlap among held pieces is summing, and **the transpose swaps the two sides**. Nothing here
knows MPI or torch, and no message is sent to build a plan.

A side is a rule, not a table of all ranks' boxes: a grid of ranks, and for each dim of the index space an :class:`Axis`
that says what each grid coordinate has there. A rank's pieces are the product over the axes, and so is the answer to
"who meets this box?", which therefore costs what this rank's own messages cost.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from ._value import Value
from .boxes import collide
from .partition import Layout, Partition

if TYPE_CHECKING:
    import torch

Run = tuple[int, int, int]  # start and stop in the index space, and where that start lies in the local tensor


@dataclass(frozen=True)
class Axis(Value):
    """One dim of the index space, as one side sees it.

    Args:
        dim: the grid dim whose coordinate selects the runs, or ``None``: every rank has the same.
        runs: for each coordinate the runs (start, stop, at) that it has of this dim.
        extents: for each coordinate the size of the local tensor's dim. ``None`` makes this a *key*: a coordinate that
            says whose tensor a piece belongs to, and that the local tensor lacks.
    """

    dim: int | None
    runs: tuple[tuple[Run, ...], ...]
    extents: tuple[int, ...] | None

    __hash__ = Value.__hash__

    def at(self, coords: Sequence[int] | None) -> int:
        """The entry that a rank with these grid coordinates uses."""
        return 0 if self.dim is None else coords[self.dim]

    @cached_property
    def _sorted(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """All runs by their starts: the starts, the largest stop so far, and the coordinates."""
        found = sorted((start, stop, c) for c, runs in enumerate(self.runs) for start, stop, _ in runs if start < stop)
        starts, stops, coords = zip(*found) if found else ((), (), ())
        return starts, tuple(accumulate(stops, max)), coords

    def near(self, runs: Iterable[Run]) -> set[int]:
        """The coordinates that may have a run that meets one of ``runs``: by bisection, so that a view of a grid of
        thousands looks at its own peers only."""
        starts, stops, coords = self._sorted
        return {c for start, stop, _ in runs for c in coords[bisect_right(stops, start) : bisect_left(starts, stop)]}


def split(blocks: Iterable[tuple[int, int]], dim: int) -> Axis:
    """A dim cut into (start, stop) blocks along a grid dim."""
    return Axis(dim, tuple(((start, stop, 0),) for start, stop in blocks), tuple(b - a for a, b in blocks))


def whole(n: int) -> Axis:
    """A dim that every rank has whole."""
    return Axis(None, (((0, n, 0),),), (n,))


def key(dim: int | None, keys: Iterable[int | None]) -> Axis:
    """A key axis: the rank at coordinate i of a grid dim has key ``keys[i]`` (``None``: it has nothing).

    The local tensor lacks the dim, so that whatever arrives under any key arrives at the same place: 0.
    """
    return Axis(dim, tuple(() if k is None else ((k, k + 1, 0),) for k in keys), None)


@dataclass(frozen=True)
class Side(Value):
    """What every rank of a grid holds or wants: the product of its axes."""

    partition: Partition
    axes: tuple[Axis, ...]

    __hash__ = Value.__hash__

    @staticmethod
    def of(layout: Layout) -> Side:
        """Each rank has its block."""
        return Side(layout.partition, tuple(split(layout.blocks(d), d) for d in range(layout.ndim)))

    @cached_property
    def is_plain(self) -> bool:
        """Whether no rank has several runs of one axis."""
        return all(len(runs) < 2 for a in self.axes for runs in a.runs)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor; on a rank outside the grid ``(0, *the first rank's other sizes)``."""
        coords = self.partition.index(rank)
        local = [a for a in self.axes if a.extents is not None]
        if coords is None:
            return (0, *(a.extents[0] for a in local[1:]))
        return tuple(a.extents[a.at(coords)] for a in local)

    def runs(self, rank: int) -> list[tuple[Run, ...]] | None:
        """Per axis the runs of ``rank``, or ``None`` outside the grid."""
        coords = self.partition.index(rank)
        return None if coords is None else [a.runs[a.at(coords)] for a in self.axes]


Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts and sizes, in a local tensor
Overlaps = list[tuple[int, int, int]]  # of one dim: place in the held tensor, in the wanted tensor, length


@dataclass(frozen=True)
class Message:
    """What passes between this rank and one peer: the boxes, in one order on both ends."""

    peer: int
    boxes: tuple[Box, ...]
    volume: int


@dataclass(frozen=True, eq=False)
class View:
    """One rank's part of a plan.

    ``kept`` are the messages that stay here, as (where from, where to). ``received`` orders every arrival, kept ones
    included, as sums are to be taken: largest first, then in grid order, so that results do not depend on timing and
    are bitwise equal on ranks that want the same box. ``adds``: some element arrives more than once.
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    sends: tuple[Message, ...]
    received: tuple[Message, ...]
    kept: Message | None
    adds: bool
    programs: dict[Any, Any] = field(default_factory=dict, repr=False)  # the executor's notes, per shape and strides


@dataclass(frozen=True)
class Plan(Value):
    """A data movement: what is held, and what is wanted. ``plan.T`` is its transpose, and ``plan.T.T == plan``."""

    held: Side
    wanted: Side

    __hash__ = Value.__hash__

    @cached_property
    def T(self) -> Plan:
        """The transpose: wanted and held swapped."""
        other = Plan(self.wanted, self.held)
        other.__dict__["T"] = self
        return other

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, sorted."""
        return tuple(sorted({*self.held.partition.ranks, *self.wanted.partition.ranks}))

    @cached_property
    def digest(self) -> str:
        """A short fingerprint, equal in every process (Python's own hashes are not)."""
        sides = [(s.partition.shape, s.partition.ranks, s.partition.world, s.axes) for s in (self.held, self.wanted)]
        return hashlib.sha256(repr(sides).encode()).hexdigest()[:16]

    @property
    def named(self) -> tuple[str, str]:
        """For errors: the movement that this is the plan of, as its map has said, and the partitions."""
        held, wanted = (str(side.partition).splitlines()[0] for side in (self.held, self.wanted))
        return self.__dict__.get("name", "a movement"), held if held == wanted else f"{held} -> {wanted}"

    def is_identity(self) -> bool:
        """Whether every rank keeps exactly what it has: the same on all ranks, whichever asks."""
        side = self.held
        if side != self.wanted or not side.is_plain:
            return False
        return alone(side.partition, side.axes) and all(map(full, side.axes))

    def view(self, rank: int) -> View:
        """The part of ``rank``: its messages, and how arrivals combine. Cached."""
        view = self._views.get(rank)
        if view is None:
            view = self._views[rank] = self._view(rank)
        return view

    @cached_property
    def _views(self) -> dict[int, View]:
        return {}

    def _view(self, rank: int) -> View:
        in_shape, out_shape = self.held.local_shape(rank), self.wanted.local_shape(rank)
        fro, adds = self._meetings(rank, sending=False)
        sent = received = [*_messages(fro, 1, self.wanted)]
        if self.held != self.wanted or not self.held.is_plain:  # else what goes is what comes
            sent = [*_messages(self._meetings(rank, sending=True)[0], 0, self.held)]
        received = sorted(received, key=lambda m: -m.volume)  # stable: grid order among equals
        sends = tuple(sorted((m for m in sent if m.peer != rank), key=lambda m: m.peer))
        return View(in_shape, out_shape, sends, tuple(received), next((m for m in sent if m.peer == rank), None), adds)

    def _meetings(self, rank: int, sending: bool) -> tuple[list[tuple[int, dict[int, Overlaps]]], bool]:
        """Whose pieces meet this rank's: [(peer, per axis the overlaps)]; whether two of them meet each other here."""
        mine, theirs = (self.held, self.wanted) if sending else (self.wanted, self.held)
        runs = mine.runs(rank)
        if runs is None:
            return [], False

        def overlaps(axis: int, coordinate: int) -> Overlaps:
            other = theirs.axes[axis].runs[coordinate]
            return _overlaps(runs[axis], other) if sending else _overlaps(other, runs[axis])

        grid = theirs.partition
        fixed = {i: overlaps(i, 0) for i, a in enumerate(theirs.axes) if a.dim is None}
        if not all(fixed.values()):
            return [], False
        collides = any(collide([_arrivals([o]) for o in found]) for found in fixed.values())
        candidates = []  # per grid dim: the coordinates that meet, with their overlaps
        for d, n in enumerate(grid.shape):
            tied = [i for i, a in enumerate(theirs.axes) if a.dim == d]
            found, near = [], [theirs.axes[i].near(runs[i]) for i in tied]
            for c in sorted(set.intersection(*near)) if near else range(n):
                per_axis = {i: overlaps(i, c) for i in tied}
                if all(per_axis.values()):
                    found.append((c, per_axis))
            candidates.append(found)
            if not sending:
                boxes = [_arrivals(entry) for _, per_axis in found for entry in product(*per_axis.values())]
                collides = collides or collide(boxes)
        places = [(0, fixed)]
        for n, found in zip(grid.shape, candidates):
            places = [(p * n + c, {**axes, **of_c} if of_c else axes) for p, axes in places for c, of_c in found]
        return [(grid.ranks[p], axes) for p, axes in places], collides and bool(places)

    def simulate(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run every rank's part in this process: the held blocks in the order of ``held.partition.ranks`` to the wanted
        ones in the order of ``wanted.partition.ranks``. For tests, and to learn from."""
        from .engine.exchange import simulate  # the executor stands above this file

        return simulate(self, shards)

    def messages(self, rank: int) -> int:
        """How many messages ``rank`` sends to others."""
        return len(self.view(rank).sends)

    def volume(self, rank: int) -> int:
        """How many elements ``rank`` sends to others; times the item size: bytes."""
        return sum(m.volume for m in self.view(rank).sends)


def fills(runs: Sequence[Run], n: int) -> bool:
    """Whether these runs are one that is all of a local dim of size ``n``."""
    return len(runs) == 1 and runs[0][2] == 0 and runs[0][1] - runs[0][0] == n


def full(axis: Axis) -> bool:
    """Whether every coordinate has this dim without a gap."""
    return all(axis.runs if axis.extents is None else map(fills, axis.runs, axis.extents))


def alone(P: Partition, axes: Iterable[Axis], dims: Iterable[int] = ()) -> bool:
    """Whether no two ranks that differ in another grid dim than ``dims`` have a common element."""
    apart = {a.dim for a in axes if not collide([[(s, e)] for runs in a.runs for s, e, _ in runs if s < e])}
    return all(n == 1 or d in apart or d in dims for d, n in enumerate(P.shape))


def _overlaps(held: Iterable[Run], wanted: Sequence[Run]) -> Overlaps:
    """Where runs meet: (place in the held tensor, place in the wanted tensor, length), held runs outermost."""
    found = []
    for h0, h1, h_at in held:
        for w0, w1, w_at in wanted:
            lo, hi = max(h0, w0), min(h1, w1)
            if lo < hi:
                found.append((h_at + lo - h0, w_at + lo - w0, hi - lo))
    return found


def _arrivals(overlaps: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The box in the wanted tensor: (start, stop) per dim."""
    return [(w, w + n) for _, w, n in overlaps]


def _messages(meetings: Sequence[tuple[int, dict[int, Overlaps]]], end: int, side: Side) -> Iterable[Message]:
    """The message of each meeting, with the boxes as they lie at one end (0: the held tensor, 1: the wanted one)."""
    local, keys = ([i for i, a in enumerate(side.axes) if (a.extents is None) == key] for key in (False, True))
    made: dict[Any, tuple[tuple[Box, ...], int]] = {}  # in a sum of thousands all are alike
    for peer, axes in meetings:
        like = (*map(len, map(axes.get, keys)), *map(id, map(axes.get, local)))
        if like not in made:
            picks = product(*(axes[i] for i in local))
            boxes = tuple((tuple(o[end] for o in picked), tuple(o[2] for o in picked)) for picked in picks)
            boxes *= math.prod(like[: len(keys)])
            made[like] = boxes, sum(math.prod(sizes) for _, sizes in boxes)
        yield Message(peer, *made[like])
