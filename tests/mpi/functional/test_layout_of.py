"""F.layout_of: from every rank's block the Layout, the same on all ranks that take part."""

import pytest
import torch
from serial import layouts, randn

import distdl as dd
import distdl.functional as F
from distdl.errors import AgreementError, PartitionError, ShapeError

WORLD = dd.world()
R, N = WORLD.rank, WORLD.size


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_blocks_of_any_sizes(dtype):
    """Uneven, empty, on some ranks, on grids: one agreement, and nothing else."""
    for shape in ((7, 2 * N + 1), (1, 3), (0, 4)):
        for L in layouts(shape).values():
            x = L.shard(randn(*shape).to(dtype))
            with dd.testing.count_messages() as sent:
                found = F.layout_of(x, L.partition)
            assert found == (L if L.active else None)
            assert len(sent.of("agree")) == len(sent) == int(L.active and L.partition.size > 1)
            with dd.testing.count_messages() as sent:
                assert F.layout_of(x, L) == L and not len(sent)  # known already, on every rank


def test_ranks_that_x_is_to_go_to():
    """They hear of it too, whatever they pass; and what was asked for serves a call without negotiation."""
    P, Q = dd.Partition((1, 1), ranks=(N - 1,)), dd.Partition((N, 1))
    L = dd.Layout(P, (5, 3))
    X = randn(5, 3)
    x = X.clone().requires_grad_() if P.active else None
    assert F.layout_of(x, P, Q) == L
    assert F.layout_of(x, P, dd.Layout(Q, (9, 9)), P) == L  # of a Layout its ranks count
    x = x if P.active else torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
    with dd.testing.count_messages() as sent:
        y = F.repartition(x, L, Q)
    assert torch.equal(y, Q.shard(X)) and not sent.of("agree")


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_inside_transforms(transform):
    """Of a batch it is the layout of one example."""
    P = dd.Partition((N, 1))
    L = dd.Layout(P, (2 * N + 1, 3))
    seen = []

    def f(x):
        seen.append(F.layout_of(x, P))
        return (x**2).sum()

    x = L.shard(randn(*L.shape))
    if transform == "vmap":
        torch.func.vmap(f)(torch.stack([x, x]))
    elif transform == "grad":
        assert torch.equal(torch.func.grad(f)(x), 2 * x)
    else:
        torch.func.jvp(f, (x,), (x,))
    assert seen == [L]


@pytest.mark.mpi(2)
def test_ranks_that_disagree():
    """One error, in the same words but for the rank, on every rank."""
    P = dd.Partition((N, 1))
    last = R == N - 1
    good = torch.zeros(2, 3)
    for bad, words in (
        (torch.zeros(2, 4), "the blocks do not fit together in dim 1"),
        (torch.zeros(2, 3, 1), "expected a tensor of 2 dims, got shape \\(2, 3, 1\\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (None, "not every rank's input fits"),
    ):
        with pytest.raises(AgreementError, match=words) as caught:
            F.layout_of(bad if last else good, P)
        error = caught.value
        assert error.op == "layout_of" and error.next_step and "Partition" in str(error)
        assert len(set(dd.testing.gather_objects((error.problem, str(error.expected), str(error.actual))))) == 1


def test_what_is_no_block():
    L = dd.Layout(dd.Partition((1, N)), (2, N))
    with pytest.raises(ShapeError, match="layout_of: x is not this rank's block"):
        F.layout_of(torch.zeros(2, 5), L)
    for place, others in ((None, ()), (L, ("everywhere",))):
        with pytest.raises(PartitionError, match="layout_of") as caught:
            F.layout_of(torch.zeros(2, 1), place, *others)
        assert caught.value.next_step


def test_a_compiled_function_refuses_it():
    P = dd.Partition((N, 1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ask for layouts outside of compiled functions"):
        torch.compile(lambda x: x * F.layout_of(x, P).shape[0], backend="eager", fullgraph=True)(torch.zeros(1, 2))
