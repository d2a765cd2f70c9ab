"""The first use of a world whose engine starts on all ranks together: those that wait there say who is missing."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from .. import errors
from ..calls import user_line
from ..engine import transport as _transport
from ..failure import Roll, end_job, reports
from ..signature import names
from .observer import asked_for, default_timeout
from .watchdog import time_limit

_LATE = 10.0  # seconds after which a rank that waits at the first use says for whom
_uses: Counter = Counter()  # by name, worlds that this process has begun to make
_given_up: dict = {}  # by name, the start of a first use that was given up: the next try goes on with it


class Arrival(Protocol):
    """The start of an engine that is collective. ``places``: the numbers of its ranks in the job; -1 elsewhere."""

    rank: int
    size: int
    places: list[int]

    def complete(self) -> bool:
        """Whether all ranks are here."""

    def job(self) -> tuple[int, int]:
        """As of an engine."""

    def abort(self, code: int = 1, cause: str = "") -> None:
        """As of an engine."""


def meet(begin: Callable[[], Arrival], name: str) -> None:
    """Wait until every rank is at the first use of the world ``name``, which :func:`begin` begins. After 10 s one that
    waits says who is missing.

    Raises:
        AbsenceError: under checking, after its time limit. The watchdog ends the job after its own.
    """
    start = _given_up.pop(name, None) or begin()
    observer = _transport.observer
    limit = observer.timeout if observer is not None else default_timeout() if asked_for() else None
    watchdog = time_limit()
    began, spins, said = time.monotonic(), 0, False
    with _attendance(start, name) as missing:
        while not start.complete():
            waited, spins = time.monotonic() - began, spins + 1
            if spins < 1000:
                os.sched_yield()
                continue
            time.sleep(0.001 if waited < 1 else 0.01)
            over, stuck = limit is not None and waited > limit, 0 < watchdog < waited
            if not (over or stuck or (waited > _LATE and not said)):
                continue
            absent, here, there = missing()
            problem = (
                f"{absent} did not come to the first use of distdl{'' if name == 'default' else f' (world {name!r})'}"
            )
            told = f"{here} waited {waited:.0f} s at {user_line()}"
            step = "the first movement, or dd.world(), is collective: make it on every rank of its communicator"
            if over:
                _given_up[name] = start
                raise errors.AbsenceError(
                    problem,
                    op="World",
                    expected=f"all {start.size} ranks",
                    actual=told,
                    rank=start.rank,
                    next_step=step,
                )
            if stuck:
                end_job(start, f"distdl watchdog: rank {start.rank} of {start.size}: {problem}; {told}; {step}")
            if there and start.rank == there[0]:
                print(f"distdl: {problem}; {told}; {step}", file=sys.stderr, flush=True)
            said = True


@contextlib.contextmanager
def _attendance(start: Arrival, name: str):
    """Sign a roll of those that are at this first use, on this machine; yields a function that reads it: who is
    missing, who is here (as text), and the ranks that are here. Without a launcher of ours it is a file in shared
    memory, named after what the launcher tells its ranks, or after their parent."""
    _uses[name] += 1
    step = [os.environ[word] for word in ("SLURM_JOB_ID", "SLURM_STEP_ID") if word in os.environ]
    job = os.environ.get("PMIX_NAMESPACE") or "-".join([*step, str(os.getppid())])
    words = re.sub(r"[^\w.@-]", "_", f"distdl-first-{os.getuid()}-{job}-{name}-{_uses[name]}")
    path = os.path.join(
        reports() or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()), words[:200]
    )
    places = start.places
    roll = None
    with contextlib.suppress(OSError):  # no folder to write to, or somebody else's file: nobody is named
        roll = Roll(path, make=True)
        roll.sign(places[start.rank], "here")

    def missing():
        if roll is None:
            return "not all ranks", names([start.rank]), [start.rank]
        there = [r for r, place in enumerate(places) if r == start.rank or (place >= 0 and roll.runs(place))]
        absent = [r for r in range(start.size) if r not in there]
        return names(absent) if absent else "a rank", names(there), there

    try:
        yield missing
    finally:
        if roll is not None:
            roll.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
