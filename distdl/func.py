"""Transforms across ranks: what local torch.func.jacrev and friends cannot mean.

A local ``jacrev`` under SPMD takes the ranks' k-th outputs together, so it mixes rows, and hangs where local sizes
differ. These go over the *global* basis: one batched derivative for all ranks, equal to the serial Jacobian block by
block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import grad, jvp, vjp, vmap

from . import _torch
from ._arguments import check_functions
from ._types import Dims, Place, Tree
from .boxes import is_int
from .calls import public
from .errors import PartitionError, ShapeError
from .movement.copies import invariant_sum
from .partition import Layout, partition_of

__all__ = ["hessian", "hvp", "inner", "jacfwd", "jacrev", "linear_transpose"]


def _basis(layout: Layout, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """This rank's blocks of the global basis vectors ``start .. stop - 1``: (stop - start, *local shape)."""
    # A rank outside has no element, in whatever shape.
    local = layout.local_shape() if layout.active else tuple(like.shape)
    basis = like.new_zeros((stop - start, math.prod(local)))
    if layout.active and basis.numel():
        places = torch.zeros((), dtype=torch.int64)
        for (first, last), n in zip(layout.box(), layout.shape):
            places = places.unsqueeze(-1) * n + torch.arange(first, last)
        places = places.reshape(-1)  # global number of each local element
        ours = ((places >= start) & (places < stop)).nonzero().reshape(-1)
        basis[(places[ours] - start).to(like.device), ours.to(like.device)] = 1
    return basis.reshape(stop - start, *local)


def _check(layout: Layout, block: Any, what: str) -> None:
    """Raise unless ``block`` is one tensor, this rank's block of ``layout``."""
    if not isinstance(layout, Layout):
        raise PartitionError(
            "the global basis needs a global shape",
            expected=f"the Layout of {what}",
            actual=layout,
            next_step=f"dd.Layout(P, the global shape of {what})",
        )
    if not isinstance(block, torch.Tensor) or (
        block.shape != layout.local_shape() and (layout.active or block.numel())
    ):
        actual = tuple(block.shape) if isinstance(block, torch.Tensor) else type(block).__name__
        raise ShapeError(
            f"{what} is not this rank's block",
            actual=actual,
            expected=f"a tensor of shape {layout.local_shape()}",
            next_step=f"pass the layout that {what} has",
        )


def _cat(trees: Sequence[Any]) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Any]]:
    """Pytrees of tensors, joined along the first axis leaf by leaf; and a function from leaves back to the pytree."""
    flat = [_torch.flatten(tree) for tree in trees]
    rows = [torch.cat(leaves) for leaves in zip(*(leaves for leaves, _ in flat))]
    return rows, lambda leaves: _torch.unflatten(leaves, flat[0][1])


def _chunks(layout: Layout, chunk_size: int | None) -> list[tuple[int, int]]:
    if chunk_size is not None and (not is_int(chunk_size) or chunk_size < 1):
        raise ShapeError(
            "chunk_size is not a number of rows",
            expected="at least 1",
            actual=chunk_size,
            next_step="leave it out for all at once",
        )
    total = math.prod(layout.shape)
    step = max(total if chunk_size is None else chunk_size, 1)
    return [(k, min(k + step, total)) for k in range(0, total, step)] or [(0, 0)]


def jacrev(f: Callable[..., Any], L_out: Layout, *, chunk_size: int | None = None) -> Callable[[Any], Any]:
    """The Jacobian of ``f`` by reverse mode, this rank's columns of it.

    Args:
        f: this rank's block of x -> this rank's block of y (varying), exchanging messages as it likes.
        L_out: layout of y.
        chunk_size: how many rows at once; bounds memory. Default: all.

    Returns:
        A function of x, a tensor or a pytree of tensors, giving (*global y shape, *local x shape), for a pytree one for
        each leaf.

    Raises:
        PartitionError, ShapeError: ``L_out`` is no Layout, or not that of y.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (2,))
        >>> dd.func.jacrev(lambda x: x**2, L)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])
    """

    def jacobian(x: Any) -> Any:
        y, pull = vjp(f, x)[:2]
        _check(L_out, y, "y")
        rows, tree = _cat([vmap(lambda c: pull(c)[0])(_basis(L_out, a, b, y)) for a, b in _chunks(L_out, chunk_size)])
        return tree([leaf.reshape((*L_out.shape, *leaf.shape[1:])) for leaf in rows])

    return jacobian


def jacfwd(f: Callable[..., Any], L_in: Layout, *, chunk_size: int | None = None) -> Callable[[torch.Tensor], Any]:
    """The Jacobian of ``f`` by forward mode, this rank's rows of it: a function of x giving (*local y shape, *global x
    shape).

    Args:
        f, chunk_size: as for :func:`jacrev`, chunks of columns here.
        L_in: layout of x, which is one tensor; y may be a pytree, and so is the result then.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (2,))
        >>> dd.func.jacfwd(lambda x: x**2, L)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])
    """

    def jacobian(x: Any) -> Any:
        _check(L_in, x, "x")
        push = vmap(lambda t: jvp(f, (x,), (t,))[1])  # not out_dims=-1: torch then misplaces tangents that are constant
        rows, tree = _cat([push(_basis(L_in, a, b, x)) for a, b in _chunks(L_in, chunk_size)])
        return tree([leaf.movedim(0, -1).reshape((*leaf.shape[1:], *L_in.shape)) for leaf in rows])

    return jacobian


def hessian(
    loss: Callable[..., torch.Tensor], L: Layout, *, chunk_size: int | None = None
) -> Callable[[torch.Tensor], Any]:
    """The Hessian of an invariant scalar ``loss``, forward over reverse: x -> (*local x shape, *global x shape).

    ``L`` is the layout of x.

    Messages: those of the functions that it calls, each batch in one set; of ``inner`` one all-reduce.

    Raises:
        PartitionError, ShapeError: a layout that is not x's, or trees of tensors that do not fit together.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (2,))
        >>> dd.func.hessian(lambda x: F.dist_sum(x**3, L), L)(torch.tensor([1.0, 2.0]))
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    return jacfwd(grad(loss), L, chunk_size=chunk_size)


def hvp(loss: Callable[..., torch.Tensor], x: Tree, v: Tree) -> Tree:
    """This rank's block of the Hessian of ``loss`` at ``x``, times ``v`` (blocks of one layout): forward over
    reverse.

    Messages: those of the functions that it calls, each batch in one set; of ``inner`` one all-reduce.

    Raises:
        PartitionError, ShapeError: a layout that is not x's, or trees of tensors that do not fit together.

    Example:
        >>> P, x = dd.Partition((1,)), torch.tensor([1.0, 2.0])
        >>> dd.func.hvp(lambda x: F.dist_sum(x**3, P), x, torch.ones(2))
        tensor([ 6., 12.])
    """
    return jvp(grad(loss), (x,), (v,))[1]


def inner(x: Any, y: Any, P: Place, dims: Dims = None) -> torch.Tensor:
    """⟨x, y⟩ = Σ conj(x) y, local and over the partition dims ``dims`` along which x and y vary (None: all). Invariant.

    For two invariant tensors the inner product is the local one: ``dims=()``. x and y may be pytrees, whose leaves add
    up.

    Messages: those of the functions that it calls, each batch in one set; of ``inner`` one all-reduce.

    Raises:
        PartitionError, ShapeError: a layout that is not x's, or trees of tensors that do not fit together.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> dd.func.inner(x, x, dd.Partition((1,)))
        tensor(5.)
    """
    (xs, structure), (ys, other) = _torch.flatten(x), _torch.flatten(y)
    if structure != other:
        raise ShapeError(
            "x and y are different pytrees",
            expected=structure,
            actual=other,
            next_step="give y the structure of x",
        )
    shapes = [[tuple(t.shape) for t in leaves] for leaves in (xs, ys)]
    if shapes[0] != shapes[1] or not xs:
        raise ShapeError(
            "x and y have different shapes, or no tensors",
            expected=shapes[0],
            actual=shapes[1],
            next_step="pass two tensors of one shape, this rank's blocks of one layout",
        )
    local = sum((a.conj() * b).sum() for a, b in zip(xs, ys))
    return invariant_sum(local, partition_of(P), dims)


def linear_transpose(f: Callable[..., Any], x: Any) -> Callable[[Any], Any]:
    """The transpose of a linear ``f`` as a function; ``x`` only gives shape, dtype and device.

    Messages: those of the functions that it calls, each batch in one set; of ``inner`` one all-reduce.

    Raises:
        PartitionError, ShapeError: a layout that is not x's, or trees of tensors that do not fit together.

    Example:
        >>> dd.func.linear_transpose(lambda x: x.cumsum(0), torch.zeros(3))(torch.tensor([1.0, 0.0, 2.0]))
        tensor([3., 2., 2.])
    """
    pull = vjp(f, x)[1]
    return lambda y: pull(y)[0]


public({name: globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
