"""A board in shared memory on which every rank writes what it does: a rank that is stuck can still be read by those of
its node.

Each rank's page is a file without a name, of which it tells the others where they find it; nothing is left behind,
whatever happens, and nobody waits for another.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_PAGE, _TEXT = 2048, 640  # bytes of a rank's page, and of each of its three texts
# Version (odd while it is being written), state, whether the current movement is the last completed one, since, count,
# lengths.
_HEAD = struct.Struct("<QB?dQHHH")
_STATES = ("not started", "idle", "inside", "left")
IDLE, INSIDE, LEFT = 1, 2, 3


class Entry(NamedTuple):
    """What a rank wrote: its state, since when (``time.monotonic``), how many movements it has begun, the one that it
    is in (with the place of the user's call), the last one that it completed, and whether that is the one it was in."""

    state: str
    since: float
    begun: int
    op: str
    where: str
    done: str
    over: bool

    def __str__(self):
        last = f"last completed {self.done or 'nothing'}"
        if self.state == "inside":
            return f"is inside {self.op} at {self.where} for {time.monotonic() - self.since:.1f} s, {last}"
        if self.begun and not self.over:  # it failed, or its second half is still to come
            last = f"has begun {self.op} at {self.where} and not completed it, {last}"
        return f"has left the program, {last}" if self.state == "left" else f"is outside of any movement, {last}"


class Board:
    """This rank's page, and those of other ranks of its node. ``missing``: ranks from which this process still waits
    for something, where it knows.

    Args:
        rank: whose page it is.
        notice_of: gives what another rank has published of its :attr:`notice`, or ``None``.
    """

    def __init__(self, rank: int = 0, notice_of: Callable[[int], bytes | None] = lambda rank: None):
        self.rank, self.notice_of = rank, notice_of
        self.name = f"distdl-board-{secrets.token_hex(8)}"
        self.file, self.memory = _page(self.name)
        self.pages: dict[int, Any] = {}  # of other ranks; None: out of reach
        self.version, self.count, self.missing = 0, 0, None
        self.state, self.since, self.op, self.where, self.over = IDLE, time.monotonic(), "", "", False
        self.before, self.lengths = "", [0, 0, 0]
        self._write()

    @property
    def notice(self) -> bytes:
        """Where processes of this node find the page."""
        return b"" if self.file is None else f"{_node()} {os.getpid()} {self.file} {self.name}".encode()

    @property
    def done(self) -> str:
        """What this rank last completed."""
        return f"{self.op} at {self.where}" if self.over else self.before

    def enter(self, call: str, where: str) -> None:
        """This rank is inside ``call``."""
        before = self.done
        texts = [
            None if call == self.op else call,
            None if where == self.where else where,
            None if before == self.before else before,
        ]
        self.op, self.where, self.before, self.over = call, where, before, False
        self.state, self.since, self.count, self.missing = INSIDE, time.monotonic(), self.count + 1, None
        self._write(texts)

    def leave(self, completed: bool) -> None:
        """It no longer waits for others; ``completed``: the movement is over."""
        self.state, self.since, self.missing, self.over = IDLE, time.monotonic(), None, completed or self.over
        self._write()

    def close(self) -> None:
        """This rank has left its world."""
        self.state, self.since = LEFT, time.monotonic()
        self._write()
        # What was there last stays: a mapping holds a file descriptor until its last user is gone.
        self.memory, self.pages = bytearray(self.memory), {r: page and bytes(page) for r, page in self.pages.items()}
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _write(self, texts=()) -> None:
        memory, lengths = self.memory, self.lengths
        self.version += 2
        _HEAD.pack_into(memory, 0, self.version - 1, self.state, self.over, self.since, self.count, *lengths)
        for i, text in enumerate(texts):
            if text is not None:  # only what has changed
                data = text.encode()[:_TEXT]
                lengths[i], start = len(data), _HEAD.size + i * _TEXT
                memory[start : start + len(data)] = data
        _HEAD.pack_into(memory, 0, self.version, self.state, self.over, self.since, self.count, *lengths)

    def read(self, rank: int) -> Entry | None:
        """What ``rank`` last wrote, or ``None`` where it is on another node, or has not begun."""
        page = self.page(rank)
        if page is None:
            return None
        for _ in range(100):
            seen = page[:_PAGE]
            version, state, over, since, count, *lengths = _HEAD.unpack_from(seen)
            if version % 2 == 0 and version == _HEAD.unpack_from(page)[0]:
                break
        texts = [
            seen[start : start + n].decode(errors="replace")
            for start, n in zip(range(_HEAD.size, _PAGE, _TEXT), lengths)
        ]
        op, where, before = texts
        return Entry(_STATES[state], since, count, op, where, f"{op} at {where}" if over else before, over)

    def unread(self, rank: int) -> str:
        """Why :meth:`read` has nothing of ``rank``."""
        return "has not made its world" if self.notice_of(rank) is None else "is on another node"

    def page(self, rank: int):
        """The page of ``rank``, or ``None`` where this process cannot reach it. Once looked at, it can be read when
        that rank is gone."""
        if rank == self.rank:
            return self.memory
        if rank not in self.pages:
            notice = self.notice_of(rank)
            if notice is None:  # it may come yet
                return None
            self.pages[rank] = _open(*notice.decode().split()) if notice else None
        return self.pages[rank]


def _node() -> str:
    """What tells the processes whose files under /proc this one sees."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _page(name: str):
    """Fresh memory of a page, and the descriptor by which others find it; ``None``: they cannot."""
    try:
        _node()
        file = os.memfd_create(name)
        os.posix_fallocate(file, 0, _PAGE)  # too little memory is an error here, not a bus error later
        return file, mmap.mmap(file, _PAGE)
    except (OSError, AttributeError):  # a system that has no such thing: every rank keeps to itself
        return None, mmap.mmap(-1, _PAGE)


def _open(node: str, pid: str, file: str, name: str):
    """The page of another process; ``None``: it is on another node, or gone."""
    path, mine = f"/proc/{pid}/fd/{file}", f"/memfd:{name} (deleted)"
    try:
        if node != _node() or os.readlink(path) != mine:
            return None
        # Its rank may close it at any moment, and the number be another file's, even a pipe's.
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            same = os.readlink(f"/proc/self/fd/{opened}") == mine
            return mmap.mmap(opened, _PAGE, prot=mmap.PROT_READ) if same else None
        finally:
            os.close(opened)
    except OSError:
        return None
