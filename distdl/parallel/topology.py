"""Ranks, nodes and devices: where processes go, and sums that cross the slow links once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import _torch
from .. import functional as F
from .._types import Dims, Place, Tree
from ..errors import PartitionError
from ..flat import parts_of, vector_of
from ..functional.numeric import wide
from ..partition import Partition, partition_of
from ..world import world as world_of

__all__ = ["along", "block_mapping", "cyclic_mapping", "hierarchical_all_reduce"]


def along(P: Place, dims: Dims = None) -> Partition:
    """This rank's fibre of ``P`` along partition dims ``dims`` (None: all), as a partition of one dim.

    Raises:
        PartitionError: this rank is not part of ``P``.

    No messages.

    Example:
        >>> dd.parallel.along(dd.Partition((1, 1)), 1)
        Partition((1,))
    """
    where = partition_of(P)
    fibre = where.along(dims)
    if fibre is None:
        raise PartitionError(
            "this rank is not part of the grid",
            expected=f"one of {where.ranks}",
            actual="another rank",
            next_step="call it on the grid's ranks only",
        )
    return Partition((fibre.size,), fibre.ranks, fibre.world)


def block_mapping(processes: Iterable[int]) -> tuple[int, ...]:
    """The node of each rank when nodes are filled one after the other: ``processes[n]`` ranks on node n.

    With G ranks on every node this is R = n·G + g.

    Pure: no messages.

    Raises:
        ShapeError: numbers of processes that are no integers, at least 0.

    Example:
        >>> dd.parallel.block_mapping((2, 1))  # the node of each of three ranks
        (0, 0, 1)
    """
    return tuple(n for n, count in enumerate(processes) for _ in range(count))


def cyclic_mapping(processes: Sequence[int]) -> tuple[int, ...]:
    """The node of each rank when ranks are dealt to the nodes in turn, as ``--map-by node`` does; full nodes are left
    out.

    Pure: no messages.

    Raises:
        ShapeError: numbers of processes that are no integers, at least 0.

    Example:
        >>> dd.parallel.cyclic_mapping((2, 1))
        (0, 1, 0)
    """
    return tuple(n for turn in range(max(processes, default=0)) for n, count in enumerate(processes) if turn < count)


def hierarchical_all_reduce(x: Tree, nodes: Iterable[Iterable[int]], *, world: str = "default") -> Tree:
    """The sum of ``x`` over all ranks, on every rank: equal to :func:`distdl.functional.all_sum_reduce`, and its own
    adjoint.

    Nodes of equal size G: a reduce-scatter in the node, an all-reduce of 1/G of the data across nodes, an all-gather in
    the node. Otherwise: a sum on each node's first rank, an all-reduce among these, a broadcast in the node.

    Args:
        x: a tensor or a pytree, of equal shapes on all ranks.
        nodes: the ranks of each node, as ``Topology.discover().nodes``; every node in the same order on all ranks.

    Messages, for n bytes and N equal nodes: n·(G-1)/G sent in the node, an all-reduce of n/G across, n·(G-1)/G in the
    node again. Backward the same. float16 and bfloat16 travel in float32 and are rounded once, as by the flat sum
    (not so in a world with ``half_sums="native"``).

    Raises:
        PartitionError, ShapeError: ranks or dims that are not there, or leaves that are no tensors.

    Example:
        >>> dd.parallel.hierarchical_all_reduce(torch.ones(2), [[0]])
        tensor([1., 1.])
    """
    groups = [tuple(ranks) for ranks in nodes]
    own = [ranks for ranks in groups if Partition((len(ranks),), ranks, world).active]
    if len(own) != 1:
        raise PartitionError(
            "this rank must be on exactly one node",
            expected="one node",
            actual=own,
            next_step="pass every rank of the sum once: Topology.discover().nodes",
        )
    node = Partition((len(own[0]),), own[0], world)
    (place,) = node.index()
    leaves, tree = _torch.flatten(x)
    summed = list(leaves)
    once = world_of(world).wide and sum(map(len, groups)) > 2  # round halves once, as the flat sum does
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        numbers = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = vector_of([wide(leaves[i]) if once else leaves[i] for i in numbers])
        if len({len(ranks) for ranks in groups}) == 1:
            across = Partition((len(groups),), tuple(ranks[place] for ranks in groups), world)
            part = F.all_sum_reduce(F.reduce_scatter(flat, node), across)
            flat = F.all_gather(part, node, shape=flat.shape)
        else:
            first = node.take(0, 0, keepdim=True)
            leaders = Partition((len(groups),), tuple(ranks[0] for ranks in groups), world)
            part = F.sum_reduce(flat, node, first, shape=flat.shape)
            if place == 0:
                part = F.all_sum_reduce(part, leaders)
            flat = F.broadcast(part, first, node, shape=flat.shape)
        for i, y in zip(numbers, parts_of(flat, [leaves[i].shape for i in numbers])):
            summed[i] = y.to(dtype)
    return _torch.unflatten(summed, tree)
