"""What the notebook on graphs and its tests share: a graph of digits, a network on it over ranks, and its serial twin."""

from itertools import pairwise

import torch

import distdl as dd
import distdl.functional as F
from distdl.programs import data

NODES, NEAR, SIZES = 1797, 8, (64, 16, 10)


def digits():
    """Pixels (1797, 64), whole numbers from 0 to 16, and labels, of scikit-learn's wheel; the package is not imported."""
    path = data.installed("sklearn", "datasets", "data", "digits.csv.gz")
    table = data.read(path, [range(NODES)], ((0, NODES), (0, 65)), sample=(65,), dtype=torch.float64)[0]
    return table[:, :64], table[:, 64].long()


def nearest(pixels, nodes):
    """(nodes, 8): whose pixels are nearest to those of ``nodes``. Distances of whole numbers are exact, and of equal ones
    the lower node is nearer: every rank finds the same neighbours, whichever nodes it asks for."""
    square, n = (pixels**2).sum(1), len(pixels)
    far = n * (square[nodes, None] + square - 2 * pixels[nodes] @ pixels.T) + torch.arange(n)
    far[torch.arange(len(nodes)), nodes] = torch.inf
    return far.topk(NEAR, largest=False).indices


def layout(P):
    """The nodes over ``P``, unevenly: each rank has more of them than the one before, as 1 : 2 : 3 ..."""
    ends = [NODES * r * (r + 1) // (P.size * (P.size + 1)) for r in range(P.size + 1)]
    return dd.Layout(P, (NODES,), (tuple(b - a for a, b in pairwise(ends)),))


class Graph:
    """Edges between nodes of layout ``L`` and their neighbours, in both directions: a node hears those it chose, and
    those that chose it. Collective; ``near``: (this rank's nodes, 8) numbers of nodes.

    ``way`` says how ``heard`` adds up: by ``rows``, as they are numbered; by ``ghosts``, where own rows stay; or by a
    ``matrix`` and its transpose, which is its derivative's.
    """

    def __init__(self, L, near, way="ghosts"):
        self.L, (self.n, self.k) = L, near.shape
        self.index = dd.Index(L, near.reshape(-1))
        self.ghosts, self.numbers = self.index.own_first
        self.rows, self.ones = torch.arange(self.n).repeat_interleave(self.k), torch.ones(near.numel()).double()
        self.heard = {"rows": self.by_rows, "ghosts": self.by_ghosts, "matrix": self.by_matrix}[way]
        self.degree = self.heard(torch.ones(self.n, 1).double())

    def mean(self, h):
        """Over all neighbours of each node."""
        return self.heard(h) / self.degree

    def by_rows(self, h):
        """Σ of the chosen ones' rows, and of those of who chose them."""
        chosen = F.gather_rows(h, self.index).unflatten(0, (self.n, self.k)).sum(1)
        return chosen + F.scatter_add_rows(h.index_select(0, self.rows), self.index)

    def by_ghosts(self, h):
        """The same: only the rows of others travel, and only sums for others."""
        local = torch.cat([h, F.gather_rows(h, self.ghosts)])
        chosen = local.index_select(0, self.numbers).unflatten(0, (self.n, self.k)).sum(1)
        told = torch.zeros_like(local).index_add(0, self.numbers, h.index_select(0, self.rows))
        own, others = told.split([self.n, len(told) - self.n])
        return chosen + own + F.scatter_add_rows(others, self.ghosts)

    def by_matrix(self, h):
        """A h + Aᵀ h, of a sparse matrix of ones."""

        def A(h):
            return F.dist_spmv(h, self.index, self.rows, self.ones, self.L)

        chosen, transposed = torch.func.vjp(A, h)
        return chosen + transposed(h)[0]


def serial_mean(near):
    """The same of all nodes in one place, as everyone writes it."""
    nodes = torch.arange(len(near)).repeat_interleave(near.shape[1])
    sources, targets = torch.cat([near.reshape(-1), nodes]), torch.cat([nodes, near.reshape(-1)])
    degree = torch.bincount(targets, minlength=len(near))[:, None]
    return lambda h: torch.zeros_like(h).index_add(0, targets, h.index_select(0, sources)) / degree


def parameters():
    """Of two layers: a matrix for the node itself, one for its neighbours' mean, and a bias; the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i, (a, b) in enumerate(pairwise(SIZES)):
        for name in ("own", "near"):
            found[f"{i}.{name}"] = torch.randn(a, b, generator=generator, dtype=torch.float64) / a**0.5
        found[f"{i}.bias"] = torch.zeros(b, dtype=torch.float64)
    return found


def network(p, x, mean):
    """Two layers of mean aggregation (GraphSAGE; Hamilton et al., arXiv:1706.02216, algorithm 1)."""
    h = (x @ p["0.own"] + mean(x) @ p["0.near"] + p["0.bias"]).tanh()
    return h @ p["1.own"] + mean(h) @ p["1.near"] + p["1.bias"]


def known(nodes):
    """Of which nodes the labels are known: one of nine."""
    return nodes % 9 == 0


def summed_loss(scores, labels, nodes):
    """Cross entropy, added up over the nodes whose labels are known."""
    told = known(nodes)
    return torch.nn.functional.cross_entropy(scores[told], labels[told], reduction="sum")


def right(scores, labels, nodes):
    """How many of the others' labels are found."""
    return ((scores.argmax(1) == labels) & ~known(nodes)).sum()


def losses_of(L=None, way="ghosts"):
    """(loss, score), functions of the parameters: of this rank's nodes of ``L``, or of all of them in one place."""
    pixels, labels = digits()
    nodes = torch.arange(NODES) if L is None else torch.arange(*L.box()[0])
    near, x, labels = nearest(pixels, nodes), pixels[nodes] / 16, labels[nodes]
    told = int(known(torch.arange(NODES)).sum())
    mean = serial_mean(near) if L is None else Graph(L, near, way).mean

    def scores(p):
        return network(p if L is None else F.mark_varying(p, L.partition), x, mean)

    def total(here):
        return here if L is None else F.invariant_sum(here, L.partition)

    def loss(p):
        return total(summed_loss(scores(p), labels, nodes)) / told

    def score(p):
        return int(total(right(scores(p), labels, nodes))) / (NODES - told)

    return loss, score


def train(steps, L=None, way="ghosts", rate=0.5):
    """(loss of each step, parameters, share of the unknown labels that are found)."""
    loss, score = losses_of(L, way)
    p, losses = parameters(), []
    for _ in range(steps):
        grads, value = torch.func.grad_and_value(loss)(p)
        p = {name: p[name] - rate * g for name, g in grads.items()}
        losses.append(float(value))
    return losses, p, score(p)


def on_ranks(steps, ways=("ghosts",)):
    """The same, over all ranks of this job, for each of these ways."""
    L = layout(dd.Partition((dd.world().size,)))
    return {way: train(steps, L, way) for way in ways}
