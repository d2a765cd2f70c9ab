"""What a rank that takes no part gets: (0, *the first block's other sizes) of the result's layout, in its dtype, and
connected to what that rank passed.

The first block's rank says itself which shape and dtype it has. With a bare partition the rank outside passes an x of
the first block's sizes, and blocks are equal, as it takes them to be.
"""

import pytest
import torch
from registry import needs
from serial import randn

import distdl as dd
import distdl.functional as F

WORLD = dd.world()
R, N = WORLD.rank, WORLD.size


def ranks_of_peers():
    """Ranks that are not 0, 1, ...: the last first, and none is rank 0."""
    return tuple(range(N - 1, 0, -1))


class Place:
    """A partition of ``shape`` ("k": all but rank 0), and what ranks pass over it."""

    def __init__(self, *grid):
        ranks = ranks_of_peers()
        self.P = dd.Partition(tuple(len(ranks) if n == "k" else n for n in grid), ranks)

    def layout(self, shape, splits=None):
        return dd.Layout(self.P, shape, splits)


def block(L, seed, dims=None, dtype=torch.float64):
    """This rank's block of a random tensor of layout L (over its dims ``dims``); outside the first rank's."""
    X = randn(*L.shape, seed=seed).to(dtype)
    x = X[L.slices(R if L.active else L.partition.ranks[0])]
    return x.clone().requires_grad_(dtype.is_floating_point)


def first_of(L, *dims):
    """Sizes in these dims of this rank's block; outside, of the first."""
    shape = L.local_shape(R if L.active else L.partition.ranks[0])
    return [shape[d] for d in dims]


def channels(L):
    return torch.ones(first_of(L, 1), dtype=torch.float64, requires_grad=True)


IMAGE = (4, 6, 12, 8)
GRIDS = {"batch": ("k", 1, 1, 1), "channels": (1, "k", 1, 1), "space": (1, 1, "k", 1)}


def filters(L, outs, ins, kernel=3):
    """This rank's block of the weights of ``outs`` output channels."""
    own = L.partition.local_shape((L.partition.size, outs, 1, 1), R if L.active else L.partition.ranks[0])[1]
    return randn(own, ins, kernel, kernel, seed=3).requires_grad_()


def conv(**options):
    def call(x, P, L, mark):
        w = filters(L, 12, 6)
        b = randn(w.shape[0], seed=4).requires_grad_()
        return F.dist_conv(x, *mark(w), P, *mark(b), **options), w, b

    return call


def conv_transpose(x, P, L, mark):
    w = filters(L, 12, 6).detach().transpose(0, 1).requires_grad_()
    return F.dist_conv_transpose(x, *mark(w), P, stride=2, padding=1), w


def of_x(function, *args, **options):
    return lambda x, P, L, mark: (function(x, P, *args, **options),)


def batch_norm(x, P, L, mark):
    w, b = channels(L), channels(L)
    return F.dist_batch_norm(x, P, None, None, *mark(w), *mark(b), True)[0], w, b


def of_channels(function, *args):
    def call(x, P, L, mark):
        w, b = channels(L), channels(L)
        return function(x, P, *args, *mark(w), *mark(b)), w, b

    return call


def layer_norm(x, P, L, mark):
    w = torch.ones(first_of(L, 2, 3), dtype=torch.float64, requires_grad=True)
    return F.dist_layer_norm(x, P, L.shape[2:], *mark(w)), w


def rms_norm(x, P, L, mark):
    w = torch.ones(first_of(L, 3), dtype=torch.float64, requires_grad=True)
    return F.dist_rms_norm(x, P, L.shape[3:], *mark(w)), w


def loss(function, **options):
    def call(x, P, L, mark):
        y = block(L, 8)
        return function(x, y, P, **options), y

    return call


def classes(**options):
    def call(x, P, L, mark):
        b, _, h, w = x.shape
        return (F.dist_cross_entropy(x, torch.zeros(b, h, w, dtype=torch.int64), P, **options),)

    return call


def several(function, dim):
    def call(x, P, L, mark):
        z = block(L, 9)
        return function([x, z], P if not isinstance(P, dd.Layout) else [P, P], dim), z

    return call


def flatten(x, P, L, mark):
    return (F.dist_flatten(x, P, dd.Partition((1, L.partition.size), L.partition.ranks)),)


LAYERS = {
    "conv, padding 1": conv(padding=1),
    "conv, stride 2": conv(stride=2, dilation=2, padding=(1, 2)),
    "conv_transpose": conv_transpose,
    "max_pool": of_x(F.dist_max_pool, 2),
    "max_pool, indices": lambda x, P, L, mark: F.dist_max_pool(x, P, 3, 2, 1, return_indices=True)[:1],
    "avg_pool": of_x(F.dist_avg_pool, 3, 2, 1, True),
    "l2_pool": of_x(F.dist_l2_pool, 2),
    "adaptive_max_pool": of_x(F.dist_adaptive_max_pool, (6, 3)),
    "adaptive_avg_pool": of_x(F.dist_adaptive_avg_pool, (6, None)),
    "global_avg_pool": of_x(F.dist_adaptive_avg_pool, 1),
    "interpolate, size": of_x(F.dist_interpolate, (18, 5)),
    "interpolate, factor": of_x(F.dist_interpolate, None, 1.5, "bilinear"),
    "interpolate, area": of_x(F.dist_interpolate, (6, 3), None, "area"),
    "batch_norm": batch_norm,
    "instance_norm": of_channels(F.dist_instance_norm),
    "group_norm": of_channels(F.dist_group_norm, 3),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "lcn": of_x(F.dist_lcn, 3),
    "dropout": of_x(F.dist_dropout, 0.5, 7),
    "dropout, evaluation": of_x(F.dist_dropout, 0.5, 7, training=False),
    "pad": of_x(F.dist_pad, (1, 2, 6, 6)),
    "pad, reflect": of_x(F.dist_pad, (1, 2), "reflect"),
    "flatten": flatten,
    "cat, 0": several(F.dist_cat, 0),
    "cat, 2": several(F.dist_cat, 2),
    "stack": several(F.dist_stack, 1),
    "sum": of_x(F.dist_sum),
    "sum over 1": of_x(F.dist_sum, 1),
    "mean over 2, kept": of_x(F.dist_mean, 2, True),
    "var over 0": of_x(F.dist_var, 0),
    "max over 3 and 1": of_x(F.dist_max, (3, 1)),
    "norm, inf": of_x(F.dist_norm, 1, ord=float("inf")),
    "norm": of_x(F.dist_norm, None, True),
    "logsumexp": of_x(F.dist_logsumexp, 2),
    "argmax": of_x(F.dist_argmax, 2),
    "mse": loss(F.dist_mse_loss),
    "mse, none": loss(F.dist_mse_loss, reduction="none"),
    "l1, sum": loss(F.dist_l1_loss, reduction="sum"),
    "cross_entropy": classes(),
    "cross_entropy, none": classes(reduction="none"),
}
MARKS = {"unmarked": lambda P: lambda w: (w,), "marked": lambda P: lambda w: (F.mark_varying(w, P),)}


def check(L, results):
    """The rule for ``(result, *parameters)`` of a call whose result's first block the first rank of L has."""
    y, *parameters = results
    told = WORLD.all_gather((tuple(y.shape), y.dtype, y.requires_grad), tuple(range(N)), "what ranks got")
    shape, dtype, requires_grad = told[L.partition.ranks[0]]
    assert told[R][1:] == (dtype, requires_grad)
    if not L.active:
        assert told[R][0] == ((0, *shape[1:]) if shape else ())
    if not requires_grad:
        return
    y.sum().backward()
    for p in parameters:
        assert p.grad is not None, "connected to every parameter"
        assert L.active or not p.grad.any()


@needs(2)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, grid):
    place = Place(*GRIDS[grid])
    L = place.layout(IMAGE)
    for P in (L, place.P):
        for mark in MARKS.values():
            x = block(L, 1)
            y, *parameters = LAYERS[name](x, P, L, mark(place.P))
            check(L, (y, x, *parameters))


SOME = (
    "conv, padding 1",
    "max_pool",
    "interpolate, factor",
    "layer_norm",
    "pad",
    "mse, none",
    "sum over 1",
    "cross_entropy, none",
    "stack",
)
UNEVEN = {"batch": (5, 6, 12, 8), "channels": (4, 7, 12, 8), "space": (4, 6, 13, 8)}


@needs(3)
@pytest.mark.parametrize("grid", UNEVEN)
@pytest.mark.parametrize("name", SOME)
def test_uneven_blocks(name, grid):
    """With a Layout, also where the first block is empty; and whatever this rank passes as x."""
    shape, d = UNEVEN[grid], list(UNEVEN).index(grid)
    if name == "conv, padding 1" and grid == "channels":
        return  # filters() has 6 channels
    place = Place(*GRIDS[grid])
    for splits in (None, tuple((0, *(1,) * (N - 3), shape[d] - N + 3) if i == d else None for i in range(4))):
        L = place.layout(shape, splits)
        for junk in (None, torch.zeros(2, dtype=torch.float64), torch.zeros(1, 1, 1, 1, dtype=torch.float64)):
            if name in ("cross_entropy, none", "conv, padding 1") and junk is not None and junk.dim() != 4:
                continue  # the test itself reads x's dims
            x = block(L, 1) if L.active or junk is None else junk.clone().requires_grad_()
            y, *parameters = LAYERS[name](x, L, L, lambda w: (w,))
            check(L, (y, x, *parameters))


MATRICES = {"batch": ("k", 1, 1), "out": (1, "k", 1), "in": (1, 1, "k")}


@needs(2)
@pytest.mark.parametrize("y_layout", ["root", "replicated", "invariant", "sharded"])
@pytest.mark.parametrize("grid", MATRICES)
def test_linear(grid, y_layout):
    place = Place(*MATRICES[grid])
    L = place.layout((12, 6, 12))  # batch, out, in
    at = L.partition.index() or (0, 0, 0)
    x_of = dd.Layout(dd.Partition((L.partition.shape[0], L.partition.shape[2]), _line(L, 1)), (12, 12))
    for P in (L, place.P):
        for params in ("varying", "invariant"):
            x = block(x_of, 1) if at[1] == 0 else torch.zeros(0, dtype=torch.float64).requires_grad_()
            w = block(dd.Layout(dd.Partition(L.partition.shape[1:], _plane(L)), (6, 12)), 2)
            b = torch.ones(w.shape[0], dtype=torch.float64, requires_grad=True)
            y = F.dist_linear(x, w, P, b, y_layout=y_layout, y_dim=0, params=params)
            check(L, (y, w, b) if at[1] else (y, x, w, b))
            y = F.dist_linear(x, w, P, b, y_layout=y_layout, y_dim=-1, params=params)
            check(L, (y, w, b))


def _line(L, dim):
    """The ranks at index 0 of ``dim``."""
    return L.partition.take(dim, 0).ranks


def _plane(L):
    """The ranks of this rank's plane of the last two dims; outside, of the first."""
    at = L.partition.index()
    return L.partition.take(0, at[0] if at else 0).ranks


@needs(2)
@pytest.mark.parametrize("y_layout", ["root", "replicated", "sharded"])
@pytest.mark.parametrize("grid", [(1, 1, "k", 1), (1, 1, 1, "k"), ("k", 1, 1, 1)])
def test_embedding(grid, y_layout):
    place = Place(*grid)
    L = place.layout((4, 6, 12, 6))  # batch, length, rows, columns
    b, n, rows, columns = first_of(L, 0, 1, 2, 3)
    for P in (L, place.P):
        for params in ("varying", "invariant"):
            w = randn(rows, columns, seed=1).requires_grad_()
            idx = torch.zeros(b, n, dtype=torch.int64)
            y = F.dist_embedding(idx, w, P, y_layout=y_layout, params=params)
            check(L, (y, w))


@needs(2)
@pytest.mark.parametrize("y_layout", ["root", "replicated", "sharded"])
@pytest.mark.parametrize("grid", [("k", 1, 1, 1, 1), (1, "k", 1, 1, 1), (1, 1, "k", 1, 1), (1, 1, 1, "k", 1)])
def test_the_general_convolution(grid, y_layout):
    """Of partition dims (batch, out, in, *space)."""
    place = Place(*grid)
    L = place.layout((4, 6, 6, 12, 8))
    b, outs, ins, h, w_ = first_of(L, 0, 1, 2, 3, 4)
    for shape in (None, (4, ins, 12, 8)):
        for params in ("varying", "invariant"):
            x = randn(b, ins, h, w_, seed=1).requires_grad_()
            w, bias = randn(outs, ins, 3, 3, seed=2).requires_grad_(), randn(outs, seed=3).requires_grad_()
            for function, kernel in ((F.dist_conv, w), (F.dist_conv_transpose, w.detach().transpose(0, 1))):
                kernel = kernel.detach().clone().requires_grad_()
                y = function(
                    x, kernel, place.P, bias, padding=1, shape=shape, params=params, x_layout="replicated",
                    y_layout=y_layout,
                )  # fmt: skip
                check(L, (y, x, kernel, bias))


@needs(2)
def test_experts():
    place = Place("k")
    k = place.P.size
    x, w = randn(3, 4, seed=1).requires_grad_(), randn(2, 5, 4, seed=2).requires_grad_()
    bias = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    expert = torch.arange(3) % (2 * k)
    y = F.dist_expert_linear(x, w, place.P, expert, bias, num_experts=2 * k)
    check(place.layout((3 * k,)), (y, x, w, bias))


@needs(2)
def test_neon():
    place = Place(1, 1, "k", 1)
    L = place.layout((2, 3, 12, 8))
    out = F.conv_layout(L, 4, 3)
    h, w_ = out.local_shape(R if out.active else place.P.ranks[0])[2:]
    even = len({*L.sizes(2)}) == len({*out.sizes(2)}) == 1  # else nobody outside of a bare partition can know
    for P in (L, place.P) if even else (L,):
        x, w = block(L, 1), randn(4, h, w_, 3, 3, 3, seed=2).requires_grad_()
        y = F.dist_local_conv(x, w, P)
        check(L, (y, x, w))
        z = F.dist_local_conv_transpose(y.detach().requires_grad_(), w, P if P is not L else out)
        check(L, (z, w))


@needs(2)
def test_what_no_layer_can_take():
    """With a bare partition: sizes that are too small for it say nothing against this rank; another number of dims says
    that nobody knows the result's sizes."""
    P = Place(1, 1, "k", 1).P
    L = dd.Layout(P, (2, 3, 6 * P.size, 8))
    w = randn(5, 3, 5, 5, seed=1).requires_grad_()
    for sizes, expected in (((0, 3, 1, 1), (0, 5, 1, 1)), ((7,), (0, 0, 0, 0)), ((), (0, 0, 0, 0))):
        x = block(L, 1) if P.active else torch.zeros(sizes, dtype=torch.float64, requires_grad=True)
        results = {
            "conv": F.dist_conv(x, w, P),
            "transpose": F.dist_conv_transpose(x, w.detach().transpose(0, 1), P, padding=4),
            "max_pool": F.dist_max_pool(x, P, 3),
            "interpolate": F.dist_interpolate(x, P, scale_factor=0.5),
            "pad": F.dist_pad(x, P, (-2, -2)),
            "norm": F.dist_batch_norm(x, P, None, None)[0],
            "sum": F.dist_sum(x, P, (0, 1), True),
            "loss": F.dist_mse_loss(x, x, P, "none"),
        }
        if not P.active:
            assert results["conv"].shape == expected
            assert all(y.dim() == 4 and y.shape[0] == 0 and y.requires_grad for y in results.values())
            assert sizes or results["loss"].shape == (0, 0, 0, 0)


@needs(2)
def test_autocast():
    """The dtype is torch's there too."""
    place = Place(1, 1, "k", 1)
    L = place.layout((2, 3, 12, 8))
    for P in (L, place.P):
        for call in (F.dist_conv, F.dist_conv_transpose):
            x = block(L, 1, dtype=torch.float32)
            w, b = (torch.ones(n, requires_grad=True) for n in ((3, 3, 3, 3), (3,)))
            with torch.autocast("cpu"):
                y = call(x, w, P, b, padding=1)
            check(L, (y, x, w, b))
        x = block(L, 1, dtype=torch.float16)
        with torch.autocast("cpu"):
            check(L, (F.dist_mse_loss(x, x, P, "none"), x))
