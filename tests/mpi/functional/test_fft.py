"""Fourier transforms against torch.fft: every way to split a tensor, derivatives, messages as numbers, and programs."""

import math

import pytest
import torch
from registry import raises_everywhere
from serial import check_layer, randn, whole

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError
from distdl.testing import collective_assert, count_messages

WORLD = dd.world()
N = WORLD.size
GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
    4: [(4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)],
}.get(N, [(N, 1, 1)])
SHAPES = [(13, 10, 9), (8, 16, 32), (12, 13, 5), (3, 10, 9)]  # over 4 ranks the last has an empty block
FFTS = {"fftn": (False, False), "ifftn": (False, True), "rfftn": (True, False), "irfftn": (True, True)}


def lay(*grid, shape, ranks=None, splits=None):
    return dd.Layout(dd.Partition(grid, ranks), shape, splits)


def off(found, wished):
    """The largest difference, relative to the largest number; infinite where shapes or dtypes differ."""
    if found.shape != wished.shape or found.dtype != wished.dtype:
        return math.inf
    return float((found - wished).abs().max() / wished.abs().max().clamp(min=1)) if wished.numel() else 0.0


def sent(call):
    """(messages, bytes) that this rank sends, without agreements."""
    with count_messages() as found:
        call()
    sizes = [size for _, _, size in found.of("send")]
    return len(sizes), sum(sizes)


def everywhere(wrong):
    collective_assert(not wrong, "; ".join(map(str, wrong[:4])))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("name", FFTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(name, shape):
    """Subsets of dims in any order, sizes larger and smaller, the three norms; where the result stays, and moved
    back."""
    real, inverse = FFTS[name]
    X = randn(*shape) if name == "rfftn" else torch.complex(randn(*shape), randn(*shape, seed=1))
    call, wrong = getattr(F, f"dist_{name}"), []
    for i, dims in enumerate([(0, 1, 2), (0, 1), (2, 0), (1, 2), (0,), (-1,)]):
        norm = ("backward", "ortho", "forward")[i % 3]
        for s in (None, tuple(shape[d] + (-1) ** (i + j) * 2 for j, d in enumerate(dims))):
            wished = getattr(torch.fft, name)(X, s, dims, norm)
            for grid in (*GRIDS, *[(3, 1, 1)] * (N > 3)):  # the last leaves a rank outside
                L = lay(*grid, shape=shape)
                x = L.shard(X).clone()
                M = F.fft_layout(L, dims, real=real, inverse=inverse, s=s)
                back = dd.Layout(L.partition, wished.shape)
                for out, P_out in ((M, None), (back, L.partition)):
                    y = call(x, L, dims, s=s, norm=norm, P_out=P_out)
                    if off(y, out.shard(wished)) > 1e-12:
                        wrong.append((grid, dims, s, norm, P_out))
                if not torch.equal(x, L.shard(X)):
                    wrong.append(("the input has changed", grid))
    everywhere(wrong)


@pytest.mark.parametrize("name", FFTS)
def test_single_precision_integers_and_dtypes(name):
    shape, wrong = (6, 5, 4), []
    for grid in GRIDS:
        L = lay(*grid, shape=shape)
        X = randn(*shape).float()
        call, torchs = getattr(F, f"dist_{name}"), getattr(torch.fft, name)
        for Y in (X, (9 * X).long(), *((torch.complex(X, X),) if name != "rfftn" else ())):
            y = call(L.shard(Y), L, None, P_out=L.partition)
            wished = torchs(Y)
            if off(y, dd.Layout(L.partition, wished.shape).shard(wished)) > 1e-6:
                wrong.append((grid, Y.dtype))
    everywhere(wrong)


def test_halves_are_refused_outside_of_autocast():
    L = lay(N, 1, shape=(4, 4))
    x = L.shard(randn(4, 4)).bfloat16()
    raises_everywhere(ShapeError, lambda: F.dist_fftn(x, L, None), "dist_fftn", "bfloat16", "float32 or float64")
    with torch.autocast("cpu", torch.bfloat16):
        assert F.dist_fftn(x, L, None).dtype == torch.complex64


def test_round_trips_and_parseval():
    """The inverse comes back to where the tensor was, in two moves; no identity is sent."""
    shape, wrong = (7, 6, 8), []
    X = randn(*shape)
    for grid in GRIDS:
        if grid[2] > 1:  # half a spectrum is made of a whole dim, so one more move: test_a_split_last_dim
            continue
        L = lay(*grid, shape=shape)
        M = F.fft_layout(L, (0, 1, 2), real=True)
        if F.fft_layout(M, (0, 1, 2), real=True, inverse=True, s=shape) != L:
            wrong.append(("another layout", grid))
        y = F.dist_rfftn(L.shard(X), L, (0, 1, 2), norm="ortho")
        if off(F.dist_irfftn(y, M, (0, 1, 2), s=shape, norm="ortho"), L.shard(X)) > 1e-14:
            wrong.append(("another tensor", grid))
        moves = [F.fft_stages(L, (0, 1, 2), real=True), F.fft_stages(M, (0, 1, 2), real=True, inverse=True, s=shape)]
        if [sum(stage.move is not None for stage in stages) for stages in moves] != [sum(n > 1 for n in grid)] * 2:
            wrong.append(("other moves", grid))
        both = lambda x: F.dist_irfftn(F.dist_rfftn(x, L, None), M, None, s=shape)
        with count_messages() as found:
            both(L.shard(X))
        planned = [s.move.plan.messages(WORLD.rank) for stages in moves for s in stages if s.move is not None]
        if len(found.of("send")) != sum(planned) or found.of("agree") or 0 in planned[: 2 * L.active]:
            wrong.append(("other messages than those of two moves", grid))
        total = float((X * X).sum())
        Z = F.dist_fftn(L.shard(X), L, None, norm="ortho")
        power = F.dist_sum(Z.real**2 + Z.imag**2, F.fft_layout(L, None))
        if abs(float(power) - total) > 1e-12 * total:
            wrong.append(("Parseval", grid))
        k = F.dist_rfftfreq(M, 2, 8, 1 / 8)  # of half a spectrum: all but 0 and 4 stand for two
        power = F.dist_sum(torch.where((k == 0) | (k == 4), 1, 2) * (y.real**2 + y.imag**2), M)
        if abs(float(power) - total) > 1e-12 * total:
            wrong.append(("Parseval, of half a spectrum", grid))
    everywhere(wrong)


def test_layouts_come_back():
    """By themselves where sizes are even and a dim is free; by P_out always, in as many moves; explicit splits too."""
    wrong = []
    for grid in [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 3, 1), (2, 2, 2)]:
        for dims in ((0, 1, 2), (0, 1), (1, 2)):
            for real in (False, True):
                for shape in ((8, 8, 8), (7, 6, 8)):
                    L, s = lay(*grid, shape=shape), tuple(shape[d] for d in dims)
                    there = F.fft_stages(L, dims, real=real)
                    back = F.fft_stages(there[-1].result, dims, real=real, inverse=True, s=s, P_out=L)
                    if back[-1].result != L or len(back) > len(there):
                        wrong.append((grid, dims, shape, "P_out"))
                    free = any(grid[d] == 1 for d in dims) and not (real and grid[dims[-1]] > 1)
                    home = F.fft_layout(there[-1].result, dims, real=real, inverse=True, s=s)
                    if shape == (8, 8, 8) and free and 3 not in grid and home != L:
                        wrong.append((grid, dims, real))
    assert not wrong, wrong[:3]
    L = lay(3, 1, 1, shape=(7, 6, 8), splits=((0, 2, 5), None, None))
    M = F.fft_layout(L, None)
    there, back = F.fft_stages(L, None), F.fft_stages(M, None, inverse=True, P_out=L)
    assert len(there) == len(back) == 2 and back[-1].result == L


def test_no_dim_is_free():
    """Two dims over a grid of 2 x 2: ranks of one join those of the other."""
    L = lay(2, 2, shape=(6, 8), ranks=(3, 1, 0, 2) if N == 4 else None)
    there = [stage.layout.partition.shape for stage in F.fft_stages(L, None, real=True)]
    assert there == [(2, 2), (4, 1), (1, 4)]
    M = F.fft_layout(L, None, real=True)
    back = F.fft_stages(M, None, real=True, inverse=True, s=(6, 8), P_out=L)
    assert [stage.layout.partition.shape for stage in back] == there[::-1]
    if N == 4:
        X = randn(6, 8)
        y = F.dist_rfftn(L.shard(X), L, None)
        everywhere([off(y, M.shard(torch.fft.rfftn(X)))] if off(y, M.shard(torch.fft.rfftn(X))) > 1e-12 else [])
        x = F.dist_irfftn(y, M, None, s=(6, 8), P_out=L)
        assert off(x, L.shard(X)) < 1e-14


def test_some_ranks_bare_partitions_and_other_ranks():
    """Ranks outside get tensors without elements; a bare partition is asked once; the result on other ranks."""
    X, ranks = randn(6, 5), tuple(range(N - 1, 0, -1)) or (0,)
    P = dd.Partition((len(ranks), 1), ranks)
    L, wished = dd.Layout(P, X.shape), torch.fft.rfftn(X)
    x = L.shard(X) if P.active else torch.ones(1, 2, 3, dtype=X.dtype)
    M = F.fft_layout(L, None, real=True)
    to = dd.Layout(dd.Partition((1, 1), (0,)), wished.shape)
    wrong = []
    for where, more in ((P, {}), (L, {}), (P, {"shape": X.shape})):
        y = F.dist_rfftn(x, where, None, **more)
        if off(y, M.shard(wished)) > 1e-12 and (P.active or more or where is L):
            wrong.append(("value", more))
        if y.dtype != torch.complex128 or (not P.active and y.numel()):
            wrong.append(("outside", tuple(y.shape), y.dtype))
        y = F.dist_rfftn(x, where, None, P_out=to.partition, **more)
        if off(y, to.shard(wished)) > 1e-12:
            wrong.append(("on rank 0", more, tuple(y.shape)))
    everywhere(wrong)


# ---------------------------------------------------------------- messages


def test_messages_of_slabs_and_pencils():
    """Real (2, 3, 13, 10, 9): rank 0 sends what is written beside each."""
    if N != 4:
        pytest.skip("written for 4 ranks")
    listed = {
        ((1, 1, 4, 1, 1), (2, 3, 13, 10, 9)): (3, 13440),  # 2·3·4·10·5, of which 7/10 leave
        ((1, 1, 2, 2, 1), (2, 3, 13, 10, 9)): (2, 15360),  # 2·3·7·5·5 · 2/5 and 2·3·13·5·3 · 6/13
        ((1, 1, 4, 1, 1), (1, 2, 3, 10, 9)): (3, 1120),  # rank 3 has an empty block
    }
    wrong = []
    for (grid, shape), wished in listed.items():
        L = lay(*grid, shape=shape)
        x, M = L.shard(randn(*shape)), F.fft_layout(L, (2, 3, 4), real=True)
        y = F.dist_rfftn(x, L, (2, 3, 4))
        found = sent(lambda: F.dist_rfftn(x, L, (2, 3, 4)))
        if WORLD.rank == 0 and found != wished:
            wrong.append((grid, found))
        if sent(lambda: F.dist_irfftn(y, M, (2, 3, 4), s=shape[2:]))[0] > wished[0]:
            wrong.append((grid, "back"))
        batch = torch.stack([x, 2 * x, 3 * x])
        found = sent(lambda: torch.func.vmap(lambda x: F.dist_rfftn(x, L, (2, 3, 4)))(batch))
        if WORLD.rank == 0 and found != (wished[0], 3 * wished[1]):
            wrong.append((grid, "vmap", found))
    everywhere(wrong)


def test_wave_numbers_are_cut_off_before_they_travel():
    """A block of a Fourier neural operator, (2, 3, 13, 10, 12) with modes (3, 2, 4), that is 6 x 4 x 4 of 13 x 10 x
    7."""
    if N != 4:
        pytest.skip("written for 4 ranks")
    shape, modes, dims = (2, 3, 13, 10, 12), (3, 2, 4), (2, 3, 4)
    X, wrong = randn(*shape), []

    def of(*grid):
        L = lay(*grid, shape=shape)
        place, x = F.spectral_layout(L, modes, 3, 3), L.shard(X)
        w = place.shard(torch.complex(randn(*place.shape), randn(*place.shape, seed=1)))
        return L, x, sent(lambda: F.dist_spectral_conv(x, w, L, modes))

    # A slab: rank 0 has 4 of 13 rows, others 3. There 6·4·4·4 · 3/4 elements, back 6·13·1·4 · 9/13 (others 10/13).
    L, x, found = of(1, 1, 4, 1, 1)
    if found != (6, 8064 if WORLD.rank == 0 else 7296):
        wrong.append(found)
    # All wave numbers: 18,816 bytes there, as many as the page said twice; back are 6·13·3·7 · 9/13 · 16 = 18,144.
    M = F.fft_layout(L, dims, real=True)
    y = F.dist_rfftn(x, L, dims)
    found = sent(lambda: F.dist_rfftn(x, L, dims)), sent(lambda: F.dist_irfftn(y, M, dims, s=shape[2:]))
    if WORLD.rank == 0 and found != ((3, 18816), (3, 18144)):
        wrong.append(found)
    # Pencils: dim 3, which keeps least (4 of 10), goes first. So the four ranks send 69,888 bytes, where the other
    # order, of which rank 0 would send 18,240, needs 4 · 18,240 = 72,960.
    found = of(1, 1, 2, 2, 1)[2]
    if found != (4, 18432 if WORLD.rank < 2 else 16512):
        wrong.append(found)
    everywhere(wrong)


# ---------------------------------------------------------------- derivatives


@pytest.mark.parametrize("name", FFTS)
def test_every_derivative(name):
    """grad, jvp, vmap of grad, and both Hessian-vector products, of real and imaginary parts."""
    real, inverse = FFTS[name]
    shape, s = (6, 5, 4), (5, 6, 3)
    parts = (lambda y: y) if name == "irfftn" else lambda y: (y.real, y.imag)
    for grid in GRIDS[-2:]:
        L = lay(*grid, shape=shape)
        M = F.fft_layout(L, None, real=real, inverse=inverse, s=s)
        check_layer(
            lambda x: parts(getattr(F, f"dist_{name}")(x, L, None, s=s)),
            lambda x: parts(getattr(torch.fft, name)(x, s)),
            [randn(*shape)],
            [L],
            M if name == "irfftn" else (M, M),
            rtol=1e-12,
            name=f"{name} {grid}",
        )


def test_complex_derivatives():
    """As torch has them for complex tensors, Hessian-vector products too; the dot test <F x, y> = <x, Fᴴ y>."""
    wrong = []
    Z, V = (torch.complex(randn(6, 5, 4, seed=i), randn(6, 5, 4, seed=i + 1)) for i in (1, 3))
    W = torch.complex(randn(6, 5, 4, seed=7), randn(6, 5, 4, seed=8))
    for grid in GRIDS:
        L = lay(*grid, shape=Z.shape)
        M = F.fft_layout(L, None)
        for norm in ("backward", "ortho", "forward"):

            def loss(f, w):
                return lambda x: (w * torch.stack([(y := f(x)).real, y.imag**3])).real.sum()

            ours, serial = (lambda x: F.dist_fftn(x, L, None, norm=norm)), (lambda x: torch.fft.fftn(x, norm=norm))
            g, g_serial = (torch.func.grad(loss(f, w)) for f, w in ((ours, M.shard(W)), (serial, W)))
            z, v = L.shard(Z), L.shard(V)
            if off(g(z), L.shard(g_serial(Z))) > 1e-12 * float(g_serial(Z).abs().max()):
                wrong.append((grid, norm, "grad"))
            found = torch.func.jvp(g, (z,), (v,))[1]
            wished = torch.func.jvp(g_serial, (Z,), (V,))[1]
            if off(found, L.shard(wished)) > 1e-12 * float(wished.abs().max()):
                wrong.append((grid, norm, "jvp of grad"))
            y, w = ours(z), M.shard(W)
            pulled = torch.func.vjp(ours, z)[1](w)[0]
            left, right = dd.func.inner(y, w, M), dd.func.inner(z, pulled, L)
            if abs(complex(left) - complex(right)) > 1e-13 * abs(complex(left)):
                wrong.append((grid, norm, "dot", complex(left), complex(right)))
    everywhere(wrong)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_half_a_spectrum_counts_its_interior_twice(norm):
    """The gradient of the transform from complex to real, 6 x 8: columns 1, 2, 3 count twice, 0 and 4 once."""
    L = lay(N, 1, shape=(6, 5))
    y = torch.complex(randn(6, 5), randn(6, 5, seed=1))
    M = F.fft_layout(L, None, real=True, inverse=True, s=(6, 8))
    G = randn(6, 8, seed=3)
    g = torch.func.vjp(lambda y: F.dist_irfftn(y, L, None, s=(6, 8), norm=norm), L.shard(y))[1](M.shard(G))[0]
    plain = torch.fft.rfftn(G, norm={"backward": "forward", "ortho": "ortho", "forward": "backward"}[norm])
    wished = L.shard(plain * torch.tensor([1.0, 2, 2, 2, 1]))
    # real and transposed: imaginary parts of columns that are their own conjugates have no gradient of their own
    everywhere([off(g, wished)] if off(g, wished) > 1e-12 else [])


@pytest.mark.parametrize("name", [*FFTS, "dctn", "idstn"])
def test_inputs_tangents_and_cotangents_stay_as_they_are(name):
    """Bitwise, in both modes; the dot test <F x, y> = <x, Fᵀ y> of real and imaginary parts as two real numbers."""
    real, inverse = FFTS.get(name, (False, "i" in name))
    call, wrong = getattr(F, f"dist_{name}"), []
    for norm in ("backward", "ortho", "forward"):
        L = lay(N, 1, shape=(6, 5))
        M = F.fft_layout(L, None, real=real, inverse=inverse)
        x, v = (L.shard(torch.complex(randn(6, 5, seed=i), randn(6, 5, seed=i + 1))).clone() for i in (1, 3))
        if name in ("rfftn", "dctn"):
            x, v = x.real.contiguous(), v.real.contiguous()
        run = lambda x: call(x, L, None, norm=norm)
        y, pull = torch.func.vjp(run, x)
        bar = M.shard(torch.complex(randn(*M.shape, seed=5), randn(*M.shape, seed=6))).to(y.dtype).clone() \
            if y.is_complex() else M.shard(randn(*M.shape, seed=5)).clone()  # fmt: skip
        kept = [t.clone() for t in (x, v, bar)]
        pushed, pulled = torch.func.jvp(run, (x,), (v,))[1], pull(bar)[0]
        leaf = x.clone().requires_grad_()
        run(leaf).backward(bar)
        wrong += [(norm, "changed")] if not all(map(torch.equal, (x, v, bar, leaf), (*kept, kept[0]))) else []
        left, right = dd.func.inner(bar, pushed, M), dd.func.inner(pulled, v, L)
        scale = float(F.dist_norm(pushed, M)) * float(F.dist_norm(bar, M))
        if abs(complex(left).real - complex(right).real) > 1e-13 * scale:
            wrong.append((norm, "dot", complex(left), complex(right)))
    everywhere(wrong)


# ---------------------------------------------------------------- wave numbers


@pytest.mark.parametrize("n", [14, 15])
@pytest.mark.parametrize("keep", [(7, 7), (3, 2), (1, 0), (4, 5)])
def test_kept_wave_numbers(n, keep):
    """Odd and even sizes with odd and even numbers: exactly 0 .. low-1 and -high .. -1."""
    L = lay(1, N, shape=(5, n))
    X = randn(5, n)
    numbers = torch.fft.fftfreq(n, 1 / n)
    kept = (numbers >= 0) & (numbers < keep[0]) | (numbers < 0) & (numbers >= -keep[1])
    if n == 14 and keep[1] == 7:
        kept[7] = True  # wave number 7 is -7 as well
    M = F.fft_layout(L, (0, 1), keep=(None, keep))
    Y = torch.fft.fftn(X)
    y = F.dist_fftn(L.shard(X), L, (0, 1), keep=(None, keep))
    wrong = [off(y, M.shard(Y[:, kept]))]
    k = F.dist_fftfreq(M, 1, n, 1 / n, keep=keep)
    wrong.append(off(k, numbers[kept][M.slices()[1]].to(k.dtype)))
    x = F.dist_ifftn(y, M, (0, 1), s=(5, n), keep=(None, keep), P_out=L)
    wrong.append(off(x, L.shard(torch.fft.ifftn(Y * kept))))
    everywhere([wrong] if max(wrong) > 1e-12 else [])


def test_resampling_is_exact():
    """cos(2π h x) with the highest wave number h = 7 of 15 points, on 30 points; of 14 points h = 6, odd and even."""
    wrong = []
    for n, h in ((15, 7), (14, 6)):
        j = torch.arange(n, dtype=torch.float64)
        X = torch.cos(2 * math.pi * h * j / n)[None] * torch.ones(4, 1, dtype=torch.float64)
        L = lay(N, 1, shape=(4, n))
        keep = (None, h + 1)
        y = F.dist_rfftn(L.shard(X), L, (0, 1), keep=keep, norm="forward")
        M = F.fft_layout(L, (0, 1), real=True, keep=keep)
        x = F.dist_irfftn(y, M, (0, 1), s=(4, 2 * n), keep=keep, norm="forward", P_out=L.partition)
        j = torch.arange(2 * n, dtype=torch.float64)
        wished = torch.cos(math.pi * h * j / n)[None].expand(4, 2 * n)
        wrong += [off(x, dd.Layout(L.partition, (4, 2 * n)).shard(wished))]
    everywhere([wrong] if max(wrong) > 1e-12 else [])


# ---------------------------------------------------------------- spectral convolution


def serial_spectral(x, w, modes, real=True):
    """The equation, for every wave number of an array of zeros."""
    dims = tuple(range(2, x.dim()))
    X = (torch.fft.rfftn if real else torch.fft.fftn)(x, dim=dims, norm="forward")
    places = []
    for i, (m, size) in enumerate(zip(modes, X.shape[2:])):
        low, high = m if isinstance(m, tuple) else (m, 0 if real and i == len(modes) - 1 else m)
        places.append(torch.tensor([*range(low), *range(size - high, size)]))
    at = (slice(None), slice(None), *torch.meshgrid(*places, indexing="ij"))
    y = torch.einsum("bi...,io...->bo...", X[at], w)
    full = torch.zeros(X.shape[0], w.shape[1], *X.shape[2:], dtype=w.dtype)
    full = full.index_put(tuple(torch.meshgrid(torch.arange(full.shape[0]), torch.arange(full.shape[1]), *places,
                                               indexing="ij")), y)  # fmt: skip
    inverse = torch.fft.irfftn if real else torch.fft.ifftn
    return inverse(full, x.shape[2:], dims, norm="forward")


SPLITS = {
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    3: [(1, 1, 3, 1), (1, 3, 1, 1)],
    4: [(1, 1, 2, 2), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 4, 1), (4, 1, 1, 1)],
}.get(N, [(1, 1, N, 1)])


@pytest.mark.parametrize("modes", [(3, 2), ((2, 3), (3, 0))], ids=str)
def test_spectral_conv(modes):
    """Values and all derivatives, of the weight too, whose gradient is whole on each rank's own modes."""
    shape, out = (2, 3, 9, 7), 2
    X = randn(*shape)
    for grid in SPLITS:
        L = lay(*grid, shape=shape)
        place = F.spectral_layout(L, modes, 3, out)
        W = randn(*place.shape, 2)
        check_layer(
            lambda x, w: F.dist_spectral_conv(x, torch.view_as_complex(w), L, modes, params="invariant"),
            lambda x, w: serial_spectral(x, torch.view_as_complex(w), modes),
            [X, W],
            [L, lambda W: W[place.slices()].contiguous()],
            L.with_shape((2, out, 9, 7)),
            rtol=1e-12,
            name=str(grid),
        )


def test_spectral_conv_of_complex_numbers_and_other_sizes():
    """One weight for tensors of other sizes, odd and even; complex x has whole spectra; uneven and empty blocks."""
    wrong = []
    for real in (True, False):
        for grid in SPLITS:
            P = dd.Partition(grid)
            place = F.spectral_layout(P, (2, (2, 0) if real else (2, 1)), 2, 3, real=real)
            W = torch.complex(randn(*place.shape), randn(*place.shape, seed=1))
            for size in ((5, 4), (6, 5), (12, 9)):
                X = randn(3, 2, *size)
                X = X if real else torch.complex(X, randn(3, 2, *size, seed=4))
                L = dd.Layout(P, X.shape)
                modes = (2, (2, 0) if real else (2, 1))
                y = F.dist_spectral_conv(L.shard(X), place.shard(W), L, modes)
                wished = L.with_shape((3, 3, *size)).shard(serial_spectral(X, W, modes, real))
                if off(y, wished) > 1e-12:
                    wrong.append((real, grid, size))
    everywhere(wrong)


def test_no_rank_has_the_whole_weight():
    place = F.spectral_layout(dd.Partition((1, 1, N, 1)), (8, 8), 3, 3)
    blocks = [math.prod(place.local_shape(r)) for r in range(N)]
    assert sum(blocks) == math.prod(place.shape) and max(blocks) == math.prod(place.shape[:-1]) * -(-8 // N)


# ---------------------------------------------------------------- errors


def test_errors():
    P = dd.Partition((N, 1))
    L, x = dd.Layout(P, (8, 6)), randn(8, 6)
    x = L.shard(x)
    calls = {
        "no such norm": lambda: F.dist_fftn(x, L, None, norm="max"),
        "no dim 2": lambda: F.dist_fftn(x, L, (0, 2)),
        "named twice": lambda: F.dist_fftn(x, L, (0, -2)),
        "no dim to transform": lambda: F.dist_fftn(x, L, ()),
        "s does not fit": lambda: F.dist_fftn(x, L, (0, 1), s=(4,)),
        "keep does not fit": lambda: F.dist_fftn(x, L, (0, 1), keep=(4, 4, 4)),
        "no such wave numbers": lambda: F.dist_fftn(x, L, (0, 1), keep=(5, 2)),
        "and no negative ones": lambda: F.dist_rfftn(x, L, (0, 1), keep=(None, (2, 1))),
        "not a number of wave numbers": lambda: F.dist_fftn(x, L, (0, 1), keep=((1, 2, 3), None)),
        "nothing to transform": lambda: F.dist_fftn(x, L, (0, 1), s=(0, 3)),
        "is not known": lambda: F.dist_ifftn(x, L, (0, 1), keep=(4, 3)),
        "that keep says": lambda: F.dist_ifftn(x, L, (0, 1), s=(9, 9), keep=(2, 2)),
        "another number of dims": lambda: F.dist_fftn(x, L, (0, 1), P_out=dd.Partition((N,))),
        "of another shape": lambda: F.dist_fftn(x, L, (0, 1), P_out=dd.Layout(P, (3, 3))),
        "not the spectrum": lambda: F.dist_fftfreq(L, 0, 9),
        "batch, channels and space": lambda: F.dist_spectral_conv(x, x, L, 1),
    }
    for words, call in calls.items():
        raises_everywhere(PartitionError, call, words)
    if N > 1:
        one = dd.Layout(dd.Partition((N,)), (8,))
        raises_everywhere(
            PartitionError, lambda: F.dist_fftn(one.shard(randn(8)), one, None), "no other dim can be split"
        )
    raises_everywhere(ShapeError, lambda: F.dist_rfftn(x + 1j, L, None), "dist_rfftn", "float32 or float64")
    Q = dd.Layout(dd.Partition((1, 1, N)), (2, 2, 8))
    y, w = Q.shard(randn(2, 2, 8)), torch.zeros(2, 2, 9, dtype=torch.complex128)
    raises_everywhere(
        ShapeError, lambda: F.dist_spectral_conv(y, w, Q, 3), "w is not this rank's block", "spectral_layout"
    )
    raises_everywhere(PartitionError, lambda: F.dist_spectral_conv(y, w, Q, 6), "no such wave numbers")
    raises_everywhere(PartitionError, lambda: F.dist_spectral_conv(y, w, Q, None), "how many modes")


def test_checking_compares_calls():
    """Under checking a transform is what it is, its derivatives too."""
    L = lay(N, 1, shape=(6, 4))
    X = randn(6, 4)
    with dd.checking():
        g = torch.func.grad(lambda x: F.dist_sum(F.dist_fftn(x, L, None).abs() ** 2, F.fft_layout(L, None)))(L.shard(X))
    everywhere([off(g, 48 * L.shard(X))] if off(g, 48 * L.shard(X)) > 1e-12 else [])
    assert whole(X) is X
