"""A job on CUDA devices ends by itself, also after a captured graph, and beside torch.distributed's NCCL. One launch
each, so it is no test of tests/gpu, which is itself a launch."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

pytestmark = pytest.mark.gpu


END = """
    import os
    import torch
    import distdl as dd, distdl.functional as F
    r, n = dd.world().rank, dd.world().size
    torch.cuda.set_device(r % torch.cuda.device_count())
    x = torch.ones(1000, device="cuda")
    P = dd.Partition((n,))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"], RANK=str(r), WORLD_SIZE=str(n))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    y = F.shift(x, P, 0)
    F.all_sum_reduce(x, P)
    torch.distributed.all_reduce(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = F.all_sum_reduce(F.shift(x, P, 0), P)
    graph.replay()
    torch.cuda.synchronize()
    assert z[0] == n and y[0] == n
    if {destroy}:
        torch.distributed.destroy_process_group()
    print("done", r, flush=True)
"""


@pytest.mark.parametrize("destroy", [True, False])
def test_the_process_ends(destroy, tmp_path):
    """Also after a captured graph, and beside torch.distributed's NCCL."""
    program = tmp_path / "end.py"
    program.write_text(textwrap.dedent(END.format(destroy=destroy)))
    n, port = min(2, torch.cuda.device_count()), {"TEST_PORT": str(29600 + destroy)}
    done = subprocess.run(
        [sys.executable, "-m", "distdl", "run", "-n", str(n), str(program)],
        env=os.environ | port,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("done") == n, done.stdout + done.stderr


LEAVES = """
    import os, time
    import torch
    import distdl as dd, distdl.functional as F
    r, n = dd.world().rank, dd.world().size
    torch.cuda.set_device(r)
    P, x = dd.Partition((n,)), torch.ones(1000, device="cuda")
    F.shift(x, P, 0)
    torch.cuda.synchronize()
    print("begun", time.time(), flush=True)
    if r == 1:
        {leave}
    F.shift(x, P, 0)
    torch.cuda.synchronize()
    time.sleep(60)
"""


@pytest.mark.parametrize("leave", ["os._exit(3)", "raise RuntimeError('on purpose')", "time.sleep(60)"])
def test_a_rank_that_does_not_come(leave, tmp_path):
    """The others' kernels wait for it: the job ends as soon as it is gone, or at the watchdog's limit."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 devices")
    program = tmp_path / "leaves.py"
    program.write_text(textwrap.dedent(LEAVES.format(leave=leave)))
    done = subprocess.run(
        [sys.executable, "-m", "distdl", "run", "-n", "2", str(program)],
        env=os.environ | {"DISTDL_WATCHDOG_S": "8", "DISTDL_PEER": "1"},
        timeout=120,
        capture_output=True,
        text=True,
    )
    begun = max(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("begun"))
    assert done.returncode and time.time() - begun < 20, done.stdout + done.stderr
    if "sleep" in leave:
        assert "waited in vain for rank 1, in shift" in done.stdout + done.stderr, done.stdout + done.stderr
