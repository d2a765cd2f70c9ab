"""The lookout's protocol among ranks that are threads of one process, on a network that delivers as late and in as odd
an order as MPI may: random disagreements, local errors and delays. No rank hangs, nothing wrong is received, and
afterwards every rank goes on with right movements."""

import random
import threading
import time
import traceback
import zlib
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest

from distdl.engine.transport import Call
from distdl.errors import DistdlError, ShapeError
from distdl.signature import Left
from distdl.watching.lookout import Lookout

LATE = 0.02  # seconds that an alarm may take
LONG = 6.0  # after which a rank that does not come hangs


class Network:
    """Messages {(from, to): [(tag, payload)]}, in order for each pair; and alarms, each some time late."""

    def __init__(self, n, seed):
        self.n, self.lock, self.rng = n, threading.Lock(), random.Random(seed)
        self.messages, self.alarms = defaultdict(list), defaultdict(deque)


class Host:
    """What a lookout asks of an engine."""

    tags = 2**21 - 1

    def __init__(self, net, rank):
        self.net, self.rank, self.size = net, rank, net.n
        self.posted = {}  # {peer: tag}: a message that comes after the last look is the waiting receive's all the same

    def peek(self, peer):
        with self.net.lock:
            tags = [tag for tag, _ in self.net.messages[peer, self.rank]]
        return next((tag for tag in tags if tag != self.posted.get(peer)), None)

    def discard(self, peer, tag):
        assert self.take(peer, tag) is not None

    def take(self, peer, tag):
        with self.net.lock:
            queue = self.net.messages[peer, self.rank]
            for i, (theirs, payload) in enumerate(queue):
                if theirs == tag:
                    del queue[i]
                    return payload
        return None


class Side:
    def __init__(self, net, rank):
        self.net, self.rank = net, rank

    def alarm(self, peer, data):
        with self.net.lock:
            self.net.alarms[self.rank, peer].append((time.monotonic() + LATE * self.net.rng.random(), data))

    def alarms(self):
        found = []
        with self.net.lock:
            for source in self.net.rng.sample(range(self.net.n), self.net.n):
                queue = self.net.alarms[source, self.rank]
                while queue and queue[0][0] <= time.monotonic():
                    found.append((source, queue.popleft()[1]))
        return found


class Rank:
    """One rank: it makes movements as the MPI engine does."""

    def __init__(self, net, rank, kind=Lookout):
        self.net, self.rank, self.n, self.host = net, rank, net.n, Host(net, rank)
        self.lookout = kind(self.host, Side(net, rank), SimpleNamespace())
        self.lookout.patience, self.lookout.interval, self.lookout.answer = 0.06, 0.004, 0.1
        self.lookout.doubt = 0.3

    def pairs(self, call):
        """(from, to) of the movement's messages."""
        shape, ranks, _ = call
        shape = shape.partition(" ")[0]
        if shape == "ring":
            return [(r, ranks[(i + 1) % len(ranks)]) for i, r in enumerate(ranks)]
        if shape == "fan":  # one way
            return [(ranks[0], r) for r in ranks[1:]]
        return [(a, b) for a in ranks for b in ranks if a != b]

    def make(self, call, spoilt=False, known=True):
        """The movement; ``spoilt``: this rank raises an error of its own instead, of a map that is ``known`` or not."""
        shape, ranks, i = call
        if self.rank not in ranks:
            return
        lookout, pairs = self.lookout, self.pairs(call)
        sends = [b for a, b in pairs if a == self.rank]
        receives = {a for a, b in pairs if b == self.rank}
        peers = tuple(sorted({*sends, *receives}))
        if spoilt:
            lookout.local_error(ranks, Left(shape, "an error"), set(peers) if known else None)
            raise ShapeError("an error of its own", op=shape, expected="", actual="", next_step="")
        code = zlib.crc32(repr((shape, ranks)).encode())
        move = Call(code, peers, shape, str(ranks))
        for peer in peers:
            lookout.numbers[peer] += lookout.step
            lookout.recent[peer].append(move)
        tags = {p: lookout.numbers[p] & lookout.wrap | lookout.mark | code & lookout.codes for p in peers}
        mark, began = lookout.mark, time.monotonic()
        with self.net.lock:
            for peer in sends:
                self.net.messages[self.rank, peer].append((tags[peer], f"{shape} {i} {self.rank}".encode()))
        missing, due = set(receives), began
        self.host.posted = {peer: tags[peer] for peer in missing}
        try:
            while missing:
                for peer in sorted(missing):
                    payload = self.host.take(peer, tags[peer])
                    if payload is not None:
                        assert payload.decode() == f"{shape} {i} {peer}", (payload, call)
                        missing.discard(peer)
                        del self.host.posted[peer]
                if missing and time.monotonic() >= due:
                    due = time.monotonic() + lookout.interval
                    lookout.look(move, mark, time.monotonic() - began, sorted(missing))
                time.sleep(0.0003)
        finally:
            self.host.posted = {}


def run(n, seed, program, kind=Lookout):
    """``program(rank, together)`` on ``n`` threads; what any of them raised. ``together()`` waits for all, or fails."""
    net, faults, barrier = Network(n, seed), [], threading.Barrier(n)
    gathered = {}

    def together(rank, value=None):
        """An agreement of all ranks, as World.all_gather makes it; each one's value."""
        lookout = rank.lookout
        gathered[rank.rank] = value, lookout.era if lookout.doubts else None
        barrier.wait(LONG)
        values, eras = zip(*(gathered[r] for r in range(n)))
        barrier.wait(LONG)
        if any(era is not None for era in eras):
            lookout.align(max(era for era in eras if era is not None) + 1)
        return values

    def one(rank):
        try:
            program(rank, together)
        except BaseException:
            faults.append(f"rank {rank.rank}:\n{traceback.format_exc()}")
            barrier.abort()

    ranks = [Rank(net, r, kind) for r in range(n)]
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 10 * LONG
    for thread in threads:
        thread.join(max(0, until - time.monotonic()) if not faults else LONG)
    faults += [f"rank {rank.rank} hangs" for rank, thread in zip(ranks, threads) if thread.is_alive()]
    real = [text for text in faults if "BrokenBarrierError" not in text]
    return (real or faults)[:2]


def errors_of(call, *args):
    try:
        call(*args)
        return 0
    except DistdlError:
        return 1


def draw(rng, n, i):
    whole = rng.random() < 0.6
    ranks = range(n) if whole else sorted(rng.sample(range(n), rng.randrange(2, n + 1)))
    return rng.choice(["ring", "whole", "fan"]), tuple(ranks), i


def all_is_right(rank, i):
    """Movements that all ranks make."""
    for shape in ("ring", "whole", "fan", "whole"):
        rank.make((shape, tuple(range(rank.n)), i))


def each_call_caught(seed, turns):
    """Local errors on any ranks, each caught where it is raised. Of known maps: nothing else is an error, or late; of
    unknown ones: nobody hangs, and an agreement ends all doubt."""

    def program(rank, together):
        rng, mine = random.Random(seed), random.Random(f"{seed} {rank.rank}")
        for turn in range(turns):
            calls = [draw(rng, rank.n, 100 * turn + i) for i in range(rng.randrange(2, 6))]
            wrong = {(rng.randrange(rank.n), rng.randrange(len(calls))) for _ in range(rng.randrange(3))}
            everyone = rng.randrange(len(calls)) if rng.random() < 0.3 else None
            known = rng.random() < 0.5
            if not known:  # who is a movement ahead of another could take its next one for this one, of equal plans
                calls = [(f"{shape} {i}", *more) for i, (shape, *more) in enumerate(calls)]
            for i, call in enumerate(calls):
                if mine.random() < 0.3:
                    time.sleep(0.05 * mine.random())
                spoilt = (rank.rank, i) in wrong or i == everyone
                failed = errors_of(rank.make, call, spoilt, known)
                if known:
                    missed = {a for a, b in rank.pairs(call) if b == rank.rank} & {r for r, j in wrong if j == i}
                    assert failed == (rank.rank in call[1] and (spoilt or bool(missed))), (call, wrong, failed)
            if not known:
                together(rank)
            all_is_right(rank, 100 * turn + 50)

    return program


def first_error_ends_the_block(seed, turns):
    """A call left out, swapped or spoilt on one rank; the last movement has every rank wait for every other."""

    def program(rank, together):
        rng, mine = random.Random(seed), random.Random(f"{seed} {rank.rank}")
        everyone = tuple(range(rank.n))
        for turn in range(turns):
            calls = [
                (shape, everyone, 100 * turn + i) for i, shape in enumerate(rng.sample(["ring", "fan", "whole"], 2))
            ]
            fault, faulty, place = rng.choice(["left out", "swapped", "spoilt", "none"]), rng.randrange(rank.n), 0
            place, known = rng.randrange(2), rng.random() < 0.7

            def block(calls=calls, fault=fault, here=rank.rank == faulty, place=place, known=known, turn=turn):
                if here and fault == "left out":
                    calls = [call for i, call in enumerate(calls) if i != place]
                if here and fault == "swapped":
                    calls = calls[::-1]
                for i, call in enumerate(calls):
                    if mine.random() < 0.3:
                        time.sleep(0.05 * mine.random())
                    rank.make(call, here and fault == "spoilt" and i == place, known)
                rank.make(("last", everyone, 100 * turn + 40))

            failed = together(rank, errors_of(block))
            assert any(failed) or fault in ("none", "swapped"), (fault, failed)
            assert not any(failed) or fault != "none", failed
            all_is_right(rank, 100 * turn + 50)

    return program


def an_error_after_another(seed, turns):
    """Two ranks disagree, which all hear while they wait for these; and at once, without an agreement, one rank gives a
    movement up. Its peers may hear that before they hear of the disagreement."""

    def program(rank, together):
        rng, mine = random.Random(seed), random.Random(f"{seed} {rank.rank}")
        everyone = tuple(range(rank.n))
        for turn in range(turns):
            apart, faulty = rng.sample(range(rank.n), 2), rng.randrange(rank.n)
            calls = [("ring", tuple(sorted(apart)), 100 * turn), ("whole", tuple(sorted(apart)), 100 * turn)]

            def block(calls=calls, first=rank.rank == apart[0], turn=turn):
                for call in calls[:: -1 if first else 1]:
                    rank.make(call)
                rank.make(("whole", everyone, 100 * turn + 1))

            assert errors_of(block)
            if mine.random() < 0.3:
                time.sleep(0.03 * mine.random())
            call = ("whole", everyone, 100 * turn + 2)
            assert errors_of(rank.make, call, rank.rank == faulty)
            all_is_right(rank, 100 * turn + 3)

    return program


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("program", [each_call_caught, first_error_ends_the_block, an_error_after_another])
def test_ranks_go_on_together(program, n):
    faults = run(n, n, program(n, 12))
    assert not faults, "\n".join(faults)
