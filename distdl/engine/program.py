"""Programs: everything about one rank's part of some plans that shapes, strides and dtypes decide, worked out once.

Which boxes lie in one run of memory and travel as they are, which are packed, in which memory arrivals wait, and in
what order and dtype they are added; or that all of it is one collective of the engine. :mod:`exchange` runs them.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from ctypes import memmove
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from .. import _torch
from ..errors import ShapeError
from .fast import paths, scratch
from .part import Part, dense, padded, stacks
from .recognise import covered, gaps, gathered, piles, summing_group
from .straight import Straight
from .transport import Call

_SMALL = 2**16  # bytes of staging memory that a program keeps for itself: views cost more than copies then
_STAYS = (
    2**14
)  # bytes of a box that stays here and goes by the staging memory: a view fewer costs less than a copy more
_VIEWED = 16  # programs whose views one block of staging memory keeps
SMALL_GATHER = 2**18  # bytes of a result below which an engine that has small all-gathers uses them
# Sums of more than two of these are taken in the wider dtype (the sum of two is rounded only once in any case), and so
# are those that the engine lacks.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}
# torch itself cannot add these: all their sums are taken in another dtype (those of uint64 modulo 2^64, as int64
# wraps).
NO_SUMS = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
}
NO_SUMS |= {
    dtype: torch.float32
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1 and "x2" not in str(dtype)
}
_WIDER |= NO_SUMS


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many numbers of ``dtype`` are added up beside a movement; truth values are counted."""
    return torch.int32 if dtype == torch.bool else _WIDER.get(dtype, dtype)


@dataclass
class Program:
    """Everything about one rank's part of some plans that shapes, strides and dtypes decide.

    Messages are (peer, leaf, byte offset, bytes), inside a tensor's own memory, or inside the staging memory (leaf -1).
    """

    likes: list[torch.Tensor]  # for each output a tensor without memory, of its shape and working dtype,
    strides: list[tuple[int, ...]] | None  # and their strides, where some are not contiguous
    zeroed: list[int]  # the outputs that start as zeros,
    blanks: list[Part]  # and the boxes of large ones that do
    casts: list[torch.dtype] | None  # dtypes of the results, where the working ones differ
    sends: list[tuple[int, int, int, int]]
    receives: list[tuple[int, int, int, int]]
    moves: list[tuple]  # copies into the staging memory, by address: (function, leaf, to, leaf, from, bytes),
    packs: list[Part]  # and of other boxes
    kept: list[tuple[Part, Part]]  # copies of boxes that stay here (to, from), while messages travel,
    kept_moves: list[tuple]  # and those by address
    arrivals: list[tuple]  # copies of what has arrived, as ``moves``,
    late: list[
        tuple[Part, Part | None]
    ]  # and what else follows, in summing order (to, from; None: from the staging memory)
    staging: int  # bytes
    kind: str | None  # "all_reduce", "all_gather" or "reduce_scatter" where all of this is one collective,
    group: tuple[int, ...]  # and its ranks, in the order of their blocks
    travels: bool  # whether there is any message
    spare: list  # small staging memory that is free, with the parts' views of it
    fresh: list[tuple[int, Any]] = field(default_factory=list)  # what is done with fresh outputs: (leaf, function)
    fused_early: Any = None  # on a device: small boxes of ``kept`` and ``packs``, which one kernel copies,
    fused_late: Any = None  # and those of ``late``
    call: Call | None = None  # what the messages are called
    straight: Straight | None = None  # what the engine moves by itself,
    run: Any = None  # and how: (inputs, outputs, staging memory)

    def name(self, plans, dtypes) -> None:
        """Name the messages by the plans and dtypes, which are the same on both ends of each."""
        text = " ".join([*(plan.digest for plan in plans), *map(str, dtypes)])
        found = {peer for peer, *_ in (*self.sends, *self.receives)}
        peers = tuple(sorted(found if self.straight is None else found | self.straight.peers))
        code = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        op, partitions = plans[0].named
        self.call = Call(code, peers, op, f"{partitions}, {dtypes[0]}")

    def messages(self) -> list[tuple[str, Any, int]]:
        """What this rank sends: (kind, peer or ranks, bytes), in order; see ``dd.testing.count_messages``."""
        if self.kind == "all_reduce":  # leaves of one working dtype go as one
            sizes: dict[torch.dtype, int] = defaultdict(int)
            for like in self.likes:
                sizes[like.dtype] += like.numel() * like.dtype.itemsize
            return [("all_reduce", self.group, n) for n in sizes.values() if n]
        if not self.travels:
            return []
        if self.kind:  # both ends have a rank's share
            return [(self.kind, self.group, index(self.sends[0][-1]))]
        sends = [(peer, index(nbytes)) for peer, *_, nbytes in self.sends]
        return [("send", *one) for one in sorted(sends if self.straight is None else sends + self.straight.lengths)]

    def take_staging(self, device):
        """Staging memory, with views of it for ``packs`` and for ``late`` (None where nothing is staged)."""
        if device.type != "cpu":  # torch's own pool knows the streams on which this memory is still in use
            return self._views(torch.empty(self.staging, dtype=torch.uint8, device=device))
        if self.spare:
            return self.spare.pop()
        block = scratch.take(self.staging)
        if not self.packs and not self.late:
            return block, (), ()
        known = vars(block).setdefault("views", {})  # they cost more than a small copy, and live as long as the block
        found = known.get(id(self))
        if found is None:
            if len(known) >= _VIEWED:
                known.clear()
            with torch.inference_mode(False):  # they outlive the mode
                found = known[id(self)] = (*self._views(block), self)
        return found

    def _views(self, block):
        late = [to.staged(block) if source is None else None for to, source in self.late]
        return block, [part.staged(block) for part in self.packs], late

    def give_staging(self, staging) -> None:
        if not staging[0].is_cpu:
            return
        if self.staging <= _SMALL and not self.spare:
            self.spare.append(staging)
        else:
            scratch.give(staging[0])


def channels_last(shape, stride) -> bool:
    """Whether torch takes a tensor of 2 or 3 spatial dims for channels_last (its own rule, of strides alone)."""
    least = 1
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if not shape[d] or stride[d] < least or (d == 0 and least == stride[1]):
            return False
        least = stride[d] * shape[d]
    return True


def _fresh(shape, x, n):
    """Strides of an output of this shape: channels_last where the input ``x`` (shape, stride) is, after ``n`` batch
    axes; else contiguous. This rank's matter alone: what travels is in the order of indices."""
    own = x[0][n:]
    if len(own) not in (4, 5) or len(shape) - n != len(own) or not channels_last(own, x[1][n:]):
        return dense(shape)
    *others, last = dense((*shape[: n + 1], *shape[n + 2 :], shape[n + 1]))
    return (*others[: n + 1], last, *others[n + 1 :])


def _like(shape, dtype, device):
    """A tensor of this shape with one element's memory: ``empty_like`` of it is the fastest way to a fresh dense
    tensor."""
    return torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)


def _parts(message, leaf, lead, dtype, strides, **how):
    """The boxes of a message inside a tensor with these strides."""
    return [_box(leaf, lead, starts, sizes, strides, dtype, **how) for starts, sizes in message.boxes]


def _box(leaf, lead, starts, sizes, strides, dtype, **how):
    return Part(leaf, (*lead, *sizes), strides, sum(a * s for a, s in zip(starts, strides[len(lead) :])), dtype, **how)


def _messages(by_peer, end: int, transport):
    """One message for each peer: a single part as it lies in the tensor, where that is one run of memory or the engine
    takes it so; else its parts laid out from ``end`` on in the staging memory. And where that then ends."""
    messages = []
    for peer, parts in sorted(by_peer.items()):
        part = parts[0]
        if len(parts) == 1 and part.direct:
            messages.append((peer, part.leaf, part.offset * part.dtype.itemsize, part.nbytes))
            continue
        if len(parts) == 1 and (strided := _as_it_lies(part, transport)) is not None:
            messages.append((peer, part.leaf, part.offset * part.dtype.itemsize, strided))
            part.direct = True
            continue
        place = end
        for part in parts:
            part.direct, part.place = False, end
            stop = end + part.nbytes
            end += padded(part.nbytes)
        messages.append((peer, -1, place, stop - place))
    return messages, end


def _as_it_lies(part, transport):
    """A box that is not one run of memory as one message, where a fast path makes it one."""
    return next((found for path in paths if (found := path.message(part, transport)) is not None), None)


def _beside(kept, late):
    """Of copies of what stays (to, from) those that are better made beside what travels, and the others: the end that
    is no run of memory is packed, or unpacked, with the boxes of messages. Not where sums must follow what is
    unpacked."""
    sums = any(to.add for to, _ in late)
    some, rest = [], []
    for to, source in kept:
        one = (
            to.contiguous != source.contiguous and to.nbytes <= _STAYS and not (to.cast or (sums and source.contiguous))
        )
        (some if one else rest).append((to, source))
    return some, rest


def _start(part):
    """(leaf, byte) where a box of :func:`_beside` begins, or waits."""
    return (part.leaf, part.offset * part.dtype.itemsize) if part.contiguous else (-1, part.place)


def _by_address(pairs, transport):
    """Copies in host memory (to, from): those that need no tensors, as in :attr:`Program.moves`, and the others."""
    moves = []
    for path in paths:
        some, pairs = path.copies(pairs, transport)
        moves += some
    return moves, pairs


def _widens(view, dtype, kind, transport) -> bool:
    """Whether a sum is taken in the wider dtype."""
    lacking = kind is not None and dtype not in transport.sums
    return view.adds and dtype in _WIDER and (dtype in NO_SUMS or lacking or (piles(view) and transport.wide))


def _collective(plans, leads, dtypes, transport):
    """(kind, ranks) where these plans are one collective that the engine has, the same on all of its ranks; else (None,
    ())."""
    rank, collectives = transport.rank, transport.collectives
    if "all_reduce" in collectives:
        groups = {summing_group(plan, rank) for plan in plans}
        group = groups.pop()
        if group and not groups:
            return "all_reduce", group
    plan = plans[0]
    if len(plans) == 1 and plan.held.partition.index(rank) is not None and math.prod(leads[0]):
        widens = _widens(plan.view(rank), dtypes[0], "reduce_scatter", transport)  # then its blocks go as messages
        nbytes = math.prod((*leads[0], *plan.view(rank).out_shape)) * dtypes[0].itemsize
        little = ("all_gather",) if "small all_gather" in collectives and nbytes < SMALL_GATHER else ()
        for kind, dims in (("all_gather", gathered(plan)), ("reduce_scatter", None if widens else gathered(plan.T))):
            if dims and kind in (*collectives, *little) and plan.volume(rank):
                return kind, plan.held.partition.along(dims, rank).ranks
    return None, ()


def _gathering(plan, rank, lead, stride, dtype, kind, group, likes) -> Program:
    """The program of an all-gather or a reduce-scatter: equal blocks, in the order of ``group``, on the side that is
    whole."""
    view, about = plan.view(rank), (0, lead, dtype)
    shape = likes[0].shape
    if kind == "all_gather":
        boxes = {m.peer: m for m in view.received}
        small = _parts(view.kept, *about, stride)
        blocks = [_parts(boxes[r], *about, dense(shape))[0] for r in group]
    else:
        boxes = {m.peer: m for m in view.sends} | {rank: view.kept}
        small = _parts(next(m for m in view.received if m.peer == rank), *about, dense(shape))
        blocks = [_parts(boxes[r], *about, stride)[0] for r in group]
    n, itemsize, end = small[0].nbytes, dtype.itemsize, 0
    ready = all(b.contiguous and b.offset == i * n // itemsize for i, b in enumerate(blocks))
    ends = []
    for parts, direct in ((small, small[0].contiguous), (blocks, ready)):
        if direct:
            ends.append((0, 0))  # both the own block and the first of all begin where their tensor does
        else:
            ends.append((-1, end))
            for part in parts:
                part.place, end = end, end + n
            end = padded(end)
    staged_small, staged_blocks = ([] if at[0] == 0 else stacks(parts) for at, parts in zip(ends, (small, blocks)))
    sends, receives = [[(rank, *at, n)] for at in (ends if kind == "all_gather" else ends[::-1])]
    packs, unpacks = (staged_small, staged_blocks) if kind == "all_gather" else (staged_blocks, staged_small)
    late: list[tuple[Part, Part | None]] = [(to, None) for to in unpacks]
    return Program(likes, None, [], [], None, sends, receives, [], packs, [], [], [], late, end, kind, group, True, [])


def _program(plans, leads, strides, dtypes, transport, device) -> Program:
    rank = transport.rank
    sends, receives, kept, likes, formats, zeroed, blanks = defaultdict(list), defaultdict(list), [], [], [], [], []
    late: list[tuple[Part, Part | None]] = []
    kind, group = _collective(plans, leads, dtypes, transport)
    for leaf, (plan, lead, stride, dtype) in enumerate(zip(plans, leads, strides, dtypes)):
        view = plan.view(rank)
        work = _WIDER.get(dtype, dtype) if _widens(view, dtype, kind, transport) else dtype
        shape = (*lead, *view.out_shape)
        likes.append(_like(shape, work, device))
        fresh = dense(shape) if kind else _fresh(shape, ((*lead, *view.in_shape), stride), len(lead))
        formats.append(fresh)
        empty = gaps(view)
        if empty is None or (empty and math.prod(shape) * work.itemsize < _SMALL):
            zeroed.append(leaf)
        else:
            blanks += [_box(leaf, lead, starts, sizes, fresh, work) for starts, sizes in empty]
        if kind or not math.prod(lead):
            continue

        about = leaf, lead, dtype
        for message in view.sends:
            sends[message.peer] += _parts(message, *about, stride)
        for position, message in enumerate(view.received):
            add = view.adds and not (position == 0 and covered(view))
            targets = _parts(message, *about, fresh, add=add, cast=work != dtype)
            if message.peer == rank:
                (late if add else kept).extend(zip(targets, _parts(view.kept, *about, stride)))
            else:
                receives[message.peer] += targets
                late += [(target, None) for target in targets]
    if kind and kind != "all_reduce":
        return _gathering(plans[0], rank, leads[0], strides[0], dtypes[0], kind, group, likes)
    moves, kept_moves, arrivals, beside = [], [], [], []
    straight = Straight.of(sends, receives, kept, len(plans), transport.reach)
    if device.type == "cpu":
        kept_moves, kept = _by_address(kept, transport)
        beside, kept = ([], kept) if transport.takes_types else _beside(kept, late)
        for to, source in beside:
            (sends if to.contiguous else receives)[rank].append(source if to.contiguous else to)
            late += [(to, None)] if source.contiguous else []
    send_messages, end = _messages(sends, 0, transport)
    receive_messages, end = _messages(receives, end, transport)
    if straight is not None:
        end = straight.place(end)
    send_messages, receive_messages = (
        [m for m in found if m[0] != rank] for found in (send_messages, receive_messages)
    )
    kept_moves += [(memmove, *_start(to), *_start(source), to.nbytes) for to, source in beside]
    packs = stacks(
        sorted((part for parts in sends.values() for part in parts if not part.direct), key=lambda part: part.place)
    )
    late = [(to, source) for to, source in late if source is not None or not to.direct]
    sums = any(to.add for to, _ in late)
    if not sums:  # the order does not matter then
        late = [(to, None) for to in stacks(sorted((to for to, _ in late), key=lambda part: part.place))]
    if device.type == "cpu":
        moves, rest = _by_address([(part.waiting, part) for part in packs], transport)
        packs = [part for _, part in rest]
        if not sums:
            arrivals, rest = _by_address([(to, to.waiting) for to, _ in late], transport)
            late = [(to, None) for to, _ in rest]
    casts = list(dtypes) if any(like.dtype != d for like, d in zip(likes, dtypes)) else None
    travels = bool(send_messages or receive_messages or straight)
    return Program(
        likes,
        None if formats == [dense(like.shape) for like in likes] else formats,
        zeroed,
        blanks,
        casts,
        send_messages,
        receive_messages,
        moves,
        packs,
        kept,
        kept_moves,
        arrivals,
        late,
        end,
        kind,
        group,
        travels,
        [],
        straight=straight,
    )


def _place(x):
    """Where a device tensor lies: words of 16 bytes need a place that they divide."""
    return x.device, x.data_ptr() % 16, x.storage_offset() % 16


def program_of(plans, xs, transport):
    """The program for these tensors, and the tensors as plain memory."""
    rank = transport.rank
    sums = transport.sums, transport.wide
    engine = transport.collectives, sums, transport.takes_types, transport.reach  # all that a program asks
    cache = plans[0].view(rank).programs
    x = xs[0]
    if len(xs) == 1:
        if x.is_conj() or x.is_neg() or x._is_zerotensor():
            xs = [x] = [_torch.plain(x)]
        key = (x.shape, x.stride(), x.dtype, x.is_cpu or _place(x), engine)
    else:
        xs = [_torch.plain(x) for x in xs]
        key = (*((x.shape, x.stride(), x.dtype, x.is_cpu or _place(x)) for x in xs), engine, plans)
    program = cache.get(key)
    if program is None:
        leads = []
        for plan, x in zip(plans, xs):
            local = plan.view(rank).in_shape
            n = x.dim() - len(local)
            if n < 0 or x.shape[n:] != local:
                raise ShapeError(
                    "the local tensor has another shape than planned",
                    op="exchange",
                    rank=rank,
                    expected=local,
                    actual=tuple(x.shape),
                    partitions=(plan.held.partition, plan.wanted.partition),
                    next_step="pass this rank's block, with any batch axes before its own dims",
                )
            leads.append(tuple(x.shape[:n]))
        if len(cache) >= 64:  # strides and batch sizes may vary without end
            cache.clear()
        strides, dtypes = [x.stride() for x in xs], [x.dtype for x in xs]
        program = _program(plans, leads, strides, dtypes, transport, xs[0].device)
        if program.travels and not program.kind:
            program.name(plans, dtypes)
        if program.straight is not None:
            program.run = transport.reach.bind(program, xs)
        for path in paths:
            path.rewrite(program, xs)
        if transport.reach is not None and transport.reach.plain is not None:
            program_of(plans, xs, transport.reach.plain)  # a graph that is captured can make no tables
        cache[key] = program  # now that it is whole
    return program, xs
