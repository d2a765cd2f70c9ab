"""Ranks as forks of this process, joined by pipes: programs whose chains of messages are long, without MPI.

A rank that waits for a message which nobody sends raises after ``limit`` seconds; a message that nobody takes fails the
test.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
from collections import Counter, defaultdict

from one_process import Recorded, forget_maps

import distdl as dd
from distdl.errors import TransportError

limit = 60.0


class Piped(Recorded):
    """Rank ``rank`` of ``size``, with a connection to each other one. Messages carry their number."""

    def __init__(self, rank, size, connections):
        super().__init__(rank, size, None, None)
        self.connections, self.inbox, self.sent, self.taken = connections, defaultdict(dict), Counter(), Counter()

    def _send(self, peer, data):
        self.connections[peer].send((self.sent[peer], data))
        self.sent[peer] += 1

    def _take(self, peer, number):
        while number not in self.inbox[peer]:
            if not self.connections[peer].poll(limit):
                raise TransportError(
                    "nothing came",
                    op="exchange",
                    rank=self.rank,
                    expected=f"message {number} of rank {peer}",
                    actual="none",
                    next_step="make the same calls on every rank",
                )
            got, data = self.connections[peer].recv()
            self.inbox[peer][got] = data
        return self.inbox[peer].pop(number)

    def _expect(self, peer):
        self.taken[peer] += 1
        return self.taken[peer] - 1

    def post(self, sends, receives, call=None, memory=None):
        for peer, address, nbytes in sends:
            self._send(peer, ctypes.string_at(address, nbytes))
        return [(peer, self._expect(peer), address, nbytes) for peer, address, nbytes in receives]

    def wait(self, handle):
        for peer, number, address, nbytes in handle or ():
            data = self._take(peer, number)
            assert len(data) == nbytes
            ctypes.memmove(address, data, nbytes)

    def _shared(self, kind, ranks, mine):
        for r in ranks:
            if r != self.rank:
                self._send(r, (kind, mine))
        found = {r: self._take(r, self._expect(r)) for r in ranks if r != self.rank}
        assert all(what == kind for what, _ in found.values()), found
        return [mine if r == self.rank else found[r][1] for r in ranks]


def _rank(rank, n, program, pipes, report, release):
    """One rank; never returns. Its pipes stay open until all ranks are done."""
    connections = {b if a == rank else a: ends[b == rank] for (a, b), ends in pipes.items() if rank in (a, b)}
    forget_maps()
    transport = Piped(rank, n, connections)
    dd.World(transport=transport)
    try:
        found = program()
    except BaseException as error:
        found = error
    try:
        data = pickle.dumps((found, dict(transport.sent), dict(transport.taken)))
    except Exception as error:
        data = pickle.dumps((RuntimeError(f"{type(found).__name__}: {found} ({error})"), {}, {}))
    report.send_bytes(data)
    release.poll(None)
    os._exit(0)


def every_rank(n, program) -> list:
    """What ``program()`` returns on each of ``n`` ranks. Raises what a rank raised; and where a message was not
    taken."""
    pipes = {(a, b): multiprocessing.Pipe() for b in range(n) for a in range(b)}
    reports, children = [multiprocessing.Pipe(duplex=False) for _ in range(n)], []
    release, ended = multiprocessing.Pipe(duplex=False)
    for rank in range(n):
        child = os.fork()
        if child == 0:
            ended.close()
            _rank(rank, n, program, pipes, reports[rank][1], release)
        children.append(child)
        reports[rank][1].close()
    for ends in pipes.values():
        for end in ends:
            end.close()
    try:
        told = [pickle.loads(reader.recv_bytes()) for reader, _ in reports]
    finally:
        ended.close()
        release.close()
        for child in children:
            os.waitpid(child, 0)
        for reader, _ in reports:
            reader.close()
    for found, _, _ in sorted(
        told, key=lambda one: isinstance(one[0], TransportError)
    ):  # the cause before what follows from it
        if isinstance(found, BaseException):
            raise found
    for a, (_, sent, _) in enumerate(told):
        for b, (_, _, taken) in enumerate(told):
            assert sent.get(b, 0) == taken.get(a, 0), f"rank {a} sent {sent} messages, and rank {b} took {taken}"
    return [found for found, _, _ in told]
