"""The picture of a timeline: one HTML page with an SVG and a table, which loads nothing and runs no script."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

__all__ = ["page"]
Scale = Callable[[float], float]  # µs to px

_WIDTH, _LEFT, _LANE, _GAP, _TOP = 1160, 74, 26, 18, 30  # px
_HUES = 8  # colours, by the movements' total time; what follows is grey
_MOST = 20_000  # slices and arrows that a picture has; the longest ones

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --faint: #6b7480; --line: #d8dde3; --paper: #ffffff; --lane: #f4f6f8;
  --wait: #00000038; --on: #ffffff; --c0: #4477aa; --c1: #ee8866; --c2: #44bb99; --c3: #ddaa33; --c4: #aa4499;
  --c5: #66aa55; --c6: #bb5566; --c7: #999933; --c8: #9aa3ad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --faint: #9aa4b0; --line: #3a424c; --paper: #14171b;
  --lane: #1d2228; --wait: #ffffff60; --on: #101316; --c0: #6699cc; --c3: #ddbb55; --c4: #cc77bb; --c8: #6f7985; } }
body { background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; margin: 24px auto;
  max-width: 1240px; padding: 0 20px; }
h1 { font-size: 19px; font-weight: 600; margin: 0 0 2px; } p { color: var(--faint); margin: 0 0 14px; }
figure { margin: 0; overflow-x: auto; } svg { display: block; min-width: 900px; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 11px; } svg text.rank { fill: var(--ink); font-size: 13px; }
svg text.name { fill: var(--on); pointer-events: none; } .lane { fill: var(--lane); } .grid { stroke: var(--line); }
.wait { fill: url(#waiting); } .hatch { stroke: var(--wait); stroke-width: 3; }
.arrow { stroke: var(--ink); stroke-width: 1; opacity: .55; } .arrow:hover { opacity: 1; stroke-width: 2.5; }
.head { fill: var(--ink); } table { border-collapse: collapse; margin-top: 20px; font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 500; } th, td { border-bottom: 1px solid var(--line); padding: 4px 18px 4px 0;
  text-align: right; } th:first-child, td:first-child { text-align: left; }
i { border-radius: 2px; display: inline-block; height: 11px; margin-right: 8px; width: 11px; }
"""


def page(trace: dict[str, Any], title: str = "Movements of a run") -> str:
    """The page of a trace that :func:`distdl.timeline.trace` has made."""
    events = [e for e in trace["traceEvents"] if e["ph"] in "Xsf"]
    slices = [e for e in events if e["ph"] == "X"]
    last = max((e["ts"] + e.get("dur", 0) for e in events), default=0.0) or 1.0
    lanes = sorted({(rank, 0) for rank in range(trace["otherData"]["ranks"])} | {(e["pid"], e["tid"]) for e in slices})
    rows = {lane: _TOP + i * (_LANE + _GAP) for i, lane in enumerate(lanes)}
    colours = _colours(slices)
    height = _TOP + len(lanes) * (_LANE + _GAP) + 6
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    arrows = [(starts[e["id"]], e) for e in events if e["ph"] == "f"]
    drawn = sorted(slices, key=lambda e: -e["dur"])[:_MOST]
    drawn.sort(key=lambda e: (e["cat"] == "wait", e["ts"]))  # waits lie on top of their movement
    shown = arrows[:_MOST]

    def x(ts: float) -> float:
        return _LEFT + ts / last * (_WIDTH - _LEFT - 8)

    parts = [*_axis(last, x, height), *_lanes(rows, trace)]
    parts += [_slice(e, x, rows[e["pid"], e["tid"]], colours) for e in drawn]
    parts += [_arrow(s, f, x, rows) for s, f in shown]
    left_out = len(slices) - len(drawn) + len(arrows) - len(shown)
    note = f"; the {left_out} shortest slices and last arrows are left out of the picture" if left_out else ""
    about = f"{trace['otherData']['ranks']} ranks, {_time(last)}, {len(arrows)} messages{note}. Hatched: waiting. "
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1><p>{about}Hover over a slice or an arrow to see what it is.</p>
<figure><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">
<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path class="head" d="M0 1 8 4 0 7z"/></marker></defs>
{chr(10).join(parts)}
</svg></figure>
{_table(slices, colours)}
</body></html>
"""


def _colours(slices: Iterable[dict[str, Any]]) -> dict[str, int]:
    """{movement: its colour}; those that take longest have one of their own. Waits have their movement's."""
    total: dict[str, float] = defaultdict(float)
    for e in slices:
        if e["cat"] != "wait":
            total[_movement(e)] += e["dur"]
    order = sorted(total, key=lambda name: (name.startswith("agreement"), -total[name], name))
    return {name: _HUES if name.startswith("agreement") else min(i, _HUES) for i, name in enumerate(order)}


def _movement(e: dict[str, Any]) -> str:
    if e["cat"] == "wait":
        return e["args"]["movement"]
    return "agreement" if e["cat"] == "agreement" else e["name"].removeprefix("start of ")


def _axis(last: float, x: Scale, height: int) -> list[str]:
    """Lines at round times."""
    step = 10 ** math.floor(math.log10(last))
    step = next(step * f for f in (0.1, 0.2, 0.5, 1) if last / (step * f) <= 10)
    parts = []
    for i in range(int(last / step) + 1):
        at = x(i * step)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="20" x2="{at:.1f}" y2="{height}"/>')
        parts.append(f'<text x="{at:.1f}" y="14" text-anchor="middle">{_time(i * step)}</text>')
    return parts


def _lanes(rows: dict[tuple[int, int], int], trace: dict[str, Any]) -> list[str]:
    parts = []
    for (rank, lane), y in rows.items():
        name = f"thread {lane}" if lane else f"rank {rank}"
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 8}" height="{_LANE}" rx="3"/>')
        parts.append(f'<text class="rank" x="{_LEFT - 10}" y="{y + 18}" text-anchor="end">{name}</text>')
    return parts


def _slice(e: dict[str, Any], x: Scale, y: int, colours: dict[str, int]) -> str:
    begin, end, wait = x(e["ts"]), x(e["ts"] + e["dur"]), e["cat"] == "wait"
    width = max(end - begin, 0.8)
    shade = f'style="fill: var(--c{colours.get(_movement(e), _HUES)})"'
    box = f'x="{begin:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" rx="{min(3, width / 2):.1f}"'
    name = e["name"]
    written = ""
    if not wait and width > 7 * len(name) + 8:
        written = f'<text class="name" x="{begin + 5:.1f}" y="{y + 17}">{escape(name)}</text>'
    alone = wait and e["name"] != "wait"  # after F.start: no slice lies below
    below = f"<rect {shade} {box}/>" if alone or not wait else ""
    above = f'<rect class="wait" {box}/>' if wait else ""
    return f"<g><title>{escape(_about(e))}</title>{below}{above}{written}</g>"


def _about(e: dict[str, Any]) -> str:
    lines, args = [f"{e['name']}: {_time(e['dur'])}"], e["args"]
    if e["cat"] == "wait":
        return f"{e['name']}: {_time(e['dur'])}, in {args['movement']}"
    if args["call"] and args["call"] != e["name"]:
        lines.append(f"in {args['call']}")
    lines.append(args["line"])
    lines += [f"to rank {s['to']}: {s['bytes']} B" for s in args["sends"][:16]]
    lines += [f"from rank {s['from']}: {s['bytes']} B" for s in args["receives"][:16]]
    lines += [f"{c['kind']} of ranks {', '.join(map(str, c['ranks']))}: {c['bytes']} B" for c in args["collectives"]]
    return "\n".join(lines)


def _arrow(s: dict[str, Any], f: dict[str, Any], x: Scale, rows: dict[tuple[int, int], int]) -> str:
    a, b = rows[s["pid"], s["tid"]], rows[f["pid"], f["tid"]]
    down = b > a
    y0, y1 = (a + _LANE, b) if down else (a, b + _LANE)
    text = f"{s['name']}: rank {s['pid']} to {f['pid']}, {s['args']['bytes']} B, {_time(max(0.0, f['ts'] - s['ts']))}"
    ends = f'x1="{x(s["ts"]):.2f}" y1="{y0}" x2="{x(f["ts"]):.2f}" y2="{y1}"'
    return f'<line class="arrow" marker-end="url(#head)" {ends}><title>{escape(text)}</title></line>'


def _table(slices: list[dict[str, Any]], colours: dict[str, int]) -> str:
    """Of each movement, over all ranks: how often, messages, bytes, time, and how much of it was waiting."""
    rows: dict[str, list[float]] = {name: [0, 0, 0, 0.0, 0.0] for name in colours}
    for e in slices:
        row = rows[_movement(e) if _movement(e) in rows else "agreement"]
        if e["cat"] == "wait":
            row[4] += e["dur"]
            row[3] += e["dur"] if e["name"] != "wait" else 0
        else:
            args = e["args"]
            row[0] += 1
            row[1] += len(args["sends"])
            row[2] += args["bytes"]
            row[3] += e["dur"]
    lines = ["<tr><th>movement</th><th>calls</th><th>messages</th><th>bytes</th><th>time</th><th>waiting</th></tr>"]
    for name, (calls, messages, nbytes, time, waiting) in rows.items():
        mark = f'<i style="background: var(--c{colours[name]})"></i>{escape(name)}'
        numbers = (f"{calls:,.0f}", f"{messages:,.0f}", f"{nbytes:,.0f}", _time(time), _time(waiting))
        lines.append(f"<tr><td>{mark}</td>{''.join(f'<td>{n}</td>' for n in numbers)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _time(us: float) -> str:
    """In the unit that it is read in."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"
