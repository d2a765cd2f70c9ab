"""Halos: which window of the global tensor each rank needs, and the exchange of it. Specs are pure.

A boundary condition is one index function: ghost index -> real index (boundary.py). Its ghosts are runs of the wanted
side of a plan, so corners, wide halos and the adjoint need no code of their own; bad specs are errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index as as_int
from typing import Any

from .. import _faults
from .._torch import flatten, opaque, spread
from .._types import Place, Size, Tree
from .._value import Value
from ..boxes import is_int
from ..errors import PartitionError
from ..linear_map import LinearMap, movement
from ..partition import Layout, as_layout
from ..plan import Axis, Plan, Run, Side
from .around import Whole
from .boundary import Boundaries, Boundary, check_reach, clipped, runs_of, settled, without_zeros
from .call import Movement, by_map, moved, rule
from .options import per_dim, plain
from .star import Star, has_corners

Need = Callable[[int, int, int], tuple[int, int]]  # (dim, first output, stop) -> the range that they read


def _range(found: Any, layout: Layout) -> tuple[int, int]:
    try:
        lo, hi = map(as_int, found)
    except (TypeError, ValueError):
        raise PartitionError(
            "need() gave no range",
            expected="two integers (lo, hi)",
            actual=found,
            partitions=layout,
            next_step="return the range of indices that outputs o0 .. o1 - 1 read",
        ) from None
    return lo, hi


def _moved(runs: tuple[Run, ...], before: list[tuple[int, int]]) -> tuple[Run, ...]:
    """The runs, to lie after the ranges ``before``."""
    by = sum(hi - lo for lo, hi in before)
    return tuple((start, stop, at + by) for start, stop, at in runs)


@dataclass(frozen=True, init=False, repr=False)
class HaloSpec(Value):
    """What each rank's window of a partitioned tensor is, for :func:`distdl.functional.halo_exchange`.

    Args:
        P, shape: the partition and the global shape, or a Layout (then leave ``shape`` out).
        left, right: widths, an int or one per dim; ``right`` defaults to ``left``. A rank whose block is empty in a dim
            wants nothing there.
        boundary: what lies beyond the edge; one for all dims, or one per dim, where a pair (below, above) has one for
            each side: ``("zeros", ("replicate", "reflect"))``. ``"none"``: nothing, windows are clipped; ``"zeros"``,
            ``"circular"`` (on both sides), ``"reflect"`` and ``"replicate"`` as in torch.nn.functional.pad.
        corners: ``False``: a star. Windows keep their shape, but what lies beside the block in two dims or more, the
            corners of any boundary too, is zero and does not travel: of a grid of d dims 2d messages in place of 3ᵈ-1.

    Attributes:
        in_layout: the layout of the input.
        out_layout: the layout of what a windowed operation makes of the windows (for plain widths: ``in_layout``), over
            the ranks that want them: the input's, unless :meth:`needs` was given others.
        windows: per dim, per coordinate of ``out_layout`` (lo, hi): the range that is wanted, in coordinates that may
            lie outside the domain.
        boundary: one per dim: a kind, or a pair of them where the sides differ.

    Raises:
        PartitionError: negative widths, an unknown boundary, a circular side opposite another, or a reflection that
            reaches beyond the tensor.

    Example:
        >>> dd.HaloSpec(dd.Partition((3,)), (10,), 1).windows
        (((0, 5), (3, 8), (6, 10)),)
    """

    in_layout: Layout
    out_layout: Layout
    windows: tuple[tuple[tuple[int, int], ...], ...]
    boundary: tuple[Boundary, ...]
    corners: bool = True

    __hash__ = Value.__hash__

    def __init__(
        self,
        P: Place,
        shape: Any = None,
        left: Size | None = None,
        right: Size | None = None,
        *,
        boundary: Boundaries = "none",
        corners: bool = True,
    ) -> None:
        if isinstance(P, Layout) and shape is not None:  # HaloSpec(layout, left, right): the shape is left out
            if right is not None:
                raise PartitionError(
                    "a Layout has a shape already",
                    partitions=P,
                    expected="left and right",
                    actual=(shape, left, right),
                    next_step="HaloSpec(layout, left, right), or HaloSpec(partition, shape, left, right)",
                )
            left, right, shape = shape, left, None
        layout = as_layout(P, shape)
        try:
            lefts = tuple(as_int(n) for n in per_dim(left, layout.ndim, "left"))
            rights = tuple(as_int(n) for n in per_dim(left if right is None else right, layout.ndim, "right"))
        except TypeError:
            raise PartitionError(
                "widths must be integers",
                partitions=layout,
                expected="integers",
                actual=(left, right),
                next_step="give widths as ints, one or one for each dim",
            ) from None
        if min((*lefts, *rights, 0)) < 0:
            raise PartitionError(
                "halo widths cannot be negative",
                partitions=layout,
                expected=">= 0",
                actual=(lefts, rights),
                next_step="narrow the tensor itself instead",
            )
        self._set(layout, layout, lambda d, start, stop: (start - lefts[d], stop + rights[d]), boundary)
        object.__setattr__(self, "corners", has_corners(corners, layout))

    def _set(self, in_layout: Layout, out_layout: Layout, need: Need, boundary: Boundaries) -> None:
        kinds = settled(per_dim(boundary, in_layout.ndim, "boundary"), in_layout)
        windows = []
        for d, n in enumerate(in_layout.shape):
            dim = []
            for start, stop in out_layout.blocks(d):
                lo, hi = _range(need(d, start, stop), in_layout) if start < stop else (n, n)
                lo, hi = clipped(lo, n, kinds[d]), clipped(hi, n, kinds[d])
                dim.append((lo, max(lo, hi)))
            check_reach(d, n, kinds[d], dim, in_layout)
            windows.append(tuple(dim))
        for name, value in zip(
            ("in_layout", "out_layout", "windows", "boundary"), (in_layout, out_layout, tuple(windows), kinds)
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def needs(
        cls,
        P: Place,
        shape: Sequence[int] | None,
        out_shape: Sequence[int] | Layout,
        need: Need,
        boundary: Boundaries = "zeros",
    ) -> HaloSpec:
        """The windows of any local operation, also of one whose output lies on other ranks.

        Args:
            P, shape: as for :class:`HaloSpec`; the shape is left out (``None``) with a Layout.
            out_shape: global shape of the operation's output, over the input's partition, or its Layout, over any
                partition of as many dims: its ranks want the windows of their output blocks. Default blocks: the
                input's splits in dims whose size is unchanged, balanced elsewhere.
            need: ``need(d, o0, o1) -> (lo, hi)``: the range of dim ``d`` of the input that outputs ``o0 .. o1 - 1`` of
                that dim read.
            boundary: what lies beyond the edge.

        Raises:
            PartitionError: an output of another number of dims or in another world, or ``need`` gives no range; and as
                :class:`HaloSpec`.
        """
        in_layout = as_layout(P, shape)
        out_layout = out_shape if isinstance(out_shape, Layout) else in_layout.with_shape(out_shape)
        world = in_layout.partition.world
        if (out_layout.ndim, out_layout.partition.world) != (in_layout.ndim, world):
            raise PartitionError(
                "the output does not lie beside the input",
                expected=f"a layout of {in_layout.ndim} dims over ranks of the world {world!r}",
                actual=out_layout,
                partitions=(in_layout, out_layout),
                next_step="give the output's partition one dim for each dim of the input, in its world",
            )
        spec = object.__new__(cls)
        spec._set(in_layout, out_layout, need, boundary)
        return spec

    @classmethod
    def window(
        cls,
        P: Place,
        shape: Sequence[int] | None,
        kernel: Size,
        stride: Size = 1,
        padding: Size | Sequence[tuple[int, int]] = 0,
        dilation: Size = 1,
        boundary: Boundaries = "zeros",
        *,
        ceil_mode: bool = False,
    ) -> HaloSpec:
        """The windows of a sliding kernel (convolution, pooling) over the trailing dims.

        Args:
            kernel: sizes of the trailing dims, an int for all but the first two.
            stride, dilation: an int, or one per kernel dim.
            padding: likewise, or pairs (before, after).
            ceil_mode: as in torch's pooling: a last, partial window counts.

        Raises:
            PartitionError: sizes that torch would refuse, or a kernel larger than the padded input.
        """
        in_layout = as_layout(P, shape)
        k = plain(kernel, "kernel")
        k = k if isinstance(k, tuple) else (k,) * max(in_layout.ndim - 2, 1)
        first, n = in_layout.ndim - len(k), len(k)
        s, d = (per_dim(v, n, w) for v, w in ((stride, "stride"), (dilation, "dilation")))
        pads = tuple(p if isinstance(p, tuple) else (p, p) for p in per_dim(padding, n, "padding"))
        legal = all(map(is_int, (*k, *s, *d, *(v for p in pads for v in p))))
        if not legal or min((*k, *s, *d, 1)) < 1 or any(len(p) != 2 or min(p) < 0 for p in pads) or first < 0:
            raise PartitionError(
                "not a legal window",
                partitions=in_layout,
                expected="kernel, stride and dilation >= 1, padding >= 0",
                actual={"kernel": k, "stride": s, "dilation": d, "padding": padding},
                next_step="give sizes of at least 1 and a padding of at least 0",
            )
        out = list(in_layout.shape)
        for i, (size, step, hole, (lo, hi)) in enumerate(zip(k, s, d, pads), first):
            free = in_layout.shape[i] + lo + hi - hole * (size - 1) - 1
            if free < 0 and not (ceil_mode and free > -step):  # ceil_mode: a window that starts inside may end outside
                raise PartitionError(
                    f"the kernel is larger than the padded input in dim {i}",
                    partitions=in_layout,
                    expected=f"kernel <= {free + size}",
                    actual=size,
                    next_step="pad more, or use a smaller kernel or dilation",
                )
            out[i] = (math.ceil(free / step) if ceil_mode else free // step) + 1
            if ceil_mode and (out[i] - 1) * step >= in_layout.shape[i] + lo:
                out[i] -= 1  # a window must start inside the input or its left padding

        def need(dim: int, o0: int, o1: int) -> tuple[int, int]:
            if dim < first:
                return o0, o1
            i = dim - first
            start = o0 * s[i] - pads[i][0]
            return start, start + (o1 - 1 - o0) * s[i] + d[i] * (k[i] - 1) + 1

        return cls.needs(in_layout, None, out, need, boundary)

    def window_box(self, rank: int | None = None) -> tuple[tuple[int, int], ...] | None:
        """((lo, hi), ...) that ``rank`` wants, in coordinates that may lie outside the domain; ``None`` when
        inactive."""
        coords = self.out_layout.partition.index(rank)
        return None if coords is None else tuple(w[c] for w, c in zip(self.windows, coords))

    @property
    def out_box(self) -> tuple[tuple[int, int], ...] | None:
        """:meth:`window_box` of this rank."""
        return self.window_box()

    def plan(self) -> Plan:
        """blocks -> windows; without corners the whole ones, and nothing moves by it: see :meth:`strips`."""
        axes = []
        for d, (dim, n) in enumerate(zip(self.windows, self.in_layout.shape)):
            runs = tuple(runs_of(lo, hi, n, self.boundary[d]) for lo, hi in dim)
            axes.append(Axis(d, runs, tuple(hi - lo for lo, hi in dim)))
        return Plan(Side.of(self.in_layout), Side(self.out_layout.partition, tuple(axes)))

    @property
    def beside(self) -> bool:
        """Whether windows lie about the blocks of the ranks that want them: whether the partitions are one."""
        return self.in_layout.partition == self.out_layout.partition

    def _must_be_beside(self) -> None:
        if not self.beside:
            raise _faults.windows_elsewhere(self.in_layout, self.out_layout)

    def sides(self, d: int, c: int) -> tuple[int, int, int, int]:
        """(lo, a, b, hi) of coordinate ``c`` of dim ``d``: the window lo..hi, without zeros beyond the edge, of which
        the block itself holds a..b.

        Raises:
            PartitionError: the windows are not those of the input's ranks; so does :meth:`strips`.
        """
        self._must_be_beside()
        (lo, hi), (start, stop), n = self.windows[d][c], self.in_layout.blocks(d)[c], self.in_layout.shape[d]
        lo, hi = without_zeros(lo, hi, n, self.boundary[d])
        a = min(max(start, lo), hi)
        return lo, a, min(max(stop, a), hi), hi

    def strips(self) -> dict[int, Plan]:
        """{dim: blocks -> what of the windows lies beside the blocks in that dim}, for each dim in which some rank
        lacks something.

        A rank's strip is what lies before its block and what lies after it, side by side. In the dims before it is as
        wide as the block's part of the window, in the dims after as the window: so the strips and the block make up the
        window, without zeros. Without corners it is as wide as the block's part in all of them.
        """
        self._must_be_beside()
        sides = [[self.sides(d, c) for c in range(len(windows))] for d, windows in enumerate(self.windows)]
        found = {}
        for i in range(self.in_layout.ndim):
            if all(lo == a and b == hi for lo, a, b, hi in sides[i]):
                continue
            axes = []
            for d, (n, boundary) in enumerate(zip(self.in_layout.shape, self.boundary)):
                narrow = d < i or not self.corners
                ranges = [
                    [(lo, a), (b, hi)] if d == i else [(a, b)] if narrow else [(lo, hi)] for lo, a, b, hi in sides[d]
                ]
                runs = tuple(
                    tuple(
                        run for k, (lo, hi) in enumerate(some) for run in _moved(runs_of(lo, hi, n, boundary), some[:k])
                    )
                    for some in ranges
                )
                axes.append(Axis(d, runs, tuple(sum(hi - lo for lo, hi in some) for some in ranges)))
            found[i] = Plan(Side.of(self.in_layout), Side(self.in_layout.partition, tuple(axes)))
        return found

    def __repr__(self) -> str:
        over = "" if self.beside else f" -> {self.out_layout}"
        star = "" if self.corners else ", corners=False"
        return f"HaloSpec({self.in_layout}{over}, windows={self.windows}, boundary={self.boundary}{star})"


@rule
def halo_exchange_map(spec: HaloSpec) -> LinearMap:
    """Blocks -> windows, of the same ranks or of others. Adjoint: ghosts' cotangents are added to their owners.

    Example:
        >>> A = dd.maps.halo_exchange(dd.HaloSpec(dd.Partition((2,)), (4,), 1))
        >>> A.simulate([torch.tensor([1, 2]), torch.tensor([3, 4])])
        [tensor([1, 2, 3]), tensor([2, 3, 4])]
    """
    if not isinstance(spec, HaloSpec):
        raise PartitionError(
            "not a HaloSpec",
            expected="dd.HaloSpec(P, shape, left, right)",
            actual=spec,
            next_step="dd.HaloSpec(P, shape, widths), or dd.HaloSpec.window(P, shape, kernel)",
        )
    plan = spec.plan()
    if not spec.corners and spec.strips():
        return LinearMap((Star("halo_exchange", plan, plan.T, spec=spec),))
    return movement("halo_exchange", plan.held, plan.wanted)


@opaque
def halo_exchange(x: Tree, spec: HaloSpec | tuple[Any, ...] | list[Any] | dict[Any, Any]) -> Tree:
    """This rank's window of ``x``: its block, grown by what neighbours hold and by the boundary's ghosts.

    Args:
        x: this rank's block over ``spec.in_layout``, any dtype; ignored where that has none for this rank.
        spec: a :class:`distdl.HaloSpec`. Windows may be those of other ranks (:meth:`distdl.HaloSpec.needs`): then a
            rank of the input's alone sends, and one of the output's alone receives. Of several fields one for all, or
            containers of them like x's, ``halo_exchange((u, p), (spec_u, spec_p))``: each field then has its own
            layout, widths, boundary and dtype, and all go as one set of messages. They lie over the same ranks.

    Returns:
        The window ``spec.out_box``; on a rank outside of ``spec.out_layout`` no elements, of shape (0, *the first
        window's other sizes). Adjoint: the cotangents of what has been copied, ghosts or whole windows, are added to
        their owners.

    Messages: one to each rank whose window meets this one's block, of any number of fields.

    Raises:
        PartitionError: not a HaloSpec, not one for each field, or fields of other ranks. ShapeError: x is not this
            rank's block.

    Example:
        >>> spec = dd.HaloSpec(dd.Partition((1,)), (3,), 1, boundary="circular")
        >>> F.halo_exchange(torch.tensor([1, 2, 3]), spec)
        tensor([3, 1, 2, 3, 1])
    """
    if isinstance(spec, (tuple, list, dict)):
        return moved(*_by_specs(x, spec))
    return moved(*by_map(x, halo_exchange_map(spec)))


@rule
def _beside_stars(spec: HaloSpec) -> LinearMap:
    """The same map, to go as one set with those of stars."""
    A = halo_exchange_map(spec)
    alike = A.is_identity or isinstance(A.steps[0], Star)
    return A if alike else LinearMap((Whole("halo_exchange", A.plan, A.adjoint),))


def _by_specs(x: Any, specs: Any) -> Movement:
    xs, tree = flatten(x)
    found = spread(specs, tree)
    if found is None:
        raise PartitionError(
            "not a HaloSpec for each field",
            expected="containers of HaloSpecs like those of x",
            actual=specs,
            next_step="F.halo_exchange((u, p), (spec_u, spec_p)), or one HaloSpec for all",
        )
    maps = [halo_exchange_map(spec) for spec in found]
    if len({(A.ranks, A.world.name) for A in maps}) > 1:
        raise PartitionError(
            "the fields lie on different ranks",
            partitions=tuple(spec.in_layout for spec in found),
            expected="specs over the same ranks of one world",
            actual=[A.ranks for A in maps],
            next_step="exchange those of other ranks in a call of their own, made by these ranks",
        )
    stars = any(isinstance(A.steps[0], Star) for A in maps)
    return xs, list(map(_beside_stars, found)) if stars else maps, tree


@rule
def halo_strips(spec: HaloSpec) -> dict[int, LinearMap]:
    """{dim: blocks -> what of the windows lies beside them in that dim}, see :meth:`HaloSpec.strips`.

    Example:
        >>> A = dd.maps.halo_strips(dd.HaloSpec(dd.Partition((2,)), (4,), 1))[0]
        >>> A.simulate([torch.tensor([1, 2]), torch.tensor([3, 4])])
        [tensor([3]), tensor([2])]
    """
    return {d: movement("halo_strips", plan.held, plan.wanted) for d, plan in spec.strips().items()}
