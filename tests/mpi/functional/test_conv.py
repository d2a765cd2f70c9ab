"""Convolutions against serial torch: every argument, split batch, space and channels, and the general form."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as tf
from convolutions import random_case, random_layout, serial_conv
from registry import here
from serial import along, check_layer, layouts, messages, randn, whole

import distdl as dd
import distdl.functional as F
from distdl.errors import ShapeError

LAYOUTS = ("root", "replicated", "invariant", "sharded")
CONV_TRANSPOSE = {1: tf.conv_transpose1d, 2: tf.conv_transpose2d, 3: tf.conv_transpose3d}


def check(x, w, b, L, orders=2, batched=(0,), **options):
    """dist_conv over L equals the serial convolution; parameters whole and invariant."""
    serial = lambda *t: serial_conv(*t, **options)
    y = serial(x, w, b)
    out = F.conv_layout(
        L,
        w.shape[0],
        tuple(w.shape[2:]),
        options.get("stride", 1),
        options.get("padding", 0),
        options.get("dilation", 1),
    )
    assert out.shape == tuple(y.shape)
    check_layer(
        lambda x, w, b: F.dist_conv(x, w, L, b, params="invariant", **options),
        serial,
        [x, w, b],
        [L, whole, whole],
        out,
        orders=orders,
        batched=batched,
        name=f"{L} {options}",
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(padding=1),
        dict(padding="same"),
        dict(padding="valid"),
        dict(stride=2, padding=(2, 0)),
        dict(dilation=2, padding=2),
        dict(groups=2, padding=1),
        dict(padding=1, padding_mode="circular"),
        dict(padding=(2, 1), padding_mode="reflect"),
        dict(padding=2, padding_mode="replicate"),
    ],
    ids=str,
)
def test_all_derivatives(options):
    x, w, b = randn(2, 4, 7, 5), randn(6, 4 // options.get("groups", 1), 3, 3, seed=1), randn(6, seed=2)
    for L in layouts(x.shape, (2, 3, 0)).values():
        check(x, w, b, L, **options)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_dims(n):
    x, w, b = randn(2, 2, *(6, 5, 4)[:n]), randn(3, 2, *(3, 2, 3)[:n], seed=1), randn(3, seed=2)
    for L in layouts(x.shape, tuple(range(2, 2 + n)), grids=False).values():
        check(x, w, b, L, orders=1, padding=1)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of the serial twin
@pytest.mark.parametrize("kernel, stride, padding, dilation", [
    ((7, 7), 2, 3, 1),  # 28: ResNet's stem
    ((4, 4), 4, 0, 1),  # 28: patch embedding
    ((2, 4), 1, "same", 1), ((4, 2), 3, 1, 2),  # 27: even kernels
    ((1, 1), 1, 1, 1),  # 26: padding beyond (K - 1) / 2
])  # fmt: skip
def test_windows(kernel, stride, padding, dilation):
    x, w, b = randn(2, 3, 12, 13), randn(4, 3, *kernel, seed=1), randn(4, seed=2)
    for L in layouts(x.shape, (3, 2)).values():
        check(x, w, b, L, orders=1, stride=stride, padding=padding, dilation=dilation)


@pytest.mark.parametrize(
    "p, n, k, s, d, pad",
    [
        (4, 6, 5, 1, 1, 2),
        (4, 16, 7, 1, 1, 0),
        (3, 20, 7, 1, 2, 0),
        (4, 12, 3, 1, 4, 4),
        (3, 4, 1, 1, 1, 1),
        (4, 5, 2, 2, 1, 0),
    ],
)
def test_case_26_halos_wider_than_blocks(p, n, k, s, d, pad):
    if dd.world().size < p:
        pytest.skip(f"needs {p} ranks")
    L = dd.Layout(dd.Partition((1, 1, p)), (2, 2, n))
    check(randn(2, 2, n), randn(2, 2, k, seed=1), randn(2, seed=2), L, stride=s, dilation=d, padding=pad)


def test_case_30_uneven_widths():
    n = dd.world().size
    widths = ([22, 20, 20, 22] + [1] * n)[:n]
    L = dd.Layout(dd.Partition((1, 1, n)), (1, 2, sum(widths)), (None, None, widths))
    check(randn(1, 2, sum(widths)), randn(2, 2, 3, seed=1), randn(2, seed=2), L, padding=1)


def test_case_29_frozen():
    """Neither a frozen input nor frozen weights change who sends what."""
    L = dd.Layout(dd.Partition((1, 1, dd.world().size)), (1, 2, 9))
    x, w, b = L.shard(randn(1, 2, 9)), randn(2, 2, 3, seed=1), randn(2, seed=2)
    full = [t.clone().requires_grad_() for t in (x, w, b)]
    F.dist_conv(full[0], full[1], L, full[2], padding=1, params="invariant").square().sum().backward()
    for frozen in ((0,), (1, 2), (2,)):
        some = [t.clone().requires_grad_(i not in frozen) for i, t in enumerate((x, w, b))]
        F.dist_conv(some[0], some[1], L, some[2], padding=1, params="invariant").square().sum().backward()
        for i, (a, c) in enumerate(zip(some, full)):
            dd.testing.collective_assert(
                i in frozen or torch.equal(a.grad, c.grad), f"gradient {i} with {frozen} frozen"
            )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_random(transposed, count):
    generator = random.Random(7 + transposed)
    for i in range(count):
        x, w, b, options = random_case(generator, transposed)
        L = random_layout(generator, tuple(x.shape))
        if not transposed:
            check(x, w, b, L, orders=1 if i % 5 else 2, **options)
            continue
        serial = lambda x, w, b, o=options: CONV_TRANSPOSE[w.dim() - 2](
            x, w, b, o["stride"], o["padding"], o["output_padding"], o["groups"], o["dilation"]
        )
        out = F.conv_transpose_layout(
            L,
            b.shape[0],
            tuple(w.shape[2:]),
            options["stride"],
            options["padding"],
            options["output_padding"],
            options["dilation"],
        )
        check_layer(
            lambda x, w, b, L=L, o=options: F.dist_conv_transpose(x, w, L, b, params="invariant", **o),
            serial,
            [x, w, b],
            [L, whole, whole],
            out,
            orders=1 if i % 5 else 2,
            name=f"{L} {options}",
        )


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_split_channels(groups):
    """The all-gather form: blocks of output channels, which may cut groups; with a (batch, channel, space) grid too."""
    n = dd.world().size
    x, w, b = randn(2, 6, 7), randn(12, 6 // groups, 3, seed=1), randn(12, seed=2)
    grids = [(1, n, 1)] + ([(1, 2, 2), (2, 2, 1)] if n == 4 else [])
    for grid in grids:
        L = dd.Layout(dd.Partition(grid), x.shape)
        out = F.conv_layout(L, 12, 3, padding=1)
        for total in (12, None):
            check_layer(
                lambda x, w, b, L=L, t=total: F.dist_conv(
                    x, w, L, b, padding=1, groups=groups, out_channels=t, params="invariant"
                ),
                lambda x, w, b: tf.conv1d(x, w, b, 1, 1, 1, groups),
                [x, w, b],
                [L, along(out, 1), along(out, 1)],
                out,
                orders=2 if total else 0,
                name=f"{grid} groups {groups}",
            )


@pytest.mark.parametrize("groups", [1, 4])
def test_split_channels_transposed(groups):
    n = dd.world().size
    if groups % n and groups > 1:
        pytest.skip("ranks need whole groups")
    x, w, b = randn(2, 4, 5), randn(4, 8 // groups, 3, seed=1), randn(8, seed=2)
    L = dd.Layout(dd.Partition((1, n, 1)), x.shape)
    out = F.conv_transpose_layout(L, 8, 3, 2, 1, 1)
    place = (lambda w: w[:, out.slices()[1]]) if groups == 1 else along(L, 1)
    check_layer(
        lambda x, w, b: F.dist_conv_transpose(
            x, w, L, b, stride=2, padding=1, output_padding=1, groups=groups, out_channels=8, params="invariant"
        ),
        lambda x, w, b: tf.conv_transpose1d(x, w, b, 2, 1, 1, groups),
        [x, w, b],
        [L, place, along(out, 1)],
        out,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("x_layout, y_layout", list(itertools.product(LAYOUTS, repeat=2)))
def test_general_form(x_layout, y_layout, transposed):
    """(batch, out, in, *space): every way in which x may lie along *out* and y along *in*."""
    world = dd.world()
    grids = {
        1: [(1, 1, 1, 1)],
        2: [(1, 2, 1, 1), (1, 1, 2, 1)],
        3: [(1, 3, 1, 1), (1, 1, 3, 1)],
        4: [(1, 2, 2, 1), (1, 2, 1, 2), (2, 1, 2, 1)],
    }.get(world.size, [])
    x, b = randn(2, 7, 6), randn(5, seed=2)
    w = randn(7, 5, 3, seed=1) if transposed else randn(5, 7, 3, seed=1)
    conv, serial = (F.dist_conv_transpose, tf.conv_transpose1d) if transposed else (F.dist_conv, tf.conv1d)
    for grid in grids:
        P = dd.Partition(grid)
        blocks = dd.Layout(P, (2, 5, 7, 6))  # where this rank's (batch, out, in, space) lies
        batch, out, in_, space = blocks.slices()
        i_out, i_in = P.index()[1:3]

        def part(t, channels, share, k, i, space=space, batch=batch):
            """This rank's part of x or y along the dim that copies it."""
            t = t[batch, channels, space]
            if share == "sharded":
                (a, e) = dd.Layout(dd.Partition((k,)), (t.shape[1],)).blocks(0)[i]
                return t[:, a:e]
            return t[:0] if share == "root" and i else t

        x_place = lambda t, i_out=i_out, grid=grid: part(t, in_, x_layout, grid[1], i_out)
        y_place = lambda t, i_in=i_in, grid=grid: part(t, out, y_layout, grid[2], i_in)
        w_place = (lambda t: t[in_, out]) if transposed else (lambda t: t[out, in_])
        places, check_grads = [x_place, w_place, lambda t: t[out]], {"orders": 2}
        if (x_layout == "replicated" and grid[1] > 1) or (y_layout == "replicated" and grid[2] > 1):
            check_grads = {"orders": 0}  # independent copies: each has a part of the gradient; see test_linear's sums
        check_layer(
            lambda x, w, b, P=P: conv(x, w, P, b, padding=1, x_layout=x_layout, y_layout=y_layout, params="invariant"),
            lambda x, w, b: serial(x, w, b, padding=1),
            [x, w, b],
            places,
            y_place,
            active=True,
            batched=(),
            name=f"{grid} {x_layout} {y_layout}",
            **check_grads,
        )


def test_bare_partitions_and_inactive_ranks():
    n = dd.world().size
    x, w, b = randn(2, 3, 9, 4), randn(2, 3, 3, 3, seed=1), randn(2, seed=2)
    P = dd.Partition((1, 1, max(n - 1, 1), 1), tuple(range(n))[-max(n - 1, 1) :])
    L = dd.Layout(P, x.shape)
    for shape in (None, x.shape):
        y = F.dist_conv(L.shard(x), w, P, b, padding=1, shape=shape)
        expected = L.with_shape((2, 2, 9, 4)).shard(tf.conv2d(x, w, b, padding=1))
        dd.testing.collective_assert(
            not L.active or torch.allclose(y, expected, rtol=1e-10, atol=1e-10), "another value"
        )
        dd.testing.collective_assert(L.active or y.shape[0] == 0, "an inactive rank has elements")


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_low_precision(dtype, rtol):
    x, w, b = (
        randn(1, 2, 8, dtype=torch.float64).to(dtype),
        randn(2, 2, 3, seed=1).to(dtype),
        randn(2, seed=2).to(dtype),
    )
    L = dd.Layout(dd.Partition((1, 1, dd.world().size)), x.shape)
    check_layer(
        lambda x, w, b: F.dist_conv(x, w, L, b, padding=1, params="invariant"),
        lambda x, w, b: tf.conv1d(x, w, b, padding=1),
        [x, w, b],
        [L, whole, whole],
        L,
        orders=1,
        rtol=rtol,
    )


def test_messages():
    """One message from each neighbour with just the ghosts, the same back, and one all-reduce of w and b together."""
    n, r = dd.world().size, dd.world().rank
    L = dd.Layout(dd.Partition((1, 1, n, 1)), (2, 3, 4 * n, 5))
    x, w, b = (
        t.requires_grad_() for t in (L.shard(randn(*L.shape)).clone(), randn(4, 3, 3, 3, seed=1), randn(4, seed=2))
    )
    y = [None]

    def forward():
        y[0] = F.dist_conv(x, w, L, b, padding=1, params="invariant")

    neighbours = (r > 0) + (r < n - 1)
    found = messages(forward)
    dd.testing.collective_assert(found == (neighbours, neighbours * 2 * 3 * 5, 0, 0, 0), f"forward {found}")
    found = messages(lambda: y[0].sum().backward())
    reduced = (1, w.numel() + b.numel()) if n > 1 else (0, 0)
    dd.testing.collective_assert(found == (neighbours, neighbours * 2 * 3 * 5, *reduced, 0), f"backward {found}")


def test_bad_input():
    L = dd.Layout(dd.Partition((1, 1, dd.world().size)), (2, 3, 9))
    x, w = L.shard(randn(2, 3, 9)), randn(2, 3, 3, seed=1)
    for text, call in {
        "input channels": lambda: F.dist_conv(x, w[:, :2], L),
        "padding_mode": lambda: F.dist_conv(x, w, L, padding_mode="mirror"),
        "larger than the padded input": lambda: F.dist_conv(x, randn(2, 3, 12), L),
        "stride 1": lambda: F.dist_conv(x, w, L, padding="same", stride=2),
        "groups": lambda: F.dist_conv(x, randn(2, 1, 3), L, groups=3),
        "batch, channel": lambda: F.dist_conv(x, randn(2, 3, 3, 3), L),
        "output_padding": lambda: F.dist_conv_transpose(x, randn(3, 2, 3), L, output_padding=1),
        "beyond the tensor": lambda: F.dist_conv(x, randn(2, 3, 3), L, padding=9, padding_mode="reflect"),
    }.items():
        with pytest.raises(dd.errors.DistdlError, match=text):
            call()


def test_a_bias_of_another_size():
    """It was broadcast, or its end left out."""
    n, _, P = here()
    L = dd.Layout(dd.Partition((1, 1, n)), (1, 2, 5 * n))
    x, w = torch.ones(1, 2, 5), torch.ones(2, 2, 3)
    for features in (1, 3):
        bias = torch.ones(features)
        for call in (
            lambda: F.dist_conv(x, w, L, bias),
            lambda: F.dist_conv_transpose(x, w, L, bias),
            lambda: F.dist_conv(x, w, dd.Partition((1, 1, 1, n)), bias),
            lambda: F.dist_linear(torch.ones(1, 3), torch.ones(2, 3), dd.Partition((n, 1, 1)), bias),
        ):
            with pytest.raises(ShapeError, match="bias is not this rank's block"):
                call()
