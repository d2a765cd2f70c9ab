"""Selections and Indexes of all ranks in one process."""

import pickle

import pytest
import torch

import distdl as dd
from distdl.index import Selection

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_both_ways_to_add(dtype, dim):
    """What CUDA does, where index_add has no fixed order, and what others do; nobody wants rows 1 and 4."""
    rows = torch.tensor([2, 0, 2, 2, 3, 2, 0, 2])
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(-9, 10, (8, 8, 3), generator=draw).to(dtype) * (1 if not dtype.is_complex else 1 + 2j)
    S = Selection(rows, 5)
    dense = torch.nn.functional.one_hot(rows, 5).T.to(torch.complex128)
    expected = torch.einsum("ik,kjl->ijl" if dim == 0 else "ik,jkl->jil", dense, y.to(torch.complex128))
    for found in (S.add(y, dim), S._add_in_order(y.to(torch.float32) if dtype == torch.bfloat16 else y, dim)):
        assert torch.equal(found.to(torch.complex128), expected)
    assert torch.equal(S._add_in_order(y.conj(), dim).to(torch.complex128), expected.conj())


def test_no_rows():
    S = Selection(torch.zeros(0, dtype=torch.int64), 3)
    for y in (torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.complex64)):
        assert torch.equal(S.add(y), S._add_in_order(y, 0)) and S.add(y).shape == (3, 2)
    assert Selection(torch.zeros(0, dtype=torch.int64), 0)._add_in_order(torch.zeros(0, 2), 0).shape == (0, 2)


def test_every_dtype_that_torch_can_store():
    S = Selection(torch.tensor([1, 0, 1]), 2)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.int8):
        for shape in ((2,), (2, 2)):
            x = torch.arange(1, 1 + 2 ** len(shape)).reshape(shape).to(torch.float32).to(dtype)
            assert torch.equal(S.take(x).float(), x.float()[[1, 0, 1]]) and S.take(x).dtype == dtype
            back = S.add(S.take(x))
            assert back.dtype == dtype
            if dtype != torch.bool:
                assert torch.equal(back.float()[0], x.float()[0]) and torch.equal(back.float()[1], 2 * x.float()[1])


def known(L, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(L.shape[0], (k,), generator=draw) for k in (7, 0, 30, 5)[: L.partition.size]]


@pytest.mark.parametrize("splits", [None, (0, 5, 0, 6), (11, 0, 0, 0), (3, 1, 3, 4)])
def test_simulated(splits):
    """Values, and what travels: distinct rows, counted here by hand."""
    L = dd.Layout(dd.Partition((4,), (2, 0, 3, 1)), (11,), (splits,))
    wanted = known(L)
    index, X = dd.Index.known(L, wanted), torch.arange(33.0).reshape(11, 3)
    A = dd.maps.gather_rows(index, (3,))
    ys = A.simulate([X[slice(*L.box(r)[0])] for r in L.partition.ranks])
    assert all(torch.equal(y, X[w]) for y, w in zip(ys, wanted, strict=True))
    backs = A.T.simulate(ys)
    total = torch.zeros(11, 3).index_add(0, torch.cat(wanted), torch.cat(ys))
    for r, back in zip(L.partition.ranks, backs, strict=True):
        a, b = L.box(r)[0]
        assert torch.equal(back, total[a:b])
        others = [w.unique() for q, w in zip(L.partition.ranks, wanted) if q != r]
        served = sum(int(((w >= a) & (w < b)).sum()) for w in others)
        assert A.plan.volume(r) == 3 * served
        theirs = index.of(r)
        assert theirs.repeats.n == len(theirs.distinct) == len(theirs.local) + len(theirs.ghosts)


def test_few_runs_however_many_rows():
    L = dd.Layout(dd.Partition((4,)), (100_000,))
    wanted = [torch.randint(100_000, (50_000,), generator=torch.Generator().manual_seed(r)) for r in range(4)]
    A = dd.maps.gather_rows(dd.Index.known(L, wanted))
    assert sum(len(runs) for side in (A.plan.held, A.plan.wanted) for a in side.axes for runs in a.runs) <= 4 * 4 + 4


def test_a_value():
    L = dd.Layout(dd.Partition((1,)), (5,))
    index = dd.Index(L, torch.tensor([4, 4, 0]))
    again = pickle.loads(pickle.dumps(index))
    assert again == index and hash(again) == hash(index) and {index: 1}[again] == 1
    assert index != dd.Index(L, torch.tensor([0, 4, 4])) and index != 3
    assert "3 rows" in repr(index) and index.device.type == "cpu" and index.peers == ()
    assert index.counts == ((2,),) and index.distinct.tolist() == [0, 4] and index.local.tolist() == [0, 4]


def test_wrong_ones():
    L = dd.Layout(dd.Partition((2,)), (5,))
    zeros = torch.zeros(1, dtype=torch.int64)
    for wanted in ([zeros], zeros, 3):
        with pytest.raises(dd.errors.PartitionError, match=r"Index.known: not the rows of every rank.*2 tensors"):
            dd.Index.known(L, wanted)
    with pytest.raises(dd.errors.AgreementError, match=r"rank 1: row 5"):
        dd.Index.known(L, [zeros, zeros + 5])
    with pytest.raises(dd.errors.PartitionError, match=r"Index: the rows need a layout"):
        dd.Index(dd.Partition((1,)), zeros)
