"""Jobs whose ranks are torch.distributed's: by torchrun and by our own launcher, with and without mpi4py; one that
fails ends all, and its cause is the last that is said."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import command

import distdl as dd
from distdl.programs import launch as launcher

worlds = sys.modules["distdl.world"]  # the name in the package is the function's
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
PLACE = 'int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])'
HEAD = f"""
import os, signal, sys, time
import torch, distdl as dd, distdl.functional as F
sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines: ranks share a pipe
rank, size = {PLACE}
P = dd.Partition((size,))
def total(ranks=P.ranks):
    return int(F.all_sum_reduce(torch.ones(1), dd.Partition((len(ranks),), ranks)))
def shifted(n=3):
    return F.shift(torch.full((n,), float(rank)), P, 0)[-1].item()
"""


@pytest.fixture
def job(tmp_path):
    """Runs a program; returns (exit code, stdout, stderr)."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['mpi4py'] = sys.modules['cupy'] = None\n"
    )

    def start(program, n=2, by="torchrun", hidden=False, within=90, **env):
        head = HEAD if by != "mpi" else HEAD.replace(PLACE, "dd.world().rank, dd.world().size")
        (tmp_path / "program.py").write_text(head + textwrap.dedent(program))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        engine = "mpi" if by == "mpi" else "torch"
        start = torchrun if by == "torchrun" else command("run", "--engine", engine, "-n", n)
        path = os.pathsep.join([*([str(tmp_path / "hidden")] if hidden else []), str(ROOT)])
        own = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "DISTDL_"))}
        own |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
        done = subprocess.run(
            [*start, str(tmp_path / "program.py")],
            capture_output=True,
            text=True,
            timeout=within,
            env=own,
            cwd=tmp_path,
        )
        return done.returncode, done.stdout, done.stderr

    return start


OF_MPI = pytest.mark.skipif(launcher.find_mpi() is None, reason="needs mpi4py and an MPI library")
BOTH = pytest.mark.parametrize("by", ["torchrun", "run"])


@BOTH
@pytest.mark.parametrize("hidden", [False, True], ids=["", "without mpi4py and cupy"])
def test_just_works(job, by, hidden):
    code, out, err = job("print(f'{total()} {shifted()} {type(dd.world().host).__name__}')", by=by, hidden=hidden)
    assert (code, sorted(out.splitlines())) == (0, ["2 0.0 TorchTransport", "2 1.0 TorchTransport"]), err


FAILS = {
    "raise": ("raise ValueError('the cause of it')", "ValueError: the cause of it"),
    "exit": ("sys.exit(7)", "7"),
    "_exit": ("os._exit(8)", "8"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "9|SIGKILL|137"),
}


@pytest.mark.parametrize("by, how", [  # torchrun sees a code; who raises has one too
    pytest.param(by, how, marks=pytest.mark.slow if by == "torchrun" and "exit" in how else (), id=f"{how}-{by}")
    for how in FAILS for by in ("torchrun", "run")])  # fmt: skip
def test_one_rank_fails(job, by, how):
    """The others wait for it, in a movement and in an agreement."""
    does, said = FAILS[how]
    program = f"""
    total()
    if rank == 1:
        {does}
    shifted() if rank == 0 else dd.testing.gather_objects(rank)
    """
    code, _, err = job(program, n=3, by=by)
    assert code != 0
    if how == "raise":  # nothing of another rank comes after it
        last = err[err.rindex("ValueError: the cause of it") :]
        assert not any(f"[rank {r}]" in last or f"rank {r} of" in last for r in (0, 2)), err
    else:
        assert any(word in err for word in said.split("|")), err


@pytest.mark.parametrize("program", [
    "[host.discard(r, 7 + i) for r in P.ranks if r != rank for i in range(3)]; total(); time.sleep(2 * rank)",
    "held = [F.start(dd.maps.shift(P, 0, 1, True, (n,)), torch.ones(n)) for n in (3, 10**6)]; time.sleep(rank)",
    "worlds = [dd.World(name='again') for _ in range(3)]; del worlds; time.sleep(rank)",
], ids=["waits that never end", "a movement that is held to the end", "worlds of one name"])  # fmt: skip
def test_threads_end_before_python_does(job, program):
    """One that came back from C++ while Python ends would end the process by a signal; the last leave alone."""
    code, out, err = job(f"total()\nhost = dd.world().host\n{program}\nprint('left')", n=3, PYTHONFAULTHANDLER="1")
    assert (code, out.split()) == (0, ["left"] * 3), err
    assert "Fatal" not in err and "terminate" not in err, err


def test_works_that_outlive_a_profile(job):
    """gloo's notes of them would be written into memory that the profile has given back."""
    code, out, err = job("""
    total()
    A = dd.maps.shift(P, 0, 1, True, (100,))
    for turn in range(8):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
            pending = [F.start(A, torch.full((100,), float(i))) for i in range(20)]
        names = {event.name for event in prof.events()}
        assert not [name for name in names if name.startswith("gloo:s") or name.startswith("gloo:r")], names
        del prof, names
        assert [int(F.wait(one)[0]) for one in pending] == [*range(20)]
        dd.world().host.messages.hand_over()
    print("fine")
    """, PYTHONFAULTHANDLER="1")  # fmt: skip
    assert (code, out.split()) == (0, ["fine"] * 2), err


def test_how_fast_all_end(job):
    """One raises, the others sleep; torch takes its time to start."""
    code, out, err = job(
        """
        total()
        print("began", time.time(), flush=True)
        if rank == 1:
            raise ValueError("mine")
        time.sleep(600)
        """
    )
    assert code != 0 and "ValueError: mine" in err
    assert time.time() - max(float(line.split()[1]) for line in out.splitlines()) < 20


@pytest.mark.parametrize("by", ["torchrun", "run", pytest.param("mpi", marks=OF_MPI)])
def test_ranks_that_never_take_part(job, by):
    """Two of three move, one of them a second late; the third does something else for longer than the watchdog waits.
    Nobody waits for it, and it is not stuck. Over MPI all have asked for dd.world() before; by torch it makes none."""
    program = """
    open(f"here{rank}", "w").close()
    while not all(os.path.exists(f"here{r}") for r in range(size)):  # imports take as long as the machine is busy
        time.sleep(0.01)
    if rank == 2:
        time.sleep(8)
        open("awake", "w").close()
        print("apart")
    else:
        time.sleep(rank)
        print(f"{total((0, 1))} {F.all_gather(torch.ones(1), dd.Partition((2,))).tolist()} {os.path.exists('awake')}")
    """
    code, out, err = job(program, n=3, by=by, DISTDL_WATCHDOG_S="5")
    assert (code, sorted(out.splitlines())) == (0, ["2 [1.0, 1.0] False"] * 2 + ["apart"]), err
    assert "stuck" not in err


@pytest.mark.parametrize("how", ["watchdog", "checking"])
def test_a_rank_that_does_not_come(job, how):
    """It sleeps, and has not made its world: who waits for it ends the job."""
    program = """
    if rank == 1:
        time.sleep(600)
    shifted()
    """
    env = {"DISTDL_WATCHDOG_S": "3"} if how == "watchdog" else {"DISTDL_CHECK": "1", "DISTDL_CHECK_TIMEOUT": "2"}
    code, _, err = job(program, **env)
    wanted = "distdl watchdog: rank 0 of 2 is stuck" if how == "watchdog" else "rank 1 did not come within 2 s"
    assert code != 0 and wanted in err and "rank 1 has not made its world" in err, err


def test_a_world_of_a_group(job):
    """A sub-group of torch's is a world, under torch's default group, which stays torch's own."""
    program = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    other = dd.World.from_group(groups[rank % 2], "mine")
    Q = dd.Partition((other.size,), world="mine")
    mine = int(F.all_sum_reduce(torch.full((1,), rank + 1.0), Q))
    print(f"{rank} {other.rank} {other.size} {mine} {total()}")
    try:
        dd.World.from_group(groups[1 - rank % 2], "theirs")
    except dd.errors.TransportError as error:
        assert "none of the group's" in str(error), error
    else:
        raise AssertionError
    dist.destroy_process_group()
    """
    code, out, err = job(program, n=3)
    assert (code, sorted(out.splitlines())) == (0, ["0 0 2 4 3", "1 0 1 2 3", "2 1 2 4 3"]), err


def test_children_of_a_rank_are_none(job):
    """A DataLoader's workers, forks of a rank with an engine, and a program that it starts."""
    program = """
    import subprocess
    total()
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=2)
    assert [int(x) for x in loader] == [0, 1, 2, 3]
    if rank == 0:
        code = "import distdl as dd; w = dd.world(); print(type(w.host).__name__, w.rank)"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    print(f"{total()}")
    """
    code, out, err = job(program)
    assert (code, sorted(out.splitlines())) == (0, ["2", "2", "_Child 0"]), err


@pytest.mark.parametrize("before", ["pass", "dd.world()"])
def test_ranks_of_multiprocessing(before, tmp_path):
    """torch.multiprocessing.spawn with a default group: its processes are ranks, also of one that has a world."""
    (tmp_path / "spawned.py").write_text(
        textwrap.dedent("""
        import sys
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        import distdl as dd, distdl.functional as F

        sys.stdout.reconfigure(line_buffering=True, write_through=False)

        def main(rank, path):
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
            print(int(F.all_sum_reduce(torch.ones(1), dd.Partition((2,)))), flush=True)
            dd.world().close()
            dist.destroy_process_group()

        if __name__ == "__main__":
            BEFORE
            mp.spawn(main, (sys.argv[1],), 2)
        """).replace("BEFORE", before)
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "spawned.py"), str(tmp_path / "store")],
        capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.split() == ["2", "2"], done.stderr


@OF_MPI
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 4])  # 4 have all cases of 2
def test_values_and_messages_are_those_of_mpi(n, tmp_path):
    """Every movement of the registry and its adjoint, in six dtypes: moves bitwise, sums to n ulp; same messages."""
    import torch

    found = {}
    for engine in launcher.ENGINES:
        (tmp_path / engine).mkdir()
        program = [str(ROOT / "tests" / "engine_values.py"), str(tmp_path / engine)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = subprocess.run(
            command("run", "--engine", engine, "-n", n, *program),
            capture_output=True, text=True, timeout=180, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[engine] = [torch.load(tmp_path / engine / f"{r}of{n}.pt") for r in range(n)]
    for ours, theirs in zip(found["torch"], found["mpi"]):
        assert ours.keys() == theirs.keys() and len(ours) > 100
        for key, (values, messages) in ours.items():
            wanted, their_messages = theirs[key]
            assert messages == their_messages, key
            for a, b in zip(values, wanted, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape, key
                if not any(kind == "all_reduce" for kind, *_ in messages):
                    assert torch.equal(_bits(a), _bits(b)), key
                else:
                    ulp = torch.finfo(a.dtype).eps if a.dtype.is_floating_point or a.dtype.is_complex else 0
                    torch.testing.assert_close(a, b, rtol=n * ulp, atol=n * ulp, msg=str(key))


def _bits(x):
    import torch

    return x.resolve_conj().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_launch_returns_results():
    assert dd.launch(_sum, 2, engine="torch", timeout=90)(3) == [("TorchTransport", 7), ("TorchTransport", 7)]
    with pytest.raises(ZeroDivisionError):
        dd.launch(_divide, 2, engine="torch", timeout=90)()


def _sum(x):
    import torch

    import distdl.functional as F

    world = dd.world()
    total = F.all_sum_reduce(torch.tensor([x + world.rank]), dd.Partition((world.size,)))
    return type(world.host).__name__, int(total)


def _divide():
    return 1 // dd.world().rank


@pytest.fixture
def bare(monkeypatch):
    """No launcher has said anything."""
    names = ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "DISTDL_TRANSPORT", "MASTER_ADDR"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_which_engine(bare):
    """The first that is said."""
    chosen = worlds._engine_name
    assert chosen(None, None) == "mpi"
    bare.setenv("RANK", "0")
    assert chosen(None, None) == "mpi"
    bare.setenv("WORLD_SIZE", "4")
    assert chosen(None, None) == "torch"
    bare.setenv("PMI_SIZE", "1")
    assert chosen(None, None) == "torch", "an MPI job of one, as under torchrun"
    bare.setenv("PMI_SIZE", "2")
    assert chosen(None, None) == "mpi"
    bare.setenv("DISTDL_TRANSPORT", "torch")
    assert chosen(None, None) == "torch" and chosen(None, "mpi") == "mpi"
    for said in ("gloo", "local"):
        with pytest.raises(dd.errors.TransportError, match=r"no such engine.*mpi or torch"):
            chosen(None, said)
        with pytest.raises(dd.errors.TransportError, match="no such engine"):
            launcher.engine_of(said, 2)
    assert launcher.engine_of(None, 2) == "torch" and launcher.engine_of("mpi", 2) == "mpi"

    class Comm:
        """One of MPI's."""

        def Dup(self):
            raise AssertionError

    with pytest.raises(dd.errors.TransportError, match="do not belong together"):
        chosen(Comm(), None)
    bare.delenv("DISTDL_TRANSPORT")
    assert chosen(Comm(), None) == "mpi" and chosen(object(), None) == "torch"


def test_ranks_that_cannot_meet(bare):
    bare.setenv("RANK", "1")
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(dd.errors.TransportError, match="cannot meet: no default process group, and no MASTER_ADDR"):
        worlds._by_torch(None, "default")
    bare.setenv("WORLD_SIZE", "1")
    assert type(worlds._by_torch(None, "default")).__name__ == "LocalTransport"


def test_private_names_exist():
    """What :mod:`distdl._distributed` uses of torch; NCCL's where this torch has it."""
    from datetime import timedelta

    from distdl import _distributed

    group = _distributed.gloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert (group.rank(), group.size()) == (0, 1) and callable(dist.distributed_c10d._get_default_store)
    names = ["_start_coalescing", "_end_coalescing", "_allgather_base", "_reduce_scatter_base", "shutdown"]
    kinds = [dist.ProcessGroupGloo, *([dist.ProcessGroupNCCL] if dist.is_nccl_available() else [])]
    assert not [name for kind in kinds for name in names if not hasattr(kind, name)]
    import torch

    assert callable(torch._C._construct_storage_from_data_pointer)
    if dist.is_nccl_available():
        assert dist.ProcessGroupNCCL.Options()
    whole = torch.arange(6, dtype=torch.int32)
    part = _distributed.on_device_at(whole.data_ptr() + 8, 3, torch.int32, torch.device("cpu"))
    assert part.tolist() == [2, 3, 4]
    with _distributed.plain_memory():
        assert type(torch.empty(1)) is torch.Tensor
