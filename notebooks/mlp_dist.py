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
# # MLPDist: a multilayer perceptron over feature vectors that are split
#
# neon's `MLPDist` keeps a part of every feature vector on each rank ("vecpar", "modelpar"): a layer multiplies the
# features it has by *its columns* of the weight matrix, and the sums are reduce-scattered. Here that is `F.dist_linear`
# with `y_layout="sharded"`. 64 pixels over 3 ranks are 22 + 21 + 21, 10 classes are 4 + 3 + 3.
#
# One keyword chooses the partition. The model below does not know which one it got.

# %%
import os

import neon
import torch
import torch.nn.functional as local

import distdl as dd
from distdl import data

SHAPES = {"fc1.w": (32, 64), "fc1.b": (32,), "fc2.w": (24, 32), "fc2.b": (24,), "fc3.w": (10, 24), "fc3.b": (10,)}
LAYERS = ("fc1", "fc2", "fc3")


def model(p, x, L):
    """This rank's logits, and their layout."""
    return neon.vecpar(p, x, L, LAYERS, torch.tanh)


def sequential(p, x):
    """The same, as everyone writes it."""
    x = x.flatten(1)
    for name in LAYERS:
        x = local.linear(x, p[name + ".w"], p[name + ".b"])
        x = x if name == LAYERS[-1] else x.tanh()
    return x


# %% [markdown]
# ## Who holds what
#
# A *place* cuts a rank's part out of a sequential parameter. Biases are whole everywhere (the layer marks them). With
# the digits as images of 1 × 8 × 8, `halopar` gives each rank a tile and the weight columns of its pixels. With
# `modelpar` the 64 pixels are 64 channels, so that they can be split.


# %%
def sample(kind):
    """Shape of one digit."""
    return (64, 1, 1) if kind == "modelpar" else (1, 8, 8)


def places(L):
    """{parameter: function that cuts this rank's part of it}, for digits of layout L."""
    first, others = neon.owned(L), neon.columns(L.partition)
    return {"fc1.w": first, "fc2.w": others, "fc3.w": others}


def layout(kind, n, size):
    """How a batch lies over n ranks."""
    return dd.Layout(neon.partition(kind, n), (size, *sample(kind)))


def load(L, chosen, dtype, bar=False):
    """(this rank's parts of all batches, labels of its micro-batches)."""
    path, rows = (
        data.installed("sklearn", "datasets", "data", "digits.csv.gz"),
        data.batches(0, L.shape[0], chosen=chosen),
    )
    x = data.read(path, rows, L.box(), sample=L.shape[1:], dtype=dtype, bar=bar) / 16
    return x, data.read(path, rows, L.box()[:1], first=64, dtype=torch.int64)


# %% [markdown]
# ## Training
#
# Every rank of every partition ends with the same loss as the sequential program.


# %%
def train(kind, epochs, size=32):
    """Train on 1,440 digits in float32; (losses, test accuracy) of this partition, or of the sequential program (kind
    None)."""
    alone = kind is None
    n = 1 if alone else dd.world().size
    kind = kind or "halopar"
    L, T = layout(kind, n, size), layout(kind, n, 357)
    x, y = load(L, range(1440), torch.float32)
    p = neon.drawn(SHAPES, torch.float32)
    if not alone:
        p = neon.cut(p, places(L))

    loss = neon.cross_entropy(model, sequential, x, y, None if alone else L)
    p, losses = neon.sgd(
        loss, p, data.progress(list(range(len(x))) * epochs, desc="sequential" if alone else kind), 0.3
    )
    x, y = load(T, range(1440, 1797), torch.float32)
    return losses, neon.tested(model, sequential, p, x[0], y[0], None if alone else T)


# %%
if __name__ == "__main__":
    epochs = 1 if "DISTDL_REDUCED" in os.environ else 15
    results = {"sequential": dd.launch(train, 1)(None, epochs)[0]}
    for kind in ("modelpar",) if epochs == 1 else ("modelpar", "datapar", "halopar"):
        results[kind] = dd.launch(train, 3)(kind, epochs)[0]
    for name, (losses, score) in results.items():
        print(f"{name:>12}: last loss {losses[-1]:.4f}, test accuracy {100 * score:.1f} %")
        assert abs(score - results["sequential"][1]) <= 0.01
