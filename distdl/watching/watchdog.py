"""The watchdog: ``DISTDL_WATCHDOG_S=30`` ends a job in which a movement is stuck for longer, and says who waits for whom.

A thread of each rank looks at that rank's own entry on the board. It needs no help from the thread that is stuck (MPI releases
the interpreter while it waits), and none from other ranks: what those last did is read from the board.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback

from ..engine import transport as _transport
from .board import INSIDE, LEFT
from .observer import Observer, default_timeout


def watch(host) -> None:
    """Start what the environment asks for: checking (``DISTDL_CHECK=1``), the watchdog (``DISTDL_WATCHDOG_S``), or both."""
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
            text = report(host, stuck)
            if not _leave(text):
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
            time.sleep(0.5)  # other ranks that are stuck may speak too
            host.abort(1)


def report(host, stuck: float) -> str:
    """What this rank is stuck in, its Python stack, and what every other rank of the node last did."""
    board = host.board
    main = sys._current_frames().get(threading.main_thread().ident)
    stack = "".join(traceback.format_stack(main)).rstrip()
    missing = board.missing
    waiting = f"still missing: {', '.join(f'rank {r}' for r in missing)}" if missing else "still missing: see below"
    title = f"distdl watchdog: rank {host.rank} of {host.size} is stuck for {stuck:.0f} s in {board.op} at {board.where}; {waiting}"
    lines = [title, f"last completed: {board.done or 'nothing'}", "stack of the main thread:", stack, "the other ranks:"]
    for r in range(host.size):
        if r != host.rank:
            lines.append(f"  rank {r} {board.read(r) or 'is on another node'}")
    return "\n".join(lines)


def _leave(text: str) -> bool:
    """Where ``distdl run`` started this process, let it print the report: last, after all that the launcher says."""
    folder = os.environ.get("DISTDL_REPORTS")
    if not folder or not os.path.isdir(folder):
        return False
    from mpi4py import MPI

    path = os.path.join(folder, f"{MPI.COMM_WORLD.rank}.failure")
    with open(path + "~", "wb") as file:
        file.write(pickle.dumps((1, text, None)))
    os.replace(path + "~", path)
    return True
