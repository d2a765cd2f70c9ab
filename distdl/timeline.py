"""A run as a picture: every movement of every rank on one axis of time, with its messages as arrows.

``with dd.timeline("run.json"): ...`` writes a trace that Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``
open; ``"run.html"`` is a page of its own. :mod:`distdl.watching.recorder` takes the notes.
"""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from . import maps
from .calls import public
from .engine import transport as _transport
from .errors import DistdlError
from .partition import Layout, Partition
from .timeline_page import page
from .watching.recorder import Recorder, clock
from .world import world as world_of

__all__ = ["Timeline", "timeline", "trace"]
Notes = dict[str, Any]  # of one rank: its machine, the marks of its clock, the world, and the events
Clock = Callable[[float], float]  # ns of a rank's clock to µs of the trace


class Timeline:
    """What :func:`timeline` hands out.

    Attributes:
        trace: after the block, on the world's first rank: the trace as it was written. ``None`` elsewhere.
    """

    def __init__(self) -> None:
        self.trace: dict[str, Any] | None = None


@contextmanager
def timeline(*paths: str | os.PathLike[str], world: str = "default") -> Iterator[Timeline]:
    """Record what the ranks move inside the block, and write it down at its end; collective, at both ends.

    Every movement (forward, adjoint, tangent, batch) and every small agreement is a slice in its rank's lane, with the
    public call and the user's line that it belongs to; a wait inside of it is a slice of its own, and a message an
    arrow from where it was handed over to where it was there. On CUDA these are the host's times. Results, gradients
    and messages do not change; while nothing records, a movement pays for one comparison.

    Args:
        paths: files for rank 0 to write: a page with a picture where the name ends in ``.html``, and else a trace in
            Chrome's format, JSON. None: look at :attr:`Timeline.trace`.
        world: whose ranks are recorded, all of them.

    Clocks: ranks on one machine share theirs. Those of several machines are laid over one another by the moments at
    which the two agreements ended, to about the time that a small all-gather takes.

    Messages: two small all-gathers around the block; after it the notes are gathered on rank 0, and one more small
    all-gather says whether they could be written.

    Raises:
        DistdlError: on every rank: a file could not be written. An exception inside of the block goes on, and nothing
            is written.

    Example:
        >>> with dd.timeline("run.json") as run:  # and ui.perfetto.dev opens it
        ...     y = F.roll(torch.arange(3), dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> [event["name"] for event in run.trace["traceEvents"] if event["ph"] == "X"]
        ['roll']
    """
    where, before, done = world_of(world), _transport.observer, Timeline()
    ranks = tuple(range(where.size))
    where.all_gather(None, ranks, "timeline")
    begin = clock()
    recorder = _transport.observer = Recorder(before)
    try:
        yield done
    finally:
        _transport.observer = before
    machine = _machine()
    where.all_gather(None, ranks, "timeline")
    notes = {"machine": machine, "marks": (begin, clock()), "world": world}
    data = json.dumps({**notes, "events": [asdict(event) for event in recorder.events]}).encode()
    sizes = tuple(where.all_gather(len(data), ranks, "timeline").values())
    L = Layout(Partition((where.size,), ranks, world), (sum(sizes),), (sizes,))
    whole = maps.gather(L, 0)(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    problem = None
    if where.rank == 0:
        done.trace = trace([json.loads(bytes(part.numpy())) for part in whole.split(sizes)])
        try:
            for path in paths:
                text = page(done.trace) if os.fspath(path).endswith(".html") else json.dumps(done.trace)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    problem = where.all_gather(problem, ranks, "timeline")[0]
    if problem is not None:
        raise DistdlError(
            "the timeline could not be written",
            expected=f"files that rank 0 can write: {paths}",
            actual=problem,
            next_step="give it a path where rank 0 may write; the program itself has gone on",
        )


def _machine() -> str:
    """What tells this machine's clock from others'."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return platform.node()


public({"timeline": timeline}, alike=False)


# ---------------------------------------------------------------- pure functions of the notes


def trace(ranks: list[Notes]) -> dict[str, Any]:
    """The notes of all ranks, in their order, as Chrome's trace: slices, arrows and names, by rising time in µs."""
    times = [_clock_of(notes, ranks) for notes in ranks]
    events: list[dict[str, Any]] = []
    for rank, (notes, at) in enumerate(zip(ranks, times)):
        lanes: dict[int, int] = {}
        for event in notes["events"]:
            event["lane"] = lanes.setdefault(event["thread"], len(lanes))
            events += _slices(event, rank, event["lane"], at)
        events.append(_named(rank, 0, "process_name", name=f"rank {rank}"))
        events.append(_named(rank, 0, "process_sort_index", sort_index=rank))
        events += [_named(rank, n, "thread_name", name=f"thread {n}" if n else "program") for n in lanes.values()]
    arrows, left = _arrows(ranks, times)
    first = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for e in (*events, *arrows):
        if "ts" in e:
            e["ts"] = round(e["ts"] - first, 3)
    described = [e for e in events if "ts" not in e]
    shown = sorted((e for e in (*events, *arrows) if "ts" in e), key=lambda e: (e["ts"], -e.get("dur", 0)))
    return {
        "traceEvents": described + shown,
        "displayTimeUnit": "ms",
        "otherData": {"ranks": len(ranks), "messages": len(arrows) // 2, "messages without the other end": left},
    }


def _clock_of(notes: Notes, ranks: list[Notes]) -> Clock:
    """ns of a rank's clock to µs of rank 0's: the same on one machine; else by the moments of the two agreements."""
    if notes["machine"] == ranks[0]["machine"]:
        return lambda t: t / 1000

    def marks(machine: str) -> tuple[float, float]:
        found = [r["marks"] for r in ranks if r["machine"] == machine]
        return median(a for a, _ in found), median(b for _, b in found)

    (a, b), (first, last) = marks(notes["machine"]), marks(ranks[0]["machine"])
    rate = (last - first) / (b - a) if b > a else 1.0
    return lambda t: (first + (t - a) * rate) / 1000


def _named(rank: int, lane: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": what, "args": args}


def _slices(event: dict[str, Any], rank: int, lane: int, at: Clock) -> Iterator[dict[str, Any]]:
    """A movement's slices: the whole and its waits; or where ``F.start`` began it, its start and the waits later on."""
    about = {
        "call": event["call"],
        "line": event["line"],
        "sends": [{"to": peer, "bytes": n} for peer, n in event["sends"]],
        "receives": [{"from": peer, "bytes": n} for peer, n in event["receives"]],
        "collectives": [{"kind": kind, "ranks": ranks, "bytes": n} for kind, ranks, n in event["collectives"]],
        "bytes": sum(n for _, n in event["sends"]) + sum(n for kind, _, n in event["collectives"] if kind != "agree"),
    }
    name, kind = event["name"], "agreement" if event["name"].startswith("agreement") else "movement"

    def piece(name: str, kind: str, begin: int, end: int, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "pid": rank, "tid": lane, "name": name, "cat": kind, "ts": at(begin),
                "dur": round(max(0.0, at(end) - at(begin)), 3), "args": args}  # fmt: skip

    paused = event["end"] is None
    end = max([event["begin"], event["posted"] or 0, event["paused"] or 0]) if paused else event["end"]
    yield piece(f"start of {name}" if paused else name, kind, event["begin"], end, **about)
    for begin, stop in event["waits"]:
        inside = stop <= end
        yield piece("wait" if inside else f"wait for {name}", "wait", begin, stop, movement=name)


def _arrows(ranks: list[Notes], times: list[Clock]) -> tuple[list[dict[str, Any]], int]:
    """(flow events, messages that only one end has noted). Messages between two ranks keep their order, so the k-th of
    one name and size that one sends to the other is the k-th that this one gets."""
    sent: dict[tuple[int, int, int, str], deque[tuple[float, int]]] = defaultdict(deque)
    for rank, event, at in _of_this_world(ranks, times):
        for peer, n in event["sends"]:
            sent[rank, peer, n, event["name"]].append((at(event["posted"]), event["lane"]))
    arrows: list[dict[str, Any]] = []
    left = 0
    for rank, event, at in _of_this_world(ranks, times):
        for peer, n in event["receives"]:
            name, waits = event["name"], event["waits"]
            if not sent[peer, rank, n, name]:
                left += 1
                continue
            departure, lane = sent[peer, rank, n, name].popleft()
            # within the last slice, which is where viewers look for what an arrow belongs to
            arrival = at(max(waits[-1][0], waits[-1][1] - 1) if waits else event["posted"])
            about = {"cat": "message", "name": name, "id": len(arrows) // 2 + 1}
            arrows.append({"ph": "s", "pid": peer, "tid": lane, "ts": departure, **about, "args": {"bytes": n}})
            arrows.append({"ph": "f", "bp": "e", "pid": rank, "tid": event["lane"], "ts": arrival, **about})
    return arrows, left + sum(map(len, sent.values()))


def _of_this_world(ranks: list[Notes], times: list[Clock]) -> Iterator[tuple[int, dict[str, Any], Clock]]:
    """(rank, event, its clock) of all events that have the recorded world's ranks as peers."""
    for rank, (notes, at) in enumerate(zip(ranks, times)):
        for event in notes["events"]:
            if event["world"] == notes["world"]:
                yield rank, event, at
