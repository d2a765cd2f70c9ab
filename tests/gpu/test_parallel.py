"""What only a device shows of dd.parallel: overlap, no wait on the host, memory that passes between streams.

That training on devices equals the sequential program is what tests/mpi/parallel say with ``--engine=cuda``.
"""

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl import parallel as dp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
HOOKS = {"exact": dp.hooks.all_reduce, "cast": dp.hooks.cast, "top_k": dp.hooks.top_k, "power_sgd": dp.hooks.power_sgd}


@pytest.fixture(autouse=True)
def device():
    """This rank's device, the current one."""
    found = torch.device("cuda", dd.world().rank % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


@pytest.fixture
def no_synchronisation():
    """Whatever waits on the host for the device is an error, inside a call of this."""
    if dd.world().cuda == "staged":
        pytest.skip("what is staged waits for the device")

    def checked(call):
        call()  # communicators, plans and libraries are made on first use
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked


def world():
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


def network(device, layers=6, width=2048, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).to(device, dtype)


# ---------------------------------------------------------------- overlap


@pytest.mark.mpi(2)
def test_buckets_are_reduced_while_backward_runs(device):
    """By the device's own clock: the first bucket's sum is done before backward is, and the last ones begin after their
    gradients. The order of buckets is the same on all ranks."""
    n, r, P = world()
    model, x, moments = network(device), torch.randn(8192, 2048, device=device), []

    def event():
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def timed(bucket, state):
        begin = event()
        summed = F.all_sum_reduce(bucket, P)
        moments.append((begin, event(), bucket[0].numel(), torch.cuda.current_stream()))
        return summed, state

    sync = dp.GradientSync(model.parameters(), P, hook=timed, limits=(1,))
    for _ in range(3):
        moments.clear()
        model.zero_grad()
        loss = model(x).square().mean()
        begin = event()
        loss.backward()
        end = event()
        sync.finish()
    torch.cuda.synchronize()
    assert all(stream != torch.cuda.current_stream() for *_, stream in moments), "a stream of its own"
    spans = [(begin.elapsed_time(a), begin.elapsed_time(b)) for a, b, *_ in moments]
    backward = begin.elapsed_time(end)
    inside = sum(b < backward for _, b in spans)
    dd.testing.collective_assert(len(spans) == 6 and inside >= 3, f"buckets at {spans}, backward ends at {backward} ms")


@pytest.mark.mpi(2)
@pytest.mark.parametrize("hook", HOOKS)
def test_gradient_sync_under_memory_pressure(device, hook):
    """Buckets of many sizes, fresh memory all the time, and a busy device: always the sums of what each rank had."""
    n, r, P = world()
    sizes = [(7, 11), (1 << 20,), (300, 400), (5,), (1 << 18,), (64, 64)]
    params = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    sync = dp.GradientSync(params, P, hook=None if hook == "exact" else HOOKS[hook](P), limits=(1 << 10, 1 << 19))
    busy, states = torch.ones(1024, 1024, device=device), None

    def drawn(step, rank):
        draw = torch.Generator(device).manual_seed(100 * step + rank)
        return [torch.randn(size, generator=draw, device=device) for size in sizes]

    for step in range(10):
        weights = drawn(step, r)
        (sum((p * w).sum() for p, w in zip(params, weights)) + (busy @ busy)[0, 0]).backward()
        rubbish = [torch.full(size, float("nan"), device=device) for size in sizes]  # in what has been freed
        sync.finish()
        found = [p.grad for p in params]
        expected, states = dp.reduce_gradients(
            weights, P, hook=HOOKS[hook](P), states=states, limits=(1 << 10, 1 << 19)
        )
        if hook == "exact":
            expected = [sum(parts) for parts in zip(*(drawn(step, q) for q in range(n)))]
        bad = [k for k, (g, e) in enumerate(zip(found, expected)) if not torch.allclose(g, e, rtol=1e-4, atol=1e-4)]
        dd.testing.collective_assert(not bad, f"step {step}: buckets {bad} differ")
        del rubbish, found
        for p in params:
            p.grad = None


@pytest.mark.mpi(2)
def test_memory_of_the_side_stream_is_not_used_too_early(device):
    """A result is freed on the host while the device has yet to read it; the next movement must not write there. Nor
    may an input's memory be written before it was sent."""
    n, r, P = world()
    size = 1 << 22
    A, busy = dd.maps.shift(P, 0, 1, True, (size,)), torch.ones(4096, 4096, device=device)
    total, wanted = torch.zeros(size, device=device), 0.0
    for step in range(20):
        pending = F.start(A, torch.full((size,), float(r + step), device=device))
        torch.full((size,), float("nan"), device=device)
        y = F.wait(pending)
        torch.mm(busy, busy)  # a few ms behind the host
        total += y
        del y, pending
        wanted += (r - 1) % n + step
    other = torch.cuda.Stream()  # from a stream of the user's own as well
    with torch.cuda.stream(other):
        for _ in range(5):
            F.wait(F.start(A, torch.full((size,), float("nan"), device=device)))
    torch.cuda.synchronize()
    dd.testing.collective_assert(bool((total == wanted).all()), "overwritten")
    F.start(A, torch.ones(size, device=device))  # given up: its memory outlives the messages
    torch.full((size,), float("nan"), device=device)
    torch.cuda.synchronize()


# ---------------------------------------------------------------- nothing waits on the host


@pytest.mark.parametrize("hook", HOOKS)
def test_gradient_sync_never_waits(device, no_synchronisation, hook):
    n, r, P = world()
    model, x = network(device, 3, 256), torch.randn(32, 256, device=device)
    sync = dp.GradientSync(model.parameters(), P, hook=HOOKS[hook](P))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        dp.global_mean(model(x).square().sum(), len(x), P).backward()
        sync.finish()
        optimizer.step()
        optimizer.zero_grad()

    no_synchronisation(step)


@pytest.mark.parametrize("remat", [True, "parameters", False])
def test_sharded_steps_never_wait(device, no_synchronisation, remat):
    n, r, P = world()
    weights = [p.detach() for p in network(device, 4, 256).parameters()]
    shardings = [dp.Sharding.of(w, P) for w in weights]
    blocks = [s.block(w).requires_grad_() for s, w in zip(shardings, weights)]
    optimizer = torch.optim.AdamW(blocks, fused=True)
    run, x = dp.chain([lambda w, x: torch.tanh(x @ w)] * 4, shardings, remat=remat), torch.randn(32, 256, device=device)

    def step():
        dp.global_mean(run(blocks, x).square().sum(), len(x), P).backward()
        norm = dp.global_norm([b.grad for b in blocks], P)
        torch.nn.utils.clip_grads_with_norm_(blocks, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()

    no_synchronisation(step)


def test_scales_averages_and_accumulation_never_wait(device, no_synchronisation):
    n, r, P = world()
    w, x = torch.randn(64, 64, device=device), torch.randn(32, 64, device=device)
    state = [dp.LossScale(torch.full((), 2.0**10, device=device), interval=2)]
    policy = dp.Precision(torch.float16, torch.float32, torch.float32)

    def step():
        scale = state[0]
        loss = lambda w: scale.scaled(policy.wrap(lambda w, x: (x @ w).square().sum())(policy.replicate(w, P), x))
        grads, finite = scale.unscaled(torch.func.grad(loss)(w), P)
        dp.select(finite, w - grads, w)
        state[0] = scale.updated(finite)
        dp.clip_by_norm(grads, dp.global_norm(grads, P, ()), 1.0)
        dp.spread_overflow(grads, P)
        dp.average_parameters(w, P, weight=len(x))
        dp.accumulate(lambda w, x: ((x @ w).square().sum(), len(x)), w, [x[:20], x[20:]], P)

    no_synchronisation(step)


def test_a_pipeline_never_waits(device, no_synchronisation):
    """Stages with and without parameters: the latter know the device from the argument."""
    n, r, P = world()
    w, x = torch.randn(64, 64, device=device), torch.randn(32, 64, device=device)
    stages = [lambda p, x: torch.tanh(x @ p["w"])] + [lambda p, x: torch.sin(x)] * (n - 1)
    step = dp.pipeline(
        dp.schedule("1f1b", n, 4), stages, lambda y, i: y.square().sum(), P, lambda k, i: (8, 64), torch.float32, device
    )
    params = {r: {"w": w} if r == 0 else {}}
    no_synchronisation(lambda: step(params, x.split(8) if r == 0 else None))
    wanted, serial = torch.func.grad_and_value(lambda w: _after(torch.tanh(x @ w), n - 1).square().sum())(w)
    value, grads = step(params, x.split(8) if r == 0 else None)
    bad = not torch.allclose(value, serial) or (
        r == 0 and not torch.allclose(grads[0]["w"], wanted, rtol=1e-4, atol=1e-4)
    )
    dd.testing.collective_assert(not bad, "differs")


def _after(x, times):
    for _ in range(times):
        x = torch.sin(x)
    return x


# ---------------------------------------------------------------- memory


@pytest.mark.mpi(2)
def test_gradients_leave_no_memory_behind(device):
    """After each step there is what was before it; while backward runs, the gradients twice and the buckets under
    way."""
    n, r, P = world()
    model, x = network(device, 8, 1024), torch.randn(8, 1024, device=device)
    sync, weights = dp.GradientSync(model.parameters(), P, limits=(1,)), 8 * 4 * 1024**2
    used = []
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).square().sum().backward()
        sync.finish()
        model.zero_grad()
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before))
    left, peak = used[-1]
    dd.testing.collective_assert(left == 0 and peak < 2.3 * weights, f"left, peak: {used}, of {weights}")


@pytest.mark.mpi(2)
@pytest.mark.parametrize("remat", [True, "parameters"])
def test_gathered_parameters_do_not_pile_up_before_a_busy_device(device, remat):
    """The host is far ahead of the device, and ZeRO-3 still has two layers' parameters, and not all of them."""
    n, r, P = world()
    count, width = 12, 2048
    unit = 4 * width * width
    weights = [torch.eye(width, device=device)] * count
    shardings = [dp.Sharding.of(w, P) for w in weights]
    blocks = [s.block(w).requires_grad_() for s, w in zip(shardings, weights)]
    del weights
    run, x = dp.chain([lambda w, x: x @ w] * count, shardings, remat=remat), torch.randn(64, width, device=device)
    busy, out = torch.ones(8192, 8192, device=device), torch.empty(8192, 8192, device=device)

    def step():
        for _ in range(10):
            torch.mm(busy, busy, out=out)
        run(blocks, x).sum().backward()
        for b in blocks:
            b.grad = None

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    dd.testing.collective_assert(peak < (count / n + 6) * unit, f"{peak / unit:.1f} layers at most, of {count}")
