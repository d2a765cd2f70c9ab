"""Checking: before a movement its ranks compare what they are about to do, so that a disagreement is an error and not a
hang.

:class:`Checked` wraps any engine for one movement. :class:`Observer` makes it: it writes on the node's board (for those
who wait, and for the watchdog), and, where a time limit is set, first swaps a signature with every rank of the
movement: point-to-point on a communicator of its own, because a collective would itself wait for a rank that never
comes. A rank that finds a fault tells all ranks of the movement, also those that come later, and raises; they raise the
same error.

This changes neither results nor graphs. While ``distdl.engine.transport.observer`` is ``None``, a movement pays for one
comparison.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

from .. import errors
from ..calls import called, user_line
from ..engine.transport import Transport
from ..signature import (
    HEAD,
    Call,
    Field,
    Left,
    call_of,
    differs,
    disagreement,
    fingerprint,
    first_difference,
    gave_up,
    groups,
    leads,
    names,
    together,
    told_of,
    unequal,
)  # fmt: skip
from .board import INSIDE, Board
from .watch import Watch

_SPINS, _GRACE = 200, 1.0  # polls before sleeping; seconds for the other ranks, once a fault is found


def default_timeout() -> float:
    """Seconds that a rank may be late where no call says otherwise."""
    return float(os.environ.get("DISTDL_CHECK_TIMEOUT") or 60)


def asked_for() -> bool:
    """Whether the environment asks for checking (``DISTDL_CHECK=1``)."""
    return os.environ.get("DISTDL_CHECK", "0") not in ("", "0")


class Checked(Transport):
    """The engine ``inner`` during one movement: the board says while this rank waits in it, and from whom something is
    missing."""

    def __init__(self, inner: Transport, board: Board, call: str, where: str):
        self.inner, self.board, self.call, self.where = inner, board, call, where
        self.rank, self.size, self.device_types = inner.rank, inner.size, inner.device_types
        self.collectives, self.sums, self.wide = inner.collectives, inner.sums, inner.wide
        self.takes_types, self.chunk, self.tags = inner.takes_types, inner.chunk, inner.tags
        self.reach = inner.reach

    def post(self, sends, receives, call=None, memory=None):
        self._enter()  # an engine may have to reach a peer here
        try:
            return self.inner.post(sends, receives, call, memory)
        except BaseException:
            self.board.leave(completed=False)
            raise

    def abandon(self, handle, memory):
        self.inner.abandon(handle, memory)

    def pause(self):
        self.inner.pause()
        self.board.leave(completed=False)

    def wait(self, handle):
        return self._inside(self.inner.wait, handle)

    def collective(self, kind, source, target, count, dtype, ranks):
        return self._inside(self.inner.collective, kind, source, target, count, dtype, ranks)

    def all_gather(self, data, ranks):
        return self._inside(self.inner.all_gather, data, ranks)

    def _inside(self, call, *args):
        self._enter()
        try:
            found = call(*args)
        except BaseException:
            self.board.leave(completed=False)
            raise
        self.board.leave(completed=True)
        return found

    def _enter(self):
        if self.board.state != INSIDE:
            self.board.enter(self.call, self.where)

    def close(self):
        self.inner.close()


class Observer:
    """Watches the movements of this process. ``timeout``: seconds to wait for a rank; ``None``: compare nothing."""

    def __init__(self, timeout: float | None = None):
        self.timeout = timeout
        self.tracing = False  # while torch traces, values may be uninitialised memory
        self.calls: dict[Any, Call] = {}
        self.unrecorded: dict[str, dict] = {}  # by name, adjoints that some ranks will not call, and why

    def movement(self, watch: Watch | None, transport: Transport, maps, xs, recorded: bool) -> Transport:
        """The engine for this movement. Collective over its ranks, where it compares.

        Args:
            watch: the world's; ``None``: nobody is watched.
            transport: the engine that the movement uses.
            maps, xs: LinearMaps, and this rank's plain tensors with any batch axes.
            recorded: whether a graph will call the adjoint.
        """
        ranks = maps[0].ranks
        if watch is None or len(ranks) < 2 or watch.rank not in ranks:
            return transport
        said = None if self.timeout is None else called()
        key = (*maps, *((x.shape, x.dtype) for x in xs), xs[0].device.type, said and said[1:])
        call = self.calls.get(key)
        if call is None:
            if len(self.calls) > 4096:
                self.calls.clear()
            call = self.calls[key] = call_of(maps, leads(maps, xs), xs, watch.rank, said)
        return self._checked(watch, transport, call, said, maps, xs, recorded)

    def agreement(self, watch: Watch | None, host: Transport, value, ranks: tuple[int, ...], purpose: str) -> Transport:
        """The engine for a small all-gather over ``ranks``. What it carries is compared by those who asked for it."""
        if watch is None or len(ranks) < 2:
            return host
        op = f"agreement for {getattr(value, 'op', purpose)}"
        same, who = Field("the operator called", "agreement", shown=op), Field("the ranks that agree", str(ranks))
        return self._checked(watch, host, Call(op, f"ranks {ranks}", ranks, ranks, (), True, (same, who)))

    def alike(self, watch: Watch | None, P) -> None:
        """Compare a call that sends no message among the ranks of ``P``; collective over them, where this compares."""
        if self.timeout is not None and watch is not None and P.size > 1 and watch.rank in P.ranks:
            said = called()
            fields = Field("the operator called", said.name), *told_of(said)
            call = Call(said.name, str(P).splitlines()[0], P.ranks, P.ranks, (), False, fields)
            self._checked(watch, watch.host, call, said)

    def local_error(self, watch: Watch, ranks, why: Left) -> bool:
        """This rank leaves a call over ``ranks`` by an error of its own: they hear of it in place of its next
        signature, and so before any message. Whether this compares."""
        side = watch.side
        if self.timeout is None:
            return False
        parts, left = gave_up(side.rank, why), f"left by {why.text[:1000]}"
        field = Field("the operator called", left, next_step=parts["next_step"])
        call = Call(why.op, f"ranks {ranks}", ranks, (), (), True, (field,))
        for r in ranks:
            if r != side.rank:
                side.counts[r] += 1
                side.failed[r] = side.counts[r]
                side.report(r, pickle.dumps((side.counts[r], errors.AgreementError.__name__, parts)))
                head = HEAD.pack(side.counts[r], *call.digests, False, bytes(8), 0.0)
                side.stand_in(
                    r, head + call.packed + pickle.dumps(("", watch.board.done))
                )  # one message for each number
        return True

    def _checked(self, watch, transport, call, said=None, maps=(), xs=(), recorded=False):
        board = watch.board
        where = user_line() if said is None else said.line
        if self.timeout is not None or not call.waits:
            board.enter(call.text, where)
        if self.timeout is not None:
            try:
                self._compare(watch.side, board, call, where, maps, xs, recorded)
            except BaseException:
                board.leave(completed=False)
                raise
        if not call.waits:
            board.leave(completed=True)
        return Checked(transport, board, call.text, where)

    def _compare(self, side, board, call, where, maps, xs, recorded) -> None:
        others = [r for r in call.ranks if r != side.rank]
        for r in others:
            side.counts[r] += 1
        prints = fingerprint(xs) if call.copies and not self.tracing else ()
        hashed, norm = together(prints) if prints else (bytes(8), 0.0)
        mine = 0, *call.digests, recorded, hashed, norm
        body = call.packed + pickle.dumps((where, board.done, prints))
        swap = side.swap({r: HEAD.pack(side.counts[r], *mine[1:]) + body for r in others}, mine)
        problem = _reported(side) or self._wait(
            side, board, call, where, swap
        )  # one message for each number, also then
        if problem is None and call.copies:
            heads = swap.heads()
            if len({head[4] for head in heads.values()}) > 1:
                prints_of = {side.rank: prints, **{r: swap.said(r).copies_of for r in others}}
                what = "cotangent" if call.op.endswith(".T") else "value"
                problem = unequal(what, heads, {call.copies, *(swap.said(r).copies for r in others)}, prints_of)
        if problem is not None:
            self._fail(side, call, problem)
        if not maps:
            return
        if self.unrecorded:  # all came, all the same
            self.unrecorded.get(call.op, {}).pop(maps[0], None)
            self.unrecorded.get(str(maps[0].T), {}).pop(maps[0].T, None)  # what an earlier call recorded is no news
        if any(head[3] != recorded for head in swap.found.values()):
            self._note_unrecorded(maps[0], swap.heads(), {side.rank: where, **{r: swap.said(r).where for r in others}})

    def _wait(self, side, board, call, where, swap):
        """Wait until all are there and equal; returns what is wrong, or ``None``."""
        began, spins, limit, why = time.monotonic(), 0, self.timeout, ""
        while True:
            complete = swap.poll()
            if complete or spins > _SPINS:
                heard = _reported(side)
                if heard is not None:
                    return heard
                wrong = any(head[1:3] != call.digests for head in swap.found.values()) and differs(
                    call, swap, side.rank
                )
                if complete:
                    return self._disagreement(call, swap, side.rank, where) if wrong else None
                waited, missing = time.monotonic() - began, swap.missing()
                board.missing = missing
                if wrong:  # the others may still come, and tell more
                    limit = min(limit, waited + _GRACE)
                elif any((entry := board.read(r)) and entry.state == "left" for r in missing):
                    limit, why = min(limit, waited + _GRACE / 4), "has left the program"
                if waited >= limit:
                    if wrong:
                        return self._disagreement(call, swap, side.rank, where)
                    if not missing:  # all are here; whoever has not taken this rank's message gets it later
                        return None
                    return self._absence(call, swap, board, where, why)
                time.sleep(0.001 if waited < 1 else 0.01)
            elif spins > 20:
                os.sched_yield()
            spins += 1

    def _absence(self, call, swap, board, where, why):
        absent = swap.missing()
        here = {board.rank: where, **{r: swap.said(r).where for r in swap.here()}}
        said = []
        for r in absent:
            entry = board.read(r)
            last = swap.said(r)  # of its message before this one
            said.append(
                f"{names([r])} {entry}"
                if entry
                else f"{names([r])} {board.unread(r)}, and was last "
                f"{f'in {last.op} at {last.where}' if last else 'nowhere'}"
            )
        said += [
            f"{names(rs)} {'is' if len(rs) == 1 else 'are'} in {call.op} at {place}"
            for place, rs in groups(here).items()
        ]
        said += self._hints([call.op])
        verb = why or f"did not come within {self.timeout:g} s"
        if len(absent) > 1:
            verb = verb.replace("has left", "have left")
        return errors.AbsenceError, dict(
            problem=f"{names(absent)} {verb}",
            expected=f"all of {names(call.ranks)}",
            actual="; ".join(said),
            next_step="make the same movements in the same order on every rank; an output that a rank does not "
            "use needs F.tie, "
            "a rank without data F.nothing",
        )

    def _disagreement(self, call, swap, rank, where):
        """The first field in which ranks differ, and what each has; in the same words on every rank."""
        said = dict(sorted({rank: call.said(where), **{r: swap.said(r) for r in swap.here()}}.items()))
        field, shown = first_difference(said)
        first = next(iter(said.values()))
        hints = self._hints(one.op for one in said.values())
        parts = disagreement(field.name, shown, hints, field.next_step)
        return errors.AgreementError, dict(op=first.op, partitions=first.partitions, **parts)

    def _hints(self, ops):
        """Why some ranks may not come to these adjoints."""
        return list(dict.fromkeys(text for op in sorted(set(ops)) for text in self.unrecorded.get(op, {}).values()))

    def _note_unrecorded(self, A, heads, where):
        """Remember that some ranks recorded no graph for this movement: they will not come to its adjoint."""
        without, recorded = ([r for r in sorted(heads) if heads[r][3] == wanted] for wanted in (False, True))
        text = (
            f"{names(without)} recorded no graph for {A} at {where[without[0]]} (an input without requires_grad, or "
            f"torch.no_grad), {names(recorded)} did"
        )
        self.unrecorded.setdefault(str(A.T), {})[A.T] = text

    def _fail(self, side, call, problem):
        """Tell the ranks of the call, and raise."""
        kind, parts = problem
        parts = {"op": call.op, "partitions": call.partitions, **parts}
        for r in call.ranks:
            if r != side.rank:
                side.failed[r] = side.counts[r]
                side.report(r, pickle.dumps((side.counts[r], kind.__name__, parts)))
        raise kind(**{**parts, "rank": side.rank})


def _reported(side):
    """What another rank found wrong, unless this rank has raised for the same movement, or has not come to it."""
    side.told += [(peer, *pickle.loads(data)) for peer, data in side.reports()]
    for one in list(side.told):
        peer, count, kind, parts = one
        if count <= side.counts[peer]:
            side.told.remove(one)
            if count > side.failed[peer]:
                side.failed[peer] = count
                return getattr(errors, kind), parts
    return None
