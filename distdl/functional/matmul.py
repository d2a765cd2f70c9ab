"""Products of two matrices that are both split over a grid of ranks: SUMMA.

Over P = (p, q) rank (i, j) has a block of A, of B and of C = A B: the rows i of A and of C, the columns j of B and of
C. It lacks the rest of its rows of A, which the ranks of its row of the grid have, and the rest of its columns of B,
which those of its column have (van de Geijn and Watts, *SUMMA: scalable universal matrix multiplication algorithm*,
1997)::

    C_ij = (all-gather of A along the columns of the grid)_i  (all-gather of B along its rows)_j

The adjoint is the two reduce-scatters that belong to the gathers, of C' Bᵀ and Aᵀ C': the transposed SUMMAs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .._types import Place
from ..agree import check_tensor, resolve
from ..boxes import balanced, is_int
from ..errors import PartitionError, ShapeError
from ..linear_map import LinearMap, movement
from ..movement.call import laid_out, move, rule
from ..partition import Layout, as_layout, partition_of
from ..plan import Axis, Side
from ..remat import remat
from .autocast import autocast
from .enter import check_block, outside, supposed
from .numeric import wide

__all__ = ["dist_matmul", "matmul_layout"]


def dist_matmul(
    a: torch.Tensor, b: torch.Tensor, P: Place, *, panels: int = 1, shapes: Sequence[Any] | None = None
) -> torch.Tensor:
    """C = A B of matrices that are split alike: this rank's block of C.

    Args:
        a: (*batch, m, k), this rank's block over ``P``: rows over its last but one dim, columns over its last.
        b: (*batch, k, n), this rank's block over ``P`` too, in a's dtype. Batch dims are a's; where ``P`` does not
            split one, it may have size 1 in either, and is repeated.
        P: (*batch, rows, columns) of ranks, any grid; or the Layout of A.
        panels: k is gone through in so many steps, each of which gathers its part alone. A rank then has k / panels
            columns of A and rows of B at a time, and they are gathered again in backward instead of kept
            (:func:`distdl.remat`). Sums of half precision are taken in float32.
        shapes: the global shapes of A and of B, or a Layout of either; then nothing is negotiated.

    Returns:
        (*batch, m, n): this rank's block of C, of layout :func:`matmul_layout`.

    Messages: one set of two all-gathers: a to the others of this rank's row of the grid, b to those of its column;
    backward the two reduce-scatters, those of all ranks' C' Bᵀ and Aᵀ C'. With more panels each step has a set of its
    own, in which a rank sends what it has of that part of k, once more in backward.

    Raises:
        ShapeError: blocks that are not P's, another dtype of b, sizes that do not fit, or no number of panels.
        PartitionError: P has fewer than two dims.

    Example:
        >>> P, a = dd.Partition((1, 1)), torch.tensor([[1.0, 2.0]])
        >>> F.dist_matmul(a, a.T, P)
        tensor([[5.]])
    """
    grid = partition_of(P)
    if grid.ndim < 2:
        raise PartitionError(
            "matrices have rows and columns",
            expected="a partition of (*batch, rows, columns)",
            actual=grid.shape,
            next_step="give P one dim for each dim of a and b; 1: not split",
        )
    if not is_int(panels) or panels < 1:
        raise ShapeError(
            "not a number of panels", expected="at least 1", actual=panels, next_step="panels=1: all at once"
        )
    a, b = autocast("dist_matmul", grid.ndim, a, b)
    at = grid.index()
    for x in (a, b):
        if at is None:
            check_tensor(x, P)
    (a, b), found = _layouts(a, b, P, shapes)
    if found is None:
        sizes = (*a.shape[:-1], b.shape[-1]) if a.dim() == b.dim() == grid.ndim else (0,) * grid.ndim
        return outside(a, b, like=sizes)
    L_a, L_b = found
    L = matmul_layout(L_a, L_b)
    if at is None:
        return outside(a, b, like=L)
    check_block(a, L_a, "a")
    check_block(b, L_b, "b")
    if a.dtype != b.dtype:
        raise ShapeError(
            "a and b have different dtypes",
            expected=a.dtype,
            actual=b.dtype,
            next_step="convert one of them: b.to(a.dtype)",
        )
    k, row = L_a.shape[-1], grid.ndim - 2
    if panels == 1 or k < 2:
        return torch.matmul(*_parts(L_a, L_b, row, 0, k, a, b))
    product, start = None, 0
    for size in balanced(k, min(panels, k)):
        step = remat(torch.matmul, begin=partial(_parts, L_a, L_b, row, start, start + size))(a, b)
        product, start = wide(step) if product is None else product + wide(step), start + size
    return product.to(a.dtype)


def _layouts(a, b, P, shapes):
    """((a, b), the layouts of A and of B); no layouts on a rank that takes no part and has not heard of them."""
    grid = partition_of(P)
    if shapes is not None:
        places = [s if isinstance(s, Layout) else as_layout(grid, s) for s in shapes]
        if len(places) != 2 or any(L.partition != grid for L in places):
            raise ShapeError(
                "shapes are not those of A and B",
                expected=f"two global shapes, or Layouts over {grid}",
                actual=shapes,
                next_step="shapes=(A.shape, B.shape)",
            )
        return (a, b), places if not isinstance(P, Layout) else [as_layout(P, places[0].shape), places[1]]
    if isinstance(P, Layout):
        (b,), of_b = resolve([b], grid)
        if of_b is None:
            b, L_b = supposed(b, grid)
            of_b = [L_b if L_b is not None and _fit(P, L_b) is None else P.with_shape((*P.shape[:-2], P.shape[-1], 0))]
        return (a, b), [P, *of_b]
    return resolve([a, b], grid)


def _parts(L_a, L_b, row, start, stop, a, b):
    """The columns ``start .. stop - 1`` of this rank's rows of A, and these rows of its columns of B: one set of
    messages."""
    return tuple(move([a, b], [_gathered(L_a, row + 1, start, stop), _gathered(L_b, row, start, stop)]))


@rule
def _gathered(L: Layout, dim: int, start: int, stop: int) -> LinearMap:
    """Blocks -> the places ``start .. stop - 1`` of ``dim``, on every rank along it."""
    held = Side.of(L)
    window = Axis(None, (((start, stop, 0),),), (stop - start,))
    return movement(
        "all_gather", held, Side(L.partition, tuple(window if d == dim else a for d, a in enumerate(held.axes)))
    )


def _fit(L_a: Layout, L_b: Layout) -> str | None:
    """What keeps A and B from being multiplied, if anything."""
    if L_a.partition != L_b.partition or L_a.ndim < 2:
        return "they lie over different partitions, or have fewer than two dims"
    if L_a.shape[-1] != L_b.shape[-2]:
        return f"A has {L_a.shape[-1]} columns, B {L_b.shape[-2]} rows"
    for d in range(L_a.ndim - 2):
        repeated = L_a.partition.shape[d] == 1 and 1 in (L_a.shape[d], L_b.shape[d])
        if L_a.sizes(d) != L_b.sizes(d) and not repeated:
            return f"batch dim {d} has blocks {L_a.sizes(d)} and {L_b.sizes(d)}"
    return None


def matmul_layout(L_a: Layout, L_b: Layout) -> Layout:
    """The layout of C = A B: the rows of A, the columns of B, the batch of both.

    Raises:
        ShapeError: A and B cannot be multiplied where they lie.

    Example:
        >>> P = dd.Partition((2, 1))
        >>> F.matmul_layout(dd.Layout(P, (4, 3)), dd.Layout(P, (3, 5))).shape
        (4, 5)
    """
    fault = _fit(laid_out(L_a), laid_out(L_b))
    if fault is not None:
        raise ShapeError(
            "A and B do not fit together",
            partitions=(L_a, L_b),
            expected="(*batch, m, k) and (*batch, k, n) over one partition, with the same blocks of the batch",
            actual=fault,
            next_step="repartition one of them, or check the shapes",
        )
    last = L_a.ndim - 1
    batch = [L_b if L_a.shape[d] == 1 else L_a for d in range(last - 1)]
    shape = tuple(L.shape[d] for d, L in enumerate((*batch, L_a, L_b)))
    return Layout(L_a.partition, shape, tuple(L.sizes(d) for d, L in enumerate((*batch, L_a, L_b))))
