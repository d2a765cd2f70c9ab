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
# # A 3-D U-Net on a volume that is split
#
# The usual reason to split a network over ranks: one volume is too large for one memory. Here a volume is cut into 2 × 2 blocks over its first two
# dims, `dd.nn.convert` makes the twin of a serial U-Net, and it learns to find balls in noise. First, who reads what; last, the losses of
# four ranks beside those of one process.

# %%
import os
from itertools import pairwise

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from torch import nn

import distdl as dd
import distdl.functional as F
from distdl import viz

reduced = "DISTDL_REDUCED" in os.environ
shape = (2, 1, 8, 8, 4) if reduced else (2, 1, 20, 28, 12)
widths, steps = ((4, 8) if reduced else (4, 8, 16)), (2 if reduced else 120)
P = dd.Partition((1, 1, 2, 2, 1))  # (batch, channels, x, y, z)

# %% [markdown]
# ## The network, as you have it
#
# Convolution, group norm, ReLU; pooling on the way down, transposed convolutions on the way up, and the blocks of each level put beside those that
# come up from below. Nothing in it knows of ranks.


# %%
def block(channels, out):
    """A level's work."""
    return nn.Sequential(nn.Conv3d(channels, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU())


class UNet(nn.Module):
    """Levels of these widths, the last one at the bottom."""

    def __init__(self, widths):
        super().__init__()
        self.down = nn.ModuleList(block(a, b) for a, b in zip((1, *widths), widths))
        self.pool = nn.MaxPool3d(2)
        self.wider = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(block(2 * a, a) for a in widths[:-1])
        self.out = nn.Conv3d(widths[0], 1, 1)

    def forward(self, x):
        """Logits of each voxel."""
        skips = []
        for level in self.down[:-1]:
            skips.append(level(x))
            x = self.pool(skips[-1])
        x = self.down[-1](x)
        for wider, level, skip in zip(reversed(self.wider), reversed(self.up), reversed(skips)):
            x = level(torch.cat([wider(x), skip], 1))
        return self.out(x)


# %% [markdown]
# ## Who reads what
#
# A 3 × 3 × 3 convolution reads one voxel beyond its block, on every level: halos are a skin of the blocks, and a larger share of the
# smaller levels. Blocks (lines) and what their ranks read (dotted), and what all ranks send for one convolution of one channel, from plans:

# %%
levels = [dd.Layout(P, shape)]
for _ in widths[1:]:
    levels.append(F.pool_layout(levels[-1], 2))

figure, axes = plt.subplots(1, len(levels), figsize=(4 * len(levels), 4), layout="constrained")
for ax, L in zip(axes, levels):
    spec = dd.HaloSpec.window(L, L.shape, (3, 3, 3), padding=1)
    sent = sum(n for a, b, n in viz.messages(spec.plan()) if a != b)
    for r in P.ranks:
        for box, style in ((L.box(r), "-"), (spec.window_box(r), ":")):
            (x0, x1), (y0, y1) = box[2:4]
            ax.add_patch(Rectangle((y0, x0), y1 - y0, x1 - x0, fill=False, lw=2, ls=style, color=f"C{r}"))
    voxels = torch.Size(L.shape).numel()
    ax.set(title=f"{' x '.join(map(str, L.shape[2:]))}: {sent} of {voxels} voxels travel", xlabel="y", ylabel="x")
    ax.set(xlim=(-2, L.shape[3] + 2), ylim=(L.shape[2] + 2, -2))

# %% [markdown]
# ## A volume
#
# Balls of several sizes in noise that is louder than they are, and which voxels are theirs. Each rank keeps its block: with files,
# `L.slices()` says which part of a memory-mapped array that is.


# %%
def volumes():
    """(volumes, masks), the same wherever they are made."""
    draw = torch.Generator().manual_seed(0)
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in shape[2:]), indexing="ij")
    mask = torch.zeros(shape, dtype=torch.float64)
    for example in mask:
        for _ in range(6):
            centre = torch.rand(3, generator=draw) * torch.tensor(shape[2:])
            radius = 1.5 + 3 * torch.rand(1, generator=draw)
            example[0] += sum((a - c) ** 2 for a, c in zip(axes, centre)) < radius**2
    mask = mask.clamp(max=1)
    return mask + 0.7 * torch.randn(shape, generator=draw, dtype=torch.float64), mask


# %% [markdown]
# ## The twin
#
# `dd.nn.convert` takes the network and a partition. `containers=[UNet]` promises that the network's own `forward` works on single elements and whole channels
# between its children. A layer sums its parameters' gradients over the blocks, so each rank's optimizer does the same.


# %%
def training(P=None):
    """Losses, and what is found in the first volume: on the blocks of P, or in one process."""
    x, mask = volumes()
    torch.manual_seed(0)
    model = UNet(widths).double()
    if P is not None:
        L = dd.Layout(P, shape)
        x, mask = L.shard(x).clone(), L.shard(mask).clone()
        model = dd.nn.convert(model, P, containers=[UNet])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    losses = []
    for _ in range(steps):
        y = model(x)
        if P is None:
            loss = nn.functional.binary_cross_entropy_with_logits(y, mask)
        else:
            loss = F.dist_bce_with_logits_loss(y, mask, L)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = model(x).detach().sigmoid()
    return losses, (found if P is None else F.gather(found, L))


# %%
if __name__ == "__main__":
    losses, found = dd.launch(training, 4)(P)[0]
    x, mask = volumes()
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for ax, (picture, title) in zip(axes, ((x, "volume"), (mask, "what is there"), (found, "what four ranks found"))):
        ax.imshow(picture[0, 0, :, :, shape[4] // 2], cmap="gray")
        ax.axhline(dd.Layout(P, shape).sizes(2)[0] - 0.5, color="C1", lw=0.8)
        ax.axvline(dd.Layout(P, shape).sizes(3)[0] - 0.5, color="C1", lw=0.8)
        ax.set(title=title, xticks=[], yticks=[])
    axes[3].plot(losses)
    axes[3].set(title="loss", xlabel="step")

# %% [markdown]
# ## The serial program's numbers
#
# The same network, volumes and steps in one process, in float64:

# %%
if __name__ == "__main__":
    expected, whole = dd.launch(training, 1)()[0]
    apart = max(abs(a / b - 1) for a, b in zip(losses, expected))
    print(f"losses of {steps} steps: at most {apart:.1e} apart; last {losses[-1]:.6f} and {expected[-1]:.6f}")
    right = float(((found > 0.5) == (mask > 0.5)).double().mean())
    print(f"voxels that are right: {100 * right:.1f} %, {100 * float(mask.mean()):.1f} % are in balls")
    assert apart < 1e-6
    assert (found - whole).abs().max() < 1e-6
