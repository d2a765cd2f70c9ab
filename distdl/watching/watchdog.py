"""The watchdog: ``DISTDL_WATCHDOG_S=30`` ends a job in which a movement is stuck for longer, and says who waits for
whom.

A thread of each rank looks at that rank's own entry on the board. It needs no help from the thread that is stuck (MPI
releases the interpreter while it waits), and none from other ranks: what those last did is read from the board.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

from ..engine import transport as _transport
from ..failure import end_job
from .board import INSIDE, LEFT
from .observer import Observer, asked_for, default_timeout
from .watch import Watch


def time_limit() -> float:
    """Seconds after which the watchdog ends the job; 0: it does not."""
    return float(os.environ.get("DISTDL_WATCHDOG_S") or 0)


def begin(watch: Watch) -> None:
    """Start what the environment asks for: checking (``DISTDL_CHECK=1``), the watchdog (``DISTDL_WATCHDOG_S``), or
    both."""
    limit = time_limit()
    if _transport.observer is None and asked_for():
        _transport.observer = Observer(default_timeout())
    if limit > 0:
        if _transport.observer is None:
            _transport.observer = Observer()
        threading.Thread(target=_look, args=(watch, limit), name="distdl-watchdog", daemon=True).start()


def _look(watch: Watch, limit: float) -> None:
    board = watch.board
    while board.state != LEFT:
        time.sleep(min(1.0, limit / 4))
        stuck = time.monotonic() - board.since
        if board.state == INSIDE and stuck > limit:
            end_job(watch.host, report(watch, stuck))


def report(watch: Watch, stuck: float) -> str:
    """What this rank is stuck in, its Python stack, and what every other rank of the node last did."""
    board = watch.board
    main = sys._current_frames().get(threading.main_thread().ident)
    stack = "".join(traceback.format_stack(main)).rstrip()
    missing = board.missing
    waiting = f"still missing: {', '.join(f'rank {r}' for r in missing)}" if missing else "still missing: see below"
    title = (
        f"distdl watchdog: rank {watch.rank} of {watch.size} is stuck for {stuck:.0f} s in {board.op} at "
        f"{board.where}; {waiting}"
    )
    lines = [
        title,
        f"last completed: {board.done or 'nothing'}",
        "stack of the main thread:",
        stack,
        "the other ranks:",
    ]
    for r in range(watch.size):
        if r != watch.rank:
            lines.append(f"  rank {r} {board.read(r) or board.unread(r)}")
    return "\n".join(lines)
