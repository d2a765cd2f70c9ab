"""Peer memory among processes, on doubles of NCCL and of the kernels: who is reached, what else goes by NCCL, and how
mailboxes come and go."""

import contextlib
import warnings

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.engine import program
from distdl.engine.peer import PeerTransport

if type(dd.world().host).__name__ == "TorchTransport":
    pytest.skip("the fake is played by MPI", allow_module_level=True)
pytest.importorskip("mpi4py", reason="the fake is played by MPI, which is not installed")
import fake_peer

pytestmark = [pytest.mark.mpi(2), pytest.mark.usefixtures("only_here")]


@pytest.fixture
def use(monkeypatch):
    """All movements by these engines, for one test."""
    made = []

    def use(**how):
        engines = fake_peer.engines(dd.world(), **how)
        made.append(engines)
        monkeypatch.setattr(
            dd.World, "transport", lambda self, x, ranks: engines.get(ranks) if self.rank in ranks else self.host
        )
        return engines

    yield use
    for engines in made:
        engines.close()


def moved():
    """A repartition, a halo, its gradient, a sum, sums of blocks, and a gather, a collective of NCCL's."""
    n, r = dd.world().size, dd.world().rank
    L = dd.Layout(dd.Partition((n, 1)), (2 * n + 1, 5))
    x = L.shard(torch.arange(L.shape[0] * 5.0).reshape(L.shape)).clone()
    spec = dd.HaloSpec(L, (1, 2), boundary="circular")
    call = lambda x: F.halo_exchange(x, spec) ** 2 * (r + 1)
    y, back = torch.func.vjp(call, x)
    P, whole = dd.Partition((n,)), torch.arange(2.0 * n) * (r + 1)
    return [
        F.repartition(x, L, dd.Partition((1, n))),
        y,
        *back(y),
        F.all_sum_reduce(x.sum(), P),
        F.reduce_scatter(whole, P),
        F.all_gather(x, L),
    ]


@pytest.mark.parametrize("node", [lambda r: 0, lambda r: r // 2, lambda r: r % 2, lambda r: r])
def test_nodes(node, use):
    """Ranks of one node are reached, others not; the results are those of MPI."""
    wanted = moved()
    engines = use(node=node)
    dd.testing.collective_assert(all(map(torch.equal, moved(), wanted)), "another result")
    me, n = dd.world().rank, dd.world().size
    near = {r for r in range(n) if node(r) == node(me)} - {me}
    engine = engines.get(tuple(range(n)))
    some = len({node(r) for r in range(n)}) < n  # one answer for all ranks: a collective is one on all or on none
    assert isinstance(engine, PeerTransport) == some and (not some or engine.reach.ranks == near)
    assert set(engines.peer.boxes.own) == set(engines.peer.boxes.theirs) == near


def test_a_device_that_does_not_answer(use):
    """On one rank: its node goes by NCCL, and nobody waits."""
    wanted, engines = moved(), use()
    if dd.world().rank == 1:

        def lost():
            raise OSError("no device")

        engines.peer.kernels.place = lost
    with pytest.warns(RuntimeWarning) if dd.world().rank == 0 else contextlib.nullcontext():
        found = moved()
    assert engines.get(tuple(range(dd.world().size))).reach is None and all(map(torch.equal, found, wanted))


def test_a_group_of_some_ranks(use):
    """It makes mailboxes for its own pairs alone, and groups that come later use them."""
    engines, r = use(), dd.world().rank
    pair = dd.Partition((2,), ranks=(1, 0))
    if r < 2:
        F.shift(torch.ones(3), pair, 0)
        F.all_sum_reduce(torch.ones(3), pair)
    assert set(engines.peer.boxes.own) == ({1 - r} if r < 2 else set())
    own = dict(engines.peer.boxes.own)
    y = F.all_sum_reduce(torch.ones(3), dd.Partition((dd.world().size,)))
    assert y.tolist() == [dd.world().size] * 3 and own.items() <= engines.peer.boxes.own.items()
    engines.close()
    assert not engines.peer.boxes.own and not engines.peer.boxes.memory.held


@pytest.mark.parametrize("forced", [True, False])
def test_memory_that_cannot_be_opened(forced, use):
    """Then all ranks of the node go by NCCL, and its first one says so."""
    engines = use(forced=forced, joined=True)
    if dd.world().rank == 1:

        def refuse(handle):
            raise OSError("no such handle")

        engines.peer.boxes.memory.open = refuse
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = moved()
    engine = engines.get(tuple(range(dd.world().size)))
    assert engine.reach is None and not engines.peer.boxes.own
    told = [str(one.message) for one in said if "DISTDL_PEER=0" in str(one.message)]
    assert len(told) == (dd.world().rank == 0) and all("rank 1: OSError: no such handle" in text for text in told)
    assert len(found) == 6


def test_a_kernel_that_does_not_compile(use):
    """On one rank: its node goes by NCCL, and its first rank says so, also where nobody asked for peer memory."""
    wanted, engines = moved(), use(forced=False, joined=True)
    if dd.world().rank == 1:

        def fails():
            raise OSError("no compiler")

        engines.peer.kernels.ready = fails
    with pytest.warns(RuntimeWarning, match="compiler") if dd.world().rank == 0 else contextlib.nullcontext():
        found = moved()
    assert engines.get(tuple(range(dd.world().size))).reach is None and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("joined", [True, False])
def test_nobody_asked(joined, use, recwarn):
    """Then it is where NVLink joins the devices, and elsewhere nobody hears of it."""
    wanted, engines = moved(), use(forced=False, joined=joined)
    dd.testing.collective_assert(all(map(torch.equal, moved(), wanted)), "another result")
    engine = engines.get(tuple(range(dd.world().size)))
    assert isinstance(engine, PeerTransport) == joined and bool(engines.peer.boxes.own) == joined
    assert not [one for one in recwarn if "NCCL" in str(one.message)]


def test_gathers(use):
    """Small ones are NCCL's, large ones boxes like others; the same in a graph."""
    engines, n = use(), dd.world().size
    engine = engines.get(tuple(range(n)))
    for count, kind in ((n, "all_gather"), (n * (program.SMALL_GATHER // 8 // n + 1), None)):
        L = dd.Layout(dd.Partition((n,)), (count,))
        x = L.shard(torch.arange(count, dtype=torch.float64)).clone()
        plan = dd.maps.all_gather(L).plan
        for one in (engine, engine.plain):
            assert program.program_of((plan,), [x], one)[0].kind == kind
        dd.testing.collective_assert(torch.equal(F.all_gather(x, L), torch.arange(count, dtype=x.dtype)), "gathered")


def test_a_graph_holds_on_to_nccl(use, monkeypatch):
    """While one is captured movements go by NCCL alone, with programs and communicators that are there."""
    engines = use()
    wanted = moved()
    made, communicators = [], set(engines.engines)
    whole = program._program
    monkeypatch.setattr(program, "_program", lambda *args: (made.append(args), whole(*args))[1])
    engines.device.captures = True
    engine = engines.get(tuple(range(dd.world().size)))
    assert not isinstance(engine, PeerTransport) and engine.reach is None
    assert all(map(torch.equal, moved(), wanted))
    engines.device.captures = engines.captured = False  # nobody holds on to what was captured
    assert not made and set(engines.engines) == communicators


def test_ranks_that_ask_for_different_things(use):
    """All hear of it, before anybody waits for what the others do not do."""
    engines = use()
    if dd.world().rank == 1:
        engines.peer = None
    with pytest.raises(dd.errors.TransportError, match=r"DISTDL_PEER alike on all ranks, got ranks \[0"):
        moved()
