"""Every dtype that torch can store moves unchanged; sums of half precisions are taken in float32."""

import pytest
import torch
import torch.nn.functional as tf
from registry import each_case, integers, needs, randn
from serial import layouts

import distdl as dd
import distdl.functional as F

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64, torch.complex128]  # fmt: skip


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
    spec = dd.HaloSpec(dd.Layout(P, (3,)), 1, boundary="none")  # adjoint on rank 1: its own, and both neighbours' ghosts
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


# ---------------------------------------------------------------- torch.autocast

WEIGHT, LINE, ONES = randn((4, 3, 2), 1), randn((4, 5), 2), torch.ones(4)
CLASSES = torch.tensor([1, 0, 2])


def _part(L, *dims):
    return tuple(L.slices()[d] for d in dims)


def _experts(x, L, w):
    line = dd.Partition((L.partition.size,), L.partition.ranks)
    some = dd.Layout(line, (2,)).slices()[0] if L.active else slice(0, 0)  # fewer experts than ranks: some have none
    return F.dist_expert_linear(x, w.expand(2, 4, 5)[some], line, torch.arange(len(x)) % 2, num_experts=2)


def _local_conv(x, L, w):
    out = F.conv_layout(L, 4, 2)
    w = w[:, None].expand(4, L.shape[2] - 1, 3, 2)
    return F.dist_local_conv(x, w[_part(out, 1, 2)] if out.active else w[:1, :1], L, out_channels=4)


def _local_conv_transpose(x, L, w):
    w = w.mT[:, None].reshape(4, 1, 2, 3).movedim(2, 0)[:, :1].expand(2, L.shape[2], 4, 3)[:1].expand(3, L.shape[2], 4, 3)
    return F.dist_local_conv_transpose(x, w[_part(L, 1, 2)] if L.active else w[:1, :1], L)


def _targets(L):
    return CLASSES[_part(L, 0)] if L.active else CLASSES[:0]


# name -> (shape of x, split dims, distributed (x, layout, weight), serial (x, weight), the weight)
AUTOCAST = {
    "linear": ((3, 5), (0,), lambda x, L, w: F.dist_linear(x, w, dd.Partition((L.partition.shape[0], 1, 1), L.partition.ranks)),
               tf.linear, LINE),
    "expert": ((3, 5), (0,), _experts, tf.linear, LINE),
    "conv": ((3, 3, 2), (0, 2), lambda x, L, w: F.dist_conv(x, w, L, ONES[: len(w)]), tf.conv1d, WEIGHT),
    "conv, channels": ((3, 3, 2), (1,), lambda x, L, w: F.dist_conv(x, w[_part(F.conv_layout(L, 4, 2), 1)] if L.active else w[:1], L,
                                                                    out_channels=4), tf.conv1d, WEIGHT),
    "conv, overlapped": ((3, 3, 5), (2,), lambda x, L, w: F.dist_conv(x, w, L, ONES, overlap=True), tf.conv1d, WEIGHT),
    "conv_transpose": ((3, 4, 2), (0, 2), lambda x, L, w: F.dist_conv_transpose(x, w, L, ONES[:3]), tf.conv_transpose1d, WEIGHT),
    "local_conv": ((3, 3, 3), (1, 2), _local_conv, tf.conv1d, WEIGHT),
    "local_conv_transpose": ((3, 3, 2), (1, 2), _local_conv_transpose, lambda x, w: tf.conv_transpose1d(x, w.new_ones(3, 4, 3)), WEIGHT),
    "batch_norm": ((3, 3, 2), (1, 2), lambda x, L, w: F.dist_batch_norm(x, L, None, None)[0],
                   lambda x, w: tf.batch_norm(x, None, None, training=True), WEIGHT),
    "cross_entropy": ((3, 3), (0, 1), lambda x, L, w: F.dist_cross_entropy(x, _targets(L), L),
                      lambda x, w: tf.cross_entropy(x, CLASSES), WEIGHT),
    "cross_entropy, none": ((3, 3), (0, 1), lambda x, L, w: F.dist_cross_entropy(x, _targets(L), L, reduction="none"),
                            lambda x, w: tf.cross_entropy(x, CLASSES, reduction="none"), WEIGHT),
    "nll": ((3, 3), (0, 1), lambda x, L, w: F.dist_nll_loss(x, _targets(L), L), lambda x, w: tf.nll_loss(x, CLASSES), WEIGHT),
}  # fmt: skip
for _name, _serial in {
    "max_pool": tf.max_pool1d, "avg_pool": tf.avg_pool1d, "adaptive_max_pool": tf.adaptive_max_pool1d,
    "adaptive_avg_pool": tf.adaptive_avg_pool1d, "interpolate": tf.interpolate, "group_norm": tf.group_norm,
}.items():  # fmt: skip
    AUTOCAST[_name] = ((3, 2, 4), (1, 2), lambda x, L, w, dist=getattr(F, f"dist_{_name}"): dist(x, L, 2),
                       lambda x, w, serial=_serial: serial(x, 2), WEIGHT)
for _name in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"):
    AUTOCAST[f"{_name}3d"] = ((1, 1, 2, 2, 4), (3, 4), lambda x, L, w, dist=getattr(F, f"dist_{_name}"): dist(x, L, 2),
                              lambda x, w, serial=getattr(tf, f"{_name}3d"): serial(x, 2), WEIGHT)
AUTOCAST["global_avg_pool3d"] = ((1, 1, 2, 2, 4), (4,), lambda x, L, w: F.dist_adaptive_avg_pool(x, L, 1),
                                 lambda x, w: tf.adaptive_avg_pool3d(x, 1), WEIGHT)
AUTOCAST["area3d"] = ((1, 1, 2, 2, 4), (4,), lambda x, L, w: F.dist_interpolate(x, L, 2, mode="area"),
                      lambda x, w: tf.interpolate(x, 2, mode="area"), WEIGHT)
AUTOCAST["l2_pool3d"] = ((1, 1, 2, 2, 4), (4,), lambda x, L, w: F.dist_l2_pool(x, L, 2), lambda x, w: tf.lp_pool3d(x, 2, 2), WEIGHT)
for _name, _rest in {"layer_norm": (3,), "rms_norm": (3,), "instance_norm": ()}.items():
    AUTOCAST[_name] = ((3, 2, 3), (0, 2), lambda x, L, w, dist=getattr(F, f"dist_{_name}"), rest=_rest: dist(x, L, *rest),
                       lambda x, w, serial=getattr(tf, _name), rest=_rest: serial(x, *[rest] if rest else ()), WEIGHT)
for _name, _serial in {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "var": torch.var, "logsumexp": torch.logsumexp,
                       "norm": torch.linalg.vector_norm}.items():  # fmt: skip
    AUTOCAST[_name] = ((3, 5), (0, 1), lambda x, L, w, dist=getattr(F, f"dist_{_name}"): dist(x, L, 1),
                       lambda x, w, serial=_serial: serial(x, dim=1), WEIGHT)
for _name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "bce_loss", "bce_with_logits_loss", "kl_div", "poisson_nll_loss"):
    _serial = getattr(tf, _name.replace("bce", "binary_cross_entropy").replace("logits_loss", "logits").replace("entropy_loss", "entropy"))
    AUTOCAST[_name] = ((3, 5), (0, 1), lambda x, L, w, dist=getattr(F, f"dist_{_name}"): dist(x.sigmoid(), x.detach().sigmoid(), L),
                       lambda x, w, serial=_serial: serial(x.sigmoid(), x.detach().sigmoid()), WEIGHT)
    AUTOCAST[f"{_name}, none"] = (
        (3, 5), (0, 1), lambda x, L, w, dist=getattr(F, f"dist_{_name}"): dist(x.sigmoid(), x.detach().sigmoid(), L, "none"),
        lambda x, w, serial=_serial: serial(x.sigmoid(), x.detach().sigmoid(), reduction="none"), WEIGHT)  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")  # of the serial twin, tf.kl_div
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name):
    """Every layer's result has the dtype of the serial one under the same autocast, on ranks with empty blocks and outside too;
    gradients have their tensor's dtype."""
    shape, dims, dist, serial, W = AUTOCAST[name]
    X, faults = randn(shape, 3), []
    for dtype, given in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
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
