"""Building plans for 1 to 16,384 ranks: rank 0's view; pure Python, nothing is sent. It should not grow with the
ranks."""

import distdl as dd
from distdl.plan import Plan
from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose


@choose("ranks", [1, 64, 4096], [16, 256, 1024, 16384])
@choose("op", ["halo", "repartition"])
def bench_plan(timed, op, ranks):
    """A plane over a square grid, 64 x 64 elements each."""
    a, b = cases.grid_of(ranks, 2)
    shape = (64 * a, 64 * b)
    P, Q = dd.Partition((a, b)), dd.Partition((ranks, 1))

    A, B = dd.Layout(P, shape), dd.Layout(Q, shape)

    def build():
        plan = dd.HaloSpec(A, 1).plan() if op == "halo" else dd.maps.repartition(A, B).plan
        return Plan(plan.held, plan.wanted).view(0)  # a fresh one: views are kept

    calls = {"plan": build}
    timed(cases.Case(Result(op, f"plan of {ranks} ranks", SIZE, limit="", subjects=("plan",)), calls), with_peers=False)
