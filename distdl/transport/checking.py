"""Checking: before a movement its ranks compare what they are about to do, so that a disagreement is an error and not a hang.

:class:`Checked` wraps any engine for one movement. :class:`Observer` makes it: it writes on the node's board (for those who wait,
and for the watchdog), and, where a time limit is set, first swaps a signature with every rank of the movement: point-to-point on
a communicator of its own, because a collective would itself wait for a rank that never comes. A rank that finds a fault tells
all ranks of the movement, also those that come later, and raises; they raise the same error.

This changes neither results nor graphs. While ``distdl.transport.observer`` is ``None``, a movement pays for one comparison.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import time
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch, errors
from .board import Board
from .where import user_line

HEAD = struct.Struct("<Q16s16s?8sd")  # count, digests of the common and of all fields, recorded, hash and norm of a cotangent
_SPINS, _GRACE = 200, 1.0  # polls before sleeping; seconds for the other ranks, once a fault is found
DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True)
class Field:
    """Something that must be equal: on all ranks of the call (``common``), or on those that exchange messages."""

    name: str
    value: str
    shown: str
    common: bool
    next_step: str


@dataclass(frozen=True)
class Call:
    """The signature of a movement or of an agreement, as this rank sees it."""

    op: str
    partitions: str
    ranks: tuple[int, ...]
    near: frozenset[int]  # ranks with which messages are exchanged: there everything must be equal
    copies: tuple[int, ...]  # ranks that hold the same invariant input
    waits: bool  # whether this rank waits for anyone in the movement itself
    fields: tuple[Field, ...]
    common: bytes
    key: bytes

    @classmethod
    def of(cls, op, partitions, ranks, near, copies, waits, fields):
        def digest(some):
            return hashlib.blake2b(repr([(f.name, f.value) for f in some]).encode(), digest_size=16).digest()

        return cls(op, partitions, ranks, frozenset(near), copies, waits, tuple(fields), digest([f for f in fields if f.common]),
                   digest(fields))

    def __str__(self):
        return f"{self.op} over {self.partitions}"


class Checked:
    """The engine ``inner`` during one movement: the board says while this rank waits in it, and from whom something is missing."""

    def __init__(self, inner, board: Board, call: Call, where: str):
        self.inner, self.board, self.call, self.where = inner, board, call, where
        self.rank, self.size, self.device_types = inner.rank, inner.size, inner.device_types

    def post(self, sends, receives):
        return self.inner.post(sends, receives)

    def wait(self, handle):
        self.board.enter(str(self.call), self.where)
        if hasattr(self.inner, "side"):  # it can tell from whom something is missing
            self.inner.wait(handle, self.board)
        else:
            self.inner.wait(handle)
        self.board.leave(completed=True)

    def all_reduce(self, tensor, ranks):
        self.board.enter(str(self.call), self.where)
        self.inner.all_reduce(tensor, ranks)
        self.board.leave(completed=True)

    def all_gather(self, data, ranks):
        self.board.enter(str(self.call), self.where)
        found = self.inner.all_gather(data, ranks)
        self.board.leave(completed=True)
        return found

    def close(self):
        self.inner.close()


class Observer:
    """Watches the movements of this process. ``timeout``: seconds to wait for a rank; ``None``: compare nothing."""

    def __init__(self, timeout: float | None = None):
        self.timeout = timeout
        self.tracing = False  # while torch traces, values may be uninitialised memory
        self.calls: dict[Any, Call] = {}
        self.unrecorded: dict[Any, str] = {}  # adjoints that some ranks will not call, and why

    def movement(self, host, transport, maps, xs, recorded: bool):
        """The engine for this movement. Collective over its ranks, where it compares.

        Args:
            host: the world's engine for host memory, which has the board and the side channel.
            transport: the engine that the movement uses.
            maps, xs: LinearMaps, and this rank's plain tensors with any batch axes.
            recorded: whether a graph will call the adjoint.
        """
        board = getattr(host, "board", None)
        if board is None or (len(maps[0].ranks) < 2) or host.rank not in maps[0].ranks:
            return transport
        leads = _leads(maps, xs)
        key = (tuple(maps), leads, tuple(x.dtype for x in xs), xs[0].device.type)
        call = self.calls.get(key)
        if call is None:
            if len(self.calls) > 4096:
                self.calls.clear()
            call = self.calls[key] = _call(maps, leads, xs, host.rank)
        return self._checked(host, board, transport, call, maps, xs, recorded)

    def agreement(self, host, value, ranks):
        """The engine for a small all-gather over ``ranks``. What it carries is compared by those who asked for it."""
        board = getattr(host, "board", None)
        if board is None or len(ranks) < 2:
            return host
        op = f"agreement for {value.op}" if hasattr(value, "op") else "agreement"
        same = Field("the operator called", "agreement", op, True, "call the same operators in the same order")
        who = Field("the ranks that agree", str(ranks), str(ranks), True, "pass equal partitions on every rank")
        return self._checked(host, board, host, Call.of(op, f"ranks {ranks}", ranks, ranks, (), True, (same, who)))

    def _checked(self, host, board, transport, call, maps=(), xs=(), recorded=False):
        where = user_line()
        if self.timeout is not None:
            board.enter(str(call), where)
            try:
                self._compare(host.side, board, call, where, maps, xs, recorded)
            finally:
                board.leave(completed=False)
        if not call.waits:
            board.done = f"{call} at {where}"
        return Checked(transport, board, call, where)

    def _compare(self, side, board, call, where, maps, xs, recorded) -> None:
        others = [r for r in call.ranks if r != side.rank]
        for r in others:
            side.counts[r] += 1
        heard = _reported(side)
        if heard is not None:
            self._fail(side, call, heard)
        hashed, norm = _fingerprint(xs) if call.copies and not self.tracing else (bytes(8), 0.0)
        body = pickle.dumps((call.op, call.fields, where, board.done))
        tail = call.common, call.key, recorded, hashed, norm
        swap = side.swap({r: HEAD.pack(side.counts[r], *tail) + body for r in others})
        problem = self._wait(side, board, call, where, swap, tail)
        found = {r: HEAD.unpack_from(data) for r, data in swap.arrived().items()}
        if problem is None:
            if call.copies:
                problem = _unequal_copies(call, {**found, side.rank: (0, *tail)})
            if any(head[3] != recorded for head in found.values()):
                self._note_unrecorded(side.rank, maps, xs, where, recorded, {r: (found[r][3], swap.body(r)[2]) for r in found})
        if problem is not None:
            swap.cancel()
            self._fail(side, call, problem)

    def _wait(self, side, board, call, where, swap, tail):
        """Wait until all are there and equal; returns what is wrong, or ``None``."""
        began, spins, limit, why = time.monotonic(), 0, self.timeout, ""
        while True:
            complete = swap.poll()
            if complete or spins > _SPINS:
                wrong = _differs(call, swap.arrived(), tail)
                heard = _reported(side)
                if heard is not None:
                    return heard
                if complete:
                    return _disagreement(call, swap, side.rank, where) if wrong else None
                waited = time.monotonic() - began
                gone = [r for r in swap.missing() if (entry := board.read(r)) and entry.state == "left"]
                if gone or wrong:
                    limit = min(limit, waited + _GRACE)
                    why = why or ("has left the program" if gone else "")
                    spins = _SPINS + 1
                    if gone and limit - waited > 0.2:
                        limit = waited + 0.2
                if waited >= limit:
                    return _disagreement(call, swap, side.rank, where) if wrong else self._absence(call, swap, board, where, why)
                board.missing = swap.missing()
                time.sleep(0.001 if waited < 1 else 0.01)
            elif spins > 20:
                os.sched_yield()
            spins += 1

    def _absence(self, call, swap, board, where, why):
        absent = swap.missing()
        here = {board.rank: where, **{r: swap.body(r)[2] for r in swap.arrived()}}
        said = []
        for r in absent:
            entry = board.read(r)
            last = swap.body(r)  # of its message before this one
            said.append(f"{_ranks([r])} {entry}" if entry else f"{_ranks([r])} is on another node, and was last "
                        f"{f'in {last[0]} at {last[2]}' if last else 'nowhere'}")
        said += [f"{_ranks(rs)} {'is' if len(rs) == 1 else 'are'} in {call.op} at {place}" for place, rs in _groups(here).items()]
        hint = self.unrecorded.get((call.op, call.key), "")
        verb = why or f"did not come within {self.timeout:g} s"
        if len(absent) > 1:
            verb = verb.replace("has left", "have left")
        return errors.AbsenceError, dict(
            problem=f"{_ranks(absent)} {verb}", expected=f"all of {_ranks(call.ranks)}",
            actual="; ".join(said) + (f"; {hint}" if hint else ""),
            next_step="make the same movements in the same order on every rank; an output that a rank does not use needs F.tie, "
            "a rank without data F.nothing")  # fmt: skip

    def _note_unrecorded(self, rank, maps, xs, where, recorded, others):
        """Remember that some ranks recorded no graph for this movement: they will not come to its adjoint."""
        if not maps:
            return
        here = {rank: (recorded, where), **others}
        without = [r for r in sorted(here) if not here[r][0]]
        call = _call([m.T for m in maps], _leads(maps, xs), xs, rank)
        text = (f"{_ranks(without)} recorded no graph for {maps[0]} at {here[without[0]][1]} (an input without requires_grad, or "
                f"torch.no_grad), {_ranks([r for r in here if here[r][0]])} did")
        self.unrecorded[call.op, call.key] = text

    def _fail(self, side, call, problem):
        """Tell the ranks of the call, and raise."""
        kind, parts = problem
        parts = {"op": call.op, "partitions": call.partitions, **parts}
        for r in call.ranks:
            if r != side.rank:
                side.failed[r] = side.counts[r]
                side.report(r, pickle.dumps((side.counts[r], kind.__name__, parts)))
        raise kind(**{**parts, "rank": side.rank})


def _leads(maps, xs):
    """The batch axes of each tensor."""
    return tuple(x.shape[: x.dim() - len(m.in_shape)] for m, x in zip(maps, xs))


def _reported(side):
    """What another rank found wrong, unless this rank has raised for the same movement."""
    for peer, data in side.reports():
        count, kind, parts = pickle.loads(data)
        if count > side.failed[peer]:
            side.failed[peer] = count
            side.counts[peer] = max(side.counts[peer], count)
            return getattr(errors, kind), parts
    return None


def _call(maps, leads, xs, rank) -> Call:
    """The signature of a movement."""
    first, near, waits = maps[0], set(), False
    for m in maps:
        for plan in (m.plan, m.adjoint):
            view = plan.view(rank)
            here = {message.peer for message in (*view.sends, *view.received)} - {rank}
            near |= here
            waits |= bool(here) and plan is m.plan
    copies: tuple[int, ...] = ()
    if first.domain.kind == "invariant":
        groups = [m.adjoint.summing_group(rank) for m in maps]
        copies = next((g for g in groups if g), ())
    order, shapes = "call the same operators in the same order", "give every rank the same layouts, or local shapes that fit together"

    def each(values):
        return ", ".join(dict.fromkeys(map(str, values)))

    digests = " ".join(m.plan.digest for m in maps)
    fields = (
        Field("the operator called", *[each(maps)] * 2, True, order),
        Field("the partitions", *[each(m.partitions for m in maps)] * 2, True, "pass equal partitions on every rank"),
        Field("the number of tensors", *[str(len(maps))] * 2, True, "pass the same pytree on every rank"),
        Field("the device kind", *[xs[0].device.type] * 2, True, "give every rank's tensor the same device kind"),
        Field("the batch sizes (vmap)", *[each(map(tuple, leads))] * 2, False, "map over axes of one size on all ranks"),
        Field("the dtype", *[each(x.dtype for x in xs)] * 2, False, "give every rank's tensor the same dtype"),
        Field("the layouts or shapes", digests, f"local {each(m.in_shape for m in maps)} -> {each(m.out_shape for m in maps)} by "
              f"plan {digests[:50]}", False, shapes),
    )  # fmt: skip
    return Call.of(str(first), first.partitions, first.ranks, near, copies, waits, fields)


def _differs(call, arrived, tail) -> bool:
    for r, data in arrived.items():
        _, common, key, *_ = HEAD.unpack_from(data)
        if common != tail[0] or (r in call.near and key != tail[1]):
            return True
    return False


def _disagreement(call, swap, rank, where):
    """The first field in which ranks differ, and what each has."""
    bodies = {rank: (call.op, call.fields, where, ""), **{r: swap.body(r) for r in swap.arrived()}}
    mine = {f.name: f for f in call.fields}
    for name, field in mine.items():
        who = [r for r in sorted(bodies) if field.common or r == rank or r in call.near]
        theirs = {r: next((f for f in bodies[r][1] if f.name == name), None) for r in who}
        if len({f and f.value for f in theirs.values()}) > 1:
            shown = {r: f"{f.shown if f else bodies[r][0]} at {bodies[r][2]}" for r, f in theirs.items()}
            return errors.AgreementError, dict(
                problem=f"the ranks disagree in {name}", expected="the same on every rank", next_step=field.next_step,
                actual="; ".join(f"{_ranks(rs)}: {text}" for text, rs in _groups(shown).items()))  # fmt: skip
    raise AssertionError("equal signatures have different digests")


def _fingerprint(xs) -> tuple[bytes, float]:
    """Hash of all bits, and norm, of some tensors."""
    found, square = hashlib.blake2b(digest_size=8), 0.0
    for x in xs:
        x = (_torch.plain(x.detach()).cpu() + 0).contiguous()  # + 0: both zeros are one value
        found.update(x.reshape(-1).view(torch.uint8).numpy().data)
        square += float(torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64))) ** 2
    return found.digest(), square**0.5


def _unequal_copies(call, found):
    """What is wrong where the copies of an invariant input differ: a cotangent at an adjoint, else a value or a tangent."""
    copies = {r: found[r] for r in call.copies if r in found}
    if len({head[4] for head in copies.values()}) < 2:
        return None
    norms = {r: head[5] for r, head in copies.items()}
    zero = [r for r, norm in norms.items() if norm == 0]
    what = "cotangent" if call.op.endswith(".T") else "value"
    if what == "value":
        rule = "rule 1: an invariant value is one value, stored on all its ranks"
        step = ("give parameters the same start on every rank, and the same updates; where values are meant to differ they are varying "
                "already, and F.mark_varying is not needed")  # fmt: skip
    elif zero:
        rule = (f"rule 2: every rank that holds an invariant value must use it, and equally; {_ranks(zero)} gave it the cotangent 0 "
                "(0 * loss, or a loss used on some ranks only)")  # fmt: skip
        step = "use the value on all its ranks, or F.sum_reduce it to the one rank on which it is used"
    else:
        rule = ("rule 1: combine an invariant value only with values that are equal on all its ranks (or rule 3: agree on loss scales "
                "first)")  # fmt: skip
        step = "apply F.mark_varying to the invariant value before it meets a value that differs by rank"
    said = "; ".join(f"{_ranks(rs)}: norm {norm}" for norm, rs in _groups({r: f"{n:.17g}" for r, n in norms.items()}).items())
    if len(set(norms.values())) == 1:
        said += ", but other entries"
    return errors.InvariantError, dict(problem=f"the copies of an invariant {what} differ, against {rule}",
                                       expected="bitwise equal copies", actual=said, next_step=step)  # fmt: skip


def _groups(values: dict) -> dict:
    """{value: ranks that have it}."""
    groups: dict = {}
    for r, value in sorted(values.items()):
        groups.setdefault(value, []).append(r)
    return groups


def _ranks(ranks) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
