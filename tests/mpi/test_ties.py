"""A loss that is nonlinear on one rank only: every derivative of order two and three still makes the same calls on both ranks.

Without the tie a rank whose cotangent is a constant drops out of the second derivative, while its peer waits. Two ranks with a
vector of three each; the movement is a matrix M for the serial twin, and the function is loss(A mid(Aᵀ A pre(x))).
"""

import pytest
import torch
from registry import needs, randn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F
from distdl.testing import count_messages, gather_objects

pytestmark = needs(2)
M, PAIR = 3, (0, 1)
P = dd.Partition((2,))
HALVES = dd.Layout(P, (2 * M,))


def _maps():
    return {
        "shift": dd.maps.shift(P, 0, 1, True, (M,)),
        "all_sum": dd.maps.all_sum_reduce(P, (M,)),
        "all_gather": dd.maps.all_gather(HALVES),
        "repartition": dd.maps.repartition(HALVES, dd.Layout(P, (2 * M,), ((5, 1),))),
        "to_one_rank": dd.maps.gather(HALVES, 1),
        "halo": dd.maps.halo_exchange(dd.HaloSpec(HALVES, 2, boundary="circular")),
        "broadcast": dd.maps.broadcast(dd.Partition((1,), (1,)), P, (M,)),
    }


MOVEMENTS = ["shift", "all_sum", "all_gather", "repartition", "to_one_rank", "halo", "broadcast"]


def rows(name):
    """Per rank the rows of the movement's matrix, columns being the stacked inputs: by hand, not by the plan."""
    E, S = torch.eye(2 * M, dtype=torch.float64), torch.eye(M, dtype=torch.float64)
    return {
        "shift": (E[M:], E[:M]),
        "all_sum": (torch.cat([S, S], 1),) * 2,
        "all_gather": (E, E),
        "repartition": (E[:5], E[5:]),
        "to_one_rank": (E[:0], E),
        "halo": tuple(E[[i % (2 * M) for i in range(M * r - 2, M * r + M + 2)]] for r in PAIR),
        "broadcast": (E[M:], E[M:]),
    }[name]


FUNCTIONS = {"cube": lambda x: x**3 / 3, "sine": torch.sin, "linear": lambda x: 2 * x, "same": lambda x: x, "zero": lambda x: 0 * x}
LOSSES = {
    "nonlinear": lambda y: (y.sin() * y.exp()).sum(),
    "linear": lambda y: (y * randn(y.shape, 8)).sum(),
    "zero": lambda y: (0 * y).sum(),
    "empty": lambda y: y.reshape(-1)[:0].sum(),
    "quadratic": lambda y: (y * y).sum(),
}
# (pre, mid, loss) of rank 0 and of rank 1
SETTINGS = [
    (("cube", "sine", "nonlinear"), ("linear", "same", "linear")),
    (("linear", "same", "zero"), ("cube", "linear", "nonlinear")),
    (("same", "linear", "nonlinear"), ("same", "same", "empty")),
    (("same", "same", "empty"), ("zero", "sine", "quadratic")),
]


def J(f, t):
    return lambda x: jvp(f, (x,), (t,))[1]


def V(f, t):
    return lambda x: vjp(f, x)[1](t)[0]


def D(f, t):
    return grad(lambda x: (f(x) * t).sum())


def eager(*vectors):
    """Derivatives by autograd itself: d/dx of <d/dx <... f, v>, w>."""

    def run(f, x, *_):
        z = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(z), z, create_graph=True)
        for k, t in enumerate(vectors):
            (g,) = torch.autograd.grad((g * t(x)).sum(), z, create_graph=k + 1 < len(vectors))
        return g

    return run


def eager_adjoint_of_adjoint(f, x, v, w):
    z, u = x.clone().requires_grad_(), v.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(z), z, create_graph=True)
    (h,) = torch.autograd.grad(g, z, u, create_graph=True)
    return torch.autograd.grad((h * w).sum(), u)[0]


# route -> (what it gives, (f, x, v, w) -> result). "block": a rank's part of the serial result; "sum": ranks' results add up;
# "jacobian": local torch.func bases, whose k-th vectors are taken on both ranks at once, so that the ranks' columns add up.
ROUTES = {
    "grad": ("block", lambda f, x, v, w: grad(f)(x)),
    "jvp": ("sum", lambda f, x, v, w: J(f, v)(x)),
    "jvp.grad": ("block", lambda f, x, v, w: J(grad(f), v)(x)),
    "vjp.grad": ("block", lambda f, x, v, w: V(grad(f), v)(x)),
    "grad.jvp": ("block", lambda f, x, v, w: grad(J(f, v))(x)),
    "jvp.jvp": ("sum", lambda f, x, v, w: J(J(f, v), w)(x)),
    "hessian": ("jacobian", lambda f, x, v, w: hessian(f)(x)),
    "jacrev.jacrev": ("jacobian", lambda f, x, v, w: jacrev(jacrev(f))(x)),
    "jacrev.grad": ("jacobian", lambda f, x, v, w: jacrev(grad(f))(x)),
    "jacfwd.grad": ("jacobian", lambda f, x, v, w: jacfwd(grad(f))(x)),
    "double backward": ("block", lambda f, x, v, w: eager(lambda x: v)(f, x)),
    "third backward": ("block", lambda f, x, v, w: eager(lambda x: v, lambda x: w)(f, x)),
    "backward in the cotangent": ("block", eager_adjoint_of_adjoint),
    "autograd.functional.hvp": ("block", lambda f, x, v, w: torch.autograd.functional.hvp(f, x, v)[1]),
    "autograd.functional.vhp": ("block", lambda f, x, v, w: torch.autograd.functional.vhp(f, x, v)[1]),
    "ggg": ("block", lambda f, x, v, w: D(D(grad(f), v), w)(x)),
    "jgg": ("block", lambda f, x, v, w: J(D(grad(f), v), w)(x)),
    "gjg": ("block", lambda f, x, v, w: D(J(grad(f), v), w)(x)),
    "jjg": ("block", lambda f, x, v, w: J(J(grad(f), v), w)(x)),
    "ggj": ("block", lambda f, x, v, w: D(grad(J(f, v)), w)(x)),
    "jgj": ("block", lambda f, x, v, w: J(grad(J(f, v)), w)(x)),
    "gjj": ("block", lambda f, x, v, w: grad(J(J(f, v), w))(x)),
    "jjj": ("sum", lambda f, x, v, w: J(J(J(f, v), w), v)(x)),
    "vmap.grad": ("block", lambda f, x, v, w: vmap(grad(f))(torch.stack([x, v]))),
    "grad.vmap": ("block", lambda f, x, v, w: grad(lambda X: vmap(f)(X).sum())(torch.stack([x, v]))),
    "vmap.jvp.grad": ("block", lambda f, x, v, w: vmap(J(grad(f), v))(torch.stack([x, v]))),
    "vmap.vjp.grad": ("block", lambda f, x, v, w: vmap(V(grad(f), v))(torch.stack([x, v]))),
    "vmap(v).jvp.grad": ("block", lambda f, x, v, w: vmap(lambda t: J(grad(f), t)(x))(torch.stack([w, v]))),
    "vmap(v).vjp.grad": ("block", lambda f, x, v, w: vmap(lambda t: V(grad(f), t)(x))(torch.stack([w, v]))),
    "grad of jvp.grad in v": ("block", lambda f, x, v, w: D(lambda t: J(grad(f), t)(x), w)(v)),
    "grad of vjp.grad in v": ("block", lambda f, x, v, w: D(lambda t: V(grad(f), t)(x), w)(v)),
    "jvp of vjp.grad in v": ("block", lambda f, x, v, w: J(lambda t: V(grad(f), t)(x), w)(v)),
    "vmap.hessian": ("jacobian", lambda f, x, v, w: vmap(hessian(f))(torch.stack([x, v]))),
}


def local(A, setting):
    pre, mid, loss = FUNCTIONS[setting[0]], FUNCTIONS[setting[1]], LOSSES[setting[2]]

    def f(x):
        z = A.T(A(pre(x)))
        return loss(A(mid(z) if z.numel() else z))

    return f


def serial(name, settings):
    R = rows(name)

    def move(X):
        return [part @ X.reshape(-1) for part in R]

    def back(ys):
        return sum(part.T @ y for part, y in zip(R, ys)).reshape(2, M)

    def f(X):
        Z = back(move(torch.stack([FUNCTIONS[s[0]](X[r]) for r, s in enumerate(settings)])))
        ys = move(torch.stack([FUNCTIONS[s[1]](Z[r]) for r, s in enumerate(settings)]))
        return sum(LOSSES[s[2]](y) for s, y in zip(settings, ys))

    return f


def expected(kind, value, r):
    if kind == "sum":
        return value
    if kind == "block":
        return value.select(-2, r)
    return value.sum(-2).select(-3, r)  # (..., 2, M, 2, M): this rank's rows, the ranks' columns summed


@pytest.mark.parametrize("route", ROUTES)
def test_one_rank_alone_is_nonlinear(route):
    r = dd.world().rank
    if r not in PAIR:
        return
    kind, run = ROUTES[route]
    X, Y, W = (randn((2, M), k) / 2 for k in (1, 2, 3))
    for k, name in enumerate(MOVEMENTS):
        A = _maps()[name]
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
    """F.tie adds dependence without a value, also beside NaN and across dtypes; F.nothing is a connected placeholder."""
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
    """A rank that holds nothing of any operand hands a placeholder to the movement, and stays in the second derivative: torch.cat's
    gradient for an empty tensor of one dim would be a constant."""
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
    if dd.world().rank == 1:  # two copies of (count x)^3: their second derivative 6 (count x) applied to count x, on two ranks
        for g in (*bent, *pushed):
            assert torch.allclose(g, 12 * count**2 * x**2, rtol=1e-12)
