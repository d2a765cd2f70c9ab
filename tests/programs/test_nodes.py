"""Several nodes: network namespaces of this machine, joined by a cable, so that neither shared memory nor the loopback
device carries a message."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
import distdl as dd
import distdl.functional as F

n = dd.world().size
L, M = dd.Layout(dd.Partition((n, 1)), (5, 3)), dd.Layout(dd.Partition((1, n), range(n - 1, -1, -1)), (5, 3))
X = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
x = L.shard(X)
y, pull = torch.func.vjp(lambda x: F.repartition(x, L, M), x)
assert torch.equal(y, M.shard(X)) and torch.equal(pull(M.shard(2 * X))[0], 2 * x)
assert int(F.all_sum_reduce(torch.ones(1), dd.Partition((n,)))) == n
sys.stdout.write(f"rank {dd.world().rank} of {n}, {type(dd.world().host).__name__}\\n")
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)


@pytest.fixture
def nodes():
    """Names of two namespaces, and of the device by which each reaches the other; 10.9.0.1 and 10.9.0.2."""
    mark = uuid.uuid4().hex[:8]
    names = [f"distdl-{mark}-{i}" for i in range(2)]
    cable = [f"dd{mark}{i}" for i in range(2)]
    try:
        made = [ip("netns", "add", name) for name in names]
    except FileNotFoundError:
        pytest.skip("needs the command ip")
    try:
        made.append(ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", cable[1], "netns", names[1]))
        for i, (name, device) in enumerate(zip(names, cable)):
            made.append(ip("-n", name, "addr", "add", f"10.9.0.{i + 1}/24", "dev", device))
            made += [ip("-n", name, "link", "set", what, "up") for what in ("lo", device)]
        wrong = [done.stderr for done in made if done.returncode]
        if wrong:
            pytest.skip(f"needs network namespaces: {wrong[0].strip()}")
        yield list(zip(names, cable))
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_torchrun_on_two_nodes(nodes, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "DISTDL_"))}
    jobs = []
    for i, (name, device) in enumerate(nodes):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        where = ["--node-rank", str(i), "--master-addr", "10.9.0.1", "--master-port", "29400"]
        jobs.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, *where, str(tmp_path / "program.py")],
                env=own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [job.communicate(timeout=120) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(err[-3000:] for _, err in told)
    lines = [sorted(out.splitlines()) for out, _ in told]
    assert lines == [[f"rank {r} of 4, TorchTransport" for r in (2 * i, 2 * i + 1)] for i in range(2)]
