"""The convolution of Fourier neural operators over partitioned tensors: a matrix for each kept wave number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from .._arguments import checked
from .._types import Place
from ..agree import check_tensor
from ..errors import PartitionError, ShapeError
from ..movement.options import sizes_of
from ..partition import Layout, Partition, partition_of
from .autocast import autocast
from .enter import enter, outside, replicated
from .stages import Keep, schedule
from .transform import COMPLEX, REAL, Keeps, check_norm, pairs_of, run, transform_of, transformable

__all__ = ["dist_spectral_conv", "spectral_layout"]


def _modes(P, modes) -> tuple:
    """``modes`` for each spatial dim, in plain numbers."""
    n = partition_of(P).ndim - 2
    if n < 1:
        raise PartitionError(
            "x needs batch, channels and space",
            expected="3 dims or more",
            actual=n + 2,
            next_step="give P one dim for the batch, one for the channels and one for each spatial dim",
        )
    found = pairs_of(modes, n)
    if None in found:
        raise PartitionError(
            "how many modes are kept?",
            expected="a number or (low, high) for each spatial dim",
            actual=modes,
            next_step="name all of them, as the weight has one matrix for each",
        )
    return found


@lru_cache(maxsize=1024)
def _spectral(P: Partition, modes: tuple, real: bool) -> tuple[Partition, tuple[Keep, ...]]:
    """(the grid over which the kept spectrum lies, (low, high) of each spatial dim): of the partition and the modes
    alone, so that a weight fits tensors of any size."""
    n = 4 * P.size * max(sum(m) if isinstance(m, tuple) else 2 * m for m in modes) or 1
    L = Layout(P, (P.size, P.size, *(n,) * len(modes)))
    t = transform_of(L, tuple(range(2, P.ndim)), (None,) * len(modes), modes, real, False, None)
    return schedule(t._replace(free=(1,)))[-1].layout.partition, t.keep


def spectral_grid(P, modes, real: bool = True) -> tuple[Partition, tuple[int, ...]]:
    """(the grid of (batch, channels, *modes) over which the kept spectrum lies, how many modes each dim keeps)."""
    S, keep = _spectral(partition_of(P), _modes(P, modes), real)
    return S, tuple(sum(pair) for pair in keep if pair)


@checked
def spectral_layout(P: Place, modes: Keeps, in_channels: int, out_channels: int, *, real: bool = True) -> Layout:
    """The layout of the weight of :func:`dist_spectral_conv`: (in channels, out channels, *kept modes), each rank its
    own modes. It depends on the grid and the modes only, not on the size of x.

    The layout spans the ranks that share this rank's part of the batch; those of others hold equal blocks.

    Args:
        P: partition or Layout of x.
        modes: as there.
        real: whether x is.

    Example:
        >>> F.spectral_layout(dd.Partition((1, 1, 2)), 3, 6, 4).shape
        (6, 4, 3)
    """
    S, kept = spectral_grid(P, modes, bool(real))
    dims = tuple(range(2, S.ndim))
    fibre = S.along(dims) or S.along(dims, S.ranks[0])
    return Layout(fibre, (*sizes_of((in_channels, out_channels), "channels"), *kept))


@checked
def dist_spectral_conv(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    modes: Keeps,
    *,
    norm: str = "forward",
    params: str = "varying",
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The convolution of a Fourier neural operator (Li et al., arXiv:2010.08895): of each kept wave number a matrix
    from channels to channels, y = F⁻¹(Σ_i (F x)[b, i, k] w[i, o, k]); other wave numbers of y are zero.

    Args:
        x: (batch, channels, *space), this rank's block, real (half spectra) or complex. P may split any dims.
        w: (in, out, *kept modes), complex: this rank's block of layout :func:`spectral_layout`; no rank ever has all.
        P: partition or Layout of x.
        modes: for each spatial dim the wave numbers that are kept: (low, high), 0 .. low-1 and -high .. -1, or one
            number for both; of the last dim of real x its first ones.
        norm: of both transforms.
        params: "varying": w is each rank's own (or already marked). "invariant": ranks that have other examples and the
            same modes hold copies, which the layer marks.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        (batch, out, *space), over ``P``: splits stay where sizes do.

    Messages: those of :func:`dist_rfftn` with ``keep``, and the same back; channels that ranks split turn to modes as
    other dims do, in one repartition more. Backward the transposes; the gradient of w: none over modes, and one
    all-reduce over the ranks of the batch where w is invariant.

    Raises:
        PartitionError: fewer than 3 dims, modes that a dim does not have.
        ShapeError: w that is not this rank's block.

    Example:
        >>> x, w = torch.ones(1, 1, 4), torch.ones(1, 1, 1, dtype=torch.complex64)
        >>> F.dist_spectral_conv(x, w, dd.Partition((1, 1, 1)), 1).shape
        torch.Size([1, 1, 4])
    """
    check_norm(norm)
    modes, where = _modes(P, modes), partition_of(P)
    check_tensor(x, P)
    (x,) = autocast("dist_spectral_conv", where.ndim, x)
    x, L, at = enter(transformable(x, REAL + COMPLEX), P, shape=shape)
    real = not x.is_complex()
    S, keep = _spectral(where, modes, real)
    (w,) = replicated(params, S, (0, 1), w)
    if at is None:
        like = None if L is None else L.with_shape((L.shape[0], w.shape[1], *L.shape[2:]))
        return outside(x, w, like=like)
    space, sizes = tuple(range(2, L.ndim)), L.shape[2:]
    to = transform_of(L, space, sizes, keep, real, False, None)
    wanted = (L.shape[1], w.shape[1] if w.dim() == L.ndim else "out", *_block(S, keep))
    if tuple(w.shape) != wanted or w.dtype != x.dtype.to_complex():
        raise ShapeError(
            "w is not this rank's block",
            partitions=P,
            expected=f"{wanted}, {x.dtype.to_complex()}",
            actual=f"{tuple(w.shape)}, {w.dtype}",
            next_step="pass spectral_layout(P, modes, in_channels, out_channels).shard(w)",
        )
    X = Layout(S, to.shape, (L.splits[0] if L.splits else None, *(None,) * (L.ndim - 1)))
    x = run(x, to._replace(out=X), norm)
    Y = X.with_shape((L.shape[0], w.shape[1], *X.shape[2:]))
    y = torch.einsum("bi...,io...->bo...", x, w)
    back = transform_of(Y, space, sizes, keep, real, True, L.with_shape((L.shape[0], w.shape[1], *sizes)))
    return run(y, back, norm)


def _block(S: Partition, keep):
    """This rank's numbers of kept modes."""
    L = Layout(S, (S.shape[0], S.shape[1], *(sum(pair) for pair in keep)))
    return L.local_shape()[2:]
