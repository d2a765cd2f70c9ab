"""Simplified compositions on ranks: the same bits in every transform, and fewer messages."""

import pytest
import torch
from registry import here, randn
from torch.func import grad, jvp, vjp, vmap

import distdl as dd

MAPS = dd.maps


def compositions(n):
    """(a composition, what it becomes), of uneven, empty and disjoint layouts."""
    shape = (2 * n + 1, n + 2)
    rows, columns = dd.Layout(dd.Partition((n, 1)), shape), dd.Layout(dd.Partition((1, n)), shape)
    bunched = dd.Layout(dd.Partition((n, 1), range(n - 1, -1, -1)), shape, ((0,) * (n - 1) + (shape[0],), None))
    turned = dd.Layout(dd.Partition((n, 1), range(n - 1, -1, -1)), shape)
    some = dd.Layout(dd.Partition(((n + 1) // 2, 1), range(n // 2, n)), shape)
    one = dd.Layout(dd.Partition((1, 1), (n - 1,)), shape)
    there, windows = MAPS.repartition(rows, columns), dd.HaloSpec(rows, (1, 0), boundary="zeros")
    yield "there and back", there.T @ there, "identity"
    yield "over an uneven one", MAPS.repartition(bunched, rows) @ MAPS.repartition(rows, bunched), "identity"
    yield "over fewer ranks", MAPS.repartition(some, rows) @ MAPS.repartition(rows, some), "identity"
    yield "round about", MAPS.repartition(turned, columns) @ MAPS.repartition(rows, turned), "repartition"
    over_one = MAPS.repartition(one, columns) @ MAPS.repartition(rows, one)  # all to all would be more messages than
    yield "over one rank", over_one, "repartition @ repartition" if n > 2 else "repartition"  # all to one, one to all
    yield "rolls", MAPS.roll(rows, 0, 2) @ MAPS.roll(rows, 0, n), "roll"
    yield "windows", MAPS.halo_exchange(windows) @ there.T, "(halo_exchange @ repartition.T)"
    yield "of windows", there @ MAPS.halo_exchange(windows).T, "(repartition @ halo_exchange.T)"


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


NAMES = [name for name, *_ in compositions(2)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_values_and_messages(name, dtype):
    n, r, _ = here()
    A = next(A for found, A, _ in compositions(n) if found == name)
    B = dd.simplify(A)
    for a, b in ((A, B), (A.T, B.T)):
        x = (9 * randn(a.in_shape, 3, r)).to(dtype)
        with dd.testing.count_messages() as before:
            expected = a(x)
        with dd.testing.count_messages() as after:
            found = b(x)
        assert same(found, expected) and after.sends <= before.sends
        if b.is_identity:
            assert found is x and not after.sends


@pytest.mark.parametrize("name", NAMES)
def test_transforms(name):
    n, r, _ = here()
    A, expected = next((A, text) for found, A, text in compositions(n) if found == name)
    B = dd.simplify(A)
    assert str(B) == expected or n == 1
    dd.testing.dot_test(B)
    x, v, c = (randn(A.in_shape, seed, r) for seed in (1, 2, 3))
    w = randn(A.out_shape, 4, r)
    loss = lambda M: lambda x: (w * M(x).sin()).sum()
    for run in (
        lambda M: M(x),
        lambda M: grad(loss(M))(x),
        lambda M: jvp(M, (x,), (v,))[1],
        lambda M: jvp(grad(loss(M)), (x,), (v,))[1],
        lambda M: grad(lambda x: (c * grad(loss(M))(x)).sum())(x),
        lambda M: vmap(M)(torch.stack([x, v])),
        lambda M: vmap(vjp(M, x)[1])(torch.stack([w, 2 * w]))[0],
    ):
        with dd.testing.count_messages() as before:
            slow = run(A)
        with dd.testing.count_messages() as after:
            fast = run(B)
        assert same(fast, slow) and after.sends <= before.sends
    y = x.clone().requires_grad_()
    loss(B)(y).backward()
    assert same(y.grad, grad(loss(A))(x))


def test_one_message_set_of_a_batch():
    n, r, _ = here()
    for name, A, _ in compositions(n):
        B = dd.simplify(A)
        x = randn((5, *A.in_shape), 1, r)
        with dd.testing.count_messages() as one:
            B(x[0])
        with dd.testing.count_messages() as five:
            y = vmap(B)(x)
        assert five.sends == one.sends and same(y, vmap(A)(x)), name


@pytest.mark.mpi(4)
def test_what_is_saved():
    """Of four ranks with a window of rows each: three messages where four or five were, and none where six were."""
    n, r, _ = here()
    counts = {}
    for name, A, _ in compositions(n):
        x = randn(A.in_shape, 1, r)
        with dd.testing.count_messages() as before:
            A(x)
        with dd.testing.count_messages() as after:
            dd.simplify(A)(x)
        counts[name] = before.sends, after.sends
    inner = r in (1, 2)
    assert counts["there and back"] == (6, 0)
    assert counts["windows"] == (3 + 1 + inner, 3)


def test_checking_knows_it():
    n, r, _ = here()
    with dd.checking():
        for _, A, _ in compositions(n):
            x = randn(A.in_shape, 1, r)
            assert same(dd.simplify(A)(x), A(x))
