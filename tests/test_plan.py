"""Plans, all ranks in one process: random layouts against slicing, transposes as matrices, and the cost of planning."""

import itertools
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distdl as dd
import distdl.plan as plan_module
from distdl.engine import recognise
from distdl.engine.exchange import simulate
from distdl.engine.recognise import covered, gaps, gathered, summing_group
from distdl.errors import ShapeError, TransportError
from distdl.plan import Axis, Plan, Side, key, split, whole

SIZES = st.sampled_from([0, 1, 2, 3, 5, 6, 7, 11])


@st.composite
def layout_of(draw, shape, pool=9):
    """A random layout of ``shape``: any grid, a subset of ranks in any order, perhaps splits."""
    grid, splits = [], []
    for n in shape:
        p = draw(st.integers(1, 3 if len(shape) > 1 else 6))
        grid.append(p)
        cuts = draw(st.one_of(st.none(), st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1).map(sorted)))
        splits.append(None if cuts is None else tuple(int(v) for v in np.diff([0, *cuts, n])))
    size = int(np.prod(grid))
    ranks = draw(st.permutations(range(max(pool, size))))[:size]
    return dd.Layout(dd.Partition(grid, ranks), shape, splits)


@st.composite
def two_layouts(draw):
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    return draw(layout_of(shape)), draw(layout_of(shape))


def shards(L, X):
    """By hand: sizes, cumulated."""
    blocks = {}
    for coords in itertools.product(*map(range, L.partition.shape)):
        y = X
        for d, c in enumerate(coords):
            balanced = [len(b) for b in np.array_split(np.arange(L.shape[d]), L.partition.shape[d])]
            sizes = L.splits[d] if L.splits and L.splits[d] else balanced
            y = y.split(list(sizes), d)[c]
        blocks[L.partition.rank_at(coords)] = y
    return [blocks[r] for r in L.partition.ranks]


@settings(max_examples=300, deadline=None)
@given(two_layouts())
def test_repartition(pair):
    L, M = pair
    X = torch.arange(float(np.prod(L.shape))).reshape(L.shape)
    plan = Plan(Side.of(L), Side.of(M))
    got = plan.simulate([x.clone() for x in shards(L, X)])
    for r, y, wanted in zip(M.partition.ranks, got, shards(M, X), strict=True):
        assert torch.equal(y, wanted)
        assert plan.view(r).out_shape == tuple(wanted.shape)
    assert plan.T.T is plan and Plan(Side.of(M), Side.of(L)) == plan.T
    assert plan.is_identity() == (L == M)
    for r in plan.ranks:  # what r sends to s is what s expects of r, in size and order
        for message in plan.view(r).sends:
            twin = next(m for m in plan.view(message.peer).received if m.peer == r)
            assert [s for _, s in message.boxes] == [s for _, s in twin.boxes] and message.volume == twin.volume > 0
    moved = sum(plan.volume(r) for r in plan.ranks)
    assert moved <= X.numel() and plan.messages(L.partition.ranks[0]) == len(plan.view(L.partition.ranks[0]).sends)
    both = plan.simulate([torch.stack([x, x + 1]) for x in shards(L, X)])  # one leading batch axis
    assert all(torch.equal(y, torch.stack([w, w + 1])) for y, w in zip(both, shards(M, X)))


def matrix(plan):
    """The dense matrix of a plan, by basis vectors: from all held elements to all wanted ones."""
    ins = [plan.held.local_shape(r) for r in plan.held.partition.ranks]
    sizes = [int(np.prod(s)) for s in ins]
    basis = torch.eye(sum(sizes), dtype=torch.float64)
    parts = basis.split(sizes, 1)
    out = plan.simulate([p.reshape(len(basis), *s) for p, s in zip(parts, ins)])
    return torch.cat([y.reshape(len(basis), math.prod(y.shape[1:])) for y in out], 1).T


@settings(max_examples=100, deadline=None)
@given(two_layouts())
def test_transpose_is_the_matrix_transpose(pair):
    plan = Plan(Side.of(pair[0]), Side.of(pair[1]))
    assert torch.equal(matrix(plan.T), matrix(plan).T)


HALOS = st.tuples(
    st.sampled_from(["none", "zeros", "circular", "reflect", "replicate"]),
    st.integers(1, 4),
    st.integers(2, 7),
    st.integers(0, 9),
    st.integers(0, 9),
)


@settings(max_examples=150, deadline=None)
@given(HALOS, HALOS)
def test_transpose_of_halos_is_the_matrix_transpose(a, b):
    (kinds, grid, shape, left, right) = zip(a, b)
    limit = [n - 1 if k == "reflect" else 9 for k, n in zip(kinds, shape)]
    left, right = ([min(w, m) for w, m in zip(ws, limit)] for ws in (left, right))
    try:
        plan = dd.HaloSpec(dd.Partition(grid), shape, tuple(left), tuple(right), boundary=kinds).plan()
    except dd.errors.PartitionError:
        pytest.fail("a legal halo was refused")
    assert torch.equal(matrix(plan.T), matrix(plan).T)


def test_digest_is_equal_in_every_process():
    import subprocess
    import sys

    code = "from distdl.plan import *; s = Side.of(Layout(Partition((3,)), (7,))); print(Plan(s, s).digest)"
    env = {**os.environ, "PYTHONPATH": str(Path(dd.__file__).parents[1])}

    def run(seed):
        return subprocess.check_output([sys.executable, "-c", code], text=True, env={**env, "PYTHONHASHSEED": seed})

    runs = {run("1"), run("2")}
    assert len(runs) == 1 and len(runs.pop().strip()) == 16


def test_summing_group_and_identity():
    P = dd.Partition((2, 2), (3, 1, 0, 2))
    x = whole(5)
    everyone, rows = Side(P, (x,)), Side(P, (key(0, range(2)), x))
    alone = Side(P, (key(0, range(2)), key(1, range(2)), x))
    assert summing_group(Plan(everyone, everyone), 0) == (0, 1, 2, 3)
    assert summing_group(Plan(rows, rows), 3) == (1, 3) and summing_group(Plan(rows, rows), 2) == (0, 2)
    assert summing_group(Plan(alone, alone), 0) is None and Plan(alone, alone).is_identity()
    assert not Plan(rows, rows).is_identity() and not Plan(everyone, everyone).is_identity()


def test_identity_is_what_the_matrix_says():
    """Every kind of side that is both held and wanted: an identity if and only if its matrix is one."""
    P, Q = dd.Partition((3,), (2, 0, 1)), dd.Partition((2, 2))
    keys = key(0, range(3))
    part = Axis(0, (((0, 2, 1),), ((2, 3, 0),), ((3, 5, 0),)), (3, 1, 2))  # the first rank's block leaves a gap
    twice = Axis(0, (((0, 1, 0), (1, 2, 1)), ((2, 3, 0),), ()), (2, 1, 0))
    sides = [
        Side.of(dd.Layout(P, (5,))),
        Side.of(dd.Layout(P, (5,), ((0, 5, 0),))),
        Side.of(dd.Layout(P, (2,))),
        Side.of(dd.Layout(Q, (3, 5))),
        Side.of(dd.Layout(dd.Partition(()), ())),
        Side(P, (whole(2),)),
        Side(P, (keys, whole(2))),
        Side(P, (key(0, (0, 0, 2)), whole(2))),
        Side(P, (key(0, (0, None, 2)), whole(2))),
        Side(P, (part,)),
        Side(P, (keys, part)),
        Side(Q, (split(((0, 2), (2, 3)), 0),)),
        Side(Q, (split(((0, 2), (2, 3)), 0), key(1, (0, 1)))),
        Side(P, (twice,)),
        Side(Q, (split(((0, 2), (2, 3)), 0), split(((0, 1), (0, 1)), 1))),
        Side(dd.Partition((1,)), (whole(3),)),
        Side(P, (split(((0, 2), (1, 3), (3, 4)), 0),)),
        Side(dd.Partition((1, 1)), (whole(3),)),
        Side(P, (split(((0, 2), (1, 1), (2, 4)), 0),)),
        Side(dd.Partition((1,)), (Axis(None, (((0, 1, 0), (1, 2, 0)),), None), whole(2))),  # under two keys: twice
    ]
    found = []
    for side in sides:
        A = matrix(Plan(side, side))
        found.append(Plan(side, side).is_identity())
        if side.axes != (twice,):  # two runs in one block: right, but not worth finding out
            assert found[-1] == torch.equal(A, torch.eye(len(A), dtype=A.dtype)), side
    assert sum(found) == 10 and not Plan(sides[0], sides[1]).is_identity()
    spec = dd.HaloSpec(P, (5,), 0)
    assert spec.plan().is_identity() and not dd.HaloSpec(P, (5,), 1).plan().is_identity()


def test_what_a_plan_says_of_itself():
    L, M = dd.Layout(dd.Partition((2, 1), (4, 1)), (5, 3)), dd.Layout(dd.Partition((1, 2), (3, 0)), (5, 3))
    plan = Plan(Side.of(L), Side.of(M))
    assert plan.ranks == (0, 1, 3, 4) and plan.T.T is plan and plan.view(4) is plan.view(4)
    assert Plan(Side.of(dd.Layout(dd.Partition((2,), (16, 9)), (4,))), plan.held).ranks[-2:] == (9, 16)
    assert len(plan.digest) == 16 and plan.digest == Plan(Side.of(L), Side.of(M)).digest != plan.T.digest
    assert plan.view(0).in_shape == (0, 3) and plan.view(4).out_shape == (0, 2) and plan.view(7).in_shape == (0, 3)
    assert (
        plan.messages(4) == 2
        and plan.volume(4) == 9
        and plan.volume(1) == 6
        and plan.messages(0) == plan.volume(0) == 0
    )
    assert [m.peer for m in plan.view(4).sends] == [0, 3] and [m.peer for m in plan.view(0).received] == [4, 1]
    late = Plan(Side.of(dd.Layout(L.partition, (5, 3), ((2, 3), None))), Side.of(M))
    assert [m.peer for m in late.view(0).received] == [1, 4], "largest first"
    assert Side.of(dd.Layout(dd.Partition((2, 1, 1)), (4, 5, 6))).local_shape(9) == (0, 5, 6)


def test_how_arrivals_combine():
    """adds: an element arrives twice. covered: nothing must be zeroed first, as the first arrivals fill the output."""
    P = dd.Partition((2,))
    L, everyone = Side.of(dd.Layout(P, (5,))), Side(P, (whole(5),))

    def combine(plan):
        return [(plan.view(r).adds, covered(plan.view(r))) for r in P.ranks]

    assert combine(Plan(L, everyone)) == [(False, True)] * 2  # all-gather
    assert (
        combine(Plan(everyone, L)) == combine(Plan(everyone, everyone)) == [(True, True)] * 2
    )  # reduce-scatter, all-reduce
    assert combine(Plan(L, L)) == [(False, True)] * 2
    halo = dd.HaloSpec(P, (5,), 1, boundary="zeros").plan()
    assert combine(halo) == [(False, False)] * 2 and combine(halo.T) == [(True, True)] * 2
    around = dd.HaloSpec(
        P, (5,), 7, boundary="circular"
    ).plan()  # several boxes in one message, which name elements twice
    assert combine(around) == [(False, True)] * 2 and combine(around.T) == [(True, False)] * 2
    again = Side(P, (Axis(0, (((0, 1, 0), (0, 1, 1)), ((0, 2, 0),)), (2, 2)),))  # two boxes, as large as the output
    summed = Plan(again, Side(dd.Partition((1,)), (whole(2),)))
    assert (summed.view(0).adds, covered(summed.view(0))) == (True, False)
    assert summed.simulate([torch.ones(2), torch.ones(2)])[0].tolist() == [3.0, 1.0]
    back = Plan(Side(dd.Partition((3,)), (split(((0, 1), (5, 6), (0, 1)), 0),)), Side(dd.Partition((1,)), (whole(6),)))
    assert back.view(0).adds and back.simulate([torch.ones(1)] * 3)[0].tolist() == [2.0, 0, 0, 0, 0, 1.0], (
        "in any order"
    )
    nobody = Side(P, (key(0, (None, None)), whole(3)))
    assert combine(Plan(Side(P, (key(0, (0, 1)), whole(3))), nobody)) == [(False, False)] * 2
    assert combine(dd.maps.all_sum_reduce(dd.Partition((1, 2)), (5,), (0,)).plan) == [(False, True)] * 2, (
        "over a dim of one rank"
    )
    empty = Side.of(dd.Layout(P, (0,)))
    assert combine(Plan(empty, empty)) == [(False, True)] * 2
    apart = Side(dd.Partition((3,)), (split(((0, 3), (1, 4), (0, 4)), 0),))  # blocks that overlap are no all-reduce
    assert [summing_group(Plan(apart, apart), r) for r in range(3)] == [None] * 3


def test_tensors_under_two_keys():
    """What is held under two keys, or wanted under two, counts for each."""
    two = Axis(None, (((0, 1, 0), (1, 2, 0)),), None)
    plan = Plan(Side(dd.Partition((1,)), (two, whole(2))), Side(dd.Partition((1,), (1,)), (two, whole(2))))
    assert torch.equal(matrix(plan), 2 * torch.eye(2).double()) and plan.volume(0) == 4
    sources = Side(dd.Partition((2,)), (key(0, (0, 1)), whole(2)))
    total = Plan(sources, Side(dd.Partition((1,), (2,)), (two, whole(2))))
    assert torch.equal(matrix(total), torch.eye(2).double().repeat(1, 2)) and torch.equal(
        matrix(total.T), matrix(total).T
    )


def check_combining(plan):
    """``adds`` and ``covered`` of every rank, against how often each element of its output arrives."""
    times = matrix(plan).sum(1).split([math.prod(plan.wanted.local_shape(r)) for r in plan.wanted.partition.ranks])
    for r, arrivals in zip(plan.wanted.partition.ranks, times):
        view = plan.view(r)
        assert view.adds == bool((arrivals > 1).any()), plan
        gapless = bool((arrivals > 0).all())
        if view.adds:  # then the first message alone, as one box, must fill the output
            first = view.received[0]
            assert covered(view) == (len(first.boxes) == 1 and first.volume == len(arrivals)), plan
        else:
            assert covered(view) == gapless, plan
        if gaps(view) is not None:
            marked = torch.zeros(view.out_shape, dtype=torch.int64)
            for starts, sizes in gaps(view):
                marked[tuple(slice(a, a + n) for a, n in zip(starts, sizes))] += 1
            assert torch.equal(marked.reshape(-1), (arrivals == 0).long()), plan


def test_arrivals_are_counted_right():
    """Random movements and their transposes, and boxes that touch, meet in one dim only, or lie inside one another."""
    import random

    from fuzzing import BUILDERS, KINDS, draw, seed_of

    for name in BUILDERS:
        for kind in KINDS:
            case = draw(name, kind, random.Random(seed_of(name, kind, "arrivals")), 5)
            check_combining(case.map.plan)
            check_combining(case.map.plan.T)
    P, rng = dd.Partition((3,)), random.Random(1)
    for _ in range(150):
        held = []
        for _ in range(2):  # two dims cut along one grid dim: boxes on a diagonal, anywhere
            starts = [rng.randint(0, 4) for _ in range(3)]
            held.append([(a, a + rng.randint(0, 3)) for a in starts])
        side = Side(
            P,
            tuple(Axis(0, tuple(((a, b, 0),) for a, b in blocks), tuple(b - a for a, b in blocks)) for blocks in held),
        )
        check_combining(Plan(side, Side(dd.Partition((1,)), (whole(7), whole(7)))))


def test_copies_of_a_sum_are_bitwise_equal():
    """Every rank adds in grid order, whichever terms are its own: here the order decides the float32 result."""
    everyone = Side(dd.Partition((5,), (3, 0, 4, 1, 2)), (whole(1),))
    terms = [torch.tensor([v]) for v in (1e8, 3.0, -1e8, 0.3, 1e-7)]
    got = Plan(everyone, everyone).simulate(terms)
    in_order = terms[0] + terms[1] + terms[2] + terms[3] + terms[4]
    assert all(torch.equal(y, in_order) for y in got)


def test_simulate_checks_its_input():
    L = dd.Layout(dd.Partition((2,)), (4,))
    plan = Plan(Side.of(L), Side.of(dd.Layout(dd.Partition((2,)), (4,), ((1, 3),))))
    with pytest.raises(ShapeError):
        plan.simulate([torch.ones(2)])
    with pytest.raises(ShapeError):
        plan.simulate([torch.ones(2), torch.ones(3)])


def test_local_transport_checks_lengths():
    from distdl.engine.local import LocalTransport

    boxes = LocalTransport(0, 2).mailboxes
    a, b = LocalTransport(0, 2, boxes), LocalTransport(1, 2, boxes)
    x, y = torch.ones(2), torch.zeros(3)
    a.post([(1, x.data_ptr(), 8)], [])
    with pytest.raises(TransportError, match="length"):
        b.wait(b.post([], [(0, y.data_ptr(), 12)]))
    with pytest.raises(TransportError, match="nothing was sent"):
        b.wait(b.post([], [(0, y.data_ptr(), 12)]))
    assert y.tolist() == [0, 0, 0]


@pytest.mark.parametrize("what", ["repartition", "halo"])
def test_planning_4096_ranks(what):
    """A rank's plan costs what its own messages cost: below 10 ms (best of several) on a 16x16x16 grid."""
    P, Q, shape = dd.Partition((16, 16, 16)), dd.Partition((16, 16, 16), range(4095, -1, -1)), (500, 400, 333)
    if what == "halo":
        plan = dd.HaloSpec(P, shape, 2, boundary="circular").plan()
    else:
        plan = Plan(Side.of(dd.Layout(P, shape)), Side.of(dd.Layout(Q, shape, (None, None, (33, *(20,) * 15)))))
    plan.view(0)  # the shared tables
    took = []
    for rank in (77, 2048, 4095, 1234, 9, 3333, 700, 2222):
        start = time.perf_counter()
        view = plan.view(rank)
        took.append(time.perf_counter() - start)
        assert len(view.received) >= 1
    assert min(took) < 0.010, took


@pytest.mark.parametrize("boundary", ["none", "circular"])
def test_planning_looks_at_its_own_peers_only(boundary, monkeypatch):
    """On a line of 20,000 ranks, empty blocks among them, as many coordinates are looked at as on one of 20."""
    looked = []
    monkeypatch.setattr(plan_module, "_overlaps", lambda *runs, of=plan_module._overlaps: looked.append(1) or of(*runs))
    counts = []
    for ranks in (20, 20_000):
        sizes = (0, 3, *(2,) * (ranks - 4), 0, 1)
        plan = dd.HaloSpec(dd.Layout(dd.Partition((ranks,)), (sum(sizes),), (sizes,)), 3, boundary=boundary).plan()
        looked.clear()
        view = plan.view(1)
        peers = {2, 3, ranks - 4, ranks - 3, ranks - 1} if boundary == "circular" else {2, 3}
        assert {m.peer for m in view.sends} <= peers and {m.peer for m in view.received} <= {1, *peers}
        counts.append(len(looked))
    assert counts[0] == counts[1] < 40, counts


def test_simulate_reproduces_itself():
    L = dd.Layout(dd.Partition((4,)), (6,))
    plan = dd.HaloSpec(L, 5, boundary="circular").plan().T
    xs = [torch.rand(plan.held.local_shape(r)) for r in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(simulate(plan, xs), simulate(plan, xs)))


def test_gathered():
    """Which movements are an all-gather of equal blocks: asked of the whole plan, so that all ranks answer alike."""
    P, L = dd.Partition((2, 3)), dd.Layout(dd.Partition((2, 3)), (4, 6))
    for dims in ((0,), (1,), (0, 1), (1, 0)):
        plan = dd.maps.all_gather(L, dims).plan
        assert gathered(plan) == tuple(sorted(dims)) and gathered(plan.T) is None, dims
    assert gathered(dd.maps.reduce_scatter(L, 1).plan.T) == (1,)
    assert gathered(dd.maps.gathering(P, (2, 5, 6), {2: 1}).plan) == (1,), (
        "copies of other ranks have keys of their own"
    )
    assert gathered(dd.maps.gathering(P, (6, 4), {1: 0, 0: 1}).plan) == (0, 1)
    assert gathered(dd.maps.gathering(dd.Partition((1, 3)), (6,), {0: 1}).plan) == (1,), (
        "a dim of one rank needs no key"
    )
    uneven, empty = dd.Layout(P, (5, 6)), dd.Layout(P, (4, 2))
    assert gathered(dd.maps.all_gather(uneven, 0).plan) is None and gathered(dd.maps.all_gather(uneven, 1).plan) == (1,)
    assert gathered(dd.maps.all_gather(empty, 1).plan) is None and gathered(dd.maps.all_gather(empty, 0).plan) == (0,)
    backwards = dd.Layout(dd.Partition((3,), ranks=(2, 0, 1)), (6,))
    assert gathered(dd.maps.all_gather(backwards).plan) == (0,)
    line = dd.Partition((3,))
    for A in (
        dd.maps.repartition(L, dd.Partition((3, 2))),
        dd.maps.halo_exchange(dd.HaloSpec(L, 1)),
        dd.maps.shift(line, 0, shape=(2,)),
        dd.maps.all_sum_reduce(line, (2,)),
        dd.maps.broadcast(dd.Partition((1,)), line, (2,)),
        dd.maps.scatter(L, 0),
        dd.maps.gather(L, 0),
        dd.maps.repartition(L, dd.Layout(P, (4, 6), ((1, 3), None))),
    ):
        assert gathered(A.plan) is None and gathered(A.plan.T) is None, A
    blocks = (((0, 2),), ((2, 4),))
    held, whole_4 = split(tuple(b[0] for b in blocks), 0), whole(4)
    columns = dd.Partition((2, 2))
    assert gathered(Plan(Side(columns, (held,)), Side(columns, (whole_4,)))) is None, (
        "copies along the other dim would be added"
    )
    row = dd.Partition((2, 1))
    assert gathered(Plan(Side(row, (held,)), Side(row, (whole_4,)))) == (0,), "there is no other"
    keyed = key(1, (0, 1))
    assert gathered(Plan(Side(columns, (keyed, held)), Side(columns, (keyed, whole_4)))) == (0,)
    assert gathered(Plan(Side(columns, (key(1, (0, 0)), held)), Side(columns, (key(1, (0, 0)), whole_4)))) is None
    assert (
        gathered(Plan(Side(columns, (keyed, held)), Side(dd.Partition((2, 2), (0, 1, 3, 2)), (keyed, whole_4)))) is None
    )
    assert gathered(Plan(Side(columns, (keyed, held)), Side(columns, (keyed, whole(5))))) is None
    twice = Plan(Side(columns, (keyed, held, held)), Side(columns, (keyed, whole_4, whole_4)))
    assert gathered(twice) is None, "two tensor dims along one grid dim are no row of blocks"


def test_piles():
    """Whether an element may arrive three times or more: only then a sum of halves needs a wider dtype."""

    def piles(plan):
        return [recognise.piles(plan.view(r)) for r in plan.ranks]

    for n in (2, 3):
        P = dd.Partition((n,))
        assert (
            piles(dd.maps.all_sum_reduce(P, (2,)).plan)
            == piles(dd.maps.reduce_scatter(dd.Layout(P, (6,))).plan)
            == [n > 2] * n
        )
        assert piles(dd.maps.all_sum_reduce(P, ()).plan) == [n > 2] * n, "scalars too"
    line = dd.Layout(dd.Partition((3,)), (12,))
    assert piles(dd.maps.halo_exchange(dd.HaloSpec(line, 1)).plan.T) == [False] * 3, "ghosts of two sides do not meet"
    assert piles(dd.maps.halo_exchange(dd.HaloSpec(line, 3)).plan.T) == [False, True, False]
    assert piles(dd.maps.halo_exchange(dd.HaloSpec(line, 1)).plan) == [False] * 3, "nothing is added"
    square = dd.Layout(dd.Partition((2, 2)), (8, 8))
    assert piles(dd.maps.halo_exchange(dd.HaloSpec(square, 1)).plan.T) == [True] * 4, "corners"
    folded = dd.maps.halo_exchange(dd.HaloSpec(dd.Layout(dd.Partition((2,)), (4,)), 3, boundary="circular")).plan.T
    assert piles(folded) == [True] * 2
    twice = Side(dd.Partition((2,)), (Axis(0, (((0, 1, 0), (0, 1, 1)), ((0, 1, 0),)), (2, 1)),))
    three = Plan(twice, Side(dd.Partition((1,)), (whole(1),)))
    assert recognise.piles(three.view(0)) and three.simulate([torch.ones(2), torch.ones(1)])[0].tolist() == [3.0]
    many = dd.Partition((66,))
    assert recognise.piles(dd.maps.sum_reduce(many, dd.Partition((1,)), (1,)).plan.view(0))


def test_gaps():
    """What a window with zeros leaves free, as boxes; not worked out where arrivals are no single box, or are added."""
    L = dd.Layout(dd.Partition((2, 1)), (4, 3))
    view = dd.HaloSpec(L, (1, 2), (0, 1), boundary="zeros").plan().view
    assert gaps(view(0)) == (((0, 0), (1, 6)), ((1, 0), (2, 2)), ((1, 5), (2, 1)))
    assert gaps(view(1)) == (((0, 0), (3, 2)), ((0, 5), (3, 1)))
    below = dd.HaloSpec(dd.Layout(dd.Partition((2,)), (4,)), 0, 3, boundary="zeros").plan().view
    assert gaps(below(0)) == (((4,), (1,)),) and gaps(below(1)) == (((2,), (3,)),)
    assert gaps(dd.maps.repartition(L, dd.Partition((1, 2))).plan.view(0)) == ()
    assert gaps(dd.maps.shift(dd.Partition((2,)), 0, 1, False, (2,)).plan.view(0)) is None, "nothing arrives"
    assert gaps(dd.maps.halo_exchange(dd.HaloSpec(L, 1)).plan.T.view(0)) == ()
    ends = Axis(0, (((0, 1, 0), (2, 3, 1)), ()), (2, 0))
    corner = Plan(Side(dd.Partition((2,)), (ends,)), Side(dd.Partition((1,)), (whole(3),)))
    assert gaps(corner.view(0)) is None
    assert corner.simulate([torch.ones(2), torch.ones(0)])[0].tolist() == [1.0, 0.0, 1.0]


def test_digests_tell_large_partitions_apart():
    """A partition's picture leaves ranks out; its digest does not."""
    ranks = [list(range(18)) for _ in range(2)]
    ranks[1][8:10] = [9, 8]
    one = Side(dd.Partition((1,), (0,)), (whole(36), whole(2), whole(2)))
    plans = [Plan(Side.of(dd.Layout(dd.Partition((18, 1, 1), r), (36, 2, 2))), one) for r in ranks]
    assert plans[0] != plans[1] and plans[0].digest != plans[1].digest


def test_gathered_asks_every_axis():
    """Axes that are equal on both sides must fill their dims, and leave the gathered grid dim alone."""
    P = dd.Partition((4,))
    held, wanted = split(tuple((2 * i, 2 * i + 2) for i in range(4)), 0), whole(8)
    pairs = key(0, (0, 0, 1, 1))
    assert gathered(Plan(Side(P, (held,)), Side(P, (wanted,)))) == (0,)
    assert gathered(Plan(Side(P, (pairs, held)), Side(P, (pairs, wanted)))) is None
    hole = Axis(None, (((0, 1, 0), (2, 3, 2)),), (3,))
    assert gathered(Plan(Side(P, (held, hole)), Side(P, (wanted, hole)))) is None


def test_arrivals_of_one_size_come_in_grid_order():
    """However Python's sets order coordinates: sums are taken in this order, on every rank that wants the same box."""
    fine = dd.Layout(dd.Partition((10,)), (20,))
    plan = Plan(Side.of(fine), Side.of(dd.Layout(dd.Partition((3,)), (20,), ((14, 4, 2),))))
    assert [[m.peer for m in plan.view(r).received] for r in range(3)] == [list(range(7)), [7, 8], [9]]
    for width in range(1, 9):  # a window over the blocks after this one
        window = dd.HaloSpec(fine, 0, 2 * width).plan()
        assert all(
            [m.peer for m in window.view(r).received] == list(range(r, r + width + 1)) for r in range(10 - width)
        )
