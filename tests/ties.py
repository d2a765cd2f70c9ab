"""Functions of two ranks of which one alone is nonlinear, the ways to differentiate them, and their serial twins.

Two ranks with a vector of three each; the movement is a matrix M for the serial twin, and the function is loss(A mid(Aᵀ
A pre(x))).
"""

from __future__ import annotations

import torch
from registry import randn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import distdl as dd

M, PAIR = 3, (0, 1)
P = dd.Partition((2,))
HALVES = dd.Layout(P, (2 * M,))


def the_maps():
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


FUNCTIONS = {
    "cube": lambda x: x**3 / 3,
    "sine": torch.sin,
    "linear": lambda x: 2 * x,
    "same": lambda x: x,
    "zero": lambda x: 0 * x,
}
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


# route -> (what it gives, (f, x, v, w) -> result). "block": a rank's part of the serial result; "sum": ranks' results
# add up; "jacobian": local torch.func bases, whose k-th vectors are taken on both ranks at once, so that the ranks'
# columns add up.
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
