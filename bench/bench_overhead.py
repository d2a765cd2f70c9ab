"""The library's own cost per call: one process plays rank 0 of 4, through a transport that carries nothing.

``python -m bench.bench_overhead``: microseconds, the best of 5 blocks of 10,000 calls (of transforms and layers: 500).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F
from distdl.engine.local import NullTransport
from distdl.programs.bench.table import report


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


def movements() -> dict:
    """Movements of a tensor of 64 x 64 over 4 ranks: {name: call}."""
    rows, cols = dd.Layout(dd.Partition((4, 1)), (64, 64)), dd.Layout(dd.Partition((1, 4)), (64, 64))
    line, spec = dd.Partition((4,)), dd.HaloSpec(rows, (1, 0))
    return {
        "halo_exchange, width 1": lambda x: F.halo_exchange(x, spec),
        "all_sum_reduce": lambda x: F.all_sum_reduce(x, line),
        "shift": lambda x: F.shift(x, line, 0),
        "repartition, rows to columns": lambda x: F.repartition(x, rows, cols),
    }


def transforms(call, x) -> dict:
    """torch.func's transforms of a movement."""
    y, batch = call(x), torch.stack([x] * 8)
    calls = {
        "vmap of 8": lambda: vmap(call)(batch),
        "jvp": lambda: jvp(call, (x,), (x,)),
        "vjp": lambda: vjp(call, x)[1](y),
        "grad of a sum": lambda: grad(lambda x: call(x).sum())(x),
    }
    return {f"{name}, µs": best(one, 500) for name, one in calls.items()}


def layers() -> dict:
    """Layers on tensors so small that the host's time is all: {name: (call, x)}."""
    lines, image = dd.Layout(dd.Partition((1, 4)), (8, 64)), dd.Layout(dd.Partition((1, 1, 4, 1)), (2, 4, 32, 8))
    both = dd.Layout(dd.Partition((1, 2, 2)), (8, 16, 32))
    x, pixels, w, b, filters = (
        torch.zeros(8, 16),
        torch.zeros(2, 4, 8, 8),
        torch.ones(16),
        torch.ones(4),
        torch.ones(4, 4, 3, 3),
    )
    matrix, bias = torch.ones(8, 16), torch.ones(8)
    return {
        "dist_layer_norm": (lambda x: F.dist_layer_norm(x, lines, 64, w, w), x),
        "dist_rms_norm": (lambda x: F.dist_rms_norm(x, lines, 64, w), x),
        "dist_batch_norm": (lambda x: F.dist_batch_norm(x, image, None, None, b, b, True)[0], pixels),
        "dist_group_norm": (lambda x: F.dist_group_norm(x, image, 2, b, b), pixels),
        "dist_conv, 3 x 3": (lambda x: F.dist_conv(x, filters, image, b, padding=1), pixels),
        "dist_linear, root": (lambda x: F.dist_linear(x, matrix, both, bias), x),
        "dist_mse_loss": (lambda y: F.dist_mse_loss(y, x, lines), x),
    }


def backward(call, x):
    """A call and its gradient."""
    leaf, g = x.clone().requires_grad_(), torch.randn_like(call(x))

    def both():
        leaf.grad = None
        call(leaf).backward(g)

    return both


def main(argv=None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("bench_overhead")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dd.World(transport=NullTransport(0, 4))
    x, cases = torch.randn(16, 64), movements()
    table = []
    for name, call in cases.items():
        table.append(
            {
                "call (64 x 64 over 4, float32)": name,
                "forward, µs": best(lambda call=call: call(x)),
                "forward + backward, µs": best(backward(call, x)),
            }
        )

    class Twin(torch.autograd.Function):
        """The least that any custom Function with a tie can do here: one clone and one empty tensor forward, one clone
        back."""

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
        table.append(
            {
                "call (64 x 64 over 4, float32)": name,
                "forward, µs": best(lambda call=call: call(x)),
                "forward + backward, µs": best(backward(call, x)),
            }
        )
    report(table, "Host overhead per call through a null transport (best of 5 blocks of 10,000)", options.json, 1)
    cases["x.clone(), for scale"] = torch.clone
    table = [{"transforms (64 x 64 over 4, float32)": name, **transforms(call, x)} for name, call in cases.items()]
    report(table, "The same under torch.func", None, 1)
    table = [
        {
            "layer, tiny tensors": name,
            "forward, µs": best(lambda call=call, x=x: call(x), 500),
            "forward + backward, µs": best(backward(call, x), 500),
        }
        for name, (call, x) in layers().items()
    ]
    report(table, "Layers whose local work is next to nothing", None, 1)


if __name__ == "__main__":
    main()
