"""distdl: pure distributed operators for PyTorch, as linear maps with explicit adjoints.

``import distdl as dd; import distdl.functional as F``. Importing starts neither MPI nor CUDA.
"""

from typing import TYPE_CHECKING

from . import checkpoint, errors, func, functional, init, maps, nn, parallel, solve, testing
from ._arguments import check_classes, check_functions
from ._names import only_public
from .algebra import simplify
from .calls import public
from .forecast.suggest import suggest, suggest_chain
from .forecast.trace import trace
from .index import Index
from .linear_map import LinearMap, linear_map
from .movement.halo import HaloSpec
from .movement.staggered import Staggered
from .nodes import Topology
from .partition import Layout, Partition
from .programs.launch import launch
from .remat import remat
from .timeline import timeline
from .watching.checking import checking
from .world import World, world

if TYPE_CHECKING:
    from . import interop, viz  # imported when first asked for
    from .forecast import machines
    from .programs import data

__version__ = "0.2.0"

__all__ = [
    # who holds what
    "Partition",
    "Layout",
    "HaloSpec",
    "Staggered",
    "Index",
    "World",
    "world",
    "Topology",
    # operators
    "functional",
    "maps",
    "LinearMap",
    "linear_map",
    "simplify",
    "remat",
    "func",
    "solve",
    # models and their training
    "nn",
    "init",
    "parallel",
    "checkpoint",
    "data",
    "interop",
    # running, testing and drawing
    "launch",
    "checking",
    "timeline",
    "trace",
    "suggest",
    "suggest_chain",
    "machines",
    "errors",
    "testing",
    "viz",
]
public(
    {name: globals()[name] for name in ("Partition", "Layout", "HaloSpec", "Staggered", "Index", "World", "Topology")},
    alike=False,
)
check_functions(globals(), ("launch", "linear_map", "remat", "simplify", "suggest", "suggest_chain", "trace", "world"))
check_classes(HaloSpec, Index, Layout, Partition, Staggered, World)
_SUBMODULES = (
    "agree",
    "autograd",
    "engine",
    "forecast",
    "held",
    "index",
    "movement",
    "partition",
    "plan",
    "signature",
    "ties",
    "watching",
)
__getattr__ = only_public(
    __name__,
    keep=_SUBMODULES,
    lazy={"data": "programs.data", "interop": "interop", "machines": "forecast.machines", "viz": "viz"},
)
del TYPE_CHECKING, check_classes, check_functions, only_public, public
