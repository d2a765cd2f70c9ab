"""Valid arguments for every public name of ``distdl.functional``, ``dd.maps`` and ``dd.nn``, with their serial meaning.

A **setting** says how tensors lie over the ranks: which dim is split over which ranks, uneven and empty, and whether a
Layout or a bare partition is passed. A **builder** makes of a setting the :class:`Call` of a name (or of a variant,
``name/variant``): a function of this rank's tensors, the serial torch function, global inputs, and what this rank holds
of each. Movements come from registry.py's definitions. ``test_sweep.py`` holds the properties.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import registry
import torch
import torch.nn.functional as tf
from serial import along as along_layout
from serial import randn, whole
from waves import transformed

import distdl as dd
import distdl.functional as F

JUNK = torch.ones(2, 1, dtype=torch.float64)  # what a rank outside passes: it is ignored, whatever its shape


class Setting:
    """One way for tensors to lie over the world's ranks."""

    def __init__(self, name: str):
        self.name, self.n = name, dd.world().size
        self.outside, self.bare = "outside" in name, "bare" in name
        self.ranks = (
            tuple(range(self.n - 1, 0, -1)) if self.outside else (0,) if name == "scalar" else tuple(range(self.n))
        )
        self.k = len(self.ranks)
        self.c = 1 if name == "one" else max(self.n - 1, 1) if "channels" in name else 2  # fewer channels than ranks

    def lay(self, *shape, channel=1) -> dd.Layout:
        """The layout of a tensor of global ``shape`` ("c": so many channels; sizes are 1 where there is one element
        only)."""
        if self.name == "scalar":
            return dd.Layout(dd.Partition(()), ())
        shape = tuple(self.c if n == "c" else 1 if self.name == "one" else n for n in shape)
        d = {"first": 0, "channels": channel, "outside channels, bare": channel}.get(self.name, len(shape) - 1) % len(
            shape
        )
        grid, splits = [1] * len(shape), [None] * len(shape)
        grid[d] = self.k
        if self.name == "first" and self.k > 1:  # rank 0 has nothing
            splits[d] = (
                0,
                shape[d] - (shape[d] - 1) // (self.k - 1) * (self.k - 2),
                *[(shape[d] - 1) // (self.k - 1)] * (self.k - 2),
            )
        return dd.Layout(dd.Partition(tuple(grid), self.ranks), shape, tuple(splits))

    def given(self, L):
        """What the call gets: the layout, or its partition, and then it negotiates."""
        return L.partition if self.bare else L

    @property
    def line(self):
        """The ranks as a partition of one dim."""
        return dd.Partition((self.k,), self.ranks)

    @property
    def local(self):
        """The shape of a tensor that is whole on every rank."""
        return {"scalar": (), "one": (1,), "first": (0, 3)}.get(self.name, (2, 3))


SETTINGS = ("first", "last", "channels", "outside", "outside channels, bare", "one", "scalar")


class Left:
    """The place of what a reduction over ``dims`` leaves: invariant along these, this rank's block of the others."""

    def __init__(self, L, dims, keepdim):
        self.L, self.dims, self.keepdim = L, dims, keepdim

    def __call__(self, y):
        slices = [
            slice(None) if d in self.dims else s
            for d, s in enumerate(self.L.slices())
            if self.keepdim or d not in self.dims
        ]
        return y[tuple(slices)]

    def local_shape(self):
        """Of a rank outside: no element in the first dim, the first block's sizes in the others; no dim left: a
        zero."""
        first = [
            1 if d in self.dims else self.L.sizes(d)[0]
            for d in range(self.L.ndim)
            if self.keepdim or d not in self.dims
        ]
        return (0, *first[1:]) if first else ()


def along(L, *dims):
    """The place of a tensor over these dims of L; all of it where L has no such dim."""
    return along_layout(L, *dims) if max(dims) < L.ndim else whole


def _tuple(y):
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)


class Call:
    """A function of this rank's tensors, ``run``, and its serial twin: what this rank must get, and the derivatives of
    one loss.

    ``out()`` is the place of the result, or a tuple of them; ``L`` the layout whose ranks take part.
    """

    known = True  # whether a rank outside knows the layout of the result

    def __init__(self, L, run, serial, inputs, places, out=None):
        self.L, self.run, self.serial, self.inputs, self.places = L, run, serial, list(inputs), list(places)
        self._out = out or (lambda: L)

    @property
    def outs(self):
        return _tuple(self._out())

    def part(self, i, X):
        """This rank's part of a global tensor that is, or belongs to, input i."""
        place = self.places[i]
        if isinstance(place, dd.Layout):
            return place.shard(X).clone() if self.L.active else JUNK.to(X.dtype)
        return place(X).clone()

    def parts(self, inputs=None):
        return [self.part(i, X) for i, X in enumerate(self.inputs if inputs is None else inputs)]

    def counts(self, i):
        """Whether this rank's gradient of input i says anything."""
        return self.L.active and (not isinstance(self.places[i], dd.Layout) or self.places[i].active)

    def whole(self, *inputs):
        """The serial results."""
        return _tuple(self.serial(*inputs))

    def cut(self, ys):
        """What this rank must have of serial results: [(its part, or ``None`` outside of the result's ranks, its shape,
        dtype)]."""
        found = []
        for y, place in zip(ys, self.outs, strict=True):
            laid = isinstance(place, dd.Layout)
            here = self.L.active and (not laid or place.active)
            part = (place.shard(y) if laid else place(y)) if here else None
            shape = tuple(part.shape) if here else () if place is whole else place.local_shape()
            found.append((part, shape, y.dtype))
        return found

    def _weights(self):
        return [randn(*y.shape, seed=90 + i) for i, y in enumerate(self.whole(*self.inputs))]

    @staticmethod
    def _terms(ys, weights):
        return sum(((w + 0.3 * y) * y).sum() for y, w in zip(ys, weights) if y.is_floating_point())

    def loss(self, ys):
        """This rank's nonlinear loss; over all ranks, invariant values once, they add up to :meth:`total`."""
        if not self.L.active:
            return sum(y.sum() for y in ys if y.is_floating_point())
        cuts = [(p.shard(w) if isinstance(p, dd.Layout) else p(w)) for p, w in zip(self.outs, self._weights())]
        return self._terms(ys, [w if y.numel() else y.detach() for y, w in zip(ys, cuts)])

    def total(self, *inputs):
        return self._terms(self.whole(*inputs), self._weights())


class Moved(Call):
    """A movement, by its meaning in registry.py."""

    def __init__(self, case, call, known=True):
        self.case, self.run, self.L, self.known, self.places = case, call, None, known, [None]
        self._out = lambda: None
        self.inputs = [registry.randn(case.shape, 5)]

    def part(self, i, X):
        return self.case.smooth(X) if self.case.held else JUNK.to(X.dtype)

    def back(self, G):
        return self.case.back(G)

    def counts(self, i):
        return self.case.held

    def whole(self, X):
        return tuple(self.case.wanted(X, r) for r in range(self.case.n))

    def cut(self, ys):
        y, held = ys[self.case.rank], self.case.get(self.inputs[0], self.case.rank)
        kept = self.case.name == "mark_varying" and self.run is not self.case.map  # a rank outside keeps what it passed
        outside = JUNK.shape if kept else self.case.map.out_shape
        return [(None if held is None else y, tuple(outside if held is None else y.shape), y.dtype)]

    def loss(self, ys):
        return self.case.loss(ys[0])

    def total(self, X):
        return self.case.serial(X)


# ---------------------------------------------------------------- builders

BUILDERS: dict = {}
SCALARS = set()  # names that take tensors without dims


def builder(*names, scalar=False):
    """Register ``build(setting) -> Call`` under names; ``scalar``: a tensor without dims is valid too."""

    def register(build):
        for name in names:
            BUILDERS[name] = build
            if scalar:
                SCALARS.add(name)
        return build

    return register


def of_x(name, call, serial, shape=(3, "c", 5, 4), out=None, draw=randn, scalar=False):
    """A layer of one tensor: ``call(x, P)`` and ``serial(x)``, the result of layout ``out(L)``."""

    def build(s):
        L = s.lay(*shape)
        return Call(
            L,
            lambda x: call(x, s.given(L)),
            serial,
            [draw(*L.shape, seed=1)],
            [L],
            lambda: L if out is None else out(L),
        )

    builder(name, scalar=scalar)(build)


def alone(L):
    """The layout of the whole tensor on this rank."""
    return dd.Layout(dd.Partition((1,) * L.ndim, (dd.world().rank,)), L.shape)


@builder("dist_spmv")
def _spmv(s):
    L_out = s.lay(6)
    L = L_out if L_out.ndim else dd.Layout(dd.Partition((1,)), (1,))  # without dims L_out is refused
    A = randn(*L.shape, *L.shape, seed=1)
    places = {r: (A[slice(*L.box(r)[0])] > 0).nonzero() for r in L.partition.ranks}
    rows, columns = places.get(dd.world().rank, torch.zeros(0, 2, dtype=torch.int64)).unbind(1)
    index = dd.Index.known(L, [places[r][:, 1] for r in L.partition.ranks])
    call = Call(
        L,
        lambda x, values: F.dist_spmv(x, index, rows, values, L_out),
        lambda x, V: (torch.where(A > 0, V, 0) * x).sum(1),
        [randn(*L.shape, seed=2), randn(*A.shape, seed=3)],
        [L, lambda V: V[L.slices()[0]][rows, columns]],
        lambda: L,
    )
    call.known = False  # a rank outside has not heard of x's other dims
    return call


def _at_points(s):
    """(layout of a grid of 5 in the last dim, layout of values at 4 points, this rank's, the dense weights)."""
    L = s.lay(3, "c", 5)
    points = torch.tensor([[2.3], [-0.4], [4.2], [3.0]], dtype=torch.float64)
    out = L.with_shape((*L.shape[:-1], len(points))) if L.ndim else L
    weights = (1 - (points[:, 0] - torch.arange(L.shape[-1] if L.ndim else 1)[:, None]).abs()).clamp(min=0)
    return L, out, points[out.slices()[-1]] if L.ndim else points, weights


def _sampling(s, call):
    L, out, points, weights = _at_points(s)
    values = lambda X: (X[..., None] * weights.to(X.dtype)).sum(-2)
    found = Call(L, lambda x: call(x, L, points), values, [randn(*L.shape, seed=1)], [L])
    found._out, found.known = lambda: out, False  # a rank outside does not say how many points others have
    return found


builder("dist_sample")(lambda s: _sampling(s, lambda x, L, points: F.dist_sample(x, s.given(L), points)))
builder("sample_index")(
    lambda s: _sampling(s, lambda x, L, points: F.dist_sample(x, L, points, index=F.sample_index(L, points)))
)


@builder("dist_deposit")
def _deposit(s):
    L, out, points, weights = _at_points(s)
    values = lambda V: (V[..., None, :] * weights.to(V.dtype)).sum(-1)
    return Call(out, lambda v: F.dist_deposit(v, points, L), values, [randn(*out.shape, seed=1)], [out], lambda: L)


# ---- movements


def movement(build, *names, scalar=False):
    """``build(s) -> registry's dict``: a builder for the function (each spelling) and one for the map."""

    def make(pick):
        def built(s):
            key = (s.name, *names)
            if key not in _CASES:
                _CASES[key] = registry.Case(names[0], s.n, **build(s))
            case = _CASES[key]
            return Moved(case, *pick(s, case))

        return built

    F_name, *maps = names
    if F_name:

        def spelled(s, case):
            words = next((w for w in (("bare" if s.bare else "layout"), "bare", "spec") if w in case.calls), "layout")
            return case.calls[words], words != "bare"

        builder(F_name, scalar=scalar)(make(spelled))
    for name in maps:
        builder(f"maps.{name}", scalar=scalar)(make(lambda s, c: (c.map, True)))


_CASES: dict = {}


def _others(s, L):
    """Another layout of L's shape: its last dim split over all ranks."""
    return dd.Layout(dd.Partition((*(1,) * (L.ndim - 1), s.n)) if L.ndim else dd.Partition((), (s.n - 1,)), L.shape)


def _moved(s, forward):
    L = s.lay(5, "c", 3)
    one = dd.Partition((1,) * L.ndim, (s.n - 1,))
    P, splits = L.partition, L.splits
    blocks, roots = (
        (lambda X, r: registry.cut(X, P, registry.coords(P, r), splits)),
        (lambda X, r: X if r == s.n - 1 else None),
    )
    call, factory = (F.scatter, dd.maps.scatter) if forward else (F.gather, dd.maps.gather)
    calls = {"layout": lambda x: call(x, L, root=s.n - 1)}
    if splits is None or not forward:
        calls["bare"] = lambda x: call(x, P, root=s.n - 1)
    put, get = (roots, blocks) if forward else (blocks, roots)
    assert one.size == 1
    return dict(map=factory(L, s.n - 1), shape=L.shape, put=put, get=get, calls=calls)


def _split_dim(L):
    return tuple(d for d in range(L.ndim) if L.partition.shape[d] > 1) or tuple(range(L.ndim))[:1]


def _all_sum(s, factory, call, same):
    P, shape = s.line, s.local
    copies = (lambda X, r: X.reshape(shape) if r in P.ranks else None) if same else None
    return registry._all_sum(factory, call, P, shape, None, copies, copies, shape if same else None)


def _halo(s):
    L = s.lay(5, "c", 4)
    return registry._halo(L.partition, L.shape, 1, 1, "replicate" if s.name == "one" else "circular", L.splits)


def _star(s):
    L = s.lay(5, "c", 4)
    return registry._star(L.partition, L.shape, 1, 1, "replicate" if s.name == "one" else "circular", L.splits)


def _sides(s):
    L = s.lay(5, "c", 4)
    boundary = (("replicate", "zeros"),) * L.ndim
    return registry._halo(L.partition, L.shape, 1, 1, boundary, L.splits)


def _windows_elsewhere(s):
    """Of the same ranks, backwards, along another dim."""
    L = s.lay(5, "c", 4)
    P = dd.Partition(L.partition.shape[::-1], L.partition.ranks[::-1])
    return registry._others(L, dd.Layout(P, L.shape), boundary="zeros" if s.name == "one" else "circular")


def _one(s):
    return dd.Partition((1,), (s.n - 1,))


def _permute(s):
    P, shape = s.line, s.local
    pairs = ((P.ranks[0], P.ranks[-1]),)

    def get(X, r):
        return X[0] if r == P.ranks[-1] else None if r not in P.ranks else torch.zeros_like(X[0])

    return dict(
        map=dd.maps.permute(P, pairs, shape),
        shape=(P.size, *shape),
        put=registry.keyed(P),
        get=get,
        calls={"bare": lambda x: F.permute(x, P, pairs)},
    )


def _strips(s):
    L = s.lay(6, "c", 4)
    d = max(range(L.ndim), key=lambda d: L.partition.shape[d], default=0)
    spec = dd.HaloSpec(L, tuple(int(i == d) for i in range(L.ndim)), boundary="circular")
    if d not in dd.maps.halo_strips(spec):  # nothing is split: there are no strips
        return _halo(s)
    A = dd.maps.halo_strips(spec)[d]

    def get(X, r):
        box, at = L.box(r), registry.coords(L.partition, r)
        if at is None:
            return None
        a, b = box[d]
        padded = torch.cat([X.narrow(d, X.shape[d] - 1, 1), X, X.narrow(d, 0, 1)], d)
        sides = [padded.narrow(d, a, 1), padded.narrow(d, b + 1, 1)] if a < b else [padded.narrow(d, 0, 0)]
        rest = tuple(slice(*e) if i != d else slice(None) for i, e in enumerate(box))
        return torch.cat(sides, d)[rest]

    put = lambda X, r: registry.cut(X, L.partition, registry.coords(L.partition, r), L.splits)
    return dict(map=A, shape=L.shape, put=put, get=get)


def _gathering_rows(s):
    P = s.line
    A = dd.maps.gathering(P, (7, 2), {0: 0})
    return dict(
        map=A,
        shape=(7, 2),
        put=lambda X, r: registry.cut(X, P, registry.coords(P, r)),
        get=lambda X, r: X if r in P.ranks else None,
    )


def _transposed_gathering(s):
    found = registry._gathering(s.lay(5, "c", 3), (0,))
    P, dims = s.lay(5, "c", 3).partition, (0,)
    again = registry._reduce_scatter(s.lay(5, "c", 3), dims)
    assert P.size == s.k and found
    return {**again, "map": dd.maps.transposed("reduce_scatter", found["map"])}


def ORDER(s):
    """Runs of each coordinate of the last dim."""
    L = s.lay(5, "c", 3)
    return registry.runs_of(L.shape[-1], L.partition.shape[-1]) if L.ndim else "zigzag"


def _spelt(found):
    """By its own function only."""
    return {**found, "calls": {"layout": found["calls"].get("zigzag") or found["calls"]["block_cyclic"]}}


def _keyed(s):
    P = s.line
    shapes = tuple(s.local for _ in P.ranks)
    found = _permute(s)
    source = tuple(0 if i == P.size - 1 else None for i in range(P.size))
    return {**found, "map": dd.maps.keyed("permute", P, P, source, shapes, shapes)}


movement(
    lambda s: registry._repartition(s.lay(5, "c", 3), _others(s, s.lay(5, "c", 3)), s.lay(5, "c", 3).shape),
    "repartition",
    "repartition",
    scalar=True,
)
movement(lambda s: _moved(s, True), "scatter", "scatter", scalar=True)
movement(lambda s: _moved(s, False), "gather", "gather", scalar=True)
movement(lambda s: registry._broadcast(_one(s), s.line, s.local), "broadcast", "broadcast", scalar=True)
movement(lambda s: registry._sum_reduce(s.line, _one(s), s.local), "sum_reduce", "sum_reduce", scalar=True)
movement(
    lambda s: _all_sum(s, dd.maps.all_sum_reduce, F.all_sum_reduce, False),
    "all_sum_reduce",
    "all_sum_reduce",
    scalar=True,
)
movement(lambda s: _all_sum(s, dd.maps.mark_varying, F.mark_varying, True), "mark_varying", "mark_varying", scalar=True)
movement(
    lambda s: _all_sum(s, dd.maps.invariant_sum, F.invariant_sum, False), "invariant_sum", "invariant_sum", scalar=True
)
movement(
    lambda s: registry._gathering(s.lay(5, "c", 3), _split_dim(s.lay(5, "c", 3))),
    "all_gather",
    "all_gather",
    scalar=True,
)
movement(
    lambda s: registry._reduce_scatter(s.lay(5, "c", 3), _split_dim(s.lay(5, "c", 3))),
    "reduce_scatter",
    "reduce_scatter",
    scalar=True,
)
movement(lambda s: registry._shift(s.line, 0, 1, True, s.local), "shift", "shift", scalar=True)
movement(lambda s: registry._roll(s.lay(5, "c", 3), s.lay(5, "c", 3).ndim - 1, 2), "roll", "roll")
movement(lambda s: registry._reorder(s.lay(5, "c", 3), s.lay(5, "c", 3).ndim - 1, ORDER(s)), "reorder", "reorder")
for _name, _order in (("zigzag", "zigzag"), ("block_cyclic", 2)):
    movement(
        lambda s, order=_order: _spelt(registry._reorder(s.lay(5, "c", 3), s.lay(5, "c", 3).ndim - 1, order)), _name
    )
movement(_permute, "permute", "permute", scalar=True)
movement(_halo, "halo_exchange", "halo_exchange", scalar=True)
movement(_star, "halo_exchange/star", "halo_exchange/star", scalar=True)
movement(lambda s: registry._gather_rows(s.lay(5, "c", 3)), "gather_rows", "gather_rows")
movement(lambda s: registry._scatter_add_rows(s.lay(5), (3,)), "scatter_add_rows", "scatter_add_rows")
movement(_sides, "halo_exchange/sides", "halo_exchange/sides", scalar=True)
movement(_windows_elsewhere, "halo_exchange/elsewhere", "halo_exchange/elsewhere", scalar=True)
movement(_strips, "", "halo_strips", scalar=True)
movement(_gathering_rows, "", "gathering", scalar=True)
movement(_transposed_gathering, "", "transposed")
movement(_keyed, "", "keyed", scalar=True)


@builder("start", "wait", scalar=True)
def _split_phase(s):
    call = BUILDERS["maps.repartition"](s)
    return Moved(call.case, lambda x: F.wait(F.start(call.case.map, x)))


def _local(run, serial):
    """Functions of one rank's tensor alone."""

    def build(s):
        L = dd.Layout(dd.Partition((1,) * len(s.local), (dd.world().rank,)), s.local)
        return Call(L, run, serial, [randn(*s.local, seed=1)], [L], lambda: whole)

    return build


builder("tie", scalar=True)(_local(lambda x: F.tie(x.sin(), x.square()), torch.sin))
builder("nothing", scalar=True)(_local(lambda x: F.nothing((3, 0), x), lambda x: x.new_zeros(3, 0)))
builder("fold_in", scalar=True)(
    _local(lambda x: x * (F.fold_in(3, 4, 5) % 7), lambda x: x * (F.fold_in(F.fold_in(3, 4), 5) % 7))
)


@builder("reorder_layout")
def _reorder_layout(s):
    L = s.lay(5, "c", 3)
    M = F.reorder_layout(L, -1, "zigzag")
    return Call(
        L,
        lambda x: F.zigzag(x, L, -1),
        lambda x: x[..., registry.np.concatenate(registry.dealt(L.shape[-1], L.partition.shape[-1], "zigzag"))],
        [randn(*L.shape, seed=1)],
        [L],
        lambda: M,
    )


def _asked_for(x, L, P):
    """A loop through the layout that x is found to have."""
    found = F.layout_of(x, P)
    assert found == (L if L.active or P is L else None)
    return F.repartition(x, found or P, P)


builder("layout_of", scalar=True)(
    lambda s: (
        lambda L: Call(L, lambda x: _asked_for(x, L, s.given(L)), lambda x: x + 0, [randn(*L.shape, seed=1)], [L])
    )(s.lay(3, "c", 5))
)


@builder("zigzag_positions")
def _zigzag_positions(s):
    """Rows in zigzag times the places that they come from."""
    L = s.lay(5, "c", 3)

    def serial(x):
        order = torch.as_tensor(registry.np.concatenate(registry.dealt(L.shape[-1], L.partition.shape[-1], "zigzag")))
        return x[..., order] * order

    return Call(
        L,
        lambda x: F.zigzag(x, L, -1) * (F.zigzag_positions(L, -1) if L.active else 1),
        serial,
        [randn(*L.shape, seed=1)],
        [L],
        lambda: F.reorder_layout(L, -1, "zigzag"),
    )


@builder("positions")
def _positions(s):
    L = s.lay(5, "c", 3)

    def call(x):
        rows = F.positions(L, -1)  # of a rank outside: none
        return x * rows if L.active else F.nothing(L.local_shape(), x, rows)

    return Call(
        L,
        call,
        lambda x: x * torch.arange(L.shape[-1]),
        [randn(*L.shape, seed=1)],
        [L],
    )


# ---- random numbers (they know layouts only)


def _drawn(draw):
    def build(s):
        L = s.lay(5, "c", 3)

        def run(x):
            block = draw(L, 3, dtype=torch.float64)
            return (
                x * block
                if L.active
                else F.nothing(tuple(block.shape), x, dtype=torch.promote_types(x.dtype, block.dtype))
            )

        return Call(L, run, lambda X: X * draw(alone(L), 3, dtype=torch.float64), [randn(*L.shape, seed=1)], [L])

    return build


builder("uniform", scalar=True)(_drawn(F.uniform))
builder("normal", scalar=True)(_drawn(F.normal))
for _name, _call in (("dist_dropout", F.dist_dropout), ("dist_feature_dropout", F.dist_feature_dropout)):
    for _variant, _p in (("", 0.4), ("/p=0", 0)):
        of_x(
            _name + _variant,
            lambda x, P, call=_call, p=_p: call(x, P, p, 7),
            lambda x, call=_call, p=_p: call(
                x, dd.Layout(dd.Partition((1,) * x.dim(), (dd.world().rank,)), x.shape), p, 7
            ),
            (3, "c", 4),
            scalar=_name == "dist_dropout" or not _p,
        )


# ---- parameters


@builder("replicated", scalar=True)
def _replicated(s):
    P = s.line
    L = dd.Layout(P, (s.k + 1,))

    def run(x, w):
        if not L.active:
            return F.nothing((0,), x, *F.replicated("invariant", P, None, w))
        return F.replicated("invariant", P, None, w)[0].sum() * x

    return Call(L, run, lambda x, w: w.sum() * x, [randn(s.k + 1), randn(*s.local, seed=2)], [L, whole])


@builder("check_bias", scalar=True)
def _check_bias(s):
    L = dd.Layout(s.line, (s.k + 1,))

    def run(x):
        if not L.active:
            return F.nothing((0,), x)
        F.check_bias("check_bias", s.line, x, x.shape[0])
        return 2 * x

    return Call(L, run, lambda x: 2 * x, [randn(s.k + 1)], [L])


# ---- attention


def tokens(s, *sizes):
    """The layout of (batch, heads, seq, features): the setting's of the first three dims."""
    L = s.lay(*sizes[:3])
    if s.name == "scalar":
        return L
    P = dd.Partition((*L.partition.shape, 1), L.partition.ranks)
    return dd.Layout(P, (*L.shape, sizes[3]), (*(L.splits or (None,) * 3), None))


def attend(q, k, v, keep=None):
    """Attention as in books: torch's own has no forward mode."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if keep is None else scores.masked_fill(~keep, -torch.inf)).softmax(-1).to(v.dtype) @ v


def _attention(heads=None, **options):
    def build(s):
        L = tokens(s, 2, "c", 7, 3)
        if s.name == "scalar":
            return Call(L, lambda *x: F.dist_attention(*x, L), None, [randn(seed=i) for i in range(3)], [L] * 3)
        K = L if heads is None else L.with_shape((L.shape[0], heads, *L.shape[2:]))
        more = {} if K is L or s.bare else {"kv_shape": K}
        n = L.shape[2]
        keep = torch.ones(n, n, dtype=torch.bool).tril() if "causal" in options else None
        return Call(
            L,
            lambda q, k, v: F.dist_attention(q, k, v, s.given(L), **options, **more),
            lambda q, k, v: attend(q, k, v, keep),
            [randn(*M.shape, seed=i) for i, M in enumerate((L, K, K))],
            [L, K, K],
        )

    return build


builder("dist_attention")(_attention(causal=True))
builder("dist_attention/one head of keys")(_attention(1))
builder("dist_attention/ring")(_attention(causal=True, method="ring"))
builder("dist_attention/heads")(_attention(method="heads"))


@builder("attention_needs")
def _attention_needs(s):
    """Causal needs: sums of all rows so far."""
    L = tokens(s, 2, "c", 7, 3)

    def call(x):
        spec = F.attention_needs(L, L, causal=True)
        y = F.halo_exchange(x, spec)
        return y.cumsum(2)[:, :, y.shape[2] - x.shape[2] :] if L.active else F.nothing(L.local_shape(), y)

    return Call(L, call, lambda x: x.cumsum(2), [randn(*L.shape, seed=1)], [L])


def neighbours(n, k, d, causal):
    """NATTEN's rule, query by query: the keys of each."""
    found = []
    for i in range(n):
        mine = list(range(i % d, n, d))  # the dim that the query is of
        p = mine.index(i)
        found.append(
            mine[max(p - k + 1, 0) : p + 1] if causal else mine[(s := min(max(p - k // 2, 0), len(mine) - k)) : s + k]
        )
    return found


def attend_near(q, k, v, sizes, dilations, causal):
    """Neighbourhood attention as full attention of flattened grids with a mask."""
    space, keep = q.shape[2:-1], torch.ones(1, 1, dtype=torch.bool)
    for n, *options in zip(space, sizes, dilations, causal):
        table = torch.zeros(n, n, dtype=torch.bool)
        for i, keys in enumerate(neighbours(n, *options)):
            table[i, keys] = True
        keep = torch.kron(keep.int(), table.int()).bool()
    flat = (t.flatten(2, -2) for t in (q, k, v))
    return attend(*flat, keep).unflatten(2, space)


@builder("dist_neighborhood_attention")
def _neighborhood(s):
    L = tokens(s, 2, "c", 7, 3)
    k = 1 if s.name == "one" else 3
    return Call(
        L,
        lambda *x: F.dist_neighborhood_attention(*x, s.given(L), k),
        lambda *x: attend_near(*x, (k,), (1,), (False,)),
        [randn(*L.shape, seed=i) for i in range(3)],
        [L] * 3,
    )


@builder("rotary_embedding")
def _rotary(s):
    L = tokens(s, 2, "c", 7, 4)
    if s.name == "scalar":
        return Call(L, lambda x: F.rotary_embedding(x, torch.zeros(1)), None, [randn()], [L])

    def serial(x):
        turns = torch.polar(torch.ones(2).double(), 100.0 ** -torch.tensor([0, 0.5]).double())
        rows = torch.stack([turns**i for i in range(L.shape[2])]) if L.shape[2] else turns[None][:0]
        a, b = x.double().chunk(2, -1)
        y = torch.cat([a * rows.real - b * rows.imag, a * rows.imag + b * rows.real], -1)
        return y.to(x.dtype)

    def call(x):
        if not L.active:
            return F.rotary_embedding(F.nothing(L.local_shape(), x), torch.zeros(L.local_shape()[2]), base=100)
        return F.rotary_embedding(x, F.positions(L, 2), base=100)

    return Call(L, call, serial, [randn(*L.shape, seed=1)], [L])


# ---- linear layers, embeddings, experts


def _without(L, dim, shape):
    """The layout, over the ranks at index 0 of partition dim ``dim``, of what lacks that dim."""
    splits = L.splits or (None,) * L.ndim
    kept = [d for d in range(L.ndim) if d != dim]
    found = [splits[d] if shape[i] == L.shape[d] else None for i, d in enumerate(kept)]
    return dd.Layout(L.partition.take(dim, 0), shape, tuple(found))


def _linear(x_layout, y_layout, params=lambda w, b: (w, b)):
    def build(s):
        G = s.lay(3, 4, 5, channel=2 if x_layout == "root" else 1)
        if s.name == "scalar":
            return Call(
                G, lambda x, w, b: F.dist_linear(x, w, G, b), None, [randn(), randn(4, 5), randn(4)], [G, whole, whole]
            )
        b, o, i = G.shape
        x_place = _without(G, 1, (b, i)) if x_layout == "root" else along(G, 0, 2)
        y_place = _without(G, 2, (b, o)) if y_layout == "root" else along(G, 0, 1)
        if y_layout != "root":
            y_place = Left(G, (2,), False)
        return Call(
            G,
            lambda x, w, c: F.dist_linear(
                x, w, s.given(G), c, x_layout=x_layout, y_layout=y_layout, params="invariant"
            ),
            tf.linear,
            [randn(b, i, seed=1), randn(o, i, seed=2), randn(o, seed=3)],
            [x_place, along(G, 1, 2), along(G, 1)],
            lambda: y_place,
        )

    return build


builder("dist_linear")(_linear("root", "root"))
builder("dist_linear/invariant")(_linear("invariant", "invariant"))

# ---- dense linear algebra


@builder("dist_matmul", "matmul_layout")
def _matmul(s):
    L_a = s.lay(2, 5, 4)
    if not L_a.ndim:
        return Call(L_a, lambda a, b: F.dist_matmul(a, b, L_a), None, [randn(), randn()], [L_a, L_a])
    batch, _, k = L_a.shape
    L_b = dd.Layout(L_a.partition, (batch, k, 1 if s.name == "one" else 3), (L_a.sizes(0), None, None))
    shapes = {} if s.bare else {"shapes": (L_a, L_b)}
    return Call(
        L_a,
        lambda a, b: F.dist_matmul(a, b, s.given(L_a), **shapes),
        torch.matmul,
        [randn(*L_a.shape, seed=1), randn(*L_b.shape, seed=2)],
        [L_a, L_b],
        lambda: F.matmul_layout(L_a, L_b),
    )


class Square:
    """The place of a matrix with as many rows as columns that every rank has."""

    def __init__(self, n):
        self.n = n

    def __call__(self, r):
        return r

    def local_shape(self):
        """Of a rank outside."""
        return 0, self.n


def serial_qr(a):
    """The QR whose R has a diagonal that is not negative."""
    q, r = torch.linalg.qr(a)
    sign = torch.where(r.detach().diagonal().real < 0, -1, 1).to(r.dtype)
    return q * sign, r * sign[:, None]


@builder("dist_tsqr")
def _tsqr(s):
    G = s.lay(9, 3)
    if G.ndim:
        splits = G.splits[0] if G.splits and G.partition.shape[0] > 1 else None
        G = dd.Layout(dd.Partition((s.k, 1), s.ranks), G.shape, (splits, None))
    return Call(
        G,
        lambda a: F.dist_tsqr(a, s.given(G)),
        serial_qr,
        [randn(*G.shape, seed=1)],
        [G],
        lambda: (G, Square(G.shape[1]) if G.ndim else whole),
    )


def _embedding(y_layout, **options):
    def build(s):
        G = s.lay(5, 7, 4)
        if s.name == "scalar":
            return Call(G, lambda idx, w: F.dist_embedding(idx, w, G), None, [torch.tensor(1), randn(7, 4)], [G, whole])
        b, v, e = G.shape
        out = _without(G, 1, (b, e)) if y_layout == "root" else Left(G, (1,), False)
        return Call(
            G,
            lambda idx, w: F.dist_embedding(idx, w, s.given(G), y_layout=y_layout, params="invariant", **options),
            lambda idx, w: tf.embedding(idx, w),
            [torch.arange(b) * 3 % v, randn(v, e, seed=2)],
            [along(G, 0), along(G, 1, 2)],
            lambda: out,
        )

    return build


builder("dist_embedding")(_embedding("root"))
builder("dist_embedding/invariant")(_embedding("invariant"))


def _experts(run):
    def build(s):
        if s.name == "scalar":
            P = dd.Partition((s.n,))
            inputs = [randn(), torch.tensor(0), randn(1, 2, 4)]
            return Call(s.lay(), lambda x, e, w: run(x, e, w, P, s.n), None, inputs, [whole] * 3)
        tokens, experts = (1, 1) if s.name == "one" else (7, 3)
        line, rows = s.line, dd.Layout(dd.Partition((s.k, 1), s.ranks), (tokens, 4))
        table = dd.Layout(dd.Partition((s.k, 1, 1), s.ranks), (experts, 2, 4))
        expert = torch.arange(tokens) * 2 % experts
        place = along(table, 0, 1, 2)
        call = Call(
            rows,
            lambda x, e, w: run(x, e, w, line, experts),
            lambda x, e, w: torch.einsum("ti,toi->to", x, w[e]),
            [randn(tokens, 4, seed=1), expert, randn(experts, 2, 4, seed=2)],
            [rows, along(rows, 0), place],
            lambda: rows.with_shape((tokens, 2)),
        )
        call.known = run is not _expert_functions
        return call

    return build


def _expert_functions(x, e, w, P, n):
    return F.expert_parallel(lambda k, t: t @ w[k].T, x, e, P, n)


builder("dist_expert_linear")(_experts(lambda x, e, w, P, n: F.dist_expert_linear(x, w, P, e, num_experts=n)))
builder("expert_parallel")(_experts(_expert_functions))


def _expert_module(x, e, w, P, n):
    layer = dd.nn.ExpertLinear(P, n, 4, 2, bias=False, dtype=w.dtype)
    return torch.func.functional_call(layer, {"weight": w}, (x, e))


builder("nn.ExpertLinear")(_experts(_expert_module))

# ---- convolutions


def _conv(call, serial, out, options, transpose=False):
    """Windows of x; w and the bias whole, or the block of the output channels where those are split."""

    def build(s):
        L = s.lay(2, "c", 5, 4)
        c = L.shape[1] if L.ndim else 2
        w = randn(*((c, 3) if transpose else (3, c)), 3, 3, seed=2)
        if not L.ndim:
            return Call(L, lambda x, w, b: call(x, w, L, b, **options), None, [randn(), w, randn(3)], [L, whole, whole])
        to = out(L, 3, 3, **options)
        w_place = lambda w: w[:, to.slices()[1]] if transpose else w[to.slices()[1]]
        more = {} if s.bare else {"out_channels": 3}
        return Call(
            L,
            lambda x, w, b: call(x, w, s.given(L), b, params="invariant", **options, **more),
            lambda x, w, b: serial(x, w, b, **options),
            [randn(*L.shape, seed=1), w, randn(3, seed=3)],
            [L, w_place, along(to, 1)],
            lambda: to,
        )

    return build


_PADDED, _STRIDED = dict(padding=1), dict(stride=2, padding=1, output_padding=1)
builder("dist_conv", "conv_layout")(_conv(F.dist_conv, tf.conv2d, F.conv_layout, _PADDED))
builder("dist_conv_transpose", "conv_transpose_layout")(
    _conv(F.dist_conv_transpose, tf.conv_transpose2d, F.conv_transpose_layout, _STRIDED, True)
)


def _general(call, serial, out, options, transpose, channel):
    """(batch, out, in, *space)"""

    def build(s):
        G = s.lay(2, 3, "c", 5, 4, channel=channel)
        if s.name == "scalar":
            P = dd.Partition((s.n, 1, 1, 1, 1))
            return Call(G, lambda x, w: call(x, w, P, **options), None, [randn(), randn(3, 2, 3, 3)], [whole, whole])
        b, o, i, *space = G.shape
        x_place = _without(G, 1, (b, i, *space))
        size = out(alone(dd.Layout(x_place.partition, x_place.shape)), o, 3, **options).shape
        y_place = _without(G, 2, size)
        known = {} if s.bare or G.splits else {"shape": x_place.shape}
        return Call(
            G,
            lambda x, w, c: call(x, w, G.partition, c, params="invariant", **options, **known),
            lambda x, w, c: serial(x, w, c, **options),
            [randn(b, i, *space, seed=1), randn(*((i, o) if transpose else (o, i)), 3, 3, seed=2), randn(o, seed=3)],
            [x_place, along(G, *((2, 1) if transpose else (1, 2))), along(G, 1)],
            lambda: y_place,
        )

    return build


for _channel, _what in ((1, "out"), (2, "in")):
    builder(f"dist_conv/general {_what}")(_general(F.dist_conv, tf.conv2d, F.conv_layout, _PADDED, False, _channel))
    builder(f"dist_conv_transpose/general {_what}")(
        _general(F.dist_conv_transpose, tf.conv_transpose2d, F.conv_transpose_layout, _STRIDED, True, _channel)
    )


def _like_linear(y):
    """In the dtype that autocast gives a product: einsum has another one where it needs no product of matrices."""
    return y.to(tf.linear(y.new_ones(1, 1), y.new_ones(1, 1)).dtype)


def _untied(x, w):
    h, v = w.shape[1:3]
    z = torch.stack(
        [torch.stack([x[:, :, i : i + h, j : j + v] for j in range(w.shape[-1])], -1) for i in range(w.shape[-2])], -2
    )
    return _like_linear(torch.einsum("bchwkl,fhwckl->bfhw", z, w))


def _local_conv(transpose):
    def build(s):
        L = s.lay(2, "c", 5, 4)
        if not L.ndim:
            call = F.dist_local_conv_transpose if transpose else F.dist_local_conv
            return Call(L, lambda x, w: call(x, w, L), None, [randn(), randn(3, 4, 3, 2, 2, 2)], [L, whole])
        k = 1 if s.name == "one" else 2
        to = F.conv_layout(L, 3, k)
        w = randn(3, *to.shape[2:], L.shape[1], k, k, seed=2)
        more = {} if s.bare or transpose else {"out_channels": 3}
        place = lambda w: w[tuple(to.slices()[1:])]
        if not transpose:
            return Call(
                L,
                lambda x, w: F.dist_local_conv(x, w, s.given(L), params="invariant", **more),
                _untied,
                [randn(*L.shape, seed=1), w],
                [L, place],
                lambda: to,
            )

        def fold(y, w):
            pull = torch.func.vjp(lambda x: _untied(x, w.conj()), y.new_zeros(L.shape))[1]
            return _like_linear(pull(_like_linear(y))[0])

        return Call(
            L,
            lambda y, w: F.dist_local_conv_transpose(y, w, s.given(to), output_size=L, params="invariant"),
            fold,
            [randn(*to.shape, seed=1), w],
            [to, place],
            lambda: L,
        )

    return build


builder("dist_local_conv")(_local_conv(False))
builder("dist_local_conv_transpose")(_local_conv(True))

# ---- pooling, resampling


def serial_lcn(x):
    """The equations of dist_lcn's docstring for a 3 x 3 window."""
    places = torch.cartesian_prod(*(torch.arange(3, dtype=torch.float64) - 1,) * 2)
    w = torch.exp(-(places**2).sum(1) / (2 * (math.sqrt(2) / 3) ** 2)).reshape(3, 3)
    w = (w / w.sum() / x.shape[1]).to(x.dtype).expand(1, x.shape[1], 3, 3)
    v = x - tf.conv2d(x, w, padding=1)
    return v / tf.conv2d(v * v, w, padding=1).sqrt()


def _at_most(L, k):
    return min(k, L.shape[2], L.shape[3]) if L.ndim == 4 else k


_window = dict(kernel_size=2, stride=1, padding=1)
of_x("dist_lcn", lambda x, P: F.dist_lcn(x, P, 3), serial_lcn)
of_x(
    "dist_max_pool",
    lambda x, P: F.dist_max_pool(x, P, **_window, return_indices=True),
    lambda x: tf.max_pool2d(x, **_window, return_indices=True),
    out=lambda L: (F.pool_layout(L, **_window),) * 2,
)
of_x(
    "dist_avg_pool",
    lambda x, P: F.dist_avg_pool(x, P, **_window),
    lambda x: tf.avg_pool2d(x, **_window),
    out=lambda L: F.pool_layout(L, **_window),
)
BUILDERS["pool_layout"] = BUILDERS["dist_avg_pool"]
of_x(
    "dist_l2_pool", lambda x, P: F.dist_l2_pool(x, P, 1), lambda x: x.square().sqrt(), out=lambda L: F.pool_layout(L, 1)
)
for _size in (1, 3):
    of_x(
        f"dist_adaptive_avg_pool/{_size}",
        lambda x, P, m=_size: F.dist_adaptive_avg_pool(x, P, m),
        lambda x, m=_size: tf.adaptive_avg_pool2d(x, m),
        out=lambda L, m=_size: L.with_shape((*L.shape[:2], m, m)),
    )
of_x(
    "dist_adaptive_max_pool",
    lambda x, P: F.dist_adaptive_max_pool(x, P, 3, return_indices=True),
    lambda x: tf.adaptive_max_pool2d(x, 3, return_indices=True),
    out=lambda L: (L.with_shape((*L.shape[:2], 3, 3)),) * 2,
)
for _mode in ("bilinear", "nearest", "area"):
    of_x(
        f"dist_interpolate/{_mode}",
        lambda x, P, m=_mode: F.dist_interpolate(x, P, (7, 3), mode=m),
        lambda x, m=_mode: tf.interpolate(x, (7, 3), mode=m),
        out=lambda L: F.interpolate_layout(L, (7, 3)),
    )


def _skip(P):
    """A U-Net's skip of (7, 3) pixels over the partition of x; the size alone where x is no image."""
    P = dd.partition.partition_of(P)
    return dd.Layout(P, (1, 1, 7, 3)) if P.ndim == 4 else (7, 3)


of_x(
    "dist_interpolate/layout",
    lambda x, P: F.dist_interpolate(x, P, _skip(P), mode="bilinear"),
    lambda x: tf.interpolate(x, (7, 3), mode="bilinear"),
    out=lambda L: F.interpolate_layout(L, _skip(L)),
)
BUILDERS["interpolate_layout"] = BUILDERS["dist_interpolate/bilinear"]

# ---- Fourier transforms


def _parts(y):
    return y.real, y.imag


def _twice(M):
    return M, M


_SPACE = (2, 3)
of_x(
    "dist_fftn",
    lambda x, P: _parts(F.dist_fftn(x, P, _SPACE)),
    lambda x: _parts(torch.fft.fftn(x, dim=_SPACE)),
    out=lambda L: _twice(F.fft_layout(L, _SPACE)),
)
of_x(
    "dist_ifftn",
    lambda x, P: _parts(F.dist_ifftn(x, P, (1, -1), s=(3, None), norm="ortho", P_out=getattr(P, "partition", P))),
    lambda x: _parts(torch.fft.ifftn(x, (3, x.shape[3]), (1, 3), "ortho")),
    out=lambda L: _twice(dd.Layout(L.partition, (L.shape[0], 3, *L.shape[2:]))),
)
of_x(
    "dist_rfftn",
    lambda x, P: _parts(F.dist_rfftn(x, P, _SPACE, norm="forward")),
    lambda x: _parts(torch.fft.rfftn(x, dim=_SPACE, norm="forward")),
    out=lambda L: _twice(F.fft_layout(L, _SPACE, real=True)),
)
of_x(
    "dist_irfftn",
    lambda x, P: F.dist_irfftn(x, P, _SPACE, s=(6, 7)),
    lambda x: torch.fft.irfftn(x, (6, 7), _SPACE),
    out=lambda L: F.fft_layout(L, _SPACE, real=True, inverse=True, s=(6, 7)),
)
of_x(
    "dist_dctn",
    lambda x, P: F.dist_dctn(x, P, _SPACE),
    lambda x: transformed("dctn", x, _SPACE),
    out=lambda L: F.fft_layout(L, _SPACE),
)
of_x(
    "dist_idctn",
    lambda x, P: F.dist_idctn(x, P, (1, -1), s=(3, None), norm="ortho", P_out=getattr(P, "partition", P)),
    lambda x: transformed("idctn", x, (1, 3), 2, (3, None), "ortho"),
    out=lambda L: dd.Layout(L.partition, (L.shape[0], 3, *L.shape[2:])),
)
of_x(
    "dist_dstn",
    lambda x, P: F.dist_dstn(x, P, _SPACE, type=1, norm="forward"),
    lambda x: transformed("dstn", x, _SPACE, 1, norm="forward"),
    out=lambda L: F.fft_layout(L, _SPACE),
)
of_x(
    "dist_idstn",
    lambda x, P: F.dist_idstn(x, P, _SPACE, type=4, s=(6, 7)),
    lambda x: transformed("idstn", x, _SPACE, 4, (6, 7)),
    out=lambda L: F.fft_layout(L, _SPACE, inverse=True, s=(6, 7)),
)
for _name in ("fft_layout", "fft_stages"):
    BUILDERS[_name] = BUILDERS["dist_fftn"]


def _frequencies(real):
    """Derivatives, as spectral methods take them: the spectrum times its wave numbers."""
    ours, torchs = (F.dist_rfftfreq, torch.fft.rfftfreq) if real else (F.dist_fftfreq, torch.fft.fftfreq)

    def transform(x, P):
        return F.dist_rfftn(x.real if x.is_complex() else x, P, _SPACE) if real else F.dist_fftn(x, P, _SPACE)

    def serial(x):
        return torch.fft.rfftn(x.real if x.is_complex() else x, dim=_SPACE) if real else torch.fft.fftn(x, dim=_SPACE)

    def build(s):
        L = s.lay(3, "c", 5, 4)
        if not L.ndim:
            return Call(L, lambda x: x * ours(L, 0, 3), None, [randn()], [L])
        M, n = F.fft_layout(L, _SPACE, real=real), L.shape[3]
        return Call(
            L,
            lambda x: _parts(transform(x, s.given(L)) * (ours(M, 3, n) if M.active or not s.bare else 1)),
            lambda x: _parts(serial(x) * torchs(n)),
            [randn(*L.shape, seed=1)],
            [L],
            lambda: (M, M),
        )

    return build


builder("dist_fftfreq")(_frequencies(False))
builder("dist_rfftfreq")(_frequencies(True))


def _modes_of(L):
    return ((1, 0), 1) if L.shape[-1] == 1 else ((2, 1), 2)


def serial_spectral(x, w, modes):
    """The equation of dist_spectral_conv for real x: the kept wave numbers one after the other."""
    sizes, (low, high), last = x.shape[2:], modes[0], modes[1]
    X = torch.fft.rfftn(x, dim=_SPACE, norm="forward")[..., :last]
    rows = torch.cat([X[:, :, :low], X[:, :, sizes[0] - high :]], 2)
    y = torch.einsum("bixy,ioxy->boxy", rows, w[..., 0] + 1j * w[..., 1])
    y = torch.cat([y[:, :, :low], y.new_zeros(*y.shape[:2], sizes[0] - low - high, last), y[:, :, low:]], 2)
    y = torch.cat([y, y.new_zeros(*y.shape[:3], sizes[1] // 2 + 1 - last)], 3)
    return torch.fft.irfftn(y, sizes, _SPACE, norm="forward")


def _spectral(s):
    L = s.lay(3, "c", 5, 4)
    if not L.ndim:
        return Call(L, lambda x, w: F.dist_spectral_conv(x, w, L, 1), None, [randn(), randn(1, 1, 1)], [L, whole])
    modes = _modes_of(L)
    to = F.spectral_layout(L, modes, L.shape[1], 3)
    return Call(
        L,
        lambda x, v: F.dist_spectral_conv(x, v[..., 0] + 1j * v[..., 1], s.given(L), modes, params="invariant"),
        lambda x, v: serial_spectral(x, v, modes),
        [randn(*L.shape, seed=1), randn(*to.shape, 2, seed=2)],
        [L, lambda W: W[to.slices()]],
        lambda: L.with_shape((L.shape[0], 3, *L.shape[2:])),
    )


builder("dist_spectral_conv", "spectral_layout")(_spectral)

# ---- between layers


def _flat(s, back):
    L = s.lay(3, "c", 4)
    if s.name == "scalar":
        P = dd.Partition((1, 1))
        call = (lambda x: F.dist_unflatten(x, P, L, ())) if back else (lambda x: F.dist_flatten(x, L, P))
        return Call(L, call, None, [randn()], [L])
    b, c, m = L.shape
    M = dd.Layout(dd.Partition((1, s.k), s.ranks), (b, c * m))
    if back:
        call = lambda y: F.dist_unflatten(y, M, L, L.shape)
        return Call(L, call, lambda y: y.reshape(L.shape), [randn(*M.shape)], [M], lambda: L)
    return Call(
        L, lambda x: F.dist_flatten(x, s.given(L), M), lambda x: x.flatten(1), [randn(*L.shape)], [L], lambda: M
    )


builder("dist_flatten")(lambda s: _flat(s, False))
builder("dist_unflatten")(lambda s: _flat(s, True))


def _padded(call, sign, **more):
    def build(s):
        L = s.lay(4, "c", 5, 4)
        pad = [1, 2, 0, 1] if math.prod(L.shape) > 1 else []
        changes = [sign * n for n in pad]
        return Call(
            L,
            lambda x: call(x, s.given(L), pad, **more),
            lambda x: tf.pad(x, changes, **more),
            [randn(*L.shape, seed=1)],
            [L],
            lambda: F.pad_layout(L, changes),
        )

    return build


builder("dist_pad", scalar=True)(_padded(F.dist_pad, 1, value=0.5))
builder("dist_unpad", scalar=True)(_padded(F.dist_unpad, -1))
BUILDERS["pad_layout"] = BUILDERS["dist_pad"]
SCALARS.add("pad_layout")


def _joined(call, serial, out):
    def build(s):
        L = s.lay(3, "c", 4)
        return Call(
            L,
            lambda x, y: call([x, y], s.given(L), L.ndim - 1 if L.ndim else 0),
            lambda x, y: serial([x, y], -1),
            [randn(*L.shape, seed=1), randn(*L.shape, seed=2)],
            [L, L],
            lambda: out(L),
        )

    return build


builder("dist_cat", "cat_layout")(_joined(F.dist_cat, torch.cat, lambda L: F.cat_layout([L, L], L.ndim - 1)))
builder("dist_stack", "stack_layout", scalar=True)(
    _joined(
        F.dist_stack,
        lambda xs, d: torch.stack(xs, max(xs[0].dim() - 1, 0)),
        lambda L: F.stack_layout(L, max(L.ndim - 1, 0), 2),
    )
)

# ---- normalisation


def _norm(name, call, serial, dims):
    """``dims``: those of x that the parameters lie along; a scale and an offset, or the scale alone."""

    def build(s):
        L = s.lay(3, "c", 4)
        sizes = [L.shape[d] for d in dims] if L.ndim else [2]
        parameters = [randn(*sizes, seed=2 + i) for i in range(1 if name == "dist_rms_norm" else 2)]
        trailing = L.shape[2:] if L.ndim else (2,)
        return Call(
            L,
            lambda x, *w: call(x, s.given(L), trailing, *w),
            serial,
            [randn(*L.shape, seed=1), *parameters],
            [L, *[along(L, *dims)] * len(parameters)],
        )

    builder(name)(build)


def _centred(x, dims, eps=1e-5):
    d = x - x.mean(dims, keepdim=True)
    return d * (d.square().mean(dims, keepdim=True) + eps).rsqrt()


_SHARED = dict(params="invariant")
_norm(
    "dist_batch_norm",
    lambda x, P, _, w, b: F.dist_batch_norm(x, P, None, None, w, b, False, **_SHARED)[0],
    lambda x, w, b: _centred(x, (0, 2)) * w[:, None] + b[:, None],
    (1,),
)
_norm(
    "dist_instance_norm",
    lambda x, P, _, w, b: F.dist_instance_norm(x, P, w, b, **_SHARED),
    lambda x, w, b: _centred(x, (2,)) * w[:, None] + b[:, None],
    (1,),
)
_norm(
    "dist_group_norm",
    lambda x, P, _, w, b: F.dist_group_norm(x, P, 1, w, b, **_SHARED),
    lambda x, w, b: _centred(x, (1, 2)) * w[:, None] + b[:, None],
    (1,),
)
_norm(
    "dist_layer_norm",
    lambda x, P, shape, w, b: F.dist_layer_norm(x, P, shape, w, b, **_SHARED),
    lambda x, w, b: _centred(x, (2,)) * w + b,
    (2,),
)
_norm(
    "dist_rms_norm",
    lambda x, P, shape, w: F.dist_rms_norm(x, P, shape, w, **_SHARED),
    lambda x, w: x * (x.square().mean(2, keepdim=True) + 2.0**-52).rsqrt() * w,
    (2,),
)

# ---- reductions


def _reduction(call, serial, dims, keepdim, more, s):
    L = s.lay(4, "c", 5)
    every = tuple(range(L.ndim)) if dims is None or not L.ndim else tuple(d % L.ndim for d in dims)
    asked = dims if L.ndim and dims else None if call is not F.dist_logsumexp else every
    asked = asked[0] if call is F.dist_argmax and asked else asked
    place = Left(L, every, keepdim) if len(every) < L.ndim else whole
    return Call(
        L,
        lambda x: call(x, s.given(L), asked, keepdim, **more),
        lambda x: serial(x, every, keepdim),
        [randn(*L.shape, seed=1)],
        [L],
        lambda: place,
    )


for _name, _serial in {
    "sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin,
    "var": lambda x, dims, keepdim: x.var(dims, correction=0, keepdim=keepdim),
    "norm": lambda x, dims, keepdim: torch.linalg.vector_norm(x, 2, dims, keepdim),
    "logsumexp": torch.logsumexp,
    "argmax": lambda x, dims, keepdim: x.argmax(dims[0] if len(dims) == 1 and x.dim() != 1 else None, keepdim),
}.items():  # fmt: skip
    for _dims, _keepdim in ((None, False), ((0,), True), ((-1,), False)):
        builder(f"dist_{_name}/{_dims}", scalar=True)(
            partial(
                _reduction,
                getattr(F, f"dist_{_name}"),
                _serial,
                _dims,
                _keepdim,
                {"correction": 0} if _name == "var" else {},
            )
        )

# ---- scans


def serial_scan(a, b, dim=-1, initial=None, reverse=False):
    """h_t = a_t h_{t-1} + b_t, step by step."""
    h, found = torch.zeros_like(b.select(dim, 0)) if initial is None else initial, []
    for t in reversed(range(b.shape[dim])) if reverse else range(b.shape[dim]):
        h = a.select(dim, t) * h + b.select(dim, t)
        found.append(h)
    return torch.stack(found[::-1] if reverse else found, dim)


def _scan(reverse, s):
    L = s.lay(3, "c", 7)
    return Call(
        L,
        lambda a, b: F.dist_scan(a, b, s.given(L), L.ndim - 1, reverse=reverse),
        lambda a, b: serial_scan(a, b, reverse=reverse),
        [randn(*L.shape, seed=1), randn(*L.shape, seed=2)],
        [L, L],
    )


builder("dist_scan")(partial(_scan, False))
builder("dist_scan/reverse")(partial(_scan, True))


@builder("dist_scan/initial")
def _scan_from(s):
    L = s.lay(3, "c", 7)
    start = along(L, 0, 1) if L.ndim else whole
    return Call(
        L,
        lambda a, b, h: F.dist_scan(a, b, s.given(L), L.ndim - 1, initial=h, params="invariant"),
        lambda a, b, h: serial_scan(a, b, initial=h),
        [randn(*L.shape, seed=1), randn(*L.shape, seed=2), randn(*L.shape[:-1], seed=3)],
        [L, L, start],
    )


for _name in ("dist_cumsum", "dist_cumprod"):
    _torchs = getattr(torch, _name.removeprefix("dist_"))
    for _dim in (0, -1):
        of_x(
            f"{_name}/{_dim}",
            lambda x, P, name=_name, dim=_dim: getattr(F, name)(x, P, dim),
            lambda x, call=_torchs, dim=_dim: call(x, dim),
            (4, "c", 5),
        )
of_x(
    "associative_scan",
    lambda x, P: F.associative_scan(torch.add, x, P, 0),
    lambda x: x.cumsum(0),
    (6, "c", 2),
)
of_x(
    "associative_scan/reverse",
    lambda x, P: F.associative_scan(lambda a, b: a * b, x, P, -1, reverse=True),
    lambda x: x.flip(-1).cumprod(-1).flip(-1),
    (3, "c", 6),
)

# ---- losses


def _loss(name, call, serial, x=lambda t: t, y=lambda t: t, **options):
    def build(s):
        L = s.lay(4, "c", 3)
        return Call(
            L,
            lambda x, y: call(x, y, s.given(L), **options),
            serial,
            [x(randn(*L.shape, seed=1)), y(randn(*L.shape, seed=2))],
            [L, L],
            None if options.get("reduction") == "none" else lambda: whole,
        )

    builder(name, scalar=True)(build)


def _huber(x, y, delta=1.0):
    d = (x - y).abs()
    return torch.where(d < delta, d * d / 2, delta * (d - delta / 2))


_inside = lambda t: 0.1 + 0.8 * t.sigmoid()
_loss("dist_mse_loss", F.dist_mse_loss, lambda x, y: (x - y).square().mean())
_loss("dist_mse_loss/none", F.dist_mse_loss, lambda x, y: (x - y).square(), reduction="none")
_loss("dist_l1_loss", F.dist_l1_loss, lambda x, y: (x - y).abs().mean())
_loss("dist_huber_loss", F.dist_huber_loss, lambda x, y: _huber(x, y).mean())
_loss("dist_smooth_l1_loss", F.dist_smooth_l1_loss, lambda x, y: _huber(x, y, 0.5).mean() / 0.5, beta=0.5)
_loss("dist_bce_loss", F.dist_bce_loss, lambda x, y: -(y * x.log() + (1 - y) * (1 - x).log()).mean(), _inside, _inside)
_loss("dist_bce_with_logits_loss", F.dist_bce_with_logits_loss, lambda x, y: (tf.softplus(x) - x * y).mean(), y=_inside)
_loss("dist_kl_div", F.dist_kl_div, lambda x, y: (y * (y.log() - x)).mean(), y=_inside)
_loss("dist_poisson_nll_loss", F.dist_poisson_nll_loss, lambda x, y: (x.exp() - y * x).mean(), y=_inside)


def _classes(name, call, serial, probabilities=False, **options):
    def build(s):
        L = s.lay(4, "c", 3)
        if s.name == "scalar":
            return Call(L, lambda x, t: call(x, t, L), None, [randn(), torch.tensor(0)], [L, whole])
        b, c, m = L.shape
        target = randn(*L.shape, seed=2).softmax(1) if probabilities else (torch.arange(b * m) % c).reshape(b, m)
        return Call(
            L,
            lambda x, t: call(x, t, s.given(L), **options),
            serial,
            [randn(*L.shape, seed=1), target],
            [L, L if probabilities else along(L, 0, 2)],
            (lambda: Left(L, (1,), False)) if options.get("reduction") == "none" else lambda: whole,
        )

    builder(name)(build)


_picked = lambda x, t: -x.gather(1, t[:, None])[:, 0]
_classes("dist_cross_entropy", F.dist_cross_entropy, lambda x, t: _picked(x.log_softmax(1), t).mean())
_classes("dist_cross_entropy/none", F.dist_cross_entropy, lambda x, t: _picked(x.log_softmax(1), t), reduction="none")
_classes(
    "dist_cross_entropy/probabilities", F.dist_cross_entropy, lambda x, t: -(t * x.log_softmax(1)).sum(1).mean(), True
)
_classes("dist_nll_loss", F.dist_nll_loss, lambda x, t: _picked(x, t).mean())

# ---------------------------------------------------------------- modules

_DOUBLE = dict(dtype=torch.float64)


def _module(name, make, twin, shape=None, out=None, draw=randn, targets=None, channel=1):
    """A module of dd.nn and torch's own, both called with the same global parameters as arguments.

    ``make(P, c)`` and ``twin(c)`` for c channels.
    """

    def build(s):
        if s.name == "scalar":
            M = Setting("last").lay(*shape)
            return Call(M, lambda x, *y: make(M, 2)(x, *y), None, [torch.tensor(0) if name == "Embedding" else randn(),
                        *([randn()] if targets else [])], [whole] * (2 if targets else 1))  # fmt: skip
        L = s.lay(*shape, channel=channel)
        c = L.shape[1]
        torch.manual_seed(5)
        serial = twin(c, L)
        torch.manual_seed(5)
        module = make(L, c)
        names = [n for n, p in module.named_parameters()]
        layouts = dd.nn.layouts(module)
        blocks = [layouts[n] for n in names]

        def called(f):
            # a fresh copy each time: some modules count their calls
            return lambda x, *more: torch.func.functional_call(
                copy.deepcopy(f), dict(zip(names, more)), (x, *more[len(names) :])
            )

        def block(P):
            return lambda W: W[P.slices(None if P.active else P.partition.ranks[0])]

        inputs = [randn(*P.shape, seed=10 + i) for i, P in enumerate(blocks)]
        places = [block(P) for P in blocks]
        x_layout, y_layout = (L, L) if out is None else out(L)
        if targets is not None:
            inputs.append(targets(L))
            places.append(L if inputs[-1].shape == L.shape else along(L, 0, 2))
        x, place = (draw(*x_layout.shape, seed=1), x_layout) if isinstance(x_layout, dd.Layout) else x_layout
        return Call(L, called(module), called(serial), [x, *inputs], [place, *places], lambda: y_layout)

    builder(f"nn.{name}")(build)


def _spatial_modules(n):
    shape = (2, "c", 5, 4, 3)[: n + 2]
    ours, torchs = (lambda kind: getattr(dd.nn, f"{kind}{n}d")), (lambda kind: getattr(torch.nn, f"{kind}{n}d"))
    sizes = lambda L: (2, 1, 1) if L.shape[-1] > 1 else (1, 1, 0)
    _module(
        f"Conv{n}d",
        lambda P, c: ours("Conv")(P, c, 3, 3, padding=1, **_DOUBLE),
        lambda c, L: torchs("Conv")(c, 3, 3, padding=1, **_DOUBLE),
        shape,
        lambda L: (L, F.conv_layout(L, 3, 3, padding=1)),
    )
    _module(
        f"ConvTranspose{n}d",
        lambda P, c: ours("ConvTranspose")(P, c, 3, 2, 2, **_DOUBLE),
        lambda c, L: torchs("ConvTranspose")(c, 3, 2, 2, **_DOUBLE),
        shape,
        lambda L: (L, F.conv_transpose_layout(L, 3, 2, 2)),
    )
    _module(
        f"LocalConv{n}d",
        lambda P, c: ours("LocalConv")(P, c, 3, 1, P.shape[2:], **_DOUBLE),
        lambda c, L: ours("LocalConv")(alone(L), c, 3, 1, L.shape[2:], **_DOUBLE),
        shape,
        lambda L: (L, F.conv_layout(L, 3, 1)),
    )
    for kind in ("MaxPool", "AvgPool"):
        _module(
            f"{kind}{n}d",
            lambda P, c, kind=kind: ours(kind)(P, *sizes(P)),
            lambda c, L, kind=kind: torchs(kind)(*sizes(L)),
            shape,
            lambda L: (L, F.pool_layout(L, *sizes(L))),
        )
        _module(
            f"Adaptive{kind}{n}d",
            lambda P, c, kind=kind: ours(f"Adaptive{kind}")(P, 2),
            lambda c, L, kind=kind: torchs(f"Adaptive{kind}")(2),
            shape,
            lambda L: (L, L.with_shape((*L.shape[:2], *(2,) * (L.ndim - 2)))),
        )
    _module(f"L2Pool{n}d", lambda P, c: ours("L2Pool")(P, 1), lambda c, L: ours("L2Pool")(alone(L), 1), shape)


for _n in (1, 2, 3):
    _spatial_modules(_n)

for _name, _make, _twin in (
    (
        "BatchNorm",
        lambda P, c: dd.nn.BatchNorm(P, c, track_running_stats=False, **_DOUBLE),
        lambda c, L: torch.nn.BatchNorm1d(c, track_running_stats=False, **_DOUBLE),
    ),
    ("GroupNorm", lambda P, c: dd.nn.GroupNorm(P, 1, c, **_DOUBLE), lambda c, L: _Group(1, c, **_DOUBLE)),
    (
        "InstanceNorm",
        lambda P, c: dd.nn.InstanceNorm(P, c, affine=True, **_DOUBLE),
        lambda c, L: torch.nn.InstanceNorm1d(c, affine=True, **_DOUBLE),
    ),
    (
        "LayerNorm",
        lambda P, c: dd.nn.LayerNorm(P, P.shape[2:], **_DOUBLE),
        lambda c, L: torch.nn.LayerNorm(L.shape[2:], **_DOUBLE),
    ),
    (
        "RMSNorm",
        lambda P, c: dd.nn.RMSNorm(P, P.shape[2:], **_DOUBLE),
        lambda c, L: torch.nn.RMSNorm(L.shape[2:], **_DOUBLE),
    ),
    (
        "Sharded",
        lambda P, c: dd.nn.Sharded(dd.nn.GroupNorm(P, 1, c, **_DOUBLE)),
        lambda c, L: _Group(1, c, **_DOUBLE),
    ),
    ("LCN", lambda P, c: dd.nn.LCN(P, 3), lambda c, L: dd.nn.LCN(alone(L), 3)),
    ("Dropout", lambda P, c: dd.nn.Dropout(P, 0.4), lambda c, L: dd.nn.Dropout(alone(L), 0.4)),
    ("FeatureDropout", lambda P, c: dd.nn.FeatureDropout(P, 0.4), lambda c, L: dd.nn.FeatureDropout(alone(L), 0.4)),
):
    _module(_name, _make, _twin, (3, "c", 4))
_module(
    "Upsample",
    lambda P, c: dd.nn.Upsample(P, (7, 3)),
    lambda c, L: torch.nn.Upsample((7, 3)),
    (3, "c", 5, 4),
    lambda L: (L, F.interpolate_layout(L, (7, 3))),
)
_module(
    "Linear",
    lambda P, c: dd.nn.Linear(P, P.shape[2], P.shape[1], **_DOUBLE),
    lambda c, L: torch.nn.Linear(L.shape[2], L.shape[1], **_DOUBLE),
    (3, "c", 5),
    lambda L: (_without(L, 1, (L.shape[0], L.shape[2])), _without(L, 2, L.shape[:2])),
)
_module(
    "Embedding",
    lambda P, c: dd.nn.Embedding(P, P.shape[1], P.shape[2], **_DOUBLE),
    lambda c, L: torch.nn.Embedding(L.shape[1], L.shape[2], **_DOUBLE),
    (5, "c", 4),
    lambda L: ((torch.arange(L.shape[0]) * 3 % L.shape[1], along(L, 0)), _without(L, 1, (L.shape[0], L.shape[2]))),
)


class Rows:
    """The place of (batch, seq, features) of ranks that lie over (batch, seq, heads): one value along heads."""

    def __init__(self, L, features):
        self.L, self.features = L, features

    def __call__(self, x):
        return x[self.L.slices()[:2]]

    def local_shape(self):
        return (0, self.L.sizes(1)[0], self.features)


class _Multihead(torch.nn.Module):
    """torch's own multi-head attention, with a weight for each of q, k and v."""

    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, torch.nn.Linear(n, n, **_DOUBLE))

    def forward(self, x):
        x, q, k, v = x.transpose(0, 1), self.q_proj, self.k_proj, self.v_proj
        y, _ = tf.multi_head_attention_forward(
            x, x, x, x.shape[-1], self.heads, None, torch.cat([q.bias, k.bias, v.bias]), None, None, False, 0.0,
            self.out_proj.weight, self.out_proj.bias, use_separate_proj_weight=True,
            q_proj_weight=q.weight, k_proj_weight=k.weight, v_proj_weight=v.weight,
        )  # fmt: skip
        return y.transpose(0, 1)


def _rows_of_heads(L):
    n = 2 * L.shape[2]
    return (randn(L.shape[0], L.shape[1], n, seed=1), Rows(L, n)), Rows(L, n)


_module(
    "MultiheadAttention",
    lambda P, c: dd.nn.MultiheadAttention(P, 2 * P.shape[2], P.shape[2], **_DOUBLE),
    lambda c, L: _Multihead(2 * L.shape[2], L.shape[2]),
    (2, "c", 12),
    _rows_of_heads,
)


class _Fourier(torch.nn.Module):
    """A spectral convolution on one rank."""

    def __init__(self, c, L):
        super().__init__()
        self.modes = _modes_of(L)
        self.weight = torch.nn.Parameter(randn(c, 3, sum(self.modes[0]), self.modes[1], 2))

    def forward(self, x):
        return serial_spectral(x, self.weight, self.modes)


class _Block(torch.nn.Module):
    """A block of a Fourier neural operator on one rank."""

    def __init__(self, c, L):
        super().__init__()
        self.spectral, self.pixel = _Fourier(c, L), torch.nn.Conv2d(c, 3, 1, **_DOUBLE)

    def forward(self, x):
        return torch.tanh(self.spectral(x) + self.pixel(x))


_three = lambda L: (L, L.with_shape((L.shape[0], 3, *L.shape[2:])))
_module(
    "SpectralConv", lambda P, c: dd.nn.SpectralConv(P, c, 3, _modes_of(P), **_DOUBLE), _Fourier, (3, "c", 5, 4), _three
)
_module(
    "FNOBlock",
    lambda P, c: dd.nn.FNOBlock(P, c, 3, _modes_of(P), torch.tanh, **_DOUBLE),
    _Block,
    (3, "c", 5, 4),
    _three,
)
_module("Movement", lambda P, c: dd.nn.Movement(F.repartition, P, P), lambda c, L: torch.nn.Identity(), (3, "c", 4))


class _Group(torch.nn.GroupNorm):
    """One group, by elementary operators: torch's refuses one element."""

    def forward(self, x):
        return _centred(x, (1, 2)) * self.weight[:, None] + self.bias[:, None]


def _ones(layout, seed, **kind):
    return torch.ones(layout.local_shape(), **kind)


class _Scale(dd.nn.Layer):
    """The smallest layer: one parameter along dim 1."""

    def __init__(self, P):
        super().__init__(P, **_DOUBLE)
        self._parameter("weight", (P.shape[1],), (1,), _ones)

    def forward(self, x):
        if not self.P.active:
            return F.nothing(self.P.local_shape(), x, self.weight)
        F.check_bias("Scale", self.P, self.weight, x.shape[1] if x.dim() == 3 else -1)
        return x * F.replicated("invariant", self.P, (0, 2), self.weight)[0][:, None]


_module("Layer", lambda P, c: _Scale(P), lambda c, L: _Scale(alone(L)), (3, "c", 4))


def _made(kind, options, P, c):
    return kind(P, **options)


def _twin_of(kind, options, c, L):
    return kind(**options)


_probable = lambda L: _inside(randn(*L.shape, seed=2))
_index = lambda L: (torch.arange(L.shape[0] * L.shape[2]) % L.shape[1]).reshape(L.shape[0], L.shape[2])
for _name in (
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
):
    _draw = (lambda *a, **k: _inside(randn(*a, **k))) if _name == "BCELoss" else randn
    _targets = _index if _name in ("CrossEntropyLoss", "NLLLoss") else _probable
    _how = dict(reduction="sum" if _name == "KLDivLoss" else "mean")  # torch warns of that mean
    _module(
        _name,
        partial(_made, getattr(dd.nn, _name), _how),
        partial(_twin_of, getattr(torch.nn, _name), _how),
        (4, "c", 3),
        lambda L: (L, whole),
        _draw,
        _targets,
    )
_module(
    "convert",
    lambda P, c: dd.nn.convert(torch.nn.Conv2d(c, 3, 3, padding=1, **_DOUBLE), P),
    lambda c, L: torch.nn.Conv2d(c, 3, 3, padding=1, **_DOUBLE),
    (2, "c", 5, 4),
    lambda L: (L, F.conv_layout(L, 3, 3, padding=1)),
    channel=2,
)  # it keeps channels whole
_converted = BUILDERS["nn.convert"]


@builder("nn.convert")
def _over_a_partition(s):
    call = _converted(s)
    call.known = False  # a twin keeps its partition, and a rank outside hears of no layout
    return call


BUILDERS["nn.layouts"] = BUILDERS["nn.convert"]  # where its parameters lie
BUILDERS["nn.shard_state"] = BUILDERS["nn.convert"]  # whose blocks it cuts
BUILDERS["nn.Loss"] = BUILDERS["nn.MSELoss"]  # the base
BUILDERS["nn.declare"] = BUILDERS["nn.Layer"]  # what its parameters are declared by
BUILDERS["nn.stands_for"] = BUILDERS["nn.convert"]  # asks of what that has made


def public_names():
    """Every name that needs a builder."""
    return {*F.__all__, *(f"maps.{n}" for n in dd.maps.__all__), *(f"nn.{n}" for n in dd.nn.__all__)}


def variants(name):
    """The builders of a public name."""
    return [v for v in BUILDERS if v == name or v.startswith(name + "/")]
