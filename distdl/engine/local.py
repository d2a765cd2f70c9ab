"""All ranks in one process: messages are copies of memory, delivered through mailboxes."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque

from ..errors import TransportError
from .transport import Transport


class LocalTransport(Transport):
    """Rank ``rank`` of ``size`` ranks of this process that share ``mailboxes``; alone, a world of one rank."""

    device_types: tuple[str, ...] = ("cpu",)
    collectives: tuple[str, ...] = ()
    sums: frozenset = frozenset()
    takes_types = False
    chunk = 2**62
    tags = 0
    wide = True

    def __init__(self, rank: int = 0, size: int = 1, mailboxes=None):
        self.rank, self.size = rank, size
        self.mailboxes = defaultdict(deque) if mailboxes is None else mailboxes

    def post(self, sends, receives, call=None, memory=None):
        for peer, address, nbytes in sends:
            self.mailboxes[self.rank, peer].append((address, nbytes))
        return receives

    def wait(self, receives):
        for peer, address, nbytes in receives:
            if not self.mailboxes[peer, self.rank]:
                raise TransportError(
                    "nothing was sent",
                    op="simulate",
                    rank=self.rank,
                    expected=f"{nbytes} bytes from rank {peer}",
                    actual="no message",
                    next_step="run every rank's part, in rounds, senders first",
                )
            source, sent = self.mailboxes[peer, self.rank].popleft()
            if sent != nbytes:
                raise TransportError(
                    "a message has another length than planned",
                    op="simulate",
                    rank=self.rank,
                    expected=f"{nbytes} bytes from rank {peer}",
                    actual=f"{sent} bytes",
                    next_step="give every rank the same layouts and dtype",
                )
            ctypes.memmove(address, source, nbytes)

    def abandon(self, handle, memory):
        self.mailboxes[None, self.rank].append(memory)  # its addresses may stand in a peer's mailbox

    def collective(self, kind, source, target, count, dtype, ranks):
        raise TransportError(
            "simulated ranks have no collectives",
            op=kind,
            expected="messages",
            actual=ranks,
            next_step="run the program under MPI, with: python -m distdl run -n 2",
        )

    def all_gather(self, data, ranks):
        if ranks != (self.rank,):
            raise TransportError(
                "simulated ranks have no all-gather",
                op="all_gather",
                expected="one rank",
                actual=ranks,
                next_step="run the program under MPI, with: python -m distdl run -n 2",
            )
        return [data]

    def close(self):
        self.mailboxes.clear()


class NullTransport(LocalTransport):
    """Carries nothing: what is left is the library's own cost per call. For benchmarks; the results are garbage."""

    collectives = ("all_reduce",)

    def post(self, sends, receives, call=None, memory=None):
        return None

    def wait(self, receives):
        pass

    def collective(self, kind, source, target, count, dtype, ranks):
        pass

    def all_gather(self, data, ranks):
        return [data] * len(ranks)
