"""A timeline's trace and page, from notes of imaginary ranks: Chrome's format, arrows in pairs, clocks that meet."""

import json
import re
from html.parser import HTMLParser

import pytest
from traces import check

import distdl as dd
from distdl.timeline import trace
from distdl.timeline_page import page

US = 1000


def event(begin, end, name="repartition", sends=(), receives=(), waits=(), posted=None, **others):
    """One movement, in µs."""
    found = {"name": name, "call": name, "line": "x.py:1 in f", "world": "default", "thread": 7, "collectives": [],
             "begin": begin * US, "end": None if end is None else end * US, "paused": None,
             "posted": None if posted is None else posted * US, "sends": list(sends), "receives": list(receives),
             "waits": [(a * US, b * US) for a, b in waits]}  # fmt: skip
    return {**found, **others}


def notes(events, machine="a", marks=(0, 1000)):
    return {"machine": machine, "marks": tuple(m * US for m in marks), "world": "default", "events": events}


def two_ranks():
    return [
        notes([event(10, 20, sends=[(1, 40), (1, 8)], posted=12, receives=[(1, 16)], waits=[(13, 18)]),
               event(30, None, "halo_exchange", posted=31, paused=32 * US, receives=[(1, 4)], waits=[(40, 45)])]),
        notes([event(11, 21, sends=[(0, 16)], posted=15, receives=[(0, 40), (0, 8)], waits=[(15, 19)]),
               event(33, 36, "halo_exchange", posted=34, sends=[(0, 4)]),
               event(50, 60, "agreement: x", collectives=[("agree", [0, 1], 30)], waits=[(51, 59)], thread=8)]),
    ]  # fmt: skip


def test_slices_and_arrows():
    shown, starts, ends = check(trace(two_ranks()))
    named = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in shown if e["ph"] == "X"]
    assert named == [
        (0, 0, "repartition", 0, 10),
        (1, 0, "repartition", 1, 10),
        (0, 0, "wait", 3, 5),
        (1, 0, "wait", 5, 4),
        (0, 0, "start of halo_exchange", 20, 2),
        (1, 0, "halo_exchange", 23, 3),
        (0, 0, "wait for halo_exchange", 30, 5),
        (1, 1, "agreement: x", 40, 10),
        (1, 1, "wait", 41, 8),
    ]
    arrows = {(starts[i]["pid"], ends[i]["pid"], starts[i]["args"]["bytes"]) for i in starts}
    assert arrows == {(0, 1, 40), (0, 1, 8), (1, 0, 16), (1, 0, 4)}
    first = next(e for e in shown if e["name"] == "repartition")
    assert first["args"]["sends"] == [{"to": 1, "bytes": 40}, {"to": 1, "bytes": 8}] and first["args"]["bytes"] == 48
    json.dumps(trace(two_ranks()))


def test_messages_of_one_end_only_have_no_arrow():
    ranks = two_ranks()
    ranks[1]["events"].pop(0)
    found = trace(ranks)
    _, starts, _ = check(found)
    assert len(starts) == 1 and found["otherData"]["messages without the other end"] == 3
    other = [
        notes([event(0, 1, posted=0, sends=[(1, 4)], world="b")]),
        notes([event(0, 1, receives=[(0, 4)], posted=0)]),
    ]
    assert trace(other)["otherData"] == {"ranks": 2, "messages": 0, "messages without the other end": 1}
    assert trace([notes([])])["otherData"]["messages"] == 0


@pytest.mark.parametrize(("shift", "rate"), [(0, 1), (-5000, 1), (123456, 1.25)])
def test_clocks_of_two_machines(shift, rate):
    """By the moments of the agreements: another zero, and another speed. One machine's ranks share their clock."""
    theirs = lambda t: shift + rate * t
    far = [event(theirs(a), theirs(b)) for a, b in ((100, 200), (600, 700))]
    ranks = [notes([event(100, 200)]), notes([event(150, 250)], marks=(3, 1004)),
             notes(far, "b", (theirs(0), theirs(1000)))]  # fmt: skip
    shown, _, _ = check(trace(ranks))
    found = {(e["pid"], round(e["ts"], 2)): round(e["dur"], 2) for e in shown}
    late = 1.5  # the middle of the first machine's ranks left the agreement at 1.5, and at 1002
    assert found[0, 0] == 100 and found[1, 50] == 100
    begins = sorted(ts for rank, ts in found if rank == 2)
    assert begins == pytest.approx([late + 0.1 * 0.5, 500 + late + 0.6 * 0.5], abs=0.5)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_stands_alone():
    """Well-formed, nothing fetched and nothing run; a slice for each movement, an arrow for each message."""
    ranks = two_ranks()
    ranks[0]["events"][0]["line"] = "<script>alert(1)</script>"
    found = page(trace(ranks))
    parser = _Page()
    parser.feed(found)
    assert parser.open == []
    kinds = [tag for tag, _ in parser.tags]
    assert "script" not in kinds and not re.search(r"(src|href)=|url\((?!#)|@import|https?:", found)
    arrows = [a for tag, a in parser.tags if tag == "line" and a.get("class") == "arrow"]
    assert len(arrows) == 4
    assert sum(tag == "g" for tag in kinds) == 9 and "prefers-color-scheme: dark" in found
    row = re.search(r"repartition</td>(.*?)</tr>", found)[1]
    assert re.findall(r"<td>(.*?)</td>", row) == ["2", "3", "64", "20 µs", "9 µs"]
    row = re.search(r"halo_exchange</td>(.*?)</tr>", found)[1]
    assert re.findall(r"<td>(.*?)</td>", row) == ["2", "1", "4", "10 µs", "5 µs"]
    assert "0 messages" in page(trace([notes([])]))


def test_in_one_process(tmp_path):
    """One rank: movements within it are there, and files by their suffix."""
    import torch

    P = dd.Partition((1,))
    with dd.timeline(tmp_path / "run.json", str(tmp_path / "run.html")) as run:
        dd.functional.shift(torch.ones(3), P, 0)
        dd.functional.all_sum_reduce(torch.ones(3), P)
    assert json.loads((tmp_path / "run.json").read_text()) == run.trace
    check(run.trace)
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
    unwritten = r"timeline: the timeline could not be written.*FileNotFoundError"
    with pytest.raises(dd.errors.DistdlError, match=unwritten), dd.timeline(tmp_path / "no" / "run.json"):
        pass
    with pytest.raises(ZeroDivisionError), dd.timeline(tmp_path / "not.json"):
        1 / 0  # noqa: B018
    assert not (tmp_path / "not.json").exists()
    from distdl.engine import transport

    assert transport.observer is None


def halo():
    """A movement that sends nothing, on the one rank of this process."""
    import torch

    spec = dd.HaloSpec(dd.Layout(dd.Partition((1,)), (4,)), 1, boundary="circular")
    return dd.functional.halo_exchange(torch.arange(4.0), spec)


def test_emit_nvtx_has_the_ranges_of_the_profiler(monkeypatch):
    """Without a device: what it would start and stop is left out."""
    import torch
    from torch.autograd import profiler

    names = []

    class Range(torch.profiler.record_function):
        def __init__(self, name):
            super().__init__(name)
            names.append(name)

    monkeypatch.setattr(torch.profiler, "record_function", Range)
    for name in ("_enable_profiler", "_disable_profiler"):
        monkeypatch.setattr(profiler, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    halo()
    assert not names
    with profiler.emit_nvtx():
        assert halo().tolist() == [3, 0, 1, 2, 3, 0]
    assert names == ["distdl::halo_exchange (0 peers, 0 B)"]
    halo()
    assert len(names) == 1
