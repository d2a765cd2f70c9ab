"""Python calls of one operation, counted exactly: one process plays rank 0 of 4, through a transport that carries
nothing. Printed as JSON: ``{row: [forward, forward + backward]}``."""

import json
import sys

import torch

import distdl as dd
import distdl.functional as F
from bench.bench_overhead import backward, layers, movements
from distdl.engine.local import NullTransport


def calls(call) -> int:
    """How many Python functions a warm call enters."""
    for _ in range(5):
        call()
    entered = 0

    def profile(frame, event, arg):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return entered - 1  # the call itself


def rows() -> dict:
    """{row: (call, x)} of the movements, the layers and a cross-entropy over split classes."""
    x = torch.randn(16, 64)
    classes = dd.Layout(dd.Partition((1, 4)), (8, 64))
    target = torch.zeros(8, dtype=torch.int64)
    loss = {"dist_cross_entropy": (lambda x: F.dist_cross_entropy(x, target, classes), torch.randn(8, 16))}
    return {name: (call, x) for name, call in movements().items()} | layers() | loss


def main() -> None:
    torch.set_num_threads(1)
    dd.World(transport=NullTransport(0, 4))
    print(json.dumps({name: [calls(lambda: call(x)), calls(backward(call, x))] for name, (call, x) in rows().items()}))


if __name__ == "__main__":
    main()
