"""How a job fails: what its processes tell each other and their starter, and how one of them ends all.

The first code of a rank loads this file by its path, before anything else of distdl: it imports nothing of distdl.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

GRACE = 5.0  # seconds that a launcher, or a handler, has before the rank acts itself
STARTER = 0  # the starter's record on the roll; rank r has record r + 1
_RECORD = 32  # bytes
_JOBS = (
    "DISTDL_REPORTS",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
)  # what differs from launch to launch
moving = threading.local()  # .moves: this thread makes movements


class Roll:
    """A file with a record for each process, which holds a lock on its own as long as it lives.

    The system takes a lock back whatever ends its process, and a fork does not inherit it: a record without a lock is
    that of a process which is gone, or was never there. A process that looks at its own record, or opens the file
    twice, gives its lock back.
    """

    def __init__(self, path: str, make: bool = False):
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0), 0o600)

    def sign(self, number: int, text: str) -> None:
        """Hold record ``number``, which says ``text``."""
        at = number * _RECORD
        fcntl.lockf(self.file, fcntl.LOCK_EX, _RECORD, at)
        os.pwrite(self.file, text.encode()[:_RECORD].ljust(_RECORD), at)

    def runs(self, number: int) -> bool:
        """Whether another process holds record ``number``."""
        at = number * _RECORD
        try:
            fcntl.lockf(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB, _RECORD, at)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, _RECORD, at)
        return False

    def read(self, number: int) -> list[str]:
        """The words of record ``number``; none where nobody has signed it."""
        return os.pread(self.file, _RECORD, number * _RECORD).decode().replace("\0", "").split()

    def close(self) -> None:
        os.close(self.file)


def job() -> str:
    """What tells the processes of one launch, and their children, from those of another."""
    return "/".join(os.environ.get(name, "") for name in _JOBS)


def dumps(value) -> bytes:
    """Pickle; classes of a script or a notebook travel by value where cloudpickle is there."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return cloudpickle.dumps(value)


def write(path: str, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    with open(path + "~", "wb") as file:
        file.write(data)
    os.replace(path + "~", path)


def report(path: str, code: int, text: str, error: BaseException | None) -> bool:
    """Tell the parent; where there is none to tell (another node, a folder that is gone), tell everyone. Whether it was
    told."""
    try:
        whole = None if error is None else dumps(error)
    except Exception:  # an exception that cannot be pickled travels as its text
        whole = None
    try:
        write(path, pickle.dumps((code, text, whole)))
    except OSError:
        print(text, file=sys.stderr)
        return False
    return True


def fail(
    reports: str,
    rank: int,
    code: int,
    text: str,
    error: BaseException | None = None,
    abort: Callable[[int], object] | None = None,
) -> NoReturn:
    """Report what ended this rank, and end all of them, the others by ``abort``."""
    told = report(os.path.join(reports, f"{rank}.failure"), code, text, error)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if abort is not None:
            if told:
                time.sleep(GRACE)  # the starter ends the job as soon as it reads this; MPI would do so with a banner
            abort(code)
    finally:
        os._exit(code)  # not sys.exit: handlers at exit may wait for the other ranks


def more(text: str) -> str:
    """The text of an error, and what this process knows of it besides. (Whoever has loaded this file by its path has
    other notes than distdl.)"""
    known = getattr(sys.modules.get("distdl.failure"), "notes", ())
    return "\n".join([text, *(found for note in known if (found := note()))])


class Job(Protocol):
    """What knows the job: an engine, see :class:`distdl.engine.transport.Transport`."""

    def job(self) -> tuple[int, int]:
        """This process's number in the job, and how many there are."""

    def abort(self, code: int = 1, cause: str = "") -> None:
        """End every rank of the job."""


def reports() -> str | None:
    """The folder of the starter's that takes reports, where there is one."""
    folder = os.environ.get("DISTDL_REPORTS")
    return folder if folder and os.path.isdir(folder) else None


def end_job(engine: Job, text: str, error: BaseException | None = None) -> NoReturn:
    """End every rank. Where ``distdl run`` or ``dd.launch`` started this process it prints the text, last, after all
    that the MPI launcher says; elsewhere this process does, and MPI's own words may follow."""
    rank, size = engine.job()
    if folder := reports():
        fail(folder, rank, 1, text, error, lambda code: engine.abort(code, text))
    sys.stderr.write(f"{text}\ndistdl: rank {rank} of {size} failed; ending the job\n")
    sys.stderr.flush()
    time.sleep(0.5)  # other ranks that are stuck may speak too
    try:
        engine.abort(1, text)
    finally:
        os._exit(1)


def watch_exit(end: Callable[[BaseException, str], object], threads: Callable[[], bool] = lambda: False) -> None:
    """Let ``end(error, where)`` end the job after an exception in a function registered with ``atexit``, and in a
    thread of which ``threads()``, asked there, says that others wait for it: Python itself only prints these, and exits
    with 0."""
    previous, pid = sys.unraisablehook, os.getpid()

    def hook(unraisable):
        text = unraisable.err_msg or ""
        at_exit = text.startswith("Exception ignored in atexit callback")
        if os.getpid() == pid and (at_exit or (threads() and text.startswith("Exception ignored in thread"))):
            end(unraisable.exc_value or unraisable.exc_type(), "at exit:\n" if at_exit else "in a thread:\n")
        previous(unraisable)

    sys.unraisablehook = hook


notes: list[Callable[[], str]] = []  # what may know more of an error than it says itself; empty: nothing
_ended_on_exceptions: list = []


def end_on_exceptions(engine: Job) -> None:
    """An exception that nobody catches on one rank ends the job: its peers would wait for messages that never come. In
    the main thread, at exit, and in a thread that has made movements."""
    if _ended_on_exceptions:  # hooks stand for the whole process
        return
    main, thread = sys.excepthook, threading.excepthook
    _ended_on_exceptions.append(pid := os.getpid())

    def end(error, where=""):
        text = "".join(traceback.format_exception(error)).rstrip()
        text = more(text)
        end_job(engine, "interrupted" if isinstance(error, KeyboardInterrupt) else where + text, error)

    def moves():
        return getattr(moving, "moves", False)

    def in_main(kind, value, trace):
        if os.getpid() == pid:
            end(value)
        main(kind, value, trace)

    def in_thread(args):
        if os.getpid() == pid and moves() and not issubclass(args.exc_type, SystemExit):
            end(args.exc_value or args.exc_type(), f"in thread {args.thread.name if args.thread else '?'}:\n")
        thread(args)

    sys.excepthook, threading.excepthook = in_main, in_thread
    watch_exit(end, moves)
