"""Where attention's queries are worked on, and which keys and values come there: every method as two numbers.

Queries lie over (batch, heads, seq, features). A method is u, of how many neighbours along seq the queries are brought
together (each then has 1/u of their heads), and in how many steps the keys come:

    "gather"       u = 1, one step        the keys that a rank's queries see, all at once
    "ring"         u = 1, p steps         one rank's keys at a time
    "heads"        u = p, one step        whole sequences of some of the heads (DeepSpeed-Ulysses, arXiv:2309.14509)
    ("heads", u)   p/u steps              both (Unified sequence parallel, arXiv:2405.07719)

In each, keys and values come straight from their owners by windows of needs: those heads that the rank's query heads
share (copied, where there are fewer of them than ranks), those rows that the pattern lets its queries see.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ..boxes import balanced, is_int
from ..errors import PartitionError
from ..linear_map import LinearMap
from ..movement.halo import HaloSpec, halo_exchange_map
from ..partition import Layout, Partition
from .attention_kernel import Pattern

__all__: list[str] = []

Method = str | tuple[str, int]
BATCH, HEADS, SEQ, FEATURES = range(4)


def group(L: Layout, u: int) -> Layout:
    """The layout of the queries where each u neighbours along seq share out the heads of their common rows."""
    if u == 1:
        return L
    P = L.partition
    b, h, s, _ = P.shape
    ranks = Partition((b, h, s // u, u), P.ranks, P.world).permute((0, 1, 3, 2)).ranks
    heads = tuple(n for size in L.sizes(HEADS) for n in balanced(size, u))
    rows = L.sizes(SEQ)
    seq = tuple(sum(rows[r : r + u]) for r in range(0, s, u))
    return Layout(Partition((b, h * u, s // u, 1), ranks, P.world), L.shape, (L.sizes(BATCH), heads, seq, None))


def needs(L_q: Layout, L_kv: Layout, pattern: Pattern, step: int = 0, steps: int = 1) -> Any:
    """need(d, first, stop) of a rank's queries over ``L_q``: of ``steps`` pieces of the rows the ``step``-th before
    its own."""
    shared = L_q.shape[HEADS] // max(L_kv.shape[HEADS], 1)
    rows, u = L_kv.sizes(SEQ), L_kv.partition.shape[SEQ] // steps
    bounds = list(accumulate((sum(rows[r * u : (r + 1) * u]) for r in range(steps)), initial=0))
    place = {block: c for c, block in enumerate(L_q.blocks(SEQ))}

    def need(d: int, a: int, b: int) -> tuple[int, int]:
        if d == BATCH:
            return a, b
        if d == HEADS:
            return a // shared, (b - 1) // shared + 1
        if d == FEATURES:
            return 0, L_kv.shape[FEATURES]
        lo, hi = pattern.keys(a, b, L_kv.shape[SEQ])
        if steps > 1:
            piece = (place[a, b] - step) % steps
            lo, hi = max(lo, bounds[piece]), min(hi, bounds[piece + 1])
        return lo, max(lo, hi)

    return need


@lru_cache(maxsize=1024)
def needs_spec(L_q: Layout, L_kv: Layout, pattern: Pattern, step: int = 0, steps: int = 1) -> HaloSpec:
    """The keys that come to each rank of the queries' grid, as windows of a halo exchange."""
    return HaloSpec.needs(L_kv, None, L_q, needs(L_q, L_kv, pattern, step, steps), "none")


def windows(L_q: Layout, L_kv: Layout, pattern: Pattern, step: int = 0, steps: int = 1) -> Any:
    """Per dim, per coordinate of the queries' grid: the range of the keys that comes there."""
    return needs_spec(L_q, L_kv, pattern, step, steps).windows


def windows_map(L_q: Layout, L_kv: Layout, pattern: Pattern, step: int = 0, steps: int = 1) -> LinearMap:
    """Blocks of keys -> what of them comes to each rank's queries. Adjoint: the cotangents, added to their owners."""
    return halo_exchange_map(needs_spec(L_q, L_kv, pattern, step, steps))


# ---------------------------------------------------------------- the choice


def resolved(method: Any, L_q: Layout, L_k: Layout, L_v: Layout, pattern: Pattern) -> tuple[int, int]:
    """(u, steps) of a method.

    Raises:
        PartitionError: one that there is not, or that the partition does not allow.
    """
    p = L_q.partition.shape[SEQ]
    if method == "auto":
        method = cheaper(L_q, L_k, L_v, pattern)
    if method in ("gather", "ring"):
        return 1, p if method == "ring" else 1
    if method == "heads":
        return p, 1
    if isinstance(method, tuple) and len(method) == 2 and method[0] == "heads" and is_int(method[1]):
        u = int(method[1])
        if u >= 1 and p % u == 0:
            return u, p // u
        raise PartitionError(
            "the ranks along seq do not make groups of this size",
            partitions=L_q,
            expected=f"a divisor of {p}",
            actual=method,
            next_step='choose another u of ("heads", u), or another partition',
        )
    raise PartitionError(
        "no such method",
        partitions=L_q,
        expected='"gather", "ring", "heads", ("heads", u) or "auto"',
        actual=method,
        next_step="use one of them",
    )


@lru_cache(maxsize=1024)
def cheaper(L_q: Layout, L_k: Layout, L_v: Layout, pattern: Pattern) -> str:
    """ "gather" or "heads": whichever brings fewer elements to all ranks together; gather, where ranks would have no
    heads."""
    p = L_q.partition.shape[SEQ]
    if p == 1 or min(L_q.sizes(HEADS)) < p:
        return "gather"
    return "heads" if moved(L_q, L_k, L_v, pattern, p) < moved(L_q, L_k, L_v, pattern, 1) else "gather"


def moved(L_q: Layout, L_k: Layout, L_v: Layout, pattern: Pattern, u: int) -> int:
    """How many elements come to other ranks than their owners, forward: of keys and values, and with u > 1 of queries
    and results. (In how many steps does not matter.)"""
    there, total = group(L_q, u), 0
    out = L_q.with_shape((*L_q.shape[:FEATURES], L_v.shape[FEATURES]))
    blocks = tuple(there.blocks(d) for d in range(4))
    pairs = [(windows(there, L, pattern), L) for L in (L_k, L_v)]
    pairs += [] if u == 1 else [((*blocks[:FEATURES], ((0, L.shape[FEATURES]),)), L) for L in (L_q, out)]
    for rank in there.partition.ranks:
        at: Any = there.partition.index(rank)
        for wanted, L in pairs:
            box = [dim[c] for dim, c in zip(wanted, at)]
            held: Any = L.box(rank)
            own = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(box, held)]
            total += math.prod(b - a for a, b in box) - math.prod(max(n, 0) for n in own)
    return total
