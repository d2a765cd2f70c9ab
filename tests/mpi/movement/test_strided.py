"""Strided memory that MPI packs while it travels: the same values as packing by hand, the same checks, and nothing left
behind."""

import gc
from operator import index

import pytest
import torch
from registry import each_case, integers, needs

import distdl as dd
import distdl.functional as F
from distdl.engine import exchange
from distdl.engine.fast.by_address import strided
from distdl.errors import TransportError
from distdl.plan import Plan, Side

SIZE, RANK = dd.world().size, dd.world().rank
HOST = dd.world().host
pytestmark = [
    pytest.mark.skipif(not hasattr(HOST, "chunk"), reason="a world of one rank without MPI sends nothing"),
    pytest.mark.of_mpi,
]
ROWS, COLUMNS = ((SIZE, 1), (1, SIZE))


def between(shape, a=ROWS, b=COLUMNS):
    A, B = (dd.Layout(dd.Partition(grid), shape) for grid in (a, b))
    return A, B, Plan(Side.of(A), Side.of(B))  # a plan of its own: no program is there yet


def program_of(plan, x):
    (program,) = plan.view(RANK).programs.values()
    return program


def types(program):
    return [n for _, _, _, n in (*program.sends, *program.receives) if type(n) is not int]


@pytest.fixture
def packed(monkeypatch, fresh_programs):
    monkeypatch.setattr(HOST, "takes_types", False)


@each_case()
def test_values_packed_by_hand(case, packed):
    """What every other test of this suite leaves to MPI."""
    X = integers(case.shape)
    y = case.map(case.local(X))
    assert y.numel() == 0 if case.get(X, case.rank) is None else torch.equal(y, case.wanted(X))
    assert not any(types(program) for program in case.map.plan.view(RANK).programs.values())


@needs(2)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
)
def test_nothing_is_staged(dtype):
    """Rows to columns packs on one end, columns to rows unpacks; neither has staging memory, and nothing is rounded."""
    A, B, plan = between((3 * SIZE + 1, 2 * SIZE + 1))
    X = torch.arange(A.shape[0] * A.shape[1]).reshape(A.shape).remainder(251).to(dtype)
    (y,) = exchange.Exchange((plan,), [A.shard(X)], HOST).finish()
    (x,) = exchange.Exchange((plan.T,), [y], HOST).finish()
    assert torch.equal(y, B.shard(X)) and torch.equal(x, A.shard(X))
    for p, side in ((plan, "sends"), (plan.T, "receives")):
        program = program_of(p, x)
        assert program.staging == 0 and not program.packs and not program.late
        assert all(type(n) is not int for _, _, _, n in getattr(program, side))
        view, size = p.view(RANK), dtype.itemsize
        assert sorted(index(n) for *_, n in program.sends) == sorted(m.volume * size for m in view.sends), (
            "bytes, as planned"
        )


@needs(2)
def test_any_strides():
    """Transposed, sliced, conjugate and stride-0 views, and batches in front, are sent as they lie."""
    A, B, plan = between((2 * SIZE + 1, 3 * SIZE))
    X = torch.arange(A.shape[0] * A.shape[1], dtype=torch.float64).reshape(A.shape)
    a, b = A.local_shape()
    mine = A.shard(X)
    apart = torch.zeros(2 * a, 3 * b, dtype=X.dtype)[::2, ::3].copy_(mine)
    for x in (mine.t().contiguous().t(), apart, torch.stack([-mine, mine])[1]):
        assert torch.equal(exchange.Exchange((plan,), [x], HOST).finish()[0], B.shard(X))
    conjugate = torch.complex(mine, mine).conj()
    assert torch.equal(exchange.Exchange((plan,), [conjugate], HOST).finish()[0], B.shard(torch.complex(X, -X)))
    one = torch.full((), RANK + 1.0, dtype=torch.float64)
    owners = torch.repeat_interleave(torch.arange(1.0, SIZE + 1), torch.tensor(A.sizes(0))).double()
    got = exchange.Exchange((plan,), [one.expand(a, b)], HOST).finish()[0]
    assert torch.equal(got, owners[:, None].expand(A.shape[0], B.local_shape()[1]))
    batch = torch.stack([mine, mine * 2, mine * 3])
    assert torch.equal(
        exchange.Exchange((plan,), [batch], HOST).finish()[0], torch.stack([B.shard(X) * k for k in (1, 2, 3)])
    )
    assert all(program.staging == 0 for program in plan.view(RANK).programs.values())


@needs(2)
def test_several_boxes_in_one_message_are_packed():
    """A circular halo over two ranks gets both of its sides from the same peer; parts of a message are aligned on both
    ends, also where only the adjoint adds."""
    L = dd.Layout(dd.Partition((1, SIZE)), (3, 4 * SIZE))
    X = torch.arange(12.0 * SIZE).reshape(3, -1)
    for widths in ((1, 2), (0, 2)):
        plan = dd.HaloSpec(L, (0, widths[0]), (0, widths[1]), boundary="circular").plan()
        (y,) = exchange.Exchange((plan,), [L.shard(X)], HOST).finish()
        columns = [i % (4 * SIZE) for i in range(4 * RANK - widths[0], 4 * RANK + 4 + widths[1])]
        assert torch.equal(y, X[:, columns])
        assert bool(types(program_of(plan, y))) == (SIZE > 2 or widths[0] == 0)
        (x,) = exchange.Exchange((plan.T,), [torch.ones_like(y)], HOST).finish()
        copies = torch.ones(4)
        copies[: widths[1]] += 1
        copies[4 - widths[0] :] += 1
        assert torch.equal(x, copies.expand(3, 4))


@needs(2)
@pytest.mark.parametrize("packing", [{0}, {1}], ids=["rank 0 packs", "rank 1 packs"])
def test_one_end_may_pack(packing, monkeypatch):
    """What travels is the same: each end decides by itself, as strides may differ by rank."""
    monkeypatch.setattr(HOST, "takes_types", RANK not in packing)
    A, B, plan = between((2 * SIZE, 4 * SIZE), (SIZE, 1), (1, SIZE))
    X = torch.arange(8.0 * SIZE * SIZE).reshape(A.shape)
    (y,) = exchange.Exchange((plan,), [A.shard(X)], HOST).finish()
    (x,) = exchange.Exchange((plan.T,), [y], HOST).finish()
    assert torch.equal(y, B.shard(X)) and torch.equal(x, A.shard(X))
    assert bool(types(program_of(plan, x))) == (RANK not in packing)


@needs(2)
def test_large_messages_and_sums_are_packed():
    """Large ones would have to be handed over piece by piece; what is added must not arrive in place."""
    n = 512 * SIZE
    A, B, plan = between((n, 2 * n))
    x = torch.full(A.local_shape(), RANK + 1.0)
    (y,) = exchange.Exchange((plan,), [x], HOST).finish()
    assert program_of(plan, x).staging and not types(program_of(plan, x))
    assert torch.equal(y, torch.arange(1.0, SIZE + 1).repeat_interleave(512)[:, None].expand_as(y))
    L = dd.Layout(dd.Partition((1, SIZE)), (3, 4 * SIZE))
    halo = dd.HaloSpec(L, (0, 1)).plan()
    (y,) = exchange.Exchange((halo.T,), [torch.ones(halo.view(RANK).out_shape)], HOST).finish()
    assert not any(type(n) is not int for *_, n in program_of(halo.T, y).receives) and program_of(halo.T, y).staging
    assert y.sum() == 3 * (4 + (RANK > 0) + (RANK < SIZE - 1))


@needs(2)
@pytest.mark.parametrize("sent", [15, 17], ids=["short", "long"])
def test_lengths_are_checked(sent):
    """A message that is too short or too long for strided memory is an error, never a tail left as it was."""
    if RANK > 1:
        return
    x, y = torch.ones(64), torch.zeros(64)
    if RANK == 0:
        HOST.wait(HOST.post([(1, x.data_ptr(), 4 * sent)], []))
    else:
        message = strided((4, 4), (64, 4), 4)
        assert index(message) == 64 and message.span == 208
        with pytest.raises(TransportError, match=r"another length|MPI failed"):
            HOST.wait(HOST.post([], [(0, y.data_ptr(), message)]))


@needs(2)
def test_dropped_before_it_arrives():
    """A movement that is started and given up leaves the next ones right, and its memory alone until MPI has done with
    it."""
    A, B, plan = between((2 * SIZE, 64 * SIZE))
    for k in range(20):
        exchange.begin((plan,), [torch.full(A.local_shape(), -1.0)], HOST)
        X = torch.arange(128.0 * SIZE * SIZE).reshape(A.shape) + k
        assert torch.equal(exchange.Exchange((plan,), [A.shard(X)], HOST).finish()[0], B.shard(X))


def test_which_messages_are_strided(monkeypatch):
    """Below a limit, and where runs are long, unless this MPI is quick with short ones too, or the message is small."""
    pytest.importorskip("mpi4py", reason="looks at MPI's datatypes, and MPI is not installed")
    from mpi4py import MPI

    quick = MPI.get_vendor()[0] == "Open MPI"
    most = 2**9 if quick else 2**5
    assert index(strided((most, 2**8), (2**11, 4), 4)) == most * 2**10, "runs of 1 KiB"
    assert strided((most, 2**8 + 1), (2**11, 4), 4) is None, "more than 512 KiB, of others 32"
    assert index(strided((2**2, 2**8), (2**11, 4), 4, travels=False)) == 2**12, "a small one within a rank"
    assert (strided((2**2, 2**8 + 1), (2**11, 4), 4, travels=False) is None) == (not quick)
    assert index(strided((1024,), (8,), 4)) == 4096, "small"
    assert (strided((1025,), (8,), 4) is None) == (not quick), "short runs"
    merged = strided((2, 1, 3, 4), (200, 7, 16, 4), 4)
    assert index(merged) == 96 and merged.span == 248, "12 numbers that follow one another are one run"
    monkeypatch.setattr("distdl.engine.mpi._reads_devices", lambda: True)
    from distdl.engine.mpi import OnDevice

    device = OnDevice(HOST)
    assert HOST.takes_types and not device.takes_types, "on a device MPI would copy them one by one"
    within = strided((2**10, 2**8), (2**11, 4), 4, travels=False)
    assert (within and index(within)) == (2**20 if quick else None), "a copy within a rank may be of any size"


def test_types_are_given_back():
    """Each with the program that it belongs to: MPI has no garbage collector."""
    pytest.importorskip("mpi4py", reason="looks at MPI's datatypes, and MPI is not installed")
    from mpi4py import MPI

    _, _, plan = between((SIZE, 1))
    programs = plan.view(RANK).programs
    programs["mine"] = strided((3, 2), (64, 4), 4)
    kind = programs["mine"].kind
    gc.collect()
    assert kind != MPI.DATATYPE_NULL
    programs.clear()
    gc.collect()
    assert kind == MPI.DATATYPE_NULL


@needs(2)
def test_messages_are_counted():
    A, B, _ = between((SIZE, 2 * SIZE))
    with dd.testing.count_messages() as seen:
        F.repartition(torch.ones(A.local_shape()), A, B)
    expected = [("send", r, 8) for r in range(SIZE) if r != RANK]
    assert list(seen) == expected
