"""Pictures of partitions, layouts, halos and plans: for teaching, and to see why a movement sends what it sends.

:func:`show` is for notebooks and pages: SVG that stands by itself, and text in a terminal. :func:`draw` and :func:`spy`
use matplotlib where it is installed, and print :func:`text` where it is not. Everything is worked out in this process,
from plans: no message is sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from . import svg
from ._arguments import check_functions
from .calls import public
from .errors import PartitionError
from .linear_map import LinearMap
from .movement.around import Around
from .movement.boundary import sides, source_of
from .movement.halo import HaloSpec
from .partition import Layout, Partition
from .plan import Plan

__all__ = ["draw", "show", "spy", "text", "matrix", "messages"]
Drawn = Partition | Layout | HaloSpec | Plan | LinearMap
MOST = 1200  # elements of a movement whose picture says of each where it comes from


def _plan(A: Plan | LinearMap) -> Plan:
    return A if isinstance(A, Plan) else A.plan


def _plans(A: Plan | LinearMap) -> list[Plan]:
    """All that a movement runs, also where local work stands around it."""
    step = None if isinstance(A, Plan) else A.steps[0]
    return [move.plan for move in step.moves] if isinstance(step, Around) else [_plan(A)]


def _held(A: Plan | LinearMap) -> list[tuple[int, ...]]:
    """The shape of what each rank puts in."""
    step, held = None if isinstance(A, Plan) else A.steps[0], _plan(A).held
    shape = step.local_shape if isinstance(step, Around) else held.local_shape
    return [shape(r) for r in held.partition.ranks]


def matrix(plan: Plan | LinearMap, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The dense matrix of a plan or LinearMap, from the images of basis vectors: a row for each wanted element, a
    column for each held one, rank after rank. So ``matrix(A.T)`` equals ``matrix(A).T`` only where the adjoint is
    right.

    Example:
        >>> A = dd.maps.roll(dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> dd.viz.matrix(A)
        tensor([[0., 0., 1.],
                [1., 0., 0.],
                [0., 1., 0.]], dtype=torch.float64)
    """
    shapes = _held(plan)
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.eye(sum(sizes), dtype=dtype).split(sizes, 1)
    basis = [part.reshape(len(part), *shape) for part, shape in zip(parts, shapes)]  # as one batch
    images = plan.simulate(basis)
    return torch.cat([image.reshape(len(image), math.prod(image.shape[1:])) for image in images], 1).T


def messages(plan: Plan | LinearMap) -> list[tuple[int, int, int]]:
    """(source rank, destination rank, elements) of every message; what a rank keeps comes with source = destination.

    Example:
        >>> L = dd.Layout(dd.Partition((2,)), (4,))
        >>> dd.viz.messages(dd.maps.roll(L, 0, 1))  # (from, to, elements)
        [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    """
    found = Counter[tuple[int, int]]()
    for one in _plans(plan):
        for r in one.ranks:
            view = one.view(r)
            found.update({(r, m.peer): m.volume for m in (*view.sends, view.kept) if m})
    return sorted((r, peer, volume) for (r, peer), volume in found.items())


def text(what: Drawn) -> str:
    """A partition, layout, halo specification, plan or LinearMap as text.

    Example:
        >>> print(dd.viz.text(dd.Partition((2, 2))))
        Partition((2, 2))
          [0 1]
          [2 3]
    """
    if isinstance(what, Partition):
        return repr(what)
    if isinstance(what, Layout):
        return _layout_text(what)
    if isinstance(what, HaloSpec):
        return "\n".join(_halo_text(what, d) for d in range(what.in_layout.ndim))
    return "\n".join(f"rank {a} {'keeps' if a == b else f'-> rank {b}:'} {n}" for a, b, n in messages(what))


def _layout_text(L: Layout) -> str:
    """Up to two dims: the rank of every element. More: every rank's box."""
    if L.ndim not in (1, 2) or max(L.shape) > 64:
        return "\n".join(f"rank {r}: {L.box(r)}" for r in L.partition.ranks)
    owner = torch.empty(L.shape, dtype=torch.int64)
    for r in L.partition.ranks:
        owner[L.slices(r)] = r
    width = len(str(max(L.partition.ranks)))
    rows = [
        " ".join(f"{r:>{width}}" for r in row)
        for row in owner.reshape(L.shape[0] ** (L.ndim - 1), L.shape[-1]).tolist()
    ]
    return "\n".join(rows + [f"rank {r}: empty" for r in L.partition.ranks if 0 in L.local_shape(r)])


def _halo_text(spec: HaloSpec, d: int) -> str:
    """For each block of dim ``d`` the index that every place of its window shows; itself in brackets (of windows over
    another partition: nothing), zeros as dots."""
    L, n, boundary, rows = spec.in_layout, spec.in_layout.shape[d], spec.boundary[d], []
    lo, width = min(w0 for w0, _ in spec.windows[d]), len(str(n)) + 1
    blocks = L.blocks(d) if spec.beside else [(w0 - 1, w0 - 1) for w0, _ in spec.windows[d]]
    for c, ((w0, w1), (b0, b1)) in enumerate(zip(spec.windows[d], blocks)):
        row = " " * (width + 1) * (w0 - lo)
        for i in range(w0, w1):
            kind = sides(boundary)[i >= n]
            shown: int | str = "." if kind == "zeros" else source_of(kind, i, n)
            if 0 <= i < n:
                shown = i
            row += f"{'[' * (i == b0) + str(shown):>{width}}" + ("]" if i == b1 - 1 else " ")
        rows.append(f"dim {d}, block {c}:{row}".rstrip())
    return "\n".join(rows)


def show(*what: Drawn, titles: Sequence[str] = (), adjoint: bool = True) -> svg.Picture:
    """A picture of some things side by side: who holds what, the messages, and who then has what.

    Args:
        what: a partition, layout or halo specification, plan or LinearMap each. Elements of a movement are numbered,
            and what is made of several has all their colours; hover over one to see of which.
        titles: a heading for each of them; left out, what they are.
        adjoint: a movement has its adjoint beside it.

    Returns:
        A Picture: a notebook shows it, a terminal prints :func:`text` of each, and ``save(path)`` writes the SVG.
        Tensors of more than two dims have their leading ones as rows; layouts of three are drawn as a box, of more as
        text.

    Raises:
        PartitionError: something else, nothing, or another number of titles.

    Example:
        >>> picture = dd.viz.show(dd.maps.roll(dd.Layout(dd.Partition((2,)), (4,)), 0, 1))
        >>> picture.save("roll.svg")
    """
    if not what or not all(isinstance(one, Drawn) for one in what):
        raise PartitionError(
            "there is no picture of this",
            expected="a Partition, a Layout, a HaloSpec, a plan or a map, one or more",
            actual=", ".join(type(one).__name__ for one in what) or "nothing",
            next_step="of a program's values, show their layouts; of an Index, dd.maps.gather_rows(index)",
        )
    if titles and len(titles) != len(what):
        raise PartitionError(
            "not one title for each thing that is shown",
            expected=f"{len(what)}, or none",
            actual=f"{len(titles)}: {titles}",
            next_step="give titles=[...] one text for each",
        )
    parts, words = [], []
    for i, one in enumerate(what):
        movement = one.plan() if isinstance(one, HaloSpec) else one
        head = titles[i] if titles else _kind(one)
        grids = _grids(one)
        parts.append((head, _drawing(movement, grids)))
        words.append(f"{head}\n{text(one)}")
        if adjoint and isinstance(movement, (Plan, LinearMap)):
            parts.append((f"adjoint of {head}", _drawing(movement.T, grids and grids[::-1])))
            words.append(f"adjoint of {head}\n{text(movement.T)}")
    return svg.picture(parts, "; ".join(head for head, _ in parts), "\n".join(words))


def _kind(what: Drawn) -> str:
    if isinstance(what, LinearMap):
        return str(what)
    return what.named[0] if isinstance(what, Plan) else type(what).__name__


def _grids(what: Drawn) -> Any:
    """Of a halo over a grid of two dims: where ranks stand there, before and after."""
    if not isinstance(what, HaloSpec):
        return None
    found = []
    for P in (what.in_layout.partition, what.out_layout.partition):
        wide = [d for d, n in enumerate(P.shape) if n > 1]
        if len(wide) != 2:
            return None
        found.append(lambda r, P=P, wide=wide: tuple(P.index(r)[d] for d in wide))
    return tuple(found)


def _drawing(what: Any, grids: Any = None) -> svg.Drawing:
    if isinstance(what, Partition):
        what = Layout(what, what.shape)
    if isinstance(what, Layout):
        boxes = {r: what.box(r) for r in what.partition.ranks}
        if what.ndim in (1, 2):
            return svg.blocks(what.shape, boxes)
        return svg.cube(what.shape, boxes, str(what.shape)) if what.ndim == 3 else svg.lines(text(what).splitlines())
    held, wanted = (dict(zip(_plan(A).held.partition.ranks, _held(A))) for A in (what, what.T))
    words = [f"held{_copies(what, 'domain')}", f"wanted{_copies(what, 'range')}"]
    small = sum(map(math.prod, held.values())) <= MOST >= sum(map(math.prod, wanted.values()))
    sources = [[(j, v) for j, v in enumerate(row) if v] for row in matrix(what).tolist()] if small else []
    return svg.flow(svg.Tensors(words[0], held), svg.Tensors(words[1], wanted), sources, messages(what), grids)


def _copies(what: Any, side: str) -> str:
    """Whether a map's side is one value on many ranks."""
    space = getattr(what, side, None)
    return f", {space.kind}" if space is not None and space.copies > 1 else ""


def _axes(ax: Any, title: str | None) -> Any:
    """matplotlib axes to draw on, or ``None`` without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return None
    ax = pyplot.subplots(layout="constrained")[1] if ax is None else ax
    ax.set_title(title or "")
    return ax


def draw(what: Drawn, ax: Any = None, title: str | None = None) -> Any:
    """Draw a partition, a layout or halo specification of one or two dims, or the messages of a plan or LinearMap, on
    matplotlib axes ``ax`` (default: a new figure's), and return the axes. Without matplotlib, print :func:`text` and
    return ``None``.

    Example:
        >>> ax = dd.viz.draw(dd.Layout(dd.Partition((2,)), (4,)), title="four over two")
        >>> [text.get_text() for text in ax.texts]
        ['rank 0', 'rank 1']
    """
    if isinstance(what, Partition):
        what = Layout(what, what.shape)
    dims = getattr(getattr(what, "in_layout", what), "ndim", None)
    ax = _axes(ax, title) if dims in (None, 1, 2) else None
    if ax is None:
        print(text(what))
    elif isinstance(what, (Layout, HaloSpec)):
        _draw_boxes(what, ax)
    else:
        _draw_messages(what, ax)
    return ax


def _draw_boxes(what: Layout | HaloSpec, ax: Any) -> None:
    """Each rank's block, and the window that it wants, dotted."""
    from matplotlib.patches import Rectangle

    L = what.in_layout if isinstance(what, HaloSpec) else what
    boxes = [(r, True, L.box(r)) for r in L.partition.ranks]
    if isinstance(what, HaloSpec):
        boxes += [(r, False, what.window_box(r)) for r in what.out_layout.partition.ranks]
    for r, block, box in boxes:
        (y0, y1), (x0, x1) = box if len(box) == 2 else ((0, 1), box[0])
        e = 0 if block else 0.03 * (r % 5 + 1)  # so that edges on one line can be told apart
        style = {"alpha": 0.3} if block else {"fill": False, "lw": 2, "ls": ":"}
        ax.add_patch(Rectangle((x0 + e, y0 + e), x1 - x0 - 2 * e, y1 - y0 - 2 * e, color=f"C{r % 10}", **style))
        if block and x1 > x0 and y1 > y0:
            ax.text((x0 + x1) / 2, (y0 + y1) / 2, f"rank {r}", ha="center", va="center")
    ax.autoscale_view()
    ax.set(aspect="equal", ylim=ax.get_ylim()[::-1])


def _draw_messages(A: Plan | LinearMap, ax: Any) -> None:
    """Holders above, takers below, a line for each message with its number of elements."""
    plan = _plan(A)
    t = 1 / (len(plan.ranks) + 1)  # where along its line a number stands: there, the lines of all holders lie apart
    for a, b, n in messages(A):
        ax.annotate("", (b, 0.1), (a, 0.9), arrowprops={"arrowstyle": "->", "color": f"C{a % 10}", "lw": 1.5})
        ax.text(
            a + t * (b - a),
            0.9 - 0.8 * t,
            str(n),
            ha="center",
            va="center",
            color=f"C{a % 10}",
            bbox={"fc": "white", "ec": "none", "pad": 1},
            fontsize=8,
        )
    for side, y in ((plan.held, 0.95), (plan.wanted, 0.05)):
        for r in side.partition.ranks:
            ax.text(r, y, f"rank {r}", ha="center", va="center")
    ax.set(xlim=(min(plan.ranks) - 0.5, max(plan.ranks) + 0.5), ylim=(0, 1))
    ax.axis("off")


def spy(plan: Plan | LinearMap, ax: Any = None, title: str | None = None) -> Any:
    """The dense matrix of a plan or LinearMap as an image; lines separate the ranks. Without matplotlib it is
    printed.

    Example:
        >>> ax = dd.viz.spy(dd.maps.roll(dd.Layout(dd.Partition((2,)), (4,)), 0, 1))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('held', 'wanted')
    """
    dense, ax = matrix(plan), _axes(ax, title)
    if ax is None:
        print("\n".join(" ".join(f"{v:g}" if v else "." for v in row) for row in dense.tolist()))
        return None
    ax.imshow(dense.numpy(), cmap="gray_r", interpolation="nearest", vmin=0)
    for shapes, line in ((_held(plan), ax.axvline), (_held(plan.T), ax.axhline)):
        ends = 0
        for shape in shapes[:-1]:
            ends += math.prod(shape)
            line(ends - 0.5, color="C3", lw=1)
    ax.set(xlabel="held", ylabel="wanted", xticks=[], yticks=[])
    return ax


public({name: globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
