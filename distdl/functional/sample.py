"""Values of a grid between its points: interpolation, and its transpose, deposition (receivers and sources, particles).

A point reads, or adds to, the order + 1 nearest grid points of each dim, with the weights of the B-spline of that
order: 1, (1 - f, f), and so on. These grid points are rows of a :class:`distdl.Index`, block after block; so everything
is ``gather_rows`` or ``scatter_add_rows`` and a product with weights, which are ordinary functions of the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from .. import _torch
from .._types import Place
from ..boxes import is_int
from ..errors import PartitionError, ShapeError
from ..index import Index, Refusal, told
from ..movement.call import laid_out
from ..movement.options import per_dim
from ..movement.rows import gather_rows, scatter_add_rows
from ..partition import Layout, Partition
from .enter import SMOOTH, check_kind, check_ndim, enter, outside

__all__ = ["dist_deposit", "dist_sample", "sample_index"]

_BOUNDARIES = ("zeros", "circular", "replicate")


class _Grid(NamedTuple):
    """The grid points of a layout as rows, block after block.

    ``rows``: the layout of (rows, *leading dims): ranks that split the leading dims have columns of their own. ``of``:
    that of the grid, whose last ``n`` dims are the coordinates of points.
    """

    rows: Layout
    of: Layout
    n: int
    order: int
    boundary: tuple[str, ...]


@lru_cache(maxsize=256)
def _grid(L: Layout, n: int, order: int, boundary: tuple[str, ...]) -> _Grid:
    lead, P = L.ndim - n, L.partition
    places = list(product(*map(range, P.shape[lead:])))
    sizes = tuple(math.prod(L.sizes(lead + d)[c] for d, c in enumerate(at)) for at in places)
    ranks = tuple(P.rank_at((*first, *at)) for at in places for first in product(*map(range, P.shape[:lead])))
    splits = (sizes, *(L.sizes(d) for d in range(lead)))
    rows = Layout(Partition((len(places), *P.shape[:lead]), ranks, P.world), (sum(sizes), *L.shape[:lead]), splits)
    return _Grid(rows, L, n, order, boundary)


def _checked(L: Layout, points: Any, order: Any, boundary: Any) -> tuple[_Grid, Refusal | None]:
    """What all ranks say alike, or raise; and what is wrong with this rank's points."""
    if not is_int(order) or order < 0:
        raise PartitionError(
            "no such order",
            partitions=L,
            expected="0 (nearest), 1 (linear), or the order of a B-spline",
            actual=order,
            next_step="order=1 interpolates in cells",
        )
    table = isinstance(points, torch.Tensor) and points.dim() == 2
    found = f"{tuple(points.shape)} of {points.dtype}" if isinstance(points, torch.Tensor) else type(points).__name__
    n = len(boundary) if isinstance(boundary, (tuple, list)) else points.shape[1] if table else L.ndim
    fits = table and points.shape[1] == n and 1 <= n <= L.ndim and points.is_floating_point()
    n = n if 1 <= n <= L.ndim else L.ndim
    kinds = per_dim(boundary, n, "boundary")
    unknown = [kind for kind in kinds if kind not in _BOUNDARIES]
    if unknown:
        raise PartitionError(
            "no such boundary",
            partitions=L,
            expected=_BOUNDARIES,
            actual=unknown,
            next_step="use one of them, or one for each coordinate of a point",
        )
    if 0 in L.shape[L.ndim - n :]:
        raise PartitionError(
            "there is no grid point",
            partitions=L,
            expected="a size of at least 1 in each dim that points have coordinates in",
            actual=L.shape[L.ndim - n :],
            next_step="leave the call out where the grid is empty",
        )
    return _grid(L, n, int(order), kinds), None if fits else _refusal(L, found)


def _refusal(L: Layout, actual: Any) -> Refusal:
    return Refusal(
        str(actual),
        "the points do not fit the grid",
        f"a floating tensor (points, 1 to {L.ndim} coordinates), finite",
        "give coordinates in units of the index, one for each of the trailing dims: 2.5 lies between places 2 and 3",
        L,
    )


# ---------------------------------------------------------------- points to rows


def _constant(points: torch.Tensor) -> torch.Tensor:
    """The numbers of the points, whichever derivative is taken."""
    found = _torch.numbers_of(points)
    if found is None:
        raise ShapeError(
            "the points are a batch of vmap",
            expected="the same points for all examples: who has the grid points around them is found out once",
            actual="other points for each example",
            next_step="give the points of all examples in one call, points.reshape(-1, dims), without vmap",
        )
    return found


def _first(points: torch.Tensor, order: int) -> torch.Tensor:
    """(points, dims): the first grid point of each dim that a point reads."""
    return torch.floor(points - (order - 1) / 2).to(torch.int64)


def _rows(G: _Grid, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(points, grid points that each reads): their row numbers, and which of them are inside, ``None``: all."""
    lead, device = G.of.ndim - G.n, first.device
    block, place, beyond = (torch.zeros(len(first), 1, dtype=torch.int64, device=device) for _ in range(3))
    for d, boundary in enumerate(G.boundary):
        n, sizes = G.of.shape[lead + d], _torch.constant(G.of.sizes(lead + d), torch.int64, device)
        at = first[:, d, None] + torch.arange(G.order + 1, device=device)
        shown = at.remainder(n) if boundary == "circular" else at.clamp(0, n - 1)
        lost = (at != shown) if boundary == "zeros" else torch.zeros_like(at)
        stops = sizes.cumsum(0)
        owner = torch.bucketize(shown, stops, right=True)
        beside = shown - (stops - sizes)[owner]
        block = _outer(block * len(sizes), owner, torch.add)
        place = _outer(place, sizes[owner], torch.mul) + beside.repeat(1, place.shape[1])
        beyond = _outer(beyond, lost.to(torch.int64), torch.add)
    rows = _torch.constant([0, *accumulate(G.rows.sizes(0))], torch.int64, device)[block] + place
    if "zeros" not in G.boundary:
        return rows, None
    start, stop = (G.rows.box() or ())[0]
    return torch.where(beyond == 0, rows, start) if start < stop else rows, beyond == 0  # an own row does not travel


def _outer(a: torch.Tensor, b: torch.Tensor, combine: Any) -> torch.Tensor:
    """(points, m) and (points, k) to (points, m k): each entry of a point's a with each of its b."""
    return combine(a[:, :, None], b[:, None, :]).flatten(1)


def _spline(f: torch.Tensor, order: int) -> list[torch.Tensor]:
    """The order + 1 values of the uniform B-spline of that order at its knots' distance f in [0, 1) (de Boor's
    recursion; C. de Boor, A Practical Guide to Splines, 1978)."""
    weights = [torch.ones_like(f)]
    for k in range(1, order + 1):
        parts = [w / k for w in weights]
        rising = [torch.zeros_like(f), *((f + (k - 1 - i)) * part for i, part in enumerate(parts))]
        falling = [*((i + 1 - f) * part for i, part in enumerate(parts)), torch.zeros_like(f)]
        weights = [a + b for a, b in zip(rising, falling)]
    return weights


def _weights(G: _Grid, points: torch.Tensor, first: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(points, grid points that each reads), in the dtype of ``like``: a smooth function of the points."""
    f = points - (G.order - 1) / 2 - first.to(points.dtype)
    w = torch.ones_like(f[:, :1])
    for d in range(G.n):
        w = _outer(w, torch.stack(_spline(f[:, d], G.order), 1), torch.mul)
    return w.to(like.dtype.to_real())


@_torch.opaque
def sample_index(L: Layout, points: torch.Tensor, *, order: int = 1, boundary: str | Sequence[str] = "zeros") -> Index:
    """Which ranks have the grid points that this rank's points read: what :func:`dist_sample` and :func:`dist_deposit`
    find out by talking, made once where points stay in their cells. Collective over the ranks of L.

    Args:
        L: the layout of the grid, with any leading dims.
        points, order, boundary: as for :func:`dist_sample`.

    Returns:
        A :class:`distdl.Index`, to be passed as ``index``. Messages: one small all-gather, and the row numbers.

    Raises:
        AgreementError: on every rank, where some rank's points are no finite floating tensor (points, dims).
        PartitionError: no such order or boundary, or no grid point. ShapeError: points are a batch of vmap.

    Example:
        >>> L, points = dd.Layout(dd.Partition((1,)), (3,)), torch.tensor([[0.5], [1.25]])
        >>> index = F.sample_index(L, points)  # once, for many fields
        >>> F.dist_sample(torch.tensor([0.0, 10.0, 20.0]), L, points, index=index)
        tensor([ 5.0000, 12.5000])
    """
    check_ndim(laid_out(L), 1)
    G, fault = _checked(L, points, order, boundary)
    return _made(G, points, fault)


def _made(G: _Grid, points: Any, fault: Refusal | None) -> Index:
    rows = torch.zeros(0, dtype=torch.int64, device=getattr(points, "device", None))
    first, inside = rows, None
    numbers = None if fault else _constant(points)
    with _torch.outside_all():
        if numbers is not None and not bool(numbers.isfinite().all()):
            fault = _refusal(G.of, "a coordinate that is not finite")
        if fault is None and G.rows.active:
            first = _first(numbers, G.order)
            rows, inside = _rows(G, first)
        index = told(G.rows, rows.flatten(), fault)
        index.maps["points"] = G, first, inside
        return index


@dataclass(frozen=True)
class _Stencil:
    """What points read: rows by ``index``, of which those are ``inside`` (``None``: all), with ``weights``."""

    index: Index
    inside: torch.Tensor | None
    weights: torch.Tensor

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (points, grid points of each, ...), without those beyond the edge."""
        return rows if self.inside is None else torch.where(_beside(self.inside, rows), rows, 0)


def _beside(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return weights.reshape(*weights.shape, *(1,) * (rows.dim() - 2))


def _stencil(L: Layout, points: Any, order: Any, boundary: Any, index: Index | None, like: torch.Tensor) -> _Stencil:
    G, fault = _checked(L, points, order, boundary)
    if index is None:
        index = _made(G, points, fault)
    elif fault is not None:
        raise ShapeError(fault.message, expected=fault.expected, actual=fault.actual, next_step=fault.next_step)
    if points.device != like.device:
        raise ShapeError(
            "the points lie on another device than the values",
            expected=like.device,
            actual=points.device,
            next_step="move them there: points.to(x.device)",
        )
    numbers = _constant(points)
    kept, its_first, inside = index.maps.get("points", (None,) * 3) if isinstance(index, Index) else (None,) * 3
    with _torch.outside_all():
        first = _first(numbers, G.order)
        if kept != G or first.device != its_first.device or not torch.equal(first, its_first):
            raise ShapeError(
                "the index is not of these points",
                expected="F.sample_index of this layout, order and boundary, and of points in the same cells",
                actual=index,
                next_step="make it again, on all ranks, when points have left their cells; or leave it out",
            )
    return _Stencil(index, inside, _weights(G, points, first, like))


# ---------------------------------------------------------------- the two operators


def dist_sample(
    x: torch.Tensor,
    P: Place,
    points: torch.Tensor,
    *,
    order: int = 1,
    boundary: str | Sequence[str] = "zeros",
    index: Index | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The values of a grid at points between its own: y[..., k] = Σ_i w_i(points[k]) x[..., i].

    Args:
        x: this rank's block, (*leading dims, *grid), any floating or complex dtype.
        P, shape: the partition and the global shape, or a Layout. Leading dims may be split too: a rank then gets the
            values of its own block of them, at its own points.
        points: (k, d): any points of this rank's choice, whoever has their surroundings; any number of them, also none.
            Coordinates are places in the d trailing dims of the global x, in units of the index.
        order: 0: the nearest grid point (the upper one of two); 1: linear in each dim; 2 and 3: the weights that
            particle methods call TSC and PCS, and any B-spline: smooth, but not equal to x at its own points.
        boundary: of grid points beyond the edge, one for all dims or one per coordinate: ``"zeros"``, ``"circular"``,
            or ``"replicate"``: the nearest one inside.
        index: :func:`sample_index` of these points, where it is kept; it holds as long as they stay in their cells.

    Returns:
        (*this rank's leading dims, k), in x's dtype. Linear in x, with the adjoint :func:`dist_deposit`; as smooth in
        the points as B-splines of that order, and every derivative is had in both.

    Messages: the grid points that others have, each once to each rank that wants it. Without ``index`` before that its
    own: one small all-gather, and the row numbers. Under vmap x may be a batch, but the points may not.

    Raises:
        AgreementError, PartitionError, ShapeError: as :func:`sample_index`; or an index of other points.

    Example:
        >>> grid = torch.tensor([0.0, 10.0, 20.0])
        >>> F.dist_sample(grid, dd.Partition((1,)), torch.tensor([[0.5], [1.25]]))
        tensor([ 5.0000, 12.5000])
    """
    x, L, at = enter(x, P, shape=shape, kinds=SMOOTH, least=1)
    if at is None:
        return outside(x, *_tensors(points), like=L and (*L.local_shape()[: _leading(L, points)], 0))
    S = _stencil(L, points, order, boundary, index, x)
    lead = S.index.layout.ndim - 1
    rows = gather_rows(x.flatten(lead).movedim(-1, 0), S.index).unflatten(0, S.weights.shape)
    return (S.kept(rows) * _beside(S.weights, rows)).sum(1).movedim(0, -1)


def dist_deposit(
    values: torch.Tensor,
    points: torch.Tensor,
    L: Layout,
    *,
    order: int = 1,
    boundary: str | Sequence[str] = "zeros",
    index: Index | None = None,
) -> torch.Tensor:
    """Add values at points to the grid points around them: x[..., i] = Σ_k w_i(points[k]) values[..., k], over the
    points of all ranks.

    Args:
        values: (*this rank's leading dims, k), any floating or complex dtype.
        points, order, boundary, index: as for :func:`dist_sample`. What would lie beyond an edge of ``"zeros"`` is
            lost; other boundaries keep the sum.
        L: the layout of the result, (*leading dims, *grid).

    Returns:
        This rank's block over L. Linear in the values, with the adjoint :func:`dist_sample`. Sums are taken in an order
        that does not change.

    Messages: those of :func:`dist_sample`, backwards.

    Raises:
        As :func:`dist_sample`; ShapeError: not one value for each point.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> F.dist_deposit(torch.tensor([8.0]), torch.tensor([[1.25]]), L)
        tensor([0., 6., 2.])
    """
    check_ndim(laid_out(L), 1)
    if L.box() is None:
        return outside(values, *_tensors(points), like=L)
    check_kind(values, SMOOTH)
    S = _stencil(L, points, order, boundary, index, values)
    lead = S.index.layout.ndim - 1
    expected = (*L.local_shape()[:lead], len(points))
    if tuple(values.shape) != expected:
        raise ShapeError(
            "not one value for each point",
            partitions=L,
            expected=expected,
            actual=tuple(values.shape),
            next_step="give values (*this rank's leading dims, points)",
        )
    rows = values.movedim(-1, 0)[:, None]
    rows = S.kept(rows * _beside(S.weights, rows)).flatten(0, 1)
    return scatter_add_rows(rows, S.index).movedim(0, -1).unflatten(-1, L.local_shape()[lead:])


def _tensors(*given: Any) -> list[torch.Tensor]:
    return [t for t in given if isinstance(t, torch.Tensor)]


def _leading(L: Layout, points: Any) -> int:
    """How many dims of L are no coordinates, as a rank outside sees it."""
    n = points.shape[1] if isinstance(points, torch.Tensor) and points.dim() == 2 else L.ndim
    return max(L.ndim - n, 0)
