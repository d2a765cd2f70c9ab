"""The lookout: what a rank does that has waited long for a message of a box plan. No checking is needed for it.

Both ends of a pair count the movements in which they exchange anything, and a message's tag says its number and some
bits of the plan. A rank that has waited for :attr:`Lookout.patience` looks for messages that it should have expected by
now, and did not: of the same number but another plan, or of one before. Then the two ranks tell each other what they
have called, all ranks of the world hear of it, and each raises the same error as soon as it waits. After such an error
the numbers begin anew, in another *era*, so that what is still on its way disturbs nobody.

A local error is a movement that its rank has *given up*. Where the map is known, it counts with the peers that the map
has there, as it does on their side; else with every rank of the call. All of these hear of it at once, and raise when
they miss that rank's message; who misses none has what it needs, and goes on.

Why ranks are together again after an error. Alarms of one rank arrive in order, those of several ranks in any order:

1. *Eras end one by one.* A rank leaves an era only by raising, and only by an ``error`` of that very era: its own,
   which it tells to all ranks, or another's. An alarm of a later era says that such an error is on its way, so it is
   kept until that has come. So every rank that waits in an era which has ended raises once in it, whatever comes first.
2. *A rank that raises owes nothing.* It raises while it waits: its own messages of that movement are out.
3. *Numbers mean the same movement in the new era.* Of two ranks one may have been some movements ahead: it had what it
   needed, and heard of the error later. Each tells the other, when it leaves, how many it has made with it, and looks
   at that before its first movement with it in the new era (:meth:`Lookout._meet`): who is ahead begins with as high a
   number, and the other knows that these first movements are given up. Where their last calls differ, it was these two
   that disagreed, and both begin with 0.
4. *Nobody waits for a rank that will not send.* It has given up the movement, which its peers have heard of (at the end
   of an era, by 3); or it has given up more, or other ones, than they can know, as in a call of several movements: then
   its next message is another one, or none comes for as long as :attr:`Lookout.patience`, and the era ends for all.
5. *No message of an era is taken for one of another*: its era is in the tag, and what is left of earlier ones is thrown
   away before the same tags come again.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from typing import Any

from mpi4py import MPI

from ..calls import called
from ..engine.transport import Call
from ..errors import AgreementError
from ..signature import gave_up

_KEPT = 16  # calls remembered for each peer
_UNKNOWN, _GIVEN_UP = 0, -1  # codes of what was given up: some movements of a call, or this one
_NOWHERE: tuple[str, dict, int] = ("elsewhere", {}, 0)  # where a rank was that one has had nothing to do with


def tag_bits(most: int) -> tuple[int, int, int]:
    """How many bits of a tag say the era, the number and the plan; ``most``: the largest tag that this MPI has."""
    total = min(most + 1, 2**30).bit_length() - 1
    plan, era = total // 2, 3 if total >= 20 else 2
    return era, total - plan - era, plan


class _Numbers(dict):
    """{peer: number of the last movement with it}; a peer of which there is none in this era is met first."""

    def __init__(self, meet):
        self.meet = meet

    def __missing__(self, peer):
        number = self[peer] = self.meet(peer)
        return number


class Lookout:
    """The numbers and eras of one rank, and its alarms. ``numbers[peer]`` counts in steps of :attr:`step`, a tag's
    unit; half a step after a number stands what was given up between that movement and the next."""

    patience = 5.0  # seconds until a rank looks for messages that it did not expect,
    interval = 0.25  # between two looks at the side channel,
    answer = 3.0  # for another rank to say what it has called,
    meeting = 60.0  # and to come out of an era that has ended

    def __init__(self, comm, side):
        self.comm, self.side, self.rank, self.size = comm, side, comm.rank, comm.size
        eras, counts, plans = tag_bits(comm.Get_attr(MPI.TAG_UB))
        self.step, self.eras, self.shift = 1 << plans, 1 << eras, plans + counts
        self.codes, self.wrap = self.step - 1, (1 << self.shift) - self.step
        self.inbox: list = []  # (rank, kind, era, ...): alarms that nobody has acted upon
        self.before: dict[int, tuple] = {}  # what _mine said of each peer when the last era ended
        self._begin(0)

    def _begin(self, era: int) -> None:
        self.era, self.mark = era, era % self.eras << self.shift
        self.numbers = _Numbers(self._meet)
        self.start: dict[int, int] = defaultdict(int)  # with which number this rank begins,
        self.void: dict[int, int] = defaultdict(int)  # up to which one the peer has made its movements in the last era,
        self.early: dict[int, int] = defaultdict(int)  # what it has given up before they met in this era,
        self.greeted: set[int] = set()  # whom it has told where it was,
        self.met: dict[int, tuple] = {}  # who has told it the same: (number, {number: code of the call}),
        self.absent: list[int] = []  # and who has not, for too long
        self.recent: dict[int, deque] = defaultdict(lambda: deque(maxlen=_KEPT))
        self.given_up: dict[int, set] = defaultdict(set)  # movements whose messages nobody takes any more
        self.gaps: dict[int, list] = defaultdict(list)  # (number, op, text) of those that a peer has given up

    def look(self, call: Call, era: int, waited: float, awaited: set[int], missing: set[int]) -> None:
        """This rank has waited for ``call``, which it began in ``era``: for messages of the ranks ``awaited``, and
        ``missing`` are still some of these. Raises AgreementError where ranks are in different calls, or a peer has
        given this one up."""
        self._hear()
        self._heed()
        for peer in self.absent:
            self._leave(self._left(peer, call.op, "nothing is heard of it since"), self.size)
        late = waited >= self.patience
        if era < self.era:
            if late:
                self._error(self._in_an_era_before(call))
            return
        for peer in awaited:
            self._gaps(call, peer, peer in missing, late)
        if late:
            for peer in call.peers:
                self._probe(peer)

    def local_error(self, ranks, op: str, text: str, peers=None) -> None:
        """This rank gives up a call over ``ranks``; all of them have begun, or will begin, the same one. ``peers``:
        those with whom it would have exchanged anything, where that is known."""
        self._hear()
        for r in ranks:
            if r == self.rank:
                continue
            counts = self.step if peers is None or r in peers else 0
            if r in self.numbers or not self.era:
                self.numbers[r] += counts
                since = self.numbers[r] - self.start[r]
            else:
                self.early[r] += counts
                since = self.early[r]
                self._greet(r)
            if counts:
                self.recent[r].append(Call(_UNKNOWN if peers is None else _GIVEN_UP, (), op, text))
            else:
                since += self.step // 2
            self.given_up[r].add(self.start[r] + since)
            self._send(r, "gave up", since, op, text)

    # ------------------------------------------------------------ alarms

    def _send(self, peer, kind, *what, era=None) -> None:
        self.side.alarm(peer, pickle.dumps((kind, self.era if era is None else era, *what)))

    def _hear(self) -> None:
        """Take what has come; greetings of this era are answered at once, whatever this rank is in."""
        self.inbox += [(source, *pickle.loads(data)) for source, data in self.side.alarms()]
        for one in [one for one in self.inbox if one[1] == "here" and one[2] == self.era]:
            self.inbox.remove(one)
            self.met[one[0]] = one[3:]
            self._greet(one[0])

    def _heed(self) -> None:
        """Act upon what others have said, of this era and before; see 1. above."""
        for one in list(self.inbox):
            source, kind, era, *what = one
            if era > self.era:
                continue
            self.inbox.remove(one)
            if era < self.era:
                if kind == "asked":
                    self._send(source, "answer", what[0], *self.before.get(source, _NOWHERE)[:2], era=era)
            elif kind == "error":
                self._leave(what[0])
            elif kind == "asked":
                self._answer(source, what)
            elif kind == "gave up":
                self.gaps[source].append(tuple(what))

    def _mine(self, peer):
        """(Where this rank is, {number: (operator, partitions or error, code)} of its last calls with ``peer``)."""
        calls, last = self.recent[peer], self.numbers.get(peer, 0)
        history = {last - self.step * i: (c.op, c.partitions, c.code) for i, c in enumerate(reversed(calls))}
        now = called()
        return f"{now.name} at {now.line}" if now.name else now.line, history

    def _answer(self, source, theirs) -> None:
        mine, (number, *theirs) = self._mine(source), theirs
        self._send(source, "answer", number, *mine)
        self._leave(self._in_words({source: tuple(theirs), self.rank: mine}, number))

    # ------------------------------------------------------------ a new era

    def _leave(self, parts: dict, tell: int = 0) -> None:
        """Tell ranks 0 to ``tell`` that this era has ended, and raise, in the next one."""
        for r in range(tell):
            if r != self.rank:
                self._send(r, "error", parts)
        self.before = {peer: (*self._mine(peer), number) for peer, number in self.numbers.items()}
        self._begin(self.era + 1)
        for peer in self.before:
            self._greet(peer)
        for peer in range(self.size):
            self._oldest(peer)
        self._error(parts)

    def _greet(self, peer) -> None:
        """Tell ``peer``, once in this era, how far this rank had come with it in the last one."""
        if peer not in self.greeted:
            self.greeted.add(peer)
            _, history, number = self.before.get(peer, _NOWHERE)
            self._send(peer, "here", number, {n: code for n, (_, _, code) in history.items()})

    def _meet(self, peer) -> int:
        """The number with which this rank begins in this era; see 3. above."""
        if self.era:
            self._greet(peer)
            until = time.monotonic() + self.meeting
            while peer not in self.met:
                self._hear()
                if any(kind == "error" and era == self.era for _, kind, era, *_ in self.inbox):
                    return 0  # this era has ended too: said when this rank waits
                if time.monotonic() > until:
                    self.absent.append(peer)
                    return 0
                time.sleep(0.0005)
            _, history, mine = self.before.get(peer, _NOWHERE)
            theirs, codes = self.met[peer]
            pairs = [(code, codes[n]) for n, (_, _, code) in history.items() if n in codes]
            known = _UNKNOWN not in {code for _, _, code in history.values()} | {*codes.values()}
            same = known and all(a == b or _GIVEN_UP in (a, b) for a, b in pairs)
            ahead = mine - theirs if same else 0
            self.start[peer], self.void[peer] = max(0, ahead), max(0, -ahead)
        return self.start[peer] + self.early.pop(peer, 0)

    def _gaps(self, call: Call, peer: int, missing: bool, late: bool) -> None:
        """Raise where ``peer`` has given up this call, or what it has given up is not understood; see 4. above."""
        number = self.numbers[peer]
        if missing and number <= self.void[peer]:
            text = "by the error with which it left the calls before, of which it heard in this one"
            self._given_up(call, peer, call.op, text)
        for gap in list(self.gaps[peer]):
            since, op, text = gap
            at = self.void[peer] + since
            if at in self.given_up[peer] or (at < number and not missing):
                self.gaps[peer].remove(gap)
            elif missing and at == number:
                self.gaps[peer].remove(gap)
                self._given_up(call, peer, op, text)
            elif late and at < number:
                self._leave(self._left(peer, op, text), self.size)

    def _left(self, peer, op, text):
        parts = gave_up(peer, op, text)
        return {**parts, "actual": f"{parts['actual']}; rank {self.rank}: in {self._mine(peer)[0]}"}

    def _in_an_era_before(self, call):
        """The parts of the error where this rank waits for what it began before the last error (F.start)."""
        return dict(
            problem="this movement was begun before an error that this rank has raised since",
            op=call.op,
            partitions=call.partitions,
            expected="the messages of its other ranks",
            actual=f"none, in {self._mine(self.rank)[0]}",
            next_step="begin it again, on all its ranks",
        )

    def _given_up(self, call, source, op, text):
        for peer in call.peers:
            self.given_up[peer].add(self.numbers[peer])
        self._error(self._left(source, op, text))

    # ------------------------------------------------------------ messages that should not be there

    def _oldest(self, peer: int) -> int | None:
        """The tag of ``peer``'s first message that nobody expects; those of earlier eras are thrown away."""
        status = MPI.Status()
        while self.comm.Iprobe(peer, MPI.ANY_TAG, status):
            tag = status.Get_tag()
            age = (self.era - (tag >> self.shift)) % self.eras
            if age == 0 or age > self.eras // 2:
                return tag
            self._drop(peer, tag)
        return None

    def _drop(self, peer: int, tag: int) -> None:
        status = MPI.Status()
        self.comm.Probe(peer, tag, status)
        scrap = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv((scrap, MPI.BYTE), peer, tag)

    def _probe(self, peer: int) -> None:
        while (tag := self._oldest(peer)) is not None:
            number = self.numbers[peer] - ((self.numbers[peer] - (tag & self.wrap)) & self.wrap)
            if tag >> self.shift != self.era % self.eras:
                return  # of an era to come: its alarm is on the way
            if number not in self.given_up[peer]:
                if self.numbers[peer] - number <= self.wrap // 2:  # else this rank is late, and will come to it
                    self._found(peer, number)
                return
            self._drop(peer, tag)

    def _found(self, peer: int, number: int) -> None:
        mine, theirs = self._mine(peer), ()
        self._send(peer, "asked", number, *mine)
        until = time.monotonic() + self.answer
        while not theirs and time.monotonic() < until:
            self._hear()
            for one in self.inbox:
                source, kind, era, *what = one
                if era == self.era and kind == "error":  # some other rank was first
                    self._leave(what[0])
                if era == self.era and source == peer and kind in ("asked", "answer"):
                    theirs = tuple(what)
            time.sleep(0.001)
        other, where, calls = theirs or (number, "a place unknown: it does not answer", {})
        self._leave(self._in_words({peer: (where, calls), self.rank: mine}, min(number, other)), self.size)

    def _in_words(self, told: dict, number: int) -> dict[str, Any]:
        """An error's parts, from {rank: what :meth:`_mine` says there} of two ranks: their calls of this number, or
        else the first ones that differ."""
        told = dict(sorted(told.items()))
        (_, first), (_, second) = told.values()
        apart = [n for n in sorted(set(first) & set(second)) if first[n][:2] != second[n][:2]]
        if apart and number not in apart:
            number = apart[0]
        calls = {r: history.get(number) for r, (_, history) in told.items()}
        op, partitions = next((call[:2] for call in calls.values() if call), ("a movement", ""))
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
