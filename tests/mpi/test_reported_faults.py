"""Faults that users of such libraries have met (numbered as in the list of cases), where the registry does not cover
them."""

import pytest
import torch
from registry import needs, randn
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F


def world():
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


def test_case_1_all_sum_against_invariant_sum():
    n, r, P = world()
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    F.all_sum_reduce(x, P).sum().backward()
    assert x.grad.tolist() == [n] * 3
    x.grad = None
    F.invariant_sum(x, P).sum().backward()
    assert x.grad.tolist() == [1] * 3


def test_worked_example_of_the_convention():
    """x = (1, 2), L = invariant_sum(x²) = 5: gradient (2, 4), not (4, 8)."""
    n, r, P = world()
    x = torch.tensor(r + 1.0, dtype=torch.float64, requires_grad=True)
    loss = F.invariant_sum(x**2, P)
    loss.backward()
    assert loss.item() == sum((k + 1) ** 2 for k in range(n)) and x.grad.item() == 2 * (r + 1)


def test_case_2_rank_dependent_losses():
    n, r, P = world()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((r + 1) * F.all_gather(x, P).sum()).backward()
    assert x.grad.tolist() == [n * (n + 1) / 2] * 2


@needs(3)
def test_case_4_broadcast_over_a_group_without_rank_0():
    n, r, P = world()
    root, group = dd.Partition((1,), (1,)), dd.Partition((n - 1,), range(1, n))
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((r + 1) * F.broadcast(x, root, group)).sum().backward()
    assert x.grad.tolist() == [sum(range(2, n + 1)) if r == 1 else 0] * 2


def test_case_7_two_outputs_through_one_movement():
    n, r, P = world()

    def f(x):
        a, b = F.shift((x.sin(), x.cos()), P, 0)
        return (a + 2 * b).sum()

    x = randn((3,), r)
    assert torch.allclose(grad(f)(x), x.cos() - 2 * x.sin())


@needs(2)
def test_case_8_messages_of_other_lengths_both_ways():
    n, r, P = world()
    size = {0: 3, 1: 5}.get(r, 2)
    x = torch.full((size,), r + 1.0, dtype=torch.float64)
    y, pull = vjp(lambda x: F.permute(x, P, [(0, 1), (1, 0)]), x)
    assert y.tolist() == ([2.0] * 5 if r == 0 else [1.0] * 3 if r == 1 else [0.0] * 2)
    assert pull(y)[0].tolist() == (x.tolist() if r < 2 else [0.0] * 2)


def test_case_9_halo_adjoint_adds():
    n, r, P = world()
    L = dd.Layout(P, (2 * n,))
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    F.halo_exchange(x, dd.HaloSpec(L, 1)).sum().backward()
    assert x.grad.tolist() == [1 + (r > 0), 1 + (r < n - 1)]


def test_case_12_data_parallel_model():
    """jvp, grad and a Hessian-vector product of a data-parallel least-squares model equal the serial ones."""
    n, r, P = world()
    W, V, X, Y = randn((3,), 1), randn((3,), 2), randn((n, 4, 3), 3), randn((n, 4), 4)

    def loss(w):
        return F.invariant_sum(((X[r] @ F.mark_varying(w, P)).tanh() - Y[r]).pow(2).sum(), P)

    def serial(w):
        return ((X @ w).tanh() - Y).pow(2).sum()

    close = dict(rtol=1e-12, atol=1e-12)
    assert torch.allclose(grad(loss)(W), grad(serial)(W), **close)
    assert torch.allclose(jvp(loss, (W,), (V,))[1], jvp(serial, (W,), (V,))[1], **close)
    assert torch.allclose(jvp(grad(loss), (W,), (V,))[1], jvp(grad(serial), (W,), (V,))[1], **close)


def test_fully_sharded_model():
    """ZeRO-3: w = all_gather of shards, uneven or empty; the adjoint reduce-scatters."""
    n, r, P = world()
    L = dd.Layout(P, (n + 2,))
    W, X = randn((n + 2,), 1), randn((n, 5, n + 2), 2)
    got = grad(lambda w: F.invariant_sum((X[r] @ F.all_gather(w, L)).exp().sum(), P))(L.shard(W))
    assert torch.allclose(got, L.shard(grad(lambda w: (X @ w).exp().sum())(W)), rtol=1e-12, atol=1e-12)


def test_case_14_a_column_gathered():
    n, r, P = world()
    t = torch.tensor([[0, 0], [1, 1]])
    assert F.all_gather(t[:, 0], P).tolist() == [0, 1] * n


@needs(4)
def test_case_18_widths_by_splits():
    n, r, _ = world()
    P = dd.Partition((1, 4))
    X = torch.arange(28.0).reshape(2, 14)
    L = dd.Layout(P, (2, 14), (None, (2, 3, 4, 5)))
    gathered = F.gather(L.shard(X), L)
    assert torch.equal(gathered, X) if r == 0 else gathered.numel() == 0
    for layout, value in ((L, X), (dd.Layout(P, (5, 10)), torch.arange(50.0).reshape(5, 10))):
        gathered = F.all_gather(layout.shard(value), P)
        assert r > 3 or torch.equal(gathered, value)


@needs(6)
def test_case_21_one_to_six_and_five_to_three():
    n, r, _ = world()
    X = torch.arange(2.0 * 5 * 7).reshape(2, 5, 7)
    one, six = dd.Partition((1, 1, 1)), dd.Partition((1, 2, 3))
    y = F.repartition(X if r == 0 else torch.empty(0), one, six)
    assert r > 5 or torch.equal(y, six.shard(X))
    back = F.repartition(y, six, one)
    assert r > 0 or torch.equal(back, X)
    five, three = dd.Partition((5,)), dd.Partition((3,), (5, 0, 3))
    y = F.repartition(five.shard(X[0, 0]), five, three)
    assert y.numel() == 0 if three.index() is None else torch.equal(y, three.shard(X[0, 0]))


@needs(8)
def test_case_22_broadcast_to_eight():
    n, r, _ = world()
    src, dst = dd.Partition((1, 2, 2), (2, 3, 4, 5)), dd.Partition((2, 2, 2), range(8))
    y = F.broadcast(torch.full((r,), float(r)), src, dst)  # shapes differ between the roots
    if r < 8:
        root = 2 + r % 4
        assert y.tolist() == [float(root)] * root


@needs(2)
def test_case_39_groups_in_an_order_that_differs_by_rank():
    """Collectives of overlapping groups: every rank calls its own groups in one global order, whatever their order of
    creation."""
    n, r, P = world()
    for _ in range(3):
        total = 0.0
        for start in range(n):
            group = dd.Partition((2,), sorted({start, (start + 1) % n})) if n > 2 or start == 0 else None
            if group is not None and group.active:
                total += F.all_sum_reduce(torch.tensor([float(r + 1)]), group).item()
        assert total == (2 * (r + 1) + ((r + 1) % n + 1) + ((r - 1) % n + 1) if n > 2 else 3)
    even = r % 2 == 0 and r + 1 < n
    pairs = [dd.Partition((2,), (k, k + 1)) for k in range(0, n - 1, 2)]
    mine = [p for p in pairs if p.active]
    for p in mine:
        back = F.permute(torch.tensor([float(r)]), p, [p.ranks, p.ranks[::-1]])
        assert back.item() == (r + 1 if even else r - 1)


@needs(3)
def test_case_39_box_plans_of_overlapping_groups():
    """Point-to-point movements of groups that share ranks, in the ring order that would deadlock a blocking library."""
    n, r, P = world()
    groups = [dd.Partition((2,), (k, (k + 1) % n)) for k in range(n)]
    x = torch.tensor([float(r)])
    for g in groups:
        y = F.shift(x, g, 0)
        if g.active:
            assert y.item() == next(k for k in g.ranks if k != r)


@needs(2)
@pytest.mark.parametrize("swap", [False, True])
def test_movements_between_two_ranks_keep_their_order(swap):
    """Many small movements back to back, waiting ranks far behind: sequence numbers keep messages apart."""
    n, r, _ = world()
    P = dd.Partition((2,), (1, 0) if swap else None)
    if r > 1:
        return
    for k in range(50):
        assert F.shift(torch.full((k % 4 + 1,), float(100 * k + r)), P, 0).tolist() == [float(100 * k + 1 - r)] * (
            k % 4 + 1
        )


@needs(2)
def test_vmap_of_a_permutation_of_uneven_tensors():
    n, r, P = world()
    x = torch.full((2, r + 1), float(r))
    y = vmap(lambda t: F.permute(t, P, [(0, n - 1), (n - 1, 0)]))(x)
    assert y.tolist() == ([[float(n - 1)] * n] * 2 if r == 0 else [[0.0]] * 2 if r == n - 1 else [[0.0] * (r + 1)] * 2)


def test_user_maps_have_every_transform():
    n, r, P = world()
    A = dd.linear_map(
        lambda x: F.all_sum_reduce(2 * x, P), lambda y: 2 * F.all_sum_reduce(y, P), (3,), (3,), ranks=P.ranks
    )
    dd.testing.check_map(A)
    dd.testing.check_map(A.T)
    X = randn((n, 3), 1)
    C = randn((n, 3), 2)
    f = lambda x: (C[r] * A(x).sin()).sum()
    serial = lambda X: (C * (2 * X.sum(0)).sin()).sum()
    assert torch.allclose(grad(f)(X[r]), grad(serial)(X)[r])
    assert torch.allclose(jvp(grad(f), (X[r],), (C[r],))[1], jvp(grad(serial), (X,), (C,))[1][r])
    assert torch.allclose(vmap(A)(torch.stack([X[r], C[r]])), torch.stack([2 * X.sum(0), 2 * C.sum(0)]))


def test_maps_are_cached_and_pickle():
    import pickle

    n, r, P = world()
    L = dd.Layout(P, (5,))
    A = dd.maps.repartition(L, dd.Partition((n,), range(n - 1, -1, -1)))
    assert dd.maps.repartition(dd.Layout(dd.Partition((n,)), (5,)), dd.Partition((n,), range(n - 1, -1, -1))) is A
    B = pickle.loads(pickle.dumps(A))
    assert B == A and torch.equal(B(L.shard(torch.arange(5.0))), A(L.shard(torch.arange(5.0))))
    assert len(set(dd.testing.gather_objects(A.plan.digest))) == 1
