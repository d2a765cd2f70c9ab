"""Every one-dimensional convolution and pooling configuration, all ranks in one process.

The library's own layers run for each rank in turn, with the halo exchange replaced by the same plan's simulation, and
their gradients go back through the simulated transpose. No MPI.
"""

import itertools

import pytest
import torch
import torch.nn.functional as tf

import distdl as dd
import distdl.functional as F
from distdl import errors
from distdl.functional import conv, pool

CONVOLUTIONS = [(p, n, k, s, d, pad) for p, n, k, s, d in itertools.product(
    (2, 3, 4), range(1, 21), (1, 2, 3, 4, 5, 7), (1, 2, 3), (1, 2)) for pad in sorted({0, 1, (k - 1) // 2, 3})
    if n + 2 * pad >= d * (k - 1) + 1]  # fmt: skip


class Found(Exception):
    """Raised with the halo spec that a layer asks for."""


@pytest.fixture
def as_rank(monkeypatch):
    """Run a layer as any rank: ``as_rank(r, windows)`` makes this process rank r, whose halo exchange yields
    windows[r]."""
    before = errors.rank_of["source"]
    windows = {}

    def exchange(x, spec):
        if not windows:
            raise Found(spec)
        return windows[errors.rank_of["source"]("default")]

    monkeypatch.setattr(conv, "halo_exchange", exchange)
    monkeypatch.setattr(pool, "halo_exchange", exchange)

    def become(rank, given=None):
        errors.set_rank_source(lambda name: rank)
        windows.clear()
        windows.update(given or {})

    yield become
    errors.set_rank_source(before)


def compare(as_rank, layer, serial, L, x, *params):
    """Value, input gradient and parameter gradients of ``layer`` over L, summed over the ranks, against ``serial``."""
    ranks = L.partition.ranks
    shards = [L.shard(x, r) for r in ranks]
    as_rank(ranks[0])
    with pytest.raises(Found) as found:
        layer(shards[0], *params)
    plan = found.value.args[0].plan()
    windows = [w.requires_grad_() for w in plan.simulate(shards)]
    given = dict(zip(ranks, windows))
    leaves = [p.clone().requires_grad_() for p in params]
    whole, whole_leaves = x.clone().requires_grad_(), [p.clone().requires_grad_() for p in params]
    expected = serial(whole, *whole_leaves)
    cotangent = torch.randn(expected.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    expected.backward(cotangent)
    out = L.with_shape(expected.shape)
    found = torch.zeros_like(expected)
    for r in ranks:
        as_rank(r, given)
        y = layer(L.shard(x, r), *leaves)
        found[out.slices(r)] = y.detach()
        y.backward(out.shard(cotangent, r))
    gradient = torch.zeros_like(x)
    for r, g in zip(ranks, plan.T.simulate([w.grad for w in windows])):
        gradient[L.slices(r)] = g
    pairs = [(found, expected), (gradient, whole.grad), *((a.grad, b.grad) for a, b in zip(leaves, whole_leaves))]
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-10 * max(1, float(b.detach().abs().max()))) for a, b in pairs)


def run(as_rank, cases):
    wrong = []
    for p, n, k, s, d, pad in cases:
        generator = torch.Generator().manual_seed(n * 100 + k)
        x, w = (torch.randn(size, dtype=torch.float64, generator=generator) for size in ((1, 2, n), (2, 2, k)))
        L = dd.Layout(dd.Partition((1, 1, p)), x.shape)
        if not compare(
            as_rank,
            lambda x, w: F.dist_conv(x, w, L, stride=s, dilation=d, padding=pad),
            lambda x, w: tf.conv1d(x, w, None, s, pad, d),
            L,
            x,
            w,
        ):
            wrong.append(("conv", p, n, k, s, d, pad))
        if (
            2 * pad <= k
            and d == 1
            and not compare(
                as_rank, lambda x: F.dist_avg_pool(x, L, k, s, pad), lambda x: tf.avg_pool1d(x, k, s, pad), L, x
            )
        ):
            wrong.append(("avg_pool", p, n, k, s, d, pad))
        # Where a dilated window sees padding only, serial torch's index lies outside its channel; there is nothing to
        # equal.
        seen = all(
            any(0 <= o * s - pad + d * j < n for j in range(k)) for o in range((n + 2 * pad - d * (k - 1) - 1) // s + 1)
        )
        if (
            2 * pad <= k
            and seen
            and not compare(
                as_rank, lambda x: F.dist_max_pool(x, L, k, s, pad, d), lambda x: tf.max_pool1d(x, k, s, pad, d), L, x
            )
        ):
            wrong.append(("max_pool", p, n, k, s, d, pad))
    return wrong


def test_some_configurations(as_rank):
    assert not run(as_rank, CONVOLUTIONS[::97])


@pytest.mark.slow
def test_all_configurations(as_rank):
    assert len(CONVOLUTIONS) > 6000
    wrong = run(as_rank, CONVOLUTIONS)
    assert not wrong, (len(wrong), wrong[:20])
