"""Peer memory on devices of one node: that it is used, and what only a device can show of it."""

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.engine import peer
from distdl.engine.peer.kernel import Launch

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(2)]


def device():
    """This rank's device, made the current one."""
    torch.cuda.set_device(dd.world().rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _one_device_each():
    world = dd.world()
    if torch.cuda.device_count() < world.size or world.cuda != "nccl" or peer.asked_for() is False:
        pytest.skip("needs a device for each rank, and no DISTDL_PEER=0")
    engine = world.transport(torch.zeros(1, device=device()), tuple(range(world.size)))
    if engine.reach is None and not peer.asked_for():
        pytest.skip("needs NVLink, or DISTDL_PEER=1")


@pytest.fixture
def launches(monkeypatch):
    """What kernels are launched."""
    found, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (found.append(type(self).__name__), run(self)))
    return found


def repartition(n=256, world="default"):
    size = dd.world(world).size
    rows, columns = (dd.Layout(dd.Partition(s, world=world), (n, n)) for s in ((size, 1), (1, size)))
    x = rows.shard(torch.linspace(-1, 1, n * n, dtype=torch.float64).reshape(n, n)).clone()
    return lambda t: F.repartition(t, rows, columns), x


def halo(shape=(6, 8, 10), world="default"):
    """Faces, edges and corners of a split volume: strided words of every width."""
    size = dd.world(world).size
    L = dd.Layout(dd.Partition((1, 1, size), world=world), (*shape[:2], shape[2] * size))
    spec = dd.HaloSpec(L, (1, 1, 2), boundary="circular")
    x = L.shard(torch.randn(L.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).clone()
    return lambda t: F.halo_exchange(t, spec), x


def same(found, wanted, what):
    dd.testing.collective_assert(torch.equal(found.cpu(), wanted), f"{what}: differs from the CPU")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex128], ids=str
)
@pytest.mark.parametrize("make", [repartition, halo], ids=lambda f: f.__name__)
def test_values(make, dtype, launches):
    call, x = make()
    x = (x * 9).to(dtype)
    for t in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        found = call(t.to(device()))
        same(found, call(x), "value")
    assert launches == ["Mover"] * 2
    if dtype.is_floating_point:
        _, pull = torch.func.vjp(call, x.to(device()))
        _, wish = torch.func.vjp(call, x)
        g = call(x) + dd.world().rank
        same(pull(g.to(device()))[0], wish(g)[0], "adjoint")


def test_a_result_stays():
    call, x = repartition(1024)
    x = x.to(device())
    first = call(x)
    before = first.clone()
    for k in range(50):
        call(x + k)
    dd.testing.collective_assert(torch.equal(first, before), "a later call wrote into an older result")


def test_channels_last():
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n, 1)), (2, 4, 6 * n, 5))
    spec = dd.HaloSpec(L, (0, 0, 1, 1))
    x = L.shard(torch.randn(L.shape, generator=torch.Generator().manual_seed(1))).clone()
    y = F.halo_exchange(x.to(device()).contiguous(memory_format=torch.channels_last), spec)
    same(y, F.halo_exchange(x, spec), "channels_last")
    dd.testing.collective_assert(y.is_contiguous(memory_format=torch.channels_last), "another format")


@pytest.mark.parametrize("count", [100, 2**16])
def test_a_captured_sum(count):
    """Small sums go by peer memory before, and by NCCL in a graph."""
    P = dd.Partition((dd.world().size,))
    x = torch.arange(count, device=device()).float() + dd.world().rank
    wanted = F.all_sum_reduce(x.cpu(), P)
    same(F.all_sum_reduce(x, P), wanted, "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = F.all_sum_reduce(x, P)
    graph.replay()
    same(found, wanted, "replayed")


def test_two_streams():
    """What is started goes on a stream of its own, between movements of the current one: one order of lanes."""
    (one, x), (two, z) = repartition(512), halo((20, 30, 40))
    n = dd.world().size
    A = dd.maps.shift(dd.Partition((n,)), 0, 1, True, x.shape)
    wanted = one(x), A(x), two(z), A(x)
    x, z = x.to(device()), z.to(device())
    for _ in range(100):
        pending = F.start(A, x)
        a, c = one(x), two(z)
        b = F.wait(pending)
        d = A(x)
        found = a, b, c, d
    for f, w in zip(found, wanted):
        same(f, w, "beside another stream")


def test_graphs_between_calls():
    """A captured graph goes by NCCL, and may run between movements by peer memory."""
    call, x = repartition()
    leaf = x.to(device())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(leaf)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(leaf)
    for k in range(5):
        leaf.copy_(x + k)
        eager = call(leaf)
        graph.replay()
        same(eager, call(x + k), "eager")
        same(found, call(x + k), "replayed")


@pytest.mark.parametrize("count", [1, 7, 1000, 32768, 50000])
def test_small_sums(count, launches):
    """Of all dtypes; equal to the last bit on all ranks."""
    P = dd.Partition((dd.world().size,))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool,
                  torch.complex64, torch.complex128, torch.int64, torch.int8):  # fmt: skip
        x = ((torch.arange(count + 1) * 7 + dd.world().rank) % 11).to(dtype)
        for t in (x[:count], x[1:]):
            same(F.all_sum_reduce(t.to(device()), P), F.all_sum_reduce(t, P), str(dtype))
    assert "Summer" in launches
    x = torch.randn(count, device=device()) * 10.0 ** dd.world().rank
    y = F.all_sum_reduce(x, P)
    told = dd.world().all_gather(y.cpu().numpy().tobytes(), P.ranks)
    dd.testing.collective_assert(len(set(told.values())) == 1, "ranks have different sums")


def test_other_nodes(monkeypatch, launches):
    """Every rank a node of its own, as pretended, and two nodes: what is not reached goes by NCCL."""
    from mpi4py import MPI

    for name, node in (("alone", lambda self: self.world.rank), ("pairs", lambda self: self.world.rank // 2)):
        monkeypatch.setattr(peer.PeerMemory, "node", node)
        dd.World(MPI.COMM_WORLD, name)
        before = len(launches)
        for make in (repartition, halo):
            call, x = make(world=name)
            same(call(x.to(device())), call(x), name)
        assert name != "alone" or len(launches) == before


def test_memory_stays():
    call, x = halo((32, 32, 32))
    leaf, used = x.to(device()).requires_grad_(), []
    for step in range(2000):
        call(leaf).sum().backward()
        leaf.grad = None
        if step in (50, 1999):
            torch.cuda.synchronize()
            used.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    (before, free), (after, free_after) = used
    dd.testing.collective_assert(after <= before and free_after >= free - 2**20, f"memory grew: {used}")
