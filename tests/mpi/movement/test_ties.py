"""A loss that is nonlinear on one rank only: every derivative of order two and three still makes the same calls on both
ranks.

Without the tie a rank whose cotangent is a constant drops out of the second derivative, while its peer waits.
"""

import pytest
import torch
from registry import needs, randn
from ties import MOVEMENTS, PAIR, ROUTES, SETTINGS, M, P, expected, local, serial, the_maps
from torch.func import grad, jvp, vjp

import distdl as dd
import distdl.functional as F
from distdl.testing import count_messages, gather_objects

pytestmark = needs(2)


@pytest.mark.parametrize("route", ROUTES)
def test_one_rank_alone_is_nonlinear(route):
    r = dd.world().rank
    if r not in PAIR:
        return
    kind, run = ROUTES[route]
    X, Y, W = (randn((2, M), k) / 2 for k in (1, 2, 3))
    for k, name in enumerate(MOVEMENTS):
        A = the_maps()[name]
        settings = SETTINGS[(k + list(ROUTES).index(route)) % 4]
        with count_messages() as sent:
            got = run(local(A, settings[r]), X[r], Y[r], W[r])
        agreed = gather_objects(len(sent.of("agree")), PAIR)
        assert agreed[0] == agreed[1], (name, settings)
        if kind == "sum":
            got = sum(gather_objects(got.detach(), PAIR))
        wanted = expected(kind, run(serial(name, settings), X, Y, W), r)
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-11), (name, settings)


def test_tie_and_nothing():
    """F.tie adds dependence without a value, also beside NaN and across dtypes; F.nothing is a connected
    placeholder."""
    x, nan = torch.ones(2, requires_grad=True), torch.full((2,), float("nan"), dtype=torch.float64, requires_grad=True)
    y = F.tie(x.sum(), nan, torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.complex64, requires_grad=True))
    assert y.item() == 2 and y.dtype == torch.float32
    y.backward()
    assert torch.equal(x.grad, torch.ones(2)) and torch.equal(nan.grad, torch.zeros(2, dtype=torch.float64))
    empty = F.nothing((0, 3), x, nan, dtype=torch.float64)
    assert empty.shape == (0, 3) and empty.dtype == torch.float64 and empty.requires_grad
    with pytest.raises(dd.errors.ShapeError):
        F.nothing((1,), x)


def test_unused_output_on_one_rank():
    """Case 38: right with F.tie; the peer's backward would wait otherwise."""
    r = dd.world().rank
    if r not in PAIR:
        return
    x = torch.full((2,), r + 1.0, dtype=torch.float64, requires_grad=True)
    y = F.shift(x, P, 0)
    loss = F.tie((x * x).sum(), y) if r else (y**3).sum()
    loss.backward()
    assert x.grad.tolist() == ([0.0, 0.0] if r == 0 else [2 * 2.0 + 3 * 2.0**2] * 2)


def test_receiving_stage_with_nothing():
    """A pipeline stage that only receives makes its placeholder depend on the differentiated input."""
    r = dd.world().rank
    if r not in PAIR:
        return
    src, dst = dd.Partition((1,)), dd.Partition((1,), (1,))
    L = dd.Layout(src, (3,))

    def f(w):
        y = F.repartition(w**2 if r == 0 else F.nothing((0,), w), L, dst)
        return (y * w).sum() if r else F.nothing((0,), y).sum()

    w = torch.arange(1.0, 4.0, dtype=torch.float64)
    assert torch.allclose(grad(f)(w), 2 * w * w if r == 0 else w**2)
    product = jvp(grad(f), (w,), (w,))[1]
    assert torch.allclose(product, 4 * w * w if r == 0 else 2 * w * w)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_placeholder_of_empty_tensors(count):
    """A rank that holds nothing of any operand hands a placeholder to the movement, and stays in the second derivative:
    torch.cat's gradient for an empty tensor of one dim would be a constant."""
    if dd.world().rank not in PAIR:
        return
    A = dd.maps.broadcast(dd.Partition((1,), (1,)), P, (M,))  # rank 0 holds nothing
    x = randn((M if dd.world().rank == 1 else 0,), 3)

    def loss(*xs):
        z = sum(xs) if dd.world().rank == 1 else F.nothing(A.in_shape if 0 in A.in_shape else (0,), *xs)
        return A(z).pow(3).sum()

    xs, argnums = (x,) * count, tuple(range(count))
    slope = grad(loss, argnums=argnums)
    bent = vjp(slope, *xs)[1](xs)
    pushed = jvp(slope, xs, xs)[1]
    if (
        dd.world().rank == 1
    ):  # two copies of (count x)^3: their second derivative 6 (count x) applied to count x, on two ranks
        for g in (*bent, *pushed):
            assert torch.allclose(g, 12 * count**2 * x**2, rtol=1e-12)
