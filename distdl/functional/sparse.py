"""Products with sparse matrices whose rows lie on the ranks: gather what the columns name, multiply, add by rows."""

from __future__ import annotations

import torch

from ..errors import PartitionError, ShapeError
from ..index import Index, Selection
from ..linear_map import linear_map
from ..movement.rows import gather_rows
from ..partition import Layout
from .enter import outside
from .numeric import beyond

__all__ = ["dist_spmv"]


def dist_spmv(x: torch.Tensor, index: Index, rows: torch.Tensor, values: torch.Tensor, L_out: Layout) -> torch.Tensor:
    """y = A x of a sparse matrix A, of which each rank has the entries of its own rows.

    Args:
        x: this rank's block over ``index.layout``, (rows of x, ...): a vector, or a matrix of several.
        index: the columns of this rank's entries: ``dd.Index(index.layout, columns)``, made once.
        rows: (entries,) int64: the *local* row of each, in y's block.
        values: (entries,), in x's dtype; entries of one place add up.
        L_out: the layout of y; its first dim has the rows.

    Returns:
        (local rows of ``L_out``, ...): for each row the sum over its entries, in their order; float16 and bfloat16 are
        summed in float32. Linear in x and in values, and differentiable in both.

    Messages: :func:`gather_rows`'s, of x. Backward its transpose, for x alone.

    Raises:
        ShapeError: rows and values that are not one for each column, or a row outside of the block.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (2,))
        >>> index = dd.Index(L, torch.tensor([0, 1, 1]))  # the columns of three entries
        >>> F.dist_spmv(torch.tensor([1.0, 10.0]), index, torch.tensor([0, 0, 1]), torch.tensor([1.0, 2.0, 3.0]), L)
        tensor([21., 30.])
    """
    if not isinstance(index, Index) or not isinstance(L_out, Layout) or not L_out.ndim:
        raise PartitionError(
            "not an Index and a Layout",
            expected="dd.Index(L, columns), and the layout of y",
            actual=(index, L_out),
            next_step="F.dist_spmv(x, index, rows, values, dd.Layout(P, (rows of y,)))",
        )
    if L_out.box() is None:
        return outside(gather_rows(x, index), values, like=(0, *x.shape[1:]))
    _check(index, rows, values, n := L_out.local_shape()[0])
    terms = gather_rows(x, index)
    terms = terms * values.reshape(-1, *(1,) * (terms.dim() - 1))
    select, tail = Selection(rows, n), terms.shape[1:]

    def by_rows(y: torch.Tensor) -> torch.Tensor:
        return select.add(y, y.dim() - len(tail) - 1)

    def entries(y: torch.Tensor) -> torch.Tensor:
        return select.take(y, y.dim() - len(tail) - 1)

    return linear_map(by_rows, entries, (len(rows), *tail), (n, *tail), batched=True)(terms)


def _check(index: Index, rows: torch.Tensor, values: torch.Tensor, n: int) -> None:
    shapes = tuple(rows.shape), tuple(values.shape)
    if shapes != ((len(index.repeats),),) * 2 or rows.dtype != torch.int64:
        raise ShapeError(
            "one local row and one value for each column is needed",
            expected=f"rows and values ({len(index.repeats)},), rows int64",
            actual=(*shapes, rows.dtype),
            next_step="give rows and values in the order of the columns that the Index was made of",
        )
    if (wrong := beyond(rows, n)) is not None:
        raise ShapeError(
            "a row is outside of this rank's block",
            expected=f"0 <= row < {n}",
            actual=wrong,
            next_step="rows are local: they count from the first row of this rank's block of L_out",
        )
