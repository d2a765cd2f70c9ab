"""The NCCL engine on a fake of its library: how communicators come and go, and what happens where NCCL cannot be
used."""

import sys
import types

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.engine import nccl
from distdl.engine.nccl import NcclEngines

if type(dd.world().host).__name__ == "TorchTransport":
    pytest.skip("the fake is played by MPI; test_c10d has another", allow_module_level=True)
pytest.importorskip("mpi4py", reason="the fake is played by MPI, which is not installed")
import fake_nccl

pytestmark = [pytest.mark.mpi(2), pytest.mark.usefixtures("only_here")]


@pytest.fixture
def engines(monkeypatch):
    """All movements by the engine, for one test."""
    made = fake_nccl.engines(dd.world())
    monkeypatch.setattr(
        dd.World, "transport", lambda self, x, ranks: made.get(ranks) if self.rank in ranks else self.host
    )
    yield made
    made.close()


def test_communicators_are_made_by_their_members_only(engines):
    r, n = dd.world().rank, dd.world().size
    pair = dd.Partition((2,), ranks=(1, 0))
    if r in pair.ranks:  # nobody else takes part, or need know
        y = F.repartition(torch.full((r + 1,), float(r)), dd.Layout(pair, (3,)), dd.Layout(pair, (3,), ((0, 3),)))
        assert r == 1 or y.tolist() == [1.0, 1.0, 0.0]
    assert list(engines.engines) == ([(0, 1)] if r < 2 else [])
    F.shift(torch.ones(2), dd.Partition((n,)), 0)
    if r < 2:
        F.repartition(torch.ones(r + 1), dd.Layout(pair, (3,)), dd.Layout(pair, (3,), ((0, 3),)))
    made = ([(0, 1)] if r < 2 else []) + ([tuple(range(n))] if n > 2 else [])
    assert list(engines.engines) == made and len(fake_nccl.living) == len(made)
    engines.close()
    assert not fake_nccl.living


def test_collectives_use_the_order_of_the_blocks(engines):
    P = dd.Partition((2,), ranks=(1, 0))
    r = dd.world().rank
    if r in P.ranks:
        with dd.testing.count_messages() as sent:
            y = F.all_gather(torch.full((1,), float(r)), P, shape=(2,))
            z = F.reduce_scatter(torch.tensor([[1.0, 2.0], [10.0, 20.0]])[r], P)
        assert y.tolist() == [1.0, 0.0] and z.tolist() == [22.0 if r == 0 else 11.0]
        assert (1, 0) in engines.engines and [k for k, _, _ in sent if k != "agree"] == [
            "all_gather",
            "reduce_scatter",
        ], sent


def test_uneven_blocks_go_as_messages(engines):
    n, r = dd.world().size, dd.world().rank
    L = dd.Layout(dd.Partition((n,)), (n + 1,))
    assert torch.equal(F.all_gather(L.shard(torch.arange(n + 1.0)).clone(), L), torch.arange(n + 1.0))
    assert list(engines.engines) == [tuple(range(n))], r


@pytest.mark.mpi(4)
def test_case_22_broadcasts_of_overlapping_groups(engines):
    small, big = dd.Partition((1, 2), ranks=(1, 2)), dd.Partition((2, 2))
    r = dd.world().rank
    y = F.broadcast(torch.full((2,), float(r)), small, big, shape=(2,))
    dd.testing.collective_assert(r > 3 or y.tolist() == [1.0 + r % 2] * 2, f"got {y}")


def test_wait_and_start(engines):
    A = dd.maps.shift(dd.Partition((dd.world().size,)), 0, 1, True, (2,))
    assert (
        F.wait(F.start(A, torch.full((2,), float(dd.world().rank)))).tolist()
        == [(dd.world().rank - 1) % dd.world().size] * 2
    )


def test_two_ranks_on_one_device():
    engines = NcclEngines(dd.world(), fake_nccl.Host(name="the same"), fake_nccl)
    with pytest.raises(dd.errors.TransportError, match=r"ranks 0 and 1 use the same device(.|\n)*staged"):
        engines.get(tuple(range(dd.world().size)))


def test_made_inside_a_capture():
    engines = fake_nccl.engines(dd.world(), captures=True)
    with pytest.raises(dd.errors.TransportError, match="while a CUDA graph is captured"):
        engines.get(tuple(range(dd.world().size)))


def test_one_rank_without_the_library():
    """All ranks stage then, and the first one says so."""
    last = dd.world().rank == dd.world().size - 1
    engines = NcclEngines(dd.world(), fake_nccl.Host(), None if last else fake_nccl, "no CuPy here" if last else "")
    ranks = tuple(range(dd.world().size))
    if dd.world().rank == 0:
        with pytest.warns(RuntimeWarning, match=f"rank {ranks[-1]}: no CuPy here"):
            assert engines.get(ranks) is None
    else:
        assert engines.get(ranks) is None


def test_two_libraries_in_one_process(monkeypatch):
    """CuPy's NCCL beside another one of torch's, on one rank: an error on every rank, which says whose it is."""
    cupy, n = types.ModuleType("cupy"), dd.world().size
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.nccl = fake_nccl  # version 1
    for name, module in (("cupy", cupy), ("cupy.cuda", cupy.cuda), ("cupy.cuda.nccl", fake_nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(nccl, "Cuda", lambda index: fake_nccl.Host(index))
    clashing = nccl.engines_on(dd.world(), 0)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (0, 0, 1))
    assert nccl.load() is fake_nccl
    engines = clashing if dd.world().rank == 0 else nccl.engines_on(dd.world(), 0)
    told = r"rank 0:.*different NCCL libraries(.|\n)*22809 \(torch's\)(.|\n)*1 \(CuPy's\)"
    with pytest.raises(dd.errors.TransportError, match=told):
        engines.get(tuple(range(n)))


def test_ranks_whose_tensors_live_elsewhere():
    """One rank's tensor is on another kind of device: an error on every rank, before anything is sent."""
    n = dd.world().size
    x = torch.ones(1, 2, device="meta" if dd.world().rank == n - 1 else "cpu")
    with pytest.raises(dd.errors.AgreementError, match=rf"device kind.*rank {n - 1}"):
        F.repartition(x, dd.Partition((n, 1)), dd.Partition((1, n)))


def test_a_graph_keeps_its_communicators(engines):
    F.shift(torch.ones(2), dd.Partition((dd.world().size,)), 0)
    engines.device.captures = True
    F.shift(torch.ones(2), dd.Partition((dd.world().size,)), 0)
    engines.device.captures = False
    before = list(fake_nccl.living)
    engines.close()
    assert fake_nccl.living == before
    for comm in before:
        comm.destroy()


def test_native_sums_of_halves(engines, monkeypatch):
    """Where the user asks for them: big + 1 + 1 then loses both ones."""
    n, r = dd.world().size, dd.world().rank
    x = torch.tensor([256.0 if r == 0 else 1.0] * n, dtype=torch.bfloat16)
    P = dd.Partition((n,))
    for wide, wanted in ((True, torch.tensor(255.0 + n).bfloat16().item()), (False, 256.0)):
        monkeypatch.setattr(dd.world(), "wide", wide)
        engines.close()
        dd.maps.all_sum_reduce.cache_clear()  # programs remember how they sum
        dd.maps.transposed.cache_clear()
        for call in (F.all_sum_reduce, F.reduce_scatter):
            y = call(x, P)
            dd.testing.collective_assert(y[0].item() == wanted or n == 2, f"{call.__name__}: {y}, expected {wanted}")


def test_an_mpi_that_cannot_read_devices_is_refused():
    """It would take a device's addresses for its own."""
    host = dd.world().host
    from distdl.engine import mpi

    if mpi._reads_devices() is False:
        with pytest.raises(dd.errors.TransportError, match="cannot read CUDA memory"):
            host.on_device()
    else:
        assert set(host.on_device().device_types) == {"cpu", "cuda"}
