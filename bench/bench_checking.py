"""What checking and the watchdog's board cost."""

import torch

import distdl as dd
import distdl.functional as F
from distdl.engine import transport
from distdl.programs.bench import cases
from distdl.programs.bench.table import Result
from distdl.watching.observer import Observer

from .choose import SIZE, choose

CALLS = {
    "shift, 64 bytes": lambda x, P: F.shift(x, P, 0),
    "all_sum_reduce, 64 bytes": F.all_sum_reduce,
    "invariant_sum, forward + backward": lambda x, P: F.invariant_sum(x.clone().requires_grad_(), P).sum().backward(),
}


@choose("call", list(CALLS))
def bench_checking(timed, call):
    """As multiples of the unwatched call."""
    P, x = dd.Partition((SIZE,)), torch.ones(16)

    def under(observer):
        def run():
            transport.observer = observer
            CALLS[call](x, P)
            transport.observer = None

        return run

    calls = {"off": under(None), "watched": under(Observer()), "checked": under(Observer(60))}
    result = Result("checking", call, SIZE, limit="off", subjects=("watched", "checked"))
    timed(cases.Case(result, calls, inner=20), with_peers=False)
