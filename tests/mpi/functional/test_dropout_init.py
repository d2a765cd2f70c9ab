"""Random numbers, dropout and initialisation: one global tensor, whatever the partition, and good numbers."""

import math

import pytest
import torch
from serial import check_layer, layouts, randn

import distdl as dd
import distdl.functional as F
from distdl.functional import random

WORLD = dd.world()


def alone(shape):
    """The layout of a serial program: all of it, here."""
    return dd.Layout(dd.Partition((1,) * len(shape), (WORLD.rank,)), shape)


# ---------------------------------------------------------------- the generator


def test_known_numbers():
    """They must not change from version to version, nor with the number of ranks (CASES 36)."""
    known = [6852928946515631446, 5933224447974257582, 8110854435423833988]
    assert random.bits(((0, 3),), (3,), 7, None, lambda h: h).tolist() == known
    assert F.fold_in(7, 1) == -4196405110082178282


def test_blocks_are_those_of_one_tensor():
    shape = (5, 1, 6, 7)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for draw in (F.uniform, F.normal):
            X = draw(alone(shape), 11, dtype)
            for L in layouts(shape).values():
                x = draw(L, 11, dtype)
                assert x.dtype == dtype and x.shape == L.local_shape()
                assert not L.active or torch.equal(x, L.shard(X))


def test_chunks_do_not_show(monkeypatch):
    whole = [F.normal(L, 3) for L in layouts((4, 5, 6)).values()]
    monkeypatch.setattr(random, "_CHUNK", 7)
    assert all(torch.equal(a, F.normal(L, 3)) for a, L in zip(whole, layouts((4, 5, 6)).values()))


def test_statistics():
    """Six standard deviations; the seeds are fixed, so that this cannot fail by chance."""
    n = 200_000
    draws = [
        F.uniform(alone((n,)), seed, torch.float64) for seed in (0, 1, 2, -1, 2**40, F.fold_in(0, 0), F.fold_in(0, 1))
    ]
    for u in draws:
        assert float(u.min()) >= 0 and float(u.max()) < 1
        assert abs(float(u.mean()) - 0.5) < 6 / math.sqrt(12 * n)
        counts = torch.histc(u, 500, 0, 1)
        assert abs(float(((counts - n / 500) ** 2 / (n / 500)).sum()) - 499) < 6 * math.sqrt(2 * 499)
        for lag in (1, 2, 64, 1000):
            assert abs(float(torch.corrcoef(torch.stack([u[lag:], u[:-lag]]))[0, 1])) < 6 / math.sqrt(n)
    assert float((torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))).abs().max()) < 6 / math.sqrt(n)
    bits = random.bits(((0, n),), (n,), 5, None, lambda h: h)
    for i in range(63):
        assert abs(float(((bits >> i) & 1).double().mean()) - 0.5) < 6 / math.sqrt(4 * n)
    z = F.normal(alone((n,)), 4, torch.float64, mean=2.0, std=3.0)
    z = (z - 2) / 3
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 6 * math.sqrt(variance / n)


def test_seeds_as_tensors_and_under_vmap():
    seeds = torch.tensor([1, 2, 3])
    L = alone((4,))
    batch = torch.vmap(lambda s: F.uniform(L, s))(seeds)
    assert torch.equal(batch, torch.stack([F.uniform(L, s) for s in (1, 2, 3)]))
    assert int(F.fold_in(seeds[0], 5)) == F.fold_in(1, 5) != F.fold_in(5, 1)
    with pytest.raises(dd.errors.ShapeError):
        F.uniform(L, torch.tensor([1, 2]))


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("dropout", [F.dist_dropout, F.dist_feature_dropout])
def test_same_mask_on_any_partition(dropout):
    X = randn(4, 6, 5)
    for p in (0.3, 1.0):
        for name, L in layouts(X.shape).items():
            check_layer(
                lambda x: dropout(x, L, p, 9), lambda x: dropout(x, alone(X.shape), p, 9), [X], [L], L, name=name
            )
            if not L.splits:
                assert torch.equal(dropout(L.shard(X), L.partition, p, 9, shape=X.shape), dropout(L.shard(X), L, p, 9))


def test_dropout_is_torchs():
    n = 100_000
    x = torch.full((n,), 3.0)
    L = alone((n,))
    y = F.dist_dropout(x, L, 0.25, 1)
    kept = (y != 0).double().mean()
    assert abs(float(kept) - 0.75) < 6 * math.sqrt(0.25 * 0.75 / n) and torch.equal(
        y[y != 0].unique(), torch.tensor([4.0])
    )
    assert torch.equal(y != 0, F.dist_dropout(x.double(), L, 0.25, 1) != 0)  # the mask knows no dtype
    assert torch.equal(x, F.dist_dropout(x, L, 0.25, 1, training=False)) and torch.equal(
        x, F.dist_dropout(x, L, 0.0, 1)
    )
    images = alone((40, 50, 3, 3))
    mask = F.dist_feature_dropout(torch.ones(images.shape), images, 0.5, 2) != 0
    assert torch.equal(mask, mask[:, :, :1, :1].expand_as(mask)) and abs(float(mask.double().mean()) - 0.5) < 0.07
    with pytest.raises(dd.errors.PartitionError):
        F.dist_dropout(x, L, 1.5, 1)
    with pytest.raises(dd.errors.ShapeError):
        F.dist_dropout(x[1:], L, 0.5, 1)


def test_dropout_over_a_bare_partition():
    X = randn(5, 6)
    P = dd.Partition((WORLD.size, 1))
    assert torch.equal(F.dist_dropout(P.shard(X), P, 0.5, 3), P.shard(F.dist_dropout(X, alone(X.shape), 0.5, 3)))


# ---------------------------------------------------------------- initialisation

INITS = {
    "kaiming_uniform": ({}, torch.nn.init.kaiming_uniform_),
    "kaiming_normal": ({"fan": "out"}, torch.nn.init.kaiming_normal_),
    "xavier_uniform": ({}, torch.nn.init.xavier_uniform_),
    "xavier_normal": ({"gain": 2.0}, torch.nn.init.xavier_normal_),
    "trunc_normal": ({"std": 2.0}, torch.nn.init.trunc_normal_),
    "normal": ({}, torch.nn.init.normal_),
    "uniform": ({"low": -1.0}, None),
}


@pytest.mark.parametrize("name", INITS)
def test_same_parameters_on_any_partition(name):
    kwargs, reference = INITS[name]
    init, shape = getattr(dd.init, name), (12, 7, 3)
    X = init(alone(shape), 5, **kwargs)
    for L in layouts(shape).values():
        x = init(L, 5, **kwargs)
        assert not L.active or torch.equal(x, L.shard(X))
    if reference is not None:
        shape = (300, 200, 3)
        kwargs = {
            {"fan": "mode"}.get(k, k): {"out": "fan_out"}.get(v, v) if k == "fan" else v for k, v in kwargs.items()
        }
        wanted = reference(torch.empty(shape, dtype=torch.float64), **kwargs)
        found = init(alone(shape), 5, dtype=torch.float64, **INITS[name][0])
        assert abs(float(found.std() / wanted.std()) - 1) < 0.02 and abs(float(found.mean())) < 0.02 * float(
            found.std()
        )
        assert abs(float(found.abs().max() / wanted.abs().max()) - 1) < (0.3 if "normal" in name else 0.01)


def test_bias_constants_and_fans():
    shape = (6, 8, 3, 3)
    b = dd.init.bias_uniform(alone((4000,)), 1, shape)
    bound = 1 / math.sqrt(72)
    assert dd.init.fans(shape) == (72, 54) and 0.99 * bound < float(b.abs().max()) <= bound
    for L in layouts((4, 3)).values():
        assert torch.equal(dd.init.zeros(L), torch.zeros(L.local_shape()))
        assert torch.equal(dd.init.ones(L), torch.ones(L.local_shape()))
    w = dd.init.kaiming_uniform(alone((9, 4)), 0, a=math.sqrt(5))
    assert float(w.abs().max()) <= 0.5  # torch.nn.Linear's 1 / √(fan in)
    for call in (lambda: dd.init.fans((3,)), lambda: dd.init.kaiming_normal(alone((2, 2)), 1, fan="both")):
        with pytest.raises(dd.errors.PartitionError):
            call()


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (5, 5), (1, 6), (150, 3, 50), (9, 4, 3, 3), (0, 3), (4, 0)])
def test_orthogonal(shape):
    """One matrix on any partition, with orthonormal columns or rows; in float32 the same bits."""
    X = dd.init.orthogonal(alone(shape), 5, gain=3.0, dtype=torch.float64)
    M = X.flatten(1) if X.numel() else X.new_zeros(1, 1).add(3.0)
    gram = M @ M.T if M.shape[0] <= M.shape[1] else M.T @ M
    assert X.shape == shape and torch.allclose(gram, 9 * torch.eye(len(gram), dtype=gram.dtype), atol=1e-12)
    for L in layouts(shape).values():
        x = dd.init.orthogonal(L, 5, gain=3.0, dtype=torch.float64)
        assert x.shape == L.local_shape() and (not L.active or torch.allclose(x, L.shard(X), rtol=0, atol=1e-13))
        assert not L.active or torch.equal(dd.init.orthogonal(L, 5, gain=3.0), L.shard(X).float())
    assert not X.numel() or not torch.allclose(X, dd.init.orthogonal(alone(shape), 6, gain=3.0, dtype=torch.float64))


def test_orthogonal_is_a_product_of_reflections():
    """By single reflections, written out; and the law is that of torch's: of the trace of Q of O(3), E tr² = 1 and
    E tr⁴ = 3 (Diaconis & Shahshahani, 1994)."""
    n, k = 70, 66  # more columns than a panel
    X = dd.init.normal(alone((n, k)), 4, dtype=torch.float64)
    Q = torch.eye(n, k, dtype=torch.float64)
    for j in reversed(range(k)):
        v = X[j:, j].clone()
        sign = -1.0 if v[0] < 0 else 1.0
        v[0] += sign * v.norm()
        Q[:, j] *= -sign
        Q[j:] -= 2 * torch.outer(v, v @ Q[j:]) / (v @ v)
    assert torch.allclose(dd.init.orthogonal(alone((n, k)), 4, dtype=torch.float64), Q, atol=1e-13)
    assert torch.allclose(dd.init.orthogonal(alone((k, n)), 4, dtype=torch.float64), Q.T, atol=1e-13)
    draw = torch.func.vmap(lambda seed: dd.init.orthogonal(alone((3, 3)), seed, dtype=torch.float64))
    traces = draw(torch.arange(20000)).diagonal(dim1=1, dim2=2).sum(1)
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(float((traces**power).mean()) - expected) < 0.15, power


def test_orthogonal_needs_few_rows_of_the_whole():
    """A rank has its own columns, and a panel of reflections; never the matrix."""
    most = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            most.append(y.numel() if isinstance(y, torch.Tensor) else 0)
            return y

    L = dd.Layout(dd.Partition((1, WORLD.size)), (600, 400))
    with Watch():
        dd.init.orthogonal(L, 1)
    assert max(most) <= 600 * max(L.local_shape()[1], 64)


def test_identities():
    for shape in ((4, 6), (6, 4), (1, 3), (0, 2), (3, 0)):
        X = torch.nn.init.eye_(torch.empty(shape))
        for L in layouts(shape).values():
            x = dd.init.eye(L)
            assert x.shape == L.local_shape() and (not L.active or torch.equal(x, L.shard(X)))
    for shape, groups in (((6, 4, 3), 1), ((6, 2, 3, 4), 3), ((4, 7, 1, 2, 5), 2), ((8, 1, 3), 4), ((0, 2, 3), 1)):
        X = torch.nn.init.dirac_(torch.empty(shape), groups)
        for L in layouts(shape).values():
            x = dd.init.dirac(L, groups=groups, dtype=torch.bfloat16)
            assert x.shape == L.local_shape() and x.dtype == torch.bfloat16
            assert not L.active or torch.equal(x.float(), L.shard(X))


def test_shapes_of_no_such_matrix():
    for call, words in (
        (lambda: dd.init.orthogonal(alone((3,)), 1), "orthogonal: an orthogonal matrix has rows and columns"),
        (lambda: dd.init.eye(alone((3, 3, 3))), "eye: an identity has rows and columns"),
        (lambda: dd.init.dirac(alone((3, 3))), "dirac: no weight of a convolution"),
        (lambda: dd.init.dirac(alone((3, 3, 3)), groups=2), "groups=2"),
        (lambda: dd.init.dirac(alone((3, 3, 3)), groups=0), "groups=0"),
    ):
        with pytest.raises(dd.errors.PartitionError, match=words) as caught:
            call()
        assert caught.value.partitions and caught.value.next_step


def test_parameter_layout():
    """A parameter split over some dims of a layer's partition: copies are equal, blocks are those of the whole."""
    n = WORLD.size
    for grid in ((n, 1, 1), (1, n, 1), (1, 1, n), *([(2, 1, 2)] if n == 4 else [])):
        P = dd.Partition(grid)
        L = dd.init.parameter_layout(P, (5, 7), (1, 2))
        whole = dd.init.normal(alone((5, 7)), 3)
        rows, columns = dd.Layout(P, (1, 5, 7)).slices()[1:]
        assert torch.equal(dd.init.normal(L, 3), whole[rows, columns])
        turned = dd.init.parameter_layout(P, (7, 5), (2, 1))
        assert torch.equal(dd.init.normal(turned, 3), dd.init.normal(alone((7, 5)), 3)[columns, rows])
        bias = dd.init.parameter_layout(P, (5,), (None,))
        assert bias.local_shape() == (5,) and WORLD.rank in bias.partition.ranks
    with pytest.raises(dd.errors.PartitionError):
        dd.init.parameter_layout(P, (5, 7), (2, 2))


def test_memory_is_a_block_and_one_more():
    """Every tensor that drawing makes is a part of the block, or the block."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            sizes.extend([y.numel()] if isinstance(y, torch.Tensor) else [])
            return y

    L = dd.Layout(dd.Partition((WORLD.size, 1)), (1200, 400))
    with Watch():
        dd.init.kaiming_normal(L, 1)
    assert max(sizes) <= math.prod(L.local_shape()) and sum(n > random._CHUNK for n in sizes) <= 3
