"""What the three models of neon share: partitions by name, vector-parallel layers, plain SGD."""

import math

import torch
from torch.func import grad_and_value

import distdl as dd
import distdl.functional as F


def partition(kind, n):
    """A (batch, channel, rows, columns) grid of n ranks: "datapar", "modelpar", "halopar", "halodatapar", or the grid
    itself."""
    if not isinstance(kind, str):
        return dd.Partition(kind)
    d = 2 if kind == "halodatapar" else 1
    columns = max(c for c in range(1, math.isqrt(n // d) + 1) if n // d % c == 0)
    grids = {"datapar": (n, 1, 1, 1), "modelpar": (1, n, 1, 1), "halopar": (1, 1, n // columns, columns),
             "halodatapar": (d, 1, n // d // columns, columns)}  # fmt: skip
    return dd.Partition(grids[kind])


def vector(P):
    """The same ranks as (batch, out, in): all ranks that share a micro-batch split its feature vector."""
    return dd.Partition((P.shape[0], 1, P.size // P.shape[0]), P.ranks)


def owned(L):
    """Weight columns of the features that this rank owns, where x of layout L is flattened in place: no data moves."""
    index = torch.arange(math.prod(L.shape[1:])).reshape(L.shape[1:])[L.slices()[1:]].flatten()
    return lambda w: w[:, index]


def columns(P):
    """Weight columns of a hidden vector, which is split evenly over the ranks of a micro-batch."""
    V = vector(P)

    def part(w):
        start, stop = dd.Layout(dd.Partition((V.shape[2],)), (w.shape[1],)).blocks(0)[V.index()[2]]
        return w[:, start:stop]

    return part


def filters(P):
    """This rank's share of the first dim, filters, which follows the partition's channel dim."""

    def part(w):
        start, stop = dd.Layout(dd.Partition((P.shape[1],)), w.shape[:1]).blocks(0)[P.index()[1]]
        return w[start:stop]

    return part


def vecpar(p, x, L, names, activation=torch.relu):
    """Linear layers from x of layout L on: each rank multiplies the features that it has by their columns, and the sums
    are reduce-scattered. Returns the last layer's features, and their layout."""
    V, x = vector(L.partition), x.flatten(1)
    for name in names:
        x = F.dist_linear(
            x,
            p[name + ".w"],
            V,
            p[name + ".b"],
            x_layout="replicated",
            y_layout="sharded",
            y_dim=-1,
            params="invariant",
        )
        x = x if name == names[-1] else activation(x)
    return x, dd.Layout(dd.Partition((V.shape[0], V.shape[2]), V.ranks), (L.shape[0], p[names[-1] + ".b"].shape[0]))


def drawn(shapes, dtype, seed=1):
    """The sequential program's parameters, the same on every rank: uniform in ±1/√(fan in), zero biases."""
    generator = torch.Generator().manual_seed(seed)
    scale = {name: math.prod(shape[1:]) ** -0.5 for name, shape in shapes.items()}
    return {name: torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=generator) * scale[name] if len(shape) > 1
            else torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}  # fmt: skip


def cut(p, places):
    """This rank's blocks of the parameters that ``places`` names; the others stay whole."""
    return {name: places[name](w).clone() if name in places else w for name, w in p.items()}


def sgd(loss, p, batches, rate, after=lambda p: p, only=None):
    """Gradient descent: ``loss(p, batch)`` for each batch, an update of the parameters (named in ``only``), then
    ``after``."""
    losses, names = [], list(p) if only is None else only
    for batch in batches:
        grads, value = grad_and_value(lambda some: loss({**p, **some}, batch))({name: p[name] for name in names})  # noqa: B023
        p = after({**p, **{name: p[name] - rate * g for name, g in grads.items()}})
        losses.append(float(value))
    return p, losses


def accuracy(logits, labels, L):
    """Share of right answers among labels (this rank's micro-batch), for logits of layout L: equal on all ranks."""
    right = (F.dist_argmax(logits, L, 1) == labels).double().sum()
    return float(F.invariant_sum(right, L.partition, 0)) / L.shape[0]


def cross_entropy(model, sequential, x, y, L):
    """``loss(p, k)`` of a classifier on batch k of x and y, of layout L; of the sequential program where L is
    ``None``."""

    def loss(p, k):
        if L is None:
            return torch.nn.functional.cross_entropy(sequential(p, x[k]), y[k])
        logits, out = model(p, x[k], L)
        return F.dist_cross_entropy(logits, y[k], out)

    return loss


def tested(model, sequential, p, x, y, L):
    """Its accuracy on one batch x, y."""
    if L is None:
        return float((sequential(p, x).argmax(1) == y).double().mean())
    logits, out = model(p, x, L)
    return accuracy(logits, y, out)
