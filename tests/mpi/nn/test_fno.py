"""A Fourier neural operator on data that a distributed solver makes: as one process does it, on any grid."""

import sys
from pathlib import Path

import pytest
import torch

import distdl as dd
import distdl.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import navier_stokes as ns

N = dd.world().size
GRIDS = {1: [(1, 1, 1, 1)], 2: [(1, 1, 2, 1), (2, 1, 1, 1)], 3: [(1, 1, 3, 1)], 4: [(1, 1, 2, 2), (2, 1, 1, 2)]}.get(
    N, [(1, 1, N, 1)]
)
ALONE = dd.Partition((1, 1, 1, 1), (dd.world().rank,))


def close(found, wished, rtol):
    return bool((found - wished).abs().max() <= rtol * wished.abs().max()) if found.numel() else True


@pytest.mark.parametrize("n", [12, 15])
def test_solver(n):
    """Fields on every grid are those of one process, also where nothing divides."""
    wrong = []
    X, Y, _ = ns.data(ALONE, 2, n, 5)
    for grid in GRIDS:
        x, y, L = ns.data(dd.Partition(grid), 2, n, 5)
        wrong += [(grid, n)] if not (close(x, L.shard(X), 1e-13) and close(y, L.shard(Y), 1e-12)) else []
    dd.testing.collective_assert(not wrong, str(wrong))


def test_physics():
    """The exact decay of sin(k x) sin(k y), whose own flow does not carry it; enstrophy without viscosity and force."""
    n, L = 16, ns.layout(dd.Partition(GRIDS[0]), 1, 16)
    flow = ns.Flow(L, viscosity=0.1, step=1e-3)
    flow.force = 0 * flow.force
    x = 2 * torch.pi * torch.arange(n, dtype=torch.float64) / n
    w = (torch.sin(2 * x[:, None]) * torch.sin(2 * x[None])).expand(1, 1, n, n)
    later = flow.field(flow.advance(flow.spectrum(L.shard(w)), 100))
    exact = L.shard(w) * torch.exp(torch.tensor(-0.1 * 8 * 0.1, dtype=torch.float64))
    assert close(later, exact, 1e-7)
    flow = ns.Flow(L, viscosity=0.0, step=1e-3)
    flow.force = 0 * flow.force
    s = flow.smooth(3)
    before, after = (float(F.dist_sum(flow.field(s) ** 2, L)) for s in (s, flow.advance(s, 50)))
    assert abs(after - before) < 1e-6 * before


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_trains_as_one_process_does(grid):
    """20 steps of Adam in float64: losses and parameters."""
    wished, whole = ns.train(ALONE, 20, 4, 12)
    losses, model = ns.train(dd.Partition(grid), 20, 4, 12)
    places = dd.nn.layouts(model)
    wrong = [i for i, (a, b) in enumerate(zip(losses, wished)) if abs(a - b) > 1e-10 * b]
    for name, p in whole.named_parameters():
        mine = dict(model.named_parameters())[name].detach()
        if not close(mine, p.detach()[places[name].slices()], 1e-9):
            wrong.append(name)
    assert wished[-1] < 0.5 * wished[0], "it learns"
    dd.testing.collective_assert(not wrong, str(wrong))


def test_a_model_fits_other_sizes():
    """What was trained on 12 x 12 runs on 15 x 18, with the same weights."""
    _, model = ns.train(dd.Partition(GRIDS[0]), 1, 4, 12)
    _, whole = ns.train(ALONE, 1, 4, 12)
    X = torch.randn(4, 1, 15, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    L = dd.Layout(dd.Partition(GRIDS[0]), X.shape)
    assert close(model(L.shard(X)), L.shard(whole(X)), 1e-10)
