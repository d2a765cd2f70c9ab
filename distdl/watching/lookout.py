"""The lookout: what a rank does that has waited long for a message of a box plan. No checking is needed for it.

Both ends of a pair count the movements in which they exchange anything, and a message's tag says its number and some
bits of the plan. A rank that has waited for :attr:`Lookout.patience` looks for messages that it should have expected by
now, and did not: of the same number but another plan, or of one before; and tells those whose messages it misses what
it has made with them. Two ranks that differ tell each other what they have called, all ranks of the world hear of it,
and each raises the same error as soon as it waits. After such an error all numbers begin anew, in another *era*, so
that what is still on its way disturbs nobody.

A local error is a movement that its rank has *given up*. Where the map is known it counts with the peers that it has
there, as on their side; else once with every rank of the call. They hear of it at once, and raise when they miss that
rank's message; who misses none has what it needs, and goes on.

Why no rank waits for ever, and all are together again. Alarms of one rank arrive in order, those of several in any:

1. *Eras end one by one.* A rank leaves an era only by raising, and only by an ``error`` of that very era: its own, of
   which it tells all ranks, or another's. An alarm of a later era says that such an error is on its way, and is kept
   until that has come. So every rank that waits in an era which has ended raises once in it, whatever comes first.
2. *Who raises owes nothing.* It raises while it waits: its own messages of that movement are out.
3. *A movement given up by a known map leaves all numbers right*: on both sides it counts with the same ranks. So does
   any that all ranks of the call have given up. Nothing else is then lost or late.
4. *Every error that is not one of all ranks of its call leaves doubt*: its rank may have left more than that call;
   nobody may know how many movements were left out; an era may have ended while some ranks were a call further than
   others. Ranks in doubt wait no longer than :attr:`Lookout.doubt`, and then the era ends again: an error, but no hang.
5. *An agreement of all ranks ends all doubt*: they are at one place of the program, and begin an era together
   (:meth:`Lookout.align`). So does a program that leaves the same block on every rank by the first error.
6. *No message of an era is taken for one of another*: its era is in the tag, and what is left of earlier ones is thrown
   away before the same tags come again.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from typing import Any

from ..calls import called
from ..engine.transport import Call, Transport
from ..errors import AgreementError
from ..signature import Left, gave_up

_KEPT = 16  # calls remembered for each peer
_NOWHERE: tuple[str, dict] = ("elsewhere", {})  # where a rank was that one has had nothing to do with


def tag_bits(most: int) -> tuple[int, int, int]:
    """How many bits of a tag say the era, the number and the plan; ``most``: the largest tag that the engine has."""
    total = min(most + 1, 2**30).bit_length() - 1
    plan, era = total // 2, 3 if total >= 20 else 2
    return era, total - plan - era, plan


class Lookout:
    """The numbers and eras of one rank, and its alarms. ``numbers[peer]`` counts in steps of :attr:`step`, a tag's
    unit; half a step after a number stands what was given up between that movement and the next."""

    patience = 5.0  # seconds until a rank looks for messages that it did not expect,
    interval = 0.25  # between two looks at the side channel,
    answer = 3.0  # for another rank to say what it has called,
    doubt = 50.0  # and to come, once an error has left this rank in doubt

    def __init__(self, host: Transport, side, board):
        self.host, self.side, self.board, self.rank, self.size = host, side, board, host.rank, host.size
        eras, counts, plans = tag_bits(host.tags)
        self.step, self.eras, self.shift = 1 << plans, 1 << eras, plans + counts
        self.codes, self.wrap = self.step - 1, (1 << self.shift) - self.step
        self.inbox: list = []  # (rank, kind, era, ...): alarms that nobody has acted upon
        self.compared = 0.0  # when this rank has last told what it has made
        self.before: dict[int, tuple] = {}  # what _mine said of each peer when the last era ended
        self._begin(0)

    def _begin(self, era: int) -> None:
        self.era, self.mark = era, era % self.eras << self.shift
        self.numbers: dict[int, int] = defaultdict(int)
        self.recent: dict[int, deque] = defaultdict(lambda: deque(maxlen=_KEPT))
        self.given_up: dict[int, set] = defaultdict(set)  # movements whose messages nobody takes any more
        self.gaps: dict[int, list] = defaultdict(list)  # (place, how) of what a peer has given up
        self.doubts: dict[tuple, dict] = {}  # {(peer, place): parts of the error because of which}: see 4. above
        for peer in range(self.size):
            self._oldest(peer)

    def look(self, call: Call, mark: int, waited: float, missing: list[int]) -> None:
        """This rank has waited for ``call``, begun in the era of ``mark``; messages of the ranks ``missing`` are not
        here. Raises AgreementError where ranks are in different calls, or a peer has given this one up."""
        self.board.missing = missing
        self._hear()
        late = waited >= self.patience
        if mark >> self.shift != self.era % self.eras:
            if late:
                self._error(self._in_an_era_before(call))
            return
        for peer in missing:
            self._gaps(call, peer)
        if late:
            for peer in call.peers:
                self._probe(peer)
            self._compare_with(missing)
        if waited >= self.doubt and missing:
            for parts in self.doubts.values():
                self._leave(parts, self.size)

    def local_error(self, ranks, left: Left, peers=None) -> None:
        """This rank gives up a call over ``ranks``; all of them have begun, or will begin, the same one. ``peers``:
        those with whom it would have exchanged anything, where that is known."""
        for r in ranks:
            if r == self.rank:
                continue
            counts = peers is None or r in peers
            if counts:
                self.numbers[r] += self.step
                self.recent[r].append(Call(0, (), *left))
            place = self.numbers[r] + (0 if counts else self.step // 2)
            self.given_up[r].add(place)
            if any(gap[0] == place for gap in self.gaps[r]):  # that rank has too
                self.doubts.pop((r, place), None)
            else:
                self.doubts[r, place] = self._mine_left(left)
            self._send(r, "gave up", place, left)

    def align(self, era: int) -> None:
        """All ranks of the world have agreed on something, and begin this era together."""
        self._begin(era)

    # ------------------------------------------------------------ alarms

    def _send(self, peer, kind, *what, era=None) -> None:
        self.side.alarm(peer, pickle.dumps((kind, self.era if era is None else era, *what)))

    def _receive(self) -> None:
        self.inbox += [(source, *pickle.loads(data)) for source, data in self.side.alarms()]

    def _hear(self) -> None:
        """Act upon what others have said in this era and before; see 1. above."""
        self._receive()
        for one in list(self.inbox):
            source, kind, era, *what = one
            if era > self.era:
                continue
            self.inbox.remove(one)
            if era < self.era:
                if kind == "asked":
                    self._send(source, "answer", what[0], *self.before.get(source, _NOWHERE), era=era)
            elif kind == "error":
                self._leave(what[0])
            elif kind == "asked":
                self._answer(source, what)
            elif kind == "gave up":
                self._peer_gave_up(source, *what)
            elif kind == "made":
                mine, theirs = self._codes(source), what[0]
                apart = [n for n in mine.keys() & theirs.keys() if mine[n] != theirs[n] and mine[n] and theirs[n]]
                if apart:
                    self._found(source, min(apart))

    def _peer_gave_up(self, source: int, place: int, left: Left) -> None:
        if place in self.given_up[source]:  # this rank has too
            self.doubts.pop((source, place), None)
        else:
            self.gaps[source].append((place, left))
            self.doubts[source, place] = self._left(source, left)

    def _mine(self, peer):
        """(Where this rank is, {number: (operator, partitions or error)} of its last calls with ``peer``)."""
        calls, last = self.recent[peer], self.numbers[peer]
        history = {last - self.step * i: (c.op, c.partitions) for i, c in enumerate(reversed(calls))}
        now = called()
        return f"{now.name} at {now.line}" if now.name else now.line, history

    def _codes(self, peer) -> dict[int, int]:
        """{number: code} of the last calls with ``peer``; 0 where one was given up."""
        return {self.numbers[peer] - self.step * i: c.code for i, c in enumerate(reversed(self.recent[peer]))}

    def _compare_with(self, peers: list[int]) -> None:
        """Tell ``peers``, from time to time, which movements this rank has made with them: of one that sends nothing to
        this rank, or to which it sends nothing, there may be no message that tells."""
        if time.monotonic() >= self.compared + self.patience:
            self.compared = time.monotonic()
            for peer in peers:
                self._send(peer, "made", self._codes(peer))

    def _answer(self, source, theirs) -> None:
        mine, (number, *theirs) = self._mine(source), theirs
        self._send(source, "answer", number, *mine)
        self._leave(self._in_words({source: tuple(theirs), self.rank: mine}, number))

    # ------------------------------------------------------------ movements given up, and a new era

    def _gaps(self, call: Call, peer: int) -> None:
        """Raise where ``peer``, whose message is missing, has given up this call."""
        for gap in list(self.gaps[peer]):
            place, left = gap
            if place <= self.numbers[peer]:
                self.gaps[peer].remove(gap)
            if place == self.numbers[peer]:
                for other in call.peers:
                    self.given_up[other].add(self.numbers[other])
                self._error(self._left(peer, left))

    def _left(self, peer, left: Left):
        parts = gave_up(peer, left)
        return {**parts, "actual": f"{parts['actual']}; rank {self.rank}: in {self._mine(peer)[0]}"}

    def _mine_left(self, left: Left):
        """The parts of the error where others do not come after an error of this rank's own."""
        return {**gave_up(self.rank, left), "problem": f"rank {self.rank} waits in vain since an error of its own"}

    def _in_an_era_before(self, call):
        """The parts of the error where this rank waits for what it began before the last error (F.start)."""
        return dict(
            problem="this movement was begun before an error that this rank has raised since",
            op=call.op,
            partitions=call.partitions,
            expected="the messages of its other ranks",
            actual=f"none, in {called().line}",
            next_step="begin it again, on all its ranks",
        )

    def _leave(self, parts: dict, tell: int = 0) -> None:
        """Tell ranks 0 to ``tell`` that this era has ended, and raise, in the next one."""
        for r in range(tell):
            if r != self.rank:
                self._send(r, "error", parts)
        self.before = {peer: self._mine(peer) for peer in list(self.recent)}
        self._begin(self.era + 1)
        self.doubts = {(): parts}
        self._error(parts)

    # ------------------------------------------------------------ messages that should not be there

    def _oldest(self, peer: int) -> int | None:
        """The tag of ``peer``'s first message that nobody expects; those of earlier eras are thrown away."""
        while (tag := self.host.peek(peer)) is not None:
            age = (self.era - (tag >> self.shift)) % self.eras
            if age == 0 or age > self.eras // 2:
                return tag
            self.host.discard(peer, tag)
        return None

    def _probe(self, peer: int) -> None:
        while (tag := self._oldest(peer)) is not None:
            number = self.numbers[peer] - ((self.numbers[peer] - (tag & self.wrap)) & self.wrap)
            if tag >> self.shift != self.era % self.eras:
                return  # of an era to come: its alarm is on the way
            if number not in self.given_up[peer]:
                if self.numbers[peer] - number <= self.wrap // 2:  # else this rank is late, and will come to it
                    self._found(peer, number)
                return
            self.host.discard(peer, tag)

    def _found(self, peer: int, number: int) -> None:
        mine, theirs = self._mine(peer), ()
        self._send(peer, "asked", number, *mine)
        until = time.monotonic() + self.answer
        while not theirs and time.monotonic() < until:
            time.sleep(0.001)
            self._receive()
            for source, kind, era, *what in self.inbox:
                if era == self.era and kind == "error":  # some other rank was first
                    self._leave(what[0])
                if era == self.era and source == peer and kind in ("asked", "answer"):
                    theirs = tuple(what)
        other, where, calls = theirs or (number, "a place unknown: it does not answer", {})
        self._leave(self._in_words({peer: (where, calls), self.rank: mine}, min(number, other)), self.size)

    def _in_words(self, told: dict, number: int) -> dict[str, Any]:
        """An error's parts, from {rank: what :meth:`_mine` says there} of two ranks: their calls of this number, or
        else the first ones that differ."""
        told = dict(sorted(told.items()))
        (_, first), (_, second) = told.values()
        apart = [n for n in sorted(set(first) & set(second)) if first[n] != second[n]]
        if apart and number not in apart:
            number = apart[0]
        calls = {r: history.get(number) for r, (_, history) in told.items()}
        op, partitions = next((call for call in calls.values() if call), ("a movement", ""))
        said = [
            f"rank {r}: {f'{call[0]} over {call[1]}' if call else 'another call'}, now in {where}"
            for (r, (where, _)), call in zip(told.items(), calls.values())
        ]
        return dict(
            problem="the ranks are in different calls",
            op=op,
            partitions=partitions,
            expected="the same on every rank",
            actual="; ".join(said),
            next_step="make the same calls in the same order on every rank, also after an error "
            "that one rank has caught; dd.checking() compares before each call, and says more",
        )

    def _error(self, parts: dict) -> None:
        raise AgreementError(
            parts["problem"],
            op=parts["op"],
            partitions=parts.get("partitions"),
            expected=parts["expected"],
            actual=parts["actual"],
            next_step=parts["next_step"],
            rank=self.rank,
        )
