"""A graph network on the nearest neighbours of digits, over ranks of uneven numbers of nodes, against plain torch."""

import functools
import sys
from pathlib import Path

import pytest
import torch

import distdl as dd
import distdl.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import graph_network as gn

N = dd.world().size
# Four ranks show two too; over all of them, once as 1 : 2 : 3 ..., once with a rank that has no nodes.
RANKS = {1: [(0,)], 3: [(2, 0, 1)], 4: [(0, 1, 2, 3), (3, 1)]}.get(N, [tuple(range(N))])
WAYS = ("rows", "ghosts", "matrix")


def once(make):
    """What rank 0 makes, on all ranks: the serial twin takes its time, and the cores are shared."""
    return dd.testing.gather_objects(make() if dd.world().rank == 0 else None)[0]


@functools.cache
def serial():
    return once(lambda: gn.train(20))


def close(found, wished, rtol=1e-10):
    return float((found - wished).abs().max()) <= rtol * float(wished.abs().max())


def places():
    """Layouts of the nodes, and the way that goes with each."""
    found = [gn.layout(dd.Partition((len(ranks),), ranks)) for ranks in RANKS]
    hole = {3: (800, 0, 997), 4: (800, 0, 597, 400)}.get(N)
    return [*found, dd.Layout(dd.Partition((N,)), (gn.NODES,), (hole,))] if hole else found


def everywhere(wrong):
    dd.testing.collective_assert(not wrong, "; ".join(map(str, wrong)))


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_one_process_does(way):
    """20 steps in float64: the loss of each, all parameters, and how many labels are found."""
    losses, p, score = serial()
    assert losses[-1] < 0.5 * losses[0] and score > 0.8, "it learns"
    wrong = []
    for L in places() if way == "ghosts" else places()[:1]:
        if not L.active:
            continue
        found, q, scored = gn.train(20, L, way)
        wrong += [(L, i, a, b) for i, (a, b) in enumerate(zip(found, losses, strict=True)) if abs(a - b) > 1e-10 * b]
        wrong += [(L, name) for name in p if not close(q[name], p[name])] + ([(L, scored)] if scored != score else [])
    everywhere(wrong)


def test_derivatives():
    """Hessians times vectors, two at a time, and forwards, of every way of adding up; with an empty block too."""
    p = gn.parameters()
    v = {name: torch.stack([t.cos(), t + 1]) for name, t in p.items()}

    def both(loss):
        return torch.func.vmap(lambda v: torch.func.jvp(torch.func.grad(loss), (p,), (v,)))(v)

    wished, wrong = once(lambda: both(gn.losses_of()[0])), []
    for L, way in [*zip(places(), WAYS), (places()[-1], "ghosts")]:
        if L.active:
            loss, _ = gn.losses_of(L, way)
            for found, serial in zip(both(loss), wished):
                wrong += [(L, way, name) for name in p if not close(found[name], serial[name])]
    everywhere(wrong)


def test_only_rows_of_others_travel():
    """Each once to each rank that wants it, there and back; what is gathered with own rows among them sends no more."""
    L = places()[0]
    if not L.active:
        return
    pixels, _ = gn.digits()
    near = gn.nearest(pixels, torch.arange(*L.box()[0]))
    graph, h = gn.Graph(L, near), torch.ones(len(near), 3, dtype=torch.float64)
    everyone = [gn.nearest(pixels, torch.arange(*L.box(r)[0])) for r in L.partition.ranks]
    here = L.box()[0]
    served = [
        int(((rows >= here[0]) & (rows < here[1])).sum())
        for r, rows in zip(L.partition.ranks, (torch.unique(near) for near in everyone))
        if r != dd.world().rank
    ]
    with dd.testing.count_messages() as sent:
        rows = F.gather_rows(h, graph.ghosts)
    with dd.testing.count_messages() as sent_too:
        F.gather_rows(h, graph.index)
    assert sent.bytes == sent_too.bytes == sum(served) * 3 * 8 and sent.sends == sum(map(bool, served))
    assert len(rows) == int(((torch.unique(near) < here[0]) | (torch.unique(near) >= here[1])).sum())
    with dd.testing.count_messages() as back:
        F.scatter_add_rows(rows, graph.ghosts)
    assert back.bytes == len(rows) * 3 * 8
