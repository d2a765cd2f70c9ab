"""Minimisation by L-BFGS, with a line search for the strong Wolfe conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.func import grad_and_value

from .. import _torch
from .._types import Dims, Place, Tree
from ..errors import ShapeError, SolverError
from ..partition import partition_of
from ..ties import is_smooth
from .operator import Inner

__all__ = ["Descent", "lbfgs"]

Progress = Callable[[int, float, float], Any]


class Descent(NamedTuple):
    """How a minimisation ended, equal on all ranks.

    Attributes:
        iterations: how many steps were taken.
        value: of the function, summed over ranks.
        gradient: its gradient's norm.
        converged: whether that is within the tolerance.

    A plain tuple of numbers: no messages, no errors.

    Example:
        >>> P = dd.Partition((1,))
        >>> x, found = dd.solve.lbfgs(lambda x: F.dist_sum((x - 3) ** 2, P), torch.zeros(2), P, steps=10)
        >>> isinstance(found, dd.solve.Descent), found.iterations, found.converged
        (True, 2, True)
    """

    iterations: int
    value: float
    gradient: float
    converged: bool


def lbfgs(
    f: Callable[[Any], torch.Tensor],
    x0: Tree,
    P: Place,
    *,
    steps: int,
    history: int = 10,
    tol: float = 1e-8,
    loss: str = "invariant",
    dims: Dims = None,
    progress: Progress | None = None,
) -> tuple[Tree, Descent]:
    """A minimum of ``f`` near ``x0``, by L-BFGS.

    Args:
        f: x -> a scalar without dims, exchanging messages as it likes.
        x0: a tensor or a pytree of real tensors of one dtype: this rank's blocks.
        P: the ranks, and ``dims`` those of its dims, along which x varies (None: all; ``()``: x is one value on every
            rank, as weights are).
        steps: the most steps.
        history: how many pairs of steps and changes of the gradient are kept.
        tol: the norm of the gradient to reach, relative to that at x0.
        loss: "invariant": f is one value on every rank, as of F.dist_sum and the losses. "varying": f is this rank's
            summand. In both cases what is minimised is the sum, in which an invariant value counts once.
        progress: called as ``progress(step, value, gradient norm)`` after each step, on every rank.

    Returns:
        x: as x0, a constant: derivatives of a minimum are those of the equation that its gradient is zero, which
        :func:`cg` solves with Hessian-vector products. The second result is a :class:`Descent`.

    Messages: those of f and its gradient, once for each trial of the line search (mostly one), and with it one
    all-reduce of 2 or 3 numbers. A step has one more, of at most 6 ``history`` numbers: all inner products of the
    two-loop recursion (Nocedal and Wright, *Numerical optimization*, 2006, algorithms 7.4, 3.5 and 3.6), which then
    runs on numbers.

    Raises:
        SolverError: on every rank: f or its gradient is not finite at x0, or the call is made inside of torch.func.
        ShapeError: x0 has no real tensors, or f does not return a scalar.

    Example:
        >>> P = dd.Partition((1,))
        >>> x, found = dd.solve.lbfgs(lambda x: F.dist_sum((x - 3) ** 2, P), torch.zeros(2), P, steps=10)
        >>> x.round(decimals=3), found.converged
        (tensor([3., 3.]), True)
    """
    if _torch.transforms_active():
        raise SolverError(
            "a minimum has no derivative here",
            partitions=P,
            expected="a call outside of torch.func",
            actual="grad, vjp, jvp or vmap",
            next_step="take the minimum first; derive it from grad(f) = 0, by dd.solve.cg",
        )
    if loss not in ("invariant", "varying"):
        raise ShapeError(
            "unknown kind of loss",
            partitions=P,
            expected='"invariant" or "varying"',
            actual=loss,
            next_step='see "The cotangent convention" in the documentation',
        )
    leaves, tree = _torch.flatten(x0)
    if not leaves or len({t.dtype for t in leaves if is_smooth(t) and not t.is_complex()}) != 1:
        raise ShapeError(
            "x0 is not made of real tensors of one dtype",
            partitions=P,
            expected="a tensor, or a pytree of them",
            actual=[getattr(t, "dtype", type(t).__name__) for t in leaves],
            next_step="split complex numbers into real ones: torch.view_as_real",
        )
    if not partition_of(P).active:
        return x0, Descent(0, 0.0, 0.0, True)
    function = _Function(f, leaves, tree, Inner(P, dims=dims), loss, P)
    x, found = _descend(function, steps, history, tol, progress)
    return _torch.unflatten(function.split(x), tree), found


class _Trial(NamedTuple):
    """A point on the line: how far, the value, the slope, the gradient, and its square."""

    t: float
    value: float
    slope: float
    gradient: torch.Tensor
    square: float


class _Function:
    """f as a function of one vector, and its inner products."""

    def __init__(self, f: Any, leaves: list[torch.Tensor], tree: Any, inner: Inner, loss: str, P: Place) -> None:
        self.f, self.tree, self.inner, self.loss, self.P = f, tree, inner, loss, P
        self.shapes = [t.shape for t in leaves]
        self.start = torch.cat([t.detach().reshape(-1) for t in leaves])

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes]
        return [part.reshape(shape) for part, shape in zip(x.split(sizes), self.shapes)]

    def dots(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """⟨x, y⟩ of pairs, over all ranks."""
        return torch.stack(self.inner(pairs, 0)).tolist()

    def at(self, x: torch.Tensor, t: float, p: torch.Tensor) -> _Trial:
        """f at x + t p."""

        def scalar(x: torch.Tensor) -> torch.Tensor:
            y = self.f(_torch.unflatten(self.split(x), self.tree))
            if not isinstance(y, torch.Tensor) or y.dim():
                raise ShapeError(
                    "f does not return a scalar",
                    partitions=self.P,
                    expected="a tensor without dims",
                    actual=tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__,
                    next_step="sum it: F.dist_sum(y, P), or y.sum() with loss='varying'",
                )
            return y

        g, value = grad_and_value(scalar)(x + t * p)
        if self.loss == "invariant":
            slope, square = self.dots([(g, p), (g, g)])
            return _Trial(t, float(value), slope, g, square)
        slope, square, total = self.dots([(g, p), (g, g), (value, torch.ones_like(value))])
        return _Trial(t, total, slope, g, square)


def _descend(
    f: _Function, steps: int, history: int, tol: float, progress: Progress | None
) -> tuple[torch.Tensor, Descent]:
    x, memory = f.start, _Memory(f, history)
    now = f.at(x, 0.0, torch.zeros_like(x))
    if not math.isfinite(now.value) or not math.isfinite(now.square):
        raise SolverError(
            "f is not finite where it begins",
            partitions=f.P,
            expected="a finite value and gradient at x0",
            actual=f"iteration 0, value {now.value:.3g}, gradient norm {math.sqrt(max(now.square, 0)):.3g}",
            next_step="begin elsewhere",
        )
    goal, k = tol**2 * now.square, 0
    while k < steps and now.square > goal:
        p, slope = memory.direction(now.gradient, now.square)
        first = 1.0 if memory.vectors else min(1.0, 1 / math.sqrt(now.square))
        found = _line_search(f, x, p, now._replace(t=0.0, slope=slope), first)
        if found is None:  # rounding leaves nothing to gain
            break
        k += 1
        memory.keep(found.t * p, found.gradient - now.gradient)
        x, now = x + found.t * p, found
        if progress is not None:
            progress(k, now.value, math.sqrt(now.square))
    return x, Descent(k, now.value, math.sqrt(now.square), now.square <= goal)


class _Memory:
    """Pairs of steps s and changes y of the gradient, and inner products of all of them and the gradient g: with these
    the recursion runs on coefficients, and asks nobody."""

    def __init__(self, f: _Function, history: int) -> None:
        self.f, self.history, self.made = f, history, 0
        self.vectors: dict[_Name, torch.Tensor] = {}
        self.products: dict[tuple[_Name, _Name], float] = {}

    def keep(self, s: torch.Tensor, y: torch.Tensor) -> None:
        """One more pair; the oldest goes."""
        self.made += 1
        self.vectors |= {("s", self.made): s, ("y", self.made): y}
        for old in [name for name in self.vectors if 0 < name[1] <= self.made - self.history]:
            del self.vectors[old]

    def direction(self, g: torch.Tensor, square: float) -> tuple[torch.Tensor, float]:
        """(p = -H g, its slope ⟨g, p⟩)."""
        k = self.made
        if ("s", k) not in self.vectors:  # the first step, or all is forgotten
            return -g, -square
        self.vectors[G] = g
        names, newest = list(self.vectors), (("s", k), ("y", k), G)
        new = {(a, b): (self.vectors[a], self.vectors[b]) for a in newest for b in names}
        for (a, b), number in zip(new, self.f.dots(list(new.values()))):
            self.products[a, b] = self.products[b, a] = number
        self.products = {pair: number for pair, number in self.products.items() if set(pair) <= set(names)}
        q = dict.fromkeys(names, 0.0) | {G: 1.0}  # coefficients

        def with_q(a: _Name) -> float:
            return sum(c * self.products[a, b] for b, c in q.items() if c)

        kept, along = [i for kind, i in names if kind == "s"], {}
        if min(self.products[("s", i), ("y", i)] for i in kept) > 0:  # the Wolfe conditions make it so
            for i in reversed(kept):
                along[i] = with_q(("s", i)) / self.products[("s", i), ("y", i)]
                q["y", i] -= along[i]
            scale = self.products[("s", k), ("y", k)] / self.products[("y", k), ("y", k)]
            q = {name: scale * c for name, c in q.items()}
            for i in kept:
                q["s", i] += along[i] - with_q(("y", i)) / self.products[("s", i), ("y", i)]
            slope = -with_q(G)
            if slope < 0:
                return -torch.stack([c * self.vectors[name] for name, c in q.items()]).sum(0), slope
        self.vectors = {}  # rounding: it begins anew
        return -g, -square


_Name = tuple[str, int]
G: _Name = ("g", 0)
DECREASE, CURVATURE, TRIALS = 1e-4, 0.9, 25


def _line_search(f: _Function, x: torch.Tensor, p: torch.Tensor, start: _Trial, first: float) -> _Trial | None:
    """A step with f(x + tp) <= f(x) + c₁ t slope and |slope there| <= c₂ |slope|; ``None`` where none is found. What
    is not finite counts as too far."""
    low, high, t = start, None, first
    for _ in range(TRIALS):
        new = f.at(x, t, p)
        finite = math.isfinite(new.value) and math.isfinite(new.square)
        # values that are equal to rounding are compared by their slopes
        rounding = 10 * torch.finfo(x.dtype).eps * abs(start.value)
        if not finite or new.value > start.value + DECREASE * t * start.slope + rounding or (
            new.value > low.value + rounding and low.t
        ):  # fmt: skip
            high = new if finite else new._replace(value=math.inf)
        elif abs(new.slope) <= CURVATURE * abs(start.slope):
            return new
        else:
            if new.slope * ((high.t if high else math.inf) - new.t) >= 0:
                high = low
            low = new
        if high is None:
            t = 2 * new.t
        else:
            t = _between(low, high)
            if not min(low.t, high.t) < t < max(low.t, high.t):
                break
    return low if low.t else None


def _between(a: _Trial, b: _Trial) -> float:
    """Where the cubic through two values and slopes is least, not too near to either end; the middle, where there is
    none."""
    width, middle = b.t - a.t, (a.t + b.t) / 2
    if not math.isfinite(b.value):
        return a.t + width / 10
    d = a.slope + b.slope - 3 * (a.value - b.value) / (a.t - b.t)
    inside = d * d - a.slope * b.slope
    if inside < 0:
        return middle
    root = math.copysign(math.sqrt(inside), width)
    below = b.slope - a.slope + 2 * root
    t = b.t - width * (b.slope + root - d) / below if below else middle
    edge = 0.1 * abs(width)
    return t if min(a.t, b.t) + edge <= t <= max(a.t, b.t) - edge else middle
