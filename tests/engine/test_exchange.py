"""The executor's economy, which results do not show: what is copied, what is kept, and what is given back."""

import ctypes
import mmap
import os
import random
from pathlib import Path

import pytest
import torch
from fuzzing import BUILDERS, KINDS, draw, seed_of
from torch._prims_common import are_strides_like_channels_last_or_false

import distdl as dd
from distdl.engine import exchange
from distdl.engine import program as programs
from distdl.engine.fast import by_address, fused, pages
from distdl.engine.local import LocalTransport, NullTransport
from distdl.engine.recognise import covered, gaps
from distdl.plan import Plan, Side

ROWS, COLUMNS = dd.Layout(dd.Partition((4, 1)), (8, 8)), dd.Layout(dd.Partition((1, 4)), (8, 8))


class Posting(NullTransport):
    """Carries nothing, and remembers what it was given."""

    def __init__(self, rank):
        super().__init__(rank, 4)
        self.sends, self.receives, self.abandoned = [], [], []

    def post(self, sends, receives, call=None, memory=None):
        self.sends, self.receives = sends, receives
        return sends, receives

    def abandon(self, handle, memory):
        self.abandoned.append((handle, memory))


def within(address, tensor):
    return tensor.data_ptr() <= address < tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Box(tuple):
    """Sizes, strides in bytes, and bytes of one element."""

    def at(self, address):
        sizes, strides, itemsize = self
        span = sum((n - 1) * s for n, s in zip(sizes, strides)) + itemsize
        flat = torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=torch.uint8)
        return flat.as_strided((*sizes, itemsize), (*strides, 1))

    def pack(self, to, source, nbytes):
        self.run(to, nbytes).copy_(self.at(source).flatten())

    def unpack(self, to, source, nbytes):
        box = self.at(to)
        box.copy_(self.run(source, nbytes).view(box.shape))

    @staticmethod
    def run(address, nbytes):
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def every_box(*box):
    """For ``by_address.strided``: all of them, while they travel and within a rank."""
    return Box(box[:3])


class Typed(LocalTransport):
    """Packs and unpacks single boxes itself, as MPI's datatypes let it; and it reads and writes as early as it may."""

    takes_types = True

    @staticmethod
    def memory(address, message):
        return (message if isinstance(message, Box) else Box(((message,), (1,), 1))).at(address)

    def post(self, sends, receives, call=None, memory=None):
        for peer, address, message in sends:
            assert peer < self.size
            self.mailboxes[self.rank, peer].append(self.memory(address, message).flatten().clone())
        self.wait([one for one in receives if self.mailboxes[one[0], self.rank]])
        return receives

    def wait(self, receives):
        for peer, address, message in receives:
            if sent := self.mailboxes[peer, self.rank]:
                memory = self.memory(address, message)
                memory.copy_(sent.popleft().view(memory.shape))


def program_of(plan, x, rank=1):
    return programs.program_of((plan,), [x], NullTransport(rank, 4))[0]


def test_contiguous_boxes_are_neither_packed_nor_unpacked():
    """Sent from the tensor's own memory, and received into the result's, also where dims of size 1 have odd strides."""
    gather = dd.maps.all_gather(ROWS).plan
    for x in (torch.ones(2, 8), torch.ones(3, 2, 8)[1], torch.ones(2, 8)[None].transpose(0, 1)[:, 0]):
        transport = Posting(1)
        (y,) = exchange.Exchange((gather,), [x], transport).finish()
        assert len(transport.sends) == len(transport.receives) == 3
        assert all(within(a, x) for _, a, _ in transport.sends) and all(within(a, y) for _, a, _ in transport.receives)
        assert program_of(gather, x).staging == 0
    batch = torch.ones(2, 1, 8).as_strided((1, 2, 8), (3, 8, 1))  # a batch of one: its stride says nothing
    transport = Posting(1)
    (y,) = exchange.Exchange((gather,), [batch], transport).finish()
    assert all(within(a, batch) for _, a, _ in transport.sends) and all(within(a, y) for _, a, _ in transport.receives)


def test_other_boxes_are_packed_once(monkeypatch):
    to_columns, x = Plan(Side.of(ROWS), Side.of(COLUMNS)), torch.ones(2, 8)
    transport = Posting(1)
    (y,) = exchange.Exchange((to_columns,), [x], transport).finish()
    program = program_of(to_columns, x)
    assert [part.size for part in program.packs] == [(4, 2, 2)], "they and what stays are one copy"
    assert [part.size for part in program_of(to_columns, x, 0).packs] == [(4, 2, 2)], "wherever that stands"
    monkeypatch.setattr(programs, "_STAYS", 15)  # bytes, of 16
    to_columns = Plan(Side.of(ROWS), Side.of(COLUMNS))
    program = program_of(to_columns, x)
    assert [part.size for part in program.packs] == [(2, 2, 2), (2, 2)], "two of them are one copy"
    assert len(program.kept) == 1 and not program.kept_moves
    narrow = Plan(Side.of(dd.Layout(ROWS.partition, (8, 4))), Side.of(dd.Layout(COLUMNS.partition, (8, 4))))
    assert [part.size for part in program_of(narrow, torch.ones(2, 4), 0).packs] == [(4, 2, 1)], "one element apart"
    both = program_of(Plan(Side.of(COLUMNS), Side.of(ROWS)), torch.ones(8, 2, 2)[..., 0], 0)
    assert [[part.size for part in parts] for parts in (both.packs, [to for to, _ in both.late])] == [[(3, 2, 2)]] * 2
    assert not any(within(a, x) for _, a, _ in transport.sends)
    assert all(within(a, y) for _, a, _ in transport.receives) and program.late == []
    assert len({a for _, a, _ in transport.sends}) == 3 and all(
        a % 64 == transport.sends[0][1] % 64 for _, a, _ in transport.sends
    )
    summing = to_columns.T
    program = program_of(summing, torch.ones(8, 2))
    assert len(program.late) == 2 and len(program.kept_moves) + len(program.kept) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILDERS)
def test_an_engine_that_packs_single_boxes(name, kind, monkeypatch):
    """Values as without it, also from strided memory; a message of one box that is not added is never packed."""
    seed = seed_of(name, kind, "typed")
    case, numbers = draw(name, kind, random.Random(seed), 4), torch.Generator().manual_seed(seed)
    for plan in (case.map.plan, case.map.plan.T):
        xs = [torch.randint(9, (*plan.held.local_shape(r), 2), generator=numbers) for r in plan.held.partition.ranks]
        for blocks in ([x[..., 0] for x in xs], [torch.stack([x[..., 0], x[..., 1]]) for x in xs]):
            wanted = plan.simulate(blocks)
            with monkeypatch.context() as patch:
                patch.setattr(exchange, "LocalTransport", Typed)
                patch.setattr(by_address, "strided", every_box)
                for r in plan.ranks:
                    plan.view(r).programs.clear()
                assert all(torch.equal(a, b) for a, b in zip(plan.simulate(blocks), wanted))
                for r in plan.ranks:
                    view = plan.view(r)
                    (program,) = view.programs.values()
                    added = [view.adds and not (i == 0 and covered(view)) for i in range(len(view.received))]
                    assert {peer: leaf for peer, leaf, _, _ in program.sends} == {
                        m.peer: -1 if len(m.boxes) > 1 else 0 for m in view.sends
                    }
                    assert {peer: leaf for peer, leaf, _, _ in program.receives} == {
                        m.peer: -1 if len(m.boxes) > 1 or add else 0
                        for m, add in zip(view.received, added)
                        if m.peer != r
                    }
            for r in plan.ranks:
                plan.view(r).programs.clear()


@pytest.mark.parametrize("n", [64, 20])
def test_such_an_engine_copies_what_stays_and_what_is_staged(n, monkeypatch):
    """Without views of tensors, where one end of a copy is a run of memory."""
    rows, columns = (dd.Layout(dd.Partition(grid), (n, n)) for grid in ((4, 1), (1, 4)))
    X, there = torch.randint(9, (n, n)), Plan(Side.of(rows), Side.of(columns))
    strided = [columns.shard(X, r) for r in range(4)]  # neither end of what stays is a run of memory
    monkeypatch.setattr(exchange, "LocalTransport", Typed)
    monkeypatch.setattr(by_address, "strided", lambda *box: None if box[3] else Box(box[:3]))
    for plan, blocks, layout, whole in (
        (there, [rows.shard(X, r) for r in range(4)], columns, True),
        (Plan(Side.of(columns), Side.of(rows)), [columns.shard(X, r).contiguous() for r in range(4)], rows, True),
        (Plan(Side.of(columns), Side.of(rows)), strided, rows, False),
    ):
        for r, y in enumerate(plan.simulate(blocks)):
            assert torch.equal(y, layout.shard(X, r))
            (program,) = plan.view(r).programs.values()
            assert program.staging and bool(program.kept) == (not whole)
            joined = n == 20  # three boxes as one copy, with gaps between them in the staging memory
            assert bool(program.packs) == (joined and (layout is columns or not whole))
            assert bool(program.late) == (joined and layout is rows)


@pytest.mark.parametrize("boundary", ["zeros", "circular", "reflect"])
@pytest.mark.parametrize("small", [0, 2**16])
def test_what_arrives_at_once_stays(boundary, small, monkeypatch):
    """Zeros are in their places before the first message can be, and nothing that stays is written over what came."""
    L = dd.Layout(dd.Partition((2, 2)), (6, 5))
    X, plan = torch.randint(9, (6, 5)), dd.HaloSpec(L, (2, 1), boundary=boundary).plan()
    blocks = [L.shard(X, r) for r in range(4)]
    wanted = plan.simulate(blocks)
    monkeypatch.setattr(exchange, "LocalTransport", Typed)
    monkeypatch.setattr(by_address, "strided", every_box)
    monkeypatch.setattr(programs, "_SMALL", small)
    monkeypatch.setattr(exchange, "_empty_like", lambda like: torch.full(like.shape, -1, dtype=like.dtype))
    for order in (1, -1):  # the first and the last to send, in turn
        ranks = range(4)[::order]
        P = dd.Layout(dd.Partition((2, 2), tuple(ranks)), (6, 5))
        plan = dd.HaloSpec(P, (2, 1), boundary=boundary).plan()
        assert all(torch.equal(a, b) for a, b in zip(plan.simulate(blocks), wanted))


def test_what_stays_is_copied_in_the_cheapest_way():
    """One run of memory by one move, anything else by torch, while messages travel; sums after."""
    x = torch.ones(2, 8)
    gather = program_of(dd.maps.all_gather(ROWS).plan, x)
    assert len(gather.kept_moves) == 1 and not gather.kept and not gather.late
    columns = program_of(Plan(Side.of(ROWS), Side.of(COLUMNS)), x)
    ((move, to, _, source, place, nbytes),) = columns.kept_moves
    assert (to, source, place % 64, nbytes) == (0, -1, 0, 16) and not columns.kept, "it is packed with the others"
    rows = program_of(Plan(Side.of(COLUMNS), Side.of(ROWS)), torch.ones(8, 2))
    assert [m[1] for m in rows.kept_moves] == [-1] and len(rows.late) == 1 and not rows.kept, "or unpacked"
    scatter = program_of(dd.maps.reduce_scatter(ROWS).plan, torch.ones(8, 8))
    assert not scatter.kept_moves and not scatter.kept and len(scatter.late) == 3, (
        "rank 0's part arrives in place, the rest is added"
    )
    assert [source is None for _, source in scatter.late] == [False, True, True] and scatter.staging == 128
    assert scatter.likes[0].shape == (2, 8) and scatter.likes[0].dtype == torch.float32 and scatter.zeroed == []
    assert scatter.receives[0][1] == 0
    assert program_of(dd.HaloSpec(ROWS, 1, boundary="zeros").plan(), x).zeroed == [0], (
        "a window with gaps starts as zeros"
    )


@pytest.mark.parametrize("size, small", [(1, True), (5000, False)])
def test_small_staging_stays_with_its_program_and_large_goes_back(size, small, monkeypatch):
    to_columns = Plan(Side.of(ROWS), Side.of(COLUMNS))
    pool = programs.scratch
    x = torch.ones(size, 2, 8)
    program = program_of(to_columns, x)
    assert (program.staging <= 2**16) == small and not program.spare
    if small:
        monkeypatch.setattr(programs, "_SMALL", program.staging)
    kept = pool.kept
    first, second = (exchange.begin((to_columns,), [x], Posting(1)) for _ in range(2))
    assert first.staging[0].data_ptr() != second.staging[0].data_ptr(), "both are under way"
    first.finish(), second.finish()
    assert len(program.spare) == int(small) and first.staging is second.staging is None
    assert pool.kept == sum(b.numel() for blocks in pool.free.values() for b in blocks) >= kept
    assert len(pool.free[_size(program.staging)]) >= (1 if small else 2)
    again = exchange.begin((to_columns,), [x], Posting(1))
    assert not program.spare
    again.finish()


def test_memory_of_what_was_dropped_stays_until_its_messages_are_through():
    """All that is sent from and received into: the engine gets it, and nobody else."""
    to_columns = Plan(Side.of(ROWS), Side.of(COLUMNS))
    for plan, shape in ((to_columns, (2, 8)), (to_columns.T, (8, 2)), (to_columns, (5000, 2, 8))):
        transport = Posting(1)
        exchange.begin((plan,), [torch.ones(shape)], transport).finish()
        assert not transport.abandoned
        exchange.begin((plan,), [torch.ones(shape)], transport)  # and dropped
        ((handle, (xs, ys, staging)),) = transport.abandoned
        assert handle == (transport.sends, transport.receives)
        ours = [*xs, *ys, staging[0]]
        assert all(any(within(at, t) for t in ours) for messages in handle for _, at, _ in messages)
        assert any(within(at, staging[0]) for messages in handle for _, at, _ in messages)
        others = [exchange.begin((plan,), [xs[0]], Posting(1)) for _ in range(2)]
        assert len({staging[0].data_ptr(), *(other.staging[0].data_ptr() for other in others)}) == 3, "it is used again"
        [other.finish() for other in others]


def _size(nbytes):
    return max(256, 1 << (nbytes - 1).bit_length())


def test_the_pool_keeps_what_it_is_allowed():
    pool = type(programs.scratch)()
    block = pool.take(1000)
    assert block.numel() == 1024 and pool.take(1).numel() == 256 and pool.take(1024).numel() == 1024
    assert pool.take(1025).numel() == 2048
    pool.give(block)
    assert pool.kept == 1024 and pool.take(900) is block and pool.kept == 0
    pool.limit = 1024
    other = torch.empty(1024, dtype=torch.uint8)
    pool.give(block), pool.give(other)
    assert pool.kept == 1024 and pool.take(1024) is block, "the second did not fit"


def test_programs_are_remembered_but_not_without_end():
    gather = dd.maps.all_gather(dd.Layout(dd.Partition((2,), (0, 1)), (4,))).plan
    view = gather.view(1)
    program = program_of(gather, torch.ones(2))
    assert program_of(gather, torch.ones(2)) is program and program_of(gather, torch.ones(2).double()) is not program
    for n in range(200):
        program_of(gather, torch.ones(n, 2))
        assert len(view.programs) <= 64
    assert program_of(gather, torch.ones(2, 2, 2).transpose(0, 1)) is not program_of(gather, torch.ones(2, 2, 2))


def test_wrong_shapes_are_refused_before_anything_is_sent():
    gather = dd.maps.all_gather(ROWS).plan
    for shape in ((8,), (8, 2), (3, 8), ()):
        with pytest.raises(dd.errors.ShapeError) as caught:
            exchange.Exchange((gather,), [torch.ones(shape)], Posting(1)).finish()
        assert (caught.value.expected, caught.value.actual, caught.value.rank) == ((2, 8), shape, 1)


def test_programs_differ_by_what_the_engine_has():
    """One plan may be run by several: simulated, and by MPI."""
    plan, x = dd.maps.all_sum_reduce(ROWS.partition, (3,)).plan, torch.ones(3)
    for xs in ([x], [x, x]):
        engines = (NullTransport(1, 4), LocalTransport(1, 4), NullTransport(1, 4))
        kinds = [programs.program_of((plan,) * len(xs), xs, engine)[0].kind for engine in engines]
        assert kinds == ["all_reduce", None, "all_reduce"]


def test_all_reduces_read_the_input_itself(monkeypatch):
    """Unless its memory has gaps, or the sum is taken in a wider type; and they write the result itself."""
    told = []
    monkeypatch.setattr(Posting, "collective", lambda self, kind, source, target, *rest: told.append((source, target)))
    plan = dd.maps.all_sum_reduce(ROWS.partition, (2, 3)).plan
    for x, itself in ((torch.ones(2, 3), True), (torch.ones(3, 2).T, False), (torch.ones(2, 3).bfloat16(), False)):
        (y,) = exchange.Exchange((plan,), [x], Posting(1)).finish()
        source, target = told.pop()
        assert (source == x.data_ptr()) == itself and source == (x.data_ptr() if itself else target)
        assert target == y.data_ptr() or x.dtype == torch.bfloat16
    assert not told


def test_programs_of_several_leaves_differ_by_every_leaf():
    p, q, x = dd.maps.all_gather(ROWS).plan, Plan(Side.of(ROWS), Side.of(COLUMNS)), torch.ones(2, 8)

    def program(plans, xs):
        return programs.program_of(plans, xs, NullTransport(1, 4))[0]

    pair = program((p, p), [x, x])
    assert program((p, p), [x, x]) is pair and program((p, q), [x, x]) is not pair
    assert program((p, p), [x, x.double()]) is not pair and program((p, p), [x, torch.ones(3, 2, 8)[1]]) is pair


@pytest.mark.parametrize("dims", [4, 5])
def test_results_have_the_format_of_what_came(dims):
    """By torch's own rule, on strides of every order and with gaps; after batch axes; and dense."""
    draws, seen = random.Random(dims), set()
    for _ in range(4000):
        shape = tuple(draws.choice((0, 1, 1, 2, 3)) for _ in range(dims))
        order = draws.choice((range(dims), (0, *range(2, dims), 1), draws.sample(range(dims), dims)))
        strides, step = [0] * dims, draws.choice((0, 1, 1, 1, 2))
        for d in reversed(order):
            strides[d], step = step, step * max(shape[d], 1) + draws.choice((0, 0, 0, 1))
        found = programs.channels_last(shape, strides)
        assert found == are_strides_like_channels_last_or_false(shape, strides), (shape, strides)
        seen.add((found, 0 in shape))
        for lead in ((), (2,)):
            wanted = torch.empty((*lead, *(n + 1 for n in shape)))
            if found:
                form = torch.channels_last if dims == 4 else torch.channels_last_3d
                wanted = torch.stack([wanted[0].to(memory_format=form)] * 2) if lead else wanted.to(memory_format=form)
            made = programs._fresh(tuple(wanted.shape), ((*lead, *shape), (7,) * len(lead) + tuple(strides)), len(lead))
            assert made == wanted.stride()
    assert seen == {(True, False), (False, False), (False, True)}
    assert programs._fresh((2, 3, 4), ((2, 3, 4), (12, 1, 3)), 0) == (12, 4, 1), "three dims have one format"


def test_what_messages_are_called():
    """By the plans and the dtype, alike on both ends; and whom they concern."""
    plan = Plan(Side.of(ROWS), Side.of(COLUMNS))
    one, other = (program_of(plan, torch.ones(2, 8), rank).call for rank in (1, 2))
    assert one.code == other.code and 0 < one.code < 2**32 and (one.peers, other.peers) == ((0, 2, 3), (0, 1, 3))
    assert program_of(plan, torch.ones(2, 8).double()).call.code != one.code and "float32" in one.partitions
    gather = Plan(Side.of(COLUMNS), Side.of(ROWS))
    assert program_of(gather, torch.ones(8, 2)).call.code != one.code
    halo = dd.HaloSpec(ROWS, (1, 1)).plan()
    assert [program_of(halo, torch.ones(2, 8), rank).call.peers for rank in range(4)] == [(1,), (0, 2), (1, 3), (2,)]


def test_what_is_counted_is_what_is_sent():
    """Kinds, peers or ranks, and bytes: of messages, of collectives of both kinds, of several dtypes."""
    gathers = dd.maps.all_gather(ROWS).plan
    engine = NullTransport(1, 4)
    engine.collectives = ("all_gather", "reduce_scatter")
    gathering, scattering = (
        programs.program_of((plan,), [x], engine)[0].messages()
        for plan, x in ((gathers, torch.ones(2, 8)), (gathers.T, torch.ones(8, 8).double()))
    )
    assert gathering == [("all_gather", (0, 1, 2, 3), 64)] and scattering == [("reduce_scatter", (0, 1, 2, 3), 128)]
    turn = program_of(Plan(Side.of(ROWS), Side.of(COLUMNS)), torch.ones(2, 8))
    assert turn.messages() == [("send", peer, 16) for peer in (0, 2, 3)]
    total, x = dd.maps.all_sum_reduce(ROWS.partition, (3,)).plan, torch.ones(3)
    several = programs.program_of((total,) * 3, [x, x.double(), x], NullTransport(1, 4))[0]
    assert several.messages() == [("all_reduce", (0, 1, 2, 3), 24), ("all_reduce", (0, 1, 2, 3), 24)]
    nothing = dd.maps.all_sum_reduce(ROWS.partition, (0,)).plan
    assert program_of(nothing, torch.ones(0)).messages() == []


def test_a_profiler_sees_both_ends_of_a_movement():
    """And the result is the same."""
    plan, xs = Plan(Side.of(ROWS), Side.of(COLUMNS)), [torch.arange(16.0).reshape(2, 8)]
    plain = exchange.begin((plan,), xs, NullTransport(1, 4))
    kept = plain.finish()[0][2:4]
    with torch.profiler.profile() as profile:
        moving = exchange.begin((plan,), xs, NullTransport(1, 4))
        (y,) = moving.finish()
    assert type(plain) is exchange.Exchange and y.shape == (8, 2) and torch.equal(y[2:4], kept)
    names = [event.name for event in profile.events()]
    assert sum("start of " in name for name in names) == sum("wait for " in name for name in names) == 1


@pytest.mark.parametrize("widths", [(1, 2), (0, 9), (3, 0)])
def test_only_the_gaps_of_large_windows_are_zeroed(widths, monkeypatch):
    L = dd.Layout(dd.Partition((2, 3)), (5, 7))
    plan = dd.HaloSpec(L, widths, boundary="zeros").plan()
    xs = [L.shard(torch.arange(1.0, 36).reshape(5, 7), r) for r in range(6)]
    wanted = plan.simulate(xs)
    for r in range(6):
        plan.view(r).programs.clear()
    monkeypatch.setattr(programs, "_SMALL", 0)
    monkeypatch.setattr(exchange, "_empty_like", lambda like: torch.full(like.shape, torch.nan, dtype=like.dtype))
    assert all(torch.equal(a, b) for a, b in zip(plan.simulate(xs), wanted))
    made = [next(iter(plan.view(r).programs.values())) for r in range(6)]
    assert not any(p.zeroed for p in made) and any(p.blanks for p in made)
    view, nbytes = plan.view(0), 4 * torch.Size(plan.view(0).out_shape).numel()
    for small in (nbytes, nbytes + 1):
        view.programs.clear()
        monkeypatch.setattr(programs, "_SMALL", small)
        program = program_of(plan, xs[0], 0)
        assert (program.zeroed, bool(program.blanks)) == (
            ([0], False) if nbytes < small and gaps(view) else ([], bool(gaps(view)))
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(8, 12, 32), (8, 12, 20), (7, 5, 9)])
def test_boxes_in_words(shape, dtype, monkeypatch):
    """As a device copies them: several elements at a time, where sizes, strides and addresses allow."""
    L, make, widened = dd.Layout(dd.Partition((2, 2, 1)), shape), programs._program, []
    current: list = []

    def in_words(plans, leads, strides, dtypes, transport, device):
        program = make(plans, leads, strides, dtypes, transport, device)
        fused.widen(program, current)
        widened.extend(
            p for p in (*program.packs, *(p for pair in (*program.kept, *program.late) for p in pair if p)) if p.words
        )
        return program

    X = (torch.arange(torch.Size(shape).numel()) % 97).to(dtype).reshape(shape)
    for plan in (
        dd.HaloSpec(L, (1, 1, 0)).plan(),
        dd.maps.repartition(L, dd.Partition((1, 1, 4))).plan,
        dd.maps.all_gather(L, 1).plan,
    ):
        xs = [L.shard(X, r).clone() for r in range(4)]
        wanted = plan.simulate(xs)
        for r in range(4):
            plan.view(r).programs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(programs, "_program", in_words)
            patch.setattr(fused, "small", lambda part: False)
            for r, x in enumerate(xs):
                current[:] = [x]
                programs.program_of((plan,), [x], exchange.LocalTransport(r, 4))
        assert all(torch.equal(a, b) for a, b in zip(plan.simulate(xs), wanted))
    assert bool(widened) == (dtype != torch.complex128)


def test_boxes_of_widened_sums_are_not_fused(monkeypatch):
    """The input's elements and the output's differ in size there."""
    made = []
    monkeypatch.setattr(fused, "available", lambda: True)
    monkeypatch.setattr(fused, "Boxes", lambda copies, itemsize, device: made.append(itemsize))
    plan = dd.maps.halo_exchange(dd.HaloSpec(dd.Layout(dd.Partition((2, 2)), (6, 6)), 2, boundary="circular")).T.plan
    for dtype, sizes in ((torch.bfloat16, []), (torch.int16, []), (torch.float32, [4])):
        x = torch.ones(plan.view(1).in_shape, dtype=dtype)
        fused.fuse(program_of(plan, x), [x])
        assert made == sizes, dtype


def _flags(tensor):
    """What the system says about the memory of a tensor (VmFlags of /proc/PID/smaps)."""
    inside, at = False, tensor.data_ptr() + tensor.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(number, 16) for number in first.split("-"))
            inside = start <= at < stop
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not os.path.exists("/sys/kernel/mm/transparent_hugepage"),
    reason="needs a Linux with large pages",
)
@pytest.mark.parametrize("rows, large", [(2**22, True), (2**22 - 4, False)])
def test_large_results_ask_for_large_pages(rows, large, monkeypatch):
    """Results of 32 MiB and more, and only where nobody has switched it off."""
    A, B = (dd.Layout(dd.Partition(grid), (rows, 8)) for grid in ((4, 1), (1, 4)))
    for on in (True, False):
        monkeypatch.setattr(pages, "wanted", on)
        to_columns, x = Plan(Side.of(A), Side.of(B)), torch.empty(A.local_shape(1))
        (y,) = exchange.Exchange((to_columns,), [x], NullTransport(1, 4)).finish()
        assert y.nbytes == 8 * rows and ("hg" in _flags(y)) == (on and large)
        del y


def test_scratch_memory_outlives_inference_mode():
    """What was first asked for inside it is written again outside, where torch refuses tensors of that mode."""
    L = dd.Layout(dd.Partition((2, 1)), (4, 6))
    plan = dd.maps.repartition(L, dd.Partition((1, 2))).plan
    xs = [torch.rand(L.local_shape(r)) for r in range(2)]
    programs.scratch.free.clear()
    with torch.inference_mode():
        inside = plan.simulate([x.clone() for x in xs])
    outside = plan.simulate(xs)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside))
    assert plan.view(0).programs and all(p.packs for p in plan.view(0).programs.values()), "torch packs here"
