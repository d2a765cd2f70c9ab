"""A board in shared memory on which every rank of a node writes what it does: a rank that is stuck, or gone, can still
be read.

The memory is a file that is unlinked as soon as all ranks of the node have mapped it, so nothing is left behind,
whatever happens.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

_SLOT, _TEXT = 2048, 640  # bytes per rank, and of each of its three texts
# Version (odd while it is being written), state, whether the current movement is the last completed one, since, count,
# lengths.
_HEAD = struct.Struct("<QB?dQHHH")
_STATES = ("not started", "idle", "inside", "left")
IDLE, INSIDE, LEFT = 1, 2, 3


class Entry(NamedTuple):
    """What a rank wrote: its state, since when (``time.monotonic``), how many movements it has begun, the one that it
    is in (with the place of the user's call), and the last one that it completed."""

    state: str
    since: float
    begun: int
    op: str
    where: str
    done: str

    def __str__(self):
        last = f"last completed {self.done or 'nothing'}"
        if self.state == "inside":
            return f"is inside {self.op} at {self.where} for {time.monotonic() - self.since:.1f} s, {last}"
        return f"has left the program, {last}" if self.state == "left" else f"is outside of any movement, {last}"


class Board:
    """The entries of this node's ranks. ``missing``: ranks from which this process still waits for something, where it
    knows."""

    def __init__(self, rank: int = 0, places: dict[int, int] | None = None, memory=None):
        self.places = {rank: 0} if places is None else places
        self.memory = memory or mmap.mmap(-1, _SLOT)
        self.rank, self.at = rank, self.places[rank] * _SLOT
        self.version, self.count, self.missing = 0, 0, None
        self.state, self.since, self.op, self.where, self.over = IDLE, time.monotonic(), "", "", False
        self.before, self.lengths = "", [0, 0, 0]
        self._write()

    @property
    def done(self) -> str:
        """What this rank last completed."""
        return f"{self.op} at {self.where}" if self.over else self.before

    @classmethod
    def shared(cls, comm):
        """The board of the ranks that share this node; collective over ``comm`` (mpi4py)."""
        from mpi4py import MPI

        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        try:
            places = {rank: i for i, rank in enumerate(node.allgather(comm.rank))}
            path, memory = None, None
            with contextlib.suppress(OSError):  # no folder to write to, say: then every rank keeps to itself
                if node.rank == 0:
                    path = _file(len(places) * _SLOT)
            path = node.bcast(path)
            with contextlib.suppress(OSError):
                if path is not None:
                    with open(path, "r+b") as file:
                        memory = mmap.mmap(file.fileno(), len(places) * _SLOT)
            node.Barrier()
            if node.rank == 0 and path is not None:
                os.unlink(path)
        finally:
            node.Free()
        return cls(comm.rank) if memory is None else cls(comm.rank, places, memory)

    def enter(self, op: str, where: str) -> None:
        """This rank is inside ``op``."""
        before = self.done
        texts = [
            None if op == self.op else op,
            None if where == self.where else where,
            None if before == self.before else before,
        ]
        self.op, self.where, self.before, self.over = op, where, before, False
        self.state, self.since, self.count = INSIDE, time.monotonic(), self.count + 1
        self._write(texts)

    def leave(self, completed: bool) -> None:
        """It no longer waits for others; ``completed``: the movement is over."""
        self.state, self.since, self.missing, self.over = IDLE, time.monotonic(), None, completed or self.over
        self._write()

    def close(self) -> None:
        """This rank has left its world."""
        self.state, self.since = LEFT, time.monotonic()
        self._write()
        self.memory = bytearray(
            self.memory
        )  # what was there last: a mapping holds a file descriptor until its last user is gone

    def _write(self, texts=()) -> None:
        memory, at, lengths = self.memory, self.at, self.lengths
        self.version += 2
        _HEAD.pack_into(memory, at, self.version - 1, self.state, self.over, self.since, self.count, *lengths)
        for i, text in enumerate(texts):
            if text is not None:  # only what has changed
                data = text.encode()[:_TEXT]
                lengths[i], start = len(data), at + _HEAD.size + i * _TEXT
                memory[start : start + len(data)] = data
        _HEAD.pack_into(memory, at, self.version, self.state, self.over, self.since, self.count, *lengths)

    def read(self, rank: int) -> Entry | None:
        """What ``rank`` last wrote, or ``None`` where it is on another node."""
        place = self.places.get(rank)
        if place is None:
            return None
        for _ in range(100):
            slot = self.memory[place * _SLOT : (place + 1) * _SLOT]
            version, state, over, since, count, *lengths = _HEAD.unpack_from(slot)
            if version % 2 == 0 and version == _HEAD.unpack_from(self.memory, place * _SLOT)[0]:
                break
        texts = [
            slot[start : start + n].decode(errors="replace")
            for start, n in zip(range(_HEAD.size, _SLOT, _TEXT), lengths)
        ]
        op, where, before = texts
        return Entry(_STATES[state], since, count, op, where, f"{op} at {where}" if over else before)


def _file(size: int) -> str:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    handle, path = tempfile.mkstemp(prefix="distdl-board-", dir=folder)  # mode 0600
    try:
        os.posix_fallocate(handle, 0, size)  # a full disk is an error here, not a bus error later
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path
