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
# # Benchmarking an operator of your own
#
# An operator of your own is two functions, and three questions: is its adjoint right, what does it send, and how fast is it? Here `flip`, which turns
# a tensor around along a dim that is split. (A movement of the library's own kind would be a *plan*; a pair of functions is enough.) It is compared with
# one copy of its result, which nothing can beat, with what is there already, and with mpi4py by hand. Last, the check against `torch.flip`.

# %%
import os

import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F
from distdl import viz
from distdl.programs.bench import timing

reduced = "DISTDL_REDUCED" in os.environ
sizes, rounds = ((64,), 5) if reduced else ((64, 256, 1024, 2048), 41)

# %% [markdown]
# ## The operator
#
# Rank r's rows go to rank p - 1 - r, and are turned around there: a `permute`, and local work. The adjoint turns around and sends back, which is the
# same map.


# %%
def flip_of(P, shape):
    """torch.flip of the global tensor along dim 0, which P splits evenly, as a map."""
    pairs = list(zip(P.ranks, reversed(P.ranks)))
    local = P.local_shape(shape)

    def flip(x):
        return F.permute(x, P, pairs).flip(-len(shape))

    return dd.linear_map(flip, flip, local, local, ranks=P.ranks, batched=True)


def by_gathering(L):
    """The same by what comes to mind first: everything to every rank."""
    return lambda x: F.all_gather(x, L, dims=0).flip(0)[L.slices()]


# %% [markdown]
# ## Is it right, and what does it send?
#
# The dot test ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ finds a wrong adjoint; `dd.testing.check_map` looks at linearity, vjp, jvp and batches too. `count_messages` lists what this rank
# sends.


# %%
def examined(n):
    """(error of the dot test, bytes of rank 0 by each way, largest difference to torch.flip)."""
    P = dd.Partition((dd.world().size, 1))
    L = dd.Layout(P, (n, n))
    A, gathered = flip_of(P, L.shape), by_gathering(L)
    X = torch.arange(float(n * n), dtype=torch.float64).reshape(n, n)
    dd.testing.check_map(A)
    sent = []
    for call in (A, gathered):
        with dd.testing.count_messages() as count:
            y = call(L.shard(X))
        sent.append(count.bytes)
        assert torch.equal(y, L.shard(X.flip(0)))
    wrong = dd.linear_map(A, lambda y: y, A.in_shape, A.out_shape, ranks=P.ranks)  # not its adjoint
    try:
        dd.testing.dot_test(wrong)
        return None
    except AssertionError as error:
        return dd.testing.dot_test(A), sent, str(error).splitlines()[0]


if __name__ == "__main__":
    error, sent, complaint = dd.launch(examined, 4)(64)[0]
    print(f"dot test {error:.1e}; bytes sent: by permute {sent[0]}, by gathering {sent[1]}")
    print("of a wrong adjoint:", complaint)

# %% [markdown]
# What it does, element by element, as a picture: the permute of rows, before each rank turns its own around.

# %%
viz.show(dd.maps.permute(dd.Partition((2,)), ((0, 1), (1, 0)), (3,)), titles=["the rows of two ranks"])

# %% [markdown]
# ## How fast?
#
# `timing.sample` takes turns: each round times every candidate once, between barriers, as the slowest rank saw it, and another one begins each
# round. So noise hits all alike, and ratios are taken round by round.


# %%
def timed(n, rounds):
    """{candidate: seconds of a call, for each round}."""
    from mpi4py import MPI

    P = dd.Partition((dd.world().size, 1))
    L = dd.Layout(P, (n, n))
    x = torch.ones(L.local_shape())
    A, gathered, peer = flip_of(P, L.shape), by_gathering(L), P.size - 1 - dd.world().rank

    def by_hand():
        y = torch.empty_like(x)
        MPI.COMM_WORLD.Sendrecv(x.numpy(), peer, recvbuf=y.numpy(), source=peer)
        return y.flip(0)

    candidates = {"one copy": x.clone, "by hand": by_hand, "flip": lambda: A(x), "by gathering": lambda: gathered(x)}
    assert all(torch.equal(call(), x.flip(0)) for call in candidates.values())
    return timing.sample(candidates, timing.Ranks(), rounds=rounds, inner=5)


if __name__ == "__main__":
    found = {n: dd.launch(timed, 2)(n, rounds)[0] for n in sizes}
    figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name in found[sizes[0]]:
        ax.loglog(sizes, [1e6 * float(torch.tensor(found[n][name]).median()) for n in sizes], "o-", label=name)
    ax.set(xlabel="n, of n x n in float32 on two ranks", ylabel="µs (median)", xticks=sizes, xticklabels=sizes)
    ax.minorticks_off()
    ax.legend()
    print("n: time of `flip` over that by hand, and over one copy: median [95 % interval]")
    for n in sizes:
        ratios = (timing.ratio(found[n]["flip"], found[n][other]) for other in ("by hand", "one copy"))
        print(f"{n:5d}: " + ", ".join(f"{m:6.2f} [{a:.2f} .. {b:.2f}]" for m, a, b in ratios))

# %% [markdown]
# (Two cores, a rank on each. `F.permute` with a bare partition asks the other ranks at each call what they hold: most of the time of small tensors.)
#
# Small tensors pay for Python: the call, and a pair of functions within it. Large ones pay for their bytes. An interval across 1 decides nothing, and
# on a machine that others use the least times say more than medians do. For operators that are there: `python -m distdl bench halo -n 2 --shape 4096,4096`.

# %% [markdown]
# ## The check
#
# Values, and gradients with other cotangents on each rank, against `torch.flip` in one process:


# %%
def checked():
    """How far values, gradients and Hessian-vector products are from the serial ones."""
    P = dd.Partition((dd.world().size, 1))
    L = dd.Layout(P, (8, 3))
    A, X = flip_of(P, L.shape), torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(24.0, dtype=torch.float64).reshape(8, 3)

    def loss(x):
        return F.dist_sum(L.shard(weights) * A(x).sin() ** 2, L)

    def serial(x):
        return (weights * x.flip(0).sin() ** 2).sum()

    pairs = [(A(L.shard(X)), X.flip(0)), (torch.func.grad(loss)(L.shard(X)), torch.func.grad(serial)(X))]
    pairs.append((dd.func.hvp(loss, L.shard(X), L.shard(weights)), dd.func.hvp(serial, X, weights)))
    return max(float((a - L.shard(b)).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    apart = max(dd.launch(checked, 4)())
    print(f"at most {apart:.1e} apart, on four ranks")
    assert apart < 1e-12
