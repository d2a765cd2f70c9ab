"""Products with sparse matrices, a solver and a graph network made of index maps, against serial torch."""

import numpy as np
import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, layouts, randn

import distdl as dd
import distdl.functional as F
from distdl.programs import data


def lay(n, ranks=None):
    k = dd.world().size if ranks is None else len(ranks)
    return dd.Layout(dd.Partition((k,), ranks), (n,))


def entries(A, L):
    """(local rows, columns, values) of the entries of A's rows on this rank, row by row, and those again in another
    order: entries of one place add up."""
    if not L.active:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), A.new_zeros(0)
    rows, columns = A[L.slices()[0]].nonzero().unbind(1)
    values = A[L.slices()[0]][rows, columns] / 2
    back = torch.arange(len(rows)).flip(0)
    return tuple(torch.cat([t, t[back]]) for t in (rows, columns, values))


@pytest.mark.parametrize("tail", [(), (3,)])
def test_spmv(tail):
    """Square and not, with empty rows and ranks without rows."""
    for name, L in layouts((11,)).items():
        for L_out in (L, L.with_shape((6,)), L.with_shape((2,))):
            A = randn(L_out.shape[0], 11, seed=1) * (randn(L_out.shape[0], 11, seed=2) > 0.3)
            A[1] = 0
            rows, columns, values = entries(A, L_out)
            index = dd.Index(L, columns)
            place = lambda X, L=L: X[L.slices()[0]] if L.active else X[:0]
            out = lambda Y, L=L_out: Y[L.slices()[0]] if L.active else Y[:0]
            check_layer(
                lambda x: F.dist_spmv(x, index, rows, values, L_out),
                lambda X: A @ X,
                [randn(11, *tail, seed=3)],
                [place],
                out,
                active=L.active,
                name=f"{name}, {tuple(A.shape)}",
            )


def test_the_gradient_of_the_values():
    """It sends nothing more, and is x at the column times the cotangent at the row."""
    L = lay(9)
    A = randn(9, 9, seed=1) * (randn(9, 9, seed=2) > 0)
    rows, columns, values = entries(A, L)
    index, X = dd.Index(L, columns), randn(9, 2, seed=3)
    C, x = randn(9, 2, seed=4)[L.slices()[0]], X[L.slices()[0]].clone()
    g = torch.func.grad(lambda v: (C * F.dist_spmv(x, index, rows, v, L)).sum())(values)
    assert torch.allclose(g, (X[columns] * C[rows]).sum(1), rtol=1e-13, atol=1e-13)


def test_the_same_messages_as_the_gather():
    L = lay(9)
    rows, columns, values = entries(torch.ones(9, 9, dtype=torch.float64), L)
    index, x = dd.Index(L, columns), randn(9, seed=1)[L.slices()[0]].clone()
    with dd.testing.count_messages() as sent:
        F.dist_spmv(x, index, rows, values, L)
    with dd.testing.count_messages() as gathered:
        F.gather_rows(x, index)
    assert sent == gathered and not sent.of("agree")


def test_halves():
    """Rows of 300 ones: bfloat16 counts to 256."""
    L = lay(2 * dd.world().size)
    n = L.local_shape()[0]
    rows = torch.arange(n).repeat(300)
    index = dd.Index(L, torch.zeros(len(rows), dtype=torch.int64))
    ones = torch.ones(n, dtype=torch.bfloat16)
    y = F.dist_spmv(ones, index, rows, torch.ones(len(rows), dtype=torch.bfloat16), L)
    assert y.dtype == torch.bfloat16 and torch.equal(y, torch.full((n,), 300.0).bfloat16())


def test_wrong_entries():
    L = lay(2 * dd.world().size)
    index, x, zeros = dd.Index(L, torch.tensor([0, 1])), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    for rows, values, words in (
        (zeros, torch.ones(3), ("one local row and one value", "(2,)", "(3,)")),
        (zeros.float(), torch.ones(2), ("int64", "torch.float32")),
        (zeros + 2, torch.ones(2), ("outside of this rank's block", "0 <= row < 2", "got 2")),
        (zeros - 1, torch.ones(2), ("outside of this rank's block", "got -1")),
    ):
        raises_everywhere(dd.errors.ShapeError, lambda: F.dist_spmv(x, index, rows, values, L), "dist_spmv", *words)
    raises_everywhere(dd.errors.PartitionError, lambda: F.dist_spmv(x, L, zeros, x, L), "dist_spmv", "dd.Index")


# ---------------------------------------------------------------- a Poisson problem


def conjugate_gradients(apply, b, dot, steps):
    x, r = torch.zeros_like(b), b
    p, rr = r, dot(b, b)
    for _ in range(steps):
        q = apply(p)
        alpha = rr / dot(p, q)
        x, r = x + alpha * p, r - alpha * q
        rr, old = dot(r, r), rr
        p = r + rr / old * p
    return x


def test_conjugate_gradients_on_a_poisson_matrix():
    """The matrix by rows of a grid, and the grid by halos, take the same 30 steps."""
    n, (h, w) = dd.world().size, (13, 9)
    L, grid = lay(h * w), dd.Layout(dd.Partition((n, 1)), (h, w))
    first, last = L.box()[0]
    cells = torch.arange(first, last)
    rows, columns, values = [cells - first], [cells], [torch.full((len(cells),), 4.0, dtype=torch.float64)]
    for inside, step in (
        (cells % w > 0, -1),
        (cells % w < w - 1, 1),
        (cells >= w, -w),
        (cells < w * (h - 1), w),
    ):
        rows, columns = [*rows, cells[inside] - first], [*columns, cells[inside] + step]
        values.append(torch.full((int(inside.sum()),), -1.0, dtype=torch.float64))
    rows, columns, values = map(torch.cat, (rows, columns, values))
    index, spec = dd.Index(L, columns), dd.HaloSpec(grid, 1, boundary="zeros")

    def stencil(u):
        if not u.numel():
            return u
        p = F.halo_exchange(u, spec)
        return 4 * u - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]

    B = randn(h, w, seed=1)
    by_rows = conjugate_gradients(
        lambda u: F.dist_spmv(u, index, rows, values, L), B.reshape(-1)[L.slices()[0]].clone(),
        lambda a, b: F.dist_sum(a * b, L.partition), 30,
    )  # fmt: skip
    by_halos = conjugate_gradients(stencil, grid.shard(B).clone(), lambda a, b: F.dist_sum(a * b, grid.partition), 30)
    whole = F.all_gather(by_rows, L)
    assert torch.allclose(grid.shard(whole.reshape(h, w)), by_halos, rtol=1e-12, atol=1e-12)
    residual = stencil(by_halos) - grid.shard(B)
    assert float(F.dist_sum(residual**2, grid.partition)) < 1e-6 * float((B**2).sum())


# ---------------------------------------------------------------- a graph network


def digits():
    """1,797 digits of 8 x 8 and their labels, from scikit-learn's wheel; the package is not imported."""
    table = torch.from_numpy(np.loadtxt(data.installed("sklearn", "datasets", "data", "digits.csv.gz"), delimiter=","))
    return table[:, :64] / 16, table[:, 64].long()


def network(weights, x, mean):
    """Two layers of mean aggregation (GraphSAGE's)."""
    w1, v1, w2, v2 = weights
    h = (x @ w1 + mean(x) @ v1).tanh()
    return h @ w2 + mean(h) @ v2


def test_a_graph_network_trains_as_the_serial_one():
    """8 nearest neighbours of each of 1,797 digits: 20 steps over the ranks, and in one place."""
    X, labels = digits()
    nodes, k, rate = len(X), 8, 0.5
    assert nodes == 1797
    neighbours = torch.cdist(X, X).fill_diagonal_(torch.inf).topk(k, largest=False).indices
    first = [randn(64, 16, seed=1) / 8, randn(64, 16, seed=2) / 8, randn(16, 10, seed=3) / 4, randn(16, 10, seed=4) / 4]
    L = lay(nodes)
    P, mine = L.partition, L.slices()[0]
    index = dd.Index(L, neighbours[mine].reshape(-1))
    x, y = X[mine].clone(), labels[mine]
    rows = torch.arange(len(x)).repeat_interleave(k)
    share = torch.full((len(rows),), 1 / k, dtype=torch.float64)

    def dist(weights):
        scores = network(F.mark_varying(weights, P), x, lambda h: F.dist_spmv(h, index, rows, share, L))
        return F.invariant_sum(torch.nn.functional.cross_entropy(scores, y, reduction="sum"), P) / nodes

    def serial(weights):
        scores = network(weights, X, lambda h: h[neighbours].mean(1))
        return torch.nn.functional.cross_entropy(scores, labels)

    trained = []
    for loss in (dist, serial):
        weights, losses = list(first), []
        for _ in range(20):
            grads, value = torch.func.grad_and_value(loss)(weights)
            weights = [w - rate * g for w, g in zip(weights, grads)]
            losses.append(float(value))
        trained.append((weights, torch.tensor(losses, dtype=torch.float64)))
    (weights, losses), (expected, curve) = trained
    assert torch.allclose(losses, curve, rtol=1e-10, atol=0) and curve[-1] < 0.7 * curve[0]
    for w, e in zip(weights, expected):
        assert torch.allclose(w, e, rtol=1e-10, atol=1e-10)
