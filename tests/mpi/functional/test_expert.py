"""Expert parallelism against one serial mixture of experts."""

import pytest
import torch
from serial import check_layer, messages, randn

import distdl as dd
import distdl.functional as F

TOKENS = 23
N, RANK = dd.world().size, dd.world().rank


def setting(experts):
    """(rows of x, this rank's experts, the expert of every token): uneven, with experts that nobody asks for."""
    n = dd.world().size
    line = dd.Partition((n,))
    rows = dd.Layout(dd.Partition((n, 1)), (TOKENS, 4))
    block = dd.Layout(line, (experts,)).slices()[0]
    chosen = (torch.arange(TOKENS) * 7 % 11) % max(experts - 1, 1)
    return line, rows, block, chosen


@pytest.mark.parametrize("experts", [1, 3, 8])
def test_linear(experts):
    line, rows, block, chosen = setting(experts)
    mine = chosen[rows.slices()[0]]

    def serial(x, w, b):
        return torch.einsum("ti,toi->to", x, w[chosen]) + b[chosen]

    check_layer(
        lambda x, w, b: F.dist_expert_linear(x, w, line, mine, b, num_experts=experts),
        serial,
        [randn(TOKENS, 4), randn(experts, 5, 4, seed=1), randn(experts, 5, seed=2)],
        [rows, lambda w: w[block], lambda b: b[block]],
        rows.with_shape((TOKENS, 5)),
        active=True,
    )


def test_two_layers_and_a_router():
    """A feed-forward network for each expert, its output weighted by a router whose gradient passes too."""
    line, rows, block, chosen = setting(4)
    part = rows.slices()[0]
    mine = chosen[part]

    def serial(x, w1, w2, gate):
        h = torch.einsum("ti,toi->to", x, w1[chosen]).tanh()
        share = (x @ gate).softmax(1).gather(1, chosen[:, None])
        return share * torch.einsum("ti,toi->to", h, w2[chosen])

    def dist(x, w1, w2, gate):
        gate = F.mark_varying(gate, line)
        y = F.expert_parallel(lambda k, t: (t @ w1[k].T).tanh() @ w2[k].T, x, mine, line, 4)
        return (x @ gate).softmax(1).gather(1, mine[:, None]) * y

    check_layer(
        dist,
        serial,
        [randn(TOKENS, 4), randn(4, 6, 4, seed=1), randn(4, 3, 6, seed=2), randn(4, 4, seed=3)],
        [rows, lambda w: w[block], lambda w: w[block], lambda g: g],
        rows.with_shape((TOKENS, 3)),
        active=True,
    )


def test_messages():
    """Each token goes to its expert's rank and back: no token of this rank's own experts is sent."""
    n, r = dd.world().size, dd.world().rank
    line, rows, block, chosen = setting(n)
    mine = chosen[rows.slices()[0]]
    x, w = rows.shard(randn(TOKENS, 4)), randn(1, 4, 4)
    away = {int(e) for e in mine if e != r}
    come = {q for q in range(n) if q != r and bool((chosen[rows.slices(q)[0]] == r).any())}
    tokens = int((mine != r).sum()) + sum(int((chosen[rows.slices(q)[0]] == r).sum()) for q in come)
    found = messages(lambda: F.dist_expert_linear(x, w, line, mine, num_experts=n))
    dd.testing.collective_assert(found[:2] == (len(away) + len(come), 4 * tokens), f"{found}")


def test_bad_input():
    line, rows, _, chosen = setting(dd.world().size)
    x, mine = rows.shard(randn(TOKENS, 4)), chosen[rows.slices()[0]]
    with pytest.raises(dd.errors.ShapeError, match="one expert for each token"):
        F.dist_expert_linear(x, randn(1, 4, 4), line, mine[1:], num_experts=9)
    with pytest.raises(dd.errors.ShapeError, match="no such expert"):
        F.dist_expert_linear(x, randn(1, 4, 4), line, mine + 99, num_experts=9)
    with pytest.raises(dd.errors.PartitionError, match="one dim"):
        F.dist_expert_linear(x, randn(1, 4, 4), rows.partition, mine, num_experts=9)


@pytest.mark.skipif(N < 2, reason="a rank without experts")
def test_a_rank_without_experts_joins_the_backward_of_what_f_uses():
    """Nothing that it passes has a gradient, and its peers' experts have parameters of their own."""
    experts, line = N - 1, dd.Partition((N,))
    weights = [randn(3, 2, seed=e).requires_grad_() for e in range(experts)]
    L = dd.Layout(line, (experts,))
    mine = weights[L.slices()[0]] if L.local_shape()[0] else []
    tokens, expert = randn(4, 3, seed=10 + RANK), torch.arange(4).add(RANK) % experts
    y = F.expert_parallel(lambda k, x: x @ mine[k], tokens, expert, line, experts)
    (y * (RANK + 1)).sum().backward()
    for e, w in zip(range(experts)[L.slices()[0]], mine):
        wanted = torch.zeros(3, 2, dtype=w.dtype)
        for r in range(N):
            chosen = randn(4, 3, seed=10 + r)[torch.arange(4).add(r) % experts == e]
            wanted += (r + 1) * chosen.sum(0)[:, None].expand(3, 2)
        assert torch.allclose(w.grad, wanted)
