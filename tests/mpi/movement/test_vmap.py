"""vmap equals the loop over the batch, at any place of the batch axis, nested, inside and outside of grad, in one
message set."""

import pytest
import torch
from registry import each_case, here, needs, raises_everywhere, randn
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import DistdlError
from distdl.testing import count_messages

BATCH = 3


def batch(case, make=None):
    return [(make or case.smooth)(randn(case.shape, k)) for k in range(BATCH)]


@each_case(thin=True)
def test_any_axis(case):
    xs = batch(case)
    for spelling, call in {"map": case.map, **case.calls}.items():
        with count_messages() as loop:
            ys = [call(x) for x in xs]
        for axis in (0, -1, min(1, xs[0].dim())):
            with count_messages() as sent:
                got = vmap(call, in_dims=axis, out_dims=axis if axis < 1 else 0)(torch.stack(xs, axis))
            assert torch.allclose(got, torch.stack(ys, axis if axis < 1 else 0), rtol=1e-14, atol=1e-14), (
                spelling,
                axis,
            )
            assert sent.sends * BATCH == loop.sends, "one message set for the whole batch"


@each_case(thin=True)
def test_nested_and_with_derivatives(case):
    """Case 6: grad(vmap(f)) and vmap(grad(f)) equal the loop."""
    call = next(iter(case.calls.values()))
    f = lambda x: case.loss(call(x.sin()))
    xs, vs = batch(case), batch(case, lambda X: case.smooth(X.cos()))
    loop = torch.stack([grad(f)(x) for x in xs])
    close = dict(rtol=1e-12, atol=1e-12)
    X, V = torch.stack(xs), torch.stack(vs)
    assert torch.allclose(vmap(grad(f))(X), loop, **close)
    assert torch.allclose(grad(lambda X: vmap(f)(X).sum())(X), loop, **close)
    products = vmap(lambda x, v: jvp(grad(f), (x,), (v,))[1])(X, V)
    assert torch.allclose(products, torch.stack([jvp(grad(f), (x,), (v,))[1] for x, v in zip(xs, vs)]), **close)
    nested = vmap(vmap(call, in_dims=-1), in_dims=1)(torch.stack([torch.stack([a + b for b in vs], -1) for a in xs], 1))
    assert torch.allclose(nested, torch.stack([torch.stack([call(a + b) for b in vs]) for a in xs]), **close)


def line():
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


@needs(2)
@pytest.mark.parametrize("alone", [0, -1])
def test_operand_batched_on_one_rank_only(alone):
    """torch skips the vmap rule where nothing is batched: such a rank must expand, or it would send another shape."""
    n, r, P = line()
    alone %= n
    X = randn((BATCH, n, 2), 4)
    x = X[:, alone] if r == alone else X[0, r]
    spec = dd.HaloSpec(dd.Layout(P, (2 * n,)), 1, boundary="circular")
    for call in (lambda t: F.shift(t, P, 0), lambda t: F.all_sum_reduce(t, P), lambda t: F.all_gather(t, P),
                 lambda t: F.halo_exchange(t, spec)):  # fmt: skip
        got = vmap(lambda b: call(b if r == alone else x))(X[:, alone])
        loop = torch.stack([call(X[k, alone] if r == alone else x) for k in range(BATCH)])
        assert torch.allclose(got, loop)
        weights = randn(loop.shape[1:], 5, r)
        slope = grad(lambda u: (weights * call(u).exp()).sum())
        got = vmap(lambda b: slope(b if r == alone else x))(X[:, alone])
        assert torch.allclose(got, torch.stack([slope(X[k, alone] if r == alone else x) for k in range(BATCH)]))


@needs(2)
def test_batch_sizes_differ():
    """Case 37: the batch sizes are named, on every rank."""
    n, r, P = line()
    x = torch.ones(2 if r else 3, 4)
    raises_everywhere(dd.errors.AgreementError, lambda: vmap(lambda t: F.all_sum_reduce(t, P))(x), "vmap", "[3]", "[2]")


@needs(2)
def test_vmap_on_some_ranks_only():
    n, r, P = line()
    once = vmap(lambda t: F.all_gather(t, P))
    raises_everywhere(
        dd.errors.AgreementError, lambda: once(torch.ones(2, 3)) if r else vmap(once)(torch.ones(2, 2, 3))
    )


@needs(4)
def test_batch_axis_between_split_and_gathered_axes():
    """Case 5: 8x8 over 4; the gradient of the sum is ones."""
    P, r = dd.Partition((4, 1)), dd.world().rank
    if r > 3:
        return
    X = randn((8, BATCH, 8), 6)
    L, M = dd.Layout(P, (8, 8)), dd.Layout(dd.Partition((1, 4)), (8, 8))
    x = X[2 * r : 2 * r + 2]
    y = vmap(lambda t: F.repartition(t, L, M), in_dims=1, out_dims=1)(x)
    assert torch.equal(y, X[:, :, 2 * r : 2 * r + 2])
    assert torch.equal(grad(lambda t: F.repartition(t, L, M).sum())(x[:, 0]), torch.ones(2, 8, dtype=torch.float64))


@pytest.mark.mpi(2)
def test_a_batch_of_nothing():
    n, r, _ = here()
    some = dd.Partition((2,), ranks=(1, 0))
    assert vmap(lambda x: F.all_sum_reduce(x, some))(torch.ones(0, 2, 3)).shape[0] == 0
    assert vmap(lambda x: F.tie(x, x))(torch.ones(0, 3)).shape == (0, 3)
    assert vmap(lambda x: F.nothing((0, 2), x))(torch.ones(0, 3)).shape == (0, 0, 2)
    last = dd.Partition((1,), ranks=(n - 1,))
    assert vmap(lambda x: F.all_sum_reduce(x, last))(torch.ones(0, 2)).shape[0] == 0, r


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


@needs(2)
def test_vmap_of_a_permutation_of_uneven_tensors():
    n, r, P = here()
    x = torch.full((2, r + 1), float(r))
    y = vmap(lambda t: F.permute(t, P, [(0, n - 1), (n - 1, 0)]))(x)
    assert y.tolist() == ([[float(n - 1)] * n] * 2 if r == 0 else [[0.0]] * 2 if r == n - 1 else [[0.0] * (r + 1)] * 2)
