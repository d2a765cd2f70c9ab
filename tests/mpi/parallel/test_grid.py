"""Data x tensor x pipeline, data x space x pipeline, and data x tensor x space on one grid of ranks: equal to the
sequential program for 20 steps.

A grid is a Partition; the ranks that share something are its fibres, ``P.along(dim)``. On 4 ranks two dims of 2, on
fewer a line in each dim; test_parallel_grid_8.py has the cube.
"""

import pytest
import torch
import torch.nn.functional as tf
from serial import randn
from torch.func import grad_and_value

import distdl as dd
import distdl.functional as F
from distdl import parallel
from distdl.programs import demo

SIZE = dd.world().size
DATA, TENSOR, PIPE = range(3)
GRIDS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
         4: [(2, 2, 1), (2, 1, 2), (1, 2, 2)]}.get(SIZE, [])  # fmt: skip
N, D, HIDDEN, BLOCKS = 11, 6, 7, 4  # samples, features, hidden features, residual blocks: nothing divides
HERE = torch.get_default_device()  # --engine=cuda makes it the rank's device
IMAGES, LABELS = demo.load_digits(300)
DIGITS = IMAGES.to(HERE).double(), LABELS.to(HERE)


def batch(step):
    images, labels = DIGITS
    return images[step * N : step * N + N], labels[step * N : step * N + N]


def micro_sizes(n):
    """Three micro-batches of different sizes, perhaps empty."""
    return (n - n // 2 - n // 3, n // 2, n // 3)


def rank_order(shape):
    """Ranks in another order than their numbers."""
    return dd.Partition(shape, range(torch.Size(shape).numel())[::-1])


def serve(params, run, serial, places, P, rate=0.05, steps=20, stages=True):
    """Train both for some steps. ``places`` cuts this rank's part of a stage's parameters (a dictionary) out of the
    whole.
    ``stages``: the last dim of P is the pipeline; otherwise every rank has part of all."""
    mine = {k: places(params[k]) for k in params if P.active and (not stages or k % P.shape[-1] == P.index()[-1])}
    theirs, faults = params, []

    def compare(what, found, whole):
        for k in found:
            expected = places(whole[k])
            for name, value in found[k].items():
                scale = float(whole[k][name].abs().max())
                if value.shape != expected[name].shape or not torch.allclose(
                    value, expected[name], rtol=1e-10, atol=1e-10 * scale
                ):
                    faults.append(f"{what}, stage {k}, {name}")

    for step in range(steps if P.active else 0):
        loss, grads = run(mine, step)
        wanted, reference = grad_and_value(serial)(theirs, step)
        faults += [f"loss of step {step}"] * (not torch.allclose(loss, reference, rtol=1e-10))
        compare(f"gradient of step {step}", grads, wanted)
        mine = {k: {n: p[n] - rate * grads[k][n] for n in p} for k, p in mine.items()}
        theirs = {k: {n: p[n] - rate * wanted[k][n] for n in p} for k, p in theirs.items()}
    compare("parameter", mine, theirs)
    dd.testing.collective_assert(not faults, f"{P}: {faults[:3]} of {len(faults)}")


# ---------------------------------------------------------------- data x tensor x pipeline


def mlp(stages):
    """Residual MLP blocks shared out over the stages: parameters, and the serial loss."""
    share = dd.Layout(dd.Partition((stages,)), (BLOCKS,)).blocks(0)
    params = {}
    for k, (first, end) in enumerate(share):
        p = params[k] = {}
        if k == 0:
            p["in"] = randn(D, 784, seed=1) / 28
        for b in range(first, end):
            p[f"{b}.w1"], p[f"{b}.b1"] = randn(HIDDEN, D, seed=10 + b) / D**0.5, 0.1 * randn(HIDDEN, seed=20 + b)
            p[f"{b}.w2"], p[f"{b}.b2"] = randn(D, HIDDEN, seed=30 + b) / HIDDEN**0.5, 0.1 * randn(D, seed=40 + b)
        if k == stages - 1:
            p["out"] = randn(10, D, seed=2) / D**0.5

    def serial(params, step):
        x, labels = batch(step)
        for k in range(stages):
            x = stage(k, stages, tf.linear, tf.linear)(params[k], x)
        return tf.cross_entropy(x, labels)

    return params, serial


def stage(k, stages, column, row):
    """Stage k, with its two kinds of linear layers."""
    first, end = dd.Layout(dd.Partition((stages,)), (BLOCKS,)).blocks(0)[k]

    def run(p, x):
        x = x.flatten(1) @ p["in"].T if k == 0 else x
        for b in range(first, end):
            x = x + row(column(x, p[f"{b}.w1"], p[f"{b}.b1"]).tanh(), p[f"{b}.w2"], p[f"{b}.b2"])
        return x @ p["out"].T if k == stages - 1 else x

    return run


def data_tensor_pipeline(P, kind="1f1b"):
    """The same network on a grid (data, tensor, pipeline): a function (params, step) -> (loss, gradients), as
    serial."""
    data, tensor, pipe = (P.along(d) for d in (DATA, TENSOR, PIPE))
    across = dd.Partition((1, tensor.size, 1), tensor.ranks)  # out-features split: Megatron's column layer
    along = dd.Partition((1, 1, tensor.size), tensor.ranks)  # in-features split: its row layer
    column = lambda x, w, b: F.dist_linear(
        x, w, across, b, x_layout="invariant", y_layout="replicated", params="invariant"
    )
    row = lambda x, w, b: F.dist_linear(x, w, along, b, x_layout="replicated", y_layout="invariant", params="invariant")
    stages = [stage(k, pipe.size, column, row) for k in range(pipe.size)]
    rows = dd.Layout(dd.Partition((data.size,), data.ranks), (N,)).slices()[0]  # this data rank's samples
    sizes = micro_sizes(rows.stop - rows.start)
    table = parallel.schedule(kind, pipe.size, len(sizes))

    def run(params, step):
        x, labels = (t[rows].split(sizes) for t in batch(step))
        share = lambda y, i: tf.cross_entropy(y, labels[i], reduction="sum") / N
        loss, grads = parallel.pipeline(table, stages, share, pipe, lambda k, i: (sizes[i], D), torch.float64)(
            params, x
        )
        return F.invariant_sum(loss, data), F.all_sum_reduce(grads, data)  # once, for all micro-batches

    return run


def tensor_part(P):
    """This rank's blocks of a stage's parameters: hidden features are split over the tensor dim, all else is whole."""
    place = P.index()[TENSOR] if P.active else 0
    hidden = slice(*dd.Layout(dd.Partition((P.shape[TENSOR],)), (HIDDEN,)).blocks(0)[place])
    cut = {"w1": lambda t: t[hidden], "b1": lambda t: t[hidden], "w2": lambda t: t[:, hidden]}
    return lambda p: {n: cut.get(n.split(".")[-1], lambda t: t)(t).clone() for n, t in p.items()}


@pytest.mark.parametrize("shape", GRIDS)
def test_data_tensor_pipeline(shape):
    P = rank_order(shape)
    params, serial = mlp(shape[PIPE])
    serve(params, data_tensor_pipeline(P, "gpipe" if shape[TENSOR] > 1 else "1f1b"), serial, tensor_part(P), P)


@pytest.mark.parametrize("shape", GRIDS)
def test_bytes(shape):
    """Everything that a rank sends in one step, by theory: pipeline neighbours, tensor all-reduces, one reduction over
    data."""
    P = rank_order(shape)
    d, t, s = P.index()
    params, _ = mlp(shape[PIPE])
    mine = tensor_part(P)(params[s])
    run = data_tensor_pipeline(P)
    with dd.testing.count_messages() as sent:
        run({s: mine}, 0)
    rows = micro_sizes(dd.Layout(dd.Partition((shape[DATA],)), (N,)).sizes(0)[d])
    neighbours = (s > 0) + (s < shape[PIPE] - 1)
    assert sorted(size for _, _, size in sent.of("send")) == sorted(
        8 * n * D for n in rows if n for _ in range(neighbours)
    )
    reduced = []
    if shape[TENSOR] > 1:  # y of the row layer forward; x̄ of the column layer and the row layer's bias backward
        blocks = sum(name.endswith("w1") for name in mine)
        reduced += [8 * n * D for n in rows if n for _ in range(2 * blocks)] + [8 * D] * (blocks * len(rows))
    if shape[DATA] > 1:
        reduced += [8, 8 * sum(t.numel() for t in mine.values())]
    if shape[PIPE] > 1:
        reduced += [8]
    assert sorted(size for _, _, size in sent.of("all_reduce")) == sorted(reduced)
    assert not sent.of("agree")


# ---------------------------------------------------------------- data x space x pipeline


def data_space_pipeline(P):
    """Two convolutional stages on a grid (data, space, pipeline) with at most two pipeline stages."""
    data, space, pipe = (P.along(d) for d in range(3))
    tiles = dd.Partition((1, 1, space.size, 1), space.ranks)  # rows of the image
    conv = lambda x, w: F.dist_conv(x, w, tiles, stride=2, padding=1, params="invariant", shape=whole_shape(x))
    whole_shape = lambda x: (x.shape[0], x.shape[1], {28: 28, 14: 14}[x.shape[3]], x.shape[3])
    first = lambda p, x: conv(x, p["a"]).tanh()
    last = lambda p, x: F.dist_mean(conv(x, p["b"]).tanh(), tiles, (2, 3)) @ p["out"].T
    stages = [first, last] if pipe.size == 2 else [lambda p, x: last(p, first(p, x))]
    rows = dd.Layout(dd.Partition((data.size,), data.ranks), (N,)).slices()[0]
    sizes = micro_sizes(rows.stop - rows.start)
    table = parallel.schedule("1f1b", pipe.size, len(sizes))

    def run(params, step):
        x, labels = (t[rows].split(sizes) for t in batch(step))
        tile = lambda t: dd.Layout(tiles, t.shape).shard(t)
        share = lambda y, i: tf.cross_entropy(y, labels[i], reduction="sum") / N
        shapes = lambda k, i: dd.Layout(
            tiles, (sizes[i], 3, 14, 14)
        ).local_shape()  # each tile goes to its own successor
        loss, grads = parallel.pipeline(table, stages, share, pipe, shapes, torch.float64)(params, [tile(t) for t in x])
        return F.invariant_sum(loss, data), F.all_sum_reduce(grads, data)

    return run


@pytest.mark.parametrize("shape", [s for s in GRIDS if s[2] < 3])
def test_data_space_pipeline(shape):
    P, stages = rank_order(shape), shape[2]
    kernels = {"a": randn(3, 1, 3, 3, seed=50) / 3, "b": randn(4, 3, 3, 3, seed=51) / 5, "out": randn(10, 4, seed=52)}
    params = {0: kernels} if stages == 1 else {0: {"a": kernels["a"]}, 1: {n: kernels[n] for n in ("b", "out")}}

    def serial(params, step):
        x, labels = batch(step)
        p = {n: t for stage in params.values() for n, t in stage.items()}
        x = tf.conv2d(tf.conv2d(x, p["a"], stride=2, padding=1).tanh(), p["b"], stride=2, padding=1).tanh()
        return tf.cross_entropy(x.mean((2, 3)) @ p["out"].T, labels)

    serve(params, data_space_pipeline(P), serial, lambda p: {n: t.clone() for n, t in p.items()}, P)


# ---------------------------------------------------------------- data x tensor x space

SPACE = 2
IMAGE = (1, 13, 11)  # channels, rows, columns: nothing divides
CHANNELS = (5, 7)


def images(step):
    x, labels = batch(step)
    return x[:, :, 4:17, 8:19].contiguous(), labels


def two_convolutions():
    """Parameters, and the serial loss, of two convolutions, a mean over space and a linear layer."""
    (a, b), c = CHANNELS, IMAGE[0]
    params = {
        "w1": randn(a, c, 3, 3, seed=60) / 3,
        "b1": 0.1 * randn(a, seed=61),
        "w2": randn(b, a, 3, 3, seed=62) / 6,
        "b2": 0.1 * randn(b, seed=63),
        "out": randn(10, b, seed=64),
    }

    def serial(params, step):
        (x, labels), p = images(step), params[0]
        x = tf.conv2d(x, p["w1"], p["b1"], padding=1).tanh()
        x = tf.conv2d(x, p["w2"], p["b2"], stride=2, padding=1).tanh()
        return tf.cross_entropy(x.mean((2, 3)) @ p["out"].T, labels)

    return {0: params}, serial


def channels_over(n):
    """This rank's channels of each convolution's output, by place on the tensor dim: uneven."""
    return [[slice(*block) for block in dd.Layout(dd.Partition((n,)), (c,)).blocks(0)] for c in CHANNELS]


def split_outputs(P):
    """Both convolutions make a block of channels each, from all that these read; rows are split, and so is the batch.
    The linear layer's input features are where the channels are. Parameters: blocks of output channels; of ``out``, of
    input features."""
    d, t, s = P.shape
    L = dd.Layout(
        dd.Partition((d, t, s, 1), P.ranks), (N, *IMAGE)
    )  # the one input channel is on one of the tensor ranks
    middle, last = dd.Layout(L.partition, (N, CHANNELS[0], *IMAGE[1:])), dd.Layout(L.partition, (N, CHANNELS[1], 7, 6))
    features = dd.Partition((d, 1, t), P.take(SPACE, P.index()[SPACE]).ranks)

    def logits(p, x):
        x = F.dist_conv(L.shard(x), p["w1"], L, p["b1"], padding=1, params="invariant", out_channels=CHANNELS[0]).tanh()
        x = F.dist_conv(
            x, p["w2"], middle, p["b2"], stride=2, padding=1, params="invariant", out_channels=CHANNELS[1]
        ).tanh()
        return F.dist_linear(
            F.dist_mean(x, last, (2, 3)),
            p["out"],
            features,
            x_layout="invariant",
            y_layout="invariant",
            params="invariant",
        )

    first, second = (blocks[P.index()[TENSOR]] for blocks in channels_over(t))
    return logits, {
        "w1": lambda w: w[first],
        "b1": lambda b: b[first],
        "w2": lambda w: w[second],
        "b2": lambda b: b[second],
        "out": lambda w: w[:, second],
    }


def column_then_row(P):
    """Megatron's pair as convolutions: the first one's output channels are split, and so the second one's input
    channels, whose sum is an invariant; rows are split, and so is the batch. ``out`` and the second bias are whole."""
    d, t, s = P.shape
    column, row = dd.Partition((d, t, 1, s, 1), P.ranks), dd.Partition((d, 1, t, s, 1), P.ranks)
    at = P.take(TENSOR, P.index()[TENSOR])  # (data, space)
    last = dd.Layout(dd.Partition((d, 1, s, 1), at.ranks), (N, CHANNELS[1], 7, 6))
    tile = dd.Layout(dd.Partition((d, 1, s, 1), at.ranks), (N, *IMAGE))
    features = dd.Partition((d, 1, 1), at.take(1, P.index()[SPACE]).ranks)

    def logits(p, x):
        x = F.dist_conv(
            tile.shard(x),
            p["w1"],
            column,
            p["b1"],
            padding=1,
            params="invariant",
            shape=(N, *IMAGE),
            x_layout="invariant",
            y_layout="replicated",
        ).tanh()
        x = F.dist_conv(
            x,
            p["w2"],
            row,
            p["b2"],
            stride=2,
            padding=1,
            params="invariant",
            shape=(N, CHANNELS[0], *IMAGE[1:]),
            x_layout="replicated",
            y_layout="invariant",
        ).tanh()
        return F.dist_linear(
            F.dist_mean(x, last, (2, 3)),
            p["out"],
            features,
            x_layout="invariant",
            y_layout="invariant",
            params="invariant",
        )

    first, _ = (blocks[P.index()[TENSOR]] for blocks in channels_over(t))
    return logits, {"w1": lambda w: w[first], "b1": lambda b: b[first], "w2": lambda w: w[:, first]}


def data_tensor_space(P, form):
    """(a function (params, step) -> (loss, gradients), this rank's part of the parameters)."""
    if not P.active:
        return None, None
    logits, cut = form(P)
    data = P.along(DATA)
    rows = dd.Layout(dd.Partition((data.size,), data.ranks), (N,)).slices()[0]

    def loss(params, step):
        x, labels = images(step)
        return F.invariant_sum(tf.cross_entropy(logits(params[0], x), labels[rows], reduction="sum") / N, data)

    def run(params, step):
        grads, value = grad_and_value(loss)(params, step)
        return value, grads

    return run, lambda p: {n: cut.get(n, lambda t: t)(t).clone() for n, t in p.items()}


@pytest.mark.parametrize("form", [split_outputs, column_then_row])
@pytest.mark.parametrize("shape", GRIDS)
def test_data_tensor_space(shape, form):
    P = rank_order(shape)
    params, serial = two_convolutions()
    run, places = data_tensor_space(P, form)
    serve(params, run, serial, places, P, rate=0.5, stages=False)


@pytest.mark.parametrize("form", [split_outputs, column_then_row])
def test_data_tensor_space_negotiates_nothing(form):
    """Every size is known from the layouts: forward and backward agree on nothing."""
    P = rank_order(GRIDS[-1])
    params, _ = two_convolutions()
    run, places = data_tensor_space(P, form)
    with dd.testing.count_messages() as sent:
        run({0: places(params[0])}, 0)
    assert not sent.of("agree"), sent
