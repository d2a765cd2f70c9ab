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
# # A network on a graph that is split
#
# Each node of a graph hears its neighbours, and some of them are on other ranks. Who needs whose rows is found out once, by
# `dd.Index`; then a layer of message passing is `F.gather_rows`, local work, and `F.scatter_add_rows`, its transpose. Here: the
# graph of nearest neighbours among 1,797 digits, who sends what to whom, and a network that learns 1,597 labels from the
# other 200, on one rank and on three. `graph_network.py` has the graph, the network and its serial twin.

# %%
import os

import graph_network as gn
import torch
from matplotlib import pyplot as plt

import distdl as dd

# %% [markdown]
# ## The graph
#
# Every digit of 8 × 8 pixels chooses the eight that are nearest to it, and edges go both ways. Nodes are split unevenly, 299, 599
# and 899 over three ranks. Drawn along the two directions in which digits differ most; edges between ranks are black:

# %%
P = dd.Partition((3,))
L = gn.layout(P)
pixels, labels = gn.digits()
near = gn.nearest(pixels, torch.arange(gn.NODES))
centred = pixels - pixels.mean(0)
flat = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:2].T


def owner(layout, nodes):
    """The rank that has each node."""
    stops = torch.tensor([stop for _, stop in layout.blocks(0)])
    return torch.bucketize(nodes, stops, right=True)


def draw_graph(ax, layout, flat, near, title):
    """Nodes in their rank's colour."""
    sources = torch.arange(len(near)).repeat_interleave(near.shape[1])
    here, there = owner(layout, sources), owner(layout, near.reshape(-1))
    for r in layout.partition.ranks:
        ends = torch.stack([flat[sources], flat[near.reshape(-1)]])[:, (here == r) & (there == r)]
        ax.plot(*ends.permute(2, 0, 1), color=f"C{r}", lw=0.2, alpha=0.5)
    ends = torch.stack([flat[sources], flat[near.reshape(-1)]])[:, here != there]
    ax.plot(*ends.permute(2, 0, 1), color="black", lw=0.2, alpha=0.3)
    ax.scatter(*flat.T, c=[f"C{r}" for r in owner(layout, torch.arange(len(near))).tolist()], s=4, zorder=3)
    ax.set(title=f"{title}: {int((here != there).sum())} of {len(sources)} edges are cut", xticks=[], yticks=[])


order = flat[:, 0].argsort()  # nodes, and so ranks, from left to right
place = order.argsort()
figure, axes = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
draw_graph(axes[0], L, flat, near, "in the order of the file")
draw_graph(axes[1], L, flat[order], place[near[order]], "from left to right")

# %% [markdown]
# ## Who needs whose rows
#
# `dd.Index.known` makes the Index of what all ranks want, without a message; `index.counts` has the number of *distinct* rows of
# each block that each rank wants. Beside it the number of edges: a row that many edges of a rank end in travels to it once.


# %%
def wanted(near):
    """What each rank wants: its nodes' neighbours, edge by edge."""
    return [near[slice(*L.box(r)[0])].reshape(-1) for r in P.ranks]


def show(ax, table, title):
    """A table with its numbers; what stays on a rank is grey."""
    moved = table.clone().fill_diagonal_(0)
    ax.imshow(moved, cmap="Blues", vmin=0, vmax=1.5 * float(moved.max()))
    for i in P.ranks:
        for j in P.ranks:
            ax.text(j, i, int(table[i, j]), ha="center", va="center", color="grey" if i == j else "black")
    ax.set(title=f"{title}: {int(moved.sum())}", xlabel="rows of rank", ylabel="wanted by rank")
    ax.set(xticks=range(P.size), yticks=range(P.size))


figure, axes = plt.subplots(1, 4, figsize=(14, 4), layout="constrained")
for two, name, neighbours in ((axes[:2], "file", near), (axes[2:], "left to right", place[near[order]])):
    rows = wanted(neighbours)
    index = dd.Index.known(L, rows)
    edges = torch.stack([torch.bincount(owner(L, those), minlength=P.size) for those in rows])
    show(two[0], edges, f"{name}, edges between ranks")
    show(two[1], torch.tensor(index.counts), f"{name}, rows that travel")

# %% [markdown]
# The same, row by row, of six rows on three ranks: on the left the owners' rows, in the middle what each rank has of them,
# on the right its edges. Only the lines on the left between colours are messages; where
# several edges leave one dot in the middle, its row came once. Read from right to left, it is the transpose: sums on a rank
# first, then one row to its owner.

# %%
small = dd.Layout(P, (6,))
chosen = [torch.tensor(those) for those in ([5, 0, 5, 5, 4], [3, 2, 0, 0], [1, 1, 5, 1])]
figure, ax = plt.subplots(figsize=(9, 5), layout="constrained")
middles = [(r, int(row)) for r, those in enumerate(chosen) for row in those.unique()]
ends = [(r, int(row)) for r, those in enumerate(chosen) for row in those]


def height(i, count):
    """Of the i-th of so many."""
    return 1 - (i + 0.5) / count


for row in range(6):
    ax.plot(0, height(row, 6), "o", color=f"C{int(owner(small, torch.tensor(row)))}")
    ax.annotate(f"row {row}", (-0.05, height(row, 6)), ha="right", va="center")
for i, (r, row) in enumerate(middles):
    source = int(owner(small, torch.tensor(row)))
    style = {"color": f"C{source}", "lw": 2} if source != r else {"color": "grey", "lw": 0.8, "ls": ":"}
    ax.plot([0, 1], [height(row, 6), height(i, len(middles))], **style)
    ax.plot(1, height(i, len(middles)), "o", color=f"C{r}")
for k, (r, row) in enumerate(ends):
    ax.plot([1, 2], [height(middles.index((r, row)), len(middles)), height(k, len(ends))], color=f"C{r}", lw=0.8)
    ax.plot(2, height(k, len(ends)), "s", color=f"C{r}")
    ax.annotate(f"rank {r}: row {row}", (2.05, height(k, len(ends))), va="center")
travels = sum(int(owner(small, torch.tensor(row))) != r for r, row in middles)
ax.set(xlim=(-0.4, 2.6), title=f"{len(ends)} edges, {travels} rows that travel")
ax.axis("off")
index = dd.Index.known(small, chosen)
assert travels == sum(n for r, counts in enumerate(index.counts) for c, n in enumerate(counts) if c != r)

# %% [markdown]
# ## Twenty steps are the serial steps
#
# Two layers of mean aggregation, by three spellings of one sum: rows as they are numbered (`F.gather_rows` and
# `F.scatter_add_rows`); only rows of others (`index.own_first`); a sparse matrix (`F.dist_spmv`) and its transpose, which
# `torch.func.vjp` has. Gradients need no line: each movement is the other's. Against `index_select` and `index_add` in one
# process, in float64:

# %%
if __name__ == "__main__":
    steps = 4 if "DISTDL_REDUCED" in os.environ else 20
    losses, parameters, score = gn.train(steps)
    for ways in dd.launch(gn.on_ranks, 3)(steps, ("rows", "ghosts", "matrix")):
        for found, q, scored in ways.values():
            off = max(abs(a / b - 1) for a, b in zip(found, losses))
            apart = max(float((q[name] - p).abs().max() / p.abs().max()) for name, p in parameters.items())
            assert off < 1e-10 and apart < 1e-10 and scored == score
    print(f"{list(ways)} on 3 ranks: losses and parameters of {steps} steps within 1e-10 of the serial ones")

# %% [markdown]
# ## And it learns
#
# More steps on three ranks. Of labels that nobody told, so many are found:

# %%
if __name__ == "__main__":
    steps = 10 if "DISTDL_REDUCED" in os.environ else 150
    losses, _, score = dd.launch(gn.on_ranks, 3)(steps)[0]["ghosts"]
    figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
    ax.semilogy(losses)
    ax.set(xlabel="step", ylabel="loss of the 200", title=f"{100 * score:.1f} % of the other 1,597 are right")
