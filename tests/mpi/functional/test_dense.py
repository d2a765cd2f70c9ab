"""SUMMA against torch.matmul, and TSQR against torch.linalg.qr: every split, derivatives, messages as numbers."""

import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, layouts, messages, randn, whole
from sweep import serial_qr
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError
from distdl.testing import collective_assert, count_messages

WORLD = dd.world()
N = WORLD.size
M, K, C = 7, 9, 11


def pairs(n, m=M, k=K, c=C, batch=()):
    """(name, layout of A, layout of B): every grid of n ranks, uneven and empty blocks, some of the ranks."""
    ones = (1,) * len(batch)
    grids = {f"{p} x {n // p}": ((p, n // p), None) for p in range(1, n + 1) if n % p == 0}
    if n > 2:
        grids[f"1 x {n - 1}, not rank 0"] = ((1, n - 1), tuple(range(n - 1, 0, -1)))
        grids[f"{n - 1} x 1, not rank {n - 1}"] = ((n - 1, 1), tuple(range(n - 1)))
    for name, (grid, ranks) in grids.items():
        P = dd.Partition((*ones, *grid), ranks)
        yield name, dd.Layout(P, (*batch, m, k)), dd.Layout(P, (*batch, k, c))
        if P.size > 1:
            cut = lambda total, p: (0, total - p + 2, *[1] * (p - 2)) if p > 1 and total > p else None
            free = (None,) * len(batch)
            A = dd.Layout(P, (*batch, m, k), (*free, cut(m, grid[0]), cut(k, grid[1])))
            B = dd.Layout(P, (*batch, k, c), (*free, None, cut(c, grid[1])))
            yield f"{name}, uneven", A, B


# ---------------------------------------------------------------- matmul


@pytest.mark.parametrize("panels", [1, 4])
def test_matmul(panels):
    for name, L_a, L_b in pairs(N):
        check_layer(
            lambda a, b, L_a=L_a, L_b=L_b: F.dist_matmul(a, b, L_a, panels=panels, shapes=(L_a, L_b)),
            torch.matmul,
            [randn(M, K, seed=1), randn(K, C, seed=2)],
            [L_a, L_b],
            F.matmul_layout(L_a, L_b),
            batched=(0, 1),
            rtol=1e-13,
            name=name,
        )


def test_fewer_rows_than_ranks():
    """Blocks without elements, and a k of 0 and of 1: the sum of nothing is 0, and stays connected."""
    for m, k, c in ((1, 3, 2), (3, 1, 1), (2, 0, 3), (0, 2, 2)):
        for name, L_a, L_b in pairs(N, m, k, c):
            for panels in (1, 3):
                check_layer(
                    lambda a, b, L_a=L_a, L_b=L_b, n=panels: F.dist_matmul(a, b, L_a, panels=n, shapes=(L_a, L_b)),
                    torch.matmul,
                    [randn(m, k, seed=1), randn(k, c, seed=2)],
                    [L_a, L_b],
                    F.matmul_layout(L_a, L_b),
                    orders=2 if m * k * c else 1,
                    rtol=1e-13,
                    name=f"{m} {k} {c}, {name}, {panels} panels",
                )


def test_batches():
    """Split with the ranks, whole, and of size 1 in one of the two."""
    shapes = [((N, 3, 2, 4), (N, 3, 4, 3), (N, 1, 1, 1)), ((2, 3, 4), (2, 4, 5), (1, 1, N))]
    shapes += [((1, 3, 4), (2, 4, 5), (1, N, 1)), ((2, 3, 4), (1, 4, 5), (1, 1, N))]
    for a, b, grid in shapes:
        P = dd.Partition(grid)
        L_a, L_b = dd.Layout(P, a), dd.Layout(P, b)
        check_layer(
            lambda x, y, P=P, a=a, b=b: F.dist_matmul(x, y, P, shapes=(a, b)),
            torch.matmul,
            [randn(*a, seed=1), randn(*b, seed=2)],
            [L_a, L_b],
            F.matmul_layout(L_a, L_b),
            rtol=1e-13,
            name=f"{a} {b}",
        )


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_dtypes(dtype):
    faults = []
    for name, L_a, L_b in pairs(N):
        A, B = ((10 * randn(*L.shape, seed=i)).to(dtype) for i, L in enumerate((L_a, L_b)))
        if dtype.is_complex:
            A, B = torch.complex(A.real, randn(M, K, seed=3)), torch.complex(B.real, randn(K, C, seed=4))
        for panels in (1, 3):
            y = F.dist_matmul(L_a.shard(A), L_b.shard(B), L_a.partition, panels=panels)
            wished = F.matmul_layout(L_a, L_b).shard(A @ B)
            close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(dtype, 1e-13)
            if y.dtype != dtype or (L_a.active and not torch.allclose(y, wished, rtol=close, atol=100 * close)):
                faults.append((name, panels))
    collective_assert(not faults, faults)


def test_complex_gradients_are_torchs():
    for name, L_a, L_b in pairs(N):
        A = torch.complex(randn(M, K, seed=1), randn(M, K, seed=3))
        B = torch.complex(randn(K, C, seed=2), randn(K, C, seed=4))
        loss = lambda y: (y.real**3).sum() + (y.real * y.imag).sum()
        wished = grad(lambda a, b: loss(a @ b), (0, 1))(A, B)
        P = L_a.partition
        found = grad(lambda a, b, P=P, s=(L_a, L_b): loss(F.dist_matmul(a, b, P, shapes=s)), (0, 1))(
            L_a.shard(A).clone(), L_b.shard(B).clone()
        )
        ok = all(torch.allclose(g, L.shard(w)) for g, w, L in zip(found, wished, (L_a, L_b)) if L.active)
        collective_assert(ok, name)


def test_what_is_required_of_the_numbers():
    """(7, 9) x (9, 11) over 2 x 2: rank 0 sends its 4 x 5 of A and its 5 x 6 of B, 400 bytes; as many for a batch;
    and derivatives to the last digits."""
    grid = (2, 2) if N == 4 else (1, N)
    L_a, L_b = (dd.Layout(dd.Partition(grid), s) for s in ((M, K), (K, C)))
    L = F.matmul_layout(L_a, L_b)
    A, B, V, W = randn(M, K, seed=1), randn(K, C, seed=2), randn(M, K, seed=3), randn(K, C, seed=4)
    a, b, v, w = (lay.shard(X).clone() for lay, X in zip((L_a, L_b) * 2, (A, B, V, W)))
    run = lambda a, b: F.dist_matmul(a, b, L_a, shapes=(L_a, L_b))
    dist = grad(lambda a, b: ((run(a, b) * (1 + WORLD.rank)) ** 3).sum(), (0, 1))
    weights = torch.zeros(M, C, dtype=torch.float64)
    for r in range(N):
        weights[L.slices(r)] = 1 + r
    serial = grad(lambda a, b: ((a @ b * weights) ** 3).sum(), (0, 1))
    found = [run(a, b), *dist(a, b), *jvp(dist, (a, b), (v, w))[1]]
    wished = [A @ B, *serial(A, B), *jvp(serial, (A, B), (V, W))[1]]
    off = [float((x - p.shard(y)).abs().max() / y.abs().max()) for x, y, p in zip(found, wished, (L, *(L_a, L_b) * 2))]
    collective_assert(max(off) < 1e-13, off)
    if N == 4:
        with count_messages() as sent:
            run(a, b)
        assert sent.sends == 2 == len(sent)
        assert WORLD.rank or sent.bytes == 400
        with count_messages() as batched:
            vmap(run)(torch.stack([a] * 3), torch.stack([b] * 3))
        assert batched.sends == 2 and batched.bytes == 3 * sent.bytes
        x, y = a.requires_grad_(), b.requires_grad_()
        out = run(x, y).sum()
        sends, _, reduces, _, agreements = messages(out.backward)
        assert (sends, reduces, agreements) == (2, 0, 0)
    assert messages(lambda: F.dist_matmul(a, b, L_a.partition))[4] == (N > 1), "a bare partition asks once"


def test_panels_bound_memory():
    """What is gathered is not kept, and no step gathers more than its part."""
    P = dd.Partition((1, N))
    L_a, L_b = dd.Layout(P, (8, 16 * N)), dd.Layout(P, (16 * N, 8 * N))
    a, b = (L.shard(randn(*L.shape, seed=i)).clone().requires_grad_() for i, L in enumerate((L_a, L_b)))
    own, kept = {t.untyped_storage().data_ptr() for t in (a, b)}, {}
    for panels in (1, 4):
        saved = {}
        keep = lambda t, saved=saved: saved.setdefault(t.untyped_storage().data_ptr(), t) is None or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            F.dist_matmul(a, b, L_a, panels=panels, shapes=(L_a, L_b))
        kept[panels] = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)
    assert kept[4] == 0 and (N == 1 or kept[1] >= 8 * 16 * N * 8)
    with count_messages() as sent:
        F.dist_matmul(a, b, L_a, panels=4, shapes=(L_a, L_b))
    with count_messages() as whole_set:
        F.dist_matmul(a, b, L_a, shapes=(L_a, L_b))
    assert sent.bytes == whole_set.bytes


def test_matmul_refuses():
    P = dd.Partition((1, N))
    L_a, L_b = dd.Layout(P, (M, K)), dd.Layout(P, (K, C))
    a, b = L_a.shard(randn(M, K)), L_b.shard(randn(K, C))
    short = dd.Layout(P, (K - 1, C))
    for call, what in (
        (lambda: F.dist_matmul(a, short.shard(randn(K - 1, C)), P), "do not fit"),
        (lambda: F.dist_matmul(a, b.float(), L_a, shapes=(L_a, L_b)), "different dtypes"),
        (lambda: F.dist_matmul(a, b, P, panels=0), "number of panels"),
        (lambda: F.dist_matmul(a, b, P, shapes=((M, K),)), "not those of A and B"),
        (lambda: F.dist_matmul(a, b[:, :0], P, shapes=((M, K), (K, C))), "b is not this rank's block"),
    ):
        raises_everywhere(ShapeError, call, what)
    raises_everywhere(PartitionError, lambda: F.dist_matmul(a, b, dd.Partition((N,))), "rows and columns")


# ---------------------------------------------------------------- QR


def test_qr():
    """Blocks with fewer rows than columns, with as many, and without any; some of the ranks; a line of them."""
    for shape in ((37, 5), (3 * N + 2, 5 if N > 1 else 3), (5, 5), (4, 1)):
        for name, L in layouts(shape, (0,)).items():
            for P in (
                L,
                dd.Layout(dd.Partition((L.partition.size,), L.partition.ranks), shape[:1], L.splits and L.splits[:1]),
            ):
                check_layer(
                    lambda a, P=P: F.dist_tsqr(a, P),
                    serial_qr,
                    [randn(*shape, seed=1)],
                    [L],
                    (L, whole),
                    rtol=1e-9,
                    name=f"{shape} {name} {P.ndim}",
                )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_of_qr(dtype):
    """A = Q R and QᵀQ = 1 to rounding, R has a diagonal that is not negative, and is the same on all ranks to the last
    bit."""
    eps = {torch.float32: 1e-6, torch.bfloat16: 2e-2}.get(dtype, 2e-15)
    faults = []
    for shape in ((37, 5), (7, 5), (200, 16)):
        for name, L in layouts(shape, (0,)).items():
            A = randn(*shape, seed=1)
            A = torch.complex(A, randn(*shape, seed=2)) if dtype.is_complex else A.to(dtype)
            q, r = F.dist_tsqr(L.shard(A), L)
            if not L.active:
                faults += [] if q.shape == r.shape == (0, shape[1]) and q.dtype == dtype else [(name, q.shape, r.shape)]
                continue
            wide = torch.float32 if dtype is torch.bfloat16 else dtype
            Q = F.all_gather(q.to(wide), L, 0)
            n = shape[1]
            off = [
                (Q @ r.to(wide) - A.to(wide)).abs().max() / A.to(wide).abs().max(),
                (Q.mH @ Q - torch.eye(n, dtype=wide)).abs().max(),
                r.tril(-1).abs().max(),
            ]
            if max(map(float, off)) > eps * n or bool((r.diagonal().real < 0).any()) or q.dtype != dtype:
                faults.append((name, shape, off))
            dd.testing.assert_copies({"r": torch.view_as_real(r) if dtype.is_complex else r}, L)
    collective_assert(not faults, faults)


def test_what_is_required_of_qr():
    """37 x 5 on 4 ranks: 3 messages of a 5 x 5 matrix; the gradient of the sum of cubes; 200 bytes a message."""
    L = dd.Layout(dd.Partition((N, 1)), (37, 5))
    A, V = randn(37, 5, seed=1), randn(37, 5, seed=2)
    a, v = L.shard(A).clone(), L.shard(V).clone()
    with count_messages() as sent:
        F.dist_tsqr(a, L)
    assert sent.sends == N - 1 == len(sent) and sent.bytes == 200 * (N - 1)
    dist, serial = (grad(lambda a, qr=qr: (qr(a)[0] ** 3).sum()) for qr in (lambda a: F.dist_tsqr(a, L), serial_qr))
    pairs = (dist(a), serial(A)), (jvp(dist, (a,), (v,))[1], jvp(serial, (A,), (V,))[1])
    off = [float((x - L.shard(y)).abs().max() / y.abs().max()) for x, y in pairs]
    collective_assert(max(off) < 1e-12, off)
    with count_messages() as batched:
        vmap(lambda a: F.dist_tsqr(a, L))(torch.stack([a] * 3))
    assert batched.sends == sent.sends and batched.bytes == 3 * sent.bytes
    # R is one value: its gradient counts once, and needs no message of its own
    x = a.clone().requires_grad_()
    loss = F.dist_tsqr(x, L)[1].pow(3).sum()
    assert messages(loss.backward)[0] == N - 1
    wished = grad(lambda a: (serial_qr(a)[1] ** 3).sum())(A)
    collective_assert(torch.allclose(x.grad, L.shard(wished), rtol=1e-11, atol=1e-11))


def test_qr_refuses():
    P = dd.Partition((N, 1))
    raises_everywhere(ShapeError, lambda: F.dist_tsqr(torch.ones(1, N + 2), P), "fewer rows than columns")
    raises_everywhere(ShapeError, lambda: F.dist_tsqr(torch.ones(9, 2, dtype=torch.int64), P), "not of such tensors")
    raises_everywhere(ShapeError, lambda: F.dist_tsqr(torch.ones(9, 2), P, shape=(12 * N, 2)), "not this rank's block")
    raises_everywhere(PartitionError, lambda: F.dist_tsqr(torch.ones(9, 2), dd.Partition((1, 1, N))), "rows are split")
