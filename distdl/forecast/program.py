"""What :func:`distdl.trace` finds: the movements of a program on some ranks, and its local work between them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import PartitionError
from ..plan import Plan, Side
from .machines import Machine
from .page import page

__all__ = ["Movement", "Program", "Totals", "Work"]

Sent = tuple[str, Any, int]  # kind, peer or ranks, bytes: as of dd.testing.count_messages


@dataclass(frozen=True)
class Movement:
    """One movement of one rank: a call, its adjoint or a tangent, or a small agreement.

    Attributes:
        op: what moves, by its name; ``.T`` stands for the adjoint. "agree": a small all-gather.
        layouts: how what is held and what is wanted lie over their ranks, in words.
        shapes, results, dtypes: of each tensor what goes in and what comes out, batch axes first.
        sent: what this rank sends, (kind, peer or ranks, bytes); collectives have one rank's share.
        received: what it gets from single peers, (peer, bytes).
        copied: bytes that are packed, unpacked, added or kept: copies inside of this rank.
        recorded: whether a graph holds it, for its adjoint.
        phase: "forward", "backward" or "tangent".
        line: the user's line, ``file:line in function``.
        forward_line: of a derivative the line of the call that it belongs to; else ``""``.
        boxes: how many copies ``copied`` is made of.
    """

    op: str
    layouts: str
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    sent: tuple[Sent, ...]
    received: tuple[tuple[int, int], ...]
    copied: int
    recorded: bool
    phase: str
    line: str
    forward_line: str = ""
    boxes: int = 0

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that this one sends to, or sums with."""
        found = (ranks if isinstance(ranks, tuple) else (ranks,) for _, ranks, _ in self.sent)
        return tuple(dict.fromkeys(r for ranks in found for r in ranks))

    @property
    def bytes(self) -> int:
        """Bytes of tensors that this rank sends, or puts into collectives."""
        return sum(n for kind, _, n in self.sent if kind != "agree")

    def __str__(self) -> str:
        tensors = ", ".join(f"{d} {_change(a, b)}" for d, a, b in zip(self.dtypes, self.shapes, self.results))
        where = _short(self.line) + (f", forward {_short(self.forward_line)}" if self.forward_line else "")
        return f"{self.phase:8} {self.op}  {tensors}  {self.layouts}  {self._said()}  {where}"

    def _said(self) -> str:
        if not self.sent:
            return "0 msg"
        kind, ranks, _ = self.sent[0]
        if kind != "send":
            return f"{kind} of {len(ranks)} ranks, {sum(n for *_, n in self.sent):,} B -> {_numbers(ranks)}"
        return f"{len(self.sent)} msg, {self.bytes:,} B -> {_numbers(self.peers)}"


class Work(NamedTuple):
    """One operator of torch between two movements: its name, floating point operations, bytes that it reads and writes,
    and its widest dtype's size."""

    op: str
    flops: int
    bytes: int
    itemsize: int = 4


class Totals(NamedTuple):
    """The sums of one rank. ``messages``: those to single peers; ``bytes``: of tensors, those put into collectives too;
    ``touched``: bytes that local operators read and write."""

    movements: int
    messages: int
    collectives: int
    agreements: int
    bytes: int
    received: int
    operators: int
    flops: int
    touched: int


@dataclass(frozen=True)
class Program:
    """The movements and the local work of some ranks, in order; made by :func:`distdl.trace`.

    Attributes:
        size: ranks of the world.
        events: {rank: its movements and its local work, in order}.
    """

    size: int
    events: dict[int, tuple[Movement | Work, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were traced."""
        return tuple(self.events)

    def of(self, rank: int) -> Program:
        """One of the ranks alone.

        Raises:
            PartitionError: it was not traced.
        """
        if rank not in self.events:
            raise PartitionError(
                "this rank was not traced",
                expected=f"one of {_numbers(self.ranks)}",
                actual=rank,
                next_step=f"dd.trace(..., rank={rank})",
            )
        return Program(self.size, {rank: self.events[rank]})

    @property
    def movements(self) -> tuple[Movement, ...]:
        """Those of the first rank; ``of(rank).movements`` has those of another."""
        return tuple(e for e in self._first if isinstance(e, Movement))

    @property
    def work(self) -> tuple[Work, ...]:
        """The local operators of the first rank."""
        return tuple(e for e in self._first if isinstance(e, Work))

    @property
    def messages(self) -> list[Sent]:
        """What the first rank sends, (kind, peer or ranks, bytes), in order: what ``dd.testing.count_messages`` would
        list there."""
        return [sent for movement in self.movements for sent in movement.sent]

    @property
    def _first(self) -> tuple[Movement | Work, ...]:
        return next(iter(self.events.values()))

    @cached_property
    def totals(self) -> dict[int, Totals]:
        """{rank: its sums}."""
        return {rank: _totals(events) for rank, events in self.events.items()}

    def cost(self, machine: Machine | None = None) -> float:
        """Seconds that the program takes on a machine, as the slowest of the traced ranks: movements and local work one
        after the other, see :class:`distdl.machines.Machine`. Default: ``dd.machines.cluster``.

        Raises:
            PartitionError: ``machine`` is none.
        """
        machine = _machine(machine)
        return max(sum(machine.seconds(event, rank) for event in events) for rank, events in self.events.items())

    def save(self, path: str | os.PathLike[str], machine: Machine | None = None) -> None:
        """Write it down: all that is known as JSON, or a page with a picture, which loads nothing and runs no script,
        where the name ends in ``.html``; that has the times of ``machine``.

        Raises:
            PartitionError: another kind of file.
        """
        name = os.fspath(path)
        if not name.endswith((".json", ".html")):
            raise PartitionError(
                "no such kind of file", expected="a name in .json or .html", actual=name, next_step="change its ending"
            )
        text = self.json() if name.endswith(".json") else page(self, _machine(machine))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def json(self) -> str:
        """All that is known, as JSON: the world's size and for each rank its totals, movements and local work."""
        ranks = {
            str(rank): {
                "totals": self.totals[rank]._asdict(),
                "movements": [asdict(e) for e in events if isinstance(e, Movement)],
                "work": [[i, *e] for i, e in enumerate(events) if isinstance(e, Work)],
            }
            for rank, events in self.events.items()
        }
        return json.dumps({"size": self.size, "ranks": ranks})

    def __str__(self) -> str:
        return "\n".join(line for rank in self.ranks for line in self._lines(rank))

    __repr__ = __str__

    def _lines(self, rank: int) -> Iterator[str]:
        t = self.totals[rank]
        yield (
            f"rank {rank} of {self.size}: {t.movements} movements, {t.messages} messages, {t.collectives} collectives, "
            f"{t.bytes:,} B sent; {t.operators} operators, {t.flops:,} flops, {t.touched:,} B touched"
        )
        for i, movement in enumerate(self.of(rank).movements):
            yield f"{i:3} {movement}"


def _machine(given: Machine | None) -> Machine:
    if given is not None and not isinstance(given, Machine):
        raise PartitionError(
            "not a machine",
            op="cost",
            expected="a dd.machines.Machine",
            actual=type(given).__name__,
            next_step="dd.machines.cluster, or one that python -m distdl measure has fitted",
        )
    return Machine() if given is None else given


def _totals(events: tuple[Movement | Work, ...]) -> Totals:
    movements = [e for e in events if isinstance(e, Movement)]
    work = [e for e in events if isinstance(e, Work)]
    kinds = [kind for m in movements for kind, _, _ in m.sent]
    agreements = kinds.count("agree")
    return Totals(
        movements=sum(m.op != "agree" for m in movements),
        messages=kinds.count("send"),
        collectives=len(kinds) - kinds.count("send") - agreements,
        agreements=agreements,
        bytes=sum(m.bytes for m in movements),
        received=sum(n for m in movements for _, n in m.received),
        operators=len(work),
        flops=sum(w.flops for w in work),
        touched=sum(w.bytes for w in work),
    )


def _change(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    return f"{list(before)}" + (f" -> {list(after)}" if after != before else "")


def _short(line: str) -> str:
    """``model.py:12`` of the whole path's line."""
    return os.path.basename(line.partition(" in ")[0])


def _numbers(ranks: tuple[int, ...], most: int = 6) -> str:
    return ",".join(map(str, ranks[:most])) + ("..." if len(ranks) > most else "")


def layouts_of(plan: Plan) -> str:
    """How a plan's two sides lie: ``(64/4, 8) -> (64, 8/4)``: whole sizes, and over how many ranks each is cut."""
    held, wanted = _side(plan.held), _side(plan.wanted)
    return held if held == wanted else f"{held} -> {wanted}"


def _side(side: Side) -> str:
    if "shown" not in vars(side):
        shown = []
        for a in side.axes:
            if a.extents is None:
                continue
            stops = [stop for runs in a.runs for _, stop, _ in runs]
            cut = 1 if a.dim is None else side.partition.shape[a.dim]
            shown.append(f"{max(stops, default=0)}" + (f"/{cut}" if cut > 1 else ""))
        copies = side.partition.size // math.prod(
            side.partition.shape[d] for d in {a.dim for a in side.axes if a.extents is not None and a.dim is not None}
        )
        vars(side)["shown"] = f"({', '.join(shown)})" + (f" x {copies}" if copies > 1 else "")
    return vars(side)["shown"]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")
