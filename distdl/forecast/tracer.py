"""What stands in the place of ranks and engines while a program is traced, and takes the notes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .. import _torch
from ..calls import user_line
from ..engine.local import LocalTransport
from ..engine.program import Program as Sendings
from ..engine.program import program_of
from ..errors import AgreementError, PartitionError
from ..world import World
from .program import Movement, Work, dtype_name, layouts_of

# What ranks ask each other although all of them have the same, or take the first one's.
_ALIKE = ("sizes of vmap", "a seed for parameters")


class Nowhere(LocalTransport):
    """The engine of rank ``rank`` of ``size`` that are not there: it carries nothing, and has MPI's collectives."""

    collectives = ("all_reduce",)
    sums = frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}
        | {torch.complex64, torch.complex128, torch.bool}
    )

    def __init__(self, rank: int, size: int, tracer: Tracer) -> None:
        super().__init__(rank, size)
        self.tracer = tracer

    def all_gather(self, data: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        if len(ranks) > 1:
            purpose, _, *_ = pickle.loads(data)
            if purpose not in _ALIKE:
                raise AgreementError(
                    "this asks the other ranks, of which a trace knows nothing",
                    expected="a Layout, or shape=, where the partition stands" if purpose == "an operator" else "",
                    actual=f"an all-gather of {purpose!r} over {len(ranks)} ranks",
                    next_step="pass layouts to what is traced: then nothing is negotiated",
                )
            self.tracer.agreement(ranks, len(data))
        return [data] * len(ranks)


class Tracer:
    """Takes the notes of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.events: list[Movement | Work] = []
        self.sides: dict[Any, None] = {}  # those of all plans, in order
        self.engine = Nowhere(rank, size, self)
        self.phase, self.forward_line = "forward", ""

    def line(self) -> str:
        """The line that a derivative belongs to, when its node is made."""
        return self.forward_line or user_line()

    def backward(self, ctx: Any, apply: Any, *call: Any) -> Any:
        """``apply(*call)``, the adjoint of what ``ctx`` is of."""
        return self._derivative("backward", ctx, apply, *call)

    def tangent(self, ctx: Any, apply: Any, *call: Any) -> Any:
        """``apply(*call)``, the tangent of what ``ctx`` is of."""
        return self._derivative("tangent", ctx, apply, *call)

    def _derivative(self, phase: str, ctx: Any, apply: Any, *call: Any) -> Any:
        before = self.phase, self.forward_line
        self.phase, self.forward_line = phase, getattr(ctx, "line", "")
        try:
            return apply(*call)
        finally:
            self.phase, self.forward_line = before

    def agreement(self, ranks: tuple[int, ...], nbytes: int) -> None:
        """Note a small all-gather."""
        sent = (("agree", ranks, nbytes),)
        line = user_line()
        self.events.append(Movement("agree", "", (), (), (), sent, (), 0, False, self.phase, line, self.forward_line))

    def moved(self, steps: Any, xs: Any, recorded: bool) -> list[torch.Tensor]:
        """Note what would be moved, and whether a graph records it; the results, without numbers."""
        self._note(steps, xs, recorded)
        return [x.new_empty((*x.shape[: x.dim() - len(m.in_shape)], *m.out_shape)) for m, x in zip(steps, xs)]

    def _note(self, steps: Any, xs: Any, recorded: bool) -> None:
        where: World = steps[0].world
        if where.host is not self.engine:
            raise PartitionError(
                "a trace has the ranks of one world",
                partitions=steps[0].partitions,
                expected="partitions of the default world",
                actual=f"one of the world {where.name!r}",
                next_step="trace it with partitions of the default world",
            )
        plans = tuple(step.plan for step in steps)
        with _torch.no_modes():
            sendings, _ = program_of(plans, [_host(x) for x in xs], self.engine)
        for plan in plans:
            self.sides.update({plan.held: None, plan.wanted: None})
        one_to_one = sendings.travels and not sendings.kind
        copies = list(_copies(sendings))
        self.events.append(
            Movement(
                op=str(steps[0]) + (f" and {len(steps) - 1} more" if len(steps) > 1 else ""),
                layouts=layouts_of(plans[0]),
                shapes=tuple(tuple(x.shape) for x in xs),
                results=tuple((*x.shape[: x.dim() - len(m.in_shape)], *m.out_shape) for m, x in zip(steps, xs)),
                dtypes=tuple(dtype_name(x.dtype) for x in xs),
                sent=tuple(sendings.messages()),
                received=tuple((peer, int(n)) for peer, *_, n in sendings.receives) if one_to_one else (),
                copied=sum(copies),
                recorded=recorded,
                phase=self.phase,
                line=user_line(),
                forward_line=self.forward_line,
                boxes=len(copies),
            )
        )


def _host(x: torch.Tensor) -> torch.Tensor:
    """x, or where it lies on a device a tensor of its shape on the host: what is sent does not depend on it."""
    return x if x.is_cpu else torch.empty((), dtype=x.dtype).expand(x.shape)


def _copies(s: Sendings) -> Iterator[int]:
    """The bytes of each copy inside of this rank."""
    yield from (part.nbytes for part in (*(to for to, _ in (*s.kept, *s.late)), *s.packs))
    yield from (move[-1] for move in (*s.moves, *s.kept_moves, *s.arrivals))


class Counting(TorchDispatchMode):
    """Notes what torch's operators do between movements; views, and what only looks at tensors, are none."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if not func.is_view and func.namespace == "aten" and func not in _FREE:
            name = func.overloadpacket
            flops = flop_registry[name](*args, **kwargs, out_val=y) if name in flop_registry else 0
            seen: dict[int, torch.Tensor] = {}
            for thing in torch.utils._pytree.tree_leaves((args, kwargs, y)):
                if isinstance(thing, torch.Tensor):
                    seen[id(thing)] = thing
            if seen:
                nbytes = sum(_held(t) for t in seen.values())
                size = max(t.dtype.itemsize for t in seen.values())
                self.tracer.events.append(Work(name.__name__, int(flops), nbytes, size))
        return y


_aten = torch.ops.aten
_FREE = {
    _aten.detach.default, _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default,
    _aten.empty_strided.default, _aten.new_empty_strided.default, _aten.lift_fresh.default, _aten._unsafe_view.default,
}  # fmt: skip


def _held(t: torch.Tensor) -> int:
    """Bytes that a tensor takes: an expanded dim counts once."""
    n = t.dtype.itemsize
    for size, stride in zip(t.shape, t.stride()):
        n *= size if stride else min(size, 1)
    return n
