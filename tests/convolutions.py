"""Serial convolutions, and random ones over random layouts."""

import torch.nn.functional as tf
from serial import randn

import distdl as dd

CONV = {1: tf.conv1d, 2: tf.conv2d, 3: tf.conv3d}


def serial_conv(x, w, b, stride=1, padding=0, dilation=1, groups=1, padding_mode="zeros"):
    """torch's convolution; other padding modes as torch.nn's modules do them."""
    n = w.dim() - 2
    if padding_mode != "zeros":
        pads = padding if isinstance(padding, tuple) else (padding,) * n
        x, padding = tf.pad(x, [p for q in reversed(pads) for p in (q, q)], mode=padding_mode), 0
    return CONV[n](x, w, b, stride, padding, dilation, groups)


def random_case(generator, transposed):
    """A legal random convolution: (x, w, b, options of torch's function)."""
    while True:
        n = generator.choice([1, 1, 2, 2, 3])
        pick = lambda a, b: tuple(generator.randint(a, b) for _ in range(n))
        space, kernel, stride, dilation, padding = pick(1, 12), pick(1, 5), pick(1, 3), pick(1, 2), pick(0, 3)
        groups = generator.choice([1, 1, 2])
        c_in, c_out = 2 * groups, generator.choice([1, 2]) * groups
        options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
        if transposed:
            w = (c_in, c_out // groups, *kernel)
            options["output_padding"] = tuple(generator.randint(0, max(a, b) - 1) for a, b in zip(stride, dilation))
            legal = all((m - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0 for m, s, p, d, k, e in zip(
                space, stride, padding, dilation, kernel, options["output_padding"]))  # fmt: skip
        else:
            w = (c_out, c_in // groups, *kernel)
            mode = options["padding_mode"] = generator.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
            limit = {"circular": 0, "reflect": -1}.get(mode, 99)
            legal = all(
                m + 2 * p > d * (k - 1) and p <= m + limit for m, p, d, k in zip(space, padding, dilation, kernel)
            )
        if legal:
            return randn(generator.randint(1, 3), c_in, *space), randn(*w, seed=1), randn(c_out, seed=2), options


def random_layout(generator, shape, skip=(1,)):
    """A layout over some of the ranks, not split in ``skip``; now and then with uneven splits."""
    world = dd.world().size
    size = generator.randint(1, world)
    dims = [d for d in range(len(shape)) if d not in skip]
    grid = [1] * len(shape)
    for factor in sorted((f for f in (2, 2, 3) if size % f == 0), reverse=True):
        d = generator.choice(dims)
        if math_prod(grid) * factor <= size:
            grid[d] *= factor
    count = math_prod(grid)
    splits = [None] * len(shape)
    d = generator.choice(dims)
    if generator.random() < 0.4:
        cuts = sorted(generator.randint(0, shape[d]) for _ in range(grid[d] - 1))
        splits[d] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape[d]]))
    return dd.Layout(dd.Partition(tuple(grid), tuple(generator.sample(range(world), count))), shape, tuple(splits))


def math_prod(values):
    """Product."""
    result = 1
    for v in values:
        result *= v
    return result
