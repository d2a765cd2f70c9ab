"""The algebra of maps: a composition with fewer movements and the same bits, found from the plans alone.

Two movements meet in a tensor between them: the first wants it under its own indices, the second holds it under others.
Where the second holds every index **once**, an index leads to one element, and that to the first one's index of it. So
what the second wants can be said in the first one's indices, and the two are one plan,

    y[wanted] = sum of x[held],   held: the first's;   wanted: the second's, its indices renamed

whatever else they are. What the tensor between does not have is wanted by nobody then. The transposes say the same
where the *first* wants every index once. Where neither is so (copies that are added up again), one plan would lose a
factor.

Axes are renamed one by one, which is right while a rank's place in each grid dim shows in one axis alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from .boxes import joined
from .errors import PartitionError
from .linear_map import VARYING, LinearMap, Move
from .plan import Axis, Plan, Run, Side

Steps = tuple[Any, ...]  # Move, what is like one, or Pair


def simplify(A: LinearMap) -> LinearMap:
    """The same map with fewer movements: those that undo each other are left out, and those that are one made one.

    Two repartitions in a row are one, a repartition and a halo exchange are one, ``B.T @ B`` of a bijective movement is
    nothing; steps with work of their own (``dd.linear_map``, rows by their numbers) stay. Nothing is run and nothing is
    sent: the plans decide, the same on every rank. ``print`` shows a map's steps.

    Args:
        A: any map, mostly a composition.

    Returns:
        ``A`` itself where nothing is to gain. Else a map whose values and adjoint's values are the same bits (but for
        the sign of a zero where two numbers are added): movements become one only where no element is a sum of more
        than two. No rank sends more messages than by ``A``, forward or backward, and the busiest rank of a movement
        no more elements than those of the movements that it stands for, together. What has become the identity returns
        its operand itself.

    Time: that of every rank's part of the plans, on each rank.

    Raises:
        PartitionError: ``A`` is no LinearMap.

    Example:
        >>> A = dd.maps.roll(dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> len(dd.simplify(A.T @ A).steps)
        1
    """
    if not isinstance(A, LinearMap):
        raise PartitionError(
            "not a linear map",
            op="simplify",
            partitions=None,
            expected="a map of dd.maps or dd.linear_map, or a composition",
            actual=type(A).__name__,
            next_step="pass the map, not what it gives: dd.simplify(B @ A)",
        )
    steps = _fewer(A.steps, len(A.steps), lambda one, parts: one.is_identity)
    steps = _fewer(steps, 2, lambda one, parts: one.is_identity or _sends_no_more(one, parts))
    steps = _without_identities(steps)
    return A if steps == A.steps else LinearMap(steps)


def _fewer(steps: Steps, longest: int, better: Callable[[Move, Steps], bool]) -> Steps:
    """The steps, of which as many as ``longest`` at a time are made one where that is better."""
    for n in range(min(longest, len(steps)), 1, -1):
        for i in range(len(steps) - n + 1):
            parts = steps[i : i + n]
            one = _one(parts)
            if one is not None and better(one, parts):
                return _fewer((*steps[:i], one, *steps[i + n :]), longest, better)
    return steps


def _without_identities(steps: Steps) -> Steps:
    """The steps that do something. The first one says which ranks hold the map's input: the next must do so too."""
    kept: list[Any] = [step for step in steps[1:] if not step.is_identity]
    first = steps[0]
    needless = first.is_identity and kept and isinstance(kept[0], Move)
    if needless and kept[0].plan.held.partition == first.plan.held.partition:
        return tuple(kept)
    return (first, *kept)


def _one(parts: Steps) -> Move | None:
    """These steps as one, where their plans say that it is the same."""
    plan: Plan | None = None
    for step in parts:
        if type(step) is not Move or step.domain != VARYING or step.range != VARYING or step.adjoint != step.plan.T:
            return None
        plan = step.plan if plan is None else composed(plan, step.plan)
        if plan is None:
            return None
    same = [step for step in parts if step.plan == plan]
    return same[0] if same else _named(plan, parts)


@lru_cache(maxsize=1024)
def _named(plan: Plan | None, parts: tuple[Move, ...]) -> Move:
    assert plan is not None
    if plan.is_identity():
        return Move("identity", plan, plan.T)
    first, *_ = moving = [step for step in parts if not step.is_identity]
    names = [str(step) for step in moving]
    if len(set(names)) == 1:
        return Move(first.name, plan, plan.T, transposed=first.transposed)
    inner = [name[1:-1] if name.endswith(")") else name for name in reversed(names)]
    return Move(f"({' @ '.join(inner)})", plan, plan.T)


def _sends_no_more(one: Move, parts: Sequence[Move]) -> bool:
    """Whether these steps should be one: no sum depends on its order, and no rank has more to do."""
    plans = [step.plan for step in parts]
    if max(_addends(one.plan), _addends(one.adjoint)) > 2:
        return False
    if any(min(_addends(plan), _addends(plan.T)) > 1 for plan in plans):  # all-sums, for which engines have their own
        return False
    ranks = {r for plan in plans for r in plan.ranks}
    return _busiest(one.plan) <= sum(map(_busiest, plans)) and all(
        now.messages(r) <= sum(plan.messages(r) for plan in before)
        for now, before in ((one.plan, plans), (one.adjoint, [plan.T for plan in plans]))
        for r in ranks
    )


def _busiest(plan: Plan) -> int:
    """How many elements the rank that has most of them sends or receives: the h of a superstep (Valiant, 1990)."""
    return max(side.volume(r) for side in (plan, plan.T) for r in plan.ranks)


# ---------------------------------------------------------------- two plans as one


@lru_cache(maxsize=1024)
def composed(first: Plan, second: Plan) -> Plan | None:
    """The plan of ``second`` after ``first``; ``None`` where the tensor between does not say that it is one."""
    if first.held.partition.world != second.wanted.partition.world:
        return None
    names = _renaming(second.held, first.wanted)
    if names is not None:
        return Plan(first.held, _renamed(second.wanted, names))
    names = _renaming(first.wanted, second.held)
    return None if names is None else Plan(_renamed(first.held, names), second.wanted)


def _renaming(old: Side, new: Side) -> list[list[Run]] | None:
    """For each axis (start, stop, at): indices by which ``old`` has the ranks' elements, and where those begin by which
    ``new`` has the same ones. ``None`` where that is no function of the old ones, or not one for each axis."""
    P = old.partition
    if new.partition != P or len(new.axes) != len(old.axes) or _copies(old) > 1 or _piled(new) > 1:
        return None
    found, seen = [], []
    for a, b in zip(old.axes, new.axes):
        dims = {axis.dim for axis in (a, b) if not _alike(axis)}
        if len(dims) > 1 or dims & set(seen) or (a.extents is None) != (b.extents is None):
            return None
        seen += dims
        n = P.shape[dims.pop()] if dims else 1
        if _sizes(a, n) != _sizes(b, n):
            return None
        pairs = zip(_entries(a.runs, n), _entries(b.runs, n))
        found.append(sorted(piece for olds, news in pairs for piece in _pieces(olds, news)))
    return found


def _entries(entries: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """Entries for each of ``n`` coordinates, of which there may be one for all, or some that are alike."""
    return entries if len(entries) == n else entries[:1] * n


def _sizes(axis: Axis, n: int) -> tuple[int, ...] | None:
    return None if axis.extents is None else _entries(axis.extents, n)


def _pieces(olds: Iterable[Run], news: Sequence[Run]) -> Iterable[Run]:
    """Old indices of one rank's elements, and where its new ones begin."""
    for start, stop, at in olds:
        for first, last, place in news:
            lo, hi = max(at, place), min(at + stop - start, place + last - first)
            if lo < hi:
                yield start + lo - at, start + hi - at, first + lo - place


def _renamed(side: Side, names: Sequence[list[Run]]) -> Side:
    """The side in the new indices, without what has none."""
    return Side(
        side.partition,
        tuple(Axis(a.dim, tuple(_through(runs, by) for runs in a.runs), a.extents) for a, by in zip(side.axes, names)),
    )


def _through(runs: tuple[Run, ...], names: list[Run]) -> tuple[Run, ...]:
    """Runs in the new indices; as they are where these are the old ones."""
    found = []
    for start, stop, at in runs:
        for i in range(max(bisect_right(names, (start,)) - 1, 0), len(names)):
            first, last, new = names[i]
            if first >= stop:
                break
            lo, hi = max(start, first), min(stop, last)
            if lo < hi:
                found.append((new + lo - first, new + hi - first, at + lo - start))
    renamed = joined(found)
    return runs if renamed == joined(runs) else renamed


# ---------------------------------------------------------------- how often, from above


def _alike(axis: Axis) -> bool:
    """Whether all coordinates have the same."""
    return len(set(axis.runs)) == 1 and len(set(axis.extents or ())) <= 1


def _addends(plan: Plan) -> int:
    """Of how many numbers an element is the sum, at most."""
    return _copies(plan.held) * _piled(plan.wanted)


@lru_cache(maxsize=1024)
def _copies(side: Side) -> int:
    """How often an index stands in the side, at most."""
    total = math.prod(_within(a) for a in side.axes if a.dim is None)
    for d, n in enumerate(side.partition.shape):
        tied = [a for a in side.axes if a.dim == d]
        inner = [_within(a) for a in tied]
        ways = [
            _deepest([run[:2] for runs in a.runs for run in runs]) * math.prod(inner[:i] + inner[i + 1 :])
            for i, a in enumerate(tied)
        ]
        total *= min(ways, default=n)
    return total


def _within(axis: Axis) -> int:
    """How often one coordinate has an index, at most."""
    return max(_deepest([run[:2] for run in runs]) for runs in axis.runs)


@lru_cache(maxsize=1024)
def _piled(side: Side) -> int:
    """How many indices a place of a rank's tensor has, at most."""
    return math.prod(
        max(
            sum(stop - start for start, stop, _ in runs)
            if a.extents is None
            else _deepest([(at, at + stop - start) for start, stop, at in runs])
            for runs in a.runs
        )
        for a in side.axes
    )


def _deepest(spans: Sequence[tuple[int, ...]]) -> int:
    """In how many of these spans (start, stop) a point lies, at most."""
    ends = sorted(end for start, stop in spans if start < stop for end in ((start, 1), (stop, -1)))
    depth = deepest = 0
    for _, step in ends:
        depth += step
        deepest = max(deepest, depth)
    return deepest
