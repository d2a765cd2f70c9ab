"""Grids of up to 20 ranks: in `make test-all` only."""

import pytest
import torch
from registry import needs, randn
from torch.func import grad

import distdl as dd
import distdl.functional as F

pytestmark = pytest.mark.slow


@needs(12)
def test_case_21_three_by_four_to_four_by_two():
    X = torch.arange(77.0 * 55).reshape(77, 55)  # case 19: 77x55 on 3x4
    P, Q = dd.Partition((3, 4)), dd.Partition((4, 2), (11, 0, 5, 3, 7, 1, 9, 2))
    y = F.repartition(P.shard(X), P, Q)
    assert y.numel() == 0 if not Q.active else torch.equal(y, Q.shard(X))
    back = F.repartition(y, Q, P)
    assert back.numel() == 0 if not P.active else torch.equal(back, P.shard(X))


@needs(16)
def test_case_22_broadcast_to_sixteen():
    """Ranks 4-11 as [1,2,2,2] -> 0-15 as [2,2,2,2], and back by its adjoint."""
    r = dd.world().rank
    src, dst = dd.Partition((1, 2, 2, 2), range(4, 12)), dd.Partition((2, 2, 2, 2), range(16))
    x = torch.full((2,), float(r), dtype=torch.float64, requires_grad=True)
    y = F.broadcast(x, src, dst)
    assert r > 15 or y.tolist() == [4.0 + r % 8] * 2
    ((r + 1) * y).sum().backward()
    assert x.grad.tolist() == [2.0 * (r - 4) + 2 + 8 if 4 <= r < 12 else 0.0] * 2


@needs(20)
def test_halo_over_twenty_ranks():
    """A halo wider than several blocks, against the serial gradient."""
    P = dd.Partition((20,), range(19, -1, -1))
    L = dd.Layout(P, (33,))
    spec = dd.HaloSpec(L, 4, 7, boundary="circular")
    X, r = randn((33,), 1), dd.world().rank
    windows = [[i % 33 for i in range(a - 4, b + 7)] for a, b in L.blocks(0)]
    x = L.shard(X)
    assert torch.equal(F.halo_exchange(x, spec), X[windows[19 - r]])

    def serial(X):
        return sum(((k + 1) * X[w].sin()).sum() for k, w in enumerate(windows))

    got = grad(lambda x: ((20 - r) * F.halo_exchange(x, spec).sin()).sum())(x)
    assert torch.allclose(got, L.shard(grad(serial)(X)), rtol=1e-12, atol=1e-12)
