"""distdl: pure distributed operators for PyTorch, as linear maps with explicit adjoints.

``import distdl as dd; import distdl.functional as F``. Importing starts neither MPI nor CUDA.
"""

from . import errors, func, functional, maps, testing
from .halo import HaloSpec
try:
    from .launch import launch
except ModuleNotFoundError:
    launch = None
from .linear_map import LinearMap, linear_map
from .partition import Layout, Partition
from .world import Topology, World, world

__version__ = "0.1.0"

__all__ = [
    "HaloSpec", "Layout", "LinearMap", "Partition", "Topology", "World", "errors", "func", "functional", "launch", "linear_map", "maps",
    "testing", "world",
]  # fmt: skip
