"""Partitions and layouts: plain values; blocks cover the tensor exactly once."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distdl as dd
from distdl.errors import PartitionError, ShapeError


def test_ranks_and_index():
    P = dd.Partition((2, 3), ranks=(7, 1, 4, 0, 9, 2))
    assert (P.shape, P.size, P.ndim) == ((2, 3), 6, 2)
    table = np.array(P.ranks).reshape(P.shape)
    for coords in itertools.product(*map(range, P.shape)):
        assert P.index(int(table[coords])) == coords and P.rank_at(coords) == table[coords]
    assert P.index(3) is None
    assert P.rank_at((-1, -3)) == 0 and P.rank_at(np.array([1, 2])) == 2
    for wrong in ((1,), (1, 2, 0), (2, 0), (0, -4), (0, 1.0), 3, None):
        with pytest.raises(PartitionError, match="2 coordinates"):
            P.rank_at(wrong)
    assert dd.Partition((2, 2)).ranks == (0, 1, 2, 3)
    assert dd.Partition(()).ranks == (0,) and dd.Partition(()).index(0) == ()
    assert dd.Partition((1,), (5,)).index() is None and not dd.Partition((1,), (5,)).active


def test_take_and_along():
    ranks = tuple(np.random.default_rng(0).permutation(40)[:24])
    P, table = dd.Partition((2, 3, 4), ranks), np.array(ranks).reshape(2, 3, 4)
    for dim in range(-3, 3):
        for i in range(-P.shape[dim], P.shape[dim]):
            taken = np.take(table, i, dim)
            assert P.take(dim, i) == dd.Partition(taken.shape, taken.ravel())
            kept = np.expand_dims(taken, dim % 3)
            assert P.take(dim, i, keepdim=True) == dd.Partition(kept.shape, kept.ravel())
    for coords in itertools.product(range(2), range(3), range(4)):
        rank = int(table[coords])
        for dims in (None, (), 0, -1, (0, 2), (1,), [2, 1]):
            free = (0, 1, 2) if dims is None else tuple(d % 3 for d in ([dims] if isinstance(dims, int) else dims))
            fibre = table[tuple(slice(None) if d in free else slice(c, c + 1) for d, c in enumerate(coords))]
            assert P.along(dims, rank) == dd.Partition(fibre.shape, fibre.ravel())
    assert P.along(0, rank=99) is None
    assert dd.Partition((1,) * 9).dims((8, 1, -9)) == (0, 1, 8)


def test_permute():
    """As NumPy transposes the table of ranks; of a Layout, as torch permutes the tensor."""
    ranks = tuple(np.random.default_rng(1).permutation(40)[:24])
    P, table = dd.Partition((2, 3, 4), ranks), np.array(ranks).reshape(2, 3, 4)
    L, X = dd.Layout(P, (3, 7, 9), (None, (1, 6, 0), (2, 0, 4, 3))), torch.arange(189).reshape(3, 7, 9)
    for order in itertools.permutations(range(3)):
        turned = table.transpose(order)
        assert P.permute(order) == dd.Partition(turned.shape, turned.ravel())
        for rank in (*ranks, 99):
            mine = L.permute(order).shard(X.permute(order), rank)
            assert torch.equal(mine, L.shard(X, rank).permute(order)) or (rank == 99 and not mine.numel())
    assert P.permute((-1, 0, 1)) == P.permute([2, 0, 1]) == P.permute(np.array([2, 0, 1]))
    assert dd.Partition(()).permute(()) == dd.Partition(())
    for wrong in ((0, 1), (0, 1, 1), (0, 1, 2, 0), (0, 1, 3), (), 0, None, (0, 1, 2.0)):
        for of in (P, L):
            with pytest.raises(PartitionError, match="dim"):
                of.permute(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dd.Partition((0, 2)),
        lambda: dd.Partition((2,), (1, 1)),
        lambda: dd.Partition((2,), (0,)),
        lambda: dd.Partition((2,), (0, -1)),
        lambda: dd.Partition((2.5,)),
        lambda: dd.Partition(3),
        lambda: dd.Partition((2,), 3),
        lambda: dd.Partition((2, 2)).take(2, 0),
        lambda: dd.Partition((2, 2)).take(0, 2),
        lambda: dd.Partition((2,)).along(1),
        lambda: dd.Layout(dd.Partition((2,)), (3, 3)),
        lambda: dd.Layout(dd.Partition((2,)), (-1,)),
        lambda: dd.Layout(dd.Partition((2,)), (4,), ((1, 2),)),
        lambda: dd.Layout(dd.Partition((2,)), (4,), ((5, -1),)),
        lambda: dd.Layout(dd.Partition((2,)), (4,), ((1, 1, 2),)),
        lambda: dd.Layout(dd.Partition((2,)), (4,), (None, None)),
    ],
)
def test_errors(make):
    with pytest.raises(PartitionError) as caught:
        make()
    error = caught.value
    assert error.op and str(error).startswith(error.op) and isinstance(error, ValueError)


def test_a_rank_is_an_integer():
    """Coordinates where a rank is expected are an error, not a rank outside: each method, before and after its cache is
    warm."""
    P = dd.Partition((2, 2))
    L, line = dd.Layout(P, (5, 3)), dd.Layout(dd.Partition((4,)), (10,))
    spec, plan = dd.HaloSpec(L, 1), dd.maps.repartition(L, dd.Partition((4, 1))).plan
    calls = {
        "index": P.index,
        "along": lambda r: P.along(0, r),
        "P.box": lambda r: P.box((5, 3), r),
        "P.local_shape": lambda r: P.local_shape((5, 3), r),
        "box": L.box,
        "local_shape": L.local_shape,
        "slices": L.slices,
        "shard": lambda r: L.shard(torch.ones(5, 3), r),
        "line": line.local_shape,
        "window": spec.window_box,
        "view": plan.view,
        "messages": plan.messages,
        "volume": plan.volume,
        "side": plan.held.local_shape,
        "runs": plan.held.runs,
        "root": lambda r: dd.maps.gather(L, r),
    }
    cached = "view", "messages", "volume", "root"  # by the rank itself: 1.0 is 1 there, a list no key
    for name, call in calls.items():
        call(0), call(1)
        for wrong in ((0, 1), (0,), (), "1", [1], 1.0, True, torch.tensor([0, 1]))[: 4 if name in cached else None]:
            with pytest.raises(PartitionError, match="integers" if name == "root" else r"expected a rank \(int\)"):
                call(wrong)
        assert call(np.int64(1)) is not None and call(torch.tensor(1)) is not None
    assert L.local_shape(99) == (0, 2) and L.box(-1) is None and L.local_shape(np.int64(2)) == (2, 2)


def test_errors_carry_all_their_parts():
    with pytest.raises(ShapeError) as caught:
        dd.Layout(dd.Partition((2,)), (4,)).shard(torch.ones(5))
    error = caught.value
    assert (error.expected, error.actual, error.op) == ((4,), (5,), "Layout.shard") and "Partition((2,))" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.expected == (4,) and type(again) is ShapeError
    with pytest.raises(PartitionError) as caught:
        dd.Partition((3,), (0, 0, 1))
    assert caught.value.next_step and "next step" in str(caught.value)
    with pytest.raises(PartitionError, match="does not fill the grid"):
        dd.Partition((3,), (0, 1))


def test_values():
    """Frozen, hashable, picklable, comparable; numpy's and torch's integers are integers."""
    P = dd.Partition((2, 2), ranks=(3, 1, 0, 2))
    L = dd.Layout(P, (5, 7), (None, (0, 7)))
    for value in (P, L, dd.HaloSpec(L, 1)):
        hash(value)
        for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert other == value and hash(other) == hash(value) and repr(other) == repr(value)
        with pytest.raises(AttributeError):
            value.shape = (1,)
    assert dd.Partition(np.array([2, 2]), torch.tensor([3, 1, 0, 2])) == P
    assert dd.Partition((4,)) != dd.Partition((2, 2)) and dd.Partition((2,)) != dd.Partition((2,), (1, 0))
    assert dd.Partition((2,), world="other") != dd.Partition((2,))
    assert len({dd.Layout(P, (4, 4)), dd.Layout(P, (4, 4), ((2, 2), None)), dd.Layout(P, (4, 4), ((1, 3), None))}) == 2
    assert b"_hash" not in pickle.dumps(P), "hashes differ between processes"


def test_repr():
    assert repr(dd.Partition((2, 2))) == "Partition((2, 2))\n  [0 1]\n  [2 3]"
    assert repr(dd.Partition((3,), (1, 10, 2))) == "Partition((3,), ranks=(1, 10, 2))\n  [ 1 10  2]"
    assert repr(dd.Partition(())) == "Partition(())" and "\n" not in repr(dd.Partition((10, 20)))
    assert repr(dd.Partition((2, 1, 2))) == "Partition((2, 1, 2))"
    assert len(repr(dd.Partition((100,), range(1, 101)))) < 80
    assert repr(dd.Layout(dd.Partition((2,)), (5,), ((1, 4),))) == "Layout(Partition((2,)), (5,), splits=((1, 4),))"


@st.composite
def layouts(draw, max_ranks=12):
    ndim = draw(st.integers(0, 3))
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    size = int(np.prod(grid))
    ranks = draw(st.permutations(range(size + 3)))[:size]
    splits = []
    for p in grid:
        splits.append(draw(st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=p, max_size=p).map(tuple))))
    shape = tuple(sum(s) if s is not None else draw(st.sampled_from([0, 1, 2, 3, 5, 7, 11])) for s in splits)
    return dd.Layout(dd.Partition(grid, ranks), shape, splits)


@given(layouts())
def test_blocks_cover_exactly_once(L):
    """Brute force: every element has one owner; boxes, shapes, slices and shards agree; empty blocks lie at the end
    (case 20)."""
    owners = torch.zeros(L.shape, dtype=torch.int64)
    X = torch.arange(owners.numel()).reshape(L.shape)
    for r in L.partition.ranks:
        owners[L.slices(r)] += 1
        box = L.box(r)
        assert L.local_shape(r) == tuple(b - a for a, b in box) == tuple(L.shard(X, r).shape)
        assert torch.equal(L.shard(X, r), X[tuple(slice(a, b) for a, b in box)])
        for d, (a, b) in enumerate(box):
            assert a < b or (a, b) == (L.shape[d],) * 2
    assert torch.equal(owners, torch.ones_like(owners))
    stranger = max(L.partition.ranks) + 1
    first = L.local_shape(L.partition.ranks[0])
    assert L.box(stranger) is None and L.local_shape(stranger) == (0, *first[1:])
    assert tuple(L.shard(X, stranger).shape) == L.local_shape(stranger)
    for d in range(L.ndim):
        assert L.sizes(d) == tuple(b - a for a, b in L.blocks(d)) and sum(L.sizes(d)) == L.shape[d]
    assert L.shard(X, L.partition.ranks[0]).untyped_storage().data_ptr() == X.untyped_storage().data_ptr(), "a view"


def test_dtensor_splits_and_with_shape():
    L = dd.Layout(dd.Partition((4,)), (10,), ((3, 3, 3, 1),))
    assert [L.box(r) for r in range(4)] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
    assert L.with_shape((10,)) == L and L.with_shape((8,)) == dd.Layout(L.partition, (8,))
    P = dd.Partition((4,))
    assert P.box((10,), 3) == ((8, 10),) and P.local_shape((10,), 0) == (3,)
    assert dd.Partition((2,)).shard(torch.arange(5)).tolist() == [0, 1, 2]  # alone, a process is rank 0


def test_many_ranks_are_quick():
    """Index and hash of thousands of ranks are look-ups (an O(P) search made planning take seconds)."""
    import time

    P = dd.Partition((64, 64), range(4095, -1, -1))
    P.index(0), hash(P)

    def once():
        start = time.perf_counter()
        for r in range(0, 4096, 8):
            P.index(r), hash(P)
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.02


def test_inactive_blocks_and_other_numbers_of_dims():
    one = dd.Layout(dd.Partition((), ranks=(3,)), ())
    x = torch.tensor(7.0)
    assert one.shard(x, 0).shape == (0,) and one.shard(x, 3) == 7 and one.slices(0) == ()
    L = dd.Layout(dd.Partition((2, 2), ranks=(4, 5, 6, 7)), (5, 3))
    assert L.slices(0) == (slice(0, 0), slice(0, 2)) and L.shard(torch.ones(5, 3), 0).numel() == 0
    with pytest.raises(dd.errors.PartitionError):
        L.with_shape((5, 3, 2))
    assert dd.Layout(L.partition, (5, 3), (None, (0, 3))).local_shape(0) == (0, 0), "the first block is empty"
    assert not L.active and dd.Layout(dd.Partition((2,)), (5,)).active


def test_dims_are_named_once():
    P = dd.Partition((2, 3))
    assert P.dims(None) == (0, 1) and P.dims(-1) == (1,) and P.dims((1, 0)) == (0, 1)
    for dims in ((0, 0), (1, -1)):
        with pytest.raises(dd.errors.PartitionError, match="named twice"):
            P.dims(dims)


# ---------------------------------------------------------------- weights


def loads(L, weights, dim=0):
    return [sum(weights[a:b]) for a, b in L.blocks(dim)]


def test_weighted_balances_a_ramp():
    """Weights 1 .. 64 over 4: no rank has more than a tenth above the mean (balanced blocks: 1.74 of it)."""
    ramp = list(range(1, 65))
    L = dd.Layout.weighted(dd.Partition((4, 1)), (64, 3), {0: ramp})
    found = loads(L, ramp)
    assert max(found) <= 1.1 * sum(ramp) / 4 and L.shape == (64, 3) and sum(L.sizes(0)) == 64
    assert max(loads(dd.Layout(dd.Partition((4, 1)), (64, 3)), ramp)) > 1.7 * sum(ramp) / 4
    assert dd.Layout.weighted(dd.Partition((4, 1)), (64, 3), {-2: torch.tensor(ramp)}) == L


def test_weighted_cuts_where_sums_are_nearest():
    P = dd.Partition((3, 2))
    L = dd.Layout.weighted(P, (6, 4), {0: [1] * 6, 1: [5, 1, 1, 3]})
    assert L.sizes(0) == (2, 2, 2) and L.sizes(1) == (1, 3)
    assert dd.Layout.weighted(P, (6, 4), {}) == dd.Layout(P, (6, 4))
    assert dd.Layout.weighted(P, (6, 4), {0: [0] * 6}) == dd.Layout(P, (6, 4))
    assert dd.Layout.weighted(P, (6, 4), {0: [0, 0, 0, 0, 0, 9]}).sizes(0) == (5, 1, 0)
    assert dd.Layout.weighted(P, (0, 4), {0: []}).sizes(0) == (0, 0, 0)
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        w = (torch.rand(40, generator=draw, dtype=torch.float64) ** 3).tolist()
        found = loads(dd.Layout.weighted(dd.Partition((5,)), (40,), {0: w}), w)
        assert max(found) <= sum(w) / 5 + max(w)  # each end is off by half a weight at most


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({0: [1, 2]}, "2 from 1.0 for dim 0"),
        ({0: [1, 1, -1]}, "3 from -1.0"),
        ({0: [1, 1, float("inf")]}, "3 from 1.0"),
        ({0: [1, 1, float("nan")]}, "one weight for each index"),
        ({0: 3}, "int for dim 0"),
        ([1, 1, 1], "got list"),
        ({2: [1]}, "no dim 2"),
    ],
)
def test_wrong_weights(weights, words):
    with pytest.raises(dd.errors.PartitionError, match=words) as found:
        dd.Layout.weighted(dd.Partition((3,)), (3,), weights)
    assert "Layout.weighted" in str(found.value) and "next step" in str(found.value)
