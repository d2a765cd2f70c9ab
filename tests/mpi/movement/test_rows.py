"""Rows by their numbers: what an Index says once, what then travels, and in which order rows are added."""

import pytest
import torch
from registry import here, integers, needs, raises_everywhere, randn
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F
from distdl.testing import count_messages

# Of each rank how many distinct rows it wants of each of the blocks 26, 25, 25, 25: 31, 0, 92 and 5 in all.
TABLE = ((10, 4, 7, 10), (0, 0, 0, 0), (25, 23, 22, 22), (2, 0, 2, 1))
REQUESTS = (37, 0, 250, 5)
STARTS = (0, 26, 51, 76, 101)


def requests(r):
    """Rank r's row numbers by that table, repeated and in no order."""
    draw = torch.Generator().manual_seed(r)
    blocks = [a + torch.randperm(b - a, generator=draw)[:k] for a, b, k in zip(STARTS, STARTS[1:], TABLE[r])]
    distinct = torch.cat(blocks)
    again = torch.randint(max(len(distinct), 1), (REQUESTS[r] - len(distinct),), generator=draw)
    return torch.cat([distinct, distinct[again]])[torch.randperm(REQUESTS[r], generator=draw)]


def counted(call):
    with count_messages() as sent:
        y = call()
    return y, sent


def random_index(L, k=9):
    """(every rank's row numbers, the Index): many, none on rank 1, few on the last."""
    n = L.partition.size
    wanted = [torch.randint(L.shape[0], (0 if r == 1 else k + 3 * r,), generator=torch.Generator().manual_seed(r))
              for r in range(n)]  # fmt: skip
    return wanted, dd.Index(L, wanted[dd.world().rank])


@needs(4)
def test_acceptance():
    """101 rows over 4 ranks: 37, 0, 250 and 5 requests of 31, 0, 92 and 5 rows."""
    n, r, _ = here()
    L = dd.Layout(dd.Partition((4,)), (101,))
    if r > 3:
        return
    X, wanted = randn((101, 3), 1), requests(r)
    assert (len(wanted), len(wanted.unique())) == (REQUESTS[r], (31, 0, 92, 5)[r])
    index, made = counted(lambda: dd.Index(L, wanted))
    assert len(made.of("agree")) == 1 and index.counts == TABLE
    numbers = {o: 8 * k for o, k in enumerate(TABLE[r]) if o != r and k}  # the numbers go where rows come from
    assert {peer: size for _, peer, size in made.of("send")} == numbers
    x = X[STARTS[r] : STARTS[r + 1]].clone()
    y, sent = counted(lambda: F.gather_rows(x, index))
    assert torch.equal(y, X[wanted])
    assert sent.sends == 2 and sent.bytes == (648, 648, 216, 768)[r] and len(sent) == 2
    assert sent == counted(lambda: F.gather_rows(x, index))[1]
    back, came = counted(lambda: F.scatter_add_rows(y, index))
    assert came.bytes == sum(24 * k for o, k in enumerate(TABLE[r]) if o != r) and not came.of("agree")
    total = torch.zeros_like(X).index_add(0, torch.cat([requests(q) for q in range(4)]),
                                          torch.cat([X[requests(q)] for q in range(4)]))  # fmt: skip
    assert torch.allclose(back, total[STARTS[r] : STARTS[r + 1]], rtol=1e-14, atol=1e-14)
    assert dd.testing.dot_test(dd.maps.gather_rows(index, (3,))) <= 1e-13
    assert dd.testing.dot_test(dd.maps.scatter_add_rows(index, (3,))) <= 1e-13

    def loss(x):
        return (F.gather_rows(x, index) ** 3).sum()

    def serial(X):
        return sum((X.index_select(0, requests(q)) ** 3).sum() for q in range(4))

    V = randn((101, 3), 2)
    v, mine = V[STARTS[r] : STARTS[r + 1]].clone(), slice(STARTS[r], STARTS[r + 1])
    close = dict(rtol=1e-13, atol=1e-13)
    assert torch.allclose(grad(loss)(x), grad(serial)(X)[mine], **close)
    assert torch.allclose(jvp(grad(loss), (x,), (v,))[1], jvp(grad(serial), (X,), (V,))[1][mine], **close)


def test_known_is_the_same_without_a_message():
    n, r, P = here()
    L = dd.Layout(P, (3 * n + 2,))
    wanted, index = random_index(L)
    known, sent = counted(lambda: dd.Index.known(L, wanted))
    assert not sent and known.counts == index.counts and known == index and hash(known) == hash(index)
    assert (known.repeats.rows is None) == (index.repeats.rows is None) == (r == 1)
    for one, other in ((known.repeats, index.repeats), (known.serves, index.serves)):
        assert one.n == other.n and (one.rows is None or torch.equal(one.rows, other.rows))
    for a, b in ((known.distinct, index.distinct), (known.ghosts, index.ghosts), (known.local, index.local)):
        assert torch.equal(a, b)
    (a, b), own = L.box()[0], wanted[r].unique()
    assert torch.equal(index.local, own[(own >= a) & (own < b)])
    assert torch.equal(index.ghosts, own[(own < a) | (own >= b)])
    has = lambda q, rows: bool(((rows >= L.box(q)[0][0]) & (rows < L.box(q)[0][1])).any())
    assert index.peers == tuple(q for q in range(n) if q != r and (has(q, wanted[r]) or has(r, wanted[q])))


def test_equal_counts_are_not_equal_rows():
    n, r, P = here()
    L = dd.Layout(P, (4 * n,))
    first = torch.tensor([4 * ((r + 1) % n), 4 * r])
    A, B, C = dd.Index(L, first), dd.Index(L, first + 1), dd.Index(L, first.clone())
    assert A.counts == B.counts and A != B and A == C and hash(A) == hash(C)
    X = torch.arange(4.0 * n)
    x = L.shard(X).clone()
    assert torch.equal(F.gather_rows(x, B), X[first + 1]) and torch.equal(F.gather_rows(x, A), X[first])
    assert dd.maps.gather_rows(A, ()) is dd.maps.gather_rows(A) and dd.maps.gather_rows(A) == dd.maps.gather_rows(C)
    swapped = dd.Index(L, first.flip(0))  # the same rows in another order
    assert swapped != A and torch.equal(F.gather_rows(x, swapped), X[first.flip(0)])


def test_own_first():
    """Own rows are neither sent nor copied: what travels are the ghosts."""
    n, r, P = here()
    L = dd.Layout(P, (5 * n + 1,))
    wanted, index = random_index(L, 12)
    X = randn((5 * n + 1, 2), 3)
    x = X[slice(*L.box()[0])].clone()
    (ghosts, numbers), made = counted(lambda: index.own_first)
    assert not made
    g, sent = counted(lambda: F.gather_rows(x, ghosts))
    assert torch.equal(g, X[index.ghosts]) and len(numbers) == len(wanted[r])
    assert torch.equal(torch.cat([x, g])[numbers], X[wanted[r]])
    assert sent == counted(lambda: F.gather_rows(x, index))[1]
    assert ghosts.counts == tuple(tuple(0 if o == q else k for o, k in enumerate(row))
                                  for q, row in enumerate(index.counts))  # fmt: skip
    assert ghosts != index and ghosts.peers == index.peers
    C = randn((40 + 9 * n, 2), r)[: len(wanted[r])]
    first = grad(lambda x: (F.gather_rows(x, index).sin() * C).sum())(x)
    second = grad(lambda x: (torch.cat([x, F.gather_rows(x, ghosts)])[numbers].sin() * C).sum())(x)
    assert torch.allclose(first, second, rtol=1e-14, atol=1e-14)


def test_a_batch_is_one_message_set():
    n, r, P = here()
    L = dd.Layout(P, (3 * n + 2,))
    wanted, index = random_index(L)
    X = randn((4, 3 * n + 2, 2), 1)
    x = X[:, slice(*L.box()[0])].clone()
    y, sent = counted(lambda: vmap(lambda x: F.gather_rows(x, index))(x))
    assert torch.equal(y, X[:, wanted[r]])
    one = counted(lambda: F.gather_rows(x[0], index))[1]
    assert sorted((p, size) for _, p, size in sent.of("send")) == sorted((p, 4 * size) for _, p, size in one)
    back = vmap(vjp(lambda x: F.gather_rows(x, index), x[0])[1])(y)[0]
    for k in range(4):
        assert torch.equal(back[k], F.scatter_add_rows(y[k], index))
    tree, sent = counted(lambda: F.gather_rows({"a": x[0], "b": x[1].float()}, index))
    assert sent.sends == one.sends and torch.equal(tree["b"], X[1].float()[wanted[r]])


@needs(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_float32(dtype):
    """big + 1 + 1 ... in half precision would stay big: repetitions on one rank, and the same row on several."""
    n, r, P = here()
    big = {torch.float16: 2048, torch.bfloat16: 256}[dtype]
    L = dd.Layout(P, (n,))
    index = dd.Index(L, torch.zeros(9, dtype=torch.int64))
    y = torch.tensor([big, *[1] * 8], dtype=dtype)
    found = F.scatter_add_rows(y, index)
    assert found.dtype == dtype and found.tolist() == ([n * (big + 8)] if r == 0 else [0])
    index = dd.Index(L, torch.zeros(int(r < 2), dtype=torch.int64))
    y = torch.tensor([big if r == 0 else 2], dtype=dtype)[: int(r < 2)]
    assert F.scatter_add_rows(y, index).tolist() == ([big + 2] if r == 0 else [0])


def test_truth_values_and_integers():
    n, r, P = here()
    L = dd.Layout(P, (n + 1,))
    index = dd.Index(L, torch.zeros(256, dtype=torch.int32))  # 256 of them: no uint8 may count them
    b = F.scatter_add_rows(torch.ones(256, dtype=torch.bool), index)
    assert b.dtype == torch.bool and b.tolist() == [r == 0 and i == 0 for i in range(len(b))]
    i = F.scatter_add_rows(torch.full((256,), 3), index)
    assert i.dtype == torch.int64 and i.sum() == (768 * n if r == 0 else 0)
    for dtype in (torch.uint16, torch.float8_e4m3fn):
        x = L.shard(torch.arange(n + 1.0)).to(dtype)
        assert torch.equal(F.gather_rows(x, index).float(), torch.zeros(256))
        assert F.scatter_add_rows(torch.ones(256).to(dtype), index).dtype == dtype


def test_sums_are_reproducible():
    n, r, P = here()
    L = dd.Layout(P, (3,))
    index = dd.Index(L, torch.arange(2000) * 7 % 3)
    y = randn((2000, 5), r).float()
    first = F.scatter_add_rows(y, index)
    assert all(torch.equal(first, F.scatter_add_rows(y, index)) for _ in range(5))
    by_hand = torch.zeros(3, 5)  # ranks in rising order, within one in the order of its rows
    for q in range(n):
        by_hand += torch.zeros(3, 5).index_add(0, torch.arange(2000) * 7 % 3, randn((2000, 5), q).float())
    assert torch.equal(first, by_hand[slice(*L.box()[0])])


def test_a_layout_of_several_dims():
    """Each column of the grid finds its rows among its own ranks."""
    n, r, _ = here()
    if n % 2:
        return
    L = dd.Layout(dd.Partition((n // 2, 2)), (7, 5))
    X = randn((7, 5, 2), 1)
    wanted = torch.arange(r + 3) * 5 % 7
    index = dd.Index(L, wanted)
    y = F.gather_rows(X[L.slices()].clone(), index)
    assert torch.equal(y, X[wanted][:, L.slices()[1]])
    assert all((q - r) % 2 == 0 for q in index.peers)


def test_ranks_outside():
    n, r, _ = here()
    L = dd.Layout(dd.Partition((1,), (n - 1,)), (4,))
    index = dd.Index(L, torch.tensor([3, 0, 3]) if r == n - 1 else torch.zeros(0))
    y = F.gather_rows(torch.arange(8.0).reshape(4, 2) if r == n - 1 else torch.ones(1, 2), index)
    assert torch.equal(y, torch.tensor([[6.0, 7], [0, 1], [6, 7]])) if r == n - 1 else y.shape == (0, 2)
    assert index.peers == () and len(index.own_first[1]) == (3 if r == n - 1 else 0)


@needs(2)
def test_one_rank_alone_is_nonlinear():
    """The others' cotangents are constants: second derivatives then send the same messages on every rank."""
    n, r, P = here()
    L = dd.Layout(P, (2 * n,))
    wanted = torch.arange(2 * n).flip(0)
    index, X = dd.Index(L, wanted), randn((2 * n,), 4)
    x, v = L.shard(X).clone(), torch.ones(2, dtype=torch.float64)
    f = lambda x: F.gather_rows(x, index).pow(3).sum() if r == 0 else F.gather_rows(x, index).sum()
    assert torch.allclose(jvp(grad(f), (x,), (v,))[1], 6 * x)
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(z), z, create_graph=True)
    assert torch.allclose(torch.autograd.grad(g.sum(), z)[0], 6 * x)


def test_split_phase():
    n, r, P = here()
    L = dd.Layout(P, (2 * n,))
    index, X = dd.Index(L, torch.tensor([0, 2 * n - 1, 0])), integers((2 * n,))
    y = F.wait(F.start(dd.maps.gather_rows(index), L.shard(X).clone()))
    assert torch.equal(y, X[[0, 2 * n - 1, 0]])


def test_checked():
    """While every movement is compared before its messages."""
    n, r, P = here()
    L = dd.Layout(P, (3 * n + 1,))
    X, wanted = randn((3 * n + 1, 2), 1), torch.arange(2 * r, 3 * n + 1)
    x = X[slice(*L.box()[0])].clone()
    with dd.checking():
        index = dd.Index(L, wanted)
        g = grad(lambda x: F.gather_rows(x, index).pow(3).sum())(x)
        spec = dd.HaloSpec(dd.Layout(dd.Partition((n, 1)), X.shape), 1, boundary="circular", corners=False)
        F.halo_exchange(x, spec)
    count = sum(torch.arange(3 * n + 1) >= 2 * q for q in range(n))[slice(*L.box()[0])]
    assert torch.allclose(g, 3 * x**2 * count[:, None], rtol=1e-14)


# ---------------------------------------------------------------- wrong ones


def test_a_row_that_does_not_exist():
    """On one rank: the same error on every rank, which names the call, the rank, the row and the range."""
    n, r, P = here()
    L = dd.Layout(P, (7,))
    for row in (7, -1):
        wanted = torch.tensor([0, row if r == n - 1 else 3])
        text = raises_everywhere(dd.errors.AgreementError, lambda: dd.Index(L, wanted), "Index: there are no such rows",
                                 "0 <= row < 7", f"rank {n - 1}: row {row}", "Layout", "next step")  # fmt: skip
        assert len(set(dd.testing.gather_objects(text))) == 1
    raises_everywhere(dd.errors.AgreementError, lambda: dd.Index(dd.Layout(P, (0,)), torch.tensor([0])), "row 0")


def test_no_row_numbers():
    n, r, P = here()
    L = dd.Layout(P, (7,))
    for wanted in (torch.zeros(2), torch.ones(2, dtype=torch.bool)):
        raises_everywhere(dd.errors.AgreementError, lambda: dd.Index(L, wanted), str(wanted.dtype), "integers")
    two_dims = torch.zeros(2, 2, dtype=torch.int64) if r == 0 else torch.zeros(2, dtype=torch.int64)
    raises_everywhere(dd.errors.AgreementError, lambda: dd.Index(L, two_dims), "rank 0", "1 dim")
    raises_everywhere(dd.errors.AgreementError, lambda: dd.Index(L, [1, 2] if r == 0 else two_dims), "rank 0", "list")
    raises_everywhere(dd.errors.PartitionError, lambda: dd.Index(P, two_dims), "a Layout")
    raises_everywhere(dd.errors.PartitionError, lambda: F.gather_rows(torch.ones(2), L), "dd.Index(L, wanted)")
    raises_everywhere(dd.errors.PartitionError, lambda: dd.Index(L, torch.tensor([0])).of(0), "dd.Index.known")


@needs(2)
def test_layouts_differ():
    n, r, P = here()
    L = dd.Layout(P, (7 if r else 8,))
    raises_everywhere(dd.errors.AgreementError, lambda: dd.Index(L, torch.tensor([0])), "the arguments")


def test_wrong_blocks():
    n, r, P = here()
    index = dd.Index(dd.Layout(P, (2 * n,)), torch.tensor([0]))
    raises_everywhere(dd.errors.ShapeError, lambda: F.gather_rows(torch.ones(5, 3), index), "(2, 3)", "(5, 3)")
    raises_everywhere(dd.errors.ShapeError, lambda: F.scatter_add_rows(torch.ones(5, 3), index), "(1, 3)", "(5, 3)")
