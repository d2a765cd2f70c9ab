"""Faults of a running job: it ends by itself, with a non-zero code, the cause is printed last, and no process stays."""

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from jobs import command, gone

from distdl.programs.launch import find_mpi

pytestmark = pytest.mark.skipif(find_mpi() is None, reason="needs mpi4py and an MPI library")
HEAD = """
import os, signal, sys, threading, time
import torch
import distdl as dd
import distdl.functional as F
rank, size = dd.world().rank, dd.world().size
P = dd.Partition((size,))
x = torch.ones(4, requires_grad=True)
open(f"pid{rank}", "w").write(str(os.getpid()))
while not all(os.path.exists(f"pid{r}") for r in range(size)):  # imports take as long as the machine is busy: no fault
    time.sleep(0.01)
F.all_sum_reduce(x, P)  # all are here
def now():
    open("fault", "w").close()
"""


@pytest.fixture
def job(tmp_path):
    """Run a program that fails: ``(exit code, lines of stderr)``. Checks what holds for every fault."""

    def run(body, n=2, sent=None, within=20, head=HEAD, **variables):
        path = tmp_path / "program.py"
        path.write_text(head + textwrap.dedent(body))
        started = subprocess.Popen(
            command("run", "-n", n, path),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
        )
        if sent is not None:
            until = time.monotonic() + 60
            while not (tmp_path / "fault").exists() and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1)
            started.send_signal(sent)
        try:
            _, err = started.communicate(timeout=100)
        finally:
            started.kill()
            started.communicate()
        ended = time.time()
        assert started.returncode != 0
        assert ended - (tmp_path / "fault").stat().st_mtime < within, "it took too long to end"
        pids = [path.read_text() for path in tmp_path.glob("pid*")]
        assert len(pids) == n
        assert gone(pids)
        boards = [
            b
            for folder in ("/dev/shm", "/tmp")
            if os.path.isdir(folder)
            for b in Path(folder).glob("distdl-board-*")
            if b.stat().st_mtime < ended - 5 and b.stat().st_uid == os.getuid()
        ]
        assert not boards
        return started.returncode, err.replace("\0", "").rstrip().splitlines()  # Open MPI writes a stray zero

    return run


FAULTS = {  # what rank 1 does while the others wait for it, and how the last line ends
    "forward": ("if rank == 1: now(); raise ValueError('broken')\nF.shift(x, P, 0)", "ValueError: broken"),
    "backward": ("""
        y = F.shift(x, P, 0) * 2
        def hook(g):
            now()
            raise ValueError("broken")
        if rank == 1: y.register_hook(hook)
        y.sum().backward()
        """, "ValueError: broken"),
    "at exit": ("""
        import atexit
        def broken():
            now()
            raise ValueError("broken")
        if rank == 1: atexit.register(broken)
        else: F.shift(x, P, 0)
        """, "ValueError: broken"),
    "memory": ("if rank == 1: now(); torch.empty(2**56)\nF.shift(x, P, 0)", "bytes"),
    "class": ("""
        now()
        L, target = dd.Layout(dd.Partition((size, 1)), (2 * size, 3)), torch.tensor([0, 7 if rank == 1 else 0])
        F.dist_cross_entropy(torch.zeros(2, 3), target, L)
        """, "got 7; partitions"),
    "index": ("""
        now()
        F.dist_embedding(torch.tensor([99 if rank == 1 else 0]), torch.zeros(3, 2), dd.Partition((size, 1, 1)))
        F.shift(x, P, 0)
        """, "expected 0 <= index < 3, got 99"),
    "thread": ("""
        def work():
            F.shift(x, P, 0)
            if rank == 1: now(); raise ValueError("broken")
            F.shift(x, P, 0)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        F.shift(x, P, 0)
        """, "ValueError: broken"),
    "sys.exit": ("if rank == 1: now(); sys.exit('enough')\nF.shift(x, P, 0)", "enough"),
}  # fmt: skip


@pytest.mark.parametrize(
    "where", [w if w in ("backward", "at exit") else pytest.param(w, marks=pytest.mark.slow) for w in FAULTS]
)
def test_exception_on_one_rank(job, where):
    body, last = FAULTS[where]
    code, lines = job(body, 3 if where == "backward" else 2)
    assert code == 1 and lines[-1].startswith("[rank 1] ") and last in lines[-1], lines[-8:]


@pytest.mark.slow
def test_a_sum_of_different_sizes(job):
    """MPI says that a message was cut off; the library says what to look for."""
    code, lines = job("now()\nF.all_sum_reduce(torch.zeros(3 + rank), P)")
    assert code == 1 and any(
        "TransportError: all_reduce" in line and "same shape and dtype" in line for line in lines
    ), lines[-8:]


def test_killed_rank(job):
    """kill -9, as by the system when memory runs out, while that rank waits for a message: no Python code runs any
    more."""
    code, lines = job("""
        def kill():
            now()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1: threading.Timer(1, kill).start()
        while rank == 1: F.shift(x, P, 0)
        F.shift(x, P, 0)
        time.sleep(600)
        """)  # fmt: skip
    assert code in (1, 128 + signal.SIGKILL) and "(signal 9: Killed)" in lines[-1], lines[-8:]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_interrupt_during_a_movement(job, sent):
    code, _ = job("if rank == 0: now(); F.shift(x, P, 0)\ntime.sleep(600)", sent=sent)
    assert code == 128 + sent


STUCK = """
F.shift(x, P, 0)
if rank == 1:  # early stop on one rank
    now()
    sys.exit(0)
def step(): return F.all_sum_reduce(x, P)
step()
"""


def test_watchdog(job):
    """Without checking: who waits says where, shows its stack, and what the others last did."""
    code, lines = job(STUCK, 3, DISTDL_WATCHDOG_S="2")
    text = "\n".join(lines)
    assert code == 1
    assert (
        "is stuck for" in text and "in all_sum_reduce over Partition((3,))" in text and "program.py:20 in step" in text
    )
    assert "still missing" in text and "def step(): return F.all_sum_reduce(x, P)" in text
    assert (
        "rank 1 has left the program, last completed shift over Partition((3,))" in text
        and "is inside all_sum_reduce" in text
    )
    assert lines[-1].startswith(("[rank 0]   rank ", "[rank 2]   rank "))


@pytest.mark.slow
def test_watchdog_names_the_missing_peer(job):
    code, lines = job("""
        if rank == 1:
            now()
            time.sleep(600)
        F.shift(x, P, 0, periodic=False)
        time.sleep(600)
        """, 3, DISTDL_WATCHDOG_S="2")  # fmt: skip
    text = "\n".join(lines)
    assert code == 1 and "rank 2 of 3 is stuck" in text and "still missing: rank 1\n" in text
    assert "rank 1 is outside of any movement, last completed all_sum_reduce" in text


def test_checking_by_the_environment(job):
    """A rank that left is reported at once, whatever the time limit."""
    code, lines = job(STUCK, 3, DISTDL_CHECK="1", DISTDL_CHECK_TIMEOUT="60")
    assert code == 1
    for words in (
        "AbsenceError: all_sum_reduce: rank 1 has left the program",
        "last completed shift over Partition((3,)) at ",
        "program.py:16",
        "ranks 0, 2 are in all_sum_reduce",
        "program.py:20 in step",
    ):
        assert words in lines[-1]


@pytest.mark.slow
def test_groups_in_another_order(job):
    """Case 39: a ring of four in two groups of pairs; odd ranks begin with the other group, so that each waits for the
    next."""
    code, lines = job(
        """
        pairs = [dd.Partition((2,), ranks) for ranks in [(0, 1), (2, 3), (1, 2), (3, 0)]]
        if rank == 0: now()
        with dd.checking(timeout=3):
            for Q in pairs if rank % 2 else pairs[::-1]:
                if rank in Q.ranks: F.all_sum_reduce(x, Q)
        """,
        4,
    )
    assert code == 1 and "AbsenceError: all_sum_reduce: rank " in lines[-1] and "did not come within 3 s" in lines[-1]
    # Their limits pass together: a neighbour that has just given up is in no movement any more.
    assert any(f"{does} all_sum_reduce over Partition((2,)" in lines[-1] for does in ("is inside", "has begun"))


FIRST_USE = """
import os, sys, time
import torch
import distdl as dd
import distdl.functional as F
from mpi4py.MPI import COMM_WORLD as world
open(f"pid{world.rank}", "w").write(str(os.getpid()))
if world.rank == 2: open("fault", "w").close()
P = dd.Partition((2,))
if world.rank < 2: F.shift(torch.ones(3), P, 0)
world.Barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"DISTDL_WATCHDOG_S": "3"}, {"DISTDL_CHECK": "1", "DISTDL_CHECK_TIMEOUT": "3"}],
                         ids=["watchdog", "checking"])  # fmt: skip
def test_who_does_not_come_to_the_first_use_is_named(job, how):
    """The first use is collective over all ranks, also where the movement is not."""
    code, lines = job("", 3, head=FIRST_USE, within=120, **how)
    assert code == 1
    assert "rank 2 did not come to the first use of distdl" in lines[-1] and "program.py:10 in <module>" in lines[-1], (
        lines[-8:]
    )


@pytest.mark.slow
def test_the_first_use_says_for_whom_it_waits(job):
    head = FIRST_USE.replace("world.Barrier()", "if world.rank == 2: time.sleep(30); sys.exit(5)")
    code, lines = job("", 3, head=head, within=300)
    assert code == 5
    (line,) = [line for line in lines if line.startswith("distdl: ")]
    assert line.startswith("distdl: rank 2 did not come to the first use of distdl; ranks 0, 1 waited 10 s at ")


WORKERS = """
import sys, torch, distdl as dd, distdl.functional as F
rank, P = dd.world().rank, dd.Partition((2,))
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return torch.tensor([i + 10.0 * dd.world().rank])
class Moving(Rows):
    def __getitem__(self, i): return F.shift(torch.ones(1), P, 0)
if __name__ == "__main__":
    options = dict(batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1])
    load = lambda data: list(torch.utils.data.DataLoader(data, **options))
    (x,) = load(Rows())
    try: load(Moving())
    except dd.errors.TransportError as error: said = "this process is no rank, and moves nothing" in str(error)
    print(x.flatten().tolist(), said, F.all_sum_reduce(torch.ones(1), P).item())
"""


@pytest.mark.slow  # up to six processes that import torch
@pytest.mark.parametrize("how", ["spawn", "forkserver", "fork"])
def test_workers_of_a_rank_know_it_and_move_nothing(tmp_path, how):
    """A DataLoader's worker imports the script, or is a fork of its rank: MPI runs in neither, and the job goes on."""
    (tmp_path / "program.py").write_text(WORKERS)
    line = command("run", "-n", 2, "--timeout", 240, "program.py", how)
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{10.0 * r}, {10.0 * r + 1}] True 2.0" for r in range(2)]
