"""Run plans: pack, hand flat buffers to the transport, unpack or add. The only executor, for every transport.

A plan moves tensors of its local shape with any number of leading batch axes, and several plans over the same ranks go
as one set of messages (a pytree). What depends only on shapes and strides is worked out once (:mod:`program`) and
cached with the plan's view; a call is then: allocate, pack, post, copy what stays, wait, unpack.
"""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext

import torch

from .. import _torch
from ..errors import ShapeError, TransportError
from ..flat import parts_of, vector_of
from . import transport as traffic
from .local import LocalTransport
from .program import NO_SUMS, program_of
from .ranges import label, ranged
from .side_stream import Beside

_empty_like, _address = torch.empty_like, torch.Tensor.data_ptr


class Exchange:
    """A movement under way: :meth:`finish` waits for it and returns the outputs."""

    __slots__ = ("handle", "home", "program", "staging", "transport", "xs", "ys")

    def __init__(self, plans, xs, transport):
        x = xs[0]
        self.home = self.handle = None
        if not x.is_cpu and x.device.type not in transport.device_types:  # memory that the engine cannot read
            if _torch.capturing is not None and _torch.capturing():
                raise _no_capture(plans, transport)
            self.home = x.device
            xs = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(_torch.plain(x)) for x in xs]
        program, xs = program_of(plans, xs, transport)
        self.program, self.xs, self.transport, self.staging = program, xs, transport, None
        if traffic.log is not None:
            traffic.log.extend(program.messages())
        if program.strides is None:
            ys = self.ys = [*map(_empty_like, program.likes)]
        else:
            ys = self.ys = [
                torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)
                for like, stride in zip(program.likes, program.strides)
            ]
        for leaf, prepare in program.fresh:
            prepare(ys[leaf])
        if program.kind == "all_reduce":
            _sum(transport, xs, ys, program.group)
            return
        for leaf in program.zeroed:
            ys[leaf].zero_()
        for part in program.blanks:
            part.of(ys[part.leaf]).zero_()
        base = 0
        if program.staging:
            self.staging = program.take_staging(xs[0].device)
            base = self.staging[0].data_ptr()
        ins, outs = [*map(_address, xs), base], [*map(_address, ys), base]  # the staging memory is the last, leaf -1
        for copy, leaf, to, other, source, nbytes in program.moves:
            copy(outs[leaf] + to, ins[other] + source, nbytes)
        if program.packs:
            for part, staged in zip(program.packs, self.staging[1]):
                staged.copy_(part.of(xs[part.leaf]))
        if program.fused_early is not None:
            program.fused_early.copy(xs[0], self.staging, ys[0])
        if program.travels:
            sends = [(p, ins[leaf] + at, n) for p, leaf, at, n in program.sends]
            receives = [(p, outs[leaf] + at, n) for p, leaf, at, n in program.receives]
            if program.kind:
                (_, source, nbytes), (_, target, _), dtype = sends[0], receives[0], xs[0].dtype
                count = nbytes // dtype.itemsize
                self.handle = transport.collective(program.kind, source, target, count, dtype, program.group)
                return
            self.handle = transport.post(sends, receives, program.call, (xs, ys, self.staging))
            if program.run is not None:
                program.run(xs, ys, self.staging)
        for copy, leaf, to, other, source, nbytes in program.kept_moves:
            copy(outs[leaf] + to, ins[other] + source, nbytes)
        for to, part in program.kept:
            to.of(ys[to.leaf]).copy_(part.of(xs[part.leaf]))

    def finish(self):
        program, ys = self.program, self.ys
        if program.travels:
            self.transport.wait(self.handle)
            self.handle = None
        if program.arrivals:
            base = self.staging[0].data_ptr()
            for copy, leaf, to, _, source, nbytes in program.arrivals:
                copy(ys[leaf].data_ptr() + to, base + source, nbytes)
        if program.fused_late is not None:
            program.fused_late.copy(self.xs[0], self.staging, ys[0])
        for i, (to, source) in enumerate(program.late):
            value = self.staging[2][i] if source is None else source.of(self.xs[source.leaf])
            target = to.of(ys[to.leaf])
            if to.add:
                target.add_(value if value.dtype not in NO_SUMS else value.to(target.dtype))
            else:
                target.copy_(value)
        if self.staging is not None:
            program.give_staging(self.staging)
            self.staging = None
        if program.casts:
            ys = [y.to(dtype) for y, dtype in zip(ys, program.casts)]
        return ys if self.home is None else [y.to(self.home) for y in ys]

    def joining(self):
        """The context in which :meth:`finish` is called, and a graph's node made."""
        return nullcontext()

    def __del__(self):
        if self.handle is not None:  # dropped, or given up in an error: the memory must outlive the messages
            self.transport.abandon(self.handle, (self.xs, self.ys, self.staging))


def _no_capture(plans, transport) -> TransportError:
    op, partitions = plans[0].named
    return TransportError(
        "a CUDA graph cannot hold a movement that goes through the host",
        op=op,
        partitions=partitions,
        rank=transport.rank,
        expected="an engine that moves CUDA tensors itself",
        actual=type(transport).__name__,
        next_step="let NCCL move them (see python -m distdl info), or leave this call out of the graph",
    )


def _sum(transport, xs, ys, group) -> None:
    """All-reduce; leaves of one working dtype go as one message."""
    if len(ys) == 1:
        _sum_of_one(transport, xs[0], ys[0], group)
        return
    by_dtype = defaultdict(list)
    for x, y in zip(xs, ys):
        by_dtype[y.dtype].append((x, y))
    for some in by_dtype.values():
        if len(some) == 1:
            _sum_of_one(transport, *some[0], group)
            continue
        ys = [y for _, y in some]
        vector = vector_of([x for x, _ in some], ys[0].dtype)
        _sum_of_one(transport, vector, vector, group)
        _torch.foreach_copy(ys, parts_of(vector, [y.shape for y in ys]))


def _sum_of_one(transport, x, y, group) -> None:
    if x.dtype != y.dtype or not x.is_contiguous():
        x = y.copy_(x)
    count = y.numel()
    if count:
        transport.collective("all_reduce", x.data_ptr(), y.data_ptr(), count, y.dtype, group)


class Ranged(Exchange):
    """A movement under way, the end of which is a range of torch's profiler."""

    __slots__ = ("_label",)

    def __init__(self, plans, xs, transport):
        self._label = label(plans, xs, transport, "wait for ")
        super().__init__(plans, xs, transport)

    def finish(self):
        with torch.profiler.record_function(self._label):
            return super().finish()


class Aside:
    """A movement on a side stream of the device: nothing waits on the host, so it is complete but for the device's
    time."""

    def __init__(self, plans, xs, transport):
        with Beside(xs[0].device, xs) as self.beside:
            self.ys = Exchange(plans, xs, transport).finish()

    @contextmanager
    def joining(self):
        """Autograd runs an adjoint on the stream on which its node was made: on the side stream, beside what does not
        need it."""
        with self.beside.again():
            yield
        self.beside.join(self.ys)

    def finish(self):
        return self.ys


def begin(plans, xs, transport) -> Exchange | Aside:
    """Begin a movement of tensors ``xs`` (each with any leading batch axes) by ``plans``, as one set of messages."""
    aside = xs[0].is_cuda and "cpu" not in transport.device_types
    if not _torch.profiler._is_profiler_enabled:
        return Aside(plans, xs, transport) if aside else Exchange(plans, xs, transport)
    with ranged(plans, xs, transport, "start of "):
        return Aside(plans, xs, transport) if aside else Ranged(plans, xs, transport)


def simulate(plan, shards):
    """All ranks of ``plan`` in this process: held blocks in, wanted blocks out, each in the order of its partition."""
    held, wanted, ranks = plan.held.partition.ranks, plan.wanted.partition.ranks, plan.ranks
    if len(shards) != len(held):
        raise ShapeError(
            "one tensor for each rank is needed",
            op="simulate",
            partitions=plan.held.partition,
            expected=len(held),
            actual=len(shards),
            next_step="give the held blocks, in the order of plan.held.partition.ranks",
        )
    mine = dict(zip(held, shards))
    like, mailboxes = shards[0], defaultdict(deque)
    lead = like.shape[: like.dim() - len(plan.view(held[0]).in_shape)]
    pending = {}
    for rank in ranks:
        x = mine[rank] if rank in mine else like.new_empty((*lead, *plan.view(rank).in_shape))
        pending[rank] = Exchange((plan,), [x], LocalTransport(rank, max(ranks) + 1, mailboxes))
    done = {rank: p.finish()[0] for rank, p in pending.items()}
    return [done[rank] for rank in wanted]
