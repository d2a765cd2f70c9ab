"""dd.parallel inside of compiled functions, and around them: training steps compiled, against the same in eager."""

import pytest
import torch
from compiling import MARKS, RANK, D, M, N, block, check, fresh  # noqa: F401
from serial import randn
from torch.func import grad

import distdl as dd
import distdl.functional as F
from distdl import parallel

pytestmark = MARKS
P = dd.Partition((N,))
W = randn(3, 3, seed=2)  # the same on every rank
UNIT = parallel.Sharding.of([W, W[0]], P)
BLOCK = UNIT.block([W, W[0]]).detach()
POLICY = parallel.Precision(param=torch.bfloat16, reduce=torch.float32)
SCALE = parallel.LossScale(torch.tensor(4.0))


def layer(p, x):
    return (x @ p[0] + p[1]).tanh()


CHAINS = {remat: parallel.chain([layer] * 2, [UNIT] * 2, remat=remat) for remat in (True, False)}


def loss(w, x):
    return (x @ w).square().sum()


def summed(hook):
    """A bucket of two gradients by a hook, its second time."""

    def step(x):
        state = None
        for k in (1, 2):
            bucket, state = hook([k * x[:2], x[:2].sin() + RANK], state)
        return torch.cat(bucket)

    return step


def hooked(x):
    """A hook of autograd that sums over ranks."""
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: F.all_sum_reduce(g.sum(0), P) + g)
    return y.cos()


STEPS = {
    "replicate": lambda x: grad(lambda w: loss(parallel.replicate({"w": w}, P)["w"], x))(W.clone()),
    "reduce_gradients": lambda x: parallel.reduce_gradients({"w": grad(loss)(W.clone(), x)}, P)[0]["w"],
    "accumulate": lambda x: parallel.accumulate(lambda w, x: (loss(w, x), len(x)), W, [x.detach(), 2 * x.detach()], P)[
        1
    ],
    "global_mean": lambda x: parallel.global_mean(x.sum(0), float(len(x)), P),
    "average_parameters": lambda x: parallel.average_parameters([x[:2] * 2], P)[0],
    "hierarchical_all_reduce": lambda x: parallel.hierarchical_all_reduce(x[:2].sin(), [range(N)]),
    "Sharding": lambda x: layer(UNIT.gather(BLOCK * x.sum()), x),
    "a gradient to its block": lambda x: UNIT.reduce(list(grad(lambda p: layer(p, x).sum())([W, W[0]]))),
    "chain": lambda x: CHAINS[False]([BLOCK * x.sum(), BLOCK], x),
    "Precision": lambda x: POLICY.replicate([(W * F.all_sum_reduce(x.sum(), P)).float()], P)[0].double(),
    "LossScale": lambda x: SCALE.updated(SCALE.unscaled([SCALE.scaled(x.float())], P)[1]).scale * x,
    "select": lambda x: parallel.select(SCALE.unscaled([x], P)[1], [x], [2 * x])[0],
    "spread_overflow": lambda x: parallel.spread_overflow([x / 0 if RANK else x], P)[0],
    "global_norm": lambda x: parallel.global_norm([x * 2], P),
    "hooks.all_reduce": summed(parallel.hooks.all_reduce(P)),
    "hooks.cast": summed(parallel.hooks.cast(P)),
    "hooks.top_k": summed(parallel.hooks.top_k(P, 0.5)),
    "hooks.power_sgd": summed(parallel.hooks.power_sgd(P, 1)),
    "a hook of autograd": hooked,
}
BROKEN = {  # the graph breaks there, or with fullgraph=True says these words
    "hooks.power_sgd": "Generator",  # its first guess
    "a hook of autograd": "inside of another construct",
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name):
    fullgraph = name not in BROKEN
    if not fullgraph:
        with pytest.raises(Exception, match=BROKEN[name]):
            torch.compile(STEPS[name], backend="aot_eager", fullgraph=True)(block().requires_grad_())
        torch._dynamo.reset()
    check(STEPS[name], block(), fullgraph=fullgraph)


def test_a_chain_whose_layers_are_worked_out_again():
    """What is gathered again AOTAutograd decides, as of dd.remat."""
    check(lambda x: CHAINS[True]([BLOCK * x.sum(), BLOCK], x), block(), messages=False)
