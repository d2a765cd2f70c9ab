"""Sharded training (ZeRO-1, 2, 3) equals unsharded Adam, whatever the sizes; what each rank holds, and what it
sends."""

import os
import shutil
import tempfile

import pytest
import torch
import torch.nn.functional as local
from registry import needs
from serial import randn
from torch.func import grad, grad_and_value, jvp
from training import (
    STEPS,
    batch,
    carried,
    check,
    faults_of,
    initial,
    layer,
    leaves,
    loss_sum,
    mapped,
    mean_loss,
    share,
    world,
)

import distdl as dd
import distdl.functional as F
from distdl import parallel as dp
from distdl.testing import count_messages

D = 8  # bytes of a float64
MAX_NORM = 0.4  # clips most of the steps


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.02, weight_decay=0.01)


def serial_steps():
    """The unsharded program: (loss, gradient norm, clipped gradients, parameters) of each step, by torch alone."""
    params = mapped(lambda p: p.requires_grad_(), initial())
    optimizer = adam(leaves(params))
    for step in range(STEPS):
        loss = mean_loss(params, batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves(params), MAX_NORM)
        optimizer.step()
        yield (
            loss.detach(),
            norm,
            [p.grad.clone() for p in leaves(params)],
            [p.detach().clone() for p in leaves(params)],
        )
        optimizer.zero_grad()


def head(step, P):
    """The last layer with the loss, on this rank's share."""
    x, y = share(step, batch(step))

    def last(p, h):
        logp = local.linear(h, p["w"], p["b"]).log_softmax(1)
        return dp.global_mean(-logp.gather(1, y[:, None]).sum(), len(y), P)

    return x, last


REMAT = {2: False, "3, activations kept": "parameters", 3: True}


def zero_step(stage, shardings, blocks, step, P):
    """Loss, with this rank's block of every gradient in ``.grad``."""
    if stage == 1:
        params = [s.gather(b.detach()) for s, b in zip(shardings, blocks)]
        grads, loss = grad_and_value(lambda p: dp.global_mean(*loss_sum(p, share(step, batch(step))), P))(params)
        for s, b, g in zip(shardings, blocks, grads):
            b.grad = s.reduce(g)
        return loss
    x, last = head(step, P)
    loss = dp.chain([layer, layer, last], shardings, remat=REMAT[stage])(blocks, x)
    loss.backward()
    return loss.detach()


def held_bytes(*groups):
    """Bytes of the distinct storages behind these tensors."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for group in groups for t in group if t.numel() > 1
    }
    return sum(storages.values())


@pytest.mark.parametrize("stage", [1, *REMAT])
def test_twenty_steps_of_adam(stage):
    """Loss, norm, clipped gradients, parameters; messages; parameters, gradients and state held: 1/P of the whole."""
    n, r, P = world()
    params, bad = initial(), []
    shardings = [dp.Sharding.of(p, P) for p in params]
    blocks = [s.block(p).requires_grad_() for s, p in zip(shardings, params)]
    optimizer = adam(blocks)
    sizes = [sum(p.numel() for p in leaves(unit)) for unit in params]
    gathers = sum(D * (n - 1) * b.numel() for b in blocks)  # bytes this rank sends to bring its blocks to all others
    reduces = sum(D * (size - b.numel()) for size, b in zip(sizes, blocks))
    for step, (serial_loss, serial_norm, serial_grads, serial_params) in enumerate(serial_steps()):
        with count_messages() as sent:
            loss = zero_step(stage, shardings, blocks, step, P)
        expected = gathers * (2 if REMAT.get(stage) else 1) + reduces
        assert carried(sent) == expected, (sent, expected)
        losses = [16] * (2 if stage == 3 else 1)  # remat works it out again
        assert [m[2] for m in sent.of("all_reduce")] == (losses if n > 1 else [])
        norm = dp.global_norm([b.grad for b in blocks], P)
        torch.nn.utils.clip_grads_with_norm_(blocks, MAX_NORM, norm)
        optimizer.step()
        whole = [s.gather(b.detach()) for s, b in zip(shardings, blocks)]
        grads = [s.gather(b.grad) for s, b in zip(shardings, blocks)]
        bad += faults_of(
            [loss, norm, grads, whole], [serial_loss, serial_norm, serial_grads, serial_params], f"step {step}"
        )
        if step == STEPS - 1:
            state = [t for b in blocks for t in optimizer.state[b].values()]
            held = held_bytes(blocks, [b.grad for b in blocks], state)
            assert held == 4 * D * sum(b.numel() for b in blocks), "parameters, gradients, two moments"
            assert held <= 4 * D * (sum(sizes) / n + len(sizes))
        optimizer.zero_grad()
    dd.testing.collective_assert(not bad, bad[:3])


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("remat", [True, False, "parameters"])
def test_prefetch_changes_nothing_but_the_order(remat, prefetch):
    """The same values and messages; with prefetch a layer's parameters are asked for before the layer above
    computes."""
    n, r, P = world()
    params = initial()
    shardings = [dp.Sharding.of(p, P) for p in params]
    blocks = [s.block(p).requires_grad_() for s, p in zip(shardings, params)]
    x, last = head(2, P)
    log = []
    moves = lambda sent: (
        len(sent) - len(sent.of("all_reduce"))
    )  # a gather is n - 1 messages, or one of the engine's own
    gathers, reduces = [], []
    for s, b, p in zip(shardings, blocks, params):
        with count_messages() as sent:
            s.gather(b.detach())
        gathers.append(moves(sent))
        with count_messages() as sent:
            s.reduce(p)
        reduces.append(moves(sent))

    def noting(i, f):
        def call(p, h):
            log.append((i, moves(sent)))
            return f(p, h)

        return call

    layers = [noting(i, f) for i, f in enumerate([layer, layer, last])]
    with count_messages() as sent:
        dp.chain(layers, shardings, remat=remat, prefetch=prefetch)(blocks, x).backward()
    early = [g * prefetch for g in gathers]  # asked for ahead
    assert log[:3] == [(0, gathers[0] + early[1]), (1, sum(gathers[:2]) + early[2]), (2, sum(gathers))]
    if (
        remat is True
    ):  # in backward: gather 2; then, before its computation, 1 is on its way; the reduce-scatter of 2 comes after
        so_far = sum(gathers)
        for i in (2, 1, 0):
            so_far += gathers[i] + (reduces[i + 1] if i < 2 else 0)
            assert log[5 - i] == (i, so_far + (early[i - 1] if i else 0))
    assert moves(sent) == (2 if remat else 1) * sum(gathers) + sum(reduces)
    serial = grad(lambda p: mean_loss(p, batch(2)))(params)
    check([b.grad for b in blocks], [s.block(g) for s, g in zip(shardings, serial)], "gradients")


@pytest.mark.parametrize("remat", [True, False, "parameters"])
def test_under_torch_func(remat):
    """grad, jvp and forward over reverse through gathered blocks, gathered again or kept."""
    n, r, P = world()
    params = initial()
    shardings = [dp.Sharding.of(p, P) for p in params]
    cut = lambda tree: [s.block(p) for s, p in zip(shardings, tree)]
    blocks, v = cut(params), mapped(torch.cos, params)
    x, last = head(1, P)
    run = dp.chain([layer, layer, last], shardings, remat=remat)
    f, serial = (lambda b: run(b, x)), (lambda p: mean_loss(p, batch(1)))
    check(grad(f)(blocks), cut(grad(serial)(params)), "grad")
    check(jvp(f, (blocks,), (cut(v),)), jvp(serial, (params,), (v,)), "jvp")
    found, expected = jvp(grad(f), (blocks,), (cut(v),)), jvp(grad(serial), (params,), (v,))
    check(found, [cut(e) for e in expected], "forward over reverse")


@pytest.mark.parametrize("remat", [True, "parameters"])
def test_second_derivative_of_what_is_gathered_again(remat):
    """Gradients of a gradient, on .backward()'s way: what backward asks for again keeps its place in the graph."""
    n, r, P = world()
    params = [mapped(lambda t: t.requires_grad_(), p) for p in initial()]
    shardings = [dp.Sharding.of(p, P) for p in params]
    blocks = [s.block(p).requires_grad_() for s, p in zip(shardings, params)]
    x, last = head(2, P)
    loss = dp.chain([layer, layer, last], shardings, remat=remat)(blocks, x)
    grads = torch.autograd.grad(loss, blocks, create_graph=True)
    found = torch.autograd.grad(F.invariant_sum(sum((g**2).sum() for g in grads), P), blocks)
    grads = torch.autograd.grad(mean_loss(params, batch(2)), leaves(params), create_graph=True)
    expected = torch.autograd.grad(sum((g**2).sum() for g in grads), leaves(params))
    parts = iter(expected)
    check(
        list(found), [s.block(mapped(lambda _: next(parts), p)) for s, p in zip(shardings, params)], "second derivative"
    )


def test_fewer_elements_than_ranks():
    """A unit of two elements: some ranks' blocks are empty, and Adam steps there too."""
    n, r, P = world()
    start = torch.tensor([1.0, -2.0], dtype=torch.float64)
    s = dp.Sharding.of(start, P)
    block = s.block(start).requires_grad_()
    theirs = start.clone().requires_grad_()
    ours, serial = adam([block]), adam([theirs])
    for _ in range(3):
        loss = F.invariant_sum(((r + 1) * s.gather(block) ** 2).sum(), P)
        loss.backward()
        (n * (n + 1) / 2 * theirs**2).sum().backward()
        check([s.block(theirs.grad)], [block.grad], "gradient")
        ours.step()
        serial.step()
        ours.zero_grad()
        serial.zero_grad()
    check(s.gather(block.detach()), theirs.detach(), "parameters")
    assert block.numel() == (2 if n == 1 else int(r < 2))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_are_torchs(norm_type):
    n, r, P = world()
    grads = [mapped(lambda p: (5 * p).sin(), unit) for unit in initial()]
    blocks = [dp.Sharding.of(g, P).block(g) for g in grads]
    norm = dp.global_norm(blocks, P, norm_type=norm_type)
    expected = torch.nn.utils.get_total_norm(leaves(grads), norm_type)
    for most in (0.1, 1e6):
        serial = [torch.nn.Parameter(g.clone()) for g in leaves(grads)]
        for p in serial:
            p.grad = p.detach().clone()
        torch.nn.utils.clip_grad_norm_(serial, most, norm_type)
        clipped = [dp.Sharding.of(g, P).gather(b) for g, b in zip(grads, dp.clip_by_norm(blocks, norm, most))]
        check([norm, clipped], [expected, [p.grad for p in serial]], f"norm {norm_type}, at most {most}")
    whole = dp.global_norm(grads, P, (), norm_type=norm_type)
    check(whole, expected, "whole gradients")


@pytest.mark.parametrize("remat", [True, False, "parameters"])
def test_groups_of_an_optimizer(remat):
    """Weights decay, biases have a rate of their own, one layer is frozen, the ends share their weights, rates are
    scheduled."""
    n, r, P = world()
    serial = [mapped(torch.clone, initial()[0]), {"w": randn(13, 13, seed=7) / 4, "b": randn(13, seed=8)}]
    parts = [tuple(dp.Sharding.of(t, P) for t in leaves(p)) for p in serial]
    blocks = [tuple(s.block(t) for s, t in zip(pair, leaves(p))) for pair, p in zip(parts, serial)]
    for t in (*leaves(serial[0]), *blocks[0]):
        t.requires_grad_()

    def trained(w, b):
        optimizer = torch.optim.AdamW(
            [{"params": [w], "weight_decay": 0.1}, {"params": [b], "lr": 0.02}], lr=0.05, weight_decay=0
        )
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    (ours, schedule), (theirs, expected) = trained(*blocks[0]), trained(serial[0]["w"], serial[0]["b"])
    first, middle = (lambda p, x: local.linear(x, *p).tanh()), (lambda p, h: local.linear(h, *p).sin())
    for step in range(4):
        x = share(step, batch(step))[0]
        last = lambda p, h, x=x: F.invariant_sum((h @ p[0] - x).square().sum() / 17, P)
        dp.chain([first, middle, last], [*parts, parts[0]], remat=remat)([*blocks, blocks[0]], x).backward()
        a, b = (tuple(p.values()) for p in serial)
        ((middle(b, first(a, batch(step)[0])) @ a[0] - batch(step)[0]).square().sum() / 17).backward()
        for optimizer in (ours, schedule, theirs, expected):
            optimizer.step()
        ours.zero_grad()
        theirs.zero_grad()
        check([s.gather(t.detach()) for s, t in zip(parts[0], blocks[0])], list(serial[0].values()), f"step {step}")


@pytest.mark.parametrize("dim", [0, 1])
def test_hybrid_sharding(dim):
    """HSDP: blocks along one dim of a grid, copies along the other; what crosses along the latter is a block."""
    n, r, _ = world()
    P = dd.Partition((2, 2) if n == 4 else (n, 1))
    if not P.active:
        return
    params, outer = initial(), 1 - dim
    shardings = [dp.Sharding.of(p, P, dim) for p in params]
    blocks = [s.block(p).requires_grad_() for s, p in zip(shardings, params)]
    marked = [dp.replicate(b, P, outer) for b in blocks]
    with count_messages() as sent:
        dp.global_mean(
            *loss_sum([s.gather(b) for s, b in zip(shardings, marked)], share(1, batch(1), P.size, r)), P
        ).backward()
    serial = grad(lambda p: mean_loss(p, batch(1)))(params)
    check([b.grad for b in blocks], [s.block(g) for s, g in zip(shardings, serial)], "gradients")
    sums = sorted(m[2] for m in sent.of("all_reduce"))
    assert sums == sorted([16] * (n > 1) + [D * b.numel() for b in blocks if P.shape[outer] > 1]), sums


def test_restarts_on_fewer_ranks():
    """Blocks and moments are saved as what they are, blocks of flat vectors; any number of ranks goes on from there."""
    n, r, P = world()
    path = os.path.join(dd.testing.gather_objects(tempfile.mkdtemp() if r == 0 else None)[0], "x.safetensors")

    def start(Q):
        shardings = [*(dp.Sharding.of(p, Q) for p in initial()), dp.Sharding.of(torch.ones(2, dtype=torch.float64), Q)]
        blocks = torch.nn.ParameterList(
            s.block(p) for s, p in zip(shardings, [*initial(), torch.ones(2, dtype=torch.float64)])
        )
        return (
            shardings,
            blocks,
            torch.optim.AdamW(blocks, lr=0.02),
            {str(i): s.layout for i, s in enumerate(shardings)},
        )

    def train(Q, shardings, blocks, optimizer, first, last):
        losses = []
        for step in range(first, last):
            k = Q.index()[0]
            x, y = share(step, batch(step), Q.size, k)
            scaled = lambda p, h: layer(p, h) * shardings[3].gather(blocks[3])[0]
            logp = lambda p, h: local.linear(h, p["w"], p["b"]).log_softmax(1)
            top = lambda p, h, y=y: dp.global_mean(-logp(p, h).gather(1, y[:, None]).sum(), len(y), Q)
            loss = dp.chain([layer, scaled, top], shardings[:3])(list(blocks)[:3], x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    shardings, blocks, optimizer, layouts = start(P)
    train(P, shardings, blocks, optimizer, 0, 3)
    dd.checkpoint.save(path, *dd.checkpoint.state(blocks, optimizer, layouts=layouts))
    expected = train(P, shardings, blocks, optimizer, 3, 6)
    for size in range(1, n + 1):
        Q, found = dd.Partition((size,)), expected
        if Q.active:
            shardings, blocks, optimizer, layouts = start(Q)
            with torch.no_grad():
                for b in blocks:
                    b.fill_(7)
            dd.checkpoint.restore(path, blocks, optimizer, layouts=layouts, P=Q)
            found = train(Q, shardings, blocks, optimizer, 3, 6)
        check(torch.tensor(found), torch.tensor(expected), f"{size} ranks")
    if r == 0:
        shutil.rmtree(os.path.dirname(path))


def test_norms_of_halves():
    """float16 ends at 65504: a norm of 500 is no infinity. A rank without any gradient says so."""
    n, r, P = world()
    block = dp.Sharding.of(torch.ones(10000), P).block(torch.full((10000,), 5.0, dtype=torch.float16))
    norm = dp.global_norm([block], P)
    assert norm.dtype == torch.float32 and abs(float(norm) - 500) < 1e-3
    assert torch.allclose(dp.clip_by_norm([block], norm, 50.0)[0], block / 10)
    with pytest.raises(dd.errors.ShapeError, match=r"no gradients.*torch\.zeros"):
        dp.global_norm([], P)


def peak_bytes(call):
    """The most that was allocated at once during the call, by torch's own allocator."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    now = most = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@needs(2)
def test_peak_memory_of_a_step():
    """Six equal layers: ZeRO-3 has two of them and a gradient whole at a time, beside its blocks, and activations are
    small here; ZeRO-2 has all six."""
    n, r, P = world()
    width, count = 120, 6
    unit = D * width * width
    params = [torch.eye(width, dtype=torch.float64) for _ in range(count)]
    shardings = [dp.Sharding.of(p, P) for p in params]
    blocks = [s.block(p).requires_grad_() for s, p in zip(shardings, params)]
    x, peaks = torch.ones(2, width, dtype=torch.float64), {}
    layers = [lambda w, h: h @ w] * count
    for remat in (True, "parameters", False):
        run = dp.chain(layers, shardings, remat=remat)
        step = lambda run=run: F.invariant_sum(run(blocks, x).sum(), P).backward()
        step()  # staging memory is kept for the next time
        for b in blocks:
            b.grad = None
        peaks[remat] = peak_bytes(step)
    own = unit * count / n  # the gradients' blocks
    small = max(peaks[True], peaks["parameters"]) < own + 3.2 * unit
    dd.testing.collective_assert(
        small and count * unit < peaks[False] < (count + 0.5) * unit, {k: round(v / unit, 2) for k, v in peaks.items()}
    )


def test_bad_use_is_an_error():
    n, r, P = world()
    with pytest.raises(dd.errors.ShapeError, match="one unit has one dtype"):
        dp.Sharding.of([torch.ones(2), torch.ones(2).double()], P)
    s = dp.Sharding.of(torch.ones(3), P)
    with pytest.raises(dd.errors.ShapeError, match="not this unit's tensors"):
        s.reduce(torch.ones(4))
    with pytest.raises(dd.errors.ShapeError):
        s.gather(torch.ones(4))
    with pytest.raises(dd.errors.DistdlError, match=r"no such way.*parameters"):
        dp.chain([layer], [s], remat="activations")
    with pytest.raises(dd.errors.DistdlError, match="one sharding for each layer"):
        dp.chain([layer], [s, s])
    with pytest.raises(dd.errors.DistdlError, match="not this chain's blocks"):
        dp.chain([layer], [(s, s)])([s.block(torch.ones(3))], torch.ones(3))
