"""Parameter averaging against a sequential simulation of all ranks: every H steps, by weight, and in the node more
often."""

import pytest
import torch
from registry import needs
from training import STEPS, batch, check, initial, mapped, mean_loss, world

import distdl as dd
from distdl import parallel as dp
from distdl.testing import count_messages

local_grad = torch.func.grad(mean_loss)


def local_step(params, step, rank):
    """One step of the rank's own training, on data of its own."""
    grads = local_grad(params, batch(step + 40 * rank, 5))
    return mapped(lambda p, g: p - 0.1 * g, params, grads)


def mean(trees, weights=None):
    weights = [1 / len(trees)] * len(trees) if weights is None else weights
    return mapped(lambda *ps: sum(w * p for w, p in zip(weights, ps)), *trees)


def test_twenty_steps_every_four():
    n, r, P = world()
    mine, everyone = initial(), [initial() for _ in range(n)]
    nbytes = sum(8 * p.numel() for p in torch.utils._pytree.tree_leaves(mine))
    with count_messages() as sent:
        for step in range(1, STEPS + 1):
            mine = dp.average_due(local_step(mine, step, r), step, P, {4: None})
    assert [m[2] for m in sent] == ([nbytes] * 5 if n > 1 else []), "one message every four steps"
    for step in range(1, STEPS + 1):
        everyone = [local_step(p, step, q) for q, p in enumerate(everyone)]
        if step % 4 == 0:
            everyone = [mean(everyone)] * n
    check(mine, everyone[r], "averaged")


def test_weights():
    """By the number of samples that each rank saw; a rank without any counts for nothing."""
    n, r, P = world()
    each = [mapped(lambda p, q=q: p * (q + 1), initial()) for q in range(n)]
    with count_messages() as sent:
        found = dp.average_parameters(each[r], P, weight=r if n > 1 else 3)
    total = sum(range(n))
    check(found, mean(each, [q / total for q in range(n)] if n > 1 else [1]), "weighted")
    assert len(sent) == (n > 1)


def test_weights_of_halves():
    """70000 samples are more than float16 knows, and 257 than bfloat16."""
    n, r, P = world()
    weights = [70000, 257, 3, 5][:n] + [1] * (n - 4)
    for dtype in (torch.float16, torch.bfloat16):
        found = dp.average_parameters({"w": torch.full((2,), float(1000 * r), dtype=dtype)}, P, weight=weights[r])["w"]
        wanted = sum(1000 * q * w for q, w in enumerate(weights)) / sum(weights)
        assert found.dtype == dtype
        check(found.double(), torch.full((2,), wanted, dtype=torch.float64), str(dtype), rtol=torch.finfo(dtype).eps)


@needs(4)
def test_hierarchical():
    """Two nodes of two: in the node every 2 steps, over all every 6."""
    if dd.world().rank >= 4:
        return
    P = dd.Partition((2, 2))
    r, mine, everyone = dd.world().rank, initial(), [initial() for _ in range(4)]
    for step in range(1, 10):
        mine = dp.average_due(local_step(mine, step, r), step, P, {2: 1, 6: None})
        everyone = [local_step(p, step, q) for q, p in enumerate(everyone)]
        if step % 6 == 0:
            everyone = [mean(everyone)] * 4
        elif step % 2 == 0:
            a, b = mean(everyone[:2]), mean(everyone[2:])
            everyone = [a, a, b, b]
        if step == 8:
            assert not torch.equal(everyone[0][0]["w"], everyone[2][0]["w"]), "the nodes differ by then"
    check(mine, everyone[r], "hierarchical")


def test_every_step_is_a_period():
    n, r = dd.world().size, dd.world().rank
    own = {"w": torch.full((2,), float(r), dtype=torch.float64)}
    found = dp.average_due(own, 3, dd.Partition((n,)), {1: None})["w"]
    assert found.tolist() == [(n - 1) / 2] * 2


def test_a_period_of_nothing_is_an_error():
    with pytest.raises(dd.errors.DistdlError, match="periods are numbers of steps"):
        dp.average_due(torch.ones(1), 3, dd.Partition((1,)), {0: None})
