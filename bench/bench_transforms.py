"""Derivatives and batches of a movement, as multiples of the forward call."""

import torch

from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose


@choose("n", [64, 1024])
@choose("op", ["halo", "repartition"])
def bench_transforms(timed, op, n):
    """adjoint, jvp, vjp, hvp (of a quadratic), a batch of 8, and 8 calls, for scale."""
    if op == "halo":
        case = cases.halo((n, n), (SIZE, 1))
    else:
        A, B = (cases.dd.Layout(cases.dd.Partition(g), (n, n)) for g in ((SIZE, 1), (1, SIZE)))
        case = cases.repartition(A, B, "rows to columns")
    A, x = case.operands["map"], case.operands["x"]
    y, batch = A(x), torch.stack([x] * 8)

    def quadratic(x):
        return A(x).square().sum()

    calls = {
        "forward": lambda: A(x),
        "adjoint": lambda: A.T(y),
        "jvp": lambda: torch.func.jvp(A, (x,), (x,)),
        "vjp": lambda: torch.func.vjp(A, x)[1](y),
        "hvp": lambda: torch.func.jvp(torch.func.grad(quadratic), (x,), (x,)),
        "vmap of 8": lambda: torch.func.vmap(A)(batch),
        "loop of 8": lambda: [A(one) for one in batch],
    }
    result = Result(op, case.result.what, SIZE, limit="forward", subjects=tuple(k for k in calls if k != "forward"))
    timed(cases.Case(result, calls, inner=5 if n < 100 else 1), with_peers=False)
