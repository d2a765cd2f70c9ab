"""Attention across ranks against serial torch: every method, pattern and layout; messages by number."""

import itertools

import pytest
import torch
import torch.nn.functional as tf
from serial import check_layer, messages, randn
from torch.func import grad, vmap

import distdl as dd
import distdl.functional as F
from distdl.errors import AgreementError, DistdlError, PartitionError, ShapeError
from distdl.functional.attention_kernel import Pattern
from distdl.functional.attention_plan import cheaper, group, moved, windows_map

N, RANK = dd.world().size, dd.world().rank
METHODS = ["gather", "ring", "heads", *([("heads", 2)] if N == 4 else [])]
DOCUMENTS = {37: (0, 5, 20, 21, 37), 3: (0, 1, 3), 12: (0, 5, 12)}
PATTERNS = {
    "all": lambda S: {},
    "causal": lambda S: {"causal": True},
    "window": lambda S: {"window": 6},
    "causal window": lambda S: {"causal": True, "window": 2},
    "documents": lambda S: {"documents": DOCUMENTS[S]},
}


def keep_of(S, T, causal=False, window=None, documents=None):
    """Which queries see which keys, one by one: (S, T)."""

    def sees(i, j):
        near = window is None or abs(i - j) <= window
        same = documents is None or all((i < d) == (j < d) for d in documents)
        return near and same and (j <= i or not causal)

    return torch.tensor([[sees(i, j) for j in range(T)] for i in range(S)], dtype=torch.bool).reshape(S, T)


def serial(keep=None, bias=None, scale=None):
    """Attention of global tensors as it is written in books; rows that see nothing are 0."""

    def attention(q, k, v, *more):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        added = more[0] if more else bias
        s = s if added is None else s + added
        if keep is None:
            return s.softmax(-1) @ v
        seen = keep.any(-1, keepdim=True)
        weights = torch.where(seen, s.masked_fill(~keep & seen, -torch.inf), 0).softmax(-1)
        return torch.where(seen, weights @ v, 0)

    return attention


def over(shape, grid, ranks=None, splits=None):
    return dd.Layout(dd.Partition(grid, ranks), shape, splits)


def pair(L, heads, T=None, features=None):
    """The layouts of k and v for q's."""
    B, _, S, D = L.shape
    K = L.with_shape((B, heads, S if T is None else T, D))
    return K, K.with_shape((*K.shape[:3], D if features is None else features))


def inputs(*layouts):
    return [randn(*L.shape, seed=i + 1) for i, L in enumerate(layouts)]


# ---------------------------------------------------------------- values and derivatives


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_patterns(method, pattern):
    """All ranks along seq: uneven blocks, and (3 rows) an empty one; fewer heads of k than ranks."""
    for S, H, H_k, orders in ((37, 8, 2, 1), (3, 4, 1, 2)):
        L = over((2, H, S, 5), (1, 1, N, 1))
        options = PATTERNS[pattern](S)
        K, V = pair(L, H_k)
        check_layer(
            lambda q, k, v, L=L, o=options: F.dist_attention(q, k, v, L, method=method, **o),
            serial(keep_of(S, S, **options)),
            inputs(L, K, V),
            [L, K, V],
            L,
            rtol=1e-13,
            orders=orders,
            name=f"{S}",
        )


def places(shape):
    """Grids: batch, heads and seq split, ranks left out and in another order, empty blocks first."""
    found = {"batch": over(shape, (N, 1, 1, 1)), "heads": over(shape, (1, N, 1, 1))}
    if N > 2:
        found["outside"] = over(shape, (1, 1, N - 1, 1), tuple(range(N - 1, 0, -1)))
    if N == 4:
        found["heads x seq"] = over(shape, (1, 2, 2, 1), (2, 0, 3, 1))
        found["batch x seq"] = over(shape, (2, 1, 2, 1))
        found["splits"] = over(shape, (1, 1, 4, 1), None, (None, None, (0, 7, 1, 4), None))
    return found


@pytest.mark.parametrize("name", places((2, 4, 12, 3)))
@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_places(method, name):
    L = places((2, 4, 12, 3))[name]
    K, V = pair(L, 2, features=2)
    out = L.with_shape((2, 4, 12, 2))
    check_layer(
        lambda q, k, v: F.dist_attention(q, k, v, L, method=method, causal=True, kv_shape=K),
        serial(keep_of(12, 12, causal=True)),
        inputs(L, K, V),
        [L, K, V],
        out,
        rtol=1e-12,
        active=L.active,
    )


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("T", [2, 9])  # of one key nothing would depend on q
def test_another_length(method, T):
    """Cross attention; rows beyond the keys see, with a window, nothing: 0, and so are their gradients."""
    L = over((1, 4, 6, 3), (1, 1, N, 1))
    K, V = pair(L, 4, T)
    for options in ({}, {"window": 2}):
        check_layer(
            lambda q, k, v, o=options: F.dist_attention(q, k, v, L, method=method, kv_shape=K.shape, **o),
            serial(keep_of(6, T, **options)),
            inputs(L, K, V),
            [L, K, V],
            L,
            rtol=1e-12,
            name=f"{options}",
        )


@pytest.mark.parametrize("kernel", ["fused", "math"])
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_masks(method, kernel):
    """True or false, numbers, and functions; a row that sees nothing gets 0, and no NaN in any gradient."""
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    K, V = pair(L, 2)
    keep = randn(9, 9, seed=7) > 0
    keep[4] = False
    per_head = randn(1, 4, 9, 9, seed=8) > -0.5
    bias = randn(2, 1, 9, 9, seed=9)
    far = torch.where(keep, 0.0, -torch.inf).double()
    i, j = torch.arange(9)[:, None], torch.arange(9)
    for mask, what in (
        (keep, serial(keep)),
        (per_head, serial(per_head)),
        (bias, serial(bias=bias)),
        (far, serial(keep)),
        (lambda i, j: (i + j) % 3 > 0, serial((i + j) % 3 > 0)),
        (
            lambda i, j: -0.5 * (i - j).abs().double(),
            serial(bias=-0.5 * (i - j).abs()),
        ),
    ):
        check_layer(
            lambda q, k, v, m=mask: F.dist_attention(q, k, v, L, mask=m, method=method, kernel=kernel),
            what,
            inputs(L, K, V),
            [L, K, V],
            L,
            rtol=1e-12,
            orders=0 if kernel == "fused" else 1,
        )
    q, k, v = (A.shard(x).requires_grad_() for A, x in zip((L, K, V), inputs(L, K, V)))
    F.dist_attention(q, k, v, L, mask=keep, method=method, kernel=kernel).pow(3).sum().backward()
    X = [x.requires_grad_() for x in inputs(L, K, V)]
    serial(keep)(*X).pow(3).sum().backward()
    for A, found, whole in zip((L, K, V), (q, k, v), X):
        torch.testing.assert_close(found.grad, A.shard(whole.grad), rtol=1e-12, atol=1e-13)


def test_gradient_of_a_mask():
    """A bias table is one value on all ranks: marked, its gradient is the serial one."""
    L = over((1, 2, 8, 3), (1, 1, N, 1))
    bias = randn(2, 8, 8, seed=4)
    check_layer(
        lambda q, k, v, b: F.dist_attention(q, k, v, L, mask=F.mark_varying(b, L.partition), method="ring"),
        serial(),
        [*inputs(L, L, L), bias],
        [L, L, L, lambda b: b],
        L,
        rtol=1e-12,
    )


def zigzag(n):
    """The positions that each rank has: of 2N balanced chunks the i-th and the i-th from the end."""
    chunks = torch.arange(n).tensor_split(2 * N)
    return [torch.cat([chunks[i], chunks[2 * N - 1 - i]]) for i in range(N)]


@pytest.mark.parametrize("n", [16, 13])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_positions(method, n):
    order = zigzag(n)
    rows = torch.cat(order)
    L = over((1, 4, n, 3), (1, 1, N, 1), None, (None, None, tuple(map(len, order)), None))
    keep = keep_of(n, n, causal=True, window=7)[rows][:, rows]
    check_layer(
        lambda q, k, v: F.dist_attention(q, k, v, L, causal=True, window=7, positions=order[RANK], method=method),
        serial(keep),
        inputs(L, L, L),
        [L, L, L],
        L,
        rtol=1e-12,
    )


@pytest.mark.parametrize("n", [16, 13, 3])
@pytest.mark.parametrize("order", ["zigzag", 2], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_order_by_name(method, order, n):
    """The same as by positions: by every kernel, with other patterns, and no message more than without an order."""
    rows = [F.positions(over((1, 4, n, 3), (1, 1, N, 1)), 2, order, rank=r) for r in range(N)]
    whole = torch.cat(rows)
    L = over((1, 4, n, 3), (1, 1, N, 1), None, (None, None, tuple(map(len, rows)), None))
    for options in ({"causal": True}, {"causal": True, "window": 2}, {"documents": (0, 2, n)}):
        keep = keep_of(n, n, **options)[whole][:, whole]
        check_layer(
            lambda q, k, v, o=options: F.dist_attention(q, k, v, L, order=order, method=method, **o),
            serial(keep),
            inputs(L, L, L),
            [L, L, L],
            L,
            rtol=1e-12,
        )
    Q, K, V = inputs(L, L, L)
    Q, K, V = (t.double() for t in (Q, K, V))
    leaves = [L.shard(t).clone().requires_grad_() for t in (Q, K, V)]
    W = randn(1, 4, n, 3, seed=9)
    with dd.testing.count_messages() as by_name:
        y = F.dist_attention(*leaves, L, order=order, method=method, causal=True)
    expected = serial(keep_of(n, n, causal=True)[whole][:, whole])
    torch.testing.assert_close(y, L.shard(expected(Q, K, V)), rtol=1e-12, atol=1e-14)
    found = torch.autograd.grad((y * L.shard(W)).sum(), leaves)
    wished = grad(lambda *t: (expected(*t) * W).sum(), (0, 1, 2))(Q, K, V)
    for a, b in zip(found, wished):
        torch.testing.assert_close(a, L.shard(b), rtol=1e-12, atol=1e-14)
    with dd.testing.count_messages() as without:
        F.dist_attention(*(t.detach() for t in leaves), L, method=method)
    assert by_name == without


@pytest.mark.mpi(2)
def test_an_order_that_is_none():
    L = over((1, 2, 16, 4), (1, 1, N, 1), None, (None, None, (16 - (N - 1), *[1] * (N - 1)), None))
    q = torch.zeros(L.local_shape())
    with pytest.raises(dd.errors.ShapeError, match="rows in this order lie in other blocks"):
        F.dist_attention(q, q, q, L, causal=True, order="zigzag")
    with pytest.raises(dd.errors.PartitionError, match="not an order of the rows"):
        F.dist_attention(q, q, q, L, causal=True, order="snake")
    L = F.reorder_layout(L, 2, "zigzag")
    q = torch.zeros(L.local_shape())
    with pytest.raises(dd.errors.PartitionError, match="the rows' places are given twice"):
        F.dist_attention(q, q, q, L, order="zigzag", positions=F.zigzag_positions(L, 2))


def test_an_order_of_two_lengths():
    """Rows of q and of k in one order are those of one sequence: every rank hears of both lengths."""
    for P in (dd.Partition((1, 1, N, 1)), dd.Partition((1, 1, 1, 1), ranks=(N - 1,))):
        L, M = (F.reorder_layout(dd.Layout(P, (1, 2, n, 4)), 2, "zigzag") for n in (16, 12))
        q, k = (torch.zeros(place.local_shape()) for place in (L, M))
        for place, options in ((L, {"kv_shape": M}), (P, {})):
            if place is P and not P.active:
                continue  # it hears of nothing
            with pytest.raises(dd.errors.ShapeError) as caught:
                F.dist_attention(q, k, k, place, causal=True, order="zigzag", **options)
            error = caught.value
            assert error.op == "dist_attention" and "16, where order=" in error.expected
            assert error.actual == "12 rows of k, order='zigzag'" and error.partitions == (L, M)


@pytest.mark.mpi(2)
def test_blocks_of_other_sizes_are_named():
    """Where shapes are equal and blocks are not, the error shows the blocks, not two equal shapes."""
    P = dd.Partition((N, 1, 1, 1))
    sizes = [1] * N
    sizes[0], sizes[-1] = 2, 0
    L, M = dd.Layout(P, (N, 1, 4, 2)), dd.Layout(P, (N, 1, 4, 2), (tuple(sizes), None, None, None))
    q, k = (torch.zeros(place.local_shape()) for place in (L, M))
    for a, b in ((k, k), (q, k), (k, q)):
        with pytest.raises(dd.errors.PartitionError, match="one batch in the same blocks") as caught:
            F.dist_attention(q, a, b, P)
        assert str(tuple(sizes)) in str(caught.value)
    P = dd.Partition((1, 1, N, 1, 1))
    L, M = (dd.Layout(P, (1, 1, 4 * N, 4, 2), s) for s in (None, (None, None, (5, 3, *[4] * (N - 2)), None, None)))
    q, k = (torch.zeros(place.local_shape()) for place in (L, M))
    with pytest.raises(dd.errors.ShapeError, match="lie in different blocks") as caught:
        F.dist_neighborhood_attention(q, k, k, P, 3)
    assert caught.value.expected == L and caught.value.actual == [L, M, M]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_zeros_stay_zeros(method):
    """No logarithm of values: a feature of v that is 0 everywhere gives exactly 0 (a merge by log|o| gives NaN)."""
    L = over((1, 4, 8, 3), (1, 1, N, 1))
    q, k, v = inputs(L, L, L)
    v[..., 0] = 0
    v = L.shard(v).clone().requires_grad_()
    y = F.dist_attention(L.shard(q), L.shard(k), v, L, method=method, causal=True)
    assert torch.equal(y[..., 0], torch.zeros_like(y[..., 0]))
    (g,) = torch.autograd.grad(y.sum(), v)
    assert g.isfinite().all()


def test_large_scores():
    """Scores of a thousand do not overflow, in any order of blocks."""
    L = over((1, 4, 8, 3), (1, 1, N, 1))
    q, k, v = inputs(L, L, L)
    q = q * 1000
    for method in METHODS:
        found = F.dist_attention(L.shard(q), L.shard(k), L.shard(v), L, method=method)
        torch.testing.assert_close(found, L.shard(serial()(q, k, v)), rtol=1e-9, atol=1e-12)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_keys_of_one_rank_from_queries_of_another(method):
    """The gradient of k on rank 0 from queries of rank 3 alone (huggingface/diffusers#14265: a ring's backward with the
    wrong keys is right forward, and wrong here)."""
    L = over((1, 4, 8, 3), (1, 1, 4, 1))
    Q, K, V = inputs(L, L, L)
    W = torch.zeros(1, 4, 8, 3, dtype=torch.float64)
    W[:, :, 6:] = randn(1, 4, 2, 3, seed=5)
    k = L.shard(K).clone().requires_grad_()
    y = F.dist_attention(L.shard(Q), k, L.shard(V), L, method=method, causal=True)
    (y * L.shard(W)).sum().backward()
    expected = grad(lambda k: (serial(keep_of(8, 8, causal=True))(Q, k, V) * W).sum())(K)
    assert expected[:, :, :2].abs().min() > 0
    torch.testing.assert_close(k.grad, L.shard(expected), rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- messages

FOUR = over((2, 8, 37, 5), (1, 1, 4, 1))
KV = FOUR.with_shape((2, 2, 37, 5))
BYTES = {
    "all": ({}, [9600, 8640, 8640, 8640], [3, 3, 3, 3]),
    "causal": ({"causal": True}, [9600, 5760, 2880, 0], [3, 2, 1, 0]),
    "window": ({"window": 6}, [1920, 3840, 3840, 1920], [1, 2, 2, 1]),
    "causal window": ({"causal": True, "window": 6}, [1920, 1920, 1920, 0], [1, 1, 1, 0]),
    "documents": ({"causal": True, "documents": DOCUMENTS[37]}, [3200, 2880, 2240, 0], [2, 1, 1, 0]),
}


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    """A rank sends what others see of it: 320 bytes for a row of keys and values; and gets as many cotangents back."""
    options, sent, count = BYTES[name]
    plan = F.attention_needs(FOUR, KV, **options).plan()
    assert [2 * 8 * plan.volume(r) for r in range(4)] == sent
    assert [plan.messages(r) for r in range(4)] == count
    q, k, v = (A.shard(x).requires_grad_() for A, x in zip((FOUR, KV, KV), inputs(FOUR, KV, KV)))
    # v begins at a multiple of 64 bytes of a message
    places = lambda plan: sum(-(-8 * m.volume // 64) * 8 + m.volume for m in plan.view(RANK).sends)
    y = []
    forward = messages(lambda: y.append(F.dist_attention(q, k, v, FOUR, method="gather", **options)))
    assert forward == (count[RANK], places(plan), 0, 0, 0)
    transposed = plan.T
    backward = messages(lambda: y[0].sum().backward())
    assert backward == (transposed.messages(RANK), places(transposed), 0, 0, 0)
    ring = messages(lambda: y.append(F.dist_attention(q, k, v, FOUR, method="ring", **options)))
    assert ring == forward
    both = messages(lambda: y[1].sum().backward())
    assert both == (forward[0] + backward[0], forward[1] + backward[1], 0, 0, 0)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("heads", [1, 2])
def test_fewer_heads_than_ranks(heads):
    """With "heads" a key's head is copied to the ranks of its query heads; nobody repeats heads first."""
    K = FOUR.with_shape((2, heads, 37, 5))
    plan = windows_map(group(FOUR, 4), K, Pattern()).plan
    assert [8 * plan.volume(r) for r in range(4)] == [2400, 2160, 2160, 2160]
    assert [plan.messages(r) for r in range(4)] == [3] * 4


@pytest.mark.mpi(4)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 6}], ids=str)
def test_auto_moves_less(options):
    """What "auto" compares is what the plans move."""
    for H, H_k in ((8, 8), (8, 2), (8, 1), (32, 4), (2, 2)):
        Q, K, pattern = FOUR.with_shape((2, H, 37, 5)), FOUR.with_shape((2, H_k, 37, 5)), Pattern(**options)
        found = {}
        for u in (1, 4):
            there = group(Q, u)
            plans = [windows_map(there, K, pattern).plan] * 2
            plans += [] if u == 1 else [dd.maps.repartition(Q, there).plan, dd.maps.repartition(there, Q).plan]
            found[u] = sum(p.volume(r) for p in plans for r in range(4))
            assert moved(Q, K, K, pattern, u) == found[u]
        assert cheaper(Q, K, K, pattern) == ("heads" if found[4] < found[1] and H >= 4 else "gather")
    assert cheaper(FOUR, FOUR, FOUR, Pattern()) == "heads"
    assert cheaper(FOUR, KV, KV, Pattern()) == "gather"


def test_one_set_under_vmap():
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    q, k, v = (torch.stack([L.shard(x), L.shard(x)]) for x in inputs(L, L, L))
    call = lambda *x: F.dist_attention(*x, L, method="gather", causal=True)
    single = messages(lambda: call(q[0], k[0], v[0]))
    batched = messages(lambda: vmap(call)(q, k, v))
    assert batched == (single[0], 2 * single[1], 0, 0, int(N > 1))  # ranks agree on the batch


# ---------------------------------------------------------------- kernels


def test_fused_has_first_derivatives():
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    x = [L.shard(x).clone() for x in inputs(L, L, L)]
    losses = [
        lambda *x, kernel=kernel: F.dist_attention(*x, L, causal=True, kernel=kernel, method="gather").pow(3).sum()
        for kernel in ("fused", "math")
    ]
    for a, b in zip(*(grad(f, (0, 1, 2))(*x) for f in losses)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    for further in (
        lambda: torch.func.jvp(losses[0], tuple(x), tuple(x)),
        lambda: grad(lambda q: grad(losses[0])(q, *x[1:]).sum())(x[0]),
        lambda: grad(losses[0])(x[0].requires_grad_(), *x[1:]).sum(),
    ):
        with pytest.raises(PartitionError, match="math"):
            further()


def test_create_graph_says_math():
    """Plain autograd tells only when the graph of a backward is used."""
    L = over((2, 4, 4 * N, 3), (1, 1, N, 1))
    q, k, v = (L.shard(x).clone().requires_grad_() for x in inputs(L, L, L))
    y = F.dist_attention(q, k, v, L, causal=True, kernel="fused", method="gather")
    (g,) = torch.autograd.grad(y.pow(2).sum(), q, create_graph=True)
    with pytest.raises(DistdlError, match=r'kernel="math"'):
        g.pow(2).sum().backward()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_half_precision(method):
    """At most twice the error of one rank; the gradients of keys, which all ranks add to, too."""
    L = over((1, 4, 64, 8), (1, 1, N, 1))
    K = L.with_shape((1, 4, 64, 8))
    X = [x.bfloat16() for x in inputs(L, K, K)]
    W = randn(*L.shape, seed=6).bfloat16()

    def slopes(f, x, w):
        leaves = [t.clone().requires_grad_() for t in x]
        y = f(*leaves)
        (y * w).sum().backward()
        return [y.detach(), *(t.grad for t in leaves)]

    true = slopes(serial(), [x.double() for x in X], W.double())
    alone = slopes(tf.scaled_dot_product_attention, X, W)
    found = slopes(lambda *x: F.dist_attention(*x, L, method=method), [L.shard(x) for x in X], L.shard(W))
    for a, b, c in zip(true, alone, found):
        assert c.dtype == torch.bfloat16
        bound = (b.double() - a).abs().max()
        assert (c.double() - L.shard(a)).abs().max() <= 2 * bound


@pytest.mark.mpi(4)
def test_a_ring_keeps_nothing_that_came():
    """Saved for backward: own tensors, and two numbers of each query for each step."""
    L = over((1, 4, 256, 16), (1, 1, 4, 1))

    def saved(method):
        q, k, v = (L.shard(x).clone().requires_grad_() for x in inputs(L, L, L))
        kept = {}

        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            F.dist_attention(q, k, v, L, method=method, kernel="math")
        return sum(kept.values())

    own = 64 * 4 * 16 * 8
    few = 64 * 4 * 8
    assert saved("ring") <= 5 * own + 4 * 4 * few  # q, k, v, numerator; and what each merge weighs by
    assert saved("gather") > 10 * own


# ---------------------------------------------------------------- training


def test_transformer():
    """Two blocks, 20 steps: the sequential network's losses and parameters."""
    B, S, E, H = 2, 4 * N + 1, 8, 4
    L = over((B, H, S, E // H), (1, 1, N, 1))
    rows = dd.Layout(dd.Partition((1, N, 1)), (B, S, E))
    X, Y = randn(B, S, E, seed=1), randn(B, S, E, seed=2)

    def network(attend, mark):
        shapes = [(E, 3 * E), (E, E)] * 2
        params = [(0.3 * randn(*shape, seed=9 + i)).requires_grad_() for i, shape in enumerate(shapes)]

        def forward(x):
            for a, b in zip(*[iter(map(mark, params))] * 2):
                q, k, v = (x @ a).unflatten(-1, (3 * H, E // H)).transpose(1, 2).chunk(3, 1)
                x = x + torch.tanh(attend(q, k, v).transpose(1, 2).flatten(2) @ b)
            return x

        return params, forward

    def train(params, loss):
        curve, optimizer = [], torch.optim.SGD(params, 5e-4, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            curve.append(float(value.detach()))
        return curve

    params, forward = network(
        lambda q, k, v: F.dist_attention(q, k, v, L, causal=True), lambda p: F.mark_varying(p, rows.partition)
    )
    found = train(params, lambda: F.dist_sum((forward(rows.shard(X)) - rows.shard(Y)) ** 2, rows))
    whole, alone = network(serial(keep_of(S, S, causal=True)), lambda p: p)
    expected = train(whole, lambda: ((alone(X) - Y) ** 2).sum())
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=0)
    for a, b in zip(params, whole):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- bare partitions and wrong arguments


def test_bare_partition():
    """Blocks of all three tensors are asked for in one agreement."""
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    K, V = pair(L, 2, 7)
    q, k, v = (A.shard(x) for A, x in zip((L, K, V), inputs(L, K, V)))
    y = F.dist_attention(q, k, v, L.partition, method="ring")
    torch.testing.assert_close(y, L.shard(serial()(*inputs(L, K, V))), rtol=1e-12, atol=1e-14)
    assert messages(lambda: F.dist_attention(q, k, v, L.partition))[4] == (1 if N > 1 else 0)


WRONG = {
    "window": (dict(window=-1), PartitionError, "at least 0"),
    "documents": (dict(documents=(0, 5, 5, 9)), PartitionError, "larger than the one before"),
    "cover": (dict(documents=(0, 5, 8)), PartitionError, "9 queries and 9 keys"),
    "mask": (dict(mask=torch.ones(9, 8, dtype=torch.bool)), ShapeError, r"\(9, 8\)"),
    "method": (dict(method="scatter"), PartitionError, "got scatter"),
    "u": (dict(method=("heads", 7)), PartitionError, "a divisor of"),
    "kernel": (dict(kernel="flash"), PartitionError, "got flash"),
    "positions": (dict(positions=torch.zeros(17, dtype=torch.int64)), ShapeError, "each of this rank's rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name):
    options, kind, words = WRONG[name]
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    x = [L.shard(x) for x in inputs(L, L, L)]
    with pytest.raises(kind, match=words) as caught:
        F.dist_attention(*x, L, **options)
    assert caught.value.op == "dist_attention"
    assert "Partition" in str(caught.value) or "Layout" in str(caught.value)


@pytest.mark.skipif(N == 1, reason="one rank's ring has one step")
def test_wrong_kernel_of_a_ring():
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    with pytest.raises(PartitionError, match="merge blocks"):
        F.dist_attention(*[L.shard(x) for x in inputs(L, L, L)], L, method="ring", kernel="fused")


def test_wrong_tensors():
    L = over((2, 4, 9, 3), (1, 1, N, 1))
    q, k, v = (L.shard(x) for x in inputs(L, L, L))
    three = L.with_shape((2, 3, 9, 3))
    for wrong, kind, words in (
        ((q, three.shard(randn(*three.shape)), three.shard(randn(*three.shape))), ShapeError, "4 heads of q, 3 of k"),
        ((q, k[..., :2], v), ShapeError, "k is not this rank's block"),
        ((q, k, v.float()), ShapeError, "one dtype"),
        ((q.to(torch.complex128), k, v), ShapeError, "floating"),
        ((q, k, None), ShapeError, "v is not a tensor"),
    ):
        with pytest.raises(kind, match=words):
            F.dist_attention(*wrong, L)
    with pytest.raises((ShapeError, AgreementError)):
        F.dist_attention(q, k[:, :3], v[:, :3], L.partition)
    split = over(L.shape, (1, 1, 1, N)) if N > 1 else dd.Partition((1, 1, 1))
    with pytest.raises(PartitionError, match="features"):
        F.dist_attention(*(split.shard(x) if N > 1 else x for x in inputs(L, L, L)), split)


def test_patterns_by_hand():
    """The range of keys of a block of queries is what the mask, one by one, says."""
    for options in [PATTERNS[name](37) for name in PATTERNS]:
        keep, pattern = keep_of(37, 37, **options), Pattern(**options)
        for a, b in itertools.combinations(range(0, 38, 3), 2):
            seen = keep[a:b].any(0).nonzero()
            assert pattern.keys(a, b, 37) == (int(seen.min()), int(seen.max()) + 1)
