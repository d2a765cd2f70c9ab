"""neon's three models for 20 float64 steps beside their sequential programs; vecpar, parameter server, loaders."""

import gzip

import numpy as np
import pytest
import torch
import torch.nn.functional as tf
from neon_models import classifier, convnet_dist, gb_dist, mlp_dist, neon, pretraining
from serial import messages, randn
from torch.func import grad, grad_and_value

import distdl as dd
import distdl.functional as F
from distdl import data

SIZE = dd.world().size
GRIDS = {
    1: ["halopar"],
    2: [(1, 1, 2, 1), "datapar", "modelpar"],
    3: [(1, 1, 1, 3), "modelpar"],
    4: ["halopar", "halodatapar", (1, 1, 4, 1), (1, 2, 2, 1)],
}[min(SIZE, 4)]
N = min(SIZE, 4)


@pytest.mark.parametrize("kind", GRIDS, ids=str)
def test_convnet(kind):
    """On MNIST digits: 2 x 2, 4 x 1, 1 x 3, tiles within groups, and split channels."""
    classifier(convnet_dist, kind, N, size=4)


@pytest.mark.parametrize("kind", GRIDS[:2], ids=str)
def test_gb_pretraining(kind):
    """Uneven quadrants of 25 x 25; V tied to W, and separate; the second stage on top of the first."""
    pretraining(kind, N, 0, tied=True, size=4)
    pretraining(kind, N, 1, tied=False, size=4)


@pytest.mark.parametrize("kind", dict.fromkeys([GRIDS[0], GRIDS[-1]]), ids=str)
def test_gb_classifier(kind):
    """Supervised: through both stages."""
    classifier(gb_dist, kind, N, size=4, rate=0.02)


@pytest.mark.parametrize("kind", ["modelpar", "datapar", "halopar"])
def test_mlp(kind):
    """64 features and 10 classes do not divide by 3."""
    classifier(mlp_dist, kind, N, size=7, rate=0.3)


# ---------------------------------------------------------------- halopar to vecpar


def test_vecpar():
    """Features stay where they are and each rank keeps the columns of its pixels; or they move into canonical order.
    The result and both gradients are the same; the first way sends nothing forward but the sums."""
    grid = {1: (1, 1, 1, 1), 2: (1, 1, 2, 1), 3: (1, 1, 1, 3), 4: (1, 1, 2, 2)}[N]
    P = dd.Partition(grid)
    L, V = dd.Layout(P, (3, 2, 5, 7)), neon.vector(P)
    X, W, T = randn(*L.shape), randn(6, 70, seed=1), randn(3, 6, seed=2)
    if dd.world().rank >= N:
        return
    flat = dd.Layout(dd.Partition((1, N)), (3, 70))

    def stay(x, w):
        return F.dist_linear(x.flatten(1), w, V, x_layout="replicated", y_layout="invariant")

    def move(x, w):
        return F.dist_linear(F.dist_flatten(x, L, flat), w, V, x_layout="replicated", y_layout="invariant")

    kept, canonical = neon.owned(L)(W), neon.columns(P)(W)
    x = L.shard(X)
    wanted = grad(lambda x, w: (torch.tanh(x.flatten(1) @ w.T) * T).sum(), argnums=(0, 1))(X, W)
    faults = []
    for name, f, w, cut in (("stay", stay, kept, neon.owned(L)), ("move", move, canonical, neon.columns(P))):
        if not torch.allclose(f(x, w), X.flatten(1) @ W.T, rtol=1e-10, atol=1e-10):
            faults.append(f"{name}: y")
        gx, gw = grad(lambda x, w: (f(x, w).tanh() * T).sum(), argnums=(0, 1))(x, w)
        if not torch.allclose(gx, L.shard(wanted[0]), rtol=1e-10, atol=1e-10):
            faults.append(f"{name}: dx")
        if not torch.allclose(gw, cut(wanted[1]), rtol=1e-10, atol=1e-10):
            faults.append(f"{name}: dW")
    sent = messages(lambda: stay(x, kept))
    if sent[:2] != (0, 0) or sent[2] != (N > 1):
        faults.append(f"stay sent {sent}")
    dd.testing.collective_assert(not faults, str(faults), range(N))


# ---------------------------------------------------------------- parameter server


def test_parameter_server():
    """Rank 0 alone has the parameters: broadcast forward, so sum-reduce backward. Step by step equal to data
    parallelism."""
    P, server = dd.Partition((SIZE,)), dd.Partition((1,))
    L = dd.Layout(dd.Partition((SIZE, 1)), (2 * SIZE + 1, 5))
    X, T = randn(*L.shape), randn(L.shape[0], 3, seed=1)
    x, t = L.shard(X), L.with_shape((L.shape[0], 3)).shard(T)
    first = dd.world().rank == 0
    shapes = {"w": (3, 5), "b": (3,)}
    start = {name: randn(*shape, seed=2) for name, shape in shapes.items()}

    def local(p):
        return F.dist_mse_loss(tf.linear(x, p["w"], p["b"]).tanh(), t, L.partition)

    def served(p):
        return local({name: F.broadcast(p[name], server, P, shape=shapes[name]) for name in shapes})

    theirs = {name: (w if first else torch.zeros(0, dtype=w.dtype)) for name, w in start.items()}
    mine = dict(start)
    faults = []
    for step in range(20):
        served_grads, a = grad_and_value(served)(theirs)
        grads, b = grad_and_value(lambda p: local(F.mark_varying(p, P)))(mine)
        if not torch.allclose(a, b, rtol=1e-12):
            faults.append(f"step {step}: loss {a} and {b}")
        if first and not all(torch.allclose(served_grads[k], grads[k], rtol=1e-10, atol=1e-12) for k in shapes):
            faults.append(f"step {step}: gradients")
        mine = {name: w - 0.5 * grads[name] for name, w in mine.items()}
        theirs = {name: w - 0.5 * served_grads[name] for name, w in theirs.items()}
    alone = dict(start)
    for _ in range(20):
        g = grad(lambda p: (tf.linear(X, p["w"], p["b"]).tanh() - T).square().mean())(alone)
        alone = {name: w - 0.5 * g[name] for name, w in alone.items()}
    if first and not all(torch.allclose(theirs[k], alone[k], rtol=1e-10, atol=1e-12) for k in shapes):
        faults.append("parameters")
    dd.testing.collective_assert(not faults, str(faults[:3]))


# ---------------------------------------------------------------- loaders


def test_loaders_decode_only_their_part(folder):
    """In a file whose other fields are no numbers; and from a memory-mapped array."""
    L = dd.Layout(dd.Partition((1, 1, SIZE, 1)), (2, 1, 6, 4))
    rows = np.array([[4, 1], [3, 6]])
    X = np.arange(8 * 24.0).reshape(8, 1, 6, 4)
    np.save(folder / "all.npy", X.reshape(8, 6, 4))
    mine = np.zeros(X.shape, bool)
    mine[(slice(None), *L.slices()[1:])] = True
    mine[[0, 2, 5, 7]] = False
    for suffix, opened in ((".csv", open), (".csv.gz", gzip.open)):
        with opened(folder / f"some{suffix}", "wt") as file:
            for label, (values, own) in enumerate(zip(X.reshape(8, -1), mine.reshape(8, -1))):
                file.write(",".join([*(str(v) if o else "not mine" for v, o in zip(values, own)), f"{label}\n"]))
    wanted = torch.as_tensor(X[rows])[(slice(None), *L.slices())]
    for name in ("some.csv", "some.csv.gz", "all.npy"):
        found = data.read(folder / name, rows, L.box(), sample=L.shape[1:], dtype=torch.float64)
        assert torch.equal(found, wanted), name
    assert data.read(folder / "some.csv", rows, ((0, 2),), first=24, dtype=torch.int64).tolist() == rows.tolist()
    with pytest.raises(dd.errors.ShapeError, match="fewer rows"):
        data.read(folder / "all.npy", [[1, 8]], ((0, 2), (0, 6), (0, 4)), sample=(6, 4))
    with pytest.raises(dd.errors.ShapeError, match="does not fit a batch"):
        data.read(folder / "all.npy", rows, ((0, 3), (0, 6), (0, 4)), sample=(6, 4))
    with pytest.raises(FileNotFoundError, match=r"requirements/data\.txt"):
        data.installed("sklearn", "no", "such.file")


def test_batches():
    rows = data.batches(10, 3, seed=4)
    assert rows.shape == (3, 3) and len(set(rows.reshape(-1).tolist())) == 9
    assert (rows == data.batches(10, 3, seed=4)).all()
    assert set(data.batches(0, 2, chosen=[5, 7]).reshape(-1).tolist()) == {5, 7}
