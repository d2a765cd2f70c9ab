"""Embedding against serial torch: vocabulary, embedding and batch dims split, on uneven and empty blocks."""

import pytest
import torch
import torch.nn.functional as tf
from serial import along, check_layer, messages, randn

import distdl as dd
import distdl.functional as F

WORLD = dd.world()
N, D = 7, 5  # rows and row length
IDX = torch.randint(0, N, (3, 4), generator=torch.Generator().manual_seed(1))
W = randn(N, D)


def grids():
    """(batch, 1, vocabulary, embedding) partitions of this world."""
    n = WORLD.size
    shapes = {(n, 1, 1, 1), (1, 1, n, 1), (1, 1, 1, n), *([(1, 1, 2, 2), (2, 1, 2, 1)] if n == 4 else [])}
    found = [dd.Partition(shape) for shape in sorted(shapes)]
    if n > 2:
        found.append(dd.Partition((1, 1, n - 1, 1), ranks=tuple(range(n - 1, 0, -1))))  # rank 0 takes no part
    return found


def layout(P, splits=None):
    return dd.Layout(P, (*IDX.shape, N, D), splits)


def result(L, y_layout):
    """Where the result lies."""
    P, shape = L.partition, (*IDX.shape, D)
    if y_layout == "root":
        root = dd.Layout(P.take(2, 0), shape)
        return root.shard if root.active else lambda y: along(L, 0, 1, 3)(y)[:0]
    if y_layout == "sharded":
        return dd.Layout(dd.Partition((P.shape[0], P.shape[2], P.shape[3]), P.ranks), shape)
    return along(L, 0, 1, 3)


@pytest.mark.parametrize("y_layout", ["root", "sharded", "invariant"])
@pytest.mark.parametrize("P", grids(), ids=lambda P: f"{P.shape}")
def test_every_layout(P, y_layout):
    L = layout(P)
    check_layer(
        lambda i, w: F.dist_embedding(
            i, w, L, y_layout=y_layout, y_dim=1, padding_idx=-2, scale=1.5, params="invariant"
        ),
        # torch's own padding_idx keeps the tangent of that row
        lambda i, w: 1.5 * tf.embedding(i, torch.where(torch.arange(N)[:, None] == N - 2, w.detach(), w)),
        [IDX, W],
        [along(L, 0, 1), along(L, 2, 3)],
        result(L, y_layout),
        active=L.active,
        name=f"{P.shape} {y_layout}",
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(max_norm=1.5),
        dict(max_norm=1.2, norm_type=1.0),
        dict(max_norm=0.9, norm_type=torch.inf),
        dict(scale_grad_by_freq=True, padding_idx=int(IDX[0, 0])),
        dict(padding_idx=N - 1),
    ],
)
def test_options(options):
    """Value and gradient as torch's, which changes a table that is too long in place."""
    serial = W.clone().requires_grad_()
    y = tf.embedding(IDX, serial, **options)
    y_bar = randn(*y.shape, seed=3)
    y.backward(y_bar)
    for P in grids():
        L = layout(P)
        part = result(L, "root")
        w = along(L, 2, 3)(W).clone().requires_grad_()
        before = w.detach().clone()
        found = F.dist_embedding(along(L, 0, 1)(IDX), w, L, params="invariant", **options)
        found.backward(part(y_bar) if L.active else torch.zeros_like(found))
        assert torch.equal(w.detach(), before)
        if L.active:
            assert torch.allclose(found, part(y.detach()), rtol=1e-12)
            assert torch.allclose(w.grad, along(L, 2, 3)(serial.grad), rtol=1e-10, atol=1e-14), (P, options)


def test_bare_partition_asks_for_rows_only_where_they_are_split():
    for P in grids():
        for splits in (None, (None, None, (N - P.shape[2] + 1, *[1] * (P.shape[2] - 1)), None)):
            L = layout(P, splits)
            call = lambda **k: F.dist_embedding(along(L, 0, 1)(IDX), along(L, 2, 3)(W), P, y_layout="replicated", **k)
            y = call()
            if L.active:
                assert torch.equal(y, along(L, 0, 1, 3)(tf.embedding(IDX, W)))
                assert messages(call)[4] == (P.shape[2] > 1)
                if splits is None:
                    assert messages(lambda: call(num_embeddings=N))[4] == 0


def test_indices_on_the_root_only():
    for P in grids():
        for where in (P, layout(P)):
            L = layout(P)
            coords = P.index()
            idx = along(L, 0, 1)(IDX) if coords and coords[2:] == (0, 0) else torch.zeros(0, dtype=torch.int64)
            y = F.dist_embedding(idx, along(L, 2, 3)(W), where, idx_layout="root", y_layout="replicated")
            assert not L.active or torch.equal(y, along(L, 0, 1, 3)(tf.embedding(IDX, W)))


def test_more_ranks_than_rows_and_no_index_at_all():
    P = dd.Partition((1, WORLD.size, 1))
    for rows, count in ((2, 4), (3, 0)):
        L, X = dd.Layout(P, (count, rows, 2)), randn(rows, 2)
        idx = torch.arange(count) % rows
        w = along(L, 1, 2)(X).clone().requires_grad_()
        y = F.dist_embedding(idx, w, L, y_layout="invariant")
        assert torch.equal(y, X[idx])
        y.sum().backward()
        assert w.grad.shape == w.shape and torch.equal(w.grad, torch.full_like(w, count / rows))


def test_more_ranks_than_columns():
    L = dd.Layout(dd.Partition((1, 1, WORLD.size)), (4, N, 2))
    check_layer(
        lambda w: F.dist_embedding(IDX[0], w, L, y_layout="invariant"),
        lambda w: tf.embedding(IDX[0], w),
        [randn(N, 2)],
        [along(L, 1, 2)],
        along(L, 0, 2),
    )


def test_vmap_over_indices():
    P = dd.Partition((1, WORLD.size, 1))
    L = dd.Layout(P, (4, N, D))
    y = torch.vmap(lambda i: F.dist_embedding(i, along(L, 1, 2)(W), L, y_layout="invariant"))(IDX)
    assert torch.equal(y, W[IDX])


def test_errors():
    P = dd.Partition((1, 1, WORLD.size, 1))
    L = layout(P)
    w = along(L, 2, 3)(W)
    for bad in (IDX + N, IDX - N):
        with pytest.raises(dd.errors.ShapeError, match="outside the table"):
            F.dist_embedding(bad, w, L)
    with pytest.raises((IndexError, RuntimeError)):
        torch.vmap(lambda i: F.dist_embedding(i, w, dd.Layout(P.take(0, 0), (4, N, D))))(IDX + N)
    for call in (
        lambda: F.dist_embedding(IDX.double(), w, L),
        lambda: F.dist_embedding(IDX, w[:0, :2], L),
        lambda: F.dist_embedding(IDX, w, P, num_embeddings=99),
        lambda: F.dist_embedding(IDX, w, L, y_layout="here"),
        lambda: F.dist_embedding(IDX, w, L, padding_idx=N),
    ):
        with pytest.raises(dd.errors.DistdlError):
            call()


def test_messages():
    if WORLD.size != 2:
        pytest.skip("counted on two ranks")
    L = layout(dd.Partition((1, 1, 2, 1)))
    w = along(L, 2, 3)(W).clone().requires_grad_()
    y_size = IDX.numel() * D
    got = {}

    def step(how):
        found = F.dist_embedding(IDX, w, L, y_layout=how, y_dim=1)
        got["y"] = found

    other = WORLD.rank == 1
    assert messages(lambda: step("root")) == (int(other), y_size * other, 0, 0, 0)
    assert messages(lambda: got["y"].sum().backward()) == (int(not other), y_size * (not other), 0, 0, 0)
    assert messages(lambda: step("invariant")) == (0, 0, 1, y_size, 0)
    assert messages(lambda: got["y"].sum().backward()) == (0, 0, 0, 0, 0)
    assert messages(lambda: step("sharded")) == (1, y_size // 2, 0, 0, 0)
    for grid, options, numbers in (
        ((1, 1, 1, 2), {}, 0),
        ((1, 1, 1, 2), {"max_norm": 1.0}, IDX.numel()),
        ((2, 1, 1, 1), {"scale_grad_by_freq": True}, N),
    ):
        L = layout(dd.Partition(grid))
        counted = messages(lambda: F.dist_embedding(along(L, 0, 1)(IDX), along(L, 2, 3)(W), L, **options))
        assert counted == (0, 0, int(numbers > 0), numbers, 0)
