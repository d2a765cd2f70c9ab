"""The board and the watchdog's report, in one process; and checking where there is nobody to compare with."""

import os
import struct

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.calls import user_line
from distdl.signature import first_difference, unequal
from distdl.watching.board import _HEAD, _PAGE, _TEXT, Board
from distdl.watching.observer import Observer
from distdl.watching.watchdog import report


def boards(n=3):
    made = {}
    for rank in range(0, 2 * n, 2):
        made[rank] = Board(rank, lambda r: made[r].notice if r in made else None)
    return list(made.values())


def test_what_one_rank_writes_others_read():
    assert _HEAD.size + 3 * _TEXT <= _PAGE
    a, b, c = boards()
    a.enter("shift", "here.py:3")
    entry = b.read(0)
    assert (entry.state, entry.begun, entry.op, entry.where, entry.done) == ("inside", 1, "shift", "here.py:3", "")
    assert "is inside shift at here.py:3 for 0." in str(entry) and "last completed nothing" in str(entry)
    a.leave(completed=True)
    assert str(c.read(0)) == "is outside of any movement, last completed shift at here.py:3"
    a.enter("shift", "here.py:3")
    assert str(c.read(0)).endswith("last completed shift at here.py:3")
    a.leave(completed=False)
    assert str(c.read(0)).startswith(
        "is outside of any movement, has begun shift at here.py:3 and not completed it, last"
    )
    a.enter("gather", "here.py:4")
    assert c.read(0).op == "gather" and c.read(0).done == "shift at here.py:3" == a.done
    a.leave(completed=True)
    assert c.read(0).done == "gather at here.py:4" == a.done
    a.enter("é" * 1000, "x")
    assert b.read(0).op.startswith("é" * 319) and b.read(0).where == "x"
    a.close()
    assert b.read(0).state == "left" and b.read(2).state == "idle"
    assert b.read(1) is None, "a rank of another node"


def test_a_page_can_be_read_when_its_rank_is_gone():
    a, b, c = boards()
    a.enter("shift", "here.py:3")
    assert b.read(0).op == "shift"
    a.close()
    assert (b.read(0).op, b.read(0).state) == ("shift", "left")
    assert c.read(0) is None, "who looks for the first time now"
    b.close()
    assert b.read(0).op == "shift"


def test_no_file_is_taken_for_a_page(tmp_path):
    a, b, _ = boards()
    node, pid, file, name = a.notice.decode().split()
    for wrong in (
        f"elsewhere {pid} {file} {name}",
        f"{node} {pid} {file} another",
        f"{node} {2**22 + 1} {file} {name}",
    ):
        assert Board(4, lambda rank, text=wrong: text.encode()).read(0) is None
    with open(tmp_path / "other", "wb") as other:
        os.dup2(other.fileno(), a.file)  # its number now means another file
        assert b.read(0) is None


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_page_that_is_closed_while_it_is_being_opened(tmp_path, monkeypatch, kind):
    a, b, _ = boards()
    other = os.pipe()[0] if kind == "pipe" else os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    real = os.open

    def late(path, *args):
        os.dup2(other, a.file)
        return real(path, *args)

    monkeypatch.setattr(os, "open", late)
    assert b.read(0) is None


def test_an_entry_that_is_being_written_is_read_again():
    a, b, _ = boards()
    struct.pack_into("<Q", a.memory, 0, 7)  # its rank died while writing: what is there is better than nothing
    assert b.read(0).state == "idle"


def test_the_watchdogs_report():
    class Watched:
        rank, size, board = 2, 5, boards()[1]

    Watched.board.enter("halo_exchange over P", "train.py:31 in step")
    Watched.board.missing = [0, 4]
    text = report(Watched, 12.3)
    assert (
        "rank 2 of 5 is stuck for 12 s in halo_exchange over P at train.py:31 in step; still missing: rank 0, rank 4"
        in text
    )
    assert "test_the_watchdogs_report" in text, "the stack"
    assert "  rank 1 has not made its world" in text and "  rank 4 is outside of any movement" in text


def test_why_nothing_can_be_read():
    notices = {1: b"elsewhere 1 2 name", 2: b""}
    board = Board(0, notices.get)
    assert [board.read(r) for r in (1, 2, 3)] == [None] * 3
    assert [board.unread(r) for r in (1, 2, 3)] == ["is on another node"] * 2 + ["has not made its world"]


def test_line_of_the_user():
    line = user_line()
    assert line.startswith(f"{__file__}:") and line.endswith(" in test_line_of_the_user")


def test_alone_nothing_is_compared():
    x = torch.ones(3, requires_grad=True)
    P = dd.Partition((1,))
    with dd.checking(timeout=0.1):
        F.invariant_sum(F.shift(F.mark_varying(x, P), P, 0).square().sum(), P).backward()
        assert torch.equal(F.all_gather(x, P), x)
    assert torch.equal(x.grad, 2 * x.detach())


def test_differences_between_ranks_that_exchange_nothing_are_none():
    """Two fibres may sum tensors of different shapes; within one a difference counts, whoever looks."""
    from distdl.signature import call_of

    P = dd.Partition((2, 2))
    A, B = (dd.maps.all_sum_reduce(P, (n,), (0,)) for n in (3, 4))

    def said(rank, m):
        return call_of(m.steps, ((),), [torch.ones(3)], rank).said(f"rank {rank}")

    fibres = {0: said(0, A), 2: said(2, A), 1: said(1, B), 3: said(3, B)}
    field, _ = first_difference({**fibres, 3: said(3, A)})
    assert field.name == "the layouts or shapes"
    assert fibres[0].near == (2,) and fibres[1].near == (3,)
    heads = {r: (0, b"", b"", True, bytes([r % 2] * 8), 1.0) for r in range(4)}
    prints = {r: (("w", bytes([r % 2] * 8), 1.0), ("b", bytes(8), 0.0)) for r in range(4)}
    assert unequal("cotangent", heads, {(0, 2), (1, 3)}, prints) is None
    prints[3] = (("w", bytes(8), 0.0), ("b", bytes(8), 0.0))
    kind, parts = unequal("cotangent", {**heads, 3: (0, b"", b"", True, bytes(8), 0.0)}, {(0, 2), (1, 3)}, prints)
    assert "of 2 tensors these differ: w" in parts["actual"]
    assert kind is dd.errors.InvariantError and "rank 3 gave it the cotangent 0" in parts["problem"]


def test_observer_without_a_board():
    assert Observer(1).agreement(None, "engine", "value", (0, 1), "why") == "engine"
