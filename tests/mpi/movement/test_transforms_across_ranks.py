"""dd.func against serial torch.func, block by block, with uneven and with empty blocks."""

import pytest
import torch
from registry import here, needs, randn

import distdl as dd
import distdl.functional as F

SHAPES = {"uneven": lambda n: (n + 1, 3), "empty": lambda n: (max(n - 1, 1), 2)}


def setting(kind):
    n = dd.world().size
    shape = SHAPES[kind](n)
    rows, columns = (
        dd.Layout(dd.Partition((n, 1)), shape),
        dd.Layout(dd.Partition((1, n), tuple(range(n - 1, -1, -1))), shape),
    )
    X = randn(shape, 1)
    f = lambda x: F.repartition(x.sin(), rows, columns) ** 2
    return rows, columns, X, f, lambda X: X.sin() ** 2


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_jacobians(kind, chunk_size):
    rows, columns, X, f, serial = setting(kind)
    J = torch.func.jacrev(serial)(X)
    reverse = dd.func.jacrev(f, columns, chunk_size=chunk_size)(rows.shard(X))
    assert reverse.shape == (*X.shape, *rows.local_shape())
    assert torch.allclose(reverse, J[(..., *rows.slices())], rtol=1e-13, atol=1e-13)
    forward = dd.func.jacfwd(f, rows, chunk_size=chunk_size)(rows.shard(X))
    assert forward.shape == (*columns.local_shape(), *X.shape)
    assert torch.allclose(forward, J[columns.slices()], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", SHAPES)
def test_hessian_and_products(kind):
    rows, columns, X, f, serial = setting(kind)
    C, V = randn(X.shape, 2), randn(X.shape, 3)
    loss = lambda x: F.invariant_sum((columns.shard(C) * f(x) ** 2).sum(), columns.partition)
    H = torch.func.hessian(lambda X: (C * serial(X) ** 2).sum())(X)
    got = dd.func.hessian(loss, rows, chunk_size=2)(rows.shard(X))
    assert torch.allclose(got, H[rows.slices()], rtol=1e-12, atol=1e-12)
    product = dd.func.hvp(loss, rows.shard(X), rows.shard(V))
    assert torch.allclose(product, rows.shard(torch.einsum("ijkl,kl->ij", H, V)), rtol=1e-12, atol=1e-12)


def test_jacrev_where_a_rank_holds_nothing():
    n, r = dd.world().size, dd.world().rank
    L_in, L_out = dd.Layout(dd.Partition((1,)), (4,)), dd.Layout(dd.Partition((1,), (n - 1,)), (4,))
    X = randn((4,), 1)
    x = X.clone() if r == 0 else X[:0]
    J = dd.func.jacrev(lambda x: F.repartition(x**2, L_in, L_out).sin(), L_out)(x)
    assert J.shape == (4, *x.shape)
    if r == 0:
        assert torch.allclose(J, torch.func.jacrev(lambda X: (X**2).sin())(X))


def test_jacobian_without_elements():
    n = dd.world().size
    L = dd.Layout(dd.Partition((n,)), (0,))
    x = L.shard(torch.ones(0, dtype=torch.float64))
    assert dd.func.jacrev(lambda x: x * 2, L)(x).shape == (0, 0)
    assert dd.func.jacfwd(lambda x: x * 2, L)(x).shape == (0, 0)


def test_inner():
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    X, Y = randn((n, 3), 1, dtype=torch.complex128), randn((n, 3), 2, dtype=torch.complex128)
    assert torch.allclose(dd.func.inner(X[r], Y[r], P), (X.conj() * Y).sum())
    assert torch.allclose(dd.func.inner(X[0], Y[0], P, dims=()), (X[0].conj() * Y[0]).sum())  # invariant: the local one
    x = X.real[r].clone().requires_grad_()
    dd.func.inner(x, x, P).backward()  # the worked example: (2, 4), not (4, 8)
    assert torch.equal(x.grad, 2 * X.real[r])


def test_linear_transpose():
    rows, columns, X, *_ = setting("uneven")
    f = lambda x: 3 * F.repartition(x, rows, columns)
    back = dd.func.linear_transpose(f, rows.shard(X))
    assert torch.equal(back(columns.shard(X)), 3 * rows.shard(X))
    twice = dd.func.linear_transpose(back, columns.shard(X))
    assert torch.equal(twice(rows.shard(X)), 3 * columns.shard(X))


def test_check_grads():
    rows, columns, X, f, _ = setting("uneven")
    dd.testing.check_grads(f, rows.shard(X))


@needs(2)
def test_check_grads_finds_a_wrong_derivative():
    rows, columns, X, f, _ = setting("uneven")
    guilty = dd.world().rank == dd.world().size - 1  # it holds the first column
    with pytest.raises(AssertionError, match="order 1"):
        dd.testing.check_grads(lambda x: f(x) + guilty * f(x.detach()), rows.shard(X))


def test_collective_assert():
    n, r = dd.world().size, dd.world().rank
    dd.testing.collective_assert(True)
    with pytest.raises(AssertionError, match=f"failed on 1 of {n} ranks.*{n - 1}.*why"):
        dd.testing.collective_assert(r != n - 1, "why")


def test_topology():
    t = dd.Topology.discover()
    assert (t.rank, t.world_size) == (dd.world().rank, dd.world().size)
    assert t.local_size <= t.world_size and 0 <= t.node < t.num_nodes


def test_pytrees_and_wrong_layouts():
    n, P = dd.world().size, dd.Partition((dd.world().size,))
    L = dd.Layout(P, (2 * n + 1,))
    X = torch.linspace(1, 2, 2 * n + 1, dtype=torch.float64)
    x, mine = L.shard(X), L.slices()[0]

    def f(tree):
        return F.all_gather(tree["a"], L).cumprod(0)[mine] + tree["b"] ** 2

    J = dd.func.jacrev(f, L, chunk_size=2)({"a": x, "b": x})
    assert torch.allclose(J["a"], torch.func.jacrev(lambda x: x.cumprod(0))(X)[:, mine])
    assert torch.allclose(J["b"], torch.diag(2 * X)[:, mine])
    K = dd.func.jacfwd(lambda x: (f({"a": x, "b": x}), x), L, chunk_size=3)(x)
    assert torch.allclose(K[0], torch.func.jacrev(lambda x: x.cumprod(0) + x**2)(X)[mine])
    assert torch.equal(K[1], torch.eye(2 * n + 1, dtype=torch.float64)[mine])
    assert torch.allclose(dd.func.inner({"a": x, "b": (2 * x,)}, {"a": x, "b": (x,)}, P), 3 * X @ X)

    twice = dd.Layout(P, (4 * n + 2,))
    for transform in (dd.func.jacrev, dd.func.jacfwd):
        with pytest.raises(dd.errors.PartitionError, match="needs a global shape"):
            transform(torch.sin, P)(x)
        with pytest.raises(dd.errors.ShapeError, match="not this rank's block"):
            transform(torch.sin, twice)(x)
    with pytest.raises(dd.errors.ShapeError, match="got dict"):
        dd.func.jacrev(lambda x: {"y": x}, L)(x)
    with pytest.raises(dd.errors.ShapeError, match="different pytrees"):
        dd.func.inner({"a": x}, x, P)


def test_derivatives_that_are_constant():
    n, _, P = here()
    L = dd.Layout(P, (n + 1,))
    x = L.shard(torch.linspace(0, 1, n + 1)).clone()
    assert torch.equal(dd.func.hessian(lambda x: F.dist_sum(x, L), L)(x), torch.zeros(len(x), n + 1))
    assert torch.equal(dd.func.jacfwd(lambda x: torch.ones(2), L)(x), torch.zeros(2, n + 1))
