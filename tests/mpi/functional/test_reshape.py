"""Flatten, unflatten, pad, unpad, concatenate and stack against serial torch."""

import pytest
import torch
import torch.nn.functional as tf
from serial import check_layer, layouts, messages, randn, whole

import distdl as dd
import distdl.functional as F

WORLD = dd.world()


def flat_layouts(shape):
    """Layouts of the flattened tensor: features over all ranks (reversed), batch over all ranks, one rank, uneven
    ones."""
    n = WORLD.size
    back = tuple(range(n))[::-1]
    found = [
        dd.Layout(dd.Partition((1, n), back), shape),
        dd.Layout(dd.Partition((n, 1)), shape),
        dd.Layout(dd.Partition((1, 1), (n - 1,)), shape),
    ]
    if n > 1:
        found.append(dd.Layout(dd.Partition((1, n)), shape, (None, (0, shape[1] - n + 2, *[1] * (n - 2)))))
    return found


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (3, 1, 4, 3), (2, 2, 3)])
def test_flatten_and_back(shape):
    """From every layout to every layout: features in the usual order."""
    X = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    Y = X.flatten(1)
    for name, L in layouts(shape).items():
        for out in flat_layouts(Y.shape):
            x = L.shard(X).clone().requires_grad_()
            y = F.dist_flatten(x, L, out)
            assert torch.equal(y, out.shard(Y)), (name, out)
            y.backward(out.shard(3 * Y) if out.active else torch.zeros_like(y))
            assert not L.active or torch.equal(x.grad, L.shard(3 * X)), (name, out)
            assert torch.equal(F.dist_unflatten(out.shard(Y), out, L, shape), L.shard(X)), (name, out)


def test_flatten_differentiated():
    shape = (2, 3, 2, 3)
    out = dd.Layout(dd.Partition((1, WORLD.size)), (2, 18))
    for name, L in layouts(shape, (1, 2, 3)).items():
        check_layer(
            lambda x: F.dist_flatten(x, L, out),
            lambda x: x.flatten(1),
            [randn(*shape)],
            [L],
            out,
            active=True,
            name=f"flatten {name}",
        )
    for L in (
        dd.Layout(dd.Partition((1, 1, WORLD.size, 1)), shape),
        dd.Layout(dd.Partition((1, WORLD.size, 1, 1)), shape),
    ):
        check_layer(lambda x: F.dist_unflatten(x, out, L, shape), lambda x: x.reshape(shape), [randn(2, 18)], [out], L)


def test_flatten_from_any_dim_and_bare_partitions():
    n = WORLD.size
    X = randn(2, 3, 4, 2)
    P = dd.Partition((1, 1, n, 1))
    for start, out in ((0, dd.Partition((n,))), (2, dd.Partition((1, n, 1))), (-1, dd.Partition((1, 1, n, 1))), (3, P)):
        Y = X.flatten(start)
        y = F.dist_flatten(P.shard(X), P, out, start)
        assert torch.equal(y, dd.Layout(out, Y.shape).shard(Y)), start
    nobody = dd.Layout(dd.Partition((1, 1, n)), (0, 2, 3))
    out = dd.Partition((1, n))
    assert F.dist_flatten(torch.empty(nobody.local_shape()), nobody, out).shape == out.local_shape((0, 6))
    integers = torch.arange(24).reshape(1, 2, 4, 3)
    assert torch.equal(
        F.dist_flatten(P.shard(integers), P, dd.Partition((1, n))), dd.Partition((1, n)).shard(integers.flatten(1))
    )
    for target, start in ((P, 1), (out, 4)):
        with pytest.raises(dd.errors.PartitionError):
            F.dist_flatten(P.shard(X), dd.Layout(P, X.shape), target, start)


def test_flatten_holds_no_more_than_blocks():
    """One channel, split rows: no rank may gather the picture on the way (the largest message is what a rank wants)."""
    n = WORLD.size
    L, out = dd.Layout(dd.Partition((1, 1, n, 1)), (1, 1, 8, 6)), dd.Layout(dd.Partition((1, n)), (1, 48))
    x = L.shard(randn(1, 1, 8, 6))
    sends, elements, *rest = messages(lambda: F.dist_flatten(x, L, out))
    assert elements <= x.numel() and rest == [0, 0, 0]
    if 8 % n == 0:
        assert sends == 0  # rows stay where they are


PADS = [
    ((1, 2), "constant", 0),
    ((2, 1, 0, 3), "constant", 1.5),
    ((-1, 2, 1, -2), "constant", -1.0),
    ((0, 1, 2, 1), "reflect", 0),
    ((1, 2, 2, 3), "replicate", 0),
    ((2, 1, 3, 2), "circular", 0),
]


@pytest.mark.parametrize("pad, mode, value", PADS)
def test_pad(pad, mode, value):
    X = randn(2, 2, 4, 5)
    for name, L in layouts(X.shape).items():
        out = F.pad_layout(L, pad)
        full = (*pad, *(0,) * (4 - len(pad)))
        check_layer(
            lambda x: F.dist_pad(x, L, pad, mode, value),
            lambda x: tf.pad(x, full, mode, value or None),
            [X],
            [L],
            out,
            orders=2 if name in ("dim 2", "alone") else 1,
            name=f"pad {pad} {mode} {name}",
        )


def test_pad_other_dtypes_unpad_and_errors():
    X = torch.arange(12).reshape(3, 4)
    for L in layouts(X.shape).values():
        padded = F.dist_pad(L.shard(X), L, (1, 1, 2, 0), value=7)
        out = F.pad_layout(L, (1, 1, 2, 0))
        assert padded.dtype == X.dtype and torch.equal(padded, out.shard(tf.pad(X, (1, 1, 2, 0), value=7)))
        back = F.dist_unpad(padded, out, (1, 1, 2, 0))
        assert torch.equal(back, out.with_shape(X.shape).shard(X))
    P = dd.Partition((WORLD.size, 1))
    assert torch.equal(F.dist_pad(P.shard(X), P, (0, 0, 1, 0)), P.shard(tf.pad(X, (0, 0, 1, 0))))
    L = dd.Layout(P, X.shape)
    for pad, mode, value in (
        ((1,), "constant", 0),
        ((-3, -2), "constant", 0),
        ((1, 1), "mirror", 0),
        ((4, 0), "reflect", 0),
        ((1, 1), "circular", 2),
        ((1,) * 6, "constant", 0),
    ):
        with pytest.raises(dd.errors.PartitionError):
            F.dist_pad(L.shard(X), L, pad, mode, value)


@pytest.mark.parametrize("dim", [1, 2])
def test_cat(dim):
    shapes = [(2, 3, 4), (2, 5, 4), (2, 1, 4)] if dim == 1 else [(2, 3, 4), (2, 3, 2), (2, 3, 7)]
    Xs = [randn(*s, seed=i) for i, s in enumerate(shapes)]
    n = WORLD.size
    for grid in {(n, 1, 1), (1, n, 1), (1, 1, n), *([(1, 2, 2)] if n == 4 else [])}:
        Ls = [dd.Layout(dd.Partition(grid), s) for s in shapes]
        check_layer(
            lambda *xs: F.dist_cat(xs, Ls, dim),
            lambda *xs: torch.cat(xs, dim),
            Xs,
            Ls,
            F.cat_layout(Ls, dim),
            batched=(0, 2),
            name=f"cat {grid}",
        )
        P, want = dd.Partition(grid), F.cat_layout(Ls, dim).shard(torch.cat(Xs, dim))
        xs = [P.shard(X) for X in Xs]
        assert torch.equal(F.dist_cat(xs, P, dim), want) and torch.equal(
            F.dist_cat(xs, P, dim - 3, shapes=shapes), want
        )
        if grid[dim] == 1:
            assert messages(lambda: F.dist_cat(xs, Ls, dim)) == (0, 0, 0, 0, 0)


def test_cat_subset_splits_and_errors():
    n = WORLD.size
    X, Y = randn(n + 2, 3), randn(4, 3, seed=1)
    P = dd.Partition((max(n - 1, 1), 1), ranks=tuple(range(n - 1, 0, -1)) or (0,))
    Ls = [dd.Layout(P, X.shape, ((n + 3 - P.size, *[1] * (P.size - 1)), None)), dd.Layout(P, (4, 3))]
    check_layer(lambda x, y: F.dist_cat([x, y], Ls), lambda x, y: torch.cat([x, y]), [X, Y], Ls, F.cat_layout(Ls))
    with pytest.raises(dd.errors.PartitionError):
        F.dist_cat([X, Y], [Ls[0], dd.Layout(P, (4, 2))])
    with pytest.raises(dd.errors.PartitionError):
        F.dist_cat([], P)


def test_cat_outside_a_bare_partition():
    """A rank outside gets no rows, and the columns of all."""
    P = dd.Partition((max(WORLD.size - 1, 1), 1))
    X, Y = randn(4, 3), randn(4, 5, seed=1)
    L, M = dd.Layout(P, X.shape), dd.Layout(P, Y.shape)
    x, y = (Z.shard(z) if Z.active else z[:0] for Z, z in ((L, X), (M, Y)))
    found = F.dist_cat([x, y], P, 1)
    assert torch.equal(found, F.cat_layout([L, M], 1).shard(torch.cat([X, Y], 1)) if L.active else X.new_empty(0, 8))


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_stack(dim):
    X, Y = randn(4, 3), randn(4, 3, seed=1)
    for L in layouts(X.shape).values():
        out = F.stack_layout(L, dim, 2)
        check_layer(
            lambda x, y: F.dist_stack([x, y], [L, L], dim), lambda x, y: torch.stack([x, y], dim), [X, Y], [L, L], out
        )
    P = dd.Partition((WORLD.size, 1))
    out = F.stack_layout(dd.Layout(P, X.shape), dim, 2)
    assert torch.equal(F.dist_stack([P.shard(X), P.shard(Y)], P, dim), out.shard(torch.stack([X, Y], dim)))


def test_lenets_transition():
    """Split pictures -> split features -> a linear layer, as one differentiated function."""
    n = WORLD.size
    X, W = randn(2, 4, 5, 3), randn(6, 60, seed=1)
    L, out = dd.Layout(dd.Partition((1, 1, n, 1)), X.shape), dd.Layout(dd.Partition((1, n)), (2, 60))
    P = dd.Partition((1, 1, n))

    def net(x, w):
        return F.dist_linear(F.dist_flatten(x, L, out), w, P, y_layout="invariant")

    check_layer(net, lambda x, w: x.flatten(1) @ w.T, [X, W], [L, dd.Layout(dd.Partition((1, n)), W.shape)], whole)
