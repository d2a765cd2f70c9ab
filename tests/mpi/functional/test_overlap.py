"""Overlapped convolutions: the block is convolved while the strips beside it travel, and the result is that of serial
torch."""

import random

import pytest
import torch
import torch.nn.functional as tf
from convolutions import random_case, random_layout, serial_conv
from registry import needs
from serial import along, check_layer, layouts, messages, randn, whole
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

import distdl as dd
import distdl.functional as F
from distdl.functional import overlap as inside


def check(x, w, b, L, orders=2, **options):
    """dist_conv(overlap=True) over L equals the serial convolution, in every derivative."""
    out = F.conv_layout(
        L,
        w.shape[0],
        tuple(w.shape[2:]),
        options.get("stride", 1),
        options.get("padding", 0),
        options.get("dilation", 1),
    )
    check_layer(
        lambda x, w, b: F.dist_conv(x, w, L, b, params="invariant", overlap=True, **options),
        lambda *t: serial_conv(*t, **options),
        [x, w, b],
        [L, whole, whole],
        out,
        orders=orders,
        name=f"{L} {options}",
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(padding=1),
        dict(padding=(0, 2)),
        dict(stride=2, padding=(2, 0)),
        dict(stride=(3, 1), dilation=(1, 2), padding=1),
        dict(groups=2, padding=1),
        dict(padding=1, padding_mode="circular"),
        dict(padding=(2, 1), padding_mode="reflect"),
        dict(padding=1, padding_mode="replicate"),
    ],
    ids=str,
)
def test_all_derivatives(options):
    """Uneven and empty blocks, inactive ranks, grids."""
    x, w, b = randn(2, 4, 13, 9), randn(6, 4 // options.get("groups", 1), 3, 3, seed=1), randn(6, seed=2)
    for L in layouts(x.shape, (2, 3)).values():
        check(x, w, b, L, **options)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of the serial twin
@pytest.mark.parametrize("n", [1, 2, 3])
def test_dims(n):
    """The batch split too."""
    x, w, b = randn(2, 2, *(15, 8, 6)[:n]), randn(3, 2, *(3, 2, 3)[:n], seed=1), randn(3, seed=2)
    for L in layouts(x.shape, (*range(2, 2 + n), 0)).values():
        check(x, w, b, L, orders=1, padding=1)
        check(x, w, b, L, orders=1, padding="same")


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_random(count):
    generator = random.Random(11)
    for i in range(count):
        x, w, b, options = random_case(generator, False)
        check(x, w, b, random_layout(generator, tuple(x.shape)), orders=1 if i % 5 else 2, **options)


def problem(n=6, k=3, padding=1, seed=0, **options):
    """(layout of a line of n pixels for each rank, this rank's x, w, a call of the two)."""
    size = dd.world().size
    L = dd.Layout(dd.Partition((1, 1, size)), (2, 3, n * size))
    x, w = L.shard(randn(*L.shape, seed=seed)).clone(), randn(4, 3, k, seed=1)
    return L, x, w, lambda x, w, overlap: F.dist_conv(x, w, L, padding=padding, overlap=overlap, **options)


def same(found, wanted, what):
    """Equal on every rank."""
    close = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-10, atol=1e-10)
    dd.testing.collective_assert(close, f"{what}: differs")


@needs(2)
@pytest.mark.parametrize("wide", [False, True])
def test_the_block_is_convolved_while_strips_travel(monkeypatch, wide):
    """Where some output reads the block alone; otherwise the window is put together."""
    _, x, w, call = problem(4, 9, 4) if wide else problem()
    done = []

    def recorded(name, function):
        return lambda *args, **kwargs: (done.append(name), function(*args, **kwargs))[1]

    for name in ("start", "wait", "_between_zeros", "_window"):
        monkeypatch.setattr(inside, name, recorded(name, getattr(inside, name)))
    found = call(x, w, True)
    edges = ["_between_zeros"] * (2 if 0 < dd.world().rank < dd.world().size - 1 else 1)
    expected = ["start", "wait", "_window"] if wide else ["start", "_between_zeros", "wait", *edges]
    dd.testing.collective_assert(done == expected, f"did {done}")
    same(found, call(x, w, False), "value")


def test_messages():
    """No more of them, and no longer ones, than those of a whole window."""
    _, x, w, call = problem()
    x.requires_grad_()
    sent = {}
    for overlap in (False, True):
        y: list = []
        forward = messages(lambda o=overlap, y=y: y.append(call(x, w, o)))
        sent[overlap] = forward, messages(y[0].sum().backward)
    dd.testing.collective_assert(sent[True] == sent[False], f"{sent}")


@needs(2)
def test_the_adjoint_sets_out_before_the_blocks_gradient():
    """So that on a device, where it has a stream of its own, both run at once: first the strips' convolutions go back,
    then the movement, then the block's convolution."""
    _, x, w, call = problem()
    done, seen = [], set()

    def watch(node):
        if node is not None and node not in seen:
            seen.add(node)
            name = node.name()
            node.register_prehook(lambda grads: done.append(name))
            for other, _ in node.next_functions:
                watch(other)

    y = call(x.requires_grad_(), w.requires_grad_(), True)
    watch(y.grad_fn)
    y.sum().backward()
    edges = 2 if 0 < dd.world().rank < dd.world().size - 1 else 1
    order = [name for name in done if name.startswith(("Convolution", "_Apply"))]
    wanted = ["ConvolutionBackward0"] * edges + ["_ApplyBackward", "ConvolutionBackward0"]
    dd.testing.collective_assert(order == wanted, f"{done}")


@pytest.mark.parametrize("k, padding", [(2, "same"), (3, 1)])
def test_losses_that_differ_by_rank(k, padding):
    """One rank's loss is cubic, the others' are linear, zero or empty; with k = 2 the last rank reads no neighbour."""
    _, x, w, call = problem(4, k, padding)
    r = dd.world().rank

    def loss(overlap):
        def value(x, w):
            y = call(x, w, overlap)
            return (
                (y**3).sum() if r == 0 else y.sum() if r == 1 else F.nothing((0,), y).sum() if r == 2 else 0 * y.sum()
            )

        return value

    for argnum in (0, 1):
        slopes = [grad(loss(overlap), argnum) for overlap in (True, False)]
        same(*(slope(x, w) for slope in slopes), "gradient")
        for transform in (
            lambda f: jvp(f, (x, w), (x.cos(), w.sin()))[1],
            lambda f: grad(lambda *t: f(*t).square().sum())(x, w),
        ):
            same(*map(transform, slopes), "second derivative")
    y = [torch.autograd.functional.hvp(loss(overlap), (x, w), (x.cos(), w.sin()))[1] for overlap in (True, False)]
    same(y[0][0], y[1][0], "the engine's hvp")


def test_jvp_of_a_gradient_of_a_batch():
    _, x, w, call = problem(4)
    slope = lambda o: grad(lambda x: call(x.sin(), w, o).square().sum())
    f = lambda o: vmap(lambda x: jvp(slope(o), (x,), (x.cos(),))[1])(torch.stack([x, 2 * x]))
    same(f(True), f(False), "vmap(jvp(grad))")
    g = lambda o: hessian(lambda s: call(x * s, w, o).square().sum())(torch.ones((), dtype=x.dtype))
    same(g(True), g(False), "hessian")


def test_a_batch_on_one_rank_only():
    """Its neighbours' strips then have a batch, and their blocks have none."""
    _, x, w, call = problem(4)
    f = lambda o: vmap(lambda s: call(x * s if dd.world().rank == 0 else x, w, o), out_dims=0)(
        torch.arange(3.0, dtype=x.dtype)
    )
    same(f(True), f(False), "vmap")


def test_forward_mode_without_torch_func():
    """A tangent on one rank only, and outside torch.func: where y is not changed in place."""
    _, x, w, call = problem(4)
    found = []
    for overlap in (True, False):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.cos() if dd.world().rank == 0 else torch.zeros_like(x))
            found.append(forward_ad.unpack_dual(call(dual, w, overlap)).tangent)
    same(*found, "tangent")


def test_frozen_and_inference():
    _, x, w, call = problem(4)
    for frozen in (0, 1):
        grads = []
        for overlap in (True, False):
            leaves = [t.clone().requires_grad_(i != frozen) for i, t in enumerate((x, w))]
            call(*leaves, overlap).square().sum().backward()
            grads.append(leaves[1 - frozen].grad)
        same(*grads, f"gradient with {frozen} frozen")
    with torch.inference_mode():
        found = call(x, w, True)
    same(found, call(x, w, False), "inference mode")


def test_split_channels():
    """Depthwise groups need no neighbour's channels: strips in space alone. Other channels go the plain way."""
    n = dd.world().size
    grids = {4: [(1, 2, 2), (2, 2, 1)]}.get(n, [(1, n, 1)])
    x, w, b = randn(2, 4, 12), randn(8, 1, 3, seed=1), randn(8, seed=2)
    for grid in grids:
        L = dd.Layout(dd.Partition(grid), x.shape)
        for w, groups in ((randn(8, 1, 3, seed=1), 4), (randn(8, 4, 3, seed=1), 1)):
            out = F.conv_layout(L, 8, 3, padding=1)
            check_layer(
                lambda x, w, b, L=L, g=groups: F.dist_conv(
                    x, w, L, b, padding=1, groups=g, out_channels=8, params="invariant", overlap=True
                ),
                lambda x, w, b, g=groups: tf.conv1d(x, w, b, 1, 1, 1, g),
                [x, w, b],
                [L, along(out, 1), along(out, 1)],
                out,
                name=f"{grid} groups {groups}",
            )


def test_modules_and_the_general_form():
    n = dd.world().size
    P, x = dd.Partition((1, 1, 1, n)), randn(2, 4, 5 * n)
    L = dd.Layout(dd.Partition((1, 1, n)), x.shape)
    w, b = randn(3, 4, 3, seed=1), randn(3, seed=2)
    found = F.dist_conv(L.shard(x), w, P, b, padding=1, overlap=True)
    same(found, L.with_shape((2, 3, 5 * n)).shard(tf.conv1d(x, w, b, padding=1)), "general form")
    layers = [dd.nn.Conv1d(L, 4, 3, 3, padding=1, dtype=torch.float64, overlap=o) for o in (True, False)]
    layers[1].load_state_dict(layers[0].state_dict())
    same(*(layer(L.shard(x)) for layer in layers), "module")


@needs(2)
def test_ranks_that_disagree():
    _, x, w, call = problem()
    with dd.checking(), pytest.raises(dd.errors.AgreementError, match="halo"):
        call(x, w, dd.world().rank == 0)
