"""Least squares, by LSQR."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import vjp

from .. import _torch
from .._types import Place
from ..errors import PartitionError, SolverError
from ..functional.enter import outside
from ..linear_map import LinearMap
from ..partition import Layout, partition_of
from .conjugate import check_tolerance, iterate
from .implicit import attached, constant_map, solution
from .operator import Blocks, Info, Inner, Numbers, check, check_block_of, each, nothing_to_do, quotient, stop

__all__ = ["lsqr"]


def lsqr(
    A: Blocks,
    b: torch.Tensor,
    P_range: Place,
    P_domain: Place,
    *,
    damp: float = 0.0,
    tol: float = 1e-8,
    max_iter: int | None = None,
    order: int = 2,
) -> tuple[torch.Tensor, Info]:
    """The x of least ‖b - A x‖² + damp² ‖x‖², for any linear A between blocks over two partitions.

    Args:
        A: a LinearMap, or a linear function of this rank's block of x, which has a vjp: its adjoint is worked out with
            that. Derivatives reach whatever tensors it uses.
        b: this rank's block over ``P_range``; real or complex.
        P_range: the ranks over which b, and A x, varies.
        P_domain: the Layout of x; where A is a LinearMap the partition will do.
        damp: the weight of ‖x‖.
        tol: how small ‖Aᴴ(b - A x) - damp² x‖ shall be, relative to ‖Aᴴ b‖.
        max_iter: the most steps. ``None``: ten times the smaller number of rows and columns.
        order: as for :func:`cg`.

    Returns:
        x: this rank's block. info: the number of steps, the relative residual of the normal equations as ``tol`` has
        it, worked out anew at the end, and whether it is within ``tol``.

    Messages: those of A, of Aᴴ (where A is a function, of A and of Aᴴ) and two all-reduces of a number a step.

    The bidiagonalization of Paige and Saunders (*LSQR*, 1982). Derivatives go by the normal equations
    (AᴴA + damp²) x = Aᴴ b, which :func:`cg`'s iteration solves: the columns of A must be independent, or ``damp``
    positive.

    Raises:
        SolverError: on every rank: numbers that are not finite; or a derivative of the solution of fewer equations than
            unknowns without ``damp``, where the normal equations do not tell it.
        ShapeError: b is not this rank's block, or A does not return one.
        PartitionError: nothing says what block of x this rank has.

    Example:
        >>> P, b = dd.Partition((1,)), torch.tensor([1.0, 3.0])
        >>> x, info = dd.solve.lsqr(lambda x: torch.cat([x, x]), b, dd.Layout(P, (2,)), dd.Layout(P, (1,)))
        >>> x.round(decimals=4)
        tensor([2.])
    """
    check_tolerance(P_range, tol, max_iter)
    inner, grid = Inner(P_range, P_domain), partition_of(P_range)
    check_block_of(b, P_range if grid.active else grid, "b")
    _check_places(A, P_range, P_domain)
    if inner.grid.index() is None:
        return outside(b, like=P_domain if isinstance(P_domain, Layout) else None), nothing_to_do(b)
    shape = P_domain.local_shape() if isinstance(P_domain, Layout) else A.in_shape  # type: ignore[attr-defined]
    if not grid.active:  # what it passed is ignored
        b = outside(b, like=P_range)
    numbers = Numbers(A, shape, b.shape)
    lacking = False  # equations: then the normal equations have many solutions

    def run(b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal lacking
        *found, lacking = _bidiagonal(numbers, normal, inner, b, damp, tol, max_iter, P_range)
        return tuple(found)

    def normal(x: torch.Tensor) -> torch.Tensor:
        return numbers.adjoint(numbers(x)) + damp**2 * x

    def solved(v: torch.Tensor) -> torch.Tensor:
        lead = v.dim() - len(shape)
        if lacking and not damp and any(bool(n.any()) for n in inner([(v, v)], lead)):
            raise SolverError(
                "the least solution of fewer equations than unknowns has no derivative here",
                partitions=P_domain,
                expected="as many equations as unknowns, or damp > 0",
                actual="damp = 0",
                next_step="give a small damp; or solve A Aᴴ z = b by cg, and take x = Aᴴ z",
            )
        return solution(iterate(normal, None, inner, v, None, lead, tol, max_iter, P_domain))

    def left(x: torch.Tensor) -> torch.Tensor:
        y, pull = vjp(A, x)[:2]
        check(y, b.shape, "A")
        return pull(b - y)[0] - damp**2 * x

    x, *info = _torch.constants(run, (b,))
    S = constant_map(solved, solved, shape, inner.grid.ranks)
    constant = constant_map(normal, normal, shape, inner.grid.ranks)
    return attached(x, left, S, constant, order), Info(*info)


def _check_places(A: Blocks, P_range: Place, P_domain: Place) -> None:
    """Raise unless every rank knows its block of x, and that of b."""
    ranges, domains = (partition_of(P).ranks for P in (P_range, P_domain))
    unknown = not isinstance(P_domain, Layout) and not isinstance(A, LinearMap)
    if unknown or (set(domains) - set(ranges) and not isinstance(P_range, Layout)):
        raise PartitionError(
            "nothing says what block this rank has",
            partitions=(P_range, P_domain),
            expected="the Layout of x, or a LinearMap; and the Layout of b, where not all ranks of x have some of it",
            actual=type(A).__name__,
            next_step="lsqr(A, b, dd.Layout(P_range, the shape of b), dd.Layout(P_domain, the shape of x))",
        )


def _bidiagonal(
    A: Numbers,
    normal: Blocks,
    inner: Inner,
    b: torch.Tensor,
    damp: float,
    tol: float,
    max_iter: int | None,
    P: Place,
) -> tuple[Any, ...]:
    """(x, steps, relative residual, whether it converged; whether there are fewer equations than unknowns), of numbers.

    At the end the residual is worked out anew, and reduced by conjugate gradients where it is not what was foretold.
    """
    lead = b.dim() - len(A.out_shape)
    v = A.adjoint(b)
    found = inner([(b, b), (v, v), (ones := torch.ones_like(b), ones), (ones := torch.ones_like(v), ones)], lead)
    rows, columns = (int(n.max()) if n.numel() else 0 for n in found[2:])
    beta, size = found[0].sqrt(), found[1].sqrt()  # ‖b‖, ‖Aᴴ b‖
    limit = 10 * min(rows, columns) if max_iter is None else max_iter
    u, alpha = each(quotient(torch.ones_like(beta), beta, beta > 0), b) * b, quotient(size, beta, beta > 0)
    v = each(quotient(torch.ones_like(size), size, size > 0), v) * v
    x, w, k = torch.zeros_like(v), v, 0
    phi_, rho_, steps, work = beta, alpha, torch.zeros_like(beta, dtype=torch.int64), (size > 0)
    while bool((work := work & (steps < limit)).any()):
        k += 1
        u = A(v) - each(alpha, u) * u
        (square,) = inner([(u, u)], lead)
        beta = square.sqrt()
        u = each(quotient(torch.ones_like(beta), beta, beta > 0), u) * u
        v = A.adjoint(u) - each(beta, v) * v
        (square,) = inner([(v, v)], lead)
        alpha = square.sqrt()
        v = each(quotient(torch.ones_like(alpha), alpha, alpha > 0), v) * v
        rho1 = torch.hypot(rho_, torch.full_like(rho_, damp))
        phi_ = quotient(rho_, rho1, rho1 > 0) * phi_
        rho = torch.hypot(rho1, beta)
        c, s = quotient(rho1, rho, rho > 0), quotient(beta, rho, rho > 0)
        phi, phi_, theta, rho_ = c * phi_, s * phi_, s * alpha, -c * alpha
        relative = quotient(phi_ * alpha * c.abs(), size, size > 0)
        if not bool((relative + phi).isfinite().all()):
            raise stop("numbers that are not finite", P, k, relative + phi, "finite A x and Aᴴ y", "look at A and b")
        x = x + each(quotient(phi, rho, work), x) * w
        w, steps = v - each(quotient(theta, rho, rho > 0), w) * w, steps + work
        work = work & (relative > tol)
    x, more, relative, converged = iterate(normal, None, inner, A.adjoint(b), x, lead, tol, max(limit - k, 0), P)
    return x, steps + more, relative, converged, rows < columns
