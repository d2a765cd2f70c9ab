"""Mixed precision: which dtype meets where, and a loss scale whose overflow on one rank makes all skip."""

import pytest
import torch
from registry import needs
from torch.func import grad
from training import batch, check, initial, leaves, loss_sum, mapped, mean_loss, share, world

import distdl as dd
from distdl import parallel as dp
from distdl.testing import count_messages


def test_dtypes():
    """Parameters and activations in bfloat16, sums in float32, master gradients in float64."""
    n, r, P = world()
    params, seen = initial(), set()
    policy = dp.Precision(torch.bfloat16, torch.float32, torch.float64)

    def loss(p, data):
        total, count = loss_sum(p, data)
        seen.update((total.dtype, p[0]["w"].dtype, data[0].dtype))
        return total

    with count_messages() as sent:
        grads = grad(lambda p: policy.wrap(loss)(policy.replicate(p, P), share(1, batch(1))))(params)
    assert seen == {torch.bfloat16} and {g.dtype for g in leaves(grads)} == {torch.float64}
    assert sent.bytes == (4 * sum(p.numel() for p in leaves(params)) if n > 1 else 0), "summed in float32"

    def of_rank(k):
        x, y = share(1, batch(1), n, k)
        return leaves(grad(lambda p: loss_sum(p, (x.bfloat16(), y))[0])(mapped(torch.Tensor.bfloat16, params)))

    sums = [sum(g.float() for g in parts).double() for parts in zip(*map(of_rank, range(n)))]
    check(leaves(grads), sums, "each rank's bfloat16 gradient, summed in float32", rtol=1e-6)
    result = policy.wrap(lambda x: x.sum())(torch.ones(3))
    assert result.dtype == torch.float64
    with pytest.raises(dd.errors.DistdlError, match=r"rounded to the sum's dtype.*hooks\.cast"):
        dp.Precision(torch.float32, torch.bfloat16)


def test_gathered_in_the_sums_dtype():
    n, r, P = world()
    params = initial()[0]
    s, policy = dp.Sharding.of(params, P), dp.Precision(torch.bfloat16, torch.float32)
    block = s.block(params).requires_grad_()
    whole = policy.gather(s, block)
    assert {w.dtype for w in leaves(whole)} == {torch.bfloat16}
    sum((w.float() * (r + 1)).sum() for w in leaves(whole)).backward()
    assert block.grad.dtype == torch.float64 and bool((block.grad == n * (n + 1) / 2).all())


@pytest.mark.parametrize("on_device", [False, True])
def test_the_scale_follows_torchs(on_device):
    """The same sequence of scales and skipped steps as torch.amp.GradScaler, over finite and infinite gradients; also
    where the scale is a tensor, which no step asks the host about."""
    n, r, P = world()
    options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    theirs = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0, **options)
    mine = dp.LossScale(torch.tensor(8.0) if on_device else 8.0, growth=2.0, backoff=0.5, interval=3)
    p, q = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=0.1)
    factors = [1, 1, 1, float("inf"), 1, 1, 1, 1, float("nan"), float("inf"), 1, 1, 1]
    for step, factor in enumerate(factors):
        theirs.scale((p * factor).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        bad = factor if r == step % n else 1  # on one rank only
        grads = grad(lambda q, bad=bad: mine.scaled((q * bad).sum()))(q)
        grads, finite = mine.unscaled(grads, P)
        assert bool(finite) == (factor == 1)
        q = dp.select(finite, q - 0.1 * grads, q)
        mine = mine.updated(finite)
        assert mine.scale == theirs.get_scale() and torch.equal(p.detach(), q), step
    assert isinstance(mine.scale, torch.Tensor) == on_device


@pytest.mark.parametrize("on_device", [False, True])
def test_a_scale_stays_within_float32(on_device):
    """torch's scaler does not grow into infinity either: it would never come back."""
    scale = dp.LossScale(torch.tensor(2.0**126) if on_device else 2.0**126, interval=1)
    found = []
    for finite in (True, True, True, False):
        scale = scale.updated(torch.tensor(finite))
        found.append(float(scale.scale))
    assert found == [2.0**127, 2.0**127, 2.0**127, 2.0**126]


def test_no_gradients_are_finite():
    """A pipeline's stage without parameters takes part in the verdict."""
    n, r, P = world()
    grads, finite = dp.LossScale(2.0).unscaled([torch.tensor([torch.inf])] if r == n - 1 else [], P)
    assert not finite and len(grads) == (r == n - 1)


def test_twenty_steps_skip_together():
    """float16 training whose scale overflows at first, on one rank's share: parameters stay equal, and the loss
    falls."""
    n, r, P = world()
    params, scale, skipped, losses = initial(torch.float32), dp.LossScale(2.0**20, interval=50), 0, []
    policy = dp.Precision(torch.float16, torch.float32, torch.float32)
    run = policy.wrap(lambda p, data: loss_sum(p, data)[0])
    for step in range(20):
        data = share(0, batch(step))
        grads = grad(lambda p, data=data: scale.scaled(run(dp.replicate(p, P), data)) / 17)(params)
        grads, finite = scale.unscaled(grads, P)
        params = dp.select(finite, mapped(lambda p, g: p - 0.3 * g, params, grads), params)
        scale, skipped = scale.updated(finite), skipped + (not finite)
        losses.append(float(mean_loss(params, (batch(0)[0].float(), batch(0)[1]))))
    dd.testing.collective_assert(0 < skipped < 15 and losses[-1] < losses[0] - 0.2, (int(skipped), losses))
    everyone = dd.testing.gather_objects([p.tolist() for p in leaves(params)])
    assert all(e == everyone[0] for e in everyone)


def test_blocks_without_elements():
    """A gradient without elements beside others, and alone, is finite and hides nothing."""
    n, r, P = world()
    empty, full = torch.ones(0), torch.full((2,), torch.inf if r == n - 1 else 1.0)
    spread = dp.spread_overflow([empty, full], P)
    assert spread[0].shape == (0,) and bool((spread[1] == torch.inf).all())
    spread = dp.spread_overflow([empty] if r else [torch.ones(2)], P)
    assert r or bool((spread[0] == 1).all())


@needs(2)
def test_torchs_own_scaler_skips_everywhere():
    """Sharded gradients: an inf in one rank's block only. torch.amp.GradScaler on each rank, after spread_overflow."""
    n, r, P = world()
    p = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = (
        torch.optim.SGD([p], lr=0.5),
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0),
    )
    for value, expected in ((float("inf"), 1.0), (1.0, 0.5)):
        scaler.scale((p * (value if r == n - 1 else 1)).sum()).backward()
        p.grad = dp.spread_overflow(p.grad, P)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dd.testing.collective_assert(bool((p == expected).all()) and scaler.get_scale() == 2.0, (p, scaler.get_scale()))
