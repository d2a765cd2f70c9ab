"""Embedding tables split over vocabulary and embedding dims: each rank looks up the rows that it has."""

from __future__ import annotations

import torch
import torch.nn.functional as tf

from .._arguments import checked
from .._types import Place
from ..agree import block_sizes
from ..errors import PartitionError, ShapeError
from ..movement.copies import all_sum_reduce, broadcast
from ..partition import Layout, partition_of
from .along import LAYOUTS, collect, collected
from .enter import outside, replicated
from .numeric import beyond, wide
from .reduce import dist_norm

__all__ = ["dist_embedding"]


def _rows(P, at, own: int, total):
    """(first row, number of rows) of this rank's block, and the number of rows in all."""
    dim = P.ndim - 2
    sizes = total if isinstance(total, tuple) else block_sizes(own, P, dim, total)  # a tuple: the Layout's blocks
    here = at[dim]
    if sizes[here] != own:
        raise ShapeError(
            "w has another number of rows than this rank's block",
            expected=sizes[here],
            actual=own,
            next_step="pass this rank's (vocabulary, embedding) block",
        )
    return sum(sizes[:here]), own, sum(sizes)


def _check_index(idx, n, P, at) -> None:
    """A clear error for indices beyond the table."""
    if (wrong := beyond(idx, n)) is not None:
        raise ShapeError(
            "an index is outside the table",
            expected=f"0 <= index < {n}",
            rank=P.rank_at(at),
            actual=wrong,
            next_step="indices are global: they count the rows of all ranks",
        )


@checked
def dist_embedding(
    idx: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    *,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    scale: float | None = None,
    num_embeddings: int | None = None,
    idx_layout: str = "replicated",
    y_layout: str = "root",
    y_dim: int = -2,
    params: str = "varying",
) -> torch.Tensor:
    """y[i] = W[idx[i]] with W split into blocks over two partition dims, as torch.nn.functional.embedding.

    Args:
        idx: integers of any shape, this rank's block over the leading dims of ``P``; global row numbers.
        w: (vocabulary, embedding), this rank's block of W over the last two dims of ``P``.
        P: (*dims of idx, vocabulary, embedding); or a Layout of global shape (*idx shape, number of rows, row length).
        padding_idx: a global row whose derivative is zero (negative: from the end), whichever rank holds it; in forward
            mode too, which torch leaves out.
        max_norm, norm_type: rows longer than this are scaled down to it, by their norm over the whole row. torch
            changes W itself; here W stays as it is, and y is made of scaled rows. As in torch, the gradient is that of
            the scaled W.
        scale_grad_by_freq: divide each row's derivative by how often it is looked up, on all ranks together.
        scale: multiply y by this number (√d in transformers).
        num_embeddings: rows in all, in balanced blocks. Left out, with a bare ``P`` whose vocabulary dim is split, one
            small all-gather along it asks how many rows each rank has; a Layout knows.
        idx_layout: "replicated": every rank of the vocabulary and embedding dims has the indices. "root": only the one
            at index 0 of both, and they are broadcast (their local shape is negotiated, unless ``P`` is a Layout).
        y_layout, y_dim: how the sum is left along the vocabulary dim: "root" (on index 0), "replicated" (k independent
            copies), "invariant" (one value on all), "sharded" (its dim ``y_dim`` split over it, balanced).
        params: "varying": w is each rank's own (or already marked). "invariant": equal along the batch dims of ``P``;
            marked here.

    Returns:
        (*idx, embedding): this rank's block, the embedding dim split as w's. Where nothing is left ("root"), a
        connected tensor without elements.

    Messages, with |y| the local elements: along vocabulary, where it is split, "root" 1 reduction of |y|, "sharded" 1
    reduce-scatter, "invariant" and "replicated" 1 all-reduce; backward the transposes ("invariant": none).
    ``idx_layout="root"`` 1 broadcast of |idx|. ``max_norm`` with a split embedding dim 1 all-reduce of |idx| along it
    (norm inf: :func:`dist_max`'s); ``scale_grad_by_freq`` 1 all-reduce of a number for each of the block's rows along
    the batch dims; neither has a derivative. ``params="invariant"``: backward 1 all-reduce of |w|.

    y = Σ_v 1[idx in block v] W_v[idx - first_v]; vocabulary parallel: Shoeybi et al., arXiv:1909.08053.

    Raises:
        PartitionError, ShapeError: unknown layouts, floating indices, an index outside the table, blocks that do not
            fit P.

    Example:
        >>> F.dist_embedding(torch.tensor([2, 0]), torch.tensor([[1.0], [2.0], [3.0]]), dd.Partition((1, 1, 1)))
        tensor([[3.],
                [1.]])
    """
    grid = partition_of(P)
    if y_layout not in LAYOUTS or idx_layout not in ("root", "replicated"):
        raise PartitionError(
            "no such layout",
            expected=f"y_layout of {LAYOUTS}, idx_layout of ('root', 'replicated')",
            actual=(y_layout, idx_layout),
            next_step="choose one of these",
        )
    if w.dim() != 2 or grid.ndim < 2:
        raise ShapeError(
            "w is a table over the last two dims of P",
            expected="(vocabulary, embedding)",
            actual=tuple(w.shape),
            next_step="pass this rank's block of the table, two dims, and a P of at least two",
        )
    batch, at = grid.ndim - 2, grid.index()
    (w,) = replicated(params, grid, range(batch), w)
    L = P if isinstance(P, Layout) else None
    if at is None:
        like = collected(_first_block(L, idx, w, batch), grid, batch, y_layout, y_dim)
        return outside(w, like=like)
    block = None if L is None else L.local_shape()
    if block is not None and w.shape != block[-2:]:
        raise ShapeError(
            "w is not this rank's block",
            expected=block[-2:],
            actual=tuple(w.shape),
            next_step="pass this rank's rows and columns of the table",
        )
    if idx_layout == "root":
        holders = grid.take(batch, 0, keepdim=True).take(batch + 1, 0, keepdim=True)
        idx = broadcast(idx, holders, grid, shape=block and block[:-2])
    expected = block and block[:-2]
    numbers = not (idx.is_floating_point() or idx.is_complex() or idx.dtype == torch.bool)
    if not numbers or idx.dim() != batch or (L is not None and idx.shape != expected):
        raise ShapeError(
            "idx is not this rank's block of indices",
            rank=grid.rank_at(at),
            actual=f"{idx.dtype} of shape {tuple(idx.shape)}",
            expected=f"integers of {expected or f'{batch} dims'}",
            next_step="pass this rank's indices: P has one dim for each of idx's, then (vocabulary, embedding)",
        )
    first, own, total = _rows(grid, at, w.shape[0], num_embeddings if L is None else L.sizes(batch))
    _check_index(idx, total, grid, at)

    here = (idx >= first) & (idx < first + own)
    beyond = (idx < 0) | (idx >= total)
    place = torch.where(
        here, idx - first, torch.where(beyond, own + 1, 0)
    )  # out of range here too: the lookup then fails
    rows = _look_up(place, w)
    if max_norm is not None:
        rows = _renormalised(rows, grid, at, batch, max_norm, norm_type)
    if scale_grad_by_freq:
        rows = _by_frequency(rows, place, here, own, grid, range(batch))
    if padding_idx is not None:
        if not -total <= padding_idx < total:
            raise PartitionError(
                "padding_idx is outside the table",
                expected=f"-{total} <= padding_idx < {total}",
                actual=padding_idx,
                next_step="count it in rows of the whole table",
            )
        rows = torch.where((idx == padding_idx % total)[..., None], rows.detach(), rows)
    y = torch.where(here[..., None], rows, 0)
    return collect(y if scale is None else y * scale, grid, batch, y_layout, y_dim % (batch + 1))


def _first_block(L, idx, w, batch):
    """The sizes of the first block of the result, as far as a rank outside knows it."""
    if L is not None:
        shape = L.local_shape()
        return (*shape[:batch], shape[-1])
    return (*idx.shape, w.shape[1]) if idx.dim() == batch else (0,) * (batch + 1)


def _look_up(place, w):
    """``w[place]``, by way of a dummy where there is no row, no column or no index: torch's backward does not take them
    all."""
    flat, (rows, columns) = place.reshape(-1), w.shape
    if not flat.numel():
        flat = torch.cat([flat, flat.new_zeros(1)])
    found = tf.embedding(flat, tf.pad(w, (0, not columns, 0, not rows)) if not rows or not columns else w)
    return found[: place.numel(), :columns].reshape(*place.shape, columns)


def _with_derivative(value, path):
    """``value``, with the derivative of ``path``, whose own value is taken away."""
    return value.detach() + (path - path.detach())


def _renormalised(rows, P, at, batch, max_norm, norm_type):
    """Rows no longer than ``max_norm``; the norm of a row is taken over the ranks that have parts of it."""
    whole_rows = P.take(batch, at[batch])  # (*batch, embedding)
    norms = dist_norm(wide(rows.detach()), whole_rows, batch, True, ord=norm_type)
    scaled = torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)
    return _with_derivative(scaled.to(rows.dtype), rows)


def _by_frequency(rows, place, here, own, P, dims):
    """Each looked-up row's derivative divided by how often it occurs along partition dims ``dims``."""
    ones = wide(here.to(rows.dtype)).reshape(-1)  # float16 and bfloat16 cannot count far
    counts = all_sum_reduce(ones.new_zeros(max(own, 1)).index_add(0, place.reshape(-1), ones), P, dims)
    return _with_derivative(rows, (rows / counts[place].clamp(min=1)[..., None]).to(rows.dtype))
