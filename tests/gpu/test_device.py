"""CUDA tensors: every result equals the CPU's, and stays on its device. Skipped where there is none."""

import math

import pytest
import torch
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F

pytestmark = pytest.mark.gpu


def device():
    """This rank's device; with more ranks than devices, start with DISTDL_CUDA=staged."""
    return torch.device("cuda", dd.world().rank % torch.cuda.device_count())


def movements():
    """(function, this rank's input)."""
    n = dd.world().size
    line, rows, columns = dd.Partition((n,)), dd.Partition((n, 1)), dd.Partition((1, n))
    L = dd.Layout(rows, (2 * n + 1, 5))
    x = L.shard(torch.linspace(-1, 1, (2 * n + 1) * 5, dtype=torch.float64).reshape(2 * n + 1, 5)).clone()
    spec, v = dd.HaloSpec(L, (1, 2), boundary="reflect"), torch.arange(3.0, dtype=torch.float64) + dd.world().rank
    return {
        "repartition": (lambda t: F.repartition(t, L, columns), x),
        "bare": (lambda t: F.repartition(t, rows, columns), x),
        "halo": (lambda t: F.halo_exchange(t, spec), x),
        "all_sum": (lambda t: F.all_sum_reduce(t, line), v),
        "gather": (lambda t: F.all_gather(t, L), x),
        "invariant": (lambda t: F.invariant_sum(t.square().sum(), line), v),
    }


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_large_rows_one_element_off(dtype):
    """What stays is copied row by row, forwards and back, whichever engine moves the rest."""
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n)), (80, 150, 350 * n + 1))
    A = dd.maps.halo_exchange(dd.HaloSpec(L, (0, 0, 1), boundary="circular"))
    x = L.shard((torch.arange(math.prod(L.shape)) % 251).reshape(L.shape)).to(dtype)
    y = A(x)
    for name, found, wanted in (("value", A(x.to(device())), y), ("adjoint", A.T(y.to(device())), A.T(y))):
        dd.testing.collective_assert(torch.equal(found.cpu(), wanted), f"{name}: differs from the CPU")


@pytest.mark.parametrize("name", ["repartition", "bare", "halo", "all_sum", "gather", "invariant"])
def test_equals_the_cpu(name):
    call, x = movements()[name]
    loss = lambda t: (call(t) ** 3).sum()
    for transform in (
        call,
        grad(loss),
        lambda t: jvp(grad(loss), (t,), (t,))[1],
        lambda t: vmap(call)(torch.stack([t, 2 * t])),
    ):
        found, expected = transform(x.to(device())), transform(x)
        dd.testing.collective_assert(
            found.device == device() and torch.allclose(found.cpu(), expected), f"{name}: differs"
        )
    leaf = x.to(device()).requires_grad_()
    loss(leaf).backward()
    dd.testing.collective_assert(torch.allclose(leaf.grad.cpu(), grad(loss)(x)), f"{name}: backward differs")


def test_layers():
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n)), (2, 3, 4 * n))
    x = L.shard(torch.linspace(-1, 1, 24 * n, dtype=torch.float64).reshape(2, 3, 4 * n))
    w = torch.ones(2, 3, 3, dtype=torch.float64)
    on = lambda d: F.dist_batch_norm(
        F.dist_conv(x.to(d), w.to(d), L, padding=1), L.with_shape((2, 2, 4 * n)), None, None, training=True
    )[0]
    dd.testing.collective_assert(torch.allclose(on(device()).cpu(), on("cpu")), "another result")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_norms(dtype):
    """Statistics within ranks (torch's kernel) and across them; values and gradients."""
    n = dd.world().size
    x = torch.linspace(-1, 1, 96 * n, dtype=torch.float64).cos().reshape(2 * n, 4, 12).to(dtype)
    w, b = (
        torch.linspace(1, 2, 4, dtype=torch.float64).to(dtype),
        torch.linspace(-1, 0, 4, dtype=torch.float64).to(dtype),
    )
    for grid in ((n, 1, 1), (1, 1, n)):
        L = dd.Layout(dd.Partition(grid), x.shape)
        calls = {
            "layer": lambda x, w, b: F.dist_layer_norm(x, L, 12),
            "group": lambda x, w, b: F.dist_group_norm(x, L, 2, w, b),
            "instance": lambda x, w, b: F.dist_instance_norm(x, L, None, b),
        }
        for name, call in calls.items():
            loss = lambda x, w, b: call(x, w, b).sin().sum()
            on = lambda d: (
                t.cpu()
                for t in (
                    call(*(t.to(d) for t in (L.shard(x), w, b))),
                    *grad(loss, (0, 1, 2))(*(t.to(d) for t in (L.shard(x), w, b))),
                )
            )
            same = all(
                torch.allclose(
                    a, c, rtol=2e-2 if dtype.itemsize < 4 else 1e-10, atol=1e-1 if dtype.itemsize < 4 else 1e-10
                )
                for a, c in zip(on(device()), on("cpu"))
            )
            dd.testing.collective_assert(same, f"{name} over {grid}: another result")


def test_ties_between_devices():
    here = torch.ones(3, device=device(), requires_grad=True)
    away = torch.ones(2, requires_grad=True)
    F.tie(here.sum(), away).backward()
    F.tie(2 * away.sum(), here).backward()
    assert here.grad.tolist() == [1, 1, 1] and away.grad.tolist() == [2, 2]


def test_case_37_device_kinds_differ():
    n = dd.world().size
    if n < 2:
        pytest.skip("needs 2 ranks")
    x = torch.ones(1, 2, device=device() if dd.world().rank else "cpu")
    with pytest.raises(dd.errors.AgreementError, match="device"):
        F.repartition(x, dd.Partition((n, 1)), dd.Partition((1, n)))


def by(world):
    """A halo, a sum and their derivatives among the ranks of a world, for this rank's tensor there."""
    line = dd.Partition((dd.world(world).size,), world=world)
    spec = dd.HaloSpec(dd.Layout(line, (3 * line.size + 1,)), 1, boundary="circular")

    def results(x):
        loss = lambda t: F.invariant_sum((F.halo_exchange(t, spec) ** 3).sum(), line)
        return [F.halo_exchange(x, spec), loss(x), grad(loss)(x), jvp(grad(loss), (x,), (x,))[1]]

    return results, spec.in_layout.shard(torch.linspace(-1, 1, 3 * line.size + 1, dtype=torch.float64)).clone()


def same(found, wanted):
    return all(torch.allclose(a.cpu(), b) for a, b in zip(found, wanted))


def test_two_devices_in_one_process():
    """A world for each; a tensor on a device of the other world is an error."""
    n = dd.world().size
    if torch.cuda.device_count() < 2 * n:
        pytest.skip(f"needs {2 * n} devices")
    comm = None if n == 1 else pytest.importorskip("mpi4py.MPI").COMM_WORLD
    dd.World(comm, "second")
    other = torch.device("cuda", n + dd.world().rank)
    (first, x), (second, _) = by("default"), by("second")
    wanted = first(x)
    found, there = first(x.to(device())), second(x.to(other))
    dd.testing.collective_assert(same(found, wanted) and same(there, wanted), "another result")
    dd.testing.collective_assert(all(t.device == other for t in there), "on another device")
    if n > 1:
        with pytest.raises(dd.errors.TransportError, match="one device"):
            second(x.to(device()))


def test_cuda_aware_mpi():
    """An MPI that cannot read device memory is refused, one that can is right."""
    n = dd.world().size
    if n < 2:
        pytest.skip("needs 2 ranks")
    if not hasattr(dd.world().host, "comm"):
        pytest.skip("MPI carries no messages in this run")
    from mpi4py import MPI

    from distdl.engine.mpi import _reads_devices

    dd.World(MPI.COMM_WORLD, "aware", cuda="mpi")
    results, x = by("aware")
    if _reads_devices():
        dd.testing.collective_assert(same(results(x.to(device())), results(x)), "another result")
    else:
        with pytest.raises(dd.errors.TransportError, match="cannot read CUDA memory"):
            results(x.to(device()))


@pytest.mark.parametrize("order", [None, "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_attention(order, dtype):
    """Whose kernels leave out what no query sees: values and gradients against one device's own."""
    n, size = dd.world().size, 64 * dd.world().size + 32
    L = dd.Layout(dd.Partition((1, 1, n, 1)), (1, 8, size, 64))
    M, rows = L.with_shape((1, 2, size, 64)), torch.arange(size)
    whole = [
        torch.randn(at.shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, at in enumerate((L, M, M))
    ]
    G = torch.randn(L.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    places = F.positions(L, 2, order)
    given = [t[:, :, places].to(device()).requires_grad_() for t in whole]
    turned, N = (L, M) if order is None else (F.reorder_layout(at, 2, order) for at in (L, M))
    y = F.dist_attention(*given, turned, causal=True, order=order, kv_shape=N, method="gather", kernel="fused")
    y.backward(G[:, :, places].to(device()))
    exact = [t.double().requires_grad_() for t in whole]
    wide = [exact[0], *(t.repeat_interleave(4, 1) for t in exact[1:])]
    scores = (wide[0] @ wide[1].mT / 8).masked_fill(rows[:, None] < rows, -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    expected.backward(G.double())
    bound = 2e-5 if dtype == torch.float32 else 0.04
    for found, wished in ((y, expected), *((a.grad, b.grad) for a, b in zip(given, exact))):
        error = (found.detach().cpu().double() - wished.detach()[:, :, places]).abs().max()
        near = bool(error <= bound * max(float(wished.detach().abs().max()), 1))
        dd.testing.collective_assert(near, f"off by {error}")
