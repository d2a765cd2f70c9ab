"""Poisson's equation by fast transforms, and by conjugate gradients with a stencil or a sparse matrix, is the direct
solve: periodic, with mirrors, between walls; its derivatives."""

import math
import sys
from pathlib import Path

import pytest
import torch
from serial import randn

import distdl as dd
import distdl.functional as F
from distdl.testing import collective_assert

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import fast_poisson as fp

N = dd.world().size
# Uneven blocks, a prime size, and over 4 ranks an empty block of the dim of 3.
BOXES = {
    1: {(7, 6): [(1, 1)], (5, 3, 8): [(1, 1, 1)]},
    2: {(7, 6): [(2, 1), (1, 2)], (5, 3, 8): [(2, 1, 1), (1, 1, 2)]},
    3: {(7, 6): [(3, 1), (1, 3)], (5, 3, 8): [(3, 1, 1)]},
    4: {(7, 6): [(4, 1), (2, 2)], (5, 3, 8): [(4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]},
}.get(N, {(7, 6): [(N, 1)]})


def off(found, wished):
    return float((found - wished).abs().max()) if wished.numel() else 0.0


def everywhere(wrong):
    collective_assert(not wrong, "; ".join(map(str, wrong[:4])))


@pytest.mark.parametrize("boundary", fp.BOUNDARIES)
@pytest.mark.parametrize("shape", BOXES, ids=str)
def test_direct_solve(boundary, shape):
    """By dense elimination, in two and three dims; the gradient is the solve of the cotangent, as -Δ is symmetric."""
    f, bar, wrong = randn(*shape), randn(*shape, seed=1), []
    u, pulled = fp.solve_directly(f, boundary), fp.solve_directly(bar, boundary)
    for grid in BOXES[shape]:
        L = dd.Layout(dd.Partition(grid), shape)
        found, pull = torch.func.vjp(lambda f: fp.solve(f, L, boundary), L.shard(f))
        differences = off(found, L.shard(u)), off(pull(L.shard(bar))[0], L.shard(pulled))
        if max(differences) > 1e-12 * float(u.abs().max()):
            wrong.append((grid, differences))
    everywhere(wrong)


# (grid, ranks) of each box. Four ranks show two and three too; blocks are uneven, and one of (4, 1) is empty.
ITERATED = {
    1: {(7, 9): [((1, 1), (0,))], (3, 10): [((1, 1), (0,))]},
    2: {(7, 9): [((2, 1), (1, 0))], (3, 10): [((1, 2), (0, 1))]},
    3: {(7, 9): [((1, 3), (2, 0, 1))], (3, 10): [((3, 1), (0, 1, 2))]},
    4: {
        (7, 9): [((2, 2), (0, 1, 2, 3)), ((1, 3), (2, 0, 3))],
        (3, 10): [((4, 1), (3, 0, 2, 1)), ((1, 2), (3, 1))],
    },
}.get(N, {(7, 9): [((N, 1), tuple(range(N)))]})


@pytest.mark.parametrize("boundary", fp.BOUNDARIES)
@pytest.mark.parametrize("shape", ITERATED, ids=str)
def test_three_solvers(shape, boundary):
    """Transforms, and conjugate gradients with a star's halo or a sparse matrix, find what elimination finds; pulled
    back, and pushed forward, two at a time."""
    f, bar, wrong = randn(*shape), randn(2, *shape, seed=1), []
    u = fp.solve_directly(f, boundary)
    solved = torch.stack([fp.solve_directly(b, boundary) for b in bar])  # pulled back or pushed forward
    for grid, ranks in ITERATED[shape]:
        L = dd.Layout(dd.Partition(grid, ranks), shape)
        if not L.active:
            continue
        here, place = L.shard(f), (slice(None), *L.slices())
        for name in ("waves", "stencil", "sparse"):
            A, infos = None if name == "waves" else getattr(fp, name)(L, boundary), []

            def way(f, L=L, A=A, infos=infos):
                if A is None:
                    return fp.solve(f, L, boundary)
                u, info = fp.iterate(A, f, L, boundary)
                infos.append(info)
                return u

            def push(t, way=way, x=here):
                return torch.func.jvp(way, (x,), (t,))[1]

            pairs = [(way(here), u[L.slices()])]
            if (grid, ranks) == ITERATED[shape][0]:  # one grid is enough for derivatives
                pulled = torch.func.vjp(way, here)[1](bar[0][L.slices()])[0]
                pushed = torch.func.vmap(push)(bar[place])
                pairs += [(pulled, solved[0][L.slices()]), (pushed, solved[place])]
            differences = [off(a, b) / float(solved.abs().max()) for a, b in pairs]
            wrong += [(grid, name, differences)] if max(differences) > 1e-10 else []
            wrong += [(grid, name, i) for i in infos[:1] if not i.converged or i.iterations > math.prod(shape)]
    everywhere(wrong)


def test_a_sparse_matrix_moves_what_the_star_does():
    """Between walls, each cell beside a border once to the rank behind it: as many messages, of as many bytes."""
    for grid, ranks in (pair for shape in ITERATED for pair in ITERATED[shape]):
        L = dd.Layout(dd.Partition(grid, ranks), (7, 9))
        if L.active:
            star, rows, u = fp.stencil(L, "dirichlet"), fp.sparse(L, "dirichlet"), L.shard(randn(7, 9)).clone()
            with dd.testing.count_messages() as by_star:
                v = star(u)
            with dd.testing.count_messages() as by_rows:
                w = rows(u)
            assert sorted(by_star) == sorted(by_rows), (by_star, by_rows)
            assert torch.allclose(v, w, rtol=1e-13, atol=1e-10)


def test_the_matrices():
    """Against their definition: waves of each boundary are eigenvectors, with the eigenvalues of the solve."""
    n = 5
    k, x = torch.arange(n, dtype=torch.float64), (torch.arange(n, dtype=torch.float64) + 0.5) / n
    waves = {
        "periodic": torch.cos(2 * math.pi * k[:, None] * x),
        "neumann": torch.cos(math.pi * k[:, None] * x),
        "dirichlet": torch.sin(math.pi * (k[:, None] + 1) * x),
    }
    for boundary, rows in waves.items():
        A = fp.matrix(boundary, (n,))
        assert off(rows @ A, fp.eigenvalues(boundary, n, k)[:, None] * rows) < 1e-12 * n**2


def test_a_channel():
    """Periodic along two dims, and between walls along the third, by one transform after the other."""
    shape = (6, 7, 5)
    A = sum(
        torch.kron(torch.kron(a, b), c)
        for a, b, c in (
            (fp.matrix("dirichlet", (6,)), torch.eye(7), torch.eye(5)),
            (torch.eye(6), fp.matrix("periodic", (7,)), torch.eye(5)),
            (torch.eye(6), torch.eye(7), fp.matrix("periodic", (5,))),
        )
    )
    f, wrong = randn(*shape), []
    u = torch.linalg.solve(A, f.flatten()).reshape(shape)
    for grid in {1: [(1, 1, 1)], 4: [(1, 2, 2), (4, 1, 1)]}.get(N, [(1, N, 1)]):
        L = dd.Layout(dd.Partition(grid), shape)
        M = F.fft_layout(L, 0)
        S = F.fft_layout(M, (1, 2), real=True)
        s = F.dist_rfftn(F.dist_dstn(L.shard(f), L, 0), M, (1, 2))
        places = [torch.arange(m, dtype=f.dtype)[part] for m, part in zip(S.shape, S.slices())]
        kinds = zip(("dirichlet", "periodic", "periodic"), shape, places)
        total = sum(torch.meshgrid(*(fp.eigenvalues(b, n, k) for b, n, k in kinds), indexing="ij"))
        found = F.dist_idstn(F.dist_irfftn(s / total, S, (1, 2), s=shape[1:], P_out=M), M, 0, P_out=L)
        wrong += [(grid, off(found, L.shard(u)))] if off(found, L.shard(u)) > 1e-13 else []
    everywhere(wrong)


def test_smooth_functions_are_exact():
    """Derivatives by wave numbers: -Δu = f on a periodic box, exact for the waves that there are."""
    shape = (8, 6, 10)
    axes = [2 * math.pi * torch.arange(m, dtype=torch.float64) / m for m in shape]
    x, y, z = torch.meshgrid(*axes, indexing="ij")
    u = torch.sin(x) * torch.cos(2 * y) + torch.cos(3 * z)
    f = 5 * torch.sin(x) * torch.cos(2 * y) + 9 * torch.cos(3 * z)
    L = dd.Layout(dd.Partition(BOXES.get((5, 3, 8), [(N, 1, 1)])[-1]), shape)
    M = F.fft_layout(L, None, real=True)
    make = (F.dist_fftfreq, F.dist_fftfreq, F.dist_rfftfreq)
    k = [g(M, d, m, 1 / m, dtype=torch.float64) for d, (g, m) in enumerate(zip(make, shape))]
    square = sum(a * a for a in torch.meshgrid(*k, indexing="ij"))
    s = F.dist_rfftn(L.shard(f), L, None)
    s = torch.where(square == 0, 0, s / torch.where(square == 0, 1, square))
    found = F.dist_irfftn(s, M, None, s=shape, P_out=L)
    everywhere([off(found, L.shard(u))] if off(found, L.shard(u)) > 1e-13 else [])
