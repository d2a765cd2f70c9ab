"""Peer memory without a device: the protocol's blocks, on host memory, by the tables that the kernels read; stepped in
random order, several ranks at once."""

import random
from types import SimpleNamespace

import fake_peer
import pytest
import torch
from fuzzing import BUILDERS, KINDS, draw, seed_of
from test_device_double import arranged

import distdl as dd
from distdl import failure
from distdl.engine import peer
from distdl.engine.exchange import Exchange
from distdl.engine.local import LocalTransport
from distdl.engine.peer import region, tables
from distdl.programs import _rank

DTYPES = (torch.float32, torch.bool, torch.bfloat16, torch.float64, torch.complex128, torch.int16)


class Ranks:
    """Some ranks in one process, with what each has begun: kernels of a rank run one after the other.

    Args:
        nodes: of each rank, by any name.
        lanes: of a message.
        start: where all counters begin.
    """

    def __init__(self, nodes, lanes=3, seed=0, start=0):
        self.memory, self.draw, self.moved = fake_peer.Here(), random.Random(seed), 0
        self.pending = {r: [] for r in range(len(nodes))}
        boxes = [region.Mailboxes(self.memory) for _ in nodes]
        offers = [
            box.offer([p for p, node in enumerate(nodes) if node == nodes[r] and p != r], 4)
            for r, box in enumerate(boxes)
        ]
        for r, box in enumerate(boxes):
            box.open({p: handles[r] for p, handles in enumerate(offers) if r in handles})
        self.transports, mailboxes = [], LocalTransport().mailboxes
        for r, box in enumerate(boxes):
            for p in box.own:
                for lane in range(box.lanes[p]):
                    for ends in (box.sending(p), box.receiving(p)):
                        for address in (ends.arriving, ends.position):
                            fake_peer.counter(address + lane * region.LINE).value = start
            kernels = fake_peer.kernels(Mover=self.mover(r, fake_peer.Mover), Summer=self.mover(r, fake_peer.Summer))
            memory = SimpleNamespace(
                boxes=box, kernels=kernels, world=SimpleNamespace(rank=r), device=SimpleNamespace(index=0)
            )
            transport = LocalTransport(r, len(nodes), mailboxes)
            transport.reach = peer.PeerReach(memory, frozenset(box.own), lanes) if box.own else None
            self.transports.append(transport)

    def mover(self, rank, base):
        class Later(base):
            def __call__(own, *args):
                self.pending[rank].append(own.blocks(*args))
                self.moved += 1

        return Later

    def begin(self, plan, xs):
        """Begin a movement on all its ranks: {rank: what is under way}."""
        mine = dict(zip(plan.held.partition.ranks, xs))
        like = xs[0]
        lead = like.shape[: like.dim() - len(plan.held.local_shape(plan.held.partition.ranks[0]))]
        found = {}
        for r in plan.ranks:
            x = mine[r] if r in mine else like.new_empty((*lead, *plan.view(r).in_shape))
            found[r] = Exchange((plan,), [x], self.transports[r])
        return found

    def run(self, patience=3):
        """Run all that has begun."""

        def of_rank(kernels):
            for kernel in kernels:
                blocks = list(kernel)
                while blocks:
                    block = self.draw.choice(blocks)
                    try:
                        yield next(block)
                    except StopIteration:
                        blocks.remove(block)
                        yield True

        fake_peer.run([of_rank(k) for k in self.pending.values()], self.draw, patience=patience * 2000)
        for kernels in self.pending.values():
            kernels.clear()

    def moves(self, plan, xs):
        """The wanted blocks, in order."""
        under_way = self.begin(plan, xs)
        self.run()
        done = {r: one.finish()[0] for r, one in under_way.items()}
        return [done[r] for r in plan.wanted.partition.ranks]


def numbers(plan, dtype, lead=()):
    return [
        (torch.arange(torch.Size((*lead, *s)).numel()) % 5 + k).to(dtype).reshape(*lead, *s)
        for k, s in enumerate(plan.held.local_shape(r) for r in plan.held.partition.ranks)
    ]


@pytest.mark.parametrize("nodes", ["aaaa", "abab", "aaab"])
def test_random_movements(nodes):
    """Values as without it: uneven, empty and disjoint blocks, batches, strides, and ranks of other nodes."""
    ranks = Ranks(nodes)
    for i, (name, kind) in enumerate((n, k) for n in BUILDERS for k in KINDS):
        case, dtype = draw(name, kind, random.Random(seed_of(name, kind, nodes)), 4), DTYPES[i % len(DTYPES)]
        for plan in (case.map.plan, case.map.plan.T):
            for lead, how in (((), i % 4), ((2,), 0)):
                xs = numbers(plan, dtype, lead)
                wanted = plan.simulate(xs)
                got = ranks.moves(plan, [arranged(x, how) for x in xs])
                assert all(torch.equal(a, b) for a, b in zip(got, wanted)), (name, kind, how)
    assert ranks.moved > 100


def large():
    """A repartition of many chunks of each lane, and its blocks."""
    L = dd.Layout(dd.Partition((3, 1)), (300, 301))
    plan = dd.maps.repartition(L, dd.Partition((1, 3))).plan
    return plan, [L.shard(torch.randn(L.shape), r).clone() for r in range(3)]


@pytest.fixture
def small_slots(monkeypatch):
    """A message has many chunks."""
    monkeypatch.setattr(peer, "CAPACITY", 2**10)
    monkeypatch.setattr(tables, "SMALLEST", 2**10)


@pytest.mark.parametrize("start", [0, 2**32 - 5, 2**31 - 2])
def test_slots_are_used_again(start, small_slots):
    """Counters wrap round, and several movements are under way."""
    plan, xs = large()
    for seed in range(3):
        ranks = Ranks("aaa", 2, seed, start)
        under_way = [ranks.begin(plan, [x + k for x in xs]) for k in range(3)]
        ranks.run()
        for k, one in enumerate(under_way):
            got = [one[r].finish()[0] for r in range(3)]
            assert all(torch.equal(a, b + k) for a, b in zip(got, plan.simulate(xs)))


def wrong(seed, between=lambda: None):
    """Whether three movements fail, or have another result."""
    plan, xs = large()
    ranks = Ranks("aaa", 2, seed)
    try:
        under_way = []
        for k in range(3):
            under_way.append(ranks.begin(plan, [x + k for x in xs]))
            between()
        ranks.run()
    except (AssertionError, ValueError):
        return True
    results = [[one[r].finish()[0] for r in range(3)] for one in under_way]
    return not all(torch.equal(a, b + k) for k, got in enumerate(results) for a, b in zip(got, plan.simulate(xs)))


@pytest.mark.parametrize("fault", ["early credit", "no credit", "counters anew"])
def test_a_broken_protocol_is_noticed(fault, small_slots):
    assert not any(wrong(seed) for seed in range(3))
    with fake_peer.broken(fault):
        assert any(wrong(seed) for seed in range(3)), fault


def test_chunks_that_differ_are_noticed(small_slots, monkeypatch):
    """They follow from what both ends know: were they one end's own matter, this would happen."""
    chunks, calls = tables.chunks, iter(range(10**6))
    monkeypatch.setattr(tables, "chunks", lambda n, lanes, most: chunks(n, lanes, most >> next(calls) % 2))
    assert wrong(0)


def test_the_length_of_a_chunk():
    """All of a message, in equal shares, whatever its length."""
    for nbytes in (1, 63, 64, 1000, 8192, 8193, 10**5, 2**20, 2**20 + 1, 10**8):
        for lanes in (1, 3, 32):
            chunk, count = tables.chunks(nbytes, lanes, region.CAPACITY)
            assert chunk <= region.CAPACITY and chunk % 64 == 0 and (count - 1) * chunk < nbytes <= count * chunk
            assert nbytes < 2**20 or chunk * lanes <= 2 * nbytes


def test_division():
    """By a multiplication, for all that a box may have."""
    draw = random.Random(0)
    for n in (*range(2, 70), 2**30, 2**31 - 1, *(draw.randrange(2, 2**31) for _ in range(200))):
        factor, shift = tables.divisor(n)
        assert factor < 2**32
        for k in (0, 1, n - 1, n, n + 1, 2**31 - 1, *(draw.randrange(2**31) for _ in range(50))):
            if k < 2**31:
                assert fake_peer.quotient(k, factor << 32, shift) == k // n


def test_boxes_of_many_dims_are_cut():
    """Whatever a table has no room for goes as several boxes."""
    dims = [(2, 1000), (3, 300), (2, 100), (2, 40), (2, 16), (2, 6), (2, 2)]
    found = tables.pieces(dims, 2)
    assert len(found) == 6 and all(len(part) <= tables.DIMS for _, part in found)
    at = lambda dims: [sum(i) for i in __import__("itertools").product(*([k * s for k in range(n)] for n, s in dims))]
    assert [a + b for a, part in found for b in at(part[::-1])] == at(dims)
    (_, first), *_ = halves = tables.pieces([(2**31, 4), (4, 1)], 4)
    assert len(halves) == 2 and first == [(2**31 - 1, 4)] and halves[1][0] == (2**31 - 1) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.complex64, torch.int8])
def test_small_sums(dtype):
    """One order on all ranks, so that the results are equal to the last bit; of any length, at any address."""
    ranks = Ranks("aaa", 3)
    for count, at in ((1, 0), (7, 1), (5000, 0), (20001, 3), (3, 0)):
        xs = [(torch.randn(count + at) * 3).to(dtype)[at:] for _ in range(3)]
        ys = [torch.empty_like(x) for x in xs]
        for r, (x, y) in enumerate(zip(xs, ys)):
            ranks.transports[r].reach.sum((0, 1, 2), dtype, count)(x.data_ptr(), y.data_ptr())
        ranks.run()
        wide = torch.float32 if dtype == torch.float16 else dtype
        wanted = (xs[0].to(wide) + xs[1].to(wide) + xs[2].to(wide)).to(dtype)
        assert all(torch.equal(y, wanted) for y in ys)


def test_a_result_stays():
    """Later movements write nowhere into it."""
    plan, xs = large()
    ranks = Ranks("aaa")
    first = ranks.moves(plan, xs)
    before = [y.clone() for y in first]
    for _ in range(5):
        ranks.moves(plan, [x + 1 for x in xs])
    assert all(torch.equal(a, b) for a, b in zip(first, before))


def test_several_tensors_at_once():
    """As one set of messages; so many that a table has no room for them go as before."""
    plan, xs = large()
    for count in (2, 5, 12):
        ranks = Ranks("aaa")
        given = [[x + k for k in range(count)] for x in xs]
        under_way = [Exchange((plan,) * count, mine, ranks.transports[r]) for r, mine in enumerate(given)]
        assert ranks.moved == (3 if count <= 11 else 0)
        ranks.run()
        got = [one.finish() for one in under_way]
        for k in range(count):
            wanted = plan.simulate([x + k for x in xs])
            assert all(torch.equal(ys[k], w) for ys, w in zip(got, wanted))


def test_short_rows_go_as_messages():
    """By what both ends know; what is large, stays and lies in short words is left to torch's copies."""
    L = dd.Layout(dd.Partition((1, 3)), (3000, 30))
    for widths, straight in (((0, 1), False), ((1, 1), False), ((0, 4), True)):
        plan = dd.maps.halo_exchange(dd.HaloSpec(L, widths, boundary="circular")).plan
        ranks, xs = Ranks("aaa"), numbers(plan, torch.float32)
        got = ranks.moves(plan, xs)
        assert (ranks.moved > 0) == straight and all(map(torch.equal, got, plan.simulate(xs)))


def test_what_stays_and_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(peer, "NARROW", 2**8)
    L = dd.Layout(dd.Partition((1, 3)), (300, 33))
    plan = dd.maps.halo_exchange(dd.HaloSpec(L, (0, 4), boundary="circular")).plan
    ranks, xs = Ranks("aaa"), numbers(plan, torch.int16)
    under_way = ranks.begin(plan, xs)
    assert all(one.program.kept and not one.program.straight.kept for one in under_way.values())
    ranks.run()
    assert all(map(torch.equal, [one.finish()[0] for one in under_way.values()], plan.simulate(xs)))


def test_an_error_says_what_a_kernel_has_waited_for(monkeypatch):
    """Also where the launcher's own handler reports it, which has loaded the file by its path."""
    monkeypatch.setattr(failure, "notes", [lambda: "", lambda: "a kernel waited in vain"])
    code, text = _rank.cause(RuntimeError("a device's"))
    assert code == 1 and text.endswith("RuntimeError: a device's\na kernel waited in vain")


def test_lanes():
    """All blocks that wait for peers run at once, beside NCCL's."""
    for multiprocessors in (108, 132, 148):
        for ranks in (2, 3, 4, 8, 16):
            lanes = peer.lanes_of(multiprocessors, ranks)
            assert 1 <= lanes <= region.LANES and lanes * (ranks - 1) <= multiprocessors - 32


def test_what_stays_has_blocks_of_its_own():
    """As many as it needs, however few lanes the messages have."""
    stays, sent = (tables.Box(0, 0, (n,), (4,), 4) for n in (2**22, 2**10))
    to = tables.Box(1, 0, (2**22,), (4,), 4)
    lanes = tables.Lanes(1, 4, 0, 0, 0, 0)
    for most, wanted in ((528, 256), (100, 100)):
        table = tables.table_of([(True, lanes, [sent])], [(to, stays)], 4, 2**17, {0: 0, 1: 0}, 4096, most)
        assert table.keepers == wanted and table.movers <= 4
