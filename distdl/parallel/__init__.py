"""Training at scale, as functions: each technique is a few lines over the operators of :mod:`distdl.functional`.

data parallel           w = replicate(w, P)              F.mark_varying; its adjoint sums the gradients
ZeRO-1, 2, 3 (FSDP)     w = sharding.gather(block)       F.all_gather; its adjoint is the reduce-scatter
pipeline                step = pipeline(schedule(...))   one-pair repartitions; their adjoints carry cotangents back
averaging               w = average_parameters(w, P)     F.invariant_sum, divided by the count
mixed precision         w = policy.cast(w)               a cast's adjoint casts back; the flag is agreed by a sum
hierarchical sums       hierarchical_all_reduce(x, ...)  reduce-scatter, all-reduce, all-gather
"""

from .._arguments import check_functions
from ..calls import public
from . import hooks
from .average import average_due, average_parameters
from .data import LIMITS, accumulate, bucketed, global_mean, reduce_gradients, replicas, replicate
from .norm import clip_by_norm, clip_grad_norm_, global_norm
from .pipeline import pipeline
from .precision import LossScale, Precision, select, spread_overflow
from .rendezvous import export_rendezvous
from .schedules import Task, Timeline, schedule, simulate
from .shard import Sharding, chain
from .sync import GradientSync, ignore_in_ddp
from .topology import along, block_mapping, cyclic_mapping, hierarchical_all_reduce

__all__ = [
    # data parallelism
    "replicas",
    "replicate",
    "global_mean",
    "accumulate",
    "reduce_gradients",
    "GradientSync",
    "ignore_in_ddp",
    "hooks",
    "bucketed",
    "LIMITS",
    # sharded parameters
    "Sharding",
    "chain",
    "global_norm",
    "clip_grad_norm_",
    "clip_by_norm",
    # pipelines
    "pipeline",
    "schedule",
    "simulate",
    "Task",
    "Timeline",
    # averaging
    "average_parameters",
    "average_due",
    # mixed precision
    "Precision",
    "LossScale",
    "select",
    "spread_overflow",
    # where processes go
    "along",
    "block_mapping",
    "cyclic_mapping",
    "hierarchical_all_reduce",
    "export_rendezvous",
]
public({name: globals()[name] for name in __all__}, alike=False)
public({name: getattr(hooks, name) for name in hooks.__all__}, alike=False)
check_functions(globals(), __all__)
check_functions(vars(hooks), hooks.__all__)
del check_functions, public
