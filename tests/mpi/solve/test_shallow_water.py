"""Rotating shallow water on a staggered grid, on any blocks, against whole tensors that are rolled and padded."""

import sys
from pathlib import Path

import pytest
import torch
from serial import randn

import distdl as dd
import distdl.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import shallow_water_model as sw

N, R = dd.world().size, dd.world().rank
SHAPE = (9, 7)
ENDS = {"basin": (), "channel": 1, "torus": None}
G, ROTATION, STEP = 1.3, 0.6, 0.2


def layouts():
    """Of cells: balanced along both dims (uneven), in a grid, with empty blocks and thin ones, of some of the ranks."""
    found = {"rows": dd.Layout(dd.Partition((N, 1)), SHAPE), "columns": dd.Layout(dd.Partition((1, N)), SHAPE)}
    if N > 1:
        sizes = (0, SHAPE[1] - N + 2, *[1] * (N - 2))
        found["empty"] = dd.Layout(dd.Partition((1, N), range(N - 1, -1, -1)), SHAPE, (None, sizes))
        found["some"] = dd.Layout(dd.Partition((N - 1, 1), range(1, N)), SHAPE)
    if N == 4:
        found["grid"] = dd.Layout(dd.Partition((2, 2), (2, 0, 3, 1)), SHAPE, ((2, 7), None))
    return found


LAYOUTS = layouts()


# ---------------------------------------------------------------- in one process, by other means


def beside(x, dim, closed, grows):
    """(lower, upper) of each pair of neighbours along dim, whose means lie between cells (``grows``) or in them."""
    if closed:
        return (x.roll(1, dim), x) if grows else (x, x.roll(-1, dim))
    if grows:  # one more on either side, the same as beside the wall
        around = (1, 1, 0, 0) if dim else (0, 0, 1, 1)
        x = torch.nn.functional.pad(x[None, None], around, mode="replicate")[0, 0]
    return x.narrow(dim, 0, x.shape[dim] - 1), x.narrow(dim, 1, x.shape[dim] - 1)


def serial_change(state, closed):
    h, u, v = state

    def d(x, dim, grows):
        a, b = beside(x, dim, closed[dim], grows)
        return b - a

    def m(x, dim, grows):
        a, b = beside(x, dim, closed[dim], grows)
        return 0.5 * (a + b)

    U, V = m(h, 0, True) * u, m(h, 1, True) * v
    q = (ROTATION + d(v, 0, True) - d(u, 1, True)) / m(m(h, 0, True), 1, True)
    B = G * h + 0.5 * m(u**2, 0, False) + 0.5 * m(v**2, 1, False)
    du = m(q * m(V, 0, True), 1, False) - d(B, 0, True)
    dv = -m(q * m(U, 1, True), 0, False) - d(B, 1, True)
    if not closed[0]:
        du = torch.nn.functional.pad(du[1:-1], (0, 0, 1, 1))
    if not closed[1]:
        dv = torch.nn.functional.pad(dv[:, 1:-1], (1, 1, 0, 0))
    return -d(U, 0, False) - d(V, 1, False), du, dv


def serial_advance(state, steps, closed):
    for _ in range(steps):
        first = state
        for part in (3, 2, 1):
            rate = serial_change(state, closed)
            state = tuple(x + STEP / part * y for x, y in zip(first, rate))
    return state


def closed_of(ends):
    return (ends is None, ends in (None, 1))


def start(ends, seed=1, size=0.1):
    """Global depths and velocities: random, none through walls."""
    closed = closed_of(ends)
    h = 1 + size * randn(*SHAPE, seed=seed)
    u = size * randn(SHAPE[0] + (not closed[0]), SHAPE[1], seed=seed + 1)
    v = size * randn(SHAPE[0], SHAPE[1] + (not closed[1]), seed=seed + 2)
    if not closed[0]:
        u[0] = u[-1] = 0
    if not closed[1]:
        v[:, 0] = v[:, -1] = 0
    return h, u, v


def water_of(L, ends):
    return sw.Water(L, periodic=ends, gravity=G, coriolis=ROTATION, step=STEP)


def cut(water, state):
    return tuple(layout.shard(x).clone() for layout, x in zip(water.layouts, state))


def close(found, wished, layouts, rtol, what):
    """This rank's blocks of global tensors."""
    for f, w, layout, name in zip(found, wished, layouts, "huv"):
        off = float((f - layout.shard(w)).abs().max()) / float(w.abs().max()) if f.numel() else 0.0
        assert f.shape == layout.local_shape() and off <= rtol, f"{what} of {name}: off by {off:.1e}"


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_as_whole_tensors(name, ends):
    """Twenty steps, and mass by rounding alone."""
    L, steps = LAYOUTS[name], 20
    if not L.active:
        return
    water, state = water_of(L, ends), start(ends)
    mine = cut(water, state)
    with torch.no_grad():
        later = water.advance(mine, steps)
        before, after = water.mass(mine[0]), water.mass(later[0])
    expected = serial_advance(state, steps, closed_of(ends))
    close(later, expected, water.layouts, 1e-12, "state")
    assert (expected[0] - state[0]).abs().max() > 1e-2, "it moved"
    assert abs(float(after - before)) < 1e-13 * float(before)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_gradient_of_where_it_began(ends):
    """Of the misfit, in depths and velocities, equal to plain torch's, and forwards to backwards. Of one layout by
    autograd too."""
    state, truth = start(ends), start(ends, seed=7)[0]
    steps, closed = 3, closed_of(ends)
    expected = torch.func.grad(lambda s: ((serial_advance(s, steps, closed)[0] - truth) ** 2).sum() / 2)(state)
    along = start(ends, seed=11)
    slope = sum(float((g * a).sum()) for g, a in zip(expected, along))
    for name, L in LAYOUTS.items():
        if not L.active:
            continue
        water = water_of(L, ends)
        f = lambda s, water=water, L=L: water.misfit(s, steps, L.shard(truth))
        mine = cut(water, state)
        close(torch.func.grad(f)(mine), expected, water.layouts, 1e-11, name)
        if name == "rows":
            again = tuple(x.requires_grad_() for x in cut(water, state))
            f(again).backward()
            close([x.grad for x in again], expected, water.layouts, 1e-11, f"{name} by autograd")
        _, forwards = torch.func.jvp(f, (mine,), (cut(water, along),))
        assert abs(float(forwards) - slope) < 1e-11 * abs(slope), name


def test_gradient_by_finite_differences():
    """Central ones, along a random direction, of a basin, after two dozen steps."""
    L = LAYOUTS["columns"]
    water, truth = water_of(L, ()), start((), seed=7)[0]
    mine, along = cut(water, start(())), cut(water, start((), seed=11))
    f = lambda s: water.misfit(s, 24, L.shard(truth))
    slope = dd.func.inner(torch.func.grad(f)(mine), along, L.partition)
    with torch.no_grad():
        eps = 1e-5
        ahead, back = (f(tuple(x + e * y for x, y in zip(mine, along))) for e in (eps, -eps))
    assert abs(float((ahead - back) / (2 * eps) / slope) - 1) < 1e-6


def test_second_derivatives_and_batches():
    """Hessian-vector products, and examples of a batch with the messages of one."""
    L, ends, steps = LAYOUTS["rows"], 1, 3
    water, closed, truth = water_of(L, ends), closed_of(1), start(ends, seed=7)[0]
    state, along = start(ends), start(ends, seed=11)
    serial = lambda s: ((serial_advance(s, steps, closed)[0] - truth) ** 2).sum() / 2
    f = lambda s: water.misfit(s, steps, L.shard(truth))
    expected = torch.func.jvp(torch.func.grad(serial), (state,), (along,))[1]
    mine, direction = cut(water, state), cut(water, along)
    close(dd.func.hvp(f, mine, direction), expected, water.layouts, 1e-10, "Hessian product")
    batch = tuple(torch.stack([a, b]) for a, b in zip(mine, direction))
    with dd.testing.count_messages() as one:
        water.change(mine)
    with dd.testing.count_messages() as two:
        both = torch.func.vmap(water.change)(tuple(torch.stack([x, 2 * x]) for x in mine))
    assert one.sends == two.sends and one.sends <= 3 * (N > 1) * 2, "three exchanges with two neighbours"
    for i, factor in enumerate((1, 2)):
        part = serial_change(tuple(factor * x for x in state), closed)
        close([x[i] for x in both], part, water.layouts, 1e-12, f"example {i}")
    gradients = torch.func.vmap(torch.func.grad(f))(batch)
    for i, s in enumerate((state, along)):
        close([g[i] for g in gradients], torch.func.grad(serial)(s), water.layouts, 1e-11, f"gradient {i}")


def test_energy_is_kept_by_the_scheme():
    """Its rate of change is zero to rounding, of any state: means and differences are each other's adjoints."""
    for ends in ENDS.values():
        water = water_of(LAYOUTS["rows"], ends)
        mine = cut(water, start(ends, seed=3, size=0.3))
        mine = (mine[0].abs() + 0.1, *mine[1:])
        energy, rate = torch.func.jvp(water.energy, (mine,), (water.change(mine),))
        assert abs(float(rate)) < 1e-13 * float(energy)


def test_a_hill_and_rest():
    """Level water stays as it is, and a hill goes where the global one does."""
    L = LAYOUTS["rows"]
    water = water_of(L, ())
    level = sw.at_rest(water, torch.ones(L.local_shape(), dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(level, water.advance(level, 2)))
    hill = sw.whole_hill(SHAPE)
    later = water.advance(sw.at_rest(water, L.shard(hill)), 5)
    still = tuple(torch.zeros(layout.shape, dtype=torch.float64) for layout in water.layouts[1:])
    close(later, serial_advance((hill, *still), 5, (False, False)), water.layouts, 1e-12, "hill")
    assert float(F.dist_sum(later[0] - L.shard(hill), L).abs()) < 1e-12
