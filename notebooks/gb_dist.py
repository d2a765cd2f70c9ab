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
# # GBDist: the "Google Brain" autoencoder on tiles of faces
#
# neon's `GBDist` (after Le et al., arXiv:1112.6209) repeats [local filters, L2 pooling, local contrast normalisation].
# Filters are
# *untied*: every pixel has its own, so a rank's tile has its own weights too, and **their gradient sends nothing**.
# Stages are pretrained one after the other, greedily, without labels, on
#
# $$ J = \frac1N \Bigl[ \tfrac{1}{2} \|V^\top W x - x\|^2 + \lambda \sum \mathrm{L2pool}(W x) \Bigr] $$
#
# with V = W ("tied") or separate, and every row of W of norm 1 after each update. Then a classifier is trained: alone
# at first, then with all that is below it. The pictures are 25 × 25, so quadrants are 13 and 12 wide: nothing needs to
# divide.

# %%
import os

import neon
import torch
import torch.nn.functional as local

import distdl as dd
import distdl.functional as F
from distdl import data

# filters, kernel, (pooling, stride), window of the contrast normalisation: 25 → 21 → 10, 10 → 8 → 4
STAGES = ((4, 5, (3, 2), 3), (4, 3, (2, 2), 3))
SHAPES = {"W0": (4, 21, 21, 1, 5, 5), "W1": (4, 8, 8, 4, 3, 3), "fc.w": (2, 64), "fc.b": (2,)}
PENALTY = 0.1

# %% [markdown]
# ## The model, distributed


# %%
def features(p, x, L, stages):
    """x of layout L through the first stages; the result, and its layout."""
    for i, (filters, kernel, pool, window) in enumerate(STAGES[:stages]):
        x = F.dist_local_conv(x, p[f"W{i}"], L, out_channels=filters, params="invariant")
        L = F.conv_layout(L, filters, kernel)
        x, L = F.dist_l2_pool(x, L, *pool), F.pool_layout(L, *pool)
        x = F.dist_lcn(x, L, window)
    return x, L


def model(p, x, L):
    """This rank's logits, and their layout."""
    x, L = features(p, x, L, len(STAGES))
    return neon.vecpar(p, x, L, ("fc",))


def objective(W, V, x, L, stage):
    """J of a stage for its input x of layout L."""
    filters, kernel, pool, _ = STAGES[stage]
    h = F.dist_local_conv(x, W, L, out_channels=filters, params="invariant")
    H = F.conv_layout(L, filters, kernel)
    error = F.dist_local_conv_transpose(h, V, H, output_size=L, params="invariant") - x
    pooled = F.dist_l2_pool(h, H, *pool)
    return (F.dist_sum(error**2, L) / 2 + PENALTY * F.dist_sum(pooled, F.pool_layout(H, *pool))) / L.shape[0]


def normalised(W):
    """Every row of W (a filter at a pixel) with norm 1; the row is on one rank."""
    return W / torch.linalg.vector_norm(W, dim=(-3, -2, -1), keepdim=True)


# %% [markdown]
# ## The same, as a sequential program


# %%
def patches(x, kernel):
    """(b, c·k·k, pixels)."""
    return local.unfold(x, kernel)


def rows(W):
    """(filters, pixels, c·k·k)."""
    return W.reshape(W.shape[0], W.shape[1] * W.shape[2], -1)


def local_conv(x, W):
    return torch.einsum("bqp,fpq->bfp", patches(x, W.shape[-1]), rows(W)).reshape(len(x), *W.shape[:3])


def l2_pool(x, kernel, stride):
    return local.lp_pool2d(x, 2, kernel, stride)


def lcn(x, window):
    """Subtractive, then divisive, by a Gaussian over all channels."""
    place = torch.arange(window, dtype=x.dtype) - window // 2
    deviation = 2**0.5 * (window // 2) / 3
    w = torch.exp(-(place[:, None] ** 2 + place**2) / (2 * deviation**2))
    w = (w / w.sum() / x.shape[1]).expand(1, x.shape[1], -1, -1)
    v = x - local.conv2d(x, w, padding=window // 2)
    s = local.conv2d(v**2, w, padding=window // 2).sqrt()
    return v / torch.where(s > 0, s, 1)


def sequential_features(p, x, stages):
    for i, (_, _, pool, window) in enumerate(STAGES[:stages]):
        x = lcn(l2_pool(local_conv(x, p[f"W{i}"]), *pool), window)
    return x


def sequential(p, x):
    return local.linear(sequential_features(p, x, len(STAGES)).flatten(1), p["fc.w"], p["fc.b"])


def sequential_objective(W, V, x, stage):
    h = local_conv(x, W)
    back = torch.einsum("bfp,fpq->bqp", h.flatten(2), rows(V))
    error = local.fold(back, x.shape[2:], V.shape[-1]) - x
    return ((error**2).sum() / 2 + PENALTY * l2_pool(h, *STAGES[stage][2]).sum()) / len(x)


# %% [markdown]
# ## Who holds what
#
# W lies as the stage's output does: a rank has the filters of its own pixels (and with `modelpar` its own filters of
# all pixels).


# %%
def layout_of(L, stages):
    """The layout of the input of a stage, for pictures of layout L."""
    for filters, kernel, pool, _ in STAGES[:stages]:
        L = F.pool_layout(F.conv_layout(L, filters, kernel), *pool)
    return L


def places(L):
    """{parameter: function that cuts this rank's part of it}, for pictures of layout L."""
    found = {"fc.w": neon.owned(layout_of(L, len(STAGES)))}
    for i, (filters, kernel, _, _) in enumerate(STAGES):
        block = F.conv_layout(layout_of(L, i), filters, kernel).slices()[1:]
        found[f"W{i}"] = found[f"V{i}"] = lambda w, block=block: w[block]
    return found


def layout(kind, n, size):
    """How a batch lies over n ranks."""
    return dd.Layout(neon.partition(kind, n), (size, 1, 25, 25))


def load(L, chosen, dtype, bar=False):
    """(this rank's tiles of all batches, labels of its micro-batches: 1 for a face)."""
    path, order = data.installed("skimage", "data", "lfw_subset.npy"), data.batches(0, L.shape[0], chosen=chosen)
    x = data.read(path, order, L.box(), sample=L.shape[1:], dtype=dtype, bar=bar)  # memory-mapped
    return x, torch.as_tensor(order[:, slice(*L.box()[0])] < 100).long()  # the first hundred are faces


# %% [markdown]
# ## Training


# %%
def train(kind, epochs, size=20):
    """Pretrain, then train; (J of each stage's first and last epoch, accuracy, W0) of a partition, or (None)
    sequentially."""
    alone = kind is None
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    n, kind = 1 if alone else dd.world().size, kind or "halopar"
    L, T = layout(kind, n, size), layout(kind, n, 40)
    x, y = load(L, order[:160], torch.float32, bar=True)
    test_x, test_y = load(T, order[160:], torch.float32)
    p = neon.drawn(SHAPES, torch.float32)
    p |= {name: normalised(w) for name, w in p.items() if name.startswith("W")}
    if not alone:
        p = neon.cut(p, places(L))
    history = []
    for stage in range(len(STAGES)):
        name = f"W{stage}"
        M = layout_of(L, stage)
        inputs = [sequential_features(p, t, stage) if alone else features(p, t, L, stage)[0] for t in x]

        def J(p, t, stage=stage, name=name, M=M):  # V = W: tied
            return (
                sequential_objective(p[name], p[name], t, stage) if alone else objective(p[name], p[name], t, M, stage)
            )

        steps = data.progress(inputs * epochs, desc=f"{'sequential' if alone else kind}, stage {stage}")
        p, losses = neon.sgd(J, p, steps, 0.02, lambda p, name=name: {**p, name: normalised(p[name])}, only=[name])
        history.append((sum(losses[: len(x)]) / len(x), sum(losses[-len(x) :]) / len(x)))

    loss = neon.cross_entropy(model, sequential, x, y, None if alone else L)
    steps = list(range(len(x))) * epochs
    p, _ = neon.sgd(loss, p, steps, 0.05, only=["fc.w", "fc.b"])
    p, losses = neon.sgd(loss, p, steps, 0.02)
    return history, neon.tested(model, sequential, p, test_x[0], test_y[0], None if alone else T), p["W0"]


# %%
if __name__ == "__main__":
    reduced = "DISTDL_REDUCED" in os.environ
    epochs = 1 if reduced else 6
    results = {"sequential": dd.launch(train, 1)(None, epochs)}
    for kind in ("halopar",) if reduced else ("halopar", "halodatapar"):
        results[kind] = dd.launch(train, 4)(kind, epochs)
    for name, ranks in results.items():
        history, score, _ = ranks[0]
        print(
            f"{name:>12}:",
            *(f"stage {i}: J {a:.3f} → {b:.3f}," for i, (a, b) in enumerate(history)),
            f"accuracy {score:.2f}",
        )
        for (_, mine), (_, theirs) in zip(history, results["sequential"][0][0]):
            assert abs(mine - theirs) <= 1e-3 * theirs
        assert abs(score - results["sequential"][0][1]) <= 0.05


# %% [markdown]
# ## Learned filters, and the tiles
#
# Filters of the first stage at every fourth pixel, as the four ranks hold them: each panel is a rank's own part of W.

# %%
if __name__ == "__main__":
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(7, 7), layout="constrained")
    for rank, (ax, (_, _, W)) in enumerate(zip(axes.flat, results["halopar"])):
        few = local.pad(W[0, ::4, ::4, 0], (1, 1, 1, 1))  # one filter map: (rows, columns, 7, 7)
        ax.imshow(few.permute(0, 2, 1, 3).flatten(2).flatten(0, 1), cmap="gray")
        ax.set(title=f"rank {rank}: pixels {tuple(W.shape[1:3])}", xticks=[], yticks=[])
    plt.show()
