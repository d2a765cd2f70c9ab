"""Interpolation against serial torch: every mode, split in batch, channels and space, on uneven and empty blocks."""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as tf
from serial import check_layer, layouts, messages, randn

import distdl as dd
import distdl.functional as F
from distdl.functional.interpolate import _MODES

WORLD = dd.world()
LINEAR = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def cases(n, count, seed, largest=12):
    """Random arguments for n spatial dims, the same on every rank."""
    rng = random.Random(seed)
    for mode, _ in zip(itertools.cycle(("nearest", "nearest-exact", "area", *LINEAR[n])), range(count)):
        space = [rng.randint(1, largest) for _ in range(n)]
        kwargs = {"mode": mode}
        if _MODES[mode][1] > 1:
            kwargs["align_corners"] = rng.choice([None, True, False])
        if rng.random() < 0.5:
            kwargs["size"] = tuple(rng.randint(1, largest) for _ in range(n))
        else:
            factors = [0.3, 0.7, 1.2, 1.5, 2.0, 3.0, rng.uniform(0.2, 4)]
            kwargs["scale_factor"] = tuple(max(rng.choice(factors), 1.01 / m) for m in space)
            kwargs["recompute_scale_factor"] = rng.choice([None, True, False])
        yield space, kwargs


def out_layout(L, kwargs):
    return F.interpolate_layout(L, kwargs.get("size"), kwargs.get("scale_factor"))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_values_and_gradients(n):
    """Many sizes and factors; the gradient of the nearest modes is compared with that of the elements chosen, as
    torch's own backward disagrees with its forward for some float64 sizes."""
    for seed, (space, kwargs) in enumerate(cases(n, 10, n)):
        X = randn(2, 3, *space, seed=seed)
        serial = X.clone().requires_grad_()
        y = tf.interpolate(serial, **kwargs)
        y_bar = randn(*y.shape, seed=99)
        if kwargs["mode"].startswith("nearest"):
            places = tf.interpolate(torch.arange(X.numel(), dtype=X.dtype).reshape(X.shape), **kwargs).long()
            x_bar = (
                torch.zeros(X.numel(), dtype=X.dtype).index_add(0, places.flatten(), y_bar.flatten()).reshape(X.shape)
            )
        else:
            y.backward(y_bar)
            x_bar = serial.grad
        for name, L in layouts(X.shape).items():
            x, out = L.shard(X).clone().requires_grad_(), out_layout(L, kwargs)
            found = F.dist_interpolate(x, L, **kwargs)
            assert found.shape == out.local_shape(), (name, kwargs)
            found.backward(out.shard(y_bar))
            if L.active:
                assert torch.allclose(found, out.shard(y.detach()), rtol=1e-10, atol=1e-12), (name, space, kwargs)
                assert torch.allclose(x.grad, L.shard(x_bar), rtol=1e-10, atol=1e-12), (name, space, kwargs)


TRANSFORMED = [
    ("linear", (2, 2, 5), 8),
    ("bicubic", (1, 2, 5, 3), (4, 7)),
    ("nearest", (2, 2, 3), 7),
    ("area", (1, 2, 5, 2), (2, 3)),
    ("trilinear", (1, 1, 3, 2, 2), (4, 3, 2)),
]


@pytest.mark.parametrize("mode, shape, size", TRANSFORMED)
def test_every_transform(mode, shape, size):
    X = randn(*shape)
    for name, L in layouts(shape, range(2, len(shape)), grids=False).items():
        check_layer(
            lambda x: F.dist_interpolate(x, L, size, mode=mode),
            lambda x: tf.interpolate(x, size, mode=mode),
            [X],
            [L],
            out_layout(L, {"size": size}),
            name=f"{mode} {name}",
        )


@pytest.mark.parametrize("mode", ["bicubic", "nearest", "area"])
def test_blocks_of_a_layout(mode):
    """``size`` may be the Layout of another tensor, a U-Net's skip, which the result then fits, block by block."""
    X, shape = randn(2, 3, 4, 3), (2, 1, 9, 5)
    skips = layouts(shape, (2, 3))
    for name, L in layouts(X.shape, (2, 3)).items():
        for splits, like in skips.items():
            if like.partition == L.partition:
                out = F.interpolate_layout(L, like)
                assert out.shape == (2, 3, 9, 5) and all(out.blocks(d) == like.blocks(d) for d in (2, 3))
                check_layer(
                    lambda x: F.dist_interpolate(x, L, like, mode=mode),
                    lambda x: tf.interpolate(x, (9, 5), mode=mode),
                    [X],
                    [L],
                    out,
                    name=f"{mode} {name} {splits}",
                )
    P, rows = dd.Partition((1, 1, WORLD.size, 1)), dd.Partition((1, 1, 1, WORLD.size))
    if WORLD.size > 1:
        with pytest.raises(dd.errors.PartitionError, match="another partition"):
            F.dist_interpolate(dd.Layout(P, X.shape).shard(X), dd.Layout(P, X.shape), dd.Layout(rows, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nearest_chooses_as_torch(dtype):
    """Index rounding, on one dim over all ranks: an element further would be another picture."""
    rng = random.Random(5)
    for i in range(150):
        n, mode = rng.randint(1, 60), ("nearest", "nearest-exact")[i % 2]
        dims = 1 + i % 5 // 4
        kwargs = (
            {"scale_factor": (max(rng.uniform(0.1, 4), 1.01 / n), 1.0)[:dims]}
            if i % 3
            else {"size": rng.randint(1, 150)}
        )
        X = torch.arange(n).to(dtype).reshape(1, 1, n, *(1,) * (dims - 1))
        L = dd.Layout(dd.Partition((1, 1, WORLD.size, *(1,) * (dims - 1))), X.shape)
        y = tf.interpolate(X, mode=mode, **kwargs)
        found = F.dist_interpolate(L.shard(X), L, mode=mode, **kwargs)
        assert torch.equal(found, out_layout(L, kwargs).shard(y)), (n, mode, kwargs)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_lower_precision(dtype, tol):
    X = randn(1, 2, 7, 5).to(dtype)
    for L in layouts(X.shape).values():
        for mode in ("bilinear", "bicubic"):
            found = F.dist_interpolate(L.shard(X), L, scale_factor=1.7, mode=mode)
            wanted = out_layout(L, {"scale_factor": 1.7}).shard(tf.interpolate(X, scale_factor=1.7, mode=mode))
            assert found.dtype == dtype
            assert not L.active or torch.allclose(found, wanted, rtol=tol, atol=tol)


def test_bare_partition_and_messages():
    P = dd.Partition((1, 1, WORLD.size))
    X = randn(1, 1, 4 * WORLD.size)
    L = dd.Layout(P, X.shape)
    y = tf.interpolate(X, scale_factor=2.0, mode="linear")
    for where, kwargs in ((P, {}), (P, {"shape": X.shape}), (L, {})):
        found = F.dist_interpolate(P.shard(X), where, scale_factor=2.0, mode="linear", **kwargs)
        assert torch.allclose(found, P.shard(y), rtol=1e-12)
    # one element from each neighbour
    neighbours = (WORLD.rank > 0) + (WORLD.rank < WORLD.size - 1)
    assert messages(lambda: F.dist_interpolate(P.shard(X), L, scale_factor=2.0, mode="linear")) == (
        neighbours,
        neighbours,
        0,
        0,
        0,
    )


@pytest.mark.mpi(2)
def test_the_size_of_a_skip_on_some_ranks():
    """Outside of the partition layout_of says None, and the call goes on."""
    P = dd.Partition((1, 1, 1), ranks=(1,))
    inside = WORLD.rank == 1
    x, skip = (randn(1, 2, n) if inside else torch.zeros(0, 2, n).double() for n in (4, 9))
    y = F.dist_interpolate(x, P, F.layout_of(skip, P), mode="linear")
    if inside:
        assert torch.allclose(y, tf.interpolate(x, size=9, mode="linear"), rtol=1e-12, atol=1e-12)
    else:
        assert len(y) == 0 and y.dim() == 3


def test_errors():
    P = dd.Partition((1, 1, WORLD.size))
    x = dd.Layout(P, (1, 1, 8))
    bad = [
        dict(),
        dict(size=3, scale_factor=2),
        dict(size=3, mode="cubic"),
        dict(size=3, mode="bilinear"),
        dict(scale_factor=-1.0),
        dict(size=3, align_corners=True),
        dict(size=0),
        dict(scale_factor=0.01),
        dict(scale_factor=math.nan),
        dict(size=(2, 2)),
        dict(size=3, recompute_scale_factor=True),
    ]
    for kwargs in bad:
        with pytest.raises(dd.errors.DistdlError):
            F.dist_interpolate(x.shard(randn(1, 1, 8)), x, **kwargs)
