"""Ranks that do not do the same: one without data, one that uses no output, one whose branch is frozen. ``F.tie``,
``F.nothing`` and ``dd.remat`` keep them together in reverse and forward mode and in the second order, with and without
checking."""

import contextlib

import pytest
import torch
from registry import needs, randn
from ties import ROUTES, expected
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import distdl as dd
import distdl.functional as F

pytestmark = needs(2)
N, R = dd.world().size, dd.world().rank
P = dd.Partition((N,))
LATE = dd.Layout(P, (3 * (N - 1),), ((0,) + (3,) * (N - 1),))  # rank 0 holds nothing
CONSTANT = randn((3,), 99)


def agree(got, wanted, what):
    dd.testing.collective_assert(
        torch.allclose(got, wanted, rtol=1e-10, atol=1e-12), f"{what}: {got}, expected {wanted}"
    )


def frozen(X, r):
    return CONSTANT if r == 0 else X[r].exp()


def tie_unused(p):
    y = F.shift(p.sin(), P, 0)
    return F.tie((p * p).sum(), y) if R == 0 else (y**3).sum()


def tie_no_data(p):
    y = F.all_gather(p.sin() if R else F.tie(torch.zeros(0, dtype=p.dtype), p), LATE)
    return (R * y**3).sum() if R else F.tie(torch.zeros((), dtype=p.dtype), y)


def tie_frozen(p):
    y = F.shift(p.exp() if R else F.tie(CONSTANT, p), P, 0)
    return (y * y * p).sum()


def nothing_unused(p):
    y = F.shift(p.sin(), P, 0)
    return (y**3).sum() if R else (p * p).sum() + F.nothing((0,), y).sum()


def nothing_no_data(p):
    y = F.broadcast(F.nothing((0,), p) if R else p.exp(), dd.Partition((1,)), P, shape=(3,))
    return ((R + 1) * y**3).sum()


def nothing_frozen(p):
    y = F.all_gather(p.exp() if R else F.nothing((0,), p), LATE)
    return ((R + 1) * y.sin()).sum()


PROGRAMS = {  # with the sum of all ranks' losses
    tie_unused: lambda X: (X[0] ** 2).sum() + (X[:-1].sin() ** 3).sum(),
    tie_no_data: lambda X: sum(range(N)) * (X[1:].sin() ** 3).sum(),
    tie_frozen: lambda X: sum((frozen(X, (r - 1) % N) ** 2 * X[r]).sum() for r in range(N)),
    nothing_unused: lambda X: (X[0] ** 2).sum() + (X[:-1].sin() ** 3).sum(),
    nothing_no_data: lambda X: sum(range(N + 1)) * (X[0].exp() ** 3).sum(),
    nothing_frozen: lambda X: sum(range(N + 1)) * X[1:].exp().sin().sum(),
}


def backward(f, x, *_):
    z = x.clone().requires_grad_()
    f(z).backward()
    return z.grad


def dual(f, x, v):
    """Forward mode by hand, in the same run as a graph for backward."""
    z = x.clone().requires_grad_()
    with forward_ad.dual_level():
        y, t = forward_ad.unpack_dual(f(forward_ad.make_dual(z, v)))
        y.backward()
    return t.detach(), z.grad


def checkpoints_have_tangents() -> bool:
    """Whether this torch's checkpoint has forward mode (2.6 has not)."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(1, requires_grad=True), torch.ones(1))
        try:
            checkpoint(torch.sin, x, use_reentrant=False)
        except NotImplementedError:
            return False
    return True


EAGER = {
    "backward": backward,
    "double backward": ROUTES["double backward"][1],
    "third backward": ROUTES["third backward"][1],
    "autograd.functional.hvp": ROUTES["autograd.functional.hvp"][1],
}
FUNCTIONAL = ("grad", "jvp", "jvp.grad", "vjp.grad", "grad.jvp", "jvp.jvp", "vmap.jvp.grad", "grad of jvp.grad in v")


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_ranks_that_differ(program, checked):
    """Every derivative, of the program and of its checkpointed form, against that of the sum of all ranks' losses."""
    X, Y, W = (randn((N, 3), k) / 2 for k in (1, 2, 3))
    whole = PROGRAMS[program]
    with dd.checking() if checked else contextlib.nullcontext():
        for f in (program, dd.remat(program)):
            for route, run in EAGER.items():
                agree(run(f, X[R], Y[R], W[R]), run(whole, X, Y, W)[R], route)
            if f is program or checkpoints_have_tangents():
                tangent, slope = dual(f, X[R], Y[R])
                agree(slope, backward(whole, X)[R], "backward of dual numbers")
                agree(sum(dd.testing.gather_objects(tangent)), (backward(whole, X) * Y).sum(), "tangents")
            for route in FUNCTIONAL:
                kind, run = ROUTES[route]
                got, wanted = run(f, X[R], Y[R], W[R]), expected(kind, run(whole, X, Y, W), R)
                if kind == "sum":
                    got = sum(dd.testing.gather_objects(got.detach()))
                agree(got, wanted, route)
