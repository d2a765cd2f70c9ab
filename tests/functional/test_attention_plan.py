"""What attention plans, without ranks."""

import pytest

import distdl as dd
from distdl.functional.attention_plan import group


@pytest.mark.parametrize("u", [2, 4])
def test_a_group_is_neighbours(u):
    """A rank shares out the heads of rows among which its own are: only what changes hands within a group travels."""
    P = dd.Partition((2, 1, 4, 1), (3, 1, 2, 0, 7, 5, 6, 4))
    L = dd.Layout(P, (2, 5, 11, 3), (None, None, (4, 0, 2, 5), None))
    there = group(L, u)
    heads = {}
    for rank in P.ranks:
        (batch, _, (a, b), _), (found, (h0, h1), (lo, hi), _) = L.box(rank), there.box(rank)
        assert batch == found and (a == b or lo <= a < b <= hi), rank
        heads.setdefault((batch, lo, hi), []).append((h0, h1))
    assert all(sorted(mine)[0][0] == 0 and sorted(mine)[-1][1] == 5 and len(mine) == u for mine in heads.values())
