"""Pictures: what the text says, that drawings draw, and that the dense matrix is the map's."""

import sys

import pytest
import torch

import distdl as dd
from distdl import viz
from distdl.plan import Plan, Side


def repartition(L, M):
    return Plan(Side.of(L), Side.of(M))


ROWS = dd.Layout(dd.Partition((3, 1)), (4, 2))
COLUMNS = dd.Layout(dd.Partition((1, 2), (1, 2)), (4, 2))


def test_text():
    assert viz.text(dd.Layout(dd.Partition((2, 2)), (3, 3))) == "0 0 1\n0 0 1\n2 2 3"
    assert viz.text(dd.Layout(dd.Partition((3,), (10, 4, 2)), (2,))) == "10  4\nrank 2: empty"
    assert viz.text(dd.Layout(dd.Partition((1, 1)), (0, 2))) == "rank 0: empty"
    assert viz.text(dd.Layout(dd.Partition((1, 1, 2)), (2, 2, 2))).splitlines()[1] == "rank 1: ((0, 2), (0, 2), (1, 2))"
    assert viz.text(dd.Partition((2,))) == "Partition((2,))\n  [0 1]"
    first = "rank 0 -> rank 1: 2\nrank 0 -> rank 2: 2\n"
    rest = "rank 1 keeps 1\nrank 1 -> rank 2: 1\nrank 2 -> rank 1: 1\nrank 2 keeps 1"
    assert viz.text(repartition(ROWS, COLUMNS)) == first + rest


@pytest.mark.parametrize(
    ("boundary", "first", "last"),
    [
        ("none", "[0  1  2] 3", "2 [3  4]"),
        ("zeros", ". [0  1  2] 3", "2 [3  4] ."),
        ("circular", "4 [0  1  2] 3", "2 [3  4] 0"),
        ("reflect", "1 [0  1  2] 3", "2 [3  4] 3"),
        ("replicate", "0 [0  1  2] 3", "2 [3  4] 4"),
    ],
)
def test_halo_text(boundary, first, last):
    rows = viz.text(dd.HaloSpec(dd.Partition((2,)), (5,), 1, boundary=boundary)).splitlines()
    assert [row.split(":")[1].strip() for row in rows] == [first, last]


def test_matrix():
    """A repartition is a permutation matrix, a halo's adjoint its transpose."""
    A = repartition(ROWS, COLUMNS)
    dense = viz.matrix(A)
    assert torch.equal(dense @ dense.T, torch.eye(8, dtype=torch.float64)) and torch.equal(viz.matrix(A.T), dense.T)
    X = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    held = torch.cat([ROWS.shard(X, r).reshape(-1) for r in ROWS.partition.ranks])
    wanted = torch.cat([COLUMNS.shard(X, r).reshape(-1) for r in COLUMNS.partition.ranks])
    assert torch.equal(dense @ held, wanted)
    halo = dd.HaloSpec(dd.Partition((2,)), (4,), 3, boundary="reflect").plan()
    assert torch.equal(viz.matrix(halo.T), viz.matrix(halo).T) and viz.matrix(halo).sum() == 16
    three, two = dd.Partition((3,)), dd.Partition((2,))
    for shape, want in (((1,), [[1.0]]), ((0,), [])):  # empty blocks, and nothing at all
        assert viz.matrix(repartition(dd.Layout(three, shape), dd.Layout(two, shape))).tolist() == want
    one, other = dd.Layout(dd.Partition(()), ()), dd.Layout(dd.Partition((), (1,)), ())
    assert viz.matrix(repartition(one, other)).tolist() == [[1.0]]


THINGS = [dd.Partition((2, 2)), ROWS, dd.Layout(dd.Partition((2,)), (3,)), dd.HaloSpec(COLUMNS, 1, boundary="circular"),
          repartition(ROWS, COLUMNS), dd.Layout(dd.Partition((1, 1, 2)), (1, 1, 3))]  # fmt: skip


@pytest.mark.parametrize("what", THINGS, ids=lambda what: type(what).__name__)
def test_draw(what, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    ax = viz.draw(what, title="who holds what")
    if getattr(what, "ndim", 2) == 3:
        assert ax is None and capsys.readouterr().out.strip() == viz.text(what)  # three dims are told, not drawn
        return
    assert ax.get_title() == "who holds what" and "rank 1" in [t.get_text() for t in ax.texts]
    ax.figure.canvas.draw()
    pyplot.close(ax.figure)


def test_spy():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    ax = viz.spy(repartition(ROWS, COLUMNS))
    assert ax.images[0].get_array().shape == (8, 8) and len(ax.lines) == 2 + 1
    pyplot.close(ax.figure)


def test_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert (
        viz.draw(ROWS) is None and viz.spy(dd.HaloSpec(dd.Partition((1,)), (2,), 1, boundary="circular").plan()) is None
    )
    assert capsys.readouterr().out == "0 0\n0 0\n1 1\n2 2\n. 1\n1 .\n. 1\n1 .\n"


def test_maps_with_local_work_around_their_plans():
    """Rows by their numbers, and halos without corners: the matrix is the whole map's, messages all plans'."""
    L = dd.Layout(dd.Partition((2,)), (5,))
    index = dd.Index.known(L, [torch.tensor([4, 4, 0]), torch.tensor([1])])
    A = dd.maps.gather_rows(index)
    assert viz.matrix(A).tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert torch.equal(viz.matrix(A.T), viz.matrix(A).T)
    assert viz.messages(A) == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    star = dd.maps.halo_exchange(dd.HaloSpec(dd.Layout(dd.Partition((2, 2)), (4, 4)), 1, corners=False))
    assert torch.equal(viz.matrix(star.T), viz.matrix(star).T) and int(viz.matrix(star).sum()) == 4 * 8
    assert {(a, b) for a, b, _ in viz.messages(star) if a != b} == {(a, a ^ k) for a in range(4) for k in (1, 2)}
