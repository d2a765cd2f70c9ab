"""Conjugate gradients, with one all-reduce a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch
from .._types import Place
from ..errors import ShapeError
from ..functional.enter import outside
from ..partition import Layout, partition_of
from .implicit import attached, constant_map, solution
from .operator import Blocks, Info, Inner, Numbers, check_block_of, each, nothing_to_do, quotient, stop

__all__ = ["cg"]


def cg(
    A: Blocks,
    b: torch.Tensor,
    P: Place,
    *,
    x0: torch.Tensor | None = None,
    tol: float = 1e-8,
    max_iter: int | None = None,
    preconditioner: Blocks | None = None,
    order: int = 2,
) -> tuple[torch.Tensor, Info]:
    """The solution of A x = b for a symmetric (Hermitian), positive definite A, by conjugate gradients.

    Args:
        A: a LinearMap, or a linear function of this rank's block that exchanges messages as it likes. Derivatives reach
            whatever tensors it uses.
        b: this rank's block, any shape; real or complex.
        P: the ranks, over which b varies.
        x0: where to begin; ``None``: at 0. It has no influence on derivatives.
        tol: the residual ‖b - A x‖ to reach, relative to ‖b‖.
        max_iter: the most steps. ``None``: ten times the number of unknowns.
        preconditioner: a linear function of blocks near A's inverse, symmetric and positive definite itself.
        order: how many derivatives of the solution are right; each takes an application of A, and none of the steps is
            recorded. A further derivative would be wrong without a word: ask for one more here.

    Returns:
        x: this rank's block. info: the number of steps, the relative residual, worked out anew from b - A x at the end,
        and whether it is within ``tol``; steps that lead nowhere any more end the iteration, and do not raise.

    Messages: those of A and one all-reduce of 4 numbers (7 with a preconditioner) a step, and once more for the
    residual at the end. Under vmap as many, of all examples, until the last of them is done. Each derivative solves
    again, for another right side: the adjoint of the solution is the solution.

    The steps are those of Hestenes and Stiefel (1952); ⟨r, r⟩ of the next step is foretold from this step's products,
    ⟨r - αs, r - αs⟩ = ⟨r, r⟩ - 2α⟨r, s⟩ + α²⟨s, s⟩, and taken anew with the step after (Meurant, *Multitasking the
    conjugate gradient method*, 1987).

    Raises:
        SolverError: on every rank, at numbers that are not finite, or where A (or the preconditioner) is not positive.
        ShapeError: b is not this rank's block, or A does not return one.

    Example:
        >>> x, info = dd.solve.cg(lambda x: 2 * x, torch.tensor([2.0, 4.0]), dd.Partition((1,)))
        >>> x, bool(info.converged)
        (tensor([1., 2.]), True)
    """
    check_tolerance(P, tol, max_iter)
    if partition_of(P).index() is None:
        check_block_of(b, partition_of(P), "b")
        return outside(b, like=P if isinstance(P, Layout) else None), nothing_to_do(b)
    check_block_of(b, P, "b")
    if x0 is not None and (not isinstance(x0, torch.Tensor) or (x0.shape, x0.dtype) != (b.shape, b.dtype)):
        raise ShapeError(
            "x0 is not a block as b is",
            expected=(tuple(b.shape), b.dtype),
            actual=(tuple(x0.shape), x0.dtype) if isinstance(x0, torch.Tensor) else type(x0).__name__,
            next_step="leave it out to begin at 0",
        )
    inner, numbers = Inner(P), Numbers(A, b.shape)
    M = None if preconditioner is None else Numbers(preconditioner, b.shape)

    def run(b: torch.Tensor, *guess: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = b.dim() - len(numbers.shape)
        return iterate(numbers, M, inner, b, guess[0] if guess else None, lead, tol, max_iter, P)

    def solved(v: torch.Tensor) -> torch.Tensor:
        return solution(run(v))

    def left(x: torch.Tensor) -> torch.Tensor:
        return b - A(x)

    x, *info = _torch.constants(run, (b,) if x0 is None else (b, x0))
    S = constant_map(solved, solved, b.shape, inner.grid.ranks)
    constant = constant_map(numbers, numbers.adjoint, b.shape, inner.grid.ranks)
    return attached(x, left, S, constant, order), Info(*info)


def check_tolerance(P: Place, tol: float, max_iter: int | None) -> None:
    """Raise unless these say when to stop."""
    if not tol >= 0 or (max_iter is not None and max_iter < 0):
        raise ShapeError(
            "no such tolerance, or number of steps",
            partitions=P,
            expected="tol >= 0, max_iter >= 0 or None",
            actual=(tol, max_iter),
            next_step="tol=1e-8; max_iter=None: ten times the number of unknowns",
        )


def iterate(
    A: Callable[[torch.Tensor], torch.Tensor],
    M: Callable[[torch.Tensor], torch.Tensor] | None,
    inner: Inner,
    b: torch.Tensor,
    x: torch.Tensor | None,
    lead: int,
    tol: float,
    max_iter: int | None,
    P: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, steps, relative residual, whether it converged) of each example along the first ``lead`` axes, of numbers.

    An example that is done keeps its x, while others go on. What was foretold drifts: at the end the residual is worked
    out anew, and an example that is not done after all begins again from where it is, as long as that helps.
    """
    r = b if x is None else b - A(x)
    x = torch.zeros_like(b) if x is None else x
    u = r if M is None else M(r)
    p, k, first, last = u, 0, True, None
    while True:
        s = A(p)
        z = s if M is None else M(s)
        pairs = [(p, s), (r, u), (s, u), (s, z)]
        pairs += [] if M is None else [(r, r), (r, s), (s, s)]
        if first:
            ones = torch.ones_like(b)
            *found, size, total = inner([*pairs, (b, b), (ones, ones)], lead)
            first, goal = False, size * tol**2
            # of what was foretold: what is less than that is worked out of rounding
            floor = size * max(tol, torch.finfo(size.dtype).eps ** 1.5) ** 2
            limit = int(10 * total.max()) if max_iter is None and total.numel() else max_iter or 0
            steps = torch.zeros_like(size, dtype=torch.int64)
            rr = found[1] if M is None else found[4]
            work = (rr > goal) & (steps < limit) & (size > 0)
        else:
            found = list(inner(pairs, lead))
        d, ru, su, sz = found[:4]
        rr, rs, ss = (ru, su, sz) if M is None else found[4:]
        work = work & (rr > floor)
        relative = quotient(rr, size, size > 0).clamp(min=0).sqrt()
        if not bool(torch.stack([rr, d, ru]).isfinite().all()):
            raise stop("numbers that are not finite", P, k, quotient(rr, size, size != 0), "finite A x", "look at A, b")
        if bool((work & (d <= 0)).any()):
            raise stop("A is not positive definite", P, k, relative, "⟨p, A p⟩ > 0", "lsqr takes any A; or add a shift")
        if bool((work & (ru <= 0)).any()):
            raise stop(
                "the preconditioner is not positive definite", P, k, relative, "⟨r, M r⟩ > 0", "leave it out to compare"
            )
        if bool(work.any()):
            k += 1
            a = quotient(ru, d, work)
            x, r, steps = x + each(a, x) * p, r - each(a, r) * s, steps + work
            u = r if M is None else u - each(a, u) * z
            work = work & (rr - 2 * a * rs + a**2 * ss > floor) & (steps < limit)
            if bool(work.any()):
                beta = quotient(ru - 2 * a * su + a**2 * sz, ru, work)
                beta = torch.where(beta > torch.finfo(beta.dtype).eps ** 0.5, beta, 0)  # less is rounding
                p = u + each(beta, u) * p
                continue
        elif last is None and not bool((size > 0).any()):  # of zeros alone the solution is zero
            return torch.zeros_like(b), steps, relative, relative <= tol
        r = b - A(x)
        (rr,) = inner([(r, r)], lead)
        relative = quotient(rr, size, size > 0).sqrt()
        work = (rr > goal) & (steps < limit)
        work = work if last is None else work & (rr < last / 4)
        if not bool(work.any()):
            return torch.where(each(size > 0, x), x, 0), steps, relative, (rr <= goal) | (size == 0)
        u = r if M is None else M(r)
        p, last = u, rr
