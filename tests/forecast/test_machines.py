"""What movements and operators cost on machines whose numbers are easy, and which partitions are then the cheapest."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError
from distdl.forecast.program import Movement, Work
from distdl.forecast.suggest import grids
from distdl.programs import measure
from distdl.programs.bench import programs

# Nothing takes time but messages: 1 s each, and 1 s for each of their bytes; 10 times as long between nodes of 2.
NONE = dict(call=0, graph=0, operator=0, box=0, flops=1e30, memory=1e30)
SLOW = dd.machines.Machine("slow", 10, 0.1, 1, 1.0, 2, 1e30, **NONE)


def moved(*sent, received=(), **others):
    said = dict(shapes=(), results=(), dtypes=(), copied=0, recorded=False, phase="forward", line="") | others
    return Movement("it", "", sent=sent, received=received, **said)


def test_messages():
    near, far = ("send", 1, 3), ("send", 2, 5)
    assert SLOW.seconds(moved(near), 0) == 1 + 3
    assert SLOW.seconds(moved(far), 0) == 10 + 50
    assert SLOW.seconds(moved(near, far), 0) == 4 + 60
    assert SLOW.seconds(moved(near, received=((1, 7),)), 0) == 1 + 7  # both ways at once
    assert SLOW.seconds(moved(received=((1, 2), (1, 2))), 0) == 2 + 4
    shared = replace(SLOW, injection=0.02)  # two ranks share it
    assert shared.seconds(moved(far), 0) == 10 + 500 and shared.seconds(moved(near), 0) == 4
    python = replace(SLOW, call=100, graph=1000)
    assert python.seconds(moved(near), 0) == 104
    assert python.seconds(moved(near, recorded=True), 0) == python.seconds(moved(near, phase="backward"), 0) == 1104
    assert replace(SLOW, memory=2.0).seconds(moved(near, copied=9), 0) == 4 + 9  # read and written
    assert replace(SLOW, memory=2.0, copying=4.0).seconds(moved(near, copied=8), 0) == 4 + 4
    assert replace(SLOW, box=7.0).seconds(moved(near, boxes=3), 0) == 4 + 21


def test_boxes():
    """How many copies the host makes for a movement: of a roll two; of ghosts around a torus of one rank, whose four
    sides and corners are its own, nine or more; in a row of ranks what stays, and strided ghosts as well."""

    def boxes(step, L, **ranks):
        return dd.trace(step, L, **ranks).movements[0].boxes

    line, square = dd.Layout(dd.Partition((1,)), (8,)), dd.Layout(dd.Partition((1, 1)), (8, 8))
    assert boxes(lambda x: F.roll(x, line, 0, 1), line) == 2
    torus = dd.HaloSpec(square, 1, boundary="circular")
    assert boxes(lambda x: F.halo_exchange(x, torus), square) >= 9
    rows, columns = (dd.Layout(dd.Partition(grid), (8, 8)) for grid in ((4, 1), (1, 4)))
    contiguous = boxes(lambda x: F.halo_exchange(x, dd.HaloSpec(rows, (1, 0))), rows, rank=1)
    strided = boxes(lambda x: F.halo_exchange(x, dd.HaloSpec(columns, (0, 1))), columns, rank=1)
    assert contiguous == 1 < strided


def test_a_constant_for_each_box_is_found():
    """A fit to calls whose times are known gives back what they were made of."""
    call, box = 20e-6, 3e-6
    found = measure._per_box(lambda *_: call + 10 * box, call + 2 * box, 0)
    assert found == (pytest.approx(call), pytest.approx(box))
    assert measure._per_box(lambda *_: call, 2 * call, 0) == (2 * call, 0.0)  # noise: never below zero


def test_collectives():
    pair, four = tuple(range(2)), tuple(range(4))
    assert SLOW.seconds(moved(("all_reduce", pair, 8)), 0) == pytest.approx(1 + 8)  # one round of all of it
    long = replace(SLOW, near_latency=0.0, node=4)
    assert long.seconds(moved(("all_reduce", four, 8)), 0) == pytest.approx(2 * 3 / 4 * 8)
    assert SLOW.seconds(moved(("all_reduce", four, 8)), 0) == pytest.approx(2 * 2 * 10 + 2 * 3 / 4 * 80)
    fitted = replace(long, sum_latency=5.0, sum_bandwidth=2.0)
    assert fitted.seconds(moved(("all_reduce", four, 800)), 0) == pytest.approx(2 * 2 * 5 + 2 * 3 / 4 * 400)
    assert SLOW.seconds(moved(("all_gather", pair, 8)), 0) == 1 + 8
    assert replace(SLOW, call=3).seconds(moved(("agree", pair, 99)), 0) == 3 + 1 + 3


def test_local_work():
    m = dd.machines.Machine(flops=10.0, half_flops=40.0, conv_flops=5.0, memory=2.0, operator=1.0)
    assert m.seconds(Work("mm", 100, 4), 0) == 1 + 10
    assert m.seconds(Work("mm", 100, 4, 8), 0) == 1 + 20
    assert m.seconds(Work("mm", 100, 4, 2), 0) == 1 + 2.5
    assert m.seconds(Work("convolution", 100, 4), 0) == 1 + 20
    assert m.seconds(Work("add", 0, 40), 0) == 1 + 20
    by_size = replace(m, memory=((10, 1.0), (1000, 100.0)))
    assert [by_size.seconds(Work("add", 0, n), 0) for n in (5, 10, 1000, 10**4)] == [6, 11, 11, 101]
    assert by_size.seconds(Work("add", 0, 100), 0) == pytest.approx(1 + 10)


def test_a_program_is_as_slow_as_its_slowest_rank():
    L = dd.Layout(dd.Partition((3,)), (5,))
    program = dd.trace(lambda x: F.halo_exchange(x, dd.HaloSpec(L, 1)), (L, torch.int8), rank=range(3))
    one_node = replace(SLOW, node=3)
    assert [program.of(r).cost(one_node) for r in range(3)] == [2, 4, 2] and program.cost(one_node) == 4
    assert program.cost() == program.cost(dd.machines.cluster) > 0


@pytest.mark.parametrize(
    "wrong",
    [dict(latency=-1.0), dict(bandwidth=0), dict(flops="many"), dict(memory=None), dict(node=0), dict(memory=()),
     dict(memory=((2, 1.0), (1, 1.0))), dict(memory=((1, 0.0),)), dict(flops=((1, 1.0),))],
)  # fmt: skip
def test_no_such_machine(wrong):
    with pytest.raises(PartitionError, match="no such machine") as caught:
        dd.machines.Machine(**wrong)
    assert next(iter(wrong)) in str(caught.value) and caught.value.next_step


def test_files_of_machines(tmp_path):
    made = replace(dd.machines.gpus, memory=((1.0, 2.0), (3.0, 4.0)))
    made.save(tmp_path / "it.json")
    assert dd.machines.load(tmp_path / "it.json") == made
    (tmp_path / "no.json").write_text('{"speed": 3}')
    with pytest.raises(PartitionError, match=r"no machine in this file.*speed"):
        dd.machines.load(tmp_path / "no.json")
    assert {dd.machines.cluster.name, dd.machines.ethernet.name, dd.machines.workstation.name} == {
        "cluster", "ethernet", "workstation"}  # fmt: skip


def test_a_machine_is_fitted(monkeypatch):
    monkeypatch.setattr(measure, "_SIZES", (2**10, 2**12))
    found = measure.fitted(rounds=1)
    assert found.name == "measured on 1 ranks" and len(found.memory) == len(found.copying) == 2
    assert 1e-7 < found.operator < 1e-2 and 1e-6 < found.call < 1e-1 and found.flops > 1e7 and found.conv_flops > 1e7
    assert found.box < 1e-3


# ---------------------------------------------------------------- which partition


def test_grids():
    assert grids(4, 2) == [(1, 4), (2, 2), (4, 1)] and grids(1, 0) == [()] and grids(2, 0) == []
    assert len(grids(2**14, 3)) == 120


def test_thin_and_square_domains():
    shapes = [(4, 1), (2, 2), (1, 4)]
    bytes_only = replace(SLOW, near_latency=0.0, node=4)

    def best(shape, machine):
        return dd.suggest(lambda P: programs.stencil(P, shape, 1), shapes, machine=machine)[0].partition.shape

    assert best((64, 1024), bytes_only) == (1, 4) and best((1024, 64), bytes_only) == (4, 1)
    wide = dd.suggest(lambda P: programs.stencil(P, (64, 64), 1), 16, machine=replace(bytes_only, node=16))
    assert wide[0].partition.shape == (4, 4)
    ranked = dd.suggest(lambda P: programs.stencil(P, (64, 1024), 1), 4, machine=bytes_only)
    assert [s.partition.shape for s in ranked] == [(1, 4), (2, 2), (4, 1)]
    assert [s.seconds for s in ranked] == sorted(s.seconds for s in ranked) and "ms on (1, 4)" in repr(ranked[0])
    # 8 neighbours, or 2: where only messages count
    messages_only = replace(SLOW, near_bandwidth=1e30, node=16)
    found = dd.suggest(lambda P: programs.halo(P, (64, 64)), 16, machine=messages_only)
    assert found[0].partition.shape in ((1, 16), (16, 1)) and found[0].seconds == 2 and found[-1].seconds == 8


def test_an_mlp():
    """Sums of activations, or of gradients: as tokens, or weights, are more."""
    bytes_only = replace(SLOW, near_latency=0.0, node=4)

    def best(tokens):
        return dd.suggest(lambda P: programs.mlp(P, tokens, 32, 64), 4, machine=bytes_only)[0].partition.shape

    assert best(4096) == (4, 1) and best(4) == (1, 4)


SHAPE = (8, 12)


def along(dim):
    """A layer of a whole dim: it moves there, and back."""

    def layer(x, L):
        grid = tuple(1 if d == dim else L.partition.size for d in range(2))
        M = dd.Layout(dd.Partition(grid), L.shape)
        return F.repartition(x, L, M).cumsum(dim), M

    return layer


def test_a_chain_is_the_cheapest_of_all():
    layers = [
        lambda x, L: (F.halo_exchange(x, dd.HaloSpec(L, (1, 0)))[: len(x)], L),
        along(0),
        lambda x, L: (2 * x, L),
        along(1),
    ]
    machine = replace(SLOW, node=4)
    shapes = [(4, 1), (2, 2), (1, 4)]
    found = dd.suggest_chain(layers, SHAPE, shapes, machine=machine)

    def total(partitions):
        def run(x):
            L = dd.Layout(partitions[0], SHAPE)
            for P, layer in zip(partitions, layers):
                M = dd.Layout(P, SHAPE)
                x, L = layer(F.repartition(x, L, M), M)
            return x

        programs = [dd.trace(run, dd.Layout(partitions[0], SHAPE), size=4, rank=r) for r in range(4)]
        return max(p.cost(machine) for p in programs)

    every = [total([dd.Partition(s) for s in some]) for some in product(shapes, repeat=len(layers))]
    assert found.seconds == pytest.approx(total(found.partitions)) == pytest.approx(min(every))
    assert len(found.partitions) == 4 and found.seconds == pytest.approx(sum(p.cost(machine) for p in found.programs))
    fixed = dd.suggest_chain(layers, SHAPE, shapes, machine=machine, first=dd.Partition((1, 4)))
    assert fixed.seconds >= found.seconds


def test_nothing_to_choose_from():
    for call in (
        lambda: dd.suggest(programs.halo, []),
        lambda: dd.suggest(programs.halo, 1.5),
        lambda: dd.suggest_chain([], SHAPE, 4),
        lambda: dd.suggest_chain([lambda x, L: x], SHAPE, 4),
    ):
        with pytest.raises(PartitionError) as caught:
            call()
        assert caught.value.next_step
