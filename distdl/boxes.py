"""Integers, runs and boxes of indices: the arithmetic under partitions, plans and files."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from operator import index as as_int
from typing import Any


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


def balanced(n: int, p: int) -> tuple[int, ...]:
    """Block sizes of ``n`` over ``p``: ⌊n/p⌋ + [i < n mod p], so the last blocks are empty where n < p."""
    q, r = divmod(n, p)
    return (q + 1,) * r + (q,) * (p - r)


def cut_evenly(weights: Sequence[float], p: int) -> tuple[int, ...]:
    """Sizes of ``p`` blocks of what has these weights, cut where their prefix sums are nearest to k/p of the whole; of
    weights that are all zero, balanced ones."""
    sums = [0.0, *accumulate(weights)]
    if not sums[-1] > 0:
        return balanced(len(weights), p)
    cuts = [0]
    for k in range(1, p):
        goal = sums[-1] * k / p
        i = min(bisect_left(sums, goal), len(weights))
        i -= i > 0 and goal - sums[i - 1] <= sums[i] - goal
        cuts.append(max(i, cuts[-1]))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], len(weights)]))


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


def collide(boxes: Sequence[list[tuple[int, int]]]) -> bool:
    """Whether two of these boxes, (start, stop) per dim, have a common element."""
    if boxes and not boxes[0]:
        return len(boxes) > 1  # of no dim, or of a grid dim that no axis uses: copies, all with the same box
    boxes = sorted(boxes)
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if other[0][0] >= box[0][1]:
                break
            if all(a0 < b1 and b0 < a1 for (a0, a1), (b0, b1) in zip(box, other)):
                return True
    return False
