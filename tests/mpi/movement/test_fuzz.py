"""Fuzz over MPI: random movements x kinds x pairs of transforms, as the functions that users call, against serial
torch.

All ranks draw the same examples by a generator of their own (hypothesis would shrink on one rank only). The slow run
has more than 500 cases at 4 ranks.
"""

import random
from collections import Counter

import pytest
import torch
from fuzzing import BUILDERS, DTYPES, KINDS, PAIRS, Spmd, compare, describe, draw, seed_of

import distdl as dd
import distdl.functional as F

pytestmark = pytest.mark.mpi(3)


def check(name, kind, pair, i) -> bool:
    """One case, in one of its spellings or as the map itself. Whether there is one on so many ranks."""
    n = dd.world().size
    rng = random.Random(seed_of(name, kind, pair, n, i))
    case = draw(name, kind, rng, n, zero=i % 8 == 7)
    if case is None:
        return False
    calls = {"map": case.map, **case.calls}
    spelling, dtype, seed = rng.choice(sorted(calls)), rng.choice(DTYPES), rng.randrange(1000)
    faults = compare(case, pair, Spmd(case, calls[spelling], seed), dtype, seed)
    dd.testing.collective_assert(not faults, f"{faults} in {spelling} of {describe(case, pair, dtype)}")
    return True


@pytest.mark.parametrize("name", BUILDERS)
def test_one_pair_of_every_kind(name):
    for k, kind in enumerate(KINDS):
        pair = list(PAIRS)[(3 * list(BUILDERS).index(name) + k + dd.world().size) % len(PAIRS)]
        check(name, kind, pair, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_every_cell(name, capsys):
    n, cells = dd.world().size, Counter()
    for kind in KINDS:
        for pair in PAIRS:
            for i in range(2) if n <= 4 else [7]:
                cells[kind] += check(name, kind, pair, i)
    with capsys.disabled():
        if dd.world().rank == 0:
            print(f"\nfuzz {name}, {n} ranks: " + ", ".join(f"{kind} {cells[kind]} cases" for kind in KINDS), end="")
    if n == 4:
        assert sum(cells.values()) == 2 * len(KINDS) * len(PAIRS)
    assert 2 * len(BUILDERS) * len(KINDS) * len(PAIRS) >= 500


# ---------------------------------------------------------------- failures that were found, each by name


@pytest.mark.parametrize("junk", [(), (3,), (2, 1), (1, 2, 1)], ids=str)
def test_reduce_scatter_ignores_what_a_rank_outside_passes(junk):
    """It asked for a tensor of as many dims as the partition has, on a rank that has none."""
    P = dd.Partition((2,), (2, 1))
    x = torch.tensor([1.0, 2.0, 4.0]) if P.active else torch.ones(junk)
    x.requires_grad_()
    for dims in (None, {0: 0}):
        y = F.reduce_scatter(x, P, dims)
        y.sum().backward()
        assert y.tolist() == {2: [2.0, 4.0], 1: [8.0]}.get(dd.world().rank, y.tolist()) and (P.active or not y.numel())
        with pytest.raises(dd.errors.PartitionError, match="the world has"):
            F.reduce_scatter(x, dd.Partition((2,), (dd.world().size, 1)), dims)
