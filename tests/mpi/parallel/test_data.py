"""Data parallelism against the sequential program: uneven and empty shares, buckets, hooks on leaves, every
transform."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as local
from registry import needs
from serial import randn
from torch.func import grad, grad_and_value, jvp
from training import (
    STEPS,
    batch,
    check,
    faults_of,
    initial,
    leaves,
    loss_sum,
    mapped,
    mean_loss,
    serial_step,
    share,
    world,
)

import distdl as dd
import distdl.functional as F
from distdl import _torch
from distdl import parallel as dp
from distdl.testing import count_messages

SMALL = (600, 1000)  # bytes: several buckets for a small network


def dist_loss(params, step, P, limits=dp.LIMITS):
    marked = [dp.replicate(p, P, limits=limits) for p in params]
    return dp.global_mean(*loss_sum(marked, share(step, batch(step))), P)


def test_twenty_steps():
    """Loss, every gradient and the parameters, with a rank that has no sample and others with few; bytes as in
    theory."""
    n, r, P = world()
    mine, theirs, bad = initial(), initial(), []
    nbytes = sum(8 * p.numel() for p in leaves(mine))
    for step in range(STEPS):
        with count_messages() as sent:
            grads, loss = grad_and_value(dist_loss)(mine, step, P)
        assert sent.bytes == (nbytes + 16 if n > 1 else 0) and len(sent) == (4 if n > 1 else 0)
        serial_grads, serial = serial_step(theirs, batch(step))
        bad += faults_of([loss, grads], [serial, serial_grads], f"step {step}")
        mine = mapped(lambda p, g: p - 0.3 * g, mine, grads)
        theirs = mapped(lambda p, g: p - 0.3 * g, theirs, serial_grads)
    bad += faults_of(mine, theirs, "parameters")
    dd.testing.collective_assert(not bad, bad[:3])


def test_jvp_and_second_derivative():
    """Which torch's DistributedDataParallel refuses."""
    n, r, P = world()
    params, v = initial(), mapped(torch.cos, initial())
    f, serial = (lambda p: dist_loss(p, 1, P)), (lambda p: mean_loss(p, batch(1)))
    check(jvp(f, (params,), (v,)), jvp(serial, (params,), (v,)), "jvp")
    check(jvp(grad(f), (params,), (v,)), jvp(grad(serial), (params,), (v,)), "forward over reverse")
    inner = lambda g: sum((a * b).sum() for a, b in zip(leaves(g), leaves(v)))
    check(
        grad(lambda p: inner(grad(f)(p)))(params),
        grad(lambda p: inner(grad(serial)(p)))(params),
        "reverse over reverse",
    )
    rows = torch.stack([torch.tensor([1.0, 2.0], dtype=torch.float64)] * 3) * torch.arange(1, 4)[:, None]
    one = lambda s: f(mapped(lambda p: p * s[0], params))
    check(torch.func.vmap(one)(rows), torch.stack([serial(mapped(lambda p: p * s[0], params)) for s in rows]), "vmap")


# ---------------------------------------------------------------- buckets


@pytest.mark.parametrize("limits", [(100, 900), SMALL, (2**20, 25 * 2**20), (1,)])
def test_buckets_are_torchs(limits):
    dist = pytest.importorskip("torch.distributed")
    tensors = [
        torch.empty(n, dtype=d) for n, d in zip([3, 40, 7, 200, 1, 90, 12, 5], [torch.float64, torch.float32] * 4)
    ]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors[::-1], list(limits))
    assert dp.bucketed(tensors, limits) == [[len(tensors) - 1 - i for i in bucket] for bucket in theirs]


def test_one_message_for_a_bucket():
    n, r, P = world()
    params = leaves(initial())
    buckets = dp.bucketed(params, SMALL)
    assert len(buckets) == 3 and sorted(i for b in buckets for i in b) == list(range(len(params)))
    with count_messages() as sent:
        grad(lambda p: sum((w**2).sum() for w in dp.replicate(p, P, limits=SMALL)))(params)
    sizes = [sum(8 * params[i].numel() for i in b) for b in buckets]
    assert sorted(m[2] for m in sent) == (sorted(sizes) if n > 1 else [])


# ---------------------------------------------------------------- accumulation


@pytest.mark.parametrize("hook", [None, dp.hooks.all_reduce])
def test_accumulation_with_one_reduction(hook):
    """Rank r has r micro-batches of different sizes: rank 0 none (alone: two)."""
    n, r, P = world()
    params, data = initial(), batch(3, 31)
    cuts = [(k * (k - 1) // 2) for k in range(n + 1)] if n > 1 else [0, 2]  # first micro-batch of each rank
    pieces = [tuple(t[a:b] for t in data) for a, b in zip([0, 1, 4, 9, 16, 20, 30], [1, 4, 9, 16, 20, 30, 31])]
    mine = pieces[cuts[r] : cuts[r + 1]]
    used = [torch.cat(parts) for parts in zip(*pieces[: cuts[n]])]
    with count_messages() as sent:
        loss, grads, _ = dp.accumulate(loss_sum, params, mine, P, hook=hook and hook(P), limits=SMALL)
    ordered = _torch.flatten(params)[0]  # by the dictionaries' keys
    sizes = [sum(8 * ordered[i].numel() for i in b) for b in dp.bucketed(ordered, SMALL)]
    assert [m[2] for m in sent] == ([16, *sizes] if n > 1 else [])
    serial_grads, serial = serial_step(params, used)
    check([loss, grads], [serial, serial_grads], "accumulated")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_of_halves(dtype):
    """Neither dtype holds 70001: counts and their sums are kept in float32."""
    n, r, P = world()
    mean = dp.global_mean(torch.tensor(1000.0 * (r + 1), dtype=dtype), 70001, P)
    check(
        mean.double(), torch.tensor(500.0 * (n + 1) / 70001, dtype=torch.float64), "mean", rtol=torch.finfo(dtype).eps
    )
    total = lambda p, x: ((p * x).sum(), 70001)
    loss, grads, _ = dp.accumulate(
        total, torch.ones((), dtype=dtype), [torch.full((), 1024.0 * (r + 1), dtype=dtype)] * 2, P
    )
    wanted = torch.tensor(512.0 * (n + 1) / 70001, dtype=torch.float64)
    check([loss.double(), grads.double()], [wanted, wanted], "accumulated", rtol=torch.finfo(dtype).eps)
    assert grads.dtype == mean.dtype == dtype


# ---------------------------------------------------------------- modules and torch.optim


def modules():
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(49, 13), torch.nn.Tanh(), torch.nn.Linear(13, 11), torch.nn.Tanh(), torch.nn.Linear(11, 10)
    ).double()
    return model, copy.deepcopy(model)


def total(model, data):
    return local.cross_entropy(model(data[0]), data[1], reduction="sum")


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_any_module_and_optimizer(optimizer):
    """20 steps of two micro-batches: one inside no_sync(), one that reduces while backward runs."""
    n, r, P = world()
    mine, theirs = modules()
    sync = dp.GradientSync(mine.parameters(), P, limits=SMALL)
    options = {"lr": 0.01, "weight_decay": 0.1} if optimizer is torch.optim.Adam else {"lr": 0.1, "momentum": 0.9}
    ours, serial = optimizer(mine.parameters(), **options), optimizer(theirs.parameters(), **options)
    ours.register_step_pre_hook(lambda *_: sync.finish())
    nbytes, bad = sum(8 * p.numel() for p in mine.parameters()), []
    for step in range(STEPS):
        first, second = batch(2 * step, 9), batch(2 * step + 1, 12)
        with count_messages() as sent:
            with sync.no_sync():
                (total(mine, share(step, first)) / 21).backward()
            assert not sent
            (total(mine, share(step + 1, second)) / 21).backward()
            ours.step()
        assert sent.bytes == (nbytes if n > 1 else 0) and len(sent) == (3 if n > 1 else 0)
        ((total(theirs, first) + total(theirs, second)) / 21).backward()
        serial.step()
        bad += faults_of([p.grad for p in mine.parameters()], [p.grad for p in theirs.parameters()], f"step {step}")
        ours.zero_grad()
        serial.zero_grad()
    bad += faults_of(list(mine.parameters()), list(theirs.parameters()), "parameters")
    dd.testing.collective_assert(not bad, bad[:3])


@needs(2)
def test_buckets_are_reduced_while_backward_runs():
    """When the gradient of the first layer's output comes, the last layers' gradients have been sent. Functional form:
    likewise."""
    n, r, P = world()
    model, _ = modules()
    x, y = share(1, batch(0))
    sync = dp.GradientSync(model.parameters(), P, limits=(1,))
    seen = []
    first = model[1](model[0](x))
    first.register_hook(lambda g: seen.append(len(sent)))
    with count_messages() as sent:
        local.cross_entropy(model[2:](first), y, reduction="sum").backward()
    assert seen == [4] and len(sent) == 6
    sync.finish()
    sync.remove()

    params, seen = [mapped(lambda t: t.requires_grad_(), p) for p in initial()], []
    for k, p in enumerate(params):  # each layer's parameters are marked right before the layer
        p = dp.replicate(p, P)
        x = local.linear(x, p["w"], p["b"]).tanh()
        if k == 0:
            x.register_hook(lambda g: seen.append(len(sent)))
    with count_messages() as sent:
        x.sum().backward()
    assert seen == [2] and len(sent) == 3


def test_nothing_outlives_its_users():
    """Hooks are on parameters, and Python's collector does not see them: they hold nothing, and go with what put them
    there."""
    n, r, P = world()
    model, _ = modules()
    sync = dp.GradientSync(model.parameters(), P, limits=SMALL)
    total(model, share(1, batch(0))).backward()
    sync.finish()
    before, sync = weakref.ref(sync), None
    assert before() is None
    model.zero_grad()
    with count_messages() as sent:
        total(model, share(1, batch(0))).backward()
    assert not sent and all(p.grad is not None for p in model.parameters()), "a gradient of this rank alone"
    sync = dp.GradientSync(model.parameters(), P)
    gone = [weakref.ref(p) for p in model.parameters()]
    del sync, model
    assert all(p() is None for p in gone), "no collector needed"
    w, users = torch.ones(2, requires_grad=True), []
    w.register_post_accumulate_grad_hook(lambda _: users.clear())
    users.append(dp.GradientSync([w], P))
    w.sum().backward()  # its hook is still to come when the one before drops it


def test_unused_parameters():
    """Used on one rank only: the others count as zero. Used on none: the gradient stays None, and Adam leaves it
    alone."""
    n, r, P = world()
    a, b, c = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sync = dp.GradientSync([a, b, c], P, find_unused=True, limits=(1,))
    ((r + 1) * (a.sum() + (b.sum() if r == n - 1 else 0))).backward()
    sync.finish()
    dd.testing.collective_assert(
        bool((a.grad == n * (n + 1) / 2).all() and (b.grad == n).all()) and c.grad is None, "gradients"
    )


def test_bad_use_is_an_error():
    n, r, P = world()
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    sync = dp.GradientSync([a, b], P)
    a.sum().backward()
    with pytest.raises(dd.errors.DistdlError, match=r"no gradient came.*parameter 1.*find_unused"):
        sync.finish()
    with pytest.raises(dd.errors.DistdlError, match=r"second gradient before finish.*no_sync"):
        a.sum().backward()
    b.sum().backward()
    sync.finish()
    with pytest.raises(dd.errors.DistdlError, match=r"summed over the ranks before.*zero_grad.*set_to_none=True"):
        (a.sum() + b.sum()).backward()
    a = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="non-leaf"):
        dp.GradientSync([a, 2 * a], P)
    a.sum().backward()  # no hook is left
    words = torch.nn.Embedding(3, 2, sparse=True)
    sync = dp.GradientSync(words.parameters(), P)
    with pytest.raises(dd.errors.DistdlError, match=r"a sparse gradient.*sparse=False"):
        words(torch.tensor([1])).sum().backward()
    outside = dd.Partition((1,), (n,))
    with pytest.raises(dd.errors.PartitionError, match="not part of the grid"):
        dp.GradientSync([a], outside)


# ---------------------------------------------------------------- buffers, grids


def test_buffers_are_explicit():
    """Batch norm's statistics go in and come out; with uneven and empty shares they are those of the whole batch."""
    n, r, P = world()
    x = randn(17, 6, seed=3) + 5
    stats = {"mean": torch.zeros(6, dtype=torch.float64), "var": torch.ones(6, dtype=torch.float64)}
    stats = dp.replicas(mapped(lambda t: t + r, stats), P)  # whatever the others had
    theirs = mapped(torch.clone, stats)
    rows = dd.Partition((n, 1))
    for step in range(3):
        mine = share(step, (x, x))[0]
        y, *new = F.dist_batch_norm(mine, rows, stats["mean"], stats["var"], training=True)
        stats = dict(zip(stats, new))
        expected = local.batch_norm(x, theirs["mean"], theirs["var"], training=True)
        check([y, stats], [share(step, (expected, x))[0], theirs], f"step {step}")


@needs(4)
def test_one_dim_of_a_grid():
    """Batch over dim 0, and a second dim that sees the same samples: sums along dim 0 only."""
    P = dd.Partition((2, 2))
    if dd.world().rank >= 4:
        return
    params = initial()
    data = share(0, batch(5), 2, P.index()[0])
    loss = lambda p: dp.global_mean(*loss_sum(dp.replicate(p, P, 0), data), P, 0)
    grads, value = grad_and_value(loss)(params)
    serial_grads, serial = serial_step(params, batch(5))
    bad = faults_of([value, grads], [serial, serial_grads], "grid")
    dd.testing.collective_assert(not bad, bad[:3], range(4))
