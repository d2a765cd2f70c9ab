"""Linear layers: one function for DistDL's general, all-gather and reduce-scatter layers and Megatron's column and row
ones."""

from __future__ import annotations

import torch

from .._arguments import checked
from .._types import Place
from ..agree import check_tensor
from ..errors import PartitionError, ShapeError
from ..partition import Layout, partition_of
from .along import bias_once, check_layouts, collect, collected, spread
from .autocast import autocast
from .enter import check_bias, outside, replicated

__all__ = ["dist_linear"]


@checked
def dist_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    bias: torch.Tensor | None = None,
    *,
    x_layout: str = "root",
    y_layout: str = "root",
    x_dim: int = -2,
    y_dim: int = -2,
    params: str = "varying",
) -> torch.Tensor:
    """y = x Wᵀ + b with W split into blocks over two partition dims.

    Args:
        x: (*batch, in), this rank's block: batch dims over the leading dims of ``P``, features over its last dim.
        w: (out, in), this rank's block of W over the last two dims of ``P``. Every rank has one.
        P: (*batch dims of x, out, in); or a Layout of global shape (*batch, out features, in features), and then
            nothing is negotiated.
        bias: (out,), this rank's block over the *out* dim. It is added once, by the ranks at index 0 of *in*.
        x_layout: how x lies along the *out* dim: "root" (on index 0; broadcast), "replicated" (independent copies; no
            message), "invariant" (one value on all; ``mark_varying``), "sharded" (its dim ``x_dim`` split over it;
            all-gathered).
        y_layout: how y is left along the *in* dim: "root" (summed to index 0), "replicated" (all-sum-reduced),
            "invariant" (``invariant_sum``), "sharded" (reduce-scattered along its dim ``y_dim``, balanced).
        params: "varying": w and bias are each rank's own (or already marked). "invariant": equal on the ranks that hold
            the same block, that is over the batch dims of ``P``, for the bias over *in* too; the layer marks them.

    Returns:
        (*batch, out): this rank's block; where nothing is left ("root"), a connected tensor without elements.

    Messages, with |x| and |y| the local elements, p_out and p_in the sizes of the two dims: forward "root" 1 broadcast
    of |x| and 1 reduction of |y|, "sharded" the same elements as all-gather and reduce-scatter, "invariant" and
    "replicated" 0 for x and 1 all-reduce of |y|; backward the transposes ("invariant" y: none; "invariant" x: 1
    all-reduce of |x|).

    After Hewett & Grady, arXiv:2006.03108, section 4; column and row parallel: Shoeybi et al., arXiv:1909.08053;
    sequence parallel: Korthikanti et al., arXiv:2205.05198.

    Raises:
        PartitionError, ShapeError: unknown layouts; P without one dim for each of x's and one more; w that does not fit
            x.

    Example:
        >>> x, w = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 3.0]])
        >>> F.dist_linear(x, w, dd.Partition((1, 1, 1)))  # (batch, out, in)
        tensor([[3., 6.]])
    """
    check_layouts(x_layout, y_layout)
    L = P if isinstance(P, Layout) else None
    grid = partition_of(P)
    (x,) = autocast("dist_linear", grid.ndim, x)
    batch, at = grid.ndim - 2, grid.index()
    if at is None:
        check_tensor(x, P)
    if batch < 1 or (at is not None and x.dim() != batch + 1 and (x_layout != "root" or at[batch] == 0)):
        raise PartitionError(
            "P needs one dim for each of x's and one more",
            expected="(*batch dims, out, in)",
            actual=f"x of {x.dim()} dims",
            next_step="add the partition's dims for w's rows (out) and columns (in) after the batch dims",
        )
    if params != "varying":
        (w,) = replicated(params, grid, range(batch), w)
        (bias,) = replicated(params, grid, (*range(batch), batch + 1), bias)
    if at is None:
        like = collected(_first_block(L, x, w, batch), grid, batch + 1, y_layout, y_dim)
        return outside(x, w, bias, like=like)
    block = None if L is None else L.local_shape()
    x = spread(x, grid, batch, x_layout, _along(x_dim, batch + 1), block and (*block[:-2], block[-1]))
    if x.shape[-1] != w.shape[-1]:
        raise ShapeError(
            "w does not fit x",
            expected=f"w of shape (out, {x.shape[-1]})",
            actual=tuple(w.shape),
            next_step="split in-features of x and w alike; where ranks along out hold parts of x's features, "
            "x_layout='sharded' with x_dim=-1 gathers them",
        )
    check_bias("dist_linear", P, bias, w.shape[0])
    y = torch.nn.functional.linear(x, w, bias_once(bias, at, batch + 1))
    return collect(y, grid, batch + 1, y_layout, _along(y_dim, batch + 1))


def _first_block(L, x, w, batch):
    """The sizes of the first block of x Wᵀ, as far as a rank outside knows it."""
    if L is not None:
        return L.local_shape()[:-1]
    return (*x.shape[:-1], w.shape[0]) if x.dim() == batch + 1 else (0,) * (batch + 1)


def _along(dim, ndim):
    return dim % ndim if -ndim <= dim < ndim else dim
