"""In which order the dims of a partitioned tensor are transformed, and where it lies at each: pure Python, cached.

A dim is transformed where no rank splits it. So a schedule is a list of stages, each with a layout and the dims that
are transformed there, and between two stages the tensor is moved: the ranks that split a dim which is still to be
transformed turn to another dim. Such a move stays among the ranks along that dim (the pencils of mpi4py-fft), and the
schedule is the cheapest one: of the fewest moves; of these where ranks of two dims meet least; of these the one in
which the busiest rank moves the fewest elements; of these the one that turns to the next dims, as different layouts
then lead to different ones where sizes divide.
"""

from __future__ import annotations

import heapq
import math
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..errors import PartitionError
from ..linear_map import LinearMap
from ..movement.blocks import repartition_map
from ..partition import Layout, Partition

__all__: list[str] = []

Keep = tuple[int, int] | None
Places = tuple[tuple[int, ...], ...]  # for each dim of the tensor the dims of the grid whose ranks split it


class Stage(NamedTuple):
    """One stage of a transform.

    Attributes:
        move: the map that brings the tensor here, ``None`` at the first stage.
        layout: where it lies when it comes.
        dims: what is transformed here, in this order.
        result: the layout after that: sizes of transformed dims may differ.
    """

    move: LinearMap | None
    layout: Layout
    dims: tuple[int, ...]
    result: Layout


class Transform(NamedTuple):
    """What is to be transformed: everything that a schedule depends on.

    Attributes:
        layout: where the tensor lies.
        dims: the dims to be transformed; the last one to or from half a spectrum where ``real``.
        sizes: for each of them the length of the transform.
        keep: for each ``None``, or how many (low, high) wave numbers the spectrum has.
        real, inverse: which transform.
        out: where the result shall lie; ``None``: where the last stage leaves it.
        free: further dims that no rank shall split at the end.
    """

    layout: Layout
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    keep: tuple[Keep, ...]
    real: bool = False
    inverse: bool = False
    out: Layout | None = None
    free: tuple[int, ...] = ()

    def after(self, d: int) -> int:
        """Size of dim ``d`` of the result."""
        if d not in self.dims:
            return self.layout.shape[d]
        i = self.dims.index(d)
        return self.sizes[i] if self.inverse else spectrum(self, i)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the result."""
        return tuple(map(self.after, range(self.layout.ndim)))


def spectrum(t: Transform, i: int) -> int:
    """How many wave numbers the spectrum has along ``t.dims[i]``."""
    keep = t.keep[i]
    return sum(keep) if keep else wave_numbers(t, i)


def wave_numbers(t: Transform, i: int) -> int:
    """How many there are before some are cut off."""
    return t.sizes[i] // 2 + 1 if t.real and i == len(t.dims) - 1 else t.sizes[i]


@lru_cache(maxsize=1024)
def _turned(P: Partition, places: Places) -> Partition:
    """The ranks of ``P``, where those along its dims ``places[d]`` split dim d."""
    order = [a for axes in places for a in axes]
    shape = tuple(math.prod(P.shape[a] for a in axes) for axes in places)
    ranks = []
    for coords in product(*(range(P.shape[a]) for a in order)):
        of = dict(zip(order, coords))
        ranks.append(P.rank_at([of.get(a, 0) for a in range(P.ndim)]))
    return Partition(shape, tuple(ranks), P.world)


class _Search:
    """The cheapest schedule of a transform."""

    def __init__(self, t: Transform):
        self.t, self.P = t, t.layout.partition
        self.first: Places = tuple((d,) if n > 1 else () for d, n in enumerate(self.P.shape))
        self.out = t.out
        ends = () if self.out is None else self.out.partition.shape
        self.roads = {*t.dims, *(d for d, n in enumerate(ends) if n > 1)}
        if not self.roads - {*t.dims, *t.free} and len(self.roads) < 2:  # one dim only: others make room for it
            self.roads |= {*range(t.layout.ndim)} - {*t.free}

    def size(self, d: int, done: frozenset) -> int:
        """Of dim ``d`` when those of ``done`` are transformed."""
        return self.t.after(d) if d in done else self.t.layout.shape[d]

    def held(self, places: Places, done: frozenset) -> int:
        """Elements of the rank that holds the most."""
        total = 1
        for d, axes in enumerate(places):
            n = self.size(d, done)
            if axes == self.first[d] and d not in done:
                total *= max(self.t.layout.sizes(d))
            else:
                total *= -(-n // math.prod(self.P.shape[a] for a in axes))
        return total

    def here(self, places: Places, done: frozenset, e: int | None) -> list[int]:
        """What is transformed before ranks turn to dim ``e`` (``None``: they stay), in this order: that dim, and all
        that does not make the tensor larger, which is never too early. Half spectra are the first to be made, and the
        last to be read."""
        t, now = self.t, list[int]()
        last = t.dims[-1] if t.real else None
        for d in t.dims if t.inverse else t.dims[::-1]:
            waits = len(done) + len(now) + 1 < len(t.dims) if t.inverse and d == last else False
            early = e is None or d == e or t.after(d) <= t.layout.shape[d]
            if d not in done and not places[d] and early and not waits:
                now.append(d)
            elif d == last and not t.inverse and d not in done:
                break
        return now

    def run(self):
        """([(from which dim, to which) the ranks turn], the last places)."""
        t, everything = self.t, frozenset(self.t.dims)
        heap: list = [(0, 0, Fraction(0), (), (), self.first, frozenset(), False)]
        seen = set()
        while heap:
            moves, met, cost, tie, path, places, done, home = heapq.heappop(heap)
            if home:
                return path, places
            if (places, done) in seen:
                continue
            seen.add((places, done))
            if done | {*self.here(places, done, None)} == everything and not any(places[d] for d in t.free):
                share = Fraction(0)
                if self.out is not None and not self.at_home(places):
                    share = Fraction(self.held(places, everything))  # some may go to other ranks: all of it
                heapq.heappush(heap, (moves + (share > 0), met, cost + share, tie, path, places, everything, True))
            for d, axes in enumerate(places):
                if not axes or (d not in t.free and (d in done or d not in everything)):
                    continue
                for e in sorted(self.roads - {d, *t.free}):
                    before = done | {*self.here(places, done, e)}
                    turned = tuple(
                        () if i == d else (*places[e], *axes) if i == e else old for i, old in enumerate(places)
                    )
                    p = math.prod(self.P.shape[a] for a in axes)
                    share = max(self.held(places, before), self.held(turned, before)) * Fraction(p - 1, p)
                    order = (*tie, (e - d) % len(places), d)
                    meets = met + bool(places[e])
                    heapq.heappush(
                        heap, (moves + 1, meets, cost + share, order, (*path, (d, e)), turned, before, False)
                    )
        raise PartitionError(
            "no other dim can be split while this one is transformed",
            partitions=self.P,
            expected="a tensor of two dims or more",
            actual=t.layout.shape,
            next_step="repartition it to one rank, or transform rows of a tensor of more dims",
        )

    def at_home(self, places: Places) -> bool:
        return self.out is not None and _turned(self.P, places) == self.out.partition

    def stages(self) -> tuple[Stage, ...]:
        """The schedule."""
        t = self.t
        path, last = self.run()
        home = self.at_home(last)
        layout, move, places, done = t.layout, None, self.first, frozenset()
        splits = list(layout.splits or (None,) * layout.ndim)
        stages: list[Stage] = []
        for step in (*path, None):
            dims = self.here(places, done, None if step is None else step[1])
            done |= {*dims}
            for d in dims:
                splits[d] = None
            result = Layout(layout.partition, tuple(self.size(d, done) for d in range(layout.ndim)), tuple(splits))
            stages.append(Stage(move, layout, tuple(dims), result))
            if step is None:
                break
            d, e = step
            places = tuple(
                () if i == d else (*places[e], *places[d]) if i == e else old for i, old in enumerate(places)
            )
            final = home and places[e] == last[e] and result.shape[e] == t.after(e)
            splits[d], splits[e] = None, self.out.splits and self.out.splits[e] if final else None
            layout = Layout(_turned(self.P, places), result.shape, tuple(splits))
            move = repartition_map(result, layout)
        if self.out is not None and stages[-1].result != self.out:
            stages.append(Stage(repartition_map(stages[-1].result, self.out), self.out, (), self.out))
        return tuple(stages)


@lru_cache(maxsize=1024)
def schedule(t: Transform) -> tuple[Stage, ...]:
    """The stages of a transform, see the module."""
    if t.inverse and t.out is None:
        before = _before(t)
        t = t if before is None else t._replace(out=Layout(before, t.shape))
    return _Search(t).stages()


def _before(t: Transform) -> Partition | None:
    """The grid from which the forward transform comes to this layout, by the cheapest way; ``None``: there is none."""
    P, ends = t.layout.partition, []
    axes = [d for d, n in enumerate(P.shape) if n > 1 and d in t.dims]
    fixed: Places = tuple((d,) if n > 1 and d not in t.dims else () for d, n in enumerate(P.shape))
    for to in product(sorted(t.dims), repeat=len(axes)):
        places = list(fixed)
        for axis, d in zip(axes, to):
            places[d] = (*places[d], axis)
        start = Layout(_turned(P, tuple(places)), t.shape)
        forward = _Search(t._replace(layout=start, inverse=False, out=None))
        path, last = forward.run()
        if _turned(start.partition, last) == P:
            ends.append((len(path), len(ends), start.partition))
    return min(ends)[2] if ends else None
