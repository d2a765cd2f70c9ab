"""The first code of every rank: bring MPI up (ranks of torch.distributed need nothing), run the program or the
function, and let no failure leave the other ranks waiting.

It is run by its path, so that nothing else is imported before it, and takes nothing of distdl but ``failure.py``, which
is loaded by its path too.

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
import importlib.util
import os
import pickle
import runpy
import shutil
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..failure import Roll


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("distdl_failure", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


failure = _load(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "failure.py"))
_HERE = __file__  # Python forgets the name before functions registered with atexit run
_GRACE = failure.GRACE
_NUMBERS = (
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "RANK",
)  # where launchers tell a process its rank before MPI runs


def enlist(reports: str, size: int) -> tuple[Roll | None, int | None]:
    """Sign the roll before MPI starts: a launcher can then say who is missing there. (None, None) on another node, or
    where the MPI launcher does not tell a process its rank."""
    rank = next((int(os.environ[name]) for name in _NUMBERS if name in os.environ), None) if size > 1 else 0
    try:
        roll = failure.Roll(os.path.join(reports, "roll"))
    except OSError:  # another node: its launcher ends its ranks
        return None, rank
    if rank is not None:
        roll.sign(rank + 1, f"here {os.getpid()}")
    return roll, rank


def by_torch() -> bool:
    """Whether the ranks are those of torch.distributed: the starter of a job clears what other launchers have said."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def begin(size: int) -> int:
    """This process's rank. MPI starts now, not at first use: only then can a rank that fails early end the others."""
    if size == 1 or by_torch():
        return int(os.environ["RANK"]) if size > 1 else 0
    before = signal.getsignal(signal.SIGHUP)
    from mpi4py import MPI

    signal.signal(signal.SIGHUP, before)  # MPI libraries catch it, and do nothing: it would no longer end this rank
    return MPI.COMM_WORLD.rank


def _abort(code: int) -> None:
    if by_torch():
        return  # the launcher ends the others, once this rank has ended
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def watch_parents(reports: str, roll: Roll | None, rank: int | None, size: int) -> None:
    """End this rank when its launcher, or the process that started the job, is gone: neither can then stop its
    ranks."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent and (roll is None or roll.runs(failure.STARTER)):
            time.sleep(1)
        if roll is not None and not roll.runs(failure.STARTER):
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


def call(job: str, result: str) -> None:
    """Run a pickled function, and write what it returns."""
    with open(job, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, args, kwargs = pickle.load(file)
    failure.write(result, failure.dumps(function(*args, **kwargs)))


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


def cause(error: BaseException) -> tuple[int, str]:
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
    return 1, failure.more("".join(traceback.format_exception(type(error), error, trace)).rstrip())


def main(reports: str, *argv: str) -> None:
    """Run; on failure report, then end every rank."""
    size, pid = int(os.environ["DISTDL_SIZE"]), os.getpid()
    roll, rank = enlist(reports, size)
    watch_parents(reports, roll, rank, size)
    os.environ["DISTDL_REPORTS"] = reports  # the world reports there too
    # Whole lines, also from a job that is killed, and where PYTHONUNBUFFERED would have ranks interleave within a line.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank = begin(size)
    os.environ["DISTDL_RANK"] = (
        f"{pid} {rank} {size} {failure.job()}"  # what a process that this one starts should know
    )
    if roll is not None:
        roll.sign(rank + 1, f"started {pid}")
    abort = _abort if size > 1 else None

    def end(error: BaseException, where: str = "") -> None:
        code, text = cause(error)
        failure.fail(reports, rank, code or 1, where + text, error, abort)

    failure.watch_exit(end)
    if size > 1:
        stuck = "interrupted, and did not come back from inside MPI"
        watch_interrupts(lambda: failure.fail(reports, rank, 130, stuck, None, abort))
    try:
        if argv[0] == "--call":
            call(argv[1], os.path.join(reports, f"{rank}.result"))
        else:
            program(list(argv))
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        if os.getpid() != pid:  # a fork of this rank, which is none
            raise
        if cause(error)[0] or argv[0] == "--call":  # a function that calls sys.exit(0) has no result
            end(error)
    if roll is not None and os.getpid() == pid:
        roll.sign(rank + 1, f"done {pid}")


if __name__ == "__main__":
    main(*sys.argv[1:])
