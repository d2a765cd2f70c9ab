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
# # Shallow water on a staggered grid
#
# Depth in cells, velocities on faces, vorticity at nodes: then a difference of two neighbours is the derivative between them, and what
# leaves a cell enters another. Over ranks each of these places is a layout of its own, `dd.Staggered`, and reading one from another is
# a halo. Here: who has which face, a flow on four ranks whose mass changes by rounding only, and the initial state found again from what
# it became, by the gradient through all time steps. `shallow_water_model.py` has the scheme in forty lines.

# %%
import os

import shallow_water_model as sw
import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F

# %% [markdown]
# ## Who has which face
#
# Face i lies between cells i − 1 and i, and on the rank of cell i; a wall's last face on the rank of the last cell. Nothing need divide:
# 5 × 7 cells on 2 × 2 ranks.

# %%
small = dd.Layout(dd.Partition((2, 2)), (5, 7))
places = {
    "cells: h": (dd.Staggered(small), 0.5, 0.5, "o"),
    "faces across dim 0: u": (dd.Staggered(small, 0), 0.0, 0.5, "|"),
    "faces across dim 1: v": (dd.Staggered(small, 1), 0.5, 0.0, "_"),
    "nodes: q": (dd.Staggered(small, None), 0.0, 0.0, "."),
}
figure, axes = plt.subplots(1, 4, figsize=(13, 2.8), layout="constrained")
for ax, (title, (place, dx, dy, mark)) in zip(axes, places.items()):
    for r in small.partition.ranks:
        (x0, x1), (y0, y1) = place.layout.box(r)
        x, y = torch.meshgrid(torch.arange(x0, x1) + dx, torch.arange(y0, y1) + dy, indexing="ij")
        ax.scatter(x.flatten(), y.flatten(), c=f"C{r}", marker=mark, s=70)
    ax.set(title=title, xticks=range(6), yticks=range(8), aspect="equal")
    ax.grid(lw=0.3)


# %% [markdown]
# ## A flow
#
# The scheme is Sadourny's: $h_t = -\nabla\cdot(h\mathbf u)$ and $\mathbf u_t = -q\,(h\mathbf u)^\perp - \nabla(gh + |\mathbf u|^2/2)$, with the
# potential vorticity $q$. Means and differences are each other's adjoints, so that the time derivative of energy is zero to rounding, of any state.
# A time derivative is three exchanges; in each all fields share their messages. A basin that rotates, with a hill of water:


# %%
def flow_on(ranks, shape, times):
    """(depths at several times, whole on rank 0; masses; energies), on a square of so many ranks."""
    grid = (2, 2) if ranks == 4 else (1, 1)
    water = sw.Water(dd.Layout(dd.Partition(grid), shape), gravity=1.0, coriolis=0.15)
    state, found = sw.at_rest(water, water.L.shard(sw.whole_hill(shape))), []
    for steps in times:
        state = water.advance(state, steps)
        found.append((F.gather(state[0], water.L), float(water.mass(state[0])), float(water.energy(state))))
    return tuple(zip(*found))


reduced = "DISTDL_REDUCED" in os.environ
if __name__ == "__main__":
    shape, times = ((13, 11), (0, 3, 3)) if reduced else ((37, 29), (0, 20, 20, 20))
    one, masses, energies = dd.launch(flow_on, 1)(1, shape, times)[0]
    four, again, _ = dd.launch(flow_on, 4)(4, shape, times)[0]
    print("one rank and four agree:", all(bool((a - b).abs().max() < 1e-12) for a, b in zip(one, four)))
    print("mass of four ranks, relative change:", f"{max(abs(m / again[0] - 1) for m in again):.1e}")
    print("energy, relative change:", f"{max(abs(e / energies[0] - 1) for e in energies):.1e}")
    figure, axes = plt.subplots(1, len(times), figsize=(13, 3), layout="constrained")
    for ax, h, t in zip(axes, four, torch.tensor(times).cumsum(0)):
        ax.imshow(h.T, cmap="RdBu", origin="lower", vmin=0.9, vmax=1.1)
        ax.axvline(shape[0] // 2 + 0.5, color="black", lw=0.5)
        ax.axhline(shape[1] // 2 + 0.5, color="black", lw=0.5)
        ax.set(title=f"depth after {int(t)} steps", xticks=[], yticks=[])
    assert all(bool((a - b).abs().max() < 1e-12) for a, b in zip(one, four))
    assert max(abs(m / again[0] - 1) for m in again) < 1e-13

# %% [markdown]
# ## Back to the beginning
#
# Only the depth at the end is known. Half the squares of what a guess's end differs from it is a function of the guess; `torch.func.grad` takes its
# gradient through all steps and messages, and `dd.solve.lbfgs` goes down. A gradient costs a few forward runs, however many
# unknowns there are; along one direction it is what central differences say.


# %%
def recovered(shape, ahead, steps):
    """(gradient along a direction, central difference, misfits, depths at the beginning that were found)."""
    water = sw.Water(dd.Layout(dd.Partition((2, 2)), shape), coriolis=0.15)
    L = water.L
    truth = sw.at_rest(water, L.shard(sw.whole_hill(shape)))
    guess = sw.at_rest(water, torch.ones(L.local_shape(), dtype=torch.float64))
    observed = water.advance(truth, ahead)[0]

    def f(h):
        return water.misfit(sw.at_rest(water, h), ahead, observed)

    along = L.shard(sw.whole_hill(shape, at=(0.6, 0.5))) - 1
    gradient = torch.func.grad(f)(guess[0])
    slope = dd.func.inner(gradient, along, L.partition)
    central = (f(guess[0] + 1e-4 * along) - f(guess[0] - 1e-4 * along)) / 2e-4
    misfits = [float(f(guess[0]))]
    h, _ = dd.solve.lbfgs(f, guess[0], L, steps=steps, progress=lambda k, value, size: misfits.append(value))
    return float(slope), float(central), misfits, F.gather(gradient, L), F.gather(h, L)


if __name__ == "__main__":
    shape, ahead, steps = ((13, 11), 4, 2) if reduced else ((23, 19), 16, 8)
    slope, central, misfits, gradient, h = dd.launch(recovered, 4)(shape, ahead, steps)[0]
    print(f"gradient along a direction {slope:.9f}, central difference {central:.9f}")
    print(f"misfit {misfits[0]:.2e} -> {misfits[-1]:.2e}")
    figure, (a, b, c, d) = plt.subplots(1, 4, figsize=(14, 3), layout="constrained")
    for ax, x, title in ((a, sw.whole_hill(shape) - 1, "what it was"), (c, h - 1, f"found in {steps} steps")):
        ax.imshow(x.T, cmap="RdBu", origin="lower", vmin=-0.2, vmax=0.2)
        ax.set(title=title, xticks=[], yticks=[])
    limit = float(gradient.abs().max())
    b.imshow(gradient.T, cmap="PuOr", origin="lower", vmin=-limit, vmax=limit)
    b.set(title="first gradient", xticks=[], yticks=[])
    d.semilogy(misfits)
    d.set(title="misfit", xlabel="step")
    assert abs(slope / central - 1) < 1e-6
    assert misfits[-1] < misfits[0]
