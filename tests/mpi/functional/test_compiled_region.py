"""What stands inside and around compiled code: transforms, layers, maps, ranks that compile at different times."""

import copy
import random

import pytest
import torch
from compiling import BACKENDS, MARKS, RANK, D, M, N, block, check, found, fresh, needs_cpp  # noqa: F401
from fuzzing import seed_of
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import AgreementError, DistdlError
from distdl.testing import count_messages, gather_objects

pytestmark = MARKS


def there(x):
    return F.repartition(x, D, M)


def back(x):
    return F.repartition(x, M, D)


def loss(x):
    """Of rank 0's part linear: its cotangent is a constant, and yet it sends what its peers send."""
    y = back(there(x.sin()).exp() if RANK else there(x.sin()))
    return y.sum() if RANK == 0 else (y**3).sum()


# ---------------------------------------------------------------- torch.func inside

TRANSFORMS = {
    "grad": lambda x: grad(loss)(x),
    "vjp": lambda x: vjp(there, x)[1](there(x).cos())[0],
    "jvp": lambda x: jvp(lambda x: there(x.sin()).exp(), (x,), (x.cos(),))[1],
    "vmap": lambda x: vmap(lambda s: there((s * x).sin()).sum())(torch.arange(3.0)),
    "vmap of a constant": lambda x: vmap(lambda s: s * there(x).sum())(torch.arange(3.0)),
    "vmap of grad": lambda x: vmap(lambda s: grad(loss)(s * x))(torch.arange(3.0).double()).sum(0),
    "grad of vmap": lambda x: grad(lambda x: vmap(lambda s: loss(s * x))(torch.arange(3.0).double()).sum())(x),
    "grad of grad": lambda x: grad(lambda x: (grad(loss)(x) * x.cos()).sum())(x),
    "jvp of grad": lambda x: jvp(grad(loss), (x,), (x.cos(),))[1],
    "grad of jvp": lambda x: grad(lambda x: jvp(loss, (x,), (x.detach().cos(),))[1])(x),
    "jvp of jvp": lambda x: jvp(lambda x: jvp(lambda x: there(x.sin()).exp(), (x,), (x.cos(),))[1], (x,), (x,))[1],
    "jvp of vmap": lambda x: jvp(lambda x: vmap(lambda s: there((s * x).sin()))(torch.arange(3.0)), (x,), (x,))[1],
    "jacrev": lambda x: jacrev(lambda s: there((s * x).sin()).sum())(torch.ones(2, 1, 1).double()[0, 0, 0]),
    "jacfwd": lambda x: jacfwd(lambda s: there((s * x).sin()).sum())(torch.ones((), dtype=torch.float64)),
    "three times grad": lambda x: grad(lambda x: (grad(lambda x: (grad(loss)(x) * x).sum())(x) * x).sum())(x),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, backend):
    """Bit for bit in AOTAutograd's graphs. (jacrev and jacfwd by a number, which all ranks have.)"""
    check(TRANSFORMS[name], block(), backend=backend)


def test_linearize_is_refused_by_torch():
    with pytest.raises(Exception, match="linearize"):
        torch.compile(lambda x: torch.func.linearize(there, x)[0], backend="aot_eager", fullgraph=True)(block())


# ---------------------------------------------------------------- the order of messages


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_constant_cotangent(backend):
    """Second order with a loss that is linear on rank 0: nothing but their order keeps these movements apart."""

    def f(x):
        first = grad(lambda x: there(x.sin()).sum() if RANK == 0 else (there(x.sin()) ** 3).sum())(x)
        second = grad(lambda x: (grad(lambda x: there(x).sum())(x) * x).sum())(x)
        return first + second

    check(f, block(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_uses_is_sent(backend):
    """Outputs that one rank drops, branches that do not depend on each other."""

    def f(x):
        x = x.detach()
        unused, apart = there(x * 2), [F.shift(x[:1] * k, D.partition, 0) for k in (1, 2)]
        there(x * 3)
        return x * 2 + (unused.sum() if RANK else apart[1].sum())

    check(f, block(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_calls_stay_apart(backend):
    """No common subexpression, also of one rank."""
    check(lambda x: (there(x) + there(x)).sum() * x, block(), backend=backend)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="by the dispatcher in older torch")
def test_inductors_code_calls_a_movement_itself(monkeypatch):
    """Not by torch's dispatcher; forward and backward."""
    needs_cpp()
    calls, now = [], torch.ops.distdl.now
    monkeypatch.setattr(torch.ops.distdl, "now", lambda *args: (calls.append(args[1]), now(*args))[1])
    _, sent = found(torch.compile(lambda x: back(there(x.sin())), fullgraph=True), (block(),))
    assert [name.split()[0] for name in calls] == ["repartition"] * 2 + ["repartition.T"] * 2
    assert N == 1 or sent


def test_nothing_is_sent_while_tracing():
    """Rank 0 compiles once, the last rank for each shape of what only it has; one stays in eager."""

    def f(x, y):
        return there(x.sin() * y.sum())

    ours = f if N > 2 and RANK == 1 else torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False)
    x = block()
    for k in (1, 2, 3):
        y = torch.ones(k if RANK == N - 1 else 1, dtype=torch.float64)
        with count_messages() as sent:
            found_ = ours(x, y)
        assert torch.equal(found_, f(x, y)) and len(sent) <= N


@pytest.mark.skipif(N < 2, reason="needs a rank that differs")
def test_ranks_that_batch_differently():
    """In eager they expand; a graph was traced for the batches of its rank: an error on every rank."""
    x = block()
    f = torch.compile(
        lambda x: vmap(lambda s: there(x * s if RANK else x).sum() * s)(torch.arange(3.0).double()), backend="aot_eager"
    )
    with pytest.raises(AgreementError, match="batch differently"):
        f(x)


def test_dynamic_shapes():
    """Sizes are fixed where a movement stands: one graph for each, and right."""
    P = D.partition
    f = torch.compile(lambda x: F.shift(x.sin(), P, 0).cos(), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 5, 9):
        x = torch.arange(float(n)) + RANK
        assert torch.equal(f(x), F.shift(x.sin(), P, 0).cos())


# ---------------------------------------------------------------- maps, layers, and what is refused

A = dd.maps.repartition(D, M)
PAIR = dd.linear_map(
    lambda x: F.all_sum_reduce(2 * x, D.partition),
    lambda y: 2 * F.all_sum_reduce(y, D.partition),
    (3,),
    (3,),
    ranks=range(N),
)
RECOMPUTED = dd.remat(lambda x: there(x.sin()).cos())
BOTH = A.T @ A
INSIDE = {
    "a map": lambda x: A(x.sin()).cos(),
    "its adjoint": lambda x: A.T(A(x.sin())),
    "a composition": lambda x: BOTH(x.sin()),
    "a user's pair": lambda x: PAIR(x.sum(0)),
    "start and wait": lambda x: F.wait(F.start(A, x.sin())) * 2,
    "two at once": lambda x: sum(F.wait(F.start((A, A), (x.sin(), x.cos())))),
    "a pytree": lambda x: (lambda d: d["a"] + d["b"][0])(F.repartition({"a": x, "b": (x.sin(),)}, D, M)),
    "values": lambda x: there(x) * D.ndim * D.partition.size * len(D.local_shape()) * (1 + D.active) + dd.world().rank,
    "a layout": lambda x: F.repartition(x, D, dd.Layout(M.partition, D.shape, M.splits)),
    "complex": lambda x: there(torch.complex(x, x.sin())).abs(),
    "bfloat16": lambda x: there(x.bfloat16()).double() * 2,
    "a seed that is a tensor": lambda x: F.dist_dropout(x, D, 0.4, (x.sum() * 0 + 7).long()),
    "a batch of seeds": lambda x: vmap(lambda s: F.dist_dropout(x, D, 0.4, s))(torch.arange(3)).sum(0),
    "placeholders": lambda x: F.tie(there(x), x) + F.nothing((0,), x).sum(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", INSIDE)
def test_inside(name, backend):
    if (name, backend) == ("bfloat16", "inductor") and torch.__version__ < (2, 13):
        pytest.skip("inductor of older torch rounds less often than eager code")
    check(INSIDE[name], block(), backend=backend)


def test_remat_is_left_to_the_compiler():
    """What is worked out again AOTAutograd decides: never a movement."""
    for f in (lambda x: RECOMPUTED(x), lambda x: dd.remat(lambda x: there(x.sin()).cos())(x)):
        check(f, block(), messages=False)
        _, sent = found(torch.compile(f, backend="aot_eager", fullgraph=True), (block(),))
        _, plain = found(lambda x: there(x.sin()).cos(), (block(),))
        assert sent == plain


def test_autocast():
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return there(x), F.dist_sum((x.float() @ torch.ones(3, 3)) ** 2, D)

    check(f, block())


L = dd.Layout(dd.Partition((1, 1, N, 1)), (2, 4, 3 * N + 2, 5))
DOUBLE = {"dtype": torch.float64}
LAYERS = {
    "conv": lambda: dd.nn.Conv2d(L, 4, 3, 3, padding=1, **DOUBLE),
    "transposed": lambda: dd.nn.ConvTranspose2d(L, 4, 3, 3, **DOUBLE),
    "batch norm": lambda: dd.nn.BatchNorm(L, 4, **DOUBLE),
    "group norm": lambda: dd.nn.GroupNorm(L, 2, 4, **DOUBLE),
    "pool": lambda: dd.nn.MaxPool2d(L, 2),
    "upsample": lambda: dd.nn.Upsample(L, scale_factor=2, mode="bilinear"),
    "several": lambda: torch.nn.Sequential(
        dd.nn.Conv2d(L, 4, 4, 3, padding=1, **DOUBLE), torch.nn.ReLU(), dd.nn.BatchNorm(L, 4, **DOUBLE)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    check(lambda x: layer(x), block(L=L), parameters=list(layer.parameters()))
    torch._dynamo.reset()
    layer.eval()
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(block(L=L)), layer(block(L=L)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_has_another_mask_at_each_call(backend):
    """Numbers of calls are counted while a graph runs, in the program's order: the masks are those of eager code."""
    needs_cpp(backend)
    net = torch.nn.Sequential(dd.nn.Dropout(D, 0.5), torch.nn.Tanh(), dd.nn.Dropout(D, 0.3), dd.nn.Dropout(D, 0.2))
    eager, masks = copy.deepcopy(net), []
    ours = torch.compile(net, backend=backend, fullgraph=True)
    for k in (1, 2, 3):
        found_, _ = found(ours, (block(),))
        wanted, _ = found(eager, (block(),))
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found_, wanted, strict=True))
        assert [layer.calls for layer in net if hasattr(layer, "calls")] == [k] * 3
        masks.append(found_[0] == 0)
    every = [torch.cat(gather_objects(mask)) for mask in masks]
    assert not torch.equal(every[0], every[1]) and not torch.equal(every[1], every[2])


def test_words_of_a_refusal():
    """With fullgraph=True they are the library's own; else the graph breaks, and eager has its say."""
    dropout = dd.nn.Dropout(D, 0.5)

    def recorded(x):
        return torch.utils.checkpoint.checkpoint(there, x, use_reentrant=False)

    cases = [
        (lambda x: dd.maps.repartition(D, M)(x), "make maps outside"),
        (lambda x: vmap(dropout, randomness="different")(torch.stack([x, x])), "one mask for all examples"),
        (recorded, "inside of another construct"),
        (lambda x: dd.solve.cg(lambda v: 2 * v, x, D)[0], "solver looks at numbers"),
        (lambda x: F.repartition(x[:0].sin(), D, M), "next step: pass this rank's block"),
        (lambda x: F.wait(x), "not started in the same compiled function"),
    ]
    if N > 1:
        cases.append((lambda x: F.repartition(x, D.partition, M.partition), "compiled code asks no other rank"))
    for f, words in cases:
        with pytest.raises(Exception, match=words):
            torch.compile(f, backend="aot_eager", fullgraph=True)(block())
        torch._dynamo.reset()
    x = block()
    for f in (recorded, lambda x: F.repartition(x, D.partition, M.partition)):
        assert torch.equal(torch.compile(f, backend="aot_eager")(x), f(x))
    with pytest.raises(DistdlError):
        torch.compile(lambda x: F.repartition(x[:0].sin(), D, M), backend="aot_eager")(x)


def test_checking_around():
    """dd.checking() compares what compiled code sends, too."""
    needs_cpp()
    f = torch.compile(lambda x: back(there(x.sin()).exp()), backend="inductor", fullgraph=True)
    with dd.checking():
        check(f, block(), exact=False)


def test_gradient_sync_around():
    """Its hooks see the gradients of compiled code."""
    shared, gradients, x = dd.Layout(dd.Partition((N, 1)), (2 * N, 3)), [], torch.ones(2, 3).double() * (RANK + 1)
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3, dtype=torch.float64)
        sync = dd.parallel.GradientSync(model, dd.Partition((N,)))
        wrap(lambda x, model=model: F.dist_sum(model(x) ** 2, shared))(x).backward()
        sync.finish()
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)
    every = gather_objects(gradients[1].tolist())
    assert every.count(every[0]) == N


# ---------------------------------------------------------------- random programs


def drawn(seed):
    """A random program of movements, layers and transforms, over random uneven layouts; all of its layouts."""
    draw = random.Random(seed)

    def splits(n):
        cuts = sorted(draw.randint(0, n) for _ in range(N - 1))
        return tuple(b - a for a, b in zip((0, *cuts), (*cuts, n)))

    shape, steps = (draw.randint(2, 7), draw.randint(2, 5)), []
    here = dd.Layout(dd.Partition((N, 1)), shape, (splits(shape[0]), None))
    start = here
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(("move", "move", "sum", "dropout", "roll", "cumsum", "twice"))
        d, k = draw.randrange(2), draw.randint(0, 9)
        if kind == "move":
            there = dd.Layout(
                dd.Partition((N, 1) if d == 0 else (1, N), tuple(draw.sample(range(N), N))),
                shape,
                (splits(shape[0]), None) if d == 0 else (None, splits(shape[1])),
            )
            steps.append(lambda x, a=here, b=there: F.repartition(x.sin(), a, b))
            here = there
        elif kind == "sum":
            steps.append(lambda x, a=here: x * F.mark_varying(F.dist_sum(x.cos(), a), a.partition))
        elif kind == "dropout":
            steps.append(lambda x, a=here, s=k: F.dist_dropout(x, a, 0.3, s))
        elif kind == "roll":
            steps.append(lambda x, a=here, d=d, k=k: F.roll(x, a, d, k - 4))
        elif kind == "cumsum":
            steps.append(lambda x, a=here, d=d: F.dist_cumsum(x, a, d))
        else:
            steps.append(lambda x, a=here: x + F.repartition(F.repartition(x, a, start), start, a).exp())

    def run(x):
        for step in steps:
            x = step(x)
        return x

    outer = draw.choice((
        lambda x: run(x),
        lambda x: grad(lambda x: (run(x) ** 2).sum())(x),
        lambda x: jvp(run, (x,), (x.cos(),))[1],
        lambda x: vmap(run)(torch.stack([x, x.cos()])).sum(0),
        lambda x: jvp(grad(lambda x: (run(x) ** 2).sum()), (x,), (x.cos(),))[1],
    ))  # fmt: skip
    return start, outer


@pytest.mark.parametrize("backend, count", [("aot_eager", 24), ("inductor", 6)])
def test_random_programs(backend, count):
    for k in range(count):
        start, f = drawn(seed_of(backend, str(k)))
        check(f, block(k, start), backend=backend)
        torch._dynamo.reset()
