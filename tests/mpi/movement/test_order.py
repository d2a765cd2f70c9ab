"""Movements of groups that share ranks, and many between two: messages stay apart, whatever the order of groups."""

import pytest
import torch
from registry import here, needs

import distdl as dd
import distdl.functional as F


@needs(2)
def test_case_39_groups_in_an_order_that_differs_by_rank():
    """Collectives of overlapping groups: every rank calls its own groups in one global order, whatever their order of
    creation."""
    n, r, P = here()
    for _ in range(3):
        total = 0.0
        for start in range(n):
            group = dd.Partition((2,), sorted({start, (start + 1) % n})) if n > 2 or start == 0 else None
            if group is not None and group.active:
                total += F.all_sum_reduce(torch.tensor([float(r + 1)]), group).item()
        assert total == (2 * (r + 1) + ((r + 1) % n + 1) + ((r - 1) % n + 1) if n > 2 else 3)
    even = r % 2 == 0 and r + 1 < n
    pairs = [dd.Partition((2,), (k, k + 1)) for k in range(0, n - 1, 2)]
    mine = [p for p in pairs if p.active]
    for p in mine:
        back = F.permute(torch.tensor([float(r)]), p, [p.ranks, p.ranks[::-1]])
        assert back.item() == (r + 1 if even else r - 1)


@needs(3)
def test_case_39_box_plans_of_overlapping_groups():
    """Point-to-point movements of groups that share ranks, in the ring order that would deadlock a blocking library."""
    n, r, P = here()
    groups = [dd.Partition((2,), (k, (k + 1) % n)) for k in range(n)]
    x = torch.tensor([float(r)])
    for g in groups:
        y = F.shift(x, g, 0)
        if g.active:
            assert y.item() == next(k for k in g.ranks if k != r)


@needs(2)
@pytest.mark.parametrize("swap", [False, True])
def test_movements_between_two_ranks_keep_their_order(swap):
    """Many small movements back to back, waiting ranks far behind: sequence numbers keep messages apart."""
    n, r, _ = here()
    P = dd.Partition((2,), (1, 0) if swap else None)
    if r > 1:
        return
    for k in range(50):
        assert F.shift(torch.full((k % 4 + 1,), float(100 * k + r)), P, 0).tolist() == [float(100 * k + 1 - r)] * (
            k % 4 + 1
        )
