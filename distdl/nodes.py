"""Nodes and devices: where each process of a world stands."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .errors import PartitionError
from .world import world

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """Where this process stands: node and device of every rank follow from it.

    Attributes:
        rank, world_size: in the world.
        node, num_nodes: number of this process's node, in order of each node's smallest rank.
        local_rank, local_size: among the processes of this node. Nodes may have different numbers of processes.
        devices: CUDA devices of this process.
        nodes: the ranks of each node, in rising order.

    Pure but for its discovery: no messages.

    Raises:
        PartitionError: of :meth:`place`, too few devices.

    Example:
        >>> dd.Topology.place(("a", "a", "b", "b"))[3].local_rank
        1
    """

    rank: int
    world_size: int
    node: int
    num_nodes: int
    local_rank: int
    local_size: int
    devices: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @property
    def is_block_mapped(self) -> bool:
        """Whether nodes hold consecutive ranks. Only then, on nodes of G processes each, rank = node * G +
        local_rank."""
        return [r for ranks in self.nodes for r in ranks] == list(range(self.world_size))

    @classmethod
    def place(
        cls, nodes: Sequence[Hashable], devices: int | Mapping[Any, int] = 0, per_process: int | None = None
    ) -> tuple[Topology, ...]:
        """The topology of every rank, from where each runs: a pure function.

        Args:
            nodes: the node of each rank, by any name: ``("a", "a", "b", "b")``; see ``dd.parallel.block_mapping``.
            devices: CUDA devices on each node: a number, or {name: number}.
            per_process: how many each process drives, in order of local ranks. Default: an even share; where there are
                fewer devices than processes, processes share them in turn.

        Raises:
            PartitionError: a node has fewer devices than ``per_process`` for each of its processes.
        """
        ranks_of: dict[Hashable, list[int]] = {}
        for rank, name in enumerate(nodes):
            ranks_of.setdefault(name, []).append(rank)
        table = tuple(tuple(ranks) for ranks in ranks_of.values())
        numbers = {name: n for n, name in enumerate(ranks_of)}
        found = []
        for rank, name in enumerate(nodes):
            peers = ranks_of[name]
            local, count = peers.index(rank), devices if isinstance(devices, int) else devices.get(name, 0)
            share = count // len(peers) if per_process is None else per_process
            if share * len(peers) > count:
                raise PartitionError(
                    f"node {name} has too few devices",
                    actual=count,
                    rank=rank,
                    expected=f"{share} for each of {len(peers)} processes",
                    next_step="start fewer processes on a node, or give each fewer devices",
                )
            mine = tuple(range(local * share, (local + 1) * share))
            if not mine and count and per_process is None:
                mine = (local % count,)
            found.append(cls(rank, len(nodes), numbers[name], len(table), local, len(peers), mine, table))
        return tuple(found)

    @classmethod
    def discover(cls, name: str = "default") -> Topology:
        """Ask the running world; collective. Ranks are on one node where MPI says that they can share memory.

        A node's devices are shared out evenly, see :meth:`place`; a process whose ``CUDA_VISIBLE_DEVICES`` names none
        of its neighbours' has all that it names.
        """
        w = world(name)
        mine = w.host.node()
        visible = set(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""}
        told = w.all_gather((mine, visible), range(w.size), "Topology.discover")
        count = torch.cuda.device_count()
        here = cls.place([node for node, _ in told.values()], {mine: count})[w.rank]
        others = [theirs for r, (_, theirs) in told.items() if r in here.nodes[here.node] and r != w.rank]
        alone = visible and all(theirs and visible.isdisjoint(theirs) for theirs in others)
        return replace(here, devices=tuple(range(count))) if alone else here
