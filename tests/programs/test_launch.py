"""Starting ranks: results in order, exceptions, exit codes, time limits, and nothing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from jobs import LIGHT, alive, command, gone, run

import distdl as dd
from distdl.errors import RankError
from distdl.programs.cli import info, main
from distdl.programs.launch import environment, find_launcher, find_mpi

pytestmark = pytest.mark.skipif(find_mpi() is None, reason="needs mpi4py and an MPI library")


@pytest.fixture
def script(tmp_path):
    """Write a script; ``rank``, ``size`` and ``world`` are there."""

    def write(body):
        path = tmp_path / "program.py"
        head = "import os, sys, time\nfrom mpi4py.MPI import COMM_WORLD as world\nrank, size = world.rank, world.size\n"
        path.write_text(head + textwrap.dedent(body))
        return path

    return write


# ---------------------------------------------------------------- dd.launch


class OwnError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def work(value, *, fail=None, at=None):
    """Returns what this rank is; or fails on rank ``at`` while the others wait for it."""
    from mpi4py.MPI import COMM_WORLD as world

    if fail is not None and world.rank == at:
        raise fail
    world.Barrier()
    return world.rank, world.size, value


@pytest.fixture
def light():
    """Functions of this file travel by value: the ranks need not import it, nor torch with it."""
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_results_come_in_rank_order(light):
    assert dd.launch(work, 3)("x") == [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]


def test_closures_and_tensors_travel():
    import torch

    x = torch.arange(3.0)
    (y,) = dd.launch(lambda: 2 * x, 1)()
    assert torch.equal(y, 2 * x)


def test_exception_is_raised_with_rank_and_traceback():
    began = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        dd.launch(work, 2)(0, fail=KeyError("lost"), at=1)
    assert time.monotonic() - began < 60  # the other one waits forever
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2 failed" in cause
    assert "in work" in cause and "raise fail" in cause


@pytest.mark.parametrize(("kind", "args"), [(OwnError, (1, 2)), (SystemExit, (0,)), (SystemExit, ("no",))])
def test_exception_that_cannot_travel_is_told(kind, args):
    def fail():
        raise kind(*args)

    with pytest.raises(RankError, match="rank 0 of 1 failed"):
        dd.launch(fail, 1)()


def test_a_rank_that_dies_ends_the_job():
    def die():
        import mpi4py.MPI

        if mpi4py.MPI.COMM_WORLD.rank == 1:
            os._exit(3)
        mpi4py.MPI.COMM_WORLD.Barrier()

    with pytest.raises(RankError, match="exit code"):
        dd.launch(die, 2, timeout=60)()


def test_timeout_leaves_no_process(tmp_path):
    def hang():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(tmp_path, str(os.getpid())).touch()
        while True:
            time.sleep(1)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="within 10 s"):
        dd.launch(hang, 2, timeout=10)()
    assert time.monotonic() - began < 40
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert gone(pids)


def test_environment_reaches_the_ranks():
    def read():
        return os.environ["OMP_NUM_THREADS"], os.environ["MINE"]

    assert dd.launch(read, 2, env={"MINE": "1", "OMP_NUM_THREADS": "2"})() == [("2", "1")] * 2


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert dd.launch(work, 1)("x") == [(0, 1, "x")]
    with pytest.raises(dd.errors.TransportError, match="needs cloudpickle"):
        dd.launch(lambda: 1, 1)()


# ---------------------------------------------------------------- python -m distdl run


def test_script_sees_its_arguments_and_folder(script):
    path = script("print(rank, size, sys.argv[1:], sys.path[0], __name__)")
    code, out, err = run("run", "-n", 2, path, "-m", "x", "--n=3")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"{r} 2 ['-m', 'x', '--n=3'] {path.parent} __main__" for r in range(2)]


def test_module_and_one_rank_without_mpi(tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv[1:], 'mpi4py' in sys.modules)\n")
    code, out, err = run("run", "-m", "program", "-n", "5", cwd=tmp_path)
    assert (code, out) == (0, "['-n', '5'] False\n"), err


def test_uncaught_exception_ends_all_and_comes_last(script):
    began = time.monotonic()
    code, _, err = run("run", "-n", 3, script("if rank == 1: raise ValueError('broken')\nworld.Barrier()"))
    assert code == 1
    assert time.monotonic() - began < 60  # the other two wait forever
    lines = err.splitlines()
    assert lines[-1] == "[rank 1] ValueError: broken"
    assert sum("File" in line for line in lines) == 1 and "_rank.py" not in err  # the user's code only


def test_failure_before_mpi_is_used(tmp_path):
    """One rank fails at once, the other sleeps and never calls MPI."""
    path = tmp_path / "program.py"
    path.write_text("import os, time\ntry: os.mkdir(os.environ['LOCK'])\nexcept OSError: time.sleep(600)\n1 / 0\n")
    code, _, err = run("run", "-n", 2, path, env={**os.environ, "LOCK": str(tmp_path / "lock")})
    assert code == 1 and "ZeroDivisionError" in err.splitlines()[-1]


@pytest.mark.parametrize("n", [1, 2])
def test_exit_code_passes(script, n):
    code, _, err = run("run", "-n", n, script("if rank == size - 1: sys.exit(7)\nworld.Barrier()"))
    assert code == 7
    assert err.splitlines()[-1].endswith("exit code 7")


WAITING = """
import os, time
from mpi4py.MPI import COMM_WORLD as world
open(f"pid{world.rank}", "w").write(str(os.getpid()))
world.Barrier()
if world.rank == 1: time.sleep(600)
world.Barrier()
"""
FROM_PYTHON = LIGHT.replace(
    "from distdl.programs.cli import main\nsys.exit(main())",
    """
from distdl.programs.launch import launch
def wait(source): exec(source)
launch(wait, 2)(open("program.py").read())
""",
)
KINDS = ("starter", "launcher", "proxy", "rank 0", "rank 1")  # rank 0 waits inside MPI, rank 1 sleeps
ENDING = ("SIGTERM", "SIGKILL", "SIGHUP", "SIGINT", "SIGQUIT", "SIGABRT")
USUAL = (("run", "starter", "SIGHUP"), ("run", "launcher", "SIGKILL"), ("run", "rank 0", "SIGINT"),
         ("launch", "starter", "SIGKILL"))  # fmt: skip


def descendants(pid):
    """All processes that ``pid`` has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(child)]
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
@pytest.mark.parametrize(("how", "who", "name"), [
    pytest.param(how, who, name, marks=() if (how, who, name) in USUAL else pytest.mark.slow, id=f"{how}-{who}-{name}")
    for how in ("run", "launch") for who in KINDS for name in ENDING])  # fmt: skip
def test_a_signal_to_any_process_ends_all(how, who, name, tmp_path):
    """Whatever ends one process of a job, none is left, and what happened is said."""
    (tmp_path / "program.py").write_text(WAITING)
    line = command("run", "-n", 2, "program.py") if how == "run" else [sys.executable, "-c", FROM_PYTHON]
    with open(tmp_path / "err", "w") as err:
        job = subprocess.Popen(line, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
    files, until = [tmp_path / "pid0", tmp_path / "pid1"], time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    ranks, (launcher, *others) = [int(f.read_text()) for f in files], descendants(job.pid)
    proxies = [pid for pid in others if pid not in ranks]
    try:
        if who == "proxy" and not proxies:
            pytest.skip("this MPI's launcher starts its ranks itself")
        target = dict(zip(KINDS, (job.pid, launcher, (proxies or [0])[0], *ranks)))[who]
        sent = getattr(signal, name)
        masks = re.findall(r"Sig(?:Ign|Cgt):\s*(\w+)", Path(f"/proc/{target}/status").read_text())
        if who == "proxy" and any(int(mask, 16) >> (sent - 1) & 1 for mask in masks):
            pytest.skip("this signal does not end it")
        folder = next(
            Path(word) for word in Path(f"/proc/{ranks[0]}/cmdline").read_text().split("\0") if "distdl-" in word
        )
        os.kill(target, sent)
        code = job.wait(20)
        assert code != 0
        assert gone([launcher, *others], 20)
        said = (tmp_path / "err").read_text().replace("\0", "")
        assert not folder.exists()
        if how == "run" and who == "starter" and sent not in (signal.SIGKILL, signal.SIGABRT):
            assert code == 128 + sent
        elif find_mpi().vendor == "Open MPI":  # others have a last word of their own
            interrupted = sent == signal.SIGINT
            cause = {
                "starter": "KeyboardInterrupt" if interrupted else "the process that started this job is gone",
                "launcher": "ended without a report",
            }.get(who, "interrupted" if interrupted else "ended without a report")
            assert cause in said.splitlines()[-1]
    finally:
        for pid in (job.pid, launcher, *others):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.slow
def test_who_does_not_come_to_the_start_is_named(script, tmp_path):
    """Rank 1 is stuck before MPI: the others wait inside MPI's start, where they can say nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif {os.environ.get('PMIX_RANK'), os.environ.get('PMI_RANK')} & {'1'}: time.sleep(12)\n"
    )
    code, _, err = run("run", "-n", 3, script("world.Barrier()"), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert code == 0
    assert "distdl: ranks 0, 2 waited 10 s for MPI to start; not there, or on another node: rank 1\n" in err


def test_killed_launcher_leaves_no_rank(script, tmp_path):
    path = script("""
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"pid{rank}", "w").write(str(os.getpid()))
        time.sleep(600)
    """)
    code, _, err = run("run", "-n", 2, "--timeout", 8, path, cwd=tmp_path)
    assert code == 124 and "within 8 s" in err
    assert gone([(tmp_path / f"pid{r}").read_text() for r in range(2)])


def test_launch_inside_a_rank(script):
    """A job may start another: what its launcher told it is not handed on."""
    path = script("""
        def inner(x):
            from mpi4py.MPI import COMM_WORLD as world
            return world.rank + 10 * world.size + x
        if rank == 0:
            import distdl as dd
            print(dd.launch(inner, 2, timeout=60)(100))
        world.Barrier()
    """)
    code, out, err = run("run", "-n", 2, path)
    assert (code, out) == (0, "[120, 121]\n"), err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "-n", "2"], "which script"),
        (["run", "-n", "2", "no/such.py"], "no such file: no/such.py"),
        (["run", "-n", "0", __file__], "not a number of ranks"),
        (["fly"], "invalid choice"),
    ],
)
def test_bad_command_line(args, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(args)
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------- what is found


def test_info():
    code, out, err = run("info")
    assert code == 0, err
    for name in ("python", "torch", "mpi4py", "MPI", "launcher", "CUDA devices"):
        assert name in out
    assert "packed by MPI while they travel" in out and "large pages" in out
    assert find_mpi().vendor in out


def test_info_says_what_is_switched_off(monkeypatch):
    monkeypatch.setenv("DISTDL_MPI_TYPES", "0")
    monkeypatch.setenv("DISTDL_LARGE_PAGES", "0")
    text = info()
    assert "copied into staging memory (DISTDL_MPI_TYPES=0)" in text and "not asked for (DISTDL_LARGE_PAGES=0)" in text


def test_launcher_belongs_to_the_library():
    says = subprocess.run([find_launcher(), "--version"], capture_output=True, text=True).stdout
    assert find_mpi().version in says


def test_users_variables_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("PMI_RANK", "3")
    found = environment(4, "Open MPI")
    assert found["OMP_NUM_THREADS"] == "5" and found["MKL_NUM_THREADS"] == "1"
    assert found["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert "PMI_RANK" not in found


def test_an_outer_launchers_variables_are_taken_away(monkeypatch):
    """Those of torchrun and srun, which would tell each rank that it is another; by which try this is stays."""
    outer = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "0",
        "DISTDL_ALONE": "1",
        "DISTDL_RANK": "1 0 2 x",
    }
    for name, value in {**outer, "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_FILES": "mine"}.items():
        monkeypatch.setenv(name, value)
    found = environment(2)
    assert not outer.keys() & found.keys()
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["LOCAL_FILES"]) == ("2", "mine")
    monkeypatch.delenv("RANK")
    assert (
        environment(1)["MASTER_PORT"] == environment(1)["DISTDL_ALONE"] == "1"
    )  # no torchrun: what the user has set stays


def test_what_open_mpi_4_tells_its_ranks_is_taken_away(monkeypatch):
    """Its mpirun takes a job that a rank starts, or a process that has started MPI by itself, for one of its own."""
    outer = {
        "OMPI_UNIVERSE_SIZE": "2",
        "OMPI_MCA_ess": "singleton",
        "OMPI_MCA_ess_base_vpid": "1",
        "OMPI_MCA_orte_ess_num_procs": "1",
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1",
        "OMPI_MCA_orte_launch": "1",
    }
    mine = {"OMPI_MCA_btl": "self,vader", "OMPI_MCA_orte_tmpdir_base": "/tmp", "PMIX_MCA_gds": "hash"}
    for name, value in {**outer, **mine}.items():
        monkeypatch.setenv(name, value)
    found = environment(2, "Open MPI")
    assert not outer.keys() & found.keys()
    assert mine.items() <= found.items()


def test_open_mpi_4_starts_without_ssh(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    monkeypatch.delenv("OMPI_MCA_plm_rsh_agent", raising=False)
    assert environment(2, "Open MPI")["OMPI_MCA_plm_rsh_agent"] == ""
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "mine")
    assert environment(2, "Open MPI")["OMPI_MCA_plm_rsh_agent"] == "mine"
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name, **options: "/usr/bin/ssh")
    monkeypatch.delenv("OMPI_MCA_plm_rsh_agent", raising=False)
    assert "OMPI_MCA_plm_rsh_agent" not in environment(2, "Open MPI")


def test_importing_launch_loads_neither_mpi_nor_torch():
    source = Path(sys.modules["distdl.programs.launch"].__file__)
    code = (
        f"import runpy, sys; runpy.run_path({str(source)!r}); print([m for m in ('torch', 'mpi4py') if m "
        "in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    light = LIGHT.replace("sys.exit(main())", "print([m for m in ('torch', 'mpi4py') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", light], capture_output=True, text=True).stdout == "[]\n"
