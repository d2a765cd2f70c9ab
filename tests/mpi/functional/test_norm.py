"""Normalisations against serial torch, on uneven, empty, batch-, space- and channel-split tensors."""

import pytest
import torch
import torch.nn.functional as f
from serial import along, check_layer, layouts, messages, randn
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError

X = randn(5, 12, 3, seed=1) + 2
W, B, MEAN, VAR = (randn(12, seed=i) for i in range(2, 6))
VAR = VAR.abs() + 0.5
INVARIANT = dict(params="invariant")


def sweep(dist, serial, parameters, dims, x=X, second=(0, 1), argnums=None):
    """On every layout; ``parameters`` lie along the dims ``dims`` of x."""
    for i, (name, L) in enumerate(layouts(x.shape).items()):
        part = along(L, *dims)
        P = L if i % 2 or L.splits else L.partition
        check_layer(
            lambda x, *p: dist(x, P, *p),
            serial,
            [x, *parameters],
            [L, *[part] * len(parameters)],
            L,
            argnums=argnums,
            orders=2 if i in second else 1,
            name=name,
        )


def test_case_33_batch_norm_training():
    """Uneven and empty shares; statistics of the whole batch."""
    sweep(
        lambda x, P, w, b: F.dist_batch_norm(x, P, None, None, w, b, True, **INVARIANT)[0],
        lambda x, w, b: f.batch_norm(x, None, None, w, b, True),
        [W, B],
        (1,),
        second=(0, 1, 3),
    )


def test_case_33_running_statistics():
    """The running variance is unbiased; momentum None averages cumulatively; nothing is changed in place."""
    for momentum in (0.1, None):
        serial = torch.nn.BatchNorm1d(12, momentum=momentum, dtype=torch.float64)
        for L in layouts(X.shape).values():
            serial.reset_running_stats()
            part = along(L, 1)
            mean, var = part(serial.running_mean).clone(), part(serial.running_var).clone()
            for step in range(3):
                x = X * (step + 1) - step
                serial(x)
                before = mean.clone(), var.clone()
                _, new_mean, new_var = F.dist_batch_norm(
                    L.shard(x), L, mean, var, training=True, momentum=momentum, num_batches_tracked=step + 1
                )
                assert torch.equal(mean, before[0]) and torch.equal(var, before[1])
                mean, var = new_mean, new_var
            if L.active:
                torch.testing.assert_close(mean, part(serial.running_mean), rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(var, part(serial.running_var), rtol=1e-12, atol=1e-12)
            same = dd.testing.gather_objects(
                (L.active and tuple(s.start for s in L.slices()[1:2]), mean.tolist(), var.tolist())
            )
            assert all(a[1:] == b[1:] for a in same for b in same if a[0] is not False and a[0] == b[0])


def test_batch_norm_evaluation():
    sweep(
        lambda x, P, m, v, w: F.dist_batch_norm(x, P, m, v, w, **INVARIANT)[0],
        lambda x, m, v, w: f.batch_norm(x, m, v, w),
        [MEAN, VAR, W],
        (1,),
        second=(),
        argnums=(0, 3),
    )


def test_batch_norm_images_and_vectors():
    for shape in ((4, 3), (2, 3, 4, 2)):
        sweep(
            lambda x, P: F.dist_batch_norm(x, P, None, None, training=True)[0],
            lambda x: f.batch_norm(x, None, None, training=True),
            [],
            (1,),
            randn(*shape),
            second=(),
        )


def test_case_34_layer_norm_over_uneven_splits():
    w, b = randn(12, 3, seed=8), randn(12, 3, seed=9)
    sweep(
        lambda x, P, w, b: F.dist_layer_norm(x, P, (12, 3), w, b, **INVARIANT),
        lambda x, w, b: f.layer_norm(x, (12, 3), w, b),
        [w, b],
        (1, 2),
    )
    sweep(lambda x, P: F.dist_layer_norm(x, P, 3), lambda x: f.layer_norm(x, (3,)), [], (2,), second=())


def test_rms_norm():
    w = randn(12, 3, seed=8)
    sweep(
        lambda x, P, w: F.dist_rms_norm(x, P, (12, 3), w, **INVARIANT),
        lambda x, w: f.rms_norm(x, (12, 3), w),
        [w],
        (1, 2),
    )


@pytest.mark.parametrize("groups", [1, 4, 6, 12])
def test_group_norm(groups):
    """12 channels over 1-4 ranks: groups lie within ranks, and straddle them."""
    sweep(
        lambda x, P, w, b: F.dist_group_norm(x, P, groups, w, b, **INVARIANT),
        lambda x, w, b: f.group_norm(x, groups, w, b),
        [W, B],
        (1,),
        second=(1,) if groups == 4 else (),
    )


def test_group_norm_uneven_channels():
    """A group over three ranks, an empty block between, and channels and space split at once."""
    n = dd.world().size
    uneven = {2: [(5, 7), (1, 11), (0, 12)], 3: [(5, 1, 6), (2, 0, 10), (1, 2, 9)], 4: [(4, 1, 1, 6), (1, 0, 4, 7)]}
    for splits in uneven.get(n, [None]):
        L = dd.Layout(dd.Partition((1, n, 1)), X.shape, (None, splits, None))
        part = along(L, 1)
        check_layer(
            lambda x, w, b: F.dist_group_norm(x, L, 3, w, b, **INVARIANT),
            lambda x, w, b: f.group_norm(x, 3, w, b),
            [X, W, B],
            [L, part, part],
            L,
            orders=1,
            name=str(splits),
        )
    x = randn(5, 12)  # no space at all
    L = dd.Layout(dd.Partition((1, n)), x.shape)
    check_layer(lambda x: F.dist_group_norm(x, L, 3), lambda x: f.group_norm(x, 3), [x], [L], L)


def test_instance_norm():
    sweep(
        lambda x, P, w, b: F.dist_instance_norm(x, P, w, b, **INVARIANT),
        lambda x, w, b: f.instance_norm(x, None, None, w, b),
        [W, B],
        (1,),
    )


def test_a_bias_without_a_weight():
    """torch's own group_norm has no derivative then."""
    serial = lambda norm: lambda x, b: norm(x) + b[:, None]
    sweep(
        lambda x, P, b: F.dist_group_norm(x, P, 4, None, b, **INVARIANT),
        serial(lambda x: f.group_norm(x, 4)),
        [B],
        (1,),
    )
    sweep(lambda x, P, b: F.dist_instance_norm(x, P, None, b, **INVARIANT), serial(f.instance_norm), [B], (1,))


def test_a_vmap_over_nothing():
    """torch's own group_norm gives another shape there."""
    L = dd.Layout(dd.Partition((dd.world().size, 1, 1)), X.shape)
    shape = L.shard(X).shape
    for norm in (
        lambda x: F.dist_group_norm(x, L, 4),
        lambda x: F.dist_instance_norm(x, L),
        lambda x: F.dist_layer_norm(x, L, 3),
    ):
        assert vmap(norm)(torch.ones(0, *shape)).shape == (0, *shape)


def test_derivatives_of_any_order():
    """Whether a rank has all that statistics are taken over, or not. torch's own layer_norm is wrong from jvp of jvp
    on."""
    n = dd.world().size

    def by_hand(x, dims):
        centred = x - x.mean(dims, keepdim=True)
        return centred * (centred.square().mean(dims, keepdim=True) + 1e-5).rsqrt()

    calls = {
        "layer": (lambda x, L: F.dist_layer_norm(x, L, X.shape[1:]), (1, 2)),
        "group": (lambda x, L: F.dist_group_norm(x, L, 1), (1, 2)),
        "instance": (lambda x, L: F.dist_instance_norm(x, L), (2,)),
        "batch": (lambda x, L: F.dist_batch_norm(x, L, None, None, training=True)[0], (0, 2)),
    }
    for name, (dist, dims) in calls.items():
        for grid in ((n, 1, 1), (1, n, 1), (1, 1, n)):
            L = dd.Layout(dd.Partition(grid), X.shape)
            found = dist(L.shard(X), L), L.shard(by_hand(X, dims))
            torch.testing.assert_close(*found, msg=lambda text, name=name, grid=grid: f"{name} {grid}: {text}")

            def twice(f, x):
                return jvp(lambda x: jvp(f, (x,), (x.sin(),))[1], (x,), (x.cos(),))[1]

            def thrice(
                f, x
            ):  # every rank's loss is its own sum, and gradients are those of the sum over ranks: the serial ones
                loss = lambda g: lambda x: g(x).sin().sum()
                return grad(loss(grad(loss(grad(loss(f))))))(x)

            mine, whole = L.shard(X).clone(), lambda x, dims=dims: by_hand(x, dims)
            for order, got, wanted in (
                ("jvp of jvp", twice(lambda x: dist(x, L), mine), twice(whole, X)),
                ("third", thrice(lambda x: dist(x, L), mine), thrice(whole, X)),
            ):
                off = (got - L.shard(wanted)).abs().max().item() / wanted.abs().max().item() if mine.numel() else 0.0
                dd.testing.collective_assert(off < 1e-11, f"{name} {grid} {order}: {off}")


def test_large_mean_in_single_precision():
    """Σx² - (Σx)²/n would lose the variance altogether at mean 3000."""
    x = (randn(64, 3, 8, seed=4) + 3000).float()
    expected = f.batch_norm(x.double(), None, None, training=True)
    for L in layouts(x.shape).values():
        zeros = along(L, 1)(torch.zeros(3))
        y, _, var = F.dist_batch_norm(L.shard(x), L, zeros, zeros, training=True, momentum=1.0)
        if L.active:
            torch.testing.assert_close(y.double(), L.shard(expected), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(var.double(), along(L, 1)(x.double().var((0, 2))), rtol=1e-4, atol=1e-4)


def test_low_precision():
    """float32 and bfloat16, the latter with float32 parameters, against serial torch in float64."""
    w = randn(3, seed=8)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = X.to(dtype)
        for L in layouts(X.shape).values():
            part = along(L, 1)
            calls = {
                "batch": (
                    lambda x: F.dist_batch_norm(x, L, part(MEAN).float(), part(VAR).float(), training=True)[0],
                    lambda x: f.batch_norm(x, None, None, training=True),
                ),
                "group": (lambda x: F.dist_group_norm(x, L, 3), lambda x: f.group_norm(x, 3)),
                "layer": (
                    lambda x: F.dist_layer_norm(x, L, 3, along(L, 2)(w).float()),
                    lambda x: f.layer_norm(x, (3,), w),
                ),
                "rms": (lambda x: F.dist_rms_norm(x, L, 3, eps=1e-3), lambda x: f.rms_norm(x, (3,), eps=1e-3)),
            }
            for name, (dist, serial) in calls.items():
                check_layer(
                    dist,
                    lambda x: serial(x.double()).to(dtype),
                    [x],
                    [L],
                    L,
                    rtol=rtol,
                    name=name,
                    orders=1 if dtype == torch.float32 else 0,
                )


def test_varying_parameters_have_partial_gradients():
    """The default: each rank's gradient is its own part, and the parts add up."""
    for L in layouts(X.shape, (0, 2)).values():
        w = W.clone().requires_grad_()
        y = F.dist_batch_norm(L.shard(X), L, None, None, w, training=True)[0]
        (y * L.shard(X).sin()).sum().backward()
        parts = dd.testing.gather_objects(w.grad if w.grad is not None else torch.zeros_like(W))
        expected = torch.func.grad(lambda w: (f.batch_norm(X, None, None, w, training=True) * X.sin()).sum())(W)
        torch.testing.assert_close(sum(parts), expected, rtol=1e-10, atol=1e-10)


def test_messages():
    n = dd.world().size
    peers, reduced = n - 1, int(n > 1)

    def count(split, call, sends, elements, reductions=0, sums=0):
        grid = tuple(n if d == split else 1 for d in range(3))
        L = dd.Layout(dd.Partition(grid), tuple(4 * size for size in grid))
        x = L.shard(randn(*L.shape)).clone().requires_grad_()
        y = call(x, L)
        assert messages(lambda: call(x, L)) == (sends, elements * sends, reductions, sums, 0)
        assert messages(y.sum().backward) == (sends, elements * sends, reductions, sums, 0)
        assert messages(lambda: call(x, L.partition))[4] == reduced  # a bare partition is agreed on once

    for split in (0, 2):
        count(split, lambda x, P: F.dist_batch_norm(x, P, None, None, training=True)[0], peers, 8)
        count(split, lambda x, P: F.dist_batch_norm(x, P, torch.zeros(4), torch.ones(4))[0], 0, 0)
    count(1, lambda x, P: F.dist_batch_norm(x, P, None, None, training=True)[0], 0, 0)
    count(2, lambda x, P: F.dist_instance_norm(x, P), peers, 32)
    count(2, lambda x, P: F.dist_layer_norm(x, P, 4 * n), peers, 32)
    count(0, lambda x, P: F.dist_layer_norm(x, P, 4), 0, 0)
    count(2, lambda x, P: F.dist_rms_norm(x, P, 4 * n), 0, 0, reduced, 16 * reduced)
    count(1, lambda x, P: F.dist_group_norm(x, P, 1), peers, 8)
    count(1, lambda x, P: F.dist_group_norm(x, P, 2 * n), 0, 0)  # every rank has whole groups
    count(2, lambda x, P: F.dist_group_norm(x, P, 2), peers, 16)
    # marked parameters: one all-reduce backward for all of them
    L = dd.Layout(dd.Partition((n, 1)), (4 * n, 4))
    w, b = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = F.dist_layer_norm(L.shard(randn(4 * n, 4)), L, 4, w, b, params="invariant")
    assert messages(y.sum().backward) == (0, 0, reduced, 8 * reduced, 0)


def test_errors():
    n = dd.world().size
    L = dd.Layout(dd.Partition((n, 1)), (2 * n, 6))
    x = torch.zeros(2, 6)
    for error, call, words in [
        (ShapeError, lambda: F.dist_layer_norm(x, L, 5), "normalized_shape"),
        (ShapeError, lambda: F.dist_layer_norm(x, L, 6, torch.ones(5)), "parameter"),
        (ShapeError, lambda: F.dist_group_norm(x, L, 4), "divide"),
        (
            ShapeError,
            lambda: F.dist_batch_norm(x, L, torch.zeros(6), torch.ones(6), training=True, momentum=None),
            "count",
        ),
        (ShapeError, lambda: F.dist_batch_norm(x, L, torch.zeros(6), torch.ones(6), torch.ones(5)), "parameter"),
        (ShapeError, lambda: F.dist_layer_norm(x.long(), L, 6), "floating"),
        (ShapeError, lambda: F.dist_layer_norm(torch.zeros(3, 6), L, 6), "block"),
        (PartitionError, lambda: F.dist_instance_norm(x, L), "dims"),
        (PartitionError, lambda: F.dist_layer_norm(x, L, 6, params="shared"), "params|parameters"),
    ]:
        with pytest.raises(error, match=words):
            call()
    one = dd.Layout(dd.Partition((n, 1)), (1, 6))
    with pytest.raises(ShapeError, match="more than 1 value"):
        F.dist_batch_norm(one.shard(torch.zeros(1, 6)), one, None, None, training=True)
