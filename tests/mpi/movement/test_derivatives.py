"""First and second derivatives, in every mode and spelling, against torch.func on the serial twin (float64).

Losses have coefficients that differ by rank: all-ones cotangents hide wrong adjoints.
"""

import torch
from registry import each_case, here, randn
from torch.func import grad, jvp, vjp

import distdl as dd
import distdl.functional as F

TOLERANCE = dict(rtol=1e-12, atol=1e-12)


def composed(case, call):
    """The local function: nonlinear before and after the movement."""
    return lambda x: case.loss(call(x.tanh()))


def serial(case):
    return lambda X: case.serial(X.tanh())


def spellings(case):
    return {"map": case.map, **case.calls}.items()


def hessian_product(case):
    X, V = randn(case.shape, 1), randn(case.shape, 2)
    return X, V, jvp(grad(serial(case)), (X,), (V,))[1]


@each_case()
def test_grad(case):
    X = randn(case.shape, 1)
    wanted = case.back(grad(serial(case))(X))
    for spelling, call in spellings(case):
        got = grad(composed(case, call))(case.smooth(X))
        assert torch.allclose(got, wanted, **TOLERANCE), f"grad, {spelling}"
        x = case.smooth(X).requires_grad_()
        composed(case, call)(x).backward()
        assert torch.allclose(x.grad, wanted, **TOLERANCE), f"backward, {spelling}"


@each_case()
def test_jvp(case):
    X, V = randn(case.shape, 1), randn(case.shape, 2)
    for spelling, call in spellings(case):
        y, t = jvp(lambda x: call(x.tanh()), (case.smooth(X),), (case.smooth(V),))
        if case.get(X, case.rank) is None:
            assert t.numel() == 0
        else:
            wanted = jvp(lambda X: case.wanted(X.tanh()), (X,), (V,))
            assert torch.allclose(y, wanted[0], **TOLERANCE) and torch.allclose(t, wanted[1], **TOLERANCE), spelling


@each_case(thin=True)
def test_second_order(case):
    """Hessian times vector by every pair of modes, and by autograd's double backward (case 11)."""
    X, V, product = hessian_product(case)
    wanted = case.back(product)
    call = next(iter(case.calls.values()))
    f, x, v = composed(case, call), case.smooth(X), case.smooth(V)

    def double_backward():
        z = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(z), z, create_graph=True)
        return torch.autograd.grad((g * v).sum(), z)[0]

    routes = {
        "forward over reverse": lambda: jvp(grad(f), (x,), (v,))[1],
        "reverse over reverse": lambda: vjp(grad(f), x)[1](v)[0],
        "reverse over forward": lambda: grad(lambda x: jvp(f, (x,), (v,))[1])(x),
        "double backward": double_backward,
    }
    for route, run in routes.items():
        assert torch.allclose(run(), wanted, **TOLERANCE), route


@each_case(
    lambda name: name in ("halo_reflect", "repartition_overlapping", "invariant_sum", "all_gather_line", "mark_varying")
)
def test_nested_jvp(case):
    """pytorch#197867: rules made of ordinary torch operations go wrong here, silently."""
    X, V, W = (randn(case.shape, k) for k in (1, 2, 3))

    def third(call, x, v, w):
        first = lambda x: jvp(call, (x,), (v,))[1]
        second = lambda x: jvp(first, (x,), (w,))[1]
        return jvp(second, (x,), (v,))[1]

    got = third(lambda x: case.map(x**3) ** 3, *(case.smooth(T) for T in (X, V, W)))
    if case.get(X, case.rank) is not None:
        wanted = third(lambda X: case.wanted(X**3) ** 3, X, V, W)
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-9)


@each_case(lambda name: not name.startswith(("invariant", "mark")), thin=True)
def test_complex_grad(case):
    """torch's convention for complex numbers: the adjoint is conjugate-linear where it should be."""
    X, C = randn(case.shape, 1, dtype=torch.complex128), randn(case.shape, 2, dtype=torch.complex128)

    def loss(y, r):
        c = randn(y.shape, 9, r, dtype=torch.complex128)
        return (c * y * y).sum().real

    def total(X):
        return sum(loss(case.get(X, r), r) for r in range(case.n) if case.get(X, r) is not None) + 0 * X.sum().real

    x = case.smooth(X).requires_grad_()
    loss(case.map(x * x.conj() + x), case.rank).backward()
    Z = X.clone().requires_grad_()
    total(Z * Z.conj() + Z).backward()
    assert torch.allclose(x.grad, case.back(Z.grad), **TOLERANCE)
    real = case.smooth(C.real).requires_grad_()  # case 10: a real input keeps a real gradient
    loss(case.map(real + 1j), case.rank).backward()
    assert real.grad.dtype == torch.float64


def test_case_7_two_outputs_through_one_movement():
    n, r, P = here()

    def f(x):
        a, b = F.shift((x.sin(), x.cos()), P, 0)
        return (a + 2 * b).sum()

    x = randn((3,), r)
    assert torch.allclose(grad(f)(x), x.cos() - 2 * x.sin())


def test_case_12_data_parallel_model():
    """jvp, grad and a Hessian-vector product of a data-parallel least-squares model equal the serial ones."""
    n, r, P = here()
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
    n, r, P = here()
    L = dd.Layout(P, (n + 2,))
    W, X = randn((n + 2,), 1), randn((n, 5, n + 2), 2)
    got = grad(lambda w: F.invariant_sum((X[r] @ F.all_gather(w, L)).exp().sum(), P))(L.shard(W))
    assert torch.allclose(got, L.shard(grad(lambda w: (X @ w).exp().sum())(W)), rtol=1e-12, atol=1e-12)
