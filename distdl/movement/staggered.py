"""Staggered grids: values in cells, on faces, on edges and at nodes, and the windows from one of these to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index as as_int

from .._types import Dims
from .._value import Value
from ..boxes import is_int
from ..errors import PartitionError
from ..partition import Layout
from .boundary import Boundaries, Boundary, settled
from .call import laid_out
from .halo import HaloSpec
from .options import per_dim


@dataclass(frozen=True, init=False, repr=False)
class Staggered(Value):
    """Where the values of a staggered grid lie, and how they are read from elsewhere on it.

    Pure: no messages but those of :meth:`to`.

    Args:
        L: the layout of the cells.
        dims: the dims in which values lie between cells, ``None``: all. Of a grid of three dims none are cells, one is
            a kind of faces, two are edges, all are nodes.
        periodic: the dims that close in themselves, ``None``: all.

    Face i of a dim lies between cells i - 1 and i, and on the rank of cell i. A periodic dim has as many faces as
    cells; a bounded one has one more, which lies on the rank of the last cell (of a dim without cells on the first). So
    each face has one owner, and inner products count it once.

    Attributes:
        cells: L.
        layout: where the values lie: a Layout like any other, for every operator.

    Raises:
        PartitionError: L is no Layout, or has no such dims.

    Example:
        >>> dd.Staggered(dd.Layout(dd.Partition((1,)), (4,)), 0).layout.shape  # faces between four cells
        (5,)
    """

    cells: Layout
    dims: tuple[int, ...]
    periodic: tuple[int, ...]

    __hash__ = Value.__hash__

    def __init__(self, L: Layout, dims: Dims = (), *, periodic: Dims = ()) -> None:
        P = laid_out(L).partition
        for name, value in (("cells", L), ("dims", P.dims(dims)), ("periodic", P.dims(periodic))):
            object.__setattr__(self, name, value)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the values."""
        sizes = [list(self.cells.sizes(d)) for d in range(self.cells.ndim)]
        for d in set(self.dims).difference(self.periodic):
            sizes[d][max((c for c, n in enumerate(sizes[d]) if n), default=0)] += 1
        return Layout(self.cells.partition, tuple(map(sum, sizes)), tuple(map(tuple, sizes)))

    def to(self, other: Staggered, boundary: Boundaries = "zeros", *, width: int = 1) -> HaloSpec:
        """The windows of these values that ``other`` ones read: in each dim in which one of them lies between cells and
        the other does not, the ``width`` nearest values on either side.

        Args:
            other: where the values that read these lie, on the same cells.
            boundary: what lies beyond the edges of bounded dims, as for :class:`HaloSpec`; periodic ones are circular.

        Returns:
            A spec for :func:`distdl.functional.halo_exchange`. With width 1 its windows have one value more than
            ``other.layout`` in those dims: ``.diff(dim=d)`` of one is the difference across dim d.

        Raises:
            PartitionError: other cells, other periodic dims, no such width, or a bounded dim that is circular.
        """
        if not isinstance(other, Staggered) or (other.cells, other.periodic) != (self.cells, self.periodic):
            raise PartitionError(
                "not another place on the same cells",
                partitions=self.cells,
                expected=f"dd.Staggered of {self.cells}, periodic={self.periodic}",
                actual=other,
                next_step="make both of one Layout of cells, with the same periodic dims",
            )
        if not is_int(width) or width < 1:
            raise PartitionError(
                "no such width",
                partitions=self.cells,
                expected="an integer, at least 1",
                actual=width,
                next_step="width=1 for differences and averages of two values",
            )
        across = set(self.dims) ^ set(other.dims)
        given = settled(per_dim(boundary, self.cells.ndim, "boundary"), self.cells)
        closed = [d for d in sorted(across.difference(self.periodic)) if given[d] == "circular"]
        if closed:
            raise PartitionError(
                f"dim {closed[0]} has two ends",
                partitions=self.cells,
                expected="another boundary than circular",
                actual=boundary,
                next_step="make both places with periodic=, which have no face twice",
            )

        kinds = tuple("circular" if d in self.periodic else kind for d, kind in enumerate(given))
        return _windows(self, other, kinds, as_int(width))

    def __repr__(self) -> str:
        return f"Staggered({self.cells}, dims={self.dims}, periodic={self.periodic})"


@lru_cache(maxsize=1024)  # time steps ask again and again
def _windows(here: Staggered, there: Staggered, boundary: tuple[Boundary, ...], width: int) -> HaloSpec:
    across = set(here.dims) ^ set(there.dims)

    def need(d: int, o0: int, o1: int) -> tuple[int, int]:
        if d not in across:
            return o0, o1
        return (o0 - width + 1, o1 + width) if d in here.dims else (o0 - width, o1 + width - 1)

    return HaloSpec.needs(here.layout, None, there.layout, need, boundary)
