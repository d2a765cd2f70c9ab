"""Whole programs by their partition, to price and to measure: each takes a grid of ranks and returns a step, with this
rank's blocks already in its hands. The global sizes do not depend on the ranks, unless they are said to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import distdl as dd
import distdl.functional as F

Step = Callable[[], object]


def _block(L: dd.Layout, wanted: bool = False) -> torch.Tensor:
    return torch.ones(L.local_shape(), requires_grad=wanted)


def _weight(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.01, requires_grad=True)


def halo(P: dd.Partition, shape: Sequence[int] = (1024, 1024), width: int = 1) -> Step:
    """One halo exchange around a torus."""
    L = dd.Layout(P, tuple(shape))
    spec, x = dd.HaloSpec(L, width, boundary="circular"), _block(L)
    return lambda: F.halo_exchange(x, spec)


def repartition(P: dd.Partition, shape: Sequence[int] = (1024, 1024)) -> Step:
    """Blocks of P to columns of as many ranks."""
    L, columns = dd.Layout(P, tuple(shape)), dd.Partition((1,) * (P.ndim - 1) + (P.size,), P.ranks)
    x = _block(L)
    return lambda: F.repartition(x, L, columns)


def stencil(P: dd.Partition, shape: Sequence[int] = (1024, 1024), steps: int = 4) -> Step:
    """Steps of the heat equation on a torus: ghosts, five points."""
    L = dd.Layout(P, tuple(shape))
    spec, x = dd.HaloSpec(L, 1, boundary="circular", corners=False), _block(L)

    def step() -> torch.Tensor:
        u = x
        for _ in range(steps):
            w = F.halo_exchange(u, spec)
            u = u + 0.1 * (w[:-2, 1:-1] + w[2:, 1:-1] + w[1:-1, :-2] + w[1:-1, 2:] - 4 * u)
        return u

    return step


def mlp(P: dd.Partition, tokens: int = 512, width: int = 512, inner: int = 2048) -> Step:
    """A block of a transformer, forward and backward, on (tokens, features) ranks: column parallel, then row
    parallel; gradients of weights are summed over the ranks of tokens."""
    data, tensor = P.shape
    up = dd.Layout(dd.Partition((data, tensor, 1), P.ranks), (tokens, inner, width))
    down = dd.Layout(dd.Partition((data, 1, tensor), P.ranks), (tokens, width, inner))
    rows, hidden = dd.Layout(P.take(1, 0), (tokens,)), dd.Layout(P.take(0, 0), (inner,))
    m, k = rows.sizes(0)[(P.index() or (0,))[0]], hidden.sizes(0)[(P.index() or (0, 0))[1]]
    x, w1, w2 = torch.ones(m, width), _weight(k, width), _weight(width, k)

    def step() -> None:
        h = F.dist_linear(x, w1, up, x_layout="invariant", y_layout="replicated", params="invariant").relu()
        y = F.dist_linear(h, w2, down, x_layout="replicated", y_layout="invariant", params="invariant")
        torch.autograd.grad((y * y).sum(), (w1, w2))

    return step


def unet(P: dd.Partition, shape: Sequence[int] = (1, 1, 128, 128), channels: int = 16, levels: int = 2) -> Step:
    """A step of a U-Net, forward and backward, over (batch, channels, *space): two convolutions at each level, pooling,
    transposed convolutions, skip connections."""
    L, k = dd.Layout(P, tuple(shape)), P.ndim - 2
    widths = [channels << level for level in range(levels)]
    down = [(_weight(c, before, *(3,) * k), _weight(c, c, *(3,) * k)) for before, c in zip([shape[1], *widths], widths)]
    up = [
        (_weight(2 * c, c, *(2,) * k), _weight(c, 2 * c, *(3,) * k), _weight(c, c, *(3,) * k)) for c in widths[-2::-1]
    ]
    last, x = _weight(shape[1], channels, *(1,) * k), _block(L)
    weights = [w for ws in (*down, *up, (last,)) for w in ws]

    def at(x: torch.Tensor, level: int) -> dd.Layout:
        return L.with_shape((shape[0], x.shape[1], *(n >> level for n in shape[2:])))

    def conv(x: torch.Tensor, w: torch.Tensor, level: int) -> torch.Tensor:
        return F.dist_conv(x, w, at(x, level), padding=1, params="invariant").relu()

    def step() -> None:
        y, skips = x, []
        for level, (first, second) in enumerate(down):
            if level:
                skips.append(y)
                y = F.dist_max_pool(y, at(y, level - 1), 2)
            y = conv(conv(y, first, level), second, level)
        for level, (wider, first, second) in zip(range(levels - 2, -1, -1), up):
            y = F.dist_conv_transpose(y, wider, at(y, level + 1), stride=2, params="invariant")
            y = conv(conv(torch.cat([y, skips.pop()], 1), first, level), second, level)
        y = F.dist_conv(y, last, at(y, 0), params="invariant")
        torch.autograd.grad(F.dist_mse_loss(y, x, L), weights)

    return step
