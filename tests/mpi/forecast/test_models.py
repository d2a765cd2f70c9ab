"""What whole models send on every rank, forward, backward and in an optimizer's step, is what their traces say."""

import sys
from pathlib import Path

import pytest
import torch
from test_traced import compared, sent

import distdl as dd
import distdl.functional as F
from distdl.programs import demo
from distdl.programs.bench import programs

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import gpt_model as gpt

N, RANK = dd.world().size, dd.world().rank


def agree(run, *parts):
    wrong = compared(run, parts)
    dd.testing.collective_assert(not wrong, wrong)


@pytest.mark.mpi(4)
def test_lenet():
    params = demo.shard(demo.initial(torch.float32))
    tile, y = demo.TILES.shard(torch.ones(8, 1, 28, 28)), torch.zeros(8, dtype=torch.long)

    def loss(x, *values):
        logits = demo.distributed(dict(zip(params, values)), x, len(y))
        return F.dist_cross_entropy(logits, y, dd.Layout(demo.Y_SIDE, (len(y), 10)))

    agree(loss, tile, *params.values())


@pytest.mark.parametrize("dims", [2, 3])
def test_unet(dims):
    P = dd.Partition((1, 1, N, *(1,) * (dims - 1)) if N != 4 else (1, 1, 2, 2, *(1,) * (dims - 2)))
    agree(lambda: programs.unet(P, (2, 1, *(14,) * dims), channels=4, levels=2)())


@pytest.mark.parametrize("grid", [(N, 1), (1, N)])
def test_mlp_and_stencil(grid):
    P = dd.Partition(grid)
    agree(lambda: programs.mlp(P, 9, 8, 10)())
    agree(lambda: programs.stencil(P, (13, 11))())


@pytest.mark.parametrize("grid", [(1, 1, N), (1, N, 1), (N, 1, 1)] + [(1, 2, 2)] * (N == 4))
def test_gpt_step(grid):
    sizes = gpt.Sizes(20)
    tokens = torch.zeros(200, dtype=torch.long)

    def step():
        places = gpt.Places(dd.Partition(grid), 4, 12)
        model = gpt.GPT(places, sizes)
        optimizer = gpt.optimizer_of(model)
        model.loss(*map(places.cut, gpt.batch(tokens, 0, 4, 12))).backward()
        dd.parallel.clip_grad_norm_(model, 1.0, places.P)
        optimizer.step()

    agree(step)


def test_fno():
    """Its spectral convolution: transforms of slabs."""
    L = dd.Layout(dd.Partition((1, 1, N, 1)), (2, 3, 8, 9))
    layer = dd.nn.FNOBlock(L, 3, 3, (2, 2))
    agree(lambda x: F.dist_mean(layer(x) ** 2, L), torch.ones(L.local_shape()))


DERIVATIVES = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "hvp": lambda f, x: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (x,)),
    "grad of grad": lambda f, x: torch.func.grad(lambda x: (torch.func.grad(lambda x: f(x).sum())(x) ** 2).sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    """The tie's and the batch's messages among them: as many, in the same order, agreements too."""
    L = dd.Layout(dd.Partition((1, 1, N)), (2, 3, 2 * N + 1))
    w = torch.ones(3, 3, 3)

    def f(x):
        y = F.dist_conv(x, w, L, padding=1)
        return y**2 if RANK else 2 * y  # rank 0's is linear

    with dd.testing.count_messages() as real:
        DERIVATIVES[name](f, torch.ones(L.local_shape()))
    found = dd.trace(lambda x: DERIVATIVES[name](f, x), torch.ones(L.local_shape()), size=N, rank=RANK).messages
    dd.testing.collective_assert(sent(found) == sent(real), f"traced {found}, sent {list(real)}")


@pytest.mark.mpi(2)  # one rank moves nothing
def test_a_job_goes_on():
    """A trace of another rank in a rank of a job: maps, layouts and results are its own again."""
    L, M = dd.Layout(dd.Partition((N, 1)), (2 * N + 1, 3)), dd.Layout(dd.Partition((1, N)), (2 * N + 1, 3))
    A, x = dd.maps.repartition(L, M), L.shard(torch.arange(3.0 * (2 * N + 1)).reshape(-1, 3))
    before = A(x)
    for rank in range(N):
        found = dd.trace(A, L, size=N, rank=rank)
        assert found.movements[0].shapes == (L.local_shape(rank),) or L.local_shape(rank) == (0, 3)
        assert sum(n for *_, n in found.messages) == 4 * A.plan.volume(rank)
    wrong = not torch.equal(A(x), before) or A.in_shape != L.local_shape() or dd.world().size != N
    dd.testing.collective_assert(not wrong, "the rank has forgotten who it is")
