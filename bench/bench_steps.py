"""Whole training steps: LeNet-5, a small U-Net, a Transformer's MLP block; against the serial step on a rank's
share."""

import torch
import torch.nn.functional as local

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases

from .choose import SIZE, choose, needs


def bench_lenet(timed):
    """The demo's network on its 2 x 2 grid."""
    needs(4)
    from distdl.programs import demo

    n = 32
    params = demo.initial(torch.float32)
    mine = {k: v.detach().clone().requires_grad_() for k, v in demo.shard(params).items()}
    whole = {k: v.clone().requires_grad_() for k, v in params.items()}
    tile, images = demo.TILES.shard(torch.randn(n, 1, 28, 28)).contiguous(), torch.randn(n // 4, 1, 28, 28)
    timed(
        cases.layer(
            "step",
            "LeNet-5, 32 images over 2 x 2 tiles",
            lambda: demo.distributed(mine, tile, n),
            lambda: demo.sequential(whole, images),
            (*mine.values(), *whole.values()),
        )
    )


def unet(x, w, conv, pool, up):
    """Two levels with a skip connection: conv(x, w, level), pool(x), up(x, w)."""
    top = conv(x, w[0], 0).relu()
    low = conv(pool(top), w[1], 1).relu()
    return conv(torch.cat([up(low, w[2]), top], 1), w[3], 0)


@choose("n", [128], [512])
def bench_unet(timed, n):
    """Rows over the ranks."""
    c, rows = 16, dd.Partition((1, 1, SIZE, 1))
    L = dd.Layout(rows, (1, 1, n, n))
    w = [
        cases.leaf(s, seed=i)
        for i, s in enumerate(((c, 1, 3, 3), (2 * c, c, 3, 3), (2 * c, c, 2, 2), (1, 2 * c, 3, 3)))
    ]
    x = cases.leaf(L.local_shape())

    def at(channels, level):
        return L.with_shape((1, channels, n >> level, n >> level))

    def ours():
        return unet(
            x,
            w,
            lambda x, w, level: F.dist_conv(x, w, at(x.shape[1], level), padding=1, params="invariant"),
            lambda x: F.dist_max_pool(x, at(c, 0), 2),
            lambda x, w: F.dist_conv_transpose(x, w, at(2 * c, 1), stride=2, params="invariant"),
        )

    def share():
        return unet(
            x,
            w,
            lambda x, w, level: local.conv2d(x, w, padding=1),
            lambda x: local.max_pool2d(x, 2),
            lambda x, w: local.conv_transpose2d(x, w, stride=2),
        )

    timed(cases.layer("step", f"U-Net, {n}², rows", ours, share, (x, *w)))


@choose("width", [256], [1024])
def bench_mlp(timed, width):
    """Megatron's block: column parallel, then row parallel; one all-reduce each way."""
    tokens, inner = 256, 4 * width
    column, row = dd.Partition((1, SIZE, 1)), dd.Partition((1, 1, SIZE))
    part = dd.Layout(dd.Partition((SIZE,)), (inner,)).local_shape()[0]
    x, w1, w2 = cases.leaf((tokens, width)), cases.leaf((part, width)), cases.leaf((width, part))

    def ours():
        h = F.dist_linear(x, w1, column, x_layout="invariant", y_layout="replicated")
        return F.dist_linear(h.relu(), w2, row, x_layout="replicated", y_layout="invariant")

    timed(
        cases.layer(
            "step",
            f"MLP {width} -> {inner} -> {width}, {tokens} tokens",
            ours,
            lambda: local.linear(local.linear(x, w1).relu(), w2),
            (x, w1, w2),
        )
    )
