"""The lookout: what a rank does that has waited long for a message of a box plan. No checking is needed for it.

Both ends of a pair count the movements in which they exchange anything, and a message's tag says its number and some
bits of the plan. A rank that has waited for :attr:`Lookout.patience` looks for messages that it should have expected by
now, and did not: of the same number but another plan, or of one before. Then the two ranks tell each other what they
have called, all ranks of the world hear of it, and each raises the same error as soon as it waits. A local error counts
as a movement that its rank has given up; the others of that call hear of it at once, and raise when they miss that
rank's message.

After such an error all numbers begin anew, in another *era*, so that what is still on its way disturbs nobody.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from typing import Any

from ..calls import called
from ..engine.transport import Call, Transport
from ..errors import AgreementError
from ..signature import gave_up

_KEPT = 16  # calls remembered for each peer


def tag_bits(most: int) -> tuple[int, int, int]:
    """How many bits of a tag say the era, the number and the plan; ``most``: the largest tag that the engine has."""
    total = min(most + 1, 2**30).bit_length() - 1
    plan, era = total // 2, 3 if total >= 20 else 2
    return era, total - plan - era, plan


class Lookout:
    """The numbers and eras of one rank, and its alarms. ``numbers[peer]`` counts in steps of :attr:`step`, a tag's
    unit."""

    patience = 5.0  # seconds until a rank looks for messages that it did not expect,
    interval = 0.25  # between two looks at the side channel,
    answer = 3.0  # and for another rank to say what it has called

    def __init__(self, host: Transport, side, board):
        self.host, self.side, self.board, self.rank, self.size = host, side, board, host.rank, host.size
        eras, counts, plans = tag_bits(host.tags)
        self.step, self.eras, self.shift = 1 << plans, 1 << eras, plans + counts
        self.codes, self.wrap = self.step - 1, (1 << self.shift) - self.step
        self.inbox: list = []  # (rank, kind, era, ...) that nobody has acted upon
        self.before: dict = {}
        self._begin(0)

    def _begin(self, era: int) -> None:
        self.era, self.mark = era, era % self.eras << self.shift
        self.numbers: dict[int, int] = defaultdict(int)
        self.recent: dict[int, deque] = defaultdict(lambda: deque(maxlen=_KEPT))
        self.failed: dict[int, int] = defaultdict(int)
        self.given_up: dict[int, set] = defaultdict(set)  # movements whose messages nobody takes any more
        self.inbox = [one for one in self.inbox if one[2] >= era]

    def look(self, call: Call, waited: float, missing: list[int]) -> None:
        """This rank has waited for ``call``, of which messages from the ranks ``missing`` are not here. Raises
        AgreementError where ranks are in different calls."""
        self.board.missing = missing
        self._read(call)
        if waited >= self.patience:
            for peer in call.peers:
                self._probe(peer)

    def local_error(self, ranks, op: str, text: str) -> None:
        """This rank gives up a call over ``ranks``; all of them have begun, or will begin, the same one."""
        self._hear()
        self.inbox = [one for one in self.inbox if one[1] != "gave up" or one[3] > self.numbers[one[0]]]
        for r in ranks:
            if r != self.rank:
                number = self.numbers[r] = self.failed[r] = self.numbers[r] + self.step
                self.given_up[r].add(number)
                self.recent[r].append(Call(0, (), op, text))
                self._send(r, "gave up", number, op, text)

    # ------------------------------------------------------------ alarms

    def _send(self, peer, kind, *what, era=None) -> None:
        self.side.alarm(peer, pickle.dumps((kind, self.era if era is None else era, *what)))

    def _hear(self) -> None:
        self.inbox += [(source, *pickle.loads(data)) for source, data in self.side.alarms()]

    def _read(self, call: Call) -> None:
        """Act upon what others have said."""
        self._hear()
        for one in list(self.inbox):
            source, kind, era, *what = one
            if kind == "gave up":
                number, op, text = what
                if era == self.era and number > self.numbers[source]:
                    continue  # this rank has not come to it
                self.inbox.remove(one)
                if era == self.era and self.failed[source] < number == self.numbers[source]:
                    self.failed[source] = number
                    for peer in call.peers:
                        self.given_up[peer].add(self.numbers[peer])
                    parts = gave_up(source, op, text)
                    self._error({**parts, "actual": f"{parts['actual']}; rank {self.rank}: in {self._mine(source)[0]}"})
            elif kind == "asked":
                self.inbox.remove(one)
                if era < self.era:
                    self._send(source, "answer", what[0], *self.before.get(source, ("elsewhere", {})), era=era)
                else:
                    self._answer(source, what)
            elif kind == "error" and era >= self.era:
                self._raise(what[0], era=era)
            elif era < self.era:
                self.inbox.remove(one)

    def _mine(self, peer):
        """(Where this rank is, {number: (operator, partitions or error)} of its last calls with ``peer``)."""
        calls, last = self.recent[peer], self.numbers[peer]
        history = {last - self.step * i: (c.op, c.partitions) for i, c in enumerate(reversed(calls))}
        now = called()
        return f"{now.name} at {now.line}" if now.name else now.line, history

    def _answer(self, source, theirs) -> None:
        mine, (number, *theirs) = self._mine(source), theirs
        self._send(source, "answer", number, *mine)
        self._raise(self._in_words({source: tuple(theirs), self.rank: mine}, number))

    # ------------------------------------------------------------ messages that should not be there

    def _probe(self, peer: int) -> None:
        while (tag := self.host.peek(peer)) is not None:
            age = (self.era - (tag >> self.shift)) % self.eras
            number = self.numbers[peer] - ((self.numbers[peer] - (tag & self.wrap)) & self.wrap)
            if age == 0 and number not in self.given_up[peer]:
                if self.numbers[peer] - number <= self.wrap // 2:  # else this rank is late, and will come to it
                    self._found(peer, number)
                return
            if age > self.eras // 2:  # of an era to come: its alarm is on the way
                return
            self.host.discard(peer, tag)

    def _found(self, peer: int, number: int) -> None:
        mine, theirs = self._mine(peer), ()
        self._send(peer, "asked", number, *mine)
        until = time.monotonic() + self.answer
        while not theirs and time.monotonic() < until:
            self._hear()
            for _, kind, era, *what in self.inbox:
                if kind == "error" and era == self.era:  # some other rank was first
                    self._raise(what[0], era=era)
            theirs = next(
                (
                    tuple(what)
                    for source, kind, era, *what in self.inbox
                    if source == peer and kind in ("asked", "answer") and era == self.era
                ),
                (),
            )
            time.sleep(0.001)
        other, where, calls = theirs or (number, "a place unknown: it does not answer", {})
        self._raise(self._in_words({peer: (where, calls), self.rank: mine}, min(number, other)), self.size)

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

    def _raise(self, parts: dict, tell: int = 0, era: int | None = None) -> None:
        """Tell ranks 0 to ``tell``, and raise, in a new era."""
        for r in range(tell):
            if r != self.rank:
                self._send(r, "error", parts)
        self.before = {peer: self._mine(peer) for peer in list(self.recent)}
        self._begin((self.era if era is None else era) + 1)
        self._error(parts)

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
