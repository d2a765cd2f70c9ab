"""The inner-product test of every map and its adjoint, and dd.testing's own check of all that a linear map must do."""

import pytest
import torch
from registry import each_case, needs

import distdl as dd
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
