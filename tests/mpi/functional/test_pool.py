"""Pooling against serial torch."""

import random

import pytest
import torch
import torch.nn.functional as tf
from convolutions import random_layout
from registry import here
from serial import check_layer, layouts, messages, randn

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError

MAX = {1: tf.max_pool1d, 2: tf.max_pool2d, 3: tf.max_pool3d}
AVG = {1: tf.avg_pool1d, 2: tf.avg_pool2d, 3: tf.avg_pool3d}
ADAPTIVE_MAX = {1: tf.adaptive_max_pool1d, 2: tf.adaptive_max_pool2d, 3: tf.adaptive_max_pool3d}
ADAPTIVE_AVG = {1: tf.adaptive_avg_pool1d, 2: tf.adaptive_avg_pool2d, 3: tf.adaptive_avg_pool3d}


def check(dist, serial, x, L, out, orders=2, name=""):
    check_layer(dist, serial, [x], [L], out, orders=orders, name=f"{L} {name}")


@pytest.mark.parametrize("args", [(2,), (3, 2, 1), (3, 1, 1, 2), (3, 2, 0, 1, True), ((2, 3), (1, 2))], ids=str)
def test_max_pool(args):
    x = randn(2, 3, 8, 7)
    for L in layouts(x.shape, (2, 3, 1)).values():
        check(
            lambda x: F.dist_max_pool(x, L, *args),
            lambda x: tf.max_pool2d(x, *args),
            x,
            L,
            F.pool_layout(L, *args),
            name=args,
        )
        out = F.pool_layout(L, *args)
        check_layer(
            lambda x: F.dist_max_pool(x, L, *args, return_indices=True),
            lambda x: tf.max_pool2d(x, *args, return_indices=True),
            [x],
            [L],
            (out, out),
            orders=0,
        )


def test_max_pool_of_minus_infinity():
    """The index of an all -inf window is its first element, never one of the padding."""
    x = torch.full((1, 1, 9), -torch.inf, dtype=torch.float64)
    L = dd.Layout(dd.Partition((1, 1, dd.world().size)), x.shape)
    for args in ((3, 2, 1), (3, 1, 1, 2), (2, 2, 1)):
        out = F.pool_layout(L, *args)
        check_layer(
            lambda x: F.dist_max_pool(x, L, *args, return_indices=True),
            lambda x: tf.max_pool1d(x, *args, return_indices=True),
            [x],
            [L],
            (out, out),
            orders=0,
        )


@pytest.mark.parametrize(
    "args, override",
    [
        ((2,), None),
        ((3, 2, 1), None),
        ((3, 2, 1, False, False), None),
        ((3, 2, 1, True), None),
        ((3, 2, 1, True, False), None),
        ((3, 2, 1), 5),
    ],
    ids=str,
)
def test_case_31_avg_pool(args, override):
    x = randn(2, 2, 8, 7)
    for L in layouts(x.shape, (2, 3, 0)).values():
        ceil = len(args) > 3 and args[3]
        check(
            lambda x: F.dist_avg_pool(x, L, *args, divisor_override=override),
            lambda x: tf.avg_pool2d(x, *args, divisor_override=override),
            x,
            L,
            F.pool_layout(L, *args[:3], ceil_mode=ceil),
            name=args,
        )


@pytest.mark.parametrize("size", [1, (3, 4), (None, 2), (9, 11)])
def test_case_32_adaptive(size):
    """Global average pooling over uneven blocks is not a mean of means."""
    x = randn(2, 3, 8, 7)
    for L in layouts(x.shape, (2, 3, 1)).values():
        y = tf.adaptive_avg_pool2d(x, size)
        out = L.with_shape(y.shape)
        check(
            lambda x: F.dist_adaptive_avg_pool(x, L, size),
            lambda x: tf.adaptive_avg_pool2d(x, size),
            x,
            L,
            out,
            name=size,
        )
        check(
            lambda x: F.dist_adaptive_max_pool(x, L, size),
            lambda x: tf.adaptive_max_pool2d(x, size),
            x,
            L,
            out,
            name=size,
        )
        check_layer(
            lambda x: F.dist_adaptive_max_pool(x, L, size, return_indices=True),
            lambda x: tf.adaptive_max_pool2d(x, size, return_indices=True),
            [x],
            [L],
            (out, out),
            orders=0,
        )


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_random(count):
    generator = random.Random(3)
    for _ in range(count):
        n = generator.randint(1, 3)
        pick = lambda a, b: tuple(generator.randint(a, b) for _ in range(n))
        space, kernel, stride, dilation = pick(2, 11), pick(1, 4), pick(1, 3), pick(1, 2)
        padding = tuple(generator.randint(0, k // 2) for k in kernel)
        if any(m + 2 * p < d * (k - 1) + 1 for m, p, d, k in zip(space, padding, dilation, kernel)):
            continue
        ceil, counted = generator.random() < 0.5, generator.random() < 0.5
        x = randn(2, 2, *space)
        L = random_layout(generator, tuple(x.shape), skip=())
        out = F.pool_layout(L, kernel, stride, padding, dilation, ceil)
        check(
            lambda x: F.dist_max_pool(x, L, kernel, stride, padding, dilation, ceil),
            lambda x: MAX[n](x, kernel, stride, padding, dilation, ceil),
            x,
            L,
            out,
            1,
        )
        if all(m >= k for m, k in zip(space, kernel)):  # torch's avg_pool3d refuses others, whatever the padding
            out = F.pool_layout(L, kernel, stride, padding, ceil_mode=ceil)
            check(
                lambda x: F.dist_avg_pool(x, L, kernel, stride, padding, ceil, counted),
                lambda x: AVG[n](x, kernel, stride, padding, ceil, counted),
                x,
                L,
                out,
                1,
            )
        size = pick(1, 6)
        out = L.with_shape((2, 2, *size))
        check(lambda x: F.dist_adaptive_avg_pool(x, L, size), lambda x: ADAPTIVE_AVG[n](x, size), x, L, out, 1)
        check(lambda x: F.dist_adaptive_max_pool(x, L, size), lambda x: ADAPTIVE_MAX[n](x, size), x, L, out, 1)


def test_dtypes():
    L = dd.Layout(dd.Partition((1, 1, dd.world().size)), (1, 2, 9))
    x = randn(1, 2, 9)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        check_layer(
            lambda x: F.dist_avg_pool(x, L, 3, 2, 1),
            lambda x: tf.avg_pool1d(x, 3, 2, 1),
            [x.to(dtype)],
            [L],
            F.pool_layout(L, 3, 2, 1),
            orders=1,
            rtol=rtol,
        )
        check_layer(
            lambda x: F.dist_max_pool(x, L, 3, 2, 1),
            lambda x: tf.max_pool1d(x, 3, 2, 1),
            [x.to(dtype)],
            [L],
            F.pool_layout(L, 3, 2, 1),
            orders=1,
            rtol=rtol,
        )


def test_messages():
    """Windows that fit the blocks send nothing; overlapping ones send the overlap; global pooling sends |y|."""
    n, r = dd.world().size, dd.world().rank
    L = dd.Layout(dd.Partition((1, 1, n)), (2, 3, 4 * n))
    x = L.shard(randn(*L.shape))
    found = messages(lambda: F.dist_max_pool(x, L, 2))
    dd.testing.collective_assert(found == (0, 0, 0, 0, 0), f"aligned {found}")
    found = messages(lambda: F.dist_adaptive_avg_pool(x, L, 1))
    dd.testing.collective_assert(found == ((r > 0) * 1, (r > 0) * 6, 0, 0, 0), f"global {found}")


def test_bad_input():
    L = dd.Layout(dd.Partition((1, 1, dd.world().size)), (1, 2, 9))
    x = L.shard(randn(1, 2, 9))
    for text, call in {
        "half of the kernel": lambda: F.dist_max_pool(x, L, 2, padding=2),
        "divisor_override": lambda: F.dist_avg_pool(x, L, 2, divisor_override=0),
        "legal window": lambda: F.dist_max_pool(x, L, 0),
        "larger than": lambda: F.dist_max_pool(x, L, 12),
        "output_size": lambda: F.dist_adaptive_avg_pool(x, L, -1),
    }.items():
        with pytest.raises(dd.errors.DistdlError, match=text):
            call()


def test_a_last_partial_window_of_a_kernel_larger_than_the_tensor():
    n, _, _ = here()
    X = torch.arange(6.0, dtype=torch.float64).reshape(1, 2, 3, 1)
    L = dd.Layout(dd.Partition((1, 1, n, 1)), X.shape)
    y = F.dist_max_pool(L.shard(X), L, (4, 2), ceil_mode=True)
    assert torch.equal(
        y, F.pool_layout(L, (4, 2), ceil_mode=True).shard(torch.nn.functional.max_pool2d(X, (4, 2), ceil_mode=True))
    )
    y = F.dist_avg_pool(L.shard(X), L, (4, 2), ceil_mode=True)
    assert torch.equal(
        y, F.pool_layout(L, (4, 2), ceil_mode=True).shard(torch.nn.functional.avg_pool2d(X, (4, 2), ceil_mode=True))
    )
    with pytest.raises(PartitionError, match="larger than the padded input"):
        F.dist_max_pool(L.shard(X), L, (7, 1), stride=4, ceil_mode=True)
