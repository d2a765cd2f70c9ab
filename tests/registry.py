"""Every data movement once: its map, its spellings, and its meaning by slicing a global tensor.

A :class:`Case` knows a *serial* meaning: ``put(X, r)`` cuts what rank r holds out of a global tensor X, and ``get(X,
r)`` works out what rank r must end with, by ordinary torch functions. So any derivative has a serial twin: that of the
sum over ranks of ``loss(get(X, r))``. Nothing here asks distdl where a block lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch

import distdl as dd
import distdl.functional as F

JUNK = torch.full((2, 1), math.nan, dtype=torch.float64)  # what a rank passes that holds nothing


def randn(shape, *seeds, dtype=torch.float64):
    """Random numbers that depend on the seeds only, so that every rank can draw every rank's (by numpy: vmap permits
    it)."""
    draw = np.random.default_rng(seeds).standard_normal
    values = torch.as_tensor(draw(tuple(shape)))
    return torch.complex(values, torch.as_tensor(draw(tuple(shape)))) if dtype.is_complex else values.to(dtype)


def integers(shape, seed=0):
    """Small integers as float64: sums of them are exact in any order, so results can be compared bit by bit."""
    return torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def here():
    """(how many ranks, which one this is, a line of all of them)."""
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


@dataclass(frozen=True, eq=False)
class Case:
    """One movement on one world size. ``calls``: the functional spellings; ``map``: the same as a LinearMap."""

    name: str
    n: int
    map: object
    shape: tuple[int, ...]
    put: Callable
    get: Callable
    calls: dict[str, Callable] = field(default_factory=dict)
    voices: list[int] = field(init=False)

    def __post_init__(self):
        X = randn(self.shape, 5)
        ys = [self.get(X, r) for r in range(self.n)]
        same = [[a is not None and b is not None and torch.equal(a, b) for b in ys] for a in ys]
        object.__setattr__(self, "voices", [row.index(True) if True in row else r for r, row in enumerate(same)])

    @property
    def rank(self):
        return dd.world().rank

    @property
    def held(self):
        """Whether this rank's input matters."""
        return self.put(torch.zeros(self.shape), self.rank) is not None

    def local(self, X, junk=JUNK):
        """This rank's input, in memory of its own; ``junk`` where it holds nothing."""
        x = self.put(X, self.rank)
        return junk.to(X.dtype) if x is None else x.clone()

    def smooth(self, X):
        """The same for derivatives, which NaN times zero would spoil."""
        return self.local(X, torch.ones(2, 1))

    def wanted(self, X, rank=None):
        """This rank's right output; an empty tensor where it wants nothing."""
        y = self.get(X, self.rank if rank is None else rank)
        return X.new_empty(self.map.out_shape) if y is None else y

    def back(self, G):
        """This rank's part of a gradient with respect to X: zero for an input that is ignored."""
        return self.local(G, torch.zeros(2, 1))

    def voice(self, rank):
        """The rank whose coefficients ``rank`` uses in its loss: its own, but copies of an invariant value must be used
        alike."""
        return rank if self.map.range.copies == 1 else self.voices[rank]

    def loss(self, y, rank=None):
        """A nonlinear loss of this rank's output, with coefficients that differ by rank."""
        rank = self.rank if rank is None else rank
        return (randn(y.shape, 77, self.voice(rank)) * y.sin()).sum()

    def serial(self, X):
        """The sum over ranks of their losses, an invariant value counted once."""
        ys = [(r, self.get(X, r)) for r in range(self.n)]
        return sum(self.loss(y, r) * self.map.range.weight for r, y in ys if y is not None) + 0 * X.sum()


# ---------------------------------------------------------------- cutting global tensors


def coords(P, rank):
    """Grid coordinates, or None."""
    return tuple(map(int, np.unravel_index(P.ranks.index(rank), P.shape))) if rank in P.ranks else None


def cut(X, P, at, splits=None, dims=None):
    """The block at coordinates ``at``, cut along ``dims`` (default: all)."""
    if at is None:
        return None
    for d in range(P.ndim) if dims is None else dims:
        parts = X.split(splits[d], d) if splits and splits[d] else X.tensor_split(P.shape[d], d)
        X = parts[at[d]]
    return X


def keyed(P):
    """put of a tensor that stacks the ranks' own tensors: (*P.shape, *local shape)."""
    return lambda X, r: X[coords(P, r)] if r in P.ranks else None


def grid(n):
    """A grid of n ranks, two-dimensional where n allows."""
    b = next(b for b in range(int(n**0.5), 0, -1) if n % b == 0)
    return n // b, b


def pad_index(n, lo, hi, boundary):
    """Which element each place of a padded dim shows, by numpy; -1: zero."""
    if boundary in ("zeros", "none") or n == 0:
        return np.pad(np.arange(n), (lo, hi), constant_values=-1)
    return np.pad(
        np.arange(n), (lo, hi), mode={"circular": "wrap", "reflect": "reflect", "replicate": "edge"}[boundary]
    )


def kinds(boundary):
    """(below, above) of a dim's boundary."""
    return (boundary, boundary) if isinstance(boundary, str) else boundary


def window(X, ranges, boundaries):
    """The window of ``ranges`` ((lo, hi) per dim, may lie outside) of X."""
    for d, ((lo, hi), boundary) in enumerate(zip(ranges, boundaries)):
        n, (below, above) = X.shape[d], kinds(boundary)
        lo = min(max(lo, 0), n) if below == "none" else lo
        hi = max(min(hi, n), 0) if above == "none" else hi
        if lo >= hi:
            X = X.narrow(d, 0, 0)
            continue
        if n == 0:  # nothing but zeros, which torch cannot index out of an empty dim
            X = torch.cat([X, X.new_zeros(*X.shape[:d], hi - lo, *X.shape[d + 1 :])], d)
            continue
        before, after = max(-lo, 0), max(hi - n, 0)
        index = np.concatenate([pad_index(n, before, 0, below), pad_index(n, 0, after, above)[n:]])
        index = index[lo + before : hi + before]
        shown = X.index_select(d, torch.as_tensor(np.maximum(index, 0)))
        mask = torch.as_tensor(index >= 0).reshape(-1, *(1,) * (X.dim() - d - 1))
        X = torch.where(mask, shown, 0)
    return X


# ---------------------------------------------------------------- the registry

CASES: dict[str, tuple[int, Callable]] = {}


def case(needs=1):
    """Register ``build(n) -> dict(map=, shape=, put=, get=, calls=)`` for worlds of at least ``needs`` ranks."""

    def register(build):
        CASES[build.__name__] = (needs, build)
        return build

    return register


@cache
def get_case(name, n):
    return Case(name, n, **CASES[name][1](n))


needs = pytest.mark.mpi  # skips where the world has fewer ranks


def each_case(chosen=lambda name: True, thin=False):
    """Run a test for every case that fits the world: ``@each_case() def test_x(case)``.

    ``thin``: in worlds of more than 4 ranks, which share few cores, every third case only.
    """
    names = [n for n in CASES if chosen(n)]
    if thin and dd.world().size > 4:
        names = names[::3]
    return pytest.mark.parametrize("case", [pytest.param(_Lazy(n), id=n, marks=needs(CASES[n][0])) for n in names])


def raises_everywhere(error, call, *words):
    """``call`` raises ``error``, whose message holds all ``words``, on every rank. Returns this rank's message."""
    try:
        call()
        text = "nothing was raised"
    except error as found:
        text = str(found)
    missing = [w for w in words if w not in text]
    dd.testing.collective_assert(text != "nothing was raised" and not missing, f"{missing} not in: {text}")
    return text


class _Lazy:
    """A case that is built when first used, by then in a known world."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(get_case(self._name, dd.world().size), attribute)


# ---- repartition, scatter, gather


def _splits(where):
    return where.splits if isinstance(where, dd.Layout) else None


def _grid_of(where):
    return where.partition if isinstance(where, dd.Layout) else where


def _repartition(source, target, shape):
    P, Q = _grid_of(source), _grid_of(target)
    L_in = source if isinstance(source, dd.Layout) else dd.Layout(P, shape)
    L_out = target if isinstance(target, dd.Layout) else dd.Layout(Q, shape)
    return dict(
        map=dd.maps.repartition(L_in, target), shape=shape,
        put=lambda X, r: cut(X, P, coords(P, r), _splits(source)),
        get=lambda X, r: cut(X, Q, coords(Q, r), _splits(target)),
        calls={"bare": lambda x: F.repartition(x, P, target), "layout": lambda x: F.repartition(x, L_in, L_out),
               **({} if L_in.splits else {"shape": lambda x: F.repartition(x, P, target, shape=shape)})},
    )  # fmt: skip


def _add_repartition(name, needs, build):
    def make(n):
        return _repartition(*build(n))

    make.__name__ = f"repartition_{name}"
    case(needs)(make)


def _part(shape, ranks=None):
    return dd.Partition(tuple(shape), None if ranks is None else tuple(ranks))


for _name, _needs, _build in [
    ("rows_to_columns", 1, lambda n: (_part((n, 1)), _part((1, n)), (5, 7))),
    ("primes_3d", 1, lambda n: (_part((*grid(n), 1)), _part((1, *grid(n)[::-1])), (7, 5, 3))),
    ("empty_blocks", 2, lambda n: (_part((n, 1)), _part((1, n)), (n - 1, 2))),
    ("size_one", 1, lambda n: (_part((1, n)), _part((n, 1)), (1, 4))),
    ("no_elements", 1, lambda n: (_part((n, 1)), _part((1, n)), (0, 3))),
    ("from_last_rank", 1, lambda n: (_part((1,), (n - 1,)), _part((n,)), (7,))),
    ("disjoint", 2, lambda n: (_part((n // 2, 1)), _part((1, n - n // 2), range(n // 2, n)), (5, 4))),
    ("overlapping", 3, lambda n: (_part((n - 1, 1)), _part((1, n - 1), range(1, n)), (5, 4))),
    ("reversed_ranks", 2, lambda n: (_part((n,)), _part((n,), range(n - 1, -1, -1)), (n + 2,))),
    ("rebalance", 2, lambda n: (dd.Layout(_part((n,)), (n + 3,), ((0,) * (n - 1) + (n + 3,),)),
                                dd.Layout(_part((n,)), (n + 3,), ((n + 1, *(0,) * (n - 2), 2),)), (n + 3,))),
    ("grid_to_line", 4, lambda n: (_part((2, 2), (3, 0, 2, 1)), _part((4, 1)), (3, 5))),
    ("two_to_three", 3, lambda n: (_part((1, 2)), _part((3, 1), (2, 0, 1)), (4, 5))),
    ("identity", 1, lambda n: (_part((n, 1)), _part((n, 1)), (5, 2))),
    ("scalar", 1, lambda n: (_part(()), _part((), (n - 1,)), ())),
]:  # fmt: skip
    _add_repartition(_name, _needs, _build)


@case()
def scatter(n):
    P, shape, root = _part(grid(n)), (5, 3), n - 1
    return dict(
        map=dd.maps.scatter(dd.Layout(P, shape), root), shape=shape, put=lambda X, r: X if r == root else None,
        get=lambda X, r: cut(X, P, coords(P, r)),
        calls={"bare": lambda x: F.scatter(x, P, root=root), "shape": lambda x: F.scatter(x, P, root=root, shape=shape),
               "layout": lambda x: F.scatter(x, dd.Layout(P, shape), root=root)})  # fmt: skip


@case(2)
def scatter_to_others(n):
    P, shape = _part((n - 1,), range(1, n)), (2 * n,)
    L = dd.Layout(P, shape, ((4, *(2,) * (n - 2)),))
    return dict(
        map=dd.maps.scatter(L),
        shape=shape,
        put=lambda X, r: X if r == 0 else None,
        get=lambda X, r: cut(X, P, coords(P, r), L.splits),
        calls={"layout": lambda x: F.scatter(x, L)},
    )


@case()
def gather(n):
    P, shape = _part(grid(n)[::-1]), (4, 3)
    return dict(
        map=dd.maps.gather(dd.Layout(P, shape)), shape=shape, put=lambda X, r: cut(X, P, coords(P, r)),
        get=lambda X, r: X if r == 0 else None,
        calls={"bare": lambda x: F.gather(x, P), "shape": lambda x: F.gather(x, P, shape=shape),
               "layout": lambda x: F.gather(x, dd.Layout(P, shape))})  # fmt: skip


@case(2)
def gather_from_others(n):
    P, shape = _part((n - 1, 1), range(n - 1, 0, -1)), (n - 2, 3)  # the last block is empty
    return dict(map=dd.maps.gather(dd.Layout(P, shape), 0), shape=shape, put=lambda X, r: cut(X, P, coords(P, r)),
                get=lambda X, r: X if r == 0 else None, calls={"bare": lambda x: F.gather(x, P)})  # fmt: skip


# ---- broadcast, sum_reduce


def _broadcast(P, Q, shape):
    pad = (1,) * (Q.ndim - P.ndim)

    def get(X, r):
        if r not in Q.ranks:
            return None
        return X.reshape(*pad, *X.shape).expand(*Q.shape, *shape)[coords(Q, r)]

    return dict(
        map=dd.maps.broadcast(P, Q, shape),
        shape=(*P.shape, *shape),
        put=keyed(P),
        get=get,
        calls={"bare": lambda x: F.broadcast(x, P, Q), "shape": lambda x: F.broadcast(x, P, Q, shape=shape)},
    )


def _sum_reduce(P, Q, shape):
    pad = (1,) * (P.ndim - Q.ndim)
    summed = [d for d, (a, b) in enumerate(zip(P.shape, (*pad, *Q.shape))) if a != b]

    def get(X, r):
        total = X.sum(summed, keepdim=True) if summed else X
        return total.reshape(*Q.shape, *shape)[coords(Q, r)] if r in Q.ranks else None

    return dict(
        map=dd.maps.sum_reduce(P, Q, shape),
        shape=(*P.shape, *shape),
        put=keyed(P),
        get=get,
        calls={"bare": lambda x: F.sum_reduce(x, P, Q), "shape": lambda x: F.sum_reduce(x, P, Q, shape=shape)},
    )


@case()
def broadcast_all(n):
    return _broadcast(_part((1,), (n - 1,)), _part((n,)), (2, 3))


@case(4)
def broadcast_rows(n):
    return _broadcast(_part((2, 1), (3, 1)), _part((2, 2)), (3,))


@case(4)
def broadcast_left_padded(n):
    return _broadcast(_part((2,), (1, 2)), _part((2, 2)), (3,))  # case 22, first line


@case(3)
def broadcast_without_root(n):
    return _broadcast(_part((1,), (0,)), _part((n - 1,), range(1, n)), ())  # case 4: the root is no destination


@case()
def sum_all(n):
    return _sum_reduce(_part((n,)), _part((1,), (n - 1,)), (3,))


@case(4)
def sum_columns(n):
    return _sum_reduce(_part((2, 2), (1, 0, 3, 2)), _part((1, 2), (2, 0)), (2, 2))


@case(4)
def sum_left_padded(n):
    return _sum_reduce(_part((2, 2)), _part((2,), (1, 2)), (2,))


# ---- all_sum_reduce and the invariant pair


def _all_sum(factory, call, P, shape, dims, put=None, wanted=None, X_shape=None):
    dims = tuple(range(P.ndim)) if dims is None else dims

    def total(X, r):
        return X.sum(dims, keepdim=True).expand(*P.shape, *shape)[coords(P, r)] if r in P.ranks else None

    return dict(
        map=factory(P, shape, dims),
        shape=X_shape or (*P.shape, *shape),
        put=put or keyed(P),
        get=wanted or total,
        calls={"bare": lambda x: call(x, P, dims)},
    )


@case()
def all_sum(n):
    return _all_sum(dd.maps.all_sum_reduce, F.all_sum_reduce, _part((n,)), (3,), None)


@case(2)
def all_sum_dims(n):
    P = _part(grid(n) if grid(n)[1] > 1 else (1, n), range(n - 1, -1, -1))
    return _all_sum(dd.maps.all_sum_reduce, F.all_sum_reduce, P, (2, 2), (1,))


@case(3)
def all_sum_subset(n):
    return _all_sum(dd.maps.all_sum_reduce, F.all_sum_reduce, _part((n - 1,), range(1, n)), (), None)


@case()
def all_sum_layout(n):
    L = dd.Layout(_part(grid(n)), (5, 2 * grid(n)[1]))  # uneven along dim 0, summed along dim 1

    def get(X, r):
        at = coords(L.partition, r)
        return sum(cut(X, L.partition, (at[0], j)) for j in range(L.partition.shape[1]))

    return dict(
        map=dd.maps.all_sum_reduce(L, None, (1,)),
        shape=L.shape,
        get=get,
        put=lambda X, r: cut(X, L.partition, coords(L.partition, r)),
        calls={"layout": lambda x: F.all_sum_reduce(x, L, 1)},
    )


def _invariant(P, X_of):
    def copies(X, r):
        return X_of(X, coords(P, r)) if r in P.ranks else None

    return copies


@case()
def mark_varying(n):
    P = _part((n,))
    same = _invariant(P, lambda X, at: X)
    return _all_sum(dd.maps.mark_varying, F.mark_varying, P, (3,), None, same, same, (3,))


@case(2)
def mark_varying_dims(n):
    P = _part(grid(n) if n > 3 else (1, n))
    same = _invariant(P, lambda X, at: X[at[0]])
    return _all_sum(dd.maps.mark_varying, F.mark_varying, P, (2,), (1,), same, same, (P.shape[0], 2))


@case()
def invariant_sum(n):
    return _all_sum(dd.maps.invariant_sum, F.invariant_sum, _part((n,)), (2,), None)


@case(2)
def invariant_sum_dims(n):
    return _all_sum(dd.maps.invariant_sum, F.invariant_sum, _part(grid(n)), (), (0,))


# ---- all_gather, reduce_scatter


def _gathering(L, dims):
    P, splits = L.partition, L.splits
    kept = [d for d in range(L.ndim) if d not in dims]

    def get(X, r):
        return cut(X, P, coords(P, r), splits, kept)

    calls = {"layout": lambda x: F.all_gather(x, L, dims), "bare": lambda x: F.all_gather(x, P, dims)}
    return dict(
        map=dd.maps.all_gather(L, dims),
        shape=L.shape,
        get=get,
        calls=calls,
        put=lambda X, r: cut(X, P, coords(P, r), splits),
    )


def _reduce_scatter(L, dims):
    P, splits = L.partition, L.splits
    kept = [d for d in range(L.ndim) if d not in dims]
    lead = tuple(P.shape[d] for d in dims)

    def put(X, r):
        at = coords(P, r)
        return None if at is None else cut(X[tuple(at[d] for d in dims)], P, at, splits, kept)

    def get(X, r):
        return cut(X.sum(tuple(range(len(dims)))), P, coords(P, r), splits)

    calls = {"layout": lambda x: F.reduce_scatter(x, L, dims)}
    if splits is None:
        calls["bare"] = lambda x: F.reduce_scatter(x, P, dims)
    return dict(map=dd.maps.reduce_scatter(L, dims), shape=(*lead, *L.shape), put=put, get=get, calls=calls)


@case()
def all_gather_line(n):
    return _gathering(dd.Layout(_part((n, 1)), (5, 2)), (0,))  # uneven, or empty


@case(2)
def all_gather_everything(n):
    P = _part(grid(n), range(n - 1, -1, -1))
    return _gathering(dd.Layout(P, (3, 4)), (0, 1))


@case(2)
def all_gather_splits(n):
    return _gathering(dd.Layout(_part((n,)), (n + 2,), ((0, *(1,) * (n - 2), 4),)), (0,))


@case(4)
def all_gather_other_dim(n):
    return _gathering(dd.Layout(_part((2, 2)), (5, 3)), (1,))


@case(2)
def all_gather_dict(n):
    P = _part(grid(n) if n > 3 else (1, n))  # tensor dim 1 along partition dim 1; the rows are unrelated
    p = P.shape[1]

    def put(X, r):
        at = coords(P, r)
        return X[at[0]].tensor_split(p, -1)[at[1]]

    pairs = {-1: 1}
    A = dd.maps.gathering(P, (2, p + 1), {1: 1})
    return dict(
        map=A,
        shape=(P.shape[0], 2, p + 1),
        put=put,
        get=lambda X, r: X[coords(P, r)[0]],
        calls={
            "bare": lambda x: F.all_gather(x, P, pairs),
            "shape": lambda x: F.all_gather(x, P, pairs, shape=(2, p + 1)),
        },
    )


@case(2)
def all_gather_even(n):  # equal blocks, which an engine may take as one collective; of a dim that is no run of memory
    return _gathering(dd.Layout(_part((1, n), range(n - 1, -1, -1)), (2, 2 * n)), (1,))


@case(4)
def all_gather_even_tiles(n):
    return _gathering(dd.Layout(_part((2, 2), (2, 3, 0, 1)), (2, 4)), (0, 1))


@case()
def reduce_scatter_line(n):
    return _reduce_scatter(dd.Layout(_part((n,)), (5,)), (0,))


@case(4)
def reduce_scatter_dims(n):
    return _reduce_scatter(dd.Layout(_part((2, 2), (2, 3, 0, 1)), (3, 5)), (1,))


@case(2)
def reduce_scatter_splits(n):
    return _reduce_scatter(dd.Layout(_part((1, n)), (2, n + 1), (None, (*(1,) * (n - 2), 0, 3))), (0, 1))


@case(2)
def reduce_scatter_even(n):
    return _reduce_scatter(dd.Layout(_part((1, n)), (2, 2 * n)), (1,))


# ---- roll


def _roll(L, dim, by):
    def blocks(X, r):
        return cut(X, L.partition, coords(L.partition, r), L.splits)

    return dict(
        map=dd.maps.roll(L, dim, by),
        shape=L.shape,
        put=blocks,
        get=lambda X, r: blocks(torch.roll(X, by, dim), r),
        calls={
            "bare": lambda x: F.roll(x, L.partition, dim, by),
            "layout": lambda x: F.roll(x, L, dim, by),
            **({} if L.splits else {"shape": lambda x: F.roll(x, L.partition, dim, by, shape=L.shape)}),
        },
    )


@case()
def roll_line(n):
    return _roll(dd.Layout(_part((n,)), (2 * n + 1,)), 0, 3)


@case()
def roll_back_columns(n):
    return _roll(dd.Layout(_part(grid(n)), (4, 5)), -1, -7)


@case(2)
def roll_uneven_and_empty(n):
    return _roll(dd.Layout(_part((n, 1)), (n + 3, 2), ((0,) * (n - 2) + (n + 1, 2), None)), 0, n + 2)


@case(2)
def roll_no_elements(n):
    return _roll(dd.Layout(_part((n,), range(n - 1, -1, -1)), (0,)), 0, 1)


# ---- reorder


def dealt(n, p, order):
    """The indices that each of p coordinates has of n, worked out by numpy."""
    if order == "zigzag":
        chunks = np.array_split(np.arange(n), 2 * p)
        return [np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(p)]
    if isinstance(order, int):
        return [np.flatnonzero(np.arange(n) // order % p == i) for i in range(p)]
    return [np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in some)]) for some in order]


def _reorder(L, dim, order, inverse=False):
    P, splits = L.partition, L.splits
    d = dim % L.ndim if L.ndim else 0
    rows = [torch.as_tensor(of) for of in dealt(L.shape[d], P.shape[d], order)] if L.ndim else []

    def blocks(X, r):
        return cut(X, P, coords(P, r), splits)

    def ordered(X, r):
        at = coords(P, r)
        if at is None:
            return None
        return cut(X, P, at, splits, [e for e in range(L.ndim) if e != d]).index_select(d, rows[at[d]])

    A = dd.maps.reorder(L, dim, order)
    even = splits is None or splits[d] is None  # a bare partition does not tell to which blocks the inverse leads
    calls = {"layout": lambda x: F.reorder(x, L, dim, order, inverse=inverse)}
    if even or not inverse:
        calls["bare"] = lambda x: F.reorder(x, P, dim, order, inverse=inverse)
    if splits is None:
        calls["shape"] = lambda x: F.reorder(x, P, dim, order, inverse=inverse, shape=L.shape)
    if order == "zigzag" and not inverse:
        calls["zigzag"] = lambda x: F.zigzag(x, L, dim)
    if isinstance(order, int) and not inverse:
        calls["block_cyclic"] = lambda x: F.block_cyclic(x, L, dim, order)
    put, get = (ordered, blocks) if inverse else (blocks, ordered)
    return dict(map=A.T if inverse else A, shape=L.shape, put=put, get=get, calls=calls)


def runs_of(n, p):
    """An order with an empty coordinate, a run of nothing, and runs that come in no order."""
    third = n // 3
    first = ((third, n), (0, 0), (0, third))
    return ((),) * (p - 1) + (first,) if p < 3 else (((third, n),), *((),) * (p - 2), ((0, third),))


@case()
def reorder_zigzag(n):
    return _reorder(dd.Layout(_part((n, 1)), (2 * n + 3, 2)), 0, "zigzag")


@case(2)
def reorder_zigzag_back(n):
    return _reorder(dd.Layout(_part((1, n), range(n - 1, -1, -1)), (2, 4 * n)), 1, "zigzag", inverse=True)


@case()
def reorder_stripes(n):
    return _reorder(dd.Layout(_part(grid(n)), (5, 3)), 0, 1)


@case(2)
def reorder_blocks_uneven_and_empty(n):
    return _reorder(dd.Layout(_part((n, 1)), (n + 3, 2), ((0,) * (n - 2) + (n + 1, 2), None)), -2, 2)


@case()
def reorder_runs(n):
    return _reorder(dd.Layout(_part((n,)), (2 * n + 1,)), 0, runs_of(2 * n + 1, n))


@case(3)
def reorder_of_a_subset(n):
    return _reorder(dd.Layout(_part((n - 1,), range(n - 1, 0, -1)), (n - 2,)), 0, "zigzag")


@case(2)
def reorder_no_elements(n):
    return _reorder(dd.Layout(_part((n,)), (0,)), 0, "zigzag")


# ---- shift, permute


def _shift(P, dim, offset, periodic, shape):
    def get(X, r):
        if r not in P.ranks:
            return None
        at = list(coords(P, r))
        at[dim] -= offset
        if not periodic and not 0 <= at[dim] < P.shape[dim]:
            return torch.zeros(shape, dtype=X.dtype)
        at[dim] %= P.shape[dim]
        return X[tuple(at)]

    return dict(
        map=dd.maps.shift(P, dim, offset, periodic, shape),
        shape=(*P.shape, *shape),
        put=keyed(P),
        get=get,
        calls={"bare": lambda x: F.shift(x, P, dim, offset, periodic=periodic)},
    )


@case()
def shift_ring(n):
    return _shift(_part((n,)), 0, 1, True, (2,))


@case()
def shift_back_two(n):
    return _shift(_part((1, n), range(n - 1, -1, -1)), 1, -2, True, ())


@case()
def shift_open(n):
    return _shift(_part(grid(n)), 0, 1, False, (3,))


@case()
def shift_uneven(n):
    L = dd.Layout(_part((n,)), (n + 1,))
    P = L.partition

    def get(X, r):
        return cut(X, P, (r - 1,)) if r else torch.zeros_like(cut(X, P, (0,)))

    return dict(
        map=dd.maps.shift(L, 0, 1, False),
        shape=L.shape,
        put=lambda X, r: cut(X, P, (r,)),
        get=get,
        calls={"layout": lambda x: F.shift(x, L, 0, 1, periodic=False)},
    )


@case(2)
def permute_swap(n):
    P = _part((n,))  # 0 -> 1, 1 -> 0; the others receive nothing

    def get(X, r):
        return X[1 - r] if r < 2 else torch.zeros_like(X[r])

    return dict(
        map=dd.maps.permute(P, ((0, 1), (1, 0)), (3,)),
        shape=(n, 3),
        put=keyed(P),
        get=get,
        calls={"bare": lambda x: F.permute(x, P, ((0, 1), (1, 0)))},
    )


@case(3)
def permute_one_to_two(n):
    P = _part((3,), (2, 0, 1))  # a source may be read twice: its adjoint sums

    def get(X, r):
        return None if r > 2 else X[0] if r < 2 else torch.zeros_like(X[0])

    return dict(
        map=dd.maps.permute(P, ((2, 0), (2, 1)), (2, 2)),
        shape=(3, 2, 2),
        put=keyed(P),
        get=get,
        calls={"bare": lambda x: F.permute(x, P, [(2, 0), (2, 1)])},
    )


# ---- halo_exchange


def _windows(spec, need):
    """Blocks of one layout to the ranges that blocks of another need, along with what lies beyond the edge."""
    L, out = spec.in_layout, spec.out_layout

    def get(X, r):
        at = coords(out.partition, r)
        if at is None:
            return None
        ranges, blocks = [], []
        for d, c in enumerate(at):
            n, p = out.shape[d], out.partition.shape[d]
            sizes = out.splits[d] if out.splits and out.splits[d] else [len(b) for b in np.array_split(np.arange(n), p)]
            a, b = sum(sizes[:c]), sum(sizes[: c + 1])
            ranges.append(need(d, a, b) if a < b else (0, 0))
            blocks.append((a, b))
        whole = window(X, ranges, spec.boundary)
        return whole if spec.corners else whole * _cross(ranges, blocks, L.shape, spec.boundary)

    return dict(
        map=dd.maps.halo_exchange(spec),
        shape=L.shape,
        put=lambda X, r: cut(X, L.partition, coords(L.partition, r), L.splits),
        get=get,
        calls={"spec": lambda x: F.halo_exchange(x, spec)},
    )


def _cross(ranges, blocks, shape, boundaries):
    """One where a place of the window lies beside the block in one dim at most."""
    beside = torch.zeros((), dtype=torch.int64)
    for (lo, hi), (a, b), n, boundary in zip(ranges, blocks, shape, boundaries):
        below, above = kinds(boundary)
        lo = max(lo, 0) if below == "none" else lo
        hi = min(hi, n) if above == "none" else hi
        i = torch.arange(lo, max(hi, lo))
        beside = beside.unsqueeze(-1) + ((i < a) | (i >= b))
    return beside <= 1


def _halo(P, shape, left, right, boundary, splits=None, corners=True):
    lefts, rights = ((w,) * len(shape) if isinstance(w, int) else w for w in (left, right))
    spec = dd.HaloSpec(dd.Layout(P, shape, splits), left, right, boundary=boundary, corners=corners)
    return _windows(spec, lambda d, a, b: (a - lefts[d], b + rights[d]))


def _star(*args):
    return _halo(*args, corners=False)


def _others(L, out, need=lambda d, a, b: (a - 1, b + 2), boundary="zeros"):
    return _windows(dd.HaloSpec.needs(L, None, out, need, boundary), need)


def _add_halo(name, needs, build, of=_halo):
    def make(n):
        return of(*build(n))

    make.__name__ = f"{'star_' if of is _star else ''}halo_{name}"
    case(needs)(make)


for _name, _needs, _build in [
    ("none", 1, lambda n: (_part(grid(n)), (7, 5), 1, 1, "none")),
    ("zeros", 1, lambda n: (_part(grid(n)), (7, 5), (2, 0), (1, 1), "zeros")),
    ("circular", 1, lambda n: (_part(grid(n)[::-1]), (5, 4), (1, 2), (2, 0), "circular")),
    ("circular_twice_around", 1, lambda n: (_part((n,)), (3,), 7, 4, "circular")),
    ("reflect", 1, lambda n: (_part(grid(n)), (6, 5), 2, (1, 3), "reflect")),
    ("replicate", 1, lambda n: (_part(grid(n), range(n - 1, -1, -1)), (5, 5), (1, 3), 2, "replicate")),
    ("many_hops", 1, lambda n: (_part((n,)), (9,), 5, 6, "zeros")),
    ("empty_blocks", 2, lambda n: (_part((n,)), (n - 1,), 1, 1, "circular" if n > 2 else "zeros")),
    (
        "splits",
        2,
        lambda n: (_part((n, 1)), (n + 3, 2), 2, 1, ("reflect", "replicate"), ((4, *(0,) * (n - 2), n - 1), None)),
    ),
    ("mixed_3d", 1, lambda n: (_part((1, *grid(n))), (2, 5, 4), (0, 1, 2), (0, 2, 1), ("none", "reflect", "circular"))),
    ("subset", 3, lambda n: (_part((1, 2), (2, 0)), (3, 5), (0, 2), (0, 1), "replicate")),
    ("sides", 1, lambda n: (_part(grid(n)), (6, 5), 2, (1, 3), (("reflect", "zeros"), ("none", "replicate")))),
]:
    _add_halo(_name, _needs, _build)


def _thirds(d, a, b):
    """Three outputs of dim 1 read one input; of dim 2 all is read."""
    return {1: (a // 3, (b - 1) // 3 + 1), 2: (0, 7)}.get(d, (a, b))


for _name, _needs, _build in [  # windows of other ranks
    ("of_shared_heads", 1, lambda n: (
        dd.Layout(_part((1, 1, n)), (2, 2, 7)), dd.Layout(_part((1, n, 1)), (2, 6, 7)), _thirds)),
    ("of_other_blocks", 1, lambda n: (
        dd.Layout(_part((*grid(n), 1)), (5, 4, 2)), dd.Layout(_part((1, *grid(n)[::-1])), (5, 4, 2)))),
    ("of_half_the_size", 1, lambda n: (
        dd.Layout(_part((n,)), (9,)), dd.Layout(_part((n,), range(n - 1, -1, -1)), (4,)),
        lambda d, a, b: (2 * a - 3, 2 * b + 2), "reflect")),
    ("of_a_smaller_grid", 2, lambda n: (
        dd.Layout(_part((n, 1)), (n + 2, 3)), dd.Layout(_part((1, 1), (n - 1,)), (n + 2, 3)),
        lambda d, a, b: (a - 2, b + 1), ("circular", "none"))),
    ("uneven_and_empty_elsewhere", 2, lambda n: (
        dd.Layout(_part((n, 1)), (n + 3, 2), ((0,) * (n - 2) + (n + 1, 2), None)),
        dd.Layout(_part((1, n)), (n + 3, n + 1), (None, (0, *(1,) * (n - 2), 3))),
        lambda d, a, b: (a - 1, b + 1) if d == 0 else (a // 2, (b + 1) // 2 + 1), ("replicate", "zeros"))),
    ("disjoint", 2, lambda n: (
        dd.Layout(_part((n // 2, 1)), (5, 4)), dd.Layout(_part((1, n - n // 2), range(n // 2, n)), (5, 4)))),
    ("overlapping_ranks", 3, lambda n: (
        dd.Layout(_part((n - 1, 1)), (5, 4)), dd.Layout(_part((1, n - 1), range(1, n)), (5, 4)),
        lambda d, a, b: (a - 2, b + 2), "circular")),
    ("no_elements_elsewhere", 2, lambda n: (
        dd.Layout(_part((n, 1)), (0, 3)), dd.Layout(_part((1, n)), (0, 3)))),
    ("no_outputs", 1, lambda n: (dd.Layout(_part((n,)), (5,)), dd.Layout(_part((n,), range(n - 1, -1, -1)), (0,)))),
]:  # fmt: skip
    _add_halo(_name, _needs, _build, _others)


for _name, _needs, _build in [
    ("zeros", 1, lambda n: (_part(grid(n)), (7, 5), 1, 1, "zeros")),
    ("clipped", 1, lambda n: (_part(grid(n)), (7, 5), (2, 1), (0, 1), "none")),
    ("circular", 1, lambda n: (_part(grid(n)[::-1]), (5, 4), (1, 2), (2, 0), "circular")),
    ("reflect", 1, lambda n: (_part(grid(n)), (6, 5), 2, (1, 3), "reflect")),
    ("replicate", 1, lambda n: (_part(grid(n), range(n - 1, -1, -1)), (5, 5), (1, 3), 2, "replicate")),
    ("wider_than_blocks", 1, lambda n: (_part((n, 1)), (n + 1, 3), 2, 3, ("zeros", "circular"))),
    ("empty_blocks", 2, lambda n: (_part((1, n)), (3, n - 1), 1, 1, "zeros")),
    ("splits", 2, lambda n: (_part((n, 1)), (n + 3, 2), 2, 1, ("reflect", "replicate"),
                             ((4, *(0,) * (n - 2), n - 1), None))),
    ("of_one_dim", 1, lambda n: (_part((n,)), (2 * n,), 1, 2, "circular")),
    ("mixed_3d", 1, lambda n: (_part((1, *grid(n))), (2, 5, 4), (1, 1, 2), (0, 2, 1), ("none", "reflect", "circular"))),
    ("subset", 3, lambda n: (_part((1, 2), (2, 0)), (3, 5), (1, 2), (0, 1), "replicate")),
    ("no_ghosts", 1, lambda n: (_part(grid(n)), (5, 5), 0, 0, "zeros")),
    ("sides", 1, lambda n: (_part(grid(n)), (6, 5), 2, (1, 3), (("reflect", "zeros"), ("none", "replicate")))),
]:  # fmt: skip
    _add_halo(_name, _needs, _build, _star)


# ---- gather_rows, scatter_add_rows


def _wants(L, r):
    """Row numbers that depend on the rank, none on the second one: repeated, in no order, from everywhere."""
    n = L.shape[0] if L.ndim else 0
    k = (0 if r == 1 else 3 + 4 * r) if n else 0
    return torch.as_tensor(np.random.default_rng([r, 9]).integers(0, max(n, 1), k))


def _gather_rows(L, tail=()):
    P, wanted = L.partition, [_wants(L, r) for r in L.partition.ranks]
    index = dd.Index.known(L, wanted)

    def get(X, r):
        if r not in P.ranks:
            return None
        column = cut(X, P, coords(P, r), L.splits, range(1, L.ndim))
        return column[wanted[P.ranks.index(r)]]

    local = tuple(tail) if L.ndim == 1 else L.local_shape()[1:]
    return dict(
        map=dd.maps.gather_rows(index, local),
        shape=(*L.shape, *tail),
        put=lambda X, r: cut(X, P, coords(P, r), L.splits),
        get=get,
        calls={"bare": lambda x: F.gather_rows(x, index)},
    )


def _scatter_add_rows(L, tail=()):
    P, wanted = L.partition, [_wants(L, r) for r in L.partition.ranks]
    index, ends = dd.Index.known(L, wanted), np.cumsum([0, *map(len, wanted)])

    def put(X, r):
        i = P.ranks.index(r) if r in P.ranks else None
        return None if i is None else X[ends[i] : ends[i + 1]]

    def get(Y, r):
        total = Y.new_zeros(*L.shape, *tail).index_add(0, torch.cat(wanted), Y)
        return cut(total, P, coords(P, r), L.splits)

    return dict(
        map=dd.maps.scatter_add_rows(index, tail),
        shape=(int(ends[-1]), *tail),
        put=put,
        get=get,
        calls={"bare": lambda y: F.scatter_add_rows(y, index)},
    )


def _add_rows(name, needs, build):
    def gather(n):
        return _gather_rows(*build(n))

    def scatter(n):
        return _scatter_add_rows(*build(n))

    gather.__name__, scatter.__name__ = f"gather_rows_{name}", f"scatter_add_rows_{name}"
    case(needs)(gather)
    if "grid" not in name:
        case(needs)(scatter)


for _name, _needs, _build in [
    ("line", 1, lambda n: (dd.Layout(_part((n,)), (5 * n + 2,)), (3,))),
    ("of_numbers", 1, lambda n: (dd.Layout(_part((n,), range(n - 1, -1, -1)), (7,)),)),
    ("empty_blocks", 2, lambda n: (dd.Layout(_part((n,)), (n + 3,), ((0,) * (n - 1) + (n + 3,),)), (2, 2))),
    ("no_elements", 1, lambda n: (dd.Layout(_part((n,)), (0,)), (2,))),
    ("subset", 3, lambda n: (dd.Layout(_part((2,), (2, 0)), (9,)), (2,))),
    ("one_rank", 1, lambda n: (dd.Layout(_part((1,), (n - 1,)), (4,)), (2,))),
    ("grid", 1, lambda n: (dd.Layout(_part(grid(n)), (7, 5)),)),
    ("grid_uneven", 4, lambda n: (dd.Layout(_part((2, 2), (3, 0, 2, 1)), (6, 5), ((5, 1), (4, 1))),)),
]:
    _add_rows(_name, _needs, _build)
