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
# # A Fourier neural operator on fields that are split
#
# An FFT needs every element of a dim, and a rank has only some. So ranks that split a dim *turn* to another one, which is
# transformed already: a repartition, between local transforms. `F.dist_rfftn` and its kin are nothing else, and every
# derivative follows. Here: what turns and what it costs, a flow on a periodic square by Fourier's method, and an operator
# that learns it, on one rank and on four.

# %%
import os

import navier_stokes as ns
import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F
from distdl import viz

# %% [markdown]
# ## Pencils that turn
#
# `F.fft_stages` lists what a transform does: where the tensor lies, which dims are transformed there, and the map to the
# next stage. It is pure, so one process can look at four ranks' work (or that of 16,384). A real tensor of 8 × 8 × 8 over
# a grid of 2 × 2 × 1 ranks:

# %%
L = dd.Layout(dd.Partition((2, 2, 1)), (8, 8, 8))
stages = F.fft_stages(L, (0, 1, 2), real=True)
for stage in stages:
    print(
        f"grid {stage.layout.partition.shape}, dims {stage.dims} transformed: {stage.layout.shape} -> {stage.result.shape}"
    )


# %%
def pencils(ax, layout, title):
    """Each rank's box."""
    for r in layout.partition.ranks:
        (x0, x1), (y0, y1), (z0, z1) = layout.box(r)
        ax.bar3d(x0, y0, z0, x1 - x0, y1 - y0, z1 - z0, color=f"C{r}", alpha=0.5, edgecolor="black", linewidth=0.3)
    ax.set(xlabel="dim 0", ylabel="dim 1", zlabel="dim 2", title=title)


figure = plt.figure(figsize=(12, 7), layout="constrained")
for i, stage in enumerate(stages):
    pencils(figure.add_subplot(2, 3, i + 1, projection="3d"), stage.layout, f"dims {stage.dims} are whole")
    if stage.move is not None:
        viz.draw(stage.move, figure.add_subplot(2, 3, i + 4), "messages of the move before it")

# %% [markdown]
# Each rank talks to the ranks of one line of the grid at a time. Of 4096 × 4096 × 4096 over 128 × 128 ranks, from plans:

# %%
big = dd.Layout(dd.Partition((128, 128, 1)), (4096, 4096, 4096))
for stage in F.fft_stages(big, (0, 1, 2), real=True):
    if stage.move is not None:
        plan = stage.move.plan
        print(f"rank 0 sends {plan.messages(0)} messages, {16 * plan.volume(0) / 2**20:.0f} MiB")

# %% [markdown]
# What an operator cuts off anyway is cut off *before* it would travel: of the dim that is transformed first, 16 of 33
# wave numbers are left here, so a slab sends half.

# %%
slab = dd.Layout(dd.Partition((4, 1)), (64, 64))
for keep in (None, (16, 16)):
    move = F.fft_stages(slab, (0, 1), real=True, keep=keep)[-1].move
    print(f"keep={keep}: rank 0 sends {16 * move.plan.volume(0)} bytes")

# %% [markdown]
# ## A flow
#
# Vorticity on a periodic square, $\omega_t + u\cdot\nabla\omega = \nu\Delta\omega + f$. Its spectrum without the upper third
# is the state (products then alias into that third only), so `keep` says both what is right and what need not travel.
# `navier_stokes.py` has the solver in forty lines; four ranks compute what one does.


# %%
def fields(P, n, times):
    """Vorticity at several times, whole on rank 0."""
    L = ns.layout(P, 1, n)
    flow = ns.Flow(L)
    s, found = flow.smooth(2), []
    for steps in times:
        s = flow.advance(s, steps)
        found.append(F.gather(flow.field(s), L))
    return torch.cat(found)


def grid(ranks):
    """One rank, or a square of four."""
    return dd.Partition((1, 1, 2, 2) if ranks == 4 else (1, 1, 1, 1))


def flow_on(ranks, n, times):
    """The fields, on so many ranks."""
    return fields(grid(ranks), n, times)


# %%
reduced = "DISTDL_REDUCED" in os.environ
if __name__ == "__main__":
    n, times = (16, (0, 5, 5)) if reduced else (64, (0, 150, 150))
    one = dd.launch(flow_on, 1)(1, n, times)[0]
    four = dd.launch(flow_on, 4)(4, n, times)[0]
    print("one rank and four agree:", bool((one - four).abs().max() < 1e-12 * one.abs().max()))
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for ax, w, t in zip(axes, four, (0, times[1], times[1] + times[2])):
        ax.imshow(w[0], cmap="RdBu", origin="lower")
        ax.set(title=f"after {t} steps", xticks=[], yticks=[])
        for edge in (n / 2 - 0.5,):
            ax.axhline(edge, color="black", lw=0.5)
            ax.axvline(edge, color="black", lw=0.5)

# %% [markdown]
# ## An operator that learns it
#
# `dd.nn.FNOBlock` is activation(spectral convolution + 1 × 1 convolution). Each rank owns the weights of its own wave
# numbers: no rank ever has the whole weight, and its gradient needs no message. The losses are the same on one rank and
# on four.


# %%
def training(ranks, steps, n):
    """Losses, and what this rank has of the first weight."""
    losses, model = ns.train(grid(ranks), steps, 4, n, later=20)
    return losses, tuple(model.blocks[0].spectral.weight.shape)


# %%
if __name__ == "__main__":
    steps, n = (3, 16) if reduced else (60, 32)
    results = {ranks: dd.launch(training, ranks)(ranks, steps, n) for ranks in (1, 4)}
    for ranks, found in results.items():
        losses, shape = found[0]
        print(f"{ranks} ranks: loss {losses[0]:.3e} -> {losses[-1]:.3e}; rank 0's part of a weight: {shape}")
    (one, _), (four, _) = (results[ranks][0] for ranks in (1, 4))
    print("the same losses:", max(abs(a - b) / a for a, b in zip(one, four)) < 1e-9)
    assert max(abs(a - b) / a for a, b in zip(one, four)) < 1e-9
