"""Eigenvalues at the ends of a spectrum, by Lanczos' method."""

from __future__ import annotations

import torch

from .._types import Place
from ..errors import ShapeError
from ..functional.enter import outside
from ..functional.numeric import wide
from ..movement.copies import invariant_sum, mark_varying
from ..partition import Layout, partition_of
from .operator import Blocks, check, check_block_of, constants_of, stop

__all__ = ["lanczos"]


def lanczos(A: Blocks, v0: torch.Tensor, P: Place, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k Ritz pairs of a symmetric (Hermitian) A in the Krylov space of v0, Av0, ..., A^(k-1) v0.

    Args:
        A: a LinearMap, or a linear function of this rank's block.
        v0: this rank's block of the vector to begin with, any shape, not zero in all.
        P: the ranks, over which it varies.
        k: how many steps. The ends of the spectrum converge first; with as many steps as unknowns all are eigenpairs.

    Returns:
        eigenvalues: (k,), rising, one value on every rank (invariant). vectors: (k, \\*v0's shape), this rank's blocks:
        of norm 1, orthogonal, with a positive inner product with v0. **Fewer** than k where the Krylov space is
        exhausted: these are eigenpairs then. (Inside vmap an error: its examples have one shape.)

    Differentiable as the function of A and v0 that it is, through all steps; what is kept for that is k vectors.

    Messages: those of A, and two all-reduces a step: each vector is made orthogonal to all before it, twice, which
    keeps k of them orthogonal to rounding (Parlett, *The symmetric eigenvalue problem*, 1980); at the beginning one.

    Raises:
        SolverError: on every rank: numbers that are not finite, v0 is zero, or a space that is exhausted inside vmap.
        ShapeError: v0 is not this rank's block, no number of steps, or A does not return a block.

    Example:
        >>> A, P = torch.tensor([1.0, 3.0]), dd.Partition((1,))
        >>> values, vectors = dd.solve.lanczos(lambda x: A * x, torch.ones(2), P, 2)
        >>> values.round(decimals=3)
        tensor([1., 3.])
    """
    grid = partition_of(P)
    if k < 1:
        raise ShapeError("no steps", partitions=P, expected="k >= 1", actual=k, next_step="lanczos(A, v0, P, 20)")
    check_block_of(v0, P if grid.active else grid, "v0")
    if grid.index() is None:
        zeros = outside(v0, like=P if isinstance(P, Layout) else None)
        return wide(zeros).abs().flatten(), zeros[None][:0]

    def summed(numbers: torch.Tensor) -> torch.Tensor:
        return invariant_sum(numbers, grid)

    def dot(vectors: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """This rank's share of ⟨v, w⟩ for each of the vectors."""
        return wide(vectors).flatten(1).conj() @ wide(w).flatten()

    def combined(numbers: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        numbers = mark_varying(numbers, grid).to(vectors.dtype)
        return (numbers[:, None] * vectors.flatten(1)).sum(0).reshape(vectors.shape[1:])

    length = summed(_square(v0)).sqrt()
    _look(length, length, P, 0)
    vectors = (v0 / mark_varying(length, grid))[None]
    diagonal, beside = [], []
    while True:
        step = len(diagonal)
        w = A(vectors[step])
        check(w, v0.shape, "A")
        first = summed(dot(vectors, w))
        w = w - combined(first, vectors)
        numbers = summed(torch.cat([dot(vectors, w), _square(w)[None].to(first.dtype)]))
        second, square = numbers[:-1], numbers[-1]
        w = w - combined(second, vectors)
        diagonal.append((first[step] + second[step]).real)
        left = square.real - (second * second.conj()).real.sum()
        if step + 1 == k or _exhausted(left, first, diagonal, P):
            break
        beside.append(left.sqrt())
        vectors = torch.cat([vectors, (w / mark_varying(beside[-1], grid).to(w.dtype))[None]])
    T = torch.diag(torch.stack(diagonal))
    if beside:
        off = torch.diag(torch.stack(beside), 1)
        T = T + off + off.T
    values, Y = torch.linalg.eigh(T)
    Y = Y * torch.where(Y[0].detach() < 0, -1, 1)
    mixed = mark_varying(Y, grid).T.to(vectors.dtype) @ vectors.flatten(1)
    return values, mixed.reshape(len(Y), *v0.shape)


def _square(w: torch.Tensor) -> torch.Tensor:
    """This rank's share of ‖w‖²."""
    w = wide(w)
    return (w * w.conj()).real.sum()


def _look(number: torch.Tensor, length: torch.Tensor, P: Place, step: int) -> None:
    """Raise where the first vector has no direction."""
    (plain,) = constants_of([length])
    if not bool((plain.isfinite() & (plain > 0)).all()):
        raise stop("v0 is zero, or not finite", P, step, plain, "a vector", "draw v0 at random, the same on any P")


def _exhausted(left: torch.Tensor, products: torch.Tensor, diagonal: list[torch.Tensor], P: Place) -> bool:
    """Whether what is left of A v is rounding, for all examples."""
    size, whole = constants_of([left, (products * products.conj()).real.sum()])
    if not bool((size.isfinite() & whole.isfinite()).all()):
        raise stop("numbers that are not finite", P, len(diagonal), size + whole, "finite A x", "look at A and v0")
    eps = torch.finfo(size.dtype).eps
    done = size <= (len(diagonal) * 10 * eps) ** 2 * (whole + size)
    if bool(done.any()) and done.dim():
        raise stop(
            "the Krylov space of an example is exhausted, and examples have one shape",
            P, len(diagonal), size, "a space of k dims", "take fewer steps, or leave vmap",
        )  # fmt: skip
    return bool(done.any())
