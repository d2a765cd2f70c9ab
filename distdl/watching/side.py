"""The side channel: what ranks tell each other beside the tensors' messages, and need not wait for."""

from __future__ import annotations

from collections import defaultdict, deque

from ..engine.transport import Channel
from ..signature import HEAD, Said, unpack

_SWAP, _REPORT, _ALARM = 1, 2, 3  # kinds of messages
_ROOM = 8192  # bytes of a swapped message, at most


class SideChannel:
    """Swaps, reports and alarms over an engine's small messages. ``counts``: swaps begun with each rank; ``failed``:
    the last one that raised here."""

    def __init__(self, channel: Channel, rank: int):
        self.channel, self.rank = channel, rank
        self.counts: dict[int, int] = defaultdict(int)
        self.failed: dict[int, int] = defaultdict(int)
        self.told: list = []  # reports of movements to which this rank has not come
        self.last: dict[int, bytes] = {}  # each rank's last message of a swap that was looked at
        self._arrived: dict[int, dict[int, deque]] = {}  # by kind and rank, what nobody has looked at

    def swap(self, data: dict[int, bytes], mine: tuple) -> Swap:
        """Send ``data[r]`` to each rank r, and begin to wait for what it sends. ``mine``: the head of this rank's
        own."""
        return Swap(self, data, mine)

    def report(self, peer: int, data: bytes) -> None:
        """Send ``peer`` something that it takes whenever it looks; nothing is waited for."""
        self.channel.send(peer, _REPORT, data)

    def reports(self):
        """(rank, data) of every report that has come."""
        return self._take(_REPORT)

    def stand_in(self, peer: int, data: bytes) -> None:
        """Send ``peer`` what it receives in a swap that this rank does not begin."""
        self.send_swap(peer, data)

    def alarm(self, peer: int, data: bytes) -> None:
        """The same as :meth:`report`, for its :mod:`lookout`."""
        self.channel.send(peer, _ALARM, data)

    def alarms(self):
        """(rank, data) of every alarm that has come."""
        return self._take(_ALARM)

    def send_swap(self, peer: int, data: bytes):
        """Send a message of a swap."""
        return self.channel.send(peer, _SWAP, data[:_ROOM])

    def swapped(self, peer: int) -> deque:
        """The messages of swaps that have come from ``peer``, oldest first; who looks at one takes it out."""
        return self._of(_SWAP, peer)

    def _of(self, kind: int, peer: int) -> deque:
        return self._arrived.setdefault(kind, {}).setdefault(peer, deque())

    def hear(self) -> None:
        """Sort what has arrived."""
        for peer, kind, data in self.channel.arrived():
            self._of(kind, peer).append(data)

    def _take(self, kind):
        self.hear()
        for peer, messages in self._arrived.get(kind, {}).items():
            while messages:
                yield peer, messages.popleft()

    def close(self) -> None:
        """Give the engine's channel back; collective where that is. Reports that nobody has read are lost."""
        self.channel.close()


class Swap:
    """One swap under way."""

    def __init__(self, side: SideChannel, data: dict[int, bytes], mine: tuple):
        self.side, self.peers, self.mine = side, list(data), mine
        self.found: dict[int, tuple] = {}  # heads of what has come
        self.sends = [side.send_swap(r, message) for r, message in data.items()]

    def poll(self) -> bool:
        """Whether all messages are here, and this rank's own on their way."""
        return not self.missing() and self.side.channel.sent(self.sends)

    def missing(self) -> list[int]:
        """Ranks whose message is not here."""
        side = self.side
        side.hear()
        for r in self.peers:
            messages = side.swapped(r)
            while r not in self.found and messages:
                side.last[r] = messages.popleft()
                head = HEAD.unpack_from(side.last[r])
                if head[0] >= side.counts[r]:  # else of a movement that this rank has given up: the next one is meant
                    self.found[r] = head
        return [r for r in self.peers if r not in self.found]

    def here(self) -> list[int]:
        """Ranks whose message has been seen."""
        return list(self.found)

    def heads(self) -> dict[int, tuple]:
        """{rank: head of its message}, of all that have been seen, and of this rank's own."""
        return {self.side.rank: self.mine, **self.found}

    def said(self, r: int) -> Said | None:
        """What rank r said in its last message, of this swap or of an earlier one; ``None`` where there is none."""
        return unpack(self.side.last[r]) if r in self.side.last else None
