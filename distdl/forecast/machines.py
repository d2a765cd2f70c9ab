"""Machines that programs are priced on: ``dd.machines``.

The model is a sum: movements by their copies, which cost by their number and by their bytes; messages by latency and
bandwidth, of which ranks of one node share what goes into the network;
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

Rate = float | tuple[tuple[float, float], ...]  # per second; or, by the size in bytes, some (bytes, bytes per second)


def _rate(rate: Rate, nbytes: float) -> float:
    """The rate at a size: between two sizes by their logarithms, beyond them the nearest one's."""
    if not isinstance(rate, tuple):
        return rate
    below, above = (max((r for r in rate if r[0] <= nbytes), default=rate[0]),
                    min((r for r in rate if r[0] >= nbytes), default=rate[-1]))  # fmt: skip
    if below[0] >= above[0]:
        return above[1]
    part = math.log(nbytes / below[0]) / math.log(above[0] / below[0])
    return below[1] * (above[1] / below[1]) ** part


_TIMES = ("latency", "near_latency", "sum_latency", "call", "graph", "operator", "box")
_OPTIONAL = ("half_flops", "conv_flops", "copying", "sum_latency", "sum_bandwidth")
_BY_SIZE = ("bandwidth", "near_bandwidth", "memory", "copying", "sum_bandwidth")


@dataclass(frozen=True)
class Machine:
    """What a machine can do, as one rank sees it; the default is :data:`cluster`.

    Rates of bytes may depend on their number: ``((2**12, 1e9), (2**20, 8e9))`` is 1 GB/s at 4 KiB, and 8 at 1 MiB.

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
        copying: the same of what a movement packs, unpacks and keeps; ``None``: as ``memory``.
        sum_latency, sum_bandwidth: of an all-reduce, seconds for each of its rounds, and bytes per second of what a
            rank sends in it; ``None``: as messages, and ``memory``.
        call, graph, operator: seconds that Python takes for a movement, for one that a graph records or that is in a
            backward besides, and for an operator of torch.
        box: seconds that the host takes for each box that a movement packs, unpacks or keeps, besides its bytes.
    """

    name: str = "cluster"
    latency: float = 2e-6
    bandwidth: Rate = 12e9
    near_latency: float = 0.6e-6
    near_bandwidth: Rate = 8e9
    node: int = 64
    injection: float = 24e9
    flops: float = 60e9
    half_flops: float | None = None
    conv_flops: float | None = None
    memory: Rate = 4e9
    copying: Rate | None = None
    sum_latency: float | None = None
    sum_bandwidth: Rate | None = None
    call: float = 12e-6
    graph: float = 8e-6
    operator: float = 3e-6
    box: float = 1e-6

    def __post_init__(self) -> None:
        wrong = {f.name: getattr(self, f.name) for f in fields(self)[1:] if not self._fits(f.name)}
        if wrong:
            raise PartitionError(
                "no such machine",
                op="Machine",
                expected="numbers: times of at least 0, and rates above 0",
                actual=wrong,
                next_step="dataclasses.replace(dd.machines.cluster, latency=1e-6) changes one",
            )

    def _fits(self, name: str) -> bool:
        value = getattr(self, name)
        if isinstance(value, tuple):
            sizes = [r[0] for r in value if isinstance(r, tuple) and len(r) == 2 and min(r) > 0]
            return name in _BY_SIZE and bool(value) and len(sizes) == len(value) and sizes == sorted(set(sizes))
        if value is None:
            return name in _OPTIONAL
        return isinstance(value, (int, float)) and (value > 0 or (value == 0 and name in _TIMES))

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
        return self.operator + max(w.flops / rate, w.bytes / _rate(self.memory, w.bytes))

    def _movement(self, m: Movement, rank: int) -> float:
        copying = self.memory if self.copying is None else self.copying
        copied = 2 * m.copied  # read and written
        took = self.call + m.boxes * self.box + copied / _rate(copying, copied or 1)
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
            sides = [side for end in ("sent", "received") if (side := ends.get((near, end)))]
            if not sides:
                continue
            latency, bandwidth = self._link(near, max(n for side in sides for n in side))
            took += max(map(len, sides)) * latency + max(map(sum, sides)) / bandwidth
        return took

    def _near(self, rank: int, peer: int) -> bool:
        return rank // self.node == peer // self.node

    def _link(self, near: bool, nbytes: int) -> tuple[float, float]:
        """(latency, bandwidth) of messages of so many bytes, where all ranks of a node send at once."""
        if near:
            return self.near_latency, _rate(self.near_bandwidth, nbytes)
        return self.latency, min(_rate(self.bandwidth, nbytes), self.injection / self.node)

    def _collective(self, kind: str, ranks: tuple[int, ...], n: int) -> float:
        """``n``: one rank's share. Sums in halves, and back (Rabenseifner, 2004); small ones by doubling."""
        p = len(ranks)
        rounds = math.ceil(math.log2(p)) if p > 1 else 0
        latency, bandwidth = self._link(self._near(ranks[0], ranks[-1]), n)
        if kind == "agree":
            return rounds * latency + self.call
        if kind == "all_reduce":
            latency = latency if self.sum_latency is None else self.sum_latency
            adding = 3 * n / _rate(self.memory, n)
            if self.sum_bandwidth is not None:
                bandwidth, adding = _rate(self.sum_bandwidth, n), 0.0
            halves = 2 * rounds * latency + (p - 1) / p * (2 * n / bandwidth + adding)
            return min(halves, rounds * (latency + n / bandwidth + adding))
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
    given: dict[str, Any] = {k: tuple(map(tuple, v)) if isinstance(v, list) else v for k, v in found.items()}
    return Machine(**given)


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
    box=0.0,  # one kernel packs all of them
)
"""Nodes of 8 devices, a rank on each: NVLink inside, a 400 Gbit/s adapter for each device outside."""
