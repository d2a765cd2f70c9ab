"""Pipeline schedules on paper: complete, free of deadlock, as fast and as small as the papers say."""

import itertools
from fractions import Fraction

import pytest

from distdl.errors import PartitionError
from distdl.parallel import Task, schedule, simulate

SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 5, 6, 8, 12, 30)]
TABLES = [(kind, p, m, 1) for kind in ("gpipe", "1f1b") for p, m in SIZES]
TABLES += [("interleaved", p, m, v) for p, m in SIZES for v in (1, 2, 3) if m % p == 0]


@pytest.mark.parametrize("kind, p, m, v", TABLES)
def test_theory(kind, p, m, v):
    """Every task once; time and idle share of GPipe's and Megatron's papers, whatever a backward costs; micro-batches
    kept."""
    table = schedule(kind, p, m, v)
    assert sorted(itertools.chain(*table)) == sorted(
        Task(k, s, i) for k in "FB" for s in range(v * p) for i in range(m)
    )
    for b in (1, 2, Fraction(5, 3)):
        found = simulate(table, 1, b)
        steps = v * m + p - 1
        if v > 1 or kind != "interleaved":  # with one chunk, interleaving only starts earlier
            assert found.makespan == steps * (1 + b)
            assert found.bubble == pytest.approx((p - 1) / steps, abs=1e-12)
    live = {"gpipe": lambda s: m, "1f1b": lambda s: min(p - s, m),
            "interleaved": lambda s: min(2 * (p - s - 1) + (v - 1) * p + 1, v * m)}[kind]  # fmt: skip
    assert found.live == tuple(live(s) for s in range(p))


def blocking(table):
    """Run the executor's own order with transfers that block on both ends; returns the tasks left when nothing moves
    any more."""
    order, p = simulate(table).order, len(table)
    last = max(t.stage for t in order)
    queues = {d: [] for d in range(p)}
    for t in order:
        k = t.stage + (1 if t.kind == "F" else -1)
        queues[t.stage % p].append(("run", t))
        if 0 <= k <= last and k % p != t.stage % p:
            queues[t.stage % p].append(("send", t))
            queues[k % p].append(("receive", t))
    arrived = set()
    while True:
        heads = {d: q[0] for d, q in queues.items() if q}
        for d, (what, t) in heads.items():
            if what == "send" and ("receive", t) in heads.values():
                receiver = next(r for r, head in heads.items() if head == ("receive", t))
                queues[d].pop(0), queues[receiver].pop(0)
                arrived.add(t)
                break
            if what == "run":
                before = Task(t.kind, t.stage - 1 if t.kind == "F" else t.stage + 1, t.micro)
                if 0 <= before.stage <= last and before.stage % p != d:
                    assert before in arrived, "a task runs before what it takes has come"
                queues[d].pop(0)
                break
        else:
            return [q for q in queues.values() if q]


@pytest.mark.parametrize("kind, p, m, v", [t for t in TABLES if t[2] <= 8])
def test_no_deadlock_even_where_every_transfer_blocks(kind, p, m, v):
    assert not blocking(schedule(kind, p, m, v))


@pytest.mark.parametrize("kind, p, m, v", TABLES[::5])
def test_order_respects_lists_and_dependences(kind, p, m, v):
    table = schedule(kind, p, m, v)
    found = simulate(table)
    for d, row in enumerate(table):
        assert [t for t in found.order if t.stage % p == d] == list(row)
    place = {t: i for i, t in enumerate(found.order)}
    for t in found.order:
        assert t.kind == "B" or t.stage == 0 or place[Task("F", t.stage - 1, t.micro)] < place[t]
        assert t.kind == "F" or place[Task("F", t.stage, t.micro)] < place[t]
        assert t.kind == "F" or t.stage == v * p - 1 or place[Task("B", t.stage + 1, t.micro)] < place[t]


def test_a_circle_is_an_error():
    """Device 0 wants the backward of micro-batch 1 before it runs the forward that it waits for."""
    table = [[("F", 0, 0), ("B", 0, 1), ("F", 0, 1), ("B", 0, 0)], [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)]]
    with pytest.raises(
        PartitionError, match=r"never ends.*device 0 waits before \('B', 0, 1\); device 1 .* \('F', 1, 1\)"
    ):
        simulate(table)


def test_what_is_no_schedule():
    good = schedule("1f1b", 2, 2)
    for bad in ([good[0], good[1][:-1]], [good[0], (*good[1], good[1][0])], good[::-1], [[], []],
                [*good, ()], [(*good[0], Task("?", 0, 0)), good[1]]):  # fmt: skip
        with pytest.raises(PartitionError, match="not a schedule"):
            simulate(bad)
    for arguments in (("zero", 2, 2), ("gpipe", 0, 2), ("1f1b", 2, 2, 2), ("interleaved", 2, 2, 0)):
        with pytest.raises(PartitionError, match="no such schedule"):
            schedule(*arguments)
    with pytest.raises(PartitionError, match="a multiple of 2"):
        schedule("interleaved", 2, 3, 2)


def test_picture():
    rows = str(simulate(schedule("1f1b", 2, 2))).splitlines()
    assert rows == [" F0 F1 .  .  B0 -- .  B1 --", " .  F0 B0 -- F1 B1 -- .  ."]
