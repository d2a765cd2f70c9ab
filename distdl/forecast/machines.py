"""Machines that programs are priced on: ``dd.machines``.

The model is a sum: messages by latency and bandwidth, of which ranks of one node share what goes into the network;
collectives by their rounds; local operators by the larger of their arithmetic and their memory traffic. Nothing
overlaps in it, and no rank waits for another one that is late.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import PartitionError

if TYPE_CHECKING:
    from .program import Movement, Work  # which stand above this file

__all__ = ["Machine", "cluster", "ethernet", "gpus", "load", "workstation"]

_MATMULS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Machine:
    """What a machine can do, as one rank sees it; the default is :data:`cluster`.

    Attributes:
        name: for tables.
        latency, bandwidth: seconds for a message to another node, bytes per second of one.
        near_latency, near_bandwidth: of messages inside of a node.
        node: ranks on a node; rank r is on node ``r // node``.
        injection: bytes per second that a node sends into the network, for all of its ranks together.
        flops: floating point operations per second of one rank's matrix products in float32; float64 takes twice as
            long.
        half_flops: the same of float16 and bfloat16; ``None``: as float32.
        conv_flops: the same of convolutions in float32; ``None``: as matrix products.
        memory: bytes per second that one rank's operators read and write.
        sum_latency: seconds for each round of an all-reduce; ``None``: as messages.
        call, graph, operator: seconds that Python takes for a movement, for one that a graph records or that is in a
            backward besides, and for an operator of torch.
    """

    name: str = "cluster"
    latency: float = 2e-6
    bandwidth: float = 12e9
    near_latency: float = 0.6e-6
    near_bandwidth: float = 8e9
    node: int = 64
    injection: float = 24e9
    flops: float = 60e9
    half_flops: float | None = None
    conv_flops: float | None = None
    memory: float = 4e9
    sum_latency: float | None = None
    call: float = 12e-6
    graph: float = 8e-6
    operator: float = 3e-6

    def __post_init__(self) -> None:
        rates = ("bandwidth", "near_bandwidth", "node", "injection", "flops", "half_flops", "conv_flops", "memory")
        wrong = {
            name: value
            for name, value in asdict(self).items()
            if name != "name"
            and not (value is None and name in ("half_flops", "conv_flops", "sum_latency"))
            and not (isinstance(value, (int, float)) and (value > 0 or (value == 0 and name not in rates)))
        }
        if wrong:
            raise PartitionError(
                "no such machine",
                op="Machine",
                expected="numbers: times of at least 0, and rates above 0",
                actual=wrong,
                next_step="dataclasses.replace(dd.machines.cluster, latency=1e-6) changes one",
            )

    def seconds(self, event: Movement | Work, rank: int) -> float:
        """What one movement, or one local operator, takes on a rank."""
        return self._work(event) if hasattr(event, "flops") else self._movement(event, rank)  # type: ignore[arg-type]

    def _work(self, w: Work) -> float:
        rate = self.flops
        if w.itemsize == 2 and self.half_flops:
            rate = self.half_flops
        elif w.op.startswith("convolution") and self.conv_flops:
            rate = self.conv_flops
        if w.itemsize >= 8:
            rate /= 2
        return self.operator + max(w.flops / rate, w.bytes / self.memory)

    def _movement(self, m: Movement, rank: int) -> float:
        took = self.call + 2 * m.copied / self.memory  # a copy reads and writes
        if m.recorded or m.phase != "forward":
            took += self.graph
        ends: dict[tuple[bool, str], list[int]] = {}
        for peer, n in m.received:
            ends.setdefault((self._near(rank, peer), "received"), []).append(n)
        for kind, ranks, n in m.sent:
            if kind == "send":
                ends.setdefault((self._near(rank, ranks), "sent"), []).append(n)
            else:
                took += self._collective(kind, ranks, n)
        for near in (True, False):
            sides = [ends.get((near, side), []) for side in ("sent", "received")]
            latency, bandwidth = self._link(near)
            took += max(map(len, sides)) * latency + max(map(sum, sides)) / bandwidth
        return took

    def _near(self, rank: int, peer: int) -> bool:
        return rank // self.node == peer // self.node

    def _link(self, near: bool) -> tuple[float, float]:
        """(latency, bandwidth) where all ranks of a node send at once."""
        if near:
            return self.near_latency, self.near_bandwidth
        return self.latency, min(self.bandwidth, self.injection / self.node)

    def _collective(self, kind: str, ranks: tuple[int, ...], n: int) -> float:
        """``n``: one rank's share. Sums in halves, and back (Rabenseifner, 2004); small ones by doubling."""
        p = len(ranks)
        rounds = math.ceil(math.log2(p)) if p > 1 else 0
        latency, bandwidth = self._link(self._near(ranks[0], ranks[-1]))
        if kind == "agree":
            return rounds * latency + self.call
        if kind == "all_reduce":
            latency = latency if self.sum_latency is None else self.sum_latency
            halves = 2 * rounds * latency + (p - 1) / p * n * (2 / bandwidth + 3 / self.memory)
            return min(halves, rounds * (latency + n / bandwidth + 3 * n / self.memory))
        return rounds * latency + (p - 1) * n / bandwidth

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it down as JSON, for :func:`load`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)


def load(path: str | os.PathLike[str]) -> Machine:
    """The machine that ``python -m distdl measure --out PATH``, or :meth:`Machine.save`, has written.

    Raises:
        PartitionError: there is something else in the file.
    """
    with open(path, encoding="utf-8") as file:
        found: Any = json.load(file)
    names = {f.name for f in fields(Machine)}
    if not isinstance(found, dict) or not names.issuperset(found):
        raise PartitionError(
            "no machine in this file",
            op="load",
            expected=f"an object with some of {', '.join(sorted(names))}",
            actual=sorted(set(found) - names) if isinstance(found, dict) else type(found).__name__,
            next_step="write it with python -m distdl measure --out PATH",
        )
    return Machine(**found)


cluster = Machine()
"""Nodes of 64 cores, a rank on each, and a network of 200 Gbit/s."""

ethernet = replace(cluster, name="ethernet", latency=25e-6, bandwidth=1.2e9, injection=1.25e9, node=16)
"""Nodes of 16 cores, a rank on each, and Ethernet of 10 Gbit/s."""

workstation = replace(cluster, name="workstation", node=2**20, memory=6e9)
"""One machine: all messages go through its memory."""

gpus = Machine(
    "gpus",
    latency=8e-6,
    bandwidth=45e9,
    near_latency=6e-6,
    near_bandwidth=350e9,
    node=8,
    injection=360e9,
    flops=50e12,
    half_flops=600e12,
    memory=2.5e12,
    call=45e-6,
    operator=6e-6,
)
"""Nodes of 8 devices, a rank on each: NVLink inside, a 400 Gbit/s adapter for each device outside."""
