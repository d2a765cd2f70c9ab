"""Cosine and sine transforms against dense matrices, written from the definitions of scipy.fft."""

import math

import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, randn
from waves import matrix, transformed

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError
from distdl.testing import collective_assert, count_messages

WORLD = dd.world()
N = WORLD.size
GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1)],
    4: [(4, 1, 1), (2, 2, 1), (1, 2, 2)],
}.get(N, [(N, 1, 1)])
NAMES = ("dctn", "idctn", "dstn", "idstn")
TYPES, NORMS = (1, 2, 3, 4), ("backward", "ortho", "forward")


def lay(*grid, shape, ranks=None):
    return dd.Layout(dd.Partition(grid, ranks), shape)


def off(found, wished):
    """The largest difference, relative to the largest number; infinite where shapes or dtypes differ."""
    if found.shape != wished.shape or found.dtype != wished.dtype:
        return math.inf
    return float((found - wished).abs().max() / wished.abs().max().clamp(min=1)) if wished.numel() else 0.0


def everywhere(wrong):
    collective_assert(not wrong, "; ".join(map(str, wrong[:4])))


@pytest.mark.parametrize("name", ["dctn", "dstn"])
@pytest.mark.parametrize("type", TYPES)
def test_the_matrices_are_orthogonal(name, type):
    for n in (2, 5, 6):
        A = matrix(name, type, n, "ortho")
        assert off(A @ A.T, torch.eye(n, dtype=A.dtype)) < 1e-14


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("type", TYPES)
def test_values(name, type):
    """Odd and even sizes, larger and smaller ones, subsets of dims in any order, empty blocks, complex numbers; where
    the result stays, and moved back."""
    call, wrong = getattr(F, f"dist_{name}"), []
    for shape in ((5, 8, 7), (3, 6, 4)):  # over 4 ranks the last has an empty block
        Z = torch.complex(randn(*shape), randn(*shape, seed=1))
        for i, dims in enumerate([(0, 1, 2), (2, 0), (-1,)]):
            for j, s in enumerate((None, tuple(shape[d] + (-1) ** (i + j) for j, d in enumerate(dims)))):
                norm, X = NORMS[(i + j) % 3], Z if i == j else Z.real
                wished = transformed(name, X, dims, type, s, norm)
                for grid in GRIDS:
                    L = lay(*grid, shape=shape)
                    x = L.shard(X).clone()
                    M = F.fft_layout(L, dims, inverse=name.startswith("i"), s=s)
                    for out, P_out in ((M, None), (dd.Layout(L.partition, wished.shape), L.partition)):
                        y = call(x, L, dims, type=type, s=s, norm=norm, P_out=P_out)
                        if off(y, out.shard(wished)) > 1e-12:
                            wrong.append((grid, dims, s, norm, P_out, off(y, out.shard(wished))))
                    if not torch.equal(x, L.shard(X)):
                        wrong.append(("the input has changed", grid))
    everywhere(wrong)


@pytest.mark.parametrize("name", ["dctn", "dstn"])
def test_there_and_back(name):
    """Each type and norm, without a word of where: the inverse comes back. Single precision, and integers."""
    forward, inverse, wrong = getattr(F, f"dist_{name}"), getattr(F, f"dist_i{name}"), []
    shape = (4, 8, 8)
    for X in (randn(*shape), randn(*shape).float(), (9 * randn(*shape)).long()):
        for grid in GRIDS[:2]:
            L = lay(*grid, shape=shape)
            for type, norm in ((t, n) for t in TYPES for n in NORMS):
                y = forward(L.shard(X), L, None, type=type, norm=norm)
                x = inverse(y, F.fft_layout(L, None), None, type=type, norm=norm)
                wished = L.shard(X.to(y.dtype))
                if off(x, wished) > (1e-13 if X.dtype == torch.float64 else 2e-6):
                    wrong.append((grid, type, norm, X.dtype, off(x, wished)))
    everywhere(wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("type", TYPES)
def test_every_derivative(name, type):
    """Real and complex: the same of both parts."""
    shape, s, grid = (6, 5, 4), (5, 6, 3), GRIDS[type % len(GRIDS)]
    L = lay(*grid, shape=shape)
    M = F.fft_layout(L, None, inverse=name.startswith("i"), s=s)
    norm = NORMS[type % 3]
    call = getattr(F, f"dist_{name}")
    check_layer(
        lambda x: call(x, L, None, type=type, s=s, norm=norm),
        lambda x: transformed(name, x, (0, 1, 2), type, s, norm),
        [randn(*shape)],
        [L],
        M,
        rtol=1e-12,
        name=f"{name} {type} {grid}",
    )
    Z, W = (torch.complex(randn(*shape, seed=i), randn(*shape, seed=i + 1)) for i in (2, 4))
    W = W[: s[0], :, : s[2]].repeat(1, 2, 1)[:, : s[1]]

    def slope(f, w):
        return torch.func.grad(lambda z: (w * f(z) ** 2).sum().real)

    z, w = L.shard(Z), M.shard(W)
    g = slope(lambda z: call(z, L, None, type=type, s=s, norm=norm), w)
    wished = slope(lambda z: transformed(name, z, (0, 1, 2), type, s, norm), W)
    bent, wished_bent = torch.func.jvp(g, (z,), (z,))[1], torch.func.jvp(wished, (Z,), (Z,))[1]
    wrong = [off(g(z), L.shard(wished(Z))), off(bent, L.shard(wished_bent))]
    largest = float(wished(Z).abs().max())
    everywhere([wrong] if max(wrong) > 1e-12 * max(largest, 1) else [])


def test_messages_are_half_of_fouriers():
    """(13, 10, 9) over a slab of 4: rank 0 sends 4 of 13 rows but its part, 7 of 10 columns, of real numbers."""
    if N != 4:
        pytest.skip("written for 4 ranks")
    L = lay(4, 1, 1, shape=(13, 10, 9))
    sizes = []
    for x, call in ((L.shard(randn(13, 10, 9)), F.dist_dctn), (L.shard(randn(13, 10, 9)) + 0j, F.dist_fftn)):
        batch = torch.stack([x, x])
        call(x, L, None)
        for run in (lambda x=x: call(x, L, None), lambda: torch.func.vmap(lambda x: call(x, L, None))(batch)):
            with count_messages() as found:
                run()
            sizes.append([size for _, _, size in found.of("send")])
    found = [(len(one), sum(one)) for one in sizes]
    real = 4 * 7 * 9 * 8
    wished = [(3, real), (3, 2 * real), (3, 2 * real), (3, 4 * real)]
    everywhere([found] if WORLD.rank == 0 and found != wished else [])


def test_some_ranks_bare_partitions_and_other_ranks():
    """Ranks outside get tensors without elements; a bare partition is asked once; the result on other ranks."""
    X, ranks, wrong = randn(6, 5), tuple(range(N - 1, 0, -1)) or (0,), []
    P = dd.Partition((len(ranks), 1), ranks)
    L, wished = dd.Layout(P, X.shape), transformed("dctn", X, (0, 1))
    x = L.shard(X) if P.active else torch.ones(1, 2, 3, dtype=X.dtype)
    M, to = F.fft_layout(L, None), dd.Layout(dd.Partition((1, 1), (0,)), X.shape)
    for where, more in ((P, {}), (L, {}), (P, {"shape": X.shape})):
        y = F.dist_dctn(x, where, None, **more)
        if off(y, M.shard(wished)) > 1e-12 and (P.active or more or where is L):
            wrong.append(("value", more))
        if y.dtype != torch.float64 or (not P.active and y.numel()):
            wrong.append(("outside", tuple(y.shape), y.dtype))
        if off(F.dist_dctn(x, where, None, P_out=to.partition, **more), to.shard(wished)) > 1e-12:
            wrong.append(("on rank 0", more))
    everywhere(wrong)


def test_errors():
    L = lay(N, 1, shape=(4, 5))
    x = L.shard(randn(4, 5))
    calls = {
        "no such type": lambda: F.dist_dctn(x, L, None, type=5),
        "no such norm": lambda: F.dist_idstn(x, L, None, norm="max"),
        "sizes of at least 2": lambda: F.dist_idctn(x, L, None, type=1, s=(4, 1)),
        "nothing to transform": lambda: F.dist_dstn(x, L, None, s=(0, 1)),
        "no dim 2": lambda: F.dist_dctn(x, L, 2),
    }
    for words, call in calls.items():
        raises_everywhere(PartitionError, call, words)
    raises_everywhere(ShapeError, lambda: F.dist_dctn(x.half(), L, None), "dist_dctn", "float16")
    with torch.autocast("cpu", torch.bfloat16):
        assert F.dist_dctn(x.bfloat16(), L, None).dtype == torch.float32
