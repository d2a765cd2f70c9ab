"""distdl: pure distributed operators for PyTorch, as linear maps with explicit adjoints.

``import distdl as dd; import distdl.functional as F``. Importing starts neither MPI nor CUDA.
"""

from . import checkpoint, errors, func, functional, init, maps, nn, parallel, testing
from ._names import only_public
from .halo import HaloSpec
from .launch import launch
from .linear_map import LinearMap, linear_map
from .partition import Layout, Partition
from .remat import remat
from .watching.checking import checking
from .world import Topology, World, world

__version__ = "0.1.0"

__all__ = [
    "HaloSpec",
    "Layout",
    "LinearMap",
    "Partition",
    "Topology",
    "World",
    "checking",
    "checkpoint",
    "data",
    "errors",
    "func",
    "functional",
    "init",
    "interop",
    "launch",
    "linear_map",
    "maps",
    "nn",
    "parallel",
    "remat",
    "testing",
    "viz",
    "world",
]
_SUBMODULES = ("agree", "autograd", "engine", "halo", "partition", "plan", "signature", "ties", "watching")
__getattr__ = only_public(__name__, keep=_SUBMODULES, lazy=("data", "interop", "viz"))
del only_public
