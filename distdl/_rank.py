"""The first code of every rank: bring MPI up, run the program or the function, and let no failure leave the other ranks
waiting.

It is run by its path, so that nothing else is imported before it, and imports nothing of distdl.

    python _rank.py REPORTS (--call JOB | script.py args... | -m module args...)

REPORTS is a private folder of the parent process. Rank r leaves there ``r.result`` (pickled) or ``r.failure``, and
signs the roll.
"""

from __future__ import annotations

import io
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder: its modules must not hide the standard library's

import contextlib
import fcntl
import os
import pickle
import runpy
import shutil
import signal
import threading
import time
import traceback

_HERE = __file__  # Python forgets the name before functions registered with atexit run
_GRACE = 5.0  # seconds that a launcher, or a handler, has before the rank acts itself
_RECORD = 32  # bytes
_NUMBERS = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # where launchers tell a process its rank before MPI runs
_JOBS = (
    "DISTDL_REPORTS",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
)  # what differs from launch to launch
STARTER = 0  # the starter's record; rank r has record r + 1


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


def enlist(reports: str, size: int) -> tuple[Roll | None, int | None]:
    """Sign the roll before MPI starts: a launcher can then say who is missing there. (None, None) on another node, or
    where the MPI launcher does not tell a process its rank."""
    rank = next((int(os.environ[name]) for name in _NUMBERS if name in os.environ), None) if size > 1 else 0
    try:
        roll = Roll(os.path.join(reports, "roll"))
    except OSError:  # another node: its launcher ends its ranks
        return None, rank
    if rank is not None:
        roll.sign(rank + 1, f"here {os.getpid()}")
    return roll, rank


def start(size: int) -> int:
    """This process's rank. MPI starts now, not at first use: only then can a rank that fails early end the others."""
    if size == 1:
        return 0
    before = signal.getsignal(signal.SIGHUP)
    from mpi4py import MPI

    signal.signal(signal.SIGHUP, before)  # MPI libraries catch it, and do nothing: it would no longer end this rank
    return MPI.COMM_WORLD.rank


def job() -> str:
    """What tells the processes of one launch, and their children, from those of another."""
    return "/".join(os.environ.get(name, "") for name in _JOBS)


def watch_parents(reports: str, roll: Roll | None, rank: int | None, size: int) -> None:
    """End this rank when its launcher, or the process that started the job, is gone: neither can then stop its
    ranks."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent and (roll is None or roll.runs(STARTER)):
            time.sleep(1)
        if roll is not None and not roll.runs(STARTER):
            shutil.rmtree(reports, ignore_errors=True)
        if rank is not None and roll is not None and any(roll.runs(r + 1) for r in range(rank)):
            time.sleep(_GRACE / 5)  # one rank speaks, and asks the launcher, for all
        what = "the process that started this job" if os.getppid() == parent else "the launcher of the ranks"
        with contextlib.suppress(OSError):  # what it would be written to may be gone, too
            os.write(2, f"distdl: rank {rank}: {what} is gone; ending the job\n".encode())
        if size > 1 and os.getppid() == parent:
            os.kill(parent, signal.SIGTERM)  # ends all ranks, without a word
            time.sleep(_GRACE / 2)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # what this rank has started, too
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def watch_interrupts(end) -> None:
    """SIGINT ends this rank also while it waits inside MPI, where Python runs no handler."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    taken = threading.Event()

    def take(number, frame):
        taken.set()
        signal.default_int_handler(number, frame)

    def listen():
        while numbers := os.read(heard, 64):
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is take and not taken.wait(_GRACE / 2):
                end()
            taken.clear()

    signal.signal(signal.SIGINT, take)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are no news of this rank
    threading.Thread(target=listen, daemon=True).start()


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


def call(job: str, result: str) -> None:
    """Run a pickled function, and write what it returns."""
    with open(job, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, args, kwargs = pickle.load(file)
    write(result, dumps(function(*args, **kwargs)))


def program(argv: list[str]) -> None:
    """Run a script or a module as ``python`` would."""
    if argv[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        sys.argv[:] = argv
        runpy.run_path(argv[0], run_name="__main__")


def failure(error: BaseException) -> tuple[int, str]:
    """Exit code and text of what ended this rank; code 0 where nothing is wrong."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, f"exit code {error.code}"
        return 1, str(error.code)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (_HERE, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next  # begin at the user's code
    return 1, "".join(traceback.format_exception(type(error), error, trace)).rstrip()


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


def fail(reports: str, rank: int, size: int, code: int, text: str, error: BaseException | None = None) -> None:
    """Report what ended this rank, and end all of them. Does not return."""
    told = report(os.path.join(reports, f"{rank}.failure"), code, text, error)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if size > 1:
            if told:
                time.sleep(_GRACE)  # the starter ends the job as soon as it reads this; MPI would do so with a banner
            from mpi4py import MPI

            if not MPI.Is_finalized():
                MPI.COMM_WORLD.Abort(code)
    finally:
        os._exit(code)  # not sys.exit: handlers at exit may wait for the other ranks


def watch_exit(reports: str, rank: int, size: int) -> None:
    """An exception in a function registered with ``atexit`` ends the job too; Python itself only prints it, and exits
    with 0."""
    previous, pid = sys.unraisablehook, os.getpid()

    def hook(unraisable):
        if os.getpid() == pid and (unraisable.err_msg or "").startswith("Exception ignored in atexit callback"):
            code, text = failure(unraisable.exc_value)
            fail(reports, rank, size, code or 1, f"at exit:\n{text}", unraisable.exc_value)
        previous(unraisable)

    sys.unraisablehook = hook


def main(reports: str, *argv: str) -> None:
    """Run; on failure report, then end every rank."""
    size, pid = int(os.environ["DISTDL_SIZE"]), os.getpid()
    roll, rank = enlist(reports, size)
    watch_parents(reports, roll, rank, size)
    os.environ["DISTDL_REPORTS"] = reports  # the world reports there too
    # Whole lines, also from a job that is killed, and where PYTHONUNBUFFERED would have ranks interleave within a line.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank = start(size)
    os.environ["DISTDL_RANK"] = f"{pid} {rank} {size} {job()}"  # what a process that this one starts should know
    if roll is not None:
        roll.sign(rank + 1, f"started {pid}")
    watch_exit(reports, rank, size)
    if size > 1:
        watch_interrupts(lambda: fail(reports, rank, size, 130, "interrupted, and did not come back from inside MPI"))
    try:
        if argv[0] == "--call":
            call(argv[1], os.path.join(reports, f"{rank}.result"))
        else:
            program(list(argv))
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        if os.getpid() != pid:  # a fork of this rank, which is none
            raise
        code, text = failure(error)
        if code or argv[0] == "--call":  # a function that calls sys.exit(0) has no result
            fail(reports, rank, size, code or 1, text, error)
    if roll is not None and os.getpid() == pid:
        roll.sign(rank + 1, f"done {pid}")


if __name__ == "__main__":
    main(*sys.argv[1:])
