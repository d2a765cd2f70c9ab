"""The side channel: small messages on a communicator of their own, which can be waited for with a time limit."""

from __future__ import annotations

from collections import defaultdict

from mpi4py import MPI

from .signature import HEAD, Said, unpack

_SWAP, _REPORT = 1, 2  # tags
_ROOM = 8192  # bytes of a swapped message, at most


class SideChannel:
    """Beside the tensors' messages. ``counts``: swaps begun with each rank; ``failed``: the last one that raised here."""

    def __init__(self, comm):
        self.comm = comm.Dup()
        self.rank = self.comm.rank
        self.counts: dict[int, int] = defaultdict(int)
        self.failed: dict[int, int] = defaultdict(int)
        self.buffers: dict[int, bytearray] = {}
        self.sends: list = []

    def swap(self, data: dict[int, bytes]) -> Swap:
        """Begin to send ``data[r]`` to each rank r, and to receive what it sends."""
        return Swap(self, data)

    def report(self, peer: int, data: bytes) -> None:
        """Send ``peer`` something that it takes whenever it looks; nothing is waited for."""
        self.sends.append(self.comm.Isend((data, MPI.BYTE), peer, _REPORT))

    def reports(self):
        """(rank, data) of every report that has come."""
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, _REPORT, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv((data, MPI.BYTE), status.Get_source(), _REPORT)
            yield status.Get_source(), data

    def close(self) -> None:
        """Free the communicator; collective. Reports that nobody has read are lost."""
        for request in self.sends:
            if not request.Test():
                request.Free()
        self.comm.Free()


class Swap:
    """One swap under way."""

    def __init__(self, side: SideChannel, data: dict[int, bytes]):
        self.side, self.peers, comm = side, list(data), side.comm
        for r in self.peers:
            if r not in side.buffers:
                side.buffers[r] = bytearray(_ROOM)
        self.receives = [self._receive(r) for r in self.peers]
        self.sends = [comm.Isend((mine[:_ROOM], MPI.BYTE), r, _SWAP) for r, mine in data.items()]

    def _receive(self, r):
        return self.side.comm.Irecv((self.side.buffers[r], MPI.BYTE), r, _SWAP)

    def poll(self) -> bool:
        """Whether all messages are here."""
        if not MPI.Request.Testall(self.receives):
            return False
        stale = [i for i, r in enumerate(self.peers) if self._count(r) < self.side.counts[r]]
        for i in stale:  # of a movement that this rank has given up: the next one is meant
            self.receives[i] = self._receive(self.peers[i])
        if stale:
            return False
        MPI.Request.Waitall(self.sends)  # who has answered was already receiving
        return True

    def _count(self, r):
        return HEAD.unpack_from(self.side.buffers[r])[0]

    def missing(self) -> list[int]:
        """Ranks whose message is not here."""
        return [r for r, request in zip(self.peers, self.receives) if not request.Test() or self._count(r) < self.side.counts[r]]

    def arrived(self) -> dict:
        """{rank: its message} of the others."""
        missing = self.missing()
        return {r: self.side.buffers[r] for r in self.peers if r not in missing}

    def said(self, r: int) -> Said | None:
        """What rank r said in its last message, of this swap or of an earlier one; ``None`` where there is none."""
        return unpack(self.side.buffers[r]) if self._count(r) else None

    def cancel(self) -> None:
        """Wait for nothing more."""
        for request in self.receives:
            if not request.Test():
                request.Cancel()
                request.Wait()
        self.side.sends += self.sends
