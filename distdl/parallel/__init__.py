"""Training at scale, as functions: each technique is a few lines over the operators of :mod:`distdl.functional`.

data parallel           w = replicate(w, P)              F.mark_varying; its adjoint sums the gradients
ZeRO-1, 2, 3 (FSDP)     w = sharding.gather(block)       F.all_gather; its adjoint is the reduce-scatter
pipeline                step = pipeline(schedule(...))   one-pair repartitions; their adjoints carry cotangents back
averaging               w = average_parameters(w, P)     F.invariant_sum, divided by the count
mixed precision         w = policy.cast(w)               a cast's adjoint casts back; the flag is agreed by a sum
hierarchical sums       hierarchical_all_reduce(x, ...)  reduce-scatter, all-reduce, all-gather
"""

from . import average, data, hooks, precision, shard, sync, topology
from .average import *  # noqa: F403
from .data import *  # noqa: F403
from .pipeline import pipeline
from .precision import *  # noqa: F403
from .rendezvous import export_rendezvous
from .schedules import Task, Timeline, schedule, simulate
from .shard import *  # noqa: F403
from .sync import *  # noqa: F403
from .topology import *  # noqa: F403

_MODULES = (topology, data, sync, shard, precision, average)
__all__ = ["Task", "Timeline", "export_rendezvous", "hooks", "pipeline", "schedule", "simulate",
           *(name for module in _MODULES for name in module.__all__)]  # fmt: skip
