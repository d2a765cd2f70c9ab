"""Sampling a grid at points and depositing on it, against dense matrices of B-splines in plain torch, and torch's own
grid_sample."""

import math

import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, layouts, randn

import distdl as dd
import distdl.functional as F
from distdl.errors import AgreementError, PartitionError, ShapeError

N, R = dd.world().size, dd.world().rank
SPLINES = {
    0: lambda t: ((t >= -0.5) & (t < 0.5)).double(),
    1: lambda t: (1 - t.abs()).clamp(min=0),
    2: lambda t: torch.where(t.abs() <= 0.5, 0.75 - t * t, (1.5 - t.abs()).clamp(min=0) ** 2 / 2),
    3: lambda t: torch.where(t.abs() <= 1, (4 - 6 * t * t + 3 * t.abs() ** 3) / 6, (2 - t.abs()).clamp(min=0) ** 3 / 6),
}
FAR = 24  # how far beyond the edge the serial grids go


def matrices(points, sizes, order, boundary):
    """Of each dim the dense matrix (grid points, points) of weights, whatever lies beyond the edge folded in."""
    for p, n, kind in zip(points.unbind(1), sizes, boundary):
        i = torch.arange(-FAR, n + FAR)
        w = SPLINES[order](p - i[:, None])
        if kind == "zeros":
            yield w[FAR : FAR + n]
        else:
            shown = i % n if kind == "circular" else i.clamp(0, n - 1)
            yield torch.zeros(n, len(p), dtype=w.dtype).index_add(0, shown, w)


def sampled(X, points, order, boundary):
    d = points.shape[1]
    letters = "abc"[:d]
    A = matrices(points, X.shape[X.dim() - d :], order, boundary)
    return torch.einsum(f"...{letters},{','.join(c + 'k' for c in letters)}->...k", X, *A)


def deposited(V, points, sizes, order, boundary):
    letters = "abc"[: len(sizes)]
    A = matrices(points, sizes, order, boundary)
    return torch.einsum(f"...k,{','.join(c + 'k' for c in letters)}->...{letters}", V, *A)


def counts(pattern, L):
    """How many points each rank has; one outside none."""
    some = {
        "uneven": [(3 * r + 4) % 7 for r in range(N)],
        "some have none": [5 * (r % 2 == (N > 1)) for r in range(N)],
        "all on one": [9 * (r == N - 1) for r in range(N)],
    }[pattern]
    return [k * (r in L.partition.ranks) for r, k in enumerate(some)]


def points_of(sizes, k, seed=0):
    """Inside, outside, in one place, and (of a few) at grid points and borders between blocks."""
    p = randn(k, len(sizes), seed=seed) * 0.7 * torch.tensor(sizes).double() + torch.tensor(sizes).double() / 2
    p[1:2] = p[:1]
    return p


def cut(pattern, L):
    """This rank's slice of all points."""
    some = counts(pattern, L)
    return slice(sum(some[:R]), sum(some[: R + 1]))


CASES = [
    (0, ("circular", "zeros"), "uneven"),
    (1, ("zeros", "zeros"), "uneven"),
    (1, ("circular", "replicate"), "some have none"),
    (2, ("zeros", "circular"), "all on one"),
    (3, ("replicate", "zeros"), "uneven"),
]


@pytest.mark.parametrize(("order", "boundary", "pattern"), CASES)
def test_sample_and_deposit(order, boundary, pattern):
    """Value, all first and second derivatives in values and points, and batches of values."""
    sizes = (5, 4)
    for i, (name, L) in enumerate(layouts((2, *sizes), (1, 2)).items()):
        if pattern != "uneven" and i % 2:
            continue
        P, mine = points_of(sizes, sum(counts(pattern, L)), 3), cut(pattern, L)
        at = lambda X, mine=mine: X[mine]
        here = lambda Y, mine=mine: Y[..., mine]
        smooth = (0, 1) if order else (0,)
        check_layer(
            lambda x, p: F.dist_sample(x, L, p, order=order, boundary=boundary),
            lambda X, p: sampled(X, p, order, boundary),
            [randn(*L.shape, seed=1), P], [L, at], here, active=L.active, argnums=smooth, name=f"sample, {name}",
        )  # fmt: skip
        check_layer(
            lambda v, p: F.dist_deposit(v, p, L, order=order, boundary=boundary),
            lambda V, p: deposited(V, p, sizes, order, boundary),
            [randn(2, len(P), seed=2), P], [here, at], L, active=L.active, argnums=smooth, name=f"deposit, {name}",
        )  # fmt: skip


def test_split_leading_dims():
    """A rank has the values of its own channels; along them points are copies, marked where their gradient is
    wanted."""
    L = dd.Layout(dd.Partition((N, 1) if N < 4 else (2, 2)), (3, 5))
    lines = L.partition.shape[1]
    P, at = points_of((5,), 3 * lines, 5), (L.partition.index() or (0, 0))[1]
    mine = slice(3 * at, 3 * at + 3)
    mark = lambda p: F.mark_varying(p, L.partition, 0)
    check_layer(
        lambda x, p: F.dist_sample(x, L, mark(p)),
        lambda X, p: sampled(X, p, 1, ("zeros",)),
        [randn(3, 5, seed=1), P], [L, lambda p: p[mine]], lambda Y: Y[L.slices()[0], mine],
    )  # fmt: skip
    check_layer(
        lambda v, p: F.dist_deposit(v, mark(p), L),
        lambda V, p: deposited(V, p, (5,), 1, ("zeros",)),
        [randn(3, len(P), seed=2), P], [lambda V: V[L.slices()[0], mine], lambda p: p[mine]], L,
    )  # fmt: skip


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_each_is_the_adjoint_of_the_other(order):
    """In three dims, of complex values too; and a circle loses nothing."""
    for sizes, grid in (((5, 3, 4), (1, N, 1)), ((N + 1, 2, 2), (N, 1, 1)), ((1, 1, 3), (1, 1, N))):
        L = dd.Layout(dd.Partition(grid), sizes)
        p = points_of(sizes, (4 * R + 5) % 11, R)
        for boundary in (("zeros", "circular", "replicate"), "circular", "zeros"):
            for dtype in (torch.float64, torch.complex128):
                x = randn(*L.local_shape(), seed=10 + R).to(dtype) * (1 + 2j if dtype.is_complex else 1)
                v = randn(len(p), seed=20 + R).to(dtype)
                y = F.dist_sample(x, L, p, order=order, boundary=boundary)
                z = F.dist_deposit(v, p, L, order=order, boundary=boundary)
                left, right = dd.func.inner(v, y, L.partition), dd.func.inner(z, x, L.partition)
                assert y.dtype == z.dtype == dtype and abs(left - right) <= 1e-13 * max(abs(left), 1)
                if boundary == "circular":
                    sums = dd.testing.gather_objects((z.sum().item(), v.sum().item()))
                    assert abs(sum(a for a, _ in sums) - sum(b for _, b in sums)) < 1e-12


@pytest.mark.parametrize(("boundary", "padding"), [("zeros", "zeros"), ("replicate", "border")])
def test_as_torchs_grid_sample(boundary, padding):
    L = dd.Layout(dd.Partition((1, N, 1)), (2, 7, 5))
    X, p = randn(2, 7, 5, seed=1), points_of((7, 5), 6, R)
    last_first = (2 * p / torch.tensor([6.0, 4.0]) - 1).flip(1)
    wanted = torch.nn.functional.grid_sample(
        X[None], last_first[None, None], padding_mode=padding, align_corners=True, mode="bilinear"
    )[0, :, 0]
    found = F.dist_sample(L.shard(X).clone(), L, p, boundary=boundary)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    bare = F.dist_sample(L.shard(X).clone(), L.partition, p, boundary=boundary)
    assert torch.equal(found, bare), "a bare partition negotiates"


def test_an_index_is_kept():
    """It talks once; afterwards each grid point goes once to each rank that wants it, while points move in their
    cells."""
    L = dd.Layout(dd.Partition((1, N)), (3, 4 * N))
    X, x = randn(3, 4 * N, seed=1), L.shard(randn(3, 4 * N, seed=1)).clone()
    p = torch.tensor([[4 * R + 4.25], [4 * R + 3.5], [4 * R + 3.5]], dtype=torch.float64)  # the next rank's two, twice
    with dd.testing.count_messages() as making:
        index = F.sample_index(L, p, boundary="circular")
    with dd.testing.count_messages() as talking:
        y = F.dist_sample(x, L, p, boundary="circular")
    with dd.testing.count_messages() as kept:
        again = F.dist_sample(x, L, p, boundary="circular", index=index)
    assert torch.equal(y, again) and torch.allclose(y, sampled(X, p, 1, ("circular",)), rtol=1e-13, atol=1e-13)
    there = [("send", (R - 1) % N, 2 * 3 * 8)] if N > 1 else []  # columns 0 and 1 of this rank, three values each
    assert list(kept) == there and len(making.of("agree")) == (N > 1) and len(making) == 2 * (N > 1)
    assert sorted((kind, str(to)) for kind, to, _ in talking) == sorted((k, str(to)) for k, to, _ in [*making, *kept])
    moved = p + torch.tensor([[0.5], [0.4], [-0.25]], dtype=torch.float64)
    with dd.testing.count_messages() as sent:
        found = F.dist_sample(x, L, moved, boundary="circular", index=index)
        back = F.dist_deposit(found, moved, L, boundary="circular", index=index)
    assert not sent.of("agree") and torch.equal(found, F.dist_sample(x, L, moved, boundary="circular"))
    assert torch.equal(back, F.dist_deposit(found, moved, L, boundary="circular"))
    for wrong in (p + 1, p[:2]):
        raises_everywhere(
            ShapeError, lambda: F.dist_sample(x, L, wrong, boundary="circular", index=index),
            "dist_sample", "the index is not of these points", "when points have left their cells",
        )  # fmt: skip
    for other in ({"order": 2}, {"order": 0}):
        raises_everywhere(
            ShapeError, lambda: F.dist_deposit(y, p, L, boundary="circular", index=index, **other), "dist_deposit"
        )


def test_batches():
    """Of values: one set of messages. Of points: refused, with the call that means the same."""
    L = dd.Layout(dd.Partition((N, 1)), (2 * N, 3))
    x, p = L.shard(randn(2 * N, 3, seed=1)).clone(), points_of((2 * N, 3), 4, R)
    index, batch = F.sample_index(L, p), torch.stack([x, x.cos(), 2 * x])
    with dd.testing.count_messages() as one:
        F.dist_sample(x, L, p, index=index)
    for kept in (index, None):
        with dd.testing.count_messages() as sent:
            ys = torch.func.vmap(lambda x: F.dist_sample(x, L, p, index=kept))(batch)
        assert kept is None or len(sent.of("send")) == len(one)
        assert torch.equal(ys, torch.stack([F.dist_sample(b, L, p) for b in batch]))
    twice = torch.stack([p, p])
    for call in (
        lambda p: F.dist_sample(x, L, p),
        lambda p: F.dist_deposit(p[:, 0], p, L),
        lambda p: F.dist_sample(x, L, p, index=index),
    ):
        raises_everywhere(
            ShapeError, lambda call=call: torch.func.vmap(call)(twice),
            "the points are a batch of vmap", "points.reshape(-1, dims), without vmap",
        )  # fmt: skip
    J = torch.func.jacrev(lambda p: F.dist_sample(x, L, p, index=index))(p)
    assert J.shape == (4, 4, 2) and torch.equal(J, J * torch.eye(4)[..., None])


def test_dtypes():
    """Values keep theirs; a coordinate has the digits of its own."""
    n = 2 * N
    L = dd.Layout(dd.Partition((N,)), (n,))
    x = L.shard(torch.arange(float(n))).clone()
    p = torch.tensor([0.25, n - 1.75, n - 0.5, -0.5], dtype=torch.float64)[:, None]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        y = F.dist_sample(x.to(dtype), L, p, boundary="replicate")
        assert y.dtype == dtype and torch.equal(y.real.double(), torch.tensor([0.25, n - 1.75, n - 1, 0]).double())
    assert F.dist_sample(x.double(), L, p.float(), boundary="replicate").dtype == torch.float64
    nan, index = torch.full_like(x, math.nan), F.sample_index(L, p * 0 - 9)
    with dd.testing.count_messages() as sent:
        y = F.dist_sample(nan, L, p * 0 - 9, index=index)
    assert not sent and torch.equal(y, torch.zeros(4)), "what is outside is zero, whatever is inside, and not fetched"
    lost = F.dist_deposit(torch.full((4,), math.nan), p * 0 - 9, L)
    assert torch.equal(lost, torch.zeros_like(x))


def test_wrong_points():
    """Of one rank: the same error on all."""
    L = dd.Layout(dd.Partition((N, 1)), (2 * N, 3))
    x, p = torch.ones(2, 3), torch.zeros(2, 2)
    for wrong, words in (
        (torch.zeros(3), "(3,) of torch.float32"),
        (torch.zeros(3, 3), "(3, 3) of torch.float32"),
        (torch.zeros(3, 0), "(3, 0) of torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int64), "torch.int64"),
        (torch.tensor([[0, math.nan]]), "not finite"),
        (torch.tensor([[0, math.inf]]), "not finite"),
    ):
        given = wrong if R == N - 1 else p
        for call in (
            lambda: F.dist_sample(x, L, given),
            lambda: F.sample_index(L, given),
            lambda: F.dist_sample(x, L, given, boundary=("zeros", "circular")),
        ):
            raises_everywhere(
                AgreementError, call, "the points do not fit the grid", f"rank {N - 1}: ", words, f"({2 * N}, 3)"
            )
    refused = lambda call, *words: raises_everywhere(PartitionError, call, *words)
    for order in (-1, 1.5, None, True):
        refused(lambda: F.dist_sample(x, L, p, order=order), "dist_sample", "no such order", str(order))
    refused(lambda: F.dist_sample(x, L, p, boundary="reflect"), "no such boundary", "'replicate'")
    refused(lambda: F.dist_sample(x, L, p, boundary=("zeros",) * 3), "boundary does not fit")
    refused(lambda: F.dist_deposit(torch.ones(2), p, L.partition), "dist_deposit", "Layout")
    refused(lambda: F.dist_deposit(torch.ones(2), p, L.with_shape((0, 3))), "there is no grid point")
    raises_everywhere(ShapeError, lambda: F.dist_deposit(torch.ones(3), p, L), "not one value for each point", "(2,)")
    raises_everywhere(ShapeError, lambda: F.dist_sample(x.long(), L, p), "dist_sample", "floating or complex")
