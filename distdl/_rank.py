"""The first code of every rank: bring MPI up, run the program or the function, and let no failure leave the other ranks waiting.

It is run by its path, so that nothing else is imported before it; distdl itself is not needed here.

    python _rank.py REPORTS (--call JOB | script.py args... | -m module args...)

REPORTS is a private folder of the parent process. Rank r leaves there ``r.result`` (pickled) or ``r.failure``.
"""

import io
import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder: its modules must not hide the standard library's

import os
import pickle
import runpy
import threading
import time
import traceback

_HERE = __file__  # Python forgets the name before functions registered with atexit run


def start() -> tuple[int, int]:
    """(rank, number of ranks). MPI starts now, not at first use: only then can a rank that fails early end the others."""
    if int(os.environ["DISTDL_SIZE"]) == 1:
        return 0, 1
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def watch_parent() -> None:
    """End this rank when its launcher is gone: a killed launcher cannot stop its ranks."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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


def report(path: str, code: int, text: str, error: BaseException) -> None:
    """Tell the parent; where there is none to tell (another node, a folder that is gone), tell everyone."""
    try:
        whole = dumps(error)
    except Exception:  # an exception that cannot be pickled travels as its text
        whole = None
    try:
        write(path, pickle.dumps((code, text, whole)))
    except OSError:
        print(text, file=sys.stderr)


def fail(reports: str, rank: int, size: int, code: int, text: str, error: BaseException) -> None:
    """Report what ended this rank, and end all of them."""
    report(os.path.join(reports, f"{rank}.failure"), code, text, error)
    sys.stdout.flush()
    sys.stderr.flush()
    if size > 1:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # not sys.exit: handlers at exit may wait for the other ranks


def watch_exit(reports: str, rank: int, size: int) -> None:
    """An exception in a function registered with ``atexit`` ends the job too; Python itself only prints it, and exits with 0."""
    previous = sys.unraisablehook

    def hook(unraisable):
        if (unraisable.err_msg or "").startswith("Exception ignored in atexit callback"):
            code, text = failure(unraisable.exc_value)
            fail(reports, rank, size, code or 1, f"at exit:\n{text}", unraisable.exc_value)
        previous(unraisable)

    sys.unraisablehook = hook


def main(reports: str, *argv: str) -> None:
    """Run; on failure report, then end every rank."""
    watch_parent()
    os.environ["DISTDL_REPORTS"] = reports  # the watchdog reports there too
    # Whole lines, also from a job that is killed, and where PYTHONUNBUFFERED would have ranks interleave within a line.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank, size = start()
    watch_exit(reports, rank, size)
    try:
        if argv[0] == "--call":
            call(argv[1], os.path.join(reports, f"{rank}.result"))
        else:
            program(list(argv))
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        code, text = failure(error)
        if code or argv[0] == "--call":  # a function that calls sys.exit(0) has no result
            fail(reports, rank, size, code or 1, text, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
