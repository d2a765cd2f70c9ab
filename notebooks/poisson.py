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
# # Poisson's equation on boxes that are split
#
# $-\Delta u = f$ on a box: every $u$ depends on every $f$, however many ranks hold them. Elimination of a dense matrix would
# need all of it in one place. But waves are its eigenvectors: a transform, a division of numbers that each rank has, and a
# transform back. `fast_poisson.py` has the solve in ten lines, for three boundaries, and elimination to compare with.

# %%
import math
import os
from functools import partial

import fast_poisson as fp
import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F

# %% [markdown]
# ## Pencils turn, there and back
#
# A dim is transformed where no rank splits it. Then the ranks that split another one turn to it. `F.fft_stages` lists
# what happens, from plans alone: here four ranks with 9 × 10 × 7 cells, which nothing divides. Each colour is a rank; a
# dim that is transformed already has gone to wave numbers, and of the last one half of them are enough.

# %%
shape = (9, 10, 7)
L = dd.Layout(dd.Partition((2, 2, 1)), shape)
M = F.fft_layout(L, None, real=True)
there = F.fft_stages(L, None, real=True)
back = F.fft_stages(M, None, real=True, inverse=True, s=shape, P_out=L)


def boxes(ax, layout, done):
    """Each rank's block."""
    for r in layout.partition.ranks:
        (x0, x1), (y0, y1), (z0, z1) = layout.box(r)
        ax.bar3d(x0, y0, z0, x1 - x0, y1 - y0, z1 - z0, color=f"C{r}", alpha=0.5, edgecolor="black", linewidth=0.3)
    ax.set(xlim=(0, shape[0]), ylim=(0, shape[1]), zlim=(0, shape[2]))
    ax.set(**{f"{axis}label": f"{'k' if d in done else 'x'}{d}" for d, axis in enumerate("xyz")})
    ax.set_box_aspect(shape, zoom=0.85)


def turning(stages, figure, row, done):
    """A picture of each stage, and what the move before it sends."""
    for i, stage in enumerate(stages):
        ax = figure.add_subplot(2, 3, 3 * row + i + 1, projection="3d")
        boxes(ax, stage.layout, done)
        done = done ^ {*stage.dims}
        title = f"dims {stage.dims} are whole"
        if stage.move is not None:
            plan = stage.move.plan
            sent = sum(plan.volume(r) for r in plan.ranks)
            title += f"\nafter {sum(plan.messages(r) for r in plan.ranks)} messages, {sent} numbers"
        ax.set_title(title)
    return done


figure = plt.figure(figsize=(12, 8), layout="constrained")
done = turning(there, figure, 0, frozenset())
done = turning(back, figure, 1, done)

# %% [markdown]
# The row below begins where the one above ended, and ends where that began: two moves each way, and none in between, as
# the division is done where the spectrum lies. In every move a rank writes to one other rank only, the one beside it along
# the dim that turns.

# %%
assert not done and back[-1].result == L
print("there:", [stage.layout.partition.shape for stage in there])
print("back: ", [stage.layout.partition.shape for stage in back])

# %% [markdown]
# ## Three boundaries
#
# Beyond the last cell comes the first one (waves $e^{2\pi i kx}$: `F.dist_rfftn`), a mirror that lets nothing through (Neumann,
# $\cos \pi kx$: `F.dist_dctn`) or a wall where $u = 0$ (Dirichlet, $\sin \pi kx$: `F.dist_dstn`). Where there is no wall, $u$ is known up
# to a constant, and charges must add up to nothing: their mean is left out. Three charges, on four ranks:

# %%
reduced = "DISTDL_REDUCED" in os.environ
if __name__ == "__main__":
    n = (15, 14) if reduced else (63, 62)
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for ax, (boundary, u) in zip(axes, dd.launch(fp.on_ranks, 4)((2, 2), n)[0].items()):
        ax.contourf(u.T, 24, cmap="RdBu")
        ax.set(title=boundary, aspect="equal", xticks=[], yticks=[])
        ax.axvline(math.ceil(n[0] / 2) - 0.5, color="black", lw=0.5)
        ax.axhline(math.ceil(n[1] / 2) - 0.5, color="black", lw=0.5)

# %% [markdown]
# ## Three ways to one answer
#
# Where coefficients vary there are no waves that fit, and one iterates: `dd.solve.cg`, with any linear function of blocks. The
# matrix may be a *stencil*, whose halo has no corners, or *sparse*, rows of numbers by `F.dist_spmv` over a `dd.Index`.
# On a small box all three are there, and can be compared. How many steps conjugate gradients take, how far their answers
# are from the transforms' and what one application of the matrix sends, on four ranks:


# %%
def three_ways(grid, shape):
    """For each boundary and matrix: steps, distance from the transforms' solution, what this rank sends."""
    L = dd.Layout(dd.Partition(grid), shape)
    f, found = L.shard(fp.charges(shape)), {}
    for boundary in fp.BOUNDARIES:
        wished = fp.solve(f, L, boundary)
        for name in ("stencil", "sparse"):
            A = getattr(fp, name)(L, boundary)
            u, info = fp.iterate(A, f, L, boundary)
            with dd.testing.count_messages() as sent:
                A(f)
            off = float(F.dist_max((u - wished).abs(), L) / F.dist_max(wished.abs(), L))
            found[boundary, name] = info.iterations, off, sent.sends, sent.bytes
    return found


if __name__ == "__main__":
    for (boundary, name), (steps, off, sends, size) in dd.launch(three_ways, 4)((2, 2), (21, 20))[0].items():
        print(f"{boundary:>9}, {name:>7}: {steps} steps, {sends} messages of {size} bytes, within 1e-10: {off < 1e-10}")
        assert off < 1e-10

# %% [markdown]
# ## It is the direct solve
#
# On a small box in three dims with uneven blocks, against elimination of the dense matrix of second differences:

# %%
if __name__ == "__main__":
    for boundary, u in dd.launch(fp.on_ranks, 4)((2, 2, 1), shape)[0].items():
        wished = fp.solve_directly(fp.charges(shape), boundary)
        off = float((u - wished).abs().max() / wished.abs().max())
        print(
            f"{boundary}: a matrix of {math.prod(shape)} x {math.prod(shape)}, apart by less than 1e-12: {off < 1e-12}"
        )
        assert off < 1e-12

# %% [markdown]
# ## And its derivative is another solve
#
# $-\Delta$ is symmetric, and so is its inverse $G$. So the gradient of the energy $\frac{1}{2} \langle f, G f\rangle$ is the potential $G f$ itself, by
# `torch.func.grad` through transforms and moves; and its Hessian times $v$ is $G v$.


# %%
def derivatives(grid, shape):
    """Whether they are, within each boundary."""
    L = dd.Layout(dd.Partition(grid), shape)
    f, v = L.shard(fp.charges(shape)), F.normal(L, 1, dtype=torch.float64)
    right = {}
    for boundary in fp.BOUNDARIES:
        energy = partial(half_product, L, boundary)
        g, bent = torch.func.jvp(torch.func.grad(energy), (f,), (v,))
        pairs = (g, fp.solve(f, L, boundary)), (bent, fp.solve(v, L, boundary))
        right[boundary] = all(torch.allclose(found, wished, atol=1e-12) for found, wished in pairs)
    return right


def half_product(L, boundary, f):
    """The energy of charges in their own potential."""
    return 0.5 * F.dist_sum(f * fp.solve(f, L, boundary), L)


if __name__ == "__main__":
    for r, right in enumerate(dd.launch(derivatives, 4)((2, 2, 1), shape)):
        print(f"rank {r}: {right}")
        assert all(right.values())

# %% [markdown]
# ## What it would send
#
# Of 2048 × 2048 × 2048 cells on 64 × 64 ranks, from plans alone. Sines and cosines of real numbers are real, as many as
# there are cells; half a spectrum of complex numbers is as many bytes.

# %%
big = dd.Layout(dd.Partition((64, 64, 1)), (2048, 2048, 2048))
for name, real, size in (("dist_rfftn", True, 16), ("dist_dstn", False, 8)):
    plans = [stage.move.plan for stage in F.fft_stages(big, None, real=real) if stage.move is not None]
    sent = [(plan.messages(0), size * plan.volume(0) / 2**20) for plan in plans]
    print(name, ", ".join(f"{count} messages of rank 0, {mib:.1f} MiB" for count, mib in sent))
