"""Random disagreements and local errors without checking, with alarms that arrive late and in any order: no rank hangs,
no result is wrong, and after them every rank goes on with right movements."""

import faulthandler
import pickle
import random
import time
from collections import defaultdict, deque

import pytest
import torch
from registry import needs

import distdl as dd
import distdl.functional as F
from distdl.engine import transport
from distdl.errors import DistdlError
from distdl.watching.lookout import Lookout
from distdl.watching.side import SideChannel

pytestmark = needs(2)
ROUNDS = 25


@pytest.fixture
def late_alarms(monkeypatch, request):
    """Alarms of one rank arrive in order, those of several ranks in any order, each up to 60 ms late. Who waits looks
    for what should not be there after 0.2 s; a hang ends the job after two minutes."""
    if request.config.getoption("--engine") != "mpi":
        pytest.skip("NCCL has no tags: dd.checking() does it")
    arrived, lookout = SideChannel.alarms, dd.world().watch.lookout
    rng, held = random.Random(dd.world().rank), defaultdict(deque)

    def alarms(side):
        for source, data in arrived(side):
            held[source].append((time.monotonic() + 0.06 * rng.random(), data))
        for source in rng.sample(sorted(held), len(held)):
            while held[source] and held[source][0][0] <= time.monotonic():
                yield source, held[source].popleft()[1]

    for name, value in {"patience": 0.2, "interval": 0.01, "answer": 0.5, "doubt": 1.5}.items():
        monkeypatch.setattr(Lookout, name, value)
    monkeypatch.setattr(SideChannel, "alarms", alarms)
    before, transport.observer = transport.observer, None
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    transport.observer = before
    lookout.inbox += [(source, *pickle.loads(data)) for source, queue in held.items() for _, data in queue]


class Calls:
    """Movements of whole numbers that name call and rank: ``(make, check)`` each."""

    def __init__(self, rng):
        self.rng, self.n, self.r = rng, dd.world().size, dd.world().rank

    def draw(self, i):
        """A movement over all ranks, or over two or more of them, and its number."""
        n, k = self.n, self.rng.randrange(2, self.n + 1)
        ranks = tuple(sorted(self.rng.sample(range(n), k)))
        return self.rng.choice([self.ring, self.whole, self.halo]), (ranks if self.rng.random() < 0.4 else range(n)), i

    def number(self, i, rank):
        return torch.tensor([1000.0 * i + rank, 0.5])

    def make(self, call, spoilt=None):
        """Make it: a wrong result is an AssertionError, which no test catches. ``spoilt``: with a wrong "tensor", of
        which the map is known, or by a wrong "call", of which it is not."""
        kind, ranks, i = call
        if self.r in ranks:
            P = dd.Partition((len(ranks),), tuple(ranks))
            x = self.number(i, self.r)
            if spoilt == "call":
                F.shift(x, P, 7)
            kind(P, x[:1] if spoilt else x, i)

    def ring(self, P, x, i):
        left = P.ranks[(P.index()[0] - 1) % P.size]
        assert torch.equal(F.shift(x, dd.Layout(P, (2 * P.size,)), 0), self.number(i, left)), "ring"

    def whole(self, P, x, i):
        y = F.all_gather(x, dd.Layout(P, (2 * P.size,)))
        assert torch.equal(y, torch.cat([self.number(i, r) for r in P.ranks])), "whole"

    def halo(self, P, x, i):
        y = F.halo_exchange(x, dd.HaloSpec(dd.Layout(P, (2 * P.size,)), 1, boundary="circular"))
        left, right = (P.ranks[(P.index()[0] + d) % P.size] for d in (-1, 1))
        assert torch.equal(y[1:-1], x) and y[0] == 0.5 and y[-1] == 1000.0 * i + right, f"halo of {left}"


def errors_of(call, *args):
    try:
        call(*args)
        return 0
    except DistdlError:
        return 1


def all_is_right(calls, i):
    """Movements that all ranks make."""
    for kind in (calls.whole, calls.ring, calls.whole):
        calls.make((kind, range(calls.n), i))


@pytest.mark.parametrize("seed", range(2))
def test_each_call_caught(late_alarms, seed):
    """Tensors of a wrong shape on any ranks, each error caught where it is raised: those that miss a message raise, and
    nothing else is an error, or late."""
    rng, mine = random.Random(seed), random.Random(f"{seed} {dd.world().rank}")
    calls = Calls(rng)
    for turn in range(ROUNDS):
        program = [calls.draw(100 * turn + i) for i in range(rng.randrange(2, 5))]
        wrong = {(rng.randrange(calls.n), rng.randrange(len(program))) for _ in range(rng.randrange(3))}
        everyone = rng.randrange(len(program)) if rng.random() < 0.3 else None
        for i, call in enumerate(program):
            if mine.random() < 0.2:
                time.sleep(0.1 * mine.random())
            spoilt = (calls.r, i) in wrong or i == everyone
            failed = errors_of(calls.make, call, "tensor" if spoilt else None)
            assert not failed or i in {j for _, j in wrong} | {everyone}, (program, wrong, everyone)
            assert failed or not spoilt or calls.r not in call[1]
        all_is_right(calls, 100 * turn + 50)


@pytest.mark.parametrize("seed", range(2))
def test_first_error_ends_the_block(late_alarms, seed):
    """A call left out, swapped or spoilt on some ranks; the first error ends a rank's block, whose last movement has
    every rank wait for every other."""
    rng, mine = random.Random(seed + 10), random.Random(f"{seed} {dd.world().rank}")
    calls = Calls(rng)
    for turn in range(ROUNDS):
        kinds = rng.sample([calls.ring, calls.halo], 2)
        program = [(kind, range(calls.n), 100 * turn + i) for i, kind in enumerate(kinds)]
        fault, faulty = rng.choice(["left out", "swapped", "tensor", "call", "none"]), rng.randrange(calls.n)
        place = rng.randrange(2)

        def block(program=program, fault=fault, faulty=calls.r == faulty, place=place, turn=turn):
            if faulty and fault == "left out":
                program = [call for i, call in enumerate(program) if i != place]
            if faulty and fault == "swapped":
                program = program[::-1]
            for i, call in enumerate(program):
                if mine.random() < 0.2:
                    time.sleep(0.1 * mine.random())
                calls.make(call, fault if faulty and fault in ("tensor", "call") and i == place else None)
            calls.make((calls.whole, range(calls.n), 100 * turn + 40))

        failed = dd.testing.gather_objects(errors_of(block))
        assert any(failed) == (fault != "none"), (fault, failed)
        all_is_right(calls, 100 * turn + 50)
