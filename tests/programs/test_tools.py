"""The commands of docs/tools.md, with the programs that stand there."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
RUN = [sys.executable, "-m", "distdl", "run", "-n", "2"]


def block(section):
    """The first program of a section."""
    return re.search(r"^```python\n(.*?)^```$", PAGE[PAGE.index(f"\n## {section}\n") :], re.MULTILINE | re.DOTALL)[1]


def environment(**more):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def ran(command, folder, **options):
    """A finished process, whose output is text."""
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **{"env": environment(), **options},
    )


def test_pytest(tmp_path):
    """The page's tests run, and pass."""
    command = [*RUN, "-m", "pytest", "test_mine.py", "-q", "-p", "no:cacheprovider"]
    assert " ".join(command[1:]).replace("-m distdl", "python -m distdl", 1) in PAGE
    (tmp_path / "test_mine.py").write_text(block("pytest"), encoding="utf-8")
    done = ran(command, tmp_path)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_notebook(tmp_path):
    """Its function travels to the ranks."""
    import torch

    import distdl as dd
    import distdl.functional as F

    (tmp_path / "cell.py").write_text(block("A notebook"), encoding="utf-8")
    done = ran([sys.executable, "cell.py"], tmp_path)
    whole = F.normal(dd.Layout(dd.Partition((1, 1)), (5, 3)), seed=0, dtype=torch.float64)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - float(whole.norm())) < 1e-12


def test_pdb(tmp_path):
    """Rank 0 reads the launcher's standard input."""
    (tmp_path / "stop.py").write_text(block("pdb"), encoding="utf-8")
    done = ran([*RUN, "stop.py"], tmp_path, env=environment(STOP="1"), input="p x * 7\ncontinue\n")
    assert done.returncode == 0 and "(Pdb) tensor([7., 7.])" in done.stdout, done.stdout + done.stderr
    assert "rank 1: [3.0, 3.0]" in done.stdout


WAITS = """
import os, time
import torch
import distdl as dd
import distdl.functional as F

P = dd.Partition((2,))
pids = dd.testing.gather_objects(os.getpid())
if dd.world().rank == 1:
    print(*pids, flush=True)
    time.sleep(100)
print(F.all_sum_reduce(torch.ones(1), P))
"""


@pytest.mark.skipif(not shutil.which("py-spy"), reason="py-spy is not installed")
def test_py_spy(tmp_path):
    """A rank that waits stands in the engine, below the program's own line; the other one where it is."""
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    job = subprocess.Popen([*RUN, "waits.py"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        stacks = [ran(["py-spy", "dump", "--pid", pid], tmp_path) for pid in job.stdout.readline().split()]
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
    if any("Permission" in done.stderr or "Operation not permitted" in done.stderr for done in stacks):
        pytest.skip("this machine forbids to look into other processes")

    def line(text):
        return f"waits.py:{1 + WAITS.count(chr(10), 0, WAITS.index(text))})"

    assert line("F.all_sum_reduce") in stacks[0].stdout and "distdl/engine" in stacks[0].stdout, stacks[0]
    assert line("time.sleep") in stacks[1].stdout and "distdl/engine" not in stacks[1].stdout, stacks[1]
