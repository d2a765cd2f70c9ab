"""Pipeline schedules as plain data, and a simulator that proves them. Pure Python: neither MPI nor torch.

GPipe: Huang et al., arXiv:1811.06965. 1F1B: Narayanan et al., arXiv:1806.03377, and with one flush for each batch
arXiv:2006.09503. Interleaved: Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ..errors import PartitionError
from ..svg import Picture, gantt, picture

__all__ = ["Task", "Timeline", "schedule", "simulate"]


class Task(NamedTuple):
    """One piece of work: the forward ("F") or backward ("B") of micro-batch ``micro`` at ``stage``.

    No errors, and no messages: a name for one cell, whose activations have any shape.

    Example:
        >>> dd.parallel.schedule("gpipe", 2, 1)[0][0] == dd.parallel.Task("F", stage=0, micro=0)
        True
    """

    kind: str
    stage: int
    micro: int


def schedule(kind: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Task, ...], ...]:
    """What each device does, in order: plain data, which :func:`simulate` proves and :func:`pipeline` runs.

    Args:
        kind: ``"gpipe"`` (all forwards, then all backwards), ``"1f1b"`` (device s starts with min(p - s - 1, m)
            forwards, then does one forward and one backward in turn), ``"interleaved"`` (1F1B with ``chunks`` stages on
            each device).
        stages: p, the number of devices.
        microbatches: m. Any number; ``"interleaved"`` needs a multiple of p.
        chunks: v, for ``"interleaved"``. Stage k of the v·p stages lives on device k mod p.

    Returns:
        For each device a tuple of :class:`Task`. Any other table of this form may be used in its place.

    With equal stages, F taking 1 and B taking b, a step takes (m + p - 1)(1 + b), of which (p - 1)/(m + p - 1) is idle;
    interleaved, for v > 1 chunks of 1/v of the work each, (m + (p - 1)/v)(1 + b). Device s keeps m (GPipe), min(p - s,
    m) (1F1B) or min(2(p - s - 1) + (v - 1)p + 1, vm) pullbacks (interleaved; each of 1/v of a device's layers).

    Raises:
        PartitionError: an unknown kind, sizes below 1, or micro-batches that are no multiple of p.

    Example:
        >>> for row in dd.parallel.schedule("1f1b", 2, 2): print(*(f"{t.kind[0]}{t.micro}" for t in row))
        F0 F1 B0 B1
        F0 B0 F1 B1
    """
    p, m, v = stages, microbatches, chunks
    if kind not in ("gpipe", "1f1b", "interleaved") or min(p, m, v) < 1 or (kind != "interleaved" and v > 1):
        raise PartitionError(
            "no such schedule",
            actual=(kind, p, m, v),
            expected='"gpipe", "1f1b" or "interleaved", sizes >= 1; chunks > 1 only interleaved',
            next_step="choose one of these; one chunk unless interleaved",
        )
    if kind == "interleaved" and m % p:
        raise PartitionError(
            "interleaved stages take groups of p micro-batches",
            actual=f"{m} micro-batches",
            expected=f"a multiple of {p}",
            next_step="use 1f1b, or another number of micro-batches",
        )
    table = []
    for s in range(p):
        warm = {"gpipe": m, "1f1b": p - s - 1, "interleaved": 2 * (p - s - 1) + (v - 1) * p}[kind]
        groups = [range(i, i + p) for i in range(0, m, p)] if kind == "interleaved" else [range(m)]
        ahead, back = (
            [Task(which, c * p + s, i) for group in groups for c in order for i in group]
            for which, order in (("F", range(v)), ("B", range(v)[::-1]))
        )
        warm = min(warm, len(ahead))
        steady = chain.from_iterable(zip(ahead[warm:], back))
        table.append((*ahead[:warm], *steady, *back[len(ahead) - warm :]))
    return tuple(table)


class Timeline(NamedTuple):
    """The result of :func:`simulate`.

    Attributes:
        order: all tasks in one global order that respects every device's list and every dependence.
        spans: {task: (start, end)}.
        makespan: when the last task ends.
        live: for each device the largest number of micro-batches whose forward is done and whose backward is not.
        bubble: the idle share of all devices' time.

    Example:
        >>> found = dd.parallel.simulate(dd.parallel.schedule("1f1b", 2, 4))
        >>> isinstance(found, dd.parallel.Timeline), found.makespan, found.live
        (True, 15, (2, 1))
    """

    order: tuple[Task, ...]
    spans: dict[Task, tuple[float, float]]
    makespan: float
    live: tuple[int, ...]
    bubble: float

    def __str__(self) -> str:
        """A row for each device; one column for each unit of time (whole-numbered costs)."""
        width = max(len(str(t.micro)) for t in self.order) + 2
        rows = [[" ." + " " * (width - 2)] * int(self.makespan) for _ in self.live]
        for task, (begin, end) in self.spans.items():
            cells = rows[task.stage % len(rows)]
            for at in range(int(begin), int(end)):
                cells[at] = f" {task.kind}{task.micro}".ljust(width) if at == begin else f" {'-' * (width - 1)}"
        return "\n".join("".join(cells).rstrip() for cells in rows)

    def picture(self) -> Picture:
        """A row for each device, time from left to right; in a terminal the text of ``str``."""
        n = len(self.live)
        spans = [(t.stage % n, t.kind, t.micro, begin, end) for t, (begin, end) in self.spans.items()]
        word = (
            f"{self.makespan:g} units of time, {self.bubble:.0%} idle; kept at most: {', '.join(map(str, self.live))}"
        )
        return picture([("", gantt(spans, n, self.makespan, word))], f"a schedule of {n} devices: {word}", str(self))

    def _repr_html_(self) -> str:
        return self.picture().svg


def needs(task: Task, last: int) -> list[Task]:
    """The tasks whose results ``task`` takes."""
    kind, k, i = task
    if kind == "F":
        return [Task("F", k - 1, i)] if k else []
    return [Task("F", k, i)] + ([Task("B", k + 1, i)] if k < last else [])


def successor(task: Task, last: int) -> Task | None:
    """The task, of another stage, that takes the result."""
    kind, k, i = task
    k += 1 if kind == "F" else -1
    return Task(kind, k, i) if 0 <= k <= last else None


def simulate(
    table: Sequence[Sequence[Task | tuple[str, int, int]]], forward: float = 1, backward: float = 2
) -> Timeline:
    """Run a schedule on paper: proof that it ends, how long it takes, and how much it keeps.

    Args:
        table: for each device a sequence of tasks, as :func:`schedule` returns; stage k lives on device k mod p.
        forward, backward: what one task costs, above 0.

    Raises:
        PartitionError: a task is missing, doubled, or on the wrong device; or the devices wait for each other in a
            circle.

    Example:
        >>> dd.parallel.simulate(dd.parallel.schedule("gpipe", 2, 4)).makespan
        15
    """
    p, tasks = len(table), Counter(Task(*t) for row in table for t in row)
    last, count = max((t.stage for t in tasks), default=-1), 1 + max((t.micro for t in tasks), default=-1)
    every = {Task(kind, k, i) for kind in "FB" for k in range(last + 1) for i in range(count)}
    astray = [t for d, row in enumerate(table) for t in row if Task(*t).stage % p != d]
    wrong = astray + sorted(every - tasks.keys()) + [t for t in tasks if tasks[t] > 1 or t not in every]
    if wrong or not tasks or (last + 1) % p:
        raise PartitionError(
            "not a schedule",
            actual=f"{last + 1} stages; astray, missing or doubled: {wrong[:3]}",
            expected=f"each F and B of {last + 1} stages x {count} micro-batches once, on device stage mod {p}",
            next_step="start from dd.parallel.schedule(...)'s table",
        )
    spans: dict[Task, tuple[float, float]] = {}
    clock: list[float] = [0] * p  # when each device is free again
    live, peak = [0] * p, [0] * p
    places, moved = [0] * p, True
    while moved:
        moved = False
        for d, row in enumerate(table):
            while places[d] < len(row) and all(n in spans for n in needs(Task(*row[places[d]]), last)):
                task = Task(*row[places[d]])
                begin = max([clock[d], *(spans[n][1] for n in needs(task, last))])
                clock[d] = begin + (forward if task.kind == "F" else backward)
                spans[task] = begin, clock[d]
                live[d] += 1 if task.kind == "F" else -1
                peak[d] = max(peak[d], live[d])
                places[d], moved = places[d] + 1, True
    stuck = {d: Task(*row[at]) for d, (row, at) in enumerate(zip(table, places)) if at < len(row)}
    if stuck:
        raise PartitionError(
            "this schedule never ends",
            expected="an order in which every task can run",
            actual="; ".join(f"device {d} waits before {tuple(t)}" for d, t in stuck.items()),
            next_step="put each task after those that it needs",
        )
    order = tuple(sorted(spans, key=lambda t: (spans[t][1], t.stage % p)))
    makespan = max(clock)
    busy = sum(end - begin for begin, end in spans.values())
    return Timeline(order, spans, makespan, tuple(peak), 1 - busy / (p * makespan))
