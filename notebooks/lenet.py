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
# # LeNet-5 on four ranks
#
# The library's demo (`python -m distdl demo`), step by step: images are cut 2 × 2 over four ranks, a repartition hands their features to linear layers,
# whose weights lie on a 2 × 2 grid of the same ranks. It learns 4,000 MNIST digits beside the sequential network. `distdl/programs/demo.py` has
# both.

# %%
import inspect
import os

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

import distdl as dd
from distdl import viz
from distdl.programs import demo

# %% [markdown]
# ## Who holds what
#
# Tiles of the images, and what the 5 × 5 kernel reads beyond them; blocks of the first linear layer's weights.

# %%
images, labels = demo.load_digits()
halo = dd.HaloSpec.window(demo.TILES, (1, 1, 28, 28), (5, 5), padding=2)
matrix = demo.layouts("fc1.w")
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
left.imshow(images[0, 0], cmap="gray_r", extent=(0, 28, 28, 0))
left.set(title="tiles; dotted: what the kernel reads", xlim=(-3, 31), ylim=(31, -3))
right.set(title="blocks of fc1's weights", xlabel="in", ylabel="out", xlim=(-8, 408), ylim=(123, -3))
for r in range(4):
    for ax, ((y0, y1), (x0, x1)), style in (
        (left, demo.TILES.box((1, 1, 28, 28), r)[2:], "-"),
        (left, halo.window_box(r)[2:], ":"),
        (right, matrix.box(r), "-"),
    ):
        ax.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, lw=2, ls=style, color=f"C{r}"))

# %% [markdown]
# Between them, tiles of all 16 channels become whole images of half the channels, on two ranks: flattened, these are blocks of the 400 features.
# Elements of one image:

# %%
tiles = dd.Layout(demo.TILES, (1, 16, 5, 5))
print(viz.text(dd.maps.repartition(tiles, dd.Partition((1, 2, 1, 1), demo.X_SIDE.ranks))))

# %% [markdown]
# ## The network
#
# Its forward, in full; a gradient needs nothing else.

# %%
print(inspect.getsource(demo.distributed))

# %% [markdown]
# ## Training
#
# First a few steps in float64, where both networks must stay together; then epochs in float32, as one would.

# %%
reduced = "DISTDL_REDUCED" in os.environ
count, epochs = (3, 0) if reduced else (20, 3)


def compared(count):
    """[(loss, sequential loss, largest difference of the parameters)] of float64 steps."""
    order = [torch.arange(64 * i, 64 * (i + 1)) for i in range(count)]
    found = demo.steps(*demo.load_digits(64 * count), torch.float64, 0.05, order)
    return [(loss, other, demo.largest_difference(*both)) for *both, loss, other in found]


def trained(epochs):
    """(losses of both, right answers per cent of both) after epochs in float32."""
    images, labels = demo.load_digits()
    shuffle = torch.Generator().manual_seed(2)
    order = [b for _ in range(epochs) for b in torch.randperm(4000, generator=shuffle).split(64)]
    losses = []
    for ours, theirs, *both in demo.steps(images, labels, torch.float32, 0.04, order):  # noqa: B007 (the last ones)
        losses.append(both)
    n = 1000
    logits = demo.distributed(ours, demo.TILES.shard(images[4000:]).contiguous(), n)
    logits = dd.functional.gather(logits, dd.Layout(demo.Y_SIDE, (n, 10)))
    if dd.world().rank:
        return None
    return losses, [demo.accuracy(y, labels[4000:]) for y in (logits, demo.sequential(theirs, images[4000:]))]


if __name__ == "__main__" and epochs:
    losses, scores = dd.launch(trained, 4)(epochs)[0]
    figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    for line, style, name in zip(zip(*losses), ("-", ":"), ("four ranks", "sequential")):
        ax.plot(line, style, label=name)
    ax.set(xlabel="step", ylabel="loss", title="right: {:.1f} % by four ranks, {:.1f} % sequential".format(*scores))
    ax.legend()
    assert abs(scores[0] - scores[1]) <= 2

# %% [markdown]
# ## The sequential network's numbers

# %%
if __name__ == "__main__":
    found = dd.launch(compared, 4)(count)[0]
    for step in sorted({0, count // 2, count - 1}):
        loss, other, apart = found[step]
        print(f"step {step + 1:2d}: loss {loss:.12f}, sequential {other:.12f}; parameters at most {apart:.1e} apart")
    assert all(abs(loss - other) < 1e-11 and apart < 1e-11 for loss, other, apart in found)
