"""Exact numbers of messages and bytes. What is not sent cannot be slow, and what depends on a rank's values would
hang."""

import pytest
import torch
from registry import needs
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.testing import count_messages

D = 8  # bytes of a float64


def world():
    return dd.world().size, dd.world().rank


def layouts(n, shape):
    return dd.Layout(dd.Partition((n, 1)), shape), dd.Layout(dd.Partition((1, n)), shape)


def counted(call):
    with count_messages() as sent:
        call()
    return sent


def x_of(L):
    return torch.ones(L.local_shape(), dtype=torch.float64)


def test_repartition():
    """One block to each other rank; nothing to oneself, and nothing to agree on with a Layout."""
    n, r = world()
    rows, columns = layouts(n, (2 * n, 3 * n))
    sent = counted(lambda: F.repartition(x_of(rows), rows, columns))
    assert sorted(sent) == [("send", p, 6 * D) for p in range(n) if p != r]
    again = counted(lambda: F.repartition(x_of(rows), rows.partition, columns.partition))
    assert sorted(again.of("send")) == sorted(sent) and len(again.of("agree")) == (n > 1)
    assert not counted(lambda: F.repartition(x_of(rows), rows.partition, columns.partition, shape=rows.shape)).of(
        "agree"
    )


def test_halo_1d():
    n, r = world()
    L = dd.Layout(dd.Partition((n,)), (4 * n,))
    spec = dd.HaloSpec(L, 1, 2)  # mine to the left neighbour: 2 elements as its right halo; to the right one: 1
    sent = counted(lambda: F.halo_exchange(x_of(L), spec))
    assert sorted(sent) == [("send", r - 1, 2 * D)] * (r > 0) + [("send", r + 1, D)] * (r < n - 1)
    back = counted(
        lambda: dd.maps.halo_exchange(spec).T(torch.ones(dd.maps.halo_exchange(spec).out_shape, dtype=torch.float64))
    )
    assert sorted(back) == [("send", r - 1, D)] * (r > 0) + [("send", r + 1, 2 * D)] * (r < n - 1)


@needs(4)
def test_zigzag():
    """40 rows of 20 numbers: 8 chunks of 5, of which some stay; and back, bit for bit."""
    n, r = world()
    L = dd.Layout(dd.Partition((1, 1, 4, 1), range(4)), (2, 2, 40, 5))
    x = L.shard(torch.arange(800, dtype=torch.float64).reshape(L.shape)) if r < 4 else torch.ones(0)
    sent = counted(lambda: F.zigzag(x, L, 2))
    wanted = {0: [1], 1: [2, 3], 2: [3], 3: [0, 1]}
    assert sorted(sent) == [("send", p, 800) for p in wanted.get(r, [])], sent
    Z = dd.maps.reorder(L, 2, "zigzag")
    z = Z(x)
    assert r >= 4 or torch.equal(Z.T(z), x)
    back = counted(lambda: F.zigzag(z, L, 2, inverse=True))
    assert sorted(back) == [("send", p, 800) for p, to in wanted.items() if r in to], back


@needs(4)
def test_windows_of_the_heads_that_others_have():
    """Keys of 2 heads, split along 37 places, for 4 ranks that have 2 of 8 query heads each: a head of keys, whole."""
    n, r = world()
    K = dd.Layout(dd.Partition((1, 1, 4, 1), range(4)), (2, 2, 37, 5))
    Q = dd.Layout(dd.Partition((1, 4, 1, 1), range(4)), (2, 8, 37, 5))
    spec = dd.HaloSpec.needs(K, None, Q, lambda d, a, b: {1: (a // 4, (b - 1) // 4 + 1), 2: (0, 37)}.get(d, (a, b)))
    X = torch.linspace(-1, 1, 740, dtype=torch.float64).reshape(K.shape)
    C = torch.stack([X.cos() * (i + 1) for i in range(4)])  # what each rank multiplies with
    x = K.shard(X) if r < 4 else torch.ones(0, dtype=torch.float64)
    head = slice(r // 2, r // 2 + 1)
    sent = counted(lambda: F.halo_exchange(x, spec))
    assert sorted(sent) == [("send", p, 800 if r == 0 else 720) for p in range(4) if p != r and r < 4], sent
    assert r >= 4 or (sent.sends, sent.bytes) == (3, 2400 if r == 0 else 2160)
    if r >= 4:
        return
    assert torch.equal(F.halo_exchange(x, spec), X[:, head])
    c = C[r][:, head]
    g = grad(lambda x: (F.halo_exchange(x, spec) ** 3 * c).sum())(x)
    want = grad(lambda X: sum((X[:, i // 2 : i // 2 + 1] ** 3 * C[i][:, i // 2 : i // 2 + 1]).sum() for i in range(4)))(
        X
    )
    assert torch.allclose(g, K.shard(want), rtol=1e-14, atol=0)


@needs(4)
def test_halo_2d_corners():
    """2x2: two faces and one corner, each its own peer."""
    n, r = world()
    L = dd.Layout(dd.Partition((2, 2)), (4, 6))
    sent = counted(lambda: F.halo_exchange(x_of(L) if r < 4 else torch.ones(0), dd.HaloSpec(L, 1)))
    assert sorted(sent) == sorted([("send", r ^ 1, 2 * D), ("send", r ^ 2, 3 * D), ("send", r ^ 3, D)] if r < 4 else [])


@needs(4)
def test_star_halo_2d():
    """2x2: two faces and no corner; around, both faces of a dim go as one message."""
    n, r = world()
    L = dd.Layout(dd.Partition((2, 2)), (4, 6))
    x = x_of(L) if r < 4 else torch.ones(0)
    for boundary, k in (("zeros", 1), ("circular", 2)):
        spec = dd.HaloSpec(L, 1, boundary=boundary, corners=False)
        faces = sorted([("send", r ^ 1, k * 2 * D), ("send", r ^ 2, k * 3 * D)] if r < 4 else [])
        assert sorted(counted(lambda: F.halo_exchange(x, spec))) == faces
        A = dd.maps.halo_exchange(spec)
        assert sorted(counted(lambda: A.T(torch.ones(A.out_shape, dtype=torch.float64)))) == faces


def test_collectives():
    n, r = world()
    P, root = dd.Partition((n,)), dd.Partition((1,))
    x = torch.ones(3, dtype=torch.float64)
    assert counted(lambda: F.broadcast(x, root, P, shape=(3,))).sends == (n - 1 if r == 0 else 0)
    assert counted(lambda: F.sum_reduce(x, P, root, shape=(3,))) == ([("send", 0, 3 * D)] if r else [])
    assert counted(lambda: F.shift(x, P, 0)).bytes == (3 * D if n > 1 else 0)
    assert counted(lambda: F.shift(x, P, 0, periodic=False)).sends == (r < n - 1)
    L = dd.Layout(P, (2 * n,))
    assert counted(lambda: F.all_gather(x_of(L), L)).bytes == 2 * (n - 1) * D
    assert counted(lambda: F.gather(x_of(L), L)) == ([("send", 0, 2 * D)] if r else [])
    assert counted(lambda: F.scatter(torch.ones(2 * n, dtype=torch.float64), L)).sends == (n - 1 if r == 0 else 0)
    assert counted(lambda: F.permute(x_of(L), L, [(0, n - 1)])).sends == (r == 0 and n > 1)


def test_all_sum_is_the_engines_collective():
    n, r = world()
    P, x = dd.Partition((n,)), torch.ones(3, dtype=torch.float64)
    one = [("all_reduce", tuple(range(n)), 3 * D)] if n > 1 else []
    for call in (F.all_sum_reduce, F.invariant_sum):
        assert counted(lambda: call(x, P)) == one
    assert counted(lambda: F.mark_varying(x, P)) == []
    assert counted(lambda: dd.maps.mark_varying(P, (3,)).T(x)) == one
    assert counted(lambda: dd.maps.invariant_sum(P, (3,)).T(x)) == []


def test_transposing_adds_nothing():
    """Case 3."""
    n, r = world()
    A = dd.maps.repartition(*layouts(n, (5, 7)))
    x = torch.ones(A.in_shape, dtype=torch.float64)
    B = A
    for _ in range(10):
        B = B.T.T
    assert counted(lambda: A(x)) == counted(lambda: B(x)) and B is A
    assert A.plan.messages(r) == A(x).numel() * 0 + counted(lambda: A(x)).sends
    assert counted(lambda: A(x)).bytes == A.plan.volume(r) * D


def test_derivatives_send_what_mathematics_needs():
    """grad: A and Aᵀ. Tangents: A again. A Hessian-vector product: A, Aᵀ and their tangents."""
    n, r = world()
    rows, columns = layouts(n, (n, n))
    x = x_of(rows)
    one = counted(lambda: F.repartition(x, rows, columns)).sends
    f = lambda x: F.repartition(x, rows, columns).pow(3).sum()
    assert counted(lambda: grad(f)(x)).sends == 2 * one
    assert counted(lambda: jvp(f, (x,), (x,))).sends == 2 * one
    assert counted(lambda: jvp(grad(f), (x,), (x,))).sends == 4 * one
    assert counted(lambda: f(x.clone().requires_grad_()).backward()).sends == 2 * one


@pytest.mark.parametrize("form", ["layout", "bare"])
def test_a_pytree_is_one_message_set(form):
    n, r = world()
    rows, columns = layouts(n, (2 * n, n))
    P_in, P_out = (rows, columns) if form == "layout" else (rows.partition, columns.partition)
    tree = {"a": x_of(rows), "b": [x_of(rows).float(), x_of(rows).to(torch.int32)]}
    sent = counted(lambda: F.repartition(tree, P_in, P_out))
    assert sent.sends == n - 1 and len(sent.of("agree")) == (form == "bare" and n > 1)
    P = rows.partition
    sums = counted(lambda: F.all_sum_reduce({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1).double()}, P))
    assert [m[2] for m in sums] == ([20, 8] if n > 1 else [])  # one for each dtype
    f = lambda t: sum((v.double() ** 2).sum() for v in F.repartition(t, P_in, P_out).values())
    assert counted(lambda: grad(f)({"a": x_of(rows), "b": x_of(rows)})).sends == 2 * (n - 1)


def test_a_batch_is_one_message_set():
    n, r = world()
    rows, columns = layouts(n, (n, n))
    X = torch.ones(8, *rows.local_shape(), dtype=torch.float64)
    sent = counted(lambda: vmap(lambda x: F.repartition(x, rows, columns))(X))
    assert sorted(sent.of("send")) == [("send", p, 8 * D) for p in range(n) if p != r]
    both = counted(lambda: vmap(vmap(lambda x: F.repartition(x, rows, columns)))(X.reshape(2, 4, *X.shape[1:])))
    assert both.bytes == sent.bytes and both.sends == sent.sends


def test_empty_blocks_send_nothing():
    n, r = world()
    rows, columns = layouts(n, (1, 1))
    assert counted(lambda: F.repartition(x_of(rows), rows, columns)).sends == 0
    spec = dd.HaloSpec(rows, 1, boundary="replicate")
    assert counted(lambda: F.halo_exchange(x_of(rows), spec)).sends == 0


def test_counting_nests():
    n, r = world()
    P = dd.Partition((n,))
    with count_messages() as outer:
        F.shift(torch.ones(1), P, 0)
        inner = counted(lambda: F.shift(torch.ones(1), P, 0))
    assert len(outer) == 2 * len(inner) and counted(lambda: None) == []
