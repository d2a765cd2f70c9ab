"""The picture of a traced program: one HTML page with an SVG and a table, which loads nothing and runs no script."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from ..timeline_page import STYLE

if TYPE_CHECKING:
    from .machines import Machine
    from .program import Movement, Program, Work

__all__ = ["page"]

_WIDTH, _LEFT, _LANE, _GAP, _TOP = 1160, 92, 26, 22, 34  # px
_MOST = 4000  # boxes and arrows that a picture has
_ROWS = 400  # lines of the table

_MORE = """
.work { fill: var(--line); } code { font-size: 12px; } td.left, th.left { text-align: left; }
.out { stroke-dasharray: 3 3; } .sum { stroke: var(--ink); stroke-width: 1; opacity: .4; stroke-dasharray: 2 2; }
details { margin-top: 20px; } summary { cursor: pointer; }
"""


def page(program: Program, machine: Machine) -> str:
    """The page: a lane for each traced rank, with boxes as long as they take on ``machine``, and an arrow for each
    message; a message to a rank that was not traced ends at its lane's edge."""
    lanes = {rank: _TOP + i * (_LANE + _GAP) for i, rank in enumerate(program.ranks)}
    placed = {rank: list(_placed(program.events[rank], rank, machine)) for rank in program.ranks}
    last = max((end for boxes in placed.values() for _, _, end in boxes), default=0.0) or 1e-6
    colours = _colours(e for boxes in placed.values() for e, _, _ in boxes)
    height = _TOP + len(lanes) * (_LANE + _GAP) + 8

    def x(seconds: float) -> float:
        return _LEFT + seconds / last * (_WIDTH - _LEFT - 10)

    boxes = [_box(e, x(a), x(b), lanes[r], colours) for r, some in placed.items() for e, a, b in some]
    arrows = [*_arrows(placed, lanes, x)]
    left_out = max(len(boxes) - _MOST, 0) + max(len(arrows) - _MOST, 0)
    note = f" The last {left_out} boxes and arrows are left out." if left_out else ""
    names = [_lane(rank, y, program) for rank, y in lanes.items()]
    about = (
        f"{len(lanes)} of {program.size} ranks; {_time(last)} on “{escape(machine.name)}”. Grey: local operators. "
        f"Dashed: to or from ranks that are not in the picture.{note} Hover over a box or an arrow to see what it is."
    )
    first = program.ranks[0]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>A program before it runs</title><style>{STYLE}{_MORE}</style></head><body>
<h1>A program before it runs</h1><p>{about}</p>
<figure><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Movements by rank and predicted time">
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path class="head" d="M0 1 8 4 0 7z"/></marker></defs>
{chr(10).join([*_axis(last, x, height), *names, *boxes[:_MOST], *arrows[:_MOST]])}
</svg></figure>
{_legend(colours)}
{_totals(program, machine)}
<details open><summary>Movements of rank {first}</summary>
{_table(program.of(first).movements, first, machine)}</details>
</body></html>
"""


def _placed(events: Iterable[Any], rank: int, machine: Machine) -> Iterator[tuple[Any, float, float]]:
    """(event, begin, end); local operators that follow one another are one."""
    now, run = 0.0, []
    start = 0.0
    for event in events:
        took = machine.seconds(event, rank)
        if hasattr(event, "flops"):
            run.append(event)
        else:
            if run:
                yield run, start, now
            yield event, now, now + took
            run, start = [], now + took
        now += took
    if run:
        yield run, start, now


def _name(event: Movement) -> str:
    return event.op.partition(" and ")[0]


def _colours(events: Iterable[Any]) -> dict[str, int]:
    counted = Counter(_name(e).removesuffix(".T") for e in events if not isinstance(e, list))
    return {name: min(i, 8) for i, (name, _) in enumerate(counted.most_common())}


def _box(event: Any, a: float, b: float, y: float, colours: dict[str, int]) -> str:
    if isinstance(event, list):
        return (
            f'<rect class="work" x="{a:.1f}" y="{y}" width="{max(b - a, 0.3):.1f}" height="{_LANE}">{_of(event)}</rect>'
        )
    colour = colours[_name(event).removesuffix(".T")]
    name = escape(_name(event)) if b - a > 7 * len(_name(event)) else ""
    return (
        f'<g><title>{escape(str(event))}</title><rect x="{a:.1f}" y="{y}" width="{max(b - a, 1):.1f}" height="{_LANE}" '
        f'rx="2" style="fill:var(--c{colour});opacity:{0.7 if event.phase == "backward" else 1}"/>'
        f'<text class="name" x="{a + 4:.1f}" y="{y + 17}">{name}</text></g>'
    )


def _of(work: list[Work]) -> str:
    kinds = ", ".join(f"{n} {op}" for op, n in Counter(w.op for w in work).most_common(6))
    flops, touched = sum(w.flops for w in work), sum(w.bytes for w in work)
    return f"<title>{len(work)} operators: {escape(kinds)}; {flops:,} flops, {touched:,} B</title>"


def _arrows(placed: dict[int, list[Any]], lanes: dict[int, int], x: Any) -> Iterator[str]:
    """From the first half of a movement to the second half of the same one of its peer."""
    moving = {rank: [(e, a, b) for e, a, b in boxes if not isinstance(e, list)] for rank, boxes in placed.items()}
    for rank, movements in moving.items():
        for i, (event, a, b) in enumerate(movements):
            for k, (kind, peers, n) in enumerate(event.sent):
                part = (k + 0.5) / len(event.sent) / 2  # one beside the other
                begin, y = x(a + (b - a) * part), lanes[rank] + _LANE
                if kind != "send":
                    shown = [lanes[r] for r in peers if r in lanes]
                    if rank == peers[0] and len(shown) > 1:
                        top, low = min(shown) + _LANE / 2, max(shown) + _LANE / 2
                        yield _line(begin, top, begin, low, f"{kind} of {len(peers)} ranks, {n:,} B", "sum")
                elif peers in lanes and i < len(moving[peers]):
                    down = lanes[peers] > lanes[rank]
                    _, c, d = moving[peers][i]
                    ends = (y if down else lanes[rank], lanes[peers] if down else lanes[peers] + _LANE)
                    yield _line(
                        begin, ends[0], x(d - (d - c) * part), ends[1], f"rank {rank} to {peers}, {n:,} B", "arrow"
                    )
                else:
                    yield _line(begin, y, begin, y + _GAP / 2, f"rank {rank} to {peers}, {n:,} B", "arrow out")


def _line(x0: float, y0: float, x1: float, y1: float, what: str, kind: str) -> str:
    head = "" if kind == "sum" else ' marker-end="url(#head)"'
    return (
        f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"{head}>'
        f"<title>{escape(what)}</title></line>"
    )


def _lane(rank: int, y: float, program: Program) -> str:
    return (
        f'<text class="rank" x="0" y="{y + 17}">rank {rank}</text>'
        f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 10}" height="{_LANE}"/>'
    )


def _axis(last: float, x: Any, height: float) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(last / 4))
    step *= max(k for k in (1, 2, 5) if last / (k * step) >= 4)
    for i in range(int(last / step) + 1):
        at = x(i * step)
        yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP - 8}" x2="{at:.1f}" y2="{height}"/>'
        yield f'<text x="{at:.1f}" y="{_TOP - 14}" text-anchor="middle">{_time(i * step)}</text>'


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _legend(colours: dict[str, int]) -> str:
    marks = (f'<i style="background:var(--c{c})"></i>{escape(name)}&emsp;' for name, c in colours.items())
    return f"<p>{''.join(marks)}<i style='background:var(--line)'></i>local operators</p>"


def _totals(program: Program, machine: Machine) -> str:
    head = ("rank", "movements", "messages", "collectives", "bytes sent", "operators", "flops", "predicted")
    rows = "".join(
        f"<tr><td>{rank}</td>"
        + "".join(f"<td>{n:,}</td>" for n in (t.movements, t.messages, t.collectives, t.bytes, t.operators, t.flops))
        + f"<td>{_time(program.of(rank).cost(machine))}</td></tr>"
        for rank, t in program.totals.items()
    )
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{rows}</table>"


def _table(movements: tuple[Movement, ...], rank: int, machine: Machine) -> str:
    rows = "".join(
        f"<tr><td>{i}</td><td class='left'>{escape(m.op)}</td><td class='left'>{m.phase}</td>"
        f"<td class='left'><code>{escape(m.layouts)}</code></td><td>{len(m.sent)}</td><td>{m.bytes:,}</td>"
        f"<td>{_time(machine.seconds(m, rank))}</td><td class='left'><code>{escape(_where(m))}</code></td></tr>"
        for i, m in enumerate(movements[:_ROWS])
    )
    more = f"<p>{len(movements) - _ROWS} more</p>" if len(movements) > _ROWS else ""
    head = "<th></th><th class='left'>movement</th><th class='left'>phase</th><th class='left'>layouts</th>"
    head += "<th>messages</th><th>bytes</th><th>predicted</th><th class='left'>line</th>"
    return f"<table><tr>{head}</tr>{rows}</table>{more}"


def _where(m: Movement) -> str:
    line = (m.forward_line or m.line).partition(" in ")[0]
    return line.rpartition("/")[2]
