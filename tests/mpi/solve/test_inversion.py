"""Acoustic waves, the misfit of their records and its derivatives, with shots and space over ranks, against plain
torch."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from serial import randn

import distdl as dd
import distdl.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import acoustic as ac

N, R = dd.world().size, dd.world().rank
SHAPE, STEPS, DT = (2, 13, 11), 22, 0.4  # shots, x, z
SOURCES = torch.tensor([[3.3, 1.6], [8.75, 2.0]], dtype=torch.float64)
RECEIVERS = torch.tensor(
    [[1.5, 1.0], [4.0, 1.25], [6.6, 1.0], [9.1, 0.4], [11.9, 1.0], [12.0, 6.5], [0.2, 9.7]], dtype=torch.float64
)
DAMPING = ac.sponge(SHAPE[1:], 3, 0.15)
WAVELET = ac.ricker(STEPS, DT, 0.25)


def layouts():
    """Of pressures: space in uneven blocks, empty ones, some of the ranks, a grid, and shots beside space."""
    found = {"x": dd.Layout(dd.Partition((1, N, 1)), SHAPE)}
    if N > 1:
        sizes = (0, SHAPE[2] - N + 2, *[1] * (N - 2))
        found["empty"] = dd.Layout(dd.Partition((1, 1, N), range(N - 1, -1, -1)), SHAPE, (None, None, sizes))
        found["some"] = dd.Layout(dd.Partition((1, N - 1, 1), range(1, N)), SHAPE)
    if N % 2 == 0:
        found["shots"] = dd.Layout(dd.Partition((2, N // 2, 1)), SHAPE)
    if N == 4:
        found["grid"] = dd.Layout(dd.Partition((1, 2, 2), (2, 0, 3, 1)), SHAPE, (None, (3, 10), None))
    return {name: L for name, L in found.items() if L.active}


LAYOUTS = layouts()


# ---------------------------------------------------------------- in one process, by other means


def hats(points):
    """(points, x, z): the weights of linear interpolation, from the hat function."""
    w = [(1 - (p[:, None] - torch.arange(n)).abs()).clamp(min=0) for p, n in zip(points.unbind(1), SHAPE[1:])]
    return w[0][:, :, None] * w[1][:, None, :]


def serial_record(c):
    """(shots, receivers, steps), by a convolution with the cross of the Laplacian."""
    line = torch.tensor([-1, 16, -30, 16, -1], dtype=torch.float64) / 12
    cross = torch.zeros(5, 5, dtype=torch.float64)
    cross[2] += line
    cross[:, 2] += line
    at, ears = hats(SOURCES), hats(RECEIVERS)
    p = before = torch.zeros(SHAPE, dtype=torch.float64)
    heard = []
    for w in WAVELET:
        bent = torch.nn.functional.conv2d(p[:, None], cross[None, None], padding=2)[:, 0]
        push = c**2 * (bent + w * at)
        # (p⁺ - 2p + p⁻) / dt² + 2 s (p⁺ - p⁻) / (2 dt) = push
        after = (push + (2 * p - before) / DT**2 + DAMPING * before / DT) / (1 / DT**2 + DAMPING / DT)
        p, before = after, p
        heard.append(torch.einsum("sxz,kxz->sk", p, ears))
    return torch.stack(heard, -1)


def models():
    """(the true one, where the search begins)."""
    x, z = (torch.arange(n, dtype=torch.float64) for n in SHAPE[1:])
    first = (0.8 + 0.02 * z).expand(SHAPE[1:])
    return first + 0.15 * torch.exp(-((x[:, None] - 6) ** 2 + (z - 5) ** 2) / 6), first.clone()


TRUE, FIRST = models()
OBSERVED = serial_record(TRUE)


def serial_misfit(c):
    return ((serial_record(c) - OBSERVED) ** 2).sum() / 2


# ---------------------------------------------------------------- tests


def survey_of(L, block=8):
    """(the program, the numbers of this rank's receivers): some listen with two or more, some with none."""
    space = L.partition.take(0, L.partition.index()[0])
    place = space.ranks.index(R)
    mine = [k for k in range(len(RECEIVERS)) if (k * k) % space.size == place]
    survey = ac.Survey(L, SOURCES, RECEIVERS[mine], ac.block_of(L, DAMPING), WAVELET, DT, block)
    return survey, mine


def part(L, mine, records):
    """This rank's shots and receivers."""
    return records[L.slices()[0]][:, mine].clone()


def off(found, wished, scale):
    return float((found - wished).abs().max() / scale.abs().max()) if found.numel() else 0.0


@pytest.mark.parametrize("name", LAYOUTS)
def test_records_and_gradient(name):
    """With blocks of steps worked out again, of a length that does not divide the steps; of one layout without too."""
    L = LAYOUTS[name]
    expected, gradient = serial_record(FIRST), torch.func.grad(serial_misfit)(FIRST)
    along, c = randn(*SHAPE[1:], seed=3), ac.block_of(L, FIRST)
    slope = float((gradient * along).sum())
    for block in (8, None) if name == "x" else (8,):
        survey, mine = survey_of(L, block)
        observed = part(L, mine, OBSERVED)
        assert off(survey.record(c), part(L, mine, expected), expected) < 1e-12
        f = lambda c, survey=survey, observed=observed: survey.misfit(c, observed)
        assert off(torch.func.grad(f)(c), ac.block_of(L, gradient), gradient) < 1e-10
        again = c.clone().requires_grad_()
        f(again).backward()
        assert off(again.grad, ac.block_of(L, gradient), gradient) < 1e-10
        _, forwards = torch.func.jvp(f, (c,), (ac.block_of(L, along),))
        assert abs(float(forwards) - slope) < 1e-10 * abs(slope)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gauss_newton_products(name):
    """J' J v is that of plain torch, symmetric and positive."""
    L = LAYOUTS[name]
    survey, _ = survey_of(L)
    V, W = (randn(*SHAPE[1:], seed=s) for s in (4, 5))
    c, v, w = (ac.block_of(L, x) for x in (FIRST, V, W))
    _, forwards = torch.func.jvp(serial_record, (FIRST,), (V,))
    (expected,) = torch.func.vjp(serial_record, FIRST)[1](forwards)
    of_v, of_w = survey.gauss_newton(c, v), survey.gauss_newton(c, w)
    assert off(of_v, ac.block_of(L, expected), expected) < 1e-10
    space = L.partition.take(0, L.partition.index()[0])  # the ranks of other shots have the same blocks
    one, other, square = (float(dd.func.inner(a, b, space)) for a, b in ((of_v, w), (v, of_w), (of_v, v)))
    assert abs(one - other) < 1e-10 * abs(one) and square > 0
    assert abs(square - float((forwards**2).sum())) < 1e-10 * square


def test_gradient_by_finite_differences():
    L = LAYOUTS.get("x")
    survey, mine = survey_of(L)
    observed, c, along = part(L, mine, OBSERVED), ac.block_of(L, FIRST), ac.block_of(L, randn(*SHAPE[1:], seed=3))
    f = lambda c: survey.misfit(c, observed)
    slope = dd.func.inner(torch.func.grad(f)(c), along, L.partition)
    with torch.no_grad():
        found = (f(c + 1e-5 * along) - f(c - 1e-5 * along)) / 2e-5
    assert abs(float(found / slope) - 1) < 1e-6


def test_descent_in_as_many_numbers():
    """Steps of L-BFGS: values and gradients' norms of all of them are those of the serial program, and the misfit
    falls."""
    told = {}

    def descend(f, c, P, dims, name):
        told[name] = []
        c, _ = dd.solve.lbfgs(
            f, c, P, steps=7, dims=dims, progress=lambda k, *now: told[name].append(torch.tensor(now))
        )
        return c

    alone = dd.Partition((1, 1), (R,))
    expected = descend(serial_misfit, FIRST, alone, None, "serial")
    for name in [name for name in ("shots", "grid", "x") if name in LAYOUTS][:2]:
        L = LAYOUTS[name]
        survey, mine = survey_of(L)
        observed = part(L, mine, OBSERVED)
        f = lambda c, survey=survey, observed=observed: survey.misfit(c, observed)
        c = descend(f, ac.block_of(L, FIRST), L, (1, 2), name)
        assert off(c, ac.block_of(L, expected), expected) < 1e-8
        assert len(told[name]) == 7 and torch.allclose(
            torch.stack(told[name]), torch.stack(told["serial"]), rtol=1e-8, atol=0
        )
    values = [float(serial_misfit(FIRST)), *(float(value) for value, _ in told["serial"])]
    assert all(a > b for a, b in pairwise(values)) and values[-1] < 0.2 * values[0], values


def test_memory():
    """What is alive between forward and backward: a few blocks' ends in place of all steps. Steps that share a block
    add little."""
    L = LAYOUTS["x"]
    c = ac.block_of(L, FIRST).requires_grad_()
    held = {}
    for block in (None, 10, 5):
        survey, mine = survey_of(L, block)
        observed = part(L, mine, OBSERVED)
        loss, held[block] = ac.held(lambda survey=survey, observed=observed: survey.misfit(c, observed))
        loss.backward()
    assert held[10] < held[None] / 4 and held[5] < held[None] / 3, held


def test_messages():
    """A step is one star of four faces at most, and the values that receivers of other ranks hear."""
    L = LAYOUTS["x"]
    survey, _ = survey_of(L)
    p = torch.zeros(L.local_shape(), dtype=torch.float64)
    with dd.testing.count_messages() as star:
        survey.laplacian(p)
    assert star.sends == (R > 0) + (R < N - 1)
    with dd.testing.count_messages() as sample:
        F.dist_sample(p, L, survey.receivers, index=survey.index)
    with dd.testing.count_messages() as steps, torch.no_grad():
        survey.steps(p, p, ac.block_of(L, FIRST), WAVELET[:3])
    assert steps.sends == 3 * (star.sends + sample.sends) and not steps.of("all_reduce")


def test_share_and_models():
    """Each receiver is one rank's of a shot, and the model is laid out over those of the first shots."""
    for L in LAYOUTS.values():
        space = L.partition.take(0, L.partition.index()[0])
        mine = ac.share(RECEIVERS, L)
        counted = F.all_sum_reduce(torch.tensor(float(len(mine))), space)
        assert float(counted) == len(RECEIVERS)
        if ac.model(L).active:
            assert torch.equal(ac.model(L).shard(TRUE), ac.block_of(L, TRUE))
