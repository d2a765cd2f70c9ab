"""F.start / F.wait: the same values and derivatives as the call, with other work in between."""

import gc

import pytest
import torch
from registry import each_case, here, integers, needs, randn
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.engine import dispatch, exchange
from distdl.testing import count_messages


@pytest.fixture(params=["as on this device", "as on CUDA"])
def way(request, monkeypatch):
    """On CUDA a movement under way is an Aside; but for the streams, here as well."""
    if request.param == "as on CUDA":
        if dispatch.begin_exchange is not exchange.begin:
            pytest.skip("every movement goes to a device already")
        monkeypatch.setattr(dispatch, "begin_exchange", exchange.Aside)


@each_case(thin=True)
def test_value_and_gradient(case, way):
    X = integers(case.shape)
    x = case.smooth(X).requires_grad_()
    with count_messages() as whole:
        wanted = case.map(x)
    with count_messages() as split:
        pending = F.start(case.map, x)
        elsewhere = torch.ones(3).exp().sum()
        y = F.wait(pending)
    assert torch.equal(y, wanted) and split == whole and elsewhere > 0
    case.loss(y).backward()
    z = case.smooth(X).requires_grad_()
    case.loss(case.map(z)).backward()
    assert torch.equal(x.grad, z.grad)
    y = F.wait(F.start(case.map, x))  # and a second derivative
    (g,) = torch.autograd.grad(case.loss(y.square()), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    (g,) = torch.autograd.grad(case.loss(case.map(z).square()), z, create_graph=True)
    assert torch.equal(h, torch.autograd.grad(g.sum(), z)[0])


@each_case(
    lambda name: name in ("halo_circular", "all_sum", "repartition_disjoint", "mark_varying", "repartition_identity")
)
def test_transforms(case):
    X, V = randn(case.shape, 1), randn(case.shape, 2)
    f = lambda x: case.loss(F.wait(F.start(case.map, x.tanh())))
    g = lambda x: case.loss(case.map(x.tanh()))
    x, v = case.smooth(X), case.smooth(V)
    assert torch.equal(jvp(grad(f), (x,), (v,))[1], jvp(grad(g), (x,), (v,))[1])
    assert torch.equal(vmap(f)(torch.stack([x, v])), vmap(g)(torch.stack([x, v])))


def test_two_under_way():
    """Messages of two movements between the same ranks do not mix."""
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    A, B = dd.maps.shift(P, 0, 1, True, (2,)), dd.maps.shift(P, 0, 1, True, (3,))
    first, second = F.start(A, torch.full((2,), float(r))), F.start(B, torch.full((3,), float(r) + 10))
    assert F.wait(first).tolist() == [float((r - 1) % n)] * 2
    assert F.wait(second).tolist() == [float((r - 1) % n) + 10] * 3
    first, second = F.start(A, torch.full((2,), float(r))), F.start(A, torch.full((2,), float(r) + 10))
    assert F.wait(second).tolist() == [float((r - 1) % n) + 10] * 2  # waited for in another order
    assert F.wait(first).tolist() == [float((r - 1) % n)] * 2


def test_two_under_way_share_no_staging_memory():
    """Boxes that are not runs of memory wait in scratch memory: each movement's own, until it has finished."""
    n = dd.world().size
    P, Q = dd.Partition((n, 1)), dd.Partition((1, n))
    L, M = dd.Layout(P, (2 * n, 3 * n)), dd.Layout(Q, (2 * n, 3 * n))
    A, X, Y = dd.maps.repartition(M, L), randn(L.shape, 1), randn(L.shape, 2)
    first, second = F.start(A, M.shard(X)), F.start(A, M.shard(Y))  # columns arrive side by side: not runs of memory
    assert torch.equal(F.wait(second), L.shard(Y)), "by now both have arrived"
    assert torch.equal(F.wait(first), L.shard(X))


def test_several_maps_are_one_set_of_messages():
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    A, B = dd.maps.shift(P, 0, 1, True, (2,)), dd.maps.shift(P, 0, 1, True, (3,))
    x = torch.arange(3.0, dtype=torch.float64) + r
    for transform in (
        lambda f: f(x),
        lambda f: grad(lambda x: ((f(x) * (1 + r)) ** 3).sum())(x),
        lambda f: vmap(f)(torch.stack([x, -x])),
    ):
        with count_messages() as sent:
            found = transform(lambda x: torch.cat(F.wait(F.start((A, B), (x[:2], x)))))
        with count_messages() as apart:
            wanted = transform(lambda x: torch.cat([A(x[:2]), B(x)]))
        assert torch.equal(found, wanted) and 2 * sent.sends == apart.sends
    with pytest.raises(dd.errors.ShapeError, match="wrong shape"):
        F.start((A, B), (x[:2], x[:2]))
    pending = F.start((A, B), (x[:2], x))
    F.wait(pending)
    with pytest.raises(dd.errors.ShapeError, match="already waited"):
        F.wait(pending)


@needs(2)
def test_a_chain_is_started_too():
    n = dd.world().size
    rows, columns = dd.Layout(dd.Partition((n, 1)), (5, 4)), dd.Layout(dd.Partition((1, n)), (5, 4))
    A = dd.maps.repartition(columns, rows) @ dd.maps.repartition(rows, columns)
    X = randn((5, 4), 1)
    assert torch.equal(F.wait(F.start(A, rows.shard(X))), rows.shard(X))


def test_inference_mode_leaves_no_trace():
    """Staging memory is used again: also when it was first needed in inference mode, and the next call is not."""
    n = dd.world().size
    x = dd.Layout(dd.Partition((n, 1)), (3 * n, 4)).shard(torch.arange(12.0 * n).reshape(3 * n, 4))
    L = dd.Layout(dd.Partition((n, 1)), (3 * n, 4), ((3,) * n, None))
    columns = dd.Partition((1, n))
    with torch.inference_mode():
        first = F.repartition(x, L, columns)
    leaf = x.clone().requires_grad_()
    second = F.repartition(leaf, L, columns)
    second.sum().backward()
    dd.testing.collective_assert(
        torch.equal(first, second.detach()) and torch.equal(leaf.grad, torch.ones_like(x)), "differ"
    )


def test_a_movement_that_is_started_and_dropped(request):
    """Its memory must outlive its messages."""
    if request.config.getoption("--engine") != "mpi":
        pytest.skip("another engine carries the later movements")
    n, r, P = here()
    A = dd.maps.shift(P, 0, 1, True, (400_000,))
    for i in range(3):
        F.start(A, torch.full((400_000,), float(i)))
    gc.collect()
    assert F.shift(torch.full((400_000,), r + 9.0), P, 0)[-1] == (r - 1) % n + 9
    kept = getattr(dd.world().host, "_abandoned", [])
    assert n == 1 or len(kept) <= 3
    for _ in range(3):
        F.all_sum_reduce(torch.ones(1), P)
        F.shift(torch.ones(2), P, 0)
    assert not getattr(dd.world().host, "_abandoned", [])
