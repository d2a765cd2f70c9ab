"""Communication hooks: exact ones are exact, lossy ones lose nothing in the long run, and each sends what it says."""

import pytest
import torch
from registry import needs
from serial import randn
from training import carried, check, world

import distdl as dd
from distdl import parallel as dp
from distdl.testing import count_messages

SHAPES = ((20, 30), (7,), (3, 3), (12, 5, 4))


def gradients(step, rank):
    return [randn(*shape, seed=100 * step + 10 * rank + i) for i, shape in enumerate(SHAPES)]


def summed(step, n):
    return [sum(parts) for parts in zip(*(gradients(step, r) for r in range(n)))]


def flat(tree):
    return torch.cat([t.reshape(-1) for t in tree])


def run(hook, step=0, states=None):
    n, r, P = world()
    return dp.reduce_gradients(gradients(step, r), P, hook=hook, states=states)


def test_identity():
    n, r, P = world()
    check(run(dp.hooks.all_reduce(P))[0], summed(0, n), "sum")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast(dtype):
    """Halves travel both ways, 2n(k-1)/k of them; each element is rounded once on each rank, and once as a sum."""
    n, r, P = world()
    with count_messages() as sent:
        got, _ = run(dp.hooks.cast(P, dtype))
    total = flat(gradients(0, 0)).numel()
    own = dd.Layout(P, (total,)).local_shape()[0]
    assert carried(sent) == 2 * (total - own) + 2 * own * (n - 1), "a reduce-scatter and an all-gather of halves"
    rounded = [
        sum(g.to(dtype).float() for g in parts).to(dtype).double()
        for parts in zip(*(gradients(0, q) for q in range(n)))
    ]
    check(got, rounded, "rounded sums", rtol=2 * torch.finfo(dtype).eps)
    everyone = dd.testing.gather_objects(flat(got).tolist())
    assert all(e == everyone[0] for e in everyone), "equal on every rank, bit by bit"


@pytest.mark.parametrize("name", ["top_k", "power_sgd"])
def test_error_feedback_loses_nothing(name):
    """What was applied, and what is kept back on all ranks, add up to all gradients; the result is equal on every
    rank."""
    n, r, P = world()
    hook = dp.hooks.top_k(P, 0.1) if name == "top_k" else dp.hooks.power_sgd(P, 2)
    states, applied, wanted = None, 0, 0
    for step in range(4):
        got, states = run(hook, step, states)
        applied, wanted = applied + flat(got), wanted + flat(summed(step, n))
        everyone = dd.testing.gather_objects(flat(got).tolist())
        assert all(e == everyone[0] for e in everyone)
    order = list(range(len(SHAPES)))[::-1]  # buckets hold the last tensors first
    if name == "top_k":
        pieces = dict(zip(order, states[0].split([torch.Size(SHAPES[i]).numel() for i in order])))
        kept = torch.cat([pieces[i] for i in range(len(SHAPES))])
    else:
        errors = dict(zip([i for i in order if i in (0, 3)], states[0][1]))
        kept = torch.cat(
            [
                errors[i].reshape(-1) if i in errors else torch.zeros(torch.Size(s).numel(), dtype=torch.float64)
                for i, s in enumerate(SHAPES)
            ]
        )
    kept = sum(torch.tensor(k, dtype=torch.float64) for k in dd.testing.gather_objects(kept.tolist()))
    assert kept.abs().max() > 0.01, "something was kept back, or this tests nothing"
    check(applied + kept, wanted, "applied + kept")


@pytest.mark.parametrize("name", ["top_k", "power_sgd"])
def test_an_infinite_step_leaves_the_state(name):
    """Overflow on one rank, at the first step and later: every rank sees it, and none keeps it."""
    n, r, P = world()
    hook = dp.hooks.top_k(P, 0.1) if name == "top_k" else dp.hooks.power_sgd(P, 2)
    states = None
    for step, bad in enumerate((True, False, True, False)):
        grads = gradients(step, r)
        if bad and r == n - 1:
            grads[0] = torch.full_like(grads[0], torch.inf)
        before = states
        got, states = dp.reduce_gradients(grads, P, hook=hook, states=states)
        assert bool(flat(got).isfinite().all()) != bad
        kept = torch.utils._pytree.tree_leaves(states)
        assert all(bool(t.isfinite().all()) for t in kept if t is not None)
        if bad and before is not None:
            assert all(torch.equal(a, b) for a, b in zip(kept, torch.utils._pytree.tree_leaves(before)))


def test_everything_is_the_exact_sum():
    n, r, P = world()
    check(run(dp.hooks.top_k(P, 1.0))[0], summed(0, n), "all entries")


def test_power_sgd_finds_low_rank_exactly():
    """Matrices whose sum has rank 2 come out exact, and only two thin factors travel."""
    n, r, P = world()
    left, right = randn(20, 2, seed=1), randn(2, 30, seed=2)
    with count_messages() as sent:
        got, _ = dp.reduce_gradients([(r + 1) * left @ right], P, hook=dp.hooks.power_sgd(P, 2))
    check(got, [n * (n + 1) / 2 * left @ right], "rank 2", rtol=1e-9)
    assert [m[2] for m in sent] == ([8 * 2 * 20, 8 * 2 * 30] if n > 1 else [])


@needs(2)
def test_top_k_sends_values_and_places():
    n, r, P = world()
    with count_messages() as sent:
        run(dp.hooks.top_k(P, 0.1))
    k = -(-flat(gradients(0, 0)).numel() // 10)
    assert sent.sends == n - 1 and abs(sent.bytes - 16 * k * (n - 1)) <= 64 * (n - 1), (
        "64: the parts of a message are aligned"
    )


def test_a_share_of_nothing_is_an_error():
    with pytest.raises(dd.errors.DistdlError, match="a share of the entries"):
        dp.hooks.top_k(dd.Partition((1,)), 0)


def test_with_modules():
    """GradientSync takes the same hooks, and keeps each bucket's state."""
    n, r, P = world()
    a = torch.nn.Parameter(torch.zeros(20, 30, dtype=torch.float64))
    sync = dp.GradientSync([a], P, hook=dp.hooks.power_sgd(P, 2))
    states = None
    for step in range(2):
        g = randn(20, 30, seed=7 * step + r)
        (a * g).sum().backward()
        sync.finish()
        (expected,), states = dp.reduce_gradients([g], P, hook=dp.hooks.power_sgd(P, 2), states=states)
        check(a.grad, expected, f"step {step}")
        a.grad = None
