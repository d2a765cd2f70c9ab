"""Repartitions: slab to pencil, one to all and back, uneven grids, primes, disjoint ranks, identity."""

import torch

import distdl as dd
from distdl.programs.bench import cases

from .choose import SIZE, choose, needs


def between(shape, a, b, what, a_ranks=None, b_ranks=None, **more):
    A, B = (dd.Layout(dd.Partition(g, ranks), shape) for g, ranks in ((a, a_ranks), (b, b_ranks)))
    return cases.repartition(A, B, what, **more)


@choose("n", [256, 2048], [32, 512, 1024, 4096, 8192])
def bench_rows_to_columns(timed, n):
    """Slab to slab: an all-to-all."""
    timed(between((n, n), (SIZE, 1), (1, SIZE), "rows to columns"))


@choose("n", [128], [64, 256])
@choose("way", ["slab to pencil"], ["pencil to slab"])
def bench_slab_and_pencil(timed, n, way):
    """A slab of a cube to pencils, and back."""
    a, b = ((SIZE, 1, 1), (1, *cases.grid_of(SIZE, 2)))[:: 1 if way == "slab to pencil" else -1]
    timed(between((n, n, n), a, b, way))


@choose("n", [1024], [256, 4096])
@choose("way", ["1 to all", "all to 1"])
def bench_one_and_all(timed, n, way):
    """Scatter and gather by blocks."""
    a, b = ((1, 1), cases.grid_of(SIZE, 2))[:: 1 if way == "1 to all" else -1]
    timed(between((n, n), a, b, way))


@choose("n", [1024], [4096])
def bench_grids(timed, n):
    """3 x 4 to 4 x 2."""
    needs(12)
    timed(between((n, n), (3, 4), (4, 2), "3 x 4 to 4 x 2"))


@choose("n", [1009], [4093])
def bench_primes(timed, n):
    """Nothing divides."""
    timed(between((n, n), (SIZE, 1), (1, SIZE), "rows to columns, a prime size"))


@choose("n", [1024], [4096])
def bench_disjoint(timed, n):
    """From the first half of the ranks to the others."""
    needs(2)
    half = SIZE // 2
    timed(between((n, n), (half, 1), (1, SIZE - half), "to other ranks", range(half), range(half, SIZE)))


def bench_identity(timed):
    """Nothing moves, nothing is copied."""
    timed(between((2048, 2048), (SIZE, 1), (SIZE, 1), "identity"))


@choose("dtype", [torch.bfloat16], [torch.complex64, torch.float64])
def bench_dtypes(timed, dtype):
    """Other numbers."""
    timed(between((1024, 1024), (SIZE, 1), (1, SIZE), "rows to columns", dtype=dtype))
