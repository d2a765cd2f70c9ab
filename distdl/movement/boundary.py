"""What lies beyond the edge of a tensor: a boundary is one index function for each side of a dim, ghost -> real index.

A side's kind is the mode of torch.nn.functional.pad of that name, or ``"none"``: nothing, windows are clipped there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..boxes import joined
from ..errors import PartitionError
from ..partition import Layout
from ..plan import Run

BOUNDARIES = ("none", "zeros", "circular", "reflect", "replicate")
Boundary = str | tuple[str, str]  # of a dim: one kind, or (below, above) where its sides differ
Boundaries = str | Sequence[str | Sequence[str]]  # as a user gives it: one kind for all, or a Boundary for each dim


def source_of(kind: str, i: int, n: int) -> int:
    """The real index that ghost index ``i`` of a dim of size ``n`` shows (torch.nn.functional.pad's modes)."""
    if kind == "circular":
        return i % n
    if kind == "reflect":
        return -i if i < 0 else 2 * (n - 1) - i
    return min(max(i, 0), n - 1)


def sides(boundary: Boundary) -> tuple[str, str]:
    """The kinds (below, above) of a dim."""
    return (boundary, boundary) if isinstance(boundary, str) else boundary


def settled(given: Sequence[Any], layout: Layout) -> tuple[Boundary, ...]:
    """``given``, one for each dim, checked; a pair of equal kinds is that kind: one spelling for one boundary.

    Raises:
        PartitionError: an unknown kind, or a circle with one end.
    """
    pairs = [b if isinstance(b, tuple) else (b, b) for b in given]
    unknown = [b for b, pair in zip(given, pairs) if len(pair) != 2 or any(kind not in BOUNDARIES for kind in pair)]
    if unknown:
        raise PartitionError(
            "no such boundary",
            expected=BOUNDARIES,
            actual=unknown,
            partitions=layout,
            next_step="use one of them, or one for each dim; where the sides of a dim differ, a pair (below, above)",
        )
    for d, pair in enumerate(pairs):
        if "circular" in pair and pair[0] != pair[1]:
            raise PartitionError(
                f"dim {d} is circular on one side only",
                expected='"circular" on both sides, or on none',
                actual=pair,
                partitions=layout,
                next_step='give this dim "circular", or two other boundaries',
            )
    return tuple(pair if pair[0] != pair[1] else pair[0] for pair in pairs)


def clipped(i: int, n: int, boundary: Boundary) -> int:
    """An end of a window, moved to the edge on a side beyond which there is nothing."""
    below, above = sides(boundary)
    i = max(i, 0) if below == "none" else i
    return min(i, n) if above == "none" else i


def check_reach(d: int, n: int, boundary: Boundary, windows: Sequence[tuple[int, int]], layout: Layout) -> None:
    """Raise where windows of dim ``d`` want ghosts that show nothing: a reflection ends with the tensor, and of no
    element there is no copy."""
    wanted = [(lo, hi) for lo, hi in windows if lo < hi]
    ghosts = (max([0, *(-lo for lo, _ in wanted)]), max([0, *(hi - n for _, hi in wanted)]))
    for kind, far in sorted(zip(sides(boundary), ghosts), key=lambda side: -side[1]):
        limit = {"reflect": max(n - 1, 0), "circular": far if n else 0, "replicate": far if n else 0}.get(kind, far)
        if far > limit:
            raise PartitionError(
                f"the {kind} boundary of dim {d} reaches beyond the tensor",
                partitions=layout,
                expected=f"at most {limit} ghosts",
                actual=far,
                next_step="use a smaller halo, or another boundary",
            )


def runs_of(lo: int, hi: int, n: int, boundary: Boundary) -> tuple[Run, ...]:
    """The window [lo, hi) as runs (start, stop, place in the window); ghosts that follow each other are one run."""
    start, stop = max(lo, 0), min(hi, n)
    runs = [(start, stop, start - lo)] if start < stop else []
    for kind, ghosts in zip(sides(boundary), (range(lo, min(hi, 0)), range(max(lo, n), hi))):
        if kind not in ("none", "zeros"):
            runs += [(real, real + 1, i - lo) for i in ghosts for real in [source_of(kind, i, n)]]
    return joined(runs)


def without_zeros(lo: int, hi: int, n: int, boundary: Boundary) -> tuple[int, int]:
    """The window [lo, hi) without the zeros beyond the edge."""
    below, above = sides(boundary)
    lo = min(max(lo, 0), hi) if below == "zeros" else lo
    return lo, max(min(hi, n), lo) if above == "zeros" else hi
