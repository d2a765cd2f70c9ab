"""The door of layers: which block of which layout x is, how parameters that several ranks hold are taken, and what a
rank that takes no part gets.

A layer enters, moves something, works on its own, and moves something::

    x, L, at = enter(x, P, layer="dist_conv", shape=shape)
    if at is None:
        return outside(x, w, bias, like=L and conv_layout(L, channels, kernel))

**The outsider's rule**: a rank that takes no part gets ``(0, *the first block's other sizes)`` of the *result's*
layout, in the dtype that its peers get, and connected to what it passed. With a bare partition it has not heard of the
others' blocks, and takes them to be as its own x: then this is the same rule. ``(0,) * ndim`` where its x has another
number of dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from .. import _torch, maps
from .._types import Dims, Place
from ..agree import check_tensor, resolve
from ..errors import PartitionError, ShapeError
from ..held import hold, mark_of, name_when_checking, tag, unmarked_dims
from ..movement.call import move
from ..partition import Layout, partition_of
from ..ties import nothing
from .autocast import autocast

__all__ = ["check_bias", "layout_of", "replicated"]

ANY, SMOOTH, FLOATING, REAL = "any dtype", "a floating or complex dtype", "a floating dtype", "a real dtype"


# ---------------------------------------------------------------- x


def check_ndim(P: Place, least: int) -> None:
    """Raise, on ranks outside too, unless ``P`` has so many dims."""
    if len(P.shape) < least:
        raise PartitionError(
            "too few dims",
            expected=f"at least {least}",
            actual=P.ndim,
            next_step="lay x out over a partition with one dim for each of its own",
        )


def enter(
    x, P, *, layer=None, shape=None, kinds=ANY, least=0, agreed=True
) -> tuple[torch.Tensor, Any, tuple[int, ...] | None]:
    """x as a layer takes it: ``(x, its layout, this rank's coordinates)``.

    Args:
        x: this rank's block over ``P``; of a rank that takes no part any tensor.
        P: a Layout is taken as it is, and so are a partition and ``shape``; a bare partition is negotiated.
        layer: of which torch.autocast knows the dtype, see :func:`autocast`.
        kinds: the dtypes that the layer is for.
        least: how many dims it needs.
        agreed: ``False``: nothing is negotiated, and a bare partition stays one.

    Returns:
        x in the dtype that torch.autocast gives it. The coordinates are ``None`` on a rank that takes no part; with a
        bare partition the layout is then what x says, or ``None`` where x does not say it: see :func:`outside`.
    """
    L = P if type(P) is Layout else None
    grid = partition_of(P) if L is None else L.partition
    at = grid.index()
    check_ndim(grid, least)
    if _torch.any_autocast():
        (x,) = autocast(layer, grid.ndim, x)
    if kinds is not ANY and isinstance(x, torch.Tensor):
        check_kind(x, kinds)
    if at is None:
        check_tensor(x, P)
    if L is None and shape is None and not agreed:
        if at is None:
            return *supposed(x, grid), at
        check_block(x, grid)
        return x, grid, at
    if L is None or shape is not None:
        (x,), layouts = resolve([x], P, shape)
        if layouts is None:
            return *supposed(x, grid), at
        (L,) = layouts
    if at is not None and (not isinstance(x, torch.Tensor) or x.shape != _block(L, at)):
        check_block(x, L)
    return x, L, at


@lru_cache(maxsize=4096)
def _block(L, at) -> tuple[int, ...]:
    return tuple(blocks[c][1] - blocks[c][0] for blocks, c in zip(map(L.blocks, range(L.ndim)), at))


def supposed(x, grid):
    """x and its layout if every rank has a block as this rank's x; no layout where that has another number of dims."""
    if x.dim() == grid.ndim:
        return x, Layout(grid, tuple(n * p for n, p in zip(x.shape, grid.shape)))
    return nothing((0,) * max(grid.ndim, 1), x), None


def check_block(x, P, what="x") -> None:
    """Raise unless ``x`` can be this rank's block over ``P``."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError(
            f"{what} is not a tensor",
            expected="this rank's block",
            actual=type(x).__name__,
            next_step="pass this rank's block as a tensor",
        )
    if isinstance(P, Layout):
        if tuple(x.shape) != P.local_shape():
            raise ShapeError(
                f"{what} is not this rank's block",
                expected=P.local_shape(),
                actual=tuple(x.shape),
                next_step="pass layout.shard(x_global), or the layout that x has",
            )
    elif x.dim() != len(P.shape):
        raise ShapeError(
            f"{what} has another number of dims than the partition",
            expected=f"{P.ndim} dims",
            actual=tuple(x.shape),
            next_step="give the partition one dim for each dim of the tensor (1: not split)",
        )


def layout_of(x: torch.Tensor, P: Place, *others: Place) -> Layout | None:
    """The layout of a tensor of which every rank knows its own block: what :mod:`distdl.functional` functions ask for
    at each call with a bare partition, asked once.

    Args:
        x: this rank's block over ``P``, any dtype; blocks may be uneven and empty. Of a rank outside anything.
        P: the partition of x; a Layout is checked against x here, and returned.
        others: partitions whose ranks shall know it too: where x is to go, say.

    Returns:
        The same Layout on all ranks of P and of the others; ``None`` on ranks that are in none of them.

    Messages: one small all-gather among these ranks; of a Layout none. Nothing of x moves, and nothing is
    differentiated: under torch.compile, call it outside of the compiled function.

    Raises:
        AgreementError: on every rank, where a block does not fit, or dtypes, device kinds or numbers of dims differ.
        ShapeError: x is not this rank's block of a Layout.
        PartitionError: P or another is no partition.

    Example:
        >>> F.layout_of(torch.zeros(3, 4), dd.Partition((1, 1)))
        Layout(Partition((1, 1)), (3, 4))
    """
    partitions = tuple(partition_of(other) for other in others)
    _, layouts = resolve([x], P, None, partitions)
    if isinstance(P, Layout) and P.active:
        check_block(x, P)
    return layouts and layouts[0]


def check_kind(x, kinds) -> None:
    """Raise where a layer is not of tensors of x's dtype: on every rank, as those outside pass the dtype that the
    others have."""
    smooth = x.is_floating_point() or (kinds is SMOOTH and x.is_complex())
    if not smooth and (kinds is not REAL or x.is_complex()):
        raise ShapeError(
            "not of such tensors",
            expected=kinds,
            actual=x.dtype,
            next_step="convert the tensor first",
        )


def spatial(P, n=None) -> int:
    """The number of spatial dims of x over ``P``, (batch, channels, *space): 1 to 3, or ``n``."""
    ndim = len(partition_of(P).shape)
    if not (3 <= ndim <= 5 if n is None else ndim == n + 2):
        raise PartitionError(
            f"x needs batch, channel and {'1 to 3' if n is None else n} spatial dims",
            expected="3 to 5 dims" if n is None else f"{n + 2} dims",
            actual=ndim,
            next_step="give P one dim for the batch, one for the channels and one for each spatial dim",
        )
    return ndim - 2


# ---------------------------------------------------------------- a rank that takes no part


def outside(x, *parameters, like, dtype=None):
    """What a rank that takes no part gets, see the outsider's rule above.

    Args:
        x, parameters: what the result depends on; ``None`` is left out.
        like: the result's layout, or its sizes on the rank of the first block, where no sizes mean a scalar: a zero.
            ``None``: nobody knows; nothing in any of x's dims.
        dtype: of the result, where it is not x's.
    """
    sizes = x.shape if like is None else like.local_shape() if isinstance(like, Layout) else like
    y = nothing((0, *sizes[1:]), x, *present(*parameters), dtype=dtype)
    return y if like is None or isinstance(like, Layout) or sizes else y.sum(dtype=y.dtype)


def at_least(L: Layout, sizes) -> Layout:
    """L with trailing global sizes that are at least ``sizes``: what a layer takes, where x was only supposed."""
    n = L.ndim - len(sizes)
    return L.with_shape((*L.shape[:n], *map(max, L.shape[n:], sizes)))


def present(*tensors):
    """Those that are not ``None``."""
    return [t for t in tensors if t is not None]


# ---------------------------------------------------------------- parameters


def check_bias(op: str, P: Place, bias: torch.Tensor | None, features: int) -> None:
    """Raise unless ``bias`` has one number for each of this rank's output features: nothing is broadcast, or left
    out.

    No messages.

    Raises:
        ShapeError: it has not.

    Example:
        >>> F.check_bias("my_layer", dd.Partition((1,)), torch.zeros(3), 3)  # says nothing: it fits
    """
    if bias is not None and tuple(getattr(bias, "shape", ())) != (features,):
        raise ShapeError(
            "bias is not this rank's block",
            op=op,
            partitions=P,
            expected=(features,),
            actual=tuple(getattr(bias, "shape", ())) or type(bias).__name__,
            next_step="split the bias as w's output features are",
        )


def replicated(
    params: str, P: Place, dims: Dims | Iterable[int], *tensors: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Parameters that are equal on all ranks along partition dims ``dims``, ready to meet varying tensors.

    Args:
        params: ``"varying"``: the caller has marked or broadcast them, and they are returned as they are.
            ``"invariant"``: each is one logical value stored on every rank, and :func:`mark_varying` makes its gradient
            the sum over those ranks (over the rest of them, where the caller has marked it over some).
        P, dims: the layer's partition (or layout), and the dims along which the parameters are copies.
        tensors: the parameters, this rank's blocks; ``None`` stays ``None``.

    Returns:
        A tuple of the tensors. Messages: none forward; backward one all-reduce over ``dims`` for all tensors together.

    Raises:
        PartitionError: another value of ``params``.

    Example:
        >>> w, bias = F.replicated("invariant", dd.Partition((1, 1)), 0, torch.ones(2), None)
        >>> w, bias
        (tensor([1., 1.]), None)
    """
    if params == "varying":
        return tensors
    if params != "invariant":
        raise PartitionError(
            "unknown kind of parameters",
            expected='"varying" or "invariant"',
            actual=params,
            next_step='see "The cotangent convention" in the documentation',
            partitions=P,
        )
    grid = partition_of(P)
    if grid.index() is None:
        return tensors
    dims, mark = _copies(grid, tuple(dims) if isinstance(dims, Iterable) else dims)
    left: dict[tuple, list] = {}  # those that are to be marked along the same dims: all of them, mostly
    for i, t in enumerate(tensors):
        if t is not None:
            hold(t, mark)
            left.setdefault(unmarked_dims(t, grid, dims), []).append(i)
    result = list(tensors)
    for over, places in left.items():  # as F.mark_varying, without its ways to take any pytree
        some = [tensors[i] for i in places]
        name_when_checking(some)
        for i, y in zip(places, move(some, [maps.mark_varying(grid, t.shape, over) for t in some])):
            tag(y, tensors[i], grid, over)
            result[i] = y
    return tuple(result)


@lru_cache(maxsize=1024)
def _copies(grid, dims) -> tuple[tuple[int, ...], tuple]:
    """The dims along which a parameter is a copy, sorted, and its mark."""
    dims = grid.dims(dims)
    return dims, mark_of(grid, set(range(grid.ndim)).difference(dims))
