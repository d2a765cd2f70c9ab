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
# # Operators and adjoints, by picture
#
# Everything here runs in **one process**. A movement of `distdl` is a *plan*: who holds which boxes, who wants which.
# Plans are plain values, so one process can play all ranks (`simulate`) and draw what they do. No MPI is needed.
#
# The question of this notebook: *what is the gradient of a message?* The answer, every time: the transpose of a matrix
# with ones in it.

# %%
import torch
from matplotlib import pyplot as plt

import distdl as dd
from distdl import viz
from distdl.engine.local import LocalTransport
from distdl.plan import Plan, Side

dd.World(transport=LocalTransport(size=8))  # let maps be made for eight ranks, although this process is the only one


def row(*drawings, height=3.2, width=4):
    """Draw (function, what, title) side by side."""
    figure, axes = plt.subplots(
        1, len(drawings), figsize=(width * len(drawings), height), layout="constrained", squeeze=False
    )
    for ax, (function, what, title) in zip(axes[0], drawings):
        function(what, ax, title)
    plt.show()


# %% [markdown]
# ## Partitions and layouts
#
# A **partition** is a grid of ranks. A **layout** lays a global shape over it. Blocks differ by one at most, the larger
# ones first; if there are more ranks than elements, the last blocks are empty. Below: a 2 × 3 grid, a 5 × 7 tensor over
# it, and the same tensor over four ranks with row blocks of chosen sizes.

# %%
P = dd.Partition((2, 3))
L = dd.Layout(P, (5, 7))
M = dd.Layout(dd.Partition((4, 1)), (5, 7), splits=((3, 0, 1, 1), None))
row(
    (viz.draw, P, "a partition"), (viz.draw, L, "a layout, balanced"), (viz.draw, M, "explicit splits; rank 1 is empty")
)

# %%
print(P)
print(viz.text(L))
print([L.local_shape(r) for r in P.ranks])
print([M.local_shape(r) for r in M.partition.ranks])

# %% [markdown]
# ## Who sends what to whom
#
# A repartition takes blocks of one layout to blocks of another. Where a held box meets a wanted box, there is a message
# (or, on the same rank, a copy). Numbers are elements.

# %%
rows, columns = dd.Layout(dd.Partition((4, 1)), (5, 6)), dd.Layout(dd.Partition((1, 3)), (5, 6))
A = dd.maps.repartition(rows, columns)
row(
    (viz.draw, rows, "held"),
    (viz.draw, columns, "wanted"),
    (viz.draw, A, "messages"),
    (viz.draw, A.T, "messages of the adjoint"),
)
print(viz.text(A))

# %% [markdown]
# Element by element: equal numbers are the same element, in the colour of the rank that it comes from. Hover over one to
# read where. In a terminal the same call prints the list above.

# %%
viz.show(A)

# %% [markdown]
# ## The matrix of a movement
#
# Put the blocks of all ranks end to end: that is one vector. A movement is then a matrix of zeros and ones, found by
# sending every basis vector. A repartition loses nothing and copies nothing: its matrix is a permutation. Red lines
# separate ranks.

# %%
row((viz.spy, A, "repartition"), (viz.spy, A.T, "its adjoint"))
a = viz.matrix(A)
assert torch.equal(viz.matrix(A.T), a.T)
assert torch.equal(a.T @ a, torch.eye(30, dtype=torch.float64))

# %% [markdown]
# `viz.matrix(A.T)` was not made by transposing: it is what the *adjoint movement* does to basis vectors. That the two
# agree is the fact that reverse mode rests on.
#
# ## Broadcast and sum-reduce
#
# A broadcast copies, so its matrix stacks identities. The transpose lays them side by side: it sums. That is the
# duality broadcastᵀ = sum_reduce. And `all_sum_reduce` = broadcast · sum_reduce is symmetric: it is its own adjoint.

# %%
one, three = dd.Partition((1,)), dd.Partition((3,))
B = dd.maps.broadcast(one, three, (4,))
S = dd.maps.sum_reduce(three, one, (4,))
AS = dd.maps.all_sum_reduce(three, (4,))
row((viz.spy, B, "broadcast"), (viz.spy, S, "sum_reduce"), (viz.spy, AS, "all_sum_reduce"))
assert torch.equal(viz.matrix(S), viz.matrix(B).T)
assert torch.equal(viz.matrix(AS), viz.matrix(B) @ viz.matrix(S))

# %%
x = torch.arange(4.0)
print("broadcast:", [y.tolist() for y in B.simulate([x])])
print("sum_reduce:", S.simulate([x, 10 * x, 100 * x])[0].tolist())

# %% [markdown]
# All-gather and reduce-scatter are the same story, with blocks. Here the blocks are uneven, 3 + 2 + 2.

# %%
G = dd.maps.all_gather(dd.Layout(three, (7,)))
row((viz.spy, G, "all_gather"), (viz.spy, G.T, "its adjoint, reduce_scatter"), (viz.draw, G, "messages"))
assert torch.equal(viz.matrix(dd.maps.reduce_scatter(dd.Layout(three, (7,)))), viz.matrix(G).T)

# %% [markdown]
# ## Halo exchange, with each boundary
#
# Every rank wants its block and some of its neighbours'. A boundary condition says which real element a ghost beyond
# the edge shows; it is one index function, and nothing else in the library knows of it. Brackets: a rank's own block.
# Dots: zeros.

# %%
Q = dd.Partition((3,))
halos = {
    b: dd.HaloSpec(Q, (7,), left=2, right=1, boundary=b) for b in ("none", "zeros", "circular", "reflect", "replicate")
}
for boundary, spec in halos.items():
    print(boundary, viz.text(spec), sep="\n")

# %%
row(*((viz.spy, spec.plan(), boundary) for boundary, spec in halos.items()), width=3)
row(*((viz.spy, spec.plan().T, f"{boundary}, adjoint") for boundary, spec in halos.items()), width=3, height=2.4)

# %% [markdown]
# Columns with several entries are elements that several ranks see. The adjoint *adds* what they send back: a ghost's
# cotangent goes to its owner. Replicated edges add twice, on the same rank. Counting the ones of each column says how
# often an element is used:

# %%
for boundary, spec in halos.items():
    print(f"{boundary:>10}: {viz.matrix(spec.plan()).sum(0).int().tolist()}")

# %% [markdown]
# In two dims corners come directly from the rank that has them, in the same single set of messages. A halo wider than a
# neighbour's block needs more messages, and no other code.

# %%
K = dd.Layout(dd.Partition((2, 2)), (6, 6))
near, far = dd.HaloSpec(K, 1, boundary="none"), dd.HaloSpec(dd.Partition((4,)), (8,), 3, boundary="none")
row((viz.draw, near, "dotted: windows of width 1"), (viz.draw, near.plan(), "messages, corners too"),
    (viz.draw, far.plan(), "width 3 over blocks of 2"))  # fmt: skip

# %% [markdown]
# ## The dot test
#
# ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ for random x and y is the cheapest test of an adjoint. Here by hand, for every movement above; on
# real ranks it is `dd.testing.dot_test(A)`.


# %%
def dot_test(plan):
    """The relative error of the dot test, all ranks simulated."""
    draw = torch.Generator().manual_seed(0)

    def random(side):
        return [torch.randn(side.local_shape(r), generator=draw, dtype=torch.float64) for r in side.partition.ranks]

    def inner(xs, ys):
        return sum((x * y).sum() for x, y in zip(xs, ys))

    x, y = random(plan.held), random(plan.wanted)
    left, right = inner(plan.simulate(x), y), inner(x, plan.T.simulate(y))
    return float(abs(left - right) / abs(left))


plans = {"repartition": A.plan, "broadcast": B.plan, "all_sum_reduce": AS.plan, "all_gather": G.plan}
plans |= {f"halo, {boundary}": spec.plan() for boundary, spec in halos.items()}
for name, plan in plans.items():
    error = dot_test(plan)
    print(f"{name:>16}: {'below 1e-14' if error < 1e-14 else error}")

# %% [markdown]
# ## Uneven and empty blocks
#
# Three elements over five ranks, and back to two. The empty ranks have no row and no column, so there is nothing to go
# wrong.

# %%
thin, two = dd.Layout(dd.Partition((5,)), (3,)), dd.Layout(dd.Partition((2,), ranks=(4, 1)), (3,))
E = Plan(Side.of(thin), Side.of(two))
row((viz.draw, E, "3 elements: five ranks to ranks 4 and 1"), (viz.spy, E, "its matrix"))
print([tuple(thin.local_shape(r)) for r in range(5)])
print([block.tolist() for block in E.simulate([thin.shard(torch.tensor([10.0, 11.0, 12.0]), r) for r in range(5)])])
print("dot test:", "below 1e-14" if dot_test(E) < 1e-14 else "failed")

# %% [markdown]
# ## What follows
#
# Since each movement is a matrix, reverse mode multiplies by its transpose, forward mode by the matrix itself, and
# second derivatives by one and then the other. `torch.func` composes these in any order. What a *copy* means, and so
# what the gradient of a replicated loss is, is the one thing left to choose: see *The cotangent convention* in the
# documentation.
