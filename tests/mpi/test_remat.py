"""Activation checkpointing: the same gradients, the forward movements once more, on every rank."""

import copy
import functools
import types
import weakref

import pytest
import torch
from serial import layouts, messages, randn
from ties import FUNCTIONS, LOSSES, PAIR, ROUTES, SETTINGS, M, serial, the_maps
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import distdl as dd
import distdl.functional as F

WORLD = dd.world()


def network(L):
    """Convolution, ReLU and convolution; on a rank with an empty block little or nothing is saved."""

    def run(x, w):
        y = F.dist_conv(x, w, L, padding=1, params="invariant").relu()
        return F.dist_conv(y, w, L, padding=1, params="invariant")

    return run


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_same_gradients_and_messages(rows):
    """With one or two rows and more ranks, some ranks are empty; all count the same: forward, and forward + backward
    again."""
    X, W = randn(1, 2, rows, 4), randn(2, 2, 3, 3)
    for L in layouts(X.shape, (2,)).values():
        grads, counts = [], []
        for wrap in (lambda f: f, dd.remat):
            x, w = L.shard(X).clone().requires_grad_(), W.clone().requires_grad_()
            got = []
            forward = messages(lambda: got.append(wrap(network(L))(x, w)))
            backward = messages(lambda: got[0].square().sum().backward())
            grads.append((got[0].detach(), x.grad, w.grad))
            counts.append((forward, backward))
        if L.active:
            assert all(torch.equal(a, b) for a, b in zip(*grads))
        (forward, backward), (again, longer) = counts
        assert forward == again and longer == tuple(a + b for a, b in zip(forward, backward))


def test_a_rank_that_saves_nothing():
    """Rank 0 takes a sine; the others do nothing that torch would save, around a movement without derivative. All
    recompute."""
    P = dd.Partition((WORLD.size,))

    def f(x):
        F.shift(x.detach(), P, 0)
        return x.sin() if WORLD.rank == 0 else 2 * x

    x = randn(3).requires_grad_()
    got = []
    forward = messages(lambda: got.append(dd.remat(f)(x)))
    assert messages(lambda: got[0].sum().backward()) == forward and forward[0] == (WORLD.size > 1)
    assert torch.allclose(x.grad, x.detach().cos() if WORLD.rank == 0 else torch.full_like(x, 2))


def test_a_movement_inside_a_traced_graph():
    """There is only the operator that tracers record, for tensors without gradient; rank 0 alone saves something behind
    it."""
    P = dd.Partition((WORLD.size,))
    total = make_fx(lambda x: F.all_sum_reduce(x, P))(torch.ones(3, dtype=torch.float64))

    def f(x):
        s = total(x.detach())
        return (x * s).sin() if WORLD.rank == 0 else x + s

    x, got = randn(3).requires_grad_(), []
    forward = messages(lambda: got.append(dd.remat(f)(x)))
    assert messages(lambda: got[0].sum().backward()) == forward


def test_second_derivative():
    L = dd.Layout(dd.Partition((WORLD.size,)), (WORLD.size + 3,))
    X = randn(*L.shape)

    def f(x):
        y = F.repartition(x, L, dd.Layout(dd.Partition((1,)), L.shape))
        return y.sin() if WORLD.rank == 0 else 2 * y  # a single rank is not linear

    x = L.shard(X).clone().requires_grad_()
    (g,) = torch.autograd.grad(dd.remat(f)(x).sum(), x, create_graph=True)
    assert torch.allclose(g, L.shard(X.cos()))
    g.square().sum().backward()
    assert torch.allclose(x.grad, L.shard(-2 * X.cos() * X.sin()))


def test_two_regions_and_two_backwards():
    P = dd.Partition((WORLD.size,))

    @dd.remat
    def f(x, scale):
        """Doc."""
        return {"a": F.invariant_sum(x * scale, P).exp(), "b": [x * 2, torch.arange(2)]}

    assert f.__name__ == "f" and f.__doc__ == "Doc."
    x = torch.tensor([0.1, 0.2], requires_grad=True)
    first = f(x, scale=0.5)
    second = f(first["a"], scale=0.25)
    loss = second["a"].sum() + (second["b"][0] + first["b"][0]).sum()
    loss.backward(retain_graph=True)
    g = x.grad.clone()
    loss.backward()
    plain = x.detach().clone().requires_grad_()
    first, f = f.__wrapped__(plain, 0.5), f.__wrapped__
    second = f(first["a"], 0.25)
    (second["a"].sum() + (second["b"][0] + first["b"][0]).sum()).backward()
    assert torch.allclose(g, plain.grad) and torch.allclose(x.grad, 2 * g)


def test_module_random_state_and_inputs_without_gradient():
    torch.manual_seed(WORLD.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    x = randn(4, 3, dtype=torch.float32)
    y = dd.remat(model)(x)  # only parameters have gradients
    kept = y.detach() != 0
    y.sum().backward()
    assert torch.allclose(model[0].bias.grad, 2 * kept.sum(0).float())
    with torch.no_grad():
        assert not dd.remat(model)(x).requires_grad


@pytest.mark.parametrize("moves", ["at the beginning", "at the end", "nothing"])
def test_local_work_at_the_end_is_not_done_again(moves):
    """Unless a message comes after it. The other ranks save nothing, and send and receive all the same."""
    P, log = dd.Partition((WORLD.size,)), []
    total = (
        (lambda x: F.all_sum_reduce(x, P)) if WORLD.size > 1 else torch.clone
    )  # the identity of one rank is no movement

    def f(x, w):
        if WORLD.rank == 0:
            x = x.sin()
        log.append("middle")
        y = 2 * x if WORLD.rank else x @ w
        log.append("end")
        return total(y) if moves == "at the end" else y

    def begin(x, w):
        return total(x), w

    x, w = randn(3, 3).requires_grad_(), torch.ones(3, 3, dtype=torch.float64)
    region = dd.remat(f, begin=begin) if moves == "at the beginning" else dd.remat(f)
    got = []
    forward = messages(lambda: got.append(region(x, w)))
    assert log == ["middle", "end"]
    backward = messages(lambda: got[0].square().sum().backward())
    assert backward == tuple((1 + (moves != "nothing")) * n for n in forward)
    more = {
        "at the beginning": ["middle"] if WORLD.rank == 0 else [],
        "nothing": ["middle"] if WORLD.rank == 0 else [],
        "at the end": ["middle", "end"],
    }[moves if WORLD.size > 1 else "nothing"]
    assert log[2:] == more
    plain = x.detach().clone().requires_grad_()
    f(*begin(plain, w) if moves == "at the beginning" else (plain, w)).square().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_region_within_another():
    """What the inner one sends belongs to the outer one too, whoever saves something behind it."""
    P = dd.Partition((WORLD.size,))
    inner = dd.remat(lambda x: F.shift(x.sin() if WORLD.rank else x, P, 0))

    def f(x):
        y = inner(x)
        return y.exp() if WORLD.rank == 0 else 3 * y

    x = randn(3).requires_grad_()
    dd.remat(f)(x).sum().backward()
    plain = x.detach().clone().requires_grad_()
    y = F.shift(plain.sin() if WORLD.rank else plain, P, 0)
    (y.exp() if WORLD.rank == 0 else 3 * y).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("second", [False, True])
def test_hooks_inside_that_send_messages(second):
    """They come after the region's own, on all ranks, also on those that save nothing in f."""
    P = dd.Partition((WORLD.size,))
    x, w = randn(3, seed=WORLD.rank).requires_grad_(), randn(3, seed=9).requires_grad_()
    sync = dd.parallel.GradientSync([w], P)

    def begin(x):
        return (F.all_sum_reduce(x, P),)

    def f(x):
        return (x + w).exp().sin() if WORLD.rank == 0 else 2 * (x + w)

    found = []
    for region in (dd.remat(f, begin=begin), lambda x: f(*begin(x))):
        loss = region(x).square().sum()
        if second:
            loss = F.tie(torch.autograd.grad(loss, x, create_graph=True)[0].square().sum(), loss)
        loss.backward()
        sync.finish()
        found.append((x.grad, w.grad))
        x.grad = w.grad = None
    assert all(map(torch.allclose, *found))


@pytest.mark.skipif(WORLD.size < 2, reason="two ranks, of which one is linear")
@pytest.mark.parametrize(
    "route", ["double backward", "third backward", "backward in the cotangent", "autograd.functional.vhp"]
)
def test_further_derivatives_where_one_rank_alone_is_nonlinear(route):
    """Of two regions, eagerly, also in passes over a part of the graph (a derivative in the cotangent alone): both
    ranks work the same regions out again, in the same order, whichever of them saves nothing; the value is the serial
    twin's."""
    r, differentiate = WORLD.rank, ROUTES[route][1]
    if r not in PAIR:
        return
    X, Y, W = (randn(2, M, seed=k) / 2 for k in (1, 2, 3))
    for name in ("shift", "to_one_rank", "broadcast"):
        for settings in SETTINGS:
            A, (pre, mid, loss), log = the_maps()[name], settings[r], []

            def first(x, A=A, pre=FUNCTIONS[pre], log=log):
                log.append("first")
                return A.T(A(pre(x)))

            def second(z, A=A, mid=FUNCTIONS[mid], log=log):
                log.append("second")
                return A(mid(z) if z.numel() else z)

            def f(x, first=first, second=second, loss=LOSSES[loss]):
                return loss(dd.remat(second)(dd.remat(first)(x)))

            got = differentiate(f, X[r], Y[r], W[r])
            logs = dd.testing.gather_objects(log, PAIR)
            assert logs[0] == logs[1] and len(log) > 2, (name, settings, logs)
            wanted = differentiate(serial(name, settings), X, Y, W)[r]
            assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-11), (name, settings)


# ---------------------------------------------------------------- under torch.func


def J(f, v):
    return lambda x: jvp(f, (x,), (v,))[1]


def G(f):
    return grad(lambda x: f(x).sum())


NESTS = {
    "grad": lambda f, v: G(f), "jvp": J, "jvp(jvp)": lambda f, v: J(J(f, v), v), "jvp(grad)": lambda f, v: J(G(f), v),
    "grad(jvp)": lambda f, v: G(J(f, v)), "grad(grad)": lambda f, v: G(G(f)), "third": lambda f, v: G(J(G(f), v)),
    "vmap(grad)": lambda f, v: lambda x: vmap(G(f))(torch.stack([x, v])),
    "grad(vmap)": lambda f, v: lambda x: G(lambda x: vmap(f)(torch.stack([x, v * x])))(x),
    "vmap(jvp(grad))": lambda f, v: lambda x: vmap(lambda t: J(G(f), t)(x))(torch.stack([x, v])),
    "Gauss-Newton": lambda f, v: lambda x: vjp(f, x)[1](J(f, v)(x))[0],
    "gradient of Gauss-Newton": lambda f, v: G(lambda x: vjp(f, x)[1](J(f, v)(x))[0]),
    "autograd.grad in grad": lambda f, v: G(lambda x: torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]),
}  # fmt: skip


@pytest.mark.parametrize("nest", NESTS)
def test_every_nest_of_transforms(nest):
    """x^3, whose jvp of a jvp is 0 for 18 through a Function of torch's; against the function itself, and serial.
    Rank 0 is nonlinear after its movement, the others linear, one block is empty where ranks are many."""
    n, r = WORLD.size, WORLD.rank
    P = dd.Partition((n,))
    L = dd.Layout(P, (n + 1,), ((3, *(1,) * (n - 2), 0) if n > 1 else None,))
    X, V = randn(n + 1, seed=1) / 2, randn(n + 1, seed=2) / 2

    def f(x):
        y = F.all_gather(x**3, L)
        return y.sin() if r == 0 else (r + 1) * y

    def serial(X):
        Y = X**3
        return torch.cat([Y.sin(), *((k + 1) * Y for k in range(1, n))])

    x, v = L.shard(X), L.shard(V)
    run = NESTS[nest]
    plain, again = [], []
    for region, got in ((f, plain), (dd.remat(f), again), (dd.remat(dd.remat(f)), again)):
        got.append(run(region, v)(x))
    assert all(torch.allclose(plain[0], y, rtol=1e-12, atol=1e-14) for y in again)
    if "vmap" not in nest and nest not in ("jvp", "jvp(jvp)"):
        assert torch.allclose(again[0], L.shard(run(serial, V)(X)), rtol=1e-11, atol=1e-13)


def test_cube_of_a_cube_root_of_nothing():
    """18, not 0: the second tangent of x^3 at 3."""
    x, one = torch.tensor(3.0), torch.ones(())
    assert float(J(J(dd.remat(lambda x: x**3), one), one)(x)) == 18.0
    assert float(grad(grad(dd.remat(lambda x: x**3)))(x)) == 18.0


def test_pytrees_integers_and_inputs():
    """Any arguments and results; a result that is an argument is a copy; what nothing follows is a plain call."""

    @dd.remat
    def f(tree, *, scale):
        return {
            "y": tree["x"] * scale,
            "same": tree["x"],
            "n": tree["i"] + 1,
            "text": None,
            "wide": tree["x"].sum().expand(3),
        }

    x, i = torch.tensor([1.0, 2.0]), torch.arange(2)
    found = []

    def loss(x):
        out = f({"x": x, "i": i}, scale=3.0)
        found.append(out)
        assert out["n"].tolist() == [1, 2] and out["text"] is None and out["same"] is not x
        return (out["y"] ** 2).sum() + out["same"].sum() + out["wide"].sum()

    assert torch.equal(grad(loss)(x), 18 * x + 4)
    assert torch.equal(J(grad(loss), x)(x), 18 * x)
    assert torch.equal(vmap(lambda i: f({"x": x, "i": i}, scale=2.0)["y"])(i), torch.stack([2 * x] * 2))
    many = vmap(lambda x: f({"x": x, "i": i}, scale=2.0)["y"], in_dims=1)(torch.ones(2, 3))
    assert torch.equal(many, torch.full((3, 2), 2.0))


def test_what_is_reached_otherwise():
    """Modules and tensors in closures count as arguments, also where functional_call put tensors there; all else is an
    error."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    x, p = randn(4, 3), dict(model.named_parameters())
    for call in (
        dd.remat(model),
        dd.remat(model.forward),
        dd.remat(lambda x: model(x)),
        dd.remat(functools.partial(model)),
    ):

        class Outer(torch.nn.Module):
            def __init__(self, call=call):
                super().__init__()
                self.model, self.call = model, call

            def forward(self, x):
                return self.call(x).square().sum()

        outer = Outer()
        loss = lambda p, x, f=outer: torch.func.functional_call(f, {f"model.{k}": t for k, t in p.items()}, x)
        plain = lambda p, x: torch.func.functional_call(model, p, x).square().sum()
        for run in (
            lambda f: grad(f)(p, x),
            lambda f: grad(lambda p: sum((g**2).sum() for g in grad(f)(p, x).values()))(p),
        ):
            got, wanted = run(loss), run(plain)
            assert all(torch.allclose(got[k], wanted[k]) for k in p)
        g = grad(lambda x: call(x).sum())(x)  # autograd outside follows the parameters
        got = torch.autograd.grad(g.square().sum(), list(p.values()), allow_unused=True)
        wanted = torch.autograd.grad(
            grad(lambda x: model(x).sum())(x).square().sum(), list(p.values()), allow_unused=True
        )
        assert all(torch.allclose(a, b) for a, b in zip(got, wanted) if b is not None)

    w, v, holder = torch.tensor(2.0), torch.tensor([1.0, 3.0]), types.SimpleNamespace()
    inside = lambda w: dd.remat(lambda x: (w * x).sin().sum())(v)
    listed = lambda w: dd.remat(lambda x, ws=[w]: (ws[0] * x).sin().sum(), begin=lambda x: (x,))(v)
    cells = lambda w: (lambda ws: dd.remat(lambda x: (ws["w"] * x).sin().sum())(v))({"w": w})
    assert all(torch.equal(grad(f)(w), (v * (w * v).cos()).sum()) for f in (inside, cells))
    assert torch.allclose(J(grad(inside), w)(w), -w * (v**2 * (w * v).sin()).sum())

    def hidden(w, transform=lambda f: f):
        holder.w = w
        return transform(dd.remat(lambda x: (holder.w * x).sin()))(v).sum()

    for run in (
        lambda: grad(hidden)(w),
        lambda: J(hidden, w)(w),
        lambda: J(grad(hidden), w)(w),
        lambda: vmap(hidden)(v),
        lambda: grad(hidden)(w, vmap),
        lambda: grad(lambda v: vmap(hidden)(v).sum())(v),
        lambda: grad(listed)(w),
        lambda: grad(lambda x: dd.remat(lambda x: x * hold[0])(x).sum())(v),
    ):
        hold[0] = torch.ones((), requires_grad=True)
        with pytest.raises(dd.errors.DistdlError, match="otherwise than by its arguments"):
            run()
    hold[0] = torch.full((), 3.0)  # a constant may be anywhere
    assert torch.equal(grad(lambda x: dd.remat(lambda x: x * hold[0])(x).sum())(v), torch.full((2,), 3.0))


hold: list = [None]


@pytest.mark.parametrize("second", [False, True])
def test_messages_under_torch_func(second):
    """Forward once more for each gradient; as many on every rank, also where the block is empty and nothing is
    saved."""
    P = dd.Partition((WORLD.size,))
    L = dd.Layout(P, (1,))

    def f(x):
        y = F.shift(x.sin() if WORLD.rank == 0 else 2 * x, P, 0) if WORLD.size > 1 else x.sin()
        return F.all_sum_reduce(y, P)

    x, counts = torch.ones(2, dtype=torch.float64), []
    forward = messages(lambda: f(x))
    for region in (f, dd.remat(f)):
        run = G(G(region)) if second else G(region)
        counts.append(messages(lambda: run(x)))
    more = tuple(b - a for a, b in zip(*counts))
    assert more[0] % forward[0] == 0 if forward[0] else more[0] == 0
    assert second or more == forward
    empty = dd.remat(lambda x: F.invariant_sum(F.all_gather(x, L).exp().sum(), P))
    wanted = torch.full(L.local_shape(), 1.0).exp() * (WORLD.size if WORLD.size > 1 else 1)
    assert torch.allclose(grad(empty)(torch.ones(L.local_shape())), wanted)


@pytest.mark.parametrize("transform", ["grad", "Gauss-Newton"])
def test_memory_under_torch_func(transform):
    """At most a few blocks' activations are alive at any time, however many blocks there are."""

    def peak(wrap, count):
        alive, most = set(), 0

        def noted(y):
            nonlocal most
            key = object()
            alive.add(key)
            most = max(most, len(alive))
            storage = y
            while torch._C._functorch.is_functorch_wrapped_tensor(storage):
                storage = torch._C._functorch.get_unwrapped(storage)
            weakref.finalize(storage.untyped_storage(), alive.discard, key)
            return y

        def block(x):
            for _ in range(10):
                x = noted(x.sin())
            return x

        def model(x):
            for _ in range(count):
                x = wrap(block)(x)
            return x

        x = torch.ones(3)
        (G(model) if transform == "grad" else NESTS[transform](model, x))(x)
        return most

    few, many = peak(dd.remat, 2), peak(dd.remat, 12)
    assert many - few <= 25 < 100 <= peak(lambda f: f, 12), (few, many, peak(lambda f: f, 12))


def test_random_state_and_autocast_under_torch_func():
    """The mask of torch's dropout, of distdl's, and the types of autocast are those of forward, though backward is
    outside."""
    torch.manual_seed(WORLD.rank)
    d, P = torch.nn.Dropout(0.5), dd.Partition((WORLD.size,))
    ours = dd.nn.Dropout(P, 0.5)
    for layer in (d, ours):
        kept = []

        def f(w, x):
            y = dd.remat(lambda w, x: layer(w * x) * w)(w, x)
            kept.append(int((y != 0).sum()))
            return y.sum()

        assert float(grad(f)(torch.tensor(2.0), torch.ones(16))) == 8 * kept[0]
    assert ours.calls == 1

    def cast(w):
        with torch.autocast("cpu", torch.bfloat16):
            return dd.remat(lambda w: (w @ w).float().sin())(w).sum()

    def plain(w):
        with torch.autocast("cpu", torch.bfloat16):
            return (w @ w).float().sin().sum()

    w = torch.rand(4, 4)
    assert torch.equal(grad(cast)(w), grad(plain)(w))


# ---------------------------------------------------------------- nothing moves on when it is run again

LINE = dd.Partition((WORLD.size, 1))


def torchs(reentrant):
    return lambda f: lambda *args: checkpoint(f, *args, use_reentrant=reentrant)


WAYS = {"no checkpoint": lambda f: f, "remat": dd.remat, "torch's": torchs(False), "torch's, reentrant": torchs(True),
        "one within another": lambda f: torchs(False)(torchs(False)(f))}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", [dd.nn.Dropout, dd.nn.FeatureDropout])
def test_dropout_has_its_mask_again(layer, way):
    """y = d(w x) w with w = 2: each kept element adds 8 to the gradient, whichever regions are under way, on any number
    of ranks the same ones; the ranks' own generators differ."""
    torch.manual_seed(WORLD.rank)
    P, X = LINE, torch.ones(6, 16, dtype=torch.float64)
    d = layer(P, 0.5)
    alone = copy.deepcopy(d)
    alone.P = dd.Layout(dd.Partition((1, 1), (WORLD.rank,)), X.shape)
    d.P = dd.Layout(P, X.shape)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ys = [WAYS[way](lambda x, w: d(w * x) * w)(d.P.shard(X), w) for _ in range(3)]
    for y in (ys[1], ys[0], ys[2]):  # in another order than forward, and one twice
        for _ in range(2 if y is ys[0] else 1):
            w.grad = None
            y.sum().backward(retain_graph=y is ys[0])
            assert float(w.grad) == 8 * int((y != 0).sum())
    assert d.calls == 3 and all(torch.equal(y.detach() != 0, d.P.shard(alone(X) != 0)) for y in ys)


def test_dropout_in_a_chain():
    dp, P = dd.parallel, dd.Partition((WORLD.size,))
    s, d = dp.Sharding.of(torch.ones(()), P), dd.nn.Dropout(P, 0.5)
    for remat in (True, "parameters", False):
        block = s.block(torch.tensor(2.0)).requires_grad_()
        y = dp.chain([lambda w, x: d(w * x) * w], [s], remat=remat)([block], torch.ones(16))
        y.sum().backward()
        kept = F.all_sum_reduce((y.detach() != 0).sum(), P)
        assert block.grad.tolist() == [8.0 * kept] * block.numel()
    assert d.calls == 3


def test_dropout_that_cannot_have_its_mask_again():
    """Not another mask, which would be a wrong gradient: an error, on every rank."""
    x, d = torch.ones(16, requires_grad=True), dd.nn.Dropout(dd.Partition((WORLD.size,)), 0.5)
    y = checkpoint(lambda x: d(x).sin(), x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(dd.errors.DistdlError, match="preserve_rng_state=True"):
        y.sum().backward()
    regions = []
    for _ in range(2):
        torch.manual_seed(1)
        regions.append(checkpoint(lambda x: d(x).sin(), x, use_reentrant=False))
    with pytest.raises(dd.errors.DistdlError, match="two calls began with the same state"):
        regions[0].sum().backward()
    for _ in range(2):  # one after the other they can be told
        torch.manual_seed(2)
        y = checkpoint(lambda x: d(x).sin(), x, use_reentrant=False)
        y.sum().backward()


def test_dropout_remembers_no_more_than_it_must(monkeypatch):
    d, x = dd.nn.Dropout(dd.Partition((1,), (WORLD.rank,)), 0.5), torch.ones(4, requires_grad=True)
    d(x).sum().backward()
    assert not d._calls._known
    monkeypatch.setattr(type(d._calls), "most", 3)
    for _ in range(5):
        dd.remat(d)(x)
    assert len(d._calls._known) == 3 and not copy.deepcopy(d)._calls._known and copy.deepcopy(d).calls == 6


@pytest.mark.parametrize("layer", [dd.nn.Dropout, dd.nn.FeatureDropout])
def test_dropout_under_vmap(layer):
    """As torch's ``randomness`` says; every rank its part of the same masks."""
    torch.manual_seed(WORLD.rank)
    X = torch.ones(5, 4, 16)
    L = dd.Layout(LINE, X.shape[1:])
    d, xs = layer(L, 0.5), torch.stack([L.shard(x) for x in X])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(d)(xs)
    whole = copy.deepcopy(d)
    whole.P = dd.Layout(dd.Partition((1, 1), (WORLD.rank,)), L.shape)
    for randomness, masks in (("same", 1), ("different", 5)):
        batch = torch.vmap(whole, randomness=randomness)(X)
        assert len({tuple(y.flatten().tolist()) for y in batch}) == masks
        assert torch.equal(torch.vmap(d, randomness=randomness)(xs), torch.stack([L.shard(y) for y in batch]))
        grads = torch.vmap(torch.func.grad(lambda x: d(x).sum()), randomness=randomness)(xs)
        whole.calls += 1
        assert len({tuple(y.flatten().tolist()) for y in torch.vmap(whole, randomness=randomness)(X)}) == masks
        d.calls += 1
        assert set(grads.unique().tolist()) <= {0.0, 2.0}
    chunks = torch.vmap(whole, randomness="same", chunk_size=2)(X)
    assert all(torch.equal(chunks[0], y) for y in chunks)
    nested = torch.vmap(torch.vmap(whole, randomness="same"), randomness="different")(torch.ones(2, 3, 4, 16))
    assert torch.equal(nested[:, :1].expand_as(nested), nested) and not torch.equal(nested[0], nested[1])
    pure = torch.vmap(lambda x: F.dist_dropout(x, L, 0.5, 7), randomness="different")(
        xs
    )  # a function of its seed alone
    assert torch.equal(pure, F.dist_dropout(torch.ones(L.local_shape()), L, 0.5, 7).expand_as(pure))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("way", WAYS)
def test_batch_statistics_once(way, momentum):
    """Running statistics and their count are those without a checkpoint; the result and gradients too."""
    X, P = randn(5, 3, 4), dd.Partition((WORLD.size, 1, 1))
    L, found = dd.Layout(P, X.shape), []
    for one in ("no checkpoint", way):
        norm = dd.nn.BatchNorm(P, 3, momentum=momentum, dtype=torch.float64)
        for k in range(2):
            x = L.shard(X + k).clone().requires_grad_()
            y = (lambda x: norm(x).sin()) if one == "no checkpoint" else WAYS[way](lambda x: norm(x).sin())
            y = y(x)
            y.square().sum().backward()
        found.append(
            [y.detach(), x.grad, norm.weight.grad, norm.running_mean, norm.running_var, norm.num_batches_tracked]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found)) and int(found[0][-1]) == 2
