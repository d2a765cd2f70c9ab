"""Faults that reviews of this library have found: each one's right value."""

import gc
import math

import pytest
import torch
from torch.func import vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError


def here():
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


def test_a_movement_that_is_started_and_dropped(request):
    """Its memory must outlive its messages."""
    if request.config.getoption("--engine") != "mpi":
        pytest.skip("another engine carries the later movements")
    n, r, P = here()
    A = dd.maps.shift(P, 0, 1, True, (400_000,))
    for i in range(3):
        F.start(A, torch.full((400_000,), float(i)))
    gc.collect()
    assert F.shift(torch.full((400_000,), r + 9.0), P, 0)[-1] == (r - 1) % n + 9
    kept = getattr(dd.world().host, "_abandoned", [])
    assert n == 1 or len(kept) <= 3
    for _ in range(3):
        F.all_sum_reduce(torch.ones(1), P)
        F.shift(torch.ones(2), P, 0)
    assert not getattr(dd.world().host, "_abandoned", [])


def test_offsets_are_integers():
    _, _, P = here()
    with pytest.raises(PartitionError, match="integer"):
        F.shift(torch.ones(2), P, 0, 1.5)


def test_what_is_no_tensor_or_partition():
    n, _, P = here()
    L = dd.Layout(P, (n,))
    for call in (lambda: F.all_sum_reduce(1.0, P), lambda: F.repartition(None, L, L), lambda: F.halo_exchange(3, dd.HaloSpec(L, 1)),
                 lambda: dd.maps.all_gather(L)(None)):
        with pytest.raises(ShapeError, match="not a tensor"):
            call()
    for call in (lambda: F.all_sum_reduce(torch.ones(1), (n,)), lambda: F.mark_varying(torch.ones(1), 3)):
        with pytest.raises(PartitionError, match="not a partition"):
            call()


def test_the_largest_of_nothing_is_nan():
    _, r, P = here()
    assert math.isnan(F.dist_max(torch.zeros(0), P)) and math.isnan(F.dist_min(torch.zeros(0), P))
    assert F.dist_max(torch.full((int(r == 0),), -math.inf), P) == -math.inf


def test_derivatives_that_are_constant():
    n, _, P = here()
    L = dd.Layout(P, (n + 1,))
    x = L.shard(torch.linspace(0, 1, n + 1)).clone()
    assert torch.equal(dd.func.hessian(lambda x: F.dist_sum(x, L), L)(x), torch.zeros(len(x), n + 1))
    assert torch.equal(dd.func.jacfwd(lambda x: torch.ones(2), L)(x), torch.zeros(2, n + 1))


@pytest.mark.mpi(2)
def test_a_batch_of_nothing():
    n, r, _ = here()
    some = dd.Partition((2,), ranks=(1, 0))
    assert vmap(lambda x: F.all_sum_reduce(x, some))(torch.ones(0, 2, 3)).shape[0] == 0
    assert vmap(lambda x: F.tie(x, x))(torch.ones(0, 3)).shape == (0, 3)
    assert vmap(lambda x: F.nothing((0, 2), x))(torch.ones(0, 3)).shape == (0, 0, 2)
    last = dd.Partition((1,), ranks=(n - 1,))
    assert vmap(lambda x: F.all_sum_reduce(x, last))(torch.ones(0, 2)).shape[0] == 0, r
