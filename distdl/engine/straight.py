"""What an engine moves by itself, from where it lies to where it belongs: neither packed nor unpacked."""

from __future__ import annotations

from dataclasses import dataclass

from .part import Part, padded


@dataclass
class Straight:
    """Messages to and from the ranks that an engine reaches, and the boxes that stay.

    Attributes:
        sends: {peer: boxes of the inputs}, which travel in this order.
        receives: {peer: boxes of the outputs}; those that are added, or come in another dtype, wait in the staging
            memory.
        kept: boxes that stay here (to, from), in one dtype.
    """

    sends: dict[int, list[Part]]
    receives: dict[int, list[Part]]
    kept: list[tuple[Part, Part]]

    @classmethod
    def of(cls, sends, receives, kept, leaves: int, reach) -> Straight | None:
        """Take the messages of ranks within ``reach`` out of all, and then also what stays; ``None``: there are
        none."""
        if reach is None or leaves > reach.leaves:
            return None
        there, here = (
            {p: by_peer.pop(p) for p in sorted(by_peer) if p in reach and reach.takes(by_peer[p])}
            for by_peer in (sends, receives)
        )
        if not there and not here:
            return None
        found = cls(there, here, [pair for pair in kept if not pair[0].cast])
        kept[:] = [pair for pair in kept if pair[0].cast]
        return found

    def place(self, end: int) -> int:
        """Give those that wait a place in the staging memory, from ``end`` on; where that then ends."""
        for part in (part for parts in self.receives.values() for part in parts):
            part.direct = not (part.add or part.cast)
            if not part.direct:
                part.place, end = end, end + padded(part.nbytes)
        return end

    @property
    def peers(self) -> set[int]:
        """Whom it concerns besides this rank."""
        return {*self.sends, *self.receives}

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(peer, bytes) of each message that is sent."""
        return [(peer, length(parts)) for peer, parts in self.sends.items()]


def length(parts: list[Part]) -> int:
    """Bytes of a message of these parts."""
    return sum(padded(part.nbytes) for part in parts[:-1]) + parts[-1].nbytes
