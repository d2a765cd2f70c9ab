"""dist_linear: every layout of x and y, and what is built from it."""

import itertools

import pytest
import torch
from serial import check_layer, messages, randn

import distdl as dd
import distdl.functional as F

LAYOUTS = ("root", "replicated", "invariant", "sharded")
GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    3: [(1, 3, 1), (1, 1, 3)],
    4: [(1, 2, 2), (2, 2, 1), (1, 1, 4)],
}


def grids(table=GRIDS):
    """The partitions to try on this world."""
    return [dd.Partition(g) for g in table.get(dd.world().size, [])]


def share(t, dim, k, i):
    """Block i of k of a dim."""
    a, e = dd.Layout(dd.Partition((k,)), (t.shape[dim],)).blocks(0)[i]
    return t.narrow(dim, a, e - a)


def places(P, x_layout, y_layout, n, out, in_):
    """Places of (x, w, b) and of y."""
    rows, o, i = dd.Layout(P, (n, out, in_)).slices()
    _, i_out, i_in = P.index()

    def part(t, how, k, at):
        if how == "sharded":
            return share(t, 0, k, at)
        return t[:0] if how == "root" and at else t

    return (
        [lambda x: part(x[rows, i], x_layout, P.shape[1], i_out), lambda w: w[o, i], lambda b: b[o]],
        lambda y: part(y[rows, o], y_layout, P.shape[2], i_in),
    )


@pytest.mark.parametrize("x_layout, y_layout", list(itertools.product(LAYOUTS, repeat=2)))
@pytest.mark.parametrize("known", [True, False])
def test_all_layouts(x_layout, y_layout, known):
    x, w, b = randn(5, 9), randn(7, 9, seed=1), randn(7, seed=2)
    for P in grids():
        inputs, out = places(P, x_layout, y_layout, 5, 7, 9)
        where = dd.Layout(P, (5, 7, 9)) if known else P
        independent = (x_layout == "replicated" and P.shape[1] > 1) or (y_layout == "replicated" and P.shape[2] > 1)
        check_layer(
            lambda x, w, b, P=where: F.dist_linear(
                x, w, P, b, x_layout=x_layout, y_layout=y_layout, params="invariant"
            ),
            torch.nn.functional.linear,
            [x, w, b],
            inputs,
            out,
            active=True,
            batched=(0,) if known else (),
            orders=0 if independent else 2,
            name=f"{P.shape} {x_layout} {y_layout}",
        )


def test_replicated_copies_are_independent():
    """Varying copies: each rank's copy of x has its own part of the gradient, and the parts add up to the serial
    one."""
    x, w, b = randn(5, 9), randn(7, 9, seed=1), randn(7, seed=2)
    c = randn(5, 7, seed=3)
    for P in grids():
        (px, pw, pb), out = places(P, "replicated", "replicated", 5, 7, 9)
        leaves = [p(t).clone().requires_grad_() for p, t in zip((px, pw, pb), (x, w, b))]
        y = F.dist_linear(*leaves[:2], P, leaves[2], x_layout="replicated", y_layout="replicated")
        share_of_loss = (y * out(c)).sum() / P.shape[2]  # every copy of y counts: k equal parts
        share_of_loss.backward()
        globals_ = [t.clone().requires_grad_() for t in (x, w, b)]
        (torch.nn.functional.linear(*globals_) * c).sum().backward()
        for t, g, place, dims in zip(leaves, globals_, (px, pw, pb), (1, 0, (0, 2))):
            total = F.all_sum_reduce(t.grad, P, dims)
            dd.testing.collective_assert(
                torch.allclose(total, place(g.grad), rtol=1e-10, atol=1e-10), f"{P.shape} {dims}"
            )


def test_column_then_row_gives_serial_gradients():
    """Megatron's block between invariant activations: not k times the gradients."""
    n = dd.world().size
    x, w1, w2 = randn(4, 6), randn(8, 6, seed=1), randn(6, 8, seed=2)
    column, row = dd.Partition((1, n, 1)), dd.Partition((1, 1, n))
    block = dd.Layout(dd.Partition((n,)), (8,)).slices()[0]

    def dist(x, w1, w2):
        h = F.dist_linear(x, w1, column, x_layout="invariant", y_layout="replicated").tanh()
        return F.dist_linear(h, w2, row, x_layout="replicated", y_layout="invariant")

    check_layer(
        dist,
        lambda x, w1, w2: torch.nn.functional.linear(torch.nn.functional.linear(x, w1).tanh(), w2),
        [x, w1, w2],
        [lambda t: t, lambda t: t[block], lambda t: t[:, block]],
        lambda t: t,
        active=True,
    )


def test_sequence_parallel_and_zero():
    """Rows of x sharded in and out; and weights sharded by rows, gathered before use (ZeRO-3)."""
    n = dd.world().size
    x, w = randn(7, 6), randn(5, 6, seed=1)
    line = dd.Partition((n,))
    rows, shard = (dd.Layout(line, (k,)).slices()[0] for k in (7, 5))
    sequence = dd.Partition((1, n, 1))
    check_layer(
        lambda x, w: F.dist_linear(x, w, sequence, x_layout="sharded", y_layout="replicated"),
        torch.nn.functional.linear,
        [x, w],
        [lambda t: t[rows], lambda t: t[shard]],
        lambda t: t[:, shard],
        active=True,
    )
    data = dd.Partition((n, 1))
    check_layer(
        lambda x, w: torch.nn.functional.linear(x, F.all_gather(w, data, {0: 0}, shape=(5, 6))),
        torch.nn.functional.linear,
        [x, w],
        [lambda t: t[rows], lambda t: t[shard]],
        lambda t: t[rows],
        active=True,
    )


def test_batch_dims_and_case_38_inactive():
    """More batch dims, split; ranks outside take part in nothing and break nothing."""
    n = dd.world().size
    P = dd.Partition((max(n - 1, 1), 1, 1, 1), tuple(range(n))[: max(n - 1, 1)])
    x, w, b = randn(5, 3, 4), randn(2, 4, seed=1), randn(2, seed=2)
    L = dd.Layout(dd.Partition((P.size, 1, 1), P.ranks), x.shape)
    check_layer(
        lambda x, w, b: F.dist_linear(x, w, dd.Layout(P, (5, 3, 2, 4)), b, params="invariant"),
        torch.nn.functional.linear,
        [x, w, b],
        [L, lambda t: t, lambda t: t],
        L.with_shape((5, 3, 2)),
    )


@pytest.mark.parametrize(
    "x_layout, y_layout",
    [("root", "root"), ("replicated", "replicated"), ("invariant", "invariant"), ("sharded", "sharded")],
)
def test_messages(x_layout, y_layout):
    """What the docstring says is sent, and no more."""
    if dd.world().size != 4:
        pytest.skip("a 2 x 2 grid")
    P = dd.Partition((1, 2, 2))
    (px, pw, _), _ = places(P, x_layout, y_layout, 4, 6, 8)
    _, i_out, i_in = P.index()
    x, w, kept = px(randn(4, 8)).clone().requires_grad_(), pw(randn(6, 8, seed=1)).clone().requires_grad_(), []

    def forward():
        kept[:] = [F.dist_linear(x, w, dd.Layout(P, (4, 6, 8)), x_layout=x_layout, y_layout=y_layout)]

    size_x, size_y = 4 * 4, 4 * 3
    there = {"root": (i_out == 0) * 1 + (i_in == 1) * 1, "sharded": 2}.get(x_layout, 0)
    elements = {"root": (i_out == 0) * size_x + (i_in == 1) * size_y, "sharded": (size_x + size_y) // 2}.get(
        x_layout, 0
    )
    reduced = {"replicated": (1, size_y), "invariant": (1, size_y)}.get(y_layout, (0, 0))
    found = messages(forward)
    dd.testing.collective_assert(found == (there, elements, *reduced, 0), f"forward {found}")
    back = {"root": (i_out == 1) * 1 + (i_in == 0) * 1, "sharded": 2}.get(x_layout, 0)
    elements = {"root": (i_out == 1) * size_x + (i_in == 0) * size_y, "sharded": (size_x + size_y) // 2}.get(
        x_layout, 0
    )
    reduced = {"replicated": (1, size_y), "invariant": (1, size_x)}.get(y_layout, (0, 0))
    found = messages(lambda: kept[0].sum().backward())
    dd.testing.collective_assert(found == (back, elements, *reduced, 0), f"backward {found}")


def test_bad_input():
    P = dd.Partition((1, dd.world().size, 1))
    with pytest.raises(dd.errors.PartitionError, match="x_layout"):
        F.dist_linear(randn(2, 3), randn(2, 3), P, x_layout="row")
    with pytest.raises(dd.errors.PartitionError, match="one dim for each"):
        F.dist_linear(randn(2, 3, 3), randn(2, 3), P, x_layout="replicated")
    with pytest.raises(dd.errors.ShapeError, match="w does not fit"):
        F.dist_linear(randn(2, 3), randn(2, 4), P, x_layout="replicated")


def test_autocast():
    """Autocast does to the local operations what it does in serial torch; movements carry whatever dtype comes."""
    n = dd.world().size
    x, w = randn(4, 6, dtype=torch.float32), randn(8, 6, seed=1, dtype=torch.float32)
    P = dd.Partition((1, n, 1))
    rows = dd.Layout(dd.Partition((n,)), (8,)).slices()[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = F.dist_linear(x, w[rows], P, x_layout="invariant", y_layout="replicated")
        expected = torch.nn.functional.linear(x, w)[:, rows]
    dd.testing.collective_assert(
        y.dtype == torch.bfloat16 and torch.equal(y, expected), "another result under autocast"
    )
