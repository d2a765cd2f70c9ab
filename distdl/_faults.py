"""The errors of partitions, layouts and maps that cannot be; the rules stand in partition.py and linear_map.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import PartitionError, ShapeError

if TYPE_CHECKING:
    import torch

    from .linear_map import Move
    from .partition import Layout, Partition


# ---------------------------------------------------------------- a grid of ranks


def not_integers(shape: Any, ranks: Any, error: TypeError) -> PartitionError:
    """A grid's shape or ranks are no sequences of integers."""
    return PartitionError(
        f"shape and ranks must be sequences of integers ({error})",
        op="Partition",
        expected="integers",
        actual=(shape, ranks),
        next_step="for example Partition((2, 2), ranks=(0, 1, 2, 3))",
    )


def dim_without_ranks(shape: tuple[int, ...]) -> PartitionError:
    """A grid has a size below 1."""
    return PartitionError(
        "every dim needs at least one rank",
        op="Partition",
        expected="sizes >= 1",
        actual=shape,
        next_step="leave out dims without ranks, or give them 1",
    )


def not_filled(shape: tuple[int, ...], size: int, ranks: tuple[int, ...]) -> PartitionError:
    """A grid of ``size`` places has another number of ranks."""
    return PartitionError(
        "the number of ranks does not fill the grid",
        op="Partition",
        expected=f"{size} ranks for {shape}",
        actual=f"{len(ranks)}: {ranks}",
        next_step="list one rank for each place of the grid, or leave ranks out",
    )


def not_distinct(ranks: tuple[int, ...]) -> PartitionError:
    """A rank stands twice in a grid, or is negative."""
    return PartitionError(
        "ranks must be distinct and not negative",
        op="Partition",
        actual=ranks,
        expected="each rank once",
        next_step="list every rank once",
    )


def not_a_partition(P: Any) -> PartitionError:
    """Neither a partition nor a layout."""
    return PartitionError(
        "not a partition",
        expected="a Partition or a Layout",
        actual=repr(P),
        next_step="dd.Partition(shape), or dd.Layout(P, shape)",
    )


# ---------------------------------------------------------------- places of a grid


def not_a_rank(P: Partition, rank: Any) -> PartitionError:
    """A rank is no integer."""
    return PartitionError(
        "not a rank",
        op="Partition.index",
        partitions=P,
        expected="a rank (int)",
        actual=repr(rank),
        next_step="leave it out for this process's own; P.rank_at(coords) is the rank at grid coordinates",
    )


def not_a_place(P: Partition, coords: Any) -> PartitionError:
    """Not one coordinate for each dim, or one that the grid does not have."""
    return PartitionError(
        "not a place of the grid",
        op="Partition.rank_at",
        partitions=P,
        actual=repr(coords),
        expected=f"{P.ndim} coordinates (ints) below {P.shape}",
        next_step="P.index(rank) gives a rank's coordinates",
    )


def no_dim(P: Partition, dim: Any) -> PartitionError:
    """The grid has no such dim."""
    return PartitionError(
        f"no dim {dim}",
        partitions=P,
        expected=f"a dim of {P.ndim}",
        actual=dim,
        next_step="count dims from 0, or from the end with negative numbers",
    )


def dim_twice(P: Partition, dims: Sequence[Any]) -> PartitionError:
    """A dim is named twice."""
    return PartitionError(
        "a dim is named twice",
        partitions=P,
        expected="distinct dims",
        actual=tuple(dims),
        next_step="name each dim once",
    )


def not_an_order(P: Partition, dims: Any) -> PartitionError:
    """The dims of a permutation are not each dim of the grid once."""
    return PartitionError(
        "not an order of the dims",
        partitions=P,
        expected=f"each of {tuple(range(P.ndim))} once",
        actual=dims,
        next_step="name every dim of the grid, in the order in which the result shall have them",
    )


def no_index(P: Partition, dim: int, index: Any) -> PartitionError:
    """A dim of the grid has no such index."""
    return PartitionError(
        f"no index {index} in dim {dim}",
        op="Partition.take",
        partitions=P,
        expected=f"an index of {P.shape[dim]}",
        actual=index,
        next_step="count from 0, or from the end with negative numbers",
    )


# ---------------------------------------------------------------- a shape laid over a grid


def layout_of_no_partition(P: Any) -> PartitionError:
    """A layout over what is no partition."""
    return PartitionError(
        "not a partition",
        op="Layout",
        expected="a Partition",
        actual=repr(P),
        partitions=None,
        next_step="dd.Partition(shape); layout.with_shape(shape) lays out another shape",
    )


def not_a_shape(P: Partition, shape: Any) -> PartitionError:
    """A global shape is no sequence of integers."""
    return PartitionError(
        "not a global shape",
        op="Layout",
        partitions=P,
        expected="a sequence of integers",
        actual=shape,
        next_step="pass the tensor's global shape, for example x.shape",
    )


def shape_does_not_fit(P: Partition, shape: tuple[int, ...]) -> PartitionError:
    """A global shape of another number of dims than the grid's, or of a negative size."""
    return PartitionError(
        "the shape does not fit the partition",
        op="Layout",
        partitions=P,
        expected=f"{P.ndim} sizes >= 0",
        actual=shape,
        next_step="give the partition one dim for each dim of the tensor (1: not split)",
    )


def not_one_split_per_dim(P: Partition, splits: Any) -> PartitionError:
    """Splits of another number of dims than the grid's."""
    return PartitionError(
        "splits needs one entry for each dim",
        op="Layout",
        expected=P.ndim,
        actual=splits,
        partitions=P,
        next_step="use None for a dim of balanced blocks",
    )


def split_does_not_fit(P: Partition, dim: int, split: Any, n: int) -> PartitionError:
    """The block sizes of a dim are not one for each coordinate, or do not sum to its size ``n``."""
    return PartitionError(
        f"splits of dim {dim} do not fit",
        op="Layout",
        partitions=P,
        actual=split,
        expected=f"{P.shape[dim]} sizes >= 0 that sum to {n}",
        next_step="list one size for each coordinate of that dim, or None for balanced blocks",
    )


def not_the_layouts_shape(L: Layout, x: Any) -> ShapeError:
    """A tensor to be cut has another shape than the layout, or is no tensor."""
    return ShapeError(
        "not the layout's global shape",
        op="Layout.shard",
        partitions=L,
        expected=L.shape,
        actual=tuple(x.shape) if hasattr(x, "shape") else type(x).__name__,
        next_step="pass the whole tensor, or lay out its shape: layout.with_shape(x.shape)",
    )


def another_shape(L: Layout, shape: tuple[int, ...]) -> ShapeError:
    """A layout, and a shape that is not its own."""
    return ShapeError(
        "shape differs from the layout's",
        partitions=L,
        expected=L.shape,
        actual=shape,
        next_step="leave shape out, or pass the partition and the shape",
    )


def weights_of(L: Layout, weights: Any) -> dict[int, list[float]]:
    """The weights of a layout's dims as numbers, by dim; an error where they are not one for each index."""
    found: dict[int, list[float]] = {}
    if not isinstance(weights, Mapping):
        raise _not_weights(L, type(weights).__name__)
    for dim, given in weights.items():
        d = L.partition.dim(dim)
        try:
            found[d] = [float(w) for w in given]
        except (TypeError, ValueError):
            raise _not_weights(L, f"{type(given).__name__} for dim {dim}") from None
        if len(found[d]) != L.shape[d] or min(found[d], default=0) < 0 or not sum(found[d]) < math.inf:
            raise _not_weights(L, f"{len(found[d])} from {min(found[d], default=0)} for dim {dim}")
    return found


def _not_weights(L: Layout, actual: str) -> PartitionError:
    return PartitionError(
        "not one weight for each index of a dim",
        partitions=L,
        expected=f"{{dim: finite numbers, at least 0}} for dims of {L.shape} indices",
        actual=actual,
        next_step="for example {0: [1.0, 2.0, 3.0]} for three rows",
    )


# ---------------------------------------------------------------- maps


def not_a_tensor(step: Move, x: Any) -> ShapeError:
    """What goes into a movement is no tensor."""
    return ShapeError(
        "not a tensor",
        op=str(step),
        partitions=step.partitions,
        expected=f"a tensor of shape {step.in_shape}",
        actual=type(x).__name__,
        rank=step.world.rank,
        next_step="ranks that hold nothing pass any tensor of the dtype and device that the others have",
    )


def not_the_block(step: Move, x: torch.Tensor) -> ShapeError:
    """What goes into a movement is not this rank's block."""
    return ShapeError(
        "the local tensor has the wrong shape",
        op=str(step),
        partitions=step.partitions,
        expected=step.in_shape,
        actual=tuple(x.shape),
        rank=step.world.rank,
        next_step="pass this rank's block: layout.shard(x_global) or layout.local_shape()",
    )


def not_a_map(other: Any) -> PartitionError:
    """What a map is to be composed with is none."""
    return PartitionError(
        "not a linear map",
        op="@",
        expected="a map of dd.maps or dd.linear_map",
        partitions=None,
        actual=type(other).__name__,
        next_step="B @ A composes maps; apply one to a tensor by A(x)",
    )


def windows_elsewhere(held: Any, wanted: Any) -> PartitionError:
    """Windows of other ranks, where those beside the blocks are asked for."""
    return PartitionError(
        "these windows have no blocks of their own to lie beside",
        partitions=(held, wanted),
        expected=held.partition,
        actual=wanted.partition,
        next_step="lay the output over the input's partition, or exchange the windows whole",
    )
