"""The watchdog: ``DISTDL_WATCHDOG_S=30`` ends a job in which a movement is stuck for longer, and says who waits for
whom.

The first use of a world is collective over its ranks: those that wait there say who is missing (:func:`meet`).

A thread of each rank looks at that rank's own entry on the board. It needs no help from the thread that is stuck (MPI
releases the interpreter while it waits), and none from other ranks: what those last did is read from the board.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter

from .. import _rank, errors
from ..calls import user_line
from ..engine import transport as _transport
from ..signature import names
from .board import INSIDE, LEFT
from .observer import Observer, default_timeout

_LATE = 10.0  # seconds after which a rank that waits at the first use says for whom
_uses: Counter = Counter()  # by name, worlds that this process has begun to make
_given_up: dict = {}  # by name, the barrier of a first use that was given up: the next try goes on with it


def watch(host) -> None:
    """Start what the environment asks for: checking (``DISTDL_CHECK=1``), the watchdog (``DISTDL_WATCHDOG_S``), or
    both."""
    limit = float(os.environ.get("DISTDL_WATCHDOG_S") or 0)
    if _transport.observer is None and os.environ.get("DISTDL_CHECK", "0") not in ("", "0"):
        _transport.observer = Observer(default_timeout())
    if limit > 0 and hasattr(host, "board"):
        if _transport.observer is None:
            _transport.observer = Observer()
        threading.Thread(target=_look, args=(host, limit), name="distdl-watchdog", daemon=True).start()


def _look(host, limit: float) -> None:
    board = host.board
    while board.state != LEFT:
        time.sleep(min(1.0, limit / 4))
        stuck = time.monotonic() - board.since
        if board.state == INSIDE and stuck > limit:
            end_job(report(host, stuck))


def report(host, stuck: float) -> str:
    """What this rank is stuck in, its Python stack, and what every other rank of the node last did."""
    board = host.board
    main = sys._current_frames().get(threading.main_thread().ident)
    stack = "".join(traceback.format_stack(main)).rstrip()
    missing = board.missing
    waiting = f"still missing: {', '.join(f'rank {r}' for r in missing)}" if missing else "still missing: see below"
    title = (
        f"distdl watchdog: rank {host.rank} of {host.size} is stuck for {stuck:.0f} s in {board.op} at "
        f"{board.where}; {waiting}"
    )
    lines = [
        title,
        f"last completed: {board.done or 'nothing'}",
        "stack of the main thread:",
        stack,
        "the other ranks:",
    ]
    for r in range(host.size):
        if r != host.rank:
            lines.append(f"  rank {r} {board.read(r) or 'is on another node'}")
    return "\n".join(lines)


def end_job(text: str, error: BaseException | None = None) -> None:
    """End every rank. Where ``distdl run`` or ``dd.launch`` started this process it prints the text, last, after all
    that the MPI launcher says; elsewhere this process does, and MPI's own words may follow. Does not return."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if folder := _reports():
        _rank.fail(folder, world.rank, world.size, 1, text, error)
    sys.stderr.write(f"{text}\ndistdl: rank {world.rank} of {world.size} failed; ending the job\n")
    sys.stderr.flush()
    time.sleep(0.5)  # other ranks that are stuck may speak too
    world.Abort(1)


def _reports() -> str | None:
    folder = os.environ.get("DISTDL_REPORTS")
    return folder if folder and os.path.isdir(folder) else None


def meet(comm, name: str) -> None:
    """Wait until every rank of ``comm`` is at the first use of the world ``name``. After 10 s one that waits says who
    is missing.

    Raises:
        AbsenceError: under checking, after its time limit. The watchdog ends the job after its own.
    """
    if comm.size == 1:
        return
    observer, checked = _transport.observer, os.environ.get("DISTDL_CHECK", "0") not in ("", "0")
    limit = observer.timeout if observer is not None else default_timeout() if checked else None
    watchdog = float(os.environ.get("DISTDL_WATCHDOG_S") or 0)
    request = _given_up.pop(name, None) or comm.Ibarrier()
    began, spins, said = time.monotonic(), 0, False
    with _attendance(comm, name) as missing:
        while not request.Test():
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
                _given_up[name] = request
                raise errors.AbsenceError(
                    problem, op="World", expected=f"all {comm.size} ranks", actual=told, rank=comm.rank, next_step=step
                )
            if stuck:
                end_job(f"distdl watchdog: rank {comm.rank} of {comm.size}: {problem}; {told}; {step}")
            if there and comm.rank == there[0]:
                print(f"distdl: {problem}; {told}; {step}", file=sys.stderr, flush=True)
            said = True


@contextlib.contextmanager
def _attendance(comm, name: str):
    """Sign a roll of those that are at this first use, on this machine; yields a function that reads it: who is
    missing, who is here (as text), and the ranks that are here. Without a launcher of ours it is a file in shared
    memory, named after what the launcher tells its ranks, or after their parent."""
    from mpi4py import MPI

    _uses[name] += 1
    step = [os.environ[word] for word in ("SLURM_JOB_ID", "SLURM_STEP_ID") if word in os.environ]
    job = os.environ.get("PMIX_NAMESPACE") or "-".join([*step, str(os.getppid())])
    words = re.sub(r"[^\w.@-]", "_", f"distdl-first-{os.getuid()}-{job}-{name}-{_uses[name]}")
    path = os.path.join(
        _reports() or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()), words[:200]
    )
    places = MPI.Group.Translate_ranks(comm.group, list(range(comm.size)), MPI.COMM_WORLD.group)
    roll = None
    with contextlib.suppress(OSError):  # no folder to write to, or somebody else's file: nobody is named
        roll = _rank.Roll(path, make=True)
        roll.sign(places[comm.rank], "here")

    def missing():
        if roll is None:
            return "not all ranks", names([comm.rank]), [comm.rank]
        there = [r for r, place in enumerate(places) if r == comm.rank or (place >= 0 and roll.runs(place))]
        absent = [r for r in range(comm.size) if r not in there]
        return names(absent) if absent else "a rank", names(there), there

    try:
        yield missing
    finally:
        if roll is not None:
            roll.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
