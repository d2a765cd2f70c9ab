"""What the notebook on Poisson's equation and its tests share: the solve by wave numbers, by conjugate gradients with a
stencil or a sparse matrix, and the dense one."""

import math
from functools import reduce
from itertools import accumulate, product

import torch

import distdl as dd
import distdl.functional as F

# What is beyond the first and the last cell of a dim: the other end; a mirror (no flux); a wall where u is 0.
BOUNDARIES = ("periodic", "neumann", "dirichlet")


def eigenvalues(boundary, n, k):
    """Of -(u[j+1] - 2 u[j] + u[j-1]) n², on n cells of an interval of length 1, for the wave numbers at places k."""
    angle = {"periodic": 2 * math.pi / n * k, "neumann": math.pi / n * k, "dirichlet": math.pi / n * (k + 1)}[boundary]
    return (2 * n * torch.sin(angle / 2)) ** 2


def solve(f, L, boundary):
    """u with -Δu = f, of second differences on the cells of a box of sides 1: this rank's blocks of layout ``L``.

    The waves of the boundary condition are eigenvectors: a transform, a division, and a transform back. Where u is
    known up to a constant (no wall), its mean is 0, and that of f is left out.
    """
    n, real = L.shape, boundary == "periodic"
    forward, inverse = {
        "periodic": (F.dist_rfftn, F.dist_irfftn),
        "neumann": (F.dist_dctn, F.dist_idctn),
        "dirichlet": (F.dist_dstn, F.dist_idstn),
    }[boundary]
    M = F.fft_layout(L, None, real=real)
    places = [torch.arange(m, dtype=f.dtype, device=f.device)[part] for m, part in zip(M.shape, M.slices())]
    waves = torch.meshgrid(*(eigenvalues(boundary, m, k) for m, k in zip(n, places)), indexing="ij")
    total = sum(waves)
    weight = torch.where(total == 0, 0, 1 / torch.where(total == 0, 1, total))
    return inverse(weight * forward(f, L, None), M, None, s=n, P_out=L)


def stencil(L, boundary):
    """-Δ of this rank's block, by a halo without corners."""
    n, dims = L.shape, range(L.ndim)
    beyond = {"periodic": "circular", "neumann": "replicate", "dirichlet": "zeros"}[boundary]
    spec = dd.HaloSpec(L, 1, boundary=beyond, corners=False)
    walls = torch.zeros(L.local_shape(), dtype=torch.float64)
    for d, (place, m) in enumerate(zip(L.slices(), n)):
        if boundary == "dirichlet":  # what makes 0 halfway is not 0, but the cell's own value, negative
            k = torch.arange(m)[place]
            walls += (m**2 * (1.0 * (k == 0) + (k == m - 1))).reshape([-1 if e == d else 1 for e in dims])

    def A(u):
        wide = F.halo_exchange(u, spec)
        result = walls * u
        for d in dims:
            line = wide[tuple(slice(None) if e == d else slice(1, -1) for e in dims)]
            result = result - n[d] ** 2 * line.diff(n=2, dim=d)
        return result

    return A


def sparse(L, boundary):
    """The same by rows of a sparse matrix. Cells are numbered rank by rank, so that a block is a rank's rows as it is."""
    counts = [math.prod(L.local_shape(r)) for r in L.partition.ranks]
    rows_layout = dd.Layout(dd.Partition((len(counts),), L.partition.ranks), (sum(counts),), (counts,))
    numbers = torch.empty(L.shape, dtype=torch.int64)
    for r, first, count in zip(L.partition.ranks, accumulate(counts, initial=0), counts):
        numbers[L.slices(r)] = torch.arange(first, first + count).reshape(L.local_shape(r))
    cells = torch.meshgrid(*(torch.arange(m)[part] for m, part in zip(L.shape, L.slices())), indexing="ij")
    columns, values = [numbers[cells]], [torch.full(cells[0].shape, 2.0 * sum(m**2 for m in L.shape)).double()]
    for d, step in product(range(L.ndim), (-1, 1)):
        m, k = L.shape[d], cells[d] + step
        outside = (k < 0) | (k >= m)
        k = k % m if boundary == "periodic" else k.clamp(0, m - 1)
        columns.append(numbers[(*cells[:d], k, *cells[d + 1 :])])
        values.append(-(m**2) * torch.where(outside & (boundary == "dirichlet"), -1.0, 1.0).double())
    rows = torch.arange(cells[0].numel()).repeat(len(columns))
    index = dd.Index(rows_layout, torch.stack(columns).flatten())
    values = torch.stack(values).flatten()
    return lambda u: F.dist_spmv(u.flatten(), index, rows, values, rows_layout).unflatten(0, u.shape)


def centred(u, L):
    """Without its mean, which every rank takes from other numbers."""
    return u - F.mark_varying(F.dist_mean(u, L), L.partition)


def iterate(A, f, L, boundary, tol=1e-13):
    """(u, info) of -Δu = f by conjugate gradients, with one all-reduce and one application of A a step."""
    if boundary == "dirichlet":
        return dd.solve.cg(A, f, L, tol=tol)
    u, info = dd.solve.cg(A, centred(f, L), L, tol=tol)
    return centred(u, L), info


def matrix(boundary, shape):
    """The dense matrix of -Δ on a box of so many cells, row after row."""

    def line(n):
        A = 2 * torch.eye(n, dtype=torch.float64)
        for i in range(n):
            for j in (i - 1, i + 1):
                if boundary == "periodic":
                    A[i, j % n] -= 1
                elif 0 <= j < n:
                    A[i, j] -= 1
                else:  # a ghost: the cell itself, or what makes 0 halfway
                    A[i, i] += -1 if boundary == "neumann" else 1
        return A * n**2

    eyes = [torch.eye(n, dtype=torch.float64) for n in shape]
    return sum(reduce(torch.kron, [*eyes[:d], line(n), *eyes[d + 1 :]]) for d, n in enumerate(shape))


def solve_directly(f, boundary):
    """The same of a whole f, by elimination; where constants are in the null space, one of mean 0."""
    A, b = matrix(boundary, f.shape), f.flatten()
    if boundary != "dirichlet":
        A, b = A + 1, b - b.mean()  # 1 everywhere: constants are mapped to constants
    return torch.linalg.solve(A, b).reshape(f.shape)


def charges(shape):
    """Some points of either sign, on this process."""
    f = torch.zeros(shape, dtype=torch.float64)
    for k, place in enumerate(((0.3, 0.25, 0.4), (0.7, 0.6, 0.6), (0.2, 0.8, 0.5))):
        f[tuple(int(n * x) for n, x in zip(shape, place))] += (-1) ** k * math.prod(shape)
    return f


def on_ranks(grid, shape):
    """The potential of the charges within each boundary, whole on rank 0."""
    L = dd.Layout(dd.Partition(grid), shape)
    f = L.shard(charges(shape))
    return {boundary: F.gather(solve(f, L, boundary), L) for boundary in BOUNDARIES}
