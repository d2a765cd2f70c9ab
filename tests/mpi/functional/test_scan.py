"""Scans against loops and torch.cumsum: every way to split a tensor, derivatives, messages as numbers, and programs."""

import pytest
import torch
from registry import raises_everywhere
from serial import along, check_layer, layouts, randn, whole
from sweep import serial_scan
from torch.func import grad, jvp

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError
from distdl.testing import collective_assert, count_messages

WORLD = dd.world()
N = WORLD.size
SHAPE = (7, 3)
LINES = dd.Layout(dd.Partition((N, 1)), (23, 3))


def places(shape=SHAPE, dims=None):
    return layouts(shape, dims).items()


# ---------------------------------------------------------------- the linear recurrence


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_linear_recurrence(reverse):
    """Uneven and empty blocks, some of the ranks, grids; scanned along a split dim and along a whole one."""
    for name, L in places():
        for dim in (0, 1):
            check_layer(
                lambda a, b, L=L, dim=dim: F.dist_scan(a, b, L, dim, reverse=reverse),
                lambda a, b, dim=dim: serial_scan(a, b, dim, reverse=reverse),
                [randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)],
                [L, L],
                L,
                batched=(0, 1),
                name=f"{name}, dim {dim}",
                orders=2 if dim == 0 else 1,
            )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_from_an_initial_state(reverse):
    """As one value: its gradient is that of all uses. As copies: the gradients of all ranks add up to it."""
    for name, L in places(dims=(0,)):
        for params in ("invariant", "varying"):

            def call(a, b, h, L=L, params=params):
                h = F.mark_varying(h, L.partition, 0) if params == "varying" else h
                return F.dist_scan(a, b, L, 0, initial=h, params=params, reverse=reverse)

            check_layer(
                call,
                lambda a, b, h: serial_scan(a, b, 0, h, reverse),
                [randn(*SHAPE, seed=1), randn(*SHAPE, seed=2), randn(3, seed=3)],
                [L, L, along(L, 1)],
                L,
                name=f"{name}, {params}",
            )


def test_fewer_steps_than_ranks_zeros_and_ones():
    """Blocks without a step, anywhere; factors that end the memory, and those that keep all of it."""
    for splits in (None, ((0,) * (N - 1) + (3,), None), ((3,) + (0,) * (N - 1), None)):
        L = dd.Layout(dd.Partition((N, 1)), (3, 2), splits)
        for a in (torch.zeros(3, 2), torch.ones(3, 2), torch.tensor([[2.0, 0], [0, 3], [1, 1]])):
            check_layer(
                lambda a, b, h, L=L: F.dist_scan(a, b, L, 0, initial=h, params="invariant"),
                lambda a, b, h: serial_scan(a, b, 0, h),
                [a.double(), randn(3, 2, seed=2), randn(2, seed=3)],
                [L, L, along(L, 1)],
                L,
                name=f"{splits}, {a.tolist()}",
            )


def test_what_is_required_of_the_numbers():
    """Value, gradient and Hessian-vector product of 23 x 3 to the last digits."""
    A, B, V = randn(23, 3, seed=1), randn(23, 3, seed=2), randn(23, 3, seed=3)
    cube = lambda a, b: (serial_scan(a, b, 0) ** 3).sum()
    slope = grad(cube, (0, 1))
    bent = jvp(slope, (A, B), (V, V))[1]
    a, b, v = (LINES.shard(t) for t in (A, B, V))
    mine = grad(lambda a, b: (F.dist_scan(a, b, LINES, 0) ** 3).sum(), (0, 1))
    found = {
        "value": (F.dist_scan(a, b, LINES, 0), serial_scan(A, B, 0)),
        **{f"gradient {i}": pair for i, pair in enumerate(zip(mine(a, b), slope(A, B)))},
        **{f"hvp {i}": pair for i, pair in enumerate(zip(jvp(mine, (a, b), (v, v))[1], bent))},
    }
    off = {k: float((x - LINES.shard(y)).abs().max() / y.abs().max()) for k, (x, y) in found.items()}
    collective_assert(max(off.values()) < 5e-15, str(off))


@pytest.mark.parametrize("length", [23, 2300])
def test_messages_do_not_depend_on_the_length(length):
    """One pair of states of three float64 numbers to each of the others."""
    L = dd.Layout(dd.Partition((N, 1)), (length, 3))
    a, b = (L.shard(randn(length, 3, seed=i)).clone().requires_grad_() for i in (1, 2))
    with count_messages() as forward:
        h = F.dist_scan(a, b, L.partition, 0)
    with count_messages() as backward:
        h.sin().sum().backward()
    with count_messages() as bare:
        F.dist_cumsum(a, L.partition, 0)
    found = [(len(m), sum(m)) for m in ([size for _, _, size in s.of("send")] for s in (forward, backward, bare))]
    collective_assert(found == [(N - 1, 48 * (N - 1))] * 2 + [(N - 1, 24 * (N - 1))], str(found))


def test_half_precision_has_its_states_in_float32():
    """4,096 steps of a slow decay: in bfloat16 the state would not move any more."""
    L = dd.Layout(dd.Partition((N,)), (4096,))
    a, b = (torch.full((4096,), v, dtype=torch.bfloat16) for v in (0.996, 0.0078125))
    h = F.dist_scan(L.shard(a), L.shard(b), L, 0)
    want = serial_scan(a.float(), b.float(), 0)
    collective_assert(h.dtype == torch.bfloat16 and torch.allclose(h.float(), L.shard(want), rtol=5e-3))
    sums = F.dist_cumsum(L.shard(b), L, 0)
    collective_assert(torch.allclose(sums.float(), L.shard(b.float().cumsum(0)), rtol=5e-3))


def test_products_that_underflow_are_zero():
    """Nothing is divided: what a thousand steps of 1e-3 leave is 0, with every gradient finite."""
    L = dd.Layout(dd.Partition((N,)), (1000,))
    a, b = torch.full((1000,), 1e-3, dtype=torch.float64), randn(1000)
    slope = grad(lambda a: F.dist_scan(a, L.shard(b), L, 0).square().sum())(L.shard(a))
    want = grad(lambda a: serial_scan(a, b, 0).square().sum())(a)
    collective_assert(torch.allclose(slope, L.shard(want), rtol=1e-12))


def test_complex_and_mixed_dtypes():
    L = dd.Layout(dd.Partition((N, 1)), SHAPE)
    a, b = randn(*SHAPE, seed=1), torch.complex(randn(*SHAPE, seed=2), randn(*SHAPE, seed=3))
    for x, y in ((a, b), (b, b), (b, a), (a.float(), a), ((a * 3).long(), (a * 2).long())):
        h = F.dist_scan(L.shard(x), L.shard(y), L, 0)
        want = serial_scan(x, y.to(torch.promote_types(x.dtype, y.dtype)), 0)
        collective_assert(h.dtype == want.dtype and torch.allclose(h, L.shard(want)), f"{x.dtype}, {y.dtype}")


# ---------------------------------------------------------------- sums and products


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_cumulative(name, reverse):
    """With zeros, at which the gradient of a product is no quotient: one, two in different blocks, two in one."""
    call, serial = getattr(F, f"dist_{name}"), getattr(torch, name)
    X = randn(*SHAPE)
    X[1, 0] = X[1, 1] = X[5, 1] = X[4, 2] = X[5, 2] = 0
    for where, L in places():
        check_layer(
            lambda x, L=L: call(x, L, 0, reverse=reverse),
            lambda x: serial(x.flip(0), 0).flip(0) if reverse else serial(x, 0),
            [X],
            [L],
            L,
            name=where,
        )


def test_integers_as_torch():
    L = dd.Layout(dd.Partition((N,)), (5,))
    for dtype in (torch.bool, torch.int8, torch.int64):
        X = torch.tensor([1, 3, 0, 2, 1]).to(dtype)
        for name in ("cumsum", "cumprod"):
            y, want = getattr(F, f"dist_{name}")(L.shard(X), L.partition, 0), getattr(torch, name)(X, 0)
            collective_assert(y.dtype == want.dtype and torch.equal(y, L.shard(want)), f"{name} of {dtype}")


# ---------------------------------------------------------------- any operator


def products(x):
    """Products of matrices up to each place, the first on the right."""
    found = [x[0]]
    for m in x[1:]:
        found.append(m @ found[-1])
    return torch.stack(found)


def test_an_operator_that_does_not_commute():
    """2 x 2 matrices: dims that follow P's; no identity is asked for, and an empty block is never combined."""

    def then(a, b):
        assert a.shape[0] and a.shape == b.shape
        return b @ a

    X = randn(7, 2, 2)
    for name, line in places((7,)):
        L = dd.Layout(dd.Partition((*line.partition.shape, 1, 1), line.partition.ranks), X.shape, (
            line.splits[0] if line.splits else None, None, None))  # fmt: skip
        for P in (line, L):
            check_layer(
                lambda x, P=P: F.associative_scan(then, x, P, 0), products, [X], [L], L, name=f"{name}, {P.ndim} dims"
            )
        check_layer(
            lambda x, L=L: F.associative_scan(lambda a, b: then(b, a), x, L.partition, 0, reverse=True),
            lambda x: products(x.flip(0).mT).mT.flip(0),
            [X], [L], L, name=f"{name}, reverse",
        )  # fmt: skip


def test_pytrees():
    """The recurrence by its pairs, as a dictionary; and the largest so far with its place, in integers."""
    for name, L in places():
        check_layer(
            lambda a, b, L=L: F.associative_scan(
                lambda f, g: {"a": g["a"] * f["a"], "b": g["a"] * f["b"] + g["b"]}, {"b": b, "a": a}, L, 0
            )["b"],
            lambda a, b: serial_scan(a, b, 0),
            [randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)],
            [L, L],
            L,
            name=name,
        )

    def larger(one, two):
        take = two[0] > one[0]
        return torch.where(take, two[0], one[0]), torch.where(take, two[1], one[1])

    L = dd.Layout(dd.Partition((N,)), (9,))
    X = randn(9)
    values, where = F.associative_scan(larger, (L.shard(X), F.positions(L, 0)), L, 0)
    want = X.cummax(0)
    collective_assert(torch.equal(values, L.shard(want.values)) and torch.equal(where, L.shard(want.indices)))


def test_one_set_of_messages_for_all_leaves_and_examples():
    x = LINES.shard(randn(23, 3))
    then = lambda f, g: (f[0] + g[0], f[1] * g[1])
    with count_messages() as once:
        F.associative_scan(then, (x, x), LINES, 0)
    with count_messages() as three:
        torch.vmap(lambda x: F.associative_scan(then, (x, x), LINES, 0))(torch.stack([x] * 3))
    collective_assert(once.sends == three.sends == N - 1)


# ---------------------------------------------------------------- errors


def test_wrong_calls():
    L = dd.Layout(dd.Partition((N, 1)), (2 * N, 3))
    x = L.shard(randn(*L.shape))
    raises_everywhere(PartitionError, lambda: F.dist_scan(x, x, L, 2), "dist_scan", "no dim 2")
    raises_everywhere(ShapeError, lambda: F.dist_scan(x[:1], x, L, 0), "a is not laid out as b")
    raises_everywhere(ShapeError, lambda: F.dist_scan(x, x[:1], L, 0), "x is not this rank's block")
    raises_everywhere(ShapeError, lambda: F.dist_scan(x, x, L, 0, initial=x), "initial is not one state", "(3,)")
    raises_everywhere(ShapeError, lambda: F.dist_scan(x, x, L, 0, initial=1.0), "initial is not one state", "float")
    raises_everywhere(PartitionError, lambda: F.dist_scan(x, x, L, 0, initial=x[0], params="equal"), "kind of param")
    raises_everywhere(ShapeError, lambda: F.dist_cumsum(x[:1], L, 0), "dist_cumsum", "this rank's block")
    raises_everywhere(ShapeError, lambda: F.associative_scan(lambda a, b: a[:0], x, L, 0), "something else")
    raises_everywhere(ShapeError, lambda: F.associative_scan(lambda a, b: (a, b), x, L, 0), "something else")
    raises_everywhere(ShapeError, lambda: F.associative_scan(torch.add, (x, x[:1]), L.partition, 0), "lengths")
    raises_everywhere(ShapeError, lambda: F.associative_scan(torch.add, x[0], L, 0), "fewer dims")
    raises_everywhere(ShapeError, lambda: F.associative_scan(torch.add, [], L, 0), "associative_scan")


# ---------------------------------------------------------------- programs


def selective(x, w, scan):
    """Gu & Dao's selective scan (arXiv:2312.00752, algorithm 2): step sizes, input and output matrices of the input."""
    step = torch.nn.functional.softplus(x @ w["step"])  # (batch, length, channels)
    decay = torch.exp(step[..., None] * -w["log_a"].exp())  # (batch, length, channels, states)
    drive = (step * x)[..., None] * (x @ w["in"])[:, :, None]
    h = scan(decay, drive)
    return (h * (x @ w["out"])[:, :, None]).sum(-1) + w["skip"] * x


def test_a_selective_state_space_block():
    """A block of Mamba without its projections: a causal depthwise convolution, then the selective scan; the sequence
    is split, and weights are one value on all ranks."""
    batch, length, channels, states = 2, 11, 3, 4
    L = dd.Layout(dd.Partition((1, N, 1)), (batch, length, channels))
    S = dd.Layout(dd.Partition((1, N, 1, 1)), (batch, length, channels, states))
    C = dd.Layout(dd.Partition((1, 1, N)), (batch, channels, length))
    sizes = {"conv": (channels, 1, 4), "step": (channels, channels), "log_a": (channels, states)}
    sizes |= {"in": (channels, states), "out": (channels, states), "skip": (channels,)}
    W = [randn(*size, seed=5 + i) / 2 for i, size in enumerate(sizes.values())]

    def dist(x, *w):
        w = dict(zip(sizes, F.replicated("invariant", L, (0, 1, 2), *w)))
        wide = dd.HaloSpec(C, (0, 0, 3), (0, 0, 0), boundary="zeros")
        seen = F.halo_exchange(x.movedim(2, 1), wide)
        y = torch.nn.functional.conv1d(seen, w["conv"], groups=channels).movedim(1, 2) if x.numel() else x
        return selective(torch.nn.functional.silu(y), w, lambda a, b: F.dist_scan(a, b, S, 1))

    def serial(x, *w):
        w = dict(zip(sizes, w))
        seen = torch.nn.functional.pad(x.movedim(2, 1), (3, 0))
        y = torch.nn.functional.conv1d(seen, w["conv"], groups=channels).movedim(1, 2)
        return selective(torch.nn.functional.silu(y), w, lambda a, b: serial_scan(a, b, 1))

    check_layer(dist, serial, [randn(batch, length, channels), *W], [L, *[whole] * len(W)], L, rtol=1e-9)


def test_a_filter_with_feedback():
    """y_t = Σ_i b_i x_{t-i} - Σ_j a_j y_{t-j} of order two: a scan of the companion matrix (a causal halo for b)."""
    b, a = (0.2, 0.3, 0.1), (-1.2, 0.5)
    X = randn(29)
    y = [0.0, 0.0]
    for t in range(29):
        y.append(sum(b[i] * X[t - i] for i in range(3) if t >= i) - a[0] * y[-1] - a[1] * y[-2])
    L = dd.Layout(dd.Partition((N,)), (29,))
    seen = F.halo_exchange(L.shard(X), dd.HaloSpec(L, 2, 0, boundary="zeros"))
    n = L.local_shape()[0]
    drive = sum(b[i] * seen[2 - i : 2 - i + n] for i in range(3))
    M = torch.tensor([[-a[0], -a[1]], [1, 0]], dtype=torch.float64).expand(n, 2, 2)
    v = torch.stack([drive, torch.zeros_like(drive)], -1)[..., None]
    then = lambda f, g: (g[0] @ f[0], g[0] @ f[1] + g[1])
    found = F.associative_scan(then, (M, v), L, 0)[1][:, 0, 0]
    collective_assert(torch.allclose(found, L.shard(torch.stack(y[2:])), rtol=1e-12, atol=1e-14))


def thomas(lower, diagonal, upper, right, L):
    """A tridiagonal system by three scans (Stone 1973): the pivots d_t = diagonal_t - lower_t upper_{t-1} / d_{t-1} are
    ratios of what a product of 2 x 2 matrices gives; then two linear recurrences, there and back."""
    before = F.halo_exchange(upper, dd.HaloSpec(L, 1, 0, boundary="zeros"))[: upper.shape[0]]
    M = torch.stack([torch.stack([diagonal, -lower * before], -1),
                     torch.stack([torch.ones_like(lower), torch.zeros_like(lower)], -1)], -2)  # fmt: skip

    def then(f, g):
        m = g @ f
        return m / m.abs().amax((-2, -1), keepdim=True).detach()  # ratios only: products grow

    P = F.associative_scan(then, M, L, 0)
    pivot = P[:, 0, 0] / P[:, 1, 0]
    there = F.halo_exchange(pivot, dd.HaloSpec(L, 1, 0, boundary="none"))
    last = (
        there[: lower.shape[0]] if there.shape[0] == lower.shape[0] + 1 else torch.cat([there[:1] * 0 + 1, there[:-1]])
    )
    y = F.dist_scan(-lower / last, right, L, 0)
    return F.dist_scan(-upper / pivot, y / pivot, L, 0, reverse=True)


def test_a_tridiagonal_solve():
    n = 17
    L = dd.Layout(dd.Partition((N,)), (n,))
    lower, upper, right = randn(n, seed=1), randn(n, seed=2), randn(n, seed=3)
    lower[0] = upper[-1] = 0
    diagonal = 3 + randn(n, seed=4).abs()

    def serial(lower, diagonal, upper, right):
        return torch.linalg.solve(diagonal.diag() + lower[1:].diag(-1) + upper[:-1].diag(1), right)

    check_layer(
        lambda *some: thomas(*some, L), serial, [lower, diagonal, upper, right], [L] * 4, L,
        argnums=(1, 3), batched=(3,), rtol=1e-9,
    )  # fmt: skip


def test_a_long_convolution():
    """As long as the sequence, causal: by Fourier transforms of twice the length it is the direct one."""
    n = 21
    L = dd.Layout(dd.Partition((1, N)), (2, n))
    twice = 2 * n

    def dist(x, k):
        M = F.fft_layout(L, (1,), s=(twice,))
        spectra = F.dist_fftn(x, L, (1,), s=(twice,)) * F.dist_fftn(k, L, (1,), s=(twice,))
        whole_length = F.dist_ifftn(spectra, M, (1,), P_out=dd.Layout(L.partition, (2, twice))).real
        return F.repartition(F.dist_pad(whole_length, dd.Layout(L.partition, (2, twice)), (0, n - twice)),
                             F.pad_layout(dd.Layout(L.partition, (2, twice)), (0, n - twice)), L)  # fmt: skip

    def direct(x, k):
        return torch.stack([sum(k[:, s] * x[:, t - s] for s in range(t + 1)) for t in range(n)], 1)

    check_layer(dist, direct, [randn(2, n, seed=1), randn(2, n, seed=2)], [L, L], L, rtol=1e-9)


def test_single_precision_of_a_long_line_is_as_good_as_a_loop():
    L = dd.Layout(dd.Partition((N,)), (5000,))
    a, b = 1 - randn(5000, seed=1).abs() / 50, randn(5000, seed=2)
    h, want = F.dist_scan(L.shard(a).float(), L.shard(b).float(), L, 0), serial_scan(a, b, 0)
    off = (h - L.shard(want)).abs().max() / want.abs().max()
    loop = (serial_scan(a.float(), b.float(), 0) - want).abs().max() / want.abs().max()
    collective_assert(off < 4 * loop, f"{off} against {loop}")
