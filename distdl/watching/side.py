"""The side channel: small messages on a communicator of their own, which can be waited for with a time limit."""

from __future__ import annotations

from collections import defaultdict

from mpi4py import MPI

from ..signature import HEAD, Said, unpack

_SWAP, _REPORT, _ALARM = 1, 2, 3  # tags
_ROOM = 8192  # bytes of a swapped message, at most


class SideChannel:
    """Beside the tensors' messages. ``counts``: swaps begun with each rank; ``failed``: the last one that raised
    here."""

    def __init__(self, comm):
        self.comm = comm.Dup()
        self.rank = self.comm.rank
        self.counts: dict[int, int] = defaultdict(int)
        self.failed: dict[int, int] = defaultdict(int)
        self.buffers: dict[int, bytearray] = {}
        self.sends: list = []
        self.told: list = []  # reports of movements to which this rank has not come

    def swap(self, data: dict[int, bytes], mine: tuple) -> Swap:
        """Begin to send ``data[r]`` to each rank r, and to receive what it sends. ``mine``: the head of this rank's
        own."""
        return Swap(self, data, mine)

    def report(self, peer: int, data: bytes) -> None:
        """Send ``peer`` something that it takes whenever it looks; nothing is waited for."""
        self._post(peer, data, _REPORT)

    def reports(self):
        """(rank, data) of every report that has come."""
        return self._arrived(_REPORT)

    def stand_in(self, peer: int, data: bytes) -> None:
        """Send ``peer`` what it receives in a swap that this rank does not begin."""
        self._post(peer, data[:_ROOM], _SWAP)

    def alarm(self, peer: int, data: bytes) -> None:
        """The same, for its :mod:`lookout`."""
        self._post(peer, data, _ALARM)

    def alarms(self):
        """(rank, data) of every alarm that has come."""
        return self._arrived(_ALARM)

    def _post(self, peer, data, tag):
        self.sends = [request for request in self.sends if not request.Test()]
        self.sends.append(self.comm.Isend((data, MPI.BYTE), peer, tag))

    def _arrived(self, tag):
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv((data, MPI.BYTE), status.Get_source(), tag)
            yield status.Get_source(), data

    def close(self) -> None:
        """Free the communicator; collective. Reports that nobody has read are lost."""
        for request in self.sends:
            if not request.Test():
                request.Free()
        self.comm.Free()


class Swap:
    """One swap under way."""

    def __init__(self, side: SideChannel, data: dict[int, bytes], mine: tuple):
        self.side, self.peers, self.mine, comm = side, list(data), mine, side.comm
        self.found: dict[int, tuple] = {}  # heads of what has come
        for r in self.peers:
            if r not in side.buffers:
                side.buffers[r] = bytearray(_ROOM)
        self.receives = [self._receive(r) for r in self.peers]  # before sending: who has our message may rely on it
        self.sends = [comm.Isend((message[:_ROOM], MPI.BYTE), r, _SWAP) for r, message in data.items()]

    def _receive(self, r):
        return self.side.comm.Irecv((self.side.buffers[r], MPI.BYTE), r, _SWAP)

    def poll(self) -> bool:
        """Whether all messages are here."""
        if not MPI.Request.Testall(self.receives):
            return False
        if self.missing():
            return False
        MPI.Request.Waitall(self.sends)  # who has answered was already receiving
        return True

    def missing(self) -> list[int]:
        """Ranks whose message is not here."""
        for i, r in enumerate(self.peers):
            if r not in self.found and self.receives[i].Test():
                head = HEAD.unpack_from(self.side.buffers[r])
                if head[0] < self.side.counts[r]:  # of a movement that this rank has given up: the next one is meant
                    self.receives[i] = self._receive(r)
                else:
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
        data = self.side.buffers[r]
        return unpack(data) if HEAD.unpack_from(data)[0] else None

    def cancel(self) -> None:
        """Wait for nothing more."""
        for request in self.receives:
            if not request.Test():
                request.Cancel()
                request.Wait()
        self.side.sends += self.sends
