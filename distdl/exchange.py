"""Run plans: pack, hand flat buffers to the transport, unpack or add. The only executor, for every transport.

A plan moves tensors of its local shape with any number of leading batch axes, and several plans over the same ranks go as
one set of messages (a pytree). What depends only on shapes and strides is worked out once (:func:`_program`) and cached with
the plan's view; a call is then: allocate, copy what stays, post, wait, unpack.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import accumulate

import torch

from . import _torch
from . import transport as _transport
from .errors import ShapeError
from .transport.local import LocalTransport

_ALIGN = 64  # each part of a message starts at such an offset, on both ends
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class _Part:
    """One box of one tensor (``leaf``): as strided memory, and where it waits inside the staging memory."""

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the tensor's own first one
    dtype: torch.dtype
    add: bool = False  # arrivals: add to what is there
    cast: bool = False  # arrivals: the output is worked out in another dtype
    place: int = 0  # bytes

    def __post_init__(self):
        self.dense = _dense(self.size)
        self.nbytes = math.prod(self.size) * self.dtype.itemsize
        contiguous = all(n == 1 or s == d for n, s, d in zip(self.size, self.stride, self.dense))
        self.direct = contiguous and not self.add and not self.cast

    def of(self, tensor):
        """The box inside ``tensor``."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def staged(self, staging):
        """The box inside the staging memory."""
        return staging.view(self.dtype).as_strided(self.size, self.dense, self.place // self.dtype.itemsize)

    def address(self, tensor) -> int:
        return tensor.data_ptr() + self.offset * tensor.element_size()


@dataclass
class _Message:
    peer: int
    parts: list[_Part]
    place: int
    nbytes: int
    direct: bool  # the tensor's own memory is the message

    def buffer(self, tensors, base: int):
        """(peer, address, bytes), as transports take it."""
        part = self.parts[0]
        return self.peer, part.address(tensors[part.leaf]) if self.direct else base + self.place, self.nbytes


@dataclass
class _Program:
    """Everything about one rank's part of some plans that shapes, strides and dtypes decide."""

    sends: list[_Message]
    receives: list[_Message]
    early: list[tuple[_Part, _Part]]  # kept boxes (to, from), copied before anything arrives
    late: list[tuple[_Part, _Part | None]]  # what follows, in summing order (to, from; None: from the staging memory)
    outputs: list[tuple[tuple[int, ...], torch.dtype, torch.dtype, bool]]  # shape, dtype, working dtype, whether zeroed
    staging: int  # bytes
    group: tuple[int, ...] | None  # the ranks among which all of this is one all-reduce


def _dense(shape):
    """Strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1] if shape else ()


def _messages(by_peer, end: int):
    """One message for each peer, its parts laid out from ``end`` on in the staging memory; and where that then ends."""
    messages = []
    for peer, parts in sorted(by_peer.items()):
        place, nbytes = end, parts[0].nbytes
        direct = len(parts) == 1 and parts[0].direct
        if not direct:
            for part in parts:
                part.direct, part.place = False, end
                nbytes = end + part.nbytes - place
                end += -(-part.nbytes // _ALIGN) * _ALIGN
        messages.append(_Message(peer, parts, place, nbytes, direct))
    return messages, end


def _program(plans, rank, leads, strides, dtypes, collectives) -> _Program:
    sends, receives, early, late, outputs = defaultdict(list), defaultdict(list), [], [], []
    groups = {plan.summing_group(rank) if collectives else None for plan in plans}
    group = groups.pop() if len(groups) == 1 else None
    for leaf, (plan, lead, stride, dtype) in enumerate(zip(plans, leads, strides, dtypes)):
        view = plan.view(rank)
        work = torch.float32 if view.adds and dtype in _HALVES else dtype
        shape = (*lead, *view.out_shape)
        outputs.append((shape, dtype, work, not view.covered))
        if group or not math.prod(lead):
            continue

        def parts(message, strides, **kwargs):
            n = len(lead)
            return [_Part(leaf, (*lead, *sizes), strides, sum(a * s for a, s in zip(starts, strides[n:])), dtype, **kwargs)
                    for starts, sizes in message.boxes]

        for message in view.sends:
            sends[message.peer] += parts(message, stride)
        for position, message in enumerate(view.received):
            add = view.adds and not (position == 0 and view.covered)
            targets = parts(message, _dense(shape), add=add, cast=work != dtype)
            if message.peer == rank:
                (late if add else early).extend(zip(targets, parts(view.kept, stride)))
            else:
                receives[message.peer] += targets
                late += [(target, None) for target in targets]
    send_messages, end = _messages(sends, 0)
    receive_messages, end = _messages(receives, end)
    late = [(to, source) for to, source in late if source is not None or not to.direct]
    return _Program(send_messages, receive_messages, early, late, outputs, end, group)


class _Staging:
    """Scratch memory that is given back and used again: fresh large blocks would cost a page fault for every 4 KiB."""

    limit = 2**30  # bytes kept for later

    def __init__(self):
        self.free = defaultdict(deque)
        self.kept = 0

    def take(self, nbytes: int, device):
        size = max(256, 1 << (nbytes - 1).bit_length())
        blocks = self.free[device, size]
        if not blocks:
            return torch.empty(size, dtype=torch.uint8, device=device)
        self.kept -= size
        return blocks.pop()

    def give(self, block) -> None:
        if self.kept + block.numel() <= self.limit:
            self.kept += block.numel()
            self.free[block.device, block.numel()].append(block)


_staging = _Staging()


class Pending:
    """A movement under way: :meth:`finish` waits for it and returns the outputs."""

    def __init__(self, plans, xs, transport, collectives=True):
        self.home = None if xs[0].device.type in transport.device_types else xs[0].device
        xs = [_torch.plain(x.detach()) for x in xs]
        if self.home is not None:  # the engine cannot read this memory: through pinned host memory
            xs = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x) for x in xs]
        self.transport, self.xs = transport, xs
        program = self.program = _cached_program(plans, xs, transport.rank, collectives)
        device, ys, staging = xs[0].device, [], None
        for shape, _, work, zeroed in program.outputs:
            ys.append((torch.zeros if zeroed else torch.empty)(shape, dtype=work, device=device))
        self.ys, self.staging, self.handle = ys, None, None
        if program.group:
            return
        for to, source in program.early:
            to.of(ys[to.leaf]).copy_(source.of(xs[source.leaf]))
        if program.sends or program.receives:
            base = 0
            if program.staging:
                staging = self.staging = _staging.take(program.staging, device)
                base = staging.data_ptr()
            for message in program.sends:
                if not message.direct:
                    for part in message.parts:
                        part.staged(staging).copy_(part.of(xs[part.leaf]))
            sends = [m.buffer(xs, base) for m in program.sends]
            if _transport.log is not None:
                _transport.log.extend(("send", peer, nbytes) for peer, _, nbytes in sends)
            self.handle = transport.post(sends, [m.buffer(ys, base) for m in program.receives])

    def finish(self):
        program, ys = self.program, self.ys
        if program.group:
            _sum(self.transport, self.xs, ys, program.group)
        else:
            if self.handle is not None:
                self.transport.wait(self.handle)
            for to, source in program.late:
                value = to.staged(self.staging) if source is None else source.of(self.xs[source.leaf])
                target = to.of(ys[to.leaf])
                target.add_(value) if to.add else target.copy_(value)
            if self.staging is not None:
                _staging.give(self.staging)
                self.staging = None
        ys = [y if work == dtype else y.to(dtype) for y, (_, dtype, work, _) in zip(ys, program.outputs)]
        return ys if self.home is None else [y.to(self.home) for y in ys]


def _sum(transport, xs, ys, group) -> None:
    """All-reduce; leaves of one working dtype go as one message."""
    by_dtype = defaultdict(list)
    for x, y in zip(xs, ys):
        y.copy_(x)
        by_dtype[y.dtype].append(y)
    for some in by_dtype.values():
        flat = some[0] if len(some) == 1 else torch.cat([y.reshape(-1) for y in some])
        if not flat.numel():
            continue
        if _transport.log is not None:
            _transport.log.append(("all_reduce", group, flat.numel() * flat.element_size()))
        transport.all_reduce(flat, group)
        if len(some) > 1:
            for y, part in zip(some, flat.split([y.numel() for y in some])):
                y.copy_(part.view_as(y))


def _cached_program(plans, xs, rank, collectives) -> _Program:
    leads, strides, dtypes = [], [], []
    for plan, x in zip(plans, xs):
        shape, local = x.shape, plan.view(rank).in_shape
        n = len(shape) - len(local)
        if n < 0 or shape[n:] != local:
            raise ShapeError("the local tensor has another shape than planned", op="exchange", rank=rank, expected=local,
                             actual=tuple(shape))
        leads.append(shape[:n])
        strides.append(x.stride())
        dtypes.append(x.dtype)
    cache = plans[0].view(rank).programs
    key = (tuple(leads), tuple(strides), tuple(dtypes), plans[1:], collectives)
    program = cache.get(key)
    if program is None:
        if len(cache) >= 64:  # strides and batch sizes may vary without end
            cache.clear()
        program = cache[key] = _program(plans, rank, leads, strides, dtypes, collectives)
    return program


def start(plans, xs, transport) -> Pending:
    """Begin a movement of tensors ``xs`` (each with any leading batch axes) by ``plans``, as one set of messages."""
    return Pending(plans, xs, transport)


def run(plans, xs, transport):
    """Move tensors ``xs`` by ``plans`` as one set of messages; returns fresh tensors."""
    return Pending(plans, xs, transport).finish()


def simulate(plan, shards):
    """All ranks of ``plan`` in this process: held blocks in, wanted blocks out, each in the order of its partition."""
    held, wanted, ranks = plan.held.partition.ranks, plan.wanted.partition.ranks, plan.ranks
    if len(shards) != len(held):
        raise ShapeError("one tensor for each rank is needed", op="simulate", partitions=plan.held.partition,
                         expected=len(held), actual=len(shards))
    mine = dict(zip(held, shards))
    like, mailboxes = shards[0], defaultdict(deque)
    lead = like.shape[: like.dim() - len(plan.view(held[0]).in_shape)]
    pending = {}
    for rank in ranks:
        x = mine[rank] if rank in mine else like.new_empty((*lead, *plan.view(rank).in_shape))
        pending[rank] = Pending((plan,), [x], LocalTransport(rank, max(ranks) + 1, mailboxes), collectives=False)
    done = {rank: p.finish()[0] for rank, p in pending.items()}
    return [done[rank] for rank in wanted]
