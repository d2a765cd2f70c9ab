"""torchrun as the supervisor of MPI ranks: a job that fails is started again, here on fewer ranks, and goes on where it
was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import distdl as dd
import distdl.functional as F

saved, world = sys.argv[1], dd.world()
P = dd.Partition((world.size,))
L = dd.Layout(P, (7,))  # uneven on 3 and on 2 ranks
state = torch.load(saved) if os.path.exists(saved) else {"step": 0, "w": torch.ones(7, dtype=torch.float64)}
w, start = L.shard(state["w"]).clone(), state["step"]
dd.parallel.export_rendezvous()  # over torchrun's own variables, which are the launcher's
dist.init_process_group("gloo")
for step in range(start, 6):
    if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
        raise RuntimeError("a node is lost")
    gradient = torch.func.grad(lambda w: F.invariant_sum((w**2).sum(), P) ** 2)(w)
    w = w - 0.01 * gradient
    whole = F.gather(w, L)
    if world.rank == 0:
        torch.save({"step": step + 1, "w": whole}, saved + "~")
        os.replace(saved + "~", saved)
    dist.barrier()
dist.destroy_process_group()
print(f"rank {world.rank} of {world.size} did steps {start} to 5", flush=True)
"""


@pytest.mark.slow  # seven processes that import torch
def test_restart_on_fewer_ranks(tmp_path):
    program, saved = tmp_path / "train.py", tmp_path / "state.pt"
    program.write_text(PROGRAM)
    job = f"exec {sys.executable} -m distdl run -n $((3 - TORCHELASTIC_RESTART_COUNT)) {program} {saved}"
    supervise = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "2",
        "--no-python",
        "sh",
        "-c",
        job,
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(supervise, check=False, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "a node is lost" in done.stderr
    assert [f"rank {r} of 2 did steps 3 to 5" in done.stdout for r in range(2)] == [True, True], done.stdout
    w = torch.ones(7, dtype=torch.float64)
    for _ in range(6):
        w = w - 0.01 * torch.func.grad(lambda w: (w**2).sum() ** 2)(w)
    assert torch.allclose(torch.load(saved)["w"], w, rtol=1e-12)
