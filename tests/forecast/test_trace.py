"""Traces in one process: what they say, what they leave alone, what they refuse."""

import gc
import json
import resource
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from one_process import every_rank, returned
from torch._subclasses.fake_tensor import FakeTensor

import distdl as dd
import distdl.functional as F
from distdl.engine import transport as traffic
from distdl.errors import AgreementError, DistdlError, PartitionError
from distdl.forecast.tracer import Nowhere
from distdl.programs.bench import programs
from distdl.world import _worlds

ROWS = dd.Layout(dd.Partition((4, 1)), (10, 6))
COLUMNS = dd.Layout(dd.Partition((1, 4)), (10, 6))


def step(x, w):
    y = F.repartition(x * w, ROWS, COLUMNS)  # forward
    return F.dist_sum(y**2, COLUMNS)


def line_of(word, function=step):
    lines = Path(function.__code__.co_filename).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(word))


def test_a_program_is_a_line_for_each_movement():
    program = dd.trace(step, ROWS, torch.ones(6, requires_grad=True), backward=True)
    assert program.size == 4 and program.ranks == (0,)
    forward, total, back, last = program.movements
    assert [m.op for m in program.movements] == ["repartition", "invariant_sum", "invariant_sum.T", "repartition.T"]
    assert (forward.phase, last.phase, forward.forward_line) == ("forward", "backward", "")
    assert forward.layouts == "(10/4, 6) -> (10, 6/4)" and last.layouts == "(10, 6/4) -> (10/4, 6)"
    assert forward.shapes == ((3, 6),) and forward.results == ((10, 2),) and forward.dtypes == ("float32",)
    assert forward.sent == (("send", 1, 24), ("send", 2, 12), ("send", 3, 12)) and forward.peers == (1, 2, 3)
    assert forward.received == ((1, 24), (2, 16), (3, 16))
    assert total.sent == (("all_reduce", (0, 1, 2, 3), 4),) and not back.sent
    where = f"{__file__}:{line_of('# forward')} in step"
    assert forward.line == where and last.forward_line == where
    assert program.messages == [s for m in program.movements for s in m.sent]
    head, first, *_, end = str(program).splitlines()
    assert head.startswith("rank 0 of 4: 4 movements, 6 messages, 1 collectives,")
    for part in (
        "forward  repartition",
        "[3, 6] -> [10, 2]",
        "3 msg, 48 B -> 1,2,3",
        f"test_trace.py:{line_of('# forward')}",
    ):
        assert part in first
    assert f"forward test_trace.py:{line_of('# forward')}" in end


def test_totals_and_flops_are_torchs():
    def f(x):
        return F.all_sum_reduce((x @ x.T).relu(), ROWS.partition)

    totals = dd.trace(f, torch.ones(4, 8), size=4).totals[0]
    assert (totals.movements, totals.collectives, totals.bytes, totals.flops) == (1, 1, 64, 2 * 4 * 4 * 8)
    assert totals.operators == 2 and totals.touched == 4 * (2 * 32 + 16 + 2 * 16)


def counted(program, n):
    """What every rank of a program in one process sends, by the library's own counter."""

    def run():
        with dd.testing.count_messages() as sent:
            program()
        return list(sent)

    return returned(every_rank(n, run, rounds=12))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rank_sends_what_its_trace_says(n):
    P = dd.Partition((n, 1))

    def program():
        programs.stencil(P, (9, 7), steps=2)()
        programs.repartition(P, (9, 7))()
        programs.mlp(dd.Partition((1, n)), 5, 6, 7)()

    real = counted(program, n)
    traced = dd.trace(program, size=n, rank=range(n))
    assert [traced.of(r).messages for r in range(n)] == real and any(real)


def test_one_rank_of_each_class():
    L = dd.Layout(dd.Partition((4, 5)), (40, 50))
    spec = dd.HaloSpec(L, 1)
    program = dd.trace(lambda x: F.halo_exchange(x, spec), L, rank="classes")
    assert program.size == 20 and len(program.ranks) == 9 and program.ranks[0] == 0
    assert sorted({len(program.of(r).messages) for r in program.ranks}) == [3, 5, 8]
    every = dd.trace(lambda x: F.halo_exchange(x, spec), L, rank=range(20))
    seen = {tuple(n for *_, n in program.of(r).messages) for r in program.ranks}
    assert {tuple(n for *_, n in every.of(r).messages) for r in range(20)} == seen
    uneven = dd.Layout(dd.Partition((4,)), (10,))  # 3, 3, 2, 2
    assert dd.trace(lambda x: F.shift(x, uneven, 0), uneven, rank="classes").ranks == (0, 1, 2, 3)


def test_nothing_is_changed():
    w = torch.nn.Parameter(torch.ones(6))
    w.grad = torch.full((6,), 3.0)
    kept, state, worlds = w.grad, torch.get_rng_state(), dict(_worlds)
    L = dd.Layout(dd.Partition((1, 1, 4)), (1, 2, 12))

    def f(x):
        y = F.dist_interpolate(torch.randn(2, 12)[None, :, L.slices()[2]] * w[0], L, size=7, mode="linear")
        F.dist_sum(y, F.interpolate_layout(L, 7)).backward()  # a program's own backward
        w.data.add_(1)

    program = dd.trace(f, L)
    assert {m.phase for m in program.movements} == {"forward", "backward"}
    assert w.grad is kept and torch.equal(kept, torch.full((6,), 3.0)) and torch.equal(w, torch.ones(6))
    assert torch.equal(torch.get_rng_state(), state) and _worlds == worlds
    assert (traffic.log, traffic.observer, traffic.tracer) == (None, None, None)
    with pytest.raises(ZeroDivisionError):
        dd.trace(lambda x: 1 / 0, L)
    assert _worlds == worlds and traffic.tracer is None
    del program
    gc.collect()
    assert not [t for t in gc.get_objects() if type(t) is FakeTensor], "a table without numbers is kept"


def test_maps_are_of_the_traced_rank():
    A = dd.maps.repartition(ROWS, COLUMNS)
    found = dd.trace(A, ROWS, rank=range(4))
    assert [found.of(r).movements[0].shapes for r in range(4)] == [(ROWS.local_shape(r),) for r in range(4)]
    again = dd.trace(A.T @ A, ROWS, rank=3)
    assert [m.results[0] for m in again.movements] == [(10, 1), (2, 6)]


def test_a_module_of_the_meta_device():
    L = dd.Layout(dd.Partition((1, 1, 2, 1)), (1, 2, 8, 8))
    layer = torch.nn.Linear(8, 8, device="meta")
    program = dd.trace(lambda m, x: F.halo_exchange(m(x), dd.HaloSpec(L, (0, 0, 1, 0))), layer, L, backward=True)
    assert [m.op for m in program.movements] == ["halo_exchange", "halo_exchange.T"]
    assert layer.weight.is_meta and layer.weight.grad is None
    assert program.totals[0].flops == 2 * 2 * 2 * 4 * 8 * 8  # forward, and the weight's gradient


def test_gradients_of_blocks_where_nothing_else_asks():
    program = dd.trace(lambda x: F.repartition(x, ROWS, COLUMNS), (ROWS, torch.float64), backward=True)
    assert [m.phase for m in program.movements] == ["forward", "backward"] and program.movements[0].dtypes == (
        "float64",
    )
    integers = dd.trace(lambda x: F.repartition(x, ROWS, COLUMNS), (ROWS, torch.int64), backward=True)
    assert [m.phase for m in integers.movements] == ["forward"]
    nested = dd.trace(lambda d: F.repartition(d["x"][0], ROWS, COLUMNS), {"x": [ROWS, 1]})
    assert len(nested.movements) == 1


def test_what_prepares_a_program_does_not_count():
    def prepared(x):
        y = F.repartition(x, ROWS, COLUMNS)
        return lambda: F.repartition(y, COLUMNS, ROWS)

    assert [m.layouts for m in dd.trace(prepared, ROWS).movements] == ["(10, 6/4) -> (10/4, 6)"]


def test_sizes_of_worlds():
    P = dd.Partition((2,), ranks=(3, 6))
    assert dd.trace(lambda x: F.shift(x, P, 0), torch.ones(2)).size == 7  # in what f refers to
    assert dd.trace(lambda x, Q: F.shift(x, Q, 0), torch.ones(2), P).size == 7
    assert dd.trace(lambda x: x + dd.world().size, torch.ones(2), size=5).size == 5
    outside = dd.trace(lambda x: F.shift(x, P, 0), torch.ones(2), rank=1)
    assert not outside.messages


BARE, BESIDE = dd.Partition((4, 1)), dd.Partition((1, 4))
REFUSED = {
    "a bare partition": (lambda: dd.trace(lambda x: F.repartition(x, BARE, BESIDE), ROWS), "repartition", "a Layout"),
    "a number": (lambda: dd.trace(lambda x: x * float(x.sum()), ROWS), "numbers in tensors decide", "test_trace.py"),
    "places": (lambda: dd.trace(lambda x: x.nonzero(), ROWS), "numbers in tensors decide", "test_trace.py"),
    "a rank beyond": (lambda: dd.trace(step, ROWS, 1, rank=4), "no rank of the world", "0 .. 3"),
    "no class": (lambda: dd.trace(step, ROWS, 1, rank="corners"), "no rank of the world", "classes"),
    "no ranks": (lambda: dd.trace(step, ROWS, 1, rank=()), "no rank of the world"),
    "no world": (lambda: dd.trace(step, ROWS, 1, size=0), "no size of a world"),
    "a small world": (lambda: dd.trace(step, ROWS, 1, size=2), "the world has 2 ranks"),
    "another rank": (lambda: dd.trace(step, ROWS, 1, rank=(0, 1)).of(2), "not traced", "0,1"),
    "no machine": (lambda: dd.trace(step, ROWS, 1).cost("fast"), "not a machine", "str"),
    "a file": (lambda: dd.trace(step, ROWS, 1).save("it.txt"), "kind of file", ".html"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, *words = REFUSED[name]
    with pytest.raises(AgreementError if name == "a bare partition" else DistdlError) as caught:
        call()
    assert all(word in str(caught.value) for word in words) and caught.value.next_step, caught.value


def test_other_worlds_are_refused():
    P = dd.Partition((1,), world="of a trace")
    dd.World(transport=Nowhere(0, 1, None), name="of a trace")
    try:
        with pytest.raises(PartitionError, match="the ranks of one world"):
            dd.trace(lambda x: F.roll(x, dd.Layout(P, (4,)), 0, 1), torch.ones(4))
    finally:
        _worlds.pop("of a trace")


def test_sums_are_those_of_mpi():
    mpi = pytest.importorskip("distdl.engine.mpi").MpiTransport
    assert Nowhere.sums == mpi.sums and Nowhere.collectives == mpi.collectives and Nowhere.wide == mpi.wide


class _Read(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.classes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.classes += dict(attrs).get("class", "").split()
        assert not {"src", "href", "onload", "onclick"} & dict(attrs).keys()


def test_files(tmp_path):
    program = dd.trace(step, ROWS, torch.ones(6, requires_grad=True), rank=range(4), backward=True)
    program.save(tmp_path / "it.json")
    told = json.loads((tmp_path / "it.json").read_text())
    assert told["size"] == 4 and list(told["ranks"]) == ["0", "1", "2", "3"]
    for r in range(4):
        rank = told["ranks"][str(r)]
        assert rank["totals"] == program.totals[r]._asdict()
        assert [tuple(m["sent"][0][:2]) for m in rank["movements"] if m["op"] == "repartition"] == [
            ("send", int(r == 0))
        ]
    program.save(tmp_path / "it.html", dd.machines.ethernet)
    text, page = (tmp_path / "it.html").read_text(), _Read()
    page.feed(text)
    assert "script" not in page.tags and "http" not in text
    assert page.classes.count("arrow") == sum(t.messages for t in program.totals.values()) == 24
    assert page.classes.count("sum") == 1 and "out" not in page.classes and page.classes.count("lane") == 4
    one = dd.trace(step, ROWS, torch.ones(6))
    one.save(tmp_path / "one.html")
    page = _Read()
    page.feed((tmp_path / "one.html").read_text())
    assert page.classes.count("out") == 3  # to ranks that are not in the picture


def test_sixteen_thousand_ranks():
    """One rank of a U-Net's step: seconds, and no memory to speak of."""
    P = dd.Partition((1, 1, 32, 32, 16))
    small = dd.trace(lambda: programs.unet(dd.Partition((1, 1, 2, 2, 2)), (1, 1, 64, 64, 64), 16, 3))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    program = dd.trace(lambda: programs.unet(P, (1, 1, 1024, 1024, 512), 16, 3), rank=8456)
    took, grown = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert program.size == 2**14 and len(program.movements) == len(small.movements)
    assert program.totals[8456].messages == 26 * sum(m.op.startswith("halo") for m in program.movements)
    assert took < 8 and grown < 2**19  # 2 s, and 0.1 GiB, on a quiet machine; KiB
