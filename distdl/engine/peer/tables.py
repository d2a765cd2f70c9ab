"""What the kernel of a movement reads: boxes, messages and blocks as integers. Nothing here knows a device.

A *message* is the bytes of its parts in the plan's order, each part at a multiple of 64 bytes, the same on both
ends; how these lie in a tensor is each end's own matter. It is cut into chunks, chunk ``c`` goes by lane ``c % lanes``,
and both follow from the message's length alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..part import padded

WORD = 16  # bytes that a thread reads at once, at most
SMALLEST = 2**13  # bytes of a chunk from which a block has enough to do
GRAIN = 2**10  # and what its length is a multiple of, unless it is all
DIMS = 5  # of a box, once dims that lie in one another are one
PART = 6 + 2 * DIMS  # integers of a box
MESSAGE = 13  # and of a message
KEPT = 6  # and of what stays
_LONG = 2**31  # words of a box are fewer

Dims = list[tuple[int, int]]  # (size, step in bytes), innermost last


@dataclass(frozen=True)
class Box:
    """Strided memory: ``base`` says in which tensor, and the rest is in bytes."""

    base: int
    offset: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize


def box_of(part: Any, base: int) -> Box:
    """A :class:`distdl.engine.part.Part` of the tensor number ``base``."""
    size = part.dtype.itemsize
    return Box(base, part.offset * size, part.size, tuple(s * size for s in part.stride), size)


def waiting(part: Any, base: int) -> Box:
    """The place of a part in the staging memory, which is the tensor number ``base``."""
    size = part.dtype.itemsize
    return Box(base, part.place, part.size, tuple(s * size for s in part.dense), size)


def chunks(nbytes: int, lanes: int, capacity: int) -> tuple[int, int]:
    """(bytes of a chunk, number of chunks) of a message: all lanes have equally much to do, where it is enough."""
    share = -(-nbytes // lanes)
    rounds = -(-share // capacity)
    chunk = min(max(SMALLEST, -(-share // (rounds * GRAIN)) * GRAIN), capacity)
    return chunk, -(-nbytes // chunk)


def merged(*boxes: Box) -> list[Dims]:
    """The dims of boxes of one shape, down to bytes, with those made one that lie in one another in all of them."""
    shape = [*boxes[0].sizes, boxes[0].itemsize]
    steps = [[*box.steps, 1] for box in boxes]
    found: list[Dims] = [[] for _ in boxes]
    for n, *each in zip(shape, *steps):
        if n == 1:
            continue
        if found[0] and all(dims[-1][1] == n * step for dims, step in zip(found, each)):
            for dims, step in zip(found, each):
                dims[-1] = dims[-1][0] * n, step
        else:
            for dims, step in zip(found, each):
                dims.append((n, step))
    return found


def word_of(dims: Dims, offset: int) -> int:
    """How many bytes of a box can be copied at once, as far as itself goes."""
    run = dims[-1][0] if dims and dims[-1][1] == 1 else 1
    outer = dims[:-1] if run > 1 else dims
    return math.gcd(WORD, run, offset, *(step for _, step in outer))


def divisor(n: int) -> tuple[int, int]:
    """(what ``k // n`` is, for k < 2^31: the upper 32 bits of k times this factor, and a shift of it)."""
    bits = (n - 1).bit_length()
    return -(-(1 << (31 + bits)) // n), bits - 1


def pieces(dims: Dims, word: int) -> list[tuple[int, Dims]]:
    """A box in words, innermost dim first, as some of at most :data:`DIMS` dims and fewer than 2^31 words, in order:
    (offset in bytes, dims)."""
    if dims and dims[-1][1] == 1:
        run = dims[-1][0] // word
        dims = [*dims[:-1], *([(run, word)] if run > 1 else [])]
    return [(at, part[::-1]) for at, part in _cut(dims)]


def _cut(dims: Dims) -> list[tuple[int, Dims]]:
    if len(dims) <= DIMS and math.prod(n for n, _ in dims) < _LONG:
        return [(0, dims)]
    (n, step), rest = dims[0], dims[1:]
    inner = math.prod(k for k, _ in rest)
    if len(dims) <= DIMS and inner < _LONG:
        most = (_LONG - 1) // inner
        return [(i * step, [(min(most, n - i), step), *rest]) for i in range(0, n, most)]
    return [(i * step + at, part) for i in range(n) for at, part in _cut(rest)]


def _record(begin: int, base: int, offset: int, dims: Dims) -> list[int]:
    dims = dims or [(1, 0)]
    shifts, found = 0, []
    for d, (n, step) in enumerate(dims):
        factor, shift = divisor(n) if d + 1 < len(dims) else (0, 0)
        shifts |= shift << (5 * d)
        found += [n | factor << 32, step]
    if len(dims) == 1:
        found[0] = 0  # the kernel divides by it where it knows no number of dims: always 0
    count = math.prod(n for n, _ in dims)
    found += [0] * (2 * DIMS - len(found))
    return [begin, count, base, offset, len(dims), shifts, *map(_signed, found)]


def _signed(n: int) -> int:
    """The 64 bits of an unsigned number."""
    return n - 2**64 if n >= 2**63 else n


def ends_of(boxes: Sequence[Box], places: Iterable[int], addresses: dict[int, int]) -> tuple[int, list[int], bool]:
    """(word, records, whether there is one of two dims at most) of boxes that lie at these bytes of a message.
    ``addresses``: of the tensors, modulo 16; 0 where it is not said."""
    dims = [merged(box)[0] for box in boxes]
    word = math.gcd(*(word_of(d, b.offset + addresses.get(b.base, 0)) for d, b in zip(dims, boxes)))
    records, count = [], 0
    for box, place, d in zip(boxes, places, dims):
        begin = place // word
        for at, part in pieces(d, word):
            record = _record(begin, box.base, box.offset + at, part)
            begin += record[1]
            records += record
            count += 1
    return word, records, count == 1 and records[4] <= 2


@dataclass(frozen=True)
class Lanes:
    """One end of the lanes between two ranks: how many, and as addresses the slots, the counters that the peer writes
    and that this end writes at the peer, and this end's position."""

    peer: int
    count: int
    slots: int
    arriving: int
    leaving: int
    position: int


def places_of(boxes: Iterable[Box]) -> tuple[list[int], int]:
    """Where the parts of a message begin, and its length."""
    places, end, stop = [], 0, 0
    for box in boxes:
        places.append(end)
        stop = end + box.nbytes
        end += padded(box.nbytes)
    return places, stop


@dataclass
class Table:
    """What one movement's kernel reads, and how many do what: ``movers`` teams send or receive, ``keepers`` blocks copy
    what stays."""

    words: list[int]
    movers: int
    keepers: int


def table_of(messages, kept, lanes: int, capacity: int, addresses: dict[int, int], block: int, most: int) -> Table:
    """The table of a movement.

    Args:
        messages: (whether it is sent, :class:`Lanes`, its boxes) of each.
        kept: pairs of boxes (to, from) that stay.
        lanes: of a message, at most.
        capacity: bytes of a slot.
        addresses: see :func:`ends_of`.
        block: words that a block of those that stay copies at once.
        most: blocks that copy what stays.
    """
    plans = []
    for sends, ends, boxes in messages:
        places, nbytes = places_of(boxes)
        few = min(lanes, ends.count)
        chunk, count = chunks(nbytes, few, capacity)
        plans.append((sends, ends, ends_of(boxes, places, addresses), nbytes, chunk, min(count, few)))
    movers = sum(used for *_, used in plans)
    at = movers + KEPT
    blocks, records = [], []
    starts = [at + MESSAGE * i for i in range(len(plans))]
    at += MESSAGE * len(plans)
    for (sends, ends, (word, parts, plain), nbytes, chunk, used), start in zip(plans, starts):
        blocks += [start | lane << 32 for lane in range(used)]
        records += [int(sends), -(-nbytes // word), chunk // word, used, word, len(parts) // PART, at]
        records += [ends.slots, ends.arriving, ends.leaving, ends.position, ends.peer, int(plain)]
        at += len(parts)
    count, word, total, halves = _kept(kept, addresses)
    keepers = min(-(-total // block), most)
    half = len(halves) // 2
    plain = count == 1 and halves[4] <= 2
    words = [*blocks, count, total, word, at, at + half, int(plain)]
    words += records
    for *_, (_, parts, _), _, _, _ in plans:
        words += parts
    return Table([*words, *halves], movers, keepers)


def _kept(pairs, addresses):
    """(number of pieces, word, words, records of where they come from and then of where they go to)."""
    dims = [merged(source, to) for to, source in pairs]
    word = math.gcd(
        0,
        *(
            word_of(d, box.offset + addresses.get(box.base, 0))
            for both, (to, source) in zip(dims, pairs)
            for d, box in zip(both, (source, to))
        ),
    )
    begin, count, sources, targets = 0, 0, [], []
    for (a, b), (to, source) in zip(dims, pairs):
        for (x, one), (y, other) in zip(pieces(a, word), pieces(b, word)):
            sources += _record(begin, source.base, source.offset + x, one)
            targets += _record(begin, to.base, to.offset + y, other)
            begin += sources[-PART + 1]
            count += 1
    return count, word or WORD, begin, sources + targets
