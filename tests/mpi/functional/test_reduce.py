"""Reductions over partitioned tensors against serial torch; results invariant, gradients as they stand."""

import math

import pytest
import torch
from registry import here
from serial import along, check_layer, layouts, messages, randn, whole

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError, ShapeError

SHAPE = (5, 3)

CASES = {
    "sum": (F.dist_sum, torch.sum, {}),
    "mean": (F.dist_mean, torch.mean, {}),
    "max": (F.dist_max, torch.amax, {}),
    "min": (F.dist_min, torch.amin, {}),
    "norm 2": (F.dist_norm, torch.linalg.vector_norm, {}),
    "norm 1": (F.dist_norm, torch.linalg.vector_norm, {"ord": 1}),
    "norm 3.5": (F.dist_norm, torch.linalg.vector_norm, {"ord": 3.5}),
    "norm inf": (F.dist_norm, torch.linalg.vector_norm, {"ord": math.inf}),
    "norm -inf": (F.dist_norm, torch.linalg.vector_norm, {"ord": -math.inf}),
    "var": (F.dist_var, torch.var, {}),
    "var 0": (F.dist_var, torch.var, {"correction": 0}),
    "logsumexp": (F.dist_logsumexp, torch.logsumexp, {}),
}


def check(name, x, L, P, dim, keepdim=False, **options):
    dist, serial, kwargs = CASES[name]
    dims = L.partition.dims(dim)
    at = {"dim": dim, "keepdim": keepdim} if dim is not None else {}

    def part(y):
        cut = [slice(None) if d in dims else s for d, s in enumerate(L.slices()) if keepdim or d not in dims]
        return y[tuple(cut)]

    check_layer(
        lambda x: dist(x, P, **at, **kwargs),
        lambda x: serial(x, **at, **kwargs),
        [x],
        [L],
        part,
        name=f"{name} {dim} {keepdim} {L}",
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_against_serial(name):
    x = randn(*SHAPE, seed=3)
    for i, L in enumerate(layouts(SHAPE).values()):
        P = L if i % 2 or L.splits else L.partition
        if i % 2 == 0 and name != "logsumexp":
            check(name, x, L, P, None, orders=2 if i == 0 else 1)
        else:
            check(name, x, L, P, 0, keepdim=bool(i % 4), orders=2 if i == 1 else 1)


def test_several_dims_of_three():
    x = randn(3, 4, 5)
    for L in layouts(x.shape, (1, 2)).values():
        for name in ("sum", "mean", "max"):
            check(name, x, L, L.partition, (0, 2), orders=1)


def test_case_34_means_count_elements():
    """Blocks of sizes that differ: the mean is that of the elements, not of the blocks' means."""
    n = dd.world().size
    L = dd.Layout(dd.Partition((n,)), (3 * n,), ((2 * n + 1, *[1] * (n - 1)),) if n > 1 else None)
    x = torch.arange(3.0 * n, dtype=torch.float64) ** 2
    for P in (L, L.partition):
        assert torch.allclose(F.dist_mean(L.shard(x), P), x.mean(), rtol=1e-14)


def test_equal_largest_elements_share_the_gradient():
    """As amax: 1/k to each of k equal elements, wherever they lie; and the value is exact."""
    x = torch.tensor([0.1, 0.3, 0.3, -1.0, 0.3, 0.3, 0.0, 0.3, 0.3, 0.3], dtype=torch.float64)
    for L in layouts(x.shape).values():
        check_layer(lambda x: F.dist_max(x, L), torch.amax, [x], [L], whole)
        check_layer(lambda x: F.dist_min(x, L), torch.amin, [-x], [L], whole)
        assert not L.active or F.dist_max(L.shard(x), L).item() == 0.3


def test_special_values():
    inf, nan = math.inf, math.nan
    for values in ([1, inf, 3, inf], [-inf] * 4, [1, nan, 3, 4], [-inf, 2, -inf, 1]):
        x = torch.tensor(values, dtype=torch.float64)
        for L in layouts(x.shape).values():
            if not L.active:
                continue
            for dist, serial in ((F.dist_max, torch.amax), (F.dist_min, torch.amin)):
                torch.testing.assert_close(dist(L.shard(x), L), serial(x), equal_nan=True, rtol=0, atol=0)
            assert F.dist_argmax(L.shard(x), L).item() == x.argmax().item()
            expected = torch.func.grad(lambda x: x.logsumexp(0))(x)
            torch.testing.assert_close(F.dist_logsumexp(L.shard(x), L, 0), x.logsumexp(0), equal_nan=True)
            if expected.isfinite().all():
                torch.testing.assert_close(
                    torch.func.grad(lambda x: F.dist_logsumexp(x, L, 0))(L.shard(x)), L.shard(expected)
                )


def test_norm_at_zero_has_gradient_zero():
    for L in layouts((4,)).values():
        x = L.shard(torch.zeros(4, dtype=torch.float64)).clone().requires_grad_()
        for order in (1, 1.5, 2):
            assert torch.equal(torch.autograd.grad(F.dist_norm(x, L, ord=order), x)[0], torch.zeros_like(x))
        assert not L.active or F.dist_norm(x + 1, L, ord=0).item() == 4


def test_integers_and_dtypes():
    x = torch.randint(-50, 50, (7,), generator=torch.Generator().manual_seed(1))
    for L in layouts(x.shape).values():
        if L.active:
            for dist, serial in (
                (F.dist_sum, torch.sum),
                (F.dist_max, torch.amax),
                (F.dist_min, torch.amin),
                (F.dist_argmax, torch.argmax),
            ):
                y = dist(L.shard(x), L)
                assert torch.equal(y, serial(x)) and y.dtype == serial(x).dtype
            assert torch.equal(F.dist_max(L.shard(x) > 60, L), torch.tensor(False))
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        z = randn(300, seed=2).to(dtype)
        for L in layouts(z.shape).values():
            for dist, serial in (
                (F.dist_sum, torch.sum),
                (F.dist_mean, torch.mean),
                (F.dist_max, torch.amax),
                (F.dist_norm, torch.linalg.vector_norm),
            ):
                check_layer(lambda x: dist(x, L), serial, [z], [L], whole, rtol=tol, orders=0)


def test_argmax():
    """Global indices, and the first of equal elements."""
    x = torch.tensor([[1.0, 7, 7], [7, 0, 2], [3, 7, -1], [9, 2, 9], [9, 0, 9]], dtype=torch.float64)
    for name, L in layouts(x.shape).items():
        for P in (L, L.partition):
            check_layer(lambda x: F.dist_argmax(x, P), torch.argmax, [x], [L], whole, orders=0, name=name)
            check_layer(
                lambda x: F.dist_argmax(x, P, 0), lambda x: x.argmax(0), [x], [L], along(L, 1), orders=0, name=name
            )
            check_layer(
                lambda x: F.dist_argmax(x, P, 1, True),
                lambda x: x.argmax(1, True),
                [x],
                [L],
                lambda y: y[L.slices()[0]],
                orders=0,
                name=name,
            )


def test_messages():
    n = dd.world().size
    P = dd.Partition((n, 1))
    L = dd.Layout(P, (2 * n, 3))
    x = L.shard(randn(2 * n, 3)).clone().requires_grad_()
    peers, reduced = n - 1, int(n > 1)
    for call, expected in [
        (lambda: F.dist_sum(x, P, 0), (0, 0, reduced, 3 * reduced, 0)),
        (lambda: F.dist_sum(x, P, 1), (0, 0, 0, 0, 0)),
        (lambda: F.dist_mean(x, P, 0), (0, 0, reduced, 4 * reduced, 0)),
        (lambda: F.dist_mean(x, L, 0), (0, 0, reduced, 3 * reduced, 0)),
        (lambda: F.dist_max(x, P, 0), (peers, 6 * peers, reduced, 3 * reduced, 0)),
        (lambda: F.dist_logsumexp(x, P, 0), (peers, 3 * peers, reduced, 3 * reduced, 0)),
        (lambda: F.dist_norm(x, P, 0), (0, 0, reduced, 3 * reduced, 0)),
        (lambda: F.dist_var(x, P, 0), (0, 0, 2 * reduced, 7 * reduced, 0)),
    ]:
        assert messages(call) == expected
    assert messages(lambda: F.dist_argmax(x, L, 0))[::2] == (peers, 0, 0)  # values and indices in one message
    for dist in (F.dist_sum, F.dist_mean, F.dist_max, F.dist_norm):
        loss = dist(x, L)
        assert messages(loss.backward) == (0, 0, 0, 0, 0)
    spread = F.dist_var(x, L)
    assert messages(spread.backward) == (0, 0, reduced, reduced, 0)


def test_errors():
    n = dd.world().size
    P = dd.Partition((n, 1))
    with pytest.raises(ShapeError, match="dims"):
        F.dist_sum(torch.ones(3), P)
    with pytest.raises(ShapeError, match="block"):
        F.dist_sum(torch.ones(7, 3), dd.Layout(P, (n, 3)))
    with pytest.raises(PartitionError):
        F.dist_sum(torch.ones(1, 3), P, 2)
    with pytest.raises(PartitionError):
        F.dist_argmax(torch.ones(1, 3), P, (0, 1))
    L = dd.Layout(P, (0, 3))
    for dist in (F.dist_max, F.dist_argmax):
        with pytest.raises(ShapeError, match="no element"):
            dist(torch.ones(0, 3), L, 0)


def test_the_norm_of_order_0_has_a_graph():
    """It counts, so its derivative is zero: there, and not absent."""
    n = dd.world().size
    L = dd.Layout(dd.Partition((n,)), (n + 2,))
    x = L.shard(torch.arange(n + 2.0)).clone().requires_grad_()
    y = F.dist_norm(x, L, ord=0)
    y.backward()
    assert y == n + 1 and torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(torch.func.grad(lambda x: F.dist_norm(x, L, ord=0))(x.detach()), torch.zeros_like(x))
    value, tangent = torch.func.jvp(lambda x: F.dist_norm(x, L, ord=0), (x.detach(),), (x.detach(),))
    assert value == n + 1 and tangent == 0


def test_the_largest_of_nothing_is_nan():
    _, r, P = here()
    assert math.isnan(F.dist_max(torch.zeros(0), P)) and math.isnan(F.dist_min(torch.zeros(0), P))
    assert F.dist_max(torch.full((int(r == 0),), -math.inf), P) == -math.inf


def test_reductions_refuse_dtypes_on_every_rank():
    """Also on a rank with an empty block, which would not notice by itself."""
    n, r, P = here()
    L, k = dd.Layout(P, (1,)), int(r == 0)
    for f in (F.dist_mean, F.dist_var, F.dist_norm, lambda x, P: F.dist_logsumexp(x, P, 0)):
        for dtype in (torch.int64, torch.bool):
            with pytest.raises(ShapeError, match="convert the tensor"):
                f(torch.ones(k, dtype=dtype), L)
    for f in (F.dist_max, F.dist_min, F.dist_argmax):
        with pytest.raises(ShapeError, match="a real dtype"):
            f(torch.ones(k, dtype=torch.complex64), L)
    with pytest.raises(PartitionError, match="named twice"):
        F.dist_sum(torch.ones(k), L, (0, -1))


def test_the_variance_of_complex_numbers_is_real():
    n, _, P = here()
    X = torch.complex(torch.arange(2.0 * n), torch.arange(2.0 * n) ** 2).to(torch.complex128)
    for where in (P, dd.Layout(P, X.shape)):
        y = F.dist_var(dd.Layout(P, X.shape).shard(X), where)
        assert y.dtype == torch.float64 and torch.allclose(y, X.var())


def test_what_ranks_outside_get_has_as_many_dims_as_elsewhere():
    """Whatever they pass."""
    P, tall = dd.Partition((1, 1)), dd.Partition((1, 1, 1))
    for junk in (torch.empty(0), torch.ones(()), torch.ones(2, 3, 4, 5)):
        for f in (F.dist_sum, F.dist_mean, F.dist_var, F.dist_max, F.dist_norm, F.dist_argmax):
            for more, ndim in (({}, 0), ({"dim": 0}, 1), ({"dim": 1}, 1), ({"dim": 0, "keepdim": True}, 2)):
                assert f(torch.ones(2, 3) if P.active else junk, P, **more).dim() == ndim
        x = torch.ones(2, 3, 4) if P.active else junk
        assert F.dist_mse_loss(x, x, tall, "none").dim() == 3
        target = torch.zeros(2, 4, dtype=torch.int64)
        assert F.dist_cross_entropy(x, target, tall, reduction="none").dim() == 2
