"""Against upstream DistDL (microsoft/distdl): ``--peer distdl=PATH``, PATH a checkout of it (it needs einops).

Both packages are named distdl, so upstream is imported while our modules are put aside. It is no dependency, and
nothing of it is kept here.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases

from .choose import SIZE, choose


def load_upstream(path, more=()):
    """Upstream's ``distdl`` as a module object, with some of its submodules, without ours noticing."""
    if not (Path(path) / "src" / "distdl").is_dir():
        raise FileNotFoundError(f"no checkout of microsoft/distdl in {str(path)!r}: it has no src/distdl")
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "distdl"}
    np.bool8 = np.bool_  # what it needs to import with NumPy 2
    sys.path.insert(0, str(Path(path) / "src"))
    compiled = "distdl.functional.interpolate._cpp"  # only its interpolation needs it
    sys.modules[compiled] = types.ModuleType(compiled)
    sys.modules[compiled].__getattr__ = lambda name: None
    try:
        upstream = importlib.import_module("distdl")
        for name in ("config", "backends.common.partition", "nn.repartition", "nn.conv_feature", *more):
            importlib.import_module(f"distdl.{name}")
    finally:
        sys.path.pop(0)
    sys.modules.update(ours)  # where both have a name; upstream imports more of its own later, by names that ours lacks
    return upstream


@pytest.fixture(scope="module")
def upstream(request):
    """Upstream, and a maker of its Cartesian partitions."""
    peer = request.config.getoption("--peer")
    if not peer:
        pytest.skip("needs --peer distdl=PATH of a checkout of microsoft/distdl")
    loaded = load_upstream(peer.removeprefix("distdl="))
    world = loaded.backends.common.partition.MPIPartition(MPI.COMM_WORLD)
    grid = world.create_partition_inclusive(np.arange(SIZE)).create_cartesian_topology_partition
    return loaded, grid


@choose("n", [32, 512, 4096])
def bench_repartition(timed, upstream, n):
    """Rows to columns."""
    loaded, grid = upstream
    A, B = (dd.Layout(dd.Partition(g), (n, n)) for g in ((SIZE, 1), (1, SIZE)))
    case = cases.repartition(A, B, "rows to columns, and upstream")
    layer = loaded.nn.repartition.Repartition(grid([SIZE, 1]), grid([1, SIZE]), preserve_batch=False)
    x = case.operands["x"]
    assert torch.equal(layer(x), F.repartition(x, A, B))
    case.calls["upstream"] = lambda: layer(x)
    timed(case)


@choose("shape", [(1, 4, 64, 64), (1, 16, 512, 512), (1, 32, 2048, 2048)])
def bench_halo(timed, upstream, shape):
    """Width 1 over rows."""
    loaded, grid = upstream
    case = cases.halo(shape, (1, 1, SIZE, 1))
    conv = loaded.nn.conv_feature.DistributedFeatureConv2d(grid([1, 1, SIZE, 1]), shape[1], 1, (3, 1), padding=(1, 0))
    x = case.operands["x"]
    conv(x)  # sets its halo layer up
    pads = [int(n) for pair in reversed(conv.local_padding + conv.halo_shape) for n in pair]
    spec = dd.HaloSpec.window(case.operands["layout"], None, (3, 1), padding=(1, 0))

    def exchange():
        return conv.halo_layer(torch.nn.functional.pad(x, pads))

    with torch.no_grad():
        assert exchange().shape == F.halo_exchange(x, spec).shape, "the two compute different windows"
    case.calls |= {"distdl": lambda: F.halo_exchange(x, spec), "upstream": exchange}
    case.result.what += ", and upstream"
    timed(case, with_peers=False)


def bench_conv(timed, upstream):
    """A whole layer, forward + backward."""
    loaded, grid = upstream
    case = cases.conv((1, 64, 256, 256), (1, 1, SIZE, 1), 64, 3, padding=1)
    x = cases.leaf(dd.Layout(dd.Partition((1, 1, SIZE, 1)), (1, 64, 256, 256)).local_shape())
    conv = loaded.nn.conv_feature.DistributedFeatureConv2d(grid([1, 1, SIZE, 1]), 64, 64, 3, padding=1)
    case.calls["upstream"] = cases.backward(lambda: conv(x), x)
    case.result.what += ", and upstream"
    timed(case)
