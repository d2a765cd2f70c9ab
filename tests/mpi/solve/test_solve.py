"""dd.solve against dense serial torch: values, messages, derivatives of both orders, batches, errors on every rank."""

from itertools import pairwise

import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, layouts, randn
from torch.func import grad, jacrev, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError, SolverError
from distdl.testing import collective_assert, count_messages

WORLD = dd.world()
N = WORLD.size
n = 37
LINE = dd.Layout(dd.Partition((N,)), (n,))
TIGHT = dict(tol=1e-12)


def laplacian(x, c, L):
    """c x - Δx with zeros around: one halo of one element."""
    wide = F.halo_exchange(x, dd.HaloSpec(L, 1, boundary="zeros"))
    if not x.numel():
        return x * c + wide.sum() * 0
    return c * x + 2 * x - wide[:-2] - wide[2:]


def dense(c):
    m = len(c)
    off = torch.ones(m - 1, dtype=c.dtype)
    return torch.diag(c + 2) - torch.diag(off, 1) - torch.diag(off, -1)


def close(found, expected, L, what, rtol=1e-8):
    off = (found - L.shard(expected)).abs().max() / expected.abs().max() if L.active and found.numel() else 0
    collective_assert(float(off) <= rtol, f"{what}: off by {float(off):.1e}")


# ---------------------------------------------------------------- conjugate gradients


def test_messages_of_cg():
    """A step is one halo and one all-reduce; the residual at the end another of both."""
    c = torch.zeros(n, dtype=torch.float64)
    b = LINE.shard(randn(n, seed=1))
    with torch.no_grad(), count_messages() as sent:
        x, info = dd.solve.cg(lambda x: laplacian(x, LINE.shard(c), LINE), b, LINE, tol=0, max_iter=30)
    assert info.iterations == 30 and not info.converged
    halo = (WORLD.rank > 0) + (WORLD.rank < N - 1)
    assert len(sent.of("all_reduce")) == (31 if N > 1 else 0) and sent.sends == 31 * halo and not sent.of("agree")
    if N == 4 and WORLD.rank == 0:
        assert len(sent) == 62
    x, info = dd.solve.cg(lambda x: laplacian(x, LINE.shard(c), LINE), b, LINE, tol=1e-10)
    assert info.converged and info.iterations <= 40 and info.residual <= 1e-10
    close(x, torch.linalg.solve(dense(c), randn(n, seed=1)), LINE, "x")


def test_every_rank_stops_at_the_same_step():
    b = LINE.shard(randn(n, seed=1))
    c = LINE.shard(randn(n, seed=2).exp())
    infos = []
    for tol in (1e-2, 1e-5, 1e-10):
        x, info = dd.solve.cg(lambda x: laplacian(x, c, LINE), b, LINE, tol=tol)
        infos.append((int(info.iterations), float(info.residual), bool(info.converged)))
        again, more = dd.solve.cg(lambda x: laplacian(x, c, LINE), b, LINE, tol=tol, x0=x)
        assert more.iterations == 0 and torch.equal(again, x), "it begins where it ended"
    assert infos[0][0] < infos[1][0] < infos[2][0]
    everyone = dd.testing.gather_objects(infos)
    assert everyone == [infos] * N


def test_the_preconditioner_saves_steps():
    c = (4 * randn(n, seed=2)).exp()
    b, mine = LINE.shard(randn(n, seed=1)), LINE.shard(c)
    A = lambda x: laplacian(x, mine, LINE)
    plain = dd.solve.cg(A, b, LINE, **TIGHT)
    jacobi = dd.solve.cg(A, b, LINE, preconditioner=lambda r: r / (mine + 2), **TIGHT)
    assert jacobi[1].iterations < plain[1].iterations and jacobi[1].converged and plain[1].converged
    for x in (plain[0], jacobi[0]):
        close(x, torch.linalg.solve(dense(c), randn(n, seed=1)), LINE, "x")


def solve(b, c, L, **options):
    return dd.solve.cg(lambda x: laplacian(x, c.exp(), L), b, L, **{**TIGHT, **options})[0]


def serial_solve(b, c):
    return torch.linalg.solve(dense(c.exp()), b)


def test_derivatives_of_the_solution():
    """In b and in the coefficients that A closes over: value, gradient by both ways, jvp, vmap of gradients, Hessian
    products; uneven and empty blocks, some of the ranks."""
    for name, L in layouts((9,), (0,)).items():
        check_layer(
            lambda b, c, L=L: solve(b, c, L),
            serial_solve,
            [randn(9, seed=1), randn(9, seed=2)],
            [L, L],
            L,
            batched=(0, 1),
            rtol=1e-8,
            name=name,
        )


def test_torch_func_and_autograd():
    L = dd.Layout(dd.Partition((N,)), (7,))
    B, C = randn(7, seed=1), randn(7, seed=2)
    b, c = L.shard(B).clone(), L.shard(C).clone()
    weights = randn(7, seed=3)

    def loss(b, c):
        return F.dist_sum((L.shard(weights) + solve(b, c, L)) ** 3, L)

    def serial(b, c):
        return ((weights + serial_solve(b, c)) ** 3).sum()

    H = torch.func.hessian(serial, argnums=1)(B, C)
    found = dd.func.hessian(lambda c: loss(b, c), L)(c)
    close(found, H, dd.Layout(dd.Partition((N, 1)), (7, 7)), "hessian")
    J = jacrev(serial_solve, argnums=1)(B, C)
    close(dd.func.jacrev(lambda c: solve(b, c, L), L)(c).T, J.T, dd.Layout(dd.Partition((N, 1)), (7, 7)), "jacrev")
    x, y = b.clone().requires_grad_(), c.clone().requires_grad_()
    first = torch.autograd.grad(loss(x, y), (x, y), create_graph=True)
    second = torch.autograd.grad(sum((g * (1 + g)).sum() for g in first), (x, y))
    X, Y = B.clone().requires_grad_(), C.clone().requires_grad_()
    wished = torch.autograd.grad(serial(X, Y), (X, Y), create_graph=True)
    bent = torch.autograd.grad(sum((g * (1 + g)).sum() for g in wished), (X, Y))
    for i, (g, w) in enumerate(zip((*first, *second), (*wished, *bent))):
        close(g.detach(), w.detach(), L, f"autograd {i}")
    other = randn(7, seed=8)
    third = lambda f, c: grad(lambda c: F.dist_sum(jvp(grad(f), (c,), (L.shard(other),))[1], L))(c)
    # torch's own is wrong in forward mode from the third derivative on
    by_reverse = lambda f, c: grad(lambda c: grad(lambda c: (grad(f)(c) * other).sum())(c).sum())(c)
    close(
        third(lambda c: F.dist_sum(solve(b, c, L, order=3) ** 3, L), c),
        by_reverse(lambda C: (serial_solve(B, C) ** 3).sum(), C),
        L,
        "third",
    )


def test_vmap_takes_one_set_of_messages():
    """An example that is done waits for the others, and stays as it was; 0 has the solution 0."""
    B = torch.stack([randn(n, seed=1), torch.zeros(n, dtype=torch.float64), randn(n, seed=3)])
    C = torch.stack([randn(n, seed=4), randn(n, seed=5), 3 * randn(n, seed=6)])
    b, c = (torch.stack([LINE.shard(x) for x in X]) for X in (B, C))
    run = lambda b, c: dd.solve.cg(lambda x: laplacian(x, c.exp(), LINE), b, LINE, **TIGHT)
    with torch.no_grad():
        with count_messages() as sent:
            x, info = vmap(run)(b, c)
        alone = [run(*pair) for pair in zip(b, c)]
        assert torch.equal(info.iterations, torch.stack([i.iterations for _, i in alone])) and bool(
            info.converged.all()
        )
        steps = int(info.iterations.max())
    for k in (0, 2):
        close(x[k], serial_solve(B[k], C[k]), LINE, f"example {k}")
    assert not x[1].any() and info.iterations[1] == 0 and info.residual[1] == 0
    if N > 1:
        assert len(sent.of("all_reduce")) <= steps + 6
    shared = vmap(lambda b: run(b, c[0])[0])(b)
    close(shared[2], serial_solve(B[2], C[0]), LINE, "a shared operator")
    other = vmap(lambda c: run(b[0], c)[0])(c)
    close(other[2], serial_solve(B[0], C[2]), LINE, "a shared b")
    twice = vmap(vmap(lambda b, c: run(b, c)[0], in_dims=(0, None)), in_dims=(None, 0))(b, c)
    close(twice[0, 2], serial_solve(B[2], C[0]), LINE, "two vmaps")
    slopes = vmap(grad(lambda c, b: F.dist_sum(run(b, c)[0] ** 2, LINE)), in_dims=(0, None))(c, b[0])
    close(slopes[2], grad(lambda c: (serial_solve(B[0], c) ** 2).sum())(C[2]), LINE, "vmap of grad")


def test_complex_hermitian():
    phase = torch.tensor(0.3 + 0.4j, dtype=torch.complex128)

    def A(x, c):
        wide = F.halo_exchange(x, dd.HaloSpec(LINE, 1, boundary="zeros"))
        return (c + 2) * x - phase * wide[:-2] - phase.conj() * wide[2:]

    C = randn(n, seed=2).exp()
    off = torch.ones(n - 1, dtype=torch.complex128)
    D = lambda C: torch.diag((C + 2).to(off.dtype)) - phase * torch.diag(off, -1) - phase.conj() * torch.diag(off, 1)
    B = torch.complex(randn(n, seed=1), randn(n, seed=3))
    size = lambda x: (x * x.conj()).real.pow(2)
    run = lambda b, c: dd.solve.cg(lambda x: A(x, c), b, LINE, **TIGHT)[0]
    b, c = LINE.shard(B).clone(), LINE.shard(C).clone()
    close(run(b, c), torch.linalg.solve(D(C), B), LINE, "x")
    found = grad(lambda b, c: F.dist_sum(size(run(b, c)), LINE), (0, 1))(b, c)
    wished = grad(lambda b, c: size(torch.linalg.solve(D(c), b)).sum(), (0, 1))(B, C)
    for g, w in zip(found, wished):
        close(g, w, LINE, "gradient")


def test_a_hessian_is_an_operator():
    """Newton's step: A is a Hessian-vector product, itself made of grad and jvp across ranks; and a LinearMap."""
    w = LINE.shard(randn(n, seed=5)).clone()
    energy = lambda w: F.dist_sum(w.cosh() + 0.1 * laplacian(w, w, LINE) ** 2, LINE)
    H = dd.func.hessian(energy, LINE)(w)
    B = randn(n, seed=1)
    x, info = dd.solve.cg(lambda v: dd.func.hvp(energy, w, v), LINE.shard(B), LINE, **TIGHT)
    rows = F.all_gather(H, dd.Layout(dd.Partition((N, 1)), (n, n)), 0)
    close(x, torch.linalg.solve(rows, B), LINE, "x")
    twice = dd.linear_map(lambda x: 2 * x, lambda x: 2 * x, LINE.local_shape(), LINE.local_shape())
    x, info = dd.solve.cg(twice, LINE.shard(B), LINE)
    assert info.iterations == 1 and torch.allclose(x, LINE.shard(B) / 2)


def test_lower_precision_and_limits():
    b, c = LINE.shard(randn(n, seed=1)).float(), LINE.shard(randn(n, seed=2).exp()).float()
    x, info = dd.solve.cg(lambda x: laplacian(x, c, LINE), b, LINE, tol=1e-5)
    assert x.dtype == torch.float32 and info.converged
    x, info = dd.solve.cg(lambda x: laplacian(x, c, LINE), b, LINE, tol=1e-30)
    assert not info.converged and info.residual < 1e-6 and info.iterations < 370, (
        "it ends where nothing is to be gained"
    )
    x, info = dd.solve.cg(lambda x: laplacian(x, c, LINE), b, LINE, max_iter=3)
    assert info.iterations == 3 and not info.converged


def test_a_step_that_is_exact():
    """Multiples of the identity: one step leaves rounding, of which no further ones are made."""
    for factor in (3.0, 5.0, 1 / 3):
        for dtype in (torch.float64, torch.float32):
            b = LINE.shard(randn(n, seed=3)).to(dtype)
            x, info = dd.solve.cg(lambda x, f=factor: f * x, b, LINE, tol=0.0)
            assert info.iterations <= 5 and info.residual < 1e-6 and torch.allclose(factor * x, b)


def test_cg_says_what_went_wrong():
    b = LINE.shard(randn(n, seed=1))
    shift = LINE.shard(torch.linspace(-5, 3, n, dtype=torch.float64))
    text = raises_everywhere(SolverError, lambda: dd.solve.cg(lambda x: shift * x, b, LINE), "cg: A is not positive")
    assert "iteration" in text and "relative residual" in text
    bad = torch.where(LINE.shard(torch.arange(n)) == n - 1, torch.nan, 1.0)
    raises_everywhere(SolverError, lambda: dd.solve.cg(lambda x: bad * x, b, LINE), "not finite", "iteration 0")
    raises_everywhere(SolverError, lambda: dd.solve.cg(lambda x: x, b * bad, LINE), "not finite", "residual nan")
    raises_everywhere(
        SolverError, lambda: dd.solve.cg(lambda x: 2 * x, b, LINE, preconditioner=lambda r: -r), "preconditioner is not"
    )
    raises_everywhere(ShapeError, lambda: dd.solve.cg(lambda x: x[:0], b, LINE), "A does not return a block")
    raises_everywhere(ShapeError, lambda: dd.solve.cg(lambda x: x, b.new_zeros(99), LINE), "b is not this rank's block")
    raises_everywhere(ShapeError, lambda: dd.solve.cg(lambda x: x, b, LINE, tol=-1.0), "no such tolerance")


def test_what_A_reaches():
    """In attributes of an object a gradient finds it; a batch of gradients does not, and says so. In modules all do."""

    class Diagonal:
        def __init__(self, c):
            self.c = c

        def __call__(self, x):
            return self.c * x

    b, c = LINE.shard(randn(n, seed=1)).clone(), LINE.shard(randn(n, seed=2).exp()).clone()
    run = lambda A: dd.solve.cg(A, b, LINE, **TIGHT)[0]
    assert torch.allclose(run(Diagonal(c)), b / c)
    assert torch.allclose(grad(lambda c: run(Diagonal(c)).sum())(c), -b / c**2)
    two, one = torch.stack([c, 2 * c]), torch.ones((), dtype=c.dtype)
    for call in (
        lambda: vmap(grad(lambda c: run(Diagonal(c)).sum()))(two),
        lambda: grad(lambda s: vmap(lambda c: run(Diagonal(s * c)))(two).sum())(one),
    ):
        raises_everywhere(ShapeError, call, "in a way that is not seen")
    layer = torch.nn.Module()
    layer.c = torch.nn.Parameter(c.clone())
    layer.forward = lambda x: torch.stack([layer.c])[0] * x
    run(layer).sum().backward()
    assert torch.allclose(layer.c.grad, -b / c**2)


def test_one_derivative_is_not_two():
    """What ``order`` is for."""
    L = dd.Layout(dd.Partition((N,)), (7,))
    b, c = L.shard(randn(7, seed=1)).clone(), L.shard(randn(7, seed=2)).clone()
    bend = lambda order: jvp(grad(lambda c: F.dist_sum(solve(b, c, L, order=order) ** 2, L)), (c,), (c,))[1]
    wished = jvp(
        grad(lambda c: (serial_solve(randn(7, seed=1), c) ** 2).sum()), (randn(7, seed=2),), (randn(7, seed=2),)
    )[1]
    close(bend(2), wished, L, "two")
    off = F.dist_max((bend(1) - L.shard(wished)).abs(), L)
    assert off > 1e-3 * wished.abs().max()
    assert not grad(lambda b: solve(b, c, L, order=0).sum())(b).any()


def test_a_derivative_that_does_not_converge_warns():
    b, c = LINE.shard(randn(n, seed=1)).clone(), LINE.shard(randn(n, seed=2)).clone()
    with pytest.warns(RuntimeWarning, match="the system of a derivative"):
        grad(lambda b: F.dist_sum(solve(b, c, LINE, max_iter=3) ** 2, LINE))(b)


def test_a_gradient_is_one_more_solve():
    """Reverse mode applies the solver to the cotangent, and to nothing else."""
    b = LINE.shard(randn(n, seed=1)).clone()
    c = LINE.shard(randn(n, seed=2)).clone().requires_grad_()
    with torch.no_grad(), count_messages() as once:
        solve(b, c, LINE)
    y = solve(b, c, LINE)
    with count_messages() as sent:
        F.dist_sum(y**2, LINE).backward()
    if N > 1:
        assert len(sent.of("all_reduce")) <= len(once.of("all_reduce")) + 12


# ---------------------------------------------------------------- least squares


def stencil(x, c, L):
    """A map of n blocks to n that is not symmetric: c x + 2 (the element before) - (the one after)."""
    wide = F.halo_exchange(x, dd.HaloSpec(L, 1, boundary="zeros"))
    if not x.numel():
        return x * c + wide.sum() * 0
    return c * x + 0.5 * wide[:-2] - 0.25 * wide[2:]


def stencil_matrix(c):
    off = torch.ones(len(c) - 1, dtype=c.dtype)
    return torch.diag(c) + 0.5 * torch.diag(off, -1) - 0.25 * torch.diag(off, 1)


def tall(x, c, L, L_out):
    """Twice as many equations as unknowns, laid out over a partition of their own."""
    return F.repartition(
        torch.stack([stencil(x, c, L), c * x]),
        dd.Layout(_rows(L.partition), (2, *L.shape), L.splits and (None, *L.splits)),
        L_out,
    )


def _rows(P):
    return dd.Partition((1, *P.shape), P.ranks)


def serial_lsqr(b, c, damp):
    A = torch.cat([stencil_matrix(c), torch.diag(c)])
    b = b.reshape(-1)
    if damp:
        A = torch.cat([A, damp * torch.eye(len(c), dtype=c.dtype)])
        b = torch.cat([b, torch.zeros_like(c)])
    return torch.linalg.solve(A.T @ A, A.T @ b)


@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_least_squares(damp):
    m = 6
    for name, L in layouts((m,), (0,)).items():
        ranks = tuple(reversed(range(N)))
        L_out = dd.Layout(dd.Partition((1, N), ranks), (2, m))
        check_layer(
            lambda b, c, L=L, L_out=L_out: dd.solve.lsqr(
                lambda x: tall(x, c.exp(), L, L_out), b, L_out, L, damp=damp, **TIGHT
            )[0],
            lambda b, c: serial_lsqr(b, c.exp(), damp),
            [randn(2, m, seed=1), randn(m, seed=2)],
            [L_out, L],
            L,
            batched=(0, 1),
            active=L.active if N > 1 else None,
            rtol=1e-8,
            name=name,
        )


def test_lsqr_of_square_and_wide_maps():
    B, C = randn(n, seed=1), randn(n, seed=2).exp() + 1
    b, c = LINE.shard(B).clone(), LINE.shard(C).clone()
    run = lambda b, c: dd.solve.lsqr(lambda x: stencil(x, c, LINE), b, LINE, LINE, **TIGHT)[0]
    serial = lambda b, c: torch.linalg.solve(stencil_matrix(c), b)
    close(run(b, c), serial(B, C), LINE, "square")
    found = grad(lambda b, c: F.dist_sum(run(b, c) ** 2, LINE), (0, 1))(b, c)
    for g, w in zip(found, grad(lambda b, c: (serial(b, c) ** 2).sum(), (0, 1))(B, C)):
        close(g, w, LINE, "gradient")
    # the sum of pairs of elements: half as many equations
    X = dd.Layout(dd.Partition((N, 1)), (n, 2))
    pair = dd.linear_map(
        lambda x: x.sum(-1),
        lambda y: y[..., None].expand(*y.shape, 2),
        X.local_shape(),
        LINE.local_shape(),
        batched=True,
    )
    x, info = dd.solve.lsqr(pair, b, LINE, X.partition)
    assert info.converged and torch.allclose(x, b[:, None] / 2), "the shortest of all"
    raises_everywhere(
        SolverError, lambda: grad(lambda b: dd.solve.lsqr(pair, b, LINE, X)[0].sum())(b), "has no derivative here"
    )
    raises_everywhere(PartitionError, lambda: dd.solve.lsqr(lambda x: x, b, LINE, LINE.partition), "nothing says")
    zero, info = dd.solve.lsqr(pair, 0 * b, LINE, X)
    assert not zero.any() and info.iterations == 0 and info.converged
    bad = lambda x: x * torch.nan
    raises_everywhere(SolverError, lambda: dd.solve.lsqr(bad, b, LINE, LINE), "not finite")


# ---------------------------------------------------------------- eigenvalues


def test_all_eigenpairs():
    C = randn(9, seed=2).exp()
    for name, L in layouts((9,), (0,)).items():
        c = L.shard(C)
        v = L.shard(randn(9, seed=1)).clone()
        values, vectors = dd.solve.lanczos(lambda x, c=c, L=L: laplacian(x, c, L), v, L, 9)
        if not L.active:
            assert values.shape == (0,) and vectors.shape[1:] == (0,)
            continue
        wished, V = torch.linalg.eigh(dense(C))
        V = V * torch.sign(V.T @ randn(9, seed=1))
        assert torch.allclose(values, wished, rtol=1e-12, atol=1e-12), name
        assert torch.allclose(vectors, V.T[:, L.slices()[0]], atol=1e-9), name
        dd.testing.assert_copies({"values": values}, L)


def test_extreme_eigenvalues_and_their_gradient():
    C = randn(n, seed=2)
    c, v = LINE.shard(C).clone(), LINE.shard(randn(n, seed=1)).clone()
    A = lambda c: lambda x: laplacian(x, c, LINE)
    values, vectors = dd.solve.lanczos(A(c), v, LINE, 30)
    wished = torch.linalg.eigvalsh(dense(C))
    assert abs(values[-1] - wished[-1]) < 1e-10 and abs(values[0] - wished[0]) < 1e-10
    gram = F.invariant_sum(vectors @ vectors.T, LINE.partition)
    assert torch.allclose(gram, torch.eye(30, dtype=gram.dtype), atol=1e-13)
    x, _ = dd.solve.lanczos(lambda x: laplacian(x, c, LINE), torch.complex(v, v), LINE, 30)
    assert abs(x[-1] - wished[-1]) < 1e-10 and not x.is_complex()


def test_derivatives_and_batches_of_eigenvalues():
    """The largest of 7, through all steps; and of two operators at once."""
    L = dd.Layout(dd.Partition((N,)), (7,))
    C = randn(7, seed=2)
    c, v = L.shard(C).clone(), L.shard(randn(7, seed=1)).clone()
    largest = lambda c: dd.solve.lanczos(lambda x: laplacian(x, c, L), v, L, 7)[0][-1]
    serial = lambda C: torch.linalg.eigvalsh(dense(C))[-1]
    close(grad(largest)(c), grad(serial)(C), L, "gradient")
    both = vmap(largest)(torch.stack([c, 2 * c]))
    assert torch.allclose(both, torch.stack([serial(C), serial(2 * C)]), rtol=1e-12)


def test_an_exhausted_space_gives_fewer():
    """Three distinct eigenvalues: three pairs."""
    kinds = LINE.shard(torch.arange(n) % 3).double() + 1
    v = LINE.shard(randn(n, seed=1)).clone()
    with count_messages() as sent:
        values, vectors = dd.solve.lanczos(lambda x: kinds * x, v, LINE, 10)
    assert torch.allclose(values, torch.tensor([1.0, 2, 3], dtype=torch.float64)) and len(vectors) == 3
    assert torch.allclose(kinds * vectors, values[:, None] * vectors, atol=1e-12)
    assert len(sent.of("all_reduce")) == (7 if N > 1 else 0)
    two = torch.stack([v, v])
    raises_everywhere(
        SolverError, lambda: vmap(lambda v: dd.solve.lanczos(lambda x: kinds * x, v, LINE, 10)[0])(two), "is exhausted"
    )
    raises_everywhere(SolverError, lambda: dd.solve.lanczos(lambda x: x, 0 * v, LINE, 3), "v0 is zero")
    raises_everywhere(ShapeError, lambda: dd.solve.lanczos(lambda x: x, v, LINE, 0), "no steps")


# ---------------------------------------------------------------- minima


def rosenbrock(x, L):
    """This rank's terms of Σ 100 (x_{i+1} - x_i²)² + (1 - x_i)²."""
    wide = F.halo_exchange(x, dd.HaloSpec(L, 0, 1, boundary="none"))
    here = wide[: max(len(wide) - 1, 0)] if L.active and L.box()[0][1] == L.shape[0] else wide[: len(x)]
    after = wide[1:]
    return (100 * (after - here[: len(after)] ** 2) ** 2 + (1 - here[: len(after)]) ** 2).sum()


@pytest.mark.parametrize("loss", ["invariant", "varying"])
def test_rosenbrock(loss):
    """Of 12 unknowns, over blocks: to the minimum at 1, on every rank in as many steps, with as many messages."""
    m = max(12, N)
    seen = []
    for name, L in layouts((m,), (0,)).items():
        f = lambda x, L=L: rosenbrock(x, L) if loss == "varying" else F.invariant_sum(rosenbrock(x, L), L.partition)
        told = []
        x, info = dd.solve.lbfgs(
            f, L.shard(torch.zeros(m, dtype=torch.float64)), L, steps=200, loss=loss, tol=1e-9,
            progress=lambda *now, told=told: told.append(now),
        )  # fmt: skip
        if L.active:
            assert info.converged and info.iterations < 120 and info.value < 1e-15, (name, info)
            assert torch.allclose(x, torch.ones_like(x), atol=1e-8)
            assert [k for k, *_ in told] == list(range(1, info.iterations + 1)) and told[-1][1] == info.value
            assert all(a[1] >= b[1] for a, b in pairwise(told)), "it never climbs"
            seen.append(info.iterations)
    assert len(set(seen)) == 1 or max(seen) - min(seen) < 20


def test_as_serial_torch():
    """The first steps are those of torch.optim.LBFGS on one rank with the same line search conditions: a quadratic is
    solved in as many steps as it has distinct eigenvalues, roughly."""
    c = LINE.shard(torch.arange(n) % 4).double() + 1
    b = LINE.shard(randn(n, seed=1))
    f = lambda x: F.dist_sum(0.5 * c * x * x - b * x, LINE)
    x, info = dd.solve.lbfgs(f, torch.zeros_like(b), LINE, steps=50)
    assert info.converged and info.iterations <= 20 and torch.allclose(x, b / c, atol=1e-6)


def test_weights_on_every_rank_and_pytrees():
    """Weights are one value: ``dims=()``, marked where the data meet them."""
    X = randn(8 * N, 3, seed=1)
    y = X @ torch.tensor([1.0, -2, 3], dtype=torch.float64) + 0.5
    rows = dd.Layout(dd.Partition((N, 1)), X.shape)
    x, t = rows.shard(X), y[rows.slices()[0]]

    def f(w):
        weight, bias = F.mark_varying((w["weight"], w["bias"]), rows.partition)
        return F.invariant_sum(((x @ weight + bias - t) ** 2).sum(), rows.partition)

    start = {"weight": torch.zeros(3, dtype=torch.float64), "bias": torch.zeros((), dtype=torch.float64)}
    w, info = dd.solve.lbfgs(f, start, rows, steps=100, dims=())
    assert info.converged and torch.allclose(w["weight"], torch.tensor([1.0, -2, 3], dtype=torch.float64), atol=1e-6)
    assert abs(w["bias"] - 0.5) < 1e-6
    dd.testing.assert_copies(w, rows)


def test_lbfgs_says_what_went_wrong():
    x = LINE.shard(randn(n, seed=1)).clone()
    nan = lambda x: F.dist_sum(x * torch.nan, LINE)
    raises_everywhere(SolverError, lambda: dd.solve.lbfgs(nan, x, LINE, steps=3), "f is not finite where it begins")
    inside = lambda: grad(lambda x: dd.solve.lbfgs(lambda x: (x * x).sum(), x, LINE, steps=3)[0].sum())(x)
    raises_everywhere(SolverError, inside, "has no derivative here")
    raises_everywhere(ShapeError, lambda: dd.solve.lbfgs(lambda x: x, x, LINE, steps=3), "does not return a scalar")
    raises_everywhere(ShapeError, lambda: dd.solve.lbfgs(nan, x, LINE, steps=3, loss="mine"), "unknown kind of loss")
    log = lambda x: F.dist_sum(x.log() ** 2, LINE)  # steps that are too far are NaN
    y, info = dd.solve.lbfgs(log, x.exp() * 9, LINE, steps=100)
    assert info.converged and torch.allclose(y, torch.ones_like(y), atol=1e-5)
