"""Whole networks against their sequential twins: loss, every gradient and the parameters for 20 steps in float64."""

import torch
import torch.nn.functional as tf
from serial import randn
from side_by_side import compare, world_of

import distdl as dd
import distdl.functional as F
from distdl.programs import demo


def drawn(shapes):
    """Parameters: {name: shape} to tensors; scales (1-D, ending in .g) near 1."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        t = randn(*shape, seed=i) * (0.5 / max(1, torch.Size(shape[1:]).numel()) ** 0.5)
        found[name] = 1 + t if name.endswith(".g") else t
    return found


def space(n):
    """(rows, columns) over n ranks."""
    return {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}[n]


# ---------------------------------------------------------------- LeNet-5


def test_lenet():
    """The demo's network on its real digits: tiles on a 2 x 2 grid; on fewer ranks, tiles of whatever fits."""
    images, labels = demo.load_digits(160)  # 20 steps of 8
    images = images.double()
    params = demo.initial(torch.float64)
    batch = lambda step: (images[8 * step : 8 * step + 8], labels[8 * step : 8 * step + 8])
    serial = lambda p, step: tf.cross_entropy(demo.sequential(p, batch(step)[0]), batch(step)[1])
    if dd.world().size >= 4:

        def dist(p, step):
            x, y = batch(step)
            return F.dist_cross_entropy(
                demo.distributed(p, demo.TILES.shard(x), len(y)), y, dd.Layout(demo.Y_SIDE, (len(y), 10))
            )

        if dd.world().rank < 4:
            places = {name: lambda value, name=name: demo.shard({name: value})[name] for name in params}
            compare(dist, serial, params, places, has_loss=demo.Y_SIDE.active)
        return
    n = dd.world().size
    tiles = dd.Partition((1, 1, *space(n)))
    features = dd.Partition((1, n, 1, 1))

    def dist(p, step):
        x, y = batch(step)
        L = dd.Layout(tiles, x.shape)
        x = F.dist_max_pool(
            F.dist_conv(L.shard(x), p["conv1.w"], L, p["conv1.b"], padding=2, params="invariant").relu(), tiles, 2
        )
        x = F.dist_max_pool(F.dist_conv(x, p["conv2.w"], tiles, p["conv2.b"], params="invariant").relu(), tiles, 2)
        x = F.repartition(x, tiles, features).flatten(1)
        P = dd.Partition((1, 1, n))  # row parallel: each rank has the columns of its features
        x = F.dist_linear(
            x, p["fc1.w"], P, p["fc1.b"], x_layout="replicated", y_layout="invariant", params="invariant"
        ).relu()
        for name in ("fc2", "fc3"):
            x = tf.linear(x, p[name + ".w"], p[name + ".b"])
            x = x.relu() if name == "fc2" else x
        return tf.cross_entropy(x, y)

    columns = dd.Layout(dd.Partition((n,)), (16,)).slices()[0]
    compare(dist, serial, params, {"fc1.w": lambda w: w[:, columns.start * 25 : columns.stop * 25]})


# ---------------------------------------------------------------- ResNet


def residual(x, p, name, conv, norm, stride):
    """A basic block: two convolutions with batch norm, and a shortcut."""
    y = norm(conv(x, p[name + "1.w"], stride), p, name + "1").relu()
    y = norm(conv(y, p[name + "2.w"], 1), p, name + "2")
    if stride > 1:
        x = norm(conv(x, p[name + "s.w"], stride), p, name + "s")
    return (x + y).relu()


def resnet(p, x, conv, norm, pool, mean):
    """ResNet-18's stem and two blocks, global average pooling, a classifier."""
    x = norm(conv(x, p["stem.w"], 2), p, "stem").relu()
    x = pool(x)
    x = residual(x, p, "a", conv, norm, 1)
    x = residual(x, p, "b", conv, norm, 2)
    return mean(x)


def test_resnet_stem_and_blocks():
    """Stride 2, kernel 7, batch norm, uneven tiles, global average pooling over uneven blocks."""
    n = world_of()
    shapes = {
        "stem.w": (4, 3, 7, 7),
        "a1.w": (4, 4, 3, 3),
        "a2.w": (4, 4, 3, 3),
        "b1.w": (6, 4, 3, 3),
        "b2.w": (6, 6, 3, 3),
        "bs.w": (6, 4, 1, 1),
        "fc.w": (5, 6),
    }
    for name, c in (("stem", 4), ("a1", 4), ("a2", 4), ("b1", 6), ("b2", 6), ("bs", 6)):
        shapes |= {name + ".g": (c,), name + ".b": (c,)}
    images, labels = randn(3, 3, 29, 27, seed=50), torch.tensor([0, 3, 1])
    P = dd.Partition((1, 1, *space(n)))
    padding = lambda w: (w.shape[-1] - 1) // 2

    def serial(p, step):
        x = resnet(
            p,
            images + 0.01 * step,
            lambda x, w, s: tf.conv2d(x, w, None, s, padding(w)),
            lambda x, p, k: tf.batch_norm(x, None, None, p[k + ".g"], p[k + ".b"], True),
            lambda x: tf.max_pool2d(x, 3, 2, 1),
            lambda x: x.mean((2, 3)),
        )
        return tf.cross_entropy(x @ p["fc.w"].T, labels)

    def dist(p, step):
        x = resnet(
            p,
            P.shard(images + 0.01 * step),
            lambda x, w, s: F.dist_conv(x, w, P, stride=s, padding=padding(w), params="invariant"),
            lambda x, p, k: F.dist_batch_norm(x, P, None, None, p[k + ".g"], p[k + ".b"], True, params="invariant")[0],
            lambda x: F.dist_max_pool(x, P, 3, 2, 1),
            lambda x: F.dist_mean(x, P, (2, 3)),
        )
        return tf.cross_entropy(x @ p["fc.w"].T, labels)  # x is invariant, and so is all that follows

    if dd.world().rank < n:
        compare(dist, serial, drawn(shapes))


# ---------------------------------------------------------------- a 3-D U-Net


def unet(p, x, conv, norm, pool, up):
    """Depth 2: convolution, batch norm, in-place ReLU, pooling, upsampling, concatenation."""

    def double(x, k):
        return norm(conv(x, p[k + ".w"]), p, k).relu_()  # CASES 16: in place, right after a layer

    a = double(x, "a")
    b = double(pool(a), "b")
    c = double(pool(b), "c")
    b = double(torch.cat([up(c), b], 1), "d")
    a = double(torch.cat([up(b), a], 1), "e")
    return conv(a, p["out.w"])


def test_case_16_unet():
    n = world_of()
    channels = {"a.w": (2, 1), "b.w": (3, 2), "c.w": (4, 3), "d.w": (3, 7), "e.w": (2, 5)}
    shapes = {name: (*c, 3, 3, 3) for name, c in channels.items()} | {"out.w": (1, 2, 1, 1, 1)}
    for name, ch in (("a", 2), ("b", 3), ("c", 4), ("d", 3), ("e", 2)):
        shapes |= {name + ".g": (ch,), name + ".b": (ch,)}
    volume, target = randn(2, 1, 12, 8, 4, seed=60), randn(2, 1, 12, 8, 4, seed=61)
    P = dd.Partition((1, 1, *space(n), 1) if n != 3 else (1, 1, 3, 1, 1))

    def serial(p, step):
        y = unet(
            p,
            volume,
            lambda x, w: tf.conv3d(x, w, padding=w.shape[-1] // 2),
            lambda x, p, k: tf.batch_norm(x, None, None, p[k + ".g"], p[k + ".b"], True),
            lambda x: tf.max_pool3d(x, 2),
            lambda x: tf.interpolate(x, scale_factor=2, mode="trilinear"),
        )
        return (y - target).square().mean()

    def dist(p, step):
        y = unet(
            p,
            P.shard(volume),
            lambda x, w: F.dist_conv(x, w, P, padding=w.shape[-1] // 2, params="invariant"),
            lambda x, p, k: F.dist_batch_norm(x, P, None, None, p[k + ".g"], p[k + ".b"], True, params="invariant")[0],
            lambda x: F.dist_max_pool(x, P, 2),
            lambda x: F.dist_interpolate(x, P, scale_factor=2, mode="trilinear"),
        )
        return F.dist_mse_loss(y, P.shard(target), P)

    if dd.world().rank < n:
        compare(dist, serial, drawn(shapes), rate=0.01)


# ---------------------------------------------------------------- an MLP block


def test_all_gather_reduce_scatter_mlp():
    """Layer norm on split rows, all-gather into the first layer, reduce-scatter out of the second; uneven
    everywhere."""
    n, r = world_of(), dd.world().rank
    x, target = randn(7, 6, seed=70), randn(7, 6, seed=71)
    shapes = {"n.g": (6,), "n.b": (6,), "1.w": (10, 6), "1.b": (10,), "2.w": (6, 10), "2.b": (6,)}
    rows = dd.Layout(dd.Partition((n, 1)), (7, 6))
    column, row = dd.Partition((1, n, 1)), dd.Partition((1, 1, n))
    hidden = dd.Layout(dd.Partition((n,)), (10,)).slices()[0]

    def serial(p, step):
        h = tf.layer_norm(x, (6,), p["n.g"], p["n.b"])
        h = tf.linear(tf.linear(h, p["1.w"], p["1.b"]).tanh(), p["2.w"], p["2.b"])
        return (x + h - target).square().mean()

    def dist(p, step):
        mine = rows.shard(x)
        h = F.dist_layer_norm(mine, rows, (6,), p["n.g"], p["n.b"], params="invariant")
        h = F.dist_linear(h, p["1.w"], column, p["1.b"], x_layout="sharded", y_layout="replicated").tanh()
        h = F.dist_linear(h, p["2.w"], row, p["2.b"], x_layout="replicated", y_layout="sharded", params="invariant")
        return F.dist_mse_loss(mine + h, rows.shard(target), rows)

    if r < n:
        rows_of = lambda t: t[hidden]
        compare(dist, serial, drawn(shapes), {"1.w": rows_of, "1.b": rows_of, "2.w": lambda w: w[:, hidden]})
