"""The inner-product test of every map and its adjoint, and dd.testing's own check of all that a linear map must do."""

import pytest
import torch
from registry import each_case, here, needs
from torch.func import vjp

import distdl as dd
import distdl.functional as F
from distdl.testing import check_map, dot_test


@each_case()
def test_dot(case):
    for A in (case.map, case.map.T):
        assert dot_test(A) <= 1e-13
        dot_test(A, dtype=torch.complex128)
    assert case.map.T.T is case.map and case.map.plan.T.T is case.map.plan


@each_case(thin=True)
def test_check_map(case):
    check_map(case.map)
    check_map(case.map.T)


@needs(2)
def test_dot_test_finds_a_wrong_adjoint():
    """The test of the test: an adjoint that forgets the neighbour's share."""
    P = dd.Partition((dd.world().size,))
    A = dd.maps.all_sum_reduce(P, (3,))
    wrong = dd.linear_map(A, lambda y: y.clone(), (3,), (3,), ranks=P.ranks)
    with pytest.raises(AssertionError, match="dot test"):
        dot_test(wrong)
    right = dd.linear_map(A, A, (3,), (3,), ranks=P.ranks)
    dot_test(right)
    check_map(right)


@needs(2)
def test_compositions():
    n = dd.world().size
    rows, columns = dd.Layout(dd.Partition((n, 1)), (5, 4)), dd.Layout(dd.Partition((1, n)), (5, 4))
    A, B = dd.maps.repartition(rows, columns), dd.maps.halo_exchange(dd.HaloSpec(columns, 1, boundary="circular"))
    C = B @ A
    assert C.plans == (A.plan, B.plan) and C.T.plans == (B.plan.T, A.plan.T)
    assert C.T.T == C and (C.in_shape, C.out_shape) == (A.in_shape, B.out_shape)
    check_map(C)
    check_map(C.T)
    P = dd.Partition((n,))
    both = dd.maps.mark_varying(P, (3,)) @ dd.maps.invariant_sum(P, (3,))
    check_map(both)
    with pytest.raises(dd.errors.PartitionError, match="compose"):
        A @ B
    with pytest.raises(dd.errors.PartitionError, match="invariant"):  # an invariant value is no varying input
        dd.maps.shift(P, 0, 1, True, (3,)) @ dd.maps.invariant_sum(P, (3,))


@needs(3)
def test_a_composition_is_one_on_every_rank_or_on_none():
    """The ranks in another order have the same blocks: the placeholder of a rank outside has another shape then."""
    first = dd.Layout(dd.Partition((1, 2), (2, 0)), (3, 3))
    second = dd.Layout(dd.Partition((1, 2), (0, 2)), (3, 3), (None, (1, 2)))
    C = dd.maps.roll(second, 0, 1) @ dd.maps.roll(first, 0, 1)
    check_map(C)
    check_map(C.T)
    other = dd.Layout(dd.Partition((1, 2), (0, 2)), (3, 3), (None, (2, 1)))  # another block on the two that have one
    empty = dd.Layout(dd.Partition((1, 3), (2, 0, 1)), (3, 3), (None, (2, 1, 0)))  # one more rank, with an empty one
    for last in (other, empty):
        with pytest.raises(dd.errors.PartitionError, match="do not compose") as caught:
            dd.maps.roll(last, 0, 1) @ dd.maps.roll(first, 0, 1)
        assert "expected varying (3, " in str(caught.value)


def test_case_1_all_sum_against_invariant_sum():
    n, r, P = here()
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    F.all_sum_reduce(x, P).sum().backward()
    assert x.grad.tolist() == [n] * 3
    x.grad = None
    F.invariant_sum(x, P).sum().backward()
    assert x.grad.tolist() == [1] * 3


def test_worked_example_of_the_convention():
    """x = (1, 2), L = invariant_sum(x²) = 5: gradient (2, 4), not (4, 8)."""
    n, r, P = here()
    x = torch.tensor(r + 1.0, dtype=torch.float64, requires_grad=True)
    loss = F.invariant_sum(x**2, P)
    loss.backward()
    assert loss.item() == sum((k + 1) ** 2 for k in range(n)) and x.grad.item() == 2 * (r + 1)


def test_case_2_rank_dependent_losses():
    n, r, P = here()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((r + 1) * F.all_gather(x, P).sum()).backward()
    assert x.grad.tolist() == [n * (n + 1) / 2] * 2


@needs(3)
def test_case_4_broadcast_over_a_group_without_rank_0():
    n, r, P = here()
    root, group = dd.Partition((1,), (1,)), dd.Partition((n - 1,), range(1, n))
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((r + 1) * F.broadcast(x, root, group)).sum().backward()
    assert x.grad.tolist() == [sum(range(2, n + 1)) if r == 1 else 0] * 2


@needs(2)
def test_case_8_messages_of_other_lengths_both_ways():
    n, r, P = here()
    size = {0: 3, 1: 5}.get(r, 2)
    x = torch.full((size,), r + 1.0, dtype=torch.float64)
    y, pull = vjp(lambda x: F.permute(x, P, [(0, 1), (1, 0)]), x)
    assert y.tolist() == ([2.0] * 5 if r == 0 else [1.0] * 3 if r == 1 else [0.0] * 2)
    assert pull(y)[0].tolist() == (x.tolist() if r < 2 else [0.0] * 2)


def test_case_9_halo_adjoint_adds():
    n, r, P = here()
    L = dd.Layout(P, (2 * n,))
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    F.halo_exchange(x, dd.HaloSpec(L, 1)).sum().backward()
    assert x.grad.tolist() == [1 + (r > 0), 1 + (r < n - 1)]
