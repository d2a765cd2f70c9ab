"""Pictures as SVG that needs nothing else: ranks, their tensors element by element, and what goes from one to another.

What is drawn here is plain numbers; viz.py works them out, from plans. A picture follows the page that it stands on,
light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate, product
from pathlib import Path
from typing import NamedTuple

__all__ = ["Drawing", "Picture", "Tensors", "blocks", "cube", "flow", "gantt", "lines", "picture"]
Shape = tuple[int, ...]
Source = tuple[int, float]  # which held element (all ranks' end to end), and its factor

CELL, GAP, LANE, LABEL, FLOW = 18, 26, 22, 52, 120  # px
COLOURS = ("#6ea8dc", "#f0a35e", "#63c2a0", "#d889b8", "#c9b84c", "#9a8fe0", "#e07f7f", "#8fb36b")
WIDE = 800  # px of a row of drawings
MOST = 16  # cells in a row: larger tensors are one box with their shape

_INK = "var(--color-foreground-primary,var(--jp-content-font-color1,var(--dd-ink)))"  # the site's, Jupyter's, our own
_FAINT = "var(--color-foreground-muted,var(--jp-content-font-color2,var(--dd-faint)))"
_STYLE = f"""
.dd{{--dd-ink:#1c2024;--dd-faint:#68717c;font:11px/1.3 system-ui,sans-serif;max-width:max(100%,640px);height:auto}}
@media(prefers-color-scheme:dark){{.dd{{--dd-ink:#e6e9ed;--dd-faint:#9aa4b0}}}}
.dd text{{fill:{_INK}}}.dd .h{{font-size:13px;font-weight:600}}.dd .f{{fill:{_FAINT}}}
.dd .n{{fill:#14181c;font-size:9px;text-anchor:middle}}.dd .m{{text-anchor:middle}}
.dd .c{{stroke:#14181c55}}.dd .z{{fill:none;stroke:{_FAINT};stroke-dasharray:2 2}}
.dd .a{{fill:none;stroke-width:1.6}}.dd .k{{stroke-dasharray:3 3;opacity:.6}}
.dd .b{{stroke:var(--color-background-primary,Canvas);stroke-width:4px;paint-order:stroke;font-weight:600}}
"""


class Drawing(NamedTuple):
    """A part of a picture, drawn at (0, 0)."""

    width: float
    height: float
    body: str


class Tensors(NamedTuple):
    """What each rank has: {rank: shape}, and a word for all of them."""

    word: str
    shapes: dict[int, Shape]

    def places(self) -> list[tuple[int, Shape]]:
        """(rank, index) of all elements, rank after rank."""
        return [(r, i) for r, shape in self.shapes.items() for i in product(*map(range, shape))]


class Picture:
    """A picture with what it says in words; notebooks show it, a terminal prints :attr:`text`.

    Attributes:
        svg: the picture, by itself.
        text: the same as lines of text.
    """

    def __init__(self, svg: str, text: str) -> None:
        self.svg, self.text = svg, text

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg + "\n", encoding="utf-8")


def picture(parts: Sequence[tuple[str, Drawing]], title: str, text: str) -> Picture:
    """Parts side by side, in rows of at most :data:`WIDE`, each below its own heading. ``title`` is what a reader who
    does not see it is told."""
    head = 26 if any(words for words, _ in parts) else 0
    body, x, y, width, low = [], 0.0, 0.0, 0.0, 0.0  # low: where the next row begins
    for words, part in parts:
        wide = max(part.width, 7.5 * len(words))
        if x and x + wide > WIDE:
            x, y = 0.0, low + GAP
        body.append(
            f'<g transform="translate({_n(x)} {_n(y)})"><text class="h" y="14">{escape(words)}</text>'
            f'<g transform="translate(0 {head})">{part.body}</g></g>'
        )
        width, low, x = max(width, x + wide), max(low, y + head + part.height), x + wide + GAP
    size = f'width="{_n(width + 4)}" viewBox="-2 -2 {_n(width + 4)} {_n(low + 4)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="dd" role="img" {size}><title>{escape(title)}</title>'
    return Picture("\n".join([f"{opening}<style>{_STYLE}</style>", *body, "</svg>"]), text)


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def colour(rank: int) -> str:
    """A rank's colour."""
    return COLOURS[rank % len(COLOURS)]


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def _rect(x: float, y: float, w: float, h: float, fill: str | None, kind: str = "c") -> str:
    paint = f' fill="{fill}"' if fill else ""
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"{paint}/>'


# ---------------------------------------------------------------- tensors, element by element


def _flat(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a tensor as it is drawn: dims of size 1 are left out, leading dims are rows."""
    sizes = [n for n in shape if n != 1] or [1]
    return math.prod(sizes[:-1]), sizes[-1]


def _small(shape: Shape) -> bool:
    return max(_flat(shape)) <= MOST


def _size(shape: Shape) -> tuple[float, float]:
    rows, columns = _flat(shape)
    if not _small(shape):
        return 8.0 * len(str(shape)), 2.0 * CELL
    return max(columns, 0.3) * CELL, max(rows, 0.3) * CELL


def _tensor(x: float, y: float, shape: Shape, rank: int, first: int, cell: Callable[[int, float, float], str]) -> str:
    """A tensor at (x, y), cell by cell from number ``first`` on; or one box where these would be too many."""
    w, h = _size(shape)
    if not _small(shape):
        return _rect(x, y, w, h, colour(rank)) + _text(x + w / 2, y + CELL + 3, str(shape), "n")
    rows, columns = _flat(shape)
    if not rows * columns:
        return f"<g>{_rect(x, y, w, h, None, 'z')}<title>{escape(f'rank {rank}: no elements, {shape}')}</title></g>"
    spots = product(range(rows), range(columns))
    return "".join(cell(k, x + j * CELL, y + i * CELL) for k, (i, j) in enumerate(spots, first))


def _cell(x: float, y: float, number: str, ranks: Sequence[int], about: str) -> str:
    """An element, in the colours of the ranks that it comes from; from none it is zero."""
    width = CELL / max(len(ranks), 1)
    parts = [_rect(x + k * width, y, width, CELL, colour(r), "") for k, r in enumerate(ranks)]
    parts.append(_rect(x, y, CELL, CELL, "none") if ranks else _rect(x, y, CELL, CELL, None, "z"))
    if number:
        parts.append(_text(x + CELL / 2, y + 12.5, number, "n"))
    return f"<g>{''.join(parts)}<title>{escape(about)}</title></g>"


def flow(
    held: Tensors,
    wanted: Tensors,
    sources: Sequence[Sequence[Source]],
    messages: Iterable[tuple[int, int, int]],
    grids: tuple[Callable[[int], tuple[int, int]], Callable[[int], tuple[int, int]]] | None = None,
) -> Drawing:
    """Who holds what on the left, who wants what on the right, arrows for messages between them.

    ``sources``: of every wanted element the held elements that it is a sum of; equal numbers are the same element.
    ``messages``: (from, to, elements), of what stays too. ``grids``: where ranks stand on either side, as (row,
    column), instead of one below the other; arrows are left out there.
    """
    ranks, parts = sorted({*held.shapes, *wanted.shapes}), []
    own, theirs = held.places(), wanted.places()
    messages, numbered = list(messages), len(own) < 1000

    def held_cell(k: int, x: float, y: float) -> str:
        return _cell(x, y, str(k) if numbered else "", [own[k][0]], _name(own[k]))

    def wanted_cell(k: int, x: float, y: float) -> str:
        found = sources[k]
        number = str(found[0][0]) if len(found) == 1 and numbered else "+" * (len(found) > 1)
        about = " + ".join(f"{'' if v == 1 else f'{v:g} · '}{_name(own[j])}" for j, v in found) or "0"
        return _cell(x, y, number, sorted({own[j][0] for j, _ in found}), f"{_name(theirs[k])} = {about}")

    left, bottom, places = 0.0 if grids else float(LABEL), 0.0, {}
    for side, (tensors, cell) in enumerate(((held, held_cell), (wanted, wanted_cell))):
        at, width, height = _exploded(tensors.shapes, grids[side]) if grids else _lanes(held, wanted, side)
        width, first = max(width, 5.5 * len(tensors.word)), 0
        parts.append(_text(left + width / 2, height + 10, tensors.word, "f m"))
        for r, shape in tensors.shapes.items():
            x, y = left + at[r][0], at[r][1]
            places[side, r] = (x, y, *_size(shape))
            parts.append(_tensor(x, y, shape, r, first, cell))
            first += math.prod(shape)
            if grids:
                parts.append(_text(x, y - 4, f"rank {r}", "f"))
            elif r in ranks:
                ranks.remove(r)
                parts.append(_text(0, y + 13, f"rank {r}"))
        left, bottom = left + width + (FLOW if side == 0 else 0), max(bottom, height + 16)
    if grids:
        gone = [n for a, b, n in messages if a != b]
        parts.append(_text(left / 2, bottom + 14, f"{len(gone)} messages, {sum(gone)} elements", "m"))
        return Drawing(left, bottom + 20, "\n".join(parts))
    return Drawing(left, bottom, "\n".join([*parts, *_arrows(messages, places)]))


def _name(place: tuple[int, Shape]) -> str:
    return f"rank {place[0]} {list(place[1])}"


Places = dict[int, tuple[float, float]]


def _lanes(held: Tensors, wanted: Tensors, side: int) -> tuple[Places, float, float]:
    """One rank below the other: where each one's tensor begins, and the size of all."""
    ranks = sorted({*held.shapes, *wanted.shapes})
    heights = [max(_size(t.shapes[r])[1] for t in (held, wanted) if r in t.shapes) + LANE for r in ranks]
    shapes = (held, wanted)[side].shapes
    tops = {r: (0.0, top) for r, top in zip(ranks, accumulate(heights, initial=0.0))}
    return tops, max((_size(shape)[0] for shape in shapes.values()), default=0.0), sum(heights) - LANE + 6


def _exploded(shapes: dict[int, Shape], grid: Callable[[int], tuple[int, int]]) -> tuple[Places, float, float]:
    """Ranks where they stand in their grid, with room between."""
    spots = {r: grid(r) for r in shapes}
    starts = []
    for axis in (0, 1):
        n = max(spot[axis] for spot in spots.values()) + 1
        sizes = [
            max(_size(shapes[r])[1 - axis] for r, spot in spots.items() if spot[axis] == i) + LANE for i in range(n)
        ]
        starts.append(list(accumulate(sizes, initial=0.0)))
    rows, columns = starts
    places = {r: (columns[j], rows[i] + LANE) for r, (i, j) in spots.items()}
    return places, columns[-1] - LANE, rows[-1] + 6


def _arrows(messages: Sequence[tuple[int, int, int]], places: Mapping[tuple[int, int], tuple[float, ...]]) -> list[str]:
    """From the right of a held tensor to the left of a wanted one; each with its number of elements, near its start:
    there the arrows lie apart."""
    lines, labels = [], []
    for a, b, n in messages:
        x0, y0, w, h = places[0, a]
        x1, y1, _, g = places[1, b]
        outs, ins = [m for m in messages if m[0] == a], [m for m in messages if m[1] == b]
        x0, x1 = x0 + w + 4, x1 - 5
        y0 += h * (outs.index((a, b, n)) + 1) / (len(outs) + 1)
        y1 += g * (ins.index((a, b, n)) + 1) / (len(ins) + 1)
        mid, kept = (x0 + x1) / 2, " k" if a == b else ""
        words = f"rank {a} keeps {n}" if a == b else f"rank {a} sends {n} to rank {b}"
        path = f"M{_n(x0)} {_n(y0)}C{_n(mid)} {_n(y0)} {_n(mid)} {_n(y1)} {_n(x1)} {_n(y1)}"
        head = f"M{_n(x1 - 6)} {_n(y1 - 3.5)}L{_n(x1)} {_n(y1)}L{_n(x1 - 6)} {_n(y1 + 3.5)}"
        lines.append(f'<path class="a{kept}" stroke="{colour(a)}" d="{path}{head}"><title>{words}</title></path>')
        if a != b:
            t = 0.24
            along = [(1 - t) ** 3 * p + 3 * (1 - t) ** 2 * t * q + 3 * (1 - t) * t**2 * r + t**3 * s
                     for p, q, r, s in ((x0, mid, mid, x1), (y0, y0, y1, y1))]  # fmt: skip
            labels.append(_text(along[0], along[1] + 4, str(n), "m b"))
    return lines + labels


# ---------------------------------------------------------------- layouts, and schedules


def blocks(shape: Shape, boxes: dict[int, tuple[tuple[int, int], ...]]) -> Drawing:
    """A global tensor of one or two dims, each block in its rank's colour."""
    unit = min(CELL, 320 / max(*shape, 1))
    parts = []
    for r, box in boxes.items():
        (y0, y1), (x0, x1) = box if len(box) == 2 else ((0, 1), box[0])
        if y1 > y0 and x1 > x0:
            about = f"rank {r}: [{', '.join(f'{a}:{b}' for a, b in box)}]"
            parts.append(f"<g>{_rect(x0 * unit, y0 * unit, (x1 - x0) * unit, (y1 - y0) * unit, colour(r))}"
                         f"<title>{about}</title></g>")  # fmt: skip
            parts.append(_text((x0 + x1) / 2 * unit, (y0 + y1) / 2 * unit + 4, str(r), "n"))
    empty = [str(r) for r, box in boxes.items() if any(a == b for a, b in box)]
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    if empty:
        parts.append(_text(0, rows * unit + 14, f"empty: {', '.join(empty)}", "f"))
    return Drawing(max(columns * unit, 40), rows * unit + (20 if empty else 4), "".join(parts))


def cube(shape: Shape, boxes: dict[int, tuple[tuple[int, int], ...]], word: str = "") -> Drawing:
    """A global tensor of three dims from above its last corner, (up: dim 0, right: dim 1, back: dim 2)."""
    unit = 110 / max(*shape, 1)

    def point(i: float, j: float, k: float) -> str:
        return f"{_n((j + 0.5 * k) * unit)},{_n((shape[0] - i + 0.45 * (shape[2] - k)) * unit)}"

    def face(corners: Sequence[tuple[float, float, float]], r: int, alpha: float) -> str:
        points = " ".join(point(*p) for p in corners)
        paint = f'fill="{colour(r)}" fill-opacity="{alpha}"'
        return f'<polygon points="{points}" fill="#fff"/><polygon class="c" points="{points}" {paint}/>'

    parts = []
    for r, box in sorted(boxes.items(), key=lambda item: (-item[1][2][0], item[1][:2])):  # what hides others comes last
        (i0, i1), (j0, j1), (k0, k1) = box
        if i1 == i0 or j1 == j0 or k1 == k0:
            continue
        drawn = face(((i0, j0, k0), (i1, j0, k0), (i1, j1, k0), (i0, j1, k0)), r, 1)  # in front
        drawn += face(((i1, j0, k0), (i1, j0, k1), (i1, j1, k1), (i1, j1, k0)), r, 0.75)  # above
        drawn += face(((i0, j1, k0), (i1, j1, k0), (i1, j1, k1), (i0, j1, k1)), r, 0.55)  # at the right
        x, y = map(float, point((i0 + i1) / 2, (j0 + j1) / 2, k0).split(","))
        about = f"rank {r}: [{', '.join(f'{a}:{b}' for a, b in box)}]"
        parts.append(f"<g>{drawn}{_text(x, y + 4, str(r), 'n')}<title>{about}</title></g>")
    width, height = (shape[1] + 0.5 * shape[2]) * unit, (shape[0] + 0.45 * shape[2]) * unit
    return Drawing(max(width, 6 * len(word)), height + 20, "".join(parts) + _text(0, height + 16, word, "f"))


def lines(rows: Sequence[str]) -> Drawing:
    """What is said in words."""
    return Drawing(
        6.2 * max(map(len, rows)), 15 * len(rows), "".join(_text(0, 15 * i + 11, row) for i, row in enumerate(rows))
    )


def gantt(spans: Iterable[tuple[int, str, int, float, float]], devices: int, makespan: float, word: str) -> Drawing:
    """Work on each device: (device, "F" or "B", micro-batch, begin, end)."""
    unit, parts = min(26, 900 / makespan), []
    for device, kind, micro, begin, end in spans:
        box = LABEL + 16 + begin * unit, device * 28.0, (end - begin) * unit, 22.0
        about = f"{kind}{micro} on device {device}: {begin:g} to {end:g}"
        shade = "" if kind == "F" else _rect(*box, "#ffffff88", "")  # backward is pale
        label = _text(LABEL + 16 + (begin + end) / 2 * unit, device * 28 + 15, f"{kind}{micro}", "n")
        parts.append(f"<g>{_rect(*box, colour(micro))}{shade}{label}<title>{about}</title></g>")
    parts += [_text(0, device * 28 + 15, f"device {device}") for device in range(devices)]
    parts.append(_text(LABEL + 16, devices * 28 + 12, word, "f"))
    return Drawing(LABEL + 16 + makespan * unit, devices * 28 + 18, "".join(parts))
