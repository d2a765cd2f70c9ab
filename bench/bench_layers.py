"""Layers, forward + backward, against independent serial layers of a rank's share, timed at the same time.

``python -m distdl run -n 2 -m bench.bench_layers``
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as tf
from mpi4py import MPI

import distdl as dd
import distdl.functional as F

from .paired import arguments, ratio, report, sample


def backward(call, *leaves):
    """``call``, then the backward pass of its sum."""

    def run():
        for leaf in leaves:
            leaf.grad = None
        call().sum().backward()

    return run


def cases(comm):
    """(name, {candidate: call}): "distdl", "share" (no messages) and "whole" (on rank 0 alone)."""
    p, r = comm.size, comm.rank
    def leaf(*shape):
        return torch.randn(shape).requires_grad_()

    for name, shape, out, kernel, stride, pad in (
        ("convolution 3 x 3, 64 channels, 256²", (1, 64, 256, 256), 64, 3, 1, 1),
        ("ResNet stem 7 x 7 / 2, 224²", (4, 3, 224, 224), 64, 7, 2, 3),
        ("convolution 3³, 16 channels, 48³", (1, 16, 48, 48, 48), 16, 3, 1, 1),
    ):
        n = len(shape) - 2
        conv = tf.conv2d if n == 2 else tf.conv3d
        L = dd.Layout(dd.Partition((1, 1, p, *(1,) * (n - 1))), shape)
        x, w, b = leaf(*L.local_shape()), leaf(out, shape[1], *(kernel,) * n), leaf(out)
        whole = leaf(*shape)
        yield name, {
            "distdl": backward(lambda x=x, w=w, b=b, L=L, s=stride, q=pad: F.dist_conv(x, w, L, b, stride=s, padding=q,
                                                                                       params="invariant"), x, w, b),
            "share": backward(lambda x=x, w=w, b=b, c=conv, s=stride, q=pad: c(x, w, b, s, q), x, w, b),
            "whole": backward(lambda x=whole, w=w, b=b, c=conv, s=stride, q=pad: c(x, w, b, s, q), whole, w, b)
            if r == 0 else lambda: None}
    L = dd.Layout(dd.Partition((1, 1, p, 1)), (4, 32, 128, 128))
    x, g, b = leaf(*L.local_shape()), leaf(32), leaf(32)
    yield "batch norm, (4, 32, 128²)", {
        "distdl": backward(lambda: F.dist_batch_norm(x, L, None, None, g, b, True, params="invariant")[0].square(), x, g, b),
        "share": backward(lambda: tf.batch_norm(x, None, None, g, b, True).square(), x, g, b), "whole": lambda: None}


def main(argv=None) -> None:
    """Print the table on rank 0."""
    options = arguments("bench_layers", 15, argv)
    comm, rows = MPI.COMM_WORLD, []
    for name, candidates in cases(comm):
        times = sample(candidates, comm, rounds=options.rounds)
        rows.append({"layer": name, **{f"{k}, ms": float(np.median(t)) * 1e3 for k, t in times.items()},
                     "share / distdl": ratio(times["share"], times["distdl"]),
                     "whole / distdl": ratio(times["whole"], times["distdl"])})
    if comm.rank == 0:
        where = options.json and f"{options.json}/layers-n{comm.size}.json"
        report(rows, f"Layers, float32, forward + backward, {comm.size} ranks with one thread each (medians)", where, comm.size)


if __name__ == "__main__":
    main()
