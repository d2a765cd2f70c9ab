"""What the executor does for tensors of a device, on a double of one: fused and widened copies, staging, side
streams."""

import random
from types import SimpleNamespace

import fake_device
import pytest
import torch
from fake_device import Boxes, Elsewhere, notes, on_device
from fuzzing import BUILDERS, KINDS, draw, seed_of

import distdl as dd
from distdl.engine import exchange, side_stream
from distdl.engine import program as programs
from distdl.engine.fast import fused
from distdl.engine.local import NullTransport

DTYPES = (torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.complex128, torch.int16)


def arranged(x, how):
    """x with other strides, or at another address."""
    if how == 1 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 2:  # past an odd number of elements
        room = torch.empty(x.numel() + 3, dtype=x.dtype)[3:]
        return room.view(x.shape).copy_(x)
    if how == 3:
        return torch.stack([x, x], -1)[..., 0]
    return x.clone()


def moved(plan, xs, how=0):
    """The held blocks moved on the device."""
    blocks = [arranged(x, how) for x in xs]
    if how == 2:
        blocks = [x.as_subclass(Elsewhere) for x in blocks]
    return plan.simulate([x if isinstance(x, Elsewhere) else on_device(x) for x in blocks])


@pytest.mark.parametrize("large", [-1, 40, 2**20])
def test_random_movements(large, monkeypatch):
    """Values as on the host, however boxes are copied: in words, by one kernel, or large ones in words and small ones
    fused."""
    for i, (name, kind) in enumerate((n, k) for n in BUILDERS for k in KINDS):
        seed = seed_of(name, kind, "device")
        case, dtype = draw(name, kind, random.Random(seed), 4), DTYPES[(i + large) % len(DTYPES)]
        for plan in (case.map.plan, case.map.plan.T):
            xs = [
                (torch.arange(torch.Size(s).numel()) % 5 + k).to(dtype).reshape(s)
                for k, s in enumerate(plan.held.local_shape(r) for r in plan.held.partition.ranks)
            ]
            wanted = plan.simulate(xs)
            with monkeypatch.context() as patch:
                fake_device.install(patch, large)
                for how in range(4):
                    got = moved(plan, xs, how)
                    assert all(type(y) is Elsewhere for y in got), (name, kind, how)
                    assert all(torch.equal(a, b) for a, b in zip(got, wanted)), (name, kind, how)
                got = moved(plan, [torch.stack([x, x]) for x in xs])
                assert all(torch.equal(y, torch.stack([w, w])) for y, w in zip(got, wanted)), (name, kind)


def halo(shape=(8, 12, 16), widths=(1, 1, 1), grid=(2, 2, 1), boundary="circular"):
    L = dd.Layout(dd.Partition(grid), shape)
    return dd.maps.halo_exchange(dd.HaloSpec(L, widths, boundary=boundary)).plan, L


def program_of(plan, xs, rank=0):
    return programs.program_of((plan,) * len(xs), xs, NullTransport(rank, 4))[0]


def test_one_kernel_copies_the_small_boxes(monkeypatch):
    """One before sending and one after receiving; sums are added one after the other, in their order, and large boxes
    go alone."""
    fake_device.install(monkeypatch)
    plan, L = halo()
    x = on_device(torch.ones(L.local_shape(0)))
    program = program_of(plan, [x])
    assert not program.kept and not program.packs and not program.late and program.fused_early and program.fused_late
    assert (
        all(type(y) is Elsewhere for y in moved(plan, [torch.ones(L.local_shape(r)) for r in range(4)]))
        and Boxes.kernels == 8
    )
    back = program_of(plan.T, [on_device(torch.ones(plan.view(0).out_shape))])
    assert back.fused_early and back.fused_late is None and back.late
    pair = program_of(plan, [x, x])
    assert pair.fused_early is pair.fused_late is None and pair.kept, "the kernel knows one input"
    plan.view(0).programs.clear()
    fake_device.install(monkeypatch, large=x[0, 0].numel() * 4 * 8)
    some = program_of(plan, [x])
    assert some.fused_early and some.kept and all(to.nbytes > fused.LARGE for to, _ in some.kept)
    assert all(part.nbytes > fused.LARGE for part in (*some.packs, *(to for to, _ in some.late)))
    plan.view(0).programs.clear()
    fake_device.install(monkeypatch, kernel=False)
    alone = program_of(plan, [x])
    assert alone.fused_early is alone.fused_late is None and alone.kept and alone.packs and alone.late
    counts = [len(boxes.copies) if boxes else 0 for boxes in (some.fused_early, some.fused_late)]
    assert counts[0] + len(some.kept) + len(some.packs) == len(alone.kept) + len(alone.packs), "each box once"
    assert counts[1] + len(some.late) == len(alone.late)


def test_every_box_is_copied_once(monkeypatch):
    """By the kernel what is small, where there are two such boxes or more; alone what is large."""
    plan, L = halo((9, 13, 17), (1, 2, 3), (2, 2, 2), "zeros")
    x, seen = on_device(torch.ones(L.local_shape(0))), set()

    def copied(**how):
        fake_device.install(monkeypatch, **how)
        program = programs._program((plan,), [()], [x.stride()], [x.dtype], NullTransport(0, 8), x.device)
        fused.fuse(program, [x])
        alone = [[to for to, _ in program.kept] + program.packs, [to for to, _ in program.late]]
        together = [
            [copy[2] for copy in boxes.copies] if boxes else [] for boxes in (program.fused_early, program.fused_late)
        ]
        return [[part.size for part in parts] for parts in alone], together

    whole, none = copied(kernel=False)
    assert none == [[], []]
    nbytes = [4 * torch.Size(size).numel() for sizes in whole for size in sizes]
    for large in {0, *nbytes}:
        for all_of, alone, together in zip(whole, *copied(large=large)):
            small = [size for size in all_of if 4 * torch.Size(size).numel() <= large]
            assert sorted(together) == (sorted(small) if len(small) > 1 else [])
            assert sorted(alone + together) == sorted(all_of)
            seen.add((min(len(small), 3), len(small) < len(all_of)))
    assert {(1, True), (2, True), (3, True), (3, False)} <= seen


def test_a_single_box_needs_no_kernel(monkeypatch):
    fake_device.install(monkeypatch)
    L = dd.Layout(dd.Partition((4,)), (8,))
    gather = program_of(dd.maps.all_gather(L).plan, [on_device(torch.ones(2))])
    assert gather.fused_early is gather.fused_late is None and len(gather.kept) == 1 and gather.staging == 0
    columns = dd.Layout(dd.Partition((1, 2)), (4, 4))
    there = program_of(dd.maps.repartition(columns, dd.Partition((2, 1))).plan, [on_device(torch.ones(4, 2))])
    assert len(there.kept) == len(there.late) == 1 and there.fused_late is None
    for make in (lambda: dd.maps.repartition(columns, dd.Partition((2, 1))).plan, lambda: dd.maps.all_gather(L).plan):
        plan = make()
        xs = [torch.rand(plan.held.local_shape(r)) for r in plan.held.partition.ranks]
        assert all(torch.equal(a, b) for a, b in zip(moved(plan, xs), plan.simulate(xs)))


WORDS = {
    torch.uint8: (1, 16),
    torch.bfloat16: (2, 8),
    torch.float32: (4, 4),
    torch.float64: (8, 2),
    torch.complex128: (16, 1),
}


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_large_boxes_are_copied_in_the_widest_words(dtype, monkeypatch):
    """16 bytes where sizes, strides, offsets and the address allow; fewer, or single elements, where one of them does
    not."""
    fake_device.install(monkeypatch, large=-1)
    itemsize, most = WORDS[dtype]
    plan, L = halo((8, 8, 32), (1, 1, 0))
    shape = L.local_shape(0)

    def words(x):
        plan.view(0).programs.clear()
        program = program_of(plan, [x])
        parts = [*program.packs, *(part for pair in (*program.kept, *program.late) for part in pair if part)]
        assert parts and all(part.words == (part.dtype.itemsize > itemsize) for part in parts)
        return {part.dtype.itemsize for part in program.packs} | {source.dtype.itemsize for _, source in program.kept}

    def at(elements):
        room = torch.empty(torch.Size(shape).numel() + 64, dtype=dtype)
        room = room[(-room.data_ptr() % 16) // itemsize :]  # now at a multiple of 16
        return room[elements : elements + torch.Size(shape).numel()].view(shape).as_subclass(Elsewhere)

    assert words(at(0)) == {16} and words(at(most)) == {16}
    if most > 1:
        assert words(at(1)) == {itemsize} and words(at(most // 2)) == {8 if most > 1 else 16}
    assert words(on_device(torch.ones(*shape, 2).to(dtype))[..., 0].as_subclass(Elsewhere)) == {itemsize}, (
        "not side by side"
    )
    odd = torch.ones(*shape[:-1], shape[-1] + 1).to(dtype)[..., :-1].as_subclass(Elsewhere)
    assert words(odd) == {itemsize}, "rows of an odd length"


@pytest.mark.parametrize("last, width, word", [(32, 4, 16), (32, 2, 8), (30, 2, 8), (32, 1, 4), (31, 4, 4)])
def test_one_kernel_copies_words(last, width, word, monkeypatch):
    """The widest that all of its boxes allow: these halos are so many float32 wide."""
    fake_device.install(monkeypatch)
    plan, _ = halo((8, 2 * last), (1, width), (2, 2))
    xs = [torch.rand(plan.view(r).in_shape) for r in range(4)]
    program = program_of(plan, [on_device(xs[0])])
    assert program.fused_early.itemsize == program.fused_late.itemsize == word
    wanted = plan.simulate(xs)
    assert all(torch.equal(a, b) for a, b in zip(moved(plan, xs), wanted))
    off = torch.rand(4, last + 4)[:, 1 : last + 1].as_subclass(
        Elsewhere
    )  # rows that begin one element after a word does
    assert program_of(plan, [off]).fused_early.itemsize == 4


@pytest.mark.parametrize("padding, word", [(0, 16), (1, 4), (2, 8), (4, 16)])
def test_one_kernel_copies_words_of_the_output_too(padding, word, monkeypatch):
    """Rows of 32 begin in it behind so many zeros."""
    fake_device.install(monkeypatch)
    L = dd.Layout(dd.Partition((1, 2, 1)), (4, 8, 32))
    spec = dd.HaloSpec.window(L.partition, L.shape, (1, 3, 1 + 2 * padding), padding=(0, 1, padding))
    plan = dd.maps.halo_exchange(spec).plan
    xs = [torch.rand(plan.view(r).in_shape) for r in range(2)]
    assert program_of(plan, [on_device(xs[0])]).fused_early.itemsize == word
    wanted = plan.simulate(xs)
    assert all(torch.equal(a, b) for a, b in zip(moved(plan, xs), wanted))


@pytest.mark.parametrize("last, splits", [(30, (16, 14)), (32, (18, 14)), (32, (16, 16)), (33, (16, 17))])
def test_rows_that_words_do_not_divide(last, splits, monkeypatch):
    """Neither a row's length, nor a box's, nor where it begins need be a number of words, whatever the strides are."""
    fake_device.install(monkeypatch, large=-1)
    rows = dd.Layout(dd.Partition((2, 1, 1)), (8, 4, last))
    plan = dd.maps.repartition(rows, dd.Layout(dd.Partition((1, 1, 2)), (8, 4, last), (None, None, splits))).plan
    X = torch.rand(8, 4, 36)
    blocks = [X[:4, :, :last].as_subclass(Elsewhere), X[4:, :, :last].as_subclass(Elsewhere)]
    left, right = plan.simulate(blocks)
    assert torch.equal(left, X[..., : splits[0]]) and torch.equal(right, X[..., splits[0] : last])


def test_programs_differ_by_address_and_device(monkeypatch):
    """Words of 16 bytes need an address that they divide."""
    fake_device.install(monkeypatch, large=-1)
    plan, L = halo((8, 8, 32), (1, 1, 0))
    shape, n = L.local_shape(0), torch.Size(L.local_shape(0)).numel()
    room = torch.rand(n + 64)
    room = room[(-room.data_ptr() % 16) // 4 :]
    views = [room[k : k + n].view(shape).as_subclass(Elsewhere) for k in range(17)]
    programs = [program_of(plan, [x]) for x in views]
    assert programs[0] is programs[16] and len({id(p) for p in programs}) == 16
    assert program_of(plan, [torch.ones(shape)]) is not programs[0]
    pairs = [program_of(plan, [views[0], x]) for x in views]
    assert pairs[0] is pairs[16] and len({id(p) for p in pairs}) == 16


def test_memory_that_the_engine_cannot_read_is_staged(monkeypatch):
    """Pinned, moved as on the host, and brought back to its device; host memory stays where it is."""
    fake_device.install(monkeypatch)
    monkeypatch.setattr(exchange.LocalTransport, "device_types", ("cpu",))
    plan, L = halo()
    xs = [torch.rand(L.local_shape(r)) for r in range(4)]
    wanted = plan.simulate(xs)
    assert not notes and all(type(y) is fake_device.Host for y in wanted)
    got = plan.simulate([on_device(x) for x in xs])
    assert notes == ["pinned"] * 4 and all(type(y) is Elsewhere and torch.equal(y, w) for y, w in zip(got, wanted))
    monkeypatch.setattr(exchange.LocalTransport, "device_types", ("cpu", "cuda"))
    assert all(torch.equal(y, w) for y, w in zip(plan.simulate([on_device(x) for x in xs]), wanted)) and len(notes) == 4
    monkeypatch.setattr(exchange.LocalTransport, "device_types", ("cuda",))
    assert all(torch.equal(y, w) for y, w in zip(plan.simulate(xs), wanted)), "a fake engine reads host memory"


def test_split_phase_runs_on_a_side_stream(monkeypatch):
    """It waits for what came before, and whoever takes the result waits for it; memory is kept until both streams are
    done."""
    fake_device.install(monkeypatch)
    plan, L = halo()
    x, transport = on_device(torch.rand(L.local_shape(0))), NullTransport(0, 4)
    pending = exchange.begin((plan, plan), [x, x], transport)
    assert type(pending) is exchange.Aside
    side = pending.beside.stream
    assert notes == [("side", "waits for", "current"), ("enter", side), ("side", "was here"), ("leave", side)]
    notes.clear()
    with pending.joining():
        ys = pending.finish()
    assert notes == [("enter", side), ("leave", side), ("current", "waits until was here", "side")] and len(ys) == 2
    notes.clear()
    with fake_device.Cuda.stream(
        side
    ):  # as autograd runs the adjoint: memory of the side stream may have been in use on others
        world = SimpleNamespace(rank=0, size=1, cuda="nccl")
        dd.World._for_cuda(world, ys[0].device, (0,))
    assert notes == [("enter", side), ("side", "waits for", "current"), ("leave", side)]
    notes.clear()
    dd.World._for_cuda(world, x.device, (0,))
    assert not notes, "elsewhere nothing waits"
    pending, other = exchange.begin((plan,), [x], transport), fake_device.Stream("other")
    notes.clear()
    with fake_device.Cuda.stream(other), pending.joining():  # waited for on another stream than it was started from
        pending.finish()
    assert notes[3:] == [
        ("other", "waits until was here", "side"),
        ("recorded", side),
        ("recorded", other),
        ("leave", other),
    ]
    notes.clear()
    exchange.begin((plan,), [x], transport)
    assert notes[-1] == ("recorded", side), "what nobody waited for is kept until the side stream is done"
    assert exchange.begin((plan,), [x], transport).beside.stream is side, "one for each device"
    monkeypatch.setattr(exchange.LocalTransport, "device_types", ("cpu", "cuda"))
    assert type(exchange.begin((plan,), [x], transport)) is exchange.Exchange, (
        "where the engine itself waits on the host"
    )
    monkeypatch.setattr(exchange.LocalTransport, "device_types", ("cuda",))
    assert type(exchange.begin((plan,), [torch.rand(L.local_shape(0))], transport)) is exchange.Exchange


def test_a_bucket_of_several_streams(monkeypatch):
    """Gradients come on the streams on which their parameters were used; what is beside waits for all of these."""
    fake_device.install(monkeypatch)
    with fake_device.Cuda.stream(fake_device.Stream("other")):
        side_stream.attend(fake_device.CUDA)
    notes.clear()
    with side_stream.Beside(fake_device.CUDA):
        assert {("side", "waits for", "other"), ("side", "waits for", "current")} <= set(notes)
    side_stream._sides.clear()
    side_stream.attend(torch.device("cpu"))
    assert not side_stream._sides


def test_nothing_else_is_copied_first(monkeypatch):
    """On a device what stays is no move of host memory, and scratch memory comes from torch's pool, for each call
    anew."""
    fake_device.install(monkeypatch)
    gather = dd.maps.all_gather(dd.Layout(dd.Partition((4,)), (8,))).plan
    assert (
        program_of(gather, [torch.ones(2)]).kept_moves and not program_of(gather, [on_device(torch.ones(2))]).kept_moves
    )
    plan, L = halo()
    x = on_device(torch.rand(L.local_shape(0)))
    pool = programs.scratch
    kept = pool.kept
    first, second = (exchange.Exchange((plan,), [x], NullTransport(0, 4)) for _ in range(2))
    assert type(first.staging[0]) is Elsewhere and first.staging[0].numel() == first.program.staging
    assert first.staging[0].data_ptr() != second.staging[0].data_ptr()
    first.finish(), second.finish()
    assert not first.program.spare and pool.kept == kept
