"""Messages between two ranks by gloo.

What gloo does decides what is done here. It tells nobody how long a message was (a shorter one passes in silence, a
longer one ends the process); what one waits for can be waited for once, without a limit, and cannot be taken back. So
every message begins with a slot of one size, in memory of the engine's own: its length, its number, and what there is
room for; the rest is received when its length is known. Who waits looks at that memory. Waits that may never end are
made by threads of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ..._distributed import unrecorded
from ...errors import TransportError
from ..transport import Call, another_length
from .slots import HEAD, Slot, tensor_at
from .workers import Workers

ROOM, _LITTLE = 2**18, 2**12  # bytes for which a slot has room, after its head
_BATCH, _HELD = 32, 2**22  # sent slots, and bytes of them, that nobody has asked about: more go to a thread
REST = 2**29  # bit of a tag: what a slot had no room for
_SPINS, _SLOW = 1000, 1.0  # polls before a rank that waits sleeps; seconds until threads wait for its messages
NOTED = 64  # messages of which a rank remembers the tags

Look = Callable[[float, list[int]], None]  # is told how long a rank has waited, and for whom; may raise


class Receive:
    """A message that this rank waits for.

    ``expected``: its bytes, for memory at ``address``; ``None``: any number, for memory of its own. ``number``: of its
    movement, the same on both ends and never again; ``None``: any. ``begun``: its beginning was waited for; ``opened``:
    and its rest asked for; ``threaded``: by a thread, which is ``over``; ``eager``: the thread asks for the rest.
    """

    __slots__ = (
        "address", "begun", "eager", "error", "expected", "memory", "number", "opened", "over", "own", "peer", "rest",
        "slot", "tag", "threaded", "wanted", "work",
    )  # fmt: skip

    def __init__(self, peer, tag, number, slot, work, address=0, expected=None):
        self.peer, self.tag, self.number, self.slot, self.work = peer, tag, number, slot, work
        self.address, self.expected, self.own, self.memory, self.error = address, expected, None, None, None
        self.rest: deque = deque()
        self.begun = self.opened = self.threaded = self.over = self.eager = False
        self.wanted = True

    def here(self) -> bool:
        """Whether its beginning has come, or never will."""
        return self.over if self.threaded else self.slot.words[0] != 0

    @property
    def sent(self) -> int:
        """How many bytes were sent."""
        return self.slot.words[0] - 1

    def data(self) -> bytes:
        """What has come, where any number of bytes may."""
        address = self.slot.address + HEAD if self.own is None else ctypes.addressof(self.own)
        return ctypes.string_at(address, self.sent)


class Sending:
    """Messages that were sent, and the memory that must outlive them: slots, or the user's."""

    def __init__(self, works, peers, slots=(), memory=None):
        self.works, self.peers, self.slots, self.memory, self.error = deque(works), peers, slots, memory, None
        self.done: threading.Event | None = None  # where a thread waits for them

    def wait(self) -> None:
        """Until all are gone; no work is waited for twice. Those to one rank fail when it is gone: the others go on."""
        failed = None
        while self.works:
            try:
                self.works.popleft().wait()
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed


class Handle:
    """A movement under way: what is not here, what has begun to come, and what is being sent out of the user's
    ``memory``."""

    __slots__ = ("call", "coming", "mark", "memory", "missing", "sending")

    def __init__(self, call: Call, mark: int = 0, memory: Any = None):
        self.call, self.mark, self.memory = call, mark, memory
        self.missing: list[Receive] = []
        self.coming: list[Receive] = []
        self.sending: list[Sending] = []


class Messages:
    """Messages of this rank by ``group``. Those of one pair of ranks and one tag keep their order."""

    chunk = 2**30

    def __init__(self, group: Any, rank: int):
        self.group, self.rank = group, rank
        self.large: list[Slot] = []  # free slots
        self.little: list[Slot] = []
        self.workers, self.stopped = Workers(), False
        self.lock = threading.RLock()  # a movement that nobody holds may be given up wherever Python frees memory
        self.owed: list[tuple[Any, int, Slot]] = []  # sent slots: (work, peer, slot)
        self.held = 0
        self.out: set[Sending] = set()
        self.stale: dict[tuple[int, int], list[Receive]] = {}  # by peer and tag, those for which nobody waits
        self.sent: dict[int, deque] = defaultdict(
            lambda: deque(maxlen=NOTED)
        )  # by peer, (number, tag) of the last ones
        self.unread: dict[int, float] = {}  # and since when the peer cannot read that list
        self.counts: dict[int, int] = defaultdict(int)  # sent to each peer
        self.asked: dict[int, set] = defaultdict(set)  # by peer, receives that have not begun to come,
        self.came: dict[int, deque] = defaultdict(lambda: deque(maxlen=4 * NOTED))  # and numbers of those that have

    # ------------------------------------------------------------ out

    def send(self, peer: int, tag: int, number: int, address: int, nbytes: int, memory=None) -> Sending | None:
        """Send; what does not fit into a slot is sent from where it is, by a :class:`Sending`."""
        inside = nbytes if nbytes <= ROOM else 0
        slots, room = (self.little, _LITTLE) if inside <= _LITTLE else (self.large, ROOM)
        slot = slots.pop() if slots else Slot(room)
        if tag < REST:  # of a movement, not of an agreement
            self.counts[peer] += 1
            self.sent[peer].append((self.counts[peer], tag))
            self.unread[peer] = time.monotonic()
        slot.words[0], slot.words[1], slot.words[2] = nbytes + 1, number, self.counts[peer]
        if inside:
            ctypes.memmove(slot.address + HEAD, address, inside)
        self.owed.append((unrecorded(self.group.send, slot.first(inside), peer, tag), peer, slot))
        self.held += inside
        if len(self.owed) >= _BATCH or self.held >= _HELD:
            self.hand_over()
        if inside == nbytes:
            return None
        return Sending(
            [unrecorded(self.group.send, [part], peer, tag | REST) for part in self._parts(address, nbytes)],
            [peer],
            memory=memory,
        )

    def _parts(self, address, nbytes):
        return [tensor_at(address + at, min(self.chunk, nbytes - at)) for at in range(0, nbytes, self.chunk)]

    def hand_over(self) -> None:
        """A thread waits for what was sent, and gives the slots back."""
        if self.owed:
            works, peers, slots = zip(*self.owed)
            self.owed, self.held = [], 0
            self.let_go(Sending(works, peers, slots))

    def let_go(self, one: Sending) -> None:
        """A thread waits until they are gone."""

        def wait():
            try:
                one.wait()
            except RuntimeError as error:  # the peer is gone: for whoever waits, and the next message to it fails too
                one.error = error
            else:
                for slot in one.slots:
                    (self.little if slot.room == _LITTLE else self.large).append(slot)
            one.memory, one.slots = None, ()
            self.out.discard(one)
            one.done.set()

        if one.done is None:
            one.done = threading.Event()
            self.out.add(one)
            self.workers.run(wait)

    # ------------------------------------------------------------ in

    def receive(
        self, peer: int, tag: int, number: int | None, address: int = 0, expected: int | None = None
    ) -> Receive:
        """Begin to receive."""
        if self.stale:
            with self.lock:
                waits = self.stale.get((peer, tag))
                if waits:  # the next message of this tag goes to whoever asked first
                    one = waits[0]
                    self._known(one)
                    one.number, one.address, one.expected, one.wanted = number, address, expected, True
                    return one
        slot = self.large.pop() if self.large else Slot(ROOM)
        slot.words[0] = 0
        one = Receive(
            peer, tag, number, slot, unrecorded(self.group.recv, slot.first(ROOM), peer, tag), address, expected
        )
        self.asked[peer].add(one)
        return one

    def unexpected(self, peer: int, sent) -> int | None:
        """The tag of the first of the messages ``sent`` by ``peer``, (number, tag) each, for which nobody has asked."""
        waits = [one.tag for one in tuple(self.asked[peer])]
        for count, tag in sent:
            if count in self.came[peer]:
                continue
            if tag not in waits:
                return tag
            waits.remove(tag)
        return None

    def arrive(self, handle: Handle, look: Look | None, interval: float) -> None:
        """Wait for the beginnings of all messages; ``look`` is called each ``interval``, once the wait is long."""
        missing, coming, spins, began, due = handle.missing, handle.coming, 0, 0.0, 0.0
        while missing:
            waits = len(missing)
            for one in tuple(missing):
                if one.here():
                    missing.remove(one)
                    coming.append(one)
                    if not self._open(one):  # a message of long ago
                        one.threaded = one.over = False
                        missing.append(coming.pop())
            spins += 1
            if len(missing) < waits:
                spins = 0
            elif spins < _SPINS:
                os.sched_yield()
            else:
                now = time.monotonic()
                began = began or now
                if now >= due:
                    due = now + min(interval, _SLOW)
                    if now - began > _SLOW:
                        for one in missing:
                            self._let_wait(one)  # gloo tells only who waits that a rank is gone
                    if look is not None:
                        look(now - began, sorted({one.peer for one in missing}))
                time.sleep(min(0.001, 2e-5 + (now - began) / 16))

    def _open(self, one: Receive) -> bool:
        """Its beginning is here: receive the rest. False: it was one of another number, and another is asked for."""
        if one.error is not None:
            raise one.error
        if one.opened:
            return True
        if not one.begun:
            one.work.wait()
            one.begun = True
        if one.tag < REST:
            self.came[one.peer].append(one.slot.words[2])
        one.opened = one.number in (None, one.slot.words[1])
        if one.sent > ROOM:
            address = one.address
            if not one.opened or one.sent != one.expected:  # taken all the same, so that its sender can go on
                one.own = (ctypes.c_uint8 * one.sent)()
                address = ctypes.addressof(one.own)
            parts = self._parts(address, one.sent)
            one.rest.extend(unrecorded(self.group.recv, [part], one.peer, one.tag | REST) for part in parts)
        if one.opened:
            self.asked[one.peer].discard(one)
            return True
        self._rest(one)
        one.slot.words[0], one.begun, one.own = 0, False, None
        one.work = unrecorded(self.group.recv, one.slot.first(ROOM), one.peer, one.tag)
        return False

    def _rest(self, one: Receive) -> None:
        while one.rest:  # what is waited for is forgotten: nobody can wait for it twice
            one.rest.popleft().wait()

    def take(self, handle: Handle) -> TransportError | None:
        """Take what is coming to where it belongs; the error where a message has another length than planned."""
        wrong = None
        while handle.coming:
            one = handle.coming[-1]
            self._rest(one)
            handle.coming.pop()
            if one.sent != one.expected:
                wrong = wrong or another_length(self.rank, one.peer, one.expected, one.sent)
            elif one.sent <= ROOM:
                ctypes.memmove(one.address, one.slot.address + HEAD, one.sent)
            self.large.append(one.slot)
        return wrong

    def swap(self, data: bytes, tag: int, to, sources) -> dict[int, bytes]:
        """Send ``data``, and return what comes from ``sources``, of whatever length."""
        handle, buffer = Handle(Call(0, tuple(to))), ctypes.create_string_buffer(data, max(1, len(data)))
        handle.missing += [self.receive(peer, tag, 0) for peer in sources]
        for peer in to:
            large = self.send(peer, tag, 0, ctypes.addressof(buffer), len(data), buffer)
            if large is not None:
                self.let_go(large)
        found = {}
        try:
            self.arrive(handle, None, _SLOW)
            while handle.coming:
                one = handle.coming[-1]
                self._rest(one)
                handle.coming.pop()
                found[one.peer] = one.data()
                self.large.append(one.slot)
        except RuntimeError:
            self.abandon(handle)
            raise
        return found

    # ------------------------------------------------------------ what nobody waits for

    def abandon(self, handle: Handle) -> None:
        """Nobody waits for a movement any more: threads do, so that nobody who sends is kept."""
        if self.stopped:  # Python ends, or the world is closed: gloo forgets what is dropped before its memory is
            for waits in (handle.missing, handle.coming, handle.sending):
                waits.clear()
            return
        while handle.missing:
            one = handle.missing.pop()
            with self.lock:
                if one.eager:  # the rest may be on its way to where this movement wanted it
                    one.memory = handle.memory
                one.wanted = False
                self.stale.setdefault((one.peer, one.tag), []).append(one)
                over = one.over
            if over:
                self.workers.run(partial(self._unwanted, one))
            else:
                self._let_wait(one)
        while handle.coming:
            self.workers.run(partial(self._drain, handle.coming.pop(), handle.memory))
        while handle.sending:
            self.let_go(handle.sending.pop())

    def go_on(self, handle: Handle) -> None:
        """This rank does something else: threads ask for what is large as soon as it begins to come."""
        for one in handle.missing:
            if one.expected > ROOM and not one.threaded:
                one.eager, one.memory = True, handle.memory
                self._let_wait(one)

    def discard(self, peer: int, tag: int) -> None:
        """Take a message of that tag, and forget it."""
        handle = Handle(Call(0, (peer,)))
        handle.missing.append(self.receive(peer, tag, None))
        self.abandon(handle)

    def _let_wait(self, one: Receive) -> None:
        if not one.threaded:
            one.threaded = True
            self.workers.run(partial(self._until_here, one))

    def _until_here(self, one: Receive) -> None:
        try:
            one.work.wait()
            one.begun = True
            while one.eager and one.wanted and not self._open(one):
                one.work.wait()
                one.begun = True
        except RuntimeError as error:
            one.error = error
        with self.lock:
            one.over = True
            wanted = one.wanted
        if not wanted:
            self._unwanted(one)

    def _unwanted(self, one: Receive) -> None:
        with self.lock:
            if one.wanted:  # by another movement, since
                return
            if not one.error and one.number not in (None, one.slot.words[1]):
                return  # of a later one with the same tag, which finds it
            self._known(one)
        if not one.opened:
            one.expected = None
        self._drain(one, one.memory)

    def _known(self, one: Receive) -> None:
        """It is no longer stale."""
        waits = self.stale[one.peer, one.tag]
        waits.remove(one)
        if not waits:
            del self.stale[one.peer, one.tag]

    def _drain(self, one: Receive, memory) -> None:
        """Receive what nobody wants; ``memory`` is where its rest may go."""
        if one.error is None:
            with contextlib.suppress(RuntimeError):  # the sender is gone: so is the message
                self._open(one)
                self._rest(one)
                self.large.append(one.slot)
        one.work = None
        one.rest.clear()  # gloo writes to memory as long as there is a work of it
        one.memory = None
        del memory

    def stop(self) -> None:
        """End all threads, and start none again."""
        self.stopped = True
        if self.workers.busy():
            # What is left never ends. gloo closes all its connections when a wait has a limit: every wait then ends,
            # but one in the middle of a message, which nothing ever ends. A connection that is closed takes no wait.
            for peer in {**self.counts, **self.asked}:
                with contextlib.suppress(RuntimeError):
                    last = self.group.recv(Slot(8).first(8), peer, REST - 1)
                    last.wait(datetime.timedelta(milliseconds=1))
        self.workers.stop()
        self.stale.clear()


def told(error: RuntimeError) -> str:
    """gloo's own words, in one line."""
    return " ".join(str(error).split())
