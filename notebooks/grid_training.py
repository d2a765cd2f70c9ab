# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A pipeline, data parallelism and sharded state at once
#
# A network of stages on a grid of data × pipeline ranks: each column of ranks runs the stages one after the other on micro-batches, each row has the
# same stage for other examples, and of a stage's parameters and AdamW's state each rank of a row keeps one block (ZeRO). Three words of training at scale,
# and here three maps: a hand-off, a sum, an all-gather. Their adjoints are the backward pass. Last, the parameters beside those of one process.

# %%
import os

import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F
from distdl.parallel import schedule, simulate

reduced = "DISTDL_REDUCED" in os.environ
steps, examples, width, micro = (3, 9, 6, 2) if reduced else (40, 33, 24, 4)
P = dd.Partition((2, 2))  # (data, pipeline)

# %% [markdown]
# ## A schedule is a table
#
# Of four micro-batches on two devices (above) and eight on four: forwards dark, backwards pale. `simulate` runs it on paper, proves that it ends, and
# counts what each device keeps.

# %%
for devices, count in ((2, 4), (4, 8)):
    plan = simulate(schedule("1f1b", devices, count))
    print(f"{devices} devices, {count} micro-batches: {plan.bubble:.0%} idle, at most {max(plan.live)} kept")
plan.picture()

# %% [markdown]
# ## The network
#
# Two stages; their parameters have shapes that two ranks do not divide.

# %%
shapes = {"w1": (width + 1, 5), "b1": (width + 1,), "w2": (width, width + 1)}, {"w": (3, width), "b": (3,)}


def first(p, x):
    """Stage 0: five features to ``width``."""
    return torch.tanh(torch.tanh(x @ p["w1"].T + p["b1"]) @ p["w2"].T)


def second(p, x):
    """Stage 1: ``width`` to three."""
    return x @ p["w"].T + p["b"]


def everything():
    """(parameters of both stages, inputs, targets), the same wherever they are made."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    params = [{name: random(*s) / s[-1] ** 0.5 for name, s in of.items()} for of in shapes]
    x = random(examples, 5)
    return params, x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].sum(1)], 1)


# %% [markdown]
# ## A step
#
# What is gathered before the step is *one* map A, from blocks to whole parameters; its transpose A.T sums the gradients of the data ranks and leaves each with
# its block. So ZeRO is `A` and `A.T`, the pipeline is `dd.parallel.pipeline`, and the optimizer is torch's own, on blocks. Uneven shares weigh as they
# should: a micro-batch's loss is its sum, divided by all examples.


# %%
def sizes_of(count):
    """Of so many examples in micro-batches."""
    return dd.Layout(dd.Partition((micro,)), (count,)).sizes(0)


def training(steps):
    """(losses, {name: this rank's block}, numbers that this rank keeps of a stage and of all)."""
    data, pipe = P.along(0), P.along(1)
    row = dd.Partition((2,), data.ranks)  # the data ranks that have this rank's stage
    d, stage = P.index()
    params, x, target = everything()
    mine = dd.Layout(row, (examples,)).slices()[0]
    sizes = sizes_of(mine.stop - mine.start)
    x, target = x[mine].split(sizes), target[mine].split(sizes)

    layouts = {
        n: dd.Layout(dd.Partition((2, *(1,) * (w.dim() - 1)), data.ranks), w.shape) for n, w in params[stage].items()
    }
    gathers = {n: dd.maps.all_gather(L, dims=0) for n, L in layouts.items()}
    blocks = {n: L.shard(params[stage][n]).clone().requires_grad_() for n, L in layouts.items()}
    optimizer = torch.optim.AdamW(blocks.values(), 1e-2)
    step = dd.parallel.pipeline(
        schedule("1f1b", 2, micro),
        [first, second],
        lambda y, i: (y - target[i]).square().sum() / examples,
        pipe,
        lambda stage, i: (sizes[i], width),
    )
    losses = []
    for _ in range(steps):
        whole = {n: A(blocks[n].detach()) for n, A in gathers.items()}
        loss, grads = step({stage: whole}, x)
        losses.append(float(F.invariant_sum(loss, data)))
        for n, A in gathers.items():
            blocks[n].grad = A.T(grads[stage][n])  # summed over the data ranks, and cut
        optimizer.step()
    kept = sum(b.numel() for b in blocks.values()), sum(w.numel() for p in params for w in p.values())
    return losses, {n: b.detach() for n, b in blocks.items()}, kept


# %%
if __name__ == "__main__":
    results = dd.launch(training, 4)(steps)
    for r, (_, _, (own, whole)) in enumerate(results):
        d, stage = P.index(r)
        print(f"rank {r}: examples of part {d}, stage {stage}: {own} of {whole} numbers, and as many of AdamW's, twice")

# %% [markdown]
# ## One process
#
# The same network, all examples at once, AdamW on whole parameters.


# %%
def serial(steps):
    """(losses, parameters of both stages)."""
    params, x, target = everything()
    params = [{n: w.requires_grad_() for n, w in p.items()} for p in params]
    optimizer = torch.optim.AdamW([w for p in params for w in p.values()], 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (second(params[1], first(params[0], x)) - target).square().sum() / examples
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, params


if __name__ == "__main__":
    expected, params = serial(steps)
    losses = results[0][0]
    apart = max(abs(a / b - 1) for a, b in zip(losses, expected))
    worst = 0.0
    for stage, p in enumerate(params):
        for n, w in p.items():
            joined = torch.cat([results[P.rank_at((d, stage))][1][n] for d in range(2)])
            worst = max(worst, float((joined - w.detach()).abs().max()))
    print(f"losses at most {apart:.1e} apart, parameters after {steps} steps at most {worst:.1e}")
    figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
    ax.semilogy(expected, lw=4, alpha=0.3, color="black", label="one process")
    ax.semilogy(losses, label="data x pipeline, sharded state")
    ax.set(xlabel="step", ylabel="loss")
    ax.legend()
    assert apart < 1e-9 and worst < 1e-9
