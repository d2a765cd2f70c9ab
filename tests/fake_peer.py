"""The kernels of distdl/engine/peer played on host memory: blocks are generators that read the same tables, and are
stepped in any order. ``BROKEN`` names faults of the protocol that tests put in on purpose.

:class:`Here` is for several ranks in one process; :class:`Mapped`, for ranks of a launch, has memory in files that all
of them map.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch

from distdl.engine.peer.region import CAPACITY, LINE, SLOTS, SMALL_SUM
from distdl.engine.peer.tables import MESSAGE, PART

BLOCK, KEEPERS, BASES, PEERS = 64, 3, 24, 15
BROKEN: set[str] = set()  # "early credit", "counters anew", "no credit"


def counter(address):
    return ctypes.c_uint32.from_address(address)


def reached(address, wanted):
    """Whether a counter that wraps round has come so far."""
    return (counter(address).value - wanted) % 2**32 < 2**31


def array(address, nbytes):
    """So many bytes of memory."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def quotient(n, packed, shift):
    """As the kernel divides: by a multiplication."""
    return ((n * (packed >> 32 & 0xFFFFFFFF)) >> 32) >> shift


def places(parts, base, first, last, word):
    """(words of the message, their addresses) of those between ``first`` and ``last`` that are no gap."""
    numbers, addresses = [], []
    for i, part in enumerate(parts):
        begin, count, which, offset, dims, shifts, *rest = part
        stop = parts[i + 1][0] if i + 1 < len(parts) else begin + count
        assert begin + count <= stop and count < 2**31
        words = np.arange(max(first, begin), min(last, begin + count), dtype=np.int64)
        left, found = words - begin, np.full(len(words), base[which] + offset, np.int64)
        for d in range(dims - 1):
            size, step = rest[2 * d] & 0xFFFFFFFF, rest[2 * d + 1]
            q = quotient(left, rest[2 * d], shifts >> 5 * d & 31)
            assert (q == left // size).all()
            found += (left - q * size) * step
            left = q
        found += left * rest[2 * dims - 1]
        assert not (found % word).any(), "a word lies across its own multiples"
        numbers.append(words)
        addresses.append(found)
    return np.concatenate(numbers), np.concatenate(addresses)


def spread(addresses, word):
    """(a view of all memory between these addresses, where in it their bytes are)."""
    low = int(addresses.min())
    view = array(low, int(addresses.max()) + word - low)
    return view, (addresses - low)[:, None] + np.arange(word)


def records(words, at, count):
    return [words[at + i * PART : at + (i + 1) * PART] for i in range(count)]


def carry(words, at, lane, base):
    """One lane of one message, at one of its ends."""
    sends, total, per, lanes, word, count, parts, slots, arriving, leaving, position, _, plain = words[
        at : at + MESSAGE
    ]
    parts = records(words, parts, count)
    assert not plain or (count == 1 and parts[0][4] <= 2)
    start, line = counter(position + lane * LINE).value, lane * LINE
    if "counters anew" in BROKEN:
        start = 0
    k = 0
    for first in range(lane * per, total, lanes * per):
        last = min(first + per, total)
        assert (last - first) * word <= CAPACITY
        while not ((sends and "no credit" in BROKEN) or reached(arriving + line, start + k + 1 - SLOTS * sends)):
            yield False
        slot = slots + (lane * SLOTS + (start + k) % 2**32 % SLOTS) * CAPACITY
        if "early credit" in BROKEN and not sends:
            counter(leaving + line).value = start + k + 1
            yield True
        numbers, addresses = places(parts, base, first, last, word)
        if len(numbers):
            view, index = spread(addresses, word)
            dense, rows = spread(slot + (numbers - first) * word, word)
            yield True
            for some in np.array_split(np.arange(len(numbers)), 2):  # not all at once
                if sends:
                    dense[rows[some]] = view[index[some]]
                else:
                    view[index[some]] = dense[rows[some]]
                yield True
        counter(leaving + line).value = start + k + 1
        k += 1
        yield True
    counter(position + line).value = start + k


def keep(words, at, block, blocks, base):
    """What stays."""
    count, total, word, sources, targets, plain = words[at : at + 6]
    sources, targets = records(words, sources, count), records(words, targets, count)
    assert not plain or (count == 1 and max(sources[0][4], targets[0][4]) <= 2)
    for first in range(block * BLOCK, total, blocks * BLOCK):
        last = min(first + BLOCK, total)
        (_, read), (_, written) = (places(parts, base, first, last, word) for parts in (sources, targets))
        (view, index), (to, rows) = spread(read, word), spread(written, word)
        to[rows] = view[index]
        yield True


def lines(page, number, i, n):
    """``n`` lines of 16 bytes of the page that is this sum's turn, from line ``i`` on."""
    return array(page + number % 2 * 2 * SMALL_SUM + 16 * i, 16 * n).view(np.uint32).reshape(n, 4)


def total(nbytes, dtype, me, pages, numbers, block, blocks, source, target):
    """One block of a small sum."""
    words = -(-nbytes // 8)
    for i in range(block * BLOCK, words, blocks * BLOCK):
        n = min(BLOCK, words - i)
        some = min(8 * n, nbytes - 8 * i)
        mine = np.zeros(8 * n, np.uint8)
        mine[:some] = array(source + 8 * i, some)
        for (there, _), number in zip(pages, numbers):
            line = lines(there, number, i, n)
            for half in (0, 1):  # not all at once
                line[half::2, ::2] = mine.view(np.uint32).reshape(n, 2)[half::2]
                line[half::2, 1::2] = number
                yield True
        found = []
        for (_, here), number in zip(pages, numbers):
            line = lines(here, number, i, n)
            while not (line[:, 1::2] == number).all():
                yield False
            found.append(np.ascontiguousarray(line[:, ::2]).view(np.uint8).reshape(-1)[:some])
            yield True
        found.insert(me, mine[:some].copy())
        array(target + 8 * i, some)[:] = summed(found, dtype)
        yield True


def summed(rows, dtype):
    """In the order of the ranks; halves are rounded once, and truth values stay what they are."""
    rows = [torch.from_numpy(row).view(dtype) for row in rows]
    wide = [row.float() for row in rows] if dtype in (torch.float16, torch.bfloat16) else rows
    found = wide[0]
    for row in wide[1:]:
        found = found | row if dtype == torch.bool else found + row
    return found.to(dtype).view(torch.uint8).numpy()


def run(blocks, draw, idle=lambda: None, patience=None):
    """Step blocks in random order until all have ended. ``patience``: rounds in which nobody goes on, until that is an
    error."""
    stuck = 0
    while blocks:
        moved = False
        for block in draw.sample(blocks, len(blocks)):
            try:
                moved |= next(block)
            except StopIteration:
                blocks.remove(block)
                moved = True
        stuck = 0 if moved else stuck + 1
        if not moved:
            idle()
        assert patience is None or stuck < patience, "nobody goes on"


class Launch:
    """Runs the blocks of this rank, while the other ranks run theirs."""

    def __call__(self, *args):
        self.done += 1
        end = time.monotonic() + 60
        run(self.blocks(*args), self.draw, lambda: (os.sched_yield(), self.late(end)))

    def late(self, end):
        assert time.monotonic() < end, f"nobody comes for {self.text}"


class Mover(Launch):
    def __init__(self, table, index, limit, text):
        self.table, self.text, self.draw, self.done = table, text, random.Random(0), 0

    def blocks(self, base):
        words, movers = self.table.words, self.table.movers
        found = [carry(words, words[b] & 0xFFFFFFFF, words[b] >> 32, base) for b in range(movers)]
        return found + [keep(words, movers, b, self.table.keepers, base) for b in range(self.table.keepers)]


class Summer(Launch):
    def __init__(self, dtype, count, me, others, boxes, index, limit, text):
        self.how, self.text, self.draw, self.done = (count * dtype.itemsize, dtype, me), text, random.Random(0), 0
        self.others, self.boxes = others, boxes

    def blocks(self, source, target):
        sums = self.boxes.sums
        for peer in self.others:
            sums[peer] = sums[peer] % (2**32 - 2) + 1
        pages, numbers = [self.boxes.pages(r) for r in self.others], [sums[r] for r in self.others]
        return [total(*self.how, pages, numbers, b, 2, source, target) for b in range(2)]


class Here:
    """Memory of several ranks in one process."""

    def __init__(self):
        self.held = {}

    def take(self, nbytes):
        memory = np.zeros(nbytes, np.uint8)
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def give(self, address):
        del self.held[address]

    def share(self, address):
        return address

    def open(self, handle):
        return handle

    def close(self, address):
        pass


class Mapped:
    """Memory in files, which other processes of the node map."""

    numbers = itertools.count()

    def __init__(self):
        self.held = {}

    def take(self, nbytes):
        name = os.path.join(tempfile.gettempdir(), f"distdl-peer-{os.getpid()}-{next(self.numbers)}")
        with open(name, "xb") as file:
            file.truncate(nbytes)
        return self._map(name, True)

    def _map(self, name, own):
        with open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.held[address] = name, own, memory
        return address

    def share(self, address):
        return self.held[address][0].encode()

    def open(self, handle):
        return self._map(handle.decode(), False)

    def close(self, address):
        del self.held[address]

    def give(self, address):
        os.unlink(self.held.pop(address)[0])


class Order:
    """Of one stream."""

    def __init__(self):
        self.lock = threading.RLock()

    def enter(self, stream):
        pass

    leave = enter


def kernels(memory=Mapped, **changed):
    """What stands for :mod:`distdl.engine.peer.kernel`."""
    order = Order()
    names = {name: globals()[name] for name in ("BLOCK", "KEEPERS", "BASES", "PEERS", "Mover", "Summer")}
    names |= {"Memory": memory, "order_of": lambda index: order, "finish": lambda: None, "multiprocessors": lambda: 48}
    names |= {"place": lambda: "a slot", "joined": lambda there: False, "ready": lambda: None}
    names["scratch"] = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    return SimpleNamespace(**names | changed)


def engines(world, node=None, forced=True, joined=False, **device):
    """The NCCL engines of a world on the fake of NCCL, with peer memory; ``node``: of a rank, where some are
    pretended; ``forced``: whether somebody asked for it; ``joined``: whether NVLink joins the devices."""
    import fake_nccl

    from distdl.engine.nccl import NcclEngines
    from distdl.engine.peer import PeerMemory

    host = fake_nccl.Host(**device)
    peer = PeerMemory(world, host, kernels(joined=lambda there: joined), forced)
    if node is not None:
        peer.node = lambda: node(world.rank)
    return NcclEngines(world, host, fake_nccl, peer=peer)


@contextlib.contextmanager
def broken(*how):
    """A fault in the protocol."""
    BROKEN.update(how)
    try:
        yield
    finally:
        BROKEN.clear()
