"""The library's own cost per call: one process plays rank 0 of 4, through a transport that carries nothing.

``python -m bench.bench_overhead``: microseconds, the best of 5 blocks of 10,000 calls.
"""

from __future__ import annotations

import argparse
import time

import torch

import distdl as dd
import distdl.functional as F
from distdl.bench.table import report
from distdl.transport.local import NullTransport


def best(call, calls: int = 10_000, blocks: int = 5) -> float:
    """Microseconds per call."""
    for _ in range(100):
        call()
    found = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
    return min(found) * 1e6


def main(argv=None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("bench_overhead")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dd.World(transport=NullTransport(0, 4))
    rows, cols = dd.Layout(dd.Partition((4, 1)), (64, 64)), dd.Layout(dd.Partition((1, 4)), (64, 64))
    line = dd.Partition((4,))
    x = torch.randn(16, 64)
    spec = dd.HaloSpec(rows, (1, 0))
    cases = {
        "halo_exchange, width 1": lambda x: F.halo_exchange(x, spec),
        "all_sum_reduce": lambda x: F.all_sum_reduce(x, line),
        "shift": lambda x: F.shift(x, line, 0),
        "repartition, rows to columns": lambda x: F.repartition(x, rows, cols),
    }
    table = []
    for name, call in cases.items():
        y = call(x)
        g, leaf = torch.randn_like(y), x.clone().requires_grad_()

        def both(call=call, leaf=leaf, g=g):
            leaf.grad = None
            call(leaf).backward(g)

        table.append({"call (64 x 64 over 4, float32)": name, "forward, µs": best(lambda call=call: call(x)),
                      "forward + backward, µs": best(both)})

    leaf, g = x.clone().requires_grad_(), torch.randn_like(x)

    class Twin(torch.autograd.Function):
        """The least that any custom Function with a tie can do here: one clone and one empty tensor forward, one clone back."""

        @staticmethod
        def forward(x):
            return x.clone(), torch.empty(0)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output[1])

        @staticmethod
        def backward(ctx, g, _):
            return g.clone()

    smallest = super(torch.autograd.Function, Twin).apply
    scales = {"x.clone(), for scale": torch.clone, "smallest custom Function, for scale": lambda x: smallest(x)[0]}
    for name, call in scales.items():

        def scale(call=call):
            leaf.grad = None
            call(leaf).backward(g)

        table.append({"call (64 x 64 over 4, float32)": name, "forward, µs": best(lambda call=call: call(x)),
                      "forward + backward, µs": best(scale)})
    report(table, "Host overhead per call through a null transport (best of 5 blocks of 10,000)", options.json, 1)


if __name__ == "__main__":
    main()
