"""Halos without corners, all ranks in one process: stencils that read faces only, and who sends to whom."""

import math

import pytest
import torch

import distdl as dd

BOUNDARIES = ("none", "zeros", "circular", "reflect", "replicate")


def shards(L, X):
    return [L.shard(X, r).clone() for r in L.partition.ranks]


def halos(L, width, boundary="zeros"):
    """(with corners, without) as maps."""
    return [dd.maps.halo_exchange(dd.HaloSpec(L, width, boundary=boundary, corners=c)) for c in (True, False)]


def peers(A, rank):
    """Whom ``rank`` sends to: one message each, as all plans go as one set."""
    return {m.peer for plan in A.plans for m in plan.view(rank).sends}


@pytest.mark.parametrize(("grid", "interior", "few", "many"), [((4, 4), 5, 4, 8), ((3, 3, 3), 13, 6, 26)])
def test_messages(grid, interior, few, many):
    L = dd.Layout(dd.Partition(grid), tuple(3 * n + 1 for n in grid))
    full, star = halos(L, 1)
    assert (len(peers(star, interior)), len(peers(full, interior))) == (few, many)
    assert peers(star, interior) < peers(full, interior)
    sizes = L.local_shape(interior)
    assert sum(plan.volume(interior) for plan in star.plans) == sum(2 * math.prod(sizes) // n for n in sizes)
    assert peers(star.T, interior) == peers(star, interior)


@pytest.mark.parametrize("boundary", BOUNDARIES[1:])
@pytest.mark.parametrize(("grid", "shape"), [((4, 4), (9, 11)), ((2, 3, 2), (5, 7, 4)), ((1, 1), (4, 3))])
def test_stencils(grid, shape, boundary):
    """The 5-point and the 7-point Laplacian need no corners, nor does their transpose."""
    L = dd.Layout(dd.Partition(grid), shape)
    X = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def laplacian(p):
        inner = p[(slice(1, -1),) * p.dim()]
        ends = [p.narrow(d, s, p.shape[d] - 2)[tuple(slice(None) if e == d else slice(1, -1) for e in range(p.dim()))]
                for d in range(p.dim()) for s in (0, 2)]  # fmt: skip
        return sum(ends) - 2 * p.dim() * inner

    full, star = halos(L, 1, boundary)
    windows, crosses = full.simulate(shards(L, X)), star.simulate(shards(L, X))
    for window, cross in zip(windows, crosses):
        assert window.shape == cross.shape and torch.equal(laplacian(window), laplacian(cross))
    backs = []
    for A, some in ((full, windows), (star, crosses)):
        pulled = [torch.func.vjp(laplacian, w)[1](laplacian(w).sin())[0] for w in some]
        backs.append(A.T.simulate(pulled))
    for a, b in zip(*backs):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_corners_are_zero_and_say_nothing(boundary):
    """Also those of a boundary without neighbours; and NaN in a corner's cotangent goes nowhere."""
    L = dd.Layout(dd.Partition((2, 2)), (5, 4))
    X = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
    spec = dd.HaloSpec(L, (1, 2), boundary=boundary, corners=False)
    A = dd.maps.halo_exchange(spec)
    backs = []
    for fill in (0.0, math.nan):
        cotangents = []
        for r, window in enumerate(A.simulate(shards(L, X))):
            (lo, hi), (left, right) = spec.window_box(r)
            (a, b), (c, d) = L.box(r)
            i, j = torch.arange(lo, hi)[:, None], torch.arange(left, right)
            corner = ((i < a) | (i >= b)) & ((j < c) | (j >= d))
            assert (window[corner] == 0).all() and corner.any()
            if boundary not in ("none", "zeros"):
                assert (window[~corner] >= 1).all()
            cotangents.append(torch.where(corner, fill, window))
        backs.append(A.T.simulate(cotangents))
    for a, b in zip(*backs):
        assert torch.equal(a, b) and a.isfinite().all()


def test_sums_of_halves():
    """A block of one cell gets cotangents of four ghosts and its own: 256 + 1 + 1 + 1 + 1."""
    L = dd.Layout(dd.Partition((3, 3)), (3, 3))
    A = dd.maps.halo_exchange(dd.HaloSpec(L, 1, boundary="none", corners=False))
    cotangents = [torch.ones(A.plan.view(r).out_shape, dtype=torch.bfloat16) for r in range(9)]
    cotangents[4][1, 1] = 256
    assert A.T.simulate(cotangents)[4].item() == 260
    truth = [c > 0 for c in cotangents]
    assert A.T.simulate(truth)[4].dtype == torch.bool and A.T.simulate(truth)[4].item()


def test_values():
    """It is a value like others; without ghosts, or in one dim, there are no corners to leave out."""
    L = dd.Layout(dd.Partition((2, 2)), (4, 4))
    full, star = (dd.HaloSpec(L, 1, corners=c) for c in (True, False))
    assert full != star and hash(full) != hash(star) and "corners=False" in repr(star) and "corners" not in repr(full)
    assert dd.maps.halo_exchange(star) is dd.maps.halo_exchange(dd.HaloSpec(L, 1, corners=False))
    assert dd.maps.halo_exchange(star).T.T is dd.maps.halo_exchange(star)
    assert dd.maps.halo_exchange(dd.HaloSpec(L, 0, corners=False)).is_identity
    line = dd.Layout(dd.Partition((4,)), (9,))
    X = torch.arange(9.0)
    for a, b in zip(*(A.simulate(shards(line, X)) for A in halos(line, 2, "circular"))):
        assert torch.equal(a, b)
    with pytest.raises(dd.errors.PartitionError, match="corners is no truth value"):
        dd.HaloSpec(L, 1, corners="no")


def test_batches():
    L = dd.Layout(dd.Partition((2, 2)), (4, 5))
    A, X = halos(L, 1, "circular")[1], torch.rand(3, 4, 5)
    one = [A.simulate(shards(L, x)) for x in X]
    both = A.simulate([torch.stack(some) for some in zip(*(shards(L, x) for x in X))])
    for r in range(4):
        assert torch.equal(both[r], torch.stack([some[r] for some in one]))
