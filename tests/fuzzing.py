"""Random movements, and every pair of transforms of them, beside serial torch.

:func:`draw` takes a ``random.Random`` (hypothesis has one that shrinks) and gives a :class:`registry.Case`: the map,
its spellings, and its meaning by slicing a global tensor. :func:`compare` runs one pair of transforms on it, with all
ranks in this process (:class:`Simulated`) or as one rank among others (:class:`Spmd`). The cells of a report are
operator x kind x pair.

Kinds: ``uneven`` blocks of different sizes, none empty, on any ranks in any order; ``empty``: at least one block is
empty;
``disjoint``: no rank both holds and wants (where an operator has one partition only: ranks of the world take no part).
"""

from __future__ import annotations

import itertools
import math
import zlib

import registry
import torch
from registry import Case, coords, cut, randn, window
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F

KINDS = ("uneven", "empty", "disjoint")
PRIMES = (1, 2, 3, 5, 7)
DTYPES = (torch.float64, torch.float64, torch.float64, torch.float64, torch.float32, torch.complex128)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.float16, torch.bfloat16, torch.complex64)
JUNK = ((2, 1), (), (3,), (0, 2), (1, 2, 1))
RTOL = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-4}


class Unfit(Exception):
    """These choices make no example of this kind: draw others."""


def seed_of(*names) -> int:
    """A seed that is equal in every process."""
    return zlib.crc32(repr(names).encode())


# ---------------------------------------------------------------- drawing partitions and layouts


def _grid(rng, ndim, most, least=2):
    """A grid of ``least`` to ``most`` ranks."""
    grids = [g for g in itertools.product(range(1, 5), repeat=ndim) if least <= math.prod(g) <= most]
    if not grids:
        raise Unfit
    return rng.choice(grids)


def _blocks(rng, p, kind):
    """(size, splits) of a dim over ``p`` ranks."""
    if p == 1:
        return rng.choice(PRIMES[:4]), None
    if kind == "uneven":
        if rng.random() < 0.5:
            return p * rng.randint(1, 2) + rng.randint(1, p - 1), None
        sizes = [rng.randint(1, 4) for _ in range(p)]
        sizes[rng.randrange(p)] += 1
        return sum(sizes), tuple(sizes)
    if kind == "empty":
        if rng.random() < 0.4:
            return rng.randint(1, p - 1), None
        sizes = [rng.randint(0, 4) for _ in range(p)]
        sizes[rng.randrange(p)] = 0
        return sum(sizes), tuple(sizes)
    n = rng.choice((*PRIMES, p, 2 * p))
    cuts = sorted(rng.randint(0, n) for _ in range(p - 1))
    return n, None if rng.random() < 0.5 else tuple(b - a for a, b in zip([0, *cuts], [*cuts, n]))


def _layout(rng, n, kind, *, ndim=None, ranks=None, equal=(), least=2, zero=False):
    """A layout of that kind. ``equal``: dims whose blocks all have one size."""
    ndim = rng.randint(1, 3) if ndim is None else ndim
    ranks = list(range(1 if kind == "disjoint" else 0, n)) if ranks is None else list(ranks)
    grid = _grid(rng, ndim, len(ranks), least)
    shape, splits = [], []
    for d, p in enumerate(grid):
        size, split = (p * rng.randint(1, 2), None) if d in equal else _blocks(rng, p, kind)
        shape.append(size)
        splits.append(split)
    if zero:
        d = rng.randrange(ndim)
        shape[d], splits[d] = 0, None
    return dd.Layout(dd.Partition(grid, rng.sample(ranks, math.prod(grid))), shape, splits)


def _is_kind(kind, layouts) -> bool:
    """Whether the layouts are what the kind says, by their block sizes."""
    sizes = [math.prod(L.local_shape(r)) for L in layouts for r in L.partition.ranks]
    if kind == "uneven":
        return 0 not in sizes and any(len(set(L.sizes(d))) > 1 for L in layouts for d in range(L.ndim))
    return kind != "empty" or (0 in sizes and any(sizes))


def _halves(rng, n):
    """Two disjoint sets of ranks."""
    if n < 2:
        raise Unfit
    ranks = rng.sample(range(n), n)
    k = rng.randint(1, n - 1)
    return ranks[:k], ranks[k:]


def _dims(rng, L):
    """Some dims, one of them split."""
    split = [d for d in range(L.ndim) if L.partition.shape[d] > 1]
    return tuple(sorted({rng.choice(split), *(d for d in range(L.ndim) if rng.random() < 0.3)}))


# ---------------------------------------------------------------- one builder for each operator: layouts -> what Case
# takes


def _repartition(rng, n, kind, zero):
    ndim = rng.randint(1, 3)
    one, two = _halves(rng, n) if kind == "disjoint" else (range(n), range(n))
    L = _layout(rng, n, kind, ndim=ndim, ranks=one, least=1, zero=zero)
    grid = _grid(rng, ndim, len(two), 1)
    splits = []
    for size, p in zip(L.shape, grid):
        cuts = sorted(rng.randint(0, size) for _ in range(p - 1))
        splits.append(None if rng.random() < 0.5 else tuple(b - a for a, b in zip([0, *cuts], [*cuts, size])))
    M = dd.Layout(dd.Partition(grid, rng.sample(list(two), math.prod(grid))), L.shape, splits)
    return registry._repartition(L, M, L.shape), (L, M)


def _scatter(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    root = rng.choice([r for r in range(n) if r not in L.partition.ranks]) if kind == "disjoint" else rng.randrange(n)
    return dict(map=dd.maps.scatter(L, root), shape=L.shape, put=lambda X, r: X if r == root else None,
                get=lambda X, r: cut(X, L.partition, coords(L.partition, r), L.splits),
                calls={"layout": lambda x: F.scatter(x, L, root=root)}), (L,)  # fmt: skip


def _gather(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    P = L.partition
    root = rng.choice([r for r in range(n) if r not in P.ranks]) if kind == "disjoint" else rng.randrange(n)
    return dict(map=dd.maps.gather(L, root), shape=L.shape, get=lambda X, r: X if r == root else None,
                put=lambda X, r: cut(X, P, coords(P, r), L.splits),
                calls={"layout": lambda x: F.gather(x, L, root=root),
                       "bare": lambda x: F.gather(x, P, root=root)}), (L,)  # fmt: skip


def _copied(rng, n, kind, zero):
    """A layout over the small partition, and the big partition."""
    one, two = _halves(rng, n) if kind == "disjoint" else (range(n), range(n))
    ndim = rng.randint(1, 2)
    L = _layout(rng, n, kind, ndim=ndim, ranks=one, least=1, zero=zero)
    pad = rng.randint(0, 1)
    grids = [(*lead, *g) for lead in itertools.product((1, 2, 3), repeat=pad)
             for g in itertools.product(*[(1, 2, 3, 4) if p == 1 else (p,) for p in L.partition.shape])]  # fmt: skip
    grids = [g for g in grids if math.prod(g) <= len(two)]
    if not grids:
        raise Unfit
    grid = rng.choice(grids)
    return L, dd.Partition(grid, rng.sample(list(two), math.prod(grid))), pad


def _source(L, Q, r, pad):
    """Coordinates in the small partition of what rank r of the big one copies."""
    return [c if p > 1 else 0 for c, p in zip(coords(Q, r)[pad:], L.partition.shape)]


def _broadcast(rng, n, kind, zero):
    L, Q, pad = _copied(rng, n, kind, zero)
    P = L.partition
    if kind == "disjoint" and rng.random() < 0.5:
        return registry._broadcast(P, Q, L.shape), (L,)
    return dict(
        map=dd.maps.broadcast(L, Q),
        shape=L.shape,
        put=lambda X, r: cut(X, P, coords(P, r), L.splits),
        get=lambda X, r: cut(X, P, _source(L, Q, r, pad), L.splits) if r in Q.ranks else None,
        calls={"layout": lambda x: F.broadcast(x, L, Q), "bare": lambda x: F.broadcast(x, P, Q)},
    ), (L,)


def _sum_reduce(rng, n, kind, zero):
    L, Q, pad = _copied(rng, n, kind, zero)
    P = L.partition
    if kind == "disjoint" and rng.random() < 0.5:
        return registry._sum_reduce(Q, P, L.shape), (L,)
    summed = [d for d, p in enumerate(Q.shape) if d < pad or P.shape[d - pad] != p]

    def put(X, r):
        at = coords(Q, r)
        return None if at is None else cut(X[tuple(at[d] for d in summed)], P, _source(L, Q, r, pad), L.splits)

    return dict(
        map=dd.maps.sum_reduce(Q, L),
        shape=(*(Q.shape[d] for d in summed), *L.shape),
        put=put,
        get=lambda X, r: cut(X.sum(tuple(range(len(summed)))) if summed else X, P, coords(P, r), L.splits),
        calls={"layout": lambda x: F.sum_reduce(x, Q, L), "bare": lambda x: F.sum_reduce(x, Q, P)},
    ), (L,)


def _summing(factory, call):
    def build(rng, n, kind, zero):
        ndim = rng.randint(1, 3) if kind == "disjoint" else rng.randint(2, 3)
        dims = tuple(sorted(rng.sample(range(ndim), rng.randint(1, ndim if kind == "disjoint" else ndim - 1))))
        L = _layout(rng, n, kind, ndim=ndim, equal=dims, zero=zero)
        P, kept = L.partition, [d for d in range(ndim) if d not in dims]
        if factory is dd.maps.mark_varying:
            shape = [L.sizes(d)[0] if d in dims else L.shape[d] for d in range(ndim)]
            put = get = lambda X, r: cut(X, P, coords(P, r), L.splits, kept)
        else:
            shape, put = L.shape, lambda X, r: cut(X, P, coords(P, r), L.splits)

            def get(X, r):
                at = coords(P, r)
                if at is None:
                    return None
                places = itertools.product(*[range(P.shape[d]) if d in dims else (at[d],) for d in range(ndim)])
                return sum(cut(X, P, place, L.splits) for place in places)

        return dict(map=factory(L, None, dims), shape=tuple(shape), put=put, get=get,
                    calls={"layout": lambda x: call(x, L, dims)}), (L,)  # fmt: skip

    return build


def _all_gather(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    return registry._gathering(L, _dims(rng, L)), (L,)


def _reduce_scatter(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    return registry._reduce_scatter(L, _dims(rng, L)), (L,)


def _reorder(rng, n, kind, zero):
    """Any runs of any coordinate, or one of the orders with a name."""
    L = _layout(rng, n, kind, zero=zero)
    dim = rng.choice(_dims(rng, L))
    size, p = L.shape[dim], L.partition.shape[dim]
    cuts = sorted(rng.randint(0, size) for _ in range(rng.randint(0, 6)))
    pieces = list(zip([0, *cuts], [*cuts, size]))
    rng.shuffle(pieces)
    owners = [rng.randrange(p) for _ in pieces]
    runs = tuple(tuple(piece for piece, owner in zip(pieces, owners) if owner == i) for i in range(p))
    order = rng.choice(("zigzag", rng.randint(1, 3), runs, runs))
    return registry._reorder(L, dim, order, rng.random() < 0.4), (L,)


def _shift(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    P, dim, offset, periodic = L.partition, rng.choice(_dims(rng, L)), rng.choice((1, -1, 2, -3)), rng.random() < 0.5

    def get(X, r):
        at = coords(P, r)
        if at is None:
            return None
        source = list(at)
        source[dim] -= offset
        if not periodic and not 0 <= source[dim] < P.shape[dim]:
            return torch.zeros_like(cut(X, P, at, L.splits))
        source[dim] %= P.shape[dim]
        return cut(X, P, source, L.splits)

    return dict(map=dd.maps.shift(L, dim, offset, periodic), shape=L.shape, get=get,
                put=lambda X, r: cut(X, P, coords(P, r), L.splits),
                calls={"layout": lambda x: F.shift(x, L, dim, offset, periodic=periodic)}), (L,)  # fmt: skip


def _permute(rng, n, kind, zero):
    first = 1 if kind == "disjoint" else 0
    if n - first < 2:
        raise Unfit
    ranks = rng.sample(range(first, n), rng.randint(2, n - first))
    P, ndim = dd.Partition((len(ranks),), ranks), rng.randint(1, 2)
    least = 0 if kind == "empty" else 1
    shapes = [tuple(rng.randint(least, 4) for _ in range(ndim)) for _ in ranks]
    sizes = [0 if zero else math.prod(s) for s in shapes]
    shapes = [(0,) * ndim for _ in shapes] if zero else shapes
    if not zero and ((kind == "empty" and 0 not in sizes) or (kind == "uneven" and len(set(sizes)) == 1)):
        raise Unfit
    targets = rng.sample(ranks, rng.randint(1, len(ranks)))
    pairs = tuple((rng.choice(ranks), t) for t in targets)
    source = {t: s for s, t in pairs}
    starts = dict(zip(ranks, itertools.accumulate(sizes, initial=0)))
    shape_of, size_of = dict(zip(ranks, shapes)), dict(zip(ranks, sizes))

    def put(X, r):
        return X.narrow(0, starts[r], size_of[r]).reshape(shape_of[r]) if r in starts else None

    def get(X, r):
        if r in source:
            return put(X, source[r])
        return torch.zeros_like(put(X, r)) if r in starts else None

    return dict(map=dd.maps.permute(P, pairs, shapes), shape=(sum(sizes),), put=put, get=get,
                calls={"bare": lambda x: F.permute(x, P, pairs)}), ()  # fmt: skip


def _halo(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    every = ("none", "zeros", "circular", "reflect", "replicate")
    boundary = [rng.choice(every if size else every[:2]) for size in L.shape]
    most = [size - 1 if b == "reflect" else 5 for b, size in zip(boundary, L.shape)]
    left, right = (tuple(min(rng.randint(0, 5), m) for m in most) for _ in range(2))
    return registry._halo(L.partition, L.shape, left, right, tuple(boundary), L.splits), (L,)


def _elsewhere(rng, n, kind, zero):
    """Windows of blocks of another layout: slices that overlap, and lie anywhere."""
    one, two = _halves(rng, n) if kind == "disjoint" else (range(n), range(n))
    L = _layout(rng, n, kind, ranks=one, least=1, zero=zero)
    out = _layout(rng, n, kind, ndim=L.ndim, ranks=two, least=1, zero=zero)
    by, more = ([rng.randint(-2, 2) for _ in L.shape] for _ in range(2))
    boundary = tuple(
        rng.choice(("none", "zeros", "circular", "replicate") if size else ("none", "zeros")) for size in L.shape
    )
    return registry._others(L, out, lambda d, a, b: (a + by[d], b + by[d] + more[d]), boundary), (L, out)


def _window(rng, n, kind, zero):
    """The windows of a sliding kernel, worked out again from the definition of a convolution."""
    L = _layout(rng, n, kind, ndim=rng.randint(1, 3), zero=zero)
    first = rng.randint(0, L.ndim - 1)
    trailing, boundary = L.shape[first:], ["zeros"] * L.ndim
    kernel, stride, dilation = (tuple(rng.randint(1, m) for _ in trailing) for m in (4, 3, 2))
    padding = tuple((rng.randint(0, 3), rng.randint(0, 3)) for _ in trailing)
    out = list(L.shape)
    for i, (k, s, d, (a, b)) in enumerate(zip(kernel, stride, dilation, padding), first):
        free = L.shape[i] + a + b - d * (k - 1) - 1
        if free < 0:
            raise Unfit
        out[i] = free // s + 1
        if L.shape[i] > max(a, b):
            boundary[i] = rng.choice(("zeros", "circular", "reflect", "replicate"))
    tables = []
    for i, (size, p) in enumerate(zip(out, L.partition.shape)):
        sizes = L.sizes(i) if size == L.shape[i] else [len(part) for part in torch.arange(size).tensor_split(p)]
        ends = list(itertools.accumulate(sizes))
        table = []
        for o0, o1 in zip([0, *ends], ends):
            if i >= first and o0 < o1:
                k, s, d, (a, _) = (v[i - first] for v in (kernel, stride, dilation, padding))
                o0, o1 = o0 * s - a, (o1 - 1) * s - a + d * (k - 1) + 1
            table.append((o0, o1) if o0 < o1 else (0, 0))
        tables.append(table)
    spec = dd.HaloSpec.window(L, None, kernel, stride, padding, dilation, tuple(boundary))
    P = L.partition

    def get(X, r):
        at = coords(P, r)
        return None if at is None else window(X, [t[c] for t, c in zip(tables, at)], boundary)

    return dict(
        map=dd.maps.halo_exchange(spec),
        shape=L.shape,
        put=lambda X, r: cut(X, P, coords(P, r), L.splits),
        get=get,
        calls={"spec": lambda x: F.halo_exchange(x, spec)},
    ), (L,)


def _mark_varying(x, L, dims):
    """The function changes nothing outside of its ranks; the map has a placeholder there, as other movements have."""
    return F.mark_varying(x, L, dims) if L.active else dd.maps.mark_varying(L, None, dims)(x)


BUILDERS = {
    "repartition": _repartition,
    "scatter": _scatter,
    "gather": _gather,
    "broadcast": _broadcast,
    "sum_reduce": _sum_reduce,
    "all_sum_reduce": _summing(dd.maps.all_sum_reduce, F.all_sum_reduce),
    "mark_varying": _summing(dd.maps.mark_varying, _mark_varying),
    "invariant_sum": _summing(dd.maps.invariant_sum, F.invariant_sum),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reorder": _reorder,
    "shift": _shift,
    "permute": _permute,
    "halo_exchange": _halo,
    "elsewhere": _elsewhere,
    "window": _window,
}


def draw(name, kind, rng, n, zero=False, tries=200) -> Case | None:
    """A random example on a world of ``n`` ranks in which at least one message passes; ``None`` where there is none.

    ``zero``: of a tensor without elements, and so without messages.
    """
    for _ in range(tries):
        try:
            found, layouts = BUILDERS[name](rng, n, kind, zero)
        except Unfit:
            continue
        A = found["map"]
        held, wanted = set(A.plan.held.partition.ranks), set(A.plan.wanted.partition.ranks)
        one_partition = held == wanted
        if kind == "disjoint" and (len(held) == n if one_partition else held & wanted):
            continue
        moves = any(A.plan.messages(r) or A.adjoint.messages(r) for r in A.plan.ranks)
        if zero or (moves and (not layouts or _is_kind(kind, layouts))):
            return Case(name, n, **found)
    return None


# ---------------------------------------------------------------- the pairs, for serial, simulated and parallel
# functions alike

PAIRS = {  # (does the result live where the input or where the output does, how many batch axes has it)
    "grad∘grad": ("in", 0), "jvp∘grad": ("in", 0), "vmap∘grad": ("in", 1), "grad∘jvp": ("in", 0), "jvp∘jvp": ("out", 0),
    "vmap∘jvp": ("out", 1), "grad∘vmap": ("in", 1), "jvp∘vmap": ("out", 1), "vmap∘vmap": ("out", 2),
}  # fmt: skip


def transform(pair, f, loss, x, v, u):
    """``pair`` of y = f(x) and of the scalar loss(y), at x along v and u; x and v have as many batch axes as the pair
    wants."""
    L = lambda x: loss(f(x))
    push = lambda x, v: jvp(f, (x,), (v,))[1]
    return {
        "grad∘grad": lambda: vjp(grad(L), x)[1](v)[0],
        "jvp∘grad": lambda: jvp(grad(L), (x,), (v,))[1],
        "vmap∘grad": lambda: vmap(grad(L))(x),
        "grad∘jvp": lambda: grad(lambda x: loss(push(x, v)))(x),
        "jvp∘jvp": lambda: jvp(lambda x: push(x, v), (x,), (u,))[1],
        "vmap∘jvp": lambda: vmap(push)(x, v),
        "grad∘vmap": lambda: grad(lambda x: vmap(L)(x).sum())(x),
        "jvp∘vmap": lambda: jvp(vmap(f), (x,), (v,))[1],
        "vmap∘vmap": lambda: vmap(vmap(f))(x),
    }[pair]()


def coefficients(case, shape, rank, dtype):
    return randn(shape, 77, case.voice(rank)).to(dtype.to_real())


def rank_loss(case, y, rank):
    """A nonlinear real loss of one rank's output, with coefficients of its own."""
    value = (coefficients(case, y.shape, rank, y.dtype) * y.sin()).sum()
    return value.real if value.is_complex() else value


def per_example(place, X, batches):
    """``place`` of every example of a tensor with leading batch axes."""
    if not batches:
        return place(X)
    return torch.stack([per_example(place, one, batches - 1) for one in X])


class Simulated:
    """All ranks in this process: a linear map of the stacked local tensors, run by ``simulate``, with every
    transform."""

    def __init__(self, case, call=None):
        A, self.case = case.map, case
        self.held, self.wanted = A.plan.held.partition.ranks, A.plan.wanted.partition.ranks
        self.ins, self.outs = ([plan.held.local_shape(r) for r in ranks]
                               for plan, ranks in ((A.plan, self.held), (A.adjoint, self.wanted)))  # fmt: skip
        sizes = [(sum(map(math.prod, shapes)),) for shapes in (self.ins, self.outs)]
        self.map = dd.linear_map(_stacked(A.plan, self.ins), _stacked(A.adjoint, self.outs), *sizes, batched=True)

    def x(self, X):
        return torch.cat([self.case.put(X, r).reshape(-1) for r in self.held])

    back = x

    def f(self, x):
        return self.map(x.sin())

    def loss(self, y):
        return sum(rank_loss(self.case, part, r) for part, r in zip(_split(y, self.outs), self.wanted))

    def y(self, ys):
        return torch.cat([y.reshape(-1) for y in ys])

    def plainly(self, X):
        return torch.cat(
            [y.reshape(-1) for y in self.case.map.plan.simulate([self.case.put(X, r).clone() for r in self.held])]
        )


def _split(x, shapes):
    parts = x.split([math.prod(s) for s in shapes], -1)
    return [p.reshape(*x.shape[:-1], *s) for p, s in zip(parts, shapes)]


def _stacked(plan, shapes):
    def run(x):
        ys = plan.simulate(_split(x, shapes))
        lead = x.shape[:-1]
        return torch.cat([y.reshape(*lead, math.prod(y.shape[len(lead) :])) for y in ys], -1)

    return run


class Spmd:
    """This rank's part, as a user writes it: the functional spelling ``call``."""

    def __init__(self, case, call, seed=0):
        self.case, self.call, self.rank = case, call, dd.world().rank
        self.wanted = case.map.plan.wanted.partition.ranks
        self.junk = torch.ones(
            JUNK[(seed + self.rank) % len(JUNK)], dtype=torch.float64
        )  # from ranks that hold nothing

    def x(self, X):
        return self.case.local(X, self.junk)

    def back(self, G):
        return self.case.local(G, 0 * self.junk)

    def f(self, x):
        return self.call(x.sin())

    def loss(self, y):
        return rank_loss(self.case, y, self.rank)

    def y(self, ys):
        return ys[self.wanted.index(self.rank)] if self.rank in self.wanted else None

    def plainly(self, X):
        return self.call(self.case.local(X, math.nan * self.junk if X.is_floating_point() else self.junk))


def compare(case, pair, side, dtype, seed=0) -> list[str]:
    """Faults of one case: the value exactly in other dtypes, the adjoint, and the pair of transforms."""
    faults, A = [], case.map
    wanted = A.plan.wanted.partition.ranks

    def same(what, found, expected, rtol):
        if expected is None:
            return
        if found.shape != expected.shape or found.dtype != expected.dtype:
            faults.append(
                f"{what}: {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
            )
            return
        scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
        if not torch.allclose(found, expected, rtol=rtol, atol=rtol * max(scale, 1e-3)):
            faults.append(f"{what}: off by {float((found - expected).abs().max()):.2e}, largest entry {scale:.2e}")

    other = OTHERS[seed % len(OTHERS)]
    whole = registry.integers(case.shape, seed).clamp(-3, 3).to(other)
    exact = [case.get(whole.to(torch.complex128 if other.is_complex else torch.float64), r).to(other) for r in wanted]
    same(f"value in {other}", side.plainly(whole), side.y(exact), 0)

    def serial(X):
        ys = X.sin()
        return tuple(case.get(ys, r) for r in wanted)

    def serial_loss(ys):
        return sum(rank_loss(case, y, r) * A.range.weight for y, r in zip(ys, wanted))

    place, batches = PAIRS[pair]
    lead = (2, 3)[:batches]
    X, V = (randn((*lead, *case.shape), seed, i, dtype=dtype) for i in range(2))
    U = randn(case.shape, seed, 2, dtype=dtype)
    x, v = (per_example(side.x, t, batches) for t in (X, V))
    u = side.x(U)
    expected = transform(pair, serial, serial_loss, X, V, U)
    found = transform(pair, side.f, side.loss, x, v, u)
    if place == "in":
        wished = per_example(side.back, expected, batches)
    elif side.y(expected) is None:
        wished = None
    else:
        flat = [[t[i] for t in expected] for i in itertools.product(*map(range, lead))]
        wished = torch.stack([side.y(ys) for ys in flat])
        wished = wished.reshape(*lead, *wished.shape[1:])
    same(pair, found, wished, RTOL[dtype])
    if place == "out":  # the adjoint too, whose messages are the only ones that mark_varying has
        one = X[(0,) * batches]
        same(
            "vjp",
            grad(lambda x: side.loss(side.f(x)))(side.x(one)),
            side.back(grad(lambda X: serial_loss(serial(X)))(one)),
            RTOL[dtype],
        )
    return faults


def describe(case, pair, dtype) -> str:
    """What one must know to draw the case by hand."""
    A = case.map
    return f"{case.name} {pair} {dtype}, {case.n} ranks, global {case.shape}: {A.plan.held} -> {A.plan.wanted}"
