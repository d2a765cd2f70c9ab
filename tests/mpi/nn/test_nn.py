"""Modules: their functions, torch's machinery around them, and conversion of serial networks."""

import copy
import pickle

import pytest
import torch
from serial import randn

import distdl as dd
import distdl.functional as F
from distdl import nn
from distdl.errors import PartitionError, ShapeError

DOUBLE = {"dtype": torch.float64}


def line(*dims):
    """A partition of all ranks along the dim where -1 stands."""
    return dd.Partition(tuple(dd.world().size if d < 0 else d for d in dims))


def network(P):
    """One of most layers that keep (batch, channel, rows, columns)."""
    return torch.nn.Sequential(
        nn.Conv2d(P, 3, 8, 3, padding=1, **DOUBLE),
        nn.BatchNorm(P, 8, **DOUBLE),
        torch.nn.ReLU(),
        nn.MaxPool2d(P, 2),
        nn.ConvTranspose2d(P, 8, 4, 2, 2, **DOUBLE),
        nn.GroupNorm(P, 2, 4, **DOUBLE),
        nn.Upsample(P, scale_factor=2),
        nn.InstanceNorm(P, 4, affine=True, **DOUBLE),
        nn.LayerNorm(P, 16, **DOUBLE),
        nn.RMSNorm(P, 16, **DOUBLE),
        nn.AvgPool2d(P, 2),
        nn.Dropout(P, 0.25),
        nn.FeatureDropout(P, 0.25),
        nn.AdaptiveMaxPool2d(P, (3, 2)),
    )


def agree(ok, message):
    """Fail on all ranks together."""
    dd.testing.collective_assert(ok, message)


def test_torch_machinery():
    """state_dict, deepcopy, pickle, functional_call, .to and the meta device."""
    torch.manual_seed(dd.world().rank)  # modules agree on the first rank's seed
    P = line(1, 1, -1, 1)
    net, x = network(P), P.shard(randn(2, 3, 13, 9))
    net.eval()
    y = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        agree(torch.equal(other(x), y), "another result")
    fresh = network(P).eval()
    fresh.load_state_dict(net.state_dict())
    agree(torch.equal(fresh(x), y), "another result after load_state_dict")
    doubled = {k: 2 * v for k, v in net.named_parameters()}
    other = torch.func.functional_call(net, doubled, (x,))  # on every rank, also where y is empty
    agree(not y.numel() or not torch.equal(other, y), "functional_call is without effect")
    loss = lambda p: F.invariant_sum(torch.func.functional_call(net, p, (x,)).square().sum(), P)
    params = {k: v.detach() for k, v in net.named_parameters()}
    tangent = torch.func.jvp(loss, (params,), (params,))[1]
    grads = torch.func.grad(loss)(params)
    inner = sum((grads[k] * params[k]).sum() for k in grads)
    agree(torch.allclose(tangent, inner), f"jvp {tangent} and grad {inner}")
    agree(net.to(torch.float32)(x.float()).dtype == torch.float32, "another dtype")
    meta = nn.Conv2d(P, 3, 4, 3, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    agree(bool(torch.isfinite(meta.weight).all()), "reset_parameters left something out")


def test_shard_state_begins_with_a_serial_model():
    """Values, buffers and gradients of a serial model become this rank's blocks, in parts too; also outside."""
    torch.manual_seed(0)
    serial = torch.nn.Sequential(
        torch.nn.Conv1d(4, 7, 3, padding=1), torch.nn.BatchNorm1d(7), torch.nn.Flatten(), torch.nn.Linear(35, 3)
    ).double()
    X = randn(5, 4, 5)
    for _ in range(2):
        serial(X)  # running statistics of their own
    n, k = dd.world().size, max(dd.world().size - 1, 1)
    some = tuple(range(n - 1, n - 1 - k, -1))  # all but rank 0, backwards
    for shape, ranks in (((1, n), None), ((n, 1), None), ((1, k), some), ((k, 1), some)):
        P = dd.Partition((*shape, 1), ranks)
        flat, out = dd.Partition(shape, ranks), dd.Partition((shape[0], 1, shape[1]), ranks)
        net = torch.nn.Sequential(
            nn.Sharded(nn.Conv1d(P, 4, 7, 3, padding=1, **DOUBLE)),
            nn.BatchNorm(P, 7, **DOUBLE),
            nn.Movement(F.dist_flatten, P, flat),
            nn.Sharded(nn.Linear(out, 35, 3, y_layout="replicated", **DOUBLE)),
        )
        blocks = nn.shard_state(net, serial.state_dict())
        agree(list(blocks) == list(serial.state_dict()), f"other names: {list(blocks)}")
        with dd.testing.count_messages() as sent:
            nn.shard_state(net, serial.state_dict())
        agree(sent.sends == 0, "a message")
        net.load_state_dict(blocks)
        y, whole = net.eval()(P.shard(X)), serial.eval()(X)
        serial.train()
        rows = dd.Layout(dd.Partition((shape[0], 1), flat.along(0).ranks), whole.shape) if P.active else None
        agree(rows is None or torch.allclose(y, rows.shard(whole), rtol=1e-12), "another output")
        moved = nn.shard_state(net, {"0.weight": serial[0].weight})  # some of the names
        agree(list(moved) == ["0.weight"] and moved["0.weight"].shape == net[0].weight.shape, "another block")
    with pytest.raises(ShapeError, match="not the global tensor") as refused:
        nn.shard_state(net, {"3.weight": torch.ones(3, 36)})
    agree(all(word in str(refused.value) for word in ("'3.weight'", "(3, 35)", "(3, 36)", "whole")), "what is missing?")


@pytest.mark.parametrize("make, split", [
    (lambda P: nn.Linear(P, 7, 5), (1, -1, 1)), (lambda P: nn.Linear(P, 7, 5), (1, 1, -1)),
    (lambda P: nn.Conv1d(P, 4, 6, 3), (1, -1, 1)), (lambda P: nn.Conv1d(P, 4, 6, 3), (1, 1, -1, 1)),
    (lambda P: nn.ConvTranspose1d(P, 4, 6, 3), (1, -1, 1)), (lambda P: nn.ConvTranspose1d(P, 4, 6, 3), (1, -1, 1, 1)),
    (lambda P: nn.Embedding(P, 9, 6, padding_idx=2), (1, -1, 1)), (lambda P: nn.Embedding(P, 9, 6), (1, 1, -1)),
    (lambda P: nn.LayerNorm(P, 5), (1, -1)), (lambda P: nn.BatchNorm(P, 5), (1, -1, 1)),
])  # fmt: skip
def test_parameters_do_not_depend_on_the_partition(make, split):
    """The blocks of any partition are cut from the tensor that one rank would have."""
    seed = torch.Generator().manual_seed(4)
    torch.set_rng_state(seed.get_state())
    module = make(line(*split))
    torch.set_rng_state(seed.get_state())
    alone = make(dd.Partition(tuple(1 for _ in split), (dd.world().rank,)))
    for name, value in module.named_parameters():
        layout = module.layouts[name]
        expected = getattr(alone, name)
        agree(torch.equal(value, expected[layout.slices()]), f"{name} of {module}")


def serial_network():
    """What convert knows."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding="same", padding_mode="circular"),
        torch.nn.BatchNorm2d(8),
        torch.nn.GELU(),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 4, 3, 2, 1, 1), torch.nn.GroupNorm(2, 4)),
        torch.nn.Upsample(scale_factor=2, mode="bilinear"),
        torch.nn.AvgPool2d(2),
        torch.nn.InstanceNorm2d(4),
        torch.nn.Conv2d(4, 2, 3),
        torch.nn.AdaptiveAvgPool2d(3),
    ).double()


def test_convert():
    """Outputs, gradients and running statistics of a converted network are the serial ones."""
    serial = serial_network()
    for split in ((1, 1, -1, 1), (1, 1, 1, -1), (-1, 1, 1, 1)):
        P = line(*split)
        twin, reference = nn.convert(serial, P), copy.deepcopy(serial)
        x, c = randn(4, 3, 13, 9), randn(4, 2, 3, 3, seed=1)
        y, expected = twin(P.shard(x)), reference(x)
        agree(torch.allclose(y, P.shard(expected), rtol=1e-10, atol=1e-10), f"value over {split}")
        (y * P.shard(c)).sum().backward()
        (expected * c).sum().backward()
        for (name, a), (_, b) in zip(twin.named_parameters(), reference.named_parameters()):
            agree(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-10), f"gradient of {name} over {split}")
        for (name, a), (_, b) in zip(twin.named_buffers(), reference.named_buffers()):
            agree(torch.allclose(a, b), f"buffer {name} over {split}")


def test_convert_refuses_what_it_does_not_know():
    P = line(1, 1, -1, 1)
    for module in (torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Flatten(), torch.nn.Softmax(1)):
        with pytest.raises(dd.errors.PartitionError, match="no twin"):
            nn.convert(torch.nn.Sequential(module), P)


def test_losses_and_movements():
    n = dd.world().size
    P = dd.Partition((n, 1))
    x, target = randn(2 * n, 5), torch.arange(2 * n) % 5
    weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    loss = pickle.loads(pickle.dumps(nn.CrossEntropyLoss(P, weight=weight, label_smoothing=0.1)))
    labels = dd.Layout(dd.Partition((n,)), target.shape).shard(target)
    expected = torch.nn.functional.cross_entropy(x, target, weight, label_smoothing=0.1)
    agree(torch.allclose(loss(P.shard(x), labels), expected), "cross-entropy")
    agree(torch.allclose(nn.MSELoss(P)(P.shard(x), P.shard(2 * x)), x.square().mean()), "mse")
    move = nn.Movement(F.repartition, P, dd.Partition((1, n)))
    agree(torch.equal(move(P.shard(x)), dd.Partition((1, n)).shard(x)), "repartition")
    repr((loss, move))


def test_dropout_is_the_same_on_any_partition_and_other_each_time():
    x = torch.ones(4, 3, 8, 5)
    P = line(1, 1, -1, 1)
    torch.manual_seed(5)
    drop = nn.Dropout(P)
    torch.manual_seed(5)
    alone = nn.Dropout(dd.Partition((1, 1, 1, 1), (dd.world().rank,)))
    first, second = (alone(x) for _ in range(2))
    agree(torch.equal(drop(P.shard(x)), P.shard(first)), "another mask")
    agree(torch.equal(drop(P.shard(x)), P.shard(second)) and not torch.equal(first, second), "the second mask")
    agree(drop.eval()(x) is x, "evaluation drops")


def test_local_layers():
    """Untied filters are the same on any number of ranks; then L2 pooling and contrast normalisation."""

    def build(P):
        torch.manual_seed(0)
        return torch.nn.Sequential(nn.LocalConv2d(P, 2, 4, 3, (11, 7), **DOUBLE), nn.L2Pool2d(P, 2), nn.LCN(P, 3))

    X = randn(3, 2, 11, 7)
    alone = dd.Partition((1, 1, 1, 1), ranks=(dd.world().rank,))
    expected = build(alone)(X)
    for P in (line(1, 1, -1, 1), line(-1, 1, 1, 1), line(1, -1, 1, 1)):
        y = build(P)(P.shard(X))
        agree(torch.allclose(y, P.shard(expected), rtol=1e-12, atol=1e-12), f"{P}: another result")


def test_parameters_follow_the_blocks_of_a_layout():
    """Where a Layout says how features, channels or rows of a table are cut, parameters are cut so; a convolution's
    are of what comes out, and stay balanced."""
    n = dd.world().size
    uneven = lambda total: (total - n + 1, *[1] * (n - 1))
    X, double = randn(3, 8), {"dtype": torch.float64}
    torch.manual_seed(0)
    serial = torch.nn.Sequential(torch.nn.Linear(8, 8, **double), torch.nn.LayerNorm(8, **double))
    L = dd.Layout(dd.Partition((1, n, 1)), (3, 8, 8), (None, uneven(8), None))
    over = dd.Layout(dd.Partition((1, n)), (3, 8), (None, uneven(8)))
    twin = torch.nn.Sequential(
        nn.Linear(L, 8, 8, x_layout="replicated", y_layout="replicated", **double), nn.LayerNorm(over, 8, **double)
    )
    places, sizes = nn.layouts(twin), uneven(8)
    agree(places["0.weight"].sizes(0) == places["0.bias"].sizes(0) == places["1.weight"].sizes(0) == sizes, places)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(places[name].shard(serial.state_dict()[name]))
    agree(torch.allclose(twin(X), over.shard(serial(X)), rtol=1e-12, atol=1e-12), "another result")

    table = nn.Embedding(dd.Layout(dd.Partition((1, n, 1)), (5, 8, 2), (None, uneven(8), None)), 8, 2, y_layout="root")
    agree(table.weight.shape == (uneven(8)[dd.world().rank], 2), table.weight.shape)
    whole = dd.init.normal(dd.Layout(dd.Partition((1, 1), (dd.world().rank,)), (8, 2)), F.fold_in(table._seed, 0))
    y = table(torch.tensor([7, 0, 3, 6, 1]))
    agree(dd.world().rank or torch.equal(y, whole[[7, 0, 3, 6, 1]]), "other rows")

    channels = dd.Layout(dd.Partition((1, n, 1)), (2, 8, 5), (None, uneven(8), None))
    norm, conv = nn.BatchNorm(channels, 8, **double), nn.Conv1d(channels, 8, 8, 3, padding=1, **double)
    y = norm(channels.shard(randn(2, 8, 5)))
    out = F.conv_layout(channels, 8, 3, padding=1)
    agree(y.shape == channels.local_shape() and conv(y).shape == out.local_shape(), (y.shape, out))


ALONE = dd.Partition((1, 1, 1), (dd.world().rank,))


@pytest.mark.parametrize("bare", [True, False], ids=["partition", "Layout"])
@pytest.mark.parametrize("dim", [1, 2], ids=["seq", "heads"])
def test_rotary_attention_and_shared_heads(dim, bare):
    """Heads, of a Layout unevenly and fewer of keys, or rows of the sequence over all ranks: as one rank has it; what
    it turns by is the place in the sequence, or what ``positions`` says."""
    n = dd.world().size
    heads, kv = (4 * n, 2 * n) if bare else (6, 3)
    P = dd.Partition((1, n, 1) if dim == 1 else (1, 1, n))
    L = dd.Layout(P, (2, 7, heads))
    make = lambda P, **more: nn.MultiheadAttention(
        P, 4 * heads, heads, kv, causal=True, kernel="math", rotary_base=100.0, dtype=torch.float64, **more
    )
    torch.manual_seed(0)
    split = make(P if bare else L)
    torch.manual_seed(0)
    whole = make(ALONE)
    X, rows = randn(2, 7, 4 * heads), L.slices()[:2]
    places = nn.layouts(split)
    for name, p in whole.named_parameters():
        agree(torch.equal(dict(split.named_parameters())[name], p[places[name].slices()]), name)
    x = X[rows].clone().requires_grad_()
    y = split(x)
    X.requires_grad_()
    wished = whole(X)
    (y.square().sum() if dim == 2 else F.invariant_sum(y.square().sum(), P)).backward()
    wished.square().sum().backward()
    close = lambda a, b: torch.allclose(a, b, rtol=1e-11, atol=1e-11 * float(wished.detach().abs().max()))
    agree(close(y, wished[rows]), "another result")
    agree(close(x.grad, X.grad[rows]), "another gradient")
    for name, p in split.named_parameters():
        agree(close(p.grad, dict(whole.named_parameters())[name].grad[places[name].slices()]), name)

    mixed = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    y = split(X.detach()[:, mixed][rows], positions=mixed[rows[1]])
    agree(close(y, wished[:, mixed][rows]), "another result in another order")

    q, k, v = (getattr(whole, f"{name}_proj")(X.detach()).unflatten(-1, (-1, 4)).transpose(1, 2) for name in "qkv")
    q, k = (F.rotary_embedding(t, torch.arange(7), base=100.0) for t in (q, k))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    agree(close(whole.out_proj(y.transpose(1, 2).flatten(2)), wished), "not what torch makes of turned q and k")


def test_attention_of_other_heads_than_its_layout():
    with pytest.raises(dd.errors.PartitionError, match=r"another number of heads.*expected \(batch, seq, 4\)"):
        nn.MultiheadAttention(dd.Layout(ALONE, (2, 7, 3)), 16, 4)
    if dd.world().size > 1:
        with pytest.raises(dd.errors.PartitionError, match=r"a Layout of .* may split them unevenly"):
            nn.MultiheadAttention(line(1, 1, -1), 12, 3, 1)


def test_a_convolution_refuses_a_partition_of_other_images():
    """When it is made, on every rank, and with P's forms in words."""
    for make, forms in (
        (lambda P: nn.Conv2d(P, 4, 6, 3), ("(batch, channel, *space): 4 dims", "(batch, out, in, *space): 5 dims")),
        (lambda P: nn.ConvTranspose2d(P, 4, 6, 3), ("4 dims", "5 dims")),
        (lambda P: nn.LocalConv2d(P, 4, 6, 3, 8), ("4 dims",)),
    ):
        for P in (line(-1), line(1, -1, 1), line(1, 1, 1, 1, -1, 1)):
            with pytest.raises(PartitionError, match="2 spatial dims") as refused:
                make(P)
            agree(all(form in str(refused.value) for form in forms), str(refused.value))
            agree(f"got {P.ndim} dims" in str(refused.value), str(refused.value))
