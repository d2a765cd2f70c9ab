"""The memory that ranks of one node share: for each pair of them two mailboxes, one in the memory of each.

A mailbox has some lanes, at most :data:`LANES`. A lane is a ring of :data:`SLOTS` slots of :data:`CAPACITY` bytes, and
four counters of chunks, which go on from movement to movement and wrap round:

=========  ==========================================  ==================
filled     chunks that the peer has put into it        written by the peer
freed      chunks of mine that the peer has taken out  written by the peer
received   chunks that this rank has taken out         its own
sent       chunks that this rank has put at the peer   its own
=========  ==========================================  ==================

Behind the lanes lie two pages for small sums, which take turns. They have no counters: of each 16 bytes, which arrive
as one, 8 are numbers and 8 say of which sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .tables import Lanes

LANES, SLOTS, CAPACITY, LINE = 64, 4, 2**17, 128
SMALL_SUM = 2**18  # bytes of an all-reduce, up to which every rank sends all it has to every other
_COUNTERS = 4
_FILLED, _FREED, _RECEIVED, _SENT = range(_COUNTERS)


def nbytes(lanes: int) -> int:
    """The length of a mailbox."""
    return pages(lanes) + 2 * 2 * SMALL_SUM


def pages(lanes: int) -> int:
    """Where in a mailbox the pages for sums begin."""
    return lanes * (SLOTS * CAPACITY + _COUNTERS * LINE)


@dataclass
class Mailboxes:
    """This rank's mailboxes on one device, by peer: its own memory, and the peer's for this rank.

    Args:
        memory: gives, shares and opens the device's memory; see :class:`distdl.engine.peer.kernel.Memory`.

    Attributes:
        lanes: of each, the same on both ends.
        sums: how many small sums a pair has made, the same on both ends.
    """

    memory: Any
    own: dict[int, int] = field(default_factory=dict)
    theirs: dict[int, int] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)

    def offer(self, peers, lanes: int) -> dict[int, bytes]:
        """A handle of a new mailbox for each of ``peers``."""
        for peer in peers:
            self.own[peer] = self.memory.take(nbytes(lanes))
            self.lanes[peer], self.sums[peer] = lanes, 0
        return {peer: self.memory.share(self.own[peer]) for peer in peers}

    def open(self, handles: dict[int, bytes]) -> None:
        """Open the peers' mailboxes for this rank."""
        for peer, handle in handles.items():
            self.theirs[peer] = self.memory.open(handle)

    def shut(self, peers) -> None:
        """Close the peers' mailboxes for this rank."""
        for peer in peers:
            if peer in self.theirs:
                self.memory.close(self.theirs.pop(peer))

    def give(self, peers) -> None:
        """Give back this rank's own, which the peers have closed."""
        for peer in peers:
            if peer in self.own:
                self.memory.give(self.own.pop(peer))

    def _lanes(self, peer: int, slots: int, arriving: int, leaving: int, position: int) -> Lanes:
        here, there = self.own[peer], self.theirs[peer]
        lanes = self.lanes[peer]
        line = [lanes * (SLOTS * CAPACITY + i * LINE) for i in range(_COUNTERS)]
        return Lanes(peer, lanes, slots, here + line[arriving], there + line[leaving], here + line[position])

    def sending(self, peer: int) -> Lanes:
        """The lanes to a peer."""
        return self._lanes(peer, self.theirs[peer], _FREED, _FILLED, _SENT)

    def receiving(self, peer: int) -> Lanes:
        """The lanes from a peer."""
        return self._lanes(peer, self.own[peer], _FILLED, _FREED, _RECEIVED)

    def pages(self, peer: int) -> tuple[int, int]:
        """The pages for sums with a peer: there, and here."""
        at = pages(self.lanes[peer])
        return self.theirs[peer] + at, self.own[peer] + at
