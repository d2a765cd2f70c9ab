"""Streams, CUDA graphs and a long run: what only a device can show."""

import copy
from importlib.util import find_spec

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


def device():
    """This rank's device, made the current one."""
    index = dd.world().rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def problem(size=64):
    """A loss of a halo, a repartition, an all-gather and a sum; and this rank's block."""
    n = dd.world().size
    rows, columns = dd.Layout(dd.Partition((n, 1)), (size, size)), dd.Layout(dd.Partition((1, n)), (size, size))
    spec = dd.HaloSpec(rows, (1, 0), boundary="circular")

    def loss(x):
        window = F.halo_exchange(x.sin(), spec)
        grown = window[2:] + window[:-2]
        mine = F.repartition(grown, rows, columns).square().sum() + F.all_gather(x, rows).cos().sum()
        return F.invariant_sum(mine, columns.partition)

    x = rows.shard(torch.linspace(-1, 1, size * size, dtype=torch.float64).reshape(size, size)).clone()
    return loss, x


def same(found, wanted, what):
    """Every rank's result equals the CPU's."""
    dd.testing.collective_assert(
        torch.allclose(found.cpu(), wanted, rtol=1e-12, atol=1e-12), f"{what}: differs from the CPU"
    )


def test_nothing_is_staged():
    loss, x = problem()
    x = x.to(device())
    where = dd.world()
    assert where.cuda != "nccl" or where.size == 1 or where.transport(x, tuple(range(where.size))) is not where.host


def test_no_host_synchronisation():
    """Forward, backward, jvp and vmap only enqueue work."""
    if dd.world().cuda == "staged":
        pytest.skip("what is staged waits for the device")
    loss, x = problem()
    x = x.to(device()).requires_grad_()
    v = torch.ones_like(x)

    def everything():
        loss(x).backward()
        torch.func.jvp(lambda t: F.shift(t, dd.Partition((dd.world().size,)), 0), (x.detach(),), (v,))
        dd.func.hvp(loss, x.detach(), v)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_streams():
    loss, x = problem(512)
    wanted = torch.func.grad(loss)(x)
    side, on_device = torch.cuda.Stream(device()), x.to(device())
    for _ in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            leaf = on_device.clone().requires_grad_()
            loss(leaf).backward()
        torch.cuda.current_stream().wait_stream(side)
        same(leaf.grad, wanted, "gradient on a side stream")


def test_split_phase_is_on_a_stream_of_its_own():
    n, r = dd.world().size, dd.world().rank
    A = dd.maps.shift(dd.Partition((n,)), 0, 1, True, (1 << 20,))
    x = torch.full((1 << 20,), float(r), device=device(), requires_grad=True)
    for _ in range(10):
        pending = F.start(A, x)
        busy = torch.ones(512, 512, device=device()) @ torch.ones(512, 512, device=device())
        y = F.wait(pending) * busy[0, 0]
    same(y, torch.full((1 << 20,), 512.0 * ((r - 1) % n)), "split phase")
    (g,) = torch.autograd.grad(y, x, torch.full_like(y, r + 1.0))
    same(g, torch.full((1 << 20,), 512.0 * ((r + 1) % n + 1)), "its adjoint")


def near(found, wanted, what):
    """Every rank's result equals the CPU's up to the rounding of long sums."""
    off = float((found.cpu() - wanted).abs().max() / wanted.abs().max())
    dd.testing.collective_assert(off < 1e-10, f"{what}: off by {off:.1e} of the largest entry")


@pytest.mark.parametrize("grid", ["line", "tiles"])
def test_overlapped_convolutions(grid):
    """The strips, and their adjoint in backward, are on the side stream: again and again, so that a race has its
    chance."""
    n = dd.world().size
    P = dd.Partition((1, 1, n, 1)) if grid == "line" or n % 2 else dd.Partition((1, 1, 2, n // 2))
    L = dd.Layout(P, (1, 4, 256 * n, 512))
    draw = torch.Generator().manual_seed(3)
    X, W, G = (torch.randn(s, dtype=torch.float64, generator=draw) for s in (L.shape, (4, 4, 5, 5), L.shape))
    x, w, g = (t.to(device()) for t in (L.shard(X), W, L.shard(G)))
    serial = [t.clone().requires_grad_() for t in (X, W)]
    (torch.nn.functional.conv2d(*serial, padding=2).sin() * G).sum().backward()
    for _ in range(20):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = F.dist_conv(leaves[0], leaves[1], L, padding=2, params="invariant", overlap=True)
        (y.sin() * g).sum().backward()
        near(leaves[0].grad, L.shard(serial[0].grad), "x's gradient")
        near(leaves[1].grad, serial[1].grad, "w's gradient")
    loss = lambda x, o: (F.dist_conv(x.sin(), w, L, padding=2, overlap=o) ** 3).sum() * (1 + dd.world().rank)
    near(
        dd.func.hvp(lambda x: loss(x, True), x, g),
        dd.func.hvp(lambda x: loss(x, False), x, g).cpu(),
        "second derivative",
    )
    found = []
    for overlap in (True, False):  # by the engine, whose second derivative is on the side stream too
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf, overlap), leaf, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), leaf)[0])
    near(found[0], found[1].cpu(), "the engine's second derivative")


def captured(step):
    """(a CUDA graph of ``step``, its result in there), after runs on a stream of their own, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


@pytest.mark.parametrize("backward", [False, True])
def test_an_overlapped_convolution_in_a_graph(backward):
    n = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, n)), (2, 3, 64 * n))
    draw = torch.Generator().manual_seed(3)
    X, w = (torch.randn(s, dtype=torch.float64, generator=draw) for s in (L.shape, (3, 3, 3)))
    x = L.shard(X)
    leaf, weight = x.to(device()).requires_grad_(backward), w.to(device())

    def step():
        y = F.dist_conv(leaf, weight, L, padding=1, overlap=True)
        return torch.autograd.grad(y.square().sum(), leaf)[0] if backward else y.detach()

    graph, found = captured(step)
    on_host = lambda x: F.dist_conv(x, w, L, padding=1)
    for scale in (1.0, -2.0):
        with torch.no_grad():
            leaf.copy_(x * scale)
        graph.replay()
        wanted = torch.func.grad(lambda x: on_host(x).square().sum())(x * scale) if backward else on_host(x * scale)
        same(found, wanted, "a replayed convolution")


@pytest.mark.parametrize("backward", [False, True])
def test_graph_capture(backward):
    loss, x = problem()
    leaf = x.to(device()).requires_grad_(backward)

    def step():
        value = loss(leaf)
        if backward:
            (leaf.grad,) = torch.autograd.grad(value, leaf)
        return value.detach()

    graph, value = captured(step)
    for scale in (1.0, 0.5, -2.0):
        with torch.no_grad():
            leaf.copy_(x * scale)
        graph.replay()
        same(value, loss(x * scale), "a replayed value")
        if backward:
            same(leaf.grad, torch.func.grad(loss)(x * scale), "a replayed gradient")


@pytest.mark.skipif(not compiled.available or find_spec("triton") is None, reason="needs a compiler of graphs")
@pytest.mark.filterwarnings("ignore")  # torch's compiler has warnings of its own
@pytest.mark.parametrize("backward", [False, True])
def test_graphs_of_compiled_code(backward):
    """mode="reduce-overhead" runs a first time, records, and replays; where movements go through the host it holds what
    is between them."""
    loss, x = problem()
    step = torch.func.grad(loss) if backward else loss
    torch._dynamo.reset()
    ours = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for scale in (1.0, 0.5, -2.0, 3.0):
        torch.compiler.cudagraph_mark_step_begin()
        same(ours((x * scale).to(device())), step(x * scale), f"step {scale}")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's: of a graph that is empty, between two host operators, and its own past
@pytest.mark.skipif(not compiled.available or find_spec("triton") is None, reason="needs a compiler of graphs")
def test_dropout_in_graphs_of_compiled_code():
    """Another mask at each call: those of eager code."""
    n = dd.world().size
    L = dd.Layout(dd.Partition((n, 1)), (4 * n + 1, 6))
    net = torch.nn.Sequential(dd.nn.Dropout(L, 0.5), dd.nn.Dropout(L, 0.25))
    eager, x = copy.deepcopy(net), L.shard(torch.rand(L.shape) + 1).to(device())
    torch._dynamo.reset()
    ours, seen = torch.compile(net, mode="reduce-overhead", fullgraph=True), []
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        seen.append(eager(x).cpu())
        same(ours(x), seen[-1], f"step {step}")
    torch._dynamo.reset()
    dd.testing.collective_assert(not torch.equal(seen[2], seen[3]), "one mask twice")


def test_a_graph_of_what_goes_through_the_host():
    if dd.world().cuda != "staged" or dd.world().size == 1:
        pytest.skip("of staged movements")
    loss, x = problem()
    x = x.to(device())
    loss(x)
    with (
        pytest.raises(dd.errors.TransportError, match="a CUDA graph cannot hold"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        loss(x)
    torch.cuda.synchronize()


def test_all_dtypes():
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ):
        x = (torch.arange(4) + r).to(dtype)
        for call in (
            lambda t: F.all_sum_reduce(t, P),
            lambda t: F.shift(t, P, 0),
            lambda t: F.all_gather(t, P),
            lambda t: F.reduce_scatter(t.repeat(n), P),
        ):
            found = call(x.to(device()))
            dd.testing.collective_assert(
                found.dtype == dtype and torch.equal(found.cpu(), call(x)), f"{dtype}: differs"
            )


def test_a_thousand_steps_use_no_more_memory():
    loss, x = problem()
    leaf = x.to(device()).requires_grad_()
    used = []
    for step in range(1000):
        loss(leaf).backward()
        leaf.grad = None
        if step in (50, 999):
            torch.cuda.synchronize()
            used.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    (before, free), (after, free_after) = used
    dd.testing.collective_assert(after <= before and free_after >= free - 2**20, f"memory grew: {used}")
