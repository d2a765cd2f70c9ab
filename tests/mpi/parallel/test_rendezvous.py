"""torch.distributed in a job that MPI launched, beside operators: collectives, RPC, an asynchronous parameter
server."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.nn.functional as tf

import distdl as dd
import distdl.functional as F
from distdl import parallel
from distdl.programs import demo

WORLD = dd.world()
RANK, SIZE = WORLD.rank, WORLD.size
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


@pytest.fixture(autouse=True)
def own_environment():
    """What is exported here must not reach other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_what_is_exported():
    found = parallel.export_rendezvous()
    assert found.keys() >= set(VARIABLES) and all(os.environ[k] == v for k, v in found.items())
    here = dd.Topology.discover()
    assert (found["RANK"], found["WORLD_SIZE"]) == (str(RANK), str(SIZE))
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(here.local_rank), str(here.local_size))
    shared = dd.testing.gather_objects((found["MASTER_ADDR"], found["MASTER_PORT"]))
    assert len(set(shared)) == 1 and 0 < int(found["MASTER_PORT"]) < 65536
    if here.num_nodes == 1:
        assert found["MASTER_ADDR"] == "127.0.0.1" and os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    chosen = parallel.export_rendezvous(addr=f"host{RANK}", port=4000 + RANK)
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("host0", "4000"), "rank 0's choice counts"
    assert "GLOO_SOCKET_IFNAME" not in chosen and os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_process_group_beside_operators():
    """Both engines in one program, between each other's calls; and a second process group after the first has ended."""
    P = dd.Partition((SIZE,))
    for _ in range(2):
        parallel.export_rendezvous()
        dist.init_process_group("gloo")
        try:
            assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
            x = torch.arange(3.0) + RANK
            y = x.clone()
            dist.all_reduce(y)
            assert torch.equal(y, F.all_sum_reduce(x, P))
            received = F.shift(x, P, 0)
            dist.broadcast(y, SIZE - 1)
            assert torch.equal(received, torch.arange(3.0) + (RANK - 1) % SIZE)
            gathered = [None] * SIZE
            dist.all_gather_object(gathered, RANK)
            assert gathered == list(range(SIZE))
        finally:
            dist.destroy_process_group()


# ---------------------------------------------------------------- an asynchronous parameter server

LOCK, STATE = threading.Lock(), {}  # rank 0's are used


@pytest.fixture
def on_host():
    """RPC sends tensors of the host, unless it is told of devices."""
    with torch.device("cpu"):
        yield


def pull():
    """The weights now."""
    with LOCK:
        return STATE["w"].clone()


def push(gradient):
    """One worker's step."""
    with LOCK:
        STATE["w"] -= 0.05 * gradient
        STATE["updates"] += 1


@pytest.mark.mpi(2)
@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")  # torch's RPC, of its own call
@pytest.mark.usefixtures("on_host")
def test_asynchronous_parameter_server():
    """Workers train softmax regression on their own digits, waiting for nobody; then all ranks meet in operators
    again."""
    images, labels = demo.load_digits(600)
    images, loss = images.flatten(1).double(), lambda w, x, y: tf.cross_entropy(x @ w.T, y)
    STATE.update(w=torch.zeros(10, 784, dtype=torch.float64), updates=0)
    pushed, steps, late = torch.zeros_like(STATE["w"]), 15, []
    parallel.export_rendezvous()
    rpc.init_rpc(f"rank{RANK}", rank=RANK, world_size=SIZE)
    for step in range(steps if RANK else 0):
        rows = slice(step, None, SIZE * 3) if RANK == 1 else slice(RANK + step, None, SIZE * 5)
        w = rpc.rpc_sync("rank0", pull)
        gradient = torch.func.grad(loss)(w, images[rows], labels[rows])
        pushed += gradient
        late.append(
            rpc.rpc_async("rank0", push, args=(gradient,))
        )  # the next step starts at once, from whatever w then is
    torch.futures.wait_all(late)
    rpc.shutdown()  # waits for all
    P, root = dd.Partition((SIZE, 1)), dd.Partition((1, 1))
    w = F.broadcast(STATE["w"], root, P, shape=(10, 784))
    expected = -0.05 * F.all_sum_reduce(pushed, P)
    assert torch.allclose(w, expected, rtol=1e-10, atol=1e-12), "every gradient was applied once, whole"
    assert STATE["updates"] == (0 if RANK else steps * (SIZE - 1))
    assert loss(w, images, labels) < 0.9 * loss(torch.zeros_like(w), images, labels)
