"""Where ranks run, as a pure function, and sums over a hierarchy of links."""

import pytest
import torch
from registry import needs
from serial import randn
from torch.func import grad, jvp

import distdl as dd
import distdl.functional as F
from distdl import parallel as dp
from distdl.testing import collective_assert, count_messages


def table(topologies):
    return [(t.node, t.local_rank, t.devices) for t in topologies]


def test_two_nodes_of_four_devices():
    """The textbook's layouts: one device for each process, then two."""
    one = dd.Topology.place(dp.block_mapping((4, 4)), 4, 1)
    assert table(one) == [(n, g, (g,)) for n in range(2) for g in range(4)]
    assert all(t.is_block_mapped and t.rank == t.node * t.local_size + t.local_rank for t in one)
    two = dd.Topology.place(dp.block_mapping((2, 2)), 4, 2)
    assert table(two) == [(0, 0, (0, 1)), (0, 1, (2, 3)), (1, 0, (0, 1)), (1, 1, (2, 3))]
    assert dd.Topology.place(dp.block_mapping((2, 2)), 4) == two, "an even share by default"


def test_cyclic_mapping():
    """Ranks dealt to nodes in turn: R = n G + g does not hold, and is_block_mapped says so."""
    dealt = dd.Topology.place(dp.cyclic_mapping((4, 4)), 4)
    assert [t.node for t in dealt] == [0, 1] * 4 and not any(t.is_block_mapped for t in dealt)
    assert [t.rank for t in dealt] == [t.local_rank * t.num_nodes + t.node for t in dealt]
    assert dealt[3].nodes == ((0, 2, 4, 6), (1, 3, 5, 7)) and dealt[3].devices == (1,)


def test_unequal_nodes():
    """Three processes beside one, on nodes with other numbers of devices; names may be anything."""
    found = dd.Topology.place(("left", "left", "right", "left"), {"left": 2, "right": 8})
    assert table(found) == [(0, 0, (0,)), (0, 1, (1,)), (1, 0, tuple(range(8))), (0, 2, (0,))]
    assert not found[0].is_block_mapped and found[0].nodes == ((0, 1, 3), (2,))
    assert dp.cyclic_mapping((1, 3)) == (0, 1, 1, 1) and dp.block_mapping((1, 0, 2)) == (0, 2, 2)
    assert dd.Topology.place(dp.block_mapping((3, 1)))[2].is_block_mapped and dd.Topology.place((0,))[0].devices == ()
    with pytest.raises(dd.errors.PartitionError, match=r"node b has too few devices.*2 for each of 3 processes, got 4"):
        dd.Topology.place(("a", "b", "b", "b"), 4, 2)


def test_discovered():
    t, n = dd.Topology.discover(), dd.world().size
    assert (t.rank, t.world_size) == (dd.world().rank, n) and sorted(r for ranks in t.nodes for r in ranks) == list(
        range(n)
    )
    assert (
        t.nodes[t.node][t.local_rank] == t.rank and t.local_size == len(t.nodes[t.node]) and t.num_nodes == len(t.nodes)
    )
    assert dd.Topology.discover() == t


def test_devices_that_the_launcher_shared_out(monkeypatch):
    """Two for each process by CUDA_VISIBLE_DEVICES: both are its own. Where all see the same ones, these are shared
    out."""
    r, n = dd.world().rank, dd.world().size
    node = dd.Topology.discover()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{2 * r},GPU-{r}")
    assert dd.Topology.discover().devices == (0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    shared = dd.Topology.place([0] * n, 2)[r].devices
    assert dd.Topology.discover().devices == shared or node.num_nodes > 1


# Nodes as they could be; the ranks of this job stand for them.
NODES = {
    1: [((0,),)],
    2: [((0, 1),), ((0,), (1,))],
    3: [((0, 1), (2,)), ((0,), (2, 1)), ((2, 0, 1),)],
    4: [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 1, 0), (2,)), ((0,), (1,), (2,), (3,))],
}


def test_hierarchical_all_reduce():
    """Equal to the flat one, for a pytree of two dtypes with sizes that do not divide; itself its adjoint; and with
    tangents."""
    n, r = dd.world().size, dd.world().rank
    if n > 4:
        return
    P = dd.Partition((n,))
    tree = {"a": randn(5, 3, seed=r), "b": [randn(1, seed=r + 9), randn(2, 2, seed=r + 5, dtype=torch.float32)]}
    for nodes in NODES[n]:
        got, expected = dp.hierarchical_all_reduce(tree, nodes), F.all_sum_reduce(tree, P)
        close = {torch.float64: 1e-12, torch.float32: 1e-5}
        same = [
            torch.allclose(a, b, rtol=close[b.dtype], atol=close[b.dtype])
            for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected))
        ]
        collective_assert(all(same), (nodes, same))
        loss = lambda f, x, w: (f(x).sin() * w).sum()
        w = randn(5, 3, seed=r + 20)
        ours, flat = (lambda x, nodes=nodes: dp.hierarchical_all_reduce(x, nodes)), (lambda x: F.all_sum_reduce(x, P))
        g, e = (grad(lambda x, f=f: loss(f, x, w))(tree["a"]) for f in (ours, flat))
        collective_assert(torch.allclose(g, e, rtol=1e-10, atol=1e-12), (nodes, "gradient"))
        t, s = (jvp(grad(lambda x, f=f: loss(f, x, w)), (tree["a"],), (w,))[1] for f in (ours, flat))
        collective_assert(torch.allclose(t, s, rtol=1e-10, atol=1e-12), (nodes, "second derivative"))


def test_hierarchical_sums_of_halves():
    """256 + 1 + 1 + 1 rounds to 260 in bfloat16, and to 256 step by step: rounded once, as by the flat sum."""
    n, r = dd.world().size, dd.world().rank
    x = torch.tensor([256.0 if r == 0 else 1.0] * 3, dtype=torch.bfloat16)
    for nodes in NODES.get(n, ()):
        found, flat = dp.hierarchical_all_reduce(x, nodes), F.all_sum_reduce(x, dd.Partition((n,)))
        collective_assert(found.dtype == flat.dtype and torch.equal(found, flat), (nodes, found, flat))


@needs(4)
def test_what_crosses():
    """Two nodes of two: half of the data crosses between nodes; in the node each half goes there and back."""
    if dd.world().rank >= 4:
        return
    x, r = torch.ones(10, dtype=torch.float64), dd.world().rank
    with count_messages() as sent:
        dp.hierarchical_all_reduce(x, ((0, 1), (2, 3)))
    sent = [message for message in sent if message[0] != "agree"]  # NCCL's communicators may be made here
    node, crosses = (r - r % 2, r - r % 2 + 1), ("all_reduce", (r % 2, r % 2 + 2), 40)
    if "all_gather" in dd.world().transport(x, node).collectives:  # engines that have it as one call
        assert sorted(sent) == [("all_gather", node, 40), crosses, ("reduce_scatter", node, 40)]
    else:
        assert sorted(sent) == [crosses, ("send", r ^ 1, 40), ("send", r ^ 1, 40)]


def test_a_rank_without_a_node_is_an_error():
    with pytest.raises(dd.errors.PartitionError, match="exactly one node"):
        dp.hierarchical_all_reduce(torch.ones(1), ((dd.world().size,),))
