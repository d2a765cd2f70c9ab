"""Staggered grids: who owns a face, and the identities of a scheme of cells, faces, edges and nodes."""

import itertools

import pytest
import torch
from registry import raises_everywhere, randn

import distdl as dd
import distdl.functional as F
from distdl.errors import PartitionError

N, R = dd.world().size, dd.world().rank


def layouts(ndim):
    """Of cells: split along each dim, in a grid, uneven, with empty blocks, fewer cells than ranks, some of the
    ranks."""
    shape = (5, 4, 3)[:ndim]
    for d in range(ndim):
        grid = tuple(N if e == d else 1 for e in range(ndim))
        yield dd.Layout(dd.Partition(grid, range(N - 1, -1, -1)), shape)
        if N > 1:
            n = shape[d]
            for sizes in ((0, n, *(0,) * (N - 2)), (*(0,) * (N - 1), n), (n - 1, *(0,) * (N - 2), 1)):
                yield dd.Layout(dd.Partition(grid), shape, tuple(sizes if e == d else None for e in range(ndim)))
    yield dd.Layout(dd.Partition((N, *(1,) * (ndim - 1))), (1,) * ndim)
    if N == 4 and ndim > 1:
        yield dd.Layout(dd.Partition((2, 2, 1)[:ndim], (2, 0, 3, 1)), shape)
    if N > 2:
        yield dd.Layout(dd.Partition((*(1,) * (ndim - 1), N - 1), range(1, N)), shape)


def whole(S, x):
    """The global tensor, on every rank of its layout."""
    return F.all_gather(x, S.layout)


def difference(x, source, target, boundary="zeros"):
    """Of the one dim in which the two places differ."""
    (d,) = set(source.dims) ^ set(target.dims)
    return F.halo_exchange(x, source.to(target, boundary)).diff(dim=d)


def cyclic(X, d, faces, closed, fill=0):
    """The serial difference of a global tensor along d: of faces to cells, or of cells to faces."""
    if closed:
        return X.roll(-1, d) - X if faces else X - X.roll(1, d)
    if faces:
        return X.diff(dim=d)
    edge = X.new_full((*X.shape[:d], 1, *X.shape[d + 1 :]), fill)
    return torch.cat([edge, X, edge], d).diff(dim=d)


def periodicities(ndim):
    return [(), tuple(range(ndim)), (0,)][: 2 + (ndim > 1)]


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_each_face_has_one_owner(ndim):
    """Beside its cell; the last face of a bounded dim with the last cell. So inner products count it once."""
    for L in layouts(ndim):
        for periodic, k in itertools.product(periodicities(ndim), range(ndim + 1)):
            for dims in itertools.combinations(range(ndim), k):
                S = dd.Staggered(L, dims, periodic=periodic)
                open_ = set(dims) - set(periodic)
                assert S.layout.shape == tuple(n + (d in open_) for d, n in enumerate(L.shape))
                for d, n in enumerate(L.shape):
                    cells, faces = L.blocks(d), S.layout.blocks(d)
                    for (a, b), (f0, f1) in zip(cells, faces):
                        own = list(range(a, b)) + ([n] if d in open_ and b == n > a else [])
                        assert list(range(f0, f1)) == own, (L, dims, periodic)
                if S.layout.active:
                    X = randn(S.layout.shape, 3)
                    x = S.layout.shard(X).clone()
                    assert torch.allclose(dd.func.inner(x, x, S.layout.partition), (X * X).sum(), rtol=1e-13)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_differences_and_their_adjoints(ndim):
    """As serial ones; the gradient is minus the transpose of the divergence; sums over a cell's faces are exact."""
    for L in layouts(ndim):
        for periodic, d in itertools.product(periodicities(ndim), range(ndim)):
            cells, faces = (dd.Staggered(L, dims, periodic=periodic) for dims in ((), d))
            A, B = (dd.maps.halo_exchange(spec) for spec in (faces.to(cells), cells.to(faces)))
            assert max(dd.testing.dot_test(A), dd.testing.dot_test(B)) < 1e-13
            if not L.active:
                continue
            U, Q = randn(faces.layout.shape, 1), randn(L.shape, 2)
            u, q = faces.layout.shard(U).clone(), L.shard(Q).clone()
            div, slope = difference(u, faces, cells), difference(q, cells, faces)
            closed = d in periodic
            assert torch.equal(div, L.shard(cyclic(U, d, True, closed)))
            assert torch.equal(slope, faces.layout.shard(cyclic(Q, d, False, closed)))
            left, right = dd.func.inner(div, q, L.partition), dd.func.inner(u, slope, L.partition)
            assert torch.allclose(left, -right, rtol=1e-13, atol=1e-13)
            transposed = torch.func.vjp(lambda u: difference(u, faces, cells), u)[1](q)[0]
            assert torch.allclose(transposed, -slope, rtol=0, atol=1e-15)
            ones = torch.ones_like(q)
            wide = F.halo_exchange(ones, cells.to(faces, "replicate"))
            mean = wide.unfold(d, 2, 1).mean(-1) if q.numel() else torch.ones_like(u)
            assert torch.equal(mean, torch.ones_like(u)), "an average across the edge"


@pytest.mark.parametrize("periodic", [False, True])
def test_the_divergence_of_a_curl_in_two_dims(periodic):
    for L in layouts(2):
        closed = None if periodic else ()
        nodes, cells, across_x, across_y = (dd.Staggered(L, dims, periodic=closed) for dims in ((0, 1), (), 0, 1))
        if not L.active:
            continue
        psi = nodes.layout.shard(randn(nodes.layout.shape, 4)).clone()
        u, v = difference(psi, nodes, across_x), -difference(psi, nodes, across_y)
        assert u.shape == across_x.layout.local_shape() and v.shape == across_y.layout.local_shape()
        div = difference(u, across_x, cells) + difference(v, across_y, cells)
        assert div.shape == L.local_shape() and (div.abs() <= 1e-15 * 8).all()
        assert L.shape == (1, 1) or not u.numel() or u.abs().max() > 0.01


@pytest.mark.parametrize("periodic", [(), (0, 1, 2), (1,)])
def test_the_divergence_of_a_curl_in_three_dims(periodic):
    """Edges to faces to cells."""
    for L in layouts(3):
        at = lambda *dims: dd.Staggered(L, dims, periodic=periodic)
        if not L.active:
            continue
        edges = [at(1, 2), at(0, 2), at(0, 1)]
        a = [e.layout.shard(randn(e.layout.shape, 6, i)).clone() for i, e in enumerate(edges)]
        faces = [at(0), at(1), at(2)]
        curl = []
        for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
            curl.append(difference(a[k], edges[k], faces[i]) - difference(a[j], edges[j], faces[i]))
        div = sum(difference(c, face, at()) for c, face in zip(curl, faces))
        assert div.shape == L.local_shape() and (div.abs() <= 1e-15 * 16).all()


def test_messages_go_one_way():
    """A face reads the cell below it, and a cell the face above it; around a ring of two as well (ompi#7063)."""
    L = dd.Layout(dd.Partition((N,)), (3 * N,))
    for closed in (False, True):
        cells, faces = (dd.Staggered(L, dims, periodic=0 if closed else ()) for dims in ((), 0))
        for spec, to in ((cells.to(faces), R + 1), (faces.to(cells), R - 1)):
            x = spec.in_layout.shard(torch.arange(float(spec.in_layout.shape[0]))).clone()
            with dd.testing.count_messages() as sent:
                F.halo_exchange(x, spec)
            peers = [to % N] if N > 1 and (closed or 0 <= to < N) else []
            assert [p for _, p, _ in sent] == peers and sent.bytes == 4 * len(peers)


def test_wide_stencils():
    """Fourth-order differences of a cubic are exact, from cells to faces and back."""
    L = dd.Layout(dd.Partition((N,)), (12,))
    cells, faces = dd.Staggered(L), dd.Staggered(L, 0)
    c = torch.tensor([1, -27, 27, -1], dtype=torch.float64) / 24
    for source, target, shift in ((cells, faces, -0.5), (faces, cells, 0.5)):
        X = torch.arange(source.layout.shape[0], dtype=torch.float64) ** 3
        spec = source.to(target, width=2)
        w = F.halo_exchange(source.layout.shard(X).clone(), spec)
        found = (w.unfold(0, 4, 1) * c).sum(-1)
        i = torch.arange(*target.layout.box()[0])
        inside = (i > 1) & (i < target.layout.shape[0] - 2)
        assert found.shape == i.shape
        assert torch.allclose(found[inside], 3 * (i + shift)[inside].double() ** 2 + 0.0, rtol=1e-12)


def test_errors():
    L = dd.Layout(dd.Partition((N, 1)), (2 * N, 3))
    cells, faces = dd.Staggered(L), dd.Staggered(L, 0)
    assert hash(faces) == hash(dd.Staggered(L, (0,))) and faces == dd.Staggered(L, (-2,)) and faces != cells
    assert "dims=(0,), periodic=(1,)" in repr(dd.Staggered(L, 0, periodic=1))
    refused = lambda call, name, *words: raises_everywhere(PartitionError, call, name, *words)
    refused(lambda: dd.Staggered(L.partition, 0), "Staggered", "Layout")
    refused(lambda: dd.Staggered(L, 2), "Staggered", "2")
    refused(lambda: dd.Staggered(L, 0, periodic=(1, 1)), "Staggered", "(1, 1)")
    for other in (dd.Staggered(L.with_shape((2 * N + 1, 3))), dd.Staggered(L, periodic=0), L):
        refused(lambda: faces.to(other), "Staggered.to", "not another place on the same cells")
    for width in (0, 1.5, True):
        refused(lambda: faces.to(cells, width=width), "Staggered.to", "no such width", str(width))
    refused(lambda: cells.to(faces, "circular"), "Staggered.to", "dim 0 has two ends", "periodic=")
    refused(lambda: cells.to(faces, "wrap"), "Staggered.to", "no such boundary")
    assert cells.to(faces, ("zeros", "circular")).boundary == ("zeros", "circular"), "there nothing is read"
