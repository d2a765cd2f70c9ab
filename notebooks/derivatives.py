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
# # Derivatives across ranks: Jacobians, curvature, gradients of each example
#
# Every movement is a linear map with an adjoint, so all transforms of `torch.func` go through it. Three things that a backward pass alone does not
# give, of networks that are split over four ranks: a Jacobian, the largest eigenvalues of a Hessian, and a gradient for each example of a batch. Each beside its serial
# twin.

# %%
import os

import torch
from matplotlib import pyplot as plt
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F

reduced = "DISTDL_REDUCED" in os.environ
n, steps, ranks = (12, 8, 2) if reduced else (30, 12, 4)
P = dd.Partition((1, 1, ranks))
L = dd.Layout(P, (1, 1, n))  # a signal, cut into blocks
draw = torch.Generator().manual_seed(0)
X = torch.randn(L.shape, generator=draw, dtype=torch.float64)
W = torch.randn(2, 1, 1, 5, generator=draw, dtype=torch.float64)


def network(w, x, conv):
    """Two convolutions of width five."""
    return conv(torch.tanh(conv(x, w[0])), w[1])


def on_ranks(x, w):
    """Over the blocks of L: two cells travel from each neighbour."""
    return F.dist_conv(x, w, L, padding=2, params="invariant")


def serially(x, w):
    """In one process."""
    return torch.nn.functional.conv1d(x, w, padding=2)


# %% [markdown]
# ## A Jacobian
#
# `torch.func.jacrev` of one rank's function cannot know of other ranks' outputs. `dd.func.jacrev` goes over the whole output, in one batch of
# adjoints, and each rank gets the columns of its own inputs; `dd.func.jacfwd` gives the rows of its own outputs. Coloured by their rank:


# %%
def jacobians():
    """(this rank's columns, its rows, how far from the serial ones)."""
    f, x = lambda x: network(W, x, on_ranks), L.shard(X)
    columns, rows = dd.func.jacrev(f, L)(x), dd.func.jacfwd(f, L)(x)
    whole = torch.func.jacrev(lambda x: network(W, x, serially))(X)
    apart = max(float((columns - whole[(..., *L.slices())]).abs().max()), float((rows - whole[L.slices()]).abs().max()))
    return columns.reshape(n, -1), rows.reshape(-1, n), apart


if __name__ == "__main__":
    results = dd.launch(jacobians, ranks)()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    columns, rows = torch.cat([c for c, _, _ in results], 1), torch.cat([r for _, r, _ in results])
    for ax, J, title in ((axes[0], columns, "reverse mode: columns"), (axes[1], rows, "forward mode: rows")):
        ax.imshow(J, cmap="RdBu", vmin=-J.abs().max(), vmax=J.abs().max())
        for r, (a, b) in enumerate(L.blocks(2)):
            box = ((a - 0.5, -0.5), b - a, n) if ax is axes[0] else ((-0.5, a - 0.5), n, b - a)
            ax.add_patch(plt.Rectangle(*box, fill=False, lw=2, color=f"C{r}"))
        ax.set(title=title, xlabel="input", ylabel="output")
    print(f"serial Jacobian: at most {max(apart for *_, apart in results):.1e} apart")
    assert torch.allclose(columns, rows) and max(apart for *_, apart in results) < 1e-12

# %% [markdown]
# ## The sharpest directions
#
# How curved is a loss, and along what? A product of the Hessian and a vector is `jvp` of `grad`, and costs two gradients; Lanczos makes of a few such products
# the ends of the spectrum (`dd.solve.lanczos`). The Hessian itself, of all inputs, is here small enough to be seen.


# %%
def energy(x):
    """Of the blocks: one value, the same on every rank."""
    return F.dist_sum(network(W, x, on_ranks) ** 2 + 0.1 * x**4, L)


def curvature(count):
    """(estimates of the eigenvalues, after 1 .. count products; those of the serial Hessian)."""
    x = L.shard(X)
    start = L.shard(torch.ones_like(X))

    def product(v):
        return jvp(grad(energy), (x,), (v,))[1]

    estimates = [dd.solve.lanczos(product, start, L, k)[0] for k in range(1, count + 1)]
    whole = torch.func.hessian(lambda x: (network(W, x, serially) ** 2 + 0.1 * x**4).sum())(X)
    return estimates, torch.linalg.eigvalsh(whole.reshape(n, n))


if __name__ == "__main__":
    estimates, exact = dd.launch(curvature, ranks)(steps)[0]
    figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for k, values in enumerate(estimates, 1):
        ax.plot([k] * len(values), values, ".", color="C0")
    ax.hlines(exact, steps + 0.5, steps + 1.5, color="C1", lw=1, label="the serial Hessian's eigenvalues")
    ax.set(xlabel="products", ylabel="estimates")
    ax.legend()
    print(f"largest eigenvalue: {estimates[-1][-1]:.6f}, of the serial Hessian {exact[-1]:.6f}")
    assert abs(estimates[-1][-1] / exact[-1] - 1) < 1e-3

# %% [markdown]
# ## A gradient for each example
#
# `vmap(grad(loss))`: of eight examples, the gradient of the weights for each (their norms are what differential privacy clips). A batch is one more
# dim of every message: as many messages as for one example, and not eight times as many.


# %%
def per_example(count):
    """(norms of the gradients, of the serial ones, messages of a batch, of one example)."""
    batch = torch.randn(count, *X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = batch[(slice(None), *L.slices())]
    slope = grad(lambda w, x: F.dist_sum(network(w, x, on_ranks) ** 2, L))
    with dd.testing.count_messages() as one:
        slope(W, mine[0])
    with dd.testing.count_messages() as all_of_them:
        found = vmap(slope, (None, 0))(W, mine)
    wanted = vmap(grad(lambda w, x: (network(w, x, serially) ** 2).sum()), (None, 0))(W, batch)
    assert torch.allclose(found, wanted, rtol=1e-10)
    return found.flatten(1).norm(dim=1), wanted.flatten(1).norm(dim=1), all_of_them.sends, one.sends


if __name__ == "__main__":
    norms, wanted, batched, single = dd.launch(per_example, ranks)(8)[1]
    figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
    ax.bar(range(8), norms, color="C0", label="four ranks")
    ax.plot(range(8), wanted, "x", color="C1", label="serial")
    ax.set(xlabel="example", ylabel="norm of its gradient")
    ax.legend()
    print(f"messages of rank 1: {batched} for eight examples, {single} for one")
    assert torch.allclose(norms, wanted) and batched == single
