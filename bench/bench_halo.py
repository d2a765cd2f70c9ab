"""Halo exchanges: 1-3 dims, widths, corners, periodic edges; split-phase overlap."""

import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases
from distdl.programs.bench.timing import sample

from .choose import SIZE, choose


@choose("width", [1], [2, 4])
@choose("n", [256, 2048], [512, 1024, 4096, 8192])
def bench_rows(timed, n, width):
    """One split dim of a plane."""
    timed(cases.halo((n, n), (SIZE, 1), width=width))


@choose("boundary", ["none", "circular", "zeros"])
@choose("n", [512], [256, 4096])
def bench_corners(timed, n, boundary):
    """Both dims split (or wrapped): corners cross too."""
    timed(cases.halo((n, n), cases.grid_of(SIZE, 2), boundary=boundary))


@choose("n, width", [(64, 1)], [(64, 2), (128, 1), (128, 4), (256, 1)])
def bench_volume(timed, n, width):
    """Three dims, wrapped: 26 neighbours where there are that many."""
    timed(cases.halo((n, n, n), cases.grid_of(SIZE, 3), width=width, boundary="circular"))


@choose("n", [2**16], [2**20])
def bench_line(timed, n):
    """One dim."""
    timed(cases.halo((n,), (SIZE,), width=4))


@choose("dtype", [torch.bfloat16], [torch.complex64, torch.float64])
def bench_dtypes(timed, dtype):
    """Other numbers."""
    timed(cases.halo((1024, 1024), (SIZE, 1), dtype=dtype))


@choose("n", [2048], [512, 8192])
def bench_overlap(timed, n):
    """Split phase with a computation as long as the movement in between."""
    case = cases.halo((n, n), cases.grid_of(SIZE, 2), width=4, boundary="circular")
    case.result.what += ", split phase"
    A, x = case.operands["map"], case.operands["x"]
    timed(overlapped(case, A, x), with_peers=False)


def overlapped(case, A, x):
    """Add the candidates "compute" and "split"; as many products on every rank, by the slowest of them."""
    m = torch.randn(128, 128)
    trial = sample({"move": lambda: A(x), "product": lambda: m @ m}, MPI.COMM_WORLD, rounds=5, inner=4)
    count = max(1, round(min(trial["move"]) / min(trial["product"])))

    def compute():
        for _ in range(count):
            m @ m

    def split():
        pending = F.start(A, x)
        compute()
        return F.wait(pending)

    dd.testing.collective_assert(torch.equal(split(), A(x)), "start and wait differ from the call")
    case.calls |= {"compute": compute, "split": split}
    return case
