"""Strong scaling (the same global size) and weak scaling (the same size for each rank): run it with 1, 2, 4 ranks, and
report the files together. Launches of different sizes cannot take turns, so these efficiencies are less sure than the
paired ratios."""

from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose, needs


def named(case, what, scaling):
    """The same name at every number of ranks."""
    facts = case.result.facts() | {"what": what, "scaling": scaling}
    del facts["subjects"]
    case.result = Result(**facts)
    return case


@choose("scaling", ["strong", "weak"])
@choose("op", ["halo", "repartition", "conv"])
def bench_scaling(timed, op, scaling):
    """2048² elements, or 1024 rows of 2048 for each rank."""
    rows = 2048 if scaling == "strong" else 1024 * SIZE
    if op == "halo":
        case = cases.halo((rows, 2048), (SIZE, 1), width=2, boundary="circular")
    elif op == "repartition":
        needs(2)  # one rank moves nothing
        A, B = (cases.dd.Layout(cases.dd.Partition(g), (rows, 2048)) for g in ((SIZE, 1), (1, SIZE)))
        case = cases.repartition(A, B, "")
    else:
        case = cases.conv((1, 16, rows // 8, 256), (1, 1, SIZE, 1), 16, 3, padding=1)
    what = {"strong": "one size", "weak": "one size for each rank"}[scaling]
    timed(named(case, what, scaling), with_peers=False)
