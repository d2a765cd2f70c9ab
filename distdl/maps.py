"""One factory for each data movement: layouts in, :class:`LinearMap` out. Cached: equal arguments give the same map.

``where`` is a Layout, or a Partition together with the local tensor's ``shape``. Names as in MPI; definitions after
Hewett & Grady, arXiv:2006.03108. Each stands in :mod:`distdl.movement`, above the function of its name.
"""

from ._arguments import check_functions
from .calls import public
from .compiled import outside
from .movement.blocks import gather_map as gather
from .movement.blocks import repartition_map as repartition
from .movement.blocks import roll_map as roll
from .movement.blocks import scatter_map as scatter
from .movement.call import transposed
from .movement.copies import all_sum_reduce_map as all_sum_reduce
from .movement.copies import broadcast_map as broadcast
from .movement.copies import invariant_sum_map as invariant_sum
from .movement.copies import mark_varying_map as mark_varying
from .movement.copies import sum_reduce_map as sum_reduce
from .movement.gathers import all_gather_map as all_gather
from .movement.gathers import gathering
from .movement.gathers import reduce_scatter_map as reduce_scatter
from .movement.halo import halo_exchange_map as halo_exchange
from .movement.halo import halo_strips
from .movement.peers import keyed
from .movement.peers import permute_map as permute
from .movement.peers import shift_map as shift
from .movement.reorder import reorder_map as reorder
from .movement.rows import gather_rows_map as gather_rows
from .movement.rows import scatter_add_rows_map as scatter_add_rows

__all__ = [
    # blocks of a global tensor
    "repartition",
    "scatter",
    "gather",
    "roll",
    "reorder",
    "halo_exchange",
    "halo_strips",
    # copies and sums
    "broadcast",
    "sum_reduce",
    "all_sum_reduce",
    "mark_varying",
    "invariant_sum",
    "all_gather",
    "reduce_scatter",
    # whole tensors from rank to rank
    "shift",
    "permute",
    # rows by their numbers
    "gather_rows",
    "scatter_add_rows",
    # the general forms behind them
    "gathering",
    "keyed",
    "transposed",
]
public({name: globals()[name] for name in __all__})
check_functions(globals(), __all__)
outside(globals(), __all__, "distdl: make maps outside of compiled functions, or call the function of the same name")
del check_functions, outside, public
