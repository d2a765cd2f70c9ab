"""Building plans for 1 to 16,384 ranks: rank 0's view; pure Python, nothing is sent. It should not grow with the ranks."""

import distdl as dd
from distdl.bench import cases
from distdl.bench.table import Result
from distdl.plan import Plan

from .choose import SIZE, choose


@choose("ranks", [1, 64, 4096], [16, 256, 1024, 16384])
@choose("op", ["halo", "repartition"])
def bench_plan(timed, op, ranks):
    """A plane over a square grid, 64 x 64 elements each."""
    a, b = cases.grid_of(ranks, 2)
    shape = (64 * a, 64 * b)
    P, Q = dd.Partition((a, b)), dd.Partition((ranks, 1))

    def build():
        if op == "halo":
            plan = dd.HaloSpec(dd.Layout(P, shape), 1).plan
            plan = Plan(plan.held, plan.wanted)  # none of its cached views
        else:
            plan = dd.maps.repartition(dd.Layout(P, shape), dd.Layout(Q, shape)).plan
            plan = Plan(plan.held, plan.wanted)
        return plan._view(0)

    calls = {"plan": build}
    timed(cases.Case(Result(op, f"plan of {ranks} ranks", SIZE, limit="", subjects=("plan",)), calls), with_peers=False)
