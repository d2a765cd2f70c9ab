"""CUDA tensors against upstream DistDL's own NCCL engine, in one run:
``python -m distdl run -n 2 -m bench.bench_gpu_upstream --peer distdl=PATH``, PATH a checkout of microsoft/distdl (it
needs einops).

Samples as in ``bench_gpu``; results are compared before they are timed.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl.programs.bench.table import report

from .bench_gpu import measure, rows_of
from .bench_upstream import load_upstream

COMM = MPI.COMM_WORLD


def same(ours, theirs) -> None:
    """Both results agree, to the rounding of float32 products that tensor cores take in TF32."""
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def repartition(upstream, grid, device, n):
    """Rows to columns."""
    p = COMM.size
    A, B = dd.Layout(dd.Partition((p, 1)), (n, n)), dd.Layout(dd.Partition((1, p)), (n, n))
    layer = upstream.nn.repartition.Repartition(grid([p, 1]), grid([1, p]), preserve_batch=False)
    x = torch.randn(A.local_shape(), device=device)
    same(F.repartition(x, A, B), layer(x))
    return f"repartition {n}²", x.nbytes, lambda: F.repartition(x, A, B), lambda: layer(x)


def convolution(upstream, grid, device, n):
    """3x3x3, 32 channels, float32, over slabs, forward + backward; both broadcast the weight from rank 0."""
    p = COMM.size
    L, root = dd.Layout(dd.Partition((1, 1, p, 1, 1)), (1, 32, n, n, n)), dd.Partition((1,) * 5)
    conv = upstream.nn.conv_feature.DistributedFeatureConv3d
    layer = conv(grid([1, 1, p, 1, 1]), 32, 32, (3, 3, 3), padding=(1, 1, 1), bias=False).to(device)
    w = COMM.bcast(torch.randn(32, 32, 3, 3, 3) / 30).to(device)
    if COMM.rank == 0:
        layer.weight.data.copy_(w)
    w.requires_grad_()
    x = torch.randn(L.local_shape(), device=device, requires_grad=True)
    g = torch.randn_like(x)

    def ours():
        return F.dist_conv(x, F.broadcast(w, root, L.partition, shape=w.shape), L, padding=1)

    same(ours(), layer(x))
    name = f"convolution 3³, 32 channels, {n}³, float32, forward + backward"
    return name, x.nbytes, lambda: ours().backward(g), lambda: layer(x).backward(g)


def linear(upstream, grid, device, width):
    """An all-gather and a reduce-scatter layer over split features, 4096 tokens, float32 in TF32, forward +
    backward."""
    p, tokens, inner = COMM.size, 4096, 4 * width
    across, how = grid([1, 1, p]), {"bias": False, "device": device}
    first = upstream.nn.linear_ag.DistributedLinearAllGather(across, width, inner, **how)
    second = upstream.nn.linear_rs.DistributedLinearReduceScatter(across, inner, width, **how)
    w1, w2 = (
        layer.weight.detach().reshape(layer.weight.shape[-2:]).clone().requires_grad_() for layer in (first, second)
    )
    x = torch.randn(1, tokens, width // p, device=device, requires_grad=True)
    column = dd.Layout(dd.Partition((1, 1, p, 1)), (1, tokens, inner, width))
    row = dd.Layout(dd.Partition((1, 1, 1, p)), (1, tokens, width, inner))
    g = torch.randn_like(x)

    def ours():
        h = F.dist_linear(x, w1, column, x_layout="sharded", x_dim=-1, y_layout="replicated")
        return F.dist_linear(h.relu(), w2, row, x_layout="replicated", y_layout="sharded", y_dim=-1)

    def theirs():
        return second(first(x).relu())

    same(ours(), theirs())
    name = f"all-gather, reduce-scatter layers {width} -> {inner} -> {width}, forward + backward"
    return name, x.nbytes, lambda: ours().backward(g), lambda: theirs().backward(g)


CASES = [(repartition, 64), (repartition, 1024), (repartition, 4096), (repartition, 8192),
         (convolution, 64), (convolution, 192), (linear, 1024), (linear, 4096)]  # fmt: skip


def main(argv=None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("bench_gpu_upstream")
    parser.add_argument("--peer", required=True, help="distdl=PATH")
    parser.add_argument("--json", default=None, help="a directory for the results")
    options = parser.parse_args(argv)
    torch.cuda.set_device(COMM.rank % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = True
    import cupy

    cupy.bool8 = cupy.bool_  # as load_upstream does for NumPy
    upstream = load_upstream(options.peer.removeprefix("distdl="), ("nn.linear_ag", "nn.linear_rs"))
    upstream.config.set_backend(backend_comm="nccl", backend_array="cupy")
    world = upstream.backends.common.partition.MPIPartition(MPI.COMM_WORLD)
    whole = world.create_partition_inclusive(np.arange(COMM.size))
    grid, rows = whole.create_cartesian_topology_partition, []
    for build, size in CASES:
        name, nbytes, ours, theirs = build(upstream, grid, torch.device("cuda"), size)
        rows += rows_of(name, nbytes, measure({"distdl": ours, "upstream": theirs}, rounds=7, inner=5))
    if COMM.rank == 0:
        card = torch.cuda.get_device_name()
        path = f"{options.json}/gpu-upstream-{card.replace(' ', '-')}-n{COMM.size}.json" if options.json else None
        report(rows, f"against upstream's NCCL engine: {COMM.size} x {card}, microseconds", path, COMM.size)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
