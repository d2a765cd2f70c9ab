"""Movements between CUDA devices of one node by their own memory: one kernel for each movement and rank, no message.

Each rank has a mailbox in its memory for every peer of its node (:mod:`region`). A movement's kernel (``boxes.cu``)
reads the boxes of the input, writes them into the peers' mailboxes, takes what peers have put into its own, and writes
that where it belongs; what it reads (:mod:`tables`) is worked out once. So a result is fresh memory of torch's own, and
a message travels in chunks: the peer unpacks one while the next is packed. Sums follow in the plan's order, as
everywhere. Ranks of other nodes are reached by NCCL, before the kernel, on the same stream.

What must be the same on both ends (lanes, chunks, who is reached) follows from lengths, the plan and the group alone.
"""

from __future__ import annotations

import math
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch

from ...errors import TransportError
from ..fast.fused import LARGE
from ..nccl import NcclTransport
from .region import CAPACITY, LANES, SMALL_SUM, Mailboxes
from .tables import WORD, Table, box_of, ends_of, table_of, waiting

_SPARE = 32  # multiprocessors that NCCL's kernels may need beside a kernel that waits for peers
NARROW_MESSAGE = 2**12  # bytes of a message from which short rows go by NCCL
NARROW = LARGE  # bytes of a box that stays, from which others copy words of fewer than 16 bytes faster
_MINUTES = 30  # that a kernel waits for a peer, at most
_NO_LINK = "no NVLink to some devices of this node"  # nothing that went wrong


def asked_for() -> bool | None:
    """Whether ranks of one node move by peer memory: what ``DISTDL_PEER`` says (1, 0); ``None``: where NVLink joins
    their devices."""
    text = os.environ.get("DISTDL_PEER", "")
    if text in ("", "0", "1"):
        return bool(int(text)) if text else None
    raise TransportError(
        "DISTDL_PEER says something else",
        op="peer memory",
        expected="1 (wherever devices reach each other's memory), 0 (nowhere), or nothing (where NVLink joins them)",
        actual=text,
        next_step="set one of these on all ranks",
    )


def limit() -> int:
    """Nanoseconds that a kernel waits for a peer: as long as the watchdog."""
    return int(1e9 * (float(os.environ.get("DISTDL_WATCHDOG_S") or 0) or 60 * _MINUTES))


def lanes_of(multiprocessors: int, ranks: int) -> int:
    """Lanes of a message among so many ranks of a node, the same on all of them: all blocks that wait must run at once,
    on a multiprocessor each, beside NCCL's, and two teams of a block serve a lane's end each."""
    ends = 2 * max(multiprocessors - _SPARE, 16)
    return max(1, min(LANES, ends // (2 * max(ranks - 1, 1))))


class PeerMemory:
    """The mailboxes of a world on one device, and who is reached by them.

    Args:
        world: its small all-gathers.
        device: as of :class:`distdl.engine.nccl.NcclEngines`.
        kernels: :mod:`distdl.engine.peer.kernel`, or what plays it.
        forced: whether somebody asked for it, and hears where it cannot be.
    """

    def __init__(self, world, device, kernels, forced: bool = True):
        self.world, self.device, self.kernels, self.forced = world, device, kernels, forced
        self.boxes = Mailboxes(kernels.Memory())

    def node(self):
        """What tells this node from others; an engine's own is collective over all ranks, which need not be here."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        return platform.node(), boot.read_text() if boot.exists() else ""

    def reach(self, ranks: tuple[int, ...]) -> PeerReach | None:
        """Whom this rank reaches among ``ranks``; collective over them. Where one of a node cannot open the others'
        memory, none there does."""
        me = self.world.rank
        with self.device.here():
            about, why = self._try(lambda: (self.kernels.multiprocessors(), self.kernels.place()))
            told = self.world.all_gather((self.node(), *(about or (_SPARE, ""))), ranks, "peer memory")
            near = [r for r, (node, *_) in told.items() if node == told[me][0]]
            new = [r for r in near if r != me and r not in self.boxes.theirs]
            nodes = [node for node, *_ in told.values()]
            lanes = lanes_of(min(n for _, n, _ in told.values()), max(map(nodes.count, nodes)))
            handles = None
            if not why:
                handles, why = self._try(lambda: self._offer(new, [told[r][2] for r in near if r != me], lanes))
            offers = self.world.all_gather((handles, why), ranks, "peer memory")
            mine = {r: offers[r][0][me] for r in new if offers[r][0]}
            _, wrong = (None, why) if why else self._try(lambda: self.boxes.open(mine))
            wrongs = self.world.all_gather(wrong, ranks, "peer memory")
            failed = {told[r][0] for r in ranks if wrongs[r]}
            if failed:
                self._withdraw(new if told[me][0] in failed else [], [ranks])
                unexpected = [r for r in near if wrongs[r] and (self.forced or _NO_LINK not in wrongs[r])]
                if unexpected and told[me][0] in failed and me == near[0]:
                    text = "; ".join(f"rank {r}: {wrongs[r]}" for r in unexpected)
                    warnings.warn(
                        f"distdl moves by NCCL within this node, since ranks cannot open each other's memory ({text}). "
                        "DISTDL_PEER=0 chooses this",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        # One answer for the whole group, since it also says what is a collective: who reaches nobody has a reach too.
        if all(nodes.count(node) < 2 or node in failed for node in nodes):
            return None
        return PeerReach(self, frozenset() if told[me][0] in failed else frozenset(near) - {me}, lanes)

    def _offer(self, new, places, lanes: int):
        """Handles of memory for these ranks. Where nobody asked for it, links must be those that it was measured on."""
        slow = [place for place in places if not (self.forced or self.kernels.joined(place))]
        if slow:
            raise TransportError(
                _NO_LINK,
                op="peer memory",
                expected="NVLink to all of them",
                actual=slow,
                next_step="leave it to NCCL, or set DISTDL_PEER=1",
            )
        self.kernels.ready()
        return self.boxes.offer(new, lanes)

    @staticmethod
    def _try(call):
        """(its result, ""), or (None, what went wrong)."""
        try:
            return call(), ""
        except Exception as error:  # any: the others must hear of it
            return None, f"{type(error).__name__}: {error}"

    def close(self, groups) -> None:
        """Close the peers' memory, and give back this rank's own, once the ranks of all ``groups`` have come here."""
        with self.device.here():
            self.kernels.finish()
            self._meet(groups)
            self._withdraw({*self.boxes.own}, groups)

    def _withdraw(self, peers, groups) -> None:
        """Memory is freed once nobody maps it."""
        self.boxes.shut(peers)
        self._meet(groups)
        self.boxes.give(peers)

    def _meet(self, groups) -> None:
        for ranks in reversed(groups):
            self.world.host.all_gather(b"", ranks)


class PeerReach:
    """The ranks of one node within a group, see :class:`distdl.engine.transport.Reach`."""

    def __init__(self, memory: PeerMemory, ranks: frozenset[int], lanes: int):
        self.memory, self.ranks, self.lanes = memory, ranks, lanes
        self.leaves = (memory.kernels.BASES - 1) // 2
        self.plain: Any = None  # the engine that graphs hold on to

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def takes(self, parts) -> bool:
        """Whether a message of these parts is faster so than by NCCL: their sizes are the same on both ends. Rows of
        fewer bytes than a thread reads at once are not, but for small messages."""
        return sum(part.nbytes for part in parts) < NARROW_MESSAGE or all(
            part.size[-1] * part.dtype.itemsize >= WORD for part in parts if part.size
        )

    def bind(self, program, xs) -> Any:
        """One kernel, bound to its table."""
        self._leave(program, xs)
        table, address = self.table(program, [x.data_ptr() for x in xs]), torch.Tensor.data_ptr
        text = f"{program.call.op} ({program.call.partitions})"
        launch = self.memory.kernels.Mover(table, self.memory.device.index, limit(), text)
        if len(xs) == 1 and not program.staging:
            return lambda xs, ys, staging: launch((address(xs[0]), address(ys[0])))

        def run(xs, ys, staging):
            launch((*map(address, xs), *map(address, ys), 0 if staging is None else address(staging[0])))

        return run

    @staticmethod
    def _leave(program, xs) -> None:
        """Leave to :mod:`distdl.engine.fast.rows` what stays and is large, but lies in short words."""
        kept, n = program.straight.kept, len(xs)
        places = {i: x.data_ptr() % 16 for i, x in enumerate(xs)}

        def word(part, base):
            return ends_of([box_of(part, base)], [0], places)[0]

        large = [
            (to, source)
            for to, source in kept
            if to.nbytes >= NARROW and math.gcd(word(to, n + to.leaf), word(source, source.leaf)) < WORD
        ]
        program.straight.kept = [pair for pair in kept if pair not in large]
        program.kept += large

    def table(self, program, addresses: list[int]) -> Table:
        """What the kernel reads: inputs, outputs and the staging memory are numbered through."""
        straight, boxes, n = program.straight, self.memory.boxes, len(addresses)
        messages = [
            (False, boxes.receiving(peer), [box_of(p, n + p.leaf) if p.direct else waiting(p, 2 * n) for p in parts])
            for peer, parts in straight.receives.items()
        ]
        messages += [
            (True, boxes.sending(peer), [box_of(p, p.leaf) for p in parts]) for peer, parts in straight.sends.items()
        ]
        kept = [(box_of(to, n + to.leaf), box_of(source, source.leaf)) for to, source in straight.kept]
        places = {i: address % 16 for i, address in enumerate(addresses)}
        kernels = self.memory.kernels
        return table_of(messages, kept, self.lanes, CAPACITY, places, kernels.BLOCK, kernels.KEEPERS)

    def sum(self, ranks: tuple[int, ...], dtype: torch.dtype, count: int) -> Any:
        """A function (source, target): the sum over ``ranks``, all of which are reached."""
        memory, me = self.memory, self.memory.world.rank
        text = f"a sum over ranks {ranks}, {dtype}"
        others = [r for r in ranks if r != me]
        return memory.kernels.Summer(
            dtype, count, ranks.index(me), others, memory.boxes, memory.device.index, limit(), text
        )


class PeerTransport(NcclTransport):
    """A communicator some ranks of which lie on one node, and are reached by peer memory.

    Args:
        plain: the communicator; CUDA graphs hold on to what it does, and know nothing of peer memory.
        reach: who is reached.
    """

    reach: PeerReach
    collectives = ("all_reduce", "reduce_scatter", "small all_gather")  # large gathers are boxes like others

    def __init__(self, plain: NcclTransport, reach: PeerReach, ranks):
        super().__init__(plain.engines, plain.comm, ranks)
        self.plain, self.reach, self.ranks = plain, reach, ranks
        plain.collectives = self.collectives  # what it captures is made ready by what goes before, without other groups
        reach.plain = plain
        self.order = reach.memory.kernels.order_of(self.device.index)
        others = set(ranks) - {self.rank}
        self.near = len(others) <= reach.memory.kernels.PEERS and all(r in reach for r in others)
        self._acquaint(sorted(reach.ranks))
        self.small: dict[Any, Any] = {}  # sums of so many numbers

    def _acquaint(self, peers) -> None:
        """Let NCCL meet those whom it will meet in a captured graph only: there it cannot make what it needs."""
        kernels = self.reach.memory.kernels
        if not peers:
            return
        with self.device.here():
            memory = kernels.scratch(2 * len(peers))
            at = memory.data_ptr()
            there, here = ([(p, at + i, 1) for i, p in enumerate(peers, k)] for k in (0, len(peers)))
            self.plain.post(there, here)
            if self.near:  # small sums go by peer memory, so that NCCL's way of them would first be needed in a graph
                sums = kernels.scratch(SMALL_SUM)
                for nbytes in (1, SMALL_SUM):  # NCCL has several, by size
                    self.plain._collective("all_reduce", sums.data_ptr(), sums.data_ptr(), nbytes, torch.uint8)
            kernels.finish()

    def post(self, sends, receives, call=None, memory=None):
        if sends or receives:
            self._in_order(super().post, sends, receives, call, memory)

    def _collective(self, kind, source, target, count, dtype):
        nbytes = count * dtype.itemsize
        if self.device.capturing():
            self.plain._collective(kind, source, target, count, dtype)
        elif kind != "all_reduce" or not self.near or nbytes > SMALL_SUM or dtype not in NcclTransport.sums:
            self._in_order(super()._collective, kind, source, target, count, dtype)
        else:
            found = self.small.get((dtype, count))
            if found is None:
                found = self.small[dtype, count] = self.reach.sum(self.ranks, dtype, count)
            found(source, target)

    def _in_order(self, call, *args):
        """NCCL waits for peers as well: two kernels that do, on two streams, might each keep the other out."""
        order, stream = self.order, self.device.stream()
        with order.lock, self.device.here():
            order.enter(stream)
            call(*args)
            order.leave(stream)


def peer_memory(world, device) -> PeerMemory | None:
    """The mailboxes of a world; ``None``: it is told to do without."""
    wish = asked_for()
    if wish is False:
        return None
    from . import kernel

    return PeerMemory(world, device, kernel, bool(wish))


__all__ = ["PeerMemory", "PeerReach", "PeerTransport", "asked_for", "lanes_of", "peer_memory"]
