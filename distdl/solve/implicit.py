"""Derivatives of what an iteration found: by the equation that it solves, and not through its steps.

x₀ is the solution as a constant, g(x) = b - A(x) what it leaves, differentiable in all that b and A depend on, S the
solver as a linear map, and A₀ the operator as one: both constants. Then::

    d₀ = 0,      d_{k+1} = S(g(x₀ + d_k) + A₀ d_k, less its value),      x = x₀ + d_k

is x₀ in value, and its first k derivatives are those of the solution: differentiate A(x) = b k times, and what stands
right of each A x⁽ᵏ⁾ is what S is applied to. Reverse mode solves once for the cotangent: in g and in A₀ d_k the
cotangents of a d before the last cancel, and S of zero is zero at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from .. import _torch
from ..linear_map import LinearMap, linear_map
from .operator import Blocks


def followed() -> bool:
    """Whether somebody may take a derivative of what is worked out here: the same on every rank."""
    return torch.is_grad_enabled() or _torch.transforms_active() or _torch.forward_mode_active()


def attached(x: torch.Tensor, left: Blocks, S: LinearMap, A: LinearMap, order: int) -> torch.Tensor:
    """The solution ``x`` of left(x) = 0, with its derivatives up to ``order``.

    Args:
        x: the solution, a constant.
        left: b - A(x), with all its derivatives.
        S: v -> the solution of A y = v.
        A: the operator, as a constant.
    """
    if not order or not followed():
        return x
    d = None
    for _ in range(order):
        v = left(x) if d is None else left(x + d) + A(d)
        d = S(v - v.detach())
    return x + d


def constant_map(f: Blocks, adjoint: Blocks, shape: Sequence[int], ranks: Sequence[int]) -> LinearMap:
    """f, on blocks of this shape, as a map of which nothing inside is recorded."""

    def quiet(f: Blocks) -> Blocks:
        def call(x: torch.Tensor) -> torch.Tensor:
            with _torch.unfollowed():
                return f(x)

        return call

    return linear_map(quiet(f), quiet(adjoint), shape, shape, ranks=ranks, batched=True)


def solution(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """x of (x, steps, relative residual, whether it converged): what a derivative is made of, which has no info."""
    x, steps, relative, converged = found
    if not bool(converged.all()):
        warnings.warn(
            f"the system of a derivative is solved to a relative residual of {float(relative.max()):.2g} only, after "
            f"{int(steps.max())} steps: take a larger tol, or more steps",
            RuntimeWarning,
            stacklevel=2,
        )
    return x
