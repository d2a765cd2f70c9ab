"""Layers of rows, grids, matrices, solvers, transforms and sequences on CUDA tensors: every value and derivative equals
the CPU's, and stays on its device."""

import pytest
import torch
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F

pytestmark = pytest.mark.gpu
N, RANK = dd.world().size, dd.world().rank


def device():
    return torch.device("cuda", RANK % torch.cuda.device_count())


def drawn(L, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return L.shard(torch.randn(L.shape, dtype=torch.float64, generator=generator)).clone()


def rows(at):
    """Rows by number, with repetitions, and a sparse product of them."""
    L = dd.Layout(dd.Partition((N,)), (3 * N + 1,))
    wanted = (torch.arange(5) * 3 + RANK).remainder(3 * N + 1).to(at)
    index, places = dd.Index(L, wanted), torch.tensor([0, 0, 1, 2, 1], device=at)

    def call(x, values):
        y = F.gather_rows(x, index)
        return F.scatter_add_rows(y * y, index) + F.dist_spmv(x, index, places, values, L)

    return call, (drawn(L), torch.linspace(1, 2, 5, dtype=torch.float64))


def samples(at):
    """Values between grid points, and back."""
    L = dd.Layout(dd.Partition((N, 1)), (2 * N + 1, 5))
    points = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(RANK)) * 4

    def call(x, points):
        y = F.dist_sample(x, L, points, boundary="circular")
        return F.dist_deposit(y, points, L, boundary="circular")

    return call, (drawn(L), points)


def products(at):
    """SUMMA in panels, and R of a tall matrix."""
    L, tall = dd.Layout(dd.Partition((N, 1)), (4, 4)), dd.Layout(dd.Partition((N, 1)), (7 * N, 3))

    def call(a, b, c):
        _, r = F.dist_tsqr(c, tall)
        return F.dist_matmul(a, b, L, panels=2, shapes=(L, L)).sum() + (r.abs() ** 3).sum()

    return call, (drawn(L), drawn(L, 1), drawn(tall, 2))


def solution(at):
    """Conjugate gradients, differentiated implicitly."""
    L = dd.Layout(dd.Partition((N,)), (4 * N + 2,))
    spec = dd.HaloSpec(L, 1, boundary="zeros")

    def call(b):
        star = lambda x: 3 * x - F.halo_exchange(x, spec)[:-2] - F.halo_exchange(x, spec)[2:]
        return dd.solve.cg(star, b, L, tol=1e-13)[0]

    return call, (drawn(L),)


def spectra(at):
    """Fourier, cosine and back, over a slab."""
    L = dd.Layout(dd.Partition((N, 1, 1)), (2 * N + 1, 6, 5))
    M, C = F.fft_layout(L, None, real=True), F.fft_layout(L, None)

    def call(x):
        waves = F.dist_idctn(F.dist_dctn(x, L, None), C, None, P_out=L) ** 2
        return F.dist_irfftn(F.dist_rfftn(waves, L, None) * (1 + 2j), M, None, s=L.shape, P_out=L)

    return call, (drawn(L),)


def scans(at):
    """Over a split dim: a recurrence, and running sums."""
    L = dd.Layout(dd.Partition((1, N)), (2, 3 * N + 1))
    return lambda a, b: F.dist_scan(a, b, L, 1) + F.dist_cumsum(b, L, 1), (drawn(L) * 0.3, drawn(L, 1))


def keys(at):
    """Attention by the mathematics, rows dealt out in zigzag."""
    L = dd.Layout(dd.Partition((1, 1, N, 1)), (1, 2, 4 * N, 4))

    def call(q, k, v):
        return F.dist_attention(q, k, v, L, causal=True, order="zigzag", kernel="math")

    return call, tuple(drawn(L, seed) for seed in range(3))


@pytest.mark.parametrize("make", [rows, samples, products, solution, spectra, scans, keys], ids=lambda f: f.__name__)
def test_equals_the_cpu(make):
    torch.cuda.set_device(device())
    on_host, inputs = make(torch.device("cpu"))
    on_device, _ = make(device())
    every = tuple(range(len(inputs)))
    tangents = tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape) + RANK for t in inputs)

    def results(call, move):
        given, along = ([move(t) for t in ts] for ts in (inputs, tangents))
        loss = lambda *ts: (call(*ts) ** 2).sum()
        y, dy = jvp(call, tuple(given), tuple(along))
        batch = vmap(lambda t: call(t, *given[1:]))(torch.stack([given[0], 2 * given[0]]))
        return [y, dy, batch, *grad(loss, every)(*given)]

    found, wished = results(on_device, lambda t: t.to(device())), results(on_host, lambda t: t)
    for k, (a, b) in enumerate(zip(found, wished)):
        same = a.device == device() and a.shape == b.shape and torch.allclose(a.cpu(), b, rtol=1e-9, atol=1e-9)
        dd.testing.collective_assert(same, f"result {k}")
