"""The engine of torch.distributed: what arrives late, in another length, or never; and memory that outlives it."""

import time

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.engine.transport import Call
from distdl.errors import AgreementError, TransportError

HOST = dd.world().host
pytestmark = [
    pytest.mark.mpi(2),
    pytest.mark.skipif(type(HOST).__name__ != "TorchTransport", reason="another engine carries the messages"),
]
N, R = dd.world().size, dd.world().rank


@pytest.fixture
def little(monkeypatch):
    """Slots have room for 8 bytes, and the rest goes in parts of 24."""
    from distdl.engine.c10d import messages

    monkeypatch.setattr(messages, "ROOM", 8)
    monkeypatch.setattr(HOST.messages, "large", [])
    monkeypatch.setattr(HOST.messages, "little", [])
    monkeypatch.setattr(messages.Messages, "chunk", 24)
    F.all_sum_reduce(torch.ones(1), dd.Partition((N,)))  # nobody sends before all are here
    yield
    F.all_sum_reduce(torch.ones(1), dd.Partition((N,)))
    HOST.messages.hand_over()


def test_what_does_not_fit_into_a_slot(little):
    P = dd.Partition((N,))
    for count in range(40):
        for dtype in (torch.uint8, torch.float32):
            x = torch.full((count,), R + 1, dtype=dtype)
            assert torch.equal(F.shift(x, P, 0), torch.full((count,), (R - 1) % N + 1, dtype=dtype))
    found = dd.testing.gather_objects("x" * 100 * R)
    assert [len(text) for text in found] == [100 * r for r in range(N)]
    with pytest.raises(TransportError):  # one sends more than the other expects
        _of_another_length(40 if R else 20)
    assert F.all_sum_reduce(torch.ones(1), P).item() == N


def _of_another_length(n):
    """Ranks post what the plans of others do not say."""
    peer = 1 - R
    if R < 2:
        out, into = torch.ones(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
        handle = HOST.post([(peer, out.data_ptr(), n)], [(peer, into.data_ptr(), n)], None, (out, into))
        HOST.wait(handle)
    else:
        raise TransportError("as the others", op="test", expected=0, actual=1, next_step="none")


@pytest.mark.parametrize("counts", [(20, 40), (40, 20), (2**18 + 5, 2**18 + 6), (7, 2**18 + 6)])
def test_another_length_is_an_error_on_both_ends(counts):
    """gloo would take the shorter one in silence, and end the process for the longer one."""
    P = dd.Partition((N,))
    if R < 2:
        with pytest.raises(TransportError, match="another length than planned"):
            _of_another_length(counts[R])
    for n in (4, 2**18 + 8):
        assert F.shift(torch.full((n,), R, dtype=torch.uint8), P, 0)[-1] == (R - 1) % N


@pytest.mark.parametrize("count", [10, 200_000])
def test_started_and_dropped(count):
    """What nobody waits for is taken all the same, and its slots are there again."""
    P = dd.Partition((N,))
    A = dd.maps.shift(P, 0, 1, True, (count,))
    for i in range(5):
        F.start(A, torch.full((count,), float(i)))
    assert F.shift(torch.full((count,), R + 9.0), P, 0)[-1] == (R - 1) % N + 9
    F.all_sum_reduce(torch.ones(1), P)
    until = time.monotonic() + 20
    while (HOST.messages.stale or HOST.messages.workers.busy()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not HOST.messages.stale and not HOST.messages.workers.busy()


def test_the_same_tag_again(monkeypatch):
    """A message that nobody waited for goes to nobody else: neither memory nor numbers are mixed up."""
    P = dd.Partition((N,))
    L = dd.Layout(P, (2 * N,))
    wrap = dd.world().watch.lookout.wrap
    for turn in range(3):
        x = torch.tensor([turn, R + 0.5])
        assert F.shift(x, L, 0).tolist() == [turn, (R - 1) % N + 0.5]
    before = HOST.waiting.numbers[(R + 1) % N]
    for peer in range(N):  # as after so many movements that their tags begin anew
        HOST.waiting.numbers[peer] += wrap + dd.world().watch.lookout.step
    x = torch.tensor([7.0, R])
    assert F.shift(x, L, 0).tolist() == [7.0, (R - 1) % N]
    assert HOST.waiting.numbers[(R + 1) % N] > before + wrap
    dd.testing.gather_objects(None)


def test_a_message_of_long_ago_is_thrown_away():
    """Of the same tag, but another number."""
    from distdl.engine.c10d.messages import Handle

    if R < 2:
        peer, tag, n = 1 - R, 5, 2**18 + 40
        for size in (16, n):
            old, new, into = (torch.full((size,), v, dtype=torch.uint8) for v in (1, 2, 3))
            for number, x in ((11, old), (12, new)):
                sending = HOST.messages.send(peer, tag, number, x.data_ptr(), size, (x,))
                if sending is not None:
                    HOST.messages.let_go(sending)
            handle = Handle(Call(0, (peer,)))
            handle.missing.append(HOST.messages.receive(peer, tag, 12, into.data_ptr(), size))
            HOST.messages.arrive(handle, None, 1.0)
            assert HOST.messages.take(handle) is None and into.unique().tolist() == [2]
            if sending is not None:
                assert sending.done.wait(20)


def test_ranks_in_different_calls(monkeypatch):
    """The one that waits reads what the other has sent it."""
    from distdl.watching.lookout import Lookout

    monkeypatch.setattr(Lookout, "patience", 0.5)
    P = dd.Partition((N,))
    L = dd.Layout(P, (2 * N,))
    with pytest.raises(AgreementError, match="the ranks are in different calls"):
        F.shift(torch.ones(2), L, 0) if R == 0 else F.all_gather(torch.ones(2), L)
    monkeypatch.undo()
    dd.testing.gather_objects(None)
    assert F.shift(torch.tensor([R, 1.0]), L, 0)[0] == (R - 1) % N


@pytest.mark.parametrize("size", range(1, 12))
def test_small_messages_of_many_ranks(size, monkeypatch):
    """Beyond 8 ranks in rounds; here those of more ranks than there are, too, each played by a swap of letters."""
    if size > N:
        pytest.skip("needs more ranks")
    from distdl.engine import c10d

    ranks = tuple(range(size))
    monkeypatch.setattr(c10d, "_PAIRS", 0)
    if R in ranks:
        mine = [bytes([r]) * (3 * r) for r in ranks]
        assert HOST.all_gather(mine[R], ranks) == mine


def test_a_world_without_messages_needs_nobody():
    """It is made by its rank alone."""
    if R == 0:
        other = dd.World(name="alone here")
        assert other.size == N
        other.close()


@pytest.mark.parametrize("count", [10, 200_000])
def test_one_waits_at_once_and_another_later(count):
    """Each rank's own order of waiting is right: what is under way goes on, whatever its rank waits for."""
    P = dd.Partition((N,))
    A = dd.maps.shift(P, 0, 1, True, (count,))
    for turn in range(3):
        x, z = (torch.full((count,), 10.0 * turn + R + v) for v in (0, 0.5))
        call = F.all_sum_reduce if turn else lambda z, P: F.shift(z, P, 0)
        pending = F.start(A, x)
        if R % 2:
            y = F.wait(pending)
            call(z, P)
        else:
            call(z, P)
            y = F.wait(pending)
        assert y[-1] == 10 * turn + (R - 1) % N


def test_large_messages_to_one_that_sends_none():
    """Its sender has no other sign of it."""
    P, n = dd.Partition((N,)), 300_000
    for turn in range(3):
        y = F.permute(torch.full((n,), turn + 0.5), dd.Layout(P, (n * N,)), [(0, 1)])
        assert R != 1 or y[-1] == turn + 0.5
    F.all_sum_reduce(torch.ones(1), P)
