"""Derivatives on ranks that differ, as forks of this process: nobody waits in vain, no message is left, and values are
right."""

import importlib
import multiprocessing
import os

import pytest
import torch
from forked import every_rank
from registry import randn
from ties import MOVEMENTS, ROUTES, SETTINGS, expected, local, serial, the_maps
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F

worlds = importlib.import_module("distdl.world")  # dd.world is the function


def rank():
    return dd.world().rank


PARTS = {  # of rank 0 and of rank 1: what each makes of its x, and its loss of the two tensors that arrive
    "nonlinear first": ((lambda x: (x.sin(), 2 * x), lambda a, b: (a**3).sum() + b.sum()),
                        (lambda x: (x, 3 * x), lambda a, b: (a + 2 * b).sum())),
    "nonlinear second": ((lambda x: (2 * x, x.sin()), lambda a, b: a.sum() + (b**3 / 3).sum()),
                         (lambda x: (x, x.exp()), lambda a, b: (a - b).sum())),
    "nothing": ((lambda x: (x.exp(), x * x), lambda a, b: (0 * a).sum() + b[:0].sum()),
                (lambda x: (x, x), lambda a, b: (a * b * b).sum())),
}  # fmt: skip
PAIR_ROUTES = (
    "grad",
    "jvp.grad",
    "vjp.grad",
    "grad.jvp",
    "double backward",
    "third backward",
    "backward in the cotangent",
    "ggg",
    "jgg",
    "gjg",
    "gjj",
    "vmap.jvp.grad",
    "vmap(v).vjp.grad",
    "grad of jvp.grad in v",
    "grad of vjp.grad in v",
)


@pytest.mark.parametrize("parts", PARTS)
def test_two_tensors_at_once(parts):
    """A pytree goes as one set of messages in every derivative, also where one of its tensors, or one rank, is
    linear."""
    pair = PARTS[parts]
    X, Y, W = (randn((2, 3), k) / 2 for k in (1, 2, 3))
    P = dd.Partition((2,))

    def whole(X):  # shifted by one: each rank gets the other's pair
        return sum(pair[r][1](*pair[1 - r][0](X[1 - r])) for r in range(2))

    wanted = {route: ROUTES[route][1](whole, X, Y, W) for route in PAIR_ROUTES}

    def program():
        r = rank()
        f = lambda x: pair[r][1](*F.shift(pair[r][0](x), P, 0))
        return {route: ROUTES[route][1](f, X[r], Y[r], W[r]).detach() for route in PAIR_ROUTES}

    for r, found in enumerate(every_rank(2, program)):
        for route in PAIR_ROUTES:
            assert torch.allclose(found[route], expected("block", wanted[route], r), rtol=1e-11, atol=1e-11), (
                parts,
                route,
                r,
            )


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_ties(size):
    """Second derivatives under vmap: of the point and the direction, in any place of the operand, also a batch of
    one."""
    X, Y, C = randn((2, size, 3), 1), randn((2, size, 3), 2), randn((2, 3), 3)
    P = dd.Partition((2,))
    losses = (lambda y: (y**3).sum(), lambda y: 2 * y.sum())

    def routes(f, x, v, c):
        push = lambda x, v: jvp(grad(f), (x,), (v,))[1]
        pull = lambda x, v: vjp(grad(f), x)[1](v)[0]
        found = {}
        for name, h in (("jvp", push), ("vjp", pull)):
            found |= {
                f"{name} both": vmap(h)(x, v),
                f"{name} direction": vmap(lambda v, h=h: h(c, v))(v),
                f"{name} last axis": vmap(h, (1, 0), 1)(x.T.contiguous(), v).T,
                f"{name} slope": grad(lambda v, h=h: (vmap(lambda u: h(c, u))(v) * x).sum())(v),
            }
        return found

    def program():
        r = rank()
        return routes(lambda x: losses[r](F.shift(x.sin(), P, 0)), X[r], Y[r], C[r])

    x, v = X.transpose(0, 1), Y.transpose(0, 1)
    push = lambda x, v: jvp(grad(lambda X: sum(losses[r](X[1 - r].sin()) for r in range(2))), (x,), (v,))[1]
    wanted = {
        "both": vmap(push)(x, v),
        "direction": vmap(lambda v: push(C, v))(v),
        "last axis": vmap(push)(x, v),
        "slope": grad(lambda v: (vmap(lambda u: push(C, u))(v) * x).sum())(v),
    }
    for r, found in enumerate(every_rank(2, program)):
        for name, got in found.items():
            assert torch.allclose(got, wanted[name[4:]][:, r], rtol=1e-11, atol=1e-11), (name, r)


@pytest.mark.parametrize("turn", [0, 1])
def test_one_rank_alone_is_nonlinear(turn):
    """Derivatives of order two and three, on ranks whose local functions differ; each route with another movement in
    each turn."""
    X, Y, W = (randn((2, 3), k) / 2 for k in (1, 2, 3))
    chosen = {
        route: (MOVEMENTS[(i + 3 * turn) % len(MOVEMENTS)], SETTINGS[(i + turn) % 4]) for i, route in enumerate(ROUTES)
    }
    # First: the forks inherit what torch loads for it.
    wanted = {route: ROUTES[route][1](serial(*how), X, Y, W) for route, how in chosen.items()}

    def program():
        r = rank()
        return {
            route: ROUTES[route][1](local(the_maps()[name], settings[r]), X[r], Y[r], W[r]).detach()
            for route, (name, settings) in chosen.items()
        }

    both = every_rank(2, program)
    for route, (kind, _) in ROUTES.items():
        found = [one[route] for one in both]
        if kind == "sum":
            found = [sum(found)] * 2
        for r in range(2):
            assert torch.allclose(found[r], expected(kind, wanted[route], r), rtol=1e-11, atol=1e-11), (
                route,
                chosen[route],
                r,
            )


def _moves(found, alone):
    os.environ["DISTDL_ALONE"] = str(int(alone))
    try:
        ring = dd.HaloSpec(
            dd.Layout(dd.Partition((1,)), (2,)), 1, boundary="circular"
        )  # not the identity: something moves
        found.put(F.halo_exchange(torch.ones(2), ring).tolist())
    except dd.errors.TransportError as error:
        found.put(str(error))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "how", ["fork", *(pytest.param(how, marks=pytest.mark.slow) for how in ("spawn", "forkserver"))]
)
def test_a_child_of_multiprocessing_is_no_rank(how, alone, monkeypatch):
    """It might be one of several that take themselves for ranks: it says so, or is told to be alone. Without MPI."""
    monkeypatch.setattr(worlds, "_worlds", {})
    context = multiprocessing.get_context(how)
    found = context.SimpleQueue()
    child = context.Process(target=_moves, args=(found, alone))
    child.start()
    told = found.get()
    child.join()
    assert (
        told == [1.0] * 4
        if alone
        else "this process is no rank, and moves nothing" in told and "DISTDL_ALONE=1" in told
    )


@pytest.mark.parametrize("told", [
    {"RANK": "1", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_SIZE": "3"}, {"PMI_SIZE": "2"},
    {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}], ids=lambda told: next(iter(told)))  # fmt: skip
def test_a_rank_of_a_launcher_is_no_world_of_one(told, monkeypatch):
    """torchrun, or an mpiexec that is not of mpi4py's MPI: each of its processes would do all the work."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")  # sbatch sets it for every process
    worlds._compare(1)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    worlds._compare(4)
    with pytest.raises(
        dd.errors.TransportError, match=r"processes were started .* MPI's world has 1: .*python -m distdl run -n"
    ):
        worlds._compare(1)
    monkeypatch.setenv("DISTDL_ALONE", "1")
    assert type(worlds._host_transport(None, "default")).__name__ == "LocalTransport"
