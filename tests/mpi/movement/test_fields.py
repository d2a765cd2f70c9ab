"""Several fields in one halo exchange, each with a spec of its own: the values of separate exchanges, in one set of
messages, through every transform."""

import pytest
import torch
from registry import raises_everywhere, randn
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError

N, R = dd.world().size, dd.world().rank


def specs(kind):
    """(u, v, p): faces, cells whose sides differ, and a star, windows of other blocks, or a wide halo."""
    if kind == "subset":  # without rank 0, backwards
        P = dd.Partition((max(N - 1, 1), 1), range(N - 1, 0 if N > 1 else -1, -1))
    else:
        P = dd.Partition((N, 1) if kind != "columns" else (1, N))
    shape = (N - 1 or 1, 3) if kind == "empty" else (2 * N + 3, N + 2)
    splits = ((N + 3, *(0,) * (N - 2), N), None) if kind == "splits" and N > 1 else None
    L = dd.Layout(P, shape, splits)
    cells, faces = dd.Staggered(L), dd.Staggered(L, 0)
    ring = dd.Layout(dd.Partition(P.shape[::-1], P.ranks[::-1]), shape)
    third = {
        "columns": dd.HaloSpec(L, 1, boundary="circular", corners=False),
        "splits": dd.HaloSpec.needs(L, None, ring, lambda d, a, b: (a - 1, b + 1)),
    }.get(kind, dd.HaloSpec(L, (1, 2), (2, 0), boundary="replicate"))
    return faces.to(cells), cells.to(faces, ("replicate", "zeros")), third


KINDS = ["rows", "columns", "splits", "empty", "subset"]


def fields(some, dtypes=(torch.float64,) * 3):
    globals_ = [randn(s.in_layout.shape, 5, i, dtype=torch.float64) for i, s in enumerate(some)]
    return tuple(s.in_layout.shard(X).to(t).clone() if s.in_layout.active else torch.ones(2, 1, dtype=t)
                 for s, X, t in zip(some, globals_, dtypes))  # fmt: skip


def apart(xs, some):
    return tuple(F.halo_exchange(x, s) for x, s in zip(xs, some))


def equal(found, wanted):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_messages(kind):
    """One message to each rank that any of the fields goes to, also of several dtypes."""
    some = specs(kind)
    xs = fields(some, (torch.float64, torch.float32, torch.int64))
    with dd.testing.count_messages() as alone:
        wanted = apart(xs, some)
    with dd.testing.count_messages() as together:
        found = F.halo_exchange(xs, some)
    assert isinstance(found, tuple) and equal(found, wanted)
    assert sorted(p for _, p, _ in together) == sorted({p for _, p, _ in alone})
    if N > 1 and kind == "rows":
        assert together.sends and alone.sends > together.sends
    with dd.checking():
        assert equal(F.halo_exchange(xs, some), wanted)
    named = F.halo_exchange({"v": xs[1], "u": [xs[0], xs[0]]}, {"u": some[0], "v": some[1]})
    assert equal((*named["u"], named["v"]), (wanted[0], wanted[0], wanted[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind):
    """Those of separate exchanges to the last bit: of first and second order, in both modes."""
    some, together = specs(kind), F.halo_exchange
    xs = fields(some)
    vs = tuple(torch.full_like(x, R + 0.5).sin() * x for x in xs)

    def loss(exchange):
        return lambda *xs: sum((randn(y.shape, 7, R, i) * y**3).sum() for i, y in enumerate(exchange(xs, some)))

    every = (0, 1, 2)
    found, wanted = (grad(loss(f), every)(*xs) for f in (together, apart))
    assert all(torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in zip(found, wanted))
    found, wanted = (jvp(grad(loss(f), every), xs, vs)[1] for f in (together, apart))
    assert all(torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in zip(found, wanted))
    found, wanted = (jvp(lambda *xs, f=f: f(xs, some), xs, vs)[1] for f in (together, apart))
    assert equal(found, wanted)
    with dd.testing.count_messages() as sent:
        F.halo_exchange(xs, some)
    ys, pull = vjp(lambda *xs: F.halo_exchange(xs, some), *xs)
    with dd.testing.count_messages() as back:
        pull(ys)
    there = [p for peers in dd.testing.gather_objects([p for _, p, _ in sent]) for p in peers]
    assert sum(dd.testing.gather_objects(back.sends)) == len(there), "one message back for each one there"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_one_set_of_messages(kind):
    some = specs(kind)
    xs = fields(some)
    batch = tuple(torch.stack([x, 2 * x, x.cos()]) for x in xs)
    with dd.testing.count_messages() as one:
        F.halo_exchange(xs, some)
    with dd.testing.count_messages() as sent:
        found = vmap(lambda *xs: F.halo_exchange(xs, some))(*batch)
    assert sorted(p for _, p, _ in sent.of("send")) == sorted(p for _, p, _ in one)
    for k in range(3):
        assert equal([y[k] for y in found], F.halo_exchange(tuple(x[k] for x in batch), some))
    mixed = vmap(lambda v: F.halo_exchange((xs[0], v, xs[2]), some)[1])(batch[1])  # one field has a batch alone
    assert torch.equal(mixed, found[1])


def test_integers_beside_a_star():
    """Integers have no derivative, and the star that stood first among the fields may be one."""
    L = dd.Layout(dd.Partition((1, N)), (3, 2 * N))
    star, full = (dd.HaloSpec(L, 1, boundary="circular", corners=c) for c in (False, True))
    x, i = L.shard(randn(L.shape, 1)).clone(), L.shard(torch.arange(6 * N).reshape(3, 2 * N)).clone()
    pull = lambda f: grad(lambda x: ((f(x) * (R + 2)) ** 2).sum())(x)
    assert torch.equal(
        pull(lambda x: F.halo_exchange((i, x), (star, full))[1]), pull(lambda x: F.halo_exchange(x, full))
    )
    assert torch.equal(
        pull(lambda x: F.halo_exchange((i, x), (full, star))[1]), pull(lambda x: F.halo_exchange(x, star))
    )


def test_errors():
    L = dd.Layout(dd.Partition((N,)), (2 * N,))
    spec, x = dd.HaloSpec(L, 1), torch.ones(2)
    other = dd.HaloSpec(dd.Layout(dd.Partition((1,), (N - 1,)), (2,)), 1)
    refused = lambda call, *words: raises_everywhere(PartitionError, call, "halo_exchange", *words)
    refused(
        lambda: F.halo_exchange((x, x), (spec,)), "not a HaloSpec for each field", "next step: F.halo_exchange((u, p)"
    )
    refused(lambda: F.halo_exchange(x, (spec,)), "not a HaloSpec for each field")
    refused(lambda: F.halo_exchange((x, x), [spec, spec]), "containers of HaloSpecs like those of x")
    refused(lambda: F.halo_exchange((x, x), (spec, "zeros")), "not a HaloSpec", "got zeros")
    if N > 1:
        refused(lambda: F.halo_exchange((x, x), (spec, other)), "the fields lie on different ranks", "same ranks")
    raises_everywhere(
        dd.errors.ShapeError, lambda: F.halo_exchange((x, torch.ones(3)), (spec, spec)), "halo_exchange", "(2,)", "(3,)"
    )
