"""What iterations are made of: a linear function of blocks as numbers, and inner products over all ranks.

An iteration runs on plain tensors, outside of all transforms: nothing of it is recorded, and a vmap's batch is one more
axis of everything, so that ranks decide together when all its examples are done (:func:`distdl._torch.constants`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.func import vjp, vmap

from .. import _torch, maps
from .._types import Dims, Place
from ..errors import ShapeError, SolverError
from ..functional.numeric import wide
from ..linear_map import LinearMap
from ..partition import Layout, Partition, partition_of
from ..remat import Reach

Blocks = Callable[[torch.Tensor], torch.Tensor]


class Info(NamedTuple):
    """How an iteration ended, equal on all ranks; under vmap one entry for each example.

    Attributes:
        iterations: how many steps were taken (int64).
        residual: what is left, relative to what there was; which residual, says the function.
        converged: whether that is within the tolerance. A rank outside of the partition: yes, after 0 steps.

    A plain tuple of numbers: no messages, no errors.

    Example:
        >>> x, info = dd.solve.cg(lambda x: 2 * x, torch.tensor([2.0, 4.0]), dd.Partition((1,)))
        >>> isinstance(info, dd.solve.Info), info.iterations, info.converged
        (True, tensor(1), tensor(True))
    """

    iterations: torch.Tensor
    residual: torch.Tensor
    converged: torch.Tensor


def nothing_to_do(like: torch.Tensor) -> Info:
    """The info of a rank that takes no part."""
    zero = torch.zeros((), dtype=torch.int64, device=like.device)
    return Info(zero, torch.zeros((), dtype=real(like), device=like.device), zero == 0)


def real(x: torch.Tensor) -> torch.dtype:
    """The dtype of an inner product of x and x."""
    return wide(torch.empty(0, dtype=x.dtype)).abs().dtype


class Inner:
    """Inner products over the ranks of partitions: real parts of ⟨x, y⟩ = Σ conj(x) y.

    All ranks of all the partitions have the results, whoever holds the vectors, to the last bit.
    """

    def __init__(self, *places: Place, dims: Dims = None) -> None:
        grids = [partition_of(P) for P in places]
        if len(set(grids)) == 1:
            self.grid, self.dims = grids[0], dims
        else:
            ranks = tuple(sorted({r for grid in grids for r in grid.ranks}))
            self.grid, self.dims = Partition((len(ranks),), ranks, grids[0].world), None

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], lead: int) -> tuple[torch.Tensor, ...]:
        """One number of each pair, for each example along the first ``lead`` axes: one all-reduce for all of them."""
        local = torch.stack([_dot(x, y, lead) for x, y in pairs])
        return maps.invariant_sum(self.grid, tuple(local.shape), self.dims)(local).unbind(0)


def _dot(x: torch.Tensor, y: torch.Tensor, lead: int) -> torch.Tensor:
    product = wide(x).conj() * wide(y)
    return (product.real if product.is_complex() else product).flatten(lead).sum(-1) if x.dim() > lead else product.real


def each(number: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A number (or a truth) of each example, to meet all of it: in x's dtype, with as many dims."""
    number = number if number.dtype == torch.bool else number.to(x.dtype)
    return number.reshape(*number.shape, *(1,) * (x.dim() - number.dim()))


def quotient(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """a / b where that is wanted, else 0."""
    return torch.where(where, a / torch.where(where, b, 1), 0)


def constants_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors inside, as constants; those of a vmap with its examples along their first axes."""
    found: list[torch.Tensor] = []

    def keep(*plain: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found.extend(plain)
        return ()

    _torch.constants(keep, tensors)
    return found


class Numbers:
    """A linear function of this rank's block, as a function of plain tensors with any number of leading axes.

    Under torch.func the tensors that it closes over (or its modules hold) may belong to transforms. Here they are the
    plain ones inside, and those of a vmap have its batch for their first axes, as x then has too.

    Args:
        A: a function, or a LinearMap.
        shape: of this rank's block of x.
    """

    def __init__(self, A: Blocks, shape: Sequence[int], out_shape: Sequence[int] | None = None) -> None:
        self.A, self.shape = A, tuple(shape)
        self.out_shape = self.shape if out_shape is None else tuple(out_shape)
        self.reach = Reach(A)
        self.held: list[torch.Tensor] = []
        self.buffers = self.reach.buffers()
        self.levels = len(_torch.vmap_levels()) if _torch.transforms_active() else 0
        reached = [*self.buffers, *self.reach.others()] if _torch.transforms_active() else []
        self.batched = [_torch.of_torch_func(t) for t in reached]  # others stay as they are: what counts need not vary
        if any(self.batched):
            kept = iter(constants_of([t for t, of in zip(reached, self.batched) if of]))
            self.held = [next(kept) if of else t for t, of in zip(reached, self.batched)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A x."""
        return self._run(self._apply, x, self.shape)

    def adjoint(self, y: torch.Tensor) -> torch.Tensor:
        """Aᴴ y."""
        return self._run(self._pull, y, self.out_shape)

    def _apply(self, x: torch.Tensor) -> torch.Tensor:
        y = self.A(x)
        check(y, self.out_shape, "A")
        return y

    def _pull(self, y: torch.Tensor) -> torch.Tensor:
        if isinstance(self.A, LinearMap):
            return self.A.T(y)
        start: torch.Tensor = torch.zeros(self.shape, dtype=y.dtype, device=y.device)
        return vjp(self._apply, start)[1](y)[0]

    def _run(self, f: Blocks, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        lead = x.dim() - len(shape)

        def once(x: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
            if not held:
                return f(x)
            rest = iter(held[len(self.buffers) :])
            with self.reach.replaced(iter(held[: len(self.buffers)]), rest):
                return f(x)

        mapped: Callable[..., torch.Tensor] = once
        for axis in reversed(range(lead)):
            theirs = [0 if of and axis < self.levels else None for of in self.batched[: len(self.held)]]
            mapped = vmap(mapped, in_dims=(0, *theirs))
        try:
            return mapped(x, *self.held)
        except RuntimeError as error:
            if not _torch.escaped(error):
                raise
            raise ShapeError(
                "A reaches a tensor that is batched by vmap, in a way that is not seen",
                expected="such tensors in closures (also in lists, dicts and tuples), or in modules",
                actual="an example of a vmap",
                next_step="let A be a function that closes over the tensor: lambda x: k * x",
            ) from error


def check(y: Any, shape: Sequence[int], what: str) -> None:
    """Raise unless y, which a user's function returned, is a block of this shape."""
    if not isinstance(y, torch.Tensor) or tuple(y.shape) != tuple(shape):
        raise ShapeError(
            f"{what} does not return a block of the expected shape",
            expected=tuple(shape),
            actual=tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__,
            next_step=f"let {what} be a function of this rank's block, and return this rank's block of the result",
        )


def check_block_of(b: Any, P: Place, what: str) -> None:
    """Raise unless b is a tensor that can be solved for: real or complex, and P's block."""
    if not isinstance(b, torch.Tensor) or not (b.is_floating_point() or b.is_complex()):
        raise ShapeError(
            f"{what} is not a block of real or complex numbers",
            partitions=P,
            expected="a floating or complex tensor",
            actual=b.dtype if isinstance(b, torch.Tensor) else type(b).__name__,
            next_step="pass this rank's block as a tensor; convert integers first",
        )
    if isinstance(P, Layout) and P.active and tuple(b.shape) != P.local_shape():
        raise ShapeError(
            f"{what} is not this rank's block",
            partitions=P,
            expected=P.local_shape(),
            actual=tuple(b.shape),
            next_step="pass layout.shard(the global tensor), or the partition where dims do not match",
        )


def stop(problem: str, P: Place, step: int, residual: torch.Tensor, wished: str, next_step: str) -> SolverError:
    """The error of an iteration that cannot go on: all ranks have these numbers."""
    found = residual.reshape(-1)
    worst = float(found[found.isnan().nonzero()[0, 0] if bool(found.isnan().any()) else found.argmax()])
    return SolverError(
        problem,
        partitions=P,
        expected=wished,
        actual=f"iteration {step}, relative residual {worst:.3g}",
        next_step=next_step,
    )
