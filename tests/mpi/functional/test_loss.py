"""Losses against serial torch: invariant scalars whose gradients are right as they stand."""

import math

import pytest
import torch
import torch.nn.functional as f
from serial import along, check_layer, layouts, messages, randn, whole

import distdl as dd
import distdl.functional as F
from distdl.errors import ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:reduction. .mean. divides")  # of the serial twin, f.kl_div

SHAPE = (5, 3)
PROBABILITY, COUNTS, LOG = ("between 0 and 1", "counts", "logarithms")

POINTWISE = {  # name: (distributed, serial, kind of x, kind of y, options)
    "mse": (F.dist_mse_loss, f.mse_loss, None, None, {}),
    "l1": (F.dist_l1_loss, f.l1_loss, None, None, {}),
    "smooth_l1": (F.dist_smooth_l1_loss, f.smooth_l1_loss, None, None, {"beta": 0.7}),
    "smooth_l1 0": (F.dist_smooth_l1_loss, f.smooth_l1_loss, None, None, {"beta": 0}),
    "huber": (F.dist_huber_loss, f.huber_loss, None, None, {"delta": 1.3}),
    "bce": (F.dist_bce_loss, f.binary_cross_entropy, PROBABILITY, PROBABILITY, {}),
    "bce_with_logits": (F.dist_bce_with_logits_loss, f.binary_cross_entropy_with_logits, None, PROBABILITY, {}),
    "kl_div": (F.dist_kl_div, f.kl_div, LOG, PROBABILITY, {}),
    "kl_div log": (F.dist_kl_div, f.kl_div, LOG, LOG, {"log_target": True}),
    "poisson": (F.dist_poisson_nll_loss, f.poisson_nll_loss, None, COUNTS, {}),
    "poisson full": (
        F.dist_poisson_nll_loss,
        f.poisson_nll_loss,
        PROBABILITY,
        COUNTS,
        {"full": True, "log_input": False},
    ),
}


def sample(kind, *shape, seed):
    x = randn(*shape, seed=seed)
    return {None: x, PROBABILITY: x.sigmoid(), LOG: -x.abs(), COUNTS: (3 * x).abs().round()}[kind]


def elementary(serial, name):
    """The serial loss as elementary operations where torch has no second derivative of its own."""
    if name == "mse":
        return lambda x, y, reduction: _reduced((x - y).square(), reduction)
    if name == "huber":

        def huber(d, delta):
            return torch.where(d <= delta, d**2 / 2, delta * (d - delta / 2))

        return lambda x, y, reduction, delta: _reduced(huber((x - y).abs(), delta), reduction)
    return serial


def _reduced(losses, reduction):
    return losses if reduction == "none" else getattr(losses, reduction)()


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name):
    dist, serial, kind_x, kind_y, options = POINTWISE[name]
    x, y = sample(kind_x, *SHAPE, seed=1), sample(kind_y, *SHAPE, seed=2)
    mean = dict(reduction="mean", **options)
    torch.testing.assert_close(elementary(serial, name)(x, y, **mean), serial(x, y, **mean))
    for i, L in enumerate(layouts(SHAPE).values()):
        for reduction in ("mean", "sum", "none") if i == 0 else ("mean",):
            check_layer(
                lambda x, y: dist(x, y, L if i % 2 else L.partition, reduction=reduction, **options),
                lambda x, y: elementary(serial, name)(x, y, reduction=reduction, **options),
                [x, y],
                [L, L],
                L if reduction == "none" else whole,
                argnums=(0,) if kind_y == COUNTS else None,
                orders=2 if i == 0 and reduction == "mean" else 1,
                name=f"{name} {reduction} {L}",
            )


def test_weights_and_batchmean():
    x, y, w = randn(*SHAPE, seed=1), sample(PROBABILITY, *SHAPE, seed=2), sample(PROBABILITY, *SHAPE, seed=3)
    for L in layouts(SHAPE).values():
        for reduction in ("mean", "sum"):
            check_layer(
                lambda x, w: F.dist_bce_with_logits_loss(x, L.shard(y), L, reduction, w, pos_weight=w + 1),
                lambda x, w: f.binary_cross_entropy_with_logits(x, y, w, reduction=reduction, pos_weight=w + 1),
                [x, w],
                [L, L],
                whole,
                argnums=(0,),
                orders=1,
            )
        check_layer(
            lambda x: F.dist_bce_loss(x, L.shard(y), L, weight=L.shard(w)),
            lambda x: f.binary_cross_entropy(x, y, w),
            [y * 0.9],
            [L],
            whole,
            orders=1,
        )
        for P in (L, L.partition):
            check_layer(
                lambda x: F.dist_kl_div(x, L.shard(y), P, "batchmean"),
                lambda x: f.kl_div(x, y, reduction="batchmean"),
                [x],
                [L],
                whole,
                orders=1,
            )


def test_pointwise_limits():
    """Where formulas overflow: large logits, probabilities of exactly 0 and 1, targets of 0."""
    L = next(iter(layouts((4,)).values()))
    x, y = torch.tensor([-800.0, 800, 0, 30], dtype=torch.float64), torch.tensor([0.0, 1, 1, 0], dtype=torch.float64)
    check_layer(
        lambda x: F.dist_bce_with_logits_loss(x, L.shard(y), L),
        lambda x: f.binary_cross_entropy_with_logits(x, y),
        [x],
        [L],
        whole,
    )
    p = torch.tensor([0.0, 1, 1, 1e-60], dtype=torch.float64)
    check_layer(
        lambda x: F.dist_bce_loss(x, L.shard(y), L), lambda x: f.binary_cross_entropy(x, y), [p], [L], whole, orders=0
    )
    assert torch.func.grad(lambda x: F.dist_bce_loss(x, L.shard(y), L))(L.shard(p)).isfinite().all()
    check_layer(lambda x: F.dist_kl_div(x, L.shard(y), L), lambda x: f.kl_div(x, y), [x], [L], whole)
    big = torch.tensor([1e200, -1e200, 0.5, 3], dtype=torch.float64)
    check_layer(
        lambda x: F.dist_huber_loss(x, L.shard(y), L), lambda x: f.huber_loss(x, y), [big], [L], whole, orders=1
    )


# ---------------------------------------------------------------- classes

X = randn(5, 7, 3, seed=5)
W = randn(7, seed=6).abs() + 0.1


def targets(ignored=-100):
    t = torch.randint(0, 7, (5, 3), generator=torch.Generator().manual_seed(7))
    t[0, 0] = t[3, 1] = t[4, 2] = ignored
    return t


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_case_35_cross_entropy(weighted, smoothing):
    """Split classes with ignore_index, class weights and label smoothing."""
    w = W if weighted else None
    for i, L in enumerate(layouts(X.shape, (1, 0, 2)).values()):
        ignored = (-100, 2)[i % 2]
        t, where = targets(ignored), along(L, 1)
        P = L if i % 2 and not L.splits else L.partition
        for reduction in ("mean", "sum", "none") if i == 0 else ("mean",):
            options = dict(ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
            check_layer(
                lambda x, t: F.dist_cross_entropy(x, t, P, where(w) if weighted else None, **options),
                lambda x, t: f.cross_entropy(x, t, w, **options),
                [X, t],
                [L, along(L, 0, 2)],
                along(L, 0, 2) if reduction == "none" else whole,
                orders=2 if i == 0 else 1,
                name=f"{L} {reduction}",
            )


@pytest.mark.parametrize("weighted", [False, True])
def test_nll(weighted):
    w = W if weighted else None
    for i, L in enumerate(layouts(X.shape, (1, 0, 2)).values()):
        where = along(L, 1)
        check_layer(
            lambda x, t: F.dist_nll_loss(x, t, L.partition, where(w) if weighted else None),
            lambda x, t: f.nll_loss(x, t, w),
            [X, targets()],
            [L, along(L, 0, 2)],
            whole,
            orders=2 if i == 0 else 1,
        )


def test_class_probabilities():
    T = randn(*X.shape, seed=8).softmax(1)
    for i, L in enumerate(layouts(X.shape, (1, 0)).values()):
        where = along(L, 1)
        for w, smoothing in ((None, 0.0), (W, 0.3)):
            check_layer(
                lambda x, t: F.dist_cross_entropy(x, t, L, None if w is None else where(w), label_smoothing=smoothing),
                lambda x, t: f.cross_entropy(x, t, w, label_smoothing=smoothing),
                [X, T],
                [L, L],
                whole,
                orders=2 if i == 0 else 1,
            )


def test_classes_without_batch_or_space():
    t = torch.tensor(3)
    for L in layouts((7,)).values():
        check_layer(lambda x: F.dist_cross_entropy(x, t, L), lambda x: f.cross_entropy(x, t), [X[0, :, 0]], [L], whole)
    for L in layouts((5, 7)).values():
        check_layer(
            lambda x, t: F.dist_cross_entropy(x, t, L),
            f.cross_entropy,
            [X[:, :, 0], targets()[:, 0]],
            [L, along(L, 0)],
            whole,
            orders=1,
        )


def test_masked_and_large_logits():
    """-inf on all classes of a rank, and logits whose exponential overflows."""
    x = randn(4, 8, seed=9) * 500
    x[:, :6] = -math.inf
    t = torch.tensor([6, 7, 7, 6])
    for L in layouts(x.shape, (1, 0)).values():
        check_layer(lambda x, t: F.dist_cross_entropy(x, t, L), f.cross_entropy, [x, t], [L, along(L, 0)], whole)


def test_all_targets_ignored():
    t = torch.full((5, 3), -100)
    for L in layouts(X.shape, (1, 0)).values():
        if L.active:
            loss = F.dist_cross_entropy(L.shard(X), along(L, 0, 2)(t), L)
            assert loss.isnan() and f.cross_entropy(X, t).isnan()
            assert F.dist_cross_entropy(L.shard(X), along(L, 0, 2)(t), L, reduction="sum").item() == 0


def test_low_precision():
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for L in layouts(X.shape, (1, 0)).values():
            check_layer(
                lambda x, t: F.dist_cross_entropy(x, t, L),
                f.cross_entropy,
                [X.to(dtype), targets()],
                [L, along(L, 0, 2)],
                whole,
                rtol=rtol,
                orders=1,
            )
            check_layer(
                lambda x, y: F.dist_mse_loss(x, y, L),
                lambda x, y: (x - y).square().mean(),
                [X.to(dtype), X.cos().to(dtype)],
                [L, L],
                whole,
                rtol=rtol,
                orders=1,
            )


def test_loss_is_invariant():
    """Bitwise equal everywhere; plain ``backward`` and ``grad`` give the serial gradient, not k times it."""
    for L in layouts(X.shape, (1, 0)).values():
        x = L.shard(X).clone().requires_grad_()
        loss = F.dist_cross_entropy(x, along(L, 0, 2)(targets()), L)
        loss.backward()
        values = dd.testing.gather_objects(loss.item())
        assert len({v for r, v in enumerate(values) if r in L.partition.ranks}) == 1
        expected = torch.func.grad(lambda x: f.cross_entropy(x, targets()))(X)
        torch.testing.assert_close(x.grad, L.shard(expected), rtol=1e-12, atol=1e-14)


def test_messages():
    n = dd.world().size
    peers, reduced = n - 1, int(n > 1)
    x = randn(4, 2 * n, 3)
    t = torch.zeros(4, 3, dtype=torch.int64)
    L = dd.Layout(dd.Partition((1, n, 1)), x.shape)
    P, w, block = L.partition, torch.ones(2, dtype=torch.float64), L.shard(x).clone().requires_grad_()
    for call, rows in [
        (lambda: F.dist_cross_entropy(block, t, L), 2),
        (lambda: F.dist_cross_entropy(block, t, L, w), 3),
        (lambda: F.dist_cross_entropy(block, t, L, w, label_smoothing=0.1), 4),
        (lambda: F.dist_cross_entropy(block, block.detach(), L), 3),
    ]:
        assert messages(call) == (peers, 12 * peers, reduced, 12 * rows * reduced, 0)
        assert messages(call().backward) == (0, 0, 0, 0, 0)
    assert messages(lambda: F.dist_cross_entropy(block, t, P))[4] == reduced
    for call, size in [(lambda: F.dist_nll_loss(block, t, L), 12), (lambda: F.dist_nll_loss(block, t, L, w), 24),
                       (lambda: F.dist_mse_loss(block, block, P), 2), (lambda: F.dist_mse_loss(block, block, L), 1),
                       (lambda: F.dist_mse_loss(block, block, P, "sum"), 1),
                       (lambda: F.dist_kl_div(block, block, P, "batchmean"), 2),
                       (lambda: F.dist_mse_loss(block, block, P, "none"), 0)]:  # fmt: skip
        assert messages(call) == (0, 0, reduced if size else 0, size * reduced, 0)
    batch = dd.Layout(dd.Partition((n, 1, 1)), (4 * n, 2, 3))
    y = batch.shard(randn(4 * n, 2, 3)).clone().requires_grad_()
    for reduction, size in (("mean", 2), ("sum", 1), ("none", 0)):
        call = lambda: F.dist_cross_entropy(y, t, batch.partition, reduction=reduction)
        assert messages(call) == (0, 0, reduced if size else 0, size * reduced, 0)
        assert messages(call().sum().backward) == (0, 0, 0, 0, 0)


def test_errors():
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, n)), (2, 3 * n))
    x = torch.zeros(2, 3)
    for call, words in [
        (lambda: F.dist_mse_loss(x, x[:1], L), "shapes"),
        (lambda: F.dist_mse_loss(x, x, L, "batchmean"), "reduction"),
        (lambda: F.dist_mse_loss(x[:1], x[:1], L), "block"),
        (lambda: F.dist_cross_entropy(x, torch.zeros(3, dtype=torch.int64), L), "target"),
        (lambda: F.dist_cross_entropy(x, torch.zeros(2, dtype=torch.int32), L), "target"),
        (lambda: F.dist_cross_entropy(x, torch.tensor([0, 3 * n]), L), "no class"),
        (lambda: F.dist_cross_entropy(x, torch.tensor([0, 1]), L, torch.ones(4)), "weight"),
        (lambda: F.dist_cross_entropy(x, torch.tensor([0, 1]), L, label_smoothing=2), "smoothing"),
    ]:
        with pytest.raises(ShapeError, match=words):
            call()
    # under a transform there is no looking at values: such a loss is NaN
    assert torch.func.grad(lambda x: F.dist_cross_entropy(x, torch.tensor([0, -7]), L))(x).isnan().any()


def test_infinite_and_nan_logits():
    """Values and gradients are torch's, NaN where torch's are."""
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [
            [1, 2, 3, -1],
            [inf, 1, 2, 0],
            [1, inf, 0, inf],
            [-inf, 0, 1, 2],
            [0, 1, 2, -inf],
            [-inf] * 4,
            [nan, 0, 1, 2],
            [-inf, inf, 0, 0],
        ],
        dtype=torch.float64,
    )
    for target, smoothing, reduction in ((0, 0.0, "none"), (3, 0.2, "none"), (-100, 0.2, "sum"), (1, 0.0, "mean")):
        t = torch.full((len(x),), target)
        t[0] = 1
        X = x.clone().requires_grad_()
        Y = f.cross_entropy(X, t, reduction=reduction, label_smoothing=smoothing)
        Y.sum().backward()
        for name, L in layouts(x.shape, (1, 0)).items():
            z = L.shard(x).clone().requires_grad_()
            y = F.dist_cross_entropy(z, along(L, 0)(t), L, reduction=reduction, label_smoothing=smoothing)
            y.sum().backward()
            if L.active:
                torch.testing.assert_close(y, along(L, 0)(Y) if reduction == "none" else Y, equal_nan=True, msg=name)
                torch.testing.assert_close(z.grad, L.shard(X.grad), equal_nan=True, msg=name)


DTYPES = [torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("name", [n for n in POINTWISE if " " not in n])
def test_dtypes_of_predictions_and_targets(name):
    """The dtype and the values of torch where torch takes the pair, or one clear error on every rank."""
    dist, serial, kind_x, kind_y, _ = POINTWISE[name]
    L = dd.Layout(dd.Partition((dd.world().size, 1)), SHAPE)
    taken = 0
    for a in DTYPES:
        for b in DTYPES:
            x, y = (
                t.to(d) if not d.is_complex else torch.complex(t, t / 2).to(d)
                for t, d in zip((sample(kind_x, *SHAPE, seed=1), sample(kind_y, *SHAPE, seed=2).abs()), (a, b))
            )
            for reduction in ("none", "mean"):
                try:
                    found = dist(L.shard(x), L.shard(y), L, reduction)
                except ShapeError as error:
                    found = str(error)
                    assert "this loss is not of such tensors" in found
                try:
                    wanted = serial(x, y, reduction=reduction)
                except (RuntimeError, NotImplementedError, TypeError):
                    # torch refuses; of two floating dtypes, or a whole-numbered target, ours may be there, promoted
                    assert isinstance(found, str) or (a.is_floating_point and not b.is_complex)
                    continue
                if isinstance(found, str):
                    assert not a.is_floating_point or (b.is_complex and name != "l1"), f"{name} {a} {b}: {found}"
                    continue
                taken += 1
                if torch.float16 in (a, b) or (
                    name in ("huber", "bce_with_logits") and a != b
                ):  # there torch has one of the two
                    continue
                assert found.dtype == wanted.dtype, f"{name} {a} {b}: {found.dtype}, not {wanted.dtype}"
                torch.testing.assert_close(
                    found, L.shard(wanted) if reduction == "none" else wanted, rtol=1e-4, atol=1e-5
                )
    assert taken >= 6
