"""Layers whose parameters live in parts (ZeRO-3), and layers of experts, beside serial torch."""

import copy
import pickle

import pytest
import torch
from serial import randn
from torch.func import functional_call, grad, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl import nn
from distdl.errors import PartitionError, ShapeError

WORLD = dd.world()
R, N = WORLD.rank, WORLD.size
DOUBLE = {"dtype": torch.float64}


def agree(ok, message):
    dd.testing.collective_assert(bool(ok), message)


def close(a, b, message):
    agree(a.shape == b.shape and torch.allclose(a, b, rtol=1e-11, atol=1e-12), message)


def grids(ndim, *also):
    """Partitions: the batch over all ranks; data x another dim; all but rank 0, in reverse order."""
    found = [dd.Partition((N, *(1,) * (ndim - 1)))]
    if N > 1:
        found.append(dd.Partition((N - 1, *(1,) * (ndim - 1)), ranks=tuple(range(N - 1, 0, -1))))
    for d in also if N == 4 else ():
        shape = [2] + [1] * (ndim - 1)
        shape[d] *= 2
        found.append(dd.Partition(tuple(shape), ranks=(2, 0, 3, 1)))
    return found


IMAGE = (5, 6, 4, 4)
LAYERS = {
    "Linear": (lambda P: nn.Linear(P, 6, 5, x_layout="replicated", y_layout="replicated", **DOUBLE), (5, 6), 3, (1, 2)),
    "Embedding": (lambda P: nn.Embedding(P, 7, 6, padding_idx=1, y_layout="replicated", **DOUBLE), (5,), 3, (1, 2)),
    "Conv2d": (lambda P: nn.Conv2d(P, 6, 4, 3, padding=1, **DOUBLE), IMAGE, 4, (1, 2, 3)),
    "ConvTranspose2d": (lambda P: nn.ConvTranspose2d(P, 6, 4, 2, **DOUBLE), IMAGE, 4, (1, 2)),
    "BatchNorm": (lambda P: nn.BatchNorm(P, 6, **DOUBLE), IMAGE, 4, (1, 2)),
    "GroupNorm": (lambda P: nn.GroupNorm(P, 2, 6, **DOUBLE), IMAGE, 4, (2, 3)),
    "LayerNorm": (lambda P: nn.LayerNorm(P, (4, 4), **DOUBLE), IMAGE, 4, (1, 2)),
    "RMSNorm": (lambda P: nn.RMSNorm(P, 4, **DOUBLE), IMAGE, 4, (1, 3)),
}


def block(name, P, shape):
    """This rank's block of the layer's input; a rank outside passes nothing."""
    if P.ndim == len(shape):
        return dd.Layout(P, shape).shard(randn(*shape))
    L = dd.Layout(P, (shape[0], 1, 6))  # (batch, out, in)
    rows, _, columns = L.slices()
    if name == "Embedding":
        return (torch.arange(shape[0]) * 3 % 7)[rows]
    return randn(*shape)[rows, columns if P.active else slice(None)]


@pytest.mark.parametrize("name", LAYERS)
def test_as_the_layer_itself(name):
    """The value, and of every parameter this rank's part of the gradient, of the layer that keeps copies."""
    make, shape, ndim, also = LAYERS[name]
    for P in grids(ndim, *also):
        for dims in (None, 0):
            plain = make(P)
            sharded = nn.Sharded(copy.deepcopy(plain), dims)
            names = [n for n, _ in plain.named_parameters()]
            assert list(sharded.layouts) == [n for n, _ in sharded.named_parameters()] == names
            x = block(name, P, shape)
            y, expected = sharded(x), plain(x)
            agree(torch.equal(y, expected), f"{name} over {P}: another value")
            c = randn(*y.shape, seed=R)  # another on each rank
            (y * y * c).sum().backward()
            (expected * expected * c).sum().backward()
            for n, p in sharded.named_parameters():
                if not P.active or not p.numel():
                    continue
                whole, part = plain.layouts[n], sharded.layouts[n]
                own = [slice(i - k, j - k) for (i, j), (k, _) in zip(part.box(), whole.box())]
                assert torch.equal(p, getattr(plain, n)[tuple(own)])
                wanted = getattr(plain, n).grad[tuple(own)]
                assert torch.allclose(p.grad, wanted, rtol=1e-10, atol=1e-12), (name, n, P, dims)
            agree(True, "")


def test_parts_are_small_and_one_message_set_each_way():
    P = dd.Partition((N, 1, 1))
    sharded = nn.Sharded(nn.Linear(P, 8, 4 * N, x_layout="replicated", y_layout="replicated"))
    assert sharded.weight.shape == (4, 8) and sharded.bias.shape == (4,)
    x = torch.ones(2, 8)
    sharded(x)
    with dd.testing.count_messages() as forward:
        y = sharded(x)
    with dd.testing.count_messages() as backward:
        y.sum().backward()
    assert len(forward) == len(backward) == N - 1  # of weight and bias together, to each other rank


def programs(P):
    """(two layers over P, serial ones)."""
    torch.manual_seed(1)
    kind = dict(x_layout="replicated", y_layout="replicated", **DOUBLE)
    net = torch.nn.Sequential(
        nn.Sharded(nn.Linear(P, 6, 7, **kind)), torch.nn.Tanh(), nn.Sharded(nn.Linear(P, 7, 3, bias=False, **kind))
    )
    serial = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False)).double()
    return net, serial


def gathered(net):
    """{name: the whole parameter}"""
    return {n: F.all_gather(p.detach(), nn.layouts(net)[n]) for n, p in net.named_parameters()}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_serial_training(optimizer):
    """Several steps, and the parameters after them; a uneven batch, and fewer rows of a weight than ranks."""
    P = dd.Partition((N, 1, 1))
    net, serial = programs(P)
    for (_, p), (_, w) in zip(serial.named_parameters(), gathered(net).items()):
        p.data.copy_(w)
    X, T = randn(2 * N + 1, 6, seed=1), randn(2 * N + 1, 3, seed=2)
    rows = dd.Layout(dd.Partition((N, 1)), T.shape)
    x, t = dd.Partition((N, 1)).shard(X), rows.shard(T)
    a, b = (optimizer(m.parameters(), lr=0.05) for m in (net, serial))
    for _ in range(4):
        a.zero_grad()
        b.zero_grad()
        loss = F.dist_mse_loss(net(x), t, rows)
        loss.backward()
        expected = torch.nn.functional.mse_loss(serial(X), T)
        expected.backward()
        close(loss.detach(), expected.detach(), "another loss")
        a.step()
        b.step()
    for (n, w), p in zip(gathered(net).items(), serial.parameters()):
        close(w, p.detach(), f"{n} after training")


def test_under_torch_func():
    """functional_call on the parts: grad, jvp, vmap and Hessian-vector products are parts of the serial ones."""
    P = dd.Partition((N, 1, 1))
    net, serial = programs(P)
    X = randn(N + 1, 6, seed=1)
    x, places = dd.Partition((N, 1)).shard(X), nn.layouts(net)
    parts = {n: p.detach() for n, p in net.named_parameters()}
    whole = gathered(net)
    V = {n: randn(*w.shape, seed=9) for n, w in whole.items()}
    v = {n: places[n].shard(t) for n, t in V.items()}
    loss = lambda p, x=x: F.invariant_sum(functional_call(net, p, (x,)).pow(3).sum(), P)
    names = dict(zip(whole, dict(serial.named_parameters())))
    total = lambda p, X=X: functional_call(serial, {names[n]: t for n, t in p.items()}, (X,)).pow(3).sum()
    wanted = grad(total)(whole)
    found = grad(loss)(parts)
    for n in whole:
        close(found[n], places[n].shard(wanted[n]), f"gradient of {n}")
    close(jvp(loss, (parts,), (v,))[1], jvp(total, (whole,), (V,))[1], "jvp")
    again, wished = jvp(grad(loss), (parts,), (v,))[1], jvp(grad(total), (whole,), (V,))[1]
    for n in whole:
        close(again[n], places[n].shard(wished[n]), f"Hessian-vector product of {n}")
    several = vmap(lambda s: grad(loss)({n: s * p for n, p in parts.items()}))(torch.tensor([1.0, 2.0], **DOUBLE))
    for i, s in enumerate((1.0, 2.0)):
        wanted = grad(total)({n: s * w for n, w in whole.items()})
        for n in whole:
            close(several[n][i], places[n].shard(wanted[n]), f"batched gradient of {n}")


def test_remat_gathers_again():
    P = dd.Partition((N, 1, 1))
    net, _ = programs(P)
    x = randn(2, 6, seed=R).requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    with dd.testing.count_messages() as once:
        net(x)
    y = dd.remat(lambda x: net(x))(x)
    with dd.testing.count_messages() as backward:
        found = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
    agree(all(torch.equal(a, b) for a, b in zip(found, expected)), "other gradients")
    assert list(backward)[: len(once)] == list(once) and (N == 1 or len(backward) > len(once))  # and reduce-scattered


def test_states_copies_and_files(folder):
    """state_dict, deepcopy, pickle, meta; a file of it is the layer's own, and loads on any other partition."""
    P = dd.Partition((N, 1, 1))
    sharded = nn.Sharded(nn.Linear(P, 6, 2 * N + 1, x_layout="replicated", y_layout="replicated", **DOUBLE))
    x = randn(3, 6, seed=R)
    y = sharded(x)
    assert list(sharded.state_dict()) == ["weight", "bias"] and "of (" in repr(sharded)
    for other in (copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        agree(torch.equal(other(x), y), "another result of a copy")
    meta = nn.Sharded(nn.Linear(P, 6, 2 * N + 1, x_layout="replicated", y_layout="replicated", device="meta", **DOUBLE))
    assert meta.weight.is_meta and meta.weight.shape == sharded.weight.shape
    meta = meta.to_empty(device="cpu")
    meta.reset_parameters()
    meta.load_state_dict(sharded.state_dict())
    agree(torch.equal(meta(x), y), "another result after load_state_dict")
    before = sharded.weight.detach().clone()
    with torch.no_grad():
        sharded.weight.zero_()
    sharded.reset_parameters()
    agree(torch.equal(sharded.weight, before), "reset_parameters draws other numbers")
    path = dd.testing.gather_objects(str(folder / "file"))[0]
    dd.checkpoint.save(path, *dd.checkpoint.state(sharded))
    plain = nn.Linear(P, 6, 2 * N + 1, x_layout="replicated", y_layout="replicated", **DOUBLE)
    dd.checkpoint.restore(path, plain)
    agree(torch.equal(plain(x), y), "another result of what a plain layer loads")
    with torch.no_grad():
        plain.weight.mul_(2)
    dd.checkpoint.save(path, *dd.checkpoint.state(plain))
    dd.checkpoint.restore(path, sharded)
    close(sharded(x), plain(x), "another result of what it loads")


def test_gradients_are_nobody_elses_to_sum():
    """Who reduces gradients over all ranks leaves these alone, once there is more than one."""
    P = dd.Partition((N, 1, 1))
    net, _ = programs(P)
    net(randn(2, 6)).sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    after, _ = dd.parallel.reduce_gradients([p.grad for p in net.parameters()], dd.Partition((N,)))
    agree(all(torch.equal(a, b) for a, b in zip(before, after)), "summed again")


def test_what_is_no_layer():
    P = dd.Partition((N, 1, 1))
    taken = nn.Linear(P, 2, 3)
    nn.Sharded(taken)
    for wrong in (torch.nn.Linear(2, 3), nn.MSELoss(P), torch.nn.Sequential(nn.Linear(P, 2, 3)), taken, None):
        with pytest.raises(PartitionError, match=r"Sharded: not one layer of dd\.nn with parameters") as caught:
            nn.Sharded(wrong)
        assert "one by one" in caught.value.next_step
    with pytest.raises(PartitionError, match="5"):
        nn.Sharded(nn.Linear(P, 2, 3), 5)


# ---------------------------------------------------------------- experts


def serial_experts(x, w, b, expert):
    return torch.stack([x[t] @ w[e].T + b[e] for t, e in enumerate(expert)])


@pytest.mark.parametrize("experts", [1, 3, 2 * N + 1])
def test_experts(experts):
    """Value and gradients in several steps, beside a loop over tokens; some ranks have no expert, or no token."""
    P = dd.Partition((N,))
    torch.manual_seed(2)
    layer = nn.ExpertLinear(P, experts, 4, 3, **DOUBLE)
    own = layer.layouts["weight"]
    assert layer.weight.shape == own.local_shape() and own.shape == (experts, 3, 4)
    w, b = (F.all_gather(p.detach(), layer.layouts[n]).requires_grad_() for n, p in layer.named_parameters())
    assert float(w.detach().abs().max()) <= 0.5 and float(b.detach().abs().max()) <= 0.5  # 1 / √4
    X, counts = randn(3 * N, 4, seed=3), [3 * N, *[0] * (N - 1)] if experts == 1 else [3] * N
    expert = torch.arange(3 * N) * 5 % experts
    start = sum(counts[:R])
    mine = slice(start, start + counts[R])
    a, s = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD([w, b], lr=0.1)
    for _ in range(3):
        a.zero_grad()
        s.zero_grad()
        y, Y = layer(X[mine], expert[mine]), serial_experts(X, w, b, expert)
        close(y.detach(), Y[mine].detach(), "another value")
        (y**3).sum().backward()
        (Y**3).sum().backward()
        a.step()
        s.step()
    for n, whole in (("weight", w), ("bias", b)):
        close(getattr(layer, n).detach(), layer.layouts[n].shard(whole.detach()), f"{n} after training")


def test_experts_under_torchs_machinery():
    P = dd.Partition((N,))
    layer = nn.ExpertLinear(P, np_int(N + 1), np_int(4), np_int(3), bias=False, **DOUBLE)
    x, expert = randn(2, 4, seed=R), (torch.arange(2) + R) % (N + 1)
    y = layer(x, expert)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        agree(torch.equal(other(x, expert), y), "another result of a copy")
    params = {n: p.detach() for n, p in layer.named_parameters()}
    loss = lambda p: F.invariant_sum(functional_call(layer, p, (x, expert)).pow(3).sum(), P)
    gradient, slope = grad(loss)(params)["weight"], jvp(loss, (params,), (params,))[1]
    close(F.invariant_sum((gradient * params["weight"]).sum(), P), slope, "grad and jvp differ")
    alone = nn.ExpertLinear(dd.Partition((1,), ranks=(R,)), N + 1, 4, 3, **DOUBLE)
    assert alone.weight.shape == (N + 1, 3, 4)
    outside = nn.ExpertLinear(dd.Partition((1,), ranks=(N - 1,)), 2, 4, 3, **DOUBLE)
    y = outside(x if R == N - 1 else x[:0], expert % 2 if R == N - 1 else expert[:0])
    assert y.shape == ((2, 3) if R == N - 1 else (0, 3))
    y.sum().backward()
    with pytest.raises((ShapeError, PartitionError)):
        nn.ExpertLinear(dd.Partition((N, 1)), 2, 4, 3)(x, expert)


def np_int(n):
    return pytest.importorskip("numpy").int32(n)
