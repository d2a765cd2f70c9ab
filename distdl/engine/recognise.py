"""What a plan is besides a set of messages: an engine's own collective; and what arrives where, once, more often or not
at all.

Everything here follows from the plan, and only makes it run faster: :mod:`program` asks.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ..boxes import collide
from ..plan import Plan, View, alone, full


def summing_group(plan: Plan, rank: int) -> tuple[int, ...] | None:
    """The ranks among which this movement is an all-reduce, or ``None`` where it is something else."""
    view = plan.view(rank)
    if plan.held != plan.wanted or len(view.received) < 2 or not view.adds:
        return None
    whole = ((0,) * len(view.out_shape), view.out_shape)
    if any(m.boxes != (whole,) for m in view.received):
        return None
    return tuple(sorted(m.peer for m in view.received))


@lru_cache(maxsize=1024)
def gathered(plan: Plan) -> tuple[int, ...] | None:
    """The grid dims along which this movement is an all-gather of equal blocks (its transpose then is a
    reduce-scatter), or ``None`` where it is something else; the same on all ranks, whichever asks."""
    P, dims, equal = plan.held.partition, [], []
    if plan.wanted.partition != P:
        return None
    for held, wanted in zip(plan.held.axes, plan.wanted.axes):
        if held == wanted:
            equal.append(held)
            continue
        if held.dim is None or held.extents is None or wanted.dim is not None:
            return None
        n, count = held.extents[0], len(held.extents)
        blocks = tuple(((i * n, (i + 1) * n, 0),) for i in range(count))
        if held.runs != blocks or wanted.runs != (((0, n * count, 0),),) or wanted.extents != (n * count,):
            return None
        dims.append(held.dim)
    if any(a.dim in dims or not full(a) for a in equal) or not alone(P, equal, dims):
        return None
    return tuple(sorted(dims)) if dims and len(set(dims)) == len(dims) else None


def piles(view: View) -> bool:
    """Whether three messages may meet in one element: some two of them, the first one left aside, do."""
    if not view.adds:
        return False
    first, *others = view.received
    boxes = [box for m in others for box in m.boxes]
    return len(first.boxes) > 1 or len(boxes) > 64 or collide([[(a, a + n) for a, n in zip(*box)] for box in boxes])


def covered(view: View) -> bool:
    """Whether what arrives surely fills the output without a gap; of sums, whether the first message alone does."""
    total = math.prod(view.out_shape)
    if not view.received:
        return total == 0
    if not view.adds:
        return sum(m.volume for m in view.received) == total
    first = view.received[0]
    return first.volume == total and len(first.boxes) == 1  # one message of several boxes may name an element twice


def gaps(view: View):
    """The boxes in which nothing arrives; ``None`` where that is not worked out, as what arrives is not a single box,
    or adds."""
    if covered(view):
        return ()
    boxes = [box for m in view.received for box in m.boxes]
    if view.adds or not boxes:
        return None
    low = [min(starts) for starts in zip(*(starts for starts, _ in boxes))]
    high = [max(stops) for stops in zip(*([a + n for a, n in zip(*box)] for box in boxes))]
    if sum(m.volume for m in view.received) != math.prod(b - a for a, b in zip(low, high)):
        return None
    found, starts, sizes = [], [0] * len(view.out_shape), list(view.out_shape)
    for d, n in enumerate(
        view.out_shape
    ):  # what lies before and after in dim d, within what is left of the dims before it
        for a, b in ((0, low[d]), (high[d], n)):
            if a < b:
                found.append(((*starts[:d], a, *starts[d + 1 :]), (*sizes[:d], b - a, *sizes[d + 1 :])))
        starts[d], sizes[d] = low[d], high[d] - low[d]
    return tuple(found)
