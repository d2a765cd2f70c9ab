"""Faults that reviews of this library have found: each one's right value."""

import gc
import math

import pytest
import torch
from torch.func import vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import AgreementError, DistdlError, PartitionError, ShapeError


def here():
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


def test_a_movement_that_is_started_and_dropped(request):
    """Its memory must outlive its messages."""
    if request.config.getoption("--engine") != "mpi":
        pytest.skip("another engine carries the later movements")
    n, r, P = here()
    A = dd.maps.shift(P, 0, 1, True, (400_000,))
    for i in range(3):
        F.start(A, torch.full((400_000,), float(i)))
    gc.collect()
    assert F.shift(torch.full((400_000,), r + 9.0), P, 0)[-1] == (r - 1) % n + 9
    kept = getattr(dd.world().host, "_abandoned", [])
    assert n == 1 or len(kept) <= 3
    for _ in range(3):
        F.all_sum_reduce(torch.ones(1), P)
        F.shift(torch.ones(2), P, 0)
    assert not getattr(dd.world().host, "_abandoned", [])


def test_offsets_are_integers():
    _, _, P = here()
    with pytest.raises(PartitionError, match="integer"):
        F.shift(torch.ones(2), P, 0, 1.5)


def test_what_is_no_tensor_or_partition():
    n, _, P = here()
    L = dd.Layout(P, (n,))
    for call in (
        lambda: F.all_sum_reduce(1.0, P),
        lambda: F.repartition(None, L, L),
        lambda: F.halo_exchange(3, dd.HaloSpec(L, 1)),
        lambda: dd.maps.all_gather(L)(None),
    ):
        with pytest.raises(ShapeError, match="not a tensor"):
            call()
    for call in (lambda: F.all_sum_reduce(torch.ones(1), (n,)), lambda: F.mark_varying(torch.ones(1), 3)):
        with pytest.raises(PartitionError, match="not a partition"):
            call()


def test_the_largest_of_nothing_is_nan():
    _, r, P = here()
    assert math.isnan(F.dist_max(torch.zeros(0), P)) and math.isnan(F.dist_min(torch.zeros(0), P))
    assert F.dist_max(torch.full((int(r == 0),), -math.inf), P) == -math.inf


def test_derivatives_that_are_constant():
    n, _, P = here()
    L = dd.Layout(P, (n + 1,))
    x = L.shard(torch.linspace(0, 1, n + 1)).clone()
    assert torch.equal(dd.func.hessian(lambda x: F.dist_sum(x, L), L)(x), torch.zeros(len(x), n + 1))
    assert torch.equal(dd.func.jacfwd(lambda x: torch.ones(2), L)(x), torch.zeros(2, n + 1))


@pytest.mark.mpi(2)
def test_a_batch_of_nothing():
    n, r, _ = here()
    some = dd.Partition((2,), ranks=(1, 0))
    assert vmap(lambda x: F.all_sum_reduce(x, some))(torch.ones(0, 2, 3)).shape[0] == 0
    assert vmap(lambda x: F.tie(x, x))(torch.ones(0, 3)).shape == (0, 3)
    assert vmap(lambda x: F.nothing((0, 2), x))(torch.ones(0, 3)).shape == (0, 0, 2)
    last = dd.Partition((1,), ranks=(n - 1,))
    assert vmap(lambda x: F.all_sum_reduce(x, last))(torch.ones(0, 2)).shape[0] == 0, r


def test_ranks_in_different_agreements():
    """One asks for block sizes, another one gathers objects: neither may take the other's answer for its own."""
    n, r, P = here()
    if n == 1:
        return
    channels = dd.Layout(dd.Partition((1, n, 1)), (1, n, 3))
    others = (
        lambda: dd.testing.gather_objects(r),
        lambda: F.dist_conv(torch.ones(1, 1, 3), torch.ones(1, n, 1), channels),
    )
    for other, text in zip(others, ("gather_objects", "sizes of a parameter's blocks")):
        call = (lambda: F.repartition(torch.ones(1), P, P.take(0, 0, keepdim=True))) if r == 0 else other
        with pytest.raises(AgreementError, match=f"rank 0: repartition; rank 1: {text}"):
            call()


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


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_a_linearized_function_under_vmap():
    n, r, P = here()
    L = dd.Layout(P, (2 * n,))
    f = torch.func.grad(lambda x: F.dist_sum(F.shift(x, L, 0) ** 3 * (r + 1), L))
    x, batch = torch.arange(2.0) + r, torch.arange(12.0).reshape(3, 2, 2) + r
    push = torch.func.linearize(f, x)[1]
    expected = torch.stack([torch.stack([push(t) for t in ts]) for ts in batch])
    with dd.testing.count_messages() as one:
        push(x)
    with dd.testing.count_messages() as all_six:
        assert torch.equal(vmap(vmap(push))(batch), expected)
    assert torch.equal(vmap(push, in_dims=1, out_dims=1)(batch[0]), vmap(push)(batch[0].mT.contiguous()).mT)
    assert one.sends == all_six.sends


def test_the_older_vmap_is_refused():
    x = torch.ones(2, requires_grad=True)
    y = dd.linear_map(lambda x: 2 * x, lambda y: 2 * y, (2,), (2,))(x)
    with pytest.raises(DistdlError, match=r"torch\.func\.vmap"):
        torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)


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


def test_what_is_of_another_type():
    """Each says so, on every rank."""
    n, _, P = here()
    L, x, M = dd.Layout(P, (n,)), torch.ones(1), dd.Layout(dd.Partition((n, 1)), (2 * n, 1))
    for call, text in (
        (lambda: F.all_gather(x, P, "a"), "no dim a"),
        (lambda: F.permute(x, P, [0, 1]), "not pairs of ranks"),
        (lambda: F.halo_exchange(x, L), "not a HaloSpec"),
        (lambda: dd.HaloSpec(P, None, 1), "not a global shape"),
        (lambda: F.start(3, x), "not a linear map"),
        (lambda: F.wait(3), "not a movement under way"),
        (lambda: F.dist_batch_norm(torch.ones(2, 1), M, torch.ones(1), None), "belong together"),
        (lambda: F.dist_mse_loss(x, 3.0, L), "target is not a tensor"),
        (lambda: F.dist_sum(3.0, L), "not a tensor"),
        (lambda: F.dist_dropout(x, L, 0.5, None), "a seed is one integer"),
        (lambda: F.dist_dropout(x, L, 0.5, 1.5), "a seed is one integer"),
        (lambda: dd.linear_map(torch.neg, torch.neg, (3,), (3,))(5), "got int"),
    ):
        with pytest.raises(DistdlError, match=text):
            call()
    if n > 1:
        with pytest.raises(ShapeError, match="only dense"):
            F.all_sum_reduce(torch.eye(3).to_sparse(), P)
        with pytest.raises(DistdlError, match="no memory"):
            F.all_sum_reduce(torch.ones(3, device="meta"), P)
