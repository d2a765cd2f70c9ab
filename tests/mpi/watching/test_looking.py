"""Looking at a run: the timeline has every movement and message, and torch's profiler their names; nothing changes."""

import json
import time

import pytest
import torch
from serial import randn
from traces import check

import distdl as dd
import distdl.functional as F
from distdl.engine import transport

WORLD = dd.world()
RANK, SIZE = WORLD.rank, WORLD.size
LINE = dd.Partition((SIZE, 1))
ROWS, COLUMNS = (dd.Layout(P, (SIZE + 2, 2 * SIZE + 1)) for P in (LINE, dd.Partition((1, SIZE))))


def program():
    """Movements of every kind: with derivatives, batches, halves, in two phases, nothing to send."""
    x = ROWS.shard(randn(*ROWS.shape)).clone().requires_grad_()
    y = F.halo_exchange(F.repartition(F.repartition(x, ROWS, COLUMNS) ** 2, COLUMNS, ROWS), dd.HaloSpec(ROWS, (1, 0)))
    loss = F.invariant_sum((y**3).sum(), LINE)
    loss.backward()
    under_way = F.start(dd.maps.repartition(ROWS, COLUMNS), x.detach())
    local = x.detach() + 1
    z = F.wait(under_way)
    batch = torch.func.vmap(lambda a: F.repartition(a, ROWS, COLUMNS))(torch.stack([x.detach(), local]))
    whole = F.all_gather(z, COLUMNS)
    return [x.grad, loss.detach(), z, batch, whole, F.repartition(local, ROWS, ROWS)]


@pytest.mark.parametrize("checked", [False, True])
def test_every_movement_and_message(folder, checked):
    path, outer = folder / "run.json", transport.observer
    with dd.testing.count_messages() as plainly:
        expected = program()
    with dd.timeline(path, folder / "run.html") as run, dd.testing.count_messages() as sent:
        if checked:
            with dd.checking():
                found = program()
        else:
            found = program()
    assert all(torch.equal(a, b) for a, b in zip(expected, found)) and sent == plainly
    assert transport.observer is outer
    arrows = dd.testing.gather_objects(sent.sends)
    totals = dd.testing.gather_objects(sent.bytes)
    assert (run.trace is None) == (RANK > 0)
    if RANK:
        return
    shown, starts, ends = check(run.trace)
    assert json.loads(path.read_text()) == run.trace and (folder / "run.html").exists()
    assert run.trace["otherData"] == {"ranks": SIZE, "messages": sum(arrows), "messages without the other end": 0}
    assert [sum(e["pid"] == r for e in starts.values()) for r in range(SIZE)] == arrows
    slices = [e for e in shown if e["ph"] == "X" and e["cat"] != "wait"]
    assert [sum(e["args"]["bytes"] for e in slices if e["pid"] == r) for r in range(SIZE)] == totals
    names = [e["name"] for e in slices if e["pid"] == 0]
    lines = {e["args"]["line"].partition(" in ")[2] for e in slices if e["cat"] == "movement"}
    if SIZE > 1:
        for name in ("repartition", "repartition.T", "halo_exchange", "halo_exchange.T", "invariant_sum", "all_gather",
                     "start of repartition", "agreement: sizes of vmap"):  # fmt: skip
            assert name in names, (name, names)
        assert "program" in lines
        for r in range(SIZE):
            later = [e for e in shown if e["name"] == "wait for repartition" and e["pid"] == r]
            assert len(later) == 1, "the wait of F.wait is apart from F.start"
    for i, e in starts.items():
        kind, other = ends[i], e["args"]["bytes"]
        assert kind["pid"] != e["pid"] and other > 0


@pytest.mark.mpi(2)
def test_waiting_shows_who_was_late(monkeypatch):
    monkeypatch.setattr(transport, "observer", None)  # under `make check` ranks wait for each other before a movement
    with dd.timeline() as run:
        if RANK == SIZE - 1:
            time.sleep(0.2)
        F.repartition(ROWS.shard(randn(*ROWS.shape)), ROWS, COLUMNS)
    if RANK == 0:
        waits = {e["pid"]: e["dur"] for e in run.trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "wait"}
        assert all(waits[r] > 100_000 for r in range(SIZE - 1))
        begins = {e["pid"]: e["ts"] for e in run.trace["traceEvents"] if e["name"] == "repartition" and e["ph"] == "X"}
        assert begins[SIZE - 1] - begins[0] > 100_000, "on one axis of time"


@pytest.mark.mpi(2)
def test_a_failure_to_write_is_everyones():
    unwritten = r"could not be written.*NotADirectory"
    with pytest.raises(dd.errors.DistdlError, match=unwritten), dd.timeline("/dev/null/run.json"):
        pass


def profiled(job):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        job()
    return [e.name for e in prof.events() if e.name.startswith("distdl::")]


@pytest.mark.mpi(2)
def test_profiler_has_names_peers_and_bytes():
    x = ROWS.shard(randn(*ROWS.shape))
    expected = program()
    with dd.testing.count_messages() as sent:
        names = profiled(lambda: F.repartition(x, ROWS, COLUMNS))
    n = SIZE - 1
    assert names == [f"distdl::repartition ({n} {'peer' if n == 1 else 'peers'}, {sent.bytes} B)"]
    names = profiled(lambda: F.invariant_sum(x.sum(), LINE))
    assert names == [f"distdl::invariant_sum (all-reduce of {SIZE} ranks, 8 B)"]
    found = []
    names = profiled(lambda: found.extend(program()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    kinds = [name.partition(" (")[0] for name in names]
    for kind in ("repartition", "repartition.T", "halo_exchange.T", "start of repartition", "wait for repartition"):
        assert f"distdl::{kind}" in kinds
    assert not profiled(lambda: F.repartition(x, ROWS, ROWS)), "an identity moves nothing"


@pytest.mark.mpi(2)
def test_profiler_and_timeline_together():
    names = []
    with dd.timeline() as run:
        names += profiled(program)
    if RANK == 0:
        check(run.trace)
        slices = [e for e in run.trace["traceEvents"] if e.get("cat") == "movement" and e["pid"] == 0]
        assert len(slices) == len([n for n in names if not n.startswith("distdl::wait for")])
