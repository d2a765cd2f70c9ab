"""Against upstream DistDL (microsoft/distdl), in one launch, in turn.

``python -m distdl run -n 2 -m bench.bench_upstream --peer distdl=PATH``, PATH a checkout of it. Both packages are named distdl, so
upstream is imported first and its modules are put aside. It is no dependency, and nothing of it is kept here.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F

from .paired import arguments, ratio, report, sample


def load_upstream(path):
    """Upstream's ``distdl`` as a module object, without ours noticing."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "distdl"}
    np.bool8 = np.bool_  # what it needs to import with NumPy 2
    sys.path.insert(0, str(Path(path) / "src"))
    compiled = "distdl.functional.interpolate._cpp"  # only its interpolation needs it
    sys.modules[compiled] = types.ModuleType(compiled)
    sys.modules[compiled].__getattr__ = lambda name: None
    try:
        upstream = importlib.import_module("distdl")
        for name in ("backends.common.partition", "nn.repartition", "nn.conv_feature"):
            importlib.import_module(f"distdl.{name}")
    finally:
        sys.path.pop(0)
    sys.modules.update(ours)  # where both have a name; upstream imports more of its own later, by names that ours lacks
    return upstream


def cases(upstream, comm):
    """(name, inner calls, {candidate: call})."""
    p = comm.size
    world = upstream.backends.common.partition.MPIPartition(comm)
    base = world.create_partition_inclusive(np.arange(p))
    grid = base.create_cartesian_topology_partition
    for n in (32, 512, 4096):
        A, B = dd.Layout(dd.Partition((p, 1)), (n, n)), dd.Layout(dd.Partition((1, p)), (n, n))
        x = torch.randn(A.local_shape())
        layer = upstream.nn.repartition.Repartition(grid([p, 1]), grid([1, p]), preserve_batch=False)
        assert torch.equal(layer(x), F.repartition(x, A, B))
        yield f"repartition {n}²", 20 if n < 1000 else 1, {
            "distdl": lambda x=x, A=A, B=B: F.repartition(x, A, B), "upstream": lambda x=x, layer=layer: layer(x)}
    for shape in ((1, 4, 64, 64), (1, 16, 512, 512), (1, 32, 2048, 2048)):
        L = dd.Layout(dd.Partition((1, 1, p, 1)), shape)
        spec, x = dd.HaloSpec.window(L, None, (3, 1), padding=(1, 0)), torch.randn(L.local_shape())
        conv = upstream.nn.conv_feature.DistributedFeatureConv2d(grid([1, 1, p, 1]), shape[1], 1, (3, 1), padding=(1, 0))
        conv(x)  # sets its halo layer up
        pads = [int(n) for pair in reversed(conv.local_padding + conv.halo_shape) for n in pair]

        def exchange(x=x, conv=conv, pads=pads):
            return conv.halo_layer(torch.nn.functional.pad(x, pads))

        with torch.no_grad():
            same = exchange().shape == F.halo_exchange(x, spec).shape
        assert same, "the two compute different windows"
        yield f"halo {shape}, width 1", 10 if x.numel() < 1e5 else 1, {
            "distdl": lambda x=x, s=spec: F.halo_exchange(x, s), "upstream": exchange}
    shape, channels = (1, 64, 256, 256), 64
    L = dd.Layout(dd.Partition((1, 1, p, 1)), shape)
    x = torch.randn(L.local_shape()).requires_grad_()
    w, b = torch.randn(channels, shape[1], 3, 3).requires_grad_(), torch.randn(channels).requires_grad_()
    conv = upstream.nn.conv_feature.DistributedFeatureConv2d(grid([1, 1, p, 1]), shape[1], channels, 3, padding=1)

    def ours():
        F.dist_conv(x, w, L, b, padding=1, params="invariant").sum().backward()

    yield "convolution 3 x 3, 64 channels, 256², forward + backward", 1, {
        "distdl": ours, "upstream": lambda: conv(x).sum().backward()}


def main(argv=None) -> None:
    """Print the table on rank 0."""
    options = arguments("bench_upstream", 21, argv, peer="distdl=PATH of a checkout")
    comm, rows = MPI.COMM_WORLD, []
    upstream = load_upstream(options.peer.removeprefix("distdl="))
    for name, inner, candidates in cases(upstream, comm):
        times = sample(candidates, comm, rounds=options.rounds, inner=inner)
        rows.append({"movement": name, **{f"{k}, µs": float(np.median(t)) * 1e6 for k, t in times.items()},
                     "upstream / distdl": ratio(times["upstream"], times["distdl"])})
    if comm.rank == 0:
        where = options.json and f"{options.json}/upstream-n{comm.size}.json"
        report(rows, f"Against upstream DistDL, float32, {comm.size} ranks (medians; the slowest rank's time)", where, comm.size)


if __name__ == "__main__":
    main()
