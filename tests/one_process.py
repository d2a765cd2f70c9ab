"""All ranks of a program in one process, one after the other: no MPI, and yet every transform, agreement and error.

A rank sends what it can, and takes what its peers sent in the round before; rounds go on until nothing changes any
more. A program whose longest chain of messages is k settles after k + 1 rounds.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter

import torch

import distdl as dd
from distdl.engine.transport import Transport
from distdl.errors import TransportError
from distdl.world import _worlds


class Recorded(Transport):
    """Rank ``rank`` of ``size``: writes to ``now``, reads what the round ``before`` left."""

    device_types = ("cpu",)
    collectives = ("all_reduce",)
    takes_types = False
    sums = frozenset(
        {
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
            torch.bool,
        }
    )  # as MPI

    def __init__(self, rank, size, before, now, **others):
        self.rank, self.size, self.before, self.now, self.count = rank, size, before, now, Counter()
        self.asked = set()
        vars(self).update(others)

    def _key(self, *what):
        self.count[what] += 1
        return (*what, self.count[what])

    def post(self, sends, receives, call=None, memory=None):
        for peer, address, nbytes in sends:
            self.now[self._key("send", self.rank, peer)] = ctypes.string_at(address, nbytes)
        wanted = [(self._key("send", peer, self.rank), address, nbytes) for peer, address, nbytes in receives]
        self.asked.update(key for key, _, _ in wanted)
        return wanted

    def wait(self, handle):
        for key, address, nbytes in handle or ():
            data = self.before.get(key, bytes(nbytes))
            if len(data) != nbytes:
                raise TransportError(
                    "a message has another length than planned",
                    op="exchange",
                    rank=self.rank,
                    expected=nbytes,
                    actual=len(data),
                )
            ctypes.memmove(address, data, nbytes)

    def abandon(self, handle, memory):
        """What was sent has been copied."""

    def _shared(self, kind, ranks, mine):
        key = self._key(kind, ranks)
        self.now[key, self.rank] = mine
        self.asked.update((key, r) for r in ranks)
        return [self.before.get((key, r), mine) for r in ranks]

    def collective(self, kind, source, target, count, dtype, ranks):
        many = count * len(ranks) if kind == "reduce_scatter" else count
        mine = torch.frombuffer(bytearray(ctypes.string_at(source, many * dtype.itemsize)), dtype=dtype)
        found = torch.stack(self._shared(kind, ranks, mine))
        if kind != "all_gather":
            found = found.sum(0).to(dtype)
        if kind == "reduce_scatter":
            found = found.reshape(len(ranks), count)[ranks.index(self.rank)].contiguous()
        ctypes.memmove(target, found.data_ptr(), found.numel() * dtype.itemsize)

    def all_gather(self, data, ranks):
        return self._shared("gather", ranks, data)

    def close(self):
        pass


def _same(a, b):
    return a.keys() == b.keys() and all(
        _equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


def _equal(a, b):
    """Also where numbers are NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True))


def forget_maps() -> None:
    """Maps remember which rank asked first, and here all ranks are one process."""
    rooms = [module for name, module in sys.modules.items() if name.startswith("distdl.movement.")]
    for rule in [value for room in rooms for value in vars(room).values()]:
        if hasattr(rule, "cache_clear"):
            rule.cache_clear()


def every_rank(n, program, rounds=None, half_sums="float32", **others) -> list:
    """What ``program()`` returns on each of ``n`` ranks; an exception that it raises there stands in its place.

    ``rounds``: how many, where messages of several parts have gaps, which never settle. ``others``: attributes of the
    transport.

    Raises:
        AssertionError: a message that nobody takes, or that somebody waits for in vain, where no rank raised.
    """
    outer, before, most = dict(_worlds), {}, rounds or 20
    try:
        for i in range(most):
            now, results, asked = {}, [], set()
            for rank in range(n):
                forget_maps()
                transport = Recorded(rank, n, before, now, asked=asked, **others)
                dd.World(transport=transport, half_sums=half_sums)
                try:
                    results.append(program())
                except Exception as error:
                    results.append(error)
            if i + 1 == rounds or (rounds is None and _same(before, now)):
                if not any(isinstance(found, Exception) for found in results):
                    assert asked == now.keys(), (
                        f"not sent: {sorted(asked - now.keys(), key=str)}; not taken: {now.keys() - asked}"
                    )
                return results
            before = now
    finally:
        _worlds.clear()
        _worlds.update(outer)
        forget_maps()
    raise AssertionError(f"the messages still change after {most} rounds")


def returned(results):
    """The results; the first exception among them is raised."""
    for found in results:
        if isinstance(found, Exception):
            raise found
    return results
