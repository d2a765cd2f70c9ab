"""Values: every movement and every spelling of it against slices of the global tensor, bit by bit."""

import torch
from registry import JUNK, each_case, here, integers, needs
from torch.func import vjp

import distdl as dd
import distdl.functional as F


@each_case()
def test_value(case):
    X = integers(case.shape)
    wanted = case.wanted(X)
    for spelling, call in {"map": case.map, **case.calls}.items():
        y = call(case.local(X))
        if case.get(X, case.rank) is None:
            assert y.numel() == 0, spelling
        else:
            assert torch.equal(y, wanted), spelling


@each_case()
def test_shapes_and_placeholders(case):
    X = integers(case.shape)
    mine, got = case.put(X, case.rank), case.get(X, case.rank)
    for shape, block in ((case.map.in_shape, mine), (case.map.out_shape, got)):
        assert tuple(shape) == tuple(block.shape) if block is not None else 0 in shape
    assert tuple(case.map(case.local(X)).shape) == tuple(case.map.out_shape)


@each_case(thin=True)
def test_adjoint_value(case):
    """A.T against the transpose that torch finds of the serial function, with cotangents that differ by rank."""
    Y = {
        r: integers(case.get(integers(case.shape), r).shape, 40 + case.voice(r))
        for r in range(case.n)
        if case.get(integers(case.shape), r) is not None
    }

    def everything(X):
        return tuple(case.get(X, r) * case.map.range.weight for r in Y)

    X_bar = vjp(everything, integers(case.shape))[1](tuple(Y.values()))[0]
    mine = case.put(X_bar, case.rank)
    x_bar = case.map.T(Y.get(case.rank, JUNK))
    assert x_bar.numel() == 0 if mine is None else torch.allclose(x_bar, mine, rtol=1e-15, atol=1e-15)


@each_case()
def test_simulate(case):
    """All ranks in one process give the same."""
    X, plan = integers(case.shape), case.map.plan
    ys = case.map.simulate([case.put(X, r) for r in plan.held.partition.ranks])
    for r, y in zip(plan.wanted.partition.ranks, ys, strict=True):
        assert torch.equal(y, case.get(X, r))


@each_case(thin=True)
def test_results_are_reproducible(case):
    """Sums follow the plan's order, not the order of arrival."""
    X = torch.rand(case.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(3))
    first = case.map(case.local(X))
    assert all(torch.equal(first, case.map(case.local(X))) for _ in range(3))


@each_case(lambda name: "invariant" in name or name == "all_sum")
def test_copies_are_bitwise_equal(case):
    X = torch.rand(case.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(3))
    everyone = dd.testing.gather_objects((case.voice(case.rank), case.map(case.local(X))))
    if case.name == "all_sum":
        everyone = [(0, y) for _, y in everyone]
    for voice, y in everyone:
        assert torch.equal(y, everyone[voice][1])


def test_case_14_a_column_gathered():
    n, r, P = here()
    t = torch.tensor([[0, 0], [1, 1]])
    assert F.all_gather(t[:, 0], P).tolist() == [0, 1] * n


@needs(4)
def test_case_18_widths_by_splits():
    n, r, _ = here()
    P = dd.Partition((1, 4))
    X = torch.arange(28.0).reshape(2, 14)
    L = dd.Layout(P, (2, 14), (None, (2, 3, 4, 5)))
    gathered = F.gather(L.shard(X), L)
    assert torch.equal(gathered, X) if r == 0 else gathered.numel() == 0
    for layout, value in ((L, X), (dd.Layout(P, (5, 10)), torch.arange(50.0).reshape(5, 10))):
        gathered = F.all_gather(layout.shard(value), P)
        assert r > 3 or torch.equal(gathered, value)


@needs(6)
def test_case_21_one_to_six_and_five_to_three():
    n, r, _ = here()
    X = torch.arange(2.0 * 5 * 7).reshape(2, 5, 7)
    one, six = dd.Partition((1, 1, 1)), dd.Partition((1, 2, 3))
    y = F.repartition(X if r == 0 else torch.empty(0), one, six)
    assert r > 5 or torch.equal(y, six.shard(X))
    back = F.repartition(y, six, one)
    assert r > 0 or torch.equal(back, X)
    five, three = dd.Partition((5,)), dd.Partition((3,), (5, 0, 3))
    y = F.repartition(five.shard(X[0, 0]), five, three)
    assert y.numel() == 0 if three.index() is None else torch.equal(y, three.shard(X[0, 0]))


@needs(8)
def test_case_22_broadcast_to_eight():
    n, r, _ = here()
    src, dst = dd.Partition((1, 2, 2), (2, 3, 4, 5)), dd.Partition((2, 2, 2), range(8))
    y = F.broadcast(torch.full((r,), float(r)), src, dst)  # shapes differ between the roots
    if r < 8:
        root = 2 + r % 4
        assert y.tolist() == [float(root)] * root
