"""Compositions of movements, simplified and as they are: all ranks in one process."""

import itertools
import random

import pytest
import torch
from fuzzing import KINDS, Unfit, _dims, _layout, seed_of

import distdl as dd
from distdl import algebra
from distdl.linear_map import LinearMap
from distdl.plan import Axis, Plan, Side, whole

MAPS = dd.maps
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool)


def chain(*maps):
    """One after the other, the first first."""
    steps = [step for A in maps for step in A.steps]
    for a, b in itertools.pairwise(steps):
        for r in {*a.plan.ranks, *b.plan.ranks}:  # what a launch finds out on each rank
            assert a.plan.view(r).out_shape == b.plan.view(r).in_shape
    return LinearMap(tuple(steps))


def operand(side, dtype, seed):
    torch.manual_seed(seed)
    blocks = [torch.randn(side.local_shape(r), dtype=torch.float64) for r in side.partition.ranks]
    return [(b > 0 if dtype == torch.bool else (50 * b).abs() if dtype == torch.uint8 else b).to(dtype) for b in blocks]


def same_bits(xs, ys):
    bits = lambda x: x.view(BITS[x.element_size()]) if x.dim() else x
    return len(xs) == len(ys) and all(x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in zip(xs, ys))


def sent(plans, rank):
    return sum(plan.messages(rank) for plan in plans)


def check(A, dtype=torch.float64, seed=0):
    """That simplifying leaves all that it must leave; what came of it."""
    B = dd.simplify(A)
    for a, b in ((A, B), (A.T, B.T)):
        first, last, new_first, new_last = (a.steps[0].plan.held, a.steps[-1].plan.wanted,
                                            b.steps[0].plan.held, b.steps[-1].plan.wanted)  # fmt: skip
        assert (first.partition, last.partition) == (new_first.partition, new_last.partition)
        x = operand(first, dtype, seed)
        assert same_bits(a.simulate(x), b.simulate(x)), f"{A} -> {B}, {dtype}"
        for r in a.ranks:
            assert sent(b.plans, r) <= sent(a.plans, r)
            assert first.local_shape(r) == new_first.local_shape(r)
            assert last.local_shape(r) == new_last.local_shape(r)
    assert len(B.steps) < len(A.steps) or B is A
    assert dd.simplify(B) is B
    return B


# ---------------------------------------------------------------- random compositions


def another(rng, n, L):
    """A layout of the same global shape, anywhere."""
    grid = rng.choice([g for g in GRIDS[L.ndim] if torch.Size(g).numel() <= n])
    splits = []
    for size, p in zip(L.shape, grid):
        cuts = sorted(rng.randint(0, size) for _ in range(p - 1))
        splits.append(None if rng.random() < 0.5 else tuple(b - a for a, b in zip([0, *cuts], [*cuts, size])))
    return dd.Layout(dd.Partition(grid, rng.sample(range(n), torch.Size(grid).numel())), L.shape, splits)


GRIDS = {d: [tuple(1 + (k // 3**i) % 3 for i in range(d)) for k in range(3**d)] for d in (1, 2, 3)}


def step(rng, n, L, layouts):
    """(a movement of blocks of layout L, the layout after it); ``None``: of no layout."""
    what = rng.choice(
        ("repartition", "repartition", "there and back", "roll", "reorder", "gather", "halo", "all_gather")
    )
    d = rng.randrange(L.ndim)
    if what == "repartition":
        M = rng.choice(layouts) if rng.random() < 0.6 else another(rng, n, L)
        layouts.append(M)
        return MAPS.repartition(L, M), M
    if what == "there and back":
        M = another(rng, n, L)
        return MAPS.repartition(L, M).T @ MAPS.repartition(L, M), L
    if what == "roll":
        return MAPS.roll(L, d, rng.randint(-3, 3)), L
    if what == "reorder":
        order = rng.choice(("zigzag", 1, 2))
        M = dd.functional.reorder_layout(L, d, order)
        A = MAPS.reorder(L, d, order)
        return (A.T @ A, L) if rng.random() < 0.5 else (A, M)
    if what == "gather":
        root = rng.randrange(n)
        return MAPS.gather(L, root), dd.Layout(dd.Partition((1,) * L.ndim, (root,)), L.shape)
    if what == "all_gather":
        A = MAPS.all_gather(L, _dims(rng, L)) if any(p > 1 for p in L.partition.shape) else MAPS.roll(L, d, 1)
        return (A.T @ A, L) if rng.random() < 0.5 else (A, None)
    boundary = rng.choice(("zeros", "none", "circular", "replicate"))
    A = MAPS.halo_exchange(dd.HaloSpec(L, tuple(rng.randint(0, 1) for _ in L.shape), boundary=boundary))
    return (A.T @ A, L) if rng.random() < 0.5 else (A, None)


def composition(rng, n, kind, zero):
    L = _layout(rng, n, kind, zero=zero)
    layouts, maps = [L], []
    if rng.random() < 0.3:
        root = rng.randrange(n)
        maps.append(MAPS.scatter(L, root))
    for _ in range(rng.randint(2, 5)):
        A, L = step(rng, n, L, layouts)
        maps.append(A)
        if L is None:
            break
    A = chain(*maps)
    return A.T if rng.random() < 0.5 else A


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_compositions(kind, dtype):
    """Values and adjoint's values to the bit, messages, shapes: and most of them become shorter."""
    rng, shorter, nothing, drawn = random.Random(seed_of("algebra", kind, str(dtype))), 0, 0, 0
    for seed in range(40):
        try:
            A = composition(rng, rng.randint(3, 6), kind, zero=seed % 10 == 9)
        except (Unfit, dd.errors.PartitionError):  # a boundary or an order that these blocks cannot have
            continue
        B = check(A, dtype, seed)
        drawn += 1
        shorter += B is not A
        nothing += B.is_identity
    assert drawn >= 30 and shorter >= drawn // 3 and nothing >= 1, (drawn, shorter, nothing)


# ---------------------------------------------------------------- what becomes of what

P4, ROWS, COLUMNS = dd.Partition((4,)), dd.Layout(dd.Partition((4, 1)), (8, 4)), dd.Layout(dd.Partition((1, 4)), (8, 4))
FEWER = dd.Layout(dd.Partition((2, 1), (3, 1)), (8, 4))
GRID = dd.Layout(dd.Partition((2, 2)), (8, 4))
UNEVEN = dd.Layout(dd.Partition((4,)), (7,), ((0, 4, 1, 2),))
THERE = MAPS.repartition(ROWS, COLUMNS)
TOWARDS_THE_EDGE = MAPS.shift(P4, 0, 1, False, (3,))
ALL = MAPS.all_sum_reduce(P4, (3,))
COPIES = MAPS.broadcast(dd.Partition((1,)), P4, (3,))
WINDOWS = MAPS.halo_exchange(dd.HaloSpec(ROWS, (1, 0), boundary="zeros"))
WIDER = MAPS.halo_exchange(dd.HaloSpec(ROWS, (2, 0), boundary="zeros"))
PASSED = dd.Layout(dd.Partition((4,)), (7,), ((2, 0, 4, 1),))
WHOLE = MAPS.all_gather(ROWS, 0)


def passed(L):
    """Each rank's block to the next one."""
    return MAPS.shift(L, 0, 1)


@pytest.mark.parametrize(
    "maps, expected",
    [
        ((THERE, THERE.T), "identity"),
        ((THERE, MAPS.repartition(COLUMNS, ROWS)), "identity"),
        ((MAPS.repartition(ROWS, FEWER), MAPS.repartition(FEWER, ROWS)), "identity"),  # fewer ranks have all of it
        ((MAPS.repartition(FEWER, ROWS), MAPS.repartition(ROWS, COLUMNS)), "repartition"),
        ((MAPS.gather(UNEVEN, 2), MAPS.scatter(UNEVEN, 2)), "identity"),
        ((MAPS.scatter(ROWS, 1), THERE, MAPS.gather(COLUMNS, 1)), "identity"),
        ((MAPS.roll(UNEVEN, 0, 3), MAPS.roll(UNEVEN, 0, -3)), "identity"),
        ((MAPS.roll(UNEVEN, 0, 3), MAPS.roll(UNEVEN, 0, 2)), "roll"),
        ((MAPS.shift(P4, 0, 1, True, (3,)),) * 4, "identity"),
        ((MAPS.reorder(ROWS, 0, "zigzag"), MAPS.reorder(ROWS, 0, "zigzag").T), "identity"),
        ((THERE.T, WINDOWS), "(halo_exchange @ repartition.T)"),
        ((WINDOWS.T, THERE), "(repartition @ halo_exchange.T)"),
        ((THERE, MAPS.repartition(COLUMNS, GRID), MAPS.repartition(GRID, COLUMNS), THERE.T), "identity"),
        ((WINDOWS.T, WINDOWS), "(halo_exchange @ halo_exchange.T)"),  # sums of two, sent on as they come
        # what drops elements is no identity,
        ((TOWARDS_THE_EDGE, TOWARDS_THE_EDGE.T), "(shift.T @ shift)"),
        # and copies that are added up are a factor
        ((COPIES, COPIES.T), "broadcast.T @ broadcast"),
        ((COPIES.T, COPIES), "broadcast @ broadcast.T"),
        ((WHOLE, WHOLE.T), "all_gather.T @ all_gather"),
        ((WINDOWS, WINDOWS.T), "halo_exchange.T @ halo_exchange"),
        ((ALL, ALL), "all_sum_reduce @ all_sum_reduce"),
        # sums of three, in another order
        ((WIDER.T, THERE), "repartition @ halo_exchange.T"),
        # whose tensor it is shows in two axes, its name and its size
        ((passed(UNEVEN), passed(PASSED)), "shift @ shift"),
        # one root would send what four send now: three elements or rows more
        ((MAPS.scatter(ROWS), WINDOWS), "halo_exchange @ scatter"),
        # two steps of one message each, or one of three messages
        ((MAPS.repartition(ROWS, GRID), MAPS.repartition(GRID, COLUMNS)), "repartition @ repartition"),
    ],
)
def test_what_becomes_of(maps, expected):
    A = chain(*maps)
    B = check(A)
    assert str(B) == expected
    assert (B is A) == (str(A) == expected)
    assert check(A.T).is_identity == B.is_identity


def test_an_edge_is_dropped():
    A = dd.simplify(chain(TOWARDS_THE_EDGE, TOWARDS_THE_EDGE.T))
    blocks = [torch.full((3,), float(r + 1)) for r in range(4)]
    assert [y.tolist() for y in A.simulate(blocks)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3, [0.0] * 3]
    assert not any(plan.messages(r) for plan in A.plans for r in range(4))


def test_a_place_of_two_indices():
    """The first adds two halves at one place: only its own indices are renamed."""
    both = Axis(None, (((0, 2, 0), (2, 4, 0)),), (2,))
    one = dd.Partition((1,))
    fold, turn = Plan(Side(one, (whole(4),)), Side(one, (both,))), MAPS.roll(dd.Layout(one, (2,)), 0, 1).plan
    x = torch.tensor([1.0, 2.0, 30.0, 40.0])
    plan = algebra.composed(fold, turn)
    assert plan.simulate([x])[0].tolist() == turn.simulate(fold.simulate([x]))[0].tolist() == [42.0, 31.0]
    assert plan == algebra.composed(turn.T, fold.T).T
    twice = algebra.composed(fold.T, fold)
    assert twice.simulate([x[:2]])[0].tolist() == [2.0, 4.0]


def test_a_place_that_two_axes_show():
    """Whose tensor it is shows in its name and in its size: they cannot be renamed one by one."""
    assert algebra.composed(passed(UNEVEN).plan, passed(PASSED).plan) is None


def test_other_steps_stay():
    mine = dd.linear_map(lambda x: 2 * x, lambda y: 2 * y, (8, 1), (8, 1))
    A = THERE.T @ mine @ THERE
    assert dd.simplify(A) is A
    A = LinearMap((*THERE.steps, *THERE.T.steps, *THERE.steps, *mine.steps, *THERE.T.steps))
    assert str(dd.simplify(A)) == "repartition.T @ linear_map(<lambda>) @ repartition"
    # The first step says which ranks hold the input: in front of a user's own functions, an identity stays.
    A = LinearMap((*THERE.T.steps, *THERE.steps, *mine.steps))
    assert str(dd.simplify(A)) == "linear_map(<lambda>) @ identity"


def test_other_tensors_between_are_left_alone():
    """Equal shapes on this rank, and another tensor elsewhere: no composition, on the ranks that see it."""
    other = dd.Layout(dd.Partition((4, 1)), (9, 4), ((2, 3, 2, 2), None))
    assert algebra.composed(THERE.T.plan, MAPS.repartition(other, FEWER.partition).plan) is None
    turned = dd.Layout(dd.Partition((4, 1), (3, 2, 1, 0)), (8, 4))
    assert algebra.composed(THERE.T.plan, Plan(Side.of(turned), Side.of(turned))) is None


def test_thousands_of_ranks():
    n = 2048
    rows = dd.Layout(dd.Partition((n,)), (3 * n + 1,))
    turned = dd.Layout(dd.Partition((n,), range(n - 1, -1, -1)), (3 * n + 1,))
    A = MAPS.roll(rows, 0, 5) @ MAPS.repartition(turned, rows)
    assert str(dd.simplify(A)) == "(roll @ repartition)"
    assert str(dd.simplify(MAPS.repartition(turned, rows) @ MAPS.repartition(rows, turned))) == "identity"


def test_not_a_map():
    with pytest.raises(dd.errors.PartitionError, match=r"simplify.*not a linear map|not a linear map.*simplify"):
        dd.simplify(torch.ones(3))
