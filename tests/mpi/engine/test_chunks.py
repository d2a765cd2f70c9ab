"""Long messages go in chunks."""

import pytest
import torch
from registry import each_case, integers

import distdl as dd
import distdl.functional as F


@pytest.fixture
def small_chunks(monkeypatch, fresh_programs):
    host = dd.world().host
    if not hasattr(host, "chunk"):
        pytest.skip("a world of one rank without MPI sends nothing")
    monkeypatch.setattr(type(host), "chunk", 16)


@each_case(lambda name: name.startswith(("repartition", "halo", "all_", "reduce", "invariant")), thin=True)
def test_chunks(case, small_chunks):
    """Case 24: the arithmetic of messages beyond the limit, with a limit of 16 bytes."""
    X = integers(case.shape)
    y = case.map(case.local(X))
    assert y.numel() == 0 if case.get(X, case.rank) is None else torch.equal(y, case.wanted(X))


def test_chunks_that_do_not_divide(small_chunks):
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    for count in range(12):
        for dtype in (torch.uint8, torch.float32, torch.complex128):
            x = torch.full((count,), r + 1, dtype=dtype)
            assert torch.equal(F.shift(x, P, 0), torch.full((count,), (r - 1) % n + 1, dtype=dtype))
            assert torch.equal(F.all_sum_reduce(x, P), torch.full((count,), n * (n + 1) // 2, dtype=dtype))
