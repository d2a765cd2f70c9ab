"""Fourier, cosine and sine transforms of real tensors: slabs and pencils against mpi4py-fft, an all-to-all over gloo by
hand, and one rank alone; what of it the moves take, and that is what F.repartition takes; and a spectral convolution
against its uncut transforms."""

import torch

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose


def transform(shape, grid, dtype=torch.float32):
    """dist_rfftn of all dims."""
    L = dd.Layout(dd.Partition(grid), shape)
    return against_its_moves("rfftn", L, dtype, True, lambda x: F.dist_rfftn(x, L, None), torch.fft.rfftn)


def against_its_moves(op, L, dtype, real, call, serial):
    """A transform, its moves alone, and the same moves asked of F.repartition."""
    x, stages = cases.drawn(L.local_shape(), dtype), F.fft_stages(L, None, real=real)
    kind = dtype.to_complex() if real else dtype
    before = [torch.zeros(s.result.local_shape(), dtype=kind) for s in stages]
    moves = [(y, a.result, b) for y, a, b in zip(before, stages, stages[1:])]
    rank, everything = dd.world().rank, torch.randn(L.shape, dtype=dtype)
    calls = {
        "distdl": lambda: call(x),
        "moves": lambda: [b.move(y) for y, _, b in moves],
        "repartition": lambda: [F.repartition(y, A, b.layout) for y, A, b in moves],
        "share": lambda: serial(x),
        "whole": (lambda: serial(everything)) if rank == 0 else lambda: None,
    }
    what = f"{cases.size(L.shape)} over {' x '.join(map(str, L.partition.shape))}"
    result = Result(op, what, SIZE, cases.short(dtype), before[0].nbytes, limit="share", subjects=("distdl", "moves"))
    return cases.Case(result, calls, {"x": x, "layout": L})


@choose("n, dtype", [(64, torch.float32), (128, torch.float64)], [(128, torch.float32), (256, torch.float32)])
def bench_slab(timed, n, dtype):
    """One move."""
    timed(transform((n, n, n), (SIZE, 1, 1), dtype))


@choose("n", [128], [256])
def bench_pencils(timed, n):
    """Two moves, each along a line of the grid."""
    timed(transform((n, n, n), (*cases.grid_of(SIZE, 2), 1)))


@choose("n", [64, 128], [256])
def bench_cosines(timed, n):
    """Real numbers, so half a spectrum's bytes."""
    L = dd.Layout(dd.Partition((SIZE, 1, 1)), (n, n, n))
    alone = dd.Partition((1, 1, 1), (dd.world().rank,))
    serial = lambda x: F.dist_dctn(x, dd.Layout(alone, x.shape), None)  # noqa: E731
    timed(against_its_moves("dctn", L, torch.float64, False, lambda x: F.dist_dctn(x, L, None), serial))


@choose("n", [1024], [256, 4096])
def bench_plane(timed, n):
    """Two dims."""
    timed(transform((n, n), (SIZE, 1)))


@choose("modes", [16, 8])
def bench_spectral_conv(timed, modes):
    """(4, 16, 128, 128): wave numbers cut off before they travel, against the whole spectrum there and back."""
    shape = (4, 16, 128, 128)
    L = dd.Layout(dd.Partition((1, 1, SIZE, 1)), shape)
    x, place = cases.drawn(L.local_shape(), torch.float32), F.spectral_layout(L, modes, 16, 16)
    w = torch.randn(place.local_shape(), dtype=torch.complex64)
    M = F.fft_layout(L, (2, 3), real=True)
    whole = torch.randn(shape)
    calls = {
        "distdl": lambda: F.dist_spectral_conv(x, w, L, modes),
        "uncut": lambda: F.dist_irfftn(F.dist_rfftn(x, L, (2, 3)), M, (2, 3), s=shape[2:], P_out=L),
        "share": lambda: torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 3)), x.shape[2:], (2, 3)),
        "whole": (lambda: torch.fft.irfftn(torch.fft.rfftn(whole, dim=(2, 3)), shape[2:], (2, 3)))
        if dd.world().rank == 0
        else lambda: None,
    }
    result = Result(
        "spectral_conv", f"{cases.size(shape)}, {modes} modes", SIZE, limit="share", subjects=("distdl", "uncut")
    )
    timed(cases.Case(result, calls))
