"""Solvers across ranks: linear systems, least squares, eigenvalues and minima, with derivatives of what they find.

A vector is this rank's block, of any shape; an operator is a LinearMap or a linear function of blocks, that exchanges
messages as it likes. Every number that decides is summed over the ranks, equal on all of them to the last bit: they
stop at the same step, or raise the same error.

    x, info = dd.solve.cg(A, b, P)                A x = b, A symmetric positive definite
    x, info = dd.solve.lsqr(A, b, P, L)           least squares, any A
    values, vectors = dd.solve.lanczos(A, v, P, k)
    x, info = dd.solve.lbfgs(f, x, P, steps=100)  a minimum of f

cg and lsqr are differentiable in b and in all that A uses, by the equation that they solve.
"""

from .._arguments import check_functions
from .._names import only_public
from ..calls import public
from ..compiled import outside
from .conjugate import cg
from .krylov import lanczos
from .least_squares import lsqr
from .operator import Info
from .quasi_newton import Descent, lbfgs

__all__ = ["Descent", "Info", "cg", "lanczos", "lbfgs", "lsqr"]
public({f"solve.{name}": globals()[name] for name in ("cg", "lanczos", "lbfgs", "lsqr")})
check_functions(globals(), ("cg", "lanczos", "lbfgs", "lsqr"))
outside(
    globals(),
    ("cg", "lanczos", "lbfgs", "lsqr"),
    "dd.solve: a solver looks at numbers, and stops; call it outside of compiled functions, on eager ones",
)
__getattr__ = only_public(__name__)
del check_functions, only_public, outside, public
