"""Every dtype that torch can store moves unchanged; sums of half precisions are taken in float32."""

import pytest
import torch
import torch.nn.functional as tf
from registry import each_case, here, integers, needs, randn
from serial import layouts

import distdl as dd
import distdl.functional as F

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@each_case(thin=True)
def test_every_dtype(case):
    X = integers(case.shape, 5).abs() % 4
    for dtype in DTYPES:
        values = X != 0 if dtype == torch.bool else X * (1 + 2j) if dtype.is_complex else X
        x = case.local(values.to(dtype), torch.zeros(1))
        y = case.map(x)
        wanted = case.wanted(values.to(torch.complex128) if dtype.is_complex else values.double())
        assert y.dtype == dtype and torch.equal(y, (wanted != 0) if dtype == torch.bool else wanted.to(dtype)), dtype
        assert case.map.T(y).dtype == dtype


@needs(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_are_taken_in_float32(dtype):
    """big + 1 + 1: adding in half precision loses both ones."""
    r = dd.world().rank
    big = {torch.float16: 2048, torch.bfloat16: 256}[dtype]
    P, x = dd.Partition((3,)), torch.tensor([big if r == 0 else 1], dtype=dtype)
    if r > 2:
        return
    one = dd.Partition((1,))
    assert F.all_sum_reduce(x, P).tolist() == [big + 2]
    assert F.invariant_sum(x, P).tolist() == [big + 2]
    assert F.sum_reduce(x, P, one, shape=(1,)).tolist() == ([big + 2] if r == 0 else [])
    assert F.reduce_scatter(x.expand(3), P).tolist() == [big + 2]
    spec = dd.HaloSpec(
        dd.Layout(P, (3,)), 1, boundary="none"
    )  # adjoint on rank 1: its own, and both neighbours' ghosts
    windows = {0: [0, 1], 1: [0, big, 0], 2: [1, 0]}
    back = dd.maps.halo_exchange(spec).T(torch.tensor(windows[r], dtype=dtype))
    assert back.tolist() == ([big + 2] if r == 1 else [0])


def test_mixed_dtypes_in_one_pytree():
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    tree = {"f": torch.full((2,), float(r)), "i": torch.full((3,), r), "h": torch.full((1,), r, dtype=torch.bfloat16),
            "b": torch.tensor([r == 0])}  # fmt: skip
    gathered, summed = F.all_gather(tree, P), F.all_sum_reduce(tree, P)
    for name, x in tree.items():
        assert gathered[name].dtype == summed[name].dtype == x.dtype
        assert gathered[name].tolist() == [v for k in range(n) for v in [k == 0 if name == "b" else k] * x.numel()]
    assert summed["i"].tolist() == [n * (n - 1) // 2] * 3 and summed["b"].tolist() == [True]


def test_integers_beside_differentiable_leaves():
    """Integer leaves have no gradient and do not disturb their neighbours', to second order."""
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    x = torch.full((2,), r + 1.0, dtype=torch.float64)

    def loss(x):
        moved = F.shift({"i": torch.tensor([r]), "x": x}, P, 0)
        return (moved["x"] ** 3 * moved["i"]).sum()

    # My tensor goes to rank r + 1 together with my index.
    assert torch.allclose(torch.func.grad(loss)(x), 3 * r * x**2)
    assert torch.allclose(torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1], 6 * r * x * x)
    z = x.clone().requires_grad_()
    loss(z).backward()
    assert torch.allclose(z.grad, 3 * r * x**2)


def _part(L, *dims):
    return tuple(L.slices()[d] for d in dims)


# ---------------------------------------------------------------- sums and counts of halves


def _near_the_end(*shape):
    """Numbers whose sums, squares or counts float16 does not hold."""
    return (60000 * randn(shape, 11).tanh()).half()


def _fold(x, L, w):
    part = w.expand(1, L.shape[2], 1, 9)[_part(L, 1, 2)] if L.active else w.expand(1, 1, 1, 9)
    return F.dist_local_conv_transpose(x, part.to(x.dtype), L)


# name -> (x, split dims, distributed (x, layout), serial x)
LONG, IMAGES, CHANNELS = torch.ones(1, 1, 5000).half(), _near_the_end(1, 2, 6, 7), _near_the_end(3, 6, 40)
HALVES = {
    "avg_pool": (
        torch.full((1, 1, 4, 6), 2e4).half(),
        (2, 3),
        lambda x, L: F.dist_avg_pool(x, L, 2),
        lambda x: tf.avg_pool2d(x, 2),
    ),
    "avg_pool, long": (LONG, (2,), lambda x, L: F.dist_avg_pool(x, L, 5000), lambda x: tf.avg_pool1d(x, 5000)),
    "avg_pool3d": (
        IMAGES[None],
        (3, 4),
        lambda x, L: F.dist_avg_pool(x, L, 2, 1, 1),
        lambda x: tf.avg_pool3d(x, 2, 1, 1),
    ),
    "divisor": (
        IMAGES,
        (2, 3),
        lambda x, L: F.dist_avg_pool(x, L, 3, divisor_override=20),
        lambda x: tf.avg_pool2d(x, 3, divisor_override=20),
    ),
    "adaptive": (
        IMAGES,
        (2, 3),
        lambda x, L: F.dist_adaptive_avg_pool(x, L, (2, 3)),
        lambda x: tf.adaptive_avg_pool2d(x, (2, 3)),
    ),
    "global": (
        torch.cat([LONG, IMAGES.reshape(1, 1, -1)], 2),
        (2,),
        lambda x, L: F.dist_adaptive_avg_pool(x, L, 1),
        lambda x: tf.adaptive_avg_pool1d(x, 1),
    ),
    "area": (
        IMAGES,
        (2, 3),
        lambda x, L: F.dist_interpolate(x, L, (2, 3), mode="area"),
        lambda x: tf.interpolate(x, (2, 3), mode="area"),
    ),
    "bilinear": (
        IMAGES,
        (2, 3),
        lambda x, L: F.dist_interpolate(x, L, (9, 9), mode="bilinear"),
        lambda x: tf.interpolate(x, (9, 9), mode="bilinear"),
    ),
    "l2_pool": (
        torch.full((1, 1, 4, 6), 300.0).half(),
        (2, 3),
        lambda x, L: F.dist_l2_pool(x, L, 2),
        lambda x: tf.lp_pool2d(x, 2, 2),
    ),
    "lcn": (IMAGES, (1, 2), lambda x, L: F.dist_lcn(x, L, 3), lambda x: F.dist_lcn(x, dd.Layout(HERE, x.shape), 3)),
    "fold": (
        LONG[..., :40] * 3001,
        (2,),
        lambda x, L: _fold(x, L, LONG[0, 0, 0] / 8),
        lambda x: tf.conv_transpose1d(x, torch.full((1, 1, 9), 1 / 8)),
    ),
    "batch_norm": (
        CHANNELS,
        (0, 2),
        lambda x, L: F.dist_batch_norm(x, L, None, None)[0],
        lambda x: tf.batch_norm(x, None, None, training=True),
    ),
    "evaluation": (
        CHANNELS / 512,
        (0, 2),
        lambda x, L: F.dist_batch_norm(x, L, torch.ones(6).half(), torch.full((6,), 1e-5).half())[0],
        lambda x: tf.batch_norm(x, torch.ones(6), torch.full((6,), 1e-5).half().float()),
    ),
    "instance_norm": (CHANNELS, (0, 2), lambda x, L: F.dist_instance_norm(x, L), tf.instance_norm),
    "group_norm": (CHANNELS, (1, 2), lambda x, L: F.dist_group_norm(x, L, 2), lambda x: tf.group_norm(x, 2)),
    "layer_norm": (CHANNELS, (0, 2), lambda x, L: F.dist_layer_norm(x, L, 40), lambda x: tf.layer_norm(x, (40,))),
    "rms_norm": (
        CHANNELS,
        (0, 2),
        lambda x, L: F.dist_rms_norm(x, L, 40, eps=1e-3),
        lambda x: tf.rms_norm(x, (40,), eps=1e-3),
    ),
    "sum": (LONG[0], (1,), lambda x, L: F.dist_sum(x, L, 1), lambda x: x.sum(1)),
    "mean": (
        torch.cat([LONG[0], CHANNELS.reshape(1, -1)], 1),
        (1,),
        lambda x, L: F.dist_mean(x, L, 1),
        lambda x: x.mean(1),
    ),
    "var": (_near_the_end(3, 50) / 300, (1,), lambda x, L: F.dist_var(x, L, 1), lambda x: x.var(1)),
    "norm": (LONG[0] * 300, (1,), lambda x, L: F.dist_norm(x, L, 1), lambda x: torch.linalg.vector_norm(x, dim=1)),
    "norm 0": (
        LONG[0],
        (1,),
        lambda x, L: F.dist_norm(x, L, 1, ord=0),
        lambda x: torch.linalg.vector_norm(x, 0, dim=1),
    ),
    "logsumexp": (LONG[0] * 6e4, (1,), lambda x, L: F.dist_logsumexp(x, L, 1), lambda x: x.logsumexp(1)),
    "max": (LONG[0], (1,), lambda x, L: F.dist_max(x, L, 1), lambda x: x.amax(1)),
    "mse": (
        _near_the_end(2, 3000) / 300,
        (0, 1),
        lambda x, L: F.dist_mse_loss(x, torch.zeros_like(x), L),
        lambda x: (x * x).mean(),
    ),
    "l1": (
        _near_the_end(2, 3000),
        (0, 1),
        lambda x, L: F.dist_l1_loss(x, x / 2, L),
        lambda x: (x - x / 2).abs().mean(),
    ),
    "huber": (
        _near_the_end(2, 3000) / 4,
        (0, 1),
        lambda x, L: F.dist_huber_loss(x, torch.zeros_like(x), L, delta=5.0),
        lambda x: tf.huber_loss(x, torch.zeros_like(x), delta=5.0),
    ),
    "bce": (
        randn((2, 3000), 6).sigmoid().half(),
        (0, 1),
        lambda x, L: F.dist_bce_loss(x, torch.zeros_like(x), L),
        lambda x: tf.binary_cross_entropy(x, torch.zeros_like(x)),
    ),
    "kl_div": (
        randn((2, 3000), 6).half(),
        (0, 1),
        lambda x, L: F.dist_kl_div(x, torch.ones_like(x), L),
        lambda x: tf.kl_div(x, torch.ones_like(x), reduction="none").mean(),
    ),
    "cross_entropy": (
        randn((3000, 3), 7).half(),
        (0, 1),
        lambda x, L: F.dist_cross_entropy(x, torch.zeros(len(x), dtype=torch.int64), L, label_smoothing=0.1),
        lambda x: tf.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64), label_smoothing=0.1),
    ),
    "classes": (
        _near_the_end(2, 3000),
        (1,),
        lambda x, L: F.dist_cross_entropy(x, torch.tensor([2, 5])[: len(x)], L) / 4,
        lambda x: tf.cross_entropy(x, torch.tensor([2, 5])) / 4,
    ),
}
HERE = dd.Partition((1, 1, 1, 1), (dd.world().rank,))


@pytest.mark.parametrize("name", HALVES)
def test_sums_and_counts_of_halves(name):
    """Values near the end of float16 and counts that it does not hold: as the serial layer in float32, rounded once."""
    X, dims, dist, serial = HALVES[name]
    Z = X.float().requires_grad_()
    Y = serial(Z)
    Y.sum().backward()
    Y = Y.detach()
    assert Y.isfinite().all()
    faults = []
    for where, L in layouts(X.shape, dims).items():
        x = L.shard(X).clone().requires_grad_()
        y = dist(x, L)
        y.sum().backward()
        if not L.active:
            continue
        same = y.dim() == len(Y.shape) == L.ndim and y.shape != Y.shape
        wanted = (
            L.with_shape(Y.shape).shard(Y)
            if same
            else Y.tensor_split(L.partition.shape[0])[L.partition.index()[0]]
            if y.shape != Y.shape
            else Y
        )
        slope = torch.zeros_like(X, dtype=torch.float32) if Z.grad is None else Z.grad  # of ord=0 torch has no graph
        for what, found, right in (("value", y, wanted), ("gradient", x.grad, L.shard(slope))):
            atol = 1e-6 + 2e-3 * float(right.abs().max()) if right.numel() else 0.0
            if found.dtype != torch.float16 or not torch.allclose(found.float(), right, 2e-3, atol):
                faults.append(f"{where}: {what} {found.flatten()[:3]}, not {right.flatten()[:3]}")
    dd.testing.collective_assert(not faults, f"{name}: {faults[:2]}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_embedding_counts_and_measures_halves_in_float32(dtype):
    n = dd.world().size
    P = dd.Partition((1, n, 1))
    rows = dd.Layout(dd.Partition((n, 1)), (3, 4))
    W = torch.full((3, 4), 6e4, dtype=dtype)
    idx = torch.zeros(5000, dtype=torch.int64)
    w = rows.shard(W).clone().requires_grad_()
    y = F.dist_embedding(idx, w, P, scale_grad_by_freq=True, max_norm=2.0, num_embeddings=3, y_layout="replicated")
    torch.testing.assert_close(y, torch.full((5000, 4), 1.0, dtype=dtype), rtol=1e-2, atol=0)
    (y[0].sum() / n).backward()  # of one of the 5000; every copy's cotangent counts
    wanted = (torch.arange(3) == 0).to(dtype)[:, None].expand(3, 4) / 5000
    torch.testing.assert_close(w.grad, rows.shard(wanted), rtol=2e-2, atol=0)


# ---------------------------------------------------------------- tangents


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_tangents_of_numbers_have_their_dtype(dtype):
    """torch's own tangent of 0.5 * s is float64; on the ranks that multiply otherwise it is not."""
    n, r = dd.world().size, dd.world().rank
    P, one, s = dd.Partition((n,)), dd.Partition(()), torch.tensor(3.0, dtype=dtype)

    def scaled(s):
        return 0.5 * s if r == 0 else s / 2

    y, t = torch.func.jvp(lambda s: F.all_sum_reduce(scaled(s), P), (s,), (2 * s,))
    assert y == 1.5 * n and t == 3 * n and y.dtype == dtype and (t.dtype == dtype or n == 1)
    y, t = torch.func.jvp(lambda s: F.broadcast(scaled(s), one, dd.Partition((n,)).take(0, n - 1)), (s,), (s,))
    assert y.sum() == t.sum() == (1.5 if r == n - 1 else 0) and (t.dtype == dtype or n == 1)
    with torch.autograd.forward_ad.dual_level():
        d = F.invariant_sum(scaled(torch.autograd.forward_ad.make_dual(s, s)), P)
        t = torch.autograd.forward_ad.unpack_dual(d).tangent
        assert t == 1.5 * n and (t.dtype == dtype or n == 1)


@pytest.mark.parametrize("shape", [(1, 5), (5,)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_second_derivative_of_one_example(shape, smoothing):
    X, V = randn(shape, 1).float(), randn(shape, 2).float()
    target = torch.tensor([3]) if len(shape) == 2 else torch.tensor(3)
    wanted = torch.func.jvp(
        torch.func.grad(lambda x: tf.cross_entropy(x, target, label_smoothing=smoothing)), (X,), (V,)
    )
    for L in layouts(shape, (len(shape) - 1,)).values():
        if not L.active:
            continue  # one example on one line of ranks: nobody waits for those outside
        found = torch.func.jvp(torch.func.grad(lambda x: F.dist_cross_entropy(x, target, L, label_smoothing=smoothing)),
                               (L.shard(X),), (L.shard(V),))  # fmt: skip
        for a, b in zip(found, wanted):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, L.shard(b))


# ---------------------------------------------------------------- channels_last

KERNEL, BACK = randn((4, 3, 3, 3), 3), randn((3, 4, 3, 3), 4)
FORMATS = {
    "conv": (lambda x, L: F.dist_conv(x, KERNEL, L, padding=1), lambda x: tf.conv2d(x, KERNEL, padding=1)),
    "conv, overlapped": (
        lambda x, L: F.dist_conv(x, KERNEL, L, padding=1, overlap=True),
        lambda x: tf.conv2d(x, KERNEL, padding=1),
    ),
    "conv_transpose": (lambda x, L: F.dist_conv_transpose(x, BACK, L), lambda x: tf.conv_transpose2d(x, BACK)),
    "max_pool": (lambda x, L: F.dist_max_pool(x, L, 3, 2, 1), lambda x: tf.max_pool2d(x, 3, 2, 1)),
    "avg_pool": (lambda x, L: F.dist_avg_pool(x, L, 3, 2, 1), lambda x: tf.avg_pool2d(x, 3, 2, 1)),
    "adaptive_max_pool": (lambda x, L: F.dist_adaptive_max_pool(x, L, 5), lambda x: tf.adaptive_max_pool2d(x, 5)),
    "adaptive_avg_pool": (lambda x, L: F.dist_adaptive_avg_pool(x, L, 5), lambda x: tf.adaptive_avg_pool2d(x, 5)),
    "nearest": (lambda x, L: F.dist_interpolate(x, L, (9, 7)), lambda x: tf.interpolate(x, (9, 7))),
    "bicubic": (
        lambda x, L: F.dist_interpolate(x, L, (9, 7), mode="bicubic"),
        lambda x: tf.interpolate(x, (9, 7), mode="bicubic"),
    ),
    "batch_norm": (
        lambda x, L: F.dist_batch_norm(x, L, None, None)[0],
        lambda x: tf.batch_norm(x, None, None, training=True),
    ),
    "group_norm": (lambda x, L: F.dist_group_norm(x, L, 3), lambda x: tf.group_norm(x, 3)),
    "instance_norm": (lambda x, L: F.dist_instance_norm(x, L), None),  # torch's does not keep it, and we may
    "layer_norm": (lambda x, L: F.dist_layer_norm(x, L, 6), None),
    "dropout": (lambda x, L: F.dist_dropout(x, L, 0.5, 1), lambda x: tf.dropout(x, 0.5)),
    "pad": (lambda x, L: F.dist_pad(x, L, (1, 1)), lambda x: tf.pad(x, (1, 1))),
    "halo": (lambda x, L: F.halo_exchange(x, dd.HaloSpec(L, 1, boundary="zeros")), lambda x: x),
    "repartition": (
        lambda x, L: F.repartition(x, L, dd.Partition((1, 1, 1, L.partition.size), L.partition.ranks)),
        lambda x: x,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_channels_last(name):
    """Values, gradients, tangents and batches do not depend on the memory format, and the result has x's where torch
    keeps it. One rank's may differ from its peers'."""
    dist, serial = FORMATS[name]
    r, last = dd.world().rank, torch.channels_last
    X = randn((2, 3, 10, 6), 5)
    for where, L in layouts(X.shape, (2, 0), grids=False).items():
        x = L.shard(X).contiguous()
        v = x.cos()
        plain = (
            *torch.func.jvp(lambda x: dist(x, L), (x,), (v,)),
            torch.func.grad(lambda x: (dist(x, L) ** 2).sum())(x),
        )
        for mixed in (False, True):
            z = x if mixed and r % 2 else x.to(memory_format=last)
            y = dist(z, L)
            found = (
                *torch.func.jvp(lambda x: dist(x, L), (z,), (v,)),
                torch.func.grad(lambda x: (dist(x, L) ** 2).sum())(z),
            )
            for a, b in zip((y, *found), (plain[0], *plain)):
                torch.testing.assert_close(a, b, msg=lambda m: f"{name} {where}: {m}")
            batch = torch.func.vmap(lambda x: dist(x, L))(torch.stack([z, 2 * z]))
            torch.testing.assert_close(batch[0], plain[0])
            free = serial is None or not L.active or z is x or 0 in x.shape  # of no element no format is known
            free = free or not serial(X.to(memory_format=last)).is_contiguous(memory_format=last)
            assert free or 0 in y.shape or y.is_contiguous(memory_format=last), (
                f"{name} {where}: {y.shape} {y.stride()}"
            )


# ---------------------------------------------------------------- torch.autocast

WEIGHT, LINE, ONES = randn((4, 3, 2), 1), randn((4, 5), 2), torch.ones(4)
CLASSES = torch.tensor([1, 0, 2])


def _experts(x, L, w):
    line = dd.Partition((L.partition.size,), L.partition.ranks)
    some = dd.Layout(line, (2,)).slices()[0] if L.active else slice(0, 0)  # fewer experts than ranks: some have none
    return F.dist_expert_linear(x, w.expand(2, 4, 5)[some], line, torch.arange(len(x)) % 2, num_experts=2)


def _conv_of_channels(x, L, w):
    return F.dist_conv(x, w[_part(F.conv_layout(L, 4, 2), 1)] if L.active else w[:1], L, out_channels=4)


def _local_conv(x, L, w):
    out = F.conv_layout(L, 4, 2)
    w = w[:, None].expand(4, L.shape[2] - 1, 3, 2)
    return F.dist_local_conv(x, w[_part(out, 1, 2)] if out.active else w[:1, :1], L, out_channels=4)


def _local_conv_transpose(x, L, w):
    w = (
        w.mT[:, None]
        .reshape(4, 1, 2, 3)
        .movedim(2, 0)[:, :1]
        .expand(2, L.shape[2], 4, 3)[:1]
        .expand(3, L.shape[2], 4, 3)
    )
    return F.dist_local_conv_transpose(x, w[_part(L, 1, 2)] if L.active else w[:1, :1], L)


def _targets(L):
    return CLASSES[_part(L, 0)] if L.active else CLASSES[:0]


# name -> (shape of x, split dims, distributed (x, layout, weight), serial (x, weight), the weight)
AUTOCAST = {
    "linear": (
        (3, 5),
        (0,),
        lambda x, L, w: F.dist_linear(x, w, dd.Partition((L.partition.shape[0], 1, 1), L.partition.ranks)),
        tf.linear,
        LINE,
    ),
    "expert": ((3, 5), (0,), _experts, tf.linear, LINE),
    "conv": ((3, 3, 2), (0, 2), lambda x, L, w: F.dist_conv(x, w, L, ONES[: len(w)]), tf.conv1d, WEIGHT),
    "conv, channels": ((3, 3, 2), (1,), _conv_of_channels, tf.conv1d, WEIGHT),
    "conv, overlapped": ((3, 3, 5), (2,), lambda x, L, w: F.dist_conv(x, w, L, ONES, overlap=True), tf.conv1d, WEIGHT),
    "conv_transpose": (
        (3, 4, 2),
        (0, 2),
        lambda x, L, w: F.dist_conv_transpose(x, w, L, ONES[:3]),
        tf.conv_transpose1d,
        WEIGHT,
    ),
    "local_conv": ((3, 3, 3), (1, 2), _local_conv, tf.conv1d, WEIGHT),
    "local_conv_transpose": (
        (3, 3, 2),
        (1, 2),
        _local_conv_transpose,
        lambda x, w: tf.conv_transpose1d(x, w.new_ones(3, 4, 3)),
        WEIGHT,
    ),
    "batch_norm": (
        (3, 3, 2),
        (1, 2),
        lambda x, L, w: F.dist_batch_norm(x, L, None, None)[0],
        lambda x, w: tf.batch_norm(x, None, None, training=True),
        WEIGHT,
    ),
    "cross_entropy": (
        (3, 3),
        (0, 1),
        lambda x, L, w: F.dist_cross_entropy(x, _targets(L), L),
        lambda x, w: tf.cross_entropy(x, CLASSES),
        WEIGHT,
    ),
    "cross_entropy, none": (
        (3, 3),
        (0, 1),
        lambda x, L, w: F.dist_cross_entropy(x, _targets(L), L, reduction="none"),
        lambda x, w: tf.cross_entropy(x, CLASSES, reduction="none"),
        WEIGHT,
    ),
    "nll": (
        (3, 3),
        (0, 1),
        lambda x, L, w: F.dist_nll_loss(x, _targets(L), L),
        lambda x, w: tf.nll_loss(x, CLASSES),
        WEIGHT,
    ),
}


def _alike(name, shape, dims, dist, serial, *args, **kwargs):
    """A layer and its serial twin that take the same arguments after x."""
    AUTOCAST[name] = (
        shape,
        dims,
        lambda x, L, w: dist(x, L, *args, **kwargs),
        lambda x, w: serial(x, *args, **kwargs),
        WEIGHT,
    )


def _loss_alike(name, dist, serial, reduction):
    AUTOCAST[f"{name}, {reduction}"] = (
        (3, 5), (0, 1), lambda x, L, w: dist(x.sigmoid(), x.detach().sigmoid(), L, reduction),
        lambda x, w: serial(x.sigmoid(), x.detach().sigmoid(), reduction=reduction), WEIGHT)  # fmt: skip


for _name, _serial in {
    "max_pool": tf.max_pool1d,
    "avg_pool": tf.avg_pool1d,
    "adaptive_max_pool": tf.adaptive_max_pool1d,
    "adaptive_avg_pool": tf.adaptive_avg_pool1d,
    "interpolate": tf.interpolate,
    "group_norm": tf.group_norm,
}.items():
    _alike(_name, (3, 2, 4), (1, 2), getattr(F, f"dist_{_name}"), _serial, 2)
for _name in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"):
    _alike(f"{_name}3d", (1, 1, 2, 2, 4), (3, 4), getattr(F, f"dist_{_name}"), getattr(tf, f"{_name}3d"), 2)
_alike("global_avg_pool3d", (1, 1, 2, 2, 4), (4,), F.dist_adaptive_avg_pool, tf.adaptive_avg_pool3d, 1)
_alike("area3d", (1, 1, 2, 2, 4), (4,), F.dist_interpolate, tf.interpolate, 2, mode="area")
AUTOCAST["tsqr"] = (
    (7, 2),
    (0,),
    lambda x, L, w: F.dist_tsqr(x, L)[1],
    lambda x, w: torch.linalg.qr(x)[1],
    WEIGHT,
)
AUTOCAST["l2_pool3d"] = (
    (1, 1, 2, 2, 4),
    (4,),
    lambda x, L, w: F.dist_l2_pool(x, L, 2),
    lambda x, w: tf.lp_pool3d(x, 2, 2),
    WEIGHT,
)
_alike("layer_norm", (3, 2, 3), (0, 2), F.dist_layer_norm, tf.layer_norm, (3,))
_alike("rms_norm", (3, 2, 3), (0, 2), F.dist_rms_norm, tf.rms_norm, (3,))
_alike("instance_norm", (3, 2, 3), (0, 2), F.dist_instance_norm, tf.instance_norm)
for _name, _serial in {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "var": torch.var,
    "logsumexp": torch.logsumexp,
    "norm": torch.linalg.vector_norm,
}.items():
    _alike(_name, (3, 5), (0, 1), getattr(F, f"dist_{_name}"), _serial, dim=1)
for _name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "kl_div", "poisson_nll_loss", "bce_loss",
              "bce_with_logits_loss"):  # fmt: skip
    _long = {"bce_loss": "binary_cross_entropy", "bce_with_logits_loss": "binary_cross_entropy_with_logits"}.get(
        _name, _name
    )
    for _reduction in ("mean", "none"):
        _loss_alike(_name, getattr(F, f"dist_{_name}"), getattr(tf, _long), _reduction)


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")  # of the serial twin, tf.kl_div
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name):
    """Every layer's result has the dtype of the serial one under the same autocast, on ranks with empty blocks and
    outside too; gradients have their tensor's dtype."""
    shape, dims, dist, serial, W = AUTOCAST[name]
    X, faults = randn(shape, 3), []
    for dtype, given in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        with torch.autocast("cpu", dtype):
            wanted = serial(X.to(given), W.float()).dtype
        for where, L in layouts(shape, dims, grids=False).items():
            x, w = L.shard(X).to(given).requires_grad_(), W.float().requires_grad_()
            with torch.autocast("cpu", dtype):
                y = dist(x, L, w)
            y.sum().backward()
            if y.dtype != wanted or x.grad.dtype != given or (w.grad is not None and w.grad.dtype != torch.float32):
                faults.append(f"{where}, {given} under {dtype}: {y.dtype}, not {wanted}")
    dd.testing.collective_assert(not faults, f"{name}: {faults}")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex32"])
def test_sums_of_dtypes_that_torch_cannot_add(name):
    (n, r, P), dtype = here(), getattr(torch, name)
    X = (torch.arange(2 * n) % 3).to(torch.float32).to(dtype)
    L, whole = dd.Layout(P, (2 * n,)), (torch.arange(2 * n) % 3 * n).to(torch.float32).to(dtype)

    def same(y, expected):
        assert y.dtype == dtype and torch.equal(y.to(torch.complex64), expected.to(torch.complex64))

    same(F.all_sum_reduce(X, P), whole)
    same(F.invariant_sum((X, X), P)[1], whole)
    same(F.reduce_scatter(X, P), whole[2 * r : 2 * r + 2])
    same(F.sum_reduce(X, P, dd.Partition((1,))), whole if r == 0 else whole[:0])
    same(
        dd.maps.halo_exchange(dd.HaloSpec(L, 1, boundary="circular")).T(torch.ones(4).to(dtype)),
        torch.full((2,), 2.0).to(dtype),
    )


def test_sums_of_large_uint64():
    n, _, P = here()
    big = torch.tensor([2**63 + 5, 7], dtype=torch.uint64)
    assert F.all_sum_reduce(big, P).tolist() == [n * (2**63 + 5) % 2**64, 7 * n]
