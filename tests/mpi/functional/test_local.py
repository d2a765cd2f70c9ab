"""Untied filters, L2 pooling and local contrast normalisation against the same equations written with torch's unfold
and pad."""

import math
import random

import pytest
import torch
import torch.nn.functional as tf
from convolutions import random_layout
from serial import check_layer, layouts, messages, randn
from torch.func import grad, hessian, jvp

import distdl as dd
import distdl.functional as F

CONV = {1: tf.conv1d, 2: tf.conv2d, 3: tf.conv3d}


def patches(x, kernel, stride):
    """(b, c, *out, *kernel), pixel by pixel."""
    sizes = [(m - k) // s + 1 for m, k, s in zip(x.shape[2:], kernel, stride)]
    places = torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes))
    cut = lambda p: x[
        (slice(None), slice(None), *(slice(a * s, a * s + k) for a, s, k in zip(map(int, p), stride, kernel)))
    ]
    return torch.stack([cut(p) for p in places], 2).reshape(*x.shape[:2], *sizes, *kernel)


def serial_conv(x, w, stride):
    n = x.dim() - 2
    z = patches(x, w.shape[-n:], stride)
    return (z.unsqueeze(1) * w.movedim(n + 1, 1)).sum((2, *range(-n, 0)))


def serial_l2(x, kernel, stride):
    square = patches(x, kernel, stride).square().sum(tuple(range(-len(kernel), 0)))
    return torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), 0)


def serial_lcn(x, kernel):
    """The equations of the docstring, the window made from its definition."""
    n, c = x.dim() - 2, x.shape[1]
    places = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) - (k - 1) / 2 for k in kernel)).reshape(-1, n)
    deviation = math.sqrt(sum(((k - 1) / 2) ** 2 for k in kernel)) / 3 or 1.0
    w = torch.exp(-(places**2).sum(1) / (2 * deviation**2)).reshape(kernel).to(x.dtype)
    w = (w / w.sum() / c).expand(1, c, *kernel)
    v = x - CONV[n](x, w, padding=tuple(k // 2 for k in kernel))
    square = CONV[n](v**2, w, padding=tuple(k // 2 for k in kernel))
    return v / torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), 1)


def weight_place(out):
    """Cuts w (filters, *out, channels, *kernel) as the output of layout ``out`` is cut; all of it on a rank outside."""

    def part(w):
        box = out.box()
        return w if box is None else w[tuple(slice(a, b) for a, b in box[1:])]

    return part


def check_conv(x, filters, kernel, stride, L, orders=2):
    out = F.conv_layout(L, filters, kernel, stride)
    w = randn(filters, *out.shape[2:], x.shape[1], *kernel, seed=3)
    place = weight_place(out)
    check_layer(
        lambda x, w: F.dist_local_conv(x, w, L, stride=stride, params="invariant"),
        lambda x, w: serial_conv(x, w, stride),
        [x, w],
        [L, place],
        out,
        orders=orders,
        name=f"{L} {kernel} {stride}",
    )
    y = randn(*out.shape, seed=4)
    fold = lambda y, w: torch.func.vjp(lambda x: serial_conv(x, w, stride), x)[1](y)[0]
    check_layer(
        lambda y, w: F.dist_local_conv_transpose(y, w, out, stride=stride, output_size=L, params="invariant"),
        fold,
        [y, w],
        [out, place],
        L,
        orders=orders,
        name=f"transpose {L} {kernel} {stride}",
    )


@pytest.mark.parametrize("kernel, stride", [((3, 3), (1, 1)), ((2, 4), (2, 3)), ((5, 1), (1, 2))], ids=str)
def test_local_conv(kernel, stride):
    x = randn(2, 3, 8, 7)
    for L in layouts(x.shape, (2, 3, 0, 1), grids=kernel == (2, 4)).values():
        check_conv(x, 4, kernel, stride, L)


@pytest.mark.parametrize("count", [25, pytest.param(250, marks=pytest.mark.slow)])
def test_random(count):
    """1 to 3 dims; kernels wider than blocks; ranks without pixels, filters or channels."""
    generator = random.Random(5)
    for _ in range(count):
        n = generator.randint(1, 3)
        pick = lambda a, b: tuple(generator.randint(a, b) for _ in range(n))
        space, kernel, stride = pick(2, 7), pick(1, 4), pick(1, 3)
        if any(k > m for k, m in zip(kernel, space)):
            continue
        x = randn(2, 2, *space)
        L = random_layout(generator, tuple(x.shape), skip=())
        check_conv(x, generator.randint(1, 4), kernel, stride, L, 1)
        out = F.pool_layout(L, kernel, stride)
        check_layer(
            lambda x: F.dist_l2_pool(x, L, kernel, stride),
            lambda x: serial_l2(x, kernel, stride),
            [x],
            [L],
            out,
            orders=1,
            name=f"{L} {kernel} {stride}",
        )
        odd = (3, *(2 * (k // 2) + 1 for k in kernel[1:]))  # of one pixel and two channels, y would hardly depend on x
        check_layer(
            lambda x: F.dist_lcn(x, L, odd), lambda x: serial_lcn(x, odd), [x], [L], L, orders=1, name=f"{L} {odd}"
        )


def test_transpose_sizes():
    """Every input size that has the same output: the default is the least; the rest is zero."""
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n)), (2, 3, 4))
    y, w = randn(2, 3, 4), randn(3, 4, 2, 2, seed=1)
    for size, extra in ((None, 0), (11, 0), (12, 1), (13, 2)):
        out = dd.Layout(L.partition, (2, 2, size or 11))
        x = torch.zeros(2, 2, 11 + extra, dtype=y.dtype)
        fold = lambda y, w: torch.func.vjp(lambda x: serial_conv(x, w, (3,)), x)[1](y)[0]
        check_layer(
            lambda y, w: F.dist_local_conv_transpose(y, w, L, stride=3, output_size=size),
            fold,
            [y, w],
            [L, weight_place(L)],
            out,
            name=f"{size}",
        )


def test_bare_partitions():
    """Shapes are negotiated, on uneven blocks; a rank outside takes part in every transform."""
    n = dd.world().size
    L = layouts((2, 3, 9), (2,))["splits" if n > 1 else "alone"]
    out = F.conv_layout(L, 2, 3)
    x, w = randn(2, 3, 9), randn(2, 7, 3, 3, seed=3)
    P = L.partition
    check_layer(
        lambda x, w: F.dist_local_conv(x, w, P),
        lambda x, w: serial_conv(x, w, (1,)),
        [x, w],
        [L, weight_place(out)],
        out,
    )
    check_layer(lambda x: F.dist_lcn(x, P, 5), lambda x: serial_lcn(x, (5,)), [x], [L], L)
    check_layer(
        lambda x: F.dist_l2_pool(x, L.partition, 3, 1),
        lambda x: serial_l2(x, (3,), (1,)),
        [x],
        [L],
        F.pool_layout(L, 3, 1),
    )


@pytest.mark.parametrize("args", [((2, 2), (2, 2)), ((3, 2), (1, 2)), ((5, 5), (2, 1))], ids=str)
def test_l2_pool(args):
    x = randn(2, 3, 8, 7)
    for L in layouts(x.shape, (2, 3, 1)).values():
        check_layer(
            lambda x: F.dist_l2_pool(x, L, *args),
            lambda x: serial_l2(x, *args),
            [x],
            [L],
            F.pool_layout(L, *args),
            name=f"{L} {args}",
        )


@pytest.mark.parametrize("kernel", [(3, 3), (5, 1), (7, 9)], ids=str)
def test_lcn(kernel):
    """Also windows wider than a block, and split channels."""
    x = randn(2, 3, 8, 7)
    for L in layouts(x.shape, (2, 3, 1)).values():
        check_layer(
            lambda x: F.dist_lcn(x, L, kernel), lambda x: serial_lcn(x, kernel), [x], [L], L, name=f"{L} {kernel}"
        )


def test_zero_windows():
    """Zeros have zero derivatives of every order and mode, beside windows that have the usual ones."""
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n, 1)), (1, 2, 10, 6))
    X = randn(*L.shape)
    X[:, :, 2:7] = 0
    x, v = L.shard(X), L.shard(randn(*L.shape, seed=1))
    zero = (X == 0).all(1, keepdim=True).expand(X.shape)
    for name, f, serial, reach in (
        ("L2 pool", lambda x: F.dist_l2_pool(x, L, (2, 3)), lambda x: serial_l2(x, (2, 3), (2, 3)), 1),
        ("LCN", lambda x: F.dist_lcn(x, L, 3), lambda x: serial_lcn(x, (3, 3)), 2),
    ):
        found = dict(
            value=f(x),
            grad=grad(lambda x: (f(x) ** 3).sum())(x),
            jvp=jvp(f, (x,), (v,))[1],
            hvp=jvp(grad(lambda x: (f(x) ** 3).sum()), (x,), (v,))[1],
        )
        dd.testing.collective_assert(all(t.isfinite().all() for t in found.values()), f"{name}: not finite")
        out = F.pool_layout(L, (2, 3)) if name == "L2 pool" else L
        check_layer(f, serial, [X], [L], out, name=name)
        if n == 1:
            middle = found["grad"][:, :, 2 + reach : 7 - reach]
            assert not middle.any() and zero.any()
    small = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    alone = dd.Partition((1, 1, 1, 1), ranks=(dd.world().rank,))
    for f in (lambda x: F.dist_l2_pool(x, alone, 2), lambda x: F.dist_lcn(x, alone, 3)):
        dd.testing.collective_assert(not hessian(lambda x: f(x).sum())(small).any(), "second derivative at zero")


def test_dtypes():
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n)), (1, 2, 9))
    x, w = randn(1, 2, 9), randn(3, 7, 2, 3, seed=1)
    out = F.conv_layout(L, 3, 3)
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        check_layer(
            lambda x, w: F.dist_local_conv(x, w, L),
            lambda x, w: serial_conv(x, w, (1,)),
            [x.to(dtype), w.to(dtype)],
            [L, weight_place(out)],
            out,
            orders=1,
            rtol=rtol,
        )
        check_layer(
            lambda x: F.dist_lcn(x, L, 3),
            lambda x: serial_lcn(x.float(), (3,)).to(dtype),
            [x.to(dtype)],
            [L],
            L,
            orders=1,
            rtol=rtol,
        )


def test_messages():
    """w's gradient sends nothing; LCN's two halo exchanges carry one channel each, both ways."""
    n, r = dd.world().size, dd.world().rank
    L = dd.Layout(dd.Partition((1, 1, n)), (2, 3, 4 * n + 2), (None, None, (*(4,) * (n - 1), 6)))
    out = F.conv_layout(L, 5, 3)  # 4 outputs on each rank
    x, w = L.shard(randn(*L.shape)), weight_place(out)(randn(5, 4 * n, 3, 3, seed=1))
    found = messages(lambda: F.dist_local_conv(x, w, L))
    dd.testing.collective_assert(found == ((r > 0), (r > 0) * 2 * 3 * 2, 0, 0, 0), f"forward {found}")
    found = messages(lambda: grad(lambda w: F.dist_local_conv(x, w, L, params="invariant").sum())(w))
    dd.testing.collective_assert(
        found[:2] == ((r > 0), (r > 0) * 2 * 3 * 2) and found[2:] == (0, 0, 0), f"gradient of w {found}"
    )
    sides = (r > 0) + (r < n - 1)
    found = messages(lambda: F.dist_lcn(x, L, 5))
    dd.testing.collective_assert(found == (2 * sides, 2 * sides * 2 * 2, 0, 0, 0), f"LCN {found}")
    found = messages(lambda: grad(lambda x: F.dist_lcn(x, L, 5).square().sum())(x))
    dd.testing.collective_assert(found == (4 * sides, 4 * sides * 2 * 2, 0, 0, 0), f"LCN and its gradient {found}")


def test_bad_input():
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n)), (1, 2, 9))
    x, w = L.shard(randn(1, 2, 9)), weight_place(F.conv_layout(L, 3, 3))(randn(3, 7, 2, 3, seed=1))
    more = torch.cat([w, w], 1)
    for text, call in {
        "4, 6 or 8 dims": lambda: F.dist_local_conv(x, w[0], L),
        "output block": lambda: F.dist_local_conv(x, torch.cat([more, w], 1), L),
        "does not fit this rank's": lambda: F.dist_local_conv(x, w[:, :, :1], L),
        "larger than the padded input": lambda: F.dist_local_conv(x, w.new_zeros(3, 1, 2, 10), L),
        "not a legal window": lambda: F.dist_local_conv(x, w, L, stride=0),
        "not a legal output_size": lambda: F.dist_local_conv_transpose(
            torch.zeros(1, 3, w.shape[1]), w, F.conv_layout(L, 3, 3), output_size=10
        ),
        "odd sizes": lambda: F.dist_lcn(x, L, 4),
        "batch, channel and": lambda: F.dist_lcn(x[0], dd.Layout(dd.Partition((1, n)), (2, 9)), 3),
        "unknown kind of parameters": lambda: F.dist_local_conv(x, w, L, params="shared"),
    }.items():
        with pytest.raises((dd.errors.PartitionError, dd.errors.ShapeError), match=text):
            call()
