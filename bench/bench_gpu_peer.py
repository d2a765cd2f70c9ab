"""Movements by peer memory against the same movements by NCCL (``DISTDL_PEER=0``), in one run, call by call in turn.

``python -m distdl run -n 2 -m bench.bench_gpu_peer``, one rank for each device. What is measured, and how, is
:mod:`bench.bench_gpu`'s; "copy to a peer" is one contiguous copy to another device of as many bytes as this rank sends:
the wire.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch

import distdl as dd
import distdl.functional as F
from bench.bench_gpu import COMM, measure, rows_of, start_nccl
from distdl.programs.bench.table import report

WORLDS = {"distdl": "default", "distdl, NCCL": "nccl"}


def split(dim, dims, world):
    """A partition of one dim over all ranks."""
    return dd.Partition([COMM.size if d == dim else 1 for d in range(dims)], world=world)


def in_both(make):
    """{name: the call that ``make(world)`` gives}."""
    return {name: make(world) for name, world in WORLDS.items()}


def wire(nbytes):
    """A copy to the next rank's device."""
    there = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    x, y = (torch.empty(nbytes, dtype=torch.uint8, device=d) for d in ("cuda", there))
    return lambda: y.copy_(x, non_blocking=True)


def repartitions():
    """Rows to columns."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    p = COMM.size
    mesh = init_device_mesh("cuda", (p,))
    for n in (64, 512, 1024, 4096, 16384):
        x = torch.randn(n // p, n, device="cuda")
        calls = in_both(
            lambda w, x=x, n=n: partial(F.repartition, x, dd.Layout(split(0, 2, w), (n, n)), split(1, 2, w))
        )
        d = DTensor.from_local(x, mesh, [Shard(0)])
        calls["DTensor.redistribute"] = lambda d=d: d.redistribute(mesh, [Shard(1)])
        calls["copy to a peer"] = wire(x.nbytes * (p - 1) // p)
        yield from rows_of(f"repartition {n}²", x.nbytes, measure(calls, inner=20 if n < 10000 else 5))


def halos():
    """Faces of width 1 of a volume split along each dim, circular, and their adjoint."""
    for shape in ((32, 64, 64), (128, 256, 256), (256, 512, 512)):
        for dim in range(3):
            whole = [n * COMM.size if d == dim else n for d, n in enumerate(shape)]
            x = torch.randn(shape, device="cuda")
            maps = {
                w: dd.maps.halo_exchange(
                    dd.HaloSpec(
                        dd.Layout(split(dim, 3, w), whole), [int(d == dim) for d in range(3)], boundary="circular"
                    )
                )
                for w in WORLDS.values()
            }
            y = maps["default"](x)
            many = {} if x.nbytes < 2**27 else {"inner": 5, "rounds": 7}
            found = measure(
                in_both(lambda w, x=x, maps=maps: lambda: maps[w](x)) | {"clone": lambda x=x: x.clone()}, **many
            )
            yield from rows_of(f"halo {shape}, dim {dim}", x.nbytes, found)
            found = measure(in_both(lambda w, y=y, maps=maps: partial(maps[w].T, y)), **many)
            yield from rows_of(f"adjoint of halo {shape}, dim {dim}", x.nbytes, found)


def symmetric(n):
    """torch's own operators on symmetric memory: every rank reads all, or sums a part and hands it out. Their input
    lies in that memory already."""
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory

    x, group = _symmetric_memory.empty(n, device="cuda", dtype=torch.float32), dist.group.WORLD.group_name
    _symmetric_memory.rendezvous(x, group)
    x.zero_()
    ops = torch.ops.symm_mem
    calls = {"symm_mem, two shots": lambda: ops.two_shot_all_reduce_(x, "sum", group)}
    return calls | ({"symm_mem, one shot": lambda: ops.one_shot_all_reduce(x, "sum", group)} if n <= 2**18 else {})


def sums():
    """All-reduces, gathers and their adjoints."""
    import torch.distributed as dist

    for n in (2**11, 2**13, 2**14, 2**15, 2**16, 2**18, 2**22, 2**24):
        x = torch.randn(n, device="cuda")
        y = x.clone()
        calls = in_both(lambda w, x=x: partial(F.all_sum_reduce, x, split(0, 1, w)))
        found = measure(calls | {"torch.distributed": lambda y=y: dist.all_reduce(y)} | symmetric(n))
        yield from rows_of(f"all_sum_reduce {n}", x.nbytes, found)
    for n in (2**10, 2**14, 2**18, 2**22, 2**26):
        x, y = torch.randn(n // COMM.size, device="cuda"), torch.randn(n, device="cuda")
        calls = in_both(lambda w, x=x, n=n: partial(F.all_gather, x, dd.Layout(split(0, 1, w), (n,))))
        yield from rows_of(f"all_gather {n}", y.nbytes, measure(calls))
        calls = in_both(lambda w, y=y, n=n: partial(F.reduce_scatter, y, dd.Layout(split(0, 1, w), (n,))))
        yield from rows_of(f"reduce_scatter {n}", y.nbytes, measure(calls))


def layers():
    """A tensor-parallel block and a convolution, forward and backward."""
    p, kind = COMM.size, {"device": "cuda", "dtype": torch.bfloat16}
    tokens, width, inner = 4096, 8192, 32768
    w1, w2 = ((0.01 * torch.randn(s, **kind)).requires_grad_() for s in ((inner // p, width), (width, inner // p)))
    part = torch.randn(tokens // p, width, **kind).requires_grad_()

    def sequence(world):
        column = dd.Layout(dd.Partition((1, p, 1), world=world), (tokens, inner, width))
        row = dd.Layout(dd.Partition((1, 1, p), world=world), (tokens, width, inner))

        def call():
            h = F.dist_linear(part, w1, column, x_layout="sharded", x_dim=0)
            y = F.dist_linear(h.relu(), w2, row, y_layout="sharded", y_dim=0)
            y.backward(y.detach())

        return call

    found = measure(in_both(sequence), rounds=7, inner=3)
    yield from rows_of("MLP 8192 -> 32768 -> 8192, bf16, sequence parallel", part.nbytes, found)
    for shape in ((1, 32, 64, 64, 64), (1, 32, 256, 256, 256)):
        at = [n // p if d == 2 else n for d, n in enumerate(shape)]
        x, g = torch.randn(at, **kind, requires_grad=True), torch.randn(at, **kind)
        w = torch.randn(32, 32, 3, 3, 3, **kind, requires_grad=True)

        def convolution(world, x=x, g=g, w=w, shape=shape):
            L = dd.Layout(split(2, 5, world), shape)
            return lambda: F.dist_conv(x, w, L, padding=1).backward(g)

        found = measure(in_both(convolution), rounds=7, inner=3)
        yield from rows_of(f"convolution {shape}, forward + backward", x.nbytes, found)


def main(argv=None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("bench_gpu_peer")
    parser.add_argument("--json", default=None, help="a directory for the results")
    parser.add_argument("--only", default="repartitions halos sums layers")
    options = parser.parse_args(argv)
    start_nccl()
    os.environ["DISTDL_PEER"] = "0"
    dd.World(COMM, "nccl")
    F.shift(torch.zeros(1, device="cuda"), split(0, 1, "nccl"), 0)  # its engines are made now
    os.environ["DISTDL_PEER"] = "1"
    parts = {"repartitions": repartitions, "halos": halos, "sums": sums, "layers": layers}
    for name in options.only.split():
        rows = list(parts[name]())
        if COMM.rank == 0:
            card = torch.cuda.get_device_name().replace(" ", "-")
            path = f"{options.json}/gpu-peer-{name}-{card}-n{COMM.size}.json" if options.json else None
            title = f"{name}: {COMM.size} x {torch.cuda.get_device_name()}, microseconds"
            report(rows, title, path, COMM.size)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
