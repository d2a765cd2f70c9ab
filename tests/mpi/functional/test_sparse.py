"""Products with sparse matrices, against serial torch."""

import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, layouts, randn

import distdl as dd
import distdl.functional as F


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
