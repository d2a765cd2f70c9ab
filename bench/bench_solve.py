"""Dense products over a grid against the product of what a rank has gathered; the QR of tall matrices; a step of
conjugate gradients against its local work."""

import torch

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose


@choose("n, panels", [(512, 1), (512, 4)], [(2048, 1), (2048, 8)])
def bench_matmul(timed, n, panels):
    """SUMMA over the squarest grid; the limit is the local product alone."""
    P = dd.Partition(cases.grid_of(SIZE, 2))
    L = dd.Layout(P, (n, n))
    a, b = cases.drawn(L.local_shape(), torch.float32), cases.drawn(L.local_shape(), torch.float32)
    rows, columns = torch.randn(a.shape[0], n), torch.randn(n, b.shape[1])
    calls = {
        "distdl": lambda: F.dist_matmul(a, b, L, panels=panels, shapes=(L, L)),
        "share": lambda: rows @ columns,
    }
    what = f"{n}² over {' x '.join(map(str, P.shape))}, {panels} panels"
    result = Result("matmul", what, SIZE, "float32", a.nbytes, limit="share")
    timed(cases.Case(result, calls, {"a": a, "b": b, "layout": L}))


@choose("m, n", [(65536, 16)], [(1048576, 32)])
def bench_tsqr(timed, m, n):
    """Against the QR of this rank's rows."""
    L = dd.Layout(dd.Partition((SIZE, 1)), (m, n))
    a = cases.drawn(L.local_shape(), torch.float32)
    calls = {"distdl": lambda: F.dist_tsqr(a, L), "share": lambda: torch.linalg.qr(a)}
    timed(cases.Case(Result("tsqr", f"{m} x {n}", SIZE, "float32", a.nbytes, limit="share"), calls))


@choose("n", [256], [1024])
def bench_cg(timed, n):
    """Ten steps with a star of five points on n x n, in slabs; the limit is the same without a message: the stencil and
    the updates of textbook conjugate gradients on this rank's rows."""
    L = dd.Layout(dd.Partition((SIZE, 1)), (n, n))
    spec = dd.HaloSpec(L, 1, boundary="zeros", corners=False)
    b = cases.drawn(L.local_shape(), torch.float64)

    def star(wide):
        return 5 * wide[1:-1, 1:-1] - wide[:-2, 1:-1] - wide[2:, 1:-1] - wide[1:-1, :-2] - wide[1:-1, 2:]

    def alone(b, steps=10):
        x, r, p, rr = torch.zeros_like(b), b, b, (b * b).sum()
        for _ in range(steps):
            s = star(torch.nn.functional.pad(p, (1, 1, 1, 1)))
            a = rr / (p * s).sum()
            x, r = x + a * p, r - a * s
            rr, before = (r * r).sum(), rr
            p = r + rr / before * p
        return x

    def solved():
        with torch.no_grad():
            return dd.solve.cg(lambda x: star(F.halo_exchange(x, spec)), b, L, tol=0, max_iter=10)[0]

    calls = {"distdl": solved, "share": lambda: alone(b)}
    result = Result("cg", f"{n}², 10 steps", SIZE, "float64", b.nbytes, limit="share")
    timed(cases.Case(result, calls, {"b": b, "layout": L, "steps": 10}))
