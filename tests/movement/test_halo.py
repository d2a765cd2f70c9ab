"""Halo specifications, all ranks in one process, against torch.nn.functional.pad and slicing, and windows against
torch's own."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as tF
from hypothesis import given, settings
from hypothesis import strategies as st

import distdl as dd
from distdl.engine.exchange import simulate
from distdl.errors import PartitionError

MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect", "replicate": "replicate"}


def pad(X, d, lo, hi, boundary):
    """torch's padding of one dim (circular by repetition where torch refuses to go round more than once); of a pair of
    boundaries each side by its own."""
    if isinstance(boundary, tuple):
        below, above = boundary
        return torch.cat([pad(X, d, lo, 0, below), pad(X, d, 0, hi, above).narrow(d, X.shape[d], hi)], d)
    if boundary in ("zeros", "none"):
        return tF.pad(X.movedim(d, -1), (lo, hi)).movedim(-1, d)
    if boundary == "circular" and max(lo, hi) > X.shape[d]:
        times = max(lo, hi) // X.shape[d] + 1
        around = torch.cat([X] * (2 * times + 1), d)
        return around.narrow(d, times * X.shape[d] - lo, X.shape[d] + lo + hi)
    flat = X.movedim(d, -1)
    return (
        tF.pad(flat.reshape(1, -1, flat.shape[-1]), (lo, hi), mode=MODES[boundary])
        .reshape(*flat.shape[:-1], -1)
        .movedim(-1, d)
    )


def blocks(n, p, splits):
    stops = np.cumsum(splits if splits is not None else [len(b) for b in np.array_split(np.arange(n), p)])
    return list(zip([0, *stops[:-1]], stops))


def windows(X, grid, splits, lefts, rights, boundaries):
    """Every rank's window, by padding the whole tensor and slicing."""
    tables = [blocks(n, p, s) for n, p, s in zip(X.shape, grid, splits)]
    for d, boundary in enumerate(boundaries):
        X = pad(X, d, lefts[d], rights[d], boundary)
    for coords in itertools.product(*map(range, grid)):
        y = X
        for d, c in enumerate(coords):
            a, b = (int(v) for v in tables[d][c])
            n = tables[d][-1][1]
            lo, hi = a - lefts[d], b + rights[d]
            below, above = boundaries[d] if isinstance(boundaries[d], tuple) else (boundaries[d],) * 2
            lo = max(lo, 0) if below == "none" else lo
            hi = min(hi, int(n)) if above == "none" else hi
            y = y.narrow(d, lo + lefts[d], hi - lo) if a < b else y.narrow(d, 0, 0)
        yield y


@st.composite
def halos(draw):
    ndim = draw(st.integers(1, 3))
    dims = []
    for _ in range(ndim):
        p, n = draw(st.integers(1, 4 if ndim < 3 else 2)), draw(st.integers(1, 8))
        one = st.sampled_from(["none", "zeros", "reflect", "replicate"])
        boundary = draw(st.one_of(st.just("circular"), one, st.tuples(one, one)))
        widest = n - 1 if "reflect" in boundary else 2 * n + 1 if ndim == 1 else 4
        cuts = draw(st.one_of(st.none(), st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1).map(sorted)))
        splits = None if cuts is None else tuple(int(v) for v in np.diff([0, *cuts, n]))
        dims.append((p, n, boundary, draw(st.integers(0, widest)), draw(st.integers(0, widest)), splits))
    return tuple(zip(*dims))


@settings(max_examples=400, deadline=None)
@given(halos())
def test_windows_against_pad(case):
    grid, shape, boundaries, lefts, rights, splits = case
    X = torch.arange(1.0, np.prod(shape) + 1).reshape(shape)
    L = dd.Layout(dd.Partition(grid), shape, splits)
    spec = dd.HaloSpec(L, lefts, rights, boundary=boundaries)
    got = simulate(spec.plan(), [L.shard(X, r).clone() for r in L.partition.ranks])
    for r, (y, wanted) in enumerate(zip(got, windows(X, grid, splits, lefts, rights, boundaries), strict=True)):
        assert torch.equal(y, wanted), r
        assert tuple(b - a for a, b in spec.window_box(r)) == tuple(wanted.shape)


@st.composite
def kernels(draw):
    p, n = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    k, s, d = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lo, hi = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return p, n, k, s, d, lo, hi


@given(halos())
@settings(max_examples=150, deadline=None)
def test_strips_and_blocks_make_up_the_windows(case):
    """Joined dim by dim, the last first; zeros beyond the edge are left out."""
    grid, shape, boundaries, lefts, rights, splits = case
    L = dd.Layout(dd.Partition(grid), shape, splits)
    spec = dd.HaloSpec(L, lefts, rights, boundary=boundaries)
    X = torch.arange(1.0, 1 + np.prod(shape), dtype=torch.float64).reshape(shape)
    held = [L.shard(X, r) for r in range(L.partition.size)]
    strips = {d: simulate(plan, held) for d, plan in spec.strips().items()}
    for r, window in enumerate(simulate(spec.plan(), held)):
        sides = [spec.sides(d, c) for d, c in enumerate(L.partition.index(r))]
        y = held[r]
        for d, ((_, a, b, _), (start, _)) in enumerate(zip(sides, L.box(r))):
            y = y.narrow(d, a - start if a < b else 0, b - a)
        for d in reversed(list(strips)):
            lo, a, b, hi = sides[d]
            y = torch.cat([strips[d][r].narrow(d, 0, a - lo), y, strips[d][r].narrow(d, a - lo, hi - b)], d)
        box = spec.window_box(r)
        fills = [n for d in reversed(range(len(shape))) for n in (sides[d][0] - box[d][0], box[d][1] - sides[d][3])]
        assert torch.equal(tF.pad(y, fills), window)
        assert (
            0 in y.shape
            or sum(s[r].numel() for s in strips.values()) + np.prod([b - a for _, a, b, _ in sides]) == y.numel()
        )


@settings(max_examples=400, deadline=None)
@given(kernels())
def test_window_against_unfold(case):
    """Each rank's local convolution of its window is its block of the serial one, wherever halos reach (case 26)."""
    p, n, k, s, d, lo, hi = case
    span = d * (k - 1) + 1
    P = dd.Partition((1, 1, p))
    if n + lo + hi < span:
        with pytest.raises(PartitionError):
            dd.HaloSpec.window(P, (1, 2, n), k, s, ((lo, hi),), d)
        return
    spec = dd.HaloSpec.window(P, (1, 2, n), k, s, ((lo, hi),), d)
    X, w = torch.arange(2.0 * n).reshape(1, 2, n) + 1, torch.arange(1.0, 3 * 2 * k + 1).reshape(3, 2, k)
    serial = tF.conv1d(tF.pad(X, (lo, hi)), w, stride=s, dilation=d)
    assert spec.out_layout.shape[2] == serial.shape[2]
    got = simulate(spec.plan(), [dd.Layout(P, X.shape).shard(X, r).clone() for r in range(p)])
    for r, window in enumerate(got):
        out = spec.out_layout.slices(r)[2]
        wanted = serial[:, :, out]
        if wanted.shape[2]:
            assert torch.equal(tF.conv1d(window, w, stride=s, dilation=d), wanted)
        else:
            assert window.numel() == 0, "an empty block wants nothing"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 15), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2), st.integers(1, 2), st.integers(1, 4)
)
def test_ceil_mode(n, k, s, padding, d, p):
    if 2 * padding > k or n + 2 * padding < d * (k - 1) + 1:
        return
    try:
        wanted = tF.max_pool1d(torch.zeros(1, 1, n), k, s, padding, d, ceil_mode=True).shape[2]
    except RuntimeError:
        return
    spec = dd.HaloSpec.window(dd.Partition((1, 1, p)), (1, 1, n), k, s, padding, d, ceil_mode=True)
    assert spec.out_layout.shape[2] == wanted


def test_window_in_two_dims_with_pairs_and_defaults():
    P = dd.Partition((1, 1, 2, 2))
    spec = dd.HaloSpec.window(P, (1, 1, 9, 8), 3, stride=(2, 1), padding=((1, 0), 1))
    assert spec.out_layout.shape == (1, 1, 4, 8) and spec.boundary == ("zeros",) * 4
    assert spec.window_box(0) == ((0, 1), (0, 1), (-1, 4), (-1, 5)) and spec.window_box(3) == (
        (0, 1),
        (0, 1),
        (3, 8),
        (3, 9),
    )
    assert spec.window_box(9) is None and spec.out_box == spec.window_box(0)
    unsplit = dd.Layout(P, (1, 1, 9, 8), (None, None, (2, 7), (1, 7)))
    assert dd.HaloSpec.window(unsplit, None, 3, padding=1).out_layout == unsplit, "splits stay where the size does"


def test_needs():
    """The windows of any operation: here the reversal of a dim."""
    P, n = dd.Partition((3,)), 7
    spec = dd.HaloSpec.needs(P, (n,), (n,), lambda d, a, b: (n - b, n - a))
    X = torch.arange(float(n))
    L = dd.Layout(P, (n,))
    got = simulate(spec.plan(), [L.shard(X, r).clone() for r in range(3)])
    assert torch.equal(torch.cat([y.flip(0) for y in got]), X.flip(0))


def test_windows_of_other_ranks():
    """Boxes are those of the ranks that want them, and there are no strips."""
    rows, columns = dd.Layout(dd.Partition((3, 1)), (7, 4)), dd.Layout(dd.Partition((1, 2), (2, 4)), (5, 6))
    spec = dd.HaloSpec.needs(rows, None, columns, lambda d, a, b: (a, b) if d else (a + 1, b + 3))
    assert (spec.in_layout, spec.out_layout) == (rows, columns) and not spec.beside
    assert [spec.window_box(r) for r in range(5)] == [None, None, ((1, 8), (0, 3)), None, ((1, 8), (3, 6))]
    assert "-> Layout(Partition((1, 2), ranks=(2, 4)), (5, 6))" in repr(spec)
    plan = spec.plan()
    assert [plan.messages(r) for r in range(5)] == [2, 2, 1, 0, 0] and plan.volume(0) == 2 * 3 + 2 * 1
    X = torch.arange(28.0).reshape(7, 4)
    got = simulate(plan, [rows.shard(X, r).clone() for r in range(3)])
    assert torch.equal(torch.cat(got, 1), torch.nn.functional.pad(X[1:], (0, 2, 0, 1)))
    for call in (spec.strips, lambda: spec.sides(0, 0)):
        with pytest.raises(PartitionError, match="no blocks of their own to lie beside"):
            call()
    for other in (dd.Layout(dd.Partition((2,)), (7,)), dd.Layout(dd.Partition((3, 1), world="b"), (7, 4))):
        with pytest.raises(PartitionError, match="does not lie beside the input; expected a layout of 2 dims over"):
            dd.HaloSpec.needs(rows, None, other, lambda d, a, b: (a, b))


@pytest.mark.parametrize(
    "make",
    [
        lambda P: dd.HaloSpec(P, (6,), -1),
        lambda P: dd.HaloSpec(P, (6,), 1, -2),
        lambda P: dd.HaloSpec(P, (6,), 1, boundary="wrap"),
        lambda P: dd.HaloSpec(P, (6,), (1, 1)),
        lambda P: dd.HaloSpec(P, (6,), 6, boundary="reflect"),
        lambda P: dd.HaloSpec(P, (6,), 1.5),
        lambda P: dd.HaloSpec(dd.Layout(P, (6,)), (6,), 1, 1),
        lambda P: dd.HaloSpec(P, (6, 6), 1),
        lambda P: dd.HaloSpec(P, (6,)),
        lambda P: dd.HaloSpec(P, (1,), 1, boundary="reflect"),
        lambda P: dd.HaloSpec.window(P, (6,), 7),
        lambda P: dd.HaloSpec.window(P, (6,), 0),
        lambda P: dd.HaloSpec.window(P, (6,), 3, 0),
        lambda P: dd.HaloSpec.window(P, (6,), 3, padding=-1),
        lambda P: dd.HaloSpec.window(P, (6,), (3, 3)),
        lambda P: dd.HaloSpec(P, (6,), 1, boundary=("zeros", "reflect")),
        lambda P: dd.HaloSpec(P, (6,), 1, boundary=(("zeros", "wrap"),)),
        lambda P: dd.HaloSpec(P, (6,), 1, boundary=(("zeros", "none", "none"),)),
        lambda P: dd.HaloSpec(P, (6,), 1, boundary=(("zeros", "circular"),)),
        lambda P: dd.HaloSpec(P, (6,), 1, boundary=(("circular", "none"),)),
        lambda P: dd.HaloSpec(P, (6,), 1, 6, boundary=(("zeros", "reflect"),)),
    ],
)
def test_errors(make):
    with pytest.raises(PartitionError) as caught:
        make(dd.Partition((2,)))
    assert caught.value.op and (caught.value.expected or caught.value.actual)


def test_widest_reflection_is_legal():
    assert dd.HaloSpec(dd.Partition((2,)), (6,), 5, boundary="reflect").window_box(0) == ((-5, 8),)


def test_a_boundary_for_each_side():
    """One spelling for one boundary; each side reaches as far as its own kind does."""
    P = dd.Partition((2, 1))
    spec = dd.HaloSpec(P, (5, 4), 1, boundary=("zeros", ["replicate", "reflect"]))
    assert spec.boundary == ("zeros", ("replicate", "reflect"))
    same = dd.HaloSpec(P, (5, 4), 1, boundary=(("zeros", "zeros"), ("replicate", "reflect")))
    assert same == spec and hash(same) == hash(spec)
    assert dd.HaloSpec(P, (5, 4), 1, boundary=(("circular", "circular"), "none")).boundary == ("circular", "none")
    assert dd.HaloSpec(P, (5, 4), (9, 0), (4, 0), boundary=(("zeros", "reflect"), "none")).window_box(0) == (
        (-9, 7),
        (0, 4),
    )
    clipped = dd.HaloSpec(P, (5, 4), 2, boundary=(("none", "zeros"), ("zeros", "none")))
    assert [clipped.window_box(r) for r in range(2)] == [((0, 5), (-2, 4)), ((1, 7), (-2, 4))]
    with pytest.raises(PartitionError, match="dim 1 is circular on one side only"):
        dd.HaloSpec(P, (5, 4), 1, boundary=("zeros", ("circular", "zeros")))
    with pytest.raises(
        PartitionError, match=r"the reflect boundary of dim 0 reaches beyond .* at most 4 ghosts, got 5"
    ):
        dd.HaloSpec(P, (5, 4), 7, 5, boundary=(("zeros", "reflect"), "zeros"))
    assert "0  0 [0  1  2] 3" in dd.viz.text(
        dd.HaloSpec(P, (5, 4), (2, 0), (1, 0), boundary=(("replicate", "zeros"), "none"))
    )
    assert "[3  4] ." in dd.viz.text(dd.HaloSpec(P, (5, 4), (1, 0), boundary=(("replicate", "zeros"), "none")))


def test_spellings():
    P, L = dd.Partition((2, 1)), dd.Layout(dd.Partition((2, 1)), (5, 4))
    spec = dd.HaloSpec(P, (5, 4), (1, 2), (1, 2))
    assert spec == dd.HaloSpec(L, (1, 2)) == dd.HaloSpec(L, left=(1, 2)) == dd.HaloSpec(L, (1, 2), (1, 2))
    assert spec == dd.HaloSpec(P, (5, 4), (1, 2))
    assert dd.HaloSpec(L, (5, 4), (1, 2)) == dd.HaloSpec(P, (5, 4), (5, 4), (1, 2)), (
        "widths that look like the shape are widths"
    )
    assert spec.in_layout == spec.out_layout == L
    assert dd.HaloSpec(L, 1, 2) == dd.HaloSpec(L, (1, 1), (2, 2))


@pytest.mark.parametrize(
    "ranks, widths",
    [
        (2, [(0, 2), (2, 0)]),
        (3, [(0, 2), (2, 1), (3, 0)]),
        (4, [(0, 3), (1, 2), (2, 1), (3, 0)]),
    ],
)
def test_neon_tables(ranks, widths):
    """Halo widths (left, right) of neon's configuration: 28 pixels, a kernel of 5, stride 1, no padding. The output's
    24 pixels lie in balanced blocks as the input's 28 do, so the halos are uneven."""
    spec = dd.HaloSpec.window(dd.Partition((1, 1, ranks)), (1, 1, 28), (5,))
    blocks, windows = spec.in_layout.blocks(2), spec.windows[2]
    assert [(start - lo, hi - stop) for (start, stop), (lo, hi) in zip(blocks, windows)] == widths
