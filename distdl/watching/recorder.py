"""What a rank moves, and when: an observer that notes every movement, what it sends and receives, and its waits.

It stands in the place of the checking observer, asks that one first where there is one, and wraps each movement's
engine. :mod:`distdl.timeline` puts the notes of all ranks together.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from operator import index
from typing import Any

from ..calls import called

clock = time.perf_counter_ns


@dataclass
class Event:
    """One movement, or one small agreement, of this rank; times in ns of its own clock.

    Attributes:
        name, call, line: the movement's; the public function and its line in the user's program.
        posted: when its messages were handed over.
        end: when its result was there; ``None``: begun by ``F.start``, which returned at ``paused``.
        waits: (begin, end) of every wait for messages, and of every collective of the engine.
        sends, receives: (peer, bytes) in the order of the messages.
        collectives: (kind, ranks, bytes of one rank's share).
    """

    name: str
    call: str
    line: str
    world: str
    thread: int
    begin: int
    posted: int | None = None
    paused: int | None = None
    end: int | None = None
    waits: list[tuple[int, int]] = field(default_factory=list)
    sends: list[tuple[int, int]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)
    collectives: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)


class Recorded:
    """The engine ``inner`` during one movement; what is not noted is the engine's own."""

    def __init__(self, inner: Any, event: Event) -> None:
        self.inner, self.event = inner, event

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def post(self, sends, receives, call=None, memory=None):
        event = self.event
        event.sends += [(peer, index(n)) for peer, _, n in sends]
        event.receives += [(peer, index(n)) for peer, _, n in receives]
        event.posted = clock()
        return self.inner.post(sends, receives, call, memory)

    def wait(self, handle):
        return self._waited(self.inner.wait, handle)

    def collective(self, kind, source, target, count, dtype, ranks):
        self.event.collectives.append((kind, tuple(ranks), count * dtype.itemsize))
        return self._waited(self.inner.collective, kind, source, target, count, dtype, ranks)

    def all_gather(self, data, ranks):
        self.event.collectives.append(("agree", tuple(ranks), len(data)))
        found = self._waited(self.inner.all_gather, data, ranks)
        self.ended()
        return found

    def pause(self) -> None:
        """The movement goes on while this rank does something else."""
        self.event.paused = clock()
        self.inner.pause()

    def ended(self) -> None:
        """The result is there."""
        self.event.end = clock()
        self.inner.ended()  # recorded twice, it may be

    def _waited(self, call, *args):
        begin = clock()
        try:
            return call(*args)
        finally:
            self.event.waits.append((begin, clock()))


class Recorder:
    """The observer that notes; ``inner``: the one that checks, or ``None``."""

    def __init__(self, inner: Any = None, events: list[Event] | None = None) -> None:
        self.inner, self.events = inner, [] if events is None else events
        self._tracing = False

    def over(self, inner: Any) -> Recorder:
        """The same notes while ``inner`` checks."""
        return Recorder(inner, self.events)

    @property
    def timeout(self) -> float | None:
        return None if self.inner is None else self.inner.timeout

    @property
    def tracing(self) -> bool:
        return self._tracing if self.inner is None else self.inner.tracing

    @tracing.setter
    def tracing(self, value: bool) -> None:
        self._tracing = value
        if self.inner is not None:
            self.inner.tracing = value

    def movement(self, watch, engine, steps, xs, recorded):
        """The engine for this movement, as :meth:`distdl.watching.observer.Observer.movement` gives it."""
        event = self._note(str(steps[0]), steps[0].world.name)
        if self.inner is not None:
            engine = self.inner.movement(watch, engine, steps, xs, recorded)
        return Recorded(engine, event)

    def agreement(self, watch, host, value, ranks, purpose):
        """The engine for a small all-gather."""
        event = self._note(f"agreement: {purpose}", "")
        engine = host if self.inner is None else self.inner.agreement(watch, host, value, ranks, purpose)
        return Recorded(engine, event)

    def _note(self, name, world) -> Event:
        said = called()
        event = Event(name, said.name, said.line, world, threading.get_ident(), clock())
        self.events.append(event)
        return event

    def alike(self, *args) -> None:
        if self.inner is not None:
            self.inner.alike(*args)

    def local_error(self, *args) -> bool:
        return False if self.inner is None else self.inner.local_error(*args)
