"""Neighbourhood attention against full attention with NATTEN's rule as a mask, and rotary embeddings."""

import pytest
import torch
from serial import check_layer, randn
from sweep import attend_near

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError

N = dd.world().size


def over(shape, *split):
    grid = [1] * len(shape)
    for d, n in split:
        grid[d] = n
    return dd.Layout(dd.Partition(tuple(grid)), shape)


@pytest.mark.parametrize("k, d, causal", [(3, 1, False), (4, 1, False), (2, 3, False), (3, 2, True), (9, 1, False)])
def test_one_dim(k, d, causal):
    """Odd and even windows, wider than a block, dilated, causal; uneven blocks."""
    L = over((2, 2, 9, 3), (2, N))
    check_layer(
        lambda *x: F.dist_neighborhood_attention(*x, L, k, d, causal),
        lambda *x: attend_near(*x, (k,), (d,), (causal,)),
        [randn(*L.shape, seed=i) for i in range(3)],
        [L] * 3,
        L,
        rtol=1e-12,
    )


@pytest.mark.parametrize("split", [2, 3])
def test_two_dims(split):
    """Each dim with its own window; ranks without rows."""
    L = over((1, 2, 3, 5, 2), (split, N))
    check_layer(
        lambda *x: F.dist_neighborhood_attention(*x, L, (3, 2), (1, 2), (False, True)),
        lambda *x: attend_near(*x, (3, 2), (1, 2), (False, True)),
        [randn(*L.shape, seed=i) for i in range(3)],
        [L] * 3,
        L,
        rtol=1e-12,
        orders=1,
    )


def test_wrong():
    L = over((1, 2, 9, 3), (2, N))
    x = [L.shard(randn(*L.shape))] * 3
    with pytest.raises(PartitionError, match="does not fit"):
        F.dist_neighborhood_attention(*x, L, 4, 3)
    with pytest.raises(PartitionError, match="not a neighbourhood"):
        F.dist_neighborhood_attention(*x, L, 0)
    with pytest.raises(ShapeError, match="one position for each row"):
        F.rotary_embedding(x[0], torch.arange(3))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_depends_on_distances(interleaved):
    """Products of turned rows are those of rows that stand as far apart."""
    x, y = randn(6, 4, seed=1), randn(6, 4, seed=2)
    turned = lambda z, by: F.rotary_embedding(z, torch.arange(6) + by, interleaved=interleaved)
    torch.testing.assert_close(turned(x, 0) @ turned(y, 0).T, turned(x, 100) @ turned(y, 100).T, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(turned(x, 0), turned(x, 1))
