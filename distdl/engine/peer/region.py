"""The memory that ranks of one node share: for each pair of them two mailboxes, one in the memory of each.

A mailbox has :data:`LANES` lanes. A lane is a ring of :data:`SLOTS` slots of :data:`CAPACITY` bytes, and four counters
of chunks, which go on from movement to movement and wrap round:

=========  ==========================================  ==================
filled     chunks that the peer has put into it        written by the peer
freed      chunks of mine that the peer has taken out  written by the peer
received   chunks that this rank has taken out         its own
sent       chunks that this rank has put at the peer   its own
=========  ==========================================  ==================
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from .tables import Lanes

LANES, SLOTS, CAPACITY, LINE = 64, int(os.environ.get("P_SLOTS", 4)), int(os.environ.get("P_CAP", 2**16)), 128
_FILLED, _FREED, _RECEIVED, _SENT = (LANES * (SLOTS * CAPACITY + i * LINE) for i in range(4))
NBYTES = LANES * (SLOTS * CAPACITY + 4 * LINE)  # of a mailbox


@dataclass
class Mailboxes:
    """This rank's mailboxes on one device, by peer: its own memory, and the peer's for this rank.

    Args:
        memory: gives, shares and opens the device's memory; see :class:`distdl.engine.peer.kernel.Memory`.
    """

    memory: Any
    own: dict[int, int] = field(default_factory=dict)
    theirs: dict[int, int] = field(default_factory=dict)

    def offer(self, peers) -> dict[int, bytes]:
        """A handle of a new mailbox for each of ``peers``."""
        for peer in peers:
            self.own[peer] = self.memory.take(NBYTES)
        return {peer: self.memory.share(self.own[peer]) for peer in peers}

    def open(self, handles: dict[int, bytes]) -> None:
        """Open the peers' mailboxes for this rank."""
        for peer, handle in handles.items():
            self.theirs[peer] = self.memory.open(handle)

    def withdraw(self, peers) -> None:
        """Forget mailboxes that not both ends could open."""
        for peer in peers:
            if peer in self.theirs:
                self.memory.close(self.theirs.pop(peer))
            if peer in self.own:
                self.memory.give(self.own.pop(peer))

    def sending(self, peer: int) -> Lanes:
        """The lanes to a peer."""
        here, there = self.own[peer], self.theirs[peer]
        return Lanes(peer, there, here + _FREED, there + _FILLED, here + _SENT)

    def receiving(self, peer: int) -> Lanes:
        """The lanes from a peer."""
        here, there = self.own[peer], self.theirs[peer]
        return Lanes(peer, here, here + _FILLED, there + _FREED, here + _RECEIVED)
