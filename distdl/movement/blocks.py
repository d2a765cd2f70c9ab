"""Blocks of a global tensor: from layout to layout, from and to one rank, and around the end of a dim."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int

from .._torch import opaque
from .._types import Place, Tree
from ..boxes import is_int
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..partition import Layout, as_layout, partition_of
from ..plan import Axis, Run, Side
from .call import by_layout, by_map, laid_out, moved, on_one_rank, rule


@rule
def repartition_map(where: Layout, P_out: Place) -> LinearMap:
    """Blocks of one layout -> blocks of another, of the same global shape (an all-to-all in general).

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> A = dd.maps.repartition(dd.Layout(dd.Partition((2, 1)), (4, 4)), dd.Partition((1, 2)))
        >>> dd.viz.messages(A)  # (from, to, elements)
        [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    """
    where, P = laid_out(where), partition_of(P_out)
    if P.ndim != where.ndim:
        raise PartitionError(
            "the partition has another number of dims than the tensor",
            partitions=P_out,
            expected=f"{where.ndim} dims",
            actual=P.ndim,
            next_step="give the partition one dim for each dim of the tensor (1: not split)",
        )
    if isinstance(P_out, Layout) and P_out.shape != where.shape:
        raise PartitionError(
            "the layouts have different global shapes",
            partitions=P_out,
            expected=where.shape,
            actual=P_out.shape,
            next_step="use layouts of one global shape",
        )
    return movement("repartition", Side.of(where), Side.of(as_layout(P_out, where.shape)))


@opaque
def repartition(x: Tree, P_in: Place, P_out: Place, *, shape: Sequence[int] | None = None) -> Tree:
    """Move a tensor from one partition to another of as many dims: an all-to-all, in general.

    Args:
        x: this rank's block over ``P_in``, any dtype.
        P_in, P_out: partitions or layouts; sets of ranks and splits may differ in any way.
        shape: the global shape; left out, block sizes are negotiated.

    Returns:
        This rank's block over ``P_out``. Adjoint: the repartition back.

    Raises:
        PartitionError, ShapeError: partitions that do not fit x, or an x that is not this rank's block.
        AgreementError: on every rank of a bare partition, where blocks or calls disagree.

    Example:
        >>> rows, columns = dd.Partition((1, 1)), dd.Partition((1, 1))
        >>> F.repartition(torch.eye(2), rows, columns)  # blocks of rows to blocks of columns
        tensor([[1., 0.],
                [0., 1.]])
    """
    return moved(*by_layout(x, P_in, shape, repartition_map, P_out, to=P_out))


@rule
def scatter_map(where: Layout, root: int = 0) -> LinearMap:
    """The whole tensor on rank ``root`` -> the blocks of ``where``. Adjoint: gather.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> A = dd.maps.scatter(L)
        >>> A.T(A(torch.arange(3)))
        tensor([0, 1, 2])
    """
    where = laid_out(where)
    one = Layout(on_one_rank(root, where.ndim, where.partition.world), where.shape)
    return movement("scatter", Side.of(one), Side.of(where))


@opaque
def scatter(x: Tree, P: Place, *, root: int = 0, shape: Sequence[int] | None = None) -> Tree:
    """Split the tensor that rank ``root`` holds over ``P``. Adjoint: gather.

    Args:
        x: the global tensor on ``root``, ignored elsewhere.
        shape: its shape; left out (and without a Layout), it is negotiated.

    Raises:
        PartitionError, ShapeError: partitions that do not fit x, or an x that is not this rank's block.
        AgreementError: on every rank of a bare partition, where blocks or calls disagree.

    Example:
        >>> F.scatter(torch.arange(3), dd.Partition((1,)))  # each rank its block of root's tensor
        tensor([0, 1, 2])
    """
    where = partition_of(P)
    if where is not P or shape is not None:
        return moved(*by_map(x, scatter_map(as_layout(P, shape), root)))
    one = on_one_rank(root, where.ndim, where.world)
    return moved(*by_layout(x, one, None, lambda L: scatter_map(Layout(where, L.shape), root), to=where))


@rule
def gather_map(where: Layout, root: int = 0) -> LinearMap:
    """Blocks -> the whole tensor on rank ``root``. Adjoint: scatter.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> A = dd.maps.gather(L)
        >>> A.T(A(torch.arange(3)))
        tensor([0, 1, 2])
    """
    where = laid_out(where)
    one = Layout(on_one_rank(root, where.ndim, where.partition.world), where.shape)
    return movement("gather", Side.of(where), Side.of(one))


@opaque
def gather(x: Tree, P: Place, *, root: int = 0, shape: Sequence[int] | None = None) -> Tree:
    """Collect the blocks of ``x`` over ``P`` as one tensor on rank ``root``. Adjoint: scatter.

    Messages: one from each rank with a block to ``root``.

    Raises:
        PartitionError, ShapeError: partitions that do not fit x, or an x that is not this rank's block.
        AgreementError: on every rank of a bare partition, where blocks or calls disagree.

    Example:
        >>> F.gather(torch.arange(3), dd.Partition((1,)))
        tensor([0, 1, 2])
    """
    where = partition_of(P)
    one = on_one_rank(root, where.ndim, where.world)
    return moved(*by_layout(x, P, shape, gather_map, root, to=one))


@rule
def roll_map(where: Layout, dim: int, by: int) -> LinearMap:
    """Blocks -> the same blocks of ``torch.roll(x, by, dim)`` of the *global* tensor. Adjoint: the roll by ``-by``.

    No messages until it is applied, then those of the function of its name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> A = dd.maps.roll(L, 0, 1)
        >>> A.T(A(torch.arange(3)))
        tensor([0, 1, 2])
    """
    where = laid_out(where)
    dim, held = where.partition.dim(dim), Side.of(where)
    if not is_int(by):
        raise PartitionError(
            "not a number of elements",
            expected="an int",
            actual=repr(by),
            next_step="give a whole number, negative to roll towards the beginning",
        )
    n, by = max(where.shape[dim], 1), as_int(by)
    runs: list[tuple[Run, ...]] = []
    for start, stop in where.blocks(dim):  # what is shown at i stood at i - by: one run, or two around the end
        first = (start - by) % n if start < stop else start
        cut = min(stop - start, n - first)
        rest = stop - start - cut
        runs.append(((first, first + cut, 0), (0, rest, cut)) if rest > 0 else ((first, first + cut, 0),))
    axes = list(held.axes)
    axes[dim] = Axis(dim, tuple(runs), where.sizes(dim))
    return movement("roll", held, Side(where.partition, tuple(axes)))


@opaque
def roll(x: Tree, P: Place, dim: int, by: int, *, shape: Sequence[int] | None = None) -> Tree:
    """``torch.roll(x, by, dim)`` of the *global* tensor, laid out as ``x`` is. Adjoint: the roll back.

    Args:
        x: this rank's block over ``P``, any dtype; blocks may be uneven or empty.
        dim, by: a dim, and by how many elements of it, negative ones towards its beginning.
        shape: the global shape; left out (and without a Layout), block sizes are negotiated.

    Raises:
        PartitionError, ShapeError: partitions that do not fit x, or an x that is not this rank's block.
        AgreementError: on every rank of a bare partition, where blocks or calls disagree.

    Example:
        >>> F.roll(torch.arange(4), dd.Partition((1,)), 0, 1)
        tensor([3, 0, 1, 2])
    """
    return moved(*by_layout(x, P, shape, roll_map, dim, by))
