"""distdl: pure distributed operators for PyTorch, as linear maps with explicit adjoints.

``import distdl as dd; import distdl.functional as F``. Importing starts neither MPI nor CUDA.
"""

from . import checkpoint, errors, func, functional, init, maps, nn, parallel, testing
from .halo import HaloSpec
from .launch import launch
from .linear_map import LinearMap, linear_map
from .partition import Layout, Partition
from .remat import remat
from .watching.checking import checking
from .world import Topology, World, world

__version__ = "0.1.0"

__all__ = [
    "HaloSpec", "Layout", "LinearMap", "Partition", "Topology", "World", "checking", "checkpoint", "errors", "func", "functional",
    "init", "launch", "linear_map", "maps", "nn", "parallel", "remat", "testing", "world",
]  # fmt: skip
