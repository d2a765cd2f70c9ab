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
# # What is below, from waves
#
# Shots at the surface, receivers beside them, and between them ground of unknown velocity: full-waveform inversion looks for the velocities whose waves
# are those that were heard. Its gradient is one more wave backwards in time, and nobody need derive it: the program below is differentiable, messages
# included. Ranks split shots *and* space. `acoustic.py` has the waves in forty lines:
#
# - a time step is one star-shaped halo (`corners=False`) and a stencil of fourth order;
# - `F.dist_deposit` puts a source between grid points, and its adjoint `F.dist_sample` listens there, whichever rank has the surroundings;
# - `dd.remat` keeps the ends of blocks of steps, and works out the rest again in backward;
# - `F.mark_varying` along the shots' dim of the ranks: one model, whose gradients are summed.

# %%
import os

import acoustic as ac
import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F

reduced = "DISTDL_REDUCED" in os.environ
shots, nx, nz = shape = (2, 17, 13) if reduced else (2, 30, 20)
steps, dt = (30, 0.4) if reduced else (72, 0.4)


def models():
    """Global velocities: (the true ones, with a slow and a fast body, where the search begins)."""
    x, z = (torch.arange(n, dtype=torch.float64)[s] for n, s in ((nx, (slice(None), None)), (nz, (None, slice(None)))))
    first = (0.8 + 0.25 * z / nz).expand(nx, nz)
    bodies = [(0.35, 0.5, -0.12), (0.7, 0.45, 0.12)]
    bumps = [a * torch.exp(-((x - cx * nx) ** 2 + (z - cz * nz) ** 2) / (2 * (0.09 * nx) ** 2)) for cx, cz, a in bodies]
    return first + sum(bumps), first


def points(count, depth):
    """A line below the surface, between grid points."""
    return torch.stack(
        [torch.linspace(2.3, nx - 3.7, count, dtype=torch.float64), torch.full((count,), depth, dtype=torch.float64)], 1
    )


def survey_on(grid, block=12):
    """(this rank's part of the survey, its layout), on a grid of shots × x × z ranks."""
    L = dd.Layout(dd.Partition(grid), shape)
    damping = ac.block_of(L, ac.sponge((nx, nz), 6, 0.15))
    receivers = ac.share(points(nx // 2, 2.5), L)
    return ac.Survey(L, points(shots, 2.25), receivers, damping, ac.ricker(steps, dt, 0.11), dt, block), L


true, first = models()

# %% [markdown]
# ## Waves
#
# One shot after a third, a half and two thirds of the time, on 2 × 2 blocks of space; and what all receivers hear.


# %%
def waves(grid):
    """(pressures at three times, of the first shot; what this rank's receivers heard of it)."""
    survey, L = survey_on(grid)
    p = before = torch.zeros(L.local_shape(), dtype=torch.float64)
    seen, heard = [], []
    for wavelet in survey.wavelet.split(steps // 6)[:4]:
        p, before, h = survey.steps(p, before, ac.block_of(L, true), wavelet)
        seen.append(F.gather(p, L))
        heard.append(h[0])
    return [s[:1] for s in seen[1:]], torch.cat(heard, -1)  # gathered fields are whole on rank 0


if __name__ == "__main__":
    results = dd.launch(waves, 4)((1, 2, 2))
    (seen, _), heard = results[0], torch.cat([h for _, h in results])
    figure, axes = plt.subplots(1, 5, figsize=(15, 2.6), layout="constrained")
    axes[0].imshow(true.T, cmap="viridis")
    axes[0].scatter(*points(shots, 2.25).T, marker="*", c="red", s=30)
    axes[0].scatter(*points(nx // 2, 2.5).T, marker=".", c="white", s=8)
    axes[0].set_title("velocity, shots, receivers")
    for ax, p in zip(axes[1:4], seen):
        ax.imshow(p[0].T, cmap="RdBu", vmin=-0.3 * p.abs().max(), vmax=0.3 * p.abs().max())
    axes[4].imshow(heard.T, cmap="gray", aspect="auto", vmin=-0.3 * heard.abs().max(), vmax=0.3 * heard.abs().max())
    axes[4].set(title="heard", xlabel="receiver", ylabel="step")
    for ax in axes[:4]:
        ax.set(xticks=[], yticks=[])

# %% [markdown]
# ## The gradient, and what it keeps
#
# The same on one rank, on four blocks of space, and on two halves of space for two halves of the shots. Without `dd.remat` every step's
# tensors are alive when backward begins.


# %%
def gradient(grid, blocks):
    """For each length of blocks (whole gradient on rank 0, misfit, KiB alive between forward and backward on this rank)."""
    found = []
    for block in blocks:
        survey, L = survey_on(grid, block)
        with torch.no_grad():
            observed = survey.record(ac.block_of(L, true))
        c = ac.block_of(L, first).requires_grad_()
        loss, alive = ac.held(lambda survey=survey, c=c, observed=observed: survey.misfit(c, observed))
        loss.backward()
        M = ac.model(L)  # the ranks of other shots have the same
        found.append((F.gather(c.grad, M) if M.active else None, float(loss.detach()), alive / 2**10))
    return found


if __name__ == "__main__":
    gradients = []
    for grid, blocks in (((1, 1, 1), (12,)), ((1, 2, 2), (None, 12)), ((2, 2, 1), (12,))):
        results = dd.launch(gradient, torch.Size(grid).numel())(grid, blocks)[0]
        for block, (g, loss, alive) in zip(blocks, results):
            gradients.append(g)
            print(f"ranks {grid}, blocks of {block} steps: misfit {loss:.12f}, {alive:.0f} KiB alive on rank 0")
    same = all(bool((g - gradients[0]).abs().max() < 1e-10 * g.abs().max()) for g in gradients)
    print("the same gradient:", same)
    assert same

# %% [markdown]
# ## Gauss and Newton, and L-BFGS
#
# J, the Jacobian of all records, is never made: J v is forward mode, Jᵀ reverse mode, both through the same program. The product is symmetric.
# Along a single spike it shows what that velocity is confused with. Then a few steps of L-BFGS.


# %%
def inverted(grid, count):
    """(a product with a spike, how unsymmetric, misfits, velocities that were found)."""
    survey, L = survey_on(grid)
    M, space = ac.model(L), L.partition.take(0, L.partition.index()[0])
    with torch.no_grad():
        observed = survey.record(ac.block_of(L, true))
    c = ac.block_of(L, first)
    spike = torch.zeros(nx, nz, dtype=torch.float64)
    spike[nx // 2, nz // 3] = 1
    v, w = ac.block_of(L, spike), torch.sin(ac.block_of(L, true) * 40)
    of_v, of_w = survey.gauss_newton(c, v), survey.gauss_newton(c, w)
    one, other = (float(dd.func.inner(a, b, space)) for a, b in ((of_v, w), (v, of_w)))
    misfits = []
    c, _ = dd.solve.lbfgs(
        lambda c: survey.misfit(c, observed), c, L, steps=count, dims=(1, 2), progress=lambda k, f, g: misfits.append(f)
    )
    product, c = (F.gather(x, M) if M.active else None for x in (of_v, c))
    return product, abs(one / other - 1), misfits, c


if __name__ == "__main__":
    product, unsymmetric, misfits, c = dd.launch(inverted, 4)((2, 2, 1), 2 if reduced else 4)[0]
    print(f"J'J v · w and v · J'J w differ by {unsymmetric:.1e}")
    print(f"misfit after the first step {misfits[0]:.4e}, after the last one {misfits[-1]:.4e}")
    figure, axes = plt.subplots(1, 4, figsize=(14, 2.6), layout="constrained")
    axes[0].imshow(product.T, cmap="PuOr", vmin=-product.abs().max(), vmax=product.abs().max())
    axes[0].set_title("Gauss-Newton of a spike")
    for ax, x, title in ((axes[1], true - first, "what is there"), (axes[2], c - first, "what was found")):
        ax.imshow(x.T, cmap="RdBu", vmin=-0.12, vmax=0.12)
        ax.set_title(title)
    axes[3].semilogy(range(1, len(misfits) + 1), misfits)
    axes[3].set(title="misfit", xlabel="step")
    for ax in axes[:3]:
        ax.set(xticks=[], yticks=[])
    assert unsymmetric < 1e-9
    assert misfits[-1] < misfits[0]
